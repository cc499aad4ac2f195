"""The methods of copying on this machine: which exist, why others do not, and which is done first.

A transfer's copies can be submitted by a loop of single copies, by batches, or by a copy kernel; see
`native/src/kvp_copy.h`. The chooser is native (`kvp_choose.h`); here its table is filled, with the figures of an H100
or with what `kvprobe calibrate` measured on this machine.
"""

from __future__ import annotations

import contextlib
import ctypes as ct
import logging
import threading
from dataclasses import dataclass, field
from typing import Any

from kvprobe.cuda import Runtime
from kvprobe.cuda.copies import DIRECTIONS, METHOD_NAMES, columns, submit_copies
from kvprobe.cuda.kernels import load_copy_kernels
from kvprobe.cuda.memory import Buffer
from kvprobe.errors import CudaError, KvprobeError, UsageError
from kvprobe.native.library import Copier, CudaCalls, MethodRow, MethodTable, core
from kvprobe.offload.job import DIRECTION
from kvprobe.offload.method_cache import cached, table_of

__all__ = ["DEFAULT_MAX_SLOWDOWN", "METHOD_NAMES", "Methods", "choose", "copier_for", "default_table", "method_table"]

log = logging.getLogger("kvprobe")

DEFAULT_MAX_SLOWDOWN = 0.03  # what a copy may cost a decode step: a memory-bound kernel beside it
SIZES = tuple(1024 << i for i in range(13))  # bytes of a copy at which a table has figures

_CALLS = {
    "memcpy_async": "cudaMemcpyAsync",
    "memcpy_batch_async": "cudaMemcpyBatchAsync",
    "event_record": "cudaEventRecord",
    "event_query": "cudaEventQuery",
    "event_elapsed": "cudaEventElapsedTime",
    "stream_wait_event": "cudaStreamWaitEvent",
    "get_last_error": "cudaGetLastError",
    "set_device": "cudaSetDevice",
    "stream_query": "cudaStreamQuery",
    "event_synchronize": "cudaEventSynchronize",
    "event_create": "cudaEventCreateWithFlags",
    "event_destroy": "cudaEventDestroy",
    "capture_mode": "cudaThreadExchangeStreamCaptureMode",
}


@dataclass
class Methods:
    """What one device's copies can be submitted with.

    Attributes:
        native: `kvp_copier`, as native code takes it.
        missing: method -> why it does not exist here, one line.
        read_kernel: CUfunction of the memory-bound kernel, 0 where there is none.
        kernels: "compiled", "cached", "host", or "" where there are no copy kernels.
        measured: what `kvprobe calibrate` measured on this machine, if it did.
        coded: what `wire_calibration` measured of coded copies here, if it did.
    """

    native: Copier
    missing: dict[str, str] = field(default_factory=dict)
    read_kernel: int = 0
    kernels: str = ""
    measured: MethodTable | None = None
    coded: dict[str, Any] | None = None
    owned: list[Any] = field(default_factory=list, repr=False)

    @property
    def has_kernel(self) -> bool:
        """Whether copy kernels are loaded."""
        return bool(self.native.load_kernel.function)

    @property
    def has_coded(self) -> bool:
        """Whether kernels are loaded that code what travels."""
        return bool(self.native.coded_load_kernel.function)

    @property
    def names(self) -> tuple[str, ...]:
        """The methods that exist here."""
        return tuple(name for name in METHOD_NAMES if name not in self.missing)


_known: dict[tuple[str, int], Methods] = {}
_making = threading.Lock()


def copier_for(runtime: Runtime, *, staging_bytes: int = 0, bulk: bool | None = None) -> Methods:
    """The methods of the calling thread's device; found out once in a process and device, up front.

    The first call compiles or loads the copy kernels and tries a batch: it takes the context lock.

    Args:
        runtime: the CUDA runtime of this process.
        staging_bytes: device memory for staged copies, half of it for each direction; 0: no staged copies.
        bulk: True or False insists on bulk or register kernels; None: bulk where the GPU has them.

    Raises:
        CudaError: not even one plain copy works.
    """
    if staging_bytes or bulk is not None or runtime.provider == "host":  # a host runtime can be reset: nothing is kept
        return _made(runtime, staging_bytes, bulk)
    key = (runtime.path, runtime.device())
    with _making:
        if key not in _known:
            _known[key] = _made(runtime, 0, None)
            held = cached(runtime)
            _known[key].measured = table_of(held) if held else None
        return _known[key]


def _made(runtime: Runtime, staging_bytes: int, bulk: bool | None) -> Methods:
    calls = CudaCalls(runtime_version=runtime.version)
    for name, symbol in _CALLS.items():
        setattr(calls, name, runtime.address(symbol) or None)
    found = Methods(Copier(calls))
    _try_batch(runtime, found)
    kernels = load_copy_kernels(runtime, bulk=bulk)
    if kernels.reason:
        found.missing["kernel"] = found.missing["staged"] = kernels.reason
        return found
    found.native.cuda.launch_kernel = kernels.launch_kernel
    found.native.load_kernel, found.native.store_kernel = kernels.load, kernels.store
    if kernels.coded:
        found.native.coded_load_kernel, found.native.coded_store_kernel = kernels.coded
    found.read_kernel, found.kernels = kernels.read, kernels.how
    if staging_bytes:
        buffer = Buffer(runtime, staging_bytes, "device")
        found.owned.append(buffer)
        found.native.staging, found.native.staging_bytes = buffer.address, buffer.bytes
    else:
        found.missing["staged"] = "no staging buffer was asked for"
    return found


def _try_batch(runtime: Runtime, found: Methods) -> None:
    """One batch of two copies: a driver older than the runtime has the function and refuses to run it."""
    if not found.native.cuda.memcpy_batch_async:
        found.missing["batch"] = f"cudaMemcpyBatchAsync is not in CUDA {_version(runtime.version)}: it needs 12.8"
        return
    with contextlib.ExitStack() as made:
        device = Buffer(runtime, 8192, "device")
        made.callback(device.close)
        host = Buffer(runtime, 8192, "pinned")
        made.callback(host.close)
        stream = runtime.stream_create()
        made.callback(runtime.stream_destroy, stream)
        try:
            copies = columns([device.address, device.address + 4096], [host.address, host.address + 4096], 4096)
            submit_copies(runtime, found.native, "batch", "h2d", copies, stream)
            runtime.stream_synchronize(stream)
        except CudaError as error:
            found.native.cuda.memcpy_batch_async = None
            found.missing["batch"] = str(error)
            runtime.stream_synchronize(stream)  # where the device itself is lost, this says so


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


# -- the table -------------------------------------------------------------------------------------------------------


def default_table(methods: Methods) -> MethodTable:
    """The figures of an H100 for the methods that exist here."""
    table = MethodTable()
    core().kvp_method_table_default(ct.byref(table), ct.byref(methods.native))
    return table


def method_table(
    methods: Methods,
    method: str = "auto",
    max_slowdown: float = DEFAULT_MAX_SLOWDOWN,
    measured: MethodTable | None = None,
) -> MethodTable:
    """The table that the submitter asks at every submission.

    Args:
        methods: what exists here.
        method: "auto", or the one method that shall be used wherever it exists.
        max_slowdown: what a copy kernel may cost a memory-bound kernel beside it, as a share.
        measured: of this machine; None: what `kvprobe calibrate` left for it, else the default figures.

    Raises:
        UsageError: no such method, or it does not exist here; the text says why.
    """
    if method != "auto" and method not in METHOD_NAMES:
        raise UsageError(f"unknown method {method!r}: use auto, {', '.join(METHOD_NAMES)}")
    if method in methods.missing:
        raise UsageError(f"method {method} does not exist here: {methods.missing[method]}")
    known = measured if measured is not None else methods.measured
    table = MethodTable.from_buffer_copy(known) if known is not None else default_table(methods)
    table.max_slowdown = max_slowdown
    for side in range(2):
        rows = [MethodRow.from_buffer_copy(table.row[side][i]) for i in range(table.rows[side])]
        kept = [
            row
            for row in rows
            if METHOD_NAMES[row.method] not in methods.missing and method in ("auto", METHOD_NAMES[row.method])
        ]
        for i, row in enumerate(kept):
            table.row[side][i] = row
        table.rows[side] = len(kept)
    return table


def measure_now(runtime: Runtime, methods: Methods) -> None:
    """Measures what the chooser needs (about 2 s) and keeps it for later processes; where that fails, says so once."""
    from kvprobe.offload import method_cache, method_calibration

    try:
        result = method_calibration.measure(runtime, methods, quick=True)
    except KvprobeError as error:
        log.warning("copy methods are chosen by the figures of an H100: measuring this machine failed: %s", error)
        return
    methods.measured = method_cache.table_of(result)
    method_cache.store(runtime, result)


def choose(table: MethodTable, direction: str, copy_bytes: int, count: int) -> tuple[str, int]:
    """The method that is done first with `count` copies of `copy_bytes`, and its CTAs (0: it launches no kernel)."""
    ctas = ct.c_uint32()
    number = core().kvp_choose(ct.byref(table), DIRECTIONS[direction], copy_bytes, count, ct.byref(ctas))
    return METHOD_NAMES[number], ctas.value


_SCATTERED = sum(1 << i for i, name in enumerate(METHOD_NAMES) if name != "staged")  # as kvp_choose: bits of methods
_LOOP = 1 << METHOD_NAMES.index("loop")


class ExpectedTimes:
    """What copies take by a table's calibration: by the method that it chooses, or by single copies."""

    def __init__(self, table: MethodTable) -> None:
        """Of one table, which stays as it is."""
        self._table = table
        self._known: dict[tuple[int, str, int, int], int] = {}

    def ns(self, direction: str, copy_bytes: int, count: int) -> int:
        """Device time in ns of `count` scattered copies of `copy_bytes` by what is chosen; 0: not known."""
        return self._of(_SCATTERED, direction, copy_bytes, count)

    def loop_ns(self, direction: str, copy_bytes: int, count: int) -> int:
        """The same of single copies."""
        return self._of(_LOOP, direction, copy_bytes, count)

    def _of(self, *key: Any) -> int:
        known = self._known.get(key)
        if known is None:
            if len(self._known) >= 1024:
                self._known.clear()
            known = self._known[key] = self._ask(*key)
        return known

    def _ask(self, methods: int, direction: str, copy_bytes: int, count: int) -> int:
        table, side = self._table, DIRECTION[direction]
        row = core().kvp_choose_row(ct.byref(table), methods, None, 0, side, copy_bytes, count)
        return int(core().kvp_method_ns(ct.byref(table.row[side - 1][row]), copy_bytes, count)) if row >= 0 else 0
