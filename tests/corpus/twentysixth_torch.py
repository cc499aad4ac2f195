"""Twenty-sixth programs, all in torch on two GPUs: exchanges, hand-overs, broadcasts, lockstep, turns, queues."""

from __future__ import annotations

import itertools
import random
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from accounts import turns
from device import Device, beyond, now
from registry import (
    ALLOCATING,
    AT_LINK_RATE,
    BELOW_LINK_RATE,
    COMPUTING,
    DEVICE,
    ELSEWHERE,
    FULL_QUEUE,
    INSIDE_GPU,
    NOT_NEEDED,
    PAGEABLE,
    PYTHON,
    SUBMITTING,
    TIER,
    WAITING,
    Truth,
    twentysixth,
)
from seventeenth_copies import equal

# ---- what all programs here share -----------------------------------------------------------------------------------

GPUS = (0, 1)
SIDE, WIDE = 4096, 8192  # of a matrix of 32 MiB, and of one of 128 MiB; a place, SIDE x WIDE, has 64 MiB
PLACES = 8  # on each GPU, and in pinned memory
G: dict[str, Any] = {}  # what both GPUs have, made once: for most names a list with one entry for each GPU


class Passed:
    """What passed on a stream of one of the GPUs between two places in it, all such stretches together, by its events.

    Attributes:
        ns: of the stretches that were read; a stretch can be read when the GPU has passed its end.
    """

    def __init__(self, gpu: int, stream: Any = None) -> None:
        self.ring, self.stream = G["timing"][gpu], stream or G["mains"][gpu]
        self.ns, self.opened, self.pairs = 0, list[Any](), deque[tuple[Any, Any]]()

    def mark(self) -> Any:
        event = next(self.ring)
        event.record(self.stream)
        return event

    def begin(self) -> None:
        self.opened = [self.mark()]

    def end(self) -> None:
        """Ends the stretch that was begun last, if there is one."""
        for opened in self.opened:
            self.pairs.append((opened, self.mark()))
        self.opened = []

    def read(self, keep: int = 0) -> int:
        """Adds up all stretches but the last `keep`, over which the GPU may still be."""
        while len(self.pairs) > keep:
            begin, end = self.pairs.popleft()
            self.ns += int(begin.elapsed_time(end) * 1e6)
        return self.ns


def ready_pair(_: Device) -> None:
    """What both GPUs have; the first calls of both, and between both, happen now."""
    import torch

    if not G:
        make_shared()
        G["gpus"] = [make_of(gpu) for gpu in GPUS]
        for name in G["gpus"][0]:
            G[name] = [of[name] for of in G["gpus"]]
        G["pairs"] = [(G["leaving"][gpu], G["coming"][1 - gpu]) for gpu in GPUS]
    for gpu in GPUS:
        small(gpu, 3)
        large(gpu, 3)
        report(gpu, 0)
        G["places"][gpu][0].copy_(G["homes"][0], non_blocking=True)
        with torch.cuda.device(gpu):
            G["places"][gpu][0].neg_()
        hand_over(gpu, 0, 1)
    settle()


def make_shared() -> None:
    """Pinned homes whose numbers are random, relays for what goes on to the other GPU, and rows for what is made."""
    import torch

    torch.manual_seed(26)
    G["homes"] = [torch.empty(SIDE, WIDE, dtype=torch.bfloat16, pin_memory=True) for _ in range(PLACES)]
    for home in G["homes"]:
        home.copy_(torch.randn(SIDE, WIDE, device="cuda:0", dtype=torch.bfloat16))
    G["relays"] = [torch.empty(SIDE, WIDE, dtype=torch.bfloat16, pin_memory=True) for _ in range(4)]
    G["rows"] = [torch.zeros(8, 64, dtype=torch.bfloat16, pin_memory=True) for _ in GPUS]


def make_of(gpu: int) -> dict[str, Any]:
    """What one GPU has: matrices, places, streams and events. A large product has nothing but ones."""
    import torch

    cuda: Any = torch.cuda
    with torch.cuda.device(gpu):
        made: dict[str, Any] = {"device": f"cuda:{gpu}", "dtype": torch.bfloat16}
        has = {
            "w": torch.randn(SIDE, SIDE, **made) / SIDE**0.5,
            "x": torch.randn(SIDE, SIDE, **made),
            "made": [torch.empty(SIDE, SIDE, **made) for _ in range(2)],
            "large_w": torch.full((WIDE, WIDE), 1 / WIDE, **made),
            "large_x": torch.ones(WIDE, WIDE, **made),
            "large_made": [torch.empty(WIDE, WIDE, **made) for _ in range(2)],
            "all_places": torch.randn(PLACES, SIDE, WIDE, **made),
            "of_key": torch.empty(SIDE, WIDE, **made),
            "mains": cuda.default_stream(gpu),
            "timing": [cuda.Event(enable_timing=True) for _ in range(512)],
        }
        has |= {name: cuda.Stream(device=gpu) for name in ("leaving", "coming", "loads", "stores")}
        has |= {name: [cuda.Event() for _ in range(8)] for name in ("paces", "came", "used")}
        for event in itertools.chain(has["timing"], has["paces"], has["came"], has["used"]):
            event.record(has["mains"])  # this makes it
        has["places"], has["timing"] = list(has["all_places"]), itertools.cycle(has["timing"])
        torch.cuda.synchronize(gpu)
    return has


def settle() -> None:
    """Waits until both GPUs have nothing left; the first one is the current one."""
    import torch

    for gpu in GPUS:
        torch.cuda.synchronize(gpu)
    torch.cuda.set_device(0)


def small(gpu: int, times: int) -> Any:
    """So many products of 4096 x 4096 x 4096 on a GPU, about 0.2 ms each on an H200, in memory of their own."""
    import torch

    x = G["x"][gpu]
    with torch.cuda.device(gpu):
        for number in range(times):
            x = torch.mm(x, G["w"][gpu], out=G["made"][gpu][number % 2])
    return x


def large(gpu: int, times: int) -> Any:
    """So many products of 8192 x 8192 x 8192 on a GPU, about 1.6 ms each on an H200, in memory of their own.

    All numbers of a product are one, so that both GPUs need the same power and are equally fast.
    """
    import torch

    x = G["large_x"][gpu]
    with torch.cuda.device(gpu):
        for number in range(times):
            x = torch.mm(x, G["large_w"][gpu], out=G["large_made"][gpu][number % 2])
    return x


def with_key(gpu: int, key: Any, times: int = 4) -> None:
    """A product with what has a place on the GPU, 0.4 ms, and large ones."""
    import torch

    with torch.cuda.device(gpu):
        torch.mm(G["x"][gpu], key, out=G["of_key"][gpu])
    large(gpu, times)


def negate(gpu: int, first: int, count: int = 1) -> None:
    """Changes all numbers of some places that lie side by side."""
    import torch

    with torch.cuda.device(gpu):
        G["all_places"][gpu][first : first + count].neg_()


def report(gpu: int, step: int) -> None:
    """The first numbers of a GPU's last large product but one to a pinned row."""
    import torch

    with torch.cuda.device(gpu):
        G["rows"][gpu][step % 8].copy_(G["large_made"][gpu][0][0, :64], non_blocking=True)


def all_ones() -> None:
    """Raises unless both GPUs have made large products as they are."""
    for gpu in GPUS:
        if set(G["large_made"][gpu][0][-1, -16:].tolist()) != {1.0}:
            raise RuntimeError("a product has other numbers than it should")


def hand_over(source: int, first: int, place: int, count: int = 1) -> None:
    """Places of a GPU that lie side by side to such of the other one, on this direction's stream of each, at once."""
    import torch

    leaving, coming = G["pairs"][source]
    made, wanted = G["all_places"][source], G["all_places"][1 - source]
    with torch.cuda.stream(leaving), torch.cuda.stream(coming):
        wanted[place : place + count].copy_(made[first : first + count], non_blocking=True)


def pace(step: int, lag: int = 2, gpus: tuple[int, ...] = GPUS) -> None:
    """Ends a step on the GPUs, and waits until they have ended the one `lag` before it."""
    for gpu in gpus:
        G["paces"][gpu][step % 8].record(G["mains"][gpu])
    for gpu in gpus if step >= lag else ():
        G["paces"][gpu][(step - lag) % 8].synchronize()


def on_both(d: Device, body: Callable[[int], None]) -> None:
    """A thread for each GPU; what is served begins when both have made their first product."""
    import torch

    gate = threading.Barrier(2, d.spent.restart, 20)

    def alone(gpu: int) -> None:
        with torch.cuda.device(gpu):
            small(gpu, 1)
            large(gpu, 1)
            G["mains"][gpu].synchronize()
            gate.wait()
            body(gpu)

    with ThreadPoolExecutor(2) as threads:
        for one in [threads.submit(alone, gpu) for gpu in GPUS]:
            one.result()


def taken(call: Callable[[], object]) -> list[int]:
    """How long each GPU takes for what `call` gives to both, all of which is submitted behind long products, in ns."""
    best = [1 << 60, 1 << 60]
    for _ in range(3):
        spans = [Passed(gpu) for gpu in GPUS]
        for gpu in GPUS:
            large(gpu, 12)
            spans[gpu].begin()
        call()
        for gpu in GPUS:
            spans[gpu].end()
        settle()
        best = [min(before, span.read()) for before, span in zip(best, spans, strict=True)]
    return [max(one, 1) for one in best]


def of_both(stretches: list[Passed], keep: int = 0) -> float:
    """What both GPUs had of something, as the mean of both, in ns."""
    return sum(one.read(keep) for one in stretches) / 2


# ---- kernels that wait for copies -----------------------------------------------------------------------------------

SHARDS = PLACES // 2  # places with the half of a layer that a GPU has made; behind them are as many for the other's


def ready_exchange(d: Device) -> None:
    ready_pair(d)
    for step in range(4):
        layer_and_exchange(step, [Passed(gpu, G["leaving"][gpu]) for gpu in GPUS])
    settle()


def layer_and_exchange(step: int, moves: list[Passed]) -> None:
    """A layer on both GPUs, each of which then hands its half to the other; what comes next stands behind both."""
    for gpu in GPUS:
        small(gpu, 2)
        negate(gpu, 0, SHARDS)
    for stream in itertools.chain(*G["pairs"]):
        for main in G["mains"]:
            stream.wait_stream(main)
    for gpu in GPUS:
        moves[gpu].begin()
        hand_over(gpu, 0, SHARDS, SHARDS)
        moves[gpu].end()
    for gpu in GPUS:
        G["mains"][gpu].wait_stream(G["leaving"][gpu])
        G["mains"][gpu].wait_stream(G["coming"][gpu])
    pace(step)


@twentysixth(
    line=INSIDE_GPU,
    also=("gpu_starved", "head_of_line_copies", "weights_not_overlapped", "link_bound"),
    like=("small_copies", "redundant_loads", "synchronisation", "allocation_on_hot_path", "pageable_memory"),
    prepare=ready_exchange,
    needs_gpu=True,
)
def torch_halves_of_a_layer_that_two_gpus_exchange_before_either_begins_the_next_layer(d: Device) -> Truth:
    """After each layer of 0.5 ms both GPUs hand 256 MiB of it to the other one, and the next layer stands behind that.

    Each direction has a stream on either GPU, so both go at once over NVLink, for 0.6 ms or more. All four streams
    wait for both GPUs' layers and both models' streams for all copies: no kernel can run beside them. Each layer
    changes all that is handed over. The host is two layers ahead.
    """
    moves = [Passed(gpu, G["leaving"][gpu]) for gpu in GPUS]
    d.spent.restart()
    for step in turns():
        layer_and_exchange(step, moves)
        of_both(moves, 3)
    settle()
    d.spent.add(INSIDE_GPU, of_both(moves))
    d.spent.stop()
    for gpu in GPUS:
        equal(G["places"][1 - gpu][-1], G["places"][gpu][SHARDS - 1])
    return {}


def ready_prefill(d: Device) -> None:
    ready_pair(d)
    for step in range(4):
        prefill_and_hand_over(step, Passed(0))
    settle()


def prefill_and_hand_over(step: int, moves: Passed) -> None:
    """A prompt on the first GPU, whose keys then go to the other one, on the stream that the next prompt is on."""
    import torch

    small(0, 1)
    negate(0, 0, PLACES)
    moves.begin()
    with torch.cuda.stream(G["coming"][1]):
        G["all_places"][1].copy_(G["all_places"][0], non_blocking=True)
    moves.end()
    pace(step, gpus=(0,))


@twentysixth(
    line=INSIDE_GPU,
    also=("gpu_starved", "head_of_line_copies", "weights_not_overlapped", "link_bound"),
    like=("small_copies", "redundant_loads", "synchronisation", "python_or_gil_bound", "wasted_stores"),
    prepare=ready_prefill,
    needs_gpu=True,
)
def torch_a_prefilling_gpu_that_sends_its_keys_to_the_decoding_one_on_the_stream_of_its_prompts(d: Device) -> Truth:
    """A GPU needs 0.5 ms for a prompt, and then sends 512 MiB of keys to the GPU that decodes, before the next prompt.

    The copies are on the stream of the prefill, 1.2 ms or more over NVLink, and nothing else runs there: two thirds of
    that GPU's time or more, a third of both GPUs'. The other GPU has a thread of its own with large products, two
    steps ahead, and the keys come to it on a side stream that no kernel waits for: it always computes.
    """
    moves = Passed(0)

    def serve(gpu: int) -> None:
        for step in turns():
            if gpu == 0:
                prefill_and_hand_over(step, moves)
                moves.read(3)
            else:
                large(1, 2)
                pace(step, gpus=(1,))

    on_both(d, serve)
    settle()
    d.spent.add(INSIDE_GPU, moves.read() / 2)
    d.spent.stop()
    equal(G["places"][1][-1], G["places"][0][-1])
    all_ones()
    return {}


def ready_broadcast(d: Device) -> None:
    ready_pair(d)
    for layer in range(4):
        broadcast(layer, [Passed(gpu) for gpu in GPUS])
    settle()


def broadcast(layer: int, moves: list[Passed], home: int | None = None) -> None:
    """A layer's weights out of their pinned home to the one place that both GPUs have for them; then the layer."""
    for gpu in GPUS:
        moves[gpu].begin()
        G["places"][gpu][0].copy_(G["homes"][layer % PLACES if home is None else home], non_blocking=True)
        moves[gpu].end()
        with_key(gpu, G["places"][gpu][0], 0)
    pace(layer)


@twentysixth(
    line=AT_LINK_RATE,
    or_lines=(BELOW_LINK_RATE,),  # both links are fed out of the same memory
    also=("weights_not_overlapped", "link_bound", "redundant_loads", "head_of_line_copies", "gpu_starved"),
    like=("small_copies", "pageable_memory", "allocation_on_hot_path", "python_or_gil_bound", "synchronisation"),
    prepare=ready_broadcast,
    needs_gpu=True,
)
def torch_weights_sent_out_of_pinned_memory_to_both_gpus_into_one_place_each_before_their_layer(d: Device) -> Truth:
    """Before each layer of 0.4 ms its 64 MiB of weights come out of pinned memory to both GPUs, over both links.

    Each GPU has one place for a layer's weights and one stream, and the link needs 1.2 ms, so neither can copy beside
    its product. Eight layers take turns: no load brings what is in its place. The host is two layers ahead.
    """
    moves, layer = [Passed(gpu) for gpu in GPUS], 0
    d.spent.restart()
    for layer in turns():
        broadcast(layer, moves)
        of_both(moves, 3)
    settle()
    d.spent.add(AT_LINK_RATE, of_both(moves))
    d.spent.stop()
    for gpu in GPUS:
        equal(G["places"][gpu][0], G["homes"][layer % PLACES])
    return {}


def ready_through_host(d: Device) -> None:
    ready_pair(d)
    for batch in range(5):
        through_host(batch, [Passed(gpu) for gpu in GPUS])
    settle()


def through_host(batch: int, moves: list[Passed]) -> None:
    """The first stage of a batch, whose activations go to a pinned home and from there to the second stage's GPU."""
    (first, second), home = G["mains"], G["relays"][batch % 4]
    left, read = G["came"][0][batch % 4], G["used"][1][batch % 4]
    small(0, 2)
    negate(0, 0)
    first.wait_event(read)
    moves[0].begin()
    home.copy_(G["places"][0][0], non_blocking=True)
    moves[0].end()
    left.record(first)
    second.wait_event(left)
    moves[1].begin()
    G["places"][1][0].copy_(home, non_blocking=True)
    moves[1].end()
    read.record(second)
    small(1, 2)
    negate(1, 1)
    pace(batch)


@twentysixth(
    line=AT_LINK_RATE,
    also=(
        *("weights_not_overlapped", "link_bound", "head_of_line_copies", "gpu_starved", "wasted_stores"),
        "redundant_loads",
    ),
    like=("small_copies", "pageable_memory", "synchronisation", "store_not_ordered", "load_not_ordered"),
    prepare=ready_through_host,
    needs_gpu=True,
)
def torch_activations_that_go_through_pinned_memory_from_one_stage_of_a_pipeline_to_the_next(d: Device) -> Truth:
    """Two GPUs are the stages of a pipeline, and 64 MiB of activations go from one to the other through pinned memory.

    A stage computes for 0.4 ms. The first one's link needs 1.2 ms for what leaves, on the stream of its kernels, and
    the second one's as much for what comes, on that of its own: while one batch comes to the second stage, the next
    one leaves the first, and each GPU copies for three quarters of its time. Four homes take turns, and the host is
    two batches ahead, so neither stage waits for the other but at the beginning.
    """
    moves, batch = [Passed(gpu) for gpu in GPUS], 0
    d.spent.restart()
    for batch in turns():
        through_host(batch, moves)
        of_both(moves, 3)
    settle()
    d.spent.add(AT_LINK_RATE, of_both(moves))
    d.spent.stop()
    equal(G["relays"][batch % 4], G["places"][0][0])
    equal(G["places"][1][0], G["places"][0][0])
    return {}


@twentysixth(
    "redundant_loads",
    line=NOT_NEEDED,
    also=("weights_not_overlapped", "link_bound", "gpu_starved", "head_of_line_copies"),
    like=("small_copies", "pageable_memory", "synchronisation", "load_not_ordered", "launch_queue_saturation"),
    prepare=ready_broadcast,
    needs_gpu=True,
    blind=DEVICE,
)
def torch_a_shared_adapter_sent_to_both_replicas_before_each_batch_though_both_have_it(d: Device) -> Truth:
    """Two replicas use an adapter that a trainer may change, so its 64 MiB are sent to both before each batch.

    Nobody has changed it, and nobody else writes to its pinned home nor to its place on either GPU: all loads but the
    first bring what is there. One takes the link 1.2 ms on the model's stream, and a batch 0.4 ms. The host is two
    batches ahead.
    """
    moves = [Passed(gpu) for gpu in GPUS]
    d.spent.restart()
    for batch in turns():
        broadcast(batch, moves, 5)
        of_both(moves, 3)
    settle()
    lost = of_both(moves)
    d.spent.add(NOT_NEEDED, lost)
    d.spent.stop()
    for gpu in GPUS:
        equal(G["places"][gpu][0], G["homes"][5])
    return {"redundant_loads": int(lost)}


# ---- GPUs that wait for the host ------------------------------------------------------------------------------------


def ready_lockstep(d: Device) -> None:
    ready_pair(d)
    for step in range(3):
        in_lockstep([4, 1], step, [Passed(gpu) for gpu in GPUS])
    settle()


def in_lockstep(lengths: list[int], step: int, idle: list[Passed]) -> None:
    """A batch on each GPU, of so many large products; waits for both."""
    for gpu in GPUS:
        idle[gpu].end()
        large(gpu, lengths[gpu])
        report(gpu, step)
        idle[gpu].begin()
    for gpu in GPUS:
        G["mains"][gpu].synchronize()
    of_both(idle)


@twentysixth(
    line=WAITING,
    also=("synchronisation", "gpu_starved", "wasted_stores"),
    like=("small_copies", "python_or_gil_bound", "launch_queue_saturation", "cpu_starved", "allocation_on_hot_path"),
    prepare=ready_lockstep,
    needs_gpu=True,
)
def torch_replicas_in_lockstep_of_which_one_has_a_long_batch_and_the_other_a_short_one(d: Device) -> Truth:
    """A scheduler launches a batch on either GPU and waits for both; one is 9.6 ms long, and the other one 1.6 ms.

    Which GPU has the long one changes with each step. The GPU with the short one has nothing while the thread stands
    in `synchronize` of the other's stream, and the next batches are launched at once when both are over: each GPU
    loses 8 of 19 ms, and nothing but this wait keeps its next batch from it.
    """
    idle = [Passed(gpu) for gpu in GPUS]
    d.spent.restart()
    for step in turns():
        in_lockstep([6, 1] if step % 2 else [1, 6], step, idle)
    d.spent.add(WAITING, of_both(idle))
    d.spent.stop()
    settle()
    all_ones()
    return {}


def ready_by_turns(d: Device) -> None:
    ready_pair(d)
    for step in range(3):
        by_turns(step, [Passed(gpu) for gpu in GPUS])
    settle()


def by_turns(step: int, idle: list[Passed]) -> None:
    """A step of one replica, which is waited for, and then one of the other."""
    for gpu in GPUS:
        idle[gpu].end()
        large(gpu, 2)
        report(gpu, step)
        idle[gpu].begin()
        G["mains"][gpu].synchronize()
        idle[gpu].read()


@twentysixth(
    line=WAITING,
    also=("synchronisation", "gpu_starved", "wasted_stores"),
    like=("small_copies", "python_or_gil_bound", "launch_queue_saturation", "cpu_starved", "allocation_on_hot_path"),
    prepare=ready_by_turns,
    needs_gpu=True,
)
def torch_two_replicas_that_one_thread_serves_by_turns_and_waits_for_each_before_it_asks_the_other(d: Device) -> Truth:
    """A thread launches 3 ms on one GPU, waits for its answer, and then does the same on the other one.

    No kernel of one GPU needs anything of the other, but while one computes, the thread stands in `synchronize` of its
    stream, and the other GPU has nothing: each loses half of its time. Between the wait and the next launch the thread
    does nothing else.
    """
    idle = [Passed(gpu) for gpu in GPUS]
    d.spent.restart()
    for step in turns():
        by_turns(step, idle)
    d.spent.add(WAITING, of_both(idle))
    d.spent.stop()
    settle()
    all_ones()
    return {}


def ready_backlog(d: Device) -> None:
    """A tenth of a millisecond's product, for one GPU with a backlog."""
    ready_pair(d)
    backlog(20)
    settle()


def backlog(count: int) -> list[int]:
    """So many products of 0.1 ms for the first GPU: how long each call took, in ns."""
    import torch

    took, half, out = list[int](), G["x"][0][: SIDE // 2], G["made"][0][0][: SIDE // 2]
    with torch.cuda.device(0):
        for _ in range(count):
            begin = now()
            torch.mm(half, G["w"][0], out=out)
            took.append(now() - begin)
    return took


@twentysixth(
    line=FULL_QUEUE,
    also=("launch_queue_saturation", "gpu_starved", "synchronisation", "python_or_gil_bound"),
    like=("small_copies", "allocation_on_hot_path", "cpu_starved", "pageable_memory", "slow_tier"),
    prepare=ready_backlog,
    needs_gpu=True,
)
def torch_a_backlog_for_one_gpu_that_fills_its_queue_while_the_thread_has_to_serve_the_other_one(d: Device) -> Truth:
    """A thread launches 1,500 prompts of 0.1 ms on one GPU, then a step of 3 ms on the other, and so on.

    The first GPU's stream takes a thousand submissions, which is 0.1 s of work, and is full from then on: the thread
    stands in each launch until a place is free, some 150 ms for all 1,500. Meanwhile the first GPU computes, and the
    other one has nothing for 147 of 150 ms, as nobody can launch on it. Nobody waits for either GPU.
    """
    import torch

    took = list[int]()
    d.spent.restart()
    for _ in turns():
        took += backlog(1_500)
        large(1, 2)
    d.spent.add(FULL_QUEUE, beyond(took, 30_000) / 2)
    d.spent.stop()
    settle()
    all_ones()
    equal(G["made"][0][0][: SIDE // 2], torch.mm(G["x"][0][: SIDE // 2], G["w"][0]))
    return {}


def ready_shared_pool(d: Device) -> None:
    ready_pair(d)
    for step in range(3):
        borrow_pool(step)
    settle()


def borrow_pool(step: int) -> tuple[int, list[float]]:
    """Pinned memory for both replicas, a batch on each, and the memory is given back: ns of the first and the last."""
    import torch

    begin = now()
    pool = torch.empty(2, SIDE // 2, WIDE, dtype=torch.bfloat16, pin_memory=True)
    took = now() - begin
    for gpu in GPUS:
        small(gpu, 5)
        with torch.cuda.device(gpu):
            G["places"][gpu][0][SIDE // 2 - 1, -16:].fill_((step + gpu) % 251)
        pool[gpu].copy_(G["places"][gpu][0][: SIDE // 2], non_blocking=True)
    settle()
    seen = [float(pool[gpu][-1, -1]) for gpu in GPUS]
    begin = now()
    del pool
    settle()  # torch has an event behind the last use on either GPU, and gives back what is surely not in use
    torch._C._host_emptyCache()
    return took + now() - begin, seen


@twentysixth(
    "allocation_on_hot_path",
    line=ALLOCATING,
    or_lines=(ELSEWHERE,),
    also=(
        *("gpu_starved", "synchronisation", "pinning_stall", "context_lock_stall", "weights_not_overlapped"),
        *("wasted_stores", "link_bound", "python_or_gil_bound"),
    ),
    like=("pageable_memory", "slow_tier", "launch_queue_saturation", "small_copies", "cpu_starved", "redundant_loads"),
    prepare=ready_shared_pool,
    needs_gpu=True,
)
def torch_a_pinned_pool_that_two_replicas_share_made_before_each_batch_and_given_back_behind_it(d: Device) -> Truth:
    """For each batch of both replicas 64 MiB are pinned, half for each GPU, and given back when both have left there.

    The driver pins 16,384 pages each time, and `_host_emptyCache` has it free them: 7 ms or more for both. The thread
    has waited for both GPUs before it frees, and pins before it launches, so neither has anything meanwhile. A batch
    is 1 ms of products on either, and its copy 0.6 ms of each link.
    """
    lost, step, seen = 0, 0, list[float]()
    d.spent.restart()
    for step in turns():
        took, seen = borrow_pool(step)
        lost += took
    d.spent.add(ALLOCATING, lost)
    d.spent.stop()
    if [int(one) for one in seen] != [(step + gpu) % 251 for gpu in GPUS]:
        raise RuntimeError("other numbers were saved than were made")
    return {"allocation_on_hot_path": lost}


def ready_brought_up(d: Device) -> None:
    ready_pair(d)
    bring_up()


def bring_up() -> int:
    """A step on both GPUs; then the second one gets three of the first one's weights through plain memory: ns."""
    for gpu in GPUS:
        small(gpu, 10)
    negate(0, 0, 3)
    settle()
    begin = now()
    for weight, other in zip(G["places"][0][:3], G["places"][1][:3], strict=True):
        other.copy_(weight.cpu())
    return now() - begin


@twentysixth(
    "pageable_memory",
    line=PAGEABLE,
    or_lines=(BELOW_LINK_RATE, WAITING),
    also=(
        *("synchronisation", "gpu_starved", "weights_not_overlapped", "python_or_gil_bound", "link_bound"),
        *("wasted_stores", "blocking_server_call"),
    ),
    like=("small_copies", "allocation_on_hot_path", "launch_queue_saturation", "slow_tier", "redundant_loads"),
    prepare=ready_brought_up,
    needs_gpu=True,
)
def torch_a_replica_that_gets_the_other_one_s_weights_by_cpu_and_copy_after_each_update(d: Device) -> Truth:
    """After each update of 2 ms three weights of 64 MiB go from one GPU to the other through `cpu` and `copy_`.

    `cpu` makes plain memory, new each time, and `copy_` reads it: the thread stands in each call for some milliseconds,
    while the driver brings 64 MiB through its own pinned buffers. It has waited for both GPUs before, and launches the
    next update when all weights are there, so neither has a kernel meanwhile, and at most one a copy.
    """
    lost = 0
    d.spent.restart()
    for _ in turns():
        lost += bring_up()
    d.spent.add(PAGEABLE, lost)
    d.spent.stop()
    settle()
    equal(G["places"][1][2], G["places"][0][2])
    return {"pageable_memory": lost}


LAYERS = 48  # of a network that both GPUs have half of


def ready_shards(d: Device) -> None:
    """Small layers on both GPUs, and how long each GPU takes for all of them."""
    import torch

    ready_pair(d)
    if "shards" not in G:
        G["shards"], G["seen_by_shards"] = list[Any](), list[Any]()
        for gpu in GPUS:
            with torch.cuda.device(gpu):
                G["shards"].append([torch.randn(512, 512, device=f"cuda:{gpu}") / 22 for _ in range(LAYERS)])
                G["seen_by_shards"].append(torch.randn(64, 512, device=f"cuda:{gpu}"))
    for _ in range(3):
        layer_by_layer()
    G["shards_ns"] = taken(layer_by_layer)


def layer_by_layer() -> list[Any]:
    """All layers: of each one the half of one GPU, and then that of the other."""
    import torch

    made = list(G["seen_by_shards"])
    for layer in range(LAYERS):
        for gpu in GPUS:
            with torch.cuda.device(gpu):
                made[gpu] = torch.tanh(made[gpu] @ G["shards"][gpu][layer])
    return made


@twentysixth(
    line=SUBMITTING,
    or_lines=(PYTHON, ELSEWHERE),  # the calls are made one by one out of Python
    also=("gpu_starved", "python_or_gil_bound", "synchronisation"),
    like=("small_copies", "launch_queue_saturation", "cpu_starved", "allocation_on_hot_path", "pageable_memory"),
    prepare=ready_shards,
    needs_gpu=True,
)
def torch_halves_of_small_layers_that_one_thread_launches_on_one_gpu_and_then_on_the_other(d: Device) -> Truth:
    """One thread goes over 48 small layers, and launches two kernels of 2 to 5 us on one GPU, then two on the other.

    For both it needs 25 us or more of Python and torch, so either GPU is done with its half long before it has the
    next. How long each one takes for all layers was measured before, behind long kernels; the rest is lost. No GPU
    waits for the other, and nobody waits for a step but two behind it.
    """
    import torch

    steps, made = 0, list[Any]()
    d.spent.restart()
    begun = now()
    for step in turns():
        made = layer_by_layer()
        pace(step)
        steps += 1
    lost = now() - begun - steps * sum(G["shards_ns"]) / 2
    d.spent.add(SUBMITTING, max(lost, 0))
    d.spent.stop()
    settle()
    if not all(bool(torch.isfinite(one).all()) for one in made):
        raise RuntimeError("a layer has made what is no number")
    return {}


HISTORY = 40_000  # tokens that an answer's repeats are counted in


def ready_repeats(d: Device) -> None:
    """A long history of tokens, and a first count of its repeats."""
    ready_pair(d)
    if "history" not in G:
        draw = random.Random(261)
        G["history"] = [draw.randrange(4096) for _ in range(HISTORY)]
    repeats(0)
    for gpu in GPUS:
        large(gpu, 2)
        report(gpu, 0)
    settle()


def repeats(first: int, count: int = HISTORY) -> int:
    """How often the token that is repeated most is in so much of the history."""
    seen: dict[int, int] = {}
    history = G["history"]
    for at in range(first, first + count):
        token = history[at % HISTORY]
        seen[token] = seen.get(token, 0) + 1
    return max(seen.values())


@twentysixth(
    line=PYTHON,
    or_lines=(ELSEWHERE, WAITING),  # one thread is in Python, the other one waits for the interpreter, even in a call
    also=("synchronisation", "gpu_starved", "python_or_gil_bound", "wasted_stores", "cpu_starved"),
    like=("small_copies", "launch_queue_saturation", "allocation_on_hot_path", "redundant_loads", "slow_tier"),
    prepare=ready_repeats,
    needs_gpu=True,
)
def torch_two_replicas_with_a_thread_each_that_count_repeated_tokens_under_one_interpreter(d: Device) -> Truth:
    """Each GPU has a thread, which waits for its answer of 1.6 ms and counts repeated tokens in a loop of Python.

    The loop goes over 40,000 tokens, 3 ms or more, and both threads want the one interpreter for it: while one counts,
    the other one, whose GPU may be done, waits. A thread launches the next answer when it has counted, so its GPU has
    nothing meanwhile. The two GPUs have nothing else to do with each other.
    """
    idle, most = [Passed(gpu) for gpu in GPUS], [0, 0]

    def serve(gpu: int) -> None:
        for step in turns():
            idle[gpu].end()
            large(gpu, 1)
            report(gpu, step)
            idle[gpu].begin()
            G["mains"][gpu].synchronize()
            idle[gpu].read()
            most[gpu] = repeats(step)

    on_both(d, serve)
    d.spent.add(PYTHON, of_both(idle))
    d.spent.stop()
    settle()
    all_ones()
    if most != [repeats(0)] * 2:
        raise RuntimeError("the repeats were counted wrongly")
    return {}


PROMPTS, BLOCKS = 48, 64  # that wait to be sent to a replica; of each, four tokens


def ready_routed_pair(d: Device) -> None:
    """What both replicas have cached, prompts, and how many products are half of what it takes to route them."""
    ready_pair(d)
    if "cached" not in G:
        draw = random.Random(262)
        made = [[draw.randrange(4096) for _ in range(4 * BLOCKS)] for _ in range(PROMPTS)]
        G["waiting"] = made
        G["cached"] = [dict[tuple[int, ...], Any](), dict[tuple[int, ...], Any]()]
        for number, prompt in enumerate(made):
            for gpu in GPUS:
                remember(G["cached"][gpu], prompt, BLOCKS if number % 2 == gpu else BLOCKS - 4)
    took = list[int]()
    for _ in range(9):
        begin = now()
        route()
        took.append(now() - begin)
    product = max(taken(lambda: [small(gpu, 20) for gpu in GPUS])) // 20
    G["products_of_routed"] = min(max(sorted(took)[4] // 2 // product, 3), 100)
    for step in range(3):
        serve_and_route(step, [Passed(gpu) for gpu in GPUS])
    settle()


def remember(tree: dict[tuple[int, ...], Any], prompt: list[int], blocks: int) -> None:
    """Puts the first blocks of a prompt into a replica's tree of prefixes."""
    for block in range(blocks):
        tree = tree.setdefault(tuple(prompt[4 * block : 4 * block + 4]), {})


def route() -> list[int]:
    """Which replica has more of each prompt's prefix: a walk through both replicas' trees for each prompt."""
    chosen = list[int]()
    for prompt in G["waiting"]:
        depths = list[int]()
        for cached in G["cached"]:
            tree, depth = cached, 0
            while depth < BLOCKS and (below := tree.get(tuple(prompt[4 * depth : 4 * depth + 4]))) is not None:
                tree, depth = below, depth + 1
            depths.append(depth)
        chosen.append(depths.index(max(depths)))
    return chosen


def serve_and_route(step: int, idle: list[Passed]) -> list[int]:
    """A batch on both replicas, which is waited for; then the prompts of the next one are routed."""
    for gpu in GPUS:
        idle[gpu].end()
        made = small(gpu, G["products_of_routed"])
        G["rows"][gpu][step % 8].copy_(made[0, :64], non_blocking=True)
        idle[gpu].begin()
    for gpu in GPUS:
        G["mains"][gpu].synchronize()
    of_both(idle)
    return route()


@twentysixth(
    line=PYTHON,
    or_lines=(ELSEWHERE,),  # a recorder of calls alone sees a thread outside of CUDA
    also=("synchronisation", "gpu_starved", "python_or_gil_bound", "wasted_stores"),
    like=("small_copies", "redundant_loads", "cpu_starved", "slow_tier", "launch_queue_saturation"),
    prepare=ready_routed_pair,
    needs_gpu=True,
)
def torch_prompts_compared_in_python_with_both_replicas_trees_of_prefixes_before_each_batch(d: Device) -> Truth:
    """When both replicas have answered, their thread walks through both trees of prefixes for each of 48 prompts.

    A walk has 64 blocks and is made in Python for each replica, to send the prompt where more of it is cached: some
    milliseconds in all. How long was measured first, and a batch's products were made half of it on each GPU. Both
    GPUs were waited for, and get their next batch when all prompts are routed.
    """
    idle, chosen = [Passed(gpu) for gpu in GPUS], list[int]()
    d.spent.restart()
    for step in turns():
        chosen = serve_and_route(step, idle)
    d.spent.add(PYTHON, of_both(idle))
    d.spent.stop()
    settle()
    if chosen != [number % 2 for number in range(PROMPTS)]:
        raise RuntimeError("a prompt was sent to the replica that has less of it")
    return {}


class HandOver:
    """What a prefilling thread and a decoding one tell each other: which prompt is ready, and which one was taken."""

    def __init__(self) -> None:
        self.ready, self.taken, self.over = -1, -1, False

    def is_ready(self, number: int) -> bool:
        return self.over or self.ready >= number

    def was_taken(self, number: int) -> bool:
        return self.taken >= number

    def until(self, done: Callable[[int], bool], number: int) -> None:
        """Asks each 4 ms."""
        for _ in range(2_500):
            if done(number):
                return
            time.sleep(0.004)
        raise RuntimeError("the other thread does not go on")


def prefill_and_wait(handed: HandOver, idle: Passed, steps: Any) -> None:
    """Prompts on the first GPU, each when the one before was taken."""
    for step in steps:
        idle.end()
        large(0, 1)
        negate(0, 0)
        idle.begin()
        G["mains"][0].synchronize()
        idle.read()
        handed.ready = step
        handed.until(handed.was_taken, step)
    handed.over = True


def take_and_decode(handed: HandOver, idle: Passed) -> None:
    """A step on the second GPU for each prompt that is ready, with its keys."""
    while True:
        wanted = handed.taken + 1
        handed.until(handed.is_ready, wanted)
        if handed.ready < wanted:
            return
        idle.end()
        G["places"][1][0].copy_(G["places"][0][0], non_blocking=True)
        large(1, 1)
        idle.begin()
        G["mains"][1].synchronize()
        idle.read()
        handed.taken = wanted


def ready_polled_pair(d: Device) -> None:
    ready_pair(d)
    G["places"][1][0].copy_(G["places"][0][0], non_blocking=True)
    negate(0, 0)
    settle()


@twentysixth(
    line=ELSEWHERE,
    or_lines=(PYTHON,),
    also=("gpu_starved", "synchronisation", "python_or_gil_bound"),
    like=("small_copies", "cpu_starved", "launch_queue_saturation", "allocation_on_hot_path", "pageable_memory"),
    prepare=ready_polled_pair,
    needs_gpu=True,
    undecided_in=DEVICE,  # their recordings hold CUDA's calls alone
)
def torch_a_prefill_and_a_decode_thread_that_look_for_each_other_s_work_each_4_ms(d: Device) -> Truth:
    """A thread for each GPU: one prefills 1.6 ms, and the other, which asks each 4 ms, takes the keys and decodes.

    Between two looks they sleep, and the first one does not begin a prompt before it has found that the last one was
    taken. So a prompt is 1.6 ms on one GPU, up to 4 ms of sleep, 1.6 ms on the other, and up to 4 ms of sleep; each
    GPU has nothing but its 1.6 ms and 64 MiB of keys, and its thread sleeps for nearly all of the rest.
    """
    idle, handed = [Passed(gpu) for gpu in GPUS], HandOver()

    def serve(gpu: int) -> None:
        if gpu == 0:
            prefill_and_wait(handed, idle[0], turns())
        else:
            take_and_decode(handed, idle[1])

    on_both(d, serve)
    d.spent.add(ELSEWHERE, of_both(idle))
    d.spent.stop()
    settle()
    all_ones()
    equal(G["places"][1][0], G["places"][0][0])
    return {}


def ready_experts_in_files(d: Device) -> None:
    """Two files of 64 MiB, which are in the page cache, and the bytes of two pinned homes."""
    import torch

    ready_pair(d)
    if "folder_of_experts" not in G:
        G["folder_of_experts"] = tempfile.TemporaryDirectory()
        G["bytes_of_homes"] = [home.flatten().view(torch.uint8).numpy() for home in G["homes"][:2]]
        for number in range(2):
            expert_file(number).write_bytes(G["bytes_of_homes"][number].tobytes())
    for step in range(3):
        read_expert(step)
        use_expert(step)


def expert_file(number: int) -> Path:
    return Path(G["folder_of_experts"].name) / f"expert_{number % 2}"


def read_expert(step: int) -> None:
    """A file of experts into a pinned home."""
    held, at = memoryview(G["bytes_of_homes"][step % 2]), 0
    with expert_file(step).open("rb", buffering=0) as file:
        while at < len(held):
            got = file.readinto(held[at:])
            if not got:
                raise RuntimeError("a file is too short")
            at += got


def use_expert(step: int) -> None:
    """Half of what was read goes to each GPU, and is computed with."""
    half = SIDE // 2
    for gpu in GPUS:
        here = slice(gpu * half, gpu * half + half)
        G["places"][gpu][0][:half].copy_(G["homes"][step % 2][here], non_blocking=True)
        small(gpu, 4)
    for gpu in GPUS:
        G["mains"][gpu].synchronize()


@twentysixth(
    line=TIER,
    or_lines=(ELSEWHERE, PYTHON),  # it stands in `read`; of calls alone, it is outside of CUDA
    also=(
        *("slow_tier", "gpu_starved", "synchronisation", "python_or_gil_bound", "redundant_loads"),
        *("weights_not_overlapped", "link_bound"),
    ),
    like=("cpu_starved", "small_copies", "allocation_on_hot_path", "launch_queue_saturation", "pageable_memory"),
    prepare=ready_experts_in_files,
    needs_gpu=True,
    undecided_in=DEVICE,  # their recordings hold CUDA's calls alone
)
def torch_experts_of_two_gpus_read_out_of_one_file_before_each_step_of_both(d: Device) -> Truth:
    """Before each step of 0.8 ms a file of 64 MiB is read into pinned memory, and half of it goes to each GPU.

    To read is to copy it out of the page cache, for 5 ms or more, by the one thread that launches on both GPUs, and
    it has waited for both before. The halves take the links 0.6 ms at once. Two files take turns.
    """
    step = 0
    d.spent.restart()
    for step in turns():
        with d.spent.on(TIER):
            read_expert(step)
        use_expert(step)
    d.spent.stop()
    settle()
    G.pop("folder_of_experts").cleanup()
    for gpu in GPUS:
        end = (gpu + 1) * SIDE // 2
        equal(G["places"][gpu][0][: SIDE // 2], G["homes"][step % 2][:end])
    return {}


# ---- healthy --------------------------------------------------------------------------------------------------------


def ready_exchange_beside(d: Device) -> None:
    ready_pair(d)
    for step in range(5):
        exchange_beside(step, [Passed(gpu) for gpu in GPUS])
    settle()


def exchange_beside(step: int, products: list[Passed]) -> None:
    """Both GPUs hand over what the step before has made, while this step computes."""
    made, handed = 2 * (step % 2), 2 - 2 * (step % 2)
    for gpu in GPUS:  # the last exchange was over long ago
        G["mains"][gpu].wait_stream(G["leaving"][gpu])
        G["mains"][gpu].wait_stream(G["coming"][gpu])
    for stream in itertools.chain(*G["pairs"]):
        for main in G["mains"]:
            stream.wait_stream(main)
    for gpu in GPUS:
        products[gpu].begin()
        large(gpu, 4)
        negate(gpu, made, 2)
        products[gpu].end()
    for gpu in GPUS:
        hand_over(gpu, handed, 4, 2)
    pace(step)


def healthy(d: Device, products: list[Passed]) -> None:
    """Both GPUs are done: ends the window, whose kernels took so long."""
    for main in G["mains"]:
        main.synchronize()
    d.kernel_ns += int(of_both(products))
    d.spent.stop()
    settle()
    all_ones()


@twentysixth(
    line=COMPUTING,
    like=("link_bound", "gpu_starved", "head_of_line_copies", "weights_not_overlapped", "synchronisation"),
    prepare=ready_exchange_beside,
    needs_gpu=True,
)
def torch_halves_of_a_step_that_two_gpus_exchange_while_both_compute_the_next_one(d: Device) -> Truth:
    """Both GPUs hand 128 MiB of a step of 6.5 ms to the other one while the next step computes.

    The exchange has four streams of its own, two for each direction; it waits for the step before and takes NVLink
    0.3 ms or more. A step writes to other places than those that are handed over, and the models' streams wait for
    the exchange behind the whole step, when it was over 6 ms ago. The host is two steps ahead.
    """
    products, step = [Passed(gpu) for gpu in GPUS], 0
    d.spent.restart()
    for step in turns():
        exchange_beside(step, products)
        of_both(products, 3)
    healthy(d, products)
    handed = 2 - 2 * (step % 2)
    for gpu in GPUS:
        equal(G["places"][1 - gpu][5], G["places"][gpu][handed + 1])
    return {}


def ready_handed_beside(d: Device) -> None:
    ready_pair(d)
    for step in range(6):
        prefill_beside(step, [Passed(gpu) for gpu in GPUS])
    settle()


def prefill_beside(step: int, products: list[Passed]) -> None:
    """A prompt on the first GPU, whose keys leave behind it; on the second one a step with the keys before the last."""
    slot, key = step % 2, 3 * (step % 2)
    (first, second), (leaving, coming) = G["mains"], G["pairs"][0]
    came, used = G["came"][1], G["used"][1]
    first.wait_event(came[slot])  # the keys that were here have left
    second.wait_event(came[slot])
    for gpu in GPUS:
        products[gpu].begin()
        with_key(gpu, G["places"][gpu][key if gpu else 6])
        negate(gpu, 5 if gpu else key, 3)
        products[gpu].end()
    used[slot].record(second)
    leaving.wait_stream(first)
    coming.wait_event(used[slot])
    hand_over(0, key, key, 3)
    came[slot].record(coming)
    pace(step)


@twentysixth(
    line=COMPUTING,
    like=("link_bound", "gpu_starved", "weights_not_overlapped", "load_not_ordered", "head_of_line_copies"),
    prepare=ready_handed_beside,
    needs_gpu=True,
)
def torch_keys_that_leave_a_prefilling_gpu_beside_its_next_prompt_for_one_that_decodes_an_older(d: Device) -> Truth:
    """A GPU prefills for 7 ms, and 192 MiB of keys go to the other GPU beside its next prompt, for a step behind that.

    The copies have a stream of their own on either GPU and take NVLink 0.5 ms or more. There are two sets of keys on
    both. The second GPU decodes for 7 ms with the keys before the last, which came a step ago, and a prompt is written
    where the keys left as long ago: neither waits for a copy. Both do the same work, and the host is two steps ahead.
    """
    products, step = [Passed(gpu) for gpu in GPUS], 0
    d.spent.restart()
    for step in turns():
        prefill_beside(step, products)
        of_both(products, 3)
    healthy(d, products)
    equal(G["places"][1][3 * (step % 2)], G["places"][0][3 * (step % 2)])
    return {}


def ready_ahead_on_both(d: Device) -> None:
    ready_pair(d)
    bring_to_both(0)
    for layer in range(5):
        compute_on_both(layer, [Passed(gpu) for gpu in GPUS])
    settle()


def bring_to_both(layer: int) -> None:
    """A layer's weights to both GPUs' places for it, on side streams, when the layer that was there is over."""
    import torch

    slot = layer % 2
    for gpu in GPUS:
        side = G["loads"][gpu]
        side.wait_event(G["used"][gpu][slot])
        with torch.cuda.stream(side):
            G["places"][gpu][slot].copy_(G["homes"][layer % PLACES], non_blocking=True)
        G["came"][gpu][slot].record(side)


def compute_on_both(layer: int, products: list[Passed]) -> None:
    """A layer on both GPUs; then the next one's weights are asked for."""
    slot = layer % 2
    for gpu in GPUS:
        G["mains"][gpu].wait_event(G["came"][gpu][slot])
        products[gpu].begin()
        with_key(gpu, G["places"][gpu][slot])
        products[gpu].end()
        G["used"][gpu][slot].record(G["mains"][gpu])
    bring_to_both(layer + 1)
    pace(layer)


@twentysixth(
    line=COMPUTING,
    also=("redundant_loads",),
    like=("weights_not_overlapped", "link_bound", "load_not_ordered", "synchronisation", "head_of_line_copies"),
    prepare=ready_ahead_on_both,
    needs_gpu=True,
)
def torch_weights_sent_out_of_pinned_memory_to_both_gpus_while_both_compute_the_layer_before(d: Device) -> Truth:
    """Each layer's 64 MiB of weights come to both GPUs out of one pinned home while the layer before computes for 7 ms.

    Each GPU has two places for weights and a side stream, and its link needs 1.2 ms, or twice that if both share it. A
    copy waits for the layer that had its place, which ends when the layer before begins, so the weights are there 4 ms
    or more before their layer. The host is two layers ahead.
    """
    products, layer = [Passed(gpu) for gpu in GPUS], 0
    bring_to_both(0)
    settle()
    d.spent.restart()
    for layer in turns():
        compute_on_both(layer, products)
        of_both(products, 3)
    healthy(d, products)
    for gpu in GPUS:
        equal(G["places"][gpu][layer % 2], G["homes"][layer % PLACES])
    return {}


def ready_through_host_beside(d: Device) -> None:
    ready_pair(d)
    for batch in range(6):
        through_host_beside(batch, [Passed(gpu) for gpu in GPUS])
    settle()


def through_host_beside(batch: int, products: list[Passed]) -> None:
    """A batch's first stage, whose activations leave and come on side streams; the second stage of one before it."""
    import torch

    slot, older, here = batch % 3, (batch - 2) % 3, batch % 2
    (first, second), stores, loads = G["mains"], G["stores"][0], G["loads"][1]
    left, came, used, home = G["came"][0], G["came"][1], G["used"][1], G["relays"][slot]
    first.wait_event(left[older])  # what was made two batches ago has left its place
    second.wait_event(came[older])
    for gpu in GPUS:
        products[gpu].begin()
        with_key(gpu, G["places"][gpu][older if gpu else 6])
        negate(gpu, 7 if gpu else here)
        products[gpu].end()
    used[older].record(second)
    stores.wait_stream(first)
    stores.wait_event(came[slot])  # what the home had has come to the second stage
    with torch.cuda.stream(stores):
        home.copy_(G["places"][0][here], non_blocking=True)
    left[slot].record(stores)
    loads.wait_event(left[slot])
    loads.wait_event(used[slot])
    with torch.cuda.stream(loads):
        G["places"][1][slot].copy_(home, non_blocking=True)
    came[slot].record(loads)
    pace(batch)


@twentysixth(
    line=COMPUTING,
    also=("wasted_stores", "redundant_loads"),
    like=("link_bound", "weights_not_overlapped", "load_not_ordered", "store_not_ordered", "gpu_starved"),
    prepare=ready_through_host_beside,
    needs_gpu=True,
)
def torch_activations_that_go_through_pinned_memory_to_a_stage_which_computes_an_older_batch(d: Device) -> Truth:
    """Activations of 64 MiB go from one GPU to pinned memory and on to the other, each on a side stream, beside 7 ms.

    Both links need 1.2 ms, one behind the other, when a batch's first stage of 7 ms is over. The second stage, which
    does the same work, computes the batch two before: what that needs came 4 ms before it begins. There are two places
    on the first GPU, three homes and three places on the second, all free when they are wanted. The host is two ahead.
    """
    products, batch = [Passed(gpu) for gpu in GPUS], 0
    d.spent.restart()
    for batch in turns():
        through_host_beside(batch, products)
        of_both(products, 3)
    healthy(d, products)
    equal(G["relays"][batch % 3], G["places"][0][batch % 2])
    equal(G["places"][1][batch % 3], G["relays"][batch % 3])
    return {}


@twentysixth(
    line=COMPUTING,
    also=("wasted_stores",),
    like=("python_or_gil_bound", "gpu_starved", "synchronisation", "cpu_starved", "launch_queue_saturation"),
    prepare=ready_repeats,
    needs_gpu=True,
)
def torch_two_replicas_with_a_thread_each_that_count_repeats_while_two_answers_are_on_their_gpu(d: Device) -> Truth:
    """Each GPU has a thread, which counts repeated tokens in a loop of Python when two answers are launched.

    The loops go over 20,000 tokens, 2 ms or so, and both threads want the one interpreter, which may make it twice
    that and some. But an answer is 13 ms of products, and a thread waits for the one before the last: when it has
    counted, its GPU has 10 ms or more left.
    """
    products, wrong = [Passed(gpu) for gpu in GPUS], [0, 0]

    def serve(gpu: int) -> None:
        for step in turns():
            products[gpu].begin()
            large(gpu, 8)
            report(gpu, step)
            products[gpu].end()
            pace(step, gpus=(gpu,))
            products[gpu].read(3)
            if step >= 2:
                wrong[gpu] += float(G["rows"][gpu][(step - 2) % 8][0]) != 1.0
            wrong[gpu] += repeats(step, HISTORY // 2) < 1
        G["mains"][gpu].synchronize()

    on_both(d, serve)
    healthy(d, products)
    if any(wrong):
        raise RuntimeError("other numbers have come than were made")
    return {}


def ready_turns_ahead(d: Device) -> None:
    ready_pair(d)
    for step in range(4):
        turn_ahead(step, [Passed(gpu) for gpu in GPUS])
    settle()


def turn_ahead(step: int, products: list[Passed]) -> None:
    """A step of one replica, whose last but one is waited for; then the same for the other."""
    for gpu in GPUS:
        products[gpu].begin()
        large(gpu, 3)
        report(gpu, step)
        products[gpu].end()
        pace(step, gpus=(gpu,))
        products[gpu].read(3)


@twentysixth(
    line=COMPUTING,
    also=("wasted_stores",),
    like=("synchronisation", "gpu_starved", "python_or_gil_bound", "launch_queue_saturation", "cpu_starved"),
    prepare=ready_turns_ahead,
    needs_gpu=True,
)
def torch_two_replicas_that_one_thread_serves_by_turns_with_two_steps_of_each_on_its_gpu(d: Device) -> Truth:
    """A thread launches 5 ms on one GPU, waits for the step before the last there, then does the same on the other.

    While it stands in the wait for one GPU, which is most of its time, the other one has a step or two: it was given
    one just before. Both compute the same, so neither gets ahead of the other, and the thread does nothing else.
    """
    products, step = [Passed(gpu) for gpu in GPUS], 0
    d.spent.restart()
    for step in turns():
        turn_ahead(step, products)
    healthy(d, products)
    if any(float(G["rows"][gpu][step % 8][0]) != 1.0 for gpu in GPUS):
        raise RuntimeError("other numbers have come than were made")
    return {}


FEEDS = 7  # of ten large products each, that the second GPU has or is about to be given


def feed(waiting: deque[Any], products: Passed) -> None:
    """Gives the second GPU what it lacks to have seven feeds of 15 ms."""
    import torch

    cuda: Any = torch.cuda

    while waiting and waiting[0].query():
        waiting.popleft()
    while len(waiting) < FEEDS:
        products.begin()
        large(1, 10)
        products.end()
        event = cuda.Event()
        event.record(G["mains"][1])
        waiting.append(event)


def ready_fed(d: Device) -> None:
    ready_backlog(d)
    feed(deque(), Passed(1))
    settle()


@twentysixth(
    line=COMPUTING,
    also=("launch_queue_saturation",),
    like=("gpu_starved", "synchronisation", "head_of_line_copies", "python_or_gil_bound", "cpu_starved"),
    prepare=ready_fed,
    needs_gpu=True,
)
def torch_a_backlog_that_fills_one_gpu_s_queue_while_the_other_one_has_seven_feeds_of_15_ms(d: Device) -> Truth:
    """A thread launches prompts of 0.1 ms on one GPU, whose queue is full, and looks after the other each 100 of them.

    It stands in the launches for nearly all of its time, 10 ms for each hundred, and the first GPU has a thousand
    prompts, 0.1 s. The other one is given feeds of 15 ms until it has seven, so at each look it has six or more: 90 ms.
    When nothing more is launched both have some 0.1 s left.
    """
    import torch

    products, waiting = [Passed(gpu) for gpu in GPUS], deque[Any]()
    d.spent.restart()
    for _ in turns():
        feed(waiting, products[1])
        products[0].begin()
        backlog(100)
        products[0].end()
        products[0].read(16)
        products[1].read(FEEDS + 1)
    healthy(d, products)
    equal(G["made"][0][0][: SIDE // 2], torch.mm(G["x"][0][: SIDE // 2], G["w"][0]))
    return {}
