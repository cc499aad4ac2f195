"""Coded weights: the same results from fewer bytes, whatever becomes of the weights, and never from damaged ones."""

from __future__ import annotations

import copy
import ctypes
import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from kvprobe.cuda.hostruntime import HostRuntime
from kvprobe.errors import KvprobeError, UsageError
from kvprobe.weights import WeightOffload, offload
from kvprobe.weights.coded import staging_bytes
from tests.weights.conftest import Model


@pytest.fixture
def model() -> Any:
    return Model(width=128, layers=6).to(torch.bfloat16).eval()


def offloaded(model: Any, runtime: HostRuntime, **options: Any) -> WeightOffload:
    return offload(model, gpu_fraction=0.8, runtime=runtime, **{"window": 1, "wire": "coded", **options})


def forward(model: Any, ids: Any) -> Any:
    with torch.no_grad():
        return model(ids)


@pytest.mark.parametrize("window", [0, 1, 2])
def test_results_are_equal_and_three_quarters_travel(model: Any, ids: Any, runtime: HostRuntime, window: int) -> None:
    right = forward(copy.deepcopy(model), ids)
    with offloaded(model, runtime, window=window) as held:
        for _ in range(4):
            assert torch.equal(forward(model, ids), right)
        moved = held._need()
        assert moved.copies >= 4 * len(held.plan.units)
        assert moved.wire_bytes == pytest.approx(held.wire_share * moved.bytes, rel=0.02)
        assert held.wire_share < 0.83  # a tenth of these layers is int8 and float64
        assert held.gpu_bytes <= held.plan.limit_bytes
        assert held.plan.staging_bytes == staging_bytes(held.plan.slot_bytes)
    assert torch.equal(forward(model, ids), right)


def test_weights_changed_in_place_are_the_changed_ones(model: Any, ids: Any, runtime: HostRuntime) -> None:
    twin = copy.deepcopy(model)
    with offloaded(model, runtime) as held:
        forward(model, ids)
        unit = held.plan.units[-1].name
        for one in (model, twin):
            with torch.no_grad():
                next(one.get_submodule(unit).parameters()).mul_(2)
        before = held._need().wire_bytes
        right = forward(twin, ids)
        assert torch.equal(forward(model, ids), right)
        assert torch.equal(forward(model, ids), right)
        assert held._need().wire_bytes > before
    assert torch.equal(forward(model, ids), right)


def test_statistics_that_a_forward_writes_stay_right(ids: Any, runtime: HostRuntime) -> None:
    """Their kernels change them without torch counting it: what was packed holds the old ones."""
    torch.manual_seed(1)
    layers = [torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.BatchNorm1d(256)) for _ in range(12)]
    model = torch.nn.Sequential(*layers).to(torch.bfloat16).train()
    twin = copy.deepcopy(model)
    x = torch.randn(32, 256, dtype=torch.bfloat16)
    with offload(model, gpu_fraction=0.9, runtime=runtime, window=1, wire="coded"):
        for _ in range(3):
            assert torch.equal(forward(model, x), forward(twin, x))
        assert torch.equal(forward(model.eval(), x), forward(twin.eval(), x))
    for one, other in zip(model.buffers(), twin.buffers(), strict=True):
        assert torch.equal(one, other)


def test_damaged_images_are_never_computed_with_unsaid(model: Any, ids: Any, runtime: HostRuntime) -> None:
    with offloaded(model, runtime) as held:
        forward(model, ids)
        held.forwards  # noqa: B018 - waits for it
        image = held._need().units[0].packed
        assert image is not None
        bytes_of = image.memory.numpy()
        bytes_of[len(bytes_of) // 2] ^= 1
        with pytest.raises(KvprobeError, match=r"came out wrong.*checksum"):
            forward(model, ids), held._settle()
        bytes_of[len(bytes_of) // 2] ^= 1
        forward(model, ids)


def test_layers_that_do_not_shrink_travel_as_they_are(ids: Any, runtime: HostRuntime) -> None:
    model = Model(width=128, layers=6).eval()  # fp32
    right = forward(copy.deepcopy(model), ids)
    with offloaded(model, runtime) as held:
        assert torch.equal(forward(model, ids), right)
        assert held.wire_share == 1
        assert held._need().wire_bytes == held._need().bytes


def test_auto_codes_only_forwards_that_would_wait(model: Any, ids: Any, runtime: HostRuntime) -> None:
    right = forward(copy.deepcopy(model), ids)
    with offloaded(model, runtime, wire="auto") as held:
        window = held._need()
        assert torch.equal(forward(model, ids), right)
        assert window.wire_bytes == window.bytes  # nothing was measured before it
        for ns_per_byte, codes in ((1e6, True), (1e-6, False), (1e6, True)):
            held.forwards  # noqa: B018 - waits for them
            window.timeline.raw_ns_per_byte = ns_per_byte
            before = window.wire_bytes, window.bytes
            assert torch.equal(forward(model, ids), right)
            travelled, moved = window.wire_bytes - before[0], window.bytes - before[1]
            assert (travelled < moved) == codes


def test_a_wire_that_cannot_be_had_is_refused_in_one_line(
    model: Any, runtime: HostRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match="raw, coded or auto, not 'zip'"):
        offloaded(model, runtime, wire="zip")
    from kvprobe.cuda.kernels import CopyKernels
    from kvprobe.weights import coded

    monkeypatch.setattr(coded, "load_copy_kernels", lambda runtime: CopyKernels(reason="NVRTC not found"))
    with pytest.raises(KvprobeError, match="coded weights cannot be had: NVRTC not found; use wire='raw'"):
        offloaded(model, runtime)
    with offloaded(model, runtime, wire="auto") as held:
        assert held.notes == ["coded weights cannot be had: NVRTC not found; use wire='raw'"]


def test_a_checkpoint_is_packed_after_it_was_read(tmp_path: Any, runtime: HostRuntime) -> None:
    transformers = pytest.importorskip("transformers", reason="a peer: reads checkpoints")
    from kvprobe.weights import load

    config = transformers.LlamaConfig(
        hidden_size=128, intermediate_size=256, num_hidden_layers=6, num_attention_heads=4, vocab_size=64
    )
    torch.manual_seed(2)
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16).eval()
    model.save_pretrained(tmp_path)
    ids = torch.arange(16).reshape(1, 16)
    right = forward(model, ids).logits
    with load(tmp_path, gpu_fraction=0.8, runtime=runtime, window=1, wire="coded") as held:
        assert torch.equal(forward(held.model, ids).logits, right)
        assert held.wire_share == pytest.approx(0.76, abs=0.02)


@pytest.mark.parametrize("number", [1, 2, 5])
@pytest.mark.parametrize("call", ["copy", "cuLaunchKernel", "cudaStreamWaitEvent", "cudaEventRecord"])
def test_a_call_that_fails_leaves_a_model_that_computes(
    model: Any, ids: Any, runtime: HostRuntime, fail: Any, account: Any, call: str, number: int
) -> None:
    right = forward(copy.deepcopy(model), ids)
    before = account.held
    with offloaded(model, runtime) as held:
        forward(model, ids)
        fail(call, number, 999)
        with pytest.raises(KvprobeError):
            for _ in range(3):
                forward(model, ids)
        assert torch.equal(forward(model, ids), right)
        assert held.active
    assert torch.equal(forward(model, ids), right)
    gc.collect()
    assert account.held == before


@pytest.mark.parametrize("number", [1, 2, 3, 4])
@pytest.mark.parametrize("call", ["cudaMalloc"])
def test_a_model_that_cannot_be_packed_is_as_it_was(
    model: Any, ids: Any, runtime: HostRuntime, fail: Any, account: Any, call: str, number: int
) -> None:
    """The fourth is the unpacker's own: after those of the kernels, the slots and what stays on the GPU."""
    right = forward(copy.deepcopy(model), ids)
    offloaded(model, runtime).remove()  # the kernels are loaded
    before = account.held
    fail(call, number)
    with pytest.raises(KvprobeError):
        offloaded(model, runtime)
    assert torch.equal(forward(model, ids), right)
    gc.collect()
    assert account.held == before


@pytest.fixture
def later(runtime: HostRuntime) -> Iterator[HostRuntime]:
    """What is submitted takes its time on a virtual clock, which stands while nobody waits."""
    runtime.reset(virtual_clock=True)
    yield runtime
    runtime.reset()


def capture(held: WeightOffload) -> None:
    """Begins to capture the forward; the host runtime has no graph that could hold the rest of it."""
    window, graph = held._need(), ctypes.c_void_p()
    held.runtime.call("cudaStreamBeginCapture", window.compute.stream, 0)
    window.begin()
    held.runtime.call("cudaStreamEndCapture", window.compute.stream, ctypes.byref(graph))
    window.capturing, window._inside = False, False


def moving(held: WeightOffload) -> list[bool]:
    """Whether images travel, and whether some are unpacked."""
    window = held._need()
    assert window._unpacker is not None
    return [not held.runtime.stream_query(stream) for stream in (window.stream, window._unpacker.stream)]


def test_a_graph_begins_when_nothing_is_under_way(model: Any, ids: Any, later: HostRuntime) -> None:
    """A layer was copied ahead that nobody used: inside a capture its unpacking cannot be waited for."""
    with offloaded(model, later, window=2) as held:
        forward(model, ids)
        assert moving(held) == [True, True]  # the first layers of a next forward
        capture(held)
        assert moving(held) == [False, False]


@pytest.mark.parametrize("how", ["skipped", "failed", "alone"])
def test_replays_come_behind_layers_that_nobody_used(model: Any, ids: Any, later: HostRuntime, how: str) -> None:
    with offloaded(model, later, window=2) as held:
        forward(model, ids)
        capture(held)
        if how == "alone":
            model.layers[0](torch.zeros(2, 3, 128, dtype=torch.bfloat16))
        elif how == "failed":
            model.fail_after = 1
            with pytest.raises(RuntimeError, match="in the middle"):
                forward(model, ids)
        else:
            model.path = [0, 1, 2, 3]
            forward(model, ids)
        assert held._need().seen[-1] < len(held.plan.units) - 1
        assert moving(held) == [False, False]
