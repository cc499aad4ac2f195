"""What `kvprobe verify` costs a program that stores and loads blocks: beside nothing, and beside `kvprobe run`.

    python benchmarks/verify_cost.py [--library FOLDER/libcudart.so] [--reps N] [--json FILE]

The same program runs by itself, under `kvprobe run` and under `kvprobe verify` at two budgets, by turns. Printed are
medians over the repetitions of its own medians, and each arm's ratio to the program by itself.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from kvprobe.native import build

HERE = Path(__file__).resolve().parent
ARMS = {
    "alone": [],
    "run": ["run"],
    "verify 2%": ["verify", "--budget", "2"],
    "verify 10%": ["verify", "--budget", "10"],
}
FIGURES = ("store's call", "load's call", "round")


def compiled(library: Path, folder: Path) -> Path:
    """The program, linked with a CUDA runtime."""
    program = folder / "verify_cost"
    subprocess.run(
        [*build.compiler(), "-std=gnu11", "-O2", "-o", program, HERE / "verify_cost.c", library,
         f"-Wl,-rpath,{library.parent}"],
        check=True,
    )  # fmt: skip
    return program


def once(arm: str, program: Path, folder: Path, size: tuple[str, ...]) -> list[float]:
    """What the program printed, in one run."""
    words = [str(program), *size]
    if ARMS[arm]:
        where = folder / "recorded"
        shutil.rmtree(where, ignore_errors=True)
        more = ["--report", "none"] if arm == "run" else []
        words = [sys.executable, "-m", "kvprobe", *ARMS[arm], *more, "-o", str(where), "--", *words]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    return [float(word) for word in done.stdout.split()]


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", type=Path, default=build.LIB / "libkvprobe_hostrt.so")
    parser.add_argument("--reps", type=int, default=5)
    parser.add_argument("--blocks", default="256")
    parser.add_argument("--bytes", default="65536")
    parser.add_argument("--rounds", default="60")
    parser.add_argument("--gap-us", default="2000")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    size = (asked.blocks, asked.bytes, asked.rounds, asked.gap_us)
    found: dict[str, list[list[float]]] = {arm: [] for arm in ARMS}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        program = compiled(asked.library.absolute(), folder)
        for _ in range(asked.reps):
            for arm, runs in found.items():
                runs.append(once(arm, program, folder, size))
    middle = {arm: [statistics.median(column) for column in zip(*runs, strict=True)] for arm, runs in found.items()}
    for arm, values in middle.items():
        ratios = [value / alone for value, alone in zip(values, middle["alone"], strict=True)]
        told = (
            f"{what} {value / 1e3:9.2f} us ({ratio:.2f})"
            for what, value, ratio in zip(FIGURES, values, ratios, strict=True)
        )
        print(f"{arm:11} {'  '.join(told)}", flush=True)
    if asked.json:
        asked.json.write_text(json.dumps({"size": size, "runs": found, "median": middle}))


if __name__ == "__main__":
    main()
