"""`kvprobe attach PID`: records the copies of a process that runs already, without a restart."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import click

from kvprobe.commands._watching import (
    how_stacks,
    interposer,
    new_folder,
    recording_options,
    start_observer,
    terminal,
    write_run,
)
from kvprobe.errors import KvprobeError
from kvprobe.runfolder.secrets import redact_text

__all__ = ["command"]


@click.command(short_help="Record a process that is already running.")
@click.argument("pid", type=click.IntRange(1), metavar="PID")
@recording_options
def command(pid: int, output: Path | None, detail: str, max_bytes: int) -> None:
    """Record every CUDA copy that the process PID makes from now on, and those of its children that use CUDA.

    A debugger (gdb) loads the interposer into the process, which replaces the addresses of the CUDA functions in the
    process's libraries; results do not change. `kvprobe detach PID` puts the addresses back and writes a report. What
    these processes start from now on is recorded, too.

    Not recorded are calls through a pointer that a library fetched earlier (dlsym, cuGetProcAddress), and those of a
    statically linked CUDA runtime. The process must belong to the same user, and be in the same container.
    """
    from kvprobe.instrument import attach
    from kvprobe.probe import processes

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
    try:
        attach.attach(pid, library, folder, detail, max_bytes)
    except KvprobeError:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    attached = [pid]
    for other in others:
        try:
            attach.refuse(other)
            attach.attach(other, library, folder, detail, max_bytes)
            attached.append(other)
        except KvprobeError as error:
            click.echo(f"kvprobe: warning: {error}", err=True)
    options["attached"] = attached
    write_run(folder, words, options, pid)
    start_observer(folder, pid)
    children = f" and {len(attached) - 1} of its children" if len(attached) > 1 else ""
    click.echo(f"recording process {pid}{children} into {folder}")
    if not attach.uses_cuda(pid) and len(attached) == 1:
        click.echo(
            f"kvprobe: process {pid} has no CUDA library loaded: nothing is recorded until it loads one", err=True
        )
    click.echo(f"watch it: kvprobe top {pid}; end it and get a report: kvprobe detach {pid}")


def _words(pid: int) -> tuple[str, ...]:
    words = [os.fsdecode(word) for word in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[:-1]]
    return tuple(words) or (Path(f"/proc/{pid}/comm").read_text().strip(),)
