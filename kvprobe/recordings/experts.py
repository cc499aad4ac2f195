"""Uploads told by expert: models whose experts lie in CPU memory and are copied to the GPU when a router picks them.

What tells them are source addresses: the experts of one tensor lie at one stride, and a step brings some of them. Two
ways of programs are known. llama.cpp (ggml-backend.cpp, `ggml_backend_sched_compute_splits`) keeps a tensor's layout:
it copies each run of neighbours among the picked experts to the same offset of a tensor on the GPU, with at most 512
bytes more behind it, and keeps nothing for the next step. Others keep some experts in slots, one copy of one size an
expert, and copy those that are missing. What the GPU writes to is a pool, and no expert; nor are pieces that every
tensor's visits bring whole, as layers of dense weights, or the same ones in all tensors, as blocks of KV cache.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvprobe.recordings.model import Array, CallKind, Direction, Recording
from kvprobe.recordings.serving import ServingWindow
from kvprobe.reuse.distances import FIRST, earlier_not_above, last_uses, stack_distances

__all__ = ["LEAST_BYTES", "ExpertTensor", "ExpertUploads", "expert_uploads"]

LEAST_BYTES = 16 << 10  # of an expert
PADDING = 512  # that llama.cpp copies behind a run
_FEW = 4  # different pieces, and copies, that make a tensor
_RUN = 4  # neighbours in the smallest copy, at most
_SAMPLE = 50_000  # copies, the first ones, that tell whether these are experts at all
_GROUPS = 4096  # tensors, and places that they go to
_APART = 64  # experts between neighbours that were picked, where all are so far apart
_NEAR = 4096  # experts of one tensor at most, where only gaps part tensors
_PARTIAL = 0.25  # of the visits bring a part of a tensor
_SHARE = 0.05  # of the bytes loaded: of thousands of blocks in any order, a few lie as experts would by chance
_ALIKE = 0.8  # of neighbouring visits to two tensors bring the same pieces: blocks of a pool
_NAMES = ("expert", "_exps", "moe")


@dataclass
class ExpertTensor:
    """One tensor of experts in CPU memory.

    Attributes:
        address: of its first expert that was seen; experts are numbered from there.
        expert_bytes: its stride.
        experts: numbers seen, at most: the greatest and one.
        name: the range around its first copy, where a recording has one; else "".
        uploads: experts brought, each as often as it was.
        different: how many different ones.
        visits: steps that brought some.
        whole: visits that brought all that were ever seen, of more than one.
        typical: experts in a visit, median.
    """

    address: int
    expert_bytes: int
    experts: int
    name: str
    uploads: int = 0
    different: int = 0
    visits: int = 0
    whole: int = 0
    typical: int = 0


@dataclass
class ExpertUploads:
    """Of one process: every upload of an expert in the order of time; arrays have one entry an upload.

    Attributes:
        process: its row.
        tensors: in the order of their first upload.
        slots: places on the GPU that experts are kept in; 0: nothing is kept from one step to the next.
        call: row of the copy in `calls`; a copy of a run of experts stands there for each.
        tensor, expert: which, as numbers of `tensors` and in it.
        bytes: that it moved.
        distance: different experts brought since it was last there, itself included: so many more slots would have kept
            it, if the one not used longest is given up first; FIRST: never there before.
    """

    process: int
    tensors: list[ExpertTensor]
    slots: int
    call: Array
    tensor: Array
    expert: Array
    bytes: Array
    distance: Array

    @property
    def again(self) -> Array:
        """Mask of those that had been brought before: churn."""
        mask: Array = self.distance != FIRST
        return mask

    @property
    def key(self) -> Array:
        """A number for each different expert."""
        widest = max(one.experts for one in self.tensors)
        keys: Array = self.tensor.astype(np.int64) * widest + self.expert
        return keys

    @property
    def held_bytes(self) -> int:
        """Of all experts that were seen, once each."""
        _, first = np.unique(self.key, return_index=True)
        sizes = np.array([one.expert_bytes for one in self.tensors], dtype=np.int64)
        return int(sizes[self.tensor[first]].sum())


def expert_uploads(recording: Recording, window: ServingWindow | None = None) -> list[ExpertUploads]:
    """One a process that uploads experts; in a window, else in all of the recording."""
    calls = recording.calls
    kinds = np.array((CallKind.COPY, CallKind.COPY_SYNC), dtype=np.uint8)
    loads = np.flatnonzero((calls["direction"] == Direction.H2D) & (calls["result"] == 0))
    if window is not None and len(loads):
        loads = loads[window.holds(calls["process"][loads], calls["start_ns"][loads])]
    rows = loads[
        np.isin(calls["kind"][loads], kinds) & (calls["src"][loads] != 0) & (calls["bytes"][loads] >= LEAST_BYTES)
    ]
    found = []
    for process in np.unique(calls["process"][rows]).tolist():
        mine = rows[calls["process"][rows] == process]
        one = _of_process(recording, process, mine[np.argsort(calls["start_ns"][mine], kind="stable")])
        if one is None:
            continue
        loaded = int(calls["bytes"][loads[calls["process"][loads] == process]].sum())
        if _any_named([tensor.name for tensor in one.tensors]) or int(one.bytes.sum()) >= _SHARE * loaded:
            found.append(one)
    return found


@dataclass
class _Tensor:
    """Copies that belong to one: places in the process's rows, the stride, the first and the last address."""

    at: Array
    stride: int
    first: int
    last: int
    kept_layout: bool


def _of_process(recording: Recording, process: int, rows: Array) -> ExpertUploads | None:
    calls = recording.calls
    if len(rows) < _FEW or (len(rows) > _SAMPLE and _of_process(recording, process, rows[:_SAMPLE]) is None):
        return None
    src, dst, size = calls["src"][rows].astype(np.int64), calls["dst"][rows].astype(np.int64), calls["bytes"][rows]
    ways = (_layouts(src, dst, size), _slotted(src, size))
    # some copies of each way look like the other one's by chance
    found = max(ways, key=lambda one: sum(len(tensor.at) for tensor in one))
    written = _written(recording, process)
    found = [one for one in found if np.diff(np.searchsorted(written, (one.first, one.last)))[0] == 0]
    kept = _judged(recording, rows, src, size, found, bool(found) and not found[0].kept_layout)
    if kept is None:
        return None
    tensors, call, tensor, expert, moved, slotted = kept
    out = ExpertUploads(process, tensors, 0, call, tensor, expert, moved, np.zeros(0, dtype=np.int64))
    where = calls["dst"][call].astype(np.int64)
    if slotted:
        out.slots = len(np.unique(where))
    out.distance = _distances(out.key, where) if out.slots else stack_distances(out.key)
    return out


def _layouts(src: Array, dst: Array, size: Array) -> list[_Tensor]:
    """Tensors whose copies keep their offset on the GPU: those with one difference of addresses."""
    found: list[_Tensor] = []
    for at in _groups(src - dst, _FEW):
        sources = np.unique(src[at])
        if len(sources) < 2:
            continue
        stride = _stride(sources, size[at])
        if stride:
            at = np.sort(at)
            found.append(_Tensor(at, stride, int(sources[0]), int((src[at] + size[at]).max()), True))
    return _merged(found)


def _groups(key: Array, least: int) -> list[Array]:
    """Places of equal keys, of those that there are at least so many of; the largest groups."""
    order = np.argsort(key, kind="stable")
    edges = np.flatnonzero(np.diff(key[order])) + 1
    first, last = np.append(0, edges), np.append(edges, len(key))
    large = np.flatnonzero(last - first >= least)
    large = large[np.argsort(first[large] - last[large], kind="stable")][:_GROUPS]
    return [order[a:b] for a, b in zip(first[large].tolist(), last[large].tolist(), strict=True)]


def _stride(sources: Array, size: Array) -> int:
    """The size of an expert that explains all copies, as runs of experts and at most PADDING; 0: there is none."""
    step = int(np.gcd.reduce(np.diff(sources)))
    if step > _APART * int(size.min()):
        return 0
    for runs in range(1, _RUN + 1):  # how many experts the smallest copy holds
        least, most = (int(size.min()) - PADDING) // runs, int(size.min()) // runs
        for parts in range(max(1, -(-step // max(most, 1))), step // max(least, LEAST_BYTES) + 1):
            stride = step // parts
            rest = size % stride
            if step % parts or stride < LEAST_BYTES or (size < stride).any() or (rest > PADDING).any():
                continue
            return stride
    return 0


def _merged(found: list[_Tensor]) -> list[_Tensor]:
    """One for each tensor, wherever on the GPU its copies went."""
    out: list[_Tensor] = []
    for one in sorted(found, key=lambda one: (one.stride, one.first)):
        last = out[-1] if out else None
        if (
            last is not None
            and last.stride == one.stride
            and one.first < last.last
            and not (one.first - last.first) % one.stride
        ):
            last.at, last.last = np.sort(np.concatenate((last.at, one.at))), max(last.last, one.last)
        else:
            out.append(one)
    return out


def _slotted(src: Array, size: Array) -> list[_Tensor]:
    """Tensors whose experts go to any place, one copy of one size each."""
    found: list[_Tensor] = []
    for mine in _groups(size, 2 * _FEW):
        one = int(size[mine[0]])
        order = mine[np.lexsort((src[mine], src[mine] % one))]
        apart = np.diff(src[order] % one) != 0
        apart |= np.diff(src[order]) > _NEAR * one
        for at in np.split(order, np.flatnonzero(apart) + 1):
            if len(np.unique(src[at])) >= _FEW:
                at = np.sort(at)
                found.append(_Tensor(at, one, int(src[at].min()), int(src[at].max()) + one, False))
    return found


def _written(recording: Recording, process: int) -> Array:
    """Where the GPU writes to, ascending: what is written is a pool, and no expert."""
    calls = recording.calls
    stores = (calls["direction"] == Direction.D2H) & (calls["process"] == process)
    written: Array = np.unique(calls["dst"][stores].astype(np.int64))
    return written


Kept = tuple[list[ExpertTensor], Array, Array, Array, Array, bool]


def _judged(
    recording: Recording, rows: Array, src: Array, size: Array, found: list[_Tensor], slotted: bool
) -> Kept | None:
    """Uploads of these tensors, if they are experts."""
    if not found:
        return None
    found.sort(key=lambda one: int(one.at[0]))
    at = np.concatenate([one.at for one in found])
    of = np.repeat(np.arange(len(found)), [len(one.at) for one in found])
    order = np.argsort(at, kind="stable")
    at, of = at[order], of[order]
    strides, firsts = (np.array([getattr(one, name) for one in found], np.int64) for name in ("stride", "first"))
    count = np.maximum(size[at] // strides[of], 1)
    copy = np.repeat(np.arange(len(at)), count)
    within = np.arange(len(copy)) - np.repeat(np.cumsum(count) - count, count)
    tensor = of[copy]
    expert = ((src[at] - firsts[of]) // strides[of])[copy] + within
    moved = strides[tensor] + np.where(within == 0, (size[at] - count * strides[of])[copy], 0)
    names = [_name(recording, int(rows[one.at[0]])) for one in found]
    named = _any_named(names)
    of_blocks = recording.transfers["process"] == recording.calls["process"][rows[0]]
    if not named and of_blocks.any():
        return None  # an engine or an adapter said that they are blocks
    if slotted and not named and _alike(tensor[:_SAMPLE], expert[:_SAMPLE]):
        return None
    tensors = _described(found, names, (tensor, expert, _visits(tensor, expert)))
    visits, whole = sum(one.visits for one in tensors), sum(one.whole for one in tensors)
    if not named and visits - whole < _PARTIAL * visits:
        return None
    return tensors, rows[at][copy], tensor, expert, moved, slotted


def _any_named(names: list[str]) -> bool:
    return any(word in name.lower() for name in names for word in _NAMES)


def _visits(tensor: Array, expert: Array) -> Array:
    """The number of each upload's visit: a visit ends with another tensor, and before an expert comes twice."""
    new = np.ones(len(tensor), dtype=bool)
    new[1:] = tensor[1:] != tensor[:-1]
    began = np.maximum.accumulate(np.where(new, np.arange(len(new)), 0))
    last = last_uses(tensor * (int(expert.max()) + 1) + expert)
    start = 0
    for at in np.flatnonzero(last >= began).tolist():
        start = max(start, int(began[at]))
        if last[at] >= start:
            new[at], start = True, at
    return np.cumsum(new) - 1


def _described(found: list[_Tensor], names: list[str], uploads: tuple[Array, Array, Array]) -> list[ExpertTensor]:
    tensor, expert, visit = uploads
    out = []
    order = np.argsort(tensor, kind="stable")
    for one, name, mine in zip(found, names, np.split(order, np.cumsum(np.bincount(tensor))[:-1]), strict=True):
        each = np.bincount(visit[mine] - int(visit[mine[0]]))
        each = each[each > 0]
        different = len(np.unique(expert[mine]))
        described = ExpertTensor(
            one.first,
            one.stride,
            int(expert[mine].max()) + 1,
            name,
            len(mine),
            different,
            len(each),
            int((each == different).sum()) if different > 1 else 0,
            int(np.median(each)),
        )
        out.append(described)
    return out


def _name(recording: Recording, row: int) -> str:
    """The innermost range around a call."""
    calls, ranges = recording.calls, recording.ranges
    start, end = int(calls["start_ns"][row]), int(calls["end_ns"][row])
    around = (ranges["start_ns"] <= start) & (ranges["end_ns"] >= end)
    around &= (ranges["process"] == calls["process"][row]) & (ranges["thread"] == calls["thread"][row])
    rows = np.flatnonzero(around)
    return recording.text(int(ranges["name"][rows[np.argmax(ranges["start_ns"][rows])]])) if len(rows) else ""


def _alike(tensor: Array, expert: Array) -> bool:
    """Whether one visit after the other brings the same pieces of different tensors; or there is but one tensor."""
    if tensor.min() == tensor.max():
        return True
    edges = np.flatnonzero(np.diff(_visits(tensor, expert))) + 1
    sets = [frozenset(part.tolist()) for part in np.split(expert, edges)]
    which = tensor[np.concatenate(([0], edges))]
    pairs = [a == b for a, b, x, y in zip(sets, sets[1:], which, which[1:], strict=False) if x != y]
    return sum(pairs) >= _ALIKE * len(pairs)


def _distances(key: Array, where: Array) -> Array:
    """For experts in slots: different ones brought since another took its slot, itself included.

    Between its last use and then, no more different ones were used than there are slots: it was the one not used
    longest. So a memory of as many slots more as are counted here would have it still.
    """
    last = last_uses(key)
    again = np.flatnonzero(last >= 0)
    order = np.argsort(where, kind="stable")
    after = np.full(len(key), len(key), dtype=np.int64)  # the upload that took this one's slot
    same = np.flatnonzero(where[order][1:] == where[order][:-1])
    after[order[same]] = order[same + 1]
    gone = np.minimum(after[last[again]], again)
    out = np.zeros(len(key), dtype=np.int64) + FIRST
    # Uploads from `gone` on whose own last one lies before `gone`, up to this one: the different ones in between. Those
    # before `gone` all do, and are `gone` many.
    both = np.concatenate((last, gone - 1))
    place = np.concatenate((np.arange(len(key)) * 2 + 1, again * 2))
    queries = np.argsort(place, kind="stable")
    asks = queries >= len(key)
    earlier = earlier_not_above(both[queries])[asks] - earlier_not_above((gone - 1)[np.argsort(again)])
    out[again] = earlier - gone + 1
    return out
