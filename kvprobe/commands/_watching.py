"""What the commands that record share: `run`, `attach` and `try` make the same folder and start the same observer."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import platform
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import click

from kvprobe import environment
from kvprobe.commands._paths import GivenPath
from kvprobe.errors import UsageError

__all__ = [
    "ends_by_sigterm",
    "how_stacks",
    "interposer",
    "new_folder",
    "recording_options",
    "start_observer",
    "terminal",
    "write_run",
]

_SIZE = re.compile(r"(\d{1,15}(?:\.\d{1,15})?)\s*([kmgt]?)i?b?", re.IGNORECASE)
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}

_NOT_HERE = frozenset({errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOSPC, errno.EDQUOT})

F = TypeVar("F", bound=Callable[..., Any])


def recording_options(command: F) -> F:
    """Adds --output, --detail and --max-size: `output`, `detail` and `max_bytes` of the command's function."""
    for option in (
        click.option(
            "--max-size",
            "max_bytes",
            default="1G",
            show_default=True,
            metavar="SIZE",
            callback=_bytes,
            help="Upper limit of the recording's size, for all processes together.",
        ),
        click.option(
            "--detail",
            type=click.Choice(["totals", "copies", "launches"]),
            default="copies",
            show_default=True,
            help="Which single calls are kept: `copies` keeps every copy and the slow launches, `launches` keeps all"
            " launches too, `totals` keeps slow calls only. The totals are always exact.",
        ),
        click.option(
            "-o",
            "--output",
            type=GivenPath(),
            metavar="DIR",
            help="Run folder. Default: ./kvprobe-<command>-<time>.",
        ),
    ):
        command = option(command)
    return command


def _bytes(_: click.Context, __: click.Parameter, text: str) -> int:
    match = _SIZE.fullmatch(text.strip())
    if match is None or not float(match[1]):
        raise UsageError(f"--max-size {text}: not a size; write one like 500M or 2G")
    return int(float(match[1]) * _UNITS[match[2].lower()])


def new_folder(output: Path | None, prefix: str, program: str) -> Path:
    """A folder for what is recorded, made now and for this user alone: `output`, else ./<prefix>-<program>-<time>.

    Raises:
        UsageError: it cannot be made, belongs to somebody else, or holds something already.
    """
    name = re.sub(r"[^\w.-]+", "_", Path(program).name) or "command"
    base = output if output is not None else Path(f"{prefix}-{name}-{time.strftime('%Y%m%d-%H%M%S')}")
    try:
        base = base.absolute()
    except FileNotFoundError:
        raise UsageError(
            "the current folder has been deleted; name a run folder by its whole path (--output)"
        ) from None
    for attempt in range(100):
        folder = base if not attempt else base.with_name(f"{base.name}-{attempt + 1}")
        try:
            folder.mkdir(mode=0o700, parents=output is not None, exist_ok=output is not None)
            if folder.stat().st_uid != os.geteuid():
                raise UsageError(
                    f"--output {folder} belongs to somebody else, who could swap what is written there; name another"
                )
            _claim(folder)
            _refuse_filled(folder)
            folder.chmod(0o700)
            _refuse_filled(folder)  # whoever could write to it before may have done so meanwhile
            if not os.access(folder, os.W_OK):
                raise PermissionError(13, "Permission denied", str(folder))
        except FileExistsError:
            if output is not None:
                raise UsageError(f"--output {folder} is a file") from None
            continue
        except OSError as error:
            if output is None and error.errno in _NOT_HERE and base.parent != (elsewhere := _elsewhere()):
                click.echo(
                    f"kvprobe: {base.parent} cannot be written ({error.strerror}): recording under {elsewhere}",
                    err=True,
                )
                return new_folder(elsewhere / base.name, prefix, program)
            raise UsageError(
                f"the folder {folder} cannot be made ({error.strerror}); name another with --output"
            ) from None
        return folder
    raise UsageError(f"too many folders like {base}; name one with --output")


def _elsewhere() -> Path:
    from kvprobe.runfolder.files import temporary_folder

    try:
        return temporary_folder()
    except OSError as error:
        raise UsageError(
            f"neither this folder nor the temporary one can be written ({error.strerror}); name one with --output"
        ) from None


def _claim(folder: Path) -> None:
    """Locks an empty folder for as long as this process lives: two runs that begin at once would both find it empty."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise UsageError(f"--output {folder} is the folder of another run that has just begun; name another") from None
    except OSError:  # a file system without locks
        os.close(fd)


def _refuse_filled(folder: Path) -> None:
    if any(folder.iterdir()):
        raise UsageError(f"--output {folder} is not empty; name a folder that is, or does not exist")


def interposer() -> Path:
    """The library that records a process's CUDA calls.

    Raises:
        KvprobeError: it was not built for this machine.
    """
    from kvprobe.native.library import path_of

    return path_of("libkvprobe_interpose.so")


def how_stacks() -> str:
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


def terminal() -> str:
    """Path of the user's terminal, "" without one. By its name: the observer's session has no /dev/tty."""
    try:
        return os.ttyname(2)
    except OSError:
        return ""


def write_run(folder: Path, words: tuple[str, ...], options: dict[str, Any], pid: int) -> None:
    """run.json: what is recorded, how, and where. `pid` is that of the command. A run around this one is told of it."""
    from kvprobe.runfolder.folder import RunFolder
    from kvprobe.runfolder.secrets import redact
    from kvprobe.version import version

    uname = platform.uname()
    run = {
        "command": redact(words),
        "cwd": _current_folder(),
        "version": version(),
        "host": uname.node,
        "kernel": f"{uname.system} {uname.release} {uname.machine}",
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "pid": pid,
        "realtime_ns": time.time_ns(),
        "gpu_nodes": _gpu_nodes(),
        "monotonic_ns": time.monotonic_ns(),
        "options": options,
        "environment": {k: v for k, v in os.environ.items() if k.startswith(("CUDA_", "NVIDIA_", "KVHOST_"))},
    }
    RunFolder(folder).write_run(run)
    if environment.RUN.text:
        with contextlib.suppress(OSError):  # it has gone, or may not be written
            RunFolder(Path(environment.RUN.text)).write_inner(pid, folder)


def _current_folder() -> str:
    """Path of the current folder, "" where it has been deleted: the command can do without it."""
    try:
        return str(Path.cwd())
    except FileNotFoundError:
        return ""


def _gpu_nodes() -> list[int]:
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
    from kvprobe.runfolder.folder import RunFolder

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
        log = RunFolder(folder).open_log()
        for fd, source in ((0, null), (1, log), (2, log)):
            os.dup2(source, fd)
        env = {k: v for k, v in os.environ.items() if not k.startswith("KVPROBE_") and k != "LD_PRELOAD"}
        env[environment.RUN.name] = ""  # a run around this one is not to complete it
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


@contextlib.contextmanager
def ends_by_sigterm() -> Iterator[None]:
    """SIGTERM is an exception, so that the command that is running is ended, too (`timeout`, a pipeline's cancel)."""

    def end(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
