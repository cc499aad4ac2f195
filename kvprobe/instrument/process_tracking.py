"""The processes of a run: which belong to it, which the interposer could not reach and why, and how each one ended."""

from __future__ import annotations

import contextlib
import os
import re
import time
from dataclasses import dataclass
from pathlib import Path

from kvprobe.environment import RUN
from kvprobe.probe import processes
from kvprobe.runfolder.folder import RunFolder
from kvprobe.runfolder.secrets import redact

__all__ = ["ProcessTracker"]

STATUS_S = 2.0  # for the parent of an ended process to ask for its status; some never do
_NSIGHT = re.compile(r"(^|/)(nsys|QdstrmImporter)|/nsight-", re.IGNORECASE)

Key = tuple[int, int]  # pid, start ticks: a pid may be given out again


@dataclass
class _Process:
    command: str
    pidfd: int = -1
    ended_s: float | None = None
    program: str = ""  # that it ran when it was looked at; empty: it has to be looked at again


class ProcessTracker:
    """Follows the command and whatever it starts, from outside.

    Attributes:
        unseen: reason -> pid -> command of processes that the interposer could not reach.
        status: the command's exit status once it has ended; None where the system does not tell.
    """

    def __init__(self, folder: RunFolder, pid: int, *, attached: bool, command: str, pidfd: int = -1) -> None:
        """Takes the command's pid, and a pidfd of it where there is one: it may have ended by now.

        Args:
            folder: where a line is written for each process that ends.
            pid: of the command.
            attached: it ran before: its environment says nothing of the run.
            command: its words.
            pidfd: -1 for none.
        """
        self._folder, self._pid, self._attached = folder, pid, attached
        self._known: dict[Key, _Process] = {}
        self._done: set[Key] = set()  # ended, or of no interest
        self.unseen: dict[str, dict[int, str]] = {}
        self.status: int | None = None
        if pidfd >= 0:
            self._known[pid, processes.start_ticks(pid)] = _Process(command, pidfd)

    def scan(self) -> None:
        """Looks through all processes of the machine for new ones of the run."""
        parents = processes.children()
        self._done = {key for key in self._done if key[0] in parents}  # a run may last for months
        ours = {pid for pid, _ in self._known} | {self._pid}
        me = os.getpid()
        for pid in sorted(parents):
            at, depth = pid, 0
            while at in parents and at not in ours and at != me and depth < 64:
                at, depth = parents[at], depth + 1
            if at != me:
                self._meet(pid, descends=at in ours)

    def _meet(self, pid: int, descends: bool) -> None:
        key = (pid, processes.start_ticks(pid))
        if not key[1] or key in self._done:
            return
        process = self._known.get(key)
        program = processes.program(pid)
        if process is not None:
            process.command = _command(pid) or process.command  # workers name themselves while they run
            if process.program == program or pid == self._pid:
                return
        env = processes.environment(pid)
        covered = env is not None and env.get(RUN.name) == str(self._folder.path)
        if process is None:
            if not covered and not descends:
                self._done.add(key)
                return
            process = self._known[key] = _Process("")
            with contextlib.suppress(OSError):
                process.pidfd = os.pidfd_open(pid)
            process.command = _command(pid)
        process.program = program if env is not None else ""
        reason = ""
        if env is not None and pid != self._pid and not self._attached:
            if not covered:
                reason = "their environment was emptied or replaced"
            elif "libkvprobe_interpose" not in env.get("LD_PRELOAD", ""):
                reason = "LD_PRELOAD was taken out of their environment"
        reason = reason or processes.why_not_preloaded(f"/proc/{pid}/exe") or self._why_not_writable(pid)
        if reason:
            self.unseen.setdefault(reason, {})[pid] = process.command[:60]

    def _why_not_writable(self, pid: int) -> str:
        """Why a process cannot write into the run folder: another user, or a sandbox with file systems of its own."""
        try:
            user = os.stat(f"/proc/{pid}").st_uid  # noqa: PTH116
            ours = self._folder.path.stat().st_uid
            same = Path(f"/proc/{pid}/ns/mnt").readlink() == Path("/proc/self/ns/mnt").readlink()
            writable = same or os.access(f"/proc/{pid}/root{self._folder.path}", os.W_OK)
        except OSError:
            return ""
        if user not in (0, ours):
            return "they run as another user, who may not write into the run folder"
        return "" if writable or not processes.alive(pid) else "the run folder cannot be written where they run"

    def reap(self) -> None:
        """Writes down who has ended; a pidfd says so without a race with pids that are given out again."""
        for key, process in list(self._known.items()):
            pid, ticks = key
            same = processes.start_ticks(pid) == ticks
            if same and processes.alive(pid):
                continue
            status = processes.exit_status(process.pidfd) if process.pidfd >= 0 else None
            if status is None and same:
                process.ended_s = process.ended_s or time.monotonic()
                if time.monotonic() - process.ended_s < STATUS_S:
                    continue
            if process.pidfd >= 0:
                os.close(process.pidfd)
            if pid == self._pid:
                self.status = status
            self._folder.append_ended(
                {"pid": pid, "t_ns": time.monotonic_ns(), "status": status, "command": process.command}
            )
            del self._known[key]
            self._done.add(key)

    @property
    def running(self) -> bool:
        """Whether a process is left to wait for: Nsight Systems' own helpers live on after the command."""
        return any(
            pid == self._pid or not _NSIGHT.search(process.command.split(" ")[0])
            for (pid, _), process in self._known.items()
        )


def _command(pid: int) -> str:
    return " ".join(redact(processes.words(pid)))[:400]
