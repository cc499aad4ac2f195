"""The pytest plugin on accelerate's and diffusers' offloading, no GPU: same output, and each copy is judged."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.servers

pytest.importorskip("torch")
pytest.importorskip("accelerate")
pytest.importorskip("diffusers")

TESTS = """
import accelerate, pytest, torch, transformers
from diffusers.hooks import apply_group_offloading

GPU, CPU = torch.device("cuda"), torch.device("cpu")

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = torch.nn.ModuleList([torch.nn.Linear(16, 16) for _ in range(4)])
        self.register_buffer("scale", torch.ones(1))
    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x * self.scale

def same(model, x):
    plain = Model().eval()(x)
    return all(torch.allclose(model(x.to(GPU)).cpu(), plain, atol=1e-6) for _ in range(3))

@pytest.fixture(params=[True, False], ids=["grad", "no_grad"])
def x(request):
    with torch.set_grad_enabled(request.param):
        yield torch.randn(3, 16)

@pytest.mark.kvprobe(forbid="pageable blocking", under="accelerate")
def test_cpu_offload(x):
    assert same(accelerate.cpu_offload(Model().eval(), execution_device=GPU, offload_buffers=True), x)

@pytest.mark.kvprobe(forbid="pageable", under="diffusers")
def test_cpu_offload_is_not_diffusers(x):
    assert same(accelerate.cpu_offload(Model().eval(), execution_device=GPU), x)

def test_model_that_comes_and_goes(x):
    model, hook = accelerate.cpu_offload_with_hook(Model().eval(), execution_device=GPU)
    assert same(model, x) and model.scale.device.type == "cuda"
    hook.offload()
    assert {each.device.type for each in model.parameters()} == {"cpu"}

@pytest.mark.parametrize("kind", ["block_level", "leaf_level"])
@pytest.mark.parametrize("how", [
    {}, {"non_blocking": True}, {"use_stream": True}, {"use_stream": True, "record_stream": True},
    {"use_stream": True, "low_cpu_mem_usage": True},
], ids=lambda how: "+".join(how) or "plain")
def test_group_offload(kvprobe, x, kind, how):
    model = Model().eval()
    apply_group_offloading(model, GPU, CPU, offload_type=kind, num_blocks_per_group=1, **how)
    with kvprobe.hot_path(forbid="pageable", under="diffusers.hooks"):
        assert same(model, x)

@pytest.mark.parametrize("cache", ["dynamic", "offloaded", "static", "offloaded_static"])
@pytest.mark.parametrize("offloaded", [False, True], ids=["resident", "weights in memory"])
def test_generate(cache, offloaded):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=3,
                                      num_attention_heads=4, num_key_value_heads=2, eos_token_id=None)
    model = transformers.LlamaForCausalLM(config).eval()
    ids = torch.arange(8).reshape(1, 8)
    plain = model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0).tolist()
    if offloaded:
        accelerate.cpu_offload(model, execution_device=GPU)
    else:
        model.to(GPU)
    out = model.generate(ids.to(GPU), max_new_tokens=4, do_sample=False, pad_token_id=0, cache_implementation=cache)
    assert out.device.type == "cuda" and out.tolist() == plain
"""


def test_offloaded_models_compute_the_same_and_are_judged(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-rA", "-p", "no:cacheprovider", "--kvprobe", "--kvprobe-device", "host"]
    done = subprocess.run([*command, "test_it.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    found = dict(re.findall(r"^(?:PASSED|FAILED|ERROR) test_it.py::(.+?)(?: - .*)?$()", done.stdout, re.MULTILINE))
    assert len(found) == 34, done.stdout + done.stderr
    failed = set(re.findall(r"^FAILED test_it.py::(\S+)", done.stdout, re.MULTILINE))
    hows = ["plain", "non_blocking", "use_stream", "use_stream+record_stream", "use_stream+low_cpu_mem_usage"]
    groups = {(how, "block_level") for how in hows} | {(how, "leaf_level") for how in hows[:2]}  # only a stream pins
    assert failed == {f"test_cpu_offload[{grad}]" for grad in ("grad", "no_grad")} | {
        f"test_group_offload[{grad}-{how}-{kind}]" for grad in ("grad", "no_grad") for how, kind in groups
    }, done.stdout
    # what lies in no block, the buffer, diffusers moves without the stream, and so without pinning it
    of_streams = re.findall(r"_ test_group_offload.\w+-use_stream\S+ _+\n(.*?)\n(?=[_=])", done.stdout, re.DOTALL)
    assert len(of_streams) == 6
    assert all(re.findall(r"cudaMemcpyAsync, (.*),", text) == ["3 times, 12 bytes"] * 2 for text in of_streams)
