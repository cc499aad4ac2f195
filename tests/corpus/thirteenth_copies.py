"""Thirteenth programs whose kernels wait for copies: a codebook, hops, weights, lists, a replay, frames, a ring."""

from __future__ import annotations

import ctypes as ct
import random

from accounts import Pool, Stretches, paced_and_read, turns
from device import D2H, H2D, Device
from fresh_copies import clear
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
    thirteenth,
)
from unseen_copies import D2D, same


@thirteenth(
    "redundant_loads",
    line=NOT_NEEDED,
    also=("weights_not_overlapped", "link_bound", "unmerged_neighbours"),
    like=("small_copies", "pageable_memory", "synchronisation", "load_not_ordered", "launch_queue_saturation"),
    blind=DEVICE,
)
def a_codebook_sent_with_the_indices_of_each_vector_quantised_layer(d: Device) -> Truth:
    """A layer's indices come, 0.1 ms of the link, and with them the codebook that all layers share, 0.4 ms.

    Both stand on the model's stream before the layer's kernel of 0.4 ms. The codebook goes from one place to one place
    and nobody ever changes it on either side, so each of its loads but the first brings what is there: 0.4 ms of each
    0.9 ms. The indices of some layers take turns in one slot, so those loads are needed.
    """
    book, indices, layer = d.bytes_of(400), d.bytes_of(100), 0
    slot, layers = d.device + book + MiB, min((d.size - book - MiB) // indices - 1, 8)
    again, needed = Stretches(d), Stretches(d)

    def home(number: int) -> int:
        return d.host + book + MiB + number % layers * indices

    d.copy(d.device, d.host, book, H2D, d.compute)
    d.sync(d.compute)
    d.spent.restart()
    for layer in turns():
        needed.begin()
        d.copy(slot, home(layer), indices, H2D, d.compute)
        needed.end()
        again.begin()
        d.copy(d.device, d.host, book, H2D, d.compute)
        again.end()
        for _ in range(2):
            d.launch(200_000)
        paced_and_read(d, layer, again, lag=2)
        needed.read(2)
    d.sync(d.compute)
    d.spent.add(NOT_NEEDED, again.read())
    d.spent.add(AT_LINK_RATE, needed.read())
    d.spent.stop()
    same(d, slot, home(layer), indices)
    same(d, d.device + book - 64 * KiB, d.host + book - 64 * KiB, 64 * KiB)
    return {"redundant_loads": again.ns}


@thirteenth(
    "redundant_loads",
    line=NOT_NEEDED,
    also=("weights_not_overlapped", "link_bound", "unmerged_neighbours"),
    like=("small_copies", "pageable_memory", "synchronisation", "aliased_stream", "launch_queue_saturation"),
    blind=DEVICE,
)
def all_hops_of_a_speech_window_sent_again_when_one_new_hop_has_come(d: Device) -> Truth:
    """A recogniser looks at the last 16 hops of audio, and before each step of 0.5 ms all 16 go to their ring of slots.

    A hop has its own slot of the ring, and takes the link 30 us. The newest one takes the slot of the one that has left
    the window; the other fifteen are where they were sent the step before, and no kernel writes there: 0.45 ms of each
    0.98 ms. All copies stand on the model's stream, and steps are launched two ahead.
    """
    window, pool, step = 16, Pool(d, d.bytes_of(30)), 0
    hops, moves = min((pool.count - 1) // window, 5) * window, Stretches(d)

    def send(hop: int) -> None:
        pool.fetch(hop % window, hop % hops, d.compute)

    for hop in range(window - 1):
        send(hop)
    d.sync(d.compute)
    d.spent.restart()
    for step in turns():
        moves.begin()
        for hop in range(step, step + window):
            send(hop)
        moves.end()
        for _ in range(2):
            d.launch(250_000)
        paced_and_read(d, step, moves, lag=2)
    d.sync(d.compute)
    lost = moves.read() * (window - 1) // window
    d.spent.add(NOT_NEEDED, lost)
    d.spent.add(AT_LINK_RATE, moves.ns - lost)
    d.spent.stop()
    for hop in (step, step + window - 1):
        same(d, d.device + hop % window * pool.size, d.host + hop % hops * pool.size, pool.size)
    return {"redundant_loads": lost}


@thirteenth(
    line=AT_LINK_RATE,
    also=("weights_not_overlapped", "link_bound"),
    like=("redundant_loads", "small_copies", "load_not_ordered", "aliased_stream", "launch_queue_saturation"),
)
def packed_weights_through_one_staging_place_that_a_dequantising_kernel_empties(d: Device) -> Truth:
    """A layer's packed weights come to one staging place, a kernel of 0.1 ms unpacks them, and the layer takes 0.25 ms.

    The next layer's weights may come as soon as the place was unpacked, beside the layer, by events of both streams.
    They take the link 0.7 ms, so for 0.45 ms of each 0.8 ms the layer is over and the next cannot be unpacked: a copy
    runs and no kernel. Layers take turns, so that each brings other bytes than are there.
    """
    size, loads, waits, layer = d.bytes_of(700), d.copies[5], Stretches(d), 0
    layers = min((d.size - 64 * KiB) // size, 5)
    for layer in turns():
        if layer:
            d.check(d.lib.cudaStreamWaitEvent(loads, d.events[16 + (layer - 1) % 16], 0))
        d.copy(d.device, d.host + layer % layers * size, size, H2D, loads)
        waits.begin()
        d.order(d.compute, loads, layer % 16)
        waits.end()
        d.launch(100_000)
        d.record(16 + layer % 16, d.compute)
        d.launch(250_000)
        paced_and_read(d, layer, waits, lag=2)
    d.sync(d.compute)
    d.spent.add(AT_LINK_RATE, waits.read())
    d.spent.stop()
    end = size - 64 * KiB
    same(d, d.device + end, d.host + layer % layers * size + end, 64 * KiB)
    return {}


@thirteenth(
    line=AT_LINK_RATE,
    also=("weights_not_overlapped", "link_bound"),
    like=("redundant_loads", "small_copies", "pageable_memory", "synchronisation", "python_or_gil_bound"),
)
def lists_of_a_vector_index_brought_one_by_one_as_a_query_s_probes_come_to_them(d: Device) -> Truth:
    """A batch of queries is compared with the centres for 0.05 ms, then four lists of vectors come, each scanned alone.

    A list takes the link 0.2 ms and its scan 0.15 ms, one after another on one stream: 0.8 ms of each 1.45 ms is a
    copy's. Batches are submitted two ahead. Thirteen lists take turns in two slots, so that each load brings other
    bytes than are there.
    """
    pool, probes, moves, batch = Pool(d, d.bytes_of(200)), 4, Stretches(d), 0
    lists = min(pool.count - 1, 13)

    def asked(number: int) -> int:
        return number * 5 % lists

    for batch in turns():
        d.launch(50_000)
        for probe in range(probes):
            moves.begin()
            pool.fetch(probe % 2, asked(batch * probes + probe), d.compute)
            moves.end()
            d.launch(150_000)
        paced_and_read(d, batch, moves, each=probes, lag=2)
    d.sync(d.compute)
    d.spent.add(AT_LINK_RATE, moves.read())
    d.spent.stop()
    for probe in (probes - 2, probes - 1):
        at = d.device + (probe % 2 + 1) * pool.size - 64 * KiB
        same(d, at, d.host + (asked(batch * probes + probe) + 1) * pool.size - 64 * KiB, 64 * KiB)
    return {}


class Replay:
    """A buffer of transitions in pinned memory: states, actions and the states after them, by field.

    Attributes:
        fields: for each its place, the size of one, and how far apart they lie; order: in which they are drawn.
    """

    rows, most = 1_499, 160

    def __init__(self, d: Device) -> None:
        self.d, whole = d, 8 * KiB
        self.fields = [(0, whole, whole + 512), (20 * MiB, 512, 1_536), (30 * MiB, whole, whole + 512)]
        self.order = random.Random(131).sample(range(self.rows), self.rows)

    def row(self, update: int, i: int, count: int) -> int:
        """The number of the i-th transition that an update has."""
        return self.order[(update * count + i) % self.rows]

    def place(self, field: int, i: int) -> int:
        """Where an update's i-th transition comes to."""
        at, _, apart = self.fields[field]
        return self.d.device + at + i * 2 * apart

    def home(self, field: int, row: int) -> int:
        """Where a transition's field is."""
        at, _, apart = self.fields[field]
        return self.d.host + at + row * apart

    def bring(self, update: int, count: int) -> None:
        """Each field of each of an update's transitions by a copy of its own."""
        rows = [self.row(update, i, count) for i in range(count)]
        for field, (_, size, _) in enumerate(self.fields):
            places = [(self.place(field, i), self.home(field, row)) for i, row in enumerate(rows)]
            self.d.rapid(places, size, H2D, self.d.compute)


@thirteenth(
    "small_copies",
    line=BELOW_LINK_RATE,
    or_lines=(SUBMITTING,),  # where a recorder makes each call longer than its copy takes
    also=("weights_not_overlapped", "gpu_starved", "python_or_gil_bound"),
    like=("redundant_loads", "unmerged_neighbours", "pageable_memory", "allocation_on_hot_path", "aliased_stream"),
)
def transitions_of_a_replay_buffer_brought_field_by_field_before_each_update(d: Device) -> Truth:
    """Before each update of 0.9 ms a learner's transitions come: a state, an action and a state of 8 KiB and 512 bytes.

    Each is a copy on the model's stream, which takes the GPU above 1 us, of which the link needs 0.15 us or less. How
    long 300 take is measured first, behind a kernel, and so many come that they take 0.7 ms, 480 at most. They are
    submitted an update ahead, for which the thread has 1.6 ms, and two updates' fit the stream.
    """
    replay, waits, update, took = Replay(d), Stretches(d), 0, 0
    for probe in range(4):
        d.launch(3_000_000)
        waits.begin()
        replay.bring(probe, 100)
        waits.end()
        d.sync(d.compute)
        took, waits.ns = waits.read(), 0
    count = min(max(100 * 700_000 // max(took, 1), 14), replay.most)
    d.spent.restart()
    for update in turns():
        waits.begin()
        replay.bring(update + 5, count)
        waits.end()
        for _ in range(2):
            d.launch(450_000)
        paced_and_read(d, update, waits)
    d.sync(d.compute)
    d.spent.add(BELOW_LINK_RATE, waits.read())
    d.spent.stop()
    for field, (_, size, _) in enumerate(replay.fields):
        for i in (0, count - 1):
            same(d, replay.place(field, i), replay.home(field, replay.row(update + 5, i, count)), size)
    each = sum(size for _, size, _ in replay.fields)
    return {"small_copies": max(waits.ns - int((update + 1) * count * each / d.bytes_per_us * 1_000), 0)}


class History:
    """The features of a video's last frames, which lie in order in memory of their own on the device."""

    frames = 9

    def __init__(self, d: Device) -> None:
        self.d, self.size = d, (128 if d.gpu else 1) * MiB
        self.at = d.made("cudaMalloc", self.frames * self.size)

    def place(self, frame: int) -> int:
        """Where the oldest, which is 0, or a later one is."""
        return self.at + frame * self.size

    def shift(self) -> None:
        """Each frame but the oldest goes to the place of the one before it."""
        for frame in range(1, self.frames):
            self.d.copy(self.place(frame - 1), self.place(frame), self.size, D2D, self.d.compute)


@thirteenth(
    line=INSIDE_GPU,
    also=("gpu_starved", "unmerged_neighbours"),
    like=("small_copies", "redundant_loads", "weights_not_overlapped", "synchronisation", "link_bound"),
)
def a_history_of_frames_shifted_by_one_place_within_the_device_for_each_new_frame(d: Device) -> Truth:
    """A video model keeps the features of nine frames in order, 128 MiB each, and for a new frame all move up by one.

    Eight copies within the device stand on the model's stream before the kernel that looks at all nine. How long they
    take is measured first, and the kernel computes for 0.8 of that. The new frame's features are made by a kernel, so
    nothing crosses the link.
    """
    history, moves, frame, took = History(d), Stretches(d), 0, 0
    for _ in range(4):
        moves.begin()
        history.shift()
        moves.end()
        d.sync(d.compute)
        took, moves.ns = moves.read(), 0
    newest = history.place(history.frames) - 4 * KiB
    d.spent.restart()
    for frame in turns():
        moves.begin()
        history.shift()
        moves.end()
        clear(d, newest, frame % 251, 4 * KiB, d.compute)
        d.launch(max(took * 4 // 5, 20_000))
        paced_and_read(d, frame, moves, lag=2)
    d.sync(d.compute)
    d.spent.add(INSIDE_GPU, moves.read())
    d.spent.stop()
    for i in range(min(history.frames, frame + 1)):
        end = history.place(history.frames - i) - 512
        d.copy(d.host, end, 512, D2H, d.compute)
        d.sync(d.compute)
        if ct.string_at(d.host, 512) != bytes([(frame - i) % 251]) * 512:
            raise RuntimeError("the history has another frame than came")
    d.check(d.lib.cudaFree(history.at))
    return {}


@thirteenth(
    line=AT_LINK_RATE,
    also=("weights_not_overlapped", "link_bound", "wasted_stores", "unmerged_neighbours"),
    like=("redundant_loads", "small_copies", "aliased_stream", "synchronisation", "store_not_ordered"),
)
def keys_of_a_ring_of_ranks_passed_on_through_the_host_before_each_block_of_attention(d: Device) -> Truth:
    """In a ring a rank attends to a block of keys for 0.4 ms, passes its block on, and takes its neighbour's.

    There is one place for a block: what it has leaves in 0.25 ms for the place of the next rank in pinned memory, and
    only then what the rank before has left comes in 0.25 ms, all on one stream: 0.5 ms of each 0.9 ms. Five blocks of
    the neighbour take turns, and each block is rewritten before it leaves, so all of them are needed.
    """
    pool, turn, moves = Pool(d, d.bytes_of(250)), 0, Stretches(d)
    blocks = min((pool.count - 1) // 2, 5)

    def left(number: int) -> int:
        return d.host + (blocks + number % blocks) * pool.size

    for turn in turns():
        for _ in range(2):
            d.launch(200_000)
        clear(d, d.device, turn % 251, pool.size, d.compute)
        moves.begin()
        d.copy(left(turn), d.device, pool.size, D2H, d.compute)
        pool.fetch(0, turn % blocks, d.compute)
        moves.end()
        paced_and_read(d, turn, moves, lag=2)
    d.sync(d.compute)
    d.spent.add(AT_LINK_RATE, moves.read())
    d.spent.stop()
    end = pool.size - 64 * KiB
    if ct.string_at(left(turn) + pool.size - 64, 64) != bytes([turn % 251]) * 64:
        raise RuntimeError("another block was passed on than the rank had")
    same(d, d.device + end, d.host + turn % blocks * pool.size + end, 64 * KiB)
    return {}
