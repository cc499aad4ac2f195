"""What can fail in a history, when, and whether it did."""

from __future__ import annotations

import random

from kvprobe.cuda.hostruntime import HostRuntime

CODES = (1, 2, 719, 801, 999)
OPENING = {  # calls of making an engine; the n-th of up to so many
    "cudaStreamCreateWithPriority": 12,
    "cudaEventCreateWithFlags": 60,
    "cudaHostAlloc": 9,
    "cudaMalloc": 2,
    "cuModuleLoadData": 1,
    "cuModuleGetFunction": 4,
    "cuFuncSetAttribute": 4,
}
RUNNING = {  # of requests, and of the submitter
    "cudaEventRecord": 30,
    "cudaEventQuery": 30,
    "cudaEventElapsedTime": 16,
    "cudaEventSynchronize": 1,
    "cudaEventCreateWithFlags": 3,
    "cudaStreamWaitEvent": 6,
    "cudaStreamQuery": 1,
    "cudaMemcpyBatchAsync": 4,
    "cuLaunchKernel": 3,
    "copy": 30,
    "execution": 30,
    "lost device": 1,
}
CLOSING = {"cudaEventDestroy": 60, "cudaStreamDestroy": 10, "cudaFreeHost": 8}
PHASES = {"opening": OPENING, "running": RUNNING, "closing": CLOSING}
KINDS = [(phase, name) for phase, calls in PHASES.items() for name in calls]


class Fault:
    """One failure: armed at a moment, at the n-th call from then on."""

    def __init__(self, dice: random.Random, kind: int) -> None:
        """Of `KINDS[kind]`."""
        self.phase, self.name = KINDS[kind]
        self.number = 1 + int(dice.random() * PHASES[self.phase][self.name])
        self.code = CODES[int(dice.random() * len(CODES))]
        self.when = int(dice.random() * 20)  # of one that comes while requests are made: before which of them
        self.armed = False

    def __str__(self) -> str:
        return f"{self.phase}: {self.name}, number {self.number}, code {self.code}"

    def arm(self, runtime: HostRuntime) -> None:
        """From now on it counts."""
        self.armed = True
        if self.name == "copy":
            runtime.fail_copy(self.number, self.code)
        elif self.name == "execution":
            runtime.fail_execution(self.number)
        elif self.name == "lost device":
            runtime.lose_device()
        else:
            runtime.fail_call(self.name, self.number, self.code)

    def disarm(self, runtime: HostRuntime) -> None:
        """Where it did not come it will not."""
        if not self.armed or self.name == "lost device":
            return
        if self.name == "copy":
            runtime.fail_copy(0)
        elif self.name == "execution":
            runtime.fail_execution(0)
        else:
            runtime.fail_call(self.name, 0)

    def came(self, runtime: HostRuntime) -> bool:
        """Whether it happened."""
        return self.armed and (self.name == "lost device" or runtime.failed(self.name) > 0)
