"""The link runs at its full rate, and the GPU waits for it.

Mechanism: moving the bytes takes longer than the computation that runs at the same time.

Signature: over the recording, one direction of the link is busy for at least 80% of the time, and its copies run at 80%
of the link's rate or more. For at least 30% of this busy time, no kernel of the process runs. The process has kernels,
and most of the time without kernels lies between kernels. (What is copied before the first kernel, such as weights that
are loaded once, or after the last one does not show that a model waits.)

The link's rate is the machine's figure if the recording has one. Otherwise it is the rate of the fastest large copies
in the recording. If this rate is below 80% of what the GPU's link carries, the finding is only likely, and the first
change is to find out why the link is slow. The recording tells the link's generation and lanes, or the GPU's name does.
If neither does, kvprobe compares with PCIe 5.0 x16, which carries 55 GB/s.

Other findings about copies come first: small, redundant or slow copies, and copies that could have overlapped with
kernels. This finding counts only the time of the copy engine that they leave. If a full launch queue is the reason why
copies do not overlap with kernels, this part of the wait belongs to the finding about the queue. For the rest of the
wait, only fewer bytes help.

`kvprobe run` sees by timing events when only copies ran. There the link is busy for as long as the bytes of one
direction take at the link's rate, and what counts as waiting is what the account calls so while copies of this
direction ran. If the recording shows neither executions nor timing events, it does not show whether the model waits for
copies. If the copies on copy streams then carry 80% of the link's rate over the whole time, the cause is an open
question.

Time lost: the time in which the copy engine works and nothing computes, without what other findings explain.
Predicted saving: kvprobe predicts none, because the saving depends on how many fewer bytes the program moves.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from kvprobe.account import COPIES, GpuAccount, Line, Times
from kvprobe.account.stretches import NOBODY
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
    executions_not_shown,
)
from kvprobe.diagnosis.joined import DIRECTIONS, Array, JoinedRecording, ms, of_gpus, share, size
from kvprobe.diagnosis.wasted_stores import no_addresses
from kvprobe.diagnosis.weights_not_overlapped import CAUSE as WEIGHTS
from kvprobe.diagnosis.weights_not_overlapped import MOVE_FEWER
from kvprobe.recordings.assemble import among
from kvprobe.recordings.intervals import Cover, distinct
from kvprobe.recordings.joined import on_gpu
from kvprobe.recordings.link_rate import FROM_COPIES, FULL_LINK, PcieLink, link_of
from kvprobe.recordings.model import CallKind, Direction, Engine, Memory

CAUSE = cause_of(__name__)
BUSY = 0.8  # of the time that the link is busy
_ALONE = 0.3  # of the busy time: for less, kernels hide the copies
FEWER = Change(
    "Move fewer bytes: a smaller KV type (fp8), more reuse on the GPU, a larger GPU share for weights", "setting"
)
FEWER_STORES = Change(
    "Move fewer bytes: a smaller KV type (fp8), or store only the blocks that are loaded again: `kvprobe size` says "
    "how many are",
    "setting",
)
REPEATED = Change(
    "Record with `kvprobe run -- COMMAND` as well: it shows how many of these bytes their destination had already, "
    "which this recording does not tell"
)
RECOMPUTE = Change("Recompute short prefixes instead of loading them where that is faster")
SPREAD = Change("Use a faster link, or spread the copies over the links of several GPUs", "setting")
FASTER = Change("Use a faster link", "setting")
FULL = "The link is the limit: only copies ran for {lost}, at the link's full rate"


def open_question(joined: JoinedRecording) -> Finding | None:
    """As many bytes as the link can carry, where the device was not recorded: whether anything waits is not seen."""
    if joined.recording.has_executions:
        return None
    copies = joined.kind == CallKind.COPY
    copies &= (joined.memory != Memory.PAGEABLE) & (joined.stream >= 0) & (joined.bytes > 0)
    chosen: list[Array] = []
    taken: list[Array] = []
    evidence: list[Evidence] = []
    for gpu in distinct(joined.call_gpu[copies]):
        for direction in (Direction.H2D, Direction.D2H):
            rows = np.flatnonzero(copies & (joined.call_gpu == gpu) & (joined.direction == direction))
            rows = rows[~joined.between_kernels(rows)]  # the others wait in the model's own stream
            if len(rows) < 8 or not len(joined.launches(joined.process[rows[0]])):
                continue
            link, moved = joined.link_or_assumed(direction), int(joined.bytes[rows].sum())
            if moved / link.bytes_per_s * 1e9 < BUSY * joined.span_ns:
                continue
            chosen.append(rows)
            taken.append((joined.bytes[rows] / link.bytes_per_s * 1e9).astype(np.int64))
            name = DIRECTIONS[direction]
            reached = moved / joined.span_ns * 1e9
            evidence += [
                Evidence(f"{name}: {size(moved)}, {reached / 1e9:.1f} GB/s on average", reached, "bytes/s", MEASURED),
                Evidence(
                    f"{name}: the link carries {link.bytes_per_s / 1e9:.1f} GB/s",
                    link.bytes_per_s,
                    "bytes/s",
                    link.how,
                ),
            ]
    if not chosen:
        return None
    return joined.device_question(
        CAUSE,
        "{calls} copies keep the link busy for about {lost}, nearly all the time",
        np.concatenate(chosen),
        np.concatenate(taken),
        evidence=evidence,
        because="whether the GPU had something to compute meanwhile",
        cure=(Change(f"If the model waits for these copies: {FEWER.text[:1].lower()}{FEWER.text[1:]}", "setting"),),
    )


def not_shown(joined: JoinedRecording) -> NotLookedFor | None:
    """Needs to know when only copies ran: by what the device executed, or by timing events."""
    lacks = executions_not_shown(joined.recording)
    return None if lacks is None or joined.account.seen else lacks


def find(joined: JoinedRecording) -> Finding | None:
    """A saturated link."""
    if not joined.recording.has_executions:
        return _by_events(joined)
    table = joined.recording.executions
    chosen: list[Array] = []
    losses: list[Array] = []
    evidence: list[Evidence] = []
    kernel = table["engine"] == Engine.KERNEL
    several = len(distinct(table["device"] + 1)) > 1
    slow = _slow_link(joined)
    for number in distinct(joined.x_gpu).tolist():
        mine = kernel & (joined.x_gpu == number)
        if not mine.any():
            continue
        compute = Cover(joined.x_start[mine], joined.x_end[mine])
        directions = (Direction.H2D, Direction.D2H)
        rows = np.concatenate([_full_link(joined, number, one, compute, evidence) for one in directions])
        if not len(rows):
            continue
        copying, others = Cover(joined.x_start[rows], joined.x_end[rows]), _explained(joined, number, compute)
        exposed = copying.total_ns - copying.intersect_ns(compute)
        left = copying.total_ns - copying.intersect_ns(others)  # both directions at once are one wait
        alone = joined.x_dur[rows] - compute.within(joined.x_start[rows], joined.x_end[rows])
        alone = np.minimum(alone, joined.device.free_ns[rows])
        loss = (alone * min(left / max(int(alone.sum()), 1), 1.0)).astype(np.int64)
        left = int(loss.sum())  # no more than is free, as the title says
        chosen.append(rows)
        losses.append(loss)
        gpu = f"{_gpu(joined, rows)}: " if several else ""
        every = joined.busy(Engine.COPY, gpu=number)
        other = every.total_ns - every.intersect_ns(compute) - exposed
        evidence += _of_gpu(gpu, exposed, exposed - left, other)
    if not chosen:
        return None
    rows = np.concatenate(chosen)
    return joined.device_finding(
        CAUSE,
        FULL,
        "likely" if slow else "certain",
        rows,
        np.concatenate(losses),
        evidence=evidence,
        reason=_doubt(slow, link_of(joined.recording)),
        cure=(
            *_why_slow(slow, link_of(joined.recording), several),
            *_fewer(joined, rows),
            FASTER if several else SPREAD,
            *((REPEATED,) if no_addresses(joined) else ()),
        ),
    )


def _by_events(joined: JoinedRecording) -> Finding | None:
    """The same where timing events tell when only copies ran."""
    gpus = joined.account.gpus
    found = [(n, one) for n, gpu in enumerate(gpus) if gpu.kernels for one in _full_by_events(joined, gpu)]
    if not found:
        return None
    parts = [(one.rows, one.needs_ns, one.start, one.end, np.full(len(one.start), n)) for n, one in found]
    rows, needs_ns, start, end, where = (np.concatenate(column) for column in zip(*parts, strict=True))
    slow, several = _slow_link(joined), len(gpus) > 1
    stores = all(one.direction == Direction.D2H for _, one in found)
    return joined.finding(
        CAUSE,
        of_gpus(FULL, np.array([gpu.device for gpu in gpus])[where], end - start),
        "likely" if slow else "certain",
        Loss(
            int((end - start).sum()),
            len(rows),
            on="device",
            window=(int(start.min()), int(end.max())),
            span_ns=sum(gpus[n].window_ns for n in distinct(where)),
            places=joined.places(rows, needs_ns),
            spans=Times(start, end, where),
        ),
        evidence=[text for _, one in found for text in one.evidence],
        reason=_doubt(slow, link_of(joined.recording)),
        cure=(
            *_why_slow(slow, link_of(joined.recording), several),
            *((FEWER_STORES,) if stores else (FEWER, RECOMPUTE)),
            FASTER if several else SPREAD,
        ),
    )


class _Full(NamedTuple):
    """Copies of one direction that fill a GPU's link.

    Attributes:
        direction: of the copies.
        rows, needs_ns: of calls, and for how long each keeps the link busy.
        start, end: stretches in which only copies ran, most of them these; of those that no timing event saw, the
            account knows that only copies ran, and they count for the direction that ran alone for longer.
        evidence: their figures.
    """

    direction: Direction
    rows: Array
    needs_ns: Array
    start: Array
    end: Array
    evidence: list[Evidence]


def _full_by_events(joined: JoinedRecording, gpu: GpuAccount) -> Iterator[_Full]:
    """Each direction in which a GPU's copies fill the link, and no kernel hides them."""
    spans, cut = joined.recording.spans, gpu.stretches
    first, last = gpu.computes
    whose = f"GPU {gpu.device}, " if len(joined.account.gpus) > 1 and gpu.device >= 0 else ""
    waits = (cut.cause == NOBODY) & among(cut.line, (Line.AT_LINK_RATE, Line.BELOW_LINK_RATE))
    waits &= (cut.start >= first) & (cut.end <= last)
    theirs = among(joined.kind, (CallKind.COPY, CallKind.BATCH)) & joined.calls_of_gpu(gpu)
    theirs &= (joined.memory != Memory.PAGEABLE) & (joined.bytes > 0) & ~(joined.nested | joined.outside)
    copies = (spans["engine"] == Engine.COPY) & on_gpu(spans, gpu)
    for direction, way in DIRECTIONS.items():
        name = f"{whose}{way}"
        rows = np.flatnonzero(theirs & (joined.direction == direction))
        rate, how = joined.link(direction)
        if len(rows) < 8 or rate <= 0:
            continue
        needs_ns = (joined.bytes[rows] / rate * 1e9).astype(np.int64)
        busy_ns = min(int(needs_ns.sum()), gpu.window_ns)
        mine, others = (
            Cover(spans["start_ns"][some], spans["end_ns"][some]).within(cut.start, cut.end) * waits
            for some in (copies & (spans["direction"] == direction), copies & (spans["direction"] != direction))
        )
        meant = waits & ((mine > others) | ((mine == others) & (mine.sum() > others.sum())))
        lost_ns = cut.sum_ns(meant)
        if busy_ns < BUSY * gpu.window_ns or lost_ns < _ALONE * busy_ns:
            continue
        moved = int(joined.bytes[rows].sum())
        text = (
            f"{name}: {len(rows):,} copies moved {size(moved)}, for which the link needs {ms(int(needs_ns.sum()))}: "
            f"{share(busy_ns, gpu.window_ns)} of the serving window"
        )
        alone = f"only copies ran for {ms(lost_ns)}, {share(lost_ns, gpu.window_ns)} of that window"
        yield _Full(
            direction,
            rows,
            needs_ns,
            cut.start[meant],
            cut.end[meant],
            [
                Evidence(text, moved, "bytes", COUNTED),
                Evidence(f"{name}: {_full_rate(rate, how)}", rate, "bytes/s", MEASURED if how == FROM_COPIES else how),
                Evidence(f"{whose}by timing events, {alone}", lost_ns, "ns", MEASURED),
            ],
        )


def _of_gpu(gpu: str, exposed: int, explained: int, other: int) -> list[Evidence]:
    """How long these copies ran alone on one GPU, what is left for this finding, and how long `other` ones did."""
    evidence = [Evidence(f"{gpu}these copies ran for {ms(exposed)} while no kernel did", exposed, "ns", MEASURED)]
    if explained >= 0.005 * exposed:
        left = ms(exposed - explained)
        text = f"{gpu}other findings explain {ms(explained)} of these {ms(exposed)}; {left} are left"
        evidence.append(Evidence(text, explained, "ns", INFERRED))
    if other >= 0.01 * exposed:
        text = f"{gpu}only other copies ran for another {ms(other)}, such as copies inside the GPU"
        evidence.append(Evidence(text, other, "ns", MEASURED))
    return evidence


def _slow_link(joined: JoinedRecording) -> float:
    """The rate of a link that only its own copies tell, and that is slow for this GPU; 0: neither is so."""
    known = [joined.link(one) for one in (Direction.H2D, Direction.D2H)]
    rate = max((rate for rate, how in known if how == FROM_COPIES), default=0.0)
    return rate if rate < FULL_LINK * link_of(joined.recording).bytes_per_s else 0.0


def _doubt(slow: float, could: PcieLink) -> str:
    """What speaks against it, where the link may be able to carry more."""
    if not slow:
        return ""
    return (
        f"the link may carry more: {slow / 1e9:.1f} GB/s is what its fastest copies reached here. {could.text}, "
        "and `kvprobe doctor` measures yours"
    )


def _why_slow(slow: float, could: PcieLink, several: bool) -> tuple[Change, ...]:
    """What comes before fewer bytes where the link may be able to carry more: then as many bytes take less time."""
    if not slow:
        return ()
    shared = ". Record again with one GPU loading at a time, too: the GPUs may share a link" if several else ""
    text = (
        f"Find out why the link carries only {slow / 1e9:.1f} GB/s ({could.text}): "
        "`kvprobe doctor` shows its lanes and its rate"
    )
    return (Change(f"{text}{shared}", "setting"),)


def _fewer(joined: JoinedRecording, rows: Array) -> tuple[Change, ...]:
    """Fewer bytes of these copies: of what each step loads, where another finding says that copies are of that."""
    account = joined.account
    if any(account.claimed_ns(gpu, WEIGHTS, COPIES) for gpu in account.gpus):
        return (Change(MOVE_FEWER, "setting"),)
    stores = joined.recording.executions["direction"][rows] == Direction.D2H
    return (FEWER_STORES,) if stores.all() else (FEWER, RECOMPUTE)


def _gpu(joined: JoinedRecording, rows: Array) -> str:
    """What to call the GPU of these executions of one process."""
    table, row = joined.recording.executions, rows[0]
    device = int(table["device"][row])
    return f"GPU {device}" if device >= 0 else f"process {joined.pid(int(table['process'][row]))}"


def _full_link(
    joined: JoinedRecording, number: int, direction: Direction, compute: Cover, evidence: list[Evidence]
) -> Array:
    """Rows of a GPU's copies of a direction, if they fill its link and no kernel hides them; then evidence is added."""
    table = joined.recording.executions
    rows: Array = np.flatnonzero(
        (table["engine"] == Engine.COPY)
        & (table["direction"] == direction)
        & (joined.x_gpu == number)
        & (table["memory"] != Memory.PAGEABLE)
        & (joined.x_dur > 0)
    )
    rate, how = joined.link(direction)
    if len(rows) < 8 or rate <= 0:
        return rows[:0]
    copying = Cover(joined.x_start[rows], joined.x_end[rows])
    moved = int(table["bytes"][rows].sum())
    reached = moved / max(copying.total_ns, 1) * 1e9
    exposed = copying.total_ns - copying.intersect_ns(compute)
    between = int(copying.within(compute.start[:1], compute.end[-1:])[0])
    full = reached >= FULL_LINK * rate and copying.total_ns >= BUSY * joined.span_ns
    if not full or 2 * between < copying.total_ns or exposed < _ALONE * copying.total_ns:
        return rows[:0]
    gpu = f"{_gpu(joined, rows)}, " if len(distinct(table["device"] + 1)) > 1 else ""
    name = f"{gpu}{DIRECTIONS[direction]}"
    evidence += [
        Evidence(
            f"{name}: copies ran for {share(copying.total_ns, joined.span_ns)} of the serving window and moved "
            f"{size(moved)} at {reached / 1e9:.1f} GB/s",
            reached,
            "bytes/s",
            MEASURED,
        ),
        Evidence(f"{name}: {_full_rate(rate, how)}", rate, "bytes/s", MEASURED if how == FROM_COPIES else how),
    ]
    return rows


def _full_rate(rate: float, how: str) -> str:
    """What counts as the link's full rate."""
    if how == FROM_COPIES:
        return f"the fastest large copies reached {rate / 1e9:.1f} GB/s, which counts as the link's full rate"
    return f"the link carries {rate / 1e9:.1f} GB/s"


def _explained(joined: JoinedRecording, number: int, compute: Cover) -> Cover:
    """When kernels run, or when another finding has explained what this GPU waits for."""
    taken = [
        (cut.start[mine], cut.end[mine])
        for gpu in joined.account.gpus
        if number in joined.gpu_numbers(gpu)
        for cut in (gpu.stretches,)
        for mine in (cut.cause != NOBODY,)
    ]
    start, end = zip((compute.start, compute.end), *taken, strict=True)
    return Cover(np.concatenate(start), np.concatenate(end))
