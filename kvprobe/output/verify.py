"""What `kvprobe verify --json` prints: whether loads brought what was stored; times in ns of the recording."""

from __future__ import annotations

from typing import TypedDict

__all__ = [
    "LoadOfMismatchJson",
    "MismatchJson",
    "NotLookedAtJson",
    "RewrittenJson",
    "StoreOfMismatchJson",
    "VerifyCommandJson",
    "VerifyJson",
]


class LoadOfMismatchJson(TypedDict):
    """The call that submitted the load; stream: its handle."""

    time_ns: int
    call: str
    thread: int
    stream: int


class StoreOfMismatchJson(TypedDict):
    """The call that submitted the store, and when its bytes in CPU memory were summed."""

    time_ns: int
    summed_ns: int
    call: str
    thread: int
    stream: int
    address: int
    bytes: int


class MismatchJson(TypedDict):
    """A load whose source in CPU memory was not as before.

    what: "changed" between the store and the load, or "overwritten" while the load was under way, at found_ns.
    address: of the block; allocation: the one that it lies in, null where that is not known.
    """

    what: str
    pid: int
    address: int
    device_address: int
    bytes: int
    allocation: int | None
    allocation_bytes: int | None
    pages_looked_at: int
    pages_changed: int
    first_changed: int
    last_changed: int
    found_ns: int
    load: LoadOfMismatchJson
    store: StoreOfMismatchJson | None


class NotLookedAtJson(TypedDict):
    """Copies that were not compared, and why."""

    why: str
    copies: int


class RewrittenJson(TypedDict):
    """An allocation whose bytes had changed at most loads: most likely the program writes there itself."""

    pid: int
    address: int
    bytes: int
    compared: int
    changed: int


class VerifyJson(TypedDict):
    """Were the bytes that copies loaded those that copies had stored?

    verdict: "mismatch", "equal", or "cannot tell". changed: loads of `compared`, without those of `rewritten`.
    overwritten: loads whose source changed while they were under way; watched: loads that were looked at then.
    pages_one_in: one page of 4 KiB in so many was looked at, at the end. lag_ns: what was overwritten so soon after
    its store may not be seen. program_ns, helper_ns: time that it took in the program's threads and in kvprobe's.
    """

    verdict: str
    sentence: str
    stores: int
    summed: int
    loads: int
    compared: int
    changed: int
    watched: int
    overwritten: int
    unstored: int
    pages_one_in: int
    pages_compared: int
    lag_ns: int
    program_ns: int
    helper_ns: int
    not_looked_at: list[NotLookedAtJson]
    rewritten: list[RewrittenJson]
    mismatches: list[MismatchJson]


class VerifyCommandJson(VerifyJson):
    """The same of a command that was run; exit_code: its own, -N where signal N ended it."""

    command: list[str]
    folder: str
    exit_code: int
