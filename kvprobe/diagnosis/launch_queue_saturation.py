"""The launch queue behind a stream is full: each further submission waits until an earlier one has been served.

Mechanism: a stream takes about a thousand submissions (1,021 on an H200, 1,022 on a V100, 1,135 to 1,141 on an H100).
The next call blocks until the GPU has freed a slot. So a call that usually takes a microsecond takes as long as the
oldest operation in the queue, and blocks the thread that submits.

Signature: three signs are needed:
 - The number of outstanding submissions stops growing at one value.
 - Calls with that many outstanding submissions take longer than calls with fewer.
 - Most of these calls return just when the stream finishes an operation, and not by chance. (If operations end so often
   that most calls would return so by chance, this sign tells nothing. Then the number of outstanding submissions must
   have stayed at its highest value while these calls waited.)

If the recorder itself labels calls that met a full queue (CUPTI 12.4: command buffer full), the labels decide, and
kvprobe only says beside them what its own three signs show. Fast calls are healthy however many submissions are
outstanding. Slow calls with few outstanding submissions have another cause. If one sign is missing, kvprobe says which,
and does not decide.

Predicted saving: kvprobe simulates the recorded calls with the slots that each change adds. A deeper queue
(`CUDA_SCALE_LAUNCH_QUEUES=4x`) has four times as many slots. With a stream for each transfer, there are as many queues
as the machine has channels. If the recording does not say how many, kvprobe assumes 4: an H200 had 4 for copies where
no variable set the number, although NVIDIA documents 8 (`kvprobe doctor` counts them). A batch call takes fewer slots
than its copies take one by one: on an H200, a queue of 1,021 slots took 8,168 copies in batches of 8. So for batch
calls, kvprobe simulates a queue with eight times as many slots. `CUDA_DEVICE_MAX_CONNECTIONS` does not help a single
stream, so kvprobe does not propose it.
"""

from __future__ import annotations

import numpy as np

from kvprobe.account import Line
from kvprobe.diagnosis.deeper_queue import BATCHED, counted_records, deeper, spared
from kvprobe.diagnosis.finding import INFERRED, LABELLED, MEASURED, Change, Evidence, EvidenceChart, Finding, cause_of
from kvprobe.diagnosis.joined import SLOW_NS, Array, JoinedRecording, ms, range_of, share
from kvprobe.diagnosis.merging import merged
from kvprobe.diagnosis.queue_full import UNSETTLED_SHARE, Full, full, queue_blocked
from kvprobe.launchqueue.constants import CHANNEL_SLOTS, LEAST_NS
from kvprobe.launchqueue.evidence import Deepest, Made, Together
from kvprobe.launchqueue.judge import conclude
from kvprobe.launchqueue.levels import at_top
from kvprobe.recordings.assemble import among
from kvprobe.recordings.inferred import without_cpu
from kvprobe.recordings.intervals import distinct
from kvprobe.recordings.model import SUBMITTING, CallKind, Direction, Memory

CAUSE = cause_of(__name__)
PROVES = Line.FULL_QUEUE


def cliff(joined: JoinedRecording, rows: Array) -> EvidenceChart:
    """Time inside the call against what was outstanding at its entry: flat, and then a cliff."""
    streams = distinct(joined.stream[rows])
    every = np.flatnonzero(joined.submits & among(joined.stream, streams) & (joined.occupancy.depth >= 0))
    here = np.zeros(len(joined.start), dtype=bool)
    here[rows] = True
    every = every[~here[every]]
    elsewhere = queue_blocked(joined)[every]
    other, rest = every[elsewhere], every[~elsewhere]

    def thin(some: Array) -> Array:
        """1,500 of them at most: the 300 slowest, which the words name, and the others at equal steps."""
        if len(some) <= 1_500:
            return some
        slowest = np.argpartition(joined.dur[some], -300)[-300:]
        return some[np.union1d(np.linspace(0, len(some) - 1, 1_200).astype(np.int64), slowest)]

    shown = {"went through": thin(rest), "blocked": thin(rows), "blocked, in another finding": thin(other)}
    return {
        "title": "What a submission costs, by the number of outstanding submissions",
        "x_label": "outstanding submissions at entry",
        "y_label": "time inside the call (µs)",
        "series": {
            name: {"x": joined.occupancy.depth[some], "y": joined.dur[some] / 1e3, "style": "points"}
            for name, some in shown.items()
            if len(some)
        },
    }


def _slow_records(joined: JoinedRecording) -> Finding | None:
    """Records of events that took long: each takes a slot, and waits for one, but whose queue it was is not told.

    Where the device was recorded and no queue was anywhere near full of submissions, they are `unexplained`.
    """
    deepest = Deepest((int(joined.occupancy.depth.max(initial=0)),))
    if joined.recording.has_executions and conclude(deepest).state == "not full":
        return None
    rows = np.flatnonzero(joined.is_named("eventrecord") & (joined.host.owner < 0) & (joined.host.free_ns > 0))
    quick = np.minimum(joined.usual_ns[rows], joined.common_ns_of(rows))
    ns = np.maximum(joined.dur[rows] - quick, 0)
    costly = ns > 2 * quick + 1_000
    if int(ns[costly & (joined.dur[rows] < SLOW_NS)].sum()) < UNSETTLED_SHARE * joined.caller_span_ns(rows):
        costly = joined.dur[rows] >= SLOW_NS
    rows, ns = rows[costly], ns[costly]
    if int(ns.sum()) <= without_cpu(joined.recording, rows, ns) + LEAST_NS or _too_few(joined):
        return None
    streams = bool((joined.stream[rows] >= 0).all())
    told = streams and joined.recording.has_executions
    ours = any(one.format == "kvprobe" for one in joined.recording.source)
    return joined.open_question(
        CAUSE,
        "The launch queue may have been full: {calls} calls that record an event took {lost} longer than usual",
        rows,
        ns,
        evidence=(
            Evidence(
                f"{len(rows):,} calls that record an event took {ms(int(ns.sum()))} longer than they usually do, the "
                f"longest {ms(int(joined.dur[rows].max()))}: a record takes a slot of its stream's queue",
                int(ns.sum()),
                "ns",
                MEASURED,
            ),
        ),
        because=(
            "the calls that record events were slow although their queues had free slots, as far as submissions "
            "were counted"
        )
        if told
        else "some calls that record an event were slow, and the recording does not show "
        + ("what the GPU did meanwhile" if streams else "the stream of each"),
        record="Record every event call: kvprobe run --detail launches"
        if ours and not streams
        else "Record again with Python stacks (kvprobe run), to see where the thread was"
        if told
        else "Record with Nsight Systems (kvprobe run --nsys), which shows the stream of each call",
        chart=joined.slow_calls_chart(rows, "Records of events that took long"),
    )


def _too_few(joined: JoinedRecording) -> bool:
    """Whether all submissions and records of events of the recording together are too few to fill a queue."""
    calls, totals = joined.recording.calls, joined.recording.totals
    if any(joined.recording.lost.values()) or (calls["kind"] == CallKind.GRAPH).any():
        return False
    takes = (*SUBMITTING, CallKind.EVENT)
    made = int(np.maximum(calls["count"], 1)[among(calls["kind"], takes)].sum())
    made = max(made, int(totals["calls"][among(totals["kind"], takes)].sum()))
    return conclude(Made(made, float(joined.recording.machine.get("queue_depth") or 0))).state == "not full"


def _crowded(joined: JoinedRecording) -> Finding | None:
    """Slow copies whose own stream had free slots while those of their direction together held what a channel takes."""
    seen = joined.submits & among(joined.direction, (Direction.H2D, Direction.D2H)) & (joined.exec_end >= 0)
    slow = seen & joined.slow & (joined.host.owner < 0) & (joined.memory != Memory.PAGEABLE)
    takes = float(joined.recording.machine.get("queue_depth") or CHANNEL_SLOTS)
    parts = [np.zeros(0, dtype=np.int64)]
    most = 0
    for process, direction in set(zip(joined.process[slow].tolist(), joined.direction[slow].tolist(), strict=True)):
        mine = (joined.process == process) & (joined.direction == direction)
        rows = np.flatnonzero(slow & mine)
        entered, done = np.sort(joined.start[seen & mine]), np.sort(joined.exec_end[seen & mine])
        at = joined.start[rows]
        together = np.searchsorted(entered, at) - np.searchsorted(done, at, "right")
        crowded = at_top(together, takes) & ~at_top(joined.occupancy.depth[rows], takes)
        parts.append(rows[crowded])
        most = max(most, int(together[crowded].max(initial=0)))
    rows = np.concatenate(parts)
    concluded = conclude(Together(len(rows), most))
    if concluded.state == "not full":
        return None
    return joined.open_question(
        CAUSE,
        "A channel of several streams may have been full: {calls} submissions took {lost} longer than others",
        rows,
        np.minimum(joined.host.free_ns[rows], joined.excess_of(rows)),
        evidence=(
            Evidence(
                f"up to {most:,} copies of this direction were outstanding, on all streams together",
                most,
                "1",
                MEASURED,
            ),
        ),
        because=concluded.because,
        record="Record with the PyTorch profiler of June 2026 or later, which records channels; or run once with "
        "CUDA_DEVICE_MAX_CONNECTIONS=32 and compare",
        chart=joined.slow_calls_chart(rows, "Slow submissions of streams whose queues had free slots"),
    )


def open_question(joined: JoinedRecording) -> Finding | None:
    """Slow calls with most outstanding, where one of the three signs is missing."""
    found = full(joined)
    if len(found.rows["saturation"]):
        return _crowded(joined)  # slow records of events beside a full queue are no question of their own
    if not found.open_reason:
        return _slow_records(joined) or _crowded(joined)
    free = joined.host.free_ns[found.open_rows] > 0
    rows, ns = found.open_rows[free], found.open_ns[free]
    if len(rows) < 3:
        return None
    return joined.open_question(
        CAUSE,
        "The launch queue may have been full: {calls} calls took {lost} longer than usual while many submissions "
        "were outstanding",
        rows,
        ns,
        evidence=(
            Evidence(
                f"{len(rows):,} slow calls began with "
                f"{range_of(joined.occupancy.depth[rows])} submissions outstanding on their stream",
                len(rows),
                "calls",
                INFERRED,
            ),
        ),
        because=found.open_reason,
        record="Record again with a recorder that labels full command buffers: Nsight Systems 2025.5.2 or later, or "
        "PyTorch 2.6 or later with CUDA 12.4",
        chart=cliff(joined, rows),
    )


def find(joined: JoinedRecording) -> Finding | None:
    """Blocked calls that no narrower shape explains."""
    found = full(joined)
    rows, ns = found.rows["saturation"], found.ns["saturation"]
    if not len(rows):
        return None
    graphs = sum(q.graphs for q in found.queues)
    return joined.host_finding(
        CAUSE,
        "The launch queue was full: {calls} submissions blocked for {lost}",
        "likely" if found.how == "inferred" or found.regular else "certain",
        rows,
        ns,
        evidence=[*_of_calls(joined, found), *_of_queues(found), *_of_kinds(joined.kind[rows], ns)],
        cure=_cure(joined, found),
        reason="the depth is approximate while CUDA graphs are in the queue" if graphs else "",
        chart=cliff(joined, rows),
    )


def _of_calls(joined: JoinedRecording, found: Full) -> list[Evidence]:
    """What the blocked calls took, and such calls take with a free slot; by the recorder's label, and by inference."""
    rows, lost = found.rows["saturation"], int(found.ns["saturation"].sum())
    labelled, inferred = sum(q.labelled_ns for q in found.queues), sum(q.inferred_ns for q in found.queues)
    baseline, typical = float(np.median(joined.occupancy.baseline_ns[rows])), float(np.median(joined.dur[rows]))
    evidence = [
        Evidence(
            f"{len(rows):,} calls met a full queue, with {range_of(joined.occupancy.depth[rows])} submissions "
            f"outstanding, and lost {ms(lost)}",
            lost,
            "ns",
            LABELLED if labelled else MEASURED if found.how == "plateau" else INFERRED,
        ),
        Evidence(
            f"with a free slot, such a call takes {ms(baseline)}; here it took {ms(typical)} (median) and up to "
            f"{ms(int(joined.dur[rows].max()))}",
            typical,
            "ns",
            MEASURED,
        ),
    ]
    if labelled:
        evidence.append(
            Evidence(
                f'the recorder labels {ms(labelled)} of these calls "command buffer full"; without these labels, '
                f"kvprobe finds {ms(inferred)}",
                labelled,
                "ns",
                LABELLED,
            )
        )
    return evidence


def _of_queues(found: Full) -> list[Evidence]:
    """What the queue that lost most shows beside how much it holds."""
    first, evidence = found.queues[0], list[Evidence]()
    if found.how == "inferred":
        evidence.append(Evidence(first.reason.replace("(inferred: ", "("), float(first.ceiling), "1", INFERRED))
    if np.isfinite(first.aligned):
        evidence.append(
            Evidence(
                f"{first.aligned:.0%} of these calls returned when their stream finished an operation"
                + (
                    f". This adds little to the other evidence: operations end so often here that {first.chance:.0%} "
                    "of all calls would return so by chance"
                    if first.chance >= 0.5
                    else f"; by chance, {first.chance:.0%} would"
                ),
                first.aligned,
                "1",
                MEASURED,
            )
        )
    if first.before or first.after:
        before, after = sum(q.before for q in found.queues), sum(q.after for q in found.queues)
        evidence.append(
            Evidence(
                f"{before:,} submissions were outstanding when the recording began and {after:,} when it ended: they "
                "count as well",
                before,
                "1",
                INFERRED,
            )
        )
    return evidence


def _of_kinds(kinds: Array, ns: Array) -> list[Evidence]:
    """How many of the blocked calls are of which kind, and their share of the time."""
    evidence = []
    for kind, name in (
        (CallKind.LAUNCH, "kernel launches"),
        (CallKind.COPY, "copies"),
        (CallKind.BATCH, "batches"),
        (CallKind.MEMSET, "memsets"),
        (CallKind.GRAPH, "graph launches"),
        (CallKind.EVENT, "records of events"),
    ):
        mine = kinds == kind
        if mine.any():
            lost = int(ns[mine].sum())
            part = f"{share(lost, int(ns.sum()))} of the time lost"
            text = f"all of these calls are {name}" if mine.all() else f"{int(mine.sum()):,} of them are {name}: {part}"
            evidence.append(Evidence(text, lost, "ns", MEASURED))
    return evidence


def _cure(joined: JoinedRecording, found: Full) -> list[Change]:
    """A deeper queue, and what fits the kind of call that lost most of the time."""
    rows, ns = found.rows["saturation"], found.ns["saturation"]
    kinds = joined.kind[rows]
    of_launches = 2 * int(ns[among(kinds, [CallKind.LAUNCH, CallKind.GRAPH])].sum()) > int(ns.sum())
    of_batches = 2 * int(ns[kinds == CallKind.BATCH].sum()) > int(ns.sum())
    cure = [deeper(joined, found, "saturation"), *_fewer_records(joined, found)]
    if of_launches:
        return [
            *cure,
            Change("Launch fewer, larger pieces of work: CUDA graphs, fused kernels; the GPU is behind, not the CPU"),
            Change("Let another thread do the work that the blocked thread does besides launching"),
        ]
    channels = joined.recording.machine.get("channels") or 4
    return [
        *cure,
        Change(
            "Submit each transfer as one gather kernel, which takes one slot: a batch takes one slot for every 25 "
            "copies"
        )
        if of_batches
        else Change(
            "Submit fewer, larger pieces: one cudaMemcpyBatchAsync or one gather kernel per transfer; a batch "
            "takes far fewer slots than its copies do one by one",
            share=spared(joined, found, "saturation", BATCHED),
        ),
        Change(
            f"Let another thread submit: each transfer to a stream of its own, up to the {channels} hardware channels, "
            "and never more than the queue holds (kvprobe's engine: pooled; for servers `kvprobe run --fix auto`)",
            "rung",
            "pooled",
            "auto",
            share=spared(joined, found, "saturation", float(channels)),
        ),
        *merged(joined, found, "saturation"),
    ]


def _fewer_records(joined: JoinedRecording, found: Full) -> list[Change]:
    """Where records of events take slots as well."""
    rows = found.rows["saturation"]
    records = len(counted_records(joined, distinct(joined.stream[rows])))
    if not records:
        return []
    submitted = int((joined.submits & among(joined.stream, distinct(joined.stream[rows]))).sum())
    return [
        Change(
            f"Record one event after each transfer or step, not after each piece: {records:,} records took "
            "slots of the queue as well",
            share=spared(joined, found, "saturation", 1 + records / max(submitted, 1)),
        )
    ]
