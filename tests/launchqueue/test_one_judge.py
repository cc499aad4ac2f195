"""Whether a queue was full is decided in `launchqueue/judge.py`, and what a queue takes stands in `constants.py`."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path
from typing import get_args

import pytest

from kvprobe.diagnosis import CAUSES
from kvprobe.launchqueue import constants, evidence
from kvprobe.launchqueue.evidence import Flood, Plateau, StoodStill, Transfers
from kvprobe.launchqueue.judge import _RULES, STATES, conclude

PACKAGE = Path(__file__).parents[2] / "kvprobe"
FILES = [*sorted(PACKAGE.rglob("*.py")), *sorted(PACKAGE.parent.glob("patches/*.py"))]
JUDGE = {PACKAGE / "launchqueue" / name for name in ("judge.py", "constants.py", "levels.py")}
DEPTH = re.compile(r"depth|deepest|outstanding|ceiling|plateau", re.IGNORECASE)
MEASURED = {253, 1_021, 1_022, 1_026, 1_135, 1_141, 4_021, 4_093, 4_100, 8_021, 8_168, 32_021}
VALUES = {"max", "min", "median", "percentile", "int", "float", "round", "abs"}  # of a depth: a depth

# Numbers that stand beside a depth, and why that is no second decision.
BESIDE_A_DEPTH = {
    ("process_tracking.py", "depth < 64"): "a depth of folders",
    ("calibration.py", "found.capacity >= found.depth >= SMALLEST"): "else the count failed",
    ("streams.py", "top < 16"): "a chart of fewer columns shows nothing",
    ("streams.py", "bins < keys[-1] * 0.5"): "calls that a chart's words compare",
    ("streams.py", "bins >= keys[-1] * 0.95"): "the same",
}

# What readers and causes take of the judge's figures, and what for. Nobody else may have one of them.
TAKEN = {
    "recordings/inferred.py": {
        "COPY_DEPTHS": "what the environment makes of them is evidence",
        "USUAL_DEPTHS": "the same",
        "REAL_DEPTH": "the same",
        "SCALED_DEPTH": "how long a queue needs to drain",
        "FLOOD_CALLS": "which stretches of calls are looked at",
        "OVER_TIMES": "how far a queue is followed that is followed at its calls' pace",
        "REACHED_SHARE": "where its slow calls set the count right",
    },
    "recordings/flooded.py": {"OVER_TIMES": "calls beyond what a queue takes", "REAL_DEPTH": "how many are quick"},
    "recordings/marked_depth.py": {"BAND_SHARE": "how wide the band is in which counts gather"},
    "recordings/numbered.py": {"BATCH_SLOTS": "slots of a batch"},
    "recordings/occupancy.py": {"LEAST_DEPTH": "a batch that finds the queue empty waits for its own descriptors"},
    "diagnosis/queue_full.py": {
        "CHANNEL_SLOTS": "what a channel takes where none was counted",
        "LEAST_DEPTH": "below it nothing is measured",
        "MANY_STREAMS": "from how many on streams are looked at together",
        "REAL_DEPTH": "is evidence",
    },
    "diagnosis/fences.py": {"MANY_STREAMS": "the same"},
    "diagnosis/launch_queue_saturation.py": {"CHANNEL_SLOTS": "what a channel takes where none was counted"},
    "diagnosis/deeper_queue.py": {"SCALED_ALREADY": "a deeper queue is proposed once"},
    "commands/doctor.py": {"COPY_DEPTHS": "a counted depth is said to be small"},
}


def depth_figures() -> set[str]:
    """Names of the constants that tell how full a queue is: all of their section, by its heading."""
    text = (PACKAGE / "launchqueue" / "constants.py").read_text()
    section = text.split("# -- how full a queue is")[1].split("\n# -- ")[0]
    return {name for line in re.findall(r"(?m)^([A-Z_, ]+) =", section) for name in line.split(", ")}


def numbers_of(tree: ast.AST) -> set[str]:
    """Names that stand for a number above 1, or for several, wherever they are set."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            numbers = [one.value for one in ast.walk(node.value) if isinstance(one, ast.Constant)]
            plain = not any(isinstance(one, (ast.Call, ast.Name, ast.Attribute)) for one in ast.walk(node.value))
            if plain and any(type(one) in (int, float) and one > 1 for one in numbers):
                found |= {one.id for to in node.targets for one in ast.walk(to) if isinstance(one, ast.Name)}
    return found


def tells_depth(node: ast.AST, known: set[str]) -> bool:
    """Whether an expression is a depth by its name, or is made of one by what leaves it a depth."""
    if isinstance(node, ast.Name):
        return node.id in known or bool(DEPTH.search(node.id))
    if isinstance(node, ast.Attribute):
        return bool(DEPTH.search(node.attr)) or (node.attr in VALUES and tells_depth(node.value, known))
    if isinstance(node, ast.Call):
        name = node.func.attr if isinstance(node.func, ast.Attribute) else ast.unparse(node.func)
        made_of = [node.func, *node.args] if name in VALUES else []
        return bool(DEPTH.search(name)) or any(tells_depth(one, known) for one in made_of)
    if isinstance(node, ast.Subscript):
        return tells_depth(node.value, known)
    if isinstance(node, (ast.BinOp, ast.BoolOp, ast.IfExp)):
        return any(tells_depth(one, known) for one in ast.iter_child_nodes(node))
    return False


def depths(tree: ast.Module) -> list[str]:
    """Where a module compares what is outstanding with a number of its own, or knows what a queue takes."""
    found = [
        ast.unparse(node)
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and type(node.value) is int and node.value in MEASURED
    ]
    numbers = numbers_of(tree)
    scopes = [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.Module))]
    for scope in scopes:
        renamed: set[str] = set()
        for node in ast.walk(scope) if isinstance(scope, ast.FunctionDef) else ():
            if isinstance(node, ast.Assign) and tells_depth(node.value, renamed):
                renamed |= {to.id for to in node.targets if isinstance(to, ast.Name)}
        for node in ast.walk(scope):
            if isinstance(node, ast.Compare):
                sides = [node.left, *node.comparators]
                if any(is_own(one, numbers) for one in sides) and any(tells_depth(one, renamed) for one in sides):
                    found.append(ast.unparse(node))
    return sorted(set(found))


def is_own(node: ast.AST, numbers: set[str]) -> bool:
    """Whether an expression is a number above 1 or a part or a multiple of something by one that stands there."""
    if isinstance(node, ast.Constant):
        return type(node.value) in (int, float) and node.value > 1
    if isinstance(node, ast.Name):
        return node.id in numbers
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Mult, ast.Div)):
        return any(
            isinstance(one, ast.Constant) and type(one.value) is float for one in (node.left, node.right)
        ) or any(isinstance(one, ast.Name) and one.id in numbers for one in (node.left, node.right))
    return False


def decisions(tree: ast.Module) -> list[str]:
    """What in a module sets a conclusion by itself, or calls blocked what no conclusion of the judge's says it of."""
    found = []
    asked = {
        to.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and ast.unparse(node.value).startswith("conclude(")
        for to in node.targets
        if isinstance(to, ast.Name)
    }
    for node in ast.walk(tree):
        targets = node.targets if isinstance(node, ast.Assign) else ()
        for target in targets:
            names = target.elts if isinstance(target, ast.Tuple) else [target]
            set_ = {one.attr for one in names if isinstance(one, ast.Attribute)}
            values = {one.value for one in ast.walk(node.value) if isinstance(one, ast.Constant)}
            if values & set(STATES) and set_ & {"verdict", "state", "conclusion"}:
                found.append(ast.unparse(node))
            if "blocked" in set_ and "conclusion" not in set_:
                found.append(ast.unparse(node))
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            given = {word.arg: word.value for word in node.keywords}
            states = {ast.unparse(given[word]) for word in ("verdict", "state", "conclusion") if word in given}
            if name.endswith("QueueConclusion") or states & {repr(state) for state in STATES}:
                found.append(ast.unparse(node))
            if name.endswith(".blocked_by"):
                by = ast.unparse(node.args[0]) if node.args else ""
                if not (by in asked or by.startswith("conclude(") or by.endswith(".conclusion")):
                    found.append(ast.unparse(node))
    return found


def taken(tree: ast.Module) -> set[str]:
    """What a module imports of the judge's figures; all of them where it imports the module itself."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("kvprobe.launchqueue"):
            names = {alias.name for alias in node.names}
            found |= depth_figures() if "constants" in names else names & depth_figures()
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_nobody_but_the_judge_decides_or_knows_how_deep_a_queue_is(path: Path) -> None:
    if path in JUDGE:
        return
    tree = ast.parse(path.read_text())
    assert not decisions(tree)
    assert not [one for one in depths(tree) if (path.name, one) not in BESIDE_A_DEPTH]
    assert taken(tree) == set(TAKEN.get(f"{path.parent.name}/{path.name}", ()))


OF_C = [path for path in sorted((PACKAGE / "native").rglob("*.[ch]")) if path.parent.name != "hostrt"]  # is the queue
C_COMPARES = re.compile(r"[^;{}?]*\b\w*(?:depth|deepest|outstanding|ceiling)\w*\b[^;{}?]*", re.IGNORECASE)
C_NUMBER = r"(?<![&|] )(?<!\|= )(?:(?<![\w.])(?:[2-9]|\d\d+|\d+\.\d+)\b|\b(?:{})\b)"
C_DECIDES = re.compile(r"\b\w*(?:verdict|saturat|conclu|is_full|queue_full|queue_is)\w*\b", re.IGNORECASE)

# What native code compares with a depth, or calls by such a name, and why that is no second decision.
C_MEASURES = {
    ("queues.c", "LEAST_DEPTH"): "nothing is measured below it, as in recordings/occupancy.py",
    ("queues.c", "0.9"): "which calls are shallow, as launchqueue/levels.py says",
    ("queues.c", "LEAST_BAND"): "which calls are at the top, the same",
    ("submitter.c", "4"): "how many slots the submitter leaves free: it never fills a queue",
    ("submitter.c", "32"): "the same",
    ("mark_reader.c", "4"): "how many marks may stand in a queue before one is read",
    ("mark_reader.c", "20"): "how often the end of a process waits for its marks",
    ("mark_reader.c", "2"): "the same",
    ("marks.c", "2"): "how many marks may stand in a queue",
    ("marks.c", "MARK_FEW"): "the same",
    ("sqlite.c", "MOST_DEPTH"): "of a tree of pages",
}
C_WORDS = {
    ("relocate.c", "1026"): "a kind of relocation",
    ("cure_account.c", "kvp_verdict"): "whether a cure paid",
    ("cure_account.h", "kvp_verdict"): "the same",
    ("cures.c", "kvp_verdict"): "the same",
    ("cures.c", "verdict"): "the same",
    ("gate.c", "queue_full"): "the host runtime's own count of calls that met a full queue",
}


def c_code(text: str) -> str:
    """C without its comments and texts."""
    return re.sub(r'/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\])*"', "", text, flags=re.DOTALL)


def c_numbers(code: str) -> set[str]:
    """Names that stand for a number."""
    return set(re.findall(r"\b([A-Z][A-Z_0-9]+) (?:= )?\d", code))


@functools.cache
def of_headers() -> set[str]:
    return {name for path in OF_C if path.suffix == ".h" for name in c_numbers(c_code(path.read_text()))}


def c_decisions(text: str) -> set[str]:
    """Numbers that C compares with a depth, and words by which it would say that a queue is full."""
    code = c_code(text)
    number = re.compile(C_NUMBER.format("|".join(sorted(c_numbers(code) | of_headers()))))
    found = set(C_DECIDES.findall(code)) | {one for one in re.findall(r"\b\d+\b", code) if int(one) in MEASURED}
    for statement in C_COMPARES.findall(code):
        if re.search(r"(?<![<>-])[<>](?![<>])=?|[!=]=", statement.replace("->", ".")):
            found |= set(number.findall(statement))
    return found


@pytest.mark.parametrize("path", OF_C, ids=lambda path: path.name)
def test_native_code_measures_and_decides_nothing(path: Path) -> None:
    found = c_decisions(path.read_text())
    known = {what for file, what in (*C_MEASURES, *C_WORDS) if file == path.name}
    assert not found - known
    assert not known - found, "take it from the list"


@pytest.mark.parametrize(
    "text",
    [
        "queue.verdict = 'full'",
        "queue.conclusion = QueueConclusion(state='full', because='')",
        "one = replace(one, state='full')",
        "queue.blocked_by(NOT_ASKED, blocked, ns, 'labels')",
        "queue.blocked = slow",
    ],
)
def test_a_decision_is_found(text: str) -> None:
    assert decisions(ast.parse(text))
    asked = "found = conclude(Labels(1, 2, 3, False))\nqueue.blocked_by(found, blocked, ns, 'labels')"
    assert not decisions(ast.parse(asked))


@pytest.mark.parametrize(
    "text",
    [
        "if deepest >= 900: pass",
        "if x < 0.9 * depth: pass",
        "DEEP = 1021",
        "DEEP = 900\nif queue.depth.max() >= DEEP: pass",
        "def f(depth):\n    most = int(depth.max())\n    return most >= 900",
        "def f(depth):\n    few = 900\n    return depth[0] > few",
    ],
)
def test_a_depth_of_ones_own_is_found(text: str) -> None:
    assert depths(ast.parse(text))
    assert not depths(ast.parse("if at_top(outstanding, depth) and len(depth) > 3 and depth > 0: pass"))


@pytest.mark.parametrize(
    "text",
    [
        "if (out->deepest >= 1000) out->slow = 5;",
        "enum { DEEP = 900 };\nif (out->deepest >= DEEP) out->slow = 5;",
        "out->is_full = out->slow > 5;",
        "x = q->depth > 0.9 * most;",
        "static const int takes = 1021;",
    ],
)
def test_a_decision_of_c_is_found(text: str) -> None:
    assert c_decisions(text)
    assert not c_decisions('/* full at 1021 */ if (w->depth[i] >= top && "depth > 900") out->depth++;')


def test_what_modules_take_of_the_figures_is_there() -> None:
    assert {name for some in TAKEN.values() for name in some} < depth_figures()
    assert all((PACKAGE / path).exists() for path in TAKEN)


def reasons(tree: ast.Module) -> set[str]:
    """What auto gives as a reason for a change: names, those that a variable is chosen from in place of it."""
    chosen: dict[str, ast.expr] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and isinstance(node.value, ast.IfExp):
            chosen[node.targets[0].id] = node.value
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "self._found":
            said = chosen.get(ast.unparse(node.args[0]), node.args[0])
            found |= {ast.unparse(one) for one in ([said.body, said.orelse] if isinstance(said, ast.IfExp) else [said])}
    return found


def test_every_kind_of_evidence_is_judged_and_auto_gives_causes_of_the_diagnosis_as_its_reasons() -> None:
    assert {one.__name__ for one in _RULES} == set(evidence.__all__) - {"Evidence"}
    assert set(get_args(evidence.Evidence)) == set(_RULES)
    given = reasons(ast.parse((PACKAGE / "offload" / "auto.py").read_text()))
    assert given == {"SATURATION", "COSTLY_BATCH", "SMALL_COPIES"}
    assert {getattr(constants, name) for name in given} < set(CAUSES)
    assert reasons(ast.parse("self._found('slow', why)")) == {"'slow'"}


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
