"""Seventh programs whose device waits for the host: an optimizer, a batch, norms, a pool, rows, fields, a pipe."""

from __future__ import annotations

import ctypes as ct
import functools
import hashlib
import os
import random
import time
import zlib
from collections.abc import Callable
from typing import Any

from accounts import Stretches, decoded, stamp, turns
from device import D2H, H2D, Device, now
from fresh_copies import copy_2d
from registry import (
    ALLOCATING,
    BELOW_LINK_RATE,
    DEVICE,
    ELSEWHERE,
    PAGEABLE,
    PYTHON,
    SUBMITTING,
    TIER,
    WAITING,
    KiB,
    MiB,
    Truth,
    in_thread,
    pageable,
    seventh,
)
from unseen_copies import same

MADE: dict[str, Any] = {}  # before a program begins
BATCHES = 4


def quickest(body: Callable[[], object], times: int = 4) -> int:
    """The shortest of some runs, ns."""
    taken = []
    for _ in range(times):
        begin = now()
        body()
        taken.append(now() - begin)
    return min(taken)


@seventh(
    line=PYTHON,
    or_lines=(ELSEWHERE,),
    also=("synchronisation", "gpu_starved", "python_or_gil_bound", "weights_not_overlapped", "wasted_stores"),
    like=("small_copies", "pageable_memory", "redundant_loads", "cpu_starved", "launch_queue_saturation"),
)
def an_optimizer_on_the_cpu_between_backward_and_forward(d: Device) -> Truth:
    """Gradients leave, the CPU works on them for 1.5 ms, parameters come back, and the next pass of 1 ms begins.

    The thread waits for the gradients, works in C, and only then submits the load and the pass that needs it: the GPU
    has nothing for 1.5 ms of each 2.7 ms. The two copies take 0.1 ms each.
    """
    size, idle, piece, step = d.bytes_of(90), Stretches(d), bytes(128 * KiB), 0
    rounds = max(1_500_000 // quickest(lambda: hashlib.sha256(piece).digest()), 1)
    work = piece * rounds
    d.spent.restart()
    for step in turns():
        d.launch(1_000_000)
        d.copy(d.host, d.device, size, D2H, d.compute)
        idle.begin()
        d.sync(d.compute)
        hashlib.sha256(work).digest()
        stamp(d, size, 16 * KiB, step)
        idle.end()
        d.copy(d.device, d.host + size, size, H2D, d.compute)
        d.sync(d.compute)
        idle.read()
    d.spent.add(PYTHON, idle.ns)
    d.spent.stop()
    same(d, d.device, d.host + size, size)
    return {}


def batch_size(d: Device) -> int:
    return 32 * MiB if d.gpu else 2 * MiB


def make_batches(d: Device) -> None:
    """Makes the batches in plain memory and sends one: no first copy of this kind comes later."""
    size = batch_size(d)
    MADE["batches"] = _, at = pageable(BATCHES * size)
    for batch in range(BATCHES):
        ct.memmove(at + batch * size, random.Random(70 + batch).randbytes(size), size)
    d.copy(d.device, at, size, H2D, d.compute)
    d.sync(d.compute)


@seventh(
    "pageable_memory",
    line=PAGEABLE,
    or_lines=(BELOW_LINK_RATE, WAITING),
    also=("synchronisation", "gpu_starved", "weights_not_overlapped", "python_or_gil_bound"),
    like=("redundant_loads", "small_copies", "allocation_on_hot_path", "launch_queue_saturation"),
    prepare=make_batches,
)
def a_training_batch_in_one_copy_out_of_plain_memory(d: Device) -> Truth:
    """When the loss of a step of 1.2 ms was read, the next batch goes to the GPU in one copy out of plain memory.

    The GPU is idle when the copy begins, as the loss was waited for; the driver moves plain memory through its own
    pinned buffer and the call comes back when it has read it all. 32 MiB take at least 1 ms at 32 GB/s, and no plain
    memory comes faster.
    """
    (keep, at), size, lost, step = MADE.pop("batches"), batch_size(d), 0, 0
    d.spent.restart()
    for step in turns():
        lost += d.copy(d.device, at + step % BATCHES * size, size, H2D, d.compute)
        for _ in range(3):
            d.launch(400_000)
        d.copy(d.host, d.device + size, 512, D2H, d.compute)
        d.sync(d.compute)
    d.spent.add(PAGEABLE, lost)
    d.spent.stop()
    same(d, d.device + size - 64 * KiB, at + step % BATCHES * size + size - 64 * KiB, 64 * KiB)
    del keep
    return {"pageable_memory": lost}


@seventh(
    "synchronisation",
    line=WAITING,
    or_lines=(SUBMITTING, PYTHON),
    also=("small_copies", "gpu_starved", "python_or_gil_bound", "wasted_stores", "unmerged_neighbours"),
    like=("pageable_memory", "launch_queue_saturation", "allocation_on_hot_path", "redundant_loads"),
)
def a_norm_read_back_after_each_layer_s_backward(d: Device) -> Truth:
    """Forty layers' backward kernels of 12 us, and after each the norm of its gradient is read back by cudaMemcpy.

    The thread waits for the kernel, reads four bytes, which waits again, and launches the next layer. To wake it twice,
    to copy and to launch take at least 12 us, in which nothing computes: half of the time.
    """
    layers, idle = 40, Stretches(d)
    for step in turns():
        for layer in range(layers):
            idle.end()
            d.launch(12_000)
            idle.begin()
            d.sync(d.compute)
            d.check(d.lib.cudaMemcpy(d.host + layer * 64, d.device + (step + layer) % 512 * 64, 4, D2H))
            if layer % 8 == 7:
                idle.read()
    d.sync(d.compute)
    d.spent.add(WAITING, idle.read())
    d.spent.stop()
    return {"synchronisation": idle.ns}


@seventh(
    "allocation_on_hot_path",
    line=ALLOCATING,
    also=("gpu_starved", "synchronisation", "context_lock_stall"),
    like=("pageable_memory", "small_copies", "slow_tier", "launch_queue_saturation", "first_calls"),
    needs_gpu=True,
)
def a_memory_pool_trimmed_after_each_request(d: Device) -> Truth:
    """Each request takes four workspaces out of the stream's pool, and when it is done the pool is trimmed to nothing.

    Memory that was given back has to be mapped again, by the call that asks for it, and unmapped by the trim; no kernel
    runs meanwhile. How long both take is measured first, and a request's kernels are made half as long.
    """
    lib, p = d.lib, ct.c_void_p
    lib.cudaMallocAsync.argtypes, lib.cudaFreeAsync.argtypes = [p, ct.c_size_t, p], [p, p]
    lib.cudaDeviceGetDefaultMemPool.argtypes, lib.cudaMemPoolTrimTo.argtypes = [p, ct.c_int], [p, ct.c_size_t]
    lib.cudaMemPoolSetAttribute.argtypes = [p, ct.c_int, p]
    pool, all_of_it, none = p(), ct.c_uint64(2**64 - 1), ct.c_uint64(0)
    d.check(lib.cudaDeviceGetDefaultMemPool(ct.byref(pool), 0))
    d.check(lib.cudaMemPoolSetAttribute(pool, 4, ct.byref(all_of_it)))  # only the trim gives memory back

    def request(kernel_ns: int) -> int:
        begin, taken = now(), [p() for _ in range(4)]
        for one in taken:
            d.check(lib.cudaMallocAsync(ct.byref(one), 96 * MiB, d.compute))
        lost = now() - begin
        for one in taken:
            if kernel_ns:
                d.launch(kernel_ns)
            d.check(lib.cudaFreeAsync(one, d.compute))
        d.sync(d.compute)
        begin = now()
        d.check(lib.cudaMemPoolTrimTo(pool, 0))
        return lost + now() - begin

    took, lost = min(request(0) for _ in range(5)), 0
    d.spent.restart()
    for _ in turns():
        lost += request(max(took // 8, 5_000))
    d.spent.add(ALLOCATING, lost)
    d.spent.stop()
    d.check(lib.cudaMemPoolSetAttribute(pool, 4, ct.byref(none)))
    return {"allocation_on_hot_path": lost}


@seventh(
    line=PYTHON,
    or_lines=(ELSEWHERE,),
    also=("synchronisation", "gpu_starved", "python_or_gil_bound", "weights_not_overlapped"),
    like=("small_copies", "pageable_memory", "redundant_loads", "cpu_starved", "slow_tier"),
)
def rows_of_an_embedding_table_gathered_by_the_cpu_for_each_batch(d: Device) -> Truth:
    """Rows of a table in plain memory are gathered one by one into a pinned buffer for 1 ms, before each batch of 0.7.

    The thread waits for a batch before it gathers the next one's rows, so the GPU has nothing for 1 ms of each 1.75.
    How many rows that are is measured first; their one copy takes below 0.05 ms.
    """
    width, table, chance, idle = 256, 16 * MiB if d.gpu else 4 * MiB, random.Random(71), Stretches(d)
    keep, at = pageable(table)
    ct.memmove(at, random.Random(72).randbytes(table), table)
    wanted = [chance.randrange(table // width) for _ in range(1_000)]
    count = 500

    def gather(step: int) -> None:
        for i in range(count):
            ct.memmove(d.host + i * width, at + (wanted[i % 1_000] + 31 * step) % (table // width) * width, width)

    count = max(count * 1_000_000 // quickest(lambda: gather(0)), 1)
    d.spent.restart()
    for step in turns():
        gather(step)
        idle.end()
        d.copy(d.device, d.host, count * width, H2D, d.compute)
        d.launch(700_000)
        idle.begin()
        d.sync(d.compute)
        idle.read()
    d.spent.add(PYTHON, idle.ns)
    d.spent.stop()
    same(d, d.device, d.host, count * width)
    del keep
    return {}


@seventh(
    "pageable_memory",
    line=PAGEABLE,
    or_lines=(BELOW_LINK_RATE, WAITING),
    also=(
        *("synchronisation", "gpu_starved", "wasted_stores", "small_copies", "python_or_gil_bound"),
        *("unmerged_neighbours", "weights_not_overlapped"),
    ),
    like=("redundant_loads", "allocation_on_hot_path", "launch_queue_saturation", "slow_tier"),
)
def windows_of_the_cache_taken_into_plain_memory_by_2d_copies(d: Device) -> Truth:
    """After each step of 0.6 ms four windows of 6 MiB leave for plain memory, by 2D copies of rows of 64 KiB.

    The step was waited for, so the GPU is idle when the first copy begins, and each call comes back when its bytes lie
    in plain memory. 24 MiB take at least 0.8 ms at 32 GB/s, and plain memory takes them no faster.
    """
    width, pitch, rows, windows, lost, step = 64 * KiB, 256 * KiB, 96 if d.gpu else 8, 4, 0, 0
    each = rows * width
    keep, at = pageable(windows * each)
    whole = windows * rows * pitch
    d.copy(d.device, d.host, whole, H2D, d.compute)
    d.sync(d.compute)
    d.spent.restart()
    for step in turns():
        d.launch(600_000)
        d.sync(d.compute)
        begin = now()
        for i in range(windows):
            window = (d.device + i * rows * pitch + step % 4 * width, pitch)
            copy_2d(d, (at + i * each, width), window, width, rows, D2H, d.compute)
        d.sync(d.compute)
        lost += now() - begin
    d.spent.add(PAGEABLE, lost)
    d.spent.stop()
    home = d.host + ((windows - 1) * rows + rows - 1) * pitch + step % 4 * width
    if ct.string_at(at + windows * each - width, width) != ct.string_at(home, width):
        raise RuntimeError("other bytes came than were in the window")
    del keep
    return {"pageable_memory": lost}


def pack_a_prefix(_: Device) -> None:
    """Packs as much of a prefix as takes 1.2 ms to unpack."""
    plain, packed = bytearray(), b""
    while len(plain) < 16 * MiB:
        plain += random.Random(len(plain)).randbytes(32 * KiB) * 2 + bytes(64 * KiB)
        packed = zlib.compress(plain, 1)
        if quickest(functools.partial(zlib.decompress, packed)) > 1_200_000:
            break
    MADE["packed"], MADE["size"] = packed, len(plain)


@seventh(
    line=PYTHON,
    or_lines=(ELSEWHERE,),
    also=("synchronisation", "gpu_starved", "python_or_gil_bound", "weights_not_overlapped"),
    like=("small_copies", "pageable_memory", "redundant_loads", "cpu_starved", "slow_tier"),
    prepare=pack_a_prefix,
)
def a_cached_prefix_unpacked_by_the_cpu_before_its_load(d: Device) -> Truth:
    """A prefix packed in CPU memory is unpacked with zlib for 1.2 ms, loaded, and a prefill of 0.7 ms launched.

    A request begins when the one before is done, so the GPU has nothing while the thread unpacks: 1.2 ms of each 2 ms.
    How much of a prefix that is was measured first; its load takes below 0.1 ms.
    """
    packed, size, idle, request = MADE.pop("packed"), MADE.pop("size"), Stretches(d), 0
    d.spent.restart()
    for request in turns():
        ct.memmove(d.host, zlib.decompress(packed), size)
        stamp(d, 0, 4 * KiB, request)
        idle.end()
        d.copy(d.device, d.host, size, H2D, d.compute)
        d.launch(700_000)
        idle.begin()
        d.sync(d.compute)
        idle.read()
    d.spent.add(PYTHON, idle.ns)
    d.spent.stop()
    same(d, d.device, d.host, size)
    return {}


@seventh(
    line=SUBMITTING,
    or_lines=(PYTHON, BELOW_LINK_RATE),
    also=(
        *("small_copies", "gpu_starved", "synchronisation", "python_or_gil_bound", "unmerged_neighbours"),
        "weights_not_overlapped",
    ),
    like=("pageable_memory", "launch_queue_saturation", "allocation_on_hot_path", "cpu_starved"),
)
def the_fields_of_each_sequence_sent_by_copies_of_their_own(d: Device) -> Truth:
    """Before each step of 0.6 ms five fields of 80 sequences go to the GPU by 400 copies of 64 bytes.

    The token of the step before was waited for, so the GPU runs dry before the first copy, and it takes a copy faster
    than Python gives the next: 400 calls of above 1.5 us are 0.6 ms without a kernel, of 1.2 ms.
    """
    fields, field, moves = 400, 64, Stretches(d)
    for step in turns():
        stamp(d, 0, fields * 4 * field, step)
        places = [(d.device + i * 8 * field, d.host + i * 4 * field) for i in range(fields)]
        moves.begin()
        d.rapid(places, field, H2D, d.compute)
        moves.end()
        d.launch(600_000)
        d.copy(d.host + d.size - 4 * KiB, d.device + d.size - 4 * KiB, 512, D2H, d.compute)
        d.sync(d.compute)
        moves.read()
    d.spent.add(SUBMITTING, moves.ns)
    d.spent.stop()
    same(d, d.device + 8 * field, d.host + 4 * field, field)
    return {}


@seventh(
    line=ELSEWHERE,
    or_lines=(PYTHON, TIER),
    also=("gpu_starved", "synchronisation", "python_or_gil_bound", "slow_tier", "wasted_stores"),
    like=("small_copies", "pageable_memory", "cpu_starved", "launch_queue_saturation"),
    undecided_in=DEVICE,  # their recordings hold CUDA's calls alone
)
def tokens_written_to_a_pipe_whose_reader_is_slow(d: Device) -> Truth:
    """The thread writes each step's tokens to a pipe before it launches the next step; the reader sleeps after each.

    A message is as large as the pipe holds, so a write waits until the reader has taken the one before, every 2 ms at
    the earliest. A step takes 0.8 ms, so for 1.2 ms of each 2 ms the GPU has nothing.
    """
    source, sink = os.pipe()
    size, idle, text = 64 * KiB, Stretches(d), bytes(64 * KiB)

    def read() -> None:
        left = size
        while piece := os.read(source, left):
            left -= len(piece)
            if not left:
                left = size
                time.sleep(0.002)

    thread = in_thread(read)
    d.spent.restart()
    for step in turns():
        decoded(d, step, idle, 2, 400_000)
        os.write(sink, text)
    d.spent.add(ELSEWHERE, idle.ns)
    d.spent.stop()
    os.close(sink)
    thread.join()
    os.close(source)
    return {}
