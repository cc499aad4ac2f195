"""Loads the interposer into a running process, and has it put everything back: what stands against it, and how.

A debugger (gdb) has a thread of the process load the library; see `in_gdb.py` for the moment and the interposer's
`relocate.c` for what it writes. The process is stopped for the time of the call only.
"""

from __future__ import annotations

import errno
import json
import os
import pwd
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from kvprobe.environment import DEBUG, GDB
from kvprobe.errors import KvprobeError, UsageError
from kvprobe.probe import processes

__all__ = ["AttachError", "attach", "detach", "holding", "recorded_into", "refuse", "rings_of", "uses_cuda"]

LIBRARY = "libkvprobe_interpose.so"
SAFE_MOMENT_S = 2.0
GIVE_UP_S = 90.0
_RUNTIMES = ("libcudart.so", "libcuda.so", "libkvprobe_hostrt.so")


class AttachError(KvprobeError):
    """A process could not be attached to or detached from; the text says why and what to do."""


def uses_cuda(pid: int) -> bool:
    """Whether a process has a CUDA runtime or driver loaded."""
    return any(Path(path).name.startswith(_RUNTIMES) for path in processes.mapped_files(pid))


def holding(pid: int) -> str:
    """Path of the interposer that a process has loaded, "" where it has none."""
    return next((path for path in processes.mapped_files(pid) if Path(path).name == LIBRARY), "")


def rings_of(pid: int) -> dict[str, Path]:
    """The ring files that a process writes to now, by producer: "interposer", "engine"."""
    from kvprobe.probe.ring import read_ring

    found = {}
    for path in processes.mapped_files(pid):
        if path.endswith(".kvp"):
            try:
                ring = read_ring(Path(path), detail=False, slots=False)
            except KvprobeError:
                continue
            if ring.pid == pid and ring.state == "running":
                found[ring.producer] = Path(path)
    return found


def recorded_into(pid: int) -> Path | None:
    """The run folder that a process's calls are recorded into; None where they are not."""
    ring = rings_of(pid).get("interposer")
    return None if ring is None else ring.parent


def refuse(pid: int) -> None:
    """Asks beforehand what would fail later.

    Raises:
        UsageError: there is no such process, or it is recorded already.
        AttachError: a permission or a tool is missing, or the process cannot take the library.
    """
    status = _status(pid)
    if not status or not processes.alive(pid):
        raise UsageError(f"there is no process {pid}")
    uid = int(status["Uid"].split()[1])
    if uid != os.geteuid():
        name = _user(uid)
        raise AttachError(
            f"process {pid} belongs to {name}: run `kvprobe attach {pid}` as that user (sudo -u {name} ...)"
        )
    if _elsewhere(pid):
        raise AttachError(
            f"process {pid} runs in a container: run `kvprobe attach` inside it, with the pid it has "
            "there (docker exec, kubectl exec)"
        )
    reason = processes.why_not_preloaded(f"/proc/{pid}/exe")
    if reason:
        raise AttachError(f"process {pid} cannot load the interposer: {reason}")
    folder = recorded_into(pid)
    if folder is not None:
        raise UsageError(f"process {pid} is already being recorded into {folder}")
    tracer = int(status.get("TracerPid", "0"))
    if tracer:
        raise AttachError(f"process {pid} is being debugged by process {tracer}: end that first")
    _refuse_scope(pid)
    if shutil.which("gdb") is None:
        raise AttachError(
            "attaching needs gdb, which is not on PATH: install it (Debian: apt-get install gdb; "
            "Fedora: dnf install gdb)"
        )


def _status(pid: int) -> dict[str, str]:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return {}
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"#{uid}"


def _elsewhere(pid: int) -> bool:
    try:
        same = all(
            Path(f"/proc/{pid}/ns/{name}").readlink() == Path(f"/proc/self/ns/{name}").readlink()
            for name in ("pid", "mnt")
        )
        return not same or not Path(f"/proc/{pid}/root").samefile("/proc/self/root")
    except OSError:
        return False  # not told: the debugger will say


def _refuse_scope(pid: int) -> None:
    capabilities = int(_status(os.getpid()).get("CapEff", "0"), 16)
    if capabilities >> 19 & 1:
        return
    try:
        scope = int(Path("/proc/sys/kernel/yama/ptrace_scope").read_text())
    except (OSError, ValueError):
        scope = 0
    if scope == 1:
        raise AttachError(
            "the system lets only a parent process trace a process (kernel.yama.ptrace_scope is 1): run as "
            f"root (sudo kvprobe attach {pid} works for processes of root alone), or allow it with "
            "`sudo sysctl kernel.yama.ptrace_scope=0`"
        )
    if scope > 1:
        raise AttachError(
            f"the system lets no ordinary process trace another (kernel.yama.ptrace_scope is {scope}"
            "): add the capability SYS_PTRACE (docker run --cap-add SYS_PTRACE)"
        )


def attach(pid: int, library: Path, folder: Path, detail: str, max_bytes: int) -> int:
    """Begins to record a process into `folder`; returns how many words that lead to CUDA calls were written.

    None were where the process is not linked to them, but looks their addresses up.

    Raises:
        AttachError: it did not work, and the process is as it was.
    """
    words = [str(library), str(folder), detail, max_bytes]
    result = _call(pid, library, "kvprobe_attach", words)
    if result == -errno.EALREADY:
        raise UsageError(f"process {pid} is already being recorded")
    if result < 0:
        raise AttachError(f"process {pid} could not begin a recording in {folder}: {os.strerror(-result)}")
    return result


def detach(pid: int) -> int | None:
    """Puts everything back; returns how many words, None where nothing was to do (the process was started recorded).

    Raises:
        AttachError: it did not work.
    """
    library = holding(pid)
    if not library:
        return None
    result = _call(pid, Path(library), "kvprobe_detach", [])
    if result == -errno.ENOENT:
        return None
    if result < 0:
        raise AttachError(f"process {pid} could not be detached from: {os.strerror(-result)}; try again")
    return result


def _call(pid: int, library: Path, function: str, words: list[Any]) -> int:
    request = {"pid": pid, "library": str(library), "function": function, "arguments": words, "seconds": SAFE_MOMENT_S}
    env = {
        k: v for k, v in os.environ.items() if k not in ("LD_PRELOAD", "DEBUGINFOD_URLS", "PYTHONHOME", "PYTHONPATH")
    }
    env |= {GDB.name: json.dumps(request), "LC_ALL": "C"}
    script = Path(__file__).with_name("in_gdb.py")
    # a session of its own: Ctrl-C here must not kill a debugger that has breakpoints in the process
    command = ["gdb", "-nx", "-q", "-batch", "-x", str(script)]
    with subprocess.Popen(
        command,
        env=env,
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    ) as gdb:
        try:
            output = gdb.communicate(timeout=GIVE_UP_S)[0]
        except subprocess.TimeoutExpired:
            gdb.terminate()  # gdb detaches before it ends; a kill would leave its breakpoints behind
            output = gdb.communicate()[0]
    answers = [line.removeprefix("kvprobe: ") for line in output.splitlines() if line.startswith("kvprobe: ")]
    answer: dict[str, Any] = json.loads(answers[-1]) if answers else {}
    if "result" in answer:
        return int(answer["result"])
    lines = [line for line in output.splitlines() if line.strip()]
    reason = str(answer.get("error") or (lines[-1] if lines else "it printed no message")).rstrip(".")
    if "ptrace" in reason.lower() or "not permitted" in reason:
        reason += "; in a container, add the capability SYS_PTRACE (docker run --cap-add SYS_PTRACE)"
    elif "ython" in reason:
        reason += "; install a gdb that is built with Python (Debian: apt-get install gdb)"
    elif "static TLS" in reason:
        reason += "; start the process with GLIBC_TUNABLES=glibc.rtld.optional_static_tls=4096, or use kvprobe run"
    if DEBUG.value():
        print(output, file=sys.stderr)
    raise AttachError(f"gdb could not load the interposer into process {pid}: {reason}")
