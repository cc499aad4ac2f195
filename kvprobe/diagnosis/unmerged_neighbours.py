"""Neighbouring copies that could have been one: their caller pays a call for each, and the calls limit the copying.

Mechanism: a copy costs its caller about 1 µs (H200) to 3 µs, however small the copy is. The blocks of a long prefix
often lie side by side, in CPU memory and on the GPU. These blocks are then one piece of memory on both sides, but the
program copies them one by one. With a call for each 16 KiB, a program cannot fill a link of 55 GB/s.

Signature: one thread makes copies right after one another, on one stream and in one direction, and each begins where
the copy before it ends, at the source and at the destination. In between, the thread waited for nothing, and the stream
was given nothing else. The calls take longer than their bytes need on the link. (If the link's rate is not known,
kvprobe compares with the time that the copies executed, and otherwise with what the GPU's link carries.) Calls for
larger copies are hidden behind the bytes. The calls must take at least a millisecond and at least a fiftieth of the
caller's time. Streams with a full launch queue belong to the causes of a full queue, where merging is one of the
changes.

Needs: addresses, which kvprobe's own recordings have. Of a batch, the recording has only the first address.

Time lost: what the calls cost that continue the copy before them. Each call counts with its duration, but at most with
the median duration of its stream and direction.
To decide whether the change is worth it, kvprobe adds the time between these calls: without the loop, this time is
saved, too. Predicted saving: the time of these calls. If kvprobe submits the copies on its own thread, that
saves more, but kvprobe does not predict how much.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from kvprobe.diagnosis.finding import COUNTED, MEASURED, Change, Evidence, Finding, NotLookedFor, cause_of
from kvprobe.diagnosis.joined import Array, JoinedRecording, ms
from kvprobe.diagnosis.merging import near
from kvprobe.diagnosis.queue_full import queue_blocked
from kvprobe.diagnosis.wasted_stores import no_addresses
from kvprobe.launchqueue.constants import NOTABLE_NS, PAUSE_NS
from kvprobe.recordings.assemble import codes, positions
from kvprobe.recordings.descriptors import call_costs
from kvprobe.recordings.intervals import distinct
from kvprobe.recordings.model import CallKind, Direction, Memory

CAUSE = cause_of(__name__)
LEAST_SHARE, WORTH_A_CHANGE = 0.02, 0.05  # of the caller's time; nothing is broken, so it is never critical

CURE = (
    Change(
        "Merge neighbours before the call: where source and destination both continue, make one copy of all their "
        "bytes, up to the end of the allocation or registration",
        share=1.0,
    ),
    Change(
        "Keep all layers of a block together, so that one copy moves them (vLLM: VLLM_KV_CACHE_LAYOUT=BLHNC)",
        "setting",
        "VLLM_KV_CACHE_LAYOUT",
        "BLHNC",
    ),
    Change(
        "Let kvprobe submit: it merges neighbours, on a thread of its own (kvprobe's engine: pooled; for "
        "servers with an adapter `kvprobe run --fix auto`)",
        "rung",
        "pooled",
        "auto",
    ),
)


def not_shown(joined: JoinedRecording) -> NotLookedFor | None:
    """Needs addresses."""
    return no_addresses(joined)


def find(joined: JoinedRecording) -> Finding | None:
    """Copies that continue the one before them, where calls limit the copying."""
    more = near(joined).continues
    rows = np.flatnonzero(more & (joined.host.free_ns > 0) & (joined.memory != Memory.PAGEABLE))
    if not len(rows):
        return None
    crowded = distinct(joined.stream[queue_blocked(joined)])
    if len(crowded):
        rows = rows[~np.isin(joined.stream[rows], crowded)]
    ns = call_costs(joined.recording, rows)
    limited = _limited(joined, rows, ns)
    if not limited.all():
        rows, ns = rows[limited], ns[limited]
    total = int(np.clip(ns, 0, joined.host.free_ns[rows]).sum())
    span = joined.caller_span_ns(rows)
    if total < NOTABLE_NS or total < LEAST_SHARE * span:
        return None
    between = near(joined).gap_ns[rows]
    worth_it = total + int(between[between < PAUSE_NS].sum()) >= WORTH_A_CHANGE * span
    finding = joined.host_finding(
        CAUSE,
        "{calls} copies could have been merged with the copy before them: their calls took {lost}",
        "likely",
        rows,
        ns,
        severity=None if worth_it else "info",
        evidence=[*_of_copies(joined, rows, ns), *_of_the_link(joined, rows)],
        reason="where an allocation or a registration ends is not recorded, and no copy may reach over it; nor is what "
        "the thread did between two calls: a source that it filled only then would be copied later",
        cure=CURE,
    )
    return replace(finding, severity="warning") if finding and finding.severity == "critical" else finding


def _of_copies(joined: JoinedRecording, rows: Array, ns: Array) -> list[Evidence]:
    """How many copies there are to a run, what a call takes, and what passes between two."""
    copies = _all_copies(joined, rows)
    pieces = copies - len(rows)
    moved, each = int(joined.bytes[rows].sum()), float(np.median(joined.dur[rows]))
    limit = moved / max(int(ns.sum()), 1) * 1e9
    passed = float(np.median(near(joined).gap_ns[rows]))
    return [
        Evidence(
            f"{len(rows):,} of {copies:,} copies continue the copy before them, source and destination alike: "
            f"{pieces:,} runs, {copies / pieces:.3g} copies to a run",
            len(rows),
            "calls",
            COUNTED,
        ),
        Evidence(
            f"a call takes {ms(each)} (median) and moves {np.median(joined.bytes[rows]) / 1024:.3g} KiB, so the calls "
            f"alone limit copying to {limit / 1e9:.1f} GB/s",
            limit,
            "bytes/s",
            MEASURED,
        ),
        Evidence(
            f"between two of them passed {ms(passed)} (median), in which the thread waited for nothing",
            passed,
            "ns",
            MEASURED,
        ),
    ]


def _of_the_link(joined: JoinedRecording, rows: Array) -> list[Evidence]:
    """What the link needs for the same bytes, where its rate is known."""
    evidence = []
    for direction, name in ((Direction.H2D, "loads"), (Direction.D2H, "stores")):
        rate, how = joined.link(direction)
        mine = rows[joined.direction[rows] == direction]
        if rate > 0 and len(mine):
            needed, took = int(joined.bytes[mine].sum()) / rate * 1e9, int(joined.dur[mine].sum())
            text = f"the link carries the bytes of these {name} in {ms(needed)}; their calls took {ms(took)}"
            evidence.append(Evidence(text, needed, "ns", how))
    return evidence


def _group(joined: JoinedRecording, rows: Array) -> Array:
    """A number of each call's caller, stream and direction."""
    streams = joined.recording.streams.rows + 1
    return (joined.caller[rows].astype(np.int64) * streams + joined.stream[rows]) * 8 + joined.direction[rows]


def _limited(joined: JoinedRecording, rows: Array, costs: Array) -> Array:
    """Mask over `rows`: on their caller's stream and direction the calls take longer than the bytes on the link."""
    mask = np.zeros(len(rows), dtype=bool)
    groups, place = codes(_group(joined, rows))
    for group, mine in zip(groups.tolist(), positions(place, len(groups)), strict=True):
        rate, size = joined.link_or_assumed(Direction(group % 8)), int(joined.bytes[rows[mine]].sum())
        ran = np.maximum(joined.exec_end[rows[mine]] - joined.exec_start[rows[mine]], 0)
        needed = int(ran.sum()) if rate.assumed and ran.all() else size / rate.bytes_per_s * 1e9
        mask[mine] = int(costs[mine].sum()) > needed
    return mask


def _all_copies(joined: JoinedRecording, rows: Array) -> int:
    """Single copies in the window by the callers of `rows`, on their streams in their direction."""
    copies = np.flatnonzero((joined.kind == CallKind.COPY) & (joined.bytes > 0) & ~joined.outside)
    groups, place = codes(_group(joined, copies))
    wanted = codes(_group(joined, rows))[0]
    return int(np.bincount(place, minlength=len(groups))[np.isin(groups, wanted)].sum())
