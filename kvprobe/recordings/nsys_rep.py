"""Reads `.nsys-rep` and `.qdstrm` with the Nsight Systems that is installed: exports to SQLite in a temporary folder.

Where only Nsight Compute is installed, its bundled copy (`host/target-linux-x64/nsys`) exports just as well; a
`.qdstrm` (what a recorder without an importer leaves) is first imported by `QdstrmImporter`, found beside it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from kvprobe.errors import RecordingError
from kvprobe.recordings import nsys_sqlite
from kvprobe.recordings.model import Recording

__all__ = ["find_importer", "find_nsys", "read"]

Progress = Callable[[str, float], None]

_ROOTS = ("opt/nvidia", "usr/local", "usr/lib", "usr/local/cuda")
_NSYS = (
    "nsight-systems*/bin/nsys",
    "nsight-systems*/*/bin/nsys",
    "nsight-systems*/target-linux-*/nsys",
    "nsight-systems*/*/target-linux-*/nsys",
    "nsight-compute*/host/target-linux-*/nsys",
    "nsight-compute*/*/host/target-linux-*/nsys",
    "cuda*/nsight-compute*/host/target-linux-*/nsys",
    "cuda*/bin/nsys",
)
_IMPORTER = (
    "nsight-systems*/host-linux-*/QdstrmImporter",
    "nsight-systems*/*/host-linux-*/QdstrmImporter",
    "nsight-compute*/host/linux-desktop-*/QdstrmImporter",
    "nsight-compute*/*/host/linux-desktop-*/QdstrmImporter",
    "cuda*/nsight-compute*/host/linux-desktop-*/QdstrmImporter",
)
_ADVICE = (
    "install Nsight Systems (or export elsewhere: nsys export --type sqlite FILE) and give kvprobe the .sqlite file"
)
_PACKAGES = {"libdw.so.1": "libdw1 (Debian, Ubuntu) or elfutils-libs"}


def find_nsys(root: Path = Path("/")) -> Path | None:
    """The `nsys` on PATH, else the newest of the places where NVIDIA's packages put one; None if there is none."""
    on_path = shutil.which("nsys")
    return Path(on_path) if on_path else _newest(root, _NSYS)


def find_importer(root: Path = Path("/")) -> Path | None:
    """The `QdstrmImporter` on PATH or of an installed Nsight Systems or Nsight Compute; None if there is none."""
    on_path = shutil.which("QdstrmImporter")
    return Path(on_path) if on_path else _newest(root, _IMPORTER)


def _newest(root: Path, patterns: tuple[str, ...]) -> Path | None:
    found = [
        path for pattern in patterns for path in _glob(root, pattern) if os.access(path, os.X_OK) and path.is_file()
    ]

    def version(path: Path) -> list[int]:
        return [int(number) for number in re.findall(r"\d+", str(path.relative_to(root).parent))]

    # Nsight Systems itself before the copy that Nsight Compute carries.
    return max(found, key=lambda path: ("nsight-systems" in str(path), version(path)), default=None)


def _glob(root: Path, pattern: str) -> Iterator[Path]:
    for base in _ROOTS:
        yield from (root / base).glob(pattern)


def read(path: Path, progress: Progress | None = None) -> Recording:
    """Reads one report.

    Raises:
        RecordingError: no Nsight Systems is installed, or what it lacks or said.
    """
    nsys = find_nsys()
    if nsys is None:
        raise RecordingError(f"{path}: reading it takes Nsight Systems, and no nsys was found: {_ADVICE}")
    with tempfile.TemporaryDirectory(prefix="kvprobe-") as folder:
        report = path
        if path.suffix == ".qdstrm":
            importer = find_importer()
            if importer is None:
                raise RecordingError(f"{path}: importing it takes QdstrmImporter, and none was found: {_ADVICE}")
            report = Path(folder) / "imported.nsys-rep"
            _run(path, [str(importer), "-i", str(path.resolve()), "-o", str(report)], report, progress, "importing")
        export = Path(folder) / "export.sqlite"
        _run(
            path,
            [
                str(nsys),
                "export",
                "--type",
                "sqlite",
                "--force-overwrite",
                "true",
                "--output",
                str(export),
                str(report.resolve()),
            ],
            export,
            progress,
            "exporting",
        )
        recording = nsys_sqlite.read(export, progress)
    source = recording.source[0]
    source.path, source.format, source.bytes = str(path), "nsys-rep", path.stat().st_size
    recording.notes = [note.replace(str(export), str(path)) for note in recording.notes]
    return recording


def _run(path: Path, command: list[str], result: Path, progress: Progress | None, what: str) -> None:
    """Runs one of NVIDIA's tools until it made `result`."""
    if progress is not None:
        progress(f"{what} with {Path(command[0]).name}", 0.0)
    try:
        # Its temporary files go where ours do; it reads nothing from a terminal.
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
            timeout=3600,
            env={**os.environ, "TMPDIR": str(result.parent)},
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RecordingError(f"{path}: {command[0]} could not be run ({error})") from error
    if done.returncode == 0 and result.exists():
        return
    said = (done.stderr + b"\n" + done.stdout).decode("utf-8", "replace")
    missing = re.search(r"loading shared libraries: (\S+?):", said)
    if missing:
        library = missing.group(1)
        package = _PACKAGES.get(library, f"the package that has {library}")
        raise RecordingError(f"{path}: {command[0]} lacks {library}: install {package}, then try again")
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    last = next((line for line in lines if "error" in line.lower()), lines[-1] if lines else "it printed no message")
    raise RecordingError(f"{path}: {Path(command[0]).name} failed with exit code {done.returncode} ({last[:300]})")
