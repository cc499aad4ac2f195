"""What `kvprobe size` and the page say of a pool: sizes in a table and a chart, misses by their kind, advice."""

from __future__ import annotations

import math
from collections.abc import Sequence

from kvprobe.reporting import charts
from kvprobe.reporting.units import count_text, duration, moved_text, percent, rate, size_text
from kvprobe.reporting.views import Chart, TableView, table
from kvprobe.sizing import Point, Sizing

__all__ = ["COLUMNS", "LEAD", "pool_name", "rows", "sentences", "size_charts", "size_table", "sizes_shown"]

LEAD = (
    "This predicts what pools of other sizes would have found for the same requests. Each pool starts empty and evicts "
    "the least recently used block first (LRU)."
)
COLUMNS = ("Blocks", "Size", "Hit share", "Loaded", "Stored", "Time saved", "")
_SHOWN = 12  # sizes in a table


def pool_name(one: Sizing) -> str:
    """Whose pool it is."""
    return f"{one.server} {one.source}" if one.server else "CPU memory that blocks were stored to and loaded from"


def sizes_shown(one: Sizing) -> list[Point]:
    """Some of the sizes for a table: each doubling, the present one, the advised one."""
    special = [point for point in (one.now, one.advised) if point is not None]
    each = one.points[:: -max(1, len(one.points) // _SHOWN)][:_SHOWN]
    return sorted({point.blocks: point for point in (*each, *special)}.values(), key=lambda point: point.blocks)


def _mark(one: Sizing, point: Point) -> str:
    marks = [
        word for word, other in (("now", one.now), ("advised", one.advised)) if other and other.blocks == point.blocks
    ]
    return ", ".join([*marks, *(["undecided"] if point.undecided else [])])


def rows(one: Sizing) -> list[list[str]]:
    """Texts for a table of COLUMNS."""
    return [
        [
            count_text(point.blocks),
            size_text(point.bytes),
            percent(point.hit_share),
            moved_text(point.loaded_bytes),
            moved_text(point.stored_bytes),
            duration(point.saved_ns),
            _mark(one, point),
        ]
        for point in sizes_shown(one)
    ]


def size_table(one: Sizing) -> TableView:
    """The same for the page."""
    values = [
        (point.blocks, point.bytes, point.hit_share, point.loaded_bytes, point.stored_bytes, point.saved_ns)
        for point in sizes_shown(one)
    ]
    cells = [[*zip(texts[:-1], value, strict=True), texts[-1]] for texts, value in zip(rows(one), values, strict=True)]
    return table(f"Sizes of {pool_name(one)}", COLUMNS, cells, " ".join(sentences(one)))


def size_charts(found: Sequence[Sizing]) -> list[Chart | None]:
    """The curve of each pool: hit share over size."""
    out: list[Chart | None] = []
    for number, one in enumerate(found):
        curve = {
            "x": [math.log2(point.blocks) for point in one.points],
            "y": [100 * point.hit_share for point in one.points],
            "style": "line",
        }
        spec = {
            "title": f"Hit share by size of {pool_name(one)}",
            "x_label": "blocks: 2 to the power of x",
            "y_label": "hit share, %",
            "series": {"LRU pool": curve},
        }
        out.append(charts.plain(f"size-{number}", spec))
    return out


def sentences(one: Sizing) -> list[str]:
    """What the figures say, in the order in which somebody asks."""
    out = [f"Requests asked for {one.asked:,} blocks, and {percent(one.hit_share)} of them were found."]
    if one.followed < 1:
        of = percent(one.followed)
        out[0] += f" Both are counted over all blocks; all other shares are from a sample of {of} of the blocks."
    if one.undecided:
        out.append(f"It is undecided which size the pool should have: {one.undecided}.")
    elif one.advised is not None:
        out.append(_advice(one, one.advised))
    out.append(_misses(one))
    if one.unread_share is not None:
        out.append(f"{percent(one.unread_share)} of the stored blocks were evicted before they were loaded.")
    out += _paying(one)
    if one.tier_share is not None:
        needs = f" This tier must deliver more than {rate(one.tier_bytes_per_s)}." if one.tier_bytes_per_s else ""
        out.append(
            f"A tier below the pool, four times as large as the pool, would find another {percent(one.tier_share)}."
            f"{needs}"
        )
    return out


def _advice(one: Sizing, point: Point) -> str:
    size = f" ({size_text(point.bytes)})" if point.bytes else ""
    if one.pays is False:
        return "No size pays: loading a block takes longer than computing it."
    said = f"A pool of {point.blocks:,} blocks{size} would find {percent(point.hit_share)} of the requested blocks"
    if point.saved_ns is not None and one.now is not None and one.now.saved_ns is not None:
        said += f" and save {duration(point.saved_ns)} of computing; today's pool saves {duration(one.now.saved_ns)}"
    said += ". Twice as many blocks would find hardly more."
    if one.now is not None and not one.now.undecided and point.blocks < one.now.blocks:
        said = f"The pool is larger than needed. {said}"
    return said + (f" Set {one.option}." if one.option else "")


def _misses(one: Sizing) -> str:
    parts = [f"{percent(one.first_share)} because they were requested for the first time (a larger pool does not help)"]
    if one.too_small_share is not None:
        parts.append(f"{percent(one.too_small_share)} because the pool was full and had evicted them")
    if one.early_share:
        parts.append(
            f"{percent(one.early_share)} because they were evicted earlier than an LRU pool of this size evicts them"
        )
    return f"Of all requested blocks, these were not found: {'; '.join(parts)}."


def _paying(one: Sizing) -> list[str]:
    even = one.break_even_tokens
    if even is None or one.rates.saved_ns is None:
        lacks = "; ".join(one.rates.lacks) or "a block's size is not known"
        return [f"It is not known from which length on loading is faster than computing, because {lacks}."]
    if math.isinf(even):
        return ["Computing is faster than loading at every length."]
    each = f" A block that is found saves {duration(one.rates.saved_ns)}." if one.pays else ""
    return [f"Loading is faster than computing from {math.ceil(even):,} tokens on.{each}"]
