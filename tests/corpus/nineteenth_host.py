"""Nineteenth programs, in torch, whose device waits for the host: n-grams, experts, rooms, threads, updates, keys."""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from accounts import Stretches, turns
from device import Device, now
from later_torch import T, forward, ready
from nineteenth_copies import measured
from registry import ALLOCATING, ELSEWHERE, PYTHON, SUBMITTING, WAITING, Truth, in_thread, nineteenth
from seventeenth_copies import behind, pinned

MiB = 1 << 20


def ready_ngrams(d: Device) -> None:
    """The tokens of 24 sequences, 400 each out of a small vocabulary, and a head."""
    import torch

    ready(d)
    if "head" not in T:
        draw = random.Random(191)
        T["head"] = torch.randn(4096, 32_000, device="cuda", dtype=torch.bfloat16) / 64
        T["sequences"] = [deque(draw.choices(range(48), k=400), 400) for _ in range(24)]
    rows, columns = forbidden()
    for _ in range(3):
        rows, columns = generate(rows, columns, Stretches(d, 0))
    torch.cuda.synchronize()


def ends_of_ngrams(ids: list[int], size: int = 3) -> list[int]:
    """What has followed a sequence's last two tokens before, as a processor of logits finds it out."""
    seen = dict[tuple[int, ...], list[int]]()
    for gram in zip(*[ids[at:] for at in range(size)], strict=False):
        before = tuple(gram[:-1])
        seen[before] = [*seen.get(before, []), gram[-1]]
    return seen.get(tuple(ids[1 - size :]), [])


def forbidden() -> tuple[list[int], list[int]]:
    """Which tokens which sequences must not have next; there is always one."""
    rows, columns = [0], [0]
    for row, sequence in enumerate(T["sequences"]):
        ends = ends_of_ngrams(list(sequence))
        rows += [row] * len(ends)
        columns += ends
    return rows, columns


def generate(rows: list[int], columns: list[int], idle: Stretches) -> tuple[list[int], list[int]]:
    """One token of each sequence, without those that are forbidden; what is forbidden next."""
    import torch

    places = torch.tensor([rows, columns])
    idle.end()
    where = places.to("cuda")
    forward(4)
    logits = T["few"][:24] @ T["head"]
    logits[where[0], where[1]] = -float("inf")
    chances = torch.softmax(logits.float(), -1)
    tokens = chances.div_(torch.empty_like(chances).exponential_()).argmax(-1)
    idle.begin()
    for sequence, token in zip(T["sequences"], tokens.tolist(), strict=True):
        sequence.append(token % 48)
    return forbidden()


@nineteenth(
    line=PYTHON,
    or_lines=(ELSEWHERE,),  # a recorder of calls alone sees a thread outside of CUDA
    also=("synchronisation", "gpu_starved", "python_or_gil_bound", "pageable_memory", "small_copies", "wasted_stores"),
    like=("redundant_loads", "cpu_starved", "slow_tier", "launch_queue_saturation", "allocation_on_hot_path"),
    prepare=ready_ngrams,
    needs_gpu=True,
)
def torch_ngrams_of_all_sequences_collected_in_a_dict_before_the_next_step_is_launched(d: Device) -> Truth:
    """When a step has its tokens, Python collects the 3-grams of 24 sequences anew, to forbid those that would repeat.

    The tokens are read by `tolist()`, and the next step of 1 ms is launched when 24 dicts of 398 3-grams have been
    made, which takes Python 2 ms or more: nothing is on the device meanwhile. What is forbidden goes there in one copy
    of some thousand bytes, ahead of the products.
    """
    import torch

    rows, columns = forbidden()
    idle = Stretches(d, 0)
    d.spent.restart()
    for _ in turns():
        rows, columns = generate(rows, columns, idle)
        idle.read()
    torch.cuda.synchronize()
    d.spent.add(PYTHON, idle.read())
    d.spent.stop()
    if len(rows) != len(columns) or max(columns) > 47:
        raise RuntimeError("other tokens are forbidden than could be")
    return {}


EXPERTS = 32


def ready_experts(d: Device) -> None:
    """A layer of 32 small experts, and how long the device takes for it when nothing has to be asked."""
    import torch

    ready(d)
    if "experts" not in T:
        made = {"device": "cuda", "dtype": torch.bfloat16}
        T["experts"] = [[torch.randn(512, 512, **made) / 22 for _ in range(2)] for _ in range(EXPERTS)]
        T["router"] = torch.randn(512, EXPERTS, **made)
        T["tokens_of_8"] = [torch.randn(64, 512, **made) for _ in range(8)]
    for step in range(3):
        mixture(step, lambda hit: bool(hit.item()))
    T["mixture_ns"] = measured(d, lambda: mixture(0, lambda _: True))


def mixture(step: int, asked: Callable[[Any], bool]) -> Any:
    """A layer of experts, each of which computes if any token has chosen it."""
    import torch

    x = T["tokens_of_8"][step % 8]
    shares = torch.softmax(x @ T["router"], -1)
    chosen, out = shares.topk(4).indices, torch.zeros_like(x)
    for number, (up, down) in enumerate(T["experts"]):
        of_this = (chosen == number).any(-1, keepdim=True)
        if not asked(of_this.any()):
            continue
        made = torch.nn.functional.silu(x @ up) @ down
        out += made * (shares[:, number : number + 1] * of_this)
    return out


@nineteenth(
    line=SUBMITTING,
    or_lines=(WAITING, PYTHON),  # between two experts the thread wakes, asks, and submits a few small kernels
    also=("synchronisation", "gpu_starved", "python_or_gil_bound", "pageable_memory", "small_copies", "wasted_stores"),
    like=("launch_queue_saturation", "cpu_starved", "allocation_on_hot_path", "redundant_loads", "slow_tier"),
    prepare=ready_experts,
    needs_gpu=True,
)
def torch_a_mixture_of_32_experts_each_of_which_is_asked_by_item_whether_a_token_chose_it(d: Device) -> Truth:
    """A layer goes over its 32 experts in a loop, and `hit.any().item()` says for each whether it has to compute.

    An expert's nine kernels take the device 2 to 4 us each. It has nothing else while the thread is woken with the
    answer and launches the next one, at 5 us or more a kernel. How long all take without being asked was measured
    before, behind long kernels; the rest of a layer is lost.
    """
    lost, out = 0, None
    d.spent.restart()
    for step in turns():
        begin = now()
        out = mixture(step, lambda hit: bool(hit.item()))
        lost += max(now() - begin - T["mixture_ns"], 0)
    d.spent.add(SUBMITTING, lost)
    d.spent.stop()
    if out is None or not out.float().abs().max().item() > 0:
        raise RuntimeError("no expert has computed")
    return {}


ROOMS, LEAST, MOST = 16, 128 * MiB, 880 * MiB  # what a turn takes: tensors of so many bytes


def ready_rooms(d: Device) -> None:
    """How long the allocator takes for 16 tensors that are larger than any it has, and how many products are half."""
    import torch

    ready(d)
    if "turn_products" not in T:
        free = torch.cuda.memory_reserved() + (16 << 30)
        torch.cuda.set_per_process_memory_fraction(min(free / torch.cuda.mem_get_info()[1], 1.0))
        took = list[int]()
        for turn in range(8):
            begin = now()
            held = rooms(LEAST // 2 + turn * 2 * MiB)
            took.append(now() - begin)
            held[0][:4096].fill_(turn)
            torch.cuda.synchronize()
            del held
        T["turn_products"] = max(sorted(took)[4] // 2 // (measured(d, lambda: forward(20)) // 20), 1)
    torch.cuda.empty_cache()
    forward(4)
    torch.cuda.synchronize()


def rooms(size: int) -> list[Any]:
    """What attention needs for a turn of this length."""
    import torch

    return [torch.empty(size, dtype=torch.uint8, device="cuda") for _ in range(ROOMS)]


@nineteenth(
    "allocation_on_hot_path",
    line=ALLOCATING,
    or_lines=(ELSEWHERE,),
    also=("gpu_starved", "synchronisation", "context_lock_stall", "python_or_gil_bound", "failed_calls"),
    like=("pageable_memory", "slow_tier", "launch_queue_saturation", "small_copies", "cpu_starved", "redundant_loads"),
    prepare=ready_rooms,
    needs_gpu=True,
)
def torch_a_conversation_whose_turns_get_longer_so_that_no_block_of_the_allocator_s_ever_fits(d: Device) -> Truth:
    """Each turn of a conversation makes 16 tensors for attention, 2 MiB longer each than those of the turn before.

    So none of the blocks that torch's allocator has kept is large enough: it calls cudaMalloc 16 times, and cudaFree
    for all that it has kept when a limit of 16 GiB is met. The turn before was waited for and this one's products are
    launched when all tensors are there, so the device has nothing meanwhile. How long 16 calls take was measured
    first, and a turn has products for half of that.
    """
    import torch

    lost, size, turn, held = 0, LEAST, 0, list[Any]()
    d.spent.restart()
    for turn in turns():
        begin = now()
        held.clear()
        if size > MOST:  # another conversation begins
            size = LEAST
            torch.cuda.empty_cache()
        held = rooms(size)
        lost += now() - begin
        held[0][:4096].fill_(turn % 251)
        forward(T["turn_products"])
        torch.cuda.synchronize()
        size += 2 * MiB
    d.spent.add(ALLOCATING, lost)
    d.spent.stop()
    if held[0][4095].item() != turn % 251:
        raise RuntimeError("a turn has not been written")
    held.clear()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(1.0)
    return {"allocation_on_hot_path": lost}


def ready_beside(d: Device) -> None:
    """Words for a detokenizer, and how long the device takes for a step."""
    import torch

    ready(d)
    T.setdefault("words", [f" w{number:x}" for number in range(4_096)])
    T["step_ns"] = measured(d, lambda: forward(8).argmax(-1)[:64])
    torch.cuda.synchronize()


def text_of(seed: int, length: int) -> str:
    """The text of a sequence of so many tokens, put together in Python word by word."""
    words, text, at = T["words"], list[str](), seed
    for _ in range(length):
        at = (at * 1_103 + 12_345) % 4_096
        word = words[at]
        text.append(word if word[-1] != "f" else word.upper())
    return "".join(text)


@nineteenth(
    line=PYTHON,
    or_lines=(ELSEWHERE, SUBMITTING, WAITING),  # where the thread stands when another one has the interpreter
    also=("synchronisation", "gpu_starved", "python_or_gil_bound", "pageable_memory", "cpu_starved", "wasted_stores"),
    like=("small_copies", "launch_queue_saturation", "allocation_on_hot_path", "redundant_loads", "slow_tier"),
    prepare=ready_beside,
    needs_gpu=True,
)
def torch_a_detokenizer_s_thread_that_takes_the_interpreter_after_each_operator_of_a_step(d: Device) -> Truth:
    """Another thread detokenizes in pure Python without a pause, while this one launches steps of eight products.

    Torch gives the interpreter's lock back in each operator, the other thread takes it, and gives it up after the 5 ms
    of Python's switch interval at the earliest when it is asked to. A product takes the device 0.2 ms, so it has
    nothing to do for nearly all of each 5 ms. How long a step takes the device was measured before.
    """
    over, lengths, lost = threading.Event(), list[int](), 0

    def detokenize() -> None:
        while not over.is_set():
            lengths.append(len(text_of(len(lengths), 2_000)))

    d.spent.restart()
    thread = in_thread(detokenize)
    try:
        for _ in turns():
            begin = now()
            forward(8).argmax(-1)[:64].tolist()
            lost += max(now() - begin - T["step_ns"], 0)
        d.spent.add(PYTHON, lost)
        d.spent.stop()
    finally:
        over.set()
        thread.join()
    if not lengths:
        raise RuntimeError("nothing was detokenized")
    return {}


def ready_servers(d: Device) -> None:
    """Two threads that serve, each of which has launched before."""
    import torch

    ready_beside(d)
    T.setdefault("servers", ThreadPoolExecutor(2))
    both = threading.Barrier(2)

    def begin() -> None:
        both.wait(20)
        for _ in range(3):
            forward(5).argmax(-1)[:64].tolist()
        both.wait(20)

    for future in [T["servers"].submit(begin) for _ in range(2)]:
        future.result()
    torch.cuda.synchronize()


@nineteenth(
    line=PYTHON,
    or_lines=(ELSEWHERE, WAITING),  # one thread is in Python, the other waits for a lock of Python's
    also=("synchronisation", "gpu_starved", "python_or_gil_bound", "pageable_memory", "wasted_stores"),
    like=("small_copies", "launch_queue_saturation", "cpu_starved", "allocation_on_hot_path", "redundant_loads"),
    prepare=ready_servers,
    needs_gpu=True,
)
def torch_two_servers_threads_whose_lock_on_the_model_covers_their_search_for_stop_strings(d: Device) -> Truth:
    """Two threads serve with one model, whose lock each keeps until it has looked for stop strings in its texts.

    With the lock in hand a thread computes for 1 ms, reads the tokens, and puts 32 texts of 500 words together in
    Python to look for the strings, for 2 ms or more. The other thread could launch meanwhile, but for the lock: from
    the tokens to the next launch nothing is on the device, whoever launches.
    """
    import torch

    lock, idle, found = threading.Lock(), Stretches(d, 0), list[int]()

    def serve() -> None:
        for step in turns():
            with lock:
                idle.end()
                tokens = forward(5).argmax(-1)[:64]
                idle.begin()
                got = tokens.tolist()
                texts = [text_of(got[at] + step, 500) for at in range(32)]
                found.append(sum(any(stop in text for stop in ("<|end|>", "\n\n", "</s>")) for text in texts))
                idle.read()

    d.spent.restart()
    for future in [T["servers"].submit(serve) for _ in range(2)]:
        future.result()
    torch.cuda.synchronize()
    d.spent.add(PYTHON, idle.read())
    d.spent.stop()
    if sum(found):
        raise RuntimeError("a stop string was found where there is none")
    return {}


def ready_update(d: Device) -> None:
    """A trained layer of 2048 x 2048 on the device, its master and its optimizer on the CPU, and a pinned place."""
    import torch

    ready(d)
    torch.set_num_threads(4)
    if "master_of_cpu" not in T:
        T["trained"] = torch.nn.Parameter(T["w"][:2048, :2048].clone())
        T["batches_of_cpu"] = [torch.randn(4096, 2048, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
        T["master_of_cpu"] = torch.nn.Parameter(T["trained"].detach().float().to("cpu"))
        T["master_of_cpu"].grad = torch.zeros(2048, 2048)
        T["adamw_of_cpu"] = torch.optim.AdamW([T["master_of_cpu"]], lr=1e-5)
        T["gradient_home"], T["weight_home"] = pinned(2048, 2048), pinned(2048, 2048)
    for step in range(3):
        train_by_cpu(step, Stretches(d, 0))
    torch.cuda.synchronize()


def train_by_cpu(step: int, idle: Stretches) -> None:
    """A step on the device, whose gradient leaves; the CPU updates; the layer comes back."""
    import torch

    forward(5)  # the frozen part
    torch.relu(T["batches_of_cpu"][step % 3] @ T["trained"]).float().square().mean().backward()
    T["gradient_home"].copy_(T["trained"].grad, non_blocking=True)
    T["trained"].grad = None
    idle.begin()
    torch.cuda.current_stream().synchronize()
    T["master_of_cpu"].grad.copy_(T["gradient_home"])
    T["adamw_of_cpu"].step()
    T["weight_home"].copy_(T["master_of_cpu"].detach())
    idle.end()
    with torch.no_grad():
        T["trained"].copy_(T["weight_home"], non_blocking=True)


@nineteenth(
    line=PYTHON,
    or_lines=(ELSEWHERE,),  # torch computes on the CPU in C++; of calls alone, it is outside of CUDA
    also=("synchronisation", "gpu_starved", "python_or_gil_bound", "wasted_stores", "weights_not_overlapped"),
    like=("small_copies", "pageable_memory", "launch_queue_saturation", "allocation_on_hot_path", "redundant_loads"),
    prepare=ready_update,
    needs_gpu=True,
)
def torch_adamw_on_the_cpu_between_a_backward_pass_and_the_next_forward_pass(d: Device) -> Truth:
    """A gradient of 8 MiB leaves for the CPU, whose four threads update a master of 4 million numbers by `AdamW`.

    The next step begins with the layer that comes back, so the device has nothing while the CPU makes the gradient
    float32, goes over five tensors of 16 MiB a dozen times, and makes the layer bfloat16: 4 ms or more. A step's
    kernels take 1.2 ms, and its two copies the link 0.3 ms, from and to pinned memory.
    """
    import torch

    idle, step = Stretches(d, 0), 0
    d.spent.restart()
    for step in turns():
        train_by_cpu(step, idle)
        idle.read(1)
    torch.cuda.synchronize()
    d.spent.add(PYTHON, idle.read())
    d.spent.stop()
    if T["trained"][-1, -16:].tolist() != T["master_of_cpu"][-1, -16:].bfloat16().tolist():
        raise RuntimeError("the layer on the device is another than the master")
    return {}


SEQUENCES, LENGTH = 64, 512


def ready_written(d: Device) -> None:
    """Eight layers' keys of 64 sequences, where each one stands, and how long the device takes for a step."""
    import torch

    ready(d)
    if "written" not in T:
        draw = random.Random(192)
        made = {"device": "cuda", "dtype": torch.bfloat16}
        T["written"] = [torch.zeros(SEQUENCES, 32, LENGTH, 128, **made) for _ in range(8)]
        T["stand"] = [draw.randrange(LENGTH) for _ in range(SEQUENCES)]
    for step in range(3):
        write_keys(step, 8)
    T["written_ns"] = measured(d, lambda: write_keys(0, 8))


def write_keys(step: int, layers: int) -> Any:
    """A token's keys of each sequence, in each layer, to where the sequence stands."""
    keys = T["few"][:SEQUENCES] @ T["w"]
    for layer in range(layers):
        cache = T["written"][layer]
        keys = (keys @ T["w"]).view(SEQUENCES, 32, 128)
        for sequence in range(SEQUENCES):
            cache[sequence, :, (T["stand"][sequence] + step) % LENGTH] = keys[sequence]
        keys = keys.view(SEQUENCES, 4096)
    return keys


def check_keys(step: int, layer: int, keys: Any) -> None:
    """Raises unless the last layer's keys of the last sequence are where it stands."""
    there = T["written"][layer][-1, :, (T["stand"][-1] + step) % LENGTH]
    if there.flatten().tolist() != keys[-1].tolist():
        raise RuntimeError("other keys were written than were made")


@nineteenth(
    line=SUBMITTING,
    or_lines=(PYTHON, ELSEWHERE),  # the calls are made one by one out of Python
    also=("gpu_starved", "python_or_gil_bound", "synchronisation"),
    like=("small_copies", "launch_queue_saturation", "cpu_starved", "allocation_on_hot_path", "pageable_memory"),
    prepare=ready_written,
    needs_gpu=True,
)
def torch_keys_written_by_an_assignment_for_each_sequence_and_layer_of_a_step(d: Device) -> Truth:
    """A step writes its keys by `cache[sequence, :, position] = key`, for each of 64 sequences in each of 8 layers.

    Each of the 512 assignments is a kernel of 2 us over 32 rows that lie apart, for which Python indexes two tensors
    and torch launches, 8 us or more: the device is done with one before it has the next. How long it takes for a step
    was measured before, behind long kernels; the rest of a step is lost. Nobody waits for a step but two behind it.
    """
    import torch

    lost, step, keys = 0, 0, None
    d.spent.restart()
    for step in turns():
        begin = now()
        keys = write_keys(step, 8)
        behind(step)
        lost += max(now() - begin - T["written_ns"], 0)
    torch.cuda.synchronize()
    d.spent.add(SUBMITTING, lost)
    d.spent.stop()
    check_keys(step, 7, keys)
    return {}
