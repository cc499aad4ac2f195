"""What is counted of a running stream's calls: those at the top of its launch queue, and those below it."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvprobe.launchqueue.constants import WINDOW_CALLS
from kvprobe.launchqueue.evidence import LiveWindow

__all__ = ["CallCounts", "QueueWindow"]


@dataclass(slots=True)
class CallCounts:
    """Calls and how many of them were slow, the older ones at a falling weight."""

    calls: float = 0.0
    slow: float = 0.0
    ns: float = 0.0  # of all of them

    @property
    def share(self) -> float:
        """Slow ones among them; 0 without calls."""
        return self.slow / self.calls if self.calls else 0.0

    @property
    def odds(self) -> float:
        """Slow ones for each fast one."""
        fast = self.calls - self.slow
        return self.slow / fast if fast > 0 else float("inf") if self.slow else 0.0

    @property
    def mean_ns(self) -> float:
        """What a call took; 0 without calls."""
        return self.ns / self.calls if self.calls else 0.0

    def add(self, calls: int, slow: int, ns: int) -> None:
        """Takes in a run; beyond a window's worth, what was there before counts half."""
        if self.calls >= WINDOW_CALLS:
            self.calls, self.slow, self.ns = self.calls / 2, self.slow / 2, self.ns / 2
        self.calls += calls
        self.slow += slow
        self.ns += ns


@dataclass(slots=True)
class QueueWindow:
    """What is known of one stream's calls at the top of its queue since that was last half empty.

    Attributes:
        blocked: slow calls, `lost_ns` what they took above the baseline, `longest_ns` the longest.
        on_cpu: those in which the thread kept its CPU or waited; `on_cpu_lost_ns` likewise.
        span_ns: time since the first of them without what a lost CPU took; `whole_ns` with it.
        top: calls here by whether they were slow, a lost CPU left out.
    """

    blocked: int = 0
    lost_ns: int = 0
    longest_ns: int = 0
    on_cpu: int = 0
    on_cpu_lost_ns: float = 0.0
    span_ns: int = 0
    whole_ns: int = 0
    top: CallCounts = field(default_factory=CallCounts)

    def evidence(self, with_room: CallCounts, baseline_ns: float, longest_on_cpu_ns: int) -> LiveWindow:
        """What the judge asks for.

        Args:
            with_room: the same stream's calls while slots were free: what is slow there as well is not the queue's.
            baseline_ns: what a call costs with free slots.
            longest_on_cpu_ns: the longest call of the newest run that did not lose the CPU.
        """
        return LiveWindow(
            longest_on_cpu_ns=longest_on_cpu_ns,
            blocked=self.blocked,
            lost_ns=self.lost_ns,
            span_ns=self.whole_ns,
            on_cpu=self.on_cpu,
            on_cpu_lost_ns=self.on_cpu_lost_ns,
            on_cpu_span_ns=self.span_ns,
            top_calls=self.top.calls,
            top_slow=self.top.slow,
            top_mean_ns=self.top.mean_ns,
            room_odds=with_room.odds,
            room_mean_ns=with_room.mean_ns,
            baseline_ns=baseline_ns,
        )
