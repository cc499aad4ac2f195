"""Tests that need a server's own package installed; `make test-servers` installs them in an environment of its own."""

import pytest

from kvprobe.instrument import installation


@pytest.fixture(autouse=True)
def quiet_environment(monkeypatch):
    for name in ("KVPROBE", "KVPROBE_RUN", "KVPROBE_FIX"):
        monkeypatch.delenv(name, raising=False)
    yield
    installation.uninstall()
