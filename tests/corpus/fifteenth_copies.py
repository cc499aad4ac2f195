"""Fifteenth programs whose kernels wait for copies: layers, documents, speech, skips, rows, a bank, an index."""

from __future__ import annotations

import ctypes as ct
from typing import Any

from accounts import Pool, Stretches, paced, paced_and_read, turns
from device import D2H, H2D, Attributes, Device
from fresh_copies import clear, copy_2d
from registry import (
    AT_LINK_RATE,
    BELOW_LINK_RATE,
    DEVICE,
    INSIDE_GPU,
    NOT_NEEDED,
    SUBMITTING,
    KiB,
    MiB,
    Truth,
    fifteenth,
)
from unseen_copies import D2D, same

MADE: dict[str, Any] = {}  # before a program begins


@fifteenth(
    line=AT_LINK_RATE,
    also=("weights_not_overlapped", "link_bound"),
    like=("redundant_loads", "small_copies", "load_not_ordered", "synchronisation", "launch_queue_saturation"),
)
def layers_of_four_bits_through_one_landing_place_that_is_free_when_they_are_unpacked(d: Device) -> Truth:
    """A quantised layer lands for 0.6 ms, is unpacked for 0.1 ms to where it computes, and computes for 0.25 ms.

    There is one landing place: the next layer lands when this one is unpacked, beside its 0.25 ms of computing, and no
    earlier. So of each 0.7 ms there are 0.35 ms in which the next layer lands and no kernel runs. Layers are submitted
    two ahead, and five of them take turns, so that each brings other bytes than are there.
    """
    pool, loads, waits, layer = Pool(d, d.bytes_of(600)), d.copies[5], Stretches(d), 0
    layers = min(pool.count, 5)
    for layer in turns():
        if layer:
            d.check(d.lib.cudaStreamWaitEvent(loads, d.events[(layer - 1) % 8], 0))  # it is unpacked
        pool.fetch(0, layer % layers, loads)
        waits.begin()
        d.order(d.compute, loads, 16 + layer % 8)
        waits.end()
        d.launch(100_000)
        d.record(layer % 8, d.compute)
        d.launch(250_000)
        paced_and_read(d, layer, waits, lag=2)
    d.sync(d.compute)
    d.spent.add(AT_LINK_RATE, waits.read())
    d.spent.stop()
    same(d, d.device, d.host + layer % layers * pool.size, pool.size)
    return {}


@fifteenth(
    line=AT_LINK_RATE,
    also=(
        *("weights_not_overlapped", "link_bound", "synchronisation", "gpu_starved", "unmerged_neighbours"),
        "wasted_stores",
    ),
    like=("redundant_loads", "small_copies", "pageable_memory", "launch_queue_saturation", "aliased_stream"),
)
def vectors_of_the_documents_that_a_first_stage_has_chosen_brought_before_they_are_scored(d: Device) -> Truth:
    """A first stage of 0.2 ms chooses documents, is read back, their vectors come in 0.72 ms, and 0.25 ms score them.

    Which of the documents come is known only when the choice is there, so nothing of them can be on its way before. A
    wait and the first of twelve copies take some 0.03 ms; then the scoring kernel stands behind the copies on the one
    stream. Each document's place gets another one by the query.
    """
    pool, moves, query, right, back = Pool(d, d.bytes_of(60)), Stretches(d), 0, 0, d.size - 4 * KiB
    chosen, documents = 12, min(pool.count - 2, 53)
    homes: list[int] = []
    for query in turns():
        d.launch(200_000)
        clear(d, d.device + back, query % 251, 64, d.compute)
        d.copy(d.host + back, d.device + back, 64, D2H, d.compute)
        d.sync(d.compute)
        moves.read()
        choice = ct.string_at(d.host + back, 64)
        right += choice == bytes([query % 251]) * 64
        homes = [(choice[0] * 13 + i * 7) % documents for i in range(chosen)]
        moves.begin()
        for i, home in enumerate(homes):
            pool.fetch(i * 3, home, d.compute)
        moves.end()
        d.launch(250_000)
    d.sync(d.compute)
    d.spent.add(AT_LINK_RATE, moves.read())
    d.spent.stop()
    for i in (0, chosen - 1):
        same(d, d.device + i * 3 * pool.size, d.host + homes[i] * pool.size, pool.size)
    if right != query + 1:
        raise RuntimeError("a choice is another than was computed")
    return {}


@fifteenth(
    "redundant_loads",
    line=NOT_NEEDED,
    also=("weights_not_overlapped", "link_bound", "unmerged_neighbours"),
    like=("small_copies", "pageable_memory", "synchronisation", "load_not_ordered", "aliased_stream"),
    blind=DEVICE,
)
def windows_of_speech_sent_whole_to_a_ring_that_has_five_of_their_six_chunks(d: Device) -> Truth:
    """A window of speech is six chunks and goes on by one; all six are sent to their places in a ring of six.

    A chunk takes the link 0.1 ms and the encoder's 0.45 ms stand behind the six on one stream. A chunk has the same
    place in each window, which no other has before the window after its last: five of six loads bring what is there,
    0.5 ms of each 1.05 ms. Windows are submitted one ahead.
    """
    pool, chunks, moves, window = Pool(d, d.bytes_of(100)), 6, Stretches(d), 0
    recorded = min(pool.count - 1, 29)
    for window in turns():
        moves.begin()
        for chunk in range(window, window + chunks):
            pool.fetch(chunk % chunks, chunk % recorded, d.compute)
        moves.end()
        for _ in range(3):
            d.launch(150_000)
        paced_and_read(d, window, moves)
    d.sync(d.compute)
    lost = moves.read() * (chunks - 1) // chunks
    d.spent.add(NOT_NEEDED, lost)
    d.spent.add(AT_LINK_RATE, moves.ns - lost)
    d.spent.stop()
    for chunk in (window, window + chunks - 1):
        same(d, d.device + chunk % chunks * pool.size, d.host + chunk % recorded * pool.size, pool.size)
    return {"redundant_loads": lost}


class Levels:
    """What an up block of a U-Net joins, row by row: what came from below, and what the way down has left.

    Attributes:
        below, skipped, joined: where they are on the device; width: of a row of one of them; rows: how many.
    """

    width, blocks = 32 * KiB, 4

    def __init__(self, d: Device) -> None:
        self.d, self.rows = d, 4_096 if d.gpu else 32
        self.size = self.width * self.rows
        self.below, self.skipped = (d.made("cudaMalloc", self.size) for _ in range(2))
        self.joined = d.made("cudaMalloc", 2 * self.size)
        moves, taken = Stretches(d), list[int]()
        for step in range(4):
            moves.ns = 0
            d.launch(200_000)
            self.left(step)
            moves.begin()
            self.join()
            moves.end()
            d.sync(d.compute)
            taken.append(moves.read())
        self.took = min(taken)

    def left(self, number: int) -> None:
        """Marks the ends of both inputs as computed anew."""
        for at, one in ((self.below, number % 251), (self.skipped, 250 - number % 251)):
            clear(self.d, at + self.size - 64, one, 64, self.d.compute)

    def join(self) -> None:
        """Both inputs into the rows of the one that the block reads."""
        for half, at in enumerate((self.below, self.skipped)):
            to = self.joined + half * self.width, 2 * self.width
            copy_2d(self.d, to, (at, self.width), self.width, self.rows, D2D, self.d.compute)

    def ends(self) -> tuple[bytes, bytes]:
        """The ends of both halves of the last row."""
        d = self.d
        for half in range(2):
            at = self.joined + 2 * self.size - self.width * (2 - half) + self.width - 64
            d.copy(d.host + half * 64, at, 64, D2H, d.compute)
        d.sync(d.compute)
        return ct.string_at(d.host, 64), ct.string_at(d.host + 64, 64)

    def free(self) -> None:
        """Gives the memory back."""
        for at in (self.below, self.skipped, self.joined):
            self.d.check(self.d.lib.cudaFree(at))


def make_the_levels(d: Device) -> None:
    """The memory, and how long the device takes to join."""
    MADE["levels"] = Levels(d)


@fifteenth(
    line=INSIDE_GPU,
    also=("gpu_starved",),
    like=("small_copies", "redundant_loads", "unmerged_neighbours", "weights_not_overlapped", "synchronisation"),
    prepare=make_the_levels,
)
def skips_of_a_u_net_joined_row_by_row_with_what_comes_from_below_before_each_up_block(d: Device) -> Truth:
    """Before each of four up blocks its two inputs of 128 MiB are copied within the device into the rows of one.

    The two 2D copies stand on the model's stream between what computed the inputs and the block. How long the device
    takes for them was measured before, and a block computes for 0.8 of that: above half of the time only copies run.
    """
    levels, moves, step, number = MADE.pop("levels"), Stretches(d), 0, 0
    d.spent.restart()
    for step in turns():
        for block in range(levels.blocks):
            number = step * levels.blocks + block
            levels.left(number)
            moves.begin()
            levels.join()
            moves.end()
            for _ in range(2):
                d.launch(max(levels.took * 2 // 5, 10_000))
        paced_and_read(d, step, moves, each=levels.blocks)
    d.sync(d.compute)
    d.spent.add(INSIDE_GPU, moves.read())
    d.spent.stop()
    ends = levels.ends()
    levels.free()
    if ends != (bytes([number % 251]) * 64, bytes([250 - number % 251]) * 64):
        raise RuntimeError("a block was given other inputs than were computed")
    return {}


class Rows:
    """Rows of a cache that leave by one batch call, from scattered places to scattered places.

    Attributes:
        count: how many.
    """

    row, room, places = 512, 2 * KiB, 16_384

    def __init__(self, d: Device) -> None:
        self.d, self.count = d, 512
        self.attributes, self.index = Attributes(1, 1, 0, 2, 0, 0), (ct.c_size_t * 1)(0)

    def slot(self, i: int) -> int:
        """Where a row is on the device."""
        return self.d.device + i * 8_209 % self.places * self.room

    def home(self, turn: int, i: int) -> int:
        """Where it goes to: one of two areas, in turn."""
        return self.d.host + (turn % 2 * self.places // 2 + i * 2_053 % (self.places // 2)) * self.room

    def lists(self, turn: int) -> tuple[object, object, object]:
        """Places and sizes for the call."""
        n, p = self.count, ct.c_void_p
        targets, sources = ([self.home(turn, i) for i in range(n)], [self.slot(i) for i in range(n)])
        return (p * n)(*targets), (p * n)(*sources), (ct.c_size_t * n)(*[self.row] * n)

    def leave(self, lists: tuple[object, object, object], moves: Stretches) -> None:
        """All rows, on the model's stream."""
        d = self.d
        moves.begin()
        d.check(
            d.lib.cudaMemcpyBatchAsync(*lists, self.count, ct.byref(self.attributes), self.index, 1, d.compute),
        )
        moves.end()


@fifteenth(
    line=BELOW_LINK_RATE,
    or_lines=(SUBMITTING,),  # the one call takes time for each of its pieces, too
    also=("descriptor_bound_batch", "small_copies", "weights_not_overlapped", "gpu_starved", "wasted_stores"),
    like=("redundant_loads", "unmerged_neighbours", "pageable_memory", "synchronisation", "launch_queue_saturation"),
)
def rows_of_accepted_guesses_that_leave_by_one_batch_call_before_they_are_overwritten(d: Device) -> Truth:
    """Behind a verification of 0.4 ms the rows of all accepted guesses, 512 bytes each, leave by one batch call.

    They lie scattered and stand on the model's stream, as the next guesses overwrite them. The link needs 0.01 us for a
    row and the GPU several times that. How long 512 take is measured first, behind a kernel, and so many are taken that
    they last 0.9 ms, or all that half of the area has.
    """
    rows, moves, step = Rows(d), Stretches(d), 0
    d.copy(d.device, d.host, rows.places * rows.room, H2D, d.compute)
    few = rows.lists(0)
    for _ in range(4):
        moves.ns = 0
        d.launch(2_000_000)  # the device has the whole batch when it begins with it
        rows.leave(few, moves)
        d.sync(d.compute)
        moves.read()
    rows.count = min(max(512 * 900_000 // max(moves.ns, 1), 256), rows.places // 2)
    both, moves.ns = [rows.lists(turn) for turn in range(2)], 0
    d.spent.restart()
    for step in turns():
        for _ in range(2):
            d.launch(200_000)
        clear(d, rows.slot(rows.count - 1), step % 251, rows.row, d.compute)
        rows.leave(both[step % 2], moves)
        paced_and_read(d, step, moves)
    d.sync(d.compute)
    d.spent.add(BELOW_LINK_RATE, moves.read())
    d.spent.stop()
    if ct.string_at(rows.home(step, rows.count - 1), rows.row) != bytes([step % 251]) * rows.row:
        raise RuntimeError("another row has left than was accepted")
    same(d, rows.slot(0), rows.home(step, 0), rows.row)
    return {}


@fifteenth(
    line=AT_LINK_RATE,
    also=("weights_not_overlapped", "link_bound", "wasted_stores"),
    like=("redundant_loads", "small_copies", "load_not_ordered", "store_not_ordered", "synchronisation"),
)
def negatives_of_a_memory_bank_that_come_when_a_batch_s_features_have_left_for_it(d: Device) -> Truth:
    """A contrastive trainer: features in 0.3 ms, they leave for the bank, a part of which comes, then 0.25 ms of loss.

    The features take the link 0.05 ms, the part of the bank 0.6 ms, both on one side stream behind the features'
    kernels, and the loss stands behind the part by an event: 0.65 ms of each 1.2 ms with a copy and no kernel. Four
    parts take turns, and the features are written into the next one. Steps are submitted one ahead.
    """
    pool, few, side, moves, step = Pool(d, d.bytes_of(600)), d.bytes_of(50), d.copies[7], Stretches(d, d.copies[7]), 0
    parts, features = min(pool.count, 4), d.device + 2 * pool.size
    for step in turns():
        clear(d, features, step % 251, few, d.compute)
        for _ in range(2):
            d.launch(150_000)
        d.order(side, d.compute, step % 8 * 2)
        moves.begin()
        d.copy(d.host + (step + 1) % parts * pool.size, features, few, D2H, side)
        pool.fetch(0, step % parts, side)
        moves.end()
        d.order(d.compute, side, step % 8 * 2 + 1)
        d.launch(250_000)
        paced_and_read(d, step, moves)
    d.sync(d.compute)
    d.spent.add(AT_LINK_RATE, moves.read())
    d.spent.stop()
    same(d, d.device, d.host + step % parts * pool.size, pool.size)
    if ct.string_at(d.host + (step + 1) % parts * pool.size, 64) != bytes([step % 251]) * 64:
        raise RuntimeError("the bank has other features than were computed")
    return {}


@fifteenth(
    "redundant_loads",
    line=NOT_NEEDED,
    also=("weights_not_overlapped", "link_bound"),
    like=("small_copies", "unmerged_neighbours", "pageable_memory", "synchronisation", "aliased_stream"),
    blind=DEVICE,
)
def a_rank_s_columns_of_the_vocabulary_s_matrix_sent_again_by_a_2d_copy_before_each_step(d: Device) -> Truth:
    """Before each step of 0.5 ms a rank's columns, 32 KiB of each row's 128 KiB, come to their one place by a 2D copy.

    It takes the link 0.6 ms and stands on the model's stream. The columns were sent and waited for before the first
    step and nothing changes them on either side, so all of the window's copies bring what is there.
    """
    width, pitch, rank, moves, step = 32 * KiB, 128 * KiB, 2, Stretches(d), 0
    rows = min(max(d.bytes_of(600) // width, 16), (d.size - MiB) // pitch)

    def send() -> None:
        copy_2d(d, (d.device, width), (d.host + rank * width, pitch), width, rows, H2D, d.compute)

    send()
    d.sync(d.compute)
    d.spent.restart()
    for step in turns():
        moves.begin()
        send()
        moves.end()
        for _ in range(2):
            d.launch(250_000)
        paced_and_read(d, step, moves)
    d.sync(d.compute)
    lost = moves.read()
    d.spent.add(NOT_NEEDED, lost)
    d.spent.stop()
    same(d, d.device + (rows - 1) * width, d.host + (rows - 1) * pitch + rank * width, width)
    return {"redundant_loads": lost}


@fifteenth(
    line=AT_LINK_RATE,
    also=("weights_not_overlapped", "link_bound", "wasted_stores"),
    like=("redundant_loads", "small_copies", "load_not_ordered", "python_or_gil_bound", "aliased_stream"),
)
def shards_of_a_vector_index_that_pass_through_two_places_for_each_batch_of_queries(d: Device) -> Truth:
    """An index of five shards passes through two places on the device; a shard comes in 0.5 ms and is searched in 0.15.

    A load waits for the search of the shard before the last, whose place it takes, and a search for its own shard, by
    events. So shards come without a pause and the search has to wait for 0.35 ms of each 0.5 ms. The best of a batch
    are 512 bytes, read behind its last search; shards are submitted two ahead, and five are never two of one place.
    """
    pool, loads, waits, shard, back = Pool(d, d.bytes_of(500)), d.copies[10], Stretches(d), 0, d.size - 4 * KiB
    shards = min(pool.count, 5)
    batch = 0
    for shard in turns():
        place = shard % 2
        if shard > 1:
            d.check(d.lib.cudaStreamWaitEvent(loads, d.events[place], 0))
        pool.fetch(place, shard % shards, loads)
        waits.begin()
        d.order(d.compute, loads, 8 + shard % 8)
        waits.end()
        d.launch(150_000)
        d.record(place, d.compute)
        if shard % shards == shards - 1:
            batch = shard // shards
            clear(d, d.device + back, batch % 251, 512, d.compute)
            d.copy(d.host + back, d.device + back, 512, D2H, d.compute)
        paced(d, shard, 2)
        if shard > 1:
            waits.read(2)
    d.sync(d.compute)
    d.spent.add(AT_LINK_RATE, waits.read())
    d.spent.stop()
    if shard >= shards - 1 and ct.string_at(d.host + back, 512) != bytes([batch % 251]) * 512:
        raise RuntimeError("the best are others than were found")
    same(d, d.device + shard % 2 * pool.size, d.host + shard % shards * pool.size, pool.size)
    return {}
