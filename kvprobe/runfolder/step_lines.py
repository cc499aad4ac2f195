"""Steps and requests as lines of a run folder: what a process tells of itself, bounded, the newest kept.

`steps-<pid>.jsonl` is written by the process itself, `told-<pid>.jsonl` by the observer for a process that sent
datagrams (`kvprobe/instrument/step_socket.py`). A file that has grown to its limit becomes `steps-<pid>-before.jsonl`,
and the one that was called so goes: the newest steps are always there, in at most twice the limit.

One JSON object a line, each with `t_ns` (CLOCK_MONOTONIC) and `kind`:

* `"request"`: `n` stands for the request `request` from here on in this file;
* `"step"`: a step ended at `t_ns`; `begin_ns`, `step` (the server's number or null), `phase` (`prefill`, `decode`,
  `mixed`, `load`, `store`, `unknown`), `server`, `thread`, `requests` (numbers), `tokens` (emitted for each of them: a
  list, or one number for all), `computed` (tokens that the step computed for each, as a list or one number, or null);
* `"steps"`: several that differ in their times and numbers alone, the last of which ended at `t_ns`: `each`, a list of
  [`begin_ns`, `end_ns`, `step`], and the rest as of one step;
* `"arrived"`, `"first token"`, `"ended"`: of the request that `n` stands for; `trace`, where the server told it: its
  trace context, a `traceparent` of W3C.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from kvprobe.runfolder import files

__all__ = ["LONGEST_ID", "MOST_REQUESTS", "PHASES", "TIMES", "TRACE", "Alike", "StepLines", "limit_of", "one_by_one"]

Alike = tuple[int, int, int | None]  # begin and end in ns, and the server's number, of a step like others

PHASES = ("unknown", "prefill", "decode", "mixed", "load", "store")
TIMES = ("arrived", "first token", "ended")
TRACE = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")  # https://www.w3.org/TR/trace-context/
LONGEST_ID = 200  # characters of a request's id; the rest is cut
MOST_REQUESTS = 8192  # of one step; more are left out
_MOST_NUMBERED = 100_000
_MOST_ALIKE = 1000  # steps of a line
_LIMIT_BYTES, _TOTALS_BYTES = 64 << 20, 4 << 20  # of a file; of a run that keeps totals only, which may last for months


def limit_of(totals: bool, max_bytes: int) -> int:
    """Bytes of a process's file; `max_bytes`: of the whole run, 0 for any number."""
    limit = _TOTALS_BYTES if totals else _LIMIT_BYTES
    return min(limit, max_bytes // 16) if max_bytes else limit


def one_by_one(line: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A line of the file as lines of one step each; one that is of no step as it is."""
    if line.get("kind") != "steps":
        yield line
        return
    for begin_ns, end_ns, step in line.get("each") or ():
        yield {**line, "kind": "step", "t_ns": end_ns, "begin_ns": begin_ns, "step": step}


_encode = json.JSONEncoder(separators=(",", ":")).encode
_quoted = lru_cache(64)(_encode)  # names of servers


def _json(of: int | None) -> str:
    return "null" if of is None else str(int(of))


def _each(of: int | Sequence[int] | None, many: int) -> str:
    """One number where it is the same for every request: most steps, which decode, are told in a third of the bytes."""
    if of is None or isinstance(of, int):
        return _json(of)
    each = of if len(of) <= MOST_REQUESTS else of[:MOST_REQUESTS]
    if each and each.count(each[0]) == len(each) == many:
        return _json(each[0])
    return _encode(list(each))


class StepLines:
    """The file of one process: opened when first written, whole lines, given up on the first error."""

    def __init__(self, folder: str | os.PathLike[str], name: str, limit_bytes: int, held_bytes: int = 0) -> None:
        """`name`: of the file, without its ending; so many bytes wait for `write`, by default none."""
        self._path = Path(folder) / f"{name}.jsonl"
        self._before = Path(folder) / f"{name}-before.jsonl"
        self._limit, self._bytes = limit_bytes, 0
        self._most_held = held_bytes
        self._held: list[str] = []
        self._held_bytes = 0
        self._fd: int | None = None
        self.dead = ""  # why it is given up
        self._numbers: dict[str, int] = {}
        self._next = 0
        self._listed: tuple[tuple[Any, ...], str] = (), "[]"  # the requests of the step before, and their numbers

    def step(
        self,
        times_ns: tuple[int, int],
        step: int | None,
        phase: str,
        requests: Sequence[Any],
        tokens: int | Sequence[int],
        computed: int | Sequence[int] | None = None,
        of: tuple[str, int] = ("", -1),
    ) -> None:
        """One step, from and to `times_ns`; `of`: its server and its thread."""
        same = self._same(phase, requests, tokens, computed, of, times_ns[1])
        self._put(  # an encoder takes five times as long
            f'{{"t_ns":{_json(times_ns[1])},"kind":"step","begin_ns":{_json(times_ns[0])},"step":{_json(step)},{same}'
        )

    def alike(
        self,
        each: Sequence[Alike],
        phase: str,
        requests: Sequence[Any],
        tokens: int | Sequence[int],
        computed: int | Sequence[int] | None,
        of: tuple[str, int],
    ) -> None:
        """Several steps that differ in no more than `each` says; the rest as in `step`."""
        for at in range(0, len(each), _MOST_ALIKE):
            told = each[at : at + _MOST_ALIKE]
            same = self._same(phase, requests, tokens, computed, of, told[-1][1])
            listed = ",".join([f"[{_json(begin)},{_json(end)},{_json(step)}]" for begin, end, step in told])
            self._put(f'{{"t_ns":{_json(told[-1][1])},"kind":"steps","each":[{listed}],{same}')

    def _same(
        self,
        phase: str,
        requests: Sequence[Any],
        tokens: int | Sequence[int],
        computed: int | Sequence[int] | None,
        of: tuple[str, int],
        at_ns: int,
    ) -> str:
        """What a line says of a step but for its times and its number; names requests that are new before."""
        names = tuple(requests)
        many = min(len(names), MOST_REQUESTS)
        if names != self._listed[0]:
            listed = names[:MOST_REQUESTS]
            numbers = [*map(self._numbers.get, listed)]
            if None in numbers:
                numbers = [self._number(str(one), at_ns) for one in listed]
            self._listed = names, _encode(numbers)
        return (
            f'"phase":"{phase if phase in PHASES else PHASES[0]}","server":{_quoted(of[0])},"thread":{_json(of[1])},'
            f'"tokens":{_each(tokens, many)},"computed":{_each(computed, many)},"requests":{self._listed[1]}}}'
        )

    def time(self, request: Any, what: str, at_ns: int, trace: str = "") -> None:
        """A time of a request: `what` of TIMES; `trace`: its traceparent, passed over where it is none."""
        line = {"t_ns": at_ns, "kind": what, "n": self._number(str(request), at_ns)}
        self._put(_encode({**line, "trace": trace} if TRACE.fullmatch(trace) else line))
        if what == "ended":
            self._numbers.pop(str(request)[:LONGEST_ID], None)
            self._listed = (), "[]"

    def _number(self, request: str, at_ns: int) -> int:
        request = request[:LONGEST_ID]
        number = self._numbers.get(request)
        if number is None:
            if len(self._numbers) >= _MOST_NUMBERED:  # requests that nobody ended
                self._forget()
            number = self._numbers[request] = self._next
            self._next += 1
            self._hold(_encode({"t_ns": at_ns, "kind": "request", "n": number, "request": request}))
        return number

    def _forget(self) -> None:
        self._numbers.clear()
        self._listed = (), "[]"

    def _hold(self, line: str) -> None:
        self._held.append(line)
        self._held_bytes += len(line) + 1

    def _put(self, line: str) -> None:
        self._hold(line)
        if self._held_bytes > self._most_held or self._bytes + self._held_bytes >= self._limit:
            self.write()

    def write(self) -> None:
        """Puts into the file what is held."""
        held, self._held, self._held_bytes = self._held, [], 0
        data = "".join(f"{line}\n" for line in held).encode(errors="replace")
        if self.dead or not data:
            return
        try:
            if self._fd is None:
                self._fd = files.open_append(self._path)
                self._bytes = os.fstat(self._fd).st_size
            self._bytes += os.write(self._fd, data)
            if self._bytes >= self._limit:
                os.close(self._fd)
                self._fd = None
                self._path.replace(self._before)
                self._forget()  # each file names its requests itself
        except OSError as error:  # a full disk, or a server that closed every descriptor: it goes on, we stop
            self.dead = error.strerror or str(error)

    def close(self) -> None:
        """Whoever writes afterwards opens it again."""
        self.write()
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
