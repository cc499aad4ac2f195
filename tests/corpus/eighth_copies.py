"""Eighth programs whose kernels wait for copies: guesses, chunks, adapters, prefixes, pairs, tiles, parameters."""

from __future__ import annotations

import ctypes as ct

from accounts import Pool, Stretches, paced, paced_and_read, turns
from device import D2H, H2D, Attributes, Device
from fresh_copies import clear, copy_2d
from registry import (
    AT_LINK_RATE,
    BELOW_LINK_RATE,
    DEVICE,
    NOT_NEEDED,
    SUBMITTING,
    KiB,
    Truth,
    eighth,
)
from unseen_copies import same


@eighth(
    line=AT_LINK_RATE,
    also=("weights_not_overlapped", "link_bound", "unmerged_neighbours"),
    like=("redundant_loads", "wasted_stores", "small_copies", "pageable_memory", "launch_queue_saturation"),
)
def the_cache_before_each_guess_kept_on_the_host_and_brought_back(d: Device) -> Truth:
    """Six blocks leave before a verification of 0.9 ms overwrites them, and come back as the guesses were wrong.

    Everything is on the model's stream: of each round 0.6 ms are stores and 0.6 ms loads, with no kernel beside them,
    and 1 ms are kernels. What leaves was computed in this round, and what comes back was overwritten on the device.
    """
    pool, blocks, moves, turn = Pool(d, d.bytes_of(100)), 6, Stretches(d), 0
    for turn in turns():
        for i in range(blocks):
            clear(d, d.device + i * pool.size, (turn * blocks + i) % 240, pool.size, d.compute)
        d.launch(100_000)
        moves.begin()
        for i in range(blocks):
            d.copy(d.host + i * pool.size, d.device + i * pool.size, pool.size, D2H, d.compute)
        moves.end()
        clear(d, d.device, 250 + turn % 4, blocks * pool.size, d.compute)
        d.launch(900_000)
        moves.begin()
        for i in range(blocks):
            pool.fetch(i, i, d.compute)
        moves.end()
        paced(d, turn, 1)
        if turn:
            moves.read(2)
    d.sync(d.compute)
    d.spent.add(AT_LINK_RATE, moves.read())
    d.spent.stop()
    same(d, d.device + 5 * pool.size, d.host + 5 * pool.size, pool.size)
    if ct.string_at(d.host + 5 * pool.size, 64) != bytes([(turn * blocks + 5) % 240]) * 64:
        raise RuntimeError("other bytes came back than were computed")
    return {}


@eighth(
    line=AT_LINK_RATE,
    also=("weights_not_overlapped", "link_bound", "unmerged_neighbours"),
    like=("redundant_loads", "wasted_stores", "small_copies", "synchronisation", "launch_queue_saturation"),
)
def a_prompt_s_chunks_each_of_which_has_all_before_it_brought_back(d: Device) -> Truth:
    """A prompt of eight chunks is prefilled between decode steps that take its slots; each chunk needs all before it.

    A chunk computes for 0.5 ms and a decode step for 0.2 ms, and a block takes 0.15 ms of the link each time. Of a
    prompt's eight chunks 28 loads and 7 stores are on the model's stream: 5.2 ms without a kernel, beside 5.6 ms.
    """
    pool, chunks, moves, step = Pool(d, d.bytes_of(150)), 8, Stretches(d), 0
    for step in turns():
        prompt, chunk = divmod(step, chunks)
        mine = d.device + chunk * pool.size
        clear(d, d.device, 250 + step % 4, chunks * pool.size, d.compute)  # what decodes has all slots
        d.launch(200_000)
        moves.begin()
        for i in range(chunk):
            pool.fetch(i, i, d.compute)
        moves.end()
        clear(d, mine, (prompt * chunks + chunk) % 240, pool.size, d.compute)
        d.launch(500_000)
        if chunk < chunks - 1:
            moves.begin()
            d.copy(d.host + chunk * pool.size, mine, pool.size, D2H, d.compute)
            moves.end()
        paced_and_read(d, step, moves, 2)
    d.sync(d.compute)
    d.spent.add(AT_LINK_RATE, moves.read())
    d.spent.stop()
    same(d, d.device, d.host, pool.size)
    if ct.string_at(d.host, 64) != bytes([step // chunks * chunks % 240]) * 64:
        raise RuntimeError("other bytes came back than were computed")
    return {}


@eighth(
    line=AT_LINK_RATE,
    also=("weights_not_overlapped", "link_bound", "unmerged_neighbours"),
    like=("redundant_loads", "small_copies", "pageable_memory", "synchronisation", "launch_queue_saturation"),
)
def clean_weights_sent_again_to_take_an_adapter_out_of_them(d: Device) -> Truth:
    """Each batch has its adapter added into eight tensors in place, after the clean tensors have come once more.

    The tensors take the link 0.72 ms on the model's stream, and the two kernels of a batch 0.8 ms. To add an adapter
    rewrites a tensor but for its last 4 KiB, so that what comes is not what the device has.
    """
    pool, tensors, moves, batch = Pool(d, d.bytes_of(90)), 8, Stretches(d), 0
    rank, adapters = 64 * KiB, d.size // 2
    for batch in turns():
        moves.begin()
        for tensor in range(tensors):
            pool.fetch(tensor, tensor, d.compute)
        moves.end()
        home = d.host + adapters + batch % 24 * rank
        d.copy(d.device + adapters, home, rank, H2D, d.compute)
        for tensor in range(tensors):
            clear(d, d.device + tensor * pool.size, (batch + tensor) % 251, pool.size - 4 * KiB, d.compute)
        for _ in range(2):
            d.launch(400_000)
        paced(d, batch, 1)
        if batch:
            moves.read(1)
    d.sync(d.compute)
    d.spent.add(AT_LINK_RATE, moves.read())
    d.spent.stop()
    last = tensors * pool.size - 4 * KiB
    same(d, d.device + last, d.host + last, 4 * KiB)
    same(d, d.device + adapters, d.host + adapters + batch % 24 * rank, rank)
    return {}


@eighth(
    line=AT_LINK_RATE,
    also=(
        *("weights_not_overlapped", "link_bound", "synchronisation", "gpu_starved", "head_of_line_copies"),
        "unmerged_neighbours",
    ),
    like=("redundant_loads", "small_copies", "pageable_memory", "load_not_ordered", "launch_queue_saturation"),
)
def two_prefixes_that_come_block_by_block_in_turn(d: Device) -> Truth:
    """Two requests' prefixes, 16 blocks each, come in turn on one stream; each prefill of 0.7 ms waits for its last.

    All 32 blocks take the link 1.6 ms, and the first request's last block is the last but one: no kernel runs until
    then. The next two requests come when both are answered, so this is 1.55 ms of each 3 ms. They have the slots of the
    two before and other blocks than these, so no block that comes is on the device.
    """
    pool, blocks, loads, waits, pair = Pool(d, d.bytes_of(50)), 16, d.copies[0], Stretches(d), 0
    homes, held = min(pool.count, 71), set[int]()
    for pair in turns():
        first = pair * 2 * blocks
        coming = {(first + place) % homes for place in range(2 * blocks)}
        if coming & held or len(coming) < 2 * blocks:
            raise RuntimeError("a block that comes is on the device")
        held = coming  # in the slots of those before
        waits.begin()
        for i in range(blocks):
            for request in range(2):
                place = request * blocks + i
                pool.fetch(place, (first + place) % homes, loads)
                if i == blocks - 1:
                    d.record(pair % 16 * 2 + request, loads)
        for request in range(2):
            d.check(d.lib.cudaStreamWaitEvent(d.compute, d.events[pair % 16 * 2 + request], 0))
            if not request:
                waits.end()
            d.launch(700_000)
        d.copy(d.host + d.size - 4 * KiB, d.device + d.size - 4 * KiB, 512, D2H, d.compute)
        d.sync(d.compute)
        waits.read()
    d.spent.add(AT_LINK_RATE, waits.ns)
    d.spent.stop()
    place = pair * 2 * blocks + 2 * blocks - 1
    same(d, d.device + (2 * blocks - 1) * pool.size, d.host + place % homes * pool.size, pool.size)
    return {}


@eighth(
    "small_copies",
    line=BELOW_LINK_RATE,
    or_lines=(SUBMITTING,),  # where a recorder makes each call longer than its copy takes
    also=("weights_not_overlapped", "gpu_starved", "python_or_gil_bound"),
    like=("redundant_loads", "wasted_stores", "unmerged_neighbours", "pageable_memory", "launch_queue_saturation"),
)
def blocks_exchanged_with_the_host_one_out_one_in(d: Device) -> Truth:
    """Behind a step of 0.6 ms 150 blocks of 16 KiB leave, and into each one's slot another comes, all on one stream.

    Each load has to stand behind the store of its slot, so the stream turns round 300 times. The GPU takes above 1.6 us
    for each copy, of which the link needs 0.3 us: at least 0.48 ms of each 1.1 ms without a kernel.
    """
    size, pairs, moves, step, head = 16 * KiB, 150, Stretches(d), 0, 64
    copy, stream, fresh = d.lib.cudaMemcpyAsync, d.compute, d.host + d.size // 2
    slots = [d.device + i * 2 * size for i in range(pairs)]
    homes = [[d.host + (i * 2 + part) * size for i in range(pairs)] for part in range(2)]
    for step in turns():
        clear(d, d.device, step % 251, 2 * pairs * size, stream)
        copy_2d(d, (d.device, 2 * size), (fresh + step % 64 * pairs * head, head), head, pairs, H2D, stream)
        d.launch(600_000)
        out, back, code = homes[step % 2], homes[1 - step % 2], 0
        moves.begin()
        for i in range(pairs):
            code |= copy(out[i], slots[i], size, D2H, stream)
            code |= copy(slots[i], back[i], size, H2D, stream)
        moves.end()
        d.check(code)
        paced_and_read(d, step, moves)
    d.sync(stream)
    d.spent.add(BELOW_LINK_RATE, moves.read())
    d.spent.stop()
    same(d, slots[77], homes[1 - step % 2][77], size)
    if ct.string_at(homes[step % 2][77], head) != ct.string_at(fresh + (step % 64 * pairs + 77) * head, head):
        raise RuntimeError("other bytes left than were in the slot")
    return {"small_copies": moves.ns - int((step + 1) * 2 * pairs * size / d.bytes_per_us * 1_000)}


@eighth(
    line=BELOW_LINK_RATE,
    or_lines=(SUBMITTING,),  # the one call takes time for each of its pieces, too
    also=("descriptor_bound_batch", "small_copies", "weights_not_overlapped", "gpu_starved"),
    like=("redundant_loads", "unmerged_neighbours", "pageable_memory", "synchronisation", "launch_queue_saturation"),
)
def experts_brought_by_one_batch_of_their_tiles_and_scales(d: Device) -> Truth:
    """Before each layer of 0.5 ms an expert comes by one cudaMemcpyBatchAsync: tiles of 1 KiB, and 128 bytes to each.

    The pieces lie scattered, and an expert's have the slots of the one before. The GPU takes longer for each than the
    link for 1 KiB, which is 0.02 us. How long a piece takes is measured first, and so many are taken that a batch lasts
    0.8 ms: no kernel runs meanwhile.
    """
    tile, scale, room, experts, moves, layer = 1 * KiB, 128, 4 * KiB, 4, Stretches(d), 0
    attributes, index = Attributes(1, 2, 0, 1, 0, 0), (ct.c_size_t * 1)(0)

    def home(number: int, i: int) -> int:
        return d.host + (number * 2_048 + i) * 7_919 % 8_192 * room

    def slot(i: int) -> int:
        return d.device + i * 4_099 % 8_192 * room

    def expert(number: int, tiles: int) -> tuple[int, tuple[object, object, object]]:
        """How many pieces it has, and their places and sizes."""
        homes, slots = ([home(number, i) for i in range(tiles)], [slot(i) for i in range(tiles)])
        targets, sources = (
            [at + part for at in slots for part in (0, tile)],
            [at + part for at in homes for part in (0, 2 * tile)],
        )
        count, p = 2 * tiles, ct.c_void_p
        return count, ((p * count)(*targets), (p * count)(*sources), (ct.c_size_t * count)(*(tile, scale) * tiles))

    def bring(pieces: tuple[int, tuple[object, object, object]]) -> None:
        count, lists = pieces
        moves.begin()
        d.check(d.lib.cudaMemcpyBatchAsync(*lists, count, ct.byref(attributes), index, 1, d.compute))
        moves.end()

    few = expert(0, 256)
    for _ in range(4):
        moves.ns = 0
        d.launch(2_000_000)  # the device has the whole batch when it begins with it
        bring(few)
        d.sync(d.compute)
        moves.read()
    tiles = min(max(256 * 800_000 // max(moves.ns, 1), 128), 2_048)
    all_of_them = [expert(number, tiles) for number in range(experts)]
    moves.ns = 0
    d.spent.restart()
    for layer in turns():
        bring(all_of_them[layer % experts])
        d.launch(500_000)
        paced(d, layer, 1)
        if layer:
            moves.read(1)
    d.sync(d.compute)
    d.spent.add(BELOW_LINK_RATE, moves.read())
    d.spent.stop()
    for i in (0, tiles - 1):
        same(d, slot(i), home(layer % experts, i), tile)
        same(d, slot(i) + tile, home(layer % experts, i) + 2 * tile, scale)
    return {}


@eighth(
    "redundant_loads",
    line=NOT_NEEDED,
    also=("weights_not_overlapped", "link_bound"),
    like=("small_copies", "pageable_memory", "synchronisation", "load_not_ordered", "launch_queue_saturation"),
    blind=DEVICE,
)
def parameters_sent_again_for_each_micro_batch_of_an_accumulation(d: Device) -> Truth:
    """A stage's parameters come before each of six micro-batches of 0.6 ms, and change only after all six.

    A load takes 0.5 ms on the model's stream. The optimizer on the CPU's side writes the next version beside the last
    one, so the first load of an accumulation is needed, and five bring to one place what it holds: 2.5 ms of each 6.6.
    """
    size, parts, versions, sends, turn = d.bytes_of(500), 6, 3, Stretches(d), 0
    for turn in turns():
        version = turn // parts % versions
        sends.begin()
        d.copy(d.device, d.host + version * size, size, H2D, d.compute)
        sends.end()
        d.launch(600_000)
        paced(d, turn, 1)
        if turn:
            sends.read(1)
    d.sync(d.compute)
    again = turn + 1 - (turn // parts + 1)
    lost = sends.read() * again // (turn + 1)
    d.spent.add(NOT_NEEDED, lost)
    d.spent.add(AT_LINK_RATE, sends.ns - lost)
    d.spent.stop()
    at = turn // parts % versions * size
    same(d, d.device + size - 64 * KiB, d.host + at + size - 64 * KiB, 64 * KiB)
    return {"redundant_loads": lost}
