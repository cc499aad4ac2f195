"""Fresh programs whose device waits for the host: for pageable inputs, registering, senders, threads, memsets."""

from __future__ import annotations

import ctypes as ct
import hashlib
import mmap
import os
import queue
import random
import threading
from concurrent.futures import ThreadPoolExecutor

from accounts import Pool, stamp, think
from device import D2H, H2D, Device, now
from fresh_copies import clear, computed
from later_host import steps_off_the_cpu
from registry import (
    ALLOCATING,
    BELOW_LINK_RATE,
    DEVICE,
    ELSEWHERE,
    NO_CPU,
    NOTHING_TO_DO,
    PAGEABLE,
    PYTHON,
    SUBMITTING,
    KiB,
    MiB,
    Truth,
    fresh,
    in_thread,
    pageable,
)


@fresh(
    "pageable_memory",
    line=PAGEABLE,
    or_lines=(BELOW_LINK_RATE, PYTHON),
    also=("synchronisation", "gpu_starved", "python_or_gil_bound"),
    like=("small_copies",),
)
def images_in_pageable_arrays_before_the_encoder(d: Device) -> Truth:
    """Each request's eight images of 1.5 MiB lie in pageable arrays, whose copies the caller sits through."""
    size, images, lost = (1536 if d.gpu else 256) * KiB, 24, 0
    keep, at = pageable(size * images)
    for i in range(images):
        ct.memmove(at + i * size, random.Random(i).randbytes(size), size)
    d.spent.restart()
    for request in range(90):
        think(150)  # resizes them
        for i in range(8):
            image = (8 * request + i) % images
            with d.spent.on(PAGEABLE):
                lost += d.copy(d.device + i * size, at + image * size, size, H2D, d.compute)
        for _ in range(3):
            d.launch(300_000)
        d.sync(d.compute)
    del keep
    return {"pageable_memory": lost}


@fresh("allocation_on_hot_path", line=ALLOCATING, also=("synchronisation", "small_copies"), like=("pageable_memory",))
def blocks_registered_one_by_one(d: Device) -> Truth:
    """A request's 32 blocks of 256 KiB are registered one by one, loaded, and given back one by one."""
    size, blocks, sets, lost = 256 * KiB, 32, 8, 0
    mapping = mmap.mmap(-1, size * blocks * sets)
    for _ in range(sets):
        mapping.write(os.urandom(size * blocks))
    at = ct.addressof(ct.c_char.from_buffer(mapping))
    d.spent.restart()
    for request in range(50):
        places = [at + (request % sets * blocks + i) * size for i in range(blocks)]
        with d.spent.on(ALLOCATING):
            begin = now()
            for place in places:
                d.check(d.lib.cudaHostRegister(place, size, 0))
            lost += now() - begin
        for i, place in enumerate(places):
            d.copy(d.device + i * size, place, size, H2D, d.compute)
        d.launch(1_000_000)
        d.sync(d.compute)
        with d.spent.on(ALLOCATING):
            begin = now()
            for place in places:
                d.check(d.lib.cudaHostUnregister(place))
            lost += now() - begin
    return {"allocation_on_hot_path": lost}


@fresh(
    line=SUBMITTING,
    or_lines=(PYTHON,),
    also=("gpu_starved", "python_or_gil_bound", "synchronisation"),
    like=("small_copies", "launch_queue_saturation"),
)
def new_blocks_cleared_one_by_one(d: Device) -> Truth:
    """400 scattered KV blocks of 16 KiB are cleared by a memset each, slower than the device does it, before a step."""
    size = 16 * KiB
    order = random.Random(15).sample(range(d.size // size), 400)
    for _ in range(120):
        with d.spent.on(SUBMITTING):
            for block in order:
                clear(d, d.device + block * size, 0, size, d.compute)
        d.launch(500_000)
        d.sync(d.compute)
    return {}


def handed_out(d: Device, slots: int, prefills: int, sending_us: int) -> None:
    """KV of each prefill goes through a ring of pinned slots to a sender, which is done with one after `sending_us`."""
    pool = Pool(d, d.bytes_of(200))
    free: queue.Queue[int] = queue.Queue()
    full: queue.Queue[int] = queue.Queue()
    for slot in range(slots):
        free.put(slot)

    def send() -> None:
        sleep = ct.CDLL(None).usleep
        while (slot := full.get()) >= 0:
            d.sync_event(slot)
            sleep(sending_us)  # in a socket, without the interpreter's lock
            free.put(slot)

    sender = in_thread(send)
    d.spent.restart()
    for prefill in range(prefills):
        with d.spent.on(ELSEWHERE):
            slot = free.get()
        computed(d, pool, prefill % 8, 1, prefill)
        for _ in range(4):
            d.launch(500_000)
        d.order(d.copies[1], d.compute, 100 + prefill % 50)
        d.copy(d.host + slot * pool.size, d.device + prefill % 8 * pool.size, pool.size, D2H, d.copies[1])
        d.record(slot, d.copies[1])
        full.put(slot)
    full.put(-1)
    d.spent.lines[ELSEWHERE] = max(d.spent.lines[ELSEWHERE] - prefills * 2_000_000, 0)  # the device computed meanwhile
    sender.join()
    d.spent.stop()


@fresh(
    line=ELSEWHERE,
    or_lines=(NOTHING_TO_DO, PYTHON),
    also=("gpu_starved", "synchronisation"),
    like=("wasted_stores", "python_or_gil_bound", "cpu_starved"),
)
def a_staging_ring_of_one_slot_to_the_decode_node(d: Device) -> Truth:
    """A prefill's KV leaves through one pinned slot: the next prefill is launched when the sender has given it back."""
    handed_out(d, 1, 90, 2_500)
    return {}


@fresh(
    line=ELSEWHERE,
    or_lines=(PYTHON,),
    also=("gpu_starved", "synchronisation", "python_or_gil_bound"),
    like=("cpu_starved", "small_copies"),
)
def a_grammar_s_mask_awaited_from_a_worker(d: Device) -> Truth:
    """Structured output: a step's mask is made by another thread in 1.3 ms, while the model's thread waits for it."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(think, 10).result()
        d.spent.restart()
        for step in range(130):
            with d.spent.on(ELSEWHERE):
                pool.submit(think, 1_300).result()
            stamp(d, step % 4 * 64 * KiB, 64 * KiB, step)
            d.copy(d.device, d.host + step % 4 * 64 * KiB, 64 * KiB, H2D, d.compute)
            d.launch(900_000)
            d.copy(d.host + MiB, d.device + MiB, 1 * KiB, D2H, d.compute)
            d.sync(d.compute)
        d.spent.stop()
    return {}


@fresh(
    "cpu_starved",
    line=NO_CPU,
    or_lines=(PYTHON,),
    also=("python_or_gil_bound", "gpu_starved", "synchronisation"),
    blind=DEVICE,
)
def threads_that_hash_on_the_submitter_s_cpu(d: Device) -> Truth:
    """Three threads hash blocks of the prefix cache, outside the interpreter's lock, on the submitter's one CPU."""
    before, stop, data = os.sched_getaffinity(0), threading.Event(), bytes(4 * MiB)
    cpu = {min(before)}

    def hashes() -> None:
        os.sched_setaffinity(0, cpu)
        while not stop.is_set():
            hashlib.sha256(data).digest()

    threads = [in_thread(hashes) for _ in range(3)]
    os.sched_setaffinity(0, cpu)
    try:
        off = steps_off_the_cpu(d, 50)
    finally:
        os.sched_setaffinity(0, before)
        stop.set()
        for thread in threads:
            thread.join()
    return {"cpu_starved": off}
