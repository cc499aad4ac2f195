"""SGLang over the host runtime: what is measured; the kernel back end's write-back in parts; races, failures, order.

Race tests prove themselves: with an ordering taken out on purpose the wrong bytes must be seen (else they would prove
nothing), with it never. The number of iterations is `KVPROBE_RACE_ITERATIONS` (default 20 a case; 10,000 for the full
run); `KVPROBE_TEST_DEVICE=cuda -k no_order_is_lost` runs them on a GPU.
"""

import ctypes
import dataclasses
import itertools
import types

import pytest

import kvprobe.instrument as instrument
from kvprobe.instrument import benefit
from kvprobe.patches import sglang_offload
from kvprobe.patches.sglang import OWN
from kvprobe.patches.sglang_split import SPLIT
from tests.patches.sglang_host import (
    HELD_NS,
    ITERATIONS,
    LAYERS,
    LONG_NS,
    ROW,
    WIDTH,
    WORK_NS,
    Race,
    adapter,
    forward,
    path_of,
    stand,
)

# ---- what is measured and when it is cured ---------------------------------------------------------------------


@pytest.mark.usefixtures("patient_clock")
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


@pytest.mark.parametrize(("page_size", "tokens"), [(1, 160), (8, 1024)])
def test_a_burst_larger_than_its_queue_does_not_wait_for_the_forward(engine, page_size, tokens, monkeypatch):
    """Proved by state: the forward still runs when the submission returns, and only the test ends it."""
    one = engine(tokens, "kernel", page_size, KVHOST_DEPTH=64, CUDA_DEVICE_MAX_CONNECTIONS=16)
    pairs, pair = [], one.module.make_timing_event_pair
    monkeypatch.setattr(one.module, "make_timing_event_pair", lambda: pairs.append(pair()) or pairs[-1])
    one.fill()
    before, ids = one.gpu(), list(range(tokens))
    slots = list(range(0, tokens, 2)) + list(range(1, tokens, 2)) if page_size == 1 else ids[::-1]
    if page_size > 1:
        slots = [start + i for start in ids[::-page_size] for i in range(1 - page_size, 1)]
    with instrument.observe("sglang", fix="auto") as seen:
        path = stand(one, "store", SPLIT)
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
        path_of(one, "store")  # its clock's first event may share a channel with the forward, and would wait for it
        for _ in range(2):
            with forward(one):
                one.schedule_stream.wait_stream(one.forward_stream)
                ack = one.store(ids, ids, fence=False)
                waiting = one.host.rt.event_query(next(iter(path_of(one, "store").live.values())).start)
            ack.finish_event.synchronize()
            adapter().poll()
    assert not waiting  # the start of copying, not of waiting
    theirs = int(ack.start_event.elapsed_time(ack.finish_event) * 1e6)
    assert seen.transfers[-1]["copy_ns"] == pytest.approx(theirs, abs=1_000)


def test_without_a_split_that_burst_does_wait_for_the_forward(engine):
    one = engine(KVHOST_DEPTH=64, CUDA_DEVICE_MAX_CONNECTIONS=16)
    ids, over = list(range(160)), one.host.cuda.Event()
    with instrument.observe("sglang", fix="auto"):
        stand(one, "store", OWN)
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
        stand(one, "store", SPLIT)
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


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("size", [1, 7, 100, 5000])
def test_parts_hold_every_page_once_and_in_order(page_size, size):
    import torch

    from kvprobe.patches.sglang_copies import Work
    from kvprobe.patches.sglang_split import cut

    class Transfer(types.SimpleNamespace):
        def _replace(self, **changed):
            return Transfer(**{**vars(self), **changed})

    kv = Transfer(pool="kv", host_indices=torch.arange(960), device_indices=torch.arange(960).flip(0))
    state = Transfer(pool="state", host_indices=torch.arange(3), device_indices=torch.arange(3))
    none = Transfer(pool="none", host_indices=torch.arange(0), device_indices=torch.arange(0))
    burst = [kv, state, none, kv]
    works = [Work(0, 2 * 960 // page_size, page_size), Work(0, 30, 0), Work(0, 0, 0), Work(0, 960, page_size)]
    parts, largest = cut(burst, works, size)
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
        path_of(one, "store").auto.stand_on(SPLIT)
        assert one.roundtrip()
        adapter().poll()
    assert {t["policy"] for t in seen.transfers} == {"shared"}
    assert [d["what"] for d in seen.decisions if d["what"] != "note"] == ["refuse"]


# ---- failures ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hook", ["poll", "look", "submitted", "work", "size", "parts", "take", "submit", "cut"])
def test_a_hook_that_fails_changes_no_byte(engine, hook, monkeypatch):
    import kvprobe.patches.sglang as patch
    import kvprobe.patches.sglang_split as split

    def broken(*args, **kwargs):
        raise RuntimeError("kvprobe's own mistake")

    one = engine(KVHOST_DEPTH=64)
    owners = {"work": patch, "size": patch, "cut": split} | dict.fromkeys(("parts", "take", "submit"), split.Split)
    monkeypatch.setattr(owners.get(hook, patch.Transfers), hook, broken)
    with instrument.observe("sglang", fix="auto") as seen:
        streams = stand(one, "store", SPLIT).device.streams
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
        stand(one, "store", SPLIT)
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
        path = stand(one, "store", SPLIT)
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
POLICIES = {"own": (OWN, 100_000), "whole": (SPLIT, 100_000), "split": (SPLIT, 24)}
CASES = [*((order, policy) for order in ("fence", "bursts") for policy in POLICIES), ("parts", "split")]


@pytest.mark.parametrize(("order", "policy"), CASES)
def test_no_order_is_lost(engine, order, policy, monkeypatch):
    # Channels enough that none is shared: a shared one keeps the order by itself, and the test would prove nothing.
    # Copies slow enough that a relayout which comes too early finds some of the part before still to be made.
    one = engine(tokens=64, CUDA_DEVICE_MAX_CONNECTIONS=32, KVHOST_LATENCY_US=50 if order == "parts" else 2)
    rung, depth = POLICIES[policy]
    race = Race(one, monkeypatch)
    race.idle = one.host.cuda.Stream()

    run = getattr(race, order)
    with instrument.observe("sglang", fix="auto") as seen:
        path = stand(one, "store", rung)
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
            for rung, depth in (POLICIES[p] for p in ("own", "split", "own", "whole", "split", "whole")):
                stand(one, "store", rung, depth=depth, capacity=depth * 32, channels=32)
                for order in (race.bursts, race.fence, race.parts):
                    assert order(i % 200 + 1, WORK_NS, False)


def test_order_holds_when_kvprobe_is_taken_out_with_bursts_in_flight(engine, monkeypatch):
    one = engine(tokens=64, CUDA_DEVICE_MAX_CONNECTIONS=32)
    tokens, others = list(range(WIDTH)), list(range(WIDTH, 2 * WIDTH))
    for i in range(max(5, ITERATIONS // 100)):
        instrument.install("sglang", fix="auto")
        path = stand(one, "store", SPLIT, depth=24, capacity=24 * 32, channels=32)
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
    assert told["held_unread_blocks"] == 96 - 16 - 16
    assert told["source"] == "HiCache" and told["waited_ns"] is None  # not seen: undecided


def test_bytes_of_a_group_of_pools_are_those_of_its_tokens(engine, monkeypatch):
    """What the scheduler of 0.5.23 has, whatever the model: pools in a group, of which one has the places."""
    one = engine(tokens=64)
    group = types.SimpleNamespace(anchor_entry=types.SimpleNamespace(host_pool=one.pool), size=64, alloc=one.pool.alloc)
    with instrument.observe("sglang") as seen:
        monkeypatch.setattr(one.controller, "mem_pool_host", group)
        monkeypatch.setattr(one.controller, "start_writing", one.controller.write_queue.clear)
        assert one.controller.write(one.host.torch.arange(16)) is not None
    (told,) = [event for event in seen.events if event["kind"] == "offload"][-1:]
    assert (told["stored_blocks"], told["stored_bytes"]) == (16, 16 * one.pool.size_per_token)


def test_idle_steps_notice_the_last_burst_and_are_no_calls(engine):
    """The scheduler starts what is queued in every step; after the last burst there is none."""
    one = engine(tokens=64)
    with instrument.observe("sglang") as seen:
        ack = one.store(list(range(16)), list(range(16)))
        ack.finish_event.synchronize()
        for _ in range(3):
            one.controller.start_writing()
            one.controller.start_loading()
    (burst,) = [event for event in seen.events if event["kind"] == "transfer"]
    assert burst["bytes"] == 16 * one.pool.size_per_token
    assert [call["call"] for call in seen.calls if "start_" in call["call"]] == ["HiCacheController.start_writing"]


class Request21(types.SimpleNamespace):
    """A request of 0.5.21, which has the indices of what lies on the GPU."""

    prefix_indices = range(48)


class Request22(types.SimpleNamespace):
    """A request of 0.5.22 and later, which has only their number."""

    prefix_len = 48


@pytest.mark.parametrize("kind", [Request21, Request22])
def test_what_a_prompt_finds_is_counted_once_admitted(kind):
    hooks, adder = sglang_offload.Offload(), types.SimpleNamespace(can_run_list=[])
    hooks._account = benefit.BenefitTotals("sglang.offload", "HiCache")
    request = kind(rid="r", origin_input_ids=[0] * 100, host_hit_length=32)
    hooks.admitted(lambda: None, adder, request, False, None)  # there was no room for it
    assert hooks._account.sums["requests"] is None
    hooks.admitted(lambda: adder.can_run_list.append(request), adder, request, False, None)
    hooks.admitted(lambda: adder.can_run_list.append(request), adder, request, False, None)  # it was retracted
    told = hooks._account.sums
    assert (told["requests"], told["prompt_tokens"], told["gpu_hit_tokens"], told["hit_tokens"]) == (1, 100, 48, 32)


def test_what_steps_with_a_load_took_beyond_their_prompts_is_waiting(monkeypatch):
    hooks, now = sglang_offload.Offload(), [0]
    hooks._account = benefit.BenefitTotals("sglang.offload", "HiCache")
    monkeypatch.setattr(sglang_offload, "time", types.SimpleNamespace(monotonic_ns=lambda: now[0]))

    def step(begin_ns, end_ns, tokens, load=False):
        mode = types.SimpleNamespace(is_extend=lambda: tokens > 0)
        batch = types.SimpleNamespace(
            forward_mode=mode, extend_num_tokens=tokens or None, hicache_consumer_index=0 if load else -1
        )
        result = types.SimpleNamespace()
        now[0] = begin_ns
        assert hooks.launched(lambda: result, None, batch) is result
        now[0] = max(now[0], end_ns)
        hooks.finished(begin_ns, None, (None, batch, result), {})

    step(0, 90_000, 20, load=True)  # what prefill costs is not known yet
    assert hooks._account.sums["waits"] is None
    for number in range(3):
        step(number * 200_000, number * 200_000 + 100_000, 100)  # 1,000 ns a token
    assert (hooks._account.sums["waits"], hooks._account.sums["waited_ns"]) == (1, 90_000 - 20_000)
    step(590_000, 595_000, 0, load=True)  # decoding: the batch still names the load, which is over
    step(600_000, 650_000, 100, load=True)  # quicker than its tokens would have been without a load
    assert (hooks._account.sums["waits"], hooks._account.sums["waited_ns"]) == (2, 70_000)


def test_the_storage_layer_tells_pages_and_bytes(engine, monkeypatch):
    one = engine(tokens=64, page_size=4)
    torch = one.host.torch
    with instrument.observe("sglang") as seen:
        monkeypatch.setattr(one.controller, "page_set_func", lambda hashes, indices, extra: True, raising=False)
        operation = one.controllers.StorageOperation(torch.arange(32), list(range(32)), hash_value=["h"] * 8)
        one.controller._page_backup(operation)
    (call,) = [call for call in seen.calls if call["adapter"] == "sglang.storage"]
    assert (call["direction"], call["copies"], call["bytes"]) == ("store", 8, 32 * one.pool.get_size_per_token())
