"""Recordings of any origin as one model: `open_recording` reads what Nsight Systems, Kineto or kvprobe wrote."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from kvprobe.errors import KvprobeError, RecordingError, UsageError

TYPE_CHECKING = False  # neither numpy nor typing is loaded by asking what a file is
if TYPE_CHECKING:
    from kvprobe.recordings.model import Recording
    from kvprobe.recordings.reader import Reader

__all__ = ["FORMATS", "expand", "expand_deeply", "open_apart", "open_recording", "sniff"]

Progress = Callable[[str, float], None]

# Told by `sniff` itself, so that to ask what a file is loads no reader.
_TOLD_HERE = {
    "nsys-sqlite": ("nsys_sqlite", "SQLite export of Nsight Systems"),
    "nsys-sqlite-compressed": (
        "nsys_sqlite_compressed",
        "compressed SQLite export of Nsight Systems (.sqlite.gz, .sqlite.xz)",
    ),
    "nsys-rep": ("nsys_rep", "report of Nsight Systems (.nsys-rep, .qdstrm)"),
    "nsys-arrow": ("nsys_arrow", "Parquet or Arrow folder exported by Nsight Systems"),
    "kineto-json": ("kineto", "PyTorch profiler trace (.json, .json.gz, .json.xz)"),
    "kvprobe": ("kvprobe_run", "recording of kvprobe (.kvp)"),
    "kvprobe-parquet": ("parquet", "folder written by kvprobe export --to parquet"),
}
_PLAIN = (".json", ".sqlite")
# of files that a folder is looked through for
_SUFFIXES = (*_PLAIN, *(plain + packed for plain in _PLAIN for packed in (".gz", ".xz")), ".nsys-rep")

# format -> (module under kvprobe.recordings, what it is); a line here is all that registers one
FORMATS = {
    **_TOLD_HERE,
}


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
    from kvprobe.recordings.merge import merge

    found = _found(inputs)
    # kvprobe's own files of one run share a clock: its reader gets all of them at once.
    runs = [path for path, form in found if form == "kvprobe"]
    jobs: list[tuple[str, Path | list[Path]]] = [(form, path) for path, form in found if form != "kvprobe"]
    if runs:
        jobs.insert(0, ("kvprobe", runs))
    return merge([_read(form, what, _part(progress, i, len(jobs))) for i, (form, what) in enumerate(jobs)])


def open_apart(
    inputs: Sequence[str | os.PathLike[str]], *, progress: Progress | None = None
) -> tuple[Recording, list[tuple[str, Recording]]]:
    """As `open_recording`, and each input by itself as well, with the shortest name that tells it from the others.

    Raises:
        RecordingError: an input cannot be read; its text says why.
        UsageError: no input was given, or they look like recordings of different runs: laid over each other, the waits
            of one would hide behind the kernels of another.
    """
    from kvprobe.recordings.merge import different_runs, merge

    found = _found(inputs)
    many = len(found) + 1
    own = [_read(form, path, _part(progress, i, many)) for i, (path, form) in enumerate(found)]
    if why := different_runs(own):
        raise UsageError(f"the inputs look like different runs: {why}. Give them to `kvprobe report` one by one")
    runs = [path for path, form in found if form == "kvprobe"]
    whole = [one for one, (_, form) in zip(own, found, strict=True) if form != "kvprobe"]
    if len(runs) > 1:
        whole.insert(0, _read("kvprobe", runs, _part(progress, many - 1, many)))
    else:
        whole = [*(one for one, (_, form) in zip(own, found, strict=True) if form == "kvprobe"), *whole]
    names = _shortest([path for path, _ in found])
    return merge(whole), list(zip(names, own, strict=True))


def _found(inputs: Sequence[str | os.PathLike[str]] | str | os.PathLike[str]) -> list[tuple[Path, str]]:
    """Every recording among the inputs, with its format."""
    if isinstance(inputs, (str, os.PathLike)):
        inputs = [inputs]
    found = [(path, sniff(path)) for given in inputs for path in expand(Path(given))]
    if not found:
        raise UsageError("no recording was given: name at least one file or folder")
    return found


def _part(progress: Progress | None, i: int, many: int) -> Progress | None:
    """The progress of one job of many."""
    if progress is None:
        return None

    def step(text: str, fraction: float) -> None:
        progress(text if many == 1 else f"{text} ({i + 1} of {many})", (i + fraction) / many)

    return step


def _read(form: str, what: Path | list[Path], progress: Progress | None) -> Recording:
    reader = _reader(form)
    try:
        if isinstance(what, list):
            from kvprobe.recordings import kvprobe_run

            recording = kvprobe_run.read(what, progress)
        else:
            recording = reader.read(what, progress)
        from kvprobe.recordings.assemble import bounded

        recording.has_executions |= recording.executions.rows > 0
        return bounded(recording)
    except (ValueError, LookupError, ArithmeticError, TypeError, RecursionError, MemoryError) as error:
        if isinstance(error, KvprobeError):
            raise
        said = f"{type(error).__name__}: {error}"
        where = what[0] if isinstance(what, list) else what
        raise RecordingError(f"{where}: damaged {FORMATS[form][1]} ({said})") from error


def _shortest(paths: Sequence[Path]) -> list[str]:
    """The last parts of each path, as many as tell them all apart; equal paths are numbered."""
    parts = [path.absolute().parts for path in paths]
    last = 1
    while last < max(map(len, parts)) and len({one[-last:] for one in parts}) < len(set(parts)):
        last += 1
    names = ["/".join(one[-last:]) for one in parts]
    return [
        name if names.count(name) == 1 else f"{name} ({names[: i + 1].count(name)})" for i, name in enumerate(names)
    ]


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
            start = file.read(512)
    except OSError as error:
        raise RecordingError(f"{path}: cannot be read ({error.strerror or error})") from error
    if start.startswith(b"SQLite format 3\0"):
        return "nsys-sqlite"
    if start.startswith(b"KVPRING1"):
        return "kvprobe"
    form, unpacked = _unpacked(start)
    if _is_profilers(unpacked if form else start):
        return "kineto-json"
    told = _told(path, start)
    if told is not None:
        return told
    if path.name.endswith((".nsys-rep", ".qdstrm", ".qdrep")):
        return "nsys-rep"
    if unpacked.startswith(b"SQLite format 3\0"):
        return "nsys-sqlite-compressed"
    _refuse_packed(path, start, form, unpacked)
    if form or start.removeprefix(b"\xef\xbb\xbf").lstrip()[:1] in (b"{", b"["):
        return "kineto-json"
    if not start:
        raise RecordingError(f"{path}: the file is empty")
    if path.suffix == ".kvp":
        return "kvprobe"
    raise RecordingError(f"{path}: unknown format; kvprobe reads: {', '.join(what for _, what in FORMATS.values())}")


def _is_profilers(start: bytes) -> bool:
    """Whether a file plainly begins as the PyTorch profiler's do: no reader that somebody added is loaded to ask."""
    text = start.lstrip()
    return text.startswith(b'{"traceEvents"') or (text.startswith(b"{") and b'"schemaVersion"' in text)


_PACKED = {b"PK\x03\x04": "unzip", b"\x28\xb5\x2f\xfd": "unzstd", b"BZh": "bunzip2"}


def _refuse_packed(path: Path, start: bytes, form: str, unpacked: bytes) -> None:
    """Raises a RecordingError that says how to unpack what kvprobe does not unpack itself."""
    tool = next((tool for magic, tool in _PACKED.items() if start.startswith(magic)), None)
    if (
        path.suffixes[-2:-1] == [".tar"]
        or path.suffix in (".tgz", ".tar")
        or b"ustar"
        in (
            start[257:262],
            unpacked[257:262],
        )
    ):
        tool = "tar -xf"
    elif unpacked.startswith(b"KVPRING1"):
        tool = {"gzip": "gunzip", "xz": "unxz"}[form]
    if tool is not None:
        inside = "folder or file" if tool in ("tar -xf", "unzip") else "file"
        raise RecordingError(
            f"{path}: kvprobe does not unpack this: unpack it with {tool} and pass the {inside} to kvprobe"
        )


def _unpacked(start: bytes) -> tuple[str, bytes]:
    """How a file is compressed, and the first bytes of what is; empty where that is damaged."""
    from kvprobe.recordings import compressed

    form = compressed.form_of(start)
    return form, compressed.first_bytes(start, form, 512) if form else b""


def _sniff_folder(path: Path) -> str:
    names = sorted(entry.name for entry in path.iterdir())
    if "kvprobe.json" in names:
        return "kvprobe-parquet"
    if "run.json" in names or any(name.endswith(".kvp") for name in names):
        return "kvprobe"
    if any(name.startswith(("StringIds", "CUPTI_ACTIVITY_KIND_", "NVTX_EVENTS", "META_DATA_EXPORT")) for name in names):
        return "nsys-arrow"
    told = _told(path, b"")
    if told is not None:
        return told
    raise RecordingError(
        f"{path}: no recording in this folder (neither .kvp files, nor PyTorch traces, nor the tables of an export)"
    )


def expand(path: Path) -> list[Path]:
    """A folder of traces, one file per rank, is its files; anything else is itself."""
    if not path.is_dir():
        return [path]
    names = sorted(entry.name for entry in path.iterdir())
    if {"kvprobe.json", "run.json"} & set(names) or any(name.endswith(".kvp") for name in names):
        return [path]
    suffixes = _suffixes()
    return [path / name for name in names if name.endswith(suffixes) and (path / name).is_file()] or [path]


def expand_deeply(path: Path, also: tuple[str, ...] = ()) -> list[Path]:
    """All recordings in a folder and the folders in it, links left aside; anything else is itself.

    Files whose names end in one of `also` are among them.
    """
    if not path.is_dir():
        return [path]
    found = []
    suffixes = (*_suffixes(), *also)
    for folder, inner, names in os.walk(path):
        here = Path(folder)
        if {"kvprobe.json", "run.json"} & set(names) or any(name.endswith(".kvp") for name in names):
            found.append(here)
            inner.clear()  # what lies in a run folder belongs to the run
            continue
        inner.sort()
        found += [here / name for name in sorted(names) if name.endswith(suffixes) and (here / name).is_file()]
    return found or [path]


def _reader(form: str) -> Reader:
    from kvprobe.recordings.reader import load_reader

    module, what = FORMATS[form]
    try:
        return load_reader(module)
    except ImportError as error:
        raise RecordingError(f"a {what} cannot be read here: {error}") from error


def _asked() -> Iterator[tuple[str, Reader]]:
    """The readers that say themselves what is theirs."""
    for form in FORMATS:
        if form not in _TOLD_HERE:
            try:
                yield form, _reader(form)
            except RecordingError:
                continue


def _told(path: Path, start: bytes) -> str | None:
    """The format whose reader says that this is it."""
    return next((form for form, reader in _asked() if reader.sniff(path, start)), None)


def _suffixes() -> tuple[str, ...]:
    return (*_SUFFIXES, *(suffix for _, reader in _asked() for suffix in reader.suffixes))
