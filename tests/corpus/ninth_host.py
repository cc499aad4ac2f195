"""Ninth programs whose device waits for the host: a segment, pinning, launches, the CPU, a timer, Python, files."""

from __future__ import annotations

import copy
import ctypes as ct
import mmap
import os
import random
import tempfile
from pathlib import Path
from typing import Any

from accounts import Stretches, decoded, stamp, turns
from device import D2H, H2D, Device, Dim3, now
from fresh_copies import clear
from other_shapes import gate
from registry import (
    ALLOCATING,
    BELOW_LINK_RATE,
    ELSEWHERE,
    PAGEABLE,
    PYTHON,
    SUBMITTING,
    TIER,
    WAITING,
    KiB,
    MiB,
    Truth,
    ninth,
)
from seventh_host import quickest
from unseen_copies import same

MADE: dict[str, Any] = {}  # before a program begins


class Segment:
    """Memory that processes share by a file descriptor and nobody registered: the features of 24 images.

    Attributes:
        at: its address; size: of an image's features, bytes; each: images of a step; took: ns of a step's copies.
    """

    images, each = 24, 8

    def __init__(self, d: Device) -> None:
        self.d, self.size = d, (2 if d.gpu else 1) * MiB
        file = os.memfd_create("features")
        os.ftruncate(file, self.images * self.size)
        self.mapping = mmap.mmap(file, self.images * self.size)
        os.close(file)
        self.at = ct.addressof(ct.c_char.from_buffer(self.mapping))
        for image in range(self.images):
            ct.memmove(self.at + image * self.size, random.Random(900 + image).randbytes(self.size), self.size)
        self.step = 0
        self.took = quickest(self.bring)

    def bring(self) -> None:
        """The next images' features to the GPU; each call copies out of plain memory."""
        for i in range(self.each):
            image = (self.step * self.each + i) % self.images
            self.d.copy(self.d.device + i * self.size, self.at + image * self.size, self.size, H2D, self.d.compute)
        self.d.sync(self.d.compute)
        self.step += 1


def make_the_segment(d: Device) -> None:
    MADE["segment"] = Segment(d)


@ninth(
    "pageable_memory",
    line=PAGEABLE,
    or_lines=(BELOW_LINK_RATE, WAITING),
    also=("synchronisation", "gpu_starved", "weights_not_overlapped", "python_or_gil_bound", "unmerged_neighbours"),
    like=("redundant_loads", "small_copies", "allocation_on_hot_path", "launch_queue_saturation", "slow_tier"),
    prepare=make_the_segment,
)
def features_copied_out_of_a_segment_that_processes_share(d: Device) -> Truth:
    """Before each step eight images' features, 2 MiB each, go to the GPU out of shared memory that is not registered.

    The thread waits for them, and launches the step's kernels, which take as long as the copies did before the program
    began. Half of the time is that of calls in which the driver reads plain memory.
    """
    segment, lost, step = MADE.pop("segment"), 0, 0
    d.spent.restart()
    for step in turns():
        stamp(d, step % 8 * 4 * KiB, 4 * KiB, step)
        begin = now()
        segment.bring()
        lost += now() - begin
        d.copy(d.device + d.size // 2, d.host + step % 8 * 4 * KiB, 4 * KiB, H2D, d.compute)
        for _ in range(2):
            d.launch(segment.took // 2)
        d.sync(d.compute)
    d.spent.add(PAGEABLE, lost)
    d.spent.stop()
    image = (segment.step * 8 - 1) % segment.images
    same(d, d.device + 7 * segment.size, segment.at + image * segment.size, segment.size)
    same(d, d.device + d.size // 2, d.host + step % 8 * 4 * KiB, 4 * KiB)
    return {"pageable_memory": lost}


class Landing:
    """A buffer that the driver's own call pins for one transfer.

    Attributes:
        size: bytes; took: ns to pin it and to give it back.
    """

    def __init__(self, d: Device) -> None:
        self.lib, self.check, self.size = ct.CDLL("libcuda.so.1") if d.gpu else d.lib, d.check, 16 * MiB
        self.lib.cuMemHostAlloc.argtypes = [ct.c_void_p, ct.c_size_t, ct.c_uint]
        self.lib.cuMemFreeHost.argtypes = [ct.c_void_p]
        self.took = quickest(lambda: self.give_back(self.take()))

    def take(self) -> int:
        at = ct.c_void_p()
        self.check(self.lib.cuMemHostAlloc(ct.byref(at), self.size, 0))
        return int(at.value or 0)

    def give_back(self, at: int) -> None:
        self.check(self.lib.cuMemFreeHost(at))


def make_the_landing(d: Device) -> None:
    MADE["landing"] = Landing(d)


@ninth(
    "allocation_on_hot_path",
    line=ALLOCATING,
    also=("gpu_starved", "synchronisation", "context_lock_stall", "weights_not_overlapped"),
    like=("pageable_memory", "small_copies", "slow_tier", "launch_queue_saturation", "first_calls", "cpu_starved"),
    prepare=make_the_landing,
    blind=("kineto",),  # the PyTorch profiler keeps few of the driver's calls
    undecided_in=("kineto",),
)
def a_landing_buffer_pinned_by_the_driver_s_call_for_each_transfer(d: Device) -> Truth:
    """For each request's KV 16 MiB are pinned by cuMemHostAlloc, loaded once its first bytes are there, and freed.

    The step before was waited for, so no kernel runs. How long it takes to pin and to free was measured before the
    program began, and a request computes for half of that.
    """
    landing, lost, request = MADE.pop("landing"), 0, 0
    part = 2 * MiB
    d.spent.restart()
    for request in turns():
        begin = now()
        at = landing.take()
        lost += now() - begin
        ct.memmove(at, d.host + request % 16 * part, part)
        d.copy(d.device, at, part, H2D, d.compute)
        d.launch(max(landing.took // 2, 20_000))
        d.sync(d.compute)
        begin = now()
        landing.give_back(at)
        lost += now() - begin
    d.spent.add(ALLOCATING, lost)
    d.spent.stop()
    same(d, d.device, d.host + request % 16 * part, part)
    return {"allocation_on_hot_path": lost}


class LaunchConfig(ct.Structure):
    _fields_ = [
        ("grid", Dim3),
        ("block", Dim3),
        ("shared", ct.c_size_t),
        ("stream", ct.c_void_p),
        ("attributes", ct.c_void_p),
        ("count", ct.c_uint),
    ]


@ninth(
    line=SUBMITTING,
    or_lines=(PYTHON,),  # the launcher packs what it gives to the call in Python
    also=("gpu_starved", "synchronisation", "python_or_gil_bound", "wasted_stores"),
    like=("small_copies", "pageable_memory", "launch_queue_saturation", "cpu_starved", "allocation_on_hot_path"),
)
def a_small_kernel_for_each_sequence_by_a_launcher_in_python(d: Device) -> Truth:
    """A step is 200 kernels of 2 us, one for each layer's sequence, each by cudaLaunchKernelExC out of Python.

    As a compiler's launcher does, Python packs a configuration, ten arguments and their addresses for each launch,
    above 5 us. The device is done with a kernel before it has the next, and the thread waits for each step's token.
    """
    kernels, each, lost, step = 200, 2_000, 0, 0
    back = d.size - 4 * KiB
    launch = d.lib.cudaLaunchKernelExC
    launch.argtypes = [ct.c_void_p] * 3

    def launched(sequence: int) -> int:
        d.kernel_ns += each
        numbers = [ct.c_uint64(each), *(ct.c_uint64(sequence * 64 + i) for i in range(9))]
        arguments = (ct.c_void_p * 10)(*(ct.addressof(number) for number in numbers))
        config = LaunchConfig(Dim3(1, 1, 1), Dim3(1, 1, 1), 0, d.compute, None, 0)
        return int(launch(ct.byref(config), d.kernel, arguments))

    for step in turns():
        begin = now()
        clear(d, d.device + back, step % 251, 512, d.compute)
        for sequence in range(kernels):
            d.check(launched(sequence))
        d.copy(d.host + back, d.device + back, 512, D2H, d.compute)
        lost += max(now() - begin - kernels * each, 0)
        d.sync(d.compute)
    d.spent.add(SUBMITTING, lost)
    d.spent.stop()
    if ct.string_at(d.host + back, 512) != bytes([step % 251]) * 512:
        raise RuntimeError("the token is another one than was computed")
    return {}


def was_given(d: Device, layer: int, size: int) -> None:
    """The CPU had the newest layer's input, of `size` bytes in one of four places, and its output is on the device."""
    same(d, d.device + size, d.host + layer % 4 * size, size)
    if ct.string_at(d.host + layer % 4 * size, 64) != bytes([layer % 251]) * 64:
        raise RuntimeError("the CPU was given another input than was computed")


@ninth(
    line=ELSEWHERE,  # in a function of the host that stands in the stream
    or_lines=(WAITING,),
    also=("synchronisation", "gpu_starved", "python_or_gil_bound"),
    like=("fence_before_copies", "launch_queue_saturation", "small_copies", "pageable_memory", "cpu_starved"),
)
def cold_experts_computed_by_the_cpu_in_a_function_of_a_side_stream(d: Device) -> Truth:
    """A layer's cold experts run on the CPU, in a function of a side stream for 1 ms; its hot ones take the GPU 0.3 ms.

    The function stands between the copies of its input and its result, and begins when the router's 0.1 ms are over;
    the next layer waits for the result. So 0.7 ms of each 1.1 ms the GPU has nothing that may run, but for two copies
    of 0.005 ms. The thread submits layers one ahead.
    """
    size, side, waits, layer = 256 * KiB, d.copies[5], Stretches(d), 0
    for layer in turns():
        home, event = d.host + layer % 4 * size, layer % 16 * 2
        clear(d, d.device, layer % 251, size, d.compute)
        d.launch(100_000)
        d.order(side, d.compute, event)
        d.copy(home, d.device, size, D2H, side)
        gate(d, 1_000, side)
        d.copy(d.device + size, home, size, H2D, side)
        d.launch(300_000)
        waits.begin()
        d.order(d.compute, side, event + 1)
        waits.end()
        d.record(128 + layer % 64, d.compute)
        if layer:
            d.sync_event(128 + (layer - 1) % 64)
            waits.read(1)
    d.sync(d.compute)
    d.spent.add(ELSEWHERE, waits.read())
    d.spent.stop()
    was_given(d, layer, size)
    return {}


@ninth(
    line=WAITING,
    or_lines=(SUBMITTING, PYTHON),  # between two kernels the thread wakes, looks at the time and launches
    also=("synchronisation", "gpu_starved", "python_or_gil_bound", "wasted_stores"),
    like=("small_copies", "pageable_memory", "launch_queue_saturation", "cpu_starved", "allocation_on_hot_path"),
)
def a_timer_left_on_that_waits_for_each_kernel_s_end(d: Device) -> Truth:
    """Each of a step's 100 kernels of 12 us stands between two timing events, and the thread waits for the second.

    It asks for the time between them before it launches the next kernel. To wake, to ask, and to give the device two
    events and a kernel takes above 12 us, in which the device has nothing.
    """
    kernels, times, step, back = 100, 0, 0, d.size - 4 * KiB
    d.spent.restart()
    for step in turns():
        clear(d, d.device + back, step % 251, 512, d.compute)
        for _ in range(kernels):
            begin = d.mark(d.compute)
            d.launch(12_000)
            end = d.mark(d.compute)
            d.check(d.lib.cudaEventSynchronize(end))
            times += d.between(begin, end)
        d.copy(d.host + back, d.device + back, 512, D2H, d.compute)
        d.sync(d.compute)
    d.spent.stop()
    d.spent.add(WAITING, d.spent.end - d.spent.begin - (d.kernel_ns - d.spent.kernel_ns))
    if ct.string_at(d.host + back, 512) != bytes([step % 251]) * 512 or times < (step + 1) * kernels * 10_000:
        raise RuntimeError("the token or the time is another one than was to be")
    return {}


def follows(prompt: list[int], of_last: int, count: int) -> list[int]:
    """What followed the last time that the end of a prompt stood in it: guesses for what follows now."""
    end = prompt[-of_last:]
    for at in range(len(prompt) - of_last - 1, -1, -1):
        if prompt[at : at + of_last] == end:
            return prompt[at + of_last : at + of_last + count]
    return []


@ninth(
    line=PYTHON,
    or_lines=(ELSEWHERE,),  # a recorder of calls alone sees a thread outside of CUDA
    also=("synchronisation", "gpu_starved", "python_or_gil_bound", "wasted_stores"),
    like=("small_copies", "pageable_memory", "redundant_loads", "cpu_starved", "launch_queue_saturation"),
)
def guesses_looked_up_in_the_prompts_before_each_verification(d: Device) -> Truth:
    """Before each verification of 0.8 ms Python looks for where the ends of the prompts stood before, for 1.6 ms.

    The thread has waited for the tokens, so nothing is on the device meanwhile. How many prompts of 500 tokens that
    takes is measured first, in a hundredth of the time; each has its end at its beginning as well.
    """
    idle, step = Stretches(d), 0
    tokens = random.Random(7).sample(range(32_000), 500)
    some = [[*tokens, *tokens[:3]] for _ in range(8)]
    took = quickest(lambda: [follows(prompt, 3, 5) for prompt in some])
    prompts = [[*tokens, *tokens[:3]] for _ in range(max(8 * 1_600_000 // took, 1))]
    guesses: list[list[int]] = []
    d.spent.restart()
    for step in turns():
        decoded(d, step, idle, 2, 400_000)
        guesses = [follows(prompt, 3, 5) for prompt in prompts]
    d.spent.add(PYTHON, idle.ns)
    d.spent.stop()
    if any(guess != tokens[3:8] for guess in guesses):
        raise RuntimeError("other tokens were guessed than followed before")
    same(d, d.device, d.host + step % 8 * 4 * KiB, 4 * KiB)
    return {}


@ninth(
    line=PYTHON,
    or_lines=(ELSEWHERE,),  # a recorder of calls alone sees a thread outside of CUDA
    also=("synchronisation", "gpu_starved", "python_or_gil_bound", "wasted_stores"),
    like=("small_copies", "pageable_memory", "allocation_on_hot_path", "cpu_starved", "slow_tier"),
)
def a_batch_s_state_copied_deep_before_each_step(d: Device) -> Truth:
    """The scheduler hands a deep copy of its requests' state to each step of 0.9 ms, which takes Python 1.8 ms.

    The thread has waited for the tokens and launches the next step when it has the copy; nothing is on the device
    meanwhile. How many requests that takes is measured first, in a hundredth of the time.
    """
    idle, step = Stretches(d), 0

    def requests(count: int) -> dict[int, dict[str, Any]]:
        return {one: {"blocks": [one * 64 + i for i in range(40)], "stop": {"eos": [2, one]}} for one in range(count)}

    some = requests(16)
    took = quickest(lambda: copy.deepcopy(some))
    state = requests(max(16 * 1_800_000 // took, 1))
    handed: dict[int, dict[str, Any]] = {}
    d.spent.restart()
    for step in turns():
        decoded(d, step, idle, 3, 300_000)
        state[0]["blocks"][0] = step
        handed = copy.deepcopy(state)
    d.spent.add(PYTHON, idle.ns)
    d.spent.stop()
    if handed != state or handed[0]["blocks"] is state[0]["blocks"]:
        raise RuntimeError("what was handed over is no copy of the state")
    same(d, d.device, d.host + step % 8 * 4 * KiB, 4 * KiB)
    return {}


class BlockFiles:
    """Blocks of a cache below memory, a file each; their bytes are known by their numbers.

    Attributes:
        size: of a block, bytes; count: of blocks.
    """

    def __init__(self, size: int, count: int) -> None:
        self.size, self.count, self.folder = size, count, tempfile.TemporaryDirectory()
        self.paths = [Path(self.folder.name) / f"block-{number}" for number in range(count)]
        for number, path in enumerate(self.paths):
            path.write_bytes(self.of(number))

    def of(self, number: int) -> bytes:
        return random.Random(700 + number).randbytes(self.size)

    def read(self, number: int, view: memoryview) -> None:
        """A block into pinned memory: its file is opened, read and closed."""
        file = os.open(self.paths[number % self.count], os.O_RDONLY)
        done = 0
        while done < self.size:
            done += os.preadv(file, [view[done : self.size]], done)
        os.close(file)


def make_the_block_files(d: Device) -> None:
    """48 files, and how long sixteen take to be read into the pinned pool."""
    files = BlockFiles(1 * MiB, 48)
    MADE["files"] = files, quickest(lambda: read_all(d, files, 0))


def read_all(d: Device, files: BlockFiles, first: int) -> None:
    view = memoryview((ct.c_char * (16 * files.size)).from_address(d.host)).cast("B")
    for i in range(16):
        files.read(first + i, view[i * files.size :])


@ninth(
    line=TIER,
    also=("slow_tier", "gpu_starved", "synchronisation", "python_or_gil_bound", "weights_not_overlapped"),
    like=("cpu_starved", "pageable_memory", "small_copies", "launch_queue_saturation", "redundant_loads"),
    prepare=make_the_block_files,
    forms=("run",),  # the other recorders keep no reads of files
)
def blocks_of_a_prefix_each_read_out_of_a_file_of_its_own(d: Device) -> Truth:
    """Before each prefill sixteen blocks of 1 MiB are read into pinned memory, out of sixteen files.

    The thread that launches the prefill opens, reads and closes the files; the prefill before is over. How long that
    takes was measured before the program began, and a prefill computes for as long. An eighth of each block, which is
    this rank's part, is loaded then in 0.05 ms or so.
    """
    (files, took), lost, prefill = MADE.pop("files"), 0, 0
    part = files.size // 8
    d.spent.restart()
    for prefill in turns():
        begin = now()
        read_all(d, files, prefill * 16)
        lost += now() - begin
        for i in range(16):
            at = i * files.size
            d.copy(d.device + at, d.host + at, part, H2D, d.compute)
        for _ in range(2):
            d.launch(took // 2)
        d.sync(d.compute)
    d.spent.add(TIER, lost)
    d.spent.stop()
    last = (prefill * 16 + 15) % 48
    if ct.string_at(d.host + 15 * files.size, files.size) != files.of(last):
        raise RuntimeError("a block has other bytes than its file")
    same(d, d.device + 15 * files.size, d.host + 15 * files.size, part)
    files.folder.cleanup()
    return {}
