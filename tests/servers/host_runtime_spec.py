"""vLLM's own CPU offloading on a machine without a GPU: its real worker over the embedded host runtime.

Loaded by vLLM itself (`spec_module_path`). Only what a CPU build of torch and vLLM lacks is supplied: CUDA streams,
events and the compiled batch copy, all played by the host runtime; the KV tensors are registered with it.
"""

import importlib.util
import types
from pathlib import Path

import pytest
import vllm.v1.kv_offload.cpu.gpu_worker as gpu_worker
from vllm.v1.kv_offload.base import CanonicalKVCaches, CanonicalKVCacheTensor
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec


def load_host():
    path = Path(__file__).resolve().parent.parent / "patches" / "conftest.py"
    spec = importlib.util.spec_from_file_location("host_torch", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Host(pytest.MonkeyPatch())


class HostRuntimeSpec(CPUOffloadingSpec):
    def get_worker(self, kv_caches):
        if self._worker:
            return self._worker
        host = load_host()
        torch, cuda = host.torch, host.cuda
        gpu_worker.torch = host.as_torch()
        gpu_worker.PIN_MEMORY = True
        gpu_worker._new_descriptor_buffers = lambda n: tuple(torch.empty(n, dtype=torch.int64) for _ in range(3))
        gpu_worker.ops = types.SimpleNamespace(swap_blocks_batch=host.swap_blocks_batch)
        gpu_worker.current_platform = types.SimpleNamespace(
            Stream=cuda.Stream,
            current_stream=cuda.current_stream,
            stream=cuda.stream,
            is_xpu=lambda: False,
            is_rocm=lambda: True,
            is_cuda_alike=lambda: True,
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
        caches = CanonicalKVCaches(tensors, kv_caches.group_data_refs)
        self._worker = gpu_worker.CPUOffloadingWorker(caches, self.blocks_per_chunk, self.num_chunks)
        self._worker.host = host
        return self._worker
