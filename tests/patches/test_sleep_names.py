"""The servers' own functions that put a model to sleep are named in their words, over their newest releases' files."""

from __future__ import annotations

import ast
import ctypes
import importlib
import sys
import types
from pathlib import Path
from typing import Any

import pytest

import kvprobe.instrument as instrument
from kvprobe.instrument import installation

torch = pytest.importorskip("torch")
MIB = 1 << 20


def module(name: str, **names: Any) -> Any:
    """A module of these names, whose package need not be whole."""
    made = types.ModuleType(name)
    made.__dict__.update(names)
    made.__path__ = []  # type: ignore[attr-defined]
    sys.modules[name] = made
    parent, _, child = name.rpartition(".")
    if parent:
        setattr(sys.modules.get(parent) or module(parent), child, made)
    return made


def sliced(root: Path, name: str, kept: dict[str, tuple[str, ...]], **names: Any) -> Any:
    """Module `name` with the release's own text of some functions; a class: its methods that are kept.

    What these files import would be the whole server and its GPU.
    """
    file = root.joinpath(*name.split(".")).with_suffix(".py")
    body: list[ast.stmt] = [ast.ImportFrom("__future__", [ast.alias("annotations")], 0)]
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name in kept:
            if isinstance(node, ast.ClassDef):
                node.bases, node.decorator_list = [], []
                node.body = [
                    one for one in node.body if isinstance(one, ast.FunctionDef) and one.name in kept[node.name]
                ]
                assert len(node.body) == len(kept[node.name])
            body.append(node)
    assert len(body) == len(kept) + 1
    made = module(name, **names)
    exec(compile(ast.fix_missing_locations(ast.Module(body, [])), str(file), "exec"), made.__dict__)
    return made


@pytest.fixture
def release(wheel_tree, monkeypatch, quiet_environment):
    """`release(distribution, version, *members)`: its files, on the path; forgotten afterwards."""
    before = set(sys.modules)

    def make(distribution: str, version: str, *members: str) -> Path:
        root: Path = wheel_tree(distribution, version, *members)
        monkeypatch.syspath_prepend(root)
        return root

    yield make
    installation.uninstall()
    packages = ("vllm", "sglang", "torch_memory_saver", "verl", "openrlhf", "deepspeed")
    for name in [name for name in sys.modules if name not in before and name.split(".")[0] in packages]:
        del sys.modules[name]


class Cudart:
    """What vLLM calls of the CUDA runtime."""

    def cudaMemcpy(self, to: int, source: int, size: int) -> None:
        ctypes.memmove(to, source, size)


def vllm_worker(root: Path) -> tuple[Any, list[Any]]:
    """vLLM's worker with its allocator, two allocations of 1 and 2 MiB in CPU memory that stand in for the GPU's."""
    module("vllm.logger", init_logger=lambda name: types.SimpleNamespace(info=print, warning=print, debug=print))
    cuda = types.SimpleNamespace(is_rocm=lambda: False, is_cuda_alike=lambda: True)
    module("vllm.platforms", current_platform=cuda)
    module("vllm.utils.system_utils", find_loaded_library=lambda name: name)
    module("vllm.utils.torch_utils", PIN_MEMORY=False)
    module("vllm.distributed.device_communicators.cuda_wrapper", CudaRTLibrary=Cudart)
    calls: list[Any] = []
    unmapped = {"python_unmap_and_release": lambda *handle: calls.append(("unmap", handle[1]))}
    mapped = {"python_create_and_map": lambda *handle: calls.append(("map", handle[1]))}
    module("vllm.cumem_allocator", init_module=None, **unmapped, **mapped)
    sys.modules["vllm"].__path__ = [str(root / "vllm")]
    cumem = importlib.import_module("vllm.device_allocator.cumem")
    allocator = cumem.CuMemAllocator.instance = cumem.CuMemAllocator()
    memory = torch.arange(3 * MIB // 8).view(torch.uint8)
    for tag, first, size in (("weights", 0, MIB), ("kv_cache", MIB, 2 * MIB)):
        data = cumem.AllocationData((0, size, memory.data_ptr() + first, 0), tag)
        allocator.pointer_to_data[memory.data_ptr() + first] = data
    kept = ("sleep", "wake_up", "sleep_mode_backend", "_save_sleep_parameters", "_restore_sleep_parameters")
    accelerator = types.SimpleNamespace(synchronize=lambda: None, get_memory_info=lambda: (0, 0))
    played = types.SimpleNamespace(accelerator=accelerator, no_grad=torch.no_grad)
    others = {"has_kv_transfer_group": lambda: False, "current_platform": cuda, "format_gib": str, "torch": played}
    logger = types.SimpleNamespace(info=print)
    worker = sliced(
        root,
        "vllm.v1.worker.gpu_worker",
        {"Worker": kept},
        time=importlib.import_module("time"),
        logger=logger,
        **others,
    ).Worker()
    config = types.SimpleNamespace(enable_nccl_comm_suspend=False, sleep_mode_backend="cumem")
    worker.vllm_config, worker._sleep_mode_backend = types.SimpleNamespace(model_config=config), None
    worker._sleep_saved_parameters = worker._sleep_saved_buffers = worker._sleep_saved_draft_buffers = {}
    worker.synchronize_device = lambda: None
    worker.memory = memory
    return worker, calls


def test_vllms_sleep_is_named_by_its_level_and_tags(release, monkeypatch):
    root = release("vllm", "0.33.0", "vllm/device_allocator/", "vllm/v1/worker/gpu_worker.py")
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)
    worker, calls = vllm_worker(root)
    before = worker.memory.clone()
    with instrument.observe("vllm") as seen:
        worker.sleep(1)
        worker.memory[:MIB].zero_()
        worker.wake_up(["weights"])
        worker.wake_up()
        worker.sleep(level=1)
    assert seen.states["vllm.sleep"].startswith("removed")
    assert torch.equal(worker.memory, before)
    assert calls[:4] == [("unmap", MIB), ("unmap", 2 * MIB), ("map", MIB), ("map", 2 * MIB)]
    outer = [(one["phase"], one["direction"], one.get("bytes")) for one in seen.calls if "inside" not in one]
    assert outer[:2] == [
        ("sleep, level 1: weights, runtime, cudagraph", "store", MIB),
        ("wake up: weights", "load", MIB),
    ]
    assert [one[0] for one in outer[2:]] == ["wake up", "sleep, level 1: weights, runtime, cudagraph"]


def test_of_vllms_allocations_the_interposer_hears_which_are_copied(release, monkeypatch):
    told: list[int] = []
    root = release("vllm", "0.33.0", "vllm/device_allocator/", "vllm/v1/worker/gpu_worker.py")
    monkeypatch.setattr("kvprobe.patches.vllm_sleep._listener", lambda: told.append)
    worker, _ = vllm_worker(root)
    allocator = sys.modules["vllm.device_allocator.cumem"].CuMemAllocator
    with instrument.observe("vllm") as seen:
        for tag in ("weights", "kv_cache", "cudagraph"):
            one = allocator()
            one.current_tag = tag
            one.python_malloc_callback((0, MIB, 4096, 0))
            assert 4096 in one.pointer_to_data
    assert told == [1, 0, 1]
    assert seen.states["vllm.sleep"].startswith("removed")
    assert worker is not None


def test_sglangs_release_holds_the_pauses_of_torch_memory_saver(release):
    saver = release("torch_memory_saver", "0.0.10", "torch_memory_saver/")
    root = release("sglang", "0.5.23", "sglang/srt/managers/scheduler_components/weight_updater.py")
    name = "torch_memory_saver.entrypoint"
    impl: list[Any] = []
    core = types.SimpleNamespace(
        pause=lambda tag: impl.append(("pause", tag)), resume=lambda tag: impl.append(("resume", tag))
    )
    kept = ("pause", "resume", "_ensure_initialized")
    entry = sliced(saver, name, {"TorchMemorySaver": kept}).TorchMemorySaver()
    entry._impl = core
    manager = sliced(
        root,
        "sglang.srt.managers.scheduler_components.weight_updater",
        {
            "SchedulerWeightUpdaterManager": ("release_memory_occupation", "resume_memory_occupation"),
            "_export_static_state": (),
            "_import_static_state": (),
        },
        torch=types.SimpleNamespace(
            get_device_module=lambda: types.SimpleNamespace(synchronize=lambda: None),
            distributed=types.SimpleNamespace(barrier=lambda group: None),
            inference_mode=torch.inference_mode,
        ),
        GPU_MEMORY_ALL_TYPES=["kv_cache", "weights", "cuda_graph"],
        GPU_MEMORY_TYPE_KV_CACHE="kv_cache",
        GPU_MEMORY_TYPE_WEIGHTS="weights",
        GPU_MEMORY_TYPE_CUDA_GRAPH="cuda_graph",
        ReleaseMemoryOccupationReqOutput=lambda: "released",
        ResumeMemoryOccupationReqOutput=lambda: "resumed",
    ).SchedulerWeightUpdaterManager()
    manager.scheduler, manager.offload_tags, manager.memory_saver_adapter = None, set(), entry
    manager.is_fully_idle = lambda ignore_waiting: True
    manager.flush_cache, manager._assert_weight_cache_inactive = lambda: None, lambda name: None
    model = torch.nn.BatchNorm1d(2)
    manager.tp_worker = types.SimpleNamespace(model_runner=types.SimpleNamespace(model=model))
    manager.tp_cpu_group = None
    with instrument.observe(["sglang", "torch_memory_saver"]) as seen:
        assert manager.release_memory_occupation(types.SimpleNamespace(tags=["kv_cache", "weights"])) == "released"
        assert manager.resume_memory_occupation(types.SimpleNamespace(tags=["kv_cache", "weights"])) == "resumed"
        entry.pause()
    assert impl == [
        *(("pause", tag) for tag in ("kv_cache", "weights")),
        *(("resume", tag) for tag in ("weights", "kv_cache")),
        ("pause", None),
    ]
    assert [one["phase"] for one in seen.calls if "inside" not in one] == [
        "release memory occupation: kv_cache, weights",
        "resume memory occupation: kv_cache, weights",
        "pause",
    ]
    inside = [(one["phase"], one["inside"]) for one in seen.calls if "inside" in one]
    assert inside[0] == ("pause: kv_cache", "SchedulerWeightUpdaterManager.release_memory_occupation")
    assert len(inside) == 4


def test_verls_offload_of_weights_and_optimiser_is_named(release):
    root = release("verl", "0.9.1", "verl/utils/fsdp_utils.py", "verl/utils/megatron_utils.py")
    functions = (
        "offload_fsdp_model_to_cpu",
        "offload_fsdp2_model_to_cpu",
        "load_fsdp_model_to_gpu",
        "load_fsdp2_model_to_gpu",
        "offload_fsdp_optimizer",
        "load_fsdp_optimizer",
    )
    names = {"torch": torch, "fsdp_version": lambda model: 2, "get_device_id": lambda: "cpu"}
    device = types.SimpleNamespace(empty_cache=lambda: None)
    made = sliced(root, "verl.utils.fsdp_utils", dict.fromkeys(functions, ()), get_torch_device=lambda: device, **names)
    taken = module("verl.workers.engine", offload=made.offload_fsdp_optimizer)  # imported by name, as engines do
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(8)).sum().backward()
    optimizer.step()
    with instrument.observe("verl") as seen:
        made.offload_fsdp_model_to_cpu(model)
        taken.offload(optimizer)
        made.load_fsdp_model_to_gpu(model)
        made.load_fsdp_optimizer(optimizer, "cpu")
    assert [(one["phase"], one["direction"]) for one in seen.calls] == [
        ("offload: fsdp model", "store"),
        ("offload: fsdp optimizer", "store"),
        ("load: fsdp model", "load"),
        ("load: fsdp optimizer", "load"),
    ]


def test_openrlhfs_states_are_named(release):
    name = "openrlhf.utils.deepspeed.deepspeed_utils"
    root = release("openrlhf", "0.11.2", "openrlhf/utils/deepspeed/deepspeed_utils.py")
    version = importlib.import_module("packaging.version")
    calls: list[str] = []
    kinds = types.SimpleNamespace(optim_states=1, contiguous_grad_buffer=2, hp_params=3, lp_grads=4)
    module("deepspeed.runtime.zero.offload_config", OffloadDeviceEnum=types.SimpleNamespace(cpu="cpu"))
    sys.modules["deepspeed.runtime.zero.offload_config"].OffloadStateTypeEnum = kinds  # type: ignore[attr-defined]
    played = types.SimpleNamespace(
        cuda=types.SimpleNamespace(empty_cache=lambda: None, synchronize=lambda: None),
        distributed=types.SimpleNamespace(barrier=lambda: None),
    )
    made = sliced(
        root,
        name,
        {"offload_deepspeed_states": (), "reload_deepspeed_states": ()},
        version=version,
        torch=played,
        deepspeed=types.SimpleNamespace(__version__="0.18.0"),
    )
    engine = types.SimpleNamespace(
        zero_optimization_stage=lambda: 3,
        config={"zero_optimization": {"offload_optimizer": {"device": "none"}}},
        optimizer=types.SimpleNamespace(offload_states=lambda **kwargs: calls.append("offload")),
        empty_partition_cache=lambda: None,
    )
    with instrument.observe("openrlhf") as seen:
        made.offload_deepspeed_states(engine)
    assert calls == ["offload"]
    assert [one["phase"] for one in seen.calls] == ["offload: DeepSpeed states"]
