"""The one model of a recording: columns that every reader fills and everything later reads.

A recording is a handful of tables; a table is a set of numpy arrays of one length. Times are integer nanoseconds on
one clock per recording (`start_ns` of the recording is its zero; readers subtract nothing, they only say it). Text
is interned: a column of type "name" holds indexes into `Recording.names`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvprobe.errors import UsageError
from kvprobe.recordings.kinds import (
    SUBMITTING,
    CallKind,
    Direction,
    Engine,
    Label,
    Memory,
    Phase,
    RangeStyle,
    RequestTime,
)

if TYPE_CHECKING:
    import pyarrow

    from kvprobe.recordings.links import Links
    from kvprobe.recordings.serving import ServingWindow

Array = npt.NDArray[Any]

__all__ = [
    "SCHEMAS",
    "SUBMITTING",
    "CallKind",
    "Direction",
    "Engine",
    "Label",
    "Memory",
    "Phase",
    "RangeStyle",
    "Recording",
    "RequestTime",
    "Source",
    "Table",
]


# table -> column -> numpy type. "name" is int32 into Recording.names. -1 means unknown unless said otherwise.
SCHEMAS: dict[str, dict[str, str]] = {
    # Host-side calls, of every kind. Submissions, waits and allocations are selections by `kind`.
    "calls": {
        "start_ns": "int64",
        "end_ns": "int64",
        "process": "int32",  # row of `processes`
        "thread": "int64",  # OS thread id
        "name": "name",  # the call, as the recorder's own tables print it
        "kind": "uint8",  # CallKind
        "stream": "int32",  # row of `streams`; -1 unknown or none
        "direction": "uint8",  # Direction
        "memory": "uint8",  # Memory of the host side
        "bytes": "int64",  # payload; of an allocation: size; 0 none or unknown
        "count": "int32",  # copies in the call; 0 none, or unknown of a batch
        "correlation": "int64",  # joins with executions within one process; -1 none
        "transfer": "int64",  # joins with transfers; -1 none
        "src": "uint64",
        "dst": "uint64",  # addresses, 0 unknown; of a wait for an event, and of its record, src is the event
        "launches": "int64",  # of a launch and a wait: launches that its thread has made so far; -1 unknown
        "result": "int32",  # return code
    },
    # What the device did.
    "executions": {
        "start_ns": "int64",
        "end_ns": "int64",
        "process": "int32",
        "device": "int32",
        "stream": "int32",
        "channel": "int32",  # hardware channel where the recorder knows it
        "engine": "uint8",
        "direction": "uint8",
        "memory": "uint8",
        "bytes": "int64",
        "count": "int32",
        "correlation": "int64",
        "graph": "int64",  # graph node or launch id; -1 not from a graph
        "name": "name",
    },
    # What a stream was busy with, as timing events in it say: runs of submissions of one kind, without a profiler.
    "spans": {
        "start_ns": "int64",
        "end_ns": "int64",
        "process": "int32",
        "device": "int32",
        "stream": "int32",
        "engine": "uint8",
        "direction": "uint8",
        "bytes": "int64",
        "count": "int32",  # submissions in it
        "graph": "int64",  # row of `graphs`' id; -1 not a graph
        "error_ns": "int64",  # so much may be of another kind, as its length was computed (`mixed_runs`); 0 measured
    },
    # Intervals in which `spans` are complete, and others with the reason why they are not; "" where they are.
    "coverage": {
        "start_ns": "int64",
        "end_ns": "int64",
        "process": "int32",
        "device": "int32",
        "reason": "name",
        "stopped": "uint8",  # 1: nothing was marked there; 2: as it would have cost too much
    },
    # Timing events that ended a span: how far their stream's queue had been filled and emptied.
    "marks": {
        "given_ns": "int64",  # when the call that recorded it was entered
        "begun_ns": "int64",  # from here to `done_ns` the device worked off the submissions before it
        "done_ns": "int64",
        "process": "int32",
        "stream": "int32",
        "slots": "int64",  # that the stream had been given, with it, by a count of its own
        "count": "int32",  # of these, submissions since the mark before
    },
    # What CUDA graphs hold, read when they were instantiated.
    "graphs": {
        "process": "int32",
        "graph": "int64",
        "kernels": "int64",
        "copies": "int64",
        "copy_bytes_h2d": "int64",
        "copy_bytes_d2h": "int64",
        "memsets": "int64",
        "host_nodes": "int64",
        "several_streams": "int64",  # 1: copies may run beside kernels
        "launches": "int64",
    },
    # What lay in host memory when a sampled copy was submitted: the source of one to the device, the place where one
    # from the device will go. Equal hashes of one place at two times: equal bytes, as far as was looked.
    "contents": {
        "time_ns": "int64",  # when the copy's call began
        "process": "int32",
        "thread": "int64",
        "stream": "int32",
        "direction": "uint8",
        "src": "uint64",
        "dst": "uint64",
        "bytes": "int64",  # of the copy
        "looked": "int64",  # bytes of them
        "hash": "uint64",
        "blank": "uint8",  # 1: one word over and over, as in memory that nobody has filled
    },
    # What the device had where a load was about to go, of a sample of loads that brought equal bytes before.
    "destinations": {
        "time_ns": "int64",  # when the load's call began
        "process": "int32",
        "dst": "uint64",
        "looked": "int64",  # bytes; 0: no more such looks, because a call of the driver failed
        "same": "uint8",  # 1: they were those that the host sent
        "error": "int64",  # the driver's, where `looked` is 0
    },
    # What the byte witness counted, a row a process; kvprobe/runfolder/folder.py:Witness says what each is.
    "witness": {
        "process": "int32",
        "closed": "uint8",
        "level": "int64",
        "loads": "int64",
        "stores": "int64",
        "pageable": "int64",
        "shapes": "int64",
        "captured": "int64",
        "small": "int64",
        "unchosen": "int64",
        "budget": "int64",
        "crowded": "int64",
        "elsewhere": "int64",
        "unreadable": "int64",
        "summed": "int64",
        "unfinished": "int64",
        "crossed": "int64",
        "unstored": "int64",
        "early": "int64",
        "compared": "int64",
        "compared_pages": "int64",
        "changed": "int64",
        "watched": "int64",
        "past": "int64",
        "overwritten": "int64",
        "untold": "int64",
        "spent_ns": "int64",
        "helper_ns": "int64",
        "lag_ns": "int64",
    },
    # Allocations whose bytes it compared. address 0: all that it could not tell apart.
    "witness_homes": {
        "process": "int32",
        "address": "uint64",
        "bytes": "int64",  # 0 unknown
        "compared": "int64",  # loads
        "changed": "int64",  # of these
    },
    # Loads of bytes that were others than before, as it found them.
    "mismatches": {
        "start_ns": "int64",  # when the store's call began; that of the load where no store is known
        "time_ns": "int64",  # when the load's call began
        "end_ns": "int64",  # when it was found
        "process": "int32",
        "thread": "int64",
        "name": "name",  # of the load's call
        "kind": "name",  # "changed" since the store, "overwritten" while the load was under way
        "handle": "uint64",  # of the load's stream
        "address": "uint64",  # of the host's side
        "device_address": "uint64",
        "bytes": "int64",
        "pages": "int64",  # that were looked at
        "changed": "int64",  # of these
        "first": "uint64",  # address of the first that changed, and of the last
        "last": "uint64",
        "home": "uint64",  # the allocation; 0 unknown
        "home_bytes": "int64",
        "stored": "uint8",  # 1: the store is known, which these describe
        "summed_after_ns": "int64",  # start_ns: its bytes were summed so long after
        "store_name": "name",
        "store_thread": "int64",
        "store_handle": "uint64",
        "store_address": "uint64",
        "store_device": "uint64",
        "store_bytes": "int64",
    },
    # Page faults of the calling thread in calls that pinned or copied and took a millisecond; of no other calls.
    "page_faults": {
        "time_ns": "int64",  # when the call began
        "process": "int32",
        "thread": "int64",
        "minor": "int64",  # pages that were made, or found in memory
        "major": "int64",  # that were read from a disk
        "nodes": "int64",  # a bit for each NUMA node that some of the host's pages lie on, bit 15: others; 0: not known
    },
    # NVTX ranges, profiler annotations, framework operators.
    "ranges": {
        "start_ns": "int64",
        "end_ns": "int64",
        "process": "int32",
        "thread": "int64",
        "domain": "name",
        "name": "name",
        "style": "uint8",
    },  # RangeStyle
    # What the recorder itself said about intervals.
    "labels": {
        "start_ns": "int64",
        "end_ns": "int64",
        "process": "int32",
        "thread": "int64",
        "label": "uint8",
        "name": "name",
        "correlation": "int64",
        "channel": "int32",
    },
    # Whole transfers of an engine or a server, with their split; *_ns are durations, -1 unknown.
    "transfers": {
        "start_ns": "int64",
        "end_ns": "int64",
        "process": "int32",
        "thread": "int64",
        "stream": "int32",
        "direction": "uint8",
        "bytes": "int64",
        "count": "int32",
        "transfer": "int64",
        "build_ns": "int64",
        "submit_ns": "int64",
        "wait_ns": "int64",
        "copy_ns": "int64",
        "poll_ns": "int64",
        "ok": "uint8",
        "one_in": "int64",  # transfers that this one was picked from: a sum over transfers counts it so often
    },
    # What kvprobe's submitters made of the copies that they were given: sums by stream and direction.
    "submitters": {
        "process": "int32",
        "stream": "int32",  # -1: several, which cannot be told apart
        "server": "name",  # "" for an engine of the process's own
        "direction": "uint8",
        "transfers": "int64",
        "copies": "int64",  # asked for
        "descriptors": "int64",  # submitted: neighbours merged, large ones cut; -1 where not all of them are over
        "calls": "int64",
        "bytes": "int64",
        "dur_ns": "int64",  # in these calls, on whichever thread made them
    },
    # Calls of a server's own functions that move data, as adapters saw them.
    "server_calls": {
        "start_ns": "int64",
        "end_ns": "int64",
        "process": "int32",
        "thread": "int64",
        "server": "name",
        "name": "name",
        "direction": "uint8",
        "bytes": "int64",
        "count": "int64",  # copies in the call; 0 none or unknown
        "pageable": "int64",  # of these, from or to pageable memory
        "blocking": "int64",  # of these, blocking by the way they were asked for
        "reason": "name",  # why the call holds its thread, in the adapter's words
        "inside": "uint8",  # runs inside another call of this table
        "phase": "name",  # of a model's sleep or wake, as the server calls it; "" for any other call
    },
    # Where a process read and wrote below CPU memory, with exact sums of operations of 16 KiB and more.
    "tiers": {
        "process": "int32",
        "place": "int32",  # number in `tier_operations`, within the process
        "kind": "name",  # "file" (a folder of them), "disk", "pipe", "socket", "unix socket", "device", ...; "" untold
        "path": "name",  # of files and devices
        "filesystem": "name",
        "direct": "uint8",  # 1: the page cache is bypassed
        "port": "int32",  # of a socket's peer; 0 unknown
        "here": "uint8",  # 1: the peer is on this machine
        "reads": "int64",
        "read_bytes": "int64",
        "read_ns": "int64",  # sum of the time inside them
        "writes": "int64",
        "write_bytes": "int64",
        "write_ns": "int64",
    },
    # Single reads and writes of these places.
    "tier_operations": {
        "start_ns": "int64",
        "end_ns": "int64",
        "process": "int32",
        "thread": "int64",
        "name": "name",  # of the function
        "place": "int32",
        "writes": "uint8",  # 1 a write, 0 a read
        "bytes": "int64",
        "count": "int32",  # pieces of memory
        "address": "uint64",  # of the first piece; 0 unknown
        "offset": "int64",  # in the file; -1 unknown
        "unended": "uint8",  # 1: end_ns is the end of its submission, when it ended is not known
    },
    # Steps of a server, as it told them itself; -1 in `step` where it counts none.
    "steps": {
        "start_ns": "int64",
        "end_ns": "int64",
        "process": "int32",
        "thread": "int64",
        "server": "name",
        "step": "int64",  # the server's own number
        "id": "int64",  # joins with step_requests within one process
        "phase": "uint8",  # Phase
    },
    # Which requests were in each.
    "step_requests": {
        "process": "int32",
        "id": "int64",
        "request": "name",
        "tokens": "int32",  # that the step emitted for it
        "computed": "int64",  # tokens that the step computed for it, bytes of a load or store; -1 unknown
    },
    # Times of requests, where the server told them.
    "request_times": {
        "time_ns": "int64",
        "process": "int32",
        "request": "name",
        "what": "uint8",  # RequestTime
        "trace": "name",  # the traceparent of the server's own span of it, "" not told
    },
    # What offloads brought, as the servers' schedulers saw it: sums since the process began; -1 was not seen.
    "offload": {
        "time_ns": "int64",
        "process": "int32",
        "server": "name",
        "source": "name",  # the server's own name: a connector, a cache
        "requests": "int64",
        "prompt_tokens": "int64",
        "gpu_hit_tokens": "int64",
        "hit_tokens": "int64",
        "stored_blocks": "int64",
        "stored_bytes": "int64",
        "loaded_blocks": "int64",
        "loaded_bytes": "int64",
        "unread_blocks": "int64",  # evicted or overwritten before anybody loaded them
        "unread_bytes": "int64",
        "held_unread_blocks": "int64",
        "waits": "int64",
        "waited_ns": "int64",
        "prefill_ns_per_token": "float64",
    },
    # Uses of a sample of the blocks of pools in CPU memory: of these every use, of the others none.
    "block_uses": {
        "time_ns": "int64",
        "process": "int32",
        "server": "name",
        "source": "name",  # the server's own name of the pool
        "block": "uint64",  # stands for a block; equal within one pool means the same block
        "what": "uint8",  # as kvprobe/reuse/sample.py:WORDS
    },
    # The pools that `block_uses` are of, and how often what happened to all of their blocks.
    "block_pools": {
        "time_ns": "int64",
        "process": "int32",
        "server": "name",
        "source": "name",
        "followed": "float64",  # share of the blocks whose uses are there
        "loaded": "int64",
        "stored": "int64",
        "blocks": "int64",  # that the pool holds; -1 unknown
        "block_bytes": "int64",  # -1 unknown
    },
    # Sampled values: device counters, occupancy estimates, step times.
    "samples": {"time_ns": "int64", "process": "int32", "device": "int32", "metric": "name", "value": "float64"},
    # Python stacks taken while a call was blocked; `stack` is one name, frames joined by "\n", innermost first.
    "stacks": {
        "time_ns": "int64",
        "process": "int32",
        "thread": "int64",
        "blocked_ns": "int64",
        "gil": "uint8",
        "stack": "name",
    },
    # Python stacks of threads that make calls, taken now and then whatever they did; `stack` as in `stacks`.
    "stack_samples": {
        "time_ns": "int64",  # half a millisecond after the stack was so, at most
        "process": "int32",
        "thread": "int64",
        "stack": "name",
    },
    # Calls of Python functions that a profiler followed, those of a thread nested in one another; a name is as a frame
    # of `stacks`, but for the line: that is where the function begins.
    "python_functions": {
        "start_ns": "int64",
        "end_ns": "int64",
        "process": "int32",
        "thread": "int64",
        "name": "name",
    },
    # Spans in which a thread with slow calls waited for a CPU, and had one, of each span's length.
    "cpu_waits": {
        "start_ns": "int64",
        "end_ns": "int64",
        "process": "int32",
        "thread": "int64",
        "waited_ns": "int64",
        "ran_ns": "int64",
        "throttled_ns": "int64",  # the process's control group had used up its quota of CPU
    },
    # Pauses of a thread between two CUDA calls, and what CPU time was used in them; in older recordings there are none.
    "pauses": {
        "start_ns": "int64",
        "end_ns": "int64",
        "process": "int32",
        "thread": "int64",
        "thread_ns": "int64",  # CPU time of the thread, in the pause and `more_ns` before it
        "process_ns": "int64",  # of its whole process, likewise
        "more_ns": "int64",
        "gave_up": "int64",  # how often the thread gave up its CPU, likewise; 0: it never slept
    },
    # Functions of the operating system in which a thread was for a millisecond and more: it slept, for all but a few.
    # `kvprobe run` knows those alone in which a thread waited for somebody outside to ask for something.
    "os_calls": {
        "start_ns": "int64",
        "end_ns": "int64",
        "process": "int32",
        "thread": "int64",
        "name": "name",
    },
    # What a controller or adapter did or said: policy switches, states, errors.
    "decisions": {"time_ns": "int64", "process": "int32", "what": "name", "reason": "name", "gain": "float64"},
    # Exact totals that survive where detail was lost; histogram columns are in `Recording.histograms`.
    "totals": {
        "process": "int32",
        "thread": "int64",
        "stream": "int32",
        "name": "name",
        "kind": "uint8",
        "direction": "uint8",
        "memory": "uint8",
        "calls": "int64",
        "copies": "int64",
        "bytes": "int64",
        "dur_ns": "int64",
        "max_ns": "int64",
        "errors": "int64",
    },
    "streams": {
        "process": "int32",
        "device": "int32",
        "handle": "int64",
        "priority": "int32",
        "channel": "int32",
        "name": "name",
    },
    "processes": {
        "pid": "int64",
        "rank": "int32",
        "node": "name",
        "name": "name",
        "command": "name",
        "start_ns": "int64",
        "end_ns": "int64",
        "state": "name",
    },
    "threads": {"process": "int32", "thread": "int64", "name": "name"},
}


class Table(Mapping[str, Array]):
    """Columns of one length, by name; an immutable view, its arrays may be shared or broadcast: copy before writing."""

    __slots__ = ("columns", "kind")

    def __init__(self, kind: str, columns: Mapping[str, npt.ArrayLike] | None = None) -> None:
        """Fills absent columns with the schema's default (-1 for ids, 0 for the rest) and fixes types.

        A column is an array or a list of numbers; all have one length. A dict of columns that is made beforehand needs
        the annotation `dict[str, npt.ArrayLike]`.
        """
        schema = SCHEMAS[kind]
        given = {name: np.asarray(column) for name, column in (columns or {}).items()}
        unknown = set(given) - set(schema)
        if unknown:
            raise KeyError(f"{kind} has no column {sorted(unknown)}")
        length = len(next(iter(given.values()))) if given else 0
        self.kind = kind
        self.columns: dict[str, Array] = {}
        for name, dtype in schema.items():
            dtype = "int32" if dtype == "name" else dtype
            if name in given:
                column = given[name]
                if column.ndim == 1 and column.strides == (0,) and len(column) > 1:
                    column = np.broadcast_to(column[:1].astype(dtype)[0], (len(column),))
                column = np.asarray(column, dtype=dtype)
                if len(column) != length:
                    raise ValueError(f"{kind}.{name} has {len(column)} rows, others {length}")
            else:
                # One stored value, however many rows: wide tables cost memory only for the columns a reader fills.
                column = np.ndarray((length,), dtype, _stored_default(name, dtype), strides=(0,))
            self.columns[name] = column

    def __getitem__(self, name: str) -> Array:
        return self.columns[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.columns)

    def __len__(self) -> int:
        """Number of columns (a Mapping's length); rows are `rows`."""
        return len(self.columns)

    @property
    def rows(self) -> int:
        """Number of rows."""
        return len(next(iter(self.columns.values())))

    def __repr__(self) -> str:
        """Its name, rows and columns."""
        return f"<Table {self.kind}: {self.rows:,} rows of {', '.join(self.columns)}>"

    def where(self, mask: Array) -> Table:
        """The rows that a boolean mask or an index array selects."""
        return Table(self.kind, {name: column[mask] for name, column in self.columns.items()})


@functools.cache
def _stored_default(column: str, dtype: str) -> bytes:
    """What an absent column holds in every row, as one value of its type; bytes, so that a view cannot be written."""
    return np.array(_default(column), dtype=dtype).tobytes()


def _default(column: str) -> int:
    if column in (
        "offset",
        "stream",
        "channel",
        "device",
        "correlation",
        "transfer",
        "graph",
        "rank",
        "thread",
        "priority",
        "launches",
        "id",
        "step",
        "computed",
    ):
        return -1
    if column == "one_in":
        return 1
    return -1 if column in ("build_ns", "submit_ns", "wait_ns", "copy_ns", "poll_ns") else 0


@dataclass
class Source:
    """Where a recording came from, for its provenance line."""

    path: str
    format: str  # "nsys-sqlite", "kineto-json", "kvprobe", ...
    tool: str = ""  # product and version that recorded
    command: str = ""  # the exact command that made the recording, where it is known
    bytes: int = 0
    sha256: str = ""  # of the first MiB; empty where not taken


@dataclass(repr=False)
class Recording:
    """All that was captured, by whichever tool.

    Attributes:
        tables: one Table for each name in SCHEMAS; absent ones are empty.
        names: interned text; index 0 is "".
        histograms: submit-time histogram of each row of `totals`, (rows, 128) int64, buckets as in kvp.h.
        machine: facts of the machine (gpu, driver, cuda, cpu, queue_depth, channels, link_bytes_per_s ...), each with
            how it was obtained in `machine_how`.
        has_executions: the recorder saw the device; False means occupancy can only be inferred. A reader need say so
            only where there is not one execution.
        notes: one line for each thing that was not read, cut, thinned or assumed.
        lost: detail records known to be lost, by process row.
        incomplete: one line for each thing that should be here and is not: cut off, damaged, unread. Such a recording
            proves nothing to be healthy.
        window: the part that is judged, where somebody gave it (`recordings.serving.ServingWindow`).
        known_links: what `recordings.links.links_of` worked out, kept for whoever asks next.
        known_names: likewise, what `are_named` worked out.
    """

    source: list[Source]
    tables: dict[str, Table] = field(default_factory=dict)
    names: list[str] = field(default_factory=lambda: [""])
    histograms: Array = field(default_factory=lambda: np.zeros((0, 128), dtype=np.int64))
    machine: dict[str, Any] = field(default_factory=dict)
    machine_how: dict[str, str] = field(default_factory=dict)
    has_executions: bool = False
    notes: list[str] = field(default_factory=list)
    lost: dict[int, int] = field(default_factory=dict)
    incomplete: list[str] = field(default_factory=list)
    window: ServingWindow | None = None
    known_links: Links | None = field(default=None, repr=False, compare=False)
    known_names: dict[tuple[str, int], Array] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Gives every schema a table."""
        for kind in SCHEMAS:
            self.tables.setdefault(kind, Table(kind))

    def __getattr__(self, kind: str) -> Table:
        """Tables by name: `recording.calls`."""
        if kind in SCHEMAS:
            return self.tables[kind]
        raise AttributeError(kind)

    def __repr__(self) -> str:
        """Where it comes from, and the tables that hold something."""
        source = ", ".join(f"{Path(one.path).name} ({one.format})" for one in self.source) or "no source"
        held = ", ".join(f"{kind} {table.rows:,}" for kind, table in self.tables.items() if table.rows)
        return f"<Recording of {source}: {held or 'empty'}>"

    def to_arrow(self, kind: str) -> pyarrow.Table:
        """The table of this name (see SCHEMAS) for Arrow; `kind`, `direction` and names are spelled out.

        Raises:
            UsageError: no table is called so.
        """
        from kvprobe.recordings.parquet import to_arrow

        return to_arrow(self, kind)

    def to_pandas(self, kind: str) -> Any:
        """The same as a pandas.DataFrame, whose text columns are categories.

        Raises:
            UsageError: no table is called so, or pandas is not installed.
        """
        table = self.to_arrow(kind)
        try:
            return table.to_pandas()
        except ModuleNotFoundError as error:
            raise UsageError("pandas is not installed: pip install pandas, or use to_arrow") from error

    def stream_title(self, row: int) -> str:
        """How the stream in a row of `streams` is called everywhere; its number counts within its process."""
        from kvprobe.probe.ring import stream_number
        from kvprobe.recordings.vocabulary import stream_title

        streams = self.streams
        if not 0 <= row < streams.rows:
            return "unknown stream"
        owned = streams["process"]
        first = row  # a process's rows stand together
        while first and owned[first - 1] == owned[row]:
            first -= 1
        number = stream_number(streams["handle"][first : row + 1].tolist(), row - first)
        return stream_title(self.text(int(streams["name"][row])), number)

    def are_named(self, part: str) -> Array:
        """Which of the names contain a text of small letters, case aside, (names,) bool.

        Worked out once: it is asked for each stream, and there may be as many names as calls.
        """
        key = part, len(self.names)
        if key not in self.known_names:
            self.known_names[key] = np.array([part in text.lower() for text in self.names] or [False])
        return self.known_names[key]

    def text(self, index: int) -> str:
        """The interned text of a name column's value."""
        return self.names[index] if 0 <= index < len(self.names) else ""
