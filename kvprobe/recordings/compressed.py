"""Unpacks what is compressed by gzip or xz, piece by piece, so that memory holds one piece whatever it unpacks to."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator

from kvprobe.errors import RecordingError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import BinaryIO

__all__ = ["DamagedStream", "first_bytes", "form_of", "pieces"]

_MAGIC = {"gzip": b"\x1f\x8b", "xz": b"\xfd7zXZ\0"}
_READ_BYTES = 1 << 17
_DICTIONARY_BYTES = 256 << 20  # of xz, whose strongest preset needs 65 MiB; a file may ask for 4 GiB


class DamagedStream(EOFError):
    """The compressed bytes are not those that were written."""


def form_of(start: bytes) -> str:
    """How a file is compressed, "gzip" or "xz", by its first bytes; "" for neither."""
    return next((form for form, magic in _MAGIC.items() if start.startswith(magic)), "")


def first_bytes(start: bytes, form: str, count: int) -> bytes:
    """The first bytes of what is compressed, of its first bytes; none where those are damaged or too few."""
    try:
        return _unpacker(form)(start, count)
    except DamagedStream:
        return b""


def pieces(file: BinaryIO, form: str, most: int) -> Iterator[bytes]:
    """What is compressed in a file, in pieces of at most `most` bytes; several members, and padding, are as one.

    Raises:
        DamagedStream: after the pieces before the damage.
        EOFError: the file ends in the middle; after all that is there.
        RecordingError: this Python was built without xz.
    """
    unpack, begun = _unpacker(form), False
    while raw := file.read(_READ_BYTES):
        while raw or not unpack.hungry:
            if not begun:  # between members
                raw = raw.lstrip(b"\0")
                if not raw:
                    break
                magic = _MAGIC[form]
                while len(raw) < len(magic) and (more := file.read(len(magic) - len(raw))):
                    raw += more
                if not raw.startswith(magic):
                    return
                begun = True
            piece = unpack(raw, most)
            raw = b""
            if piece:
                yield piece
            if unpack.ended:
                raw, unpack, begun = unpack.unused, _unpacker(form), False
    if begun:
        raise EOFError(f"the {form} data ends in the middle")


class _Gzip:
    """zlib's decompressor, which keeps what it was given and has not used yet."""

    def __init__(self) -> None:
        self._stream = zlib.decompressobj(31)
        self._filled = False  # the newest piece: zlib may then hold more of what it has read

    def __call__(self, data: bytes, most: int) -> bytes:
        try:
            piece = self._stream.decompress(self._stream.unconsumed_tail + data, most)
        except zlib.error as error:
            raise DamagedStream(f"damaged gzip data: {error}") from error
        self._filled = len(piece) == most
        return piece

    @property
    def hungry(self) -> bool:
        """Whether there is nothing more without more data."""
        return self._stream.eof or not (self._stream.unconsumed_tail or self._filled)

    @property
    def ended(self) -> bool:
        return self._stream.eof

    @property
    def unused(self) -> bytes:
        return self._stream.unused_data


class _Xz:
    """As `_Gzip`, for xz."""

    def __init__(self) -> None:
        try:
            import lzma
        except ImportError as error:
            raise RecordingError("this Python was built without xz: unpack the file (unxz) first") from error
        self._error = lzma.LZMAError
        self._stream = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_DICTIONARY_BYTES)

    def __call__(self, data: bytes, most: int) -> bytes:
        try:
            return self._stream.decompress(data, most)
        except self._error as error:
            raise DamagedStream(f"damaged xz data: {error}") from error

    @property
    def hungry(self) -> bool:
        return self._stream.eof or self._stream.needs_input

    @property
    def ended(self) -> bool:
        return self._stream.eof

    @property
    def unused(self) -> bytes:
        return self._stream.unused_data


_UNPACKERS: dict[str, Callable[[], _Gzip | _Xz]] = {"gzip": _Gzip, "xz": _Xz}


def _unpacker(form: str) -> _Gzip | _Xz:
    return _UNPACKERS[form]()
