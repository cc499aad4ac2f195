"""Weights are copied to the GPU while nothing computes, although compute could have hidden the copies.

Mechanism: offloaded weights are copied to the GPU on the compute stream, or just before they are needed, so each layer
first waits for its bytes and then computes. If the weights of a layer are copied one layer ahead, copying and computing
run side by side.

Signature: weights are copied from CPU to GPU, and for most of this time no kernel of the same process runs, although
the process has kernels that could hide the copies. Copies are of weights if the same source is loaded in every forward
pass, at least 1 MiB each time, and the loads are not redundant. If a recording has no addresses, one of these must be
true:
 - The names of NVTX ranges around the calls say so (weight, param, layer, offload, prefetch, fsdp). A range that
   contains every copy does not count, because it does not tell one copy from another.
 - The sizes of the copies repeat in the same order, and are at least 1 MiB.
 - Many copies have one size of at least 1 MiB, and each copy was submitted before the kernel in front of it had ended.
   So the copy could have overlapped with this kernel. A copy that was submitted after the end of this kernel does not
   count: perhaps it could not be submitted earlier. Several copies between two kernels count if their number is the
   same each time, their stream is the one that computes, and nothing of this size is copied from the GPU.
Sizes do not tell weights from a KV cache that each step needs. So if only sizes say it, the finding speaks of loads.

If the GPU was not recorded, kvprobe sees large loads on a stream that has about as many launches as loads, but not what
computes meanwhile. If these loads carry enough bytes to fill a tenth of the time, the cause is an open question.

Time lost: the time for which copies and kernels could have run side by side, less the time for which they did.
Copies and kernels could have run side by side for the total time of all copies or the total time of all kernels,
whichever is shorter.
Predicted saving: the same time.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kvprobe.diagnosis.finding import INFERRED, MEASURED, Change, Evidence, Finding, cause_of
from kvprobe.diagnosis.joined import Array, JoinedRecording, ms, size
from kvprobe.diagnosis.waited_copies import waited_copies
from kvprobe.recordings.intervals import Cover, ascending, distinct, group_starts, in_time
from kvprobe.recordings.model import CallKind, Direction, Engine, Memory

CAUSE = cause_of(__name__)
OF_EXECUTIONS = True  # told by what the device executed: without it, not looked for
MANY = 16  # copies of one size
LARGE = 1 << 20  # bytes
ASKED_SHARE = 0.1  # of the time
SOURCES, NAMED = "the same sources are loaded again and again", "ranges around the copies name weights"
SIZES = "a sequence of sizes repeats"
BETWEEN = "copies of one size follow kernels that they could have overlapped with, again and again"
SETTINGS = (
    "offload_prefetch_step at least offload_num_in_group (vLLM), use_stream (diffusers). "
    "`kvprobe weights MODEL_DIR` tries it with a local checkpoint"
)
PREFETCH = (
    "Prefetch: copy layer i+1 on a stream of its own while layer i computes, and order the two by events. Settings: "
    + SETTINGS
)
LOAD_AHEAD = (
    "Prefetch: on a stream of its own, load what comes next while the kernels before it compute, and order the two by "
    "events. If these kernels still read the memory that the next load writes, load into a second buffer, in turns. "
    f"Settings, if the loads are weights: {SETTINGS}"
)
MOVE_FEWER = "Move fewer bytes: keep more of them on the GPU, or hold them in fewer bits"
FEWER_LAYERS = "Keep fewer layers in CPU memory, spread evenly, so that each copy has compute to hide behind"


class _Words(NamedTuple):
    """What copies are called: in a title and in a sentence, as what they are taken; and how to load ahead and less."""

    title: str
    them: str
    taken: str
    ahead: str
    fewer: str


WEIGHT_COPIES = _Words("Weight copies", "weight copies", "weights", PREFETCH, FEWER_LAYERS)
LOADS = _Words(  # by sizes alone they may be blocks of a KV cache
    "Loads between kernels",
    "loads",
    "what each step needs, weights or a KV cache,",
    LOAD_AHEAD,
    f"If the loads are weights: {FEWER_LAYERS[:1].lower()}{FEWER_LAYERS[1:]}",
)
WORDS = ("weight", "param", "layer", "offload", "prefetch", "fsdp", "onload", "all_gather", "allgather")


def _weights(joined: JoinedRecording, rows: Array) -> tuple[Array, str]:
    """Of H2D executions (sorted by start), those that are weights, and how that is known."""
    table = joined.recording.executions
    calls = joined.x_call[rows]
    known = calls >= 0
    source = np.zeros(len(rows), dtype=joined.src.dtype)  # a recording may have executions and no calls at all
    source[known] = joined.src[calls[known]]
    if (source != 0).any():
        order = np.lexsort((joined.x_start[rows], table["bytes"][rows], source))
        new = np.ones(len(rows), dtype=bool)
        new[1:] = (source[order][1:] != source[order][:-1]) | (
            table["bytes"][rows][order][1:] != table["bytes"][rows][order][:-1]
        )
        group = np.cumsum(new) - 1
        times = np.bincount(group) - 1  # how often each was loaded again; what is redundant has been taken out
        weights = np.zeros(len(rows), dtype=bool)
        weights[order] = (times >= 2)[group] & (source[order] != 0)
        cycle = rows[order][new & weights[order]]
        if len(cycle) < 2 or int(table["bytes"][cycle].sum()) < 1 << 20:  # a scratch buffer, filled again and again
            return rows[:0], ""
        return rows[weights], SOURCES
    if joined.recording.ranges.rows and known.any() and _named(joined, calls[known]):
        return rows, NAMED
    size = table["bytes"][rows]
    large = size >= 1 << 20
    big = size[large]
    for period in range(2, min(len(big) // 3, 512) + 1):
        if len(np.unique(big[:period])) > 1 and (big[period:] == big[:-period]).mean() > 0.95:
            return rows[large], SIZES
    between = _between_kernels(joined, rows[large])
    if len(between):
        return between, BETWEEN
    return rows[:0], ""


def _named(joined: JoinedRecording, calls: Array) -> bool:
    """Whether the innermost ranges around most of these calls name weights.

    A range that contains all calls of its thread says what the program is, and nothing of one copy.
    """
    sample = calls[:: 1 + len(calls) // 300]
    where = [(int(joined.process[one]), int(joined.thread[one]), int(joined.start[one])) for one in sample]
    begins, ends = joined.start[calls], joined.end[calls]
    whole = int(begins.min()), int(ends.max())
    names = [joined.innermost_range(*one, but=whole).lower() for one in where]
    return 2 * sum(any(word in name for word in WORDS) for name in names) > len(names)


def _between_kernels(joined: JoinedRecording, rows: Array) -> Array:
    """Of large loads those of the most frequent size that follow kernels, always as many, and could run beside them.

    Such a copy had been submitted before the kernel in front of it ended, and stands on a stream of kernels, beside
    which it cannot run, or no other large copy came between the two. Where its call is not known, its stream decides.
    Several between two kernels are a group of layers only on a stream of kernels, and where nothing as large goes out:
    elsewhere they may be what a request brings.
    """
    table = joined.recording.executions
    if len(rows) < MANY:
        return rows[:0]
    mine = joined.x_gpu == joined.x_gpu[rows[0]]
    kernels = in_time(np.flatnonzero(mine & (table["engine"] == Engine.KERNEL)), joined.x_start)
    if not len(kernels):
        return rows[:0]
    sizes, counts = np.unique(table["bytes"][rows], return_counts=True)
    rows = in_time(rows[table["bytes"][rows] == sizes[np.argmax(counts)]], joined.x_start)
    start, call = joined.x_start[rows], joined.x_call[rows]
    begun = np.searchsorted(joined.x_start[kernels], start)
    front = joined.x_end[kernels[np.maximum(begun - 1, 0)]]
    copies = mine & (table["engine"] == Engine.COPY) & (table["bytes"] >= LARGE)
    large = ascending(joined.x_start[copies])
    asked = np.append(joined.start, 0)[call]  # a recording may have executions and no calls at all
    held = (begun > 0) & (call >= 0) & (asked < front)
    beside = np.isin(table["stream"][rows], joined.kernel_streams)
    first = group_starts(begun)  # one kernel at least since the copy before
    many = np.diff(np.append(first, len(rows)))
    usual = int(np.bincount(many).argmax())
    held &= beside | (np.searchsorted(large, front) == np.searchsorted(large, start))
    held |= beside & (call < 0)
    place = np.arange(len(rows)) - np.repeat(first, many)
    chosen = held & (place < usual) & (np.repeat(many, many) >= usual)
    out = copies & (table["direction"] == Direction.D2H) & (table["bytes"] == table["bytes"][rows[0]])
    if usual > 1 and (out.any() or not beside.all()):
        return rows[:0]
    enough = int(chosen[first].sum()) >= MANY and 10 * int(chosen.sum()) > 8 * len(rows)
    return rows[chosen] if enough else rows[:0]


def open_question(joined: JoinedRecording) -> Finding | None:
    """Large loads on the stream that computes, where the device was not recorded: none of its kernels runs beside."""
    if joined.recording.has_executions:
        return None
    mask = (joined.kind == CallKind.COPY) & (joined.direction == Direction.H2D) & (joined.memory != Memory.PAGEABLE)
    rows = np.flatnonzero(mask & (joined.bytes >= LARGE) & (joined.stream >= 0))
    rows = rows[joined.between_kernels(rows)]
    link = joined.link_or_assumed(Direction.H2D)
    ns = (joined.bytes[rows] / link.bytes_per_s * 1e9).astype(np.int64)
    if len(rows) < MANY or int(ns.sum()) < ASKED_SHARE * joined.span_ns:
        return None
    moved = int(joined.bytes[rows].sum())
    return joined.device_question(
        CAUSE,
        "{calls} large loads on the stream that computes take about {lost}, and none of its kernels runs meanwhile",
        rows,
        ns,
        lost_on="device",
        evidence=(
            Evidence(f"they move {size(moved)}", moved, "bytes", MEASURED),
            Evidence(
                f"at {link.bytes_per_s / 1e9:.1f} GB/s ({link.how}) that takes {ms(int(ns.sum()))}",
                float(ns.sum()),
                "ns",
                INFERRED,
            ),
        ),
        because="what the GPU executed while large loads ran on the stream that computes",
        cure=(Change("If they are weights: " + PREFETCH[:1].lower() + PREFETCH[1:]),),
    )


def find(joined: JoinedRecording) -> Finding | None:
    """Exposed weight copies."""
    table = joined.recording.executions
    loads = (
        (table["engine"] == Engine.COPY) & (table["direction"] == Direction.H2D) & (table["memory"] != Memory.PAGEABLE)
    )
    chosen: list[Array] = []
    losses: list[Array] = []
    copy_ns = compute_ns = both_ns = longest = 0
    reason = ""
    for gpu in distinct(joined.x_gpu[loads]):
        rows = np.flatnonzero(loads & (joined.x_gpu == gpu) & (joined.device.owner < 0))
        rows = in_time(rows, joined.x_start)
        rows, how = _weights(joined, rows)
        if len(rows) < 4:
            continue
        kernel = np.flatnonzero((table["engine"] == Engine.KERNEL) & (joined.x_gpu == gpu))
        begin, end = int(joined.x_start[rows].min()), int(joined.x_end[rows].max())
        compute = Cover(np.clip(joined.x_start[kernel], begin, end), np.clip(joined.x_end[kernel], begin, end))
        copying = Cover(joined.x_start[rows], joined.x_end[rows])
        both = copying.intersect_ns(compute)
        loss = min(copying.total_ns, compute.total_ns) - both
        if 2 * both > min(copying.total_ns, compute.total_ns) or loss <= 0:
            continue
        reason, longest = how, max(longest, copying.total_ns, compute.total_ns)
        copy_ns, compute_ns, both_ns = copy_ns + copying.total_ns, compute_ns + compute.total_ns, both_ns + both
        exposed = joined.x_dur[rows] - compute.within(joined.x_start[rows], joined.x_end[rows])
        chosen.append(rows)
        losses.append((exposed * (loss / max(int(exposed.sum()), 1))).astype(np.int64))
    if not chosen:
        return None
    rows, loss_ns = np.concatenate(chosen), np.concatenate(losses)
    waited = waited_copies(joined, rows)
    together = f"{len(chosen)} GPUs together: " if len(chosen) > 1 else ""
    did = f"did so for {ms(both_ns)}" if both_ns else "never did"
    words = WEIGHT_COPIES if reason in (SOURCES, NAMED) else LOADS
    return joined.device_finding(
        CAUSE,
        f"{words.title} ran alone: they could have overlapped with kernels for {{lost}}",
        "certain" if reason == SOURCES else "likely",
        rows,
        loss_ns,
        lost_on="device",
        evidence=(
            Evidence(
                f"{together}{len(rows):,} {words.them} took {ms(copy_ns)}, and kernels took {ms(compute_ns)}",
                copy_ns,
                "ns",
                MEASURED,
            ),
            Evidence(
                f"{together}both could have run side by side for {ms(min(copy_ns, compute_ns))}, and {did}",
                both_ns,
                "ns",
                MEASURED,
            ),
            Evidence(
                f"with perfect prefetching, {'the slower GPU' if len(chosen) > 1 else 'both'} would be done in "
                f"{ms(longest)}",
                longest,
                "ns",
                INFERRED,
            ),
            Evidence(f"these copies are taken to be {words.taken} because {reason}", len(rows), "calls", INFERRED),
            *waited.evidence(),
        ),
        cure=(waited.change(Change(words.ahead, share=1.0)), Change(words.fewer)),
    )
