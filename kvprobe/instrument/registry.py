"""Which servers there are adapters for: names only, so that the start-up hook imports nothing it does not need."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from kvprobe.errors import UsageError

if TYPE_CHECKING:
    from kvprobe.instrument.adapter import Adapter

# server -> (its top-level package, the module with its ADAPTERS)
SERVERS = {
    "vllm": ("vllm", "kvprobe.patches.vllm"),
    "sglang": ("sglang", "kvprobe.patches.sglang"),
    "lmcache": ("lmcache", "kvprobe.patches.lmcache"),
    "transformers": ("transformers", "kvprobe.patches.transformers"),
    "accelerate": ("accelerate", "kvprobe.patches.accelerate"),
    "diffusers": ("diffusers", "kvprobe.patches.diffusers"),
}


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
    """The adapters of one server; imports kvprobe's module about it, never the server."""
    found: tuple[type[Adapter], ...] = importlib.import_module(SERVERS[server][1]).ADAPTERS
    return found
