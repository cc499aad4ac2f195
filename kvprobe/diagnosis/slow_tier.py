"""A thread waits in reads or writes of a tier below CPU memory: a disk, or a socket or pipe that feeds copies.

Mechanism: blocks that CPU memory does not hold lie in files or behind a connection. The GPU is idle for as long as
reading takes if the thread that launches reads these blocks itself, or waits for the thread that reads them. If the
tier delivers the bytes of a token more slowly than the GPU computes the token, a hit in the tier delays a request more
than a miss.

Signature: a thread reads or writes files, or memory that copies to or from a GPU use, and one of these is true:
 - The thread submits, and reads or writes between its calls.
 - Another thread reads or writes memory that a copy then took to the GPU, and this GPU ran nothing until the copy.

If the thread that launches spends a tenth of the window in reads and writes, the recording is not healthy, whatever the
GPU does.

Time lost: the time in these reads and writes. Predicted saving: reading ahead and writing behind, on a thread that does
not launch, saves all of this time. Computing the tokens instead of reading them saves the difference, if reading takes
longer.

Needs: `kvprobe run` or `attach`. A server's adapter tells the rate below which a tier is slower than computing: the
bytes of a token, and how long the prefill of a token takes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from kvprobe.account import HOST, Line
from kvprobe.diagnosis import offload_benefit
from kvprobe.diagnosis.finding import COUNTED, MEASURED, Change, Evidence, Finding, Loss, NotLookedFor, Where, cause_of
from kvprobe.diagnosis.joined import CRITICAL, JoinedRecording, ms, size
from kvprobe.durations import percent_text
from kvprobe.recordings.assemble import among
from kvprobe.recordings.intervals import Cover, distinct, union
from kvprobe.recordings.model import Array, Direction, Recording
from kvprobe.recordings.tier_uses import place_text

CAUSE = cause_of(__name__)
PROVES = Line.TIER
MOST_PLACES = 4


def not_shown(joined: JoinedRecording) -> NotLookedFor | None:
    """Needs reads and writes of files, which `kvprobe run` records."""
    watched = any(source.format == "kvprobe" for source in joined.recording.source)
    if watched or joined.recording.tier_operations.rows:
        return None
    return NotLookedFor("the recording does not show reads and writes of files", "kvprobe run")


@dataclass(frozen=True)
class _Waits:
    """Where threads were kept by a tier.

    Attributes:
        start, end, caller: stretches that do not overlap within a thread, ns.
        rows: of `tier_operations`.
        launching: the largest share of its window that a thread which launches spent in operations of its own.
    """

    start: Array
    end: Array
    caller: Array
    rows: Array
    launching: float

    @property
    def ns(self) -> Array:
        """How long each stretch is."""
        return np.asarray(self.end - self.start)


def find(joined: JoinedRecording) -> Finding | None:
    """Threads that were kept by reads and writes of a tier."""
    if not joined.recording.tier_operations.rows:
        return None
    waits = _waits(joined)
    if not len(waits.start):
        return None
    evidence, slowest = _of_places(joined.recording, waits.rows)
    evidence += [*_flushed(joined.recording, waits.rows), *_fed(joined, waits.rows)]
    known = _break_even(joined, waits.rows)
    lost = int(waits.ns.sum())
    callers = np.unique(waits.caller).tolist()
    windows = [one.window_ns for one in joined.account.threads if one.caller in callers]
    span = sum(windows)
    if waits.launching:
        text = f"the thread that launches was in them for {percent_text(waits.launching)} of its time"
        evidence.append(Evidence(text, 100 * waits.launching, "%", MEASURED))
    loss = Loss(
        lost,
        len(waits.rows),
        on="host",
        window=(int(waits.start.min()), int(waits.end.max())),
        span_ns=span,
        places=_threads(joined, waits, slowest),
        stretches=(waits.start, waits.end, waits.caller),
    )
    slower = ", which is slower than computing the same tokens" if known.slower else ""
    found = joined.finding(
        CAUSE,
        f"Threads waited {{lost}} for {slowest}{slower}",
        "certain",
        loss,
        evidence=[*evidence[:1], *known.evidence, *evidence[1:]],
        cure=[*known.changes, *_changes(joined.recording, waits.rows)],
        reason=known.reason,
    )
    if found is not None and found.severity == "info" and waits.launching >= CRITICAL:
        return replace(found, severity="warning")
    return found


def _changes(recording: Recording, rows: Array) -> list[Change]:
    """What to do about these operations, each with its part of their time."""
    table = recording.tier_operations
    took, writes = (table["end_ns"] - table["start_ns"])[rows], table["writes"][rows] > 0
    written = float(took[writes].sum()) / max(int(took.sum()), 1)
    out = []
    if not writes.all():
        out += [
            Change("Read ahead: begin when a request is queued, on a thread that does not launch", share=1 - written),
            Change(
                "Keep more blocks in CPU memory, so that fewer are read: `kvprobe size` says how many more are found "
                "there",
                "setting",
            ),
        ]
    if writes.any():
        text = "Write behind: hand the bytes to a thread that does not launch, and go on with the step"
        out.append(Change(text, share=written))
    if _flushes(recording, rows).any():
        out.append(Change("Flush once for several steps, and not after each"))
    return out


# ---- who waited ------------------------------------------------------------------------------------------------------


def _waits(joined: JoinedRecording) -> _Waits:
    table, uses = joined.recording.tier_operations, joined.tier_uses
    usable = uses.tier & uses.timed & joined.serving.holds(table["process"], table["start_ns"])
    parts: list[tuple[Array, Array, Array]] = []
    rows: list[Array] = []
    launching = 0.0
    alone = not any(one.launches for one in joined.account.threads)
    for one in joined.account.threads:
        first = int(np.argmax(joined.caller == one.caller))
        own = usable & (table["process"] == joined.process[first]) & (table["thread"] == joined.thread[first])
        mine = np.flatnonzero(own)
        start, end = _disjoint(joined, table["start_ns"][mine], table["end_ns"][mine])
        if (one.launches or alone) and one.window_ns > 0:
            launching = max(launching, int((end - start).sum()) / one.window_ns)
        others = _read_for(joined, np.flatnonzero(usable & ~own), one.caller)
        start, end = _disjoint(
            joined,
            np.concatenate((start, table["start_ns"][others])),
            np.concatenate((end, table["end_ns"][others])),
        )
        rows += [mine, others]
        parts.append((start, end, np.full(len(start), one.caller)))
    if not parts:
        none = np.zeros(0, np.int64)
        return _Waits(none, none, none, none, 0.0)
    start, end, caller = (np.concatenate(column) for column in zip(*parts, strict=True))
    return _Waits(start, end, caller, np.unique(np.concatenate(rows)), launching)


def _disjoint(joined: JoinedRecording, start: Array, end: Array) -> tuple[Array, Array]:
    """Their union, in the window."""
    begin, stop = joined.window
    return union(np.clip(start, begin, stop), np.clip(end, begin, stop))


def _read_for(joined: JoinedRecording, rows: Array, caller: int) -> Array:
    """Of operations of other threads the reads that a copy of this thread waited for, and its GPU with it."""
    table, copy = joined.recording.tier_operations, joined.tier_uses.copy[rows]
    mine = (copy >= 0) & (table["writes"][rows] == 0)
    mine &= joined.caller[copy] == caller
    rows, copy = rows[mine], copy[mine]
    waited = np.zeros(len(rows), dtype=bool)
    for gpu in joined.account.gpus if len(rows) else []:
        cut = gpu.stretches
        works = ~np.isin(cut.line, np.array((*HOST, Line.NOTHING_TO_DO), dtype=np.uint8))
        busy = Cover(cut.start[works], cut.end[works])
        until = joined.start[copy]
        idle = busy.within(table["end_ns"][rows], np.maximum(until, table["end_ns"][rows])) == 0
        waited |= idle & np.isin(table["process"][rows], gpu.processes) & gpu.seen
    return rows[waited]


def _threads(joined: JoinedRecording, waits: _Waits, place: str) -> tuple[Where, ...]:
    out = []
    for one in joined.account.threads:
        mine = waits.caller == one.caller
        if mine.any():
            ns = int(waits.ns[mine].sum())
            out.append(Where(pid=one.pid, thread=one.thread, range=place, lost_ns=ns, calls=int(mine.sum())))
    return tuple(sorted(out, key=lambda where: -where.lost_ns)[:16])


# ---- what they waited for --------------------------------------------------------------------------------------------


def _of_places(recording: Recording, rows: Array) -> tuple[list[Evidence], str]:
    """What each place gave and took, and the name of the one that took longest."""
    table, tiers = recording.tier_operations, recording.tiers
    key = (table["process"][rows].astype(np.int64) << 32 | table["place"][rows]) << 1 | table["writes"][rows]
    took = (table["end_ns"] - table["start_ns"])[rows]
    said: list[tuple[int, Evidence, str]] = []
    for one in np.unique(key).tolist():
        mine = rows[key == one]
        ns, moved = int(took[key == one].sum()), int(table["bytes"][mine].sum())
        known = np.flatnonzero((tiers["process"] == one >> 33) & (tiers["place"] == (one >> 1 & 0xFFFFFFFF)))
        name = place_text(recording, int(known[0])) if len(known) else "an unknown place"
        what = f"writes of {size(moved)} to" if one & 1 else f"reads of {size(moved)} from"
        text = f"{len(mine):,} {what} {name} took {ms(ns)}: {_gb_per_s(moved, ns)} in the calls"
        said.append((ns, Evidence(text, ns, "ns", MEASURED), f"{'writes to' if one & 1 else 'reads from'} {name}"))
    said.sort(key=lambda one: -one[0])
    return [one[1] for one in said[:MOST_PLACES]], said[0][2]


def _gb_per_s(moved: float, ns: float) -> str:
    """A rate for a sentence."""
    return f"{moved / max(ns, 1):.3g} GB/s"


def _flushes(recording: Recording, rows: Array) -> Array:
    """Mask over operations: they waited until a file was on its disk."""
    name = recording.tier_operations["name"][rows]
    return among(name, [number for number in distinct(name).tolist() if recording.text(number) == "fsync"])


def _flushed(recording: Recording, rows: Array) -> list[Evidence]:
    """How many of them only waited for a disk, and how long."""
    table, mine = recording.tier_operations, rows[_flushes(recording, rows)]
    if not len(mine):
        return []
    ns = int((table["end_ns"] - table["start_ns"])[mine].sum())
    return [Evidence(f"{len(mine):,} of them waited until a file was on its disk: {ms(ns)}", ns, "ns", MEASURED)]


def _fed(joined: JoinedRecording, rows: Array) -> list[Evidence]:
    """What of it copies to a GPU took from the same memory, or had brought there."""
    table, copy = joined.recording.tier_operations, joined.tier_uses.copy[rows]
    out = []
    for writes, text in ((0, "filled memory that copies to a GPU then read"), (1, "sent what copies had brought")):
        mine = rows[(copy >= 0) & (table["writes"][rows] == writes)]
        if len(mine):
            moved = int(table["bytes"][mine].sum())
            out.append(Evidence(f"{len(mine):,} of them, {size(moved)}, {text}", len(mine), "", COUNTED))
    return out


# ---- whether to compute instead ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _TierRates:
    """What is known of computing instead; `reason` says why it is not known, "" where it is."""

    evidence: tuple[Evidence, ...] = ()
    changes: tuple[Change, ...] = ()
    reason: str = ""
    slower: bool = False


def _break_even(joined: JoinedRecording, rows: Array) -> _TierRates:
    """The rate below which a tier is slower than computing, beside the one that it had."""
    table = joined.recording.tier_operations
    mine = rows[table["writes"][rows] == 0]
    if not len(mine):
        return _TierRates()
    token_bytes, prefill_ns, lacks = _token_rates(joined.recording)
    if not token_bytes or not prefill_ns:
        return _TierRates(reason=f"cannot tell whether recomputing would be faster, because {lacks}")
    ns, moved = Cover(table["start_ns"][mine], table["end_ns"][mine]).total_ns, int(table["bytes"][mine].sum())
    link = joined.link(Direction.H2D)[0]
    left_ns = prefill_ns - (token_bytes / link * 1e9 if link > 0 else 0.0)
    least, had = token_bytes / left_ns if left_ns > 0 else np.inf, moved / max(ns, 1)
    and_copied = ", less what its copy to the GPU takes" if link > 0 else ""
    text = (
        f"break-even: below {least:.3g} GB/s a tier is slower than computing ({size(token_bytes)} and {ms(prefill_ns)} "
        f"a token, as the server told{and_copied}); this one gave {had:.3g} GB/s"
    )
    if left_ns <= 0:
        text = f"the copy of a token to the GPU alone takes longer than the {ms(prefill_ns)} that computing it does"
    evidence = (Evidence(text, least, "GB/s", "calculated from measured rates"),)
    if had >= least:
        return _TierRates(evidence)
    took = int((table["end_ns"] - table["start_ns"])[rows].sum())
    reads = int((table["end_ns"] - table["start_ns"])[mine].sum())
    part = (1 - had / least) * reads / max(took, 1)
    change = Change("Compute these tokens again instead of reading them: remove this tier", "setting", share=part)
    return _TierRates(evidence, (change,), slower=True)


def _token_rates(recording: Recording) -> tuple[float | None, float | None, str]:
    """Bytes of a token and the ns that its prefill takes, as adapters told; None, with the reason, where none did."""
    told = offload_benefit.of_recording(recording)
    sizes = [one.loaded_bytes / one.hit_tokens for one in told if one.loaded_bytes and one.hit_tokens]
    costs = [one.prefill_ns_per_token for one in told if one.prefill_ns_per_token]
    lacks = []
    if not sizes:
        lacks.append("how many bytes a token takes")
    if not costs:
        lacks.append("how fast prompts are computed")
    reason = f"no adapter of a server told {' and '.join(lacks)}" if lacks else ""
    return (float(np.median(sizes)) if sizes else None), (float(np.median(costs)) if costs else None), reason
