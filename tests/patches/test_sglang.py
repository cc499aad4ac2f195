"""SGLang's own controller, transfer engine and host pool over the host runtime: cures, races, failures, order.

Of SGLang nothing is replaced but what is compiled (its copy kernels and `transfer_kv_direct`, which do here what their
source does), what allocates memory, and modules that the three import and do not use. Race tests prove themselves:
with an ordering taken out on purpose the wrong bytes must be seen (else they would prove nothing), with it never. The
number of iterations is `KVPROBE_RACE_ITERATIONS` (default 20 a case; 10,000 for the full run);
`KVPROBE_TEST_DEVICE=cuda -k no_order_is_lost` runs them on a GPU.
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

import pytest

import kvprobe.instrument as instrument
from kvprobe.instrument import installation
from kvprobe.instrument.submissions import Rung

ITERATIONS = int(os.environ.get("KVPROBE_RACE_ITERATIONS", "20"))
WORK_NS = 200_000
LONG_NS = 5_000_000
HELD_NS = [LONG_NS << i for i in range(10)]  # where the race must be lost: one outlasts any delay in submitting
VERSION = "0.5.23"
ROW = 256  # bytes of a token, layer and plane (keys, values)
LAYERS = 2
EVERY = slice(None)


# ---- SGLang over the host runtime ------------------------------------------------------------------------------


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
                row, kind = src.stride(0), "d2h" if src.is_cuda else "h2d"
                addresses = dst.data_ptr() + target * row, src.data_ptr() + source * row
                rt.memcpy_async(*addresses, (stop - start) * row, kind, stream)


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
    allocate = dict.fromkeys(("cpu", "cuda"), lambda dims, dtype, **_: host.tensor(dims, dtype, device=False))
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
        "sglang.srt.mem_cache.utils": unused,
        "sglang.srt.mem_cache.memory_pool": module("m", __getattr__=lambda name: type(name, (), {})),
        "sglang.srt.mem_cache.host_memory": module("host_memory", available_host_memory_bytes=lambda **_: 1 << 60),
        "sglang.srt.mem_cache.pool_host.common": module(
            "common",
            ALLOC_MEMORY_FUNCS=allocate,
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
            "kvcacheio", transfer_kv_direct=kernels.transfer_kv_direct, __getattr__=lambda name: None
        ),
    }


class Engine:
    """HiCacheController with its engine and a host pool: page_first and the kernel backend as by default, or direct."""

    def __init__(self, host, root, monkeypatch, tokens=512, backend="kernel", page_size=1):
        self.host, self.tokens, torch = host, tokens, host.torch
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
        ):
            package = module(f"sglang{name}", __path__=[str(root / f"sglang{name}".replace(".", "/"))])
            monkeypatch.setitem(sys.modules, package.__name__, package)
        for name, stub in stubs(host, self.kernels).items():
            monkeypatch.setitem(sys.modules, name, stub)
        from sglang.srt.managers import cache_controller
        from sglang.srt.mem_cache import device_pool_info, l2_transfer
        from sglang.srt.mem_cache.pool_host import mha

        self.module, self.controllers, self.mha = l2_transfer, cache_controller, mha
        l2_transfer.torch = host.as_torch()
        keys, values = ([self.on_gpu((tokens, 1, ROW)) for _ in range(LAYERS)] for _ in range(2))
        self.layers = [*keys, *values]
        buffers = device_pool_info.KVBuffers(
            k=tuple(keys), v=tuple(values), k_data_ptrs=keys, v_data_ptrs=values, layout=None
        )
        staging = [self.on_gpu((64 * page_size, LAYERS, 1, ROW)) for _ in range(2)]
        self.pool = mha.MHATokenToKVPoolHost(
            device_pool_info.MHABufferInfo(
                buffers=buffers,
                page_size=page_size,
                head_num=1,
                head_dim=ROW,
                v_head_dim=ROW,
                dtype=torch.uint8,
                device=keys[0].device,
            ),
            0,
            0,
            page_size,
            "page_first" if backend == "kernel" else "layer_first",
            device_capacity_tokens=0,
            start_layer=0,
            end_layer=LAYERS,
            host_token_capacity=tokens,
            write_back_staging=tuple(staging),
        )
        self.gpu_pool = types.SimpleNamespace(
            layer_num=LAYERS, device="cpu", register_layer_transfer_counter=lambda counter: None
        )
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
        assert [key[1] for key, event in self.done_events.items() if event is ack.finish_event] == ["write"]
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
        buffer = self.pool.kv_buffer  # (plane, token, layer, ...) or, layer first, (plane, layer, token, ...)
        if self.pool.layout == "page_first":
            buffer = buffer.transpose(1, 2)
        return buffer[:, :, tokens].reshape(2 * LAYERS, -1)

    def fill(self, value=None, tokens=EVERY):
        for layer in self.layers:
            part = plain(layer)[tokens]
            part.copy_(self.host.torch.randint(0, 255, part.shape) if value is None else part.fill_(value))

    def cpu_fill(self, value, tokens):
        """Put a value into these slots of the host pool (page_first)."""
        self.pool.kv_buffer[:, tokens] = value

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


@pytest.fixture
def engine(host, clean_modules, wheel_tree, monkeypatch, tmp_path):
    pytest.importorskip("torch")
    root = wheel_tree("sglang", VERSION, "sglang/srt/mem_cache/", "sglang/srt/managers/", "sglang/kernels/ops/")

    def make(tokens=512, backend="kernel", page_size=1, **environment):
        return Engine(host(**environment), root, monkeypatch, tokens, backend, page_size)

    return make


def adapter():
    return installation._adapters["sglang.l2_transfer"]


def stand(direction, rung, **limits):
    """Put a path on a rung for good, with the launch queue's limits as given."""
    path = adapter().path(direction)
    path.device.limits = dataclasses.replace(path.device.limits, **limits)
    path.auto.stand_on(Rung(rung, "own"))
    path.auto.active = False
    return path


@contextlib.contextmanager
def forward(one):
    """A forward that runs until the block is left (20 s at most, so that a submission that waits for it fails)."""
    gc.collect()  # memory that Python frees only now and then: cudaFree waits for all work, so for this forward
    library = one.host.rt.library
    library.kvhostGateCreate.restype = ctypes.c_void_p
    gate = ctypes.c_void_p(library.kvhostGateCreate())
    assert library.kvhostGateLaunch(gate, ctypes.c_void_p(one.host.compute)) == 0
    over = one.host.cuda.Event()
    over.record(one.forward_stream)
    late = threading.Timer(20, library.kvhostGateOpen, [gate])
    late.start()
    try:
        yield over
    finally:
        late.cancel()
        late.join()
        library.kvhostGateOpen(gate)


# ---- what is measured and when it is cured ---------------------------------------------------------------------


@pytest.mark.parametrize("fix", ["off", "auto"])
def test_bytes_come_back_and_every_burst_is_timed(engine, fix):
    one = engine()
    with instrument.observe("sglang", fix=fix) as seen:
        assert one.roundtrip()
        adapter().poll()
    assert [t["direction"] for t in seen.transfers] == ["store"] * 8 + ["load"] * 8
    for t in seen.transfers:
        assert t["bytes"] == 64 * 2 * LAYERS * ROW
        assert t["tokens"] == 64
        assert t["submit_ns"] > 0
        assert t["copy_ns"] > 0
        assert t["queue_ns"] >= 0
    assert {t["copies"] for t in seen.transfers if t["direction"] == "store"} == {128}
    assert {t["copies"] for t in seen.transfers if t["direction"] == "load"} == {LAYERS}
    assert {c["call"] for c in seen.calls} >= {"HiCacheController.start_writing", "HiCacheController.start_loading"}


@pytest.mark.parametrize(("backend", "page_size"), [("kernel", 1), ("kernel", 4), ("kernel", 256), ("direct", 1)])
def test_the_estimated_copies_are_those_that_the_runtime_is_asked_for(engine, backend, page_size):
    one = engine(backend=backend, page_size=page_size)
    one.host.rt.library.kvhostStats.argtypes = [ctypes.c_void_p]

    def submitted():
        stats = (ctypes.c_uint64 * 128)()
        assert one.host.rt.library.kvhostStats(stats) == 0
        return stats[3 * 32 + 3]  # copies_submitted, after outstanding, waiting (uint32) and capacity

    ids = list(range(512))
    swapped = ids if page_size > 1 else [*ids[:200], *ids[300:], *ids[200:300]]  # three runs
    with instrument.observe("sglang", fix="off") as seen:
        before = submitted()
        one.store(swapped, ids).finish_event.synchronize()
        copies = submitted() - before
        adapter().poll()
    assert [t["copies"] for t in seen.transfers] == [copies]
    assert copies == (3 * 2 * LAYERS if backend == "direct" else 2 * 512 // page_size)


def test_the_default_write_back_behind_a_forward_is_named_and_split(engine):
    one = engine(KVHOST_DEPTH=64)
    own = one.engine.device_to_host_stream
    ids = list(range(128))
    with instrument.observe("sglang", fix="auto") as seen:
        for _ in range(12):
            one.host.rt.launch_delay(one.host.compute, 20_000_000)  # longer than submitting takes on a busy machine
            ack = one.store(ids, ids)
            assert one.engine.device_to_host_stream is own
        ack.finish_event.synchronize()
        adapter().poll()
        assert one.roundtrip()
    assert seen.decisions[0]["what"] == "switch"
    assert seen.decisions[0]["to"] == "split/own"
    assert "launch_queue_saturation" in seen.decisions[0]["why"]
    assert any(t["policy"] == "split" and t["streams"] > 1 for t in seen.transfers)


# ---- split: a burst larger than its queue ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("backend", "page_size", "tokens"), [("kernel", 1, 160), ("kernel", 8, 1024), ("direct", 1, 80)]
)
def test_a_burst_larger_than_its_queue_does_not_wait_for_the_forward(engine, backend, page_size, tokens, monkeypatch):
    """Proved by state: the forward still runs when the submission returns, and only the test ends it."""
    one = engine(tokens, backend, page_size, KVHOST_DEPTH=64, CUDA_DEVICE_MAX_CONNECTIONS=16)
    pairs, pair = [], one.module.make_timing_event_pair
    monkeypatch.setattr(one.module, "make_timing_event_pair", lambda: pairs.append(pair()) or pairs[-1])
    one.fill()
    before, ids = one.gpu(), list(range(tokens))
    slots = list(range(0, tokens, 2)) + list(range(1, tokens, 2)) if page_size == 1 else ids[::-1]
    if page_size > 1:
        slots = [start + i for start in ids[::-page_size] for i in range(1 - page_size, 1)]
    with instrument.observe("sglang", fix="auto") as seen:
        path = stand("store", "split")
        assert path.device.limits.depth == 64
        with forward(one) as over:
            first = one.store(slots, ids)
            assert not over.query()
            assert not first.finish_event.query()
            (live,) = path.live.values()
            assert not one.host.rt.event_query(live.start)
            assert one.host.torch.count_nonzero(one.cpu()) == 0
        first.finish_event.synchronize()
        assert one.host.torch.equal(one.cpu(slots), before)
        copied_ns = first.start_event.elapsed_time(first.finish_event) * 1e6
        adapter().poll()
    (transfer,) = seen.transfers
    assert transfer["copy_ns"] + 1000 >= copied_ns > 0  # both from before the first part to after the last
    assert transfer["policy"] == "split"
    assert transfer["copies"] > 64
    assert transfer["streams"] == len(pairs) > 1
    assert first.start_event is pairs[0][0]
    assert first.finish_event is pairs[-1][1]
    assert not seen.decisions
    assert path.device.streams.in_use == 0


@pytest.mark.parametrize("fix", ["off", "auto"])
def test_a_wait_for_the_forward_is_no_part_of_the_copy_without_a_fence_either(engine, fix):
    """SGLang's submission waits for the stream it is called on, behind any event that could be recorded before it."""
    one = engine()
    ids = list(range(8))
    with instrument.observe("sglang", fix=fix) as seen:
        adapter().path("store")  # its clock's first event may share a channel with the forward, and would wait for it
        for _ in range(2):
            with forward(one):
                one.schedule_stream.wait_stream(one.forward_stream)
                ack = one.store(ids, ids, fence=False)
                waiting = one.host.rt.event_query(next(iter(adapter().path("store").live.values())).start)
            ack.finish_event.synchronize()
            adapter().poll()
    assert not waiting  # the start of copying, not of waiting
    theirs = int(ack.start_event.elapsed_time(ack.finish_event) * 1e6)
    assert seen.transfers[-1]["copy_ns"] == pytest.approx(theirs, abs=1_000)


def test_without_a_split_that_burst_does_wait_for_the_forward(engine):
    one = engine(KVHOST_DEPTH=64, CUDA_DEVICE_MAX_CONNECTIONS=16)
    ids, over = list(range(160)), one.host.cuda.Event()
    with instrument.observe("sglang", fix="auto"):
        stand("store", "shared")
        one.host.rt.launch_delay(one.host.compute, 50_000_000)
        over.record(one.forward_stream)
        ack = one.store(ids, ids)
        assert over.query()
        ack.finish_event.synchronize()


def test_what_finds_no_room_in_any_channel_is_named(engine):
    one = engine(KVHOST_DEPTH=64, CUDA_DEVICE_MAX_CONNECTIONS=2)
    ids, over = list(range(256)), one.host.cuda.Event()
    one.fill()
    before = one.gpu(ids)
    with instrument.observe("sglang", fix="auto") as seen:
        stand("store", "split")
        for _ in range(3):
            one.host.rt.launch_delay(one.host.compute, 20_000_000)
            over.record(one.forward_stream)
            ack = one.store(ids, ids)
            assert over.query(), "512 copies cannot be in two queues of 64"
        ack.finish_event.synchronize()
        assert one.host.torch.equal(one.cpu(ids), before)
    (note,) = seen.decisions  # once, not for every burst
    assert note["what"] == "note"
    assert "CUDA_DEVICE_MAX_CONNECTIONS" in note["why"]
    assert 512 <= note["evidence"]["operations"] <= 544
    assert note["evidence"]["over"] >= 512 - 2 * 64


def test_a_load_of_the_direct_backend_is_not_split_but_named(engine):
    one = engine(backend="direct", KVHOST_DEPTH=64)
    slots = list(range(0, 512, 2))  # no two neighbours: a copy a token, plane and layer
    with instrument.observe("sglang", fix="auto") as seen:
        stand("load", "pooled")
        one.load(slots, slots).finish_event.synchronize()
        adapter().poll()
    assert [(t["copies"], t["streams"]) for t in seen.transfers] == [(256 * 2 * LAYERS, 1)]
    assert ["hicache-io-backend" in d["why"] for d in seen.decisions] == [True]


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("size", [1, 7, 100, 5000])
def test_parts_hold_every_page_once_and_in_order(page_size, size):
    import torch

    from kvprobe.patches.sglang import Work, _cut

    class Transfer(types.SimpleNamespace):
        def _replace(self, **changed):
            return Transfer(**{**vars(self), **changed})

    kv = Transfer(pool="kv", host_indices=torch.arange(960), device_indices=torch.arange(960).flip(0))
    state = Transfer(pool="state", host_indices=torch.arange(3), device_indices=torch.arange(3))
    none = Transfer(pool="none", host_indices=torch.arange(0), device_indices=torch.arange(0))
    burst = [kv, state, none, kv]
    works = [Work(0, 2 * 960 // page_size, page_size), Work(0, 30, 0), Work(0, 0, 0), Work(0, 960, page_size)]
    parts, largest = _cut(burst, works, size)
    flat = [transfer for part in parts for transfer in part]
    assert [name for name, _ in itertools.groupby(t.pool for t in flat)] == ["kv", "state", "none", "kv"]
    assert sum(t is state for t in flat) == sum(t is none for t in flat) == 1
    assert all(parts)
    assert torch.equal(torch.cat([t.host_indices for t in flat]), torch.cat([t.host_indices for t in burst]))
    assert torch.equal(torch.cat([t.device_indices for t in flat]), torch.cat([t.device_indices for t in burst]))
    assert all(len(t.host_indices) % page_size == 0 for t in flat if t.pool == "kv")
    assert largest <= max(size, 30, 960 * page_size // 960)
    assert len(parts) == 1 or sum(w.places for w in works) > size


@pytest.mark.parametrize("what", ["unified", "layout"])
def test_pools_that_rely_on_one_fifo_keep_their_streams(engine, what):
    one = engine()
    if what == "unified":
        one.gpu_pool.host_transfer_translate = lambda indices: indices
    else:
        domain = types.SimpleNamespace(acquire_layout=lambda: None, release_layout=lambda *a: None)
        one.pool.shared_allocation_domain = domain
    with instrument.observe("sglang", fix="auto") as seen:
        adapter().path("store").auto.stand_on(Rung("split", "own"))
        assert one.roundtrip()
        adapter().poll()
    assert {t["policy"] for t in seen.transfers} == {"shared"}
    assert [d["what"] for d in seen.decisions if d["what"] != "note"] == ["refuse"]


# ---- failures ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hook", ["poll", "work", "may_swap", "parts", "take", "submit", "size", "_cut"])
def test_a_hook_that_fails_changes_no_byte(engine, hook, monkeypatch):
    import kvprobe.patches.sglang as patch

    def broken(*args, **kwargs):
        raise RuntimeError("kvprobe's own mistake")

    one = engine(KVHOST_DEPTH=64)
    monkeypatch.setattr(patch if hook == "_cut" else patch.Transfers, hook, broken)
    with instrument.observe("sglang", fix="auto") as seen:
        streams = stand("store", "split").device.streams
        for _ in range(3):
            assert one.roundtrip()
        assert streams.in_use == 0
    assert seen.states["sglang.l2_transfer"].startswith("failed: ")


@pytest.mark.parametrize("number", range(1, 7))
def test_a_hook_that_fails_between_two_parts_loses_none(engine, number, monkeypatch):
    """kvprobe's own wait fails at some part: the rest goes on SGLang's stream, in order, and the burst is whole."""
    one = engine(KVHOST_DEPTH=64, CUDA_DEVICE_MAX_CONNECTIONS=16)
    one.fill()
    before, ids, calls = one.gpu(), list(range(160)), itertools.count(1)
    external, own = one.host.cuda.ExternalStream, one.host.cuda.ExternalStream.wait_event

    def breaking(self, event):
        if type(self) is external and next(calls) == number:
            raise RuntimeError("kvprobe's own mistake")
        own(self, event)

    monkeypatch.setattr(external, "wait_event", breaking)
    with instrument.observe("sglang", fix="auto") as seen:
        stand("store", "split")
        one.host.rt.launch_delay(one.host.compute, WORK_NS)
        ack = one.store(ids, ids)
        ack.finish_event.synchronize()
        assert one.host.torch.equal(one.cpu(ids), before[:, : 160 * ROW])
        assert ack.start_event.elapsed_time(ack.finish_event) > 0
        assert one.roundtrip()
    assert seen.states["sglang.l2_transfer"].startswith("failed: ")


@pytest.mark.parametrize(
    ("where", "number"),
    [
        ("MHATokenToKVPoolHost.backup_from_device_all_layer", 1),
        ("MHATokenToKVPoolHost.backup_from_device_all_layer", 3),
        ("make_timing_event_pair", 3),
    ],
)
def test_an_exception_of_sglangs_passes_and_nothing_stays_in_flight(engine, where, number, monkeypatch):
    """In the middle of a part, where SGLang waits for its stream; and before it, where SGLang would have none."""
    one = engine(KVHOST_DEPTH=64, CUDA_DEVICE_MAX_CONNECTIONS=16)
    ids, calls, over = list(range(160)), itertools.count(1), one.host.cuda.Event()
    owner = one.mha.MHATokenToKVPoolHost if "." in where else one.module
    name = where.split(".")[-1]
    own = getattr(owner, name)

    def failing(*args):
        if next(calls) == number:
            raise ValueError("the server's own mistake")
        return own(*args)

    with instrument.observe("sglang", fix="auto") as seen:
        path = stand("store", "split")
        with monkeypatch.context() as broken:
            broken.setattr(owner, name, failing)
            one.host.rt.launch_delay(one.host.compute, 10 * LONG_NS)
            over.record(one.forward_stream)
            with pytest.raises(ValueError, match="the server's own mistake"):
                one.store(ids, ids)
            assert all(one.host.rt.stream_query(stream) for stream in path.device.streams.streams)
            assert over.query()
        assert next(calls) == number + 1
        assert path.device.streams.in_use == 0
        one.host.rt.synchronize()
        assert one.engine.device_to_host_stream.query()
        assert one.roundtrip()
    assert seen.states["sglang.l2_transfer"] == "removed"


def test_install_uninstall_install_again(engine):
    one = engine()
    kind = one.module.L2TransferEngine
    before = dict(vars(kind))
    for _ in range(3):
        instrument.install("sglang", fix="auto")
        assert dict(vars(kind)) != before
        assert one.roundtrip()
        instrument.uninstall("sglang")
        assert dict(vars(kind)) == before
        assert one.roundtrip()


# ---- races ---------------------------------------------------------------------------------------------------------

# A queue that takes the bursts below whole, or one so small that each burst becomes several parts.
POLICIES = {"shared": ("shared", 100_000), "pooled": ("split", 100_000), "split": ("split", 24)}
WIDTH = 9  # tokens of a burst


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


CASES = [
    *((order, policy) for order in ("fence", "bursts") for policy in POLICIES),
    ("parts", "split"),
    *((order, policy) for order in ("load_fence", "layers") for policy in ("shared", "pooled")),
]


@pytest.mark.parametrize(("order", "policy"), CASES)
def test_no_order_is_lost(engine, order, policy, monkeypatch):
    # Channels enough that none is shared: a shared one keeps the order by itself, and the test would prove nothing.
    # Copies slow enough that a relayout which comes too early finds some of the part before still to be made.
    one = engine(tokens=64, CUDA_DEVICE_MAX_CONNECTIONS=32, KVHOST_LATENCY_US=50 if order == "parts" else 2)
    direction = "load" if order in ("load_fence", "layers") else "store"
    rung, depth = POLICIES[policy]
    race = Race(one, monkeypatch)
    race.idle = one.host.cuda.Stream()

    run = getattr(race, order)
    with instrument.observe("sglang", fix="auto") as seen:
        path = stand(direction, "pooled" if rung == "split" and direction == "load" else rung)
        limits = dataclasses.replace(path.device.limits, depth=depth, capacity=depth * 32, channels=32)
        path.device.limits = limits
        assert all(run(i % 200 + 1, WORK_NS, False) for i in range(ITERATIONS))
        assert path.rung == path.auto.rung and not [d for d in seen.decisions if d["what"] == "refuse"]
        assert not all(run(i + 1, ns, True) for i, ns in enumerate(HELD_NS)), "no race is seen: nothing is proved"
        adapter().poll()
    streams = {t["streams"] for t in seen.transfers}
    assert min(streams) > 1 if policy == "split" else streams == {1}
    assert {t["policy"] for t in seen.transfers} == {path.rung.policy}


def test_order_and_bytes_hold_through_every_switch(engine, monkeypatch):
    one = engine(tokens=64, CUDA_DEVICE_MAX_CONNECTIONS=32)
    race = Race(one, monkeypatch)
    race.idle = one.host.cuda.Stream()
    with instrument.observe("sglang", fix="auto"):
        for i in range(max(2, ITERATIONS // 10)):
            for rung, depth in (POLICIES[p] for p in ("shared", "split", "shared", "pooled", "split", "pooled")):
                stand("store", rung, depth=depth, capacity=depth * 32, channels=32)
                for order in (race.bursts, race.fence, race.parts):
                    assert order(i % 200 + 1, WORK_NS, False)


def test_order_holds_when_kvprobe_is_taken_out_with_bursts_in_flight(engine, monkeypatch):
    one = engine(tokens=64, CUDA_DEVICE_MAX_CONNECTIONS=32)
    tokens, others = list(range(WIDTH)), list(range(WIDTH, 2 * WIDTH))
    for i in range(max(5, ITERATIONS // 100)):
        instrument.install("sglang", fix="auto")
        path = stand("store", "split", depth=24, capacity=24 * 32, channels=32)
        one.fill(i % 200 + 1, slice(WIDTH, 2 * WIDTH))
        one.fill(0, slice(0, WIDTH))
        with forward(one):
            first = one.store(tokens, tokens)
            assert path.device.streams.in_use > 1
            instrument.uninstall("sglang")
            assert path.device.streams.in_use == 0
            second = one.store(tokens, others, fence=False)  # SGLang alone, on its own stream
            assert not second.finish_event.query()
        second.finish_event.synchronize()
        assert first.finish_event.query()
        assert bool((one.cpu(tokens) == i % 200 + 1).all())


# ---- whether it pays, and what its storage moves -----------------------------------------------------------------


def test_tokens_written_over_before_anybody_loaded_them_are_counted(engine, monkeypatch):
    one = engine(tokens=64)
    torch = one.host.torch
    with instrument.observe("sglang") as seen:
        monkeypatch.setattr(one.controller.mem_pool_device_allocator, "alloc", torch.arange, raising=False)
        first, second = (one.controller.write(torch.arange(16)) for _ in range(2))
        assert len(one.controller.load(first)) == 16
        for indices in (first, second):  # the tree gives both places back; only one was ever read
            one.pool.free(indices)
        for _ in range(4):
            assert one.controller.write(torch.arange(16)) is not None
    (told,) = [event for event in seen.events if event["kind"] == "offload"][-1:]
    each = one.pool.get_size_per_token()
    assert (told["stored_blocks"], told["loaded_blocks"], told["unread_blocks"]) == (96, 16, 16)
    assert (told["stored_bytes"], told["loaded_bytes"]) == (96 * each, 16 * each)
    assert told["source"] == "HiCache" and told["waited_ns"] is None  # not seen: undecided


def test_the_storage_layer_tells_pages_and_bytes(engine, monkeypatch):
    one = engine(tokens=64, page_size=4)
    torch = one.host.torch
    with instrument.observe("sglang") as seen:
        monkeypatch.setattr(one.controller, "page_set_func", lambda hashes, indices, extra: True, raising=False)
        operation = one.controllers.StorageOperation(torch.arange(32), list(range(32)), hash_value=["h"] * 8)
        one.controller._page_backup(operation)
    (call,) = [call for call in seen.calls if call["adapter"] == "sglang.storage"]
    assert (call["direction"], call["copies"], call["bytes"]) == ("store", 8, 32 * one.pool.get_size_per_token())
