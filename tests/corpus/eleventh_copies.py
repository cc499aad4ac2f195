"""Eleventh programs whose kernels wait for copies: chosen chunks, ranks, a ring, models, shards, resumed requests."""

from __future__ import annotations

import ctypes as ct
import random
import threading
from typing import Any

from accounts import Pool, Stretches, paced_and_read, think, turns
from device import D2H, H2D, Device, now
from fresh_copies import clear, copy_2d
from registry import (
    AT_LINK_RATE,
    BELOW_LINK_RATE,
    DEVICE,
    INSIDE_GPU,
    NOT_NEEDED,
    WAITING,
    KiB,
    MiB,
    Truth,
    eleventh,
    in_thread,
    pageable,
)
from unseen_copies import D2D, same

MADE: dict[str, Any] = {}  # before a program begins


@eleventh(
    line=AT_LINK_RATE,
    also=("weights_not_overlapped", "link_bound", "unmerged_neighbours"),
    like=("redundant_loads", "small_copies", "pageable_memory", "synchronisation", "load_not_ordered"),
)
def chunks_that_a_layer_s_scores_choose_brought_over_four_streams_before_its_attention(d: Device) -> Truth:
    """A layer scores for 0.1 ms; the 20 chunks of the context that score best come on four streams; attention follows.

    Each stream brings five chunks behind the scores, 20 us of the link each, and the attention of 0.25 ms waits for all
    four: 0.4 ms of each 0.75 ms are copies without a kernel. Layers choose chunks that no slot has when they come.
    """
    pool, chunks, layer, waits = Pool(d, d.bytes_of(20)), 20, 0, Stretches(d)
    sides, groups = d.copies[9:13], min((pool.count - 1) // chunks, 12)
    home = 0
    for layer in turns():
        d.launch(100_000)
        waits.begin()
        for n, side in enumerate(sides):
            d.order(side, d.compute, layer % 8 * 8 + n)
        for i in range(chunks):
            home = layer % groups * chunks + i * 7 % chunks
            pool.fetch(i * 3 % chunks * 2, home, sides[i % 4])
        for n, side in enumerate(sides):
            d.order(d.compute, side, layer % 8 * 8 + 4 + n)
        waits.end()
        d.launch(250_000)
        paced_and_read(d, layer, waits, lag=3)
    d.sync(d.compute)
    d.spent.add(AT_LINK_RATE, waits.read())
    d.spent.stop()
    last = (chunks - 1) * 3 % chunks * 2
    same(d, d.device + last * pool.size, d.host + home * pool.size, pool.size)
    return {}


class Ranks:
    """Two ranks that share a device: each has a stream, its partial sum, and a place for the other's.

    Attributes:
        size: of a partial sum, bytes; streams: of the ranks.
    """

    def __init__(self, d: Device) -> None:
        self.d, self.size, self.streams = d, d.bytes_of(150), (d.compute, d.copies[10])

    def mine(self, rank: int) -> int:
        """Where a rank's own partial sum is on the device."""
        return self.d.device + rank * self.size

    def others(self, rank: int) -> int:
        """Where the other rank's sum is to come."""
        return self.d.device + (2 + rank) * self.size

    def home(self, rank: int, layer: int) -> int:
        """Where a rank's sum crosses the host."""
        return self.d.host + (layer % 2 * 2 + rank) * self.size

    def meet(self, event: int) -> None:
        """Each stream waits for what the other one has been given."""
        for rank, stream in enumerate(self.streams):
            self.d.record(event + rank, stream)
        for rank, stream in enumerate(self.streams):
            self.d.check(self.d.lib.cudaStreamWaitEvent(stream, self.d.events[event + 1 - rank], 0))

    def exchange(self, layer: int) -> None:
        """Both sums leave, and each comes to the other rank."""
        d = self.d
        for rank, stream in enumerate(self.streams):
            d.copy(self.home(rank, layer), self.mine(rank), self.size, D2H, stream)
        self.meet(layer % 8 * 4)
        for rank, stream in enumerate(self.streams):
            d.copy(self.others(rank), self.home(1 - rank, layer), self.size, H2D, stream)
        self.meet(layer % 8 * 4 + 2)


@eleventh(
    line=AT_LINK_RATE,
    or_lines=(NOT_NEEDED,),  # what a rank gets is on the same device, in the other's hands
    also=(
        *("weights_not_overlapped", "link_bound", "redundant_loads", "wasted_stores", "unmerged_neighbours"),
        "gpu_starved",
    ),
    like=("small_copies", "pageable_memory", "aliased_stream", "launch_queue_saturation", "store_not_ordered"),
)
def partial_sums_of_two_ranks_that_cross_through_the_host_after_each_layer(d: Device) -> Truth:
    """Two ranks' kernels of 0.4 ms run side by side; then both store their partial sums and load each other's.

    A sum takes the link 0.15 ms, so both leave in 0.3 ms and both come in 0.3 ms. The streams meet by events when the
    sums are on the host and when they have come, so the two next kernels begin together and no kernel runs before.
    """
    ranks, moves, layer = Ranks(d), Stretches(d), 0
    for layer in turns():
        for rank, stream in enumerate(ranks.streams):
            clear(d, ranks.mine(rank), (layer * 2 + rank) % 251, ranks.size, stream)
            d.launch(400_000, stream)
        d.kernel_ns -= 400_000  # they run side by side
        moves.begin()
        ranks.exchange(layer)
        moves.end()
        paced_and_read(d, layer, moves, lag=2)
    d.synchronize()
    d.spent.add(AT_LINK_RATE, moves.read())
    d.spent.stop()
    for rank in range(2):
        same(d, ranks.others(rank), ranks.home(1 - rank, layer), ranks.size)
        if ct.string_at(ranks.home(rank, layer), 64) != bytes([(layer * 2 + rank) % 251]) * 64:
            raise RuntimeError("another sum left than was computed")
    return {}


@eleventh(
    line=AT_LINK_RATE,
    also=("link_bound", "wasted_stores", "weights_not_overlapped", "unmerged_neighbours"),
    like=("small_copies", "fence_before_copies", "synchronisation", "launch_queue_saturation", "store_not_ordered"),
)
def chunks_of_a_prefill_that_leave_more_slowly_than_they_are_made(d: Device) -> Truth:
    """A prefill node makes a chunk's KV in 0.2 ms into one of three slots, and each takes the link 0.45 ms to leave.

    A chunk may begin when the chunk that had its slot has left. After the first three the link is never free, and the
    device has a kernel for 0.2 ms of each 0.45 ms. The thread launches four chunks ahead and holds nothing up.
    """
    pool, out, slots, waits, chunk = Pool(d, d.bytes_of(450)), d.copies[6], 3, Stretches(d), 0
    homes = min(pool.count - 1, 6)
    for chunk in turns():
        slot = d.device + chunk % slots * pool.size
        waits.begin()
        if chunk >= slots:
            d.check(d.lib.cudaStreamWaitEvent(d.compute, d.events[64 + chunk % slots], 0))
        waits.end()
        clear(d, slot, chunk % 251, pool.size, d.compute)
        d.launch(200_000)
        d.order(out, d.compute, chunk % 16)
        d.copy(d.host + chunk % homes * pool.size, slot, pool.size, D2H, out)
        d.record(64 + chunk % slots, out)
        paced_and_read(d, chunk, waits, lag=4)
    d.sync(out)
    d.spent.add(AT_LINK_RATE, waits.read())
    d.spent.stop()
    if ct.string_at(d.host + (chunk % homes + 1) * pool.size - 64, 64) != bytes([chunk % 251]) * 64:
        raise RuntimeError("another chunk has left than was made")
    return {}


class Models:
    """Three models in plain memory that was registered once, and one place on the device for any of them."""

    def __init__(self, d: Device) -> None:
        self.sizes = [d.bytes_of(us) for us in (300, 1_000, 600)]
        self.keep, at = pageable(sum(self.sizes))
        self.at = [at + sum(self.sizes[:i]) for i in range(3)]
        for i, (place, size) in enumerate(zip(self.at, self.sizes, strict=True)):
            ct.memmove(place, random.Random(70 + i).randbytes(size), size)
        d.check(d.lib.cudaHostRegister(at, sum(self.sizes), 0))


def make_the_models(d: Device) -> None:
    """Registers the models once."""
    if "models" not in MADE:  # registered as long as the process lives
        MADE["models"] = Models(d)


@eleventh(
    line=AT_LINK_RATE,
    or_lines=(WAITING,),  # the thread asks for the event of the load, and launches when it is reached
    also=("weights_not_overlapped", "link_bound", "synchronisation", "gpu_starved", "python_or_gil_bound"),
    like=("redundant_loads", "small_copies", "pageable_memory", "allocation_on_hot_path", "first_calls"),
    prepare=make_the_models,
)
def three_models_of_a_pipeline_that_take_turns_in_one_place(d: Device) -> Truth:
    """For each image an encoder, a denoiser and a decoder come one after another to the one place that fits any.

    They are one copy each out of registered memory, 0.3, 1.0 and 0.6 ms of the link, and compute for 0.4, 1.2 and 0.6
    ms. The thread spins on a load's event before it launches, and on the last kernel's before it loads over it: 1.9 ms
    of each 4.1 ms are copies, with no kernel beside.
    """
    models, loads, moves = MADE["models"], d.copies[3], Stretches(d, d.copies[3])
    kernels = ([400_000], [300_000] * 4, [600_000])

    def reached(event: int) -> None:
        while d.lib.cudaEventQuery(d.events[event]):
            think(4)

    for _ in turns():
        for model in range(3):
            moves.begin()
            d.copy(d.device, models.at[model], models.sizes[model], H2D, loads)
            moves.end()
            d.record(model, loads)
            reached(model)
            for ns in kernels[model]:
                d.launch(ns)
            d.record(8 + model, d.compute)
            moves.read()
            reached(8 + model)
    d.spent.add(AT_LINK_RATE, moves.read())
    d.spent.stop()
    end = models.sizes[2] - 64 * KiB
    same(d, d.device + end, models.at[2] + end, 64 * KiB)
    return {}


class Shards:
    """Three threads that load their shard of each layer, piece by piece, and meet before and after it."""

    pieces = 4

    def __init__(self, d: Device) -> None:
        self.d, self.pool, self.over, self.layer = d, Pool(d, d.bytes_of(60)), False, 0
        self.meeting = threading.Barrier(4, timeout=60)
        self.layers = min((self.pool.count - 1) // (3 * self.pieces), 4)
        self.times = [(0, 0)] * 3
        self.threads = [in_thread(lambda rank=rank: self.load(rank)) for rank in range(3)]

    def home(self, rank: int, piece: int) -> int:
        """The block of the pool that a rank's piece of the layer is."""
        return (self.layer % self.layers * 3 + rank) * self.pieces + piece

    def load(self, rank: int) -> None:
        """What a rank's thread does."""
        stream = self.d.copies[4 + rank]
        while True:
            self.meeting.wait()
            if self.over:
                return
            begin = now()
            for piece in range(self.pieces):
                self.pool.fetch(rank * self.pieces + piece, self.home(rank, piece), stream)
            self.d.sync(stream)
            self.times[rank] = begin, now()
            self.meeting.wait()

    def loaded(self, layer: int) -> int:
        """Has a layer loaded; from the first thread's first call to the last one's end, ns."""
        self.layer = layer
        self.meeting.wait()
        self.meeting.wait()
        return max(end for _, end in self.times) - min(begin for begin, _ in self.times)

    def end(self) -> None:
        """Ends the threads."""
        self.over = True
        self.meeting.wait()
        for thread in self.threads:
            thread.join()


@eleventh(
    line=AT_LINK_RATE,
    or_lines=(WAITING,),  # the threads stand in cudaStreamSynchronize meanwhile
    also=(
        *("weights_not_overlapped", "link_bound", "synchronisation", "gpu_starved", "python_or_gil_bound"),
        "unmerged_neighbours",
    ),
    like=("redundant_loads", "small_copies", "pageable_memory", "context_lock_stall", "load_not_ordered"),
)
def shards_of_a_layer_loaded_by_three_threads_that_meet_before_it_runs(d: Device) -> Truth:
    """Three threads load a third of each layer, four copies on a stream each, wait for it and meet; then it computes.

    A shard takes the link 0.24 ms, so all take 0.72 ms together. The layer's kernel of 0.6 ms is launched when all have
    met and waited for before the threads may load the next layer over it: half of the time is the link's.
    """
    shards, lost, layer = Shards(d), 0, 0
    d.spent.restart()
    for layer in turns():
        lost += shards.loaded(layer)
        d.launch(600_000)
        d.sync(d.compute)
    d.spent.add(AT_LINK_RATE, lost)
    d.spent.stop()
    shards.end()
    pool, last = shards.pool, 2 * shards.pieces + 3
    same(d, d.device + last * pool.size, d.host + shards.home(2, 3) * pool.size, pool.size)
    if shards.layer != layer:
        raise RuntimeError("another layer was loaded than the last")
    return {}


@eleventh(
    "redundant_loads",
    line=NOT_NEEDED,
    also=("weights_not_overlapped", "link_bound", "unmerged_neighbours"),
    like=("small_copies", "pageable_memory", "synchronisation", "load_not_ordered", "launch_queue_saturation"),
    blind=DEVICE,
)
def requests_resumed_into_slots_that_nobody_has_taken_meanwhile(d: Device) -> Truth:
    """Four requests take turns; when one is resumed its 12 blocks come to its own slots, which no other ever has.

    The loads stand behind the kernel of the request before, and the kernel of 0.8 ms waits for them: 0.6 ms of each
    1.4 ms. The first time they are needed; after that the slots have the same bytes already, above 900 times.
    """
    pool, requests, blocks, loads = Pool(d, d.bytes_of(50)), 4, 12, d.copies[5]
    waits, turn, needed = Stretches(d), 0, 0
    for turn in turns():
        first = turn % requests * blocks
        waits.begin()
        d.order(loads, d.compute, turn % 16)
        for i in range(blocks):
            pool.fetch(first + i, first + i, loads)
        d.order(d.compute, loads, 32 + turn % 16)
        waits.end()
        d.launch(800_000)
        if turn == requests - 1:
            d.sync(d.compute)
            needed = waits.read()
        paced_and_read(d, turn, waits, lag=3)
    d.sync(d.compute)
    lost = waits.read() - needed
    d.spent.add(NOT_NEEDED, lost)
    d.spent.add(AT_LINK_RATE, needed)
    d.spent.stop()
    last = turn % requests * blocks + blocks - 1
    same(d, d.device + last * pool.size, d.host + last * pool.size, pool.size)
    return {"redundant_loads": lost}


class Resharding:
    """Sixteen tensors as the trainer has them, and the same as the engine wants them, on one device.

    Attributes:
        size: of a tensor, bytes; took: how long the device copies them all, ns.
    """

    tensors = 16

    def __init__(self, d: Device) -> None:
        self.d, self.size = d, 64 * MiB if d.gpu else 256 * KiB
        self.trained = d.made("cudaMalloc", self.tensors * self.size)
        self.served = d.made("cudaMalloc", self.tensors * self.size)
        self.moves, taken = Stretches(d), []
        for step in range(6):
            self.train(step, 200_000)
            self.moves.ns = 0
            self.move()
            d.sync(d.compute)
            taken.append(self.moves.read())
        self.took, self.moves.ns = min(taken), 0

    def train(self, step: int, ns: int) -> None:
        """Each tensor has other bytes at its head and its end after a step."""
        d = self.d
        for tensor in range(self.tensors):
            at = self.trained + tensor * self.size
            for place in (at, at + self.size - 4 * KiB):
                clear(d, place, (step * self.tensors + tensor) % 251, 4 * KiB, d.compute)
        d.launch(ns)

    def place(self, tensor: int) -> int:
        """Where the engine has a tensor."""
        return self.served + tensor * 5 % self.tensors * self.size

    def move(self) -> None:
        """All tensors to their places, by two streams in turn."""
        d, sides = self.d, self.d.copies[1:3]
        self.moves.begin()
        for n, side in enumerate(sides):
            d.order(side, d.compute, n)
        for tensor in range(self.tensors):
            d.copy(self.place(tensor), self.trained + tensor * self.size, self.size, D2D, sides[tensor % 2])
        for n, side in enumerate(sides):
            d.order(d.compute, side, 2 + n)
        self.moves.end()


def make_the_resharding(d: Device) -> None:
    """The tensors, and how long the device takes to copy them."""
    MADE["resharding"] = Resharding(d)


@eleventh(
    line=INSIDE_GPU,
    also=("gpu_starved", "unmerged_neighbours"),
    like=("small_copies", "redundant_loads", "weights_not_overlapped", "synchronisation", "link_bound"),
    prepare=make_the_resharding,
)
def trained_weights_copied_within_the_device_to_where_the_engine_has_them(d: Device) -> Truth:
    """After each training step 16 tensors of 64 MiB go to the engine's own places on the device, by two side streams.

    The streams wait for the trainer's kernel, and the rollout's kernel for both streams. How long the device takes to
    copy was measured before, and the two kernels take as long together: nearly half of the time only copies run.
    """
    both, step = MADE.pop("resharding"), 0
    d.spent.restart()
    for step in turns():
        both.train(step, both.took // 2)
        both.move()
        d.launch(both.took // 2)
        paced_and_read(d, step, both.moves, lag=2)
    d.sync(d.compute)
    d.spent.add(INSIDE_GPU, both.moves.read())
    d.spent.stop()
    last = both.tensors - 1
    d.copy(d.host, both.place(last) + both.size - 64, 64, D2H, d.compute)
    d.sync(d.compute)
    if ct.string_at(d.host, 64) != bytes([(step * both.tensors + last) % 251]) * 64:
        raise RuntimeError("the engine has other weights than were trained")
    for at in (both.trained, both.served):
        d.check(d.lib.cudaFree(at))
    return {}


@eleventh(
    line=BELOW_LINK_RATE,
    or_lines=(AT_LINK_RATE,),
    also=("small_copies", "weights_not_overlapped", "gpu_starved", "unmerged_neighbours", "link_bound"),
    like=("pageable_memory", "launch_queue_saturation", "allocation_on_hot_path", "redundant_loads"),
)
def scales_that_lie_between_the_keys_taken_out_by_a_2d_copy_for_each_layer(d: Device) -> Truth:
    """Before each step of 0.5 ms a sequence's scales come, 32 of each token's 2,080 bytes for a layer, by 2D copies.

    A copy has 16,384 rows that cross the link one by one, well below its rate. How long one takes is measured first,
    and so many layers are brought that they take 0.7 ms, between two kernels of one stream and with none beside. Two
    sequences' scales take turns, so that other bytes come than are there.
    """
    width, pitch, rows = 32, 2_080, 16_384 if d.gpu else 1_024
    moves, step = Stretches(d), 0

    def home(sequence: int, layer: int) -> int:
        return d.host + sequence * rows * pitch + layer * width

    def bring(sequence: int, layers: int) -> None:
        moves.begin()
        for layer in range(layers):
            to = d.device + layer * rows * width
            copy_2d(d, (to, width), (home(sequence, layer), pitch), width, rows, H2D, d.compute)
        moves.end()

    took = 0
    for sequence in range(3):
        bring(sequence % 2, 8)
        d.sync(d.compute)
        took, moves.ns = moves.read(), 0
    layers = min(max(8 * 700_000 // max(took, 1), 4), pitch // width - 1)
    d.spent.restart()
    for step in turns():
        bring(step % 2, layers)
        for _ in range(2):
            d.launch(250_000)
        paced_and_read(d, step, moves)
    d.sync(d.compute)
    d.spent.add(BELOW_LINK_RATE, moves.read())
    d.spent.stop()
    for row in (0, rows - 1):
        last = d.device + ((layers - 1) * rows + row) * width
        same(d, last, home(step % 2, layers - 1) + row * pitch, width)
    return {}
