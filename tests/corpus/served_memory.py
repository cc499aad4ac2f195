"""Served programs that make on the way what they could have kept: pinned memory, a workspace, streams."""

from __future__ import annotations

import ctypes as ct

from accounts import Pool, Stretches, going
from device import D2H, H2D, Device, now
from registry import (
    ALLOCATING,
    AT_LINK_RATE,
    ELSEWHERE,
    PYTHON,
    SUBMITTING,
    WAITING,
    KiB,
    MiB,
    Truth,
    served,
)


@served(
    "allocation_on_hot_path",
    line=ALLOCATING,
    also=("gpu_starved", "synchronisation"),
    like=("pinning_stall", "wasted_stores", "pageable_memory", "context_lock_stall"),
)
def an_output_buffer_pinned_for_each_batch(d: Device) -> Truth:
    """cudaMallocHost makes the buffer that a batch's hidden states leave to, and cudaFreeHost gives it back."""
    d.lib.cudaMallocHost.argtypes = [ct.c_void_p, ct.c_size_t]
    size, lost, idle = (24 if d.gpu else 6) * MiB, 0, Stretches(d)
    for batch in going():
        start = now()
        at = d.made("cudaMallocHost", size)
        lost += now() - start
        idle.end()
        for _ in range(5):
            d.launch(400_000)
        d.copy(at, d.device + batch % 4 * size, size, D2H, d.compute)
        idle.begin()
        d.sync(d.compute)
        start = now()
        d.check(d.lib.cudaFreeHost(at))
        lost += now() - start
        idle.read()
    d.spent.add(ALLOCATING, idle.ns)
    d.spent.stop()
    return {"allocation_on_hot_path": lost}


@served(
    "allocation_on_hot_path",
    line=ALLOCATING,
    or_lines=(AT_LINK_RATE, WAITING),  # an offload runs meanwhile, for which the call waits
    also=("synchronisation", "wasted_stores", "gpu_starved"),
    like=("fence_before_copies", "store_not_ordered", "link_bound"),
)
def a_workspace_freed_while_an_offload_is_under_way(d: Device) -> Truth:
    """After each step its workspace is freed: cudaFree waits for the whole device, an offload in another stream too."""
    pool, each, size, lost = Pool(d, d.bytes_of(300)), 7, (256 if d.gpu else 8) * MiB, 0
    idle, kernel = Stretches(d), 1_000_000
    for step in going():
        start = now()
        workspace = d.made("cudaMalloc", size)
        lost += now() - start
        idle.end()
        d.launch(kernel)
        idle.begin()
        d.order(d.copies[1], d.compute, step % 60)
        for i in range(each):
            home = d.host + (step * each + i) % pool.count * pool.size
            d.copy(home, d.device + i * pool.size, pool.size, D2H, d.copies[1])
        start = now()
        d.check(d.lib.cudaFree(workspace))
        lost += now() - start - kernel  # the kernel would have been waited for
        d.sync(d.compute)
        idle.read()
    d.spent.add(ALLOCATING, idle.ns)
    d.spent.stop()
    return {"allocation_on_hot_path": lost}


@served(
    line=ALLOCATING,
    or_lines=(ELSEWHERE, SUBMITTING, PYTHON),  # a stream is no memory, and not each recorder shows its making
    also=(
        *("allocation_on_hot_path", "context_lock_stall", "gpu_starved", "python_or_gil_bound", "synchronisation"),
        *("first_calls", "small_copies", "channels_exhausted"),
    ),
    like=("aliased_stream", "redundant_loads", "launch_queue_saturation", "cpu_starved"),
)
def streams_made_for_each_request(d: Device) -> Truth:
    """A request makes its own streams, loads by four of them, and destroys them, for twice its kernel's time."""
    d.lib.cudaStreamDestroy.argtypes = [ct.c_void_p]
    for _ in range(4):  # the first ones take longer
        begin = now()
        for stream in [d.stream() for _ in range(16)]:
            d.check(d.lib.cudaStreamDestroy(stream))
        each_ns = max((now() - begin) // 16, 1)
    streams = max(8, min(1_200_000 // each_ns, 32))
    kernel, idle = max(50_000, min(streams * each_ns // 2, 1_000_000)), Stretches(d)
    d.spent.restart()
    for request in going():
        with d.spent.on(ALLOCATING):
            mine = [d.stream() for _ in range(streams)]
        for i, stream in enumerate(mine[:4]):
            at = (request * 4 + i) % 500 * 64 * KiB
            d.copy(d.device + i * 64 * KiB, d.host + at, 64 * KiB, H2D, stream)
            d.order(d.compute, stream, request % 2 * 4 + i)
        idle.end()
        d.launch(kernel)
        idle.begin()
        d.sync(d.compute)
        with d.spent.on(ALLOCATING):
            for stream in mine:
                d.check(d.lib.cudaStreamDestroy(stream))
        idle.read()
        if request * streams > 12_000:
            break
    d.spent.lines[ALLOCATING] = min(d.spent.lines[ALLOCATING], idle.ns)  # what of it the device stood still for
    d.spent.stop()
    return {}
