"""The device's clock: GPU events placed on the host's CLOCK_MONOTONIC. Nothing here waits for a forward."""

from __future__ import annotations

import time

from kvprobe.cuda.runtime import Runtime

__all__ = ["DeviceClock"]

_REFRESH_NS = 2_000_000_000
_TRIES_NS = 40_000
_TRUSTED_NS = 60_000_000_000  # the two clocks drift apart by some us a second


class DeviceClock:
    """One event whose host time is known, renewed now and then.

    Its stream is idle, but the hardware channel below may be shared with one that is held back: whoever waited for its
    event would wait for that one's forward. An event that is not reached within 40 µs is given up, and the base that
    was known before stays.
    """

    def __init__(self, runtime: Runtime) -> None:
        """Makes a stream and two events.

        Raises:
            CudaError: one could not be made.
        """
        self._runtime = runtime
        self._stream = runtime.stream_create()
        self._events = [runtime.event_create(timing=True) for _ in range(2)]
        self._base: int | None = None
        self._base_ns = self._tried_ns = 0
        self.refresh()

    def refresh(self) -> bool:
        """Tries to renew the base; whether it could."""
        now = self._tried_ns = time.monotonic_ns()
        event = self._events[1] if self._base == self._events[0] else self._events[0]
        self._runtime.event_record(event, self._stream)
        while True:
            if self._runtime.event_query(event):
                self._base, self._base_ns = event, time.monotonic_ns()
                return True
            if time.monotonic_ns() - now > _TRIES_NS:
                return False

    @property
    def known(self) -> bool:
        """Whether times can be told; tries again where they could not."""
        now = time.monotonic_ns()
        if self._base is None or now - self._tried_ns > _REFRESH_NS:
            self.refresh()
        return self._base is not None and now - self._base_ns <= _TRUSTED_NS

    def host_ns(self, event: int) -> int | None:
        """Host time at which a reached timing event was reached, within some 20 µs; None where it cannot be told.

        Raises:
            CudaError: it is not reached, or records no times.
        """
        if not self.known or self._base is None:
            return None
        return self._base_ns + int(self._runtime.event_elapsed_ms(self._base, event) * 1e6)

    def close(self) -> None:
        """Destroys stream and events."""
        self._runtime.stream_destroy(self._stream)
        for event in self._events:
            self._runtime.event_destroy(event)
