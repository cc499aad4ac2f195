"""A live engine as a recording: its ring file, its streams by their use, what auto did, and the depth it works with."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from kvprobe.errors import UsageError
from kvprobe.recordings.assemble import sorted_table
from kvprobe.recordings.block_notes import BlockNotes
from kvprobe.recordings.kvprobe_run import read
from kvprobe.recordings.model import Recording, Source, Table
from kvprobe.recordings.vocabulary import Names
from kvprobe.reuse.sample import WORDS

__all__ = ["PHASES", "recording_of"]

_HANDLE = re.compile(r"stream 0x[0-9a-f]+")

PHASES = "kvprobe phases"  # domain of the ranges that name what engines did one after another


class _Engine(Protocol):
    """What is needed of a `kvprobe.offload.OffloadEngine`."""

    recorder: Any  # its `path`: the ring file, or None
    auto: Any  # its `decisions`: time_ns, before, after, reason, gain
    limits: Any  # its depth, channels, how
    mapping: Any  # its pools, `gpu` and `cpu`

    @property
    def streams(self) -> Mapping[str, Sequence[int]]: ...


class _Cache(Protocol):
    """What is needed of a `kvprobe.offload.BlockCache`."""

    blocks: int
    sample: Any  # a `kvprobe.reuse.sample.BlockSample`, or None


def recording_of(
    *engines: _Engine,
    ring: Path | None = None,
    what: str = "engine",
    command: str = "",
    caches: Sequence[_Cache] = (),
) -> Recording:
    """What the engines of this process have recorded so far.

    Args:
        engines: all write to one ring file, as the engines of a process do; a closed one still says what it decided.
        ring: their ring file, where none of them is open any more.
        what: a name for the page's title and provenance.
        command: that made them work.
        caches: of these engines, each with a sample; its notes are taken over, so that the next recording has later
            ones only.

    Raises:
        UsageError: no engine was given, none records (detail "off"), or a cache has no sample.
        RecordingError: the ring file cannot be read.
    """
    paths = (one.recorder.path for one in engines)
    found = ring or next((path for path in paths if path is not None), None)
    if not engines or found is None:
        raise UsageError("nothing was recorded: the engine is closed, or its detail is off")
    recording = read(found)
    recording.source = [Source(what, "kvprobe", tool=recording.source[0].tool, command=command)]
    names = Names(recording.names)
    _name_streams(recording, engines, names)
    recording.names = names.list  # which the streams' titles read
    titles = _titles(recording)

    def titled(found: re.Match[str]) -> str:
        return titles.get(found[0], found[0])

    decided = [one for engine in engines for one in engine.auto.decisions]
    if decided:
        columns = {
            "time_ns": np.array([one.time_ns for one in decided]),
            "process": np.zeros(len(decided)),
            "what": names.map([f"auto: {one.before.policy} to {one.after.policy}" for one in decided]),
            "reason": names.map([_HANDLE.sub(titled, one.reason) for one in decided]),
            "gain": np.array([one.gain for one in decided]),
        }
        recording.tables["decisions"] = sorted_table("decisions", columns, by="time_ns")
    _note_blocks(recording, caches, engines[-1], names)
    recording.names = names.list
    limits = engines[-1].limits
    how = {
        "calibrated": "measured in this process: small copies were submitted behind a waiting kernel until one blocked",
        "cached": "counted by an earlier process in this environment",
    }.get(limits.how, "given to the engine")
    for name, value in (("queue_depth", limits.depth), ("channels", limits.channels)):
        recording.machine[name] = value
        recording.machine_how[name] = how
    return recording


def _note_blocks(recording: Recording, caches: Sequence[_Cache], engine: _Engine, names: Names) -> None:
    """The uses of the caches' blocks, each of all layers."""
    notes = BlockNotes(names)
    for number, cache in enumerate(caches):
        if cache.sample is None:
            raise UsageError("this cache notes no uses of its blocks: give it a sample when it is made")
        found = cache.sample.fetch()
        event = {
            "server": "kvprobe",
            "source": "BlockCache" + (f" {number + 1}" if len(caches) > 1 else ""),
            "threshold": found.threshold,
            "counts": {WORDS[what]: count for what, count in found.counts.items()},
            "blocks": cache.blocks,
            "block_bytes": engine.mapping.cpu.block_bytes * engine.mapping.cpu.layers,
            "notes": [list(note) for note in found.notes],
        }
        notes.event(event, 0, found.notes[-1][0] if found.notes else 0, 0)
    notes.fill(recording)


def _name_streams(recording: Recording, engines: Sequence[_Engine], names: Names) -> None:
    """Names streams by their use; a handle that engines had for different uses has none."""
    uses: dict[int, set[str]] = {}
    for engine in engines:
        for use, handles in engine.streams.items():
            for number, handle in enumerate(handles):
                said = f"shared {('loads', 'stores')[number % 2]}" if use == "shared" else f"{use}s {number + 1}"
                uses.setdefault(int(handle), set()).add(said)
    streams = dict(recording.streams)
    found = [uses.get(handle, set()) for handle in streams["handle"].tolist()]
    streams["name"] = names.map([_common(one) for one in found])
    recording.tables["streams"] = Table("streams", streams)


def _common(uses: set[str]) -> str:
    """The use of a handle; where engines numbered it differently, the use without a number."""
    plain = {use.rstrip("0123456789 ") for use in uses}
    return next(iter(uses)) if len(uses) == 1 else plain.pop() if len(plain) == 1 else ""


def _titles(recording: Recording) -> dict[str, str]:
    """What an engine calls a stream -> how it is called everywhere."""
    handles = recording.streams["handle"].tolist()
    return {f"stream {handle:#x}": recording.stream_title(row) for row, handle in enumerate(handles)}
