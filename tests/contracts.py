"""A Protocol's functions, for tests that hold a module to it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any


def functions(contract: type) -> dict[str, Callable[..., Any]]:
    """What the Protocol declares itself, by name."""
    return {name: one for name, one in vars(contract).items() if inspect.isfunction(one) and not name.startswith("_")}


def shape(function: Callable[..., Any]) -> tuple[tuple[tuple[str, Any], ...], Any]:
    """Parameters with their annotations, `self` left out, and what is returned."""
    found = inspect.signature(function)
    parameters = [one for one in found.parameters.values() if one.name != "self"]
    return tuple((one.name, one.annotation) for one in parameters), found.return_annotation
