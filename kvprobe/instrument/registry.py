"""Which servers there are adapters for, from the one table of them. Imports no adapter before it is asked for one."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvprobe.errors import UsageError
from kvprobe.instrument.carried import kvprobe_startup

if TYPE_CHECKING:
    from kvprobe.instrument.adapter import Adapter


@dataclass(frozen=True)
class Server:
    """One line of the table.

    Attributes:
        package: its top-level package: the adapters come in when that is imported.
        distributions: names under which it is distributed; the first that is installed counts.
        versions: specifier of the versions that any adapter is for.
        touched: what it touches only when it offloads: module -> functions whose first call tells it, none where the
            module's import does. Empty: its adapters come in when the package is imported.
    """

    package: str
    distributions: tuple[str, ...]
    versions: str
    touched: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


# The table stands in the start-up part, which can import nothing and needs the packages' names in every process.
SERVERS = {name: Server(*row, kvprobe_startup.TOUCHED.get(name, {})) for name, row in kvprobe_startup.SERVERS.items()}

# Of these: what every server is built on. That it is installed does not say that a server is.
LIBRARIES = frozenset({"torch"})

# What servers move KV cache or weights with and no adapter watches -> what is seen of it all the same.
_INTERPOSER = "its CUDA calls by the interposer, where it links the CUDA runtime dynamically"
NOT_COVERED = {
    "vLLM: FlexKV, MoRI-IO, HF3FS and P2P connectors": "hits and waits by vllm.offload; CUDA calls by the interposer",
    "vLLM: object store, KVCR and P2P tiers of tiering": "hits and waits by vllm.offload",
    "vLLM: blocks of SimpleCPUOffloadConnector that were never loaded": "its hits, waits and copies are measured",
    "SGLang: FlexKV and LMCache radix caches, HiSparse": _INTERPOSER,
    "LMCache: disk, remote and peer-to-peer back ends": "loads and stores on the GPU's side",
    "TensorRT-LLM: host cache (compiled; not on the package index)": _INTERPOSER,
    "Dynamo: copies of the block manager's core (compiled)": _INTERPOSER,
    "llama.cpp and Ollama (no Python)": f"{_INTERPOSER}; their pageable copies have a section in the page",
}


def server_of(name: str) -> Server:
    """A server's line; for one that is not in the table, a package and a distribution of that name, any version."""
    return SERVERS.get(name) or Server(name, (name,), ">=0")


def check_servers(servers: object) -> tuple[str, ...]:
    """The names asked for, all of them for None; UsageError for one that does not exist."""
    if servers is None:
        return tuple(SERVERS)
    names = (servers,) if isinstance(servers, str) else tuple(servers)  # type: ignore[arg-type]
    for name in names:
        if name not in SERVERS:
            raise UsageError(f"no adapters for {name!r}; there are some for {', '.join(SERVERS)}")
    return names


def adapter_classes(server: str) -> tuple[type[Adapter], ...]:
    """The adapters in `patches/SERVER.py`; imports that file, never the server."""
    found: tuple[type[Adapter], ...] = importlib.import_module(f"kvprobe.patches.{server}").ADAPTERS
    return found
