"""Submissions block although no stream is full: the hardware channels that the streams share are full.

Mechanism: N streams hold min(N, channels) x depth submissions. CUDA's default is 4 channels: with them, 2,000 streams
block at the same operation as 4 streams. More streams than channels only add false dependencies.

Signature: submissions block when all streams of a channel together reach a certain depth, while each stream holds less
than 90% of what a queue takes. Channel ids come from the recorder if it has them (CUPTI; Kineto from June 2026 on; not
Nsight Systems). Otherwise all copy streams of a process and direction, at least five, are taken together, and the
finding is only likely.

Predicted saving: the calls played again (`deeper_queue`) with the channels that these streams would use of 32,
with queues four times as deep, and with batches.
"""

from __future__ import annotations

import numpy as np

from kvprobe.account import Line
from kvprobe.diagnosis.deeper_queue import BATCHED, deeper, spared
from kvprobe.diagnosis.finding import COUNTED, INFERRED, MEASURED, Change, Evidence, Finding, cause_of
from kvprobe.diagnosis.joined import JoinedRecording, ms
from kvprobe.diagnosis.launch_queue_saturation import cliff
from kvprobe.diagnosis.merging import merged
from kvprobe.diagnosis.queue_full import full

CAUSE = cause_of(__name__)
PROVES = Line.FULL_QUEUE
MOST_CHANNELS = 32


def find(joined: JoinedRecording) -> Finding | None:
    """Calls blocked by what other streams put into their channel."""
    found = full(joined)
    rows, ns = found.rows["channels"], found.ns["channels"]
    if not len(rows):
        return None
    depth = joined.occupancy.depth[rows]
    known = found.channels_how.startswith("channel ids")
    channels = int(joined.recording.machine.get("channels") or 4)
    users = len(np.unique(np.append(joined.stream[rows], list(found.crowded))))
    more = min(users, MOST_CHANNELS) / min(users, channels)  # channels in use, with 32 and as it is
    return joined.host_finding(
        CAUSE,
        "Hardware channels were full: {calls} submissions blocked for {lost} although their streams had free slots",
        "certain" if known else "likely",
        rows,
        ns,
        chart=cliff(joined, rows),
        evidence=(
            Evidence(f"{len(rows):,} submissions blocked for {ms(int(ns.sum()))}", int(ns.sum()), "ns", MEASURED),
            Evidence(
                f"their own streams held at most {int(depth.max())} (median {int(np.median(depth))}) submissions",
                int(depth.max()),
                "1",
                MEASURED,
            ),
            Evidence(
                f"the streams that share the full queue held {found.channel_total} together",
                found.channel_total,
                "1",
                found.channels_how,
            ),
            Evidence(
                f"{len(np.unique(joined.stream[rows]))} streams were blocked",
                len(np.unique(joined.stream[rows])),
                "1",
                COUNTED,
            ),
            Evidence(
                f"the machine has {channels} channels for copies",
                channels,
                "1",
                joined.recording.machine_how.get("channels", "CUDA's default where nothing is set")
                if "channels" in joined.recording.machine
                else INFERRED,
            ),
        ),
        cure=(
            Change(
                "CUDA_DEVICE_MAX_CONNECTIONS=32 (or CUDA_DEVICE_MAX_COPY_CONNECTIONS=32, for copies) before CUDA "
                f"starts: {channels} channel{'s become' if channels > 1 else ' becomes'} 32, for these {users} streams",
                "environment",
                "CUDA_DEVICE_MAX_CONNECTIONS",
                "32",
                share=spared(joined, found, "channels", more),
            ),
            deeper(joined, found, "channels"),
            Change(
                "Submit fewer, larger pieces: one cudaMemcpyBatchAsync for a transfer",
                share=spared(joined, found, "channels", BATCHED),
            ),
            *merged(joined, found, "channels"),
            Change("Limit the number of outstanding copies to channels x depth: more streams do not add slots"),
        ),
    )
