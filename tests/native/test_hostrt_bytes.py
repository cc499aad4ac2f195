"""Bytes and order under random work on many streams: the host runtime against a model of plain assignments."""

from __future__ import annotations

import ctypes
from ctypes import byref, c_int, c_size_t, c_void_p
from typing import ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvprobe.cuda.hostruntime import host_runtime
from kvprobe.native import build

BLOCK = 512
BLOCKS = 8
H2D, D2H, D2D = 1, 2, 3


class Attributes(ctypes.Structure):
    _fields_: ClassVar = [("order", c_int), ("source", c_int * 2), ("destination", c_int * 2), ("flags", ctypes.c_uint)]


@pytest.fixture(scope="module")
def library():
    build.build()
    library = host_runtime().library
    library.cudaMemcpyAsync.argtypes = [c_void_p, c_void_p, c_size_t, c_int, c_void_p]
    library.cudaMemsetAsync.argtypes = [c_void_p, c_int, c_size_t, c_void_p]
    library.cudaStreamWaitEvent.argtypes = [c_void_p, c_void_p, ctypes.c_uint]
    library.cudaEventRecord.argtypes = [c_void_p, c_void_p]
    library.cudaStreamSynchronize.argtypes = [c_void_p]
    yield library
    host_runtime().reset()


def made(function, *arguments) -> int:
    handle = c_void_p()
    assert function(byref(handle), *arguments) == 0
    assert handle.value
    return handle.value


block = st.integers(0, BLOCKS - 1)
stream = st.integers(0, 4)
step = st.one_of(
    st.tuples(st.just("load"), stream, block, block),
    st.tuples(st.just("store"), stream, block, block),
    st.tuples(st.just("move"), stream, block, block),
    st.tuples(st.just("batch"), stream, st.lists(st.tuples(block, block), min_size=1, max_size=40)),
    st.tuples(st.just("set"), stream, block, st.integers(0, 255)),
    st.tuples(st.just("delay"), stream, st.integers(0, 50_000)),
    st.tuples(st.just("pageable"), stream, block, st.integers(0, 255)),
)


@settings(max_examples=60, deadline=None)
@given(
    steps=st.lists(step, max_size=60),
    depth=st.sampled_from([1, 2, 16, 1021]),
    channels=st.integers(1, 4),
    clock=st.sampled_from([1, 2]),
    seed=st.integers(1, 2**32),
)
def test_bytes_follow_the_order_that_streams_and_events_give(library, steps, depth, channels, clock, seed):
    """Every step waits for the one before it by an event, whatever its stream: the result is that of a loop."""
    host_runtime(
        depth=depth,
        compute_channels=channels,
        copy_channels=channels,
        latency_ns=100,
        virtual_clock=clock,
        seed=seed,
    )
    size = BLOCK * BLOCKS
    host, device = made(library.cudaHostAlloc, c_size_t(size), 0), made(library.cudaMalloc, c_size_t(size))
    streams = [made(library.cudaStreamCreateWithFlags, 1) for _ in range(5)]
    event = made(library.cudaEventCreateWithFlags, 2)
    start = bytes(range(1, BLOCKS + 1))
    for i, value in enumerate(start):
        ctypes.memset(host + i * BLOCK, value, BLOCK)
    model_host, model_device = list(start), [0] * BLOCKS

    for kind, where, *rest in steps:
        handle = streams[where]
        assert library.cudaStreamWaitEvent(handle, event, 0) == 0
        if kind == "load":
            to, source = rest
            error = library.cudaMemcpyAsync(device + to * BLOCK, host + source * BLOCK, BLOCK, H2D, handle)
            model_device[to] = model_host[source]
        elif kind == "store":
            to, source = rest
            error = library.cudaMemcpyAsync(host + to * BLOCK, device + source * BLOCK, BLOCK, D2H, handle)
            model_host[to] = model_device[source]
        elif kind == "move":
            to, source = rest
            error = library.cudaMemcpyAsync(device + to * BLOCK, device + source * BLOCK, BLOCK, D2D, handle)
            model_device[to] = model_device[source]
        elif kind == "batch":
            pairs = list(dict(rest[0]).items())  # order inside a batch is not promised
            n = len(pairs)
            destinations = (c_void_p * n)(*(device + to * BLOCK for to, _ in pairs))
            sources = (c_void_p * n)(*(host + source * BLOCK for _, source in pairs))
            error = library.cudaMemcpyBatchAsync(
                destinations,
                sources,
                (c_size_t * n)(*[BLOCK] * n),
                c_size_t(n),
                byref(Attributes(order=1)),
                byref(c_size_t(0)),
                c_size_t(1),
                c_void_p(handle),
            )
            for to, source in pairs:
                model_device[to] = model_host[source]
        elif kind == "set":
            to, value = rest
            error = library.cudaMemsetAsync(device + to * BLOCK, value, BLOCK, handle)
            model_device[to] = value
        elif kind == "pageable":
            to, value = rest
            error = library.cudaMemcpyAsync(device + to * BLOCK, bytes([value]) * BLOCK, BLOCK, H2D, handle)
            model_device[to] = value
        else:
            error = library.kvhostLaunchDelay(handle, rest[0])
        assert error == 0
        assert library.cudaEventRecord(event, handle) == 0

    assert library.cudaDeviceSynchronize() == 0
    assert ctypes.string_at(host, size) == b"".join(bytes([value]) * BLOCK for value in model_host)
    assert ctypes.string_at(device, size) == b"".join(bytes([value]) * BLOCK for value in model_device)


@settings(max_examples=30, deadline=None)
@given(
    work=st.lists(st.lists(st.tuples(block, st.integers(0, 30_000)), max_size=30), min_size=1, max_size=6),
    depth=st.sampled_from([1, 16, 1021]),
    channels=st.integers(1, 4),
    clock=st.sampled_from([1, 2]),
    seed=st.integers(1, 2**32),
)
def test_streams_that_share_nothing_do_not_disturb_one_another(library, work, depth, channels, clock, seed):
    """Each stream shifts blocks in a region of its own, with delays between: its own order alone decides its bytes."""
    host_runtime(
        depth=depth,
        compute_channels=channels,
        copy_channels=channels,
        latency_ns=100,
        virtual_clock=clock,
        seed=seed,
    )
    size = BLOCK * BLOCKS
    regions = []
    for steps in work:
        host, device = made(library.cudaHostAlloc, c_size_t(size), 0), made(library.cudaMalloc, c_size_t(size))
        for i in range(BLOCKS):
            ctypes.memset(host + i * BLOCK, i + 1, BLOCK)
        regions.append((made(library.cudaStreamCreateWithFlags, 1), host, device, list(range(1, BLOCKS + 1)), steps))
    for turn in range(max(map(len, work))):
        for handle, host, device, model, steps in regions:
            if turn < len(steps):
                at, delay_ns = steps[turn]
                assert library.cudaMemcpyAsync(device, host + at * BLOCK, BLOCK, H2D, handle) == 0
                assert library.kvhostLaunchDelay(handle, delay_ns) == 0
                target = (at + turn) % BLOCKS
                assert library.cudaMemcpyAsync(host + target * BLOCK, device, BLOCK, D2H, handle) == 0
                model[target] = model[at]
    for handle, host, _, model, _ in regions:
        assert library.cudaStreamSynchronize(handle) == 0
        assert ctypes.string_at(host, size) == b"".join(bytes([value]) * BLOCK for value in model)
