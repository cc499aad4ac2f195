"""LMCache's real modules on its CPU stub device: signatures as the adapters expect, calls timed, results unchanged."""

import contextlib
import types

import pytest

import kvprobe.instrument as instrument
from kvprobe.instrument.calls import TimedCalls

pytestmark = pytest.mark.servers
torch = pytest.importorskip("torch")
pytest.importorskip("lmcache")
connectors = pytest.importorskip("lmcache.v1.gpu_connector.gpu_connectors")
groups = pytest.importorskip("lmcache.v1.multiprocess.object_group_transfer")


class Chunk:
    def __init__(self, fill):
        self.tensor = torch.full((4, 8), float(fill))

    def get_size(self):
        return self.tensor.numel() * 4


@pytest.fixture
def connector(monkeypatch):
    """The real class with its per-chunk copy on CPU tensors: LMCache's kernels want a GPU or its native CPU device."""
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    made = object.__new__(connectors.VLLMPagedMemGPUConnectorV2)
    made.waits = 0

    def synchronize():
        made.waits += 1

    made.load_stream = types.SimpleNamespace(synchronize=synchronize)
    made.paged = torch.zeros(12, 8)
    made.to_gpu = lambda chunk, start, end, **kw: made.paged[start:end].copy_(chunk.tensor)
    made.from_gpu = lambda chunk, start, end, **kw: chunk.tensor.copy_(made.paged[start:end])
    return made


def roundtrip(made):
    chunks = [Chunk(i + 1) for i in range(3)]
    made.batched_to_gpu(chunks, [0, 4, 8], [4, 8, 12])
    back = [Chunk(0) for _ in range(3)]
    made.batched_from_gpu(back, [0, 4, 8], [4, 8, 12])
    return all(torch.equal(a.tensor, b.tensor) for a, b in zip(chunks, back, strict=True))


def test_signatures_fit_and_everything_is_put_back(connector):
    kinds = [connectors.VLLMPagedMemGPUConnectorV2, connectors.VLLMPagedMemLayerwiseGPUConnector]
    before = [dict(vars(kind)) for kind in kinds] + [dict(vars(groups))]
    for _ in range(3):
        states = instrument.install("lmcache", fix="auto")
        assert states["lmcache.connectors"] == states["lmcache.server"] == "applied"
        assert roundtrip(connector)
        instrument.uninstall("lmcache")
        assert [dict(vars(kind)) for kind in kinds] + [dict(vars(groups))] == before
    assert connector.waits == 3


def test_loads_are_timed_and_the_waiting_call_is_named(connector):
    with instrument.observe("lmcache") as seen:
        assert roundtrip(connector)
    load, store = seen.calls
    assert (load["direction"], load["copies"], load["bytes"]) == ("load", 3, 3 * 4 * 8 * 4)
    assert "load_stream.synchronize()" in load["cause"]
    assert (store["direction"], store["copies"]) == ("store", 3)
    assert load["dur_ns"] > 0


def test_a_hook_that_fails_changes_no_byte(connector, monkeypatch):
    def broken(*args, **kwargs):
        raise RuntimeError("kvprobe's own mistake")

    monkeypatch.setattr(TimedCalls, "_emit", broken)
    with instrument.observe("lmcache") as seen:
        for _ in range(3):
            assert roundtrip(connector)
    assert seen.states["lmcache.connectors"].startswith("failed: ")


def test_chunks_that_nobody_loaded_are_counted_when_they_are_removed():
    import threading

    from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend

    policy = types.SimpleNamespace(**dict.fromkeys(("update_on_put", "update_on_force_evict"), lambda key: None))
    policy.update_on_hit = lambda key, cache: None
    backend = object.__new__(LocalCPUBackend)
    backend.hot_cache, backend.cpu_lock, backend.cache_policy = {}, threading.Lock(), policy
    backend.batched_msg_sender, backend.keys_in_request = None, []
    backend.use_hot = True

    def chunk():
        made = Chunk(1)
        made.ref_count_up = made.ref_count_down = made.pin = made.unpin = lambda: None
        made.is_pinned = False
        return made

    with instrument.observe("lmcache") as seen:
        for key in "abc":
            backend.submit_put_task(key, chunk())
        backend.submit_put_task("a", chunk())  # there already
        assert backend.get_blocking("a") is not None and backend.get_blocking("z") is None
        assert [backend.remove(key) for key in "abz"] == [True, True, False]
    told = [event for event in seen.events if event["kind"] == "offload"][-1]
    assert (told["stored_blocks"], told["loaded_blocks"], told["unread_blocks"]) == (3, 1, 1)
    assert told["stored_bytes"] == 3 * 4 * 8 * 4 and told["held_unread_blocks"] == 1
