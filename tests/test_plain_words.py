"""Every sentence of kvprobe does without the words and phrases of tests/words.toml, which says why."""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

ROOT = Path(__file__).parents[1]
STYLE = ROOT / "docs" / "style.md"  # it quotes what it warns of
PYTHON = sorted(path for folder in ("kvprobe", "patches", "examples") for path in (ROOT / folder).rglob("*.py"))
NATIVE = sorted(path for path in (ROOT / "kvprobe/native").rglob("*") if path.suffix in (".c", ".h", ".cu"))
MARKDOWN = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "patches/*.md", "reports/*.md", "changelog.d/*.md", "examples/**/*.md")
    for path in ROOT.glob(pattern)
    if path != STYLE
)
BANNED = [
    (re.compile(rf"(?<![\w-])(?:{one['words']})(?![\w-])", re.IGNORECASE), one["why"], one.get("code", False))
    for one in tomllib.loads((ROOT / "tests/words.toml").read_text())["banned"]
]


def python_texts(source: str) -> Iterator[tuple[int, str]]:
    """(line, text) of each string and each block of comments."""
    parts: set[int] = set()
    for node in ast.walk(ast.parse(source)):  # a formatted string comes before its parts
        if isinstance(node, ast.JoinedStr):
            parts |= {id(part) for part in node.values}
            yield node.lineno, "".join(part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts:
            yield node.lineno, node.value
    begin, said, last = 0, "", -1
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            if token.start[0] != last + 1:
                yield begin, said
                begin, said = token.start[0], ""
            said, last = f"{said} {token.string.lstrip('# ')}", token.start[0]
    yield begin, said


_NATIVE = re.compile(r'/\*.*?\*/|(?://[^\n]*\n[ \t]*)+|"(?:\\.|[^"\\\n])*"', re.DOTALL)


def native_texts(source: str) -> Iterator[tuple[int, str]]:
    """(line, text) of each comment and string of a C file."""
    for found in _NATIVE.finditer(source):
        yield source.count("\n", 0, found.start()) + 1, re.sub(r"\n\s*(?:\*|//)\s?", " ", found[0])


def markdown_texts(source: str) -> Iterator[tuple[int, str]]:
    """(line, text) of each paragraph, without what is set as code."""
    plain = re.sub(r"(?m)^```.*?^```", lambda found: "\n" * found[0].count("\n"), source, flags=re.DOTALL)
    plain = re.sub(r"`[^`\n]*`", "`", plain)
    at = 1
    for paragraph in re.split(r"(\n\s*\n)", plain):
        yield at, paragraph
        at += paragraph.count("\n")


def complaints(texts: Iterator[tuple[int, str]], where: str, code: bool) -> list[str]:
    out = []
    for line, text in texts:
        joined = " ".join(text.split())
        if " " not in joined:
            continue  # a name
        for words, why, only_code in BANNED:
            if (found := words.search(joined)) and (code or not only_code):
                out.append(f"{where}:{line}: “{found[0]}”: {why}")
    return out


@pytest.mark.parametrize(
    ("files", "texts"),
    [(PYTHON, python_texts), (NATIVE, native_texts), (MARKDOWN, markdown_texts)],
    ids=["python", "native", "markdown"],
)
def test_no_sentence_has_a_banned_word(files: list[Path], texts) -> None:
    assert len(files) > 5
    found = []
    for path in files:
        code = texts is python_texts
        found += complaints(texts(path.read_text()), str(path.relative_to(ROOT)), code)
    assert not found, "\n".join(["docs/style.md says how to put it:", *found])


def test_the_check_reads_strings_comments_and_paragraphs() -> None:
    source = '# A queue that\n# has room.\nsaid = f"{1} of them {2} in order " "to wait"\n"""a roommate"""\n'
    assert complaints(python_texts(source), "x.py", True) == [
        "x.py:3: “in order to”: to",
        f"x.py:1: “room”: {BANNED[0][1]}",
    ]
    source = 'int a; /* prior\n * to it */ char *b = "in order to"; // obviously\n'
    assert [one.split("“")[1].split("”")[0] for one in complaints(native_texts(source), "x.c", False)] == [
        "prior to",
        "in order to",
        "obviously",
    ]
    source = "A queue has room.\n\n```\nin order to\n```\n`prior to` a\nprior\nto b\n"
    assert complaints(markdown_texts(source), "x.md", False) == ["x.md:6: “prior to”: before"]
