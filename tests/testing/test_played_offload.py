"""What offloading libraries do to tensors works on the played GPU, and their copies are judged; torch is enough."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

TESTS = """
import copy, weakref
import pytest, torch

GPU = torch.device("cuda")

def network():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 8)).eval()

@pytest.mark.parametrize("requires_grad", [True, False])
def test_data_moves_a_parameter_to_the_device_and_back(requires_grad):
    parameter = torch.nn.Parameter(torch.arange(6.0), requires_grad=requires_grad)
    parameter.tag, seen = "mine", weakref.ref(parameter)
    for device in ("cuda", "cpu", "cuda"):
        parameter.data = parameter.data.to(device)
        assert parameter.device.type == parameter.data.device.type == device
        assert parameter.requires_grad == requires_grad and not parameter.data.requires_grad
        assert isinstance(parameter, torch.nn.Parameter) and parameter.is_leaf
        assert seen() is parameter and parameter.tag == "mine"
        assert parameter.tolist() == [0, 1, 2, 3, 4, 5]

def test_data_takes_another_shape_and_is_the_tensors_own_memory():
    tensor = torch.ones(3, device=GPU)
    tensor.data = torch.zeros(2, device=GPU)
    tensor.data.fill_(7)
    assert tensor.shape == (2,) and tensor.tolist() == [7, 7]
    tensor.data = torch.empty(0)
    assert tensor.numel() == 0 and tensor.device.type == "cpu"

def test_pinned_memory_comes_back_by_data():
    parameter = torch.nn.Parameter(torch.ones(4))
    pinned = parameter.data.pin_memory()
    parameter.data = pinned.to(GPU, non_blocking=True)
    parameter.data.record_stream(torch.cuda.current_stream())
    parameter.data = pinned
    assert parameter.is_pinned() and parameter.data.data_ptr() == pinned.data_ptr()

def test_requires_grad_of_a_module_on_the_device():
    model = network().requires_grad_(False).to(GPU)
    assert not any(each.requires_grad for each in model.parameters())
    model[0].weight.requires_grad = True
    assert model[0].weight.requires_grad and torch.ones(2, device=GPU, requires_grad=True).requires_grad
    again = type(model[0].weight)(torch.ones(2), requires_grad=False)
    assert type(again) is torch.nn.Parameter and not again.requires_grad

def test_tolist_and_numpy():
    assert torch.arange(4).reshape(2, 2).to(GPU).tolist() == [[0, 1], [2, 3]]
    tensor = torch.arange(3, device=GPU)
    assert (tensor.tolist(), tensor[1].tolist(), list(tensor)) == ([0, 1, 2], 1, [0, 1, 2])
    assert torch.tensor(5.5, device=GPU).tolist() == 5.5
    with pytest.raises(TypeError, match="Use Tensor.cpu"):
        tensor.numpy()

def test_a_model_whose_layers_come_and_go_computes_the_same():
    model, x = network(), torch.randn(3, 16)
    plain = network()(x).detach()
    for _ in range(3):
        for each in [*model.parameters(), *model.buffers()]:
            each.data = each.data.to(GPU, non_blocking=True)
        assert torch.allclose(model(x.to(GPU)).detach().cpu(), plain)
        for each in model.parameters():
            each.data = each.data.to("cpu")

def test_a_copy_of_a_model_on_the_device():
    model = network().to(GPU)
    other = copy.deepcopy(model)
    other[0].weight.data.zero_()
    assert other[0].weight.device.type == "cuda" and model[0].weight.abs().sum().item() > 0
    assert isinstance(other[0].weight, torch.nn.Parameter) and other[0].weight.requires_grad

@pytest.mark.kvprobe(forbid="pageable blocking")
def test_data_from_pageable_memory_is_held_against_it():
    parameter = torch.nn.Parameter(torch.ones(100))
    parameter.data = parameter.data.to(GPU, non_blocking=True)  # line: pageable

@pytest.mark.kvprobe(forbid="pageable blocking")
def test_tolist_waits():
    torch.ones(100, device=GPU).tolist()  # line: blocking

@pytest.fixture
def pinned():
    return torch.ones(100, pin_memory=True)

@pytest.mark.kvprobe(forbid="pageable blocking")
def test_data_from_pinned_memory_is_not(pinned):
    parameter = torch.nn.Parameter(torch.ones(100), requires_grad=False)
    parameter.data = pinned.to(GPU, non_blocking=True)
    parameter.data = pinned
"""


def test_what_offloading_does_to_tensors_works_and_is_judged(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rA", "--tb=short", "--kvprobe"]
    command += ["--kvprobe-device", "host", "test_it.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    failed = set(re.findall(r"^(?:FAILED|ERROR) test_it.py::(\S+)", done.stdout, re.MULTILINE))
    assert failed == {"test_data_from_pageable_memory_is_held_against_it", "test_tolist_waits"}, done.stdout
    lines = TESTS.splitlines()
    for rule, number in re.findall(r"^([a-z-]+): a copy .*test_it.py:(\d+) in", done.stdout, re.MULTILINE):
        assert lines[int(number) - 1].endswith("# line: blocking" if "tolist" in lines[int(number) - 1] else "pageable")
        assert rule in ("pageable", "blocking")
    assert len(re.findall(r"^PASSED test_it.py::", done.stdout, re.MULTILINE)) == 9
