"""Pageable memory to and from the GPU in chunks through pinned memory, several threads at the host's side of it.

What `native/interpose/staged_copy.c` does in a watched program, for adapters where no interposer is. Both ways take
turns until it is clear which is faster; the way through pinned memory is left again where it is not.
"""

from __future__ import annotations

import ctypes
import os
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from statistics import median

from kvprobe.cuda import Runtime
from kvprobe.cuda.pinned import PinnedBuffer, PinnedPool

__all__ = ["CHUNK_BYTES", "StagedCopies", "Turns"]

CHUNK_BYTES = 16 << 20
THREADS = 4
_TRIED = 4  # copies each way before it is decided
_GAIN = 0.8  # of the time of the program's own way, at most
_AGAIN = 32  # one in so many goes the program's own way still


class Turns:
    """Which way copies of one direction go, from what each took.

    Attributes:
        staged: which way the next one goes.
        decided: "" while both take turns, then "kept", and "left" once the own way is as fast.
    """

    def __init__(self) -> None:
        self._took: tuple[deque[float], deque[float]] = (deque(maxlen=_TRIED), deque(maxlen=_TRIED))
        self._count = 0
        self.decided = ""

    @property
    def staged(self) -> bool:
        """Whether the next copy goes through pinned memory."""
        if self.decided == "left":
            return False
        return self._count % (2 if not self.decided else _AGAIN) != 0

    @property
    def ratio(self) -> float:
        """Time of the way through pinned memory, as a share of the own way's; 1 where either is not known."""
        own, staged = (median(one) if one else 0.0 for one in self._took)
        return staged / own if own and staged else 1.0

    def took(self, staged: bool, ns_per_byte: float) -> str:
        """What a copy took; says what was decided by it, "" for nothing new."""
        self._took[staged].append(ns_per_byte)
        self._count += 1
        if any(len(one) < _TRIED for one in self._took):
            return ""
        now = "kept" if self.ratio <= _GAIN else "left"
        if self.decided == "kept" and self.ratio < 1:
            now = "kept"
        if now == self.decided:
            return ""
        self.decided = now
        return now


class StagedCopies:
    """Copies through two pinned chunks, on the caller's stream and within the call."""

    def __init__(self, runtime: Runtime) -> None:
        """Makes nothing yet: chunks, events and threads come with the first copy."""
        self._runtime = runtime
        self._pid = os.getpid()
        self._pool: PinnedPool | None = None
        self._threads: ThreadPoolExecutor | None = None
        self._events: list[int] = []

    def copy(self, to: int, source: int, size: int, to_gpu: bool, stream: int) -> None:
        """Bytes of pageable memory to the GPU or back, behind what the stream holds; returns when they are there.

        Raises:
            CudaError: the runtime refused something; nothing of it is outstanding any more.
        """
        if self._pool is None or self._threads is None:
            self._pool = PinnedPool(self._runtime, 2 * CHUNK_BYTES, threads=1)
            self._threads = ThreadPoolExecutor(THREADS, "kvprobe-staged")
            self._events = [self._runtime.event_create() for _ in range(2)]
        chunk = min(CHUNK_BYTES, size)
        buffers = [self._pool.take(chunk) for _ in range(2)]
        try:
            self._run(buffers, (to, source, size), to_gpu, stream)
        except BaseException:
            self._runtime.stream_synchronize(stream)  # the chunks must not be written to once they are another's
            raise
        finally:
            for one in buffers:
                one.close()

    def _run(self, buffers: list[PinnedBuffer], what: tuple[int, int, int], to_gpu: bool, stream: int) -> None:
        to, source, size = what
        chunk = buffers[0].bytes
        starts = range(0, size, chunk)
        for number, start in enumerate([*starts, *(() if to_gpu else (-1,))]):
            buffer, event = buffers[number % 2].address, self._events[number % 2]
            many = min(chunk, size - start)
            if to_gpu:
                if number >= 2:
                    self._runtime.event_synchronize(event)
                self._move(buffer, source + start, many)
                self._runtime.memcpy_async(to + start, buffer, many, "h2d", stream)
                self._runtime.event_record(event, stream)
                continue
            if start >= 0:
                self._runtime.memcpy_async(buffer, source + start, many, "d2h", stream)
                self._runtime.event_record(event, stream)
            if number:  # the chunk before it, while this one comes
                before = starts[number - 1]
                self._runtime.event_synchronize(self._events[(number - 1) % 2])
                self._move(to + before, buffers[(number - 1) % 2].address, min(chunk, size - before))
        if to_gpu:
            self._runtime.stream_synchronize(stream)

    def _move(self, to: int, source: int, size: int) -> None:
        """On all threads at once; memmove lets go of the GIL."""
        assert self._threads is not None
        part = (size // THREADS + 4096) // 4096 * 4096 if size > 1 << 20 else size
        waiting: list[Future[object]] = []
        for at in range(part, size, part):
            waiting.append(self._threads.submit(ctypes.memmove, to + at, source + at, min(part, size - at)))
        ctypes.memmove(to, source, min(part, size))
        for one in waiting:
            one.result()

    def close(self) -> None:
        """Gives everything back; a forked child has nothing."""
        pool, threads, events = self._pool, self._threads, self._events
        self._pool, self._threads, self._events = None, None, []
        if pool is None or threads is None or self._pid != os.getpid():
            return
        threads.shutdown()
        pool.close()
        for event in events:
            self._runtime.event_destroy(event)
