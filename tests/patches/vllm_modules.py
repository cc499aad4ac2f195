"""Loads single modules of a tree of vLLM, with stubs for what they import and do not use."""

from __future__ import annotations

import importlib.util
import sys
import types
from pathlib import Path
from typing import Any


def stub(name: str, **names: Any) -> types.ModuleType:
    """A module of this name with these names in it, and its parents."""
    module = types.ModuleType(name)
    module.__dict__.update(names)
    module.__path__ = []
    sys.modules[name] = module
    parent, _, child = name.rpartition(".")
    if parent:
        if parent not in sys.modules:
            stub(parent)
        setattr(sys.modules[parent], child, module)
    return module


def load(root: Path, name: str) -> types.ModuleType:
    """A module of that tree under its own name; its parents are stubs, so that they import nothing."""
    spec = importlib.util.spec_from_file_location(name, root / (name.replace(".", "/") + ".py"))
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    parent, _, child = name.rpartition(".")
    if parent not in sys.modules:
        stub(parent)
    setattr(sys.modules[parent], child, module)
    spec.loader.exec_module(module)
    return module
