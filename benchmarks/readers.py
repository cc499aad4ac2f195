"""Measures the readers: time, throughput and peak memory from file to occupancy, each in a process of its own.

    python benchmarks/readers.py [--launches 3000000] [--copies 1200000] [--keep DIR] [--json OUT] [RECORDING ...]

Besides the recordings that are named it generates one of the size of a large KV offload run (by default 1.2 million
copies and 3 million launches) as an SQLite export of Nsight Systems and as kvprobe's Parquet. The floor is the time to
read the file's bytes (unzipped, where it is gzip) and do nothing with them.
"""

from __future__ import annotations

import argparse
import json
import os
import sqlite3
import subprocess
import sys
import tempfile
import time
import zlib
from pathlib import Path

READ = """
import json, sys, time
begin = time.perf_counter()
from kvprobe.recordings import open_recording
from kvprobe.recordings.occupancy import occupancy
imported = time.perf_counter()
recording = open_recording([sys.argv[1]])
opened = time.perf_counter()
queues = occupancy(recording)
done = time.perf_counter()
print("ANSWER", json.dumps({
    "import_s": imported - begin, "read_s": opened - imported, "occupancy_s": done - opened,
    "rows": sum(table.rows for table in recording.tables.values()), "calls": recording.calls.rows,
    "verdict": queues.verdict, "lost_ms": float(queues.blocked_ns.sum()) / 1e6}))
"""


def generate(path: Path, copies: int, launches: int, seed: int = 5) -> None:
    """An export of one process with a compute stream and two copy streams, written as nsys lays it out."""
    import numpy as np  # not at the top: see measure

    rng = np.random.default_rng(seed)
    db = sqlite3.connect(path)
    db.execute("PRAGMA journal_mode=OFF")
    db.execute("PRAGMA synchronous=OFF")
    db.execute("CREATE TABLE META_DATA_EXPORT (name TEXT, value TEXT)")
    db.execute("INSERT INTO META_DATA_EXPORT VALUES ('EXPORT_SCHEMA_VERSION', '3.20.3')")
    db.execute("CREATE TABLE StringIds (id INTEGER, value TEXT)")
    names = ["cudaMemcpyAsync_v3020", "cudaLaunchKernel_v7000", *(f"void kernel<{i}>(float*)" for i in range(200))]
    db.executemany("INSERT INTO StringIds VALUES (?, ?)", list(enumerate(names)))
    db.execute(
        "CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INTEGER, end INTEGER, eventClass INTEGER, globalTid INTEGER,"
        " correlationId INTEGER, nameId INTEGER, returnValue INTEGER, callchainId INTEGER)"
    )
    shared = (
        "start INTEGER, end INTEGER, deviceId INTEGER, contextId INTEGER, streamId INTEGER, correlationId INTEGER, "
        "globalPid INTEGER"
    )
    db.execute(
        f"CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY ({shared}, bytes INTEGER, copyKind INTEGER, srcKind INTEGER, "
        "dstKind INTEGER, graphNodeId INTEGER, copyCount INTEGER)"
    )
    db.execute(
        f"CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL ({shared}, demangledName INTEGER, shortName INTEGER, "
        "graphNodeId INTEGER)"
    )
    pid, tid = 77 << 24, (77 << 24) + 77
    for what, number, first in (("copy", copies, 0), ("launch", launches, copies)):
        # Bursts of 4,000 submissions behind a fence of 2 ms; a copy entered with 1,021 outstanding returns 2 us after
        # the oldest is done. Launches are made at the pace at which kernels run, so their queue stays short.
        burst, cap = 4000, 1021
        bursts = -(-number // burst)
        period_ns = 20_000_000 if what == "copy" else 20_000_000 * copies // max(launches, 1)
        begin = (np.arange(bursts) * period_ns)[:, None]
        service = rng.integers(3000, 3500, (bursts, burst))
        cost = rng.integers(1000, 1400, (bursts, burst))
        if what == "copy":
            done = begin + 2_000_000 + np.cumsum(service, axis=1)
            end = begin + np.cumsum(cost + 200, axis=1)
            end[:, cap:] = np.maximum(end[:, cap:], done[:, :-cap] + 2000)
            end = np.maximum.accumulate(end, axis=1)
        else:
            end = begin + np.cumsum(cost + 500, axis=1)
            done = end + service // 4
            service = service // 4
        start = np.concatenate([end[:, :1] - cost[:, :1], np.maximum(end[:, :-1] + 200, end[:, 1:] - 10**9)], axis=1)
        start = np.maximum(start, np.where(end - start > 2 * cost, start, end - cost))
        start, end, done, service = (part.ravel()[:number] for part in (start, end, done, service))
        correlation = np.arange(first, first + number)
        stream = 13 + np.arange(number) // burst % 2 if what == "copy" else np.full(number, 7)
        name = np.full(number, 0 if what == "copy" else 1)
        zero = np.zeros(number, np.int64)
        db.executemany(
            "INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?,?,0,?,?,?,0,NULL)",
            zip(start.tolist(), end.tolist(), (zero + tid).tolist(), correlation.tolist(), name.tolist(), strict=True),
        )
        if what == "copy":
            kind = np.where(rng.random(number) < 0.65, 1, 2)
            db.executemany(
                "INSERT INTO CUPTI_ACTIVITY_KIND_MEMCPY VALUES (?,?,0,1,?,?,?,65536,?,1,2,NULL,1)",
                zip(
                    (done - service).tolist(),
                    done.tolist(),
                    stream.tolist(),
                    correlation.tolist(),
                    (zero + pid).tolist(),
                    kind.tolist(),
                    strict=True,
                ),
            )
        else:
            kernel = (2 + correlation % 200).tolist()
            db.executemany(
                "INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (?,?,0,1,?,?,?,?,?,NULL)",
                zip(
                    (done - service).tolist(),
                    done.tolist(),
                    stream.tolist(),
                    correlation.tolist(),
                    (zero + pid).tolist(),
                    kernel,
                    kernel,
                    strict=True,
                ),
            )
    db.commit()
    db.close()


def measure(path: Path) -> dict[str, object]:
    """One reading in a process of its own; its peak begins at the size of this one, so this one is kept small."""
    with tempfile.TemporaryFile() as out:
        begin = time.perf_counter()
        process = subprocess.Popen([sys.executable, "-c", READ, str(path)], stdout=out)
        _, status, usage = os.wait4(process.pid, 0)
        wall = time.perf_counter() - begin
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise SystemExit(f"reading {path} failed")
        out.seek(0)
        answer = json.loads(out.read().decode().split("ANSWER ")[1])
    return {
        "path": path.name,
        "bytes": size_of(path),
        "wall_s": wall,
        "cpu_s": usage.ru_utime + usage.ru_stime,
        "peak_mib": usage.ru_maxrss / 1024,
        "floor_s": floor(path),
        **answer,
    }


def files(path: Path) -> list[Path]:
    return sorted(p for p in path.iterdir() if p.is_file()) if path.is_dir() else [path]


def size_of(path: Path) -> int:
    return sum(p.stat().st_size for p in files(path))


def floor(path: Path) -> float:
    """Seconds to read (and unzip) the bytes."""
    begin = time.perf_counter()
    for part in files(path):
        unzip = zlib.decompressobj(31) if part.name.endswith(".gz") else None
        with part.open("rb") as file:
            while raw := file.read(1 << 20):
                if unzip is not None:
                    unzip.decompress(raw)
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recordings", nargs="*", type=Path)
    parser.add_argument("--copies", type=int, default=1_200_000)
    parser.add_argument("--launches", type=int, default=3_000_000)
    parser.add_argument("--keep", type=Path, help="folder for generated recordings (default: temporary)")
    parser.add_argument("--json", type=Path, help="write all figures there")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        paths = [path.resolve() for path in options.recordings]
        if options.copies + options.launches:
            export = folder / f"large_{options.copies}_{options.launches}.sqlite"
            if not export.exists():
                # In a process of its own: the kernel counts a parent's memory as the peak of what it starts.
                code = "import sys; sys.path.insert(0, sys.argv[1]); import readers; from pathlib import Path; "
                code += "readers.generate(Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))"
                subprocess.run(
                    [
                        sys.executable,
                        "-c",
                        code,
                        str(Path(__file__).parent),
                        str(export),
                        str(options.copies),
                        str(options.launches),
                    ],
                    check=True,
                )
            tables = export.with_suffix(".parquet")
            if not tables.exists():
                code = (
                    "import sys; from pathlib import Path; from kvprobe.recordings import open_recording, parquet; "
                    "parquet.write(open_recording([sys.argv[1]]), Path(sys.argv[2]))"
                )
                subprocess.run([sys.executable, "-c", code, str(export), str(tables)], check=True)
            paths += [export, tables]
        print(
            f"{'recording':45} {'MB':>7} {'rows':>9} {'floor s':>8} {'read s':>7} {'occ. s':>7} {'wall s':>7} "
            f"{'cpu s':>6} "
            f"{'peak MiB':>9}  verdict"
        )
        rows = []
        for path in paths:
            row = measure(path)
            rows.append(row)
            print(
                f"{path.name[:45]:45} {int(str(row['bytes'])) / 1e6:7.1f} {row['rows']:>9} {row['floor_s']:8.2f} "
                f"{row['read_s']:7.2f} {row['occupancy_s']:7.2f} {row['wall_s']:7.2f} {row['cpu_s']:6.2f} "
                f"{row['peak_mib']:9.0f}  {row['verdict']}, {row['lost_ms']:.1f} ms lost",
                flush=True,
            )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
