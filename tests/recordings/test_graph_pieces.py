"""A launch of a graph that was seen in one piece is divided by what the graph holds, and by nothing else."""

from __future__ import annotations

import numpy as np
import pytest

from kvprobe.recordings.graph_pieces import divide_graphs
from kvprobe.recordings.model import Direction, Engine, Recording, Table

MIB = 1 << 20


def recorded(**graph: int) -> Recording:
    """Two launches of 1 ms in one span, of a graph that holds this, and a kernel behind them; a link of 10 GB/s."""
    recording = Recording(source="", has_executions=False)
    recording.machine["link_bytes_per_s"] = {"h2d": 10e9, "d2h": 10e9}
    recording.tables["spans"] = Table(
        "spans",
        {
            "start_ns": np.array([1_000, 2_001_000]),
            "end_ns": np.array([2_001_000, 2_100_000]),
            "process": np.array([0, 0]),
            "device": np.array([0, 0]),
            "stream": np.array([7, 7]),
            "engine": np.array([Engine.OTHER, Engine.KERNEL]),
            "count": np.array([2, 1]),
            "graph": np.array([5, -1]),
        },
    )
    columns = {name: np.array([value]) for name, value in {"process": 0, "graph": 5, **graph}.items()}
    recording.tables["graphs"] = Table("graphs", columns)
    return recording


def ns(recording: Recording, engine: Engine, direction: Direction | None = None) -> int:
    spans = recording.spans
    mine = (spans["engine"] == engine) & (spans["graph"] == 5)
    if direction is not None:
        mine &= spans["direction"] == direction
    return int((spans["end_ns"] - spans["start_ns"])[mine].sum())


def test_copies_take_their_bytes_and_kernels_the_rest() -> None:
    recording = recorded(kernels=3, copies=2, copy_bytes_h2d=1_000_000, copy_bytes_d2h=4_000_000)
    assert divide_graphs(recording) == 2
    assert ns(recording, Engine.COPY, Direction.H2D) == 2 * 100_000
    assert ns(recording, Engine.COPY, Direction.D2H) == 2 * 400_000
    assert ns(recording, Engine.KERNEL) == 2 * 500_000
    spans = recording.spans
    assert (spans["start_ns"][1:] == spans["end_ns"][:-1]).all(), "no instant is in two pieces, or in none"
    of_graphs = spans["graph"] == 5
    assert int(spans["bytes"][of_graphs].sum()) == 2 * 5_000_000
    assert not (spans["engine"] == Engine.OTHER).any()


def test_a_graph_of_kernels_computes_and_one_of_copies_copies() -> None:
    kernels, copies = recorded(kernels=9), recorded(copies=4, copy_bytes_d2h=1_000_000)
    assert divide_graphs(kernels) == divide_graphs(copies) == 2
    assert ns(kernels, Engine.KERNEL) == ns(copies, Engine.COPY, Direction.D2H) == 2_000_000


def test_copies_that_would_not_fit_take_no_more_than_there_is() -> None:
    recording = recorded(kernels=1, copies=2, copy_bytes_h2d=20_000_000, copy_bytes_d2h=60_000_000)
    assert divide_graphs(recording) == 2
    assert ns(recording, Engine.COPY) + ns(recording, Engine.KERNEL) == 2_000_000
    loads, stores = ns(recording, Engine.COPY, Direction.H2D), ns(recording, Engine.COPY, Direction.D2H)
    assert stores == pytest.approx(3 * loads, 0.01)


def test_copies_of_several_streams_may_have_run_beside_kernels() -> None:
    """So much as the copies take may be computing: that is their error, and kernels alone have none."""
    recording = recorded(kernels=3, copies=1, copy_bytes_h2d=1_000_000, several_streams=1)
    assert divide_graphs(recording) == 2
    spans = recording.spans
    copies = spans["engine"] == Engine.COPY
    assert spans["error_ns"][copies].tolist() == [100_000] * 2 and not spans["error_ns"][~copies].any()
    kernels = recorded(kernels=3, several_streams=1)
    assert divide_graphs(kernels) == 2 and ns(kernels, Engine.KERNEL) == 2_000_000


@pytest.mark.parametrize("graph", [{"kernels": 3, "host_nodes": 1}, {"kernels": 3, "graph": 6}])
def test_what_a_graph_holds_is_not_guessed(graph: dict[str, int]) -> None:
    recording = recorded(**graph)
    assert divide_graphs(recording) == 0
    assert recording.spans["engine"].tolist() == [Engine.OTHER, Engine.KERNEL]
