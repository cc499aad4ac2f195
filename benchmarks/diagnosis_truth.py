"""How right the diagnosis is: every scenario of the ground truth, played several times, against what really happened.

    python benchmarks/diagnosis_truth.py [--plays 3] [--only TEXT] [--json FILE]
    python benchmarks/diagnosis_truth.py --corpus DIR [--only TEXT] [--json FILE]

Prints, for each cause of each scenario, the time that the embedded host runtime says was lost, the time that the
diagnosis named, and the error; then a confusion line: causes named rightly, missed, made up. Floor: nothing missed,
nothing made up, every error within 10% (or a millisecond). Exit code 1 where the floor is not held.

With --corpus: the recordings of the labelled corpus (`benchmarks/record_corpus.py`), by format: for each cause how
often it was named rightly, missed and named falsely, and the time lost against each program's own measure.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "diagnosis"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "corpus"))

from hostruntime import Runtime
from scenarios import REQUIRED_NS, SCENARIOS, mistakes

from kvprobe.diagnosis import diagnose


def corpus(folder: Path, only: str, out: Path | None) -> int:
    """Prints the confusion matrix of a folder of recordings; 1 where a cause was missed or made up."""
    import tempfile
    from collections import Counter

    from grade import FORMATS, grade_folder

    with tempfile.TemporaryDirectory() as scratch:
        grades = grade_folder(folder, Path(scratch), only)
    print(f"{'program':58} {'format':7} what is wrong")
    for one in grades:
        wrong = [f"missed {cause} ({one.lost.get(cause, 0) / 1e6:.1f} ms)" for cause in sorted(one.missed)]
        wrong += [f"false {cause} ({one.named[cause] / 1e6:.1f} ms)" for cause in sorted(one.false)]
        wrong += [f"{cause} {100 * error:+.0f}%" for cause, error in one.error.items() if abs(error) > 0.1]
        if wrong:
            print(f"{one.program:58} {one.form:7} {'; '.join(wrong)}")
    right: Counter[tuple[str, str]] = Counter()
    missed: Counter[tuple[str, str]] = Counter()
    false: Counter[tuple[str, str]] = Counter()
    for one in grades:
        for counter, causes in ((right, one.expected & set(one.named)), (missed, one.missed), (false, one.false)):
            counter.update((cause, one.form) for cause in causes)
    forms = [form for form in FORMATS if any(one.form == form for one in grades)]
    print(f"\n{'cause':26}" + "".join(f"{form + ': named':>16}{'missed':>8}{'false':>7}" for form in forms))
    for cause in sorted({cause for counter in (right, missed, false) for cause, _ in counter}):
        counts = "".join(f"{right[cause, f]:>16}{missed[cause, f]:>8}{false[cause, f]:>7}" for f in forms)
        print(f"{cause:26}{counts}")
    for form in forms:
        mine = [one for one in grades if one.form == form]
        errors = [error for one in mine for error in one.error.values()]
        print(
            f"{form}: {sum(one.right for one in mine)} of {len(mine)} recordings right, "
            f"{sum(len(one.missed) for one in mine)} missed, {sum(len(one.false) for one in mine)} false; time lost "
            f"within 10% (or a millisecond) in {sum(abs(e) <= 0.1 for e in errors)} of {len(errors)}"
        )
    if out:
        out.write_text(
            json.dumps(
                [
                    {
                        "program": one.program,
                        "format": one.form,
                        "expected": sorted(one.expected),
                        "named_ns": one.named,
                        "lost_ns": one.lost,
                        "missed": sorted(one.missed),
                        "false": sorted(one.false),
                        "error": one.error,
                        "not_looked_for": sorted(one.not_looked_for),
                    }
                    for one in grades
                ],
                indent=1,
            )
            + "\n"
        )
    return 0 if grades and all(one.right for one in grades) else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plays", type=int, default=3, help="times that each scenario is played")
    parser.add_argument("--only", default="", help="scenarios whose name contains this")
    parser.add_argument("--json", type=Path, help="write the rows here")
    parser.add_argument("--corpus", type=Path, help="grade recordings of the corpus instead")
    options = parser.parse_args()
    if options.corpus:
        return corpus(options.corpus, options.only, options.json)
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
                    missed += lost >= REQUIRED_NS or lost == 0
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
    print(f"largest error {100 * worst:.1f}% (floor 10%, or 0.1 ms); plays without a mistake {clean} of {plays}")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))
    return 0 if clean == plays else 1


if __name__ == "__main__":
    raise SystemExit(main())
