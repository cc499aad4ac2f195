"""The pytest plugin on transformers' offloaded cache, no GPU: the copy made blocking is found, the rest passes."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.servers

pytest.importorskip("torch")
cache_utils = pytest.importorskip("transformers.cache_utils")

TESTS = """
import inspect
import pytest
import torch
import transformers
from transformers import cache_utils

LAYERS, PROMPT, NEW = 3, 8, 4

@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=LAYERS,
                                      num_attention_heads=4, num_key_value_heads=2, eos_token_id=None)
    return transformers.LlamaForCausalLM(config).eval()

def generate(model, device, offloading):
    model.to(device)
    cache = transformers.DynamicCache(config=model.config, offloading=offloading)
    ids = torch.arange(PROMPT).reshape(1, PROMPT).to(device)
    tokens = model.generate(ids, past_key_values=cache, max_new_tokens=NEW, do_sample=False, pad_token_id=0)
    return tokens.to("cpu")

@pytest.fixture(scope="module")
def plain(model):
    return generate(model, "cpu", False)

hot = pytest.mark.kvprobe(forbid="pageable blocking synchronisation full-queue", under="transformers.cache_utils")

@hot
def test_the_offloaded_cache_gives_the_same_tokens(model, plain):
    assert torch.equal(generate(model, "cuda", True), plain)

@hot
def test_a_cache_on_the_gpu_gives_the_same_tokens(model, plain):
    assert torch.equal(generate(model, "cuda", False), plain)

@hot
@pytest.mark.parametrize("method", ["offload", "prefetch"])
def test_made_blocking(model, plain, monkeypatch, method):
    lines, first = inspect.getsourcelines(getattr(cache_utils.CacheLayerMixin, method))
    source = "".join(lines).replace("non_blocking=True", "non_blocking=False")
    made = {}
    exec(compile("\\n" * (first - 2) + "if True:\\n" + source, cache_utils.__file__, "exec"), vars(cache_utils), made)
    monkeypatch.setattr(cache_utils.CacheLayerMixin, method, made[method])
    assert torch.equal(generate(model, "cuda", True), plain)
"""


def test_the_copy_made_blocking_is_found_and_the_others_pass(tmp_path: Path) -> None:
    (tmp_path / "test_cache.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-rA", "-p", "no:cacheprovider", "--kvprobe", "--kvprobe-device", "host"]
    done = subprocess.run([*command, "test_cache.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    outcomes = dict(re.findall(r"^(?:PASSED|FAILED) test_cache.py::(\S+)()", done.stdout, re.MULTILINE))
    assert len(outcomes) == 4, done.stdout + done.stderr
    assert set(re.findall(r"^PASSED test_cache.py::(\S+)", done.stdout, re.MULTILINE)) == {
        "test_the_offloaded_cache_gives_the_same_tokens",
        "test_a_cache_on_the_gpu_gives_the_same_tokens",
    }, done.stdout
    lines = Path(cache_utils.__file__).read_text().splitlines()
    found = re.findall(r"^(\w+): .*cache_utils.py:(\d+) in (\w+)", done.stdout, re.MULTILINE)
    assert {(rule, function) for rule, _, function in found} == {
        ("pageable", "offload"),  # torch pins only what it copies to without blocking
        ("pageable", "prefetch"),  # and from there it comes back
        ("blocking", "offload"),
        ("blocking", "prefetch"),
    }
    assert {lines[int(number) - 1].strip().split(" ")[0] for _, number, _ in found} == {"self.keys", "self.values"}
