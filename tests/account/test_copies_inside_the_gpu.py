"""Copies inside a GPU use no link: the time in which the GPU waits for them is in a line of its own."""

from __future__ import annotations

import numpy as np

from kvprobe.account import COPIES, Line, account_of
from kvprobe.diagnosis import examine
from kvprobe.recordings.joined import Joined
from kvprobe.recordings.model import Direction, Engine, Recording, Source, Table

MS = 1_000_000
LINK = 55e9
KERNEL = (Engine.KERNEL, Direction.UNKNOWN, 0)


def copied(*operations: tuple[int, int, tuple[Engine, Direction, int]]) -> Recording:
    """What a GPU executed: from and to, ms, and the engine, the direction and the bytes."""
    recording = Recording([Source("made", "trace")])
    recording.machine["link_bytes_per_s"] = LINK
    start, end, what = zip(*operations, strict=True)
    engine, direction, size = zip(*what, strict=True)
    columns = {"engine": engine, "direction": direction, "bytes": size, "stream": [7] * len(start)}
    times = {"start_ns": np.array(start) * MS, "end_ns": np.array(end) * MS}
    recording.tables["executions"] = Table("executions", {**times, **{k: np.array(v) for k, v in columns.items()}})
    recording.has_executions = True
    return recording


def copy(direction: Direction, gb_per_s: float, ms: int) -> tuple[Engine, Direction, int]:
    return Engine.COPY, direction, int(gb_per_s * ms * 1e6)


def test_each_copy_alone_is_in_its_line() -> None:
    found = copied(
        (0, 10, KERNEL),
        (10, 30, copy(Direction.D2D, 900, 20)),
        (30, 45, copy(Direction.H2D, 54, 15)),
        (45, 52, copy(Direction.D2H, 20, 7)),
        (52, 60, KERNEL),
    )
    gpu = account_of(Joined(found)).main
    lines = {line: gpu.ns(line) // MS for line in COPIES if gpu.ns(line)}
    assert lines == {Line.INSIDE_GPU: 20, Line.AT_LINK_RATE: 15, Line.BELOW_LINK_RATE: 7}
    assert sum(gpu.ns(line) for line in Line) == gpu.window_ns


def test_the_link_comes_first_where_it_is_full_and_only_there() -> None:
    found = copied(
        (0, 10, KERNEL),
        (10, 30, copy(Direction.D2D, 900, 20)),
        (12, 18, copy(Direction.H2D, 54, 6)),
        (20, 25, copy(Direction.H2D, 2, 5)),
        (30, 40, KERNEL),
    )
    gpu = account_of(Joined(found)).main
    assert {line: gpu.ns(line) // MS for line in COPIES if gpu.ns(line)} == {Line.AT_LINK_RATE: 6, Line.INSIDE_GPU: 14}


def test_the_finding_says_which_of_them_ran_at_the_same_time() -> None:
    found = examine(
        copied(
            (0, 10, KERNEL),
            (10, 30, copy(Direction.D2D, 900, 20)),
            (12, 18, copy(Direction.H2D, 54, 6)),
            (30, 40, KERNEL),
        )
    )
    (finding,) = (one for one in found if one.cause == "waiting_for_copies")
    told = finding.evidence[0].text
    assert told.endswith("loads 6.00 ms, copies inside the GPU 20.0 ms; 6.00 ms of this at the same time as another")
    assert finding.title.startswith("The GPU waited 20.0 ms for copies, 50% of the time")
    assert any(one.text == "for 30% of these 20.0 ms, copies ran at the link's full rate" for one in finding.evidence)


def test_copies_inside_the_gpu_are_called_so_in_the_title() -> None:
    found = examine(copied((0, 10, KERNEL), (10, 30, copy(Direction.D2D, 900, 20)), (30, 40, KERNEL)))
    (finding,) = (one for one in found if one.cause == "waiting_for_copies")
    assert finding.title.startswith("The GPU waited 20.0 ms for copies inside the GPU, 50% of the time")


def test_fewer_bytes_come_first_where_kernels_already_run_beside_all_the_copies_that_they_can() -> None:
    def rounds(beside: bool) -> Recording:
        """Loads and stores by turns, 96 of each 100 ms, and a kernel of 20 ms beside them or behind them."""
        parts = []
        for begin in range(0, 1_000, 100):
            parts += [(begin, begin + 48, copy(Direction.H2D, 54, 48)), (begin + 48, begin + 80, KERNEL)]
            parts += [(begin + (48 if beside else 80), begin + 96, copy(Direction.D2H, 54, 48 if beside else 16))]
        return copied(*parts)

    finding, apart = (
        next(one for one in examine(rounds(beside)) if one.cause == "waiting_for_copies") for beside in (True, False)
    )
    assert finding.cure[0].text.startswith("Move fewer bytes") and finding.cure[0].predicted_saving_ns is None
    assert len(finding.cure) > 1 and all(one.predicted_saving_ns is None for one in finding.cure)
    assert apart.cure[0].predicted_saving_ns


def test_large_loads_of_one_size_between_kernels_need_no_calls_to_be_judged() -> None:
    parts = [((at, at + 20, copy(Direction.H2D, 54, 20)), (at + 20, at + 40, KERNEL)) for at in range(0, 1_000, 40)]
    found = examine(copied(*(one for pair in parts for one in pair)))
    assert found and found.account.main.ns(*COPIES) == 25 * 20 * MS
