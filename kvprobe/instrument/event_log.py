"""What adapters saw and decided, as JSON lines beside the ring files: one file a process, `events-<pid>.jsonl`.

The interposer adds its own decisions, as adapter `kvprobe.staging` (`native/interpose/decisions.c`).

Format, for readers. One JSON object a line, UTF-8, in the order of writing, which is not quite that
of `t_ns`. Every object has

* `t_ns`: CLOCK_MONOTONIC nanoseconds, the clock of the ring files; of transfers and calls their end;
* `kind`: one of
  * `"process"`: first line of the adapters: `pid`, `ppid`, `argv`, `rank` (of the environment, or null), `realtime_ns`;
  * `"state"`: an adapter's state changed: `adapter`, `server`, `distribution`, `version`, `state` (`applied`,
    `not needed`, `skipped`, `failed`, `waiting`, `removed`), `reason`, `targets` (list of `{target, state}`);
  * `"decision"`: auto mode switched, kept, rolled back or refused: `adapter`, `what` (`switch`, `keep`, `rollback`,
    `refuse`, `note`), `from`, `to`, `why`, and numbers under `evidence`;
  * `"transfer"`: one transfer: `adapter`, `server`, `id`, `direction` (`load`, `store`), `copies`, `submissions`
    (API calls they became), `bytes`, `policy`, `stream`, `build_ns`, `submit_ns`, `queue_ns`, `copy_ns`, `poll_ns`
    (null where it was not measured), `outstanding` (copies submitted earlier on this path and not known to be
    complete when this transfer was submitted), `thread` (kernel id), `ok`; `one_in` where auto mode rests and watches
    only one transfer in so many: a sum over transfers counts this one so often; `methods` and `descriptors` (copies
    that were left when neighbours were merged) where kvprobe's submitter had it; adapters may add fields of their own;
  * `"call"`: one call of a server function that blocks or copies: `adapter`, `server`, `call`, `dur_ns`, `thread`,
    `cause` (in words), and fields of the adapter; `phase` where a model's memory goes to the CPU or comes back in it,
    in the server's own words ("sleep, level 1: weights");
  * `"offload"`: what an offload has brought since its process began, as sums: `adapter`, `server`, `source` (the
    server's name of it), and the fields of `benefit.BenefitTotals.sums`, null where the server does not show it;
    `prefill_ns_per_token` (null: no steps, or too few), `held_unread_blocks`;
  * `"blocks"`: uses of a sample of the blocks of one offload since the last such event: `adapter`, `server`, `source`,
    `threshold` (blocks whose id's upper 24 of 48 bits lie below it are followed), `counts` (of all blocks since the
    process began, by `reuse.sample.WORDS`), `blocks` (that the pool holds), `block_bytes` (null: unknown), `notes`: a
    list of [time in ns, id, what].

States and decisions are written at once; transfers and calls at most 250 ms late, as are steps, so a killed process
loses at most that much. A last line that is cut (the process was killed while writing) is skipped by the reader.
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
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from kvprobe.environment import DETAIL, RUN
from kvprobe.runfolder import watched
from kvprobe.runfolder.secrets import redact

__all__ = [
    "Event",
    "at_flush",
    "emit",
    "flush",
    "has_listeners",
    "later",
    "listening",
    "read_events",
    "subscribed",
    "wanted",
]

Event = dict[str, Any]
Listener = Callable[[Event], None]

log = logging.getLogger("kvprobe")

_FLUSH_SECONDS = 0.25
_LOOKS = 8  # at nothing, before the flusher must be woken: that costs the server's thread
_HOLD_NS = 100_000  # of the GIL: to let go of it takes 10 µs where another thread waits
_MAX_LATER = 100_000  # a process whose writer starves loses events instead of memory
_TOTALS_BYTES = 8 << 20  # of a run that keeps totals only: it may last for months
_AT_ONCE = frozenset({"state", "decision"})
_RANKS = ("RANK", "LOCAL_RANK", "VLLM_DP_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID")


class _File:
    """The process's own file: opened when first written, appended in whole lines, given up on the first error.

    What the hot path leaves (`later`) is a function and its arguments; a thread of its own makes events and lines.
    """

    def __init__(self) -> None:
        # Both to be taken again: a signal's handler may flush, too.
        self.lock = threading.RLock()
        # Of whoever flushes. Else one that finds nothing left returns, and the process ends, while another still makes
        # what it took.
        self.flushing = threading.RLock()
        self.later: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque(maxlen=_MAX_LATER)
        self.events: list[Event] = []
        self.fd: int | None = None
        self.dead = False
        self.bytes = 0
        self.full = False  # transfers and calls are written no more
        self.awake = False  # the flusher will look at everything that was left before this turns False
        self.wake = threading.Event()
        self.flusher: threading.Thread | None = None

    def write(self, event: Event, folder: str) -> None:
        with self.lock:
            if self.dead or (self.fd is None and not self._open(folder)):
                return
            if event["kind"] in _AT_ONCE:
                self._append([event])
                return
            if self.full:
                return
            self.events.append(event)
        if not self.awake:
            self.wake_writer()

    def wake_writer(self) -> None:
        """Let the flusher run within 250 ms."""
        with self.lock:
            if self.flusher is None:
                self.flusher = threading.Thread(target=self._keep_flushing, name="kvprobe-events", daemon=True)
                self.flusher.start()
        self.awake = True
        self.wake.set()

    def _open(self, folder: str) -> bool:
        try:
            self.fd = watched.open_events(folder)
        except OSError as error:
            self.dead = True
            path = watched.events_path(folder)
            log.warning("kvprobe: cannot write %s (%s); adapters continue without writing events", path, error.strerror)
            return False
        self._append([_process_event()])
        return True

    def _append(self, events: list[Event]) -> None:
        if not events or self.fd is None:
            return
        lines = [json.dumps(event, default=str, separators=(",", ":")) for event in events]
        data = ("\n".join(lines) + "\n").encode()
        self.bytes += len(data)
        try:
            os.write(self.fd, data)
            if self.bytes >= _TOTALS_BYTES and not self.full and DETAIL.value() == "totals":
                self.full = True
                os.write(self.fd, json.dumps(_full_event(), separators=(",", ":")).encode() + b"\n")
        except OSError:  # a full disk, or a server that closed every descriptor: the server goes on, we stop
            self.dead = True

    def flush(self) -> None:
        with self.flushing:
            since_ns = time.monotonic_ns()
            for _ in range(len(self.later)):
                try:
                    function, arguments = self.later.popleft()
                except IndexError:  # a signal's handler flushed meanwhile
                    break
                try:
                    function(*arguments)
                except Exception:
                    log.debug("kvprobe: an event was lost", exc_info=True)
                if time.monotonic_ns() - since_ns > _HOLD_NS:
                    time.sleep(0)  # let go of the GIL: a server's thread may be about to submit
                    since_ns = time.monotonic_ns()
            for each in _at_flush:
                each()
            with self.lock:
                events, self.events = self.events, []
                self._append(events)

    def _keep_flushing(self) -> None:
        while True:
            self.wake.wait()
            looks = 0
            while looks < _LOOKS:
                time.sleep(_FLUSH_SECONDS)
                looks = 0 if self.later or self.events else looks + 1
                self.flush()
            self.wake.clear()  # in this order: who leaves something before the next line is seen by this flush
            self.awake = False
            self.flush()


def _full_event() -> Event:
    why = f"a process of a run with --detail totals writes {_TOTALS_BYTES >> 20} MiB of events; its metrics continue"
    return {"t_ns": time.monotonic_ns(), "kind": "decision", "adapter": "kvprobe", "what": "note", "why": why}


_at_flush: list[Callable[[], None]] = []
_file = _File()
_listeners: list[Listener] = []  # of every kind of event
_listeners_of: dict[str, list[Listener]] = {}  # of one kind


def _process_event() -> Event:
    rank = next((os.environ[name] for name in _RANKS if name in os.environ), None)
    return {
        "t_ns": time.monotonic_ns(),
        "kind": "process",
        "pid": os.getpid(),
        "ppid": os.getppid(),
        "argv": redact(sys.argv[:8]) if hasattr(sys, "argv") else [],
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
    return bool(_listeners) or bool(RUN.text)


def has_listeners() -> bool:
    """Somebody in this process listens to every kind of event: they are to be made at once, not `later`."""
    return bool(_listeners)


def later(function: Callable[..., None], *arguments: Any) -> None:
    """Call `function(*arguments)` within some 250 ms on kvprobe's own thread, or in the next `flush`.

    It is for hot paths: this costs one append, making an event and its JSON some 15 µs. An exception of `function`
    is logged at debug level and dropped.
    """
    _file.later.append((function, arguments))
    if not _file.awake:
        _file.wake_writer()


def at_flush(write: Callable[[], None]) -> None:
    """Call `write`, which must not raise, behind what was left for `later`: many lines are written in one go."""
    _at_flush.append(write)


def emit(kind: str, **fields: Any) -> None:
    """Write one event to this process's event file and hand it to listeners. Never raises.

    `t_ns` among the fields is the time of the event; without it: now.
    """
    try:
        folder = RUN.text
        listeners = [*_listeners, *_listeners_of.get(kind, ())]
        if not folder and not listeners:
            return
        event: Event = {"t_ns": time.monotonic_ns(), "kind": kind, **fields}
        for listener in listeners:
            listener(event)
        if folder:
            _file.write(event, folder)
    except Exception:
        log.debug("kvprobe: an event was lost", exc_info=True)


def flush() -> None:
    """Write what is buffered."""
    _file.flush()


atexit.register(flush)


def listening(listener: Listener, kinds: tuple[str, ...] = ()) -> Callable[[], None]:
    """Hand events of this process (those of `kinds`, or all) to `listener`; returns the function that stops it."""
    places = [_listeners_of.setdefault(kind, []) for kind in kinds] or [_listeners]
    for place in places:
        place.append(listener)

    def stop() -> None:
        for place in places:
            with contextlib.suppress(ValueError):
                place.remove(listener)

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


def read_events(path: str | os.PathLike[str]) -> list[Event]:
    """Every whole event of one event file, in order; lines that are cut or are not events are left out.

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
