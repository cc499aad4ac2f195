"""What recording adds to a step with a wait a layer, with timing events in its streams and without them.

    python benchmarks/marks_cost.py [--rounds 3] [--seconds 12] [--json]

A step has 32 layers, each a load beside four kernels of 8 us and a wait of the compute stream for it. It is made by
turns in two sets of streams of one process: in one it is recorded, and in the other its calls lead past the interposer
(as in copy_cost.py). So neither the machine's clock speed nor its other guests change between the two of a pair. A
round attaches the interposer anew, with marks or without, or not at all: what the second set takes more then is its
own, and is taken off. Told are, of the first second, of the five after it in which marks may cost more, and of the
time after these, the median of all differences, and their mean without the hundredth at either end, as marks come in
stretches: few steps have them. Marks are bounded by what they cost of a second, and half of each goes unrecorded here:
what they add to a step counts twice.
"""

from __future__ import annotations

import argparse
import copy
import ctypes as ct
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests" / "corpus"), str(ROOT)]

from copy_cost import attach, switched  # noqa: E402
from device import H2D, Device, now  # noqa: E402

BARE, WAYS = "not attached", ("off", "auto")  # of KVPROBE_MARKS
LAYERS, KERNEL_NS, SIZE = 32, 8_000, 64 << 10
PARTS = {"first second": 1, "next five": 6, "after these": float("inf")}  # until when, seconds
CUT = 100  # a hundredth at either end

Pairs = list[tuple[int, int]]


def step(d: Device) -> int:
    """How long one takes, ns."""
    begin = now()
    for layer in range(LAYERS):
        d.copy(d.device + layer * SIZE, d.host + layer * SIZE, SIZE, H2D, d.copies[0])
        d.order(d.compute, d.copies[0], layer)
        for _ in range(4):
            d.launch(KERNEL_NS)
    d.sync(d.compute)
    return now() - begin


def pairs_of(library: ct.CDLL | None, plain: Device, other: Device, seconds: float) -> dict[str, Pairs]:
    """Steps of `other` and of `plain`, ns, of each part of a round; where `library` is attached, its words switch."""
    pairs: dict[str, Pairs] = {part: [] for part in PARTS}
    began = now()
    while (passed := now() - began) < seconds * 1e9:
        if library:
            library.kvprobe_lead(1)
        one = step(other)
        if library:
            library.kvprobe_lead(0)
        part = next(part for part, until in PARTS.items() if passed < until * 1e9)
        pairs[part].append((one, step(plain)))
    return pairs


def recorded(library: ct.CDLL, run: Path, plain: Device, other: Device, seconds: float) -> dict[str, Pairs]:
    """The same where the steps of `other` are recorded in the folder `run`."""
    attach(library, run)
    watched = copy.copy(other)
    watched.lib = Device(64 << 20).lib  # its functions are the wrappers
    launches = [ct.cast(one.lib.cudaLaunchKernel, ct.c_void_p).value for one in (plain, watched)]
    if launches[0] == launches[1]:
        sys.exit("marks_cost: the calls of this process are not recorded")
    pairs = pairs_of(library, plain, watched, seconds)
    library.kvprobe_lead(1)
    watched.synchronize()
    library.kvprobe_detach()
    return pairs


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=12)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    plain, other = Device(64 << 20), Device(64 << 20)
    found: dict[str, dict[str, Pairs]] = {way: {part: [] for part in PARTS} for way in (BARE, *WAYS)}
    with tempfile.TemporaryDirectory(prefix="kvprobe-marks-cost-") as name:
        library = switched(Path(name))
        for number in range(given.rounds):
            for way in found:
                run = Path(name) / f"{number}-{way}"
                run.mkdir()
                os.environ["KVPROBE_MARKS"] = way
                if way in WAYS:
                    more = recorded(library, run, plain, other, given.seconds)
                else:
                    more = pairs_of(None, plain, other, given.seconds)
                for part, pairs in more.items():
                    found[way][part] += pairs
    own = summed([pair for pairs in found[BARE].values() for pair in pairs])
    told = {BARE: own}
    for way in WAYS:
        for part, pairs in ((part, pairs) for part, pairs in found[way].items() if len(pairs) > 1):
            one = told[f"marks {way}, {part}"] = summed(pairs)
            one |= {name: one[name] - own[name] for name in ("median_ns", "mean_ns")}
    if given.json:
        print(json.dumps({"gpu": plain.gpu, "layers": LAYERS, "rounds": given.rounds, **told}, indent=2))
        return
    for label, one in told.items():
        percent = {name: one[name] / one["step_us"] / 10 for name in ("median_ns", "mean_ns", "error_ns")}
        print(
            f"{label:24} {one['steps']:6,} steps of {one['step_us']:,.1f} us: median {one['median_ns']:+,.0f} ns "
            f"({percent['median_ns']:+.2f}%), mean {one['mean_ns']:+,.0f} ns "
            f"({percent['mean_ns']:+.2f}%, standard error {percent['error_ns']:.2f})"
        )


def summed(pairs: Pairs) -> dict[str, float]:
    """What a step of the plain set takes, and how much more one of the other."""
    more = sorted(one - bare for one, bare in pairs)
    kept = more[len(more) // CUT : len(more) - len(more) // CUT]
    return {
        "steps": len(more),
        "step_us": statistics.median(bare for _, bare in pairs) / 1e3,
        "median_ns": statistics.median(more),
        "mean_ns": statistics.fmean(kept),
        "error_ns": statistics.stdev(kept) / len(kept) ** 0.5,
    }


if __name__ == "__main__":
    main()
