"""What recording adds to a copy, to some nanoseconds, and what no recorder that reads the clock can do without.

    python benchmarks/copy_cost.py [--device cuda] [--rounds 8] [--json]

Copies of 4 KiB are submitted in blocks of 256 to an idle stream, four kinds of blocks by turns within a millisecond or
two: unwatched; recorded; through a function that calls the real one and does nothing else; and through one that reads
the processor's clock before and after. So neither the machine's clock speed nor its other guests change meanwhile, and
the median of the differences of neighbours is told, of each round. A round attaches the interposer anew, as where its
memory comes to lie changes some nanoseconds. Its words are switched by a function that only this benchmark compiles in
(KVP_LEADS_BY_TURNS): what leads to the interposer while it records, libcudart's own calls of the driver included, leads
past it otherwise.
"""

from __future__ import annotations

import argparse
import ctypes as ct
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from kvprobe.commands._device import runtime_of
from kvprobe.cuda import MEMCPY_KIND, Runtime
from kvprobe.native import build
from kvprobe.native.library import SubmitOptions, SubmitResult, core

COPIES, BYTES = 256, 4096
SETTLE_S, MEASURE_S = 0.8, 0.8  # of a round: marks take more of the first second
KINDS = ("unwatched", "recorded", "calls", "reads the clock")
FLOOR = """
typedef int copy_fn(void *, const void *, unsigned long, int, void *);
copy_fn *real;
volatile unsigned long took;
int calls(void *d, const void *s, unsigned long n, int k, void *t) {
    int result = real(d, s, n, k, t);
    __asm__ volatile("" : "+r"(result));
    return result;
}
int reads(void *d, const void *s, unsigned long n, int k, void *t) {
    unsigned long begin = __builtin_ia32_rdtsc();
    int result = real(d, s, n, k, t);
    took = __builtin_ia32_rdtsc() - begin;
    return result;
}
"""


class Blocks:
    """Blocks of copies to one stream."""

    def __init__(self, runtime: Runtime) -> None:
        """Takes memory and a stream."""
        self.runtime, self.stream = runtime, runtime.stream_create()
        self.gpu, self.host = runtime.malloc(BYTES), runtime.host_alloc(BYTES)
        self.to, self.source = (np.full(COPIES, one, np.uint64) for one in (self.gpu, self.host))

    def submit(self, copy: int) -> float:
        """Submits a block by the function at this address, and waits for it; ns a copy of submitting."""
        options = SubmitOptions(copy=copy, stream=self.stream, kind=MEMCPY_KIND["h2d"])
        result, now = SubmitResult(), core().kvp_now_ns
        begin = now()
        core().kvp_submit(
            ct.byref(options), COPIES, self.to.ctypes.data, self.source.ctypes.data, None, BYTES, ct.byref(result)
        )
        took = now() - begin
        self.runtime.stream_synchronize(self.stream)
        return took / COPIES

    def close(self) -> None:
        """Gives them back."""
        self.runtime.synchronize()
        self.runtime.free(self.gpu)
        self.runtime.free_host(self.host)
        self.runtime.stream_destroy(self.stream)


def switched(folder: Path) -> ct.CDLL:
    """The interposer, compiled into `folder` with `kvprobe_lead`: its words lead to it, or past it."""
    build.build(folder, ("-DKVP_LEADS_BY_TURNS",))
    library = ct.CDLL(str(folder / "libkvprobe_interpose.so"), mode=os.RTLD_NOW | os.RTLD_LOCAL)
    library.kvprobe_attach.argtypes = [ct.c_char_p, ct.c_char_p, ct.c_char_p, ct.c_uint64]
    return library


def attach(library: ct.CDLL, run: Path) -> None:
    """Records into this folder from here on; ends the program where that cannot be."""
    if library.kvprobe_attach(library._name.encode(), bytes(run), b"copies", 1 << 28) < 0:
        sys.exit("the interposer could not be attached")


def floor_of(folder: Path, copy: int) -> tuple[int, int]:
    """Addresses of the two functions of FLOOR around the function at `copy`."""
    source, library = folder / "floor.c", folder / "libfloor.so"
    source.write_text(FLOOR)
    subprocess.run([*build.compiler(), "-O2", "-shared", "-fPIC", "-o", library, source], check=True)
    floor = ct.CDLL(str(library))
    ct.c_void_p.in_dll(floor, "real").value = copy
    return tuple(ct.cast(getattr(floor, name), ct.c_void_p).value or 0 for name in ("calls", "reads"))  # type: ignore[return-value]


def measure(library: ct.CDLL, run: Path, known: Runtime, floor: tuple[int, int]) -> dict[str, float]:
    """One round: kind -> ns a copy more than unwatched; of "unwatched" all of it."""
    attach(library, run)
    runtime = Runtime(known.path, known.provider)  # its functions are the wrappers
    real, recorded = (one.address("cudaMemcpyAsync") for one in (known, runtime))
    if real == recorded:
        sys.exit("copy_cost: the copies of this runtime are not recorded")
    blocks = Blocks(runtime)
    times: dict[str, list[float]] = {kind: [] for kind in KINDS}
    try:
        begin = time.monotonic()
        while time.monotonic() - begin < SETTLE_S:
            blocks.submit(recorded)
        while time.monotonic() - begin < SETTLE_S + MEASURE_S:
            for kind, copy in zip(KINDS, (real, recorded, *floor), strict=True):
                library.kvprobe_lead(kind == "recorded")
                times[kind].append(blocks.submit(copy))
        library.kvprobe_lead(1)
    finally:
        blocks.close()
        library.kvprobe_detach()
    bare = times["unwatched"]
    more = {kind: statistics.median(a - b for a, b in zip(times[kind], bare, strict=True)) for kind in KINDS[1:]}
    return {"unwatched": statistics.median(bare), **more}


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="auto", choices=("auto", "cuda", "host"))
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if platform.machine() != "x86_64":
        sys.exit("copy_cost: the floor is written for the clock of x86-64 processors; use kvprobe bench overhead")
    known = runtime_of(options.device)
    rounds = []
    with tempfile.TemporaryDirectory(prefix="kvprobe-copy-cost-") as name:
        folder = Path(name)
        library = switched(folder)
        floor = floor_of(folder, known.address("cudaMemcpyAsync"))
        for number in range(options.rounds):
            run = folder / str(number)
            run.mkdir()
            rounds.append(measure(library, run, known, floor))
    found = {kind: sorted(one[kind] for one in rounds) for kind in KINDS}
    if options.json:
        print(json.dumps({"device": known.provider, "copies": COPIES, "bytes": BYTES, "rounds": rounds}, indent=2))
        return
    for kind, ns in found.items():
        one = "{:.1f}" if kind == "unwatched" else "{:+.1f}"
        middle, least, most = (one.format(value) for value in (statistics.median(ns), ns[0], ns[-1]))
        print(f"{kind:16} {middle} ns a copy ({least} to {most})")


if __name__ == "__main__":
    main()
