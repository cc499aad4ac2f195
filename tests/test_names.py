"""What comments, docstrings and pages name exists: files of ours, and names of ours in the code.

A file counts as ours where its ending is one of ours; it is looked for from the root, from the file that names it, and
by the last parts of its path, as `interpose/marks.h`. A name is ours by its prefix.
"""

from __future__ import annotations

import ast
import functools
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = (".ci", "benchmarks", "changelog.d", "docs", "examples", "kvprobe", "patches", "reports", "tests")
ENDINGS = "py|c|h|cu|md|toml|sh|yaml|yml|js|css|html|txt|pth"
FILE = re.compile(rf"(?<![\w./{{}}<>*$~-])(?:[\w-]+/)*[\w-]+\.(?:{ENDINGS})(?![\w*<{{/-]|\.\w)")
NAME = re.compile(r"\b(?:kvp|kvt|KVP|KVT|KVHOST)_\w+|\bKVPROBE_\w+")

# Files that are no files of ours, with what they are. NAME, SERVER, CAUSE, FILE in a name stand for the reader's own.
NOT_OURS = {
    "Python.h": "of CPython",
    "malloc.h": "of the C library",
    "app.py": "a user's program",
    "my_benchmark.py": "a user's program",
    "benchmark.py": "a user's program",
    "before/report.html": "what a command in the docs makes",
    "before.html": "what a command in the docs makes",
    "out.html": "what a command in the README makes",
    "kvprobe-demo.html": "what a command in the README makes",
    "kvprobe-vllm-TIME/report.html": "what a command in the README makes",
    "kvprobe.html": "what a command in the README makes",
    "report.html": "of a run folder",
    "outcome.txt": "of a run folder",
    "build/docs/index.html": "what make docs makes",
    "reports/demo.html": "what make demo makes",
    "demo.html": "what make demo makes",
    "cache_controller.py": "of SGLang",
    "hicache.py": "of SGLang",
    "l2_transfer.py": "of SGLang",
    "pool_host/mha.py": "of SGLang",
    "pool_host/mla.py": "of SGLang",
    "sleep_mode_backend.py": "of vLLM",
}
# What CONTRIBUTING.md copies there.
NOT_OURS |= {f"tests/{where}.py": "of examples/extending" for where in (
    "diagnosis/test_slow_memsets", "recordings/test_csv_copies", "patches/test_toyserver",
)}  # fmt: skip
STANDS_FOR_ANOTHER = re.compile(r"NAME|SERVER|CAUSE|FILE")


# Python's strings and comments. Its own tokenizer finds the same, as a test holds, in ten times as long.
PYTHON = re.compile(
    r"""#[^\n]*|'{3}[^\\']*(?:(?:\\.|'(?!''))[^\\']*)*'{3}|"{3}[^\\"]*(?:(?:\\.|"(?!""))[^\\"]*)*"{3}"""
    r"""|'[^\\'\n]*(?:\\.[^\\'\n]*)*'|"[^\\"\n]*(?:\\.[^\\"\n]*)*\"""",
    re.S,
)


@functools.cache
def parts_of_python(text: str) -> tuple[list[tuple[int, str]], str]:
    """The lines of a file's comments and docstrings, numbered, and the file without them."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    lines, docstrings = [], set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, kinds) and (said := ast.get_docstring(node, clean=False)) is not None:
            docstrings.add(node.body[0].lineno)
            lines += enumerate(said.splitlines(), node.body[0].lineno)
    code, at, number = [], 0, 1
    for found in PYTHON.finditer(text):
        number += text.count("\n", at, found.start())
        code.append(text[at : found.start()])
        if found[0].startswith("#"):
            lines.append((number, found[0]))
        elif number not in docstrings:
            code.append(found[0])
        number += found[0].count("\n")
        at = found.end()
    return lines, "".join([*code, text[at:]])


def of_c(text: str) -> Iterator[tuple[int, str]]:
    for match in re.finditer(r"/\*.*?\*/|//[^\n]*", text, re.S):
        yield from enumerate(match[0].splitlines(), text.count("\n", 0, match.start()) + 1)


def of_page(text: str) -> Iterator[tuple[int, str]]:
    """Lines of a page; commands with what they print are run by a test, and may make files."""
    printed = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith("```"):
            printed = line.startswith("```console")
        elif not printed:
            yield number, line


def words_for_people(path: Path, text: str) -> Iterator[tuple[int, str]]:
    """Lines of comments, docstrings and pages, numbered."""
    if path.suffix == ".py":
        yield from parts_of_python(text)[0]
    elif path.suffix in (".c", ".h", ".cu"):
        yield from of_c(text)
    elif path.suffix == ".md":
        yield from of_page(text)
    else:
        lines = enumerate(text.splitlines(), 1)
        yield from ((number, line[line.index("#") :]) for number, line in lines if "#" in line)


def code_of(path: Path, text: str) -> str:
    """A file without its comments and docstrings."""
    if path.suffix in (".c", ".h", ".cu"):
        return re.sub(r"/\*.*?\*/|//[^\n]*", "", text, flags=re.S)
    if path.suffix == ".py":
        return parts_of_python(text)[1]
    return "" if path.suffix == ".md" else text


@pytest.fixture(scope="module")
def files() -> dict[str, str]:
    """The texts of this repository by their paths."""
    found = [path for path in ROOT.iterdir() if path.is_file()]
    for folder in FOLDERS:
        found += [path for path in (ROOT / folder).rglob("*") if path.is_file()]
    left_out = {"__pycache__", "lib", "public", "corpus"}
    endings = {f".{ending}" for ending in ENDINGS.split("|")}
    return {
        path.relative_to(ROOT).as_posix(): path.read_text(errors="replace")
        for path in found
        if path.suffix in endings | {""} and not left_out & set(path.relative_to(ROOT).parts[:-1])
    }


@pytest.fixture(scope="module")
def said(files: dict[str, str]) -> list[tuple[str, int, str]]:
    """Every line that is written for people: file, number, text."""
    kinds = (".py", ".c", ".h", ".cu", ".md", ".sh", ".toml", ".yaml")
    named = {name: text for name, text in files.items() if name.endswith(kinds) or Path(name).name == "Makefile"}
    return [(name, number, line) for name, text in named.items() for number, line in words_for_people(Path(name), text)]


def test_every_file_that_is_named_is_there(files, said):
    known = {"/".join(Path(name).parts[at:]) for name in files for at in range(len(Path(name).parts))}
    known |= {path.name for path in (ROOT / "tests" / "recordings").rglob("README.md")}
    wrong, unused = [], set(NOT_OURS)
    for name, number, line in said:
        for file in FILE.findall(line):
            unused.discard(file)
            there = file in known or (ROOT / file).exists() or (ROOT / name).parent.joinpath(file).exists()
            if not (there or file in NOT_OURS or STANDS_FOR_ANOTHER.search(file)):
                wrong.append(f"{name}:{number}: {file}")
    assert not wrong, (
        f"no such file: {'; '.join(wrong)}; where it is none of ours, say so in NOT_OURS of {Path(__file__).name}"
    )
    assert not unused, f"no longer named: take it out of NOT_OURS: {', '.join(sorted(unused))}"


def test_every_name_of_ours_is_in_the_code(files, said):
    code = set()
    for name, text in files.items():
        if Path(name).name != Path(__file__).name:  # it has names of nothing
            code |= set(re.findall(r"\w+", code_of(Path(name), text)))
    wrong = [
        f"{name}:{number}: {word}"
        for name, number, line in said
        for word in NAME.findall(line)
        # what ends with an underscore begins several names
        if word not in code and not (word.endswith("_") and any(one.startswith(word) for one in code))
    ]
    assert not wrong, "no such name in the code: " + "; ".join(wrong)


def test_names_are_found_in_what_is_written_for_people_alone():
    c = 'int kvp_one; /* kvp_cured_copy, as in\n * trace/occupance.c */ char *x = "a.h";'
    python = '"""As in judge/nothing.py."""\nx = "b.py"  # KVP_NOTHING\n'
    found = [(Path("a.c"), c), (Path("a.py"), python), (Path("Makefile"), "x: c.py # d.sh")]
    lines = [line for path, text in found for _, line in words_for_people(path, text)]
    files = [file for line in lines for file in FILE.findall(line)]
    assert sorted(files) == ["d.sh", "judge/nothing.py", "trace/occupance.c"]
    assert sorted(name for line in lines for name in NAME.findall(line)) == ["KVP_NOTHING", "kvp_cured_copy"]
    assert "kvp_cured_copy" not in code_of(*found[0]) and "KVP_NOTHING" not in code_of(*found[1])


def test_comments_are_found_as_pythons_tokenizer_finds_them():
    for name in ("tests/test_names.py", "tests/test_plain_words.py", "kvprobe/cli.py", "kvprobe/native/build.py"):
        text = (ROOT / name).read_text()
        tokens = [one for one in tokenize.generate_tokens(io.StringIO(text).readline) if one.type == tokenize.COMMENT]
        comments = [one for one in parts_of_python(text)[0] if one[1].startswith("#")]
        assert comments == [(one.start[0], one.string) for one in tokens] and comments
