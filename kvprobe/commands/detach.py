"""`kvprobe detach PID`: ends what `kvprobe attach` began, and leaves the report."""

from __future__ import annotations

import time
from pathlib import Path

import click

from kvprobe.errors import KvprobeError, UsageError

__all__ = ["command"]


@click.command(short_help="End a recording that `kvprobe attach` began.")
@click.argument("target", metavar="PID|NAME|FOLDER")
def command(target: str) -> None:
    """Stop recording the process PID and its children, and write the report.

    NAME is a part of the command line of one process, as `kvprobe attach` takes it. FOLDER is the run folder that
    `kvprobe attach` printed: kvprobe stops recording all processes of this folder. The processes keep running. A
    process that has called exec since it was attached is recorded until it ends.
    """
    from kvprobe.commands.attach import find_process
    from kvprobe.instrument import attach
    from kvprobe.probe import processes
    from kvprobe.runfolder.folder import RunFolder

    pid = processes.pid_in(target)
    if pid is None and target.strip() and "/" not in target and not Path(target).exists():
        pid = find_process(target)
    folder = attach.recorded_into(pid) if pid is not None else Path(target).absolute()
    if folder is None:
        raise UsageError(f"process {target} is not being recorded: there is nothing to detach from")
    if not target or not (folder / "run.json").exists():
        raise UsageError(f"{target or 'an empty text'} is neither a pid nor a run folder")
    first = RunFolder(folder).run().get("options", {}).get("attached", [])
    if not first:
        raise UsageError(f"{folder} was recorded by `kvprobe run`: the recording ends when its command ends")
    todo = dict.fromkeys(first)
    for pid in first:
        todo |= dict.fromkeys(processes.descendants(pid))
    done: list[int] = []
    left: list[int] = []
    failed: list[KvprobeError] = []
    for pid in todo:
        if not processes.alive(pid) or not attach.holding(pid):
            continue
        try:
            (left if attach.detach(pid) is None else done).append(pid)
        except KvprobeError as error:
            failed.append(error)
            click.echo(f"kvprobe: {error}", err=True)
    if failed:
        raise KvprobeError(f"{len(failed)} processes are still attached; try `kvprobe detach {folder}` again")
    left = [pid for pid in left if attach.recorded_into(pid) == folder]
    RunFolder(folder).mark_detached()
    click.echo(f"detached from {len(done)} process{'es' if len(done) != 1 else ''}", err=True)
    if left:
        click.echo(
            f"kvprobe: {len(left)} processes that have called exec since are recorded until they end: "
            f"{', '.join(map(str, left[:8]))}",
            err=True,
        )
    deadline = time.monotonic() + 120
    said = folder / "outcome.txt"
    while not said.exists() and not _ended(folder) and time.monotonic() < deadline:
        time.sleep(0.05)
    report = folder / "report.html"
    for line in said.read_text(errors="replace").splitlines()[:-1] if said.exists() else ():
        click.echo(f"kvprobe: {line}", err=True)
    click.echo(str(report) if report.exists() else f"no report yet: kvprobe report {folder}")


def _ended(folder: Path) -> bool:
    """Whether the observer has done all it does, or was not there to do it."""
    from kvprobe.probe import processes

    try:
        observer = int((folder / "observer.pid").read_text())
    except (OSError, ValueError):
        return True
    return not processes.alive(observer)
