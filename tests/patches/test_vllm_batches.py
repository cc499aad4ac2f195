"""vLLM 0.33's own CPUOffloadingWorker, imported from its wheel, with kvprobe around its descriptor batches."""

import importlib
import os
import subprocess
import sys
import types

import pytest

import kvprobe.instrument as instrument
from kvprobe.instrument import installation
from kvprobe.instrument.device import Device
from kvprobe.instrument.submissions import POOLED

VERSION = "0.33.0"
IMPORTED = {}  # vLLM's modules: it registers things with torch for good and cannot be imported twice in a process
NEEDED = ("torch", "regex", "psutil", "requests", "zmq", "msgspec")


class Worker:
    """The real worker over the host runtime; `layers` tensors of `blocks` pages."""

    def __init__(self, host, root, layers=4, blocks=64, page=4096):
        sys.path.insert(0, str(root))
        importlib.invalidate_caches()
        sys.modules.update(IMPORTED)
        self.module = importlib.import_module("vllm.v1.kv_offload.cpu.gpu_worker")
        base = importlib.import_module("vllm.v1.kv_offload.base")
        self.gpu_spec = base.GPULoadStoreSpec
        self.cpu_spec = importlib.import_module("vllm.v1.kv_offload.cpu.common").CPULoadStoreSpec
        IMPORTED.update({name: m for name, m in sys.modules.items() if name.split(".")[0] == "vllm"})
        self.host, self.layers, self.blocks, self.page, self.job = host, layers, blocks, page, 0
        torch, cuda = host.torch, host.cuda
        self.module.torch = host.as_torch()
        self.module.PIN_MEMORY = True
        self.module._new_descriptor_buffers = lambda n: tuple(torch.empty(n, dtype=torch.int64) for _ in range(3))
        self.module.ops = types.SimpleNamespace(swap_blocks_batch=host.swap_blocks_batch)
        self.module.current_platform = types.SimpleNamespace(
            Stream=cuda.Stream,
            current_stream=cuda.current_stream,
            stream=cuda.stream,
            is_xpu=lambda: False,
            is_rocm=lambda: True,
            is_cuda_alike=lambda: True,
        )
        # One allocation for all layers, so that the last page of a layer is the neighbour of the next layer's first.
        whole = host.tensor((layers * blocks, page), torch.int8, device=True)
        self.tensors = [whole[i * blocks : (i + 1) * blocks] for i in range(layers)]
        self.caches = base.CanonicalKVCaches(
            [base.CanonicalKVCacheTensor(t, page) for t in self.tensors],
            [[base.CanonicalKVCacheRef(i, page) for i in range(layers)]],
        )

    def make(self):
        self.worker = self.module.CPUOffloadingWorker(self.caches, blocks_per_chunk=1, num_cpu_chunks=self.blocks)
        return self

    def store(self, gpu, cpu):
        self.job += 1
        assert self.worker.submit_store(self.job, self.gpu_spec(gpu, (len(gpu),), (0,)), self.cpu_spec(cpu))

    def load(self, cpu, gpu):
        self.job += 1
        assert self.worker.submit_load(self.job, self.cpu_spec(cpu), self.gpu_spec(gpu, (len(gpu),), (0,)))

    def drain(self, count):
        seen = []
        while len(seen) < count:
            seen += self.worker.get_finished()
        return seen

    def plain(self):
        return [t.as_subclass(self.host.torch.Tensor) for t in self.tensors]

    def roundtrip(self, groups=((3, 9, 11), (20, 21, 22, 23), (40, 5))):
        torch = self.host.torch
        for t in self.plain():
            t.copy_(torch.randint(-128, 127, t.shape, dtype=torch.int8))
        before = [t.clone() for t in self.plain()]
        at = 0
        for group in groups:
            self.store(list(group), list(range(at, at + len(group))))
            at += len(group)
        results = self.drain(len(groups))
        for t in self.plain():
            for group in groups:
                t[list(group)] = 0
        at = 0
        for group in groups:
            self.load(list(range(at, at + len(group))), list(group))
            at += len(group)
        results += self.drain(len(groups))
        assert all(r.success and r.transfer_size == r.transfer_size for r in results)
        return all(torch.equal(a, b) for a, b in zip(before, self.plain(), strict=True))


@pytest.fixture
def worker(host, clean_modules, wheel_tree):
    for name in NEEDED:
        pytest.importorskip(name)
    root = wheel_tree("vllm", VERSION, "vllm/")
    return lambda **kw: Worker(host(), root, **kw)


def adapter():
    return installation._adapters["vllm.copies.batch"]


@pytest.mark.usefixtures("patient_clock")
@pytest.mark.parametrize("fix", ["off", "auto"])
def test_bytes_come_back_and_every_batch_is_timed(worker, fix):
    one = worker()
    with instrument.observe("vllm", fix=fix) as seen:
        one.make()
        assert str(adapter().state) == "applied"
        assert one.roundtrip()
    assert [t["direction"] for t in seen.transfers] == ["store"] * 3 + ["load"] * 3
    assert [t["copies"] for t in seen.transfers] == [12, 16, 8] * 2
    for t in seen.transfers:
        assert t["bytes"] == t["copies"] * 4096
        assert t["submissions"] == 1
        assert t["build_ns"] > 0
        assert t["submit_ns"] > 0
        assert t["copy_ns"] > 0
        assert t["queue_ns"] >= 0


@pytest.mark.slow
def test_the_import_hooks_reach_the_real_package(wheel_tree, tmp_path):
    for name in NEEDED:
        pytest.importorskip(name)
    code = (
        "import kvprobe.instrument as i; i.plugin();"
        "import vllm.v1.kv_offload.cpu.gpu_worker as g;"
        "print({r['adapter']: r['state'] for r in i.table('vllm')}['vllm.copies.batch'],"
        " g.SingleDirectionOffloadingHandler.transfer_async.__kvprobe__)"
    )
    path = os.pathsep.join([str(wheel_tree("vllm", VERSION, "vllm/")), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "KVPROBE_FIX": "auto"}
    out = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert out.stdout.split() == ["applied", "vllm.copies.batch"]


def on_the_submitter(one):
    """Both directions stand on the submitter's rung; copies are made one by one, so that calls tell what was merged."""
    paths = [
        adapter().path_of(handler, direction)
        for direction, handler in (("store", one.worker._store_handler), ("load", one.worker._load_handler))
    ]
    for path in paths:
        path.auto.active = False
        path.auto.stand_on(POOLED)
    return paths


def test_neighbouring_descriptors_are_merged_but_never_across_tensors(worker, monkeypatch):
    monkeypatch.setattr(Device, "method", "loop")
    one = worker(blocks=16)
    with instrument.observe("vllm", fix="auto") as seen:
        one.make()
        on_the_submitter(one)
        everything = tuple(range(16))  # a run from the first to the last page of every layer
        assert one.roundtrip(groups=(everything,))
        assert one.roundtrip(groups=((0, 1, 2, 7, 9, 10),))
    assert [t["submissions"] for t in seen.transfers] == [one.layers] * 2 + [3 * one.layers] * 2
    assert {t["policy"] for t in seen.transfers} == {"pooled"}
    assert all(t["copies"] in (16 * one.layers, 6 * one.layers) for t in seen.transfers)
    assert all(t["copy_ns"] > 0 for t in seen.transfers)


def test_vllm_hears_the_end_and_the_time_from_the_submitter(worker):
    one = worker()
    instrument.install("vllm", fix="auto")
    one.make()
    on_the_submitter(one)
    for rung in (POOLED, None, POOLED):  # events that stood for the submitter's end are recorded anew between
        for path in adapter().paths():
            path.auto.stand_on(rung or path.auto.base)
        assert one.roundtrip()
    for path in adapter().paths():
        path.auto.stand_on(POOLED)
    one.store([1, 2], [1, 2])
    one.worker.wait({one.job})
    (result,) = one.worker.get_finished()
    assert (result.job_id, result.success) == (one.job, True)
    assert result.transfer_time > 0
    one.worker._store_handler.shutdown()


def test_install_uninstall_install_again(worker):
    one = worker()
    kind = one.module.SingleDirectionOffloadingHandler
    before = dict(vars(kind))
    for _ in range(3):
        instrument.install("vllm", fix="auto")
        assert vars(kind)["transfer_async"] is not before["transfer_async"]
        one.make()
        assert one.roundtrip()
        instrument.uninstall("vllm")
        assert dict(vars(kind)) == before
        assert one.worker._load_handler._swap_blocks_batch == one.host.swap_blocks_batch
        assert one.roundtrip()


@pytest.mark.parametrize(
    "hook",
    [
        "transfer",
        "swap",
        "finished",
        "around_init",
        "around_worker_init",
        "copies",
        "transfer_events",
        "replace_events",
    ],
)
def test_a_hook_that_fails_changes_no_result(worker, hook, monkeypatch):
    import kvprobe.patches.vllm_batches as batches

    def broken(*args, **kwargs):
        raise RuntimeError("kvprobe's own mistake")

    monkeypatch.setattr(batches.DescriptorBatches, hook, broken)
    one = worker()
    instrument.install("vllm", fix="auto")
    one.make()
    if hook in ("copies", "transfer_events", "replace_events"):
        on_the_submitter(one)
    for _ in range(3):
        assert one.roundtrip()
    assert str(adapter().state).startswith("failed: ")


def test_an_error_of_the_copy_operation_reaches_vllm_as_it_is(worker):
    from kvprobe.errors import CudaError

    one = worker()
    instrument.install("vllm", fix="auto")
    one.make()
    one.host.rt.library.kvhostFailCopy(1, 1)
    with pytest.raises(CudaError):
        one.store([1, 2], [1, 2])
    assert str(adapter().state) == "applied"
    assert one.roundtrip()


def test_streams_and_dedup_are_reported_as_upstream(worker):
    worker()
    states = instrument.install("vllm", fix="auto")
    for name in ("vllm.copies.shared", "vllm.copies.loop", "vllm.loads.dedup"):
        assert states[name].startswith("not needed: already upstream:")


def test_runs_are_merged_up_to_the_start_of_a_registration(worker, monkeypatch):
    """vLLM registers host memory in chunks."""
    monkeypatch.setattr(Device, "method", "loop")
    one = worker(layers=1, blocks=16)
    with instrument.observe("vllm", fix="auto") as seen:
        one.make()
        base = one.worker._load_handler.src_tensors[0].data_ptr()
        one.worker._mmap_region = types.SimpleNamespace(pinned_addresses=[base, base + 8 * one.page])
        adapter().around_worker_init(lambda: None, one.worker)
        on_the_submitter(one)
        pages = list(range(16))
        one.load(pages, pages)
        one.drain(1)
        one.worker._mmap_region = None
    assert [t["submissions"] for t in seen.transfers] == [2]


def test_expedited_loads_stay_with_vllm(worker):
    """From 0.33 on it has a stream of their own for them, on which they do not queue behind other loads."""
    one = worker()
    with instrument.observe("vllm", fix="auto") as seen:
        one.make()
        on_the_submitter(one)
        assert adapter().path_of(one.worker._expedited_load_handler, "load").auto is None
        one.job += 1
        assert one.worker.submit_load(one.job, one.cpu_spec([1, 2]), one.gpu_spec([1, 2], (2,), (0,)), expedited=True)
        one.drain(1)
    assert [t["policy"] for t in seen.transfers] == ["upstream"]


def test_without_known_registrations_the_submitter_is_not_used(worker):
    """The worker was made before kvprobe came."""
    one = worker(layers=1, blocks=16).make()
    with instrument.observe("vllm", fix="auto") as seen:
        adapter().path_of(one.worker._store_handler, "store").auto.stand_on(POOLED)
        pages = list(range(16))
        one.store(pages, pages)
        one.store(pages, pages)
        one.drain(2)
    assert one.host.batches == [16, 16]
    assert [d["what"] for d in seen.decisions] == ["refuse"]


def test_the_spec_passes_on_what_it_does_not_know(worker, monkeypatch):
    one = worker()
    own = types.SimpleNamespace(CPUOffloadingSpec=object)  # the real one imports all of vLLM
    monkeypatch.setitem(sys.modules, "vllm.v1.kv_offload.cpu.spec", own)
    spec = importlib.import_module("kvprobe.patches.vllm_spec")
    one.make()
    one.worker = spec.ProbedWorker(one.worker)
    with instrument.observe("vllm") as seen:
        pages = [1, 2, 3]
        one.store(pages, pages)
        one.job += 1
        assert one.worker.submit_load(one.job, one.cpu_spec(pages), one.gpu_spec(pages, (3,), (0,)), expedited=True)
        one.worker.wait({one.job})
        one.drain(2)
    assert len(one.worker._expedited_load_handler._stream_pool) == 1  # it ran there
    # they may end in one poll, which begins with the expedited ones
    assert sorted(t["direction"] for t in seen.transfers if t["adapter"] == "vllm.spec") == ["load", "store"]
    del sys.modules["kvprobe.patches.vllm_spec"]
