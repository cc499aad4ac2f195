"""vLLM: the OffloadingConnector of 0.11 to 0.33 and the SimpleCPUOffloadConnector.

Carried into every process by the entry point `vllm.general_plugins` or the start-up hook. `vllm_copies.py`
holds what worker sides have in common, `vllm_loops.py` those that copy block by block, `vllm_batches.py` those that
copy in batches, `vllm_loads.py` the scheduler side and the simple connector, `vllm_weights.py` the weight offloaders.
`vllm_sleep.py` has sleep mode, `vllm_steps.py` the engine's steps, `vllm_connectors.py` transfers that other libraries
make; `vllm_offload.py` says whether an offload pays; `vllm_spec.py` is the way without patches.
"""

from __future__ import annotations

from .vllm_batches import DescriptorBatches
from .vllm_connectors import CONNECTORS
from .vllm_loads import LoadDedup, SimpleConnector, SimpleLoadDedup
from .vllm_loops import PooledLoop, SharedStreams
from .vllm_offload import Offload
from .vllm_sleep import SleepMode
from .vllm_steps import Steps
from .vllm_weights import WeightPrefetch, WeightUva

ADAPTERS = (
    SharedStreams,
    PooledLoop,
    DescriptorBatches,
    LoadDedup,
    SimpleConnector,
    SimpleLoadDedup,
    WeightPrefetch,
    WeightUva,
    Offload,
    SleepMode,
    Steps,
    *CONNECTORS,
)
