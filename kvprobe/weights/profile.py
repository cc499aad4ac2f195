"""What offload costs, layer by layer, and what each window would give: measured times, and a simulation over them.

The simulation is the window's own rule: copies run one after another on one stream; a copy into a slot starts when the
computation that last used the slot has ended (with window 0: when the layer is entered); a layer computes when it is
entered and its copy has ended. Layers that stay on the GPU are the gaps between. To this come two latencies of each
copy, measured where they are exposed: from what it waited for to its start, and from its end to the computation.

How fast the GPU computes depends on the window too: without the pauses in which it waits for copies its clocks may fall
(its power is limited), and the host may not keep up. That is measured as well, by forwards that copy nothing
(`WeightOffload.without_copies`), and `predict` puts a window's computation between the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from statistics import median
from typing import Any

from kvprobe.weights.timeline import RESIDENT, Forward

WINDOWS = (0, 1, 2, 4)
ALL = "all"


@dataclass(frozen=True)
class Step:
    """One computation of an offloaded unit in a typical forward.

    Attributes:
        unit: its number.
        gap_ns: computation of other layers between the step before and this one.
        copy_ns: a copy of the unit.
        compute_ns: its computation.
    """

    unit: int
    gap_ns: float
    copy_ns: float
    compute_ns: float


@dataclass(frozen=True)
class Typical:
    """A forward made of medians.

    Attributes:
        steps: in order.
        tail_ns: computation behind the last step.
        idle_ns: between two forwards.
        start_ns: from what a copy waited for to its start.
        ready_ns: from a copy's end to the computation that waited for it.
        forward_ns: measured, under `window`; 0 where this is made up.
        window: that it was measured under.
        resident_ns: a forward without any copy, measured; 0: not measured.
    """

    steps: tuple[Step, ...]
    tail_ns: float
    idle_ns: float
    start_ns: float = 0.0
    ready_ns: float = 0.0
    forward_ns: float = 0.0
    window: int = 0
    resident_ns: float = 0.0

    @property
    def compute_ns(self) -> float:
        """All computation of a forward: what it takes with every weight on the GPU."""
        return self.tail_ns + sum(step.gap_ns + step.compute_ns for step in self.steps)


def simulate(typical: Typical, window: int | str, forwards: int = 4) -> float:
    """Time of one forward in the steady state under a window ("all": nothing is ever copied), ns."""
    if window == ALL or not typical.steps:
        return typical.compute_ns
    return forward_times(typical, int(window), [typical.idle_ns] * forwards)[-1]


def forward_times(typical: Typical, window: int, idles: Sequence[float]) -> list[float]:
    """Times of forwards from empty slots on, each followed by an idle time, ns."""
    slots, times = window + 1, []
    last_use: dict[int, float] = {}  # unit in a slot -> end of its last computation, oldest first
    copied_at: dict[int, float] = {}
    now = copied = 0.0
    for idle in idles:
        began = now
        for step in typical.steps:
            enter = now + step.gap_ns
            if step.unit not in last_use:
                free = last_use.pop(next(iter(last_use))) if len(last_use) == slots else 0.0
                copied = max(copied, free, enter if slots == 1 else 0.0) + typical.start_ns + step.copy_ns
                copied_at[step.unit] = copied + typical.ready_ns
            now = max(enter, copied_at[step.unit]) + step.compute_ns
            last_use.pop(step.unit, None)
            last_use[step.unit] = now
        now += typical.tail_ns
        times.append(now - began)
        now += idle
    return times


TOLERATED = 0.02  # of a forward, that its own simulation may be off


def rest_ns(typical: Typical) -> float:
    """What the simulation of the measured window lacks of the measured forward; 0 within the tolerance."""
    rest = typical.forward_ns - simulate(typical, typical.window)
    return rest if typical.forward_ns and abs(rest) > TOLERATED * typical.forward_ns else 0.0


def predict(typical: Typical, window: int | str) -> float:
    """Time of one forward under a window, from the forwards that were measured under another, ns.

    The computation of a forward takes what was measured while the GPU computed the share of the time it did then, and
    `resident_ns` when it computes all the time; between the two it is interpolated, for the share of the time that the
    simulation finds. What the simulation of the measured window lacks (`rest_ns`) is spread over the steps as an
    overhead of each.
    """
    if window == ALL and typical.resident_ns:
        return typical.resident_ns
    return simulate(paced(typical, window), window)


def paced(typical: Typical, window: int | str) -> Typical:
    """With the computation times of another window, and the overhead that the measured one showed."""
    if typical.steps and (rest := rest_ns(typical)):
        each = rest / len(typical.steps)
        typical = replace(typical, steps=tuple(replace(s, gap_ns=max(s.gap_ns + each, 0)) for s in typical.steps))
    now = typical.compute_ns
    if window == typical.window or not typical.resident_ns or not typical.forward_ns or not now:
        return typical
    then = now / max(typical.forward_ns, now)  # share of the time that the GPU computed
    slow = 1.0
    for _ in range(32):
        busy = now * slow / simulate(_slowed(typical, slow), window)
        share = min(max((busy - then) / (1 - then), 0.0), 1.0) if then < 0.99 else 0.0
        slow = (slow + 1 + (typical.resident_ns / now - 1) * share) / 2  # halfway: it settles
    return _slowed(typical, slow)


def _slowed(typical: Typical, slow: float) -> Typical:
    """All computation takes `slow` times as long."""
    steps = (replace(s, gap_ns=s.gap_ns * slow, compute_ns=s.compute_ns * slow) for s in typical.steps)
    return replace(typical, steps=tuple(steps), tail_ns=typical.tail_ns * slow)


@dataclass(frozen=True)
class LayerProfile:
    """One offloaded unit, medians over the forwards that were measured.

    Attributes:
        name: of its module.
        bytes: of one copy.
        copies: a forward.
        copy_ns: of one copy.
        compute_ns: of one computation.
        wait_ns: exposed, a forward: the compute stream had reached the layer and its weights were not there.
        hidden: share of the copy time that ran while the model computed, 0 to 1; 1 without a copy.
    """

    name: str
    bytes: int
    copies: float
    copy_ns: float
    compute_ns: float
    wait_ns: float
    hidden: float


@dataclass(frozen=True)
class WeightProfile:
    """What a forward consists of; times in ns, medians over `forwards` forwards.

    Attributes:
        forwards: measured under this window, the first (cold) one left out where there are more.
        window: the window they ran under.
        forward_ns: one forward.
        copy_ns: all copies of a forward, one after another.
        compute_ns: all computation.
        wait_ns: exposed: computation stood still for a copy.
        bytes: copied a forward.
        hidden: share of the copy time behind computation.
        link_bytes_per_s: of the copies themselves.
        bound_ns: max(copy, compute), the least that a perfect prefetch could reach.
        predicted: window ("0", "1", "2", "4", "all") -> forward time, from these times by simulation.
        measured: window -> median forward time, of every window this model ran under; "all": of forwards that copied
            nothing.
        rest_ns: of a forward, what the simulation of its own window does not explain, where that is over 2%.
        layers: in the order of the forward.
        unmeasured: forwards for which events ran short.
    """

    forwards: int
    window: int
    forward_ns: float
    copy_ns: float
    compute_ns: float
    wait_ns: float
    bytes: int
    hidden: float
    link_bytes_per_s: float
    bound_ns: float
    predicted: dict[str, float] = field(default_factory=dict)
    measured: dict[str, float] = field(default_factory=dict)
    layers: tuple[LayerProfile, ...] = ()
    unmeasured: int = 0
    rest_ns: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return asdict(self)


def typical(forwards: Sequence[Forward]) -> Typical:
    """The forward made of medians, of those that have the newest one's window and sequence of units.

    Args:
        forwards: oldest first; at least one that copied. Those without copies give `resident_ns` alone.
    """
    still = [one for one in forwards if one.window == RESIDENT]
    forwards = [one for one in forwards if one.window != RESIDENT]
    window = forwards[-1].window
    forwards = _steady([one for one in forwards if one.window == window])
    sequence = [visit.unit for visit in forwards[-1].visits]
    same = [one for one in forwards if [visit.unit for visit in one.visits] == sequence]
    copy_ns = _copies(forwards)
    steps = []
    for i, unit in enumerate(sequence):
        before = [(one.visits[i - 1].leave_ns if i else one.start_ns) for one in same]
        gaps = [one.visits[i].enter_ns - end for one, end in zip(same, before, strict=True)]
        steps.append(
            Step(unit, max(median(gaps), 0), copy_ns.get(unit, 0.0), median(one.visits[i].compute_ns for one in same))
        )
    tails = [one.end_ns - (one.visits[-1].leave_ns if one.visits else one.start_ns) for one in same]
    idles = [b.start_ns - a.end_ns for a, b in pairwise(forwards)]
    start_ns, ready_ns = _latencies(forwards)
    return Typical(
        tuple(steps),
        max(median(tails), 0),
        max(median(idles), 0) if idles else 0.0,
        start_ns,
        ready_ns,
        float(median(one.total_ns for one in same)),
        window,
        float(median(one.total_ns for one in _steady(still))) if still else 0.0,
    )


def _latencies(forwards: Sequence[Forward]) -> tuple[float, float]:
    """`start_ns` and `ready_ns` of a Typical, from forwards of one window; 0 where nothing exposes them."""
    starts, readies, slots = [], [], forwards[-1].window + 1
    for one in forwards:
        for i, visit in enumerate(one.visits):
            if not visit.bytes:
                continue
            end = visit.copy_start_ns + visit.copy_ns
            if end > visit.enter_ns:  # else the layer did not wait for it
                readies.append(visit.enter_ns + visit.wait_ns - end)
            if slots == 1:
                starts.append(visit.copy_start_ns - visit.enter_ns)
            elif i >= slots:
                before = one.visits[i - 1]
                free = one.visits[i - slots].leave_ns
                starts.append(visit.copy_start_ns - max(before.copy_start_ns + before.copy_ns, free))
    return (max(median(starts), 0.0) if starts else 0.0), (max(median(readies), 0.0) if readies else 0.0)


def profile(forwards: Sequence[Forward], names: Sequence[str], sizes: Sequence[int], unmeasured: int) -> WeightProfile:
    """The profile of measured forwards: of those under the newest window, beside the times of all windows.

    Args:
        forwards: oldest first; at least one.
        names: of the units.
        sizes: of the units, bytes.
        unmeasured: forwards that are not among them.
    """
    window = next(one.window for one in reversed(forwards) if one.window != RESIDENT)
    mine = _steady([one for one in forwards if one.window == window])
    middle = typical(forwards)
    measured = {}
    for width in sorted({one.window for one in forwards}):
        those = _steady([one for one in forwards if one.window == width])
        measured[ALL if width == RESIDENT else str(width)] = float(median(one.total_ns for one in those))
    copy_ns = float(median(sum(v.copy_ns for v in one.visits) for one in mine))
    wait_ns = float(median(sum(v.wait_ns for v in one.visits) for one in mine))
    moved = int(median(sum(v.bytes for v in one.visits) for one in mine))
    per_copy = _copies(mine)
    layers = []
    for unit in dict.fromkeys(step.unit for step in middle.steps):
        visits = [[v for v in one.visits if v.unit == unit] for one in mine]
        wait = float(median(sum(v.wait_ns for v in some) for some in visits))
        copies = sum(1 for some in visits for v in some if v.bytes) / len(visits)
        spent = copies * per_copy.get(unit, 0.0)
        layers.append(
            LayerProfile(
                names[unit],
                sizes[unit],
                copies,
                per_copy.get(unit, 0.0),
                float(median(s.compute_ns for s in middle.steps if s.unit == unit)),
                wait,
                _hidden(spent, wait),
            )
        )
    compute_ns = middle.compute_ns
    return WeightProfile(
        forwards=len(mine),
        window=window,
        forward_ns=float(median(one.total_ns for one in mine)),
        copy_ns=copy_ns,
        compute_ns=compute_ns,
        wait_ns=wait_ns,
        bytes=moved,
        hidden=_hidden(copy_ns, wait_ns),
        link_bytes_per_s=moved / copy_ns * 1e9 if copy_ns else 0.0,
        bound_ns=max(copy_ns, compute_ns),
        predicted={str(width): predict(middle, width) for width in sorted({*WINDOWS, window})}
        | {ALL: predict(middle, ALL)},
        measured=measured,
        layers=tuple(layers),
        unmeasured=unmeasured,
        rest_ns=rest_ns(middle),
    )


def _steady(forwards: Sequence[Forward]) -> list[Forward]:
    """Without the first, which starts with empty slots, where there are others."""
    return list(forwards[1:]) if len(forwards) > 1 else list(forwards)


def _hidden(copy_ns: float, wait_ns: float) -> float:
    return min(max(1 - wait_ns / copy_ns, 0.0), 1.0) if copy_ns else 1.0


def _copies(forwards: Sequence[Forward]) -> dict[int, float]:
    """Median time of a copy, by unit."""
    times: dict[int, list[int]] = {}
    for one in forwards:
        for visit in one.visits:
            if visit.bytes:
                times.setdefault(visit.unit, []).append(visit.copy_ns)
    return {unit: float(median(values)) for unit, values in times.items()}
