"""Fourteenth programs whose device waits for the host: advantages, a service, a dispatcher, hops, scans, a database."""

from __future__ import annotations

import ctypes as ct
import http.client
import importlib
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from accounts import Pool, Stretches, decoded, turns
from device import D2H, H2D, Device, now
from fresh_copies import clear
from registry import (
    ALLOCATING,
    BELOW_LINK_RATE,
    DEVICE,
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
    fourteenth,
    pageable,
)
from seventh_host import quickest
from unseen_copies import same

MADE: dict[str, Any] = {}  # before a program begins


def advantages(rewards: list[float], values: list[float]) -> list[float]:
    """What each step of a rollout was better than expected by, the later ones counting less: from the last one back."""
    last, out = 0.0, [0.0] * len(rewards)
    for i in range(len(rewards) - 1, -1, -1):
        after = values[i + 1] if i + 1 < len(values) else 0.0
        last = rewards[i] + 0.5 * after - values[i] + 0.25 * last
        out[i] = last
    return out


@fourteenth(
    line=PYTHON,
    or_lines=(ELSEWHERE,),  # a recorder of calls alone sees a thread outside of CUDA
    also=("synchronisation", "gpu_starved", "python_or_gil_bound", "wasted_stores"),
    like=("small_copies", "pageable_memory", "redundant_loads", "cpu_starved", "launch_queue_saturation"),
)
def advantages_of_all_rollouts_added_up_in_python_before_the_next_update(d: Device) -> Truth:
    """When an update of 0.8 ms is over, Python adds up the advantages of the next rollouts, for 1.6 ms, from the last.

    The thread has waited for the update, and launches the next one when all rollouts are done, so nothing is on the
    device meanwhile. A rollout has 128 steps, and how many rollouts take 1.6 ms is measured first.
    """
    idle, step, draw, got = Stretches(d), 0, random.Random(141), list[float]()
    rollouts = [([draw.random() for _ in range(128)], [draw.random() for _ in range(128)]) for _ in range(16)]
    took = quickest(lambda: [advantages(*rollouts[i]) for i in range(16)])
    count = min(max(16 * 1_600_000 // took, 1), 2_000)
    d.spent.restart()
    for step in turns():
        decoded(d, step, idle, 2, 400_000)
        for i in range(count):
            got = advantages(*rollouts[i % 16])
    d.sync(d.compute)
    d.spent.add(PYTHON, idle.ns)
    d.spent.stop()
    rewards, values = rollouts[(count - 1) % 16]
    if got[-1] != rewards[-1] - values[-1] or len(got) != 128:
        raise RuntimeError("the last step of a rollout has another advantage")
    same(d, d.device, d.host + step % 8 * 4 * KiB, 4 * KiB)
    return {}


SERVICE = """
import http.server, sys, time

class Judge(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        time.sleep(float(sys.argv[1]))
        reward = self.path.rsplit("/", 1)[-1][::-1].encode()
        self.wfile.write(b"HTTP/1.1 200 OK\\r\\nContent-Length: %d\\r\\n\\r\\n%b" % (len(reward), reward))

    def log_message(self, *_):
        pass

server = http.server.HTTPServer(("127.0.0.1", 0), Judge)
print(server.server_port, flush=True)
server.handle_request()
"""


class Judge:
    """A service in a process of its own, which is asked over HTTP for an action's reward and thinks for so long."""

    def __init__(self, seconds: float) -> None:
        env = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
        command = [sys.executable, "-S", "-c", SERVICE, str(seconds)]
        self.child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)
        assert self.child.stdout is not None
        self.connection = http.client.HTTPConnection("127.0.0.1", int(self.child.stdout.readline()))
        self.reward(0)  # it is there, and connected for good

    def reward(self, action: int) -> str:
        """What it answers: the action's digits, the last one first."""
        self.connection.request("GET", f"/reward/{action:08}")
        return self.connection.getresponse().read().decode()

    def end(self) -> None:
        """The process ends with its only connection."""
        self.connection.close()
        self.child.communicate()


def make_the_judge(_: Device) -> None:
    """Starts it."""
    MADE["judge"] = Judge(0.0013)


@fourteenth(
    line=ELSEWHERE,
    or_lines=(TIER, PYTHON),  # it waits for an answer in `recv` of a socket, and makes and reads what goes over it
    also=("gpu_starved", "synchronisation", "python_or_gil_bound", "slow_tier", "wasted_stores"),
    like=("small_copies", "pageable_memory", "cpu_starved", "launch_queue_saturation", "redundant_loads"),
    prepare=make_the_judge,
    undecided_in=DEVICE,  # their recordings hold CUDA's calls alone
)
def a_reward_asked_of_a_service_over_http_before_each_update_of_the_policy(d: Device) -> Truth:
    """A policy is updated for 0.8 ms, and another process is asked over HTTP for the reward of its next action.

    The service thinks for 1.3 ms before it answers, and the thread stands in `recv` meanwhile. It has waited for the
    action before and can update with the reward alone, so nothing is on the device.
    """
    judge, step, right, back = MADE.pop("judge"), 0, 0, d.size - 4 * KiB
    d.spent.restart()
    for step in turns():
        clear(d, d.device + back, step % 251, 512, d.compute)
        for _ in range(2):
            d.launch(400_000)
        d.copy(d.host + back, d.device + back, 512, D2H, d.compute)
        d.sync(d.compute)
        action = ct.string_at(d.host + back, 512)[-1]
        with d.spent.on(ELSEWHERE):
            reward = judge.reward(action)
        right += reward == f"{step % 251:08}"[::-1]
        ct.memmove(d.host + step % 4 * 64, reward.encode(), 8)
        d.copy(d.device, d.host + step % 4 * 64, 8, H2D, d.compute)
    d.spent.stop()
    judge.end()
    if right != step + 1:
        raise RuntimeError("the service has judged another action")
    same(d, d.device, d.host + step % 4 * 64, 8)
    return {}


class Dispatcher:
    """Operators by name and by what they are given, as a framework keeps them, and the layer that calls them.

    Attributes:
        called: how many were.
    """

    gates = ("input", "forget", "cell", "output")

    def __init__(self, d: Device) -> None:
        self.d, self.called = d, 0
        self.kernels = {(name, (32, 256), (256, 1), "half", 0): 1_000 for name in self.gates}

    def call(self, name: str, shape: tuple[int, ...]) -> None:
        """Finds the kernel of an operator and launches it."""
        strides, width = list[int](), 1
        for one in reversed(shape):
            strides.append(width)
            width *= one
        key = (name, shape, tuple(reversed(strides)), "half", 0)
        self.d.launch(self.kernels[key])
        self.d.check(self.d.lib.cudaPeekAtLastError())
        self.called += 1

    def unroll(self, times: int) -> None:
        """A layer over an utterance: four gates for each step of it."""
        for _ in range(times):
            for gate in self.gates:
                self.call(gate, (32, 256))


@fourteenth(
    line=SUBMITTING,
    or_lines=(PYTHON, ELSEWHERE),  # kernels are launched one by one out of Python, which looks each of them up
    also=("gpu_starved", "synchronisation", "python_or_gil_bound", "wasted_stores"),
    like=("small_copies", "aliased_stream", "launch_queue_saturation", "cpu_starved", "allocation_on_hot_path"),
)
def a_recurrent_layer_unrolled_by_a_dispatcher_in_python_into_four_small_kernels_a_step(d: Device) -> Truth:
    """Behind 0.25 ms of an encoder, read back, a recurrent layer goes over 60 steps of speech, four kernels each.

    A gate's kernel takes 1 us. To find it by its name and shapes, to launch it and to ask for an error takes some 6 us
    of Python, so the device is done with each kernel before it has the next one.
    """
    dispatcher, times, back, lost, step = Dispatcher(d), 60, d.size - 4 * KiB, 0, 0
    d.lib.cudaGetLastError()  # a query before the program may have left "not ready"
    d.spent.restart()
    for step in turns():
        clear(d, d.device + back, step % 251, 512, d.compute)
        d.launch(250_000)
        d.copy(d.host + back, d.device + back, 512, D2H, d.compute)
        d.sync(d.compute)
        begin = now()
        dispatcher.unroll(times)
        lost += max(now() - begin - 4 * times * 1_000, 0)
    d.sync(d.compute)
    d.spent.add(SUBMITTING, lost)
    d.spent.stop()
    if dispatcher.called != (step + 1) * times * 4 or ct.string_at(d.host + back, 512) != bytes([step % 251]) * 512:
        raise RuntimeError("the encoder's output is another than was computed")
    return {}


@fourteenth(
    line=WAITING,
    or_lines=(SUBMITTING, PYTHON),  # between two hops the thread wakes, looks at a frontier and submits
    also=(
        "synchronisation",
        "gpu_starved",
        "python_or_gil_bound",
        "wasted_stores",
        "small_copies",
        "weights_not_overlapped",
    ),
    like=("pageable_memory", "launch_queue_saturation", "cpu_starved", "allocation_on_hot_path", "link_bound"),
)
def a_graph_of_neighbours_searched_hop_by_hop_with_the_whole_device_waited_for_after_each(d: Device) -> Truth:
    """A search goes from node to node of a graph of neighbours: a kernel of 8 us for a hop, and the next node is read.

    After each hop the thread waits for the whole device, looks at what came back, sends the node that it chose, 64
    bytes, and launches the next hop. To wake and to submit four things takes longer than the kernel, and until then
    the device has none.
    """
    right, hop, back = 0, 0, d.size - 4 * KiB
    d.spent.restart()
    for hop in turns():
        clear(d, d.device + back, hop % 251, 64, d.compute)
        d.launch(8_000)
        d.copy(d.host + back, d.device + back, 64, D2H, d.compute)
        d.synchronize()
        node = ct.string_at(d.host + back, 64)[0]
        right += node == hop % 251
        ct.memset(d.host + hop % 8 * 64, node, 64)
        d.copy(d.device, d.host + hop % 8 * 64, 64, H2D, d.compute)
    d.spent.stop()
    d.spent.add(WAITING, d.spent.end - d.spent.begin - (d.kernel_ns - d.spent.kernel_ns))
    if right != hop + 1:
        raise RuntimeError("the search has gone to another node")
    same(d, d.device, d.host + hop % 8 * 64, 64)
    return {}


class Grid:
    """A scan's grid of voxels at six resolutions, each in device memory of its own.

    Attributes:
        took: ns to make all and to free them.
    """

    def __init__(self, d: Device) -> None:
        self.d, unit = d, MiB if d.gpu else 16 * KiB
        self.sizes = [unit << level for level in range(4, 10)]
        self.took = quickest(lambda: self.free(self.make()))

    def make(self) -> list[int]:
        """Where they are, the coarsest first."""
        return [self.d.made("cudaMalloc", size) for size in self.sizes]

    def free(self, levels: list[int]) -> None:
        """Gives all back."""
        for at in reversed(levels):
            self.d.check(self.d.lib.cudaFree(at))


def make_the_grid(d: Device) -> None:
    """How long the driver takes for one."""
    MADE["grid"] = Grid(d)


@fourteenth(
    "allocation_on_hot_path",
    line=ALLOCATING,
    also=("gpu_starved", "synchronisation", "context_lock_stall", "wasted_stores", "python_or_gil_bound"),
    like=("pageable_memory", "small_copies", "slow_tier", "launch_queue_saturation", "first_calls", "cpu_starved"),
    prepare=make_the_grid,
)
def a_grid_of_voxels_made_at_six_resolutions_for_each_scan_and_freed_behind_it(d: Device) -> Truth:
    """For each scan six levels of a grid, 16 to 512 MiB, are made by cudaMalloc, and freed when the scan is over.

    The thread waits for the scan before it frees anything, so both kinds of call are made with nothing on the device.
    How long all twelve take was measured before the program began, and a scan's kernels take 0.7 of that.
    """
    grid, lost, scan, right, back = MADE.pop("grid"), 0, 0, 0, d.host + d.size - 4 * KiB
    d.spent.restart()
    for scan in turns():
        begin = now()
        levels = grid.make()
        lost += now() - begin
        for at, size in zip(levels, grid.sizes, strict=True):
            clear(d, at + size - 4 * KiB, scan % 251, 4 * KiB, d.compute)
        for _ in range(2):
            d.launch(max(grid.took * 7 // 20, 20_000))
        d.copy(back, levels[0] + grid.sizes[0] - 512, 512, D2H, d.compute)
        d.sync(d.compute)
        right += ct.string_at(back, 512) == bytes([scan % 251]) * 512
        begin = now()
        grid.free(levels)
        lost += now() - begin
    d.spent.add(ALLOCATING, lost)
    d.spent.stop()
    if right != scan + 1:
        raise RuntimeError("a level of the grid has other bytes than it was given")
    return {"allocation_on_hot_path": lost}


class Waves:
    """Six channels of sound on the device, and plain memory that they are taken to.

    Attributes:
        took: ns to take all.
    """

    channels = 6

    def __init__(self, d: Device) -> None:
        self.d, self.size = d, (3 * MiB if d.gpu else 192 * KiB) + 12 * KiB
        d.lib.cudaMemcpy.argtypes = [ct.c_void_p, ct.c_void_p, ct.c_size_t, ct.c_int]
        self.keep, self.at = pageable(self.channels * self.size)
        self.took = quickest(self.take)

    def take(self) -> None:
        """Channel by channel; each call comes back when its bytes are there."""
        for channel in range(self.channels):
            at = channel * self.size
            self.d.check(self.d.lib.cudaMemcpy(self.at + at, self.d.device + at, self.size, D2H))

    def check(self, sentence: int) -> None:
        """Raises unless the sentence that was made last is there, in all channels."""
        for channel in range(self.channels):
            for at in (channel * self.size, (channel + 1) * self.size - 64):
                if ct.string_at(self.at + at, 64) != bytes([sentence % 251]) * 64:
                    raise RuntimeError("other sound was taken than was made")


def make_the_waves(d: Device) -> None:
    """The memory, and how long a sentence's sound takes."""
    MADE["waves"] = Waves(d)


@fourteenth(
    "pageable_memory",
    line=PAGEABLE,
    or_lines=(BELOW_LINK_RATE, WAITING),
    also=(
        *("synchronisation", "gpu_starved", "wasted_stores", "weights_not_overlapped", "python_or_gil_bound"),
        *("unmerged_neighbours", "link_bound"),
    ),
    like=("redundant_loads", "small_copies", "allocation_on_hot_path", "launch_queue_saturation", "slow_tier"),
    prepare=make_the_waves,
)
def channels_of_spoken_sentences_taken_by_cudamemcpy_into_plain_memory_one_after_another(d: Device) -> Truth:
    """When a sentence is spoken, its sound, six channels of 3 MiB, is taken by cudaMemcpy into plain memory.

    The sentence was waited for, and the next one is launched when all six are there: the thread stands in the calls,
    and no kernel runs. How long six take was measured before the program began, and a sentence computes for 0.8 of
    that.
    """
    waves, lost, sentence = MADE.pop("waves"), 0, 0
    d.spent.restart()
    for sentence in turns():
        clear(d, d.device, sentence % 251, waves.channels * waves.size, d.compute)
        for _ in range(2):
            d.launch(max(waves.took * 2 // 5, 20_000))
        d.sync(d.compute)
        begin = now()
        waves.take()
        lost += now() - begin
    d.spent.add(PAGEABLE, lost)
    d.spent.stop()
    waves.check(sentence)
    return {"pageable_memory": lost}


@fourteenth(
    "launch_queue_saturation",
    line=FULL_QUEUE,
    also=(
        *("link_bound", "wasted_stores", "gpu_starved", "synchronisation", "unmerged_neighbours"),
        "python_or_gil_bound",
    ),
    like=("small_copies", "allocation_on_hot_path", "slow_tier", "cpu_starved", "fence_before_copies"),
)
def pages_of_an_index_saved_on_one_stream_by_the_thread_that_answers_queries(d: Device) -> Truth:
    """Each 45 queries the thread that answers them saves its index: 2,800 pages on one side stream, and then goes on.

    A page takes the link 45 us and its call 4 to 8 us, and a stream takes a thousand: the thread is held for 65 ms or
    more, with nothing on the device but copies. Then come 45 queries of 1 ms, in which the rest of the pages leaves.
    Queries only read the index: no kernel waits for a copy.
    """
    pool, pages, slots, stream = Pool(d, d.bytes_of(45)), 2_800, 24, d.copies[14]
    homes, lost, save, last = 48, 0, 0, (0, 0)
    for save in turns():
        durations = list[int]()
        for slot in range(slots):  # the index has changed since it was saved
            clear(d, d.device + slot * pool.size, (save * slots + slot) % 251, pool.size, stream)
        for page in range(pages):
            last = d.host + (save + page) % homes * pool.size, d.device + page % slots * pool.size
            durations.append(d.copy(*last, pool.size, D2H, stream))
        lost += sum(blocked(durations))
        for query in range(45):
            d.launch(1_000_000)
            d.record(128 + query, d.compute)
            if query:
                d.sync_event(128 + query - 1)
        d.sync(d.compute)
    d.sync(stream)
    d.spent.add(FULL_QUEUE, lost)
    d.spent.stop()
    if ct.string_at(last[0], 64) != bytes([(save * slots + (pages - 1) % slots) % 251]) * 64:
        raise RuntimeError("the last page that was saved is another one")
    same(d, last[1], last[0], pool.size)
    return {"launch_queue_saturation": lost}


class Passages:
    """A database of 600 passages of text in a file, of 8 KiB each, with a small cache of its own.

    Attributes:
        took: ns to fetch one.
    """

    count, size = 600, 8 * KiB

    def __init__(self) -> None:
        self.folder, draw = tempfile.TemporaryDirectory(), random.Random(142)
        sqlite: Any = importlib.import_module("sqlite3")
        self.base = sqlite.connect(Path(self.folder.name) / "passages.db", check_same_thread=False)
        self.base.execute("PRAGMA cache_size = 20")
        self.base.execute("CREATE TABLE passages (number INTEGER PRIMARY KEY, body BLOB)")
        self.bodies = [draw.randbytes(self.size) for _ in range(self.count)]
        self.base.executemany("INSERT INTO passages VALUES (?, ?)", list(enumerate(self.bodies)))
        self.base.commit()
        self.took = max(quickest(lambda: self.fetch(0, 40)) // 40, 1)

    def number(self, question: int, i: int) -> int:
        """Of the i-th passage for a question."""
        return (question * 211 + i * 37) % self.count

    def fetch(self, question: int, count: int) -> list[bytes]:
        """The passages for a question, one after another."""
        found = list[bytes]()
        for i in range(count):
            asked = self.base.execute("SELECT body FROM passages WHERE number = ?", (self.number(question, i),))
            found.append(asked.fetchone()[0])
        return found

    def end(self) -> None:
        """The database goes."""
        self.base.close()
        self.folder.cleanup()


def make_the_passages(_: Device) -> None:
    """The database, and how long a passage takes."""
    MADE["passages"] = Passages()


@fourteenth(
    line=ELSEWHERE,
    or_lines=(TIER, PYTHON),  # a database reads its file and searches, partly without the interpreter's lock
    also=("slow_tier", "gpu_starved", "synchronisation", "python_or_gil_bound", "wasted_stores"),
    like=("cpu_starved", "pageable_memory", "small_copies", "launch_queue_saturation", "redundant_loads"),
    prepare=make_the_passages,
    undecided_in=DEVICE,  # their recordings hold CUDA's calls alone
)
def passages_of_a_retriever_fetched_out_of_a_database_before_each_answer(d: Device) -> Truth:
    """Before an answer of 0.8 ms its passages are fetched out of a database in a file, one query for each, for 1.6 ms.

    The answer before was waited for, so nothing is on the device until all passages are there; then they go to it in
    one copy. How long one takes was measured before the program began, and so many are fetched that they take 1.6 ms.
    """
    passages, step, back, found = MADE.pop("passages"), 0, d.size - 4 * KiB, list[bytes]()
    count = min(max(1_600_000 // passages.took, 4), 500)
    home, right = 0, 0
    d.spent.restart()
    for step in turns():
        home = d.host + step % 2 * 4 * MiB
        with d.spent.on(ELSEWHERE):
            found = passages.fetch(step, count)
            ct.memmove(home, b"".join(found), count * passages.size)
        d.copy(d.device, home, count * passages.size, H2D, d.compute)
        for _ in range(2):
            d.launch(400_000)
        clear(d, d.device + back, step % 251, 512, d.compute)
        d.copy(d.host + back, d.device + back, 512, D2H, d.compute)
        d.sync(d.compute)
        right += ct.string_at(d.host + back, 512) == bytes([step % 251]) * 512
    d.spent.stop()
    passages.end()
    if right != step + 1 or found[-1] != passages.bodies[passages.number(step, count - 1)]:
        raise RuntimeError("an answer is another, or has other passages, than was asked for")
    same(d, d.device + (count - 1) * passages.size, home + (count - 1) * passages.size, passages.size)
    return {}
