"""Mutants of C: an operator turned round, a bound moved by one, a condition or a statement that is left out."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from .mutant import ROOT, Mutant, Namer

FILES = (
    "submitter.c",
    "submitter_thread.c",
    "completion.c",
    "events.c",
    "fences.c",
    "jobs.c",
    "copy_methods.c",
    "wire.c",
    "cells.c",
    "reserve.c",
)
# what, pattern, its replacements; the line is code of a function's body
OPERATORS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("comparison", r"(?<=[\w)\]]) < (?=[\w(])", (" <= ",)),
    ("comparison", r"(?<=[\w)\]]) > (?=[\w(])", (" >= ",)),
    ("comparison", r" <= ", (" < ",)),
    ("comparison", r" >= ", (" > ",)),
    ("comparison", r" == ", (" != ",)),
    ("comparison", r" != ", (" == ",)),
    ("logic", r" && ", (" || ",)),
    ("logic", r" \|\| ", (" && ",)),
    ("negation", r"(?<=[( ])!(?=[\w(])", ("",)),
    ("sum", r"(?<=[\w)\]]) \+ (?=[\w(])", (" - ",)),
    ("sum", r"(?<=[\w)\]]) - (?=[\w(])", (" + ",)),
    ("step", r" \+= ", (" -= ",)),
    ("step", r" -= ", (" += ",)),
    ("step", r"\+\+", ("--",)),
    ("step", r"(?<![\w-])--(?=[*\w(])|(?<=[\w\]])--(?=[;\])])", ("++",)),
    ("number", r"\b1\b(?!u?ll)", ("2", "0")),
    ("number", r"\b2\b", ("1", "3")),
    ("value", r"\btrue\b", ("false",)),
    ("value", r"\bfalse\b", ("true",)),
    ("return", r"\breturn 0;", ("return 1;",)),
    ("loop", r"\bbreak;", ("continue;",)),
    ("add", r"\batomic_fetch_add\(", ("atomic_fetch_sub(",)),
    ("add", r"\batomic_fetch_sub\(", ("atomic_fetch_add(",)),
)
STATEMENT = re.compile(r"\s+[\w*&(][^{}]*;\s*(/\*.*\*/)?")
KEPT = re.compile(
    r"\s*(return|break|continue|goto|else|case|for|while|do|if|const|struct|static|typedef)\b"
    r"|\s+[\w*]+ \*?\w+( =|;|\[|,)|.*\bkvp_must\b"
)
CONDITION = re.compile(r"\bif \((?P<all>.*)\)(?P<rest> [^()]*;| \{)\s*(/\*.*\*/)?$")
HEADING = re.compile(r"(?!struct \w+ \{|typedef|enum)[\w *]*?\b(?P<name>\w+)\((?!.*;$)")
# the smaller or the larger of two: where they are equal either will do, so that < and <= are the same
CLAMPS = (
    re.compile(
        r"if \((?:[^;]* && )?(?P<a>[^;&|]+?)(?P<less> [<>] )(?P<b>[^;&|]+?)\) "
        r"(?:(?P=a) = (?P=b)|(?P=b) = (?P=a));"
    ),
    re.compile(
        r"(?P<a>[^?:(=;]+?)(?P<less> [<>] )(?P<b>[^?:=;]+?) \? "
        r"(?:(?P=a) : (?P=b)|(?P=b) : (?P=a))(?![\w\[(.-])"
    ),
)
PACING = Path(__file__).with_name("pacing.txt")
COMMENT = re.compile(r"/\*.*?\*/|\"[^\"]*\"")


def mutants() -> Iterator[Mutant]:
    """All of the engine's C that is behaviour, in the order of its files and lines."""
    for name in FILES:
        yield from of_file(f"kvprobe/native/src/{name}")


def of_file(file: str) -> Iterator[Mutant]:
    """All of one file, but for its pacing.

    Raises:
        ValueError: the list of pacing names a function or a line that is not there.
    """
    lines = (ROOT / file).read_text().split("\n")
    namer, paced, met = Namer(file), pacing(Path(file).name), set()
    function, inside, open_comment = "", False, False
    for number, line in enumerate(lines):
        if line and not line[0].isspace():
            heading = HEADING.match(line)
            function, inside = (heading["name"] if heading else ""), False
        if function and not inside:  # parameters may take several lines
            inside = line.endswith("{")
            function = "" if line.endswith(";") else function
            continue
        comment = open_comment or line.lstrip().startswith("/*")
        open_comment = comment and "*/" not in line
        if not inside or comment or not line.strip() or line.lstrip().startswith(("#", "*", "kvp_must")):
            continue
        old = line.strip()
        if place := {function, old} & paced.keys():
            met |= place
            continue
        for what, new in _changed(line):
            whole = "\n".join([*lines[:number], new, *lines[number + 1 :]])
            yield Mutant(file, number + 1, what, old, new.strip(), namer.name(what, old, new.strip()), whole)
    if left := paced.keys() - met:
        raise ValueError(f"{PACING.name} names what {file} does not have: {sorted(left)}")


def pacing(name: str) -> dict[str, str]:
    """Functions and lines of a file that only say how long something takes, with the reason why that is all."""
    found = [line.split(" | ") for line in PACING.read_text().splitlines() if line.startswith(f"{name} | ")]
    return {place: reason for _, place, reason in found}


def _changed(line: str) -> Iterator[tuple[str, str]]:
    blind = COMMENT.sub(lambda found: "\0" * len(found[0]), line)  # no operator is looked for in there
    clamps = {found.span("less") for pattern in CLAMPS for found in pattern.finditer(blind)}
    for what, pattern, replacements in OPERATORS:
        for found in re.finditer(pattern, blind):
            if found.span() in clamps:
                continue
            for replacement in replacements:
                yield what, line[: found.start()] + replacement + line[found.end() :]
    if condition := CONDITION.search(blind):
        start, end = condition.span("all")
        yield "condition", f"{line[:start]}!({line[start:end]}){line[end:]}"
        yield "condition", f"{line[:start]}0 && ({line[start:end]}){line[end:]}"
    if STATEMENT.fullmatch(line) and not KEPT.match(line) and blind.count("(") == blind.count(")"):
        yield "statement", line[: len(line) - len(line.lstrip())] + ";"
