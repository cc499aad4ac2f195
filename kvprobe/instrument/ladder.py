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
        self._not_before: dict[str, int] = {}
        self._failures: dict[str, int] = {}

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
        candidates = [rung for rung in self.rungs[1:] if now >= self._not_before.get(rung, 0)]
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
        if gain >= (1.0 if self._kept else MIN_GAIN) and not slower:
            if not self._kept:
                self._kept = True
                why = f"submission is {gain:.1f} times cheaper over {len(self._recent)} transfers"
                self._decide("keep", why, before=self.base, after=self.rung, **evidence)
            self._recent.clear()
            return
        why = "the copies themselves became slower" if slower else f"submission is only {gain:.2f} times cheaper"
        self._decide("rollback", why, before=self.rung, after=self.base, **evidence)
        failures = self._failures[self.rung] = self._failures.get(self.rung, 0) + 1
        self._not_before[self.rung] = self._now() + COOL_DOWN_NS * 2 ** min(failures - 1, 8)
        self._stand_on(self.base)

    def _stand_on(self, rung: str) -> None:
        self.rung, self._kept = rung, False
        self._recent.clear()
