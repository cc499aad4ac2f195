"""One table of thresholds: the native scanner repeats it, nobody else has one of their own."""

from __future__ import annotations

import ast
import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvprobe.launchqueue import constants
from kvprobe.launchqueue.baseline import Baseline

PACKAGE = Path(__file__).parents[2] / "kvprobe"


def test_the_native_scanner_has_the_same_thresholds() -> None:
    text = (PACKAGE / "native" / "trace" / "queues.c").read_text()
    found = {name: int(value) for name, value in re.findall(r"\b([A-Z_]+) = (\d+)", text)}
    assert (found["ALIGNED_NS"], found["LEAST_DEPTH"], found["LEAST_BAND"]) == (
        constants.ALIGNED_NS,
        constants.LEAST_DEPTH,
        constants.LEAST_BAND,
    )
    assert f"{constants.SHALLOW_SHARE} * out->deepest" in text
    assert f"{constants.BAND_SHARE} * out->deepest" in text


def test_nobody_else_defines_one_of_them() -> None:
    names = [name for name in vars(constants) if name.isupper()]
    own = re.compile(rf"^(?:{'|'.join(names)})\b.*=", re.MULTILINE)
    for room in ("launchqueue", "probe", "recordings", "diagnosis", "instrument", "reporting", "commands"):
        for path in (PACKAGE / room).glob("*.py"):
            defined = set(own.findall(path.read_text())) if path.name != "constants.py" else set()
            # these two judge other things by names of their own
            assert not {line for line in defined if path.name not in ("first_calls.py", "serving.py")}, path


def numbers(tree: ast.Module) -> Iterator[tuple[str, float]]:
    """Names that a module gives to numbers, with the number."""
    for node in tree.body:
        for target in node.targets if isinstance(node, ast.Assign) else ():
            pairs = [(target, node.value)]
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = list(zip(target.elts, node.value.elts, strict=True))
            for name, value in pairs:
                with contextlib.suppress(ValueError):
                    number = ast.literal_eval(value)
                    if isinstance(name, ast.Name) and type(number) in (int, float):
                        yield name.id, number


def test_a_number_that_modules_share_has_its_name_in_one_place() -> None:
    """What one module takes from another, none gives the same value under the same name by itself."""
    places: dict[tuple[str, float], list[str]] = {}
    shared: set[str] = set()
    for path in [*PACKAGE.rglob("*.py"), *PACKAGE.parent.glob("patches/*.py")]:
        tree = ast.parse(path.read_text())
        shared |= {one.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for one in node.names}
        for named in numbers(tree):
            places.setdefault(named, []).append(path.name)
    assert not {named: where for named, where in places.items() if len(where) > 1 and named[0] in shared}
    assert len([named for named in places if named[0] in shared]) > 30


@pytest.mark.parametrize("taught_ns", [100, 1_700, 100_000])
def test_a_baseline_cannot_be_taught_away_from_the_calibrated_one(taught_ns: int) -> None:
    baseline = Baseline(1_000, 1_500)
    for _ in range(10_000):
        baseline.learn(64, 64 * taught_ns)
    assert 1_000 / constants.BASELINE_DRIFT <= baseline.ns <= 1_000 * constants.BASELINE_DRIFT
    assert baseline.slow_ns <= 2_000
