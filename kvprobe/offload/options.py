"""What an offload engine can be told: each option, its default, and what is refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict

from kvprobe.errors import UsageError
from kvprobe.launchqueue import QueueLimits
from kvprobe.native.library import DETAIL
from kvprobe.offload.methods import DEFAULT_MAX_SLOWDOWN, METHOD_NAMES

__all__ = ["POLICIES", "WIRES", "EngineKeywords", "EngineOptions"]

POLICIES = ("shared", "pooled", "auto")
WIRES = ("raw", "coded", "auto")


class EngineKeywords(TypedDict, total=False):
    """The same for a type checker: what `OffloadEngine` takes by keyword."""

    policy: str
    method: str
    wire: str
    witness: bool
    bound: int | None
    priority: int | None
    compute_stream: int
    detail: str
    limits: QueueLimits | None
    link_bytes_per_s: float
    max_bytes_per_s: float
    max_slowdown: float
    stuck_after_s: float
    records: int


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """The options of an `OffloadEngine`, which takes them by keyword.

    Attributes:
        policy: "shared", "pooled" or "auto".
        method: how pooled copies are submitted: "loop", "batch", "kernel", or "auto": what is done first.
        wire: how blocks travel: "raw", as they are; "coded": in fewer bytes, without loss, which takes pools with a
            dtype, and a CPU pool that nobody reads but by `BlockPool.read`; or "auto": coded, where that can be had and
            is known to pay, as long as blocks shrink. On a GPU "auto" is raw: coded copies were not measured there yet.
        witness: stores sum each block and loads compare, on either wire: a load of bytes that are not those stored
            fails, and says which block, both times and which side changed. Copies go by kernels alone then.
        bound: streams of the pool, each direction; None: as many as there are hardware channels.
        priority: of the pooled streams; None: the highest, so that the few CTAs of a copy kernel need not wait until
            all CTAs of the model's kernels have begun. Copies by DMA do not heed it.
        compute_stream: the stream whose work stores wait for and loads wait for, unless a call names another.
        detail: "off", "totals", "transfers" or "copies".
        limits: the launch queue, if known; None: calibrated now.
        link_bytes_per_s: what the link does with one large copy, if known: copies far below it are named.
        max_bytes_per_s: cap on each direction's rate; 0: none.
        max_slowdown: what a copy kernel may cost a memory-bound kernel beside it, as a share (0.03: 3%); below 0: no
            copy kernels. It counts while compute is seen in front of copies, and so does what matrix products lose:
            like time that the copies take.
        stuck_after_s: copies that do not move for so long are given up and named; 0: never.
        records: single copies kept in the ring file at detail "copies"; 0: the default, 16,384.
    """

    policy: str = "auto"
    method: str = "auto"
    wire: str = "raw"
    witness: bool = False
    bound: int | None = None
    priority: int | None = None
    compute_stream: int = 0
    detail: str = "transfers"
    limits: QueueLimits | None = None
    link_bytes_per_s: float = 0.0
    max_bytes_per_s: float = 0.0
    max_slowdown: float = DEFAULT_MAX_SLOWDOWN
    stuck_after_s: float = 120.0
    records: int = 0

    def __post_init__(self) -> None:
        """Refuses what no engine can do.

        Raises:
            UsageError: an unknown policy, method, wire or detail, or a bound below 1.
        """
        if self.policy not in POLICIES:
            raise UsageError(f"unknown policy {self.policy!r}: use {', '.join(POLICIES)}")
        if self.method != "auto" and self.method not in METHOD_NAMES:
            raise UsageError(f"unknown method {self.method!r}: use auto, {', '.join(METHOD_NAMES)}")
        if self.wire not in WIRES:
            raise UsageError(f"unknown wire {self.wire!r}: use {', '.join(WIRES)}")
        if self.detail not in DETAIL:
            raise UsageError(f"unknown detail {self.detail!r}: use {', '.join(DETAIL)}")
        if self.bound is not None and self.bound < 1:
            raise UsageError(f"the stream bound must be at least 1, not {self.bound}")
