"""Uses engines for a long time on the real clock, and shows whether anything grows: `make soak SECONDS=3600`.

Rounds follow one another: a round opens an engine, has threads load and store blocks through it (under every policy,
with fences, callbacks, some of which raise, and waits that are given up), compares every byte that came back, and
closes it. Between rounds nothing of it may be left. Prints a line every tenth of the time; exits with 1 where memory,
descriptors, threads, streams or events grew, a byte was wrong, or a transfer did not end.

`--faults N` plays N episodes instead, each in a process of its own, in turn: `poison` has a kernel break the device
while transfers are under way (torch reads beyond a tensor; the host runtime fails an execution): each transfer ends,
the engine says one reason, refuses the next transfer and closes. `memory` takes the device's memory up to the last
MiB: what cannot be had is refused in one line, and once it is there again the bytes arrive.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import json
import logging
import os
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from kvprobe.cuda import Runtime, device_region, find_runtime, host_region
from kvprobe.cuda.hostruntime import HostRuntime
from kvprobe.errors import CudaError, KvprobeError, TransferError
from kvprobe.offload import BlockPool, OffloadEngine

BLOCKS, BLOCK = 256, 16384
THREADS, REQUESTS = 4, 60  # of a round
POLICIES = ("auto", "pooled", "shared")
MEMORY_SLACK = 16 << 20  # bytes: the allocator's own ups and downs
DRIFT = 2.0  # of the median transfer, last quarter against first; a busy machine is not a drift


@dataclass
class Held:
    """What the process holds."""

    memory_bytes: int
    descriptors: int
    threads: int
    streams: int
    events: int

    @classmethod
    def now(cls, runtime: Runtime) -> Held:
        """Of this process."""
        proc = Path("/proc/self")
        resident = int((proc / "statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
        stats = runtime.stats if isinstance(runtime, HostRuntime) else None
        return cls(
            resident,
            sum(1 for _ in (proc / "fd").iterdir()),
            sum(1 for _ in (proc / "task").iterdir()),
            int(stats.streams) if stats else 0,
            int(stats.events) if stats else 0,
        )


@dataclass
class Soak:
    """The rounds, and what was seen."""

    runtime: Runtime
    wrong: list[str] = field(default_factory=list)
    transfers: int = 0
    took_ns: list[tuple[float, float]] = field(default_factory=list)  # (s since the start, median of a round)

    def __post_init__(self) -> None:
        size = BLOCKS * BLOCK
        self.gpu = device_region(self.runtime, size)
        self.cpu = host_region(self.runtime, 2 * size)
        self.pools = BlockPool(self.runtime, [self.gpu], BLOCK), BlockPool(self.runtime, [self.cpu], BLOCK)
        view = np.frombuffer(self.cpu.owner.view(), np.uint8).reshape(2 * BLOCKS, BLOCK)
        self.sources, self.back = view[:BLOCKS], view[BLOCKS:]
        self.began = time.monotonic()

    def round(self, number: int) -> None:
        """One engine from its making to its end."""
        rng = np.random.default_rng(number)
        self.sources[:] = rng.integers(0, 256, (BLOCKS, 1), np.uint8)
        self.back[:] = 0
        spans: list[float] = []
        compute = self.runtime.stream_create()
        policy = POLICIES[number % len(POLICIES)]
        with OffloadEngine(self.runtime, *self.pools, policy=policy, compute_stream=compute) as engine:
            each = BLOCKS // THREADS
            threads = [
                threading.Thread(target=self._caller, args=(engine, compute, range(at, at + each), number, spans))
                for at in range(0, BLOCKS, each)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            engine.wait(timeout_s=60)
            if not engine.idle or any(engine.held.values()):
                self.wrong.append(f"round {number}: all has ended, and the engine holds {engine.held}")
        self.runtime.stream_destroy(compute)
        self.took_ns.append((time.monotonic() - self.began, float(np.median(spans))))

    def _caller(self, engine: OffloadEngine, compute: int, own: range, number: int, spans: list[float]) -> None:
        """Loads its blocks in runs and stores them elsewhere; what comes back must be what went there."""
        try:
            rng = np.random.default_rng((number, own.start))
            for request in range(REQUESTS):
                blocks = rng.choice(np.arange(own.start, own.stop), rng.integers(1, 17), replace=False)
                load = engine.load(blocks, blocks)
                if request % 3 == 0:
                    load.add_done_callback(_raises if request % 2 else _nothing)
                if request % 4 == 0:
                    engine.fence(load, compute)
                if request % 5 == 0:
                    _give_up(load)
                load.wait(60)
                store = engine.store(blocks, blocks + BLOCKS)
                store.wait(60)
                spans.append(float(store.noticed_ns - store.requested_ns))
                self.transfers += 2
                if not np.array_equal(self.sources[blocks], self.back[blocks]):
                    self.wrong.append(f"round {number}: other bytes came back to blocks {blocks.tolist()}")
        except Exception as error:
            self.wrong.append(f"round {number}: {type(error).__name__}: {error}")


def _raises(_: object) -> None:
    raise RuntimeError("a callback that raises")


def _nothing(_: object) -> None:
    pass


def _give_up(transfer: object) -> None:
    try:
        transfer.wait(1e-5)  # type: ignore[attr-defined]
    except TransferError as error:
        if "did not end within" not in str(error):
            raise


def grown(first: Held, last: Held) -> list[str]:
    """What the process holds more of than before."""
    found = [
        f"{name}: {getattr(first, name)} before, {getattr(last, name)} after"
        for name in ("descriptors", "threads", "streams", "events")
        if getattr(last, name) > getattr(first, name)
    ]
    if last.memory_bytes > first.memory_bytes + MEMORY_SLACK:
        found.append(f"memory: {first.memory_bytes >> 20} MiB before, {last.memory_bytes >> 20} MiB after")
    return found


# ---- faults ----------------------------------------------------------------------------------------------------------

EPISODE_S = 120.0


def _poison(runtime: Runtime) -> None:
    """From its next work on the device is lost."""
    if isinstance(runtime, HostRuntime):
        runtime.fail_execution(1, 700)
        return
    import torch

    beyond = torch.full((1,), 1 << 40, dtype=torch.int64, device="cuda")
    torch.zeros(16, device="cuda")[beyond]


def poison(runtime: Runtime, number: int) -> dict[str, object]:
    """Transfers under way while the device is lost."""
    soak, rng = Soak(runtime), np.random.default_rng(number)
    engine = OffloadEngine(runtime, *soak.pools, policy=POLICIES[number % len(POLICIES)])
    transfers, refused = [], ""
    try:
        for turn in range(200):
            blocks = rng.choice(BLOCKS, 64, replace=False)
            transfers.append(engine.load(blocks, blocks, after=None))
            if turn == 50:
                _poison(runtime)
            if turn > 50:
                time.sleep(0.001)
    except KvprobeError as error:
        refused = str(error)
    for transfer in transfers:
        with contextlib.suppress(TransferError):
            transfer.wait(30)
    ended, failed = sum(one.done for one in transfers), sum(one.failed for one in transfers)
    engine.wait(timeout_s=30)
    reason = str(engine.broken)
    with contextlib.suppress(KvprobeError):
        engine.close()
    assert ended == len(transfers) and failed, f"{ended} of {len(transfers)} ended, {failed} failed"
    assert refused and reason != "None", f"refused: {refused!r}, broken: {reason!r}"
    return {"transfers": len(transfers), "failed": failed, "reason": reason, "refused": refused}


def memory(runtime: Runtime, number: int) -> dict[str, object]:
    """No device memory is left, and then there is some again."""
    taken, refused = [], ""
    for size in (1 << 30, 1 << 24, 1 << 20):
        with contextlib.suppress(CudaError):
            while True:
                taken.append(runtime.malloc(size))
    try:
        Soak(runtime)
    except KvprobeError as error:
        refused = str(error)
    for pointer in taken:
        runtime.free(pointer)
    assert refused and "\n" not in refused, f"refused: {refused!r}"
    soak = Soak(runtime)
    soak.round(number)
    assert not soak.wrong, soak.wrong
    return {"refused": refused, "transfers": soak.transfers}


FAULTS = {"poison": poison, "memory": memory}


def play_faults(count: int, device: str) -> int:
    """Episodes one after another; 1 where one of them hung, or did not end as it should."""
    wrong = 0
    for number in range(count):
        name = list(FAULTS)[number % len(FAULTS)]
        command = [sys.executable, __file__, "--device", device, "--episode", f"{name} {number}"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=EPISODE_S)
            said = (done.stdout.splitlines() or [""])[-1]
            if done.returncode:
                said = f"WRONG: exit code {done.returncode}: {done.stderr[-600:]}"
        except subprocess.TimeoutExpired:
            said = f"WRONG: it hung for {EPISODE_S:.0f} s"
        wrong += said.startswith("WRONG")
        print(f"{number:<5} {name:7} {said}", flush=True)
    print(f"{count} episodes, {wrong} things wrong")
    return bool(wrong)


def play_episode(runtime: Runtime, which: str) -> int:
    """One of them, in this process."""
    name, number = which.split()
    print(json.dumps(FAULTS[name](runtime, int(number))))
    return 0


def main() -> int:
    """Soaks; 1 where something was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("host", "cuda"), default="host")
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--faults", type=int, default=0, help="so many episodes with faults instead")
    parser.add_argument("--episode", help=argparse.SUPPRESS)
    options = parser.parse_args()
    logging.getLogger("kvprobe").disabled = True  # callbacks that raise are part of it
    if options.faults:
        return play_faults(options.faults, options.device)
    if options.device == "cuda":
        import torch  # its CUDA runtime is the one to use, and poisons

        torch.cuda.init()
    runtime = find_runtime(options.device)
    if options.episode:
        return play_episode(runtime, options.episode)
    soak, shown, first = Soak(runtime), 0, None
    print("s       rounds transfers  MiB  descriptors threads streams events  median store us")
    for number in itertools.count():
        soak.round(number)
        gc.collect()
        passed = time.monotonic() - soak.began
        if first is None and passed >= options.seconds / 20:  # what is made once was made
            first = Held.now(runtime)
        if passed >= shown * options.seconds / 10:
            held = Held.now(runtime)
            counts = f"{held.descriptors:>12} {held.threads:>7} {held.streams:>7} {held.events:>6}"
            counts += f" {soak.took_ns[-1][1] / 1e3:>16.0f}"
            print(
                f"{passed:<7.0f} {number + 1:<6} {soak.transfers:<9} {held.memory_bytes >> 20:>4} {counts}",
                flush=True,
            )
            shown += 1
        if passed >= options.seconds or soak.wrong:
            break
    assert first is not None or soak.wrong
    wrong = soak.wrong + (grown(first, Held.now(runtime)) if first else [])
    quarter = max(len(soak.took_ns) // 4, 1)
    before, after = (
        float(np.median([ns for _, ns in part])) for part in (soak.took_ns[:quarter], soak.took_ns[-quarter:])
    )
    print(f"median store, first quarter {before / 1e3:.0f} us, last {after / 1e3:.0f} us")
    if after > DRIFT * before:
        wrong.append(f"a store took {before / 1e3:.0f} us at first and {after / 1e3:.0f} us at last")
    for each in wrong[:20]:
        print(f"wrong: {each}")
    print(f"{soak.transfers} transfers in {len(soak.took_ns)} rounds, {len(wrong)} things wrong")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
