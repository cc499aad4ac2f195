"""vLLM's connectors to other engines and tiers: Nixl, Mooncake, LMCache's separate process, disk. Measured only.

Their copies run in other libraries or processes, which vLLM hands descriptors to: what is measured is posting (how
long the thread is held, how many descriptors), bytes, and for files the time of the I/O thread. Nothing is cured:
order and completion belong to those libraries.
"""

from __future__ import annotations

import threading
import time
from types import ModuleType
from typing import Any

from kvprobe.instrument import event_log, metrics
from kvprobe.instrument.adapter import Adapter, Target
from kvprobe.instrument.calls import TimedCalls, TimedFunction, timed
from kvprobe.instrument.hooks import Call, Patcher

_V1 = "vllm.distributed.kv_transfer.kv_connector.v1"
_IO = "vllm.v1.kv_offload.tiering.fs.io"


class _Told(Adapter):
    """A connector that measures itself: its own figures of each transfer become events."""

    def tell(self, call: str, direction: str, post_ns: int, took_ns: int, size: int, copies: int, cause: str) -> None:
        """One transfer: how long its posting held the thread, how long it took, bytes and descriptors."""
        event_log.emit(
            "call",
            adapter=self.name,
            server=self.server,
            call=call,
            direction=direction,
            dur_ns=post_ns,
            took_ns=took_ns,
            thread=threading.get_native_id(),
            bytes=size,
            copies=copies,
            cause=cause,
        )
        metrics.call(self.server, direction, post_ns, 0, 0)
        metrics.transfer(self.server, direction, size, post_ns, None, took_ns)


class Nixl(_Told):
    """NixlConnector: Nixl's own telemetry of every transfer that has ended."""

    name, versions = "vllm.nixl", ">=0.12,<0.34"
    option = "--kv-transfer-config with NixlConnector"
    summary = "Posting time, duration, descriptors and bytes of every Nixl transfer, by Nixl's own telemetry."
    _stats = (f"{_V1}.nixl.stats", f"{_V1}.nixl_connector")
    targets = tuple(Target(module, "NixlKVConnectorStats.record_transfer", ("res",)) for module in _stats)

    def patch(self, patcher: Patcher, module: ModuleType) -> None:
        """Wrap the place where vLLM collects the telemetry."""
        patcher.wrap(module.NixlKVConnectorStats, "record_transfer", self.record)

    def record(self, call: Call, stats: Any, res: Any, *args: Any, **kwargs: Any) -> Any:
        """Around `record_transfer`: durations are microseconds there."""
        result = call()
        if res is not None:
            post_ns, took_ns = int(res.postDuration * 1_000), int(res.xferDuration * 1_000)
            count = int(res.descCount)
            cause = f"posts {count:,} descriptors" if count > 1 else ""
            self.tell("Nixl transfer", "both", post_ns, took_ns, int(res.totalBytes), count, cause)
        return result


class Mooncake(TimedCalls):
    """MooncakeConnector: one synchronous write of a batch of blocks, on a thread of the connector."""

    name, versions = "vllm.mooncake", ">=0.20,<0.34"
    option = "--kv-transfer-config with MooncakeConnector"
    summary = "Times MooncakeConnector's batched writes: descriptors, bytes, the sending thread's wait."
    timed = (
        timed(
            f"{_V1}.mooncake.mooncake_connector",
            "MooncakeConnectorWorker._send_blocks",
            ("remote_session", "src_ptrs", "dst_ptrs", "lengths"),
            "store",
            "the sending thread waits for the whole batch",
        ),
    )

    def describe(
        self, entry: TimedFunction, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> dict[str, Any]:
        """Descriptors and bytes; a transfer that failed moved none."""
        lengths = kwargs["lengths"] if "lengths" in kwargs else args[4]
        return {"copies": len(lengths), "bytes": sum(lengths) if result == 0 else 0}


class MooncakeStore(_Told):
    """MooncakeStoreConnector: puts and gets of keys, as its transfer threads note them."""

    name, versions = "vllm.mooncake_store", ">=0.24,<0.34"
    option = "--kv-transfer-config with MooncakeStoreConnector"
    summary = "Duration, keys and bytes of every put and get of MooncakeStoreConnector's transfer threads."
    targets = (
        Target(
            f"{_V1}.mooncake.store.worker",
            "KVTransferThread._record_operation",
            ("operation", "start_time", "num_keys"),
        ),
    )

    def patch(self, patcher: Patcher, module: ModuleType) -> None:
        """Wrap the threads' own note of an operation."""
        patcher.wrap(module.KVTransferThread, "_record_operation", self.record)

    def record(
        self, call: Call, thread: Any, operation: str, start_time: float, num_keys: int, *args: Any, **kwargs: Any
    ) -> Any:
        """Around `_record_operation`, at the end of one operation."""
        took_ns = int((time.perf_counter() - start_time) * 1e9)
        result = call()
        direction = "store" if "put" in operation or "save" in operation else "load"
        size = int(kwargs.get("num_bytes", 0)) if kwargs.get("status", "ok") == "ok" else 0
        if size:
            self.tell(f"Mooncake {operation}", direction, took_ns, took_ns, size, num_keys, "")
        return result


class DiskTier(TimedCalls):
    """The tiering connector's file back end: batches of blocks to and from files, on I/O threads."""

    name, versions = "vllm.disk_tier", ">=0.28,<0.34"
    option = "tiering with a file system back end"
    summary = "Times the file back end of vLLM's tiering: blocks and bytes read and written by its I/O threads."
    _batch = ("paths", "view", "offsets", "block_size")
    timed = (
        timed(_IO, "batch_load_block", _batch, "load"),
        timed(_IO, "batch_store_block", _batch, "store"),
    )

    def describe(
        self, entry: TimedFunction, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> dict[str, Any]:
        """What the batch asked for; a store leaves out blocks whose file is there already."""
        given = {**dict(zip(self._batch, args, strict=False)), **kwargs}
        return {"copies": len(given["paths"]), "bytes": len(given["paths"]) * int(given["block_size"])}


CONNECTORS = (Nixl, Mooncake, MooncakeStore, DiskTier)
