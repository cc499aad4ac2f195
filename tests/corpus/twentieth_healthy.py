"""Twentieth programs that are healthy: workers, layers, hashes, a moderator, memory files, two tenants, ragged rows."""

from __future__ import annotations

import ctypes as ct
import mmap
import os
import socket
import subprocess
import sys
import threading
from typing import Any

from accounts import Pool, paced, stamp, turns
from device import D2H, H2D, NON_BLOCKING, Device, now
from eighth_healthy import plain_only
from fresh_copies import clear
from ninth_healthy import token, told
from registry import COMPUTING, DEVICE, NOTHING_TO_DO, KiB, Truth, in_thread, twentieth
from twentieth_copies import Ragged, Uneven, Workers
from twentieth_host import Index, Moderator
from unseen_copies import same

MADE: dict[str, Any] = {}  # before a program begins


@twentieth(
    line=COMPUTING,
    like=("weights_not_overlapped", "link_bound", "synchronisation", "gpu_starved", "redundant_loads"),
    also=("unmerged_neighbours",),
)
def documents_of_three_embedding_workers_whose_batches_compute_far_longer_than_they_come(d: Device) -> Truth:
    """Three threads embed documents on a stream each; a batch comes in 0.45 ms and then computes for 6 ms.

    A worker's stream is without a kernel for 0.45 ms of each 6.45 ms, while its copy comes, and the two others compute
    meanwhile: all three ask at once only at the beginning, and the link brings their documents one after another and so
    sets them apart. The kernels together are nearly three windows. A worker has a batch more on its stream than the one
    that it waits for.
    """
    workers = Workers(d, 450, 3, 2_000_000)
    if workers.kept % workers.count == 0:
        workers.kept -= 1
    workers.run()
    workers.check()
    return {}


@twentieth(
    line=COMPUTING,
    like=("weights_not_overlapped", "link_bound", "synchronisation", "redundant_loads", "load_not_ordered"),
    also=("unmerged_neighbours",),
)
def layers_of_two_sizes_prefetched_so_far_ahead_that_each_large_one_is_there(d: Device) -> Truth:
    """Each second layer takes the link 0.6 ms and those between 0.05 ms, and every layer computes for 2.5 ms.

    A large layer has the one slot of its kind, so it comes when the last large one is over, beside the small one that
    follows: it is there four times as soon as it must be. A small one comes beside a large one. Layers are submitted
    two ahead, so no kernel waits for a copy, though an event stands before each.
    """
    layers, loads, layer = Uneven(d, 50, 600), d.copies[5], 0
    for layer in (0, 1):
        layers.bring(layer, loads)
    d.sync(loads)
    d.spent.restart()
    for layer in turns():
        d.check(d.lib.cudaStreamWaitEvent(d.compute, d.events[layer % 32], 0))
        for _ in range(2):
            d.launch(1_250_000)
        d.record(32 + layer % 32, d.compute)
        layers.bring(layer + 2, loads)
        paced(d, layer, 2)
    d.sync(d.compute)
    d.spent.stop()
    d.sync(loads)
    for last in (layer + 1, layer + 2):
        layers.check(last)
    return {}


def make_the_index(_: Device) -> None:
    """The index, and how long a look-up takes."""
    MADE["index"] = Index()


@twentieth(
    line=COMPUTING,
    like=("python_or_gil_bound", "gpu_starved", "synchronisation", "small_copies", "cpu_starved"),
    also=("wasted_stores",),
    prepare=make_the_index,
)
def hashes_of_all_blocks_of_waiting_prompts_chained_while_two_steps_are_on_the_device(d: Device) -> Truth:
    """Between two launches the blocks of all waiting prompts are hashed in Python and looked up, for 1.6 ms.

    A step takes 6 ms and the thread waits for the one before the last, so when it begins to hash there are two steps
    on the device, 12 ms or nearly that, and it is done long before they are.
    """
    index, step, at, lasted = MADE.pop("index"), 0, 0, list[int]()
    prompts = index.looked_up_in(1_600)
    index.hits = 0
    d.spent.restart()
    for step in turns():
        ids = step % 8 * 4 * KiB
        stamp(d, ids, 4 * KiB, step)
        d.copy(d.device, d.host + ids, 4 * KiB, H2D, d.compute)
        for _ in range(3):
            d.launch(2_000_000)
        at = token(d, step)
        paced(d, step, 2)
        begin = now()
        index.look_up(step * prompts, prompts)
        lasted.append(now() - begin)
    d.sync(d.compute)
    d.spent.stop()
    told(at, step)
    if index.hits != (step + 1) * prompts * (index.blocks // 2):
        raise RuntimeError("half of the blocks were to be found")
    same(d, d.device, d.host + step % 8 * 4 * KiB, 4 * KiB)
    plain_only(d, sorted(lasted)[-2] < 9_000_000, f"to look up a step's prompts took {sorted(lasted)[-2]} ns")
    return {}


def make_the_moderator(_: Device) -> None:
    """Starts it."""
    MADE["moderator"] = Moderator()


@twentieth(
    line=COMPUTING,
    like=("python_or_gil_bound", "gpu_starved", "synchronisation", "slow_tier", "cpu_starved"),
    also=("wasted_stores",),
    prepare=make_the_moderator,
)
def a_moderator_process_whose_verdict_on_an_older_step_a_scheduler_spins_for(d: Device) -> Truth:
    """A scheduler spins on a socket for another process's verdict, 1.6 ms, on the step before the last.

    Two steps of 6 ms are on the device when it asks, and it launches the next one when the verdict is there: there are
    10 ms of kernels or so left then. So it spins for a fourth of the time, and the device never waits for it.
    """
    moderator, step, at = MADE.pop("moderator"), 0, 0
    d.spent.restart()
    for step in turns():
        for _ in range(3):
            d.launch(2_000_000)
        at = token(d, step)
        paced(d, step, 2)
        if step >= 2:
            moderator.ask(step - 2)
            moderator.answered(step - 2)
    d.sync(d.compute)
    d.spent.stop()
    told(at, step)
    moderator.stop()
    if moderator.asked < step:
        raise RuntimeError("a verdict was there before anybody asked")
    return {}


FRONTEND = """
import os, socket, sys, time
way, count = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
way.recv(1)
due = time.monotonic()
for number in range(count):
    due += 0.066
    time.sleep(max(due - time.monotonic(), 0))
    prompt = os.memfd_create("prompt")
    os.write(prompt, number.to_bytes(4, "little") * 1_024)
    socket.send_fds(way, [b"%d" % number], [prompt])
    os.close(prompt)
"""


class Frontend:
    """A process that sends a descriptor of a memory file with a prompt, 66 ms after the one before, so many times."""

    count = 23

    def __init__(self) -> None:
        self.way, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        env = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
        command = [sys.executable, "-S", "-c", FRONTEND, str(theirs.fileno()), str(self.count)]
        self.child = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=env)
        theirs.close()

    def next(self) -> bytes:
        """Waits for the next prompt."""
        _, prompts, _, _ = socket.recv_fds(self.way, 64, 1)
        with mmap.mmap(prompts[0], 4 * KiB) as prompt:
            text = prompt[:]
        os.close(prompts[0])
        return text

    def end(self) -> None:
        """Waits until the process has ended."""
        self.child.wait()
        self.way.close()


def make_the_frontend(_: Device) -> None:
    """Starts it."""
    MADE["frontend"] = Frontend()


@twentieth(
    line=NOTHING_TO_DO,
    like=("slow_tier", "gpu_starved", "synchronisation", "python_or_gil_bound", "launch_queue_saturation"),
    also=("wasted_stores",),
    prepare=make_the_frontend,
    undecided_in=DEVICE,  # their recordings hold CUDA's calls alone
)
def prompts_in_memory_files_whose_descriptors_a_frontend_sends_sixty_six_milliseconds_apart(d: Device) -> Truth:
    """A frontend leaves each prompt in a memory file and sends its descriptor, each 66 ms; an answer takes 8 ms.

    The server stands in `recvmsg` until one comes, maps it, answers in four kernels, and is there again. For seven
    eighths of the time nobody has asked for anything that was not answered.
    """
    frontend, number, at = MADE.pop("frontend"), 0, 0
    d.spent.restart()
    frontend.way.send(b"-")
    for number in range(frontend.count):
        with d.spent.on(NOTHING_TO_DO):
            prompt = frontend.next()
        if prompt[:4] != number.to_bytes(4, "little"):
            raise RuntimeError("a prompt came out of its turn")
        stamp(d, number % 8 * 4 * KiB, 4 * KiB, number)
        d.copy(d.device, d.host + number % 8 * 4 * KiB, 4 * KiB, H2D, d.compute)
        for _ in range(4):
            d.launch(2_000_000)
        at = token(d, number)
        d.sync(d.compute)
        told(at, number)
    d.spent.stop()
    frontend.end()
    same(d, d.device, d.host + number % 8 * 4 * KiB, 4 * KiB)
    return {}


@twentieth(
    line=COMPUTING,
    like=("link_bound", "weights_not_overlapped", "head_of_line_copies", "synchronisation", "gpu_starved"),
    also=("unmerged_neighbours", "wasted_stores"),
)
def two_tenants_one_of_which_loads_and_one_stores_on_streams_of_two_priorities(d: Device) -> Truth:
    """Two threads serve a model each on one GPU: one loads its next prefix beside its batches, one stores its last KV.

    The first has a stream of high priority, batches of 5 ms, and a prefix of 0.5 ms a batch ahead in one of three
    places; the second's batches take 7 ms on one of low priority, and 0.5 ms of KV leave behind each. Each waits for
    its batch before the last alone, so each always has kernels on the device, and no copy is joined late.
    """
    pool, over, batch, tenants = Pool(d, d.bytes_of(500)), threading.Event(), 0, (-1, 0)
    d.lib.cudaStreamCreateWithPriority.argtypes = [ct.c_void_p, ct.c_uint, ct.c_int]
    high, low = (d.made("cudaStreamCreateWithPriority", NON_BLOCKING, priority) for priority in tenants)
    loads, stores, homes = d.copies[6], d.copies[7], (0, 1, 2, 5)  # blocks 3 and 4 are the other's

    def ask(number: int) -> None:
        pool.fetch(number % 3, homes[number % 4], loads)
        d.record(number % 16, loads)

    def store() -> None:
        number = 0
        while not over.is_set():
            if number >= 2:  # the blocks have left
                d.check(d.lib.cudaStreamWaitEvent(low, d.events[112 + (number - 2) % 16], 0))
            at = (3 + number % 2) * pool.size
            for _ in range(2):
                d.launch(3_500_000, low)
            clear(d, d.device + at, number % 251, 4 * KiB, low)
            d.order(stores, low, 64 + number % 16)
            d.copy(d.host + at, d.device + at, pool.size, D2H, stores)
            d.record(112 + number % 16, stores)
            d.record(96 + number % 16, low)
            if number >= 2:
                d.sync_event(96 + (number - 2) % 16)
            number += 1

    ask(0)
    d.sync(loads)
    d.spent.restart()
    thread = in_thread(store)
    for batch in turns():
        d.check(d.lib.cudaStreamWaitEvent(high, d.events[batch % 16], 0))
        for _ in range(2):
            d.launch(2_500_000, high)
        d.record(32 + batch % 16, high)
        if batch >= 2:
            d.sync_event(32 + (batch - 2) % 16)
        ask(batch + 1)
    over.set()
    thread.join()
    for stream in (high, low):
        d.sync(stream)
    d.spent.stop()
    for last in (batch, batch + 1):
        same(d, d.device + last % 3 * pool.size, d.host + homes[last % 4] * pool.size, 64 * KiB)
    return {}


@twentieth(
    line=COMPUTING,
    like=("small_copies", "gpu_starved", "weights_not_overlapped", "link_bound", "redundant_loads"),
    also=("unmerged_neighbours",),
)
def a_ragged_batch_laid_out_in_padded_rows_within_the_device_before_a_pass_of_sixty_times_that(d: Device) -> Truth:
    """Sixteen sequences' packed rows are laid out in padded rows by 2D copies within the device before a long pass.

    The copies stand on the model's stream, so no kernel runs beside them. How long they take is measured first, and a
    pass computes for sixty times that, or 4 ms if that is longer: a sixtieth of the time goes to them. Passes are
    submitted two ahead.
    """
    ragged, batch = Ragged(d), 0
    each = max(ragged.took() * 20, 1_400_000)
    d.spent.restart()
    for batch in turns():
        clear(d, ragged.end(batch), batch % 251, 512, d.compute)
        ragged.spread(batch)
        for _ in range(3):
            d.launch(each)
        paced(d, batch, 2)
    d.sync(d.compute)
    d.spent.stop()
    ragged.check(batch)
    return {}
