"""When the copies of a batch begin: one cudaMemcpyBatchAsync after another, from a GPU to pinned memory.

    python benchmarks/batch_begins.py

For blocks of two sizes and more and more of them, the median of seven: how long the call took, and when, from its
entry on, the first and the last block were there. Another thread looks at their bytes.
"""

from __future__ import annotations

import argparse
import ctypes as ct
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "corpus"))

from device import D2H, H2D, Attributes, Device, now, p, z

COPIES = (16, 64, 256, 600, 1_000, 1_500, 2_000, 3_000, 4_000, 6_000)
ROUNDS = 7


def batch(d: Device, copies: int, size: int) -> tuple[float, float, float]:
    """Of one batch: how long its call took, when the first block was there, and when the last one was, us."""
    sources = [d.device + 2 * number * size for number in range(copies)]
    targets = [d.host + 2 * number * size for number in range(copies)]
    ct.memset(d.host, 0, 2 * copies * size)
    attributes, index = Attributes(1, 2, 0, 1, 0, 0), (z * 1)(0)
    arrays = (p * copies)(*targets), (p * copies)(*sources), (z * copies)(*[size] * copies)
    first = ct.c_ubyte.from_address(targets[0])
    last = ct.c_ubyte.from_address(targets[-1] + size - 1)
    seen, looking = [0, 0], threading.Event()

    def look() -> None:
        looking.set()
        for place, byte in enumerate((first, last)):
            while not byte.value:
                pass
            seen[place] = now()

    thread = threading.Thread(target=look)
    thread.start()
    looking.wait()
    begin = now()
    code = d.lib.cudaMemcpyBatchAsync(*arrays, copies, ct.byref(attributes), index, 1, d.copies[0])
    end = now()
    d.check(code)
    thread.join()
    d.sync(d.copies[0])
    return (end - begin) / 1e3, (seen[0] - begin) / 1e3, (seen[1] - begin) / 1e3


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    sys.setswitchinterval(1e-5)
    d = Device()
    ct.memset(d.host, 1, d.size)
    d.copy(d.device, d.host, d.size, H2D, d.copies[0])
    d.copy(d.host, d.device, 4096, D2H, d.copies[0])
    d.sync(d.copies[0])
    print(f"{'size':>8} {'copies':>7} {'call us':>9} {'first us':>9} {'last us':>9}")
    for size in (4_096, 65_536):
        for copies in COPIES:
            if 2 * copies * size > d.size:
                continue
            batch(d, copies, size)
            took, first, last = sorted(batch(d, copies, size) for _ in range(ROUNDS))[ROUNDS // 2]
            print(f"{size:>8} {copies:>7} {took:>9.0f} {first:>9.0f} {last:>9.0f}", flush=True)
            time.sleep(0.01)


if __name__ == "__main__":
    main()
