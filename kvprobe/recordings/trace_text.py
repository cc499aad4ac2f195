"""A trace's text in pieces, unzipped on a thread of its own, cut into what stands before, in and after its events."""

from __future__ import annotations

import queue
import re
import threading
from collections.abc import Callable, Iterator

from kvprobe.errors import RecordingError
from kvprobe.recordings import compressed

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["BROKEN", "END", "FULL", "MEMORY", "MORE", "UNFIT", "TraceText", "read_ahead", "text_chunks"]

MORE, END, FULL, BROKEN, MEMORY, UNFIT = range(6)  # how a scan of a piece ended, as in native/trace
Progress = Callable[[str, float], None]
_CHUNK = 1 << 19
_MOST_UNSPLIT = 1 << 25  # a single event, or what stands before the events, may not be longer


def text_chunks(path: Path, progress: Progress | None) -> Iterator[bytes]:
    """The document in pieces, unpacked where it is gzip or xz by its first bytes (whatever it is called).

    The last piece of a truncated compressed file is followed by an EOFError.
    """
    size = max(path.stat().st_size, 1)
    with path.open("rb") as file:
        form = compressed.form_of(file.read(8))
        file.seek(0)
        texts = compressed.pieces(file, form, _CHUNK) if form else iter(lambda: file.read(_CHUNK), b"")
        for text in texts:
            if progress is not None:
                progress("reading events", min(0.99, file.tell() / size))
            yield text


def read_ahead(source: Iterator[bytes]) -> Iterator[bytes]:
    """The same pieces, from the third on made by a thread that runs a little ahead: a small file needs none.

    zlib and lzma release the interpreter lock.
    """
    for _ in range(2):
        piece = next(source, None)
        if piece is None:
            return
        yield piece
    yield from _made_ahead(source)


def _made_ahead(source: Iterator[bytes]) -> Iterator[bytes]:
    """The same pieces, made by a thread."""
    pieces: queue.Queue[bytes | BaseException | None] = queue.Queue(maxsize=6)
    stopped = threading.Event()

    def hand(piece: bytes | BaseException | None) -> bool:
        while not stopped.is_set():
            try:
                pieces.put(piece, timeout=0.2)
                return True
            except queue.Full:
                continue
        return False

    def work() -> None:
        try:
            for piece in source:
                if not hand(piece):
                    return
            hand(None)
        except BaseException as error:  # handed to the reader, who raises it
            hand(error)

    thread = threading.Thread(target=work, name="kvprobe-unzip", daemon=True)
    thread.start()
    try:
        while (piece := pieces.get()) is not None:
            if isinstance(piece, BaseException):
                raise piece
            yield piece
    finally:
        stopped.set()
        while not pieces.empty():  # else it would wait a while longer to hand a piece over
            pieces.get_nowait()
        thread.join()


_EVENTS_KEY = re.compile(rb'"traceEvents"\s*:\s*\[')


class TraceText:
    """Cuts a trace into the text before its events, lists of events, and the text after them."""

    def __init__(self, source: Iterator[bytes]) -> None:
        self.source = source
        self.ended = False
        self.cut_off = ""  # why the document ended early
        self.before = b""
        self.after = b""
        self.buffer = b""

    def _more(self) -> bool:
        if self.ended:
            return False
        try:
            piece = next(self.source, None)
        except EOFError as error:
            self.cut_off, piece = str(error), None
        if piece is None:
            self.ended = True
            return False
        self.buffer = self.buffer + piece if self.buffer else piece
        return True

    def find_events(self) -> None:
        """Reads up to the first event.

        Raises:
            RecordingError: there is no list of events.
        """
        self._more()
        self.buffer = self.buffer.removeprefix(b"\xef\xbb\xbf")
        searched = 0
        while True:
            start = self.buffer.lstrip()[:1]
            if start not in (b"{", b"["):
                raise RecordingError("it is not JSON" if start else "it is empty")
            if start == b"[":  # the trace event format's bare list
                self.buffer = self.buffer.lstrip()[1:]
                return
            match = _EVENTS_KEY.search(self.buffer, searched)
            if match:
                self.before, self.buffer = self.buffer[: match.end() - 1] + b"0}", self.buffer[match.end() :]
                return
            searched = max(0, len(self.buffer) - 64)
            if len(self.buffer) > _MOST_UNSPLIT or not self._more():
                raise RecordingError('JSON without a list "traceEvents": no PyTorch profiler trace')

    def scan(self, read: Callable[[bytes, bool], tuple[int, int]]) -> None:
        """Gives the events to a scanner, piece by piece, each from an event's beginning on.

        Args:
            read: takes a text and whether it is the last; returns how it ended and the bytes it is done with.

        Raises:
            RecordingError: an event that is longer than any recorder writes.
        """
        enough = _CHUNK
        while True:
            more = self._more()
            if more and len(self.buffer) < enough:
                continue
            state, consumed = read(self.buffer, not more)
            self.buffer = self.buffer[consumed:]
            if state == END:
                return
            if state == BROKEN:
                self.cut_off = self.cut_off or "what follows is not JSON"
                return
            if not more:
                self.cut_off = self.cut_off or "the document ends in the middle of its events"
                return
            if len(self.buffer) > _MOST_UNSPLIT:
                raise RecordingError(f"an event of more than {_MOST_UNSPLIT >> 20} MiB")
            # Each look at an unfinished event is as long as it is: look again when there is twice as much of it.
            enough = max(_CHUNK, 2 * len(self.buffer) if not consumed else 0)

    def read_after(self) -> None:
        """The text after the events, where their list was seen to end."""
        if self.cut_off:
            return
        self.after, self.buffer = self.buffer, b""
        while len(self.after) < _MOST_UNSPLIT and self._more():
            self.after, self.buffer = self.after + self.buffer, b""
