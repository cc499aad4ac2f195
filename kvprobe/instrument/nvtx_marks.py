"""NVTX ranges and marks of adapters, domain `kvprobe`; a null object where no tool listens or nvtx is absent."""

from __future__ import annotations

from typing import Any

from kvprobe.environment import nvtx_listens as listening

__all__ = ["Range", "listening", "mark"]

_domain: Any = None


def _find() -> Any:
    """The domain; nvtx itself hands out a disabled one when no tool is attached."""
    global _domain
    if _domain is None:
        try:
            import nvtx

            _domain = nvtx.get_domain("kvprobe")
        except Exception:
            _domain = False
    return _domain


def mark(message: str) -> None:
    """One instant on the timeline. Never raises."""
    if not listening():
        return
    try:
        domain = _find()
        if domain:
            import nvtx

            nvtx.mark(message=message, domain="kvprobe")
    except Exception:
        return


class Range:
    """A range as a context manager that does nothing where nobody listens."""

    __slots__ = ("_message", "_open", "_payload")

    def __init__(self, message: str, payload: int | None = None) -> None:
        self._message, self._payload, self._open = message, payload, False

    def __enter__(self) -> Range:
        if listening():
            domain = _find()
            if domain:
                domain.push_range(domain.get_event_attributes(message=self._message, payload=self._payload))
                self._open = True
        return self

    def __exit__(self, *exc: object) -> None:
        if self._open:
            _find().pop_range()
