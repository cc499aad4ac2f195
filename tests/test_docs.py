"""The pages of the documentation are made from the code: nothing that a user meets is missing."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvprobe.cli import COMMANDS, GROUPS
from kvprobe.diagnosis import CAUSES
from kvprobe.diagnosis.described import describe
from kvprobe.environment import VARIABLES
from kvprobe.errors import UsageError
from kvprobe.instrument import registry
from kvprobe.recordings import FORMATS

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("pages")
    subprocess.run([sys.executable, ROOT / "docs" / "pages.py", folder], check=True, cwd=folder)
    return {page.name: page.read_text() for page in folder.glob("*.md")}


def test_every_command_cause_and_variable_has_its_place(pages):
    assert {page for page in pages if page.startswith("command-")} == {f"command-{name}.md" for name in COMMANDS}
    assert {page for page in pages if page.startswith("cause-")} == {f"cause-{name}.md" for name in CAUSES}
    for name in COMMANDS:
        assert f"(command-{name}.md)" in pages["commands.md"]
        assert f"### kvprobe {name}\n" in pages["manual.md"]
    assert all(f"(cause-{name}.md)" in pages["causes.md"] for name in CAUSES)
    assert all(f"`{one.name}`" in pages["environment.md"] for one in VARIABLES)


def test_every_command_is_in_one_group():
    assert sorted(name for names in GROUPS.values() for name in names) == sorted(COMMANDS)


def test_every_page_is_in_the_sidebar(pages):
    listed = {
        name
        for text in pages.values()
        for tree in re.findall(r"^```{toctree}\n(.*?)^```", text, re.M | re.S)
        for name in tree.splitlines()
    }
    assert {page.removesuffix(".md") for page in pages} - listed == {"index", "manual"}


def test_links_lead_to_pages_that_exist(pages):
    for name, text in pages.items():
        for target in re.findall(r"\]\(([\w.-]+\.md)", text):
            assert target in pages, (name, target)


def test_links_between_the_files_lead_to_files():
    for path in (ROOT / "docs").glob("*.md"):
        for target in re.findall(r"\]\(([^)#\s]+)", path.read_text()):
            assert (path.parent / target).exists(), (path.name, target)


def test_no_page_says_a_paragraph_twice():
    for path in (*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), ROOT / "patches" / "README.md"):
        text = re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.M | re.S)
        said = [part for part in re.split(r"\n\s*\n", text) if len(part) > 80]
        twice = {part for part in said if said.count(part) > 1}
        assert not twice, (path.name, twice)


@pytest.mark.parametrize("cause", CAUSES)
def test_a_cause_says_what_it_is_and_how_it_is_told(cause):
    found = describe(cause)
    file = f"kvprobe/diagnosis/{cause}.py"
    assert found.summary.endswith("."), f"{file}: its docstring begins with one sentence on one line, with a full stop"
    missing = {"Mechanism", "Signature"} - {heading for heading, _ in found.parts}
    assert not missing, (
        f"{file}: its docstring lacks a paragraph that begins with {' and '.join(missing)}, a colon, a space"
    )


def test_an_unknown_cause_is_refused():
    with pytest.raises(UsageError, match="kvprobe causes"):
        describe("nothing")


def test_every_format_and_adapter_has_its_place(pages):
    kinds = [kind for server in registry.SERVERS for kind in registry.adapter_classes(server)]
    assert all(f"| `{kind.name}` |" in pages["servers.md"] for kind in kinds)
    assert all(f"| `{form}`: " in pages["recordings.md"] for form in FORMATS)
