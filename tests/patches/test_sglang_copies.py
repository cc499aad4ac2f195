"""SGLang's direct back end over the host runtime, its copies in the submitter's hands: bytes, layers, order, faults."""

import contextlib
import itertools
import types

import pytest

import kvprobe.instrument as instrument
from kvprobe.instrument.device import Device
from kvprobe.instrument.submissions import POOLED, HandOver
from kvprobe.offload.submitter import Submitter
from kvprobe.patches.sglang import OWN
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
    plain,
    stand,
)

POOLS = {
    "rows": {"layout": "layer_first"},
    "rows of pages": {"layout": "layer_first", "page_size": 4},
    "pages": {"layout": "page_first_direct", "page_size": 4},
    "rows of one plane": {"layout": "layer_first", "mla": True},
    "pages of one plane": {"layout": "page_first_direct", "page_size": 4, "mla": True},
}


@pytest.fixture
def direct(engine):
    """Factory of an engine with the direct back end: `direct("pages", tokens=64)`."""
    return lambda pool="rows", tokens=512, **more: engine(tokens, "direct", **POOLS[pool], **more)


def on_the_submitter(one):
    """Both directions stand on the submitter's rung for good."""
    return stand(one, "store", POOLED), stand(one, "load", POOLED)


def scattered(tokens, page_size):
    """Slots of which no two pages are neighbours."""
    pages = [list(range(first, first + page_size)) for first in range(0, tokens, page_size)]
    return [slot for page in pages[::2] + pages[1::2] for slot in page]


def read_by_layers(one, tokens, stream):
    """Compute on a stream that waits for each layer's event and reads its rows: what it read, layer by layer."""
    read, counter = [], one.controller.layer_done_counter
    counter.set_consumer(one.producer)
    with one.host.cuda.stream(stream):
        for layer in range(LAYERS):
            counter.wait_until(layer)
            of_layer = [plain(buffer) for buffer in one.layers[layer::LAYERS]]
            one.kernels.kernel(
                lambda rows=of_layer: read.append([row[tokens].clone() for row in rows]), stream.cuda_stream
            )
    return read


# ---- bytes -----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("patient_clock")
@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("method", ["auto", "loop"])
def test_every_layouts_bytes_come_back_and_its_bursts_are_timed(direct, pool, method, monkeypatch):
    monkeypatch.setattr(Device, "method", method)
    one = direct(pool)
    with instrument.observe("sglang", fix="auto") as seen:
        on_the_submitter(one)
        assert one.roundtrip()
        adapter().poll()
        assert not seen.decisions
    assert [t["direction"] for t in seen.transfers] == ["store"] * 8 + ["load"] * 8
    for t in seen.transfers:
        assert t["policy"] == "pooled" and t["methods"] and t["ok"]
        assert t["bytes"] == 64 * one.planes * LAYERS * ROW
        assert t["tokens"] == 64
        assert t["copy_ns"] > 0 and t["queue_ns"] >= 0


@pytest.mark.parametrize("version", ["0.5.21", "0.5.22"])
@pytest.mark.parametrize("pool", ["rows", "rows of pages", "pages"])
def test_the_versions_before_hand_over_the_same(direct, pool, version):
    one = direct(pool, version=version)
    with instrument.observe("sglang", fix="auto") as seen:
        on_the_submitter(one)
        assert one.roundtrip()
        adapter().poll()
        assert not seen.decisions
    assert [(t["policy"], t["bytes"]) for t in seen.transfers] == [("pooled", 64 * 2 * LAYERS * ROW)] * 16


@pytest.mark.parametrize("pool", POOLS)
def test_both_ways_write_the_same_bytes_to_the_same_places(direct, pool):
    one = direct(pool, tokens=64)
    page = one.pool.page_size
    slots, back = scattered(64, page), scattered(64, page)[::-1]
    if page > 1:
        back = [start + i for start in back[page - 1 :: page] for i in range(page)]
    one.fill()
    with instrument.observe("sglang", fix="auto"):
        for rung in (OWN, POOLED):
            stand(one, "store", rung), stand(one, "load", rung)
            one.cpu_fill(0, list(range(64)))
            one.store(slots, list(range(64))).finish_event.synchronize()
            stored = one.cpu().clone()
            before = one.gpu().clone()
            one.load(slots, back).finish_event.synchronize()
            loaded = one.gpu().clone()
            for layer, rows in zip(one.layers, before.view(len(one.layers), 64, 1, ROW), strict=True):
                plain(layer).copy_(rows)  # as it was, for the other way
            if rung == OWN:
                own = stored, loaded
        assert one.host.torch.equal(own[0], stored)
        assert one.host.torch.equal(own[1], loaded)
        assert not one.host.torch.equal(before, loaded)


def test_nothing_is_merged_from_one_layer_into_the_next(direct, monkeypatch):
    """Here layers are neighbours on both sides, as they may be by chance."""
    monkeypatch.setattr(Device, "method", "loop")
    one, everything = direct(tokens=32), list(range(32))
    with instrument.observe("sglang", fix="auto") as seen:
        on_the_submitter(one)
        one.store(everything, everything).finish_event.synchronize()
        one.load(everything, everything).finish_event.synchronize()
        adapter().poll()
    assert [t["submissions"] for t in seen.transfers] == [2 * LAYERS] * 2


def test_where_registrations_begin_is_asked_of_the_pool(direct):
    one = direct("pages", tokens=32)
    start = one.pool.kv_buffer.data_ptr()
    one.pool.kv_buffer._sglang_cuda_host_registered_ranges = [(start, 4096), (start + 4096, 4096)]
    with instrument.observe("sglang", fix="auto"):
        on_the_submitter(one)
        one.store(list(range(4)), list(range(4))).finish_event.synchronize()
        (bounds,) = adapter()._bounds[one.engine].values()
    assert {start, start + 4096} <= set(bounds._array.tolist())


def test_a_restored_request_has_no_layers_events(direct):
    """`restore_kv_cache` loads without them, and waits for all of it."""
    one, ids = direct(tokens=64), list(range(16))
    one.fill()
    before = one.gpu(ids).clone()
    tensor = one.host.torch.tensor
    with instrument.observe("sglang", fix="auto") as seen:
        on_the_submitter(one)
        one.store(ids, ids).finish_event.synchronize()
        one.fill(0)
        transfers = one.controller._l2_load_transfers(*one.controller.move_indices(tensor(ids), tensor(ids)))
        completion = one.engine.submit_host_to_device(transfers, transfer_layer_id_max=LAYERS)
        completion.finish_event.synchronize()
        assert one.host.torch.equal(one.gpu(ids), before)
        adapter().poll()
        assert not seen.decisions
    assert [t["policy"] for t in seen.transfers] == ["pooled"] * 2


HOLES = {"none": (0, 1), "the first layer": (None, 1), "the last layer": (0, None), "all layers": (None, None)}


@pytest.mark.parametrize("holes", HOLES)
def test_a_burst_of_two_pools_is_one_transfer_and_holes_have_their_events(direct, holes):
    """As hybrid models have them: a pool beside that of the keys and values, and layers of which nothing is loaded."""
    one, ids = direct(tokens=64, CUDA_DEVICE_MAX_CONNECTIONS=32), list(range(0, 32, 2))
    layers, (torch, kind) = one.layers, (one.host.torch, one.module.L2Transfer)
    one.planes, memory = 1, one.on_gpu((LAYERS, 64, 1, ROW))
    one.layers = [memory[i] for i in range(LAYERS)]
    beside = one.pool_of_one_plane(1, "layer_first")
    mapped, indices = HOLES[holes], torch.tensor(ids)
    transfers = [
        kind(pool, one.gpu_pool, indices, indices, layer_mapper=mapped.__getitem__) for pool in (one.pool, beside)
    ]
    for layer in (*layers, *one.layers):
        plain(layer)[ids] = torch.randint(1, 255, (len(ids), 1, ROW), dtype=torch.uint8)
    before = [plain(layer).clone() for layer in (*layers, *one.layers)]
    counter, other = one.controller.layer_done_counter, one.host.cuda.Stream()
    with instrument.observe("sglang", fix="auto") as seen:
        on_the_submitter(one)
        one.engine.submit_device_to_host(transfers).finish_event.synchronize()
        assert torch.equal(one.pool.kv_buffer.view(-1, 64, ROW), torch.stack(before[: 2 * LAYERS]).view(-1, 64, ROW))
        assert torch.equal(beside.kv_buffer.view(-1, 64, ROW), torch.stack(before[2 * LAYERS :]).view(-1, 64, ROW))
        for layer in (*layers, *one.layers):
            plain(layer)[:] = 0
        one.producer = counter.update_producer()
        one.host.rt.launch_delay(one.host.compute, WORK_NS)
        one.engine.host_to_device_stream.wait_stream(one.forward_stream)
        heard = counter.events[one.producer].complete
        ack = one.engine.submit_host_to_device(transfers, transfer_layer_id_max=LAYERS, on_layer_done=heard)
        one.layers = layers + one.layers
        read = read_by_layers(one, slice(0, 64), other)
        other.synchronize()
        ack.finish_event.synchronize()
        adapter().poll()
        assert not seen.decisions
    for number, rows in enumerate(read):
        expected = before[number::LAYERS]
        there = all(torch.equal(row, whole) for row, whole in zip(rows, expected, strict=True))
        assert there if mapped[number] is not None else not any(bool(row.any()) for row in rows)
    policies = ["pooled", "pooled" if holes != "all layers" else "shared"]
    assert len(read) == LAYERS and [t["policy"] for t in seen.transfers] == policies


# ---- when ------------------------------------------------------------------------------------------------------------


def test_a_full_queue_behind_a_forward_is_named_and_handed_over(direct):
    one, slots = direct(KVHOST_DEPTH=64), list(range(0, 256, 2))
    with instrument.observe("sglang", fix="auto") as seen:
        for _ in range(12):
            one.host.rt.launch_delay(one.host.compute, 20_000_000)  # longer than submitting takes on a busy machine
            ack = one.store(slots, slots)
        ack.finish_event.synchronize()
        adapter().poll()
        assert one.roundtrip()
    assert (seen.decisions[0]["what"], seen.decisions[0]["to"]) == ("switch", "pooled/auto")
    assert "launch_queue_saturation" in seen.decisions[0]["why"]
    assert any(t["policy"] == "pooled" for t in seen.transfers)


@pytest.mark.parametrize("pool", ["rows", "pages"])
def test_a_burst_larger_than_its_queue_does_not_wait_for_the_forward(direct, pool):
    """Proved by state: the forward still runs when both submissions have returned, and only the test ends it."""
    one = direct(pool, tokens=256, KVHOST_DEPTH=64)
    ids, others = list(range(128)), list(range(128, 256))
    slots = scattered(128, one.pool.page_size)
    one.fill()
    one.cpu_fill(7, others)
    before = one.gpu(ids).clone()
    with instrument.observe("sglang", fix="auto"):
        on_the_submitter(one)
        with forward(one) as over:
            store, load = one.store(slots, ids), one.load([slot + 128 for slot in slots], others)
            assert not over.query()
            assert not store.finish_event.query() and not load.finish_event.query()
            assert one.host.torch.count_nonzero(one.cpu(ids)) == 0
        store.finish_event.synchronize()
        assert one.host.torch.equal(one.cpu(slots), before)
        load.finish_event.synchronize()
        assert bool((one.gpu(others) == 7).all())


def test_a_layers_compute_is_enqueued_while_the_forward_before_still_runs(direct):
    """The wait for a layer goes to the device: the scheduler's thread launches the next forward meanwhile."""
    one, ids = direct(tokens=64, CUDA_DEVICE_MAX_CONNECTIONS=32), list(range(16))
    one.cpu_fill(7, ids)
    other = one.host.cuda.Stream()
    with instrument.observe("sglang", fix="auto") as seen:
        on_the_submitter(one)
        with forward(one) as over:
            ack = one.load(ids, ids)
            read = read_by_layers(one, ids, other)
            assert not over.query() and not read
        other.synchronize()
        ack.finish_event.synchronize()
        adapter().poll()
    assert len(read) == LAYERS and all(bool((row == 7).all()) for rows in read for row in rows)
    assert seen.transfers[0]["fence_ns"] > 0  # what waiting cost the scheduler's thread is counted


def test_a_layer_is_there_before_the_whole_load(direct):
    """On the virtual clock: the first layer's event is reached while the second's copies still run."""
    one = direct(tokens=512, KVHOST_CLOCK="virtual", KVHOST_H2D_GBPS="0.1")
    ids = list(range(512))
    one.cpu_fill(9, ids)
    with instrument.observe("sglang", fix="auto"):
        on_the_submitter(one)
        ack = one.load(ids, ids)
        first, second = one.controller.layer_done_counter.events[one.producer].load_events
        first.synchronize()
        assert not second.query() and not ack.finish_event.query()
        assert all(bool((plain(layer) == 9).all()) for layer in one.layers[::LAYERS])
        assert not bool((plain(one.layers[-1]) == 9).any())
        second.synchronize()
        ack.finish_event.synchronize()
        assert all(bool((plain(layer) == 9).all()) for layer in one.layers)
        assert ack.start_event.elapsed_time(ack.finish_event) > 0


# ---- order -----------------------------------------------------------------------------------------------------------


class Submitted(Race):
    """Races of copies that the submitter has; `unordered` takes SGLang's fence out, or kvprobe's."""

    def switch(self, value, rungs, work_ns, broken):
        """The later of two stores into the same slots wins, where one is the submitter's and the other SGLang's."""
        one, tokens, others = self.one, list(range(WIDTH)), list(range(WIDTH, 2 * WIDTH))
        one.fill(value, slice(WIDTH, 2 * WIDTH))
        self.rt.synchronize()
        self.write(0, slice(0, WIDTH), work_ns)
        stand(one, "store", rungs[0])
        first = one.store(tokens, tokens)
        stand(one, "store", rungs[1])
        own, one.engine.device_to_host_stream = one.engine.device_to_host_stream, self.idle
        with broken:
            ack = one.store(tokens, others, fence=False)
        one.engine.device_to_host_stream = own
        ack.finish_event.synchronize()
        right = bool((one.cpu(tokens) == value).all())
        first.finish_event.synchronize()
        return right and bool((one.cpu(tokens) == value).all())


@pytest.mark.parametrize(
    ("order", "without"),
    [("fence", "fence"), ("fence", "after"), ("load_fence", "fence"), ("load_fence", "after"), ("layers", "wait")],
)
@pytest.mark.parametrize("pool", ["rows", "pages"])
def test_no_order_is_lost(direct, order, without, pool, monkeypatch):
    """Without SGLang's fence, without kvprobe's wait for what SGLang's stream holds, or without a layer's event."""
    # Channels enough that none is shared: a shared one keeps the order by itself, and the test would prove nothing.
    one = direct(pool, tokens=64, CUDA_DEVICE_MAX_CONNECTIONS=32)
    monkeypatch.setattr("tests.patches.sglang_host.WIDTH", 12)  # whole pages
    race = Race(one, monkeypatch)
    race.idle = one.host.cuda.Stream()
    run, own = getattr(race, order), Submitter.submit_all

    def broken(value, work_ns):
        with monkeypatch.context() as patched:
            if without == "after":
                patched.setattr(Submitter, "submit_all", lambda *args, after, **more: own(*args, after=None, **more))
            return run(value, work_ns, without != "after")

    with instrument.observe("sglang", fix="auto") as seen:
        on_the_submitter(one)
        assert all(run(i % 200 + 1, WORK_NS, False) for i in range(ITERATIONS))
        assert all(run(i + 1, LONG_NS << i, False) for i in range(4))
        assert not seen.decisions
        assert not all(broken(i + 1, ns) for i, ns in enumerate(HELD_NS)), "no race is seen: nothing is proved"
        adapter().poll()
    assert {t["policy"] for t in seen.transfers} == {"pooled"}


def test_no_order_is_lost_from_the_submitter_to_sglangs_stream(direct, monkeypatch):
    one = direct(tokens=64, CUDA_DEVICE_MAX_CONNECTIONS=32)
    race, rungs = Submitted(one, monkeypatch), (POOLED, OWN)
    race.idle = one.host.cuda.Stream()

    @contextlib.contextmanager
    def unfenced():
        with monkeypatch.context() as broken:
            broken.setattr(HandOver, "fence", lambda self, stream: True)
            yield

    with instrument.observe("sglang", fix="auto"):
        assert all(race.switch(i % 200 + 1, rungs, WORK_NS, contextlib.nullcontext()) for i in range(ITERATIONS))
        assert not all(race.switch(i + 1, rungs, ns, unfenced()) for i, ns in enumerate(HELD_NS)), "nothing is proved"


def test_order_and_bytes_hold_through_every_switch(direct, monkeypatch):
    one = direct(tokens=64, CUDA_DEVICE_MAX_CONNECTIONS=32)
    race = Race(one, monkeypatch)
    race.idle = one.host.cuda.Stream()
    with instrument.observe("sglang", fix="auto"):
        for i in range(max(2, ITERATIONS // 10)):
            for rung in (OWN, POOLED, OWN, POOLED, POOLED):
                stand(one, "store", rung), stand(one, "load", rung)
                for order in (race.fence, race.load_fence, race.layers):
                    assert order(i % 200 + 1, WORK_NS, False)


def test_order_holds_when_kvprobe_is_taken_out_with_bursts_in_flight(direct):
    one = direct(tokens=64, CUDA_DEVICE_MAX_CONNECTIONS=32)
    tokens, others = list(range(WIDTH)), list(range(WIDTH, 2 * WIDTH))
    other = one.host.cuda.Stream()
    for i in range(max(5, ITERATIONS // 100)):
        instrument.install("sglang", fix="auto")
        on_the_submitter(one)
        one.fill(i % 200 + 1, slice(WIDTH, 2 * WIDTH))
        one.fill(0, slice(0, WIDTH))
        one.cpu_fill(i % 200 + 2, list(range(32, 48)))
        with forward(one):
            one.store(tokens, tokens)
            load = one.load(list(range(32, 48)), list(range(32, 48)))
            instrument.uninstall("sglang")
            second = one.store(tokens, others, fence=False)  # SGLang alone, on its own stream
            read = read_by_layers(one, slice(32, 48), other)  # of the load before
            assert not second.finish_event.query() and not read
        second.finish_event.synchronize()
        assert bool((one.cpu(tokens) == i % 200 + 1).all())
        other.synchronize()
        load.finish_event.synchronize()
        assert len(read) == LAYERS and all(bool((row == i % 200 + 2).all()) for rows in read for row in rows)


# ---- failures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [1, 2, 3, 5])
def test_a_store_that_fails_in_the_submitter_is_made_by_sglang(direct, number, monkeypatch):
    monkeypatch.setattr(Device, "method", "loop")
    one, ids = direct(tokens=64), list(range(0, 32, 2))
    one.fill()
    before = one.gpu(ids).clone()
    with instrument.observe("sglang", fix="auto") as seen:
        path, _ = on_the_submitter(one)
        one.host.rt.fail_copy(number)
        ack = one.store(ids, ids)
        path.device.submitter.wait()
        ack.finish_event.synchronize()
        assert one.host.torch.equal(one.cpu(ids), before)
        assert one.roundtrip()
    assert [d["what"] for d in seen.decisions] == ["refuse"]
    assert "a transfer failed" in seen.decisions[0]["why"]


@pytest.mark.parametrize("number", range(1, 5))  # two planes of the first layer, then of the second
@pytest.mark.parametrize("asked", ["finish", "layers", "both", "layers behind a forward"])
def test_a_load_that_fails_in_the_submitter_is_made_by_sglang(direct, number, asked, monkeypatch):
    """Whoever asks first: SGLang whether the load is over, or compute that waits for a layer.

    Behind a forward the copies are refused only when that wait has them submitted, and were not refused before it.
    """
    monkeypatch.setattr(Device, "method", "loop")
    one, ids, read = direct(tokens=64, KVHOST_CLOCK="virtual"), list(range(16)), []
    other = one.host.cuda.Stream()
    one.cpu_fill(7, ids)
    with instrument.observe("sglang", fix="auto") as seen:
        _, path = on_the_submitter(one)
        one.host.rt.fail_copy(number)
        if asked == "layers behind a forward":
            one.host.rt.launch_delay(one.host.compute, LONG_NS)
        ack = one.load(ids, ids)
        if asked != "layers behind a forward":
            path.device.submitter.wait()
        if asked in ("finish", "both"):
            ack.finish_event.synchronize()
            assert all(bool((row == 7).all()) for row in one.gpu(ids))
        if asked != "finish":
            read = read_by_layers(one, ids, other)
        other.synchronize()
        ack.finish_event.synchronize()
        assert all(bool((row == 7).all()) for row in one.gpu(ids))
        assert len(read) == (0 if asked == "finish" else LAYERS)
        assert all(bool((row == 7).all()) for rows in read for row in rows)
    assert [d["what"] for d in seen.decisions] == ["refuse"]


def test_a_submitter_that_takes_no_more_is_left_once_and_loses_nothing(direct):
    one = direct()
    with instrument.observe("sglang", fix="auto") as seen:
        on_the_submitter(one)[0].device.submitter.close()
        assert one.roundtrip()
        adapter().poll()
    assert [(d["what"], d["from"]) for d in seen.decisions] == [("refuse", "pooled/auto")] * 2
    assert all("takes no more transfers" in d["why"] for d in seen.decisions)
    assert {t["policy"] for t in seen.transfers} == {"shared"}


@pytest.mark.parametrize("error", [RuntimeError, "closed"])
def test_a_load_that_the_submitter_does_not_take_is_whole(direct, error, monkeypatch):
    one, ids = direct(tokens=64, CUDA_DEVICE_MAX_CONNECTIONS=32), list(range(16))
    other, own, calls = one.host.cuda.Stream(), Submitter.submit_all, itertools.count(1)

    def failing(self, *args, **kwargs):
        if next(calls) == 1:
            if error is RuntimeError:
                raise RuntimeError("kvprobe's own mistake")
            self.close()
        return own(self, *args, **kwargs)

    monkeypatch.setattr(Submitter, "submit_all", failing)
    one.cpu_fill(7, ids)
    with instrument.observe("sglang", fix="auto") as seen:
        stand(one, "load", POOLED)
        ack = one.load(ids, ids)
        read = read_by_layers(one, ids, other)
        other.synchronize()
        ack.finish_event.synchronize()
        assert len(read) == LAYERS and all(bool((row == 7).all()) for rows in read for row in rows)
        assert one.roundtrip()
    assert [d["what"] for d in seen.decisions][:1] == ["refuse"]
    assert seen.states["sglang.l2_transfer"].startswith("failed: " if error is RuntimeError else "removed")


@pytest.mark.parametrize("pool", ["rows", "pages"])
@pytest.mark.parametrize(
    "hook",
    [
        "look",
        "take",
        "jobs",
        "starts",
        "transfer_events",
        "replace_events",
        "hand_over",
        "submit",
        "submitted",
        "copies",
    ],
)
def test_a_hook_that_fails_changes_no_byte(direct, pool, hook, monkeypatch):
    import kvprobe.patches.sglang as patch
    from kvprobe.patches.sglang_copies import Addresses

    def broken(*args, **kwargs):
        raise RuntimeError("kvprobe's own mistake")

    one, ids = direct(pool, tokens=64, CUDA_DEVICE_MAX_CONNECTIONS=32), list(range(16))
    other = one.host.cuda.Stream()
    monkeypatch.setattr(Addresses if hook == "copies" else patch.Transfers, hook, broken)
    one.cpu_fill(7, ids)
    with instrument.observe("sglang", fix="auto") as seen:
        on_the_submitter(one)
        one.host.rt.launch_delay(one.host.compute, WORK_NS)
        ack = one.load(ids, ids)
        read = read_by_layers(one, ids, other)
        other.synchronize()
        ack.finish_event.synchronize()  # SGLang gives its set of layer events out again
        assert len(read) == LAYERS and all(bool((row == 7).all()) for rows in read for row in rows)
        for _ in range(3):
            assert one.roundtrip()
    assert seen.states["sglang.l2_transfer"].startswith("failed: ")


@pytest.mark.parametrize("number", [1, 2])
def test_an_exception_of_sglangs_passes_and_nothing_is_handed_over(direct, number, monkeypatch):
    """SGLang frees the slots of a burst whose submission raised: nothing of it may run."""
    one, ids, calls = direct(tokens=64), list(range(16)), itertools.count(1)
    own = one.mha.MHATokenToKVPoolHost.load_to_device_per_layer

    def failing(*args, **kwargs):
        if next(calls) == number:
            raise ValueError("the server's own mistake")
        return own(*args, **kwargs)

    one.cpu_fill(7, ids)
    with instrument.observe("sglang", fix="auto") as seen:
        on_the_submitter(one)
        with monkeypatch.context() as broken:
            broken.setattr(one.mha.MHATokenToKVPoolHost, "load_to_device_per_layer", failing)
            with pytest.raises(ValueError, match="the server's own mistake"):
                one.load(ids, ids)
        one.host.rt.synchronize()
        assert one.host.torch.count_nonzero(one.gpu()) == 0
        assert one.roundtrip()
    assert seen.states["sglang.l2_transfer"] == "removed" and not seen.decisions


# ---- refused ---------------------------------------------------------------------------------------------------------


def translating(one, monkeypatch):
    one.gpu_pool.host_transfer_translate = lambda indices: indices


def sharing(one, monkeypatch):
    one.pool.shared_allocation_domain = types.SimpleNamespace(
        acquire_layout=lambda: None, release_layout=lambda *args: None
    )


def another_pool(one, monkeypatch):
    one.pool.__class__ = type("HiSparseMHATokenToKVPoolHost", (type(one.pool),), {})


def unknown_registrations(one, monkeypatch):
    del one.pool.kv_buffer._sglang_cuda_host_registered_ranges


def pageable(one, monkeypatch):
    monkeypatch.setattr(type(one.host.rt), "memory_kind", lambda self, pointer: "pageable")


def strided(one, monkeypatch):
    """Rows of a pool that keeps all layers of a token together."""
    memory = one.on_gpu((one.tokens, 4 * LAYERS, 1, ROW))
    one.layers[:] = [memory[:, i] for i in range(2 * LAYERS)]
    one.pool.device_k_buffers, one.pool.device_v_buffers = one.layers[:LAYERS], one.layers[LAYERS:]


REFUSED = {
    translating: "translates indices",
    sharing: "share a host layout",
    another_pool: "may do more than copy bytes",
    unknown_registrations: "was registered is not known",
    pageable: "pageable memory",
    strided: "no plain copy",
}


@pytest.mark.parametrize("what", REFUSED, ids=lambda what: what.__name__)
def test_what_is_no_plain_copy_stays_with_sglang(direct, what, monkeypatch):
    one, ids = direct(tokens=64), list(range(0, 32, 2))
    what(one, monkeypatch)
    with instrument.observe("sglang", fix="auto") as seen:
        stand(one, "store", POOLED)
        one.fill()
        one.store(ids, ids).finish_event.synchronize()
        assert one.host.torch.equal(one.cpu(ids), one.gpu(ids))
        adapter().poll()
    assert [d["what"] for d in seen.decisions] == ["refuse"]
    assert REFUSED[what] in seen.decisions[0]["why"]
    assert [t["policy"] for t in seen.transfers] == ["shared"]


def test_a_load_whose_layers_somebody_else_hears_of_stays_with_sglang(direct):
    """As where a loaded layer is sent on to other ranks, on the stream that loads it."""
    one, ids, heard = direct(tokens=64), list(range(16)), []
    tensor = one.host.torch.tensor
    with instrument.observe("sglang", fix="auto") as seen:
        on_the_submitter(one)
        transfers = one.controller._l2_load_transfers(*one.controller.move_indices(tensor(ids), tensor(ids)))
        one.engine.submit_host_to_device(
            transfers, transfer_layer_id_max=LAYERS, on_layer_done=heard.append
        ).finish_event.synchronize()
        adapter().poll()
    assert heard == list(range(LAYERS))
    assert [d["what"] for d in seen.decisions] == ["refuse"]
    assert [t["policy"] for t in seen.transfers] == ["shared"]


def test_the_kernel_back_end_says_why_it_keeps_its_copies(engine):
    one = engine()
    with instrument.observe("sglang", fix="auto") as seen:
        made = one.module.L2TransferEngine("kernel")
        assert adapter().path_of(made, "load").auto is None
    (note,) = seen.decisions
    assert note["what"] == "note" and "rearrange rows on the GPU" in note["why"]


def test_other_arguments_than_in_any_version_known_are_refused(direct, monkeypatch):
    from kvprobe.errors import KvprobeError
    from kvprobe.instrument.hooks import Call
    from kvprobe.patches.sglang_copies import move_of

    one = direct(tokens=8)
    with pytest.raises(KvprobeError, match="in another way"):
        move_of(Call(one.kernels.transfer_kv_direct, (one.layers, one.layers), {"stream": 1}))


@pytest.mark.parametrize(("slots", "rows"), [([0, 64], [0, 4]), ([0, 4], [0, 64]), ([0, -4], [0, 4])])
@pytest.mark.parametrize("pool", ["rows", "pages"])
def test_slots_outside_their_pool_have_no_address(direct, pool, slots, rows, monkeypatch):
    one = direct(pool, tokens=64)
    wide = [one.host.torch.tensor([slot + i for slot in side for i in range(4)]) for side in (slots, rows)]
    copied = []  # of what SGLang would copy here
    for name in ("transfer_kv_direct", "transfer_kv_all_layer_direct_lf_pf"):
        monkeypatch.setattr(one.mha, name, lambda *args, **kwargs: copied.append(kwargs))
        getattr(one.mha, name).__name__ = name
    with instrument.observe("sglang", fix="auto") as seen:
        on_the_submitter(one)
        one.engine.submit_device_to_host(one.controller._l2_transfers(*wide))
    assert len(copied) == 1
    assert [d["what"] for d in seen.decisions] == ["refuse"]
    assert "outside its pool" in seen.decisions[0]["why"]
