"""On an NVIDIA GPU: what watching costs a copy, side by side, and whether kvprobe and Nsight Systems agree.

    python benchmarks/gpu_interposer.py OUT        (or benchmarks/gpu_interposer.sh, which builds everything first)

Counts: a C program's own count of its copies against kvprobe's: linked, through dlsym, cuGetProcAddress,
cudaGetDriverEntryPointByVersion, as batches. Cost: bare, kvprobe (LD_PRELOAD), a CUPTI callback, Nsight Systems, one
process each, by turns, seven times; the table shows the medians and what each adds to bare, as the difference of the
medians and as the median of the differences between neighbours in time. Rows that say where kvprobe's own goes: loaded
and switched off, totals only, run folder in memory. Agreement: one torch program
under `kvprobe run --nsys`: the number of copies of the program, of kvprobe and of Nsight Systems, time blocked in calls
of at least 20 us in both recordings, and the ranges of the domain `kvprobe` in the .nsys-rep. Writes
OUT/interposer.json.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LIBRARY = ROOT / "kvprobe" / "native" / "lib" / "libkvprobe_interpose.so"
SLOW_NS = 20_000


def find(*patterns: str) -> str | None:
    return next(
        (path for pattern in patterns for path in sorted(map(str, Path("/").glob(pattern)), reverse=True)), None
    )


NSYS = shutil.which("nsys") or find(
    "opt/nvidia/nsight-systems*/*/bin/nsys",
    "usr/local/cuda*/bin/nsys",
    "opt/nvidia/nsight-compute*/*/host/target-linux-x64/nsys",
)
IMPORTER = find(
    "opt/nvidia/nsight-systems*/*/host-linux-*/QdstrmImporter",
    "opt/nvidia/nsight-compute*/*/host/linux-desktop-*/QdstrmImporter",
)


def plain() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if not k.startswith("KVPROBE_") and k != "LD_PRELOAD"}


def cost(out: Path, program: Path, rounds: int = 7) -> dict[str, Any]:
    seen: dict[str, list[float]] = {}
    run = Path(tempfile.mkdtemp(prefix="kvprobe-cost-", dir=out))
    memory = Path(tempfile.mkdtemp(prefix="kvprobe-cost-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else out))
    for turn in range(rounds):
        watched = {**plain(), "KVPROBE_RUN": str(run), "LD_PRELOAD": str(LIBRARY)}
        ways: dict[str, tuple[list[str], dict[str, str]]] = {
            "bare": ([str(program)], plain()),
            "kvprobe": ([str(program)], watched),
            "kvprobe, off": ([str(program)], {**watched, "KVPROBE": "off"}),
            "kvprobe, totals only": ([str(program)], {**watched, "KVPROBE_DETAIL": "totals"}),
            "kvprobe, folder in memory": ([str(program)], {**watched, "KVPROBE_RUN": str(memory)}),
            "CUPTI callback": ([str(program), "cupti"], plain()),
        }
        if NSYS:
            report = f"{run}/nsys{turn}"
            nsys = [NSYS, "profile", "-t", "cuda,nvtx", "--sample=none", "--cpuctxsw=none", "-o", report]
            ways["Nsight Systems"] = ([*nsys, str(program)], plain())
            ways["kvprobe + Nsight Systems"] = ([*nsys[:-1], report + "k", str(program)], watched)
        for name, (command, env) in ways.items():
            done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
            line = next((line for line in done.stdout.splitlines() if line.startswith("{")), None)
            if line is None:
                print(f"{name}: no result ({done.returncode}): {done.stderr[-300:]}", file=sys.stderr)
                continue
            seen.setdefault(name, []).append(json.loads(line)["median_ns"])
    from kvprobe.probe.ring import read_ring

    rings = [read_ring(path) for folder in (run, memory) for path in folder.glob("*.kvp")]
    counts = {ring.calls()["cudaMemcpyAsync"][0] for ring in rings}
    clocks = {ring.clock for ring in rings}
    bare = statistics.median(seen["bare"])
    rows = {
        name: {
            "ns": statistics.median(values),
            "added_ns": statistics.median(values) - bare,
            "paired_ns": statistics.median([b - a for a, b in zip(seen["bare"], values, strict=False)]),
            "ratio": statistics.median(values) / bare,
            "runs": values,
        }
        for name, values in seen.items()
    }
    print(f"\n{'one 4 KiB cudaMemcpyAsync':<28}{'ns':>9}{'added':>9}{'paired':>9}{'ratio':>8}")
    for name, row in rows.items():
        print(f"{name:<28}{row['ns']:>9.1f}{row['added_ns']:>9.1f}{row['paired_ns']:>9.1f}{row['ratio']:>8.2f}")
    print(f"kvprobe's clock: {', '.join(sorted(clocks))}; this kernel's: {clocksource()}")
    print(f"calls counted by kvprobe, each run: {sorted(counts)} (the program makes 102500)")
    shutil.rmtree(run, ignore_errors=True)
    shutil.rmtree(memory, ignore_errors=True)
    return {"cost": rows, "counted": sorted(counts), "clock": sorted(clocks), "clocksource": clocksource()}


def clocksource() -> str:
    try:
        return Path("/sys/devices/system/clocksource/clocksource0/current_clocksource").read_text().strip()
    except OSError:
        return "unknown"


def counts(out: Path, program: Path, runtime: str) -> dict[str, Any]:
    """A C program's own count against the recording's, by every way to reach a copy: calls, copies, bytes."""
    from kvprobe.probe.ring import read_ring

    # what the program calls its calls -> (call numbers, directions); cuMemcpyAsync's is found out from its addresses
    meaning = {
        "H2D": ((1, 5), (1,)),
        "D2H": ((1, 6), (2,)),
        "D2D": ((1, 7), (3,)),
        "unknown": ((4,), (0, 1)),
        "batch": ((3,), (0, 1)),
        "sync": ((10,), (1,)),
        "wait": ((17,), (0,)),
    }
    result: dict[str, Any] = {}
    for via in ("link", "dlsym", "driver", "entry", "batch", "sync", "mixed"):
        run = Path(tempfile.mkdtemp(prefix=f"counts-{via}-", dir=out))
        env = {**plain(), "KVPROBE_RUN": str(run), "LD_PRELOAD": str(LIBRARY), "RUNTIME": runtime}
        done = subprocess.run([program, via, "20000", "4", "1"], env=env, capture_output=True, text=True, check=False)
        own = {line.split()[0]: [int(x) for x in line.split()[1:]] for line in done.stdout.splitlines()}
        found: dict[str, list[int]] = {}
        memory: dict[int, int] = {}
        for slot in (slot for path in run.glob("*.kvp") for slot in read_ring(path).slots()):
            for name, (numbers, directions) in meaning.items():
                if int(slot["call"]) in numbers and int(slot["direction"]) & 15 in directions and name in own:
                    row = found.setdefault(name, [0, 0, 0])
                    for place, column in enumerate(("count", "copies", "bytes")):
                        row[place] += int(slot[column])
                    kind = int(slot["direction"]) >> 4
                    memory[kind] = memory.get(kind, 0) + int(slot["count"])
        result[via] = {
            "equal": own == found and bool(own),
            "program": own,
            "kvprobe": found,
            "memory": memory,
            "rc": done.returncode,
            "stderr": done.stderr[-300:],
        }
        print(
            f"{via:<8}{'equal' if result[via]['equal'] else 'DIFFERENT'} {own} {found if own != found else ''}"
            f" host memory kinds {memory} {done.stderr.strip()[-200:]}"
        )
        shutil.rmtree(run, ignore_errors=True)
    return result


def recorded(folder: Path) -> dict[str, Any]:
    """What kvprobe recorded: copies by exact totals, blocked time by the slow totals."""
    from kvprobe.probe.ring import CALLS, read_ring

    result = {"copies": 0, "bytes": 0, "H2D": 0, "D2H": 0, "blocked_ms": 0.0, "memory": set()}
    for path in folder.glob("*.kvp"):
        for slot in read_ring(path).slots():
            if CALLS[int(slot["call"])][1] != "cudaMemcpyAsync":
                continue
            result["copies"] += int(slot["count"])
            result["bytes"] += int(slot["bytes"])
            for name, direction in (("H2D", 1), ("D2H", 2)):
                if int(slot["direction"]) & 15 == direction:
                    result[name] += int(slot["count"])
            result["blocked_ms"] += int(slot["slow_ns"]) / 1e6
            result["memory"].add(int(slot["direction"]) >> 4)
    result["memory"] = sorted(result["memory"])
    return result


def of_nsys(folder: Path) -> dict[str, Any]:
    """The same of the Nsight Systems report."""
    assert NSYS is not None
    if not (folder / "nsys.nsys-rep").exists() and IMPORTER and (folder / "nsys.qdstrm").exists():
        subprocess.run([IMPORTER, "-i", folder / "nsys.qdstrm", "-o", folder / "nsys.nsys-rep"], check=True)
    subprocess.run(
        [
            NSYS,
            "export",
            "-t",
            "sqlite",
            "--force-overwrite=true",
            "-o",
            folder / "nsys.sqlite",
            folder / "nsys.nsys-rep",
        ],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    db = sqlite3.connect(folder / "nsys.sqlite")
    rows = db.execute(
        "select end - start from CUPTI_ACTIVITY_KIND_RUNTIME r join StringIds s on s.id = r.nameId "
        "where s.value like 'cudaMemcpyAsync%'"
    ).fetchall()
    durations = [row[0] for row in rows]
    ranges = db.execute(
        "select count(*) from NVTX_EVENTS e where e.domainId in (select d.domainId from NVTX_EVENTS d "
        "where d.eventType = 75 and d.text = 'kvprobe') and e.eventType = 59"
    ).fetchone()[0]
    return {
        "copies": len(durations),
        "blocked_ms": sum(d for d in durations if d >= SLOW_NS) / 1e6,
        "kvprobe_ranges": ranges,
    }


def agreement(out: Path) -> dict[str, Any]:
    folder = out / "run"
    shutil.rmtree(folder, ignore_errors=True)
    command = [
        sys.executable,
        "-m",
        "kvprobe",
        "run",
        "-o",
        str(folder),
        *(["--nsys"] if NSYS else []),
        "--",
        sys.executable,
        str(ROOT / "benchmarks" / "gpu_torch_copies.py"),
    ]
    done = subprocess.run(
        command,
        env={**plain(), "PYTHONPATH": os.environ.get("PYTHONPATH", "") + f":{ROOT}"},
        capture_output=True,
        text=True,
        check=False,
    )
    line = next((line for line in done.stdout.splitlines() if line.startswith("{")), None)
    if line is None:
        return {"error": (done.stdout + done.stderr)[-2000:], "rc": done.returncode}
    for _ in range(600):  # the observer writes the report beside us
        if (folder / "end.json").exists() and "report" in (folder / "observer.log").read_text():
            break
        time.sleep(0.1)
    result: dict[str, Any] = {
        "program": json.loads(line),
        "kvprobe": recorded(folder),
        "end": json.loads((folder / "end.json").read_text()),
        "observer": (folder / "observer.log").read_text()[-1000:],
    }
    if NSYS:
        try:
            result["nsys"] = of_nsys(folder)
        except (subprocess.CalledProcessError, sqlite3.Error, OSError) as error:
            result["nsys"] = {"error": repr(error), "output": done.stderr[-1000:]}
    print(f"\n{'torch under kvprobe run --nsys':<34}{'copies':>9}{'blocked ms':>12}{'ranges':>9}")
    for name in ("program", "kvprobe", "nsys"):
        row = result.get(name, {})
        ranges = row.get("kvprobe_ranges", "")
        print(f"{name:<34}{row.get('copies', ''):>9}{row.get('blocked_ms', 0):>12.1f}{ranges:>9}")
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", nargs="?", default="gpu-interposer", metavar="OUT", type=Path)
    out: Path = parser.parse_args().out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {"nsys": NSYS}
    runtime = os.environ.get("RUNTIME", "libcudart.so")
    for name, measure in (
        ("counts", lambda: counts(out, ROOT / "build" / "copies_gpu", runtime)),
        ("cost", lambda: cost(out, ROOT / "build" / "gpu_copies")),
        ("agreement", lambda: agreement(out)),
    ):
        try:
            result[name] = measure()
        except Exception as error:  # each part is worth having alone on a machine that is lent for minutes
            result[name] = {"error": repr(error)}
            print(f"{name}: {error!r}", file=sys.stderr)
    (out / "interposer.json").write_text(json.dumps(result, indent=1, default=str))
    for junk in [*out.glob("run/nsys.qdstrm"), *out.glob("run/nsys.nsys-rep")]:
        if junk.stat().st_size > 20 << 20:
            junk.unlink()
    print(f"\n{out / 'interposer.json'}")


if __name__ == "__main__":
    main()
