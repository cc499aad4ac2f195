"""A process that puts mutants into a tree of its own; apart, for one that is spawned does not import `__main__`."""

from __future__ import annotations

import time

from .checks import Check, Tree, checks_of
from .mutant import Mutant

_tree: Tree | None = None  # of a process of the pool
_quick = False


def opens(quick: bool) -> None:
    """Makes its tree."""
    global _tree, _quick
    _tree, _quick = Tree(), quick


def closes(_: int) -> None:
    """Deletes it."""
    if _tree is not None:
        _tree.close()


def passes(check: Check) -> str | None:
    """What is wrong with the program as it is."""
    assert _tree is not None
    return _tree.run(check)


def tried(mutant: Mutant, until: float) -> tuple[str, str, float]:
    """What became of one: "caught", "lives", "same" as the original, or "left"; why; and how long that took, in s."""
    assert _tree is not None
    began = time.monotonic()
    if began > until:
        return "left", "", 0.0
    if not _tree.apply(mutant):
        return "same", "is no other program", 0.0
    try:
        for check in checks_of(mutant, _quick):
            if why := _tree.run(check):
                return "caught", why, time.monotonic() - began
    finally:
        _tree.restore(mutant)
    return "lives", "", time.monotonic() - began
