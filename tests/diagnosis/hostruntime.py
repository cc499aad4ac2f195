"""Drives the embedded host runtime and turns what it traced into a recording, as a profiler would have seen it."""

from __future__ import annotations

import ctypes as ct
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from kvprobe.cuda.hostruntime import HostRuntime, host_runtime
from kvprobe.recordings.model import CallKind, Direction, Engine, Memory, Recording, Source, Table
from kvprobe.recordings.vocabulary import Names, call_kind

u64, vp = ct.c_uint64, ct.c_void_p
H2D, D2H, D2D = 1, 2, 3
NON_BLOCKING = 1

QUEUE_FULL, CONTEXT_LOCK, STREAM_LOCK, PAGEABLE, SYNC = 1, 2, 3, 4, 5


class Dim3(ct.Structure):
    _fields_: ClassVar = [("x", ct.c_uint), ("y", ct.c_uint), ("z", ct.c_uint)]


class Attributes(ct.Structure):
    _fields_: ClassVar = [
        ("order", ct.c_int),
        ("src_type", ct.c_int),
        ("src_id", ct.c_int),
        ("dst_type", ct.c_int),
        ("dst_id", ct.c_int),
        ("flags", ct.c_uint),
    ]


class Thread:
    """A simulated thread: it runs while the others wait."""

    def __init__(self, host: HostRuntime, body: Callable[[], Any]) -> None:
        self.over = False

        def run() -> None:
            try:
                body()
            finally:
                self.over = True

        self._host, self._actor = host, host.thread(run)

    def join(self) -> None:
        self._host.run_until(lambda: self.over)
        self._actor.remove()


class Runtime:
    """The runtime's calls, as short as a scenario needs them; every failing call raises."""

    def __init__(self) -> None:
        self.host = host_runtime()
        self.lib = lib = self.host.library
        lib.cudaMemcpyAsync.argtypes = [vp, vp, ct.c_size_t, ct.c_int, vp]
        lib.cudaMemcpy.argtypes = [vp, vp, ct.c_size_t, ct.c_int]
        lib.cudaLaunchKernel.argtypes = [vp, Dim3, Dim3, vp, ct.c_size_t, vp]
        lib.cudaMemcpyBatchAsync.argtypes = [vp, vp, vp, ct.c_size_t, vp, vp, ct.c_size_t, vp]
        lib.cudaStreamCreateWithFlags.argtypes = [vp, ct.c_uint]
        lib.cudaEventCreateWithFlags.argtypes = [vp, ct.c_uint]
        lib.cudaEventRecord.argtypes = [vp, vp]
        lib.cudaStreamWaitEvent.argtypes = [vp, vp, ct.c_uint]
        for name in ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaEventDestroy", "cudaFree", "cudaFreeHost"):
            getattr(lib, name).argtypes = [vp]
        lib.cudaMalloc.argtypes = [vp, ct.c_size_t]
        lib.cudaHostAlloc.argtypes = [vp, ct.c_size_t, ct.c_uint]
        self.kernel = ct.cast(lib.kvhost_delay_kernel, vp)
        self.one = Dim3(1, 1, 1)

    def check(self, code: int) -> None:
        if code:
            raise RuntimeError(f"runtime call failed: {code}")

    def reset(self, **config: Any) -> None:
        """Afresh, in virtual time: it passes as the model says, and never because the machine was busy."""
        self.host.reset(virtual_clock=True, **config)

    def sleep(self, ns: int) -> None:
        """The calling thread does something else for so long."""
        self.host.advance(ns)

    def now_ns(self) -> int:
        return self.host.now_ns()

    def thread(self, body: Callable[[], Any]) -> Thread:
        """Runs `body` in a thread of its own; `join` it."""
        return Thread(self.host, body)

    def stream(self) -> int:
        out = vp()
        self.check(self.lib.cudaStreamCreateWithFlags(ct.byref(out), NON_BLOCKING))
        return int(out.value or 0)

    def event(self) -> int:
        out = vp()
        self.check(self.lib.cudaEventCreateWithFlags(ct.byref(out), 2))
        return int(out.value or 0)

    def malloc(self, size: int) -> int:
        out = vp()
        self.check(self.lib.cudaMalloc(ct.byref(out), size))
        return int(out.value or 0)

    def host_alloc(self, size: int) -> int:
        out = vp()
        self.check(self.lib.cudaHostAlloc(ct.byref(out), size, 0))
        address = int(out.value or 0)
        ct.memset(address, 1, size)
        return address

    def free_host(self, address: int) -> None:
        self.check(self.lib.cudaFreeHost(address))

    def copy(self, dst: int, src: int, size: int, kind: int, stream: int) -> int:
        """Submits one copy; returns its correlation id."""
        self.check(self.lib.cudaMemcpyAsync(dst, src, size, kind, stream))
        return int(self.lib.kvhostLastCorrelation())

    def batch(self, dst: list[int], src: list[int], size: int, kind: int, stream: int) -> None:
        n = len(dst)
        to_device = kind == H2D
        attributes = Attributes(1, 2 if to_device else 1, 0, 1 if to_device else 2, 0, 0)
        index = (ct.c_size_t * 1)(0)
        self.check(
            self.lib.cudaMemcpyBatchAsync(
                (vp * n)(*dst),
                (vp * n)(*src),
                (ct.c_size_t * n)(*[size] * n),
                n,
                ct.byref(attributes),
                index,
                1,
                stream,
            )
        )

    def launch(self, stream: int, ns: int) -> int:
        """A kernel of `ns`; returns its correlation id."""
        duration = u64(ns)
        args = (vp * 1)(ct.addressof(duration))
        self.check(self.lib.cudaLaunchKernel(self.kernel, self.one, self.one, args, 0, stream))
        return int(self.lib.kvhostLastCorrelation())

    def record(self, event: int, stream: int) -> None:
        self.check(self.lib.cudaEventRecord(event, stream))

    def wait(self, stream: int, event: int) -> None:
        self.check(self.lib.cudaStreamWaitEvent(stream, event, 0))

    def sync(self, stream: int) -> None:
        self.check(self.lib.cudaStreamSynchronize(stream))

    def synchronize_event(self, event: int) -> None:
        self.check(self.lib.cudaEventSynchronize(event))

    def synchronize(self) -> None:
        self.check(self.lib.cudaDeviceSynchronize())

    def trace(self, body: Callable[[], Any]) -> tuple[npt.NDArray[Any], Any]:
        """Runs `body` with the trace on; returns the records (all executions over) and what it returned."""
        self.synchronize()
        self.host.trace_start()
        result = body()
        self.host.trace_stop()
        self.synchronize()
        return self.host.trace(), result

    def call_name(self, api: int) -> str:
        return self.host.call_name(api)


def recording_of(runtime: Runtime, records: npt.NDArray[Any], channels: bool = False) -> Recording:
    """The trace as CUPTI would have recorded it: calls and executions, no reasons, no blocked times.

    Args:
        runtime: for the names of calls.
        records: of `Runtime.trace`.
        channels: whether executions carry their hardware channel (recent Kineto does, Nsight Systems does not).
    """
    names = Names()
    records = records[(records["end_ns"] > 0) & (records["api"] != 0)]
    texts = {int(api): runtime.call_name(int(api)) for api in np.unique(records["api"])}
    kinds = {api: call_kind(text) for api, text in texts.items()}
    name = np.array([names.add(texts[int(api)]) for api in records["api"]], dtype=np.int32)
    kind = np.array([kinds[int(api)] for api in records["api"]], dtype=np.uint8)
    handles, stream = np.unique(records["stream"], return_inverse=True)
    submits = records["correlation"] > 0
    on_stream = submits | (kind == CallKind.EVENT) | (kind == CallKind.SYNC)
    correlation = np.where(submits, records["correlation"].astype(np.int64), -1)
    calls = {
        "start_ns": records["start_ns"].astype(np.int64),
        "end_ns": records["end_ns"].astype(np.int64),
        "process": np.zeros(len(records), np.int32),
        "thread": records["tid"].astype(np.int64),
        "name": name,
        "kind": kind,
        "stream": np.where(on_stream, stream, -1),
        "direction": records["direction"],
        "memory": records["memory"],
        "bytes": records["bytes"].astype(np.int64),
        "count": records["count"],
        "correlation": correlation,
        "src": records["src"],
        "dst": records["dst"],
        "result": records["result"],
    }
    works = [CallKind.COPY, CallKind.BATCH, CallKind.MEMSET, CallKind.LAUNCH, CallKind.GRAPH, CallKind.COPY_SYNC]
    ran = np.flatnonzero(submits & (records["exec_end_ns"] > 0) & np.isin(kind, works))
    done = records[ran]
    engine = np.where(
        np.isin(kind[ran], [CallKind.LAUNCH, CallKind.GRAPH]),
        Engine.KERNEL,
        np.where(kind[ran] == CallKind.MEMSET, Engine.MEMSET, Engine.COPY),
    )
    executions = {
        "start_ns": done["exec_start_ns"].astype(np.int64),
        "end_ns": done["exec_end_ns"].astype(np.int64),
        "process": np.zeros(len(ran), np.int32),
        "device": np.zeros(len(ran), np.int32),
        "stream": stream[ran],
        "channel": done["op_class"].astype(np.int32) * 32 + done["channel"] if channels else np.full(len(ran), -1),
        "engine": engine,
        "direction": np.where(engine == Engine.COPY, done["direction"], 0),
        "memory": np.where(engine == Engine.COPY, done["memory"], 0),
        "bytes": np.where(engine == Engine.COPY, done["bytes"], 0).astype(np.int64),
        "count": done["count"],
        "correlation": correlation[ran],
        "name": name[ran],
    }
    order, ran_order = np.argsort(calls["start_ns"], kind="stable"), np.argsort(executions["start_ns"], kind="stable")
    recording = Recording(source=[Source(path="scenario", format="trace")], names=names.list, has_executions=True)
    recording.tables["calls"] = Table("calls", {key: column[order] for key, column in calls.items()})
    recording.tables["executions"] = Table("executions", {k: column[ran_order] for k, column in executions.items()})
    recording.tables["streams"] = Table(
        "streams",
        {
            "process": np.zeros(len(handles), np.int32),
            "device": np.zeros(len(handles), np.int32),
            "handle": handles.astype(np.int64),
        },
    )
    recording.tables["processes"] = Table("processes", {"pid": np.array([4242], dtype=np.int64)})
    return recording


__all__ = [
    "CONTEXT_LOCK",
    "D2D",
    "D2H",
    "H2D",
    "PAGEABLE",
    "QUEUE_FULL",
    "STREAM_LOCK",
    "SYNC",
    "Direction",
    "Memory",
    "Runtime",
    "recording_of",
]
