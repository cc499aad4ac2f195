"""Each file of a cause offers what `Cause` says, spelled and called as it says."""

from __future__ import annotations

import inspect
from importlib import import_module

import pytest

from kvprobe.diagnosis import CAUSES
from kvprobe.diagnosis.cause import Cause, load_cause
from tests.contracts import functions, shape

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
        assert shape(own[member]) == shape(FUNCTIONS[member]), member
    alike = {key for key, one in own.items() if not key.startswith("_") and shape(one) in SHAPES}
    alike -= FOR_OTHERS
    assert "find" in own and alike <= FUNCTIONS.keys(), f"{name} has functions like a cause's, named otherwise"
    loaded = load_cause(name)
    assert name == loaded.CAUSE and isinstance(loaded.OF_EXECUTIONS, bool)
