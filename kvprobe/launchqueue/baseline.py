"""What a submission costs while the queue has free slots: the one figure that every slow call is measured against."""

from __future__ import annotations

from kvprobe.launchqueue.constants import (
    BASELINE_DRIFT,
    BASELINE_RUN,
    BASELINE_STEP,
    SLOW_AT_LEAST_NS,
    SLOW_AT_MOST_TIMES,
    SLOW_TIMES,
)

__all__ = ["Baseline"]


class Baseline:
    """The calibrated cost of a call, moved a little by calls that found free slots, and bound to the calibrated one.

    Without the bound a queue that is full for long teaches its own blocked calls as normal, step by step.

    Attributes:
        calibrated_ns: median host time of a submission while the queue has free slots, as measured.
        p99_ns: its 99th percentile.
        ns: what is held to be normal now.
    """

    __slots__ = ("calibrated_ns", "ns", "p99_ns")

    def __init__(self, calibrated_ns: float, p99_ns: float = 0.0) -> None:
        self.calibrated_ns, self.p99_ns = float(calibrated_ns), float(p99_ns)
        self.ns = self.calibrated_ns

    def learn(self, calls: int, total_ns: float) -> None:
        """Takes in a run of calls that were fast and found free slots; too short a run teaches nothing."""
        if calls < BASELINE_RUN:
            return
        moved = self.ns + BASELINE_STEP * (total_ns / calls - self.ns)
        self.ns = min(max(moved, self.calibrated_ns / BASELINE_DRIFT), self.calibrated_ns * BASELINE_DRIFT)

    @property
    def slow_ns(self) -> int:
        """A call of at least this counts as slow. What it means is decided by what was outstanding, not by this."""
        # p99 is of some 1,000 calls, or of 64 where the queue is that short: one lost time slice can be in it
        wanted = max(SLOW_TIMES * self.ns, min(self.p99_ns, 1.2 * SLOW_TIMES * self.ns))
        return max(int(min(wanted, SLOW_AT_MOST_TIMES * self.calibrated_ns)), SLOW_AT_LEAST_NS)
