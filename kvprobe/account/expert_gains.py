"""What changes of where experts lie would save: from when the GPU computed nothing because of their uploads.

An upload costs what of its copy no kernel ran beside. What is predicted is never more than that, and so never more than
what the account says was not computing. Copies cost as much after a change as before, and what a program does between
them, such as asking the GPU which experts it needs, stays.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvprobe.account.account import Account, GpuAccount
from kvprobe.account.lines import COPIES, HOST
from kvprobe.recordings.experts import ExpertUploads
from kvprobe.recordings.intervals import Cover
from kvprobe.recordings.links import links_of
from kvprobe.recordings.model import Array, CallKind, Direction, Engine, Memory, Recording

__all__ = ["ExpertChange", "ExpertGains", "expert_gains"]

_SHARES = (0.125, 0.25, 0.5, 1.0)  # of the bytes of all experts that were seen
PREFETCH, SLOTS, FIXED = "prefetch", "slots", "fixed"


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
        changes: what would save some of it.
    """

    window_ns: int
    exposed_ns: int | None
    changes: list[ExpertChange]


def expert_gains(recording: Recording, account: Account, uploads: ExpertUploads) -> ExpertGains:
    """What changes would save of one process's uploads."""
    gpu = next((one for one in account.gpus if one.seen and uploads.process in one.processes), None)
    cost, linked = _costs(recording, gpu, uploads) if gpu is not None else (None, 0)
    total = int(cost.sum()) if cost is not None else None
    changes = []
    if gpu is not None and total is not None:
        changes.append(ExpertChange(PREFETCH, 0, 0, 0, 0, max(min(total, gpu.asked_ns - linked), 0)))
    held = uploads.held_bytes
    each = held / max(len(np.unique(uploads.key)), 1)
    for share in _SHARES:
        slots = round(share * held / each)
        mask = uploads.again & (uploads.distance <= slots)
        if slots and mask.any():
            changes.append(_change(SLOTS, slots, int(slots * each), mask, uploads, cost))
    changes += _fixed(uploads, cost, held)
    return ExpertGains(gpu.window_ns if gpu is not None else 0, total, changes)


def _change(what: str, count: int, size: int, mask: Array, uploads: ExpertUploads, cost: Array | None) -> ExpertChange:
    saved = int(cost[mask].sum()) if cost is not None else None
    return ExpertChange(what, count, size, int(mask.sum()), int(uploads.bytes[mask].sum()), saved)


def _fixed(uploads: ExpertUploads, cost: Array | None, held: int) -> list[ExpertChange]:
    """Whole tensors, those first that cost most for their size."""
    tensors = len(uploads.tensors)
    weight = cost if cost is not None else uploads.bytes
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
            out.append(_change(FIXED, count, int(room[count - 1]), mask, uploads, cost))
    return out


def _costs(recording: Recording, gpu: GpuAccount, uploads: ExpertUploads) -> tuple[Array | None, int]:
    """Of each upload, how long the GPU computed nothing because of it, and how long the link carried loads, ns."""
    cut = gpu.stretches
    idle = np.isin(cut.line, np.array((*COPIES, *HOST), dtype=np.uint8))
    waiting = Cover(cut.start[idle], cut.end[idle])
    calls, links = recording.calls, links_of(recording)
    copies, of, parts = np.unique(uploads.call, return_inverse=True, return_counts=True)
    begin, end = links.began[copies].astype(np.int64), links.done[copies].astype(np.int64)
    held = (calls["memory"][copies] == Memory.PAGEABLE) | (calls["kind"][copies] == CallKind.COPY_SYNC)
    begin = np.where(held, calls["start_ns"][copies], begin)
    end = np.where(held, np.maximum(calls["end_ns"][copies], end), end)
    loads = _loads(recording, gpu)
    known = (begin >= 0) & (end > begin)
    if known.all():
        exposed = waiting.within(begin, end).astype(np.float64)
        together = Cover(begin, end)
        exposed *= waiting.intersect_ns(together) / max(exposed.sum(), 1)
        linked = loads.total_ns if loads is not None else together.total_ns
        return exposed[of] / parts[of], linked
    if loads is None or not loads.total_ns:
        return None, 0
    spans = recording.spans
    mine = (spans["engine"] == Engine.COPY) & (spans["direction"] == Direction.H2D)
    share = min(int(uploads.bytes.sum()) / max(int(spans["bytes"][mine].sum()), 1), 1.0)
    whole = waiting.intersect_ns(loads) * share
    return uploads.bytes / max(int(uploads.bytes.sum()), 1) * whole, loads.total_ns


def _loads(recording: Recording, gpu: GpuAccount) -> Cover | None:
    """When copies to this GPU ran; None: not recorded."""
    for table in (recording.executions, recording.spans):
        mine = (table["engine"] == Engine.COPY) & (table["direction"] == Direction.H2D)
        mine &= np.isin(table["process"], gpu.processes)
        mine &= (table["end_ns"] > gpu.from_ns) & (table["start_ns"] < gpu.to_ns)
        if mine.any():
            return Cover(np.maximum(table["start_ns"][mine], gpu.from_ns), np.minimum(table["end_ns"][mine], gpu.to_ns))
    return None
