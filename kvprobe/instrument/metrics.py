"""Prometheus metrics of adapters, in the process's default registry: the one that vLLM and SGLang expose.

With `PROMETHEUS_MULTIPROC_DIR` set (as servers with several processes do) prometheus_client writes them to that folder
and the server's own endpoint adds the processes up. They appear only where the server itself imported
prometheus_client; kvprobe opens no port here.
"""

from __future__ import annotations

import sys
from typing import Any

_metrics: dict[str, Any] | None = None
_SECONDS = (1e-6, 4e-6, 16e-6, 64e-6, 256e-6, 1e-3, 4e-3, 16e-3, 64e-3, 0.25, 1.0, 4.0)


def _make() -> dict[str, Any]:
    """The metrics, or nothing where the server does not use prometheus_client."""
    global _metrics
    if _metrics is None:
        _metrics = {}
        if "prometheus_client" in sys.modules:
            try:
                from prometheus_client import Counter, Histogram

                labels = ("server", "direction")
                _metrics = {
                    "bytes": Counter("kvprobe_transfer_bytes", "Payload of finished transfers.", labels),
                    "submit": Histogram(
                        "kvprobe_transfer_submit_seconds",
                        "Host time spent inside the copy calls of a transfer.",
                        labels,
                        buckets=_SECONDS,
                    ),
                    "queue": Histogram(
                        "kvprobe_transfer_queue_wait_seconds",
                        "From the first submission until the device started.",
                        labels,
                        buckets=_SECONDS,
                    ),
                    "copy": Histogram(
                        "kvprobe_transfer_copy_seconds", "Device time of a transfer.", labels, buckets=_SECONDS
                    ),
                    "redundant": Counter(
                        "kvprobe_redundant_loads", "Loads of blocks that were being loaded already.", ("server",)
                    ),
                    "deferred": Counter(
                        "kvprobe_deferred_loads", "Requests that waited for a load in flight.", ("server",)
                    ),
                }
            except Exception:  # a registry that refuses (duplicate names) must not reach the server
                _metrics = {}
    return _metrics


def exposed() -> bool:
    """Whether the server has a registry that these metrics are in."""
    return bool(_make())


def transfer(
    server: str, direction: str, size_bytes: int, submit_ns: int, queue_ns: int | None, copy_ns: int | None
) -> None:
    """Count one finished transfer."""
    found = _make()
    if not found:
        return
    labels = (server, direction)
    found["bytes"].labels(*labels).inc(size_bytes)
    found["submit"].labels(*labels).observe(submit_ns / 1e9)
    if queue_ns is not None:
        found["queue"].labels(*labels).observe(queue_ns / 1e9)
    if copy_ns is not None:
        found["copy"].labels(*labels).observe(copy_ns / 1e9)


def count(name: str, server: str) -> None:
    """Count one `redundant` load or one `deferred` request."""
    found = _make()
    if found:
        found[name].labels(server).inc()
