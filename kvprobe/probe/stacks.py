"""Takes the Python stacks of a process: from outside with py-spy, else by asking it.

One line of `stacks-<pid>.jsonl` an occasion: `t_ns` (CLOCK_MONOTONIC), `pid`, `thread` (kernel id of the blocked one),
`call`, `stream`, `blocked_ns` (so far), `how` ("py-spy", "in-process" or "failed"), `error`, and `threads`: a list of
`{thread, name, gil, frames}` with the blocked thread first, then the one that holds the GIL; frames innermost first, as
`function (file:line)`. One line of `stack-samples-<pid>.jsonl` for each look at a process whose threads make calls.
"""

from __future__ import annotations

import json
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

__all__ = ["NoPythonError", "py_spy", "sample", "take", "usable"]

THREADS = 16  # kept of one occasion: the blocked one, the GIL's holder, then active ones


class NoPythonError(RuntimeError):
    """The process runs no Python: there is nothing to take, and nothing is missing."""

    def __init__(self) -> None:
        super().__init__("the process runs no Python")


def py_spy() -> str | None:
    """Path of py-spy: beside this interpreter, else on PATH; None where there is none."""
    beside = Path(sys.executable).with_name("py-spy")
    return str(beside) if beside.is_file() else shutil.which("py-spy")


def _dump(pid: int, timeout_s: float) -> tuple[int, list[dict[str, Any]]]:
    """When py-spy looked, ns, and threads as it reports them; RuntimeError with one line that says why not.

    It looks for less than a millisecond, writes its answer at once, and takes long only to begin: the answer's first
    byte comes at most half a millisecond after the look (`benchmarks/stack_looks.py`).
    """
    program = py_spy()
    if program is None:
        raise RuntimeError("py-spy is not installed")
    command = [program, "dump", "--json", "--nonblocking", "--pid", str(pid)]
    try:
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            assert process.stdout is not None  # it was asked for
            try:
                answer = select.poll()
                answer.register(process.stdout, select.POLLIN)
                answer.poll(1_000 * timeout_s)
                looked_ns = time.monotonic_ns()
                said, complaint = process.communicate(timeout=timeout_s)
            except BaseException:
                process.kill()
                raise
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"py-spy took longer than {timeout_s:.0f} s") from None
    except OSError as error:
        raise RuntimeError(f"py-spy does not start: {error.strerror}") from None
    if process.returncode:
        lines = [line.strip() for line in complaint.decode(errors="replace").splitlines() if line.strip()]
        if any("find python version" in line for line in lines):
            raise NoPythonError
        why = [line for line in lines if "ermission" in line or line.startswith("Error: ")] or lines or ["no message"]
        raise RuntimeError(f"py-spy: {why[0].removeprefix('Error: ')}")
    try:
        found: list[dict[str, Any]] = json.loads(said)
    except ValueError:
        raise RuntimeError("py-spy's answer is not JSON") from None
    return looked_ns, found


def usable(pid: int, timeout_s: float = 10.0) -> str:
    """Empty where py-spy may look into a process, else why not."""
    try:
        _dump(pid, timeout_s)
    except RuntimeError as error:
        return str(error)
    return ""


def _ask_inside(folder: Path, pid: int, timeout_s: float) -> list[dict[str, Any]]:
    """Has the start-up hook's sampler in the process write its stacks."""
    from kvprobe.runfolder.folder import RunFolder

    run = RunFolder(folder)
    before = len(run.answered_stacks(pid))
    run.ask_for_stacks(pid)
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        time.sleep(0.05)
        answers = run.answered_stacks(pid)
        if len(answers) > before:
            threads: list[dict[str, Any]] = answers[-1]["threads"]
            return threads
    raise RuntimeError("the process did not answer: it does not run the start-up hook, or its GIL is held")


def take(folder: Path, pid: int, thread: int, *, inside: bool, timeout_s: float = 5.0) -> dict[str, Any]:
    """The stacks of one process now.

    Args:
        folder: the run folder.
        pid: the process.
        thread: kernel id of the thread that is blocked; it comes first.
        inside: ask the process itself, where py-spy is not permitted.
        timeout_s: how long to wait.

    Returns:
        `how`, `error` and `threads` as in the file's lines.

    Raises:
        NoPythonError: it runs none.
    """
    try:
        if inside:
            threads = _ask_inside(folder, pid, timeout_s)
        else:
            threads = [_thread(found) for found in _dump(pid, timeout_s)[1]]
    except NoPythonError:
        raise
    except (RuntimeError, OSError) as error:
        return {"how": "failed", "error": str(error), "threads": []}
    threads.sort(key=lambda t: (t["thread"] != thread, not t["gil"], not t.get("active", False)))
    return {"how": "in-process" if inside else "py-spy", "error": "", "threads": threads[:THREADS]}


def sample(pid: int, threads: set[int], timeout_s: float = 5.0) -> tuple[int, list[dict[str, Any]]]:
    """When py-spy looked at a process, ns, and the stacks of these threads of it, by kernel id, as in the file's lines.

    Raises:
        NoPythonError: it runs none.
        RuntimeError: why py-spy could not look, in one line.
    """
    looked_ns, found = _dump(pid, timeout_s)
    return looked_ns, [one for one in map(_thread, found) if one["thread"] in threads]


def _thread(found: dict[str, Any]) -> dict[str, Any]:
    frames = [
        f"{frame.get('name')} ({frame.get('filename') or frame.get('short_filename')}:{frame.get('line')})"
        for frame in found.get("frames", [])
    ]
    # before Python 3.11 py-spy knows no kernel id of a thread that it does not stop; the main one's is the process's
    main = found.get("pid") if found.get("thread_name") == "MainThread" else 0
    return {
        "thread": found.get("os_thread_id") or main or 0,
        "name": found.get("thread_name") or "",
        "gil": bool(found.get("owns_gil")),
        "active": bool(found.get("active")),
        "frames": frames,
    }
