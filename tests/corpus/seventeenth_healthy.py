"""Seventeenth programs, in torch, that are healthy: keys, gradients, timings, samples, fields, frames, models."""

from __future__ import annotations

import json
import queue
import threading
import time
from collections import deque
from typing import Any

from accounts import Stretches, turns
from device import Device
from later_torch import T, ready
from registry import COMPUTING, DEVICE, NOTHING_TO_DO, Truth, in_thread, seventeenth
from seventeenth_copies import FIELDS, behind, equal, pinned, ready_fields
from seventeenth_host import endless, ready_loader, rows


def ready_large(d: Device) -> None:
    """What products of 8192 x 8192 x 8192 need, 1.6 ms each on an H200: few calls for much work."""
    import torch

    ready(d)
    if "large" not in T:
        T["large"] = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) / 90.5
        T["large_x"] = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    for _ in range(2):
        large(3)[0, :64].tolist()


def large(times: int) -> Any:
    """So many products, one after another."""
    x = T["large_x"]
    for _ in range(times):
        x = x @ T["large"]
    return x


def ready_keys(d: Device) -> None:
    import torch

    ready(d)
    if "keys" not in T:
        T["keys"] = [pinned(2, 4096, 8192) for _ in range(3)]
        T["there"] = [torch.cuda.Event() for _ in range(8)]
    products = Stretches(d, 0)
    ask_for_keys(0)
    for layer in range(8):
        attend(layer, products)
    torch.cuda.synchronize()
    del T["ahead"]


def ask_for_keys(layer: int) -> None:
    """A layer's keys and values to new memory of the side stream's."""
    import torch

    with torch.cuda.stream(T["stream"]):
        T["ahead"] = T["keys"][layer % 3].to("cuda", non_blocking=True)
        T["there"][layer % 8].record(T["stream"])


def attend(layer: int, products: Stretches) -> Any:
    """Asks for the next layer's keys and values, and computes with those that were asked for before."""
    import torch

    compute, both = torch.cuda.current_stream(), T["ahead"]
    ask_for_keys(layer + 1)
    compute.wait_event(T["there"][layer % 8])
    products.begin()
    for turn in range(16):
        T["x"] @ both[turn % 2]
    products.end()
    both.record_stream(compute)
    behind(layer)
    return both


@seventeenth(
    line=COMPUTING,
    like=("weights_not_overlapped", "link_bound", "allocation_on_hot_path", "load_not_ordered", "redundant_loads"),
    prepare=ready_keys,
    needs_gpu=True,
)
def torch_keys_and_values_of_the_next_layer_brought_by_to_into_memory_of_a_side_stream(d: Device) -> Truth:
    """While a layer attends for 6.4 ms, the next one's 128 MiB of keys and values come by `to` on a side stream.

    They take the link 2.4 ms and are there 4 ms before anybody waits for them. Each time they have new memory of the
    allocator's, which `record_stream` keeps until the layer is over; the pieces were made before the program began.
    Three layers take turns, so each load is needed.
    """
    import torch

    products, layer, both = Stretches(d, 0), 0, None
    ask_for_keys(0)
    torch.cuda.synchronize()
    d.spent.restart()
    for layer in turns():
        both = attend(layer, products)
        products.read(4)
    torch.cuda.synchronize()
    d.kernel_ns += products.read()
    d.spent.stop()
    equal(both, T["keys"][layer % 3])
    del T["ahead"]
    return {}


def ready_tall(d: Device) -> None:
    """Three layers that get 16,384 rows at once, and pinned places for their gradients."""
    import torch

    ready(d)
    if "tall" not in T:
        T["tall"] = [torch.nn.Parameter(T["w"].clone()) for _ in range(3)]
        T["batches_of_tall"] = [torch.randn(16_384, 4096, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
        T["homes_of_tall"] = [pinned(4096, 4096) for _ in range(3)]
    handles = hooked()
    for step in range(4):
        train_tall(step, Stretches(d, 0))
        behind(step)
    torch.cuda.synchronize()
    for handle in handles:
        handle.remove()


def hooked() -> list[Any]:
    """Has each layer's gradient leave on the side stream as soon as it is there."""
    import torch

    handles = list[Any]()
    for layer, home in zip(T["tall"], T["homes_of_tall"], strict=True):

        def leave(one: Any, home: Any = home) -> None:
            side, gradient = T["stream"], one.grad
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                home.copy_(gradient, non_blocking=True)
            gradient.record_stream(side)
            one.grad = None

        handles.append(layer.register_post_accumulate_grad_hook(leave))
    return handles


def train_tall(step: int, products: Stretches) -> None:
    """Forward and backward over the three layers, some 7 ms."""
    import torch

    products.begin()
    x = T["batches_of_tall"][step % 3]
    for layer in T["tall"]:
        x = torch.relu(x @ layer)
    x.float().mean().backward()
    products.end()


@seventeenth(
    line=COMPUTING,
    also=("wasted_stores",),
    like=("weights_not_overlapped", "link_bound", "store_not_ordered", "gpu_starved", "synchronisation"),
    prepare=ready_tall,
    needs_gpu=True,
)
def torch_gradients_that_a_hook_sends_to_the_host_beside_the_rest_of_the_backward_pass(d: Device) -> Truth:
    """A hook sends each of three gradients of 32 MiB to pinned memory on a side stream, and the backward pass goes on.

    The side stream waits for the gradient, and no kernel waits for the side stream: a layer's part of the backward pass
    takes 1.6 ms, of which the copy is 0.6 ms of the link, and the last copy is beside the next step's forward pass. The
    host is two steps of 7 ms ahead. Three batches take turns, so that each gradient is new.
    """
    import torch

    products, handles = Stretches(d, 0), hooked()
    d.spent.restart()
    for step in turns():
        train_tall(step, products)
        behind(step)
        products.read(3)
    torch.cuda.synchronize()
    d.kernel_ns += products.read()
    d.spent.stop()
    for handle in handles:
        handle.remove()
    if any(layer.grad is not None for layer in T["tall"]):
        raise RuntimeError("a gradient has stayed on the device")
    return {}


@seventeenth(
    line=COMPUTING,
    like=("synchronisation", "gpu_starved", "python_or_gil_bound", "launch_queue_saturation", "cpu_starved"),
    prepare=ready_large,
    needs_gpu=True,
)
def torch_layers_timed_by_synchronize_before_and_after_each_and_logged_as_json(d: Device) -> Truth:
    """A layer of 13 ms stands between two calls of `torch.cuda.synchronize()`, as its time is logged in JSON.

    The thread waits for the whole device twice a layer, but all that the device lacks between two layers is the time to
    wake up, to write a line of some 60 characters and to launch a product, some 0.06 ms of each 13 ms.
    """
    import torch

    products, log = Stretches(d, 0), list[str]()
    d.spent.restart()
    for layer in turns():
        torch.cuda.synchronize()
        begin = time.perf_counter()
        products.begin()
        large(8)
        products.end()
        torch.cuda.synchronize()
        products.read()
        log.append(json.dumps({"layer": layer, "ms": round(1_000 * (time.perf_counter() - begin), 3)}))
    d.spent.stop()
    d.kernel_ns += products.ns
    if json.loads(log[-1])["layer"] != len(log) - 1:
        raise RuntimeError("a layer was not logged")
    return {}


def ready_feeder(d: Device) -> None:
    import torch

    ready_large(d)
    ready_loader(d)
    held = [batch.pin_memory() for _, batch in zip(range(12), endless(), strict=False)]
    for batch in held:
        rows(batch.to("cuda", non_blocking=True))
    torch.cuda.synchronize()


@seventeenth(
    line=COMPUTING,
    like=("python_or_gil_bound", "gpu_starved", "pageable_memory", "synchronisation", "cpu_starved"),
    prepare=ready_feeder,
    needs_gpu=True,
)
def torch_a_data_loader_that_a_thread_goes_over_four_batches_ahead(d: Device) -> Truth:
    """A thread takes batches from a `DataLoader` without workers, pins them and puts them into a queue of four.

    To make one takes Python 2 ms or more with the interpreter's lock, and a step is 16 ms of products in eleven calls.
    So the queue is full but for the thread's 2 ms, and the host launches two steps ahead of the device.
    """
    import torch

    ahead: queue.Queue[Any] = queue.Queue(4)
    over, products = threading.Event(), Stretches(d, 0)

    def feed() -> None:
        for batch in endless():
            held = batch.pin_memory()
            while not over.is_set() and ahead.full():
                time.sleep(0.001)
            if over.is_set():
                return
            ahead.put(held)

    thread = in_thread(feed)
    while not ahead.full() and thread.is_alive():
        time.sleep(0.002)
    d.spent.restart()
    for step in turns():
        ids = ahead.get(timeout=5).to("cuda", non_blocking=True)
        products.begin()
        rows(ids)
        large(10)
        products.end()
        behind(step)
        products.read(3)
    torch.cuda.synchronize()
    d.kernel_ns += products.read()
    d.spent.stop()
    over.set()
    thread.join()
    return {}


@seventeenth(
    line=COMPUTING,
    like=("small_copies", "weights_not_overlapped", "redundant_loads", "load_not_ordered", "launch_queue_saturation"),
    also=("unmerged_neighbours",),
    prepare=lambda d: (ready_fields(d), ready_large(d))[1],
    needs_gpu=True,
)
def torch_fields_of_the_next_batch_that_a_cuda_graph_copies_one_by_one_beside_this_one(d: Device) -> Truth:
    """While a batch computes for 10 ms, a CUDA graph on a side stream copies the next one's 400 fields of 4 KiB.

    The copies take 1 ms or less, and are done 8 ms before the next batch waits for them; they wait for nothing that is
    not over. There are four sets of fields and of places, and the CPU adds one to all fields of a set before its graph.
    """
    import torch

    compute, side = torch.cuda.current_stream(), T["stream"]
    products, copied = Stretches(d, 0), [torch.cuda.Event() for _ in range(4)]
    used, batch = [torch.cuda.Event() for _ in range(4)], 0

    def ask(number: int) -> None:
        T["fields"][number % 4].add_(1)
        if number >= 4:
            side.wait_event(used[number % 4])
        with torch.cuda.stream(side):
            T["graphs"][number % 4].replay()
            copied[number % 4].record(side)

    ask(0)
    torch.cuda.synchronize()
    d.spent.restart()
    for batch in turns():
        compute.wait_event(copied[batch % 4])
        products.begin()
        T["landed"][batch % 4].sum()
        large(6)
        products.end()
        used[batch % 4].record(compute)
        ask(batch + 1)
        behind(batch)
        products.read(3)
    compute.synchronize()
    d.kernel_ns += products.read()
    d.spent.stop()
    torch.cuda.synchronize()
    for last in (batch, batch + 1):
        equal(T["landed"][last % 4][FIELDS - 1, :1024], T["fields"][last % 4][FIELDS - 1])
    return {}


@seventeenth(
    line=NOTHING_TO_DO,
    like=("gpu_starved", "synchronisation", "python_or_gil_bound", "pageable_memory", "cpu_starved"),
    also=("wasted_stores",),
    prepare=ready_large,
    needs_gpu=True,
    undecided_in=DEVICE,  # their recordings hold CUDA's calls alone
)
def torch_a_server_that_asks_its_queue_with_a_timeout_and_finds_it_empty(d: Device) -> Truth:
    """A request comes each 65 ms, and the thread that serves asks `queue.get(timeout=0.02)` until there is one.

    It is 6.4 ms of products, whose tokens are read by `tolist()`, and is answered 58 ms before the next one comes. For
    nine tenths of the time nobody has asked for anything: two of three calls of `get` end with `queue.Empty`.
    """
    asked: queue.Queue[int] = queue.Queue()
    count, done, empty, products = 23, 0, 0, Stretches(d, 0)

    def ask() -> None:
        for number in range(count):
            time.sleep(0.065)
            asked.put(number)

    def next_request() -> int:
        nonlocal empty
        while True:
            try:
                return asked.get(timeout=0.02)
            except queue.Empty:
                empty += 1

    d.spent.restart()
    thread = in_thread(ask)
    while done < count:
        with d.spent.on(NOTHING_TO_DO):
            number = next_request()
        if number != done:
            raise RuntimeError("a request came out of its turn")
        products.begin()
        made = large(4)
        products.end()
        made[0, :64].tolist()
        products.read()
        done += 1
    d.kernel_ns += products.ns
    d.spent.stop()
    thread.join()
    if empty < count:
        raise RuntimeError("the queue was not found empty")
    return {}


def ready_sent(d: Device) -> None:
    import torch

    ready_large(d)
    held: deque[tuple[Any, Any]] = deque()
    for step in range(10):
        sent(step, held, Stretches(d, 0))
        behind(step)
        if len(held) > 3:
            held.popleft()
    torch.cuda.synchronize()


def sent(step: int, held: deque[tuple[Any, Any]], products: Stretches) -> Any:
    """Makes a frame, which leaves on the side stream; what has come to the host, and the event of it, are held."""
    import torch

    side = T["stream"]
    products.begin()
    frame = large(4)
    products.end()
    side.wait_stream(torch.cuda.current_stream())
    gone = torch.cuda.Event()
    with torch.cuda.stream(side):
        home = frame.to("cpu", non_blocking=True)
        gone.record(side)
    frame.record_stream(side)
    held.append((gone, home))
    return frame


@seventeenth(
    line=COMPUTING,
    like=("weights_not_overlapped", "link_bound", "allocation_on_hot_path", "pageable_memory", "store_not_ordered"),
    also=("wasted_stores",),
    prepare=ready_sent,
    needs_gpu=True,
)
def torch_frames_of_128_mib_sent_by_to_cpu_on_a_side_stream_while_the_next_is_made(d: Device) -> Truth:
    """A frame of 128 MiB is made in 6.4 ms and leaves by `to("cpu", non_blocking=True)` beside the next one's kernels.

    The side stream waits for the frame, takes the link 2.4 ms, and nobody's kernels wait for it: the next frame has
    other memory. The host looks at a frame when it is three behind. What pinned and what device memory that takes was
    made before the program began.
    """
    import torch

    products, held, seen, frame = Stretches(d, 0), deque[tuple[Any, Any]](), 0.0, None
    d.spent.restart()
    for step in turns():
        frame = sent(step, held, products)
        behind(step)
        if len(held) > 3:
            gone, home = held.popleft()
            gone.synchronize()
            seen += float(home[0, 0])
        products.read(3)
    torch.cuda.current_stream().synchronize()
    d.kernel_ns += products.read()
    d.spent.stop()
    torch.cuda.synchronize()
    equal(held[-1][1], frame)
    return {}
