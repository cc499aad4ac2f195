"""The histogram of durations that every part of kvprobe counts with: 128 buckets, four to the octave, as in kvp.h."""

from __future__ import annotations

import numpy as np

from kvprobe.probe.ring import BUCKETS
from kvprobe.recordings.model import Array

__all__ = ["BUCKETS", "bucket", "bucket_floor_ns"]

_PIECE = 1 << 17
_BIAS = 1023  # of a float64's exponent


def bucket(dur_ns: Array) -> Array:
    """Bucket of each duration as `kvp_bucket` in kvp.h, (n,) uint8; negative ones count as 0."""
    dur_ns = np.asarray(dur_ns, dtype=np.int64)
    out = np.empty(len(dur_ns), dtype=np.uint8)
    for start in range(0, len(dur_ns), _PIECE):
        value = np.maximum(dur_ns[start : start + _PIECE], 0)
        # As a float64, exact below 2**53 ns (104 days): its exponent and the first two bits of its fraction.
        found = (value.astype(np.float64).view(np.int64) >> 50) - (_BIAS + 1) * 4
        out[start : start + _PIECE] = np.where(value < 4, value, np.minimum(found, BUCKETS - 1))
    return out


def bucket_floor_ns(index: Array | int) -> Array:
    """Lower bound of a bucket, nanoseconds."""
    b = np.asarray(index, dtype=np.int64)
    return np.where(b < 4, b, (4 + b % 4) << np.maximum(b // 4 - 1, 0))
