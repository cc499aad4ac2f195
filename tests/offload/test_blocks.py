"""Block ids as callers give them, and what is refused of them, whatever came before."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvprobe.errors import UsageError
from kvprobe.offload import BlockPool
from kvprobe.offload.blocks import COPIED_IDS


def _read_only(ids):
    ids = np.array(ids)
    ids.flags.writeable = False
    return ids


def _torch(ids):
    return pytest.importorskip("torch").tensor(ids)


KINDS = {
    "list": list,
    "tuple": tuple,
    "list of numpy's numbers": lambda ids: list(np.array(ids, dtype=np.int32)),
    "list of floats": lambda ids: [float(each) for each in ids],
    "generator": iter,
    "int64": lambda ids: np.array(ids, dtype=np.int64),
    "int32": lambda ids: np.array(ids, dtype=np.int32),
    "read-only": _read_only,
    "strided": lambda ids: np.repeat(np.array(ids), 3)[::3],
    "reversed": lambda ids: np.array(ids[::-1])[::-1],
    "torch": _torch,
    "torch int32": lambda ids: _torch(ids).int(),
    "torch that needs a gradient": lambda ids: _torch(ids).double().requires_grad_(),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [3, COPIED_IDS + 5])
def test_ids_of_any_kind_name_the_same_blocks(bench, kind, count):
    b = bench(layers=1, blocks=8192, gpu_bytes=16, cpu_bytes=16)
    rng = np.random.default_rng(count)
    gpu, cpu = (rng.permutation(8192)[:count].tolist() for _ in range(2))
    with b.engine(policy="pooled") as engine:
        engine.load(KINDS[kind](cpu), KINDS[kind](gpu)).wait()
    assert np.array_equal(b.bytes_of(b.gpu)[0][gpu], b.bytes_of(b.cpu)[0][cpu])


@pytest.mark.parametrize("ids", [range(5, 5005), range(8191, 7, -2), range(64)])
def test_a_range_names_its_numbers(bench, ids):
    b = bench(layers=1, blocks=8192, gpu_bytes=16, cpu_bytes=16)
    with b.engine(policy="pooled") as engine:
        engine.load(ids, ids).wait()
    assert np.array_equal(b.bytes_of(b.gpu)[0][list(ids)], b.bytes_of(b.cpu)[0][list(ids)])


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_a_destination_twice_is_refused_wherever_it_stands_and_whatever_came_before(bench, data):
    """Few ids of a large pool and many of a small one, in order and out of it, after requests of each outcome."""
    blocks = data.draw(st.sampled_from([1, 63, 64, 65, 700, 40_000]))
    b = bench(layers=1, blocks=blocks, gpu_bytes=16, cpu_bytes=16, virtual_clock=True)
    with b.engine(policy="pooled") as engine:
        for _ in range(data.draw(st.integers(1, 6))):
            seed, count = data.draw(st.integers(0, 999)), data.draw(st.integers(1, min(blocks, 900)))
            rng = np.random.default_rng(seed)
            to = rng.permutation(blocks)[:count] if seed % 2 else (np.arange(count) + seed) % blocks
            source, what = np.arange(count), data.draw(st.sampled_from(["right", "twice", "out of range"]))
            if what == "twice" and count > 1:
                to[data.draw(st.integers(1, count - 1))] = to[0]
            elif what == "out of range":
                to[data.draw(st.integers(0, count - 1))] = data.draw(st.sampled_from([-1, blocks, 2**32, -(2**63)]))
            bad = [each for each in to.tolist() if not 0 <= each < blocks]
            for ask, side in ((engine.load, "GPU"), (engine.store, "CPU")):
                if bad:
                    with pytest.raises(UsageError, match=f"{side} block {bad[0]} is out of range"):
                        ask(source, to)
                elif len(set(to.tolist())) < count:
                    with pytest.raises(UsageError, match="same destination block twice"):
                        ask(source, to)
                else:
                    ask(source, to)
        engine.wait()
        assert engine.idle


def test_the_same_source_may_stand_twice(bench):
    b = bench(layers=1)
    with b.engine(policy="pooled") as engine:
        engine.load([3, 3], [0, 1]).wait()
    gpu, cpu = b.bytes_of(b.gpu)[0], b.bytes_of(b.cpu)[0]
    assert np.array_equal(gpu[0], cpu[3])
    assert np.array_equal(gpu[1], cpu[3])


def test_more_blocks_than_a_pool_can_have_are_refused(bench):
    b = bench(layers=1)
    with pytest.raises(UsageError, match="a pool has at most 4294967296"):
        BlockPool(b.runtime, [(1 << 40, (1 << 32) + 1)], 1)


def test_a_transfer_outlives_the_arrays_that_named_its_blocks(bench):
    b = bench(layers=1, blocks=8192, gpu_bytes=16, cpu_bytes=16)
    with b.engine(policy="pooled") as engine:
        stream = b.runtime.stream_create()
        with b.runtime.gate() as gate:
            gate.launch(stream)  # it is submitted after its arrays are gone
            ids = np.arange(8192)
            transfer = engine.load(ids, ids, after=stream)
            ids[:] = -1
            del ids
            gate.open()
            transfer.wait()
        b.runtime.stream_destroy(stream)
    assert np.array_equal(b.bytes_of(b.gpu)[0], b.bytes_of(b.cpu)[0])
