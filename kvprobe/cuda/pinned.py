"""Pinned memory that is made by several threads, handed out again when it comes back, and let go under pressure."""

from __future__ import annotations

import contextlib
import ctypes as ct
import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvprobe.cuda.runtime import Runtime
from kvprobe.errors import NativeError, UsageError
from kvprobe.native.library import PinnedCounts, PinnedOptions, core

POPULATE_BYTES = 64 << 20  # from here on several threads are worth their start
PIECE_BYTES = 256 << 20  # registered in 6 ms on an H200, where 16 GiB at once take 310
WATCH_MS = 100
_HUGE_PAGE = 2 << 20
_CALLS = {
    "host_alloc": "cudaHostAlloc",
    "free_host": "cudaFreeHost",
    "host_register": "cudaHostRegister",
    "host_unregister": "cudaHostUnregister",
    "device_synchronize": "cudaDeviceSynchronize",
    "set_device": "cudaSetDevice",
    "get_last_error": "cudaGetLastError",
}


@dataclass(frozen=True)
class PinnedStats:
    """What a pool holds and has done.

    Attributes:
        kept_bytes: held for the next request.
        excess_bytes: of buffers that serve a smaller request than they were made for.
        most_bytes: the most that both together ever were; never above the budget.
        out_bytes: handed out now, as asked for.
        reuses: requests that a kept buffer served.
        evictions: kept buffers that went for newer ones, or by `trim`.
        pressure_evictions: kept buffers that went because memory was short.
        pinnings: buffers that were pinned.
        pinning_ns: what that took.
        populated_pinnings: those of them whose pages several threads made.
        populate_ns: what making those pages took.
        register_ns: what registering them took.
        longest_register_ns: the longest single registration: other threads' CUDA calls may have waited for so long.
    """

    kept_bytes: int
    excess_bytes: int
    most_bytes: int
    out_bytes: int
    reuses: int
    evictions: int
    pressure_evictions: int
    pinnings: int
    pinning_ns: int
    populated_pinnings: int
    populate_ns: int
    register_ns: int
    longest_register_ns: int


_NATIVE_NAMES = {  # where the native counters are called otherwise
    "reuses": "reused",
    "evictions": "given_up",
    "pressure_evictions": "pressed",
    "pinnings": "made",
    "pinning_ns": "made_ns",
    "populated_pinnings": "populated",
}


class PinnedPool:
    """Pinned CPU memory that costs its pinning once.

    A large buffer's pages are made by several threads, as huge pages where the system allows it, and then registered:
    1.9 s for 16 GiB on an H100, where one `cudaHostAlloc` takes 9.1 and holds every other thread of the process for all
    of it (`reports/h100-pinning.txt`).

    What is given back is kept within a budget and serves the next request of its size, or of up to an eighth less, with
    whatever bytes it held. It is let go, oldest first, where the machine or a cgroup runs
    short of memory. A forked child inherits none of it.
    """

    _root = b""  # what stands before /proc and /sys

    def __init__(
        self,
        runtime: Runtime,
        budget_bytes: int | None = None,
        *,
        threads: int = 0,
        node: int | None = None,
        populate_bytes: int = POPULATE_BYTES,
    ) -> None:
        """Makes an empty pool.

        Args:
            runtime: whose memory it is.
            budget_bytes: most that is kept for later; by default a quarter of the machine's memory, or of the cgroup's.
            threads: that make pages; 0: four, or as many as there are processors.
            node: NUMA node of the pages; by default the GPU's, where the system says it.
            populate_bytes: from this size on threads make the pages; what is smaller comes from `cudaHostAlloc`.

        Raises:
            UsageError: a size or number is negative.
        """
        if min(budget_bytes or 0, threads, populate_bytes, node or 0) < 0:
            raise UsageError("a pool's budget, threads, node and sizes cannot be negative")
        self._lib, self._runtime = core(), runtime
        device = runtime.device()
        if budget_bytes is None:
            budget_bytes = self._lib.kvp_memory_left(b"").total_bytes // 4
        if node is None:
            node = gpu_node(runtime, device)
        options = PinnedOptions(
            **{field: runtime.address(name) for field, name in _CALLS.items()},
            budget_bytes=budget_bytes,
            populate_bytes=max(populate_bytes, 1),
            threads=threads,
            node=node,
            fork=1,
            watch_ms=0 if runtime.simulated else WATCH_MS,
            root=self._root,
            device=device,
        )
        self.budget_bytes = budget_bytes
        self._pool: int | None = self._lib.kvp_pinned_open(ct.byref(options))
        if not self._pool:
            raise NativeError("no memory for a pool of pinned memory")
        runtime.users.add(self)

    def take(self, size: int, piece_bytes: int = 0) -> PinnedBuffer:
        """A pinned buffer of `size` bytes; what they are is not said.

        Args:
            size: bytes.
            piece_bytes: 0: one registration. Else it is registered in pieces of so many bytes, a multiple of 2 MiB:
                other threads wait for one piece at most, and a copy over two pieces fails.

        Raises:
            UsageError: `size` or `piece_bytes` cannot be, or the pool is closed.
            CudaError: the runtime's own error where there is too little memory.
        """
        if size <= 0 or piece_bytes < 0 or piece_bytes % _HUGE_PAGE:
            raise UsageError(f"cannot pin {size} bytes in pieces of {piece_bytes}: a piece is a multiple of 2 MiB")
        pool = self._pool
        if not pool:
            raise UsageError("this pool of pinned memory is closed")
        address, buffer = ct.c_void_p(), ct.c_void_p()
        code = self._lib.kvp_pinned_take(pool, size, piece_bytes, ct.byref(address), ct.byref(buffer))
        if code:
            raise self._runtime.error("cudaHostAlloc", code)
        return PinnedBuffer(
            functools.partial(self._give, pool, buffer.value or 0), address.value or 0, size, piece_bytes
        )

    def _give(self, pool: int, buffer: int) -> None:
        # `pool` is there as long as one of its buffers is out, closed or not
        code = self._lib.kvp_pinned_give(pool, buffer)
        if code:
            raise self._runtime.error("cudaFreeHost", code)

    def trim(self, most_bytes: int = 0) -> None:
        """Lets go of what is kept, oldest first, until no more than `most_bytes` are."""
        if self._pool:
            self._lib.kvp_pinned_trim(self._pool, most_bytes)

    @property
    def stats(self) -> PinnedStats:
        """What the pool holds and has done; zeros in a forked child and after `close`."""
        counts = PinnedCounts()
        if self._pool:
            self._lib.kvp_pinned_read(self._pool, ct.byref(counts))
        return PinnedStats(
            *(getattr(counts, _NATIVE_NAMES.get(name, name)) for name in PinnedStats.__dataclass_fields__)
        )

    def runtime_reset(self) -> None:
        """The runtime was torn down: what it pinned is no longer pinned."""
        if self._pool:
            self._lib.kvp_pinned_reset(self._pool)

    def close(self) -> None:
        """Frees what is kept. Buffers that are handed out stay, and are freed as they come back."""
        pool, self._pool = self._pool, None
        if pool:
            self._lib.kvp_pinned_close(pool)

    def __enter__(self) -> PinnedPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # interpreter shutdown: the process takes the memory with it
            self.close()


class PinnedBuffer:
    """Memory of a `PinnedPool`, given back with `close` or with the object.

    Attributes:
        address: of its first byte; 0 once it is given back.
        bytes: its length, as asked for.
        piece_bytes: of each registration; 0: it is one.
    """

    kind = "pinned"

    def __init__(self, give: Callable[[], None], address: int, size: int, piece_bytes: int) -> None:
        """What `PinnedPool.take` returns."""
        self._give = give
        self.address, self.bytes, self.piece_bytes = address, size, piece_bytes

    def view(self) -> memoryview:
        """The bytes."""
        return memoryview((ct.c_ubyte * self.bytes).from_address(self.address)).cast("B")

    def close(self) -> None:
        """Gives the memory back; further use of it is an error of the caller. Waits for the device, as cudaFreeHost.

        Raises:
            CudaError: the device was lost.
        """
        address, self.address = self.address, 0
        if address:
            self._give()

    def __enter__(self) -> PinnedBuffer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.close()


def gpu_node(runtime: Runtime, device: int) -> int:
    """NUMA node of a device; -1 where the system does not say it, or has one node alone."""
    if not runtime.address("cudaDeviceGetPCIBusId") or not Path("/sys/devices/system/node/node1").exists():
        return -1
    name = ct.create_string_buffer(32)
    function = ct.CFUNCTYPE(ct.c_int, ct.c_char_p, ct.c_int, ct.c_int)(runtime.address("cudaDeviceGetPCIBusId"))
    if function(name, len(name), device):
        return -1
    try:
        return int(Path(f"/sys/bus/pci/devices/{name.value.decode().lower()}/numa_node").read_text())
    except (OSError, ValueError):
        return -1


_making = threading.Lock()


def shared_pool(runtime: Runtime) -> PinnedPool:
    """The pool that the engine itself pins with: it keeps nothing, so that what is closed is free."""
    with _making:
        if runtime.pinned is None:
            runtime.pinned = PinnedPool(runtime, 0)
        pool: PinnedPool = runtime.pinned
    return pool
