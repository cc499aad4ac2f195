"""Recordings of any origin as one model: `open_recording` reads what Nsight Systems, Kineto or kvprobe wrote."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from kvprobe.errors import RecordingError, UsageError

TYPE_CHECKING = False  # neither numpy nor typing is loaded by asking what a file is
if TYPE_CHECKING:
    from kvprobe.recordings.model import Recording

__all__ = ["open_recording", "expand", "sniff", "FORMATS"]

Progress = Callable[[str, float], None]

# format -> (module under kvprobe.recordings, what it is)
FORMATS = {
    "nsys-sqlite": ("nsys_sqlite", "SQLite export of Nsight Systems"),
    "nsys-rep": ("nsys_rep", "report of Nsight Systems (.nsys-rep, .qdstrm)"),
    "nsys-arrow": ("nsys_arrow", "Parquet or Arrow folder exported by Nsight Systems"),
    "kineto-json": ("kineto", "PyTorch profiler trace (.json, .json.gz)"),
    "kvprobe": ("kvprobe_run", "recording of kvprobe (.kvp)"),
    "kvprobe-parquet": ("parquet", "folder written by kvprobe export --to parquet"),
}
_TRACE_SUFFIXES = (".json", ".json.gz")


def open_recording(
    inputs: Sequence[str | os.PathLike[str]] | str | os.PathLike[str], *, progress: Progress | None = None
) -> Recording:
    """Reads one or more recordings, each of any known format, into one.

    Args:
        inputs: files or folders; a folder of PyTorch traces is one recording with a process for each file.
        progress: called with what is being done and the fraction done, 0 to 1.

    Raises:
        RecordingError: an input cannot be read; its text says why.
        UsageError: no input was given.
    """
    if isinstance(inputs, (str, os.PathLike)):
        inputs = [inputs]
    found = [(path, sniff(path)) for given in inputs for path in expand(Path(given))]
    if not found:
        raise UsageError("no recording was given: name at least one file or folder")
    from kvprobe.recordings.merge import merge

    # kvprobe's own files of one run share a clock: its reader gets all of them at once.
    runs = [path for path, form in found if form == "kvprobe"]
    jobs: list[tuple[str, Path | list[Path]]] = [(form, path) for path, form in found if form != "kvprobe"]
    if runs:
        jobs.insert(0, ("kvprobe", runs))
    recordings = []
    for i, (form, what) in enumerate(jobs):
        read = _reader(form)

        def step(text: str, fraction: float, i: int = i) -> None:
            if progress is not None:
                progress(text if len(jobs) == 1 else f"{text} ({i + 1} of {len(jobs)})", (i + fraction) / len(jobs))

        recordings.append(read(what, step if progress is not None else None))
    return merge(recordings)


def sniff(path: str | os.PathLike[str]) -> str:
    """The format of a file or folder, a key of FORMATS, by its content rather than its name.

    Raises:
        RecordingError: it does not exist, cannot be read, or is of no known format.
    """
    path = Path(path)
    try:
        if path.is_dir():
            return _sniff_folder(path)
        if not path.exists():
            raise RecordingError(f"{path}: no such file or folder")
        if not path.is_file():
            raise RecordingError(f"{path}: not a regular file")
        with path.open("rb") as file:
            start = file.read(64)
    except OSError as error:
        raise RecordingError(f"{path}: cannot be read ({error.strerror or error})") from error
    if start.startswith(b"SQLite format 3\0"):
        return "nsys-sqlite"
    if start.startswith(b"KVPRING1"):
        return "kvprobe"
    if path.name.endswith((".nsys-rep", ".qdstrm", ".qdrep")):
        return "nsys-rep"
    if start.startswith(b"\x1f\x8b") or start.removeprefix(b"\xef\xbb\xbf").lstrip()[:1] in (b"{", b"["):
        return "kineto-json"
    if not start:
        raise RecordingError(f"{path}: the file is empty")
    if path.suffix == ".kvp":
        return "kvprobe"
    raise RecordingError(f"{path}: of no format that kvprobe reads ({', '.join(what for _, what in FORMATS.values())})")


def _sniff_folder(path: Path) -> str:
    names = sorted(entry.name for entry in path.iterdir())
    if "kvprobe.json" in names:
        return "kvprobe-parquet"
    if "run.json" in names or any(name.endswith(".kvp") for name in names):
        return "kvprobe"
    if any(name.startswith(("StringIds", "CUPTI_ACTIVITY_KIND_", "NVTX_EVENTS", "META_DATA_EXPORT")) for name in names):
        return "nsys-arrow"
    raise RecordingError(
        f"{path}: a folder without recordings in it (looked for .kvp files, PyTorch traces, and the "
        "tables of an export)"
    )


def expand(path: Path) -> list[Path]:
    """A folder of traces, one file per rank, is its files; anything else is itself."""
    if not path.is_dir():
        return [path]
    names = sorted(entry.name for entry in path.iterdir())
    if {"kvprobe.json", "run.json"} & set(names) or any(name.endswith(".kvp") for name in names):
        return [path]
    return [
        path / name
        for name in names
        if name.endswith((*_TRACE_SUFFIXES, ".sqlite", ".nsys-rep")) and (path / name).is_file()
    ] or [path]


def _reader(form: str) -> Callable[[Path | list[Path], Progress | None], Recording]:
    module, what = FORMATS[form]
    try:
        found = importlib.import_module(f"kvprobe.recordings.{module}")
    except ImportError as error:
        raise RecordingError(f"a {what} cannot be read here: {error}") from error
    read: Callable[[Path | list[Path], Progress | None], Recording] = found.read
    return read
