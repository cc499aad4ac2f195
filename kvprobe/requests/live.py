"""Steps and requests of running servers, from the lines that they write: waits for tokens, and which of them are late.

Late is what `usual` says, of the newest steps and first tokens of a process: in fixed memory, for months. A look reads
what was added since the one before, of a file that grew by more than MOST_BYTES the newest.
"""

from __future__ import annotations

import json
import re
import threading
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from kvprobe.durations import time_text
from kvprobe.output.requests import LiveRequestsJson
from kvprobe.recordings.model import Array, Phase
from kvprobe.requests.usual import like_of, usual_of_kinds
from kvprobe.runfolder import files
from kvprobe.runfolder.step_lines import one_by_one

__all__ = ["SECONDS", "Alerts", "LateTokens", "LiveRequests", "Sums", "Waited", "WaitsNow"]

MOST_BYTES = 4 << 20  # of a file, in one look
LEAST_TOKENS = 100  # of which a share is worth an alert
_NEWEST = 2_000  # steps, and first tokens, of one kind that say what is usual
_MOST_REQUESTS = 100_000
_FILE = re.compile(r"(?:steps|told)-(\d{1,9})\.jsonl")
_PHASES = {phase.name.lower(): int(phase) for phase in Phase}
SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)  # of the metrics' buckets


@dataclass(frozen=True)
class Waited:
    """One wait for a token: of which request, how long, in which step, until when.

    `trace` is the server's traceparent, "" where it told none.
    """

    request: str
    ns: int
    step: int
    at_ns: int
    trace: str = ""

    def labels(self) -> dict[str, str]:
        """Of an exemplar, which may have 128 characters in all."""
        out = {"request": self.request[:48], "step": str(self.step)}
        parts = self.trace.split("-")
        return {**out, "trace_id": parts[1]} if len(parts) == 4 else out


@dataclass
class Sums:
    """Waits since the first look.

    Attributes:
        count, late, ns: of all; buckets: how many lie at or below each of SECONDS, the last one above, not cumulated.
        newest: of each bucket the newest wait.
    """

    count: int = 0
    late: int = 0
    ns: int = 0
    buckets: list[int] = field(default_factory=lambda: [0] * (len(SECONDS) + 1))
    newest: dict[int, Waited] = field(default_factory=dict)

    def add(self, waits: list[Waited], late: int) -> None:
        """Counts them."""
        self.count += len(waits)
        self.late += late
        for one in waits:
            self.ns += one.ns
            at = bisect_left(SECONDS, one.ns / 1e9)
            self.buckets[at] += 1
            self.newest[at] = one

    def cumulated(self) -> Iterator[tuple[float | None, int, Waited | None]]:
        """Upper bound in seconds (None: of all), how many are at or below it, the newest of the bucket."""
        below = 0
        for at, count in enumerate(self.buckets):
            below += count
            yield SECONDS[at] if at < len(SECONDS) else None, below, self.newest.get(at)


@dataclass
class WaitsNow:
    """A process's steps since the look before.

    Attributes:
        pid: of it. threads: that make the steps.
        steps: by the name of their phase.
        first, between: waits for first and for later tokens.
        late: how many of both came late; worst: the late one that was longest.
    """

    pid: int
    folder: Path
    threads: set[int] = field(default_factory=set)
    steps: dict[str, int] = field(default_factory=dict)
    first: list[Waited] = field(default_factory=list)
    between: list[Waited] = field(default_factory=list)
    late: int = 0
    worst: Waited | None = None

    @property
    def tokens(self) -> int:
        """Waits for tokens."""
        return len(self.first) + len(self.between)

    @property
    def between_ns(self) -> float:
        """The mean time between tokens; 0: none."""
        return sum(one.ns for one in self.between) / max(len(self.between), 1)

    def to_json(self, lines_ns: dict[str, int]) -> LiveRequestsJson:
        """Plain values; `lines_ns`: the mean time between tokens, split."""

        def at(waits: list[Waited], percent: float) -> float | None:
            return float(np.percentile([one.ns for one in waits], percent)) if waits else None

        return {
            "pid": self.pid,
            "steps": dict(sorted(self.steps.items())),
            "tokens": self.tokens,
            "late_tokens": self.late,
            "between_p50_ns": at(self.between, 50),
            "between_p99_ns": at(self.between, 99),
            "first_p50_ns": at(self.first, 50),
            "first_p99_ns": at(self.first, 99),
            "worst_request": self.worst.request if self.worst else "",
            "worst_ns": self.worst.ns if self.worst else None,
            "worst_step": self.worst.step if self.worst else None,
            "lines_ns": lines_ns,
        }


@dataclass
class _Request:
    name: str
    trace: str = ""
    since_ns: int = -1  # the end of the step before, or its arrival
    token_ns: int = -1  # when its last token came, or when it arrived
    step_ns: int = -1  # the end of its last step
    emitted: bool = False
    computed: int = 0


@dataclass
class _New:
    """What one look finds: steps (phase, requests, computed tokens, ns), and waits.

    Beside a wait between tokens stands its step's place in `steps`, beside one for a first token how many tokens were
    computed for it.
    """

    steps: list[tuple[int, int, int, int]] = field(default_factory=list)
    between: list[tuple[int, Waited]] = field(default_factory=list)
    first: list[tuple[int, Waited]] = field(default_factory=list)


class _File:
    """One process's file of steps."""

    def __init__(self, path: Path, pid: int) -> None:
        self.path, self.pid = path, pid
        self.read = 0
        self.requests: dict[int, _Request] = {}
        self.by_name: dict[str, _Request] = {}
        self.usual: dict[str, dict[int, deque[tuple[int, int]]]] = {"steps": {}, "first": {}}  # sizes and times
        self.sums = {"first": Sums(), "between": Sums()}
        self.late: deque[Waited] = deque(maxlen=_NEWEST)

    def look(self) -> WaitsNow:
        now, new = WaitsNow(self.pid, self.path.parent), _New()
        for line in self._new():
            with suppress(AttributeError, KeyError, TypeError, ValueError, OverflowError):
                for one in one_by_one(line):
                    self._line(one, now, new)
        self._judge(now, new)
        return now

    def _new(self) -> Iterator[dict[str, Any]]:
        """Lines since the last look; those that a full file took along come first."""
        try:
            if self.path.stat().st_size < self.read:
                yield from self._lines(self.path.with_name(self.path.stem + "-before.jsonl"))
                self.read = 0
                self.requests.clear()  # each file numbers them itself
        except OSError:  # the next step makes it
            return
        yield from self._lines(self.path)

    def _lines(self, path: Path) -> Iterator[dict[str, Any]]:
        """Whole ones, from where the reading ended."""
        try:
            begin, data = files.read_new(path, self.read, MOST_BYTES)
        except OSError:
            return
        whole = data[: data.rfind(b"\n") + 1]
        cut, self.read = begin > self.read, begin + len(whole)
        for line in whole.splitlines()[cut:]:
            with suppress(ValueError, RecursionError):
                found = json.loads(line)
                if isinstance(found, dict):
                    yield found

    def _request(self, number: int) -> _Request:
        found = self.requests.get(number)
        if found is None:
            if len(self.requests) >= _MOST_REQUESTS:
                self.requests.clear()
            found = self.requests[number] = _Request(f"number {number}", emitted=True)  # what came before was not read
        return found

    def _line(self, line: dict[str, Any], now: WaitsNow, new: _New) -> None:
        kind, at = line["kind"], int(line["t_ns"])
        if kind == "step":
            self._step(line, at, now, new)
            return
        number = int(line["n"])
        if kind == "request":
            name = str(line["request"])
            if len(self.by_name) >= _MOST_REQUESTS:
                self.by_name.clear()
            self.requests[number] = self.by_name.setdefault(name, _Request(name))
            return
        one = self._request(number)
        one.trace = str(line.get("trace") or one.trace)
        if kind == "arrived" and not one.emitted:
            one.token_ns = at
        elif kind == "ended":
            self.requests.pop(number, None)
            self.by_name.pop(one.name, None)

    def _step(self, line: dict[str, Any], at: int, now: WaitsNow, new: _New) -> None:
        phase = _PHASES.get(str(line.get("phase")), 0)
        if phase in (Phase.LOAD, Phase.STORE):
            return
        begin, told = min(int(line.get("begin_ns", at)), at), [self._request(int(one)) for one in line["requests"]]
        tokens, computed = line.get("tokens", 1), line.get("computed") or []
        emitted = [tokens] * len(told) if isinstance(tokens, int) else [*tokens, *[0] * len(told)]
        if isinstance(computed, int):
            computed = [computed] * len(told)
        amount = sum(computed) if len(computed) == len(told) and min(computed, default=-1) >= 0 else -1
        step = -1 if line.get("step") is None else int(line["step"])
        before = max((one.step_ns for one in told), default=-1)
        new.steps.append((phase, len(told), amount, at - (before if before >= 0 else begin)))
        for place, (one, many) in enumerate(zip(told, emitted, strict=False)):
            one.step_ns = at
            one.computed += computed[place] if place < len(computed) else 0
            if one.token_ns < 0:
                one.token_ns = begin
            if many:
                wait = Waited(one.name, at - one.token_ns, step, at, one.trace)
                if one.emitted:
                    new.between.append((len(new.steps) - 1, wait))
                else:
                    new.first.append((one.computed, wait))
                one.emitted, one.token_ns = True, at
        name = Phase(phase).name.lower()
        now.steps[name] = now.steps.get(name, 0) + 1
        if line.get("thread"):
            now.threads.add(int(line["thread"]))

    def _judge(self, now: WaitsNow, new: _New) -> None:
        """Which waits are late, and the sums."""
        now.first, now.between = [one for _, one in new.first], [one for _, one in new.between]
        late: list[Waited] = []
        if new.steps:
            columns = np.array(new.steps, dtype=np.int64)
            like, size = like_of(columns[:, 0], columns[:, 1], columns[:, 2])
            fence = self._fences("steps", like, size, columns[:, 3])
            late += [one for place, one in new.between if one.ns > fence[place]]
            self.sums["between"].add(now.between, len(late))
        if new.first:
            amount = np.array([tokens for tokens, _ in new.first], dtype=np.int64)
            phase, once = np.full(len(amount), int(Phase.PREFILL)), np.ones(len(amount), dtype=np.int64)
            like, size = like_of(phase, once, amount)
            fence = self._fences("first", like, size, np.array([one.ns for _, one in new.first]))
            slow = [one for (_, one), late_ns in zip(new.first, fence, strict=True) if one.ns > late_ns]
            self.sums["first"].add(now.first, len(slow))
            late += slow
        self.late.extend(late)
        now.late, now.worst = len(late), _longest(late)

    def _fences(self, what: str, like: Array, size: Array, took: Array) -> list[float]:
        """From when on each of these is late, with these among the newest."""
        kept = self.usual[what]
        for kind, *one in zip(like.tolist(), size.tolist(), took.tolist(), strict=True):
            kept.setdefault(kind, deque(maxlen=_NEWEST)).append((one[0], one[1]))
        asked = set((like // 64).tolist())
        known = usual_of_kinds({kind: _columns(pairs) for kind, pairs in kept.items() if kind // 64 in asked})
        return [known[kind].late_ns for kind in like.tolist()]


def _columns(pairs: Iterable[tuple[int, int]]) -> tuple[Array, Array]:
    size, took = np.array([*pairs], dtype=np.int64).T
    return size, took


def _longest(waits: Iterable[Waited]) -> Waited | None:
    return max(waits, key=lambda one: one.ns, default=None)


class LiveRequests:
    """Looks at the steps of the processes in run folders again and again; for several threads."""

    def __init__(self) -> None:
        self._files: dict[Path, _File] = {}
        self._lock = threading.Lock()

    def look(self, folders: Iterable[Path]) -> list[WaitsNow]:
        """What each process has done since the last look, where it told steps; the first has what its file holds."""
        with self._lock:
            for path in sorted(path for folder in set(folders) for path in folder.glob("*.jsonl")):
                match = _FILE.fullmatch(path.name)
                if match and path not in self._files:
                    self._files[path] = _File(path, int(match[1]))
            return [one for one in (file.look() for file in self._files.values()) if one.steps]

    def sums(self) -> list[tuple[int, dict[str, Sums]]]:
        """Since the first look, by pid: of "first" and of "between" tokens."""
        with self._lock:
            return [(file.pid, file.sums) for file in self._files.values()]

    def newest(self, since_ns: int) -> Iterator[tuple[int, Path, Sums, Waited | None]]:
        """Of each process: pid, run folder, the sums of all its tokens, and the longest late wait since then."""
        with self._lock:
            for file in self._files.values():
                both = Sums()
                for one in file.sums.values():
                    both.count, both.late = both.count + one.count, both.late + one.late
                late = _longest(one for one in file.late if one.at_ns >= since_ns)
                yield file.pid, file.path.parent, both, late


@dataclass(frozen=True)
class LateTokens:
    """More than a share of a process's tokens came late in the last `window_s`."""

    pid: int
    folder: Path
    tokens: int
    late: int
    limit: float
    window_s: float
    worst: Waited | None

    @property
    def sentence(self) -> str:
        """What to tell."""
        said = (
            f"{self.late:,} of the {self.tokens:,} tokens of process {self.pid} in the last {self.window_s:.0f} s came "
            f"late: {self.late / self.tokens:.1%}, more than {self.limit:.3g}%"
        )
        if self.worst is None:
            return said
        step = f" in step {self.worst.step}" if self.worst.step >= 0 else ""
        return f"{said}; request {self.worst.request} waited longest, {time_text(self.worst.ns)}{step}"

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        worst = self.worst and {**vars(self.worst)}
        return {**vars(self), "folder": str(self.folder), "worst": worst}


class Alerts:
    """Says when more than a share of the newest tokens came late: once, and again when it had been less meanwhile."""

    def __init__(self, requests: LiveRequests, limit: float, window_s: float = 60.0) -> None:
        """`limit`: per cent."""
        self.limit, self.window_s = limit, window_s
        self._requests = requests
        self._before: dict[int, deque[tuple[int, int, int]]] = {}  # time, tokens, late
        self._told: set[int] = set()

    def look(self, now_ns: int) -> list[LateTokens]:
        """Those that passed the limit since the last look; `now_ns`: CLOCK_MONOTONIC."""
        found = []
        since = now_ns - round(self.window_s * 1e9)
        for pid, folder, sums, worst in self._requests.newest(since):
            seen = self._before.setdefault(pid, deque())
            while len(seen) > 1 and seen[1][0] <= since:
                seen.popleft()
            tokens, late = (sums.count - seen[0][1], sums.late - seen[0][2]) if seen else (0, 0)
            seen.append((now_ns, sums.count, sums.late))
            if tokens < LEAST_TOKENS or 100 * late <= self.limit * tokens:
                self._told.discard(pid)
            elif pid not in self._told:
                self._told.add(pid)
                found.append(LateTokens(pid, folder, tokens, late, self.limit, self.window_s, worst))
        return found
