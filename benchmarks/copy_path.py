"""What the interposer runs and touches for one copy, counted by valgrind: instructions, cache lines of code and data.

    python benchmarks/copy_path.py [--native FOLDER] [--json]

A driver's work evicts what lies between two copies in a processor's first caches, so a copy costs as many lines as it
has to fetch again and not only the instructions that it runs. Both are counted here, of one copy in the middle of many,
and so the same whatever else the machine does. The program calls a stand-in runtime, which calls a stand-in driver as
the real one does. The interposer is compiled with a counter in place of the clock, because a program runs a hundred
times slower under valgrind: three instructions a reading, as many as the reading of the processor's own counter is.
--native: of another tree's kvprobe/native, to compare with.
"""

from __future__ import annotations

import argparse
import bisect
import collections
import dataclasses
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from interposer_cost import DRIVER

from kvprobe.native import build

CLOCK = """
#define _GNU_SOURCE
#include <time.h>
__attribute__((weak, visibility("hidden"))) unsigned long counted_ns;
static inline unsigned long read_counter(void) { return counted_ns += 300; }
static inline int counted_time(clockid_t clock, struct timespec *t) {
    (void)clock;
    unsigned long ns = read_counter();
    t->tv_sec = (long)(ns / 1000000000u), t->tv_nsec = (long)(ns % 1000000000u);
    return 0;
}
#define __builtin_ia32_rdtsc read_counter
#define clock_gettime counted_time
"""
RUNTIME = """
int cuMemcpyHtoDAsync_v2(unsigned long, const void *, unsigned long, void *);
int cudaMemcpyAsync(void *d, const void *s, unsigned long n, int k, void *t) {
    return k + cuMemcpyHtoDAsync_v2((unsigned long)d, s, n, t) - 1;
}
int cudaRuntimeGetVersion(int *v) { *v = 13000; return 0; }
"""
COPY = "int cuMemcpyHtoDAsync_v2(unsigned long d, const void *s, unsigned long n, void *t) { return 0; }\n"
PROGRAM = """
#include <time.h>
int cudaMemcpyAsync(void *, const void *, unsigned long, int, void *);
static char host[4096];
__attribute__((noinline)) void counted_from(void) { __asm__ volatile("" ::: "memory"); }
__attribute__((noinline)) void counted_to(void) { __asm__ volatile("" ::: "memory"); }
int main(void) {
    for (int i = 0; i < 600; i++) {
        cudaMemcpyAsync((void *)4096, host, 4096, 1, (void *)0x10000);
        if (i == 40) nanosleep(&(struct timespec){0, 30000000}, 0); /* events are made by another thread */
    }
    counted_from();
    cudaMemcpyAsync((void *)4096, host, 4096, 1, (void *)0x10000);
    counted_to();
    return 0;
}
"""
LINE = 64


@dataclasses.dataclass
class Counts:
    """Of one copy; lines are of 64 bytes, pages of 4 KiB."""

    instructions: int
    code_lines: int
    code_pages: int
    jumps_taken: int
    loads: int
    stores: int
    data_lines: int
    lines_written: int
    data_pages: int
    functions: dict[str, int]


def compiled(folder: Path, native: Path) -> Path:
    """The program, with its runtime and driver beside it and the interposer in `folder`."""
    sources = {"driver": DRIVER + COPY, "runtime": RUNTIME, "program": PROGRAM, "clock": CLOCK}
    for name, text in sources.items():
        (folder / name).with_suffix(".h" if name == "clock" else ".c").write_text(text)
    cc = [*build.compiler(), "-O2", "-w"]
    shared, here = [*cc, "-shared", "-fPIC"], f"-Wl,-rpath,{folder}"
    driver, runtime = folder / "libcuda.so.1", folder / "libstandin_cudart.so"
    subprocess.run([*shared, "-Wl,-soname,libcuda.so.1", "-o", driver, folder / "driver.c"], check=True)
    subprocess.run([*shared, "-o", runtime, folder / "runtime.c", driver, here], check=True)
    subprocess.run([*cc, "-no-pie", "-o", folder / "program", folder / "program.c", runtime, driver, here], check=True)
    patterns = build.LIBRARIES["libkvprobe_interpose.so"]
    found = sorted({path for pattern in patterns for path in native.glob(pattern)})
    command = [*build.compiler(), *build.CFLAGS, "-DKVP_PRIVATE_CORE=1", "-include", folder / "clock.h"]
    output = folder / "libkvprobe_interpose.so"
    subprocess.run([*command, f"-I{native / 'src'}", "-o", output, *found, *build.LDFLAGS], check=True)
    return folder / "program"


def symbols_of(path: Path) -> list[tuple[int, str]]:
    """Addresses and names, in order."""
    said = subprocess.run(["nm", "-n", path], capture_output=True, text=True, check=True).stdout
    return [(int(f[0], 16), f[2]) for f in map(str.split, said.splitlines()) if len(f) == 3 and f[1] in "tTdDbBrRvV"]


def trace(program: Path) -> list[tuple[str, int, int]]:
    """(I, L, S or M, address, bytes) of each access between the two marks."""
    marks = {name: address for address, name in symbols_of(program)}
    begin, end = (f"{marks[name]:08x}" for name in ("counted_from", "counted_to"))
    run = program.parent / "run"
    run.mkdir()
    environment = {k: v for k, v in os.environ.items() if not k.startswith("KVPROBE") and k != "LD_PRELOAD"}
    environment |= {"LD_PRELOAD": str(program.parent / "libkvprobe_interpose.so"), "KVPROBE_RUN": str(run)}
    environment |= {"KVPROBE_CONTENTS": "off"}  # a sample of copies, whose budget is of time
    command = ["valgrind", "--tool=lackey", "--trace-mem=yes", "--log-fd=1", str(program)]
    found, inside = [], False
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line[:2] not in ("I ", " L", " S", " M"):
                continue
            address, _, size = line[3:].partition(",")
            if line[0] == "I" and address == begin:
                inside = True
            elif line[0] == "I" and address == end:
                process.kill()
                break
            elif inside:
                found.append((line[:2].strip(), int(address, 16), int(size)))
    return found


def count(accesses: list[tuple[str, int, int]], library: Path) -> Counts:
    """What of it is the interposer's."""
    symbols = symbols_of(library)
    wrapper = next(address for address, name in symbols if name == "cudaMemcpyAsync_bound_0")
    # the program is no library, so whatever lies as the wrapper in its page and not in the program is the wrapper
    base = next(a - wrapper for kind, a, _ in accesses if kind == "I" and a > 1 << 24 and not (a - wrapper) % 4096)
    size = symbols[-1][0]
    at, next_at, jumps = 0, 0, 0
    code: list[tuple[int, int]] = []
    data: dict[int, set[str]] = collections.defaultdict(set)
    kinds: collections.Counter[str] = collections.Counter()
    for kind, address, length in accesses:
        if kind == "I":
            at = address
            if 0 <= at - base < size:
                jumps += address != next_at
                code.append((address, length))
            next_at = address + length
        elif 0 <= at - base < size:
            kinds[kind] += 1
            for line in {address // LINE, (address + length - 1) // LINE}:
                data[line].add(kind)
    lines = {byte // LINE for address, length in code for byte in (address, address + length - 1)}
    names = [symbols[bisect.bisect(symbols, (address - base, "~")) - 1][1] for address, _ in code]
    return Counts(
        instructions=len(code),
        code_lines=len(lines),
        code_pages=len({line // LINE for line in lines}),
        jumps_taken=jumps,
        loads=kinds["L"] + kinds["M"],
        stores=kinds["S"] + kinds["M"],
        data_lines=len(data),
        lines_written=sum(bool(seen & {"S", "M"}) for seen in data.values()),
        data_pages=len({line // LINE for line in data}),
        functions=dict(collections.Counter(names).most_common()),
    )


def main() -> None:
    """Prints the counts, or one JSON object."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--native", type=Path, default=build.NATIVE)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if not shutil.which("valgrind"):
        sys.exit("copy_path: needs valgrind (Debian: apt-get install valgrind)")
    with tempfile.TemporaryDirectory(prefix="kvprobe-path-") as folder:
        program = compiled(Path(folder), arguments.native.resolve())
        counts = count(trace(program), Path(folder) / "libkvprobe_interpose.so")
    if arguments.json:
        print(json.dumps(dataclasses.asdict(counts), indent=1))
        return
    for name, value in dataclasses.asdict(counts).items():
        if name != "functions":
            print(f"{name.replace('_', ' '):16}{value:6}")
    for name, value in counts.functions.items():
        print(f"    {name:32}{value:6} instructions")


if __name__ == "__main__":
    main()
