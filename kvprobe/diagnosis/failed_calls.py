"""Calls return errors.

Mechanism: CUDA refuses a copy, a launch or a wait. Or an earlier operation failed on the GPU, and every later call
returns the error of this operation. A program that ignores the error continues with wrong bytes.

Signature: a call returns a code that is neither 0 nor "not ready". Two kinds of calls do not count: calls that only
test whether memory is registered, and calls while the process ends. The finding is for information only if all errors
are refused allocations, or if all of them came before the serving window, because programs try these calls and handle
their errors. The totals of a recording of `kvprobe run` count all errors, and the recording keeps the first error of
each kind with its thread and time. Nsight Systems keeps the code of each call. The PyTorch profiler keeps no codes.

Time lost: kvprobe states none, because the time that wrong results cost cannot be measured.
Predicted saving: kvprobe predicts none.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvprobe.diagnosis.finding import COUNTED, Change, Evidence, Finding, Loss, NotLookedFor, Severity, cause_of
from kvprobe.diagnosis.joined import CRITICAL, Array, JoinedRecording, ms, share
from kvprobe.diagnosis.traced import longest
from kvprobe.recordings.model import CallKind, Recording
from kvprobe.recordings.vocabulary import error_name

CAUSE = cause_of(__name__)
MOST_LINES = 4

# Not ready; CUDA is gone; registered already, not registered; peers that were made known to one another already.
ANSWERS = np.array([4, 600, 704, 705, 712, 713])
DESTROYED = 709  # the context: a process that ends destroys it
STICKY = frozenset({214, 220, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719})  # every later call fails, too
ASKING = int(CallKind.OTHER)  # cuGetProcAddress, cudaEventQuery, whatever a recorder keeps beside what does work
TRIED = np.array([CallKind.ALLOC, CallKind.FREE, CallKind.CREATE], dtype=np.uint8)


__all__ = ["CAUSE", "FailedCall", "failures", "find", "not_shown"]


@dataclass(frozen=True)
class FailedCall:
    """One call that failed with one code: how often of how many; `rows` are those kept one by one."""

    name: str
    kind: int
    code: int
    count: int
    calls: int
    rows: Array

    @property
    def error(self) -> str:
        """Name and number; of recordings that kept no code, that there was one."""
        return error_name(self.code) if self.code else "an error that was not kept"

    @property
    def said(self) -> str:
        """How many of how many calls returned it."""
        if self.calls == self.count:
            return f"{'the only call' if self.calls == 1 else f'all {self.calls:,} calls'} of {self.name} " + (
                f"returned {self.error}"
            )
        part = share(self.count, self.calls)
        return f"{self.count:,} of {self.calls:,} calls of {self.name}, {part}, returned {self.error}"


def not_shown(joined: JoinedRecording) -> NotLookedFor | None:
    """Kineto keeps no return codes."""
    if joined.recording.source and all(one.format.startswith("kineto") for one in joined.recording.source):
        return NotLookedFor("the PyTorch profiler keeps no return codes", "kvprobe run, or Nsight Systems")
    return None


def find(joined: JoinedRecording) -> Finding | None:
    """Calls that failed, the worst first."""
    found = failures(joined.recording)
    if not found:
        return None
    tried = [one for one in found if _was_tried(joined, one)]
    real = [one for one in found if one not in tried]
    first = (real or tried)[0]
    rows = np.sort(np.concatenate([one.rows for one in (real or tried)])).astype(np.int64)
    count = sum(one.count for one in (real or tried))
    window = (int(joined.start[rows].min()), int(joined.end[rows].max())) if len(rows) else (0, 0)
    none = np.zeros(len(rows), dtype=np.int64)
    loss = Loss(
        0,
        count,
        on="none",
        window=window,
        places=joined.places(rows, none),
        calls=longest(joined, first.rows, first.rows * 0),
    )
    evidence = [Evidence(one.said, one.count, "calls", COUNTED) for one in [*real, *tried][:MOST_LINES]]
    evidence += _first_of(joined, first)
    return joined.finding(
        CAUSE,
        f"{{calls}} calls failed: {first.name}, {first.error}",
        "certain",
        loss,
        severity=_severity(real),
        evidence=evidence,
        cure=(
            Change(f"Test what {first.name} returns, in the code that calls it: {first.error}", "call"),
            Change("To find the call, make each call report its own error: CUDA_LAUNCH_BLOCKING=1, compute-sanitizer"),
        ),
    )


def failures(recording: Recording) -> list[FailedCall]:
    """What failed, by call and error: those that fail for good first, then the most frequent."""
    calls, totals = recording.calls, recording.totals
    ended = _at_the_end(recording)
    works = (calls["kind"] != ASKING) & ~ended
    failed = np.flatnonzero((calls["result"] != 0) & works & ~np.isin(calls["result"], ANSWERS))
    counted = _by_name(totals["name"], np.where(totals["kind"] != ASKING, totals["errors"], 0))
    made = _by_name(totals["name"], totals["calls"]) or _by_name(calls["name"], np.ones(calls.rows, dtype=np.int64))
    kinds = dict(zip(totals["name"].tolist(), totals["kind"].tolist(), strict=True))
    out = []
    names = np.unique(calls["name"][failed])
    for name in names.tolist():
        mine = failed[calls["name"][failed] == name]
        answers = int(((calls["name"] == name) & (np.isin(calls["result"], ANSWERS) | ended)).sum())
        more = max(counted.get(name, 0) - answers - len(mine), 0)  # in the totals alone: as those that were kept
        codes, kept = np.unique(calls["result"][mine], return_counts=True)
        for code, many in zip(codes.tolist(), kept.tolist(), strict=True):
            rows = mine[calls["result"][mine] == code]
            count = many + round(more * many / len(mine))
            kind = int(calls["kind"][rows[0]])
            out.append(FailedCall(recording.text(name), kind, code, count, max(made.get(name, 0), count), rows))
    answered = set(calls["name"][np.isin(calls["result"], ANSWERS) | ended].tolist())
    for name, count in counted.items():  # of earlier recordings, which kept none of them
        if count and name not in names and name not in answered:
            none = np.zeros(0, dtype=np.int64)
            out.append(FailedCall(recording.text(name), kinds[name], 0, count, made.get(name, count), none))
    return sorted(out, key=lambda one: (one.code not in STICKY, -one.count))


def _at_the_end(recording: Recording) -> Array:
    """Mask of the calls that find the context destroyed after the last call of their process that did not fail."""
    calls = recording.calls
    out: Array = calls["result"] == DESTROYED
    for process in np.unique(calls["process"][out]):
        mine = calls["process"] == process
        last = calls["start_ns"][mine & (calls["result"] == 0)].max(initial=0)
        out[mine] &= calls["start_ns"][mine] >= last
    return out


def _by_name(names: Array, values: Array) -> dict[int, int]:
    sums = np.bincount(names, weights=values) if len(names) else np.zeros(0)
    return {int(name): int(sums[name]) for name in np.flatnonzero(sums)}


def _was_tried(joined: JoinedRecording, one: FailedCall) -> bool:
    """Whether programs try this and handle it: memory that is not to be had, and whatever failed at start-up alone."""
    if one.code in STICKY:
        return False
    if one.kind in TRIED:
        return True
    return bool(len(one.rows)) and bool(joined.outside[one.rows].all()) and one.count == len(one.rows)


def _severity(real: list[FailedCall]) -> Severity:
    """By the part of the calls of one name that failed; whatever fails for good is critical."""
    if not real:
        return "info"
    worst = any(one.code in STICKY or one.count >= CRITICAL * one.calls for one in real)
    return "critical" if worst else "warning"


def _first_of(joined: JoinedRecording, one: FailedCall) -> list[Evidence]:
    """Where the first one was made."""
    if not len(one.rows):
        return []
    row = int(one.rows[np.argmin(joined.start[one.rows])])
    after = int(joined.start[row]) - int(joined.start.min())
    traced = longest(joined, np.array([row]), np.zeros(1, dtype=np.int64))
    line = f", {' '.join(traced[0].called)}" if traced and traced[0].line else ""
    when = f"{ms(after)} after the first call" if after else "the first call of the recording"
    text = f"the first one: {when}, by thread {int(joined.thread[row])}{line}"
    return [Evidence(text, after, "ns")]
