"""Mutants of Python: cosmic-ray's operators, on the files whose tests are quick."""

from __future__ import annotations

from collections.abc import Iterator

from .mutant import ROOT, Mutant, Namer

# file -> what pytest is given to run it, in seconds: the judge, the account, the readers, the engine
FILES = {
    "kvprobe/launchqueue/judge.py": ["tests/launchqueue/test_judge.py"],
    "kvprobe/launchqueue/baseline.py": ["tests/launchqueue/test_baseline.py"],
    "kvprobe/launchqueue/call_counts.py": ["tests/launchqueue/test_baseline.py"],
    "kvprobe/account/stretches.py": ["tests/account/test_stretches.py"],
    "kvprobe/account/chain.py": ["tests/account/test_chain.py"],
    "kvprobe/account/lines.py": ["tests/account/test_lines.py"],
    "kvprobe/recordings/intervals.py": ["tests/recordings/test_intervals.py"],
    "kvprobe/recordings/serving.py": ["tests/recordings/test_serving.py", "-k", "not million"],
    "kvprobe/recordings/occupancy.py": ["tests/recordings/test_occupancy.py"],
    "kvprobe/recordings/merge.py": ["tests/recordings/test_merge.py"],
    "kvprobe/recordings/nsys_sqlite.py": ["tests/recordings/test_nsys_sqlite.py"],
    "kvprobe/recordings/kineto.py": ["tests/recordings/test_kineto.py"],
    "kvprobe/recordings/kvprobe_run.py": ["tests/recordings/test_kvprobe_run.py"],
    "kvprobe/offload/engine.py": ["tests/offload/test_engine.py"],
    "kvprobe/offload/auto.py": ["tests/offload/test_auto.py"],
    "kvprobe/offload/wire.py": ["tests/offload/test_wire.py"],
    "kvprobe/offload/cells.py": ["tests/offload/test_cells.py"],
    "kvprobe/offload/packed.py": ["tests/offload/test_packed.py"],
    "kvprobe/offload/callbacks.py": ["tests/offload/test_callbacks.py"],
    "kvprobe/offload/cache.py": ["tests/offload/test_cache.py"],
    "kvprobe/offload/eviction.py": ["tests/offload/test_cache.py"],
    "kvprobe/offload/dedup.py": ["tests/offload/test_dedup.py"],
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


Place = tuple[str, str, int]  # file, operator, and which of the places in the file where it applies


def places() -> Iterator[Place]:
    """Where an operator applies in these files; a mutant is made (`made`) where one is wanted, for that takes long.

    Raises:
        ImportError: cosmic-ray is not installed (`pip install -e '.[mutants]'`).
    """
    from cosmic_ray.ast import ast_nodes, get_ast
    from cosmic_ray.plugins import get_operator

    for file in FILES:
        text = (ROOT / file).read_text()
        lines, nodes = text.split("\n"), list(ast_nodes(get_ast(text)))
        for name in OPERATORS:
            operator = get_operator(f"core/{name}")()
            found = [begin for node in nodes for begin, _ in operator.mutation_positions(node)]
            for occurrence, (line, column) in enumerate(found):
                if not lines[line - 1][:column].endswith("strict="):  # an assertion, which holds either way
                    yield file, name, occurrence


def made(place: Place) -> Mutant:
    """The mutant of a place."""
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator

    file, name, occurrence = place
    text = (ROOT / file).read_text()
    whole = mutate_code(text, get_operator(f"core/{name}")(), occurrence)
    lines, changed = text.split("\n"), whole.split("\n")
    at = next((i for i, pair in enumerate(zip(lines, changed, strict=False)) if pair[0] != pair[1]), 0)
    old, new = lines[at].strip(), changed[at].strip()
    namer = Namer(file)
    for line in lines[: at + 1]:  # which of equal lines it is
        named = namer.name(name, old, new) if line.strip() == old else ""
    return Mutant(file, at + 1, name, old, new, named, whole)
