"""`kvprobe run -- COMMAND`: runs a command and records every copy of every process it starts.

The command is a child that begins when its observer has been started, and the observer is not its parent nor its child.
Signals are handed on, exit code, input and output are the command's own; at the end kvprobe says what was found. With
`--exec` the command takes this process's place, so that its pid, too, is the one that a supervisor knows.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import click

from kvprobe import environment
from kvprobe.commands._paths import GivenPath
from kvprobe.commands._speaking import Command, end_like, say_outcome
from kvprobe.commands._watching import (
    how_stacks,
    interposer,
    new_folder,
    recording_options,
    start_observer,
    terminal,
    write_run,
)
from kvprobe.errors import KvprobeError, UsageError
from kvprobe.runfolder import files
from kvprobe.runfolder.secrets import redact_text

__all__ = ["become", "command", "environment_of", "find_program", "preloadable", "record", "say_where"]


class CannotRunError(KvprobeError):
    """The command does not exist (exit code 127) or may not be executed (126), as shells say it."""

    def __init__(self, message: str, exit_code: int) -> None:
        """Keep the exit code of the two."""
        super().__init__(message)
        self.exit_code = exit_code


@click.command(
    short_help="Run a command and record every copy of every process it starts.",
    context_settings={"allow_interspersed_args": False},
)
@click.argument("words", nargs=-1, metavar="[--] COMMAND [ARGUMENT...]", type=click.UNPROCESSED)
@recording_options
@click.option(
    "--report",
    type=GivenPath(),
    metavar="PATH",
    help="Where the report goes; `none` makes none. Default: report.html in the run folder.",
)
@click.option(
    "--fix",
    type=click.Choice(["off", "auto"]),
    default="off",
    show_default=True,
    help=(
        "auto: change how COMMAND copies, where a measurement shows a gain: adapters for known servers (`kvprobe "
        "patches` lists them), and staging of pageable memory."
    ),
)
@click.option(
    "--stacks/--no-stacks",
    default=True,
    show_default=True,
    help="Take the Python stacks of a process while a call blocks one of its threads, and now and then while it makes "
    "calls.",
)
@click.option(
    "--stacks-after",
    default=50,
    show_default=True,
    metavar="MS",
    type=click.IntRange(1),
    help="Take stacks only of calls that block for at least this long, in ms.",
)
@click.option("--nvml", is_flag=True, help="Sample the GPU's counters (NVML) while COMMAND runs.")
@click.option(
    "--exec",
    "in_place",
    is_flag=True,
    help="For supervisors: COMMAND takes the place of kvprobe, and runs under the pid that kvprobe had.",
)
@click.option(
    "--nsys", is_flag=True, help="Also record with Nsight Systems: one .nsys-rep with kvprobe's ranges in it."
)
def command(
    words: tuple[str, ...],
    output: Path | None,
    detail: str,
    max_bytes: int,
    report: Path | None,
    fix: str,
    stacks: bool,
    stacks_after: int,
    nvml: bool,
    in_place: bool,
    nsys: bool,
) -> int:
    """Run COMMAND and record every CUDA copy of every process it starts.

    The program needs no change: vllm, sglang, lmcache, torchrun, python app.py. kvprobe follows its processes through
    fork, spawn, shells and other virtual environments. When all processes have ended, kvprobe writes one report into
    the run folder, `report.html`, even if COMMAND was stopped by Ctrl-C, SIGTERM or SIGKILL. `kvprobe report DIR` makes
    the report of a run that is still running, or of one that ended together with its container.
    """
    if not words:
        raise UsageError("no command was given: kvprobe run [OPTIONS] -- COMMAND [ARGUMENT...]")
    program = find_program(words[0])
    launcher = _nsys_launcher() if nsys else []
    if report is not None and str(report) != "none":
        report = _check_report(report)
    library = interposer()
    folder = new_folder(output, "kvprobe", words[0])
    library = preloadable(library, folder)
    options: dict[str, Any] = {
        "report": str(report) if report else "",
        "fix": fix,
        "detail": detail,
        "max_bytes": max_bytes,
        "stacks": stacks,
        "stacks_how": how_stacks() if stacks else "off",
        "stacks_after_ms": stacks_after,
        "nvml": nvml,
        "nsys": nsys,
        "program": program,
        "words": redact_text(" ".join(words)),
        "terminal": terminal() if in_place else "",
        "killed": environment.killed(),
    }
    env = environment_of(folder, library, options)
    started = list(words)
    if launcher:
        program, started = launcher[0], [*launcher, "-o", str(folder / "nsys"), "--", program, *words[1:]]

    def begin(observer: int) -> None:
        become(program, started, {**env, environment.OBSERVER.name: str(observer)})

    if in_place:
        say_where(folder, options, quiet=not sys.stderr.isatty())
        write_run(folder, words, options, os.getpid())
        begin(start_observer(folder, os.getpid()))
    say_where(folder, options)
    return end_like(record(folder, words, options, begin))


def say_where(folder: Path, options: dict[str, Any], *, quiet: bool = False) -> None:
    """Says where the recording goes, and whether there will be none."""
    if options["killed"]:
        click.echo("kvprobe: KVPROBE=off is set: the command runs, and nothing is recorded", err=True)
    if not quiet:
        click.echo(f"kvprobe: recording into {folder}", err=True)


def record(
    folder: Path,
    words: tuple[str, ...],
    options: dict[str, Any],
    begin: Callable[[int], None],
    *,
    findings: bool = True,
) -> int:
    """Runs the command as a child with an observer, and says what was found.

    Args:
        folder: of the run.
        words: the command, for run.json.
        options: for run.json.
        begin: gets the observer's pid in the child, and becomes the command.
        findings: whether the terminal is told of those.

    Returns:
        The command's exit code, or -N for signal N.
    """
    sys.stdout.flush()
    child = Command(begin)
    write_run(folder, words, options, child.pid)
    observer = start_observer(folder, child.pid)
    child.go(observer)
    code = child.wait()
    if not options["killed"]:
        say_outcome(folder, observer, findings=findings)
    return code


def environment_of(folder: Path, library: Path, options: dict[str, Any]) -> dict[str, str]:
    """The command's environment: this one, and what has every process that it starts recorded."""
    env = dict(os.environ)
    return env | {
        environment.RUN.name: str(folder),
        environment.DETAIL.name: options["detail"],
        environment.FIX.name: options["fix"],
        environment.MAX_BYTES.name: str(options["max_bytes"]),
        environment.STACKS.name: options["stacks_how"],
        environment.INTERPOSER.name: str(library),
        **_carried(env),
        "LD_PRELOAD": f"{env['LD_PRELOAD']}:{library}" if env.get("LD_PRELOAD") else str(library),
        # a program with a shared AddressSanitizer would end at once, because something was loaded before its runtime
        "ASAN_OPTIONS": ":".join(filter(None, (env.get("ASAN_OPTIONS"), "verify_asan_link_order=0"))),
    }


def find_program(word: str) -> str:
    """The absolute path of a command.

    Raises:
        CannotRunError: there is none, or it may not be executed.
    """
    found = shutil.which(word)
    if found:
        return str(Path(found).absolute())
    if os.sep in word and Path(word).exists():
        what = "is a folder" if Path(word).is_dir() else "is not executable"
        raise CannotRunError(f"{word} {what}", 126)
    where = "no such file" if os.sep in word else "not found on PATH"
    raise CannotRunError(f"{word}: {where}", 127)


def _check_report(report: Path) -> Path:
    report = report.absolute()
    if report.is_dir():
        raise UsageError(f"--report {report} is a folder; name a file")
    if report.exists() and not report.is_file():
        raise UsageError(f"--report {report} is not a regular file; name one")
    if not os.access(report.parent, os.W_OK):
        raise UsageError(f"--report {report}: {report.parent} does not exist or may not be written")
    return report


def preloadable(library: Path, folder: Path) -> Path:
    """LD_PRELOAD splits at spaces and colons: a path with one is reached through a copy.

    Raises:
        UsageError: the folder's path has one, too.
    """
    if not re.search(r"[\s:]", str(library)):
        return library
    if re.search(r"[\s:]", str(folder)):
        raise UsageError(
            f"neither {library} nor {folder} can be named in LD_PRELOAD (a space or colon in the path); "
            "name a run folder without one with --output"
        )
    copied = folder / library.name
    files.copy(library, copied)
    return copied


def _carried(env: dict[str, str]) -> dict[str, str]:
    """What brings the start-up part and the adapters into a Python of another environment than kvprobe's."""
    import importlib.util

    import kvprobe.instrument

    folders = []
    for name in ("kvprobe", "wrapt", "packaging"):
        found = importlib.util.find_spec(name)
        if found is not None and found.origin:
            folders.append(str(Path(found.origin).parents[1]))
    start = str(Path(kvprobe.instrument.__file__).parent / "carried")
    if any(os.pathsep in path for path in (start, *folders)):
        click.echo(
            f"kvprobe: adapters work in this environment only, because a path contains {os.pathsep!r} ({start})",
            err=True,
        )
        return {}
    path = [start, env["PYTHONPATH"]] if env.get("PYTHONPATH") else [start]
    return {"PYTHONPATH": os.pathsep.join(path), environment.CARRY.name: os.pathsep.join(dict.fromkeys(folders))}


def _nsys_launcher() -> list[str]:
    """The start of an nsys command line.

    Raises:
        UsageError: there is no nsys here.
    """
    from kvprobe.recordings.nsys_rep import find_nsys

    found = find_nsys()
    if found is None:
        raise UsageError(
            "--nsys: Nsight Systems (nsys) is neither on PATH nor under /opt/nvidia; install it or leave --nsys out"
        )
    return [
        str(found),
        "profile",
        "-t",
        "cuda,nvtx,osrt",
        "--sample=none",
        "--cpuctxsw=none",
        "--cuda-graph-trace=node",
        "--trace-fork-before-exec=true",
        "--force-overwrite=true",
    ]


def become(program: str, arguments: list[str], env: dict[str, str]) -> NoReturn:
    """This process is the command from here on.

    Raises:
        CannotRunError: it cannot be executed.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    for name in ("SIGPIPE", "SIGXFSZ"):  # Python ignores them; the command must find them as a shell leaves them
        signal.signal(getattr(signal, name), signal.SIG_DFL)
    try:
        os.execve(program, arguments, env)
    except OSError as error:
        raise CannotRunError(f"{program}: {error.strerror}", 126) from None
