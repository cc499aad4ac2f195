"""vLLM's own transfer handlers of 0.12 to 0.19, from its wheels, with kvprobe around them."""

import pytest

import kvprobe.instrument as instrument
from kvprobe.instrument import installation
from kvprobe.instrument.submissions import POOLED
from kvprobe.offload import Submitter
from kvprobe.offload.auto import REST
from kvprobe.offload.rungs import Sample

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


@pytest.mark.usefixtures("patient_clock")
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
@pytest.mark.parametrize("hook", ["transfer", "swap", "finished", "around_init"])
def test_a_hook_that_fails_changes_no_result(vllm_handlers, install, version, hook, monkeypatch):
    handlers = vllm_handlers(version)
    install()

    def broken(*args, **kwargs):
        raise RuntimeError("kvprobe's own mistake")

    import kvprobe.patches.vllm_loops as copies

    instrument.uninstall()
    owner = copies.SharedStreams if version == "0.12.0" and hook == "transfer" else copies.CopyHandlers
    owner = {"swap": copies._Loop, "transfer": copies.SharedStreams if version == "0.12.0" else copies.PooledLoop}.get(
        hook, copies.CopyHandlers
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


def saturate(handlers, transfers=30, width=32):
    """Fence first, then enqueue more than the queue takes: stores behind a forward, as a server does it."""
    runtime, seen = handlers.host.rt, 0
    for _ in range(transfers):
        runtime.launch_delay(handlers.host.compute, 20_000_000)  # longer than submitting takes on a busy machine
        blocks = list(range(width))
        handlers.store(blocks, blocks)
        seen += len(handlers.finished())
    handlers.host.cuda.current_stream().synchronize()
    handlers.drain(transfers - seen)


@pytest.mark.parametrize("version", ["0.12.0", "0.14.1", "0.15.1"])
def test_auto_names_the_full_queue_and_switches_to_the_submitter(vllm_handlers, version):
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
    assert whats[0] == ("switch", "pooled/auto")
    assert "launch_queue_saturation" in seen.decisions[0]["why"]
    assert {what for what, _ in whats} <= {"switch", "keep", "rollback", "note"}  # which, real time says
    after = [t for t in seen.transfers if t["policy"] == "pooled"]
    assert after
    assert all(t["methods"] for t in after)
    assert all(0 < t["descriptors"] < t["copies"] for t in after)  # neighbours were merged


def on_the_submitter(handlers):
    """Both directions stand on the submitter's rung, and stay there."""
    one = adapter(handlers.version)
    paths = [one.path_of(handlers.store_handler, "store"), one.path_of(handlers.load_handler, "load")]
    for path in paths:
        path.auto.active = False
        path.auto.stand_on(POOLED)
    return paths


@pytest.mark.usefixtures("patient_clock")
@pytest.mark.parametrize("version", LOOPS)
def test_what_the_submitter_carries_is_whole_timed_and_merged(vllm_handlers, version):
    handlers = vllm_handlers(version)
    with instrument.observe("vllm", fix="auto") as seen:
        handlers.make()
        on_the_submitter(handlers)
        for _ in range(3):
            assert roundtrip(handlers)
    assert [t["policy"] for t in seen.transfers] == ["pooled"] * 36
    assert seen.states[NAME.get(version, "vllm.copies.loop")] == "removed"
    for transfer in seen.transfers:
        assert transfer["copies"] == 5 * handlers.copies_per_block
        assert transfer["bytes"] == 5 * handlers.copies_per_block * handlers.block_bytes
        assert transfer["copy_ns"] > 0
        assert transfer["queue_ns"] >= 0
        assert transfer["ok"] is True


@pytest.mark.parametrize("version", LOOPS)
def test_the_submitter_can_be_left_and_taken_again_with_transfers_in_flight(vllm_handlers, version):
    """Events that stood for the submitter's end go back into vLLM's pools and are recorded anew."""
    handlers = vllm_handlers(version)
    with instrument.observe("vllm", fix="auto"):
        handlers.make()
        paths = on_the_submitter(handlers)
        for rung in (POOLED, paths[0].auto.base, POOLED, paths[0].auto.base):
            for path in paths:
                path.auto.stand_on(rung)
            assert roundtrip(handlers)
    for _ in range(2):
        assert roundtrip(handlers)


@pytest.mark.parametrize("version", LOOPS)
def test_a_submitter_that_takes_no_more_is_left_once_and_loses_nothing(vllm_handlers, version):
    handlers = vllm_handlers(version)
    with instrument.observe("vllm", fix="auto") as seen:
        handlers.make()
        paths = on_the_submitter(handlers)
        paths[0].device.submitter.close()
        assert roundtrip(handlers)
    assert [(d["what"], d["from"]) for d in seen.decisions] == [("refuse", "pooled/auto")] * 2
    assert all("takes no more transfers" in d["why"] for d in seen.decisions)
    assert seen.states[NAME.get(version, "vllm.copies.loop")] == "removed"


@pytest.mark.parametrize("version", LOOPS)
def test_a_mistake_in_handing_over_loses_no_copy(vllm_handlers, version, monkeypatch):
    handlers = vllm_handlers(version)
    own, calls = Submitter.submit_all, []

    def third(self, *args, **kwargs):
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("kvprobe's own mistake")
        return own(self, *args, **kwargs)

    monkeypatch.setattr(Submitter, "submit_all", third)
    with instrument.observe("vllm", fix="auto") as seen:
        handlers.make()
        on_the_submitter(handlers)
        for _ in range(2):
            assert roundtrip(handlers)
    assert len(calls) == 3
    assert seen.states[NAME.get(version, "vllm.copies.loop")].startswith("failed: ")


@pytest.mark.parametrize("version", LOOPS)
@pytest.mark.parametrize("hook", ["copies", "transfer_events", "replace_events", "hand_over"])
def test_a_hook_of_handing_over_that_fails_changes_no_result(vllm_handlers, version, hook, monkeypatch):
    import kvprobe.patches.vllm_loops as copies

    def broken(*args, **kwargs):
        raise RuntimeError("kvprobe's own mistake")

    handlers = vllm_handlers(version)
    monkeypatch.setattr(copies.SharedStreams if version == "0.12.0" else copies.PooledLoop, hook, broken)
    with instrument.observe("vllm", fix="auto") as seen:
        handlers.make()
        on_the_submitter(handlers)
        for _ in range(3):
            assert roundtrip(handlers)
    assert seen.states[NAME.get(version, "vllm.copies.loop")].startswith("failed: ")


@pytest.mark.parametrize("version", LOOPS)
def test_a_copy_that_fails_in_the_submitter_is_made_by_vllm(vllm_handlers, version):
    handlers = vllm_handlers(version)
    with instrument.observe("vllm", fix="auto") as seen:
        handlers.make()
        paths = on_the_submitter(handlers)
        submission = paths[0].device.submitter
        before = handlers.fill()
        handlers.host.rt.library.kvhostFailCopy(1, 1)
        blocks = [3, 5, 9, 11]
        handlers.store(blocks, blocks)
        submission.wait()
        handlers.host.rt.library.kvhostFailCopy(0, 0)
        handlers.drain(1)
        handlers.wipe(blocks)
        handlers.load(blocks, blocks)
        handlers.drain(1)
        assert handlers.same(before, list(range(64)))
    assert [d["what"] for d in seen.decisions] in ([], ["refuse"])  # another method may have carried it


@pytest.mark.parametrize("version", ["0.14.1", "0.15.1"])
def test_waiting_for_a_job_waits_for_the_submitter(vllm_handlers, version):
    handlers = vllm_handlers(version, KVHOST_D2H_GBPS="0.1")
    with instrument.observe("vllm", fix="auto"):
        handlers.make()
        on_the_submitter(handlers)
        job = handlers.store([1, 2, 3], [1, 2, 3])
        handlers.store_handler.wait({job})
        assert handlers.finished() == [(job, True)]


def test_pageable_memory_stays_with_vllm(vllm_handlers, monkeypatch):
    handlers = vllm_handlers("0.12.0")
    with instrument.observe("vllm", fix="auto") as seen:
        handlers.make()
        on_the_submitter(handlers)
        monkeypatch.setattr(type(handlers.host.rt), "memory_kind", lambda self, pointer: "pageable")
        assert roundtrip(handlers)
    assert [d["what"] for d in seen.decisions] == ["refuse"] * 2
    assert "pageable" in seen.decisions[0]["why"]


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
    """Let a path's auto find that no rung helps, from transfers it is told of."""
    while not path.auto.resting:
        path.auto.submitted(Sample(64, 64_000_000, 64 << 16, path.auto.rung))


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
