"""Steps and requests joined with the account: what is late, by how much, and which line explains it."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace

import numpy as np

from kvprobe.account import Account, Line
from kvprobe.output.requests import LateRequestJson, LateStepJson, PhaseJson, RequestsJson, WaitsJson
from kvprobe.recordings.model import Array, Phase, Recording
from kvprobe.recordings.serving import ServingWindow
from kvprobe.requests.held import InStep, held_in
from kvprobe.requests.served import ServedSteps, served
from kvprobe.requests.split import LOAD, PART_KEYS, PARTS, TURN, causes_in, gpu_of, lines_in
from kvprobe.requests.usual import LEAST, Usual, counts_tokens, like_of, phase_of, usual_of_kinds

__all__ = ["LateRequest", "LateStep", "PhaseTimes", "Requests", "Waits", "joined", "of_account"]

MOST_STEPS = 1000  # late steps that are told one by one, those that cost most
MOST_HELD = 200  # of these, with calls and stacks
TAIL = 99  # per cent: waits from there on are the tail


@dataclass(frozen=True)
class Waits:
    """Times between tokens, or times to first tokens.

    Attributes:
        took_ns: each, ascending.
        tail_ns: the mean of those at or above the 99th percentile, split; (PARTS,).
        late: how many of them are late.
    """

    took_ns: Array
    tail_ns: Array
    late: int

    def at(self, percent: float) -> float | None:
        """A percentile, ns; None where there are none."""
        return float(np.percentile(self.took_ns, percent)) if len(self.took_ns) else None

    def to_json(self) -> WaitsJson:
        """Percentiles, and the tail's parts."""
        return {
            "count": len(self.took_ns),
            "p50_ns": self.at(50),
            "p90_ns": self.at(90),
            "p99_ns": self.at(99),
            "max_ns": self.at(100),
            "late": self.late,
            "tail_ns": _named(self.tail_ns),
        }


@dataclass(frozen=True)
class PhaseTimes:
    """Steps that are like each other: their phase, sizes from `least` to below twice that, and what is usual of them.

    Attributes:
        counted: what the size counts: "tokens" or "requests".
        took_ns: of each of them.
        mean_ns: the mean split of those that are not late, (lines,).
        late: how many are late.
    """

    phase: Phase
    least: int
    counted: str
    usual: Usual
    took_ns: Array
    mean_ns: Array
    late: int

    @property
    def undecided(self) -> str:
        """Why it is not known of all of them whether they are late; "" where it is."""
        return "" if self.usual.count >= LEAST else f"fewer than {LEAST} similar steps were recorded"

    def to_json(self) -> PhaseJson:
        """Plain values."""
        late_ns = self.usual.late_ns
        return {
            "phase": self.phase.name.lower(),
            "least": self.least,
            "counted": self.counted,
            "steps": self.usual.count,
            "median_ns": self.usual.median_ns,
            "late_from_ns": late_ns if np.isfinite(late_ns) else None,
            "late": self.late,
            "lines_ns": _named(self.mean_ns),
            "undecided": self.undecided,
        }


@dataclass(frozen=True)
class LateStep:
    """A step that took longer than its like.

    Attributes:
        step: the server's number, -1 none. process: row. phase: of it.
        from_ns, to_ns: on the recorder's own clock.
        requests: how many waited for it.
        surplus_ns: over the mean of its like, by line, (lines,); they add up to what it took longer.
        line: the line that most of it is in.
        cause: the cause that has explained most of this line there; "" none.
        inside: the longest calls in it, and the stacks that were taken.
    """

    step: int
    process: int
    pid: int
    phase: Phase
    from_ns: int
    to_ns: int
    requests: int
    surplus_ns: Array
    line: Line
    cause: str
    inside: InStep = field(default_factory=InStep)

    @property
    def longer_ns(self) -> int:
        """By how much it was longer than the mean of its like."""
        return int(self.surplus_ns.sum())

    def to_json(self) -> LateStepJson:
        """Plain values."""
        return {
            "step": self.step,
            "pid": self.pid,
            "phase": self.phase.name.lower(),
            "from_ns": self.from_ns,
            "to_ns": self.to_ns,
            "requests": self.requests,
            "longer_ns": self.longer_ns,
            "surplus_ns": _named(self.surplus_ns),
            "line": self.line.key,
            "cause": self.cause,
            "calls": [one.to_json() for one in self.inside.calls],
            "stacks": [one.to_json() for one in self.inside.stacks],
        }


@dataclass(frozen=True)
class LateRequest:
    """A request whose first token, or another one, came late.

    Attributes:
        name: as the server calls it.
        first_token_ns: from its arrival, or from its first step where that was not told; -1: none came.
        first_late: the first one was.
        tokens, late_tokens: waits for later tokens, and those of them that were late.
        surplus_ns: of all its late waits over the mean of their like, (PARTS,).
        part: the largest, a key of PART_KEYS.
        steps: the late steps that it waited for: their numbers, or -1.
    """

    name: str
    pid: int
    first_token_ns: int
    first_late: bool
    tokens: int
    late_tokens: int
    surplus_ns: Array
    part: str
    steps: list[int]

    @property
    def longer_ns(self) -> int:
        """What its late waits took longer than their like."""
        return int(self.surplus_ns.sum())

    def to_json(self) -> LateRequestJson:
        """Plain values."""
        return {
            "request": self.name,
            "pid": self.pid,
            "first_token_ns": self.first_token_ns if self.first_token_ns >= 0 else None,
            "first_late": self.first_late,
            "tokens": self.tokens,
            "late_tokens": self.late_tokens,
            "longer_ns": self.longer_ns,
            "surplus_ns": _named(self.surplus_ns),
            "part": self.part,
            "late_steps": self.steps,
        }


@dataclass(frozen=True)
class Requests:
    """What a recording says of its requests.

    Attributes:
        steps, requests: how many are in the serving window.
        arrivals: how many of the requests told when they arrived; the others count from their first step.
        between_tokens, first_token: waits for later tokens and for first ones.
        phases: steps by their like, in the order of their phases and sizes.
        late_steps: how many are late; `late`: those that took most longer than usual, with what was in them.
        late_requests: those that were late, the one that lost most first.
        undecided: why nothing is said; "" where something is.
    """

    steps: int
    requests: int
    arrivals: int
    between_tokens: Waits
    first_token: Waits
    phases: list[PhaseTimes]
    late_steps: int
    late: list[LateStep]
    late_requests: list[LateRequest]
    undecided: str

    def to_json(self) -> RequestsJson:
        """Plain values."""
        return {
            "steps": self.steps,
            "requests": self.requests,
            "arrivals_told": self.arrivals,
            "between_tokens": self.between_tokens.to_json(),
            "first_token": self.first_token.to_json(),
            "phases": [one.to_json() for one in self.phases],
            "late_steps": self.late_steps,
            "late": [one.to_json() for one in self.late],
            "late_requests": [one.to_json() for one in self.late_requests],
            "undecided": self.undecided,
        }


def _named(parts: Array) -> dict[str, int]:
    """What is not 0, by key."""
    return {PART_KEYS[i]: round(float(ns)) for i, ns in enumerate(parts.tolist()) if round(float(ns))}


def of_account(recording: Recording, account: Account, window: ServingWindow) -> Requests | None:
    """Which steps and requests were late, and why; None where the recording tells no step of a model.

    Args:
        recording: with steps.
        account: of the recording, as far as causes have explained it.
        window: that it is of; steps that begin outside of it are not judged.
    """
    if not recording.steps.rows:
        return None
    told = served(recording)
    return _StepSplit(recording, account, told, window).result() if len(told.to_ns) else None


def joined(recording: Recording, account: Account, window: ServingWindow) -> _StepSplit | None:
    """Every wait for a token, to be split; None where the recording tells no step of a model."""
    told = served(recording) if recording.steps.rows else None
    return _StepSplit(recording, account, told, window) if told is not None and len(told.to_ns) else None


class _StepSplit:
    """One recording's steps, as they are split."""

    def __init__(self, recording: Recording, account: Account, told: ServedSteps, window: ServingWindow) -> None:
        self.recording, self.account, self.told = recording, account, told
        self.pids: list[int] = recording.processes["pid"].tolist()
        self.judged = window.holds(told.process, told.from_ns) & (told.to_ns <= window.end_ns)
        self.gpu = gpu_of(account, told.process)
        self.lines = lines_in(account, self.gpu, told.from_ns, told.to_ns)
        self._groups()
        self._waits()

    def _groups(self) -> None:
        """What is usual of each kind of step."""
        told = self.told
        took = told.took_ns
        self.late = np.zeros(len(took), dtype=bool)
        self.fence = np.full(len(took), np.inf)
        self.mean = np.zeros((len(took), len(Line)))
        self.phases: list[PhaseTimes] = []
        kinds = {like: self.judged & (told.like == like) for like in np.unique(told.like[self.judged]).tolist()}
        known = usual_of_kinds({like: (told.size[mine], took[mine]) for like, mine in kinds.items()})
        means = {}
        for like, mine in kinds.items():
            late = mine & (took > known[like].late_ns)
            self.late |= late
            if not late[mine].all():
                means[like] = self.lines[mine & ~late].mean(axis=0)
        for like, mine in kinds.items():
            all_of_it, usual = told.like == like, known[like]
            mean = means[like] if like in means else means[usual.beside]  # all of a few may be late
            self.fence[all_of_it], self.mean[all_of_it] = usual.late_ns, mean
            counted = "tokens" if counts_tokens(like) else "requests"
            late = int(self.late[mine].sum())
            self.phases.append(PhaseTimes(phase_of(like), 1 << like % 64, counted, usual, took[mine], mean, late))

    def _waits(self) -> None:
        """Every wait for a token: pairs `begins` to `ends` of one request, of which the last one emitted it."""
        told = self.told
        emits = np.flatnonzero(told.tokens > 0)
        new = np.ones(len(emits), dtype=bool)
        new[1:] = told.request[emits[1:]] != told.request[emits[:-1]]
        begins = np.zeros(len(emits), dtype=np.int64)
        begins[1:] = emits[:-1] + 1
        begins[new] = told.first[told.request[emits[new]]]
        self.begins, self.ends, self.is_first = begins, emits, new
        self.took = told.to_ns[told.step[emits]] - told.since_ns[begins]
        self.counts = self.judged[told.step[emits]] & self.judged[told.step[begins]]
        later = ~new & self.counts
        self.is_late = later & (self.took > self.fence[told.step[emits]])
        self.firsts = np.flatnonzero(new & self.counts)
        self._firsts(self.firsts)

    def _firsts(self, rows: Array) -> None:
        """First tokens, compared by the size of what was computed for them."""
        told = self.told
        amount = np.zeros(len(rows), dtype=np.int64)
        pair, of = self._pairs(rows)
        np.add.at(amount, of, np.maximum(told.computed[pair], 0))
        like, size = like_of(np.full(len(rows), Phase.PREFILL), np.ones(len(rows)), amount)
        self.usual_firsts = self._of_steps(rows)
        kinds = {one: np.flatnonzero(like == one) for one in np.unique(like).tolist()}
        known = usual_of_kinds({one: (size[at], self.took[rows[at]]) for one, at in kinds.items()})
        for one, at in kinds.items():
            mine = rows[at]
            late = self.took[mine] > known[one].late_ns
            self.is_late[mine] = late
            if not late.all():
                self.usual_firsts[at] = self.parts(mine[~late]).mean(axis=0)

    def _of_steps(self, waits: Array) -> Array:
        """The mean split of the like of the steps that ended these waits, (waits, PARTS)."""
        out = np.zeros((len(waits), PARTS))
        out[:, : len(Line)] = self.mean[self.told.step[self.ends[waits]]]
        return out

    def _usual(self, waits: Array) -> Array:
        """What these waits consist of when they are not late, (waits, PARTS)."""
        out = self._of_steps(waits)
        first = np.flatnonzero(self.is_first[waits])
        out[first] = self.usual_firsts[np.searchsorted(self.firsts, waits[first])]
        return out

    def _pairs(self, waits: Array) -> tuple[Array, Array]:
        """All pairs of these waits, and the place in `waits` that each is of."""
        first, many = self.begins[waits], self.ends[waits] - self.begins[waits] + 1
        of = np.repeat(np.arange(len(waits)), many)
        return np.arange(len(of)) - np.repeat(np.cumsum(many) - many, many) + np.repeat(first, many), of

    def parts(self, waits: Array) -> Array:
        """These waits split, (waits, PARTS) int64; each row adds up to its wait."""
        told = self.told
        pair, of = self._pairs(waits)
        step = told.step[pair]
        own = self.lines[step].copy()
        begins = np.maximum(told.since_ns[pair], told.from_ns[step])
        cut = np.flatnonzero(begins > told.from_ns[step])  # it arrived when the step was under way
        own[cut] = lines_in(self.account, self.gpu[step[cut]], begins[cut], told.to_ns[step[cut]])
        out = np.zeros((len(waits), PARTS), dtype=np.int64)
        np.add.at(out[:, : len(Line)], of, own)
        np.add.at(out[:, TURN], of, told.turn_ns[pair] - told.load_ns[pair])
        np.add.at(out[:, LOAD], of, told.load_ns[pair])
        return out

    def _all(self, waits: Array) -> Waits:
        took = self.took[waits]
        if not len(waits):
            return Waits(took, np.zeros(PARTS), 0)
        ascending = np.sort(took)
        tail = waits[took >= np.percentile(ascending, TAIL)]
        return Waits(ascending, self.parts(tail).mean(axis=0), int(self.is_late[waits].sum()))

    def result(self) -> Requests:
        told, judged = self.told, self.judged
        there = np.zeros(len(told.name), dtype=bool)
        there[told.request[judged[told.step]]] = True
        who = np.flatnonzero(there)
        undecided = "" if judged.any() else "no step lies in the serving window"
        if not undecided and all(one.undecided for one in self.phases):
            undecided = f"of no kind of step there are {LEAST} to compare"
        return Requests(
            int(judged.sum()),
            len(who),
            int(told.arrived_told[who].sum()),
            self._all(np.flatnonzero(~self.is_first & self.counts)),
            self._all(np.flatnonzero(self.is_first & self.counts)),
            self.phases,
            int(self.late.sum()),
            self._late_steps(),
            self._late_requests(),
            undecided,
        )

    def _late_steps(self) -> list[LateStep]:
        told = self.told
        rows = np.flatnonzero(self.late)
        longer = told.took_ns[rows] - self.mean[rows].sum(axis=1)
        rows = rows[np.argsort(-longer, kind="stable")][:MOST_STEPS]
        surplus = self.lines[rows] - self.mean[rows]
        line = surplus.argmax(axis=1) if len(rows) else np.zeros(0, dtype=np.int64)
        causes = [""] * len(rows)
        for gpu in np.unique(self.gpu[rows]).tolist():
            mine = np.flatnonzero(self.gpu[rows] == gpu)
            found = causes_in(self.account, gpu, told.from_ns[rows[mine]], told.to_ns[rows[mine]], line[mine])
            for at, cause in zip(mine.tolist(), found, strict=True):
                causes[at] = cause
        out = [
            LateStep(
                int(told.number[row]),
                int(told.process[row]),
                self._pid(int(told.process[row])),
                Phase(int(told.phase[row])),
                int(told.from_ns[row]),
                int(told.to_ns[row]),
                int(told.requests[row]),
                surplus[at],
                Line(int(line[at])),
                causes[at],
            )
            for at, row in enumerate(rows.tolist())
        ]
        with_calls = out[:MOST_HELD]
        processes = [
            (one.process, *self._processes(int(self.gpu[row]))) for one, row in zip(with_calls, rows, strict=False)
        ]
        held = held_in(self.recording, [(one.from_ns, one.to_ns) for one in with_calls], processes)
        return [*(replace(one, inside=what) for one, what in zip(with_calls, held, strict=True)), *out[MOST_HELD:]]

    def _processes(self, gpu: int) -> tuple[int, ...]:
        return self.account.gpus[gpu].processes if gpu >= 0 else ()

    def _pid(self, process: int) -> int:
        return self.pids[process] if 0 <= process < len(self.pids) else process

    def _late_requests(self) -> list[LateRequest]:
        told = self.told
        waits = np.flatnonzero(self.is_late)
        of = told.request[self.ends]
        surplus = self.parts(waits) - self._usual(waits)
        who, place = np.unique(of[waits], return_inverse=True)
        total = np.zeros((len(who), PARTS))
        np.add.at(total, place, surplus)
        later = np.bincount(of[~self.is_first & self.counts], minlength=len(told.name))
        pair, of_wait = self._pairs(waits)
        slow = self.late[told.step[pair]]
        of_step, number = place[of_wait[slow]], told.number[told.step[pair[slow]]]
        first = np.full(len(told.name), -1, dtype=np.int64)
        firsts = self.is_first & self.counts
        first[of[firsts]] = self.took[firsts]
        first_late = np.isin(who, of[waits[self.is_first[waits]]])
        late_later = np.bincount(place[~self.is_first[waits]], minlength=len(who))
        order = np.argsort(of_step, kind="stable")
        bounds = np.searchsorted(of_step[order], np.arange(len(who) + 1))
        steps, ends = number[order].tolist(), bounds.tolist()
        of_each = zip(  # plain values at once: there may be thousands
            told.name[who].tolist(),
            told.of_process[who].tolist(),
            first[who].tolist(),
            first_late.tolist(),
            later[who].tolist(),
            late_later.tolist(),
            total,
            total.argmax(axis=1).tolist() if len(who) else (),
            (steps[a:b] for a, b in itertools.pairwise(ends)),
            strict=True,
        )
        out = [
            LateRequest(
                self.recording.text(name), self._pid(process), took, late, tokens, many, parts, PART_KEYS[part], slow
            )
            for name, process, took, late, tokens, many, parts, part, slow in of_each
        ]
        return [out[at] for at in np.argsort(-total.sum(axis=1), kind="stable").tolist()]
