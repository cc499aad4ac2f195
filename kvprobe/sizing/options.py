"""How each server calls the size of its pool in CPU memory, and with which value."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["option_for"]

_GIB = 1 << 30


def _vllm(blocks: int, size_bytes: int) -> str:
    gib = -(-size_bytes // _GIB)
    return (
        f"--kv-offloading-size {gib} (GiB), or in kv_connector_extra_config "
        f'{{"cpu_bytes_to_use": {size_bytes}}}; in vLLM 0.12 {{"num_cpu_blocks": {blocks}}}'
    )


def _sglang(blocks: int, size_bytes: int) -> str:
    return f"--hicache-size {-(-size_bytes // 10**9)} (GB, a rank), which goes before --hicache-ratio"


def _lmcache(blocks: int, size_bytes: int) -> str:
    gib = size_bytes / _GIB
    return f"LMCACHE_MAX_LOCAL_CPU_SIZE={gib:.1f} in the environment, or max_local_cpu_size: {gib:.1f} in its file (GB)"


def _kvprobe(blocks: int, size_bytes: int) -> str:
    return f"kvprobe.BlockCache({blocks}) over a BlockPool of {blocks} blocks"


_OPTIONS: dict[str, Callable[[int, int], str]] = {
    "vllm": _vllm,
    "sglang": _sglang,
    "lmcache": _lmcache,
    "kvprobe": _kvprobe,
}


def option_for(server: str, blocks: int, block_bytes: int) -> str:
    """The server's own option with a value for so many blocks; "" for a server or a block size that is not known."""
    make = _OPTIONS.get(server)
    return make(blocks, blocks * block_bytes) if make is not None and block_bytes > 0 else ""
