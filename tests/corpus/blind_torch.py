"""Blind programs in torch: a vocabulary sorted by the CPU, adapters by state dict, images prepared by a thread."""

from __future__ import annotations

import queue

from device import Device, now
from later_torch import T, forward, ready
from registry import BELOW_LINK_RATE, COMPUTING, ELSEWHERE, PAGEABLE, PYTHON, Truth, blind_program, in_thread


def sample(logits: object) -> list[int]:
    """Top-p by the CPU."""
    import torch

    assert isinstance(logits, torch.Tensor)
    sorted_, order = logits.sort(-1, descending=True)
    chances = sorted_.softmax(-1)
    chances[chances.cumsum(-1) > 0.9] = 0
    chances[:, 0] += 1e-6
    return [int(token) for token in order.gather(-1, chances.multinomial(1))[:, 0]]


def ready_blind(d: Device) -> None:
    import torch

    ready(d)
    if "adapter" not in T:
        T["adapter"] = torch.nn.ModuleList(
            torch.nn.Linear(2048, 384, bias=False, dtype=torch.bfloat16, device="cuda") for _ in range(48)
        )
        T["states"] = [
            {name: torch.randn(384, 2048).to(torch.bfloat16) for name in T["adapter"].state_dict()} for _ in range(3)
        ]
        T["pictures"] = [torch.randint(0, 255, (4, 3, 128, 128), dtype=torch.uint8) for _ in range(5)]
        T["prepared"] = [torch.zeros(4, 3, 128, 128, dtype=torch.bfloat16).pin_memory() for _ in range(3)]
        T["features"] = [torch.zeros(4, 3, 128, 128, dtype=torch.bfloat16, device="cuda") for _ in range(3)]
    for state in T["states"]:
        T["adapter"].load_state_dict(state)
    for _ in range(3):
        sample(forward(2)[:128].float().cpu())
        T["features"][0].copy_(T["prepared"][0], non_blocking=True)
    torch.cuda.synchronize()


@blind_program(
    line=PYTHON,
    or_lines=(ELSEWHERE,),
    also=("pageable_memory", "synchronisation", "gpu_starved", "python_or_gil_bound", "wasted_stores"),
    like=("small_copies",),
    prepare=ready_blind,
    needs_gpu=True,
)
def torch_a_vocabulary_sorted_by_the_cpu(_: Device) -> Truth:
    """The logits of 128 requests are read back, and sorted, summed and drawn from by torch on the CPU."""
    begin = now()
    while now() - begin < 800_000_000:
        sample(forward(2)[:128].float().cpu())
    return {}


@blind_program(
    "pageable_memory",
    line=PAGEABLE,
    or_lines=(BELOW_LINK_RATE,),
    also=("synchronisation", "gpu_starved", "python_or_gil_bound", "weights_not_overlapped", "small_copies"),
    like=("redundant_loads", "allocation_on_hot_path"),
    prepare=ready_blind,
    needs_gpu=True,
)
def torch_an_adapter_set_by_load_state_dict(_: Device) -> Truth:
    """Each batch sets another of three adapters, 48 plain tensors of 1.5 MiB, by `load_state_dict`, then computes."""
    import torch

    lost, batch, start = 0, 0, now()
    while now() - start < 800_000_000:
        begin = now()
        T["adapter"].load_state_dict(T["states"][batch % 3])
        lost += now() - begin
        batch += 1
        forward(4)
        torch.cuda.current_stream().synchronize()
    return {"pageable_memory": lost}


@blind_program(
    line=COMPUTING,
    like=("pageable_memory", "synchronisation", "gpu_starved", "python_or_gil_bound", "link_bound"),
    prepare=ready_blind,
    needs_gpu=True,
)
def torch_images_prepared_by_a_thread_two_steps_ahead(_: Device) -> Truth:
    """A thread normalises images into three pinned tensors; they are copied on a side stream while others compute."""
    import torch

    empty: queue.Queue[int] = queue.Queue()
    full: queue.Queue[int] = queue.Queue()
    for slot in range(3):
        empty.put(slot)
    steps, copied, done = 180, T["events"][:3], T["events"][3:6]

    def normalise() -> None:
        for step in range(steps):
            slot = empty.get()
            T["prepared"][slot].copy_(T["pictures"][step % 5].float().sub_(127).div_(64))
            full.put(slot)

    thread = in_thread(normalise)
    held: list[int] = []
    for _ in range(steps):
        slot = full.get()
        with torch.cuda.stream(T["stream"]):
            T["features"][slot].copy_(T["prepared"][slot], non_blocking=True)
            copied[slot].record()
        torch.cuda.current_stream().wait_event(copied[slot])
        forward(20)
        done[slot].record()
        held.append(slot)
        if len(held) > 1:
            before = held.pop(0)
            done[before].synchronize()
            empty.put(before)
    thread.join()
    torch.cuda.current_stream().synchronize()
    return {}
