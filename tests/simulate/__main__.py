"""`python -m tests.simulate SEED [--count N] [--faults N] [--threads]`: plays histories; prints events and digests."""

from __future__ import annotations

import argparse
import hashlib
import logging
import multiprocessing
import os
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from typing import TypeVar

from .history import LENGTH, Violation, play
from .many import chunk
from .threads import explore, explored

W = TypeVar("W")
T = TypeVar("T")
CHUNK = 64  # histories
EXPLORED = 200  # interleavings of one process


def _in_order(pool: Executor, jobs: int, seconds: float, call: Callable[[W], T], work: Iterable[W]) -> Iterator[T]:
    """What `call` gives for each, in order; none is begun after so many seconds, nor once the caller has closed it."""
    until, asked, ahead = time.monotonic() + seconds, deque[Future[T]](), 2 * jobs
    for one in work:
        if time.monotonic() > until:
            break
        asked.append(pool.submit(call, one))
        if len(asked) == ahead:
            yield asked.popleft().result()  # raises where a process dies
    for left in asked:
        yield left.result()


def _runs(options: argparse.Namespace, length: int) -> Iterator[tuple[int, int]]:
    """The seeds in runs: the first of each, and how many."""
    last = options.seed + options.count
    return ((first, min(length, last - first)) for first in range(options.seed, last, length))


def _many(options: argparse.Namespace) -> int:
    """Plays many histories on all cores; says what came and how fast."""
    work = ((*run, options.faults, options.length, options.only) for run in _runs(options, CHUNK))
    began = time.monotonic()
    total: Counter[str] = Counter()
    armed: Counter[str] = Counter()
    came: Counter[str] = Counter()
    wrong: list[tuple[int, str]] = []
    digest, digests = hashlib.sha256(), 0
    with ProcessPoolExecutor(options.jobs, multiprocessing.get_context("spawn")) as pool:
        for found in _in_order(pool, options.jobs, options.seconds, chunk, work):
            for name in ("transfers", "failed", "events", "celled", "packed", "refused", "seconds", "seeds"):
                total[name] += found[name]
            armed.update(found["armed"])
            came.update(found["came"])
            wrong += found["wrong"]
            digests += len(found["digests"])
            digest.update("".join(found["digests"]).encode())
            if wrong and options.first:
                break
    took = time.monotonic() - began
    last = options.seed + total["seeds"] - 1
    print(f"seeds {options.seed} to {last}, {options.faults} faults each, about {options.length} requests")
    print(f"{digests} histories without a violation, {len(wrong)} with one")
    print(f"{total['celled']} of them with the CPU's blocks in cells: coded, or summed by a witness")
    print(f"{total['packed']} of those in a packed pool, which refused {total['refused']} stores for lack of tails")
    print(f"{total['transfers']} transfers ({total['failed']} of them failed), {total['events']} events")
    rate = f"{digests / took:.0f} a second, {digests / max(total['seconds'], 1e-9):.0f} in a second of one's work"
    print(f"{took:.0f} s on {options.jobs} processes: {rate}")
    print(f"digest of all {digest.hexdigest()[:16]}")
    if armed:
        print("faults, by phase and call: armed, came")
        for name in sorted(armed):
            print(f"  {name}: {armed[name]}, {came[name]}")
    for seed, what in wrong[:50]:
        print(f"seed {seed}: {what.splitlines()[0]}")
        print(f"  replay it: python -m tests.simulate {seed} --faults {options.faults} --length {options.length}")
    return bool(wrong)


def _threads(options: argparse.Namespace) -> int:
    """Plays interleavings on all cores; says how many, and each that was wrong."""
    began, played = time.monotonic(), 0
    wrong: list[str] = []
    explored()  # compiled once
    with ThreadPoolExecutor(options.jobs) as pool:
        for count, said in _in_order(pool, options.jobs, options.seconds, _explore, _runs(options, EXPLORED)):
            played += count
            wrong += [said] if said else []
    last = options.seed + played - 1
    print(f"seeds {options.seed} to {last}: {played} interleavings, {len(wrong)} runs of {EXPLORED} with a violation")
    print(f"{time.monotonic() - began:.0f} s on {options.jobs} processes")
    for said in wrong[:20]:
        print(said)
    return bool(wrong)


def _explore(run: tuple[int, int]) -> tuple[int, str]:
    """Interleavings of a run of seeds: how many, and "" or what was wrong."""
    code, said = explore(*run)
    return run[1], said if code else ""


def main() -> int:
    """Plays them; 1 where there was a violation, whose seed it names."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulate", description=__doc__)
    parser.add_argument("seed", type=int, help="the first seed")
    parser.add_argument("--count", type=int, default=1, help="histories, of this seed and those after it")
    parser.add_argument("--faults", type=int, default=0, help="calls that fail in each history: 0, 1 or 2")
    parser.add_argument("--length", type=int, default=LENGTH, help=f"about so many requests; default: {LENGTH}")
    only = parser.add_mutually_exclusive_group()
    only.add_argument(
        "--cells", dest="only", action="store_const", const="cells", help="only seeds with blocks in cells"
    )
    only.add_argument("--raw", dest="only", action="store_const", const="raw", help="only the others")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes; default: one a core")
    parser.add_argument("--seconds", type=float, default=1e9, help="no new histories after that")
    parser.add_argument("--first", action="store_true", help="end at the first violation")
    parser.add_argument("--threads", action="store_true", help="interleavings of real threads in place of histories")
    parser.add_argument("--digests", action="store_true", help="only each seed's digest")
    options = parser.parse_args()
    logging.getLogger("kvprobe").disabled = True
    if options.threads:
        return _threads(options)
    if options.digests:
        for seed in range(options.seed, options.seed + options.count):
            print(seed, play(seed, options.faults, length=options.length)["digest"])
        return 0
    if options.count > 1:
        return _many(options)
    try:
        one = play(options.seed, options.faults, print, options.length)
    except Violation as violation:
        print(f"seed {options.seed}: violation: {violation}", file=sys.stderr)
        return 1
    print(f"digest {one['digest']}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
