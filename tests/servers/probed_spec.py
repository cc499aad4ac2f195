"""`ProbedOffloadingSpec` over the host runtime: the no-patch way, on a machine without a GPU."""

from host_runtime_spec import HostRuntimeSpec

from kvprobe.patches.vllm_spec import ProbedOffloadingSpec


class ProbedHostSpec(ProbedOffloadingSpec, HostRuntimeSpec):
    """The order of bases puts vLLM's real worker, made by the second, into the wrapper of the first."""
