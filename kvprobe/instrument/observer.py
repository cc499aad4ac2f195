"""The process beside a watched command: takes stacks of blocked calls, samples the device, has the report written.

Started by `kvprobe run` before the command, in a session of its own: it holds none of the command's streams, is not its
child, and looks at it only from outside (ring files, /proc, py-spy). It leaves in the run folder

* `stacks-<pid>.jsonl`  see `kvprobe.probe.stacks`
* `processes.jsonl`     one line for each process that ended: `pid`, `t_ns`, `status` (exit status, -N for signal N, or
                        null where the system does not tell), `command`
* `end.json`            when all have ended: `status` of the command, `warnings`, `t_ns`
* `outcome.txt`         what was found and where the report is, as `kvprobe run` says it
* `observer.log`        what it did
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from kvprobe.environment import RUN
from kvprobe.errors import KvprobeError, plain
from kvprobe.probe import processes, stacks
from kvprobe.probe.ring import CALLS, RingSnapshot, read_ring
from kvprobe.runfolder import files
from kvprobe.runfolder.folder import CONFIDENTIAL
from kvprobe.runfolder.secrets import redact_text

__all__ = ["Observer", "main"]

POLL_S = 0.02
SCAN_S = 0.5  # between looks at all processes of the machine
STACKS_EVERY_S = 5.0  # of one process
STACKS_OF_TOTALS = 1000  # of a run that keeps totals only: it may last for months
DUTY = 0.02  # of one core, at most


def _log(text: str) -> None:
    print(time.strftime("%H:%M:%S"), text, flush=True)


def _append(path: Path, value: object) -> None:
    files.append(path, json.dumps(value, separators=(",", ":")).encode())


_NSIGHT = re.compile(r"(^|/)(nsys|QdstrmImporter)|/nsight-", re.IGNORECASE)


class Observer:
    """Watches one command until it and every process of the run have ended."""

    def __init__(self, folder: Path, pid: int, options: dict[str, Any], pidfd: int = -1) -> None:
        """Takes the run folder, the command's pid, run.json's `options`, and a pidfd of the command where there is one.

        The command may have ended by now.
        """
        self.folder, self.pid, self.options = folder, pid, options
        self.threshold_ns = int(options.get("stacks_after_ms", 50)) * 1_000_000
        self.take_stacks = bool(options.get("stacks", True))
        self.attached = bool(options.get("attached"))
        self.inside = options.get("stacks_how") == "in-process"
        self.known: dict[tuple[int, int], dict[str, Any]] = {}  # (pid, start ticks) -> what is known of it
        self.gone: set[tuple[int, int]] = set()
        if pidfd >= 0:
            key = (pid, processes.start_ticks(pid))
            self.known[key] = {"pid": pid, "covered": True, "command": options.get("words", ""), "fd": pidfd}
        self.rings: dict[Path, bool] = {}  # ring file -> still of a living process
        self.entered: dict[tuple[Path, int], tuple[int, int]] = {}  # section -> (sequence, first seen ns)
        self.last_stacks: dict[tuple[int, bool], float] = {}
        self.reported: set[tuple[Path, int, int]] = set()  # blocked calls that have their stacks
        self.unseen: dict[str, dict[int, str]] = {}  # reason -> pid -> command
        self.status: int | None = None
        self.told: list[str] = []
        self.found: list[str] = []
        self.device: Any = None

    # ---- processes ---------------------------------------------------------------------------------------------

    def _meet(self, pid: int, belongs: bool) -> None:
        key = (pid, processes.start_ticks(pid))
        if not key[1] or key in self.known or key in self.gone:
            return
        env = processes.environment(pid)
        covered = bool(env) and env is not None and env.get(RUN.name) == str(self.folder)
        if not covered and not belongs:
            self.gone.add(key)  # nobody of ours: never look again
            return
        entry: dict[str, Any] = {"pid": pid, "covered": covered, "command": _command(pid), "fd": -1}
        with contextlib.suppress(OSError):
            entry["fd"] = os.pidfd_open(pid)
        self.known[key] = entry
        reason = ""
        if env is not None and pid != self.pid and not self.attached:  # an attached process's environment is its own
            if not covered:
                reason = "their environment was emptied or replaced"
            elif "libkvprobe_interpose" not in env.get("LD_PRELOAD", ""):
                reason = "LD_PRELOAD was taken out of their environment"
        reason = reason or processes.why_not_preloaded(f"/proc/{pid}/exe")
        if reason:
            self.unseen.setdefault(reason, {})[pid] = entry["command"][:60]

    def _scan(self) -> None:
        parents = processes.children()
        self.gone = {key for key in self.gone if key[0] in parents}  # a run may last for months
        ours = {pid for pid, _ in self.known} | {self.pid}
        me = os.getpid()
        for pid in sorted(parents):
            at, depth = pid, 0
            while at in parents and at not in ours and at != me and depth < 64:
                at, depth = parents[at], depth + 1
            if at != me:
                self._meet(pid, belongs=at in ours)

    def _reap(self) -> None:
        """Notes who has ended; a pidfd says so without a race with pid reuse."""
        for key, entry in list(self.known.items()):
            if processes.start_ticks(key[0]) == key[1] and processes.alive(key[0]):
                continue
            status = processes.exit_status(entry["fd"]) if entry["fd"] >= 0 else None
            unreaped = status is None and processes.start_ticks(key[0]) == key[1]
            # its status comes when its parent asks for it; some never do
            if unreaped and time.monotonic() - entry.setdefault("ended", time.monotonic()) < 2:
                continue
            if entry["fd"] >= 0:
                os.close(entry["fd"])
            if key[0] == self.pid:
                self.status = status
            _append(
                self.folder / "processes.jsonl",
                {"pid": key[0], "t_ns": time.monotonic_ns(), "status": status, "command": entry["command"]},
            )
            del self.known[key]
            self.gone.add(key)

    def _awaited(self) -> bool:
        """Whether a process is left to wait for: Nsight Systems' own helpers live on after the command."""
        return any(
            pid == self.pid or not _NSIGHT.search(entry["command"].split(" ")[0])
            for (pid, _), entry in self.known.items()
        )

    # ---- blocked calls -----------------------------------------------------------------------------------------

    def _find_rings(self) -> None:
        with contextlib.suppress(OSError):
            for entry in os.scandir(self.folder):
                if entry.name.endswith(".kvp") and (path := Path(entry.path)) not in self.rings:
                    self.rings[path] = True

    def _look(self, path: Path) -> None:
        try:
            snapshot = read_ring(path, detail=False, slots=False)
        except KvprobeError:
            return
        if snapshot.state == "closed" or not processes.alive(snapshot.pid):
            self.rings[path] = False
            return
        now = time.monotonic_ns()
        for section in snapshot.sections:
            if not section.in_call or not section.tid:
                continue
            key = (path, section.number)
            sequence, since = self.entered.get(key, (-1, now))
            if sequence != section.in_sequence:
                since = now
                self.entered[key] = (section.in_sequence, now)
            blocked = now - (section.in_since_ns or since)
            if blocked >= self.threshold_ns and (path, section.number, section.in_sequence) not in self.reported:
                self._culprit(
                    snapshot,
                    path,
                    section.number,
                    section.tid,
                    section.in_call,
                    section.in_stream,
                    section.in_sequence,
                    blocked,
                )

    def _culprit(
        self,
        ring: RingSnapshot,
        path: Path,
        section: int,
        tid: int,
        call: int,
        stream: int,
        sequence: int,
        blocked_ns: int,
    ) -> None:
        if len(self.reported) >= STACKS_OF_TOTALS and self.options.get("detail") == "totals":
            return
        # of memory calls apart: pinning at the start must not use up what a blocked submission needs
        kind = ring.pid, call in CALLS and CALLS[call][0] in ("ALLOC", "FREE")
        if time.monotonic() - self.last_stacks.get(kind, -1e9) < STACKS_EVERY_S:
            return
        self.last_stacks[kind] = time.monotonic()
        self.reported.add((path, section, sequence))
        asked_ns = time.monotonic_ns()
        taken = stacks.take(self.folder, ring.pid, tid, inside=self.inside)
        # Only a stack of which the call had not returned when it was there is known to be the call's.
        t_ns = asked_ns if self._inside(path, section, sequence) else time.monotonic_ns()
        if taken["how"] == "failed" and not self.inside:
            _log(f"stacks of {ring.pid}: {taken['error']}")
        name = CALLS[call][1] if call in CALLS else f"call {call}"
        _append(
            self.folder / f"stacks-{ring.pid}.jsonl",
            {
                "t_ns": t_ns,
                "pid": ring.pid,
                "thread": tid,
                "call": name,
                "stream": stream,
                "blocked_ns": blocked_ns,
                **taken,
            },
        )

    def _inside(self, path: Path, section: int, sequence: int) -> bool:
        """Whether a section is in the same call still."""
        try:
            sections = read_ring(path, detail=False, slots=False).sections
        except KvprobeError:
            return False
        return any(one.number == section and one.in_call and one.in_sequence == sequence for one in sections)

    # ---- the loop ----------------------------------------------------------------------------------------------

    def watch(self) -> None:
        """Returns when the command and all processes of the run have ended."""
        self._start_device()
        scan_at, find_at = 0.0, 0.0
        began = time.monotonic()
        while True:
            start = time.monotonic()
            if start >= scan_at:
                self._scan()
                # often at first: short commands are met, too
                scan_at = time.monotonic() + (SCAN_S if start - began > 2 else 0.05)
            self._reap()
            if self.attached and (self.folder / "detached").exists():
                break
            if not self._awaited():
                self._scan()
                if not self._awaited():
                    break
            if self.take_stacks:
                if start >= find_at:
                    self._find_rings()
                    find_at = start + 0.1
                for path, living in list(self.rings.items()):
                    if living:
                        self._look(path)
            spent = time.monotonic() - start
            # a look that waited (for stacks that never came) must not be paid back with minutes of sleep
            time.sleep(min(max(POLL_S, spent / DUTY - spent), SCAN_S))
        self._stop_device()

    def _start_device(self) -> None:
        if not self.options.get("nvml"):
            return
        try:
            from kvprobe.probe.device import Sampler

            self.device = Sampler(self.folder / "device.jsonl")
            self.device.start()
        except Exception as error:  # no driver, no permission, no module: the rest of the run is worth having
            _log(f"device counters are off: {error}")
            self.device = None

    def _stop_device(self) -> None:
        if self.device is not None:
            with contextlib.suppress(Exception):
                self.device.stop()

    # ---- the end -----------------------------------------------------------------------------------------------

    def warnings(self) -> list[str]:
        """What was not seen, and why: one line each."""
        if self.options.get("killed"):
            return ["KVPROBE=off is set in this environment: kvprobe acted in no process; unset it to record"]
        found = []
        for reason, who in self.unseen.items():
            names = ", ".join(f"{pid} {command}".strip() for pid, command in list(who.items())[:3])
            number = f"{len(who)} processes were" if len(who) > 1 else "1 process was"
            found.append(f"{number} not watched, because {reason}: {names}{', ...' if len(who) > 3 else ''}")
        checked_in = any(self.folder.glob("checkin-*.json"))
        if not any(self.folder.glob("*.kvp")):
            program = self.options.get("program", "")
            reason = processes.why_not_preloaded(program) if program else ""
            if reason:
                found.insert(0, f"no process of the command could be watched: {program}: {reason}")
            elif checked_in:
                found.insert(
                    0, "the command's processes checked in, and none of them made a CUDA call that kvprobe watches"
                )
            else:
                found.insert(
                    0,
                    "no process of the command ever checked in: none made a CUDA call that kvprobe watches,"
                    " or the command emptied its environment, removed LD_PRELOAD, or runs its work in "
                    "statically linked, setuid or musl programs, or elsewhere (a container, a daemon that "
                    "was running before)",
                )
        if not checked_in and _runs_python(self.options.get("program", "")):
            found.append(
                "no adapter acted in the command: its Python did not load kvprobe's start-up part (options "
                "-I, -E or -S, or a PYTHONPATH that was replaced); CUDA calls were recorded all the same, "
                "and nothing was cured"
            )
        for path in self.folder.glob("checkin-*.json"):
            with contextlib.suppress(OSError, ValueError):
                checkin = json.loads(path.read_text())
                old = tuple(map(int, str(checkin.get("python", "9.9")).split(".")[:2])) < (3, 10)
                if old:
                    found.append(
                        f"process {checkin['pid']} runs Python {checkin['python']}: adapters need 3.10 or "
                        "newer and did not act in it"
                    )
                if not checkin.get("preloaded"):
                    found.append(
                        f"process {checkin['pid']} ran without the interposer: LD_PRELOAD was removed or "
                        "could not be followed; only what Python adapters saw of it is known"
                    )
        failed = [
            line
            for path in self.folder.glob("stacks-[0-9]*.jsonl")
            for line in path.read_text(errors="replace").splitlines()
            if '"how":"failed"' in line
        ]
        if failed:
            with contextlib.suppress(ValueError):
                found.append(
                    f"stacks of {len(failed)} blocked calls could not be taken: {json.loads(failed[0])['error']}"
                )
        return found

    def finish(self) -> str:
        """Writes end.json and the report; returns the line for the user.

        The folder may be read-only or full by now: then the log says so, if it can.
        """
        warnings = self.told = self.warnings()
        from kvprobe.probe.device import confidential_computing

        end = {
            "t_ns": time.monotonic_ns(),
            "status": self.status,
            "warnings": warnings,
            CONFIDENTIAL: confidential_computing(),
        }
        files.write(self.folder / "end.json", json.dumps(end, indent=1).encode())
        for line in warnings:
            _log(f"warning: {line}")
        if not any(self.folder.glob("*.kvp")) and not any(self.folder.glob("events-*.jsonl")):
            self.told = warnings[1:]
            return f"nothing was recorded: {warnings[0]}" if warnings else "nothing was recorded"
        if self.options.get("report") == "none":
            return f"recording in {self.folder}"
        report = Path(self.options.get("report") or self.folder / "report.html")
        # a process of its own: the report needs rooms that nothing here may import, and may need much memory
        command = [sys.executable, "-m", "kvprobe", "report", str(self.folder), "-o", str(report), "-f"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
            _log(f"kvprobe report ended with {done.returncode}: {done.stderr.strip()}")
            return f"recording in {self.folder}; no report: {reason}"
        self.found = done.stdout.strip().splitlines()[:-1]  # the last one is the page's path
        more = f", {len(warnings)} warnings" if warnings else ""
        return f"report in {report}{more}"


def _runs_python(program: str) -> bool:
    """Whether a program is a Python, or a script of one."""
    try:
        with open(program, "rb") as file:  # noqa: PTH123
            first = file.readline(256)
    except OSError:
        return False
    return (first.startswith(b"#!") and b"python" in first) or Path(program).resolve().name.startswith("python")


def _command(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:  # noqa: PTH123
            return redact_text(file.read(400).replace(b"\0", b" ").decode(errors="replace").strip())
    except OSError:
        return ""


def main(arguments: list[str]) -> int:
    """`python -m kvprobe.instrument.observer RUN_FOLDER PID [PIDFD]`."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the command decides when it ends, and then we do
    folder, pid = Path(arguments[0]), int(arguments[1])
    options = json.loads((folder / "run.json").read_text())["options"]
    if options.get("attached"):
        (folder / "observer.pid").write_text(str(os.getpid()))
    observer = Observer(folder, pid, options, int(arguments[2]) if arguments[2:] else -1)
    try:
        observer.watch()
    except Exception as error:  # what was recorded is worth reading all the same
        traceback.print_exc()
        observer.unseen.setdefault(f"the observer failed ({error!r}), and did not look at them", {})[pid] = ""
    line = observer.finish()
    _log(line)
    if (folder / "detached").exists():  # whoever detached says it
        return 0
    shown = [f"warning: {text}" for text in observer.told[:3]] + observer.found
    with contextlib.suppress(OSError):  # for `kvprobe run`, which waits for it; whole, or not at all
        whole = folder / "outcome.txt.part"
        whole.write_text("\n".join((*shown, line)) + "\n")
        whole.rename(folder / "outcome.txt")
    if options.get("terminal"):
        with contextlib.suppress(OSError):
            terminal = os.open(options["terminal"], os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK)
            # the shell's prompt may be on the line by now
            os.write(terminal, "".join(f"\r\nkvprobe: {plain(text)}" for text in (*shown, line)).encode() + b"\r\n")
            os.close(terminal)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
