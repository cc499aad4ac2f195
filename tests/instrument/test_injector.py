"""The injector holds a thread of a program, which goes on as it was, also where the injector is killed meanwhile."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from kvprobe.instrument import attach
from kvprobe.native import build
from kvprobe.probe import processes

PROGRAMS = Path(__file__).parents[1] / "native" / "programs"
TODO, TURNS, WRONG = range(3)
WAYS = ["registers", "waits", "signals", "forks"]
STEPS = range(1, 14)  # of the injector, where it may be killed: STEP in native/inject
FOLLOWED = range(7, 12)  # it takes these where the thread that it holds waited in a system call


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the program that is held, and of the injector that dies."""
    build.build()
    folder = tmp_path_factory.mktemp("held")
    cc = [*build.compiler(), "-std=gnu11", "-O2", "-Wall", "-Werror"]
    subprocess.run([*cc, "-o", folder / "held", PROGRAMS / "held.c"], check=True)
    inject = build.NATIVE / "inject"
    sources = [PROGRAMS / "dying_injector.c", *sorted(inject.glob("*.c"))]
    subprocess.run([*cc, "-DKVP_INJECT_DIES", f"-I{inject}", "-o", folder / "dying", *sources], check=True)
    return folder


class Held:
    """The program while it runs."""

    def __init__(self, programs: Path, counts: Path, way: str) -> None:
        counts.write_bytes(bytes(4096))
        self.words = np.memmap(counts, "<u8", "r+")
        self.process = subprocess.Popen([programs / "held", counts, way])
        self.pid = self.process.pid
        self.turn()

    def turn(self, turns: int = 3) -> None:
        """It goes on."""
        goal = int(self.words[TURNS]) + turns
        self.wait_for(lambda: int(self.words[TURNS]) >= goal)

    def wait_for(self, true: Callable[[], bool]) -> None:
        end = time.monotonic() + 60
        while not true():
            assert self.process.poll() is None, self.process.returncode
            assert time.monotonic() < end
            time.sleep(0.002)

    def threads(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/task"))  # noqa: PTH208

    def code(self) -> set[tuple[str, ...]]:
        """Where it has memory that may be executed, and of which file."""
        lines = (line.split() for line in Path(f"/proc/{self.pid}/maps").read_text().splitlines())
        return {(words[0], words[-1]) for words in lines if "x" in words[1]}

    def end(self, *, exact: bool = True) -> None:
        self.words[TODO] = 2
        assert self.process.wait(60) == 0
        assert int(self.words[WRONG]) == 0 or not exact


@pytest.fixture
def held(programs: Path, tmp_path: Path) -> Iterator[Callable[[str], Held]]:
    running: list[Held] = []

    def start(way: str) -> Held:
        running.append(Held(programs, tmp_path / "counts", way))
        return running[-1]

    yield start
    for one in running:
        one.process.kill()
        one.process.wait()


@pytest.mark.parametrize("way", WAYS)
def test_in_and_out_again_and_again_changes_nothing(held: Callable[[str], Held], tmp_path: Path, way: str) -> None:
    program = held(way)
    for _ in range(8):
        attachment = attach.Attachment(program.pid, build.LIB / attach.LIBRARY, tmp_path, "copies", 1 << 30)
        attachment.result()
        attachment.keep()
        attachment.close()
        program.turn()
        assert attach.detach(program.pid) is not None
    program.wait_for(lambda: program.threads() == 1)
    assert not [name for _, name in program.code() if not name.startswith(("/", "["))]
    program.end()


@pytest.mark.parametrize("way", WAYS)
def test_an_injector_that_is_killed_at_any_step_leaves_the_program_as_it_was(
    held: Callable[[str], Held], programs: Path, tmp_path: Path, way: str
) -> None:
    program = held(way)
    library = build.LIB / attach.LIBRARY
    words = [library, "kvprobe_attach", "kvprobe_detach", tmp_path]
    for step in STEPS:
        for _ in range(50 if way == "waits" else 1):
            done = subprocess.run([programs / "dying", str(program.pid), str(step), *words], check=False)
            program.turn()
            program.wait_for(lambda: program.threads() == 1)
            if done.returncode == 0:
                break
        assert done.returncode == 0 or (way != "waits" and step in FOLLOWED), f"it did not come to step {step}"
    program.wait_for(lambda: attach.recorded_into(program.pid) is None)
    # nobody is left to tell the kernel that a signal which came meanwhile ends the call that the thread waited in
    program.end(exact=way != "signals")


def test_who_goes_away_before_it_is_kept_has_it_undone(
    held: Callable[[str], Held], programs: Path, tmp_path: Path
) -> None:
    program = held("forks")
    before = program.code()
    words = [build.LIB / attach.LIBRARY, "kvprobe_attach", "kvprobe_detach", tmp_path]
    done = subprocess.run(
        [programs / "dying", str(program.pid), "0", *words], capture_output=True, text=True, check=False
    )
    assert done.stdout.startswith("ok ")
    program.wait_for(lambda: program.threads() == 1)
    assert attach.recorded_into(program.pid) is None
    assert {name for _, name in program.code() - before} == {str(library_of())}
    program.end()


def library_of() -> Path:
    return build.LIB / attach.LIBRARY


def test_a_library_that_cannot_be_loaded_leaves_nothing(held: Callable[[str], Held], tmp_path: Path) -> None:
    program = held("waits")
    before = program.code()
    (tmp_path / "library.so").write_text("this is none")
    attachment = attach.Attachment(program.pid, tmp_path / "library.so", tmp_path, "copies", 1 << 30)
    with pytest.raises(
        attach.AttachError, match=r"could not be loaded into process \d+: .*library.so: .*too short|invalid"
    ):
        attachment.result()
    attachment.close()
    program.wait_for(lambda: program.threads() == 1)
    assert program.code() == before
    program.end()


def test_a_process_that_ends_meanwhile_is_said_to_have_ended(programs: Path, tmp_path: Path) -> None:
    program = subprocess.Popen(["sleep", "600"])
    program.kill()
    program.wait()
    attachment = attach.Attachment(program.pid, library_of(), tmp_path, "copies", 1 << 30)
    with pytest.raises(attach.AttachError, match="it has ended"):
        attachment.result()
    attachment.close()
    assert not processes.alive(program.pid)
