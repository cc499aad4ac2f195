"""Whether kvprobe acts in this process at all, and whether it may change anything, as the environment says.

`KVPROBE=off` beats everything. kvprobe acts when one of `KVPROBE=on`, `KVPROBE_RUN` (a run folder, set by
`kvprobe run`) or `KVPROBE_FIX` (`off` or `auto`) is set; it changes a server only under `KVPROBE_FIX=auto`.
"""

from __future__ import annotations

from kvprobe.environment import FIX, FIXES, asked_for, killed
from kvprobe.errors import UsageError

__all__ = ["FIXES", "asked_for", "check_fix", "fix_from_environment", "killed"]


def fix_from_environment() -> str:
    """`KVPROBE_FIX`, or `off` where it is no word kvprobe knows: a typing error must not change a server."""
    return FIX.value()


def check_fix(fix: str) -> str:
    """The same word, or UsageError."""
    if fix not in FIXES:
        raise UsageError(f"fix must be one of {', '.join(FIXES)}, not {fix!r}")
    return fix
