"""The CUDA runtime's symbols as a program of the corpus uses them: one source for a GPU and for the host runtime.

Standard library only, so that a program starts fast and nothing of kvprobe runs inside it.
"""

from __future__ import annotations

import ctypes as ct
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

H2D, D2H = 1, 2
NON_BLOCKING, DISABLE_TIMING = 1, 2
HOSTRT = Path(__file__).resolve().parents[2] / "kvprobe" / "native" / "lib" / "libkvprobe_hostrt.so"
DEPTH = 1_021  # submissions that one stream takes, on an H200 and in the host runtime
SPIN = b"""
.version 7.0
.target sm_70
.address_size 64
.visible .entry spin(.param .u64 duration)
{
    .reg .pred %p; .reg .b64 %until, %now, %ns;
    ld.param.u64 %ns, [duration];
    mov.u64 %until, %globaltimer;
    add.u64 %until, %until, %ns;
again:
    mov.u64 %now, %globaltimer;
    setp.lt.u64 %p, %now, %until;
    @%p bra again;
    ret;
}
"""
now = time.perf_counter_ns
p, z = ct.c_void_p, ct.c_size_t


class Dim3(ct.Structure):
    _fields_ = [("x", ct.c_uint), ("y", ct.c_uint), ("z", ct.c_uint)]


class Attributes(ct.Structure):
    _fields_ = [
        ("order", ct.c_int),
        ("src_type", ct.c_int),
        ("src_id", ct.c_int),
        ("dst_type", ct.c_int),
        ("dst_id", ct.c_int),
        ("flags", ct.c_uint),
    ]


def _library() -> tuple[ct.CDLL, bool]:
    if not Path("/dev/nvidiactl").exists():
        return ct.CDLL(os.environ.get("KVPROBE_HOSTRT") or str(HOSTRT)), False
    with Path("/proc/self/maps").open() as maps:
        loaded = [line.split()[-1] for line in maps if "/libcudart.so" in line]
    beside = [path for folder in sys.path for path in map(str, Path(folder).glob("nvidia/cu13/lib/libcudart.so.13"))]
    found = loaded or beside or list(map(str, Path("/usr/local/cuda/lib64").glob("libcudart.so.1[23]")))
    return ct.CDLL(found[0] if found else "libcudart.so"), True


class Device:
    """One device with its memory, streams and events made up front.

    Attributes:
        gpu: whether it is an NVIDIA GPU.
        host, device: addresses of `size` bytes of pinned host and of device memory.
        copies: streams for copies; compute: the stream of kernels.
        bytes_per_us: of one large copy; measured on a GPU.
    """

    spent: Any  # where a program's time goes, by itself: `accounts.Spent`

    def __init__(self, size: int = 0, streams: int = 32, events: int = 256) -> None:
        self.lib, self.gpu = _library()
        lib = self.lib
        lib.cudaMemcpyAsync.argtypes = [p, p, z, ct.c_int, p]
        lib.cudaMemcpy.argtypes = [p, p, z, ct.c_int]
        lib.cudaLaunchKernel.argtypes = [p, Dim3, Dim3, p, z, p]
        lib.cudaStreamCreateWithFlags.argtypes = [p, ct.c_uint]
        lib.cudaEventCreateWithFlags.argtypes = [p, ct.c_uint]
        lib.cudaMalloc.argtypes = [p, z]
        lib.cudaHostAlloc.argtypes = [p, z, ct.c_uint]
        lib.cudaHostRegister.argtypes = [p, z, ct.c_uint]
        lib.cudaEventRecord.argtypes = [p, p]
        lib.cudaStreamWaitEvent.argtypes = [p, p, ct.c_uint]
        lib.cudaEventElapsedTime.argtypes = [p, p, p]
        for name in (
            "StreamSynchronize",
            "EventSynchronize",
            "EventQuery",
            "EventDestroy",
            "Free",
            "FreeHost",
            "HostUnregister",
        ):
            getattr(lib, f"cuda{name}").argtypes = [p]
        lib.cudaMemcpyBatchAsync.argtypes = [p, p, p, z, p, p, z, p]
        self.one = Dim3(1, 1, 1)
        size = size or (192 << 20 if self.gpu else 64 << 20)  # blocks are sized by time, and a GPU's link is faster
        self.size = size
        self.device = self.made("cudaMalloc", size)
        self.host = self.made("cudaHostAlloc", size, 0)
        ct.memset(self.host, 1, size)
        self.kernel = self._kernel()
        self.copies = [self.stream() for _ in range(streams)]
        self.compute = self.stream()
        self.events = [self.event() for _ in range(events)]
        self.timing = [self.made("cudaEventCreateWithFlags", 0) for _ in range(512)]
        self.timed = 0
        self.kernel_ns = 0  # of all kernels launched so far
        for stream in (*self.copies[:4], self.compute):  # every path once: nothing later is a first call
            self.copy(self.device, self.host, 4096, H2D, stream)
            self.copy(self.host, self.device, 4096, D2H, stream)
            self.launch(1_000, stream)
            self.order(self.compute, stream, 0)
        self.drain()
        # sizes on the host runtime are not to depend on who else uses the machine: its default bandwidth
        best, probe = 1e12, 32 << 20
        self.bytes_per_us = 4_000.0
        for _ in range(3 if self.gpu else 0):
            begin = self.mark(self.copies[0])
            self.copy(self.device, self.host, probe, H2D, self.copies[0])
            end = self.mark(self.copies[0])
            self.drain()
            best = min(best, self.between(begin, end))
            self.bytes_per_us = probe / best * 1e3

    def _kernel(self) -> object:
        if not self.gpu:
            return ct.cast(self.lib.kvhost_delay_kernel, p)
        library, kernel = p(), p()
        self.lib.cudaLibraryLoadData.argtypes = [p, ct.c_char_p, p, p, ct.c_uint, p, p, ct.c_uint]
        self.lib.cudaLibraryGetKernel.argtypes = [p, p, ct.c_char_p]
        self.check(self.lib.cudaLibraryLoadData(ct.byref(library), SPIN, None, None, 0, None, None, 0))
        self.check(self.lib.cudaLibraryGetKernel(ct.byref(kernel), library, b"spin"))
        return kernel

    def another_module(self) -> None:
        """Loads the kernel's module once more, as a lazy first use does."""
        self._kernel()

    def check(self, code: int) -> None:
        if code:
            raise RuntimeError(f"a call of the CUDA runtime failed: {code}")

    def made(self, name: str, *arguments: int) -> int:
        out = p()
        self.check(getattr(self.lib, name)(ct.byref(out), *arguments))
        return int(out.value or 0)

    def stream(self) -> int:
        return self.made("cudaStreamCreateWithFlags", NON_BLOCKING)

    def event(self) -> int:
        return self.made("cudaEventCreateWithFlags", DISABLE_TIMING)

    # ---- calls; each that can block returns how long it took, ns ----------------------------------------------------

    def copy(self, dst: int, src: int, size: int, kind: int, stream: int) -> int:
        begin = now()
        code = self.lib.cudaMemcpyAsync(dst, src, size, kind, stream)
        took = now() - begin
        self.check(code)
        return took

    def load(self, number: int, size: int, stream: int) -> int:
        """Block `number` of the pinned pool to its place on the device."""
        at = number * size % (self.size - size + 1) & ~255
        return self.copy(self.device + at, self.host + at, size, H2D, stream)

    def store(self, number: int, size: int, stream: int) -> int:
        at = number * size % (self.size - size + 1) & ~255
        return self.copy(self.host + at, self.device + at, size, D2H, stream)

    def batch(self, dst: list[int], src: list[int], size: int, stream: int) -> int:
        n = len(dst)
        attributes, index = Attributes(1, 2, 0, 1, 0, 0), (z * 1)(0)
        targets, sources, sizes = (p * n)(*dst), (p * n)(*src), (z * n)(*[size] * n)
        begin = now()
        code = self.lib.cudaMemcpyBatchAsync(targets, sources, sizes, n, ct.byref(attributes), index, 1, stream)
        took = now() - begin
        self.check(code)
        return took

    def launch(self, ns: int, stream: int = 0) -> int:
        """A kernel of `ns` on the compute stream, or on another."""
        self.kernel_ns += ns
        duration = ct.c_uint64(ns)
        arguments = (p * 1)(ct.addressof(duration))
        begin = now()
        code = self.lib.cudaLaunchKernel(self.kernel, self.one, self.one, arguments, 0, stream or self.compute)
        took = now() - begin
        self.check(code)
        return took

    def rapid(self, places: list[tuple[int, int]], size: int, kind: int, stream: int) -> int:
        """Copies of `size` from place to place as fast as Python can: how long all took, ns."""
        copy, begin = self.lib.cudaMemcpyAsync, now()
        code = 0
        for dst, src in places:
            code |= copy(dst, src, size, kind, stream)
        took = now() - begin
        self.check(code)
        return took

    def graph(self, body: Callable[[], object]) -> int:
        """What `body` gives the compute stream, as a graph that can be launched (not on the host runtime)."""
        graph, launchable = p(), p()
        self.lib.cudaStreamBeginCapture.argtypes = [p, ct.c_int]
        self.lib.cudaStreamEndCapture.argtypes = [p, p]
        self.lib.cudaGraphInstantiate.argtypes = [p, p, ct.c_ulonglong]
        self.lib.cudaGraphLaunch.argtypes = [p, p]
        self.check(self.lib.cudaStreamBeginCapture(self.compute, 2))
        body()
        self.check(self.lib.cudaStreamEndCapture(self.compute, ct.byref(graph)))
        self.check(self.lib.cudaGraphInstantiate(ct.byref(launchable), graph, 0))
        return int(launchable.value or 0)

    def replay(self, graph: int, kernel_ns: int) -> None:
        """Launches a graph, whose kernels take `kernel_ns`, on the compute stream."""
        self.kernel_ns += kernel_ns
        self.check(self.lib.cudaGraphLaunch(graph, self.compute))

    def order(self, later: int, earlier: int, event: int) -> None:
        """`later` waits for all that `earlier` has been given."""
        event = self.events[event % len(self.events)]
        self.check(self.lib.cudaEventRecord(event, earlier))
        self.check(self.lib.cudaStreamWaitEvent(later, event, 0))

    def record(self, event: int, stream: int) -> None:
        self.check(self.lib.cudaEventRecord(self.events[event % len(self.events)], stream))

    def sync(self, stream: int) -> int:
        begin = now()
        self.check(self.lib.cudaStreamSynchronize(stream))
        return now() - begin

    def sync_event(self, event: int) -> int:
        begin = now()
        self.check(self.lib.cudaEventSynchronize(self.events[event % len(self.events)]))
        return now() - begin

    def synchronize(self) -> None:
        self.check(self.lib.cudaDeviceSynchronize())

    def drain(self) -> None:
        """Waits until the device is idle without a call that waits: asks an event of each stream in use."""
        self.lib.cudaStreamQuery.argtypes = [p]
        for stream in (*self.copies, self.compute):
            while self.lib.cudaStreamQuery(stream):
                time.sleep(0.0002)

    # ---- the program's own measure of the device --------------------------------------------------------------------

    def mark(self, stream: int) -> int:
        """A timing event recorded on a stream; `between` two of them once they are reached."""
        event = self.timing[self.timed % len(self.timing)]
        self.timed += 1
        self.check(self.lib.cudaEventRecord(event, stream))
        return event

    def between(self, begin: int, end: int) -> int:
        out = ct.c_float()
        self.check(self.lib.cudaEventElapsedTime(ct.byref(out), begin, end))
        return int(out.value * 1e6)

    def bytes_of(self, us: float) -> int:
        """A block whose copy takes about `us`, a multiple of 4 KiB."""
        return max(4096, int(us * self.bytes_per_us) & ~4095)


def beyond(durations: list[int], least_ns: int = 20_000) -> int:
    """What calls of at least `least_ns` took beyond the median of the quick ones."""
    quick = sorted(one for one in durations if one < least_ns)
    usual = quick[len(quick) // 2] if quick else 3_000
    return sum(one - usual for one in durations if one >= least_ns)
