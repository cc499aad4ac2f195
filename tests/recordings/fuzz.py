"""Mutants of recordings of every format: `python tests/recordings/fuzz.py [MUTANTS] [FORMAT...]`, as `make fuzz` does.

Each mutant is read; of one in `JUDGED` the queues are judged and the causes looked for, of one in `SHOWN` the page is
made, one in `DECODED` is read without the native scanner, one in `MEANT` is a sound file whose contents cannot be true.
What is told: anything but a recording or an error of one line, a warning of numpy's, whatever takes too long or more
memory than allowed, a crash. A mutant that fails is kept in `tests/recordings/corpus/`, which the tests read from then
on.

A worker reads thousands of mutants before another takes its place, so that starting and importing cost nothing; what
was read before is not read again; and a mutant whose reading ended as none before becomes a seed of its batch, which
leads deeper. Of the same seeds a number makes the same mutant.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import hashlib
import json
import mmap
import os
import random
import re
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).parent
CORPUS = HERE / "corpus"
SECONDS = 20
MEMORY_BYTES = 200 << 20  # what reading one may take, or twenty times the input
ADDRESS_BYTES = 2 << 30  # beyond it a worker gets no more: asking for so much at once is a failure, too
JUDGED, SHOWN, DECODED = 20, 500, 50
MEANT = 16  # one in so many is sound and tells of what cannot be; its causes are looked for, too
BATCH = 10_000
SEEDS_GROWN = 300  # mutants that a batch takes as seeds at most

Files = dict[str, bytes]
# How many of a million mutants are of each format, but for those whose seeds are `own_seeds`.
_SHARES = {
    "kineto": 0.27,
    "kineto-gz": 0.06,
    "sqlite": 0.20,
    "sqlite-gz": 0.02,
    "nsys-rep": 0.002,
    "parquet": 0.07,
    "arrow": 0.06,
    "run": 0.12,
    "ring": 0.13,
    "summary": 0.04,
    "several": 0.028,
}


def own_seeds() -> dict[str, list[Path]]:
    """Format -> the files `FORMAT.EXTENSION` of the corpus: what a reader brings for its mutants to descend from."""
    from kvprobe.recordings import FORMATS

    found: dict[str, list[Path]] = {}
    for path in sorted(CORPUS.glob("*.*")):
        if path.is_file() and (form := path.name.partition(".")[0]) in FORMATS:
            found.setdefault(form, []).append(path)
    return found


SHARES = {**dict.fromkeys(own_seeds(), 0.03), **_SHARES}


class Late(BaseException):
    """A mutant took too long; no reader catches it."""


def mutant(form: str, files: Files, rng: random.Random, meant: bool = False) -> Files:
    """One mutant of a seed: one file of it changed, or two; `meant`: sound files that tell of what cannot be."""
    import fuzz_meaning
    import fuzz_mutators as mutators

    by_suffix = {
        ".json": mutators.mutate_json,
        ".jsonl": mutators.mutate_json,
        ".kvsum": mutators.mutate_json,
        ".kvp": mutators.mutate_ring,
        ".sqlite": mutators.mutate_sqlite,
        ".nsys-rep": mutators.mutate_sqlite,
        ".parquet": mutators.mutate_parquet,
        ".arrow": mutators.mutate_arrow,
    }
    out = dict(files)
    names = [name for name, data in files.items() if data]
    for name in rng.sample(names, min(len(names), rng.choice((1, 1, 1, 2)))):
        if len(out) > 1 and rng.random() < 0.03:
            del out[name]
            continue
        suffix = Path(name.removesuffix(".gz")).suffix
        if meant:
            out[name] = fuzz_meaning.BY_SUFFIX.get(suffix, lambda data, _: data)(files[name], rng)
            continue
        out[name] = by_suffix.get(suffix, mutators.mutate_bytes)(files[name], rng)
    return out


def _stored(files: Files, rng: random.Random) -> Files:
    """As they lie on the disk: what is called .gz is compressed."""
    import fuzz_mutators as mutators

    return {
        name: mutators.zipped(data, rng) if name.endswith(".gz") and data[:2] != b"\x1f\x8b" else data
        for name, data in files.items()
    }


class Folder:
    """A folder whose files become those of one mutant after another; only what differs is written."""

    def __init__(self, path: Path) -> None:
        self.path, self.lies = path, Files()
        path.mkdir()

    def put(self, files: Files) -> list[Path]:
        """Writes them; returns what lies at the top, the inputs of a reader."""
        for name in self.lies.keys() - files.keys():
            (self.path / name).unlink()
            if "/" in name:
                with contextlib.suppress(OSError):  # the last file of a folder takes the folder with it
                    (self.path / name).parent.rmdir()
        for name, data in files.items():
            if self.lies.get(name) is not data:
                path = self.path / name
                if name not in self.lies:
                    path.parent.mkdir(exist_ok=True)
                with path.open("wb") as file:
                    if name.endswith(".kvp"):
                        self._with_holes(file, data)
                    else:
                        file.write(data)
        self.lies = files
        return [self.path / name for name in sorted({name.split("/")[0] for name in files})]

    @staticmethod
    def _with_holes(file: object, data: bytes) -> None:
        """Pages of zeros become holes, as a ring file has them."""
        for at in range(0, len(data), 4096):
            page = data[at : at + 4096]
            if page.count(0) == len(page):
                file.seek(len(page), 1)
            else:
                file.write(page)
        file.truncate(len(data))


def read(inputs: list[Path], fallback: bool = False) -> object:
    """Reads one mutant as the commands do; `fallback`: without the native scanner. Raises what reading raises."""
    from kvprobe.recordings import kineto, many, open_recording

    if inputs[0].name.endswith(".kvsum"):
        return many.reduce_one(str(inputs[0]))
    if not fallback:
        return open_recording(inputs)
    scanner, kineto.scanner = kineto.scanner, lambda categories: None
    try:
        return open_recording(inputs)
    finally:
        kineto.scanner = scanner


def judge(inputs: Path | list[Path], deeply: int = 2, fallback: bool = False) -> tuple[str, str]:
    """Reads; `deeply` 1 judges and diagnoses, too; 2 makes the page. What was wrong ("" nothing), and how it ended."""
    from kvprobe.errors import KvprobeError

    if isinstance(inputs, Path):
        inputs = sorted(inputs.iterdir()) if inputs.name.startswith("several-") else [inputs]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)  # numpy's, about numbers that do not fit
            found = read(inputs, fallback)
            ended = _shape(found)
            if deeply:
                _look_through(found, inputs, deeply)
    except KvprobeError as error:
        if "\n" in str(error) or len(str(error)) > 2000:
            return f"an error of more than one line: {str(error)[:300]}", ""
        if isinstance(error.__cause__, MemoryError) and not _of_a_cell(error.__cause__):
            return f"asked for more than {ADDRESS_BYTES >> 20} MiB: {str(error)[-200:]}", ""
        return "", re.sub(r"[0-9a-f]*\d[0-9a-f]*|'[^']*'", "", str(error)[-120:])
    except Late:
        return f"took more than {SECONDS} s: {traceback.format_exc()[-1500:]}", ""
    except Exception:
        return traceback.format_exc(), ""
    return "", ended


def _of_a_cell(error: MemoryError) -> bool:
    """Whether it is what Python's SQLite says of a damaged cell, which has nothing to do with memory."""
    return not str(error) and traceback.extract_tb(error.__traceback__)[-1].filename.endswith("nsys_sqlite.py")


def _shape(found: object) -> str:
    """A recording in a few words, the same for those that went the same way."""
    tables = getattr(found, "tables", None)
    if tables is None:
        kinds = len(found.calls), len(found.queues), len(found.ranks), sorted(found.failed)
        return f"{'' if found.failed else 'read '}{kinds}"
    rows = [table.rows.bit_length() for table in tables.values()]
    said = re.sub(r"\d+", "", "|".join([*found.notes[:6], *found.incomplete[:3]]))[:400]
    return f"read {rows}{said}{sorted(found.machine)}"


def _look_through(found: object, inputs: list[Path], deeply: int) -> None:
    from kvprobe.recordings.quick_triage import quick_triage

    if not hasattr(found, "tables"):
        return _summarised(found)
    from kvprobe.diagnosis import examine
    from kvprobe.recordings.occupancy import occupancy

    queues = occupancy(found)
    findings = examine(found, queues)
    for path in inputs:
        quick_triage(path)
        if path.suffix == ".kvp" or list(path.glob("*.kvp")):
            _looked_at_live(path)
    if deeply > 1:
        from fuzz_outputs import check_outputs

        check_outputs(found, findings, queues)
    return None


def _looked_at_live(path: Path) -> None:
    """What `kvprobe top` and `kvprobe metrics` do with the files of a run."""
    from kvprobe.commands.top import Offloads
    from kvprobe.probe.exposed import as_text
    from kvprobe.probe.live import Live

    live = Live(path)
    Offloads().look([*live.look(), *live.look()])
    as_text(path)


def _summarised(summary: object) -> None:
    """What `kvprobe reduce` does with it."""
    from kvprobe.recordings.ranks import compare
    from kvprobe.recordings.summary import Summary

    merged = Summary().merge(summary)
    merged.merge(merged)
    compare(merged)
    merged.to_bytes()


@dataclass
class Tally:
    """What a format's mutants came to."""

    asked: int = 0
    different: int = 0
    read: int = 0
    judged: int = 0
    longest_s: float = 0.0
    memory_bytes: int = 0
    cpu_s: float = 0.0
    seconds: float = 0.0
    wrong: list[tuple[int, str]] = field(default_factory=list)


class _Shared(ctypes.Structure):
    """What a worker and who watches it share."""

    _fields_ = (
        ("number", ctypes.c_int64),  # being read now
        ("different", ctypes.c_int64),
        ("read", ctypes.c_int64),
        ("judged", ctypes.c_int64),
        ("memory_bytes", ctypes.c_int64),
        ("longest_s", ctypes.c_double),
        ("cpu_s", ctypes.c_double),  # of the batches that are over
    )


class _Fuzz:
    """One format's mutants, read by one worker after another."""

    def __init__(self, form: str, base: Path, keep: Callable[[Path, str], None] | None) -> None:
        from fuzz_seeds import seeds

        self.form, self.base, self.keep = form, base, keep
        self.seeds = seeds()[form]
        self.shared = _Shared.from_buffer(mmap.mmap(-1, ctypes.sizeof(_Shared)))
        self.seen = mmap.mmap(-1, 1 << 24)  # a bit for each hash: a mutant that was read is not read again
        self.folder = base / "mutant"

    def run(self, first: int, count: int) -> Tally:
        """Reads mutants `first` up to `first + count`."""
        tally, begin = Tally(count), time.monotonic()
        for start in range(first, first + count, BATCH):
            at, stop = start, min(start + BATCH, first + count)
            while at < stop:
                at = self._watched(start, at, stop, tally)
        shared = self.shared
        tally.different, tally.read, tally.judged = shared.different, shared.read, shared.judged
        tally.longest_s, tally.memory_bytes, tally.cpu_s = shared.longest_s, shared.memory_bytes, shared.cpu_s
        tally.seconds = time.monotonic() - begin
        return tally

    def _watched(self, start: int, at: int, stop: int, tally: Tally) -> int:
        """Has a worker read a batch from `at` on; the number to go on from."""
        told, tell = os.pipe()
        self.shared.number = at
        shutil.rmtree(self.folder, ignore_errors=True)
        pid = os.fork()
        if not pid:
            status = 70
            try:
                os.close(told)
                self._work(start, at, stop, tell)
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        os.close(tell)
        number, since = at, time.monotonic()
        said = b""
        with os.fdopen(told, "rb", buffering=0) as pipe:
            while True:
                if select.select([pipe], [], [], 1.0)[0]:
                    piece = pipe.read(1 << 16)
                    if not piece:
                        break
                    said += piece
                if self.shared.number != number:
                    number, since = self.shared.number, time.monotonic()
                elif time.monotonic() - since > SECONDS + 20:  # inside a call that no alarm interrupts
                    os.kill(pid, signal.SIGKILL)
        _, status, used = os.wait4(pid, 0)
        self.shared.cpu_s += used.ru_utime + used.ru_stime
        tally.wrong += [tuple(json.loads(line)) for line in said.splitlines()]
        if not status:
            return stop
        number = self.shared.number
        how = f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else f"exit status {os.WEXITSTATUS(status)}"
        wrong = f"the reader ended with {how}"
        tally.wrong.append((number, wrong))
        if self.keep is not None:
            self.keep(self.folder, f"{wrong} {self.form} {number}")
        return number + 1

    def _work(self, start: int, at: int, stop: int, tell: int) -> None:
        """In the worker: reads the mutants of a batch, those before `at` only made."""
        shared, seen, folder = self.shared, self.seen, Folder(self.folder)
        signal.signal(signal.SIGALRM, _late)
        pool = list(self.seeds)
        ways: set[str] = set()
        for files in self.seeds:  # also loads what reading them loads
            ways.add(judge(folder.put(_stored(files, random.Random(0))))[1])
        _limit_address_space()
        gc.collect()
        gc.freeze()
        clear = os.open("/proc/self/clear_refs", os.O_WRONLY)
        grown = 0
        for number in range(start, stop):
            rng = random.Random(f"{self.form} {number}")
            grown_from = pool[rng.randrange(len(self.seeds), len(pool))] if grown and rng.random() < 0.4 else None
            meant = not number % MEANT
            made = mutant(self.form, grown_from or rng.choice(self.seeds), rng, meant)
            files = _stored(made, rng)
            depth = 2 if not number % SHOWN else 1 if meant or not number % JUDGED else 0
            if number < at:
                continue
            shared.number = number
            bit = hash(tuple(files.items())) & ((1 << 27) - 1)
            if seen[bit >> 3] & 1 << (bit & 7):
                continue
            seen[bit >> 3] |= 1 << (bit & 7)
            shared.different += 1
            inputs = folder.put(files)
            os.pwrite(clear, b"5", 0)  # the peak of memory begins anew
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            signal.setitimer(signal.ITIMER_REAL, SECONDS)
            begin = time.perf_counter()
            try:
                wrong, ended = judge(inputs, depth, fallback=not number % DECODED)
            except Late:  # between two instructions of ours
                wrong, ended = f"took more than {SECONDS} s", ""
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
            took = time.perf_counter() - begin
            memory = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
            shared.longest_s = max(shared.longest_s, took)
            shared.memory_bytes = max(shared.memory_bytes, memory)
            shared.judged += depth > 0
            shared.read += ended.startswith("read")
            size = sum(map(len, files.values()))
            if not wrong and memory > max(MEMORY_BYTES, 20 * size):
                wrong = f"took {memory >> 20} MiB for {size} bytes"
            if wrong:
                if self.keep is not None:
                    self.keep(self.folder, wrong)
                os.write(tell, json.dumps([number, wrong[-3000:]]).encode() + b"\n")
            elif ended not in ways and grown < SEEDS_GROWN and size < 200_000:
                ways.add(ended)
                pool.append(made)
                grown += 1


def _late(*_: object) -> None:
    raise Late


def _limit_address_space() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * mmap.PAGESIZE + ADDRESS_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def run(form: str, count: int, first: int = 0, keep: Callable[[Path, str], None] | None = None) -> Tally:
    """Reads `count` mutants of a format, numbered from `first`."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as base, _nsys(Path(base)):
        return _Fuzz(form, Path(base), keep).run(first, count)


@contextlib.contextmanager
def _nsys(folder: Path) -> Iterator[None]:
    """On PATH an `nsys` that exports a report by copying it: what kvprobe does around NVIDIA's tool is what is read."""
    (bin_folder := folder / "bin").mkdir()
    tool = bin_folder / "nsys"
    tool.write_text('#!/bin/sh\nwhile [ "$1" != --output ]; do shift; done\nexec cp "$3" "$2"\n')
    tool.chmod(0o755)
    path = os.environ["PATH"]
    os.environ["PATH"] = f"{bin_folder}:{path}"
    try:
        yield
    finally:
        os.environ["PATH"] = path


def _keep(folder: Path, wrong: str) -> None:
    """Keeps a mutant under a name that follows from what was wrong: one of each is enough."""
    last = wrong.strip().splitlines()
    place = next((line for line in reversed(last) if line.lstrip().startswith("File ")), "")
    name = hashlib.sha256((place + re.sub(r"\d+", "", last[-1])).encode()).hexdigest()[:12]
    inputs, size = sorted(folder.iterdir()), sum(p.stat().st_size for p in folder.rglob("*"))
    if not inputs or size > 100_000 or list(CORPUS.glob(f"*{name}*")):
        return
    CORPUS.mkdir(exist_ok=True)
    if len(inputs) > 1:
        shutil.copytree(folder, CORPUS / f"several-{name}")
    elif inputs[0].is_dir():
        shutil.copytree(inputs[0], CORPUS / name)
    else:
        shutil.copy(inputs[0], CORPUS / f"{name}{''.join(inputs[0].suffixes)}")


def report(form: str, tally: Tally) -> str:
    """A line of figures, and one for each kind of failure."""
    kinds: dict[str, list[int]] = {}
    for number, wrong in tally.wrong:
        lines = wrong.strip().splitlines()
        place = next((line.strip() for line in reversed(lines) if line.lstrip().startswith("File ")), "")
        kinds.setdefault(f"{lines[-1][:200]} | {place}", []).append(number)
    line = (
        f"{form:10} {tally.asked:9,} mutants, {tally.different:9,} different, {tally.read:9,} readable, "
        f"{tally.judged:8,} judged; longest {tally.longest_s:6.2f} s, memory {tally.memory_bytes >> 20:4} MiB, "
        f"{tally.cpu_s:6.0f} s of CPU, {tally.seconds:6.0f} s; {len(tally.wrong)} failures"
    )
    return "\n".join([line, *(f"  {len(numbers)} x (first: {numbers[0]}) {kind}" for kind, numbers in kinds.items())])


def main(arguments: list[str]) -> int:
    """Reads mutants, by default of all formats in the shares of `SHARES`; exit status 1 if one failed."""
    count = int(arguments[0]) if arguments else 20_000
    forms = arguments[1:] or list(SHARES)
    whole = sum(SHARES[form] for form in forms)
    tallies = []
    for form in forms:
        tallies.append(run(form, max(round(count * SHARES[form] / whole), 1), int(os.environ.get("FIRST", "0")), _keep))
        print(report(form, tallies[-1]), flush=True)
    every = Tally(
        *(sum(getattr(one, name) for one in tallies) for name in ("asked", "different", "read", "judged")),
        max(one.longest_s for one in tallies),
        max(one.memory_bytes for one in tallies),
        sum(one.cpu_s for one in tallies),
        sum(one.seconds for one in tallies),
        [wrong for one in tallies for wrong in one.wrong],
    )
    print(report("all", every).splitlines()[0])
    return 1 if every.wrong else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
