"""vLLM 0.33's own CPUOffloadingWorker with blocks that lie coded in its CPU memory."""

import ctypes
import importlib
import time
import types

import numpy as np
import pytest

import kvprobe.instrument as instrument
from kvprobe.errors import KvprobeError
from kvprobe.instrument import coded
from kvprobe.instrument.submissions import POOLED
from tests.patches.test_vllm_batches import NEEDED, VERSION, Worker, adapter

PAGE, BLOCKS = 32768, 24


class CodedWorker(Worker):
    """The real worker over bf16 numbers of a scale a channel, as KV has them."""

    def fill(self, seed=0, random=False):
        draw = np.random.default_rng(seed)
        for tensor in self.plain():
            values = draw.standard_normal((self.blocks, self.page // 2), np.float32)
            values *= np.resize(np.exp(draw.standard_normal(64)).astype(np.float32) * 0.02, self.page // 2)
            upper = (values.view(np.uint32) >> 16).astype(np.uint16).view(np.int8)
            noise = draw.integers(-128, 128, upper.shape, np.int8)
            tensor.copy_(self.host.torch.from_numpy(noise if random else upper))
        return [t.clone() for t in self.plain()]

    def drain(self, count):
        self.host.rt.synchronize()  # kvprobe's own events stand behind vLLM's
        return super().drain(count)

    @property
    def rows(self):
        return adapter()._coded.get(self.worker._store_handler)

    def cpu(self):
        """What lies in the CPU's memory, bytes as they are there."""
        tensors = self.worker._store_handler.dst_tensors
        return [
            np.stack([np.frombuffer(ctypes.string_at(t.data_ptr() + i * t.stride(0), self.page), np.int8) for i in
                      range(self.blocks)])
            for t in tensors
        ]  # fmt: skip

    def is_coded(self, block):
        """Whether the block lies there in fewer bytes, in all layers."""
        cells = self.rows._cells
        return all(
            cells.notes["bytes"][layer * self.blocks + block].sum() < 0.8 * self.page for layer in range(self.layers)
        )

    def equals(self, before, gpu=None, cpu=None):
        """Whether the GPU's blocks `gpu` are those that `cpu` were before; None: all of them, as they were."""
        torch = self.host.torch
        pairs = zip(before, self.plain(), strict=True)
        return all(torch.equal(a, b) if gpu is None else torch.equal(a[cpu], b[gpu]) for a, b in pairs)

    def wipe(self):
        for tensor in self.plain():
            tensor.zero_()


@pytest.fixture
def worker(host, clean_modules, wheel_tree):
    for name in NEEDED:
        pytest.importorskip(name)
    root = wheel_tree("vllm", VERSION, "vllm/")

    def make(fix="auto", coding=True, **kw):
        one = CodedWorker(host(), root, **{"blocks": BLOCKS, "page": PAGE, **kw})
        instrument.install("vllm", fix=fix)
        one.make()
        if one.rows is not None:
            one.rows.coding, one.rows._kept = coding, True
        return one

    return make


def everything(one):
    ids = list(range(one.blocks))
    return ids, ids[::-1]


def test_blocks_lie_coded_and_the_same_bytes_come_back(worker):
    one = worker()
    before, (gpu, cpu) = one.fill(), everything(one)
    one.store(gpu, cpu)
    one.drain(1)
    assert all(one.is_coded(block) for block in cpu)
    one.wipe()
    one.load(cpu[:10], gpu[:10])
    one.load(cpu[10:], gpu[10:])
    one.drain(2)
    assert one.equals(before)
    assert str(adapter().state) == "applied"


def test_what_does_not_shrink_lies_there_as_it_is(worker):
    one = worker()
    before, (gpu, cpu) = one.fill(random=True), everything(one)
    one.store(gpu, cpu)
    one.drain(1)
    assert np.array_equal(one.cpu()[0][cpu], before[0].numpy())
    one.wipe()
    one.load(cpu, gpu)
    one.drain(1)
    assert one.equals(before)


def test_plain_and_coded_blocks_in_one_load(worker):
    one = worker()
    before, (gpu, cpu) = one.fill(), everything(one)
    one.store(gpu, cpu)
    one.drain(1)
    one.rows.coding = False
    one.store(gpu[::2], cpu[::2])  # vLLM's own copies, over what lay coded
    one.drain(1)
    assert np.array_equal(one.cpu()[1][cpu[::2]], before[1].numpy()[gpu[::2]])
    assert [one.is_coded(block) for block in cpu] == [False, True] * (BLOCKS // 2)
    one.wipe()
    one.load(cpu, gpu)
    one.drain(1)
    assert one.equals(before)


def test_a_plain_store_over_a_coded_one_that_has_not_ended(worker):
    one = worker()
    one.fill()
    one.store([0, 1, 2], [0, 1, 2])
    one.rows.coding = False
    one.store([3, 4, 5], [0, 1, 2])
    one.drain(2)
    before = [t.clone() for t in one.plain()]
    one.wipe()
    one.load([0, 1, 2], [10, 11, 12])
    one.drain(1)
    assert one.equals(before, gpu=[10, 11, 12], cpu=[3, 4, 5])


def test_uninstalled_vllm_reads_what_lay_coded(worker):
    one = worker()
    before, (gpu, cpu) = one.fill(), everything(one)
    for low in range(0, one.blocks, 4):  # some are still on their way then
        one.store(gpu[low : low + 4], cpu[low : low + 4])
    assert one.rows is not None
    instrument.uninstall("vllm")
    assert np.array_equal(one.cpu()[2][cpu], before[2].numpy())
    one.drain(BLOCKS // 4)
    one.wipe()
    one.load(cpu, gpu)
    one.drain(1)
    assert one.equals(before)


def test_a_hook_that_fails_leaves_readable_blocks(worker, monkeypatch):
    one = worker()
    before, (gpu, cpu) = one.fill(), everything(one)
    one.store(gpu, cpu)
    one.drain(1)
    one.wipe()

    def broken(*args):
        raise RuntimeError("kvprobe's own mistake")

    monkeypatch.setattr(adapter(), "copies", broken)
    one.load(cpu, gpu)
    one.drain(1)
    assert str(adapter().state).startswith("failed: ")
    assert one.equals(before)


@pytest.mark.parametrize("direction", ["store", "load"])
@pytest.mark.parametrize("when", ["handed over", "launched"])
def test_a_transfer_that_fails_is_made_by_vllm_and_no_more_is_coded(worker, direction, when, monkeypatch):
    one = worker()
    before, (gpu, cpu) = one.fill(), everything(one)

    def fail():
        if when == "launched":
            one.host.rt.library.kvhostFailCall(b"cuLaunchKernel", 1, 1)
        else:
            monkeypatch.setattr(one.rows.submitter, "submit_all", refuse)

    def refuse(*args, **kwargs):
        monkeypatch.undo()
        raise KvprobeError("no memory for a transfer")

    if direction == "store":
        fail()
    one.store(gpu, cpu)
    one.drain(1)
    one.wipe()
    if direction == "load":
        fail()
    one.load(cpu, gpu)
    one.drain(1)
    assert one.equals(before)
    assert not one.rows.coding
    assert one.rows._again_ns == 2**63


def test_a_damaged_block_is_not_brought(worker):
    one = worker()
    one.fill()
    one.store([1, 2], [1, 2])
    one.drain(1)
    tensor = one.worker._store_handler.dst_tensors[3]
    ctypes.memset(tensor.data_ptr() + 2 * tensor.stride(0) + 40, 0x5A, 64)
    one.load([2], [5])
    with pytest.raises(KvprobeError, match="refused"):
        one.drain(1)


def test_expedited_loads_of_coded_blocks_end_coding(worker):
    one = worker()
    before = one.fill()
    one.store([1, 2, 3], [1, 2, 3])
    one.drain(1)
    one.wipe()
    one.job += 1
    assert one.worker.submit_load(one.job, one.cpu_spec([2, 3]), one.gpu_spec([7, 8], (2,), (0,)), expedited=True)
    one.drain(1)
    assert one.equals(before, gpu=[7, 8], cpu=[2, 3])
    assert not one.rows.coding


def test_transfers_keep_their_order_across_submitters(worker):
    one = worker()
    with instrument.observe("vllm", fix="auto") as seen:
        one.make()
        one.rows.coding = True
        before = one.fill()
        for i in range(6):  # the same GPU block is read and written in turn
            for path in adapter().paths():
                path.auto.active = False
                path.auto.stand_on(POOLED if i % 2 else path.auto.base)
            one.rows.coding = i % 3 != 2
            one.store([i], [i])
            one.drain(1)
        for i in range(6):
            one.load([i], [20])
        one.load([3, 5], [21, 22])
        one.drain(7)
    assert one.equals(before, gpu=[20, 21, 22], cpu=[5, 3, 5])
    assert [t["id"] for t in seen.transfers] == sorted(t["id"] for t in seen.transfers)
    assert {t["method"] for t in seen.transfers} == {"batch", "auto", "coded"}


def figures(rows, coded_ns):
    """What auto hears, by bytes: 100 ns each as they are, `coded_ns` coded; the machine's own times say nothing here.

    By direction, to be changed later; so is how many times as long either way takes beside what else goes on.
    """
    heard, took = rows.heard, {"load": coded_ns, "store": coded_ns, "beside": 1}

    def told(direction, live, copy_ns):
        live.submit_ns = 1000
        a_byte = took[direction] if live.rung.method == "coded" else 100
        heard(direction, live, int(live.bytes * a_byte * took["beside"]))

    rows.heard = told
    return took


def stores_and_decisions(one, seen, count):
    for _ in range(count):
        one.store(*everything(one))
        one.drain(1)
    return [(d["what"], d["from"], d["to"]) for d in seen.decisions if "pooled/coded" in (d["from"], d["to"])]


def keep_vllms_own_way():
    """Without kvprobe's submitter for plain copies: what is compared does not change meanwhile."""
    for path in adapter().paths():
        path.auto.active = False


def test_auto_codes_where_that_is_faster_and_says_so(worker):
    one = worker(coding=False)
    with instrument.observe("vllm", fix="auto") as seen:
        one.make()
        figures(one.rows, 80)
        before, (gpu, cpu) = one.fill(), everything(one)
        one.store(gpu, cpu)
        one.drain(1)
        keep_vllms_own_way()
        said = stores_and_decisions(one, seen, 40)
        assert said == [("switch", "upstream/batch", "pooled/coded"), ("keep", "upstream/batch", "pooled/coded")]
        one.wipe()
        one.load(cpu, gpu)
        one.drain(1)
    assert one.equals(before)


@pytest.mark.parametrize("coded_ns", [98, 300])
def test_auto_takes_it_back_where_it_gains_nothing(worker, coded_ns):
    one = worker(coding=False)
    with instrument.observe("vllm", fix="auto") as seen:
        one.make()
        figures(one.rows, coded_ns)
        before, (gpu, cpu) = one.fill(), everything(one)
        one.store(gpu, cpu)
        one.drain(1)
        keep_vllms_own_way()
        said = stores_and_decisions(one, seen, 40)
        assert said == [("switch", "upstream/batch", "pooled/coded"), ("rollback", "pooled/coded", "upstream/batch")]
        assert not one.rows.coding
        one.wipe()
        one.load(cpu, gpu)
        one.drain(1)
    assert one.equals(before)


def kept(one, seen, monkeypatch, coded_ns=80):
    """Auto kept coding after a trial, and has two of 8 stores plain from then on: what it hears, and what it said."""
    monkeypatch.setattr(coded, "PERIOD", 8)
    took = figures(one.rows, coded_ns)
    one.fill()
    one.store(*everything(one))
    one.drain(1)
    keep_vllms_own_way()
    stores = 0
    while [what for what, *_ in stores_and_decisions(one, seen, 1)] != ["switch", "keep"]:
        stores += 1
        assert stores < 60
    return took


def test_auto_keeps_what_gains_where_either_way_becomes_slower(worker, monkeypatch):
    """A model that begins to compute beside the copies slows both: that is no loss by coding."""
    one = worker(coding=False)
    with instrument.observe("vllm", fix="auto") as seen:
        one.make()
        kept(one, seen, monkeypatch)["beside"] = 1.5
        assert [what for what, *_ in stores_and_decisions(one, seen, 120)] == ["switch", "keep"]
        assert one.rows.coding
        assert [t["method"] for t in seen.transfers[-80:]].count("batch") == 20


@pytest.mark.parametrize("beside", [0.5, 1.0, 1.5])
def test_auto_takes_back_what_no_longer_gains(worker, monkeypatch, beside):
    """Even where the copies are faster than those were that it was kept for."""
    one = worker(coding=False)
    with instrument.observe("vllm", fix="auto") as seen:
        one.make()
        took = kept(one, seen, monkeypatch)
        took["store"], took["beside"] = 110, beside
        said = stores_and_decisions(one, seen, 80)
        assert said[2:] == [("return", "pooled/coded", "upstream/batch")]
        assert not one.rows.coding


@pytest.mark.parametrize(("alone_ns", "beside_ns", "keeps"), [(60, 115, True), (90, 140, False)])
def test_what_a_program_does_in_turns_counts_together(worker, monkeypatch, alone_ns, beside_ns, keeps):
    """Coded stores gain while nothing computes, and lose beside a model, which has fewer multiprocessors left."""
    one = worker(coding=False)
    with instrument.observe("vllm", fix="auto") as seen:
        one.make()
        took = kept(one, seen, monkeypatch, alone_ns if keeps else 80)
        for phase in range(14):
            took["store"] = beside_ns if phase % 2 else alone_ns
            stores_and_decisions(one, seen, 10)
        assert one.rows.coding == keeps


def test_one_bad_moment_gives_nothing_back(worker, monkeypatch):
    one = worker(coding=False)
    with instrument.observe("vllm", fix="auto") as seen:
        one.make()
        took = kept(one, seen, monkeypatch)
        took["store"] = 130
        while not one.rows._doubted:
            stores_and_decisions(one, seen, 1)
        took["store"] = 80
        assert len(stores_and_decisions(one, seen, 80)) == 2
        assert one.rows.coding
        assert not one.rows._doubted


def load_of_either_kind(one, step):
    """Of two blocks; what is stored now lies there as its turn has it."""
    one.store([0, 1], [0, 1])
    one.drain(1)
    one.load([0, 1] if step % 2 else [20, 21], [4, 5])
    one.drain(1)


@pytest.mark.parametrize(("loads_ns", "what"), [(160, ["return"]), (80, [])])
def test_auto_takes_it_back_where_loads_become_slower(worker, monkeypatch, loads_ns, what):
    one = worker(coding=False)
    with instrument.observe("vllm", fix="auto") as seen:
        one.make()
        took = kept(one, seen, monkeypatch)
        took["load"], took["beside"] = loads_ns, 0.5
        one.rows.coding = False  # these lie there as they are from now on
        one.store([20, 21], [20, 21])
        one.drain(1)
        one.rows.coding = True
        for step in range(40):
            load_of_either_kind(one, step)
        assert [d["what"] for d in seen.decisions if d["from"] == "pooled/coded"] == what
        assert one.rows.coding == (not what)
        before = [t.clone() for t in one.plain()]
        one.store([7, 8], [7, 8])
        one.drain(1)
        one.load([7, 8], [2, 3])
        one.drain(1)
    assert one.equals(before, gpu=[2, 3], cpu=[7, 8])


def test_loads_of_another_time_say_nothing_of_coded_ones(worker, monkeypatch):
    """Loads of plain rows while nothing else went on, then those of coded ones beside a model."""
    one = worker(coding=False)
    with instrument.observe("vllm", fix="auto") as seen:
        one.make()
        took = kept(one, seen, monkeypatch)
        one.rows.coding = False
        one.store([20, 21], [20, 21])
        one.drain(1)
        one.rows.coding = True
        for _ in range(12):
            one.load([20, 21], [4, 5])
            one.drain(1)
        took["beside"] = 2
        for _ in range(40):
            one.load([2, 3], [4, 5])
            one.drain(1)
        assert [d["what"] for d in seen.decisions if d["from"] == "pooled/coded"] == []
        assert one.rows.coding


def test_numbers_that_do_not_shrink_are_not_tried(worker):
    one = worker(coding=False)
    with instrument.observe("vllm", fix="auto") as seen:
        one.make()
        figures(one.rows, 80)
        one.fill(random=True)
        one.store(*everything(one))
        one.drain(1)
        keep_vllms_own_way()
        assert stores_and_decisions(one, seen, 30) == []
    assert [d["why"] for d in seen.decisions if d["what"] == "note" and "travel as they are" in d["why"]] == [
        "blocks travel as they are: a sample of what was stored would still need 100% of its bytes"
    ]


def test_waiting_for_what_was_stored_in_the_other_way_is_no_cost_of_this_one(worker, monkeypatch):
    one = worker(coding=True)
    with instrument.observe("vllm", fix="auto") as seen:
        one.make()
        one.rows.coding = True
        one.fill()
        one.store([0, 1], [0, 1])
        for path in adapter().paths():
            path.auto.stand_on(POOLED)
            own = path.fence
            monkeypatch.setattr(path, "fence", lambda stream, own=own: (time.sleep(0.05), own(stream)))
        one.rows.coding = False
        one.store([2, 3], [2, 3])
        one.drain(2)
    _, plain_store = seen.transfers
    assert [t["method"] for t in seen.transfers] == ["coded", "auto"]
    assert plain_store["build_ns"] >= 50_000_000


class Region:
    """A region of rows in which every layer has its place, as vLLM's spec makes it for a worker."""

    def __init__(self, host, blocks, layers, page):
        self.whole = host.tensor((blocks, layers * page), host.torch.int8, device=False)
        self.page, self.at, self.is_pinned, self.pinned_addresses = page, 0, True, []

    def create_next_worker_view(self, size):
        view = self.whole[:, self.at : self.at + size]
        self.at += size
        return view


def made_by(one, spec, monkeypatch):
    """The worker over a region, made by a spec of this class."""
    region = Region(one.host, one.blocks, one.layers, one.page)
    monkeypatch.setattr(one.module, "pin_mmap_region", lambda *args, **kwargs: None)
    adapter()._spec = spec
    one.worker = one.module.CPUOffloadingWorker(one.caches, 1, one.blocks, mmap_region=region)
    adapter()._spec = None


def a_spec(name, module="vllm.v1.kv_offload.cpu.spec", replicated=False):
    return type(name, (), {"__module__": module, "replicated_layout": replicated})()


def test_layers_in_one_row_of_a_region(worker, monkeypatch):
    one = worker(blocks=8)
    made_by(one, a_spec("CPUOffloadingSpec"), monkeypatch)
    one.rows.coding = True
    before, (gpu, cpu) = one.fill(), everything(one)
    one.store(gpu, cpu)
    one.drain(1)
    assert all(one.is_coded(block) for block in cpu)
    one.wipe()
    one.load(cpu, gpu)
    one.drain(1)
    assert one.equals(before)
    instrument.uninstall("vllm")
    assert np.array_equal(one.cpu()[3][cpu], before[3].numpy())


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        (None, "whoever made the worker may read them in the CPU's memory, too"),
        (
            a_spec("TieringOffloadingSpec", "vllm.v1.kv_offload.tiering.spec"),
            "TieringOffloadingSpec may read them in the CPU's memory, too",
        ),
        (
            a_spec("CPUOffloadingSpec", replicated=True),
            "in a replicated layout all ranks read them in the CPU's memory",
        ),
    ],
)
def test_blocks_that_others_read_stay_as_they_are(worker, monkeypatch, spec, why):
    one = worker()
    with instrument.observe("vllm", fix="auto") as seen:
        made_by(one, spec, monkeypatch)
        assert one.rows is None
    assert [d["why"] for d in seen.decisions] == [f"blocks travel as they are: {why}"]


def test_who_makes_a_worker_is_seen(worker):
    worker()
    seen = []
    kind = type("CPUOffloadingSpec", (), {"get_worker": lambda self: seen.append(adapter()._spec)})
    module = types.ModuleType("vllm.v1.kv_offload.cpu.spec")
    module.CPUOffloadingSpec = kind
    adapter().patch(adapter()._patcher, module)
    spec = kind()
    spec.get_worker()
    assert seen == [spec]
    assert adapter()._spec is None
    assert importlib.import_module("kvprobe.instrument.coded")


def test_nothing_lies_coded_where_nothing_is_to_be_cured(worker):
    assert worker(fix="off").rows is None


@pytest.mark.parametrize("seed", range(6))
def test_whatever_happens_a_load_brings_what_was_stored(worker, seed):
    """Coded, taken back, on either submitter or vLLM's own way, expedited, refused by the driver: against a model.

    Stores into blocks that are being stored to, for which vLLM never asks, end in their order unless one is refused.
    """
    one = worker(page=4096, blocks=16, layers=3)
    draw = np.random.default_rng(seed)
    one.fill(seed)
    stored = {}  # CPU block -> what each layer has there
    for path in adapter().paths():
        path.auto.active = False
    for _ in range(60):
        one.rows.coding = bool(draw.integers(2))
        for path in adapter().paths():
            if path.auto is not None:
                path.auto.stand_on(path.auto.rungs[int(draw.integers(len(path.auto.rungs)))])
        ids = draw.permutation(16)[: int(draw.integers(1, 9))].tolist()
        refuses = bool(draw.random() < 0.1)
        one.host.rt.library.kvhostFailCall(b"cuLaunchKernel", 0, 0)  # none of a step before that launched nothing
        if refuses:
            one.host.rt.library.kvhostFailCall(b"cuLaunchKernel", 1, 1)
        if draw.random() < 0.5 or not stored:
            if draw.random() < 0.2:
                one.fill(int(draw.integers(1000)), random=bool(draw.integers(2)))
            to = draw.permutation(16)[: len(ids)].tolist()
            one.store(ids, to)
            twice = not refuses and draw.random() < 0.3
            if twice:  # before the first has ended
                one.rows.coding = not one.rows.coding
                ids = ids[::-1]
                one.store(ids, to)
            one.drain(1 + twice)
            stored |= {cpu: [t[gpu].clone() for t in one.plain()] for gpu, cpu in zip(ids, to, strict=True)}
        else:
            known = [cpu for cpu in draw.permutation(16).tolist() if cpu in stored][: len(ids)]
            to = draw.permutation(16)[: len(known)].tolist()
            one.job += 1
            specs = one.cpu_spec(known), one.gpu_spec(to, (len(to),), (0,))
            assert one.worker.submit_load(one.job, *specs, expedited=bool(draw.random() < 0.2))
            one.drain(1)
            for cpu, gpu in zip(known, to, strict=True):
                assert all(one.host.torch.equal(a, t[gpu]) for a, t in zip(stored[cpu], one.plain(), strict=True))
    assert str(adapter().state) == "applied"
    instrument.uninstall("vllm")
    for cpu, layers in stored.items():
        assert all(np.array_equal(a.numpy(), memory[cpu]) for a, memory in zip(layers, one.cpu(), strict=True))
