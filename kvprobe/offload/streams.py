"""Streams and events made up front: creating one later would wait for whoever is blocked on a full queue."""

from __future__ import annotations

from collections import deque

from kvprobe.cuda import Runtime
from kvprobe.errors import CudaError, UsageError


class EventPool:
    """Events of one kind, handed out and taken back; never created on the hot path."""

    def __init__(self, runtime: Runtime, size: int, timing: bool) -> None:
        """Creates all `size` events now."""
        self._runtime = runtime
        self._all = [runtime.event_create(timing) for _ in range(size)]
        self._free = deque(self._all)

    def __len__(self) -> int:
        """Events that can be taken now."""
        return len(self._free)

    @property
    def size(self) -> int:
        """All events of the pool."""
        return len(self._all)

    def take(self) -> int | None:
        """An event, or None when all are in use: the caller waits, it does not create."""
        return self._free.popleft() if self._free else None

    def take_many(self, count: int) -> list[int]:
        """Up to `count` events."""
        return [self._free.popleft() for _ in range(min(count, len(self._free)))]

    def give(self, event: int) -> None:
        """Takes an event back; nothing may wait for its old record any more."""
        self._free.append(event)

    def close(self) -> None:
        """Destroys all events."""
        for event in self._all:
            self._runtime.event_destroy(event)
        self._all.clear()
        self._free.clear()


class StreamPool:
    """Distinct streams made by the runtime, not torch's round-robin 32.

    A stream is taken for a transfer and given back when the transfer ends. When all are taken, transfers share: the
    stream that was taken longest ago is handed out again, so no more streams exist than the bound.
    """

    def __init__(self, runtime: Runtime, size: int, priority: int = 0) -> None:
        """Creates all `size` streams now.

        Raises:
            UsageError: size below 1, or a priority outside the device's range.
        """
        if size < 1:
            raise UsageError(f"a stream pool needs at least 1 stream, not {size}")
        low, high = runtime.priority_range()
        if not high <= priority <= low:
            raise UsageError(f"stream priority {priority} is outside this device's range {high} to {low}")
        self._runtime = runtime
        self.streams: list[int] = []
        try:
            for _ in range(size):
                self.streams.append(runtime.stream_create(priority))
        except CudaError:
            self.close()
            raise
        self._free = deque(self.streams)
        self._users = dict.fromkeys(self.streams, 0)
        self._order: deque[int] = deque()

    @property
    def in_use(self) -> int:
        """Streams that some transfer holds."""
        return sum(1 for users in self._users.values() if users)

    def take(self) -> int:
        """A stream that nobody holds, or else the one handed out longest ago."""
        if self._free:
            stream = self._free.popleft()
        else:
            stream = self._order.popleft()
        self._order.append(stream)
        self._users[stream] += 1
        return stream

    def give(self, stream: int) -> None:
        """Takes a stream back; it is free again when its last holder gave it back."""
        users = self._users.get(stream, 0)
        if users < 1:
            raise UsageError(f"stream {stream:#x} was not taken from this pool")
        self._users[stream] = users - 1
        if users == 1:
            self._order.remove(stream)
            self._free.append(stream)

    def close(self) -> None:
        """Destroys all streams; their work completes first."""
        streams, self.streams = self.streams, []
        failed: CudaError | None = None
        for stream in streams:
            try:
                self._runtime.stream_destroy(stream)
            except CudaError as error:
                failed = failed or error
        if failed:
            raise failed
