"""Mutants of Python: cosmic-ray's operators, on the files whose tests are quick."""

from __future__ import annotations

from collections.abc import Iterator

from .mutant import ROOT, Mutant, Namer

# file -> the tests that run it
FILES = {
    "kvprobe/offload/callbacks.py": ["tests/offload/test_callbacks.py"],
    "kvprobe/offload/cache.py": ["tests/offload/test_cache.py"],
    "kvprobe/offload/dedup.py": ["tests/offload/test_dedup.py"],
    "kvprobe/launchqueue/judge.py": ["tests/launchqueue/test_judge.py"],
    "kvprobe/launchqueue/window.py": ["tests/launchqueue"],
    "kvprobe/recordings/window.py": ["tests/recordings/test_window.py"],
    "kvprobe/recordings/occupancy.py": ["tests/recordings"],
    "kvprobe/recordings/kineto.py": ["tests/recordings/test_kineto.py"],
    "kvprobe/recordings/kvprobe_run.py": ["tests/recordings/test_kvprobe_run.py"],
}
OPERATORS = (
    "ReplaceComparisonOperator_Lt_LtE",
    "ReplaceComparisonOperator_LtE_Lt",
    "ReplaceComparisonOperator_Gt_GtE",
    "ReplaceComparisonOperator_GtE_Gt",
    "ReplaceComparisonOperator_Eq_NotEq",
    "ReplaceComparisonOperator_NotEq_Eq",
    "ReplaceBinaryOperator_Add_Sub",
    "ReplaceBinaryOperator_Sub_Add",
    "ReplaceBinaryOperator_Mul_FloorDiv",
    "ReplaceAndWithOr",
    "ReplaceOrWithAnd",
    "AddNot",
    "ReplaceTrueWithFalse",
    "ReplaceFalseWithTrue",
    "ReplaceBreakWithContinue",
    "ReplaceContinueWithBreak",
    "ZeroIterationForLoop",
    "NumberReplacer",
)


def mutants() -> Iterator[Mutant]:
    """All of these files.

    Raises:
        ImportError: cosmic-ray is not installed (`pip install -e '.[mutants]'`).
    """
    for file in FILES:
        if (ROOT / file).exists():
            yield from of_file(file)


def of_file(file: str) -> Iterator[Mutant]:
    """All of one file."""
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator

    text, namer = (ROOT / file).read_text(), Namer(file)
    lines = text.split("\n")
    for operator in OPERATORS:
        occurrence = 0
        while (whole := mutate_code(text, get_operator(f"core/{operator}")(), occurrence)) is not None:
            occurrence += 1
            changed = whole.split("\n")
            at = next((i for i, pair in enumerate(zip(lines, changed, strict=False)) if pair[0] != pair[1]), None)
            if at is None:
                continue
            old, new = lines[at].strip(), changed[at].strip()
            yield Mutant(file, at + 1, operator, old, new, namer.name(operator, old, new), whole)
