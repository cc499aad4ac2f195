"""Which requests were late, and what made them so: steps of a server, split into the lines of the account."""

from __future__ import annotations

from kvprobe.requests.late import LateRequest, LateStep, PhaseTimes, Requests, Waits, of_account
from kvprobe.requests.split import LOAD, PART_KEYS, TURN
from kvprobe.requests.usual import LEAST, Usual, like_of, usual

__all__ = [
    "LEAST",
    "LOAD",
    "PART_KEYS",
    "TURN",
    "LateRequest",
    "LateStep",
    "PhaseTimes",
    "Requests",
    "Usual",
    "Waits",
    "like_of",
    "of_account",
    "usual",
]
