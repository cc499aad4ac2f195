"""Lines of the logger `kvprobe` in a server that configures its own loggers only, as vLLM does: they go to stderr."""

from __future__ import annotations

import logging

__all__ = ["appear"]

_FORMAT = "%(levelname)s %(asctime)s [pid %(process)d] %(message)s"


def _configured() -> bool:
    """Somebody else says where the lines go: handlers on the root logger, or on ours."""
    log = logging.getLogger("kvprobe")
    return bool(logging.getLogger().handlers) or any(not isinstance(h, _Standby) for h in log.handlers)


class _Standby(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes as long as nobody has configured logging; a server may do so after kvprobe came."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write the line, unless others do."""
        if not _configured():
            super().emit(record)


def _passes(record: logging.LogRecord) -> bool:
    """Where somebody has configured logging, the level is the root logger's, as it would be without this file."""
    return not _configured() or record.levelno >= logging.getLogger().getEffectiveLevel()


def appear() -> None:
    """Let lines from INFO on appear. Does nothing where the logger has a level or a handler of somebody's already."""
    log = logging.getLogger("kvprobe")
    if log.level != logging.NOTSET or log.handlers:
        return
    handler = _Standby()
    handler.setFormatter(logging.Formatter(_FORMAT))
    log.addHandler(handler)
    log.addFilter(_passes)
    log.setLevel(logging.INFO)
