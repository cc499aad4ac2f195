"""Many copies so small that their fixed cost, not their bytes, is what the copy engine spends its time on.

Mechanism: a copy costs the engine about 2 us before the first byte moves, and the host 1 us to submit. At 4 KiB a loop
of copies reaches 1.3 GB/s on a link of 55.

Signature: at least 256 copies of one direction below 64 KiB in which at least half of the engine's time goes beyond
bytes / link rate. Bursts of small copies behind large ones of other streams are `head_of_line_copies`.

Time lost: the engine's time beyond what the same bytes take at link rate, and its pauses of a few us between two copies
of a stream of which the second waited already. The link rate is the machine's, else the one
of the largest copies in the recording; else (no large copy was seen) 25 GB/s where half of the copies take less than
6 us, and the finding is then only likely. Copies that take longer on a link of unknown speed are left alone.

Predicted saving: with addresses in the recording, the excess of the copies that continue their predecessor (source
and destination both contiguous): (n - runs) x mean excess. Where there are no runs, or no addresses: 62% of the excess,
what `cudaMemcpyBatchAsync` gains over the loop at these sizes at the least (a factor of 2.6, measured, H200).
"""

from __future__ import annotations

import numpy as np

from kvprobe.diagnosis.finding import COUNTED, INFERRED, MEASURED, Change, Evidence, Finding
from kvprobe.diagnosis.frame import Array, Frame, ms
from kvprobe.recordings.model import Direction, Engine, Memory

CAUSE = "small_copies"
SMALL_BYTES, MANY = 64 << 10, 256
FIXED_NS = 6_000
BATCH_GAIN = 1 - 1 / 2.6


def _between(frame: Frame, rows: Array) -> int:
    """Ns that the engine spent between small copies of one stream although the next one waited already."""
    order = rows[np.lexsort((frame.x_start[rows], frame.recording.executions["stream"][rows]))]
    calls = frame.x_call[order[1:]]
    given = np.where(calls >= 0, frame.end[np.maximum(calls, 0)], frame.x_start[order[1:]])
    idle = frame.x_start[order[1:]] - frame.x_end[order[:-1]]
    streams = frame.recording.executions["stream"][order]
    counts = (streams[1:] == streams[:-1]) & (given <= frame.x_end[order[:-1]]) & (idle > 0) & (idle < FIXED_NS)
    return int(idle[counts].sum())


def find(frame: Frame) -> Finding | None:
    """Small copies, both directions together."""
    table = frame.recording.executions
    chosen, losses, parts = [], [], []
    between = 0
    runs_known, merged_ns, certain = False, 0.0, True
    evidence: list[Evidence] = []
    for direction in (Direction.H2D, Direction.D2H):
        rows = np.flatnonzero(
            (table["engine"] == Engine.COPY) & (table["direction"] == direction) & (table["bytes"] > 0)
            & (table["bytes"] < SMALL_BYTES) & (table["count"] <= 1) & (table["memory"] != Memory.PAGEABLE)
        )  # fmt: skip
        if len(rows) < MANY:
            continue
        rate, how = frame.link(direction)
        if rate <= 0:
            if float(np.median(frame.x_dur[rows])) > FIXED_NS:
                continue  # slow for their size on a link of unknown speed: cannot tell a fixed cost from a slow link
            rate, how, certain = 25e9, "assumed: no large copy in the recording shows the link", False
        excess = np.maximum(frame.x_dur[rows] - table["bytes"][rows] / rate * 1e9, 0).astype(np.int64)
        between += _between(frame, rows)
        if 2 * int(excess.sum()) < int(frame.x_dur[rows].sum()):
            continue
        chosen.append(rows)
        losses.append(excess)
        parts.append(direction)
        typical = int(np.median(table["bytes"][rows]))
        reached = int(table["bytes"][rows].sum()) / max(int(frame.x_dur[rows].sum()), 1) * 1e9
        name = "loads" if direction == Direction.H2D else "stores"
        evidence.append(Evidence(f"{len(rows):,} {name} of {typical / 1024:.3g} KiB (median) kept the engine busy for "
                                 f"{ms(int(frame.x_dur[rows].sum()))} at {reached / 1e9:.2f} GB/s", reached, "bytes/s",
                                 MEASURED))  # fmt: skip
        evidence.append(Evidence(f"the link gives {rate / 1e9:.1f} GB/s", rate, "bytes/s", how))
        calls = frame.x_call[rows]
        joined = calls >= 0
        joined[joined] = (frame.src[calls[joined]] != 0) & (frame.dst[calls[joined]] != 0)
        if joined.all():
            runs_known = True
            order = np.lexsort((frame.start[calls], frame.stream[calls], frame.process[calls]))
            c = calls[order]
            size = frame.bytes[c[:-1]].astype(np.uint64)
            follows = (
                (frame.stream[c[1:]] == frame.stream[c[:-1]]) & (frame.process[c[1:]] == frame.process[c[:-1]])
                & (frame.src[c[1:]] == frame.src[c[:-1]] + size) & (frame.dst[c[1:]] == frame.dst[c[:-1]] + size)
            )  # fmt: skip
            runs = len(c) - int(follows.sum())
            evidence.append(Evidence(f"{len(c)} {name} are {runs} contiguous runs: {len(c) / runs:.3g} copies to a run",
                                     len(c) / runs, "1", COUNTED))  # fmt: skip
            merged_ns += float(excess[order][1:][follows].sum())
    if not chosen:
        return None
    if between:
        evidence.append(Evidence(f"between them the engine spent another {ms(between)} although the next one waited",
                                 between, "ns", MEASURED))  # fmt: skip
    rows, excess = np.concatenate(chosen), np.concatenate(losses)
    total = max(int(excess.sum()), 1)
    calls = frame.x_call[rows]
    host = int(frame.dur[calls[calls >= 0]].sum())
    evidence.append(Evidence(f"submitting them one by one took the host {ms(host)}", host, "ns", MEASURED))
    merge = runs_known and merged_ns / total > BATCH_GAIN
    saving = merged_ns / total if merge else BATCH_GAIN
    joined_share = merged_ns / total if runs_known else None
    evidence.append(Evidence(
        f"joining the runs would save {ms(merged_ns)}" if merge else
        f"a batch call would save at least {ms(saving * total)}", saving * total, "ns", INFERRED))  # fmt: skip
    cure = [
        Change("Join contiguous blocks into one copy before submitting", share=joined_share),
        Change("cudaMemcpyBatchAsync (CUDA 12.8 and later): one call for all blocks of a transfer", share=BATCH_GAIN),
        Change(
            "One gather or scatter kernel for a transfer of many small blocks; it takes multiprocessors, so measure"
        ),
        Change("Larger blocks, or a layout that keeps all layers of a block together"),
    ]
    span = frame.span_ns * max(len(np.unique(table["process"][rows])), 1)
    if not frame.notable(int(np.clip(excess, 0, frame.device.free_ns[rows]).sum()) + between, span):
        return None
    got = frame.device.claim(CAUSE, rows, excess)
    return frame.finding(
        CAUSE, "{calls} small copies cost {lost} beyond their bytes", "certain" if certain else "likely",
        int(got.sum()) + between, len(rows), lane="copy engine", span_ns=span, places=frame.device_places(rows, got),
        window=(int(frame.x_start[rows].min()), int(frame.x_end[rows].max())), evidence=evidence, cure=cure,
    )  # fmt: skip
