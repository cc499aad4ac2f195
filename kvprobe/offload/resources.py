"""What an engine needs of the runtime, made up front: making it later would wait for whoever is blocked on a queue.

Events are the native side's own (`native/src/events.c`).
"""

from __future__ import annotations

import ctypes as ct
import functools
from collections.abc import Callable

from kvprobe.cuda import PinnedBuffer, Runtime
from kvprobe.cuda.pinned import shared_pool
from kvprobe.errors import CudaError
from kvprobe.native.library import CopyList
from kvprobe.offload.streams import StreamPool

LIST_COPIES = 65536  # of the ring of each direction, which copy kernels read: a few of the largest launches


class Resources:
    """Streams and pinned lists of one engine; all of them or, where one cannot be made, none.

    Attributes:
        pooled: streams of loads and of stores.
        shared: the shared stream of loads and of stores.
        lists: what copy kernels read, of loads and of stores; empty where there is no kernel.
    """

    def __init__(self, runtime: Runtime, streams: int, priority: int, lists: bool) -> None:
        """Makes everything.

        Raises:
            UsageError: `priority` is outside the device's range.
            CudaError: one could not be made; those before it are destroyed.
        """
        self._runtime, self._generation = runtime, runtime.generation
        self.pooled: list[StreamPool] = []
        self.shared: list[int] = []
        self.lists: list[CopyList] = []
        self.clock_stream = 0
        self._list_memory: list[PinnedBuffer] = []
        try:
            for _ in range(2):
                self.pooled.append(StreamPool(runtime, streams, priority))
            for _ in range(2):
                self.shared.append(runtime.stream_create())
            self.clock_stream = runtime.stream_create()
            for _ in range(2 if lists else 0):
                buffer = shared_pool(runtime).take(LIST_COPIES * 24)
                self._list_memory.append(buffer)
                self.lists.append(CopyList(host=buffer.address, device=buffer.address, capacity=LIST_COPIES))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Destroys everything, and goes on where one of them fails: the first error is raised at the end.

        After a reset of the runtime there is nothing left to destroy.

        Raises:
            CudaError: the device was lost, as a rule.
        """
        failed: CudaError | None = None
        runtime = self._runtime
        if runtime.generation != self._generation:
            self.shared, self.pooled, self.lists, self.clock_stream = [], [], [], 0
        while step := self._next_step():
            try:
                step()
            except CudaError as error:
                failed = failed or error
        if failed:
            raise failed

    def _next_step(self) -> Callable[[], None] | None:
        """Takes one of them out and says how it is destroyed; None: all are. So an interrupted `close` can go on."""
        runtime = self._runtime
        if self.shared:
            return functools.partial(runtime.stream_destroy, self.shared.pop())
        if self.clock_stream:
            stream, self.clock_stream = self.clock_stream, 0
            return functools.partial(runtime.stream_destroy, stream)
        if self.pooled:
            return self.pooled.pop().close
        if self.lists:
            self.lists.pop()
            return self._list_memory.pop().close
        return None


def handles(values: list[int]) -> ct.Array[ct.c_void_p]:
    """A C array of handles; at least one entry long."""
    return (ct.c_void_p * max(len(values), 1))(*values)
