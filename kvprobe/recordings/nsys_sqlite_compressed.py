"""Reads a compressed SQLite export of Nsight Systems, .gz or .xz: unpacked into a private temporary file first."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from kvprobe.errors import RecordingError
from kvprobe.recordings import compressed, nsys_sqlite
from kvprobe.recordings.model import Recording

__all__ = ["read"]

Progress = Callable[[str, float], None]
_PIECE_BYTES = 1 << 20
# gzip shrinks exports to a tenth, xz to a twentieth at times; what unpacks to far more is no export
_RATIOS = {"gzip": 100, "xz": 400}


def read(path: Path, progress: Progress | None = None) -> Recording:
    """Reads one export.

    Raises:
        RecordingError: damaged, or it unpacks to more than any export does.
    """
    with tempfile.TemporaryDirectory(prefix="kvprobe-") as folder:
        unpacked = Path(folder) / "export.sqlite"
        try:
            _unpack(path, unpacked, progress)
        except EOFError as error:
            if isinstance(error, compressed.DamagedStream):
                raise RecordingError(f"{path}: cannot be unpacked ({error})") from error
            # cut off: what is there is read, and the reader says what is missing
        except OSError as error:
            raise RecordingError(f"{path}: cannot be unpacked ({error})") from error
        recording = nsys_sqlite.read(unpacked, progress)
    for source in recording.source:
        source.path, source.bytes = str(path), path.stat().st_size
    return recording


def _unpack(path: Path, target: Path, progress: Progress | None) -> None:
    size = path.stat().st_size
    with path.open("rb") as file, target.open("wb") as out:
        form = compressed.form_of(file.read(8))
        file.seek(0)
        left = size * _RATIOS[form] + (1 << 20)
        for piece in compressed.pieces(file, form, _PIECE_BYTES):
            left -= len(piece)
            if left < 0:
                raise RecordingError(f"{path}: unpacks to more than {_RATIOS[form]} times its size; no export does")
            out.write(piece)
            if progress is not None:
                progress(f"unpacking {os.path.basename(path)}", 0.3 * file.tell() / max(size, 1))  # noqa: PTH119
