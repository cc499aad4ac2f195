"""Times the transfers of one direction of a server's handler, and holds the ladder that cures them.

A transfer is split into *build* (Python before the first copy), *submit* (inside the copy calls), *queue wait* (from
the first submission until the device starts), *copy* (on the device) and *poll delay* (from the last copy's end until
the server notices). A server's own figures, where it has any, cover only *copy*.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

from kvprobe.instrument import marks, metrics, sidecar
from kvprobe.instrument.ladder import REST, Ladder, Sample

if TYPE_CHECKING:
    from kvprobe.instrument.adapter import Adapter
    from kvprobe.instrument.device import Device

__all__ = ["CopyPath", "Live"]

_ASK_EVERY = 32  # looking into the environment costs as much as an event record
_MAX_LIVE = 100_000  # a server that never polls must not make the table grow without end


class Live:
    """One transfer from its submission to the moment the server notices its end."""

    __slots__ = (
        "begin_ns", "borrowed", "bytes", "calls", "copies", "end", "extra", "first_ns", "job", "one_in", "outstanding",
        "rung", "sample", "start", "stream", "submit_ns", "taken", "thread",
    )  # fmt: skip

    def __init__(self, job: Any, rung: str, outstanding: int, thread: int, one_in: int) -> None:
        self.job, self.rung, self.outstanding, self.thread, self.one_in = job, rung, outstanding, thread, one_in
        self.first_ns = self.submit_ns = self.copies = self.bytes = self.calls = self.stream = 0
        self.start: int | None = None
        self.end: int | None = None
        self.borrowed = False  # start and end are the server's own events
        self.taken: int | None = None  # stream of kvprobe's pool that goes back when the transfer ends
        self.sample: Sample | None = None
        self.extra: dict[str, Any] = {}
        self.begin_ns = time.monotonic_ns()


class CopyPath:
    """One direction of one handler. Not thread-safe: a handler submits and polls on one thread.

    Attributes:
        direction: `load` (CPU to GPU) or `store`.
        current: the transfer that is being submitted, or None.
        live: transfers submitted and not known to be complete, by the server's id.
        outstanding: their copies.
        last: id of the newest one; an adapter that lets a transfer go unwatched sets it.
        moved: the newest one is on another stream than the server's own.
        row_bytes: what one row of a block mapping moves over all tensors, once an adapter knows it.
    """

    def __init__(
        self, adapter: Adapter, direction: str, device: Device | None, rungs: tuple[str, ...], queued: bool = True
    ) -> None:
        """Starts on the first rung; `queued`: every copy takes a place in the launch queue."""
        self.adapter, self.direction, self.device = adapter, direction, device
        self.current: Live | None = None
        self.live: dict[Any, Live] = {}
        self.outstanding = 0
        self.last: Any = None
        self.moved = False
        self.row_bytes = 0
        self.ladder: Ladder | None = None
        self._rung = rungs[0]
        self._marks = marks.listening()  # a tool injects itself when the process starts
        self._thread = (0, 0)
        self._asked = 0  # calls of `_heard` until the environment is looked at again
        self._told = False
        if device is not None and adapter.fix == "auto" and len(rungs) > 1:
            limits = device.limits
            self.ladder = Ladder(rungs, limits.depth if queued else 0, limits.baseline_ns, self._decided)

    def _decided(self, what: str, why: str, **evidence: Any) -> None:
        self.adapter.decide(what, f"{self.direction}: {why}", direction=self.direction, **evidence)

    @property
    def rung(self) -> str:
        """What the next transfer uses."""
        return self.ladder.rung if self.ladder is not None else self._rung

    def watch(self) -> bool:
        """Whether the next transfer is to be watched: not if nobody would hear of it, nor most of them at rest."""
        if self.ladder is not None:
            return self.ladder.watch()
        return self._marks or self._heard()

    def _heard(self) -> bool:
        """Whether anybody will see the event of a transfer; a run folder that is set late is noticed a little later."""
        if sidecar.heard_at_once():
            return True
        self._asked -= 1
        if self._asked < 0:
            self._asked = _ASK_EVERY
            self._told = metrics.exposed() or sidecar.wanted()
        return self._told

    def begin(self, job: Any) -> Live:
        """The server starts to build a transfer."""
        ident = threading.get_ident()
        if ident != self._thread[0]:
            self._thread = (ident, threading.get_native_id())
        ladder = self.ladder
        if ladder is None:
            live = Live(job, self._rung, self.outstanding, self._thread[1], 1)
        else:
            live = Live(job, ladder.rung, self.outstanding, self._thread[1], REST if ladder.resting else 1)
        self.current = live
        return live

    def first(self, stream: int) -> None:
        """The first copy is about to be submitted to `stream`: the end of building, the start event's place."""
        live = self.current
        if live is None or live.first_ns:
            return
        live.stream = stream
        device = self.device
        if device is not None:
            live.start = event = device.timing.take()
            if event is not None:
                device.record(event, stream)
        live.first_ns = time.monotonic_ns()

    def add(self, submit_ns: int, copies: int, size_bytes: int, calls: int = 1) -> None:
        """Copies were submitted, in `calls` API calls as far as can be told.

        `submit_ns` is 0 where the time from `first` to `submitted` is to be taken.
        """
        live = self.current
        if live is not None:
            live.submit_ns += submit_ns
            live.copies += copies
            live.bytes += size_bytes
            live.calls += calls

    def submitted(self, ok: bool = True, events: tuple[int, int] | None = None) -> None:
        """The server's submission returned.

        `events`: handles of the server's own timing events around the copies, in the place of ours; they have to live
        until `done`.
        """
        now_ns = time.monotonic_ns()
        live, self.current = self.current, None
        if live is None:
            return
        if not live.submit_ns and live.first_ns:
            live.submit_ns = now_ns - live.first_ns
        device = self.device
        if events is not None and device is not None:
            if live.start is not None:
                device.timing.give(live.start)
            live.borrowed, (live.start, live.end) = True, events
        elif live.start is not None and device is not None:
            live.end = event = device.timing.take()
            if event is not None:
                device.record(event, live.stream)
        if len(self.live) >= _MAX_LIVE:
            self._release(self.live.pop(next(iter(self.live))))
        self.last = live.job
        self.live[live.job] = live
        self.outstanding += live.copies
        if self.ladder is not None and ok:
            live.sample = Sample(live.copies, live.submit_ns, live.outstanding, live.bytes, live.rung)
            self.ladder.submitted(live.sample)

    def abandon(self) -> None:
        """The server's submission raised: whatever was taken goes back."""
        live, self.current = self.current, None
        if live is not None:
            self._release(live)

    def done(self, job: Any, ok: bool = True) -> None:
        """The server noticed the end of a transfer."""
        live = self.live.pop(job, None)
        if live is None:
            return
        seen_ns = time.monotonic_ns()
        self.outstanding -= live.copies
        told = self._heard()
        queue_ns = poll_ns = copy_ns = None
        device, start, end = self.device, live.start, live.end
        if device is not None and start is not None and end is not None:
            copy_ns = device.elapsed_ns(start, end)
            if copy_ns is not None:
                started = device.clock.host_ns(start) if told else None
                if started is not None:
                    queue_ns, poll_ns = max(0, started - live.first_ns), max(0, seen_ns - started - copy_ns)
                if live.sample is not None:
                    live.sample.copy_ns = copy_ns
        self._release(live)
        if told:
            if sidecar.heard_at_once():
                self._tell(live, ok, seen_ns, queue_ns, copy_ns, poll_ns)
            else:
                sidecar.later(self._tell, live, ok, seen_ns, queue_ns, copy_ns, poll_ns)
        if self._marks:
            marks.mark(f"{self.adapter.server} {self.direction} {live.job}: {live.bytes} bytes")

    def _tell(
        self, live: Live, ok: bool, seen_ns: int, queue_ns: int | None, copy_ns: int | None, poll_ns: int | None
    ) -> None:
        """Metrics and the event; as a rule on the sidecar's thread."""
        size = live.bytes * live.one_in  # at rest one transfer stands for those that were not watched
        metrics.transfer(self.adapter.server, self.direction, size, live.submit_ns, queue_ns, copy_ns)
        fields: dict[str, Any] = {
            "t_ns": seen_ns,
            "adapter": self.adapter.name,
            "server": self.adapter.server,
            "id": live.job,
            "direction": self.direction,
            "copies": live.copies,
            "submissions": live.calls,
            "bytes": live.bytes,
            "policy": live.rung,
            "stream": live.stream,
            "begin_ns": live.begin_ns,
            "build_ns": max(0, live.first_ns - live.begin_ns) if live.first_ns else None,
            "submit_ns": live.submit_ns,
            "queue_ns": queue_ns,
            "copy_ns": copy_ns,
            "poll_ns": poll_ns,
            "outstanding": live.outstanding,
            "thread": live.thread,
            "ok": ok,
            **live.extra,
        }
        if live.one_in > 1:
            fields["one_in"] = live.one_in
        sidecar.emit("transfer", **fields)

    def _release(self, live: Live) -> None:
        device = self.device
        if device is None:
            return
        if live.start is not None and not live.borrowed:
            device.timing.give(live.start)
        if live.end is not None and not live.borrowed:
            device.timing.give(live.end)
        if live.taken is not None:
            device.streams.give(live.taken)
        live.start = live.end = live.taken = None

    def forget(self) -> None:
        """Give everything back without waiting; for stepping aside."""
        self.current = None
        for live in self.live.values():
            self._release(live)
        self.live.clear()
        self.outstanding = 0
