"""When the bytes of a copy of pageable memory are on the link; the rest of its call is "copying pageable memory".

The driver moves such a copy through pinned buffers of its own, a piece at a time. Its call holds the thread from the
first piece to the last, and returns when the last one is on its way to the GPU, or when the CPU has it. What is called
pageable is the time of the call before the first byte is on the link and behind the last one: then nothing is copied.
In between the device copies, slowly.

Profilers record this interval of the device. Timing events do not show it: the one before a copy is reached before the
first piece is filled, and the one behind it is recorded when the call has returned. There `on_link` tells it, by how
long the call itself took: the pace of the driver is the call's own, whatever the memory and the machine.

Figures: 20 programs on H100 and H200, as Nsight Systems or the PyTorch profiler saw them, 8 bytes to 64 MiB.
"""

from __future__ import annotations

import numpy as np

from kvprobe.recordings.model import Array, Direction

__all__ = ["on_link"]

# Small ones the device copies more slowly: 3 KB in 0.9 µs, 16 KiB in 1.7, 60 in 4.9, 64 in 5.2 to 5.5; above this,
# 188 KiB in 6.4, 512 in 13.1, 1 MiB in 21.5.
SMALL_BYTES = 64 << 10
SMALL_BEGINS_NS, SMALL_BYTES_PER_NS = 600, 13.5
BEGINS_NS = 2_500

# To the GPU: the first piece to be filled, at the pace of the call. Before the device began, of the call had passed:
# all for up to 1 MiB, 0.65 for 1.5 MiB, 0.41 for 2.5, 0.34 for 3, 0.25 to 0.27 for 4. Copies of 8 and 16 MiB behind a
# kernel began 1 to 9 µs after it, when 0.16 to 0.26 had passed: it is filled while the stream is busy.
PIECE_BYTES = 1 << 20

# From the GPU: the device begins 4.5 to 8 µs after the call. When it had ended, so much was left for the CPU to empty:
# 1.2 to 1.4 MiB of 4, 1.6 of 2, 1.9 of 64.
ENTERED_NS = 5_000
EMPTIED_BYTES = 3 << 19


def on_link(span: tuple[Array, Array], call: tuple[Array, Array], size: Array, way: Array, link_ns: Array) -> Array:
    """From the first byte of each copy on the link to the last, as far as its call and timing events tell it.

    Args:
        span: when its stream seems to be busy with it by timing events, begin and end, ns.
        call: when its call was entered and had returned, ns.
        size: bytes of each.
        way: the Direction of each; of others than between CPU and GPU nothing is changed.
        link_ns: what its bytes take at the link's rate.

    Returns:
        begin and end of each, (2, copies) ns.
    """
    (start, stop), (entered, returned) = span, call
    size = np.maximum(size, 1)
    alone = np.where(size <= SMALL_BYTES, SMALL_BEGINS_NS + size / SMALL_BYTES_PER_NS, BEGINS_NS + link_ns)

    # To the GPU: one piece has been filled before it begins, and one is on its way when the call returns. The event
    # behind it tells the end, unless its thread was late to record it.
    filled = entered + (returned - entered) * np.minimum(PIECE_BYTES / size, 1)
    large = np.maximum(np.where(start < returned, start, entered), filled)
    small = np.maximum(start, returned + BEGINS_NS)
    there = np.minimum(np.where(size > PIECE_BYTES, large, small), np.maximum(stop - alone, start))
    newest = np.where(size > PIECE_BYTES, BEGINS_NS + link_ns * PIECE_BYTES / size, alone)
    arrived = np.minimum(stop, np.maximum(there, returned + BEGINS_NS) + newest)

    # From the GPU: an event that seems to begin as the call returns says nothing of when the stream was free.
    back = np.where(start + alone <= returned, np.maximum(start, entered + ENTERED_NS), entered + ENTERED_NS)
    back = np.maximum(np.minimum(back, returned - alone), entered)
    emptied = (returned - back) * np.minimum(size, EMPTIED_BYTES) / size
    ended = np.minimum(np.maximum(back + alone, returned - emptied), stop)

    begin = np.select([way == Direction.H2D, way == Direction.D2H], [there, back], start)
    end = np.select([way == Direction.H2D, way == Direction.D2H], [arrived, ended], stop)
    return np.stack((np.minimum(begin, end), end)).astype(np.int64)
