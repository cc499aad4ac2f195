"""Shapes of trouble that servers have and no program of the corpus, each a step that is repeated 200 times."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from kvprobe.account import Line
from kvprobe.diagnosis import Examination, examine
from kvprobe.diagnosis.verdict import of_recording
from kvprobe.recordings.model import Direction, Engine, Memory, Recording, Source, Table
from kvprobe.recordings.vocabulary import call_kind

US, MS = 1_000, 1_000_000
STEPS = 200


class Made:
    """One thread of Python that submits to streams, a GPU each; whatever it submits runs after what stands before."""

    def __init__(self) -> None:
        self.now, self.names, self.calls, self.ran = 0, ["python3"], [], []
        self.busy_until: dict[int, int] = {}

    def name(self, text: str) -> int:
        if text not in self.names:
            self.names.append(text)
        return self.names.index(text)

    def call(self, name: str, ns: int, stream: int = -1, **more: int) -> None:
        begin, self.now = self.now, self.now + ns
        known = {"start_ns": begin, "end_ns": self.now, "name": self.name(name), "kind": call_kind(name)}
        self.calls.append({**known, "thread": 7, "stream": stream, "correlation": -1, **more})

    def runs(self, what: str, ns: int, stream: int = 0, engine: Engine = Engine.KERNEL, **more: int) -> None:
        names = {Engine.KERNEL: "cudaLaunchKernel", Engine.OTHER: "cudaGraphLaunch", Engine.COPY: "cudaMemcpyAsync"}
        self.call(names[engine], 4 * US, stream, correlation=len(self.ran), **more)
        begin = max(self.busy_until.get(stream, 0) + US, self.now + 3 * US)
        self.busy_until[stream] = begin + ns
        known = {"start_ns": begin, "end_ns": begin + ns, "engine": engine, "name": self.name(what), "stream": stream}
        self.ran.append({**known, "device": stream, "correlation": len(self.ran), "count": 1, **more})

    def copies(self, ns: int, direction: Direction) -> None:
        self.runs("copy", ns, engine=Engine.COPY, bytes=50 * ns, direction=direction, memory=Memory.PINNED)

    def waits(self, stream: int = 0) -> None:
        self.call("cudaStreamSynchronize", max(self.busy_until[stream] + 3 * US - self.now, 2 * US), stream)

    def recording(self) -> Recording:
        out = Recording([Source("made", "trace")], names=self.names, has_executions=True)
        for name, rows in (("calls", self.calls), ("executions", self.ran)):
            keys = {key for row in rows for key in row}
            out.tables[name] = Table(name, {key: np.array([row.get(key, 0) for row in rows]) for key in keys})
        out.tables["streams"] = Table("streams", {"process": [0, 0], "handle": [7, 8]})
        out.tables["processes"] = Table("processes", {"pid": [1], "name": [0]})
        return out


def told(step: Callable[[Made, int], None]) -> tuple[Examination, str]:
    """What is found in such steps, and the reason of the verdict."""
    made = Made()
    for number in range(STEPS):
        step(made, number)
    recording = made.recording()
    found = examine(recording)
    verdict = of_recording(recording, found)
    assert verdict.state == "found"
    return found, verdict.reason


def test_between_graphs_in_one_piece_the_host_is_late() -> None:
    """Nsight Systems records a graph as one piece unless told otherwise: what it computes is no wait for copies."""

    def step(made: Made, number: int) -> None:
        made.copies(1 * US, Direction.H2D)
        made.runs("graph", 1 * MS, engine=Engine.OTHER)
        made.copies(1 * US, Direction.D2H)
        made.waits()
        made.now += 700 * US

    found, reason = told(step)
    assert reason.startswith("The GPU was idle for 139 ms, in 199 gaps")
    assert [one.cause for one in found if one.severity != "info"] == ["gpu_starved"]


def test_between_graphs_in_one_piece_copies_alone_are_waited_for() -> None:
    def step(made: Made, number: int) -> None:
        made.copies(500 * US, Direction.H2D)
        made.runs("graph", 1 * MS, engine=Engine.OTHER)
        made.copies(1 * US, Direction.D2H)
        made.waits()

    assert told(step)[1].startswith("The GPU waited 100 ms for loads")


def test_a_thread_that_feeds_two_gpus_in_turn_waits_for_the_other_one() -> None:
    def step(made: Made, number: int) -> None:
        for gpu in (0, 1):
            made.runs("kernel", 1 * MS, gpu)
            made.waits(gpu)

    assert told(step)[1].endswith("the thread waited for another GPU")


def test_a_call_that_loads_code_between_requests_is_named() -> None:
    """A new shape is compiled at every eighth step."""

    def step(made: Made, number: int) -> None:
        if number % 8 == 7:
            made.call("cuModuleLoadDataEx", 12 * MS)
        made.runs("kernel", 1 * MS)
        made.waits()

    assert told(step)[1].endswith("the thread was in cuModuleLoadDataEx")


@pytest.mark.parametrize("name", ["cudaIpcOpenMemHandle", "cuMemImportFromShareableHandle", "cudaMemPoolTrimTo"])
def test_memory_of_others_that_is_opened_for_each_request_is_an_allocation(name: str) -> None:
    def step(made: Made, number: int) -> None:
        made.call(name, 600 * US)
        made.runs("kernel", 1 * MS)
        made.waits()

    found, _ = told(step)
    assert [one.cause for one in found if one.severity != "info"] == ["allocation_on_hot_path"]
    assert found.account.gpus[0].share(Line.ALLOCATING) > 0.3
