"""Weight offload on an NVIDIA GPU: kvprobe beside accelerate, diffusers-style streams, and copying when needed.

    python benchmarks/weights_gpu.py [--json FILE] [--report FILE.html] [--seconds 200]
    python benchmarks/weights_gpu.py --replay FILE

A Llama-like model of random bfloat16 weights (about 9 GB) runs whole on the GPU, and with 0.9, 0.5 and 0.1 of its
weights there. At each fraction all arms move the same layers, from the same pinned memory (accelerate: from pageable
memory, its own way), interleaved in one run; every arm's logits are compared with the untouched model's, bit for bit.

Printed: time a forward, the floor max(bytes moved / link peak, computation of the untouched model), the ratio to it,
and the gain of windows 1 and 2 over window 0 as predicted from the forwards with window 0 and those without copies
(`WeightOffload.without_copies`), beside the measured one. A gain is right within 10% of itself, or, where it is less
than 10% of a forward, within 1% of the forward: it cannot be measured to a tenth of itself.

`--replay FILE` predicts once more from the per-layer times that an earlier run saved with --json, without a GPU.

`--device host --layers 6 --width 128` only shows that the script itself works.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from pathlib import Path
from typing import Any

FRACTIONS = (0.9, 0.5, 0.1)
SHAPES = {"decode, 1 token": (1, 1), "prefill, 4,096 tokens": (2, 2048), "prefill, 16,384 tokens": (8, 2048)}
GIB = 1 << 30
DEVICE = "cuda"  # "cpu" with --device host


def build(layers: int, width: int) -> Any:
    """The untouched model, on the GPU."""
    import torch
    import transformers

    heads = max(width // 128, 1)
    config = transformers.LlamaConfig(
        hidden_size=width,
        intermediate_size=width * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=max(heads // 4, 1),
        vocab_size=width * 125 // 16,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
        if parameter.dim() > 1:
            parameter.normal_(0, 0.02)
    return model


def twin(model: Any) -> Any:
    """A model of the same tensors' memory: its own modules and parameters, the same bytes."""
    import torch

    memo: dict[int, Any] = {id(p): torch.nn.Parameter(p.data, p.requires_grad) for p in model.parameters()}
    memo |= {id(b): b.view_as(b) for b in model.buffers()}
    return copy.deepcopy(model, memo)


class Arm:
    """A way to run the model; `prepare` is called before its forwards of a round."""

    def __init__(self, name: str, model: Any, prepare: Any = None, times: int = 3) -> None:
        self.name, self.model, self.prepare, self.times = name, model, prepare or (lambda: None), times
        self.measured: list[float] = []


def sources(held: Any) -> dict[str, Any]:
    """Name of a parameter of an offloaded layer -> its bytes in pinned memory, as kvprobe laid them out."""
    window = held._window
    home = {id(t): view for placed in window.units for t, view in zip(placed.tensors, placed.home, strict=True)}
    return {name: home[id(p)] for name, p in held.model.named_parameters() if id(p) in home}


def modules_of(model: Any, held: Any) -> list[Any]:
    """The modules of `model` that answer to the offloaded units, in order."""
    return [model.get_submodule(unit.name) for unit in held.plan.units]


def point_home(model: Any, home: dict[str, Any]) -> None:
    for name, parameter in model.named_parameters():
        if name in home:
            parameter.data = home[name]


def synchronous(model: Any, held: Any, home: dict[str, Any]) -> None:
    """The plain way: a layer is copied on the compute stream when it is needed, and dropped after."""
    names = {id(p): name for name, p in model.named_parameters()}
    for module in modules_of(model, held):

        def load(module: Any, _: Any) -> None:
            for parameter in module.parameters():
                parameter.data = home[names[id(parameter)]].to(DEVICE, non_blocking=True)

        def drop(module: Any, _: Any, __: Any) -> None:
            for parameter in module.parameters():
                parameter.data = home[names[id(parameter)]]

        module.register_forward_pre_hook(load)
        module.register_forward_hook(drop)
    point_home(model, home)


def group_streams(model: Any, held: Any, home: dict[str, Any]) -> None:
    """As diffusers' group offloading with use_stream: one side stream, the next group loads while this one computes.

    Facts: the side stream is synchronised before an onload; one copy a parameter; offloading synchronises the compute
    stream (record_stream=False) so that the memory can be given back.
    """
    import torch

    stream = torch.cuda.Stream()
    names = {id(p): name for name, p in model.named_parameters()}
    modules = modules_of(model, held)

    here: set[Any] = set()

    def onload(module: Any) -> None:
        here.add(module)
        stream.synchronize()
        with torch.cuda.stream(stream):
            for parameter in module.parameters():
                parameter.data = home[names[id(parameter)]].to(DEVICE, non_blocking=True)

    for i, module in enumerate(modules):
        following = modules[(i + 1) % len(modules)]

        def load(module: Any, _: Any, following: Any = following) -> None:
            if module not in here:
                onload(module)
            stream.synchronize()
            torch.cuda.current_stream().wait_stream(stream)
            if following not in here:
                onload(following)

        def drop(module: Any, _: Any, __: Any) -> None:
            torch.cuda.current_stream().synchronize()
            here.discard(module)
            for parameter in module.parameters():
                parameter.data = home[names[id(parameter)]]

        module.register_forward_pre_hook(load)
        module.register_forward_hook(drop)
    point_home(model, home)


def accelerated(model: Any, held: Any, home: dict[str, Any]) -> None:
    """cpu_offload of accelerate on the same layers, from pageable memory, as it does by itself."""
    import accelerate

    pageable = {name: tensor.clone() for name, tensor in home.items()}
    point_home(model, pageable)
    for module in modules_of(model, held):
        accelerate.cpu_offload(module, execution_device=DEVICE)


def link_peak(runtime: Any) -> float:
    """Bytes a second of one 1 GiB copy from pinned memory, the best of fifteen from three allocations.

    Where the pinned pages lie makes some of the difference.
    """
    from kvprobe.cuda import Buffer

    device = Buffer(runtime, GIB, "device")
    stream, start, end = runtime.stream_create(), runtime.event_create(True), runtime.event_create(True)
    best = 0.0
    for _ in range(3):
        host = Buffer(runtime, GIB, "pinned")
        for _ in range(5):
            runtime.event_record(start, stream)
            runtime.memcpy_async(device.address, host.address, GIB, "h2d", stream)
            runtime.event_record(end, stream)
            runtime.event_synchronize(end)
            best = max(best, GIB / (runtime.event_elapsed_ms(start, end) / 1e3))
        host.close()
    device.close()
    return best


def copy_methods(held: Any) -> dict[str, dict[str, float]]:
    """One pass over all offloaded layers, as one copy a layer, one copy a parameter, and one batch a layer."""
    runtime, window = held.runtime, held._window
    slot = window.slots[0].address
    start, end = runtime.event_create(True), runtime.event_create(True)
    stream = runtime.stream_create()

    def pieces(placed: Any) -> list[tuple[int, int]]:
        found, at = [], 0
        for extent in placed.unit.extents:
            found.append((at, extent.bytes))
            at += extent.room
        return found

    def single(placed: Any) -> None:
        runtime.memcpy_async(slot, placed.address, placed.unit.bytes, "h2d", stream)

    def loop(placed: Any) -> None:
        for at, size in pieces(placed):
            runtime.memcpy_async(slot + at, placed.address + at, size, "h2d", stream)

    def batch(placed: Any) -> None:
        parts = pieces(placed)
        runtime.memcpy_batch_async(
            [slot + a for a, _ in parts], [placed.address + a for a, _ in parts], [size for _, size in parts], stream
        )

    out: dict[str, dict[str, float]] = {}
    total = sum(placed.unit.bytes for placed in window.units)
    ways = {"one copy a layer": single, "one copy a parameter": loop, "one batch a layer": batch}
    if not runtime.address("cudaMemcpyBatchAsync"):
        del ways["one batch a layer"]
    held._settle()
    for _ in range(3):
        for name, way in ways.items():
            runtime.event_record(start, stream)
            began = time.perf_counter_ns()
            for placed in window.units:
                way(placed)
            host_ns = time.perf_counter_ns() - began
            runtime.event_record(end, stream)
            runtime.event_synchronize(end)
            rate = total / runtime.event_elapsed_ms(start, end) * 1e3
            best = out.setdefault(name, {"gb_per_s": 0.0, "host_us_a_layer": float("inf")})
            best["gb_per_s"] = max(best["gb_per_s"], rate / 1e9)
            best["host_us_a_layer"] = min(best["host_us_a_layer"], host_ns / 1e3 / len(window.units))
    for placed in window.units:  # the slots hold other bytes now
        placed.slot = None
    for one in window.slots:
        one.placed = None
    return out


def measure(arm: Arm, ids: Any, times: int) -> Any:
    """Milliseconds a forward, mean of `times` back to back after one that is not counted; returns the logits' end.

    The device is not let idle before the first one counted: a window that filled meanwhile would flatter the mean.
    """
    import torch

    arm.prepare()
    if DEVICE == "cpu":
        arm.model(ids, use_cache=False, logits_to_keep=4)
        began = time.perf_counter()
        for _ in range(times):
            out = arm.model(ids, use_cache=False, logits_to_keep=4).logits
        arm.measured.append((time.perf_counter() - began) * 1e3 / times)
        return out
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    arm.model(ids, use_cache=False, logits_to_keep=4)
    start.record()
    for _ in range(times):
        out = arm.model(ids, use_cache=False, logits_to_keep=4).logits
    end.record()
    end.synchronize()
    arm.measured.append(start.elapsed_time(end) / times)
    return out


def graph_check(held: Any, base: Any, ids: Any) -> str:
    """Captures an offloaded forward in a CUDA graph and replays it, between eager forwards."""
    import torch

    if DEVICE == "cpu":
        return "needs a GPU"
    right = base(ids, use_cache=False, logits_to_keep=4).logits
    for _ in range(2):
        held.model(ids, use_cache=False, logits_to_keep=4)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            out = held.model(ids, use_cache=False, logits_to_keep=4).logits
        for _ in range(3):
            out.zero_()
            graph.replay()
            torch.cuda.synchronize()
            if not torch.equal(out, right):
                return "replay differs"
            if not torch.equal(held.model(ids, use_cache=False, logits_to_keep=4).logits, right):
                return "eager forward between replays differs"
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return "captured, replayed, equal bit for bit"


def change_check(held: Any, base: Any, ids: Any) -> str:
    """Changes an offloaded weight in place and compares with the same change of the untouched model, then undoes it."""
    import torch

    name = next(iter(sources(held)))
    mine, theirs = held.model.get_parameter(name), base.get_parameter(name)
    before = theirs.clone()
    mine.data.mul_(1.5)
    theirs.data.mul_(1.5)
    same = torch.equal(
        held.model(ids, use_cache=False, logits_to_keep=4).logits, base(ids, use_cache=False, logits_to_keep=4).logits
    )
    mine.data.copy_(before)
    theirs.data.copy_(before)
    return "equal bit for bit" if same else "differs"


def run(seconds: float, layers: int, width: int) -> tuple[dict[str, Any], Any]:
    import torch

    from kvprobe.cuda import find_runtime
    from kvprobe.weights import offload

    deadline = time.monotonic() + seconds
    runtime = find_runtime("cuda" if DEVICE == "cuda" else "host")
    base = build(layers, width)
    total = sum(p.numel() * p.element_size() for p in base.parameters())
    peak = link_peak(runtime)
    result: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name() if DEVICE == "cuda" else "host runtime",
        "torch": torch.__version__,
        "model_bytes": total,
        "link_peak": peak,
        "fractions": {},
        "skipped": [],
    }
    print(f"{result['gpu']}: {total / 1e9:.2f} GB of weights, link peak {peak / 1e9:.1f} GB/s", flush=True)
    shapes = {name: torch.randint(0, base.config.vocab_size, shape, device=DEVICE) for name, shape in SHAPES.items()}

    one = twin(base)
    untouched, whole = Arm("untouched", base), Arm("kvprobe, fraction 1", one)
    idle = offload(one, gpu_fraction=1)
    result["fraction_1"] = {"hooks": sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in one.modules())}
    for name, ids in shapes.items():
        for _ in range(4):
            for arm in (untouched, whole):
                measure(arm, ids, 3)
        times = {arm.name: arm.measured[1:] for arm in (untouched, whole)}
        result["fraction_1"][name] = {key: (statistics.median(v), min(v), max(v)) for key, v in times.items()}
        print(
            f"fraction 1, {name}: "
            + ", ".join(f"{k} {statistics.median(v):.2f} ms ({min(v):.2f} to {max(v):.2f})" for k, v in times.items()),
            flush=True,
        )
        untouched.measured, whole.measured = [], []
    idle.remove()
    recording = None
    for fraction in FRACTIONS:
        entry, recorded = _fraction(fraction, base, shapes, peak, deadline, result["skipped"])
        result["fractions"][str(fraction)] = entry
        recording = recorded if fraction == 0.5 else recording
        if DEVICE == "cuda":
            torch.cuda.empty_cache()
    return result, recording


def _fraction(
    fraction: float, base: Any, shapes: dict[str, Any], peak: float, deadline: float, skipped: list[str]
) -> tuple[dict[str, Any], Any]:
    """All arms with one share of the weights on the GPU."""
    from kvprobe.errors import UsageError
    from kvprobe.weights import offload, recording_of

    began = time.monotonic()
    mine = twin(base)
    device = "cuda" if DEVICE == "cuda" else "host"
    try:
        held = offload(mine, gpu_fraction=fraction, window=2, device=device)
    except UsageError:
        held = offload(mine, gpu_fraction=fraction, device=device)
    top = held.plan.slots - 1
    home = sources(held)
    arms = [Arm("untouched", base)]
    arms += [Arm(f"kvprobe, window {w}", mine, lambda w=w: held.set_window(w)) for w in (0, 1, 2) if w <= top]
    coded = _coded(fraction, base, device)
    for wire in ("coded", "auto") if coded else ():
        arms.append(Arm(f"kvprobe, wire {wire}", coded.model, lambda wire=wire: coded.set_wire(wire)))
    others = [("copied when needed", synchronous, 2), ("accelerate cpu_offload", accelerated, 1)]
    if DEVICE == "cuda":
        others.insert(1, ("diffusers-style streams", group_streams, 2))
    for label, how, times in others:
        other = twin(base)
        how(other, held, home)
        arms.append(Arm(label, other, times=times))
    entry: dict[str, Any] = {
        "grain": held.plan.grain,
        "units": len(held.plan.units),
        "gpu_bytes": held.gpu_bytes,
        "limit_bytes": held.plan.limit_bytes,
        "offloaded_bytes": held.plan.offloaded_bytes,
        "pinned_bytes": held.pinned_bytes,
        "pin_s": held.pin_ns / 1e9,
        "setup_s": time.monotonic() - began,
        "notes": held.notes,
        "copy_methods": copy_methods(held),
        "coded": coded and {"offloaded_bytes": coded.plan.offloaded_bytes, "share": coded.wire_share},
        "shapes": {},
    }
    print(
        f"\nfraction {fraction}: {entry['units']} {entry['grain']}, {held.gpu_bytes / GIB:.2f} of "
        f"{held.plan.limit_bytes / GIB:.2f} GiB allowed, pinned in {entry['pin_s']:.1f} s, all set up in "
        f"{entry['setup_s']:.1f} s",
        flush=True,
    )
    for name, method in entry["copy_methods"].items():
        print(f"  {name}: {method['gb_per_s']:.1f} GB/s, {method['host_us_a_layer']:.1f} us of host time a layer")
    # A link that was seen to go faster with these very copies can go faster.
    peak = max(peak, 1e9 * max(method["gb_per_s"] for method in entry["copy_methods"].values()))
    for name, ids in shapes.items():
        if time.monotonic() > deadline:
            skipped.append(f"fraction {fraction}, {name}: out of time")
            continue
        entry["shapes"][name] = _shape(arms, held, ids, peak, top)
        _print(name, entry["shapes"][name])
    short = next(iter(shapes.values()))
    entry["changed_in_place"] = change_check(held, base, short)
    entry["profile"] = held.profile().to_dict()
    recording = recording_of(held, "Llama-like model, random weights", "python benchmarks/weights_gpu.py", window=1)
    entry["graph"] = graph_check(held, base, short)
    print(f"  CUDA graph: {entry['graph']}; a weight changed in place: {entry['changed_in_place']}", flush=True)
    if coded:
        entry["coded_graph"] = graph_check(coded, base, short)
        entry["coded_changed"] = change_check(coded, base, short)
        print(
            f"  coded: {entry['coded']}, CUDA graph: {entry['coded_graph']}; changed: {entry['coded_changed']}",
            flush=True,
        )
        coded.remove()
    held.remove()
    return entry, recording


def _coded(fraction: float, base: Any, device: str) -> Any:
    """The same model with coded weights; None where there is no memory for the stages."""
    from kvprobe.errors import KvprobeError
    from kvprobe.weights import offload

    began = time.monotonic()
    try:
        coded = offload(twin(base), gpu_fraction=fraction, window=2, device=device, wire="coded")
    except KvprobeError as error:
        print(f"  coded weights: {error}")
        return None
    print(
        f"  packed in {time.monotonic() - began:.1f} s with placing: {coded.wire_share:.3f} of the bytes travel",
        flush=True,
    )
    return coded


def packed(one: Any) -> dict[str, Any]:
    """A Typical as small JSON: whole nanoseconds, a list a step."""
    from dataclasses import asdict

    data = {name: round(value) for name, value in asdict(one).items() if name != "steps"}
    return data | {"steps": [[s.unit, round(s.gap_ns), round(s.copy_ns), round(s.compute_ns)] for s in one.steps]}


def unpacked(data: dict[str, Any]) -> Any:
    """The Typical again."""
    from kvprobe.weights.profile import Step, Typical

    return Typical(**data | {"steps": tuple(Step(*step) for step in data["steps"])})


def gains_of(base: Any, times: dict[str, float]) -> tuple[dict[str, Any], dict[str, float]]:
    """Window -> gain over window 0, predicted from window 0's forwards beside measured; and the predicted times, ms."""
    from kvprobe.weights.profile import ALL, predict

    measured_ms = {name.rpartition(" ")[2]: ms for name, ms in times.items() if name.startswith("kvprobe, window")}
    predicted = {width: predict(base, int(width)) / 1e6 for width in (*measured_ms, "4")}
    gains = {}
    for width in sorted(set(measured_ms) - {"0"}):
        measured, foretold = measured_ms["0"] - measured_ms[width], base.forward_ns / 1e6 - predicted[width]
        small = measured < 0.1 * measured_ms["0"]
        off = abs(foretold - measured)
        gains[width] = {
            "predicted_ms": foretold,
            "measured_ms": measured,
            "off": off / abs(measured) if measured else 0.0,
            "criterion": "1% of the forward" if small else "10% of the gain",
            "holds": off <= (0.01 * measured_ms["0"] if small else 0.1 * measured),
        }
    return gains, predicted | {ALL: predict(base, ALL) / 1e6}


def replay(path: Path) -> int:
    """Predicts once more from saved per-layer times; 1 where a gain is missed."""
    missed = 0
    for fraction, entry in json.loads(path.read_text())["fractions"].items():
        for name, shape in entry["shapes"].items():
            base = unpacked(shape["typical"]["0"])
            gains, predicted = gains_of(base, shape["ms"])
            print(
                f"fraction {fraction}, {name}: window 0 measured {base.forward_ns / 1e6:.2f} ms, simulated "
                f"{predicted['0']:.2f}; a copy starts after {base.start_ns / 1e3:.1f} us and is seen after "
                f"{base.ready_ns / 1e3:.1f} us; without copies {base.resident_ns / 1e6:.2f} ms"
            )
            _print_gains(gains)
            missed += sum(not gain["holds"] for gain in gains.values())
    print(f"{missed} gains missed")
    return int(missed > 0)


def _print_gains(gains: dict[str, Any]) -> None:
    for width, gain in gains.items():
        print(
            f"    window {width} saves {gain['measured_ms']:.2f} ms, predicted {gain['predicted_ms']:.2f} (off by "
            f"{gain['off']:.1%} of the gain; {gain['criterion']}: {'holds' if gain['holds'] else 'MISSED'})",
            flush=True,
        )


def _shape(arms: list[Arm], held: Any, ids: Any, peak: float, top: int) -> dict[str, Any]:
    """All arms at one shape, interleaved."""
    import torch

    from kvprobe.weights.profile import typical
    from kvprobe.weights.timeline import RESIDENT

    held.reset_profile()
    right, wrong = None, []
    still = Arm("kvprobe, no copies", held.model)
    for arm in (*arms, still):
        arm.measured = []
    for turn in range(3):
        for arm in arms:
            if arm.times == 1 and turn == 2:
                continue
            out = measure(arm, ids, arm.times)
            if right is None:
                right = out.clone()
            elif not torch.equal(out, right):
                wrong.append(arm.name)
        with held.without_copies():  # right times, wrong logits
            measure(still, ids, still.times)
    times = {arm.name: statistics.median(arm.measured) for arm in arms}
    profile = held.profile()
    made = {
        str(width): typical([one for one in held.forwards if one.window in (width, RESIDENT)])
        for width in range(top + 1)
    }
    floor = max(profile.bytes / peak * 1e3, times["untouched"])
    gains, predicted = gains_of(made["0"], times)
    return {
        "ms": times,
        "spread_ms": {arm.name: (min(arm.measured), max(arm.measured)) for arm in arms},
        "bytes": profile.bytes,
        "floor_ms": floor,
        "copy_at_peak_ms": profile.bytes / peak * 1e3,
        "ratio": {name: value / floor for name, value in times.items() if name != "untouched"},
        "gain": gains,
        "predicted_ms": predicted,
        "no_copies_ms": statistics.median(still.measured),
        "typical": {width: packed(one) for width, one in made.items()},
        "hidden": profile.hidden,
        "wait_ms": profile.wait_ns / 1e6,
        "wrong_logits": sorted(set(wrong)),
    }


def _print(name: str, shape: dict[str, Any]) -> None:
    print(
        f"  {name}: {shape['bytes'] / 1e9:.2f} GB a forward, floor {shape['floor_ms']:.2f} ms (copies at link peak "
        f"{shape['copy_at_peak_ms']:.2f}, computation {shape['ms']['untouched']:.2f})"
    )
    for arm, value in shape["ms"].items():
        ratio = f"{shape['ratio'][arm]:6.3f} x floor" if arm in shape["ratio"] else ""
        low, high = shape["spread_ms"][arm]
        print(f"    {arm:26s} {value:9.2f} ms ({low:.2f} to {high:.2f}) {ratio}")
    print(f"    without copies             {shape['no_copies_ms']:9.2f} ms")
    _print_gains(shape["gain"])
    same = f"LOGITS DIFFER: {shape['wrong_logits']}" if shape["wrong_logits"] else "all logits equal bit for bit"
    print(f"    {same}", flush=True)


def _verdict(result: dict[str, Any]) -> Any:
    """What all arms together showed: how near to the floor, and how many gains were foretold."""
    from kvprobe.reporting.headline import Fact, PageHead

    shapes = [shape for entry in result["fractions"].values() for shape in entry["shapes"].values()]
    arms = {
        arm: [shape["ratio"][arm] for shape in shapes if arm in shape["ratio"]]
        for shape in shapes
        for arm in shape["ratio"]
    }
    gains = [gain for shape in shapes for gain in shape["gain"].values()]
    right = sum(gain["holds"] for gain in gains)
    best = arms.get("kvprobe, window 2") or [0.0]
    wrong = sum(len(shape["wrong_logits"]) for shape in shapes)
    facts = [Fact(arm, f"{min(ratios):.2f} to {max(ratios):.2f}", "times the floor") for arm, ratios in arms.items()]
    return PageHead(
        "info" if max(best) <= 1.05 and right == len(gains) and not wrong else "warning",
        f"With a window of 2 a forward takes {min(best):.2f} to {max(best):.2f} times the floor; "
        f"{right} of {len(gains)} gains were predicted.",
        "Floor: max(bytes moved / link peak, computation of the untouched model). "
        + (f"{wrong} ARMS GAVE OTHER LOGITS." if wrong else "All logits are equal bit for bit."),
        facts,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--replay", type=Path, help="predict from what an earlier run saved, and measure nothing")
    parser.add_argument("--report", type=Path)
    parser.add_argument("--seconds", type=float, default=200, help="start no new measurement after this time")
    parser.add_argument("--layers", type=int, default=24, help="24: about 9 GB")
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--device", choices=("cuda", "host"), default="cuda")
    arguments = parser.parse_args()
    if arguments.replay:
        return replay(arguments.replay)
    import torch

    if arguments.device == "host":
        globals()["DEVICE"] = "cpu"
    began = time.monotonic()
    with torch.no_grad():
        result, recording = run(arguments.seconds, arguments.layers, arguments.width)
    result["seconds"] = time.monotonic() - began
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1))
    if arguments.report and recording is not None:
        from kvprobe.diagnosis import diagnose
        from kvprobe.reporting import write_report
        from kvprobe.reporting.views import Section, table

        rows = [
            [
                fraction,
                name,
                arm,
                (f"{ms:,.2f} ms", ms),
                (f"{shape['floor_ms']:,.2f} ms", shape["floor_ms"]),
                (f"{ms / shape['floor_ms']:.3f}", ms / shape["floor_ms"]),
            ]
            for fraction, entry in result["fractions"].items()
            for name, shape in entry["shapes"].items()
            for arm, ms in shape["ms"].items()
        ]
        windows = [
            [
                fraction,
                name,
                width,
                (f"{gain['predicted_ms']:,.2f} ms", gain["predicted_ms"]),
                (f"{gain['measured_ms']:,.2f} ms", gain["measured_ms"]),
                (f"{gain['off']:.1%}", gain["off"]),
                gain["criterion"] + (" holds" if gain["holds"] else " missed"),
            ]
            for fraction, entry in result["fractions"].items()
            for name, shape in entry["shapes"].items()
            for width, gain in shape["gain"].items()
        ]
        lead = (
            f"{result['model_bytes'] / 1e9:.2f} GB of random weights on {result['gpu']}, link peak "
            f"{result['link_peak'] / 1e9:.1f} GB/s; all arms of a fraction move the same layers, in turn. The "
            "recording below is of half the weights on the GPU, window 1."
        )
        part = Section(
            "weights",
            "Weight offload, all arms",
            lead,
            tables=[
                table(
                    "Time of a forward",
                    ["On the GPU", "Shape", "Arm", "Time", "Floor", "Times the floor"],
                    rows,
                    "floor: max(bytes moved / link peak, computation of the untouched model)",
                ),
                table(
                    "Gain of a window over window 0",
                    ["On the GPU", "Shape", "Window", "Predicted", "Measured", "Off by", "Criterion"],
                    windows,
                    "predicted from forwards with window 0 and forwards without copies",
                ),
            ],
        )
        write_report(
            recording,
            arguments.report,
            findings=diagnose(recording),
            extra=[part],
            lead_verdict=_verdict(result),
            title=f"Weight offload on {result['gpu']}",
        )
    print(f"\n{result['seconds']:.0f} s in all; skipped: {result['skipped'] or 'nothing'}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
