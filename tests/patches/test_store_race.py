"""A store must copy what compute wrote, and transfers of a direction must end in order: a test that proves itself.

Compute writes a block at the very end of its work; the store is submitted while it runs. With the waits taken out on
purpose the old bytes must be seen (else the test would prove nothing); with them, in every policy, never. The number
of iterations is `KVPROBE_RACE_ITERATIONS` (default 40 a case; 10,000 for the full run); `KVPROBE_TEST_DEVICE=cuda`
runs the same on a GPU.
"""

import os

import pytest

import kvprobe.instrument as instrument
from kvprobe.instrument import installation
from kvprobe.instrument.submissions import POOLED
from kvprobe.instrument.transfers import CopyPath
from kvprobe.offload import Submitter

ITERATIONS = int(os.environ.get("KVPROBE_RACE_ITERATIONS", "40"))
WORK_NS = 300_000
LONG_NS = 5_000_000
HELD_NS = [LONG_NS << i for i in range(10)]  # where the race must be lost: one outlasts any delay in submitting
WIDTH = 3

CASES = [(version, rung) for version in ("0.12.0", "0.13.0", "0.14.1", "0.15.1") for rung in ("own", "pooled")]


def compute(handlers, value, work_ns=WORK_NS):
    """Compute work that fills the GPU blocks that are stored with one value when it ends."""
    host = handlers.host
    plain = [cache.as_subclass(host.torch.Tensor) for cache in handlers.caches.values()]
    host.launch_write([t[half, :WIDTH] for t in plain for half in range(2)], value, host.compute, work_ns)


def fill_others(handlers):
    """250 in the blocks after those."""
    for cache in handlers.caches.values():
        cache.as_subclass(handlers.host.torch.Tensor).view(handlers.host.torch.uint8)[:, WIDTH : 2 * WIDTH] = 250
    handlers.host.rt.synchronize()


def take_out_waits(host, broken):
    """No stream waits for another any more, whether kvprobe or the server asks for it."""
    broken.setattr(type(host.rt), "stream_wait_event", lambda self, stream, event: None)
    for wait in ("wait_stream", "wait_event"):
        broken.setattr(host.waiting, wait, lambda self, other: None)


def prepare(handlers, rung):
    """Stand on the rung: "own" is what vLLM does, "pooled" the submitter."""
    handlers.make()
    name = "vllm.copies.shared" if handlers.version.startswith("0.12") else "vllm.copies.loop"
    path = installation._adapters[name].path_of(handlers.store_handler, "store")
    stand_on(path, rung)
    return path


def stand_on(path, rung):
    path.auto.active = False  # nothing but the test changes the rung
    path.auto.stand_on(POOLED if rung == "pooled" else path.auto.base)


def cpu_bytes(handlers):
    """The bytes of CPU blocks 0 to WIDTH - 1 as one flat uint8 tensor."""
    torch = handlers.host.torch
    store = handlers.store_handler
    tensors = getattr(store, "cpu_tensors", None) or store.dst_tensors
    parts = [t[:, :WIDTH] if t.dim() == 5 else t[:WIDTH] for t in tensors]
    return torch.cat([p.contiguous().view(-1).view(torch.uint8) for p in parts])


def stale_stores(handlers, iterations, work_ns=WORK_NS, first=0):
    """How many of the stores copied anything but what compute had written; each writes another value."""
    wrong, blocks = 0, list(range(WIDTH))
    for i in range(first, first + iterations):
        value = i % 200 + 1
        compute(handlers, value, work_ns)
        handlers.store(blocks, blocks)
        handlers.drain(1)
        handlers.host.rt.synchronize()
        wrong += not bool((cpu_bytes(handlers) == value).all())
    return wrong


@pytest.mark.parametrize(("version", "rung"), CASES)
def test_a_store_copies_what_compute_wrote(vllm_handlers, version, rung, monkeypatch):
    handlers = vllm_handlers(version, handlers={"layers": 1})
    with instrument.observe("vllm", fix="auto") as seen:
        path = prepare(handlers, rung)
        assert stale_stores(handlers, ITERATIONS) == 0
        assert (path.rung == POOLED) == (rung == "pooled")
        with monkeypatch.context() as broken:
            take_out_waits(handlers.host, broken)
            assert any(stale_stores(handlers, 1, ns, i + 100) for i, ns in enumerate(HELD_NS)), (
                "no race is seen: nothing is proved"
            )
    assert {t["policy"] == "pooled" for t in seen.transfers} == {rung == "pooled"}


@pytest.mark.parametrize("version", ["0.12.0", "0.13.0"])
def test_without_kvprobe_these_versions_do_copy_stale_blocks(vllm_handlers, version):
    handlers = vllm_handlers(version, handlers={"layers": 1}).make()
    assert any(stale_stores(handlers, 1, ns, i + 100) for i, ns in enumerate(HELD_NS))


def wrong_order(handlers, iterations, work_ns=WORK_NS, between=lambda: None):
    """Two stores into the same CPU blocks, the first one held back by compute: how often the second did not win."""
    host, wrong = handlers.host, 0
    idle = host.rt.stream_create()
    blocks, others = list(range(WIDTH)), list(range(WIDTH, 2 * WIDTH))
    fill_others(handlers)
    for i in range(iterations):
        compute(handlers, i % 200 + 1, work_ns)
        handlers.store(blocks, blocks)
        between()
        with host.cuda.stream(host.cuda.ExternalStream(idle)):  # nothing to wait for on this one
            handlers.store(others, blocks)
        handlers.drain(2)
        host.rt.synchronize()
        wrong += not bool((cpu_bytes(handlers) == 250).all())
    return wrong


def without_after(own):
    """Copies go to the submitter as if the server's stream held nothing."""
    return lambda self, copies, direction, *, after=None, **how: own(self, copies, direction, **how)


@pytest.mark.parametrize("version", ["0.12.0", "0.14.1"])
@pytest.mark.parametrize("rungs", [("pooled", "pooled"), ("own", "pooled"), ("pooled", "own")])
def test_transfers_of_a_direction_end_in_order(vllm_handlers, version, rungs, monkeypatch):
    # Channels enough that none is shared: a shared one keeps the order by itself, and the test would prove nothing.
    handlers = vllm_handlers(version, handlers={"layers": 1}, CUDA_DEVICE_MAX_CONNECTIONS=32)
    with instrument.observe("vllm", fix="auto"):
        path = prepare(handlers, rungs[0])

        def wrong(iterations, work_ns=WORK_NS):
            found = 0
            for _ in range(iterations):
                stand_on(path, rungs[0])
                found += wrong_order(handlers, 1, work_ns, lambda: stand_on(path, rungs[1]))
            return found

        assert wrong(max(2, ITERATIONS // 4)) == 0
        if rungs == ("pooled", "pooled"):
            return  # one direction of one submitter: tests of the submitter prove that
        with monkeypatch.context() as broken:
            if rungs[1] == "own":
                broken.setattr(CopyPath, "fence", lambda self, stream: None)
                broken.setattr(handlers.host.waiting, "wait_event", lambda self, event: None)
            else:
                broken.setattr(Submitter, "submit_all", without_after(Submitter.submit_all))
            assert any(wrong(1, ns) for ns in HELD_NS), "no race is seen: nothing is proved"


@pytest.mark.parametrize("sequence", [("own", "pooled", "own", "pooled", "pooled")])
def test_order_and_bytes_hold_through_every_switch(vllm_handlers, sequence):
    handlers = vllm_handlers("0.12.0", handlers={"layers": 1})
    with instrument.observe("vllm", fix="auto"):
        path = prepare(handlers, sequence[0])
        for _ in range(max(1, ITERATIONS // 40)):
            for rung in sequence:
                stand_on(path, rung)
                assert wrong_order(handlers, 4) == 0
                assert stale_stores(handlers, 4) == 0


def test_order_holds_when_kvprobe_is_taken_out_with_transfers_in_flight(vllm_handlers):
    handlers = vllm_handlers("0.12.0", handlers={"layers": 1})
    host = handlers.host
    for _ in range(max(5, ITERATIONS // 10)):
        instrument.install("vllm", fix="auto")
        prepare(handlers, "pooled")
        blocks, others = list(range(WIDTH)), list(range(WIDTH, 2 * WIDTH))
        fill_others(handlers)
        compute(handlers, 7, LONG_NS)
        handlers.store(blocks, blocks)
        instrument.uninstall("vllm")
        handlers.store(others, blocks)  # vLLM alone, on its own stream
        handlers.drain(2)
        host.rt.synchronize()
        assert bool((cpu_bytes(handlers) == 250).all())
