"""SGLang's hardware where there is no GPU: a platform plug-in that computes on the CPU and copies by the host runtime.

SGLang finds it by the entry point group `sglang.srt.platforms`, its own door for hardware that it does not know, and
takes its own torch code where it would take a GPU's kernels. Played is what HiCache asks CUDA for, and no more:

* `torch.cpu.Stream`, `Event` and their like, on a CPU shells without effect, are the host runtime's. Arithmetic is done
  at once, by the thread that asks for it: where a stream of computing is told to wait, the thread waits.
* The KV pool lies in the runtime's device memory, and `torch.cuda.cudart()` registers the host pool with it.
* `sgl_kernel.kvcacheio`, which is compiled: of the direct back end, the copies that its published source makes.

torchvision, whose builds want CUDA and which a text model does not use, has names and nothing behind them.
`TEST_LOSE=load` leaves out what loads should copy: then the model must say something else.
"""

import functools
import importlib.util
import os
import sys
import types
from importlib.machinery import ModuleSpec
from pathlib import Path


def activate():
    """The platform's class: what SGLang asks for in each of its processes, before it imports much else."""
    if not any(isinstance(finder, Torchvision) for finder in sys.meta_path):
        sys.meta_path.insert(0, Torchvision())
    return "sglang_platform.HostRuntimePlatform"


def __getattr__(name):
    if name != "HostRuntimePlatform":  # made when it is asked for: SGLang is not imported before
        raise AttributeError(name)
    return platform()


@functools.cache
def platform():
    from sglang.srt.platforms.cpu import CpuDeviceMixin
    from sglang.srt.platforms.device_mixin import PlatformEnum
    from sglang.srt.platforms.interface import SRTPlatform

    class HostRuntimePlatform(CpuDeviceMixin, SRTPlatform):
        _enum, device_name = PlatformEnum.OOT, "host runtime"

        def get_default_attention_backend(self):
            return "torch_native"

        def get_compile_backend(self, mode=None):
            return "eager"

        def init_backend(self):
            host()

        def get_kv_pool_cls(self, *, kind):
            return kv_pool() if kind == "mha" else None

    return HostRuntimePlatform


def kv_pool():
    """SGLang's own pool, whose buffers lie in the runtime's device memory; copies go by the runtime from now on."""
    import torch
    from sglang.srt.mem_cache import l2_transfer
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
    from sglang.srt.mem_cache.pool_host import mha

    l2_transfer.device_module, l2_transfer.torch = host().cuda, host().as_torch()  # no thread waits for these streams
    copies = Copies(host())
    for name in dir(copies):
        if name.startswith("transfer_kv"):
            setattr(mha, name, getattr(copies, name))

    class Pool(MHATokenToKVPool):
        def _create_buffers_normal(self):
            super()._create_buffers_normal()
            for name in ("k_buffer", "v_buffer"):
                own = [host().tensor(t.shape, t.dtype, device=True) for t in getattr(self, name)]
                setattr(self, name, [tensor.as_subclass(torch.Tensor) for tensor in own])

    return Pool


@functools.cache
def host():
    """The host runtime of this process, in the place of torch's streams and events on a CPU."""
    import pytest
    import torch

    path = Path(__file__).resolve().parent.parent / "patches" / "conftest.py"
    spec = importlib.util.spec_from_file_location("host_torch", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    made = module.Host(pytest.MonkeyPatch())
    cuda, library = made.cuda, made.rt.library

    class ComputeStream(cuda.Stream):
        """A stream whose work is done at once, by the thread: that waits where the stream is told to wait."""

        def wait_event(self, event):
            super().wait_event(event)
            self.synchronize()

        def wait_stream(self, other):
            super().wait_stream(other)
            self.synchronize()

    def current_stream(device=None):
        found = ComputeStream.__new__(ComputeStream)
        found.cuda_stream = made.current[-1]
        return found

    class StreamContext:
        """Makes a stream the current one; entered more than once."""

        def __init__(self, stream):
            self.stream = stream

        def __enter__(self):
            made.current.append(self.stream.cuda_stream)

        def __exit__(self, *error):
            made.current.pop()

    names = {"Event": cuda.Event, "Stream": ComputeStream, "stream": StreamContext, "StreamContext": StreamContext}
    for name, value in {**names, "current_stream": current_stream}.items():
        setattr(torch.cpu, name, value)
    torch.cuda.cudart = lambda: types.SimpleNamespace(
        cudaHostRegister=library.cudaHostRegister,
        cudaHostUnregister=library.cudaHostUnregister,
        cudaGetErrorString=str,
    )
    return made


class Copies:
    """`sgl_kernel.kvcacheio` of the direct back end, over the host runtime, on the current stream."""

    def __init__(self, host):
        self.host, self.lost = host, os.environ.get("TEST_LOSE") == "load"

    def transfer_kv_direct(self, src_layers, dst_layers, src_indices, dst_indices, page_size):
        """Layer first on both sides: a copy a run of neighbours and layer."""
        store = len(src_layers) > 2  # all layers at once; a load is of one
        pairs = list(zip(src_indices.tolist(), dst_indices.tolist(), strict=True))
        starts = [i for i, (a, b) in enumerate(pairs) if not i or pairs[i - 1] != (a - 1, b - 1)]
        for start, stop in zip(starts, [*starts[1:], len(pairs)], strict=True):
            source, target = pairs[start]
            for src, dst in zip(src_layers, dst_layers, strict=True):
                rows, row = stop - start, src.stride(0) * src.element_size()
                if store or not self.lost:
                    addresses = dst[target].data_ptr(), src[source].data_ptr()
                    kind = "d2h" if store else "h2d"
                    self.host.rt.memcpy_async(*addresses, rows * row, kind, self.host.current[-1])

    def transfer_kv_all_layer_direct_lf_pf(self, src_ptrs, dst_ptrs, src_indices, dst_indices, page_size):
        """From layers to pages of all layers: one batch, a copy a page, layer and plane."""
        layers = len(src_ptrs) // 2
        self.batch(
            (dst_ptrs[plane][target // page_size, layer], src_ptrs[plane * layers + layer][source : source + page_size])
            for source, target in self.pages(src_indices, dst_indices, page_size)
            for layer in range(layers)
            for plane in range(2)
        )

    def transfer_kv_per_layer_direct_pf_lf(self, src_ptrs, dst_ptrs, src_indices, dst_indices, layer_id, page_size):
        """From pages of all layers to one layer: one batch, a copy a page and plane."""
        self.batch(
            (dst[target : target + page_size], src[source // page_size, layer_id])
            for source, target in self.pages(src_indices, dst_indices, page_size)
            for src, dst in zip(src_ptrs, dst_ptrs, strict=True)
        )

    @staticmethod
    def pages(src_indices, dst_indices, page_size):
        return zip(src_indices[::page_size].tolist(), dst_indices[::page_size].tolist(), strict=True)

    def batch(self, pairs):
        copies = [(dst.data_ptr(), src.data_ptr(), src.numel() * src.element_size()) for dst, src in pairs]
        self.host.rt.memcpy_batch_async(*zip(*copies, strict=True), self.host.current[-1])


class Torchvision:
    """Finds and loads a torchvision of which every name is there."""

    def find_spec(self, name, path=None, target=None):
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] == "torchvision" else None

    def create_module(self, spec):
        return Names(spec.name)

    def exec_module(self, module):
        module.__version__ = "0"


class Names(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Name(name, (), {})


class Name(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return name
