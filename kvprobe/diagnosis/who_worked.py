"""Who used the CPU while a GPU waited for its threads, where `kvprobe run` noted it: shared by two causes."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from kvprobe.account import GpuAccount, Worked, covers_of
from kvprobe.diagnosis.finding import MEASURED, Evidence
from kvprobe.diagnosis.joined import JoinedRecording, ms
from kvprobe.recordings.model import Array

__all__ = ["spent_by", "who_worked"]

WORKED = {
    Worked.THREAD: "the thread itself worked, and did not sleep",
    Worked.ANOTHER: "another thread of the process ran, and this one did not: it waited for the interpreter's lock or "
    "a lock of the program's own; kvprobe cannot tell which",
}


def who_worked(joined: JoinedRecording, gpu: GpuAccount, mine: Array) -> list[Evidence]:
    """Who used the CPU in pauses of the threads that the GPU waited for, where the recording has their CPU time."""
    return [
        Evidence(f"for {ms(ns)} of that, {WORKED[worked]}", ns, "ns", MEASURED)
        for worked, ns in spent_by(joined, gpu, mine, WORKED).items()
        if 100 * ns >= gpu.window_ns
    ]


def spent_by(joined: JoinedRecording, gpu: GpuAccount, mine: Array, who: Iterable[Worked]) -> dict[Worked, int]:
    """Of these stretches, what lies in pauses of their threads in which each of `who` worked, ns."""
    cut, spent = gpu.stretches, dict.fromkeys(who, 0)
    for one in joined.account.threads if joined.recording.pauses.rows else ():
        process = int(joined.process[np.argmax(joined.caller == one.caller)])
        waits = np.flatnonzero(mine & (cut.caller == one.caller))
        covers = covers_of(joined.recording, process, one.thread, gpu.from_ns, gpu.to_ns)
        for worked in spent:
            spent[worked] += int(covers[worked].within(cut.start[waits], cut.end[waits]).sum())
    return spent
