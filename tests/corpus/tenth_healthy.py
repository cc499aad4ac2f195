"""Tenth programs that are healthy: metrics, a draft, two halves, guesses, a late update, a folder, graphs, a peer."""

from __future__ import annotations

import ctypes as ct
import functools
import hashlib
import json
import mmap
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from queue import Queue

from accounts import Pool, paced, stamp, think, turns
from device import D2H, H2D, Device
from eighth_healthy import plain_only
from fresh_copies import clear
from ninth_healthy import token, told
from registry import COMPUTING, DEVICE, NOTHING_TO_DO, KiB, MiB, Truth, in_thread, tenth
from unseen_copies import D2D, same


@tenth(
    line=COMPUTING,
    like=("synchronisation", "gpu_starved", "context_lock_stall", "python_or_gil_bound", "cpu_starved"),
    also=("wasted_stores",),
)
def a_metrics_thread_that_synchronises_the_device_beside_decode(d: Device) -> Truth:
    """Each 20 ms a metrics thread calls cudaDeviceSynchronize and asks for free memory; decode is three steps ahead.

    A step is 4 ms, so the decoding thread has above 8 ms of work on the device whenever the other one begins to wait,
    and goes on to launch meanwhile: the GPU computes all the time.
    """
    over, free, whole, step, at, asked = threading.Event(), ct.c_size_t(), ct.c_size_t(), 0, 0, 0

    def report() -> None:
        nonlocal asked
        while not over.wait(0.02):
            d.synchronize()
            d.check(d.lib.cudaMemGetInfo(ct.byref(free), ct.byref(whole)))
            asked += 1

    thread = in_thread(report)
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
    if not 0 < free.value <= whole.value:
        raise RuntimeError("the metrics thread was told nothing of the memory")
    return {}


@tenth(
    line=COMPUTING,
    like=("synchronisation", "gpu_starved", "aliased_stream", "load_not_ordered", "launch_queue_saturation"),
    also=("wasted_stores",),
)
def a_draft_that_guesses_on_its_stream_beside_the_verification(d: Device) -> Truth:
    """While the target verifies for 2.5 ms on its stream, the draft guesses the next tokens on another for 1.2 ms.

    A verification waits for its own guesses by an event, which is reached before the one before is over, and a draft
    for the verification before the last, whose guesses it overwrites. Rounds are launched two ahead.
    """
    draft, size, turn, back = d.copies[7], 4 * KiB, 0, 0

    def guesses(number: int) -> int:
        return d.device + number % 2 * size

    for turn in turns():
        if turn > 1:
            d.check(d.lib.cudaStreamWaitEvent(draft, d.events[32 + turn % 2], 0))
        clear(d, guesses(turn), turn % 251, size, draft)
        for _ in range(4):
            d.launch(300_000, draft)
        d.kernel_ns -= 4 * 300_000  # beside the target's
        d.order(d.compute, draft, turn % 16)
        for _ in range(5):
            d.launch(500_000)
        back = d.host + d.size - (2 + turn % 4) * 64 * KiB
        d.copy(back, guesses(turn), size, D2H, d.compute)
        d.record(32 + turn % 2, d.compute)
        paced(d, turn, 2)
    d.sync(d.compute)
    d.spent.stop()
    if ct.string_at(back, size) != bytes([turn % 251]) * size:
        raise RuntimeError("other guesses were verified than were made")
    return {}


@tenth(
    line=COMPUTING,
    like=("synchronisation", "python_or_gil_bound", "gpu_starved", "pageable_memory", "small_copies"),
    also=("wasted_stores",),
)
def two_halves_of_a_batch_one_of_which_the_host_samples(d: Device) -> Truth:
    """One thread waits for one half's logits, samples in Python for 0.8 ms and launches it; the other half computes.

    A half's step is 2.5 ms. When the thread is told that one half is over, the other's step begins on the same stream,
    and the next step of the first is behind it after a millisecond: the GPU always has one.
    """
    logits, turn, seen = 64 * KiB, 0, 0

    def launch(number: int) -> None:
        half = number % 2
        clear(d, d.device + half * logits, number % 251, logits, d.compute)
        for _ in range(5):
            d.launch(500_000)
        d.copy(d.host + half * logits, d.device + half * logits, logits, D2H, d.compute)
        d.record(half, d.compute)

    launch(0)
    launch(1)
    for turn in turns():
        d.sync_event(turn % 2)
        seen += ct.string_at(d.host + turn % 2 * logits, logits) == bytes([turn % 251]) * logits
        think(800)
        launch(turn + 2)
    d.sync(d.compute)
    d.spent.stop()
    if seen != turn + 1:
        raise RuntimeError("a half's logits are others than were computed")
    return {}


@tenth(
    line=COMPUTING,
    like=("weights_not_overlapped", "link_bound", "redundant_loads", "load_not_ordered", "synchronisation"),
    also=("unmerged_neighbours",),
)
def experts_guessed_a_layer_ahead_that_come_in_time(d: Device) -> Truth:
    """Beside a layer of 1.5 ms the next one's two experts come, 0.4 ms of the link, as the router of this one guesses.

    There are three pairs of slots, and a load waits for the layer that used its pair before, which is over when it is
    asked for. So experts are there a millisecond before their layer begins, and layers are launched one ahead.
    """
    pool, loads, layer = Pool(d, d.bytes_of(200)), d.copies[1], 0
    homes = min(pool.count - 1, 16) // 2 * 2

    def bring(number: int) -> None:
        if number > 2:
            d.check(d.lib.cudaStreamWaitEvent(loads, d.events[32 + number % 3], 0))
        for i in range(2):
            pool.fetch(number % 3 * 2 + i, (number * 2 + i) % homes, loads)
        d.record(number % 8, loads)

    bring(0)
    d.sync(loads)
    d.spent.restart()
    for layer in turns():
        d.check(d.lib.cudaStreamWaitEvent(d.compute, d.events[layer % 8], 0))
        bring(layer + 1)
        for _ in range(3):
            d.launch(500_000)
        d.record(32 + layer % 3, d.compute)
        paced(d, layer, 1)
    d.sync(d.compute)
    d.spent.stop()
    d.sync(loads)
    last = layer + 1
    same(d, d.device + (last % 3 * 2 + 1) * pool.size, d.host + (last * 2 + 1) % homes * pool.size, pool.size)
    return {}


class Updates:
    """A thread that updates parameters on the CPU when their gradients have left, and sends them to the device.

    Attributes:
        size: of gradients and of parameters, bytes; last: the digest that stands at the head of the last parameters.
    """

    def __init__(self, d: Device, size: int) -> None:
        self.d, self.size, self.out, self.back, self.last = d, size, d.copies[0], d.copies[1], b""
        self.asked, self.done = Queue[int](), Queue[int]()
        self.thread = in_thread(self.work)

    def gradients(self, step: int) -> int:
        return self.d.host + step % 2 * self.size

    def parameters(self, step: int) -> int:
        return self.d.host + (2 + step % 2) * self.size

    def work(self) -> None:
        d = self.d
        while (step := self.asked.get()) >= 0:
            d.sync_event(step % 4)
            view = memoryview((ct.c_char * self.size).from_address(self.gradients(step))).cast("B")
            self.last = hashlib.sha256(view[: 2 * MiB]).digest() * 128
            ct.memmove(self.parameters(step), self.last, len(self.last))
            d.copy(d.device + (2 + step % 2) * self.size, self.parameters(step), self.size, H2D, self.back)
            d.record(8 + step % 4, self.back)
            self.done.put(step)

    def end(self) -> None:
        self.asked.put(-1)
        self.thread.join()


@tenth(
    line=COMPUTING,
    like=("synchronisation", "gpu_starved", "weights_not_overlapped", "store_not_ordered", "python_or_gil_bound"),
    also=("wasted_stores",),
)
def an_update_on_the_cpu_that_is_a_step_late_on_purpose(d: Device) -> Truth:
    """A step's gradients leave, a thread updates for some milliseconds, and the parameters are for the step after next.

    Gradients and parameters take the link 0.4 ms each way on a stream of their own, and a step is 10 ms. The update
    hashes 2 MiB, outside of the interpreter's lock; it begins when a step is over and is launched for when it is sent,
    while the step between still has 5 ms or so to go.
    """
    updates, step = Updates(d, d.bytes_of(400) if d.gpu else 2 * MiB), 0
    size = updates.size
    for step in turns():
        if step > 1:
            plain_only(d, updates.done.get() == step - 2, "another update was done than the one before the last")
            d.check(d.lib.cudaStreamWaitEvent(d.compute, d.events[8 + (step - 2) % 4], 0))
        plain_only(d, not step or bool(d.lib.cudaStreamQuery(d.compute)), "the step before was over")
        for _ in range(5):
            d.launch(2_000_000)
        clear(d, d.device + step % 2 * size, step % 251, size, d.compute)
        d.order(updates.out, d.compute, 16 + step % 4)
        d.copy(updates.gradients(step), d.device + step % 2 * size, size, D2H, updates.out)
        d.record(step % 4, updates.out)
        updates.asked.put(step)
    d.sync(d.compute)
    d.spent.stop()
    updates.end()
    d.synchronize()
    if updates.last[:32] != hashlib.sha256(bytes([step % 251]) * 2 * MiB).digest():
        raise RuntimeError("an update saw other gradients than were computed")
    same(d, d.device + (2 + step % 2) * size, updates.parameters(step), 64 * KiB)
    return {}


def _served(d: Device, number: int) -> None:
    """A request of six steps of 1.5 ms, launched two ahead, whose last token is looked at."""
    at = 0
    for i in range(6):
        stamp(d, i * 4 * KiB, 4 * KiB, number * 6 + i)
        d.copy(d.device, d.host + i * 4 * KiB, 4 * KiB, H2D, d.compute)
        d.launch(1_500_000)
        at = token(d, number * 6 + i)
        paced(d, i, 2)
    d.sync(d.compute)
    told(at, number * 6 + 5)


@tenth(
    line=NOTHING_TO_DO,
    like=("slow_tier", "gpu_starved", "synchronisation", "python_or_gil_bound", "cpu_starved"),
    also=("wasted_stores",),
    undecided_in=DEVICE,  # their recordings hold CUDA's calls alone
)
def a_folder_listed_each_two_milliseconds_for_requests(d: Device) -> Truth:
    """A batch tool lists a folder and sleeps 2 ms when it is empty; a client leaves a request there each 60 ms or so.

    A request is a file of a hundred bytes, renamed into the folder when it is whole; it is read, removed and decoded
    in six steps of 1.5 ms. For five sixths of the time nobody has asked, and the thread sleeps or lists.
    """
    count, seen = 24, 0
    with tempfile.TemporaryDirectory() as name, tempfile.TemporaryDirectory() as aside:
        folder = Path(name)

        def ask() -> None:
            for number in range(count):
                time.sleep((60, 45, 80, 55, 65, 50, 75, 60)[number % 8] / 1_000)
                path = Path(aside) / f"{number}.json"
                path.write_text(json.dumps({"number": number, "prompt": "x" * 70}))
                path.rename(folder / path.name)

        thread = in_thread(ask)
        d.spent.restart()
        while seen < count:
            with d.spent.on(NOTHING_TO_DO):
                while not (paths := list(folder.iterdir())):
                    time.sleep(0.002)
            number = json.loads(paths[0].read_text())["number"]
            paths[0].unlink()
            plain_only(d, number == seen, "a request was seen out of its turn")
            _served(d, number)
            seen += 1
        d.spent.stop()
        thread.join()
    same(d, d.device, d.host + 5 * 4 * KiB, 4 * KiB)
    return {}


@tenth(
    line=COMPUTING,
    like=("small_copies", "weights_not_overlapped", "gpu_starved", "synchronisation", "launch_queue_saturation"),
    needs_gpu=True,
)
def graphs_with_two_tables_copied_between_their_replays(d: Device) -> Truth:
    """Between two replays of a graph of 4 ms a block table of 64 KiB and a list of ids go to the GPU on its stream.

    The two copies take the stream 0.01 ms or so, a four-hundredth of a step. Replays are launched two ahead, and each
    step has its tables in one of four places.
    """
    tables, ids, step = 64 * KiB, 4 * KiB, 0

    def group() -> None:
        d.copy(d.device + MiB, d.device, ids, D2D, d.compute)
        for _ in range(8):
            d.launch(500_000)

    graph = d.graph(group)
    d.replay(graph, 0)
    d.sync(d.compute)
    d.spent.restart()
    for step in turns():
        home = step % 4 * 128 * KiB
        stamp(d, home, tables + ids, step)
        d.copy(d.device, d.host + home, ids, H2D, d.compute)
        d.copy(d.device + 64 * KiB, d.host + home + ids, tables, H2D, d.compute)
        d.replay(graph, 8 * 500_000)
        paced(d, step, 2)
    d.sync(d.compute)
    d.spent.stop()
    same(d, d.device + MiB, d.host + step % 4 * 128 * KiB, ids)
    same(d, d.device + 64 * KiB, d.host + step % 4 * 128 * KiB + ids, tables)
    return {}


def _segments(d: Device, size: int, part: int, over: threading.Event, seen: list[int]) -> None:
    """Maps, registers and loads a part of a segment each 60 ms, beside whatever the device does."""
    stream = d.copies[3]
    while not over.wait(0.06):
        with mmap.mmap(-1, size) as segment:
            held = ct.c_char.from_buffer(segment)
            at = ct.addressof(held)
            ct.memset(at, 1 + len(seen) % 250, size)
            d.check(d.lib.cudaHostRegister(at, size, 0))
            d.copy(d.device + 16 * MiB, at, part, H2D, stream)
            d.sync(stream)
            d.check(d.lib.cudaHostUnregister(at))
            seen.append(1 + len(seen) % 250)
            del held


@tenth(
    line=COMPUTING,
    like=("allocation_on_hot_path", "pinning_stall", "gpu_starved", "synchronisation", "python_or_gil_bound"),
    also=("wasted_stores", "context_lock_stall"),
)
def segments_registered_by_a_thread_beside_long_prefills(d: Device) -> Truth:
    """A thread maps and registers 16 MiB each 60 ms, loads one and gives it back; prefills of 30 ms are two ahead.

    To register so much takes a millisecond or some, for which calls of the other thread may wait; the device has above
    30 ms of kernels whenever that begins, so it computes all the time. To give it back takes the thread until the
    prefills are over that were launched, and no one waits for the thread or for what it loads.
    """
    over, seen, prefill, at = threading.Event(), list[int](), 0, 0
    size, part = (16 if d.gpu else 2) * MiB, 1 * MiB
    d.spent.restart()
    thread: threading.Thread | None = None
    for prefill in turns():
        for _ in range(3):
            d.launch(10_000_000)
        at = token(d, prefill)
        if prefill == 1:
            thread = in_thread(functools.partial(_segments, d, size, part, over, seen))
        paced(d, prefill, 2)
    d.sync(d.compute)
    d.spent.stop()
    over.set()
    if thread:
        thread.join()
    told(at, prefill)
    if seen:
        d.copy(d.host, d.device + 16 * MiB, 64, D2H, d.compute)
        d.sync(d.compute)
    if seen and ct.string_at(d.host, 64) != bytes(seen[-1:]) * 64:
        raise RuntimeError("the device has other bytes than the last segment")
    return {}


def _announced(d: Device, asked: Queue[int], each: int, send: Callable[[bytes], object]) -> None:
    """Polls the events of the stores that it is asked about, so many for each number, and sends what is there."""
    while (number := asked.get()) >= 0:
        for layer in range(each):
            while d.lib.cudaEventQuery(d.events[number % 4 * each + layer]):
                time.sleep(0.000_3)
            send(number.to_bytes(4, "little") + layer.to_bytes(4, "little"))


@tenth(
    line=COMPUTING,
    like=("store_not_ordered", "link_bound", "synchronisation", "python_or_gil_bound", "fence_before_copies"),
    also=("wasted_stores", "unmerged_neighbours"),
)
def layers_announced_to_a_peer_by_a_thread_that_polls_their_events(d: Device) -> Truth:
    """A prefill node's eight layers of 0.8 ms each store their KV, 0.2 ms; a thread polls and tells a peer of each.

    Stores are on a stream of their own, each behind its layer. A layer's slot is computed again by the next prefill,
    6 ms later, when it has long left. The thread sleeps 0.3 ms between two looks; prefills are launched two ahead.
    """
    pool, layers, out, prefill = Pool(d, d.bytes_of(200)), 8, d.copies[0], 0
    asked, heard = Queue[int](), [b""]
    mine, peer = socket.socketpair()

    def hear() -> None:
        while got := peer.recv(8):
            heard[0] = got

    threads = [in_thread(hear), in_thread(functools.partial(_announced, d, asked, layers, mine.sendall))]
    d.spent.restart()
    for prefill in turns():
        for layer in range(layers):
            slot, home = d.device + layer * pool.size, d.host + layer * pool.size
            if prefill:
                d.check(d.lib.cudaStreamWaitEvent(d.compute, d.events[(prefill - 1) % 4 * layers + layer], 0))
            clear(d, slot, (prefill * layers + layer) % 251, pool.size, d.compute)
            d.launch(800_000)
            d.order(out, d.compute, 64 + prefill % 4 * layers + layer)
            d.copy(home, slot, pool.size, D2H, out)
            d.record(prefill % 4 * layers + layer, out)
        asked.put(prefill)
        paced(d, prefill, 2)
    d.sync(d.compute)
    d.spent.stop()
    asked.put(-1)
    threads[1].join()
    mine.close()
    threads[0].join()
    peer.close()
    if heard[0] != prefill.to_bytes(4, "little") + (layers - 1).to_bytes(4, "little"):
        raise RuntimeError("the peer was told of another layer than the last")
    if ct.string_at(d.host + 7 * pool.size, 64) != bytes([(prefill * layers + 7) % 251]) * 64:
        raise RuntimeError("the peer was told of a layer whose bytes are not there")
    return {}
