"""`python -m tests.simulate SEED [--count N] [--faults N] [-v]`: replays histories; prints events and a digest."""

from __future__ import annotations

import argparse
import logging
import sys
import time

from .history import Violation, play


def main() -> int:
    """Plays them; 1 at the first violation, whose seed it names."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulate", description=__doc__)
    parser.add_argument("seed", type=int, help="the first seed")
    parser.add_argument("--count", type=int, default=1, help="histories, of this seed and those after it")
    parser.add_argument("--faults", type=int, default=0, help="calls that fail in each history")
    parser.add_argument("-q", "--quiet", action="store_true", help="no events")
    options = parser.parse_args()
    logging.getLogger("kvprobe").disabled = True  # callbacks that raise are part of the histories
    say = None if options.quiet or options.count > 1 else print
    began, transfers, counted = time.monotonic(), 0, {}
    for seed in range(options.seed, options.seed + options.count):
        try:
            one = play(seed, options.faults, say)
        except BaseException as error:
            what = "violation" if isinstance(error, Violation) else type(error).__name__
            print(f"seed {seed}: {what}: {error}", file=sys.stderr)
            print(f"replay it: python -m tests.simulate {seed} --faults {options.faults}", file=sys.stderr)
            if isinstance(error, Violation):
                return 1
            raise
        transfers += one["transfers"]
        for fault in one["faults"]:
            counted[fault] = counted.get(fault, 0) + 1
        if options.count == 1:
            print(f"digest {one['digest']}")
    took = time.monotonic() - began
    if options.count > 1:
        print(f"{options.count} histories, {transfers} transfers, no violation, {options.count / took:.0f} a second")
        print(f"faults armed: {dict(sorted(counted.items()))}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
