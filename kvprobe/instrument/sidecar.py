"""What adapters saw and decided, as JSON lines beside the ring files: one file a process, `events-<pid>.jsonl`.

Format, for readers. One JSON object a line, UTF-8, in the order of writing. Every object has

* `t_ns`: CLOCK_MONOTONIC nanoseconds, the clock of the ring files;
* `kind`: one of
  * `"process"`: first line of a file: `pid`, `ppid`, `argv`, `rank` (of the environment, or null), `realtime_ns`;
  * `"state"`: an adapter's state changed: `adapter`, `server`, `distribution`, `version`, `state` (`applied`,
    `not needed`, `skipped`, `failed`, `waiting`, `removed`), `reason`, `targets` (list of `{target, state}`);
  * `"decision"`: auto mode switched, kept, rolled back or refused: `adapter`, `what` (`switch`, `keep`, `rollback`,
    `refuse`, `note`), `from`, `to`, `why`, and numbers under `evidence`;
  * `"transfer"`: one transfer: `adapter`, `server`, `id`, `direction` (`load`, `store`), `copies`, `submissions`
    (API calls they became), `bytes`, `policy`, `stream`, `build_ns`, `submit_ns`, `queue_ns`, `copy_ns`, `poll_ns`
    (null where it was not measured), `outstanding` (copies submitted earlier on this path and not known to be
    complete when this transfer was submitted), `thread` (kernel id), `ok`; adapters may add fields of their own;
  * `"call"`: one call of a server function that blocks or copies: `adapter`, `server`, `call`, `dur_ns`, `thread`,
    `cause` (in words), and fields of the adapter.

States and decisions are written at once; transfers and calls at most 100 ms late, so a killed process loses at most
that much. A last line that is cut (the process was killed while writing) is skipped by the reader.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

__all__ = ["Event", "emit", "flush", "listening", "read_sidecar", "subscribed", "wanted"]

Event = dict[str, Any]
Listener = Callable[[Event], None]

log = logging.getLogger("kvprobe")

_FLUSH_SECONDS = 0.1
_AT_ONCE = frozenset({"state", "decision"})
_RANKS = ("RANK", "LOCAL_RANK", "VLLM_DP_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID")


class _File:
    """The process's own file: opened when first written, appended in whole lines, given up on the first error."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.lines: list[str] = []
        self.fd: int | None = None
        self.dead = False
        self.wake = threading.Event()
        self.flusher: threading.Thread | None = None

    def write(self, event: Event, folder: str) -> None:
        line = json.dumps(event, default=str, separators=(",", ":"))
        with self.lock:
            if self.dead:
                return
            if self.fd is None and not self._open(folder):
                return
            self.lines.append(line)
            if event["kind"] in _AT_ONCE:
                self._flush()
                return
            if self.flusher is None:
                self.flusher = threading.Thread(target=self._keep_flushing, name="kvprobe-sidecar", daemon=True)
                self.flusher.start()
        self.wake.set()

    def _open(self, folder: str) -> bool:
        path = Path(folder) / f"events-{os.getpid()}.jsonl"
        try:
            self.fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except OSError as error:
            self.dead = True
            log.warning("kvprobe: cannot write %s (%s); adapters go on without a sidecar", path, error.strerror)
            return False
        self.lines.append(json.dumps(_process_event(), separators=(",", ":")))
        return True

    def _flush(self) -> None:
        if not self.lines or self.fd is None:
            return
        data = ("\n".join(self.lines) + "\n").encode()
        self.lines.clear()
        try:
            os.write(self.fd, data)
        except OSError:  # a full disk, or a server that closed every descriptor: the server goes on, we stop
            self.dead = True

    def flush(self) -> None:
        with self.lock:
            self._flush()

    def _keep_flushing(self) -> None:
        while True:
            self.wake.wait()
            time.sleep(_FLUSH_SECONDS)
            self.wake.clear()
            self.flush()


_file = _File()
_listeners: list[Listener] = []


def _process_event() -> Event:
    rank = next((os.environ[name] for name in _RANKS if name in os.environ), None)
    return {
        "t_ns": time.monotonic_ns(),
        "kind": "process",
        "pid": os.getpid(),
        "ppid": os.getppid(),
        "argv": sys.argv[:8] if hasattr(sys, "argv") else [],
        "rank": rank,
        "realtime_ns": time.time_ns(),
    }


def _after_fork() -> None:
    """A child writes a file of its own, and inherits neither the parent's unwritten lines nor its thread."""
    global _file
    _file = _File()


os.register_at_fork(after_in_child=_after_fork)


def wanted() -> bool:
    """Somebody will see an event: a run folder is set, or a listener is registered."""
    return bool(_listeners) or bool(os.environ.get("KVPROBE_RUN"))


def emit(kind: str, **fields: Any) -> None:
    """Write one event to this process's sidecar and hand it to listeners. Never raises."""
    try:
        folder = os.environ.get("KVPROBE_RUN")
        if not folder and not _listeners:
            return
        event: Event = {"t_ns": time.monotonic_ns(), "kind": kind, **fields}
        for listener in tuple(_listeners):
            listener(event)
        if folder:
            _file.write(event, folder)
    except Exception:
        log.debug("kvprobe: an event was lost", exc_info=True)


def flush() -> None:
    """Write what is buffered."""
    _file.flush()


atexit.register(flush)


def listening(listener: Listener) -> Callable[[], None]:
    """Hand every event of this process to `listener`; returns the function that stops it."""
    _listeners.append(listener)

    def stop() -> None:
        with contextlib.suppress(ValueError):
            _listeners.remove(listener)

    return stop


@contextlib.contextmanager
def subscribed() -> Iterator[list[Event]]:
    """The events of this process while the block runs, in a list that grows."""
    events: list[Event] = []
    stop = listening(events.append)
    try:
        yield events
    finally:
        stop()


def read_sidecar(path: str | os.PathLike[str]) -> list[Event]:
    """Every whole event of one sidecar file, in order; lines that are cut or are not events are left out.

    Raises:
        OSError: the file cannot be opened.
    """
    events: list[Event] = []
    with open(path, "rb") as file:  # noqa: PTH123 - a path of any kind
        for line in file:
            try:
                event = json.loads(line)
            except ValueError:
                continue
            if isinstance(event, dict) and "kind" in event and isinstance(event.get("t_ns"), int):
                events.append(event)
    return events
