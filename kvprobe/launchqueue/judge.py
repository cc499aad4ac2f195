"""What is concluded of a launch queue from what was measured of it in a recording: the words of every verdict.

A full queue is named only where three things meet: depths that stop at a plateau, calls that cost more there than
below it, and returns that follow the stream's progress more closely than chance would. Needs no numpy.
"""

from __future__ import annotations

from kvprobe.launchqueue.constants import LEAST_BLOCKED, LEAST_DEPTH, NOTABLE_NS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Literal

    QueueVerdict = Literal["saturated", "healthy", "cannot tell"]

__all__ = ["LEAST_BLOCKED", "LEAST_DEPTH", "Measured", "conclude", "ms", "overall"]


class Measured:
    """The numbers that a verdict on one queue rests on.

    Attributes:
        deepest: submissions outstanding at a call's entry, at most.
        slow: calls at the deepest depths that cost more than shallow ones do.
        shallowest: the least that one of them was entered at.
        lost_ns: what they cost more, together.
        at_pin: calls that were entered at `shallowest` or deeper.
        aligned: share of the slow ones that return when an operation of the stream ends.
        chance: share of instants nearby that would.
        drained: share of the slow ones during which an operation of the stream ended.
        in_graphs: share of the slow ones that were entered while a graph was outstanding.
    """

    __slots__ = ("aligned", "at_pin", "chance", "deepest", "drained", "in_graphs", "lost_ns", "shallowest", "slow")

    def __init__(
        self,
        deepest: int,
        slow: int = 0,
        shallowest: int = -1,
        lost_ns: int = 0,
        at_pin: int = 0,
        aligned: float = 0.0,
        chance: float = 0.0,
        drained: float = 0.0,
        in_graphs: float = 0.0,
    ) -> None:
        self.deepest, self.slow, self.shallowest, self.lost_ns, self.at_pin = deepest, slow, shallowest, lost_ns, at_pin
        self.aligned, self.chance, self.drained, self.in_graphs = aligned, chance, drained, in_graphs


def conclude(m: Measured) -> tuple[QueueVerdict, str]:
    """The verdict on one queue, and from what."""
    if m.deepest < LEAST_DEPTH:
        return "healthy", f"never more than {m.deepest:,} submissions outstanding"
    if not m.slow:
        return (
            "healthy",
            f"{m.deepest:,} submissions outstanding at most, and calls cost no more there than with few outstanding",
        )
    least = "" if m.shallowest == m.deepest else f"{m.shallowest:,} to "
    what = f"{m.slow:,} calls with {least}{m.deepest:,} outstanding took {ms(m.lost_ns)} more than with few outstanding"
    if m.in_graphs > 0.5:
        return "cannot tell", (
            f"{what}; a full queue is likely, but CUDA graphs were in it: a graph launch takes an unknown "
            "number of places, so the depth cannot be counted in submissions"
        )
    if m.slow < LEAST_BLOCKED:
        few = f"{what}: too few to tell a full queue from chance"
        return ("cannot tell", few) if m.lost_ns > NOTABLE_NS else ("healthy", few)
    informative = m.chance < 0.6
    if informative and m.aligned < m.chance + 0.2:
        return "cannot tell", (
            f"{what}, but only {m.aligned:.0%} return when the stream moves on ({m.chance:.0%} would by chance)"
        )
    if not informative and (m.drained < 0.8 or m.at_pin < 20):
        return "cannot tell", (
            f"{what}; operations end so often that returning with one proves nothing "
            f"({m.aligned:.0%}, by chance {m.chance:.0%}), and the depth did not stay at its maximum"
        )
    return "saturated", (
        f"{what}; {m.aligned:.0%} of them return when the stream moves on ({m.chance:.0%} would by chance)"
    )


def overall(queues: Sequence[tuple[QueueVerdict, str, int]]) -> tuple[QueueVerdict, str]:
    """The verdict on a recording of these queues, most time lost first: verdict, reason and deepest depth of each."""
    for wanted in ("saturated", "cannot tell"):
        for verdict, reason, _ in queues:
            if verdict == wanted:
                return verdict, reason
    if not queues:
        return "healthy", "nothing was submitted to a stream"
    return "healthy", max(queues, key=lambda queue: queue[2])[1]


def ms(ns: int) -> str:
    """Milliseconds as a verdict states them."""
    return f"{ns / 1e6:.1f} ms"
