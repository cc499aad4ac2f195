"""What `kvprobe run` carries into a Python of another environment, and that it gives way there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import venv
from pathlib import Path

import pytest

import kvprobe.instrument

INSTRUMENT = Path(kvprobe.instrument.__file__).parent
SERVER = "def prefetch(layer): return layer\n"
ADAPTER_STATES = """
import sys, transformers, transformers.cache_utils
transformers.cache_utils.Cache().prefetch(0)
print(sorted(n for n in ("kvprobe.instrument", "wrapt") if n in sys.modules), end=" ")
print([p for p in sys.path if "carried" in p], sys.modules["sitecustomize"].__name__)
"""


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python of an environment that has neither kvprobe nor anything that kvprobe needs, and a stand-in server."""
    root = tmp_path_factory.mktemp("other")
    venv.create(root / "env", with_pip=False)
    site = next((root / "env" / "lib").glob("python*/site-packages"))
    (site / "transformers").mkdir()
    (site / "transformers" / "__init__.py").write_text("")
    (site / "transformers" / "cache_utils.py").write_text(
        "class Cache:\n    layers = ()\n    def prefetch(self, layer_idx, only_non_sliding=True): pass\n"
        "    def offload(self, layer_idx, only_non_sliding=True): pass\n"
    )
    (site / "transformers-5.1.0.dist-info").mkdir()
    (site / "transformers-5.1.0.dist-info" / "METADATA").write_text("Name: transformers\nVersion: 5.1.0\n")
    return root / "env" / "bin" / "python"


def clean(**more: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("KVPROBE", "PYTHON")) and k != "LD_PRELOAD"}
    return {**kept, **more}


def run(folder: Path, *words: str, **env: str) -> tuple[subprocess.CompletedProcess[str], list[str], list[dict]]:
    """The command under `kvprobe run`: how it ended, the observer's warnings, its adapters' states."""
    command = [sys.executable, "-m", "kvprobe", "run", "-o", str(folder), "--", *words]
    done = subprocess.run(command, env=clean(**env), capture_output=True, text=True, check=False)
    until = time.monotonic() + 120
    while not (folder / "end.json").exists() and time.monotonic() < until:
        time.sleep(0.05)
    warnings = json.loads((folder / "end.json").read_text())["warnings"]
    lines = [json.loads(line) for path in folder.glob("events-*.jsonl") for line in path.read_text().splitlines()]
    return done, warnings, [line for line in lines if line["kind"] == "state"]


def test_adapters_act_in_another_environment(other: Path, tmp_path: Path) -> None:
    done, _, states = run(tmp_path / "run", str(other), "-c", ADAPTER_STATES)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "['kvprobe.instrument', 'wrapt'] [] sitecustomize\n"
    assert ("transformers.cache", "applied") in {(s["adapter"], s["state"]) for s in states}


def test_the_environments_own_sitecustomize_runs(other: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "sitecustomize.py").write_text("import sys\nsys.mine = 'ran'\n")
    code = "import sys; print(sys.mine, sys.modules['sitecustomize'].__file__)"
    done, _, _ = run(tmp_path / "run", str(other), "-c", code, PYTHONPATH=str(tmp_path / "mine"))
    assert done.stdout == f"ran {tmp_path / 'mine' / 'sitecustomize.py'}\n", done.stderr


def test_a_python_that_cannot_be_reached_is_named(other: Path, tmp_path: Path) -> None:
    code = "import time; time.sleep(0.5); print('fine')"
    done, warnings, _ = run(tmp_path / "run", str(other), "-I", "-c", code)
    assert done.stdout == "fine\n"
    assert any(line.startswith("no adapter acted in the command: its Python did not load") for line in warnings)


def test_the_kill_switch_is_named_and_nothing_else_is_blamed(other: Path, tmp_path: Path) -> None:
    done, warnings, _ = run(tmp_path / "run", str(other), "-c", "print('fine')", KVPROBE="off")
    assert done.stdout == "fine\n"
    assert warnings == ["KVPROBE=off is set in this environment, so kvprobe recorded nothing; unset it to record"]


@pytest.mark.parametrize("env", [{"KVPROBE": "on"}, {"KVPROBE_FIX": "auto"}, {"KVPROBE": "off"}, {}])
def test_the_environment_alone_reaches_every_server(other: Path, env: dict[str, str]) -> None:
    """As the start-up lines in site-packages do it; KVPROBE=on needs no run folder."""
    line = (INSTRUMENT / "zz_kvprobe.pth").read_text()
    touch = "import transformers.cache_utils as c\nc.Cache().prefetch(0)"
    code = f"{line}\n{touch}\nprint(hasattr(c.Cache.prefetch, '__kvprobe__'))"
    folders = {str(Path(__import__(name).__file__).parents[1]) for name in ("kvprobe", "wrapt", "packaging")}
    more = {**env, "PYTHONPATH": str(INSTRUMENT / "carried"), "KVPROBE_CARRY": os.pathsep.join(folders)}
    # -S: the start-up lines alone, not sitecustomize; so the server's place is named
    packages = next(other.parents[1].glob("lib/python*/site-packages"))
    more["PYTHONPATH"] += os.pathsep + str(packages)
    done = subprocess.run([str(other), "-S", "-c", code], env=clean(**more), capture_output=True, text=True, check=True)
    assert done.stdout == f"{'off' not in env.values() and bool(env)}\n"
    assert ("kvprobe: transformers.cache applied" in done.stderr) == (done.stdout == "True\n")
