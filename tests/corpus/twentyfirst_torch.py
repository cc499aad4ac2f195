"""Twenty-first programs, all in torch: chunks, windows, experts, boxes, collections, captures, scans, polls."""

from __future__ import annotations

import gc
import random
import time
from collections import OrderedDict, deque
from typing import Any

from accounts import Stretches, turns
from device import Device, now
from later_torch import T, forward, ready
from nineteenth_copies import measured
from registry import (
    ALLOCATING,
    AT_LINK_RATE,
    COMPUTING,
    ELSEWHERE,
    INSIDE_GPU,
    PYTHON,
    SUBMITTING,
    WAITING,
    Truth,
    twentyfirst,
)
from seventeenth_copies import behind, equal, pinned
from seventeenth_healthy import large, ready_large

# ---- kernels that wait for copies -----------------------------------------------------------------------------------

CHUNKS, HEADS, TOKENS = 16, 32, 2048  # of a context; of a chunk: 16 MiB of keys, 16 MiB of values


def ready_chunks(d: Device) -> None:
    """A long context's keys and values in pinned chunks, one chunk's place on the device, and queries."""
    import torch

    ready(d)
    if "chunks" not in T:
        made = {"device": "cuda", "dtype": torch.bfloat16}
        T["chunks"] = [pinned(2, HEADS, TOKENS, 128) for _ in range(CHUNKS)]
        T["chunk"] = torch.empty(2, HEADS, TOKENS, 128, **made)
        T["queries"] = [torch.randn(HEADS, 64, 128, **made) / 128**0.5 for _ in range(3)]
    for step in range(4):
        attend_by_chunks(step, Stretches(d, 0))
    torch.cuda.synchronize()


def attend_by_chunks(step: int, moves: Stretches) -> Any:
    """Attention over all chunks, one after another, by a softmax that is corrected as larger scores come."""
    import torch

    query, place = T["queries"][step % 3], T["chunk"]
    top = torch.full((HEADS, 64, 1), -1e30, device="cuda")
    total, out = torch.zeros_like(top), torch.zeros(HEADS, 64, 128, device="cuda")
    for chunk in T["chunks"]:
        moves.begin()
        place.copy_(chunk, non_blocking=True)
        moves.end()
        scores = torch.bmm(query, place[0].transpose(1, 2)).float()
        higher = torch.maximum(top, scores.amax(-1, keepdim=True))
        shares, before = torch.exp(scores - higher), torch.exp(top - higher)
        total = total * before + shares.sum(-1, keepdim=True)
        out = out * before + torch.bmm(shares.bfloat16(), place[1]).float()
        top = higher
    forward(2)
    return out / total


@twentyfirst(
    line=AT_LINK_RATE,
    also=("weights_not_overlapped", "link_bound", "redundant_loads", "head_of_line_copies", "gpu_starved"),
    like=("small_copies", "pageable_memory", "allocation_on_hot_path", "python_or_gil_bound", "cpu_starved"),
    prepare=ready_chunks,
    needs_gpu=True,
)
def torch_a_long_context_on_the_host_that_attention_brings_chunk_by_chunk_for_an_online_softmax(d: Device) -> Truth:
    """Attention over a context of 512 MiB in pinned memory brings it in 16 chunks of 32 MiB, one when one is done with.

    There is one place for a chunk and one stream: a chunk takes the link 0.6 ms, and the 17 kernels that bring the
    softmax up to date with it 0.2 ms at most, and neither can run beside the other. The host is a step of 10 ms or
    more ahead, so all is queued. The place holds the last chunk when the first is loaded: no load brings what is
    there, though each step loads the same context.
    """
    import torch

    moves, out = Stretches(d, 0), None
    d.spent.restart()
    for step in turns():
        out = attend_by_chunks(step, moves)
        behind(step, 1)  # two steps are some 650 submissions: more would fill the queue
        moves.read(2 * CHUNKS)
    torch.cuda.synchronize()
    d.spent.add(AT_LINK_RATE, moves.read())
    d.spent.stop()
    equal(T["chunk"], T["chunks"][-1])
    if out is None or not bool(torch.isfinite(out).all()):
        raise RuntimeError("attention is no number")
    return {}


WINDOWS, BLOCK = 8, 64  # layers with a window of 16,384 tokens; how many tokens come at a time


def ready_windows(d: Device) -> None:
    """Eight layers' windows of 256 MiB, three blocks of new tokens, and how many products are 0.6 of the shifts."""
    import torch

    ready(d)
    if "windows" not in T:
        made = {"device": "cuda", "dtype": torch.bfloat16}
        T["windows"] = [torch.randn(16_384, 8192, **made) for _ in range(WINDOWS)]
        T["newest"] = [torch.randn(BLOCK, 8192, **made) for _ in range(3)]
        shift_windows(0)
        product = measured(d, lambda: forward(20)) // 20
        T["window_products"] = max(int(0.6 * measured(d, lambda: shift_windows(1)) / max(product, 1)), 2)
    for step in range(4):
        shift_windows(step)
        forward(T["window_products"])
    torch.cuda.synchronize()


def shift_windows(step: int) -> None:
    """Each window loses its oldest block and has a new one at its end."""
    for window in T["windows"]:
        window[:-BLOCK].copy_(window[BLOCK:].clone())
        window[-BLOCK:].copy_(T["newest"][step % 3])


@twentyfirst(
    line=INSIDE_GPU,
    also=("gpu_starved", "unmerged_neighbours"),
    like=("small_copies", "redundant_loads", "weights_not_overlapped", "synchronisation", "allocation_on_hot_path"),
    prepare=ready_windows,
    needs_gpu=True,
)
def torch_sliding_windows_shifted_by_clone_and_copy_to_make_room_for_each_block_of_tokens(d: Device) -> Truth:
    """Each block of 64 tokens shifts eight layers' windows of 256 MiB to the front, by a clone and a copy back.

    A window is one contiguous tensor, so that is 16 copies of 255 MiB within the device in a step, on the model's
    stream. How long they take, 2 ms or so, was measured first, and the step's products were made 0.6 of it. The clones
    are of the allocator's memory, which they had before. The host is two steps ahead.
    """
    import torch

    moves, step = Stretches(d, 0), 0
    d.spent.restart()
    for step in turns():
        moves.begin()
        shift_windows(step)
        moves.end()
        forward(T["window_products"])
        behind(step)
        moves.read(3)
    torch.cuda.synchronize()
    d.spent.add(INSIDE_GPU, moves.read())
    d.spent.stop()
    equal(T["windows"][-1], T["newest"][step % 3])
    return {}


CHOICES = 12  # experts, each of which is two matrices of 32 MiB in pinned memory


def ready_choices(d: Device) -> None:
    """Twelve experts on the host, a router, and hidden states of which each chooses another expert."""
    import torch

    ready(d)
    if "experts_of_host" not in T:
        made = {"device": "cuda", "dtype": torch.bfloat16}
        T["experts_of_host"] = [[pinned(4096, 4096) for _ in range(2)] for _ in range(CHOICES)]
        T["expert_slots"] = [[torch.empty(4096, 4096, **made) for _ in range(2)] for _ in range(3)]
        T["router_of_12"] = torch.randn(4096, CHOICES, **made)
        noise = torch.randn(CHOICES, 512, 4096, **made)
        T["hidden_of_12"] = [T["router_of_12"][:, one] + noise[one] / 4 for one in range(CHOICES)]
    held = OrderedDict[int, int]()
    for step in range(4):
        decode_with_experts(step, held, Stretches(d, 0))
    torch.cuda.synchronize()


def chosen(step: int) -> Any:
    """The expert that a step's hidden states choose, on the device."""
    return (T["hidden_of_12"][step % CHOICES] @ T["router_of_12"]).float().mean(0).argmax()


def expert(step: int, slot: int) -> Any:
    """A step's hidden states through the expert that is in a slot."""
    import torch

    up, down = T["expert_slots"][slot]
    return torch.nn.functional.silu(T["hidden_of_12"][step % CHOICES] @ up) @ down


def decode_with_experts(step: int, held: OrderedDict[int, int], moves: Stretches) -> int:
    """Asks which expert is needed, brings it unless a slot has it, and computes; the slot used longest ago is taken."""
    forward(2)
    number = int(chosen(step).item())
    if number not in held:
        held[number] = held.popitem(last=False)[1] if len(held) == 2 else len(held)
        moves.begin()
        for place, home in zip(T["expert_slots"][held[number]], T["experts_of_host"][number], strict=True):
            place.copy_(home, non_blocking=True)
        moves.end()
    held.move_to_end(number)
    expert(step, held[number])
    return number


@twentyfirst(
    line=AT_LINK_RATE,
    also=(
        *("weights_not_overlapped", "link_bound", "redundant_loads", "synchronisation", "gpu_starved"),
        *("head_of_line_copies", "wasted_stores", "pageable_memory", "small_copies", "python_or_gil_bound"),  # `item`
    ),
    like=("allocation_on_hot_path", "launch_queue_saturation", "cpu_starved", "slow_tier"),
    prepare=ready_choices,
    needs_gpu=True,
)
def torch_experts_on_the_host_brought_into_an_lru_cache_of_two_when_the_router_has_chosen(d: Device) -> Truth:
    """A router's choice is read by `item()`, and the expert, 64 MiB of pinned memory, is brought unless a slot has it.

    The hidden states choose twelve experts in turn, and a cache of the two used last never has the next one: each step
    has 1.2 ms of copies, for which its expert's two products wait on the same stream. All kernels of a step take
    0.6 ms, and the word of the choice and the launches behind it 0.1 ms.
    """
    import torch

    moves, held, step, number = Stretches(d, 0), OrderedDict[int, int](), 0, 0
    d.spent.restart()
    for step in turns():
        number = decode_with_experts(step, held, moves)
        moves.read(1)
    torch.cuda.synchronize()
    d.spent.add(AT_LINK_RATE, moves.read())
    d.spent.stop()
    if number != step % CHOICES:
        raise RuntimeError("the router has chosen another expert than it should")
    equal(T["expert_slots"][held[number]][-1], T["experts_of_host"][number][-1])
    return {}


# ---- a device that waits for the host -------------------------------------------------------------------------------

OBJECTS = 96  # in a picture, each of which is found five times


def ready_boxes(d: Device) -> None:
    """Three pictures' boxes, and how long the device takes to compare one box with the others."""
    import torch

    ready(d)
    if "boxes" not in T:
        corner = torch.arange(OBJECTS, device="cuda").repeat_interleave(5) * 100.0
        boxes = torch.stack([corner, corner, corner + 40, corner + 40], 1)
        T["boxes"] = [boxes + torch.rand(5 * OBJECTS, 4, device="cuda") * 2 - 1 for _ in range(3)]
        T["of_boxes"] = [torch.rand(5 * OBJECTS, device="cuda") for _ in range(3)]
    for picture in range(3):
        suppress(picture)
    rest = torch.arange(240, device="cuda")

    def compare() -> None:
        for _ in range(20):
            T["boxes"][0][1:][rest].add(overlap(T["boxes"][0][0], T["boxes"][0][1:241])[:, None])

    T["compare_ns"] = measured(d, compare) // 20


def overlap(first: Any, rest: Any) -> Any:
    """How much of what a box and each of the others cover is covered by both."""
    import torch

    low, high = torch.maximum(first[:2], rest[:, :2]), torch.minimum(first[2:], rest[:, 2:])
    both = (high - low).clamp(min=0).prod(1)
    return both / ((first[2:] - first[:2]).prod() + (rest[:, 2:] - rest[:, :2]).prod(1) - both)


def suppress(picture: int) -> int:
    """Keeps the best box, drops those that cover the same, and goes on with the rest: how many are kept."""
    boxes = T["boxes"][picture % 3][T["of_boxes"][picture % 3].argsort(descending=True)]
    kept = list[Any]()
    while boxes.shape[0]:
        kept.append(boxes[0])
        rest = boxes[1:]
        boxes = rest[overlap(boxes[0], rest) < 0.4]
    return len(kept)


@twentyfirst(
    line=SUBMITTING,
    or_lines=(WAITING, PYTHON, ELSEWHERE),  # the thread wakes with a count, and submits a dozen small kernels
    also=("synchronisation", "gpu_starved", "python_or_gil_bound", "pageable_memory", "small_copies", "wasted_stores"),
    like=("launch_queue_saturation", "cpu_starved", "allocation_on_hot_path", "redundant_loads", "slow_tier"),
    prepare=ready_boxes,
    needs_gpu=True,
)
def torch_boxes_of_a_detector_suppressed_in_a_loop_whose_mask_asks_how_many_are_left(d: Device) -> Truth:
    """A detector's 480 boxes are thinned out in a loop: the best is kept, and `rest[overlap < 0.4]` goes on.

    A mask as an index has to know how many it leaves, so torch waits for the device in each of 96 rounds, and then
    launches a dozen kernels of 2 us, at 5 us or more each, onto a device that has nothing else. What a round takes the
    device was measured before, behind long kernels, without the mask; a third more, for the mask, is not lost either. A
    picture's network is 0.4 ms, its loop 10 ms.
    """
    import torch

    lost, kept = 0, OBJECTS
    d.spent.restart()
    for picture in turns():
        forward(2)
        torch.cuda.current_stream().synchronize()
        begin = now()
        kept = suppress(picture)
        lost += max(now() - begin - 4 * kept * T["compare_ns"] // 3, 0)
        if kept != OBJECTS:
            break
    torch.cuda.synchronize()
    d.spent.add(SUBMITTING, lost)
    d.spent.stop()
    if kept != OBJECTS:
        raise RuntimeError("other boxes are left than there are objects")
    return {}


def ready_sessions(d: Device) -> None:
    """Twenty thousand turns of sessions as objects of Python's, how long a collection takes, and products for half."""
    import torch

    ready(d)
    make_sessions()
    product = measured(d, lambda: forward(20)) // 20
    T["collected_products"] = min(max(T["collect_ns"] // 2 // product, 4), 200)
    for step in range(3):
        answer_and_collect(step, Stretches(d, 0))
    torch.cuda.synchronize()


def make_sessions() -> None:
    """What a server holds of its users; and the median of nine collections."""
    if "sessions" not in T:
        gc.collect()
        gc.freeze()  # what was imported is gone over no more
        T["sessions"] = OrderedDict(
            (number, [{"role": "user", "at": [number, turn], "meta": {"n": [turn]}} for turn in range(20)])
            for number in range(1_000)
        )
    took = list[int]()
    for _ in range(9):
        begin = now()
        gc.collect()
        took.append(now() - begin)
    T["collect_ns"] = sorted(took)[4]


def answer_and_collect(step: int, idle: Stretches) -> list[int]:
    """An answer's tokens; then what is no longer needed is collected."""
    idle.end()
    tokens = forward(T["collected_products"]).argmax(-1)[:64]
    idle.begin()
    got: list[int] = tokens.tolist()
    T["sessions"][step % 1_000][step % 20]["at"] = got[:2]
    gc.collect()
    return got


@twentyfirst(
    line=PYTHON,
    or_lines=(ELSEWHERE,),  # a recorder of calls alone sees a thread outside of CUDA
    also=("synchronisation", "gpu_starved", "python_or_gil_bound", "pageable_memory", "wasted_stores"),
    like=("small_copies", "redundant_loads", "cpu_starved", "slow_tier", "allocation_on_hot_path"),
    prepare=ready_sessions,
    needs_gpu=True,
)
def torch_garbage_collected_by_gc_collect_after_each_answer_of_a_server_with_many_sessions(d: Device) -> Truth:
    """When an answer has been read by `tolist()`, the thread calls `gc.collect()`, and then launches the next one.

    The server holds 20,000 turns of its sessions, some 80,000 objects, each of which a full collection goes over, for
    some milliseconds. How long was measured first, and an answer's products were made half of it. The answer before was
    waited for and the next is launched when all is collected, so nothing is on the device meanwhile.
    """
    import torch

    idle, got = Stretches(d, 0), list[int]()
    d.spent.restart()
    for step in turns():
        got = answer_and_collect(step, idle)
        idle.read()
    idle.end()
    torch.cuda.synchronize()
    d.spent.add(PYTHON, idle.read())
    d.spent.stop()
    if len(got) != 64:
        raise RuntimeError("an answer is not whole")
    return {}


LENGTHS, GRAPHS = 40, 8  # which requests have; how many graphs are kept
Graphs = OrderedDict[int, tuple[Any, Any]]


def ready_lengths(d: Device) -> None:
    """A network of small layers, its input, two places for products, a pool for graphs, and eight graphs."""
    import torch

    ready(d)
    if "graph_pool" not in T:
        T["scales"] = [torch.rand(1024, device="cuda") for _ in range(120)]
        T["input_of_lengths"] = torch.randn(512, 1024, device="cuda")
        T["two_places"] = [torch.empty_like(T["x"]) for _ in range(2)]
        T["lengths_made"] = torch.empty(64, device="cuda")
        T["graph_pool"] = torch.cuda.graph_pool_handle()
        T["graphs_of_length"] = Graphs()
        layers_of_length(64)
        torch.cuda.synchronize()
    for request in range(GRAPHS + 3):
        answer_of_length(request)
    torch.cuda.synchronize()


def layers_of_length(length: int) -> Any:
    """A hundred and twenty layers of three small kernels each."""
    import torch

    x = T["input_of_lengths"][:length]
    for scale in T["scales"]:
        x = torch.tanh(x * scale + x)
    return x


def graph_of(length: int) -> tuple[Any, Any]:
    """The graph of a length: captured, where it is none of those that are kept."""
    import torch

    graphs: Graphs = T["graphs_of_length"]
    if length not in graphs:
        if len(graphs) == GRAPHS:
            graphs.popitem(last=False)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=T["graph_pool"]):
            made = layers_of_length(length)
        graphs[length] = graph, made
    graphs.move_to_end(length)
    return graphs[length]


def answer_of_length(request: int) -> int:
    """Answers a request: how long it took to have its graph, in ns."""
    import torch

    one, other = T["two_places"]
    begin = now()
    graph, made = graph_of(64 + 7 * (request % LENGTHS))
    took = now() - begin
    graph.replay()
    T["lengths_made"].copy_(made[-1, :64])
    torch.mm(T["x"], T["w"], out=one)
    torch.mm(one, T["w"], out=other)
    torch.cuda.current_stream().synchronize()
    return took


@twentyfirst(
    line=SUBMITTING,
    or_lines=(PYTHON, ELSEWHERE, ALLOCATING, WAITING),  # `torch.cuda.graph` waits and empties the allocator's cache
    also=(
        *("gpu_starved", "python_or_gil_bound", "synchronisation", "allocation_on_hot_path", "context_lock_stall"),
        *("unmerged_neighbours", "blocking_server_call"),
    ),
    like=("small_copies", "pageable_memory", "launch_queue_saturation", "cpu_starved", "redundant_loads"),
    prepare=ready_lengths,
    needs_gpu=True,
)
def torch_graphs_kept_by_exact_length_so_that_nearly_every_request_has_one_captured_anew(d: Device) -> Truth:
    """A server captures a CUDA graph for each length of a request that it has none of, and keeps the last eight.

    Forty lengths take turns, so it never has the one it needs: 360 kernels are captured out of Python at 5 us or more
    each and the graph is instantiated, 3 ms or more in all, and then the request takes the device 1 ms. The request
    before was waited for, and what is captured does not run: nothing is on the device meanwhile.
    """
    import torch

    lost = 0
    d.spent.restart()
    for request in turns():
        lost += answer_of_length(request + GRAPHS + 3)
    torch.cuda.synchronize()
    d.spent.add(SUBMITTING, lost)
    d.spent.stop()
    if not bool(torch.isfinite(T["lengths_made"]).all()):
        raise RuntimeError("an answer is no number")
    return {}


MOMENTS = 320  # of a sequence


def ready_scan(d: Device) -> None:
    """Decays and inputs of three sequences' moments, and how long the device takes for one sequence."""
    import torch

    ready(d)
    if "decays" not in T:
        T["decays"] = [torch.rand(MOMENTS, 16, 1024, device="cuda") for _ in range(3)]
        T["seen_by_scan"] = [torch.randn(MOMENTS, 16, 1024, device="cuda") for _ in range(3)]
    for step in range(4):
        scan(step)
    T["scan_ns"] = measured(d, lambda: scan(0))


def scan(step: int) -> Any:
    """A recurrence over a sequence, moment by moment, and all its states."""
    import torch

    decays, seen = T["decays"][step % 3], T["seen_by_scan"][step % 3]
    state, states = seen[0], list[Any]()
    for moment in range(MOMENTS):
        state = torch.addcmul(seen[moment], decays[moment], state)
        states.append(state)
    return torch.stack(states)


@twentyfirst(
    line=SUBMITTING,
    or_lines=(PYTHON, ELSEWHERE),  # the calls are made one by one out of Python
    also=("gpu_starved", "python_or_gil_bound", "synchronisation"),
    like=("small_copies", "launch_queue_saturation", "cpu_starved", "allocation_on_hot_path", "pageable_memory"),
    prepare=ready_scan,
    needs_gpu=True,
)
def torch_a_state_space_model_whose_recurrence_goes_over_the_moments_of_a_sequence_in_python(d: Device) -> Truth:
    """A state space model without a scan of its own goes over a sequence's 320 moments by `torch.addcmul`, one by one.

    A moment is a kernel of 2 us over 16 x 1024 states, for which Python indexes two tensors and torch launches, 8 us
    or more: the device is done with one before it has the next. How long it takes for a sequence was measured before,
    behind long kernels; the rest is lost. Nobody waits for a sequence but two behind it.
    """
    import torch

    lost, step, states = 0, 0, None
    d.spent.restart()
    for step in turns():
        begin = now()
        states = scan(step)
        behind(step)
        lost += max(now() - begin - T["scan_ns"], 0)
    torch.cuda.synchronize()
    d.spent.add(SUBMITTING, lost)
    d.spent.stop()
    if states is None or not bool(torch.isfinite(states[-1]).all()):
        raise RuntimeError("a state is no number")
    return {}


# ---- healthy --------------------------------------------------------------------------------------------------------


def ready_choices_ahead(d: Device) -> None:
    """As `ready_choices`, with three slots, pinned words for choices, and events of arrivals and of last uses."""
    import torch

    ready_large(d)
    ready_choices(d)
    if "choices" not in T:
        T["choices"] = torch.zeros(8, dtype=torch.int64, pin_memory=True)
        T["arrived_of_3"], T["done_of_3"] = ([torch.cuda.Event() for _ in range(3)] for _ in range(2))
        for event in T["done_of_3"]:
            event.record()
    products = Stretches(d, 0)
    bring_expert(0, 0)
    for step in range(5):
        decode_ahead(step, products)
    torch.cuda.synchronize()


def bring_expert(step: int, number: int) -> None:
    """An expert to the slot of a step, on the side stream, when the step that had the slot is over."""
    import torch

    side, slot = T["stream"], step % 3
    with torch.cuda.stream(side):
        side.wait_event(T["done_of_3"][slot])
        for place, home in zip(T["expert_slots"][slot], T["experts_of_host"][number], strict=True):
            place.copy_(home, non_blocking=True)
        T["arrived_of_3"][slot].record(side)


def decode_ahead(step: int, products: Stretches) -> int:
    """A step, which also chooses the expert of the third step after it; then the next step's expert is asked for."""
    import torch

    compute = torch.cuda.current_stream()
    compute.wait_event(T["arrived_of_3"][step % 3])
    products.begin()
    T["choices"][step % 8].copy_(chosen(step + 3), non_blocking=True)
    expert(step, step % 3)
    large(4)
    products.end()
    T["done_of_3"][step % 3].record(compute)
    behind(step)
    number = int(T["choices"][(step - 2) % 8]) if step >= 2 else step + 1
    bring_expert(step + 1, number)
    return number


@twentyfirst(
    line=COMPUTING,
    also=("redundant_loads", "wasted_stores"),
    like=("weights_not_overlapped", "link_bound", "synchronisation", "load_not_ordered", "small_copies"),
    prepare=ready_choices_ahead,
    needs_gpu=True,
)
def torch_experts_on_the_host_brought_beside_a_step_by_the_choice_of_one_that_is_over(d: Device) -> Truth:
    """A step of 7 ms chooses the expert of the third step after it, which comes on a side stream two steps later.

    The choice is a pinned word that is read when its step is over, which the host waits for two steps ahead. The
    expert, 64 MiB or 1.2 ms of the link, goes to one of three slots, whose last step is over as well, and is there
    some 6 ms before its own step, which the step between has for its products: no kernel waits for it.
    """
    import torch

    products, step, number = Stretches(d, 0), 0, 0
    bring_expert(0, 0)
    torch.cuda.synchronize()
    d.spent.restart()
    for step in turns():
        number = decode_ahead(step, products)
        products.read(3)
    torch.cuda.current_stream().synchronize()
    d.kernel_ns += products.read()
    d.spent.stop()
    torch.cuda.synchronize()
    if number != (step + 1) % CHOICES:
        raise RuntimeError("the router has chosen another expert than it should")
    equal(T["expert_slots"][(step + 1) % 3][-1], T["experts_of_host"][number][-1])
    return {}


def ready_collected_ahead(d: Device) -> None:
    """Sessions, how long a collection takes, and large products for twice that."""
    import torch

    ready_large(d)
    make_sessions()
    product = measured(d, lambda: large(4), 10) // 4
    T["large_of_collection"] = min(max(2 * T["collect_ns"] // product + 1, 6), 100)
    products = Stretches(d, 0)
    for step in range(4):
        step_and_collect(step, products)
    torch.cuda.synchronize()


def step_and_collect(step: int, products: Stretches) -> None:
    """Launches a step, collects, and waits for the step before the last."""
    products.begin()
    large(T["large_of_collection"])
    products.end()
    T["sessions"][step % 1_000][step % 20]["at"] = [step, random.randrange(9)]
    gc.collect()
    behind(step)


@twentyfirst(
    line=COMPUTING,
    like=("python_or_gil_bound", "gpu_starved", "synchronisation", "cpu_starved", "launch_queue_saturation"),
    prepare=ready_collected_ahead,
    needs_gpu=True,
)
def torch_garbage_collected_by_gc_collect_in_each_step_while_two_steps_are_on_the_device(d: Device) -> Truth:
    """In each step the thread calls `gc.collect()`, which goes over 80,000 objects for some milliseconds.

    How long was measured first, and a step's products were made twice that. The thread collects when it has launched a
    step, and the step before is on the device as well: at the end of a collection a step or more is left.
    """
    import torch

    products = Stretches(d, 0)
    d.spent.restart()
    for step in turns():
        step_and_collect(step, products)
        products.read(3)
    torch.cuda.synchronize()
    d.kernel_ns += products.read()
    d.spent.stop()
    return {}


def ready_polled(d: Device) -> None:
    """Four pinned places for what leaves."""
    import torch

    ready_large(d)
    if "polled_homes" not in T:
        T["polled_homes"] = [pinned(4096, 8192) for _ in range(4)]
    products, leaving = Stretches(d, 0), deque[tuple[int, Any]]()
    for step in range(5):
        make_and_send(step, leaving, products)
        if len(leaving) > 2:
            poll(leaving)
    torch.cuda.synchronize()


def make_and_send(step: int, leaving: deque[tuple[int, Any]], products: Stretches) -> None:
    """A batch's embeddings, of which half leave on the side stream; its number is in their last place."""
    import torch

    products.begin()
    made = large(6)
    made[4095, -1] = step % 251
    products.end()
    side, sent = T["stream"], torch.cuda.Event()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        T["polled_homes"][step % 4].copy_(made[:4096], non_blocking=True)
        sent.record(side)
    made.record_stream(side)
    leaving.append((step, sent))


def poll(leaving: deque[tuple[int, Any]]) -> int:
    """Asks each half of a millisecond whether the oldest has left: the number that it has in its last place."""
    step, sent = leaving.popleft()
    while not sent.query():
        time.sleep(0.0005)
    return int(T["polled_homes"][step % 4][-1, -1].item())


@twentyfirst(
    line=COMPUTING,
    also=("wasted_stores",),
    like=("synchronisation", "gpu_starved", "cpu_starved", "python_or_gil_bound", "link_bound"),
    prepare=ready_polled,
    needs_gpu=True,
)
def torch_embeddings_whose_event_a_thread_asks_and_sleeps_until_they_have_left_beside_two_batches(d: Device) -> Truth:
    """A thread asks `event.query()` and sleeps for half a millisecond, again and again, until a batch has left.

    A batch's vectors are 64 MiB and leave on a side stream in 1.2 ms, when its products of 10 ms are over, beside
    those of the next batch. Two more batches were launched before the thread asks, so when it finds an event done, a
    millisecond late or so, the device has 15 ms of products left.
    """
    import torch

    products, leaving = Stretches(d, 0), deque[tuple[int, Any]]()
    wrong = 0
    d.spent.restart()
    for step in turns():
        make_and_send(step, leaving, products)
        if len(leaving) > 2:
            wrong += poll(leaving) != (step - 2) % 251
        products.read(3)
    torch.cuda.current_stream().synchronize()
    d.kernel_ns += products.read()
    d.spent.stop()
    torch.cuda.synchronize()
    if wrong:
        raise RuntimeError("other numbers have left than were made")
    return {}
