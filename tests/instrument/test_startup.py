"""The start-up hook: checks in once, costs nothing when not asked for, lets adapters in at a server's import."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

import kvprobe.instrument
from kvprobe.instrument import compatibility, published, registry
from kvprobe.instrument.adapter import Target
from kvprobe.native import build
from kvprobe.probe.ring import read_ring

CARRIED = Path(kvprobe.instrument.__file__).parent / "carried"
sys.path.insert(0, str(CARRIED))
import kvprobe_startup as startup  # noqa: E402

sys.path.remove(str(CARRIED))


def run(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("KVPROBE") and k != "LD_PRELOAD"}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env={**clean, **env}, capture_output=True, text=True, check=True)


def test_a_process_checks_in_exactly_once(tmp_path: Path) -> None:
    run("import kvprobe_startup; kvprobe_startup.start()", KVPROBE_RUN=str(tmp_path), RANK="3")
    (path,) = tmp_path.glob("checkin-*.json")
    checkin = json.loads(path.read_text())
    assert checkin["rank"] == {"RANK": "3"} and checkin["argv"][1] == "-c" and not checkin["preloaded"]


COPYING = """
import ctypes, sys
import kvprobe_startup; kvprobe_startup.start()
runtime = ctypes.CDLL(sys.argv[1])
device, host = ctypes.c_void_p(), ctypes.c_void_p()
assert not runtime.cudaMalloc(ctypes.byref(device), ctypes.c_size_t(64))
assert not runtime.cudaHostAlloc(ctypes.byref(host), ctypes.c_size_t(64), 0)
for _ in range(9):
    assert not runtime.cudaMemcpyAsync(device, host, ctypes.c_size_t(64), 1, None)
"""


@pytest.mark.parametrize("owner", ["ours", "open to others"])
def test_where_ld_preload_was_taken_away_it_loads_the_interposer(tmp_path: Path, owner: str) -> None:
    build.build()
    library = Path(shutil.copy(build.LIB / "libkvprobe_interpose.so", tmp_path))
    library.chmod(0o755 if owner == "ours" else 0o777)
    folder = tmp_path / "run"
    folder.mkdir(mode=0o700)
    env = {"KVPROBE_RUN": str(folder), "KVPROBE_INTERPOSER": str(library), "PYTHONPATH": str(CARRIED)}
    run(COPYING.replace("sys.argv[1]", repr(str(build.LIB / "libkvprobe_hostrt.so"))), **env)
    (checkin,) = [json.loads(path.read_text()) for path in folder.glob("checkin-*.json")]
    calls = [read_ring(path).calls()["cudaMemcpyAsync"][0] for path in folder.glob("*.kvp")]
    assert (checkin["preloaded"], calls) == ((True, [9]) if owner == "ours" else (False, []))


@pytest.mark.parametrize("env", [{}, {"KVPROBE_RUN": ""}])
def test_without_a_run_nothing_is_imported(env: dict[str, str]) -> None:
    done = run("import sys; print([m for m in sys.modules if 'kvprobe' in m and 'editable' not in m])", **env)
    assert done.stdout == "[]\n"


def test_the_kill_switch_holds(tmp_path: Path) -> None:
    run("pass", KVPROBE_RUN=str(tmp_path), KVPROBE="off")
    assert not list(tmp_path.iterdir())


def test_in_a_run_a_process_imports_no_package_of_kvprobe(tmp_path: Path) -> None:
    done = run(
        "import sys; print(sorted(m for m in sys.modules if 'kvprobe' in m and 'editable' not in m), "
        "'json' in sys.modules)",
        KVPROBE_RUN=str(tmp_path),
    )
    assert done.stdout == "['kvprobe_startup'] False\n"


def test_a_folder_that_is_gone_is_no_trouble(tmp_path: Path) -> None:
    done = run("print('fine')", KVPROBE_RUN=str(tmp_path / "absent"))
    assert (done.stdout, done.stderr) == ("fine\n", "")


def test_adapters_come_in_when_a_server_is_imported(tmp_path: Path) -> None:
    package = tmp_path / "packages" / "transformers"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("NAME = 'stand-in'\n")
    code = (
        "import sys\nbefore = 'kvprobe.instrument' in sys.modules\nimport transformers\n"
        "print(before, 'kvprobe.instrument' in sys.modules, transformers.NAME)\n"
    )
    done = run(code, KVPROBE_RUN=str(tmp_path), PYTHONPATH=str(package.parent))
    assert done.stdout == "False True stand-in\n"


CACHE = """
class Cache:
    layers = ()
    def prefetch(self, layer_idx, only_non_sliding=True): return ("prefetch", layer_idx)
    def offload(self, layer_idx, only_non_sliding=True): return ("offload", layer_idx)
"""
OFFLOADS = """
import inspect, json, sys
from transformers import cache_utils
from transformers.cache_utils import Cache
def now():
    here = "kvprobe.instrument.installation" in sys.modules
    return [here, hasattr(Cache.prefetch, "__kvprobe__"), hasattr(Cache.offload, "__kvprobe__")]
seen = {"imported": now(), "signature": str(inspect.signature(Cache.prefetch)), "name": Cache.prefetch.__qualname__,
        "loader": type(cache_utils.__loader__).__name__ + type(cache_utils.__spec__.loader).__name__,
        "source": inspect.getsource(cache_utils) == open(cache_utils.__file__).read()}
from kvprobe.instrument import plugin
plugin()
seen["plugin"] = now()
seen["answer"] = Cache().offload(3)
seen["touched"] = now()
seen["again"] = Cache().prefetch(4)
seen["finder"] = [type(finder).__name__ for finder in sys.meta_path].count("_Waiting")
print(json.dumps(seen))
"""


def server(folder: Path, version: str | None, source: str = CACHE) -> Path:
    """A stand-in of transformers, with the one module that kvprobe watches there."""
    package = folder / "packages" / "transformers"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "cache_utils.py").write_text(source)
    if version is not None:
        about = package.parent / f"transformers-{version}.dist-info"
        about.mkdir()
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: transformers\nVersion: {version}\n")
    return package.parent


def states(folder: Path) -> dict[str, str]:
    lines = [json.loads(line) for path in folder.glob("events-*.jsonl") for line in path.read_text().splitlines()]
    return {line["adapter"]: line["state"] for line in lines if line["kind"] == "state"}


def test_a_server_that_offloads_nothing_imports_nothing_of_kvprobe(tmp_path: Path) -> None:
    code = "import importlib.util; importlib.util.find_spec('transformers')\n"  # as other servers ask for it
    code += "import sys, transformers.cache_utils; print([name for name in sys.modules if name.startswith('kvprobe')])"
    done = run(code, KVPROBE_RUN=str(tmp_path), PYTHONPATH=str(server(tmp_path, "5.1.0")))
    assert done.stdout == "['kvprobe_startup']\n"
    (events,) = tmp_path.glob("events-*.jsonl")
    (told,) = map(json.loads, events.read_text().splitlines())
    assert (told["kind"], told["adapter"], told["state"]) == ("state", "transformers", "waiting")


def test_the_first_touch_of_an_offload_lets_the_adapters_in(tmp_path: Path) -> None:
    done = run(OFFLOADS, KVPROBE_RUN=str(tmp_path), PYTHONPATH=str(server(tmp_path, "5.1.0")))
    seen = json.loads(done.stdout)
    assert seen["imported"] == seen["plugin"] == [False, False, False]
    assert seen["signature"] == "(self, layer_idx, only_non_sliding=True)" and seen["name"] == "Cache.prefetch"
    assert seen["loader"] == 2 * "SourceFileLoader" and seen["source"]
    assert seen["answer"] == ["offload", 3] and seen["again"] == ["prefetch", 4]
    assert seen["touched"] == [True, True, True] and not seen["finder"]
    assert states(tmp_path)["transformers.cache"] == "applied"
    calls = [json.loads(line) for path in tmp_path.glob("events-*.jsonl") for line in path.read_text().splitlines()]
    assert [one["call"] for one in calls if one["kind"] == "call"] == ["Cache.offload", "Cache.prefetch"], (
        "none is lost"
    )


@pytest.mark.parametrize(
    ("version", "source", "said"),
    [
        ("6.0.0", CACHE, "skipped"),  # a release that nobody knows
        (None, CACHE, "skipped"),  # no release at all
        ("5.1.0", CACHE.replace("prefetch", "fetch"), "skipped"),  # a release that does not have what it should
    ],
)
def test_what_cannot_be_told_by_its_touch_is_told_at_its_import(
    tmp_path: Path, version: str | None, source: str, said: str
) -> None:
    packages = server(tmp_path, version, source)
    run("import transformers.cache_utils", KVPROBE_RUN=str(tmp_path), PYTHONPATH=str(packages))
    assert states(tmp_path)["transformers.cache"] == said


def test_what_a_release_cannot_have_lets_nothing_in(tmp_path: Path) -> None:
    """Another server that asks whether there is accelerate, and a transformers older than one of its functions."""
    packages = server(tmp_path, "5.19.0")
    module = packages.joinpath("transformers", "generation", "continuous_batching", "offloading_manager.py")
    module.parent.mkdir(parents=True)
    for folder in (module.parent, module.parent.parent):
        folder.joinpath("__init__.py").touch()
    module.write_text("class OffloadingManager:\n    pass\n")
    code = "import importlib.util, sys; print(importlib.util.find_spec('kvbm'))\n"
    code += "import transformers.generation.continuous_batching.offloading_manager\n"
    code += "print([name for name in sys.modules if name.startswith('kvprobe')])"
    done = run(code, KVPROBE_RUN=str(tmp_path), PYTHONPATH=f"{CARRIED}:{packages}")
    assert done.stdout == "None\n['kvprobe_startup']\n"
    assert states(tmp_path) == {"transformers": "waiting"}


def test_a_server_that_is_asked_for_before_it_can_be_found_is_watched(tmp_path: Path) -> None:
    packages = server(tmp_path, "5.1.0")
    code = "import importlib.util, sys; print(importlib.util.find_spec('transformers'))\n"
    code += f"sys.path.append({str(packages)!r}); importlib.invalidate_caches(); import transformers.cache_utils"
    assert run(code, KVPROBE_RUN=str(tmp_path), PYTHONPATH=str(CARRIED)).stdout == "None\n"
    assert states(tmp_path) == {"transformers": "waiting"}


VERSIONS = ["0.10.2", "0.11", "0.11.0", "0.11.0+cpu", "0.33.0.post1", "0.33.1rc2", "0.34", "0.34.0rc1", "1.0", "0.9"]


@pytest.mark.parametrize("version", [*VERSIONS, "5.0.0", "5.23.0", "6.0", "6.0.0.dev0", "10.0"])
@pytest.mark.parametrize("versions", sorted({row[2] for row in startup.SERVERS.values()}))
def test_it_reads_versions_as_packaging_does(version: str, versions: str) -> None:
    assert startup._holds(versions, version) == SpecifierSet(versions).contains(version, prereleases=True)


def test_what_is_watched_for_a_touch_is_what_adapters_touch() -> None:
    for name, server in registry.SERVERS.items():
        modules = {target.module for kind in registry.adapter_classes(name) for target in kind.targets}
        assert set(server.touched) <= modules


def test_a_release_has_what_is_watched_for_a_touch() -> None:
    """Of the releases whose files are here; a module that a release lacks nobody imports."""
    found = 0
    for server in registry.SERVERS.values():
        trees = (
            tree
            for distribution in server.distributions
            for tree in published.cache_folder().glob(f"trees/{distribution.replace('-', '_')}-*/")
        )
        for tree in trees:
            if not startup._holds(server.versions, tree.name.rpartition("-")[2]):
                continue
            version = tree.name.rpartition("-")[2]
            for module, paths in server.touched.items():
                if not startup._holds(startup.SINCE.get(module, server.versions), version):
                    continue
                if not tree.joinpath(*module.split(".")).with_suffix(".py").exists():
                    continue
                found += 1
                for path in paths:
                    assert compatibility.problem(Target(module, path), tree) is None
    if not found:
        pytest.skip(f"no server's files are in {published.cache_folder()} yet (KVPROBE_DOWNLOAD=1 fetches some)")


@pytest.mark.parametrize(
    "value",
    [
        {"a": 'quo"te\\ and \n', "b": ["ü", "日本", "\U0001f600"], "c": True, "d": -5, "e": {}},
    ],
)
def test_its_json_is_json(value: object) -> None:
    assert json.loads(startup._json(value)) == value


def test_an_argument_that_is_not_utf8_is_json_as_well() -> None:
    assert json.loads(startup._json([os.fsdecode(b"a\xff")])) == ["a?"]
