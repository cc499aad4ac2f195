"""Programs of later shapes whose device waits for the host: for Python, for calls, for memory, for a CPU."""

from __future__ import annotations

import contextlib
import ctypes as ct
import mmap
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

from accounts import stamp, think
from device import D2H, H2D, Device, now
from other_shapes import gate
from registry import (
    ALLOCATING,
    AT_LINK_RATE,
    ELSEWHERE,
    NO_CPU,
    PYTHON,
    SUBMITTING,
    WAITING,
    KiB,
    MiB,
    Truth,
    in_thread,
    program,
)


@program(line=PYTHON, also=("gpu_starved", "python_or_gil_bound", "synchronisation"))
def a_scheduler_in_python_between_steps(d: Device) -> Truth:
    """Between two steps of 1.2 ms the scheduler makes block tables in Python for 2 ms, and nothing is submitted."""
    for step in range(110):
        d.launch(600_000)
        d.launch(600_000)
        d.store(step, 256, d.compute)
        d.sync(d.compute)
        with d.spent.on(PYTHON):
            think(2_000)
    return {}


@program("python_or_gil_bound", line=PYTHON)
def tokenizer_threads_that_hold_the_lock(d: Device) -> Truth:
    """Three threads tokenize in Python; the decode thread gets the interpreter's lock late after each wait."""
    stop = threading.Event()

    def tokenize() -> None:
        while not stop.is_set():
            think(300)

    threads = [in_thread(tokenize) for _ in range(3)]
    begin = now()
    for step in range(25):
        d.launch(900_000)
        d.record(step, d.compute)
        d.sync_event(step)  # each call gives the lock up, and comes back when it is lent again
    lost = now() - begin - 25 * 900_000
    stop.set()
    for thread in threads:
        thread.join()
    d.spent.add(PYTHON, lost)
    return {"python_or_gil_bound": lost}


@program(line=PYTHON, also=("synchronisation", "gpu_starved", "python_or_gil_bound"))
def sampling_in_python_after_each_read_back(d: Device) -> Truth:
    """Logits of 128 KiB are read back in each step, and Python samples for 0.7 ms before the next step is launched."""
    for _ in range(250):
        d.launch(350_000)
        d.copy(d.host, d.device, 128 * KiB, D2H, d.compute)
        d.sync(d.compute)
        with d.spent.on(PYTHON):
            think(700)
    return {}


@program(line=SUBMITTING, or_lines=(PYTHON,), also=("gpu_starved", "python_or_gil_bound"))
def tiny_kernels_launched_one_by_one(d: Device) -> Truth:
    """Bursts of 300 kernels of 1.5 us, one by one without a graph: the device is done before the next one comes."""
    for _ in range(8):
        with d.spent.on(SUBMITTING):
            for _ in range(300):
                d.launch(1_500)
        d.launch(3_000_000)
        d.sync(d.compute)
    return {}


@program("synchronisation", line=WAITING, or_lines=(SUBMITTING, PYTHON))
def the_device_synchronised_after_each_kernel(d: Device) -> Truth:
    """Each kernel of 15 us is followed by a synchronisation of the whole device, as a debug switch left on does."""
    waited = 0
    for _ in range(1_200):
        d.launch(15_000)
        begin = now()
        d.synchronize()
        waited += now() - begin
    d.spent.add(WAITING, waited - 1_200 * 15_000)
    return {"synchronisation": waited}


@program("synchronisation", line=WAITING, or_lines=(SUBMITTING, PYTHON), also=("small_copies", "gpu_starved"))
def small_inputs_by_synchronous_copies(d: Device) -> Truth:
    """Twelve inputs of 2 KiB go to the GPU by cudaMemcpy in front of each step of 120 us: each copy is waited for."""
    waited = 0
    for step in range(150):
        for i in range(12):
            stamp(d, i * 4096, 16, 12 * step + i)
            begin = now()
            d.check(d.lib.cudaMemcpy(d.device + i * 4096, d.host + i * 4096, 2 * KiB, H2D))
            waited += now() - begin
        d.launch(120_000)
        d.sync(d.compute)
    d.spent.add(WAITING, waited)
    return {"synchronisation": waited}


@program(line=WAITING, or_lines=(ELSEWHERE,), also=("synchronisation", "gpu_starved"))
def a_callback_in_the_stream_of_the_model(d: Device) -> Truth:
    """A callback of 2 ms ends each step on the model's stream; the thread waits for the stream with nothing running."""
    for _ in range(120):
        d.launch(1_500_000)
        gate(d, 2_000, d.compute)
        with d.spent.on(WAITING):
            d.sync(d.compute)
    d.spent.lines[WAITING] -= 120 * 1_500_000
    return {}


@program("synchronisation", line=AT_LINK_RATE, or_lines=(WAITING,))
def logits_read_by_synchronous_copies(d: Device) -> Truth:
    """All runs on the default stream, and cudaMemcpy brings 24 MiB of hidden states to the host after each step."""
    size, lost = d.bytes_of(450), 0
    for _ in range(180):
        d.launch(700_000, 1)  # cudaStreamLegacy
        begin = now()
        d.check(d.lib.cudaMemcpy(d.host, d.device, size, D2H))
        lost += now() - begin
        d.spent.add(AT_LINK_RATE, size / d.bytes_per_us * 1e3)
    return {"synchronisation": lost}


@program("allocation_on_hot_path", line=ALLOCATING)
def a_staging_buffer_pinned_for_each_request(d: Device) -> Truth:
    """Each request gets a pinned buffer of 24 MiB of its own, is copied out of it, and gives it back."""
    lost = 0
    for request in range(30):
        with d.spent.on(ALLOCATING):
            begin = now()
            at = d.made("cudaHostAlloc", 24 * MiB, 0)
            lost += now() - begin
        ct.memset(at, request, 4096)
        d.copy(d.device, at, 24 * MiB, H2D, d.copies[0])
        d.order(d.compute, d.copies[0], request)
        d.launch(1_000_000)
        d.sync(d.compute)
        with d.spent.on(ALLOCATING):
            begin = now()
            d.check(d.lib.cudaFreeHost(at))
            lost += now() - begin
    return {"allocation_on_hot_path": lost}


@program("allocation_on_hot_path", line=ALLOCATING)
def a_mapped_file_registered_for_each_request(d: Device) -> Truth:
    """48 MiB of a mapping are registered for each request, loaded, and unregistered again."""
    size, lost = 48 * MiB, 0
    mapping = mmap.mmap(-1, size)
    mapping[::4096] = os.urandom(size // 4096)
    at = ct.addressof(ct.c_char.from_buffer(mapping))
    d.spent.restart()
    for request in range(30):
        with d.spent.on(ALLOCATING):
            begin = now()
            d.check(d.lib.cudaHostRegister(at, size, 0))
            lost += now() - begin
        ct.c_uint64.from_address(at).value = request
        d.copy(d.device, at, size, H2D, d.copies[0])
        d.order(d.compute, d.copies[0], request)
        d.launch(1_500_000)
        d.sync(d.compute)
        with d.spent.on(ALLOCATING):
            begin = now()
            d.check(d.lib.cudaHostUnregister(at))
            lost += now() - begin
    return {"allocation_on_hot_path": lost}


@program("allocation_on_hot_path", line=ALLOCATING)
def device_memory_made_and_freed_in_each_step(d: Device) -> Truth:
    """A workspace of 512 MiB is made by cudaMalloc and given back by cudaFree in each step."""
    lost, size = 0, (512 if d.gpu else 8) * MiB
    for _ in range(120):
        with d.spent.on(ALLOCATING):
            begin = now()
            workspace = d.made("cudaMalloc", size)
            lost += now() - begin
        d.launch(400_000)
        d.sync(d.compute)
        with d.spent.on(ALLOCATING):
            begin = now()
            d.check(d.lib.cudaFree(workspace))
            lost += now() - begin
    return {"allocation_on_hot_path": lost}


@contextlib.contextmanager
def one_cpu_shared_with(burners: int) -> Iterator[None]:
    """This thread and so many processes that do nothing but compute share one CPU."""
    before = os.sched_getaffinity(0)
    cpu = max(before)
    loop = f"import os\nos.sched_setaffinity(0, {{{cpu}}})\nwhile True: pass"
    env = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    children = [subprocess.Popen([sys.executable, "-S", "-c", loop], env=env) for _ in range(burners)]
    time.sleep(0.15)
    os.sched_setaffinity(0, {cpu})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
        for child in children:
            child.kill()
            child.wait()


@program("cpu_starved", line=NO_CPU, or_lines=(PYTHON,))
def a_submitting_thread_that_shares_its_cpu(d: Device) -> Truth:
    """Three other processes compute on the one CPU that the submitting thread may use: it waits for its turn."""
    with one_cpu_shared_with(3):
        return {"cpu_starved": steps_off_the_cpu(d, 70)}


def steps_off_the_cpu(d: Device, steps: int) -> int:
    """Steps of 0.9 ms in Python beside a kernel of 1.5 ms: for how many ns of them the thread had no CPU."""
    d.spent.restart()
    busy, begin = time.thread_time_ns(), now()
    for step in range(steps):
        d.launch(1_500_000)
        think_by_cpu(900)
        d.record(step, d.compute)
        d.sync_event(step)
    off = now() - begin - (time.thread_time_ns() - busy)
    d.spent.add(NO_CPU, off)
    d.spent.stop()
    return off


def think_by_cpu(us: float) -> None:
    """As `accounts.think`, by the time that the thread had a CPU."""
    end = time.thread_time_ns() + int(us * 1_000)
    while time.thread_time_ns() < end:
        pass


@program(line=ELSEWHERE, or_lines=(WAITING,), also=("gpu_starved", "synchronisation"))
def a_poller_that_sleeps_too_long(d: Device) -> Truth:
    """Requests are there, but the thread asks every 4 ms whether a step of 2.5 ms is over: the device stands still."""
    begin = now()
    for step in range(90):
        d.launch(2_500_000)
        d.record(step, d.compute)
        while d.lib.cudaEventQuery(d.events[step]):
            time.sleep(0.004)
    d.spent.add(ELSEWHERE, now() - begin - 90 * 2_500_000)
    return {}


@program(line=ELSEWHERE, also=("gpu_starved",))
def a_scheduler_in_another_process(d: Device) -> Truth:
    """Each step asks a scheduler in another process over a pipe, which answers after 1.5 ms; the device waits."""
    answer = "import sys,time\nfor line in sys.stdin:\n time.sleep(0.0015); print(line, end='', flush=True)"
    env = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    child = subprocess.Popen(
        [sys.executable, "-S", "-c", answer], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, env=env
    )
    assert child.stdin and child.stdout
    child.stdin.write(b"0\n")
    child.stdout.readline()
    d.spent.restart()
    for step in range(130):
        with d.spent.on(ELSEWHERE):
            child.stdin.write(f"{step}\n".encode())
            child.stdout.readline()
        d.load(step, 64 * KiB, d.compute)
        d.launch(1_000_000)
        d.sync(d.compute)
    child.stdin.close()
    child.wait()
    d.spent.stop()
    return {}
