"""The CUDA runtime behind a server's torch: kvprobe's own streams and events, made up front, as torch objects.

torch hands out 32 streams round-robin, so one of torch's "new" streams can be one that the server uses already, and
creating one while another thread is blocked on a full queue waits for that thread. Everything here is therefore made
once, when the server makes its transfer handlers, by the runtime itself, and wrapped in `torch.cuda.ExternalStream`.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
from typing import TYPE_CHECKING, Any

from kvprobe.environment import DEVICE

if TYPE_CHECKING:
    from kvprobe.cuda import Runtime
    from kvprobe.launchqueue.calibration import QueueLimits
    from kvprobe.offload.streams import StreamPool
    from kvprobe.offload.submitter import Submitter

__all__ = ["Device", "device_of"]

log = logging.getLogger("kvprobe")

STREAMS = 16  # more than the copy channels a device has by default (4), fewer than would crowd out the server's
TIMING_EVENTS = 256  # two a transfer in flight; when they run out a transfer goes without its GPU times
_NOT_READY = 600  # cudaErrorNotReady


class Device:
    """One device's pools. Made by `device_of`; lives as long as the process.

    Attributes:
        runtime: the CUDA runtime that the server's torch uses.
        limits: depth and channels of its launch queues.
        submitter: takes copies by address.
        streams: pool of distinct streams.
        timing: pool of timing events.
        clock: GPU time to host time.
    """

    method = "auto"  # of the submitter's copies
    limits: QueueLimits
    submitter: Submitter
    streams: StreamPool

    def __init__(self, runtime: Runtime) -> None:
        """Create the timing events; `prepare` creates the rest. Call both before traffic starts."""
        from kvprobe.cuda.clock import DeviceClock
        from kvprobe.offload.streams import EventPool

        self.runtime = runtime
        self.timing = EventPool(runtime, TIMING_EVENTS, timing=True)
        self.clock = DeviceClock(runtime)
        # Bound here: these run twice a transfer on the server's thread, where each look-up is time of the server's.
        self._record = runtime.library.cudaEventRecord
        self._elapsed = runtime.library.cudaEventElapsedTime
        self._peek = getattr(runtime.library, "cudaPeekAtLastError", None)
        self._wrapped: dict[tuple[int, int], Any] = {}
        self._prepared = False

    def prepare(self) -> None:
        """Make what curing needs and measuring does not, once: queue limits, streams, the submitter.

        Some 50 ms, and two seconds more where this machine's methods of copying were never measured.
        """
        if self._prepared:
            return
        from kvprobe.offload.streams import StreamPool
        from kvprobe.offload.submitter import Submitter

        self.limits = _limits(self.runtime)
        self.streams = StreamPool(self.runtime, STREAMS)
        self.submitter = Submitter(self.runtime, limits=self.limits, method=self.method)
        self._prepared = True

    def close(self) -> None:
        """End the submitter, where there is one; what it has not submitted is not submitted any more."""
        if self._prepared:
            self.submitter.close(drain=False)

    def record(self, event: int, stream: int) -> None:
        """Record `event` on `stream`."""
        code = self._record(event, stream)
        if code:
            raise self.runtime.error("cudaEventRecord", code)

    def elapsed_ns(self, start: int, end: int) -> int | None:
        """Nanoseconds between two timing events; None while `end` is not reached."""
        value = ctypes.c_float()
        code = self._elapsed(ctypes.byref(value), start, end)
        if not code:
            return int(value.value * 1e6)
        if code == _NOT_READY:
            return None
        raise self.runtime.error("cudaEventElapsedTime", code)

    def torch_stream(self, torch: Any, handle: int) -> Any:
        """The stream as an object that this `torch` takes."""
        key = (id(torch.cuda), handle)
        if key not in self._wrapped:
            self._wrapped[key] = torch.cuda.ExternalStream(handle)
        return self._wrapped[key]

    def last_error(self) -> int:
        """The runtime's pending error code of this thread, left pending; 0 for none.

        "Not ready" is the answer of a query and not an error, but CUDA leaves it pending as one.
        """
        code = int(self._peek()) if self._peek is not None else 0
        return 0 if code == _NOT_READY else code


def _limits(runtime: Runtime) -> QueueLimits:
    from kvprobe.launchqueue.calibration import QueueLimits, calibrate

    try:
        return calibrate(runtime)
    except Exception as error:
        log.info("kvprobe: the launch queue could not be measured (%s); assuming 1,000 operations", error)
        return QueueLimits(1000, 4, 4000, 1500, 5000)


_devices: dict[tuple[int, int], Device | None] = {}
_lock = threading.Lock()


def _forget() -> None:
    """A child's CUDA is its own: handles of the parent mean nothing there."""
    for device in _devices.values():
        if device is not None:
            device.close()
    _devices.clear()


os.register_at_fork(after_in_child=_forget)


def device_of() -> Device | None:
    """The calling thread's device, or None where there is no CUDA runtime that kvprobe can use (said once)."""
    from kvprobe.cuda import find_runtime

    with _lock:
        try:
            runtime = find_runtime(DEVICE.value())
            key = (id(runtime), runtime.device())
            if key not in _devices:
                _devices[key] = Device(runtime)
            return _devices[key]
        except Exception as error:
            if (0, 0) not in _devices:
                _devices[0, 0] = None
                log.info(
                    "kvprobe: no CUDA runtime to work with (%s): only host times are measured, and nothing is cured",
                    error,
                )
            return None
