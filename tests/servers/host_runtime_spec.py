"""vLLM's own CPU offloading on a machine without a GPU: its real worker over the embedded host runtime.

Loaded by vLLM itself (`spec_module_path`). Only what a CPU build of torch and vLLM lacks is supplied: CUDA streams,
events, host registration and the compiled batch copy, all played by the host runtime; the KV tensors are registered
with it. The CPU's blocks lie where vLLM puts them beside a GPU: in a region that its workers share.
"""

import importlib.util
import types
from pathlib import Path

import pytest
import vllm.v1.kv_offload.cpu.gpu_worker as gpu_worker
import vllm.v1.kv_offload.cpu.host_register as host_register
import vllm.v1.kv_offload.cpu.spec as cpu_spec
from vllm.v1.kv_offload.base import CanonicalKVCaches, CanonicalKVCacheTensor


def load_host():
    path = Path(__file__).resolve().parent.parent / "patches" / "conftest.py"
    spec = importlib.util.spec_from_file_location("host_torch", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Host(pytest.MonkeyPatch())


class HostRuntimeSpec(cpu_spec.CPUOffloadingSpec):
    def get_worker(self, kv_caches):
        if self._worker:
            return self._worker
        host = load_host()
        torch, cuda = host.torch, host.cuda
        gpu_worker.torch = host.as_torch()
        gpu_worker.PIN_MEMORY = True
        gpu_worker.HAS_TRITON = False
        gpu_worker._new_descriptor_buffers = lambda n: tuple(torch.empty(n, dtype=torch.int64) for _ in range(3))
        gpu_worker.ops = types.SimpleNamespace(swap_blocks_batch=host.swap_blocks_batch)
        platform = types.SimpleNamespace(
            Stream=cuda.Stream,
            current_stream=cuda.current_stream,
            stream=cuda.stream,
            is_xpu=lambda: False,
            is_rocm=lambda: False,
            is_cuda_alike=lambda: True,
        )
        gpu_worker.current_platform = host_register.current_platform = cpu_spec.current_platform = platform
        host_register._load_cudart = lambda: types.SimpleNamespace(
            cudaHostRegister=lambda pointer, size: host.rt.host_register(pointer, size) or 0,
            cudaHostUnregister=lambda pointer: host.rt.host_unregister(pointer) or 0,
        )
        registered = set()
        for one in kv_caches.tensors:
            storage = one.tensor.untyped_storage()
            if storage.data_ptr() not in registered:
                registered.add(storage.data_ptr())
                host.rt.host_register(storage.data_ptr(), storage.nbytes())
        tensors = [
            CanonicalKVCacheTensor(t.tensor.as_subclass(host.device_tensor), t.page_size_bytes)
            for t in kv_caches.tensors
        ]
        worker = super().get_worker(CanonicalKVCaches(tensors, kv_caches.group_data_refs))
        worker.host = host
        assert worker._mmap_region.is_pinned
        return worker


class PooledSpec(HostRuntimeSpec):
    """The submitter has the copies from the first transfer on, as if auto had decided so."""

    def get_worker(self, kv_caches):
        from kvprobe.instrument import installation
        from kvprobe.instrument.submissions import POOLED

        worker = super().get_worker(kv_caches)
        adapter = installation._adapters["vllm.copies.batch"]
        for handler, direction in ((worker._store_handler, "store"), (worker._load_handler, "load")):
            path = adapter.path_of(handler, direction)
            path.auto.active = False
            path.auto.stand_on(POOLED)
        return worker


class LossySpec(HostRuntimeSpec):
    """One block of one layer is missing in every load."""

    def get_worker(self, kv_caches):
        worker = super().get_worker(kv_caches)
        swap = worker.host.swap_blocks_batch

        def lossy(src, dst, sizes, **more):
            swap(src[1:], dst[1:], sizes[1:], **more)

        worker._load_handler._swap_blocks_batch = lossy
        return worker
