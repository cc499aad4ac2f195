"""NVTX ranges and marks of the domain `kvprobe`; without a tool that listens, an object that does nothing."""

from __future__ import annotations

import functools
from typing import Any, Protocol

from kvprobe.environment import nvtx_listens as listening

__all__ = ["Ranges", "listening", "ranges"]


class Ranges(Protocol):
    """What the engine calls: a range over each transfer, a mark for each decision."""

    def start(self, text: str, payload: int) -> Any:
        """Opens a range that may end on another thread."""

    def end(self, handle: Any) -> None:
        """Closes it."""

    def mark(self, text: str) -> None:
        """An instant."""


class _Silent:
    """No tool listens."""

    def start(self, text: str, payload: int) -> None:
        return None

    def end(self, handle: Any) -> None:
        return None

    def mark(self, text: str) -> None:
        return None


class _Nvtx:
    def __init__(self, domain: Any) -> None:
        self._domain = domain

    def start(self, text: str, payload: int) -> Any:
        return self._domain.start_range(self._domain.get_event_attributes(message=text, payload=payload))

    def end(self, handle: Any) -> None:
        self._domain.end_range(handle)

    def mark(self, text: str) -> None:
        self._domain.mark(self._domain.get_event_attributes(message=text, color="red"))


@functools.cache
def ranges() -> Ranges:
    """The domain `kvprobe`, decided once per process."""
    if not listening():
        return _Silent()
    try:
        import nvtx
    except ImportError:
        return _Silent()
    return _Nvtx(nvtx.get_domain("kvprobe"))
