"""A function can be read at a glance: how long one may be, and how much it may be handed."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MOST_LINES, MOST_PARAMETERS, MOST_LINES_OF_C = 70, 7, 80  # self and cls are not counted; a docstring is

# name -> why it may be longer, or be handed more
LONGER: dict[str, str] = {}
MORE_PARAMETERS: dict[str, str] = {
    "submit_copies": "one call of the native function, whose arguments these are",
    "offload": "settings, each with a default and given by keyword",
    "load": "settings, each with a default and given by keyword",
    "QueueTriage.__init__": "fields; dataclasses takes long to import",
    "Triage.__init__": "fields; dataclasses takes long to import",
    "timeline": "how a chart looks, each with a default and given by keyword",
}
LONGER_IN_C: dict[str, str] = {}

Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(tree: ast.AST, inside: str = "") -> Iterator[tuple[str, Function]]:
    """Every function of a module with its name, dotted where it stands in a class or another function."""
    for node in ast.iter_child_nodes(tree):
        name = f"{inside}{node.name}" if isinstance(node, (Function, ast.ClassDef)) else ""
        if isinstance(node, Function):
            yield name, node
        yield from functions(node, f"{name}." if name else inside)


def lines_of(function: Function) -> int:
    assert function.end_lineno is not None
    return function.end_lineno - function.lineno + 1


def parameters_of(function: Function) -> int:
    """How many a caller may give; of a command of the command line click gives them: each is an option or argument."""
    if any(ast.unparse(one).startswith("click.command(") for one in function.decorator_list):
        return 0
    given = function.args
    names = [one.arg for one in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    return len(names) - (names[:1] in (["self"], ["cls"]))


def functions_of_c(text: str) -> Iterator[tuple[str, int]]:
    """Name and lines of each function, by the form that clang-format gives: only its own braces stand at the margin."""
    lines = text.split("\n")
    begin, opened = 0, False
    for number, line in enumerate(lines):
        if re.match(r"[A-Za-z_]", line) and not opened:
            begin = number
        if line.endswith("{") and not opened and re.match(r"[A-Za-z_ {]", line):
            opened = True
        if line.startswith("}"):
            head = " ".join(lines[begin : number + 1]).partition("{")[0]
            name = re.search(r"(\w+)\s*\(", head)
            if opened and line == "}" and name and "=" not in head:
                yield name.group(1), number - begin + 1
            opened = False


def over(found: dict[str, int], most: int, named: dict[str, str]) -> list[str]:
    """Those over the limit that are no named exceptions, and exceptions that need no naming any more."""
    wide = {where: size for where, size in found.items() if size > most}
    names = {where.rpartition(":")[2] for where in wide}
    return [
        *(
            f"{where}: {size}, at most {most}: make two of it"
            for where, size in wide.items()
            if where.rpartition(":")[2] not in named
        ),
        *(f"{name} is no exception any more" for name in named if name not in names),
    ]


def of_python(size: object) -> dict[str, int]:
    assert callable(size)
    found: dict[str, int] = {}
    for folder in ("kvprobe", "patches"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for name, function in functions(ast.parse(path.read_text())):
                found[f"{path.relative_to(ROOT)}:{name}"] = size(function)
    return found


def test_no_function_is_too_long():
    found = over(of_python(lines_of), MOST_LINES, LONGER)
    assert not found, "lines of a function: " + "; ".join(found)


def test_no_function_is_handed_too_much():
    found = over(of_python(parameters_of), MOST_PARAMETERS, MORE_PARAMETERS)
    assert not found, "parameters of a function: " + "; ".join(found)


def test_no_function_of_the_native_part_is_too_long():
    found = {
        f"{path.relative_to(ROOT)}:{name}": lines
        for path in sorted((ROOT / "kvprobe/native").rglob("*.[ch]"))
        for name, lines in functions_of_c(path.read_text())
    }
    assert len(found) > 500  # it does see them
    long = over(found, MOST_LINES_OF_C, LONGER_IN_C)
    assert not long, "lines of a function: " + "; ".join(long)


def test_functions_of_c_are_told_from_what_looks_like_them():
    text = """static const int table[] = {
    1,
};

struct pair {
    int (*call)(int);
};

static int short_one(int a) {
    return a;
}

int over_two_lines(const char *name,
                   int b) {
    if (b) {
        return 1;
    }
    return 2;
}
"""
    assert list(functions_of_c(text)) == [("short_one", 3), ("over_two_lines", 7)]
