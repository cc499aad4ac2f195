"""The engine's options: by keyword, each with a default, refused in words where they mean nothing."""

from __future__ import annotations

import dataclasses

import pytest

from kvprobe import EngineOptions
from kvprobe.errors import UsageError
from kvprobe.offload.options import EngineKeywords


def test_a_type_checker_knows_exactly_the_options_that_there_are():
    assert list(EngineKeywords.__annotations__) == [field.name for field in dataclasses.fields(EngineOptions)]


def test_each_option_is_described():
    for field in dataclasses.fields(EngineOptions):
        assert f"{field.name}: " in EngineOptions.__doc__


def test_an_engine_takes_options_by_keyword_and_no_others(bench):
    b = bench()
    with b.engine(policy="pooled", bound=2) as engine:
        assert engine.policy == "pooled"
        assert len(engine.streams["load"]) == 2
    with pytest.raises(TypeError, match="polcy"):
        b.engine(polcy="pooled")


@pytest.mark.parametrize("bound", [0, -1])
def test_what_no_engine_can_do_is_refused_before_there_is_one(bound):
    with pytest.raises(UsageError, match="at least 1"):
        EngineOptions(bound=bound)
