"""Reduces recordings of many ranks and nodes to summaries that merge in any order, over all cores or over Ray.

A summary holds sums, maxima, histograms and the longest blocked calls, so its size does not grow with the recording
and `merge` is associative and commutative: whoever finishes first is merged first.
"""

from __future__ import annotations

import heapq
import importlib
import os
import tempfile
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np

from kvprobe.errors import KvprobeError, RecordingError, UsageError
from kvprobe.recordings.buckets import BUCKETS, bucket, bucket_floor_ns
from kvprobe.recordings.model import Array, CallKind, Direction, Engine, Memory, Recording
from kvprobe.recordings.occupancy import occupancy

__all__ = ["Blocked", "Queue", "Rank", "Stat", "Summary", "percentile_ns",
           "reduce_inputs", "reduce_one"]  # fmt: skip

Progress = Callable[[str, float], None]
_TOP = 100
_VERDICTS = ("healthy", "cannot tell", "saturated")


def percentile_ns(histogram: Sequence[int] | Array, share: float) -> int:
    """The duration below which this share (0 to 1) of a histogram lies: the middle of its bucket; 0 if empty."""
    counts = np.asarray(histogram, dtype=np.int64)
    total = int(counts.sum())
    if not total:
        return 0
    index = int(np.searchsorted(np.cumsum(counts), share * total))
    index = min(index, BUCKETS - 1)
    return int(bucket_floor_ns(index) + bucket_floor_ns(index + 1)) // 2


@dataclass
class Stat:
    """Sums over calls or executions of one sort; `histogram` counts durations by bucket."""

    count: int = 0
    copies: int = 0
    bytes: int = 0
    dur_ns: int = 0
    max_ns: int = 0
    errors: int = 0
    blocked: int = 0
    blocked_ns: int = 0
    histogram: tuple[int, ...] = (0,) * BUCKETS

    def merge(self, other: Stat) -> Stat:
        """Both together."""
        return Stat(self.count + other.count, self.copies + other.copies, self.bytes + other.bytes,
                    self.dur_ns + other.dur_ns, max(self.max_ns, other.max_ns), self.errors + other.errors,
                    self.blocked + other.blocked, self.blocked_ns + other.blocked_ns,
                    tuple(a + b for a, b in zip(self.histogram, other.histogram, strict=True)))  # fmt: skip


@dataclass
class Queue:
    """One stream of one rank: the deepest it was, its ceiling (-1 none found), what it cost, and the worst verdict."""

    submissions: int = 0
    deepest: int = 0
    ceiling: int = -1
    blocked: int = 0
    blocked_ns: int = 0
    labelled_ns: int = 0
    verdict: str = "healthy"

    def merge(self, other: Queue) -> Queue:
        """Both together."""
        return Queue(self.submissions + other.submissions, max(self.deepest, other.deepest),
                     max(self.ceiling, other.ceiling), self.blocked + other.blocked, self.blocked_ns + other.blocked_ns,
                     self.labelled_ns + other.labelled_ns, _worst(self.verdict, other.verdict))  # fmt: skip


@dataclass
class Rank:
    """One process: how long it was recorded, what its threads lost, and details known to be lost."""

    recorded_ns: int = 0
    blocked_ns: int = 0
    lost_records: int = 0
    verdict: str = "healthy"

    def merge(self, other: Rank) -> Rank:
        """Both together."""
        return Rank(
            self.recorded_ns + other.recorded_ns,
            self.blocked_ns + other.blocked_ns,
            self.lost_records + other.lost_records,
            _worst(self.verdict, other.verdict),
        )


def _worst(a: str, b: str) -> str:
    return max(a, b, key=_VERDICTS.index)


@dataclass(frozen=True, order=True)
class Blocked:
    """A blocked call; ordered by time lost, then by what tells calls apart."""

    blocked_ns: int
    rank: str
    start_ns: int
    thread: int
    call: str
    stream: int
    depth: int
    bytes: int


K = TypeVar("K", bound=Hashable)
S = TypeVar("S", Stat, Queue, Rank)


class _Merging(Generic[K, S]):
    """Merges maps of things that merge."""

    @staticmethod
    def maps(a: Mapping[K, S], b: Mapping[K, S]) -> dict[K, S]:
        out = dict(a)
        for key, value in b.items():
            out[key] = out[key].merge(value) if key in out else value
        return out


@dataclass
class Summary:
    """What is kept of recordings.

    Attributes:
        inputs: how many recordings are in it.
        calls: (rank, call, kind, direction, memory) -> Stat of the host-side calls.
        executions: (rank, engine, direction, memory) -> Stat of what devices did.
        queues: (rank, device, stream handle) -> Queue.
        ranks: rank -> Rank.
        top: the calls that lost most to full queues, longest first, at most `keep`.
        keep: how many of them are kept; of two summaries the smaller number holds.
        notes: remarks of the readers and how many inputs made each.
        failed: inputs that could not be read, with the reason.
    """

    inputs: int = 0
    calls: dict[tuple[str, str, str, str, str], Stat] = field(default_factory=dict)
    executions: dict[tuple[str, str, str, str], Stat] = field(default_factory=dict)
    queues: dict[tuple[str, int, int], Queue] = field(default_factory=dict)
    ranks: dict[str, Rank] = field(default_factory=dict)
    top: list[Blocked] = field(default_factory=list)
    keep: int = _TOP
    notes: dict[str, int] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    @property
    def verdict(self) -> str:
        """The worst verdict of a queue."""
        return max((queue.verdict for queue in self.queues.values()), key=_VERDICTS.index, default="healthy")

    @property
    def blocked_ns(self) -> int:
        """Host time lost to full queues, over all ranks."""
        return sum(queue.blocked_ns for queue in self.queues.values())

    def merge(self, other: Summary) -> Summary:
        """Both together; the order of merging makes no difference."""
        keep = min(self.keep, other.keep)
        notes = dict(self.notes)
        for note, count in other.notes.items():
            notes[note] = notes.get(note, 0) + count
        failed = dict(self.failed)
        for path, reason in other.failed.items():
            failed[path] = max(failed.get(path, ""), reason)
        merging: type[_Merging[Any, Any]] = _Merging
        return Summary(self.inputs + other.inputs, merging.maps(self.calls, other.calls),
                       merging.maps(self.executions, other.executions), merging.maps(self.queues, other.queues),
                       merging.maps(self.ranks, other.ranks), heapq.nlargest(keep, [*self.top, *other.top]), keep,
                       notes, failed)  # fmt: skip

    @staticmethod
    def of(recording: Recording, name: str = "", keep: int = _TOP) -> Summary:
        """Reduces one recording; `name` tells its processes apart where they have no rank."""
        return _Reduction(recording, name, keep).summary()


class _Reduction:
    """Sums up one recording."""

    def __init__(self, recording: Recording, name: str, keep: int) -> None:
        self.recording, self.keep = recording, keep
        processes = recording.processes
        self.ranks = [self._rank(row, name) for row in range(processes.rows)] or [name or "0"]
        self.queues = occupancy(recording)

    def _rank(self, row: int, name: str) -> str:
        processes = self.recording.processes
        if processes["rank"][row] >= 0:
            return f"rank {int(processes['rank'][row])}"
        node = self.recording.text(int(processes["node"][row])) or name
        return f"{node}:{int(processes['pid'][row])}" if node else str(int(processes["pid"][row]))

    def rank(self, process: int) -> str:
        return self.ranks[process] if 0 <= process < len(self.ranks) else "unknown"

    def summary(self) -> Summary:
        recording = self.recording
        out = Summary(1, keep=self.keep, notes=dict.fromkeys(recording.notes, 1))
        for row, label in enumerate(self.ranks):
            span = 0
            if row < recording.processes.rows:
                span = int(recording.processes["end_ns"][row] - recording.processes["start_ns"][row])
            rank = Rank(max(span, 0), lost_records=recording.lost.get(row, 0))
            out.ranks[label] = out.ranks[label].merge(rank) if label in out.ranks else rank
        self.calls(out)
        self.executions(out)
        self.streams(out)
        blocked = np.flatnonzero(self.queues.blocked)
        longest = blocked[np.argsort(-self.queues.blocked_ns[blocked], kind="stable")[: self.keep]]
        out.top = sorted(map(self.blocked, longest.tolist()), reverse=True)
        return out

    def blocked(self, row: int) -> Blocked:
        calls, streams = self.recording.calls, self.recording.streams
        stream = int(calls["stream"][row])
        return Blocked(int(self.queues.blocked_ns[row]), self.rank(int(calls["process"][row])),
                       int(calls["start_ns"][row]), int(calls["thread"][row]),
                       self.recording.text(int(calls["name"][row])),
                       int(streams["handle"][stream]) if 0 <= stream < streams.rows else -1,
                       int(self.queues.depth[row]), int(calls["bytes"][row]))  # fmt: skip

    def calls(self, out: Summary) -> None:
        recording, calls, totals = self.recording, self.recording.calls, self.recording.totals
        # Totals are exact where detail was lost; a process has one or the other.
        exact = np.unique(totals["process"]) if totals.rows else np.zeros(0, np.int32)
        rows = np.flatnonzero(~np.isin(calls["process"], exact)) if len(exact) else np.arange(calls.rows)
        for key, mine in _groups(calls, rows, ("process", "name", "kind", "direction", "memory")):
            duration = calls["end_ns"][mine] - calls["start_ns"][mine]
            self._add(out, key, Stat(
                len(mine), int(calls["count"][mine].sum()), int(calls["bytes"][mine].sum()), int(duration.sum()),
                int(duration.max()), int((calls["result"][mine] != 0).sum()), int(self.queues.blocked[mine].sum()),
                int(self.queues.blocked_ns[mine].sum()), _histogram(duration)))  # fmt: skip
        histograms = recording.histograms
        for key, mine in _groups(totals, np.arange(totals.rows), ("process", "name", "kind", "direction", "memory")):
            histogram = (
                tuple(histograms[mine].sum(axis=0).tolist()) if len(histograms) == totals.rows else (0,) * BUCKETS
            )
            process, name, kind, direction, memory = key
            same = np.flatnonzero(
                (calls["process"] == process)
                & (calls["name"] == name)
                & (calls["kind"] == kind)
                & (calls["direction"] == direction)
                & (calls["memory"] == memory)
            )
            count, copies, size, total_ns, errors = (
                int(totals[column][mine].sum()) for column in ("calls", "copies", "bytes", "dur_ns", "errors")
            )
            self._add(out, key, Stat(
                count, copies, size, total_ns, int(totals["max_ns"][mine].max()), errors,
                int(self.queues.blocked[same].sum()), int(self.queues.blocked_ns[same].sum()), histogram))  # fmt: skip

    def _add(self, out: Summary, key: tuple[int, ...], stat: Stat) -> None:
        process, name, kind, direction, memory = key
        words = (self.rank(process), self.recording.text(name), _word(CallKind, kind), _word(Direction, direction),
                 _word(Memory, memory))  # fmt: skip
        out.calls[words] = out.calls[words].merge(stat) if words in out.calls else stat

    def executions(self, out: Summary) -> None:
        table = self.recording.executions
        for key, mine in _groups(table, np.arange(table.rows), ("process", "engine", "direction", "memory")):
            duration = table["end_ns"][mine] - table["start_ns"][mine]
            process, engine, direction, memory = key
            words = self.rank(process), _word(Engine, engine), _word(Direction, direction), _word(Memory, memory)
            stat = Stat(
                len(mine),
                int(table["count"][mine].sum()),
                int(table["bytes"][mine].sum()),
                int(duration.sum()),
                int(duration.max()),
                histogram=_histogram(duration),
            )
            out.executions[words] = out.executions[words].merge(stat) if words in out.executions else stat

    def streams(self, out: Summary) -> None:
        streams = self.recording.streams
        for queue in self.queues.streams:
            known = queue.stream < streams.rows
            rank = self.rank(int(streams["process"][queue.stream]) if known else 0)
            key = (
                rank,
                int(streams["device"][queue.stream]) if known else -1,
                int(streams["handle"][queue.stream]) if known else -1,
            )
            lost = int(queue.blocked_ns.sum())
            one = Queue(
                len(queue.calls),
                int(queue.depth.max(initial=0)),
                queue.ceiling,
                int(queue.blocked.sum()),
                lost,
                queue.labelled_ns,
                queue.verdict,
            )
            out.queues[key] = out.queues[key].merge(one) if key in out.queues else one
            out.ranks[rank] = out.ranks.get(rank, Rank()).merge(Rank(0, lost, 0, queue.verdict))


def _word(enum: Any, value: int) -> str:
    try:
        return str(enum(value).name).lower()
    except ValueError:
        return "unknown"


def _histogram(duration: Array) -> tuple[int, ...]:
    return tuple(np.bincount(bucket(duration), minlength=BUCKETS).tolist())


def _groups(table: Any, rows: Array, columns: Sequence[str]) -> Iterator[tuple[tuple[int, ...], Array]]:
    """Rows by equal values of the columns."""
    if not len(rows):
        return
    values = [np.asarray(table[column])[rows] for column in columns]
    order = np.lexsort(values[::-1])
    new = np.zeros(len(rows), dtype=bool)
    new[0] = True
    for value in values:
        new[1:] |= value[order][1:] != value[order][:-1]
    for part in np.split(order, np.flatnonzero(new)[1:]):
        yield tuple(int(value[part[0]]) for value in values), rows[part]


# ---- many inputs ----------------------------------------------------------------------------------------------------


def reduce_one(path: str, keep: int = _TOP) -> Summary:
    """Reads and reduces one input; one that cannot be read becomes a summary that says so."""
    from kvprobe.recordings import open_recording

    try:
        with _local(path) as local:
            return Summary.of(open_recording([local.path]), local.label, keep)
    except (KvprobeError, OSError) as error:
        return Summary(keep=keep, failed={path: str(error)})


class _local:
    """A path as a local file: what lies elsewhere (s3://, gs://, ...) is fetched with fsspec and removed afterwards."""

    def __init__(self, path: str) -> None:
        self.given = path
        self.label = Path(path.rstrip("/")).name.split(".")[0]
        self.path = Path(path)
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> _local:
        if "://" in self.given:
            fsspec = _fsspec(self.given)
            self._folder = tempfile.TemporaryDirectory(prefix="kvprobe-")
            self.path = Path(self._folder.name) / (Path(self.given.rstrip("/")).name or "input")
            try:
                system, inside = fsspec.core.url_to_fs(self.given)
                system.get(inside, str(self.path), recursive=system.isdir(inside))
            except Exception as error:  # whatever a storage's client raises
                self._folder.cleanup()
                raise RecordingError(f"{self.given}: cannot be fetched ({error})") from error
        return self

    def __exit__(self, *_: object) -> None:
        if self._folder is not None:
            self._folder.cleanup()


def _fsspec(path: str) -> Any:
    try:
        return importlib.import_module("fsspec")
    except ImportError as error:
        raise RecordingError(f"{path}: reading it takes fsspec: pip install 'kvprobe[ray]'") from error


def _expand(paths: Iterable[str | os.PathLike[str]]) -> list[str]:
    """Folders of one file per rank are their files, so that each is a task of its own."""
    from kvprobe.recordings import expand

    out: list[str] = []
    for path in paths:
        text = os.fspath(path)
        if "*" in text and "://" in text:
            system, inside = _fsspec(text).core.url_to_fs(text)
            out += [system.unstrip_protocol(name) for name in sorted(system.glob(inside))]
        elif "://" in text:
            out.append(text)
        else:
            out += [str(found.resolve()) for found in expand(Path(text))]
    return out


def reduce_inputs(
    paths: Sequence[str | os.PathLike[str]],
    ray_address: str | None = None,
    *,
    workers: int | None = None,
    keep: int = _TOP,
    progress: Progress | None = None,
) -> Summary:
    """Reduces many inputs to one summary.

    Args:
        paths: files and folders of any known format; with fsspec also URLs (`s3://bucket/run/*.json.gz`).
        ray_address: a Ray cluster ("auto", "ray://host:10001", or "local" to start one here); None uses this
            machine's cores.
        workers: processes to use without Ray; by default one a core.
        keep: how many blocked calls are kept.
        progress: called with what is being done and the fraction done.

    Raises:
        UsageError: no input, or Ray was asked for and is not installed.
        RecordingError: none of the inputs could be read.
    """
    inputs = _expand(paths)
    if not inputs:
        raise UsageError("no recording was given: name at least one file or folder")
    if ray_address is not None:
        results = _over_ray(inputs, ray_address, keep)
    else:
        count = min(workers or os.cpu_count() or 1, len(inputs))
        results = map(reduce_one, inputs, [keep] * len(inputs)) if count == 1 else _over_cores(inputs, count, keep)
    total = Summary(keep=keep)
    for done, summary in enumerate(results, 1):
        total = total.merge(summary)
        if progress is not None:
            progress("reducing recordings", done / len(inputs))
    if not total.inputs:
        path, reason = next(iter(total.failed.items()))
        raise RecordingError(
            reason if len(inputs) == 1 else f"none of {len(inputs)} inputs could be read; {path}: {reason}"
        )
    return total


def _over_cores(inputs: list[str], workers: int, keep: int) -> Iterator[Summary]:
    # Spawned, not forked: the parent may have threads (a progress bar, BLAS).
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        for future in as_completed([pool.submit(reduce_one, path, keep) for path in inputs]):
            yield future.result()


def _over_ray(inputs: list[str], address: str, keep: int) -> Iterator[Summary]:
    try:
        ray = importlib.import_module("ray")
    except ImportError as error:
        raise UsageError("reducing over Ray takes Ray: pip install 'kvprobe[ray]'") from error
    started = not ray.is_initialized()
    if started:
        ray.init(address=None if address == "local" else address, log_to_driver=False, configure_logging=False)
    try:
        task = ray.remote(num_cpus=1)(reduce_one)
        pending = [task.remote(path, keep) for path in inputs]
        while pending:
            ready, pending = ray.wait(pending, num_returns=1)
            yield ray.get(ready[0])
    finally:
        if started:
            ray.shutdown()
