"""Auto mode of one copy path: measure, switch when a cause is found, verify on the next transfers, roll back.

A ladder has a base (what the server does) and rungs (what kvprobe can do instead). It watches the host time of
submissions; the cause that makes it switch and the figures before and after go into every decision.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

__all__ = ["Ladder", "Sample"]

WINDOW = 8  # transfers that a verdict looks at
TRIAL = 8  # transfers on a new rung before it is judged
ENOUGH_COPIES = 8  # a transfer of fewer copies says nothing about the cost of one
MIN_GAIN = 1.2
STAY = 0.8  # a kept rung is left when its submissions cost this much more than the base's did, in DOUBTS + 1 windows
DOUBTS = 2
MAX_COPY_COST = 1.3  # a rung may not make the copies themselves slower than this
SUBMISSION_BOUND_NS = 100_000
FULL = 0.9
SLOWER = 2.5
COOL_DOWN_NS = 60_000_000_000


@dataclass
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


def _scale(samples: Sequence[Sample]) -> int:
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
        self._not_before: dict[tuple[str, int], int] = {}  # by rung and scale of the work that it did not help
        self._failures: dict[tuple[str, int], int] = {}

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

    def submitted(self, sample: Sample) -> None:
        """Take in a transfer that was just submitted, and perhaps change the rung for the next one."""
        if sample.rung != self.rung or sample.copies < ENOUGH_COPIES:
            return
        self._recent.append(sample)
        if self.rung == self.base:
            cause = self._find_cause()
            if cause:
                self._switch(cause)
        elif len(self._recent) >= TRIAL:
            self._judge()

    # ---- measuring --------------------------------------------------------------------------------------------

    def _find_cause(self) -> str:
        full = [
            s
            for s in self._recent
            if s.outstanding + s.copies >= FULL * self.depth and s.per_copy >= SLOWER * self.baseline_ns
        ]
        if self.depth and len(full) >= 2:
            return "launch_queue_saturation"
        slow = [s for s in self._recent if s.submit_ns >= SUBMISSION_BOUND_NS and s.copies >= 4 * ENOUGH_COPIES]
        if len(slow) >= 6:
            return "too_many_small_copies" if self.depth else "descriptor_bound_batch"
        return ""

    def _switch(self, cause: str) -> None:
        now = self._now()
        scale = _scale(self._recent)
        candidates = [rung for rung in self.rungs[1:] if now >= self._not_before.get((rung, scale), 0)]
        if not candidates:
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

    # ---- verifying --------------------------------------------------------------------------------------------

    def _judge(self) -> None:
        if not self._before or not _alike(self._before, self._recent):  # other work: the two cannot be compared
            if not self._kept:
                self._stand_on(self.base)
            self._recent.clear()
            return
        before, after = median(s.per_copy for s in self._before), median(s.per_copy for s in self._recent)
        gain = before / max(after, 1e-9)
        cost_before, cost_after = _copy_cost(self._before), _copy_cost(self._recent)
        slower = cost_before is not None and cost_after is not None and cost_after > MAX_COPY_COST * cost_before
        evidence = {
            "cause": self._cause,
            "transfers": len(self._recent),
            "submit_ns_per_copy_before": before,
            "submit_ns_per_copy_after": after,
            "gain": gain,
            "copy_ns_per_byte_before": cost_before,
            "copy_ns_per_byte_after": cost_after,
        }
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
        why = "the copies themselves became slower" if slower else f"submission is only {gain:.2f} times cheaper"
        self._decide("rollback", why, before=self.rung, after=self.base, **evidence)
        key = (self.rung, _scale(self._before))
        failures = self._failures[key] = self._failures.get(key, 0) + 1
        self._not_before[key] = self._now() + COOL_DOWN_NS * 2 ** min(failures - 1, 8)
        self._stand_on(self.base)

    def _stand_on(self, rung: str) -> None:
        self.rung, self._kept, self._doubts = rung, False, 0
        self._recent.clear()
