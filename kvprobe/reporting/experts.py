"""Experts in CPU memory, for the page and `kvprobe stats`: their uploads by tensor, and what changes would save."""

from __future__ import annotations

from kvprobe.account import Account
from kvprobe.account.expert_gains import FIXED, PREFETCH, SLOTS, ExpertChange, ExpertGains, expert_gains
from kvprobe.recordings.experts import ExpertTensor, ExpertUploads, expert_uploads
from kvprobe.recordings.model import Recording
from kvprobe.recordings.serving import ServingWindow
from kvprobe.reporting.units import NONE, count_text, duration, moved_text, percent, size_text
from kvprobe.reporting.views import Cell, Chart, TableView, left_out, table

__all__ = ["LEAD", "change_said", "expert_section", "expert_tables", "scaled", "tensor_name"]

LEAD = (
    "Copies that bring a model's experts to the GPU. They are recognised by their source addresses: pieces at equal "
    "distances in memory that the GPU never writes to, some of which are copied in each step. Each upload is a miss: "
    "the expert was not on the GPU. An upload counts under “Again” where the expert had been on the GPU before. What a "
    "change saves is at most the time in which the GPU computed nothing: because of these copies, and where uploads "
    "begin earlier, until it was known which experts to copy as well."
)
_MOST = 100
_ALL = 0.995  # of the window: who observed so much observed all of it
_WHAT = {
    PREFETCH: "Begin each upload while what comes before it computes, if the picks are known so early",
    SLOTS: "Keep {count} more experts on the GPU, and replace the one that was used least recently",
    FIXED: "Keep {count} whole tensors on the GPU, the most costly first",
}


def tensor_name(one: ExpertTensor) -> str:
    """By the range around its copies, else by its address."""
    return one.name or f"{one.address:#x}"


def change_said(one: ExpertChange) -> str:
    """In words."""
    text = _WHAT[one.what].format(count=count_text(one.count))
    return text.replace("tensors", "tensor") if one.what == FIXED and one.count == 1 else text


def scaled(gains: ExpertGains) -> str:
    """From what part of the window the times are extended; "" where they are not."""
    if gains.exposed_ns is None or gains.observed >= _ALL:
        return ""
    return f"Times are scaled from the {percent(gains.observed)} of the window in which the GPU was observed."


def expert_section(
    recording: Recording, account: Account | None, window: ServingWindow
) -> tuple[str, str, list[Chart | None], list[TableView | None]]:
    """Title, lead, charts and tables of the page's section."""
    return "Experts in CPU memory", LEAD, [], expert_tables(recording, account, window)


def expert_tables(
    recording: Recording, account: Account | None, window: ServingWindow | None = None
) -> list[TableView | None]:
    """For each process that uploads experts, its tensors and what changes would save; without an account the former."""
    out: list[TableView | None] = []
    for one in expert_uploads(recording, window):
        out.append(_tensors(one))
        if account is not None:
            out.append(_changes(recording, account, one))
    return out


def _tensors(uploads: ExpertUploads) -> TableView:
    rows = []
    for number, one in enumerate(uploads.tensors[:_MOST]):
        mine = uploads.tensor == number
        moved, again = int(uploads.bytes[mine].sum()), int((uploads.again & mine).sum())
        rows.append(
            [
                tensor_name(one),
                (size_text(one.expert_bytes), one.expert_bytes),
                (count_text(one.different), one.different),
                (count_text(one.visits), one.visits),
                (count_text(one.typical), one.typical),
                (count_text(one.uploads), one.uploads),
                (percent(again / one.uploads), again / one.uploads),
                (moved_text(moved), moved),
                (count_text(one.whole), one.whole),
            ]
        )
    kept = f"The GPU keeps up to {uploads.slots:,} experts." if uploads.slots else "Nothing is kept between steps."
    again, total = int(uploads.again.sum()), len(uploads.key)
    note = f"{total:,} uploads, {percent(again / total)} of them of experts that had been on the GPU before. {kept}"
    columns = ("Tensor", "Expert", "Different", "Steps", "A step", "Uploads", "Again", "Moved", "Whole tensor")
    notes = (note, left_out(_MOST, len(uploads.tensors)))
    return table("Uploads by tensor", columns, rows, " ".join(part for part in notes if part))


def _changes(recording: Recording, account: Account, uploads: ExpertUploads) -> TableView | None:
    gains = expert_gains(recording, account, uploads)
    total = len(uploads.key)
    rows = [
        [
            change_said(one),
            (size_text(one.bytes), one.bytes) if one.bytes else NONE,
            (f"{count_text(one.kept)}, {percent(one.kept / total)}", one.kept) if one.kept else NONE,
            (moved_text(one.kept_bytes), one.kept_bytes) if one.kept_bytes else NONE,
            Cell(duration(one.saved_ns), one.saved_ns) if one.saved_ns is not None else NONE,
            (percent(one.saved_ns / gains.window_ns), one.saved_ns / gains.window_ns)
            if one.saved_ns is not None and gains.window_ns
            else NONE,
        ]
        for one in gains.changes
    ]
    if not rows:
        return None
    notes = ["When the GPU computed was not recorded beside enough of these copies, so the time saved is not known."]
    if gains.exposed_ns is not None:
        notes = [f"The GPU computed nothing for {duration(gains.exposed_ns)} because of these copies.", scaled(gains)]
    if uploads.slots:
        notes.append("More slots save at least as many uploads as this says: uses that needed no copy are not seen.")
    columns = ("Change", "Memory of the GPU", "Uploads saved", "Bytes saved", "Time saved", "Of the window")
    return table("What would reduce uploads", columns, rows, " ".join(filter(None, notes)))
