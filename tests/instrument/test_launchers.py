"""`kvprobe run` and `kvprobe attach` see the same calls, whichever way a program is launched, and all of them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from kvprobe.native import build
from kvprobe.probe.processes import alive
from kvprobe.probe.ring import read_ring

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]
KVPROBE = [sys.executable, "-m", "kvprobe"]
HOSTRT = build.LIB / "libkvprobe_hostrt.so"
PROGRAM = """
#include <stddef.h>
#include <stdlib.h>
int cudaMalloc(void **, size_t), cudaHostAlloc(void **, size_t, unsigned);
int cudaMemcpyAsync(void *, const void *, size_t, int, void *);
int main(int argc, char **argv) {
    void *gpu, *cpu;
    if (argc < 2 || cudaMalloc(&gpu, 64) || cudaHostAlloc(&cpu, 64, 0)) return 1;
    for (int i = 0; i < atoi(argv[1]); i++)
        if (cudaMemcpyAsync(gpu, cpu, 64, 1, NULL)) return 1;
    return 0;
}
"""
LEAF = f"""
import ctypes, os, signal, sys
def copies(n):
    runtime = ctypes.CDLL({str(HOSTRT)!r})
    device, host = ctypes.c_void_p(), ctypes.c_void_p()
    assert not runtime.cudaMalloc(ctypes.byref(device), ctypes.c_size_t(64))
    assert not runtime.cudaHostAlloc(ctypes.byref(host), ctypes.c_size_t(64), 0)
    for _ in range(n):
        assert not runtime.cudaMemcpyAsync(device, host, ctypes.c_size_t(64), 1, None)
if __name__ == "__main__":
    copies(int(sys.argv[1]))
"""
# Each ends the server that it is loaded by: gunicorn's worker its master, uvicorn's worker itself.
GUNICORN = "import copying_leaf\nimport os, signal\ndef app(environ, start): return []\n" + (
    "def post_worker_init(worker):\n    copying_leaf.copies({n})\n    os.kill(os.getppid(), signal.SIGTERM)\n"
)
UVICORN = (
    "import copying_leaf, os, signal\nasync def app(scope, receive, send):\n    await receive()\n"
    "    copying_leaf.copies({n})\n    await send(dict(type='lifespan.startup.complete'))\n"
    "    os.kill(os.getpid(), signal.SIGTERM)\n    await receive()\n"
    "    await send(dict(type='lifespan.shutdown.complete'))\n"
)
RAY = (
    "import copying_leaf, ray\nray.init(num_cpus=1, include_dashboard=False, logging_level='error')\n"
    "copy = ray.remote(lambda: copying_leaf.copies({n}))\nray.get(copy.remote())\nray.shutdown()\n"
)
READ_ONLY = 'mount --bind "$1" "$1" && mount -o remount,bind,ro / && shift && exec "$@"'


@dataclass(frozen=True)
class Launcher:
    """A way to start the copying program.

    Attributes:
        way: as in launching.py.
        words: the command; LEAF stands for the program and its number of copies, PYTHON_LEAF for the one in Python.
        environment: what it is started with; None: its parent's.
        needs: programs, modules or files without which it is left out.
        processes: how many make the copies.
        seen: whether they can be recorded.
    """

    way: str = "run"
    words: tuple[str, ...] = ("LEAF",)
    environment: dict[str, str] | None = None
    needs: tuple[str, ...] = ()
    processes: int = 1
    seen: bool = True


BESIDE = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])  # what pip installed, too


def allocator(name: str) -> str:
    """Path of a library, "" where it is not installed."""
    folders = [
        *os.environ.get("LD_LIBRARY_PATH", "").split(":"),
        "/usr/lib",
        *map(str, Path("/usr/lib").glob("*-linux-gnu")),
    ]
    return next((path for folder in folders if folder and (path := f"{folder}/{name}") and Path(path).exists()), "")


JEMALLOC, TCMALLOC = allocator("libjemalloc.so.2"), allocator("libtcmalloc_minimal.so.4")
PLAIN = {"PATH": BESIDE}
LAUNCHERS = {
    "directly": Launcher(),
    "sh": Launcher(words=("sh", "-c", 'true; "$@"', "sh", "LEAF")),
    "bash": Launcher(words=("bash", "-c", '"$@"; true', "bash", "LEAF"), needs=("bash",)),
    "env": Launcher(words=("env", "ONE=1", "LEAF")),
    "env -i": Launcher(words=("env", "-i", "LEAF")),
    "env -i, a shell": Launcher(words=("env", "-i", "sh", "-c", '"$@"', "sh", "LEAF")),
    "env -u": Launcher(words=("env", "-u", "LD_PRELOAD", "LEAF")),
    "jemalloc": Launcher(words=("env", f"LD_PRELOAD={JEMALLOC}", "LEAF"), needs=(JEMALLOC,)),
    "tcmalloc": Launcher(words=("env", f"LD_PRELOAD={TCMALLOC}", "LEAF"), needs=(TCMALLOC,)),
    "nohup": Launcher(words=("nohup", "LEAF"), needs=("nohup",)),
    "setsid": Launcher(words=("setsid", "-w", "LEAF"), needs=("setsid",)),
    "timeout": Launcher(words=("timeout", "100", "LEAF"), needs=("timeout",)),
    "xargs": Launcher(words=("xargs", "LEAF"), needs=("xargs",)),
    "nice": Launcher(words=("nice", "LEAF"), needs=("nice",)),
    "subprocess, an environment": Launcher(environment=PLAIN),
    "subprocess, none": Launcher(environment={}),
    "execve": Launcher("execve", environment={}),
    "posix_spawn": Launcher("posix_spawn", environment={}),
    "fork": Launcher("fork"),
    "spawn": Launcher("spawn"),
    "forkserver": Launcher("forkserver"),
    "another Python": Launcher(words=(sys.executable, "-I", "PYTHON_LEAF"), environment={}),
    "torchrun": Launcher(
        words=(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--master-port=0", "PYTHON_LEAF"),
        needs=("module torch",),
        processes=2,
    ),
    "gunicorn": Launcher(
        words=("gunicorn", "-b", "127.0.0.1:0", "-c", "GUNICORN", "--pythonpath", "HERE", "copying_gunicorn:app"),
        needs=("gunicorn",),
    ),
    "uvicorn": Launcher(
        words=("uvicorn", "--port", "0", "--app-dir", "HERE", "copying_uvicorn:app"), needs=("uvicorn",)
    ),
    "ray": Launcher(words=("ray-python", "RAY"), needs=("ray-python",)),
    "a read-only root": Launcher(
        words=("unshare", "--mount", "sh", "-c", READ_ONLY, "sh", "HERE", "LEAF"), needs=("unshare", "root")
    ),
    "bwrap": Launcher(
        words=("bwrap", "--ro-bind", "/", "/", "--bind", "HERE", "HERE", "--proc", "/proc", "--dev", "/dev", "LEAF"),
        needs=("bwrap",),
    ),
    "setpriv": Launcher(words=("setpriv", "--reset-env", "LEAF"), needs=("setpriv", "root")),
    "su": Launcher(words=("su", "-", "root", "-c", "LEAF"), needs=("su", "root")),
    "sudo -E": Launcher(words=("sudo", "-E", "LEAF"), needs=("sudo", "root")),
    "another user": Launcher(
        words=("setpriv", "--reuid=65534", "--clear-groups", "LEAF"), needs=("setpriv", "root"), seen=False
    ),
}


def missing(launcher: Launcher) -> str:
    """What a launcher needs and this machine has not; "" where it has all."""
    for need in launcher.needs:
        if need == "root":
            there = os.geteuid() == 0
        elif need.startswith("module "):
            there = find_spec(need.removeprefix("module ")) is not None
        else:
            there = (bool(need) and shutil.which(need, path=BESIDE) is not None) or Path(need or "/none").is_file()
        if not there:
            return need or "the library"
    return ""


def number_of(name: str) -> int:
    """Copies that each process of a launcher makes: by them its ring files are known."""
    return 100 + list(LAUNCHERS).index(name)


@pytest.fixture(scope="module")
def here() -> Any:
    """A folder with the copying programs, in which other users may look around."""
    import tempfile

    build.build()
    folder = Path(tempfile.mkdtemp(prefix="launchers-"))
    folder.chmod(0o755)
    (folder / "leaf.c").write_text(PROGRAM)
    runtime = [f"-L{build.LIB}", "-lkvprobe_hostrt", f"-Wl,-rpath,{build.LIB}"]
    subprocess.run([*build.compiler(), "-o", folder / "leaf", folder / "leaf.c", *runtime], check=True)
    (folder / "copying_leaf.py").write_text(LEAF)
    (folder / "copying_gunicorn.py").write_text(GUNICORN.format(n=number_of("gunicorn")))
    (folder / "copying_uvicorn.py").write_text(UVICORN.format(n=number_of("uvicorn")))
    (folder / "copying_ray.py").write_text(RAY.format(n=number_of("ray")))
    shutil.copy(Path(__file__).with_name("launching.py"), folder)
    yield folder
    shutil.rmtree(folder)


def command(folder: Path) -> list[str]:
    """The program that uses the launchers that are there."""
    told = []
    for name, launcher in LAUNCHERS.items():
        if missing(launcher):
            continue
        number = str(number_of(name))
        stands_for = {
            "LEAF": [str(folder / "leaf"), number],
            "PYTHON_LEAF": [str(folder / "copying_leaf.py"), number],
            "HERE": [str(folder)],
            "GUNICORN": [str(folder / "copying_gunicorn.py")],
            "RAY": [str(folder / "copying_ray.py")],
        }
        words = [part for word in launcher.words for part in stands_for.get(word, [word])]
        if name == "xargs":
            words = ["sh", "-c", 'echo "$2" | xargs "$1"', "sh", *words[1:]]
        if name == "su":
            words = [*words[:4], " ".join(words[4:])]
        told.append([launcher.way, int(number), words, launcher.environment])
    (folder / "launchers.json").write_text(json.dumps(told))
    return [sys.executable, str(folder / "launching.py"), str(folder / "launchers.json")]


def outside() -> dict[str, str]:
    """An environment without kvprobe's."""
    without = {k: v for k, v in os.environ.items() if not k.startswith("KVPROBE") and k != "LD_PRELOAD"}
    return without | {"PATH": BESIDE}


def run(folder: Path, into: Path) -> None:
    """Under `kvprobe run`."""
    words = [*KVPROBE, "run", "--no-stacks", "--report", "none", "-o", str(into), "--", *command(folder)]
    done = subprocess.run(words, cwd=folder, env=outside(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    print(done.stdout, done.stderr)


def attach(folder: Path, into: Path) -> None:
    """To a process that runs, which then begins."""
    words = [*command(folder), str(folder / "go")]
    with subprocess.Popen(words, cwd=folder, env=outside(), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        attaching = [*KVPROBE, "attach", str(process.pid), "-o", str(into)]
        done = subprocess.run(attaching, env=outside(), capture_output=True, text=True, check=False)
        (folder / "go").touch()
        print(process.stdout.read())
        assert done.returncode == 0, done.stderr
    observer = int((into / "observer.pid").read_text())
    while alive(observer):
        time.sleep(0.05)


def counts(folder: Path) -> Counter[int]:
    """Ring files by the copies in them."""
    return Counter(read_ring(path).calls().get("cudaMemcpyAsync", (0, 0, 0))[0] for path in folder.glob("*.kvp"))


@pytest.fixture(scope="module", params=[run, attach], ids=["run", "attach"])
def recorded(request: pytest.FixtureRequest, here: Path) -> Path:
    """The run folder of all launchers, recorded in one of the two ways; sandboxes can write there."""
    into: Path = here / f"by-{request.param.__name__}"
    record: Callable[[Path, Path], None] = request.param
    record(here, into)
    return into


@pytest.mark.parametrize("name", LAUNCHERS)
def test_every_call_of_what_was_launched_is_recorded(recorded: Path, name: str) -> None:
    launcher = LAUNCHERS[name]
    if what := missing(launcher):
        pytest.skip(f"{what} is not here")
    assert counts(recorded)[number_of(name)] == (launcher.processes if launcher.seen else 0)


def test_nothing_else_was_recorded(recorded: Path) -> None:
    assert set(counts(recorded)) <= {number_of(name) for name in LAUNCHERS} | {0}
