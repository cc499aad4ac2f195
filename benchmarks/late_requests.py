"""Late requests against the truth: a server's loop over the real engine, with delays put into known steps and loads.

    python benchmarks/late_requests.py                              # 10,000 requests, 64 at once, in virtual time
    python benchmarks/late_requests.py --device cuda --requests 600 --vary 0.1  # under kvprobe run, on a GPU
    python benchmarks/late_requests.py --record FOLDER              # the recording alone, for `kvprobe requests FOLDER`

Requests arrive, load their blocks from CPU memory, take part in steps until they have their tokens, and store their
blocks. Some steps are made late: the thread computes something else (host), waits for a load that nothing hides (link),
submits copies to a queue that is full (queue), or pins memory (pin; on a GPU alone). Some loads begin late, as where a
tier below CPU memory has to be read first (tier). In virtual time a step is late as well where nobody made it so and
the engine's own copy kernels held its kernel up: the program measures that (copies). On a real clock it measures by how
much each step took longer than what it asked for, whatever the reason: such a step was late, though nobody seeded it.

Printed: delays and late requests that were named, missed and made up, and how far the split is from the truth, as a
share of what was waited; the same of those steps alone in which the GPU was observed, as on a busy machine it is not
all the time.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import kvprobe
from kvprobe.account import COPIES, Line
from kvprobe.cuda import device_region, host_region
from kvprobe.cuda.hostruntime import HostRuntime, host_runtime
from kvprobe.diagnosis import examine
from kvprobe.instrument import event_log
from kvprobe.recordings.model import Recording, Table
from kvprobe.recordings.parquet import write
from kvprobe.recordings.steps import Steps
from kvprobe.recordings.vocabulary import Names
from kvprobe.requests import PART_KEYS, LateStep, Requests, of_account
from kvprobe.requests.usual import NOTICED

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

LAYERS, BLOCKS, LARGE = 2, 8, 512  # blocks of a request; of a load that nothing hides
KERNEL_NS, PER_TOKEN_NS = 4_000_000, 10_000
PLAN_NS = 200_000
QUIET = 150  # steps at the beginning, in which nothing is late
DEPTH = 1024
UNSEEN = 0.05  # of a late step, of which it is not known what the GPU did: it was not observed

_copies = [line.key for line in COPIES]
_host = [line.key for line in (Line.PYTHON, Line.ELSEWHERE, Line.NOTHING_TO_DO, Line.NO_CPU)]
# Which parts of a wait a delay is to be found in.
PARTS = {
    "host": _host,
    "link": _copies,
    "queue": [*_copies, Line.FULL_QUEUE.key, Line.WAITING_FOR_DEVICE.key],  # the last: between copies, as it empties
    "pin": [Line.ALLOCATING.key],
    "tier": [PART_KEYS[-1]],
}


@dataclass
class Truth:
    """What was put in: by step number its kind and ns, by request the ns of its late load, and who had to be late.

    `early` are the requests that arrived in the first steps, when everything is cold: they are not judged. `two` are
    those that waited for a late load while a step was late: they are to be named, how much is of which nobody knows.
    `held`: of steps that nobody made late, by number, ns that their kernels were held up by the engine's copies; on a
    real clock, by which they took longer than what was asked for, and nobody knows how that splits (`split` is false).
    """

    steps: dict[int, tuple[str, int]] = field(default_factory=dict)
    loads: dict[str, int] = field(default_factory=dict)
    late: set[str] = field(default_factory=set)
    early: set[str] = field(default_factory=set)
    two: set[str] = field(default_factory=set)
    held: dict[int, int] = field(default_factory=dict)
    split: bool = True


@dataclass
class Request:
    """One request: its slot in the GPU's pool, and how far it is."""

    name: str
    slot: int
    tokens: int
    prompt: int
    arrived_ns: int
    load_at_ns: int
    load: Any = None
    loaded_ns: int = 0


class Server:
    """The loop, on any runtime; `seed` decides everything but the clock."""

    def __init__(
        self, runtime: kvprobe.Runtime, seed: int, at_once: int, step_share: float, step: tuple[float, float]
    ) -> None:
        """`step_share`: of the steps that are made late; `step`: its ns, and the share that varies."""
        self.runtime, self.at_once, self.step_share = runtime, at_once, step_share
        self.kernel_ns, self.vary = step
        self.random = np.random.default_rng(seed)
        self.virtual = isinstance(runtime, HostRuntime) and runtime.simulated
        self.piece = (64 << 10) if runtime.provider == "host" else (1 << 20)
        # of a copy that fills a queue: the device takes several times as long as the thread that submits it
        self.small = 2 * self.piece if runtime.provider == "host" else self.piece
        self.beyond = 800, 1_400  # such copies, beyond a queue's depth
        if self.virtual:  # a submission takes 1 us
            self.small, self.beyond = self.piece // 4, (2_200, 3_500)
        self.turn = 0
        self.stream, self.other = runtime.stream_create(), runtime.stream_create()
        blocks = at_once * BLOCKS + LARGE
        regions = [[make(runtime, blocks * self.piece) for _ in range(LAYERS)] for make in (device_region, host_region)]
        self.gpu, self.cpu = regions
        limits = kvprobe.QueueLimits(DEPTH, 4, 4 * DEPTH, 300, 600)
        self.engine = kvprobe.OffloadEngine(
            runtime,
            *(kvprobe.BlockPool(runtime, one, self.piece) for one in regions),
            policy="pooled",
            limits=limits if self.virtual else None,
            compute_stream=self.stream,
        )
        self.truth = Truth()
        self.host: Any = None
        if not self.virtual:
            self.warm()
        self.kinds = ("host", "link", "queue", *(("pin",) if runtime.provider == "cuda" else ()))

    def warm(self) -> None:
        """What is slow once: the first launch imports torch, and the engine tries ways to copy a large load."""
        self.compute(1_000)
        self.runtime.stream_synchronize(self.stream)
        for _ in range(3):
            self.load_large()

    def load_large(self) -> None:
        """A load that nothing hides; a place on the GPU is given other bytes each time."""
        self.turn += 1
        first = self.at_once * BLOCKS
        places = [first + (number + self.turn) % LARGE for number in range(LARGE)]
        self.engine.wait(self.engine.load(range(first, first + LARGE), places))

    def now(self) -> int:
        """The clock that steps are told in."""
        return self.runtime.now_ns() if isinstance(self.runtime, HostRuntime) else time.monotonic_ns()

    def busy(self, ns: int) -> None:
        """The thread is busy with something else."""
        if self.virtual:
            assert isinstance(self.runtime, HostRuntime)
            self.runtime.advance(ns)
            return
        end = time.monotonic_ns() + ns
        while time.monotonic_ns() < end:
            pass

    def compute(self, ns: int) -> None:
        """The model's work of one step."""
        if not isinstance(self.runtime, HostRuntime):
            self.runtime.launch_delay(self.stream, ns)
            return
        from tests.diagnosis.hostruntime import Runtime  # its launch is a kernel that a trace shows

        self.host = self.host or Runtime()
        self.host.launch(self.stream, ns)

    def delay(self, kind: str) -> int:
        """Makes the present step late; returns by how many ns, on the program's own clock."""
        begin = self.now()
        if kind == "host":
            self.busy(int(self.random.integers(25_000_000, 45_000_000)))
        elif kind == "link":
            self.load_large()
        elif kind == "queue":
            for from_address, to_address in self.many_copies(DEPTH + int(self.random.integers(*self.beyond))):
                self.runtime.memcpy_async(to_address, from_address, self.small, "h2d", self.other)
            self.runtime.stream_synchronize(self.other)  # else loads of the steps that follow wait for the rest
        else:
            self.runtime.free_host(self.runtime.host_alloc(512 << 20))
        return self.now() - begin

    def many_copies(self, count: int) -> Iterator[tuple[int, int]]:
        """From where to where each of them goes: none brings what is on the GPU or on its way."""
        self.turn += 1
        begin, grain = self.at_once * BLOCKS * self.piece, self.small // 4
        places = (LARGE * self.piece - self.small) // grain
        for number in range(count):
            lap, place = divmod(number, LAYERS * places)
            layer, place = divmod(place, places)
            other = (place + self.turn + lap) % places
            yield (self.cpu[layer].address + begin + place * grain, self.gpu[layer].address + begin + other * grain)

    def serve(self, count: int) -> Truth:
        """All requests."""
        free, waiting, running = deque(range(self.at_once)), deque[Request](), list[Request]()
        storing: list[tuple[Any, int]] = []
        number = arrived = 0
        last, ended_ns = -100, self.now()
        while arrived < count or waiting or running:
            number += 1
            start = self.now()
            if arrived < count and free:  # at most one arrives a step: none waits for another's prefill
                waiting.append(self.arrive(arrived, free.popleft(), number > QUIET))
                arrived += 1
            self.busy(PLAN_NS)
            joins = self.joining(waiting)
            batch = [*running, *joins]
            for transfer, slot in [one for one in storing if one[0].done]:
                storing.remove((transfer, slot))
                free.append(slot)
            if not batch:
                self.busy(PLAN_NS)
                continue
            kind = ""
            if number > QUIET and arrived < count and number - last > 30 and self.random.random() < self.step_share:
                kind, last = str(self.random.choice(self.kinds)), number
                self.truth.steps[number] = kind, self.delay(kind)
                self.truth.late |= {one.name for one in (*batch, *waiting)}
                self.truth.two |= {one.name for one in (*joins, *waiting)}
            computed = [one.prompt if one in joins else 1 for one in batch]
            work = self.kernel_ns + PER_TOKEN_NS * sum(computed)
            work_ns = int(work * self.random.uniform(1 - self.vary, 1 + self.vary))
            launched_ns = self.now()
            self.compute(work_ns)
            self.runtime.stream_synchronize(self.stream)
            end_ns = self.now()
            if not kind:
                asked_ns = work_ns if self.virtual else PLAN_NS + work_ns
                self.truth.held[number] = end_ns - (launched_ns if self.virtual else ended_ns) - asked_ns
            ended_ns = end_ns
            phase = "mixed" if joins and running else "prefill" if joins else "decode"
            names = [one.name for one in batch]
            told = kvprobe.mark(number, names, phase, computed=computed, begin_ns=start, server="bench")
            told.end(end_ns=end_ns)
            running = self.kept(batch, storing)
            if self.virtual and number % 200 == 0:  # on a real clock a thread of its own does that
                event_log.flush()
        self.engine.wait()
        event_log.flush()
        return self.truth

    def arrive(self, number: int, slot: int, may_be_late: bool) -> Request:
        """A request, and when the load of its blocks may begin."""
        tokens = int(self.random.integers(1, 2 * self.at_once)) + self.at_once
        one = Request(f"r{number}", slot, tokens, int(self.random.integers(280, 420)), self.now(), 0)
        kvprobe.mark_request(one.name, "arrived", one.arrived_ns)
        if not may_be_late:
            self.truth.early.add(one.name)
        if may_be_late and self.random.random() < 1 / 50:
            one.load_at_ns = self.now() + int(self.random.integers(60_000_000, 90_000_000))
            self.truth.late.add(one.name)
        return one

    def joining(self, waiting: deque[Request]) -> list[Request]:
        """The requests whose blocks have come, so that none waits for another's turn; loads that may begin do."""
        for one in waiting:
            if one.load is None and self.now() >= one.load_at_ns:
                blocks = range(one.slot * BLOCKS, (one.slot + 1) * BLOCKS)
                one.load = self.engine.load(blocks, blocks, after=None)
                if one.load_at_ns:
                    self.truth.loads[one.name] = self.now() - one.arrived_ns
        self.engine.poll()
        for one in waiting:
            if one.load is not None and one.load.done and not one.loaded_ns:
                one.loaded_ns = one.load.copy_end_ns or self.now()
        ready = [one for one in waiting if one.loaded_ns]
        for one in ready:
            waiting.remove(one)
            told = kvprobe.mark(None, [one.name], "load", begin_ns=one.arrived_ns, tokens=0, server="bench")
            told.end(end_ns=one.loaded_ns)
        return ready

    def kept(self, batch: list[Request], storing: list[tuple[Any, int]]) -> list[Request]:
        """Those that go on; of the others the blocks are stored."""
        for one in batch:
            one.tokens -= 1
            if not one.tokens:
                blocks = range(one.slot * BLOCKS, (one.slot + 1) * BLOCKS)
                storing.append((self.engine.store(blocks, blocks), one.slot))
                kvprobe.mark_request(one.name, "ended", self.now())
        return [one for one in batch if one.tokens]

    def close(self) -> None:
        """Gives everything back."""
        self.engine.close()
        for stream in (self.stream, self.other):
            self.runtime.stream_destroy(stream)
        for region in (*self.gpu, *self.cpu):
            region.owner.close()


def played(requests: int, at_once: int, seed: int, step_share: float) -> tuple[Recording, Truth]:
    """The loop in virtual time: what a profiler would have recorded of it, with the steps that it told."""
    from tests.diagnosis.hostruntime import Runtime, recording_of

    settings = {"depth": DEPTH, "submit_ns": 1000, "h2d_bytes_per_s": 2e9, "d2h_bytes_per_s": 2e9}
    runtime = host_runtime(virtual_clock=1, **settings)
    before = os.environ.get("KVPROBE_RUN")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["KVPROBE_RUN"] = folder
        server = Server(runtime, seed, at_once, step_share, (KERNEL_NS, 0.01))
        try:
            runtime.trace_start(4_000_000)
            truth = server.serve(requests)
            runtime.trace_stop()
            recording = recording_of(Runtime(), runtime.trace())
        finally:
            server.close()
            os.environ.pop("KVPROBE_RUN")
            if before is not None:
                os.environ["KVPROBE_RUN"] = before
        names = Names(recording.names)
        ran = dict(recording.executions)  # a profiler names kernels; those of the driver's call are the engine's copies
        by_engine = ran["name"] == names.add("cuLaunchKernel")
        ran["name"] = np.where(by_engine, names.add("kvp_copy_gather"), ran["name"])
        recording.tables["executions"] = Table("executions", ran)
        told = Steps(names)
        for path in sorted(Path(folder).glob("steps-*.jsonl"), key=lambda one: "before" not in one.name):
            told.lines(map(json.loads, path.read_text().splitlines()), 0, 0, 0)
    python = names.add("python server.py")
    recording.tables["processes"] = Table("processes", {"pid": np.array([4242]), "command": np.array([python])})
    recording.names = names.list
    told.fill(recording)
    return recording, truth


def requests_of(recording: Recording) -> Requests:
    """What `kvprobe requests` works out."""
    found = examine(recording)
    told = of_account(recording, found.account, found.serving)
    assert told is not None
    return told


def compared(told: Requests, truth: Truth) -> dict[str, Any]:
    """How right it is: steps and requests named, missed and made up; how far the split is from the truth."""
    steps = {one.step: one for one in told.late}
    steps = {number: one for number, one in steps.items() if number > QUIET}
    named = {one.name: one for one in told.late_requests if one.name not in truth.early}
    late = truth.late - truth.early
    held = {number for number in truth.held.keys() & steps.keys() if late_by(steps[number], truth.held[number])}
    waited = {name for name, one in named.items() if one.steps and held >= set(one.steps)} - late  # in such steps alone
    errors: dict[str, list[float]] = {}
    seen: dict[str, list[float]] = {}
    for number, (kind, ns) in truth.steps.items():
        if number in steps:
            parts, took = steps[number].to_json()["surplus_ns"], steps[number].to_ns - steps[number].from_ns
            error = abs(sum(parts.get(part, 0) for part in PARTS[kind]) - ns) / took
            errors.setdefault(kind, []).append(error)
            if parts.get(Line.NOT_KNOWN.key, 0) <= UNSEEN * took:
                seen.setdefault(kind, []).append(error)
    for name, ns in truth.loads.items():
        if name in named and name not in truth.two:
            found = named[name].to_json()["surplus_ns"].get(PARTS["tier"][0], 0)
            errors.setdefault("tier", []).append(abs(found - ns) / named[name].first_token_ns)
    for number in held if truth.split else ():
        parts = steps[number].to_json()["surplus_ns"]
        found = sum(parts.get(part, 0) for part in PARTS["link"])
        errors.setdefault("copies", []).append(
            abs(found - truth.held[number]) / (steps[number].to_ns - steps[number].from_ns)
        )
    kinds = [kind for kind, _ in truth.steps.values()]
    return {
        "steps": told.steps,
        "requests": told.requests,
        "delays": {**{kind: kinds.count(kind) for kind in sorted(set(kinds))}, "tier": len(truth.loads)},
        "held": len(held),
        "late_steps": counted(set(truth.steps), set(steps) - held),
        "late_requests": counted(late, set(named) - waited),
        "worst_split_error": {kind: round(max(each), 4) for kind, each in sorted(errors.items())},
        "where_seen": {kind: [len(each), round(max(each), 4)] for kind, each in sorted(seen.items())},
    }


def late_by(step: LateStep, held_ns: int) -> bool:
    """Whether a step is late because it was held up so long: without that nobody would call it late."""
    took_ns = step.to_ns - step.from_ns
    return took_ns - held_ns <= NOTICED * (took_ns - step.longer_ns)


def counted(true: set[Any], named: set[Any]) -> list[int]:
    """Named rightly, missed, made up."""
    return [len(true & named), len(true - named), len(named - true)]


def recorded(options: argparse.Namespace, folder: Path) -> tuple[Recording, Truth]:
    """The same program under `kvprobe run`, on the real clock."""
    truth = folder / "truth.json"
    serve = [sys.executable, __file__, "--device", options.device, "--serve", str(truth)]
    serve += ["--requests", str(options.requests), "--at-once", str(options.at_once), "--seed", str(options.seed)]
    serve += ["--step-share", str(options.step_share), "--step-ms", str(options.step_ms), "--vary", str(options.vary)]
    subprocess.run([sys.executable, "-m", "kvprobe", "run", "-o", str(folder / "run"), "--", *serve], check=True)
    read = json.loads(truth.read_text())
    steps = {int(number): (kind, ns) for number, (kind, ns) in read["steps"].items()}
    late, early, two = (set(read[key]) for key in ("late", "early", "two"))
    held = {int(number): ns for number, ns in read["held"].items()}
    return kvprobe.open_recording(folder / "run"), Truth(steps, read["loads"], late, early, two, held, split=False)


def main() -> int:
    """Prints the comparison; 1 where something was missed or made up."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="virtual", choices=("virtual", "host", "cuda"))
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--at-once", type=int, default=64)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--step-share", type=float, default=1 / 400, help="share of the steps that are made late")
    parser.add_argument("--step-ms", type=float, default=KERNEL_NS / 1e6, help="what a step computes, on a real clock")
    parser.add_argument("--vary", type=float, default=0.01, help="by what share that varies, on a real clock")
    parser.add_argument("--serve", type=Path, metavar="FILE", help="only serve, and write what was put in")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep the recording there")
    parser.add_argument("--record", type=Path, metavar="FOLDER", help="write the recording in virtual time, and end")
    options = parser.parse_args()
    if options.serve is not None:
        step = options.step_ms * 1e6, options.vary
        server = Server(kvprobe.find_runtime(options.device), options.seed, options.at_once, options.step_share, step)
        gc.disable()  # a collection would make a step late of which the truth knows nothing
        truth = server.serve(options.requests)
        server.close()
        told = {key: sorted(one) if isinstance(one, set) else one for key, one in vars(truth).items()}
        options.serve.write_text(json.dumps(told))
        return 0
    if options.device == "virtual":
        recording, truth = played(options.requests, options.at_once, options.seed, options.step_share)
        if options.record is not None:
            write(recording, options.record)
            return 0
    else:
        folder = options.keep or Path(tempfile.mkdtemp(prefix="kvprobe-late-"))
        recording, truth = recorded(options, folder)
    begin = time.perf_counter()
    found = examine(recording)
    joined = time.perf_counter()
    told = of_account(recording, found.account, found.serving)
    assert told is not None
    result = compared(told, truth)
    result["seconds"] = {"diagnosis": round(joined - begin, 2), "requests": round(time.perf_counter() - joined, 2)}
    print(json.dumps(result, indent=1))
    return int(any(result["late_requests"][1:]) or any(result["late_steps"][1:]))


if __name__ == "__main__":
    sys.exit(main())
