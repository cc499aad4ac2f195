"""Twentieth programs whose kernels wait for copies: workers, ragged rows, a tenant, uneven layers, blocks, a join."""

from __future__ import annotations

import ctypes as ct
import random
import threading

from accounts import Pool, Stretches, paced_and_read, turns
from device import D2H, H2D, Device
from fresh_copies import clear, copy_2d
from registry import (
    AT_LINK_RATE,
    BELOW_LINK_RATE,
    DEVICE,
    INSIDE_GPU,
    NOT_NEEDED,
    KiB,
    Truth,
    in_thread,
    twentieth,
)
from unseen_copies import D2D, same


class Workers:
    """Three workers of an embedding job, each a thread with a stream and one place on the device for its documents.

    Attributes:
        done: batches that each has begun.
    """

    count = 3

    def __init__(self, d: Device, load_us: float, kernels: int, each_ns: int) -> None:
        self.d, self.pool, self.kernels, self.each_ns = d, Pool(d, d.bytes_of(load_us)), kernels, each_ns
        self.kept, self.over, self.done = self.pool.count - 1, False, [0] * self.count  # the pool's end is lost

    def block(self, worker: int, batch: int) -> int:
        """Which block of the pool has the documents of a worker's batch; two that follow each other differ."""
        return (batch * self.count + worker) % self.kept

    def work(self, worker: int) -> None:
        """What a worker does: its batches go to its stream, and it waits for the one before."""
        d, stream, batch = self.d, self.d.copies[16 + worker], 0
        while not self.over:
            self.pool.fetch(worker, self.block(worker, batch), stream)
            for _ in range(self.kernels):
                d.launch(self.each_ns, stream)
            d.record(worker * 16 + batch % 16, stream)
            if batch:
                d.sync_event(worker * 16 + (batch - 1) % 16)
            batch += 1
        self.done[worker] = batch

    def run(self) -> None:
        """All work for 1.5 s; the window ends when all are done."""
        begun = threading.Event()
        threads = [in_thread(lambda worker=worker: begun.wait() and self.work(worker)) for worker in range(self.count)]
        self.d.spent.restart()
        begun.set()
        for _ in turns():
            threads[0].join(0.01)
        self.over = True
        for thread in threads:
            thread.join()
        for worker in range(self.count):
            self.d.sync(self.d.copies[16 + worker])
        self.d.spent.stop()

    def check(self) -> None:
        """Raises unless each has its last documents."""
        end = self.pool.size - 64 * KiB
        for worker, done in enumerate(self.done):
            home = self.d.host + self.block(worker, done - 1) * self.pool.size
            same(self.d, self.d.device + worker * self.pool.size + end, home + end, 64 * KiB)


@twentieth(
    line=AT_LINK_RATE,
    or_lines=(BELOW_LINK_RATE,),  # where two copies at once halve each other's rate
    also=("weights_not_overlapped", "link_bound", "synchronisation", "gpu_starved", "unmerged_neighbours"),
    like=("redundant_loads", "small_copies", "pageable_memory", "load_not_ordered", "launch_queue_saturation"),
)
def documents_of_three_embedding_workers_on_streams_of_their_own_that_share_one_link(d: Device) -> Truth:
    """Three threads embed documents on a stream each; a batch is 0.45 ms of the link, and computes for 0.15 ms.

    Each worker has a batch more on its stream than the one it waits for, so the link always has one to bring, and the
    three together want 1.35 ms of it for 0.45 ms of kernels. So for two thirds of the time, or more, no kernel runs
    while a copy does. Eight batches or so take turns, and each load brings other bytes than are in its place.
    """
    workers = Workers(d, 450, 1, 150_000)
    if workers.kept % workers.count == 0:
        workers.kept -= 1
    workers.run()
    kernels = sum(workers.done) * workers.each_ns
    d.spent.add(AT_LINK_RATE, d.spent.end - d.spent.begin - kernels)
    workers.check()
    return {}


class Ragged:
    """Sixteen sequences of a batch whose rows lie packed on the device, and the padded rows in which a pass wants them.

    Attributes:
        width: bytes of a row; pitch: of a padded one; most: rows of the longest sequence.
    """

    sequences, most, batches = 16, 384, 5

    def __init__(self, d: Device) -> None:
        self.d, self.width, self.pitch = d, *((64 * KiB, 80 * KiB) if d.gpu else (2 * KiB, 3 * KiB))
        chance = random.Random(201)
        self.lengths = [[chance.randrange(128, self.most) for _ in range(self.sequences)] for _ in range(self.batches)]
        self.packed = d.made("cudaMalloc", self.sequences * self.most * self.width)
        self.padded = d.made("cudaMalloc", self.sequences * self.most * self.pitch)

    def end(self, batch: int) -> int:
        """Where the last sequence of a batch has its last packed row."""
        return self.packed + (sum(self.lengths[batch % self.batches]) - 1) * self.width

    def spread(self, batch: int) -> None:
        """Each sequence's rows to its padded ones, by a 2D copy within the device."""
        at = self.packed
        for sequence, rows in enumerate(self.lengths[batch % self.batches]):
            to = self.padded + sequence * self.most * self.pitch
            copy_2d(self.d, (to, self.pitch), (at, self.width), self.width, rows, D2D, self.d.compute)
            at += rows * self.width

    def took(self) -> int:
        """How long the device takes for a batch of usual lengths, ns."""
        moves, best = Stretches(self.d), [1 << 40] * self.batches
        for batch in range(4 * self.batches):
            moves.begin()
            self.spread(batch)
            moves.end()
            self.d.sync(self.d.compute)
            best[batch % self.batches], moves.ns = min(best[batch % self.batches], moves.read()), 0
        return sum(best) // self.batches

    def check(self, batch: int) -> None:
        """Raises unless the last row of a batch was spread as it was cleared; frees all."""
        d, rows = self.d, self.lengths[batch % self.batches][-1]
        last = self.padded + ((self.sequences - 1) * self.most + rows - 1) * self.pitch
        d.copy(d.host, last, 512, D2H, d.compute)
        d.sync(d.compute)
        if ct.string_at(d.host, 512) != bytes([batch % 251]) * 512:
            raise RuntimeError("a padded row has other bytes than the packed one")
        for at in (self.packed, self.padded):
            d.check(d.lib.cudaFree(at))


@twentieth(
    line=INSIDE_GPU,
    also=("gpu_starved", "unmerged_neighbours"),
    like=("small_copies", "redundant_loads", "weights_not_overlapped", "synchronisation", "link_bound"),
)
def a_ragged_batch_laid_out_in_padded_rows_by_2d_copies_within_the_device_before_each_pass(d: Device) -> Truth:
    """Sixteen sequences of 128 to 383 packed rows are laid out in padded rows by a 2D copy each, and then computed.

    The copies stay within the device and stand on the model's stream before the pass. How long they take is measured
    first, for five batches of uneven lengths that take turns, and a pass computes for 0.6 of their mean. Nothing
    crosses the link until the program ends. Passes are submitted two ahead.
    """
    ragged, moves, batch = Ragged(d), Stretches(d), 0
    took = ragged.took()
    d.spent.restart()
    for batch in turns():
        clear(d, ragged.end(batch), batch % 251, 512, d.compute)
        moves.begin()
        ragged.spread(batch)
        moves.end()
        for _ in range(2):
            d.launch(max(took * 3 // 10, 10_000))
        paced_and_read(d, batch, moves, lag=2)
    d.sync(d.compute)
    d.spent.add(INSIDE_GPU, moves.read())
    d.spent.stop()
    ragged.check(batch)
    return {}


@twentieth(
    line=AT_LINK_RATE,
    or_lines=(BELOW_LINK_RATE,),  # where two copies at once halve each other's rate
    also=(
        *("head_of_line_copies", "weights_not_overlapped", "link_bound", "gpu_starved", "synchronisation"),
        "unmerged_neighbours",
    ),
    like=("redundant_loads", "small_copies", "pageable_memory", "load_not_ordered", "slow_tier"),
)
def a_prefix_that_shares_the_link_with_another_tenant_s_new_weights_before_each_prefill(d: Device) -> Truth:
    """A tenant's prefix, 0.25 ms of the link, comes before each prefill of 0.25 ms, beside another's stream of weights.

    The other tenant's thread sends pieces of 0.5 ms to places that no kernel reads, and always has one or two on its
    stream. So a prefix takes half a millisecond or more, whether it waits for a piece or shares the link with it, and
    the one place for prefixes is free only when the prefill before is over: no kernel runs meanwhile.
    """
    pieces, prefix, over, moves, step = Pool(d, d.bytes_of(500)), d.bytes_of(250), threading.Event(), Stretches(d), 0
    first, prefixes = 4, 5  # blocks of the pool: pieces of weights, then prefixes
    home, place = d.host + first * pieces.size, d.device + 3 * pieces.size
    prefixes = min(prefixes, (d.size - 64 * KiB - first * pieces.size) // prefix)
    loads = d.copies[2]

    def send() -> None:
        piece = 0
        while not over.is_set():
            pieces.fetch(piece % 3, piece % first, d.copies[8])
            d.record(piece % 8, d.copies[8])
            if piece:
                d.sync_event((piece - 1) % 8)
            piece += 1

    thread = in_thread(send)
    d.spent.restart()
    for step in turns():
        moves.begin()
        d.order(loads, d.compute, 16 + step % 16)
        d.copy(place, home + step % prefixes * prefix, prefix, H2D, loads)
        d.order(d.compute, loads, 32 + step % 16)
        moves.end()
        d.launch(250_000)
        paced_and_read(d, step, moves, lag=2)
    d.sync(d.compute)
    d.spent.add(AT_LINK_RATE, moves.read())
    d.spent.stop()
    over.set()
    thread.join()
    end = prefix - 64 * KiB
    same(d, place + end, home + step % prefixes * prefix + end, 64 * KiB)
    return {}


class Uneven:
    """Layers of which each second one has many experts and those between are small; both kinds have one slot.

    Attributes:
        sizes: bytes of a small and a large layer; kinds: how many of each there are.
    """

    kinds = 3

    def __init__(self, d: Device, small_us: float, large_us: float) -> None:
        self.d, self.sizes = d, (d.bytes_of(small_us), d.bytes_of(large_us))

    def home(self, layer: int) -> int:
        """Where a layer is on the host."""
        large, number = layer % 2, layer // 2 % self.kinds
        return self.d.host + (self.kinds * self.sizes[0] if large else 0) + number * self.sizes[large]

    def slot(self, layer: int, places: int = 1) -> int:
        """Where a layer comes to."""
        large, number = layer % 2, layer // 2 % places
        return self.d.device + (places * self.sizes[0] if large else 0) + number * self.sizes[large]

    def bring(self, layer: int, stream: int, places: int = 1) -> None:
        """A layer to its slot, behind the kernels of the layer that has had it."""
        d, before = self.d, layer - 2 * places
        if before >= 0:
            d.check(d.lib.cudaStreamWaitEvent(stream, d.events[32 + before % 32], 0))
        d.copy(self.slot(layer, places), self.home(layer), self.sizes[layer % 2], H2D, stream)
        d.record(layer % 32, stream)

    def check(self, layer: int, places: int = 1) -> None:
        """Raises unless a layer is in its slot."""
        end = self.sizes[layer % 2] - 64 * KiB
        same(self.d, self.slot(layer, places) + end, self.home(layer) + end, 64 * KiB)


@twentieth(
    line=AT_LINK_RATE,
    also=("weights_not_overlapped", "link_bound", "gpu_starved"),
    like=("redundant_loads", "small_copies", "pageable_memory", "synchronisation", "load_not_ordered"),
)
def layers_of_two_sizes_prefetched_one_ahead_so_that_each_large_one_has_a_small_one_s_time(d: Device) -> Truth:
    """Each second layer has many experts, 0.7 ms of the link, and those between 0.08 ms; all compute for 0.2 ms.

    A layer is brought beside the one before it. A large one has a small one's 0.2 ms for its 0.7 ms, as its slot is
    that of the large one before; so for half a millisecond of each 0.9 ms no kernel runs and the copy does. Three of
    each size take turns in one slot for each size. Layers are submitted two ahead.
    """
    layers, loads, moves, layer = Uneven(d, 80, 700), d.copies[5], Stretches(d), 0
    for layer in (0, 1):
        layers.bring(layer, loads)
    d.sync(loads)
    d.spent.restart()
    for layer in turns():
        moves.begin()
        d.check(d.lib.cudaStreamWaitEvent(d.compute, d.events[layer % 32], 0))
        moves.end()
        d.launch(200_000)
        d.record(32 + layer % 32, d.compute)
        layers.bring(layer + 2, loads)
        paced_and_read(d, layer, moves, lag=2)
    d.sync(d.compute)
    d.spent.add(AT_LINK_RATE, moves.read())
    d.spent.stop()
    for last in (layer + 1, layer + 2):
        d.sync(loads)
        layers.check(last)
    return {}


@twentieth(
    "redundant_loads",
    line=NOT_NEEDED,
    also=("weights_not_overlapped", "link_bound", "unmerged_neighbours"),
    like=("small_copies", "pageable_memory", "synchronisation", "load_not_ordered", "launch_queue_saturation"),
    blind=DEVICE,
)
def blocks_of_a_conversation_loaded_again_by_a_connector_that_forgets_what_is_resident(d: Device) -> Truth:
    """A connector's table of resident blocks is emptied after each batch, and the next one loads its twelve again.

    A conversation has eight batches in a row, 0.4 ms of kernels each, and its blocks go to the same slots before each
    of them, by one batch call of 0.48 ms on the model's stream; neither side changes meanwhile. So seven of eight loads
    bring what is there: 0.42 ms of each 0.88 ms. The next conversation has other blocks for these slots.
    """
    each, batches, pool, step = 12, 8, Pool(d, d.bytes_of(40)), 0
    talks, again, needed = min((pool.count - 1) // each, 5), Stretches(d), Stretches(d)
    resident, slots = dict[int, int](), [number * 2 for number in range(each)]
    for step in turns():
        talk = step // batches % talks
        blocks = [talk * each + number for number in range(each)]
        missing = [(block, slot) for block, slot in zip(blocks, slots, strict=True) if resident.get(slot) != block]
        stretch = again if step % batches else needed
        stretch.begin()
        places = pool.places([block for block, _ in missing], [slot for _, slot in missing])
        d.batch([to for to, _ in places], [source for _, source in places], pool.size, d.compute)
        stretch.end()
        for _ in range(2):
            d.launch(200_000)
        resident.update((slot, block) for block, slot in missing)
        resident.clear()  # the trouble: it believes that a batch's end has freed them
        paced_and_read(d, step, again, lag=2)
        needed.read(2)
    d.sync(d.compute)
    d.spent.add(NOT_NEEDED, again.read())
    d.spent.add(AT_LINK_RATE, needed.read())
    d.spent.stop()
    end, talk = pool.size - 64 * KiB, step // batches % talks
    for number in (0, each - 1):
        home = d.host + (talk * each + number) * pool.size
        same(d, d.device + slots[number] * pool.size + end, home + end, 64 * KiB)
    return {"redundant_loads": again.ns}


@twentieth(
    line=AT_LINK_RATE,
    or_lines=(BELOW_LINK_RATE,),  # where four copies at once share the rate
    also=("weights_not_overlapped", "link_bound", "wasted_stores", "gpu_starved", "unmerged_neighbours"),
    like=("redundant_loads", "small_copies", "pageable_memory", "store_not_ordered", "synchronisation"),
)
def a_step_that_joins_all_four_side_streams_though_it_needs_none_of_their_stores(d: Device) -> Truth:
    """Behind each step of 0.35 ms four side streams store a block of 0.15 ms each, and the next step joins all four.

    The step writes other blocks than leave, so it has no need to wait, but an event of each side stream is waited for
    before its kernels: for 0.6 ms of each 0.95 ms no kernel runs and stores do. Steps are submitted two ahead; two sets
    of blocks take turns on the device, and each step gives its set new bytes.
    """
    pool, sides, moves, step = Pool(d, d.bytes_of(150)), d.copies[9:13], Stretches(d), 0
    homes = pool.count - 1
    for step in turns():
        first = step % 2 * len(sides)
        for _ in range(2):
            d.launch(175_000)
        for side in range(len(sides)):
            clear(d, d.device + (first + side) * pool.size, (step * 4 + side) % 251, 4 * KiB, d.compute)
        d.record(step % 16, d.compute)
        moves.begin()
        for number, side in enumerate(sides):
            d.check(d.lib.cudaStreamWaitEvent(side, d.events[step % 16], 0))
            home = d.host + (step * len(sides) + number) % homes * pool.size
            d.copy(home, d.device + (first + number) * pool.size, pool.size, D2H, side)
            d.order(d.compute, side, 16 + step % 8 * 4 + number)
        moves.end()
        paced_and_read(d, step, moves, lag=2)
    d.sync(d.compute)
    d.spent.add(AT_LINK_RATE, moves.read())
    d.spent.stop()
    for number in range(len(sides)):
        home = d.host + (step * len(sides) + number) % homes * pool.size
        if ct.string_at(home, 64) != bytes([(step * 4 + number) % 251]) * 64:
            raise RuntimeError("a block has left with other bytes than its step computed")
    return {}
