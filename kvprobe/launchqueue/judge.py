"""The one judge of a full launch queue: evidence in, conclusion out. Nobody else sets one, and a test holds that.

A queue is called full only where its being full is what explains the slow calls best: depths that stop at a plateau and
returns that follow the stream; a step in what calls cost at the depth that queues have; a stream that is given more
than a queue holds. What each rule asks for is beside it; the figures are in `constants.py`. Needs neither numpy nor the
native library.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from kvprobe.durations import time_text
from kvprobe.launchqueue import constants as c
from kvprobe.launchqueue import evidence as seen

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvprobe.launchqueue.evidence import Evidence

__all__ = ["NOT_ASKED", "STATES", "QueueConclusion", "conclude", "many", "overall"]

State = Literal["not full", "cannot tell", "full"]
STATES: tuple[State, ...] = ("not full", "cannot tell", "full")  # the worse, the later


@dataclass(frozen=True, slots=True)
class QueueConclusion:
    """What is concluded of a launch queue, and from what, as a sentence without its full stop."""

    state: State
    because: str

    @property
    def full(self) -> bool:
        """Whether it was full."""
        return self.state == "full"


NOT_ASKED = QueueConclusion("not full", "")  # of a queue that nothing is concluded of yet


def conclude(evidence: Evidence) -> QueueConclusion:
    """The conclusion from one way of looking at a queue."""
    return _RULES[type(evidence)](evidence)


def overall(queues: Sequence[tuple[QueueConclusion, int]]) -> QueueConclusion:
    """The conclusion on a recording of these queues, most time lost first; each with the deepest that it was."""
    for wanted in ("full", "cannot tell"):
        for conclusion, _ in queues:
            if conclusion.state == wanted:
                return conclusion
    if not queues:
        return QueueConclusion("not full", "nothing was submitted to a stream")
    return max(queues, key=lambda queue: queue[1])[0]


def _others(count: int) -> str:
    """How many other submissions, for people: "1 other", "8 others"."""
    return f"{count:,} other{'s' if count != 1 else ''}"


def many(states: Iterable[State]) -> State:
    """The worst of these; that no queue was full where there are none."""
    return max(states, key=STATES.index, default="not full")


def _said(full: bool, because: str, otherwise: State = "not full") -> QueueConclusion:
    return QueueConclusion("full" if full else otherwise, because)


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


_HOST_ONLY = "no device activity was recorded"

# ---- by counts alone -------------------------------------------------------------------------------------------------


def _made(e: seen.Made) -> QueueConclusion:
    few = e.submissions < min(c.REAL_DEPTH, c.FULL_SHARE * (e.depth or c.REAL_DEPTH))
    return _said(False, f"{e.submissions:,} submissions were made", "not full" if few else "cannot tell")


def _incomplete(e: seen.Incomplete) -> QueueConclusion:
    return _said(False, e.lacks[0] if e.lacks else "all of it was read", "cannot tell" if e.lacks else "not full")


def _deepest(e: seen.Deepest) -> QueueConclusion:
    """Many streams may share a channel, and fill it together while each of them is far from full."""
    shallow = max(e.each, default=0) < c.REAL_DEPTH
    few = len(e.each) < c.MANY_STREAMS or sum(e.each) < c.LEAST_DEPTH
    what = f"no stream had more than {max(e.each, default=0):,} submissions outstanding"
    return _said(False, what, "not full" if shallow and few else "cannot tell")


def _together(e: seen.Together) -> QueueConclusion:
    """Whose channel was full only the recorder can say: it is never concluded from this alone."""
    because = (
        "the recording does not say which streams share a channel: each stream had free slots, but together they held "
        "as many submissions as one channel takes"
    )
    return _said(False, because, "cannot tell" if e.calls else "not full")


# ---- where the device was recorded -----------------------------------------------------------------------------------


def _labels(e: seen.Labels) -> QueueConclusion:
    least = "" if e.shallowest == e.deepest else f"{e.shallowest:,} to "
    return _said(
        e.calls > 0,
        f"the recorder labels {e.calls:,} calls as blocked by a full command buffer, with {least}{e.deepest:,} "
        "submissions outstanding" + (" (approximate: CUDA graphs are among them)" if e.graphs else ""),
    )


def _plateau(e: seen.Plateau) -> QueueConclusion:
    if e.deepest < c.LEAST_DEPTH:
        return QueueConclusion("not full", f"no call began with more than {_others(e.deepest)} outstanding")
    if not e.slow:
        return QueueConclusion(
            "not full",
            f"calls took no longer with up to {e.deepest:,} submissions outstanding than with a few",
        )
    least = "" if e.shallowest == e.deepest else f"{e.shallowest:,} to "
    what = (
        f"{e.slow:,} calls with {least}{e.deepest:,} outstanding took {time_text(e.lost_ns)} more than calls with few "
        "outstanding"
    )
    if e.in_graphs > c.IN_GRAPHS:
        return QueueConclusion(
            "cannot tell",
            f"{what}. A full queue is likely, but CUDA graphs were in it, and how many slots these take is not known",
        )
    if e.slow < c.LEAST_BLOCKED:
        few = f"{what}: too few to tell a full queue from chance"
        return QueueConclusion("cannot tell" if e.lost_ns > c.NOTABLE_NS else "not full", few)
    by_chance = f"({e.chance:.0%} would by chance)"
    if e.chance >= c.TELLING_CHANCE:
        return _said(
            e.drained >= c.DRAINED_SHARE and e.at_pin >= c.LEAST_SEEN,
            f"{what}; {e.aligned:.0%} of them return when the stream moves on {by_chance}"
            if e.drained >= c.DRAINED_SHARE and e.at_pin >= c.LEAST_SEEN
            else f"{what}; operations end so often that returning with one proves nothing "
            f"({e.aligned:.0%}, by chance {e.chance:.0%}), and the depth did not stay at its maximum",
            "cannot tell",
        )
    if e.aligned < e.chance + c.ALIGNED_MORE:
        return QueueConclusion(
            "cannot tell", f"{what}, but only {e.aligned:.0%} return when the stream moves on {by_chance}"
        )
    return QueueConclusion("full", f"{what}; {e.aligned:.0%} of them return when the stream moves on {by_chance}")


def _regular(e: seen.Regular) -> QueueConclusion:
    """A step at the calibrated depth (a multiple of it, for a channel of several streams), or one constant delay."""
    what = f"{e.slow:,} of {e.top:,} calls with up to {e.deepest:,} outstanding were slow"
    deep = e.deepest >= (c.FULL_SHARE * e.depth if e.depth else e.least)
    if not deep or e.slow < c.STEADY_CALLS or e.slow_below * c.STEP_TIMES > _share(e.slow, e.top):
        return QueueConclusion("not full", what)
    channels = max(1, round(e.deepest / e.depth)) if e.depth else 0
    near = channels > 0 and abs(e.deepest - channels * e.depth) <= (1 - c.FULL_SHARE) * channels * e.depth
    if near and (channels == 1 or e.streams > 1):
        return QueueConclusion("full", f"{what}, which is the depth of the queue as it was counted")
    return _said(
        2 * e.slow >= e.top and min(e.slow, e.delays) >= c.LEAST_DELAYS and e.gathered > c.GATHERED,
        f"{what}, and the delay of their return after the stream moved on is one value",
    )


def _stood_still(e: seen.StoodStill) -> QueueConclusion:
    what = f"{e.fences + e.delays:,} long calls with {e.deepest:,} outstanding, while their stream stood still"
    deep = e.deepest >= (c.FULL_SHARE * e.depth if e.depth else c.REAL_DEPTH)
    return _said(deep and (e.fences > 0 or (e.delays > 0 and e.deepest >= c.USUAL_DEPTHS[0])), what)


def _shared_channel(e: seen.SharedChannel) -> QueueConclusion:
    """Of a channel that is known one stream alone may find what others put in; else several must, most with slots."""
    what = f"{e.calls:,} calls to {e.streams:,} streams blocked, {e.roomy:,} of them with slots on their own stream"
    return _said(e.calls > 0 and (e.known or (e.streams > 1 and 2 * e.roomy >= e.calls)), what)


# ---- from the host alone ---------------------------------------------------------------------------------------------


def _step(e: seen.DepthStep) -> QueueConclusion:
    share, elsewhere = _share(e.slow, e.top), _share(e.slow_below, e.below)
    below = f"{elsewhere:.1%}" if e.slow_below else "none"
    enough = e.below >= c.LEAST_SEEN and share >= max(c.CHUNK_SHARE, c.STEP_TIMES * elsewhere)
    return _said(
        e.depth >= c.LEAST_DEPTH and enough and e.slow >= max(c.LEAST_BLOCKED, 4 * e.passed),
        f"{e.slow:,} calls with {e.shallowest:,} or more submissions outstanding took {time_text(e.lost_ns)} longer "
        f"than usual; {share:.0%} of the calls that meet that many are slow, and {below} "
        f"of those that meet fewer ({e.how})",
    )


def _met(e: seen.MetDepths) -> QueueConclusion:
    same = e.times > 1 and e.high - e.low <= c.SAME_DEPTH * e.middle
    usual = e.usual[0] <= e.middle <= e.usual[1]
    what = f"slow calls began {e.times:,} times, with {e.middle:,.0f} outstanding"
    return _said(e.times > 0 and e.middle >= e.least and (same or usual), what)


def _paced(e: seen.Paced) -> QueueConclusion:
    """Slow calls must begin when the queue should be full, by that pace; in one case at least half of it was filled."""
    told = [one for one in e.onsets if one[1] > 0]
    fits = [
        (free, calls)
        for depth, free, calls in told
        if abs(e.depth - depth) <= min(c.ONSET_SHARE * e.depth, max(c.ONSET_LEAST, c.ONSET_FREE * free))
    ]
    most = 3 * sum(calls for _, calls in fits) >= 2 * sum(calls for _, _, calls in told)
    freed = any(free >= c.ONSETS_FREED * e.depth for free, _ in fits)
    return _said(
        most and freed, f"{len(fits):,} of {len(told):,} times slow calls began when {e.depth:,} were outstanding"
    )


def _pinned(e: seen.Pinned) -> QueueConclusion:
    """A count that does not gather anywhere but at the depth of a queue is held there by the queue.

    A program that holds itself back at just that number would look alike; but its calls would be as quick as ever, or
    it would wait between them. Where it is in these calls nearly all the time, nothing else can hold the count.
    """
    what = (
        f"{e.calls:,} calls were entered with {e.least:,} to {e.most:,} outstanding, {e.slow:,} of them took "
        f"{time_text(e.lost_ns)} more than others (counted by timing events in the stream)"
    )
    there = e.depths[0] <= e.most and e.least <= e.depths[1]
    gathers = e.calls >= max(c.LEAST_SEEN, c.STEP_TIMES * e.elsewhere)
    compared = e.below >= c.LEAST_SEEN and e.dearer > 0
    dearer = e.dearer >= c.DEARER_AT_PIN if compared else e.calls >= c.WINDOW_CALLS
    return _said(there and gathers and (dearer or e.inside >= c.INSIDE_AT_PIN) and e.slow > 0, what)


def _held_at(e: seen.HeldAt) -> QueueConclusion:
    """Chance does not explain two of them that make most of the time: a stall hits so few counts once in forty."""
    what = (
        f"{e.calls:,} calls that took {time_text(e.lost_ns)} more than others were entered with {e.least:,} to "
        f"{e.most:,} outstanding, as many as a queue takes (counted by timing events in the stream)"
    )
    return _said(e.calls >= 2 and e.lost_ns >= e.elsewhere_ns, what)


def _in_burst(e: seen.InBurst) -> QueueConclusion:
    """One such call suffices where all bursts agree and something else proves it; else three, and two thirds of all."""
    which = f"number {e.first + 1:,}" + (f" to {e.last + 1:,}" if e.last > e.first else "")
    all_fit = e.proven and e.fits == e.bursts
    return _said(
        e.fits > 0 and (all_fit or (e.fits >= 3 and 3 * e.fits >= 2 * e.bursts)),
        f"{e.calls:,} calls took {time_text(e.lost_ns)} more than others, the first of a burst being its {which}: "
        f"{e.queues} (inferred: counted from where the stream was empty; {_HOST_ONLY})",
    )


def _flood(e: seen.Flood) -> QueueConclusion:
    share = _share(e.waits, e.calls)
    often = e.waits * c.OFTEN_NS >= e.spent_ns and share >= c.CHUNK_SHARE
    steady = e.spread <= c.PACE_SPREAD and (e.pauses < c.LEAST_BLOCKED or 3 * e.slow_after <= e.pauses)
    before_or_alone = e.alone
    if e.before >= c.LEAST_SEEN:
        before_or_alone = share >= c.ELSEWHERE_TIMES * _share(e.slow_before, e.before)
    costs = e.lost_ns >= c.STEADY_SHARE * e.spent_ns
    begins = 2 * e.misfits <= e.onsets if e.onsets else e.seen_waiting  # where the queue is full, as far as is known
    if not (often and costs and steady and before_or_alone and begins):
        return QueueConclusion(
            "not full", f"{e.longest:,} submissions followed each other, at no pace of a full queue's"
        )
    if e.no_cpu > c.STARVED_SHARE:
        why = "cannot tell, because its threads waited for a CPU while their calls were slow"
        return QueueConclusion("cannot tell", why)
    return QueueConclusion(
        "full",
        f"{e.longest:,} submissions followed each other without a pause, more than a queue holds, and {share:.0%} of "
        f"them took {e.times:.2g} times as long as the quickest or longer, {time_text(e.lost_ns)} more together "
        f"(inferred: {_HOST_ONLY})",
    )


def _numbered(e: seen.NumberedLaunches) -> QueueConclusion:
    what = (
        f"{e.slow} kernel launches took {time_text(e.lost_ns)} more than others, the first after {e.first:,} launches"
    )
    few = e.slow < c.LEAST_BLOCKED or e.slow < c.CHUNK_SHARE * e.slow_span
    if few or e.lost_ns <= 4 * e.early_ns:
        return QueueConclusion("not full", what)
    if not e.usual[0] <= e.capacity <= e.usual[1]:
        return QueueConclusion("cannot tell", f"{what}, which is no depth of a queue ({_HOST_ONLY})")
    return QueueConclusion(
        "full",
        f"{what} since the stream was last known to be empty (inferred: launches are counted by their thread; "
        f"{_HOST_ONLY})",
    )


def _rest(e: seen.OtherSlowCalls) -> QueueConclusion:
    least = max(c.NOTABLE_NS, c.NOTABLE_SHARE * e.span_ns)
    how = f"({e.how})"
    if e.depth and not e.top:
        if e.deepest < e.depth:
            most = f"no call began with more than {_others(e.deepest)} outstanding, and a queue takes {e.depth:,} {how}"
            return QueueConclusion("not full", most)
        slow = f"calls that were slow began with fewer outstanding than the {e.depth:,} that a queue takes"
        return QueueConclusion("not full", f"up to {e.deepest:,} were outstanding, but {slow} {how}")
    if e.slow_ns <= least:
        up_to = f"no calls became and stayed slow from one depth on, with up to {e.deepest:,} outstanding {how}"
        return QueueConclusion("not full", up_to)
    what = f"{e.what} took {time_text(e.slow_ns)} more than others, but not as they do when a queue is full {how}"
    if e.slow_ns - e.no_cpu_ns > least:
        return QueueConclusion("cannot tell", what)
    return QueueConclusion("not full", f"{what}. For {time_text(e.no_cpu_ns)} of it, their threads had no CPU")


def _over_streams(e: seen.OverStreams) -> QueueConclusion:
    filled = (
        c.FULL_SHARE * n * c.CHANNEL_SLOTS <= e.submitted <= c.EARLY_TIMES * (n * c.CHANNEL_SLOTS + c.SHARED_SLOTS)
        for n in e.channels
    )
    what = f"a copy waited after {e.submitted:,} of its burst, {e.own:,} of them on its own stream"
    return _said(e.after_event and e.own <= c.OWN_SHARE * c.CHANNEL_SLOTS and any(filled), what)


# ---- of a running process --------------------------------------------------------------------------------------------


def _live_window(e: seen.LiveWindow) -> QueueConclusion:
    """Odds are compared, for a share cannot be several times a third: a stream's first calls are slow by themselves.

    The count of a stream whose device is the quicker one falls, however slow its calls are; so where it has stood at
    the top for a whole window of calls that cost more as a mean, the queue is full.
    """
    share, fast = _share(e.top_slow, e.top_calls), e.top_calls - e.top_slow
    odds = e.top_slow / fast if fast > 0 else float("inf") if e.top_slow else 0.0
    waits_itself = e.longest_on_cpu_ns >= c.FENCE_NS
    steady = e.on_cpu >= c.STEADY_CALLS and e.on_cpu_lost_ns >= c.STEADY_SHARE * e.on_cpu_span_ns
    often = e.blocked >= max(c.OFTEN_CALLS, e.span_ns / c.OFTEN_NS) and e.lost_ns >= c.STEADY_SHARE * e.span_ns
    likely = share >= c.BLOCKED_SHARE and odds >= c.ELSEWHERE_TIMES * e.room_odds
    usual_ns = max(e.baseline_ns, e.room_mean_ns)
    dearer = e.top_calls >= c.WINDOW_CALLS and e.top_mean_ns >= c.DEARER_TIMES * usual_ns
    several = e.top_slow >= c.WINDOW_BLOCKED and (likely or dearer)
    return _said(waits_itself or steady or often or several, f"{e.blocked:,} slow calls, {share:.0%} of those there")


def _live_sums(e: seen.LiveSums) -> QueueConclusion:
    """A suspicion alone: executions are not seen."""
    jumped = e.slow >= max(c.LIVE_BLOCKED, c.BLOCKED_SHARE * e.timed)
    what = f"calls lost {_share(e.lost_ns, e.passed_ns):.0%} of the time"
    return _said(False, what, "cannot tell" if jumped and e.lost_ns >= c.LIVE_LOST_SHARE * e.passed_ns else "not full")


def _transfers(e: seen.Transfers) -> QueueConclusion:
    full = [one for one in e.outstanding if e.depth and one >= c.FULL_SHARE * e.depth]
    what = f"{len(full)} slow transfers had up to {max(full, default=0):,} of {e.depth:,} outstanding"
    return _said(len(full) >= c.FULL_TRANSFERS, what)


_RULES: dict[type, Callable[[Any], QueueConclusion]] = {
    seen.Made: _made,
    seen.Incomplete: _incomplete,
    seen.Deepest: _deepest,
    seen.Together: _together,
    seen.Labels: _labels,
    seen.Plateau: _plateau,
    seen.Regular: _regular,
    seen.StoodStill: _stood_still,
    seen.SharedChannel: _shared_channel,
    seen.DepthStep: _step,
    seen.MetDepths: _met,
    seen.Paced: _paced,
    seen.Pinned: _pinned,
    seen.HeldAt: _held_at,
    seen.InBurst: _in_burst,
    seen.Flood: _flood,
    seen.NumberedLaunches: _numbered,
    seen.OtherSlowCalls: _rest,
    seen.OverStreams: _over_streams,
    seen.LiveWindow: _live_window,
    seen.LiveSums: _live_sums,
    seen.Transfers: _transfers,
}
