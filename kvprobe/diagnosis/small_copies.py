"""Copies are so small that the copy engine spends its time on their fixed cost, not on their bytes.

Mechanism: a copy costs the engine about 2 us before the first byte moves, and the host 1 us to submit. At 4 KiB a loop
of copies reaches 1.3 GB/s on a link of 55.

Signature: at least 256 copies of one direction below 64 KiB in which at least half of the engine's time goes beyond
bytes / link rate. Bursts of small copies behind large ones of other streams are `head_of_line_copies`.

Time lost: the engine's time beyond what the same bytes take at link rate, and its pauses of a few us between two copies
of a stream of which the second waited already; of stores only where no kernel of the process runs beside them: nobody
waits for a store that compute hides, a load somebody waits for even then. The link rate is the machine's, else the one
of the largest copies in the recording; else what more bytes cost more, where there are copies of sizes four times
apart; else 25 GB/s where half of the copies take less than 6 us, and the finding is then only likely. Copies that take
longer on a link of unknown speed are left alone.

Predicted saving: with addresses in the recording, the excess of the copies that continue their predecessor (source
and destination both contiguous): (n - runs) x mean excess. Where there are no runs, or no addresses: 62% of the excess,
what `cudaMemcpyBatchAsync` gains over the loop at these sizes at the least (a factor of 2.6, measured, H200).
"""

from __future__ import annotations

import numpy as np

from kvprobe.diagnosis.finding import COUNTED, INFERRED, MEASURED, Change, Evidence, Finding, Loss, cause_of
from kvprobe.diagnosis.joined import Array, JoinedRecording, ms
from kvprobe.recordings.intervals import Cover, distinct
from kvprobe.recordings.model import Direction, Engine, Memory

CAUSE = cause_of(__name__)
OF_EXECUTIONS = True  # told by what the device executed: without it, not looked for
SMALL_BYTES, MANY = 64 << 10, 256
FIXED_NS = 6_000
ALIKE = 16  # copies of one size, to know what such a copy takes
BATCH_GAIN = 1 - 1 / 2.6


def _between(joined: JoinedRecording, rows: Array, compute: Cover | None) -> int:
    """Ns that the engine spent between small copies of one stream although the next one waited already.

    `compute`: not beside it.
    """
    order = rows[np.lexsort((joined.x_start[rows], joined.recording.executions["stream"][rows]))]
    calls = joined.x_call[order[1:]]
    given = joined.x_start[order[1:]].copy()
    given[calls >= 0] = joined.end[calls[calls >= 0]]  # there may be no call at all
    idle = joined.x_start[order[1:]] - joined.x_end[order[:-1]]
    streams = joined.recording.executions["stream"][order]
    counts = (streams[1:] == streams[:-1]) & (given <= joined.x_end[order[:-1]]) & (idle > 0) & (idle < FIXED_NS)
    if compute is not None:
        idle = idle - compute.within(
            joined.x_end[order[:-1]], np.maximum(joined.x_start[order[1:]], joined.x_end[order[:-1]])
        )
    return int(idle[counts].sum())


def _compute(joined: JoinedRecording, rows: Array) -> Cover:
    """When kernels of the copies' processes ran."""
    table = joined.recording.executions
    kernels = (table["engine"] == Engine.KERNEL) & np.isin(table["process"], distinct(table["process"][rows]))
    return Cover(joined.x_start[kernels], joined.x_end[kernels])


def _rate_of_sizes(joined: JoinedRecording, direction: Direction) -> tuple[float, str]:
    """Bytes per second by which larger copies take longer than smaller ones; 0 where sizes are too much alike."""
    table = joined.recording.executions
    rows = np.flatnonzero(
        (table["engine"] == Engine.COPY)
        & (table["direction"] == direction)
        & (table["bytes"] > 0)
        & (table["count"] <= 1)
        & (table["memory"] != Memory.PAGEABLE)
    )
    sizes, counts = np.unique(table["bytes"][rows], return_counts=True)
    sizes = sizes[counts >= ALIKE]
    if not len(sizes) or sizes[-1] < 4 * sizes[0]:
        return 0.0, ""
    low, high = (float(np.median(joined.x_dur[rows[table["bytes"][rows] == size]])) for size in (sizes[0], sizes[-1]))
    rate = float(sizes[-1] - sizes[0]) / (high - low) * 1e9 if high > low else 0.0
    return rate, f"from what copies of {sizes[-1] / 1024:,.3g} KiB take longer than those of {sizes[0] / 1024:,.3g} KiB"


def find(joined: JoinedRecording) -> Finding | None:
    """Small copies, both directions together."""
    table = joined.recording.executions
    chosen, losses, parts = [], [], []
    between = 0
    runs_known, merged_ns, certain = False, 0.0, True
    evidence: list[Evidence] = []
    for direction in (Direction.H2D, Direction.D2H):
        rows = np.flatnonzero(
            (table["engine"] == Engine.COPY)
            & (table["direction"] == direction)
            & (table["bytes"] > 0)
            & (table["bytes"] < SMALL_BYTES)
            & (table["count"] <= 1)
            & (table["memory"] != Memory.PAGEABLE)
        )
        if len(rows) < MANY:
            continue
        rate, how = joined.link(direction)
        if rate <= 0:
            rate, how = _rate_of_sizes(joined, direction)
        if rate <= 0:
            if float(np.median(joined.x_dur[rows])) > FIXED_NS:
                continue  # slow for their size on a link of unknown speed: cannot tell a fixed cost from a slow link
            rate, how, certain = 25e9, "assumed: no large copy in the recording shows the link's rate", False
        excess = np.maximum(joined.x_dur[rows] - table["bytes"][rows] / rate * 1e9, 0).astype(np.int64)
        if 2 * int(excess.sum()) < int(joined.x_dur[rows].sum()):
            continue
        compute = _compute(joined, rows) if direction == Direction.D2H else None
        between += _between(joined, rows, compute)
        if compute is not None:
            beside = compute.within(joined.x_start[rows], joined.x_end[rows])
            excess = np.maximum(excess - beside, 0)
        chosen.append(rows)
        losses.append(excess)
        parts.append(direction)
        typical = int(np.median(table["bytes"][rows]))
        reached = int(table["bytes"][rows].sum()) / max(int(joined.x_dur[rows].sum()), 1) * 1e9
        name = "loads" if direction == Direction.H2D else "stores"
        evidence.append(
            Evidence(
                f"{len(rows):,} {name} of {typical / 1024:.3g} KiB (median) kept the engine busy for "
                f"{ms(int(joined.x_dur[rows].sum()))} at {reached / 1e9:.2f} GB/s",
                reached,
                "bytes/s",
                MEASURED,
            )
        )
        gives = "gives" if certain else "is taken to give"
        evidence.append(Evidence(f"the link {gives} {rate / 1e9:.1f} GB/s", rate, "bytes/s", how))
        calls = joined.x_call[rows]
        mergeable = calls >= 0
        mergeable[mergeable] = (joined.src[calls[mergeable]] != 0) & (joined.dst[calls[mergeable]] != 0)
        if mergeable.all():
            runs_known = True
            order = np.lexsort((joined.start[calls], joined.stream[calls], joined.process[calls]))
            c = calls[order]
            size = joined.bytes[c[:-1]].astype(np.uint64)
            follows = (
                (joined.stream[c[1:]] == joined.stream[c[:-1]])
                & (joined.process[c[1:]] == joined.process[c[:-1]])
                & (joined.src[c[1:]] == joined.src[c[:-1]] + size)
                & (joined.dst[c[1:]] == joined.dst[c[:-1]] + size)
            )
            runs = len(c) - int(follows.sum())
            evidence.append(
                Evidence(
                    f"{len(c)} {name} are {runs} contiguous runs: {len(c) / runs:.3g} copies to a run",
                    len(c) / runs,
                    "1",
                    COUNTED,
                )
            )
            merged_ns += float(excess[order][1:][follows].sum())
    if not chosen:
        return None
    if between:
        evidence.append(
            Evidence(
                f"between them the engine spent another {ms(between)} although the next one waited",
                between,
                "ns",
                MEASURED,
            )
        )
    rows, excess = np.concatenate(chosen), np.concatenate(losses)
    total = max(int(excess.sum()), 1)
    calls = joined.x_call[rows]
    host = int(joined.dur[calls[calls >= 0]].sum())
    evidence.append(Evidence(f"submitting them one by one took the host {ms(host)}", host, "ns", MEASURED))
    merge = runs_known and merged_ns / total > BATCH_GAIN
    saving = merged_ns / total if merge else BATCH_GAIN
    joined_share = merged_ns / total if runs_known else None
    evidence.append(
        Evidence(
            f"joining the runs would save {ms(merged_ns)}"
            if merge
            else f"a batch call would save at least {ms(saving * total)}",
            saving * total,
            "ns",
            INFERRED,
        )
    )
    cure = [
        Change("Join contiguous blocks into one copy before submitting", share=joined_share),
        Change("cudaMemcpyBatchAsync (CUDA 12.8 and later): one call for all blocks of a transfer", share=BATCH_GAIN),
        Change(
            "One gather or scatter kernel for a transfer of many small blocks; it takes multiprocessors, so measure"
        ),
        Change("Larger blocks, or a layout that keeps all layers of a block together"),
    ]
    span = joined.span_ns * max(len(np.unique(table["process"][rows])), 1)
    if not joined.notable(int(np.clip(excess, 0, joined.device.free_ns[rows]).sum()) + between, span):
        return None
    got = joined.device.claim(CAUSE, rows, excess)
    return joined.finding(
        CAUSE,
        "{calls} small copies cost {lost} beyond their bytes",
        "certain" if certain else "likely",
        Loss(
            int(got.sum()) + between,
            len(rows),
            on="copy engine",
            window=(int(joined.x_start[rows].min()), int(joined.x_end[rows].max())),
            span_ns=span,
            places=joined.device_places(rows, got),
            copies=rows,
        ),
        evidence=evidence,
        cure=cure,
    )
