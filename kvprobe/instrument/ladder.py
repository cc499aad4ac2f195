"""Auto mode of one copy path: measure, switch when a cause is found, verify on the next transfers, roll back.

A ladder has a base (what the server does) and rungs (what kvprobe can do instead). It watches the host time of
submissions; the cause that makes it switch and the figures before and after go into every decision. Where nothing it
can do helps the work at hand, it rests: one transfer in `REST` is watched, and the server has the others to itself.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from kvprobe.launchqueue.constants import FULL_SHARE, SLOWER_TIMES

__all__ = ["Ladder", "Sample"]

WINDOW = 8  # transfers that a verdict looks at
TRIAL = 8  # transfers on a new rung before it is judged
GLANCE = 3  # transfers on a new rung after which a clear loss ends the trial
REST = 16  # one transfer in so many is watched when no rung is left to try
ENOUGH_COPIES = 8  # a transfer of fewer copies says nothing about the cost of one
MIN_GAIN = 1.2
STAY = 0.8  # a kept rung is left when its submissions cost this much more than the base's did, in DOUBTS + 1 windows
DOUBTS = 2
MAX_COPY_COST = 1.3  # a rung may not make the copies themselves slower than this
SUBMISSION_BOUND_NS = 100_000
COOL_DOWN_NS = 60_000_000_000


@dataclass(slots=True)
class Sample:
    """One transfer as a ladder sees it.

    Attributes:
        copies: pieces asked for.
        submit_ns: host time spent submitting them.
        outstanding: pieces submitted earlier on the path and not known to be complete.
        copy_ns: GPU time from first to last copy, None until known.
        bytes: payload.
        rung: what was used.
    """

    copies: int
    submit_ns: int
    outstanding: int
    bytes: int
    rung: str
    copy_ns: int | None = None

    @property
    def per_copy(self) -> float:
        """Host nanoseconds a piece."""
        return self.submit_ns / max(1, self.copies)


def _alike(left: Sequence[Sample], right: Sequence[Sample]) -> bool:
    """Whether two groups carry the same kind of work: pieces a transfer and bytes a piece within a factor of two."""
    for measure in (lambda s: s.copies, lambda s: s.bytes / max(1, s.copies)):
        a, b = median(map(measure, left)), median(map(measure, right))
        if not 0.5 <= a / max(b, 1e-9) <= 2.0:
            return False
    return True


def _scale(samples: Iterable[Sample]) -> int:
    """Pieces a transfer, in powers of four: what failed for small transfers may still help large ones."""
    return int(median(s.copies for s in samples)).bit_length() // 2


def _copy_cost(samples: Sequence[Sample]) -> float | None:
    costs = [s.copy_ns / s.bytes for s in samples if s.copy_ns and s.bytes]
    return median(costs) if len(costs) >= 3 else None


class Ladder:
    """Which rung a path stands on, and why.

    Args:
        rungs: the base first, then the candidates in the order in which they are tried.
        depth: operations a launch queue takes; 0 where a copy is a descriptor of a batch and takes no place in it.
        baseline_ns: host time of one submission with room in the queue, as calibrated.
        decide: called with (what, why, before, after, evidence).
        now: nanosecond clock.
    """

    def __init__(
        self,
        rungs: Sequence[str],
        depth: int,
        baseline_ns: int,
        decide: Callable[..., None],
        now: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.rungs = list(rungs)
        self.rung = self.rungs[0]
        self.depth, self.baseline_ns = depth, baseline_ns
        self._decide, self._now = decide, now
        self._recent: deque[Sample] = deque(maxlen=WINDOW)
        self._before: list[Sample] = []
        self._cause = ""
        self._kept = False
        self._doubts = 0
        self._resting = False
        self._unwatched = 0  # since the last one that was watched
        self._not_before: dict[tuple[str, int], int] = {}  # by rung and scale of the work that it did not help
        self._failures: dict[tuple[str, int], int] = {}
        self._rested: set[int] = set()  # scales of work for which resting was said

    @property
    def base(self) -> str:
        """What the server does by itself."""
        return self.rungs[0]

    def refuse(self, rung: str, why: str) -> None:
        """This rung does not work here at all: never try it again."""
        self._decide("refuse", why, before=rung, after=self.base)
        self.rungs.remove(rung)
        if self.rung == rung:
            self._stand_on(self.base)

    @property
    def resting(self) -> bool:
        """No rung is left to try for the work at hand."""
        return self._resting

    def watch(self) -> bool:
        """Whether the next transfer is to be measured and handed to `submitted`; the others run on the base."""
        if not self._resting:
            return True
        self._unwatched += 1
        if self._unwatched < REST:
            return False
        self._unwatched = 0
        return True

    def submitted(self, sample: Sample) -> None:
        """Take in a transfer that was just submitted, and perhaps change the rung for the next one."""
        if sample.rung != self.rung or sample.copies < ENOUGH_COPIES:
            return
        if self._resting:
            large = sample.copies >= 4 * ENOUGH_COPIES
            if not large or not (self._is_slow(sample) or self._is_held_up(sample)) or not self._candidates((sample,)):
                return
            self._resting = False  # other work, or the cool-down is over
        self._recent.append(sample)
        if self.rung == self.base:
            if self._is_slow(sample) or self._is_held_up(sample):
                cause = self._find_cause()
                if cause:
                    self._switch(cause)
        elif len(self._recent) >= TRIAL:
            self._judge()
        elif not self._kept and len(self._recent) >= GLANCE:
            self._glance()

    # ---- measuring --------------------------------------------------------------------------------------------

    @staticmethod
    def _is_slow(sample: Sample) -> bool:
        return sample.submit_ns >= SUBMISSION_BOUND_NS and sample.copies >= 4 * ENOUGH_COPIES

    def _is_held_up(self, sample: Sample) -> bool:
        return sample.submit_ns >= SLOWER_TIMES * self.baseline_ns * sample.copies

    def _find_cause(self) -> str:
        if self.depth:
            full = [
                s for s in self._recent if s.outstanding + s.copies >= FULL_SHARE * self.depth and self._is_held_up(s)
            ]
            if len(full) >= 2:
                return "launch_queue_saturation"
        if sum(map(self._is_slow, self._recent)) >= 6:
            return "too_many_small_copies" if self.depth else "descriptor_bound_batch"
        return ""

    def _candidates(self, work: Iterable[Sample]) -> list[str]:
        """Rungs that may be tried for this kind of work now."""
        now, scale = self._now(), _scale(work)
        return [rung for rung in self.rungs[1:] if now >= self._not_before.get((rung, scale), 0)]

    def _switch(self, cause: str) -> None:
        candidates = self._candidates(self._recent)
        if not candidates:
            self._rest(cause)
            return
        self._before, self._cause = list(self._recent), cause
        self._decide(
            "switch",
            f"{cause}: a copy took {median(s.per_copy for s in self._before) / 1e3:.2f} us to submit",
            before=self.rung,
            after=candidates[0],
            cause=cause,
            transfers=len(self._before),
            submit_ns_per_copy=median(s.per_copy for s in self._before),
            submit_ns=sum(s.submit_ns for s in self._before),
            outstanding=max(s.outstanding + s.copies for s in self._before),
            depth=self.depth,
        )
        self._stand_on(candidates[0])

    def _rest(self, cause: str) -> None:
        scale = _scale(self._recent)
        if scale not in self._rested:
            self._rested.add(scale)
            why = f"{cause}, and nothing is left to try for such transfers: from now on one in {REST} is watched"
            self._decide("note", why, before=self.base, after=self.base, cause=cause)
        self._stand_on(self.base)
        self._resting, self._unwatched = True, 0

    # ---- verifying --------------------------------------------------------------------------------------------

    def _glance(self) -> None:
        """End a trial early whose first transfers lost what a rung must gain: each one more costs the server."""
        if not self._before or not _alike(self._before, self._recent):
            return
        gain, slower, evidence = self._compare(MAX_COPY_COST**2)
        if gain < 1 / MIN_GAIN or slower:
            self._roll_back(gain, slower, evidence)

    def _judge(self) -> None:
        if not self._before or not _alike(self._before, self._recent):  # other work: the two cannot be compared
            if not self._kept:
                self._stand_on(self.base)
            self._recent.clear()
            return
        gain, slower, evidence = self._compare(MAX_COPY_COST)
        if gain >= (STAY if self._kept else MIN_GAIN) and not slower:
            self._doubts = 0
            if not self._kept:
                self._kept = True
                why = f"submission is {gain:.1f} times cheaper over {len(self._recent)} transfers"
                self._decide("keep", why, before=self.base, after=self.rung, **evidence)
            self._recent.clear()
            return
        if self._kept and self._doubts < DOUBTS:  # one bad window of a rung that proved itself is no reason to leave it
            self._doubts += 1
            self._recent.clear()
            return
        self._roll_back(gain, slower, evidence)

    def _compare(self, allowed: float) -> tuple[float, bool, dict[str, Any]]:
        """Times that submission became cheaper, whether copies cost more than `allowed` times as much, the figures."""
        before, after = median(s.per_copy for s in self._before), median(s.per_copy for s in self._recent)
        gain = before / max(after, 1e-9)
        cost_before, cost_after = _copy_cost(self._before), _copy_cost(self._recent)
        evidence = {
            "cause": self._cause,
            "transfers": len(self._recent),
            "submit_ns_per_copy_before": before,
            "submit_ns_per_copy_after": after,
            "gain": gain,
            "copy_ns_per_byte_before": cost_before,
            "copy_ns_per_byte_after": cost_after,
        }
        slower = cost_before is not None and cost_after is not None and cost_after > allowed * cost_before
        return gain, slower, evidence

    def _roll_back(self, gain: float, slower: bool, evidence: dict[str, Any]) -> None:
        why = "the copies themselves became slower" if slower else f"submission is only {gain:.2f} times cheaper"
        self._decide("rollback", why, before=self.rung, after=self.base, **evidence)
        key = (self.rung, _scale(self._before))
        failures = self._failures[key] = self._failures.get(key, 0) + 1
        self._not_before[key] = self._now() + COOL_DOWN_NS * 2 ** min(failures - 1, 8)
        self._stand_on(self.base)

    def _stand_on(self, rung: str) -> None:
        self.rung, self._kept, self._doubts, self._resting = rung, False, 0, False
        self._recent.clear()
