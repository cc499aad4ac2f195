"""How a cause explains lines of the account: what it may claim, and how much time the program would save without it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from kvprobe.account import COPIES, HOST, OUTSIDE_CALLS, Account, GpuAccount, Line, Times
from kvprobe.account.chain import saved_by_host
from kvprobe.account.lines import Unknown
from kvprobe.account.stretches import NOBODY
from kvprobe.diagnosis.cause import load_cause
from kvprobe.recordings.assemble import among
from kvprobe.recordings.intervals import Cover, ascending, distinct, group_starts
from kvprobe.recordings.model import Array

__all__ = ["ExplainedTime", "Explainer"]

_CALLERS = 32  # threads whose part is played one by one; those with the largest


def proven_line(cause: str) -> Line | None:
    """The line that a GPU's waiting belongs to, once this cause is proven of it."""
    return load_cause(cause).PROVES


@dataclass(frozen=True)
class ExplainedTime:
    """What one finding explains of the account.

    Attributes:
        device_ns: time without a kernel that it explains, on the GPU that it costs most; None: no GPU was seen.
        window_ns: of that GPU.
        open_ns: of the time it lost itself, what lies where no kernel follows: nothing shows what that cost the device.
        saved_ns: by how much the program would be shorter without it, at most; None: not known.
        gpus_ns: as `device_ns`, of all GPUs together.
    """

    device_ns: int | None = None
    window_ns: int = 0
    open_ns: int = 0
    saved_ns: int | None = None
    gpus_ns: int = 0


class Explainer:
    """Gives causes their part of the account, one after the other; all savings together stay within what it waits."""

    def __init__(self, account: Account, slots: tuple[Array, Array, Array]) -> None:
        """Of an account that nobody has claimed anything of.

        Args:
            account: of the recording.
            slots: the calls that a full queue blocked, whoever claims them: when each began and ended, and its thread.
        """
        self.account = account
        self._slots = slots
        self._left_ns = max((gpu.not_computing_ns for gpu in account.gpus if gpu.seen), default=0)
        # What can be saved without fewer or faster copies: beyond it the link is busy for longer than kernels run.
        # Of pauses between operations, only what a full queue is shown to explain is added, where it claims them.
        self._moved_left_ns = max(
            (gpu.ns(*COPIES, *HOST) - gpu.link_alone_ns for gpu in account.gpus if gpu.seen), default=0
        )
        self._window_ns = max((gpu.window_ns for gpu in account.gpus if gpu.seen), default=0)

    def host(
        self, cause: str, start: Array, end: Array, caller: Array, ns: Array, held: Array | None = None
    ) -> ExplainedTime:
        """Of calls of threads: from `start` to `end`, by `caller`, of which `ns` is lost in each; (calls,) int64.

        `held` is a mask over calls that wait for copies which no kernel needs. What ran alone until they had ended, and
        before the thread had launched the next kernel, is the calls' doing.
        """
        account, proves = self.account, proven_line(cause)
        waits = proves == Line.WAITING_FOR_DEVICE  # for copies: nothing else may run while these do
        fills = proves == Line.FULL_QUEUE
        if fills:
            for thread in account.threads:
                thread.waited_for_slots(int(ns[caller == thread.caller].sum()))
        if not account.seen:
            return ExplainedTime()
        open_ns = self._after_last_kernel(start, end)
        order = np.argsort(caller, kind="stable")
        edges = group_starts(caller[order])
        parts = np.split(order, edges[1:])
        parts.sort(key=lambda rows: -int(ns[rows].sum()))
        saved = 0
        claimed: dict[int, int] = {}
        for number, rows in enumerate(parts):
            one = int(caller[rows[0]])
            if waits:
                saved += self._idle_in(start[rows], end[rows], one)
            elif number < _CALLERS:
                saved += self._saved(one, start[rows], end[rows], ns[rows])
            got: list[dict[int, int]] = []
            rest = partial(self._rest_ns, int(ns[rows].sum()), got) if fills else None
            times = Times(start[rows], end[rows])
            got.append(account.claim(cause, times, HOST, becomes=proves, caller=one, most_ns=rest))
            if held is not None and held[rows].any():
                movable = {place: self._movable(gpu) for place, gpu in enumerate(account.gpus)}
                rows = rows[held[rows]]
                times = Times(start[rows], end[rows])
                alone = account.claim(cause, times, COPIES, caller=one)
                saved += max((min(more, movable[place]) for place, more in alone.items()), default=0)
                got.append(alone)
            if not waits:
                most = partial(self._rest_ns, int(ns[rows].sum()), got, movable=True) if fills else None
                got.append(account.claim(cause, times, COPIES, caller=one, most_ns=most))
            if fills:  # what filled the queue had been submitted, and stood still, whatever it stood behind
                stood = (Line.NOT_KNOWN, Line.ELSEWHERE)
                paused = account.claim(cause, times, stood, becomes=proves, caller=NOBODY, most_ns=rest)
                self._moved_left_ns += max(paused.values(), default=0)
                got.append(paused)
            for part in got:
                for gpu, more in part.items():
                    claimed[gpu] = claimed.get(gpu, 0) + more
        if fills:
            saved = max(min(saved, self._moved_left_ns), 0)
            self._moved_left_ns -= max(saved, max(claimed.values(), default=0))  # what one explains, no other saves
        return self._explained(claimed, open_ns, saved)

    def _saved(self, caller: int, start: Array, end: Array, ns: Array) -> int:
        """Wall time that a thread's calls cost, of which `ns` is taken out; its other waits for a slot stay."""
        began, ended, whose = self._slots
        mine = whose == caller
        began, ended, taken = began[mine], ended[mine], ascending(start)
        stay = taken[np.searchsorted(taken[:-1], began)] != began  # numpy.isin takes ten times as long
        return saved_by_host(self.account, caller, end, ns, (ended[stay], (ended - began)[stay]))

    def _rest_ns(self, lost_ns: int, got: list[dict[int, int]], gpu: GpuAccount, *, movable: bool = False) -> int:
        """What a thread's blocked calls may still claim of a GPU: it waits for a slot no longer than the thread does.

        The rest of these calls is what each takes with a free slot. `movable`: of copies alone.
        """
        place = next(number for number, one in enumerate(self.account.gpus) if one is gpu)
        rest = max(lost_ns - sum(part.get(place, 0) for part in got), 0)
        return min(rest, self._movable(gpu)) if movable else rest

    def _movable(self, gpu: GpuAccount) -> int:
        """Of the time of copies alone, what kernels could hide and no full queue explains yet.

        With free slots, copies run beside kernels, and take as long as now.
        """
        full = [one for one in self.account.causes if proven_line(one) == Line.FULL_QUEUE]
        moved = sum(self.account.claimed_ns(gpu, one, COPIES) for one in full)
        return max(gpu.ns(*COPIES) - gpu.link_alone_ns - moved, 0)

    def question(self, cause: str, start: Array, end: Array, caller: Array, ns: Array) -> ExplainedTime:
        """As `host`, where it cannot be told why: nothing is claimed, but what it may have cost is known.

        Where the cause predicts nothing, that is what GPUs waited inside these calls.
        """
        account = self.account
        if account.main is None or not any(one.kernels for one in account.gpus):
            return ExplainedTime()
        callers = sorted(distinct(caller).tolist(), key=lambda one: -int(ns[caller == one].sum()))[:_CALLERS]
        parts = [(one, start[caller == one], end[caller == one], ns[caller == one]) for one in callers]
        if load_cause(cause).PREDICTS:
            saved = sum(self._saved(*part) for part in parts)
        else:
            saved = sum(self._idle_in(begun, ended, one) for one, begun, ended, _ in parts)
        return ExplainedTime(None, account.main.window_ns, self._after_last_kernel(start, end), saved)

    def copies(self, cause: str, times: Times, lost_ns: int) -> ExplainedTime:
        """Of copies on GPUs: where only they ran, of which `lost_ns` could be saved at most, of each GPU its part."""
        if not self.account.seen:
            return ExplainedTime()
        took = times.end - times.start

        def most_ns(gpu: GpuAccount) -> int:
            if times.where is None:
                return lost_ns
            mine = times.where == next(place for place, one in enumerate(self.account.gpus) if one is gpu)
            return round(lost_ns * int(took[mine].sum()) / max(int(took.sum()), 1))

        claimed = self.account.claim(cause, times, COPIES, becomes=proven_line(cause), most_ns=most_ns)
        return self._explained(claimed, 0, min(lost_ns, max(claimed.values(), default=0)))

    def gaps(self, cause: str, times: Times, calls: Sequence[Line] = ()) -> ExplainedTime:
        """Of stretches in which a GPU stood idle: what its thread spent outside of calls, or in `calls`.

        What a thread did inside its calls is known, and stays in their line.
        """
        if not self.account.seen:
            return ExplainedTime()
        outside = (*OUTSIDE_CALLS, Line.NOTHING_TO_DO)
        claimed = self.account.claim(cause, times, outside, becomes=proven_line(cause))
        inside = self.account.claim(cause, times, calls) if calls else {}
        for gpu, ns in inside.items():
            claimed[gpu] = claimed.get(gpu, 0) + ns
        return self._explained(claimed, 0, max(claimed.values(), default=0))

    def _explained(self, claimed: dict[int, int], open_ns: int, saved_ns: int) -> ExplainedTime:
        place = max(claimed, key=lambda gpu: claimed[gpu], default=-1)
        gpu = self.account.gpus[place] if place >= 0 else self.account.main
        computes = any(one.kernels for one in self.account.gpus)
        saved = self.take(saved_ns) if computes else None
        window_ns = gpu.window_ns if gpu else 0
        return ExplainedTime(claimed.get(place, 0), window_ns, open_ns, saved, sum(claimed.values()))

    def take_of_thread(self, ns: int) -> int:
        """The same of a thread's, where nothing shows that a model waits: what two waited at once is saved once."""
        if not self.account.seen:
            return ns
        saved = min(ns, self._window_ns)
        self._window_ns -= saved
        return saved

    def take(self, ns: int) -> int:
        """As much of a saving as the device still waits for, which is then no other's."""
        saved = max(min(ns, self._left_ns), 0)
        self._left_ns -= saved
        return saved

    def _idle_in(self, start: Array, end: Array, caller: int) -> int:
        """How long GPUs ran nothing inside these intervals, and it was this thread's doing."""
        out = 0
        for gpu in self.account.gpus:
            cut = gpu.stretches
            inside = cut.cut(start, end) & (cut.caller == caller) & among(cut.line, HOST)
            out = max(out, cut.sum_ns(inside))
        return out

    def _after_last_kernel(self, start: Array, end: Array) -> int:
        """How much of these intervals lies where no GPU runs a kernel any more.

        Where a GPU was not observed it may run some: that time is not known, and the account says so.
        """
        last = max(gpu.computes[1] for gpu in self.account.gpus)
        cuts = [gpu.stretches for gpu in self.account.gpus]
        unseen = [(cut.line == Line.NOT_KNOWN) & (cut.detail == Unknown.NOT_COVERED) for cut in cuts]
        begins, ends = (
            np.concatenate([edge[mask] for edge, mask in zip(edges, unseen, strict=True)])
            for edges in ([cut.start for cut in cuts], [cut.end for cut in cuts])
        )
        start = np.minimum(np.maximum(start, last), end)
        return int((end - start).sum() - Cover(begins, ends).within(start, end).sum())
