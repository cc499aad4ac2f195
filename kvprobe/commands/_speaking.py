"""`kvprobe run` as the parent of its command: it hands on signals, and says what was found before it ends likewise."""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import time
from collections.abc import Callable
from pathlib import Path

import click

__all__ = ["Command", "end_like", "say_outcome"]

# Sent to kvprobe by somebody, they are for the command; what the terminal sends reaches the command by itself.
_HANDED_ON = {signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}
_SI_USER, _SI_QUEUE, _SI_TKILL = 0, -1, -6
LEFT_RUNNING_S = 5.0  # after the command, for the processes that it started
LATE_S = 25.0  # more where none of them is seen: on a busy machine the observer may be late
REPORT_S = 900.0


class Command:
    """The command as a child that begins once `go` has been called; between, its observer can be started."""

    def __init__(self, begin: Callable[[int], None]) -> None:
        """Forks. `begin` gets the observer's pid in the child, and becomes the command (exec)."""
        self.before = signal.pthread_sigmask(signal.SIG_BLOCK, _HANDED_ON | {signal.SIGCHLD})
        read_end, self._write_end = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            self._become(begin, read_end)
        os.close(read_end)

    def _become(self, begin: Callable[[int], None], read_end: int) -> None:
        """The child's part; never returns."""
        code = 127
        try:
            os.close(self._write_end)
            with os.fdopen(read_end) as pipe:
                observer = pipe.read()
            if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
                signal.signal(signal.SIGINT, signal.SIG_DFL)  # from here on it is the command that is interrupted
            signal.pthread_sigmask(signal.SIG_SETMASK, self.before)
            if observer:
                begin(int(observer))
        except BaseException as error:
            code = int(getattr(error, "exit_code", 126))
            with contextlib.suppress(OSError):
                os.write(2, f"kvprobe: {error}\n".encode())
        finally:
            os._exit(code)

    def go(self, observer: int) -> None:
        """The command begins."""
        os.write(self._write_end, str(observer).encode())
        os.close(self._write_end)
        # Whoever reads the command's output must find its end when the command ends.
        null = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1):
            os.dup2(null, fd)
        os.close(null)

    def wait(self) -> int:
        """Hands on signals until the command has ended; its exit code, or -N for signal N."""
        while True:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            if ended:
                signal.pthread_sigmask(signal.SIG_SETMASK, self.before)
                return os.waitstatus_to_exitcode(status)
            found = signal.sigwaitinfo(_HANDED_ON | {signal.SIGCHLD})
            if found.si_signo != signal.SIGCHLD and found.si_code in (_SI_USER, _SI_QUEUE, _SI_TKILL):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.pid, found.si_signo)


def say_outcome(folder: Path, observer: int, *, findings: bool = True) -> None:
    """Waits for the observer and prints what it found, on stderr; what has been left running is not waited for.

    Args:
        folder: of the run.
        observer: its pid.
        findings: False: of its lines only warnings, and where the report is.
    """
    from kvprobe.runfolder.files import full, is_full
    from kvprobe.runfolder.folder import RunFolder

    end = folder / "end.json"
    try:
        _ended(observer, LEFT_RUNNING_S, end.exists)
        if not end.exists() and not _left_running(folder):
            _ended(observer, LATE_S, end.exists)
        if end.exists():
            _ended(observer, REPORT_S)
    except KeyboardInterrupt:  # the report goes on without a listener
        pass
    said = RunFolder(folder).outcome()
    for line in said if findings else [one for one in said if one.startswith("warning: ") or one == said[-1]]:
        click.echo(f"kvprobe: {line}", err=True)
    if said:
        return
    if is_full(folder):
        click.echo(f"kvprobe: {full(folder)}; no report was made", err=True)
    elif not end.exists():
        click.echo(f"kvprobe: the report will be in {folder} when all processes of the command have ended", err=True)
    else:
        click.echo(f"kvprobe: the report is being written in {folder}", err=True)


def _left_running(folder: Path) -> bool:
    """Whether a process that the command started can be seen to run."""
    from kvprobe.environment import RUN
    from kvprobe.probe import processes

    return any((processes.environment(pid) or {}).get(RUN.name) == str(folder) for pid in processes.children())


def _ended(pid: int, seconds: float, enough: Callable[[], bool] = lambda: False) -> None:
    """Waits for a process to end, but no longer than `seconds`, nor once `enough` holds."""
    try:
        fd = os.pidfd_open(pid)
    except OSError:
        return
    try:
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if poll.poll(200) or enough():
                return
    finally:
        os.close(fd)


def end_like(code: int) -> int:
    """The exit code of a command, or this process's death by the same signal."""
    if code >= 0:
        return code
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    with contextlib.suppress(OSError, ValueError):
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
    return 128 - code
