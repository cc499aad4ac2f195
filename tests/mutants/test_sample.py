"""A few deliberate bugs, each caught within seconds; `make mutants` puts in some hundred."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from . import c_source
from .checks import Tree, checks_of
from .mutant import ROOT, Mutant

# file, line as it is, line as it becomes: one for each sort of promise
BUGS = {
    "a wake-up is missed": (
        "submitter_thread.c",
        "if (atomic_load(&s->waiters)) wake_all(&s->changed);",
        "if (atomic_load(&s->waiters) > 64) wake_all(&s->changed);",
    ),
    "marks take no places": (
        "submitter.c",
        "uint32_t places = a->places + (event != NULL) + (start != NULL);",
        "uint32_t places = a->places;",
    ),
    "a recorded fence is shared": (
        "fences.c",
        "if (open && *open == f) *open = NULL;\n        ++*standing;",
        "++*standing;",
    ),
    "an event is recorded anew": ("completion.c", "forget_event(s, dir->flying, m->sequence);", ";"),
}


@pytest.fixture(scope="module")
def tree() -> Iterator[Tree]:
    made = Tree()
    yield made
    made.close()


@pytest.mark.parametrize("what", BUGS)
def test_a_broken_promise_is_caught_in_seconds(tree: Tree, what: str) -> None:
    name, old, new = BUGS[what]
    file = f"kvprobe/native/src/{name}"
    text = (ROOT / file).read_text()
    assert text.count(old) == 1
    mutant = Mutant(file, 0, what, old, new, what, text.replace(old, new))
    assert tree.apply(mutant)
    try:
        assert any(tree.run(check) for check in checks_of(mutant, quick=True))
    finally:
        tree.restore(mutant)


@pytest.mark.slow
def test_the_program_as_it_is_passes_what_catches_mutants(tree: Tree) -> None:
    as_it_is = next(c_source.mutants())
    assert [tree.run(check) for check in checks_of(as_it_is, quick=True)] == [None] * 3


def test_a_name_outlives_other_changes_of_the_file() -> None:
    names = [mutant.name for mutant in c_source.mutants()]
    assert len(names) > 1000 and len(set(names)) == len(names)
