"""Hit shares of LRU pools, from a sample of blocks at 1% of the memory, against exact ones: ten series of uses.

    python benchmarks/reuse_truth.py --scale 5

The exact figures come from the stack distances of all uses. Errors are in points of hit share (hundredths of all
uses), over 100 sizes spread evenly up to all blocks: their mean, the error that 95 of 100 sizes do not exceed, and
the largest. Near a size at which a loop fits all at once, a size that is misjudged by 1% has a large error: the mean is
the area between the two curves. Memory is that of the same structure, with all blocks and with the sample.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import numpy as np

from kvprobe.reuse.distances import FIRST, stack_distances
from kvprobe.reuse.estimate import ReuseEstimate, id_of

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.reuse.traces import TRACES

SIZES = 100


def main() -> None:
    """Prints a line for each series."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--scale", type=int, default=5, help="of the series: about 200,000 blocks for each")
    parser.add_argument("--share", type=float, default=0.01, help="of the memory that following all blocks takes")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    print(f"{'series':24}{'uses':>11}{'blocks':>11}{'memory':>9}{'mean':>7}{'95%':>7}{'worst':>7}{'s':>6}")
    for name, make in TRACES.items():
        blocks = make(np.random.default_rng(options.seed), options.scale)
        different = np.unique(blocks)
        sizes = [int((number + 0.5) * len(different) / SIZES) for number in range(SIZES)]
        distance = stack_distances(blocks)
        reached = np.bincount(np.searchsorted(sizes, distance[distance != FIRST]), minlength=SIZES)
        exact = np.cumsum(reached[:SIZES]) / len(blocks)
        whole = ReuseEstimate(sizes, len(different))
        for block in different.tolist():
            whole.use(id_of(block))
        start = time.perf_counter()
        estimate = ReuseEstimate(sizes, int(len(different) * options.share))
        for block in map(id_of, blocks.tolist()):
            estimate.use(block)
        took = time.perf_counter() - start
        error = 100 * np.abs(np.array(estimate.hit_shares) - exact)
        share = estimate.bytes / whole.bytes
        print(
            f"{name:24}{len(blocks):11,}{len(different):11,}{share:9.2%}"
            f"{error.mean():7.2f}{np.quantile(error, 0.95):7.2f}{error.max():7.2f}{took:6.1f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
