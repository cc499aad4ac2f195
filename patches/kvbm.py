"""Dynamo's block manager (KVBM) inside vLLM and TensorRT-LLM: the calls that reach its core. Measured only.

KVBM's core is compiled and makes its copies on threads of its own: no Python sees them, the interposer does. What is
measured here is how long the model's thread is held by handing over. Hits and waits of its vLLM connector are counted
by `vllm.offload`, as those of every connector.
"""

from __future__ import annotations

from kvprobe.instrument.calls import TimedCalls, timed

_VLLM = "kvbm.vllm_integration.connector_worker"
_TRTLLM = "kvbm.trtllm_integration.connector.kvbm_connector_worker"


class VllmWorker(TimedCalls):
    """The worker's side of its connector in vLLM."""

    name = "kvbm.vllm_worker"
    summary = "Times what KVBM's connector does on vLLM's model thread: taking over loads, handing over each layer."
    timed = (
        timed(_VLLM, "KvConnectorWorker.bind_connector_metadata", ("data",), "load"),
        timed(_VLLM, "KvConnectorWorker.save_kv_layer", ("layer_name", "kv_layer", "attn_metadata"), "store"),
    )


class TrtllmWorker(TimedCalls):
    """The worker's side of its connector in TensorRT-LLM."""

    name = "kvbm.trtllm_worker"
    summary = "Times what KVBM's connector does on TensorRT-LLM's model thread: loads begun, layers handed over."
    timed = (
        timed(_TRTLLM, "DynamoKVBMConnectorWorker.start_load_kv", ("stream",), "load"),
        timed(_TRTLLM, "DynamoKVBMConnectorWorker.save_kv_layer", ("layer_idx", "stream"), "store"),
    )


ADAPTERS = (VllmWorker, TrtllmWorker)
