"""Twelfth programs that are healthy: garbage, batches, a lock, beams, rows, a monitor, graphs, clients, a router."""

from __future__ import annotations

import ctypes as ct
import gc
import os
import random
import selectors
import socket
import subprocess
import sys
import threading
import time
from queue import Queue
from select import select
from typing import Any

from accounts import Pool, paced, stamp, turns
from device import D2H, H2D, Device, now
from eighth_healthy import plain_only
from fresh_copies import clear
from ninth_healthy import token, told
from registry import COMPUTING, DEVICE, NOTHING_TO_DO, KiB, MiB, Truth, in_thread, twelfth
from seventh_host import quickest
from unseen_copies import D2D, same

MADE: dict[str, Any] = {}  # before a program begins


def requests_of(count: int) -> list[dict[str, object]]:
    """Requests as a scheduler has them: dictionaries and lists that refer to each other."""
    made: list[dict[str, object]] = []
    request: dict[str, object]
    for number in range(count):
        request = {"number": number, "blocks": [number, number + 1], "before": made[-1] if made else None}
        request["group"] = [request]
        made.append(request)
    return made


@twelfth(
    line=COMPUTING,
    like=("python_or_gil_bound", "gpu_starved", "synchronisation", "cpu_starved", "slow_tier"),
    also=("wasted_stores",),
)
def garbage_collected_over_all_requests_while_two_prefills_are_ahead(d: Device) -> Truth:
    """Before it launches a prefill of 24 ms the thread has Python collect garbage over its requests, for some 4 ms.

    Prefills are launched two ahead, so the device has above 24 ms of kernels whenever a collection begins. What lived
    before the program is frozen, and how many requests take 4 ms is measured first.
    """
    prefill, at, longest = 0, 0, 0
    gc.freeze()
    some = requests_of(4_000)
    some = requests_of(max(4_000 * 4_000_000 // quickest(gc.collect), 100))
    gc.collect()
    d.spent.restart()
    for prefill in turns():
        begin = now()
        gc.collect()
        longest = max(longest, now() - begin)
        for _ in range(3):
            d.launch(8_000_000)
        at = token(d, prefill)
        paced(d, prefill, 2)
    d.sync(d.compute)
    d.spent.stop()
    whole = some[-1]["before"] is some[-2]
    some.clear()
    gc.collect()
    gc.unfreeze()
    told(at, prefill)
    plain_only(d, longest < 20_000_000, f"a collection took {longest} ns")
    if not whole:
        raise RuntimeError("a request has lost the one before it")
    return {}


@twelfth(
    line=COMPUTING,
    like=("weights_not_overlapped", "link_bound", "redundant_loads", "load_not_ordered", "launch_queue_saturation"),
    also=("unmerged_neighbours",),
)
def prefixes_brought_by_one_batch_call_each_two_requests_ahead(d: Device) -> Truth:
    """A request's prefix is ten blocks of 50 us, brought by one batch call to one of four sets of slots, two ahead.

    A request computes for 3 ms and waits by an event for its own prefix, which is there 5 ms before. A load waits for
    the last request that had the set, which is over by then; requests are launched one ahead. No two of four requests
    in turn have the same prefix.
    """
    pool, blocks, sets, loads, request = Pool(d, d.bytes_of(50)), 10, 4, d.copies[3], 0
    requests = min((pool.count - 2) // blocks, 6)

    def slots(number: int) -> list[int]:
        return [d.device + (number % sets * blocks + block) * pool.size for block in range(blocks)]

    def homes(number: int) -> list[int]:
        return [d.host + (number % requests * blocks + block * 3 % blocks) * pool.size for block in range(blocks)]

    def bring(number: int) -> None:
        if number >= sets:
            d.check(d.lib.cudaStreamWaitEvent(loads, d.events[32 + number % sets], 0))
        d.batch(slots(number), homes(number), pool.size, loads)
        d.record(number % 16, loads)

    for number in range(2):
        bring(number)
    d.sync(loads)
    d.spent.restart()
    for request in turns():
        d.check(d.lib.cudaStreamWaitEvent(d.compute, d.events[request % 16], 0))
        for _ in range(3):
            d.launch(1_000_000)
        d.record(32 + request % sets, d.compute)
        bring(request + 2)
        paced(d, request, 1)
    d.sync(d.compute)
    d.spent.stop()
    d.sync(loads)
    last = request + 2
    for i in (0, blocks - 1):
        same(d, slots(last)[i], homes(last)[i], pool.size)
    return {}


class Exporter:
    """A thread that has a lock while it tells a scraper the counters, and the scraper, which takes 1.8 ms for them.

    Attributes:
        lock: of the counters; counters: by name; told: what the scraper has heard.
    """

    def __init__(self) -> None:
        self.lock, self.counters, self.told = threading.Lock(), {"steps": 0, "tokens": 0}, 0
        self.over, (self.mine, self.scraper) = threading.Event(), socket.socketpair()
        self.threads = [in_thread(self.scrape), in_thread(self.export)]

    def scrape(self) -> None:
        """What the scraper does."""
        while got := self.scraper.recv(64):
            time.sleep(0.0018)
            self.told = int(got)
            self.scraper.sendall(b"!")

    def export(self) -> None:
        """Tells the counters, again and again, with the lock in hand until the scraper has them."""
        while not self.over.is_set():
            with self.lock:
                self.mine.sendall(str(self.counters["steps"]).encode())
                self.mine.recv(1)
            time.sleep(0.0004)

    def count(self, tokens: int) -> None:
        """What a step does with the counters."""
        with self.lock:
            self.counters["steps"] += 1
            self.counters["tokens"] += tokens

    def end(self) -> None:
        """Ends the threads."""
        self.over.set()
        self.threads[1].join()
        self.mine.close()
        self.threads[0].join()
        self.scraper.close()


@twelfth(
    line=COMPUTING,
    like=("gpu_starved", "synchronisation", "context_lock_stall", "python_or_gil_bound", "slow_tier"),
    also=("wasted_stores",),
)
def counters_whose_lock_an_exporter_keeps_beside_steps_launched_three_ahead(d: Device) -> Truth:
    """The thread needs the counters' lock for each step of 4 ms, and an exporter has it for 1.8 ms of each 2.3 ms.

    It waits for the lock for 2 ms or less in most steps, but steps are launched three ahead: the device has above 8 ms
    of kernels meanwhile.
    """
    exporter, step, at = Exporter(), 0, 0
    d.spent.restart()
    for step in turns():
        for _ in range(4):
            d.launch(1_000_000)
        at = token(d, step)
        paced(d, step, 3)
        exporter.count(512)
    d.sync(d.compute)
    d.spent.stop()
    exporter.end()
    told(at, step)
    if exporter.counters["tokens"] != (step + 1) * 512:
        raise RuntimeError("a step was not counted")
    return {}


@twelfth(
    line=COMPUTING,
    like=("small_copies", "redundant_loads", "gpu_starved", "synchronisation", "unmerged_neighbours"),
    also=("wasted_stores",),
)
def last_blocks_of_beams_reordered_within_the_device_between_long_steps(d: Device) -> Truth:
    """Between two steps of 6 ms the last blocks of eight beams, 256 KiB each, are copied to where their heirs write.

    Eight copies within the device take some 2 us each, below a hundredth of a step, on the stream of the model. The
    beams lie in one of two areas in turn; who is whose heir is drawn on the host, and steps are launched two ahead.
    """
    size, beams, step, at, draw = (256 if d.gpu else 16) * KiB, 8, 0, 0, random.Random(12)
    who = list(range(beams))

    def place(area: int, beam: int) -> int:
        return d.device + (area * beams + beam) * size

    for beam in range(beams):
        d.copy(place(0, beam), d.host + beam * size, size, H2D, d.compute)
    d.sync(d.compute)
    d.spent.restart()
    for step in turns():
        parents = [draw.randrange(beams) if step % 16 == 15 else (beam * 3 + 1) % beams for beam in range(beams)]
        for beam, parent in enumerate(parents):
            d.copy(place((step + 1) % 2, beam), place(step % 2, parent), size, D2D, d.compute)
        who = [who[parent] for parent in parents]
        for _ in range(4):
            d.launch(1_500_000)
        at = token(d, step)
        paced(d, step, 2)
    d.sync(d.compute)
    d.spent.stop()
    told(at, step)
    for beam in (0, beams - 1):
        same(d, place((step + 1) % 2, beam), d.host + who[beam] * size, size)
    return {}


class Gatherer:
    """A thread that gathers a batch's rows out of a plain table into one of four pinned buffers and sends them.

    Attributes:
        there: numbers of the batches that were sent; free: how many buffers may be filled, a word for each.
    """

    buffers, rows, row = 4, 256, 16 * KiB

    def __init__(self, d: Device) -> None:
        self.d, self.stream, self.size = d, d.copies[4], self.rows * self.row
        self.table = random.Random(77).randbytes(512 * self.row)
        self.there, self.free = Queue[int](), Queue[bool]()
        for _ in range(self.buffers):
            self.free.put(True)
        self.thread = in_thread(self.gather)

    def home(self, batch: int) -> int:
        """Where a batch's rows are gathered."""
        return self.d.host + batch % self.buffers * self.size

    def slot(self, batch: int) -> int:
        """Where they come to."""
        return self.d.device + batch % self.buffers * self.size

    def asked(self, batch: int, i: int) -> int:
        """The number of the row that a batch has in this place."""
        return (batch * 97 + i * 131) % 512

    def gather(self) -> None:
        """Batch after batch, as soon as there is a buffer."""
        batch, table = 0, memoryview(self.table)
        while self.free.get():
            view = memoryview((ct.c_char * self.size).from_address(self.home(batch))).cast("B")
            for i in range(self.rows):
                at = self.asked(batch, i) * self.row
                view[i * self.row : (i + 1) * self.row] = table[at : at + self.row]
            self.d.copy(self.slot(batch), self.home(batch), self.size, H2D, self.stream)
            self.d.record(batch % self.buffers, self.stream)
            self.there.put(batch)
            batch += 1

    def end(self) -> None:
        """Ends the thread, when it has filled what it may."""
        self.free.put(False)
        self.thread.join()


@twelfth(
    line=COMPUTING,
    like=("python_or_gil_bound", "pageable_memory", "gpu_starved", "weights_not_overlapped", "redundant_loads"),
    also=("wasted_stores",),
)
def embedding_rows_gathered_by_a_thread_some_batches_ahead(d: Device) -> Truth:
    """A thread gathers 256 rows of 16 KiB for each batch out of a plain table and sends them, up to four ahead.

    A batch computes for 8 ms, and its rows take the thread a millisecond or so and the link 0.08 ms. The other thread
    launches two ahead, behind the event of the rows, and gives a buffer back when its batch is over.
    """
    gatherer, batch, at = Gatherer(d), 0, 0
    if gatherer.there.get() != 0:
        raise RuntimeError("another batch than the first was gathered")
    d.sync_event(0)
    d.spent.restart()
    for batch in turns():
        if batch and gatherer.there.get() != batch:
            raise RuntimeError("a batch was gathered out of its turn")
        d.check(d.lib.cudaStreamWaitEvent(d.compute, d.events[batch % gatherer.buffers], 0))
        for _ in range(4):
            d.launch(2_000_000)
        at = token(d, batch)
        paced(d, batch, 2)
        if batch > 1:
            gatherer.free.put(True)
    d.sync(d.compute)
    d.spent.stop()
    gatherer.end()
    told(at, batch)
    last = gatherer.asked(batch, gatherer.rows - 1) * gatherer.row
    end = gatherer.slot(batch) + gatherer.size - gatherer.row
    same(d, end, gatherer.home(batch) + gatherer.size - gatherer.row, gatherer.row)
    row = ct.string_at(gatherer.home(batch) + gatherer.size - gatherer.row, gatherer.row)
    if row != gatherer.table[last : last + gatherer.row]:
        raise RuntimeError("another row was gathered than the batch asked for")
    return {}


@twelfth(
    line=COMPUTING,
    like=("small_copies", "synchronisation", "aliased_stream", "store_not_ordered", "python_or_gil_bound"),
    also=("wasted_stores", "unmerged_neighbours"),
)
def counters_that_a_monitor_takes_off_the_device_beside_decode(d: Device) -> Truth:
    """A monitor takes 4 KiB of counters off the device on a stream of its own, waits for them, and sleeps for 2 ms.

    A step of decode is 5 ms, launched two ahead by another thread. No kernel waits for the monitor's copies, which
    take 2 us each, and the counters lie where no step writes.
    """
    over, right, stream, step, at = threading.Event(), list[bool](), d.copies[16], 0, 0
    counters, home = d.device + MiB, d.host + MiB
    clear(d, counters, 77, 4 * KiB, d.compute)
    d.sync(d.compute)

    def watch() -> None:
        while not over.wait(0.002):
            d.copy(home, counters, 4 * KiB, D2H, stream)
            d.sync(stream)
            right.append(ct.string_at(home, 4 * KiB) == bytes([77]) * 4 * KiB)

    thread = in_thread(watch)
    d.spent.restart()
    for step in turns():
        for _ in range(5):
            d.launch(1_000_000)
        at = token(d, step)
        paced(d, step, 2)
    d.sync(d.compute)
    d.spent.stop()
    over.set()
    thread.join()
    told(at, step)
    plain_only(d, len(right) > 20, "the monitor has hardly looked")
    if not all(right):
        raise RuntimeError("the monitor has seen other counters than there are")
    return {}


@twelfth(
    line=COMPUTING,
    like=("gpu_starved", "synchronisation", "small_copies", "launch_queue_saturation", "first_calls"),
    also=("wasted_stores",),
    needs_gpu=True,
)
def graphs_of_three_sizes_replayed_as_the_batch_grows_and_a_kernel_that_samples_behind(d: Device) -> Truth:
    """A step is one of three graphs, of 3, 4 or 5 ms by the size of the batch, then a kernel of 0.4 ms that samples.

    Ids come in front of the graph on the stream, and the token leaves behind the last kernel: copies of 4 KiB and less.
    The batch grows each eighth step and is small again after the third size. Steps are launched two ahead, and all
    graphs are made and replayed once before.
    """
    kernels, step, at = (6, 8, 10), 0, 0

    def body(count: int) -> int:
        def forward() -> None:
            d.copy(d.device + MiB, d.device, 4 * KiB, D2D, d.compute)
            for _ in range(count):
                d.launch(500_000)

        return d.graph(forward)

    graphs = [body(count) for count in kernels]
    for graph in graphs:
        d.replay(graph, 0)
    d.sync(d.compute)
    d.spent.restart()
    for step in turns():
        size, home = step // 8 % 3, step % 4 * 4 * KiB
        stamp(d, home, 4 * KiB, step)
        d.copy(d.device, d.host + home, 4 * KiB, H2D, d.compute)
        d.replay(graphs[size], kernels[size] * 500_000)
        d.launch(400_000)
        at = token(d, step)
        paced(d, step, 2)
    d.sync(d.compute)
    d.spent.stop()
    told(at, step)
    d.lib.cudaGraphExecDestroy.argtypes = [ct.c_void_p]
    for graph in graphs:
        d.check(d.lib.cudaGraphExecDestroy(graph))
    same(d, d.device + MiB, d.host + step % 4 * 4 * KiB, 4 * KiB)
    return {}


def answered(d: Device, number: int) -> None:
    """A request of five steps of 2 ms, launched two ahead, whose last token is looked at."""
    at = 0
    for i in range(5):
        stamp(d, i * 4 * KiB, 4 * KiB, number * 5 + i)
        d.copy(d.device, d.host + i * 4 * KiB, 4 * KiB, H2D, d.compute)
        d.launch(2_000_000)
        at = token(d, number * 5 + i)
        paced(d, i, 2)
    d.sync(d.compute)
    told(at, number * 5 + 4)


@twelfth(
    line=NOTHING_TO_DO,
    like=("slow_tier", "gpu_starved", "synchronisation", "python_or_gil_bound", "cpu_starved"),
    also=("wasted_stores",),
    undecided_in=DEVICE,  # their recordings hold CUDA's calls alone
)
def four_clients_whose_sockets_a_selector_waits_for(d: Device) -> Truth:
    """Four clients have a socket each, over which one of them asks each 60 ms or so; a selector waits for all four.

    A request is five steps of 2 ms, two ahead, and the client that asked gets an answer. For five sixths of the time
    none has asked, and the thread stands in the selector.
    """
    count, seen, heard = 22, 0, list[bytes]()
    pairs = [socket.socketpair() for _ in range(4)]

    def ask() -> None:
        for number in range(count):
            time.sleep((60, 50, 75, 55, 70, 65, 80)[number % 7] / 1_000)
            client = pairs[number * 3 % 4][0]
            client.sendall(number.to_bytes(4, "little"))
            heard.append(client.recv(4))

    thread = in_thread(ask)
    with selectors.DefaultSelector() as selector:
        for _, server in pairs:
            selector.register(server, selectors.EVENT_READ, server)
        d.spent.restart()
        while seen < count:
            with d.spent.on(NOTHING_TO_DO):
                ready = selector.select()
            for key, _ in ready:
                asked = key.data.recv(4)
                answered(d, int.from_bytes(asked, "little"))
                key.data.sendall(asked)
                seen += 1
        d.spent.stop()
    thread.join()
    for pair in pairs:
        for one in pair:
            one.close()
    if [int.from_bytes(one, "little") for one in heard] != list(range(count)):
        raise RuntimeError("a client got another answer than its own")
    same(d, d.device, d.host + 4 * 4 * KiB, 4 * KiB)
    return {}


ROUTER = """
import select, socket, sys, time
with socket.socket(fileno=int(sys.argv[1])) as replica:
    replica.sendall(b"-")
    replica.recv(1)
    for number in range(int(sys.argv[2])):
        due = time.monotonic() + (0.055, 0.07, 0.065, 0.08, 0.06)[number % 5]
        while (left := due - time.monotonic()) > 0:
            if select.select([replica], [], [], left)[0]:
                replica.recv(64)  # what it says of its load
        replica.sendall(b"r")
"""


class Router:
    """A router in a process of its own, which chooses this replica each 65 ms or so, so many times."""

    count = 21

    def __init__(self) -> None:
        self.mine, theirs = socket.socketpair()
        env = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
        command = [sys.executable, "-S", "-c", ROUTER, str(theirs.fileno()), str(self.count)]
        self.child = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=env)
        theirs.close()
        self.mine.recv(1)  # it is there

    def end(self) -> None:
        """Waits until the process has ended."""
        self.child.wait()
        self.mine.close()


def make_the_router(_: Device) -> None:
    """Starts it."""
    MADE["router"] = Router()


@twelfth(
    line=NOTHING_TO_DO,
    like=("slow_tier", "gpu_starved", "synchronisation", "python_or_gil_bound", "cpu_starved"),
    also=("wasted_stores",),
    prepare=make_the_router,
    undecided_in=DEVICE,  # their recordings hold CUDA's calls alone
)
def a_replica_that_tells_a_router_its_load_and_is_seldom_chosen(d: Device) -> Truth:
    """A router in another process chooses this replica each 65 ms or so; it tells its load each 10 ms until then.

    A request is five steps of 2 ms, two ahead. For five sixths of the time the router has not chosen it, and the thread
    stands in `select`, with a limit of 10 ms, after which it sends its load and goes on.
    """
    router, seen = MADE.pop("router"), 0
    router.mine.sendall(b"-")
    d.spent.restart()
    while seen < router.count:
        with d.spent.on(NOTHING_TO_DO):
            while not select([router.mine], [], [], 0.01)[0]:
                router.mine.sendall(seen.to_bytes(4, "little"))
        if router.mine.recv(1) != b"r":
            raise RuntimeError("the router has ended before its time")
        answered(d, seen)
        seen += 1
    d.spent.stop()
    router.end()
    same(d, d.device, d.host + 4 * 4 * KiB, 4 * KiB)
    return {}
