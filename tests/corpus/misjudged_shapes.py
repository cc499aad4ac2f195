"""Programs that an early version misjudged: most are over in a fraction of a second, and none fits a signature.

Importing this registers them. The diagnosis was made with their shapes in mind, so they say nothing of what it does
with a program that it never saw; they say that no short, plain trouble is called healthy again.
"""

from __future__ import annotations

import ctypes as ct
import mmap
import os

from accounts import fill, paced, stamp
from device import D2H, H2D, Device, now
from registry import (
    ALLOCATING,
    AT_LINK_RATE,
    COMPUTING,
    NOT_NEEDED,
    PROGRAMS,
    PYTHON,
    SUBMITTING,
    WAITING,
    KiB,
    MiB,
    Program,
    Truth,
    series,
)

misjudged = series("misjudged")


@misjudged(
    line=PYTHON,
    or_lines=(WAITING, SUBMITTING),
    also=("synchronisation", "python_or_gil_bound", "gpu_starved", "small_copies"),
    like=("redundant_loads", "launch_queue_saturation"),
)
def one_small_copy_then_a_wait_three_thousand_times(d: Device) -> Truth:
    """A block of 64 KiB is copied and waited for, then the next one; the CPU makes each block's bytes anew."""
    for block in range(3_000):
        at = block % 512 * 64 * KiB
        ct.c_uint64.from_address(d.host + at).value = block + 1
        d.copy(d.device + at, d.host + at, 64 * KiB, H2D, d.copies[0])
        d.sync(d.copies[0])
    return {}


@misjudged("allocation_on_hot_path", line=ALLOCATING, like=("synchronisation", "first_calls", "pinning_stall"))
def memory_pinned_for_each_of_fourteen_requests(d: Device) -> Truth:
    """65 MB and more are pinned for each request, filled by a store of 1 MiB, and given back."""
    lost = 0
    for request in range(14):
        begin = now()
        buffer = d.made("cudaHostAlloc", (62 + request) * MiB, 0)
        lost += now() - begin
        d.launch(300_000)
        d.order(d.copies[0], d.compute, request)
        d.copy(buffer, d.device, 1 * MiB, D2H, d.copies[0])
        d.sync(d.copies[0])
        begin = now()
        d.check(d.lib.cudaFreeHost(buffer))
        lost += now() - begin
    return {"allocation_on_hot_path": lost}


@misjudged("allocation_on_hot_path", line=ALLOCATING, also=("weights_not_overlapped",), like=("synchronisation",))
def memory_registered_for_each_of_eight_requests(d: Device) -> Truth:
    """96 MB of a mapping are registered for each request, a part is loaded and used, and all are given back."""
    size, lost = 96 * MiB, 0
    mapping = mmap.mmap(-1, size)
    mapping[::4096] = os.urandom(size // 4096)
    at = ct.addressof(ct.c_char.from_buffer(mapping))
    for request in range(8):
        begin = now()
        d.check(d.lib.cudaHostRegister(at, size, 0))
        lost += now() - begin
        ct.c_uint64.from_address(at).value = request
        d.copy(d.device, at, d.bytes_of(600), H2D, d.copies[0])
        d.order(d.compute, d.copies[0], request)
        d.launch(900_000)
        d.sync(d.compute)
        begin = now()
        d.check(d.lib.cudaHostUnregister(at))
        lost += now() - begin
    return {"allocation_on_hot_path": lost}


@misjudged(
    "redundant_loads",
    line=NOT_NEEDED,
    or_lines=(AT_LINK_RATE,),  # by recorders that keep no addresses
    also=("weights_not_overlapped", "link_bound"),
    like=("small_copies",),
)
def seven_of_eight_loads_bring_what_is_there(d: Device) -> Truth:
    """Each request loads eight blocks before its kernel, of which seven hold the bytes that are there already."""
    size, lost = d.bytes_of(60), 0
    for request in range(200):
        for place in range(8):
            at = place * size
            if not place:
                ct.c_uint64.from_address(d.host).value = request + 1
            d.copy(d.device + at, d.host + at, size, H2D, d.copies[0])
        d.order(d.compute, d.copies[0], request)
        d.launch(250_000)
        paced(d, request)
        lost += 7 * 60_000 if request else 0
    return {"redundant_loads": lost}


@misjudged(
    line=COMPUTING,
    also=("small_copies",),  # which cost 1% of the time
    like=("redundant_loads", "synchronisation", "weights_not_overlapped"),
)
def small_inputs_rewritten_in_each_of_a_thousand_steps(d: Device) -> Truth:
    """A step's five small inputs are rewritten by the CPU and copied to the places where the last step's lie."""
    for step in range(1_000):
        for place in range(5):
            at = (step % 4 * 5 + place) * 4 * KiB
            stamp(d, at, 4 * KiB, step * 5 + place)
            d.copy(d.device + place * 4 * KiB, d.host + at, 4 * KiB, H2D, d.compute)
        for _ in range(3):
            d.launch(330_000)
        paced(d, step)
    return {}


@misjudged(
    line=COMPUTING,
    or_lines=(PYTHON, AT_LINK_RATE),
    also=("weights_not_overlapped", "launch_queue_saturation", "python_or_gil_bound"),
    like=("synchronisation",),
)
def a_calm_program_with_two_bursts(d: Device) -> Truth:
    """Kernels run for most of 0.4 s; twice, 1,500 blocks are brought in a burst while the next step waits for them."""
    fill(d)
    d.spent.restart()
    size = d.bytes_of(28)
    for step in range(160):
        if step in (60, 120):
            places = [(d.device + block * size, d.host + block * size) for block in range(min(1_500, d.size // size))]
            d.rapid(places, size, H2D, d.copies[0])
            d.order(d.compute, d.copies[0], step)
        d.launch(2_000_000)
        paced(d, step)
    return {}


@misjudged("failed_calls", line=PYTHON, or_lines=(SUBMITTING,), also=("python_or_gil_bound", "gpu_starved"))
def three_thousand_copies_that_all_fail(d: Device) -> Truth:
    """Every copy is refused, since its destination is no address; a short kernel runs each hundred."""
    refused = 0
    for block in range(3_000):
        refused += d.lib.cudaMemcpyAsync(None, d.host + block * 4 * KiB, 4 * KiB, H2D, d.copies[0]) != 0
        d.lib.cudaGetLastError()
        if not block % 100:
            d.launch(5_000)
    if refused < 3_000:
        raise RuntimeError("an impossible copy was not refused")
    return {"failed_calls": 0}


MISJUDGED: dict[str, Program] = {name: one for name, one in PROGRAMS.items() if one.series == "misjudged"}
