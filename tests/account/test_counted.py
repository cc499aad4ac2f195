"""What the account says of time that counts of kernels and copies tell, and not marks between them."""

from __future__ import annotations

import numpy as np
import pytest

from kvprobe.account import Account, GpuAccount, Line, account_of
from kvprobe.account.lines import Unknown
from kvprobe.recordings.joined import Joined
from kvprobe.recordings.model import CallKind, Direction, Engine, Recording, Source, Table
from kvprobe.reporting.account import account_lines

MS = 1_000_000
WINDOW = 100 * MS
Span = tuple[int, int, Engine, int]  # when it begins and ends, ms; how much of it may be of another kind, ns


def account(*spans: Span) -> GpuAccount:
    """Of 100 ms in which a GPU did that, each span on a stream of its own."""
    recording = Recording([Source("made", "trace")], names=["", "cudaMemcpyAsync"])
    calls = {"start_ns": [0, WINDOW - 1_000], "end_ns": [1_000, WINDOW], "kind": [CallKind.COPY] * 2, "name": [1, 1]}
    recording.tables["calls"] = Table("calls", {**calls, "thread": [7, 7], "stream": [0, 0]})
    start, end, engine, error = (np.array(column) for column in zip(*spans, strict=True))
    copies = engine == Engine.COPY
    columns = {"start_ns": start * MS, "end_ns": end * MS, "engine": engine, "error_ns": error}
    columns |= {"direction": np.where(copies, int(Direction.H2D), 0), "bytes": np.where(copies, 4096, 0)}
    recording.tables["spans"] = Table(
        "spans", {**columns, "count": np.ones(len(spans)), "stream": np.arange(len(spans))}
    )
    recording.tables["coverage"] = Table("coverage", {"start_ns": [0], "end_ns": [WINDOW]})
    recording.tables["streams"] = Table("streams", {"process": [0] * len(spans), "handle": np.arange(len(spans)) + 7})
    recording.tables["processes"] = Table("processes", {"pid": [1]})
    (gpu,) = account_of(Joined(recording)).gpus
    return gpu


def said(gpu: GpuAccount, line: str) -> str:
    (one,) = (text for text in account_lines(Account([gpu], [])) if line in text)
    return one


def test_a_line_says_how_much_of_it_is_by_counts_and_how_far_it_may_be_off() -> None:
    gpu = account(
        (1, 21, Engine.KERNEL, 0),
        (21, 51, Engine.KERNEL, 900_000),
        (51, 61, Engine.COPY, 300_000),
        (70, 80, Engine.COPY, 0),
    )
    told = gpu.to_json()
    assert (told["by_counts_ns"], told["by_counts_error_ns"]) == (40 * MS, 1_200_000)
    assert (told["by_samples_ns"], told["by_samples_error_ns"]) == (0, 0)
    assert told["computing_ns"] == 50 * MS
    assert said(gpu, "computing").endswith("computing (30% estimated by counts, ± 1.2%)")
    assert said(gpu, "waiting for copies").endswith("(10% estimated by counts, ± 1.2%)")


def test_where_all_was_measured_nothing_is_by_counts() -> None:
    gpu = account((1, 51, Engine.KERNEL, 0), (51, 90, Engine.COPY, 0))
    assert gpu.to_json()["by_counts_ns"] == gpu.to_json()["by_counts_error_ns"] == 0
    assert said(gpu, "computing").endswith("computing")


def test_beside_a_kernel_that_was_measured_nothing_is_estimated() -> None:
    """Half of the time that counts tell lies beside it: what ran there computes, and half of the error is left."""
    gpu = account((1, 41, Engine.KERNEL, 2 * MS), (21, 61, Engine.KERNEL, 0))
    told = gpu.to_json()
    assert (told["by_counts_ns"], told["by_counts_error_ns"]) == (20 * MS, MS)
    assert told["computing_ns"] == 60 * MS


@pytest.mark.parametrize(("error", "known"), [(2_400_000, True), (2_600_000, False)])
def test_errors_of_streams_add_up_and_above_five_points_the_time_is_not_known(error: int, known: bool) -> None:
    gpu = account((1, 61, Engine.KERNEL, error), (1, 61, Engine.COPY, error), (61, 71, Engine.KERNEL, 0))
    told = gpu.to_json()
    assert told["computing_ns"] == (70 if known else 10) * MS
    assert (told["by_counts_ns"], told["by_counts_error_ns"]) == ((60 * MS, 2 * error) if known else (0, 0))
    assert gpu.unknown_ns().get(Unknown.NOT_COVERED, 0) == (0 if known else 60 * MS)
    assert gpu.ns(*Line) == gpu.window_ns
