"""Small programs with one known cause each, cured from outside by `kvprobe try`: measured beside predicted.

    python benchmarks/cures_tried.py --out DIR [--device cuda|host] [--rounds 4] [--only NAME ...]

Writes DIR/<device>-cures.txt and .json. `aliased` needs torch: its streams are torch's, and its changes come from a
trace of PyTorch's profiler; the last ones are programs of the labelled corpus. Each program says what it does at its
function. A forward is a host function that sleeps in the stream, so that no compiler is needed. Exit code 1: a measured
saving lies more than 25% off the predicted one, or the change that was printed first is not the one that saved most.
"""

# ruff: noqa: D102 - the calls are those of the runtime

from __future__ import annotations

import argparse
import ctypes as ct
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BLOCK = 64 << 10
H2D, D2H = 1, 2
MS = 1_000_000


class Cuda:
    """The runtime's calls that the programs need, by ctypes."""

    def __init__(self) -> None:
        name = os.environ.get("CURES_RUNTIME", "libcudart.so")
        self.lib = ct.CDLL(name)
        self.usleep = ct.cast(ct.CDLL(None).usleep, ct.c_void_p)
        self.lib.cudaMemcpyAsync.argtypes = [ct.c_void_p, ct.c_void_p, ct.c_size_t, ct.c_int, ct.c_void_p]
        self.host, self.device = ct.c_void_p(), ct.c_void_p()
        self.check(self.lib.cudaMalloc(ct.byref(self.device), ct.c_size_t(64 << 20)))
        self.check(self.lib.cudaHostAlloc(ct.byref(self.host), ct.c_size_t(64 << 20), 0))

    def check(self, code: int) -> None:
        if code:
            raise RuntimeError(f"CUDA error {code}")

    def stream(self) -> ct.c_void_p:
        out = ct.c_void_p()
        self.check(self.lib.cudaStreamCreateWithFlags(ct.byref(out), 1))
        return out

    def forward(self, stream: ct.c_void_p, ms: int) -> None:
        self.check(self.lib.cudaLaunchHostFunc(stream, self.usleep, ct.c_void_p(ms * 1000)))

    def fence(self, later: ct.c_void_p, earlier: ct.c_void_p) -> None:
        event = ct.c_void_p()
        self.check(self.lib.cudaEventCreateWithFlags(ct.byref(event), 2))
        self.check(self.lib.cudaEventRecord(event, earlier))
        self.check(self.lib.cudaStreamWaitEvent(later, event, 0))

    def copies(self, n: int, stream: ct.c_void_p, kind: int = D2H, size: int = BLOCK) -> None:
        to, source = (self.host, self.device) if kind == D2H else (self.device, self.host)
        call, many = self.lib.cudaMemcpyAsync, (64 << 20) // size
        for i in range(n):
            at = i % many * size
            call(to.value + at, source.value + at, size, kind, stream)

    def synchronize(self) -> None:
        self.check(self.lib.cudaDeviceSynchronize())


def fence_one_stream() -> None:
    """Three stores of 3,000 blocks, each behind a forward of 60 ms, on one stream."""
    cuda = Cuda()
    compute, store = cuda.stream(), cuda.stream()
    for _ in range(3):
        cuda.forward(compute, 60)
        cuda.fence(store, compute)
        cuda.copies(3000, store)
        cuda.synchronize()


def fence_second_thread() -> None:
    """The same from a second thread, 1,500 blocks, while the main thread makes small copies on a stream of its own."""
    cuda = Cuda()
    compute, store, own = cuda.stream(), cuda.stream(), cuda.stream()

    def stores() -> None:
        for _ in range(3):
            cuda.forward(compute, 80)
            cuda.fence(store, compute)
            cuda.copies(1500, store)
            cuda.check(cuda.lib.cudaStreamSynchronize(store))

    thread = threading.Thread(target=stores)
    thread.start()
    while thread.is_alive():
        cuda.copies(4, own, H2D)
        time.sleep(0.002)
    thread.join()
    cuda.synchronize()


def half_cured() -> None:
    """Three stores of 6,000 blocks behind 60 ms: more than a queue four times as deep takes."""
    cuda = Cuda()
    compute, store = cuda.stream(), cuda.stream()
    for _ in range(3):
        cuda.forward(compute, 60)
        cuda.fence(store, compute)
        cuda.copies(6000, store)
        cuda.synchronize()


def aliased() -> None:
    """70 transfers of 80 blocks, each on a new stream of torch (32 alias), behind a forward, three times."""
    import torch

    host = torch.empty(512, BLOCK, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(512, BLOCK, dtype=torch.uint8, device="cuda")
    compute = torch.cuda.Stream()
    cycles = int(0.15 * 1.9e9)

    def work() -> None:
        for _ in range(3):
            with torch.cuda.stream(compute):
                torch.cuda._sleep(cycles)
            event = compute.record_event()
            for transfer in range(70):
                stream = torch.cuda.Stream()
                stream.wait_event(event)
                with torch.cuda.stream(stream):
                    for i in range(80):
                        at = (transfer * 80 + i) % 512
                        host[at].copy_(device[at], non_blocking=True)
            torch.cuda.synchronize()

    trace = os.environ.get("CURES_TRACE")
    if not trace:
        work()
        return
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        work()
    profiler.export_chrome_trace(trace)


PROGRAMS: dict[str, Callable[[], None]] = {
    "fence_one_stream": fence_one_stream,
    "fence_second_thread": fence_second_thread,
    "half_cured": half_cured,
    "aliased": aliased,
}


# Programs of the corpus whose causes have a cure from outside, and what they do.
CORPUS = {
    "loads_on_one_stream": "2,500 loads on one stream that takes a thousand.",
    "launches_without_any_copy": "2,500 kernels on one stream, no copy.",
    "two_threads_that_feed_one_stream": "1,400 loads each by two threads.",
    "transfers_over_32_streams_behind_a_fence": "70 transfers of 80 loads over 32 streams that wait for a forward.",
}


def tried(name: str, out: Path, rounds: int, env: dict[str, str]) -> dict[str, object]:
    """`kvprobe try` of one program; the trace comes first where one is needed."""
    program = [sys.executable, str(Path(__file__).resolve()), "--program", name]
    if name in CORPUS:
        program = [sys.executable, str(ROOT / "tests" / "corpus" / "programs.py"), name]
    more = []
    if name == "aliased":
        trace = out / "aliased.json"
        subprocess.run(program, env={**env, "CURES_TRACE": str(trace)}, check=True)
        more = ["--recording", str(trace)]
    arguments = ["try", "-o", str(out / name), "--rounds", str(rounds), *more, "--", *program]
    done = subprocess.run(
        [sys.executable, "-m", "kvprobe", *arguments], env=env, capture_output=True, text=True, check=False
    )
    if done.returncode:
        return {"program": name, "error": done.stderr.strip().splitlines()[-1:]}
    return {"program": name, "text": done.stdout, **json.loads((out / name / "try.json").read_text())}


def judged(outcome: dict[str, object]) -> list[str]:
    """What the outcome shows, a line a change; lines that begin with "off" are failures."""
    lines = []
    changes = [one for one in outcome.get("tried", []) if one["change"]["predicted_saving_ns"] is not None]  # type: ignore[attr-defined]
    best = max(changes, key=lambda one: one["blocked_ns"]["saved_median"], default=None)
    for one in changes:
        predicted, measured = one["change"]["predicted_saving_ns"], one["blocked_ns"]["saved_median"]
        near = abs(measured - predicted) <= 0.25 * max(predicted, measured)
        word = "near" if near else "off"
        lines.append(
            f"{word}: {one['change']['name']} predicted {predicted / MS:.1f} ms, measured {measured / MS:.1f} ms"
        )
    if best is not None and best is not changes[0]:
        slack = 0.1 * best["blocked_ns"]["saved_median"]
        first = changes[0]["blocked_ns"]["saved_median"]
        if best["blocked_ns"]["saved_median"] - first > slack:
            lines.append(f"off: {best['change']['name']} saved most, and was not printed first")
    if not changes:
        lines.append("off: nothing was predicted")
    return lines


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", choices=PROGRAMS)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--device", choices=["cuda", "host"], default="cuda")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--only", nargs="*", choices=[*PROGRAMS, *CORPUS], default=[*PROGRAMS, *CORPUS])
    arguments = parser.parse_args()
    if arguments.program:
        PROGRAMS[arguments.program]()
        return 0
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    if arguments.device == "host":
        env["CURES_RUNTIME"] = str(ROOT / "kvprobe/native/lib/libkvprobe_hostrt.so")
    out = arguments.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    outcomes, text = [], []
    for name in arguments.only:
        if name == "aliased" and arguments.device == "host":
            continue
        outcome = tried(name, out, arguments.rounds, env)
        lines = judged(outcome) if "error" not in outcome else [f"off: {outcome['error']}"]
        outcome["judged"] = lines
        outcomes.append(outcome)
        said = [
            f"## {name}: {CORPUS.get(name) or (PROGRAMS[name].__doc__ or '').strip()}",
            str(outcome.pop("text", "")),
            *lines,
            "",
        ]
        print("\n".join(said), flush=True)
        text += said
    (out / f"{arguments.device}-cures.txt").write_text("\n".join(text))
    (out / f"{arguments.device}-cures.json").write_text(json.dumps(outcomes, indent=1))
    return int(any(line.startswith("off") for outcome in outcomes for line in outcome["judged"]))  # type: ignore[attr-defined]


if __name__ == "__main__":
    sys.exit(main())
