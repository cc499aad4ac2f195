"""Decides, while transfers run, whether slow submissions are the work of a full launch queue or of something else.

A full queue shows in two ways at once, and only then is it called saturation. First, the stream's outstanding
operations, counted after the completions were looked up, have reached the calibrated depth; or they stay at one level
above half of it because operations complete just as fast as calls get through (a real depth below the calibrated one).
Second, the calls made there lose time again and again (a tenth of them is slow, and far more of them than of the calls
with free slots), or one of them waits so long that the stream itself must be waiting. What looks alike is told by its
own mark: pageable memory by the memory's kind, a thread that lost the CPU by the kernel's count of preemptions, a pause
of the program by the gap lying between calls instead of inside them, a slow link by copies that take long while
submissions stay short.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from kvprobe.durations import time_text
from kvprobe.launchqueue.baseline import Baseline
from kvprobe.launchqueue.calibration import QueueLimits
from kvprobe.launchqueue.call_counts import CallCounts, QueueWindow
from kvprobe.launchqueue.constants import PAUSE_NS
from kvprobe.launchqueue.judge import conclude
from kvprobe.launchqueue.levels import ceiling, half_empty


class Slowness(str, Enum):
    """What made submissions slow."""

    NONE = "none"
    SATURATION = "saturation"
    PAGEABLE = "pageable memory"
    PREEMPTED = "the thread lost the CPU"
    PAUSE = "the program paused between calls"
    SLOW_LINK = "slow link"
    CANNOT_TELL = "cannot tell"


@dataclass(frozen=True)
class SubmissionRun:
    """One run of the native submission loop, as the detector sees it.

    A run lies on one side of the ceiling: its submitter ends it where the count reaches `Detector.ceiling`, and begins
    the next one only after a look at what was completed meanwhile.

    Attributes:
        stream: handle.
        thread: OS thread id that submitted.
        outstanding: operations submitted to the stream and not known to be complete, before this run; near the
            ceiling, with completions looked up just before.
        submitted: copies issued in this run.
        start_ns: when the run began.
        end_ns: when it ended.
        fast: calls below the threshold, and `fast_ns` their sum.
        blocked: calls at or above it, and `blocked_ns` their sum.
        first_blocked: index of the first of them, -1 if none; `first_blocked_ns` when it was entered.
        longest_ns: the longest call.
        preempted: blocked calls in which the thread lost the CPU and waited for nothing else; `preempted_ns` is
            their sum.
        pageable: host memory is not pinned.
        gap_ns: time since the previous run of this transfer ended.
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
    """One stream: its calls at the top of the queue, those with free slots, and how its number outstanding moved."""

    window: QueueWindow | None = None
    onset_ns: int = 0
    depth: int = 0
    with_room: CallCounts = field(default_factory=CallCounts)
    level: int = -1  # outstanding where the count is followed from; -1: not followed
    submitted: int = 0  # since then
    standing: bool = False  # it stood still over the last stretch


def _kept(seen: SubmissionRun) -> tuple[int, int, int]:
    """Calls in which the thread kept its CPU or waited, how many of them were slow, and what they took."""
    slow = seen.blocked - seen.preempted
    return seen.fast + slow, slow, seen.fast_ns + seen.blocked_ns - seen.preempted_ns


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
    other: dict[Slowness, int] = field(default_factory=dict)
    reason: str = ""
    _streams: dict[int, _Stream] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Starts from the calibrated baseline."""
        self._baseline = Baseline(self.limits.baseline_ns, self.limits.p99_ns)

    @property
    def baseline_ns(self) -> int:
        """Host time of a submission while the queue has free slots, learned from such calls."""
        return round(self._baseline.ns)

    @property
    def threshold_ns(self) -> int:
        """A call of at least this counts as slow."""
        return self._baseline.slow_ns

    @property
    def ceiling(self) -> int:
        """Outstanding operations from which on its calls are those at the top of a stream's queue."""
        return ceiling(self.limits.depth)

    def observe(self, seen: SubmissionRun) -> Slowness:
        """Judges one run; `reason` says why in words that a report can print.

        Returns:
            SATURATION at most once per onset; NONE where nothing was slow.
        """
        state = self._streams.setdefault(seen.stream, _Stream())
        at_top = seen.outstanding >= self.ceiling or self._keeps_pace(state, seen)
        if not at_top:
            self._baseline.learn(seen.fast, seen.fast_ns)
        if half_empty(seen.outstanding + seen.submitted, self.limits.depth):
            state.with_room.add(*_kept(seen))
            state.window = None
        elif at_top and state.window is not None:
            window = state.window
            window.span_ns += seen.end_ns - seen.start_ns - seen.preempted_ns
            window.whole_ns += seen.end_ns - seen.start_ns
            if not seen.blocked:
                window.top.add(*_kept(seen))
        if not seen.blocked:
            if seen.gap_ns > PAUSE_NS:
                return self._blame(Slowness.PAUSE, seen.gap_ns, "the time passed between calls, not inside one")
            return Slowness.NONE
        lost = max(seen.blocked_ns - int(seen.blocked * self._baseline.ns), 0)
        if seen.pageable:
            return self._blame(Slowness.PAGEABLE, lost, "the host memory is pageable, so each copy is staged")
        return self._at_ceiling(state, seen, lost) if at_top else self._beneath(seen, lost)

    def _keeps_pace(self, state: _Stream, seen: SubmissionRun) -> bool:
        """Whether the count stands still above half of the depth while as much completes as is submitted.

        A queue that has free slots and is filled rises; one that has some and is emptied falls to none. It is followed
        over an eighth of the depth, for a count is known between runs only.
        """
        if half_empty(seen.outstanding, self.limits.depth):
            state.level, state.standing = -1, False
            return False
        if state.level < 0:
            state.level, state.submitted = seen.outstanding, 0
        elif 8 * state.submitted >= self.limits.depth:
            state.standing = 4 * abs(seen.outstanding - state.level) <= state.submitted
            state.level, state.submitted = seen.outstanding, 0
        state.submitted += seen.submitted
        return state.standing

    def _beneath(self, seen: SubmissionRun, lost: int) -> Slowness:
        count = f"{seen.outstanding + seen.first_blocked} operations were outstanding of {self.limits.depth}"
        if 2 * seen.preempted_ns >= seen.blocked_ns:
            return self._blame(
                Slowness.PREEMPTED, lost, f"{count}; the kernel took the CPU away {seen.preempted} times"
            )
        return self._blame(
            Slowness.CANNOT_TELL, lost, f"the queue had free slots ({count}) and the thread kept its CPU"
        )

    def _at_ceiling(self, state: _Stream, seen: SubmissionRun, lost: int) -> Slowness:
        window = state.window
        if window is None:
            window = state.window = QueueWindow(
                span_ns=seen.end_ns - seen.first_blocked_ns - seen.preempted_ns,
                whole_ns=seen.end_ns - seen.first_blocked_ns,
            )
            state.onset_ns = seen.first_blocked_ns
            state.depth = min(seen.outstanding + seen.first_blocked, self.limits.depth)
        kept, kept_ns = seen.blocked - seen.preempted, seen.blocked_ns - seen.preempted_ns
        window.blocked += seen.blocked
        window.on_cpu += kept
        window.lost_ns += lost
        window.on_cpu_lost_ns += max(kept_ns - kept * self._baseline.ns, 0.0)
        window.longest_ns = max(window.longest_ns, seen.longest_ns)
        window.top.add(*_kept(seen))
        evidence = window.evidence(state.with_room, self._baseline.ns, min(seen.longest_ns, kept_ns))
        if not conclude(evidence).full:
            if 2 * seen.preempted_ns >= seen.blocked_ns:
                return self._blame(Slowness.PREEMPTED, lost, "the kernel took the CPU away during the slow calls")
            self.reason = (
                f"{window.blocked:,} slow calls at {state.depth:,} outstanding are too few to name a cause: "
                f"{window.top.share:.0%} of the calls there, "
                f"{state.with_room.share:.0%} of those with free slots"
            )
            return Slowness.NONE
        self.saturations.append(
            Saturation(
                seen.stream,
                seen.thread,
                state.onset_ns,
                seen.end_ns,
                state.depth,
                window.blocked,
                window.lost_ns,
                window.longest_ns,
            )
        )
        state.window = None
        self.reason = (
            f"{window.blocked:,} calls on stream {seen.stream:#x} blocked with {state.depth:,} operations outstanding "
            f"(the queue holds {self.limits.depth:,}); the longest took {time_text(window.longest_ns)} "
            f"instead of the usual {time_text(self._baseline.ns)}"
        )
        return Slowness.SATURATION

    def link(self, bytes_per_s: float, link_bytes_per_s: float) -> Slowness:
        """Judges a finished transfer's rate: SLOW_LINK below a quarter of the link although submissions were quick."""
        if 0 < bytes_per_s < link_bytes_per_s / 4:
            reason = f"copies ran at {bytes_per_s / 1e9:.1f} GB/s on a link of {link_bytes_per_s / 1e9:.1f}"
            return self._blame(Slowness.SLOW_LINK, 0, reason)
        return Slowness.NONE

    def losses(self) -> Mapping[str, int]:
        """Host time lost so far by cause, in ns."""
        lost = {slowness.value: ns for slowness, ns in self.other.items()}
        lost[Slowness.SATURATION.value] = sum(each.lost_ns for each in self.saturations)
        return lost

    def _blame(self, slowness: Slowness, lost_ns: int, reason: str) -> Slowness:
        self.other[slowness] = self.other.get(slowness, 0) + lost_ns
        self.reason = reason
        return slowness
