"""Attaching to a program that runs: what it copies from then on is counted, and detaching leaves no trace."""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvprobe.commands.attach import find_process
from kvprobe.errors import KvprobeError, UsageError
from kvprobe.instrument import attach
from kvprobe.native import build
from kvprobe.probe import processes
from kvprobe.probe.ring import read_ring, read_ring_fd
from kvprobe.runfolder import packed

KVPROBE = [sys.executable, "-m", "kvprobe"]
relocated = runpy.run_path(str(Path(__file__).with_name("relocations.py")))["relocated"]
PROGRAMS = Path(__file__).parents[1] / "native" / "programs"
TODO, PAUSED, COPIES, BYTES, WRONG, CHILDREN, PLUGINS = range(7)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The copying program, bound lazily: its first calls are bound by the loader."""
    build.build()
    folder = tmp_path_factory.mktemp("copying")
    cc = [*build.compiler(), "-std=gnu11", "-O2", "-Wall", "-Werror", "-pthread"]
    runtime = [f"-L{build.LIB}", "-lkvprobe_hostrt", f"-Wl,-rpath,{build.LIB}"]
    plugin = [*cc, "-shared", "-fPIC", "-o", folder / "plugin.so", PROGRAMS / "copy_plugin.c", *runtime]
    subprocess.run(plugin, check=True)
    for name, flag in (("lazy", "lazy"), ("now", "now")):
        subprocess.run([*cc, "-o", folder / name, PROGRAMS / "copying.c", *runtime, f"-Wl,-z,{flag}"], check=True)
    subprocess.run([*cc, "-o", folder / "listing", PROGRAMS / "forked_listing.c", *runtime], check=True)
    linked = [*cc, "-x", "c", "-shared", "-fPIC", "-Wl,--no-as-needed", os.devnull]
    subprocess.run([*linked, "-o", folder / "needed.so", f"-Wl,-soname,{folder / 'pipe'}"], check=True)
    subprocess.run([*linked, "-o", folder / "stuck.so", "-x", "none", folder / "needed.so"], check=True)
    os.mkfifo(folder / "pipe")
    return folder


class Copying:
    """The program while it runs."""

    def __init__(self, program: Path, folder: Path, *arguments: str, binding: str = "lazy") -> None:
        self.counts = folder / f"counts-of-{os.getpid()}-alone"  # this test may run twice at a time, in two folders
        self.counts.write_bytes(bytes(4096))
        self.words = np.memmap(self.counts, "<u8", "r+")
        env = {k: v for k, v in os.environ.items() if not k.startswith("KVPROBE") and k != "LD_PRELOAD"}
        env |= {"PLUGIN": str(program / "plugin.so"), "KVHOST_LATENCY_US": "0.001"}
        self.process = subprocess.Popen([program / binding, self.counts, *arguments], env=env)
        self.pid = self.process.pid
        self.threads = int(arguments[0])

    def wait_for(self, true: Callable[[], bool]) -> None:
        end = time.monotonic() + 60
        while not true():
            assert self.process.poll() is None, self.process.returncode
            assert time.monotonic() < end
            time.sleep(0.005)

    def copy_more(self, n: int) -> None:
        goal = int(self.words[COPIES]) + n
        self.wait_for(lambda: int(self.words[COPIES]) >= goal)

    def pause(self) -> tuple[int, int]:
        """Copies and bytes so far, by the program's own count, all threads between two calls."""
        self.words[TODO] = 1
        self.wait_for(lambda: int(self.words[PAUSED]) == self.threads)
        return int(self.words[COPIES]), int(self.words[BYTES])

    def go(self) -> None:
        self.words[TODO] = 0
        self.wait_for(lambda: int(self.words[PAUSED]) == 0)

    def end(self) -> None:
        self.words[TODO] = 2
        assert self.process.wait(60) == 0
        assert self.words[WRONG] == 0


@pytest.fixture
def copying(program: Path, tmp_path: Path) -> Iterator[Callable[..., Copying]]:
    running: list[Copying] = []

    def start(*arguments: str, **how: Any) -> Copying:
        running.append(Copying(program, tmp_path, *arguments, **how))
        running[-1].copy_more(1000)
        return running[-1]

    yield start
    for one in running:
        one.process.kill()
        one.process.wait()


def recorded(folder: Path, pid: int) -> tuple[int, int]:
    """Copies and bytes in the ring files of a process."""
    count = size = 0
    for path in folder.glob("*.kvp"):
        ring = read_ring(path)
        if ring.pid == pid:
            slots = ring.slots()
            slots = slots[slots["call"] == 1]
            # a call that began in one recording of the process and ended in the next is a number of that one alone
            count += int(slots["count"].sum()) + int(ring.over_count[1])
            size += int(slots["bytes"].sum()) + int(ring.over_bytes[1])
    return count, size


@pytest.mark.parametrize("binding", ["lazy", "now"])
def test_from_attaching_on_every_copy_is_counted_and_detaching_leaves_no_trace(
    copying: Callable[..., Copying], tmp_path: Path, binding: str
) -> None:
    program = copying("3", binding=binding)
    program.pause()
    before = relocated(program.pid)
    program.go()
    run = tmp_path / "run"
    done = subprocess.run(
        [*KVPROBE, "attach", str(program.pid), "-o", run], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "warning" not in done.stderr
    own = program.pause()
    first = recorded(run, program.pid)
    assert any(before[key] != word for key, word in relocated(program.pid).items() if key in before)
    program.go()
    program.words[PLUGINS] = 3
    program.wait_for(lambda: program.words[PLUGINS] == 0)
    program.copy_more(3000)
    later = program.pause()
    assert np.subtract(recorded(run, program.pid), first).tolist() == np.subtract(later, own).tolist()
    program.go()
    name = str(program.pid) if binding == "now" else program.counts.name  # a part of its command line
    done = subprocess.run([*KVPROBE, "detach", name], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stdout.strip() == str(run / "report.html"), (done.stdout, done.stderr)
    said = (run / "outcome.txt").read_text().splitlines()
    assert len(said) > 1 and said[0] in done.stderr, "what was found stands before the page's path"
    last = recorded(run, program.pid)
    assert last[0] >= later[0] - own[0] + first[0]
    program.copy_more(1000)
    program.pause()
    after = relocated(program.pid)
    known = [key for key in before if key in after]
    # a word that the loader bound meanwhile is another on its own account
    assert not [key for key in known if after[key][1] != before[key][1]]
    ours = [m for m in Path(f"/proc/{program.pid}/maps").read_text().splitlines() if "libkvprobe_interpose" in m]
    bounds = [(int(m.split("-")[0], 16), int(m.split("-")[1].split()[0], 16)) for m in ours]
    for word, _ in after.values():
        assert not any(a <= word < b for a, b in bounds)
    if binding == "now":
        # but for the C library's, which is bound lazily: a thread that ends is the first to call some of the loader
        bound = [key for key in known if after[key] != before[key] and Path(key[0]).name != "libc.so.6"]
        assert not bound
    assert recorded(run, program.pid) == last
    assert json.loads((run / "end.json").read_text())
    program.end()


@pytest.mark.parametrize("how", ["fork", "exec"])
def test_what_an_attached_process_starts_is_recorded(copying: Callable[..., Copying], tmp_path: Path, how: str) -> None:
    program = copying("2", how)
    run = tmp_path / "run"
    subprocess.run([*KVPROBE, "attach", str(program.pid), "-o", run], check=True, capture_output=True)
    program.words[PLUGINS] = 4
    program.wait_for(lambda: program.words[CHILDREN] == 40)
    program.end()
    pids = {read_ring(path).pid for path in run.glob("*.kvp")} - {program.pid}
    assert sum(recorded(run, pid)[0] for pid in pids) == 40 and len(pids) == 4


def all_copies(run: Path) -> int:
    """Of a run that ends: those of short processes are in its pack."""
    end = time.monotonic() + 60
    while not (run / "end.json").exists():
        assert time.monotonic() < end
        time.sleep(0.05)
    rings = [read_ring(path) for path in run.glob("*.kvp")]
    if (run / packed.NAME).exists():
        rings += [read_ring_fd(fd, name) for name, fd in packed.opened(run / packed.NAME)]
    slots = np.concatenate([ring.slots() for ring in rings])
    return int(slots["count"][slots["call"] == 1].sum())


def ended_well(command: Sequence[str | Path], watched: str, run: Path) -> int:
    """What the listing program says, which runs alone or is recorded into `run`."""
    before = [*KVPROBE, "run", "-o", run, "--"] if watched == "run" else []
    with subprocess.Popen([*before, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin and process.stdout and process.stdout.readline() == "ready\n"
        if watched == "attach":
            subprocess.run([*KVPROBE, "attach", str(process.pid), "-o", run], check=True, capture_output=True)
        process.stdin.write("go\n")
        process.stdin.flush()
        return int(process.stdout.readline())


@pytest.mark.parametrize("watched", ["alone", "attach", "run"])
@pytest.mark.parametrize(("parent", "children"), [("held", 3), ("asks", 100), ("loads", 200)])
def test_a_child_forked_while_the_loaders_list_is_in_use_waits_for_nobody(
    program: Path, tmp_path: Path, parent: str, children: int, watched: str
) -> None:
    command = [program / "listing", parent, str(children), program / "plugin.so"]
    assert ended_well(command, watched, tmp_path / "run") == children
    if watched != "alone":
        assert all_copies(tmp_path / "run") == children


@pytest.mark.parametrize("watched", ["attach", "run"])
def test_a_fork_lets_a_load_end(program: Path, tmp_path: Path, watched: str) -> None:
    """Without kvprobe it is chance: a child that is forked in the middle of a load dies of its first dlopen."""
    command = [program / "listing", "stuck", "20", program / "stuck.so", program / "pipe"]
    assert ended_well(command, watched, tmp_path / "run") == 20
    assert all_copies(tmp_path / "run") == 20


def test_a_hundred_times_in_and_out_under_load(program: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    copying = Copying(program, tmp_path, "3", str(build.LIB / attach.LIBRARY), str(run), "100")
    assert copying.process.wait(300) == 0
    assert copying.words[WRONG] == 0
    rings = [read_ring(path) for path in run.glob("*.kvp")]
    assert len(rings) == 100 and {ring.state for ring in rings} == {"closed"}
    assert 0 < recorded(run, copying.pid)[0] <= int(copying.words[COPIES])


def test_a_process_is_attached_to_once(copying: Callable[..., Copying], tmp_path: Path) -> None:
    program = copying("1")
    subprocess.run([*KVPROBE, "attach", str(program.pid), "-o", tmp_path / "a"], check=True, capture_output=True)
    again = subprocess.run(
        [*KVPROBE, "attach", str(program.pid), "-o", tmp_path / "b"], capture_output=True, text=True, check=False
    )
    assert again.returncode == 2 and again.stderr.strip().endswith(f"is already being recorded into {tmp_path / 'a'}")
    assert not (tmp_path / "b").exists()
    program.end()


LOOKING_UP = """
import ctypes, sys, time
runtime = ctypes.CDLL(sys.argv[1])
count = ctypes.c_int()
assert runtime.cudaGetDeviceCount(ctypes.byref(count)) == 0
print("up", flush=True)
time.sleep(600)
"""


@pytest.fixture
def looking_up() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts programs that look CUDA's functions up by dlsym, with these words in their command lines."""
    running: list[subprocess.Popen[str]] = []

    def start(*words: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", LOOKING_UP, str(build.LIB / "libkvprobe_hostrt.so"), *words]
        running.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        assert running[-1].stdout.readline() == "up\n"
        return running[-1]

    yield start
    for one in running:
        one.kill()
        one.communicate()


def test_a_program_that_looks_its_functions_up_is_warned_of(
    looking_up: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    program = looking_up("tea-server-1")
    done = subprocess.run(
        [*KVPROBE, "attach", "tea-server-1", "-o", tmp_path / "run"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"recording process {program.pid} into ")
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"kvprobe: warning: process {program.pid}: nothing in it is linked to CUDA's functions")


def test_a_name_that_several_processes_have_lists_them_in_one_line(
    looking_up: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    programs = [looking_up("tea-server-2") for _ in range(2)]
    command = [*KVPROBE, "attach", "tea-server-2", "-o", str(tmp_path / "run")]
    for words in (command, ["sh", "-c", f"{' '.join(command)}; exit $?"]):  # whoever started it fits as well
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        assert done.returncode == 2
        (line,) = done.stderr.splitlines()
        assert line.startswith("kvprobe: 2 processes have tea-server-2 in their command lines, name one: ")
        assert all(f"{program.pid} (" in line for program in programs)
    assert not (tmp_path / "run").exists()


def test_a_name_means_the_process_that_uses_cuda(looking_up: Callable[..., subprocess.Popen[str]]) -> None:
    sleeping = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", "tea-server-3"])
    try:
        program = looking_up("tea-server-3")
        assert find_process("tea-server-3") == program.pid
        assert find_process(str(sleeping.pid)) == sleeping.pid
    finally:
        sleeping.kill()
        sleeping.wait()


def test_secrets_of_the_attached_command_are_not_kept(tmp_path: Path) -> None:
    words = [sys.executable, "-c", "import time; time.sleep(600)", "--api-key", "hunter2"]
    program = subprocess.Popen(words)
    try:
        attached = [*KVPROBE, "attach", str(program.pid), "-o", tmp_path / "run"]
        subprocess.run(attached, check=True, capture_output=True)
        kept = {}
        for path in (tmp_path / "run").iterdir():
            if path.is_file():  # there may be a socket, too
                with contextlib.suppress(FileNotFoundError):  # the observer is at work there
                    kept[path.name] = path.read_bytes()
        assert b"--api-key" in kept["run.json"]
        assert [name for name, data in kept.items() if b"hunter2" in data] == []
    finally:
        program.kill()
        program.wait()


def test_what_stands_against_it_is_said_beforehand(monkeypatch: pytest.MonkeyPatch) -> None:
    me = os.getpid()
    with pytest.raises(UsageError, match="there is no process"):
        attach.refuse(2**22 + 5)
    real = attach._status
    monkeypatch.setattr(attach, "_status", lambda pid: real(pid) | {"State": "T (stopped)"})
    with pytest.raises(KvprobeError, match="is stopped by a signal: let it go on first"):
        attach.refuse(me)
    monkeypatch.setattr(attach, "_status", lambda pid: real(pid) | {"Seccomp": "1"})
    with pytest.raises(KvprobeError, match="is in seccomp's strict mode"):
        attach.refuse(me)
    monkeypatch.setattr(attach, "_status", lambda pid: real(pid) | {"TracerPid": "77"})
    with pytest.raises(KvprobeError, match="is being debugged by process 77"):
        attach.refuse(me)
    monkeypatch.setattr(attach, "_status", lambda pid: real(pid) | {"Uid": "5 12345 5 5"})
    with pytest.raises(KvprobeError, match=r"belongs to #12345: run .* as that user"):
        attach.refuse(me)


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="needs root and unshare")
def test_a_process_in_a_container_is_refused_in_one_line() -> None:
    inside = subprocess.Popen(["unshare", "--mount", "--pid", "--fork", "sleep", "600"])
    try:
        while not (children := processes.descendants(inside.pid)):
            if inside.poll() is not None:
                pytest.skip("namespaces are not permitted here")
            time.sleep(0.01)
        with pytest.raises(KvprobeError, match="runs in a container: run `kvprobe attach` inside it") as refused:
            attach.refuse(children[0])
        assert "\n" not in str(refused.value)
    finally:
        for child in processes.descendants(inside.pid):
            os.kill(child, 9)
        inside.wait()
