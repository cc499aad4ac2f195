"""The rules of a hot path, by name."""

from __future__ import annotations

import re
from collections.abc import Iterable

from kvprobe.errors import UsageError

__all__ = ["RULES", "rules_of"]

PAGEABLE, BLOCKING, SYNCHRONISATION = "pageable", "blocking", "synchronisation"
ALLOCATION, PINNING, FULL_QUEUE = "allocation", "pinning", "full-queue"

# rule -> what broke it, what to do instead
RULES = {
    PAGEABLE: ("a copy from or to pageable memory", "pin the host memory, once, before the hot path"),
    BLOCKING: ("a copy that the host waits for", "copy with non_blocking=True and wait with an event"),
    SYNCHRONISATION: ("the host waits for the GPU", "let a stream wait for an event instead"),
    ALLOCATION: ("device memory is allocated or freed", "allocate before the hot path and keep it"),
    PINNING: ("host memory is pinned or unpinned", "pin before the hot path and keep it"),
    FULL_QUEUE: ("a full launch queue holds the call up", "submit in larger pieces, or on more streams"),
}


def rules_of(names: str | Iterable[str] | None, default: Iterable[str] = RULES) -> frozenset[str]:
    """Rules by name: a text with commas or spaces between them, or several texts; None: `default`.

    Raises:
        UsageError: there is no such rule.
    """
    if names is None:
        return frozenset(default)
    words = re.split(r"[\s,]+", names) if isinstance(names, str) else list(names)
    found = frozenset(word for word in words if word)
    unknown = sorted(found - set(RULES))
    if unknown:
        raise UsageError(f"there is no rule {unknown[0]!r}: use some of {', '.join(RULES)}")
    return found
