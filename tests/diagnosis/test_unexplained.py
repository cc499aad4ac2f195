"""`unexplained`: what is to be recorded next answers the reason why nothing could be told, and is a whole command."""

from __future__ import annotations

import numpy as np
import pytest

from kvprobe.diagnosis import diagnose
from kvprobe.recordings.model import CallKind, Direction, Engine, Memory, Recording, Source, Table

QUEUES = "the recording does not show how full the launch queues were"
BY_NSYS = "`kvprobe run --nsys -- COMMAND`"


def recording(slow_ns: int, *, executions: bool) -> Recording:
    """500 copies of 2 us, one in a hundred slow, each of which the GPU runs at once where `executions` are recorded."""
    made = Recording(source=[Source("run", "kvprobe")], names=["", "cudaMemcpyAsync"])
    rows = np.arange(500)
    slow = rows % 100 == 50
    start = rows * 1_100_000 + np.cumsum(slow) * slow_ns
    end = start + np.where(slow, slow_ns, 2_000)
    same = np.zeros(len(rows))
    made.tables["calls"] = Table(
        "calls",
        {
            "start_ns": start,
            "end_ns": end,
            "process": same,
            "thread": same + 7,
            "kind": same + CallKind.COPY,
            "name": same + 1,
            "stream": same,
            "direction": same + Direction.H2D,
            "memory": same + Memory.PINNED,
            "bytes": same + 4096,
            "count": same + 1,
            "correlation": rows,
        },
    )
    made.tables["processes"] = Table("processes", {"pid": [1]})
    made.tables["streams"] = Table("streams", {"handle": [0], "process": [0]})
    if executions:
        made.has_executions = True
        made.tables["executions"] = Table(
            "executions",
            {
                "start_ns": end,
                "end_ns": end + 1_000,
                "process": same,
                "stream": same,
                "engine": same + Engine.COPY,
                "correlation": rows,
            },
        )
    return made


@pytest.mark.parametrize("slow_ns", [4_000_000, 8_000_000])
def test_where_the_gpu_was_not_recorded_the_gpu_is_what_has_to_be_recorded(slow_ns: int) -> None:
    (found,) = [one for one in diagnose(recording(slow_ns, executions=False)) if one.cause == "unexplained"]
    (record,) = found.cure
    assert found.reason.endswith(QUEUES)
    assert BY_NSYS in record.text and "needs a GPU" in record.text and "scheduling" not in record.text


@pytest.mark.parametrize(("slow_ns", "stacks"), [(4_000_000, False), (8_000_000, True)])
def test_where_the_queues_had_free_slots_the_thread_is_what_has_to_be_recorded(slow_ns: int, stacks: bool) -> None:
    (found,) = [one for one in diagnose(recording(slow_ns, executions=True)) if one.cause == "unexplained"]
    (record,) = found.cure
    assert found.reason.endswith("were made while their queues had free slots")
    assert "`nsys profile -t cuda,nvtx --cpuctxsw=process-tree COMMAND`" in record.text
    assert ("`kvprobe run --stacks-after 5 -- COMMAND`" in record.text) == stacks


def test_where_only_records_of_events_were_slow_a_recorder_that_labels_full_queues_decides() -> None:
    made = recording(4_000_000, executions=True)
    calls = made.calls
    slow = calls["end_ns"] - calls["start_ns"] > 2_000
    made.names.append("cudaEventRecord")
    calls["kind"][slow], calls["name"][slow], calls["stream"][slow] = CallKind.EVENT, 2, -1
    made.tables["executions"] = made.tables["executions"].where(~slow)
    (found,) = [one for one in diagnose(made) if one.cause == "unexplained"]
    assert found.reason.endswith(QUEUES)
    assert BY_NSYS in found.cure[0].text and "2025.5.2 or later" in found.cure[0].text
