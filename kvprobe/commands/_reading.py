"""What the commands that read recordings share: opening them with a progress bar, and their diagnosis."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from kvprobe.errors import plain

if TYPE_CHECKING:
    from kvprobe.diagnosis import Examination
    from kvprobe.recordings.model import Recording
    from kvprobe.recordings.occupancy import Occupancy
    from kvprobe.recordings.serving import ServingWindow
    from kvprobe.reporting.inputs import Input

__all__ = [
    "WindowOptions",
    "cropped",
    "diagnosed",
    "diagnosed_apart",
    "opened",
    "plain",
    "progress_bar",
    "window_options",
]


class Progress(Protocol):
    """Called with what is being done and the fraction of it that is done."""

    def __call__(self, what: str, fraction: float) -> None: ...


_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -2, -4, -8  # malloc.h


def reuse_memory() -> None:
    """Keeps glibc from returning freed arrays to the kernel, which would have to clear each page again for the next.

    Reading and diagnosing makes and frees hundreds of arrays of tens of megabytes: half of the time went into pages.
    Only for commands, whose process ends with the work; a library must not decide this for its host.
    """
    import ctypes

    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # another C library: as it was
        return
    mallopt(_M_ARENA_MAX, 1)  # what one thread frees another takes
    for option, value in ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, (1 << 31) - 1), (_M_TOP_PAD, 1 << 25)):
        mallopt(option, value)


@contextmanager
def progress_bar(quiet: bool = False) -> Iterator[Progress]:
    """A bar on stderr where that is a terminal, else silence."""
    if quiet or not sys.stderr.isatty():
        yield lambda what, fraction: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("reading", total=1.0)
        yield lambda what, fraction: bar.update(task, description=what, completed=min(max(fraction, 0.0), 1.0))


def opened(inputs: Sequence[Path], *, quiet: bool = False) -> Recording:
    """The recordings as one.

    Raises:
        RecordingError: one of them cannot be read.
    """
    from kvprobe.recordings import open_recording

    reuse_memory()
    with progress_bar(quiet) as progress:
        return open_recording(inputs, progress=progress)


@dataclass(frozen=True)
class WindowOptions:
    """What `--from`, `--to` and `--range` asked for."""

    begin: str | None = None
    end: str | None = None
    within: str = ""

    def of(self, recording: Recording) -> ServingWindow:
        """The serving window of a recording: what was asked for, else what is found.

        Raises:
            UsageError: it means nothing, or nothing of the recording lies in it.
        """
        from kvprobe.recordings.serving import serving_window

        return serving_window(recording, *self.check(), self.within)

    def check(self) -> tuple[int | None, int | None]:
        """What `--from` and `--to` asked for, nanoseconds.

        Raises:
            UsageError: it is no time.
        """
        from kvprobe.recordings.serving import parse_time

        begin = parse_time(self.begin, "--from") if self.begin is not None else None
        return begin, parse_time(self.end, "--to") if self.end is not None else None


def window_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds `--from`, `--to` and `--range`, which arrive as one `window`."""
    import functools

    import click

    @click.option(
        "--from",
        "begin",
        metavar="TIME",
        help="Judge only from this time on, counted from the start of the recording: 1.5s.",
    )
    @click.option("--to", "end", metavar="TIME", help="Judge only up to this time, counted as for --from.")
    @click.option(
        "--range", "within", default="", metavar="NAME", help="Judge only what lies in NVTX ranges of this name."
    )
    @functools.wraps(command)
    def with_window(*words: Any, begin: str | None, end: str | None, within: str, **options: Any) -> Any:
        return command(*words, window=WindowOptions(begin, end, within), **options)

    return with_window


def diagnosed(
    inputs: Sequence[Path], *, quiet: bool = False, window: WindowOptions | None = None
) -> tuple[Recording, Examination, Occupancy]:
    """The recordings as one, what is wrong in them within the window, and how full their queues were."""
    from kvprobe.recordings import open_recording

    reuse_memory()
    with progress_bar(quiet) as progress:
        recording = open_recording(inputs, progress=lambda what, fraction: progress(what, 0.8 * fraction))
        progress("looking for causes", 0.8)
        judged = _judged(recording, window or WindowOptions())
        progress("done", 1.0)
    return judged


def diagnosed_apart(
    inputs: Sequence[Path], *, quiet: bool = False, window: WindowOptions | None = None
) -> tuple[Recording, Examination, Occupancy, list[Input]]:
    """As `diagnosed`, and each input by itself as well; no inputs where there is only one."""
    from kvprobe.recordings import open_apart
    from kvprobe.reporting.inputs import Input

    reuse_memory()
    with progress_bar(quiet) as progress:
        recording, parts = open_apart(inputs, progress=lambda what, fraction: progress(what, 0.7 * fraction))
        progress("looking for causes", 0.7)
        whole = _judged(recording, window or WindowOptions())
        apart = []
        for i, (name, part) in enumerate(parts if len(parts) > 1 else ()):
            progress(f"looking for causes in {name}", 0.8 + 0.2 * i / len(parts))
            apart.append(Input(name, *_judged(part, window or WindowOptions())))
        progress("done", 1.0)
    return *whole, apart


def _judged(recording: Recording, window: WindowOptions) -> tuple[Recording, Examination, Occupancy]:
    from kvprobe.diagnosis import examined

    found, queues = examined(recording, window.of(recording))
    return recording, found, queues


def cropped(recording: Recording, window: WindowOptions) -> Recording:
    """The recording with only the calls, executions and ranges that lie in the window that was asked for, if any."""
    if window == WindowOptions():
        return recording
    from dataclasses import replace

    asked = window.of(recording)
    tables = dict(recording.tables)
    for kind in ("calls", "executions", "ranges", "transfers"):
        table = tables[kind]
        if table.rows:
            tables[kind] = table.where(asked.holds(table["process"], table["start_ns"]))
    return replace(recording, tables=tables, window=asked)
