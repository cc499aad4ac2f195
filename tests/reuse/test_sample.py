"""Notes of uses: all or none of a block's, in memory that does not grow."""

from __future__ import annotations

from kvprobe.reuse.estimate import WHOLE
from kvprobe.reuse.sample import LOADED, STORED, BlockSample


def test_all_that_happened_is_noted_in_order_while_there_is_most() -> None:
    times = iter(range(10, 100))
    sample = BlockSample(now_ns=lambda: next(times))
    sample.note(STORED, ["a", "b"])
    sample.note(LOADED, ["b"])
    found = sample.fetch()
    assert [(at, what) for at, _, what in found.notes] == [(10, STORED), (10, STORED), (11, LOADED)]
    assert found.notes[1][1] == found.notes[2][1] != found.notes[0][1]
    assert (found.threshold, found.counts[STORED], found.counts[LOADED]) == (WHOLE, 2, 1)
    assert sample.fetch().notes == [] and sample.fetch().counts[STORED] == 2


def test_where_more_blocks_come_a_part_of_them_is_followed_entirely() -> None:
    sample = BlockSample(most=100)
    for _ in range(3):
        sample.note(LOADED, range(10_000))
    found = sample.fetch()
    assert found.threshold < WHOLE // 50 and found.counts[LOADED] == 30_000
    followed = {block for _, block, _ in found.notes}
    assert 10 < len(followed) <= 100
    assert len(found.notes) == 3 * len(followed)


def test_notes_that_nobody_fetches_do_not_grow() -> None:
    sample = BlockSample()
    for _ in range(40):
        sample.note(LOADED, range(8_000))
    assert len(sample.fetch().notes) <= 1 << 17
