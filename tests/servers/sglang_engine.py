"""SGLang's whole engine with a tiny random model on sglang_platform.py: prompts that are evicted and come back."""

import json
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 1024,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attention_bias": False,
    "initializer_range": 0.02,
}
DOCUMENTS, LENGTH, ANSWER = 8, 400, 32
ON_GPU = 2048  # tokens: half of what is asked for
ON_CPU = {
    "skip_tokenizer_init": True,
    "dtype": "float32",
    "device": "cpu",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "disable_cuda_graph": True,
    "context_length": 1024,
}
COUNTED = {
    "stored_bytes": "sglang:hicache_backup_bytes_total",
    "stored_tokens": "sglang:hicache_backup_tokens_total",
    "loaded_bytes": "sglang:load_back_bytes_total",
    "loaded_tokens": "sglang:load_back_tokens_total",
}


def write_model(folder):
    """Weights so large that what tokens attend to decides what comes next; SGLang's dummy weights are too small."""
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(0)
    hidden, inner, heads, kv = CONFIG["hidden_size"], CONFIG["intermediate_size"], 128, 64
    shapes = {"self_attn.q_proj": (heads, hidden), "self_attn.k_proj": (kv, hidden), "self_attn.v_proj": (kv, hidden)}
    shapes |= {"self_attn.o_proj": (hidden, heads), "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden)}
    shapes |= {"mlp.down_proj": (hidden, inner)}
    tensors = {"model.embed_tokens": (CONFIG["vocab_size"], hidden), "lm_head": (CONFIG["vocab_size"], hidden)}
    norms = ["model.norm"]
    for layer in range(CONFIG["num_hidden_layers"]):
        tensors |= {f"model.layers.{layer}.{name}": shape for name, shape in shapes.items()}
        norms += [f"model.layers.{layer}.{name}" for name in ("input_layernorm", "post_attention_layernorm")]
    made = {f"{name}.weight": torch.randn(shape, generator=generator) * 0.15 for name, shape in tensors.items()}
    made |= {f"{name}.weight": torch.ones(hidden) for name in norms}
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_file(made, folder / "model.safetensors")


def counted(folder):
    """What SGLang's own metrics count, over its processes."""
    from prometheus_client import CollectorRegistry, multiprocess

    registry = CollectorRegistry()
    multiprocess.MultiProcessCollector(registry, path=folder)
    samples = [sample for family in registry.collect() for sample in family.samples]
    return {key: sum(s.value for s in samples if s.name == name) for key, name in COUNTED.items()}


def settled(folder):
    """The same, once the transfers that are under way have ended: SGLang counts a transfer when it notices its end."""
    before = None
    while (now := counted(folder)) != before:
        before = now
        time.sleep(1)
    return now


def main(folder):
    import sglang

    model, metrics = Path(folder) / "model", Path(folder) / f"metrics-{os.getpid()}"
    write_model(model)
    metrics.mkdir()
    os.environ["PROMETHEUS_MULTIPROC_DIR"] = str(metrics)
    engine = sglang.Engine(
        model_path=str(model),
        **ON_CPU,
        max_total_tokens=ON_GPU,
        max_running_requests=4,
        random_seed=0,
        enable_cache_report=True,
        enable_metrics=True,
        **{"log_level": "warning", **json.loads(os.environ.get("TEST_ARGUMENTS", "{}"))},
    )
    result = {}

    def generate(name, prompts):
        sampling = {"max_new_tokens": ANSWER, "temperature": 0.0, "ignore_eos": True}
        out = engine.generate(input_ids=prompts, sampling_params=sampling)
        result[name] = {
            "tokens": [one["output_ids"] for one in out],
            "cached": [one["meta_info"]["cached_tokens"] for one in out],
            "where": [one["meta_info"].get("cached_tokens_details") for one in out],
            "ids": [one["meta_info"]["id"] for one in out],
            "first": [one["meta_info"].get("prefill_finished_time") for one in out],  # of the wall clock, s
            "by": [time.time_ns() - time.monotonic_ns()],
        }

    documents = [[(7 * n + i * (n + 1)) % 1000 + 3 for i in range(LENGTH)] for n in range(DOCUMENTS)]
    for start in range(0, DOCUMENTS, 2):  # as many steps as are asked to know what prefill costs
        generate(f"cold {start}", documents[start : start + 2])
    for turn in range(2):
        for start in range(0, DOCUMENTS, 4):
            again = [[*documents[start + n], 900 + turn, 910 + n] for n in range(4)]
            generate(f"again {turn} {start}", again)
    result["counted"] = settled(str(metrics))
    engine.shutdown()
    print("RESULT " + json.dumps(result), flush=True)
    sys.exit(int(os.environ.get("TEST_EXIT", "0")))


if __name__ == "__main__":  # the engine's processes are spawned
    main(sys.argv[1])
