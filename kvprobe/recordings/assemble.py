"""What every reader does with its columns at the end: rows for streams, calls joined with what they executed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt

from kvprobe.errors import plain
from kvprobe.recordings.intervals import distinct
from kvprobe.recordings.model import Array, Recording, Table
from kvprobe.recordings.vocabulary import as_text

__all__ = [
    "GrowingColumn",
    "rows_in_time",
    "among",
    "bounded",
    "codes",
    "constant",
    "correlation_keys",
    "join",
    "match",
    "narrowed",
    "pairs",
    "pieces",
    "positions",
    "quantile",
    "quantiles",
    "rows_of",
    "sorted_table",
    "spans",
    "stream_rows",
]

_FEW = 16  # values that are looked for one by one
_CORRELATION_LIMIT = 1 << 40  # ids are 32 bit; anything above comes from a damaged file and joins with nothing


def correlation_keys(process: Array, correlation: Array) -> Array:
    """(rows,) int64 keys that are equal exactly where process and correlation are; -1 where there is none."""
    valid = (correlation >= 0) & (correlation < _CORRELATION_LIMIT)
    keys = np.asarray(process, dtype=np.int64) * _CORRELATION_LIMIT + correlation
    return np.where(valid, keys, np.int64(-1))


def match(process: Array, correlation: Array, of_process: Array, of_correlation: Array) -> tuple[Array, Array]:
    """Joins rows by process and correlation id, ids of these rows with ids of others.

    Ids count up in practice, so a table of all of them joins in one pass; ids from anywhere are sorted and searched.

    Returns:
        For each of these rows, one row of them with its id (itself, where ids do not repeat); and for each of the
        others, the same one row; int32, -1 where there is none.
    """
    low, high = _range(correlation)
    processes = int(process.max(initial=-1)) + 1
    stride = high - low + 1
    size = processes * stride
    if size > 4 * (len(correlation) + len(of_correlation)) + 1_000_000:
        return _match_sorted(correlation_keys(process, correlation), correlation_keys(of_process, of_correlation))

    def place(processes_: Array, ids: Array) -> Array:
        at = ids - low
        outside = (at < 0) | (at >= stride)
        if processes > 1 or processes_.max(initial=0) > 0 or processes_.min(initial=0) < 0:
            outside |= (processes_ < 0) | (processes_ >= processes)
            at += processes_.astype(np.int64) * stride
        at[outside] = size  # one place more, where nothing stays
        return np.asarray(at)

    table = np.full(size + 1, -1, dtype=np.int32)
    for part in pieces(len(correlation)):
        table[place(process[part], correlation[part])] = np.arange(part.start, part.stop, dtype=np.int32)
    table[size] = -1
    found = []
    for processes_, ids in ((process, correlation), (of_process, of_correlation)):
        out = np.empty(len(ids), dtype=np.int32)
        for part in pieces(len(ids)):
            out[part] = table[place(processes_[part], ids[part])]
        found.append(out)
    return found[0], found[1]


def pieces(rows: int, most: int = 1 << 18) -> Iterator[slice]:
    """Stretches of rows whose temporaries stay in the cache instead of doubling the recording."""
    for start in range(0, rows, most):
        yield slice(start, min(start + most, rows))


def _range(ids: Array) -> tuple[int, int]:
    """Lowest and highest of the valid ids; (0, -1) where there is none."""
    if not len(ids):
        return 0, -1
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= _CORRELATION_LIMIT:
        ids = ids[(ids >= 0) & (ids < _CORRELATION_LIMIT)]
        low, high = (int(ids.min()), int(ids.max())) if len(ids) else (0, -1)
    return low, high


def _match_sorted(keys: Array, of_keys: Array) -> tuple[Array, Array]:
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    first = np.concatenate([[True], ordered[1:] != ordered[:-1]])
    representative = order[np.flatnonzero(first)[np.cumsum(first) - 1]]
    one = np.empty(len(keys), dtype=np.int32)
    one[order] = np.where(ordered >= 0, representative, -1)
    at = np.minimum(np.searchsorted(ordered, of_keys), len(keys) - 1)
    theirs = np.where((of_keys >= 0) & (ordered[at] == of_keys), representative[at], -1)
    return one, theirs.astype(np.int32)


def spans(owner: Array, start: Array, end: Array, rows: int, absent: int) -> tuple[Array, Array]:
    """First start and last end of the intervals that each of `rows` owns, (rows,) int64; `absent` where it owns none.

    Args:
        owner: which row owns each interval, -1 for none.
        start: of each interval, ns; `end` likewise.
        end: see there.
        rows: how many can own some.
        absent: what stands for no interval.
    """
    first, last = np.full(rows, absent, dtype=np.int64), np.full(rows, absent, dtype=np.int64)
    taken = np.zeros(rows, dtype=bool)
    owned = 0
    for part in pieces(len(owner)):
        mine = owner[part]
        theirs = np.flatnonzero(mine >= 0)
        mine = mine[theirs]
        first[mine], last[mine], taken[mine] = start[part][theirs], end[part][theirs], True
        owned += len(mine)
    if owned > int(np.count_nonzero(taken)):  # some own several
        theirs = np.flatnonzero(owner >= 0)
        np.minimum.at(first, owner[theirs], start[theirs])
        np.maximum.at(last, owner[theirs], end[theirs])
    return first, last


def codes(column: Array) -> tuple[Array, Array]:
    """The different values of a column of integers, ascending, and each row's place among them, (rows,) integers."""
    if not len(column):
        return np.zeros(0, dtype=column.dtype), np.zeros(0, dtype=np.int32)
    if constant(column):
        return np.array(column[:1]), np.broadcast_to(np.int32(0), (len(column),))
    low, high = int(column.min()), int(column.max())
    if high - low < 1 << 20:
        shifted = column - low if low else column
        used = distinct(shifted)
        if len(used) > high - low:
            return (used + low).astype(column.dtype), shifted.astype(np.int32, copy=False)
        places = np.zeros(high - low + 1, dtype=np.int32)
        places[used] = np.arange(len(used))
        return (used + low).astype(column.dtype), places[shifted]
    edges = np.flatnonzero(np.concatenate([[True], column[1:] != column[:-1]]))
    if 4 * len(edges) < len(column):  # long runs, as of thread ids
        values, inverse = np.unique(column[edges], return_inverse=True)
        return values, np.repeat(inverse.astype(np.int32), np.diff(np.append(edges, len(column))))
    values, inverse = np.unique(column, return_inverse=True)
    return values, inverse


def pairs(first: Array, second: Array) -> tuple[list[tuple[int, int]], Array]:
    """The different pairs of two columns of integers, ascending, and each row's place among them, (rows,) integers."""
    (a, a_at), (b, b_at) = codes(first), codes(second)
    if len(a) <= 1:
        return [(int(one), int(other)) for one in a.tolist() for other in b.tolist()], b_at
    used, place = codes(a_at.astype(np.int64) * len(b) + b_at)
    return [(int(a[key // len(b)]), int(b[key % len(b)])) for key in used.tolist()], place


def positions(place: Array, many: int) -> list[Array]:
    """Where each of the codes 0 to `many` - 1 stands, ascending, as `codes` and `pairs` number them."""
    if many == 1:
        return [np.arange(len(place))]
    if many <= 16:  # a pass for each costs less than an order of all
        return [np.flatnonzero(place == code) for code in range(many)]
    order = np.argsort(place, kind="stable")
    return np.split(order, np.cumsum(np.bincount(place, minlength=many))[:-1])


def rows_of(mask: Array) -> Array:
    """The rows of a mask, (rows,) int32: half the memory of numpy's own, for those that are kept."""
    if mask.all():
        return np.arange(len(mask), dtype=np.int32)
    return np.flatnonzero(mask).astype(np.int32)


def constant(column: Array) -> bool:
    """Whether all rows of a column that has some are one value."""
    if column.strides == (0,):
        return True
    return bool(column[0] == column[-1]) and bool((column == column[0]).all())


# numpy.unique, isin and percentile load numpy.ma when first used, 10 to 25 ms: a third of what a small trace takes.


def among(values: Array, wanted: Iterable[int]) -> Array:
    """Which of these integers are among the wanted ones, (rows,) bool: of few, a comparison for each costs least."""
    ones = [int(one) for one in wanted]
    if len(ones) > _FEW:
        return np.isin(values, ones)
    mask = np.zeros(len(values), dtype=bool)
    for one in ones:
        mask |= values == one
    return mask


def join(parts: list[Array], place: Array | None = None) -> Array:
    """One array of its parts, which are taken out of the list; a single value throughout is stored once.

    `place`: where each row goes, (rows,) int64; default: behind the one before it.
    """
    if not parts:
        return np.zeros(0, dtype=np.int64)
    length = sum(len(part) for part in parts)
    if length > 1:
        value = next(part[0] for part in parts if len(part))
        if all(not len(part) or (part[0] == value and constant(part)) for part in parts):
            dtype = np.result_type(*parts)
            parts.clear()
            return np.broadcast_to(np.array(value, dtype=dtype), (length,))
    if place is None:
        out = np.concatenate(parts)
    else:
        out = np.empty(length, dtype=np.result_type(*parts))
        end = 0
        for part in parts:
            begin, end = end, end + len(part)
            out[place[begin:end]] = part
    parts.clear()
    return out


class GrowingColumn:
    """A column of int64 that arrives in parts: one value for as long as it is one, then one array.

    Parts that are joined at the end need their memory twice, and leave holes that no longer array fits into.
    """

    def __init__(self, expected: int) -> None:
        """`expected` rows get memory at once where they do not all hold one value; more may come."""
        self.rows = 0
        self._expected = expected
        self._value: Array | None = None
        self._all: Array | None = None

    def add(self, values: Array) -> None:
        """Appends a part, which is copied."""
        if not len(values):
            return
        rows, self.rows = self.rows, self.rows + len(values)
        if self._all is None:
            if self._value is None:
                self._value = values[:1].copy()
            if values[0] == self._value[0] and constant(values):
                return
            self._all = np.empty(max(self._expected, self.rows), dtype=np.int64)
            self._all[:rows] = self._value
        elif self.rows > len(self._all):
            self._all = np.concatenate([self._all[:rows], np.empty(max(rows, len(values)), dtype=np.int64)])
        self._all[rows : self.rows] = values

    def whole(self) -> Array:
        """The column, (rows,) int64; read-only where one value is stored for all."""
        if self._all is not None:
            return self._all[: self.rows]
        return np.broadcast_to(self._value[0] if self._value is not None else np.int64(0), (self.rows,))


def narrowed(column: Array, dtype: npt.DTypeLike) -> Array:
    """The column as integers of fewer bytes, cut to their range; one value throughout stays stored once."""
    limits = np.iinfo(dtype)
    if column.strides == (0,):
        return np.broadcast_to(np.clip(column[:1], limits.min, limits.max).astype(dtype), (len(column),))
    return np.asarray(np.clip(column, limits.min, limits.max).astype(dtype))


def stream_rows(process: Array, device: Array, handle: Array) -> tuple[Array, dict[str, Array]]:
    """Gives each distinct (process, device, handle) a row of the `streams` table.

    Returns:
        The row of each input, (rows,) int32, -1 where the handle is below 0; and the columns of `streams`.
    """
    known: Array | slice = handle >= 0
    if np.asarray(known).all():
        known = slice(None)
    columns = [column[known] for column in (process, device, handle)]
    if not len(columns[0]):
        return np.full(len(handle), -1, dtype=np.int32), {
            "process": np.zeros(0, np.int32),
            "device": np.zeros(0, np.int32),
            "handle": np.zeros(0, np.int64),
        }
    (p, p_at), (d, d_at), (h, h_at) = (codes(column) for column in columns)
    key = (p_at.astype(np.int64) * len(d) + d_at) * len(h) + h_at if len(p) * len(d) > 1 else h_at
    used, place = codes(key)
    rows = np.full(len(handle), -1, dtype=np.int32)
    rows[known] = place
    return rows, {
        "process": p[used // (len(d) * len(h))].astype(np.int32),
        "device": d[used // len(h) % len(d)].astype(np.int32),
        "handle": h[used % len(h)].astype(np.int64),
    }


def sorted_table(kind: str, columns: dict[str, Array], by: str = "start_ns") -> Table:
    """A table whose rows are ordered by time; columns are consumed one by one to keep the peak low."""
    times = columns.get(by)
    if times is not None and len(times) > 1 and np.any(times[1:] < times[:-1]):
        order = np.argsort(times, kind="stable")
        for name, column in columns.items():
            if column.strides != (0,):
                columns[name] = column[order]
    return Table(kind, columns)


def rows_in_time(parts: list[dict[str, Array]], by: str) -> dict[str, Array]:
    """The rows of all parts in order of time, of equal times those of an earlier part first; the parts are emptied.

    Each value goes to its place at once, where parts that are joined and then sorted are copied twice.
    """
    if not parts:
        return {}
    times = join([part[by] for part in parts])
    place: Array | None = None
    if (times[1:] < times[:-1]).any():
        order = np.argsort(times, kind="stable")
        place = np.empty(len(order), dtype=np.int64)
        place[order] = np.arange(len(order))
        del order
    elif len(parts) == 1:
        return parts.pop()
    del times
    return {name: join([part.pop(name) for part in parts], place) for name in list(parts[0])}


_MOST_CALLS = 2**40  # in a bucket of a histogram: sums over all of them fit
LARGEST = 2**61  # of a time (in the year 2043), a size, a count or a number of something


def bounded(recording: Recording) -> Recording:
    """The recording, with numbers that no recorder writes cut so that what is computed of them fits into 64 bits.

    Of its texts, those that are no Unicode (JSON can write half a surrogate pair) are made such.
    """
    cut = 0
    for kind, table in recording.tables.items():
        changed: dict[str, Array] = {}
        for name, column in table.columns.items() if table.rows else ():
            some = column[:1] if column.strides == (0,) else column
            if column.dtype == np.int64 and (some.min() < -LARGEST or some.max() > LARGEST):
                changed[name] = np.clip(column, -LARGEST, LARGEST)
            elif column.dtype == np.float64 and not np.abs(some).max() <= LARGEST:  # or it is no number
                changed[name] = np.clip(np.nan_to_num(column), -LARGEST, LARGEST)
            else:
                continue
            cut += int((changed[name] != column).sum())
        if {"start_ns", "end_ns"} & set(changed):  # nor are durations compared beyond what fits
            starts, ends = (changed.get(name, table.columns[name]) for name in ("start_ns", "end_ns"))
            changed["end_ns"] = np.maximum(starts, ends)
        if changed:
            recording.tables[kind] = Table(kind, {**table.columns, **changed})
    counts = recording.histograms
    if counts.size and (counts.min() < 0 or counts.max() > _MOST_CALLS):
        recording.histograms = np.clip(counts, 0, _MOST_CALLS)
        cut += int((recording.histograms != counts).sum())
    if not -LARGEST <= recording.machine.get("unix_offset_ns", 0) <= LARGEST:
        del recording.machine["unix_offset_ns"]
        cut += 1
    for part in (recording.machine, recording.machine_how):
        part.update({name: as_text(value) for name, value in part.items() if isinstance(value, str)})
    for lines in (recording.notes, recording.incomplete):
        lines[:] = map(plain, lines)  # they quote what a damaged file holds
    for source in recording.source:
        source.tool, source.command = as_text(source.tool), as_text(source.command)
    if cut:
        said = f"{cut:,} times or sizes are beyond what any recorder writes and were cut: the recording is damaged"
        recording.notes.append(said)
        recording.incomplete.append(said)
    return recording


def quantile(values: Array, share: float) -> float:
    """The value below which this share of the values lies."""
    return quantiles(values, share)[0]


def quantiles(values: Array, *shares: float) -> list[float]:
    """The values below which these shares of the values lie; all cost little more than one."""
    at = [round(share * (len(values) - 1)) for share in shares]
    parted = np.partition(values, at)
    return [float(parted[one]) for one in at]
