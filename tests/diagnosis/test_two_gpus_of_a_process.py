"""A process that uses two GPUs: what one of them does changes nothing of what is said of the other.

Two recordings of an H200 become one of a process with two GPUs, each with the threads and streams that it had.
"""

import re
import sys
from pathlib import Path

import numpy as np
import pytest

from kvprobe.account import COPIES, HOST, Times
from kvprobe.diagnosis import examine
from kvprobe.recordings import open_recording
from kvprobe.recordings.merge import merge
from kvprobe.recordings.model import CallKind, Direction, Engine, Recording, Source, Table
from kvprobe.recordings.serving import serving_window

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "corpus"))

from grade import unpack

DATA = Path(__file__).resolve().parents[1] / "gpu" / "data" / "accounts" / "nsys"
CALM = "decode_by_graphs_alone"
# Of each kind of trouble one; but none of pageable memory, whose usual rate is the process's.
TROUBLED = [
    "a_graph_replayed_after_python",
    "a_graph_with_its_weights_inside",
    "a_layer_ahead_with_more_bytes_than_compute",
    "a_staging_buffer_pinned_for_each_request",
    "a_submitting_thread_that_shares_its_cpu",
    "kv_of_each_request_loaded_when_it_comes",
    "logits_read_by_synchronous_copies",
    "stores_of_a_prefill_hold_back_the_next_one",
    "torch_blocks_swapped_in_by_copy",
    "torch_tokens_handled_in_python",
]
MS = 1_000_000


def on_gpu(recording, gpu):
    """The same by threads, on a GPU and with numbers of operations that another recording does not have."""
    for kind, table in list(recording.tables.items()):
        columns = dict(table.columns)
        if "device" in columns:
            columns["device"] = np.full(table.rows, gpu)
        if "thread" in columns:
            columns["thread"] = np.where(columns["thread"] >= 0, columns["thread"] + (gpu << 40), -1)
        for name in {"correlation", "graph"} & set(columns):
            columns[name] = np.where(columns[name] >= 0, 2 * columns[name] + gpu, -1)
        recording.tables[kind] = Table(kind, columns)
    recording.machine.pop("unix_offset_ns", None)
    return recording


def of_one_process(recording):
    """All of its processes become one."""
    for kind, table in list(recording.tables.items()):
        columns = dict(table.columns)
        if kind == "processes":
            columns = {name: column[:1] for name, column in columns.items()}
        elif "process" in columns:
            columns["process"] = np.minimum(columns["process"], 0)
        recording.tables[kind] = Table(kind, columns)
    return recording


def opened(program, folder):
    return open_recording(unpack(DATA / f"{program}.sqlite.gz", folder))


@pytest.mark.parametrize("program", TROUBLED)
def test_a_gpu_beside_which_the_other_one_computes_is_told_what_it_is_told_alone(program, tmp_path):
    one = opened(program, tmp_path)
    window, alone = serving_window(one), examine(one)
    both = of_one_process(merge([on_gpu(opened(program, tmp_path), 0), on_gpu(opened(CALM, tmp_path), 1)]))
    both.window = window
    found = examine(both)
    mine, theirs = (list(one.account.gpus[0].to_json().items()) for one in (alone, found))
    assert [(name, line) for name, line in mine if name != "pids"] == [one for one in theirs if one[0] != "pids"]
    assert [(one.cause, one.severity) for one in found if one.severity != "info"] == [
        (one.cause, one.severity) for one in alone if one.severity != "info"
    ]


def test_what_a_stream_waited_for_is_not_what_the_other_gpu_ran(tmp_path):
    program = "kernels_and_copies_behind_a_callback"
    both = of_one_process(merge([on_gpu(opened(program, tmp_path), 0), on_gpu(opened(CALM, tmp_path), 1)]))
    both.window = serving_window(opened(program, tmp_path))
    (fence,) = [one for one in examine(both) if one.cause == "fence_before_copies"]
    assert "while the stream waited for a host function (cudaLaunchHostFunc)" in fence.title


@pytest.mark.parametrize(
    ("program", "title"),
    [
        ("torch_tokens_handled_in_python", r"2 GPUs were idle for \d+ ms together, in [\d,]+ gaps, while the host"),
        ("kv_of_each_request_loaded_when_it_comes", r"GPU 0 \(the worst of 2\) waited \d+ ms for loads"),
        ("a_layer_ahead_with_more_bytes_than_compute", r"only copies ran for \d+ ms on each of 2 GPUs"),
    ],
)
def test_a_title_says_of_which_gpu_it_is_or_of_how_many(program, title, tmp_path):
    both = of_one_process(merge([on_gpu(opened(program, tmp_path), gpu) for gpu in (0, 1)]))
    both.window = serving_window(opened(program, tmp_path))
    first = examine(both)[0]
    assert re.search(title, first.title)
    assert not first.title.startswith("The GPU")


def copies_alone(rate, steps=300):
    """Two GPUs of a process, seen by timing events: each loads for 1.7 of 2 ms what takes the link that at `rate`."""
    start = np.arange(steps) * 2 * MS
    size = int(1.7 * MS * rate)
    both = np.repeat(start, 2), np.tile([0, 1], steps)
    recording = Recording([Source("run", "kvprobe")], names=["", "cudaMemcpyAsync"])
    recording.machine["link_bytes_per_s"] = 50e9
    calls = {"process": np.zeros(2 * steps), "start_ns": both[0] + both[1], "end_ns": both[0] + both[1] + 2_000}
    calls |= {"thread": 100 + both[1], "stream": both[1], "name": np.ones(2 * steps)}
    place = np.arange(2 * steps) % 8 * size
    recording.tables["calls"] = Table(
        "calls",
        {
            **calls,
            "kind": np.full(2 * steps, CallKind.COPY),
            "bytes": np.full(2 * steps, size),
            "direction": np.full(2 * steps, Direction.H2D),
            "count": np.ones(2 * steps),
            "src": (0x7F00_0000_0000 + place).astype(np.uint64),
            "dst": (0x7E00_0000_0000 + place + both[1] * (1 << 36)).astype(np.uint64),
        },
    )
    begins = np.concatenate((both[0] + 10_000, both[0] + int(1.7 * MS) + 10_000))
    took = np.repeat([int(1.7 * MS), MS // 5], 2 * steps)
    order = np.argsort(begins, kind="stable")
    kinds = np.repeat([Engine.COPY, Engine.KERNEL], 2 * steps)
    spans = {"start_ns": begins, "end_ns": begins + took, "engine": kinds, "device": np.tile(both[1], 2)}
    spans |= {"stream": np.tile(both[1], 2), "direction": np.where(kinds == Engine.COPY, Direction.H2D, 0)}
    spans |= {"bytes": np.where(kinds == Engine.COPY, size, 0), "count": np.ones(4 * steps)}
    spans["process"] = np.zeros(4 * steps)
    recording.tables["spans"] = Table("spans", {name: column[order] for name, column in spans.items()})
    end = np.full(2, int(start[-1]) + 2 * MS)
    seen = {"start_ns": [0, 0], "end_ns": end, "process": [0, 0], "device": [0, 1]}
    recording.tables["coverage"] = Table("coverage", seen)
    recording.tables["streams"] = Table("streams", {"process": [0, 0], "device": [0, 1], "handle": [7, 8]})
    recording.tables["processes"] = Table("processes", {"pid": [1]})
    return recording


def test_a_full_link_of_each_of_two_gpus_is_told_of_both():
    found = examine(copies_alone(50))
    one = found[0]
    assert one.cause == "link_bound" and one.title.count("on each of 2 GPUs") == 1
    assert one.lost_ns == pytest.approx(2 * 300 * 1.7 * MS, rel=0.03)
    for gpu in found.account.gpus:
        assert found.account.claimed_ns(gpu, "link_bound", COPIES) == pytest.approx(300 * 1.7 * MS, rel=0.03)
    assert [text.text[:6] for text in one.evidence] == ["GPU 0,"] * 3 + ["GPU 1,"] * 3


def test_what_a_process_gives_both_links_is_not_what_one_of_them_carries():
    """Each link is half full: all bytes of the process together would fill one."""
    assert "link_bound" not in [one.cause for one in examine(copies_alone(25))]


def test_a_cause_of_one_gpu_claims_nothing_of_the_other():
    found = examine(copies_alone(50))
    account = found.account
    for gpu in account.gpus:
        gpu.stretches.cause[:] = -1
    start, end = (np.asarray(one) for one in found.account.gpus[0].stretches.edges[[0, -1]])
    got = account.claim("mine", Times(start[None], end[None], np.array([1])), (*COPIES, *HOST))
    assert list(got) == [1]
