"""Writes a recording as a folder of Parquet files, for polars, pandas and DuckDB, and reads it back without loss.

One file a table, named after it; text and enumerations are dictionary columns, so `kind` reads "copy" there. What is
no table (source, machine, notes) lies in `kvprobe.json`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from enum import IntEnum
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet

from kvprobe.errors import RecordingError, UsageError
from kvprobe.recordings.assemble import join
from kvprobe.recordings.buckets import BUCKETS
from kvprobe.recordings.model import (
    SCHEMAS,
    Array,
    CallKind,
    Direction,
    Engine,
    Label,
    Memory,
    Phase,
    RangeStyle,
    Recording,
    RequestTime,
    Source,
    Table,
)
from kvprobe.recordings.vocabulary import Names

__all__ = ["read", "to_arrow", "write"]

Progress = Callable[[str, float], None]
_VERSION = 1
_META = "kvprobe.json"
_ENUMS: dict[tuple[str, str], type[IntEnum]] = {
    ("calls", "kind"): CallKind,
    ("totals", "kind"): CallKind,
    ("executions", "engine"): Engine,
    ("labels", "label"): Label,
    ("ranges", "style"): RangeStyle,
    ("steps", "phase"): Phase,
    ("request_times", "what"): RequestTime,
    **{(table, "direction"): Direction for table in ("calls", "executions", "transfers", "totals", "submitters")},
    **{(table, "memory"): Memory for table in ("calls", "executions", "totals")},
}
_ROWS_PER_BYTE = 64  # times that differ take a byte or more; a claim beyond this is no recording


class _Meta(msgspec.Struct):
    version: int
    source: list[Source] = []
    machine: dict[str, Any] = {}
    machine_how: dict[str, str] = {}
    has_executions: bool = False
    notes: list[str] = []
    lost: dict[str, int] = {}
    incomplete: list[str] = []


def write(
    recording: Recording, folder: Path, *, overwrite: bool = False, progress: Progress | None = None
) -> list[Path]:
    """Writes `folder` (made if absent) and returns the files in it.

    Raises:
        UsageError: the folder holds something and `overwrite` is not set.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())) and not overwrite:
        raise UsageError(f"{folder} exists and is not empty: name another folder, or force overwriting it")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _META).unlink(missing_ok=True)  # of an earlier export: what is written half is no recording
    files: list[Path] = []
    tables = [kind for kind in SCHEMAS if recording.tables[kind].rows]
    for i, kind in enumerate(tables):
        if progress is not None:
            progress(f"writing {kind}", i / len(tables))
        table = recording.tables[kind]
        columns = {name: _to_arrow(recording, kind, name, table[name]) for name in SCHEMAS[kind]}
        if kind == "totals" and len(recording.histograms) == table.rows:
            flat = pa.array(np.ascontiguousarray(recording.histograms).ravel())
            columns["histogram"] = pa.FixedSizeListArray.from_arrays(flat, recording.histograms.shape[1])
        files.append(folder / f"{kind}.parquet")
        with pa.OSFile(os.fsencode(files[-1]), "wb") as file:  # a path that is not UTF-8 it takes as bytes alone
            pyarrow.parquet.write_table(pa.table(columns), file, compression="zstd")
    for kind in SCHEMAS:
        if kind not in tables:
            (folder / f"{kind}.parquet").unlink(missing_ok=True)  # of an earlier export
    meta = _Meta(
        _VERSION,
        [replace(one, path=one.path.encode(errors="replace").decode()) for one in recording.source],
        recording.machine,
        recording.machine_how,
        recording.has_executions,
        recording.notes,
        {str(process): count for process, count in recording.lost.items()},
        recording.incomplete,
    )
    files.append(folder / _META)
    files[-1].write_bytes(msgspec.json.format(msgspec.json.encode(meta, enc_hook=_plain), indent=1))
    return files


def to_arrow(recording: Recording, kind: str) -> pa.Table:
    """One table; text and enumerations are dictionary columns, so `kind` reads "copy".

    Raises:
        UsageError: no table is called so.
    """
    if kind not in SCHEMAS:
        raise UsageError(f"no table is called {kind!r}; there are {', '.join(SCHEMAS)}")
    table = recording.tables[kind]
    return pa.table({name: _to_arrow(recording, kind, name, table[name]) for name in SCHEMAS[kind]})


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else str(value)


def _to_arrow(recording: Recording, kind: str, name: str, column: Array) -> pa.Array:
    if SCHEMAS[kind][name] == "name":
        used, inverse = np.unique(np.clip(column, 0, len(recording.names) - 1), return_inverse=True)
        texts = pa.array([recording.names[i].encode("utf-8", "replace").decode() for i in used.tolist()])
        return pa.DictionaryArray.from_arrays(pa.array(inverse.astype(np.int32)), texts)
    if (kind, name) in _ENUMS:
        words = [member.name.lower() for member in _ENUMS[kind, name]]
        return pa.DictionaryArray.from_arrays(
            pa.array(np.minimum(column, len(words) - 1).astype(np.int8)), pa.array(words)
        )
    return pa.array(np.ascontiguousarray(column))


def read(path: Path, progress: Progress | None = None) -> Recording:
    """Reads what `write` wrote.

    Raises:
        RecordingError: another version, or damaged files.
    """
    try:
        return _read(path, progress)
    except (
        pa.ArrowException,
        OSError,
        ValueError,
        KeyError,
        OverflowError,
        MemoryError,
        msgspec.MsgspecError,
        TypeError,
        IndexError,
    ) as error:
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise RecordingError(f"{path}: damaged export of kvprobe ({text})") from error


def _read(path: Path, progress: Progress | None) -> Recording:
    raw = json.loads((path / _META).read_bytes())
    meta = msgspec.convert(raw, _Meta)
    if meta.version != _VERSION:
        raise RecordingError(f"{path}: written by another kvprobe (format {meta.version}, this one reads {_VERSION})")
    names = Names()
    tables: dict[str, Table] = {}
    histograms = np.zeros((0, 128), dtype=np.int64)
    for i, kind in enumerate(SCHEMAS):
        file = path / f"{kind}.parquet"
        if not file.exists():
            continue
        if progress is not None:
            progress(f"reading {kind}", i / len(SCHEMAS))
        opened = pyarrow.parquet.ParquetFile(pa.OSFile(os.fsencode(file)))
        if opened.metadata.num_rows > file.stat().st_size * _ROWS_PER_BYTE:
            raise ValueError(f"{file.name} claims {opened.metadata.num_rows} rows")
        have = set(opened.schema_arrow.names)
        # Column by column, so that no more than one is held twice.
        tables[kind] = Table(
            kind,
            {
                name: _from_arrow(names, kind, name, opened.read(columns=[name])[name])
                for name in SCHEMAS[kind]
                if name in have
            },
        )
        if kind == "totals" and "histogram" in have:
            lists = pc.cast(opened.read(columns=["histogram"])["histogram"], pa.list_(pa.int64()))
            flat = pc.fill_null(lists.combine_chunks().flatten(), 0)
            histograms = flat.to_numpy(zero_copy_only=False).reshape(tables[kind].rows, BUCKETS)
    _check_rows(tables)
    return Recording(
        meta.source,
        tables,
        names.list,
        histograms,
        meta.machine,
        meta.machine_how,
        meta.has_executions,
        meta.notes,
        {int(process): count for process, count in meta.lost.items()},
        meta.incomplete,
    )


def _from_arrow(names: Names, kind: str, name: str, column: pa.ChunkedArray) -> Array:
    if SCHEMAS[kind][name] == "name" or (kind, name) in _ENUMS:
        encoded = column.combine_chunks()
        if not pa.types.is_dictionary(encoded.type):
            encoded = pc.dictionary_encode(pc.cast(encoded, pa.string()))
        texts = encoded.dictionary.to_pylist()
        if (kind, name) in _ENUMS:
            members = _ENUMS[kind, name].__members__
            values = np.array([int(members.get(str(text).upper(), 0)) for text in texts] or [0], dtype=np.uint8)
        else:
            values = names.map([str(text or "") for text in texts] or [""])
        index = np.from_dlpack(_filled(encoded.indices))
        return join([values[index]])
    stored = pc.cast(column, pa.from_numpy_dtype(np.dtype(SCHEMAS[kind][name])))  # refuses what does not fit
    # by DLPack: for `to_numpy` pyarrow imports pandas, where it is installed, which takes a second
    return join([np.from_dlpack(_filled(chunk)) for chunk in stored.chunks])


def _filled(column: Any) -> Any:
    """Without nulls."""
    return pc.fill_null(column, 0) if column.null_count else column


def _check_rows(tables: dict[str, Table]) -> None:
    """Rows that point outside their table would break whoever follows them."""
    for column, target in (("process", "processes"), ("stream", "streams")):
        limit = tables[target].rows if target in tables else 0
        if target == "processes":  # without a row of its own, what there is belongs to one process
            limit = max(limit, 1)
        for kind, table in tables.items():
            if (
                column in SCHEMAS[kind]
                and table.rows
                and (int(table[column].max()) >= limit or int(table[column].min()) < -1)
            ):
                raise ValueError(f"{kind}.{column} points outside {target}")
