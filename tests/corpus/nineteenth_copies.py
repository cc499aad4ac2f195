"""Nineteenth programs, in torch, whose kernels wait for copies: pages, moments, features, caches, adapters, layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from accounts import Stretches, turns
from device import Device
from later_torch import T, forward, ready
from registry import AT_LINK_RATE, BELOW_LINK_RATE, DEVICE, INSIDE_GPU, NOT_NEEDED, PAGEABLE, Truth, nineteenth
from seventeenth_copies import backward, behind, equal, pinned, ready_network


def measured(d: Device, call: Callable[[], object], ahead: int = 100) -> int:
    """How long the device takes for what `call` gives it, all of which is submitted behind long kernels, in ns."""
    import torch

    took = list[int]()
    for _ in range(3):
        alone = Stretches(d, 0)
        torch.cuda.synchronize()
        forward(ahead)
        alone.begin()
        call()
        alone.end()
        torch.cuda.synchronize()
        took.append(alone.read())
    return max(min(took), 1)


PAGES, REQUESTS = 256, 4  # of a request, 256 KiB each; how many requests take turns


def ready_pages(d: Device) -> None:
    """A cache of pages on the device, and four requests with scattered pages there and a pinned home each."""
    import torch

    ready(d)
    if "pages" not in T:
        T["pages"] = torch.randn(2 * PAGES, 128 * 1024, device="cuda", dtype=torch.bfloat16)
        T["staging"] = torch.empty(PAGES, 128 * 1024, dtype=torch.bfloat16, device="cuda")
        T["tables"] = [torch.randperm(2 * PAGES)[:PAGES].to("cuda") for _ in range(REQUESTS)]
        T["first_pages"] = [int(table[0]) for table in T["tables"]]
        T["homes_of_pages"] = [pinned(PAGES, 128 * 1024) for _ in range(REQUESTS)]
    moves = Stretches(d, 0)
    for step in range(4):
        change_places(step, moves)
        forward(5)
    torch.cuda.synchronize()


def change_places(step: int, moves: Stretches) -> None:
    """The request that ran gives up its pages, and the next one has its own brought back."""
    import torch

    leaves, comes = step % REQUESTS, (step + 1) % REQUESTS
    torch.index_select(T["pages"], 0, T["tables"][leaves], out=T["staging"])
    moves.begin()
    T["homes_of_pages"][leaves].copy_(T["staging"], non_blocking=True)
    T["staging"].copy_(T["homes_of_pages"][comes], non_blocking=True)
    moves.end()
    T["pages"].index_copy_(0, T["tables"][comes], T["staging"])
    T["pages"][T["first_pages"][comes], :4096].add_(1)  # a token is written


@nineteenth(
    line=AT_LINK_RATE,
    also=("weights_not_overlapped", "link_bound", "wasted_stores", "head_of_line_copies", "gpu_starved"),
    like=("redundant_loads", "small_copies", "pageable_memory", "allocation_on_hot_path", "python_or_gil_bound"),
    prepare=ready_pages,
    needs_gpu=True,
)
def torch_pages_of_a_preempted_request_gathered_by_index_select_and_swapped_for_another_s(d: Device) -> Truth:
    """At each turn `index_select` gathers a request's 64 MiB of pages, they leave, and another request's come back.

    Both copies use one staging tensor and the model's stream, pinned memory, and take the link 1.2 ms each; the
    request's products of 1 ms stand behind its pages. Gathering and scattering take 0.1 ms. Four requests take turns
    and each writes a token, so what comes is never what is in the staging tensor. The host is two turns ahead.
    """
    import torch

    moves, step = Stretches(d, 0), 0
    d.spent.restart()
    for step in turns():
        change_places(step, moves)
        forward(5)
        behind(step)
        moves.read(3)
    torch.cuda.synchronize()
    d.spent.add(AT_LINK_RATE, moves.read())
    d.spent.stop()
    equal(T["staging"], T["homes_of_pages"][(step + 1) % REQUESTS])
    return {}


def ready_moments(d: Device) -> None:
    """Four layers with masters of float32 on the device, and two pinned moments of 64 MiB for each."""
    import torch

    ready_network(d)
    if "moments" not in T:
        T["masters"] = [layer.detach().float() for layer in T["layers_of_4"]]
        T["moments"] = [[torch.full((4096, 4096), at, pin_memory=True) for at in (0.0, 1.0)] for _ in range(4)]
    for step in range(2):
        backward(step)
        update(Stretches(d, 0))
    torch.cuda.synchronize()


def update(moves: Stretches) -> None:
    """Each layer's moments come, are brought up to date with its gradient, change it, and leave."""
    import torch

    with torch.no_grad():
        for layer, master, homes in zip(T["layers_of_4"], T["masters"], T["moments"], strict=True):
            moves.begin()
            first, second = (home.to("cuda", non_blocking=True) for home in homes)
            moves.end()
            gradient = layer.grad.float()
            first.lerp_(gradient, 0.1)
            second.lerp_(gradient.square(), 0.01)
            master.addcdiv_(first, second.sqrt().add_(1e-3), value=-1e-6)
            layer.copy_(master)
            layer.grad = None
            moves.begin()
            for home, moment in zip(homes, (first, second), strict=True):
                home.copy_(moment, non_blocking=True)
            moves.end()


@nineteenth(
    line=AT_LINK_RATE,
    also=("weights_not_overlapped", "link_bound", "wasted_stores", "head_of_line_copies", "gpu_starved"),
    like=("redundant_loads", "small_copies", "pageable_memory", "allocation_on_hot_path", "python_or_gil_bound"),
    prepare=ready_moments,
    needs_gpu=True,
)
def torch_adam_s_moments_that_come_and_leave_around_each_layer_s_update_on_the_device(d: Device) -> Truth:
    """An optimizer's two moments of 64 MiB a layer live in pinned memory, come for its update, and leave again.

    The update takes a layer 0.3 ms of kernels, its moments take the link 2.4 ms each way, and all is on one stream: a
    step of four layers has 19 ms of copies and 4 ms of kernels. Each update changes the moments, so no copy brings or
    takes what is there.
    """
    import torch

    moves, step = Stretches(d, 0), 0
    d.spent.restart()
    for step in turns():
        backward(step)
        update(moves)
        behind(step)
        moves.read(24)
    torch.cuda.synchronize()
    d.spent.add(AT_LINK_RATE, moves.read())
    d.spent.stop()
    if not all(bool(torch.isfinite(home[-1]).all()) for homes in T["moments"] for home in homes):
        raise RuntimeError("a moment is no number")
    return {}


def ready_features(d: Device) -> None:
    """Four arrays of numpy's with 64 MiB of features in double precision."""
    import numpy as np
    import torch

    ready(d)
    if "features" not in T:
        draw = np.random.default_rng(19)
        T["features"] = [draw.standard_normal((2048, 4096)) for _ in range(4)]
    for number in range(4):
        embed(number, Stretches(d, 0))
    torch.cuda.synchronize()


def embed(number: int, moves: Stretches) -> Any:
    """Sends a batch of features, makes them bfloat16 there, and computes with them."""
    import torch

    features = T["features"][number % 4]
    features[-1, -16:] = number % 97
    moves.begin()
    there = torch.from_numpy(features).to("cuda")
    moves.end()
    there.bfloat16() @ T["w"]
    forward(6)
    return there


@nineteenth(
    "pageable_memory",
    line=BELOW_LINK_RATE,
    or_lines=(PAGEABLE,),
    also=("weights_not_overlapped", "link_bound", "synchronisation", "gpu_starved", "blocking_server_call"),
    like=("redundant_loads", "small_copies", "allocation_on_hot_path", "launch_queue_saturation", "slow_tier"),
    prepare=ready_features,
    needs_gpu=True,
)
def torch_features_in_double_precision_that_from_numpy_sends_before_the_device_halves_them_twice(d: Device) -> Truth:
    """`torch.from_numpy(features).to("cuda")` sends 64 MiB of doubles from numpy's memory, of which 16 MiB are needed.

    Numpy's memory is pageable, and `to` waits: for 6 ms or more the driver takes the doubles through its own pinned
    buffers. Only then they become bfloat16 on the device and are used, in 1.5 ms of products. Four batches take turns,
    each with numbers of its own, which change.
    """
    import torch

    moves, number, there = Stretches(d, 0), 0, None
    d.spent.restart()
    for number in turns():
        there = embed(number, moves)
        moves.read()
    torch.cuda.synchronize()
    d.spent.add(BELOW_LINK_RATE, moves.read())
    d.spent.stop()
    if there is None or there[-1, -1].item() != number % 97:
        raise RuntimeError("other numbers have come than were sent")
    return {"pageable_memory": moves.ns}


def ready_static(d: Device) -> None:
    """Three requests' caches of 16 tensors of 128 MiB, and a graph with such tensors of its own as its inputs."""
    import torch

    ready(d)
    if "static" not in T:
        made = {"device": "cuda", "dtype": torch.bfloat16}
        T["caches"] = [[torch.randn(8192, 8192, **made) for _ in range(16)] for _ in range(3)]
        T["static"] = [torch.zeros(8192, 8192, **made) for _ in range(16)]
        products = measured(d, lambda: forward(20)) // 20
        copies = measured(d, lambda: (fill_static(0), empty_static(0)))
        count = max(int(0.6 * copies / products), 2)
        T["decode"] = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(T["decode"]):
            T["decoded"] = forward(count)
            for tensor in T["static"]:
                tensor[0, :1024].add_(1)  # a token's keys or values
    for step in range(3):
        fill_static(step)
        T["decode"].replay()
        empty_static(step)
    torch.cuda.synchronize()


def fill_static(step: int) -> None:
    """A request's cache goes to where the graph reads it."""
    for tensor, own in zip(T["static"], T["caches"][step % 3], strict=True):
        tensor.copy_(own)


def empty_static(step: int) -> None:
    """And back, with the new token."""
    for tensor, own in zip(T["static"], T["caches"][step % 3], strict=True):
        own.copy_(tensor)


@nineteenth(
    line=INSIDE_GPU,
    also=("gpu_starved", "unmerged_neighbours"),
    like=("small_copies", "redundant_loads", "weights_not_overlapped", "synchronisation", "allocation_on_hot_path"),
    prepare=ready_static,
    needs_gpu=True,
)
def torch_a_request_s_whole_cache_copied_into_a_graph_s_static_inputs_and_back_for_each_step(d: Device) -> Truth:
    """A graph decodes out of static tensors, so a request's cache of 2 GiB is copied there before it, and back after.

    That is 32 copies of 128 MiB within the device by `copy_`, on the model's stream. How long they take, 2 ms or so,
    was measured first, and the graph's products were made 0.6 of it. Three requests take turns, so each copy brings
    another cache than is there. The host is two steps ahead.
    """
    import torch

    moves, step = Stretches(d, 0), 0
    d.spent.restart()
    for step in turns():
        moves.begin()
        fill_static(step)
        moves.end()
        T["decode"].replay()
        moves.begin()
        empty_static(step)
        moves.end()
        behind(step)
        moves.read(6)
    torch.cuda.synchronize()
    d.spent.add(INSIDE_GPU, moves.read())
    d.spent.stop()
    equal(T["static"][-1], T["caches"][step % 3][-1])
    return {}


IN_A_ROW = 24  # requests of one client, which has one adapter


def ready_adapters(d: Device) -> None:
    """Four adapters of four pinned tensors of 16 MiB, and the tensors on the device that hold the one in use."""
    import torch

    ready(d)
    if "adapters_of_4" not in T:
        T["adapters_of_4"] = [[pinned(2048, 4096) for _ in range(4)] for _ in range(4)]
        T["adapter"] = [torch.empty(2048, 4096, dtype=torch.bfloat16, device="cuda") for _ in range(4)]
    for request in range(4):
        set_adapter(T["adapter"], request)
        adapted(T["adapter"])
        forward(2)
    torch.cuda.synchronize()


def set_adapter(places: list[Any], number: int) -> None:
    """An adapter to its places on the device, on the stream that is current."""
    for place, home in zip(places, T["adapters_of_4"][number % 4], strict=True):
        place.copy_(home, non_blocking=True)


def adapted(places: list[Any]) -> None:
    """Four products of half the size, one with each tensor of an adapter."""
    for place in places:
        T["x"] @ place.T


@nineteenth(
    "redundant_loads",
    line=NOT_NEEDED,
    also=("weights_not_overlapped", "link_bound"),
    like=("small_copies", "pageable_memory", "synchronisation", "load_not_ordered", "launch_queue_saturation"),
    prepare=ready_adapters,
    needs_gpu=True,
    blind=DEVICE,
)
def torch_an_adapter_set_for_each_request_though_the_request_before_had_the_same_one(d: Device) -> Truth:
    """`set_adapter` copies a request's adapter of 64 MiB to its place on the device, without a look at which is there.

    A client sends 24 requests in a row, all for its own adapter, so 23 of 24 copies bring what nobody has changed from
    where it came from to where it is. They take the link 1.2 ms before each request's 0.8 ms of products, on the
    model's stream.
    """
    import torch

    again, first, request = Stretches(d, 0), Stretches(d, 0), 0
    d.spent.restart()
    for request in turns():
        moves = again if request % IN_A_ROW else first
        moves.begin()
        set_adapter(T["adapter"], request // IN_A_ROW)
        moves.end()
        adapted(T["adapter"])
        forward(2)
        behind(request)
        again.read(4)
        first.read(1)
    torch.cuda.synchronize()
    d.spent.add(NOT_NEEDED, again.read())
    d.spent.add(AT_LINK_RATE, first.read())
    d.spent.stop()
    equal(T["adapter"][-1], T["adapters_of_4"][request // IN_A_ROW % 4][-1])
    return {"redundant_loads": again.ns}


def ready_offloaded(d: Device) -> None:
    """A frozen network of six layers that are in pinned memory, and a gain in front of it that is trained."""
    import torch

    ready_network(d)
    if "offloaded" not in T:
        T["offloaded"] = offloaded()
        T["gain"] = torch.nn.Parameter(torch.ones(4096, device="cuda", dtype=torch.bfloat16))
    for step in range(3):
        tune(step, Stretches(d, 0))
    torch.cuda.synchronize()


def offloaded() -> Any:
    """A product with a matrix that is brought for the forward pass, and once more for the backward pass."""
    import torch

    class Offloaded(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any, home: Any, moves: Stretches) -> Any:
            ctx.home, ctx.moves = home, moves
            return x @ brought(home, moves)

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            return gradient @ brought(ctx.home, ctx.moves).T, None, None

    return Offloaded.apply


def brought(home: Any, moves: Stretches) -> Any:
    """A layer's weights in new memory on the device."""
    moves.begin()
    there = home.to("cuda", non_blocking=True)
    moves.end()
    return there


def tune(step: int, moves: Stretches) -> None:
    """Forward and backward through all six layers."""
    x = T["batches_of_3"][step % 3] * T["gain"]
    for home in T["homes"][:6]:
        x = (T["offloaded"](x, home, moves) / 64).tanh()
    x.float().mean().backward()


@nineteenth(
    line=AT_LINK_RATE,
    also=("weights_not_overlapped", "link_bound"),
    like=("small_copies", "pageable_memory", "synchronisation", "allocation_on_hot_path", "python_or_gil_bound"),
    prepare=ready_offloaded,
    needs_gpu=True,
)
def torch_frozen_layers_that_an_autograd_function_brings_for_the_forward_and_the_backward_pass(d: Device) -> Truth:
    """An autograd function brings a frozen layer's 32 MiB for the forward pass, drops it, and brings it once more.

    A layer takes the link 0.6 ms each time, on the stream of the kernels, and its product and activation 0.3 ms: of a
    step's twelve loads none has a kernel beside it. Six layers take turns in memory of the allocator's, so what a load
    brings is not there. The host is two steps ahead.
    """
    import torch

    moves = Stretches(d, 0)
    T["gain"].grad = None
    d.spent.restart()
    for step in turns():
        tune(step, moves)
        behind(step)
        moves.read(36)
    torch.cuda.synchronize()
    d.spent.add(AT_LINK_RATE, moves.read())
    d.spent.stop()
    if T["gain"].grad is None:
        raise RuntimeError("the gain has no gradient")
    return {}
