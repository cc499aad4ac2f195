"""Thirteenth programs whose device waits for the host: boxes, scores, environments, symbols, questions, files."""

from __future__ import annotations

import ctypes as ct
import importlib
import os
import random
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from accounts import Stretches, decoded, turns
from device import D2H, H2D, Device, now
from fresh_copies import clear
from registry import (
    ALLOCATING,
    BELOW_LINK_RATE,
    DEVICE,
    ELSEWHERE,
    PAGEABLE,
    PYTHON,
    SUBMITTING,
    TIER,
    WAITING,
    KiB,
    MiB,
    Truth,
    thirteenth,
)
from seventh_host import quickest
from unseen_copies import same

Box = tuple[int, int, int, int, float]
MADE: dict[str, Any] = {}  # before a program begins


def boxes_of(image: int, count: int = 40) -> list[Box]:
    """Boxes that a detector has found in an image: two corners and a score."""
    draw, made = random.Random(image), list[Box]()
    for _ in range(count):
        left, top = draw.randrange(900), draw.randrange(900)
        made.append((left, top, left + 20 + draw.randrange(200), top + 20 + draw.randrange(200), draw.random()))
    return made


def overlap(one: Box, other: Box) -> float:
    """What two boxes share, of what they cover together."""
    wide = min(one[2], other[2]) - max(one[0], other[0])
    high = min(one[3], other[3]) - max(one[1], other[1])
    if wide <= 0 or high <= 0:
        return 0.0
    areas = (one[2] - one[0]) * (one[3] - one[1]) + (other[2] - other[0]) * (other[3] - other[1])
    return wide * high / (areas - wide * high)


def sifted(boxes: list[Box]) -> list[Box]:
    """The best boxes, none of which overlaps a better one much."""
    kept = list[Box]()
    for box in sorted(boxes, key=lambda one: -one[4]):
        if all(overlap(box, better) < 0.3 for better in kept):
            kept.append(box)
    return kept


@thirteenth(
    line=PYTHON,
    or_lines=(ELSEWHERE,),  # a recorder of calls alone sees a thread outside of CUDA
    also=("synchronisation", "gpu_starved", "python_or_gil_bound", "wasted_stores"),
    like=("small_copies", "pageable_memory", "redundant_loads", "cpu_starved", "launch_queue_saturation"),
)
def boxes_of_a_detector_sifted_in_python_before_the_next_batch_of_frames(d: Device) -> Truth:
    """When a detector's batch of 0.8 ms is over, Python keeps the best boxes of each frame, for 1.6 ms, pair by pair.

    The thread has waited for the batch and launches the next one when all frames' boxes are sifted, so nothing is on
    the device meanwhile. A frame has 40 boxes, and how many frames take 1.6 ms is measured first.
    """
    idle, step, kept = Stretches(d), 0, list[list[Box]]()
    images = [boxes_of(image) for image in range(24)]
    frames = min(max(8 * 1_600_000 // quickest(lambda: [sifted(images[i]) for i in range(8)]), 1), 2_000)
    d.spent.restart()
    for step in turns():
        decoded(d, step, idle, 2, 400_000)
        kept = [sifted(images[(step + i) % 24]) for i in range(frames)]
    d.sync(d.compute)
    d.spent.add(PYTHON, idle.ns)
    d.spent.stop()
    if len(kept) != frames or any(overlap(one, kept[0][0]) >= 0.3 for one in kept[0][1:]):
        raise RuntimeError("boxes were kept that overlap")
    same(d, d.device, d.host + step % 8 * 4 * KiB, 4 * KiB)
    return {}


class Sampler:
    """Scores of eight sequences, 16,000 each, which numpy puts in order; it is imported when one is made."""

    def __init__(self) -> None:
        self.np: Any = importlib.import_module("numpy")
        self.scores = self.np.random.default_rng(132).random((8, 16_000), dtype="float32")
        self.took = quickest(lambda: [self.taken(i) for i in range(4)], 8) // 4

    def taken(self, sequence: int) -> int:
        """How many of a sequence's best scores make up 0.9 of all; their order is the best one's first."""
        row = self.scores[sequence % 8]
        order = self.np.argsort(row)[::-1]
        return int(self.np.searchsorted(self.np.cumsum(row[order]), 0.9 * row.sum()))


def make_the_sampler(_: Device) -> None:
    """The scores, and how long a sequence takes."""
    MADE["sampler"] = Sampler()


@thirteenth(
    line=PYTHON,
    or_lines=(ELSEWHERE,),  # numpy sorts without the interpreter's lock; of calls alone, the thread is outside of CUDA
    also=("synchronisation", "gpu_starved", "python_or_gil_bound", "wasted_stores"),
    like=("small_copies", "pageable_memory", "redundant_loads", "cpu_starved", "launch_queue_saturation"),
    prepare=make_the_sampler,
)
def scores_of_all_tokens_put_in_order_by_numpy_before_the_next_step(d: Device) -> Truth:
    """When a step of 0.8 ms has its token, the thread has numpy sort the scores of each sequence, for 1.6 ms.

    Each sequence has 16,000 scores, of which the sampler takes those that make up 0.9 of all. How many sequences take
    1.6 ms was measured before. The thread has waited for the step and launches the next one behind its sampler, so
    nothing is on the device meanwhile.
    """
    sampler, idle, step, taken = MADE.pop("sampler"), Stretches(d), 0, 0
    count = min(max(1_600_000 // sampler.took, 1), 200)
    d.spent.restart()
    for step in turns():
        decoded(d, step, idle, 2, 400_000)
        for sequence in range(count):
            taken = sampler.taken(step + sequence)
    d.sync(d.compute)
    d.spent.add(PYTHON, idle.ns)
    d.spent.stop()
    if not 8_000 < taken < 16_000:
        raise RuntimeError("the sampler has taken another part of the scores")
    same(d, d.device, d.host + step % 8 * 4 * KiB, 4 * KiB)
    return {}


ENVIRONMENT = """
import socket, sys, time
with socket.socket(fileno=int(sys.argv[1])) as learner:
    learner.sendall(b"-" * 8)
    while action := learner.recv(8):
        time.sleep(float(sys.argv[2]))
        learner.sendall(action[::-1])
"""


class Environments:
    """Environments in processes of their own, each of which takes so many seconds for a step."""

    def __init__(self, *takes: float) -> None:
        self.mine, self.children = list[socket.socket](), list[subprocess.Popen[bytes]]()
        env = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
        for seconds in takes:
            mine, theirs = socket.socketpair()
            command = [sys.executable, "-S", "-c", ENVIRONMENT, str(theirs.fileno()), str(seconds)]
            self.children.append(subprocess.Popen(command, pass_fds=[theirs.fileno()], env=env))
            theirs.close()
            self.mine.append(mine)
        for mine in self.mine:
            mine.recv(8)  # it is there

    def act(self, environment: int, action: int) -> None:
        """Gives one of them an action."""
        self.mine[environment].sendall(action.to_bytes(8, "little"))

    def state(self, environment: int) -> bytes:
        """Waits for what one of them has become: its action, the other way round."""
        return self.mine[environment].recv(8)

    def end(self) -> None:
        """Waits until all processes have ended."""
        for mine in self.mine:
            mine.close()
        for child in self.children:
            child.wait()


def make_the_environments(_: Device) -> None:
    """Starts them."""
    MADE["environments"] = Environments(0.0007, 0.0016, 0.001, 0.0012)


@thirteenth(
    line=ELSEWHERE,
    or_lines=(TIER, PYTHON),  # it waits in `recv` of a socket; of calls alone, it is outside of CUDA
    also=("gpu_starved", "synchronisation", "python_or_gil_bound", "slow_tier", "wasted_stores"),
    like=("small_copies", "pageable_memory", "cpu_starved", "launch_queue_saturation", "redundant_loads"),
    prepare=make_the_environments,
)
def four_environments_in_processes_of_their_own_that_step_between_two_actions(d: Device) -> Truth:
    """A policy chooses an action in 0.7 ms, four environments step, each in its process, and the policy chooses again.

    The slowest takes 1.6 ms, asleep. The thread has waited for the action and stands in `recv` until all have answered,
    and what the policy looks at next is what they answered: nothing is on the device meanwhile.
    """
    environments, step, right, back = MADE.pop("environments"), 0, 0, d.size - 4 * KiB
    d.spent.restart()
    for step in turns():
        clear(d, d.device + back, step % 251, 512, d.compute)
        for _ in range(2):
            d.launch(350_000)
        d.copy(d.host + back, d.device + back, 512, D2H, d.compute)
        d.sync(d.compute)
        action = ct.string_at(d.host + back, 512)[-1]
        with d.spent.on(ELSEWHERE):
            for i in range(4):
                environments.act(i, action)
            states = [environments.state(i) for i in range(4)]
        right += action == step % 251 and states == [action.to_bytes(8, "big")] * 4
        ct.memmove(d.host + step % 4 * 64, b"".join(states), 32)
        d.copy(d.device, d.host + step % 4 * 64, 32, H2D, d.compute)
    d.spent.stop()
    environments.end()
    if right != step + 1:
        raise RuntimeError("an environment has answered another action")
    same(d, d.device, d.host + step % 4 * 64, 32)
    return {}


@thirteenth(
    line=WAITING,
    or_lines=(SUBMITTING, PYTHON),  # between two symbols the thread wakes, looks at one and submits
    also=("synchronisation", "gpu_starved", "python_or_gil_bound", "wasted_stores", "small_copies"),
    like=("pageable_memory", "launch_queue_saturation", "cpu_starved", "allocation_on_hot_path", "redundant_loads"),
)
def a_transducer_that_asks_after_each_symbol_whether_it_was_blank(d: Device) -> Truth:
    """A joint network of 9 us gives a symbol, which is read back; where it is not blank, a predictor of 6 us follows.

    The thread waits for an event behind each symbol and only then knows what to launch. To wake, to look, and to give
    the device a kernel, a memset, a copy and the event takes longer than the kernels, and until then it has none.
    """
    right, symbol, heard, back = 0, 0, 0, d.size - 4 * KiB
    d.spent.restart()
    for symbol in turns():
        if heard % 3:
            d.launch(6_000)
        d.launch(9_000)
        clear(d, d.device + back, symbol % 251, 64, d.compute)
        d.copy(d.host + back, d.device + back, 64, D2H, d.compute)
        d.record(symbol, d.compute)
        d.sync_event(symbol)
        heard = ct.string_at(d.host + back, 64)[0]
        right += heard == symbol % 251
    d.spent.stop()
    d.spent.add(WAITING, d.spent.end - d.spent.begin - (d.kernel_ns - d.spent.kernel_ns))
    if right != symbol + 1:
        raise RuntimeError("a symbol is another than was computed")
    return {}


@thirteenth(
    line=SUBMITTING,
    or_lines=(PYTHON, ELSEWHERE),  # the calls are made one by one out of Python, and a recorder may leave questions out
    also=("gpu_starved", "synchronisation", "python_or_gil_bound", "wasted_stores"),
    like=("small_copies", "aliased_stream", "launch_queue_saturation", "cpu_starved", "allocation_on_hot_path"),
)
def a_launcher_that_asks_for_device_capture_attributes_and_errors_around_each_small_kernel(d: Device) -> Truth:
    """Behind 0.25 ms of attention, read back, come 150 kernels of 1 us whose launcher asks eight things around each.

    It asks which device it is, whether the stream is captured, four attributes of the device, and twice for the last
    error: nine calls out of Python, above 6 us, for 1 us of kernel. The device is done with a kernel before it has the
    next one.
    """
    lib, count, back, lost, step = d.lib, 150, d.size - 4 * KiB, 0, 0
    number, capture, value = ct.c_int(), ct.c_int(), ct.c_int()
    lib.cudaStreamIsCapturing.argtypes = [ct.c_void_p, ct.c_void_p]
    lib.cudaGetLastError()  # a query before the program may have left "not ready"
    asked = [1, 8, 12, 16]  # threads of a block, shared memory of one, registers of one, multiprocessors

    def launch() -> None:
        d.check(lib.cudaGetDevice(ct.byref(number)))
        d.check(lib.cudaPeekAtLastError())
        d.check(lib.cudaStreamIsCapturing(d.compute, ct.byref(capture)))
        for one in asked:
            d.check(lib.cudaDeviceGetAttribute(ct.byref(value), one, number.value))
        d.launch(1_000)
        d.check(lib.cudaPeekAtLastError())

    for step in turns():
        clear(d, d.device + back, step % 251, 512, d.compute)
        d.launch(250_000)
        d.copy(d.host + back, d.device + back, 512, D2H, d.compute)
        d.sync(d.compute)
        begin = now()
        for _ in range(count):
            launch()
        lost += max(now() - begin - count * 1_000, 0)
    d.sync(d.compute)
    d.spent.add(SUBMITTING, lost)
    d.spent.stop()
    if capture.value or ct.string_at(d.host + back, 512) != bytes([step % 251]) * 512:
        raise RuntimeError("the attention read back is another than was computed")
    return {}


class Loras:
    """Adapters of 24 matrices, each in memory of its own, made for the largest rank; two of them are on the device.

    Attributes:
        there: where the matrices of those two are, the older one's first; took: ns to free an adapter and make another.
    """

    matrices, rank = 24, 16 * KiB  # what of a matrix this rank fills, bytes

    def __init__(self, d: Device) -> None:
        self.d, unit = d, MiB if d.gpu else 64 * KiB
        self.sizes = [(8, 12, 20)[i % 3] * unit for i in range(self.matrices)]
        self.there = [self.make(), self.make()]
        self.took = quickest(self.exchange)

    def make(self) -> list[int]:
        """Memory for each matrix of an adapter."""
        return [self.d.made("cudaMalloc", size) for size in self.sizes]

    def free(self) -> None:
        """The older adapter's memory is given back."""
        for at in self.there.pop(0):
            self.d.check(self.d.lib.cudaFree(at))

    def exchange(self) -> None:
        """The older adapter's memory goes, and a new one's comes."""
        self.free()
        self.there.append(self.make())

    def home(self, adapter: int, matrix: int) -> int:
        """Where a matrix is in pinned memory."""
        return self.d.host + (adapter % 6 * self.matrices + matrix) * 2 * self.rank


def make_the_loras(d: Device) -> None:
    """Two adapters' memory, and how long an exchange takes."""
    MADE["loras"] = Loras(d)


@thirteenth(
    "allocation_on_hot_path",
    line=ALLOCATING,
    also=(
        "gpu_starved",
        "synchronisation",
        "context_lock_stall",
        "python_or_gil_bound",
        "small_copies",
        "weights_not_overlapped",
    ),
    like=("pageable_memory", "slow_tier", "launch_queue_saturation", "first_calls", "cpu_starved", "redundant_loads"),
    prepare=make_the_loras,
)
def an_adapter_s_matrices_each_in_memory_made_when_it_comes_and_freed_when_it_goes(d: Device) -> Truth:
    """Each batch has another adapter: the oldest one's 24 matrices are freed one by one and 24 are made for it.

    Two adapters fit, six take turns. A matrix has 8 to 20 MiB, for the largest rank there may be, of which this rank
    fills 16 KiB. How long 24 of cudaFree and cudaMalloc take with nothing on the device was measured before, and a
    batch's kernels take 0.7 of that.
    """
    loras, lost, batch = MADE.pop("loras"), 0, 0
    d.spent.restart()
    for batch in turns():
        begin = now()
        loras.exchange()
        lost += now() - begin
        for matrix, at in enumerate(loras.there[-1]):
            d.copy(at, loras.home(batch, matrix), loras.rank, H2D, d.compute)
        for _ in range(2):
            d.launch(max(loras.took * 7 // 20, 20_000))
        d.sync(d.compute)
    d.spent.add(ALLOCATING, lost)
    d.spent.stop()
    for matrix in (0, loras.matrices - 1):
        same(d, loras.there[-1][matrix], loras.home(batch, matrix), loras.rank)
        if batch:
            same(d, loras.there[0][matrix], loras.home(batch - 1, matrix), loras.rank)
    loras.free()
    loras.free()
    return {"allocation_on_hot_path": lost}


class Messages:
    """What a peer has sent for four requests: eight messages each, which are Python's own bytes, a layer in each.

    Attributes:
        took: ns to send a request's to the device.
    """

    requests, layers = 4, 8

    def __init__(self, d: Device) -> None:
        self.d, self.size = d, (4 * MiB if d.gpu else 256 * KiB) + 4 * KiB
        draw = random.Random(133)
        self.kept = [[draw.randbytes(self.size) for _ in range(self.layers)] for _ in range(self.requests)]
        self.took = quickest(lambda: self.send(0))

    def home(self, request: int, layer: int) -> int:
        """Where a message's bytes are."""
        return ct.cast(ct.c_char_p(self.kept[request % self.requests][layer]), ct.c_void_p).value or 0

    def send(self, request: int) -> None:
        """A request's layers to their slots; the thread waits until they are there."""
        for layer in range(self.layers):
            self.d.copy(self.d.device + layer * self.size, self.home(request, layer), self.size, H2D, self.d.compute)
        self.d.sync(self.d.compute)


def make_the_messages(d: Device) -> None:
    """The messages, and how long a request's take."""
    MADE["messages"] = Messages(d)


@thirteenth(
    "pageable_memory",
    line=PAGEABLE,
    or_lines=(BELOW_LINK_RATE, WAITING),
    also=(
        *("synchronisation", "gpu_starved", "weights_not_overlapped", "python_or_gil_bound", "unmerged_neighbours"),
        "link_bound",
    ),
    like=("redundant_loads", "small_copies", "allocation_on_hot_path", "launch_queue_saturation", "slow_tier"),
    prepare=make_the_messages,
)
def a_peer_s_keys_sent_to_the_device_out_of_the_messages_they_came_in(d: Device) -> Truth:
    """A request's keys came in eight messages of 4 MiB, which are bytes of Python, and each is sent from where it is.

    That is plain memory, which the driver copies by way of its own, while the thread stands in the calls. The request
    before was waited for, so no kernel runs. How long eight take was measured before the program began, and a request
    computes for 0.8 of that.
    """
    messages, lost, request = MADE.pop("messages"), 0, 0
    d.spent.restart()
    for request in turns():
        begin = now()
        messages.send(request)
        lost += now() - begin
        for _ in range(2):
            d.launch(max(messages.took * 2 // 5, 20_000))
        d.sync(d.compute)
    d.spent.add(PAGEABLE, lost)
    d.spent.stop()
    end = messages.size - 4 * KiB
    for layer in range(messages.layers):
        same(d, d.device + layer * messages.size + end, messages.home(request, layer) + end, 4 * KiB)
    return {"pageable_memory": lost}


class Samples:
    """A file of samples, of which a batch has 40 at random places.

    Attributes:
        took: ns to read a batch's into pinned memory.
    """

    batch, count, head, size = 40, 160, 32 * KiB, 256 * KiB

    def __init__(self, d: Device) -> None:
        self.folder, draw = tempfile.TemporaryDirectory(), random.Random(134)
        self.path = Path(self.folder.name) / "samples.bin"
        with self.path.open("wb") as file:
            for _ in range(self.count):
                file.write(draw.randbytes(self.size))
        self.file = os.open(self.path, os.O_RDONLY)
        self.order = draw.sample(range(self.count), self.count)
        self.view = memoryview((ct.c_char * (self.batch * self.size)).from_address(d.host)).cast("B")
        self.took = quickest(lambda: self.read(0))

    def chosen(self, step: int, i: int) -> int:
        """The number of the i-th sample that a step has."""
        return self.order[(step * 37 + i) % self.count]

    def read(self, step: int) -> None:
        """All samples of a step, one by one: their heads lie together in front, and the rest of each behind."""
        heads, rest = self.view[: self.batch * self.head], self.view[self.batch * self.head :]
        long = self.size - self.head
        for i in range(self.batch):
            parts = [heads[i * self.head : (i + 1) * self.head], rest[i * long : (i + 1) * long]]
            if os.preadv(self.file, parts, self.chosen(step, i) * self.size) != self.size:
                raise RuntimeError("a sample is shorter than it was")

    def end(self) -> None:
        """The file goes."""
        os.close(self.file)
        self.folder.cleanup()


def make_the_samples(d: Device) -> None:
    """The file, and how long a batch takes."""
    MADE["samples"] = Samples(d)


@thirteenth(
    line=TIER,
    or_lines=(ELSEWHERE, PYTHON),  # a recorder of calls alone sees a thread outside of CUDA
    also=("slow_tier", "gpu_starved", "synchronisation", "python_or_gil_bound", "weights_not_overlapped"),
    like=("cpu_starved", "pageable_memory", "small_copies", "launch_queue_saturation", "redundant_loads"),
    prepare=make_the_samples,
    undecided_in=DEVICE,  # their recordings hold CUDA's calls alone
)
def samples_read_at_random_places_of_a_file_by_the_thread_that_trains(d: Device) -> Truth:
    """Before each training step the thread reads its 40 samples of 256 KiB out of a file, each at another place.

    The step before is over, so nothing is on the device until all are read; then one copy of their heads, 1.3 MB, and
    the step's kernels. How long a batch takes to read was measured before, and the kernels take 0.7 of that.
    """
    samples, step = MADE.pop("samples"), 0
    heads = samples.batch * samples.head
    d.spent.restart()
    for step in turns():
        with d.spent.on(TIER):
            samples.read(step)
        d.copy(d.device, d.host, heads, H2D, d.compute)
        for _ in range(2):
            d.launch(max(samples.took * 7 // 20, 20_000))
        d.sync(d.compute)
    d.spent.stop()
    with samples.path.open("rb") as file:
        file.seek(samples.chosen(step, samples.batch - 1) * samples.size + samples.head - 64)
        end = file.read(64)
    samples.end()
    d.copy(d.host, d.device + heads - 64, 64, D2H, d.compute)
    d.sync(d.compute)
    if ct.string_at(d.host, 64) != end:
        raise RuntimeError("the device has another sample than the step's last")
    return {}
