"""Eleventh programs whose device waits for the host: states, buffers, records, a router, counters, a rank, a policy."""

from __future__ import annotations

import ctypes as ct
import json
import logging
import os
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from accounts import Pool, Stretches, stamp, think, turns
from device import D2H, H2D, Device, now
from fresh_copies import clear
from registry import (
    ALLOCATING,
    BELOW_LINK_RATE,
    ELSEWHERE,
    FULL_QUEUE,
    PAGEABLE,
    PYTHON,
    SUBMITTING,
    TIER,
    WAITING,
    KiB,
    MiB,
    Truth,
    blocked,
    eleventh,
    pageable,
)
from seventh_host import quickest
from unseen_copies import same

BLOCKING_SYNC, DISABLE_TIMING = 1, 2
MADE: dict[str, Any] = {}  # before a program begins


class States:
    """Six tensors of states on the device, and plain memory that a trainer keeps a copy of them in.

    Attributes:
        took: ns to save all.
    """

    tensors = 6

    def __init__(self, d: Device) -> None:
        self.d, self.size = d, (8 if d.gpu else 1) * MiB
        self.keep, self.at = pageable(self.tensors * self.size)
        self.took = quickest(self.save)

    def step(self, step: int) -> None:
        """Each tensor has other bytes at its end after a step."""
        for tensor in range(self.tensors):
            end = self.d.device + (tensor + 1) * self.size - 4 * KiB
            clear(self.d, end, (step * self.tensors + tensor) % 251, 4 * KiB, self.d.compute)

    def save(self) -> None:
        """A tensor after the other by cudaMemcpy."""
        for tensor in range(self.tensors):
            at = tensor * self.size
            self.d.check(self.d.lib.cudaMemcpy(self.at + at, self.d.device + at, self.size, D2H))


def make_the_states(d: Device) -> None:
    """The states, and how long it takes to save them."""
    MADE["states"] = States(d)


@eleventh(
    "pageable_memory",
    line=PAGEABLE,
    or_lines=(BELOW_LINK_RATE, WAITING),
    also=(
        *("synchronisation", "gpu_starved", "wasted_stores", "python_or_gil_bound", "unmerged_neighbours"),
        "weights_not_overlapped",
    ),
    like=("redundant_loads", "small_copies", "allocation_on_hot_path", "launch_queue_saturation", "slow_tier"),
    prepare=make_the_states,
)
def states_saved_into_plain_memory_after_each_sixth_step(d: Device) -> Truth:
    """After each sixth step a trainer waits and takes its states, six tensors of 8 MiB, by cudaMemcpy to plain memory.

    How long the six calls take was measured before the program began, and the six steps between compute for as long
    together: nearly half of the time the thread stands in cudaMemcpy, and the device has what the driver copies.
    """
    states, lost, step = MADE.pop("states"), 0, 0
    d.spent.restart()
    for step in turns():
        for _ in range(6):
            d.launch(max(states.took // 6, 20_000))
        states.step(step)
        d.sync(d.compute)
        begin = now()
        states.save()
        lost += now() - begin
    d.spent.add(PAGEABLE, lost)
    d.spent.stop()
    for tensor in range(states.tensors):
        if ct.string_at(states.at + (tensor + 1) * states.size - 64, 64) != bytes([(step * 6 + tensor) % 251]) * 64:
            raise RuntimeError("other states were saved than were computed")
    return {"pageable_memory": lost}


class Buffers:
    """Four threads, each of which pins a buffer for its part of a request and gives it back.

    Attributes:
        took: ns to pin four and to free them.
    """

    parts = 4

    def __init__(self, d: Device) -> None:
        self.d, self.size = d, (8 if d.gpu else 1) * MiB
        self.threads = ThreadPoolExecutor(self.parts)
        self.took = quickest(lambda: self.free(self.pin()))

    def pin(self) -> list[int]:
        """Four buffers, all made at once; where they are."""
        return list(self.threads.map(lambda _: self.d.made("cudaHostAlloc", self.size, 0), range(self.parts)))

    def free(self, buffers: list[int]) -> None:
        """Gives all back, at once."""
        for code in self.threads.map(self.d.lib.cudaFreeHost, buffers):
            self.d.check(code)


def make_the_buffers(d: Device) -> None:
    """The threads, and how long they take for a request's buffers."""
    MADE["buffers"] = Buffers(d)


@eleventh(
    "allocation_on_hot_path",
    line=ALLOCATING,
    or_lines=(ELSEWHERE,),  # the thread that launches waits for its pool, whose threads are in cudaHostAlloc
    also=(
        *("pinning_stall", "context_lock_stall", "gpu_starved", "synchronisation", "python_or_gil_bound"),
        "wasted_stores",
    ),
    like=("pageable_memory", "small_copies", "slow_tier", "launch_queue_saturation", "first_calls", "cpu_starved"),
    prepare=make_the_buffers,
)
def four_threads_that_each_pin_the_buffer_of_their_part_of_a_request(d: Device) -> Truth:
    """For each request four threads of a pool pin 8 MiB each for its outputs, and free them when they were read.

    The server waits for all four before it launches, and the device is done before they free. How long they take was
    measured before, and a request's kernels compute for half of that.
    """
    buffers, lost, request, seen = MADE.pop("buffers"), 0, 0, 0
    d.spent.restart()
    for request in turns():
        begin = now()
        outputs = buffers.pin()
        lost += now() - begin
        for part, at in enumerate(outputs):
            d.launch(max(buffers.took // 8, 20_000))
            clear(d, d.device + part * buffers.size, (request + part) % 251, 64 * KiB, d.compute)
            d.copy(at, d.device + part * buffers.size, 64 * KiB, D2H, d.compute)
        d.sync(d.compute)
        seen += all(ct.string_at(at, 64) == bytes([(request + i) % 251]) * 64 for i, at in enumerate(outputs))
        begin = now()
        buffers.free(outputs)
        lost += now() - begin
    d.spent.add(ALLOCATING, lost)
    d.spent.stop()
    buffers.threads.shutdown()
    if seen != request + 1:
        raise RuntimeError("a buffer has other outputs than were computed")
    return {"allocation_on_hot_path": lost}


@eleventh(
    line=PYTHON,
    or_lines=(ELSEWHERE,),  # a recorder of calls alone sees a thread outside of CUDA
    also=("synchronisation", "gpu_starved", "python_or_gil_bound", "wasted_stores"),
    like=("small_copies", "pageable_memory", "slow_tier", "cpu_starved", "launch_queue_saturation"),
)
def a_record_logged_for_each_sequence_before_the_next_step(d: Device) -> Truth:
    """The thread spins on the event of a step of 0.7 ms, then logs a record in JSON for each sequence, for 1.4 ms.

    The records go through Python's `logging` to /dev/null, and the next step is launched when all are written. How many
    take 1.4 ms is measured first, in a hundredth of the time. Nothing is on the device meanwhile.
    """
    idle, step, back = Stretches(d), 0, d.size - 4 * KiB
    log = logging.Logger("tokens")
    with Path(os.devnull).open("w") as sink:
        handler = logging.StreamHandler(sink)
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s:%(lineno)d %(message)s"))
        log.addHandler(handler)

        def write(step: int, sequences: int) -> None:
            for sequence in range(sequences):
                said = {"step": step, "sequence": sequence, "token": step * 31 % 32_000, "logprob": -0.25 * sequence}
                log.info("%s", json.dumps(said))

        sequences = max(20 * 1_400_000 // quickest(lambda: write(0, 20)), 1)
        d.spent.restart()
        for step in turns():
            idle.end()
            ids = step % 8 * 4 * KiB
            stamp(d, ids, 4 * KiB, step)
            d.copy(d.device, d.host + ids, 4 * KiB, H2D, d.compute)
            d.launch(350_000)
            d.launch(350_000)
            d.copy(d.host + back, d.device, 512, D2H, d.compute)
            idle.begin()
            d.record(step % 32, d.compute)
            while d.lib.cudaEventQuery(d.events[step % 32]):
                think(4)
            idle.read()
            write(step, sequences)
    d.spent.add(PYTHON, idle.ns)
    d.spent.stop()
    if ct.string_at(d.host + back, 512) != ct.string_at(d.host + step % 8 * 4 * KiB, 512):
        raise RuntimeError("the last token is not what went in")
    return {}


@eleventh(
    line=WAITING,
    or_lines=(SUBMITTING, PYTHON),  # between two layers the thread wakes, looks at a number and launches
    also=("synchronisation", "gpu_starved", "python_or_gil_bound", "wasted_stores"),
    like=("pageable_memory", "launch_queue_saturation", "cpu_starved", "allocation_on_hot_path", "redundant_loads"),
)
def a_router_s_choice_awaited_by_an_event_that_puts_the_thread_to_sleep(d: Device) -> Truth:
    """A layer's router of 8 us is waited for, then the experts it chose are launched, 12 us, and the next router.

    The event is one of cudaEventBlockingSync, so the thread sleeps in the call until an interrupt wakes it. To wake,
    to look at the choice and to give the device its kernels, a memset, a copy and the event takes longer than the 20 us
    that both compute.
    """
    chosen, layer, right, back = d.made("cudaEventCreateWithFlags", BLOCKING_SYNC | DISABLE_TIMING), 0, 0, d.size - 64
    d.spent.restart()
    for layer in turns():
        d.launch(8_000)
        clear(d, d.device + back, layer % 251, 64, d.compute)
        d.copy(d.host + back, d.device + back, 64, D2H, d.compute)
        d.check(d.lib.cudaEventRecord(chosen, d.compute))
        d.check(d.lib.cudaEventSynchronize(chosen))
        choice = ct.string_at(d.host + back, 64)
        right += choice[0] == choice[-1] == layer % 251
        d.launch(6_000)
        d.launch(6_000)
    d.sync(d.compute)
    d.spent.stop()
    d.spent.add(WAITING, d.spent.end - d.spent.begin - (d.kernel_ns - d.spent.kernel_ns))
    d.check(d.lib.cudaEventDestroy(chosen))
    if right != layer + 1:
        raise RuntimeError("a router's choice is another than was computed")
    return {}


@eleventh(
    line=SUBMITTING,
    or_lines=(PYTHON,),  # the calls are made one by one out of Python
    also=("gpu_starved", "synchronisation", "python_or_gil_bound", "wasted_stores"),
    like=("small_copies", "pageable_memory", "launch_queue_saturation", "cpu_starved", "allocation_on_hot_path"),
)
def a_counter_cleared_by_a_call_of_its_own_before_each_small_kernel(d: Device) -> Truth:
    """Behind a step's 0.25 ms of attention, read back, 160 small kernels of 1 us each have a counter cleared first.

    A memset of 256 bytes, a launch and an event for each: three calls out of Python, above 8 us in all, for 1 us of
    kernel and 2 us or so of memset. The device is done with each pair before it has the next.
    """
    kernels, back, lost, step = 160, d.size - 4 * KiB, 0, 0
    for step in turns():
        clear(d, d.device + back, step % 251, 512, d.compute)
        d.launch(250_000)
        d.copy(d.host + back, d.device + back, 512, D2H, d.compute)
        d.sync(d.compute)
        begin = now()
        for i in range(kernels):
            clear(d, d.device + i * 256, 0, 256, d.compute)
            d.launch(1_000)
            d.record(i % 64, d.compute)
        lost += max(now() - begin - kernels * (1_000 + 2_000), 0)
    d.sync(d.compute)
    d.spent.add(SUBMITTING, lost)
    d.spent.stop()
    if ct.string_at(d.host + back, 512) != bytes([step % 251]) * 512:
        raise RuntimeError("the attention read back is another than was computed")
    d.copy(d.host, d.device, kernels * 256, D2H, d.compute)
    d.sync(d.compute)
    if ct.string_at(d.host, kernels * 256) != bytes(kernels * 256):
        raise RuntimeError("a counter was not cleared")
    return {}


OTHER_RANK = """
import socket, sys, time
with socket.socket(fileno=int(sys.argv[1])) as peer:
    while flag := peer.recv(1):
        time.sleep(0.0018)  # its own step, which begins when ours does
        peer.sendall(flag)
"""


class OtherRank:
    """A rank in a process of its own, whose steps take 1.8 ms and more."""

    def __init__(self) -> None:
        self.flags, theirs = socket.socketpair()
        env = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
        command = [sys.executable, "-S", "-c", OTHER_RANK, str(theirs.fileno())]
        self.child = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=env)
        theirs.close()
        for _ in range(2):
            self.begin(1)
            self.joined()

    def begin(self, flag: int) -> None:
        """Tells it that a step begins."""
        self.flags.sendall(bytes([flag]))

    def joined(self) -> int:
        """Waits until its step is over, too; its flag."""
        return self.flags.recv(1)[0]

    def end(self) -> None:
        """Lets the process end."""
        self.flags.close()
        self.child.wait()


def make_the_other_rank(_: Device) -> None:
    """Starts it."""
    MADE["rank"] = OtherRank()


@eleventh(
    line=ELSEWHERE,
    or_lines=(TIER, PYTHON),  # it waits in `recv` of a socket; of calls alone, it is outside of CUDA
    also=("gpu_starved", "synchronisation", "python_or_gil_bound", "slow_tier", "wasted_stores"),
    like=("small_copies", "pageable_memory", "cpu_starved", "launch_queue_saturation", "redundant_loads"),
    prepare=make_the_other_rank,
)
def a_flag_exchanged_with_a_slower_rank_in_another_process_after_each_step(d: Device) -> Truth:
    """Two data-parallel ranks begin each step together and exchange a flag by a socket when both are through with it.

    The other rank has a process of its own, whose step takes 1.8 ms and more; ours takes 0.8 ms, and then the thread
    waits in `recv` with nothing on the device, for 1 ms or more of each 1.9 ms.
    """
    rank, step, right, back = MADE.pop("rank"), 0, 0, d.size - 4 * KiB
    d.spent.restart()
    for step in turns():
        rank.begin(step % 250 + 1)
        clear(d, d.device + back, step % 251, 512, d.compute)
        d.launch(800_000)
        d.copy(d.host + back, d.device + back, 512, D2H, d.compute)
        d.sync(d.compute)
        with d.spent.on(ELSEWHERE):
            right += rank.joined() == step % 250 + 1
    d.spent.stop()
    rank.end()
    if right != step + 1 or ct.string_at(d.host + back, 512) != bytes([step % 251]) * 512:
        raise RuntimeError("a flag or a token is another than was sent")
    return {}


@eleventh(
    "launch_queue_saturation",
    line=FULL_QUEUE,
    also=("link_bound", "gpu_starved", "synchronisation", "unmerged_neighbours", "python_or_gil_bound"),
    like=("small_copies", "allocation_on_hot_path", "slow_tier", "cpu_starved", "redundant_loads", "wasted_stores"),
)
def a_new_policy_s_tensors_all_sent_by_the_thread_that_decodes(d: Device) -> Truth:
    """Between rollouts the thread that decodes sends the next policy: 2,800 tensors on one side stream.

    A tensor takes the link 40 us and its call 4 to 8 us, and a stream takes a thousand: the loop is held for 55 ms or
    more of its 72, with nothing on the device but copies. Then come 45 steps of 1 ms, in which the rest arrives. They
    compute with the policy that was sent before, which has long come: no kernel waits for a copy.
    """
    pool, tensors, stream = Pool(d, d.bytes_of(40)), 2_800, d.copies[12]
    homes, lost, policy, last = 40, 0, 0, (0, 0)
    for policy in turns():
        half, durations = policy % 2, list[int]()
        d.check(d.lib.cudaStreamWaitEvent(stream, d.events[64 + half], 0))  # its last rollout is over
        for i in range(tensors):
            home = half * homes + (policy + i) % homes
            last = half * (homes // 2) + i % (homes // 2), home
            durations.append(pool.fetch(*last, stream))
        d.record(half, stream)
        lost += sum(blocked(durations))
        if policy:
            d.check(d.lib.cudaStreamWaitEvent(d.compute, d.events[1 - half], 0))
        for step in range(45):
            d.launch(1_000_000)
            d.record(128 + step, d.compute)
            if step:
                d.sync_event(128 + step - 1)
        d.record(64 + 1 - half, d.compute)
        d.sync(d.compute)
    d.sync(stream)
    d.spent.add(FULL_QUEUE, lost)
    d.spent.stop()
    same(d, d.device + last[0] * pool.size, d.host + last[1] * pool.size, pool.size)
    return {"launch_queue_saturation": lost}
