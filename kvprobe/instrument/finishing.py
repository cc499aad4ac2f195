"""The end of a run: what was not seen and why, end.json, the report, and the lines that the user is shown."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from kvprobe.errors import plain
from kvprobe.instrument.process_tracking import ProcessTracker
from kvprobe.probe import processes
from kvprobe.probe.device import confidential_computing
from kvprobe.runfolder import files
from kvprobe.runfolder.folder import CONFIDENTIAL, RunFolder

__all__ = ["finish", "show"]

log = logging.getLogger("kvprobe")

_STACKS = re.compile(r"stacks-(\d+)\.jsonl")
_NVIDIA = Path("/dev/nvidiactl")
_NO_GPU = (
    "this machine has no NVIDIA GPU, so torch refuses device='cuda' (a CPU build says \"not compiled with CUDA\"):"
    " `kvprobe run` plays no GPU, only `pytest --kvprobe` does, for tests"
)
_SHOWN = 3  # warnings that the user is shown; all are in end.json and in the report


def finish(
    folder: RunFolder,
    options: dict[str, Any],
    tracker: ProcessTracker,
    rings: dict[str, int],
    failure: str = "",
    said: list[str] | None = None,
) -> list[str]:
    """Writes end.json and the report; returns the lines for the user, the last one says where the report is.

    Args:
        folder: the run's; it may be read-only or full by now: then the log says so, if it can.
        options: run.json's.
        tracker: of the run's processes.
        rings: the ring files that there were, see `End`.
        failure: why the observer could not go on; "" where it did.
        said: more that is missing.
    """
    warnings = [*_warnings(folder, options, tracker.unseen), *(said or ())]
    if failure:
        warnings.append(f"the observer failed ({failure}): later stacks and exit codes are missing")
    if files.is_full(folder.path):
        warnings.insert(0, files.full(folder.path))
    try:
        folder.write_end(
            {
                "t_ns": time.monotonic_ns(),
                "status": tracker.status,
                "warnings": warnings,
                "rings": rings,
                CONFIDENTIAL: confidential_computing(),
            }
        )
    except OSError as error:
        reason = f"{folder.path} cannot be written any more ({error.strerror})"
        log.error("%s", reason)
        return [*_as_warnings(warnings), f"no report: {reason}"]
    for line in warnings:
        log.warning("warning: %s", line)
    if not folder.rings() and not any(folder.path.glob("events-*.jsonl")) and not folder.told_steps():
        why = f": {warnings[0]}" if warnings else ""
        return [*_as_warnings(warnings[1:]), f"nothing was recorded{why}"]
    if options.get("report") == "none":
        return [*_as_warnings(warnings), f"recording in {folder.path}"]
    report = Path(options.get("report") or folder.path / "report.html")
    # a process of its own: the report needs modules that nothing here may import, and may need much memory
    command = [sys.executable, "-m", "kvprobe", "report", str(folder.path), "-o", str(report), "-f"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["it printed no message"])[-1]
        log.error("kvprobe report ended with %d: %s", done.returncode, done.stderr.strip())
        return [*_as_warnings(warnings), f"recording in {folder.path}; no report: {reason}"]
    found = done.stdout.strip().splitlines()[:-1]  # the last one is the page's path
    more = f", {len(warnings)} warning{'s' if len(warnings) > 1 else ''}" if warnings else ""
    return [*_as_warnings(warnings), *found, f"report in {report}{more}"]


def show(folder: RunFolder, lines: list[str], terminal: str) -> None:
    """Leaves the lines for `kvprobe run`, which waits for them; writes them on the terminal, too, if one is named."""
    with contextlib.suppress(OSError):  # a full disk, which `kvprobe run` sees for itself
        folder.write_outcome(lines)
    if terminal:
        with contextlib.suppress(OSError):
            fd = os.open(terminal, os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK)
            # the shell's prompt may be on the line by now
            os.write(fd, "".join(f"\r\nkvprobe: {plain(text)}" for text in lines).encode() + b"\r\n")
            os.close(fd)


def _as_warnings(warnings: list[str]) -> list[str]:
    return [f"warning: {text}" for text in warnings[:_SHOWN]]


def _warnings(folder: RunFolder, options: dict[str, Any], unseen: dict[str, dict[int, str]]) -> list[str]:
    """What was not seen, and why: one line each."""
    if options.get("killed"):
        return ["KVPROBE=off is set in this environment, so kvprobe recorded nothing; unset it to record"]
    recorded = {int(path.name.split("-")[0]) for path in folder.path.glob("[0-9]*-*.kvp")}
    recorded |= {checkin["pid"] for checkin in folder.checkins() if checkin.get("preloaded")}
    unseen = {reason: {p: name for p, name in of.items() if p not in recorded} for reason, of in unseen.items()}
    found = [_not_recorded(reason, commands) for reason, commands in unseen.items() if commands]
    reasons: dict[str, dict[int, str]] = {}
    for pid, reason in folder.not_recorded():
        reasons.setdefault(f"it could not make its ring file ({reason})", {})[pid] = ""
    refused = [_not_recorded(reason, commands) for reason, commands in reasons.items()]
    inner = folder.inner()
    if inner:
        refused.append(
            f"a `kvprobe run` inside this one recorded what it started, into {' and '.join(inner[:_SHOWN])};"
            " kvprobe report takes several folders"
        )
    found = refused + found
    program = str(options.get("program", ""))
    checkins = folder.checkins()
    if not folder.rings() and not refused:
        found.insert(0, _why_nothing(program, bool(checkins)))
    if not checkins and _runs_python(program):
        found.append(
            "no adapter acted in the command: its Python did not load kvprobe's start-up hook (options -I, -E or -S, or"
            " a PYTHONPATH that was replaced); CUDA calls were recorded all the same, and nothing was cured"
        )
    for checkin in checkins:
        pid, python = checkin["pid"], str(checkin.get("python", ""))
        if python and tuple(int(part) for part in re.findall(r"\d+", python)[:2]) < (3, 10):
            found.append(f"process {pid} runs Python {python}: adapters need 3.10 or newer and did not act in it")
        if not checkin.get("preloaded"):
            found.append(
                f"process {pid} ran without the interposer, because LD_PRELOAD was removed or had no effect; only what"
                " the Python adapters saw of it was recorded"
            )
    failed = [
        line
        for path in folder.path.glob("stacks-*.jsonl")
        if (match := _STACKS.fullmatch(path.name))
        for line in folder.stacks(int(match[1]))
        if line.get("how") == "failed"
    ]
    if failed:
        calls = f"{len(failed)} blocked calls" if len(failed) > 1 else "1 blocked call"
        found.append(f"stacks of {calls} could not be taken: {failed[0].get('error', '')}")
    return found


def _not_recorded(reason: str, commands: dict[int, str]) -> str:
    names = ", ".join(f"{pid} {command}".strip() for pid, command in list(commands.items())[:3])
    number = f"{len(commands)} processes were" if len(commands) > 1 else "1 process was"
    return f"{number} not recorded, because {reason}: {names}{', ...' if len(commands) > 3 else ''}"


def _why_nothing(program: str, checked_in: bool) -> str:
    """Why there is no ring file at all."""
    reason = processes.why_not_preloaded(program) if program else ""
    if reason:
        return f"no process of the command could be recorded: {program}: {reason}"
    if checked_in:
        none = "the command's Python processes loaded kvprobe, and none of them made a CUDA call that kvprobe records"
        return none if _NVIDIA.exists() else f"{none}; {_NO_GPU}"
    return (
        "no process of the command loaded kvprobe: none made a CUDA call that kvprobe records, or the command emptied"
        " its environment, removed LD_PRELOAD, or runs its work in statically linked, setuid or musl programs, or"
        " elsewhere (a container, a daemon that was running before)"
    )


def _runs_python(program: str) -> bool:
    """Whether a program is a Python, or a script of one."""
    try:
        with Path(program).open("rb") as file:
            first = file.readline(256)
    except OSError:
        return False
    return (first.startswith(b"#!") and b"python" in first) or Path(program).resolve().name.startswith("python")
