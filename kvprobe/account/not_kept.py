"""What a thread did where its calls were counted but not kept one by one, by what it did afterwards.

`kvprobe run` keeps the newest calls of each thread, those that took long, and exact sums of all. In a window that
begins earlier (`--from`, `--range`) the thread was in some call or in none, and nothing of that time tells which. Where
the GPU waited for it then, that gets the lines of the later waiting, whose calls were kept, without those calls that
are kept in any case: these have lines of their own.

The error is by resampling: so many pieces of the later time as there are, drawn anew, tell the lines again. The sums
tell whether the time before was like it: by so much as the time inside lost calls, by kind, is not what the later rate
makes of it, the lines may be wrong, too; lost calls before the window began are among them, and their time with them.
Where that is more than MOST of the window, nothing is filled.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from kvprobe.account.lines import HOST, Line, Unknown
from kvprobe.account.samples import COVERED, DRAWS, MOST, Samples, put
from kvprobe.account.stretches import Stretches
from kvprobe.account.threads import KEPT_NS, Threads
from kvprobe.recordings.assemble import among
from kvprobe.recordings.intervals import distinct, union
from kvprobe.recordings.model import Array, CallKind

__all__ = ["fill_not_kept"]

PIECES = 24  # of the time in which all calls were kept
PERIOD_NS = 5_000_000  # of waiting that is filled: so much of it has all lines, one after the other
TIMED = (CallKind.COPY, CallKind.BATCH, CallKind.COPY_SYNC, CallKind.SYNC)


def fill_not_kept(cut: Stretches, threads: Threads, samples: Samples) -> Samples:
    """Gives a GPU's waiting for calls that were not kept its lines, in place; `samples` with what that comes to."""
    if not _not_kept(cut).any():
        return samples
    begin, end = int(cut.edges[0]), int(cut.edges[-1])
    for caller in distinct(cut.caller[_not_kept(cut)]).tolist():
        kept = max(threads.kept_from(caller), begin)
        ns = cut.sum_ns(_not_kept(cut) & (cut.caller == caller))
        line, shares = _later(cut, threads, caller, kept)
        if not len(line):  # nothing of it was kept
            continue
        error = math.hypot(_error(shares), _unlike(threads, caller, kept, begin)) * ns
        error = math.hypot(error, samples.error_ns if samples.ns else 0)
        if error + samples.counted_error_ns > MOST * (end - begin):
            continue
        mine = _not_kept(cut) & (cut.caller == caller)
        told = cut.sum_ns(mine & ~cut.sampled)
        _put(cut, mine, line, shares.sum(axis=0), caller)
        samples = replace(samples, host_ns=samples.host_ns + told, error_ns=int(error))
    return samples


def _not_kept(cut: Stretches) -> Array:
    mask: Array = (cut.line == Line.NOT_KNOWN) & (cut.detail == Unknown.NOT_KEPT)
    return mask


def _later(cut: Stretches, threads: Threads, caller: int, kept: int) -> tuple[Array, Array]:
    """Lines of the waiting for a thread from when its calls were kept, and the ns of each, (pieces, lines)."""
    joined = threads.joined
    slow = (joined.caller == caller) & ~joined.nested & (joined.end - joined.start >= KEPT_NS)
    inside = cut.cut(*union(joined.start[slow], joined.end[slow]))
    mine = np.flatnonzero((cut.caller == caller) & among(cut.line, HOST) & (cut.start >= kept) & ~inside)
    if not len(mine) or int(cut.edges[-1]) <= kept:
        return mine[:0], np.zeros((0, 0))
    line, number = np.unique(cut.line[mine], return_inverse=True)
    piece = (cut.start[mine] - kept) * PIECES // (int(cut.edges[-1]) - kept)
    shares = np.zeros((PIECES, len(line)))
    np.add.at(shares, (piece, number.ravel()), cut.ns[mine])
    return line, shares


def _error(shares: Array) -> float:
    """How far any line's share may be from the truth in COVERED of all cases."""
    best = shares.sum(axis=0) / shares.sum()
    draws = np.random.default_rng(0).multinomial(PIECES, np.full(PIECES, 1 / PIECES), DRAWS) @ shares
    off = np.abs(draws / np.maximum(draws.sum(axis=1, keepdims=True), 1) - best).max(axis=1)
    return float(np.quantile(off, COVERED))


def _unlike(threads: Threads, caller: int, kept: int, begin: int) -> float:
    """Part of a thread's time before its calls were kept that went elsewhere than afterwards, by the sums.

    These are of all lost calls, those before `begin` too: from when the recording knows of the thread or its GPU.
    """
    joined = threads.joined
    calls, totals, coverage = joined.recording.calls, joined.recording.totals, joined.recording.coverage
    mine = np.flatnonzero((joined.caller == caller) & ~joined.nested)
    process, thread = int(joined.process[mine[0]]), int(joined.thread[mine[0]])
    own = (totals["process"] == process) & (totals["thread"] == thread)
    took, later = joined.end - joined.start, calls["start_ns"] >= kept
    marked = coverage["start_ns"][coverage["process"] == process]
    since = min(begin, int(joined.start[mine].min()), int(marked.min(initial=begin)))
    off, rest, until = 0.0, kept - since, int(joined.end[mine].max())
    for kind in TIMED:
        some = mine[joined.kind[mine] == kind]
        lost = int(totals["dur_ns"][own & (totals["kind"] == kind)].sum()) - int(took[some].sum())
        quick = some[later[some] & (took[some] < KEPT_NS)]
        off += abs(max(lost, 0) - int(took[quick].sum()) / max(until - kept, 1) * rest)
    return min(off / max(rest, 1), 1.0)


def _put(cut: Stretches, mine: Array, line: Array, weights: Array, caller: int) -> None:
    """Writes lines into stretches, each for as much of every PERIOD_NS as its weight is of all."""
    start, end, ns = cut.start[mine], cut.end[mine], cut.ns[mine]
    upto = np.concatenate(([0], np.cumsum(ns)))
    periods = max(1, int(upto[-1]) // PERIOD_NS)
    parts = np.arange(periods)[:, None] + np.cumsum(weights) / weights.sum()
    bounds = np.round(parts.ravel() / periods * upto[-1]).astype(np.int64)
    bounds[-1] = upto[-1]
    inside = bounds[(bounds > 0) & (bounds < upto[-1])]
    cuts = np.unique(np.concatenate((upto[:-1], inside)))
    piece = np.searchsorted(upto, cuts, "right") - 1
    number = np.searchsorted(bounds, cuts, "right") % len(line)
    nobody = np.full(len(line), -1)
    table = np.stack((line.astype(np.int64), np.full(len(line), caller), nobody))
    put(cut, table, start[piece] + cuts - upto[piece], number, list(zip(start.tolist(), end.tolist(), strict=True)))
