"""Ranks compared: who lost most to full queues, and who came last to the collectives, so that the others waited."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from kvprobe.recordings.summary import GpuTime, Rank, Stat, Summary, percentile_ns, worst_of

__all__ = ["RankComparison", "RankRow", "RankWaits", "compare"]

_SUBMISSIONS = ("copy", "batch", "launch", "graph", "memset")


@dataclass(frozen=True)
class RankRow:
    """One rank beside the others; times in ns.

    Attributes:
        verdict: found, healthy or undecided; of a summary without accounts on full queues alone.
        lost_ns, share: host time lost to full queues, and of the time recorded.
        p50_ns, p99_ns, max_ns: of its submissions.
        made_wait_ns: what the others waited in collectives to which it came last; -1 where that is not known.
        waited_ns: what it waited itself; -1 likewise.
        computing, waiting_for_copies, waiting_for_host: shares of its GPUs' serving windows; -1 where nothing is known.
    """

    rank: str
    verdict: str
    recorded_ns: int
    lost_ns: int
    share: float
    submissions: int
    p50_ns: int
    p99_ns: int
    max_ns: int
    made_wait_ns: int
    waited_ns: int
    computing: float = -1.0
    waiting_for_copies: float = -1.0
    waiting_for_host: float = -1.0


@dataclass(frozen=True)
class RankWaits:
    """Who waited for whom in collectives.

    Attributes:
        ranks: how many could be compared: those with the same number of collectives, recorded once each.
        collectives: of each of them.
        left_out: ranks that had another number, or several recordings.
        missing: why nothing can be said; "" where something can.
    """

    ranks: int
    collectives: int
    left_out: int
    missing: str = ""


@dataclass(frozen=True)
class RankComparison:
    """All ranks, most time lost first."""

    rows: list[RankRow]
    waiting: RankWaits


def compare(summary: Summary) -> RankComparison:
    """Compares the ranks of a summary.

    In a collective all ranks leave together, and whoever comes last waits least: the others' device time beyond the
    least is what they waited for that rank. Collectives are compared by their order, no clock of two machines is.
    """
    waiting, made, waited = _waits(summary.ranks)
    stats: dict[str, Stat] = {}
    for (rank, _, kind, _, _), stat in summary.calls.items():
        if kind in _SUBMISSIONS:
            stats[rank] = stats[rank].merge(stat) if rank in stats else stat
    times: dict[str, GpuTime] = {}
    for (rank, _), time in summary.gpus.items():
        times[rank] = times[rank].merge(time) if rank in times else time
    words = {"saturated": "found", "healthy": "healthy", "cannot tell": "undecided"}
    rows = []
    for name, one in summary.ranks.items():
        stat = stats.get(name, Stat())
        # a recording without a submission proves nothing
        verdict = "undecided" if one.verdict == "healthy" and not stat.count else words[one.verdict]
        if name in times:
            verdict = worst_of((verdict, times[name].verdict))
        rows.append(
            RankRow(
                name,
                verdict,
                one.recorded_ns,
                one.blocked_ns,
                one.blocked_ns / one.recorded_ns if one.recorded_ns else 0.0,
                stat.count,
                min(percentile_ns(stat.histogram, 0.5), stat.max_ns),
                min(percentile_ns(stat.histogram, 0.99), stat.max_ns),
                stat.max_ns,
                made.get(name, -1),
                waited.get(name, -1),
                *_shares(times.get(name)),
            )
        )
    rows.sort(key=lambda row: (-row.lost_ns, -row.made_wait_ns, _numbers(row.rank)))
    return RankComparison(rows, waiting)


def _shares(time: GpuTime | None) -> tuple[float, ...]:
    """As the last three of a row."""
    if time is None or not time.window_ns or time.share("not_known.not_recorded") == 1:
        return ()
    return tuple(time.share(group) for group in ("computing", "waiting_for_copies", "waiting_for_host"))


def _numbers(name: str) -> tuple[int, str]:
    digits = "".join(char for char in name if char.isdigit())
    return int(digits) if digits else -1, name


def _waits(ranks: dict[str, Rank]) -> tuple[RankWaits, dict[str, int], dict[str, int]]:
    usable = {name: rank.collectives for name, rank in ranks.items() if rank.recordings == 1 and rank.collectives.count}
    if len(usable) < 2:
        missing = (
            "no collective was recorded of two ranks: record with Nsight Systems or PyTorch's profiler, which record "
            "NCCL's kernels"
        )
        return RankWaits(len(usable), 0, len(ranks) - len(usable), missing), {}, {}
    count = max(Counter(one.count for one in usable.values()).items(), key=lambda item: (item[1], item[0]))[0]
    same = {name: one for name, one in sorted(usable.items()) if one.count == count}
    pieces = Counter(len(one.sums) for one in same.values()).most_common(1)[0][0]  # of a file that lies, others
    same = {name: one for name, one in same.items() if len(one.sums) == pieces}
    if len(same) < 2:
        return RankWaits(len(same), 0, len(ranks), "the ranks made different numbers of collectives"), {}, {}
    names = list(same)
    sums = np.array([one.sums for one in same.values()], dtype=np.int64)
    over = sums - sums.min(axis=0)
    last = sums.argmin(axis=0)
    made = dict.fromkeys(names, 0)
    for piece, who in enumerate(last.tolist()):
        made[names[who]] += int(over[:, piece].sum())
    waited = dict(zip(names, over.sum(axis=1).tolist(), strict=True))
    return RankWaits(len(same), count, len(ranks) - len(same)), made, waited
