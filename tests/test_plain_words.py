"""Every sentence of kvprobe is short, passes proselint, and does without the words of tests/words.toml, which says why.

proselint knows clichés, redundancy, archaic words and the like; `NOT_ASKED` says which of its rules are left out.
"""

from __future__ import annotations

import ast
import functools
import io
import re
import sys
import tokenize
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
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
NOT_ASKED = {  # of proselint's rules
    "typography": "quotes and dots as they stand in code and on a keyboard",
    "annotations": "`todo` is the name of what `doctor` advises",
}
WORDS = 50  # in a sentence, at most
# What makes a reader of a help text or of `kvprobe causes NAME` go back: too many false alarms elsewhere.
READ_TWICE = [
    (re.compile(r"^ *(?:- )?(?:It|They|Here|Such|Nor|So (?:is|are|do|does))\b"), "begin with the noun that is meant"),
    (re.compile(r"\bsuch\b(?! as\b| a way\b)"), "name it: these calls, a pause of this kind"),
    (re.compile(r"\w (?:[-+=/]|x|min|max) (?=\w)|\bn\b"), "a formula: say what is added, taken away or multiplied"),
    (re.compile(r"\b(?:likewise|the same of|ditto)\b"), "say the whole of it again"),
]
# Where a sentence ends: at a stop, or where a list, a table or a paragraph goes on.
STOPS = re.compile(r"(?<=[.!?:;])[\"')”]*\s|\n\s*(?:[-*|#]|\d+\.)\s|\n\s*\n|\||\n(?=    )|\* ``")


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
            if token.start[0] != last + 1 or token.line[: token.start[1]].strip():  # beside code: its own
                yield begin, said
                begin, said = token.start[0], ""
            said, last = f"{said} {token.string.lstrip('# ')}", token.start[0]
    yield begin, said


_NATIVE = re.compile(r'/\*.*?\*/|(?://[^\n]*\n[ \t]*)+|"(?:\\.|[^"\\\n])*"', re.DOTALL)


def native_texts(source: str) -> Iterator[tuple[int, str]]:
    """(line, text) of each comment and string of a C file."""
    for found in _NATIVE.finditer(source):
        text = re.sub(r"\n\s*(?:\*|//)\s?", " ", found[0])
        yield source.count("\n", 0, found.start()) + 1, re.sub(r"`[^`]*`", "`", text)


def markdown_texts(source: str) -> Iterator[tuple[int, str]]:
    """(line, text) of each paragraph, without what is set as code."""
    plain = re.sub(r"(?m)^```.*?^```", lambda found: "\n" * found[0].count("\n"), source, flags=re.DOTALL)
    plain = re.sub(r"`[^`\n]*`", "`", plain)
    at = 1
    for paragraph in re.split(r"(\n\s*\n)", plain):
        yield at, paragraph
        at += paragraph.count("\n")


@functools.cache
def texts_of(path: Path, texts: Callable[[str], Iterator[tuple[int, str]]]) -> list[tuple[int, str]]:
    return list(texts(path.read_text()))


def complaints(texts: Iterable[tuple[int, str]], where: str, code: bool) -> list[str]:
    out = []
    for line, text in texts:
        joined = " ".join(text.split())
        if " " not in joined:
            continue  # a name
        for words, why, only_code in BANNED:
            if (found := words.search(joined)) and (code or not only_code):
                out.append(f"{where}:{line}: “{found[0]}”: {why}")
    return out


def too_long(texts: Iterable[tuple[int, str]], where: str) -> list[str]:
    out = []
    for line, text in texts:
        for sentence in STOPS.split(text):
            if len(words := re.findall(r"[A-Za-z][\w'-]*", sentence)) > WORDS:
                out.append(f"{where}:{line}: {len(words)} words in “{' '.join(words[:6])} ...”: two sentences")
    return out


def of_proselint(files: Iterable[tuple[str, Iterable[tuple[int, str]]]]) -> list[str]:
    """What proselint finds in (where, texts), as `complaints`; all are given together: its rules are made each time."""
    checks = pytest.importorskip("proselint.checks")
    registry = pytest.importorskip("proselint.registry").CheckRegistry()
    tools, config = pytest.importorskip("proselint.tools"), pytest.importorskip("proselint.config")
    if not registry.checks:
        registry.register_many(checks.__register__)
    asked = {name: asked and name.split(".")[0] not in NOT_ASKED for name, asked in config.DEFAULT["checks"].items()}
    parts = [(f"{where}:{line}", " ".join(text.split())) for where, texts in files for line, text in texts]
    parts = [(place, text) for place, text in parts if " " in text]
    begins, quoted, at = [], [], 0
    for _, text in parts:
        begins.append(at)
        for span in tools.find_spans(f"\n{text}\n", tools.QUOTE_PATTERN, tools.check_matching_quotes):
            quoted += [at + end for end in span]
        at += len(text) + 2
    whole = "".join(text + "\n\n" for _, text in parts)
    file = tools.LintFile("all", content=whole)
    file.quote_bounds = tuple(quoted)  # a quotation ends where its text does, and hides nothing of the next
    found = file.lint({**config.DEFAULT, "checks": asked})
    out = []
    for one in found:
        start, end = (at - 1 for at in one.check_result.span)  # it puts a line before the text
        if "\n\n" not in whole[start:end].strip():  # words of one text, not of two
            place = parts[bisect_right(begins, start) - 1][0]
            out.append(f"{place}: “{whole[start:end].strip()}”: {one.check_result.message}")
    return out


@pytest.mark.parametrize(
    ("files", "texts"),
    [(PYTHON, python_texts), (NATIVE, native_texts), (MARKDOWN, markdown_texts)],
    ids=["python", "native", "markdown"],
)
def test_no_sentence_is_too_long(files: list[Path], texts) -> None:
    found = [one for path in files for one in too_long(texts_of(path, texts), str(path.relative_to(ROOT)))]
    assert not found, "\n".join(["docs/style.md says how to put it:", *found])


@pytest.mark.parametrize(
    ("files", "texts"),
    [(PYTHON, python_texts), (NATIVE, native_texts), (MARKDOWN, markdown_texts)],
    ids=["python", "native", "markdown"],
)
def test_proselint_finds_nothing(files: list[Path], texts) -> None:
    found = of_proselint([(str(path.relative_to(ROOT)), texts_of(path, texts)) for path in files])
    assert not found, "\n".join(["docs/style.md says how to put it:", *found])


def test_proselint_sees_a_bad_sentence() -> None:
    source = "x = 1  # fine here\ny = 2  # it was at that point in time a a moment\n"
    said = of_proselint([("x.py", python_texts(source))])
    assert len(said) == 2 and all(one.startswith("x.py:2: ") for one in said), said


def test_the_limit_sees_a_long_sentence() -> None:
    assert too_long(python_texts(f'"""{"word " * 51}."""'), "x.py") == [
        "x.py:1: 51 words in “word word word word word word ...”: two sentences"
    ]
    assert not too_long(python_texts(f'"""{"word " * 30}. {"word " * 30}."""'), "x.py")


def read_twice(text: str) -> list[str]:
    """The sentences of a text that break a rule of `READ_TWICE`, each with the rule's reason."""
    plain = re.sub(r"`[^`]*`", "`", re.sub(r"\n(?! *- )(?!\n) *", " ", text.strip()))
    out = []
    for sentence in re.split(r"(?<=[.!?:])[)\"]*\s+|\n", plain):
        out += [f"“{sentence}”: {why}" for rule, why in READ_TWICE if rule.search(sentence)]
    return out


def shown_texts() -> dict[str, str]:
    """What `kvprobe COMMAND --help` and `kvprobe causes NAME` print, by command and cause."""
    import click

    from kvprobe.cli import COMMANDS, cli
    from kvprobe.diagnosis import CAUSES
    from kvprobe.diagnosis.described import describe

    top = click.Context(cli, info_name="kvprobe")
    out = {}
    for name in CAUSES:
        found = describe(name)
        out[f"kvprobe causes {name}"] = "\n".join([found.summary, *(text for _, text in found.parts)])
    for name in COMMANDS:
        command = cli.get_command(top, name)
        assert command is not None
        options = [one.help for one in command.params if isinstance(one, click.Option) and one.help]
        out[f"kvprobe {name} --help"] = "\n\n".join([command.help or "", *options])
    return out


def test_help_and_causes_can_be_read_once() -> None:
    texts = shown_texts()
    assert len(texts) > 50
    found = [f"{where}: {one}" for where, text in texts.items() for one in read_twice(text)]
    assert not found, "\n".join(["docs/style.md says how to put it:", *found])


def test_what_is_read_twice_is_seen() -> None:
    bad = "It waits. Here the call blocks.\n - Such a call\n   blocks. Saving: lost - n x median."
    assert [one.split("”: ")[1][:9] for one in read_twice(bad)] == ["begin wit"] * 3 + ["a formula"]
    assert not read_twice(
        "A call of this kind (such as `n - 1`) waits. The thread has no CPU, so it waits:\n - a case."
    )


@pytest.mark.parametrize(
    ("files", "texts"),
    [(PYTHON, python_texts), (NATIVE, native_texts), (MARKDOWN, markdown_texts)],
    ids=["python", "native", "markdown"],
)
def test_no_sentence_has_a_banned_word(files: list[Path], texts) -> None:
    assert len(files) > 5
    found = []
    for path in files:
        code = texts is not markdown_texts
        found += complaints(texts_of(path, texts), str(path.relative_to(ROOT)), code)
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
