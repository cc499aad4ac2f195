"""Whether adapters fit a release of a server, told from its source: no import, none of its dependencies, no GPU."""

from __future__ import annotations

import ast
import inspect
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvprobe.instrument import published, registry
from kvprobe.instrument.adapter import WAITING, Adapter, Target

if TYPE_CHECKING:
    pass

__all__ = ["newest", "problem", "releases", "table"]

Defined = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def _file(root: Path, module: str) -> Path | None:
    base = root.joinpath(*module.split("."))
    return next((path for path in (base.with_suffix(".py"), base / "__init__.py") if path.exists()), None)


def _names(body: list[ast.stmt]) -> Iterator[tuple[str, ast.stmt]]:
    """What a module or class body binds, looking into `if`, `try` and `with`; later bindings come later."""
    for node in body:
        if isinstance(node, Defined):
            yield node.name, node
        elif isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                yield alias.asname or alias.name.partition(".")[0], node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Name):
                    yield target.id, node
        else:
            for part in ("body", "orelse", "finalbody"):
                yield from _names(getattr(node, part, []))
            for handler in getattr(node, "handlers", []):
                yield from _names(handler.body)


def _parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[inspect.Parameter]:
    kinds, given = inspect.Parameter, node.args
    plain = [*given.posonlyargs, *given.args]
    empty = [None] * (len(plain) - len(given.defaults))
    found: list[tuple[str, Any, ast.expr | None]] = []
    for one, default in zip(plain, [*empty, *given.defaults], strict=True):
        found.append((one.arg, kinds.POSITIONAL_OR_KEYWORD, default))
    if given.vararg:
        found.append((given.vararg.arg, kinds.VAR_POSITIONAL, None))
    found += [(one.arg, kinds.KEYWORD_ONLY, d) for one, d in zip(given.kwonlyargs, given.kw_defaults, strict=True)]
    if given.kwarg:
        found.append((given.kwarg.arg, kinds.VAR_KEYWORD, None))
    return [kinds(name, kind, default=kinds.empty if d is None else d) for name, kind, d in found]


def problem(target: Target, root: Path) -> str | None:
    """As `Target.problem`, from the source under `root`. A module that is missing is a problem, too."""
    path = _file(root, target.module)
    if path is None:
        return f"{target.module} does not exist"
    body: list[ast.stmt] = ast.parse(path.read_text()).body
    found: ast.stmt | None = None
    inherits = False
    for part in target.path.split("."):
        found = dict(_names(body)).get(part)
        if found is None:
            if target.optional or part == "__init__" or (inherits and target.parameters is None):
                return None
            return f"{target} does not exist"
        if not isinstance(found, Defined):  # imported or assigned: it is there, its own file says more
            return None
        body = found.body
        inherits = isinstance(found, ast.ClassDef) and bool(found.bases)
    if isinstance(found, ast.FunctionDef | ast.AsyncFunctionDef):
        return target.mismatch(_parameters(found))
    return None


def _fit(kind: type[Adapter], version: str, root: Path) -> str:
    """Why an adapter does not fit, or "". Modules come and go: one that is complete is enough."""
    state = kind.forecast((kind.distributions[0], version))
    if state.state != WAITING:
        return str(state)
    why = []
    for module in dict.fromkeys(target.module for target in kind.targets):
        problems = [problem(target, root) for target in kind.targets if target.module == module]
        why += [next(filter(None, problems), "")]
    gone = [text for text in why if text.endswith(" does not exist") and ":" not in text]
    if len(gone) == len(why):
        return f"does not fit: {gone[0]}"
    return next((f"does not fit: {text}" for text in why if text and text not in gone), "")


def _source(server: str, version: str) -> Path:
    """The files that the adapters of a server look at."""
    distribution = registry.SERVERS[server].distributions[0]
    modules = {target.module for kind in registry.adapter_classes(server) for target in kind.targets}
    members = [f"{module.replace('.', '/')}{end}" for module in sorted(modules) for end in (".py", "/__init__.py")]
    root = published.tree(distribution, version, *members)
    assert root is not None
    return root


def releases(server: str) -> list[str]:
    """Every released version in the range of a server's line in the table, oldest first."""
    from packaging.specifiers import SpecifierSet
    from packaging.version import Version

    line = registry.SERVERS[server]
    found = map(Version, published.versions(line.distributions[0]))
    return [str(version) for version in sorted(SpecifierSet(line.versions).filter(found))]


def newest(server: str) -> tuple[str, dict[str, str]]:
    """The newest release of a server, and for each adapter "" where it fits, else why not.

    Raises:
        KvprobeError: the package index cannot be asked.
    """
    version = published.versions(registry.SERVERS[server].distributions[0])[0]
    root = _source(server, version)
    return version, {kind.name: _fit(kind, version, root) for kind in registry.adapter_classes(server)}


def table(server: str) -> Iterator[tuple[str, str, str]]:
    """For each adapter of a server: name, releases that it fits, and releases of its range that it does not fit.

    Raises:
        KvprobeError: the package index cannot be asked.
    """
    seen = {version: _source(server, version) for version in releases(server)}
    for kind in registry.adapter_classes(server):
        fits = {version: _fit(kind, version, root) for version, root in seen.items()}
        runs = [(key, list(group)) for key, group in itertools.groupby(fits, key=lambda v: fits[v])]
        good = [run[0] if len(run) == 1 else f"{run[0]} to {run[-1]}" for key, run in runs if not key]
        bad = [
            f"{run[0]} to {run[-1]}: {key.removeprefix('does not fit: ')}"
            for key, run in runs
            if key.startswith("does not fit")
        ]
        yield kind.name, ", ".join(good), "; ".join(bad)
