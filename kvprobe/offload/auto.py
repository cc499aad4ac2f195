"""Auto: the only one who changes anything, for the engine and for the adapters, and who says when, why, what it gained.

On the base rung it adds up what transfers cost beyond what is predicted of another rung, and tries that one when the
loss is plain and as large as a trial's cost. What the trial measures beside what the base measured, at equal sizes,
decides: the rung is kept, or left and not tried again for such work for a while that doubles each time. A kept rung is
judged again for one window in `LOOK_NS`; where it stays bad, the base is measured anew, each time after twice as many
bad windows. Where there is no reason for a change, or no rung left to try, one transfer in `REST` is asked for.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from kvprobe.durations import time_text
from kvprobe.launchqueue.constants import (
    COSTLY_BATCH,
    LEAST_SEEN,
    NOTABLE_SHARE,
    SATURATION,
    SLOWER_TIMES,
    SMALL_COPIES,
)
from kvprobe.launchqueue.detector import Saturation
from kvprobe.launchqueue.evidence import Transfers
from kvprobe.launchqueue.judge import conclude
from kvprobe.offload.rungs import Comparison, Costs, Decision, Decisions, Excess, Rung, Sample, compare

__all__ = ["REST", "Auto"]

EVIDENCE = 2.5  # transfers that lost plainly: each counts as the logarithm of its loss, one at most
LOSS_NS = 300_000  # so much must have been lost before a rung is tried
MIN_GAIN = 1.2  # times that something must be cheaper elsewhere, by prediction and then by measurement
MOST_COPY_COST = 1.5  # times that the copies themselves may become slower, whatever submission gains
TRIAL = 8  # transfers that a rung is judged by
LOST = TRIAL // 2  # of them after which one that clearly loses is left
LOOK_NS = 100_000_000  # a kept rung is judged again after so long
COOL_DOWN_NS = 60_000_000_000  # until a rung that gained nothing is tried again for such work; doubles each time
REST = 16  # after so many transfers without a reason for a change one in so many is watched
RECENT = TRIAL * REST  # transfers on the base after which half of what they cost is forgotten


class Auto:
    """Which rung a path stands on, and why. Any thread may call it.

    Attributes:
        active: whether it may change anything.
        rungs: the base first, then the candidates; what calibration chooses is tried before the others.
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
        now: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """Stands on the base.

        Args:
            rungs: the base first.
            decide: called with (what, why, before=, after=, **evidence) for every decision.
            active: whether it may change anything.
            depth: operations a launch queue takes; 0 where a copy takes no slot of it, or somebody else judges that.
            baseline_ns: host time of one submission while the queue has free slots, as calibrated.
            slow_ns: host time that a transfer takes of its caller on another rung, as far as it is known beforehand.
            now: clock in ns.
        """
        self.active = active
        self.rungs = list(rungs)
        self.rung = self.rungs[0]
        self.decisions = Decisions()
        self.depth, self.baseline_ns, self.slow_ns = depth, baseline_ns, slow_ns
        self._decide, self._now = decide, now
        self._lock = threading.RLock()
        self._on_base, self._on_rung = Costs(), Costs()
        self._count = 0  # transfers of the window that is judged next
        self._fresh = False  # nothing was submitted on this rung yet
        self._held: deque[int] = deque(maxlen=TRIAL)  # outstanding where the newest transfers were held up, or 0
        self._scale = 0  # of the newest work: what failed for small transfers may still help large ones
        self._host, self._device = Excess(), Excess()
        self._cause = ""
        self._kept = False
        self._look_ns = 0  # when the kept rung is judged again
        self._doubts, self._patience = 0, 1  # bad windows of it in a row, and how many of them are borne
        self._idle = 0  # transfers in a row on the base that gave no reason for a change
        self._unwatched = 0  # since the last one that was watched
        self._cooling: dict[tuple[Rung, int], tuple[int, int]] = {}  # by rung and scale of work: until when; how often
        self._noted: set[int] = set()  # scales of work for which it was said that nothing is left

    @property
    def base(self) -> Rung:
        """What is done without auto."""
        return self.rungs[0]

    @property
    def resting(self) -> bool:
        """Whether only one transfer in `REST` is asked for."""
        return self._idle >= REST

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
        if self._idle < REST:
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
        if not self.looks(self._now()):
            return
        with self._lock:
            if sample.rung != self.rung:
                if sample.rung == self.base:  # the detector was faster: it still tells what the base costs
                    sample.cost = self._on_base.add(sample)
                return
            if self._fresh:  # the first one on a rung pays for what is loaded then
                self._fresh = False
                return
            self._count += 1
            if self.rung != self.base:
                sample.cost = self._on_rung.add(sample)
                self._judge()
                return
            sample.cost = self._on_base.add(sample)
            if self._count >= RECENT:
                self._fade(self._on_base)
            self._look_for_a_cause(sample)

    def completed(self, sample: Sample) -> None:
        """The device's time of a sample handed in before is known."""
        if sample.cost is None or not sample.copy_ns:
            return
        with self._lock:
            sample.cost.add_copies(sample)
            if sample.expected_ns and sample.rung == self.rung == self.base:
                self._look_at_the_copies(sample, sample.copy_ns, NOTABLE_SHARE)

    def saturated(self, seen: Saturation, reason: str) -> None:
        """A detector called a full queue: on the base rung that is a reason to change."""
        with self._lock:
            if self.active and self.rung == self.base:
                self._found(SATURATION, f"the launch queue was full: {reason}", seen.noticed_ns)

    # ---- looking for a reason ---------------------------------------------------------------------------------

    def _candidates(self) -> list[Rung]:
        """Rungs that may be tried now for the newest kind of work."""
        now = self._now()
        free = [rung for rung in self.rungs[1:] if now >= self._cooling.get((rung, self._scale), (0, 0))[0]]
        return sorted(free, key=lambda rung: rung.method != "auto")

    def _look_for_a_cause(self, sample: Sample) -> None:
        self._scale = (sample.of or sample.copies).bit_length() // 2
        held_up = 0 < SLOWER_TIMES * self.baseline_ns * sample.copies <= sample.submit_ns
        self._held.append(sample.outstanding + sample.copies if held_up else 0)
        why = f"a copy took {time_text(sample.submit_ns / max(1, sample.copies))} to submit"
        host = self._host
        host.add(sample.submit_ns, self.slow_ns, MIN_GAIN, sample.end_ns, NOTABLE_SHARE)
        self._idle += 1
        self._wake(sample, host)
        if held_up and conclude(Transfers(tuple(self._held), self.depth)).full:
            self._found(SATURATION, f"{SATURATION}: {why}")
        elif host.weight >= EVIDENCE and host.lost_ns >= LOSS_NS:
            cause = COSTLY_BATCH if self.base.method == "batch" else SMALL_COPIES
            self._found(cause, f"{cause}: {why}, and callers have lost {time_text(host.lost_ns)}")
        elif sample.own_ns and sample.expected_ns:
            self._look_at_the_copies(sample, sample.own_ns, 0 if sample.outstanding else NOTABLE_SHARE)

    def _look_at_the_copies(self, sample: Sample, took_ns: int, share: float) -> None:
        device = self._device
        device.add(took_ns, sample.expected_ns, MIN_GAIN, sample.end_ns, share)
        if device.weight >= EVIDENCE and device.lost_ns >= LOSS_NS:
            times = f"{took_ns / sample.expected_ns:.1f} times what another method takes by calibration"
            self._found(SMALL_COPIES, f"{SMALL_COPIES}: they take {times}")
        else:
            self._wake(sample, device)

    def _wake(self, sample: Sample, loss: Excess) -> None:
        """Every transfer is watched again where one that tells something lost plainly, and a rung may be tried."""
        if loss.weight >= 1 and sample.copies >= LEAST_SEEN and self._candidates():
            self._idle = 0

    def _found(self, cause: str, why: str, time_ns: int = 0) -> None:
        before, candidates = self.rung, self._candidates()
        if not candidates:
            if self._scale not in self._noted:
                self._noted.add(self._scale)
                left = "no other method is left to try for such transfers"
                said = f"{cause}, and {left}: from now on one in {REST} is measured"
                self._decide("note", said, before=before, after=before, cause=cause)
            self.stand_on(before)
            self._idle = REST
            return
        evidence: dict[str, Any] = {"cause": cause, "depth": self.depth, "outstanding": max(self._held, default=0)}
        evidence |= self._on_base.evidence()
        after, mean, self._cause = candidates[0], evidence["submit_ns_per_copy"], cause
        self.decisions.append(Decision(time_ns or self._now(), before, after, why, mean))
        self.stand_on(after)
        self._decide("switch", why, before=before, after=after, **evidence)

    # ---- verifying --------------------------------------------------------------------------------------------

    def _judge(self) -> None:
        """A window, or half a trial."""
        done = self._count >= TRIAL
        if not done and (self._kept or self._count != LOST):
            return
        seen = compare(self._on_base, self._on_rung)
        if self._count < REST and seen.copy_before is None and any(each.copy_ns for each in self._on_base.values()):
            return  # what the copies take is known soon
        suffers = seen.copy_gain < 1 / MOST_COPY_COST
        loses = suffers or seen.whole_gain < 1 / MIN_GAIN
        most = max(seen.submit_gain, seen.copy_gain, seen.whole_gain)
        gains = not suffers and seen.whole_gain >= 1 and most >= MIN_GAIN
        if self._kept:
            self._look_again(seen, loses)
        elif done and not seen.transfers:
            self._leave("return", "the transfers before and after differ too much to be compared", LOOK_NS)
        elif done or loses:
            trial, told = self.decisions[-1], seen.evidence() | {"cause": self._cause}
            trial.before_ns, trial.after_ns = seen.before_ns, max(seen.after_ns, 1e-3)
            if gains:
                self._kept, self._look_ns = True, self._now() + LOOK_NS
                self._fade(self._on_rung)
                self._decide("keep", seen.gain, before=self.base, after=self.rung, **told)
            else:
                self._leave("rollback", seen.loss, COOL_DOWN_NS, **told)

    def _look_again(self, seen: Comparison, loses: bool) -> None:
        self._fade(self._on_rung)
        self._doubts = self._doubts + 1 if loses else 0
        if not loses:
            self._look_ns = self._now() + LOOK_NS
        elif self._doubts > self._patience:  # one bad window of a rung that proved itself is no reason to leave
            self._patience *= 2
            self._on_base.clear()
            self._leave("return", f"{seen.loss}, and the work may have changed: the base is measured anew")

    def _leave(self, what: str, why: str, cool_down_ns: int = 0, **evidence: Any) -> None:
        """Back on the base, and not again on this rung for such work until it has cooled down."""
        rung, now = self.rung, self._now()
        if cool_down_ns:
            _, often = self._cooling.get((rung, self._scale), (0, 0))
            self._cooling[rung, self._scale] = now + cool_down_ns * 2**often, often + 1
        self.decisions.append(Decision(now, rung, self.base, why))
        self.stand_on(self.base)
        self._decide(what, why, before=rung, after=self.base, **evidence)

    def _fade(self, costs: Costs) -> None:
        costs.fade()
        self._count = 0

    def stand_on(self, rung: Rung) -> None:
        """Take a rung without a verdict."""
        self._fresh = rung != self.base
        self.rung, self._kept, self._doubts, self._idle, self._count = rung, False, 0, 0, 0
        self._on_rung.clear()
        self._held.clear()
        self._host.forget()
        self._device.forget()
