"""Blocks are stored to CPU memory that has their bytes already, or overwritten there before they are loaded.

Mechanism: the program stores every finished block although few prefixes come back, and the pool in CPU memory evicts
the blocks unread. Or the program does not know what is already stored, and stores the same blocks at the same addresses
in each step. These bytes take the link from loads, and memory bandwidth from the model.

Signature: one of these is true:
 - A store is overwritten by another store of the same address and size, and no load read that address in between. There
   are at least 64 overwritten stores of together 16 MB, and they are at least a quarter of all stores that can be
   judged. Between a store and the store that overwrites it, the process waited for something. Stores that are not
   overwritten before the recording ends cannot be judged. If nothing is ever loaded from the memory, kvprobe does not
   decide: the memory may be a staging buffer that the host reads, on its way to a disk or a network.
 - The recorder looked at the bytes of a sample of destinations (`kvprobe run`), and saw stores of at least 64 KiB that
   wrote what was already there. The same limits hold: 64 stores, together 16 MB, a quarter. Bytes that are one word
   over and over, as in memory that nobody has filled, do not count.

Needs: addresses, which kvprobe's own recordings have.

Time lost: the time that these bytes need at the link's rate. If the rate is not known, kvprobe states the bytes and no
time.
Predicted saving: the same time.
"""

from __future__ import annotations

import numpy as np

from kvprobe.account import Line, Times
from kvprobe.diagnosis.equal_bytes import EQUAL, looks_of
from kvprobe.diagnosis.finding import COUNTED, INFERRED, Change, Evidence, Finding, Loss, NotLookedFor, cause_of
from kvprobe.diagnosis.joined import Array, JoinedRecording, share
from kvprobe.durations import bytes_text
from kvprobe.recordings.model import CallKind, Direction, Engine

CAUSE = cause_of(__name__)
PROVES = Line.NOT_NEEDED
MANY, LEAST_BYTES, LEAST_SHARE = 64, 16 << 20, 0.25
LEAST_BLOCK = 64 << 10  # what a step reads back is smaller
FASTEST_LINK = 450e9  # bytes per second of any link between CPU and GPU, one way: NVLink-C2C of a Grace Hopper


def spent_in_spans(joined: JoinedRecording, rows: Array, direction: Direction) -> tuple[int, Times] | None:
    """What timing events saw of copies of these calls, ns, by their part of the bytes; and where all such copies ran.

    None where no timing events were recorded around them.
    """
    spans = joined.recording.spans
    mine = np.flatnonzero((spans["engine"] == Engine.COPY) & (spans["direction"] == direction))
    mine = mine[np.isin(spans["process"][mine], joined.process[rows])]
    start, end = spans["start_ns"][mine], spans["end_ns"][mine]
    inside = (start >= int(joined.start[rows].min())) & (start < joined.serving.end_ns)
    start, end, mine = start[inside], end[inside], mine[inside]
    every = joined.direction == direction
    moved = int(joined.bytes[every & (joined.start >= joined.start[rows].min())].sum())
    if not len(start) or moved <= 0:
        return None
    ns = int((end - start).sum() * min(int(joined.bytes[rows].sum()) / moved, 1.0))
    return ns, Times(start, end, joined.where(spans, mine))


def cost_of(joined: JoinedRecording, rows: Array, direction: Direction) -> tuple[Array, bool, str]:
    """What the link needs for the bytes of copies, ns; whether it is at least that; and by what it is known."""
    rate, how = joined.link(direction)
    ns = (joined.bytes[rows] / (rate or FASTEST_LINK) * 1e9).astype(np.int64)
    if rate > 0:
        return ns, False, f"their bytes at the link's rate ({how})"
    return ns, True, f"their bytes at {FASTEST_LINK / 1e9:.0f} GB/s, the fastest link there is"


def copies_with_addresses(joined: JoinedRecording, direction: Direction) -> Array:
    """Rows of single copies of a direction of which both addresses are known."""
    mask = (joined.kind == CallKind.COPY) & (joined.direction == direction) & (joined.src != 0) & (joined.dst != 0)
    return np.flatnonzero(mask & (joined.bytes > 0) & (joined.recording.calls["result"] == 0))


def waited_between(joined: JoinedRecording, earlier: Array, later: Array) -> Array:
    """Mask over pairs of calls: between them their process waited, a stream for an event or the host for the device."""
    waits = joined.is_named("streamwaitevent") | (joined.kind == CallKind.SYNC)
    mask = np.zeros(len(earlier), dtype=bool)
    for process in np.unique(joined.process[earlier]):
        times = np.sort(joined.start[waits & (joined.process == process)])
        mine = np.flatnonzero(joined.process[earlier] == process)
        at = (np.searchsorted(times, joined.start[rows[mine]]) for rows in (later, earlier))
        mask[mine] = next(at) > next(at)
    return mask


def no_addresses(joined: JoinedRecording) -> NotLookedFor | None:
    """Where a recording has copies and no addresses, who moves which bytes again is not looked for."""
    copies = (joined.kind == CallKind.COPY) & (joined.bytes > 0)
    if copies.any() and not joined.src[copies].any():
        return NotLookedFor("the recorder does not tell the addresses of copies", "kvprobe run")
    return None


def not_shown(joined: JoinedRecording) -> NotLookedFor | None:
    """Needs addresses."""
    return no_addresses(joined)


def find(joined: JoinedRecording) -> Finding | None:
    """Stores of bytes that the host has, else those that were overwritten unread."""
    stores = copies_with_addresses(joined, Direction.D2H)
    if len(stores) < MANY:
        return None
    return _there_already(joined, stores) or _unread(joined, stores)


def _there_already(joined: JoinedRecording, stores: Array) -> Finding | None:
    looks = looks_of(joined, stores, Direction.D2H, blank=False)
    wasted = stores[(looks.verdict == EQUAL) & (joined.bytes[stores] >= LEAST_BLOCK)]
    size, stored = int(joined.bytes[wasted].sum()), int(joined.bytes[stores].sum())
    if len(wasted) < MANY or size < LEAST_BYTES or size < LEAST_SHARE * stored:
        return None
    ns, at_least, how = cost_of(joined, wasted, Direction.D2H)
    seen = spent_in_spans(joined, wasted, Direction.D2H)
    lost = seen[0] if seen else int(ns.sum())
    at_least = at_least and not seen
    how = "what timing events saw of stores, by their part of the bytes" if seen else how
    small = at_least and not joined.notable(lost, joined.span_ns)
    return joined.finding(
        CAUSE,
        "{calls} stores copied bytes that the host already had"
        + ("" if small else ": at least {lost}" if at_least else ": {lost}"),
        "likely",
        Loss(
            lost,
            len(wasted),
            on="none" if small else "copy engine",
            window=(int(joined.start[wasted].min()), int(joined.end[wasted].max())),
            places=joined.places(wasted, ns),
            copies=None if seen else joined.x_of_call[wasted][joined.x_of_call[wasted] >= 0],
            spans=seen[1] if seen else None,
        ),
        severity="info" if small else None,
        evidence=(
            Evidence(
                f"{len(wasted):,} of {len(stores):,} stores, {bytes_text(size)}, wrote bytes that were there: "
                f"{share(size, stored)} of all stored bytes",
                size,
                "bytes",
                INFERRED,
            ),
            Evidence(
                f"{looks.equal:,} of the {looks.pairs:,} destinations whose bytes were compared held them already",
                looks.equal,
                "1",
            ),
            Evidence(f"their cost is {'at least ' * at_least}{how}", float(lost), "ns", INFERRED),
        ),
        cure=(
            Change("Store a block once, when it is finished, and remember that the host has it", share=1.0),
            Change("Store only what is new since the last store", share=1.0),
        ),
    )


def _unread(joined: JoinedRecording, stores: Array) -> Finding | None:
    loads = copies_with_addresses(joined, Direction.H2D)
    # One list of all that touches host memory, by place and time; a load of any size from a place reads it.
    rows = np.concatenate((stores, loads))
    place = np.concatenate((joined.dst[stores], joined.src[loads]))
    is_store = np.arange(len(rows)) < len(stores)
    order = np.lexsort((joined.start[rows], place, joined.process[rows]))
    rows, place, is_store = rows[order], place[order], is_store[order]
    follows = (place[1:] == place[:-1]) & (joined.process[rows[1:]] == joined.process[rows[:-1]])
    judged = rows[:-1][is_store[:-1] & follows]
    again = (
        is_store[:-1]
        & is_store[1:]
        & follows
        & waited_between(joined, rows[:-1], rows[1:])
        & (joined.bytes[rows[1:]] >= joined.bytes[rows[:-1]])
    )
    wasted = rows[:-1][again]
    # What lies inside a larger load was read, although the load begins elsewhere.
    wasted = wasted[~_inside_a_load(joined, wasted, rows[1:][again], loads)]
    size, all_bytes = int(joined.bytes[wasted].sum()), int(joined.bytes[judged].sum())
    if len(wasted) < MANY or size < LEAST_BYTES or size < LEAST_SHARE * all_bytes:
        return None
    stored = int(joined.bytes[stores].sum())
    # A pool that is read too, not a buffer on the way to somewhere else.
    read = int(np.isin(joined.src[loads], joined.dst[stores]).sum()) * 100 >= len(stores)
    rate, how = joined.link(Direction.D2H)
    ns, cost = np.zeros(len(wasted), dtype=np.int64), ""
    if rate > 0:
        ns, cost = (joined.bytes[wasted] / rate * 1e9).astype(np.int64), f"their bytes at the link's rate ({how})"
    return joined.finding(
        CAUSE,
        "{calls} stores were overwritten before they were loaded" + (": {lost}" if cost else ""),
        "likely" if read else "cannot tell",
        Loss(
            int(ns.sum()),
            len(wasted),
            on="copy engine" if cost else "none",
            window=(int(joined.start[wasted].min()), int(joined.end[wasted].max())),
            places=joined.places(wasted, ns),
            copies=joined.x_of_call[wasted][joined.x_of_call[wasted] >= 0],
        ),
        severity=None if read and cost else "info",
        reason="" if read else "cannot tell, because nothing was loaded from that memory: the host may have read it",
        evidence=(
            Evidence(
                f"{len(wasted):,} of {len(stores):,} stores, {bytes_text(size)}, were overwritten unread: "
                f"{share(size, stored)} of all stored bytes",
                size,
                "bytes",
                COUNTED,
            ),
            Evidence(
                f"of the addresses that were written again {share(size, all_bytes)} had not been loaded from",
                size / max(all_bytes, 1),
                "1",
                COUNTED,
            ),
            *((Evidence(f"their cost is {cost}", float(ns.sum()), "ns", INFERRED),) if cost else ()),
        ),
        cure=(
            Change(
                "Store a block only when it is likely to be loaded again: from its second use on, or above a prefix "
                "length",
                share=1.0,
            ),
            Change("Use a larger pool in CPU memory, so that blocks stay until they are asked for"),
            Change("Switch storing off if almost nothing is ever loaded", share=1.0),
        ),
    )


def _inside_a_load(joined: JoinedRecording, stores: Array, next_stores: Array, loads: Array) -> Array:
    """Mask over stores: a load that begins before their place and reaches over it came before they were overwritten."""
    mask = np.zeros(len(stores), dtype=bool)
    if not len(loads) or not len(stores):
        return mask
    large = loads[joined.bytes[loads] > int(joined.bytes[stores].min())]
    if not len(large):
        return mask
    order = large[np.argsort(joined.src[large], kind="stable")]
    widest = np.uint64(int(joined.bytes[order].max()))
    first = np.searchsorted(joined.src[order], np.maximum(joined.dst[stores], widest) - widest)
    last = np.searchsorted(joined.src[order], joined.dst[stores])
    for i in np.flatnonzero(last > first)[:100_000]:
        near = order[first[i] : last[i]]
        reach = joined.src[near] + joined.bytes[near].astype(np.uint64) > joined.dst[stores[i]]
        between = (joined.start[near] > joined.start[stores[i]]) & (joined.start[near] < joined.start[next_stores[i]])
        mask[i] = bool((reach & between).any())
    return mask
