"""Reads the folder that `nsys export --type parquetdir` or `arrowdir` writes: the SQLite export's tables as files."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.ipc
import pyarrow.parquet

from kvprobe.errors import RecordingError
from kvprobe.recordings import vocabulary as words
from kvprobe.recordings.model import Recording
from kvprobe.recordings.nsys_sqlite import COLUMNS, DOMAIN_CREATE, Columns, columns_to_recording

__all__ = ["read"]

Progress = Callable[[str, float], None]
_SUFFIXES = (".parquet", ".arrow", ".arrows", ".feather")
_ROWS_PER_BYTE = 64  # run-length encoding can claim billions of rows in a few bytes; real tables stay far below


def read(path: Path, progress: Progress | None = None) -> Recording:
    """Reads one folder.

    Raises:
        RecordingError: no such tables in it, or damaged ones.
    """
    try:
        return columns_to_recording(_Folder(path), path, "nsys-arrow", progress)
    except (pa.ArrowException, OSError, ValueError, OverflowError, MemoryError) as error:
        raise RecordingError(
            f"{path}: damaged export ({str(error).splitlines()[0] if str(error) else error})"
        ) from error


class _Folder:
    """The same methods as an SQLite export, over files."""

    def __init__(self, path: Path) -> None:
        self.files = {
            entry.name.split(".")[0]: entry
            for entry in sorted(path.iterdir())
            if entry.suffix in _SUFFIXES and entry.is_file()
        }
        self.tables = set(self.files)
        self.bytes = sum(entry.stat().st_size for entry in self.files.values())

    def load(self, table: str, wanted: Sequence[str]) -> pa.Table:
        """The columns among `wanted` that the table has."""
        file = self.files[table]
        most = file.stat().st_size * _ROWS_PER_BYTE + 1_000_000
        if file.suffix == ".parquet":
            opened = pyarrow.parquet.ParquetFile(pa.OSFile(os.fsencode(file)))
            if opened.metadata.num_rows > most:
                raise pa.ArrowInvalid(f"{file.name} claims {opened.metadata.num_rows} rows")
            have = set(opened.schema_arrow.names)
            return opened.read(columns=[name for name in wanted if name in have])
        # Not mapped: a file that shrinks under a mapping would kill the process. Nor read by Arrow, which takes as much
        # memory as a damaged length says.
        with pa.BufferReader(file.read_bytes()) as source:
            try:
                found = pyarrow.ipc.open_file(source).read_all()
            except pa.ArrowInvalid:
                source.seek(0)
                found = pyarrow.ipc.open_stream(source).read_all()
        if found.num_rows > most:
            raise pa.ArrowInvalid(f"{file.name} claims {found.num_rows} rows")
        found.validate(full=True)  # else its offsets are believed, wherever they point
        return found.select([name for name in wanted if name in found.column_names])

    def columns(self, table: str, tick: Callable[[], None] | None = None) -> Columns:
        """The wanted columns of one table, (rows,) int64 each; empty where the table is absent."""
        wanted = COLUMNS[table]
        nothing = {name: np.zeros(0, dtype=np.int64) for name in wanted}
        if table not in self.tables:
            return nothing
        found = self.load(table, list(wanted))
        if not {"start", "end"} & set(wanted) <= set(found.column_names) or not found.column_names:
            return nothing
        out: Columns = {}
        for name, default in wanted.items():
            if name in found.column_names:
                column = pc.cast(found[name], pa.int64(), safe=False)
                out[name] = pc.fill_null(column, default).to_numpy()
            else:
                out[name] = np.broadcast_to(np.int64(default), (found.num_rows,))
        if tick is not None:
            tick()
        return out

    def strings(self, ids: Iterable[int]) -> dict[int, str]:
        """The texts of `StringIds` that are asked for."""
        wanted = list(set(ids))
        if "StringIds" not in self.tables or not wanted:
            return {}
        found = self.load("StringIds", ["id", "value"])
        if set(found.column_names) != {"id", "value"}:
            return {}
        keys = pc.cast(found["id"], pa.int64(), safe=False)
        found = found.filter(pc.is_in(keys, value_set=pa.array(wanted, pa.int64())))
        keys = pc.cast(found["id"], pa.int64(), safe=False)
        return {
            key: str(text)[: words.Names.LONGEST]
            for key, text in zip(keys.to_pylist(), found["value"].to_pylist(), strict=True)
            if text is not None
        }

    def rows(self, table: str, columns: Sequence[str], limit: int = 100_000) -> list[tuple[Any, ...]]:
        """At most `limit` rows of a small table; none where it lacks one of the columns."""
        if table not in self.tables:
            return []
        found = self.load(table, columns).slice(0, limit)
        if set(found.column_names) != set(columns):
            return []
        return list(zip(*(found[column].to_pylist() for column in columns), strict=True))

    def range_texts(self) -> Iterator[tuple[int, str]]:
        """Row number and text of the NVTX events that carry their text themselves."""
        found = self.load("NVTX_EVENTS", ["text"])
        if "text" in found.column_names and found["text"].null_count < found.num_rows:
            for number, text in enumerate(found["text"].to_pylist()):
                if text is not None:
                    yield number, str(text)[: words.Names.LONGEST]

    def domains(self) -> list[tuple[Any, ...]]:
        """globalTid, domain id and name of the NVTX domains that were created."""
        found = self.load("NVTX_EVENTS", ["globalTid", "domainId", "text", "eventType"])
        if len(found.column_names) < 4:
            return []
        found = found.filter(pc.equal(pc.cast(found["eventType"], pa.int64(), safe=False), DOMAIN_CREATE)).slice(
            0, 10_000
        )
        return list(zip(*(found[column].to_pylist() for column in ("globalTid", "domainId", "text")), strict=True))
