"""The same host block is loaded again although its bytes are on the GPU, or on their way there.

Mechanism: two requests share a prefix. Both find the prefix in CPU memory and both load it, because the first load is
not visible until it has completed. Or the code that loads does not know what is on the GPU, so the same blocks go to
the same place again and again.

Signature: `kvprobe run` looks at the bytes of a sample of sources. In these recordings, a load counts if it has the
same source, size and bytes as an earlier load, and if no copy from elsewhere has since overwritten the destination of
the earlier load. A load of the same bytes to another place counts within a tenth of a second, and only if the earlier
load has a stream in which few kernels run: kernels of its own stream may have been given its memory. If a buffer has
other bytes at a later look, the program rewrites the buffer, and its loads never count.

A kernel may have overwritten the bytes on the GPU. Right before some loads of equal bytes to the same place, `kvprobe
run` also compares small pieces of the GPU's memory with what the load brings. These loads count if the GPU still had
the bytes in 90% of the comparisons or more: of those at the same place where there are 16 or more, else of those with
loads of the same size. A kernel that overwrites less than a hundredth of a buffer may go unnoticed.

In recordings without looks, kvprobe goes by addresses. A load counts if its process made an earlier load with the same
source address and size, and one of these is true:
 - The earlier load has not ended when the later one is submitted.
 - The earlier load has ended and had the same destination. Between the two loads, the program waited for something, no
   copy wrote to the source, and no copy from another source wrote to the destination.
 - The later load goes to another place before the host waited for anything, so that nobody has seen the first load end.
   The source is loaded several times within a tenth of a second and never again, and other sources are loaded at other
   times. (A staging buffer, which the host fills anew, comes again and again.)

Four kinds of loads do not count:
 - The memory of the destination was freed between the two loads, so the bytes are gone: a model that wakes loads its
   weights again.
 - The load goes to another place, after the program has seen the first load end. The block may have been evicted.
 - A buffer of less than 64 KiB goes to one place again and again: a small input that the program rewrites in place.
 - The destination got the bytes of another source between the two loads: weights that pass through a few buffers are
   loaded again and again.

If the GPU was not recorded, the recording does not show when a load ended. kvprobe then assumes the earliest possible
time: all bytes that the stream was given move at the rate of the fastest link there is.

The finding says for how many loads nobody looked at the GPU's memory: those of batches, those to another place, and all
in recordings of other tools, of earlier versions, or without timing events. A kernel may have overwritten these bytes:
the finding is then only likely. Of a batch, `kvprobe run` looks at parts of up to 16 copies and at their addresses. In
other recordings kvprobe has only the first address: two batches with equal first address, size and number of copies are
likely the same. If the recorder took looks but none at these buffers, kvprobe does not decide.

Needs: addresses, which kvprobe's own recordings have. Nsight Systems and Kineto do not write addresses.

Time lost: what the copy engine spent on the repeated copies. If the recording does not show executions, kvprobe takes
the time that the bytes need at the link's rate. If the rate is not known either, kvprobe takes what the calls took
their callers, or what the fastest link there is needs for the bytes. Both are less than the true time.
Predicted saving: the same time. A request then waits for the load that is under way, never longer than a load of its
own would take.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvprobe.account import Line
from kvprobe.diagnosis.equal_bytes import EQUAL, NOT_KNOWN, OTHER, Looks, device_looks_of, looks_of
from kvprobe.diagnosis.finding import (
    COUNTED,
    INFERRED,
    MEASURED,
    Change,
    Evidence,
    Finding,
    Loss,
    NotLookedFor,
    cause_of,
)
from kvprobe.diagnosis.joined import Array, JoinedRecording, ms, share, size
from kvprobe.diagnosis.wasted_stores import FASTEST_LINK, cost_of, no_addresses, spent_in_spans, waited_between
from kvprobe.recordings.assemble import among
from kvprobe.recordings.intervals import distinct, running_max_by_group
from kvprobe.recordings.model import CallKind, Direction, Memory

CAUSE = cause_of(__name__)
PROVES = Line.NOT_NEEDED
FEW = 8  # kernels
MANY = 32  # loads of what had arrived: fewer may be a block that a kernel had used up
BURST_NS = 100_000_000  # requests that share a prefix come within
SMALL = 64 << 10  # a program rewrites smaller buffers in place at each step: nobody knows without a look at the bytes
SPREAD = 0.3  # of the time of all loads: so far apart are the bursts


def _device(joined: JoinedRecording) -> Array:
    """Of each call's stream: what one GPU has, another may lack; -1 where it is not known."""
    devices = np.append(joined.recording.streams["device"], -1)
    return np.asarray(devices[joined.stream])


def _ends(joined: JoinedRecording, loads: Array) -> Array:
    """When each load had ended, or the earliest that it can have, where its execution was not recorded."""
    rate = joined.link(Direction.H2D)[0] or FASTEST_LINK
    order = np.lexsort((joined.start[loads], joined.stream[loads], joined.process[loads]))
    rows = loads[order]
    new = np.ones(len(rows), dtype=bool)
    new[1:] = (joined.stream[rows[1:]] != joined.stream[rows[:-1]]) | (
        joined.process[rows[1:]] != joined.process[rows[:-1]]
    )
    took = (joined.bytes[rows] / rate * 1e9).astype(np.int64)
    sums = np.cumsum(took)
    begins = running_max_by_group(joined.start[rows] - (sums - took), np.cumsum(new))  # a stream runs in order
    out = np.empty(len(rows), dtype=np.int64)
    out[order] = np.maximum(begins + sums, joined.end[rows])
    return np.where(joined.exec_end[loads] >= 0, joined.exec_end[loads], out)


def _overwritten(joined: JoinedRecording, loads: Array) -> Array:
    """When the destination of each load was next given another source; far in the future where never."""
    order = np.lexsort((joined.start[loads], joined.dst[loads], joined.process[loads]))
    rows = loads[order]
    never = np.iinfo(np.int64).max
    when = np.full(len(rows), never, dtype=np.int64)
    same = (joined.dst[rows[1:]] == joined.dst[rows[:-1]]) & (joined.process[rows[1:]] == joined.process[rows[:-1]])
    other = same & (joined.src[rows[1:]] != joined.src[rows[:-1]])
    when[:-1][other] = joined.start[rows[1:]][other]
    # Where the same source came again first, its own successor decides: walk runs of equal sources from their ends.
    run = np.cumsum(np.concatenate(([True], ~(same & ~other)))) - 1
    last = np.append(np.flatnonzero(run[1:] != run[:-1]), len(rows) - 1)
    out = np.empty(len(rows), dtype=np.int64)
    out[order] = when[last][run]
    return out


def _freed(joined: JoinedRecording, loads: Array) -> Array:
    """When the memory that each load went to was next freed; far in the future where never, or where nothing tells."""
    never = np.iinfo(np.int64).max
    out = np.full(len(loads), never, dtype=np.int64)
    for process in distinct(joined.process[loads]).tolist():
        mine = (joined.process == process) & (joined.dst != 0) & (joined.recording.calls["result"] == 0)
        frees = np.flatnonzero(mine & (joined.kind == CallKind.FREE))
        sized = np.flatnonzero(mine & ((joined.kind == CallKind.ALLOC) | (joined.kind == CallKind.FREE)))
        sized = sized[joined.bytes[sized] > 0]
        if not len(frees) or not len(sized):
            continue
        bases, place = np.unique(joined.dst[sized], return_inverse=True)
        sizes = np.zeros(len(bases), dtype=np.uint64)
        np.maximum.at(sizes, place, joined.bytes[sized].astype(np.uint64))
        rows = np.flatnonzero(joined.process[loads] == process)
        to = joined.dst[loads[rows]]
        at = np.searchsorted(bases, to, "right") - 1
        inside = (at >= 0) & (to < bases[np.maximum(at, 0)] + sizes[np.maximum(at, 0)])
        rows, at = rows[inside], at[inside]
        times = np.sort(joined.start[frees])
        base = np.searchsorted(bases, joined.dst[frees])
        known = (base < len(bases)) & (bases[np.minimum(base, len(bases) - 1)] == joined.dst[frees])
        # one number for a base and a time: the first free of a load's base behind it is one look-up
        told = np.sort(base[known] * (len(times) + 1) + np.searchsorted(times, joined.start[frees[known]]))
        after = np.searchsorted(times, joined.start[loads[rows]], "right")
        found = np.searchsorted(told, at * (len(times) + 1) + after)
        hit = np.flatnonzero(found < len(told))
        hit = hit[told[found[hit]] // (len(times) + 1) == at[hit]]
        out[rows[hit]] = times[told[found[hit]] % (len(times) + 1)]
    return out


def _stored_between(joined: JoinedRecording, loads: Array) -> Array:
    """Mask over neighbours in `loads` (all but the first): the source was stored or read to between the two."""
    stores = np.flatnonzero((joined.direction == Direction.D2H) & (joined.dst != 0) & (joined.bytes > 0))
    out = np.zeros(max(len(loads) - 1, 0), dtype=bool)
    if joined.recording.tier_operations.rows:  # the first copy out of what a read brought
        out |= np.isin(loads[1:], joined.tier_uses.copy)
    if not len(stores):
        return out
    places, place = np.unique(joined.dst[stores], return_inverse=True)
    times = np.sort(joined.start[stores])
    # one number for a place and a time: then one look-up counts the stores to a place before a time
    told = np.sort(place * (len(times) + 1) + np.searchsorted(times, joined.start[stores]))
    asked = np.minimum(np.searchsorted(places, joined.src[loads[1:]]), len(places) - 1)
    hit = np.flatnonzero(places[asked] == joined.src[loads[1:]])
    before = [
        np.searchsorted(told, asked[hit] * (len(times) + 1) + np.searchsorted(times, joined.start[rows[hit]]))
        for rows in (loads[:-1], loads[1:])
    ]
    out[hit] |= before[1] > before[0]
    return out


def _unseen(joined: JoinedRecording, loads: Array) -> Array:
    """Mask over neighbours in `loads` (all but the first): the host waited for nothing between the two."""
    earlier, later = loads[:-1], loads[1:]
    out: Array = (joined.memory[earlier] != Memory.PAGEABLE) & (joined.memory[later] != Memory.PAGEABLE)
    out &= joined.kind[later] == CallKind.COPY  # of a batch only the first address is known
    out &= ~among(joined.stream[earlier], joined.kernel_streams)
    for process in np.unique(joined.process[earlier]):
        mine = np.flatnonzero(out & (joined.process[earlier] == process))
        times = np.sort(joined.start[(joined.kind == CallKind.SYNC) & (joined.process == process)])
        before, after = (np.searchsorted(times, joined.start[pair[mine]]) for pair in (earlier, later))
        out[mine] = before == after
    return out


def _in_bursts(joined: JoinedRecording, loads: Array, group: Array, pairs: Array) -> Array:
    """Of `pairs` (positions of the later one in `loads`) those whose source came within one burst and never again.

    None of them where the bursts are not spread over the time of all loads.
    """
    start = joined.start[loads]
    cuts = np.flatnonzero(np.diff(group, prepend=-1))
    first, last = np.minimum.reduceat(start, cuts), np.maximum.reduceat(start, cuts)
    kept: Array = pairs[(last - first <= BURST_NS)[group[pairs]]]
    span = int(start.max() - start.min())
    if not len(kept) or span < 10 * BURST_NS:
        return kept[:0]
    low, high = np.quantile(first[np.unique(group[kept])], (0.1, 0.9))
    return kept if high - low >= SPREAD * span else kept[:0]


def _computes(joined: JoinedRecording) -> bool:
    """Whether the recording has kernels that could have used what was loaded, in its detail or in its totals."""
    totals = joined.recording.totals
    launched = int(totals["calls"][totals["kind"] == CallKind.LAUNCH].sum())
    kinds = among(joined.kind, [CallKind.LAUNCH, CallKind.GRAPH])
    return max(launched, int(kinds.sum())) >= FEW


def not_shown(joined: JoinedRecording) -> NotLookedFor | None:
    """Needs addresses."""
    return no_addresses(joined)


@dataclass(frozen=True)
class _Repeats:
    """Loads in the order of source and time, and which of them bring what was there; masks over `loads`.

    Attributes:
        most: how often the block loaded most often was loaded.
        on_their_way: an earlier load of the same source had not ended. arrived: its bytes were at the same place.
        in_place: they went where the load before had gone.
        unseen: they were at another, and the host had waited for nothing meanwhile. held: looks found equal bytes.
        proven: looks speak for it. looks: at the sources.
        kept: looks at the device say that it still had the bytes. overwritten: they say that it had not, so the load is
            none of those above. device: those looks, whose verdict is of `loads`.
    """

    loads: Array
    most: int
    on_their_way: Array
    arrived: Array
    in_place: Array
    unseen: Array
    held: Array
    proven: Array
    looks: Looks
    kept: Array
    overwritten: Array
    device: Looks

    @property
    def chosen(self) -> Array:
        """Mask of those that a finding names; where looks were taken, what they do not prove only if they prove none.

        A place of which nobody knows whether the program rewrites it is only as good as a guess then.
        """
        every: Array = self.on_their_way | self.arrived | self.unseen | self.held
        return every & self.proven if self.looks.exist and (every & self.proven).any() else every

    @property
    def is_guess(self) -> bool:
        """Whether looks were taken, and none at what is named."""
        return self.looks.exist and not (self.chosen & self.proven).any()


def _repeated(joined: JoinedRecording, loads: Array) -> _Repeats:
    columns = (joined.count, joined.bytes, joined.src, _device(joined), joined.process)
    loads = loads[np.lexsort((joined.start[loads], *(column[loads] for column in columns)))]
    new = np.ones(len(loads), dtype=bool)
    new[1:] = np.any([column[loads[1:]] != column[loads[:-1]] for column in columns], axis=0)
    group = np.cumsum(new) - 1
    looks = looks_of(joined, loads, Direction.H2D)
    verdict = looks.verdict[1:]
    earlier, after = loads[:-1], loads[1:]
    gone = np.minimum(_overwritten(joined, loads), _freed(joined, loads))
    intact = gone[:-1] > joined.start[after]
    same_place = (joined.dst[after] == joined.dst[earlier]) & (joined.dst[after] != 0)
    soon = joined.start[after] - joined.start[earlier] <= BURST_NS
    rewritable = same_place & (joined.bytes[after] < SMALL) & (verdict == NOT_KNOWN)
    able = ~new[1:] & intact & (verdict != OTHER) & ~rewritable & ~joined.outside[after]
    able &= same_place | ~joined.between_kernels(loads)[:-1]  # an allocator may have given those their memory
    under_way = joined.start[after] < running_max_by_group(_ends(joined, loads), group)[:-1]
    in_order = same_place & (~under_way | (joined.stream[after] == joined.stream[earlier]))
    asked = np.flatnonzero(able & in_order & (joined.kind[after] == CallKind.COPY))
    device = device_looks_of(joined, after[asked])
    kept, overwritten = np.zeros((2, len(after)), dtype=bool)
    kept[asked], overwritten[asked] = device.verdict == EQUAL, device.verdict == OTHER
    able &= ~overwritten
    on_their_way = able & under_way
    held = able & ~on_their_way & (verdict == EQUAL) & (same_place | soon)
    stored = _stored_between(joined, loads)
    left = able & ~on_their_way & ~held & ~stored
    arrived = left & same_place & waited_between(joined, earlier, after)
    unseen = left & ~arrived & soon & (verdict == NOT_KNOWN)
    all_bytes = int(joined.bytes[loads].sum())

    def matters(mask: Array) -> Array:
        many = int(mask.sum()) >= MANY and 10 * int(joined.bytes[after][mask].sum()) >= all_bytes
        return mask & many

    held_or_arrived = matters(held | arrived) if _computes(joined) else np.zeros(len(after), dtype=bool)
    pairs = np.flatnonzero(unseen)
    if len(pairs) >= MANY:
        pairs = pairs[_unseen(joined, loads)[pairs]]
        pairs = _in_bursts(joined, loads, group, pairs + 1) - 1
    unseen = np.zeros(len(after), dtype=bool)
    unseen[pairs] = True

    def whole(mask: Array) -> Array:
        return np.concatenate(([False], mask))

    return _Repeats(
        loads,
        int(np.bincount(group).max()),
        whole(on_their_way),
        whole(arrived & held_or_arrived),
        whole(same_place),
        whole(matters(unseen)),
        whole(held & held_or_arrived),
        whole(verdict == EQUAL),
        looks,
        whole(kept),
        whole(overwritten),
        device,
    )


def _evidence(joined: JoinedRecording, found: _Repeats) -> list[Evidence]:
    chosen = found.chosen
    rows, loads = found.loads[chosen], found.loads
    wasted, moved = int(joined.bytes[rows].sum()), int(joined.bytes[loads].sum())
    kinds_of = (
        (found.held, "brought bytes that an earlier load had brought, and no copy had written over them since"),
        (
            found.arrived,
            "copied the same source to the same destination again, with no copy to either of them in between",
        ),
        (found.unseen, "were submitted before the host had waited for the previous load of the same bytes"),
    )
    counts = [(int((mask & chosen).sum()), what) for mask, what in kinds_of]
    compared, equal = found.looks.pairs, found.looks.equal
    return [
        Evidence(
            f"{len(rows):,} of {len(loads):,} loads copied bytes that were already there or on their way: "
            f"{size(wasted)}, {share(wasted, moved)} of all loaded bytes",
            wasted,
            "bytes",
            COUNTED,
        ),
        *(Evidence(f"{count:,} of them {what}", count, "calls", COUNTED) for count, what in counts if count),
        *(
            (
                Evidence(
                    f"{equal:,} of the {compared:,} sources whose bytes were compared held those of the load before",
                    equal,
                    "1",
                ),
            )
            if compared
            else ()
        ),
        *_on_the_device(joined, found),
        Evidence(f"the block loaded most often was loaded {found.most:,} times", found.most, "1", COUNTED),
    ]


def _on_the_device(joined: JoinedRecording, found: _Repeats) -> list[Evidence]:
    """What is known of the device's own bytes, and what is not."""
    out, device = [], found.device
    if device.pairs:
        text = (
            f"right before {device.pairs:,} loads of equal bytes to the same place, kvprobe compared pieces of the "
            f"GPU's memory with them: {device.equal:,} times they were still there"
        )
        out.append(Evidence(text, device.equal, "calls", COUNTED))
    if found.overwritten.any():
        count = int(found.overwritten.sum())
        out.append(
            Evidence(f"{count:,} more loads do not count: the GPU no longer had their bytes", count, "calls", INFERRED)
        )
    unseen = int((found.chosen & ~found.kept).sum())
    if unseen:
        errors = joined.recording.destinations["error"]
        failed = f": such a look failed with error {int(errors.max())}" if errors.any() else ""
        text = f"nobody looked at the GPU's own bytes for {unseen:,} of them: a kernel may have overwritten these"
        out.append(Evidence(text + failed, unseen, "calls", COUNTED))
    return out


CURE = (
    Change(
        "Remember what is being loaded, and let a request for the same blocks wait for that load (vLLM 0.15 and "
        "later do; kvprobe's engine: dedup=True)",
        "rung",
        "dedup",
        "on",
        share=1.0,
    ),
    Change("Limit this wait: load again if waiting would take longer than a new load"),
)
SHARED = Change(
    "Keep blocks that several requests use once on the GPU, and let their block tables point there", share=1.0
)
STILL_THERE = Change("Remember what each place on the GPU holds, and load only what is not there", share=1.0)
GUESS = "cannot tell, because nobody looked at the bytes of these buffers: the program may have rewritten them"


def find(joined: JoinedRecording) -> Finding | None:
    """Loads of bytes that are there, or are being loaded."""
    kinds = (joined.kind == CallKind.COPY) | (joined.kind == CallKind.BATCH)
    kinds &= joined.recording.calls["result"] == 0
    loads = np.flatnonzero(kinds & (joined.direction == Direction.H2D) & (joined.src != 0) & (joined.bytes > 0))
    if len(loads) < 2:
        return None
    found = _repeated(joined, loads)
    rows = found.loads[found.chosen]
    if not len(rows):
        return None
    evidence = _evidence(joined, found)
    cure: tuple[Change, ...] = CURE
    if 2 * int((found.in_place & found.chosen & ~found.on_their_way).sum()) > len(rows):
        cure = (STILL_THERE, *CURE)
    elif (found.held & found.chosen).any():
        cure = (SHARED, *CURE)
    if found.is_guess:
        return _guess(joined, rows, evidence, cure)
    if not joined.recording.has_executions:
        return _without_executions(joined, rows, evidence, cure)
    mine = np.zeros(len(joined.start), dtype=bool)
    mine[rows] = True
    executions = np.flatnonzero((joined.x_call >= 0) & mine[np.maximum(joined.x_call, 0)])
    spent = joined.x_dur[executions]
    evidence.append(Evidence(f"the copy engine spent {ms(int(spent.sum()))} on them", int(spent.sum()), "ns", MEASURED))
    certain = not (joined.kind[rows] == CallKind.BATCH).any() and bool((found.on_their_way | ~found.chosen).all())
    return joined.device_finding(
        CAUSE,
        "{calls} redundant loads kept the copy engine busy for {lost}",
        "certain" if certain else "likely",
        executions,
        spent,
        evidence=evidence,
        cure=cure,
    )


def _guess(joined: JoinedRecording, rows: Array, evidence: list[Evidence], cure: tuple[Change, ...]) -> Finding | None:
    window = int(joined.start[rows].min()), int(joined.end[rows].max())
    return joined.finding(
        CAUSE,
        "{calls} loads may have been redundant",
        "cannot tell",
        Loss(0, len(rows), on="none", window=window, places=joined.places(rows, np.zeros(len(rows), dtype=np.int64))),
        severity="info",
        reason=GUESS,
        evidence=evidence,
        cure=cure,
    )


def _without_executions(
    joined: JoinedRecording, rows: Array, evidence: list[Evidence], cure: tuple[Change, ...]
) -> Finding | None:
    """What they cost by the link's rate; where that is not known, by what their calls took, or at least."""
    ns, at_least, how = cost_of(joined, rows, Direction.H2D)
    seen = spent_in_spans(joined, rows, Direction.H2D)
    if seen is not None:
        how = "what timing events saw of loads, by their part of the bytes"
        loss = Loss(
            seen[0],
            len(rows),
            on="copy engine",
            window=(int(joined.start[rows].min()), int(joined.end[rows].max())),
            places=joined.places(rows, ns),
            spans=seen[1],
        )
        said = Evidence(f"{ms(seen[0])}: {how}", seen[0], "ns", INFERRED)
        title = "{calls} redundant loads kept the copy engine busy for {lost}"
        return joined.finding(CAUSE, title, "likely", loss, evidence=[*evidence, said], cure=cure)
    spent = joined.dur[rows]
    if at_least and int(spent.sum()) > int(ns.sum()):
        took = Evidence(f"their calls alone took {ms(int(spent.sum()))}", int(spent.sum()), "ns", MEASURED)
        title = "{calls} loads were redundant: their calls alone took {lost}"
        of_calls = joined.host_finding(CAUSE, title, "likely", rows, spent, evidence=[*evidence, took], cure=cure)
        if of_calls is not None:
            return of_calls
    cost = Evidence(f"their cost is {'at least ' * at_least}{how}", float(ns.sum()), "ns", INFERRED)
    small = at_least and not joined.notable(int(ns.sum()), joined.span_ns)
    return joined.finding(
        CAUSE,
        "{calls} loads were redundant" + ("" if small else ": at least {lost}" if at_least else ": {lost}"),
        "likely",
        Loss(
            int(ns.sum()),
            len(rows),
            on="none" if small else "copy engine",
            window=(int(joined.start[rows].min()), int(joined.end[rows].max())),
            places=joined.places(rows, ns),
        ),
        severity="info" if small else None,
        evidence=[*evidence, cost],
        cure=cure,
    )
