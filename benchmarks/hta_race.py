"""Races kvprobe against HolisticTraceAnalysis 0.5.0 and traceinsight 0.6.1, from file to answer, on the same traces.

    python benchmarks/hta_race.py --venvs DIR [--events 1000000 4000000] [--repeat 3] [--json OUT] [TRACE ...]

Each run is a process of its own; wall time and peak memory are what the kernel reports of it. The answer is the time
lost to full launch queues: HTA's queue length series and blocked time (told the ceiling, which it does not learn),
kvprobe's triage (what `kvprobe triage` prints: verdict, time lost and ceiling of every stream), each used as a library.
Runs of the tools alternate. The floor is the time to unzip the file and do nothing.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import venv
import zlib
from pathlib import Path

TOOLS = {"hta-0.5.0": "HolisticTraceAnalysis==0.5.0", "traceinsight-0.6.1": "traceinsight==0.6.1"}
HTA = """
import sys, time, json, logging
logging.disable(logging.CRITICAL)
begin = time.perf_counter()
from hta.trace_analysis import TraceAnalysis
imported = time.perf_counter()
analysis = TraceAnalysis(trace_files={0: sys.argv[1]}, trace_dir="/")
series = analysis.get_queue_length_time_series(ranks=[0])
blocked = analysis.get_time_spent_blocked_on_full_queue(series, max_queue_length=int(sys.argv[2]))
done = time.perf_counter()
answer = blocked.to_dict("records") if blocked is not None else []
print("ANSWER", json.dumps({"import_s": imported - begin, "work_s": done - imported, "answer": answer}, default=str))
"""
KVPROBE = """
import sys, time, json
begin = time.perf_counter()
from kvprobe.recordings.quick_triage import certain, quick_triage
imported = time.perf_counter()
found = quick_triage(sys.argv[1])
if found is None or not certain(found):
    from kvprobe.diagnosis.whole_triage import whole_triage
    found = whole_triage(sys.argv[1])
done = time.perf_counter()
answer = {"verdict": found.verdict, "lost_ms": round(found.lost_ns / 1e6, 1),
          "ceilings": sorted({q.ceiling for q in found.queues if q.ceiling > 0}), "native": found.native}
print("ANSWER", json.dumps({"import_s": imported - begin, "work_s": done - imported, "answer": answer}))
"""


def generate(path: Path, events: int, streams: int = 8, cap: int = 1022, seed: int = 7) -> int:
    """A Kineto trace of `events` events, half of them calls; returns the time lost to full queues (ns).

    Each stream has a thread. A call costs 4 to 6 us and, entered with `cap` outstanding, waits for the oldest copy;
    copies take 15 to 25 us, one after the other, for 2,000 calls of each 3,000, then the thread pauses until all is
    done: full and empty queues in one file.
    """
    import numpy as np  # not at the top: see measure

    rng = np.random.default_rng(seed)
    per_stream = events // 2 // streams
    base_us = 1712195495000000
    lost = 0
    with gzip.open(path, "wt", compresslevel=6) as file:
        file.write(
            '{\n  "schemaVersion": 1,\n  "deviceProperties": [\n    {\n      "id": 0, "name": "synthetic"\n    }\n'
            '  ],\n  "distributedInfo": {"backend": "nccl", "rank": 0, "world_size": 1},\n  "traceEvents": [\n'
        )
        correlation = 0
        end_of_all = 0
        for stream in range(streams):
            cost = rng.integers(4000, 6000, per_stream).tolist()
            busy = rng.integers(15_000, 25_000, per_stream).tolist()
            now, free = 1_000_000, 0
            done: list[int] = []
            lines: list[str] = []
            for i in range(per_stream):
                if i % 3000 == 0 and done:
                    now = max(now, done[-1] + 1_000_000)
                start, wait = now, 0
                if len(done) >= cap and done[-cap] > start:
                    wait = done[-cap] + 3000 - start
                lost += wait
                now = start + cost[i] + wait
                begin = max(free, now + 1000)
                free = begin + busy[i]
                done.append(free)
                correlation += 1
                lines.append(
                    _event(
                        "cuda_runtime",
                        "cudaMemcpyAsync",
                        4242,
                        4242 + stream,
                        base_us,
                        start,
                        now - start,
                        f'"External id": {correlation}, "cbid": 41, "correlation": {correlation}',
                    )
                )
                lines.append(
                    _event(
                        "gpu_memcpy",
                        "Memcpy HtoD (Pinned -> Device)",
                        0,
                        7 + stream,
                        base_us,
                        begin,
                        busy[i],
                        f'"External id": {correlation}, "device": 0, "context": 1, "stream": {7 + stream}, '
                        f'"correlation": {correlation}, "bytes": 65536, "memory bandwidth (GB/s)": 3.2',
                    )
                )
                now += 500
                if len(lines) >= 8192:
                    file.write("".join(lines))
                    lines.clear()
            file.write("".join(lines))
            end_of_all = max(end_of_all, free)
        # HTA drops the last step of a trace: the second one is empty, so it drops nothing.
        file.write(
            _event("user_annotation", "ProfilerStep#1", 4242, 4242, base_us, 0, end_of_all + 1000, '"External id": 1')
        )
        file.write(
            _event(
                "user_annotation", "ProfilerStep#2", 4242, 4242, base_us, end_of_all + 2000, 1000, '"External id": 2'
            ).rstrip(",\n")
            + '\n  ],\n  "traceName": "synthetic.json"\n}\n'
        )
    return lost


def _event(category: str, name: str, pid: int, tid: int, base_us: int, start: int, dur: int, args: str) -> str:
    return (
        f'  {{\n    "ph": "X", "cat": "{category}", "name": "{name}", "pid": {pid}, "tid": {tid},\n'
        f'    "ts": {base_us + start // 1000}.{start % 1000:03d}, "dur": {dur // 1000}.{dur % 1000:03d},\n'
        f'    "args": {{\n      {args}\n    }}\n  }},\n'
    )


def environment(root: Path, tool: str) -> Path:
    """The interpreter of an environment that has `tool`, made if absent."""
    python = root / tool / "bin" / "python"
    if not python.exists():
        print(f"making {root / tool} (about 500 MB) ...", flush=True)
        venv.create(root / tool, with_pip=True)
        subprocess.run([python, "-m", "pip", "install", "-q", TOOLS[tool]], check=True)
    return python


def compiled(folder: str) -> dict[str, str]:
    """An environment in which kvprobe's modules are found compiled, as pip leaves those of the rivals."""
    surroundings = {**os.environ, "PYTHONPYCACHEPREFIX": folder}
    surroundings.pop("PYTHONDONTWRITEBYTECODE", None)
    warm = "import kvprobe.recordings.quick_triage, kvprobe.recordings.kineto_queues"
    subprocess.run([sys.executable, "-c", warm], check=True, env=surroundings)
    return surroundings


def measure(command: list[str], surroundings: dict[str, str] | None = None) -> dict[str, object]:
    """Wall time, CPU time, peak memory and answer of one process.

    The kernel counts what the starting process holds as the peak of what it starts, so this one is kept small.
    """
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        begin = time.perf_counter()
        process = subprocess.Popen(command, stdout=out, stderr=err, env=surroundings)
        _, status, usage = os.wait4(process.pid, 0)
        wall = time.perf_counter() - begin
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        err.seek(0)
        answer = [line for line in out.read().decode().splitlines() if line.startswith("ANSWER ")]
        if process.returncode or not answer:
            raise SystemExit(f"{command[0]} failed:\n{err.read().decode()[-2000:]}")
    return {
        "wall_s": wall,
        "cpu_s": usage.ru_utime + usage.ru_stime,
        "peak_mib": usage.ru_maxrss / 1024,
        **json.loads(answer[0][7:]),
    }


def floor(path: Path) -> tuple[float, int]:
    """Seconds to unzip the file, and its bytes unzipped."""
    begin = time.perf_counter()
    unzip, size = zlib.decompressobj(31), 0
    with path.open("rb") as file:
        while raw := file.read(1 << 18):
            size += len(unzip.decompress(raw))
    return time.perf_counter() - begin, size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="*", type=Path, help="Kineto traces (.json.gz)")
    parser.add_argument("--venvs", type=Path, required=True, help="folder of the rivals' environments, made if absent")
    parser.add_argument("--events", type=int, nargs="*", default=[1_000_000, 4_000_000], help="generated traces")
    parser.add_argument("--keep", type=Path, help="folder for generated traces (default: temporary)")
    parser.add_argument("--repeat", type=int, default=3, help="runs of each tool; large traces: one")
    parser.add_argument("--tools", nargs="*", default=list(TOOLS), choices=[*TOOLS, []])
    parser.add_argument("--json", type=Path, help="write all figures there")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        traces = [path.resolve() for path in options.traces]
        lost: dict[str, int] = {}
        for events in options.events:
            path = folder / f"synthetic_{events}.json.gz"
            truth = path.with_suffix(".lost_ns")
            if not path.exists() or not truth.exists():
                code = (
                    "import sys; sys.path.insert(0, sys.argv[1]); import hta_race; from pathlib import Path; "
                    "print(hta_race.generate(Path(sys.argv[2]), int(sys.argv[3])))"
                )
                made = subprocess.run(
                    [sys.executable, "-c", code, str(Path(__file__).parent), str(path), str(events)],
                    check=True,
                    capture_output=True,
                    text=True,
                )
                truth.write_text(made.stdout.strip())
            lost[path.name] = int(truth.read_text())
            traces.append(path.resolve())
        commands = {"kvprobe": [sys.executable, "-c", KVPROBE]}
        for tool in options.tools:
            commands[tool] = [str(environment(options.venvs, tool)), "-c", HTA]
        rows = []
        ours = compiled(str(Path(temporary) / "compiled"))
        for path in traces:
            runs: dict[str, list[dict[str, object]]] = {tool: [] for tool in commands}
            repeat = options.repeat if path.stat().st_size < 10_000_000 else 1
            for _ in range(repeat):
                for tool, command in commands.items():
                    surroundings = ours if tool == "kvprobe" else None
                    runs[tool].append(measure([*command, str(path), "1022"], surroundings))
            unzip_s, size = floor(path)
            rows.append(report(path, runs, unzip_s, size, lost.get(path.name)))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


def report(
    path: Path, runs: dict[str, list[dict[str, object]]], unzip_s: float, size: int, lost_ns: int | None
) -> dict[str, object]:
    """Prints one trace's table and returns its figures."""
    print(
        f"\n{path.name}: {path.stat().st_size / 1e6:.1f} MB, {size / 1e6:.0f} MB unzipped; "
        f"floor (unzip only) {unzip_s:.2f} s = {size / 1e6 / max(unzip_s, 1e-9):.0f} MB/s"
        + (f"; time lost by construction {lost_ns / 1e6:.1f} ms" if lost_ns is not None else "")
    )
    print(
        f"  {'tool':20} {'wall s':>8} {'work s':>8} {'cpu s':>8} {'peak MiB':>9} {'wall x':>7} {'work x':>7} "
        f"{'memory x':>9}  answer"
    )
    middle = {
        tool: {
            key: statistics.median(float(str(run[key])) for run in some)
            for key in ("wall_s", "work_s", "cpu_s", "peak_mib")
        }
        for tool, some in runs.items()
    }
    ours = middle["kvprobe"]
    for tool, m in middle.items():
        print(
            f"  {tool:20} {m['wall_s']:8.2f} {m['work_s']:8.2f} {m['cpu_s']:8.2f} {m['peak_mib']:9.0f} "
            f"{m['wall_s'] / ours['wall_s']:7.1f} {m['work_s'] / ours['work_s']:7.1f} "
            f"{m['peak_mib'] / ours['peak_mib']:9.2f}  {str(runs[tool][0]['answer'])[:150]}",
            flush=True,
        )
    return {
        "trace": path.name,
        "bytes": path.stat().st_size,
        "unzipped": size,
        "unzip_s": unzip_s,
        "lost_ns": lost_ns,
        "median": middle,
        "runs": runs,
    }


if __name__ == "__main__":
    main()
