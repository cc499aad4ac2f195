"""Eleventh programs that are healthy: a policy, a broker, stages, half a model, blocks let go, a branch, a timeline."""

from __future__ import annotations

import ctypes as ct
import json
import socket
import threading
import time
from collections import deque
from itertools import pairwise
from queue import Empty, Queue
from typing import Any

from accounts import Pool, paced, stamp, turns
from device import D2H, H2D, NON_BLOCKING, Device
from eighth_healthy import plain_only
from fresh_copies import clear
from ninth_healthy import token, told
from other_shapes import gate
from registry import COMPUTING, DEVICE, NOTHING_TO_DO, KiB, MiB, Truth, eleventh, in_thread
from unseen_copies import D2D, same

MADE: dict[str, Any] = {}  # kept as long as the process lives


class Policies:
    """A thread that sends the next policy in one large piece beside rollouts, and says when it has come.

    Attributes:
        size: of a piece, bytes; there: numbers of the pieces that have come, by the thread's own looking.
    """

    def __init__(self, d: Device) -> None:
        self.d, self.stream, self.size = d, d.copies[2], min((d.size - MiB) // 3 & ~255, 64 * MiB)
        self.asked, self.there = Queue[int](), Queue[int]()
        self.thread = in_thread(self.send)

    def slot(self, number: int) -> int:
        """Where it comes to on the device: the other slot than the one before."""
        return self.d.device + number % 2 * self.size

    def home(self, number: int) -> int:
        """Where it is on the host."""
        return self.d.host + number % 3 * self.size

    def send(self) -> None:
        """Sends what it is asked for behind the last kernel of the slot, and looks each half millisecond."""
        d = self.d
        while (number := self.asked.get()) >= 0:
            d.check(d.lib.cudaStreamWaitEvent(self.stream, d.events[8 + number % 4], 0))
            d.copy(self.slot(number), self.home(number), self.size, H2D, self.stream)
            d.record(number % 4, self.stream)
            while d.lib.cudaEventQuery(d.events[number % 4]):
                time.sleep(0.000_5)
            self.there.put(number)

    def end(self) -> None:
        """Ends the thread when what it was asked for has come."""
        self.asked.put(-1)
        self.thread.join()


@eleventh(
    line=COMPUTING,
    like=("link_bound", "weights_not_overlapped", "load_not_ordered", "synchronisation", "python_or_gil_bound"),
    also=("wasted_stores",),
)
def the_next_policy_sent_in_pieces_of_64_mib_beside_rollouts(d: Device) -> Truth:
    """A thread sends a piece of some 64 MiB, 1.2 ms of the link, to a slot that no step uses, and looks for its end.

    A step is 4 ms, launched two ahead. When a piece has come, the next step waits for its event, which is reached, and
    the thread is asked for the next one, which waits until the last step that uses the other slot is over.
    """
    policies, step, at, came = Policies(d), 0, 0, 0
    d.record(8, d.compute)
    policies.asked.put(0)
    d.spent.restart()
    for step in turns():
        try:
            came = policies.there.get_nowait()
            d.check(d.lib.cudaStreamWaitEvent(d.compute, d.events[came % 4], 0))
            d.record(8 + (came + 1) % 4, d.compute)
            policies.asked.put(came + 1)
        except Empty:
            pass
        for _ in range(4):
            d.launch(1_000_000)
        at = token(d, step)
        paced(d, step, 2)
    d.sync(d.compute)
    d.spent.stop()
    policies.end()
    told(at, step)
    last = policies.there.get()
    same(d, policies.slot(last) + MiB, policies.home(last) + MiB, 64 * KiB)
    plain_only(d, last > 10, "hardly a policy has come")
    return {}


def _asked_in_six_steps(d: Device, number: int) -> None:
    """A job of six steps of 1.5 ms, launched two ahead, whose last token is looked at."""
    at = 0
    for i in range(6):
        stamp(d, i * 4 * KiB, 4 * KiB, number * 6 + i)
        d.copy(d.device, d.host + i * 4 * KiB, 4 * KiB, H2D, d.compute)
        d.launch(1_500_000)
        at = token(d, number * 6 + i)
        paced(d, i, 2)
    d.sync(d.compute)
    told(at, number * 6 + 5)


@eleventh(
    line=NOTHING_TO_DO,
    like=("slow_tier", "gpu_starved", "synchronisation", "python_or_gil_bound", "cpu_starved"),
    also=("wasted_stores",),
    undecided_in=DEVICE,  # their recordings hold CUDA's calls alone
)
def a_consumer_that_asks_a_broker_and_is_answered_when_there_is_a_job(d: Device) -> Truth:
    """A consumer polls a broker over a socket, which answers with a job, or with nothing after 50 ms.

    A client leaves a job with the broker each 65 ms or so, and it is six steps of 1.5 ms, two ahead. For six sevenths
    of the time there is no job, and the consumer waits for the broker's answer.
    """
    count, seen, jobs = 21, 0, Queue[bytes]()
    mine, broker = socket.socketpair()

    def ask() -> None:
        for number in range(count):
            time.sleep((65, 50, 80, 60, 70, 55, 75)[number % 7] / 1_000)
            jobs.put(json.dumps({"number": number, "prompt": "x" * 200}).encode())

    def answer() -> None:
        while broker.recv(1):
            try:
                broker.sendall(jobs.get(timeout=0.05))
            except Empty:
                broker.sendall(b"null")

    threads = [in_thread(ask), in_thread(answer)]
    d.spent.restart()
    while seen < count:
        with d.spent.on(NOTHING_TO_DO):
            mine.sendall(b"?")
            job = json.loads(mine.recv(4_096))
        if job:
            plain_only(d, job["number"] == seen, "a job came out of its turn")
            _asked_in_six_steps(d, job["number"])
            seen += 1
    d.spent.stop()
    mine.close()
    for thread in threads:
        thread.join()
    broker.close()
    same(d, d.device, d.host + 5 * 4 * KiB, 4 * KiB)
    return {}


class Stages:
    """Four stages of a trainer on a stream each, which hand activations down and gradients up within the device.

    Attributes:
        forward, backward: events of each stage's last passes, by micro-batch.
    """

    count, size, forward_ns, backward_ns = 4, 64 * KiB, 800_000, 1_200_000

    def __init__(self, d: Device) -> None:
        self.d, self.streams = d, (d.compute, *d.copies[17:20])

    def event(self, stage: int, batch: int, back: bool) -> int:
        """The number of an event: a pass of a stage over a micro-batch is over."""
        return (batch % 8 * self.count + stage) * 2 + back

    def place(self, stage: int, batch: int) -> int:
        """Where a stage finds what is handed to it; the first one's is its input."""
        return self.d.device + (batch % 8 * self.count + stage) * self.size

    def after(self, stage: int, event: int) -> None:
        """The stage's stream waits for an event."""
        self.d.check(self.d.lib.cudaStreamWaitEvent(self.streams[stage], self.d.events[event], 0))

    def forward(self, batch: int) -> None:
        """A micro-batch passes all stages downwards, each behind the one above."""
        d = self.d
        clear(d, self.place(0, batch), batch % 251, self.size, d.compute)
        for stage, stream in enumerate(self.streams):
            if stage:
                self.after(stage, self.event(stage - 1, batch, False))
            d.launch(self.forward_ns, stream)
            if stage < self.count - 1:
                d.copy(self.place(stage + 1, batch), self.place(stage, batch), self.size, D2D, stream)
            d.record(self.event(stage, batch, False), stream)

    def backward(self, batch: int) -> None:
        """The last stage takes this micro-batch, and each one above it one that is a micro-batch older."""
        d = self.d
        for stage in reversed(range(self.count)):
            older = batch - (self.count - 1 - stage)
            if older < 0:
                continue
            if stage < self.count - 1:
                self.after(stage, self.event(stage + 1, older, True))
            d.launch(self.backward_ns, self.streams[stage])
            d.record(self.event(stage, older, True), self.streams[stage])


@eleventh(
    line=COMPUTING,
    like=("aliased_stream", "channels_exhausted", "load_not_ordered", "gpu_starved", "synchronisation"),
    also=("small_copies", "wasted_stores"),
)
def four_stages_that_take_one_forward_and_one_backward_pass_in_turn(d: Device) -> Truth:
    """Four stages on a stream each take a forward pass of 0.8 ms and a backward one of 1.2 ms of other micro-batches.

    Each pass waits by events for the stage above or below. Micro-batches do not end, so once the four are filled, in
    the first 4 ms, each stage has its next pass when it is through with one; the thread is two micro-batches ahead.
    """
    stages, batch, back = Stages(d), 0, d.host + d.size - 64 * KiB
    for batch in turns():
        stages.forward(batch)
        stages.backward(batch)
        d.record(128 + batch % 64, d.compute)
        if batch > 1:
            d.sync_event(128 + (batch - 2) % 64)
    d.synchronize()
    passes = stages.count * stages.forward_ns + stages.backward_ns * stages.count
    d.kernel_ns = d.spent.kernel_ns + (batch + 1) * passes // stages.count  # the others' run beside one stage's
    d.spent.stop()
    d.copy(back, stages.place(3, batch), 512, D2H, d.compute)
    d.sync(d.compute)
    if ct.string_at(back, 512) != bytes([batch % 251]) * 512:
        raise RuntimeError("the last stage got other activations than the first had")
    return {}


@eleventh(
    line=COMPUTING,
    like=("weights_not_overlapped", "link_bound", "redundant_loads", "load_not_ordered", "synchronisation"),
)
def every_second_layer_resident_and_the_others_brought_beside_them(d: Device) -> Truth:
    """Of two layers of 0.7 ms one stays on the device and the other comes, 0.5 ms of the link, to one of two slots.

    A load waits for the layer that had its slot, and has 2.1 ms until its own layer's turn. Layers are launched two
    pairs ahead. Six layers' weights take turns in the two slots.
    """
    pool, loads, pair = Pool(d, d.bytes_of(500)), d.copies[5], 0
    homes = min(pool.count - 1, 6)

    def bring(number: int) -> None:
        if number > 1:
            d.check(d.lib.cudaStreamWaitEvent(loads, d.events[32 + number % 2], 0))
        pool.fetch(number % 2, number % homes, loads)
        d.record(number % 8, loads)

    bring(0)
    d.sync(loads)
    d.spent.restart()
    for pair in turns():
        bring(pair + 1)
        d.launch(700_000)
        d.check(d.lib.cudaStreamWaitEvent(d.compute, d.events[pair % 8], 0))
        d.launch(700_000)
        d.record(32 + pair % 2, d.compute)
        paced(d, pair, 2)
    d.sync(d.compute)
    d.spent.stop()
    d.sync(loads)
    last = pair + 1
    same(d, d.device + last % 2 * pool.size, d.host + last % homes * pool.size, pool.size)
    return {}


@eleventh(
    line=COMPUTING,
    like=("link_bound", "store_not_ordered", "synchronisation", "launch_queue_saturation", "fence_before_copies"),
    also=("unmerged_neighbours", "wasted_stores"),
)
def finished_blocks_let_go_where_the_link_still_has_the_ones_before(d: Device) -> Truth:
    """After each step of 2 ms five finished blocks are stored, 3 ms of the link, unless those before still leave.

    The thread asks the last store's event and lets the blocks go if it is not reached; as steps are launched two ahead
    and stores stand behind their own, every fourth step or so stores. No kernel waits for any of them: tokens stay on
    the device until the end, as one that is read behind each step would stand behind the stores.
    """
    pool, blocks, out, stored, step = Pool(d, d.bytes_of(600)), 5, d.copies[7], 0, 0
    for step in turns():
        for _ in range(2):
            d.launch(1_000_000)
        if not stored or not d.lib.cudaEventQuery(d.events[40]):
            d.order(out, d.compute, step % 16)
            for block in range(blocks):
                place = block * pool.size
                d.copy(d.host + place, d.device + place, pool.size, D2H, out)
            d.record(40, out)
            stored += 1
        paced(d, step, 2)
    d.sync(d.compute)
    d.spent.stop()
    d.sync(out)
    at = token(d, step)
    d.sync(d.compute)
    told(at, step)
    plain_only(d, 0.1 < stored / (step + 1) < 0.8, f"of {step + 1} steps {stored} have stored")
    same(d, d.device + (blocks - 1) * pool.size, d.host + (blocks - 1) * pool.size, pool.size)
    return {}


@eleventh(
    line=COMPUTING,
    like=("allocation_on_hot_path", "gpu_starved", "synchronisation", "python_or_gil_bound", "pinning_stall"),
    also=("wasted_stores", "context_lock_stall"),
)
def a_cache_that_a_thread_grows_by_segments_beside_decode(d: Device) -> Truth:
    """Each 50 ms a thread makes a segment of 64 MiB by cudaMalloc and clears its head; decode is three steps ahead.

    A step is 4 ms, so the decoding thread has 8 ms and more on the device whenever the other one has the driver's lock,
    which is for less than a millisecond or two. Segments are kept, as no request ever gives one back.
    """
    over, segments, size, step, at = threading.Event(), list[int](), (64 if d.gpu else 1) * MiB, 0, 0
    stream = d.copies[14]

    def grow() -> None:
        while not over.wait(0.05):
            segments.append(d.made("cudaMalloc", size))
            clear(d, segments[-1], len(segments) % 251, 64 * KiB, stream)
            d.record(60, stream)
            while d.lib.cudaEventQuery(d.events[60]):
                time.sleep(0.000_2)

    MADE["segments"] = segments
    thread = in_thread(grow)
    d.spent.restart()
    for step in turns():
        for _ in range(4):
            d.launch(1_000_000)
        at = token(d, step)
        paced(d, step, 3)
    d.sync(d.compute)
    d.spent.stop()
    over.set()
    thread.join()
    told(at, step)
    for number, segment in enumerate(segments[-1:], len(segments)):
        d.copy(d.host, segment + 32 * KiB, 64, D2H, d.compute)
        d.sync(d.compute)
        if ct.string_at(d.host, 64) != bytes([number % 251]) * 64:
            raise RuntimeError("a segment was not cleared")
    return {}


@eleventh(
    line=COMPUTING,
    like=("fence_before_copies", "synchronisation", "gpu_starved", "launch_queue_saturation", "cpu_starved"),
    needs_gpu=True,
)
def a_graph_whose_host_function_stands_on_a_branch_beside_its_kernels(d: Device) -> Truth:
    """A step is one graph: its ids, eight kernels of 0.5 ms in a row, and a function of the host of 1 ms beside them.

    The branch leaves behind the ids and comes back before the end, 3 ms after the function is over. Replays are
    launched two ahead, so the GPU goes from one to the next.
    """
    side, step = d.copies[20], 0

    def step_once() -> None:
        d.copy(d.device + MiB, d.device, 4 * KiB, D2D, d.compute)
        d.order(side, d.compute, 100)
        gate(d, 1_000, side)
        for _ in range(8):
            d.launch(500_000)
        d.order(d.compute, side, 101)

    graph = d.graph(step_once)
    d.replay(graph, 0)
    d.sync(d.compute)
    d.spent.restart()
    for step in turns():
        home = step % 4 * 4 * KiB
        stamp(d, home, 4 * KiB, step)
        d.copy(d.device, d.host + home, 4 * KiB, H2D, d.compute)
        d.replay(graph, 8 * 500_000)
        paced(d, step, 2)
    d.sync(d.compute)
    d.spent.stop()
    same(d, d.device + MiB, d.host + step % 4 * 4 * KiB, 4 * KiB)
    return {}


@eleventh(
    line=COMPUTING,
    like=("gpu_starved", "synchronisation", "python_or_gil_bound", "aliased_stream", "context_lock_stall"),
    also=("wasted_stores",),
)
def decode_of_a_high_priority_above_a_prefill_that_comes_in_pieces(d: Device) -> Truth:
    """A thread gives a prefill in pieces of 2 ms, three ahead; another decodes on a stream of higher priority.

    The decoding thread launches 0.4 ms, waits for its token, and sleeps for 3 ms to keep its pace, so its stream has
    nothing most of the time. The other stream always has a piece, beside which the decode step runs.
    """
    d.lib.cudaStreamCreateWithPriority.argtypes = [ct.c_void_p, ct.c_uint, ct.c_int]
    high, over, right = d.made("cudaStreamCreateWithPriority", NON_BLOCKING, -1), threading.Event(), list[bool]()
    piece, at, home = 0, 0, d.host + MiB

    def decode() -> None:
        while not over.is_set():
            d.launch(400_000, high)
            clear(d, d.device + MiB, len(right) % 251, 512, high)
            d.copy(home, d.device + MiB, 512, D2H, high)
            d.sync(high)
            right.append(ct.string_at(home, 512) == bytes([len(right) % 251]) * 512)
            time.sleep(0.003)

    thread = in_thread(decode)
    d.spent.restart()
    for piece in turns():
        for _ in range(2):
            d.launch(1_000_000)
        at = token(d, piece)
        paced(d, piece, 3)
    d.sync(d.compute)
    d.spent.stop()
    over.set()
    thread.join()
    d.kernel_ns = d.spent.kernel_ns + (piece + 1) * 2_000_000  # decode runs beside the prefill
    told(at, piece)
    if not right or not all(right):
        raise RuntimeError("a token is another one than was computed")
    return {}


@eleventh(
    line=COMPUTING,
    like=("synchronisation", "gpu_starved", "launch_queue_saturation", "python_or_gil_bound", "context_lock_stall"),
    also=("wasted_stores",),
)
def a_timeline_of_events_around_each_kernel_that_is_read_two_steps_later(d: Device) -> Truth:
    """Each of a step's six kernels of 0.5 ms stands between two timing events, which are read when it has long passed.

    Steps are launched two ahead, and the thread adds up the times of the step that it has just waited for. An event
    takes the stream a microsecond or so, a three-hundredth of a kernel.
    """
    timelines, took, steps, step, at = deque[list[int]](), 0, 0, 0, 0
    for step in turns():
        marks = [d.mark(d.compute)]
        for _ in range(6):
            d.launch(500_000)
            marks.append(d.mark(d.compute))
        at = token(d, step)
        timelines.append(marks)
        paced(d, step, 2)
        if step >= 2:
            marks = timelines.popleft()
            took += sum(d.between(begin, end) for begin, end in pairwise(marks))
            steps += 1
    d.sync(d.compute)
    d.spent.stop()
    told(at, step)
    plain_only(d, 0.99 < took / (steps * 6 * 500_000) < 1.1, "a kernel took other than its time")
    return {}
