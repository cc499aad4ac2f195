"""The classifier of a running stream: from runs of calls, whether its launch queue is full."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvprobe.launchqueue.constants import (
    BLOCKED_SHARE,
    DEARER_TIMES,
    ELSEWHERE_TIMES,
    FENCE_NS,
    LIVE_LOST_SHARE,
    OFTEN_CALLS,
    OFTEN_NS,
    STEADY_CALLS,
    STEADY_SHARE,
    WINDOW_BLOCKED,
    WINDOW_CALLS,
)

__all__ = ["Counted", "Window", "held_up"]


@dataclass(slots=True)
class Counted:
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
class Window:
    """What is known of one stream's calls at the top of its queue since that was last half empty.

    Attributes:
        blocked: slow calls, `lost_ns` what they took above the baseline, `longest_ns` the longest.
        kept: those in which the thread kept its CPU or waited; `kept_lost_ns` likewise.
        span_ns: time since the first of them without what a lost CPU took; `whole_ns` with it.
        top: calls here by whether they were slow, a lost CPU left out.
    """

    blocked: int = 0
    lost_ns: int = 0
    longest_ns: int = 0
    kept: int = 0
    kept_lost_ns: float = 0.0
    span_ns: int = 0
    whole_ns: int = 0
    top: Counted = field(default_factory=Counted)

    def full(self, with_room: Counted, baseline_ns: float, longest_kept_ns: int) -> bool:
        """Whether the slow calls here are a full queue's doing.

        Args:
            with_room: the same stream's calls while its queue had room: what is slow there as well is not the queue's.
            baseline_ns: what a call costs with room.
            longest_kept_ns: the longest call of the newest run that did not lose the CPU.
        """
        if longest_kept_ns >= FENCE_NS:  # the stream itself waits for something
            return True
        lost_share = STEADY_SHARE * self.span_ns
        if self.kept >= STEADY_CALLS and self.kept_lost_ns >= lost_share:
            return True
        if self.blocked >= max(OFTEN_CALLS, self.whole_ns / OFTEN_NS) and self.lost_ns >= STEADY_SHARE * self.whole_ns:
            return True
        several = self.top.slow >= WINDOW_BLOCKED
        return several and (often(self.top, with_room) or dearer(self.top, with_room, baseline_ns))


def often(top: Counted, with_room: Counted) -> bool:
    """Whether a full queue's share of the calls at the top is slow, and far more of them than of those with room.

    Odds are compared, for a share cannot be several times a third: the first calls of a stream, which have room, are
    slow for reasons of their own.
    """
    return top.share >= BLOCKED_SHARE and top.odds >= ELSEWHERE_TIMES * with_room.odds


def dearer(top: Counted, with_room: Counted, baseline_ns: float) -> bool:
    """Whether the count has stood at the top for many calls that cost more than those with room, as a mean.

    The count of a stream whose device is the quicker one falls, however slow its calls are.
    """
    usual = max(baseline_ns, with_room.mean_ns)
    return top.calls >= WINDOW_CALLS and top.mean_ns >= DEARER_TIMES * usual


def held_up(lost_ns: float, passed_ns: float, jumped: bool) -> bool:
    """Whether sums alone let one suspect a full queue: calls became several times slower and hold their thread up."""
    return jumped and lost_ns >= LIVE_LOST_SHARE * passed_ns
