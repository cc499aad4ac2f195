"""Makes the scenario generator importable, and starts the embedded host runtime in virtual time."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="module")
def runtime():
    from hostruntime import Runtime

    return Runtime()
