"""`python -m tests.mutants.histories FAULTS:COUNT ...`: plays histories in this process until one is violated."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from tests.simulate.many import chunk

CHUNK, LENGTH = 16, 40


def play(asked: Sequence[str]) -> int:
    """1 and the violation, 0 where there was none; `asked`: "FAULTS:COUNT" each."""
    for word in asked:
        faults, count = map(int, word.split(":"))
        for first in range(0, count, CHUNK):
            wrong = chunk((first, min(CHUNK, count - first), faults, LENGTH, None))["wrong"]
            if wrong:
                print(f"seed {wrong[0][0]} with {faults} faults: {wrong[0][1].splitlines()[0]}")
                return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(play(sys.argv[1:]))
