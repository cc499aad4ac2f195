"""Sixth programs that are healthy: tokens, a polled socket, promotion, bursts, swaps, checkpoints, training."""

from __future__ import annotations

import random
import select
import socket
import time
from queue import Queue
from typing import Any

from accounts import Pool, Stretches, going, paced, stamp, think
from device import D2H, H2D, Device
from fresh_copies import clear
from later_torch import T, ready
from other_shapes import gate
from registry import COMPUTING, DEVICE, NOTHING_TO_DO, KiB, Truth, in_thread, sixth
from unseen_copies import same


@sixth(
    line=COMPUTING,
    like=("python_or_gil_bound", "gpu_starved", "synchronisation", "cpu_starved", "small_copies"),
    also=("wasted_stores",),
)
def tokens_handled_in_python_while_the_next_step_runs(d: Device) -> Truth:
    """Half of the time the thread computes in Python, on the tokens of the step before, while one of 2.4 ms runs."""
    for step in going():
        stamp(d, step % 8 * 4 * KiB, 1 * KiB, step)
        d.copy(d.device, d.host + step % 8 * 4 * KiB, 4 * KiB, H2D, d.compute)
        for _ in range(4):
            d.launch(600_000)
        d.copy(d.host + d.size - 4096 * (1 + step % 4), d.device + d.size - 4096, 1 * KiB, D2H, d.compute)
        paced(d, step, 1)
        think(1_200)
    d.sync(d.compute)
    d.spent.stop()
    return {}


@sixth(
    line=NOTHING_TO_DO,
    like=("gpu_starved", "cpu_starved", "python_or_gil_bound", "synchronisation", "slow_tier"),
    also=("wasted_stores",),
    undecided_in=DEVICE,  # their recordings hold CUDA's calls alone
)
def a_socket_polled_every_ten_milliseconds_for_requests(d: Device) -> Truth:
    """A server polls its socket for 10 ms at a time, mostly in vain; for a request it decodes 12 steps, two ahead."""
    server, client = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    asked = select.poll()
    asked.register(server, select.POLLIN)

    def ask() -> None:
        for pause in (70, 35, 90, 55, 25, 80, 45, 65) * 3:
            time.sleep(pause / 1_000)
            client.send(b"?" * 128)
            client.recv(128)
        client.send(b"")

    thread = in_thread(ask)
    d.spent.restart()
    while True:
        with d.spent.on(NOTHING_TO_DO):
            ready_ones = asked.poll(10)
        if not ready_ones:
            continue
        if not server.recv(128):
            break
        for i in range(12):
            stamp(d, i * 4096, 512, i)
            d.copy(d.device, d.host + i * 4096, 4096, H2D, d.compute)
            d.launch(1_300_000)
            d.copy(d.host + d.size - 4096 * (1 + i % 4), d.device + d.size - 4096, 512, D2H, d.compute)
            paced(d, i, 2)
        d.sync(d.compute)
        server.send(b"!" * 128)
    d.spent.stop()
    thread.join()
    server.close()
    client.close()
    return {}


@sixth(
    line=COMPUTING,
    like=(
        *("small_copies", "unmerged_neighbours", "python_or_gil_bound", "context_lock_stall", "aliased_stream"),
        *("redundant_loads", "load_not_ordered", "head_of_line_copies"),
    ),
)
def small_blocks_promoted_by_a_thread_a_step_ahead(d: Device) -> Truth:
    """A thread brings the next step's 48 scattered blocks of 64 KiB one by one while a step of 2.4 ms computes."""
    pool, each, sets, chance = Pool(d, 64 * KiB), 48, 4, random.Random(101)
    wanted, given = Queue[int](), Queue[list[int]]()

    def promote() -> None:
        while (step := wanted.get()) >= 0:
            blocks = chance.sample(range(pool.count), each)
            slots = [step % sets * each + i for i in range(each)]
            d.rapid(pool.places(blocks, slots), pool.size, H2D, d.copies[2])
            d.record(step % 8, d.copies[2])
            given.put(blocks)

    thread, step, blocks = in_thread(promote), 0, list[int]()
    wanted.put(0)
    for step in going():
        blocks = given.get()
        d.check(d.lib.cudaStreamWaitEvent(d.compute, d.events[step % 8], 0))
        for _ in range(6):
            d.launch(400_000)
        wanted.put(step + 1)  # whose slots were used four steps ago
        paced(d, step, 2)
    d.sync(d.compute)
    d.spent.stop()
    given.get()
    wanted.put(-1)
    thread.join()
    same(d, d.device + (step % sets * each + 7) * pool.size, d.host + blocks[7] * pool.size, pool.size)
    return {}


@sixth(
    line=COMPUTING,
    like=("head_of_line_copies", "link_bound", "weights_not_overlapped", "load_not_ordered", "gpu_starved"),
    also=("wasted_stores", "unmerged_neighbours"),
)
def a_burst_of_loads_that_joins_when_it_is_there(d: Device) -> Truth:
    """Each eighth step a prefix of twenty blocks is asked for; it joins at a later step, which finds it there."""
    pool, each, request, asked, joined = Pool(d, d.bytes_of(60)), 20, 0, False, 0
    for step in going():
        if step % 8 == 0 and not asked:
            d.order(d.copies[3], d.compute, request % 32)  # who had the slots has computed
            for i in range(each):
                pool.fetch(request % 2 * each + i, request * each + i, d.copies[3])
            d.record(40 + request % 32, d.copies[3])
            asked = True
        elif asked and not d.lib.cudaEventQuery(d.events[40 + request % 32]):
            d.check(d.lib.cudaStreamWaitEvent(d.compute, d.events[40 + request % 32], 0))
            request, joined, asked = request + 1, joined + 1, False
        for _ in range(3):
            d.launch(500_000)
        d.copy(d.host + d.size - 4096 * (1 + step % 4), d.device + d.size - 4096, 1 * KiB, D2H, d.compute)
        paced(d, step, 1)
    d.sync(d.compute)
    d.spent.stop()
    if not joined:
        raise RuntimeError("no prefix ever came")
    return {}


@sixth(
    line=COMPUTING,
    like=("link_bound", "synchronisation", "store_not_ordered", "load_not_ordered", "weights_not_overlapped"),
    also=("wasted_stores", "unmerged_neighbours"),
)
def kv_swapped_out_and_in_at_once_beside_a_long_prefill(d: Device) -> Truth:
    """While a chunk of 4 ms computes, the chunk before leaves and the next one's blocks come, 0.65 ms each way."""
    pool, each, chunk = Pool(d, d.bytes_of(80)), 8, 0
    loads, stores = d.copies[0], d.copies[1]
    more = pool.count - 1 - 2 * each  # the homes of what comes

    def bring(chunk: int) -> None:
        for i in range(each):
            pool.fetch((2 + chunk % 2) * each + i, 2 * each + (chunk * each + i) % more, loads)
        d.record(40 + chunk % 2, loads)

    bring(0)
    d.sync(loads)
    d.spent.restart()
    for chunk in going():
        mine = chunk % 2
        d.order(loads, d.compute, chunk % 8)  # the last chunk has computed, whose slots these are
        d.check(d.lib.cudaStreamWaitEvent(d.compute, d.events[40 + mine], 0))
        bring(chunk + 1)
        if chunk > 1:
            d.check(d.lib.cudaStreamWaitEvent(d.compute, d.events[44 + mine], 0))
        clear(d, d.device + mine * each * pool.size, chunk % 251, each * pool.size, d.compute)
        for _ in range(10):
            d.launch(400_000)
        d.order(stores, d.compute, 16 + chunk % 8)
        for i in range(each):
            home = d.host + (mine * each + i) * pool.size
            d.copy(home, d.device + (mine * each + i) * pool.size, pool.size, D2H, stores)
        d.record(44 + mine, stores)
        paced(d, chunk, 1)
    d.sync(d.compute)
    d.spent.stop()
    d.synchronize()
    home = d.host + (2 * each + ((chunk + 1) * each + 5) % more) * pool.size
    same(d, d.device + ((2 + (chunk + 1) % 2) * each + 5) * pool.size, home, pool.size)
    return {}


@sixth(
    line=COMPUTING,
    like=("fence_before_copies", "store_not_ordered", "link_bound", "synchronisation", "launch_queue_saturation"),
    also=("wasted_stores", "unmerged_neighbours"),
)
def a_callback_of_the_offload_stream_that_no_kernel_waits_for(d: Device) -> Truth:
    """Behind a step's stores a callback of 0.5 ms tells the scheduler, on their own stream; the model's goes on."""
    pool, each, sets = Pool(d, d.bytes_of(70)), 5, 4
    for step in going():
        mine = step % sets
        if step >= sets:  # what left from these slots four steps ago was told of long ago
            d.check(d.lib.cudaStreamWaitEvent(d.compute, d.events[100 + mine], 0))
        clear(d, d.device + mine * each * pool.size, step % 251, each * pool.size, d.compute)
        for _ in range(4):
            d.launch(500_000)
        d.order(d.copies[1], d.compute, step % 32)
        for i in range(each):
            home = d.host + (step * each + i) % pool.count * pool.size
            d.copy(home, d.device + (mine * each + i) * pool.size, pool.size, D2H, d.copies[1])
        gate(d, 500, d.copies[1])
        d.record(100 + mine, d.copies[1])
        paced(d, step, 2)
    d.sync(d.compute)
    d.spent.stop()
    d.synchronize()
    return {}


@sixth(
    line=COMPUTING,
    like=("synchronisation", "link_bound", "store_not_ordered", "fence_before_copies", "gpu_starved"),
    also=("wasted_stores", "unmerged_neighbours"),
)
def a_checkpoint_that_leaves_before_the_next_optimizer_step(d: Device) -> Truth:
    """Each fourth step's 18 tensors leave beside the next forward and backward pass; its optimizer waits for them."""
    pool, tensors, step = Pool(d, d.bytes_of(70)), 18, 0
    for step in going():
        for _ in range(5):
            d.launch(600_000)  # forward, backward
        if step % 4 == 1:
            d.check(d.lib.cudaStreamWaitEvent(d.compute, d.events[100], 0))
        clear(d, d.device, step % 251, tensors * pool.size, d.compute)
        d.launch(200_000)  # the optimizer
        if step % 4 == 0:
            d.order(d.copies[1], d.compute, step // 4 % 32)
            for tensor in range(tensors):
                home = d.host + (step // 4 % 2 * tensors + tensor) * pool.size
                d.copy(home, d.device + tensor * pool.size, pool.size, D2H, d.copies[1])
            d.record(100, d.copies[1])
        paced(d, step, 1)
    d.sync(d.compute)
    d.spent.stop()
    d.synchronize()
    return {}


def ready_training(d: Device) -> None:
    """Makes a small network, its optimizer and batches, and trains a few steps: no first call comes later."""
    import torch

    ready(d)
    if "network" not in T:
        T["network"] = [torch.nn.Parameter(T["w"].clone()) for _ in range(2)]
        T["optimizer"] = torch.optim.SGD(T["network"], lr=1e-6)
        T["batches"] = [torch.randn(4096, 4096).to(torch.bfloat16).pin_memory() for _ in range(3)]
        T["inputs"] = [torch.empty_like(T["x"]) for _ in range(2)]
    for step in range(4):
        T["inputs"][step % 2].copy_(T["batches"][step % 3], non_blocking=True)
        train(step).item()
    torch.cuda.synchronize()


def train(step: int) -> Any:
    """Forward, backward, the optimizer: five products of 4096 x 4096 x 4096; the loss, on the device."""
    first, second = T["network"]
    loss = ((T["inputs"][step % 2] @ first).relu() @ second).float().square().mean()
    loss.backward()
    T["optimizer"].step()
    T["optimizer"].zero_grad()
    return loss.detach()


@sixth(
    line=COMPUTING,
    like=("synchronisation", "gpu_starved", "python_or_gil_bound", "weights_not_overlapped", "load_not_ordered"),
    prepare=ready_training,
    needs_gpu=True,
)
def torch_training_whose_loss_is_read_every_tenth_step(d: Device) -> Truth:
    """Batches of 32 MiB come a step ahead on a side stream; the loss stays on the device but for each tenth step."""
    import torch

    compute, side, events = torch.cuda.current_stream(), T["stream"], T["events"]
    products, losses = Stretches(d, 0), 0.0

    def bring(step: int) -> None:
        slot = step % 2
        with torch.cuda.stream(side):
            if step > 1:
                side.wait_event(events[40 + slot])
            T["inputs"][slot].copy_(T["batches"][step % 3], non_blocking=True)
            events[42 + slot].record(side)

    bring(0)
    for step in going():
        bring(step + 1)
        compute.wait_event(events[42 + step % 2])
        products.begin()
        loss = train(step)
        products.end()
        events[40 + step % 2].record(compute)
        if step % 10 == 9:
            losses += loss.item()
            products.read()
    torch.cuda.synchronize()
    d.kernel_ns += products.read()
    d.spent.stop()
    return {}
