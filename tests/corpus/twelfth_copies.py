"""Twelfth programs whose kernels wait for copies: frames, scores, a target, pages, scales, an adapter, beams."""

from __future__ import annotations

import ctypes as ct
import threading
from queue import Queue

from accounts import Pool, Stretches, paced, paced_and_read, turns
from device import D2H, H2D, Device, now
from fresh_copies import clear
from registry import (
    AT_LINK_RATE,
    BELOW_LINK_RATE,
    DEVICE,
    NOT_NEEDED,
    SUBMITTING,
    WAITING,
    KiB,
    Truth,
    in_thread,
    twelfth,
)
from unseen_copies import same


@twelfth(
    line=AT_LINK_RATE,
    also=("weights_not_overlapped", "link_bound", "wasted_stores", "unmerged_neighbours"),
    like=("redundant_loads", "small_copies", "aliased_stream", "synchronisation", "store_not_ordered"),
)
def frames_on_two_streams_that_share_one_staging_place_on_the_device(d: Device) -> Truth:
    """A frame comes, is enlarged for 0.45 ms and leaves, on one of two streams in turn, but both use one place.

    So a frame waits by an event until the one before, on the other stream, has left: in 0.3 ms, the kernel, out 0.3 ms,
    and never two of them at once. For 0.6 ms of each 1.05 ms there is a copy and no kernel. Frames are submitted two
    ahead, and five of them take turns, so that each brings other bytes than are there.
    """
    pool, lanes, frame = Pool(d, d.bytes_of(300)), (d.compute, d.copies[8]), 0
    frames, result = min((pool.count - 2) // 2, 5), d.device + pool.size
    moves = [Stretches(d, lane) for lane in lanes]

    def home(number: int) -> int:
        return d.host + (frames + number % frames) * pool.size

    for frame in turns():
        lane, mine = lanes[frame % 2], moves[frame % 2]
        if frame:
            d.check(d.lib.cudaStreamWaitEvent(lane, d.events[(frame - 1) % 8], 0))
        mine.begin()
        pool.fetch(0, frame % frames, lane)
        mine.end()
        d.launch(450_000, lane)
        clear(d, result, frame % 251, pool.size, lane)
        mine.begin()
        d.copy(home(frame), result, pool.size, D2H, lane)
        mine.end()
        d.record(frame % 8, lane)
        if frame > 1:
            d.sync_event((frame - 2) % 8)
            mine.read(2)
    d.synchronize()
    d.spent.add(AT_LINK_RATE, sum(mine.read() for mine in moves))
    d.spent.stop()
    same(d, d.device, d.host + frame % frames * pool.size, pool.size)
    if ct.string_at(home(frame) + pool.size - 64, 64) != bytes([frame % 251]) * 64:
        raise RuntimeError("another frame left than was made")
    return {}


@twelfth(
    line=AT_LINK_RATE,
    also=("link_bound", "wasted_stores", "weights_not_overlapped", "unmerged_neighbours"),
    like=("small_copies", "fence_before_copies", "synchronisation", "python_or_gil_bound", "pageable_memory"),
)
def scores_of_all_positions_that_leave_on_the_model_s_stream_for_a_thread_that_reads_them(d: Device) -> Truth:
    """The scores of a chunk's positions leave for one of four pinned buffers on the stream that computes the chunks.

    A chunk is 0.5 ms of kernels and its scores take the link 0.45 ms, and the next chunk's kernels stand behind them on
    the same stream: nearly half of the time is the copy's. A thread waits for each, looks at it and gives the buffer
    back, while the device has three more chunks to do, so neither thread holds it up.
    """
    size, buffers, moves, seen, chunk = d.bytes_of(450), 4, Stretches(d), list[bool](), 0
    full, free = Queue[int](), Queue[int]()

    def at(number: int) -> int:
        return d.host + number % buffers * size

    def read() -> None:
        while (number := full.get()) >= 0:
            d.sync_event(number % buffers)
            ends = ct.string_at(at(number), 64) + ct.string_at(at(number) + size - 64, 64)
            seen.append(ends == bytes([number % 251]) * 128)
            free.put(number)

    thread = in_thread(read)
    for chunk in turns():
        if chunk >= buffers and free.get() != chunk - buffers:
            raise RuntimeError("another buffer was given back than the oldest")
        if chunk >= buffers:
            moves.read(buffers - 1)
        for _ in range(2):
            d.launch(250_000)
        clear(d, d.device, chunk % 251, size, d.compute)
        moves.begin()
        d.copy(at(chunk), d.device, size, D2H, d.compute)
        moves.end()
        d.record(chunk % buffers, d.compute)
        full.put(chunk)
    d.sync(d.compute)
    d.spent.add(AT_LINK_RATE, moves.read())
    d.spent.stop()
    full.put(-1)
    thread.join()
    if len(seen) != chunk + 1 or not all(seen):
        raise RuntimeError("the thread has read other scores than were computed")
    return {}


@twelfth(
    line=AT_LINK_RATE,
    also=("weights_not_overlapped", "link_bound"),
    like=("redundant_loads", "small_copies", "load_not_ordered", "aliased_stream", "launch_queue_saturation"),
)
def a_target_s_cache_brought_on_a_third_stream_when_its_draft_has_guessed(d: Device) -> Truth:
    """A draft guesses for 0.25 ms on its stream, the target's keys and values come on another, the target verifies.

    The load stands behind the draft, the target's 0.45 ms behind the load, and the next draft behind the target, each
    by an event. Keys take the link 0.35 ms and values 0.25 ms: 0.6 ms of each 1.3 ms with a copy and no kernel. Rounds
    are submitted two ahead. Some requests take turns, so that each load brings other bytes than are there.
    """
    draft, loads = d.copies[6], d.copies[7]
    sizes, moves, turn = (d.bytes_of(350), d.bytes_of(250)), Stretches(d, d.copies[7]), 0
    whole = sum(sizes)
    requests = min((d.size - 64 * KiB) // whole, 5)
    for turn in turns():
        event, home = turn % 16 * 4, turn % requests * whole
        d.order(draft, d.compute, event)
        d.launch(250_000, draft)
        d.order(loads, draft, event + 1)
        moves.begin()
        d.copy(d.device, d.host + home, sizes[0], H2D, loads)
        d.copy(d.device + sizes[0], d.host + home + sizes[0], sizes[1], H2D, loads)
        moves.end()
        d.order(d.compute, loads, event + 2)
        for _ in range(2):
            d.launch(225_000)
        paced_and_read(d, turn, moves, lag=2)
    d.sync(d.compute)
    d.spent.add(AT_LINK_RATE, moves.read())
    d.spent.stop()
    end = whole - 64 * KiB
    same(d, d.device + end, d.host + turn % requests * whole + end, 64 * KiB)
    return {}


@twelfth(
    "small_copies",
    line=BELOW_LINK_RATE,
    or_lines=(SUBMITTING,),  # where a recorder makes each call longer than its copy takes
    also=("weights_not_overlapped", "gpu_starved", "python_or_gil_bound"),
    like=("redundant_loads", "unmerged_neighbours", "pageable_memory", "allocation_on_hot_path", "aliased_stream"),
)
def pages_of_an_indexer_s_keys_brought_over_two_side_streams_in_turn(d: Device) -> Truth:
    """Before each step of 1.3 ms an indexer's keys come in pages of 8 KiB, on one of two side streams in turn.

    The pages stand behind the kernels before them and the step behind the pages. The GPU takes above 1 us for a page,
    of which the link needs 0.15 us. How long 200 take is measured first, behind a kernel, and so many come that they
    take 0.8 ms. They are submitted a step ahead, for which the thread has 2.1 ms, and no stream gets more than 900.
    """
    size, sides, waits, step, took = 8 * KiB, d.copies[9:11], Stretches(d), 0, 0
    spread = 1_000  # pages of a sequence
    slots = [d.device + i * 5 * size for i in range(spread)]
    homes = [[d.host + (one * spread + i * 421 % spread) * 3 * size for i in range(spread)] for one in range(2)]

    def bring(number: int, count: int) -> None:
        side, places = sides[number % 2], list(zip(slots[:count], homes[number % 2][:count], strict=True))
        waits.begin()
        d.order(side, d.compute, number % 8 * 2)
        d.rapid(places, size, H2D, side)
        d.order(d.compute, side, number % 8 * 2 + 1)
        waits.end()

    for probe in range(4):
        d.launch(3_000_000)
        bring(probe, 200)
        d.sync(d.compute)
        took, waits.ns = waits.read(), 0
    count = min(max(200 * 800_000 // max(took, 1), 40), 900)
    d.spent.restart()
    for step in turns():
        bring(step, count)
        for _ in range(2):
            d.launch(650_000)
        paced_and_read(d, step, waits)
    d.sync(d.compute)
    d.spent.add(BELOW_LINK_RATE, waits.read())
    d.spent.stop()
    for i in (0, count - 1):
        same(d, slots[i], homes[step % 2][i], size)
    return {"small_copies": waits.ns - int((step + 1) * count * size / d.bytes_per_us * 1_000)}


@twelfth(
    line=BELOW_LINK_RATE,
    or_lines=(WAITING, AT_LINK_RATE),  # the thread stands in the calls meanwhile
    also=(
        *("small_copies", "synchronisation", "weights_not_overlapped", "gpu_starved", "unmerged_neighbours"),
        "link_bound",
    ),
    like=("pageable_memory", "launch_queue_saturation", "allocation_on_hot_path", "redundant_loads"),
)
def scales_of_three_projections_taken_out_of_their_rows_by_synchronous_2d_copies(d: Device) -> Truth:
    """For each layer three projections' scales, 16 of each row's 528 bytes, come by cudaMemcpy2D out of pinned memory.

    The layer before was waited for, so no kernel runs; then the layer computes for 0.5 ms. Each row crosses the link by
    itself, well below its rate. How long a call takes is measured first, and so many rows are taken that one lasts 0.25
    ms. Four layers' scales take turns, so that other bytes come than are there.
    """
    width, pitch, probe, lost, layer = 16, 528, 16_384, 0, 0
    most = (d.size - 64 * KiB) // pitch - 1
    copy = d.lib.cudaMemcpy2D
    copy.argtypes = [ct.c_void_p, ct.c_size_t, ct.c_void_p, *[ct.c_size_t] * 3, ct.c_int]

    def home(number: int, part: int) -> int:
        return d.host + (number % 4 * 3 + part) * 32

    def bring(number: int, rows: int) -> int:
        begin = now()
        for part in range(3):
            to = d.device + part * rows * width
            d.check(copy(to, width, home(number, part), pitch, width, rows, H2D))
        return now() - begin

    took = min(bring(number, probe) for number in range(4))
    rows = min(max(probe * 750_000 // took, 1_024), most)
    d.spent.restart()
    for layer in turns():
        lost += bring(layer, rows)
        for _ in range(2):
            d.launch(250_000)
        d.sync(d.compute)
    d.spent.add(BELOW_LINK_RATE, lost)
    d.spent.stop()
    for part, row in ((0, 0), (2, rows - 1)):
        same(d, d.device + (part * rows + row) * width, home(layer, part) + row * pitch, width)
    return {}


class Workers:
    """Two workers on a stream each that serve steps in turn and share one place for an adapter.

    Attributes:
        lost: ns that their streams had only the adapter's load, together.
    """

    matrices = 12

    def __init__(self, d: Device) -> None:
        self.d, self.pool, self.streams = d, Pool(d, d.bytes_of(40)), (d.compute, d.copies[12])
        self.lock, self.lost, self.over = threading.Lock(), 0, threading.Event()

    def load(self, stream: int) -> None:
        """The adapter to its place."""
        for matrix in range(self.matrices):
            self.pool.fetch(matrix * 2, matrix, stream)

    def step(self, rank: int, step: int, moves: Stretches) -> None:
        """Behind the last step of either worker the adapter comes, then this one computes; one step ahead."""
        d, stream = self.d, self.streams[rank]
        with self.lock:
            d.check(d.lib.cudaStreamWaitEvent(stream, d.events[0], 0))
            moves.begin()
            self.load(stream)
            moves.end()
            d.launch(600_000, stream)
            d.record(0, stream)
            d.record(8 + rank * 8 + step % 8, stream)
        if step:
            d.sync_event(8 + rank * 8 + (step - 1) % 8)
            moves.read(1)

    def ended(self, rank: int, moves: Stretches) -> None:
        """The worker's steps are over."""
        self.d.sync(self.streams[rank])
        with self.lock:
            self.lost += moves.read()

    def other(self) -> None:
        """What the second worker's thread does."""
        moves, step = Stretches(self.d, self.streams[1]), 0
        while not self.over.is_set():
            self.step(1, step, moves)
            step += 1
        self.ended(1, moves)


@twelfth(
    "redundant_loads",
    line=NOT_NEEDED,
    also=("weights_not_overlapped", "link_bound", "unmerged_neighbours"),
    like=("small_copies", "aliased_stream", "synchronisation", "python_or_gil_bound", "context_lock_stall"),
    blind=DEVICE,
)
def an_adapter_that_two_workers_share_and_each_loads_before_its_own_step(d: Device) -> Truth:
    """Two threads serve on a stream each, and before its step of 0.6 ms each sends the adapter to their one place.

    Twelve matrices of 40 us come behind the other one's step, by an event, and the step stands behind them: 0.48 ms of
    each 1.08 ms. The adapter was sent and waited for before the first step and is never changed on either side, so all
    of the window's loads bring what is there.
    """
    workers, moves, step = Workers(d), Stretches(d), 0
    workers.load(d.compute)
    d.record(0, d.compute)
    d.sync(d.compute)
    d.spent.restart()
    thread = in_thread(workers.other)
    for step in turns():
        workers.step(0, step, moves)
    workers.over.set()
    thread.join()
    workers.ended(0, moves)
    d.spent.add(NOT_NEEDED, workers.lost)
    d.spent.stop()
    last, size = workers.matrices - 1, workers.pool.size
    same(d, d.device + last * 2 * size, d.host + last * size, size)
    return {"redundant_loads": workers.lost}


@twelfth(
    "redundant_loads",
    line=NOT_NEEDED,
    also=("weights_not_overlapped", "link_bound", "unmerged_neighbours"),
    like=("small_copies", "pageable_memory", "synchronisation", "load_not_ordered", "launch_queue_saturation"),
    blind=DEVICE,
)
def a_prompt_s_blocks_brought_by_one_batch_call_for_each_of_its_six_beams(d: Device) -> Truth:
    """Six beams of a request are taken one after another, and for each the prompt's ten blocks come by one batch call.

    They come to the same slots behind the beam before, 0.36 ms of the link, and the beam's kernel of 0.3 ms waits for
    them. Three prompts take turns by the request: the first beam's load is needed, and the other five bring what is
    there, 1.8 ms of each 4 ms.
    """
    pool, blocks, beams, prompts, loads = Pool(d, d.bytes_of(36)), 10, 6, 3, d.copies[11]
    slots, waits, request = [d.device + i * 3 % 10 * 2 * pool.size for i in range(blocks)], Stretches(d), 0

    def home(number: int, block: int) -> int:
        return d.host + (number % prompts * blocks + block * 7 % blocks) * 2 * pool.size

    for request in turns():
        homes = [home(request, block) for block in range(blocks)]
        for beam in range(beams):
            event = (request % 4 * beams + beam) * 2
            waits.begin()
            d.order(loads, d.compute, event)
            d.batch(slots, homes, pool.size, loads)
            d.order(d.compute, loads, event + 1)
            waits.end()
            d.launch(300_000)
        paced(d, request, 2)
        if request > 1:
            waits.read(2 * beams)
    d.sync(d.compute)
    lost = waits.read() * (beams - 1) // beams
    d.spent.add(NOT_NEEDED, lost)
    d.spent.add(AT_LINK_RATE, waits.ns - lost)
    d.spent.stop()
    for block in (0, blocks - 1):
        same(d, slots[block], home(request, block), pool.size)
    return {"redundant_loads": lost}
