"""Ninth programs that are healthy: long chunks, cold experts, gradients, one batch, a job, files, Python, a pause."""

from __future__ import annotations

import contextlib
import ctypes as ct
import hashlib
import mmap
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from queue import Queue
from typing import Any

from accounts import Pool, paced, stamp, think, turns
from device import D2H, H2D, Device
from eighth_healthy import plain_only
from fresh_copies import clear
from ninth_host import BlockFiles, was_given
from other_shapes import gate
from registry import COMPUTING, DEVICE, NOTHING_TO_DO, KiB, MiB, Truth, in_thread, ninth
from unseen_copies import same

MADE: dict[str, Any] = {}  # before a program begins


def token(d: Device, step: int) -> int:
    """Sets a step's token on the device and brings it back behind the step's kernels; where it comes to."""
    back = d.size - 4 * KiB * (1 + step % 4)
    clear(d, d.device + back, step % 251, 512, d.compute)
    d.copy(d.host + back, d.device + back, 512, D2H, d.compute)
    return d.host + back


def told(at: int, step: int) -> None:
    """Raises unless a step's token is there."""
    if ct.string_at(at, 512) != bytes([step % 251]) * 512:
        raise RuntimeError("the token is another one than was computed")


@ninth(
    line=COMPUTING,
    like=("synchronisation", "gpu_starved", "python_or_gil_bound", "small_copies", "pageable_memory"),
    also=("wasted_stores",),
)
def long_chunks_each_waited_for_before_the_next(d: Device) -> Truth:
    """A chunk of a long prompt is five kernels of 5 ms; the thread waits for its token before it launches the next one.

    Nearly all of the time the thread stands in cudaStreamSynchronize. Between two chunks it computes in Python for
    0.05 ms, writes the ids and launches: the GPU has no kernel for 0.15 ms or so of each 25 ms.
    """
    chunk = 0
    for chunk in turns():
        ids = chunk % 8 * 4 * KiB
        stamp(d, ids, 4 * KiB, chunk)
        d.copy(d.device, d.host + ids, 4 * KiB, H2D, d.compute)
        for _ in range(5):
            d.launch(5_000_000)
        at = token(d, chunk)
        d.sync(d.compute)
        told(at, chunk)
        think(50)
    d.spent.stop()
    same(d, d.device, d.host + chunk % 8 * 4 * KiB, 4 * KiB)
    return {}


@ninth(
    line=COMPUTING,
    like=("fence_before_copies", "synchronisation", "gpu_starved", "cpu_starved", "weights_not_overlapped"),
)
def cold_experts_of_the_cpu_beside_hot_ones_that_take_longer(d: Device) -> Truth:
    """A layer's cold experts run on the CPU, in a function of a side stream for 0.5 ms; its hot ones take the GPU 3 ms.

    The function begins when the router's 0.5 ms are over, between the copies of its input and its result, and is done
    two milliseconds before the hot ones: the next layer finds the result there. Layers are submitted two ahead.
    """
    size, side, layer = 256 * KiB, d.copies[5], 0
    for layer in turns():
        home, event = d.host + layer % 4 * size, layer % 16 * 2
        clear(d, d.device, layer % 251, size, d.compute)
        d.launch(500_000)
        d.order(side, d.compute, event)
        d.copy(home, d.device, size, D2H, side)
        gate(d, 500, side)
        d.copy(d.device + size, home, size, H2D, side)
        for _ in range(2):
            d.launch(1_500_000)
        d.order(d.compute, side, event + 1)
        paced(d, layer, 2)
    d.sync(d.compute)
    d.spent.stop()
    was_given(d, layer, size)
    return {}


@ninth(
    line=COMPUTING,
    like=("link_bound", "redundant_loads", "synchronisation", "load_not_ordered", "store_not_ordered"),
    also=("wasted_stores", "unmerged_neighbours"),
)
def gradients_exchanged_bucket_by_bucket_beside_the_backward_pass(d: Device) -> Truth:
    """Each of eight layers' gradients leaves beside the rest of the backward pass, and the ranks' mean comes back.

    A layer's backward is 1 ms, and a bucket takes the link 0.12 ms each way, on a stream each way. The optimizer takes
    0.5 ms for a bucket, in the order in which they left, so the last one has 3.5 ms to come back; the forward is 2 ms.
    """
    pool, layers, out, back, step = Pool(d, d.bytes_of(120)), 8, d.copies[0], d.copies[1], 0
    for step in turns():
        others = (1 + step % 2) * layers  # the host's means are two sets
        for _ in range(2):
            d.launch(1_000_000)
        for layer in range(layers):
            clear(d, d.device + layer * pool.size, (step + layer) % 251, pool.size, d.compute)
            d.launch(1_000_000)
            event = step % 2 * 64 + layer * 3
            d.order(out, d.compute, event)
            d.copy(d.host + layer * pool.size, d.device + layer * pool.size, pool.size, D2H, out)
            d.order(back, out, event + 1)
            pool.fetch(layers + layer, others + layer, back)
            d.record(event + 2, back)
        for layer in range(layers):
            d.check(d.lib.cudaStreamWaitEvent(d.compute, d.events[step % 2 * 64 + layer * 3 + 2], 0))
            d.launch(500_000)
        paced(d, step, 1)
    d.sync(d.compute)
    d.spent.stop()
    last = (1 + step % 2) * layers + layers - 1
    same(d, d.device + (2 * layers - 1) * pool.size, d.host + last * pool.size, pool.size)
    same(d, d.device + 5 * pool.size, d.host + 5 * pool.size, pool.size)
    if ct.string_at(d.host + 5 * pool.size, 64) != bytes([(step + 5) % 251]) * 64:
        raise RuntimeError("other gradients left than were computed")
    return {}


@ninth(
    line=COMPUTING,
    like=("descriptor_bound_batch", "small_copies", "gpu_starved", "synchronisation", "unmerged_neighbours"),
)
def six_hundred_rows_by_one_batch_call_beside_a_long_step(d: Device) -> Truth:
    """While a step of 8 ms computes, the next one's table gets 600 scattered rows of 512 bytes by one batch call.

    There are two tables, and a step waits by an event for its own. To make the rows and the call takes the thread one
    or two milliseconds, and the copies take the GPU less; both are over when the step before has long to go.
    """
    rows, size, table, stream, step = 600, 512, 2 * MiB, d.copies[4], 0

    def row(i: int) -> int:
        return i * 1_999 % 4_096 * size

    for step in turns():
        new, mine = 8 * MiB + step % 4 * 512 * KiB, d.device + step % 2 * table
        stamp(d, new, rows * size, step)
        if step > 1:  # the step before the last has read this table
            d.check(d.lib.cudaStreamWaitEvent(stream, d.events[8 + step % 2], 0))
        d.batch([mine + row(i) for i in range(rows)], [d.host + new + i * size for i in range(rows)], size, stream)
        d.order(d.compute, stream, step % 8)
        for _ in range(4):
            d.launch(2_000_000)
        d.record(8 + step % 2, d.compute)
        paced(d, step, 1)
    d.sync(d.compute)
    d.spent.stop()
    for i in (0, rows - 1):
        same(d, d.device + step % 2 * table + row(i), d.host + 8 * MiB + step % 4 * 512 * KiB + i * size, size)
    return {}


@ninth(
    line=COMPUTING,
    like=("gpu_starved", "python_or_gil_bound", "cpu_starved", "synchronisation", "launch_queue_saturation"),
    also=("wasted_stores",),
)
def a_background_job_that_fills_the_pauses_of_decode(d: Device) -> Truth:
    """The thread that decodes waits for each step of 0.5 ms and hashes for 1 ms; another one keeps a job on the GPU.

    The job is kernels of 5 ms on a stream of its own, of which three are launched ahead at any time: the GPU computes
    all the time, whatever decode's stream has. The hash is made in C without the interpreter's lock.
    """
    job, over, done, step, at = d.copies[6], threading.Event(), 0, 0, 0
    ahead, blocks = 4, bytes(1 * MiB)

    def work() -> None:
        nonlocal done
        while not over.is_set():
            d.launch(5_000_000, job)
            d.record(200 + done % 16, job)
            done += 1
            if done >= ahead:
                d.sync_event(200 + (done - ahead) % 16)

    d.spent.restart()
    thread = in_thread(work)
    for step in turns():
        d.launch(500_000)
        at = token(d, step)
        d.sync(d.compute)
        told(at, step)
        hashlib.sha256(blocks).digest()
    over.set()
    thread.join()
    d.sync(job)
    d.spent.stop()
    d.spent.add(COMPUTING, done * 5_000_000)  # decode's kernels run beside the job's
    return {}


def make_the_files(d: Device) -> None:
    MADE["files"] = BlockFiles(256 * KiB if d.gpu else 64 * KiB, 40)


@ninth(
    line=COMPUTING,
    like=("slow_tier", "synchronisation", "weights_not_overlapped", "cpu_starved", "load_not_ordered"),
    also=("unmerged_neighbours",),
    prepare=make_the_files,
)
def block_files_read_by_a_thread_some_requests_ahead(d: Device) -> Truth:
    """A thread reads each request's eight files of 256 KiB into pinned memory and loads them; a prefill is 6 ms.

    There are six places. At first all are full, so the thread has 18 ms to read and load, which takes it 1 ms, while
    two prefills are launched and a third is there: it never waits for one, which the program checks.
    """
    files, places, each, request = MADE.pop("files"), 6, 8, 0
    size, loads = each * files.size, d.copies[3]
    view = memoryview((ct.c_char * (places * size)).from_address(d.host)).cast("B")
    free, full, held = Queue[int](), Queue[tuple[int, int]](), list[int]()

    def read() -> None:
        number = 0
        while (place := free.get()) >= 0:
            for i in range(each):
                at = place * size + i * files.size
                files.read(number * each + i, view[at:])
                d.copy(d.device + at, d.host + at, files.size, H2D, loads)
            d.record(place, loads)
            full.put((place, number))
            number += 1

    for place in range(places):
        free.put(place)
    thread = in_thread(read)
    threading.Event().wait(0.05)
    while full.qsize() < places:
        threading.Event().wait(0.002)
    d.spent.restart()
    for request in turns():
        plain_only(d, not full.empty(), "no request was read")
        place, number = full.get()
        d.check(d.lib.cudaStreamWaitEvent(d.compute, d.events[place], 0))
        for _ in range(3):
            d.launch(2_000_000)
        held.append(place)
        paced(d, request, 2)
        if request > 1:
            free.put(held.pop(0))
    d.sync(d.compute)
    d.spent.stop()
    same(d, d.device + place * size, d.host + place * size, files.size)
    if number != request or ct.string_at(d.host + place * size, files.size) != files.of(number * each % files.count):
        raise RuntimeError("a place has other bytes than its request's file")
    free.put(-1)
    thread.join()
    files.folder.cleanup()
    return {}


@ninth(
    line=COMPUTING,
    like=("python_or_gil_bound", "cpu_starved", "gpu_starved", "synchronisation", "small_copies"),
    also=("wasted_stores",),
)
def a_tokenizer_in_python_beside_prefills_launched_far_ahead(d: Device) -> Truth:
    """A thread splits words in Python all the time; prefills of 120 ms are launched two ahead by another one.

    Each of the nine calls of a prefill may wait 5 ms for the interpreter's lock, which is 45 ms, and the GPU has more
    than 120 ms to do whenever the thread begins. It is so before the tokenizer starts, with the second prefill.
    """
    over, counts, prefill, at = threading.Event(), {"": 0}, 0, 0

    def split() -> None:
        words = [f"word{i % 311}ing" for i in range(2_000)]
        while not over.is_set():
            for word in words:
                for piece in (word[:4], word[4:-3], word[-3:]):
                    counts[piece] = counts.get(piece, 0) + 1

    thread = threading.Thread(target=split)
    d.spent.restart()
    for prefill in turns():
        ids = prefill % 8 * 4 * KiB
        stamp(d, ids, 4 * KiB, prefill)
        d.copy(d.device, d.host + ids, 4 * KiB, H2D, d.compute)
        for _ in range(3):
            d.launch(40_000_000)
        at = token(d, prefill)
        if prefill == 1:
            thread.start()
        paced(d, prefill, 2)
    d.sync(d.compute)
    d.spent.stop()
    over.set()
    thread.join()
    told(at, prefill)
    same(d, d.device, d.host + prefill % 8 * 4 * KiB, 4 * KiB)
    if not counts.get("word") or counts["word"] != counts["ing"]:
        raise RuntimeError("the tokenizer has split no word, or not all of one")
    return {}


FRONTEND = """
import mmap, os, sys, time
memory, bell = mmap.mmap(int(sys.argv[1]), 4096), int(sys.argv[2])
for number, pause in enumerate((60, 45, 80, 55, 65, 50, 75, 60) * 3):
    memory[:4] = number.to_bytes(4, "little")
    os.eventfd_write(bell, 1)
    time.sleep(pause / 1_000)
memory[:4] = b"\\xff" * 4
os.eventfd_write(bell, 1)
"""


@contextlib.contextmanager
def a_frontend() -> Iterator[tuple[mmap.mmap, int]]:
    """Another process that writes each request's number into shared memory, and the descriptor by which it wakes us."""
    memory, bell = os.memfd_create("requests"), os.eventfd(0)
    os.ftruncate(memory, 4_096)
    env = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    command = [sys.executable, "-S", "-c", FRONTEND, str(memory), str(bell)]
    child = subprocess.Popen(command, env=env, pass_fds=(memory, bell))
    try:
        yield mmap.mmap(memory, 4_096), bell
    finally:
        child.wait()
        os.close(memory)
        os.close(bell)


@ninth(
    line=NOTHING_TO_DO,
    like=("slow_tier", "gpu_starved", "synchronisation", "python_or_gil_bound", "cpu_starved"),
    also=("wasted_stores",),
    undecided_in=DEVICE,  # their recordings hold CUDA's calls alone
)
def requests_that_a_frontend_process_leaves_in_shared_memory(d: Device) -> Truth:
    """A process puts a request into shared memory every 60 ms or so, and wakes the server by a counter (eventfd).

    The server sleeps in the read of eight bytes until then. A request is six steps of 1.5 ms, launched two ahead; its
    number is among its ids. When it is answered the server sleeps again, six sevenths of the time.
    """
    number, seen = 0, 0
    with a_frontend() as (memory, bell):
        os.eventfd_read(bell)
        d.spent.restart()
        while (number := int.from_bytes(memory[:4], "little")) < 1_000:
            seen += 1
            for step in range(6):
                stamp(d, step * 4 * KiB, 4 * KiB, number * 6 + step)
                d.copy(d.device, d.host + step * 4 * KiB, 4 * KiB, H2D, d.compute)
                d.launch(1_500_000)
                at = token(d, number * 6 + step)
                paced(d, step, 2)
            d.sync(d.compute)
            told(at, number * 6 + 5)
            with d.spent.on(NOTHING_TO_DO):
                os.eventfd_read(bell)
        d.spent.stop()
    plain_only(d, seen == 24, "the server did not see each request")
    same(d, d.device, d.host + 5 * 4 * KiB, 4 * KiB)
    return {}
