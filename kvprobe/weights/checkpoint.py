"""A checkpoint's own bytes: its safetensors files, and what coding would make of a sample of them.

Nothing is started and no tensor is loaded: a file's header says where each lies, and pieces of them are read.
"""

from __future__ import annotations

import json
import struct
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from kvprobe.errors import KvprobeError, UsageError
from kvprobe.offload.wire import predict

__all__ = ["DtypeShare", "files_of", "shares"]

PIECE_BYTES = 65536  # a cell of that size each
PIECES = 256  # of each dtype that coding knows: 16 MiB
MOST_HEADER = 100_000_000  # bytes, as the format allows
CODED = {"BF16": "bf16", "F32": "fp32"}


@dataclass(frozen=True)
class DtypeShare:
    """What coding would make of a checkpoint's tensors of one dtype.

    Attributes:
        dtype: as safetensors names it.
        bytes: of all these tensors.
        sample_bytes: of them, what was looked at; 0: numbers of this dtype are not coded.
        share: what would travel of them; 1.0: they travel as they are.
    """

    dtype: str
    bytes: int
    sample_bytes: int
    share: float

    @property
    def coded_bytes(self) -> int:
        """What would travel of all of them, by the sample."""
        return round(self.bytes * self.share)


@dataclass(frozen=True)
class _Place:
    """Where a tensor's bytes lie."""

    file: Path
    at: int
    bytes: int


def shares(folder: Path) -> list[DtypeShare]:
    """What coding would make of a checkpoint's weights, by dtype, the largest first.

    A sample of each dtype is looked at: pieces of 64 KiB at even distances over all of its tensors.

    Raises:
        UsageError: it is no checkpoint of safetensors files, or one without tensors.
        KvprobeError: a file is damaged.
    """
    places: dict[str, list[_Place]] = defaultdict(list)
    for file in files_of(folder):
        for dtype, place in _tensors(file):
            places[dtype].append(place)
    found = []
    for dtype, held in places.items():
        total = sum(one.bytes for one in held)
        if not total:
            continue
        predicted = predict(_sample(held, total), CODED[dtype]) if dtype in CODED else None
        looked, share = (predicted.raw_bytes, predicted.share) if predicted else (0, 1.0)
        found.append(DtypeShare(dtype, total, looked, share))
    if not found:
        raise UsageError(f"{folder} holds no weights")
    return sorted(found, key=lambda one: (-one.bytes, one.dtype))


def _sample(places: list[_Place], total: int) -> list[bytes]:
    """Pieces at even distances over tensors that are thought of as lying one behind the other."""
    count = min(PIECES, -(-total // PIECE_BYTES))
    pieces: list[bytes] = []
    begin, number = 0, 0
    for place in places:
        with place.file.open("rb") as file:
            while number < count and (wanted := number * total // count) < begin + place.bytes:
                offset = (wanted - begin) // 4 * 4  # a piece begins with a number
                pieces.append(_read(file, place.at + offset, min(PIECE_BYTES, place.bytes - offset)))
                number += 1
        begin += place.bytes
    return pieces


def _read(file: BinaryIO, at: int, count: int) -> bytes:
    file.seek(at)
    return file.read(count)


def _tensors(file: Path) -> list[tuple[str, _Place]]:
    """Dtype and place of every tensor of a safetensors file."""
    try:
        size = file.stat().st_size
        with file.open("rb") as held:
            (length,) = struct.unpack("<Q", held.read(8))
            if length > min(MOST_HEADER, size - 8):
                raise ValueError("its header reaches beyond its end")
            entries: dict[str, Any] = json.loads(held.read(length))
        entries.pop("__metadata__", None)
        return [(str(one["dtype"]), _place(file, 8 + length, size, *one["data_offsets"])) for one in entries.values()]
    except OSError as error:
        raise KvprobeError(f"{file} cannot be read: {error.strerror or error}") from None
    except (struct.error, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        why = error if type(error) is ValueError else "its header is damaged"
        raise KvprobeError(f"{file} is damaged or half written ({why}): fetch the checkpoint again") from None


def _place(file: Path, data: int, size: int, begin: int, end: int) -> _Place:
    if not (type(begin) is type(end) is int and 0 <= begin <= end <= size - data):
        raise ValueError("a tensor lies outside of it")
    return _Place(file, data + begin, end - begin)


def files_of(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint.

    Raises:
        UsageError: it is no checkpoint in this format.
        KvprobeError: the index is damaged, or names a file that is not there.
    """
    if not (folder / "config.json").is_file():
        raise UsageError(f"{folder} holds no config.json: name the folder of a local transformers checkpoint")
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError):
            raise KvprobeError(f"{index} is damaged or half written: fetch the checkpoint again") from None
        files = [folder / Path(name).name for name in names]
        for file in files:
            if not file.is_file():
                raise KvprobeError(f"{index} names {file.name}, which is not there: fetch the checkpoint again")
        return files
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UsageError(f"{folder} holds no safetensors file, the one format that can be read in place")
    return files
