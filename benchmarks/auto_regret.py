"""What auto costs beside the best fixed rung, over simulated workloads: no device, no real time, the same everywhere.

python benchmarks/auto_regret.py [--workloads N] [--jobs N] [--auto FILE]   # FILE: another auto.py to be measured

Regret is what auto cost more than the best fixed rung of a workload, in percent of that; harm what it cost more than
the server's own way. `tests/offload/simulated_rungs.py` says what is drawn and what a transfer costs.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import multiprocessing
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from kvprobe.offload.auto import Auto
from tests.offload.simulated_rungs import KINDS, Outcome, quantile, share_above, simulate


@functools.cache
def auto_of(path: Path | None, engine: str) -> Callable[..., Any]:
    """The class that is measured; `engine`: settings in JSON that another one has in the engine instead of ours."""
    if path is None:
        return Auto
    spec = importlib.util.spec_from_file_location("another_auto", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)

    def make(*given: Any, **settings: Any) -> Any:
        if "depth" not in settings:
            del settings["slow_ns"]
            settings |= json.loads(engine)
        return module.Auto(*given, **settings)

    return make


def play(path: Path | None, engine: str, seed: int) -> Outcome:
    """One workload."""
    return simulate(seed, auto_of(path, engine))


def lines(outcomes: list[Outcome]) -> list[str]:
    """The table."""
    said = [f"{'workloads':24}{'regret %: p50':>14}{'p90':>8}{'p95':>8}{'p99':>9}{'worst':>9}{'mean':>8}{'>10%':>8}"]
    said[0] += f"{'harm p99':>10}{'worst':>9}{'changes':>9}{'most':>6}"
    for kind in ("all", *KINDS):
        some = [one for one in outcomes if kind in ("all", one.kind)]
        if not some:
            continue
        regret, harm = sorted(one.regret for one in some), sorted(one.harm for one in some)
        changes = [one.auto.changes for one in some]
        row = [100 * quantile(regret, share) for share in (0.5, 0.9, 0.95, 0.99)] + [100 * regret[-1]]
        row += [100 * sum(regret) / len(regret), 100 * share_above(regret, 0.1)]
        row += [100 * quantile(harm, 0.99), 100 * harm[-1]]
        figures = "".join(f"{one:{width}.2f}" for one, width in zip(row, (14, 8, 8, 9, 9, 8, 8, 10, 9), strict=True))
        said.append(f"{kind + ': ' + str(len(some)):24}{figures}{sum(changes) / len(some):9.2f}{max(changes):6}")
    return said


def main() -> None:
    """Play them and say what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--auto", type=Path, help="another auto.py")
    parser.add_argument("--engine", default='{"busy_share": 0.5}', help="its settings in the engine, in JSON")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--worst", type=int, default=0, help="name so many of the worst seeds")
    arguments = parser.parse_args()
    seeds = range(arguments.first, arguments.first + arguments.workloads)
    with multiprocessing.Pool(arguments.jobs) as pool:
        outcomes = pool.map(functools.partial(play, arguments.auto, arguments.engine), seeds, chunksize=20)
    print("\n".join(lines(outcomes)))
    for one in sorted(outcomes, key=lambda one: -one.regret)[: arguments.worst]:
        fixed = {str(rung): round(ns / 1e6, 1) for rung, ns in one.fixed.items()}
        print(one.seed, one.kind, f"{100 * one.regret:.1f}%", round(one.auto.cost_ns / 1e6, 1), fixed, one.auto.log[:8])


if __name__ == "__main__":
    main()
