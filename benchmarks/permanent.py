"""A day's copies in permanent mode: `kvprobe run --detail totals`, with `kvprobe metrics` beside it.

A program on the host runtime makes as many copies as a server that makes a hundred a second does in a day, checks each,
and counts for itself. Meanwhile the memory of the program, of the observer and of the metrics process and the bytes of
the run folder are looked at; then the metrics are compared with the program's counts.

    python benchmarks/permanent.py [--copies 8640000] [--threads 2]

Prints one line a figure with its bound; exit code 1 when one is missed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from kvprobe.native import build
from kvprobe.probe.exposed import counts

PROGRAM = Path(__file__).resolve().parents[1] / "tests" / "native" / "programs" / "copying.c"
TODO, PAUSED, COPIES, BYTES, WRONG = range(5)
GROWTH_BYTES = 4 << 20  # of a process's memory between the first tenth and the end
FILES_BYTES = 64 << 10  # of the run folder likewise


def memory(pid: int) -> int:
    """Resident bytes; 0 where it has gone."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def folder_bytes(folder: Path) -> int:
    """What its files can take: of a ring file its fixed size, which holds as much as was written."""
    return sum(path.stat().st_size for path in folder.iterdir())


def on_disk(folder: Path) -> int:
    """What they take."""
    return sum(path.stat().st_blocks * 512 for path in folder.iterdir())


def pid_with(text: bytes, folder: Path) -> int:
    """The process that has both in its command line."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                line = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if text in line and os.fsencode(folder) in line:
                return int(entry.name)
    return 0


def main() -> int:
    """The benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--copies", type=int, default=100 * 86_400)
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    build.build()
    scratch = Path(tempfile.mkdtemp(prefix="kvprobe-permanent-"))
    program, run = scratch / "copying", scratch / "run"
    link = [f"-L{build.LIB}", "-lkvprobe_hostrt", f"-Wl,-rpath,{build.LIB}"]
    subprocess.run([*build.compiler(), "-std=gnu11", "-O2", "-pthread", "-o", program, PROGRAM, *link], check=True)
    (scratch / "counts").write_bytes(bytes(4096))
    words = np.memmap(scratch / "counts", "<u8", "r+")
    env = {**os.environ, "KVHOST_CLOCK": "virtual"}
    kvprobe = [sys.executable, "-m", "kvprobe"]
    command = [*kvprobe, "run", "--detail", "totals", "--report", "none", "-o", run, "--", program, scratch / "counts"]
    started = subprocess.Popen([*command, str(given.threads)], env=env, stderr=subprocess.DEVNULL)
    while not words[COPIES]:
        time.sleep(0.1)
    metrics = subprocess.Popen(
        [*kvprobe, "metrics", run, "--port", "0", "--interval", "1", "--flight-recorder", scratch / "flights"],
        stderr=subprocess.DEVNULL,
    )
    ring = next(run.glob("*.kvp"))
    pids = {"program": int(ring.name.split("-")[0]), "observer": pid_with(b"observer", run), "metrics": metrics.pid}
    seen: list[tuple[int, dict[str, int], int]] = []
    began = time.monotonic()
    while words[COPIES] < given.copies and started.poll() is None:
        time.sleep(1)
        seen.append((int(words[COPIES]), {who: memory(pid) for who, pid in pids.items()}, folder_bytes(run)))
    seconds = time.monotonic() - began
    words[TODO] = 1
    while words[PAUSED] < given.threads and started.poll() is None:
        time.sleep(0.05)
    copying = [one for one in counts(run) if one.call == "cudaMemcpyAsync"]
    copies, moved = sum(one.sums.copies for one in copying), sum(one.sums.bytes for one in copying)
    own = int(words[COPIES]), int(words[BYTES])
    disk = on_disk(run)
    words[TODO] = 2
    started.wait()
    metrics.terminate()
    metrics.wait()
    late = [one for one in seen if one[0] >= given.copies / 10] or seen
    bounds = [("copies", own[0], own[0] >= given.copies), ("wrong bytes", int(words[WRONG]), not words[WRONG])]
    bounds.append(("copies by the metrics less the program's", copies - own[0], copies == own[0]))
    bounds.append(("bytes by the metrics less the program's", moved - own[1], moved == own[1]))
    for who in pids:
        sizes = [one[1][who] for one in late]
        bounds.append(
            (
                f"growth of {who}, bytes (now {sizes[-1]:,})",
                sizes[-1] - sizes[0],
                0 < sizes[-1] <= sizes[0] + GROWTH_BYTES,
            )
        )
    grown = late[-1][2] - late[0][2]
    bounds.append((f"growth of the run folder, bytes (now {late[-1][2]:,})", grown, grown <= FILES_BYTES))
    bounds.append(("of it on disk, bytes", disk, disk <= late[-1][2] + FILES_BYTES))
    bounds.append(("looks", len(seen), True))
    bounds.append(("seconds", round(seconds), True))
    for what, figure, kept in bounds:
        print(f"{'ok  ' if kept else 'MISS'} {what}: {figure:,}")
    return 0 if all(kept for _, _, kept in bounds) else 1


if __name__ == "__main__":
    sys.exit(main())
