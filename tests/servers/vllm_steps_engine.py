"""A whole vLLM engine on a CPU whose prompts are computed in chunks beside requests that decode; prints what it served.

Its own log has a line for each step (`enable_logging_iteration_details`), its outputs hold its own times.
"""

import json
import sys

from vllm_engine import write_model


def main(folder):
    from vllm import LLM, SamplingParams

    transfer = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": {}}
    transfer["kv_connector_extra_config"] = {
        "cpu_bytes_to_use": 67108864,
        "spec_name": "HostRuntimeSpec",
        "spec_module_path": "host_runtime_spec",
    }
    llm = LLM(
        model=str(write_model(folder)),
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=1024,
        enforce_eager=True,
        max_num_seqs=4,
        max_num_batched_tokens=256,
        enable_prefix_caching=True,
        enable_logging_iteration_details=True,
        kv_transfer_config=transfer,
        disable_log_stats=False,
        seed=0,
    )
    prompts = [{"prompt_token_ids": [(7 * n + k) % 1000 + 3 for k in range(100 + 67 * n)]} for n in range(10)]
    sampling = [
        SamplingParams(max_tokens=3 + 2 * n, temperature=0.0, ignore_eos=True, detokenize=False) for n in range(10)
    ]
    served = llm.generate(prompts, sampling)
    assert llm.reset_prefix_cache()
    served += llm.generate([prompts[9]], sampling[9])  # from CPU memory
    result = [
        {
            "request": one.request_id,
            "tokens": list(one.outputs[0].token_ids),
            "cached": one.num_cached_tokens,
            "queued": one.metrics.queued_ts,
            "latency": one.metrics.first_token_latency,
            "first": one.metrics.first_token_ts,
            "last": one.metrics.last_token_ts,
        }
        for one in served
    ]
    print("RESULT " + json.dumps(result))


if __name__ == "__main__":  # the engine's processes are spawned
    main(sys.argv[1])
