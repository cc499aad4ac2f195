"""How much memory this machine lets be pinned: found by pinning it, not by a rule."""

from __future__ import annotations

import contextlib
import ctypes as ct
import mmap
import os
import time
from collections.abc import Callable
from dataclasses import dataclass

from kvprobe.cuda.pinned import PinnedPool
from kvprobe.cuda.runtime import Runtime
from kvprobe.errors import CudaError
from kvprobe.native.library import core

__all__ = ["Tried", "try_locking", "try_pinning"]

PIECE_BYTES, LEAST_PIECE_BYTES = 256 << 20, 2 << 20
LEFT_TO_OTHERS = 4  # one part in so many of what is free when it begins, and never less than the reserve
SECONDS = 4.0
LOCK_PIECE_BYTES, LOCK_MOST_BYTES, LOCK_SECONDS = 64 << 20, 1 << 30, 1.0


@dataclass(frozen=True)
class Tried:
    """What a trial found.

    Attributes:
        bytes: that were pinned at the same time; they are free again.
        refusal: what refused more, in its own words; empty where nothing did.
        bound: why the trial ended where nothing refused: "memory", "time" or "most"; else empty.
    """

    bytes: int
    refusal: str = ""
    bound: str = ""


def try_pinning(runtime: Runtime, most_bytes: int | None = None, seconds: float = SECONDS) -> Tried:
    """Pins until it is refused, and frees it all.

    Pages are made by several threads and registered in pieces of 256 MiB, then of less, down to 2 MiB. Looked at before
    each piece: what the machine and the cgroups above this process have left. A quarter of it is not touched.

    Args:
        runtime: by which it is pinned.
        most_bytes: no more than that; None: what memory allows.
        seconds: no longer than that; a piece that has begun is ended.
    """
    with contextlib.ExitStack() as all_of_it:
        pool = all_of_it.enter_context(PinnedPool(runtime, 0, populate_bytes=LEAST_PIECE_BYTES))

        def take(size: int) -> str:
            try:
                all_of_it.enter_context(pool.take(size))
            except CudaError as error:
                return str(error)
            return ""

        return _try(take, PIECE_BYTES, LEAST_PIECE_BYTES, most_bytes, seconds)


def try_locking(most_bytes: int = LOCK_MOST_BYTES, seconds: float = LOCK_SECONDS) -> Tried:
    """Locks pages by mlock until it is refused, and unmaps them: what is left to try where no GPU is."""
    libc = ct.CDLL(None, use_errno=True)
    libc.mmap.restype = ct.c_void_p
    libc.mmap.argtypes = [ct.c_void_p, ct.c_size_t, ct.c_int, ct.c_int, ct.c_int, ct.c_long]
    for name in ("mlock", "munmap"):
        getattr(libc, name).argtypes = [ct.c_void_p, ct.c_size_t]
    failed = ct.c_void_p(-1).value
    with contextlib.ExitStack() as all_of_it:

        def take(size: int) -> str:
            access, kind = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            at = libc.mmap(None, size, access, kind, -1, 0)
            if at == failed:
                return f"mmap: {os.strerror(ct.get_errno())}"
            if libc.mlock(at, size):
                said = os.strerror(ct.get_errno())
                libc.munmap(at, size)
                return f"mlock: {said}"
            all_of_it.callback(libc.munmap, at, size)
            return ""

        return _try(take, LOCK_PIECE_BYTES, mmap.PAGESIZE, most_bytes, seconds)


def _try(take: Callable[[int], str], piece: int, least: int, most_bytes: int | None, seconds: float) -> Tried:
    """Takes pieces, smaller ones after a refusal."""
    until, held, refusal = time.monotonic() + seconds, 0, ""
    first = core().kvp_memory_left(b"")
    kept_back = max(core().kvp_memory_reserve(ct.byref(first)), first.left_bytes // LEFT_TO_OTHERS)
    while piece >= least:
        if most_bytes is not None and held + piece > most_bytes:
            return Tried(held, refusal, "" if refusal else "most")
        if core().kvp_memory_left(b"").left_bytes < kept_back + piece:
            return Tried(held, refusal, "" if refusal else "memory")
        if time.monotonic() > until:
            return Tried(held, refusal, "" if refusal else "time")
        said = take(piece)
        if said:
            refusal, piece = said, piece // 2
        else:
            held += piece
    return Tried(held, refusal)
