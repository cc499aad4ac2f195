"""The environment switches: whether kvprobe acts in this process at all, and whether it may change anything.

`KVPROBE=off` beats everything. kvprobe acts when one of `KVPROBE=on`, `KVPROBE_RUN` (a run folder, set by
`kvprobe run`) or `KVPROBE_FIX` (`off` or `auto`) is set; it changes a server only under `KVPROBE_FIX=auto`.
"""

from __future__ import annotations

import os

from kvprobe.errors import UsageError

FIXES = ("off", "auto")
_NO = {"off", "0", "no", "false"}


def killed() -> bool:
    """`KVPROBE=off`: nothing of kvprobe may act in this process."""
    return os.environ.get("KVPROBE", "").strip().lower() in _NO


def asked_for() -> bool:
    """The environment asks for kvprobe and does not forbid it."""
    env = os.environ
    return not killed() and bool(env.get("KVPROBE") or env.get("KVPROBE_RUN") or env.get("KVPROBE_FIX"))


def fix_from_environment() -> str:
    """`KVPROBE_FIX`, or `off` where it is no word kvprobe knows: a typing error must not change a server."""
    value = os.environ.get("KVPROBE_FIX", "off").strip().lower()
    return value if value in FIXES else "off"


def check_fix(fix: str) -> str:
    """The same word, or UsageError."""
    if fix not in FIXES:
        raise UsageError(f"fix must be one of {', '.join(FIXES)}, not {fix!r}")
    return fix
