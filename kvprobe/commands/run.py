"""`kvprobe run -- COMMAND`: runs a command and records every copy of every process it starts.

The command is a child that begins when its observer has been started, and the observer is not its parent nor its child.
Signals are handed on, exit code, input and output are the command's own; at the end kvprobe says what was found. With
`--exec` the command takes this process's place, so that its pid, too, is the one that a supervisor knows.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

import click

from kvprobe import environment
from kvprobe.commands._speaking import Command, end_like, say_outcome
from kvprobe.errors import KvprobeError, UsageError
from kvprobe.runfolder.secrets import redact_text

__all__ = ["command"]

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)i?b?", re.IGNORECASE)
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


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
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Run folder. Default: ./kvprobe-<command>-<time>.",
)
@click.option(
    "--report",
    type=click.Path(path_type=Path),
    metavar="PATH",
    help="Where the report goes; `none` makes none. Default: report.html in the run folder.",
)
@click.option(
    "--fix",
    type=click.Choice(["off", "auto"]),
    default="off",
    show_default=True,
    help="Let adapters switch a saturated server to pooled streams and dedup.",
)
@click.option(
    "--detail",
    type=click.Choice(["totals", "copies", "launches"]),
    default="copies",
    show_default=True,
    help="What is kept of single calls. Totals are exact with any; launches are timed, but "
    "only the slow ones are kept; `launches` keeps all.",
)
@click.option(
    "--max-size",
    default="1G",
    show_default=True,
    metavar="SIZE",
    help="Bound of the recording's size, all processes together.",
)
@click.option(
    "--stacks/--no-stacks", default=True, show_default=True, help="Take Python stacks of a process that a call blocks."
)
@click.option(
    "--stacks-after",
    default=50,
    show_default=True,
    metavar="MS",
    type=click.IntRange(1),
    help="How long a call has to block for that, in ms.",
)
@click.option("--nvml", is_flag=True, help="Sample the GPU's counters while it runs.")
@click.option("--exec", "in_place", is_flag=True, help="COMMAND takes kvprobe's place and pid: for supervisors.")
@click.option("--nsys", is_flag=True, help="Run under Nsight Systems, too: one .nsys-rep with kvprobe's ranges in it.")
def command(
    words: tuple[str, ...],
    output: Path | None,
    report: Path | None,
    fix: str,
    detail: str,
    max_size: str,
    stacks: bool,
    stacks_after: int,
    nvml: bool,
    in_place: bool,
    nsys: bool,
) -> int:
    """Run COMMAND and record every CUDA copy of every process it starts.

    Works on servers as they are (vllm, sglang, lmcache, torchrun, python app.py) through fork, spawn, shells and other
    virtual environments. When all of it has ended, the run folder holds one recording and one report; `kvprobe report
    DIR` makes the report of a run that is going on or was cut off.
    """
    if not words:
        raise UsageError("no command was given: kvprobe run [OPTIONS] -- COMMAND [ARGUMENT...]")
    asked = words
    limit = _bytes(max_size)
    program = _find_program(words[0])
    launcher = _nsys_launcher() if nsys else []
    if report is not None and str(report) != "none":
        report = _check_report(report)
    library = _interposer()
    folder = _make_folder(output, words[0])
    library = _preloadable(library, folder)
    how = _how_stacks() if stacks else "off"
    options: dict[str, Any] = {
        "report": str(report) if report else "",
        "fix": fix,
        "detail": detail,
        "max_bytes": limit,
        "stacks": stacks,
        "stacks_how": how,
        "stacks_after_ms": stacks_after,
        "nvml": nvml,
        "nsys": nsys,
        "program": program,
        "words": redact_text(" ".join(words)),
        "terminal": _terminal() if in_place else "",
        "killed": environment.killed(),
    }
    env = dict(os.environ)
    if options["killed"]:
        click.echo("kvprobe: KVPROBE=off is set: the command runs, and nothing is recorded", err=True)
    env |= {
        environment.RUN.name: str(folder),
        environment.DETAIL.name: detail,
        environment.FIX.name: fix,
        environment.MAX_BYTES.name: str(limit),
        environment.STACKS.name: how,
        **_carried(env),
        "LD_PRELOAD": f"{env['LD_PRELOAD']}:{library}" if env.get("LD_PRELOAD") else str(library),
    }
    if launcher:
        program, words = launcher[0], (*launcher, "-o", str(folder / "nsys"), "--", program, *words[1:])

    def begin(observer: int) -> None:
        _exec(program, list(words), {**env, environment.OBSERVER.name: str(observer)})

    if sys.stderr.isatty() or not in_place:
        click.echo(f"kvprobe: recording into {folder}", err=True)
    if in_place:
        write_run(folder, asked, options, os.getpid())
        begin(start_observer(folder, os.getpid()))
    sys.stdout.flush()
    child = Command(begin)
    write_run(folder, asked, options, child.pid)
    observer = start_observer(folder, child.pid)
    child.go(observer)
    code = child.wait()
    if not options["killed"]:
        say_outcome(folder, observer)
    return end_like(code)


def _bytes(text: str) -> int:
    match = _SIZE.fullmatch(text.strip())
    if match is None or not float(match[1]):
        raise UsageError(f"--max-size {text}: not a size; write one like 500M or 2G")
    return int(float(match[1]) * _UNITS[match[2].lower()])


def _find_program(word: str) -> str:
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
    if not os.access(report.parent, os.W_OK):
        raise UsageError(f"--report {report}: {report.parent} does not exist or may not be written")
    return report


def _make_folder(output: Path | None, word: str) -> Path:
    """The run folder, made now; never one that holds another run."""
    name = re.sub(r"[^\w.-]+", "_", Path(word).name) or "command"
    base = output if output is not None else Path(f"kvprobe-{name}-{time.strftime('%Y%m%d-%H%M%S')}")
    base = base.absolute()
    for attempt in range(100):
        folder = base if not attempt else base.with_name(f"{base.name}-{attempt + 1}")
        try:
            folder.mkdir(mode=0o700, parents=output is not None, exist_ok=output is not None)
            if folder.stat().st_uid != os.geteuid():
                raise UsageError(
                    f"--output {folder} belongs to somebody else, who could swap what is written there; name another"
                )
            folder.chmod(0o700)
            if any(folder.iterdir()):
                raise UsageError(f"--output {folder} is not empty; name a folder that is, or does not exist")
            if not os.access(folder, os.W_OK):
                raise PermissionError(13, "Permission denied", str(folder))
        except FileExistsError:
            if output is not None:
                raise UsageError(f"--output {folder} is a file") from None
            continue
        except OSError as error:
            raise UsageError(
                f"the run folder {folder} cannot be made ({error.strerror}); name another with --output"
            ) from None
        return folder
    raise UsageError(f"too many run folders like {base}; name one with --output")


def _interposer() -> Path:
    from kvprobe.native.library import path_of

    return path_of("libkvprobe_interpose.so")


def _preloadable(library: Path, folder: Path) -> Path:
    """LD_PRELOAD splits at spaces and colons: a path with one is reached through a copy."""
    if not re.search(r"[\s:]", str(library)):
        return library
    if re.search(r"[\s:]", str(folder)):
        raise UsageError(
            f"neither {library} nor {folder} can be named in LD_PRELOAD (a space or colon in the path); "
            "name a run folder without one with --output"
        )
    return Path(shutil.copy2(library, folder / library.name))


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
            f"kvprobe: adapters act in this environment only: a path contains {os.pathsep!r} ({start})",
            err=True,
        )
        return {}
    path = [start, env["PYTHONPATH"]] if env.get("PYTHONPATH") else [start]
    return {"PYTHONPATH": os.pathsep.join(path), environment.CARRY.name: os.pathsep.join(dict.fromkeys(folders))}


def _how_stacks() -> str:
    """How stacks are taken: "py-spy" where a process may look into its relatives here, else "in-process"."""
    import ctypes

    from kvprobe.probe.stacks import py_spy

    if py_spy() is None:
        return "in-process"
    status = Path("/proc/self/status").read_text()
    capabilities = int(next((line.split()[1] for line in status.splitlines() if line.startswith("CapEff")), "0"), 16)
    try:
        scope = int(Path("/proc/sys/kernel/yama/ptrace_scope").read_text())
    except (OSError, ValueError):
        scope = 0
    # with scope 1 the interposer names the observer as one who may look (PR_SET_PTRACER)
    if not capabilities >> 19 & 1 and scope > 1:
        return "in-process"
    word = ctypes.c_uint64()
    here = (ctypes.c_uint64 * 2)(ctypes.addressof(word), 8)
    read = getattr(ctypes.CDLL(None, use_errno=True), "process_vm_readv", None)
    # container sandboxes refuse the call itself
    if read is None or read(os.getpid(), here, ctypes.c_ulong(1), here, ctypes.c_ulong(1), ctypes.c_ulong(0)) != 8:
        return "in-process"
    return "py-spy"


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


def _terminal() -> str:
    """Path of the user's terminal, "" without one. By its name: the observer's session has no /dev/tty."""
    try:
        return os.ttyname(2)
    except OSError:
        return ""


def write_run(folder: Path, words: tuple[str, ...], options: dict[str, Any], pid: int) -> None:
    """run.json: what is recorded, how, and where. `pid` is that of the command."""
    from kvprobe.runfolder.folder import RunFolder
    from kvprobe.runfolder.secrets import redact
    from kvprobe.version import version

    uname = platform.uname()
    run = {
        "command": redact(words),
        "cwd": str(Path.cwd()),
        "version": version(),
        "host": uname.node,
        "kernel": f"{uname.system} {uname.release} {uname.machine}",
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "pid": pid,
        "realtime_ns": time.time_ns(),
        "gpu_nodes": gpu_nodes(),
        "monotonic_ns": time.monotonic_ns(),
        "options": options,
        "environment": {k: v for k, v in os.environ.items() if k.startswith(("CUDA_", "NVIDIA_", "KVHOST_"))},
    }
    RunFolder(folder).write_run(run)


def gpu_nodes() -> list[int]:
    """NUMA nodes of the machine's NVIDIA GPUs, ascending; empty where the kernel does not tell."""
    nodes = set()
    for device in Path("/sys/bus/pci/devices").glob("*"):
        try:
            if (device / "vendor").read_text().strip() == "0x10de" and (device / "class").read_text().startswith(
                "0x03"
            ):
                nodes.add(int((device / "numa_node").read_text()))
        except (OSError, ValueError):
            continue
    return sorted(node for node in nodes if node >= 0)


def start_observer(folder: Path, command_pid: int) -> int:
    """Starts the observer and returns its pid. Forked twice: the command must not find a child it never had."""
    try:  # opened here, because a short command has ended before the observer is up, and its exit status with it
        myself = os.pidfd_open(command_pid)
    except OSError:
        myself = -1
    read_end, write_end = os.pipe()
    child = os.fork()
    if child:
        os.close(write_end)
        with os.fdopen(read_end) as pipe:
            answer = pipe.read()
        os.waitpid(child, 0)
        if myself >= 0:
            os.close(myself)
        return int(answer or 0)
    try:  # from here on nothing may return: this is a copy of the user's process
        os.setsid()
        grandchild = os.fork()
        if grandchild:
            os.write(write_end, str(grandchild).encode())
            os._exit(0)
        if myself >= 0:
            os.dup2(myself, 3)
            os.set_inheritable(3, True)
        os.closerange(4 if myself >= 0 else 3, 256)
        null = os.open(os.devnull, os.O_RDWR)
        log = os.open(folder / "observer.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
        for fd, source in ((0, null), (1, log), (2, log)):
            os.dup2(source, fd)
        env = {k: v for k, v in os.environ.items() if not k.startswith("KVPROBE_") and k != "LD_PRELOAD"}
        os.nice(5)
        arguments = [
            sys.executable,
            "-m",
            "kvprobe.instrument.observer",
            str(folder),
            str(command_pid),
            "3" if myself >= 0 else "-1",
        ]
        os.execve(sys.executable, arguments, env)
    finally:
        os._exit(127)


def _exec(program: str, arguments: list[str], env: dict[str, str]) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    for name in ("SIGPIPE", "SIGXFSZ"):  # Python ignores them; the command must find them as a shell leaves them
        signal.signal(getattr(signal, name), signal.SIG_DFL)
    try:
        os.execve(program, arguments, env)
    except OSError as error:
        raise CannotRunError(f"{program}: {error.strerror}", 126) from None
