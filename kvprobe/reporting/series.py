"""Long series made short enough to draw: the maximum of every bin survives, a mean is never taken."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvprobe.recordings.buckets import BUCKETS, bucket, bucket_floor_ns

__all__ = ["BUCKETS", "Bins", "bin_max", "bin_step", "bucket", "bucket_floor_ns", "heat", "histogram", "slowest"]

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Bins:
    """Bins of one width over a span of time.

    Attributes:
        start_ns, width_ns: bin i covers [start + i * width, start + (i + 1) * width).
        high: maximum of each bin, float64, NaN where the bin is empty.
        low: minimum likewise.
        count: values of each bin, int64.
    """

    start_ns: float
    width_ns: float
    high: Array
    low: Array
    count: Array


def _index(time_ns: Array, bins: int, start_ns: float, end_ns: float) -> tuple[Array, float]:
    width = max((end_ns - start_ns) / bins, 1e-9)
    index = ((time_ns - start_ns) / width).astype(np.int64)
    return np.clip(index, 0, bins - 1), width


def bin_max(
    time_ns: Array, value: Array, bins: int, start_ns: float | None = None, end_ns: float | None = None
) -> Bins:
    """Maximum, minimum and number of `value` in `bins` bins of time; input in any order, nothing is dropped.

    Values outside [start_ns, end_ns] fall into the first or last bin, so that the overall maximum always survives.
    """
    if bins < 1:
        raise ValueError(f"bins must be at least 1, not {bins}")
    if not len(time_ns):
        nothing = np.full(bins, np.nan)
        return Bins(float(start_ns or 0), 1.0, nothing, nothing.copy(), np.zeros(bins, dtype=np.int64))
    start = float(time_ns.min()) if start_ns is None else float(start_ns)
    end = float(time_ns.max()) + 1.0 if end_ns is None else float(end_ns)
    if np.any(time_ns[1:] < time_ns[:-1]):
        order = np.argsort(time_ns, kind="stable")
        time_ns, value = time_ns[order], value[order]
    width = max((end - start) / bins, 1e-9)
    edges = start + width * np.arange(1, bins)
    if time_ns.dtype.kind == "i":  # whole numbers are looked up as such: no copy of the times as floats
        edges = np.ceil(edges).astype(np.int64)
    bounds = np.concatenate([[0], np.searchsorted(time_ns, edges), [len(time_ns)]])
    count = np.diff(bounds)
    used = np.flatnonzero(count)
    first = bounds[:-1][used]
    high, low = np.full(bins, np.nan), np.full(bins, np.nan)
    high[used] = np.fmax.reduceat(value, first)  # a NaN, from which on a level is not known, hides no other value
    low[used] = np.fmin.reduceat(value, first)
    return Bins(start, width, high, low, count)


def bin_step(time_ns: Array, level: Array, bins: int, start_ns: float, end_ns: float) -> Bins:
    """Maximum and minimum in each bin of a step function: `level[i]` holds from `time_ns[i]` to `time_ns[i + 1]`.

    A bin without a step carries the level that still holds, so an idle queue and a full one are told apart.
    """
    if not len(time_ns):
        return bin_max(time_ns, level, bins, start_ns, end_ns)
    if np.any(time_ns[1:] < time_ns[:-1]):
        order = np.argsort(time_ns, kind="stable")
        time_ns, level = time_ns[order], level[order]
    found = bin_max(time_ns, level, bins, start_ns, end_ns)
    edges = found.start_ns + found.width_ns * np.arange(bins)
    before = np.searchsorted(time_ns, edges, side="right") - 1
    carried = np.where(before >= 0, level[np.maximum(before, 0)].astype(np.float64), 0.0)
    return Bins(found.start_ns, found.width_ns, np.fmax(found.high, carried), np.fmin(found.low, carried), found.count)


def histogram(dur_ns: Array) -> Array:
    """Durations counted into the 128 buckets, int64."""
    return np.bincount(bucket(dur_ns), minlength=BUCKETS)[:BUCKETS].astype(np.int64)


def heat(time_ns: Array, dur_ns: Array, columns: int, start_ns: float, end_ns: float) -> tuple[Array, float, int]:
    """Calls counted by time and duration.

    Returns:
        counts of shape (columns, rows), the width of a column in nanoseconds, and the bucket that row 0 stands for
        (rows are buckets of two to the octave: kvp.h's, paired).
    """
    column, width = _index(time_ns, columns, start_ns, end_ns)
    row = bucket(dur_ns) >> 1
    if not len(row):
        return np.zeros((columns, 1), dtype=np.int64), width, 0
    low, high = int(row.min()), int(row.max())
    rows = high - low + 1
    counts = np.bincount(column * rows + (row - low), minlength=columns * rows)
    return counts.reshape(columns, rows), width, low * 2


def slowest(dur_ns: Array, keep: int) -> Array:
    """Indexes of the `keep` longest durations, in the order they occurred."""
    if len(dur_ns) <= keep:
        return np.arange(len(dur_ns))
    rows = np.arange(len(dur_ns)) if len(dur_ns) < 50 * keep else _upper(dur_ns, keep)
    return rows[np.sort(np.argpartition(dur_ns[rows], len(rows) - keep)[-keep:])]


def _upper(values: Array, keep: int) -> Array:
    """Rows that hold the `keep` largest values and not many more, without ordering all of them."""
    sample = values[:: max(1, len(values) // 65536)]
    share = min(1.0, 4 * keep / len(values) + 16 / len(sample))
    at = np.partition(sample, max(int((1 - share) * len(sample)) - 1, 0))[max(int((1 - share) * len(sample)) - 1, 0)]
    rows = np.flatnonzero(values >= at)
    return rows if len(rows) >= keep else np.arange(len(values))
