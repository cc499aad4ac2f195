"""The auto controller: the only one who changes the policy, and who says when, why and what it gained."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Protocol

from kvprobe.launchqueue.detector import Saturation

log = logging.getLogger("kvprobe")

VERIFY_COPIES = 512  # copies under the new policy before its gain is judged
WORTH = 0.8  # a switch stays only if a copy's submission costs less than this share of what it did
BACK_OFF = 2.0  # after a switch that gained nothing the next one must be this much more worthwhile


class _Engine(Protocol):
    policy: str

    def set_policy(self, policy: str, reason: str = ...) -> None:
        """Changes the policy."""


@dataclass
class Decision:
    """One change of policy.

    Attributes:
        time_ns: when.
        before: policy until then.
        after: policy from then on.
        reason: why, in words.
        before_ns: host time of one copy's submission while it was slow.
        after_ns: host time of one afterwards; 0 until it is known.
    """

    time_ns: int
    before: str
    after: str
    reason: str
    before_ns: float = 0.0
    after_ns: float = 0.0

    @property
    def gain(self) -> float:
        """How many times cheaper a submission became; 0 until it is known."""
        return self.before_ns / self.after_ns if self.after_ns else 0.0


class Controller:
    """Switch, verify, roll back: the rungs are shared, then pooled.

    Attributes:
        active: whether it may change anything.
        decisions: what it did, oldest first.
    """

    def __init__(self, engine: _Engine, *, active: bool) -> None:
        """Watches one engine."""
        self.active = active
        self.decisions: list[Decision] = []
        self._engine = engine
        self._open: Decision | None = None  # a switch whose gain is not yet known
        self._copies = 0
        self._ns = 0
        self._least_lost_ns = 0.0

    def saturated(self, seen: Saturation, reason: str) -> None:
        """The detector called a saturation; on the shared rung that is a reason to climb."""
        if not self.active or self._engine.policy != "shared" or seen.lost_ns < self._least_lost_ns:
            return
        decision = Decision(seen.noticed_ns, "shared", "pooled", reason, seen.lost_ns / max(seen.blocked_calls, 1))
        self.decisions.append(decision)
        self._open, self._copies, self._ns = decision, 0, 0
        log.warning("launch queue full: %s; switching to pooled streams", reason)
        self._engine.set_policy("pooled", reason)

    def submitted(self, copies: int, host_ns: int, blocked: int) -> None:
        """Counts submissions under the new policy until its gain can be judged."""
        decision = self._open
        if decision is None or self._engine.policy != decision.after:
            return
        self._copies += copies
        self._ns += host_ns
        if self._copies < VERIFY_COPIES:
            return
        decision.after_ns = self._ns / self._copies
        self._open = None
        if decision.after_ns <= WORTH * decision.before_ns:
            log.warning("switch to %s gained: a submission takes %.2f us instead of %.2f us (%.0f times less)",
                        decision.after, decision.after_ns / 1e3, decision.before_ns / 1e3, decision.gain)  # fmt: skip
            return
        reason = f"no gain: {decision.after_ns / 1e3:.2f} us a submission, {decision.before_ns / 1e3:.2f} us before"
        self._least_lost_ns = max(self._least_lost_ns, decision.before_ns) * BACK_OFF
        self.decisions.append(Decision(decision.time_ns, decision.after, decision.before, reason))
        log.warning("rolling back to %s: %s", decision.before, reason)
        self._engine.set_policy(decision.before, reason)
