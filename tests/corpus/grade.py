"""Grades a diagnosis against what the programs of the corpus say of themselves: misses, false names, time lost."""

from __future__ import annotations

import gzip
import json
import sys
import tarfile
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import numpy as np
from programs import PROGRAMS

from kvprobe.diagnosis import Examination, examine
from kvprobe.recordings import open_recording
from kvprobe.recordings.model import Direction, Engine, Memory, Recording

FORMATS = {"run": ".kvprobe.tar.gz", "kineto": ".json.gz", "nsys": ".sqlite.gz"}
LEAST_NS = 2_000_000  # a cause that lost less may be named or not
SLACK_NS = 1_000_000
# Parts of one story, whose border a program cannot draw exactly: graded for their time together.
TOGETHER = ({"fence_before_copies", "launch_queue_saturation", "channels_exhausted", "aliased_stream"},)
# Said of how the program began, not of what it does; never a false name while it is for information.
EXPLAINING = {"first_calls", "profiler_overhead"}
# What no cause explains, under the account's own name: true whatever else is named.
EXPLAINING |= {"waiting_for_copies", "waiting_for_host"}


# What a machine does to its link while a program runs, no program can know: a recording shows it, or does not.
OF_THE_MACHINE = {"link_degraded"}
LARGE, BIN_NS, MANY, FELL = 1 << 20, 10_000_000, 4, 0.7

# Without executions a recording does not show how long the copy engine worked.
UNTIMED = {("run", "redundant_loads"), ("run", "wasted_stores")}


@dataclass
class Grade:
    """One recording's: what had to be named, what was, and the errors of the times lost."""

    program: str
    form: str
    expected: set[str]
    named: dict[str, int]
    lost: dict[str, int]
    missed: set[str] = field(default_factory=set)
    false: set[str] = field(default_factory=set)
    error: dict[str, float] = field(default_factory=dict)
    not_looked_for: set[str] = field(default_factory=set)

    @property
    def right(self) -> bool:
        """All causes named, none made up."""
        return not self.missed and not self.false


def unpack(path: Path, into: Path) -> Path:
    """A recording as the readers take it."""
    if path.name.endswith(".tar.gz"):
        with tarfile.open(path) as packed:
            packed.extraction_filter = getattr(tarfile, "data_filter", None)  # type: ignore[assignment]
            packed.extractall(into)
        return into / path.name.removesuffix(".kvprobe.tar.gz")
    if path.name.endswith(".sqlite.gz"):
        plain = into / path.name.removesuffix(".gz")
        plain.write_bytes(gzip.decompress(path.read_bytes()))
        return plain
    return path


def link_fell(recording: Recording) -> bool:
    """Whether large pinned copies of one size and direction, alone on the link, ran at 0.7 of their best for 10 ms."""
    table = recording.executions
    pinned = (table["engine"] == Engine.COPY) & (table["memory"] != Memory.PAGEABLE)
    copies = np.flatnonzero(pinned & (table["direction"] != Direction.D2D))
    copies = copies[np.argsort(table["start_ns"][copies], kind="stable")]
    start, end, size = (table[name][copies] for name in ("start_ns", "end_ns", "bytes"))
    apart = np.ones(len(copies), dtype=bool)
    apart[1:] &= start[1:] >= np.maximum.accumulate(end)[:-1]
    apart[:-1] &= end[:-1] <= start[1:]
    kind = size * 8 + table["direction"][copies]
    for one in np.unique(kind[apart & (size >= LARGE)]):
        mine = apart & (kind == one)
        rate = size[mine] / (end[mine] - start[mine])
        bins = (start[mine] - start[0]) // BIN_NS
        medians = [np.median(rate[bins == at]) for at in np.unique(bins) if (bins == at).sum() >= MANY]
        if medians and min(medians) < FELL * np.percentile(rate, 90):
            return True
    return False


def grade(
    program: str, form: str, said: dict[str, int], found: Examination, recording: Recording | None = None
) -> Grade:
    """Compares the findings of one recording with what its program said, and with what it shows of the machine."""
    known = PROGRAMS[program]
    named = {one.cause: one.lost_ns for one in found.findings if not one.abstains}
    expected = known.expected(form)
    out = Grade(program, form, expected, named, said, not_looked_for={one.cause for one in found.not_looked_for})
    needed = {cause for cause in expected if said.get(cause, 0) >= LEAST_NS or said.get(cause) == 0}
    out.missed = needed - set(named)
    out.false = set(named) - set(known.causes) - set(known.also) - EXPLAINING
    if out.false & OF_THE_MACHINE and recording is not None and link_fell(recording):
        out.false -= OF_THE_MACHINE
    for group in TOGETHER:  # a queue behind a fence and the same queue afterwards
        if group & expected and group & set(named):
            out.missed -= {cause for cause in group if said.get(cause, 0) < 0.2 * sum(said.get(c, 0) for c in group)}
    for causes in [*(group & expected for group in TOGETHER), *({cause} for cause in expected)]:
        if any(causes < group for group in TOGETHER if len(causes) < len(group & expected)):
            continue
        together = next((group for group in TOGETHER if causes == group & expected), causes)
        truth, mine = (sum(times.get(cause, 0) for cause in together) for times in (said, named))
        if causes & set(named) and truth >= LEAST_NS and not any((form, cause) in UNTIMED for cause in causes):
            out.error["+".join(sorted(causes))] = (mine - truth) / truth if abs(mine - truth) > SLACK_NS else 0.0
    return out


def grade_folder(corpus: Path, scratch: Path, only: str = "") -> list[Grade]:
    """Grades every recording of a folder that `benchmarks/record_corpus.py` made."""
    grades = []
    for form, suffix in FORMATS.items():
        for path in sorted((corpus / form).glob(f"*{suffix}")):
            program = path.name.removesuffix(suffix)
            if only not in program or program not in PROGRAMS:
                continue
            said = json.loads(path.with_name(f"{program}.truth.json").read_text())["lost_ns"]
            recording = open_recording(unpack(path, scratch))
            grades.append(grade(program, form, said, examine(recording), recording))
    return grades
