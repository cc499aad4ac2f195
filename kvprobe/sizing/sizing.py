"""One pool judged: the curve of its sizes, where it stands, where more pays no more, and what to set."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import cast

from kvprobe.diagnosis import offload_benefit
from kvprobe.diagnosis.offload_benefit import Benefit
from kvprobe.output.recorded import PoolJson, PoolPointJson
from kvprobe.recordings.model import Recording
from kvprobe.reuse.distances import FIRST
from kvprobe.reuse.sample import STORED
from kvprobe.sizing.curve import Curve, curve_of, first_enough
from kvprobe.sizing.options import option_for
from kvprobe.sizing.pays import Rates, rates_of
from kvprobe.sizing.uses import Uses, uses_of

__all__ = ["Point", "Sizing", "of_recording"]

LEAST_GAIN = 0.01  # of all questions: where no doubling of the size finds that more, more pays no more
TIER = 4  # times the pool: a tier below it


@dataclass(frozen=True)
class Point:
    """What a pool of one size would have done in this recording.

    Attributes:
        hit_share: of all blocks asked for, those that it would have had.
        loaded_bytes, stored_bytes: that it would have moved; None where a block's size is not known.
        saved_ns: against a server that computes every block; below 0: lost. None: not known.
        undecided: why the recording does not tell; "" where it does.
    """

    blocks: int
    bytes: int | None
    hit_share: float
    loaded_bytes: int | None
    stored_bytes: int | None
    saved_ns: float | None
    undecided: str

    def to_json(self) -> PoolPointJson:
        """Plain values, by these names."""
        return cast(PoolPointJson, dict(vars(self)))


@dataclass(frozen=True)
class Sizing:
    """What a recording says of one pool.

    Attributes:
        server, source: whose it is.
        how: what told the blocks: "block ids", "addresses" or "bytes".
        asked: blocks asked for: found and loaded, or computed and stored; `followed`: the share of the blocks that were
            followed, `seen` how many questions for them.
        hit_share: measured, of all that were asked for.
        points: of several sizes, ascending.
        now: of the size that it has; None where that is not known.
        advised: the smallest size from which on no doubling finds a hundredth more; None: undecided.
        first_share: of what was asked for, blocks that were never seen before: no size finds them.
        too_small_share: blocks that were given up because the pool was full; None: its size is not known.
        early_share: blocks that were seen before and not there, although an LRU pool of this size had them; likewise.
        unread_share: of what was stored, blocks that were gone before anybody loaded them; None: not told.
        tier_share: what a tier below it, of TIER times its size, would find more; its `tier_bytes_per_s` is the rate
            below which it is slower than computing. None: not known.
        rates: what loading and computing take.
        undecided: why nothing is advised; "" where something is.
        option: the server's own, with its value.
    """

    server: str
    source: str
    how: str
    asked: int
    seen: int
    followed: float
    block_bytes: int | None
    hit_share: float
    points: list[Point]
    now: Point | None
    advised: Point | None
    first_share: float
    too_small_share: float | None
    early_share: float | None
    unread_share: float | None
    tier_share: float | None
    tier_bytes_per_s: float | None
    rates: Rates
    break_even_tokens: float | None
    undecided: str
    option: str

    @property
    def pays(self) -> bool | None:
        """Whether a block that is found saves time; None: not known."""
        return None if self.rates.saved_ns is None else self.rates.saved_ns > 0

    def to_json(self) -> PoolJson:
        """Plain values by these names; an infinite break-even length is the text "never"."""
        out = {**vars(self), "points": [one.to_json() for one in self.points], "pays": self.pays}
        for name in ("now", "advised"):
            point = getattr(self, name)
            out[name] = point.to_json() if point is not None else None
        rates = {**vars(self.rates), "how": [*self.rates.how], "lacks": [*self.rates.lacks]}
        out["rates"] = {**rates, "saved_ns": self.rates.saved_ns}
        if self.break_even_tokens is not None and math.isinf(self.break_even_tokens):
            out["break_even_tokens"] = "never"
        return cast(PoolJson, out)


def of_recording(recording: Recording, prefill_ns: float | None = None, tokens: float | None = None) -> list[Sizing]:
    """One for each pool whose blocks the recording tells; those that were asked most first.

    Args:
        recording: read from anything.
        prefill_ns: to compute a token, where it is known better than the recording tells it.
        tokens: of a block, likewise.
    """
    benefits = {(one.server, one.source): one for one in offload_benefit.of_recording(recording)}
    found = []
    for uses in uses_of(recording):
        benefit = benefits.get((uses.server, uses.source))
        found.append(_sizing(recording, uses, benefit, rates_of(recording, uses, benefit, prefill_ns, tokens)))
    return found


def _sizing(recording: Recording, uses: Uses, benefit: Benefit | None, rates: Rates) -> Sizing:
    curve = curve_of(uses)
    size = _block_bytes(uses, benefit)
    now = uses.pool_blocks
    sizes = curve.sizes(*((now,) if now > 0 else ()))
    points = [_point(blocks, curve, size, uses, rates.saved_ns) for blocks in sizes]
    decided = [one for one in points if not one.undecided]
    enough = first_enough(curve, [one.blocks for one in decided], LEAST_GAIN)
    advised = next((one for one in points if one.blocks == enough), None)
    undecided = "" if advised else next((one.undecided for one in points if one.undecided), "no block was asked for")
    if advised is not None and not uses.comes_back and 2 * advised.blocks > now:  # more may find more
        advised, undecided = None, _unseen(now)
    early, too_small = _missed_again(curve, now)
    tier, rate = _tier(curve, now, rates, size)
    return Sizing(
        uses.server,
        uses.source,
        uses.how,
        uses.asked,
        len(curve.distance),
        uses.followed,
        size,
        uses.loaded / max(uses.asked, 1),
        points,
        next((one for one in points if one.blocks == now), None),
        advised,
        curve.first_share,
        too_small,
        early,
        benefit.wasted_share if benefit is not None else None,
        tier,
        rate,
        rates,
        rates.break_even_tokens(size or 0),
        undecided,
        option_for(uses.server, advised.blocks, size or 0) if advised is not None else "",
    )


def _unseen(now: int) -> str:
    return (
        f"addresses do not tell a block that comes back after it was given up, so what more than {now:,} blocks would "
        "find is not known: an adapter that names blocks tells it (kvprobe patches)"
    )


def _block_bytes(uses: Uses, benefit: Benefit | None) -> int | None:
    if uses.block_bytes > 0:
        return uses.block_bytes
    if benefit is not None and benefit.stored_bytes and benefit.stored_blocks:
        return round(benefit.stored_bytes / benefit.stored_blocks)
    return None


def _point(blocks: int, curve: Curve, size: int | None, uses: Uses, saved_ns: float | None) -> Point:
    share = curve.hit_share(blocks)
    found = share * uses.asked
    undecided = curve.undecided(blocks)
    if not undecided and not uses.comes_back and blocks > uses.pool_blocks:
        undecided = _unseen(uses.pool_blocks)
    return Point(
        blocks,
        blocks * size if size is not None else None,
        share,
        round(found * size) if size is not None else None,
        round((uses.asked - found) * size) if size is not None else None,
        found * saved_ns if saved_ns is not None else None,
        undecided,
    )


def _missed_again(curve: Curve, now: int) -> tuple[float | None, float | None]:
    """Of all questions those for blocks seen before and not there: within the reach of an LRU pool, and beyond it.

    None where the pool's size is not known.
    """
    if now <= 0:
        return None, None
    again = (curve.what == STORED) & (curve.distance != FIRST)
    within = again & (curve.distance <= now)
    share = curve.weight / max(curve.asked, 1)
    return float(within.sum()) * share, float((again & ~within).sum()) * share


def _tier(curve: Curve, now: int, rates: Rates, size: int | None) -> tuple[float | None, float | None]:
    """What a tier of TIER times the pool below it would find more, and the rate that it has to have."""
    if now <= 0 or curve.undecided(now * (1 + TIER)):
        share = None
    else:
        share = curve.hit_share(now * (1 + TIER)) - curve.hit_share(now)
    if rates.tokens is None or rates.prefill_ns is None or size is None:
        return share, None
    return share, size / (rates.tokens * rates.prefill_ns) * 1e9
