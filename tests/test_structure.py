"""Who may import whom, what the public names are, and what a start costs: the house keeps its walls."""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import kvprobe

ROOT = Path(__file__).resolve().parents[1]
PACKAGE, PROJECT = ROOT / "kvprobe", ROOT / "pyproject.toml"
ORDER = ["errors", "reuse", "native", "runfolder", "cuda", "probe", "launchqueue", "offload", "weights"]
# read and show; need no GPU, no torch, no native library
PAPER = ["recordings", "account", "requests", "diagnosis", "sizing", "reporting"]
# pure: neither numpy nor the native library comes with them
JUDGE = {
    "launchqueue.constants",
    "launchqueue.levels",
    "launchqueue.evidence",
    "launchqueue.judge",
    "launchqueue.call_counts",
}
ALONE = ("errors", "version", "environment", "durations")  # files, which every room may import
MAY_IMPORT = {
    "errors": set(),
    "version": set(),
    "environment": {"errors"},
    "durations": set(),
    "runfolder": {"errors", "native", "runfolder"},
    **{room: set(ORDER[: number + 1]) for number, room in enumerate(ORDER) if number and room != "runfolder"},
    "probe": {"errors", "native", "runfolder", "cuda", "probe", *JUDGE},
    "weights": {*ORDER, "recordings"},  # it hands its measurements on as a recording
    # probe: the readers of its files, which are pure; a test below holds that no native library comes with them
    "recordings": {"errors", "reuse", "recordings", "probe", "runfolder", "instrument.event_log", *JUDGE},
    "output": {"output"},
    "account": {"errors", "output", "recordings", "account"},
    "requests": {"output", "recordings", "account", "requests", "runfolder"},
    "diagnosis": {"errors", "output", "recordings", "account", "diagnosis", *JUDGE},
    "sizing": {"errors", "output", "reuse", "recordings", "account", "diagnosis", "sizing"},
    "agents": {"errors", "version", "output", "recordings", "agents"},
    "reporting": {
        "errors",
        "version",
        "output",
        "recordings",
        "account",
        "requests",
        "diagnosis",
        "sizing",
        "reporting",
    },
}


@functools.cache
def imports(path: Path) -> set[str]:
    """Modules of kvprobe that a file imports, anywhere in it, without the leading `kvprobe.`."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [node.module] if node.module != "kvprobe" else [f"kvprobe.{alias.name}" for alias in node.names]
        else:
            continue
        found |= {name.removeprefix("kvprobe.") for name in names if name.startswith("kvprobe.")}
    return found


@pytest.mark.parametrize("room", sorted(MAY_IMPORT))
def test_a_room_imports_only_what_lies_below_it(room):
    allowed = MAY_IMPORT[room]
    files = [PACKAGE / f"{room}.py"] if room in ALONE else sorted((PACKAGE / room).rglob("*.py"))
    for path in files:
        for module in imports(path):
            assert any(module == name or module.startswith(f"{name}.") for name in {*allowed, *ALONE}), (
                f"{path.relative_to(ROOT)} imports kvprobe.{module}, which does not lie below {room}: take what it "
                f"needs as an argument, or move it; {room} may import {', '.join(sorted(allowed)) or 'nothing'}"
            )


MODULES = {
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__"): path
    for path in PACKAGE.rglob("*.py")
}


def needs(module: str) -> set[str]:
    """Modules of kvprobe that one needs to run, from within functions, too; what types alone name does not count."""
    found, nodes = set(), [ast.parse(MODULES[module].read_text())]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            nodes += node.orelse
            continue
        nodes += ast.iter_child_nodes(node)
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            parts = {f"{node.module}.{alias.name}".removeprefix("kvprobe.") for alias in node.names}
            found |= parts & MODULES.keys() or {node.module}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return {name.removeprefix("kvprobe.") for name in found} & (MODULES.keys() - {module})


def in_circles(edges: dict[str, set[str]]) -> set[str]:
    """Those that lead back to themselves: what leads nowhere, or what nothing leads to, is taken away until none is."""
    left = dict(edges)
    while True:
        reached = set().union(*left.values()) if left else set()
        kept = {one: to & left.keys() for one, to in left.items() if one in reached and to & left.keys()}
        if kept == left:
            return set(left)
        left = kept


def test_no_module_of_a_room_that_judges_needs_itself():
    edges = {module: needs(module) for module in MODULES}
    for room in ("launchqueue", "account", "requests", "diagnosis", "sizing", "reporting", "output", "reuse"):
        mine = {one for one in MODULES if one.split(".")[0] == room}
        assert not in_circles({one: edges[one] & mine for one in mine}), room
    assert in_circles({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == {"b", "c"}


def test_nothing_imports_the_commands():
    for path in PACKAGE.rglob("*.py"):
        if path.parent.name != "commands" and path.name not in ("cli.py", "__main__.py"):
            assert not {name for name in imports(path) if name.split(".")[0] in ("commands", "cli")}, path


def test_every_public_name_is_there_and_meant_to_be():
    assert sorted(kvprobe.__all__) == sorted(kvprobe._HOME_OF)
    for name in kvprobe.__all__:
        assert getattr(kvprobe, name) is not None


def modules_after(code: str) -> set[str]:
    listed = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys; print('\\n'.join(sys.modules))"],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "COLUMNS": "100"},
    )
    return set(listed.stdout.split())


def test_help_loads_nothing_heavy():
    loaded = modules_after("import kvprobe.cli as c\ntry: c.main(['--help'])\nexcept SystemExit: pass")
    assert loaded.isdisjoint({"numpy", "plotly", "pyarrow", "torch", "jinja2", "rich", "msgspec", "pynvml"})


def test_reading_and_showing_needs_no_native_library_and_no_torch():
    loaded = modules_after("import kvprobe.recordings, kvprobe.diagnosis, kvprobe.sizing, kvprobe.reporting")
    assert not {name for name in loaded if name.startswith("kvprobe.native.library")}
    assert loaded.isdisjoint({"torch", "kvprobe.cuda", "kvprobe.offload"})


def test_importing_kvprobe_loads_nothing_else():
    assert not {name for name in modules_after("import kvprobe") if name.startswith("kvprobe.")}


@functools.cache
def drawn() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "docs" / "modules.py"))


def test_the_drawing_of_the_modules_is_current():
    made = drawn()
    assert made["PAGE"].read_text() == made["page_with"](made["drawing"]()), "run python docs/modules.py --write"


def test_no_arrow_of_the_drawing_goes_against_the_order():
    made = drawn()
    place = {room: number for number, room in enumerate(made["ORDER"])}
    for room, targets in made["arrows"]().items():
        assert room in place, f"{room} has no place in the order of docs/modules.py"
        for target in targets:
            assert place[target] < place[room], f"{room} imports {target}"


def test_a_module_says_what_it_is_for():
    for folder in ("kvprobe", "patches", "docs", "examples", "benchmarks", "tests"):
        for path in (ROOT / folder).rglob("*.py"):
            # tests of a folder and its fixtures are told by their names
            if path.name.startswith(("conftest", "test_")) and folder == "tests":
                continue
            tree = ast.parse(path.read_text())
            said = (ast.get_docstring(tree) or "").partition("\n\n")[0]
            assert not tree.body or len(re.findall(r"\w+", said)) >= 3, (
                f"{path.relative_to(ROOT)}: begin it with a docstring of one sentence that says what it is for"
            )


def test_a_public_class_has_its_name_alone():
    files: dict[str, list[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        for name in re.findall(r"(?m)^class ([A-Za-z]\w*)", path.read_text()):
            files.setdefault(name, []).append(str(path.relative_to(ROOT)))
    twice = {name: where for name, where in files.items() if len(where) > 1}
    assert not twice, "give one of each another name: " + str(twice)


def test_each_entry_point_of_the_project_leads_to_what_is_there():
    found = re.findall(r'^\[project\.(scripts|entry-points\.?\S*)\]\nkvprobe = "(\S+)"$', PROJECT.read_text(), re.M)
    assert len(found) == 4
    for _, target in found:
        assert importlib.metadata.EntryPoint("kvprobe", target, "kvprobe").load(), target


def test_the_readme_leads_to_what_is_there():
    text = (ROOT / "README.md").read_text()
    figures = (ROOT / "docs" / "figures.md").read_text() + (ROOT / "docs" / "situations.md").read_text()
    links = {link for link in re.findall(r"\]\(([^)]+)\)", text) if "://" not in link}
    files = set(re.findall(r"`((?:reports|benchmarks)/[\w./-]+)`", text + figures)) | set(
        re.findall(r"(benchmarks/\w+\.\w+)", text + figures)
    )
    for name in links | files:
        assert (ROOT / name).exists() or name == "reports/demo.html", name


@pytest.mark.parametrize("page", ["ARCHITECTURE.md", "CONTRIBUTING.md"])
def test_what_the_pages_name_is_there(page):
    named = re.findall(
        r"`((?:kvprobe|patches|tests|docs|benchmarks|examples)/[\w./]+)(?::(\w+))?`", (ROOT / page).read_text()
    )
    assert named
    for file, function in named:
        if "NAME" in file:  # stands for the reader's own
            continue
        path = ROOT / file
        assert path.exists(), f"{page} names {file}, which is not there"
        assert not function or re.search(rf"\b{function}\b", path.read_text()), (
            f"{page} names {file}:{function}, which is not in it"
        )
