"""Notes of blocks as a recording's tables: what was followed to the end, and nonsense left out."""

from __future__ import annotations

import pytest

from kvprobe.recordings.block_notes import BlockNotes
from kvprobe.recordings.model import Recording
from kvprobe.recordings.vocabulary import Names
from kvprobe.reuse.estimate import WHOLE
from kvprobe.reuse.sample import LOADED, STORED


def read(*events: dict) -> Recording:
    recording = Recording([])
    names = Names(recording.names)
    notes = BlockNotes(names)
    for event in events:
        notes.event({"server": "vllm", "source": "pool", **event}, 0, 100, 5)
    notes.fill(recording)
    recording.names = names.list
    return recording


def test_what_was_followed_at_first_only_is_left_out() -> None:
    low, high = (WHOLE // 4) << 24, (WHOLE // 2) << 24
    found = read(
        {"threshold": WHOLE, "notes": [[10, low, STORED], [11, high, STORED]], "counts": {"stored": 2}, "blocks": 7},
        {"threshold": WHOLE // 2, "notes": [[12, low, LOADED]], "counts": {"stored": 2, "loaded": 1}, "blocks": 6},
    )
    assert found.block_uses["block"].tolist() == [low, low]
    assert found.block_uses["time_ns"].tolist() == [15, 17]
    pools = found.block_pools
    assert (pools.rows, pools["followed"][0], pools["blocks"][0], pools["block_bytes"][0]) == (1, 0.5, 7, -1)
    assert (pools["stored"][0], pools["loaded"][0]) == (2, 1)
    assert found.text(int(pools["source"][0])) == "pool"


@pytest.mark.parametrize(
    "event",
    [
        {},
        {"threshold": 0},
        {"threshold": "all"},
        {"threshold": WHOLE + 1},
    ],
)
def test_an_event_without_a_threshold_says_nothing(event: dict) -> None:
    assert read(event).block_pools.rows == 0


@pytest.mark.parametrize(
    "notes", [None, 7, [[1, 2]], [[1, -2, 1]], [[1, 2, 99]], [[True, 2, 1]], [["a", 2, 1]], [None]]
)
def test_notes_that_mean_nothing_are_left_out(notes: object) -> None:
    found = read({"threshold": WHOLE, "notes": notes, "counts": notes, "blocks": notes})
    assert found.block_pools.rows == 1 and found.block_uses.rows == 0
