"""The auto policy: the only one who changes anything, and who says when, why and what it gained."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from kvprobe.launchqueue.detector import Saturation

log = logging.getLogger("kvprobe")

WINDOW_COPIES = 4096  # of host time that is remembered of the policy in force
VERIFY_COPIES = 512  # under the new policy before its gain is judged
BUSY_COPIES = 3072  # submissions of the window from which on their share of the caller's time is judged
BUSY_NS = 1_000_000  # and the least time that is worth a switch
BUSY_SHARE = 0.5  # of the caller's time: so much spent in submitting calls is worth a switch, full queue or not
WORTH = 0.8  # a switch stays only if a copy costs the caller less than this share of what it did
BACK_OFF = 2.0  # after a switch that gained nothing the next one must be this much more worthwhile


@dataclass
class Decision:
    """One change of policy.

    Attributes:
        time_ns: when.
        before: policy until then.
        after: policy from then on.
        reason: why, in words.
        before_ns: host time that a copy cost its caller, the mean of all calls of the last 4,096 copies before.
        after_ns: the same of the first 512 copies afterwards; 0 until it is known.
    """

    time_ns: int
    before: str
    after: str
    reason: str
    before_ns: float = 0.0
    after_ns: float = 0.0

    @property
    def gain(self) -> float:
        """How many times cheaper a copy became for its caller; 0 until it is known."""
        return self.before_ns / self.after_ns if self.after_ns else 0.0


class Auto:
    """Switch, verify, roll back: the rungs are shared, then pooled.

    Attributes:
        active: whether it may change anything.
        decisions: what it did, oldest first.
    """

    def __init__(self, switch: Callable[[str, str], None], *, active: bool) -> None:
        """Changes the policy by calling `switch(policy, reason)`."""
        self.active = active
        self.decisions: list[Decision] = []
        self._switch = switch
        self._open: Decision | None = None  # a switch whose gain is not yet known
        self._recent: deque[tuple[int, int, int]] = deque()  # (copies, host ns, when) of the policy in force
        self._copies = 0
        self._ns = 0
        self._least_lost_ns = 0.0
        self._policy = "shared"

    def saturated(self, seen: Saturation, reason: str) -> None:
        """The detector called a saturation; on the shared rung that is a reason to climb."""
        if not self.active or self._policy != "shared" or seen.lost_ns < self._least_lost_ns:
            return
        log.warning("launch queue full: %s; switching to pooled streams", reason)
        self._climb(seen.noticed_ns, reason, seen.lost_ns / max(seen.blocked_calls, 1))

    def _climb(self, time_ns: int, reason: str, otherwise_ns: float) -> None:
        before_ns = self._ns / self._copies if self._copies else otherwise_ns
        decision = Decision(time_ns, "shared", "pooled", reason, before_ns)
        self.decisions.append(decision)
        self._open = decision
        self._go("pooled")
        self._switch("pooled", reason)

    def submitted(self, policy: str, copies: int, host_ns: int, end_ns: int) -> None:
        """What copies cost their caller under a policy: submission, or handing them over; `end_ns`: until when."""
        if policy != self._policy or not copies:
            return
        self._recent.append((copies, host_ns, end_ns))
        self._copies += copies
        self._ns += host_ns
        while self._copies - self._recent[0][0] >= WINDOW_COPIES:
            gone, ns, _ = self._recent.popleft()
            self._copies -= gone
            self._ns -= ns
        enough = self._copies >= BUSY_COPIES and self._ns >= max(BUSY_NS, self._least_lost_ns)
        if self.active and policy == "shared" and enough:
            span = end_ns - (self._recent[0][2] - self._recent[0][1])
            if self._ns >= BUSY_SHARE * span:
                reason = f"{self._copies} submissions took {self._ns / 1e6:.1f} of {span / 1e6:.1f} ms of their caller"
                log.warning("%s; switching to pooled streams", reason)
                self._climb(end_ns, reason, 0.0)
                return
        decision = self._open
        if decision is None or self._copies < VERIFY_COPIES:
            return
        decision.after_ns = max(self._ns / self._copies, 1e-3)
        self._open = None
        if decision.after_ns <= WORTH * decision.before_ns:
            log.warning(
                "switch to %s gained: a copy costs its caller %.2f us instead of %.2f us (%.0f times less)",
                decision.after,
                decision.after_ns / 1e3,
                decision.before_ns / 1e3,
                decision.gain,
            )
            return
        reason = f"no gain: {decision.after_ns / 1e3:.2f} us a copy, {decision.before_ns / 1e3:.2f} us before"
        self._least_lost_ns = max(self._least_lost_ns, decision.before_ns) * BACK_OFF
        self.decisions.append(Decision(decision.time_ns, decision.after, decision.before, reason))
        log.warning("rolling back to %s: %s", decision.before, reason)
        self._go(decision.before)
        self._switch(decision.before, reason)

    def _go(self, policy: str) -> None:
        self._policy = policy
        self._recent.clear()
        self._copies = self._ns = 0
