"""A run of seeds, played in a process of its own."""

from __future__ import annotations

import logging
import time
from collections import Counter
from typing import Any

from .history import Series, Violation, wire_of


def chunk(work: tuple[int, int, int, int, str | None]) -> dict[str, Any]:
    """Plays a run of seeds in this process, or only those "raw" or with "cells"; what was counted."""
    first, count, faults, length, only = work
    logging.getLogger("kvprobe").disabled = True  # callbacks that raise are part of the histories
    found: dict[str, Any] = {"digests": [], "wrong": [], "armed": Counter(), "came": Counter()}
    found |= {"transfers": 0, "events": 0, "failed": 0, "celled": 0, "packed": 0, "refused": 0, "seeds": count}
    began, series = time.process_time(), Series()
    for seed in range(first, first + count):
        if only and only != ("raw" if wire_of(seed)[:2] == ("raw", False) else "cells"):
            continue
        try:
            one = series.play(seed, faults, length)
        except Exception as error:
            what = "" if isinstance(error, Violation) else f"{type(error).__name__}: "
            found["wrong"].append((seed, f"{what}{error}"))
            continue
        found["digests"].append(one["digest"])
        found["transfers"] += one["transfers"]
        found["failed"] += one["failed"]
        found["events"] += one["events"]
        for name in ("celled", "packed", "refused"):
            found[name] += one[name]
        found["armed"].update(one["armed"])
        found["came"].update(one["came"])
    try:
        series.close()
    except Exception as error:
        found["wrong"].append((first, f"recording of {count} histories from this seed on: {error}"))
    found["seconds"] = time.process_time() - began
    return found
