"""A whole vLLM engine on a CPU with a tiny random model: store, reload, four requests that share a prefix.

The weights are random, but such that every token depends on what stands far before it: one wrong block of the KV cache
gives other tokens. float32, because the same attention over other batches must not differ by rounding alone.
"""

import json
import os
import sys
from pathlib import Path

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
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


def write_model(folder):
    """`folder/model` with its configuration and weights, the same ones every time; returns its path."""
    import torch
    from safetensors.torch import save_file

    hidden, inner, vocabulary = CONFIG["hidden_size"], CONFIG["intermediate_size"], CONFIG["vocab_size"]
    heads, kv_heads, size = CONFIG["num_attention_heads"], CONFIG["num_key_value_heads"], CONFIG["head_dim"]
    model = Path(folder) / "model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps(CONFIG))
    generator = torch.Generator().manual_seed(0)

    def weight(rows, columns, scale=1.0):
        return torch.randn(rows, columns, generator=generator) * scale / columns**0.5

    weights = {
        "model.embed_tokens.weight": weight(vocabulary, hidden, hidden**0.5),
        "model.norm.weight": torch.ones(hidden),
        "lm_head.weight": weight(vocabulary, hidden),
    }
    for layer in range(CONFIG["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        sharp = 2.0  # scores of queries and keys: a few tokens get most of the attention
        weights |= {
            at + "input_layernorm.weight": torch.ones(hidden),
            at + "post_attention_layernorm.weight": torch.ones(hidden),
            at + "self_attn.q_proj.weight": weight(heads * size, hidden, sharp),
            at + "self_attn.k_proj.weight": weight(kv_heads * size, hidden, sharp),
            at + "self_attn.v_proj.weight": weight(kv_heads * size, hidden),
            at + "self_attn.o_proj.weight": weight(hidden, heads * size, 4.0),
            at + "mlp.gate_proj.weight": weight(inner, hidden),
            at + "mlp.up_proj.weight": weight(inner, hidden),
            at + "mlp.down_proj.weight": weight(hidden, inner),
        }
    save_file(weights, model / "model.safetensors")
    return model


def main(folder):
    from vllm import LLM, SamplingParams

    model = write_model(folder)
    spec = os.environ.get("TEST_SPEC", "host_runtime_spec.HostRuntimeSpec")
    split = (*spec.split("."), "")
    extra = {"cpu_bytes_to_use": 67108864, "spec_name": split[1], "spec_module_path": split[0]}
    extra |= json.loads(os.environ.get("TEST_EXTRA", "{}"))
    transfer = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    if spec == "none":
        transfer = None
    llm = LLM(
        model=str(model),
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=1024,
        enforce_eager=True,
        max_num_seqs=8,
        enable_prefix_caching=True,
        kv_transfer_config=transfer,
        disable_log_stats=False,
        seed=0,
    )
    sampling = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, detokenize=False)
    prompt = [{"prompt_token_ids": list(range(3, 803))}]
    result = {}

    def generate(name, prompts):
        out = llm.generate(prompts, sampling)
        result[name] = {
            "tokens": [list(o.outputs[0].token_ids) for o in out],
            "cached": [o.num_cached_tokens for o in out],
        }

    generate("cold", prompt)
    llm.generate([{"prompt_token_ids": [5] * 40}], sampling)  # a store is submitted when the next step starts
    assert llm.reset_prefix_cache()
    generate("reloaded", prompt)
    assert llm.reset_prefix_cache()
    generate("shared", [{"prompt_token_ids": [*range(3, 803), k]} for k in (900, 901, 902, 903)])
    if os.environ.get("TEST_MORE"):  # so much prefill that its cost is known
        for n in range(4):
            generate(f"more {n}", [{"prompt_token_ids": [7 * n + 3] * 64 + list(range(3, 703))}])
    result["metrics"] = {m.name: getattr(m, "value", None) for m in llm.get_metrics() if "offload" in m.name}
    print("RESULT " + json.dumps(result))


if __name__ == "__main__":  # the engine's processes are spawned
    main(sys.argv[1])
