"""Prometheus metrics of adapters at the server's own `/metrics`, whichever of its processes moves the KV cache.

Every such process adds to two files of its own, in prometheus_client's multi-process format; what a dead process
counted stays in them. They lie

* in `PROMETHEUS_MULTIPROC_DIR` where the server has set it by the time the process imports prometheus_client (vLLM with
  several API servers, SGLang): the server's endpoint adds up every file there;
* else in a private folder, which a collector in prometheus_client's default registry adds up at a scrape. A program's
  first process names it, in `KVPROBE_METRICS`, when it imports a server, so that the processes that multiprocessing
  starts know it (vLLM's engine, whose API server lets adapters in after it). Whichever counts first makes it; the
  first process removes it.

Nothing happens before the server itself imports prometheus_client. kvprobe opens no port here.
"""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import stat
import sys
import tempfile
import threading
from bisect import bisect_left
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvprobe.environment import METRICS
from kvprobe.instrument.carried.kvprobe_startup import spawned
from kvprobe.runfolder import identity, leftovers

log = logging.getLogger("kvprobe")

_SERVERS_OWN = "PROMETHEUS_MULTIPROC_DIR"
_SECONDS = (1e-6, 4e-6, 16e-6, 64e-6, 256e-6, 1e-3, 4e-3, 16e-3, 64e-3, 0.25, 1.0, 4.0)
# Of a process's files, by kind of metric: more than all servers, directions and buckets take.
_FILE_BYTES = {"counter": 1 << 17, "histogram": 1 << 19}


@dataclass(frozen=True)
class _Metric:
    kind: str  # "counter" or "histogram"; the latter of seconds
    name: str
    text: str
    labels: tuple[str, ...]


_LABELS = ("server", "direction")
POOL_SIZES = tuple(1 << power for power in range(8, 25))  # in blocks, of pools whose misses are estimated
_METRICS = {
    "bytes": _Metric("counter", "kvprobe_transfer_bytes", "Payload of finished transfers.", _LABELS),
    "submit": _Metric(
        "histogram",
        "kvprobe_transfer_submit_seconds",
        "Host time spent inside the copy calls of a transfer.",
        _LABELS,
    ),
    "queue": _Metric(
        "histogram",
        "kvprobe_transfer_queue_wait_seconds",
        "From the first submission until the device started.",
        _LABELS,
    ),
    "copy": _Metric("histogram", "kvprobe_transfer_copy_seconds", "Device time of a transfer.", _LABELS),
    "redundant": _Metric(
        "counter", "kvprobe_redundant_loads", "Loads of blocks that were being loaded already.", ("server",)
    ),
    "deferred": _Metric("counter", "kvprobe_deferred_loads", "Requests that waited for a load in flight.", ("server",)),
    "call": _Metric(
        "histogram", "kvprobe_server_call_seconds", "Host time inside the server's own functions that copy.", _LABELS
    ),
    "pageable": _Metric("counter", "kvprobe_pageable_copies", "Copies from or to pageable memory.", _LABELS),
    "blocking": _Metric("counter", "kvprobe_blocking_copies", "Copies that were asked for as blocking ones.", _LABELS),
    "prompt_tokens": _Metric(
        "counter", "kvprobe_offload_prompt_tokens", "Tokens of the prompts that were admitted.", ("server",)
    ),
    "gpu_hit_tokens": _Metric(
        "counter", "kvprobe_offload_gpu_hit_tokens", "Of these, tokens whose KV cache lay on the GPU.", ("server",)
    ),
    "hit_tokens": _Metric(
        "counter", "kvprobe_offload_hit_tokens", "Of these, tokens whose KV cache the offload had.", ("server",)
    ),
    "stored_blocks": _Metric("counter", "kvprobe_offload_stored_blocks", "Blocks that were offloaded.", ("server",)),
    "loaded_blocks": _Metric("counter", "kvprobe_offload_loaded_blocks", "Blocks that were loaded back.", ("server",)),
    "unread_blocks": _Metric(
        "counter", "kvprobe_offload_unread_blocks", "Offloaded blocks evicted before they were loaded.", ("server",)
    ),
    "asked_blocks": _Metric(
        "counter",
        "kvprobe_offload_asked_blocks",
        "Blocks that were asked for: found and loaded, or computed and stored.",
        ("server",),
    ),
    "would_miss": _Metric(
        "counter",
        "kvprobe_offload_would_miss_blocks",
        "Of these, an estimate of those that an LRU pool of so many blocks would not have had.",
        ("server", "size"),
    ),
    "waited_ns": _Metric(
        "counter", "kvprobe_offload_wait_seconds", "Time that requests waited for their loads.", ("server",)
    ),
}


class _Files:
    """The figures of this process."""

    def __init__(self, folder: str) -> None:
        """Raises OSError where the folder cannot take them."""
        from prometheus_client import mmap_dict

        open_file: Any = mmap_dict.MmapedDict
        self._keys: dict[tuple[str, tuple[str, ...]], list[str]] = {}
        self._of: dict[str, Any] = {}
        for kind, size_bytes in _FILE_BYTES.items():
            path = Path(folder) / f"{kind}_kvprobe-{os.getpid()}.db"  # readers take the kind from the name
            if not path.exists():
                # Reserved, because a write through a mapping kills the process where the disk is full; renamed, because
                # prometheus_client's reader refuses a file that is still empty.
                making = path.with_suffix(".making")
                try:
                    with making.open("wb") as file:
                        os.posix_fallocate(file.fileno(), 0, size_bytes)
                    making.rename(path)
                except OSError:
                    making.unlink(missing_ok=True)
                    raise
            self._of[kind] = open_file(str(path))

    def add(self, name: str, labels: tuple[str, ...], value: float) -> None:
        """Count `value`, or observe it."""
        metric = _METRICS[name]
        keys = self._keys.get((name, labels)) or self._begin(name, labels)
        if metric.kind == "counter":
            self._increase("counter", keys[0], value)
        else:
            self._increase("histogram", keys[bisect_left(_SECONDS, value)], 1)
            self._increase("histogram", keys[-1], value)

    def _begin(self, name: str, labels: tuple[str, ...]) -> list[str]:
        """The keys of a counter's total, or of a histogram's buckets and its sum; all of them begin at 0."""
        from prometheus_client.mmap_dict import mmap_key

        metric = _METRICS[name]
        if metric.kind == "counter":
            samples: list[tuple[str, dict[str, str]]] = [("_total", {})]
        else:
            samples = [("_bucket", {"le": str(bound)}) for bound in _SECONDS]
            samples += [("_bucket", {"le": "+Inf"}), ("_sum", {})]
        keys = [
            mmap_key(metric.name, metric.name + suffix, [*metric.labels, *more], [*labels, *more.values()], metric.text)
            for suffix, more in samples
        ]
        for key in keys:
            self._of[metric.kind].read_value(key)
        self._keys[name, labels] = keys
        return keys

    def _increase(self, kind: str, key: str, amount: float) -> None:
        file = self._of[kind]
        file.write_value(key, file.read_value(key)[0] + amount, 0.0)


class _Collector:
    """What prometheus_client's registry asks at a scrape: the sums over the files in a folder."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._warned = False

    def describe(self) -> list[Any]:
        """The metrics without samples."""
        from prometheus_client.core import Metric

        return [Metric(metric.name, metric.text, metric.kind) for metric in _METRICS.values()]

    def collect(self) -> list[Any]:
        """The metrics, or none where the folder cannot be read: the server's own must still be served."""
        try:
            from prometheus_client import multiprocess

            add_up: Any = multiprocess.MultiProcessCollector
            return list(add_up(None, path=self._folder).collect())
        except Exception as error:
            if not self._warned:
                log.warning("kvprobe: no metrics at this scrape, %s cannot be read: %s", self._folder, error)
            self._warned = True
            return []


_lock = threading.RLock()
_folder: str | None = None
_files: _Files | None = None
_given_up = False


def _after_fork() -> None:
    """A child has files of its own, in the folder of its parent or in the one that the server has named since."""
    global _lock, _files, _folder
    _lock, _files, _folder = threading.RLock(), None, os.environ.get(_SERVERS_OWN) or _folder


os.register_at_fork(after_in_child=_after_fork)


def _give_up(error: Exception) -> None:
    global _files, _given_up
    _files, _given_up = None, True
    log.warning(
        "kvprobe: no metrics of process %d: %s; let TMPDIR, or %s where the server uses it, name one with free space",
        os.getpid(),
        error,
        _SERVERS_OWN,
    )


def _remove(folder: str, pid: int) -> None:
    if os.getpid() == pid:  # a forked child inherits the call
        shutil.rmtree(folder, ignore_errors=True)


def _make(folder: str) -> None:
    """Makes it, or finds it made by another process of this program: no other user can have put it there."""
    try:
        Path(folder).mkdir(mode=0o700)
    except FileExistsError:
        found = Path(folder).lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise


def expose(_: object = None) -> None:
    """Let the server's endpoint show this program's metrics, once prometheus_client is imported. Never raises."""
    global _folder
    try:
        # Not under the lock: whichever thread is importing it waits for the lock in its post-import hook.
        from prometheus_client import REGISTRY

        with _lock:
            if _folder is not None or _given_up:
                return
            # Asked once, as prometheus_client does: LMCache sets it later, for itself, in the middle of vLLM's engine.
            _folder = os.environ.get(_SERVERS_OWN) or None
            if _folder is not None:
                return
            me, given = str(identity.of(os.getpid())), METRICS.take()
            if given and not (spawned() or f"-{me}-" in given):
                given = None  # another program's: an observed one started this one
            folder = given or tempfile.mkdtemp(prefix=f"{leftovers.METRICS}-{me}-")
            if given:
                _make(folder)
            if f"-{me}-" in folder:
                leftovers.sweep()
                atexit.register(_remove, folder, os.getpid())
                REGISTRY.register(_Collector(folder))
            _folder = folder
            METRICS.set(folder)
    except Exception as error:  # no folder, or a registry that refuses: neither must reach the server
        _give_up(error)


def _opened() -> _Files | None:
    """This process's files, or nothing where the server does not use prometheus_client."""
    global _files
    if _files is None and not _given_up and "prometheus_client" in sys.modules:
        expose()
        with _lock:
            if _files is None and _folder is not None and not _given_up:
                try:
                    _files = _Files(_folder)
                except Exception as error:
                    _give_up(error)
    return _files


def _add(values: dict[str, float], labels: tuple[str, ...]) -> None:
    if _opened() is None:
        return
    with _lock:
        try:
            for name, value in values.items():
                if _files is not None:
                    _files.add(name, labels, value)
        except Exception as error:
            _give_up(error)


def exposed() -> bool:
    """Whether the server has a registry that these metrics are in."""
    return _opened() is not None


def transfer(
    server: str, direction: str, size_bytes: int, submit_ns: int, queue_ns: int | None, copy_ns: int | None
) -> None:
    """Count one finished transfer."""
    values: dict[str, float] = {"bytes": size_bytes, "submit": submit_ns / 1e9}
    if queue_ns is not None:
        values["queue"] = queue_ns / 1e9
    if copy_ns is not None:
        values["copy"] = copy_ns / 1e9
    _add(values, (server, direction))


def call(server: str, direction: str, took_ns: int, pageable: int, blocking: int) -> None:
    """Count one call of a server's own function that copies, and the copies in it that could not overlap."""
    _add({"call": took_ns / 1e9, "pageable": pageable, "blocking": blocking}, (server, direction))


def offload(server: str, more: dict[str, int]) -> None:
    """Count what an offload brought since the last call, by the names of `benefit.BenefitTotals.sums`."""
    values = {name: value / 1e9 if name.endswith("_ns") else value for name, value in more.items() if name in _METRICS}
    _add(values, (server,))


def reuse(server: str, asked: int, missed: list[float], before: list[float]) -> None:
    """Count blocks that were asked for, and of them what pools of POOL_SIZES would have missed: now, and before."""
    _add({"asked_blocks": asked}, (server,))
    for size, now, then in zip(POOL_SIZES, missed, before, strict=True):
        _add({"would_miss": max(0.0, now - then)}, (server, str(size)))


def count(name: str, server: str) -> None:
    """Count one `redundant` load or one `deferred` request."""
    _add({name: 1}, (server,))
