"""Mutants of recordings of every format: `python tests/recordings/fuzz.py [MUTANTS] [FORMAT...]`, as `make fuzz` does.

Each mutant is read, its queues are judged and its causes looked for, in a process with bounded memory. What is told:
anything but a recording or an error of one line, whatever takes too long, whatever takes more memory than allowed. A
mutant that fails is kept in `tests/recordings/corpus/`, which the tests read from then on.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

HERE = Path(__file__).parent
CORPUS = HERE / "corpus"
GPU_DATA = HERE.parents[0] / "gpu" / "data"
SECONDS = 20
RUN_FOLDER = "--run-folder"
MEMORY_BYTES = 200 << 20  # above what an untouched seed takes, or twenty times the input
ODD = [
    "null",
    "-1",
    "1e999",
    "9" * 30,
    '"x"',
    "[]",
    "{}",
    "[[]]",
    "true",
    '"\\ud800"',
    '"\\u001b[31m<b>"',
    "0.5",
    '{"a":1}',
    "1e300",
    '"' + "A" * 5000 + '"',
]


def mutate_bytes(data: bytes, rng: random.Random) -> bytes:
    """Bits flipped, pieces deleted, doubled, replaced, cut."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 3, 30))):
        if not out:
            break
        at, what = rng.randrange(len(out)), rng.randrange(7)
        size = rng.choice((1, 2, 4, 8, 64, 500))
        if what == 0:
            out[at] ^= 1 << rng.randrange(8)
        elif what == 1:
            out[at : at + size] = rng.randbytes(size)
        elif what == 2:
            del out[at : at + size]
        elif what == 3:
            out[at:at] = out[at : at + size]
        elif what == 4:
            out[at : at + 4] = b"\xff\xff\xff\x7f"
        elif what == 5:
            out[at : at + 8] = bytes(8)
        else:
            out[at : at + 8] = b"\xff" * 8
    return bytes(out[: rng.randrange(len(out))]) if out and rng.random() < 0.15 else bytes(out)


def mutate_json(data: bytes, rng: random.Random) -> bytes:
    """A value replaced by one of another kind, a key left out, in one line of the file."""
    if rng.random() < 0.3:
        return mutate_bytes(data, rng)
    lines = data.split(b"\n") if data.lstrip()[:1] == b"{" and b"\n{" in data else [data]
    at = rng.randrange(len(lines))
    try:
        value = json.loads(lines[at])
    except ValueError:
        return mutate_bytes(data, rng)
    places: list[tuple[dict | list, object]] = []

    def walk(node: object) -> None:
        for key, inner in node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ():
            places.append((node, key))
            walk(inner)

    walk(value)
    for _ in range(rng.choice((1, 1, 3))):
        if places:
            node, key = rng.choice(places)
            if isinstance(node, dict) and key in node and rng.random() < 0.15:
                del node[key]
            elif isinstance(node, list) or key in node:
                node[key] = f"@{rng.randrange(len(ODD))}@"
    text = json.dumps(value)
    for number, odd in enumerate(ODD):
        text = text.replace(f'"@{number}@"', odd)
    lines[at] = text.encode()
    return b"\n".join(lines)


def seeds(folder: Path) -> dict[str, list[Path]]:
    """A few small recordings of each format, made or copied into `folder`."""
    sys.path[:0] = [str(HERE)]
    from kineto_text import random_trace
    from queue_model import simulate

    from kvprobe.recordings import parquet

    found: dict[str, list[Path]] = {"kineto": [], "sqlite": [], "parquet": [], "run": [], "ring": []}
    for seed in range(6):
        random_trace(path := folder / f"trace{seed}.json", seed, 60)
        found["kineto"].append(path)
    for seed in GPU_DATA.glob("nsys_*.sqlite.gz"):
        (path := folder / seed.name.removesuffix(".gz")).write_bytes(gzip.decompress(seed.read_bytes()))
        found["sqlite"].append(path)
    recording, _ = simulate(calls=200)
    parquet.write(recording, folder / "parquet")
    found["parquet"].append(folder / "parquet")
    # in a process of its own, which has no ring file open yet
    subprocess.run([sys.executable, __file__, RUN_FOLDER, run := folder / "run"], check=True)
    found["run"].append(run)
    found["ring"] += [path for path in run.glob("*.kvp") if path.stat().st_size]
    return found


def make_run(folder: Path) -> None:
    """A run folder with every file that there is."""
    import ctypes as ct

    from kvprobe.native.library import Record, RingOptions, core
    from kvprobe.runfolder.folder import RunFolder

    folder.mkdir()
    native, pid = core(), os.getpid()
    start = native.kvp_now_ns()
    small = RingOptions(ring_capacity=256, slow_capacity=64, slot_count=16, sections_max=4)
    code = native.kvp_ring_open(os.fsencode(folder / f"{pid}-1.kvp"), b"interposer", ct.byref(small))
    assert not code, os.strerror(-code)
    for i in range(60):
        record = Record(
            start_ns=native.kvp_now_ns(),
            dur_ns=1000 + 60_000 * (i % 7 == 0),
            stream=16,
            src=4096 + i,
            dst=9,
            bytes=64,
            count=1,
            call=(1, 17, 64)[i % 3],
            direction=1,
        )
        native.kvp_ring_write(ct.byref(record), 1)
    native.kvp_ring_close()
    native.kvp_ring_release()
    end = native.kvp_now_ns()
    run = RunFolder(folder)
    run.write_run(
        {
            "command": ["python", "x.py"],
            "cwd": "/",
            "version": "1",
            "host": "h",
            "kernel": "k",
            "cpus": 2,
            "python": "3.11",
            "pid": pid,
            "realtime_ns": 10**18,
            "monotonic_ns": start,
            "options": {"report": ""},
            "environment": {"CUDA_X": "1"},
        }
    )
    run.write_end({"t_ns": end, "status": 3, "warnings": ["a warning"]})
    run.append_ended({"pid": pid, "t_ns": end, "status": -9, "command": "python x.py"})
    run.append_stacks(
        pid,
        {
            "t_ns": start,
            "pid": pid,
            "thread": pid,
            "call": "cudaMemcpyAsync",
            "stream": 16,
            "blocked_ns": 5,
            "how": "py-spy",
            "error": "",
            "threads": [{"thread": pid, "name": "t", "gil": True, "frames": ["f (x.py:1)"]}],
        },
    )
    run.write_queue(
        pid,
        {
            "start_ns": start,
            "end_ns": end,
            "depth": 1021,
            "channels": 4,
            "capacity": 4084,
            "baseline_ns": 900,
            "p99_ns": 2000,
            "how": "calibrated",
        },
    )
    checkin = {
        "pid": pid,
        "ppid": 1,
        "t_ns": start,
        "argv": ["python", "x.py"],
        "executable": "python",
        "prefix": "/",
        "python": "3.11.1",
        "preloaded": True,
        "ld_preload": "",
        "rank": {"RANK": "0"},
    }
    (folder / f"checkin-{pid}-1.json").write_text(json.dumps(checkin))
    transfer = {
        "adapter": "a",
        "server": "vllm",
        "id": 1,
        "direction": "load",
        "copies": 4,
        "bytes": 256,
        "stream": 1,
        "build_ns": 1,
        "submit_ns": 2,
        "queue_ns": 3,
        "copy_ns": 4,
        "poll_ns": 5,
        "thread": pid,
        "ok": True,
    }
    events = [
        {"kind": "process", "pid": pid},
        {"kind": "transfer", **transfer},
        {"kind": "transfer", **transfer, "one_in": 3, "begin_ns": start},
        {
            "kind": "decision",
            "adapter": "a",
            "what": "switch",
            "from": "x",
            "to": "y",
            "why": "z",
            "evidence": {"gain": 2.0},
        },
        {"kind": "call", "adapter": "a", "server": "s", "call": "f", "dur_ns": 5, "thread": pid, "cause": "c"},
        {"kind": "state", "adapter": "a", "distribution": "d", "version": "1", "state": "applied", "reason": ""},
    ]
    (folder / f"events-{pid}.jsonl").write_text("".join(json.dumps({"t_ns": end, **e}) + "\n" for e in events))
    (folder / "device.jsonl").write_text(json.dumps({"t_ns": end, "device": 0, "power_w": 70.5}) + "\n")


def mutant(form: str, seed: Path, folder: Path, rng: random.Random) -> Path:
    """One mutant of a seed, in an empty folder."""
    folder.mkdir()
    if seed.is_dir():
        shutil.copytree(seed, path := folder / "x")
        hurt = rng.choice(sorted(p for p in path.iterdir() if p.stat().st_size))
        text = hurt.suffix in (".json", ".jsonl")
        hurt.write_bytes((mutate_json if text else mutate_bytes)(hurt.read_bytes(), rng))
        return path
    path = folder / f"x{seed.suffix}"
    data = seed.read_bytes()
    path.write_bytes(mutate_json(data, rng) if form == "kineto" else mutate_bytes(data, rng))
    return path


def judge(path: Path) -> str:
    """Reads, judges and diagnoses; "" where all is well, else what was wrong."""
    from kvprobe.diagnosis import diagnose
    from kvprobe.errors import KvprobeError
    from kvprobe.recordings import open_recording
    from kvprobe.recordings.occupancy import occupancy
    from kvprobe.recordings.triage import quick_triage

    def read() -> None:
        recording = open_recording([path])
        diagnose(recording, occupancy(recording))

    for step in (read, lambda: quick_triage(path)):
        try:
            step()
        except KvprobeError as error:
            if "\n" in str(error) or len(str(error)) > 2000:
                return f"an error of more than one line: {str(error)[:300]}"
        except TimeoutError:
            return f"took more than {SECONDS} s"
        except Exception:
            return traceback.format_exc()
    return ""


def run(form: str, count: int, first: int = 0, keep: Callable[[Path, str], None] | None = None) -> Iterator[str]:
    """Reads `count` mutants of a format, numbered from `first`; yields what was wrong with each that failed."""

    def late(*_: object) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, late)
    with tempfile.TemporaryDirectory() as text:
        base = Path(text)
        (base / "seeds").mkdir()
        found = seeds(base / "seeds")[form]
        for seed in found:
            judge(seed)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        for number in range(first, first + count):
            rng = random.Random(f"{form} {number}")
            path = mutant(form, rng.choice(found), folder := base / str(number), rng)
            size = sum(p.stat().st_size for p in folder.rglob("*"))
            signal.alarm(SECONDS)
            try:
                wrong = judge(path)
            finally:
                signal.alarm(0)
            grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
            if not wrong and grown > max(MEMORY_BYTES, 20 * size):
                wrong = f"took {grown >> 20} MiB for {size} bytes"
                before += grown
            if wrong:
                if keep is not None:
                    keep(path, wrong)
                yield f"{form} {number}: {wrong}"
            shutil.rmtree(folder)


def _keep(path: Path, wrong: str) -> None:
    name = hashlib.sha256(wrong.encode()).hexdigest()[:12]
    target = CORPUS / f"{name}{path.suffix}"
    CORPUS.mkdir(exist_ok=True)
    if not target.exists() and sum(p.stat().st_size for p in path.parent.rglob("*")) < 100_000:
        (shutil.copytree if path.is_dir() else shutil.copy)(path, target)


def main(arguments: list[str]) -> int:
    """Reads mutants of each format; exit status 1 if one failed."""
    if arguments[:1] == [RUN_FOLDER]:
        make_run(Path(arguments[1]))
        return 0
    count = int(arguments[0]) if arguments else 2000
    failed = 0
    for form in arguments[1:] or ("kineto", "sqlite", "parquet", "run", "ring"):
        wrongs: dict[str, int] = {}
        for wrong in run(form, count, int(os.environ.get("FIRST", "0")), _keep):
            failed += 1
            wrongs[wrong.strip().splitlines()[-1] + " | " + "".join(wrong.splitlines()[-3:-2]).strip()] = (
                1 + wrongs.get(wrong, 0)
            )
        print(f"{form}: {count} mutants, {sum(wrongs.values())} failures", *wrongs, sep="\n  ", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
