"""A model that is put to sleep and woken as torch_memory_saver does it, with and without `kvprobe run --fix auto`.

    python benchmarks/sleep_wake.py [--device cuda|host] [--gib 20] [--sleeps 6] [--rounds 2] [--keep BYTES]
                                    [--after 0 2 5] [--turns 4]

Its calls, in its order (csrc/core.cpp, `pause` and `resume`; the backup is freed at `resume`, as versions do that give
host memory back), memory mapped by a library with its name: for each allocation cudaMallocHost, a synchronous
cudaMemcpy, cuMemUnmap, cuMemRelease; then cuMemCreate, cuMemMap, cuMemSetAccess, cudaMemcpy, cudaFreeHost. `as it is`
does so with 6 GiB and 3 sleeps at most; `cured`, with all, sleeps for the first time so many seconds `after` its first
allocation (0: as soon as weights are loaded, at the link's rate), and steps until then: a memset of 4 KiB and a wait
for it.

Printed: GB/s down and up, at the first sleep and the median of the others, beside the link's; each phase's share; what
steps took. The bytes of all weights are compared after the first and the last wake. `healthy` pins once and copies, 4
GiB at most: what kvprobe costs a program that needs no cure. Those with and without take turns, each in a process of
its own; compared are the medians of what all weights took down and up. `--device host` tries the script: there weights
stay in memory that is not unmapped, and its figures mean nothing.

`--seconds N` soaks instead: one cured process sleeps and wakes for so long, with other sizes among the weights each
time, so that what is kept does not fit and has to go; it copies fresh pageable memory both ways and forks children who
read the backups. Printed every tenth of the time: resident memory without the pinned, pinned memory (on the host
runtime; the kept with it), descriptors, threads. Exit code 1 then: bytes differ, a child ends badly, or the process
holds more at the end than after its first twentieth.

Exit code 1 else: bytes differ; or on a GPU, the median of the later sleeps is less than 85% of the link or less than 5
times as fast as without; a first sleep 5 s after the first allocation, or later, is less than 60% of it; more is held
than KVPROBE_KEEP_BYTES; `healthy` is more than 1% slower. A first sleep that comes earlier is printed and not judged.
Buffers of 20 GiB take 0.7 s to register at 30 GB/s, a quarter of 3 s that leave the program its steps; what is
registered in the sleep itself is copied after that at 55 GB/s, so even with pages for nothing it comes to 35% of the
link (reports/h100-sleep-wake.txt).
"""

from __future__ import annotations

import argparse
import ctypes as ct
import json
import mmap
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
MIB, GIB = 1 << 20, 1 << 30
SIZES_MIB = (512, 128, 64, 20, 20, 2)  # torch's segments, as a model's weights come
TO_DEVICE, TO_HOST = 1, 2
SECOND, FIRST, FASTER, HEALTHY = 0.85, 0.60, 5.0, 1.01
FIRST_AFTER_S = 5.0  # it is judged from then on
AS_IT_IS_BYTES, AS_IT_IS_SLEEPS, HEALTHY_BYTES, HEALTHY_SLEEPS = 6 * GIB, 3, 4 * GIB, 64
PINNED = 2  # flags of cudaHostAlloc that no backup has
STEP_BYTES, BETWEEN_STEPS_S = 4096, 0.0001


# What maps memory is a library of its own, as theirs is: kvprobe asks it whether memory will be backed up.
SAVER = """
#include <stddef.h>
#include <stdint.h>
static struct { int type, handles, at, device; void *win32; unsigned char flags[8]; } where = {1, 0, 1, 0, 0, {0}};
static struct { int at, device, flags; } reach = {1, 0, 3};
int cuMemCreate(uint64_t *, size_t, const void *, uint64_t), cuMemMap(uint64_t, size_t, size_t, uint64_t, uint64_t);
int cuMemSetAccess(uint64_t, size_t, const void *, size_t);
_Bool tms_get_enable_cpu_backup(void) { return 1; }
int saver_create(uint64_t *handle, size_t size) { return cuMemCreate(handle, size, &where, 0); }
int saver_map(uint64_t at, size_t size, uint64_t handle) { return cuMemMap(at, size, 0, handle, 0); }
int saver_access(uint64_t at, size_t size) { return cuMemSetAccess(at, size, &reach, 1); }
"""


def saver(folder: str) -> ct.CDLL:
    """Compiles it against the driver, which is loaded, and loads it."""
    from kvprobe.native.build import compiler

    loaded = Path("/proc/self/maps").read_text().split()
    driver = next(path for path in loaded if "libcuda.so" in path)
    made, source = Path(folder, "torch_memory_saver_calls.so"), Path(folder, "saver.c")
    source.write_text(SAVER)
    flags = ("-fno-optimize-sibling-calls", "-shared", "-fPIC")  # a call that is a jump has another caller
    subprocess.run([*compiler(), *flags, "-o", made, source, driver], check=True)
    return ct.CDLL(str(made))


class Weight:
    """One allocation of GPU memory whose pages come and go under an address that stays."""

    def __init__(self, calls: Calls, size: int) -> None:
        """Reserves the address and gives it memory."""
        self.calls, self.size = calls, size
        self.address, self.handle, self.backup = ct.c_uint64(), ct.c_uint64(), ct.c_void_p()
        if calls.driver:
            calls.check("cuMemAddressReserve", ct.byref(self.address), ct.c_size_t(size), ct.c_size_t(0), 0, 0)
            self.map()
        else:
            calls.check("cudaMalloc", ct.byref(self.address), ct.c_size_t(size))

    def map(self) -> None:
        """Memory under the address again."""
        if not self.calls.driver:
            return
        size = ct.c_size_t(self.size)
        self.calls.check("saver_create", ct.byref(self.handle), size)
        self.calls.check("saver_map", self.address, size, self.handle)
        self.calls.check("saver_access", self.address, size)

    def unmap(self) -> None:
        """No memory under it."""
        if not self.calls.driver:
            ct.memset(self.address.value or 0, 0, self.size)
            return
        self.calls.check("cuMemUnmap", self.address, ct.c_size_t(self.size))
        self.calls.check("cuMemRelease", self.handle)

    def free(self) -> None:
        """Its memory and its address."""
        if not self.calls.driver:
            self.calls.check("cudaFree", self.address)
            return
        self.unmap()
        self.calls.check("cuMemAddressFree", self.address, ct.c_size_t(self.size))

    def copy(self, kind: int, host: int) -> None:
        """All of it, synchronously."""
        device = ct.c_void_p(self.address.value)
        to, source = (device, ct.c_void_p(host)) if kind == TO_DEVICE else (ct.c_void_p(host), device)
        self.calls.check("cudaMemcpy", to, source, ct.c_size_t(self.size), kind)


class Calls:
    """The runtime and the driver, called as a program does, and the time that each name took."""

    def __init__(self, device: str) -> None:
        """Loads them; the host runtime is its own driver and has no virtual memory."""
        import kvprobe

        self.runtime = ct.CDLL(kvprobe.find_runtime(device).path)
        self.driver = ct.CDLL("libcuda.so.1") if device == "cuda" else None
        self.folder = tempfile.TemporaryDirectory()
        self.saver = saver(self.folder.name) if self.driver else None
        self.took: dict[str, float] = {}

    def check(self, name: str, *arguments: Any) -> None:
        """Calls it; an error ends the program."""
        library = self.driver if name.startswith("cuM") else self.saver if name.startswith("saver") else self.runtime
        began = time.perf_counter()
        error = getattr(library, name)(*arguments)
        self.took[name] = self.took.get(name, 0) + time.perf_counter() - began
        if error:
            raise SystemExit(f"{name} returned {error}")


class Pattern:
    """Random bytes in pinned memory, written to weights from another place each, and compared."""

    STEP, PLACES = 4096, 509

    def __init__(self, calls: Calls, largest: int) -> None:
        """Of what the largest weight needs."""
        import numpy as np

        self.calls, self.equal = calls, np.array_equal
        self.ours, self.theirs = self._pinned(largest + self.STEP * self.PLACES), self._pinned(largest)
        self.ours[:] = np.random.default_rng(1).integers(0, 256, self.ours.size, np.uint8)

    def _pinned(self, size: int) -> Any:
        import numpy as np

        host = ct.c_void_p()
        self.calls.check("cudaHostAlloc", ct.byref(host), ct.c_size_t(size), PINNED)
        return np.frombuffer(memoryview((ct.c_ubyte * size).from_address(host.value or 0)).cast("B"), np.uint8)

    def _of(self, number: int, weight: Weight) -> Any:
        return self.ours[number % self.PLACES * self.STEP :][: weight.size]

    def write(self, weights: list[Weight]) -> None:
        """To all of them."""
        for number, weight in enumerate(weights):
            weight.copy(TO_DEVICE, self._of(number, weight).ctypes.data)

    def same(self, weights: list[Weight]) -> bool:
        """Whether every byte is there."""
        found = True
        for number, weight in enumerate(weights):
            weight.copy(TO_HOST, self.theirs.ctypes.data)
            found &= bool(self.equal(self.theirs[: weight.size], self._of(number, weight)))
        return found

    def link_rate(self) -> dict[str, float]:
        """Bytes a second from and to memory of the device, pinned, the best of eight."""
        device, size, best = ct.c_void_p(), self.theirs.size, {TO_HOST: 0.0, TO_DEVICE: 0.0}
        self.calls.check("cudaMalloc", ct.byref(device), ct.c_size_t(size))
        host = ct.c_void_p(self.theirs.ctypes.data)
        for _ in range(8):
            for kind in best:
                to, source = (device, host) if kind == TO_DEVICE else (host, device)
                began = time.perf_counter()
                self.calls.check("cudaMemcpy", to, source, ct.c_size_t(size), kind)
                best[kind] = max(best[kind], size / (time.perf_counter() - began))
        self.calls.check("cudaFree", device)
        return {"down": best[TO_HOST], "up": best[TO_DEVICE]}


def sizes_of(total: int) -> list[int]:
    """Bytes of each weight of a model of `total` bytes."""
    made: list[int] = []
    while total >= 2 * MIB:
        made.append(min(SIZES_MIB[len(made) % len(SIZES_MIB)] * MIB, total // (2 * MIB) * 2 * MIB))
        total -= made[-1]
    return made


def steps_until(calls: Calls, memory: ct.c_void_p, until: float) -> list[float]:
    """What each step took, s, until that moment of the clock."""
    took: list[float] = []
    while time.perf_counter() < until:
        began = time.perf_counter()
        calls.check("cudaMemsetAsync", memory, 0, ct.c_size_t(STEP_BYTES), None)
        calls.check("cudaStreamSynchronize", None)
        took.append(time.perf_counter() - began)
        time.sleep(BETWEEN_STEPS_S)
    return took


def fall_asleep(weights: list[Weight], calls: Calls, pins: bool) -> None:
    """What `pause` does."""
    for weight in weights:
        if pins:
            calls.check("cudaMallocHost", ct.byref(weight.backup), ct.c_size_t(weight.size))
        weight.copy(TO_HOST, weight.backup.value or 0)
        if pins:
            weight.unmap()


def wake_up(weights: list[Weight], calls: Calls, pins: bool) -> None:
    """What `resume` does."""
    for weight in weights:
        if pins:
            weight.map()
        weight.copy(TO_DEVICE, weight.backup.value or 0)
        if pins:
            calls.check("cudaFreeHost", weight.backup)


def timed(what: Callable[..., None], weights: list[Weight], calls: Calls, pins: bool) -> dict[str, Any]:
    """What it took, in all and by the calls' names."""
    calls.took = {}
    began = time.perf_counter()
    what(weights, calls, pins)
    return {"s": time.perf_counter() - began, "calls_s": dict(calls.took)}


def program(device: str, total: int, sleeps: int, pins: bool, after_s: float) -> None:
    """One process: prints what each sleep took."""
    calls = Calls(device)
    started = ct.c_void_p()
    calls.check("cudaMalloc", ct.byref(started), ct.c_size_t(STEP_BYTES))  # makes the context
    sizes = sizes_of(total)
    pattern = Pattern(calls, max(sizes))
    link = pattern.link_rate()
    loads = time.perf_counter()
    weights = [Weight(calls, size) for size in sizes]
    pattern.write(weights)
    if not pins:
        for weight in weights:
            calls.check("cudaMallocHost", ct.byref(weight.backup), ct.c_size_t(weight.size))
    rounds: list[dict[str, Any]] = []
    same = True
    steps = sorted(steps_until(calls, started, loads + after_s))
    loaded_s = time.perf_counter() - loads
    for number in range(sleeps):
        down = timed(fall_asleep, weights, calls, pins)
        up = timed(wake_up, weights, calls, pins)
        rounds.append({"down": down, "up": up})
        if number in (0, sleeps - 1):
            same &= pattern.same(weights)
    found = {"rounds": rounds, "same": same, "link": link, "bytes": sum(weight.size for weight in weights)}
    ms = [1e3 * steps[at] for at in (len(steps) // 2, len(steps) * 999 // 1000, -1)] if steps else []
    print(json.dumps({**found, "loaded_s": loaded_s, "steps": len(steps), "steps_ms": ms}))


# ---- a soak ----------------------------------------------------------------------------------------------------------

SOAKED_MIB = (64, 20, 20, 16, 4, 2)
FORKS, SHOWN = 64, 10  # every so many sleeps a child; so many lines


def child_reads(weights: list[Weight]) -> bool:
    """Whether a forked child finds its parent's backups readable, pins nothing, and ends well."""
    first = [(ct.c_ubyte * 4).from_address(weight.backup.value or 0)[0] for weight in weights]
    pid = os.fork()
    if not pid:
        same = [(ct.c_ubyte * 4).from_address(weight.backup.value or 0)[0] for weight in weights] == first
        os._exit(0 if same else 9)
    return os.waitpid(pid, 0)[1] == 0


def pageable_and_back(weight: Weight, calls: Calls, number: int) -> bool:
    """Whether bytes that go up from fresh pageable memory come down to other fresh memory."""
    size = weight.size
    with mmap.mmap(-1, size) as there, mmap.mmap(-1, size) as back:
        there[:: size // 64] = bytes((number + at) % 251 for at in range(64))
        for kind, memory in ((TO_DEVICE, there), (TO_HOST, back)):
            view = ct.c_ubyte.from_buffer(memory)
            weight.copy(kind, ct.addressof(view))
            del view
        return there[:] == back[:]


def soak(device: str, seconds: float) -> None:
    """Sleeps for so long; prints what the process holds."""
    from soak import Held, grown

    import kvprobe
    from kvprobe.cuda.hostruntime import HostRuntime

    calls, runtime = Calls(device), kvprobe.find_runtime(device)

    def held_now() -> tuple[Held, int]:
        """Pinned memory comes and goes with what is kept, which has a budget of its own."""
        pinned = int(runtime.stats.pinned_bytes) if isinstance(runtime, HostRuntime) else 0
        held = Held.now(runtime)
        return replace(held, memory_bytes=held.memory_bytes - pinned), pinned

    weights = [Weight(calls, size * MIB) for size in SOAKED_MIB]
    pattern = Pattern(calls, SOAKED_MIB[0] * MIB)
    pattern.write(weights)
    began, shown, number, wrong = time.monotonic(), 0, 0, []
    first: Held | None = None
    print("s       sleeps   MiB  and pinned  descriptors threads")
    while True:
        passed = time.monotonic() - began
        if first is None and passed >= seconds / 20:
            first = held_now()[0]
            first = replace(first, threads=first.threads + 1)  # one looks for pressure while something is kept
        if passed >= shown * seconds / SHOWN:
            (held, pinned), shown = held_now(), shown + 1
            print(
                f"{passed:<7.0f} {number:<8} {held.memory_bytes >> 20:>3} {pinned >> 20:>11} {held.descriptors:>12} "
                f"{held.threads:>7}",
                flush=True,
            )
            if passed >= seconds or wrong:
                break
        number += 1
        other = Weight(calls, random.Random(number).randrange(2, 40) * MIB)
        all_of_them = [*weights, other]
        pageable = ct.create_string_buffer(other.size)
        other.copy(TO_DEVICE, ct.addressof(pageable))
        del pageable
        fall_asleep(all_of_them, calls, True)
        if number % FORKS == 0 and not child_reads(all_of_them):
            wrong.append(f"sleep {number}: a child ended badly")
        wake_up(all_of_them, calls, True)
        other.free()
        if number % 16 == 0 and not pattern.same(weights):
            wrong.append(f"sleep {number}: bytes differ")
        if number % 16 == 8:
            if not pageable_and_back(weights[number // 16 % 4], calls, number):
                wrong.append(f"sleep {number}: pageable bytes differ")
            pattern.write(weights)
    wrong += grown(first, held_now()[0]) if first else []
    print(json.dumps({"sleeps": number, "wrong": wrong}))


def run_soak(asked: argparse.Namespace) -> int:
    """One process under the cure, its lines as they come, and what the cure says of itself at its end."""
    own = [sys.executable, __file__, "--device", asked.device, "--seconds", str(asked.seconds), "--program", "soak"]
    keep = str(160 * MIB) if asked.keep == "auto" else asked.keep
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": path, "KVPROBE_KEEP_BYTES": keep}
    last = ""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "kvprobe", "run", "--fix", "auto", "-o", f"{folder}/run", "--", *own]
        with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as process:
            for line in process.stdout or ():
                print(line, end="", flush=True)
                last = line if line.startswith('{"sleeps"') else last
        texts = [events.read_text() for events in Path(folder).glob("run/events-*.jsonl")]
        said = [json.loads(line)["why"] for text in texts for line in text.splitlines()]
    print("\n".join(said))
    wrong = json.loads(last)["wrong"] if last and not process.returncode else [f"it ended with {process.returncode}"]
    wrong += over_budget(said)
    for one in wrong:
        print(f"wrong: {one}")
    print(f"{len(wrong)} things wrong")
    return bool(wrong)


# ---- the arms --------------------------------------------------------------------------------------------------------


def run(asked: argparse.Namespace, pins: bool, cured: bool, after_s: float = 0) -> dict[str, Any]:
    """One program with or without the cure; with it, what the cure says of itself."""
    most, sleeps = HEALTHY_BYTES, HEALTHY_SLEEPS
    if pins:
        most, sleeps = asked.gib * GIB, asked.sleeps
    if pins and not cured:
        most, sleeps = AS_IT_IS_BYTES, min(sleeps, AS_IT_IS_SLEEPS)
    own = [sys.executable, __file__, "--device", asked.device, "--gib", str(min(asked.gib, most / GIB))]
    own += ["--sleeps", str(sleeps), "--after", str(after_s), "--program", "sleeps" if pins else "healthy"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    with tempfile.TemporaryDirectory() as folder:
        command = own
        if cured:
            env["KVPROBE_KEEP_BYTES"] = asked.keep
            under = ["--fix", "auto", "--report", "none", "-o", f"{folder}/run"]
            command = [sys.executable, "-m", "kvprobe", "run", *under, "--", *own]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        lines = [line for line in done.stdout.splitlines() if line.startswith('{"rounds"')]
        if not lines:
            raise SystemExit(f"the program ended with {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
        found: dict[str, Any] = json.loads(lines[0])
        texts = [path.read_text() for path in Path(folder).glob("run/events-*.jsonl")]
        found["said"] = [json.loads(line)["why"] for text in texts for line in text.splitlines()]
    return found


def rates(found: dict[str, Any], way: str) -> tuple[float, float]:
    """GB/s of the first sleep or wake, and the median of those after it."""
    each = [found["bytes"] / entry[way]["s"] / 1e9 for entry in found["rounds"]]
    return each[0], statistics.median(each[1:])


def show(name: str, found: dict[str, Any]) -> None:
    """One program's line, and what its phases took."""
    for way in ("down", "up"):
        first, later = rates(found, way)
        link = found["link"][way] / 1e9
        phases = ", ".join(f"{call} {s:.3f} s" for call, s in found["rounds"][-1][way]["calls_s"].items())
        print(
            f"{name:16} {way:4} first {first:6.2f} GB/s, later {later:6.2f}; link {link:6.2f} ({later / link:4.0%}; "
            f"first {first / link:4.0%}); last: {phases}"
        )
    steps = "no steps"
    if found["steps"]:
        median, rare, longest = found["steps_ms"]
        steps = f"{found['steps']} steps: median {median:.3f}, p99.9 {rare:.2f}, longest {longest:.2f} ms"
    gib = found["bytes"] / GIB
    print(f"{'':16} {gib:.0f} GiB; {found['loaded_s']:.2f} s from the first allocation to the first sleep, {steps}")
    for line in found["said"]:
        print(f"{'':16} {line}")
    print(f"{'':16} {'bytes equal' if found['same'] else 'BYTES DIFFER'}", flush=True)


def over_budget(said: list[str]) -> list[str]:
    """What is wrong with how much the cure says it kept."""
    held = list(filter(None, (re.search(r"kept at most ([\d.]+) MiB of the ([\d.]+) MiB", line) for line in said)))
    if not held:
        return ["the cure does not say how much it kept"]
    return [f"more was kept than allowed: {match[0]}" for match in held if float(match[1]) > float(match[2])]


def all_weights_s(found: dict[str, Any]) -> float:
    """What all weights took down and up, the median of the rounds."""
    return statistics.median(entry["down"]["s"] + entry["up"]["s"] for entry in found["rounds"])


def judged(all_found: dict[str, list[dict[str, Any]]], device: str) -> list[str]:
    """What is missed."""
    wrong = [f"{name}: bytes differ" for name, several in all_found.items() for one in several if not one["same"]]
    cured = {name: several for name, several in all_found.items() if name.startswith("cured")}
    for several in cured.values():
        for one in several:
            wrong += over_budget(one["said"])
    if device != "cuda":
        return wrong
    for way in ("down", "up") if all_found["as it is"] else ():
        link = max(one["link"][way] for several in all_found.values() for one in several) / 1e9
        was = statistics.median(rates(one, way)[1] for one in all_found["as it is"])
        for name, several in cured.items():
            first, later = (statistics.median(rates(one, way)[at] for one in several) for at in (0, 1))
            print(
                f"{name} {way}: {later / was:.1f} times as fast from the second on; {later / link:.0%} of the link, "
                f"{first / link:.0%} at the first"
            )
            early = way == "down" and min(one["loaded_s"] for one in several) < FIRST_AFTER_S
            if later < SECOND * link or (first < FIRST * link and not early) or later < FASTER * was:
                wrong.append(f"{name} {way}: not what was wanted")
    if all_found["healthy"]:
        both = (all_found["healthy cured"], all_found["healthy"])
        slower, than = (statistics.median(map(all_weights_s, several)) for several in both)
        print(f"healthy: {slower / than:.4f} of its time")
        wrong += ["healthy is slower"] if slower / than > HEALTHY else []
    return wrong


def main() -> int:
    """Entry."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "host"), default="cuda")
    parser.add_argument("--gib", type=float, default=20)
    parser.add_argument("--sleeps", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--after", type=float, nargs="+", default=[0, 2, 5], metavar="SECONDS")
    parser.add_argument("--turns", type=int, default=4, help="processes of a healthy program, with and without each")
    parser.add_argument("--keep", default="auto")
    parser.add_argument("--seconds", type=float, help="a soak of so long instead")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--program", choices=("sleeps", "healthy", "soak"), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.program == "soak":
        soak(asked.device, asked.seconds)
        return 0
    if asked.seconds:
        return run_soak(asked)
    if asked.program:
        program(asked.device, int(asked.gib * GIB), asked.sleeps, asked.program == "sleeps", asked.after[0])
        return 0
    arms: dict[str, tuple[bool, bool, float]] = {"as it is": (True, False, 0)}
    arms |= {f"cured {after_s:g} s": (True, True, after_s) for after_s in asked.after}
    healthy: dict[str, tuple[bool, bool, float]] = {"healthy": (False, False, 0), "healthy cured": (False, True, 0)}
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in (*arms, *healthy)}
    turns = [*arms.items()] * asked.rounds
    for turn in range(asked.turns):
        turns += [*healthy.items()][:: -1 if turn % 2 else 1]
    for name, (pins, cured, after_s) in turns:
        found[name].append(run(asked, pins, cured, after_s))
        show(name, found[name][-1])
        if asked.json:
            asked.json.write_text(json.dumps(found))
    wrong = judged(found, asked.device)
    print("\n".join(wrong) or "held")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
