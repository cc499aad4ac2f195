"""A copy of pageable memory means the same by timing events as by what a profiler saw the device do."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from kvprobe.account import COPIES, Line, account_of
from kvprobe.account.pageable import on_link
from kvprobe.recordings import open_recording
from kvprobe.recordings.intervals import union
from kvprobe.recordings.joined import Joined
from kvprobe.recordings.model import CallKind, Direction, Engine, Memory, Recording, Source, Table
from kvprobe.recordings.serving import ServingWindow, recorded_span, serving_window

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "corpus"))

from grade import FORMATS, unpack

DATA = Path(__file__).resolve().parents[1] / "gpu" / "data"
US, LINK = 1_000, 55.0  # ns; bytes per ns
H2D, D2H = Direction.H2D, Direction.D2H


# Medians by Nsight Systems: the call, from its begin until the device began, and for how long that copied, µs.
@pytest.mark.parametrize(
    "size, way, call, before, copied",
    [
        (3_000, H2D, 7.8, 8.9, 0.9),
        (64 << 10, H2D, 7.8, 10.3, 5.5),
        (512 << 10, H2D, 107.2, 109.9, 13.1),
        (1 << 20, H2D, 42.2, 44.3, 21.5),
        (3 << 19, H2D, 350.4, 228.9, 128.1),
        (5 << 19, H2D, 206.7, 84.8, 132.6),
        (3 << 20, H2D, 460.2, 156.6, 321.5),
        (4 << 20, H2D, 283.6, 74.4, 230.0),
        (4 << 20, H2D, 614.0, 157.2, 475.1),
        (16 << 10, D2H, 12.0, 5.3, 1.7),
        (64 << 10, D2H, 20.0, 4.8, 5.3),
        (4 << 20, D2H, 352.3, 7.9, 231.5),
        (4 << 20, D2H, 438.5, 8.6, 276.4),
        (64 << 20, D2H, 52523.2, 30.7, 50888.9),
    ],
)
def test_the_device_copies_as_long_as_a_profiler_saw_it(size, way, call, before, copied):
    """Whatever the size, from the call and the event behind the copy: within a tenth of the call, or 2 µs."""
    there = (before + copied) * US
    stop = there if way == H2D else call * US + 2 * US  # that event is recorded when the call has returned
    one = [np.array([int(value)]) for value in (2 * US, stop, 0, call * US, size, way, size / LINK)]
    begin, end = on_link((one[0], one[1]), (one[2], one[3]), *one[4:])[:, 0]
    bound = max(call * US / 10, 2 * US)
    assert end - begin == pytest.approx(copied * US, abs=bound)
    assert begin == pytest.approx(before * US, abs=bound + 3 * US)


@pytest.mark.parametrize("form", ["nsys", "kineto"])
@pytest.mark.parametrize(
    "program",
    [
        "corpus/large_pageable_copies",
        "corpus/small_pageable_copies",
        "corpus/small_pageable_stores",
        "corpus/a_fence_waits_and_pageable_copies",
        "corpus/the_lock_and_pageable_copies",
        "accounts/embedding_rows_read_out_of_pageable_memory",
        "accounts/layers_read_out_of_pageable_memory",
        "accounts/torch_inputs_from_pageable_memory",
    ],
)
def test_all_copies_of_a_program_together_are_on_the_link_as_long(program, form, tmp_path):
    """By a union of intervals, within 5 points of the time that their calls and copies take together."""
    folder, name = program.split("/")
    joined = Joined(open_recording(unpack(DATA / folder / form / f"{name}{FORMATS[form]}", tmp_path)))
    table = joined.recording.executions
    rows = np.flatnonzero((table["engine"] == Engine.COPY) & (joined.x_call >= 0))
    rows = rows[joined.memory[joined.x_call[rows]] == Memory.PAGEABLE]
    assert len(rows) >= 10
    call, start, end = joined.x_call[rows], joined.x_start[rows], joined.x_end[rows]
    entered, returned = joined.start[call], joined.end[call]
    way, size = table["direction"][rows], table["bytes"][rows]
    free = np.array([_free(joined, row, int(at)) for row, at in zip(rows, entered, strict=True)])
    stop = np.where(way == H2D, end, np.maximum(end, returned + 2 * US))
    told = on_link((free + 2 * US, stop), (entered, returned), size, way, size / LINK)
    whole = _lasts(np.concatenate((entered, start)), np.concatenate((returned, end)))
    assert abs(_lasts(*told) - _lasts(start, end)) < 0.05 * whole
    assert _lasts(*told) > 0


def _free(joined: Joined, row: int, entered: int) -> int:
    """When the stream of an execution had done what stood before it, as its call was entered or later."""
    table = joined.recording.executions
    mine = (table["stream"] == table["stream"][row]) & (joined.x_start < joined.x_start[row])
    return max(int(joined.x_end[mine].max(initial=entered)), entered)


def _lasts(start: np.ndarray, end: np.ndarray) -> int:
    begins, ends = union(start, end)
    return int((ends - begins).sum())


def recorded(kind: CallKind, way: Direction, size: int, took_us: int) -> Recording:
    """By timing events: two kernels of 100 µs, and a hundred pageable copies one by one between them."""
    many = 100
    turn = took_us + 20
    at = np.arange(many) * turn * US + 200 * US
    last = int(at[-1]) + turn * US
    recording = Recording([Source("made", "kvprobe")], names=["", "cudaLaunchKernel", "cudaMemcpy"])
    recording.tables["calls"] = Table(
        "calls",
        {
            "start_ns": np.concatenate(([0], at, [last])),
            "end_ns": np.concatenate(([5 * US], at + took_us * US, [last + 5 * US])),
            "kind": np.array([CallKind.LAUNCH, *[kind] * many, CallKind.LAUNCH]),
            "memory": np.array([0, *[Memory.PAGEABLE] * many, 0]),
            "direction": np.array([0, *[way] * many, 0]),
            "thread": np.full(many + 2, 7),
            "name": np.array([1, *[2] * many, 1]),
            "stream": np.zeros(many + 2),
            "bytes": np.array([0, *[size] * many, 0]),
        },
    )
    behind = 12 if way == H2D else 2
    recording.tables["spans"] = Table(
        "spans",
        {
            "start_ns": np.concatenate(([5 * US], at + 5 * US, [last + 5 * US])),
            "end_ns": np.concatenate(([105 * US], at + (took_us + behind) * US, [last + 105 * US])),
            "engine": np.array([Engine.KERNEL, *[Engine.COPY] * many, Engine.KERNEL]),
            "direction": np.array([0, *[way] * many, 0]),
            "stream": np.zeros(many + 2),
            "bytes": np.array([0, *[size] * many, 0]),
            "count": np.ones(many + 2),
        },
    )
    recording.tables["coverage"] = Table("coverage", {"start_ns": [0], "end_ns": [last + 105 * US]})
    recording.tables["streams"] = Table("streams", {"process": [0], "handle": [7]})
    recording.tables["processes"] = Table("processes", {"pid": [1]})
    recording.machine["link_bytes_per_s"] = LINK * 1e9
    return recording


@pytest.mark.parametrize("kind", [CallKind.COPY, CallKind.COPY_SYNC])
@pytest.mark.parametrize(
    "way, size, took_us, copied_us, pageable_us",
    [(H2D, 512 << 10, 107, 12, 107), (D2H, 64 << 10, 20, 5.5, 14.5), (D2H, 64 << 20, 52_000, 50_800, 1_220)],
)
def test_the_account_of_run_says_what_a_call_held_and_what_the_link_carried(
    kind, way, size, took_us, copied_us, pageable_us
):
    (gpu,) = account_of(Joined(recorded(kind, way, size, took_us))).gpus
    assert gpu.ns(*COPIES) / 100 / US == pytest.approx(copied_us, rel=0.02, abs=1)
    assert gpu.ns(Line.PAGEABLE) / 100 / US == pytest.approx(pageable_us, rel=0.02, abs=1)


@pytest.mark.parametrize(
    "program", ["images_in_pageable_arrays_before_the_encoder", "torch_scores_of_all_positions_taken_by_cpu"]
)
def test_run_and_nsight_systems_say_the_same_of_one_program(program, tmp_path):
    """To the GPU 1.5 MiB at a time, and from it 64 MiB; each line within 5 points of the window."""
    said = []
    for form in ("run", "nsys"):
        (tmp_path / form).mkdir()
        recording = open_recording(unpack(DATA / "fresh" / form / f"{program}{FORMATS[form]}", tmp_path / form))
        if form == "run":  # from where the program's own work begins, as the other recorder does
            recording.window = _own_window(
                recording, json.loads((DATA / f"fresh/run/{program}.truth.json").read_text())
            )
        said.append(account_of(Joined(recording)).main)
    for line in (Line.PAGEABLE, Line.AT_LINK_RATE, Line.BELOW_LINK_RATE):
        assert said[0].share(line) == pytest.approx(said[1].share(line), abs=0.05)


def _own_window(recording: Recording, truth: dict) -> ServingWindow:
    first, _ = recorded_span(recording)
    end = truth["end_ns"] - first
    return serving_window(recording, end - truth["account"]["window_ns"], end)
