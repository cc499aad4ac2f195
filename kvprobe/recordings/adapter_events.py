"""What adapters and engines wrote into a run folder, events-<pid>.jsonl: transfers, calls, decisions, sums, states."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np

from kvprobe.probe.ring import SANE
from kvprobe.recordings.assemble import sorted_table
from kvprobe.recordings.block_notes import BlockNotes
from kvprobe.recordings.model import SCHEMAS, Recording, Table
from kvprobe.recordings.vocabulary import Names

__all__ = ["AdapterEvents", "ns_of"]

_DIRECTIONS = {"load": 1, "store": 2}
_TRANSFERS = (
    "start_ns",
    "end_ns",
    "process",
    "thread",
    "stream",
    "direction",
    "bytes",
    "count",
    "transfer",
    "build_ns",
    "submit_ns",
    "wait_ns",
    "copy_ns",
    "poll_ns",
    "ok",
    "one_in",
)
_PARTS = ("build_ns", "submit_ns", "queue_ns", "copy_ns", "poll_ns")  # of a transfer, as an event calls them
_OFFLOAD_NAMES = ("time_ns", "process", "server", "source")

Event = dict[str, Any]


class AdapterEvents:
    """Rows of several tables, filled event by event.

    Attributes:
        transfers: the columns of that table; whoever has transfers of another source adds them here.
        blocks: uses of blocks of pools.
    """

    def __init__(self, names: Names) -> None:
        """`names`: where words go."""
        self._names = names
        self.transfers: dict[str, list[Any]] = {name: [] for name in _TRANSFERS}
        self._decisions: dict[str, list[Any]] = {n: [] for n in ("time_ns", "process", "what", "reason", "gain")}
        self._ranges: dict[str, list[Any]] = {
            n: [] for n in ("start_ns", "end_ns", "process", "thread", "domain", "name")
        }
        self._calls: dict[str, list[Any]] = {name: [] for name in SCHEMAS["server_calls"]}
        self._states: dict[tuple[str, int], tuple[str, str]] = {}  # adapter and pid -> what it is, where it stands
        self.blocks = BlockNotes(names)
        self._offloads: dict[tuple[object, ...], dict[str, Any]] = {}  # process, adapter and source -> its last sums

    def transfer(self, event: Event, row: int, at: int, by: int) -> None:
        """One transfer. `row`: of its process; `at`: the event's time, to which `by` is added. So all the others."""
        split = [ns_of(event.get(name)) for name in _PARTS]
        took = sum(part for part in split if part > 0)
        number, begin = event.get("id"), event.get("begin_ns")
        begun = begin if isinstance(begin, int) and begin <= at else at - took
        _add(
            self.transfers,
            (
                begun + by,
                at + by,
                row,
                event.get("thread") or -1,
                -1,
                _direction(event),
                event.get("bytes") or 0,
                event.get("copies") or 0,
                number if isinstance(number, int) else -1,
                *split,
                event.get("ok", True) is not False,
                min(max(ns_of(event.get("one_in")), 1), 1 << 20),
            ),
        )

    def decision(self, event: Event, row: int, at: int, by: int) -> None:
        """What auto did."""
        change = f": {event.get('from')} to {event.get('to')}" if event.get("to") else ""
        what = self._names.add(f"{event.get('adapter')}: {event.get('what')}{change}")
        reason = self._names.add(str(event.get("why") or ""))
        gain = (event.get("evidence") or {}).get("gain")
        _add(self._decisions, (at + by, row, what, reason, float(gain) if isinstance(gain, (int, float)) else 0.0))

    def call(self, event: Event, row: int, at: int, by: int) -> None:
        """A call of a server, as a range and in a table of its own."""
        named = self._names.add
        cause = str(event.get("cause") or "")
        start = at + by - max(0, ns_of(event.get("dur_ns")))
        when = (start, at + by, row, event.get("thread") or -1)
        said = f"{event.get('server')} {event.get('call')}: {cause}".rstrip(": ")
        _add(self._ranges, (*when, named("kvprobe"), named(said)))
        _add(
            self._calls,
            (
                *when,
                named(str(event.get("server"))),
                named(str(event.get("call"))),
                _direction(event),
                _count(event, "bytes"),
                _count(event, "copies"),
                _count(event, "pageable_copies"),
                _count(event, "blocking_copies"),
                named(cause),
                "inside" in event,
                named(str(event.get("phase") or "")),
            ),
        )

    def offload(self, event: Event, row: int, at: int, by: int) -> None:
        """What a server counted of its offloading so far: the last sums stand."""
        sums = {name: _number(event.get(name)) for name in SCHEMAS["offload"] if name not in _OFFLOAD_NAMES}
        self._offloads[row, str(event.get("adapter")), str(event.get("source"))] = {
            **sums,
            "time_ns": at + by,
            "process": row,
            "server": self._names.add(str(event.get("server"))),
            "source": self._names.add(str(event.get("source"))),
        }

    def state(self, event: Event, pid: int) -> None:
        """Where an adapter stands: the last word counts."""
        version = f" on {event.get('distribution')} {event['version']}" if event.get("version") else ""
        adapter = f"{event.get('adapter')}{version}"
        state = f"{event.get('state')} {event.get('reason') or ''}".strip()
        if state == "waiting":
            state = "waiting: the server did not use what it watches"
        self._states[adapter, pid] = adapter, state

    def fill(self, recording: Recording) -> None:
        """Puts the tables and the notes into the recording; a table without rows is left as it is."""
        recording.notes += self._said_of_adapters()
        self.blocks.fill(recording)
        if self._offloads:
            told = {name: np.array([one[name] for one in self._offloads.values()]) for name in SCHEMAS["offload"]}
            recording.tables["offload"] = Table("offload", told)
        picked = [one_in for one_in in self.transfers["one_in"] if one_in > 1]
        if picked:
            recording.notes.append(
                f"adapters at rest watched {len(picked):,} of about {sum(picked):,} transfers, one in {max(picked)}: "
                "each counts for so many, so sums over transfers are estimates"
            )
        for kind, columns, by in (
            ("server_calls", self._calls, "start_ns"),
            ("ranges", self._ranges, "start_ns"),
            ("transfers", self.transfers, "start_ns"),
            ("decisions", self._decisions, "time_ns"),
        ):
            if columns[by]:
                recording.tables[kind] = sorted_table(kind, {k: np.array(v) for k, v in columns.items()}, by=by)

    def _said_of_adapters(self) -> list[str]:
        # the start-up part speaks for a server until its adapters are there and speak for themselves
        spoken = {(adapter.partition(".")[0], pid) for adapter, pid in self._states if "." in adapter}
        states = Counter(said for (adapter, pid), said in self._states.items() if (adapter, pid) not in spoken)
        return [
            f"adapter {adapter}: {state} ({count} process{'es' if count > 1 else ''})"
            for (adapter, state), count in sorted(states.items())
        ]


def _add(columns: dict[str, list[Any]], row: Iterable[Any]) -> None:
    for column, value in zip(columns.values(), row, strict=True):
        column.append(value)


def _direction(event: Event) -> int:
    return _DIRECTIONS.get(str(event.get("direction")), 0)


def _number(value: object) -> float:
    """A sum or a rate of an event; -1 for what is none."""
    known = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= SANE
    return value if known else -1  # type: ignore[return-value]


def _count(event: Event, field: str) -> int:
    return max(0, ns_of(event.get(field)))


def ns_of(value: object) -> int:
    """A time or duration as somebody wrote it; -1 for what is none."""
    return int(value) if isinstance(value, (int, float)) and -SANE <= value <= SANE else -1
