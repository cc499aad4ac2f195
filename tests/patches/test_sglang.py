"""SGLang's own L2TransferEngine over the host runtime; host pools copy as its default write-back does."""

import dataclasses
import importlib
import importlib.util
import sys
import types

import pytest

import kvprobe.instrument as instrument
from kvprobe.instrument import installation

VERSION = "0.5.23"
ENGINE = "sglang.srt.mem_cache.l2_transfer"
TOKEN = 256  # bytes of one token and direction


class Pool:
    """A host pool whose write-back is two copies a token, as SGLang's page_first layout at page size 1."""

    page_size, layer_num, size_per_token = 1, 2, 2 * TOKEN

    def __init__(self, host, tokens):
        self.host, self.memory = host, host.tensor((tokens * 2, TOKEN), host.torch.uint8, device=False)
        self.domains = []

    def prepare_transfer_indices(self, host_indices, device_indices, io_backend):
        return host_indices, device_indices

    def _copy(self, device, host_indices, device_indices, store, planes):
        rt, stream = self.host.rt, self.host.current[-1]
        for h, d in zip(host_indices.tolist(), device_indices.tolist(), strict=True):
            for plane in planes:
                cpu = self.memory.data_ptr() + (2 * h + plane) * TOKEN
                gpu = device.memory.data_ptr() + (2 * d + plane) * TOKEN
                rt.memcpy_async(*((cpu, gpu) if store else (gpu, cpu)), TOKEN, "d2h" if store else "h2d", stream)

    def backup_from_device_all_layer_physical(self, device, host_indices, device_indices, io_backend):
        self._copy(device, host_indices, device_indices, True, (0, 1))

    def load_to_device_per_layer_physical(
        self, device, host_indices, device_indices, layer, io_backend, is_draft=False
    ):
        self._copy(device, host_indices, device_indices, False, (layer,))


class Engine:
    def __init__(self, host, root, tokens=512):
        self.host, torch = host, host.torch
        sys.path.insert(0, str(root))
        importlib.invalidate_caches()
        for name in ("sglang", "sglang.srt", "sglang.srt.mem_cache", "sglang.srt.mem_cache.pool_host"):
            sys.modules[name] = types.ModuleType(name)
            sys.modules[name].__path__ = []
        delay = types.SimpleNamespace(SGLANG_TEST_HICACHE_H2D_DELAY_CYCLES=types.SimpleNamespace(get=lambda: 0))
        sys.modules["sglang.srt.environ"] = types.SimpleNamespace(envs=delay)
        sys.modules["sglang.srt.utils"] = types.SimpleNamespace(get_device_module=lambda: host.cuda)
        base = types.ModuleType("sglang.srt.mem_cache.pool_host.base")
        base.shared_host_layout_domains = lambda pools: [d for pool in pools for d in pool.domains]
        sys.modules[base.__name__] = base
        spec = importlib.util.spec_from_file_location(ENGINE, root / (ENGINE.replace(".", "/") + ".py"))
        self.module = importlib.util.module_from_spec(spec)
        sys.modules[ENGINE] = self.module
        spec.loader.exec_module(self.module)
        self.module.torch = host.as_torch()
        self.engine = self.module.L2TransferEngine("kernel")
        self.tokens, self.pool = tokens, Pool(host, tokens)
        self.device = types.SimpleNamespace(memory=host.tensor((tokens * 2, TOKEN), torch.uint8, device=True))

    def transfer(self, host_indices, device_indices):
        torch = self.host.torch
        return [
            self.module.L2Transfer(self.pool, self.device, torch.tensor(host_indices), torch.tensor(device_indices))
        ]

    def store(self, host_indices, device_indices):
        stream = self.engine.device_to_host_stream
        stream.wait_stream(self.host.cuda.ExternalStream(self.host.compute))  # HiCacheController's fence
        return self.engine.submit_device_to_host(self.transfer(host_indices, device_indices))

    def load(self, host_indices, device_indices):
        done = []
        completion = self.engine.submit_host_to_device(
            self.transfer(host_indices, device_indices), transfer_layer_id_max=2, on_layer_done=done.append
        )
        assert done == [0, 1]
        return completion

    def gpu(self):
        return self.device.memory.as_subclass(self.host.torch.Tensor)

    def roundtrip(self, parts=8):
        torch = self.host.torch
        self.gpu().copy_(torch.randint(0, 255, self.gpu().shape, dtype=torch.uint8))
        before, size = self.gpu().clone(), self.tokens // parts
        for i in range(parts):
            ids = list(range(i * size, (i + 1) * size))
            completion = self.store(ids[::-1], ids)
        completion.finish_event.synchronize()  # the newest implies all earlier ones
        self.gpu().zero_()
        for i in range(parts):
            ids = list(range(i * size, (i + 1) * size))
            completion = self.load(ids[::-1], ids)
        completion.finish_event.synchronize()
        return torch.equal(before, self.gpu())


@pytest.fixture
def engine(host, clean_modules, wheel_tree):
    pytest.importorskip("torch")
    root = wheel_tree("sglang", VERSION, "sglang/srt/mem_cache/", "sglang/srt/managers/", "sglang/srt/plugins/")
    return lambda tokens=512, **environment: Engine(host(**environment), root, tokens)


def adapter():
    return installation._adapters["sglang.l2_transfer"]


@pytest.mark.parametrize("fix", ["off", "auto"])
def test_bytes_come_back_and_every_burst_is_timed(engine, fix):
    one = engine()
    with instrument.observe("sglang", fix=fix) as seen:
        assert one.roundtrip()
        adapter().poll()
    assert [t["direction"] for t in seen.transfers] == ["store"] * 8 + ["load"] * 8
    for t in seen.transfers:
        assert t["bytes"] == 64 * 2 * TOKEN
        assert t["tokens"] == 64
        assert t["submit_ns"] > 0
        assert t["copy_ns"] > 0
        assert t["queue_ns"] >= 0
    assert {t["copies"] for t in seen.transfers if t["direction"] == "store"} == {128}


def test_the_default_write_back_behind_a_forward_is_named_and_tried_on_pooled_streams(engine):
    one = engine(KVHOST_DEPTH=64)
    own = one.engine.device_to_host_stream
    with instrument.observe("sglang", fix="auto") as seen:
        for _ in range(24):
            one.host.rt.launch_delay(one.host.compute, 500_000)
            ids = list(range(128))
            completion = one.store(ids, ids)
            assert one.engine.device_to_host_stream is own
        completion.finish_event.synchronize()
        adapter().poll()
        assert one.roundtrip()
    assert seen.decisions[0]["what"] == "switch"
    assert seen.decisions[0]["to"] == "pooled"
    assert "launch_queue_saturation" in seen.decisions[0]["why"]
    assert any(t["policy"] == "pooled" for t in seen.transfers)


@pytest.mark.parametrize("what", ["unified", "layout"])
def test_pools_that_rely_on_one_fifo_keep_their_streams(engine, what):
    one = engine()
    if what == "unified":
        one.device.host_transfer_translate = lambda indices: indices
    else:
        domain = types.SimpleNamespace(acquire_layout=lambda: None, release_layout=lambda *a: None)
        one.pool.domains = [domain]
    with instrument.observe("sglang", fix="auto") as seen:
        adapter().path("store").ladder._stand_on("pooled")
        assert one.roundtrip()
        adapter().poll()
    assert {t["policy"] for t in seen.transfers} == {"shared"}
    assert [d["what"] for d in seen.decisions] == ["refuse"]


def test_a_later_burst_never_overtakes_an_earlier_one(engine, monkeypatch):
    """Two bursts into the same host slots, the first held back by compute: the second must win; without it must not."""
    one = engine(CUDA_DEVICE_MAX_CONNECTIONS=32)
    host, rt = one.host, one.host.rt
    fence, idle = host.compute, host.cuda.Stream()

    def lost(iterations, work_ns):
        wrong = 0
        for _ in range(iterations):
            one.gpu()[:8], one.gpu()[8:16] = 1, 2
            rt.launch_delay(fence, work_ns)
            one.store([0, 1, 2, 3], [0, 1, 2, 3])
            with host.cuda.stream(idle):  # nothing of its own to wait for
                completion = one.engine.submit_device_to_host(one.transfer([0, 1, 2, 3], [4, 5, 6, 7]))
            completion.finish_event.synchronize()
            rt.synchronize()
            wrong += not bool((one.pool.memory[:8] == 2).all())
        return wrong

    with instrument.observe("sglang", fix="auto"):
        path = adapter().path("store")
        path.device.limits = dataclasses.replace(path.device.limits, depth=1_000_000)
        path.ladder._stand_on("pooled")
        path.ladder.submitted = lambda sample: None  # and stays there
        assert lost(30, 200_000) == 0
        with monkeypatch.context() as broken:
            # Neither the chain nor the engine's own stream, which holds the fence, orders the second burst.
            broken.setattr(host.cuda.ExternalStream, "wait_event", lambda self, event: None)
            own = host.cuda.ExternalStream.wait_stream
            calls = []

            def first_only(self, other):
                calls.append(1)
                if len(calls) % 3 != 0:
                    own(self, other)

            broken.setattr(host.cuda.ExternalStream, "wait_stream", first_only)
            assert lost(5, 5_000_000) > 0, "the race cannot be seen: this test proves nothing"


@pytest.mark.parametrize("hook", ["poll", "copies", "may_swap"])
def test_a_hook_that_fails_changes_no_byte(engine, hook, monkeypatch):
    import kvprobe.patches.sglang as patch

    def broken(*args, **kwargs):
        raise RuntimeError("kvprobe's own mistake")

    one = engine()
    monkeypatch.setattr(patch.Transfers, hook, broken)
    with instrument.observe("sglang", fix="auto") as seen:
        if hook == "may_swap":
            adapter().path("store").ladder._stand_on("pooled")
        for _ in range(3):
            assert one.roundtrip()
    assert seen.states["sglang.l2_transfer"].startswith("failed: ")


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


def test_the_controllers_signatures_are_those_of_the_real_file(wheel_tree):
    """The controller needs all of SGLang to import; its source must still hold what the adapter checks at run time."""
    import ast

    from kvprobe.patches.sglang import Controller

    root = wheel_tree("sglang", VERSION, "sglang/srt/mem_cache/", "sglang/srt/managers/", "sglang/srt/plugins/")
    code = ast.parse((root / "sglang/srt/managers/cache_controller.py").read_text())
    (kind,) = [n for n in code.body if isinstance(n, ast.ClassDef) and n.name == "HiCacheController"]
    found = {f.name: tuple(a.arg for a in f.args.args[1:]) for f in kind.body if isinstance(f, ast.FunctionDef)}
    for target in Controller.targets:
        assert found[target.path.split(".")[1]][: len(target.parameters)] == target.parameters
