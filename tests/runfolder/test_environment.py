"""Every environment variable of kvprobe is declared once, and read there."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest

from kvprobe import environment
from kvprobe.instrument import nvtx_marks
from kvprobe.instrument.carried import kvprobe_startup as startup
from kvprobe.probe import nvtx_ranges

ROOT = Path(__file__).parents[2]
# cannot import it: the build runs before the package is there, the others may import nothing
ALONE = {
    "kvprobe/environment.py",
    "kvprobe/native/build.py",
    "kvprobe/instrument/carried/kvprobe_startup.py",
}
NAME = "KVPROBE(?:_[A-Z]+)*"
DECLARED = {variable.name: variable for variable in environment.VARIABLES}


def named(text: str) -> set[str]:
    return set(re.findall(rf"\b{NAME}\b", text))


def variables(path: Path) -> list[str]:
    """Texts of a file that are a variable's name, each time that they are written."""
    constants = (one for one in ast.walk(ast.parse(path.read_text())) if isinstance(one, ast.Constant))
    return [one.value for one in constants if isinstance(one.value, str) and re.fullmatch(NAME, one.value)]


def environment_reads(path: Path) -> list[str]:
    """Names of kvprobe's variables that a file asks os.environ or os.getenv for."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        inside = []
        if isinstance(node, ast.Subscript):
            inside = [node.value, node.slice]
        elif isinstance(node, ast.Call):
            inside = [node.func, *node.args]
        if inside and any(word in ast.unparse(inside[0]) for word in ("environ", "getenv")):
            found += [
                one.value
                for part in inside[1:]
                for one in ast.walk(part)
                if isinstance(one, ast.Constant) and isinstance(one.value, str) and one.value.startswith("KVPROBE")
            ]
    return found


def test_nobody_else_reads_them() -> None:
    for path in [*ROOT.glob("kvprobe/**/*.py"), *ROOT.glob("patches/*.py")]:
        if str(path.relative_to(ROOT)) not in ALONE:
            assert not environment_reads(path), path


def test_whoever_cannot_import_it_reads_what_is_declared() -> None:
    for name in ALONE - {"kvprobe/environment.py"}:
        named = variables(ROOT / name)
        assert named and set(named) <= set(DECLARED), name


def test_each_name_is_written_once() -> None:
    """Once where it is declared; whoever cannot import the declaration writes it once, too."""
    assert sorted(variables(ROOT / "kvprobe/environment.py")) == sorted({*DECLARED, *environment.OF_THE_TESTS})
    for path in [*ROOT.glob("kvprobe/**/*.py"), *ROOT.glob("patches/*.py")]:
        written = variables(path)
        if str(path.relative_to(ROOT)) in ALONE:
            assert len(written) == len(set(written)), path
        else:
            assert not written, path


def test_the_native_part_reads_what_is_declared_as_native() -> None:
    read = set()
    for path in (ROOT / "kvprobe" / "native").glob("*/*.c"):
        read |= set(re.findall(r'(?:getenv|number_from)\("(KVPROBE[A-Z_]*)"\)', path.read_text()))
    assert read == {name for name, variable in DECLARED.items() if variable.native} | {"KVPROBE"}


@pytest.mark.parametrize("text", ["off", "OFF", " 0", "no", "False", "on", "1", "", "anything"])
def test_the_start_up_hook_is_switched_off_by_the_same_words(text: str, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVPROBE", text)
    monkeypatch.setenv("KVPROBE_RUN", str(tmp_path))
    monkeypatch.delattr("sys._kvprobe_started", raising=False)
    monkeypatch.setattr("sys.meta_path", list(sys.meta_path))
    startup.start()
    assert bool(list(tmp_path.iterdir())) is environment.asked_for()


@pytest.mark.parametrize(
    ("tool", "asked", "listens"),
    [
        (None, None, False),
        (None, "1", False),
        ("/t.so", None, True),
        ("/t.so", "1", True),
        ("/t.so", "0", False),
        ("/t.so", "off", False),
    ],
)
def test_nvtx_has_one_answer(monkeypatch, tool: str | None, asked: str | None, listens: bool) -> None:
    for name, value in (("NVTX_INJECTION64_PATH", tool), ("KVPROBE_NVTX", asked)):
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    assert nvtx_marks.listening() is nvtx_ranges.listening() is listens


def test_a_value_that_cannot_be_parsed_counts_as_not_set_and_is_told(monkeypatch) -> None:
    for name, value in (("KVPROBE_FIX", "atuo"), ("KVPROBE_MAX_BYTES", "-1"), ("KVPROBE_SLOW_NS", "1us")):
        monkeypatch.setenv(name, value)
        assert DECLARED[name].value() == DECLARED[name].default
        assert DECLARED[name].problem().startswith("counts as not set: it must be")
    monkeypatch.setenv("KVPROBE_FIX", " AUTO ")
    assert DECLARED["KVPROBE_FIX"].value() == "auto" and not DECLARED["KVPROBE_FIX"].problem()


def test_a_name_that_is_none_is_told(monkeypatch) -> None:
    monkeypatch.setenv("KVPROBE_DETIAL", "totals")
    assert "KVPROBE_DETIAL" in list(environment.unknown())
