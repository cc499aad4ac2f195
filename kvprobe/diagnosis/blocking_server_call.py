"""A server's own function blocks its thread while it moves data, as measured by an adapter.

Mechanism: a function of the server moves weights or KV blocks, and returns only when the bytes have arrived. The
function copies from or to pageable memory, makes a blocking copy, or waits on the host (LMCache's connectors,
accelerate's hooks, diffusers' group offloading).

Signature: the adapter counted pageable or blocking copies in the call, or knows from the server's code why the call
waits. Only time outside of recorded CUDA calls counts, because recorded CUDA calls have findings of their own.

Needs: the adapters' events (`kvprobe run`, or KVPROBE=on with a run folder).

Predicted saving: kvprobe predicts none, because pinning and overlapping need changes of the server's own code.
"""

from __future__ import annotations

import numpy as np

from kvprobe.diagnosis.finding import COUNTED, MEASURED, Change, Evidence, Finding, Loss, Where, cause_of
from kvprobe.diagnosis.joined import JoinedRecording, ms, size
from kvprobe.recordings.intervals import distinct

CAUSE = cause_of(__name__)
CURES = {
    "accelerate": "accelerate copies from pageable memory and waits, parameter by parameter: keep on the GPU what "
    "every step uses (device_map with max_memory), or use an offloading that prefetches on a stream "
    "(diffusers' group offloading, vLLM's --offload-backend prefetch)",
    "diffusers": "Group offloading: use_stream=True with pinned memory, record_stream=True, low_cpu_mem_usage=False",
    "lmcache": "LMCache: a larger chunk_size makes fewer waits; inside an engine, its multi-process mode moves them to "
    "another process; for several engines, lmcache server --max-gpu-workers serves them side by side",
    "transformers": 'Offload the KV cache only when it does not fit: cache_implementation="dynamic" keeps it',
    "sglang": "SGLang: --hicache-io-backend kernel and --page-size 64 make fewer and larger operations",
    "vllm": "vLLM: --offload-backend prefetch copies weights ahead of their use",
}


def find(joined: JoinedRecording) -> Finding | None:
    """Calls of servers' functions that held their threads."""
    table = joined.recording.server_calls
    if not table.rows:
        return None
    known = (table["pageable"] > 0) | (table["blocking"] > 0) | (table["reason"] > 0)
    rows = np.flatnonzero(known & (table["inside"] == 0) & (table["thread"] >= 0))
    if not len(rows):
        return None
    start, end = table["start_ns"][rows], table["end_ns"][rows]
    process, thread = table["process"][rows], table["thread"][rows]
    lost = end - start
    span = 0
    for one in distinct(process):
        for other in distinct(thread[process == one]):
            mine = (process == one) & (thread == other)
            recorded = (joined.process == one) & (joined.thread == other)
            lost[mine] -= joined.occupied(recorded).within(start[mine], end[mine])
            whole = (table["process"] == one) & (table["thread"] == other)
            span += int(table["end_ns"][whole].max() - table["start_ns"][whole].min())
    rows, lost = rows[lost > 0], lost[lost > 0]
    if not len(rows):
        return None
    evidence, places, servers = [], [], []
    key = table["server"][rows].astype(np.int64) << 32 | table["name"][rows]
    for one in sorted(set(key.tolist()), key=lambda k: -int(lost[key == k].sum())):
        mine = rows[key == one]
        server, name = (joined.text(table[column][mine[0]]) for column in ("server", "name"))
        servers.append(server)
        spent, moved = int(lost[key == one].sum()), int(table["bytes"][mine].sum())
        copies, pageable = int(table["count"][mine].sum()), int(table["pageable"][mine].sum())
        blocking = int(table["blocking"][mine].sum())
        counts = f"{pageable} of {copies} copies from pageable memory, {blocking} blocking"
        why = counts if pageable or blocking else joined.text(table["reason"][mine[0]])
        evidence.append(
            Evidence(
                f"{server} {name}: {len(mine):,} calls blocked their thread for {ms(spent)} and moved "
                f"{size(moved)}: {why}",
                spent,
                "ns",
                COUNTED if pageable else MEASURED,
            )
        )
        first = mine[0]
        places.append(
            Where(
                process=int(table["process"][first]),
                pid=joined.pid(int(table["process"][first])),
                rank=joined.rank(int(table["process"][first])),
                thread=int(table["thread"][first]),
                range=f"{server} {name}",
                lost_ns=spent,
                calls=len(mine),
            )
        )
    return joined.finding(
        CAUSE,
        "{calls} calls of server functions that move data blocked their threads for {lost}",
        "certain",
        Loss(
            int(lost.sum()),
            len(rows),
            on="host",
            window=(int(table["start_ns"][rows].min()), int(table["end_ns"][rows].max())),
            span_ns=span,
            places=tuple(places),
        ),
        evidence=evidence,
        cure=[Change(CURES[server], "setting") for server in dict.fromkeys(servers) if server in CURES],
    )
