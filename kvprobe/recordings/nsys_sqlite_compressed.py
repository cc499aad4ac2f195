"""Reads a gzip-compressed SQLite export of Nsight Systems: unpacked into a private temporary file first."""

from __future__ import annotations

import os
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path

from kvprobe.errors import RecordingError
from kvprobe.recordings import nsys_sqlite
from kvprobe.recordings.model import Recording

__all__ = ["read"]

Progress = Callable[[str, float], None]
_CHUNK_BYTES = 1 << 20
_RATIO = 100  # exports shrink to a tenth; what unpacks to far more is no export


def read(path: Path, progress: Progress | None = None) -> Recording:
    """Reads one export.

    Raises:
        RecordingError: damaged, or it unpacks to more than any export does.
    """
    with tempfile.TemporaryDirectory(prefix="kvprobe-") as folder:
        unpacked = Path(folder) / "export.sqlite"
        try:
            _unpack(path, unpacked, progress)
        except (OSError, zlib.error) as error:
            raise RecordingError(f"{path}: cannot be unpacked ({error})") from error
        recording = nsys_sqlite.read(unpacked, progress)
    for source in recording.source:
        source.path, source.bytes = str(path), path.stat().st_size
    return recording


def _unpack(path: Path, target: Path, progress: Progress | None) -> None:
    size = path.stat().st_size
    left = size * _RATIO + (1 << 20)
    with path.open("rb") as file, target.open("wb") as out:
        stream = zlib.decompressobj(31)
        while data := file.read(_CHUNK_BYTES):
            while data:
                piece = stream.decompress(data, _CHUNK_BYTES)
                left -= len(piece)
                if left < 0:
                    raise RecordingError(f"{path}: unpacks to more than {_RATIO} times its size; no export does")
                out.write(piece)
                if stream.eof:  # another member may follow
                    data, stream = stream.unused_data, zlib.decompressobj(31)
                else:
                    data = stream.unconsumed_tail
            if progress is not None:
                progress(f"unpacking {os.path.basename(path)}", 0.3 * file.tell() / max(size, 1))  # noqa: PTH119
