"""Small recordings of every format, as files in memory: what the fuzzer's mutants descend from."""

from __future__ import annotations

import functools
import gzip
import io
import json
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent
GPU_DATA = HERE.parents[0] / "gpu" / "data"
ROWS = 30  # of each table: as many run through the same code as thousands do

Files = dict[str, bytes]  # by name within an empty folder


def files_of(path: Path, inside: str = "") -> Files:
    """A file, or the files of a folder under the folder's name `inside`."""
    if path.is_file():
        return {path.name: path.read_bytes()}
    return {f"{inside}/{p.relative_to(path)}": p.read_bytes() for p in sorted(path.rglob("*")) if p.is_file()}


def kineto(folder: Path) -> Iterator[bytes]:
    """Random traces, and the first events of each kind of real ones."""
    from kineto_text import random_trace

    for seed in range(8):
        yield random_trace(folder / "t.json", seed, 12).read_bytes()
    for path in sorted(GPU_DATA.glob("kineto_*.json.gz")):
        document = json.loads(gzip.decompress(path.read_bytes()))
        seen: dict[object, int] = {}
        events = []
        for event in document["traceEvents"]:
            kind = event.get("cat")
            seen[kind] = seen.get(kind, 0) + 1
            if seen[kind] <= (8 if kind != "ac2g" else 1):
                events.append(event)
        document["traceEvents"] = events
        document["distributedInfo"] = {"rank": 1, "world_size": 2}
        yield json.dumps(document).encode()


def sqlite_exports() -> Iterator[bytes]:
    """Exports of Nsight Systems with a few rows of each table, in pages so small that the trees are deep."""
    for path, page in zip(sorted(GPU_DATA.glob("nsys_*.sqlite.gz")), (512, 1024, 512, 4096), strict=False):
        db = sqlite3.connect(":memory:")
        db.deserialize(gzip.decompress(path.read_bytes()))
        tables = dict(db.execute("SELECT name, sql FROM sqlite_master WHERE type = 'table'").fetchall())
        small = sqlite3.connect(":memory:")
        small.execute(f"PRAGMA page_size={page}")
        for name, sql in tables.items():
            if name.startswith("ENUM_") and name not in ("ENUM_CUDA_MEMCPY_OPER", "ENUM_CUPTI_OVERHEAD_TYPE"):
                continue
            lines = [line.split("--")[0].rstrip() for line in sql.splitlines()]
            small.execute("\n".join(lines))
            rows = db.execute(f'SELECT * FROM "{name}" LIMIT {ROWS * 4 if name == "StringIds" else ROWS}').fetchall()
            if rows:
                small.executemany(f'INSERT INTO "{name}" VALUES ({", ".join("?" * len(rows[0]))})', rows)
        small.execute("CREATE TABLE IF NOT EXISTS ThreadNames (nameId INTEGER, globalTid INTEGER)")
        small.execute("INSERT INTO ThreadNames VALUES (1, 281474976710656)")
        small.commit()
        yield small.serialize()


def run_folder(folder: Path) -> Files:
    """A run folder with every file that there is; made by a process of its own, which has no ring file open yet."""
    subprocess.run([sys.executable, HERE / "fuzz_run_folder.py", folder], check=True)
    return files_of(folder, "x")


def joined(run: Files) -> Files:
    """Two run folders of two machines, which are read as one recording."""
    other = {}
    for name, data in run.items():
        if name.endswith("/run.json"):
            data = json.dumps({**json.loads(data), "host": "another", "realtime_ns": 10**18 + 5}).encode()
        other["y" + name[1:]] = data
    return {**run, **other}


def parquet_exports(folder: Path, recordings: list) -> Iterator[Files]:
    """kvprobe's own exports, each whole and table by table."""
    from kvprobe.recordings import parquet

    for i, recording in enumerate(recordings):
        parquet.write(recording, folder / f"export{i}")
        whole = files_of(folder / f"export{i}", "x")
        yield whole
        for name in whole:
            if not name.endswith(".json"):
                kept = {"x/kvprobe.json", "x/processes.parquet", "x/streams.parquet", name}
                yield {one: data for one, data in whole.items() if one in kept}


def arrow_exports(exports: list[bytes]) -> Iterator[Files]:
    """The tables of SQLite exports as Nsight Systems writes them as Parquet and as Arrow."""
    import pyarrow as pa
    import pyarrow.parquet

    for i, export in enumerate(exports):
        db = sqlite3.connect(":memory:")
        db.deserialize(export)
        out: Files = {}
        for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall():
            if name.startswith(("ENUM_", "ANALYSIS")):
                continue
            cursor = db.execute(f'SELECT * FROM "{name}" LIMIT {ROWS}')
            columns = [column[0] for column in cursor.description]
            rows = cursor.fetchall()
            table = pa.table({column: [row[k] for row in rows] for k, column in enumerate(columns)})
            sink = io.BytesIO()
            if i % 2:
                pyarrow.parquet.write_table(table, sink)
            else:
                with pa.ipc.new_file(sink, table.schema) as writer:
                    writer.write_table(table)
            out[f"x/{name}.{'parquet' if i % 2 else 'arrow'}"] = sink.getvalue()
        calls = "CUPTI_ACTIVITY_KIND_RUNTIME"
        for name in out:  # the table of calls, the texts, and one more
            kept = [one for one in out if one.split("/")[1].split(".")[0] in (calls, "StringIds") or one == name]
            yield {one: out[one] for one in kept}


@functools.cache
def seeds() -> dict[str, list[Files]]:
    """A few small recordings of each format."""
    from fuzz import own_seeds

    brought = {form: [files_of(path) for path in paths] for form, paths in own_seeds().items()}
    with tempfile.TemporaryDirectory() as folder:
        return {**brought, **_seeds(Path(folder))}


def _seeds(folder: Path) -> dict[str, list[Files]]:
    sys.path[:0] = [str(HERE)]
    from queue_model import simulate

    from kvprobe.recordings import open_recording
    from kvprobe.recordings.reduce import summarize
    from kvprobe.recordings.summary import Summary

    traces, exports = list(kineto(folder)), list(sqlite_exports())
    run = run_folder(folder / "x")
    recordings = [simulate(calls=ROWS, streams=2)[0], open_recording([folder / "x"])]
    summaries = [summarize(recording, "n") for recording in recordings]
    several = Summary(keep=3, failed={"a.json": "it is not JSON"}).merge(summaries[0]).merge(summaries[1])
    events = [line.encode() for line in traces[0].decode().splitlines()]
    (rank0, rank1), other = traces[:2], b"\n".join(events)
    return {
        "kineto": [{"x.json": data} for data in traces],
        "kineto-gz": [{"x.json.gz": data} for data in traces],
        "sqlite": [{"x.sqlite": data} for data in exports],
        "sqlite-gz": [{"x.sqlite.gz": data} for data in exports],
        "nsys-rep": [{"x.nsys-rep": data} for data in exports],
        "parquet": list(parquet_exports(folder, recordings)),
        "arrow": list(arrow_exports(exports)),
        "run": [
            run,
            {name: data for name, data in run.items() if not name.endswith("run.json")},
            _two_files(run),
            _packed(folder / "x", run),
        ],
        "ring": [{"x.kvp": data} for name, data in run.items() if name.endswith(".kvp")],
        "summary": [{"x.kvsum": one.to_bytes()} for one in (*summaries, several)],
        "several": [
            joined(run),
            {"rank0.json": rank0, "rank1.json": rank1},
            {"t.json": other, "x.sqlite": exports[0]},
            {**run, "t.json": traces[2]},
        ],
    }


def _two_files(run: Files) -> Files:
    """A process that has replaced itself by another program: a second ring file under the same pid."""
    name = next(name for name in run if name.endswith("-1.kvp"))
    return {**run, name.replace("-1.kvp", "-2.kvp"): run[name]}


def _packed(folder: Path, run: Files) -> Files:
    """A run whose short processes share a file."""
    from kvprobe.runfolder import packed

    packed.add(folder / packed.NAME, sorted(folder.glob("*.kvp")))
    kept = {name: data for name, data in run.items() if not name.endswith(".kvp")}
    return {**kept, f"x/{packed.NAME}": (folder / packed.NAME).read_bytes()}
