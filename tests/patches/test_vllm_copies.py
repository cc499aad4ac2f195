"""vLLM's own transfer handlers of 0.12 to 0.19, from its wheels, with kvprobe around them."""

import dataclasses

import pytest

import kvprobe.instrument as instrument
from kvprobe.instrument import installation
from kvprobe.instrument.ladder import REST, Sample

LOOPS = ["0.12.0", "0.13.0", "0.14.1", "0.15.1"]
NAME = {"0.12.0": "vllm.copies.shared"}


def adapter(version):
    return installation._adapters[NAME.get(version, "vllm.copies.loop")]


def roundtrip(handlers, count=6, width=5):
    """Store blocks, wipe them on the GPU, load them back; True when every byte came back and nothing else moved."""
    before = handlers.fill()
    blocks = list(range(count * width))
    for i in range(count):
        part = blocks[i * width : (i + 1) * width]
        handlers.store(part, list(reversed(part)))
    stored = handlers.drain(count)
    handlers.wipe(blocks)
    for i in range(count):
        part = blocks[i * width : (i + 1) * width]
        handlers.load(list(reversed(part)), part)
    loaded = handlers.drain(count)
    assert sorted(job for job, _ in stored + loaded) == list(range(handlers.job - 2 * count + 1, handlers.job + 1))
    assert all(ok for _, ok in stored + loaded)
    return handlers.same(before, list(range(64)))


@pytest.mark.parametrize("version", LOOPS)
@pytest.mark.parametrize("fix", ["off", "auto"])
def test_bytes_come_back_and_every_transfer_is_timed(vllm_handlers, version, fix):
    handlers = vllm_handlers(version)
    with instrument.observe("vllm", fix=fix) as seen:
        handlers.make()
        assert roundtrip(handlers)
    assert seen.states[NAME.get(version, "vllm.copies.loop")] == "removed"
    assert len(seen.transfers) == 12
    for transfer in seen.transfers:
        assert transfer["copies"] == 5 * handlers.copies_per_block
        assert transfer["bytes"] == 5 * handlers.copies_per_block * handlers.block_bytes
        assert transfer["submit_ns"] > 0
        assert transfer["build_ns"] > 0
        assert transfer["copy_ns"] > 0
        assert transfer["queue_ns"] >= 0
        assert transfer["poll_ns"] >= 0
        assert transfer["ok"] is True
    assert [t["direction"] for t in seen.transfers] == ["store"] * 6 + ["load"] * 6


@pytest.mark.parametrize("version", LOOPS)
def test_streams_per_transfer_are_reported_as_upstream_from_0_13_on(vllm_handlers, install, version):
    vllm_handlers(version)
    states = install()
    if version == "0.12.0":
        assert states["vllm.copies.shared"] == "applied"
    else:
        assert states["vllm.copies.shared"].startswith("not needed: already upstream: a stream per transfer")
        assert states["vllm.copies.loop"] == "applied"
    assert ("already upstream" in states["vllm.loads.dedup"]) == (version >= "0.15")


@pytest.mark.parametrize("version", LOOPS)
def test_install_uninstall_install_again(vllm_handlers, version):
    handlers = vllm_handlers(version)
    module = handlers.module
    kind = getattr(module, adapter_class(module))
    before = (module.ops, dict(vars(kind)))
    for _ in range(3):
        instrument.install("vllm", fix="auto")
        assert vars(kind)["transfer_async"] is not before[1]["transfer_async"]
        handlers.make()
        assert roundtrip(handlers)
        instrument.uninstall("vllm")
        assert module.ops is before[0]
        assert dict(vars(kind)) == before[1]
        assert roundtrip(handlers)


def adapter_class(module):
    return (
        "CpuGpuOffloadingHandler" if hasattr(module, "CpuGpuOffloadingHandler") else "SingleDirectionOffloadingHandler"
    )


@pytest.mark.parametrize("version", LOOPS)
@pytest.mark.parametrize("hook", ["transfer", "swap", "finished", "made"])
def test_a_hook_that_fails_changes_no_result(vllm_handlers, install, version, hook, monkeypatch):
    handlers = vllm_handlers(version)
    install()

    def broken(*args, **kwargs):
        raise RuntimeError("kvprobe's own mistake")

    import kvprobe.patches.vllm_copies as copies

    instrument.uninstall()
    owner = copies.SharedStreams if version == "0.12.0" and hook == "transfer" else copies._Copies
    owner = {"swap": copies._Loop, "transfer": copies.SharedStreams if version == "0.12.0" else copies.PooledLoop}.get(
        hook, copies._Copies
    )
    monkeypatch.setattr(owner, hook, broken)
    install()
    handlers.make()
    for _ in range(3):
        assert roundtrip(handlers)
    assert str(adapter(version).state).startswith("failed: ")


@pytest.mark.parametrize("version", LOOPS)
def test_a_changed_signature_is_left_alone(vllm_handlers, install, version):
    handlers = vllm_handlers(version)
    kind = getattr(handlers.module, adapter_class(handlers.module))
    own = kind.transfer_async

    def changed(self, job, what, *, priority):
        return own(self, job, what)

    kind.transfer_async = changed
    install()
    assert kind.transfer_async is changed
    assert str(adapter(version).state).startswith("skipped: vllm.v1.kv_offload.worker.cpu_gpu:")


def saturate(handlers, transfers=60, width=32):
    """Fence first, then enqueue more than the queue takes: stores behind a forward, as a server does it."""
    runtime, seen = handlers.host.rt, 0
    for _ in range(transfers):
        runtime.launch_delay(handlers.host.compute, 3_000_000)  # longer than submitting takes, however busy the machine
        blocks = list(range(width))
        handlers.store(blocks, blocks)
        seen += len(handlers.finished())
    handlers.host.cuda.current_stream().synchronize()
    handlers.drain(transfers - seen)


@pytest.mark.parametrize(("version", "rung"), [("0.12.0", "batch"), ("0.14.1", "batch"), ("0.15.1", "batch")])
def test_auto_names_the_full_queue_switches_and_keeps_what_helps(vllm_handlers, version, rung):
    handlers = vllm_handlers(version, KVHOST_DEPTH=64, handlers={"layers": 4})
    with instrument.observe("vllm", fix="auto") as seen:
        handlers.make()
        before = handlers.fill()
        saturate(handlers)
        blocks = list(range(32))
        handlers.wipe(blocks)
        handlers.load(blocks, blocks)
        handlers.drain(1)
        assert handlers.same(before, blocks)
    whats = [(d["what"], d["to"]) for d in seen.decisions]
    assert whats[0] == ("switch", rung)
    assert "launch_queue_saturation" in seen.decisions[0]["why"]
    assert whats[1][0] == "keep"
    assert seen.decisions[1]["evidence"]["gain"] > 1.2
    after = [t for t in seen.transfers if t["policy"] == rung]
    assert after
    assert all(t["submissions"] == 1 for t in after)


@pytest.mark.parametrize("version", ["0.12.0", "0.14.1"])
def test_a_runtime_without_batches_gets_the_copies_split_over_streams(vllm_handlers, version, monkeypatch):
    handlers = vllm_handlers(version, KVHOST_DEPTH=64, handlers={"layers": 4})
    runtime = type(handlers.host.rt)
    own = runtime.address
    monkeypatch.setattr(runtime, "address", lambda self, name: 0 if name == "cudaMemcpyBatchAsync" else own(self, name))
    with instrument.observe("vllm", fix="auto") as seen:
        handlers.make()
        before = handlers.fill()
        saturate(handlers)
        handlers.wipe(list(range(32)))
        handlers.load(list(range(32)), list(range(32)))
        handlers.drain(1)
        assert handlers.same(before, list(range(64)))
    assert seen.decisions[0]["to"] == ("pooled" if version == "0.12.0" else "split")


@pytest.mark.parametrize("lane", [0, 1, 2])
def test_a_split_that_fails_between_two_streams_loses_no_copy(vllm_handlers, lane, monkeypatch):
    handlers = vllm_handlers("0.14.1", handlers={"layers": 1})
    with instrument.observe("vllm", fix="auto") as seen:
        handlers.make()
        before = handlers.fill()
        path = adapter("0.14.1").path_of(handlers.store_handler, "store")
        path.device.limits = dataclasses.replace(path.device.limits, depth=16)
        path.ladder._stand_on("split")
        wrapped, own = [], type(path.device).torch_stream

        def fails(device, torch, handle):
            wrapped.append(handle)
            if len(wrapped) == lane + 1:
                raise RuntimeError("kvprobe's own mistake")
            return own(device, torch, handle)

        monkeypatch.setattr(type(path.device), "torch_stream", fails)
        blocks = list(range(30))
        handlers.store(blocks, blocks[::-1])
        handlers.drain(1)
        handlers.wipe(blocks)
        handlers.load(blocks[::-1], blocks)
        handlers.drain(1)
        assert handlers.same(before, blocks)
    assert len(wrapped) == lane + 1
    assert seen.states["vllm.copies.loop"].startswith("failed: ")


def test_a_batch_that_the_runtime_refuses_is_copied_as_vllm_does_and_never_tried_again(vllm_handlers, monkeypatch):
    from kvprobe.errors import CudaError

    handlers = vllm_handlers("0.12.0")

    def refuse(self, *args):
        raise CudaError("cudaMemcpyBatchAsync", 801, "cudaErrorNotSupported")

    with instrument.observe("vllm", fix="auto") as seen:
        handlers.make()
        monkeypatch.setattr(type(handlers.host.rt), "memcpy_batch_async", refuse)
        a = adapter("0.12.0")
        for direction in ("store", "load"):
            a.path_of(handlers.store_handler, direction).ladder._stand_on("batch")
        assert roundtrip(handlers)
    assert [(d["what"], d["from"]) for d in seen.decisions] == [("refuse", "batch")] * 2


def test_a_refused_copy_is_reported_instead_of_ignored(vllm_handlers):
    handlers = vllm_handlers("0.12.0")
    with instrument.observe("vllm", fix="auto") as seen:
        handlers.make()
        handlers.fill()
        handlers.host.rt.library.kvhostFailCopy(3, 1)
        spec = (handlers.mediums.GPULoadStoreSpec([0, 1, 2]), handlers.mediums.CPULoadStoreSpec([0, 1, 2]))
        assert handlers.store_handler.transfer_async(1, spec) is False
    assert "refused by CUDA (error 1)" in seen.decisions[0]["why"]


def exhaust(path):
    """Let a path's ladder find that no rung helps, from transfers it is told of."""
    while not path.ladder.resting:
        path.ladder.submitted(Sample(64, 64_000_000, 0, 64 << 16, path.ladder.rung))


@pytest.mark.parametrize("version", LOOPS)
def test_a_path_with_nothing_left_to_try_leaves_fifteen_transfers_in_sixteen_to_vllm(vllm_handlers, version):
    handlers = vllm_handlers(version)
    with instrument.observe("vllm", fix="auto") as seen:
        handlers.make()
        before = handlers.fill()
        handlers.store([0, 1, 2], [0, 1, 2])
        handlers.drain(1)
        one = adapter(version)
        exhaust(one.path_of(handlers.store_handler, "store"))
        hooked = []
        own = one._hook
        one._hook = lambda *arguments: hooked.append(handlers.job) or own(*arguments)
        for _ in range(3 * REST):
            handlers.store([3, 4, 5], [5, 4, 3])
            handlers.drain(1)
        handlers.wipe([0, 1, 2, 3, 4, 5])
        handlers.load([0, 1, 2, 5, 4, 3], [0, 1, 2, 3, 4, 5])
        handlers.drain(1)
        assert handlers.same(before, list(range(64)))
    stores = [t for t in seen.transfers if t["direction"] == "store"]
    watched = list(range(1 + REST, 2 + 3 * REST, REST))
    unordered = version == "0.13.0"  # there every store needs its wait for the compute stream
    assert [t["id"] for t in stores] == ([1] + (list(range(2, 2 + 3 * REST)) if unordered else watched))
    if not unordered:
        assert [t.get("one_in") for t in stores] == [None, REST, REST, REST]
        assert [job for job in hooked if job <= 1 + 3 * REST] == watched  # one call of each, of all its tensors


def test_a_transfer_of_known_tensors_is_watched_with_one_hook(vllm_handlers):
    handlers = vllm_handlers("0.12.0", handlers={"layers": 8})
    with instrument.observe("vllm", fix="off") as seen:
        handlers.make()
        one, hooked = adapter("0.12.0"), []
        own = one._hook
        one._hook = lambda *arguments: hooked.append(1) or own(*arguments)
        for expected in (16, 17, 18):  # two calls a tensor for the first transfer, then one for each
            handlers.store([1, 2], [1, 2])
            handlers.drain(1)
            assert len(hooked) == expected
    assert {(t["copies"], t["bytes"]) for t in seen.transfers} == {(32, 32 * handlers.block_bytes)}
