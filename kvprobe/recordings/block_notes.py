"""Uses of blocks of pools in CPU memory, as adapters and caches noted them: the tables block_uses and block_pools."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvprobe.probe.ring import SANE
from kvprobe.recordings.assemble import sorted_table
from kvprobe.recordings.model import SCHEMAS, Array, Recording, Table
from kvprobe.recordings.vocabulary import Names
from kvprobe.reuse.estimate import WHOLE
from kvprobe.reuse.sample import WORDS

__all__ = ["BlockNotes"]

_IDS = 1 << 48  # ids lie below it
_Key = tuple[int, int, int]  # process, server, source


class BlockNotes:
    """Notes of several pools, gathered event by event."""

    def __init__(self, names: Names) -> None:
        """`names`: where words go."""
        self._names = names
        self._pools: dict[_Key, dict[str, Any]] = {}
        self._notes: dict[_Key, list[Array]] = {}

    def event(self, event: dict[str, Any], row: int, at: int, by: int) -> None:
        """One event of kind `blocks`, of the process in `row`; `by` is added to its times. Nonsense is left out."""
        key = row, self._names.add(str(event.get("server"))), self._names.add(str(event.get("source")))
        threshold = _whole(event.get("threshold"))
        if not 0 < threshold <= WHOLE:
            return
        counts = event.get("counts")
        counts = counts if isinstance(counts, dict) else {}
        pool = self._pools.setdefault(key, {"threshold": WHOLE})
        pool["threshold"] = min(pool["threshold"], threshold)
        pool |= {word: max(_whole(counts.get(word)), 0) for word in WORDS.values()}
        pool |= {"time_ns": at + by, "block_bytes": _whole(event.get("block_bytes"))}
        pool["blocks"] = max(_whole(event.get("blocks")), pool.get("blocks", -1))
        notes = event.get("notes")
        good = [one for one in notes if _is_note(one)] if isinstance(notes, list) else []
        if good:
            found = np.array(good, dtype=np.int64)
            found[:, 0] += by
            self._notes.setdefault(key, []).append(found)

    def fill(self, recording: Recording) -> None:
        """Puts the tables into the recording, if there is anything to put; uses of blocks followed to the end only."""
        if not self._pools:
            return
        parts = []
        for key, notes in self._notes.items():
            found = np.concatenate(notes)
            found = found[found[:, 1] >> 24 < self._pools[key]["threshold"]]
            parts.append(np.column_stack([found, np.tile(np.array(key), (len(found), 1))]))
        columns = ("time_ns", "block", "what", "process", "server", "source")
        if parts:
            every = np.concatenate(parts)
            recording.tables["block_uses"] = sorted_table(
                "block_uses", {name: every[:, number] for number, name in enumerate(columns)}, by="time_ns"
            )
        rows = [
            {**pool, "process": key[0], "server": key[1], "source": key[2], "followed": pool["threshold"] / WHOLE}
            for key, pool in self._pools.items()
        ]
        recording.tables["block_pools"] = Table(
            "block_pools", {name: np.array([one[name] for one in rows]) for name in SCHEMAS["block_pools"]}
        )


def _whole(value: object) -> int:
    """A count; -1 for what is none."""
    known = isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= SANE
    return value if known else -1  # type: ignore[return-value]


def _is_note(one: object) -> bool:
    if not isinstance(one, list) or len(one) != 3 or not all(type(part) is int for part in one):
        return False
    at, block, what = one
    return abs(at) <= SANE and 0 <= block < _IDS and what in WORDS
