"""Decides, while transfers run, whether slow submissions are the work of a full launch queue or of something else.

A full queue shows in three ways at once, and only then is it called saturation: the stream's outstanding operations
have reached the calibrated depth; the calls made from there on take longer than the baseline; and it is not one
unlucky call, but several, or one that waited for whatever the stream itself waits for. What looks alike is told
apart by its own mark: pageable memory by the memory's kind, a thread that lost the CPU by the kernel's count of
preemptions, a pause of the program by the gap lying between calls instead of inside them, a slow link by copies that
take long while submissions stay short.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from kvprobe.launchqueue.calibration import QueueLimits

ENOUGH_CALLS = 4  # slow calls at the ceiling that cannot be chance
LONG_NS = 50_000  # one call this long at the ceiling is a fence, if the thread kept its CPU
NEAR = 32  # operations below the depth that still count as full: events and slack that the count does not see


class Verdict(str, Enum):
    """What made submissions slow."""

    NONE = "none"
    SATURATION = "saturation"
    PAGEABLE = "pageable memory"
    PREEMPTED = "the thread lost the CPU"
    PAUSE = "the program paused between calls"
    SLOW_LINK = "slow link"
    CANNOT_TELL = "cannot tell"


@dataclass(frozen=True)
class Observation:
    """One run of the native submission loop, as the detector sees it.

    Attributes:
        stream: handle.
        thread: OS thread id that submitted.
        outstanding: operations submitted to the stream and not known to be complete, before this run.
        submitted: copies issued in this run.
        start_ns: when the run began.
        end_ns: when it ended.
        fast: calls below the threshold, and `fast_ns` their sum.
        blocked: calls at or above it, and `blocked_ns` their sum.
        first_blocked: index of the first of them, -1 if none; `first_blocked_ns` when it was entered.
        longest_ns: the longest call.
        preempted: blocked calls during which the kernel took the CPU away, and `preempted_ns` their sum.
        pageable: host memory is not pinned.
        gap_ns: time since the previous run of this transfer ended.
        still_outstanding: like `outstanding`, after the run, completions looked up just now; -1 not looked up.
    """

    stream: int
    thread: int
    outstanding: int
    submitted: int
    start_ns: int
    end_ns: int
    fast: int = 0
    fast_ns: int = 0
    blocked: int = 0
    blocked_ns: int = 0
    first_blocked: int = -1
    first_blocked_ns: int = 0
    longest_ns: int = 0
    preempted: int = 0
    preempted_ns: int = 0
    pageable: bool = False
    gap_ns: int = 0
    still_outstanding: int = -1


@dataclass
class Saturation:
    """A saturation that was called: which queue, since when, at what cost.

    Attributes:
        stream: handle of the stream whose queue was full.
        thread: OS thread id that lost the time.
        onset_ns: entry of the first blocked call.
        noticed_ns: when the detector said so.
        depth: outstanding operations at the onset.
        blocked_calls: blocked calls before it was noticed.
        lost_ns: host time above the baseline in them.
        longest_ns: the longest of them.
    """

    stream: int
    thread: int
    onset_ns: int
    noticed_ns: int
    depth: int
    blocked_calls: int
    lost_ns: int
    longest_ns: int


@dataclass
class _Stream:
    """What is known of one stream's slow calls since it last ran freely."""

    calls: int = 0
    lost_ns: int = 0
    longest_ns: int = 0
    onset_ns: int = 0
    depth: int = 0


@dataclass
class Detector:
    """Watches runs of submissions; one per engine, called by the thread that submitted.

    Attributes:
        limits: the calibrated queue.
        saturations: every saturation called so far.
        other: host time lost to each other cause, in ns.
    """

    limits: QueueLimits
    saturations: list[Saturation] = field(default_factory=list)
    other: dict[Verdict, int] = field(default_factory=dict)
    reason: str = ""
    _streams: dict[int, _Stream] = field(default_factory=dict)
    _baseline_ns: float = 0.0

    def __post_init__(self) -> None:
        """Starts from the calibrated baseline."""
        self._baseline_ns = float(self.limits.baseline_ns)

    @property
    def baseline_ns(self) -> int:
        """Host time of a submission with room in the queue, learned from the calls that had it."""
        return round(self._baseline_ns)

    @property
    def threshold_ns(self) -> int:
        """A call of at least this counts as slow. Low on purpose: at 4 KiB a full queue costs 2.4 times the baseline.

        What a slow call means is decided by the outstanding count, not by this number.
        """
        return max(int(1.8 * self._baseline_ns), self.limits.p99_ns, 500)

    def observe(self, seen: Observation) -> Verdict:
        """Judges one run; `reason` says why in words that a report can print.

        Returns:
            SATURATION at most once per onset; NONE where nothing was slow.
        """
        if seen.fast >= 16:
            # a twentieth of the way, so that one odd run does not move the threshold
            self._baseline_ns += 0.05 * (seen.fast_ns / seen.fast - self._baseline_ns)
        if not seen.blocked:
            self._streams.pop(seen.stream, None)
            if seen.gap_ns > LONG_NS:
                return self._blame(Verdict.PAUSE, seen.gap_ns, "the time passed between calls, not inside one")
            return Verdict.NONE
        lost = max(seen.blocked_ns - int(seen.blocked * self._baseline_ns), 0)
        if seen.pageable:
            return self._blame(Verdict.PAGEABLE, lost, "the host memory is pageable, so each copy is staged")
        entry = seen.outstanding + seen.first_blocked
        if entry < self.limits.depth - NEAR and not self._fills(seen):
            return self._below(seen, lost, entry)
        return self._at_ceiling(seen, lost, max(entry, min(self.limits.depth, entry)))

    def _fills(self, seen: Observation) -> bool:
        """Whether slow calls were made at the ceiling although the first of them came below it (a chance delay)."""
        reached = seen.outstanding + seen.submitted
        return reached >= self.limits.depth and seen.blocked >= 2 * ENOUGH_CALLS

    def _below(self, seen: Observation, lost: int, entry: int) -> Verdict:
        room = f"{entry} operations were outstanding of {self.limits.depth}"
        if seen.preempted and 2 * seen.preempted_ns >= seen.blocked_ns:
            return self._blame(Verdict.PREEMPTED, lost, f"{room}; the kernel took the CPU away {seen.preempted} times")
        return self._blame(Verdict.CANNOT_TELL, lost, f"the queue had room ({room}) and the thread kept its CPU")

    def _at_ceiling(self, seen: Observation, lost: int, entry: int) -> Verdict:
        state = self._streams.setdefault(seen.stream, _Stream())
        if not state.calls:
            state.onset_ns = seen.first_blocked_ns
            state.depth = entry
        kept = seen.blocked - seen.preempted
        state.calls += seen.blocked
        state.lost_ns += lost
        state.longest_ns = max(state.longest_ns, seen.longest_ns)
        after = seen.blocked + seen.fast - (seen.first_blocked - 0)
        slow_share = seen.blocked / max(after, seen.blocked)
        enough = kept >= ENOUGH_CALLS and (slow_share > 0.1 or lost > LONG_NS)
        fence = seen.longest_ns >= LONG_NS and kept > 0
        drained = 0 <= seen.still_outstanding < self.limits.depth // 2 and not enough
        if drained or not (enough or fence):
            if seen.preempted and 2 * seen.preempted_ns >= seen.blocked_ns:
                return self._blame(Verdict.PREEMPTED, lost, "the kernel took the CPU away during the slow calls")
            self.reason = f"{seen.blocked} slow calls at {entry} outstanding are too few to name a cause"
            return Verdict.NONE
        self.saturations.append(
            Saturation(seen.stream, seen.thread, state.onset_ns, seen.end_ns, state.depth, state.calls, state.lost_ns,
                       state.longest_ns)
        )  # fmt: skip
        self._streams.pop(seen.stream, None)
        self.reason = (
            f"stream {seen.stream:#x}: {state.calls} calls blocked at {state.depth} outstanding operations "
            f"(depth {self.limits.depth}); the longest took {state.longest_ns / 1e3:.1f} us "
            f"against a baseline of {self._baseline_ns / 1e3:.2f} us"
        )
        return Verdict.SATURATION

    def link(self, bytes_per_s: float, link_bytes_per_s: float) -> Verdict:
        """Judges a finished transfer's rate: SLOW_LINK below a quarter of the link although submissions were quick."""
        if 0 < bytes_per_s < link_bytes_per_s / 4:
            self.reason = f"copies ran at {bytes_per_s / 1e9:.1f} GB/s on a link of {link_bytes_per_s / 1e9:.1f}"
            return Verdict.SLOW_LINK
        return Verdict.NONE

    def losses(self) -> Mapping[str, int]:
        """Host time lost so far by cause, in ns."""
        lost = {verdict.value: ns for verdict, ns in self.other.items()}
        lost[Verdict.SATURATION.value] = sum(each.lost_ns for each in self.saturations)
        return lost

    def _blame(self, verdict: Verdict, lost_ns: int, reason: str) -> Verdict:
        self.other[verdict] = self.other.get(verdict, 0) + lost_ns
        self.reason = reason
        return verdict
