"""Uploads are told by expert: how many, which again, how far apart; other memory that looks alike is none."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from kvprobe.recordings import open_recording
from kvprobe.recordings.experts import expert_uploads
from kvprobe.recordings.model import Direction
from kvprobe.reuse.distances import FIRST
from tests.recordings.experts_made import GPU, STRIDE, Slots, Trace, as_llama_cpp, in_slots, routed

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "corpus"))

from grade import unpack

QUEUES = Path(__file__).resolve().parents[1] / "gpu" / "data" / "queues"


def test_what_llama_cpp_uploads_is_told_to_the_count() -> None:
    trace, uploads = as_llama_cpp()
    (found,) = expert_uploads(trace.recording())
    assert (len(found.key), found.slots, len(found.tensors)) == (uploads, 0, 9)
    assert {one.expert_bytes for one in found.tensors} == {STRIDE}
    assert all(one.visits == 40 and one.typical == 4 and not one.whole for one in found.tensors)
    assert int(found.bytes.sum()) == sum(size for _, _, size, _ in trace.rows)
    picks = list(routed(1, 40, 3, 32, 4))
    for number, tensor in enumerate(found.tensors):
        mine = [one for step in picks for one in step[number // 3]]
        seen = found.expert[found.tensor == number]
        assert (seen + min(mine)).tolist() == mine
        assert (tensor.uploads, tensor.different) == (len(mine), len(set(mine)))


@pytest.mark.parametrize("slots", [16, 40, 96])
def test_what_more_room_would_keep_is_exact_where_nothing_is_kept(slots: int) -> None:
    trace, _ = as_llama_cpp()
    (found,) = expert_uploads(trace.recording())
    cache = Slots(slots)
    for key in found.key.tolist():
        cache.use(key)
    assert int(((found.distance == FIRST) | (found.distance > slots)).sum()) == cache.misses


@pytest.mark.parametrize("slots", [8, 24, 48])
def test_the_misses_of_a_cache_are_named_to_the_count(slots: int) -> None:
    trace, cache = in_slots(slots)
    (found,) = expert_uploads(trace.recording())
    assert (len(found.key), found.slots, len(found.tensors)) == (cache.misses, slots, 4)
    assert int(found.again.sum()) == cache.misses - len(np.unique(found.key))


@pytest.mark.parametrize("slots", [8, 24, 48])
@pytest.mark.parametrize("more", [4, 16, 40])
def test_more_slots_keep_at_least_what_is_said_of_them(slots: int, more: int) -> None:
    trace, now = in_slots(slots)
    (found,) = expert_uploads(trace.recording())
    kept = int((found.again & (found.distance <= more)).sum())
    saved = now.misses - in_slots(slots + more)[1].misses
    assert kept <= saved
    assert kept >= 0.75 * saved or more < 16


def test_a_tensor_that_moves_whole_is_counted() -> None:
    trace, _ = as_llama_cpp(steps=20, layers=1)
    base, gpu = 0x100000000, GPU
    trace.copy(base, gpu, 32 * STRIDE)
    trace.copy(base + 32 * STRIDE, gpu + 32 * STRIDE + 256, 32 * STRIDE)
    for expert in range(32):  # all were seen before
        trace.rows.insert(0, (base + expert * STRIDE, gpu + expert * STRIDE, STRIDE, Direction.H2D))
    (found,) = expert_uploads(trace.recording())
    assert found.tensors[0].whole == 2


def test_blocks_of_a_pool_and_layers_of_dense_weights_are_no_experts() -> None:
    random = np.random.default_rng(3)
    pool, dense, stores = Trace(), Trace(), Trace()
    for _ in range(50):
        blocks = random.choice(64, 8, replace=False)
        for layer in range(8):
            for block in blocks.tolist():
                source = 0x100000000 + layer * (64 * STRIDE + 4096) + block * STRIDE
                pool.copy(source, GPU + int(random.integers(256)) * STRIDE, STRIDE)
            dense.copy(0x100000000 + layer * STRIDE, GPU + layer * STRIDE, STRIDE)
    assert expert_uploads(pool.recording()) == []
    assert expert_uploads(dense.recording()) == []
    stores.rows = list(as_llama_cpp()[0].rows)
    for tensor in range(9):
        written = 0x100000000 + (32 * tensor + 16) * STRIDE + (tensor // 3) * 4096
        stores.copy(GPU, written, STRIDE, Direction.D2H)
    assert expert_uploads(stores.recording()) == []


def test_a_few_of_many_blocks_are_no_experts_however_they_lie(tmp_path: Path) -> None:
    """A program that loads 12,000 blocks of 16 KiB in any order: 12 of them keep their offset, as experts do."""
    path = unpack(QUEUES / "small_blocks_behind_a_forward-totals-0.kvprobe.tar.gz", tmp_path)
    assert expert_uploads(open_recording(path)) == []


def test_experts_beside_many_blocks_are_experts_while_they_are_a_good_part_of_the_bytes() -> None:
    trace, uploads = as_llama_cpp()
    moved = sum(size for _, _, size, _ in trace.rows)
    random = np.random.default_rng(5)
    for number in range(4 * moved // STRIDE):
        trace.copy(0x900000000 + int(random.integers(1 << 20)) * 4160, GPU + (number + 7) * 3 * STRIDE, STRIDE)
    (found,) = expert_uploads(trace.recording())
    assert len(found.key) >= uploads


def test_a_recording_without_addresses_has_none() -> None:
    trace, _ = as_llama_cpp(steps=2)
    trace.rows = [(0, 0, size, way) for _, _, size, way in trace.rows]
    assert expert_uploads(trace.recording()) == []
