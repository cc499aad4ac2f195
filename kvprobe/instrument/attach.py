"""Loads the interposer into a running process, and has it put everything back: what stands against it, and how.

The injector (`native/inject`) has the process make a thread that loads the library; the interposer's `relocate.c` says
what it writes. One thread of the process is held for a few system calls; the others run on.
"""

from __future__ import annotations

import contextlib
import ctypes as ct
import errno
import os
import pwd
import socket
from pathlib import Path

from kvprobe.errors import KvprobeError, UsageError
from kvprobe.probe import processes

__all__ = ["AttachError", "Attachment", "detach", "holding", "recorded_into", "refuse", "rings_of", "uses_cuda"]

LIBRARY = "libkvprobe_interpose.so"
INJECTOR = "libkvprobe_inject.so"
IN_TIME_S = 3.0  # for the process to have done it
ANSWER_S = 1.8  # more, for the injector to say so: until the process has let go of everything
_RUNTIMES = ("libcudart.so", "libcuda.so", "libkvprobe_hostrt.so")


class AttachError(KvprobeError):
    """A process could not be attached to or detached from; the text says why and what to do."""


def uses_cuda(pid: int) -> bool:
    """Whether a process has a CUDA runtime or driver loaded."""
    return any(Path(path).name.startswith(_RUNTIMES) for path in processes.mapped_files(pid))


def holding(pid: int) -> str:
    """Path of the interposer that a process has loaded, "" where it has none."""
    mapped = (path.removesuffix(" (deleted)") for path in processes.mapped_files(pid))
    return next((path for path in mapped if Path(path).name == LIBRARY), "")


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
        AttachError: a permission is missing, or the process cannot take the library.
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
    if status.get("State", "").startswith("T"):
        raise AttachError(f"process {pid} is stopped by a signal: let it go on first (kill -CONT {pid})")
    if status.get("Seccomp") == "1":
        raise AttachError(f"process {pid} is in seccomp's strict mode: it may not load a library any more")
    if "shstk" in status.get("x86_Thread_features", ""):
        raise AttachError(f"process {pid} runs with a shadow stack (GLIBC_TUNABLES): use kvprobe run")
    _refuse_scope(pid)


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
        return False  # not told: the injector will say


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


class _Target(ct.Structure):
    """`struct kvp_injection`."""

    _fields_ = [
        ("library", ct.c_char_p),
        ("function", ct.c_char_p),
        ("undo", ct.c_char_p),
        ("folder", ct.c_char_p),
        ("detail", ct.c_char_p),
        ("max_bytes", ct.c_uint64),
        ("deadline_ms", ct.c_uint32),
    ]


class _Injection:
    """A function of the interposer, called in a process: begun by making one, over with `close`.

    The injector is a process of its own. When this one goes away, by whatever cause, it has everything undone.
    """

    def __init__(self, pid: int, library: str, function: str, undo: str = "", *words: str, max_bytes: int = 0) -> None:
        from kvprobe.native.library import path_of

        self.pid = pid
        self.failed = f"the interposer could not be loaded into process {pid}"
        self.held_ns = 0
        inject = ct.CDLL(str(path_of(INJECTOR))).kvp_inject
        folder, detail = words or ("", "")
        texts = [os.fsencode(text) for text in (library, function, undo, folder, detail)]
        wanted = _Target(*texts, max_bytes, int(IN_TIME_S * 1000))
        self._socket, other = socket.socketpair()
        with other:
            self._injector = inject(pid, ct.byref(wanted), other.fileno())
        if self._injector == -errno.ENOTSUP:
            raise AttachError("attaching is built for x86-64 alone so far: use kvprobe run")
        if self._injector < 0:
            raise AttachError(f"no process could be made to attach with: {os.strerror(-self._injector)}")
        self._socket.settimeout(IN_TIME_S + ANSWER_S)

    def result(self) -> int:
        """What the function returned: negative where it did nothing.

        Raises:
            AttachError: it was not called, or what it did is undone.
        """
        kind, _, text = self._line().partition(" ")
        if kind == "ok":
            result, self.held_ns = map(int, text.split())
            return result
        reason = text or "the process that attaches has ended before it was done"
        if "static TLS" in reason:
            reason += "; start the process with GLIBC_TUNABLES=glibc.rtld.optional_static_tls=4096, or use kvprobe run"
        raise AttachError(f"{self.failed}: {reason}")

    def keep(self) -> None:
        """What was done stays."""
        with contextlib.suppress(OSError):
            self._socket.send(b"k")
            self._line()

    def close(self) -> None:
        """Undoes what is not to stay, and waits until nothing of it is left in the process."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
            while self._line():
                pass
        self._socket.close()
        if self._injector > 0:
            os.waitpid(self._injector, 0)
            self._injector = 0

    def _line(self) -> str:
        """The injector's next line; empty at its end, or where it takes too long."""
        said = b""
        with contextlib.suppress(OSError):
            while not said.endswith(b"\n") and (more := self._socket.recv(1024)):
                said += more
        return said.decode(errors="replace").strip()


class Attachment(_Injection):
    """Begins to record a process into `folder`; until `keep` is called that is undone by `close`, or when we die."""

    def __init__(self, pid: int, library: Path, folder: Path, detail: str, max_bytes: int) -> None:
        words = str(folder), detail
        super().__init__(pid, str(library), "kvprobe_attach", "kvprobe_detach", *words, max_bytes=max_bytes)
        self._folder = folder

    def result(self) -> int:
        """How many words that lead to CUDA calls were written.

        None were where the process is not linked to them, but looks their addresses up.

        Raises:
            AttachError: it did not work, and the process is as it was.
        """
        result = super().result()
        if result == -errno.EALREADY:
            raise UsageError(f"process {self.pid} is already being recorded")
        if result < 0:
            raise AttachError(
                f"process {self.pid} could not begin a recording in {self._folder}: {os.strerror(-result)}"
            )
        return result


def detach(pid: int) -> int | None:
    """Puts everything back; returns how many words, None where nothing was to do (the process was started recorded).

    Raises:
        AttachError: it did not work.
    """
    library = holding(pid)
    if not library:
        return None
    injection = _Injection(pid, library, "kvprobe_detach")
    injection.failed = f"process {pid} could not be detached from, and is still recorded"
    try:
        result = injection.result()
    finally:
        injection.close()
    if result == -errno.ENOENT:
        return None
    if result < 0:
        raise AttachError(f"process {pid} could not be detached from: {os.strerror(-result)}; try again")
    return result
