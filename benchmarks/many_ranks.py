"""A thousand generated ranks of 100,000 calls each, reduced over a local Ray cluster to one report.

One rank fills its launch queue, one comes last to every collective. Files of the other ranks are links to a few
generated ones, each with a rank of its own. While it runs a worker is killed. Then the ranks' summaries are merged in
several orders and as a tree.

    python benchmarks/many_ranks.py [--ranks 1000] [--calls 100000] [--keep FOLDER] [--ray ADDRESS | --no-ray]

Prints one line a figure with its bound; exit code 1 when one is missed.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from kvprobe.recordings import parquet
from kvprobe.recordings.links import link
from kvprobe.recordings.model import CallKind, Direction, Engine, Memory, Recording, Source, Table
from kvprobe.recordings.summary import Summary

PEAK_BYTES = 500e6
ALIKE = 8  # recordings that most ranks are links to
DEPTH = 1021


def recording(calls: int, seed: int, *, fills: bool, late: bool) -> Recording:
    """One rank: copies on one stream, a collective for each hundred of them on another."""
    rng = np.random.default_rng(seed)
    copy_ns = (20_000 * (1 + 0.1 * rng.random(calls))).astype(np.int64)
    cost = (1000 * (1 + 0.1 * rng.random(calls))).astype(np.int64)
    think = np.zeros(calls, np.int64) if fills else (25_000 * (1 + 0.1 * rng.random(calls))).astype(np.int64)
    start, end = np.zeros(calls, np.int64), np.zeros(calls, np.int64)
    done = np.zeros(calls, np.int64)
    now = free = 1_000_000
    for i in range(calls):
        start[i] = now
        oldest = int(done[i - DEPTH]) if i >= DEPTH else 0
        now = max(now, oldest + 3000 if oldest > now else now) + int(cost[i])
        end[i] = now
        free = max(free, now) + int(copy_ns[i])
        done[i] = free
        now += int(think[i])
    at = np.arange(0, calls, 100)
    kernel_ns = (np.where(late, 50_000, 400_000) * (1 + 0.1 * rng.random(len(at)))).astype(np.int64)
    n, m = calls, len(at)
    tables = {
        "calls": Table(
            "calls",
            {
                "start_ns": start,
                "end_ns": end,
                "process": np.zeros(n, int),
                "thread": np.full(n, 100),
                "name": np.ones(n, int),
                "kind": np.full(n, CallKind.COPY),
                "correlation": np.arange(n),
                "stream": np.zeros(n, int),
                "count": np.ones(n, int),
            },
        ),
        "executions": Table(
            "executions",
            {
                "start_ns": np.concatenate([done - copy_ns, done[at]]),
                "end_ns": np.concatenate([done, done[at] + kernel_ns]),
                "process": np.zeros(n + m, int),
                "stream": np.repeat([0, 1], [n, m]),
                "engine": np.repeat([Engine.COPY, Engine.KERNEL], [n, m]),
                "direction": np.repeat([Direction.H2D, 0], [n, m]),
                "memory": np.repeat([Memory.PINNED, 0], [n, m]),
                "bytes": np.repeat([262_144, 0], [n, m]),
                "count": np.ones(n + m, int),
                "correlation": np.concatenate([np.arange(n), np.full(m, -1)]),
                "name": np.repeat([0, 2], [n, m]),
            },
        ),
        "streams": Table("streams", {"process": [0, 0], "handle": [7, 8]}),
        "processes": Table("processes", {"pid": [1], "rank": [0], "start_ns": [0], "end_ns": [int(max(now, free))]}),
    }
    made = Recording([Source("generated", "generated")], tables, ["", "cudaMemcpyAsync", "ncclDevKernel_AllReduce_Sum"])
    link(made)
    return made


def generate(folder: Path, ranks: int, calls: int) -> None:
    """Folders rank-0 to rank-N."""
    odd = {ranks // 8: {"fills": True, "late": False}, ranks // 2: {"fills": False, "late": True}}
    models: dict[int, Table] = {}
    for rank in range(ranks):
        target, model = folder / f"rank-{rank}", rank if rank in odd else rank % ALIKE
        if model == rank:
            made = recording(calls, rank, **odd.get(rank, {"fills": False, "late": False}))
            models[rank] = made.processes
            parquet.write(made, target)
        else:
            shutil.copytree(folder / f"rank-{model}", target, copy_function=os.link)
        columns = {**models[model].columns, "rank": np.array([rank]), "pid": np.array([1000 + rank])}
        with tempfile.TemporaryDirectory() as scratch:
            one = Recording([Source("generated", "generated")], {"processes": Table("processes", columns)}, [""])
            parquet.write(one, Path(scratch) / "one")
            (target / "processes.parquet").unlink()
            shutil.copy(Path(scratch) / "one" / "processes.parquet", target)


def reduce_with_a_kill(folder: Path, output: Path, options: list[str], name: bytes) -> tuple[float, int, str, int]:
    """Seconds, peak bytes of the merging process, what it printed, workers killed."""
    script = (
        "import resource, sys; from kvprobe.cli import main; code = main(sys.argv[1:]); "
        "print('peak', resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, file=sys.stderr); sys.exit(code)"
    )
    began = time.monotonic()
    run = [sys.executable, "-c", script, "reduce", str(folder), "-o", str(output), *options]
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(run, stdout=subprocess.PIPE, stderr=said, text=True)
        killed = 0
        while process.poll() is None and not killed:
            time.sleep(0.5)
            for worker in workers(name, process.pid if given_here(options) else 1):
                os.kill(worker, signal.SIGKILL)
                killed += 1
                break
        out = process.communicate()[0]
        said.seek(0)
        error = said.read()
    peak = next((int(line.split()[1]) for line in error.splitlines() if line.startswith("peak ")), 0)
    return time.monotonic() - began, peak, out + error, killed


def given_here(options: list[str]) -> bool:
    """Whether workers descend from the process that is started, and not from a cluster that runs already."""
    return "--ray" not in options or "local" in options


def workers(name: bytes, parent: int) -> list[int]:
    """Processes that descend from `parent` and have `name` in their command line."""
    above, found = {}, []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                above[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                if name in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
            except (OSError, IndexError):
                continue

    def descends(pid: int) -> bool:
        while pid > 1:
            pid = above.get(pid, 0)
            if pid == parent:
                return True
        return False

    return [pid for pid in found if descends(pid)]


def main() -> int:
    """The benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1000)
    parser.add_argument("--calls", type=int, default=100_000)
    parser.add_argument("--keep", type=Path, help="where the ranks are generated, or lie already")
    parser.add_argument("--ray", default="local", metavar="ADDRESS", help="a cluster that runs already: auto")
    parser.add_argument("--no-ray", action="store_true", help="this machine's cores instead")
    given = parser.parse_args()
    scratch = tempfile.TemporaryDirectory(prefix="kvprobe-ranks-")
    folder = given.keep or Path(scratch.name) / "ranks"
    if not (folder / f"rank-{given.ranks - 1}" / "processes.parquet").exists():
        began = time.monotonic()
        folder.mkdir(parents=True, exist_ok=True)
        generate(folder, given.ranks, given.calls)
        print(
            f"generated {given.ranks:,} ranks of {given.calls:,} calls in {time.monotonic() - began:.0f} s", flush=True
        )
    whole = Path(scratch.name) / "all.kvsum"
    options, name = ([], b"spawn_main") if given.no_ray else (["--ray", given.ray], b"ray::_reduce_named")
    seconds, peak, said, killed = reduce_with_a_kill(folder, whole, options, name)
    print(said, flush=True)
    total = Summary.from_bytes(whole.read_bytes())
    parts = split(total)
    prints = set()
    for order in range(4):
        random.Random(order).shuffle(parts)
        merged = Summary(keep=total.keep)
        for part in parts:
            merged.absorb(part)
        prints.add(hashlib.sha256(merged.to_bytes()).hexdigest())
    tree = parts
    while len(tree) > 1:
        tree = [a.merge(b) for a, b in zip(tree[::2], [*tree[1::2], Summary(keep=total.keep)], strict=False)]
    prints.add(hashlib.sha256(tree[0].to_bytes()).hexdigest())
    prints.add(hashlib.sha256(whole.read_bytes()).hexdigest())
    bounds = [
        ("ranks in the report", len(total.ranks), len(total.ranks) == given.ranks and not total.failed),
        ("calls in the report", sum(one.count for one in total.calls.values()), True),
        ("workers killed", killed, killed > 0),
        ("peak of the merging process, MB (at most 500)", round(peak / 1e6), 0 < peak < PEAK_BYTES),
        ("different bytes among 4 orders, a tree and the cluster (1)", len(prints), len(prints) == 1),
        ("summary, MB", round(whole.stat().st_size / 1e6, 1), True),
        ("seconds", round(seconds), True),
    ]
    for what, figure, kept in bounds:
        print(f"{'ok  ' if kept else 'MISS'} {what}: {figure:,}")
    return 0 if all(kept for _, _, kept in bounds) else 1


def split(total: Summary) -> list[Summary]:
    """A summary for each rank of one."""
    parts = {rank: Summary(0, ranks={rank: one}, keep=total.keep) for rank, one in total.ranks.items()}
    for table in ("calls", "executions", "queues"):
        for key, value in getattr(total, table).items():
            getattr(parts[key[0]], table)[key] = value
    for one in total.top:
        parts[one.rank].top.append(one)
    first = next(iter(parts.values()))
    first.inputs, first.notes, first.failed = total.inputs, total.notes, total.failed
    return list(parts.values())


if __name__ == "__main__":
    sys.exit(main())
