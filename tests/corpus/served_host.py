"""Served programs whose device waits for the host: a disk, new weights, another process, pickles, a lock, adapters."""

from __future__ import annotations

import ctypes as ct
import fcntl
import os
import pickle
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from accounts import Stretches, going, think
from device import D2H, H2D, Device, now
from registry import (
    BELOW_LINK_RATE,
    DEVICE,
    ELSEWHERE,
    PAGEABLE,
    PYTHON,
    TIER,
    WAITING,
    KiB,
    MiB,
    Truth,
    in_thread,
    served,
)

MADE: dict[str, Any] = {}  # before a program begins


def spill(d: Device) -> None:
    """Writes half of the pinned pool to a file that has no name any more."""
    fd, path = tempfile.mkstemp()
    Path(path).unlink()
    MADE["file"] = fd
    view, at = memoryview((ct.c_char * (d.size // 2)).from_address(d.host)).cast("B"), 0
    while at < len(view):
        at += os.pwrite(fd, view[at : at + 16 * MiB], at)
    os.fsync(fd)  # what is not written yet cannot be dropped from memory


@served(
    line=TIER,
    or_lines=(ELSEWHERE, PYTHON),
    also=("slow_tier", "gpu_starved", "synchronisation", "python_or_gil_bound"),
    like=("cpu_starved", "pageable_memory", "weights_not_overlapped"),
    prepare=spill,
    undecided_in=DEVICE,  # their recordings hold CUDA's calls alone
)
def a_spilled_prefix_read_by_two_threads_before_its_load(d: Device) -> Truth:
    """Two threads of a pool read a prefix of 24 MiB from its file into pinned memory; then it is loaded and used."""
    fd, size, idle = MADE.pop("file"), (24 if d.gpu else 6) * MiB, Stretches(d)
    prefixes, half, request = d.size // 2 // size, size // 2, 0

    def read(home: int, offset: int) -> None:
        view, got = memoryview((ct.c_char * half).from_address(home)).cast("B"), 0
        while got < half:
            got += os.preadv(fd, [view[got:]], offset + got)

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(time.sleep, (0.01, 0.01)))
        d.spent.restart()
        for request in going():
            at, home = request % prefixes * size, d.host + d.size // 2 + request % 2 * size
            parts = [threads.submit(read, home + part * half, at + part * half) for part in range(2)]
            for one in parts:
                one.result()
            os.posix_fadvise(fd, at, size, os.POSIX_FADV_DONTNEED)
            idle.end()
            d.copy(d.device + request % 2 * size, home, size, H2D, d.compute)
            for _ in range(4):
                d.launch(300_000)
            idle.begin()
            d.sync(d.compute)
            idle.read()
        d.spent.add(TIER, idle.ns)
        d.spent.stop()
    if os.pread(fd, 4 * KiB, request % prefixes * size) != ct.string_at(
        d.host + d.size // 2 + request % 2 * size, 4 * KiB
    ):
        raise RuntimeError("other bytes were read than the file has")
    os.close(fd)
    return {}


def train(d: Device) -> None:
    """Makes two versions of the weights."""
    size = 8 * (12 if d.gpu else 3) * MiB
    MADE["weights"] = [ct.create_string_buffer(random.randbytes(size), size) for _ in range(2)]


@served(
    line=PYTHON,
    or_lines=(ELSEWHERE,),
    prepare=train,
    also=("weights_not_overlapped", "synchronisation", "gpu_starved", "python_or_gil_bound"),
    like=("redundant_loads", "pageable_memory", "allocation_on_hot_path", "slow_tier"),
)
def new_weights_through_one_pinned_bucket_before_each_rollout(d: Device) -> Truth:
    """New weights go by the CPU into one pinned bucket, bucket by bucket, each waited for; then it decodes."""
    size, buckets, idle = (12 if d.gpu else 3) * MiB, 8, Stretches(d)
    versions = MADE.pop("weights")
    d.spent.restart()
    for rollout in going():
        new = ct.addressof(versions[rollout % 2])
        for bucket in range(buckets):
            ct.memmove(d.host, new + bucket * size, size)
            idle.end()
            d.copy(d.device + bucket * size, d.host, size, H2D, d.compute)
            idle.begin()
            d.sync(d.compute)  # the bucket is free again
            idle.read()
        idle.end()
        for _ in range(6):
            d.launch(1_200_000)
        idle.begin()
        d.sync(d.compute)
    d.spent.add(PYTHON, idle.read())
    d.spent.stop()
    return {}


@contextmanager
def another_user_of_the_gpu(path: str, us: int) -> Iterator[None]:
    """A process that has the lock of a file for so long at a time, as a server with the GPU to itself does."""
    holds = (
        f"import fcntl, time\nlock = open({path!r})\nprint(flush=True)\n"
        f"while True:\n fcntl.flock(lock, fcntl.LOCK_EX); time.sleep({us / 1e6}); fcntl.flock(lock, fcntl.LOCK_UN)\n"
        " time.sleep(0.0003)"
    )
    env = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    child = subprocess.Popen([sys.executable, "-S", "-c", holds], env=env, stdout=subprocess.PIPE)
    try:
        assert child.stdout
        child.stdout.readline()
        yield
    finally:
        child.kill()
        child.communicate()


@served(
    line=ELSEWHERE,
    or_lines=(PYTHON,),
    also=("gpu_starved", "synchronisation", "python_or_gil_bound"),
    like=("cpu_starved", "context_lock_stall", "slow_tier"),
)
def a_gpu_that_two_servers_lend_each_other_by_a_file_lock(d: Device) -> Truth:
    """Each step of 1.6 ms wants a file's lock, which a server in another process keeps for 4 ms at a time."""
    idle = Stretches(d)
    with tempfile.NamedTemporaryFile() as file, another_user_of_the_gpu(file.name, 4_000):
        d.spent.restart()
        for _ in going():
            fcntl.flock(file, fcntl.LOCK_EX)
            idle.end()
            for _ in range(4):
                d.launch(400_000)
            d.copy(d.host, d.device, 1 * KiB, D2H, d.compute)
            idle.begin()
            d.sync(d.compute)
            fcntl.flock(file, fcntl.LOCK_UN)
            idle.read()
            think(300)  # the tokens are sent, and the other one takes the lock
        d.spent.add(ELSEWHERE, idle.ns)
        d.spent.stop()
    return {}


@served(
    line=PYTHON,
    also=("gpu_starved", "python_or_gil_bound", "synchronisation"),
    like=("cpu_starved", "slow_tier", "blocking_server_call"),
)
def a_plan_pickled_for_eight_workers_before_each_step(d: Device) -> Truth:
    """The scheduler pickles its plan, all requests' block tables, once for each of eight workers; then a step runs."""
    plan: dict[int, list[int]] = {}
    idle, took = Stretches(d), 0
    while took < 250_000 and len(plan) < 4_000:
        for request in range(len(plan), len(plan) + 10):
            plan[request] = [request * 70_001 + i * 37 for i in range(200)]
        begin = now()
        pickle.dumps(plan)
        took = now() - begin
    d.spent.restart()
    for step in going():
        plan[step % len(plan)][step % 200] += 1
        for _ in range(8):
            pickle.dumps(plan)
        idle.end()
        d.load(step % 8, 32 * KiB, d.compute)
        for _ in range(4):
            d.launch(350_000)
        idle.begin()
        d.sync(d.compute)
        idle.read()
    d.spent.add(PYTHON, idle.ns)
    d.spent.stop()
    return {}


@served(
    "python_or_gil_bound",
    line=PYTHON,
    or_lines=(ELSEWHERE,),
    also=("gpu_starved", "synchronisation"),
    like=("cpu_starved", "context_lock_stall"),
)
def a_thread_that_sorts_scores_beside_the_one_that_decodes(d: Device) -> Truth:
    """A thread sorts for 6 ms at a time, in C, with the interpreter's lock, which each step's thread wants back."""
    chance, stop, took = random.Random(64), threading.Event(), 0
    scores: list[float] = []
    while took < 6_000_000 and len(scores) < 1_000_000:
        scores += [chance.random() for _ in range(2_000)]
        begin = now()
        sorted(scores)
        took = now() - begin

    def sorts() -> None:
        while not stop.is_set():
            sorted(scores)
            time.sleep(0.0002)

    thread, kernel, step = in_thread(sorts), 1_400_000, 0
    d.spent.restart()
    begin = now()
    for step in going():
        d.launch(kernel)
        d.record(step, d.compute)
        d.sync_event(step)  # each call gives the lock up
    lost = now() - begin - (step + 1) * kernel
    d.spent.add(PYTHON, lost)
    d.spent.stop()
    stop.set()
    thread.join()
    return {"python_or_gil_bound": lost}


@served(
    "pageable_memory",
    line=PAGEABLE,
    or_lines=(BELOW_LINK_RATE, WAITING),
    also=("synchronisation", "gpu_starved", "python_or_gil_bound", "weights_not_overlapped"),
    like=("redundant_loads", "small_copies", "unmerged_neighbours", "allocation_on_hot_path"),
)
def adapters_set_by_synchronous_copies_out_of_plain_memory(d: Device) -> Truth:
    """Before each batch 40 matrices of another adapter, 512 KiB each, go by cudaMemcpy out of memory of `malloc`."""
    size, matrices, apart, lost = 512 * KiB, 40, 576 * KiB, 0
    adapters = [ct.create_string_buffer(random.Random(65 + i).randbytes(matrices * apart + 4096)) for i in range(3)]
    homes = [(ct.addressof(one) + 4095) & ~4095 for one in adapters]
    d.spent.restart()
    for batch in going():
        for matrix in range(matrices):
            start = now()
            d.check(d.lib.cudaMemcpy(d.device + matrix * size, homes[batch % 3] + matrix * apart, size, H2D))
            lost += now() - start
        d.launch(1_000_000)
        d.sync(d.compute)
    d.spent.add(PAGEABLE, lost)
    d.spent.stop()
    return {"pageable_memory": lost}
