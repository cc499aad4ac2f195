"""A small package on the path, with metadata, that stands for "a server in version X": the frame is what is tested."""

import importlib
import sys

import pytest

from kvprobe.instrument import installation, registry
from kvprobe.instrument.adapter import Adapter, Target

SOURCE = """
class Engine:
    def copy(self, job, blocks):
        if blocks < 0:
            raise ValueError("negative")
        self.jobs = getattr(self, "jobs", []) + [job]
        return blocks * 2

    @staticmethod
    def size(blocks):
        return blocks * 10

    @classmethod
    def make(cls):
        return cls()

def helper(x, *, scale=1):
    return x * scale
"""


class Recorder(Adapter):
    name, versions = "toyengine.copies", ">=1.0,<2.0"
    upstream = (">=2.0", "since 2.0")
    targets = (
        Target("toyengine.engine", "Engine.copy", ("job", "blocks")),
        Target("toyengine.engine", "Engine.size", ("blocks",)),
        Target("toyengine.engine", "Engine.make", ()),
        Target("toyengine.engine", "helper", ("x",)),
    )
    fail = False
    fail_after = False

    def patch(self, patcher, module):
        self.seen = []

        def around(call, *args, **kwargs):
            if type(self).fail:
                raise RuntimeError("kvprobe's own mistake")
            result = call()
            if type(self).fail_after:
                raise RuntimeError("kvprobe's own mistake, afterwards")
            self.seen.append(result)
            return result

        for target in self.targets:
            owner = module
            *path, name = target.path.split(".")
            for part in path:
                owner = getattr(owner, part)
            patcher.wrap(owner, name, around)


@pytest.fixture(autouse=True)
def quiet_environment(monkeypatch):
    for name in ("KVPROBE", "KVPROBE_RUN", "KVPROBE_FIX"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def toyengine(tmp_path, monkeypatch):
    """Write the package in a version and register its adapter; yields a function `(version, source) -> None`."""

    def write(version="1.5", source=SOURCE):
        package = tmp_path / "toyengine"
        package.mkdir(exist_ok=True)
        (package / "__init__.py").write_text("")
        (package / "engine.py").write_text(source)
        info = tmp_path / f"toyengine-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: toyengine\nVersion: {version}\n")
        importlib.invalidate_caches()

    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(registry.SERVERS, "toyengine", registry.Server("toyengine", ("toyengine",), ">=1.0,<3.0"))
    adapters = type(sys)("toyengine_adapters")
    adapters.ADAPTERS = (Recorder,)
    monkeypatch.setitem(sys.modules, "kvprobe.patches.toyengine", adapters)
    monkeypatch.setattr(Recorder, "fail", False)
    monkeypatch.setattr(Recorder, "fail_after", False)
    write.source = SOURCE
    yield write
    installation.uninstall("toyengine")
    for name in [n for n in sys.modules if n == "toyengine" or n.startswith("toyengine.")]:
        del sys.modules[name]
