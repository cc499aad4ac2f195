"""The process beside a watched command: follows its processes, looks at blocked calls, has the report written.

Started by `kvprobe run` before the command, in a session of its own: it holds none of the command's streams, is not its
child, and looks at it only from outside: ring files, /proc (how processes end, who waits for a CPU), py-spy (stacks).
`kvprobe/runfolder/folder.py` describes what it writes into the run folder; besides, `observer.log` is its log, and
`outcome.txt` what `kvprobe run` prints at the end.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from kvprobe.instrument.cpu_waits import MOST as MOST_WAITS
from kvprobe.instrument.cpu_waits import CpuWaits
from kvprobe.instrument.finishing import finish, show
from kvprobe.instrument.process_tracking import ProcessTracker
from kvprobe.instrument.ring_files import RingFiles
from kvprobe.instrument.stack_capture import MOST_OF_TOTALS, StackCapture
from kvprobe.instrument.stack_sampler import StackSampler
from kvprobe.instrument.step_socket import StepSocket
from kvprobe.runfolder.folder import RunFolder
from kvprobe.runfolder.step_lines import limit_of

__all__ = ["main", "watch"]

WAITS_OF_TOTALS = 200  # notes of waits for a CPU, some 30 KB
log = logging.getLogger("kvprobe")

POLL_S = 0.02
SCAN_S = 0.5  # between looks at all processes of the machine
SCAN_FIRST_S = 0.05  # the same in the first two seconds: short commands are met, too
DUTY = 0.02  # of one core, at most


def watch(
    folder: RunFolder,
    rings: RingFiles,
    tracker: ProcessTracker,
    watchers: Sequence[StackCapture | StackSampler | CpuWaits],
    options: dict[str, Any],
) -> None:
    """Returns when the command and all processes of the run have ended, or when kvprobe was detached from them.

    `options`: run.json's.
    """
    attached, limit_bytes = bool(options.get("attached")), int(options.get("max_bytes") or 0)
    scan_at, began = 0.0, time.monotonic()
    while True:
        start = time.monotonic()
        if start >= scan_at:
            tracker.scan()
            scan_at = time.monotonic() + (SCAN_S if start - began > 2 else SCAN_FIRST_S)
        tracker.reap()
        if attached and folder.detached:
            return
        if not tracker.running:
            tracker.scan()
            if not tracker.running:
                rings.find()
                rings.pack(limit_bytes)
                return
        rings.find()
        rings.pack(limit_bytes)
        for path, ring in rings.look() if watchers else ():
            for watcher in watchers:
                watcher.look_at(path, ring)
        spent = time.monotonic() - start
        # a look that waited (for stacks that never came) must not be paid back with minutes of sleep
        time.sleep(min(max(POLL_S, spent / DUTY - spent), SCAN_S))


@contextlib.contextmanager
def _device_counters(folder: RunFolder, wanted: bool) -> Iterator[None]:
    sampler: Any = None
    if wanted:
        try:
            from kvprobe.probe.device import Sampler

            sampler = Sampler(folder.append_sample)
            sampler.start()
        except Exception as error:  # no driver, no permission, no module: the rest of the run is worth having
            log.warning("device counters are off: %s", error)
            sampler = None
    try:
        yield
    finally:
        if sampler is not None:
            with contextlib.suppress(Exception):
                sampler.stop()


def main(arguments: list[str]) -> int:
    """`python -m kvprobe.instrument.observer RUN_FOLDER PID [PIDFD]`."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the command decides when it ends, and then this process ends
    logging.basicConfig(format="%(asctime)s %(message)s", datefmt="%H:%M:%S", level=logging.INFO, stream=sys.stdout)
    folder, pid = RunFolder(Path(arguments[0])), int(arguments[1])
    options: dict[str, Any] = folder.run().get("options", {})
    attached = bool(options.get("attached"))
    pidfd = int(arguments[2]) if arguments[2:] else -1
    tracker = ProcessTracker(folder, pid, attached=attached, command=str(options.get("words", "")), pidfd=pidfd)
    totals = options.get("detail") == "totals"
    # of a run that keeps totals alone no file may grow for good; without any, a starved thread looks like a full queue
    waits = CpuWaits(folder.append_cpu_wait, most=WAITS_OF_TOTALS if totals else MOST_WAITS)
    watchers: list[StackCapture | StackSampler | CpuWaits] = [waits]
    sampler: StackSampler | contextlib.nullcontext[None] = contextlib.nullcontext()
    if options.get("stacks", True):
        watchers.append(
            StackCapture(
                folder,
                after_ns=int(options.get("stacks_after_ms", 50)) * 1_000_000,
                inside=options.get("stacks_how") == "in-process",
                most=MOST_OF_TOTALS if totals else None,
            )
        )
        if options.get("stacks_how") != "in-process":  # a process could only answer where it lets the lock go
            sampler = StackSampler(folder.append_stack_sample)
            watchers.append(sampler)
    failure, rings = "", RingFiles(folder)
    told = StepSocket(folder.path, limit_of(totals, int(options.get("max_bytes") or 0)))
    try:
        with _device_counters(folder, bool(options.get("nvml"))), told, sampler:
            watch(folder, rings, tracker, watchers, options)
            waits.close()
    except Exception as error:  # what was recorded is worth reading all the same
        log.exception("the observer failed")
        failure = repr(error)
    lines = finish(folder, options, tracker, rings.sizes(), failure, told.said())
    log.info("%s", lines[-1])
    # `kvprobe detach` prints them
    show(folder, lines, "" if folder.detached else str(options.get("terminal", "")))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
