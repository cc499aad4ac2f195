"""Ninth programs whose kernels wait for copies: an exchange, a retry, a cache that moves, states, weights, features."""

from __future__ import annotations

import ctypes as ct
from concurrent.futures import ThreadPoolExecutor
from typing import Any

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
    ninth,
)
from unseen_copies import D2D, same

EITHER_WAY = 4  # cudaMemcpyDefault: the runtime tells the direction by the addresses
PER_THREAD = 2  # cudaStreamPerThread
MADE: dict[str, Any] = {}  # before a program begins


@ninth(
    line=AT_LINK_RATE,
    or_lines=(BELOW_LINK_RATE,),  # both ways at once each may be somewhat slower than alone
    also=("weights_not_overlapped", "link_bound", "unmerged_neighbours", "wasted_stores"),
    like=("redundant_loads", "small_copies", "pageable_memory", "synchronisation", "launch_queue_saturation"),
)
def tokens_exchanged_between_experts_through_the_host_after_each_layer(d: Device) -> Truth:
    """After each layer of 0.6 ms its tokens leave to four peers while the peers' tokens come, on a stream each way.

    Both ways take the link 0.6 ms at once; the next layer waits for both streams, and they for the layer before: at
    least half of the time no kernel runs. What leaves was computed in this layer, and what comes is another set.
    """
    peers, sets, moves, layer = 4, 3, Stretches(d), 0
    pool, out, back = Pool(d, d.bytes_of(150)), d.copies[0], d.copies[1]
    for layer in turns():
        first = (1 + layer % sets) * peers
        clear(d, d.device, layer % 251, peers * pool.size, d.compute)
        d.launch(600_000)
        moves.begin()
        d.order(out, d.compute, layer % 16 * 4)
        d.order(back, d.compute, layer % 16 * 4 + 1)
        for peer in range(peers):
            d.copy(d.host + peer * pool.size, d.device + peer * pool.size, pool.size, D2H, out)
            pool.fetch(peers + peer, first + peer, back)
        d.order(d.compute, out, layer % 16 * 4 + 2)
        d.order(d.compute, back, layer % 16 * 4 + 3)
        moves.end()
        paced_and_read(d, layer, moves)
    d.sync(d.compute)
    d.spent.add(AT_LINK_RATE, moves.read())
    d.spent.stop()
    home = (1 + layer % sets) * peers + peers - 1
    same(d, d.device + (2 * peers - 1) * pool.size, d.host + home * pool.size, pool.size)
    if ct.string_at(d.host + peers * pool.size - 64, 64) != bytes([layer % 251]) * 64:
        raise RuntimeError("other tokens left than were computed")
    return {}


@ninth(
    "redundant_loads",
    line=NOT_NEEDED,
    also=(
        *("weights_not_overlapped", "link_bound", "synchronisation", "gpu_starved", "unmerged_neighbours"),
        "python_or_gil_bound",
    ),
    like=("small_copies", "pageable_memory", "load_not_ordered", "launch_queue_saturation", "allocation_on_hot_path"),
    blind=DEVICE,
)
def a_prefix_loaded_again_whole_when_it_was_late(d: Device) -> Truth:
    """A prefix of sixteen blocks is to be there in 0.2 ms, takes 0.4 ms, and is asked for again until the third time.

    The thread waits for each load, finds that it was late and loads all blocks to the same places once more; then the
    prefill of 0.5 ms runs. Of 1.7 ms two loads, 0.8 ms, bring what is there. Each request has another prefix.
    """
    pool, blocks, loads, loading, request = Pool(d, d.bytes_of(25)), 16, d.copies[0], Stretches(d, d.copies[0]), 0
    prefixes, attempts, within, lost = min(pool.count // blocks - 1, 8), 3, 200_000, 0
    for request in turns():
        first = request % prefixes * blocks
        for attempt in range(attempts):
            before = loading.ns
            loading.begin()
            for i in range(blocks):
                pool.fetch(i, first + i, loads)
            loading.end()
            d.sync(loads)
            took = loading.read() - before
            lost += took if attempt else 0
            if took <= within:
                break
        d.launch(500_000)
        d.sync(d.compute)
    d.spent.add(NOT_NEEDED, lost)
    d.spent.add(AT_LINK_RATE, loading.ns - lost)
    d.spent.stop()
    last = request % prefixes * blocks + blocks - 1
    same(d, d.device + (blocks - 1) * pool.size, d.host + last * pool.size, pool.size)
    return {"redundant_loads": lost}


class Cache:
    """Two memories of the device; a cache of some layers is in one, and a longer one of the same layers is made of it.

    Attributes:
        size: of a layer, bytes, without the tokens that it grows by; room: from one layer to the next.
    """

    def __init__(self, d: Device) -> None:
        self.d, self.layers = d, 16
        self.size = (32 if d.gpu else 1) * MiB
        self.room = self.size + 256 * KiB
        self.at = [d.made("cudaMalloc", self.layers * self.room) for _ in range(2)]

    def begin(self) -> None:
        """Each layer of the first memory gets bytes of its own at its head."""
        d = self.d
        for layer in range(self.layers):
            d.copy(self.at[0] + layer * self.room, d.host + layer * 64 * KiB, 64 * KiB, H2D, d.compute)

    def grow(self, step: int) -> None:
        """Each layer is copied to the other memory, and a token of 4 KiB is put to its end."""
        old, new = self.at[step % 2], self.at[1 - step % 2]
        for layer in range(self.layers):
            self.d.copy(new + layer * self.room, old + layer * self.room, self.size, D2D, self.d.compute)
        for layer in range(self.layers):
            clear(self.d, new + layer * self.room + self.size, step % 251, 4 * KiB, self.d.compute)


def make_the_growing_cache(d: Device) -> None:
    """The cache, and how long the device takes to make a longer one of it."""
    cache, moves, taken = Cache(d), Stretches(d), []
    for step in range(6):
        d.launch(300_000)
        moves.ns = 0
        moves.begin()
        cache.grow(step)
        moves.end()
        d.sync(d.compute)
        taken.append(moves.read())
    MADE["cache"] = cache, min(taken)


@ninth(
    line=INSIDE_GPU,
    also=("gpu_starved",),
    like=("small_copies", "redundant_loads", "unmerged_neighbours", "weights_not_overlapped", "synchronisation"),
    prepare=make_the_growing_cache,
)
def a_cache_that_is_copied_whole_within_the_device_to_grow_by_a_token(d: Device) -> Truth:
    """Before each step the cache's sixteen layers, 512 MiB, are copied within the device to where one more token fits.

    The copies are on the model's stream, one for each layer. How long the device takes for all was measured before, and
    a step computes for as long: half of the time only these copies run.
    """
    (cache, each), moves, step = MADE.pop("cache"), Stretches(d), 0
    cache.begin()
    d.spent.restart()
    for step in turns():
        moves.begin()
        cache.grow(step)
        moves.end()
        for _ in range(2):
            d.launch(each // 2)
        paced_and_read(d, step, moves)
    d.sync(d.compute)
    d.spent.add(INSIDE_GPU, moves.read())
    d.spent.stop()
    last = cache.at[1 - step % 2] + 15 * cache.room
    same(d, last, d.host + 15 * 64 * KiB, 64 * KiB)
    d.copy(d.host, last + cache.size, 64, D2H, d.compute)
    d.sync(d.compute)
    if ct.string_at(d.host, 64) != bytes([step % 251]) * 64:
        raise RuntimeError("the cache has another token than was put to its end")
    for at in cache.at:
        d.check(d.lib.cudaFree(at))
    return {}


@ninth(
    "small_copies",
    line=BELOW_LINK_RATE,
    or_lines=(SUBMITTING,),  # where a recorder makes each call longer than its copy takes
    also=("weights_not_overlapped", "gpu_starved", "python_or_gil_bound"),
    like=("redundant_loads", "unmerged_neighbours", "pageable_memory", "allocation_on_hot_path"),
)
def states_of_a_recurrent_model_brought_back_by_layer_and_sequence(d: Device) -> Truth:
    """Eight sequences go on: their states of 40 layers come by 320 copies of 8 KiB, then a step of 0.6 ms runs.

    All is on the model's stream and submitted a step ahead, for which the thread has as long as both take. The GPU
    takes above 1.2 us for each copy, of which the link needs 0.15 us: 0.38 ms or more of each step without a kernel.
    States lie scattered; other sequences had the slots.
    """
    size, states, sets, moves, step = 8 * KiB, 40 * 8, 16, Stretches(d), 0
    homes, spread = d.size // size - 8, 7_919  # the pool's end is lost to `same`
    steps = [
        [
            (d.device + i * 37 % 1_024 * 2 * size, d.host + (one * states + i) * spread % homes * size)
            for i in range(states)
        ]
        for one in range(sets)
    ]
    d.spent.restart()
    for step in turns():
        moves.begin()
        d.rapid(steps[step % sets], size, H2D, d.compute)
        moves.end()
        for _ in range(2):
            d.launch(300_000)
        paced_and_read(d, step, moves)
    d.sync(d.compute)
    d.spent.add(BELOW_LINK_RATE, moves.read())
    d.spent.stop()
    for i in (0, states - 1):
        same(d, *steps[step % sets][i], size)
    return {"small_copies": moves.ns - int((step + 1) * states * size / d.bytes_per_us * 1_000)}


@ninth(
    line=AT_LINK_RATE,
    also=("weights_not_overlapped", "link_bound", "synchronisation", "gpu_starved", "unmerged_neighbours"),
    like=("redundant_loads", "small_copies", "pageable_memory", "aliased_stream", "allocation_on_hot_path"),
)
def new_weights_loaded_by_a_worker_on_its_own_default_stream_between_rollouts(d: Device) -> Truth:
    """A worker thread loads ten new tensors, 1.2 ms of the link, then decodes three steps of 0.4 ms, and so on.

    All is on the thread's own default stream (cudaStreamPerThread), so no kernel runs beside a load: half of the time.
    The trainer writes a version beside the last one, so each load brings bytes that the GPU does not have.
    """
    pool, tensors, versions = Pool(d, d.bytes_of(120)), 10, 2
    moves, back = Stretches(d, PER_THREAD), d.size - 4 * KiB

    def work() -> int:
        rollout = 0
        for rollout in turns():
            moves.begin()
            for tensor in range(tensors):
                pool.fetch(tensor, rollout % versions * tensors + tensor, PER_THREAD)
            moves.end()
            for _ in range(3):
                d.launch(400_000, PER_THREAD)
            d.copy(d.host + back, d.device + back, 512, D2H, PER_THREAD)
            d.sync(PER_THREAD)
            moves.read()
        return rollout

    with ThreadPoolExecutor(1) as worker:
        d.spent.restart()
        last = worker.submit(work).result()
        d.spent.add(AT_LINK_RATE, moves.ns)
        d.spent.stop()
    home = (last % versions * tensors + tensors - 1) * pool.size
    same(d, d.device + (tensors - 1) * pool.size, d.host + home, pool.size)
    return {}


@ninth(
    line=AT_LINK_RATE,
    also=("weights_not_overlapped", "link_bound", "synchronisation", "gpu_starved"),
    like=("redundant_loads", "wasted_stores", "small_copies", "pageable_memory", "launch_queue_saturation"),
)
def features_of_an_image_that_go_to_the_model_by_way_of_the_host_s_cache(d: Device) -> Truth:
    """An encoder's features leave for a cache on the host, and when they are there the model's stream brings them back.

    The encoder computes for 0.5 ms, the prefill for 0.5 ms, and each way takes the link 0.4 ms. The thread waits for
    each of the two streams in turn, so the 0.8 ms of copies run alone. The direction is left to the runtime to find.
    """
    size, slots, encoder, image = d.bytes_of(400), 4, d.copies[8], 0
    leave, come = Stretches(d, encoder), Stretches(d)
    for image in turns():
        home = d.host + image % slots * size
        clear(d, d.device, image % 251, size, encoder)
        d.launch(500_000, encoder)
        leave.begin()
        d.copy(home, d.device, size, EITHER_WAY, encoder)
        leave.end()
        d.sync(encoder)
        come.begin()
        d.copy(d.device + size, home, size, EITHER_WAY, d.compute)
        come.end()
        d.launch(500_000)
        d.sync(d.compute)
        leave.read()
        come.read()
    d.spent.add(AT_LINK_RATE, leave.ns + come.ns)
    d.spent.stop()
    same(d, d.device + size, d.host + image % slots * size, size)
    if ct.string_at(d.host + image % slots * size, 64) != bytes([image % 251]) * 64:
        raise RuntimeError("other features left than were computed")
    return {}
