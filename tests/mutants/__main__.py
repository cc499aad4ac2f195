"""`python -m tests.mutants [--c N] [--python N] [--seed S] [--file NAME] [--log FILE] [NAME...]`: puts bugs in."""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import TypeVar

from . import c_source, python_source, worker
from .checks import Check, checks_of, listed
from .mutant import ROOT, Mutant

T = TypeVar("T")
EXPLAINED = Path(__file__).with_name("explained.txt")


def explained() -> dict[str, str]:
    """Mutants that no check can catch, by name: why not."""
    lines = [line.split(None, 1) for line in EXPLAINED.read_text().splitlines() if line and line[0] not in "# "]
    return {line[0]: line[1] for line in lines}


def sample(found: Iterable[T], count: int, seed: int) -> list[T]:
    """So many of them by a seed, which are the same ones when others come or go."""

    def drawn(one: T) -> str:
        name = one.name if isinstance(one, Mutant) else str(one)
        return hashlib.sha256(f"{seed} {name}".encode()).hexdigest()

    return sorted(found, key=drawn)[:count]


def chosen(options: argparse.Namespace) -> list[Mutant]:
    """What is to be put in."""
    if options.names:
        wanted = set(options.names)
        found = [each for each in c_source.mutants() if each.name in wanted]
        stems = {name.rpartition("-")[0] for name in wanted - {each.name for each in found}}
        if not stems:
            return found
        named = (python_source.made(place) for place in python_source.places() if Path(place[0]).stem in stems)
        return found + [each for each in named if each.name in wanted]
    found = sample(c_source.mutants(), options.c, options.seed) if options.c else []
    places = sample(python_source.places(), options.python, options.seed) if options.python else []
    found, places = found[options.skip :], places[options.skip :]
    if options.file:
        found = [mutant for mutant in found if Path(mutant.file).name in options.file]
        places = [place for place in places if Path(place[0]).name in options.file]
    return found + [python_source.made(place) for place in places]


def main() -> int:
    """1 where a mutant lives that is not explained, 2 where the checks fail without one."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("names", nargs="*", help="only these")
    parser.add_argument("--c", type=int, default=200, help="so many of the C; default: 200")
    parser.add_argument("--python", type=int, default=100, help="so many of the Python; default: 100")
    parser.add_argument("--seed", type=int, default=0, help="which ones")
    parser.add_argument("--skip", type=int, default=0, help="so many of those drawn, which another run tries")
    parser.add_argument("--file", action="append", help="of those drawn only the ones of files of this name")
    parser.add_argument("--quick", action="store_true", help="only the checks that take seconds")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="at a time; default: one a core")
    parser.add_argument("--seconds", type=float, default=1e9, help="no more mutants after that")
    parser.add_argument("--list", action="store_true", help="name them and do nothing")
    parser.add_argument("--log", type=Path, help="keeps each fate here, and does not try again what was caught")
    options = parser.parse_args()
    mutants, known = chosen(options), explained()
    if options.list:
        print("\n".join(map(str, mutants)))
        return 0
    every = {check.name: check for mutant in mutants for check in checks_of(mutant, options.quick)}
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.jobs, context, worker.opens, (options.quick,)) as pool:
        try:
            if said := _fails(pool, list(every.values()), options.log):  # what fails without a bug, catches none
                print(f"the program as it is does not pass: {said}")
                return 2
            return _try(pool, mutants, known, options)
        finally:
            for _ in pool.map(worker.closes, range(options.jobs)):
                pass


def _try(pool: ProcessPoolExecutor, mutants: list[Mutant], known: dict[str, str], options: argparse.Namespace) -> int:
    """All of them; 1 where one lives that is not explained."""
    until = time.monotonic() + options.seconds
    fates = _kept(options.log)
    met = {mutant: fates.get(mutant.digest, "") for mutant in mutants}
    due = [
        mutant
        for mutant in sorted(mutants, key=lambda one: one.digest)
        if options.names or met[mutant] not in _settled(options.quick)
    ]
    for one in as_completed(asked := {pool.submit(worker.tried, mutant, until): mutant for mutant in due}):
        mutant, (fate, why, took_s) = asked[one], one.result()
        met[mutant] = fate
        if fate == "lives":
            why = f"LIVES{' (explained)' if mutant.name in known else ''}"
        if fate != "left":
            print(f"{mutant} | {why} | {took_s:.0f} s", flush=True)
            fate = "passes" if fate == "lives" and options.quick else fate
            _keep(options.log, {"digest": mutant.digest, "fate": fate, "mutant": str(mutant), "why": why})
    count = Counter(met.values())
    living = sorted((mutant for mutant, fate in met.items() if fate in ("lives", "passes")), key=str)
    unexplained = [mutant for mutant in living if mutant.name not in known]
    tried = count["caught"] + len(living)
    print(f"{tried} mutants, {count['caught']} caught, {len(living)} live, {len(unexplained)} of them not explained")
    lack = f", {count['left']} were left for lack of time" * bool(count["left"])
    print(f"{count['same']} more do not compile, or compile to the same code{lack}")
    for mutant in unexplained:
        print(f"  {mutant}")
    return bool(unexplained)


def _fails(pool: ProcessPoolExecutor, checks: list[Check], log: Path | None) -> str | None:
    """What is wrong with the program as it is; what a log says to be right is not looked at again."""
    content = hashlib.sha256(b"".join(name.encode() + (ROOT / name).read_bytes() for name in listed()))
    known = _kept(log)
    digests = {check: f"{check.name} of {content.hexdigest()[:16]}" for check in checks}
    due = [check for check in checks if known.get(digests[check]) != "holds"]
    for check, said in zip(due, pool.map(worker.passes, due), strict=True):
        if said:
            return said
        _keep(log, {"digest": digests[check], "fate": "holds"})
    return None


def _keep(log: Path | None, line: dict[str, str]) -> None:
    if log:
        with log.open("a") as out:
            out.write(json.dumps(line) + "\n")


def _kept(log: Path | None) -> dict[str, str]:
    """The newest fate of each mutant in a log."""
    lines = log.read_text().splitlines() if log and log.exists() else []
    return {each["digest"]: each["fate"] for each in map(json.loads, lines)}


def _settled(quick: bool) -> set[str]:
    """Fates after which a mutant is not tried again; "passes" only the checks that take seconds."""
    return {"caught", "same", "lives", "passes"} if quick else {"caught", "same", "lives"}


if __name__ == "__main__":
    sys.exit(main())
