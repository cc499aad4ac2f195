"""What changes of where experts lie would save: from when the GPU computed nothing because of their uploads.

An upload costs what of its copy no kernel ran beside, and a call that uploads what the thread was in it, or on its way
to the next one, while the GPU ran nothing. Copies and calls cost as much after a change as before.

Whoever uploads ahead waits neither for the uploads nor for which experts are needed, as far as the thread and the link
can keep up (`expert_ahead`).

`kvprobe run` does not see the GPU all the time, but every call. What it has not seen is taken to cost per byte and per
call what it has. What is predicted is never more than what the account says was not computing, so extended.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvprobe.account.account import Account, GpuAccount
from kvprobe.account.expert_ahead import ahead_ns, turns_of
from kvprobe.account.lines import COPIES, HOST, Line, Unknown
from kvprobe.recordings.experts import ExpertUploads
from kvprobe.recordings.intervals import Cover
from kvprobe.recordings.joined import on_gpu
from kvprobe.recordings.links import links_of
from kvprobe.recordings.model import Array, CallKind, Direction, Engine, Memory, Recording

__all__ = ["ExpertChange", "ExpertGains", "expert_gains"]

_SHARES = (0.125, 0.25, 0.5, 1.0)  # of the bytes of all experts that were seen
PREFETCH, SLOTS, FIXED = "prefetch", "slots", "fixed"
_FEW = 5  # calls for one tensor whose mean says something of the tensor
_LEAST_SEEN = 20  # calls that upload, of those of which the GPU was seen: from fewer nothing is extended


@dataclass(frozen=True)
class ExpertChange:
    """One change, and what it saves.

    Attributes:
        what: PREFETCH: each upload begins while what comes before it computes; SLOTS: so many experts more are kept on
            the GPU, and the one not used longest goes first; FIXED: whole tensors stay there, the most costly first.
        count: slots, or tensors; 0 of a prefetch.
        bytes: of GPU memory that it takes.
        kept: uploads that it saves.
        kept_bytes: theirs.
        saved_ns: wall time, at most; None: it was not seen when the GPU computed.
    """

    what: str
    count: int
    bytes: int
    kept: int
    kept_bytes: int
    saved_ns: int | None


@dataclass(frozen=True)
class ExpertGains:
    """Of one process.

    Attributes:
        window_ns: of the GPU that waited.
        exposed_ns: how long it computed nothing while experts were uploaded; None: not seen.
        observed: share of the window in which it was seen; below 1 all times are extended from there.
        changes: what would save some of it.
    """

    window_ns: int
    exposed_ns: int | None
    observed: float
    changes: list[ExpertChange]


def expert_gains(recording: Recording, account: Account, uploads: ExpertUploads) -> ExpertGains:
    """What changes would save of one process's uploads."""
    gpu = next((one for one in account.gpus if one.seen and uploads.process in one.processes), None)
    costs = _costs(recording, gpu, uploads) if gpu is not None else None
    changes = []
    if gpu is not None and costs is not None:
        changes.append(ExpertChange(PREFETCH, 0, 0, 0, 0, max(costs.ahead_ns, 0)))
    held = uploads.held_bytes
    each = held / max(len(np.unique(uploads.key)), 1)
    for share in _SHARES:
        slots = round(share * held / each)
        mask = uploads.again & (uploads.distance <= slots)
        if slots and mask.any():
            changes.append(_change(SLOTS, slots, int(slots * each), mask, uploads, costs))
    changes += _fixed(uploads, costs, held)
    window_ns, observed = (gpu.window_ns, _observed(gpu)) if gpu is not None else (0, 0.0)
    return ExpertGains(window_ns, costs.total_ns if costs is not None else None, observed, changes)


@dataclass(frozen=True)
class _Costs:
    """How long the GPU computed nothing, ns, wherever it was not seen extended from where it was.

    Attributes:
        copied: because of the copy of each upload, (uploads,).
        of: the number of each upload's call, (uploads,).
        called: because of each call, while nothing ran, (calls,).
        ahead_ns: of this, and of the waits for which experts are needed, what goes if uploads begin ahead.
    """

    copied: Array
    of: Array
    called: Array
    ahead_ns: int

    @property
    def total_ns(self) -> int:
        """Of all uploads."""
        return int(self.copied.sum() + self.called.sum())

    def saved_ns(self, mask: Array) -> int:
        """Without these uploads. What is left of a run of experts that one call copied takes a call for each piece."""
        left = ~mask
        first = left.copy()
        first[1:] &= mask[:-1] | (self.of[1:] != self.of[:-1])
        calls = np.bincount(self.of[first], minlength=len(self.called))
        return max(int(self.copied[mask].sum() + (self.called * (1 - calls)).sum()), 0)


def _change(
    what: str, count: int, size: int, mask: Array, uploads: ExpertUploads, costs: _Costs | None
) -> ExpertChange:
    saved = costs.saved_ns(mask) if costs is not None else None
    return ExpertChange(what, count, size, int(mask.sum()), int(uploads.bytes[mask].sum()), saved)


def _fixed(uploads: ExpertUploads, costs: _Costs | None, held: int) -> list[ExpertChange]:
    """Whole tensors, those first that cost most for their size."""
    tensors = len(uploads.tensors)
    weight = costs.copied if costs is not None else uploads.bytes
    spent = np.bincount(uploads.tensor, weight, tensors)
    sizes = np.array([one.experts * one.expert_bytes for one in uploads.tensors], dtype=np.int64)
    order = np.argsort(-spent / sizes, kind="stable")
    room = np.cumsum(sizes[order])
    out, before = [], 0
    for share in _SHARES:
        count = int(np.searchsorted(room, share * max(held, int(room[-1])), "right"))
        if count > before:
            before = count
            mask = np.isin(uploads.tensor, order[:count])
            out.append(_change(FIXED, count, int(room[count - 1]), mask, uploads, costs))
    return out


def _costs(recording: Recording, gpu: GpuAccount, uploads: ExpertUploads) -> _Costs | None:
    """What uploads cost; None where the GPU was seen beside too few of them."""
    cut, calls = gpu.stretches, recording.calls
    waiting, idle = (_cover(gpu, np.isin(cut.line, np.array(some))) for some in ((*COPIES, *HOST), HOST))
    seen = _cover(gpu, ~_hidden(gpu))
    copies, of, parts = np.unique(uploads.call, return_inverse=True, return_counts=True)
    held = (calls["memory"][copies] == Memory.PAGEABLE) | (calls["kind"][copies] == CallKind.COPY_SYNC)
    made, returned = calls["start_ns"][copies], calls["end_ns"][copies]
    begin, end = (column[copies].astype(np.int64) for column in (links_of(recording).began, links_of(recording).done))
    known = (begin >= 0) & (end > begin)  # when each ran
    begin = np.where(held, made, begin)
    end = np.where(held, np.maximum(returned, end), end)
    loads = _loads(recording, gpu)
    running = Cover(begin[known], end[known]) if known.any() else loads
    if running is None or not running.total_ns:
        return None
    issued = np.where(held & known, returned, made), _next_calls(recording, copies, uploads)
    told = (seen.within(made, issued[1]) == issued[1] - made) & (known if known.any() else True)
    if told.sum() < min(_LEAST_SEEN, len(copies)):
        return None
    size = np.bincount(of, uploads.bytes, len(copies))
    if known.any():
        exposed = waiting.within(begin, end) * known.astype(np.float64)
        exposed *= waiting.intersect_ns(running) / max(exposed.sum(), 1)
        copied = np.where(known, exposed, size * (exposed.sum() / size[known].sum()))[of] / parts[of]
        share = 1.0
    else:
        share = min(float(size[told].sum()) / max(_span_bytes(recording, gpu), 1), 1.0)
        copied = uploads.bytes * (waiting.intersect_ns(running) * share / size[told].sum())
    called = _without(idle, running).within(*issued).astype(np.float64)
    tensor = np.zeros(len(copies), dtype=np.int64)
    tensor[of] = uploads.tensor
    called[~told] = _means(called[told], tensor[told], len(uploads.tensors))[tensor[~told]]
    more = float(size.sum() / size[told].sum())
    hidden_ns = cut.sum_ns(_hidden(gpu))
    most = min(gpu.not_computing_ns * more, gpu.not_computing_ns + hidden_ns)
    fits = min(most / max(copied.sum() + called.sum(), 1), 1.0)
    linked = (loads if loads is not None else running).total_ns * more
    total = float(copied.sum() + called.sum()) * fits
    turns = turns_of(recording, copies, size, (made, issued[1]), (gpu.from_ns, gpu.to_ns))
    ahead = min(total, gpu.asked_ns - linked)
    if turns is not None:
        computing = _cover(gpu, cut.line == Line.COMPUTING)
        lasted = int((turns.end - turns.begin).sum())
        ahead = min(lasted - ahead_ns(turns, computing, seen, linked / float(size.sum())), most)
    return _Costs(copied * fits, of, called * fits, int(ahead))


def _hidden(gpu: GpuAccount) -> Array:
    """Mask over stretches: nobody saw what the GPU did."""
    cut = gpu.stretches
    unseen = np.array((Unknown.NOT_COVERED, Unknown.NOT_RECORDED), dtype=np.int8)
    return np.asarray((cut.line == Line.NOT_KNOWN) & np.isin(cut.detail, unseen))


def _observed(gpu: GpuAccount) -> float:
    """Share of the window in which the GPU was seen."""
    return 1 - gpu.stretches.sum_ns(_hidden(gpu)) / max(gpu.window_ns, 1)


def _cover(gpu: GpuAccount, mask: Array) -> Cover:
    return Cover(gpu.stretches.start[mask], gpu.stretches.end[mask])


def _without(one: Cover, other: Cover) -> Cover:
    """What the one covers and the other does not."""
    edges = np.unique(np.concatenate((one.start, one.end, other.start, other.end)))
    begins, ends = edges[:-1], edges[1:]
    kept = (one.within(begins, ends) > 0) & (other.within(begins, ends) == 0)
    return Cover(begins[kept], ends[kept])


def _means(value: Array, kind: Array, kinds: int) -> Array:
    """Of each kind, (kinds,); of all where there are few of it."""
    many = np.bincount(kind, minlength=kinds)
    means: Array = np.bincount(kind, value, kinds) / np.maximum(many, 1)
    return np.where(many >= _FEW, means, value.mean())


def _next_calls(recording: Recording, copies: Array, uploads: ExpertUploads) -> Array:
    """When the thread of each of these calls made the next one for the same tensor; its end, if it did other things.

    Between tensors it launches what computes, and not every recording has these calls.
    """
    calls = recording.calls
    start, end = calls["start_ns"], calls["end_ns"]
    out: Array = end[copies].copy()
    tensor = np.full(calls.rows, -1, dtype=np.int64)
    tensor[uploads.call] = uploads.tensor
    mine = np.flatnonzero(calls["process"] == uploads.process)
    order = mine[np.lexsort((start[mine], calls["thread"][mine]))]
    one, following = order[:-1], order[1:]
    both = (
        (tensor[one] >= 0) & (tensor[one] == tensor[following]) & (calls["thread"][one] == calls["thread"][following])
    )
    place = np.searchsorted(copies, one[both])
    out[place] = np.maximum(start[following[both]], out[place])
    return out


def _span_bytes(recording: Recording, gpu: GpuAccount) -> int:
    """Of loads to this GPU that were seen between timing events."""
    spans = recording.spans
    mine = (spans["engine"] == Engine.COPY) & (spans["direction"] == Direction.H2D)
    mine &= on_gpu(spans, gpu) & (spans["end_ns"] > gpu.from_ns) & (spans["start_ns"] < gpu.to_ns)
    return int(spans["bytes"][mine].sum())


def _loads(recording: Recording, gpu: GpuAccount) -> Cover | None:
    """When copies to this GPU ran; None: not recorded."""
    for table in (recording.executions, recording.spans):
        mine = (table["engine"] == Engine.COPY) & (table["direction"] == Direction.H2D)
        mine &= on_gpu(table, gpu)
        mine &= (table["end_ns"] > gpu.from_ns) & (table["start_ns"] < gpu.to_ns)
        if mine.any():
            return Cover(np.maximum(table["start_ns"][mine], gpu.from_ns), np.minimum(table["end_ns"][mine], gpu.to_ns))
    return None
