"""What auto stands on and judges by: rungs, what transfers on them cost, and two rungs compared at equal sizes."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvprobe.durations import time_text

__all__ = ["Comparison", "Costs", "Decision", "Decisions", "Excess", "Rung", "Sample", "compare", "decision_text"]

WHOLE = 10  # times: a gain of that many and more is said without decimals
MOST_DECISIONS = 1000  # that are kept: a server runs for months


class Rung(NamedTuple):
    """What submits copies, and how.

    Attributes:
        policy: "shared", "pooled", or "upstream": streams of the server's own.
        method: "loop", "batch", "kernel"; "auto": chosen at every submission by calibration.
    """

    policy: str
    method: str

    def __str__(self) -> str:
        return f"{self.policy}/{self.method}"


@dataclass(slots=True)
class Sample:
    """Copies that were submitted: a transfer's, or of one that is submitted in several runs one run's.

    Attributes:
        copies: pieces.
        submit_ns: host time that they cost their caller.
        bytes: payload.
        rung: what was used.
        outstanding: pieces submitted earlier and not known to be complete.
        end_ns: when the caller was done with it; 0: not known.
        of: pieces of the whole transfer; 0: these are all.
        copy_ns: time on the device from first to last copy, None until known.
        expected_ns: what calibration says of the device's time by the best other method; 0: not known.
        own_ns: what it says of the rung's own method; 0: not known.
        cost: where auto counts it.
    """

    copies: int
    submit_ns: int
    bytes: int
    rung: Rung
    outstanding: int = 0
    end_ns: int = 0
    of: int = 0
    copy_ns: int | None = None
    expected_ns: int = 0
    own_ns: int = 0
    cost: SizeCost | None = None

    @property
    def size(self) -> tuple[int, int]:
        """The class of its transfer: powers of two of its pieces and of a piece's bytes."""
        return (self.of or self.copies).bit_length(), (self.bytes // max(1, self.copies)).bit_length()

    def waited(self, ns: int) -> None:
        """Its caller lost so much more to it, after it was submitted."""
        self.submit_ns += ns
        if self.cost is not None:
            self.cost.submit_ns += ns


@dataclass
class Decision:
    """One change of rung.

    Attributes:
        time_ns: when.
        before: until then.
        after: from then on.
        reason: why, in words.
        before_ns: host time that a copy cost its caller before, the mean of all calls of the sizes that were compared.
        after_ns: the same afterwards; 0 until it is known.
    """

    time_ns: int
    before: Rung
    after: Rung
    reason: str
    before_ns: float = 0.0
    after_ns: float = 0.0

    @property
    def gain(self) -> float:
        """How many times cheaper a copy became for its caller; 0 until it is known."""
        return self.before_ns / self.after_ns if self.after_ns else 0.0


class Excess:
    """What transfers take beyond a prediction: Page's test, whose sums leak with time and begin anew at zero.

    Attributes:
        weight: transfers that plainly took longer: each counts as the logarithm of how many times, one at most.
        lost_ns: what all of them took longer.
    """

    __slots__ = ("_end_ns", "lost_ns", "weight")

    def __init__(self) -> None:
        """Nothing."""
        self.forget()

    def forget(self) -> None:
        """As if nothing had been lost."""
        self.weight = self.lost_ns = 0.0
        self._end_ns = 0

    def add(self, took_ns: int, expected_ns: int, times: float, end_ns: int, share: float) -> None:
        """One took so long; `times` what is expected is no loss, nor is `share` of the time since the one before."""
        if not self.weight and took_ns <= times * expected_ns:
            return
        more = math.log(max(took_ns, 1) / (times * expected_ns)) if expected_ns else 1.0
        self.weight += min(more, 1.0)
        self.lost_ns += took_ns - expected_ns - (share * (end_ns - self._end_ns) if self._end_ns else 0)
        self._end_ns = end_ns
        if self.weight <= 0 or self.lost_ns <= 0:
            self.forget()


@dataclass(slots=True)
class SizeCost:
    """What transfers of one size took; of those whose device time is known, that and what was predicted of it."""

    transfers: float = 0
    copies: float = 0
    bytes: float = 0
    submit_ns: float = 0
    timed_bytes: float = 0
    copy_ns: float = 0
    expected_ns: float = 0

    def add_copies(self, sample: Sample) -> None:
        """What one took of the device's time."""
        self.timed_bytes += sample.bytes
        self.copy_ns += sample.copy_ns or 0
        self.expected_ns += sample.expected_ns


class Costs(dict[tuple[int, int], SizeCost]):
    """What transfers on one rung took, by size."""

    def __missing__(self, size: tuple[int, int]) -> SizeCost:
        found = self[size] = SizeCost()
        return found

    def add(self, sample: Sample) -> SizeCost:
        """What it took of its caller's time."""
        each = self[sample.size]
        each.transfers += 1
        each.copies += sample.copies
        each.bytes += sample.bytes
        each.submit_ns += sample.submit_ns
        return each

    def fade(self) -> None:
        """Half of it is forgotten."""
        for each in self.values():
            each.transfers, each.copies, each.bytes = each.transfers / 2, each.copies / 2, each.bytes / 2
            each.submit_ns, each.timed_bytes = each.submit_ns / 2, each.timed_bytes / 2
            each.copy_ns, each.expected_ns = each.copy_ns / 2, each.expected_ns / 2

    def evidence(self) -> dict[str, Any]:
        """Figures for a decision's event."""
        spent, copies = sum(each.submit_ns for each in self.values()), sum(each.copies for each in self.values())
        return {
            "transfers": round(sum(each.transfers for each in self.values())),
            "submit_ns": round(spent),
            "submit_ns_per_copy": spent / max(copies, 1),
        }


class Decisions(deque[Decision]):
    """The newest decisions, oldest first."""

    def __init__(self) -> None:
        super().__init__(maxlen=MOST_DECISIONS)


@dataclass(slots=True)
class Comparison:
    """Two rungs at equal sizes, which weigh as they do afterwards.

    Attributes:
        before_ns: host time a copy, mean of all calls.
        after_ns: the same afterwards.
        copy_before: device time in ns a byte; None where too little of it is known.
        copy_after: the same afterwards.
        whole_gain: times that host and device time of a transfer together became less: the device's as it was measured,
            or until then as it was predicted; of the host alone where neither is known.
        transfers: that were compared, afterwards; 0: there are none.
    """

    before_ns: float = 0.0
    after_ns: float = 0.0
    copy_before: float | None = None
    copy_after: float | None = None
    whole_gain: float = 1.0
    transfers: int = 0

    @property
    def submit_gain(self) -> float:
        """Times that submission became cheaper."""
        return self.before_ns / max(self.after_ns, 1e-9)

    @property
    def copy_gain(self) -> float:
        """Times that the copies became faster; 1 where it is not known."""
        return self.copy_before / max(self.copy_after, 1e-9) if self.copy_before and self.copy_after else 1.0

    @property
    def gain(self) -> str:
        """What became cheaper, in words."""
        over = f"over {self.transfers} transfers"
        if self.submit_gain >= self.copy_gain:
            return f"{over}, a submission was {_times(self.submit_gain)} times cheaper"
        return f"{over}, the copies were {_times(self.copy_gain)} times faster"

    @property
    def loss(self) -> str:
        """What did not."""
        if self.copy_gain < min(1.0, self.submit_gain):
            return f"the copies themselves take {1 / self.copy_gain:.2f} times as long"
        return f"no gain: {time_text(self.after_ns)} a copy, {time_text(self.before_ns)} before"

    def evidence(self) -> dict[str, Any]:
        """Figures for the decision's event."""
        return {
            "transfers": self.transfers,
            "submit_ns_per_copy_before": self.before_ns,
            "submit_ns_per_copy_after": self.after_ns,
            "gain": self.submit_gain,
            "copy_ns_per_byte_before": self.copy_before,
            "copy_ns_per_byte_after": self.copy_after,
            "copy_gain": self.copy_gain,
        }


def _times(gain: float) -> str:
    return f"{gain:.1f}" if gain < WHOLE else f"{gain:,.0f}"


def decision_text(what: str, before: object, after: object) -> str:
    """How a decision begins in a log: of two rungs, or what they are called, which one auto moved to, or keeps."""
    return f"keep {after} (before: {before})" if what == "keep" else f"{what} {before} -> {after}"


def compare(before: Costs, after: Costs) -> Comparison:
    """Two rungs at the sizes that both have met."""
    common = [(before[size], now) for size, now in after.items() if now.copies and size in before]
    common = [(was, now) for was, now in common if was.copies]
    copies = sum(now.copies for _, now in common)
    if not copies:
        return Comparison()
    seen = Comparison(transfers=round(sum(now.transfers for _, now in common)))
    whole_before = sum(was.submit_ns / was.copies * now.copies for was, now in common)
    whole_after = sum(now.submit_ns for _, now in common)
    seen.before_ns, seen.after_ns = whole_before / copies, whole_after / copies
    timed = [(was, now) for was, now in common if was.timed_bytes and now.timed_bytes]
    if timed:
        size = sum(now.timed_bytes for _, now in timed)
        seen.copy_before = sum(was.copy_ns / was.timed_bytes * now.timed_bytes for was, now in timed) / size
        seen.copy_after = sum(now.copy_ns for _, now in timed) / size
    for was, now in common:
        if was.timed_bytes and (now.timed_bytes or was.expected_ns):
            measured = now.copy_ns / now.timed_bytes if now.timed_bytes else 0.0
            whole_before += was.copy_ns / was.timed_bytes * now.bytes
            whole_after += (measured or was.expected_ns / was.timed_bytes) * now.bytes
    seen.whole_gain = whole_before / max(whole_after, 1e-9)
    return seen
