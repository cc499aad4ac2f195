"""What a recording says of bytes that were stored and loaded again: were they the same?

A mismatch is either `overwritten`: the source of a load changed while the load was under way, which no program may do;
or `changed`: between the store and the load something wrote to the block that was no copy and no read of a file that
was seen. Whether the program may have is not known. A buffer that a program rewrites between every store and load is
told apart by how often that happens in its allocation: where it is the rule, it is no mismatch.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from kvprobe.recordings.model import Recording

__all__ = ["REASONS", "MismatchRow", "RewrittenHome", "Witnessed", "of_recording"]

RULE_SHARE, RULE_LOADS = 0.5, 4  # of the loads of an allocation, and how many there must be at least

# Column of `witness` -> why these copies were not compared, in words that follow "copies".
REASONS = {
    "pageable": "lay in pageable memory, which is not looked at",
    "shapes": "had two or three dimensions",
    "captured": "went into a CUDA graph, or stored where a graph does",
    "small": "held no whole page of 4 KiB",
    "unchosen": "held none of the pages that were looked at",
    "budget": "came while the budget of time was spent",
    "crowded": "came while too many others were under way",
    "elsewhere": "went to a stream that could not be marked",
    "unreadable": "lay in memory that could not be read",
    "unfinished": "had not ended when the program did",
    "crossed": "met another store to the same place on another stream",
    "early": "loaded what was not stored and summed yet",
}


@dataclass(frozen=True)
class MismatchRow:
    """One load; times are the recording's, addresses the process's. `store_*` None: no store is known.

    Attributes:
        kind: "changed" or "overwritten".
        process: row of `processes`; `thread` its thread's id.
        found_ns: when the difference was seen; of a changed one right before the load was submitted.
        address: of the block in CPU memory; `device` of the other side.
        pages: that were looked at; `changed` those that differ, from `first` to the end of the page at `last`.
        home: address of the allocation, 0 unknown; `home_bytes` its size.
    """

    kind: str
    process: int
    thread: int
    call: str
    stream: int
    load_ns: int
    found_ns: int
    address: int
    device: int
    bytes: int
    pages: int
    changed: int
    first: int
    last: int
    home: int
    home_bytes: int
    store_ns: int | None
    summed_ns: int | None
    store_call: str | None
    store_thread: int | None
    store_stream: int | None
    store_address: int | None
    store_bytes: int | None


@dataclass(frozen=True)
class RewrittenHome:
    """An allocation whose bytes the program changes between store and load as a rule."""

    process: int
    address: int
    bytes: int
    compared: int
    changed: int


@dataclass
class Witnessed:
    """All processes together.

    Attributes:
        counts: sums of the columns of `witness`; "level" and "lag_ns" the largest.
        mismatches: by the time of the load; at most those that were told.
        rewritten: allocations in which a change is the rule.
        changed: loads of changed blocks, without those of `rewritten`.
        unclosed: rows of processes whose last counts may be missing.
    """

    counts: dict[str, int]
    mismatches: list[MismatchRow] = field(default_factory=list)
    rewritten: list[RewrittenHome] = field(default_factory=list)
    changed: int = 0
    unclosed: list[int] = field(default_factory=list)

    @property
    def verdict(self) -> str:
        """`mismatch`, `equal`, or `cannot tell` where nothing was compared."""
        if self.changed or self.counts["overwritten"]:
            return "mismatch"
        return "equal" if self.counts["compared"] > sum(one.compared for one in self.rewritten) else "cannot tell"

    def left_out(self) -> list[tuple[str, int]]:
        """Why copies were not compared, and how many, most first."""
        found = [(words, self.counts[name]) for name, words in REASONS.items() if self.counts[name]]
        return sorted(found, key=lambda one: -one[1])


def of_recording(recording: Recording) -> Witnessed | None:
    """What was seen; None where no bytes were compared, because nobody asked for it."""
    table, homes = recording.witness, recording.witness_homes
    if not table.rows:
        return None
    largest = ("level", "lag_ns")
    counts = {
        name: int(column.max() if name in largest else column.sum())
        for name, column in table.columns.items()
        if name not in ("process", "closed")
    }
    ruled = (
        (homes["changed"] >= RULE_SHARE * homes["compared"])
        & (homes["compared"] >= RULE_LOADS)
        & (homes["address"] > 0)
    )
    rewritten = [
        RewrittenHome(*(int(homes[name][row]) for name in ("process", "address", "bytes", "compared", "changed")))
        for row in np.flatnonzero(ruled)
    ]
    own = {(one.process, one.address) for one in rewritten}
    rows = [_row(recording, row) for row in range(recording.mismatches.rows)]
    return Witnessed(
        counts,
        [one for one in rows if one.kind == "overwritten" or (one.process, one.home) not in own],
        rewritten,
        counts["changed"] - sum(one.changed for one in rewritten),
        table["process"][table["closed"] == 0].tolist(),
    )


def _row(recording: Recording, row: int) -> MismatchRow:
    table = recording.mismatches

    def at(name: str) -> int:
        return int(table[name][row])

    known = bool(at("stored"))
    return MismatchRow(
        kind=recording.text(at("kind")),
        process=at("process"),
        thread=at("thread"),
        call=recording.text(at("name")),
        stream=at("handle"),
        load_ns=at("time_ns"),
        found_ns=at("end_ns"),
        address=at("address"),
        device=at("device_address"),
        bytes=at("bytes"),
        pages=at("pages"),
        changed=at("changed"),
        first=at("first"),
        last=at("last"),
        home=at("home"),
        home_bytes=at("home_bytes"),
        store_ns=at("start_ns") if known else None,
        summed_ns=at("start_ns") + at("summed_after_ns") if known else None,
        store_call=recording.text(at("store_name")) if known else None,
        store_thread=at("store_thread") if known else None,
        store_stream=at("store_handle") if known else None,
        store_address=at("store_address") if known else None,
        store_bytes=at("store_bytes") if known else None,
    )
