"""Times the transfers of one direction of a server's handler, and holds the auto that cures them.

A transfer is split into *build* (Python before the first copy), *submit* (inside the copy calls), *queue wait* (from
the first submission until the device starts), *copy* (on the device) and *poll delay* (from the last copy's end until
the server notices). A server's own figures, where it has any, cover only *copy*.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvprobe.instrument import event_log, metrics, nvtx_marks
from kvprobe.instrument.submissions import CODED, POOLED
from kvprobe.offload.auto import REST, Auto
from kvprobe.offload.rungs import Rung, Sample

if TYPE_CHECKING:
    from kvprobe.instrument.adapter import Adapter
    from kvprobe.instrument.device import Device
    from kvprobe.instrument.submissions import HandOver

__all__ = ["CopyPath", "WatchedTransfer"]

_ASK_EVERY = 32  # looking into the environment costs as much as an event record
SLOW_NS = 100_000  # a transfer that holds the model's thread for so long is worth a change
_MAX_LIVE = 100_000  # a server that never polls must not make the table grow without end


class WatchedTransfer:
    """One transfer from its submission to the moment the server notices its end."""

    __slots__ = (
        "begin_ns",
        "borrowed",
        "bytes",
        "calls",
        "copies",
        "end",
        "extra",
        "first_ns",
        "hand_over",
        "job",
        "one_in",
        "outstanding",
        "rung",
        "sample",
        "start",
        "stream",
        "submit_ns",
        "taken",
        "thread",
    )

    def __init__(self, job: Any, rung: Rung, outstanding: int, thread: int, one_in: int) -> None:
        self.job, self.rung, self.outstanding, self.thread, self.one_in = job, rung, outstanding, thread, one_in
        self.first_ns = self.submit_ns = self.copies = self.bytes = self.calls = self.stream = 0
        self.start: int | None = None
        self.end: int | None = None
        self.borrowed = False  # start and end are the server's own events
        self.taken: list[int] = []  # streams of kvprobe's pool that go back when the transfer ends
        self.sample: Sample | None = None
        self.hand_over: HandOver | None = None  # in the submitter's hands: its times are the transfer's
        self.extra: dict[str, Any] = {}
        self.begin_ns = time.monotonic_ns()

    def waited(self, ns: int) -> None:
        """The server's thread spent so long on making a stream wait for it: auto counts that as submission."""
        self.extra["fence_ns"] = self.extra.get("fence_ns", 0) + ns
        if self.sample is not None:
            self.sample.waited(ns)


class CopyPath:
    """One direction of one handler. Not thread-safe: a handler submits and polls on one thread.

    Attributes:
        direction: `load` (CPU to GPU) or `store`.
        current: the transfer that is being submitted, or None.
        live: transfers submitted and not known to be complete, by the server's id.
        outstanding: their copies.
        last: id of the newest one; an adapter that lets a transfer go unwatched sets it.
        newest: the newest one that the submitter has, or had.
        heard: told of each watched transfer what the device took, once the server noticed its end; None: nobody is.
        row_bytes: what one row of a block mapping moves over all tensors, once an adapter knows it.
    """

    def __init__(
        self, adapter: Adapter, direction: str, device: Device | None, rungs: tuple[Rung, ...], queued: bool = True
    ) -> None:
        """Starts on the first rung; `queued`: every copy takes a slot of the launch queue."""
        self.adapter, self.direction, self.device = adapter, direction, device
        self.current: WatchedTransfer | None = None
        self.live: dict[Any, WatchedTransfer] = {}
        self.outstanding = 0
        self.last: Any = None
        self.newest: HandOver | None = None
        self.row_bytes = 0
        self.auto: Auto | None = None
        self.heard: Callable[[str, WatchedTransfer, int], None] | None = None
        self._rung = rungs[0]
        self._marks = nvtx_marks.listening()  # a tool injects itself when the process starts
        self._thread = (0, 0)
        self._asked = 0  # calls of `_has_listeners` until the environment is looked at again
        self._told = False
        if device is not None and adapter.fix == "auto" and len(rungs) > 1:
            limits = device.limits
            self.auto = Auto(
                rungs,
                self._decided,
                depth=limits.depth if queued else 0,
                baseline_ns=limits.baseline_ns,
                slow_ns=SLOW_NS,
            )

    def _decided(self, what: str, why: str, *, before: Rung, after: Rung, **evidence: Any) -> None:
        told = f"{self.direction}: {why}"
        self.adapter.decide(what, told, before=str(before), after=str(after), direction=self.direction, **evidence)

    @property
    def rung(self) -> Rung:
        """What the next transfer uses."""
        return self.auto.rung if self.auto is not None else self._rung

    def watch(self) -> bool:
        """Whether the next transfer is to be watched: not if nobody would hear of it, nor most of them at rest."""
        if self.auto is not None:
            return self.auto.watch()
        return self._marks or self._has_listeners()

    def _has_listeners(self) -> bool:
        """Whether anybody will see the event of a transfer; a run folder that is set late is noticed a little later."""
        if event_log.has_listeners():
            return True
        self._asked -= 1
        if self._asked < 0:
            self._asked = _ASK_EVERY
            self._told = metrics.exposed() or event_log.wanted()
        return self._told

    def begin(self, job: Any) -> WatchedTransfer:
        """The server starts to build a transfer."""
        ident = threading.get_ident()
        if ident != self._thread[0]:
            self._thread = (ident, threading.get_native_id())
        auto = self.auto
        if auto is None:
            live = WatchedTransfer(job, self._rung, self.outstanding, self._thread[1], 1)
        else:
            live = WatchedTransfer(job, auto.rung, self.outstanding, self._thread[1], REST if auto.resting else 1)
        self.current = live
        return live

    def first(self, stream: int) -> None:
        """The first copy is about to be submitted to `stream`: the end of building, the start event's place."""
        live = self.current
        if live is None or live.first_ns:
            return
        live.stream = stream
        device = self.device
        if device is not None and not self.hands_over:  # the submitter has events of its own
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

    @property
    def hands_over(self) -> bool:
        """Whether the transfer that is being submitted goes to the submitter."""
        return self.current is not None and self.current.rung in (CODED, POOLED)

    def keep_with_server(self) -> None:
        """The transfer that is being submitted stays with the server."""
        if self.current is not None:
            self.current.rung = self.auto.base if self.auto is not None else self._rung

    def note_hand_over(self, hand_over: HandOver) -> None:
        """The submitter took the transfer that is being submitted."""
        self.newest = hand_over
        if self.current is not None:
            self.current.hand_over = hand_over

    @property
    def pending(self) -> bool:
        """Whether the submitter still has something of this path."""
        return self.newest is not None and not self.newest.done

    def fence(self, stream: int) -> None:
        """What comes on `stream` from now on runs after what the submitter has of this path."""
        newest, self.newest = self.newest, None
        if newest is not None and not newest.done:
            newest.fence(stream)

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
        if self.auto is not None and ok and self.auto.looks(now_ns):
            sample = live.sample = Sample(
                live.copies, live.submit_ns, live.bytes, live.rung, live.outstanding, end_ns=now_ns
            )
            choice = any(rung.method == "auto" for rung in self.auto.rungs)
            if choice and live.rung == self.auto.base and live.copies and device is not None:
                each = live.bytes // live.copies
                sample.expected_ns = device.submitter.expected.ns(self.direction, each, live.copies)
            self.auto.submitted(sample)

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
        told = self._has_listeners()
        queue_ns = poll_ns = copy_ns = None
        device, start, end = self.device, live.start, live.end
        if device is not None and start is not None and end is not None:
            copy_ns = device.elapsed_ns(start, end)
            if copy_ns is not None:
                started = device.clock.host_ns(start) if told else None
                if started is not None:
                    queue_ns, poll_ns = max(0, started - live.first_ns), max(0, seen_ns - started - copy_ns)
        hand_over = live.hand_over
        if hand_over is not None and (told or live.sample is not None or self.heard is not None):
            copy_ns = hand_over.copy_ns
            if told:
                started, ended = hand_over.copy_start_ns, hand_over.copy_end_ns
                if started and ended:
                    queue_ns, poll_ns = max(0, started - live.first_ns), max(0, seen_ns - ended)
                live.stream, live.calls = hand_over.stream, hand_over.calls
                live.extra |= {"methods": hand_over.methods, "descriptors": hand_over.descriptors}
        if live.sample is not None and copy_ns is not None:
            live.sample.copy_ns = copy_ns
            if self.auto is not None:
                self.auto.completed(live.sample)
        if self.heard is not None and copy_ns and ok and not (hand_over is not None and hand_over.failed):
            self.heard(self.direction, live, copy_ns)
        self._release(live)
        if told:
            if event_log.has_listeners():
                self._tell(live, ok, seen_ns, queue_ns, copy_ns, poll_ns)
            else:
                event_log.later(self._tell, live, ok, seen_ns, queue_ns, copy_ns, poll_ns)
        if self._marks:
            nvtx_marks.mark(f"{self.adapter.server} {self.direction} {live.job}: {live.bytes} bytes")

    def _tell(
        self,
        live: WatchedTransfer,
        ok: bool,
        seen_ns: int,
        queue_ns: int | None,
        copy_ns: int | None,
        poll_ns: int | None,
    ) -> None:
        """Metrics and the event; as a rule on the event file's thread."""
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
            "policy": live.rung.policy,
            "method": live.rung.method,
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
        event_log.emit("transfer", **fields)

    def _release(self, live: WatchedTransfer) -> None:
        device = self.device
        if device is None:
            return
        if live.start is not None and not live.borrowed:
            device.timing.give(live.start)
        if live.end is not None and not live.borrowed:
            device.timing.give(live.end)
        while live.taken:
            device.streams.give(live.taken.pop())
        live.start = live.end = None

    def forget(self) -> None:
        """Give everything back without waiting; for stepping aside."""
        self.abandon()
        for live in self.live.values():
            self._release(live)
        self.live.clear()
        self.outstanding = 0
