"""What the interposer adds to one call: bare and wrapped calls interleaved in one process, as floor and figure.

    python benchmarks/interposer_cost.py [--json]

A C program is linked to a stand-in runtime whose calls return at once, and calls each function by turns through the
wrapper (the linked symbol, preloaded) and directly (the runtime's own address, looked up in its symbol table). The
difference of the medians is what the wrapper costs: two clock reads, one record, the totals. `cold copy` does the same
with a stand-in that leaves the caches as a driver does: it runs through 20 KiB of code and 64 KiB of a 16 MiB array,
makes locked additions and a fence. A stand-in driver answers what the interposer asks one. The last lines say what the
preloaded library adds to the start of a process that makes no CUDA call. Each figure is the median of the differences
of neighbouring rounds; `floor` compares the fastest tenth of both.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from kvprobe.native import build

RUNTIME = """
int cudaMemcpyAsync(void *d, const void *s, unsigned long n, int k, void *t) { (void)d, (void)s, (void)n, (void)k, (void)t; return 0; }
typedef struct { unsigned x, y, z; } dim3;
int cudaLaunchKernel(const void *f, dim3 g, dim3 b, void **a, unsigned long s, void *t) { (void)f, (void)g, (void)b, (void)a, (void)s, (void)t; return 0; }
int cudaRuntimeGetVersion(int *v) { *v = 13000; return 0; }
#define CODE(N) static __attribute__((noinline)) int code_##N(int x) { __asm__ volatile(".skip 52, 0x90" : "+r"(x)); return x + N; }
#define FOR4(F, N) F(N##0) F(N##1) F(N##2) F(N##3)
#define FOR16(F, N) FOR4(F, N##0) FOR4(F, N##1) FOR4(F, N##2) FOR4(F, N##3)
#define FOR64(F, N) FOR16(F, N##0) FOR16(F, N##1) FOR16(F, N##2) FOR16(F, N##3)
#define FOR256(F, N) FOR64(F, N##0) FOR64(F, N##1) FOR64(F, N##2) FOR64(F, N##3)
FOR256(CODE, 1)
FOR64(CODE, 2)
#define CALL(N) x = code_##N(x);
static char data[16 << 20] __attribute__((aligned(64)));
static unsigned long doorbell, at;
#define LOCKED __atomic_fetch_add(&doorbell, 1, __ATOMIC_SEQ_CST);
int cudaMemcpy2DAsync(void *d, unsigned long dp, const void *s, unsigned long sp, unsigned long w, unsigned long h, int k, void *t) {
    int x = k + (int)w + (int)h; (void)d, (void)s, (void)dp, (void)sp, (void)t;
    LOCKED
    FOR256(CALL, 1)
    for (unsigned i = 0; i < 64 << 10; i += 64) data[at + i] += (char)x;
    at = (at + (64 << 10)) % sizeof data;
    LOCKED
    FOR64(CALL, 2)
    LOCKED
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    return 0;
}
"""  # noqa: E501
# What memory and marks ask a driver: with less than that the interposer would look for it at every call.
DRIVER = """
static char context, events[2048];
static unsigned made;
int cuInit(unsigned flags) { return 0; }
int cuCtxGetCurrent(void **c) { *c = &context; return 0; }
int cuCtxSetCurrent(void *c) { return 0; }
int cuCtxGetDevice(int *device) { *device = 0; return 0; }
int cuDeviceGetCount(int *devices) { *devices = 1; return 0; }
int cuStreamQuery(void *stream) { return 0; }
int cuStreamGetCtx(void *stream, void **c) { *c = &context; return 0; }
int cuStreamIsCapturing(void *stream, int *is) { *is = 0; return 0; }
int cuThreadExchangeStreamCaptureMode(int *mode) { return 0; }
int cuEventCreate(void **event, unsigned flags) { *event = &events[__atomic_fetch_add(&made, 1, 0) % sizeof events]; return 0; }
int cuEventRecord(void *event, void *stream) { return 0; }
int cuEventQuery(void *event) { return 0; }
int cuEventElapsedTime(float *ms, void *from, void *to) { static float now; *ms = now += 0.001f; return 0; }
int cuPointerGetAttributes(unsigned n, int *a, void **data, unsigned long long address) {
    (void)n, (void)a;
    *(unsigned *)data[0] = 1, *(unsigned *)data[1] = 0;
    *(unsigned long *)data[2] = address & ~0xffffful, *(unsigned long *)data[3] = 0x100000;
    return 0;
}
"""  # noqa: E501

PROGRAM = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <link.h>
#include <elf.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
typedef struct { unsigned x, y, z; } dim3;
int cudaMemcpyAsync(void *, const void *, unsigned long, int, void *);
int cudaLaunchKernel(const void *, dim3, dim3, void **, unsigned long, void *);
int cudaMemcpy2DAsync(void *, unsigned long, const void *, unsigned long, unsigned long, unsigned long, int, void *);
typedef int cold_fn(void *, unsigned long, const void *, unsigned long, unsigned long, unsigned long, int, void *);
typedef int copy_fn(void *, const void *, unsigned long, int, void *);
typedef int launch_fn(const void *, dim3, dim3, void **, unsigned long, void *);
static double now(void) { struct timespec t; clock_gettime(CLOCK_MONOTONIC, &t); return t.tv_sec * 1e9 + t.tv_nsec; }
/* The runtime's own address from its symbol table: dlsym would hand out a wrapper. */
static void *bare(const char *library, const char *name) {
    void *h = dlopen(library, RTLD_LAZY | RTLD_NOLOAD);
    struct link_map *map; dlinfo(h, RTLD_DI_LINKMAP, &map);
    ElfW(Sym) *symbols = 0; const char *strings = 0;
    for (ElfW(Dyn) *d = map->l_ld; d->d_tag; d++) {
        if (d->d_tag == DT_SYMTAB) symbols = (void *)d->d_un.d_ptr;
        if (d->d_tag == DT_STRTAB) strings = (void *)d->d_un.d_ptr;
    }
    for (int i = 1; i < 256; i++)
        if (!strcmp(strings + symbols[i].st_name, name)) return (void *)(map->l_addr + symbols[i].st_value);
    abort();
}
#define N 2000
int main(int argc, char **argv) {
    copy_fn *volatile copies[2] = {bare(argv[1], "cudaMemcpyAsync"), cudaMemcpyAsync};
    launch_fn *volatile launches[2] = {bare(argv[1], "cudaLaunchKernel"), cudaLaunchKernel};
    cold_fn *volatile colds[2] = {bare(argv[1], "cudaMemcpy2DAsync"), cudaMemcpy2DAsync};
    int rounds = atoi(argv[2]);
    for (int r = 0; r < rounds; r++)
        for (int which = 0; which < 2; which++) {
            copy_fn *copy = copies[which]; launch_fn *launch = launches[which];
            double a = now();
            for (int i = 0; i < N; i++) copy((void *)4096, (void *)8192, 4096, 1, (void *)16);
            double b = now();
            for (int i = 0; i < N; i++) launch(0, (dim3){1, 1, 1}, (dim3){1, 1, 1}, 0, 0, (void *)16);
            double c = now();
            cold_fn *cold = colds[which];
            for (int i = 0; i < N; i++) cold((void *)4096, 64, (void *)8192, 64, 64, 64, 1, (void *)16);
            double d = now();
            printf("%d %.2f %.2f %.2f\\n", which, (b - a) / N, (c - b) / N, (d - c) / N);
        }
    (void)argc;
    return 0;
}
"""


def compile_program(folder: Path) -> tuple[Path, Path]:
    (folder / "runtime.c").write_text(RUNTIME)
    (folder / "program.c").write_text(PROGRAM)
    (folder / "driver.c").write_text(DRIVER)
    runtime, program = folder / "libstandin_cudart.so", folder / "program"
    cc = [*build.compiler(), "-O2", "-w"]
    subprocess.run([*cc, "-shared", "-fPIC", "-o", runtime, folder / "runtime.c"], check=True)
    driver = folder / "libcuda.so.1"
    shared = ["-shared", "-fPIC", "-Wl,-soname,libcuda.so.1"]
    subprocess.run([*cc, *shared, "-o", driver, folder / "driver.c"], check=True)
    libraries = [runtime, "-Wl,--no-as-needed", driver, "-ldl", f"-Wl,-rpath,{folder}"]
    subprocess.run([*cc, "-o", program, folder / "program.c", *libraries], check=True)
    return program, runtime


def measure(program: Path, runtime: Path, env: dict[str, str], rounds: int) -> dict[str, dict[str, float]]:
    """Median and 10th percentile of ns per call, bare and wrapped, of copies and launches."""
    done = subprocess.run([program, runtime, str(rounds)], env=env, capture_output=True, text=True, check=True)
    rows = [line.split() for line in done.stdout.splitlines()]
    result: dict[str, dict[str, float]] = {}
    for column, name in ((1, "copy"), (2, "launch"), (3, "cold copy")):
        bare = sorted(float(row[column]) for row in rows if row[0] == "0")
        wrapped = sorted(float(row[column]) for row in rows if row[0] == "1")
        pairs = [float(b[column]) - float(a[column]) for a, b in zip(rows[::2], rows[1::2], strict=True)]
        result[name] = {
            "bare_ns": statistics.median(bare),
            "wrapped_ns": statistics.median(wrapped),
            "added_ns": statistics.median(pairs),
            "floor_ns": wrapped[len(wrapped) // 10] - bare[len(bare) // 10],
        }
    return result


def start_cost(env: dict[str, str], plain: dict[str, str], command: list[str], rounds: int) -> dict[str, float]:
    """What the environment adds to the start of a child, interleaved; ms."""
    times: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(rounds):
        for watched in (True, False):
            begin = time.perf_counter()
            subprocess.run(command, env=env if watched else plain, check=True, stdout=subprocess.DEVNULL)
            times[watched].append((time.perf_counter() - begin) * 1e3)
    return {
        "plain_ms": statistics.median(times[False]),
        "watched_ms": statistics.median(times[True]),
        "added_ms": statistics.median(times[True]) - statistics.median(times[False]),
    }


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--json", action="store_true")
    options.add_argument("--rounds", type=int, default=300)
    arguments = options.parse_args()
    build.build()
    folder = Path(tempfile.mkdtemp(prefix="kvprobe-cost-"))
    plain = {k: v for k, v in os.environ.items() if not k.startswith("KVPROBE") and k != "LD_PRELOAD"}
    loaded = {**plain, "LD_PRELOAD": str(build.LIB / "libkvprobe_interpose.so")}
    try:
        program, runtime = compile_program(folder)
        results: dict[str, object] = {}
        for detail in ("off", "totals", "copies", "launches"):
            run = folder / detail
            run.mkdir()
            env = {**loaded, "KVPROBE_RUN": str(run), "KVPROBE_DETAIL": detail}
            if detail == "off":
                env["KVPROBE"] = "off"
            results[detail] = measure(program, runtime, env, arguments.rounds)
        run = folder / "start"
        run.mkdir()
        env = {**loaded, "KVPROBE_RUN": str(run)}
        results["start of true"] = start_cost(env, plain, ["true"], 60)
        results["start of python"] = start_cost(env, plain, [sys.executable, "-c", "pass"], 30)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if arguments.json:
        print(json.dumps(results, indent=1))
        return
    print(f"{'KVPROBE_DETAIL':<16}{'call':<11}{'bare':>8}{'wrapped':>10}{'added':>8}{'floor':>8}   ns a call")
    for detail in ("off", "totals", "copies", "launches"):
        for call, row in results[detail].items():  # type: ignore[attr-defined]
            print(
                f"{detail:<16}{call:<11}{row['bare_ns']:>8.1f}{row['wrapped_ns']:>10.1f}{row['added_ns']:>8.1f}"
                f"{row['floor_ns']:>8.1f}"
            )
    for name in ("start of true", "start of python"):
        row = results[name]
        print(f"{name:<24}{row['plain_ms']:>8.2f}{row['watched_ms']:>10.2f}{row['added_ms']:>8.2f}   ms")  # type: ignore[index]


if __name__ == "__main__":
    main()
