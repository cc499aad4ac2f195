"""A whole vLLM 0.32 engine on a CPU with a tiny random model: store, reload, four requests that share a prefix."""

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
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attention_bias": False,
    "initializer_range": 0.02,
}


def main(folder):
    from vllm import LLM, SamplingParams

    model = Path(folder) / "model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps(CONFIG))
    spec = os.environ.get("TEST_SPEC", "host_runtime_spec.HostRuntimeSpec")
    split = (*spec.split("."), "")
    extra = {"cpu_bytes_to_use": 67108864, "spec_name": split[1], "spec_module_path": split[0]}
    transfer = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    if spec == "none":
        transfer = None
    llm = LLM(
        model=str(model),
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="bfloat16",
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
