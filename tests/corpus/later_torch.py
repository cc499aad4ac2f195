"""Programs of later shapes that need a GPU: torch's tensors and streams, and CUDA graphs with copies inside."""

from __future__ import annotations

from typing import Any

from accounts import Pool, paced, stamp, think
from device import H2D, Device, now
from registry import (
    ALLOCATING,
    AT_LINK_RATE,
    BELOW_LINK_RATE,
    COMPUTING,
    ELSEWHERE,
    PAGEABLE,
    PYTHON,
    SUBMITTING,
    KiB,
    Truth,
    program,
)

T: dict[str, Any] = {}  # tensors, made once: torch's first calls belong to no program's window


def ready(_: Device) -> None:
    """Imports torch and makes what all programs here use; its first calls happen now."""
    import torch

    if not T:
        make()
    for _ in range(3):
        forward(8).argmax(-1)[:64].tolist()  # torch's memory is there, whoever gave it back before
        T["few"] @ T["w"]
        T["ids"].to("cuda", non_blocking=True)
    torch.cuda.synchronize()


def make() -> None:
    import torch

    side = 4096
    T["w"] = torch.randn(side, side, device="cuda", dtype=torch.bfloat16) / 64
    T["x"] = torch.randn(side, side, device="cuda", dtype=torch.bfloat16)
    T["few"] = T["x"][:512].clone()
    T["ids"] = torch.randint(0, 9, (512,), dtype=torch.int64).pin_memory()
    T["stream"] = torch.cuda.Stream()
    T["events"] = [torch.cuda.Event() for _ in range(64)]
    for event in T["events"]:
        event.record()


def ready_layers(d: Device) -> None:
    import torch

    ready(d)
    if "layers" not in T:
        T["layers"] = [torch.randn(4096, 4096).to(torch.bfloat16).pin_memory() for _ in range(3)]
        T["slots"] = [torch.empty_like(T["w"]) for _ in range(2)]
        T["blocks"] = torch.randn(256, 32 * 1024).to(torch.bfloat16).pin_memory()
        T["cache"] = torch.empty(256, 32 * 1024, dtype=torch.bfloat16, device="cuda")
        T["rows"] = [torch.randn(2048, 4096).to(torch.bfloat16) for _ in range(2)]
    torch.cuda.synchronize()


def forward(times: int) -> Any:
    """So many products of 4096 x 4096 x 4096, about 0.2 ms each on an H200."""
    x = T["x"]
    for _ in range(times):
        x = x @ T["w"]
    return x


@program("link_bound", line=AT_LINK_RATE, like=("weights_not_overlapped",), prepare=ready_layers, needs_gpu=True)
def torch_layers_through_two_tensors(_: Device) -> Truth:
    """Layers of 32 MiB are copied into two tensors on a side stream, one ahead; a layer computes for 0.05 ms only."""
    import torch

    compute, side, events = torch.cuda.current_stream(), T["stream"], T["events"]
    for layer in range(260):
        slot = T["slots"][layer % 2]
        with torch.cuda.stream(side):
            if layer > 1:
                side.wait_event(events[layer % 2])
            slot.copy_(T["layers"][layer % 3], non_blocking=True)
            events[2 + layer % 2].record(side)
        compute.wait_event(events[2 + layer % 2])
        T["few"] @ slot
        events[layer % 2].record(compute)
        if layer % 8 == 7:
            events[4 + layer % 16 // 8].record(compute)
            events[5 - layer % 16 // 8].synchronize()
    return {}


@program(line=PYTHON, also=("synchronisation", "gpu_starved", "pageable_memory"), prepare=ready, needs_gpu=True)
def torch_tokens_handled_in_python(d: Device) -> Truth:
    """`tolist()` brings the tokens of each step of 1 ms to Python, which works on them for 1.2 ms."""
    for _ in range(130):
        forward(5).argmax(-1)[:64].tolist()
        with d.spent.on(PYTHON):
            think(1_200)
    return {}


@program("pageable_memory", line=BELOW_LINK_RATE, or_lines=(PAGEABLE,), prepare=ready_layers, needs_gpu=True)
def torch_inputs_from_pageable_memory(d: Device) -> Truth:
    """16 MiB of pageable activations go to the GPU with `.to("cuda", non_blocking=True)` before each step."""
    lost = 0
    for step in range(90):
        x = T["rows"][step % 2]
        x[0, :64] = step
        begin = now()
        there = x.to("cuda", non_blocking=True)
        lost += now() - begin
        for _ in range(6):
            there @ T["w"]
    d.synchronize()
    return {"pageable_memory": lost}


@program("allocation_on_hot_path", line=ALLOCATING, or_lines=(ELSEWHERE,), prepare=ready_layers, needs_gpu=True)
def torch_pin_memory_for_each_request(d: Device) -> Truth:
    """`pin_memory()` makes a pinned copy of each request's 16 MiB, all of which are kept: no cache can help."""
    import torch

    kept, lost = [], 0
    for request in range(30):
        begin = now()
        kept.append(T["rows"][request % 2].pin_memory())
        lost += now() - begin
        there = kept[-1].to("cuda", non_blocking=True)
        for _ in range(10):
            there @ T["w"]
        torch.cuda.current_stream().synchronize()
    return {"allocation_on_hot_path": lost}


@program("allocation_on_hot_path", line=ALLOCATING, or_lines=(ELSEWHERE,), prepare=ready, needs_gpu=True)
def torch_cache_emptied_in_each_step(d: Device) -> Truth:
    """`torch.cuda.empty_cache()` after each step gives the step's 4 GiB back, and the next step allocates again."""
    import torch

    lost = 0
    for _ in range(90):
        begin = now()
        parts = [torch.empty(1 << 30, dtype=torch.uint8, device="cuda") for _ in range(4)]
        lost += now() - begin
        forward(5)
        torch.cuda.current_stream().synchronize()
        del parts
        begin = now()
        torch.cuda.empty_cache()
        lost += now() - begin
    return {"allocation_on_hot_path": lost}


@program(
    line=PYTHON,
    or_lines=(SUBMITTING, BELOW_LINK_RATE),
    also=("small_copies", "unmerged_neighbours", "gpu_starved", "python_or_gil_bound"),
    prepare=ready_layers,
    needs_gpu=True,
)
def torch_blocks_swapped_in_by_copy(d: Device) -> Truth:
    """`cache[i].copy_(blocks[j], non_blocking=True)` for 100 blocks of 64 KiB, for which a step of 0.4 ms waits."""
    import torch

    for request in range(8):
        for i in range(100):
            T["cache"][i].copy_(T["blocks"][(37 * i + 11 * request) % 256], non_blocking=True)
        forward(2)
        torch.cuda.current_stream().synchronize()
    return {}


@program(line=COMPUTING, like=("synchronisation", "small_copies", "redundant_loads"), prepare=ready, needs_gpu=True)
def torch_prefill_that_computes(_: Device) -> Truth:
    """Eight products a step, its ids from pinned memory, and a wait for the step before the last: the GPU computes."""
    events = T["events"]
    for step in range(130):
        T["ids"][step % 500] = step
        T["ids"].to("cuda", non_blocking=True)
        forward(8)
        events[8 + step % 4].record()
        if step > 1:
            events[8 + (step - 2) % 4].synchronize()
    return {}


def ready_graph(d: Device) -> None:
    import torch

    ready(d)
    if "graph" in T:
        return
    T["inputs"] = torch.zeros(512, dtype=torch.int64, device="cuda")
    T["graph"] = torch.cuda.CUDAGraph()
    forward(8)
    torch.cuda.synchronize()
    with torch.cuda.graph(T["graph"]):
        T["output"] = forward(8)[:64].argmax(-1)
    T["graph"].replay()
    torch.cuda.synchronize()


@program(
    line=COMPUTING, like=("redundant_loads", "gpu_starved", "synchronisation"), prepare=ready_graph, needs_gpu=True
)
def torch_decode_by_one_graph(_: Device) -> Truth:
    """Each step rewrites the graph's static inputs and replays it; the host is one step ahead."""
    events = T["events"]
    for step in range(130):
        T["ids"][step % 500] = step
        T["inputs"].copy_(T["ids"], non_blocking=True)
        T["graph"].replay()
        events[16 + step % 4].record()
        if step:
            events[16 + (step - 1) % 4].synchronize()
    return {}


@program(line=AT_LINK_RATE, also=("weights_not_overlapped",), needs_gpu=True)
def a_graph_with_its_weights_inside(d: Device) -> Truth:
    """A step is a graph of two layers, each a copy of its weights and then the kernel that uses them: no overlap."""
    size = d.bytes_of(300)

    def step_once() -> None:
        for layer in range(2):
            d.copy(d.device, d.host + layer * size, size, H2D, d.compute)
            d.launch(350_000)

    graph = d.graph(step_once)
    d.spent.restart()
    for step in range(170):
        d.replay(graph, 700_000)
        d.spent.add(AT_LINK_RATE, 2 * size / d.bytes_per_us * 1e3)
        paced(d, step, 2)
    return {}


@program(line=PYTHON, also=("gpu_starved", "python_or_gil_bound", "synchronisation"), needs_gpu=True)
def a_graph_replayed_after_python(d: Device) -> Truth:
    """A step is one graph of 1 ms; Python schedules for 1.5 ms before each replay, with nothing on the device."""
    pool = Pool(d, 32 * KiB)

    def step_once() -> None:
        for i in range(2):
            pool.fetch(i, i, d.compute)
        for _ in range(10):
            d.launch(100_000)

    graph = d.graph(step_once)
    d.spent.restart()
    for step in range(140):
        with d.spent.on(PYTHON):
            stamp(d, 0, 64 * KiB, step)
            think(1_500)
        d.replay(graph, 1_000_000)
        d.sync(d.compute)
    return {}
