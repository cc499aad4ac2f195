"""`python -m tests.simulate SEED [--count N] [--faults N] [--threads]`: plays histories; prints events and digests."""

from __future__ import annotations

import argparse
import hashlib
import logging
import multiprocessing
import os
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor

from .history import LENGTH, Violation, play
from .many import chunk
from .threads import explore

CHUNK = 64


def _many(options: argparse.Namespace) -> int:
    """Plays many histories on all cores; says what came and how fast."""
    last = options.seed + options.count
    work = [
        (first, min(CHUNK, last - first), options.faults, options.length, options.cells)
        for first in range(options.seed, last, CHUNK)
    ]
    began = time.monotonic()
    total: Counter[str] = Counter()
    armed: Counter[str] = Counter()
    came: Counter[str] = Counter()
    wrong: list[tuple[int, str]] = []
    digest, digests = hashlib.sha256(), 0
    with ProcessPoolExecutor(options.jobs, multiprocessing.get_context("spawn")) as pool:
        for found in pool.map(chunk, work, chunksize=4):  # raises where a process dies
            for name in ("transfers", "failed", "events", "celled", "packed", "refused", "seconds", "seeds"):
                total[name] += found[name]
            armed.update(found["armed"])
            came.update(found["came"])
            wrong += found["wrong"]
            if wrong and options.first:
                options.seconds = 0
            digests += len(found["digests"])
            digest.update("".join(found["digests"]).encode())
            if time.monotonic() - began > options.seconds:
                pool.shutdown(cancel_futures=True)
                break
    took = time.monotonic() - began
    last = options.seed + total["seeds"] - 1
    print(f"seeds {options.seed} to {last}, {options.faults} faults each, about {options.length} requests")
    print(f"{digests} histories without a violation, {len(wrong)} with one")
    print(f"{total['celled']} of them with the CPU's blocks in cells: coded, or summed by a witness")
    print(f"{total['packed']} of those in a packed pool, which refused {total['refused']} stores for lack of tails")
    print(f"{total['transfers']} transfers ({total['failed']} of them failed), {total['events']} events")
    print(f"{took:.0f} s on {options.jobs} processes: {digests / max(total['seconds'], 1e-9):.0f} a second and core")
    print(f"digest of all {digest.hexdigest()[:16]}")
    if armed:
        print("faults, by phase and call: armed, came")
        for name in sorted(armed):
            print(f"  {name}: {armed[name]}, {came[name]}")
    for seed, what in wrong[:50]:
        print(f"seed {seed}: {what.splitlines()[0]}")
        print(f"  replay it: python -m tests.simulate {seed} --faults {options.faults} --length {options.length}")
    return bool(wrong)


def main() -> int:
    """Plays them; 1 where there was a violation, whose seed it names."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulate", description=__doc__)
    parser.add_argument("seed", type=int, help="the first seed")
    parser.add_argument("--count", type=int, default=1, help="histories, of this seed and those after it")
    parser.add_argument("--faults", type=int, default=0, help="calls that fail in each history: 0, 1 or 2")
    parser.add_argument("--length", type=int, default=LENGTH, help=f"about so many requests; default: {LENGTH}")
    parser.add_argument("--cells", action="store_true", help="pass over seeds whose blocks lie in no cells")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes; default: one a core")
    parser.add_argument("--seconds", type=float, default=1e9, help="no new histories after that")
    parser.add_argument("--first", action="store_true", help="end at the first violation")
    parser.add_argument("--threads", action="store_true", help="interleavings of real threads in place of histories")
    parser.add_argument("--digests", action="store_true", help="only each seed's digest")
    options = parser.parse_args()
    logging.getLogger("kvprobe").disabled = True
    if options.threads:
        code, said = explore(options.seed, options.count)
        print(said)
        return int(code != 0)
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
