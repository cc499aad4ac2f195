"""Fresh programs in torch: tokens by `item`, inputs out of lists, eager kernels, modules moved layer by layer."""

from __future__ import annotations

import random

from accounts import think
from device import Device
from later_torch import T, forward, ready_layers
from registry import (
    AT_LINK_RATE,
    BELOW_LINK_RATE,
    COMPUTING,
    ELSEWHERE,
    PAGEABLE,
    PYTHON,
    SUBMITTING,
    WAITING,
    Truth,
    fresh,
)


def ready_inputs(d: Device) -> None:
    import torch

    ready_layers(d)
    if "numbers" in T:
        return
    T["numbers"] = [random.Random(i).choices(range(32_000), k=24_000) for i in range(4)]
    T["small"] = torch.zeros(64, 64, device="cuda")
    T["staging"] = torch.empty(128, 32 * 1024, dtype=torch.bfloat16).pin_memory()
    T["tokens"] = [torch.zeros(64, dtype=torch.int64).pin_memory() for _ in range(4)]
    for _ in range(2):
        torch.tensor(T["numbers"][0], device="cuda")
        torch.relu(T["small"]).add(1)
        forward(1).argmax(-1)[:64][0].item()
        T["tokens"][0].copy_(forward(1).argmax(-1)[:64], non_blocking=True)
        T["layers"][0].to("cuda")
        T["staging"].to("cuda", non_blocking=True)
        torch.cuda.synchronize()


@fresh(
    line=WAITING,
    or_lines=(PYTHON, SUBMITTING, PAGEABLE),
    also=("synchronisation", "pageable_memory", "gpu_starved", "python_or_gil_bound", "small_copies"),
    like=("wasted_stores",),
    prepare=ready_inputs,
    needs_gpu=True,
)
def torch_tokens_taken_one_by_one_by_item(_: Device) -> Truth:
    """After each step of 0.4 ms `item()` takes 32 tokens one by one, and nothing runs meanwhile."""
    for _ in range(130):
        [int(token.item()) for token in forward(2).argmax(-1)[:32]]
    return {}


@fresh(
    line=PYTHON,
    or_lines=(ELSEWHERE,),
    also=("pageable_memory", "synchronisation", "gpu_starved", "python_or_gil_bound", "small_copies"),
    prepare=ready_inputs,
    needs_gpu=True,
)
def torch_inputs_made_out_of_lists(_: Device) -> Truth:
    """`torch.tensor(list, device="cuda")` makes 24,000 ids and four shorter inputs of each step out of Python lists."""
    import torch

    for step in range(120):
        ids = torch.tensor(T["numbers"][step % 4], device="cuda")
        rest = [torch.tensor(T["numbers"][step % 4][i::64], device="cuda") for i in range(4)]
        forward(3)
        del ids, rest
    torch.cuda.current_stream().synchronize()
    return {}


@fresh(
    line=SUBMITTING,
    or_lines=(PYTHON,),
    also=("gpu_starved", "python_or_gil_bound", "synchronisation"),
    like=("launch_queue_saturation",),
    prepare=ready_inputs,
    needs_gpu=True,
)
def torch_eager_kernels_of_a_small_model(_: Device) -> Truth:
    """Four hundred small kernels a step are launched eagerly from Python, more slowly than the device does them."""
    import torch

    for _ in range(45):
        x = T["small"]
        for _ in range(200):
            x = torch.relu(x).add(1)
        forward(1)
        torch.cuda.current_stream().synchronize()
    return {}


@fresh(
    line=AT_LINK_RATE,
    or_lines=(WAITING,),
    also=("synchronisation", "weights_not_overlapped", "gpu_starved", "link_bound"),
    like=("pageable_memory", "allocation_on_hot_path", "redundant_loads"),
    prepare=ready_inputs,
    needs_gpu=True,
)
def torch_layers_moved_by_to_without_non_blocking(_: Device) -> Truth:
    """As an offloaded module's hook: a pinned layer of 32 MiB goes by `.to("cuda")`, which waits, then it computes."""
    import torch

    layer = None
    for step in range(240):
        layer = T["layers"][step % 3].to("cuda")
        T["x"] @ layer
    torch.cuda.current_stream().synchronize()
    return {}


@fresh(
    line=PYTHON,
    or_lines=(ELSEWHERE, SUBMITTING),
    also=("gpu_starved", "python_or_gil_bound", "synchronisation", "weights_not_overlapped"),
    like=("pageable_memory", "small_copies", "redundant_loads"),
    prepare=ready_inputs,
    needs_gpu=True,
)
def torch_blocks_gathered_on_the_cpu(_: Device) -> Truth:
    """128 blocks of 64 KiB are gathered by the CPU into pinned memory, then go in one copy, then the step runs."""
    import torch

    chance = random.Random(16)
    for _ in range(130):
        for row, block in enumerate(chance.sample(range(256), 128)):
            T["staging"][row].copy_(T["blocks"][block])
        there = T["staging"].to("cuda", non_blocking=True)
        forward(2)
        torch.cuda.current_stream().synchronize()
        del there
    return {}


@fresh(
    line=COMPUTING,
    or_lines=(BELOW_LINK_RATE,),
    like=("synchronisation", "gpu_starved", "python_or_gil_bound", "pageable_memory"),
    prepare=ready_inputs,
    needs_gpu=True,
)
def torch_tokens_streamed_a_step_late(_: Device) -> Truth:
    """Tokens leave to pinned memory behind each step; Python handles those of the step before while this one runs."""
    events = T["events"]
    for step in range(120):
        T["tokens"][step % 4].copy_(forward(9).argmax(-1)[:64], non_blocking=True)
        events[20 + step % 4].record()
        if step:
            events[20 + (step - 1) % 4].synchronize()
            T["tokens"][(step - 1) % 4].tolist()
            think(300)
    return {}
