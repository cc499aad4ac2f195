"""vLLM: the OffloadingConnector of 0.11 to 0.33 and the SimpleCPUOffloadConnector.

Carried into every process by the entry point `vllm.general_plugins` or the start-up hook. `vllm_copies.py` holds the
worker side, `vllm_loads.py` the scheduler side and the simple connector, `vllm_weights.py` the weight offloaders;
`vllm_spec.py` is the way without patches.
"""

from __future__ import annotations

from kvprobe.patches.vllm_copies import DescriptorBatches, PooledLoop, SharedStreams
from kvprobe.patches.vllm_loads import LoadDedup, SimpleConnector, SimpleLoadDedup
from kvprobe.patches.vllm_weights import WeightPrefetch, WeightUva

ADAPTERS = (SharedStreams, PooledLoop, DescriptorBatches, LoadDedup, SimpleConnector, SimpleLoadDedup, WeightPrefetch,
            WeightUva)  # fmt: skip
