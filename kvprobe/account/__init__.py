"""Where every instant of a recording went, before anybody says why."""

from __future__ import annotations

from kvprobe.account.account import Account, GpuAccount, ThreadAccount, Times, account_of
from kvprobe.account.cpu_time import Worked, covers_of, who_worked
from kvprobe.account.lines import COPIES, HOST, IDLE, LINE_TITLES, OPEN, OUTSIDE_CALLS, Line, Unknown

__all__ = [
    "COPIES",
    "HOST",
    "IDLE",
    "LINE_TITLES",
    "OPEN",
    "OUTSIDE_CALLS",
    "Account",
    "GpuAccount",
    "Line",
    "ThreadAccount",
    "Times",
    "Unknown",
    "Worked",
    "account_of",
    "covers_of",
    "who_worked",
]
