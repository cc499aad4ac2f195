"""Seventeenth programs, in torch, whose kernels wait for copies: activations, layers, caches, fields, frames."""

from __future__ import annotations

import copy
from collections import deque
from typing import Any

from accounts import Stretches, turns
from device import Device
from later_torch import T, forward, ready
from registry import AT_LINK_RATE, BELOW_LINK_RATE, DEVICE, INSIDE_GPU, NOT_NEEDED, Truth, seventeenth


def pinned(*shape: int) -> Any:
    """A pinned tensor of bfloat16 whose numbers are the device's random ones."""
    import torch

    made = torch.empty(shape, dtype=torch.bfloat16, pin_memory=True)
    made.copy_(torch.randn(shape, device="cuda", dtype=torch.bfloat16))
    return made


def behind(step: int, lag: int = 2) -> None:
    """Ends a step on the current stream and waits for the one `lag` before it."""
    T["events"][step % 8].record()
    if step >= lag:
        T["events"][(step - lag) % 8].synchronize()


def equal(one: Any, other: Any) -> None:
    """Raises unless the last numbers of two tensors are the same."""
    if one.flatten()[-16:].tolist() != other.flatten()[-16:].tolist():
        raise RuntimeError("other numbers have come than were sent")


def ready_network(d: Device) -> None:
    """Four layers, three batches on the device, and pinned places for eight activations or four gradients."""
    import torch

    ready(d)
    if "layers_of_4" not in T:
        T["layers_of_4"] = [torch.nn.Parameter(T["w"].clone()) for _ in range(4)]
        T["batches_of_3"] = [torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
        T["homes"] = [pinned(4096, 4096) for _ in range(8)]
    torch.cuda.synchronize()


def ready_activations(d: Device) -> None:
    import torch

    ready_network(d)
    for step in range(3):
        train_with_activations_away(step, Stretches(d, 0))
    torch.cuda.synchronize()


def train_with_activations_away(step: int, moves: Stretches) -> float:
    """Forward and backward over four layers; what autograd saves lies in pinned memory meanwhile."""
    import torch

    own, taken = {one.data_ptr() for one in T["layers_of_4"]}, iter(T["homes"])

    def pack(saved: Any) -> Any:
        if saved.data_ptr() in own or saved.numel() < 4096 * 4096:
            return saved
        home = next(taken)
        moves.begin()
        home.copy_(saved.detach(), non_blocking=True)
        moves.end()
        return home

    def unpack(held: Any) -> Any:
        if held.is_cuda:
            return held
        moves.begin()
        there = held.to("cuda", non_blocking=True)
        moves.end()
        return there

    x = T["batches_of_3"][step % 3]
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        for layer in T["layers_of_4"]:
            x = torch.nn.functional.silu(x @ layer)
    loss = x.float().mean()
    loss.backward()
    for layer in T["layers_of_4"]:
        layer.grad = None
    return float(loss.item())


@seventeenth(
    line=AT_LINK_RATE,
    also=("weights_not_overlapped", "link_bound", "synchronisation", "wasted_stores", "gpu_starved"),
    like=("redundant_loads", "small_copies", "pageable_memory", "allocation_on_hot_path", "python_or_gil_bound"),
    prepare=ready_activations,
    needs_gpu=True,
)
def torch_activations_that_hooks_of_autograd_keep_on_the_host_by_the_trainer_s_own_stream(d: Device) -> Truth:
    """Hooks for saved tensors send eight activations of 32 MiB to pinned memory and bring them back for the backward.

    All 16 copies stand on the stream of the kernels, 0.6 ms of the link each, so no kernel runs for 9.6 ms of a step,
    whose products take 3 ms or less. Three batches take turns, so each activation is another than the step before had.
    """
    moves, losses = Stretches(d, 0), 0.0
    d.spent.restart()
    for step in turns():
        losses += train_with_activations_away(step, moves)
        moves.read()
    d.spent.add(AT_LINK_RATE, moves.ns)
    d.spent.stop()
    return {}


def ready_wide(d: Device) -> None:
    import torch

    ready(d)
    if "wide_homes" not in T:
        T["wide_homes"] = [pinned(4096, 8192) for _ in range(3)]
        T["wide"] = [torch.empty(4096, 8192, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    moves = Stretches(d, T["stream"].cuda_stream)
    for layer in range(4):
        fetch_wide(layer, moves)
        T["x"] @ T["wide"][layer % 2]
    torch.cuda.synchronize()


def fetch_wide(layer: int, moves: Stretches) -> None:
    """A layer to one of two places by the side stream, which first waits for all that the model's has been given."""
    import torch

    compute, side = torch.cuda.current_stream(), T["stream"]
    side.wait_stream(compute)
    with torch.cuda.stream(side):
        moves.begin()
        T["wide"][layer % 2].copy_(T["wide_homes"][layer % 3], non_blocking=True)
        moves.end()
    compute.wait_stream(side)


@seventeenth(
    "weights_not_overlapped",
    line=AT_LINK_RATE,
    also=("link_bound",),
    like=("redundant_loads", "pageable_memory", "synchronisation", "load_not_ordered", "small_copies"),
    prepare=ready_wide,
    needs_gpu=True,
)
def torch_a_prefetch_whose_two_wait_stream_calls_leave_nothing_to_run_beside_it(d: Device) -> Truth:
    """When a layer's products of 1.2 ms are launched, the next layer of 64 MiB is fetched on a stream of its own.

    The fetch begins with `side.wait_stream(compute)`, to protect its place, and ends with `compute.wait_stream(side)`:
    it stands behind the products of the layer before, though these use the other place, and those of its own layer
    behind it. So no kernel runs for the 1.2 ms that it takes the link. Three layers take turns.
    """
    import torch

    moves, layer = Stretches(d, T["stream"].cuda_stream), 0
    fetch_wide(0, moves)
    torch.cuda.synchronize()
    moves.read()
    moves.ns = 0
    d.spent.restart()
    for layer in turns():
        for _ in range(3):
            T["x"] @ T["wide"][layer % 2]
        fetch_wide(layer + 1, moves)
        behind(layer)
        moves.read(4)
    torch.cuda.synchronize()
    d.spent.add(AT_LINK_RATE, moves.read())
    d.spent.stop()
    for last in (layer, layer + 1):
        equal(T["wide"][last % 2], T["wide_homes"][last % 3])
    return {"weights_not_overlapped": moves.ns}


def ready_hooked(d: Device) -> None:
    """Four modules on the device whose weights are in pinned memory, too."""
    import torch

    ready_network(d)
    if "modules" not in T:
        made = {"bias": False, "device": "cuda", "dtype": torch.bfloat16}
        T["modules"] = [torch.nn.Linear(4096, 4096, **made).requires_grad_(False) for _ in range(4)]
    for module, home in zip(T["modules"], T["homes"], strict=False):
        module.weight.copy_(home, non_blocking=True)
        module(T["x"])
    torch.cuda.synchronize()


@seventeenth(
    "redundant_loads",
    line=NOT_NEEDED,
    also=("weights_not_overlapped", "link_bound"),
    like=("small_copies", "pageable_memory", "synchronisation", "load_not_ordered", "launch_queue_saturation"),
    prepare=ready_hooked,
    needs_gpu=True,
    blind=DEVICE,
)
def torch_a_forward_hook_that_brings_weights_which_never_left_the_device(d: Device) -> Truth:
    """A forward pre-hook copies a module's 32 MiB of weights out of pinned memory, though they are on the device.

    The hook was written for modules that are offloaded after use, and nothing offloads these: the copy goes from the
    same place to the same place, neither of which anybody changes, on the model's stream. It takes the link 0.6 ms
    before each module's 0.4 ms of products.
    """
    import torch

    moves, handles, step = Stretches(d, 0), list[Any](), 0
    for module, home in zip(T["modules"], T["homes"], strict=False):

        def bring(called: Any, _: Any, home: Any = home) -> None:
            moves.begin()
            called.weight.copy_(home, non_blocking=True)
            moves.end()

        handles.append(module.register_forward_pre_hook(bring))
    d.spent.restart()
    for step in turns():
        for module in T["modules"]:
            module(T["x"])
            T["x"] @ module.weight
        behind(step)
        moves.read(12)
    torch.cuda.synchronize()
    d.spent.add(NOT_NEEDED, moves.read())
    d.spent.stop()
    for handle in handles:
        handle.remove()
    equal(T["modules"][3].weight, T["homes"][3])
    return {"redundant_loads": moves.ns}


def ready_past(d: Device) -> None:
    """A cache of eight layers' keys and values, 256 MiB each."""
    import torch

    ready(d)
    if "past" not in T:
        T["past"] = [
            tuple(torch.ones(256, 512, 1024, dtype=torch.bfloat16, device="cuda") for _ in range(2)) for _ in range(8)
        ]
    for step in range(3):
        copied = copy.deepcopy(T["past"])
        copied[0][0][0, 0].fill_(step)
        forward(2)
    del copied
    torch.cuda.synchronize()


@seventeenth(
    line=INSIDE_GPU,
    also=("gpu_starved", "unmerged_neighbours"),
    like=("small_copies", "redundant_loads", "weights_not_overlapped", "synchronisation", "allocation_on_hot_path"),
    prepare=ready_past,
    needs_gpu=True,
)
def torch_a_cache_that_deepcopy_doubles_before_each_guess_is_verified(d: Device) -> Truth:
    """Before each verification of 1 ms `copy.deepcopy` copies the cache, 16 tensors of 256 MiB, within the device.

    So that a rejected guess can be undone; the guess then writes to the copy. The 16 copies stand on the model's
    stream, read and write 8 GiB of memory together, which takes 2 ms or so, and use memory that the copy before the
    last has given back. They are launched two steps ahead.
    """
    import torch

    moves, step, copied = Stretches(d, 0), 0, None
    d.spent.restart()
    for step in turns():
        moves.begin()
        copied = copy.deepcopy(T["past"])
        moves.end()
        copied[0][0][0, 0].fill_(step % 251)
        forward(5)
        behind(step)
        moves.read(3)
    torch.cuda.synchronize()
    d.spent.add(INSIDE_GPU, moves.read())
    d.spent.stop()
    if copied is None or copied[0][0][0, 0, 0].item() != torch.tensor(float(step % 251)).bfloat16().item():
        raise RuntimeError("the guess is not in the copy")
    if T["past"][0][0][0, 0, 0].item() != 1:
        raise RuntimeError("the guess is in the cache itself")
    return {}


FIELDS = 400  # small tensors of a batch


def ready_fields(d: Device) -> None:
    """Four sets of pinned fields, places for each, and a graph for each set that copies all of it."""
    import torch

    ready(d)
    if "fields" not in T:
        T["fields"] = [torch.rand(FIELDS, 1024).pin_memory() for _ in range(4)]
        T["landed"] = [torch.zeros(FIELDS, 2048, device="cuda") for _ in range(4)]  # no two places lie side by side
        T["graphs"] = [torch.cuda.CUDAGraph() for _ in range(4)]
        for fields, landed, graph in zip(T["fields"], T["landed"], T["graphs"], strict=True):
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                for row, place in zip(fields, landed, strict=True):
                    place[:1024].copy_(row, non_blocking=True)
    for step in range(8):
        T["fields"][step % 4].add_(1)
        T["graphs"][step % 4].replay()
        with torch.cuda.stream(T["stream"]):
            T["graphs"][step % 4].replay()
        torch.cuda.synchronize()
        T["landed"][step % 4].sum()
        forward(4)
    torch.cuda.synchronize()


@seventeenth(
    line=BELOW_LINK_RATE,
    also=("small_copies", "weights_not_overlapped", "gpu_starved", "unmerged_neighbours", "link_bound"),
    like=("redundant_loads", "pageable_memory", "synchronisation", "launch_queue_saturation", "cpu_starved"),
    prepare=ready_fields,
    needs_gpu=True,
)
def torch_fields_of_a_batch_that_a_cuda_graph_copies_one_by_one_before_its_step(d: Device) -> Truth:
    """Before each step of 0.4 ms a CUDA graph copies the batch's 400 fields of 4 KiB, each into a tensor of its own.

    The copies stand in a row in the graph, on the model's stream: no call is made for one, but the GPU takes above 1 us
    for each, of which the link needs 0.08 us. The CPU adds one to all fields before, of one of four sets in turn, so
    that no load brings what is there. The host is two steps ahead.
    """
    import torch

    moves, step = Stretches(d, 0), 0
    d.spent.restart()
    for step in turns():
        T["fields"][step % 4].add_(1)
        moves.begin()
        T["graphs"][step % 4].replay()
        moves.end()
        T["landed"][step % 4].sum()
        forward(2)
        behind(step)
        moves.read(3)
    torch.cuda.synchronize()
    d.spent.add(BELOW_LINK_RATE, moves.read())
    d.spent.stop()
    equal(T["landed"][step % 4][FIELDS - 1, :1024], T["fields"][step % 4][FIELDS - 1])
    return {}


def ready_frames(d: Device) -> None:
    """Frames that leave by `to("cpu", non_blocking=True)`, which makes pinned memory for them and keeps it."""
    import torch

    ready(d)
    if "shapes_of_frames" not in T:
        T["shapes_of_frames"] = [torch.randn(4096, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    held = [T["shapes_of_frames"][0].to("cpu", non_blocking=True) for _ in range(9)]
    if not held[0].is_pinned():
        raise RuntimeError("frames leave to memory that is not pinned")
    forward(2) @ T["shapes_of_frames"][0]
    torch.cuda.synchronize()
    del held


@seventeenth(
    line=AT_LINK_RATE,
    also=("weights_not_overlapped", "link_bound", "wasted_stores", "head_of_line_copies"),
    like=("redundant_loads", "small_copies", "pageable_memory", "allocation_on_hot_path", "synchronisation"),
    prepare=ready_frames,
    needs_gpu=True,
)
def torch_frames_sent_by_to_cpu_on_the_stream_that_makes_the_next_one(d: Device) -> Truth:
    """A frame of 64 MiB is made in 0.8 ms and leaves by `frame.to("cpu", non_blocking=True)`, and the next is made.

    Without a stream of its own the copy stands between the two frames' kernels, and takes the link 1.2 ms. The host is
    two frames ahead and looks at a number of the one that has left. Its pinned memory is torch's, which was made before
    the program began and is used again.
    """
    import torch

    moves, step, held, seen = Stretches(d, 0), 0, deque[Any](), 0.0
    d.spent.restart()
    for step in turns():
        frame = forward(2) @ T["shapes_of_frames"][step % 3]
        moves.begin()
        held.append(frame.to("cpu", non_blocking=True))
        moves.end()
        behind(step)
        if len(held) > 2:
            seen += float(held.popleft()[0, 0])
        moves.read(3)
    torch.cuda.synchronize()
    d.spent.add(AT_LINK_RATE, moves.read())
    d.spent.stop()
    equal(held[-1], frame)
    return {}


def backward(step: int) -> None:
    """Forward and backward over the four layers."""
    import torch

    x = T["batches_of_3"][step % 3]
    for layer in T["layers_of_4"]:
        x = torch.relu(x @ layer)
    x.float().mean().backward()


def ready_gradients(d: Device) -> None:
    import torch

    ready_network(d)
    for step in range(3):
        backward(step)
        for layer in T["layers_of_4"]:
            T["homes"][0].copy_(layer.grad, non_blocking=True)
            layer.grad = None
    torch.cuda.synchronize()


@seventeenth(
    line=AT_LINK_RATE,
    also=("weights_not_overlapped", "link_bound", "wasted_stores"),
    like=("redundant_loads", "small_copies", "pageable_memory", "synchronisation", "store_not_ordered"),
    prepare=ready_gradients,
    needs_gpu=True,
)
def torch_gradients_that_a_hook_sends_to_the_host_on_the_stream_of_the_backward_pass(d: Device) -> Truth:
    """A hook sends each layer's gradient of 32 MiB to pinned memory as soon as it is there, on the backward's stream.

    The gradient takes the link 0.6 ms, and the kernels of the layer before stand behind it. A step's products take
    2.3 ms and its four gradients 2.4 ms. Three batches take turns, so that each gradient is new.
    """
    import torch

    moves, handles, step = Stretches(d, 0), list[Any](), 0
    for layer, home in zip(T["layers_of_4"], T["homes"], strict=False):

        def leave(one: Any, home: Any = home) -> None:
            moves.begin()
            home.copy_(one.grad, non_blocking=True)
            moves.end()
            one.grad = None

        handles.append(layer.register_post_accumulate_grad_hook(leave))
    d.spent.restart()
    for step in turns():
        backward(step)
        behind(step)
        moves.read(12)
    torch.cuda.synchronize()
    d.spent.add(AT_LINK_RATE, moves.read())
    d.spent.stop()
    for handle in handles:
        handle.remove()
    if any(layer.grad is not None for layer in T["layers_of_4"]):
        raise RuntimeError("a gradient has stayed on the device")
    return {}
