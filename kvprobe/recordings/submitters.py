"""What kvprobe's submitters made of the copies that they were given, from engines' ring files and adapters' events."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from kvprobe.probe.ring import SANE, SLOT, TRANSFER, RingSnapshot
from kvprobe.recordings.model import Array, Table
from kvprobe.recordings.vocabulary import Names

__all__ = ["Submitters"]

_APART = 0.01  # of the bytes asked for: more than that was not submitted yet, or was submitted twice
_DIRECTIONS = {"load": 1, "store": 2}
_SUMS = ("transfers", "copies", "descriptors", "calls", "bytes", "dur_ns")


class Submitters:
    """Collects sums, and makes the table of them."""

    def __init__(self) -> None:
        """Empty."""
        self._rows: list[dict[str, Any]] = []
        self._of_servers: dict[tuple[int, str, int], dict[str, int]] = {}

    def engine(self, process: int, ring: RingSnapshot, rows: Mapping[int, int]) -> None:
        """The exact totals of an engine's file; `rows`: of each stream handle.

        A transfer counts on the stream of its newest submission. Where as many bytes were submitted to that stream as
        its transfers asked for, they are the same; the others of a direction are told together.
        """
        slots = np.concatenate([np.zeros(0, SLOT), *(section.slots for section in ring.sections)])
        slots = slots[slots["call"] != 0]
        asked = slots["call"] == TRANSFER
        for direction in _DIRECTIONS.values():
            mine = slots["direction"] & 15 == direction
            rest = np.zeros(len(slots), dtype=bool)
            for handle in np.unique(slots["stream"][mine]).tolist():
                here = mine & (slots["stream"] == handle)
                if _agree(slots[here & asked], slots[here & ~asked]):
                    self._add(process, rows.get(handle, -1), direction, slots[here & asked], slots[here & ~asked])
                else:
                    rest |= here
            if (rest & asked).any():
                self._add(process, -1, direction, slots[rest & asked], slots[rest & ~asked])

    def _add(self, process: int, stream: int, direction: int, asked: Array, made: Array) -> None:
        sums = {
            "transfers": asked["count"],
            "copies": asked["copies"],
            "descriptors": made["copies"],
            "calls": made["count"],
            "bytes": asked["bytes"],
            "dur_ns": made["dur_ns"],
        }
        told = {name: min(int(column.sum()), SANE) for name, column in sums.items()}
        if not _agree(asked, made):
            told["descriptors"] = -1
        self._rows.append({"process": process, "stream": stream, "server": "", "direction": direction, **told})

    def event(self, process: int, event: Mapping[str, Any]) -> None:
        """A transfer of an adapter; nothing where the server submitted it itself."""
        given = {name: event.get(name) for name in ("copies", "descriptors", "submissions", "bytes", "submit_ns")}
        if not all(isinstance(value, int) and 0 <= value <= SANE for value in given.values()):
            return
        key = process, str(event.get("server")), _DIRECTIONS.get(str(event.get("direction")), 0)
        sums = self._of_servers.setdefault(key, dict.fromkeys(_SUMS, 0))
        one_in = event.get("one_in")
        times = min(max(one_in, 1), 1 << 20) if isinstance(one_in, int) else 1
        values = 1, given["copies"], given["descriptors"], given["submissions"], given["bytes"], given["submit_ns"]
        for name, value in zip(_SUMS, values, strict=True):
            sums[name] = min(sums[name] + times * int(value or 0), SANE)

    def table(self, names: Names) -> Table:
        """A row for each."""
        rows = [{**row, "server": names.add(row["server"])} for row in self._rows]
        for (process, server, direction), sums in self._of_servers.items():
            rows.append({"process": process, "stream": -1, "server": names.add(server), "direction": direction, **sums})
        if not rows:
            return Table("submitters")
        return Table("submitters", {name: np.array([row[name] for row in rows]) for name in rows[0]})


def _agree(asked: Array, made: Array) -> bool:
    """Whether the bytes of these transfers are those that were submitted."""
    wanted, moved = (float(slots["bytes"].astype(np.float64).sum()) for slots in (asked, made))
    return wanted > 0 and abs(wanted - moved) <= _APART * wanted
