"""A server's transfers under auto and on each fixed rung, without a device and without real time.

One workload is drawn from a seed: which rungs there are and what they cost, by the figures of an H200 in `reports/`
(`h200-calibrate.json`: each method's copies; `h200-vllm-handlers.json` and `h200-fast-path.json`: what submitting and
handing over costs a server's thread, and an engine's caller), how many copies of what size a step moves, how long a
step is, what other work stands in front of the copies. Costs vary from transfer to transfer, drift, and may lie about
their calibration; a rung may fail; the work may change in the middle. What varies is drawn before anything is played,
so that every rung meets the same.

A transfer costs what it takes of its caller's thread plus what it takes of the device: those are the two that wait.
"""

from __future__ import annotations

import json
import math
import random
import re
from bisect import bisect
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from kvprobe.instrument.transfers import SLOW_NS
from kvprobe.launchqueue.detector import Saturation
from kvprobe.offload.engine import HAND_OVER_NS
from kvprobe.offload.rungs import Rung, Sample

REPORTS = Path(__file__).parents[2] / "reports"
LOOP, BATCH, POOLED, SPLIT = (
    Rung("shared", "loop"),
    Rung("shared", "batch"),
    Rung("pooled", "auto"),
    Rung("split", "own"),
)
KINDS = {  # what stands on auto, and how often it is drawn
    "loop": 4,  # an adapter of vLLM up to 0.19: single copies, or the submitter
    "batch": 3,  # vLLM since 0.20: a batch a transfer, or the submitter
    "engine": 3,  # the engine: it knows no device time, and a detector sees its calls
    "split": 1,  # SGLang's stores: calibration says nothing of the other rung
    "ladder": 1,  # three rungs
}
DEPTH, BASELINE_NS = 1021, 1223


def _report(name: str) -> Any:
    return json.loads((REPORTS / name).read_text())


class Figures(NamedTuple):
    """What was measured on an H200.

    Attributes:
        rows: direction and method -> (copy ns by size, fixed ns by size, submit ns by size); of the kernel, 4 CTAs.
        loop_ns: host time of one copy, in vLLM's loop.
        batch_ns: the same in its batches.
        handed_ns: host time of a hand-over by an adapter, and that of one by the engine: (fixed, each copy).
    """

    rows: dict[tuple[str, str], tuple[list[float], list[float], list[float]]]
    loop_ns: tuple[float, float]
    batch_ns: tuple[float, float]
    handed_ns: dict[str, tuple[float, float]]


@cache
def figures() -> Figures:
    """Those of the three reports."""
    rows = {
        (row["direction"], row["method"]): (row["copy_ns"], row["fixed_ns"], row["submit_ns"])
        for row in _report("h200-calibrate.json")["rows"]
        if row["ctas"] in (0, 4)
    }
    seen: dict[str, list[tuple[int, float]]] = {"0.12 shared": [], "0.32": [], "0.12 kvprobe auto": []}
    for row in _report("h200-vllm-handlers.json")["results"]:
        count = re.search(r"([\d,]+) copies", row["row"])
        for arm, found in seen.items():
            if count and row["arms"].get(arm):
                found.append((int(count[1].replace(",", "")), row["arms"][arm]["submit_us"] * 1e3))
    work = _report("h200-fast-path.json")["work"]["spin"]["rounds"][0]
    store = work["store of 8,192 x 64 KiB behind a 30 ms forward"]["pooled, polled once a step"]["held_ms"] * 1e6
    loads = work["1,500 loads of 64 x 64 KiB"]["pooled, polled once a step"]["held_ms"] * 1e6 / 1500
    large = max(seen["0.12 kvprobe auto"])
    small = min(ns for _, ns in seen["0.12 kvprobe auto"])
    each = [[ns / copies for copies, ns in seen[arm] if copies >= 512] for arm in ("0.12 shared", "0.32")]
    return Figures(
        rows,
        (BASELINE_NS, max(each[0])),
        (min(each[1]), max(each[1])),
        {
            "adapter": (small, max(large[1] - small, 0) / large[0]),
            "engine": (loads, (store - loads) / 8192),
        },
    )


def row_ns(direction: str, method: str, size: int, copies: int) -> float:
    """Device time in ns of so many copies of `size` bytes by calibration."""
    each, fixed, _ = figures().rows[direction, method]
    at = min(max(math.log2(size / 1024), 0), len(each) - 1.001)
    low, part = int(at), at - int(at)
    return fixed[low] + copies * (each[low] + part * (each[low + 1] - each[low]))


class Part(NamedTuple):
    """One kind of transfer in the work: copies, bytes of one, and how often it comes beside the others."""

    copies: int
    size: int
    weight: float


class Turn(NamedTuple):
    """One transfer as it comes, whatever rung it meets: what was drawn for it.

    Attributes:
        gap_ns: what the caller does before it.
        wait: whether the caller waits for all copies first.
        front_ns: other work on the device that its copies stand behind.
        host, device: times its host and device times are what they are on average, by chance.
        hiccup_ns: what the host lost in it by something else.
        beside: times the device takes for it by work beside it.
    """

    copies: int
    size: int
    gap_ns: int
    wait: bool
    front_ns: int
    host: float
    device: float
    hiccup_ns: int
    beside: float


@dataclass
class Workload:
    """What is drawn from a seed.

    Attributes:
        kind: of `KINDS`.
        rungs: the base first.
        turns: transfers in their order.
        host, device: by rung, times its calibrated costs it really takes.
        drift: by rung, what those have become at the end, as times what they were.
        fails_at: use of a rung at which it fails; absent: never.
        each_ns: host time of one copy in the server's own loop, and in its batches.
    """

    kind: str
    direction: str
    rungs: list[Rung]
    turns: list[Turn]
    host: dict[Rung, float] = field(default_factory=dict)
    device: dict[Rung, float] = field(default_factory=dict)
    drift: dict[Rung, float] = field(default_factory=dict)
    fails_at: dict[Rung, int] = field(default_factory=dict)
    each_ns: tuple[float, float] = (0.0, 0.0)


def _parts(dice: random.Random) -> list[Part]:
    shapes = [(64, 3.0), (512, 4.0), (2048, 1.0), (8192, 0.5), (16, 1.0), (4, 0.5)]
    made = []
    for _ in range(dice.choice((1, 1, 2, 3))):
        copies = dice.choices([n for n, _ in shapes], [w for _, w in shapes])[0]
        made.append(
            Part(max(1, int(copies * dice.uniform(0.6, 1.3))), 1024 << dice.randrange(2, 12), dice.uniform(0.2, 1))
        )
    return made


def _turns(dice: random.Random, count: int) -> Iterator[Turn]:
    """Steps of a server: a few transfers each, then its model."""
    parts, step_ns = _parts(dice), int(10 ** dice.uniform(5.3, 7.5))
    each_step, waits = dice.choice((1, 1, 2, 4, 8)), dice.random() < 0.5
    front = dice.choice((0, 0, 0, 3_000_000, 30_000_000))
    host_noise, device_noise = dice.uniform(0.03, 0.3), dice.uniform(0.02, 0.15)
    beside, left = 1.0, 0
    for number in range(count):
        if not left:
            beside, left = dice.choice((1.0, 1.0, 1.0, dice.uniform(1.0, 1.8))), dice.randrange(20, 200)
        left -= 1
        part = dice.choices(parts, [one.weight for one in parts])[0]
        first = number % each_step == 0
        yield Turn(
            max(1, int(part.copies * dice.uniform(0.9, 1.1))),
            part.size,
            int(step_ns * dice.uniform(0.8, 1.2)) if first else 2000,
            waits and first,
            int(front * dice.uniform(0.5, 1)) if front and dice.random() < 0.1 else 0,
            math.exp(dice.gauss(0, host_noise)),
            math.exp(dice.gauss(0, device_noise)),
            int(10 ** dice.uniform(4.5, 7)) if dice.random() < 0.005 else 0,
            beside,
        )


def workload(seed: int) -> Workload:
    """The workload of a seed: the same on every machine."""
    dice = random.Random(seed)
    kind = dice.choices(list(KINDS), list(KINDS.values()))[0]
    count = dice.choice((200, 500, 1000))
    turns = list(_turns(dice, count))
    if dice.random() < 0.4:  # other work from some point on
        begin = int(count * dice.uniform(0.2, 0.8))
        turns[begin:] = list(_turns(dice, count - begin))
    rungs = {
        "loop": [LOOP, POOLED],
        "batch": [BATCH, POOLED],
        "engine": [LOOP, POOLED],
        "split": [BATCH, SPLIT],
        "ladder": [LOOP, BATCH, POOLED],
    }[kind]
    made = Workload(kind, dice.choice(("h2d", "d2h")), rungs, turns)
    known = figures()
    made.each_ns = dice.uniform(*known.loop_ns), dice.uniform(*known.batch_ns)
    for rung in rungs:
        lies = dice.random() < 0.15
        made.device[rung] = math.exp(dice.gauss(0, 0.05)) * (dice.uniform(0.7, 4) if lies else 1)
        made.host[rung] = math.exp(dice.gauss(0, 0.1)) * (dice.uniform(0.5, 6) if dice.random() < 0.1 else 1)
        made.drift[rung] = dice.uniform(0.5, 2) if dice.random() < 0.15 else 1.0
        if rung != rungs[0] and dice.random() < 0.05:
            made.fails_at[rung] = dice.randrange(1, 100)
    if kind == "split":  # nothing is known of it
        made.device[SPLIT] *= dice.uniform(0.6, 1.6)
        made.host[SPLIT] *= dice.uniform(0.2, 1.5)
    return made


class SizeCost(NamedTuple):
    """What one transfer took, in ns: of its caller, and of the device; the latter's end."""

    submit_ns: int
    copy_ns: int
    end_ns: int


class Device:
    """One direction of a device: copies in the order in which they were submitted, and how many are outstanding."""

    def __init__(self) -> None:
        """Idle."""
        self.free_ns = 0.0
        self._under_way: deque[tuple[float, float, int]] = deque()  # begin, end, copies

    def outstanding(self, now_ns: float) -> int:
        """Copies that are not complete at that time."""
        while self._under_way and self._under_way[0][1] <= now_ns:
            self._under_way.popleft()
        count = 0.0
        for begin, end, copies in self._under_way:
            count += copies if begin >= now_ns else copies * (end - now_ns) / (end - begin)
        return int(count)

    def take(self, begin_ns: float, end_ns: float, copies: int) -> None:
        """Copies that run from then to then."""
        self._under_way.append((begin_ns, end_ns, copies))
        self.free_ns = end_ns


def cost(work: Workload, turn: Turn, rung: Rung, part: float, device: Device, now_ns: int) -> SizeCost:
    """What a transfer takes on a rung, `part` (0 to 1) of the way through the workload."""
    drifted = 1 + (work.drift[rung] - 1) * part
    host, on_device = work.host[rung] * turn.host, work.device[rung] * turn.device * turn.beside * drifted
    n, blocked = turn.copies, 0.0
    begin = max(now_ns, device.free_ns) + turn.front_ns
    if rung == POOLED:
        fixed, each = figures().handed_ns["engine" if work.kind == "engine" else "adapter"]
        submit = (fixed + each * n) * host
        took = min(row_ns(work.direction, how, turn.size, n) for how in ("batch", "kernel")) * on_device
        begin = max(begin, now_ns + submit)
    elif rung == LOOP:
        submit = work.each_ns[0] * n * host
        each = row_ns(work.direction, "loop", turn.size, n) / n * on_device
        took = max(n * each, now_ns + submit - begin)
        blocked = max(0.0, begin + took - DEPTH * each - now_ns - submit)  # until the last of them has a slot
    else:
        submit = (8000 + work.each_ns[1] * n) * host
        took = row_ns(work.direction, "batch", turn.size, n) * on_device
    device.take(begin, begin + took, n)
    return SizeCost(int(submit + blocked) + turn.hiccup_ns, int(took), int(begin + took))


class Failed(Exception):
    """A rung failed."""


@dataclass
class Played:
    """What a workload came to.

    Attributes:
        cost_ns: host and device time of all transfers.
        changes: of rung.
        log: what was decided: (what, rung before, rung after, turn).
    """

    cost_ns: int = 0
    changes: int = 0
    log: list[tuple[str, Rung, Rung, int]] = field(default_factory=list)


class Server:
    """Plays a workload: as an adapter's path or the engine does, on auto's rung or on a fixed one."""

    def __init__(self, work: Workload, make: Callable[..., Any] | None, fixed: Rung | None = None) -> None:
        """Stands on `fixed`, or on the rung that what `make` makes, an `Auto`, says."""
        self.work, self.fixed, self.now_ns = work, fixed, 0
        self.device, self.played, self.uses = Device(), Played(), dict.fromkeys(work.rungs, 0)
        self._live: deque[tuple[int, Any, int]] = deque()
        self._number = 0
        self._expected: dict[tuple[int, int], tuple[int, int]] = {}
        settings: dict[str, Any] = {"slow_ns": SLOW_NS, "depth": DEPTH if work.rungs[0] == LOOP else 0}
        if work.kind == "engine":
            settings = {"slow_ns": HAND_OVER_NS}
        self.auto = (
            make(work.rungs, self._decided, baseline_ns=BASELINE_NS, now=lambda: self.now_ns, **settings)
            if make
            else None
        )

    def _decided(self, what: str, why: str, *, before: Rung, after: Rung, **_: Any) -> None:
        self.played.log.append((what, before, after, self._number))
        self.played.changes += what in ("switch", "rollback", "return", "refuse")

    def play(self) -> Played:
        """All turns."""
        for number, turn in enumerate(self.work.turns):
            self._number = number
            self.now_ns += turn.gap_ns
            if turn.wait:
                self.now_ns = max(self.now_ns, int(self.device.free_ns))
            self._poll()
            self._transfer(turn)
        return self.played

    def _poll(self) -> None:
        while self._live and self._live[0][0] <= self.now_ns:
            _, sample, copy_ns = self._live.popleft()
            sample.copy_ns = copy_ns
            self.auto.completed(sample)

    def _transfer(self, turn: Turn) -> None:
        auto, work = self.auto, self.work
        rung = self.fixed or auto.rung
        watched = auto is not None and (work.kind == "engine" or auto.watch())
        if auto is not None and not watched:
            rung = work.rungs[0]
        self.uses[rung] += 1
        if self.uses[rung] >= work.fails_at.get(rung, math.inf):
            self.now_ns += 200_000
            self.played.cost_ns += 200_000
            if auto is not None:
                auto.refuse(rung, "it failed")
            rung, watched = work.rungs[0], False
        outstanding = self.device.outstanding(self.now_ns)
        took = cost(work, turn, rung, self._number / len(work.turns), self.device, self.now_ns)
        self.now_ns += took.submit_ns
        self.played.cost_ns += took.submit_ns + took.copy_ns
        if watched and auto.looks(self.now_ns):
            self._tell(turn, rung, outstanding, took)

    def _tell(self, turn: Turn, rung: Rung, outstanding: int, took: SizeCost) -> None:
        auto, work, n = self.auto, self.work, turn.copies
        sample = Sample(n, took.submit_ns, n * turn.size, rung, outstanding, end_ns=self.now_ns)
        if rung == work.rungs[0] and POOLED in work.rungs:
            key = n, turn.size
            if key not in self._expected:
                ns = {how: int(row_ns(work.direction, how, turn.size, n)) for how in ("loop", "batch", "kernel")}
                self._expected[key] = min(ns.values()), ns["loop"]
            sample.expected_ns, own_ns = self._expected[key]
            if work.kind == "engine":
                sample.own_ns = own_ns
        full = work.kind == "engine" and rung == LOOP and outstanding + n > DEPTH
        auto.submitted(sample)
        if full and took.submit_ns > 2 * BASELINE_NS * n:
            seen = Saturation(1, 1, self.now_ns - took.submit_ns, self.now_ns, DEPTH, 16, took.submit_ns, 0)
            auto.saturated(seen, "calls blocked")
        elif work.kind != "engine":
            self._live.append((took.end_ns, sample, took.copy_ns))


class Outcome(NamedTuple):
    """One workload: what auto cost, and each fixed rung, in ns."""

    seed: int
    kind: str
    auto: Played
    fixed: dict[Rung, int]

    @property
    def regret(self) -> float:
        """What auto cost more than the best fixed rung, as a share of that; below 0: it cost less."""
        best = min(self.fixed.values())
        return (self.auto.cost_ns - best) / best

    @property
    def harm(self) -> float:
        """What it cost more than the server without it."""
        base = next(iter(self.fixed.values()))
        return (self.auto.cost_ns - base) / base


def simulate(seed: int, make: Callable[..., Any]) -> Outcome:
    """A seed's workload, under auto and on each fixed rung."""
    work = workload(seed)
    fixed = {rung: Server(work, None, rung).play().cost_ns for rung in work.rungs}
    return Outcome(seed, work.kind, Server(work, make).play(), fixed)


def quantile(values: list[float], share: float) -> float:
    """Of sorted values, the one below which that share lies."""
    return values[min(len(values) - 1, int(share * len(values)))]


def share_above(values: list[float], limit: float) -> float:
    """Of sorted values, the share that is above a limit."""
    return 1 - bisect(values, limit) / len(values)
