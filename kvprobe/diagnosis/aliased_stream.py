"""A "new" stream is one that is already in use, so its user waits for another thread's copies.

Mechanism: `torch.cuda.Stream()` hands out 32 streams for each priority in turn. The 33rd stream is the first one again.
So a thread that asks for a new stream can get the stream that the offload thread has filled, and then blocks.

Signature: a submission blocks on a stream, and another thread submitted more than half of the outstanding work of this
stream. The other thread submits almost only copies to this stream, and the blocked thread submits mostly to other
streams. Two threads that share a compute stream on purpose (forward and backward) do not match this signature.

Predicted saving: a stream of its own saves all of the blocked time. For a deeper queue, kvprobe simulates the recorded
calls with more slots.
"""

from __future__ import annotations

from kvprobe.account import Line
from kvprobe.diagnosis.deeper_queue import deeper
from kvprobe.diagnosis.finding import COUNTED, INFERRED, MEASURED, Change, Evidence, Finding, cause_of
from kvprobe.diagnosis.joined import JoinedRecording, ms
from kvprobe.diagnosis.launch_queue_saturation import cliff
from kvprobe.diagnosis.queue_full import full
from kvprobe.recordings.intervals import distinct

CAUSE = cause_of(__name__)
PROVES = Line.FULL_QUEUE
OF_EXECUTIONS = True  # told by what the device executed: without it, not looked for
TORCH_POOL = 32


def find(joined: JoinedRecording) -> Finding | None:
    """Submissions blocked by another thread's copies on the same stream."""
    found = full(joined)
    rows, ns = found.rows["alias"], found.ns["alias"]
    if not len(rows):
        return None
    streams = distinct(joined.stream[rows])
    names = ", ".join(joined.stream_name(int(s)) for s in streams[:4])
    users = {int(s): len(distinct(joined.caller[joined.submits & (joined.stream == s)])) for s in streams}
    in_use = len(distinct(joined.stream[joined.submits & (joined.stream >= 0)]))
    return joined.host_finding(
        CAUSE,
        "{calls} submissions waited {lost} on a stream that another thread had filled",
        "likely",
        rows,
        ns,
        chart=cliff(joined, rows),
        evidence=(
            Evidence(
                f"{len(rows):,} submissions to {names} blocked for {ms(int(ns.sum()))} behind another thread's copies",
                int(ns.sum()),
                "ns",
                MEASURED,
            ),
            Evidence(f"{max(users.values())} threads submit to that stream", max(users.values()), "1", COUNTED),
            Evidence(
                f"{in_use} streams are in use; torch has {TORCH_POOL} for each priority and then repeats them",
                in_use,
                "1",
                INFERRED,
            ),
        ),
        cure=(
            Change(
                "Make real streams: cudaStreamCreateWithFlags(cudaStreamNonBlocking), wrapped in "
                "torch.cuda.ExternalStream",
                share=1.0,
            ),
            Change(
                "Compare .cuda_stream of each new torch.cuda.Stream() with the streams in use, "
                "and ask for another where they are equal",
                share=1.0,
            ),
            deeper(joined, found, "alias"),
        ),
    )
