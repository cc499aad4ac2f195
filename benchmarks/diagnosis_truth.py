"""How right the diagnosis is: every scenario of the ground truth, played several times, against what really happened.

    python benchmarks/diagnosis_truth.py [--plays 3] [--only TEXT] [--json FILE]

Prints, for each cause of each scenario, the time that the embedded host runtime says was lost, the time that the
diagnosis named, and the error; then a confusion line: causes named rightly, missed, made up. Floor: nothing missed,
nothing made up, every error within 10% (or a millisecond). Exit code 1 where the floor is not held.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "diagnosis"))

from hostruntime import Runtime
from scenarios import REQUIRED_NS, SCENARIOS, mistakes

from kvprobe.diagnosis import diagnose


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plays", type=int, default=3, help="times that each scenario is played")
    parser.add_argument("--only", default="", help="scenarios whose name contains this")
    parser.add_argument("--json", type=Path, help="write the rows here")
    options = parser.parse_args()
    runtime = Runtime()
    rows = []
    right = missed = made_up = plays = clean = 0
    worst = spent = 0.0
    print(f"{'scenario':44} {'cause':26} {'lost ms':>9} {'named ms':>9} {'error':>7}")
    for name, scenario in SCENARIOS.items():
        if options.only not in name:
            continue
        for _ in range(options.plays):
            played = scenario(runtime)
            begin = time.perf_counter()
            findings = diagnose(played.recording)
            spent += time.perf_counter() - begin
            plays += 1
            clean += not mistakes(played, findings)
            named = {finding.cause: finding.lost_ns for finding in findings if not finding.abstains}
            made_up += sum(cause not in played.truth for cause in named)
            for cause, lost in played.truth.items():
                if cause not in named:
                    missed += (lost >= REQUIRED_NS or lost == 0) and cause not in played.optional
                    continue
                right += 1
                error = (named[cause] - lost) / lost if lost else 0.0
                if lost >= REQUIRED_NS:
                    worst = max(worst, abs(error))
                rows.append({"scenario": name, "cause": cause, "lost_ns": lost, "named_ns": named[cause]})
                print(f"{name:44} {cause:26} {lost / 1e6:9.2f} {named[cause] / 1e6:9.2f} {100 * error:6.1f}%")
            for cause in set(named) - set(played.truth):
                print(f"{name:44} {cause:26} {'-':>9} {named[cause] / 1e6:9.2f} {'made up':>7}")
    print(f"\n{plays} plays of {len(SCENARIOS)} scenarios, {spent / plays * 1e3:.1f} ms a diagnosis")
    print(f"causes named rightly {right}, missed {missed} (floor 0), made up {made_up} (floor 0)")
    print(f"largest error {100 * worst:.1f}% (floor 10%, or a millisecond); plays without a mistake {clean} of {plays}")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))
    return 0 if clean == plays else 1


if __name__ == "__main__":
    raise SystemExit(main())
