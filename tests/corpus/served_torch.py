"""Served programs in torch: embeddings scaled by the CPU, scores of all positions taken to it, layers brought ahead."""

from __future__ import annotations

from accounts import Stretches, going
from device import Device, now
from later_torch import T, forward, ready, ready_layers
from registry import BELOW_LINK_RATE, COMPUTING, ELSEWHERE, PAGEABLE, PYTHON, Truth, served


def ready_table(d: Device) -> None:
    import torch

    ready(d)
    if "table" not in T:
        T["table"] = torch.randint(-127, 127, (16_384, 4096), dtype=torch.int8)
        T["scale"] = torch.rand(16_384, 1)
        T["asked"] = [torch.randint(0, 16_384, (512,)) for _ in range(8)]
        T["gathered"] = torch.zeros(512, 4096, dtype=torch.bfloat16).pin_memory()
        T["embedded"] = torch.zeros(512, 4096, dtype=torch.bfloat16, device="cuda")
    embed(T["asked"][0])
    forward(1)
    torch.cuda.synchronize()


def embed(ids: object) -> None:
    """Rows of the quantised table, scaled, into pinned memory."""
    T["gathered"].copy_(T["table"][ids].float().mul_(T["scale"][ids]))


@served(
    line=PYTHON,
    or_lines=(ELSEWHERE,),
    also=("gpu_starved", "python_or_gil_bound", "synchronisation"),
    like=("pageable_memory", "redundant_loads", "cpu_starved", "small_copies"),
    prepare=ready_table,
    needs_gpu=True,
)
def torch_embeddings_scaled_by_the_cpu_before_each_step(d: Device) -> Truth:
    """512 rows of a quantised table are gathered and scaled by one thread of the CPU, go in one copy, and are used."""
    import torch

    threads, idle = torch.get_num_threads(), Stretches(d, 0)
    torch.set_num_threads(1)  # as servers do
    for step in going():
        embed(T["asked"][step % 8])
        idle.end()
        T["embedded"].copy_(T["gathered"], non_blocking=True)
        T["embedded"] @ T["w"]
        forward(6)
        idle.begin()
        torch.cuda.current_stream().synchronize()
        idle.read()
    d.spent.add(PYTHON, idle.ns)
    d.spent.stop()
    torch.set_num_threads(threads)
    return {}


@served(
    "pageable_memory",
    line=PAGEABLE,
    or_lines=(BELOW_LINK_RATE,),
    also=("synchronisation", "gpu_starved", "python_or_gil_bound"),
    like=("allocation_on_hot_path", "wasted_stores", "first_calls"),
    prepare=ready,
    needs_gpu=True,
)
def torch_scores_of_all_positions_taken_by_cpu(d: Device) -> Truth:
    """The scores of all 4,096 positions, 64 MiB of float32, are taken by `cpu()` for an evaluation, which sums them."""
    import torch

    lost, total = 0, 0.0
    for _ in going():
        scores = forward(25).float()
        torch.cuda.current_stream().synchronize()
        start = now()
        taken = scores.cpu()
        lost += now() - start
        total += float(taken[0, :64].sum())
        del taken, scores
    d.spent.add(PAGEABLE, lost)
    d.spent.stop()
    return {"pageable_memory": lost}


@served(
    line=COMPUTING,
    like=("weights_not_overlapped", "link_bound", "load_not_ordered", "synchronisation", "gpu_starved"),
    prepare=ready_layers,
    needs_gpu=True,
)
def torch_layers_brought_ahead_of_long_products(d: Device) -> Truth:
    """Offloaded layers of 32 MiB come into two tensors on a side stream; the layer before multiplies for longer."""
    import torch

    compute, side, events = torch.cuda.current_stream(), T["stream"], T["events"]
    products = Stretches(d, 0)
    for layer in going():
        slot = layer % 2
        with torch.cuda.stream(side):
            if layer > 1:
                side.wait_event(events[32 + slot])
            T["slots"][slot].copy_(T["layers"][layer % 3], non_blocking=True)
            events[34 + slot].record(side)
        compute.wait_event(events[34 + slot])
        products.begin()
        for _ in range(6):
            T["x"] @ T["slots"][slot]
        products.end()
        events[32 + slot].record(compute)
        if layer > 3:
            events[36 + (layer - 3) % 4].synchronize()
            products.read(3)
        events[36 + layer % 4].record(compute)
    torch.cuda.current_stream().synchronize()
    d.kernel_ns += products.read()
    d.spent.stop()
    return {}
