"""Histories of processes: one that forks, leaves or is killed in the middle of its requests."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from kvprobe.probe.live import totals
from kvprobe.probe.ring import read_ring

from .violation import Violation

KINDS = ("fork", "exit", "kill")
ROOT = Path(__file__).resolve().parents[2]


def play_process(kind: str, seed: int) -> dict[str, int]:
    """Plays the history of a seed in a process that forks, leaves without a word, or is killed.

    Returns:
        Transfers that its recording knows, and those that the process said had ended before.

    Raises:
        Violation: the recording cannot be read or lacks one of them, or the process ended otherwise than it should.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "tests.simulate.processes", kind, str(seed), folder]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "KVPROBE_RUN": folder}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        wanted = -signal.SIGKILL if kind == "kill" else 0
        if done.returncode != wanted:
            raise Violation(f"{kind} {seed}: ended with {done.returncode}, not {wanted}: {done.stderr[-2000:]}")
        ended = len(done.stdout.split())
        found = [read_ring(path) for path in sorted(Path(folder).glob("*.kvp"))]
        known = sum(sums.count for ring in found for (_, call, _), sums in totals(ring).items() if call == 64)
        if not found or known < ended:
            raise Violation(f"{kind} {seed}: {ended} transfers had ended, and {len(found)} recordings know {known}")
        return {"known": known, "ended": ended}


def _play(kind: str, seed: int) -> None:
    """In the process: a history that is cut short at a request of its own choosing."""
    import logging

    from kvprobe.errors import TransferError
    from kvprobe.offload import Transfer

    from . import history as module
    from .caller import Caller

    logging.getLogger("kvprobe").disabled = True
    dice = random.Random(seed)
    at, asked = dice.randrange(2, 20), 0
    strike = module.History.strike
    noted: set[int] = set()

    def say(history: module.History) -> None:
        """Which transfers have ended: what was written before the end must be in the recording."""
        for transfer in history.transfers:
            if transfer.done and transfer.id not in noted:
                noted.add(transfer.id)
                os.write(1, b"%d\n" % transfer.id)

    def cut(history: module.History) -> None:
        nonlocal asked
        strike(history)
        asked += 1
        say(history)
        if asked == at:
            {"fork": _fork, "exit": _exit, "kill": _kill}[kind](history)

    def _fork(history: module.History) -> None:
        child = os.fork()
        if not child:
            code = 1
            try:
                engine = history.engine
                assert engine is not None
                engine.load([0], [0])
            except TransferError as error:
                engine.close()
                code = 0 if "forked" in str(error) else 2
            finally:
                os._exit(code)
        history.must(os.waitpid(child, 0)[1] == 0, "the child's engine took a transfer, or could not be closed")

    def _exit(history: module.History) -> None:
        raise SystemExit(0)

    def _kill(history: module.History) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    class Recorded(module.History):
        """A history with one caller, whose engine records."""

        several = 1

        def choose(self, options):  # type: ignore[no-untyped-def]
            if options == ("off", "totals", "transfers", "copies"):
                options = options[1:]
            return super().choose((1,) if options == (1, 1, 1, 1, 2, 3) else options)

    assert Caller and Transfer
    module.History.strike = cut  # type: ignore[method-assign]
    history = Recorded(seed)
    history.play()
    say(history)
    if kind != "fork" and asked >= at:
        raise Violation("the history went on")
    if kind == "kill":  # it asked for less
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    _play(sys.argv[1], int(sys.argv[2]))
