"""How a ring file is laid out: `kvprobe/native/src/kvp.h` as numpy's types, and the table of calls."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

BUCKETS = 128
PAGEABLE, PINNED = 1, 2  # enum kvp_memory
TRANSFER = 64  # the call that stands for a whole transfer of an engine
SPAN, COVERAGE, GRAPH = 65, 66, 67  # no calls: what marks told of the device (kvp.h)
CONTENTS = 68  # no call: what a copy carried
PAGES = 69  # no call: page faults in one
PAUSE = 70  # no call: what CPU time was used between two
WAITS = ("", "accept", "poll", "select", "epoll_wait", "recv")  # enum kvp_wait: a pause's `result`
DESTINATION = 81  # no call: what the device had where a load went
FSYNC = 82  # of no bytes
NO_CALLS = np.array([SPAN, COVERAGE, GRAPH, CONTENTS, PAGES, PAUSE, DESTINATION])
SEVERAL, SEVERAL_MOST = 0x80, 64  # in a record's call: it stands for several calls, so many at most
HEADER_BYTES = 4096
STATES = ("starting", "running", "closed")
MAGIC = b"KVPRING1"
UNTIMED = 2**64 - 1
SECTIONS = 1024  # a file has no more
SANE = 2**62  # no time and no count is as large; a damaged file's may be

# calls that name no stream; 0 there is not the default stream
NO_STREAM = np.array([19, 20, 21, 22, 23, 24, 25, 26, 34, 35, 36, 37, 38, 39, 42, 43, 44, 45])
OF_EVENTS = np.array([18, 33])  # waits for an event: the stream on which it was recorded, 0 where that is not known
FIRST_ADDRESS = 1 << 20  # a stream's handle from here on is an address; below, the number that CUDA or a recorder gave
DEVICE_SHIFT = 8  # a default stream's handle in a ring is 0, 1 or 2, and from this bit on its device's number

# number in the file -> (kind as in recordings.model.CallKind, name); kvp.h's KVP_CALLS, a test compares them
CALLS: dict[int, tuple[str, str]] = {
    1: ("COPY", "cudaMemcpyAsync"),
    2: ("COPY", "cudaMemcpy2DAsync"),
    3: ("BATCH", "cudaMemcpyBatchAsync"),
    4: ("COPY", "cuMemcpyAsync"),
    5: ("COPY", "cuMemcpyHtoDAsync"),
    6: ("COPY", "cuMemcpyDtoHAsync"),
    7: ("COPY", "cuMemcpyDtoDAsync"),
    8: ("COPY", "cuMemcpy2DAsync"),
    9: ("BATCH", "cuMemcpyBatchAsync"),
    10: ("COPY_SYNC", "cudaMemcpy"),
    11: ("MEMSET", "cudaMemsetAsync"),
    12: ("LAUNCH", "cudaLaunchKernel"),
    13: ("LAUNCH", "cudaLaunchKernelExC"),
    14: ("LAUNCH", "cuLaunchKernel"),
    15: ("LAUNCH", "cuLaunchKernelEx"),
    16: ("GRAPH", "cudaGraphLaunch"),
    17: ("SYNC", "cudaStreamSynchronize"),
    18: ("SYNC", "cudaEventSynchronize"),
    19: ("SYNC", "cudaDeviceSynchronize"),
    20: ("CREATE", "cudaStreamCreate"),
    21: ("CREATE", "cudaEventCreate"),
    22: ("ALLOC", "cudaMalloc"),
    23: ("ALLOC", "cudaHostAlloc"),
    24: ("ALLOC", "cudaHostRegister"),
    25: ("FREE", "cudaFree"),
    26: ("FREE", "cudaFreeHost"),
    27: ("EVENT", "cudaEventRecord"),
    28: ("EVENT", "cudaStreamWaitEvent"),
    29: ("ALLOC", "cudaMallocAsync"),
    30: ("COPY", "cudaMemcpy3DAsync"),
    31: ("COPY", "cudaMemcpyPeerAsync"),
    32: ("SYNC", "cuStreamSynchronize"),
    33: ("SYNC", "cuEventSynchronize"),
    34: ("SYNC", "cuCtxSynchronize"),
    35: ("CREATE", "cuStreamCreate"),
    36: ("CREATE", "cuEventCreate"),
    37: ("ALLOC", "cuMemAlloc"),
    38: ("ALLOC", "cuMemHostAlloc"),
    39: ("ALLOC", "cuMemHostRegister"),
    40: ("COPY", "cudaMemcpyWithAttributesAsync"),
    41: ("COPY", "cuMemcpy3DAsync"),
    42: ("FREE", "cudaHostUnregister"),
    43: ("FREE", "cuMemFree"),
    44: ("FREE", "cuMemFreeHost"),
    45: ("FREE", "cuMemHostUnregister"),
    46: ("FILE", "pread"),
    47: ("FILE", "preadv"),
    48: ("FILE", "read"),
    49: ("FILE", "pwrite"),
    50: ("FILE", "pwritev"),
    51: ("FILE", "write"),
    52: ("FILE", "recv"),
    53: ("FILE", "send"),
    54: ("FILE", "cuFile"),
    55: ("FILE", "io_submit"),
    56: ("ALLOC", "cuMemCreate"),
    57: ("ALLOC", "cuMemMap"),
    58: ("FREE", "cuMemUnmap"),
    59: ("FREE", "cuMemRelease"),
    60: ("ALLOC", "cuMemSetAccess"),
    61: ("ALLOC", "cuMemExportToShareableHandle"),
    62: ("ALLOC", "cuMemImportFromShareableHandle"),
    63: ("EVENT", "cudaLaunchHostFunc"),
    TRANSFER: ("TRANSFER", "transfer"),
    SPAN: ("MARKS", "span"),
    COVERAGE: ("MARKS", "coverage"),
    GRAPH: ("MARKS", "graph"),
    CONTENTS: ("NOTE", "contents"),
    PAGES: ("NOTE", "pages"),
    PAUSE: ("NOTE", "pause"),
    71: ("EVENT", "cudaStreamAddCallback"),
    72: ("EVENT", "cuLaunchHostFunc"),
    73: ("EVENT", "cuStreamAddCallback"),
    74: ("COPY_SYNC", "cuMemcpy"),
    75: ("COPY_SYNC", "cuMemcpyHtoD"),
    76: ("COPY_SYNC", "cuMemcpyDtoH"),
    77: ("COPY_SYNC", "cuMemcpyDtoD"),
    78: ("COPY_SYNC", "cudaMemcpy2D"),
    79: ("FREE", "cudaMemPoolTrimTo"),
    80: ("FREE", "cuMemPoolTrimTo"),
    DESTINATION: ("NOTE", "destination"),
    FSYNC: ("FILE", "fsync"),
}
# Reads and writes of tiers: no CUDA calls, on no stream (kvp.h).
FILE_CALLS = np.array([number for number, (kind, _) in CALLS.items() if kind == "FILE"])

FILE = np.dtype(
    [
        ("magic", "S8"),
        ("version", "<u4"),
        ("header_bytes", "<u4"),
        ("record_bytes", "<u4"),
        ("slot_bytes", "<u4"),
        ("buckets", "<u4"),
        ("slot_count", "<u4"),
        ("ring_capacity", "<u8"),
        ("slow_capacity", "<u8"),
        ("section_bytes", "<u8"),
        ("sections_max", "<u4"),
        ("sections_used", "<u4"),
        ("slow_ns", "<u8"),
        ("pid", "<u4"),
        ("ppid", "<u4"),
        ("start_monotonic_ns", "<u8"),
        ("start_realtime_ns", "<u8"),
        ("state", "<u4"),
        ("forks", "<u4"),
        ("end_monotonic_ns", "<u8"),
        ("clock", "S16"),
        ("producer", "S32"),
        ("over_count", "<u8", 128),
        ("over_bytes", "<u8", 128),
        ("over_dur_ns", "<u8", 128),
        ("command", "S512"),
        ("rank", "S16"),
        ("pid_namespace", "<u8"),  # 0 in files of earlier versions, and so is start_ticks
        ("start_ticks", "<u8"),
        ("sharers", "<u4"),
    ]
)
RECORD = np.dtype(
    [
        ("start_ns", "<u8"),
        ("dur_ns", "<u8"),
        ("stream", "<u8"),
        ("src", "<u8"),
        ("dst", "<u8"),
        ("bytes", "<u8"),
        ("tid", "<u4"),
        ("transfer", "<u4"),
        ("count", "<u4"),
        ("result", "<u2"),
        ("call", "u1"),
        ("direction", "u1"),
    ]
)
SECTION = np.dtype(
    [
        ("head", "<u8"),
        ("slow_head", "<u8"),
        ("tid", "<u4"),
        ("owners", "<u4"),
        ("busy", "<u4"),
        ("slots_used", "<u4"),
        ("name", "S32"),
        ("ring_records", "<u8"),
        ("slow_records", "<u8"),
        ("in_call", "<u4"),
        ("in_sequence", "<u4"),
        ("in_since_ns", "<u8"),
        ("in_stream", "<u8"),
        ("notes", "<u8"),  # 0 in files of earlier versions, and so is what follows
        ("failed_used", "<u4"),
        ("pad", "V4"),
        ("failed", RECORD, 16),
        ("begun_ns", "<u8"),
        ("begun_ran_ns", "<u8"),
        ("begun_waited_ns", "<u8"),
    ]
)
SLOT = np.dtype(
    [
        ("stream", "<u8"),
        ("call", "u1"),
        ("direction", "u1"),
        ("pad", "V6"),
        ("count", "<u8"),
        ("bytes", "<u8"),
        ("copies", "<u8"),
        ("dur_ns", "<u8"),
        ("last_ns", "<u8"),
        ("max_ns", "<u8"),
        ("slow", "<u8"),
        ("slow_ns", "<u8"),
        ("errors", "<u8"),
        ("untimed", "<u8"),
        ("node_bytes", "<u8", 4),
        ("histogram", "<u8", BUCKETS),
    ]
)
