"""Twenty-second programs of the runtime's calls: matrices, waves, particles, films, codecs, scans, orders, commands.

Importing this registers them. Their author had read the other programs and the names of the causes, and nothing of
what the diagnosis says of any. The second paragraph of a program says why its truth is plain by construction.
"""

from __future__ import annotations

import contextlib
import ctypes as ct
import itertools
import os
import random
import select
import struct
import subprocess
import sys
import tempfile
import threading
import time
import tty
import zlib
from collections.abc import Iterator
from queue import Queue
from typing import Any

from accounts import Pool, Stretches, paced, paced_and_read, stamp, turns
from device import D2H, H2D, Attributes, Device, beyond, now
from eighth_healthy import plain_only
from fresh_copies import clear
from ninth_healthy import token, told
from registry import (
    ALLOCATING,
    AT_LINK_RATE,
    BELOW_LINK_RATE,
    COMPUTING,
    DEVICE,
    ELSEWHERE,
    FULL_QUEUE,
    INSIDE_GPU,
    NO_CPU,
    NOT_NEEDED,
    NOTHING_TO_DO,
    PAGEABLE,
    PYTHON,
    SUBMITTING,
    TIER,
    WAITING,
    KiB,
    MiB,
    Truth,
    in_thread,
    pageable,
    twentysecond,
)
from seventh_host import quickest
from unseen_copies import D2D, same

MADE: dict[str, Any] = {}  # before a program begins
p, z = ct.c_void_p, ct.c_size_t


# ---- kernels wait for copies ----------------------------------------------------------------------------------------


def updates(panels: int, first: int = 3) -> Iterator[tuple[int, int]]:
    """Which panel is brought up to date with which one left of it, over and over again."""
    while True:
        for panel in range(first, panels):
            for left in range(panel):
                yield panel, left


@twentysecond(
    line=AT_LINK_RATE,
    also=(
        *("weights_not_overlapped", "link_bound", "gpu_starved", "unmerged_neighbours", "head_of_line_copies"),
        "wasted_stores",
    ),
    like=("redundant_loads", "small_copies", "pageable_memory", "synchronisation", "launch_queue_saturation"),
)
def panels_left_of_each_panel_of_a_large_matrix_brought_one_by_one_before_they_are_taken_from_it(d: Device) -> Truth:
    """A matrix larger than the device is factorised: all panels left of one come in turn, 0.4 ms each, to one place.

    A panel that has come is taken from the one that is there in 0.25 ms of kernels, on the same stream; so no kernel
    runs beside a copy, for more than 0.4 ms of 0.7 ms. The panel itself comes before its first update and goes home,
    changed, behind its last. No load brings what is in its place, and updates are submitted two ahead.
    """
    pool, moves, turn, left = Pool(d, d.bytes_of(400)), Stretches(d), 0, 0
    own, order = d.device + 2 * pool.size, updates(min(pool.count - 1, 7))
    for turn in turns():
        panel, left = next(order)
        home = d.host + panel * pool.size
        moves.begin()
        if not left:
            d.copy(own, home, pool.size, H2D, d.compute)
        pool.fetch(0, left, d.compute)
        moves.end()
        for _ in range(2):
            d.launch(125_000)
        if left == panel - 1:
            clear(d, own, turn % 251, pool.size, d.compute)
            moves.begin()
            d.copy(home, own, pool.size, D2H, d.compute)
            moves.end()
        paced_and_read(d, turn, moves, each=2, lag=2)
    d.sync(d.compute)
    d.spent.add(AT_LINK_RATE, moves.read())
    d.spent.stop()
    end = pool.size - 64 * KiB
    same(d, d.device + end, d.host + left * pool.size + end, 64 * KiB)
    return {}


@twentysecond(
    line=AT_LINK_RATE,
    also=("weights_not_overlapped", "link_bound", "gpu_starved", "wasted_stores", "head_of_line_copies"),
    like=("redundant_loads", "small_copies", "pageable_memory", "synchronisation", "store_not_ordered"),
)
def fields_of_a_wave_that_leave_after_each_step_forward_and_come_back_in_reverse_for_its_adjoint(d: Device) -> Truth:
    """A wave goes eight steps forward, and each field leaves; then its adjoint goes back and each field comes again.

    A step takes 0.29 ms either way and its field takes the link 0.4 ms, behind it or before it on the same stream. So
    a copy runs and no kernel for 0.4 ms of 0.69 ms or a little more. Each field is a new one, goes out of one place
    and comes into another, which has the field of the step before. Steps are submitted two ahead.
    """
    pool, moves, step, field, back = Pool(d, d.bytes_of(400)), Stretches(d), 0, 0, False
    fields = min(pool.count - 1, 8)
    for step in turns():
        cycle, phase = divmod(step, 2 * fields)
        back = phase >= fields
        field = 2 * fields - 1 - phase if back else phase
        if back:
            moves.begin()
            pool.fetch(2, field, d.compute)
            moves.end()
        for _ in range(2):
            d.launch(145_000)
        if not back:
            clear(d, d.device, (cycle * fields + field) % 251, pool.size, d.compute)
            moves.begin()
            d.copy(d.host + field * pool.size, d.device, pool.size, D2H, d.compute)
            moves.end()
        paced_and_read(d, step, moves, lag=2)
    d.sync(d.compute)
    d.spent.add(AT_LINK_RATE, moves.read())
    d.spent.stop()
    end = pool.size - 64 * KiB
    same(d, d.device + (2 * pool.size if back else 0) + end, d.host + field * pool.size + end, 64 * KiB)
    return {}


class Cells:
    """Cells of 512 bytes with particles, scattered on the host and on the device, and calls that send many of them.

    Attributes:
        count: of cells in a call, so that it lasts 0.7 ms; took: how long it does, or takes the thread if that is more.
        calls: lists of arguments that take turns; they send other cells to the same places.
    """

    size, room, most, kinds = 512, 2 * KiB, 8_000, 3

    def __init__(self, d: Device) -> None:
        self.d, chance = d, random.Random(221)
        self.homes = chance.sample(range(d.size // self.room - 64), self.most * self.kinds)
        self.slots = chance.sample(range(self.most), self.most)
        self.attributes, self.index = Attributes(1, 2, 0, 1, 0, 0), (z * 1)(0)
        self.prepare(512)
        self.prepare(min(max(self.count * 700_000 // self.took, 512), self.most))

    def prepare(self, count: int) -> None:
        """Makes the lists of so many cells, and measures a call."""
        self.count, self.sizes, numbers = count, (z * count)(*[self.size] * count), range(count)
        self.to = (p * count)(*[self.slot(number) for number in numbers])
        self.calls = [(p * count)(*[self.home(kind, number) for number in numbers]) for kind in range(self.kinds)]
        self.took = 1 << 40
        for step in range(4):
            moves = Stretches(self.d)
            self.d.launch(4_000_000)  # the device has the whole call when it begins with it
            begin = now()
            self.send(step, moves)
            called = now() - begin
            self.d.sync(self.d.compute)
            self.took = min(self.took, max(moves.read(), called, 1))

    def home(self, step: int, number: int) -> int:
        """Where a cell comes from."""
        return self.d.host + self.homes[step % self.kinds * self.most + number] * self.room

    def slot(self, number: int) -> int:
        """Where it goes."""
        return self.d.device + self.slots[number] * self.room

    def send(self, step: int, moves: Stretches) -> None:
        """All cells of a step by one batch call, on the model's stream."""
        d, sources = self.d, self.calls[step % self.kinds]
        arguments = (self.count, ct.byref(self.attributes), self.index, 1, d.compute)
        moves.begin()
        d.check(d.lib.cudaMemcpyBatchAsync(self.to, sources, self.sizes, *arguments))
        moves.end()


@twentysecond(
    line=BELOW_LINK_RATE,
    or_lines=(SUBMITTING,),  # the one call takes time for each of its cells, too
    also=("descriptor_bound_batch", "small_copies", "weights_not_overlapped", "gpu_starved"),
    like=("redundant_loads", "unmerged_neighbours", "pageable_memory", "synchronisation", "launch_queue_saturation"),
)
def cells_of_particles_that_crossed_a_border_sent_by_one_batch_call_before_each_push(d: Device) -> Truth:
    """Some thousand cells of 512 bytes that lie apart are sent by one batch call before the particles are pushed.

    The link needs 0.01 us for a cell and the GPU several times that, and no kernel runs meanwhile, as all is on one
    stream. How many take 0.7 ms is measured first, and a push takes 0.6 of what they do. Steps are submitted two ahead,
    out of lists that were made before. Three sets of cells take turns in the same places, so each brings other bytes.
    """
    cells, moves, step = Cells(d), Stretches(d), 0
    d.spent.restart()
    for step in turns():
        cells.send(step, moves)
        for _ in range(2):
            d.launch(max(cells.took * 3 // 10, 10_000))
        paced_and_read(d, step, moves, lag=2)
    d.sync(d.compute)
    d.spent.add(BELOW_LINK_RATE, moves.read())
    d.spent.stop()
    for number in (0, cells.count - 1):
        same(d, cells.slot(number), cells.home(step, number), cells.size)
    return {}


@twentysecond(
    line=INSIDE_GPU,
    also=("gpu_starved", "unmerged_neighbours"),
    like=("small_copies", "redundant_loads", "weights_not_overlapped", "synchronisation", "link_bound"),
)
def the_last_eight_states_of_a_ring_laid_in_order_in_one_tensor_before_each_forecast(d: Device) -> Truth:
    """A forecast reads eight states of the weather in order, so they are copied out of a ring of ten before each of it.

    A state has 64 MiB and the eight copies are within the device, on the model's stream. How long they take is measured
    first, and a forecast computes for 0.5 of that, which makes one new state. Each state stands a place further on the
    time before, so none is where it goes. Nothing crosses the link until the program ends; forecasts go two ahead.
    """
    size, ring, window = (64 if d.gpu else 2) * MiB, 10, 8
    states, moves, took, number = d.made("cudaMalloc", (ring + window) * size), Stretches(d), 1 << 40, 0
    tensor = states + ring * size

    def lay(last: int) -> None:
        moves.begin()
        for place in range(window):
            d.copy(tensor + place * size, states + (last - window + 1 + place) % ring * size, size, D2D, d.compute)
        moves.end()

    for number in range(window + 4):
        clear(d, states + number % ring * size, number % 251, size, d.compute)
        if number >= window:
            lay(number)
            d.sync(d.compute)
            moves.ns = 0
            took = min(took, moves.read())
    moves.ns, first = 0, number + 1
    d.spent.restart()
    for step in turns():
        number = first + step
        clear(d, states + number % ring * size, number % 251, size, d.compute)
        lay(number)
        for _ in range(2):
            d.launch(max(took // 4, 10_000))
        paced_and_read(d, step, moves, lag=2)
    d.sync(d.compute)
    d.spent.add(INSIDE_GPU, moves.read())
    d.spent.stop()
    for place in range(window):
        d.copy(d.host, tensor + (place + 1) * size - 512, 512, D2H, d.compute)
        d.sync(d.compute)
        if ct.string_at(d.host, 512) != bytes([(number - window + 1 + place) % 251]) * 512:
            raise RuntimeError("a state is in another place of the tensor than its time")
    d.check(d.lib.cudaFree(states))
    return {}


class Tables:
    """Look-up tables of a film's grade, three for each scene, 160 us of the link each, and sets of places for three.

    Attributes:
        scenes: how many take turns; frames: of a scene.
    """

    each, frames = 3, 12

    def __init__(self, d: Device) -> None:
        self.d, self.pool = d, Pool(d, d.bytes_of(160))
        self.scenes = min((self.pool.count - 1) // self.each, 6)

    def block(self, scene: int, number: int) -> int:
        """Which block of the pool a table is; a scene's lie apart."""
        return (scene % self.scenes * self.each + number) * 2 % (self.scenes * self.each | 1)

    def send(self, scene: int, places: int, stream: int) -> None:
        """The tables of a scene to a set of places."""
        for number in range(self.each):
            self.pool.fetch((places * self.each + number) * 2, self.block(scene, number), stream)

    def check(self, scene: int, places: int) -> None:
        """Raises unless a scene's tables are in a set of places."""
        for number in range(self.each):
            end = self.pool.size - 64 * KiB
            at = self.d.device + (places * self.each + number) * 2 * self.pool.size + end
            same(self.d, at, self.d.host + self.block(scene, number) * self.pool.size + end, 64 * KiB)


@twentysecond(
    "redundant_loads",
    line=NOT_NEEDED,
    also=("weights_not_overlapped", "link_bound", "unmerged_neighbours"),
    like=("small_copies", "pageable_memory", "synchronisation", "load_not_ordered", "launch_queue_saturation"),
    blind=DEVICE,
)
def look_up_tables_of_a_film_s_grade_sent_with_each_frame_though_they_change_with_the_scene(d: Device) -> Truth:
    """Each frame has the three tables of its grade sent before it, though the twelve frames of a scene share them.

    The tables take the link 0.48 ms and go to the same three places, on the stream on which a frame is then graded for
    0.4 ms. Nothing changes them on either side, so eleven of twelve loads bring what is there: 0.44 ms of each 0.88 ms.
    Frames are submitted two ahead.
    """
    tables, again, needed, frame = Tables(d), Stretches(d), Stretches(d), 0
    for frame in turns():
        stretch = again if frame % tables.frames else needed
        stretch.begin()
        tables.send(frame // tables.frames, 0, d.compute)
        stretch.end()
        for _ in range(2):
            d.launch(200_000)
        paced_and_read(d, frame, again, lag=2)
        needed.read(2)
    d.sync(d.compute)
    d.spent.add(NOT_NEEDED, again.read())
    d.spent.add(AT_LINK_RATE, needed.read())
    d.spent.stop()
    tables.check(frame // tables.frames, 0)
    return {"redundant_loads": again.ns}


# ---- the device waits for the host ----------------------------------------------------------------------------------


@twentysecond(
    "launch_queue_saturation",
    line=FULL_QUEUE,
    also=("link_bound", "gpu_starved", "synchronisation", "unmerged_neighbours", "python_or_gil_bound"),
    like=("allocation_on_hot_path", "slow_tier", "cpu_starved", "pageable_memory", "small_copies", "wasted_stores"),
)
def pictures_of_a_whole_shot_fetched_ahead_by_the_thread_that_renders_until_their_stream_is_full(d: Device) -> Truth:
    """A thread asks for all 3,000 pictures of the next shot on one stream, then renders sixty frames of this one.

    A picture takes the link 40 us and its call a few, and the stream takes a thousand of them: the thread stands in its
    calls for 75 ms or so of each round, with nothing on the device but the pictures, since the frame before was waited
    for. A frame is 1 ms of kernels and needs none of those pictures; the rest of them comes beside the frames.
    """
    pool, stream, count, lost = Pool(d, d.bytes_of(40)), d.copies[11], 3_000, 0
    slots, blocks, first = 41, 47, 0  # a slot never has the picture that comes to it
    if pool.count <= blocks + 1:
        raise RuntimeError("the pool is too small for the pictures")
    d.spent.restart()
    for turn in turns():
        first = turn * count
        lost += beyond([pool.fetch(one % slots, one % blocks, stream) for one in range(first, first + count)])
        for frame in range(60):
            d.launch(1_000_000)
            d.record(128 + frame, d.compute)
            if frame:
                d.sync_event(128 + frame - 1)
        d.sync(d.compute)
        d.sync(stream)
    d.spent.add(FULL_QUEUE, lost)
    d.spent.stop()
    last, end = first + count - 1, pool.size - 16 * KiB
    at = d.device + last % slots * pool.size + end
    same(d, at, d.host + last % blocks * pool.size + end, 16 * KiB)
    return {"launch_queue_saturation": lost}


@twentysecond(
    line=WAITING,
    or_lines=(SUBMITTING, PYTHON, ELSEWHERE),  # a slice is some calls, a wait and some lines of Python in turn
    also=("synchronisation", "gpu_starved", "python_or_gil_bound", "wasted_stores", "small_copies"),
    like=("pageable_memory", "launch_queue_saturation", "allocation_on_hot_path", "aliased_stream", "slow_tier"),
)
def bits_of_each_slice_of_a_picture_awaited_to_choose_the_next_slice_s_quantiser(d: Device) -> Truth:
    """An encoder compresses a slice in 6 us and waits for its count of bits before it compresses the next with them.

    The count is set on the device, comes back in a copy of 64 bytes, and the thread waits for the stream. To submit the
    three and to wake when the count is there takes some times as long as the slice, and nothing runs meanwhile.
    """
    slice_ns, back, number, quantiser, begun = 6_000, d.size - 4 * KiB, 0, 26, d.kernel_ns
    d.spent.restart()
    for number in turns():
        d.launch(slice_ns)
        clear(d, d.device + back, number % 251, 64, d.compute)
        d.copy(d.host + back, d.device + back, 64, D2H, d.compute)
        d.sync(d.compute)
        bits = ct.string_at(d.host + back, 1)[0]
        quantiser = min(quantiser + 1, 51) if bits > 128 else max(quantiser - 1, 0)
    d.spent.stop()
    d.spent.add(WAITING, d.spent.end - d.spent.begin - (d.kernel_ns - begun))
    if ct.string_at(d.host + back, 64) != bytes([number % 251]) * 64:
        raise RuntimeError(f"another count has come than the last slice's, at quantiser {quantiser}")
    return {}


class Clip:
    """Four pinned buffers for the pictures of a clip, made when it begins and given back when it ends.

    Attributes:
        took: ns of both; lost: what all of them took.
    """

    size, count = 2 * MiB, 4

    def __init__(self, d: Device) -> None:
        self.d, self.lost, self.buffers = d, 0, list[int]()
        self.took = quickest(self.once)
        self.lost = 0

    def once(self) -> None:
        self.make()
        self.end()

    def make(self) -> None:
        begin = now()
        self.buffers = [self.d.made("cudaHostAlloc", self.size, 0) for _ in range(self.count)]
        self.lost += now() - begin

    def end(self) -> None:
        begin = now()
        for buffer in self.buffers:
            self.d.check(self.d.lib.cudaFreeHost(buffer))
        self.lost += now() - begin


def measure_a_clip(d: Device) -> None:
    """How long its buffers take."""
    MADE["clip"] = Clip(d)


@twentysecond(
    "allocation_on_hot_path",
    line=ALLOCATING,
    also=(
        *("pinning_stall", "context_lock_stall", "gpu_starved", "synchronisation", "python_or_gil_bound"),
        *("wasted_stores", "weights_not_overlapped", "first_calls"),
    ),
    like=("pageable_memory", "small_copies", "slow_tier", "launch_queue_saturation", "cpu_starved", "redundant_loads"),
    prepare=measure_a_clip,
)
def four_pinned_buffers_made_for_each_clip_of_a_transcoder_and_given_back_behind_its_last_picture(d: Device) -> Truth:
    """A transcoder pins four buffers of 2 MiB for each clip, sends its four pictures, and gives the buffers back.

    The clip before was waited for, so nothing is on the device while buffers are given back and made. How long both
    take was measured before, and a clip's kernels take half of that. A picture is 64 KiB, a few us of the link.
    """
    clip, clips, seen = MADE.pop("clip"), 0, 0
    d.spent.restart()
    for _ in turns():
        clips += 1
        clip.make()
        for picture, buffer in enumerate(clip.buffers):
            ct.memmove(buffer, random.randbytes(64 * KiB), 64 * KiB)
            d.copy(d.device + picture * 2 * MiB, buffer, 64 * KiB, H2D, d.compute)
            d.launch(max(clip.took // 8, 10_000))
        d.copy(clip.buffers[0] + 128 * KiB, d.device + 6 * MiB, 64 * KiB, D2H, d.compute)
        d.sync(d.compute)
        seen += ct.string_at(clip.buffers[0] + 128 * KiB, 64 * KiB) == ct.string_at(clip.buffers[3], 64 * KiB)
        clip.end()
    d.spent.add(ALLOCATING, clip.lost)
    d.spent.stop()
    if seen != clips:
        raise RuntimeError("a clip's last picture came back with other bytes")
    return {"allocation_on_hot_path": clip.lost}


class Tiles:
    """Six tiles of each of three satellite's pictures in the plain memory of a decoder, 1 MiB each.

    Attributes:
        took: ns to send six.
    """

    size, count, scenes = MiB, 6, 3

    def __init__(self, d: Device) -> None:
        self.d = d
        self.buffer, self.at = pageable(self.scenes * self.count * self.size)
        for number in range(self.scenes * self.count):
            ct.memmove(self.at + number * self.size, random.randbytes(self.size), self.size)
        d.lib.cudaMemcpy.argtypes = [p, p, z, ct.c_int]
        scenes = itertools.count()
        self.took = quickest(lambda: self.send(next(scenes)), 9)

    def home(self, scene: int, number: int) -> int:
        """Where a tile comes from."""
        return self.at + (scene % self.scenes * self.count + number) * self.size

    def send(self, scene: int) -> None:
        """A scene's tiles one after another by cudaMemcpy; no two come side by side."""
        for number in range(self.count):
            to = self.d.device + number * 2 * self.size
            self.d.check(self.d.lib.cudaMemcpy(to, self.home(scene, number), self.size, H2D))


def make_the_tiles(d: Device) -> None:
    """The tiles, and how long it takes to send them."""
    MADE["tiles"] = Tiles(d)


@twentysecond(
    "pageable_memory",
    line=PAGEABLE,
    or_lines=(BELOW_LINK_RATE, WAITING),
    also=(
        *("synchronisation", "gpu_starved", "weights_not_overlapped", "python_or_gil_bound", "unmerged_neighbours"),
        *("link_bound", "wasted_stores"),
    ),
    like=("redundant_loads", "small_copies", "allocation_on_hot_path", "launch_queue_saturation", "cpu_starved"),
    prepare=make_the_tiles,
)
def tiles_of_a_satellite_s_picture_sent_by_cudamemcpy_out_of_a_decoder_s_plain_memory(d: Device) -> Truth:
    """Six tiles of 1 MiB are sent out of a decoder's plain memory, one `cudaMemcpy` after another, before each scene.

    The scene before was waited for, so nothing runs while the driver takes the tiles through its own buffers and the
    thread stands in its calls. How long the six take was measured before, and a scene computes for 0.6 of that. Three
    scenes take turns, each with bytes of its own.
    """
    tiles, scene, lost = MADE.pop("tiles"), 0, 0
    d.spent.restart()
    for scene in turns():
        begin = now()
        tiles.send(scene)
        lost += now() - begin
        for _ in range(2):
            d.launch(max(tiles.took * 3 // 10, 20_000))
        at = token(d, scene)
        d.sync(d.compute)
        told(at, scene)
    d.spent.add(PAGEABLE, lost)
    d.spent.stop()
    for number in (0, tiles.count - 1):
        end = tiles.size - 64 * KiB
        same(d, d.device + number * 2 * tiles.size + end, tiles.home(scene, number) + end, 64 * KiB)
    return {"pageable_memory": lost}


@twentysecond(
    line=SUBMITTING,
    or_lines=(PYTHON,),  # the calls are made one by one out of Python
    also=("gpu_starved", "synchronisation", "python_or_gil_bound", "wasted_stores"),
    like=("small_copies", "aliased_stream", "launch_queue_saturation", "cpu_starved", "load_not_ordered"),
)
def anti_diagonals_of_two_sequences_aligned_by_a_kernel_of_a_microsecond_each(d: Device) -> Truth:
    """Two sequences are aligned anti-diagonal by anti-diagonal, 255 kernels of 1 us launched one by one out of Python.

    Behind each an event is recorded, which somebody may ask how far it is. The two calls take some times as long as the
    kernel, so the device is done before it has the next one. The score of a pair is read back behind its last kernel,
    and the thread has launched nothing ahead.
    """
    count, pair, lost = 255, 0, 0
    d.spent.restart()
    for pair in turns():
        begin = now()
        for diagonal in range(count):
            d.launch(1_000)
            d.record(diagonal, d.compute)
        lost += max(now() - begin - count * 1_000, 0)
        at = token(d, pair)
        d.sync(d.compute)
        told(at, pair)
    d.spent.add(SUBMITTING, lost)
    d.spent.stop()
    return {}


class Hits:
    """Hits of a detector, which a loop of Python sorts into 2,048 bins in pinned memory.

    Attributes:
        count: of an exposure's hits, so that to bin them takes 2 ms; took: how long that took, ns.
    """

    bins = 2_048

    def __init__(self, d: Device) -> None:
        self.d, chance, self.count = d, random.Random(222), 2_000
        self.hits = [(chance.randrange(64), chance.randrange(4_096)) for _ in range(60_000)]
        self.count = min(max(2_000_000 * self.count // quickest(lambda: self.bin(0), 6), 500), len(self.hits) // 2)
        self.took = quickest(lambda: self.bin(0), 6)

    def home(self, exposure: int) -> int:
        """Where an exposure's bins are."""
        return self.d.host + exposure % 4 * 2 * self.bins

    def bin(self, exposure: int) -> None:
        """All hits of an exposure to their bins."""
        counts, first = [0] * self.bins, exposure * 97 % (len(self.hits) - self.count)
        for row, time_of_flight in self.hits[first : first + self.count]:
            counts[(row << 5) + (time_of_flight >> 7)] += 1
        counts[0] = exposure % 60_000
        text = struct.pack(f"{self.bins}H", *counts)
        ct.memmove(self.home(exposure), text, len(text))


def make_the_hits(d: Device) -> None:
    """The hits, and how long it takes to bin some."""
    MADE["hits"] = Hits(d)


@twentysecond(
    line=PYTHON,
    or_lines=(ELSEWHERE,),  # a recorder of calls alone sees a thread outside of CUDA
    also=("synchronisation", "gpu_starved", "python_or_gil_bound", "wasted_stores"),
    like=("small_copies", "pageable_memory", "slow_tier", "cpu_starved", "launch_queue_saturation", "redundant_loads"),
    prepare=make_the_hits,
)
def hits_of_a_detector_sorted_into_bins_by_a_loop_of_python_before_each_reconstruction(d: Device) -> Truth:
    """A loop of Python sorts the hits of an exposure into 2,048 bins for 2 ms, then they are sent and reconstructed.

    The reconstruction before was waited for, so nothing is on the device in those 2 ms. How many hits take as long is
    measured before, and a reconstruction computes for 0.4 of it.
    """
    hits, idle, exposure = MADE.pop("hits"), Stretches(d), 0
    d.spent.restart()
    for exposure in turns():
        hits.bin(exposure)
        idle.end()
        d.copy(d.device, hits.home(exposure), 2 * hits.bins, H2D, d.compute)
        for _ in range(2):
            d.launch(max(hits.took // 5, 20_000))
        at = token(d, exposure)
        idle.begin()
        d.sync(d.compute)
        told(at, exposure)
        idle.read()
    d.spent.add(PYTHON, idle.ns)
    d.spent.stop()
    same(d, d.device, hits.home(exposure), 2 * hits.bins)
    return {}


class Signer:
    """A thread that signs answers one after another by `pow` of long numbers, which keeps the interpreter's lock.

    Attributes:
        took: how long a signature takes, ns; signed: how many there are.
    """

    def __init__(self, ns: int) -> None:
        chance, bits, self.took = random.Random(223), 512, 0
        while self.took < ns:  # the time goes with the third power of the length
            bits = bits * 5 // 4
            self.key, self.modulus = (chance.getrandbits(bits) | 1 << (bits - 1) | 1 for _ in range(2))
            self.took = quickest(self.sign, 2)
        self.signed, self.over, self.thread = 0, threading.Event(), threading.Thread(target=self.run)

    def sign(self) -> int:
        return pow(0x5EED, self.key, self.modulus)

    def run(self) -> None:
        while not self.over.is_set():
            self.sign()
            self.signed += 1

    @contextlib.contextmanager
    def beside(self) -> Iterator[None]:
        """It signs meanwhile."""
        self.thread.start()
        try:
            yield
        finally:
            self.over.set()
            self.thread.join()
        if not self.signed:
            raise RuntimeError("nothing was signed")


def make_the_signer_of_long_keys(_: Device) -> None:
    """Signatures of 8 ms or some more."""
    MADE["signer"] = Signer(8_000_000)


def make_the_signer_of_short_keys(_: Device) -> None:
    """Signatures of 2 ms or some more."""
    MADE["signer"] = Signer(2_000_000)


@twentysecond(
    line=PYTHON,
    or_lines=(ELSEWHERE,),
    also=("synchronisation", "gpu_starved", "python_or_gil_bound", "wasted_stores"),
    like=("cpu_starved", "small_copies", "slow_tier", "launch_queue_saturation", "context_lock_stall"),
    prepare=make_the_signer_of_long_keys,
)
def answers_signed_with_a_long_key_by_a_thread_that_keeps_the_lock_from_the_one_that_computes(d: Device) -> Truth:
    """A thread signs one answer after another by `pow` of long numbers, 8 ms or more each, without a pause.

    `pow` never gives the interpreter's lock back, so when the other thread has waited for its 2 ms of kernels it waits
    for the lock, until a signature or two are done, before it can launch the next. Nothing is on the device meanwhile.
    """
    signer, begun = MADE.pop("signer"), d.kernel_ns
    with signer.beside():
        d.spent.restart()
        for step in turns():
            for _ in range(2):
                d.launch(1_000_000)
            at = token(d, step)
            d.sync(d.compute)
            told(at, step)
        d.spent.stop()
    d.spent.add(PYTHON, d.spent.end - d.spent.begin - (d.kernel_ns - begun))
    return {}


ENCODER = """
import os, sys
os.sched_setaffinity(0, {int(sys.argv[1])})
print("-", flush=True)
picture = list(range(256))
while True:
    for row in range(1_000):
        picture[row % 256] = (picture[row * 7 % 256] * 31 + row) % 257
"""


@contextlib.contextmanager
def encoders_on_this_cpu(count: int) -> Iterator[None]:
    """So many processes that encode in software, on the one CPU that this thread may use."""
    before = os.sched_getaffinity(0)
    cpu = sorted(before)[len(before) // 3]
    env = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    command = [sys.executable, "-S", "-c", ENCODER, str(cpu)]
    children = [subprocess.Popen(command, env=env, stdout=subprocess.PIPE) for _ in range(count)]
    try:
        for child in children:
            assert child.stdout
            child.stdout.readline()
        os.sched_setaffinity(0, {cpu})
        yield
    finally:
        os.sched_setaffinity(0, before)
        for child in children:
            child.kill()
            child.communicate()


@twentysecond(
    "cpu_starved",
    line=NO_CPU,
    or_lines=(PYTHON,),
    also=("python_or_gil_bound", "gpu_starved", "synchronisation", "wasted_stores"),
    like=("context_lock_stall", "slow_tier", "launch_queue_saturation", "small_copies", "pageable_memory"),
    blind=DEVICE,
)
def four_encoders_in_software_pinned_to_the_cpu_of_the_thread_that_checks_and_sends_pictures(d: Device) -> Truth:
    """Four processes encode in software on the one CPU that the thread may use, which checks a picture for 1.5 ms.

    To check is 1.5 ms of sums on the CPU before each picture's 0.6 ms of kernels, which are waited for; so nothing is
    on the device meanwhile. A fifth of a CPU is the thread's, so the 1.5 ms take it some 7 ms, in 6 ms of which others
    run.
    """
    piece, off, picture, at = random.randbytes(64 * KiB), 0, 0, 0
    with encoders_on_this_cpu(4):
        d.spent.restart()
        for picture in turns():
            begin, busy = now(), time.thread_time_ns()
            while time.thread_time_ns() - busy < 1_500_000:
                zlib.crc32(piece)
            for _ in range(2):
                d.launch(300_000)
            at = token(d, picture)
            d.sync(d.compute)
            off += max(now() - begin - 2_200_000, 0)  # alone, it is the sums, the kernels and 0.1 ms
        d.spent.add(NO_CPU, off)
        d.spent.stop()
    told(at, picture)
    return {"cpu_starved": off}


class Scan:
    """A file with the slices of a scanned body, 512 KiB each, which are read into pinned places that lie apart.

    Attributes:
        each: slices of a volume; part: bytes of a slice that are sent; took: ns to read them.
    """

    size, count, each, part = 512 * KiB, 64, 16, 32 * KiB

    def __init__(self, d: Device) -> None:
        self.d, self.file = d, tempfile.TemporaryFile(dir="/tmp", buffering=0)  # noqa: SIM115 - closed in `end`
        for _ in range(self.count):
            self.file.write(random.randbytes(self.size))
        self.rooms = [(ct.c_char * self.size).from_address(self.home(place)) for place in range(self.each)]
        self.took = quickest(lambda: self.read(0), 8)

    def home(self, place: int) -> int:
        """Where a slice comes to on the host."""
        return self.d.host + place * 2 * self.size

    def slice(self, volume: int, place: int) -> int:
        """Which slice of the file it is: a volume's lie apart."""
        return (volume * self.each + place) * 37 % self.count

    def read(self, volume: int) -> None:
        """The slices of a volume one by one."""
        for place, room in enumerate(self.rooms):
            self.file.seek(self.slice(volume, place) * self.size)
            if self.file.readinto(room) != self.size:
                raise RuntimeError("the file ends within a slice")

    def end(self, volume: int) -> None:
        """Raises unless the last slice of a volume is there."""
        place = self.each - 1
        at = self.slice(volume, place) * self.size
        if os.pread(self.file.fileno(), self.size, at) != ct.string_at(self.home(place), self.size):
            raise RuntimeError("another slice was read than was asked for")
        self.file.close()


def make_the_scan(d: Device) -> None:
    """The file, and how long it takes to read a volume of it."""
    MADE["scan"] = Scan(d)


@twentysecond(
    line=TIER,
    or_lines=(ELSEWHERE, PYTHON),
    also=(
        *("slow_tier", "gpu_starved", "synchronisation", "python_or_gil_bound", "weights_not_overlapped"),
        *("wasted_stores", "unmerged_neighbours", "link_bound"),
    ),
    like=("cpu_starved", "pageable_memory", "small_copies", "launch_queue_saturation", "redundant_loads"),
    prepare=make_the_scan,
    undecided_in=DEVICE,  # their recordings hold CUDA's calls alone
)
def slices_of_a_scanned_body_read_out_of_its_file_by_the_thread_that_segments_each_volume(d: Device) -> Truth:
    """A volume's 16 slices of 512 KiB are read out of a file into pinned memory, and then segmented on the device.

    The volume before was waited for, so nothing is on the device while the thread reads. How long that takes was
    measured before, and a volume computes for 0.5 of it. Of each slice the 32 KiB with the body in it are sent, which
    take the link some 20 us in all. Four volumes take turns.
    """
    scan, volume = MADE.pop("scan"), 0
    d.spent.restart()
    for volume in turns():
        with d.spent.on(TIER):
            scan.read(volume)
        for place in range(scan.each):
            d.copy(d.device + 2 * place * scan.size, scan.home(place), scan.part, H2D, d.compute)
        for _ in range(2):
            d.launch(max(scan.took // 4, 20_000))
        at = token(d, volume)
        d.sync(d.compute)
        told(at, volume)
    d.spent.stop()
    for place in (0, scan.each - 1):
        same(d, d.device + 2 * place * scan.size, scan.home(place), scan.part)
    scan.end(volume)
    return {}


class Archive:
    """A thread that compresses each frame that it is handed, outside of the interpreter's lock.

    Attributes:
        waiting: frames that it has not begun; took: how long a frame takes it, ns; packed: how many are.
    """

    size = 256 * KiB

    def __init__(self, places: int, ns: int) -> None:
        draw, level = random.Random(224), 9
        self.text = bytes(draw.choices(range(24), k=self.size))
        whole = quickest(lambda: zlib.compress(self.text, level), 3)
        self.text = self.text[: max(min(self.size * ns // whole, self.size), 4 * KiB)]
        self.took = quickest(lambda: zlib.compress(self.text, level), 3)
        self.waiting, self.packed, self.level = Queue[int](places), 0, level
        self.thread = in_thread(self.run)

    def run(self) -> None:
        while self.waiting.get() >= 0:
            zlib.compress(self.text, self.level)
            self.packed += 1

    def end(self, frames: int) -> None:
        """Raises unless all frames were compressed."""
        self.waiting.put(-1)
        self.thread.join()
        if self.packed != frames:
            raise RuntimeError("a frame was not compressed")


def make_the_archive_with_one_place(_: Device) -> None:
    """It takes 3 ms for a frame."""
    MADE["archive"] = Archive(1, 3_000_000)


def make_the_archive_with_four_places(_: Device) -> None:
    """It takes 1.5 ms for a frame."""
    MADE["archive"] = Archive(4, 1_500_000)


@twentysecond(
    line=ELSEWHERE,
    or_lines=(PYTHON,),
    also=("gpu_starved", "synchronisation", "python_or_gil_bound", "wasted_stores", "slow_tier"),
    like=("cpu_starved", "small_copies", "pageable_memory", "launch_queue_saturation", "context_lock_stall"),
    prepare=make_the_archive_with_one_place,
)
def frames_handed_through_a_queue_of_one_place_to_a_thread_that_compresses_more_slowly(d: Device) -> Truth:
    """A renderer hands each frame to a thread that compresses it in 3 ms, through a queue which takes a single one.

    The queue is full whenever a frame is done, so the renderer stands in `put` until the thread has taken the frame
    before; its own frame was waited for, so nothing is on the device. A frame computes for 0.35 of what was measured
    for the thread, which works outside of the interpreter's lock.
    """
    archive, frame = MADE.pop("archive"), 0
    for _ in range(2):
        archive.waiting.put(0)
    d.spent.restart()
    for frame in turns():
        for _ in range(2):
            d.launch(max(archive.took * 35 // 200, 20_000))
        at = token(d, frame)
        d.sync(d.compute)
        told(at, frame)
        with d.spent.on(ELSEWHERE):
            archive.waiting.put(frame)
    d.spent.stop()
    archive.end(frame + 3)
    return {}


# ---- healthy --------------------------------------------------------------------------------------------------------


@twentysecond(
    line=COMPUTING,
    like=("weights_not_overlapped", "link_bound", "synchronisation", "gpu_starved", "redundant_loads"),
    also=("unmerged_neighbours",),
)
def panels_left_of_each_panel_of_a_large_matrix_brought_to_two_places_in_turn_one_update_ahead(d: Device) -> Truth:
    """All panels left of one come in turn, 0.4 ms each, each while the one before it is applied for 3 ms.

    There are two places, and a panel comes to one of them when the update before the last, which read it, is over:
    it is there 2.5 ms before its own. Neither place has the panel that comes. Updates are submitted two ahead.
    """
    pool, loads, turn = Pool(d, d.bytes_of(400)), d.copies[6], 0
    order = [left for _, left in itertools.islice(updates(min(pool.count - 1, 7)), 3 + 4 + 5 + 6)]

    def bring(number: int) -> None:
        pool.fetch(number % 2 * 2, order[number % len(order)], loads)
        d.record(number % 32, loads)

    bring(0)
    d.sync(loads)
    d.spent.restart()
    for turn in turns():
        d.check(d.lib.cudaStreamWaitEvent(d.compute, d.events[turn % 32], 0))
        for _ in range(2):
            d.launch(1_500_000)
        d.record(32 + turn % 32, d.compute)
        if turn:
            d.check(d.lib.cudaStreamWaitEvent(loads, d.events[32 + (turn - 1) % 32], 0))
        bring(turn + 1)
        paced(d, turn, 2)
    d.sync(d.compute)
    d.spent.stop()
    d.sync(loads)
    end = pool.size - 64 * KiB
    for number in (turn, turn + 1):
        home = d.host + order[number % len(order)] * pool.size
        same(d, d.device + number % 2 * 2 * pool.size + end, home + end, 64 * KiB)
    return {}


@twentysecond(
    line=COMPUTING,
    like=("redundant_loads", "weights_not_overlapped", "load_not_ordered", "link_bound", "gpu_starved"),
    also=("unmerged_neighbours",),
)
def look_up_tables_of_the_next_scene_s_grade_sent_once_while_this_scene_s_frames_are_graded(d: Device) -> Truth:
    """The three tables of a scene's grade are sent once, while the second half of the scene before is graded.

    A frame is 4 ms of kernels and a scene has twelve. The tables take the link 0.5 ms and go to the other of two sets
    of places, behind the last frame that read that set, which was over 24 ms before; they are there 20 ms ahead of
    their scene. Frames are submitted two ahead.
    """
    tables, loads, frame = Tables(d), d.copies[7], 0
    tables.send(0, 0, loads)
    d.record(0, loads)
    d.sync(loads)
    d.spent.restart()
    for frame in turns():
        scene, within = divmod(frame, tables.frames)
        if not within:
            d.check(d.lib.cudaStreamWaitEvent(d.compute, d.events[scene % 16], 0))
        for _ in range(2):
            d.launch(2_000_000)
        if within == tables.frames - 1:
            d.record(16 + scene % 16, d.compute)
        if within == tables.frames // 2:
            if scene:
                d.check(d.lib.cudaStreamWaitEvent(loads, d.events[16 + (scene - 1) % 16], 0))
            tables.send(scene + 1, (scene + 1) % 2, loads)
            d.record((scene + 1) % 16, loads)
        paced(d, frame, 2)
    d.sync(d.compute)
    d.spent.stop()
    d.sync(loads)
    scene = frame // tables.frames
    tables.check(scene, scene % 2)
    return {}


@twentysecond(
    line=COMPUTING,
    like=("synchronisation", "gpu_starved", "small_copies", "python_or_gil_bound", "launch_queue_saturation"),
    also=("wasted_stores",),
)
def bits_of_each_picture_awaited_two_pictures_later_to_choose_its_quantiser(d: Device) -> Truth:
    """An encoder compresses a picture in 5 ms and chooses its quantiser by the bits of the picture two before it.

    The thread waits for that picture's count with an event nearly all of the time, and when it has it there is a whole
    picture of 5 ms on the device, behind which it submits the next in some 30 us.
    """
    back, quantiser, picture, seen = d.size - 8 * KiB, 26, 0, 0
    d.spent.restart()
    for picture in turns():
        if picture >= 2:
            d.sync_event(64 + (picture - 2) % 8)
            bits = ct.string_at(d.host + back + (picture - 2) % 8 * 512, 1)[0]
            seen += bits == (picture - 2) % 251
            quantiser = min(quantiser + 1, 51) if bits > 128 else max(quantiser - 1, 0)
        at = back + picture % 8 * 512
        for _ in range(2):
            d.launch(2_500_000)
        clear(d, d.device + at, picture % 251, 64, d.compute)
        d.copy(d.host + at, d.device + at, 64, D2H, d.compute)
        d.record(64 + picture % 8, d.compute)
    d.sync(d.compute)
    d.spent.stop()
    if seen != picture - 1:
        raise RuntimeError(f"another count has come than a picture's, at quantiser {quantiser}")
    return {}


@twentysecond(
    line=COMPUTING,
    like=("python_or_gil_bound", "gpu_starved", "synchronisation", "cpu_starved", "context_lock_stall"),
    also=("wasted_stores",),
    prepare=make_the_signer_of_short_keys,
)
def answers_signed_by_a_thread_that_keeps_the_lock_beside_volumes_of_eighty_milliseconds(d: Device) -> Truth:
    """A thread signs without a pause by `pow`, 2 to 4 ms each, beside another whose volumes compute for 80 ms.

    The second waits up to 9 ms for the interpreter's lock where it has given it back, which is once or twice for a
    volume and five times at most, for its five calls. It waits for the volume before the last, so there are 80 ms on
    the device when it wakes.
    """
    signer, step, at, waits = MADE.pop("signer"), 0, 0, list[int]()
    d.spent.restart()
    d.launch(80_000_000)  # something is there before the other thread begins
    with signer.beside():
        for step in turns():
            begin = now()
            d.launch(80_000_000)
            at = token(d, step)
            d.record(128 + step % 64, d.compute)
            waits.append(now() - begin)
            if step:
                d.sync_event(128 + (step - 1) % 64)
        d.sync(d.compute)
        d.spent.stop()
    told(at, step)
    plain_only(d, max(waits) < 65_000_000, f"to submit a volume took {max(waits)} ns")
    return {}


@twentysecond(
    line=COMPUTING,
    like=("gpu_starved", "synchronisation", "python_or_gil_bound", "cpu_starved", "slow_tier"),
    also=("wasted_stores",),
    prepare=make_the_archive_with_four_places,
)
def frames_handed_through_a_queue_to_a_thread_that_compresses_each_sooner_than_the_next_is_there(d: Device) -> Truth:
    """A renderer hands each frame to a thread that compresses it in 1.5 ms, while the next two compute for 6 ms each.

    A frame is handed on when it is over, two frames after it was launched, and the queue has four places of which none
    is taken: `put` never waits. So the device has a frame or two ahead of it at any time.
    """
    archive, frame, puts = MADE.pop("archive"), 0, list[int]()
    d.spent.restart()
    for frame in turns():
        for _ in range(2):
            d.launch(3_000_000)
        at = token(d, frame)
        paced(d, frame, 2)
        if frame >= 2:
            begin = now()
            archive.waiting.put(frame - 2)
            puts.append(now() - begin)
    d.sync(d.compute)
    d.spent.stop()
    told(at, frame)
    archive.end(frame - 1)
    plain_only(d, max(puts) < 4_000_000, f"to hand on a frame took {max(puts)} ns")
    return {}


CUSTOMER = """
import ctypes, os, sys, time
queue, count, way = map(int, sys.argv[1:])
libc = ctypes.CDLL(None)
os.read(way, 1)
due = time.monotonic()
for number in range(count):
    due += 0.066
    time.sleep(max(due - time.monotonic(), 0))
    order = (1).to_bytes(8, "little") + number.to_bytes(4, "little") * 256
    libc.msgsnd(queue, order, ctypes.c_size_t(1_024), 0)
"""


class Orders:
    """A System V message queue into which another process puts an order each 66 ms.

    Attributes:
        count: how many there are.
    """

    count = 22

    def __init__(self) -> None:
        self.libc = ct.CDLL(None, use_errno=True)
        self.libc.msgrcv.argtypes = [ct.c_int, p, z, ct.c_long, ct.c_int]
        self.libc.msgrcv.restype = ct.c_ssize_t
        self.queue = self.libc.msgget(0, 0o1600)
        if self.queue < 0:
            raise RuntimeError(f"there is no message queue: {os.strerror(ct.get_errno())}")
        theirs, self.way = os.pipe()
        env = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
        command = [sys.executable, "-S", "-c", CUSTOMER, str(self.queue), str(self.count), str(theirs)]
        self.child = subprocess.Popen(command, pass_fds=[theirs], env=env)
        os.close(theirs)
        self.room = ct.create_string_buffer(8 + 1_024)

    def next(self) -> bytes:
        """Waits for an order."""
        while (got := self.libc.msgrcv(self.queue, self.room, 1_024, 0, 0)) != 1_024:
            if got >= 0 or ct.get_errno() != 4:  # EINTR
                raise RuntimeError(f"no order has come: {os.strerror(ct.get_errno())}")
        return self.room.raw[8:]

    def end(self) -> None:
        """Waits until the process has ended; the queue goes."""
        self.child.wait()
        os.close(self.way)
        self.libc.msgctl(self.queue, 0, None)


def make_the_orders(_: Device) -> None:
    """The queue and the process."""
    MADE["orders"] = Orders()


@twentysecond(
    line=NOTHING_TO_DO,
    like=("slow_tier", "gpu_starved", "synchronisation", "python_or_gil_bound", "launch_queue_saturation"),
    also=("wasted_stores",),
    prepare=make_the_orders,
    undecided_in=DEVICE,  # their recordings hold CUDA's calls alone
)
def orders_in_a_message_queue_of_system_v_sixty_six_milliseconds_apart(d: Device) -> Truth:
    """Another process puts an order into a System V message queue each 66 ms; the server needs 9 ms for it.

    It stands in `msgrcv` until there is one, answers in three kernels, waits for them, and is there again. For more
    than eight tenths of the time nobody has asked for anything that was not answered.
    """
    orders, number = MADE.pop("orders"), 0
    d.spent.restart()
    os.write(orders.way, b"-")
    for number in range(orders.count):
        with d.spent.on(NOTHING_TO_DO):
            order = orders.next()
        if order[:4] != number.to_bytes(4, "little"):
            raise RuntimeError("another order came than was due")
        stamp(d, number % 8 * 4 * KiB, 4 * KiB, number)
        d.copy(d.device, d.host + number % 8 * 4 * KiB, 4 * KiB, H2D, d.compute)
        for _ in range(3):
            d.launch(3_000_000)
        at = token(d, number)
        d.sync(d.compute)
        told(at, number)
    d.spent.stop()
    orders.end()
    same(d, d.device, d.host + number % 8 * 4 * KiB, 4 * KiB)
    return {}


ARTIST = """
import os, sys, time
terminal, count, way = map(int, sys.argv[1:])
os.read(way, 1)
due = time.monotonic()
for number in range(count):
    due += 0.075
    time.sleep(max(due - time.monotonic(), 0))
    os.write(terminal, b"view %d\\n" % number)
os.read(way, 1)
"""


class Terminal:
    """A pseudo-terminal at whose other end a process types a command each 75 ms.

    Attributes:
        count: how many there are.
    """

    count = 19

    def __init__(self) -> None:
        theirs, self.mine = os.openpty()
        tty.setraw(self.mine)
        begins, self.way = os.pipe()
        self.text, self.asked = b"", select.poll()
        self.asked.register(self.mine, select.POLLIN)
        env = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
        command = [sys.executable, "-S", "-c", ARTIST, str(theirs), str(self.count), str(begins)]
        self.child = subprocess.Popen(command, pass_fds=[theirs, begins], env=env)
        for one in (theirs, begins):
            os.close(one)

    def next(self) -> bytes:
        """Waits for a whole command."""
        while b"\n" not in self.text:
            if self.asked.poll(1_000):
                self.text += os.read(self.mine, 256)
        command, _, self.text = self.text.partition(b"\n")
        return command

    def end(self) -> None:
        """Lets the process end, and waits until it has."""
        os.close(self.way)
        self.child.wait()
        os.close(self.mine)


def make_the_terminal(_: Device) -> None:
    """The terminal and the process."""
    MADE["terminal"] = Terminal()


@twentysecond(
    line=NOTHING_TO_DO,
    like=("slow_tier", "gpu_starved", "synchronisation", "python_or_gil_bound", "launch_queue_saturation"),
    also=("wasted_stores",),
    prepare=make_the_terminal,
    undecided_in=DEVICE,  # their recordings hold CUDA's calls alone
)
def views_asked_for_by_commands_typed_into_a_pseudo_terminal_seventy_five_milliseconds_apart(d: Device) -> Truth:
    """Somebody types a command into a pseudo-terminal each 75 ms, and the viewer draws what it asks for in 12 ms.

    It stands in `poll` on the terminal until there is a command, draws in four kernels, waits for them, and is there
    again. For more than eight tenths of the time all that was asked for is drawn.
    """
    terminal, number = MADE.pop("terminal"), 0
    d.spent.restart()
    os.write(terminal.way, b"-")
    for number in range(terminal.count):
        with d.spent.on(NOTHING_TO_DO):
            command = terminal.next()
        if command != b"view %d" % number:
            raise RuntimeError("another command came than was due")
        stamp(d, number % 8 * 4 * KiB, 4 * KiB, number)
        d.copy(d.device, d.host + number % 8 * 4 * KiB, 4 * KiB, H2D, d.compute)
        for _ in range(4):
            d.launch(3_000_000)
        at = token(d, number)
        d.sync(d.compute)
        told(at, number)
    d.spent.stop()
    terminal.end()
    same(d, d.device, d.host + number % 8 * 4 * KiB, 4 * KiB)
    return {}
