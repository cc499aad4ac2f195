"""Copies of a batch begin as its call returns: until then the GPU waits for the call, and for no copy."""

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "recordings"))

from copies import GPU, HOST, recording

from kvprobe.account import Line, account_of
from kvprobe.recordings.joined import Joined
from kvprobe.recordings.model import CallKind, Direction, Engine, Table

STEPS, STEP_NS, CALL_NS, COPIED_NS, KERNEL_NS, SIZE = 200, 2_000_000, 600_000, 300_000, 900_000, 600 * 4096


def batches(copies, after_ns=COPIED_NS, standing_ns=0):
    """Steps of 2 ms: a batch, a kernel. The batch's timing events: at its call's entry, `after_ns` behind its return.

    `standing_ns`: so long a kernel of the step before still runs in the stream as the batch is given to it.
    """
    calls = []
    for step in range(STEPS):
        place = {"src": HOST + step % 8 * SIZE, "dst": GPU + step % 8 * SIZE, "direction": Direction.H2D}
        calls.append({"kind": CallKind.BATCH, "stream": 0, "bytes": SIZE, **place, "dur_ns": CALL_NS, "count": copies})
        calls.append({"kind": CallKind.LAUNCH, "stream": 0, "dur_ns": 2_000, "gap_ns": 0})
        calls.append({"kind": CallKind.SYNC, "stream": 0, "dur_ns": STEP_NS - CALL_NS - 3_000, "gap_ns": 0})
    out = recording(calls)
    out.machine["link_bytes_per_s"] = 50e9
    entered = np.asarray(out.calls["start_ns"][::3])
    copied = entered + CALL_NS + after_ns
    begins = np.concatenate((entered + standing_ns, copied))
    ends = np.concatenate((copied, np.append(entered[1:], entered[-1] + STEP_NS) + standing_ns))
    if not standing_ns:
        ends[STEPS:] = copied + KERNEL_NS
    order = np.argsort(begins, kind="stable")
    kinds = np.repeat([Engine.COPY, Engine.KERNEL], STEPS)
    spans = {"start_ns": begins, "end_ns": ends, "engine": kinds, "count": np.ones(2 * STEPS)}
    spans |= {"direction": np.where(kinds == Engine.COPY, Direction.H2D, Direction.UNKNOWN)}
    spans |= {"bytes": np.where(kinds == Engine.COPY, SIZE, 0), "stream": np.zeros(2 * STEPS)}
    out.tables["spans"] = Table("spans", {name: column[order] for name, column in spans.items()})
    end = int(out.calls["end_ns"].max())
    out.tables["coverage"] = Table("coverage", {"start_ns": np.array([0]), "end_ns": np.array([end])})
    (gpu,) = account_of(Joined(out)).gpus
    copies_ns = gpu.ns(Line.AT_LINK_RATE, Line.BELOW_LINK_RATE)
    return gpu.ns(Line.SUBMITTING) / STEPS, copies_ns / STEPS


def test_the_gpu_waits_for_the_call_until_it_returns():
    submitting, copies = batches(600)
    assert submitting == pytest.approx(CALL_NS, rel=0.05) and copies == pytest.approx(COPIED_NS, rel=0.05)


def test_a_batch_behind_a_kernel_is_waited_for_as_its_stream_says():
    submitting, copies = batches(600, standing_ns=100_000)
    assert submitting < 0.1 * CALL_NS and copies == pytest.approx(CALL_NS + COPIED_NS - 100_000, rel=0.05)


def test_of_more_copies_nobody_knows_when_the_first_begins():
    submitting, copies = batches(6_000)
    assert submitting < 0.1 * CALL_NS and copies == pytest.approx(CALL_NS + COPIED_NS, rel=0.05)


def test_copies_take_the_time_that_their_bytes_need_on_the_link():
    """They were over 10 us behind the call, and the link needs 49 us for them."""
    submitting, copies = batches(600, after_ns=10_000)
    assert copies == pytest.approx(SIZE / 50, rel=0.05) and submitting == pytest.approx(CALL_NS - 39_000, rel=0.05)
