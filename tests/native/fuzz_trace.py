"""libFuzzer over the native readers of recordings: `python tests/native/fuzz_trace.py [RUNS]`, or `make fuzz-native`.

Traces' events and queues, and tables of SQLite files, under AddressSanitizer and UndefinedBehaviorSanitizer; what is
scanned in pieces must equal what is scanned at once. Needs clang. An input that fails is left as `crash-*` in the
current folder.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
TRACE = HERE.parents[1] / "kvprobe" / "native" / "trace"
SANITIZERS = "-fsanitize=fuzzer,address,undefined"
LIMITS = {"events": 2000, "tables": 40_000}  # bytes of an input


def build(program: Path) -> str:
    """Compiles the fuzzer; what was said where that failed."""
    clang = shutil.which("clang")
    if clang is None:
        return "there is no clang"
    command = [clang, "-std=gnu11", "-g", "-O2", "-Wall", "-Wextra", "-Werror", SANITIZERS, f"-I{TRACE}"]
    command += ["-fno-sanitize-recover=undefined", "-o", str(program), str(HERE / "programs" / "fuzz_trace.c")]
    done = subprocess.run(
        [*command, *map(str, sorted(TRACE.glob("*.c"))), "-lm"], capture_output=True, text=True, check=False
    )
    return done.stderr or "clang failed" if done.returncode else ""


def seeds(folder: Path) -> dict[str, Path]:
    """What libFuzzer begins with: a folder for each kind. The first byte says how an input is cut into pieces."""
    sys.path[:0] = [str(HERE.parent / "recordings")]
    import fuzz_seeds

    folders = {kind: folder / kind for kind in LIMITS}
    for one in folders.values():
        one.mkdir()
    made = fuzz_seeds.seeds()
    for i, files in enumerate(made["kineto"]):
        events = files["x.json"].split(b'"traceEvents"')[1].partition(b"[")[2]
        for at in range(0, len(events), 1500):
            start = events.find(b"{", at)
            (folders["events"] / f"{i}-{at}").write_bytes(bytes([i * 9]) + events[start : start + 1500])
    for i, files in enumerate(made["sqlite"]):
        (folders["tables"] / str(i)).write_bytes(bytes([i * 7]) + files["x.sqlite"][: LIMITS["tables"]])
    return folders


def run(
    program: Path, found: Path, runs: int, limit: int, start: Path, seed: int = 0
) -> subprocess.CompletedProcess[str]:
    """Runs it `runs` times over what grows from the seeds in `start`; inputs that fail go to `found`. `seed` 0: any."""
    (corpus := start.with_suffix(".grown")).mkdir(exist_ok=True)
    # the kernel counts the memory of the process that started this one as its own peak: no limit of all memory
    options = [f"-runs={runs}", f"-seed={seed}", f"-max_len={limit}", "-rss_limit_mb=0", "-malloc_limit_mb=1000"]
    options += ["-timeout=20", "-verbosity=0", "-print_final_stats=1", f"-artifact_prefix={found}/"]
    return subprocess.run([program, *options, corpus, start], capture_output=True, text=True, check=False)


def main(arguments: list[str]) -> int:
    """Runs each kind; exit status 1 if an input failed."""
    failed, runs = False, int(arguments[0]) if arguments else 200_000
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        if said := build(folder / "fuzz_trace"):
            print(said, file=sys.stderr)
            return 2
        for kind, start in seeds(folder).items():
            done = run(folder / "fuzz_trace", Path.cwd(), runs, LIMITS[kind], start)
            figures = [line for line in done.stderr.splitlines() if line.startswith("stat::")]
            print(kind, "failed" if done.returncode else "without a report", *figures, sep="\n  ", flush=True)
            if done.returncode:
                failed = True
                print(done.stderr[-6000:])
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
