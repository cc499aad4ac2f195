"""Times of copies, waits and computation, layer by layer, from events that are read when the device has passed them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvprobe.cuda import Runtime
from kvprobe.cuda.clock import DeviceClock
from kvprobe.offload.streams import EventPool

KEPT = 256  # forwards
RESIDENT = -1  # the window of a forward that ran without copies
IN_FLIGHT = 4  # forwards that the host may be ahead of the device before one goes unmeasured


@dataclass
class CopyTrace:
    """A copy that is under way: its events and what its submission took."""

    start: int
    end: int
    submitted_ns: int = 0
    submit_ns: int = 0
    bytes: int = 0
    wire_bytes: int = 0
    src: int = 0
    dst: int = 0


@dataclass
class VisitTrace:
    """A unit's computation that is under way; `copy` where this visit was the first to use one."""

    unit: int
    before: int
    after: int
    end: int
    copy: CopyTrace | None = None


@dataclass
class _ForwardTrace:
    start: int
    end: int = 0
    visits: list[VisitTrace] = field(default_factory=list)


@dataclass(frozen=True)
class Visit:
    """One computation of an offloaded unit; times in ns, points in time on the host's monotonic clock.

    Attributes:
        unit: its number.
        enter_ns: the device reached it.
        wait_ns: how long it then waited for its weights.
        compute_ns: its computation.
        bytes: copied for it; 0 where they were there.
        copy_start_ns, copy_ns: the copy; 0 without one.
        submitted_ns, submit_ns: the host-side call that submitted it, and how long it took.
        src, dst: addresses of the copy.
    """

    unit: int
    enter_ns: int
    wait_ns: int
    compute_ns: int
    bytes: int = 0
    copy_start_ns: int = 0
    copy_ns: int = 0
    submitted_ns: int = 0
    submit_ns: int = 0
    src: int = 0
    dst: int = 0

    @property
    def leave_ns(self) -> int:
        """When its computation ended."""
        return self.enter_ns + self.wait_ns + self.compute_ns


@dataclass(frozen=True)
class Forward:
    """One forward of the whole model; `window` is RESIDENT where nothing was copied."""

    start_ns: int
    total_ns: int
    window: int
    visits: tuple[Visit, ...]

    @property
    def end_ns(self) -> int:
        """When it ended."""
        return self.start_ns + self.total_ns


class Timeline:
    """Records events around visits and copies, and turns them into times once the device has passed them.

    Attributes:
        raw_ns_per_byte: of the fastest forward whose units travelled as they are; 0: none was measured.

    Nothing here waits, except `drain`; where events run short (the host is several forwards ahead) a forward goes
    unmeasured and is counted in `unmeasured`.
    """

    def __init__(self, runtime: Runtime, visits: int) -> None:
        """Creates all events now; `visits` is how many a forward is expected to have."""
        self._runtime = runtime
        self._events = EventPool(runtime, IN_FLIGHT * (5 * visits + 4) + 16, timing=True)
        self._clock = DeviceClock(runtime)
        self._pending: deque[tuple[_ForwardTrace, int]] = deque()
        self._current: _ForwardTrace | None = None
        self.forwards: deque[Forward] = deque(maxlen=KEPT)
        self.unmeasured = 0
        self.raw_ns_per_byte = 0.0

    def begin(self, stream: int) -> None:
        """A forward begins on a compute stream."""
        self.harvest()
        event = self._mark(stream)
        self._current = _ForwardTrace(event) if event else None
        self.unmeasured += not event

    def arrive(self, unit: int, stream: int) -> VisitTrace | None:
        """A compute stream reaches a unit."""
        forward = self._current
        marks = self._events.take_many(3) if forward is not None and len(self._events) >= 4 else []
        if forward is None or not marks:
            self._spoil()
            return None
        visit = VisitTrace(unit, marks[0], marks[1], marks[2])
        self._runtime.event_record(visit.before, stream)
        forward.visits.append(visit)
        return visit

    def arrived(self, visit: VisitTrace | None, stream: int, copy: CopyTrace | None) -> None:
        """The stream has waited for the unit's weights, which `copy` brought if it was the first to use them."""
        if visit is None:
            self.drop(copy)
            return
        visit.copy = copy
        self._runtime.event_record(visit.after, stream)

    def leave(self, visit: VisitTrace | None, stream: int) -> None:
        """A unit's computation is submitted."""
        if visit is not None:
            self._runtime.event_record(visit.end, stream)

    def end(self, stream: int, window: int) -> None:
        """The forward is submitted."""
        forward, self._current = self._current, None
        if forward is None:
            return
        forward.end = self._mark(stream)
        if not forward.end:
            self._current = forward
            self._spoil()
            return
        self._pending.append((forward, window))

    def abandon(self) -> None:
        """The forward failed: its events are of no use."""
        if self._current is not None:
            self._spoil()
            self.unmeasured -= 1

    def copy(self) -> CopyTrace | None:
        """Events for a copy; None when they run short."""
        marks = self._events.take_many(2) if len(self._events) >= 2 else []
        return CopyTrace(*marks) if marks else None

    def drop(self, copy: CopyTrace | None) -> None:
        """A copy that nobody used."""
        if copy is not None:
            self._give(copy.start, copy.end)

    def harvest(self) -> None:
        """Reads the forwards that the device has finished."""
        while self._pending and self._clock.known and self._runtime.event_query(self._pending[0][0].end):
            trace, window = self._pending.popleft()
            start = self._at(trace.start)
            visits = tuple(self._visit(one) for one in trace.visits)
            self.forwards.append(Forward(start, self._between(trace.start, trace.end), window, visits))
            self._look_at_the_rate(trace, visits)
            self._release(trace)

    def _look_at_the_rate(self, trace: _ForwardTrace, visits: Sequence[Visit]) -> None:
        raw = [
            visit
            for one, visit in zip(trace.visits, visits, strict=True)
            if one.copy is not None and one.copy.wire_bytes == one.copy.bytes
        ]
        size = sum(visit.bytes for visit in raw)
        if size:
            rate = sum(visit.copy_ns for visit in raw) / size
            self.raw_ns_per_byte = min(self.raw_ns_per_byte or rate, rate)

    def drain(self) -> None:
        """Waits for the forwards under way, and reads them."""
        if self._pending:
            self._runtime.event_synchronize(self._pending[-1][0].end)
        self.harvest()

    def close(self) -> None:
        """Destroys the events."""
        self._events.close()
        self._clock.close()

    def _visit(self, trace: VisitTrace) -> Visit:
        wait_ns, compute_ns = self._between(trace.before, trace.after), self._between(trace.after, trace.end)
        times = (self._at(trace.before), wait_ns, compute_ns)
        copy = trace.copy
        if copy is None:
            return Visit(trace.unit, *times)
        return Visit(
            trace.unit,
            *times,
            copy.bytes,
            self._at(copy.start),
            self._between(copy.start, copy.end),
            copy.submitted_ns,
            copy.submit_ns,
            copy.src,
            copy.dst,
        )

    def _mark(self, stream: int) -> int:
        event = self._events.take() or 0
        if event:
            self._runtime.event_record(event, stream)
        return event

    def _spoil(self) -> None:
        """The current forward cannot be measured to its end."""
        if self._current is not None:
            trace, self._current = self._current, None
            self._release(trace)
            self.unmeasured += 1

    def _release(self, trace: _ForwardTrace) -> None:
        self._give(trace.start, trace.end)
        for visit in trace.visits:
            self._give(visit.before, visit.after, visit.end)
            if visit.copy is not None:
                self._give(visit.copy.start, visit.copy.end)

    def _give(self, *events: int) -> None:
        for event in events:
            if event:
                self._events.give(event)

    def _at(self, event: int) -> int:
        return self._clock.host_ns(event) or 0  # 0: never, `harvest` has asked

    def _between(self, start: int, end: int) -> int:
        return int(1e6 * self._runtime.event_elapsed_ms(start, end))
