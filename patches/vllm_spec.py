"""kvprobe in vLLM without a patch: an OffloadingSpec (vLLM 0.28 to 0.33) whose worker is timed from outside.

    --kv-transfer-config '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config":
      {"cpu_bytes_to_use": 1000000000, "spec_name": "ProbedOffloadingSpec",
       "spec_module_path": "kvprobe.patches.vllm_spec"}}'

It measures what can be seen from a worker's public interface: host time of every submission, bytes, and the time from
submission to the moment vLLM notices the end; with vLLM's own GPU time of the copies it tells queue wait and poll delay
together. Splitting those two, and curing anything, takes the adapters (`kvprobe patches`). The adapters' Prometheus
metrics are there, too, where kvprobe is active in the API server as well (`KVPROBE=on`, `kvprobe run`).
"""

from __future__ import annotations

import threading
import time
from typing import Any

from vllm.v1.kv_offload.base import OffloadingWorker
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

from kvprobe.instrument import event_log, metrics, switches

__all__ = ["ProbedOffloadingSpec", "ProbedWorker"]


class ProbedWorker(OffloadingWorker):  # type: ignore[misc]
    """Passes every call on to the real worker; what it notes for itself never raises into vLLM."""

    def __init__(self, worker: Any) -> None:
        """Wraps `worker`."""
        self._worker = worker
        self._live: dict[int, tuple[str, int, int, int]] = {}

    def __getattr__(self, name: str) -> Any:
        """Everything that is not part of the interface is the real worker's."""
        return getattr(self._worker, name)

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any, *args: Any, **kwargs: Any) -> bool:
        """GPU to CPU."""
        return self._submit("store", job_id, src_spec, self._worker.submit_store, (src_spec, dst_spec, *args), kwargs)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any, *args: Any, **kwargs: Any) -> bool:
        """CPU to GPU; since 0.33 also `expedited`, whose end vLLM waits for in the same step."""
        return self._submit("load", job_id, dst_spec, self._worker.submit_load, (src_spec, dst_spec, *args), kwargs)

    def _submit(
        self, direction: str, job_id: int, gpu_spec: Any, submit: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> bool:
        start = time.monotonic_ns()
        ok: bool = submit(job_id, *args, **kwargs)
        blocks = len(getattr(gpu_spec, "block_ids", ()))
        self._live[job_id] = (direction, start, time.monotonic_ns(), blocks)
        return ok

    def get_finished(self, *args: Any, **kwargs: Any) -> list[Any]:
        """What ended, as the real worker says."""
        results: list[Any] = self._worker.get_finished(*args, **kwargs)
        if results and not switches.killed():
            try:
                self._note(results)
            except Exception:
                self._live.clear()
        return results

    def _note(self, results: list[Any]) -> None:
        now = time.monotonic_ns()
        outstanding = len(self._live)
        for result in results:
            found = self._live.pop(result.job_id, None)
            if found is None:
                continue
            direction, start, submitted, blocks = found
            size, seconds = int(result.transfer_size or 0), result.transfer_time
            copy_ns = int(seconds * 1e9) if seconds is not None else None
            metrics.transfer("vllm", direction, size, submitted - start, None, copy_ns)
            event_log.emit(
                "transfer",
                adapter="vllm.spec",
                server="vllm",
                id=result.job_id,
                direction=direction,
                copies=blocks,
                submissions=1,
                bytes=size,
                policy="upstream",
                stream=0,
                begin_ns=start,
                build_ns=None,
                submit_ns=submitted - start,
                queue_ns=None,
                copy_ns=copy_ns,
                poll_ns=None,
                queue_and_poll_ns=max(0, now - submitted - (copy_ns or 0)),
                outstanding=outstanding,
                thread=threading.get_native_id(),
                ok=bool(result.success),
            )

    def wait(self, job_ids: set[int], *args: Any, **kwargs: Any) -> None:
        """Wait for jobs."""
        self._worker.wait(job_ids, *args, **kwargs)

    def shutdown(self, *args: Any, **kwargs: Any) -> None:
        """Release everything."""
        self._worker.shutdown(*args, **kwargs)


class ProbedOffloadingSpec(CPUOffloadingSpec):  # type: ignore[misc]
    """vLLM's CPU offloading, with its worker in a `ProbedWorker`."""

    def get_worker(self, *args: Any, **kwargs: Any) -> Any:
        """The real worker, wrapped; the same one every time."""
        worker = super().get_worker(*args, **kwargs)
        if not isinstance(worker, ProbedWorker):
            worker = self._worker = ProbedWorker(worker)
        return worker
