"""Each file of a cause offers what `Cause` says, spelled and called as it says."""

from __future__ import annotations

import inspect
import re
from importlib import import_module
from pathlib import Path

import pytest

import kvprobe.diagnosis
from kvprobe.account import Line
from kvprobe.diagnosis import CAUSES
from kvprobe.diagnosis.cause import Cause, load_cause
from tests.contracts import functions, shape

FOLDER = Path(kvprobe.diagnosis.__file__).parent
FUNCTIONS = functions(Cause)
SHAPES = {shape(one) for one in FUNCTIONS.values()}
FOR_OTHERS = {"no_addresses"}  # a reason that several causes give: no misspelt member


@pytest.mark.parametrize("name", CAUSES)
def test_a_cause_offers_what_its_contract_says(name):
    module = import_module(f"kvprobe.diagnosis.{name}")
    own = {
        key: one for key, one in vars(module).items() if inspect.isfunction(one) and one.__module__ == module.__name__
    }
    for member in FUNCTIONS.keys() & own.keys():
        assert shape(own[member]) == shape(FUNCTIONS[member]), (
            f"{name}.{member}: give it the signature that it has in kvprobe/diagnosis/cause.py, annotations included"
        )
    alike = {key for key, one in own.items() if not key.startswith("_") and shape(one) in SHAPES}
    alike -= FOR_OTHERS
    assert "find" in own, f"kvprobe/diagnosis/{name}.py has no find(joined)"
    assert alike <= FUNCTIONS.keys(), (
        f"{name}: {', '.join(sorted(alike - FUNCTIONS.keys()))}: nothing calls it; what has the signature of "
        f"{' or '.join(sorted(FUNCTIONS))} is named so, or begins with _"
    )
    loaded = load_cause(name)
    assert name == loaded.CAUSE, f"{name}: write CAUSE = cause_of(__name__)"
    assert isinstance(loaded.OF_EXECUTIONS, bool)
    assert loaded.PROVES is None or isinstance(loaded.PROVES, Line)


def test_every_file_of_a_cause_has_its_line():
    for path in sorted(FOLDER.glob("*.py")):
        if re.search(r"^CAUSE\b", path.read_text(), re.MULTILINE):
            assert path.stem in CAUSES, (
                f"{path.name} is not looked for: add its line to kvprobe/diagnosis/__init__.py:CAUSES"
            )
