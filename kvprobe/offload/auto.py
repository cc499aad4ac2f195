"""Auto: the only one who changes anything, for the engine and for the adapters, and who says when, why, what it gained.

It watches what copies cost on the rung in force, changes to the next rung when a cause is found, compares like with
like, and keeps the rung or goes back. A rung is a pair (policy, copy method). Both sides of a comparison are means of
all calls, at equal sizes: transfers are put in classes by the number and the size of their copies, powers of two each,
and only classes seen on both rungs count. A kept rung is judged for one window in `LOOK_NS`: its callers pay for no
more. What was measured before it was kept says little once the work has changed: where it looks bad, the base is
measured anew. Where nothing is left to try for the work at hand it rests, and asks for one transfer in `REST` alone; so
it does where `CALM` transfers in a row cost nothing, until one does.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

from kvprobe.launchqueue.constants import (
    COSTLY_BATCH,
    SATURATION,
    SLOWER_TIMES,
    SMALL_COPIES,
)
from kvprobe.launchqueue.detector import Saturation
from kvprobe.launchqueue.evidence import Transfers
from kvprobe.launchqueue.judge import conclude

__all__ = ["REST", "Auto", "Decision", "Rung", "Sample"]

WINDOW = 8  # transfers that a cause is found in
WINDOW_COPIES = 4096  # so many copies, or WINDOW transfers if those are more, are what a rung is judged by
TRIAL = 8  # transfers on a new rung before it is judged, or TRIAL_LARGE of them where they come to WINDOW_COPIES
TRIAL_LARGE = 3  # and a clear loss over so many ends a trial
REST = 16  # one transfer in so many is watched when no rung is left to try, or nothing has cost anything for long
CALM = 64  # transfers in a row on the base, none of which was slow
ENOUGH_COPIES = 8  # a transfer of fewer copies says nothing about the cost of one
ENOUGH_BYTES = 256 << 10  # nor does one of fewer bytes about the rate of the link
OFTEN = 6  # of WINDOW transfers: so many must show a cause that one alone could show by chance
PLAIN, FEW = 3.0, 3  # or so many that each took so many times what another method takes, or more of less: as plain
MIN_GAIN = 1.2  # a rung stays only if submission or the copies themselves became so many times cheaper
STAY = 0.8  # a kept rung is doubted when it costs this much more than the base did
LOOK_NS = 100_000_000  # a kept rung that shows no harm is judged again after so long
DOUBTS = 2  # and left for the base when the next so many windows say so too; twice as many each time
MOST_DOUBTS = 512
MAX_COPY_COST = 1.15  # a rung may not make the copies themselves slower than this, unless submission gains more:
MOST_COPY_COST = 1.5  # then this is the limit
MAX_SUBMIT_COST = 1.5  # nor submission, where it is for the copies' sake
BELOW_RATE = 1.3  # copies that take so many times what calibration says of another method are worth a change
BUSY_COPIES = 3072  # submissions from which on their share of the caller's time is judged; fewer where it is clear
BUSY_NS = 300_000  # and the least time that is worth a change
COOL_DOWN_NS = 60_000_000_000  # until a rung that gained nothing is tried again for such work; doubles each time
MOST_DECISIONS = 1000


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

    @property
    def per_copy(self) -> float:
        """Host nanoseconds a piece."""
        return self.submit_ns / max(1, self.copies)

    @property
    def size(self) -> tuple[int, int]:
        """The class of its transfer: powers of two of its pieces and of a piece's bytes."""
        return (self.of or self.copies).bit_length(), (self.bytes // max(1, self.copies)).bit_length()


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


@dataclass(slots=True)
class Comparison:
    """Two rungs at equal sizes.

    Attributes:
        before_ns: host time a copy, mean of all calls; sizes weigh as they do afterwards.
        after_ns: the same afterwards.
        copy_before: device time in ns a byte; None where fewer than three transfers of a side are known.
        copy_after: the same afterwards.
        whole_before: host time of a transfer and its device time together, mean in ns; 0 where the latter is not known.
        whole_after: the same afterwards.
        transfers: that were compared, afterwards.
        copies: of them.
    """

    before_ns: float = 0.0
    after_ns: float = 0.0
    copy_before: float | None = None
    copy_after: float | None = None
    whole_before: float = 0.0
    whole_after: float = 0.0
    transfers: int = 0
    copies: int = 0

    @property
    def submit_gain(self) -> float:
        """Times that submission became cheaper."""
        return self.before_ns / max(self.after_ns, 1e-9)

    @property
    def copy_gain(self) -> float:
        """Times that the copies became faster; 1 where it is not known."""
        return self.copy_before / max(self.copy_after, 1e-9) if self.copy_before and self.copy_after else 1.0

    def copies_suffer(self, allowed: float) -> bool:
        """Whether the copies take more than `allowed` times as long, and submission has not gained more than that."""
        worse = self.whole_after > self.whole_before or self.copy_gain < 1 / MOST_COPY_COST
        return self.copy_gain < 1 / allowed and worse

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


@dataclass(slots=True)
class _Sums:
    """Of samples of one size; those whose device time is known apart."""

    transfers: int = 0
    copies: int = 0
    submit_ns: int = 0
    timed: int = 0
    timed_bytes: int = 0
    copy_ns: int = 0


def _by_size(samples: Iterable[Sample]) -> dict[tuple[int, int], _Sums]:
    found: dict[tuple[int, int], _Sums] = {}
    for sample in samples:
        size = sample.size
        sums = found.get(size)
        if sums is None:
            sums = found[size] = _Sums()
        sums.transfers += 1
        sums.copies += sample.copies
        sums.submit_ns += sample.submit_ns
        if sample.copy_ns:
            sums.timed += 1
            sums.timed_bytes += sample.bytes
            sums.copy_ns += sample.copy_ns
    return found


def compare(before: Iterable[Sample], after: Iterable[Sample]) -> Comparison:
    """Costs of two groups of samples at the sizes that both have; no transfers: there are none."""
    return _compared(_by_size(before), _by_size(after))


def _compared(before: dict[tuple[int, int], _Sums], after: dict[tuple[int, int], _Sums]) -> Comparison:
    common = [(left, after[size]) for size, left in before.items() if size in after]
    made = Comparison(transfers=sum(right.transfers for _, right in common))
    made.copies = sum(right.copies for _, right in common)
    if not made.copies:
        return Comparison()
    made.before_ns = sum(left.submit_ns / max(1, left.copies) * right.copies for left, right in common) / made.copies
    made.after_ns = sum(right.submit_ns for _, right in common) / made.copies
    timed = [(left, right) for left, right in common if left.timed and right.timed]
    if sum(left.timed for left, _ in timed) >= 3 and sum(right.timed for _, right in timed) >= 3:
        size = max(1, sum(right.timed_bytes for _, right in timed))
        made.copy_before = sum(left.copy_ns / max(1, left.timed_bytes) * right.timed_bytes for left, right in timed)
        made.copy_before /= size
        made.copy_after = sum(right.copy_ns for _, right in timed) / size
        count = sum(right.timed for _, right in timed)
        made.whole_before = made.copy_before * size / count
        made.whole_after = made.copy_after * size / count
        for left, right in timed:
            copies, weight = right.copies / right.transfers, right.timed / count
            made.whole_before += left.submit_ns / max(1, left.copies) * copies * weight
            made.whole_after += right.submit_ns / right.transfers * weight
    return made


def _mean(samples: Sequence[Sample]) -> float:
    return sum(s.submit_ns for s in samples) / max(1, sum(s.copies for s in samples))


def _by_calibration(times: Sequence[float]) -> str:
    return f"{median(times):.1f} times what another method takes by calibration"


def _scale(samples: Iterable[Sample]) -> int:
    """Pieces a transfer, in powers of four: what failed for small transfers may still help large ones."""
    return int(median(s.of or s.copies for s in samples)).bit_length() // 2


class Auto:
    """Which rung a path stands on, and why. Any thread may call it.

    Attributes:
        active: whether it may change anything.
        rungs: the base first, then the candidates in the order in which they are tried.
        rung: the one in force.
        decisions: what it changed, oldest first.
    """

    def __init__(
        self,
        rungs: Sequence[Rung],
        decide: Callable[..., None],
        *,
        active: bool = True,
        depth: int = 0,
        baseline_ns: int = 0,
        slow_ns: int = 0,
        busy_share: float = 0.0,
        now: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """Stands on the base.

        Args:
            rungs: the base first.
            decide: called with (what, why, before=, after=, **evidence) for every decision.
            active: whether it may change anything.
            depth: operations a launch queue takes; 0 where a copy takes no slot of it, or somebody else judges that.
            baseline_ns: host time of one submission while the queue has free slots, as calibrated.
            slow_ns: a transfer that holds its caller for so long is worth a change, full queue or not; 0: never.
            busy_share: submissions that take this share of their caller's time are; 0: never.
            now: clock in ns.
        """
        self.active = active
        self.rungs = list(rungs)
        self.rung = self.rungs[0]
        self.decisions: list[Decision] = []
        self.depth, self.baseline_ns, self.slow_ns, self.busy_share = depth, baseline_ns, slow_ns, busy_share
        self._decide, self._now = decide, now
        self._lock = threading.RLock()
        self._recent: deque[Sample] = deque()
        self._copies = 0
        self._before: list[Sample] = []
        self._summed: tuple[int, dict[tuple[int, int], _Sums]] | None = None  # of those, and how many were timed
        self._cause = ""
        self._fresh = False  # nothing was submitted on this rung yet
        self._kept = False
        self._look_ns = 0  # when the kept rung is judged again
        self._doubts = 0
        self._allowed = DOUBTS  # before the base is measured anew
        self._resting = False
        self._unwatched = 0  # since the last one that was watched
        self._calm = 0  # transfers in a row on the base that showed no cause
        self._not_before: dict[tuple[Rung, int], int] = {}  # by rung and scale of the work that it did not help
        self._failures: dict[tuple[Rung, int], int] = {}
        self._rested: set[int] = set()  # scales of work for which resting was said

    @property
    def base(self) -> Rung:
        """What is done without auto."""
        return self.rungs[0]

    @property
    def resting(self) -> bool:
        """Whether only one transfer in `REST` is asked for: no rung is left to try, or none was slow for long."""
        return self._resting or self._calm >= CALM

    def refuse(self, rung: Rung, why: str) -> None:
        """This rung does not work here at all: never try it again."""
        with self._lock:
            if rung not in self.rungs[1:]:
                return
            self.rungs.remove(rung)
            self._decide("refuse", why, before=rung, after=self.base)
            if self.rung == rung:
                self.stand_on(self.base)

    def watch(self) -> bool:
        """Whether the next transfer is to be measured and handed to `submitted`; the others run on the base."""
        if not self.resting:
            return True
        self._unwatched += 1
        if self._unwatched < REST:
            return False
        self._unwatched = 0
        return True

    def looks(self, now_ns: int) -> bool:
        """Whether what is submitted at that time is judged; of what stands on a kept rung only some of it is."""
        return self.active and not (self._kept and now_ns < self._look_ns)

    def submitted(self, sample: Sample) -> None:
        """Take in what was just submitted, and perhaps change the rung for the next one."""
        if not self.looks(self._now()) or sample.rung != self.rung:
            return
        if (sample.of or sample.copies) < ENOUGH_COPIES:
            self._calm += 1
            return
        with self._lock:
            if self._resting:
                bad = self._is_slow(sample) or self._is_held_up(sample)
                if sample.copies < 4 * ENOUGH_COPIES or not bad or not self._candidates([sample]):
                    return
                self._resting = False  # other work, or the cool-down is over
            if self._fresh:  # the first one on a rung pays for what is loaded then
                self._fresh = False
                return
            self._take(sample)
            if self.rung == self.base:
                self._calm = 0 if self._is_slow(sample) or self._is_held_up(sample) else self._calm + 1
                self._look_for_a_cause(sample)
            else:
                self._look_at_the_gain()

    def completed(self, sample: Sample) -> None:
        """The device's time of a sample handed in before is known."""
        if not self.active or self.rung != self.base or self._resting:
            return
        if self._times(sample, sample.copy_ns) < BELOW_RATE:
            return
        with self._lock:
            self._calm = 0
            times = [self._times(s, s.copy_ns) for s in list(self._recent)[-2 * WINDOW :]]
            below = [each for each in times if each >= BELOW_RATE]
            if len(below) >= OFTEN and self._candidates():
                self._change(SMALL_COPIES, f"{SMALL_COPIES}: they take {_by_calibration(below)}")

    def saturated(self, seen: Saturation, reason: str) -> None:
        """A detector called a full queue: on the base rung that is a reason to change."""
        if self.active and self.rung == self.base:
            with self._lock:
                if self._candidates():
                    self._change(SATURATION, f"the launch queue was full: {reason}", seen.noticed_ns)

    # ---- measuring --------------------------------------------------------------------------------------------

    def _take(self, sample: Sample) -> None:
        self._recent.append(sample)
        self._copies += sample.copies
        while len(self._recent) > WINDOW and self._copies - self._recent[0].copies >= WINDOW_COPIES:
            self._copies -= self._recent.popleft().copies
        if len(self._recent) > 64 * WINDOW:
            self._copies -= self._recent.popleft().copies

    def _is_slow(self, sample: Sample) -> bool:
        return 0 < self.slow_ns <= sample.submit_ns and sample.copies >= 4 * ENOUGH_COPIES

    def _is_held_up(self, sample: Sample) -> bool:
        return 0 < SLOWER_TIMES * self.baseline_ns * sample.copies <= sample.submit_ns

    @staticmethod
    def _times(sample: Sample, ns: int | None) -> float:
        """How many times what another method takes for it by calibration; 0: not known, or of too few bytes."""
        known = ns and sample.expected_ns > 0 and sample.bytes >= ENOUGH_BYTES
        return ns / sample.expected_ns if ns and known else 0.0

    @staticmethod
    def _is_clear(times: Sequence[float]) -> bool:
        """Whether they were slow so often, or by so much, that it is not by chance; none counts for more than PLAIN."""
        below = [min(each, PLAIN) for each in times if each >= BELOW_RATE]
        return len(below) >= OFTEN or math.prod(below) >= PLAIN**FEW

    def _candidates(self, work: Sequence[Sample] = ()) -> list[Rung]:
        """Rungs that may be tried now for this kind of work, the latest where none is named."""
        work = work or list(self._recent)[-WINDOW:]
        if not work:
            return self.rungs[1:]
        now, scale = self._now(), _scale(work)
        return [rung for rung in self.rungs[1:] if now >= self._not_before.get((rung, scale), 0)]

    def _look_for_a_cause(self, sample: Sample) -> None:
        last = list(self._recent)[-WINDOW:]
        cause = why = ""
        if self._is_slow(sample) or self._is_held_up(sample):
            outstanding = tuple(s.outstanding + s.copies for s in last if self._is_held_up(s))
            if conclude(Transfers(outstanding, self.depth)).full:
                cause = SATURATION
            elif sum(map(self._is_slow, last)) >= OFTEN:
                cause = SMALL_COPIES if self.depth else COSTLY_BATCH
            why = f"{cause}: a copy took {_mean(last) / 1e3:.2f} µs to submit"
        if not cause and self.busy_share:
            why = self._why_bound(last)
            cause = SMALL_COPIES if why else ""
        if not cause:
            why = self._why_waiting(last)
            cause = SMALL_COPIES if why else ""
        if cause and self._candidates():
            self._change(cause, why)
        elif cause:
            self._rest(cause)

    def _why_bound(self, last: Sequence[Sample]) -> str:
        """How submitting takes the caller's time; "": it does not, or not enough was seen."""
        if self._is_clear([self._times(s, s.submit_ns) for s in last]):  # from a few: the latest that took BUSY_NS
            judged, left = deque[Sample](), BUSY_NS
            for sample in reversed(self._recent):
                judged.appendleft(sample)
                left -= sample.submit_ns
                if left <= 0:
                    break
        elif self._copies >= BUSY_COPIES:
            judged = self._recent
        else:
            return ""
        spent = sum(s.submit_ns for s in judged)
        span = judged[-1].end_ns - (judged[0].end_ns - judged[0].submit_ns)
        if spent < BUSY_NS or spent < self.busy_share * span:
            return ""
        copies = sum(s.copies for s in judged)
        return f"{copies} submissions took {spent / 1e6:.1f} ms of their caller's {span / 1e6:.1f} ms"

    def _why_waiting(self, last: Sequence[Sample]) -> str:
        """How transfers wait for others on the device, by a method that calibration knows a faster one for; or ""."""
        waiting = [s for s in last if s.outstanding > 0 and self._times(s, s.own_ns) >= BELOW_RATE]
        times = [self._times(s, s.own_ns) for s in waiting]
        if sum(s.own_ns - s.expected_ns for s in waiting) < BUSY_NS or not self._is_clear(times):
            return ""
        return f"{SMALL_COPIES}: they wait for one another, and take {_by_calibration(times)}"

    def _change(self, cause: str, why: str, time_ns: int = 0) -> None:
        after, before = self._candidates()[0], self.rung
        self._before, self._summed, self._cause = list(self._recent), None, cause
        mean = _mean(self._before) if self._before else 0.0
        self._add(Decision(time_ns or self._now(), before, after, why, mean))
        evidence: dict[str, Any] = {"cause": cause, "transfers": len(self._before), "depth": self.depth}
        if self._before:
            evidence["submit_ns_per_copy"] = mean
            evidence["submit_ns"] = sum(s.submit_ns for s in self._before)
            evidence["outstanding"] = max(s.outstanding + s.copies for s in self._before)
        self.stand_on(after)
        self._decide("switch", why, before=before, after=after, **evidence)

    def _add(self, decision: Decision) -> None:
        if len(self.decisions) < MOST_DECISIONS:
            self.decisions.append(decision)

    def _rest(self, cause: str) -> None:
        scale = _scale(list(self._recent)[-WINDOW:])
        if scale not in self._rested:
            self._rested.add(scale)
            why = (
                f"{cause}, and no other method is left to try for such transfers: from now on one in {REST} is measured"
            )
            self._decide("note", why, before=self.base, after=self.base, cause=cause)
        self.stand_on(self.base)
        self._resting, self._unwatched = True, 0

    # ---- verifying --------------------------------------------------------------------------------------------

    def _look_at_the_gain(self) -> None:
        count = len(self._recent)
        done = count >= TRIAL or (count >= TRIAL_LARGE and self._copies >= WINDOW_COPIES)
        if not done and (self._kept or count != TRIAL_LARGE):
            return
        seen = _compared(self._sums_before(), _by_size(self._recent))
        if not done:
            if seen.transfers >= TRIAL_LARGE and self._loses(seen, MAX_COPY_COST**2):
                self._roll_back(seen)
        elif seen.transfers < TRIAL_LARGE:  # other work than before: the two cannot be compared
            if not self._kept:
                self._return("the transfers before and after differ too much to be compared")
            self._look_later()
        elif self._gains(seen):
            self._doubts = 0
            if not self._kept:
                self._keep(seen)
            self._look_later()
        elif not self._kept:
            self._roll_back(seen)
        elif self._doubts < self._allowed:  # one bad window of a rung that proved itself is no reason to leave
            self._doubts += 1
            self._forget()
        else:
            self._allowed = min(2 * self._allowed, MOST_DOUBTS)
            self._return(f"{self._loss(seen)}, and the work may have changed: the base is measured anew")

    def _sums_before(self) -> dict[tuple[int, int], _Sums]:
        """Of what came before the change; made anew only where the device's time of more of it has become known."""
        timed = sum(1 for sample in self._before if sample.copy_ns)
        if self._summed is None or self._summed[0] != timed:
            self._summed = timed, _by_size(self._before)
        return self._summed[1]

    def _return(self, why: str) -> None:
        """Back on the base without a verdict."""
        rung = self.rung
        self.stand_on(self.base)
        self._add(Decision(self._now(), rung, self.base, why))
        self._decide("return", why, before=rung, after=self.base)

    @staticmethod
    def _loss(seen: Comparison) -> str:
        if seen.copy_gain < 1 / MAX_COPY_COST:
            return f"the copies themselves take {1 / seen.copy_gain:.2f} times as long"
        return f"no gain: {seen.after_ns / 1e3:.2f} µs a copy, {seen.before_ns / 1e3:.2f} µs before"

    def _gains(self, seen: Comparison) -> bool:
        least = STAY if self._kept else MIN_GAIN
        cheaper = seen.submit_gain >= least and not seen.copies_suffer(MAX_COPY_COST)
        faster = seen.copy_gain >= least and seen.submit_gain >= 1 / MAX_SUBMIT_COST
        return cheaper or faster

    @staticmethod
    def _loses(seen: Comparison, allowed: float) -> bool:
        return seen.copies_suffer(allowed) or (seen.submit_gain < 1 / MIN_GAIN and seen.copy_gain < MIN_GAIN)

    def _keep(self, seen: Comparison) -> None:
        self._kept = True
        self._note_gain(seen)
        if seen.submit_gain >= MIN_GAIN:
            why = f"submission is {seen.submit_gain:.1f} times cheaper over {seen.transfers} transfers"
        else:
            why = f"the copies are {seen.copy_gain:.1f} times faster over {seen.transfers} transfers"
        self._decide("keep", why, before=self.base, after=self.rung, cause=self._cause, **seen.evidence())

    def _note_gain(self, seen: Comparison) -> None:
        decision = self.decisions[-1]
        if decision.after == self.rung and not decision.after_ns:
            decision.before_ns, decision.after_ns = seen.before_ns, max(seen.after_ns, 1e-3)

    def _roll_back(self, seen: Comparison) -> None:
        why = self._loss(seen)
        self._note_gain(seen)
        rung, key = self.rung, (self.rung, _scale(self._before))
        failures = self._failures[key] = self._failures.get(key, 0) + 1
        self._not_before[key] = self._now() + COOL_DOWN_NS * 2 ** min(failures - 1, 8)
        self._add(Decision(self._now(), rung, self.base, why))
        cause = self._cause
        self.stand_on(self.base)
        self._decide("rollback", why, before=rung, after=self.base, cause=cause, **seen.evidence())

    def _look_later(self) -> None:
        self._look_ns = self._now() + LOOK_NS
        self._forget()

    def _forget(self) -> None:
        self._recent.clear()
        self._copies = 0

    def stand_on(self, rung: Rung) -> None:
        """Take a rung without a verdict."""
        self._fresh = rung != self.base
        self.rung, self._kept, self._doubts, self._resting, self._calm = rung, False, 0, False, 0
        self._forget()
