"""The interposer under the compiler's sanitizers, preloaded, and attached and detached under load: not one report."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from kvprobe.native import build
from kvprobe.probe.ring import CALLS, DESTINATION, read_ring

PROGRAMS = Path(__file__).parent / "programs"


def sources(library: str) -> list[Path]:
    return [path for pattern in build.LIBRARIES[library] for path in sorted(build.NATIVE.glob(pattern))]


RUNTIME = {"thread": "libtsan.so", "address,undefined": "libasan.so"}
TODO, PAUSED, COPIES, BYTES, WRONG, CHILDREN, PLUGINS = range(7)


@dataclass
class Sanitized:
    """The copying program, its plug-in and the interposer, built with a sanitizer."""

    kind: str
    program: Path
    plugin: Path
    interposer: Path
    linked: tuple[str, ...]  # with the host runtime: what the linker is told for a program that calls it
    runtime: str  # has to come before the interposer


@pytest.fixture(params=["thread", "address,undefined"])
def sanitized(request: pytest.FixtureRequest, compile_sanitized: Callable[..., Path]) -> Sanitized:
    kind = request.param
    shared = ("-shared", "-fPIC", "-fvisibility=hidden", "-Wl,-Bsymbolic-functions")
    runtime = compile_sanitized("libkvprobe_hostrt.so", kind, sources("libkvprobe_hostrt.so"), *shared)
    linked = (f"-L{runtime.parent}", "-lkvprobe_hostrt", f"-Wl,-rpath,{runtime.parent}")
    interposer = sources("libkvprobe_interpose.so")
    asked = [*build.compiler(), f"-print-file-name={RUNTIME[kind]}"]
    preloaded = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    if not Path(preloaded).is_absolute():
        pytest.skip("the compiler's sanitizer cannot be preloaded")
    return Sanitized(
        kind,
        compile_sanitized("copying", kind, [PROGRAMS / "copying.c"], *linked),
        compile_sanitized("plugin.so", kind, [PROGRAMS / "copy_plugin.c"], "-shared", "-fPIC", *linked),
        compile_sanitized("libinterpose.so", kind, interposer, *shared, "-DKVP_PRIVATE_CORE=1"),
        linked,
        preloaded,
    )


@pytest.fixture
def counts(tmp_path: Path) -> np.ndarray:
    """The words that the program counts in."""
    (tmp_path / "counts").write_bytes(bytes(4096))
    return np.memmap(tmp_path / "counts", "<u8", "r+")


def copies_in(folder: Path) -> int:
    return sum(read_ring(path).calls().get("cudaMemcpyAsync", (0, 0, 0))[0] for path in folder.glob("*.kvp"))


@pytest.mark.slow
@pytest.mark.parametrize("marks", ["off", "on"])
@pytest.mark.parametrize("child", ["none", "fork", "exec"])
def test_no_report_while_threads_copy_load_plugins_and_fork(
    sanitized: Sanitized, without_report: Callable[..., str], counts: np.ndarray, tmp_path: Path, child: str, marks: str
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    environment = {
        "LD_PRELOAD": f"{sanitized.runtime}:{sanitized.interposer}",
        "KVPROBE_RUN": str(run),
        "PLUGIN": str(sanitized.plugin),
        "KVHOST_LATENCY_US": "0.001",
        "KVPROBE_MARKS": marks,
        # a child of several threads makes threads of its own: the host runtime's engines
        "TSAN_OPTIONS": "exitcode=66:second_deadlock_stack=1:die_after_fork=0",
    }
    counts[PLUGINS] = 4

    def end_it() -> None:
        deadline = time.monotonic() + 240  # the program is given 280 s
        while (counts[PLUGINS] or counts[COPIES] < 3000) and time.monotonic() < deadline:
            time.sleep(0.01)
        counts[TODO] = 2

    watcher = threading.Thread(target=end_it)
    watcher.start()
    try:
        without_report(sanitized.program, tmp_path / "counts", 3, child, **environment)
    finally:
        watcher.join()
    assert not counts[WRONG] and counts[CHILDREN] == (0 if child == "none" else 40)
    assert copies_in(run) == counts[COPIES] + counts[CHILDREN]


@pytest.mark.parametrize("marks", ["off", "on"])
def test_no_report_while_it_is_attached_and_detached_under_load(
    sanitized: Sanitized, without_report: Callable[..., str], counts: np.ndarray, tmp_path: Path, marks: str
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    counts[PLUGINS] = 1 << 40  # the main thread loads it for as long as the program runs
    environment = {"PLUGIN": str(sanitized.plugin), "KVHOST_LATENCY_US": "0.001", "KVPROBE_MARKS": marks}
    without_report(sanitized.program, tmp_path / "counts", 3, sanitized.interposer, run, 20, **environment)
    assert not counts[WRONG] and copies_in(run) <= counts[COPIES]


def test_no_report_of_looks_at_the_device_of_several_threads(
    sanitized: Sanitized, compile_sanitized: Callable[..., Path], without_report: Callable[..., str], tmp_path: Path
) -> None:
    program = compile_sanitized("same_loads", sanitized.kind, [PROGRAMS / "same_loads.c"], *sanitized.linked)
    run = tmp_path / "run"
    run.mkdir()
    preloaded = f"{sanitized.runtime}:{sanitized.interposer}"
    without_report(program, LD_PRELOAD=preloaded, KVPROBE_RUN=str(run), KVPROBE_MARKS="on")
    looks = np.concatenate([read_ring(path).notes(DESTINATION) for path in run.glob("*.kvp")])
    assert len(looks) and looks["result"].all() and looks["count"].all()


@pytest.mark.parametrize("mode", ["all", "threads", "reuse"])
def test_no_report_of_reads_and_writes_of_tiers(
    sanitized: Sanitized,
    compile_sanitized: Callable[..., Path],
    without_report: Callable[..., str],
    tmp_path: Path,
    mode: str,
) -> None:
    source = [PROGRAMS / "tiers.c"]
    program = compile_sanitized("tiers", sanitized.kind, source, "-DSANITIZED=1", *sanitized.linked)
    run = tmp_path / "run"
    run.mkdir()
    for name in ("first", "second", "third"):
        (tmp_path / name).mkdir()
    environment = {
        "LD_PRELOAD": f"{sanitized.runtime}:{sanitized.interposer}",
        "KVPROBE_RUN": str(run),
        "KVHOST_LATENCY_US": "0.001",
    }
    said = without_report(program, tmp_path, mode, 200, **environment).partition("results\n")[0]
    own = {name: (int(calls), int(size)) for name, calls, size in (line.split() for line in said.splitlines())}
    found: dict[str, tuple[int, int]] = {}
    for slot in read_ring(next(run.glob("*.kvp"))).file_slots():
        calls, size = found.get(name := CALLS[int(slot["call"])][1], (0, 0))
        found[name] = calls + int(slot["count"]), size + int(slot["bytes"])
    assert found == own and own
