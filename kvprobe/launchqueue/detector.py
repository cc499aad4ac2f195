"""Decides, while transfers run, whether slow submissions are the work of a full launch queue or of something else.

A full queue shows in two ways at once, and only then is it called saturation: the stream's outstanding operations,
counted after the completions were looked up, have reached the calibrated depth; and the calls made from there on lose
time again and again, or one of them waits so long that the stream itself must be waiting. What looks alike is told
apart by its own mark: pageable memory by the memory's kind, a thread that lost the CPU by the
kernel's count of preemptions, a pause of the program by the gap lying between calls instead of inside them, a slow link
by copies that take long while submissions stay short.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from kvprobe.launchqueue.calibration import QueueLimits

ENOUGH_CALLS = 4  # slow calls at the ceiling that cannot be chance,
ENOUGH_SHARE = 0.25  # if a full queue's share of the time is theirs: it drains one copy in the time that one call takes
OFTEN_CALLS, OFTEN_NS = 32, 200_000  # or this many, one in so much time: no scheduler takes a CPU away that often
FENCE_NS = 500_000  # or one call this long: the stream itself waits for something
PAUSE_NS = 50_000
NEAR = 32  # operations below the depth that still count as full: the slack that streams of a channel share


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
    """What is known of one stream's calls at the ceiling since its queue was last half empty.

    `kept`, `kept_lost_ns` and `span_ns` leave out the calls in which the thread lost the CPU; `whole_ns` has them.
    """

    calls: int = 0
    kept: int = 0
    span_ns: int = 0
    whole_ns: int = 0
    kept_lost_ns: float = 0.0
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
        # p99 is of some 1,000 calls, or of 64 where the queue is that short: one lost time slice can be in it
        return max(int(1.8 * self._baseline_ns), min(self.limits.p99_ns, int(2.2 * self._baseline_ns)), 500)

    @property
    def ceiling(self) -> int:
        """Outstanding operations from which on a stream counts as full."""
        return self.limits.depth - min(NEAR, self.limits.depth // 8)

    def observe(self, seen: Observation) -> Verdict:
        """Judges one run; `reason` says why in words that a report can print.

        Returns:
            SATURATION at most once per onset; NONE where nothing was slow.
        """
        full = seen.outstanding >= self.ceiling
        if seen.fast >= 16 and not full:
            # a twentieth of the way, so that one odd run does not move the threshold
            self._baseline_ns += 0.05 * (seen.fast_ns / seen.fast - self._baseline_ns)
        if 2 * (seen.outstanding + seen.submitted) < self.limits.depth:
            self._streams.pop(seen.stream, None)
        elif full and seen.stream in self._streams:
            self._streams[seen.stream].span_ns += seen.end_ns - seen.start_ns - seen.preempted_ns
            self._streams[seen.stream].whole_ns += seen.end_ns - seen.start_ns
        if not seen.blocked:
            if seen.gap_ns > PAUSE_NS:
                return self._blame(Verdict.PAUSE, seen.gap_ns, "the time passed between calls, not inside one")
            return Verdict.NONE
        lost = max(seen.blocked_ns - int(seen.blocked * self._baseline_ns), 0)
        if seen.pageable:
            return self._blame(Verdict.PAGEABLE, lost, "the host memory is pageable, so each copy is staged")
        return self._at_ceiling(seen, lost) if full else self._with_room(seen, lost)

    def _with_room(self, seen: Observation, lost: int) -> Verdict:
        room = f"{seen.outstanding + seen.first_blocked} operations were outstanding of {self.limits.depth}"
        if 2 * seen.preempted_ns >= seen.blocked_ns:
            return self._blame(Verdict.PREEMPTED, lost, f"{room}; the kernel took the CPU away {seen.preempted} times")
        return self._blame(Verdict.CANNOT_TELL, lost, f"the queue had room ({room}) and the thread kept its CPU")

    def _at_ceiling(self, seen: Observation, lost: int) -> Verdict:
        state = self._streams.get(seen.stream)
        if state is None:
            state = self._streams[seen.stream] = _Stream(
                onset_ns=seen.first_blocked_ns,
                depth=min(seen.outstanding + seen.first_blocked, self.limits.depth),
                span_ns=seen.end_ns - seen.first_blocked_ns - seen.preempted_ns,
                whole_ns=seen.end_ns - seen.first_blocked_ns,
            )
        kept, kept_ns = seen.blocked - seen.preempted, seen.blocked_ns - seen.preempted_ns
        state.calls += seen.blocked
        state.kept += kept
        state.lost_ns += lost
        state.kept_lost_ns += max(kept_ns - kept * self._baseline_ns, 0.0)
        state.longest_ns = max(state.longest_ns, seen.longest_ns)
        steady = state.kept >= ENOUGH_CALLS and state.kept_lost_ns >= ENOUGH_SHARE * state.span_ns
        fence = min(seen.longest_ns, kept_ns) >= FENCE_NS
        often = state.calls >= max(OFTEN_CALLS, state.whole_ns / OFTEN_NS)
        often = often and state.lost_ns >= ENOUGH_SHARE * state.whole_ns
        if not (steady or often or fence):
            if 2 * seen.preempted_ns >= seen.blocked_ns:
                return self._blame(Verdict.PREEMPTED, lost, "the kernel took the CPU away during the slow calls")
            self.reason = f"{state.calls} slow calls at {state.depth} outstanding are too few to name a cause"
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
            reason = f"copies ran at {bytes_per_s / 1e9:.1f} GB/s on a link of {link_bytes_per_s / 1e9:.1f}"
            return self._blame(Verdict.SLOW_LINK, 0, reason)
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
