"""`kvprobe attach PID`: records the copies of a process that runs already, without a restart."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import click

from kvprobe.commands import run
from kvprobe.errors import KvprobeError

__all__ = ["command"]


@click.command(short_help="Record a process that runs already.")
@click.argument("pid", type=click.IntRange(1), metavar="PID")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Run folder. Default: ./kvprobe-<command>-<time>.",
)
@click.option(
    "--detail",
    type=click.Choice(["totals", "copies", "launches"]),
    default="copies",
    show_default=True,
    help="What is kept of single calls, as for `kvprobe run`.",
)
@click.option(
    "--max-size",
    default="1G",
    show_default=True,
    metavar="SIZE",
    help="Bound of the recording's size, all processes together.",
)
def command(pid: int, output: Path | None, detail: str, max_size: str) -> None:
    """Record every CUDA copy that the process PID makes from now on, and those of its children that use CUDA.

    A debugger (gdb) loads the interposer into the process and has it write its functions where the process's libraries
    keep the CUDA functions' addresses; results do not change. `kvprobe detach PID` puts the addresses back and leaves
    a report. What these processes start from now on is recorded, too.

    Not seen: calls through a pointer that a library had fetched before (dlsym, cuGetProcAddress), and a CUDA runtime
    that is linked statically. The process needs the same user and no container between it and kvprobe.
    """
    from kvprobe.instrument import attach
    from kvprobe.probe import processes

    attach.refuse(pid)
    limit = run._bytes(max_size)
    library = run._interposer()
    words = _words(pid)
    folder = run._make_folder(output, words[0])
    options: dict[str, Any] = {
        "report": "",
        "fix": "off",
        "detail": detail,
        "max_bytes": limit,
        "stacks": True,
        "stacks_how": run._how_stacks(),
        "stacks_after_ms": 50,
        "nvml": False,
        "nsys": False,
        "program": words[0],
        "words": " ".join(words),
        "terminal": run._terminal(),
        "attached": [pid],
    }
    run.write_run(folder, words, options, pid)
    others = [other for other in processes.descendants(pid) if attach.uses_cuda(other) and other != os.getpid()]
    try:
        attach.attach(pid, library, folder, detail, limit)
    except KvprobeError:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    attached = [pid]
    for other in others:
        try:
            attach.refuse(other)
            attach.attach(other, library, folder, detail, limit)
            attached.append(other)
        except KvprobeError as error:
            click.echo(f"kvprobe: warning: {error}", err=True)
    options["attached"] = attached
    run.write_run(folder, words, options, pid)
    run.start_observer(folder, pid)
    children = f" and {len(attached) - 1} of its children" if len(attached) > 1 else ""
    click.echo(f"recording process {pid}{children} into {folder}")
    if not attach.uses_cuda(pid) and len(attached) == 1:
        click.echo(f"kvprobe: process {pid} has no CUDA library loaded: nothing is recorded before it has", err=True)
    click.echo(f"watch it: kvprobe top {pid}; end it with a report: kvprobe detach {pid}")


def _words(pid: int) -> tuple[str, ...]:
    words = [os.fsdecode(word) for word in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[:-1]]
    return tuple(words) or (Path(f"/proc/{pid}/comm").read_text().strip(),)


def attached_pids(folder: Path) -> list[int]:
    """Processes that `attach` was told of or found, by run.json."""
    try:
        return [int(pid) for pid in json.loads((folder / "run.json").read_text())["options"]["attached"]]
    except (OSError, ValueError, KeyError, TypeError):
        return []
