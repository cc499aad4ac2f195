"""Twenty-third programs, all in torch: averages, pictures, counts, arenas, masks, pages, checks, staging, streams."""

from __future__ import annotations

import asyncio
import os
import random
import socket
import tempfile
import time
import zlib
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from accounts import Stretches, turns
from device import Device, beyond, now
from later_torch import T, forward, ready
from nineteenth_copies import measured
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
    NOTHING_TO_DO,
    PAGEABLE,
    PYTHON,
    SUBMITTING,
    TIER,
    WAITING,
    Truth,
    in_thread,
    twentythird,
)
from seventeenth_copies import behind, equal, pinned
from seventeenth_healthy import large, ready_large

# ---- kernels that wait for copies -----------------------------------------------------------------------------------

WEIGHTS = 6  # of a network, 32 MiB each


def ready_averages(d: Device) -> None:
    """A network's weights, their averages in pinned memory, and a pinned place for each weight meanwhile."""
    import torch

    ready(d)
    if "averaged" not in T:
        T["averaged"] = [torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16) / 64 for _ in range(WEIGHTS)]
        T["averages"] = [pinned(4096, 4096) for _ in range(WEIGHTS)]
        T["set_aside"] = [pinned(4096, 4096) for _ in range(WEIGHTS)]
    for step in range(4):
        train_and_evaluate(step, Stretches(d, 0))
    torch.cuda.synchronize()


def train_and_evaluate(step: int, moves: Stretches) -> None:
    """A step that changes all weights; then they leave, the averages come, are evaluated, and the weights return."""
    weights = T["averaged"]
    forward(6)
    for weight in weights:
        weight.add_(T["x"], alpha=1 / 64 if step % 2 else -1 / 64)
    moves.begin()
    for weight, aside in zip(weights, T["set_aside"], strict=True):
        aside.copy_(weight, non_blocking=True)
    for weight, average in zip(weights, T["averages"], strict=True):
        weight.copy_(average, non_blocking=True)
    moves.end()
    for weight in weights:
        T["x"] @ weight
    moves.begin()
    for weight, aside in zip(weights, T["set_aside"], strict=True):
        weight.copy_(aside, non_blocking=True)
    moves.end()


@twentythird(
    line=AT_LINK_RATE,
    also=("weights_not_overlapped", "link_bound", "redundant_loads", "head_of_line_copies", "gpu_starved"),
    like=("small_copies", "pageable_memory", "allocation_on_hot_path", "python_or_gil_bound", "slow_tier"),
    prepare=ready_averages,
    needs_gpu=True,
)
def torch_averaged_weights_that_change_places_with_the_trained_ones_around_each_evaluation(d: Device) -> Truth:
    """For each evaluation six weights of 32 MiB leave for pinned memory, their averages come, and the weights return.

    The 18 copies are on the stream of the kernels and take the link 3.6 ms for the weights out, as much for the
    averages in and as much for the weights back; a step and an evaluation have 3 ms of kernels. Each step changes the
    weights, and an average never finds itself in its place. The host is two steps ahead.
    """
    import torch

    moves = Stretches(d, 0)
    d.spent.restart()
    for step in turns():
        train_and_evaluate(step, moves)
        behind(step)
        moves.read(6)
    torch.cuda.synchronize()
    d.spent.add(AT_LINK_RATE, moves.read())
    d.spent.stop()
    equal(T["averaged"][-1], T["set_aside"][-1])
    return {}


def ready_upscaled(d: Device) -> None:
    """Three pictures, what makes them larger, one tensor for the result, four pinned homes, and two events."""
    import torch

    ready(d)
    if "upscaled" not in T:
        made = {"device": "cuda", "dtype": torch.bfloat16}
        T["pictures_to_scale"] = [torch.randn(8192, 4096, **made) for _ in range(3)]
        T["scaler"] = torch.randn(4096, 6144, **made) / 64
        T["upscaled"] = torch.empty(8192, 6144, **made)
        T["homes_of_upscaled"] = [pinned(8192, 6144) for _ in range(4)]
        T["has_left"] = torch.cuda.Event()
        T["has_left"].record(T["stream"])
    for step in range(5):
        upscale(step, Stretches(d, T["stream"].cuda_stream))
    torch.cuda.synchronize()


def upscale(step: int, moves: Stretches) -> None:
    """Makes a picture when the last one has left its tensor, and has it leave on the side stream."""
    import torch

    compute, side = torch.cuda.current_stream(), T["stream"]
    compute.wait_event(T["has_left"])
    forward(2)
    torch.mm(T["pictures_to_scale"][step % 3], T["scaler"], out=T["upscaled"])
    side.wait_stream(compute)
    with torch.cuda.stream(side):
        moves.begin()
        T["homes_of_upscaled"][step % 4].copy_(T["upscaled"], non_blocking=True)
        moves.end()
        T["has_left"].record(side)


@twentythird(
    line=AT_LINK_RATE,
    also=("weights_not_overlapped", "link_bound", "wasted_stores", "head_of_line_copies", "gpu_starved"),
    like=("redundant_loads", "small_copies", "pageable_memory", "allocation_on_hot_path", "store_not_ordered"),
    prepare=ready_upscaled,
    needs_gpu=True,
)
def torch_pictures_upscaled_into_one_tensor_that_the_next_one_waits_for_until_it_has_left(d: Device) -> Truth:
    """A picture of 96 MiB is made in 1.1 ms in the one tensor there is, leaves on a side stream, and the next is made.

    The side stream waits for the picture, and the next picture's kernels for an event behind its copy, which takes the
    link 1.8 ms to pinned memory: the second stream helps nobody, as there is no second tensor. The host is two pictures
    ahead and looks at a number of one that has left. Three pictures take turns.
    """
    import torch

    moves, step, seen = Stretches(d, T["stream"].cuda_stream), 0, 0.0
    d.spent.restart()
    for step in turns():
        upscale(step, moves)
        behind(step)
        if step >= 3:  # the picture that is two behind was not begun before this one had left
            seen += float(T["homes_of_upscaled"][(step - 3) % 4][0, 0])
        moves.read(3)
    torch.cuda.synchronize()
    d.spent.add(AT_LINK_RATE, moves.read())
    d.spent.stop()
    equal(T["homes_of_upscaled"][step % 4], T["upscaled"])
    return {}


COUNTS = 600  # of experts' tokens: 4 KiB for each place in the network where there is a router


def ready_counts(d: Device) -> None:
    """Counts on the device, three sets of pinned homes, and a graph for each set that sends all counts there."""
    import torch

    ready(d)
    if "routed" not in T:
        T["routed"] = torch.zeros(COUNTS, 2048, dtype=torch.int32, device="cuda")
        T["homes_of_routed"] = [torch.zeros(COUNTS, 2048, dtype=torch.int32, pin_memory=True) for _ in range(3)]
        T["senders_of_routed"] = [torch.cuda.CUDAGraph() for _ in range(3)]
        for homes, graph in zip(T["homes_of_routed"], T["senders_of_routed"], strict=True):
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                for count, home in zip(T["routed"], homes, strict=True):
                    home[:1024].copy_(count[:1024], non_blocking=True)
    for step in range(6):
        route_and_send(step, Stretches(d, 0))
    torch.cuda.synchronize()


def route_and_send(step: int, moves: Stretches) -> None:
    """A step of two products, which counts, and the graph that sends its counts."""
    forward(2)
    T["routed"].add_(1)
    moves.begin()
    T["senders_of_routed"][step % 3].replay()
    moves.end()


@twentythird(
    line=BELOW_LINK_RATE,
    also=(
        *("small_copies", "weights_not_overlapped", "gpu_starved", "unmerged_neighbours", "link_bound"),
        *("wasted_stores", "head_of_line_copies"),
    ),
    like=("redundant_loads", "pageable_memory", "launch_queue_saturation", "cpu_starved", "allocation_on_hot_path"),
    prepare=ready_counts,
    needs_gpu=True,
)
def torch_counts_of_600_routers_that_a_cuda_graph_sends_one_by_one_before_the_next_step(d: Device) -> Truth:
    """Behind each step of 0.4 ms a CUDA graph sends the counts of 600 routers to pinned memory, 4 KiB each.

    The copies stand in a row in the graph, on the model's stream, and the next step behind them. Nobody makes a call
    for one, but the GPU takes above 1 us for each, of which the link needs 0.08 us. Each step changes all counts. The
    host is two steps ahead, and looks at a count of the one that is over.
    """
    import torch

    moves, step, seen = Stretches(d, 0), 0, 0
    d.spent.restart()
    for step in turns():
        route_and_send(step, moves)
        behind(step)
        if step >= 2:
            seen += int(T["homes_of_routed"][(step - 2) % 3][0, 0])
        moves.read(3)
    torch.cuda.synchronize()
    d.spent.add(BELOW_LINK_RATE, moves.read())
    d.spent.stop()
    equal(T["homes_of_routed"][step % 3][-1, :1024], T["routed"][-1, :1024])
    return {}


ROOMS_OF_ARENA = 16  # requests, 256 MiB each


def ready_arenas(d: Device) -> None:
    """Two arenas of 4 GiB, three requests that come, and how many products are 0.6 of what it takes to move all."""
    import torch

    ready(d)
    if "arenas" not in T:
        made = {"device": "cuda", "dtype": torch.bfloat16}
        T["arenas"] = [torch.empty(ROOMS_OF_ARENA, 8192, 16_384, **made) for _ in range(2)]
        for room in T["arenas"][0]:
            room.normal_()
        T["newcomers"] = [torch.randn(8192, 16_384, **made) for _ in range(3)]
        compact(0)
        product = measured(d, lambda: forward(20)) // 20
        T["arena_products"] = max(int(0.6 * measured(d, lambda: compact(1)) / max(product, 1)), 2)
    for step in range(4):
        compact(step)
        forward(T["arena_products"])
    torch.cuda.synchronize()


def compact(step: int) -> None:
    """All requests but the first go one room to the front, into the other arena, and a new one gets the last room."""
    old, new = T["arenas"][step % 2], T["arenas"][1 - step % 2]
    for number in range(1, ROOMS_OF_ARENA):
        new[number - 1].copy_(old[number])
    new[ROOMS_OF_ARENA - 1].copy_(T["newcomers"][step % 3])
    new[:, 0, :64].add_(1)  # a token of each


@twentythird(
    line=INSIDE_GPU,
    also=("gpu_starved", "unmerged_neighbours"),
    like=("small_copies", "redundant_loads", "weights_not_overlapped", "synchronisation", "allocation_on_hot_path"),
    prepare=ready_arenas,
    needs_gpu=True,
)
def torch_an_arena_of_requests_compacted_into_another_one_whenever_the_oldest_request_ends(d: Device) -> Truth:
    """When the oldest of 16 requests ends, all others are copied one room to the front, into a second arena.

    A room is 256 MiB in one piece, and the new request gets the last one: 16 copies within the device for each step, on
    the model's stream. How long they take, 2 ms or so, was measured first, and the step's products were made 0.6 of it.
    Each room gets another request than it had. The host is two steps ahead.
    """
    import torch

    moves, step = Stretches(d, 0), 0
    d.spent.restart()
    for step in turns():
        moves.begin()
        compact(step)
        moves.end()
        forward(T["arena_products"])
        behind(step)
        moves.read(3)
    torch.cuda.synchronize()
    d.spent.add(INSIDE_GPU, moves.read())
    d.spent.stop()
    equal(T["arenas"][1 - step % 2][-1], T["newcomers"][step % 3])
    return {}


ANSWERS, VOCABULARY = 96, 128 * 1024  # a bias in float32 for each token that each answer may have next: 48 MiB


def ready_biases(d: Device) -> None:
    """A head, three pinned biases, two places for a bias, and an event of each place's arrival and last use."""
    import torch

    ready(d)
    if "biases" not in T:
        T["head_of_biases"] = torch.randn(4096, VOCABULARY, device="cuda", dtype=torch.bfloat16) / 64
        T["biases"] = [torch.empty(ANSWERS, VOCABULARY, pin_memory=True) for _ in range(3)]
        for bias in T["biases"]:
            bias.copy_((torch.rand(ANSWERS, VOCABULARY, device="cuda") > 0.5).float() * 1e4)
        T["places_of_bias"] = [torch.zeros(ANSWERS, VOCABULARY, device="cuda") for _ in range(2)]
        T["bias_came"], T["bias_used"] = ([torch.cuda.Event() for _ in range(2)] for _ in range(2))
    T["places_of_bias"][0].copy_(T["biases"][0], non_blocking=True)
    for _ in range(4):
        biased(0)
    torch.cuda.synchronize()


def biased(place: int) -> Any:
    """The next token of each answer out of those that its grammar allows."""
    logits = T["few"][:ANSWERS] @ T["head_of_biases"]
    return (logits + T["places_of_bias"][place]).argmax(-1)


@twentythird(
    "redundant_loads",
    line=NOT_NEEDED,
    also=("weights_not_overlapped", "link_bound"),
    like=("small_copies", "pageable_memory", "synchronisation", "load_not_ordered", "launch_queue_saturation"),
    prepare=ready_biases,
    needs_gpu=True,
    blind=DEVICE,
)
def torch_a_grammar_s_bias_sent_before_each_token_though_the_grammar_has_stayed_in_its_state(d: Device) -> Truth:
    """Before each token the bias of 96 answers' grammars, 48 MiB, goes to its place on the device, which has it.

    All answers are inside a string, where a grammar stays in its state, and nobody writes to the pinned bias nor to its
    place: all loads bring what is there. One takes the link 0.9 ms, on the model's stream, before the 0.4 ms in which
    the head, the sum and `argmax` make a token. The host is two steps ahead.
    """
    import torch

    moves, tokens = Stretches(d, 0), None
    d.spent.restart()
    for step in turns():
        moves.begin()
        T["places_of_bias"][0].copy_(T["biases"][0], non_blocking=True)
        moves.end()
        tokens = biased(0)
        behind(step)
        moves.read(3)
    torch.cuda.synchronize()
    d.spent.add(NOT_NEEDED, moves.read())
    d.spent.stop()
    if tokens is None or not T["biases"][0][0, int(tokens[0])] > 0:
        raise RuntimeError("a token was made that its grammar forbids")
    return {"redundant_loads": moves.ns}


# ---- a device that waits for the host -------------------------------------------------------------------------------

POOL, PLACES, PAGE = 160, 63, 2 << 20  # pinned pages, places for pages, and numbers of a page, which is 4 MiB


def ready_warming(d: Device) -> None:
    """Pinned pages, places for them on the device, and both cut in half."""
    import torch

    ready(d)
    if "warm_pages" not in T:
        pages, places = pinned(POOL, PAGE), torch.empty(PLACES, PAGE, dtype=torch.bfloat16, device="cuda")
        T["warm_pages"], T["warm_places"] = list(pages), list(places)
        T["half_pages"], T["half_places"] = [one[: PAGE // 2] for one in pages], [one[: PAGE // 2] for one in places]
    warm(0, 80, "warm")
    warm(80, 80, "half")
    forward(5)
    torch.cuda.synchronize()


def warm(first: int, count: int, size: str) -> list[int]:
    """So many pages, or halves of pages, to their places on the side stream: how long each call took, in ns."""
    import torch

    pages, places, took = T[f"{size}_pages"], T[f"{size}_places"], list[int]()
    with torch.cuda.stream(T["stream"]):
        for number in range(first, first + count):
            begin = now()
            places[number % PLACES].copy_(pages[number % POOL], non_blocking=True)
            took.append(now() - begin)
    return took


@twentythird(
    line=FULL_QUEUE,
    also=(
        *("link_bound", "gpu_starved", "synchronisation", "unmerged_neighbours", "python_or_gil_bound"),
        *("redundant_loads", "launch_queue_saturation", "head_of_line_copies"),
    ),
    like=("small_copies", "allocation_on_hot_path", "slow_tier", "cpu_starved", "wasted_stores", "pageable_memory"),
    prepare=ready_warming,
    needs_gpu=True,
)
def torch_pages_for_conversations_that_may_go_on_brought_by_the_thread_that_decodes(d: Device) -> Truth:
    """Between two steps of 1 ms a server brings 48 pages of conversations that may go on, 4 MiB or 76 us of the link.

    They go on a side stream that no kernel waits for, and 48 of them take the link 3.7 ms. So after some 50 ms the
    stream has all that it takes, a thousand, and then the thread stands in the calls for 2.2 ms of each 3.7 ms. It has
    waited for the step before and launches the next one after the pages: only copies run meanwhile. A place never gets
    the page that it has: 160 pages go round over 63 places.
    """
    import torch

    took, step = list[int](), 0
    d.spent.restart()
    for step in turns():
        took += warm(step * 48, 48, "warm")
        forward(5)
        torch.cuda.current_stream().synchronize()
    d.spent.add(FULL_QUEUE, beyond(took, 30_000))
    d.spent.stop()
    T["stream"].synchronize()
    last = step * 48 + 47
    equal(T["warm_places"][last % PLACES], T["warm_pages"][last % POOL])
    return {}


CHECKED = 48  # layers


def ready_checked(d: Device) -> None:
    """A network of small layers, four inputs, and how long the device takes when nobody asks for a check's result."""
    import torch

    ready(d)
    if "checked" not in T:
        T["checked"] = [torch.randn(512, 512, device="cuda") / 22 for _ in range(CHECKED)]
        T["seen_by_checked"] = [torch.randn(64, 512, device="cuda") for _ in range(4)]
    for step in range(4):
        checked(step, True)
    T["checked_ns"] = measured(d, lambda: checked(0, False))


def checked(step: int, asks: bool) -> Any:
    """All layers, and behind each a look for what is no number."""
    import torch

    x = T["seen_by_checked"][step % 4]
    for layer in T["checked"]:
        x = torch.tanh(x @ layer)
        wrong = torch.isnan(x).any()
        if asks and wrong.item():
            raise RuntimeError("a layer has made what is no number")
    return x


@twentythird(
    line=WAITING,
    or_lines=(SUBMITTING, PYTHON, PAGEABLE),  # between two layers the thread wakes, looks at an answer and submits
    also=("synchronisation", "gpu_starved", "python_or_gil_bound", "small_copies", "pageable_memory", "wasted_stores"),
    like=("launch_queue_saturation", "cpu_starved", "allocation_on_hot_path", "redundant_loads", "slow_tier"),
    prepare=ready_checked,
    needs_gpu=True,
)
def torch_a_check_for_nan_left_in_behind_each_small_layer_whose_answer_the_thread_waits_for(d: Device) -> Truth:
    """A debugging aid asks `torch.isnan(x).any().item()` behind each of 48 small layers, and then launches the next.

    A layer and its check are four kernels of 2 to 5 us. The answer comes to the host by a copy, for which the thread is
    woken, and only then it launches four more, at 5 us or more each, onto a device that has nothing. How long all
    layers and checks take without being asked was measured before, behind long kernels; the rest is lost.
    """
    lost, out = 0, None
    d.spent.restart()
    for step in turns():
        begin = now()
        out = checked(step, True)
        lost += max(now() - begin - T["checked_ns"], 0)
    d.spent.add(WAITING, lost)
    d.spent.stop()
    if out is None or not out.abs().max().item() > 0:
        raise RuntimeError("the layers have made nothing")
    return {}


def ready_staging(d: Device) -> None:
    """A layer of 64 MiB to be saved."""
    import torch

    ready(d)
    if "saved_layer" not in T:
        T["saved_layer"] = torch.randn(4096, 8192, device="cuda", dtype=torch.bfloat16)
    for step in range(3):
        save_by_staging(step)
    torch.cuda.synchronize()


def save_by_staging(step: int) -> tuple[int, float]:
    """Pinned memory, a step, a copy of its layer, and the memory is given back: the ns of the first and the last."""
    import torch

    begin = now()
    staging = torch.empty(4096, 8192, dtype=torch.bfloat16, pin_memory=True)
    took = now() - begin
    forward(5)
    T["saved_layer"][-1, -16:].fill_(step % 251)
    staging.copy_(T["saved_layer"], non_blocking=True)
    torch.cuda.synchronize()
    seen = float(staging[-1, -1])
    begin = now()
    del staging
    torch.cuda.synchronize()  # torch has an event behind the last use, and gives back what is surely not in use
    torch._C._host_emptyCache()
    return took + now() - begin, seen


@twentythird(
    "allocation_on_hot_path",
    line=ALLOCATING,
    or_lines=(ELSEWHERE,),
    also=(
        *("gpu_starved", "synchronisation", "pinning_stall", "context_lock_stall", "weights_not_overlapped"),
        *("wasted_stores", "link_bound", "python_or_gil_bound"),
    ),
    like=("pageable_memory", "slow_tier", "launch_queue_saturation", "small_copies", "cpu_starved", "redundant_loads"),
    prepare=ready_staging,
    needs_gpu=True,
)
def torch_pinned_staging_made_for_each_save_and_given_back_by_emptying_the_host_s_cache(d: Device) -> Truth:
    """For each save a trainer makes 64 MiB of pinned memory, and gives it back by emptying torch's cache of such.

    So that other processes have the memory meanwhile, `_host_emptyCache` frees it when it has been used once, and the
    next save has the driver pin 16,384 pages again: 7 ms or more for both. The thread has waited for the step and its
    copy before it frees, and pins before it launches, so the device has nothing. A step is 1 ms of products and its
    copy 1.2 ms of the link.
    """
    lost, step, seen = 0, 0, 0.0
    d.spent.restart()
    for step in turns():
        took, seen = save_by_staging(step)
        lost += took
    d.spent.add(ALLOCATING, lost)
    d.spent.stop()
    if int(seen) != step % 251:
        raise RuntimeError("other numbers were saved than were made")
    return {"allocation_on_hot_path": lost}


def ready_rollback(d: Device) -> None:
    """Four weights that steps change."""
    import torch

    ready(d)
    if "weights_to_keep" not in T:
        T["weights_to_keep"] = [torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
    for step in range(3):
        update_kept(step)
        kept = [weight.cpu() for weight in T["weights_to_keep"]]
    equal(kept[-1], T["weights_to_keep"][-1])
    torch.cuda.synchronize()


def update_kept(step: int) -> None:
    """Changes all four weights."""
    for weight in T["weights_to_keep"]:
        weight.add_(T["x"], alpha=1 / 64 if step % 2 else -1 / 64)


@twentythird(
    "pageable_memory",
    line=PAGEABLE,
    or_lines=(BELOW_LINK_RATE, WAITING),
    also=(
        *("synchronisation", "gpu_starved", "weights_not_overlapped", "python_or_gil_bound", "link_bound"),
        *("wasted_stores", "blocking_server_call"),
    ),
    like=("small_copies", "allocation_on_hot_path", "launch_queue_saturation", "slow_tier", "redundant_loads"),
    prepare=ready_rollback,
    needs_gpu=True,
)
def torch_weights_kept_for_a_rollback_by_cpu_of_each_one_after_each_update(d: Device) -> Truth:
    """After each update a trainer keeps four weights of 32 MiB by `weight.cpu()`, in case the next step diverges.

    `cpu` makes plain memory, new each time, and the thread stands in each copy for some milliseconds, while the driver
    brings it through its own pinned buffers and the memory gets its pages. The step before was waited for, and the
    next one is launched when all four are there: no kernel runs meanwhile. A step is 2 ms of products.
    """
    import torch

    lost, kept = 0, list[Any]()
    d.spent.restart()
    for step in turns():
        forward(10)
        update_kept(step)
        torch.cuda.current_stream().synchronize()
        begin = now()
        kept = [weight.cpu() for weight in T["weights_to_keep"]]
        lost += now() - begin
    d.spent.add(PAGEABLE, lost)
    d.spent.stop()
    equal(kept[-1], T["weights_to_keep"][-1])
    return {"pageable_memory": lost}


ASKED = 64  # requests in a batch, each with a temperature of its own


def ready_sampled(d: Device) -> None:
    """Temperatures of requests, a place for each token, and how long the device takes to sample a batch."""
    import torch

    ready(d)
    if "temperatures" not in T:
        T["temperatures"] = [0.5 + number / ASKED for number in range(ASKED)]
        T["sampled"] = torch.zeros(ASKED, dtype=torch.int64, device="cuda")
    for _ in range(3):
        sample_one_by_one()
    T["sampled_ns"] = measured(d, sample_one_by_one)


def sample_one_by_one() -> None:
    """A token for each request: its logits by its temperature, made chances, against noise, and the largest."""
    import torch

    logits = (T["few"][:ASKED] @ T["w"]).float()
    for number, temperature in enumerate(T["temperatures"]):
        chances = torch.softmax(logits[number] / temperature, -1)
        noise = torch.empty_like(chances).exponential_()
        torch.argmax(chances.div_(noise), -1, out=T["sampled"][number])


@twentythird(
    line=SUBMITTING,
    or_lines=(PYTHON, ELSEWHERE),  # the calls are made one by one out of Python
    also=("gpu_starved", "python_or_gil_bound", "synchronisation"),
    like=("small_copies", "launch_queue_saturation", "cpu_starved", "allocation_on_hot_path", "pageable_memory"),
    prepare=ready_sampled,
    needs_gpu=True,
)
def torch_a_sampler_that_goes_over_the_requests_of_a_batch_as_each_has_a_temperature_of_its_own(d: Device) -> Truth:
    """A sampler goes over 64 requests in Python, and launches five small kernels for each, by its temperature.

    A kernel over the 4,096 logits of one request takes the device 2 to 5 us, and Python and torch 6 us or more: the
    device is done with one before it has the next. How long it takes for a batch was measured before, behind long
    kernels; the rest is lost. Nobody waits for a batch but two behind it.
    """
    import torch

    lost = 0
    d.spent.restart()
    for step in turns():
        begin = now()
        sample_one_by_one()
        behind(step)
        lost += max(now() - begin - T["sampled_ns"], 0)
    torch.cuda.synchronize()
    d.spent.add(SUBMITTING, lost)
    d.spent.stop()
    if not 0 <= int(T["sampled"].min()) <= int(T["sampled"].max()) < 4096:
        raise RuntimeError("a token is none of the vocabulary")
    return {}


def make_references() -> None:
    """Six texts of 64 tokens that somebody wrote down, and how long it takes to compare an answer with all of them."""
    if "references" not in T:
        draw = random.Random(231)
        T["references"] = [[draw.randrange(4096) for _ in range(64)] for _ in range(6)]
    took, heard = list[int](), list(range(64))
    for _ in range(9):
        begin = now()
        errors(heard)
        took.append(now() - begin)
    T["errors_ns"] = sorted(took)[4]


def errors(heard: list[int]) -> int:
    """How many tokens would have to be changed, left out or put in to make an answer each of the references."""
    total = 0
    for reference in T["references"]:
        above = list(range(len(reference) + 1))
        for row, token in enumerate(heard, 1):
            line = [row]
            for column, wanted in enumerate(reference, 1):
                line.append(min(above[column] + 1, line[-1] + 1, above[column - 1] + (token != wanted)))
            above = line
        total += above[-1]
    return total


def ready_evaluated(d: Device) -> None:
    """References, and how many products are half of a comparison."""
    import torch

    ready(d)
    make_references()
    product = measured(d, lambda: forward(20)) // 20
    T["evaluated_products"] = min(max(T["errors_ns"] // 2 // product, 3), 200)
    for _ in range(3):
        evaluate(Stretches(d, 0))
    torch.cuda.synchronize()


def evaluate(idle: Stretches) -> int:
    """An answer, and its errors."""
    idle.end()
    tokens = forward(T["evaluated_products"]).argmax(-1)[:64]
    idle.begin()
    return errors(tokens.tolist())


@twentythird(
    line=PYTHON,
    or_lines=(ELSEWHERE,),  # a recorder of calls alone sees a thread outside of CUDA
    also=("synchronisation", "gpu_starved", "python_or_gil_bound", "pageable_memory", "wasted_stores"),
    like=("small_copies", "redundant_loads", "cpu_starved", "slow_tier", "launch_queue_saturation"),
    prepare=ready_evaluated,
    needs_gpu=True,
)
def torch_errors_of_an_evaluation_s_answers_counted_in_python_before_the_next_batch(d: Device) -> Truth:
    """An evaluation reads a batch's tokens by `tolist()`, counts its errors in Python, and launches the next batch.

    To count them is to fill six tables of 64 x 64 edit distances, 25,000 fields in all, for some milliseconds. How
    long was measured first, and a batch's products were made half of it. The batch before was waited for and the next
    is launched when all are counted, so nothing is on the device meanwhile.
    """
    import torch

    idle, count, total = Stretches(d, 0), 0, 0
    d.spent.restart()
    for _ in turns():
        total += evaluate(idle)
        count += 1
        idle.read()
    idle.end()
    torch.cuda.synchronize()
    d.spent.add(PYTHON, idle.read())
    d.spent.stop()
    if not 0 <= total <= 6 * 64 * count:
        raise RuntimeError("there are more errors than tokens")
    return {}


def ready_previews(d: Device) -> None:
    """A pinned place for a preview, its bytes, how long they take to be packed, and products for half of that."""
    import torch

    ready(d)
    if "preview" not in T:
        T["preview"] = pinned(16, 4096)
        T["bytes_of_preview"] = T["preview"].flatten().view(torch.uint8).numpy()
    took = list[int]()
    for _ in range(9):
        begin = now()
        zlib.compress(T["bytes_of_preview"])
        took.append(now() - begin)
    product = measured(d, lambda: forward(20)) // 20
    T["preview_products"] = min(max(sorted(took)[4] // 2 // product, 3), 200)
    for step in range(3):
        denoise_and_pack(step, Stretches(d, 0))
    torch.cuda.synchronize()


def denoise_and_pack(step: int, idle: Stretches) -> bytes:
    """A frame, whose preview comes to the host and is packed."""
    import torch

    idle.end()
    frame = forward(T["preview_products"])[step % 64 : step % 64 + 16]
    T["preview"].copy_(frame, non_blocking=True)
    idle.begin()
    torch.cuda.current_stream().synchronize()
    return zlib.compress(T["bytes_of_preview"])


@twentythird(
    line=PYTHON,
    or_lines=(ELSEWHERE,),  # zlib is C, and has given the interpreter's lock back; of calls alone, outside of CUDA
    also=("synchronisation", "gpu_starved", "python_or_gil_bound", "wasted_stores", "small_copies"),
    like=("pageable_memory", "redundant_loads", "slow_tier", "launch_queue_saturation", "allocation_on_hot_path"),
    prepare=ready_previews,
    needs_gpu=True,
)
def torch_a_preview_of_each_frame_packed_by_zlib_before_the_next_frame_is_denoised(d: Device) -> Truth:
    """A frame's preview of 128 KiB comes to pinned memory, and the thread packs it by `zlib.compress` for a viewer.

    That takes the CPU some milliseconds, with nothing on the device: the frame was waited for, and the next is launched
    when the preview is packed. How long was measured first, and a frame's products were made half of it.
    """
    import torch

    idle, packed = Stretches(d, 0), b""
    d.spent.restart()
    for step in turns():
        packed = denoise_and_pack(step, idle)
        idle.read()
    idle.end()
    torch.cuda.synchronize()
    d.spent.add(PYTHON, idle.read())
    d.spent.stop()
    if zlib.decompress(packed) != T["bytes_of_preview"].tobytes():
        raise RuntimeError("a preview was packed wrongly")
    return {}


def ready_written_out(d: Device) -> None:
    """Keys of a conversation on the device, a pinned place for them, its bytes, and five files."""
    import torch

    ready(d)
    if "keys_to_write" not in T:
        T["keys_to_write"] = torch.randn(6144, 4096, device="cuda", dtype=torch.bfloat16)
        T["home_to_write"] = pinned(6144, 4096)
        T["bytes_to_write"] = T["home_to_write"].flatten().view(torch.uint8).numpy()
    if "files_to_write" not in T:
        T["folder_to_write"] = tempfile.TemporaryDirectory()
        paths = [Path(T["folder_to_write"].name) / f"conversation_{number}" for number in range(5)]
        T["files_to_write"] = [os.open(path, os.O_RDWR | os.O_CREAT) for path in paths]
    for number in range(5):
        answer_and_leave(number)
        write_out(number)


def answer_and_leave(number: int) -> None:
    """Answers, and brings the keys to pinned memory."""
    import torch

    forward(5)
    T["keys_to_write"][0, :16].fill_(number % 251)
    T["home_to_write"].copy_(T["keys_to_write"], non_blocking=True)
    torch.cuda.current_stream().synchronize()


def write_out(number: int) -> None:
    """The bytes of the keys over those that a file has."""
    held, at = memoryview(T["bytes_to_write"]), 0
    while at < len(held):
        at += os.pwrite(T["files_to_write"][number % 5], held[at:], at)


@twentythird(
    line=TIER,
    or_lines=(ELSEWHERE, PYTHON),  # it stands in `pwrite`; of calls alone, it is outside of CUDA
    also=(
        *("slow_tier", "gpu_starved", "synchronisation", "python_or_gil_bound", "wasted_stores"),
        *("weights_not_overlapped", "link_bound"),
    ),
    like=("cpu_starved", "small_copies", "allocation_on_hot_path", "launch_queue_saturation", "pageable_memory"),
    prepare=ready_written_out,
    needs_gpu=True,
    undecided_in=DEVICE,  # their recordings hold CUDA's calls alone
)
def torch_keys_of_an_answered_conversation_written_to_its_file_before_the_next_one_is_answered(d: Device) -> Truth:
    """When an answer of 1 ms is there, the conversation's 48 MiB come to pinned memory and are written by `os.pwrite`.

    The copy takes the link 0.9 ms and was waited for; to write is to copy all into the page cache of one of five files,
    for 5 ms or more, by the thread that launches the next answer when it has written. Nothing is on the device then.
    """
    number = 0
    d.spent.restart()
    for number in turns():
        answer_and_leave(number)
        with d.spent.on(TIER):
            write_out(number)
    d.spent.stop()
    files = T.pop("files_to_write")
    same = os.pread(files[number % 5], 4096, 0) == T["bytes_to_write"][:4096].tobytes()
    for file in files:
        os.close(file)
    T.pop("folder_to_write").cleanup()
    if not same:
        raise RuntimeError("other bytes were written than were made")
    return {}


def ready_voice(d: Device) -> None:
    """A pinned place for a piece of speech, and its bytes."""
    import torch

    ready(d)
    if "voice" not in T:
        T["voice"] = pinned(32, 4096)
        T["bytes_of_voice"] = T["voice"].flatten().view(torch.uint8).numpy()
    for step in range(3):
        speak(step)


def speak(step: int) -> None:
    """A piece of speech of 256 KiB, brought to the host."""
    import torch

    made = forward(5)[step % 64 : step % 64 + 32]
    T["voice"].copy_(made, non_blocking=True)
    torch.cuda.current_stream().synchronize()


@twentythird(
    line=ELSEWHERE,
    or_lines=(TIER, PYTHON),  # it stands in `send` of a socket that takes no more
    also=("gpu_starved", "synchronisation", "python_or_gil_bound", "slow_tier", "wasted_stores", "small_copies"),
    like=("pageable_memory", "cpu_starved", "redundant_loads", "launch_queue_saturation", "allocation_on_hot_path"),
    prepare=ready_voice,
    needs_gpu=True,
    undecided_in=DEVICE,  # their recordings hold CUDA's calls alone
)
def torch_speech_sent_by_sendall_to_a_listener_that_takes_it_slowly_before_more_is_made(d: Device) -> Truth:
    """Each piece of speech, 1 ms of products and 256 KiB, is sent by `sendall` before the next piece is made.

    The listener takes 32 KiB from its socket each millisecond, so a piece takes it 8 ms, and the socket keeps less than
    one: the thread stands in `sendall` until there is room, having waited for the piece and with the next not launched.
    """
    speaker, listener = socket.socketpair()
    speaker.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 32 << 10)
    heard, sent = [0], 0

    def listen() -> None:
        while got := listener.recv(32 << 10):
            heard[0] += len(got)
            time.sleep(0.001)

    thread = in_thread(listen)
    try:
        d.spent.restart()
        for step in turns():
            speak(step)
            with d.spent.on(ELSEWHERE):
                speaker.sendall(T["bytes_of_voice"])
            sent += T["bytes_of_voice"].size
        d.spent.stop()
    finally:
        speaker.close()
        thread.join()
        listener.close()
    if heard[0] != sent:
        raise RuntimeError("the listener has not heard all")
    return {}


# ---- healthy --------------------------------------------------------------------------------------------------------


def ready_kept_beside(d: Device) -> None:
    """Weights that steps change, and three pinned homes for each."""
    import torch

    ready_large(d)
    ready_rollback(d)
    if "homes_to_keep" not in T:
        T["homes_to_keep"] = [[pinned(4096, 4096) for _ in range(4)] for _ in range(3)]
    for step in range(6):
        train_and_keep(step, Stretches(d, 0))
    torch.cuda.synchronize()


def train_and_keep(step: int, products: Stretches) -> None:
    """A step that changes all weights, clones of which leave on the side stream; waits for the step before the last."""
    import torch

    side = T["stream"]
    products.begin()
    large(8)
    update_kept(step)
    products.end()
    clones = [weight.clone() for weight in T["weights_to_keep"]]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for home, one in zip(T["homes_to_keep"][step % 3], clones, strict=True):
            home.copy_(one, non_blocking=True)
            one.record_stream(side)
    behind(step)


@twentythird(
    line=COMPUTING,
    also=("wasted_stores",),
    like=("weights_not_overlapped", "link_bound", "pageable_memory", "store_not_ordered", "allocation_on_hot_path"),
    prepare=ready_kept_beside,
    needs_gpu=True,
)
def torch_weights_kept_for_a_rollback_by_clones_that_leave_beside_the_next_step(d: Device) -> Truth:
    """After each step of 13 ms four weights of 32 MiB are cloned on the device; the clones leave beside the next.

    A clone takes 0.02 ms on the model's stream, less than a hundredth of a step for all four. The side stream waits for
    the clones, takes the link 2.4 ms to pinned memory, and no kernel waits for it: the next step changes the weights,
    not the clones. The host is two steps ahead.
    """
    import torch

    products, step = Stretches(d, 0), 0
    d.spent.restart()
    for step in turns():
        train_and_keep(step, products)
        products.read(3)
    torch.cuda.current_stream().synchronize()
    d.kernel_ns += products.read()
    d.spent.stop()
    torch.cuda.synchronize()
    equal(T["homes_to_keep"][step % 3][-1], T["weights_to_keep"][-1])
    return {}


def ready_evaluated_ahead(d: Device) -> None:
    """References, pinned places for tokens, and how many large products are three times a comparison."""
    import torch

    ready_large(d)
    make_references()
    if "heard" not in T:
        T["heard"] = torch.zeros(4, 64, dtype=torch.int64, pin_memory=True)
    product = measured(d, lambda: large(4), 10) // 4
    T["large_of_evaluated"] = min(max(3 * T["errors_ns"] // product + 1, 6), 60)
    for step in range(4):
        evaluate_ahead(step, Stretches(d, 0))
    torch.cuda.synchronize()


def evaluate_ahead(step: int, products: Stretches) -> int:
    """Launches a batch, and counts the errors of the one before the last."""
    products.begin()
    made = large(T["large_of_evaluated"])
    T["heard"][step % 4].copy_(made[:64].argmax(-1), non_blocking=True)
    products.end()
    behind(step)
    return errors(T["heard"][(step - 2) % 4].tolist()) if step >= 2 else 0


@twentythird(
    line=COMPUTING,
    also=("wasted_stores",),
    like=("python_or_gil_bound", "gpu_starved", "synchronisation", "small_copies", "cpu_starved"),
    prepare=ready_evaluated_ahead,
    needs_gpu=True,
)
def torch_errors_of_an_evaluation_s_answers_counted_in_python_while_two_batches_compute(d: Device) -> Truth:
    """An evaluation counts in Python the errors of the batch before the last, while that and this one compute.

    To count them takes some milliseconds, which was measured first, and a batch has large products for three times
    that. The tokens come to pinned memory behind their batch, which the thread waits for by an event two batches later:
    when it has counted, the device has more than a batch left.
    """
    import torch

    products, count, total = Stretches(d, 0), 0, 0
    d.spent.restart()
    for step in turns():
        total += evaluate_ahead(step, products)
        count += 1
        products.read(3)
    torch.cuda.synchronize()
    d.kernel_ns += products.read()
    d.spent.stop()
    if not 0 <= total <= 6 * 8192 * count:
        raise RuntimeError("there are more errors than tokens")
    return {}


def ready_biases_ahead(d: Device) -> None:
    """As `ready_biases`, and steps of some 7 ms."""
    import torch

    ready_large(d)
    ready_biases(d)
    ask_for_bias(0)
    for step in range(5):
        decode_biased(step, Stretches(d, 0))
    torch.cuda.synchronize()


def ask_for_bias(step: int) -> None:
    """A step's bias to the place that the step before the last has had, on the side stream."""
    import torch

    side, place = T["stream"], step % 2
    with torch.cuda.stream(side):
        if step >= 2:
            side.wait_event(T["bias_used"][place])
        T["places_of_bias"][place].copy_(T["biases"][step % 3], non_blocking=True)
        T["bias_came"][place].record(side)


def decode_biased(step: int, products: Stretches) -> Any:
    """A step with its bias; then the next step's bias is asked for."""
    import torch

    compute = torch.cuda.current_stream()
    compute.wait_event(T["bias_came"][step % 2])
    products.begin()
    tokens = biased(step % 2)
    large(4)
    products.end()
    T["bias_used"][step % 2].record(compute)
    ask_for_bias(step + 1)
    behind(step)
    return tokens


@twentythird(
    line=COMPUTING,
    like=("redundant_loads", "weights_not_overlapped", "link_bound", "load_not_ordered", "synchronisation"),
    prepare=ready_biases_ahead,
    needs_gpu=True,
)
def torch_a_grammar_s_bias_brought_beside_the_token_before_by_a_state_that_changes_each_time(d: Device) -> Truth:
    """Each step of 7 ms has another bias, whose 48 MiB come on a side stream while the step before computes.

    There are two places; a copy waits for the step that had its place, which is over when the step before begins, takes
    the link 0.9 ms, and is there 6 ms before its own step. The grammars go through three states in turn, so no load
    brings what is in its place. The host is two steps ahead.
    """
    import torch

    products, step, tokens = Stretches(d, 0), 0, None
    ask_for_bias(0)
    torch.cuda.synchronize()
    d.spent.restart()
    for step in turns():
        tokens = decode_biased(step, products)
        products.read(3)
    torch.cuda.current_stream().synchronize()
    d.kernel_ns += products.read()
    d.spent.stop()
    torch.cuda.synchronize()
    equal(T["places_of_bias"][(step + 1) % 2], T["biases"][(step + 1) % 3])
    if tokens is None or not T["biases"][step % 3][0, int(tokens[0])] > 0:
        raise RuntimeError("a token was made that its grammar forbids")
    return {}


def ready_warming_beside(d: Device) -> None:
    """As `ready_warming`, and rounds of some 100 ms."""
    import torch

    ready_large(d)
    ready_warming(d)
    large(8)
    torch.cuda.synchronize()


@twentythird(
    line=COMPUTING,
    also=("redundant_loads",),
    like=("launch_queue_saturation", "link_bound", "head_of_line_copies", "gpu_starved", "synchronisation"),
    prepare=ready_warming_beside,
    needs_gpu=True,
)
def torch_pages_for_conversations_that_may_go_on_brought_while_100_ms_of_products_are_left(d: Device) -> Truth:
    """Beside 60 large products 1,500 pages of 2 MiB are brought, of conversations that may go on.

    A page takes the link 40 us on a side stream that no kernel waits for, and a stream takes a thousand, so the thread
    stands in the calls for half of a round or so. But the products are some 100 ms, and those of one round or more were
    launched before: the device has them when the thread is through, after 60 ms, and waits for the round before.
    """
    import torch

    products, step = Stretches(d, 0), 0
    d.spent.restart()
    for step in turns():
        products.begin()
        large(60)
        products.end()
        warm(step * 1_500, 1_500, "half")
        behind(step, 1)
        products.read(2)
    torch.cuda.current_stream().synchronize()
    d.kernel_ns += products.read()
    d.spent.stop()
    T["stream"].synchronize()
    last = step * 1_500 + 1_499
    equal(T["half_places"][last % PLACES], T["half_pages"][last % POOL])
    return {}


def ready_read_ahead(d: Device) -> None:
    """Five files of 24 MiB, four pinned homes, three places, a thread that reads, and products for three times that."""
    import torch

    ready_large(d)
    if "homes_to_read" not in T:
        T["homes_to_read"] = [pinned(3072, 4096) for _ in range(4)]
        T["bytes_to_read"] = [home.flatten().view(torch.uint8).numpy() for home in T["homes_to_read"]]
        T["places_to_read"] = [torch.zeros(3072, 4096, dtype=torch.bfloat16, device="cuda") for _ in range(3)]
        T["read_came"] = [torch.cuda.Event() for _ in range(3)]
        T["reader"] = ThreadPoolExecutor(1)
    if "folder_to_read" not in T:
        T["folder_to_read"] = tempfile.TemporaryDirectory()
        for number in range(5):
            shape = torch.randn(3072, 4096, device="cuda", dtype=torch.bfloat16).to("cpu")
            file_to_read(number).write_bytes(shape.flatten().view(torch.uint8).numpy().tobytes())
    took = list[int]()
    for number in range(6):
        begin = now()
        T["reader"].submit(read_in, number).result()
        took.append(now() - begin)
    product = measured(d, lambda: large(4), 10) // 4
    T["large_of_read"] = min(max(3 * sorted(took)[3] // product + 1, 6), 60)
    coming: deque[Future[None]] = deque(T["reader"].submit(read_in, number) for number in range(2))
    for step in range(4):
        go_on(step, coming, Stretches(d, 0))
    for one in coming:
        one.result()
    torch.cuda.synchronize()


def file_to_read(number: int) -> Path:
    return Path(T["folder_to_read"].name) / f"conversation_{number % 5}"


def read_in(number: int) -> None:
    """In the reader's thread: a file into a pinned home."""
    held, at = memoryview(T["bytes_to_read"][number % 4]), 0
    with file_to_read(number).open("rb", buffering=0) as file:
        while at < len(held):
            got = file.readinto(held[at:])
            if not got:
                raise RuntimeError("a file is too short")
            at += got


def go_on(step: int, coming: deque[Future[None]], products: Stretches) -> None:
    """Goes on with a conversation that has been read; then the third after the last one over is asked for."""
    import torch

    compute, side = torch.cuda.current_stream(), T["stream"]
    coming.popleft().result(10)
    with torch.cuda.stream(side):
        T["places_to_read"][step % 3].copy_(T["homes_to_read"][step % 4], non_blocking=True)
        T["read_came"][step % 3].record(side)
    compute.wait_event(T["read_came"][step % 3])
    products.begin()
    T["x"] @ T["places_to_read"][step % 3].T
    large(T["large_of_read"])
    products.end()
    behind(step)
    coming.append(T["reader"].submit(read_in, step + 2))


@twentythird(
    line=COMPUTING,
    also=("redundant_loads",),
    like=("slow_tier", "gpu_starved", "weights_not_overlapped", "load_not_ordered", "python_or_gil_bound"),
    prepare=ready_read_ahead,
    needs_gpu=True,
)
def torch_cold_conversations_read_into_pinned_memory_by_a_thread_two_ahead_of_long_products(d: Device) -> Truth:
    """A thread reads each conversation's 24 MiB out of its file by `readinto` into one of four pinned homes, two ahead.

    How long that takes, some milliseconds, was measured first, and a step has large products for three times that. What
    has been read goes to one of three places on a side stream, 0.5 ms of the link, while the step before computes: the
    host is two steps ahead, so the place and the home are free when they are asked for, and no kernel waits for either.
    """
    import torch

    products, step = Stretches(d, 0), 0
    coming: deque[Future[None]] = deque(T["reader"].submit(read_in, number) for number in range(2))
    for one in coming:
        one.result()
    d.spent.restart()
    for step in turns():
        go_on(step, coming, products)
        products.read(3)
    torch.cuda.current_stream().synchronize()
    d.kernel_ns += products.read()
    d.spent.stop()
    for one in coming:
        one.result()
    torch.cuda.synchronize()
    equal(T["places_to_read"][step % 3], T["homes_to_read"][step % 4])
    T.pop("folder_to_read").cleanup()
    return {}


@twentythird(
    line=NOTHING_TO_DO,
    like=("gpu_starved", "synchronisation", "python_or_gil_bound", "pageable_memory", "cpu_starved"),
    also=("wasted_stores",),
    prepare=ready_large,
    needs_gpu=True,
    undecided_in=DEVICE,  # their recordings hold CUDA's calls alone
)
def torch_a_server_in_an_event_loop_of_asyncio_whose_queue_gets_a_request_each_65_ms(d: Device) -> Truth:
    """A coroutine serves: it awaits `queue.get()` of asyncio, into which another puts a request each 65 ms.

    A request is 6.4 ms of products, whose numbers are read by `tolist()`, and is answered 58 ms before the next one
    comes. Meanwhile the event loop sleeps in `epoll_wait` until the time of the next request: nobody has asked for
    anything, for nine tenths of the time.
    """
    count, products, answers = 23, Stretches(d, 0), list[list[float]]()

    async def ask(asked: asyncio.Queue[int]) -> None:
        for number in range(count):
            await asyncio.sleep(0.065)
            asked.put_nowait(number)

    async def serve() -> None:
        asked: asyncio.Queue[int] = asyncio.Queue()
        d.spent.restart()
        client = asyncio.create_task(ask(asked))
        for number in range(count):
            with d.spent.on(NOTHING_TO_DO):
                got = await asked.get()
            if got != number:
                raise RuntimeError("a request came out of its turn")
            products.begin()
            made = large(4)
            products.end()
            answers.append(made[0, :64].tolist())
            products.read()
        d.kernel_ns += products.ns
        d.spent.stop()
        await client

    asyncio.run(serve())
    if [len(answer) for answer in answers] != [64] * count:
        raise RuntimeError("an answer is not whole")
    return {}
