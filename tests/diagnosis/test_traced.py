"""From a finding to its calls, and from a call to the Python line that made it."""

import numpy as np
import pytest

from kvprobe.diagnosis import diagnose
from kvprobe.diagnosis.pageable_memory import STAGED, STAGED_BYTES
from kvprobe.diagnosis.traced import line_of
from kvprobe.recordings.model import CallKind, Memory, Recording, Source, Table
from kvprobe.reporting import build_page
from tests.examining import examination

MS = 1_000_000
SETUP = "allocate (/app/server.py:10)\nmain (/app/server.py:3)"
COPY = "copy_ (/usr/lib/python3.12/site-packages/torch/x.py:5)\nload (/app/server.py:42)\nmain (/app/server.py:7)"
LATER = "wait (/app/server.py:99)"


@pytest.mark.parametrize(
    ("stack", "line"),
    [
        (COPY, "/app/server.py:42"),
        ("run (/x/site-packages/lib.py:5)", "/x/site-packages/lib.py:5"),
        (  # a server that pip installed
            "wait (/x/site-packages/torch/cuda/streams.py:5)\nstep (/x/site-packages/vllm/v1/core.py:7)\n"
            "call (/usr/lib/python3.12/threading.py:9)\n<module> (/usr/local/bin/vllm:8)",
            "/x/site-packages/vllm/v1/core.py:7",
        ),
        ("_wrapped (/x/kvprobe/instrument/calls.py:9)\nstep (/app/a b.py:2)", "/app/a b.py:2"),
        ("", ""),
        ("<native>", ""),
    ],
)
def test_the_line_is_the_programs_own(stack, line):
    assert line_of(stack) == line


def recording(copy_stack_ns, copy_bytes=1 << 20):
    """Pinning for 300 ms at the start, 40 quick copies, one pageable copy of 100 ms; a stack of each long call."""
    start = [0, *(400 * MS + i * 10_000 for i in range(40)), 500 * MS]
    took = [300 * MS, *[1_000] * 40, 100 * MS]
    kind = [CallKind.ALLOC, *[CallKind.COPY] * 41]
    memory = [Memory.UNKNOWN, *[Memory.PINNED] * 40, Memory.PAGEABLE]
    names = ["", "cudaHostAlloc", "cudaMemcpyAsync", SETUP, COPY, LATER]
    tables = {
        "calls": Table(
            "calls",
            {
                "start_ns": start,
                "end_ns": np.add(start, took),
                "kind": kind,
                "memory": memory,
                "bytes": [0, *[4096] * 40, copy_bytes],
                "thread": [7] * 42,
                "stream": [-1] + [0] * 41,
                "name": [1] + [2] * 41,
            },
        ),
        "stacks": Table(
            "stacks",
            {
                "time_ns": [60 * MS, copy_stack_ns, 900 * MS],
                "thread": [7, 7, 7],
                "blocked_ns": [60 * MS, 60 * MS, 60 * MS],
                "stack": [3, 4, 5],
            },
        ),
        "streams": Table("streams", {"handle": [9]}),
        "processes": Table("processes", {"pid": [123]}),
    }
    return Recording([Source("run", "kvprobe")], tables, names)


def pageable(made):
    return next(one for one in diagnose(made) if one.cause == "pageable_memory")


def test_a_finding_shows_its_own_calls_and_their_line_not_that_of_start_up():
    found = pageable(recording(560 * MS))
    (call,) = found.calls
    assert (call.row, call.pid, call.thread, call.name) == (41, 123, 7, "cudaMemcpyAsync")
    assert call.line == "/app/server.py:42"
    assert call.stack[-1] == "main (/app/server.py:7)"
    assert {change.at for change in found.cure if change.kind == "call"} == {"/app/server.py:42"}
    assert found.to_json()["calls"][0]["line"] == "/app/server.py:42"


def test_large_pageable_copies_can_be_tried_staged_small_ones_not():
    for copy_bytes, staged in ((STAGED_BYTES, True), (STAGED_BYTES - 1, False)):
        cures = [change.name for change in pageable(recording(560 * MS, copy_bytes)).cure]
        assert (STAGED.name in cures) is staged


def test_a_stack_that_came_after_the_call_is_not_its_stack():
    (call,) = pageable(recording(601 * MS)).calls
    assert (call.line, call.stack) == ("", ())


def test_the_page_leads_from_the_finding_to_the_line():
    made = recording(560 * MS)
    page = build_page(made, findings=examination(made, [pageable(made)]))
    assert "at /app/server.py:42" in page
    assert "load (/app/server.py:42)" in page
