"""What a recording shows of start-up: context, modules, pinning, allocation and loads before the serving window began.

Nothing here is a finding: a process does this once. It is said so that nobody takes it for serving, and because pinning
has a price that can be lowered: page by page it runs at a few GB/s.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import cast

import numpy as np

from kvprobe.output.recorded import StartupJson, StartupPartJson
from kvprobe.recordings.assemble import among
from kvprobe.recordings.model import SUBMITTING, Array, CallKind, Direction, Memory, Recording
from kvprobe.recordings.serving import ServingWindow, setting_up

__all__ = ["Startup", "StartupPart", "startup"]

CONTEXT_NS = 50_000_000  # making a context takes 100 ms to a second
LARGE_BYTES = 64 << 20  # pinning as much takes some 20 ms itself
LOADING = "loading"
PINS = ("hostalloc", "hostregister", "mallochost", "memhostalloc", "memallochost", "memhostregister")


@dataclass(frozen=True)
class StartupPart:
    """One kind of start-up work.

    Attributes:
        what: "pinning host memory", "allocating device memory", "context and devices", "modules and kernels",
            "streams and events", "freeing memory", "loading from pageable memory", "loading" or "other calls".
        calls: how many.
        ns: time inside them, of all threads together.
        bytes: what they asked for; 0 where the recording does not tell.
        call: name of the call that took most of it.
        longest_ns: the longest one.
    """

    what: str
    calls: int
    ns: int
    bytes: int
    call: str
    longest_ns: int

    @property
    def bytes_per_s(self) -> float:
        """How fast memory was pinned or allocated; 0 where its size is not known."""
        return self.bytes / self.ns * 1e9 if self.ns and self.bytes else 0.0

    def to_json(self) -> StartupPartJson:
        """All fields and the rate."""
        return cast("StartupPartJson", {**asdict(self), "bytes_per_s": self.bytes_per_s})


@dataclass(frozen=True)
class Startup:
    """What lies before the serving window: its length and its parts, the one that took longest first."""

    length_ns: int
    how: str
    submissions: int
    parts: tuple[StartupPart, ...]

    def to_json(self) -> StartupJson:
        """All fields."""
        return {
            "length_ns": self.length_ns,
            "how": self.how,
            "submissions": self.submissions,
            "parts": [part.to_json() for part in self.parts],
        }


def startup(recording: Recording, window: ServingWindow) -> Startup:
    """Start-up by kind of work; without parts where the recording begins with serving."""
    calls = recording.calls
    length = max(window.start_ns - window.first_ns, 0)
    if length <= 0:
        return Startup(0, window.how, 0, ())
    before = calls["start_ns"] < window.start_ns
    if len(window.from_ns) and not (window.from_ns == window.from_ns[0]).all():
        begin = window.from_ns[np.clip(calls["process"], 0, len(window.from_ns) - 1)]
        before = calls["start_ns"] < begin
    loads = _loads(recording)
    rows = np.flatnonzero(before & (setting_up(recording) | loads))
    kind_of_name = [_kind(name) for name in recording.names]
    kinds = calls["kind"][rows]
    makes_context = _first_calls(recording, rows[~loads[rows]])
    pageable = loads & (calls["memory"] == Memory.PAGEABLE)
    parts: dict[str, list[int]] = {}
    for row, name, kind in zip(rows.tolist(), calls["name"][rows].tolist(), kinds.tolist(), strict=True):
        by_name = kind_of_name[name] if 0 <= name < len(kind_of_name) else ""
        what = "context and devices" if row in makes_context else _part(by_name, kind)
        if pageable[row]:
            what += " from pageable memory"
        parts.setdefault(what, []).append(row)
    out = []
    for what, members in parts.items():
        mine = np.array(members)
        spent = np.maximum(calls["end_ns"][mine] - calls["start_ns"][mine], 0)
        in_names = np.bincount(np.maximum(calls["name"][mine], 0), weights=spent)
        asked = what in ("pinning host memory", "allocating device memory", f"{LOADING} from pageable memory")
        size = int(calls["bytes"][mine].sum()) if asked else 0
        out.append(
            StartupPart(
                what, len(mine), int(spent.sum()), size, recording.text(int(in_names.argmax())), int(spent.max())
            )
        )
    out.sort(key=lambda part: -part.ns)
    submissions = int((before & among(calls["kind"], SUBMITTING)).sum())
    return Startup(length, window.how, submissions, tuple(out))


def _loads(recording: Recording) -> Array:
    """Mask over calls: single copies to the device."""
    mask: Array = among(recording.calls["kind"], (CallKind.COPY, CallKind.COPY_SYNC))
    mask &= recording.calls["direction"] == Direction.H2D
    return mask


def _first_calls(recording: Recording, rows: Array) -> set[int]:
    """Each process's first long call of these: it made the context, whatever its name."""
    calls = recording.calls
    long = calls["end_ns"][rows] - calls["start_ns"][rows] >= CONTEXT_NS
    rows = rows[long & (calls["bytes"][rows] < LARGE_BYTES)]
    ordered = rows[np.argsort(calls["start_ns"][rows], kind="stable")]
    return set(ordered[np.unique(calls["process"][ordered], return_index=True)[1]].tolist())


def _kind(name: str) -> str:
    """What a call of this name sets up, "" where its kind tells."""
    low = name.lower()
    if any(part in low for part in PINS):
        return "pinning host memory" if "unregister" not in low else "freeing memory"
    if any(part in low for part in ("module", "library", "getkernel", "link")):
        return "modules and kernels"
    if any(part in low for part in ("cuinit", "ctx", "setdevice", "cudainit")):
        return "context and devices"
    return ""


def _part(by_name: str, kind: int) -> str:
    if by_name:
        return by_name
    return {
        CallKind.ALLOC: "allocating device memory",
        CallKind.FREE: "freeing memory",
        CallKind.CREATE: "streams and events",
        CallKind.COPY: LOADING,
        CallKind.COPY_SYNC: LOADING,
    }.get(CallKind(kind), "other calls")
