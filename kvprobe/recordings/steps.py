"""Steps of servers and the requests in them, from a run folder's lines or from NVTX ranges by a pattern."""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterable
from itertools import compress
from typing import Any

import numpy as np

from kvprobe.errors import UsageError
from kvprobe.recordings.assemble import sorted_table
from kvprobe.recordings.model import SCHEMAS, Array, Phase, Recording, RequestTime, Table
from kvprobe.recordings.run_processes import Process
from kvprobe.recordings.vocabulary import Names
from kvprobe.runfolder.step_lines import TIMES

__all__ = ["OWN_PATTERN", "Steps", "steps", "with_steps_of_ranges"]

# what `kvprobe.mark` calls its ranges
OWN_PATTERN = r"kvprobe step (?P<step>-?\d+) (?P<phase>\w+) \[(?P<request>.*)\]"
_MOST_NAMES = 1_000_000  # texts of ranges that a pattern is tried on
_LONGEST = 100_000  # characters of one
_PHASES = {phase.name.lower(): int(phase) for phase in Phase}
_TIMES = dict(zip(TIMES, RequestTime, strict=True))


class Steps:
    """Rows of `steps`, `step_requests` and `request_times`, filled line by line."""

    def __init__(self, names: Names) -> None:
        """`names`: where texts go."""
        self._names = names
        self._steps = {name: array("q") for name in SCHEMAS["steps"]}
        self._of = {name: array("q") for name in SCHEMAS["step_requests"]}
        self._times = {name: array("q") for name in SCHEMAS["request_times"]}
        self._unnamed = 0

    @property
    def rows(self) -> int:
        """Steps so far."""
        return len(self._steps["id"])

    def lines(self, lines: Iterable[dict[str, Any]], process: int, since_ns: int, by_ns: int) -> None:
        """The lines of one file (`runfolder.step_lines`), of those after `since_ns`, with `by_ns` added to times."""
        named: dict[int, int] = {}
        for line in lines:
            at, kind = int(line["t_ns"]), line["kind"]
            if kind == "request":
                named[int(line.get("n", -1))] = self._names.add(str(line.get("request", "")))
            elif at < since_ns:
                continue
            elif kind == "step":
                begin = min(int(line.get("begin_ns", at)), at)
                told = line.get("requests") or []
                found = [named.get(one, -1) for one in told]
                emitted = _of_each(line.get("tokens", 1), len(told), 0)
                each = _of_each(line.get("computed"), len(told), -1)
                number, phase = line.get("step"), _PHASES.get(str(line.get("phase")), 0)
                of = self._names.add(str(line.get("server") or "")), int(line.get("thread") or -1)
                self.step((begin + by_ns, at + by_ns), process, -1 if number is None else int(number), phase, of)
                self.requests(process, found, emitted, each)
            elif kind in _TIMES:
                request = named.get(int(line.get("n", -1)), -1)
                row = (at + by_ns, process, request, int(_TIMES[kind]), self._names.add(str(line.get("trace") or "")))
                if request >= 0:
                    _add(self._times, row)

    def step(self, times_ns: tuple[int, int], process: int, number: int, phase: int, of: tuple[int, int]) -> None:
        """One step; `of`: index of its server's name, and its thread."""
        _add(self._steps, (*times_ns, process, of[1], of[0], number, self.rows, phase))

    def requests(self, process: int, requests: list[int], tokens: list[int], computed: list[int]) -> None:
        """Requests (indexes of names) of the step that was added last."""
        unnamed = requests.count(-1)
        if unnamed:
            self._unnamed += unnamed
            known = [one >= 0 for one in requests]
            requests, tokens, computed = (list(compress(of, known)) for of in (requests, tokens, computed))
        many = len(requests)
        columns = ([process] * many, [self.rows - 1] * many, requests, tokens, computed)
        for column, values in zip(self._of.values(), columns, strict=True):
            column.extend(values)

    def time(self, at_ns: int, process: int, request: int, what: RequestTime) -> None:
        """A time of a request (index of its name)."""
        _add(self._times, (at_ns, process, request, int(what), 0))

    def fill(self, recording: Recording) -> None:
        """Puts the tables into the recording; one without rows is left as it is."""
        if self._steps["id"]:
            recording.tables["steps"] = sorted_table("steps", _arrays(self._steps))
            recording.tables["step_requests"] = Table("step_requests", _arrays(self._of))
        if self._times["time_ns"]:
            recording.tables["request_times"] = sorted_table("request_times", _arrays(self._times), by="time_ns")
        if self._unnamed:
            recording.notes.append(
                f"{self._unnamed:,} times a step names a request by a number that its file does not explain: left out"
            )


def _of_each(told: Any, many: int, lacking: int) -> list[int]:
    """One number for each of `many` requests, from one for all of them or a list, which may not fit them."""
    if isinstance(told, int):
        return [told] * many
    return [*(told or ()), *[lacking] * many][:many]


def _add(columns: dict[str, array[int]], row: tuple[int, ...]) -> None:
    for column, value in zip(columns.values(), row, strict=True):
        column.append(value)


def _arrays(columns: dict[str, array[int]]) -> dict[str, Array]:
    return {name: np.frombuffer(column, dtype=np.int64) for name, column in columns.items()}


def steps(recording: Recording, processes: list[Process], shifts: list[int], names: Names) -> None:
    """Steps of all processes of run folders."""
    found = Steps(names)
    for row, (one, by) in enumerate(zip(processes, shifts, strict=True)):
        for lines in one.files.steps(one.pid):
            found.lines(lines, row, one.start_ns - 60_000_000_000, by)
    found.fill(recording)


def with_steps_of_ranges(recording: Recording, pattern: str = "") -> Recording:
    """The recording, with a step for each NVTX range whose whole text a regular expression matches.

    Its named groups say what the range is: `step` its number, `phase` one of prefill, decode and mixed, `request` the
    ids of the requests in it, with commas or spaces between them. A range with `request` and no `step` is a request's
    own: it arrives where the range begins, and has ended where it ends. Every request in a step counts as having got a
    token at its end. Without a pattern: the ranges of `kvprobe.mark`, where the recording has no steps yet.

    Raises:
        UsageError: it is no regular expression, or has neither of the groups `step` and `request`.
    """
    if not pattern and recording.steps.rows:
        return recording
    compiled = _compiled(pattern or OWN_PATTERN)
    ranges = recording.ranges
    if not ranges.rows:
        return recording
    used = np.unique(ranges["name"])[:_MOST_NAMES]
    matches = {one: compiled.fullmatch(recording.text(one)[:_LONGEST]) for one in used.tolist()}
    rows = np.flatnonzero(np.isin(ranges["name"], np.array([one for one, m in matches.items() if m], dtype=np.int64)))
    if not len(rows):
        if pattern:
            recording.notes.append(f"--steps {pattern}: none of {len(used):,} different ranges is of this pattern")
        return recording
    names = Names(recording.names)
    found = Steps(names)
    columns = (ranges[name][rows].tolist() for name in ("start_ns", "end_ns", "process", "thread", "name"))
    for start, end, process, thread, name in zip(*columns, strict=True):
        match = matches[name]
        assert match is not None
        groups = match.groupdict()
        requests = [names.add(one) for one in re.split(r"[,\s]+", groups.get("request") or "") if one]
        if groups.get("step") is None:
            for request in requests:
                found.time(start, process, request, RequestTime.ARRIVED)
                found.time(end, process, request, RequestTime.ENDED)
            continue
        number = int(groups["step"]) if re.fullmatch(r"\d{1,18}", groups["step"]) else -1
        phase = _PHASES.get((groups.get("phase") or "").lower(), 0)
        found.step((start, max(start, end)), process, number, phase, (0, thread))
        found.requests(process, requests, [1] * len(requests), [-1] * len(requests))
    recording.names = names.list
    found.fill(recording)
    return recording


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        compiled = re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise UsageError(f"--steps-by {pattern}: not a regular expression ({error})") from None
    if not {"step", "request"} & set(compiled.groupindex):
        raise UsageError(
            f"--steps-by {pattern}: the pattern needs a group named step or request: write (?P<step>\\d+) or "
            "(?P<request>...)"
        )
    return compiled
