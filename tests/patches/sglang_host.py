"""SGLang's own controller, transfer engine and host pools over the host runtime, for the tests of its adapters.

Of SGLang nothing is replaced but what is compiled (its copy kernels and the direct back end's three functions, which do
here what their source does), what allocates memory, and modules that these import and do not use.
"""

import contextlib
import ctypes
import dataclasses
import gc
import importlib
import itertools
import os
import sys
import threading
import types

from kvprobe.instrument import installation
from kvprobe.patches.sglang_copies import DIRECT

ITERATIONS = int(os.environ.get("KVPROBE_RACE_ITERATIONS", "20"))
WORK_NS = 200_000
LONG_NS = 5_000_000
HELD_NS = [LONG_NS << i for i in range(10)]  # where the race must be lost: one outlasts any delay in submitting
VERSION = "0.5.23"
FILES = ("sglang/srt/mem_cache/", "sglang/srt/managers/", "sglang/kernels/ops/")
ROW = 256  # bytes of a token, layer and plane (keys, values)
LAYERS = 2
WIDTH = 9  # tokens of a burst in a race
EVERY = slice(None)


class Kernels:
    """What SGLang compiles: its copy kernels, as kernels and copies of the host runtime."""

    def __init__(self, host):
        self.host, self.todo, self.keys = host, {}, itertools.count(1)
        self.trampoline = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda key: self.todo.pop(key)())

    def kernel(self, function, stream, duration_ns=2_000):
        """A kernel with the effects of `function` when it ends."""
        key = next(self.keys)
        self.todo[key] = function
        code = self.host.rt.library.kvhostLaunchWork(
            ctypes.c_void_p(stream), self.trampoline, ctypes.c_void_p(key), ctypes.c_uint64(duration_ns)
        )
        assert code == 0

    def indices(self, values):
        """Where a kernel finds its indices."""
        return values

    def launch_all_lf_pf_staged(
        self, dst_k, dst_v, dst_indices, staging_k, staging_v, pages, keys, values, page_size
    ):  # staged_write_back.cuh: one relayout kernel into the staging buffers, then a copy a page and buffer
        host, stream, torch = self.host, self.host.current[-1], self.host.torch
        rows = self.indices((pages[:, None] + torch.arange(page_size)).view(-1))

        def relayout():
            for layer, (k, v) in enumerate(zip(keys, values, strict=True)):
                plain(staging_k)[:, layer] = plain(k)[rows, 0]
                plain(staging_v)[:, layer] = plain(v)[rows, 0]

        self.kernel(relayout, stream)
        for staging, dst in ((staging_k, dst_k), (staging_v, dst_v)):
            row = staging.stride(0)
            for page, slot in enumerate(dst_indices[::page_size].tolist()):
                source = staging.data_ptr() + page * page_size * row
                host.rt.memcpy_async(dst.data_ptr() + slot * row, source, page_size * row, "d2h", stream)

    def launch_one(self, dst_k, dst_v, dst_indices, src_k, src_v, src_indices):
        """hicache.cuh: one kernel a layer that reads pinned host memory in place."""

        def gather():
            plain(dst_k)[dst_indices] = src_k[src_indices]
            plain(dst_v)[dst_indices] = src_v[src_indices]

        self.kernel(gather, self.host.current[-1])

    def transfer_kv_direct(self, src_layers, dst_layers, src_indices, dst_indices, page_size):
        """One copy a layer and run of slots that are neighbours on both sides."""
        rt, stream = self.host.rt, self.host.current[-1]
        pairs = list(zip(src_indices.tolist(), dst_indices.tolist(), strict=True))
        starts = [i for i, (a, b) in enumerate(pairs) if not i or pairs[i - 1] != (a - 1, b - 1)]
        for start, stop in zip(starts, [*starts[1:], len(pairs)], strict=True):
            source, target = pairs[start]
            for src, dst in zip(src_layers, dst_layers, strict=True):
                kind, whole = "d2h" if src.is_cuda else "h2d", src.is_contiguous() and dst.is_contiguous()
                for i in range(1 if whole else stop - start):  # of strided rows a copy each, for a two-dimensional one
                    size = (stop - start if whole else 1) * src[0].numel()
                    rt.memcpy_async(dst[target + i].data_ptr(), src[source + i].data_ptr(), size, kind, stream)

    def transfer_kv_per_layer_direct_pf_lf(self, src_ptrs, dst_ptrs, src_indices, dst_indices, layer_id, page_size):
        """One batch: a page and plane of a layer each, from (page, layer, slot) to the layer's slots."""
        self.pages(src_ptrs, dst_ptrs, src_indices, dst_indices, layer_id, page_size, store=False)

    def transfer_kv_all_layer_direct_lf_pf(self, src_ptrs, dst_ptrs, src_indices, dst_indices, page_size):
        """One batch: a page, layer and plane each, the other way."""
        self.pages(dst_ptrs, src_ptrs, dst_indices, src_indices, 0, page_size, store=True)

    def pages(self, hosts, layers, host_indices, device_indices, first, page_size, store):
        rt, each = self.host.rt, len(layers) // len(hosts)
        found = []
        for slot, row in zip(host_indices[::page_size].tolist(), device_indices[::page_size].tolist(), strict=True):
            for number, layer in enumerate(layers):
                there = hosts[number // each][slot // page_size, first + number % each].data_ptr()
                here, size = layer.data_ptr() + row * layer.stride(0), page_size * layer.stride(0)
                found.append((there, here, size) if store else (here, there, size))
        if found:
            rt.memcpy_batch_async(*map(list, zip(*found, strict=True)), self.host.current[-1])


class GpuKernels(Kernels):
    """The same on a GPU: torch's own kernels behind one that spins."""

    def kernel(self, function, stream, duration_ns=2_000):
        self.host.rt.launch_delay(stream, duration_ns)
        with self.host.cuda.stream(self.host.cuda.ExternalStream(stream)):
            function()

    def indices(self, values):
        return values.pin_memory().to("cuda", non_blocking=True)

    def launch_one(self, dst_k, dst_v, dst_indices, src_k, src_v, src_indices):
        rt, stream = self.host.rt, self.host.current[-1]
        for dst, src in ((dst_k, src_k), (dst_v, src_v)):
            for to, of in zip(dst_indices.tolist(), src_indices.tolist(), strict=True):
                rt.memcpy_async(dst[to].data_ptr(), src[of].data_ptr(), ROW, "h2d", stream)


def plain(tensor):
    import torch

    return tensor.as_subclass(torch.Tensor)


def module(name, **names):
    made = types.ModuleType(name)
    made.__dict__.update(names)
    return made


def stubs(host, kernels):
    """Modules that SGLang's own import: packages whose __init__ needs all of SGLang, and what is not used here."""
    setting = types.SimpleNamespace(get=lambda: 0)
    flags = {f"is_{name}": lambda on=name == "cuda": on for name in ("cuda", "hip", "npu", "xpu", "mps")}

    def allocate(dims, dtype, **_):
        made = host.tensor(dims, dtype, device=False)
        made._sglang_cuda_host_registered_ranges = [(made.data_ptr(), made.numel() * dtype.itemsize)]
        return made

    unused = module("", __getattr__=lambda name: object)
    capabilities = types.SimpleNamespace(hicache_device_kernels=True)
    return {
        "sglang.srt.environ": module(
            "environ", envs=module("envs", __getattr__=lambda name: setting), __getattr__=unused.__getattr__
        ),
        "sglang.srt.utils": module("utils", get_device_module=lambda: host.cuda, **flags),
        "sglang.srt.platforms": module("platforms", current_platform=types.SimpleNamespace(capabilities=capabilities)),
        "sglang.srt.runtime_context": unused,
        "sglang.srt.layers.dp_attention": unused,
        "sglang.srt.layers.dcp.layout": module("layout", maybe_dcp_kernel_indices=lambda indices, *_: indices),
        "sglang.srt.mem_cache.utils": unused,
        "sglang.srt.mem_cache.memory_pool": module("m", __getattr__=lambda name: type(name, (), {})),
        "sglang.srt.mem_cache.host_memory": module("host_memory", available_host_memory_bytes=lambda **_: 1 << 60),
        "sglang.srt.mem_cache.pool_host.common": module(
            "common",
            ALLOC_MEMORY_FUNCS=dict.fromkeys(("cpu", "cuda"), allocate),
            get_allocator_from_storage=lambda kind: None,
            make_kernel_ptr_table=lambda tensors, *_, **__: tensors,
            _cuda_host_unregister=lambda buffer: None,
        ),
        "sglang.kernels.kernel_api_logging": module("logging", debug_kernel_api=lambda function: function),
        "sglang.kernels.jit.utils": module(
            "jit",
            cache_once=lambda function: function,
            is_hip_runtime=lambda: False,
            load_jit=lambda *_, **__: kernels,
            make_cpp_args=lambda *args: args,
        ),
        "sgl_kernel": module("sgl_kernel", __path__=[]),
        "sgl_kernel.kvcacheio": module(
            "kvcacheio", **{name: getattr(kernels, name) for name in DIRECT}, __getattr__=lambda name: None
        ),
    }


class Engine:
    """HiCacheController with its engine and a host pool: page_first and the kernel backend as by default, or direct.

    A pool of keys and values, or (`mla`) of one plane.
    """

    def __init__(
        self, host, root, monkeypatch, tokens, backend="kernel", page_size=1, layout="", mla=False, version=VERSION
    ):
        self.host, self.tokens, self.version = host, tokens, version
        self.kernels = (GpuKernels if host.rt.provider != "host" else Kernels)(host)
        sys.path.insert(0, str(root))  # its dist-info says which version is "installed"
        importlib.invalidate_caches()
        for name in (
            "",
            ".srt",
            ".srt.mem_cache",
            ".srt.mem_cache.pool_host",
            ".srt.managers",
            ".kernels",
            ".kernels.jit",
            ".kernels.ops",
            ".kernels.ops.kvcache",
            ".srt.layers",
            ".srt.layers.dcp",
        ):
            package = module(f"sglang{name}", __path__=[str(root / f"sglang{name}".replace(".", "/"))])
            monkeypatch.setitem(sys.modules, package.__name__, package)
        for name, stub in stubs(host, self.kernels).items():
            monkeypatch.setitem(sys.modules, name, stub)
        from sglang.srt.managers import cache_controller
        from sglang.srt.mem_cache import l2_transfer

        self.module, self.controllers = l2_transfer, cache_controller
        l2_transfer.torch = host.as_torch()
        layout = layout or ("page_first" if backend == "kernel" else "layer_first")
        self.planes = 1 if mla else 2
        whole = self.on_gpu((self.planes * LAYERS, tokens, 1, ROW))  # neighbours on both sides, as in layer_first
        self.layers = [whole[i] for i in range(len(whole))]
        self.gpu_pool = types.SimpleNamespace(
            layer_num=LAYERS, device="cpu", register_layer_transfer_counter=lambda counter: None
        )
        if version in ("0.5.21", "0.5.22"):
            self.pool = self.pool_of_the_gpus(page_size, layout)
        else:
            self.pool = self.pool_of_one_plane(page_size, layout) if mla else self.pool_of_two_planes(page_size, layout)
        self.done_events = {}
        allocator = types.SimpleNamespace(
            get_kvcache=lambda: self.gpu_pool, set_hicache_transfer_done_event=self.done_events.__setitem__
        )
        self.controller = cache_controller.HiCacheController(
            allocator, self.pool, page_size, None, threading.Event(), io_backend=backend
        )
        self.forward_stream, self.schedule_stream = host.cuda.ExternalStream(host.compute), host.cuda.Stream()
        self.controller.write_fence_stream = self.controller.load_fence_stream = self.forward_stream
        self.engine = self.controller.l2_transfer_engine

    def pool_of_the_gpus(self, page_size, layout):
        """Multi-head attention up to 0.5.22: the host's pool asks the GPU's."""
        from sglang.srt.mem_cache.pool_host import mha

        self.mha, keys, values = mha, self.layers[:LAYERS], self.layers[LAYERS:]
        sizes = {"head_num": 1, "head_dim": ROW, "v_head_dim": ROW, "row_dim": ROW, "size": self.tokens}
        layers = {"start_layer": 0, "end_layer": LAYERS, "layer_shard_enabled": False}
        buffers = {"k_buffer": keys, "v_buffer": values, "k_data_ptrs": keys, "v_data_ptrs": values}
        vars(self.gpu_pool).update(**sizes, **layers, **buffers, store_dtype=self.host.torch.uint8)
        return mha.MHATokenToKVPoolHost(self.gpu_pool, 1, 0, page_size, layout)

    def pool_of_two_planes(self, page_size, layout):
        """Multi-head attention: keys and values."""
        from sglang.srt.mem_cache import device_pool_info as info
        from sglang.srt.mem_cache.pool_host import mha

        self.mha, torch = mha, self.host.torch
        keys, values = self.layers[:LAYERS], self.layers[LAYERS:]
        buffers = info.KVBuffers(k=tuple(keys), v=tuple(values), k_data_ptrs=keys, v_data_ptrs=values, layout=None)
        staging = [self.on_gpu((64 * page_size, LAYERS, 1, ROW)) for _ in range(2)]
        described = info.MHABufferInfo(
            buffers=buffers,
            page_size=page_size,
            head_num=1,
            head_dim=ROW,
            v_head_dim=ROW,
            dtype=torch.uint8,
            device=keys[0].device,
        )
        sizes = {"device_capacity_tokens": 0, "start_layer": 0, "end_layer": LAYERS, "host_token_capacity": self.tokens}
        return mha.MHATokenToKVPoolHost(described, 0, 0, page_size, layout, write_back_staging=tuple(staging), **sizes)

    def pool_of_one_plane(self, page_size, layout):
        """Multi-head latent attention: one row a token and layer."""
        from sglang.srt.mem_cache import device_pool_info as info
        from sglang.srt.mem_cache.pool_host import mla

        described = info.MLABufferInfo(
            buffers=tuple(self.layers),
            data_ptrs=self.layers,
            layer_indices=tuple(range(LAYERS)),
            device_layer_num=LAYERS,
            page_size=page_size,
            kv_lora_rank=ROW - 64,
            qk_rope_head_dim=64,
            kv_cache_dim=ROW,
            dtype=self.host.torch.uint8,
            device=self.layers[0].device,
        )
        sizes = {"device_capacity_tokens": 0, "start_layer": 0, "end_layer": LAYERS, "host_token_capacity": self.tokens}
        return mla.MLATokenToKVPoolHost(described, 0, 0, page_size, layout, target_layer_num=LAYERS, **sizes)

    def on_gpu(self, shape):
        return self.host.tensor(shape, self.host.torch.uint8, device=True)

    def _operation(self, host_indices, device_indices):
        tensor = self.host.torch.tensor
        return self.controllers.CacheOperation(tensor(host_indices), tensor(device_indices), node_id=1)

    def store(self, host_indices, device_indices, fence=True):
        """HiCacheController.start_writing on the scheduler's stream; its acknowledgement."""
        self.controller.write_queue.append(self._operation(host_indices, device_indices))
        self.controller.write_fence_stream = self.forward_stream if fence else None
        with self.host.cuda.stream(self.schedule_stream):
            self.controller.start_writing()
        ack = self.controller.ack_write_queue.pop()
        told = [key[1] for key, event in self.done_events.items() if event is ack.finish_event]
        assert told == (["write"] if self.version != "0.5.21" else [])  # the allocator is told since 0.5.22
        return ack

    def load(self, host_indices, device_indices, fence=True):
        """HiCacheController.start_loading; its acknowledgement. `layer_done_counter` has the layers' events."""
        self.controller.load_queue.append(self._operation(host_indices, device_indices))
        self.controller.load_fence_stream = self.forward_stream if fence else None
        with self.host.cuda.stream(self.schedule_stream):
            self.producer = self.controller.start_loading()
        return self.controller.ack_load_queue.pop()

    def gpu(self, tokens=EVERY):
        """All bytes of these tokens on the GPU, a row a plane and layer."""
        return self.host.torch.stack([plain(layer)[tokens].reshape(-1) for layer in self.layers])

    def cpu(self, tokens=EVERY):
        """The same of the host pool."""
        buffer = self.pool.kv_buffer if self.planes > 1 else self.pool.kv_buffer[None]
        if self.pool.layout == "page_first":  # (plane, token, layer, ...)
            buffer = buffer.transpose(1, 2)
        elif self.pool.layout == "page_first_direct":  # (plane, page, layer, slot, ...)
            buffer = buffer.transpose(1, 2).flatten(2, 3)
        return buffer[:, :, tokens].reshape(self.planes * LAYERS, -1)

    def fill(self, value=None, tokens=EVERY):
        for layer in self.layers:
            part = plain(layer)[tokens]
            part.copy_(self.host.torch.randint(0, 255, part.shape) if value is None else part.fill_(value))

    def cpu_fill(self, value, tokens):
        """Put a value into these slots of the host pool."""
        buffer = self.pool.kv_buffer if self.planes > 1 else self.pool.kv_buffer[None]
        if self.pool.layout == "layer_first":
            buffer[:, :, tokens] = value
        elif self.pool.layout == "page_first":
            buffer[:, tokens] = value
        else:
            slots, page = self.host.torch.tensor(tokens), self.pool.page_size
            buffer[:, slots // page, :, slots % page] = value

    def roundtrip(self, parts=8):
        self.fill()
        before, size = self.gpu(), self.tokens // parts
        page = self.pool.page_size
        for i in range(parts):
            ids = list(range(i * size, (i + 1) * size))
            pages = [ids[j : j + page] for j in range(0, size, page)]
            ack = self.store([token for part in reversed(pages) for token in part], ids)
        ack.finish_event.synchronize()  # the newest implies all earlier ones
        assert ack.start_event.elapsed_time(ack.finish_event) > 0
        self.fill(0)
        for i in range(parts):
            ids = list(range(i * size, (i + 1) * size))
            pages = [ids[j : j + page] for j in range(0, size, page)]
            ack = self.load([token for part in reversed(pages) for token in part], ids)
            ack.finish_event.synchronize()  # the controller has three sets of layer events
        return self.host.torch.equal(before, self.gpu())


def adapter():
    return installation._adapters["sglang.l2_transfer"]


def path_of(one, direction):
    return adapter().path_of(one.engine, direction)


def stand(one, direction, rung, **limits):
    """Put a path on a rung for good, with the launch queue's limits as given."""
    path = path_of(one, direction)
    path.device.limits = dataclasses.replace(path.device.limits, **limits)
    path.auto.stand_on(rung)
    path.auto.active = False
    return path


@contextlib.contextmanager
def forward(one):
    """A forward that runs until the block is left (120 s at most, so that a submission that waits for it fails)."""
    gc.collect()  # memory that Python frees only now and then: cudaFree waits for all work, so for this forward
    library = one.host.rt.library
    library.kvhostGateCreate.restype = ctypes.c_void_p
    gate = ctypes.c_void_p(library.kvhostGateCreate())
    assert library.kvhostGateLaunch(gate, ctypes.c_void_p(one.host.compute)) == 0
    over = one.host.cuda.Event()
    over.record(one.forward_stream)
    late = threading.Timer(120, library.kvhostGateOpen, [gate])
    late.start()
    try:
        yield over
    finally:
        late.cancel()
        late.join()
        library.kvhostGateOpen(gate)


class Race:
    """One ordering under test: `unordered` takes kvprobe's waits out while a burst is submitted."""

    def __init__(self, one, monkeypatch):
        self.one, self.rt, self.off = one, one.host.rt, ""
        streams = one.host.waiting
        self.own = {name: getattr(streams, name) for name in ("wait_stream", "wait_event")}
        for name, function in self.own.items():

            def wait(stream, other, name=name, function=function):
                if self.off != name:
                    function(stream, other)

            monkeypatch.setattr(streams, name, wait)

    @contextlib.contextmanager
    def unordered(self, what):
        """`what`: `wait_stream` (fences), `wait_event` (after the burst or part before), or nothing."""
        self.off = what
        yield
        self.off = ""

    def write(self, value, tokens, work_ns):
        """A forward that writes these tokens at its very end."""
        self.one.kernels.kernel(lambda: self.one.fill(value, tokens), self.one.host.compute, work_ns)

    def fence(self, value, work_ns, broken):
        """A store copies what the forward before it wrote."""
        tokens = list(range(WIDTH))
        self.write(value, slice(0, WIDTH), work_ns)
        with self.unordered("wait_stream" if broken else ""):
            ack = self.one.store(tokens, tokens)
        ack.finish_event.synchronize()
        right = bool((self.one.cpu(tokens) == value).all())
        self.rt.synchronize()
        return right

    def bursts(self, value, work_ns, broken):
        """The later one of two bursts into the same slots wins, and its end implies the end of the first.

        The later one finds no fence on SGLang's stream, which is another one: only kvprobe's wait can order it.
        """
        tokens, others = list(range(WIDTH)), list(range(WIDTH, 2 * WIDTH))
        self.one.fill(value, slice(WIDTH, 2 * WIDTH))
        self.rt.synchronize()
        self.write(0, slice(0, WIDTH), work_ns)
        first = self.one.store(tokens, tokens)
        own, self.one.engine.device_to_host_stream = self.one.engine.device_to_host_stream, self.idle
        with self.unordered("wait_event" if broken else ""):
            ack = self.one.store(tokens, others, fence=False)
        self.one.engine.device_to_host_stream = own
        ack.finish_event.synchronize()
        right = first.finish_event.query()
        self.rt.synchronize()
        return right and bool((self.one.cpu(tokens) == value).all())

    def parts(self, value, work_ns, broken):
        """Parts of a burst share the staging buffer: each must wait for the one before."""
        tokens = list(range(4 * WIDTH))
        self.one.fill(value, slice(0, 4 * WIDTH))
        for layer in self.one.layers:  # every token differs
            plain(layer)[: 4 * WIDTH, 0, 0] = self.one.host.torch.arange(4 * WIDTH)
        before = self.one.gpu(tokens).cpu()
        self.rt.launch_delay(self.one.host.compute, work_ns)
        kernel, over = self.one.kernels.kernel, self.rt.event_create()
        self.rt.event_record(over, self.one.host.compute)
        if broken:  # relayouts of all parts begin when the forward ends

            def together(function, stream):
                self.rt.stream_wait_event(stream, over)
                kernel(function, stream)

            self.one.kernels.kernel = together
        with self.unordered("wait_event" if broken else ""):
            ack = self.one.store(tokens, tokens)
        self.one.kernels.kernel = kernel
        ack.finish_event.synchronize()
        self.rt.synchronize()
        self.rt.event_destroy(over)
        return self.one.host.torch.equal(self.one.cpu(tokens), before)

    def load_fence(self, value, work_ns, broken):
        """A load comes after the forward that still writes to its pages."""
        tokens = list(range(WIDTH))
        self.one.cpu_fill(value, tokens)
        self.write(255, slice(0, WIDTH), work_ns)
        with self.unordered("wait_stream" if broken else ""):
            ack = self.one.load(tokens, tokens)
        ack.finish_event.synchronize()
        self.rt.synchronize()
        return bool((self.one.gpu(tokens) == value).all())

    def layers(self, value, work_ns, broken):
        """Compute that waits for a layer's event reads what that layer's load brought."""
        tokens, read = list(range(WIDTH)), []
        self.one.cpu_fill(value, tokens)
        self.one.fill(255, slice(0, WIDTH))
        self.rt.synchronize()
        self.rt.launch_delay(self.one.host.compute, work_ns)  # the load is fenced behind this forward
        self.one.load(tokens, tokens)
        counter = self.one.controller.layer_done_counter
        counter.set_consumer(self.one.producer)
        with self.one.host.cuda.stream(self.idle), self.unordered("wait_event" if broken else ""):
            for layer in range(LAYERS):
                counter.wait_until(layer)
                rows = [plain(buffer)[:WIDTH] for buffer in self.one.layers[layer::LAYERS]]
                self.one.kernels.kernel(
                    lambda rows=rows: read.extend(bool((row == value).all()) for row in rows), self.idle.cuda_stream
                )
        self.rt.synchronize()
        return read == [True] * 2 * LAYERS
