"""Unseen programs that are healthy: chunks, stages, a spinning thread, bursts, beams, cleared pools, mapped memory."""

from __future__ import annotations

import asyncio
import ctypes as ct
import random
import socket
import time
from array import array
from typing import Any

from accounts import Pool, paced, stamp, think
from device import D2H, H2D, Device, Dim3, p
from fresh_copies import clear
from registry import COMPUTING, DEVICE, EVERY, NOTHING_TO_DO, KiB, MiB, Truth, in_thread, unseen
from unseen_copies import D2D, same

SUM = b"""
.version 7.0
.target sm_70
.address_size 64
.visible .entry sum(.param .u64 source, .param .u64 words, .param .u64 sums)
{
    .reg .pred %over; .reg .b32 %me, %block, %width, %all, %word, %sum; .reg .b64 %at, %here, %i, %step, %n, %out;
    ld.param.u64 %at, [source]; ld.param.u64 %n, [words]; ld.param.u64 %out, [sums];
    mov.u32 %me, %tid.x; mov.u32 %block, %ctaid.x; mov.u32 %width, %ntid.x; mov.u32 %all, %nctaid.x;
    mad.lo.u32 %me, %block, %width, %me;
    mul.lo.u32 %all, %all, %width;
    cvt.u64.u32 %i, %me; cvt.u64.u32 %step, %all;
    shl.b64 %here, %i, 2; add.u64 %out, %out, %here;
    mov.u32 %sum, 0;
again:
    setp.ge.u64 %over, %i, %n;
    @%over bra done;
    shl.b64 %here, %i, 2; add.u64 %here, %at, %here;
    ld.volatile.global.u32 %word, [%here];
    add.u32 %sum, %sum, %word;
    add.u64 %i, %i, %step;
    bra again;
done:
    st.global.u32 [%out], %sum;
    ret;
}
"""
MAPPED: dict[str, Any] = {}
BLOCKS, THREADS = 264, 512


@unseen(
    line=COMPUTING,
    like=("store_not_ordered", "link_bound", "fence_before_copies", "synchronisation", "head_of_line_copies"),
    also=("wasted_stores",),
)
def chunks_of_a_prefill_whose_kv_leaves_beside_the_next(d: Device) -> Truth:
    """A chunk's KV goes out behind it while the next two compute; its slots are used again when it has left."""
    pool, each, sets = Pool(d, d.bytes_of(90)), 8, 3
    for chunk in range(300):
        mine = chunk % sets
        if chunk >= sets:
            d.check(d.lib.cudaStreamWaitEvent(d.compute, d.events[100 + mine], 0))
        clear(d, d.device + mine * each * pool.size, chunk % 251, each * pool.size, d.compute)
        stamp(d, d.size - 64 * KiB * (1 + chunk % 4), 4 * KiB, chunk)  # its token ids
        d.copy(d.device + d.size - 64 * KiB, d.host + d.size - 64 * KiB * (1 + chunk % 4), 4 * KiB, H2D, d.compute)
        for _ in range(3):
            d.launch(400_000)
        d.order(d.copies[1], d.compute, chunk % 60)
        for i in range(each):
            home = d.host + (chunk * each + i) % (pool.count - 2) * pool.size
            d.copy(home, d.device + (mine * each + i) * pool.size, pool.size, D2H, d.copies[1])
        d.record(100 + mine, d.copies[1])
        paced(d, chunk, 2)
    return {}


@unseen(
    line=COMPUTING,
    like=("aliased_stream", "channels_exhausted", "load_not_ordered", "python_or_gil_bound", "gpu_starved"),
    also=("small_copies", "wasted_stores"),
)
def four_stages_on_four_streams(d: Device) -> Truth:
    """Micro-batches pass four stages of 0.4 ms, each on a stream of its own behind an event; all four are busy."""
    stages, kernel, batches = (d.compute, *d.copies[5:8]), 400_000, 900
    for batch in range(batches):
        at = batch % 16 * 64 * KiB
        stamp(d, at, 2 * KiB, batch)
        d.copy(d.device + at, d.host + at, 64 * KiB, H2D, stages[0])
        for number, stage in enumerate(stages):
            if number:
                d.order(stage, stages[number - 1], batch % 32 * 4 + number)
            d.launch(kernel, stage)
        d.copy(d.host + 16 * MiB + batch % 16 * 4096, d.device + at, 1 * KiB, D2H, stages[-1])
        d.record(128 + batch % 32, stages[-1])
        if batch > 7:
            d.sync_event(128 + (batch - 8) % 32)
    d.kernel_ns -= batches * 3 * kernel  # four compute at once
    return {}


@unseen(
    line=COMPUTING,
    like=("synchronisation", "python_or_gil_bound", "gpu_starved", "context_lock_stall", "blocking_server_call"),
    also=("wasted_stores", "small_copies"),
)
def a_thread_that_asks_an_event_all_the_time(d: Device) -> Truth:
    """The next step of 1.5 ms is launched ahead; then the thread asks every 15 us whether the one before is over."""
    for step in range(220):
        for _ in range(5):
            d.launch(300_000)
        d.copy(d.host + step % 4 * 4096, d.device, 1 * KiB, D2H, d.compute)
        d.record(step % 8, d.compute)
        while step and d.lib.cudaEventQuery(d.events[(step - 1) % 8]):
            think(15)
    return {}


@unseen(
    line=NOTHING_TO_DO,
    like=("gpu_starved", "cpu_starved", "python_or_gil_bound", "synchronisation", "slow_tier"),
    also=("wasted_stores",),
    undecided_in=DEVICE,  # their recordings hold CUDA's calls alone
)
def an_event_loop_that_waits_for_bursts(d: Device) -> Truth:
    """An asyncio server sleeps in its selector for 25 to 60 ms until a client asks, then decodes eight steps ahead."""
    server, client = socket.socketpair()
    server.setblocking(False)

    def ask() -> None:
        for pause in (40, 25, 60, 35, 50, 30, 45, 55, 25, 60):
            time.sleep(pause / 1_000)
            client.sendall(b"?" * 32)
            client.recv(64)
        client.close()

    async def serve() -> None:
        loop, step = asyncio.get_running_loop(), 0
        while True:
            with d.spent.on(NOTHING_TO_DO):
                asked = await loop.sock_recv(server, 64)
            if not asked:
                return
            for i in range(8):
                d.launch(1_300_000)
                d.copy(d.host + step % 4 * 4096, d.device, 1 * KiB, D2H, d.compute)
                d.record(step % 8, d.compute)
                if i:
                    d.sync_event((step - 1) % 8)
                step += 1
            d.sync(d.compute)
            await loop.sock_sendall(server, b"!" * 64)

    thread = in_thread(ask)
    d.spent.restart()
    asyncio.run(serve())
    d.spent.stop()
    thread.join()
    server.close()
    return {}


@unseen(
    line=COMPUTING,
    like=("small_copies", "unmerged_neighbours", "redundant_loads", "wasted_stores", "synchronisation"),
)
def beams_reordered_within_the_device(d: Device) -> Truth:
    """Between steps of 2 ms the parents' 24 last blocks are copied to the children's within the device, in 0.1 ms."""
    size, beams, each, chance = (256 if d.gpu else 8) * KiB, 4, 6, random.Random(43)
    sides = [d.device, d.device + beams * each * size]
    for block in range(beams * each):
        d.copy(sides[0] + block * size, d.host + block * size, size, H2D, d.compute)
    blocks = list(range(beams * each))
    d.sync(d.compute)
    d.spent.restart()
    for step in range(200):
        for _ in range(4):
            d.launch(500_000)
        old, new = sides[step % 2], sides[(step + 1) % 2]
        parents = chance.choices(range(beams), k=beams) if step % 3 else list(range(beams))
        from_ = [parent * each + i for parent in parents for i in range(each)]
        for to, block in enumerate(from_):
            d.copy(new + to * size, old + block * size, size, D2D, d.compute)
        blocks = [blocks[block] for block in from_]
        paced(d, step, 2)
    d.sync(d.compute)
    d.spent.stop()
    for at, block in enumerate(blocks):
        same(d, sides[0] + at * size, d.host + block * size, size)
    return {}


@unseen(
    line=COMPUTING,
    like=("small_copies", "wasted_stores", "gpu_starved", "launch_queue_saturation", "allocation_on_hot_path"),
)
def a_pool_cleared_whole_and_by_block_before_each_request(d: Device) -> Truth:
    """Three memsets of the whole pool and forty of a block, a fifth of the time, come before each request's kernels."""
    size, block = d.size - MiB, 64 * KiB
    if not d.gpu:
        size = MiB
    order = random.Random(44).sample(range(size // block), min(size // block, 40))
    for request in range(300):
        for value in (0, 255, request % 251):
            clear(d, d.device, value, size, d.compute)
        for number in order:
            clear(d, d.device + number * block, 0, block, d.compute)
        for _ in range(4):
            d.launch(300_000)
        paced(d, request, 3)
    d.copy(d.host, d.device + order[0] * block, block, D2H, d.compute)
    d.sync(d.compute)
    if any(ct.string_at(d.host, block)):
        raise RuntimeError("a block is not cleared")
    return {}


def ready_mapped(d: Device) -> None:
    """Loads the kernel, and sums 1 MiB by it: the sums are right, and no first call comes later."""
    if "kernel" not in MAPPED:
        library, kernel = p(), p()
        d.check(d.lib.cudaLibraryLoadData(ct.byref(library), SUM, None, None, 0, None, None, 0))
        d.check(d.lib.cudaLibraryGetKernel(ct.byref(kernel), library, b"sum"))
        MAPPED["kernel"] = kernel
    sum_mapped(d, 0, MiB // 4)
    size = BLOCKS * THREADS * 4
    d.copy(d.host + d.size - size, d.device, size, D2H, d.compute)
    d.synchronize()
    words, sums = array("I", ct.string_at(d.host, MiB)), array("I", ct.string_at(d.host + d.size - size, size))
    if sum(words) % (1 << 32) != sum(sums) % (1 << 32):
        raise RuntimeError("the kernel read other words than the host wrote")


def sum_mapped(d: Device, at: int, words: int) -> None:
    """Each thread's sum of `words` 32-bit words of the host at offset `at`, read by the kernel over the link."""
    values = (ct.c_uint64 * 3)(d.host + at, words, d.device)
    arguments = (p * 3)(*(ct.addressof(values) + 8 * i for i in range(3)))
    grid, block = Dim3(BLOCKS, 1, 1), Dim3(THREADS, 1, 1)
    d.check(d.lib.cudaLaunchKernel(MAPPED["kernel"], grid, block, arguments, 0, d.compute))


@unseen(
    line=COMPUTING,
    like=("gpu_starved", "synchronisation", "small_copies", "weights_not_overlapped"),
    also=("unexplained_traffic", "link_bound"),  # the link's counters show it; no call does
    prepare=ready_mapped,
    needs_gpu=True,
    undecided_in=EVERY,  # to CUDA's calls it is a kernel that computes
)
def embeddings_read_by_the_kernel_out_of_mapped_memory(d: Device) -> Truth:
    """A kernel reads 24 MiB of embeddings in host memory by itself, without a copy: it runs, and the link is full."""
    size, marks, read = 24 * MiB, [(0, 0)] * 4, 0
    for step in range(450):
        begin = d.mark(d.compute)
        sum_mapped(d, step % 7 * size, size // 4)
        marks[step % 4] = (begin, d.mark(d.compute))
        d.launch(300_000)
        paced(d, step, 2)
        if step > 1:
            read += d.between(*marks[(step - 2) % 4])
    d.kernel_ns += read
    return {}
