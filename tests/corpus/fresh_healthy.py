"""Fresh programs that are healthy, most of them the cured twin of one that is not; of one, nothing can be said."""

from __future__ import annotations

import threading

from accounts import Pool, paced, think
from device import D2H, H2D, Device
from fresh_copies import computed
from fresh_host import handed_out
from registry import COMPUTING, EVERY, NOTHING_TO_DO, KiB, MiB, Truth, fresh, in_thread


@fresh(line=COMPUTING, like=("small_copies", "weights_not_overlapped", "redundant_loads", "launch_queue_saturation"))
def lora_adapters_brought_a_batch_ahead(d: Device) -> Truth:
    """The next batch's adapter comes on a side stream into the other of two sets of slots while this one computes."""
    pool, parts = Pool(d, d.bytes_of(5.5)), 56
    for batch in range(130):
        side = batch % 2 * parts
        if batch > 1:
            d.check(d.lib.cudaStreamWaitEvent(d.copies[0], d.events[200 + batch % 2], 0))
        for i in range(parts):
            pool.fetch(side + i, 211 * (i + parts * (batch % 10)) % pool.count, d.copies[0])
        d.order(d.compute, d.copies[0], batch % 64)
        for _ in range(4):
            d.launch(600_000)
        d.record(200 + batch % 2, d.compute)
        paced(d, batch, 2)
    return {}


@fresh(line=COMPUTING, like=("gpu_starved", "synchronisation", "wasted_stores"), also=("wasted_stores",))
def a_staging_ring_of_four_slots_to_the_decode_node(d: Device) -> Truth:
    """A prefill's KV leaves through four pinned slots beside the next prefills, which never wait for the sender."""
    handed_out(d, 4, 130, 1_200)
    return {}


@fresh(line=COMPUTING, like=("synchronisation", "python_or_gil_bound", "gpu_starved", "cpu_starved"))
def a_spinner_on_event_queries(d: Device) -> Truth:
    """A busy loop asks an event whether the step before is over, hundreds of times a step; the next runs already."""
    for step in range(100):
        for _ in range(3):
            d.launch(900_000)
        d.record(step, d.compute)
        while step and d.lib.cudaEventQuery(d.events[step - 1]):
            think(8)
    return {}


@fresh(line=COMPUTING, like=("synchronisation", "small_copies", "head_of_line_copies"), also=("wasted_stores",))
def logits_read_two_steps_later(d: Device) -> Truth:
    """Logits of 256 KiB leave on a side stream after each step and are looked at two steps later."""
    pool = Pool(d, 256 * KiB)
    for step in range(150):
        d.launch(900_000)
        d.launch(900_000)
        computed(d, pool, step % 4, 1, step)
        d.order(d.copies[2], d.compute, step % 100)
        d.copy(d.host + step % 4 * pool.size, d.device + step % 4 * pool.size, pool.size, D2H, d.copies[2])
        d.record(100 + step % 8, d.copies[2])
        if step > 1:
            d.sync_event(100 + (step - 2) % 8)
            think(200)
    return {}


@fresh(
    line=NOTHING_TO_DO,
    like=("link_bound", "weights_not_overlapped", "synchronisation", "first_calls"),
    also=("first_calls",),
    undecided_in=EVERY,
)
def weights_loaded_once_and_nothing_served(d: Device) -> Truth:
    """A start-up and no more: layers come over the link once, each to its place, two kernels warm up, and it ends."""
    size, layers = (24 * MiB, 300) if d.gpu else (1 * MiB, 60)
    weights = d.made("cudaMalloc", size * layers)
    for layer in range(layers):
        at = layer * 148 * KiB % (d.size - size)  # no two are equal
        d.copy(weights + layer * size, d.host + at, size, H2D, d.copies[0])
        d.sync(d.copies[0])
    d.launch(200_000)
    d.launch(200_000)
    d.sync(d.compute)
    d.check(d.lib.cudaFree(weights))
    return {}


@fresh(line=COMPUTING, like=("context_lock_stall", "python_or_gil_bound", "gpu_starved"), also=("wasted_stores",))
def two_micro_batches_of_two_threads(d: Device) -> Truth:
    """Two threads each run a micro-batch on a stream of their own; while one waits, the other's kernels run."""

    def batch(number: int) -> None:
        stream, at = (d.compute, d.copies[7])[number], number * 16 * MiB
        for step in range(110):
            d.load(step + 200 * number, 64 * KiB, stream)
            for _ in range(3):
                d.launch(600_000, stream)
            d.copy(d.host + at + step % 8 * 4096, d.device + at, 512, D2H, stream)
            d.record(10 * number + step % 4, stream)
            if step:
                d.sync_event(10 * number + (step - 1) % 4)

    other: threading.Thread = in_thread(lambda: batch(1))
    batch(0)
    other.join()
    return {}
