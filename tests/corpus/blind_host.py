"""Blind programs whose device waits for the host: parsers, logs, growing buffers, a lock, a file, joined streams."""

from __future__ import annotations

import ctypes as ct
import json
import os
import random
import tempfile
import threading
import time
from typing import Any

from accounts import Pool, think
from device import D2H, H2D, Device, now
from fresh_copies import clear
from registry import (
    ALLOCATING,
    BELOW_LINK_RATE,
    ELSEWHERE,
    PAGEABLE,
    PYTHON,
    SUBMITTING,
    TIER,
    WAITING,
    MiB,
    Truth,
    blind_program,
    in_thread,
    pageable,
)

FILE: dict[str, Any] = {}
READ = 8 * MiB  # a chunk of the file


@blind_program(
    "python_or_gil_bound",
    line=PYTHON,
    or_lines=(ELSEWHERE,),
    also=("gpu_starved", "synchronisation"),
    like=("cpu_starved", "context_lock_stall"),
)
def requests_parsed_in_c_by_a_thread_that_keeps_the_lock(d: Device) -> Truth:
    """A thread parses JSON, some 3 ms a piece in C with the interpreter's lock; each call of a step waits for it."""
    numbers = random.Random(5)
    text = json.dumps([[numbers.random() for _ in range(50)] for _ in range(200)])
    begin = now()
    json.loads(text)
    text = json.dumps(json.loads(text) * max(round(3_000_000 / (now() - begin)), 1))
    stop = threading.Event()

    def parse() -> None:
        while not stop.is_set():
            json.loads(text)
            time.sleep(0.0003)

    thread = in_thread(parse)
    d.spent.restart()
    begin, kernels, steps = now(), d.kernel_ns, 0
    while now() - begin < 700_000_000:
        d.launch(400_000)
        d.launch(400_000)
        d.sync(d.compute)
        steps += 1
    lost = now() - begin - (d.kernel_ns - kernels)
    d.spent.add(PYTHON, lost)
    d.spent.stop()
    stop.set()
    thread.join()
    return {"python_or_gil_bound": lost}


@blind_program(
    "pageable_memory",
    line=PAGEABLE,
    or_lines=(BELOW_LINK_RATE,),
    also=("synchronisation", "gpu_starved", "wasted_stores"),
    like=("python_or_gil_bound", "small_copies"),
)
def hidden_states_logged_into_pageable_memory(d: Device) -> Truth:
    """After each step its hidden states are copied out into plain memory for a log, and the next step waits for it."""
    size, lost = (12 * MiB if d.gpu else 2 * MiB), 0
    keep, at = pageable(4 * size)
    d.spent.restart()
    for step in range(250):
        clear(d, d.device, step % 251, size, d.compute)
        d.launch(500_000)
        d.sync(d.compute)
        with d.spent.on(PAGEABLE):
            lost += d.copy(at + step % 4 * size, d.device, size, D2H, d.compute)
    del keep
    return {"pageable_memory": lost}


@blind_program(
    "allocation_on_hot_path",
    line=ALLOCATING,
    also=("synchronisation", "gpu_starved"),
    like=("pinning_stall", "pageable_memory", "first_calls"),
)
def a_pinned_buffer_that_grows_with_the_longest_request(d: Device) -> Truth:
    """Each eighth request is the longest so far: the pinned buffer is freed and a larger one made while all wait."""
    size, buffer, lost = 64 * MiB, 0, 0
    for request in range(120):
        if request % 8 == 0:
            with d.spent.on(ALLOCATING):
                begin = now()
                if buffer:
                    d.check(d.lib.cudaFreeHost(buffer))
                buffer, size = d.made("cudaHostAlloc", size, 0), size + 4 * MiB
                lost += now() - begin
        used = d.bytes_of(10)
        ct.memmove(buffer, d.host + request * used % (d.size - used), used)
        d.copy(d.device, buffer, used, H2D, d.compute)
        d.launch(1_000_000)
        d.sync(d.compute)
    d.check(d.lib.cudaFreeHost(buffer))
    return {"allocation_on_hot_path": lost}


@blind_program(
    line=PYTHON,
    or_lines=(ELSEWHERE,),
    also=("gpu_starved", "python_or_gil_bound", "synchronisation"),
    like=("cpu_starved", "context_lock_stall", "small_copies"),
)
def two_models_that_take_turns_by_one_lock(d: Device) -> Truth:
    """Two models share the GPU by a lock around a whole step: its 0.7 ms of lists, its kernel of 0.5 ms, its wait."""
    turn = threading.Lock()

    def serve(stream: int) -> None:
        for _ in range(260):
            with turn:
                with d.spent.on(PYTHON):
                    think(700)
                d.launch(500_000, stream)
                d.sync(stream)

    other = in_thread(lambda: serve(d.copies[7]))
    serve(d.compute)
    other.join()
    return {}


def ready_file(d: Device) -> None:
    if "fd" not in FILE:
        with tempfile.TemporaryFile() as file:
            file.write((ct.c_char * (6 * READ)).from_address(d.host))
            file.flush()
            FILE["fd"] = os.dup(file.fileno())
        FILE["into"] = memoryview((ct.c_char * READ).from_address(d.host)).cast("B")
    os.preadv(FILE["fd"], [FILE["into"]], 0)


@blind_program(
    line=TIER,
    or_lines=(ELSEWHERE, PYTHON),
    also=("slow_tier", "gpu_starved", "python_or_gil_bound", "synchronisation"),
    like=("pageable_memory", "small_copies", "cpu_starved"),
    prepare=ready_file,
)
def a_prefix_read_from_a_file_before_each_prefill(d: Device) -> Truth:
    """A chunk of 8 MiB is read into pinned memory for each prefill, for the small part of it that is loaded then."""
    pool = Pool(d, d.bytes_of(40))
    for prefill in range(250):
        with d.spent.on(TIER):
            os.preadv(FILE["fd"], [FILE["into"]], prefill % 6 * READ)
        pool.fetch(prefill % 4, prefill % (READ // pool.size), d.compute)
        d.launch(400_000)
        d.sync(d.compute)
    return {}


@blind_program(
    line=WAITING,
    or_lines=(SUBMITTING, PYTHON),
    also=("synchronisation", "gpu_starved", "python_or_gil_bound"),
    like=("small_copies", "context_lock_stall"),
)
def a_draft_and_its_target_joined_by_the_host(d: Device) -> Truth:
    """The draft's kernel of 30 us and the target's of 30 us lie on two streams, and the host waits between all."""
    for _ in range(5_000):
        d.launch(30_000, d.copies[6])
        d.sync(d.copies[6])
        d.launch(30_000)
        d.sync(d.compute)
    return {}
