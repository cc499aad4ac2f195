"""vLLM's own connectors to other libraries and tiers: what they tell is what they were given, and nothing changes."""

import mmap
import time
import types

import pytest

import kvprobe.instrument as instrument
from kvprobe.instrument import installation
from kvprobe.instrument.benefit import BenefitTotals

pytestmark = pytest.mark.servers
pytest.importorskip("vllm")


def only(seen, adapter):
    (call,) = [call for call in seen.calls if call["adapter"] == adapter]
    return call


def test_nixl_tells_posting_time_and_descriptors():
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats import NixlKVConnectorStats

    telemetry = types.SimpleNamespace(postDuration=1500, xferDuration=20_000, totalBytes=1 << 20, descCount=256)
    with instrument.observe("vllm") as seen:
        stats = NixlKVConnectorStats()
        stats.record_transfer(telemetry)
    assert stats.data["num_descriptors"] == [256]
    call = only(seen, "vllm.nixl")
    assert (call["dur_ns"], call["took_ns"], call["bytes"], call["copies"]) == (1_500_000, 20_000_000, 1 << 20, 256)
    assert call["cause"] == "posts 256 descriptors"


@pytest.mark.parametrize("answer", [0, -1])
def test_mooncake_tells_descriptors_and_the_bytes_that_went(answer):
    from vllm.distributed.kv_transfer.kv_connector.v1.mooncake import mooncake_connector as mooncake

    sent = []
    worker = types.SimpleNamespace(
        engine=types.SimpleNamespace(batch_transfer_sync_write=lambda *args: sent.append(args) or answer),
        xfer_stats=types.SimpleNamespace(record_transfer=lambda **_: None, record_failed_transfer=lambda: None),
    )
    with instrument.observe("vllm") as seen:
        got = mooncake.MooncakeConnectorWorker._send_blocks(worker, "peer:1", [1, 2], [3, 4], [4096, 8192])
    assert got == answer and sent == [("peer:1", [1, 2], [3, 4], [4096, 8192])]
    call = only(seen, "vllm.mooncake")
    assert (call["copies"], call.get("bytes", 0)) == (2, 12288 if answer == 0 else 0)


def test_the_mooncake_stores_threads_tell_each_operation():
    from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.worker import KVTransferThread

    noted = []
    thread = types.SimpleNamespace(_record_operation_cb=lambda **told: noted.append(told))
    with instrument.observe("vllm") as seen:
        KVTransferThread._record_operation(thread, "save_put", time.perf_counter() - 0.5, 4, num_bytes=4096)
        KVTransferThread._record_operation(thread, "save_put", time.perf_counter(), 4, num_bytes=4096, status="error")
    assert len(noted) == 2
    call = only(seen, "vllm.mooncake_store")
    assert (call["direction"], call["bytes"], call["copies"]) == ("store", 4096, 4) and call["dur_ns"] >= 500_000_000


def test_the_file_back_end_tells_blocks_and_bytes(tmp_path):
    from vllm.v1.kv_offload.tiering.fs import io

    memory = mmap.mmap(-1, 4 * mmap.PAGESIZE)
    memory[:] = bytes(range(256)) * (len(memory) // 256)
    view, paths, offsets = memoryview(memory), [str(tmp_path / name) for name in "abc"], [0, 4096, 8192]
    with instrument.observe("vllm") as seen:
        io.batch_store_block(paths, view, offsets, 4096, use_o_direct=False)
        back = memoryview(bytearray(4 * 4096))
        io.batch_load_block(paths, back, offsets, 4096, use_o_direct=False)
    assert bytes(back[: 3 * 4096]) == bytes(view[: 3 * 4096])
    calls = [call for call in seen.calls if call["adapter"] == "vllm.disk_tier"]
    assert [(call["direction"], call["copies"], call["bytes"]) for call in calls] == [
        ("store", 3, 3 * 4096),
        ("load", 3, 3 * 4096),
    ]


def test_the_block_manager_tells_what_nobody_loaded():
    from vllm.v1.kv_offload.base import ReqContext
    from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

    with instrument.observe("vllm"):
        instrument.install("vllm")
        adapter = installation._adapters["vllm.offload"]
        adapter.account = account = BenefitTotals("vllm.offload", "OffloadingConnector")
        manager, context = CPUOffloadingManager(num_chunks=4), ReqContext(req_id="r")
        keys = [bytes([n]) * 32 + b"\0\0\0\0" for n in range(6)]
        manager.on_new_request(context)
        assert len(manager.prepare_store(keys[:4], context).keys_to_store) == 4
        manager.complete_store(keys[:4], context)
        manager.prepare_load(keys[:1], context)
        manager.complete_load(keys[:1], context)
        assert len(manager.prepare_store(keys[4:], context).evicted_keys) == 2
        sums = dict(account.sums)
    assert (sums["stored_blocks"], sums["loaded_blocks"]) == (6, 1)
    assert sums["unread_blocks"] in (1, 2)  # by the policy, the one that was loaded may be among the evicted
