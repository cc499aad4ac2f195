"""A checkpoint is read into place; a damaged one is one clear error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
safetensors_torch = pytest.importorskip("safetensors.torch")

from kvprobe.errors import KvprobeError, UsageError  # noqa: E402
from kvprobe.weights import load, offload  # noqa: E402

pytestmark = pytest.mark.servers

SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 10,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 128,
}
CONFIGS = {
    "llama tied": lambda: transformers.LlamaConfig(**SMALL, tie_word_embeddings=True),
    "llama": lambda: transformers.LlamaConfig(**SMALL, tie_word_embeddings=False),
    "qwen3": lambda: transformers.Qwen3Config(**SMALL, head_dim=16, tie_word_embeddings=True),
    "gpt2": lambda: transformers.GPT2Config(n_embd=64, n_layer=10, n_head=4, vocab_size=256, n_positions=128),
}


def build(name: str, dtype: Any = torch.float32) -> Any:
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name](), dtype=dtype)
    for parameter in model.parameters():  # biases and norms too, so that a swapped one would show
        torch.nn.init.normal_(parameter, std=0.3)
    return model.eval()


def logits(model: Any) -> Any:
    with torch.no_grad():
        return model(torch.arange(40).reshape(2, 20)).logits


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    build("llama tied", torch.bfloat16).save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("fraction", [0.9, 0.5, 0.2])
@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_transformers_models_give_the_same_logits(name, fraction):
    model = build(name)
    wanted = logits(model)
    generated = model.generate(torch.arange(5)[None], max_new_tokens=8, do_sample=False)
    for window in ("auto", 0, 1):
        with offload(model, gpu_fraction=fraction, window=window, device="host") as held:
            assert held.plan.units
            for _ in range(2):
                assert torch.equal(logits(model), wanted)
            assert torch.equal(model.generate(torch.arange(5)[None], max_new_tokens=8, do_sample=False), generated)
    assert torch.equal(logits(model), wanted)


@pytest.mark.parametrize("fraction", [1, 0.9, 0.5, 0.2])
@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_a_loaded_checkpoint_gives_the_same_logits(tmp_path, name, fraction):
    model = build(name, torch.bfloat16)
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    wanted = logits(model)
    with load(tmp_path, gpu_fraction=fraction, device="host") as held:
        assert held.model.dtype == torch.bfloat16 and held.active == (fraction < 1)
        assert torch.equal(logits(held.model), wanted)
        assert torch.equal(logits(held.model), wanted)


def test_loading_holds_no_more_than_the_places_take(tmp_path):
    import subprocess
    import sys

    config = transformers.LlamaConfig(
        **{**SMALL, "hidden_size": 512, "intermediate_size": 2048, "vocab_size": 4096, "num_hidden_layers": 24}
    )
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    size = (tmp_path / "model.safetensors").stat().st_size
    assert size > 300 << 20
    code = f"""
import resource, torch, transformers
from pathlib import Path
from kvprobe.weights import load, offload
from transformers.models.llama import modeling_llama
torch.set_num_threads(1)
offload(torch.nn.Sequential(*(torch.nn.Linear(9, 9) for _ in range(9))), gpu_fraction=0.5, device="host").remove()
def anonymous():
    text = Path("/proc/self/status").read_text()
    return int(text.split("RssAnon:")[1].split()[0]) * 1024
before = anonymous()
held = load({str(tmp_path)!r}, gpu_fraction=0.5, device="host")
print(anonymous() - before, held.gpu_bytes + held.pinned_bytes)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    grown, places = map(int, done.stdout.split())
    assert grown < 1.15 * places < 1.4 * size


def damage_cut(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def damage_header(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"\x20\0\0\0\0\0\0\0{half")


def damage_empty(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"")


def damage_lacking(folder: Path) -> None:
    file = folder / "model.safetensors"
    tensors = safetensors_torch.load_file(file)
    safetensors_torch.save_file(dict(sorted(tensors.items())[:-3]), file)


def damage_shape(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "intermediate_size": 96}))


def damage_config(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "lla')


def damage_shard(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-00002.safetensors"}}')


def damage_index(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "mod')


@pytest.mark.parametrize("damage", [value for name, value in sorted(globals().items()) if name.startswith("damage_")])
def test_a_damaged_checkpoint_is_one_clear_error(checkpoint, damage):
    damage(checkpoint)
    with pytest.raises(KvprobeError) as caught:
        load(checkpoint, gpu_fraction=0.5, device="host")
    assert "\n" not in str(caught.value)


def test_a_folder_without_a_checkpoint_is_wrong_usage(tmp_path):
    with pytest.raises(UsageError, match=r"config\.json"):
        load(tmp_path, gpu_fraction=0.5)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UsageError, match="safetensors"):
        load(tmp_path, gpu_fraction=0.5)
