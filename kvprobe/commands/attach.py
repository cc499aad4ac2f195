"""`kvprobe attach PID|NAME`: records the copies of a process that runs already, without a restart."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvprobe.commands._watching import (
    ends_by_sigterm,
    how_stacks,
    interposer,
    new_folder,
    recording_options,
    start_observer,
    terminal,
    write_run,
)
from kvprobe.errors import KvprobeError, UsageError
from kvprobe.runfolder.folder import RunFolder
from kvprobe.runfolder.secrets import redact_text

if TYPE_CHECKING:
    from kvprobe.instrument.attach import Attachment

__all__ = ["command", "find_process"]

LOOKED_UP = (
    "nothing in it is linked to CUDA's functions: it looks their addresses up (dlsym, cuGetProcAddress), and calls "
    "through those that it has looked up already are not recorded; `kvprobe run -- COMMAND` records them"
)
LISTED = 8  # processes that fit a name, in an error
SHOWN = 80  # characters of a command line there


@click.command(short_help="Record a process that is already running.")
@click.argument("target", metavar="PID|NAME")
@recording_options
def command(target: str, output: Path | None, detail: str, max_bytes: int) -> None:
    """Record the CUDA copies that the process PID and its children make from now on.

    NAME is a part of a process's command line. If several processes match, kvprobe takes the one that uses CUDA.

    kvprobe starts a thread in the process, which loads kvprobe's library. The library replaces the addresses of the
    CUDA functions in the process. Results do not change, and the process keeps running. Children that the process
    starts from now on are recorded, too. `kvprobe detach PID` restores the addresses and writes a report.

    attach cannot record two kinds of copies: those that a library makes through an address that it looked up earlier
    (dlsym, cuGetProcAddress), and those of a statically linked CUDA runtime. The process must belong to the same user
    and run in the same container.
    """
    from kvprobe.instrument import attach
    from kvprobe.probe import processes

    pid = find_process(target)
    attach.refuse(pid)
    library = interposer()
    words = _words(pid)
    folder = new_folder(output, "kvprobe", words[0])
    options: dict[str, Any] = {
        "detail": detail,
        "max_bytes": max_bytes,
        "stacks_how": how_stacks(),
        "program": words[0],
        "words": redact_text(" ".join(words)),
        "terminal": terminal(),
        "attached": [pid],
    }
    write_run(folder, words, options, pid)
    others = [other for other in processes.descendants(pid) if attach.uses_cuda(other) and other != os.getpid()]
    with (
        ends_by_sigterm(),
        ExitStack() as undone,
    ):  # undoes it all where this command ends early
        undone.callback(shutil.rmtree, folder, ignore_errors=True)

        def begin(one: int) -> attach.Attachment:
            return undone.enter_context(closing(attach.Attachment(one, library, folder, detail, max_bytes)))

        begun, led = _attach_to(pid, others, begin)
        options["attached"] = attached = list(led)
        write_run(folder, words, options, pid)
        observer = start_observer(folder, pid)
        undone.callback(os.kill, observer, signal.SIGKILL)
        RunFolder(folder).write_observer(observer)
        for attachment in begun:
            attachment.keep()
            attachment.close()
        undone.pop_all()
    children = f" and {len(attached) - 1} of its children" if len(attached) > 1 else ""
    click.echo(f"recording process {pid}{children} into {folder}")
    if not attach.uses_cuda(pid) and len(attached) == 1:
        click.echo(
            f"kvprobe: process {pid} has no CUDA library loaded: nothing is recorded until it loads one", err=True
        )
    unseen = [str(one) for one, calls in led.items() if not calls and attach.uses_cuda(one)]
    if unseen:
        click.echo(f"kvprobe: warning: process {', '.join(unseen)}: {LOOKED_UP}", err=True)
    click.echo(f"watch it: kvprobe top {pid}; end it and get a report: kvprobe detach {pid}")


def _attach_to(
    pid: int, others: list[int], begin: Callable[[int], Attachment]
) -> tuple[list[Attachment], dict[int, int]]:
    """All at once; the words written by process, of those where it worked. An error is raised for `pid` alone."""
    from kvprobe.instrument import attach

    begun: list[Attachment] = []
    led: dict[int, int] = {}

    def warn(one: int, error: KvprobeError) -> None:
        if one == pid:
            raise error
        click.echo(f"kvprobe: warning: {error}", err=True)

    for one in [pid, *others]:
        try:
            if one != pid:
                attach.refuse(one)
            begun.append(begin(one))
        except KvprobeError as error:
            warn(one, error)
    for attachment in begun:
        try:
            led[attachment.pid] = attachment.result()
        except KvprobeError as error:
            warn(attachment.pid, error)
    return begun, led


def find_process(target: str) -> int:
    """The process that a pid or a part of a command line stands for.

    A descendant of a process that fits as well is not counted: it is recorded with that one.

    Raises:
        UsageError: there is none, or there are several.
    """
    from kvprobe.instrument.attach import uses_cuda
    from kvprobe.probe import processes

    pid = processes.pid_in(target)
    if pid:
        return pid
    if pid == 0 or not target.strip():
        raise UsageError(f"{target or 'an empty text'} is neither a process id nor a part of a command line")
    fit = processes.named(target)
    if not fit:
        raise UsageError(f"no process has {target} in its command line")
    fit = [one for one in fit if uses_cuda(one)] or fit
    below = {child for one in fit for child in processes.descendants(one)}
    found = [one for one in fit if one not in below]
    if len(found) == 1:
        return found[0]
    listed = [f"{one} ({_shortened(redact_text(processes.command_line(one)))})" for one in found[:LISTED]]
    more = [f"{len(found) - LISTED} more"] if len(found) > LISTED else []
    raise UsageError(
        f"{len(found)} processes have {target} in their command lines, name one: {', '.join(listed + more)}"
    )


def _shortened(text: str) -> str:
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 3]}..."


def _words(pid: int) -> tuple[str, ...]:
    words = [os.fsdecode(word) for word in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[:-1]]
    return tuple(words) or (Path(f"/proc/{pid}/comm").read_text().strip(),)
