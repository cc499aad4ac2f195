"""What `kvprobe stats -r expert_changes` predicts against what each change gives: llama.cpp's calls, played.

    python benchmarks/expert_changes.py [--turns 3] [--steps 600] [--json FILE] [--keep FOLDER]

A model of 8 layers keeps its experts in CPU memory, 64 to a layer in three tensors each, of which a router picks 6. Of
each layer (`ggml_backend_sched_compute_splits` of llama.cpp's ggml-backend.cpp): a kernel up to the router, the picked
ids to the CPU, a wait for them, then of each tensor the runs of picked experts by cudaMemcpyAsync on the stream that
computes, and the kernel that multiplies. Each turn that is recorded by `kvprobe run`, for the prediction; then another
process, not recorded, plays it as it was and with each change, by turns of 25 steps with one device's memory: slots for
experts on the GPU, whole tensors there, and uploads that begin while the layer before computes. What a change saves is
the median of what it saved in each 25 steps, as all steps would. Kernels spin for a given time. Without a GPU the host
runtime is used, whose figures on a busy machine mean nothing.

Exit code 1: on a GPU, the saving that was predicted is more than a quarter beside the measured one, in the median of
the turns.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "corpus"))

from device import D2H, H2D, Device

from tests.recordings.experts_made import Slots, routed, runs

ROOT = Path(__file__).resolve().parents[1]
LAYERS, EXPERTS, PICKED, PARTS = 8, 64, 6, 3
STRIDE = 256 << 10
TENSOR = EXPERTS * STRIDE
COMPUTE_NS = 40_000
PADDING = 512
BLOCK = 25  # steps that are played one way, before those of another
TRIED = 64 << 20  # of the host memory's begin, which Device copies from and to as it starts: no expert lies there
AS_IT_IS, SLOTS, FIXED, PREFETCH = "as it is", "slots", "fixed", "prefetch"
BOUND = 0.25


class Model:
    """The calls of one model, as it is or changed."""

    def __init__(self, gpu: Device, slots: int = 0, fixed: int = 0) -> None:
        self.gpu = gpu
        self.stream, self.copying = self.gpu.compute, self.gpu.copies[0]
        self.experts = self.gpu.host + TRIED
        self.ids = self.experts + LAYERS * PARTS * TENSOR + (64 << 10)
        self.cache = Slots(slots) if slots else None
        self.fixed = fixed  # tensors, from the first one: the picks of all layers are alike

    def _bring(self, layer: int, part: int, picked: list[int], stream: int, half: int = 0) -> None:
        tensor = PARTS * layer + part
        if tensor < self.fixed:
            return
        if self.cache is not None:
            picked = [one for one in picked if self.cache.use(tensor * EXPERTS + one) is not None]
        to = self.gpu.device + (PARTS * half + part) * (TENSOR + 4096)
        for first, last in runs(picked) if picked else ():
            size = (last - first + 1) * STRIDE + (PADDING if last < EXPERTS - 1 else 0)
            self.gpu.copy(to + first * STRIDE, self.experts + tensor * TENSOR + first * STRIDE, size, H2D, stream)

    def step(self, picks: list[list[int]]) -> None:
        """All layers once: each waits for its picks, then for their experts."""
        gpu = self.gpu
        for layer, picked in enumerate(picks):
            gpu.launch(COMPUTE_NS)
            gpu.copy(self.ids, gpu.device, 128, D2H, self.stream)
            gpu.sync(self.stream)
            for part in range(PARTS):
                self._bring(layer, part, picked, self.stream)
                gpu.launch(COMPUTE_NS)
        gpu.sync(self.stream)

    def step_ahead(self, picks: list[list[int]]) -> None:
        """Each layer's experts come on a stream of their own while the layer before it computes."""
        gpu = self.gpu
        for layer, picked in enumerate(picks):
            for part in range(PARTS):
                self._bring(layer, part, picked, self.copying, layer % 2)
            gpu.record(layer % 2, self.copying)
            gpu.launch(COMPUTE_NS)
            gpu.copy(self.ids, gpu.device, 128, D2H, self.stream)
            gpu.check(gpu.lib.cudaStreamWaitEvent(self.stream, gpu.events[layer % 2], 0))
            for _ in range(PARTS):
                gpu.launch(COMPUTE_NS)
        gpu.sync(self.stream)


def play(ways: list[tuple[str, int]], steps: int) -> dict[str, Any]:
    """All steps each way, by turns: how long each block of them took, ns, and whether that was on a GPU."""
    gpu = Device(size=TRIED + LAYERS * PARTS * TENSOR + (1 << 20), streams=4)
    models = [Model(gpu, slots=count if way == SLOTS else 0, fixed=count if way == FIXED else 0) for way, count in ways]
    calls = [one.step_ahead if way == PREFETCH else one.step for one, (way, _) in zip(models, ways, strict=True)]
    took: list[list[int]] = [[] for _ in ways]
    picks = list(routed(5, steps, LAYERS, EXPERTS, PICKED))
    for first in range(0, steps, BLOCK):
        turn = first // BLOCK
        for number in range(turn, turn + len(ways)):  # another one begins each time
            step = calls[number % len(ways)]
            begin = time.perf_counter_ns()
            for one in picks[first : first + BLOCK]:
                step(one)
            took[number % len(ways)].append(time.perf_counter_ns() - begin)
    return {"took_ns": took, "gpu": gpu.gpu}


def played(ways: list[tuple[str, int]], steps: int, under: tuple[str, ...] = ()) -> dict[str, Any]:
    """The same in a process of its own, under a command or alone."""
    command = [*under, sys.executable, __file__, "--play", json.dumps(ways), "--steps", str(steps)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    out: dict[str, Any] = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    return out


def predicted(steps: int, keep: Path | None) -> tuple[dict[tuple[str, int], int | None], int, float]:
    """Saved ns by way and count of the changes, from a recording of the model as it is; how long that took, ns.

    And the share of the time in which the GPU was observed. What is saved is None where nothing shows what the GPU did.
    """
    from kvprobe.account import account_of
    from kvprobe.account.expert_gains import expert_gains
    from kvprobe.recordings import open_recording
    from kvprobe.recordings.experts import expert_uploads
    from kvprobe.recordings.joined import Joined

    with tempfile.TemporaryDirectory() as folder:
        to = keep or Path(folder) / "run"
        run = (sys.executable, "-m", "kvprobe", "run", "--no-stacks", "--report", "none", "-o", str(to), "--")
        took = sum(played([(AS_IT_IS, 0)], steps, run)["took_ns"][0])
        recording = open_recording(to)
    (uploads,) = expert_uploads(recording)
    gains = expert_gains(recording, account_of(Joined(recording)), uploads)
    out: dict[tuple[str, int], int | None] = {}
    for way in (SLOTS, FIXED, PREFETCH):
        mine = [one for one in gains.changes if one.what == way]
        for one in mine[1:2] or mine:
            out[way, one.count] = one.saved_ns
    return out, took, gains.observed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep the last recording there")
    parser.add_argument("--play", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.play:
        print(json.dumps(play(options.play, options.steps)))
        return 0
    said: dict[tuple[str, int], list[int]] = {}
    measured: dict[tuple[str, int], list[float]] = {}
    ways: list[tuple[str, int]] = []
    on_gpu = False
    for turn in range(options.turns):
        last = turn == options.turns - 1
        saved, recorded, observed = predicted(options.steps, options.keep if last else None)
        ways = ways or [(AS_IT_IS, 0), *saved]  # what is measured first is measured always
        done = played(ways, options.steps)
        on_gpu = done["gpu"]
        before, *others = done["took_ns"]
        print(
            f"turn {turn + 1}: as it is {statistics.median(before) * len(before) / 1e6:.1f} ms (recorded by kvprobe "
            f"run: {recorded / 1e6:.1f}, {observed:.0%} observed)"
        )
        for one, after in zip(ways[1:], others, strict=True):
            gain = statistics.median(was - now for was, now in zip(before, after, strict=True)) * len(before)
            measured.setdefault(one, []).append(gain)
            ns = saved.get(one)
            said.setdefault(one, []).extend([] if ns is None else [ns])
            told = "not known" if ns is None else f"{ns / 1e6:.1f} ms, {ns / gain - 1:+.0%} beside it"
            print(f"  {one[0]:9} {one[1] or '':>5}  saves {gain / 1e6:.1f} ms, predicted {told}", flush=True)
    rows, wrong = [], 0
    print(f"the median of {options.turns} turns of {options.steps} steps:")
    for one in ways[1:]:
        gain = statistics.median(measured[one])
        ns = statistics.median(said[one]) if said[one] else None
        wrong += ns is None or abs(ns - gain) > BOUND * gain
        rows.append({"way": one[0], "count": one[1], "predicted_ns": said[one], "measured_ns": measured[one]})
        told = "not known" if ns is None else f"{ns / 1e6:.1f} ms, {ns / gain - 1:+.0%} beside it"
        print(f"  {one[0]:9} {one[1] or '':>5}  saves {gain / 1e6:.1f} ms, predicted {told}")
    if options.json:
        options.json.write_text(json.dumps(rows) + "\n")
    return int(on_gpu and wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
