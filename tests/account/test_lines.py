"""The lines of an account: each has a number, a title and a name, and every kind of call belongs to one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kvprobe.account.lines import COPIES, HOST, IDLE, LINE_TITLES, OPEN, Line, Unknown, line_of_calls
from kvprobe.recordings.model import CallKind, Memory


def test_lines_and_reasons_are_numbered_from_nought_and_have_words():
    assert [int(one) for one in Line] == list(range(16)) == [int(one) for one in LINE_TITLES]
    assert [int(one) for one in Unknown] == list(range(10))  # below nought is no reason
    assert len({one.text for one in Unknown}) == 10 and len(set(LINE_TITLES.values())) == 16
    assert Line.FULL_QUEUE.key == "full_queue" and Unknown.NO_CALL.key == "no_call"
    assert set(Line) == {Line.COMPUTING, *COPIES, *IDLE} and set(HOST) < set(IDLE)


def test_the_docs_say_which_time_is_no_time_with_work_to_do():
    said = " ".join((Path(__file__).parents[2] / "docs" / "reading.md").read_text().split())
    assert all(f'"{text}"' in said for text in ("nothing to do", *(one.text for one in OPEN)))


@pytest.mark.parametrize(
    ("kind", "memory", "line"),
    [
        (CallKind.COPY, Memory.PINNED, Line.SUBMITTING),
        (CallKind.COPY, Memory.PAGEABLE, Line.PAGEABLE),
        (CallKind.COPY_SYNC, Memory.PAGEABLE, Line.PAGEABLE),
        (CallKind.COPY_SYNC, Memory.PINNED, Line.WAITING_FOR_DEVICE),
        (CallKind.BATCH, Memory.PAGEABLE, Line.SUBMITTING),
        (CallKind.LAUNCH, Memory.PINNED, Line.SUBMITTING),
        (CallKind.GRAPH, Memory.PINNED, Line.SUBMITTING),
        (CallKind.SYNC, Memory.PAGEABLE, Line.WAITING_FOR_DEVICE),
        (CallKind.ALLOC, Memory.PINNED, Line.ALLOCATING),
        (CallKind.FREE, Memory.PINNED, Line.ALLOCATING),
        (CallKind.OTHER, Memory.PINNED, Line.ELSEWHERE),
    ],
)
def test_a_call_belongs_to_the_line_of_its_kind_and_memory(kind, memory, line):
    assert line_of_calls(np.array([kind, 255]), np.array([memory, memory])).tolist() == [line, Line.ELSEWHERE]
