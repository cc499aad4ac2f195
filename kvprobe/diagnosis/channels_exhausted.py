"""Submissions block although no stream is full: the hardware channels that the streams share are full.

Mechanism: a channel is a queue of the hardware, and several streams share a channel. Each channel holds a limited
number of submissions. NVIDIA documents 8 channels as the default, but an H200 had 4 for copies: 2,000 streams then
blocked at the same number of outstanding submissions as 4 streams. More streams than channels only add false
dependencies.

Signature: submissions block when all streams of a channel together hold a certain number of submissions, while each
stream holds less than 90% of what a queue takes. kvprobe takes the channel ids from the recording if the recorder wrote
them. (CUPTI does, and Kineto from June 2026 on. Nsight Systems does not.) Otherwise kvprobe takes all copy streams of a
process and direction together, if there are at least five, and the finding is only likely.

Predicted saving: kvprobe simulates the recorded calls with each of three changes alone: 32 channels (these streams
would use some of them), queues that are four times as deep, and batch calls.
"""

from __future__ import annotations

import numpy as np

from kvprobe.account import Line
from kvprobe.diagnosis.deeper_queue import BATCHED, deeper, spared
from kvprobe.diagnosis.finding import COUNTED, INFERRED, MEASURED, Change, Evidence, Finding, cause_of
from kvprobe.diagnosis.joined import Array, JoinedRecording, ms
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
            Evidence(
                f"{len(rows):,} submissions blocked for {ms(int(ns.sum()))}{_few(ns)}", int(ns.sum()), "ns", MEASURED
            ),
            Evidence(
                f"their own streams held at most {int(depth.max()):,} submissions (median: {int(np.median(depth)):,})",
                int(depth.max()),
                "1",
                MEASURED,
            ),
            Evidence(
                f"all streams that share the full channel held {found.channel_total:,} submissions together",
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
                "Set CUDA_DEVICE_MAX_CONNECTIONS=32 (or CUDA_DEVICE_MAX_COPY_CONNECTIONS=32, for copies) before CUDA "
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
            Change("Have no more copies outstanding than the channels hold together: more streams do not add slots"),
        ),
    )


def _few(ns: Array) -> str:
    """That few of many calls lost nearly all the time, for behind their number; "" where it is not so."""
    longest = np.cumsum(np.sort(ns)[::-1])
    few = int(np.searchsorted(longest, 0.99 * longest[-1])) + 1
    return f", {few:,} of them for {ms(int(longest[few - 1]))}" if 4 * few <= len(ns) else ""
