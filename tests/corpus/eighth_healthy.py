"""Eighth programs that are healthy: waiting threads, patches, pinning, a deep queue, a loader, snapshots, tokens."""

from __future__ import annotations

import ctypes as ct
import functools
import hashlib
import json
import os
import random
import tempfile
import threading
import time
from queue import Queue

from accounts import Pool, paced, stamp, turns
from device import D2H, H2D, Device
from fresh_copies import clear
from registry import COMPUTING, DEVICE, NOTHING_TO_DO, KiB, MiB, Truth, eighth, in_thread, pageable
from unseen_copies import D2D, same


def plain_only(d: Device, kept: bool, what: str) -> None:
    """Raises where a GPU has not kept what makes a program healthy; the host runtime shares its CPU with others."""
    if d.gpu and not kept:
        raise RuntimeError(f"the truth is not plain: {what}")


@eighth(
    line=COMPUTING,
    like=("synchronisation", "python_or_gil_bound", "gpu_starved", "context_lock_stall", "small_copies"),
    also=("wasted_stores",),
)
def eight_threads_that_each_wait_for_their_part_of_a_batch(d: Device) -> Truth:
    """A batch is eight kernels of 0.4 ms, one after another; a thread for each waits until its part's result is there.

    Nearly all of their time the threads stand in cudaEventSynchronize. Another thread gives the batches to the device
    two ahead, which is above 3 ms of work at any time, and waits for none of the eight.
    """
    parts, results, asked = 8, [b""] * 8, [Queue[int]() for _ in range(8)]

    def home(part: int, batch: int) -> int:
        return d.host + d.size - (1 + batch % 4 * parts + part) * 4 * KiB

    def take(part: int) -> None:
        while (batch := asked[part].get()) >= 0:
            d.sync_event(batch % 4 * parts + part)
            results[part] = hashlib.sha256(ct.string_at(home(part, batch), 512)).digest()

    threads, batch = [in_thread(functools.partial(take, part)) for part in range(parts)], 0
    d.spent.restart()
    for batch in turns():
        clear(d, d.device, batch % 251, parts * 512, d.compute)
        for part in range(parts):
            d.launch(400_000)
            d.copy(home(part, batch), d.device + part * 512, 512, D2H, d.compute)
            d.record(batch % 4 * parts + part, d.compute)
            asked[part].put(batch)
        paced(d, batch, 2)
    d.sync(d.compute)
    d.spent.stop()
    for queue, thread in zip(asked, threads, strict=True):
        queue.put(-1)
        thread.join()
    if set(results) != {hashlib.sha256(bytes([batch % 251]) * 512).digest()}:
        raise RuntimeError("a thread has other bytes than its part of the batch")
    return {}


@eighth(
    line=COMPUTING,
    like=("small_copies", "gpu_starved", "launch_queue_saturation", "synchronisation", "unmerged_neighbours"),
)
def four_hundred_entries_patched_beside_a_step_of_five_milliseconds(d: Device) -> Truth:
    """While a step of 5 ms computes, the next one's table gets 400 entries of 64 bytes by a copy each, on a stream.

    There are two tables, and a step waits by an event for its own. The copies take the thread and the GPU about 1 ms,
    and are done when the step before has 3 ms to go, so they cost the GPU nothing.
    """
    entries, size, table, step = 400, 64, MiB, 0
    d.spent.restart()
    for step in turns():
        new, mine = step % 4 * 32 * KiB, d.device + step % 2 * table
        stamp(d, new, entries * size, step)
        if step > 1:  # the step before the last has read this table
            d.check(d.lib.cudaStreamWaitEvent(d.copies[4], d.events[8 + step % 2], 0))
        places = [(mine + i * 1_999 % 8_192 * 2 * size, d.host + new + i * size) for i in range(entries)]
        d.rapid(places, size, H2D, d.copies[4])
        d.order(d.compute, d.copies[4], step % 8)
        for _ in range(5):
            d.launch(1_000_000)
        d.record(8 + step % 2, d.compute)
        paced(d, step, 1)
    d.sync(d.compute)
    d.spent.stop()
    at = d.device + step % 2 * table + 399 * 1_999 % 8_192 * 2 * size
    same(d, at, d.host + step % 4 * 32 * KiB + 399 * size, size)
    return {}


@eighth(
    line=NOTHING_TO_DO,
    like=("allocation_on_hot_path", "pinning_stall", "gpu_starved", "synchronisation", "python_or_gil_bound"),
    also=("wasted_stores",),
    undecided_in=DEVICE,  # their recordings hold CUDA's calls alone
)
def a_pool_pinned_piece_by_piece_while_nobody_asks(d: Device) -> Truth:
    """A request comes every 60 ms or so and is 9 ms of work; when it is answered, the server pins 8 MiB more.

    At 1.3 GB/s, the least that was seen of cudaHostAlloc on an H100, the pinning takes 6.5 ms. The shortest pause is
    45 ms, of which the work leaves 35, so it ends long before the next request is there, which the program checks; then
    the thread waits at its queue for want of work. Within a request steps of 1.5 ms are launched two ahead.
    """
    asked, pieces = Queue[int](), list[int]()
    size = (8 if d.gpu else 1) * MiB

    def ask() -> None:
        for number, pause in enumerate((60, 45, 80, 55, 65, 50, 75, 60) * 3):
            time.sleep(pause / 1_000)
            asked.put(number)
        time.sleep(0.06)  # the end waits in the queue like a request, and is not to be taken for one
        asked.put(-1)

    thread = in_thread(ask)
    d.spent.restart()
    while True:
        with d.spent.on(NOTHING_TO_DO):
            number = asked.get()
        if number < 0:
            break
        for i in range(6):
            stamp(d, i * 4 * KiB, 4 * KiB, number * 6 + i)
            d.copy(d.device, d.host + i * 4 * KiB, 4 * KiB, H2D, d.compute)
            d.launch(1_500_000)
            back = d.size - 4 * KiB * (1 + i % 4)
            d.copy(d.host + back, d.device + back, 512, D2H, d.compute)
            paced(d, i, 2)
        d.sync(d.compute)
        with d.spent.on(NOTHING_TO_DO):
            if len(pieces) < 16:
                pieces.append(d.made("cudaHostAlloc", size, 0))
        plain_only(d, asked.empty(), "a request came while memory was pinned")
    d.spent.stop()
    thread.join()
    same(d, d.device, d.host + 5 * 4 * KiB, 4 * KiB)
    for piece in pieces:
        ct.memmove(piece, d.host, 4 * KiB)
        d.check(d.lib.cudaFreeHost(piece))
    return {}


@eighth(
    line=COMPUTING,
    like=("launch_queue_saturation", "small_copies", "fence_before_copies", "channels_exhausted", "gpu_starved"),
)
def nine_hundred_submissions_of_three_kinds_that_fit_a_queue(d: Device) -> Truth:
    """A request is 300 kernels of 0.15 ms, each behind a memset and a copy within the device, all submitted at once.

    A stream takes 1,021, and these are 900. Two streams take turns: the thread waits for the request before the last
    and fills its stream again, which takes some milliseconds, while the other stream has 20 ms left: the first request
    was half as long. So the GPU has a kernel at any time, which the program checks.
    """
    each, two, request, rest = 300, d.copies[2:4], 0, False
    for request in turns():
        stream, other = two[request % 2], two[1 - request % 2]
        if request > 1:
            d.sync_event(request % 2)
        at = d.device + request % 2 * MiB
        for i in range(each if request else each // 2):
            clear(d, at, (request + i) % 251, 4 * KiB, stream)
            d.copy(at + 64 * KiB + i % 64 * 4 * KiB, at, 4 * KiB, D2D, stream)
            d.launch(150_000, stream)
        d.record(request % 2, stream)
        rest = bool(d.lib.cudaStreamQuery(other))
        plain_only(d, rest or not request, "one stream was done before the other was filled")
    for stream in two:
        d.sync(stream)
    d.spent.stop()
    back = d.host + d.size - 64 * KiB
    d.copy(back, d.device + request % 2 * MiB + 64 * KiB + (each - 1) % 64 * 4 * KiB, 64, D2H, d.compute)
    d.sync(d.compute)
    if ct.string_at(back, 64) != bytes([(request + each - 1) % 251]) * 64:
        raise RuntimeError("a copy within the device has other bytes than were set")
    return {}


@eighth(
    line=COMPUTING,
    like=("slow_tier", "cpu_starved", "python_or_gil_bound", "gpu_starved", "redundant_loads", "synchronisation"),
)
def a_loader_that_stalls_behind_a_ring_of_forty_batches(d: Device) -> Truth:
    """A thread makes batches in 0.3 ms, but each thirtieth takes 20 ms; training takes one in 1.5 ms out of a ring.

    The ring is full at first and has forty slots, 60 ms of training, and on the average a batch is made in 1 ms. So
    the ring is never empty when a batch is taken, which the program checks, and two steps are launched ahead.
    """
    slots, size, full, free = 40, 64 * KiB, Queue[tuple[int, int]](), Queue[int]()
    pieces = [random.Random(60 + i).randbytes(size) for i in range(7)]
    held, taken = list[int](), (0, 0)

    def make() -> None:
        number = 0
        while (slot := free.get()) >= 0:
            time.sleep(0.02 if number % 30 == 29 else 0.000_25)
            ct.memmove(d.host + slot * size, pieces[number % 7], size)
            full.put((slot, number))
            number += 1

    for slot in range(slots):
        free.put(slot)
    thread = in_thread(make)
    while full.qsize() < slots:
        time.sleep(0.001)
    d.spent.restart()
    for step in turns():
        plain_only(d, not full.empty(), "the ring was empty")
        taken = full.get()
        d.copy(d.device + step % 4 * size, d.host + taken[0] * size, size, H2D, d.compute)
        for _ in range(3):
            d.launch(500_000)
        held.append(taken[0])
        paced(d, step, 2)
        if step > 1:
            free.put(held.pop(0))
    d.sync(d.compute)
    d.spent.stop()
    same(d, d.device + step % 4 * size, d.host + taken[0] * size, size)
    free.put(-1)
    thread.join()
    if ct.string_at(d.host + taken[0] * size, size) != pieces[taken[1] % 7]:
        raise RuntimeError("a slot was written before its batch was used")
    return {}


def _snapshots(
    d: Device, shadow: int, size: int, every: tuple[int, int], asked: Queue[int], done: threading.Event
) -> int:
    """Steps of 2 ms whose states are copied to a shadow now and then; which byte the last snapshot has.

    Args:
        d: the device.
        shadow: where snapshots go, within the device.
        size: of the states, bytes.
        every: so many steps lie between two snapshots at least; so many are launched ahead.
        asked: a thread that takes a snapshot away is told of it here, and at the end of the end.
        done: the thread has taken the one before; a snapshot that comes earlier is left out.
    """
    kept, (between, ahead) = 0, every
    for step in turns():
        clear(d, d.device, step % 251, size, d.compute)
        for _ in range(4):
            d.launch(500_000)
        if step % between == 0 and done.is_set():
            done.clear()
            d.copy(shadow, d.device, size, D2D, d.compute)
            d.record(0, d.compute)
            kept = step % 251
            asked.put(step)
        paced(d, step, ahead)
    d.sync(d.compute)
    d.spent.stop()
    asked.put(-1)
    return kept


@eighth(
    line=COMPUTING,
    like=("slow_tier", "synchronisation", "weights_not_overlapped", "store_not_ordered", "context_lock_stall"),
    also=("wasted_stores", "unmerged_neighbours"),
)
def a_snapshot_within_the_device_that_a_thread_writes_to_a_file(d: Device) -> Truth:
    """Each twelfth step of 2 ms the states are copied within the device; a thread stores them and writes a file.

    The copy within the device takes 0.05 ms. The thread waits for it, for each of the twelve pieces that it stores on a
    stream of its own, and for the file; training goes on two steps ahead and leaves a snapshot out that would be early.
    """
    size, pieces = (24 if d.gpu else 6) * MiB, 12
    part, shadow, asked, done = size // pieces, d.device + size, Queue[int](), threading.Event()
    view = memoryview((ct.c_char * size).from_address(d.host)).cast("B")

    def write(file: int) -> None:
        while asked.get() >= 0:
            d.sync_event(0)
            for at in range(0, size, part):
                d.copy(d.host + at, shadow + at, part, D2H, d.copies[7])
                d.sync(d.copies[7])
                os.pwrite(file, view[at : at + part], at)
            done.set()

    with tempfile.TemporaryFile() as file:
        os.pwrite(file.fileno(), view, 0)
        thread = in_thread(lambda: write(file.fileno()))
        done.set()
        d.spent.restart()
        kept = _snapshots(d, shadow, size, (12, 2), asked, done)
        thread.join()
        same(d, shadow, d.host, size)
        if os.pread(file.fileno(), 64, size - 64) != bytes([kept]) * 64:
            raise RuntimeError("the file has other bytes than the snapshot")
    return {}


@eighth(
    line=COMPUTING,
    like=("fence_before_copies", "synchronisation", "launch_queue_saturation", "cpu_starved", "gpu_starved"),
    also=("wasted_stores",),
)
def a_semaphore_that_the_stream_posts_when_a_token_is_there(d: Device) -> Truth:
    """Behind each step of 8 ms a function of the host posts a semaphore; a thread wakes and streams the tokens.

    The function is `sem_post` itself; it, a memset and a small copy hold the model's stream, on an H100 under a
    recorder for 0.16 ms a step, which is 2% of it. The thread writes the tokens of 50 clients as JSON in about 0.3 ms,
    while the next two steps, which were launched ahead, compute.
    """
    libc, semaphore, clients = ct.CDLL(None), ct.create_string_buffer(64), 50
    libc.sem_init(semaphore, 0, 0)
    post, sent, steps = ct.cast(libc.sem_post, ct.c_void_p), [""] * clients, Queue[int]()
    d.lib.cudaLaunchHostFunc.argtypes = [ct.c_void_p] * 3

    def stream() -> None:
        while (step := steps.get()) >= 0:
            libc.sem_wait(semaphore)
            token = ct.string_at(d.host + d.size - 4 * KiB * (1 + step % 4), 1)[0]
            for client in range(clients):
                sent[client] = json.dumps({"id": client, "choices": [{"index": 0, "delta": {"content": f"t{token}"}}]})

    thread, step = in_thread(stream), 0
    d.spent.restart()
    for step in turns():
        back = d.size - 4 * KiB * (1 + step % 4)
        for _ in range(5):
            d.launch(1_600_000)
        clear(d, d.device + back, step % 251, 512, d.compute)
        d.copy(d.host + back, d.device + back, 512, D2H, d.compute)
        d.check(d.lib.cudaLaunchHostFunc(d.compute, post, semaphore))
        steps.put(step)
        paced(d, step, 2)
    d.sync(d.compute)
    d.spent.stop()
    steps.put(-1)
    thread.join()
    if {json.loads(one)["choices"][0]["delta"]["content"] for one in sent} != {f"t{step % 251}"}:
        raise RuntimeError("another token was streamed than was computed")
    return {}


@eighth(
    line=COMPUTING,
    like=("store_not_ordered", "link_bound", "weights_not_overlapped", "synchronisation", "fence_before_copies"),
    also=("wasted_stores", "unmerged_neighbours"),
    needs_gpu=True,
)
def a_graph_that_stores_each_layer_beside_the_next(d: Device) -> Truth:
    """One graph holds eight layers of 0.5 ms; beside each a branch stores what the layer before made, in 0.2 ms.

    The last layer's is stored beside the first one of the next replay, so the graph ends with a kernel, and the next
    replay is launched two ahead. A copy of 4 KiB before each replay makes each layer's block a new one.
    """
    pool, layers, side = Pool(d, d.bytes_of(200)), 8, d.copies[0]
    events, given, home, replay = [d.event() for _ in range(2 * layers)], d.device + d.size // 2, d.size // 2, 0

    def after(later: int, earlier: int, event: int) -> None:
        d.check(d.lib.cudaEventRecord(event, earlier))
        d.check(d.lib.cudaStreamWaitEvent(later, event, 0))

    def all_layers() -> None:
        for layer in range(layers):
            before = (layer - 1) % layers * pool.size
            after(side, d.compute, events[2 * layer])
            d.copy(d.host + before, d.device + before, pool.size, D2H, side)
            d.copy(d.device + layer * pool.size, given, 4 * KiB, D2D, d.compute)
            d.launch(500_000)
            after(d.compute, side, events[2 * layer + 1])

    graph = d.graph(all_layers)
    d.spent.restart()
    for replay in turns():
        stamp(d, home + replay % 4 * 4 * KiB, 4 * KiB, replay)
        d.copy(given, d.host + home + replay % 4 * 4 * KiB, 4 * KiB, H2D, d.compute)
        d.replay(graph, layers * 500_000)
        paced(d, replay, 2)
    d.sync(d.compute)
    d.spent.stop()
    same(d, d.device + 3 * pool.size, d.host + home + replay % 4 * 4 * KiB, 4 * KiB)
    same(d, d.device + 6 * pool.size, d.host + 6 * pool.size, pool.size)
    return {}


@eighth(
    line=COMPUTING,
    like=("pageable_memory", "synchronisation", "context_lock_stall", "python_or_gil_bound", "gpu_starved"),
    also=("wasted_stores",),
)
def an_auditor_that_takes_hidden_states_into_plain_memory_beside_decode(d: Device) -> Truth:
    """Each fifteenth step a thread takes 8 MiB of hidden states into plain memory, on a stream of its own.

    The driver holds that thread for as long as the copy takes, some milliseconds. Decode, in steps of 2 ms launched
    three ahead, waits for neither: what is copied is a copy within the device that no step touches.
    """
    size = (8 if d.gpu else 1) * MiB
    (keep, at), shadow, asked, done = pageable(size), d.device + 2 * size, Queue[int](), threading.Event()

    def take() -> None:
        while asked.get() >= 0:
            d.sync_event(0)
            d.copy(at, shadow, size, D2H, d.copies[5])
            d.sync(d.copies[5])
            done.set()

    thread = in_thread(take)
    done.set()
    d.spent.restart()
    kept = _snapshots(d, shadow, size, (15, 3), asked, done)
    thread.join()
    if ct.string_at(at + size - 64, 64) != bytes([kept]) * 64:
        raise RuntimeError("plain memory has other bytes than the hidden states")
    del keep
    return {}
