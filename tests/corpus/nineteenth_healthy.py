"""Nineteenth programs, in torch, that are healthy: adapters, graphs, losses, requests, batches, caches, keys."""

from __future__ import annotations

import threading
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from accounts import Stretches, turns
from device import Device, now
from later_torch import T
from nineteenth_copies import adapted, ready_adapters, set_adapter
from nineteenth_host import check_keys, ready_beside, ready_written, text_of, write_keys
from registry import COMPUTING, DEVICE, NOTHING_TO_DO, Truth, in_thread, nineteenth
from seventeenth_copies import behind, equal
from seventeenth_healthy import large, ready_large


def ready_ahead(d: Device) -> None:
    """Places for two adapters, and for each an event of its arrival and one of its last use."""
    import torch

    ready_large(d)
    ready_adapters(d)
    if "slots_of_2" not in T:
        T["slots_of_2"] = [T["adapter"], [torch.empty_like(place) for place in T["adapter"]]]
        T["arrived_of_2"], T["used_of_2"] = ([torch.cuda.Event() for _ in range(2)] for _ in range(2))
    products = Stretches(d, 0)
    ask_for_adapter(0)
    for request in range(4):
        serve_adapted(request, products)
    torch.cuda.synchronize()


def ask_for_adapter(request: int) -> None:
    """A request's adapter to the slot that the request before the last has had, on the side stream."""
    import torch

    with torch.cuda.stream(T["stream"]):
        if request >= 2:
            T["stream"].wait_event(T["used_of_2"][request % 2])
        set_adapter(T["slots_of_2"][request % 2], request)
        T["arrived_of_2"][request % 2].record(T["stream"])


def serve_adapted(request: int, products: Stretches) -> None:
    """Computes with a request's adapter and asks for the next one's."""
    import torch

    compute = torch.cuda.current_stream()
    compute.wait_event(T["arrived_of_2"][request % 2])
    products.begin()
    adapted(T["slots_of_2"][request % 2])
    large(4)
    products.end()
    T["used_of_2"][request % 2].record(compute)
    ask_for_adapter(request + 1)
    behind(request)


@nineteenth(
    line=COMPUTING,
    like=("redundant_loads", "weights_not_overlapped", "link_bound", "load_not_ordered", "small_copies"),
    prepare=ready_ahead,
    needs_gpu=True,
)
def torch_the_next_request_s_adapter_set_on_a_side_stream_in_the_slot_that_is_not_in_use(d: Device) -> Truth:
    """Each request has another adapter, whose 64 MiB come on a side stream while the request before computes for 7 ms.

    There are two slots; the copies, 1.2 ms of the link, wait for the request that had the slot before, which is over
    when they are asked for or soon after, and are there 5 ms before their own request. The host is two requests ahead.
    Four adapters take turns, so each load is needed.
    """
    import torch

    products, request = Stretches(d, 0), 0
    ask_for_adapter(0)
    torch.cuda.synchronize()
    d.spent.restart()
    for request in turns():
        serve_adapted(request, products)
        products.read(3)
    torch.cuda.current_stream().synchronize()
    d.kernel_ns += products.read()
    d.spent.stop()
    torch.cuda.synchronize()
    for last in (request, request + 1):
        equal(T["slots_of_2"][last % 2][-1], T["adapters_of_4"][last % 4][-1])
    return {}


def ready_long(d: Device) -> None:
    """A graph of some 60 ms of products."""
    import torch

    ready_large(d)
    ready_beside(d)
    if "long" not in T:
        alone = Stretches(d, 0)
        alone.begin()
        large(8)
        alone.end()
        torch.cuda.synchronize()
        count = min(max(60_000_000 * 8 // max(alone.read(), 1), 8), 80)
        T["long"] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(T["long"]):
            T["long_made"] = large(count)
    T["long"].replay()
    torch.cuda.synchronize()


@nineteenth(
    line=COMPUTING,
    like=("python_or_gil_bound", "gpu_starved", "synchronisation", "cpu_starved", "launch_queue_saturation"),
    prepare=ready_long,
    needs_gpu=True,
)
def torch_a_graph_of_60_ms_replayed_two_ahead_beside_a_thread_that_always_has_the_interpreter(d: Device) -> Truth:
    """Another thread detokenizes in pure Python without a pause, and this one replays a graph of 60 ms for each step.

    Each time that this thread gives the interpreter's lock back it waits 5 ms for it, some five times in a step. But
    all of a step is in its graph, which was measured before and has products for 60 ms, and the host is two steps
    ahead: the device always has the next graph when one ends. The other thread begins behind the first replay.
    """
    import torch

    over, lengths, products, threads = threading.Event(), list[int](), Stretches(d, 0), list[threading.Thread]()

    def detokenize() -> None:
        while not over.is_set():
            lengths.append(len(text_of(len(lengths), 2_000)))

    d.spent.restart()
    try:
        for step in turns():
            products.begin()
            T["long"].replay()
            products.end()
            if not threads:
                threads.append(in_thread(detokenize))
            behind(step)
            products.read(3)
    finally:
        over.set()
    torch.cuda.synchronize()
    d.kernel_ns += products.read()
    d.spent.stop()
    threads[0].join()
    if not lengths:
        raise RuntimeError("nothing was detokenized")
    return {}


def ready_losses(d: Device) -> None:
    import torch

    ready_large(d)
    held, products = deque[tuple[Any, Any]](), Stretches(d, 0)
    for _ in range(4):
        learn(held, products)
        if len(held) > 1:
            loss_beside(held)
    torch.cuda.synchronize()


def learn(held: deque[tuple[Any, Any]], products: Stretches) -> None:
    """A step, whose loss is held with an event of it."""
    import torch

    products.begin()
    loss = large(4)[0].float().square().mean()
    products.end()
    made = torch.cuda.Event()
    made.record()
    held.append((loss, made))


def loss_beside(held: deque[tuple[Any, Any]]) -> float:
    """The oldest loss that is held, read on the side stream."""
    import torch

    loss, made = held.popleft()
    with torch.cuda.stream(T["stream"]):
        T["stream"].wait_event(made)
        return float(loss.item())


@nineteenth(
    line=COMPUTING,
    like=("synchronisation", "gpu_starved", "pageable_memory", "small_copies", "python_or_gil_bound"),
    also=("wasted_stores",),
    prepare=ready_losses,
    needs_gpu=True,
)
def torch_each_step_s_loss_read_by_item_on_a_side_stream_while_the_next_step_computes(d: Device) -> Truth:
    """Each step of 6.4 ms has its loss read by `item()`, on a side stream that waits for this step and no other.

    The next step was launched before, on the model's stream: the thread stands in `item` for nearly all of the time,
    and when it has the loss the device has 6 ms of products left, in which the thread launches one more step in 0.1 ms.
    """
    import torch

    products, held, losses = Stretches(d, 0), deque[tuple[Any, Any]](), list[float]()
    d.spent.restart()
    for _ in turns():
        learn(held, products)
        if len(held) > 1:
            losses.append(loss_beside(held))
        products.read(2)
    torch.cuda.synchronize()
    d.kernel_ns += products.read()
    d.spent.stop()
    if not all(0 < loss < 1e6 for loss in losses):
        raise RuntimeError("a loss is no loss")
    return {}


def ready_clerk(d: Device) -> None:
    """A thread of an executor that computes for whoever asks, and has done so."""
    import torch

    ready_large(d)
    T.setdefault("clerk", ThreadPoolExecutor(1))
    for _ in range(3):
        T["clerk"].submit(answer, Stretches(d, 0)).result()
    torch.cuda.synchronize()


def answer(products: Stretches) -> list[float]:
    """An answer, in the executor's thread: 6.4 ms of products, and their numbers."""
    products.begin()
    made = large(4)
    products.end()
    got: list[float] = made[0, :64].tolist()
    products.read()
    return got


@nineteenth(
    line=NOTHING_TO_DO,
    like=("gpu_starved", "synchronisation", "python_or_gil_bound", "pageable_memory", "cpu_starved"),
    also=("wasted_stores",),
    prepare=ready_clerk,
    needs_gpu=True,
    undecided_in=DEVICE,  # their recordings hold CUDA's calls alone
)
def torch_bursts_of_three_requests_for_a_thread_of_an_executor_that_waits_for_work_between(d: Device) -> Truth:
    """Each 130 ms somebody submits three requests to a `ThreadPoolExecutor`, whose one thread answers them in a row.

    An answer is 6.4 ms of products, whose numbers are read by `tolist()`; then the next one is launched at once. When
    three are answered nobody has asked for more, and the thread waits in its executor for work, for 110 ms and more
    each time. All that is known of the time between is that there was nothing to do.
    """
    products = Stretches(d, 0)
    d.spent.restart()
    for _ in range(11):
        with d.spent.on(NOTHING_TO_DO):
            time.sleep(0.115)
        asked = [T["clerk"].submit(answer, products) for _ in range(3)]
        if any(len(one.result(10)) != 64 for one in asked):
            raise RuntimeError("an answer is not whole")
    d.kernel_ns += products.ns
    d.spent.stop()
    return {}


def ready_plain(d: Device) -> None:
    """Three batches of 32 MiB in plain memory, places for them, a thread that brings them, and how long it takes."""
    import torch

    ready_large(d)
    if "plain" not in T:
        T["plain"] = [torch.randn(4096, 4096, device="cuda").to("cpu", torch.bfloat16) for _ in range(3)]
        T["places"] = [torch.zeros_like(T["w"]) for _ in range(3)]
        T["came_of_3"], T["used_of_3"] = ([torch.cuda.Event() for _ in range(3)] for _ in range(2))
        T["porter"] = ThreadPoolExecutor(1)
    took = list[int]()
    for number in range(6):
        begin = now()
        T["porter"].submit(bring, number).result()
        took.append(now() - begin)
        T["x"] @ T["places"][number % 3]
        T["used_of_3"][number % 3].record()
        torch.cuda.synchronize()
    alone = Stretches(d, 0)
    alone.begin()
    large(8)
    alone.end()
    torch.cuda.synchronize()
    T["large_of_batch"] = min(max(3 * sorted(took)[3] * 8 // max(alone.read(), 1) + 1, 6), 40)


def bring(number: int) -> None:
    """In the porter's thread: a batch to its place, when whatever used the place is over."""
    import torch

    T["used_of_3"][number % 3].synchronize()
    batch = T["plain"][number % 3]
    batch[0, :64] = number % 251
    with torch.cuda.stream(T["stream"]):
        T["places"][number % 3].copy_(batch)
        T["came_of_3"][number % 3].record(T["stream"])


@nineteenth(
    line=COMPUTING,
    like=("pageable_memory", "weights_not_overlapped", "gpu_starved", "synchronisation", "load_not_ordered"),
    prepare=ready_plain,
    needs_gpu=True,
)
def torch_batches_that_a_thread_brings_out_of_plain_memory_two_ahead_of_long_products(d: Device) -> Truth:
    """A thread of its own stands in `copy_` for each batch, 32 MiB of plain memory, two batches ahead of the products.

    How long such a copy takes, some 4 ms, was measured first, and a batch has products for three times that or more.
    It goes on a side stream to one of three places, when the thread has waited for the batch that used it. The thread
    that launches is two batches ahead as well, and finds each copy done.
    """
    import torch

    compute, products, batch = torch.cuda.current_stream(), Stretches(d, 0), 0
    coming: deque[Future[None]] = deque(T["porter"].submit(bring, number) for number in range(2))
    for one in coming:
        one.result()
    d.spent.restart()
    for batch in turns():
        coming.popleft().result()
        compute.wait_event(T["came_of_3"][batch % 3])
        products.begin()
        T["x"] @ T["places"][batch % 3]
        large(T["large_of_batch"])
        products.end()
        T["used_of_3"][batch % 3].record(compute)
        coming.append(T["porter"].submit(bring, batch + 2))
        behind(batch)
        products.read(3)
    compute.synchronize()
    d.kernel_ns += products.read()
    d.spent.stop()
    for one in coming:
        one.result()
    torch.cuda.synchronize()
    if any(T["places"][last % 3][0, 63].item() != last % 251 for last in (batch, batch + 1, batch + 2)):
        raise RuntimeError("other numbers have come than were sent")
    return {}


def ready_pair(d: Device) -> None:
    """Three requests' caches of eight tensors of 128 MiB, and two graphs with such tensors of their own as inputs."""
    import torch

    ready_large(d)
    if "pair" not in T:
        made = {"device": "cuda", "dtype": torch.bfloat16}
        T["caches_of_pair"] = [[torch.randn(8192, 8192, **made) for _ in range(8)] for _ in range(3)]
        T["inputs_of_pair"] = [[torch.zeros(8192, 8192, **made) for _ in range(8)] for _ in range(2)]
        T["pair"] = [torch.cuda.CUDAGraph() for _ in range(2)]
        T["filled_of_pair"], T["read_of_pair"] = ([torch.cuda.Event() for _ in range(2)] for _ in range(2))
        for inputs, graph in zip(T["inputs_of_pair"], T["pair"], strict=True):
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                x = T["large_x"]
                for tensor in inputs[:5]:
                    x = (x @ tensor).mul_(1 / 90.5)
    products = Stretches(d, 0)
    fill_pair(0)
    for step in range(4):
        step_of_pair(step, products)
    torch.cuda.synchronize()


def fill_pair(step: int) -> None:
    """The cache of a step's request to the inputs of its graph, on the side stream."""
    import torch

    with torch.cuda.stream(T["stream"]):
        if step >= 2:
            T["stream"].wait_event(T["read_of_pair"][step % 2])
        for tensor, own in zip(T["inputs_of_pair"][step % 2], T["caches_of_pair"][step % 3], strict=True):
            tensor.copy_(own)
        T["filled_of_pair"][step % 2].record(T["stream"])


def step_of_pair(step: int, products: Stretches) -> None:
    """A step's graph, and beside it the inputs of the next one's."""
    import torch

    compute = torch.cuda.current_stream()
    compute.wait_event(T["filled_of_pair"][step % 2])
    products.begin()
    T["pair"][step % 2].replay()
    products.end()
    T["read_of_pair"][step % 2].record(compute)
    fill_pair(step + 1)
    behind(step)


@nineteenth(
    line=COMPUTING,
    like=("redundant_loads", "weights_not_overlapped", "synchronisation", "small_copies", "launch_queue_saturation"),
    prepare=ready_pair,
    needs_gpu=True,
)
def torch_two_graphs_in_turn_one_s_static_inputs_filled_within_the_device_while_the_other_runs(d: Device) -> Truth:
    """While a graph of 8 ms decodes for a request, the next one's cache of 1 GiB is copied to the other graph's inputs.

    The eight copies within the device stand on a side stream and take 0.6 ms, or a few times that beside the products,
    so a graph's inputs are there long before its turn. They wait for the graph that has read them last, which is over
    when the one beside them begins. The host is two steps ahead.
    """
    import torch

    products, step = Stretches(d, 0), 0
    fill_pair(0)
    torch.cuda.synchronize()
    d.spent.restart()
    for step in turns():
        step_of_pair(step, products)
        products.read(3)
    torch.cuda.current_stream().synchronize()
    d.kernel_ns += products.read()
    d.spent.stop()
    torch.cuda.synchronize()
    for last in (step, step + 1):
        equal(T["inputs_of_pair"][last % 2][-1], T["caches_of_pair"][last % 3][-1])
    return {}


def ready_written_ahead(d: Device) -> None:
    ready_large(d)
    ready_written(d)


@nineteenth(
    line=COMPUTING,
    like=("launch_queue_saturation", "gpu_starved", "python_or_gil_bound", "small_copies", "cpu_starved"),
    also=("unmerged_neighbours",),
    prepare=ready_written_ahead,
    needs_gpu=True,
)
def torch_keys_written_by_an_assignment_each_while_the_device_has_13_ms_of_products_left(d: Device) -> Truth:
    """A step is 13 ms of products and 128 assignments `cache[sequence, :, position] = key`, launched one by one.

    To launch them takes Python 1.5 ms or so, in which the device computes the step before: the host is two steps ahead.
    So when the device comes to them they stand in its queue, and take it 2 us each, one behind the other.
    """
    import torch

    products, step, keys = Stretches(d, 0), 0, None
    d.spent.restart()
    for step in turns():
        products.begin()
        large(8)
        keys = write_keys(step, 2)
        products.end()
        behind(step)
        products.read(3)
    torch.cuda.synchronize()
    d.kernel_ns += products.read()
    d.spent.stop()
    check_keys(step, 1, keys)
    return {}
