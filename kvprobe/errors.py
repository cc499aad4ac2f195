"""The errors that kvprobe raises on purpose, each with the exit code it ends a command with.

* KvprobeError            1: something failed
  + UsageError            2: the caller asked for something that cannot be
  + NativeError           1: the native library is absent or does not fit
  + CudaError             1: a CUDA call returned an error
  + TransferError         1: a transfer did not complete
  + RecordingError        1: a recording cannot be read
"""

from __future__ import annotations

__all__ = ["CudaError", "KvprobeError", "NativeError", "RecordingError", "TransferError", "UsageError", "plain"]


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


class RecordingError(KvprobeError):
    """A recording cannot be read, or only in part; the text says what was read and what was not."""

    def __init__(self, message: str) -> None:
        """Keeps the message as one line: it may quote what a damaged or hostile file holds."""
        super().__init__(plain(message)[:1000])


def plain(text: str) -> str:
    """One line without control characters: what a recording holds must not steer a terminal."""
    return "".join(char if char.isprintable() else " " if char.isspace() else "\ufffd" for char in text)
