"""The page's section on sleep and wake: what each took, phase by phase, beside the link."""

from __future__ import annotations

from kvprobe.recordings.link_rate import link_rate
from kvprobe.recordings.model import Direction, Recording
from kvprobe.recordings.sleeps import PHASES, Sleep, Spent, fastest_copy, sleeps
from kvprobe.reporting.units import NONE, count_text, duration, link_share, moved_text, rate
from kvprobe.reporting.views import Cell, TableView, left_out, table

__all__ = ["LEAD", "sleep_tables"]

LEAD = (
    "When a thread gave up GPU memory under addresses that stay, and when it mapped memory there again, as a model is "
    "put to sleep and woken; with what it pinned, copied and freed meanwhile. Where an adapter watched the server's "
    "own function, it has the server's name for it, and lasts as long as the function did. Each phase is the sum of "
    "its calls; the rate is that of all phases together, from the first call to the end of the last. Page faults are "
    "those of the calling thread, in calls that took a millisecond; the node is that of some pages of the CPU's memory."
)
_MOST = 50
OTHER_NODES = 15
_TITLES = {"sleep": "To the CPU: sleep", "wake": "To the GPU: wake"}
_DIRECTION = {"sleep": Direction.D2H, "wake": Direction.H2D}


def sleep_tables(recording: Recording, zero_ns: int) -> list[TableView | None]:
    """A table of sleeps and one of wakes; None where there were none."""
    found = sleeps(recording)
    return [_table(recording, side, [one for one in found if one.side == side], zero_ns) for side in PHASES]


def _table(recording: Recording, side: str, found: list[Sleep], zero_ns: int) -> TableView | None:
    if not found:
        return None
    link, how = link_rate(recording, _DIRECTION[side])
    if not link:
        link, how = fastest_copy(recording, _DIRECTION[side])
    phases = list(PHASES[side])
    rows = [
        [
            (duration(one.start_ns - zero_ns), one.start_ns),
            one.name or NONE,
            str(one.thread),
            (moved_text(one.bytes), one.bytes),
            (duration(one.ns), one.ns),
            (rate(one.bytes_per_s), one.bytes_per_s),
            (link_share(one.bytes_per_s / link), one.bytes_per_s / link) if link else NONE,
            *(_phase(one.phases[name]) for name in phases),
            _nodes(one.nodes),
        ]
        for one in found[:_MOST]
    ]
    note = f"The link: {rate(link)} ({how})." if link else "What the link carries is not known here."
    columns = (
        "At",
        "What",
        "Thread",
        "Bytes",
        "Took",
        "Rate",
        "Of the link",
        *(name.capitalize() for name in phases),
        "NUMA node",
    )
    notes = (note, *(_prepared(recording) if side == "sleep" else ()), left_out(_MOST, len(found)))
    return table(_TITLES[side], columns, rows, " ".join(part for part in notes if part))


def _prepared(recording: Recording) -> list[str]:
    """What the interposer says of pinned memory that it made before a sleep asked for it, a sentence a process."""
    said = (recording.text(int(reason)) for reason in recording.decisions["reason"])
    return [f"{text}." for text in said if "were prepared for a sleep" in text]


def _nodes(nodes: list[int]) -> Cell:
    return Cell(", ".join(f"{node}{' and up' if node == OTHER_NODES else ''}" for node in nodes) or NONE, 0.0)


def _phase(spent: Spent) -> Cell:
    if not spent.calls:
        return Cell(NONE, 0.0)
    text = duration(spent.ns)
    if spent.bytes and spent.ns:
        text += f", {rate(spent.bytes / spent.ns * 1e9)}"
    if spent.faults:
        text += f", {count_text(spent.faults)} page {'fault' if spent.faults == 1 else 'faults'}"
    return Cell(text, float(spent.ns))
