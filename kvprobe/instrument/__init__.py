"""How kvprobe gets into a server: import hooks, the contract of adapters, the table of their states.

Each name is imported when it is first used: a server that loads its plugins pays for nothing that it does not need.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from kvprobe.instrument.installation import Observation, activate, install, observe, table, uninstall

__all__ = ["Observation", "activate", "install", "observe", "plugin", "table", "uninstall"]


def plugin() -> None:
    """Entry point of `vllm.general_plugins` and `sglang.srt.plugins`: does nothing unless the environment asks.

    Where the start-up part waits for the server to offload, that lets the adapters in.
    """
    startup = sys.modules.get("kvprobe_startup")
    waiting = getattr(startup, "waiting", None)  # beside an editable install it may be an older one's
    if waiting is not None and waiting():
        return
    from kvprobe.instrument.installation import activate

    activate()


def __getattr__(name: str) -> Any:
    """Imports a public name from where it is."""
    if name not in __all__:
        raise AttributeError(f"module 'kvprobe.instrument' has no attribute {name!r}")
    from kvprobe.instrument import installation

    return getattr(installation, name)
