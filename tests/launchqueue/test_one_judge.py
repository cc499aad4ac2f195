"""Whether a queue was full is decided in `launchqueue/judge.py`, and what a queue takes stands in `constants.py`."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from kvprobe.diagnosis import CAUSES
from kvprobe.launchqueue import constants, evidence
from kvprobe.launchqueue.evidence import Flood, Plateau, StoodStill, Transfers
from kvprobe.launchqueue.judge import STATES, conclude

PACKAGE = Path(__file__).parents[2] / "kvprobe"
ROOMS = ("launchqueue", "probe", "recordings", "diagnosis", "offload", "instrument", "testing")
DEPTH = re.compile(r"depth|deepest|outstanding|ceiling", re.IGNORECASE)
MEASURED = {253, 1_021, 1_022, 1_026, 1_135, 1_141, 4_021, 4_093, 4_100, 8_021, 8_168, 32_021}
FILES = [path for room in ROOMS for path in sorted((PACKAGE / room).glob("*.py"))]
ASIDE = {"judge.py", "constants.py"}


def decisions(tree: ast.Module) -> list[str]:
    """What in a module sets a conclusion by itself."""
    found = []
    for node in ast.walk(tree):
        targets = node.targets if isinstance(node, ast.Assign) else ()
        for target in targets:
            names = target.elts if isinstance(target, ast.Tuple) else [target]
            values = {one.value for one in ast.walk(node.value) if isinstance(one, ast.Constant)}
            if values & {"full", "not full", "cannot tell"} and any(
                isinstance(one, ast.Attribute) and one.attr in ("verdict", "state", "conclusion") for one in names
            ):
                found.append(ast.unparse(node))
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("Conclusion") and node.args:
            found.append(ast.unparse(node))
    return found


def depths(tree: ast.Module) -> list[str]:
    """Where a module compares what is outstanding with a number of its own, or knows what a queue takes."""
    found = [
        ast.unparse(node)
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and type(node.value) is int and node.value in MEASURED
    ]
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            own = any(
                isinstance(one, ast.Constant) and type(one.value) in (int, float) and one.value > 1 for one in sides
            )
            own |= any(
                isinstance(one, ast.BinOp) and isinstance(one.left, ast.Constant) and type(one.left.value) is float
                for one in sides
            )
            if own and any(DEPTH.search(ast.unparse(side)) for side in sides):
                found.append(ast.unparse(node))
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_nobody_but_the_judge_decides_or_knows_how_deep_a_queue_is(path: Path) -> None:
    if path.name in ASIDE and path.parent.name == "launchqueue":
        return
    tree = ast.parse(path.read_text())
    assert not decisions(tree)
    assert not [one for one in depths(tree) if (path.name, one) not in NO_QUEUE]


NO_QUEUE = {("process_tracking.py", "depth < 64")}  # of folders


def test_the_test_finds_what_it_forbids() -> None:
    tree = ast.parse("queue.verdict = 'full'\nif deepest >= 900: pass\nif x < 0.9 * depth: pass\nDEEP = 1021")
    assert len(decisions(tree)) == 1 and len(depths(tree)) == 3


def test_every_kind_of_evidence_is_judged_and_auto_names_causes_that_diagnosis_knows() -> None:
    assert {"Plateau", "Flood", "Labels"} < set(evidence.__all__)
    assert {constants.SATURATION, constants.COSTLY_BATCH, constants.SMALL_COPIES} < set(CAUSES)
    auto = ast.parse((PACKAGE / "offload" / "auto.py").read_text())
    text = {one.value for one in ast.walk(auto) if isinstance(one, ast.Constant) and isinstance(one.value, str)}
    assert not text & set(CAUSES)


def test_conclusions_have_three_states_and_say_from_what() -> None:
    said = [
        conclude(Plateau(10)),
        conclude(Plateau(1_021, slow=3, shallowest=1_020, lost_ns=9_000_000)),
        conclude(Plateau(1_021, slow=300, shallowest=1_020, lost_ns=9_000_000, aligned=0.9, chance=0.2)),
        conclude(StoodStill(1_021, 1_021, fences=1)),
        conclude(Transfers((1_000, 990), 1_021)),
    ]
    assert [one.state for one in said] == ["not full", "cannot tell", "full", "full", "full"]
    assert all(one.because for one in said) and set(STATES) == {one.state for one in said}


FLOOD = Flood(
    longest=40_000,
    waits=35_000,
    calls=38_000,
    lost_ns=34_000_000,
    spent_ns=114_000_000,
    times=1.25,
    spread=0.03,
    pauses=2,
    slow_after=0,
    onsets=1,
    misfits=0,
    seen_waiting=True,
    slow_before=0,
    before=1,
    alone=True,
    no_cpu=0.0,
)


@pytest.mark.parametrize(
    ("changed", "state"),
    [
        ({}, "full"),
        ({"misfits": 1}, "not full"),  # calls became slow with a slot
        ({"onsets": 0, "seen_waiting": False}, "not full"),  # the host is what is slow
        ({"lost_ns": 5_000_000}, "not full"),
        ({"spread": 0.9}, "not full"),
        ({"alone": False}, "not full"),
        ({"pauses": 30, "slow_after": 25}, "not full"),
        ({"no_cpu": 0.3}, "cannot tell"),
    ],
)
def test_a_flood_is_a_full_queue_by_all_its_marks_alone(changed: dict[str, object], state: str) -> None:
    from dataclasses import replace

    assert conclude(replace(FLOOD, **changed)).state == state  # type: ignore[arg-type]
