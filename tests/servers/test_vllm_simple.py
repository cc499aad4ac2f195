"""vLLM's SimpleCPUOffloadConnector: its real copy thread over the host runtime, its real classes' signatures."""

import ctypes
import importlib.util
import time
import types
from pathlib import Path

import numpy as np
import pytest

import kvprobe.instrument as instrument
from kvprobe.instrument import installation

pytestmark = pytest.mark.servers
torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

LAYERS, BLOCKS, BLOCK = 3, 32, 512


@pytest.fixture
def host(monkeypatch):
    path = Path(__file__).resolve().parent.parent / "patches" / "conftest.py"
    spec = importlib.util.spec_from_file_location("host_torch", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setenv("KVPROBE_DEVICE", "host")
    made = module.Host(monkeypatch)
    yield made
    installation.uninstall()
    made.close()


@pytest.fixture
def simple(host, monkeypatch):
    """The real backend and worker; the driver's batch copy is the host runtime's."""
    from vllm.v1.simple_kv_offload import copy_backend, cuda_mem_ops, worker

    def batch(dsts, srcs, sizes, count, attrs, index, attributes, failed, stream):
        def column(address):
            return np.ctypeslib.as_array(ctypes.cast(address, ctypes.POINTER(ctypes.c_uint64)), (count,))

        host.rt.memcpy_batch_async(column(dsts), column(srcs), column(sizes), stream)
        return 0

    monkeypatch.setattr(cuda_mem_ops, "_batch_memcpy", (batch, 1))
    monkeypatch.setattr(cuda_mem_ops, "_max_batch_descriptors", 0)
    monkeypatch.setattr(copy_backend, "torch", host.as_torch())
    monkeypatch.setattr(copy_backend, "current_platform", types.SimpleNamespace(set_device=lambda device: None))
    made = types.SimpleNamespace(module=copy_backend, worker_module=worker)
    made.gpu = {f"l{i}": host.tensor((BLOCKS, BLOCK), torch.int8, device=True) for i in range(LAYERS)}
    made.cpu = {f"l{i}": host.tensor((BLOCKS, BLOCK), torch.int8, device=False) for i in range(LAYERS)}
    made.worker = object.__new__(worker.SimpleCPUOffloadWorker)  # its constructor wants a whole engine's configuration
    made.worker._load_events, made.worker._store_events = [], []
    made.worker._load_hwm = made.worker._store_hwm = -1
    backend = made.backend = copy_backend.DmaCopyBackend()
    backend.init(made.gpu, made.cpu, torch.device("cpu"), host.cuda.Stream(), host.cuda.Stream())
    yield made
    backend.shutdown()


def copy(made, left, right, store, index):
    events = made.worker._store_events if store else made.worker._load_events
    made.backend.launch_copy(left, right, is_store=store, event_idx=index, events_list=events)
    deadline = time.monotonic() + 60
    while made.worker._poll_stream_events(is_store=store) < index:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def roundtrip(made, first):
    plain = [t.as_subclass(torch.Tensor) for t in made.gpu.values()]
    for t in plain:
        t.copy_(torch.randint(-128, 127, t.shape, dtype=torch.int8))
    before = [t.clone() for t in plain]
    copy(made, [1, 5, 9], [0, 1, 2], True, first)
    for t in plain:
        t[[1, 5, 9]] = 0
    copy(made, [0, 1, 2], [1, 5, 9], False, first)
    return all(torch.equal(a, b) for a, b in zip(before, plain, strict=True))


def test_transfers_of_the_copy_thread_are_timed_and_bytes_come_back(simple):
    with instrument.observe("vllm") as seen:
        assert roundtrip(simple, 0)
        assert roundtrip(simple, 1)
    assert roundtrip(simple, 2)
    assert [(t["direction"], t["id"], t["copies"]) for t in seen.transfers] == [
        ("store", 0, 9),
        ("load", 0, 9),
        ("store", 1, 9),
        ("load", 1, 9),
    ]
    for t in seen.transfers:
        assert t["bytes"] == 9 * BLOCK
        assert t["handover_ns"] >= 0
        assert t["submit_ns"] > 0
        assert t["copy_ns"] > 0


@pytest.mark.parametrize("hook", ["launch", "copy", "polled"])
def test_a_hook_that_fails_changes_no_byte(simple, hook, monkeypatch):
    import kvprobe.patches.vllm_loads as loads

    def broken(*args, **kwargs):
        raise RuntimeError("kvprobe's own mistake")

    monkeypatch.setattr(loads.SimpleConnector, hook, broken)
    with instrument.observe("vllm") as seen:
        for i in range(3):
            assert roundtrip(simple, i)
    assert seen.states["vllm.simple.copies"].startswith("failed: ")


def test_the_schedulers_signatures_fit_and_everything_is_put_back(simple):
    from vllm.v1.simple_kv_offload import manager

    before = dict(vars(manager.SimpleCPUOffloadScheduler))
    for _ in range(3):
        states = instrument.install("vllm", fix="auto")
        assert states["vllm.simple.dedup"] == "applied"
        assert dict(vars(manager.SimpleCPUOffloadScheduler)) != before
        instrument.uninstall("vllm")
        assert dict(vars(manager.SimpleCPUOffloadScheduler)) == before


class Blocks:
    """A pool of blocks that only remembers who is held."""

    def __init__(self, count):
        self.blocks = [types.SimpleNamespace(block_id=i, is_null=False) for i in range(count)]
        self.held = [0] * count

    def touch(self, blocks):
        for block in blocks:
            self.held[block.block_id] += 1

    def free_blocks(self, blocks):
        for block in blocks:
            self.held[block.block_id] -= 1


@pytest.fixture
def scheduler():
    """The real scheduler's methods over two pools; its constructor wants a whole engine's configuration."""
    from vllm.v1.simple_kv_offload import manager

    made = object.__new__(manager.SimpleCPUOffloadScheduler)
    made._pending_cpu_hits, made._reqs_to_load, made._abandoned_reqs_to_load = {}, {}, {}
    made._load_event_to_reqs, made._interval_load_blocks_completed = {}, 0
    made._reqs_to_store = {}
    made.block_size = made.hash_block_size = 16
    made.group_block_sizes, made.prefix_cacheable_group_ids, made._lazy_mode = [16], {0}, True
    made.cpu_block_pool, made._gpu_block_pool = Blocks(8), Blocks(64)
    group = types.SimpleNamespace(kv_cache_spec=None)  # asked since 0.33
    made.cpu_kv_cache_config = types.SimpleNamespace(kv_cache_groups=[group])
    hit = (made.cpu_block_pool.blocks[:4],)
    found = types.SimpleNamespace(find_longest_cache_hit=lambda hashes, most: (hit, 64, None))
    made.cpu_coordinator = found
    return made


def request(name):
    return types.SimpleNamespace(
        request_id=name, num_tokens=80, block_hashes=[bytes([i]) for i in range(5)], skip_reading_prefix_cache=False
    )


def ask(scheduler, one):
    return scheduler.get_num_new_matched_tokens(one, 0)


def load(scheduler, one, at):
    blocks = types.SimpleNamespace(get_block_ids=lambda: (list(range(at, at + 5)),))
    scheduler.update_state_after_alloc(one, blocks, 64)


def ended(scheduler, *names):
    scheduler.update_connector_output(types.SimpleNamespace(finished_recving=set(names), kv_connector_worker_meta=None))


def test_followers_of_a_load_in_flight_wait_and_their_pins_are_dropped(scheduler, monkeypatch):
    now_ns = [10**15]  # it goes on only when told
    monkeypatch.setattr("kvprobe.instrument.dedup.time", types.SimpleNamespace(monotonic_ns=lambda: now_ns[0]))
    with instrument.observe("vllm", fix="auto") as seen:
        a, b = request("a"), request("b")
        for at, one in ((0, a), (5, b)):  # by itself the connector loads the same blocks twice
            assert ask(scheduler, one) == (64, True)
            load(scheduler, one, at)
        now_ns[0] += 20_000_000
        ended(scheduler, "a", "b")
        assert "dedup on" in [d["to"] for d in seen.decisions]
        leader, follower = request("c"), request("d")
        assert ask(scheduler, leader) == (64, True)
        load(scheduler, leader, 10)
        assert ask(scheduler, follower) == (None, False)
        ended(scheduler, "c")
        assert ask(scheduler, follower) == (64, True)
        load(scheduler, follower, 15)
        ended(scheduler, "d")
    assert scheduler.cpu_block_pool.held == [0] * 8
    assert scheduler._gpu_block_pool.held == [0] * 64


def test_a_follower_that_is_aborted_leaves_nothing_behind(scheduler):
    with instrument.observe("vllm", fix="auto"):
        adapter = installation._adapters["vllm.simple.dedup"]
        adapter.of(scheduler).dedup.on = True
        leader, follower = request("c"), request("d")
        ask(scheduler, leader)
        load(scheduler, leader, 0)
        assert ask(scheduler, follower) == (None, False)
        scheduler.request_finished(follower, [])
        assert adapter.of(scheduler).dedup.waiting == []
        ended(scheduler, "c")
    assert scheduler.cpu_block_pool.held == [0] * 8
