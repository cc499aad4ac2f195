"""Mutators that know a format: JSON subtrees, SQLite pages and rows, ring sections, Parquet and Arrow files, gzip."""

from __future__ import annotations

import functools
import gzip
import io
import random
import re
import sqlite3
import struct
from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet

from kvprobe.probe.ring import FILE, HEADER_BYTES, RECORD, SECTION, SLOT

Mutate = Callable[[bytes, random.Random], bytes]

HOSTILE = (
    "</script><script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "\x1b]0;owned\x07\x1b[31m",
    "../../../../tmp/kvprobe-escaped",
    "a\nb\r\n::error file=/etc/passwd::c%0A",
    '=HYPERLINK("http://x","y")',
    '{label="x"} 1\n# EOF',
    "\u202etxt.exe\u2066",
    "]]><!--",
    "\x00",
    "[bold red]x[/]",
    "x" * 5000,
)
INTEGERS = (0, 1, 2, 127, 255, 256, 32767, 65535, 1 << 20, 1 << 24, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32)
LONG = (*INTEGERS, 1 << 40, 1 << 53, 1 << 61, 1 << 62, (1 << 62) + 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)
ODD = (
    *(str(number).encode() for number in (*LONG, -1, -(1 << 31) - 1, -(1 << 63), 10**40)),
    *(b"null true false [] {} [[]] 0.5 1e300 1e999 -1e-400 NaN Infinity -inf 1e19 -0 00 0x1".split()),
    b'""',
    b'"x"',
    b'"\\ud800"',
    b'"12"',
    b'{"a":1}',
    b"[" * 3000,
    b"[" * 3000 + b"]" * 3000,
    b'{"a":' * 2000,
)


def mutate_bytes(data: bytes, rng: random.Random) -> bytes:
    """Bits flipped, pieces deleted, doubled, moved, replaced, cut."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 3, 10))):
        if not out:
            break
        at, what = rng.randrange(len(out)), rng.randrange(9)
        size = rng.choice((1, 2, 4, 8, 64, 500))
        if what == 0:
            out[at] ^= 1 << rng.randrange(8)
        elif what == 1:
            out[at : at + size] = rng.randbytes(size)
        elif what == 2:
            del out[at : at + size]
        elif what == 3:
            out[at:at] = out[at : at + size]
        elif what == 4:
            out[at : at + 4] = b"\xff\xff\xff\x7f"
        elif what == 5:
            out[at : at + size] = bytes(size)
        elif what == 6:
            out[at : at + 8] = b"\xff" * 8
        elif what == 7:
            width, order = rng.choice((1, 2, 4, 8)), rng.choice(("little", "big"))
            out[at : at + width] = (rng.choice(LONG) & ((1 << 8 * width) - 1)).to_bytes(width, order)
        else:
            source = rng.randrange(len(out))
            out[at : at + size] = out[source : source + size]
    return bytes(out[: rng.randrange(len(out))]) if out and rng.random() < 0.1 else bytes(out)


# ---- JSON ------------------------------------------------------------------------------------------------------------

_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*"|-?\d[0-9.eE+-]*|true|false|null|[\[\]{}]')


@functools.lru_cache(maxsize=64)
def _tokens(data: bytes) -> tuple[list[tuple[int, int]], dict[int, int]]:
    """Where each token stands, and for every bracket that closes where (by number of token)."""
    spans = [match.span() for match in _TOKEN.finditer(data)]
    closing: dict[int, int] = {}
    stack = []
    for number, (start, _) in enumerate(spans):
        if data[start] in b"[{":
            stack.append(number)
        elif data[start] in b"]}" and stack:
            closing[stack.pop()] = number
    return spans, closing


def mutate_json(data: bytes, rng: random.Random) -> bytes:
    """Values replaced by odd ones or each other, subtrees deleted, doubled, moved and wrapped, in any text of JSON."""
    if rng.random() < 0.12:
        return mutate_bytes(data, rng)
    spans, closing = _tokens(data)
    if not spans:
        return mutate_bytes(data, rng)
    edits: dict[int, tuple[int, bytes]] = {}  # start -> end, what stands there instead
    for _ in range(rng.choice((1, 1, 2, 5))):
        number = rng.randrange(len(spans))
        start, end = spans[number]
        what = rng.randrange(10)
        if data[start] in b"[{]}" and number in closing and what < 8:
            end = spans[closing[number]][1]
            tree = data[start:end]
            if what < 2:
                new = b""
            elif what < 4:
                new = tree + b"," + tree
            elif what < 5:
                new = b"[" * (depth := rng.choice((1, 50, 2000))) + tree + b"]" * depth
            elif what < 6:
                new = rng.choice(ODD)
            else:
                other = spans[rng.choice(list(closing))] if closing else spans[number]
                new = tree + b"," + data[other[0] : other[1]]
        elif data[start : start + 1] == b'"' and what < 4:
            new = _quoted(rng.choice(HOSTILE))
        elif data[start : start + 1].isdigit() and what < 4:
            new = _number(data[start:end], rng)
        elif what < 7:
            new = rng.choice(ODD)
        elif what < 9:
            other = spans[rng.randrange(len(spans))]
            new = data[other[0] : other[1]]
        else:
            new = b""
        edits.setdefault(start, (end, new))
    out, at = [], 0
    for start in sorted(edits):
        if start < at:
            continue
        end, new = edits[start]
        out += [data[at:start], new]
        at = end
    text = b"".join([*out, data[at:]])
    return text[: rng.randrange(len(text) + 1)] if rng.random() < 0.03 else text


def _quoted(text: str) -> bytes:
    import json

    return json.dumps(text).encode()


def _number(text: bytes, rng: random.Random) -> bytes:
    try:
        value = float(text) if b"." in text or b"e" in text.lower() else int(text)
    except ValueError:
        return b"1"
    return str(
        rng.choice((value + 1, value - 1, -value, value * 1000, value // 1000, value * 2, value / 3, value + (1 << 40)))
    ).encode()


# ---- SQLite ----------------------------------------------------------------------------------------------------------

_HEADER = ((16, 2), (18, 1), (19, 1), (20, 1), (21, 1), (22, 1), (23, 1), (24, 4), (28, 4), (32, 4), (36, 4), (40, 4))
_HEADER += ((44, 4), (48, 4), (52, 4), (56, 4), (60, 4), (64, 4), (68, 4), (72, 4), (92, 4), (96, 4))


_OF_A_SCHEMA = re.compile(rb"INTEGER|TEXT|REAL|CREATE TABLE|start|NOT NULL|PRIMARY KEY")


def mutate_sqlite(data: bytes, rng: random.Random) -> bytes:
    """Rows and tables changed by SQL; header fields, b-tree pages, cell pointers, cells, the schema's text."""
    what = rng.randrange(10)
    if what < 4:
        return _by_sql(data, rng)
    if what == 9:
        return mutate_bytes(data, rng)
    out = bytearray(data)
    size = int.from_bytes(data[16:18], "big")
    pages = len(data) // max(size, 512)
    if size < 512 or not pages:
        return mutate_bytes(data, rng)
    for _ in range(rng.choice((1, 1, 2, 4))):
        page = rng.randrange(pages) * size
        head = page + (100 if page == 0 else 0)
        kind = rng.randrange(9)
        leaf = data[head] in (10, 13)
        count = int.from_bytes(data[head + 3 : head + 5], "big")
        pointers = head + (8 if leaf else 12)
        if kind == 0:
            at, width = rng.choice(_HEADER)
            _put(out, at, width, rng)
        elif kind == 1:
            at, width = rng.choice(((0, 1), (1, 2), (3, 2), (5, 2), (7, 1), (8, 4)))
            _put(out, head + at, width, rng, pages)
        elif kind == 2 and count:
            _put(out, pointers + 2 * rng.randrange(count), 2, rng, size)
        elif kind in (3, 4, 5) and count and pointers + 2 * count <= len(data):
            place = pointers + 2 * rng.randrange(count)
            cell = page + int.from_bytes(data[place : place + 2], "big")
            # the start of a cell: child, payload's length, row id, the record's header with its types
            at = cell + rng.randrange(4 if not leaf else rng.choice((2, 6, 24, 60)))
            if at < len(out):
                out[at] = rng.choice((0, 1, 6, 7, 8, 9, 10, 11, 12, 13, 0x7F, 0x80, 0x81, 0xFF, rng.randrange(256)))
        elif kind == 6:
            other = rng.randrange(pages) * size
            out[page : page + size] = data[other : other + size]
        elif kind == 7 and (words := list(_OF_A_SCHEMA.finditer(data))):
            match = rng.choice(words)
            word = rng.choice((b"TEXT", b"BLOB", b"REAL", b"VIEW", b"end", b"", b"\xff\xfe", b"DEFAULT 7"))
            out[match.start() : match.end()] = word.ljust(match.end() - match.start())[: match.end() - match.start()]
        elif rng.random() < 0.5:
            del out[rng.randrange(pages) * size + rng.choice((0, 0, 7)) :]
        else:
            out[page : page + size] = bytes(size)
    return bytes(out)


def _put(out: bytearray, at: int, width: int, rng: random.Random, near: int = 0) -> None:
    value = rng.choice((*INTEGERS, near, near + 1, rng.randrange(near + 1), rng.randrange(256)))
    if at + width <= len(out):
        out[at : at + width] = (value & ((1 << 8 * width) - 1)).to_bytes(width, "big")


@functools.lru_cache(maxsize=32)
def _columns(data: bytes) -> list[tuple[str, str]]:
    db = _opened(data)
    names = [name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    return [(name, str(row[1])) for name in names for row in db.execute(f'PRAGMA table_info("{name}")')]


def _opened(data: bytes) -> sqlite3.Connection:
    db = sqlite3.connect(":memory:")
    db.deserialize(data)
    db.execute("PRAGMA journal_mode=OFF")
    return db


def _by_sql(data: bytes, rng: random.Random) -> bytes:
    """A sound file with odd contents; of a mutant that SQLite cannot change, its bytes mutated."""
    try:
        pairs = _columns(data)
        db = _opened(data)
        for _ in range(rng.choice((1, 1, 3))):
            table, column = rng.choice(pairs)
            value = _sql_value(rng)
            rows = rng.choice(("1", "rowid = 1", "rowid % 2", f"rowid = {rng.randrange(1, 40)}"))
            what = rng.randrange(12)
            if what < 6:
                db.execute(f'UPDATE OR IGNORE "{table}" SET "{column}" = ? WHERE {rows}', (value,))
            elif what == 6:
                db.execute(f'DELETE FROM "{table}" WHERE {rows}')
            elif what == 7:
                db.execute(f'ALTER TABLE "{table}" DROP COLUMN "{column}"')
            elif what == 8:
                db.execute(f'ALTER TABLE "{table}" ADD COLUMN "{rng.choice(pairs)[1]}" TEXT DEFAULT \'7\'')
            elif what == 9:
                db.execute(f'INSERT OR IGNORE INTO "{table}" SELECT * FROM "{table}" WHERE {rows}')
            elif what == 10:
                operation = rng.choice(("+ 1000000000000", "* -1", "/ 7", "* 1e10", "|| 'x'", "<< 40"))
                db.execute(f'UPDATE OR IGNORE "{table}" SET "{column}" = "{column}" {operation} WHERE {rows}')
            else:
                db.execute(f'ALTER TABLE "{table}" RENAME TO "old"')
                db.execute(f'CREATE {rng.choice(("VIEW", "TEMP VIEW"))} "{table}" AS SELECT * FROM "old"')
        return db.serialize()
    except (sqlite3.Error, IndexError, OverflowError, UnicodeError, MemoryError):  # the last of a damaged cell, too
        return mutate_bytes(data, rng)


def _sql_value(rng: random.Random) -> object:
    number = rng.choice(LONG)
    return rng.choice(
        (
            *(None, -1, number if number < 1 << 63 else -(1 << 63), -(number >> 2), 1e300, float("inf"), 0.5),
            *(b"\xff\xfe\x00", rng.choice(HOSTILE), "7", b"x" * 3000),
        )
    )


# ---- ring files ------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=64)
def _places(data: bytes) -> list[tuple[int, int, str]]:
    """Every field of the header, the sections, and their first slots and records: offset, width, kind of numpy."""
    out: list[tuple[int, int, str]] = []

    def fields(dtype: np.dtype, base: int) -> None:
        for name, (inner, offset, *_) in dtype.fields.items():
            if inner.subdtype:
                unit, (many,) = inner.subdtype
                out.extend((base + offset + i * unit.itemsize, unit.itemsize, "u") for i in (0, 1, many - 1))
            elif name != "pad":
                out.append((base + offset, inner.itemsize, inner.kind))

    for _ in range(4):  # the header and the sections weigh as much as all slots and records
        fields(FILE, 0)
    header = np.frombuffer(data[: FILE.itemsize], FILE)[0]
    slots, ring, step = (int(header[name]) for name in ("slot_count", "ring_capacity", "section_bytes"))
    for number in range(min(int(header["sections_used"]), 4)):
        at = HEADER_BYTES + number * step
        for _ in range(4):
            fields(SECTION, at)
        for i in range(min(slots, 4)):
            fields(SLOT, at + HEADER_BYTES + i * SLOT.itemsize)
        for i in range(min(ring, 12)):
            fields(RECORD, at + HEADER_BYTES + slots * SLOT.itemsize + i * RECORD.itemsize)
    return [place for place in out if place[0] + place[1] <= len(data)]


def mutate_ring(data: bytes, rng: random.Random) -> bytes:
    """Fields of the header, of sections, slots and records; sections over each other; cut."""
    if rng.random() < 0.1 or len(data) < FILE.itemsize:
        return mutate_bytes(data, rng)
    try:
        places = _places(data)
    except (ValueError, OverflowError):
        return mutate_bytes(data, rng)
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 6))):
        at, width, kind = rng.choice(places)
        if kind == "S":
            out[at : at + width] = rng.choice(HOSTILE).encode("utf-8", "replace")[:width].ljust(width, b"\0")
            continue
        old = int.from_bytes(out[at : at + width], "little")
        value = rng.choice((*LONG, old + 1, old - 1, old * 2, old + 10**9, old << 32, rng.getrandbits(64)))
        out[at : at + width] = (value & ((1 << 8 * width) - 1)).to_bytes(width, "little")
    if rng.random() < 0.08:
        out[HEADER_BYTES : 2 * HEADER_BYTES] = out[-HEADER_BYTES:]
    return bytes(out[: rng.randrange(len(out))]) if rng.random() < 0.08 else bytes(out)


# ---- Parquet and Arrow -----------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=256)
def _parquet_table(data: bytes) -> pa.Table:
    table = pyarrow.parquet.read_table(io.BytesIO(data), use_threads=False)
    table.validate(full=True)
    return table


def mutate_parquet(data: bytes, rng: random.Random) -> bytes:
    """Columns of other types and contents; the footer, its length, the headers of pages."""
    if rng.random() < 0.35:
        try:
            table = _odd_table(_parquet_table(data), rng)
            pyarrow.parquet.write_table(
                table,
                out := io.BytesIO(),
                compression=rng.choice(("none", "snappy", "zstd", "gzip")),
                use_dictionary=rng.random() < 0.5,
                version=rng.choice(("1.0", "2.6")),
                row_group_size=rng.choice((3, 1000)),
            )
            return out.getvalue()
        except (pa.ArrowException, ValueError, KeyError, TypeError, OverflowError, OSError):
            pass  # of a mutant, or a type that Parquet does not have
    footer = int.from_bytes(data[-8:-4], "little")
    out = bytearray(data)
    start = len(data) - 8 - footer
    for _ in range(rng.choice((1, 1, 3))):
        where = rng.randrange(10)
        if where < 6 and 0 < start < len(out) - 8:
            at = rng.randrange(start, len(out) - 8)
        elif where < 7 and len(out) > 8:
            at = len(out) - 8 + rng.randrange(4)
        else:
            at = rng.randrange(4, max(len(out), 5))
        if at < len(out):
            out[at] = rng.choice((0, 1, 2, 0x0C, 0x15, 0x18, 0x19, 0x7F, 0x80, 0xFE, 0xFF, rng.randrange(256)))
    return mutate_bytes(bytes(out), rng) if rng.random() < 0.05 else bytes(out)


@functools.lru_cache(maxsize=256)
def _arrow_table(data: bytes) -> pa.Table:
    table = pyarrow.feather.read_table(io.BytesIO(data))
    table.validate(full=True)
    return table


def mutate_arrow(data: bytes, rng: random.Random) -> bytes:
    """Columns of other types and contents; the metadata, offsets and lengths of buffers."""
    if rng.random() < 0.35:
        try:
            table = _odd_table(_arrow_table(data), rng)
            out = io.BytesIO()
            writer = pa.ipc.new_file if rng.random() < 0.7 else pa.ipc.new_stream
            with writer(out, table.schema) as sink:
                sink.write_table(table, max_chunksize=rng.choice((3, 1000)))
            return out.getvalue()
        except (pa.ArrowException, ValueError, KeyError, TypeError, OverflowError, OSError):
            pass
    out = bytearray(data)
    for _ in range(rng.choice((1, 2, 4))):
        at = rng.randrange(0, max(len(out) - 8, 1)) & ~3
        what = rng.randrange(4)
        if what == 0:
            out[at : at + 4] = struct.pack("<i", rng.choice((-1, 0, 1, 7, 255, 65536, 1 << 24, (1 << 31) - 1)))
        elif what == 1:
            out[at : at + 8] = struct.pack("<q", rng.choice((-1, 0, 64, 1 << 20, 1 << 33, (1 << 62), (1 << 63) - 1)))
        elif what == 2 and at < len(out):
            out[at] = rng.randrange(256)
        else:
            return mutate_bytes(bytes(out), rng)
    return bytes(out)


def _odd_table(table: pa.Table, rng: random.Random) -> pa.Table:
    for _ in range(rng.choice((1, 1, 3))):
        if not table.num_columns:
            break
        at = rng.randrange(table.num_columns)
        name, rows = table.column_names[at], table.num_rows
        what = rng.randrange(10)
        if what == 0:
            table = table.remove_column(at)
        elif what == 1:
            table = table.append_column(name, table[name]) if rng.random() < 0.5 else table.slice(0, rows // 2)
        else:
            table = table.set_column(at, name, _odd_column(table.column(at), rows, rng))
    return table


def _odd_column(column: pa.ChunkedArray, rows: int, rng: random.Random) -> pa.Array:
    what = rng.randrange(8)
    some = rng.choice(LONG)
    number = min(some, (1 << 63) - 1)
    if what == 0:
        return pa.array([rng.choice(HOSTILE) for _ in range(rows)])
    if what == 1:
        return pa.array([None] * rows, rng.choice((pa.int64(), pa.string(), pa.null())))
    if what == 2:
        return pa.array([rng.choice((number, -number, 0, -1)) for _ in range(rows)])
    if what == 3:
        return pa.array([rng.choice((1e300, float("nan"), float("inf"), -0.5)) for _ in range(rows)])
    if what == 4:
        return pa.array([[number]] * rows)
    if what == 5:
        return pa.DictionaryArray.from_arrays(
            pa.array([rng.choice((0, 1, None)) for _ in range(rows)], pa.int32()),
            pa.array([rng.choice(HOSTILE), None] if rng.random() < 0.5 else [number, 2]),
        )
    if what == 6:
        return pa.array([some] * rows, pa.uint64())
    values = column.to_pylist()
    if values and isinstance(values[0], int):
        values[rng.randrange(rows)] = min(some, (1 << 31) - 1) if rng.random() < 0.5 else number
        return pa.array(values)
    return pa.array([{"a": 1}] * rows)


# ---- gzip ------------------------------------------------------------------------------------------------------------


def zipped(data: bytes, rng: random.Random) -> bytes:
    """Compressed, and the container damaged now and then: its header, its data, its end, a second member."""
    out = gzip.compress(data, rng.choice((0, 1)), mtime=0)
    what = rng.randrange(10)
    if what == 0:
        return mutate_bytes(out, rng)
    if what == 1:
        return out[:3] + bytes([rng.randrange(256)]) + out[4:]
    if what == 2:
        cut = len(data) // 2
        return gzip.compress(data[:cut], 1, mtime=0) + gzip.compress(data[cut:], 1, mtime=0)
    if what == 3:
        return out + rng.choice((b"\0" * 9, b"\x1f\x8b", b"trailing", out))
    if what == 4:
        return out[: rng.randrange(len(out))]
    if what == 5 and rng.random() < 0.05:
        return gzip.compress(data[: len(data) // 2] + b" " * (4 << 20) + data[len(data) // 2 :], 1, mtime=0)
    return out
