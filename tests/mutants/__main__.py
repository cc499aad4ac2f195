"""`python -m tests.mutants [--c N] [--python N] [--seed S] [--file NAME] [NAME...]`: puts bugs in; says which live."""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TypeVar

from . import c_source, python_source
from .checks import Tree, checks_of
from .mutant import Mutant

T = TypeVar("T")
EXPLAINED = Path(__file__).with_name("explained.txt")


def explained() -> dict[str, str]:
    """Mutants that no check can catch, by name: why not."""
    lines = [line.split(None, 1) for line in EXPLAINED.read_text().splitlines() if line and line[0] not in "# "]
    return {line[0]: line[1] for line in lines}


def sample(found: Iterable[T], count: int, seed: int) -> list[T]:
    """So many of them, the same for a seed wherever they stand."""
    ordered = sorted(found, key=str)
    random.Random(seed).shuffle(ordered)
    return ordered[:count]


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
    parser.add_argument("--list", action="store_true", help="name them and do nothing")
    options = parser.parse_args()
    mutants, known = chosen(options), explained()
    if options.list:
        print("\n".join(map(str, mutants)))
        return 0
    tree = Tree()
    caught = same = 0
    living: list[Mutant] = []
    try:
        every = {check.name: check for mutant in mutants for check in checks_of(mutant, options.quick)}
        for check in every.values():  # what fails without a bug, catches none
            if said := tree.run(check):
                print(f"the program as it is does not pass: {said}")
                return 2
        for mutant in mutants:
            began = time.monotonic()
            if not tree.apply(mutant):
                same += 1
                print(f"{mutant.name} is no other program: {mutant.old}  ->  {mutant.new}", flush=True)
                continue
            why = next((said for check in checks_of(mutant, options.quick) if (said := tree.run(check))), None)
            tree.restore(mutant)
            caught += why is not None
            if why is None:
                living.append(mutant)
            said = why or f"LIVES{' (explained)' if mutant.name in known else ''}"
            print(f"{mutant} | {said} | {time.monotonic() - began:.0f} s", flush=True)
    finally:
        tree.close()
    unexplained = [mutant for mutant in living if mutant.name not in known]
    tried = caught + len(living)
    print(f"{tried} mutants, {caught} caught, {len(living)} live, {len(unexplained)} of them not explained")
    print(f"{same} more do not compile, or compile to the same code")
    for mutant in unexplained:
        print(f"  {mutant}")
    return bool(unexplained)


if __name__ == "__main__":
    sys.exit(main())
