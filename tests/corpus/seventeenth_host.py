"""Seventeenth programs, in torch, whose device waits for the host: modules, an iteration, samples, segments, files."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from accounts import Stretches, turns
from device import Device, now
from later_torch import T, forward, ready
from registry import (
    ALLOCATING,
    BELOW_LINK_RATE,
    DEVICE,
    ELSEWHERE,
    PAGEABLE,
    PYTHON,
    SUBMITTING,
    TIER,
    WAITING,
    Truth,
    seventeenth,
)


def ready_pipeline(d: Device) -> None:
    """Three modules of a pipeline of pictures, in plain memory."""
    import torch

    ready(d)
    if "stages" not in T:
        made = {"bias": False, "device": "cuda", "dtype": torch.bfloat16}
        T["stages"] = [
            torch.nn.Sequential(*[torch.nn.Linear(4096, 4096, **made) for _ in range(count)]).requires_grad_(False)
            for count in (1, 3, 2)
        ]
    for stage in T["stages"]:
        stage.to("cpu")
        stage.to("cuda")
        stage(T["x"])
        stage.to("cpu")
    torch.cuda.synchronize()


@seventeenth(
    "pageable_memory",
    line=PAGEABLE,
    or_lines=(BELOW_LINK_RATE, WAITING),
    also=(
        *("synchronisation", "gpu_starved", "weights_not_overlapped", "python_or_gil_bound", "link_bound"),
        *("wasted_stores", "redundant_loads", "blocking_server_call"),  # Module.to is one
    ),
    like=("small_copies", "allocation_on_hot_path", "launch_queue_saturation", "slow_tier", "cpu_starved"),
    prepare=ready_pipeline,
    needs_gpu=True,
)
def torch_modules_of_a_pipeline_moved_in_by_to_cuda_and_out_by_to_cpu_around_their_use(d: Device) -> Truth:
    """For each picture an encoder, a denoiser and a decoder come by `module.to("cuda")` and go by `module.to("cpu")`.

    Their parameters, 32 MiB each and six in all, lie in plain memory that `to("cpu")` makes anew, so the thread stands
    in a pageable copy for each, some milliseconds. It has waited for the module before it sends it away, and launches
    it when it is there: no kernel runs meanwhile. A module's products take 2 ms.
    """
    import torch

    lost = 0
    d.spent.restart()
    for _ in turns():
        x = T["x"]
        for stage in T["stages"]:
            begin = now()
            stage.to("cuda")
            lost += now() - begin
            x = stage(x)
            forward(9)
            torch.cuda.synchronize()
            begin = now()
            stage.to("cpu")
            lost += now() - begin
    d.spent.add(PAGEABLE, lost)
    d.spent.stop()
    if any(one.is_cuda for stage in T["stages"] for one in stage.parameters()):
        raise RuntimeError("a module has stayed on the device")
    return {"pageable_memory": lost}


def ready_iteration(d: Device) -> None:
    """A contraction, its graph, and how long the device takes for one pass over it."""
    import torch

    ready(d)
    if "fixed_point" not in T:
        weight = torch.randn(512, 512, device="cuda") * (0.25 / 512**0.5)
        T["state"], T["inputs_of_8"] = torch.zeros(64, 512, device="cuda"), torch.randn(8, 64, 512, device="cuda")
        T["input"] = T["inputs_of_8"][0].clone()

        def once() -> Any:
            after = torch.tanh(T["state"] @ weight + T["input"])
            moved = (after - T["state"]).abs().max()
            T["state"].copy_(after)
            return moved

        once()
        torch.cuda.synchronize()
        T["weight_of_state"], T["fixed_point"] = weight, torch.cuda.CUDAGraph()
        with torch.cuda.graph(T["fixed_point"]):
            T["moved"] = once()
    T["fixed_point"].replay()
    solve(0)
    passes = Stretches(d, 0)
    forward(60)
    passes.begin()
    for _ in range(200):
        T["fixed_point"].replay()
    passes.end()
    torch.cuda.synchronize()
    T["pass_ns"] = passes.read() // 200


def solve(request: int) -> int:
    """Goes on until a pass moves the state by less than a ten thousandth: how many passes it took."""
    T["input"].copy_(T["inputs_of_8"][request % 8])
    T["state"].zero_()
    count, moves = 0, 1.0
    while moves >= 1e-4 and count < 60:
        T["fixed_point"].replay()
        moves, count = T["moved"].item(), count + 1
    return count


@seventeenth(
    line=WAITING,
    or_lines=(SUBMITTING, PYTHON),  # between two passes the thread wakes, compares and submits
    also=("synchronisation", "gpu_starved", "python_or_gil_bound", "small_copies", "pageable_memory", "wasted_stores"),
    like=("launch_queue_saturation", "cpu_starved", "allocation_on_hot_path", "redundant_loads", "slow_tier"),
    prepare=ready_iteration,
    needs_gpu=True,
)
def torch_a_fixed_point_whose_graph_is_replayed_until_item_says_that_it_has_converged(d: Device) -> Truth:
    """An equilibrium model replays a graph of six small kernels, asks `moved.item()` how far it went, and goes on.

    A pass takes the device some 20 us. Then the number comes to the host, for which the thread is woken, and only then
    it replays the graph, so for as long as that takes there is nothing on the device. How long a pass takes was
    measured before, 200 of them in a row behind a long kernel.
    """
    lost, passes, request = 0, 0, 0
    d.spent.restart()
    for request in turns():
        begin = now()
        count = solve(request)
        lost += max(now() - begin - count * T["pass_ns"], 0)
        passes += count
    d.spent.add(WAITING, lost)
    d.spent.stop()
    if passes < 3 * (request + 1) or T["moved"].item() >= 1e-4:
        raise RuntimeError("the iteration has not converged as it should")
    return {}


class Lines:
    """A data set of lines of text, each of 300 numbers, which a sample is made of in Python."""

    words = 300

    def __init__(self) -> None:
        draw = random.Random(171)
        self.lines = [" ".join(map(str, draw.choices(range(32_000), k=self.words))) for _ in range(1_024)]

    def __len__(self) -> int:
        return len(self.lines)

    def __getitem__(self, number: int) -> Any:
        import torch

        ids = [int(word) for word in self.lines[number].split()]
        return torch.tensor(ids)


def ready_loader(d: Device) -> None:
    """A loader of torch's own without workers, and a table of embeddings on the device."""
    import torch
    from torch.utils.data import DataLoader

    ready(d)
    if "loader" not in T:
        T["loader"] = DataLoader(Lines(), batch_size=64, shuffle=True, num_workers=0)  # type: ignore[arg-type]
        T["embeddings"] = torch.randn(32_000, 4096, device="cuda", dtype=torch.bfloat16)
    for _, batch in zip(range(3), endless(), strict=False):
        rows(batch.to("cuda"))[0, 0].item()
        rows(batch.pin_memory().to("cuda", non_blocking=True))
    torch.cuda.synchronize()


def endless() -> Iterator[Any]:
    """Batches of the loader, over and over."""
    while True:
        yield from T["loader"]


def rows(ids: Any) -> Any:
    """The embeddings of a batch's first 4,096 ids, multiplied once."""
    return T["embeddings"][ids.flatten()[:4096]] @ T["w"]


@seventeenth(
    line=PYTHON,
    or_lines=(ELSEWHERE,),  # a recorder of calls alone sees a thread outside of CUDA
    also=("synchronisation", "gpu_starved", "python_or_gil_bound", "pageable_memory", "wasted_stores"),
    like=("small_copies", "redundant_loads", "cpu_starved", "slow_tier", "launch_queue_saturation"),
    prepare=ready_loader,
    needs_gpu=True,
)
def torch_a_data_loader_without_workers_whose_samples_are_made_by_python_between_steps(d: Device) -> Truth:
    """A `DataLoader` with `num_workers=0` makes the next 64 samples when the loss of a step of 1 ms has been read.

    A sample is a line of 300 numbers, which Python splits and turns into integers: 2 ms or more for a batch, in the
    thread that trains. The loss was waited for and the step is launched when the batch is there, so nothing is on the
    device meanwhile. Of the 2 ms a few hundredths are the copy of the ids.
    """
    idle, losses = Stretches(d, 0), 0.0
    d.spent.restart()
    for _, batch in zip(turns(), endless(), strict=False):
        ids = batch.to("cuda")
        idle.end()
        made = rows(ids)
        forward(4)
        idle.begin()
        losses += made[0, 0].item()
        idle.read()
    d.spent.add(PYTHON, idle.ns)
    d.spent.stop()
    return {}


def ready_segments(d: Device) -> None:
    """Four segments of 64 MiB in plain memory, as a store would share them, and a place on the device."""
    import torch

    ready(d)
    if "segments" not in T:
        T["segments"] = [torch.randn(4096, 8192, device="cuda", dtype=torch.bfloat16).to("cpu") for _ in range(4)]
        T["arrived"] = torch.empty(4096, 8192, dtype=torch.bfloat16, device="cuda")
    for segment in T["segments"][:2]:
        registered(segment)
        T["arrived"].copy_(segment, non_blocking=True)
        T["x"] @ T["arrived"]
        torch.cuda.synchronize()
        given_back(segment)


def registered(segment: Any) -> None:
    import torch

    if int(torch.cuda.cudart().cudaHostRegister(segment.data_ptr(), segment.nbytes, 0)):
        raise RuntimeError("a segment could not be registered")


def given_back(segment: Any) -> None:
    import torch

    if int(torch.cuda.cudart().cudaHostUnregister(segment.data_ptr())):
        raise RuntimeError("a segment could not be given back")


@seventeenth(
    "allocation_on_hot_path",
    line=ALLOCATING,
    also=("gpu_starved", "synchronisation", "pinning_stall", "context_lock_stall", "weights_not_overlapped"),
    like=("pageable_memory", "slow_tier", "launch_queue_saturation", "small_copies", "cpu_starved", "link_bound"),
    prepare=ready_segments,
    needs_gpu=True,
)
def torch_segments_registered_by_torch_s_cudart_for_one_load_each(d: Device) -> Truth:
    """For each request a segment of 64 MiB is registered by `torch.cuda.cudart()`, loaded once, and given back.

    The load takes the link 1.2 ms and the request's products 2 ms. The thread registers before it launches either, and
    gives back when it has waited for both, so nothing is on the device in the two calls, which take several
    milliseconds for 16,384 pages. Four segments take turns.
    """
    import torch

    lost, request = 0, 0
    d.spent.restart()
    for request in turns():
        segment = T["segments"][request % 4]
        begin = now()
        registered(segment)
        lost += now() - begin
        T["arrived"].copy_(segment, non_blocking=True)
        for _ in range(5):
            T["x"] @ T["arrived"]
        torch.cuda.synchronize()
        begin = now()
        given_back(segment)
        lost += now() - begin
    d.spent.add(ALLOCATING, lost)
    d.spent.stop()
    if T["arrived"][-1, -16:].tolist() != T["segments"][request % 4][-1, -16:].tolist():
        raise RuntimeError("other numbers have come than were sent")
    return {"allocation_on_hot_path": lost}


def ready_optimizer(d: Device) -> None:
    """A deep network of small layers, its optimizer without `foreach`, and how long the device takes for one step."""
    import torch

    ready(d)
    if "deep" not in T:
        layers = [torch.nn.Linear(256, 256, device="cuda") for _ in range(30)]
        T["deep"] = torch.nn.Sequential(*[part for layer in layers for part in (layer, torch.nn.ReLU())])
        T["adamw"] = torch.optim.AdamW(T["deep"].parameters(), lr=1e-5, foreach=False, fused=False)
        T["seen_by_deep"] = [torch.randn(128, 256, device="cuda") for _ in range(4)]
    for step in range(3):
        train_deep(step).item()
    kernels, took = Stretches(d, 0), list[int]()
    for step in range(3):
        forward(150)  # the device is busy while all of a step is submitted
        kernels.begin()
        deep_loss(step).backward()
        kernels.end()
        torch.cuda.synchronize()
        forward(150)
        kernels.begin()
        T["adamw"].step()
        kernels.end()
        torch.cuda.synchronize()
        T["adamw"].zero_grad()
        took.append(kernels.read())
        kernels.ns = 0
    T["deep_ns"] = min(took)


def deep_loss(step: int) -> Any:
    return T["deep"](T["seen_by_deep"][step % 4]).square().mean()


def train_deep(step: int) -> Any:
    """Forward, backward and the optimizer, one parameter after another."""
    loss = deep_loss(step)
    loss.backward()
    T["adamw"].step()
    T["adamw"].zero_grad()
    return loss.detach()


@seventeenth(
    line=SUBMITTING,
    or_lines=(PYTHON, ELSEWHERE),  # the calls are made one by one out of Python and out of autograd's thread
    also=("gpu_starved", "python_or_gil_bound", "synchronisation", "pageable_memory"),
    like=("small_copies", "launch_queue_saturation", "cpu_starved", "allocation_on_hot_path", "aliased_stream"),
    prepare=ready_optimizer,
    needs_gpu=True,
)
def torch_a_deep_network_of_small_layers_whose_adamw_goes_over_its_parameters_one_by_one(d: Device) -> Truth:
    """Thirty layers of 256 x 256 are trained, and `AdamW(foreach=False)` launches eight kernels for each of 60 tensors.

    Each of a step's 700 kernels takes the device 2 to 5 us, and Python and torch 6 us or more to launch: the device is
    done with one before it has the next. How long it takes for all of them was measured before, behind a long kernel;
    the rest of a step is lost. The loss is read once in a step.
    """
    lost, losses, step = 0, 0.0, 0
    d.spent.restart()
    for step in turns():
        begin = now()
        losses += train_deep(step).item()
        lost += max(now() - begin - T["deep_ns"], 0)
    d.spent.add(SUBMITTING, lost)
    d.spent.stop()
    if not losses < 1e9:
        raise RuntimeError("the loss is no number")
    return {}


def ready_files(d: Device) -> None:
    """Five files with an adapter each, written by `torch.save`."""
    import torch

    ready(d)
    if "adapters_in_files" not in T:
        T["adapters_in_files"] = tempfile.TemporaryDirectory()
        for number in range(5):
            made = torch.randn(3072, 4096, device="cuda", dtype=torch.bfloat16).to("cpu")
            torch.save({"adapter": made, "number": number}, adapter_file(number))
        T["adapter_of_file"] = torch.empty(3072, 4096, dtype=torch.bfloat16, device="cuda")
    for number in range(5):
        T["adapter_of_file"].copy_(torch.load(adapter_file(number), weights_only=True)["adapter"])
        T["x"] @ T["adapter_of_file"].T
    torch.cuda.synchronize()


def adapter_file(number: int) -> Path:
    return Path(T["adapters_in_files"].name) / f"adapter_{number}.pt"


@seventeenth(
    line=TIER,
    or_lines=(ELSEWHERE, PYTHON),  # torch reads the file in C++; of calls alone, it is outside of CUDA
    also=("slow_tier", "pageable_memory", "gpu_starved", "synchronisation", "python_or_gil_bound"),
    like=("cpu_starved", "small_copies", "allocation_on_hot_path", "launch_queue_saturation", "redundant_loads"),
    prepare=ready_files,
    needs_gpu=True,
    undecided_in=DEVICE,  # their recordings hold CUDA's calls alone
)
def torch_an_adapter_read_by_torch_load_before_each_batch(d: Device) -> Truth:
    """Before each batch of 1 ms `torch.load` reads one of five adapters, 24 MiB, out of its file into new memory.

    The batch before was waited for, and the adapter goes to the device when it has been read, in one copy that is
    shorter than the reading: to read it is to have its pages made and to copy them out of the page cache.
    """
    import torch

    batch, last = 0, None
    d.spent.restart()
    for batch in turns():
        with d.spent.on(TIER):
            last = torch.load(adapter_file(batch % 5), weights_only=True)
        T["adapter_of_file"].copy_(last["adapter"])
        T["x"] @ T["adapter_of_file"].T
        forward(4)
        torch.cuda.synchronize()
    d.spent.stop()
    if last is None or last["number"] != batch % 5:
        raise RuntimeError("another adapter was read than was asked for")
    if T["adapter_of_file"][-1, -16:].tolist() != last["adapter"][-1, -16:].tolist():
        raise RuntimeError("other numbers have come than were sent")
    T.pop("adapters_in_files").cleanup()
    return {}
