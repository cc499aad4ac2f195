"""A datagram socket of the run folder, `steps.sock`, by which a program in any language tells its steps.

One JSON object a datagram, UTF-8, at most 65,536 bytes. A step that is over:

    {"step": 7, "begin_ns": 1000, "end_ns": 2000, "phase": "decode", "requests": ["a", "b"], "tokens": [1, 1]}

`begin_ns` and `end_ns` are CLOCK_MONOTONIC (without `end_ns`: now; without `begin_ns`: the end); `phase` is `prefill`,
`decode`, `mixed`, `load`, `store` or `unknown`; `tokens` is how many it emitted for each request, a list or one number
for all (default 1); `computed`, a list, how many it computed; `server` a name. Or times of a request:

    {"request": "a", "arrived_ns": 500, "first_token_ns": 2000, "ended_ns": 9000}

`trace` beside `arrived_ns` is the `traceparent` of the server's own span of it.

The socket is `$KVPROBE_RUN/steps.sock`. Send with MSG_DONTWAIT and pass over errors: a program must not wait for its
observer. What is too large, is none of these, or comes of another user is refused, counted, and said at the end.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import struct
import threading
import time
from collections import Counter
from pathlib import Path
from types import TracebackType
from typing import Annotated

import msgspec

from kvprobe.runfolder.step_lines import LONGEST_ID, MOST_REQUESTS, StepLines

__all__ = ["LARGEST", "NAME", "StepSocket"]

NAME = "steps.sock"
LARGEST = 65_536  # bytes of a datagram
MOST_PROCESSES = 256  # that tell steps in one run
_WAIT_S = 0.2
_CREDENTIALS = struct.Struct("iii")  # pid, uid, gid
_ROOM = 1 << 20  # of the socket's buffer

log = logging.getLogger("kvprobe")

Id = Annotated[str, msgspec.Meta(max_length=LONGEST_ID)]
Ns = Annotated[int, msgspec.Meta(ge=0, le=2**61)]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**30)]
Requests = Annotated[list[Id | int], msgspec.Meta(max_length=MOST_REQUESTS)]
Counts = Annotated[list[Count], msgspec.Meta(max_length=MOST_REQUESTS)]


class _Step(msgspec.Struct):
    """A datagram: a step where it has `requests` or `step`, else times of a request."""

    step: Ns | None = None
    begin_ns: Ns | None = None
    end_ns: Ns | None = None
    phase: str = "unknown"
    requests: Requests | None = None
    tokens: Count | Counts = 1
    computed: Counts | None = None
    server: Id = ""
    request: Id | int | None = None
    arrived_ns: Ns | None = None
    first_token_ns: Ns | None = None
    ended_ns: Ns | None = None
    trace: Id = ""


class StepSocket:
    """Binds the socket and writes what comes to `told-<pid>.jsonl`, on a thread of its own, until it is closed."""

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        """`limit_bytes`: of a process's file. Where no socket can be made, it says so and does nothing."""
        self._folder, self._limit = folder, limit_bytes
        self.refused: Counter[str] = Counter()
        self.taken = 0
        self._files: dict[int, StepLines] = {}
        self._decoder: msgspec.json.Decoder[_Step] = msgspec.json.Decoder(_Step)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._socket: socket.socket | None = None

    def __enter__(self) -> StepSocket:
        made = None
        try:
            made = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
            made.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _ROOM)
            made.settimeout(_WAIT_S)
            # an address holds 107 bytes, a path may be longer: the folder's descriptor names it in few
            at = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                made.bind(f"/proc/self/fd/{at}/{NAME}")
                (self._folder / NAME).chmod(0o600)
            finally:
                os.close(at)
        except OSError as error:
            log.warning("no socket for steps in %s (%s)", self._folder, error.strerror)
            if made is not None:
                made.close()
            return self
        self._socket = made
        self._thread = threading.Thread(target=self._read, name="kvprobe-steps", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Takes what is there still, and ends."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        if self._socket is not None:
            self._socket.close()
            with contextlib.suppress(OSError):
                (self._folder / NAME).unlink()
        for one in self._files.values():
            one.close()

    def said(self) -> list[str]:
        """One line on what was refused, if anything was."""
        self.refused.update({f"could not be written ({one.dead})": 1 for one in self._files.values() if one.dead})
        if not self.refused:
            return []
        why = ", ".join(f"{count:,} {what}" for what, count in sorted(self.refused.items()))
        return [f"of what programs told of their steps at {NAME}, not everything was taken: {why}"]

    def _read(self) -> None:
        assert self._socket is not None
        while True:
            try:
                data, others, flags, _ = self._socket.recvmsg(LARGEST, socket.CMSG_SPACE(_CREDENTIALS.size))
            except TimeoutError:
                if self._stop.is_set():
                    return
                continue
            except OSError as error:
                self.refused[f"the socket failed ({error.strerror})"] += 1
                return
            sender = [_CREDENTIALS.unpack(of[: _CREDENTIALS.size]) for _, what, of in others if what == 2]
            if flags & socket.MSG_TRUNC:
                self.refused["too large"] += 1
            elif not sender or sender[0][1] != os.geteuid():
                self.refused["of another user"] += 1
            elif sender[0][0] <= 0:
                self.refused["of another pid namespace"] += 1
            else:
                self._take(sender[0][0], data)

    def _take(self, pid: int, data: bytes) -> None:
        try:
            told = self._decoder.decode(data)
        except (msgspec.MsgspecError, UnicodeError, RecursionError):
            self.refused["no such JSON"] += 1
            return
        if told.request is None and told.requests is None and told.step is None:
            self.refused["neither a step nor a request"] += 1
            return
        lines = self._files.get(pid)
        if lines is None:
            if len(self._files) >= MOST_PROCESSES:
                self.refused[f"of more than {MOST_PROCESSES} processes"] += 1
                return
            lines = self._files[pid] = StepLines(self._folder, f"told-{pid}", self._limit)
        self.taken += 1
        if told.request is not None:
            for what, at in (("arrived", told.arrived_ns), ("first token", told.first_token_ns)):
                if at is not None:
                    lines.time(told.request, what, at, told.trace)
            if told.ended_ns is not None:
                lines.time(told.request, "ended", told.ended_ns)
            return
        end = time.monotonic_ns() if told.end_ns is None else told.end_ns
        begin = end if told.begin_ns is None else min(told.begin_ns, end)
        lines.step(
            (begin, end),
            told.step,
            told.phase,
            told.requests or [],
            told.tokens,
            told.computed,
            (told.server, pid),
        )
