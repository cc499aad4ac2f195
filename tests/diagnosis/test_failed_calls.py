"""Calls that return errors are a finding; what programs ask and handle is none."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "recordings"))

from copies import blocks, recording

from kvprobe.diagnosis import examine
from kvprobe.recordings.model import CallKind, Table


def found(calls, **tables):
    made = recording(calls)
    made.tables.update(tables)
    return {one.cause: one for one in examine(made)}.get("failed_calls")


def copies(many, result, kind=CallKind.COPY):
    return blocks(list(range(many)), result=result, kind=kind)


def test_copies_that_all_fail_are_critical_and_say_which_error():
    one = found(copies(3_000, 1))
    assert (one.severity, one.confidence, one.lost_on) == ("critical", "certain", "none")
    assert one.title == "3,000 calls failed: cudaMemcpyAsync, cudaErrorInvalidValue (1)"
    assert one.evidence[0].text.startswith("all 3,000 calls of cudaMemcpyAsync returned")


def test_a_few_of_many_are_a_warning():
    assert found([*copies(3_000, 0), *copies(20, 1)]).severity == "warning"


@pytest.mark.parametrize("result", [0, 4, 600, 704, 712, 713])
def test_answers_are_no_failures(result):
    assert found(copies(100, result)) is None


def test_memory_that_is_refused_is_information():
    one = found([*copies(100, 0), *copies(3, 2, CallKind.ALLOC)])
    assert one.severity == "info" and "cudaErrorMemoryAllocation (2)" in one.title


def test_an_error_that_stays_leads_however_rare():
    one = found([*copies(3_000, 0), *copies(50, 1), *copies(1, 700)])
    assert one.severity == "critical" and "cudaErrorIllegalAddress" in one.title
    assert one.evidence[0].text.startswith("1 of 3,051")


def test_failures_that_only_the_totals_count_are_named():
    columns = {"process": [0], "stream": [0], "kind": [CallKind.COPY], "calls": [500], "errors": [400], "name": [1]}
    totals = Table("totals", columns)
    assert found(copies(10, 0), totals=totals).title == "400 calls failed: cudaMemcpyAsync, an error that was not kept"
    one = found([*copies(10, 0), *copies(4, 1)], totals=totals)
    assert one.title == "400 calls failed: cudaMemcpyAsync, cudaErrorInvalidValue (1)"


def test_a_context_that_is_gone_when_the_process_ends_is_no_failure():
    gone = blocks([101], result=709, kind=CallKind.SYNC)
    assert found([*copies(100, 0), *gone]) is None
    assert found([*copies(100, 0), *gone, *copies(1, 0)]).severity == "critical"
