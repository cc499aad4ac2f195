"""The errors that kvprobe raises on purpose, each with the exit code it ends a command with.

* KvprobeError            1: something failed
  + UsageError            2: the caller asked for something that cannot be
  + NativeError           1: the native library is absent or does not fit
  + CudaError             1: a CUDA call returned an error
  + TransferError         1: a transfer did not complete
  + PoolFullError         1: a packed pool has no space for a store; nothing was written
  + RecordingError        1: a recording cannot be read
"""

from __future__ import annotations

__all__ = [
    "CudaError",
    "KvprobeError",
    "NativeError",
    "PoolFullError",
    "RecordingError",
    "TransferError",
    "UsageError",
    "plain",
]


class KvprobeError(Exception):
    """Base of all errors kvprobe raises; its text is one line that says what was wrong and what to do."""

    exit_code = 1


class UsageError(KvprobeError, ValueError):
    """The call or command cannot mean anything: a wrong argument, not a failure."""

    exit_code = 2


class NativeError(KvprobeError):
    """The native library is absent, cannot be built, or is of another version."""


class CudaError(KvprobeError):
    """A CUDA runtime call returned an error code."""

    def __init__(self, call: str, code: int, name: str) -> None:
        """Keep the call's name, its code and the code's name beside the message."""
        super().__init__(f"{call} failed: {name} ({code})")
        self.call, self.code, self.name = call, code, name


class TransferError(KvprobeError):
    """A transfer did not complete; its blocks hold undefined bytes."""


class PoolFullError(KvprobeError):
    """A packed pool has too little reserve left for a store, which was not begun: nothing was written.

    Attributes:
        needs: tails that the store could take, at worst: one for each of its cells.
        left: that are free.
    """

    def __init__(self, needs: int, left: int) -> None:
        """Says what the caller can do."""
        super().__init__(
            f"the packed pool has {left} tails left, and this store could take {needs}: wait for stores that are under "
            "way, discard() blocks that are not needed any more, or store fewer at once"
        )
        self.needs, self.left = needs, left


class RecordingError(KvprobeError):
    """A recording cannot be read, or only in part; the text says what was read and what was not."""

    def __init__(self, message: str) -> None:
        """Keeps the message as one line: it may quote what a damaged or hostile file holds."""
        super().__init__(plain(message)[:1000])


def plain(text: str) -> str:
    """One line without control characters: what a recording holds must not steer a terminal."""
    return "".join(char if char.isprintable() else " " if char.isspace() else "\ufffd" for char in text)
