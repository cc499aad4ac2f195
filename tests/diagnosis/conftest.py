"""Makes the scenario generator importable, and starts the embedded host runtime in virtual time."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="module")
def runtime():
    from hostruntime import Runtime

    return Runtime()


@pytest.fixture(scope="session")
def shared_data() -> Path:
    import os

    default = Path(__file__).resolve().parents[3] / "shared" / "data"
    folder = Path(os.environ.get("KVPROBE_SHARED_DATA", default))
    if not folder.is_dir():
        pytest.skip("the shared recordings are not here")
    return folder
