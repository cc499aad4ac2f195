"""Every command line of the README and of docs/ runs and prints what the page shows (`docs/commandlines.py`)."""

from __future__ import annotations

import re
import runpy
import shlex
import xml.etree.ElementTree as ET
from pathlib import Path

import click
import pytest

from kvprobe.cli import COMMANDS, cli

ROOT = Path(__file__).resolve().parents[2]
LINES = runpy.run_path(str(ROOT / "docs" / "commandlines.py"))
PAGES = {path.name: path.read_text() for path in LINES["PAGES"]}
WITH_COMMANDS = [
    name for name, page in PAGES.items() if any(b.kind == "console" or not b.words for b in LINES["blocks"](page))
]
OTHER_PAGES = ("CONTRIBUTING.md", "SECURITY.md", "patches/README.md")
# Lines of other programs that a page may show, beside kvprobe's own.
OTHERS = ("pip", "nsys", "sh", "python", "eval")


@pytest.mark.parametrize("name", WITH_COMMANDS)
def test_a_page_shows_what_its_commands_print(name, tmp_path):
    """Where this fails because kvprobe says something else now: `python docs/commandlines.py --write`."""
    page = PAGES[name]
    assert LINES["made"](page, LINES["folder_for"](tmp_path)).splitlines() == page.splitlines()


@pytest.mark.parametrize("name", PAGES)
def test_a_line_that_needs_a_server_is_one_that_kvprobe_takes(name):
    for block in LINES["blocks"](PAGES[name]):
        for command in LINES["commands"](block.text) if block.kind == "sh" else ():
            first = next(word for word in shlex.split(command) if not re.fullmatch(r"[A-Z_]+=.*", word))
            assert first == "kvprobe" or (block.words and first in OTHERS), command
            LINES["parsed"](command)


@pytest.mark.parametrize("line", ["kvprobe run --fixx auto -- x", "kvprobe rnu -- x", "kvprobe run --fix maybe -- x"])
def test_a_wrong_line_is_seen(line):
    with pytest.raises(click.ClickException):
        LINES["parsed"](line)


@pytest.mark.parametrize("name", [*PAGES, *OTHER_PAGES])
def test_commands_in_sentences_and_tables_exist_with_their_options(name):
    """`kvprobe check INPUT --no pageable` in the text: such a command, and such options; arguments may be left out."""
    text = PAGES.get(name) or (ROOT / name).read_text()
    for line in re.findall(r"`kvprobe ([^`\n]+)`", text):
        words = line.split(" -- ")[0].split()
        if words[0].startswith("-") or words[0] == "COMMAND":
            continue
        assert words[0] in COMMANDS, line
        command = cli.get_command(click.Context(cli), words[0])
        options = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
        used = {word.split("=")[0] for word in words[1:] if word.startswith("-") and word != "--"}
        assert used <= options | {"-h", "--help"}, line


def test_what_a_block_leaves_out_is_marked():
    assert LINES["selected"]("a\nb\nc\nd\n", "2-3") == "...\nb\nc\n...\n"
    assert LINES["selected"]("a\nb\nc\nd\n", "1,3-") == "a\n...\nc\nd\n"


def test_a_failing_command_is_said(tmp_path):
    with pytest.raises(RuntimeError, match="ended with 2"):
        LINES["made"]("```sh\nkvprobe nothing\n```\n", tmp_path)


def test_the_shell_completes_commands_and_options(tmp_path):
    def completed(words: str, at: int) -> str:
        asked = f"_KVPROBE_COMPLETE=bash_complete COMP_WORDS='{words}' COMP_CWORD={at} kvprobe"
        return LINES["printed"](asked, tmp_path)[0]

    assert completed("kvprobe ch", 1) == "plain,check\n"
    assert "plain,--max-waiting-for-copies\n" in completed("kvprobe check --max-w", 2)


def test_targets_of_make_exist():
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    for page in PAGES.values():
        assert set(re.findall(r"^make ([\w-]+)", page, re.M)) | set(re.findall(r"`make ([\w-]+)", page)) <= targets


def test_pictures_are_there_and_their_makers_too():
    made = set(runpy.run_path(str(ROOT / "docs" / "screenshots.py"))["PICTURES"])
    images = ROOT / "docs" / "images"
    shown = {
        found for page in PAGES.values() for found in re.findall(r"!\[[^\]]+\]\((?:docs/)?images/([\w.-]+)\)", page)
    }
    assert shown == {path.name for path in images.iterdir()}
    assert {name for name in shown if name.endswith(".png")} == {f"{name}.png" for name in made}
    for path in images.glob("*.svg"):
        assert ET.parse(path).getroot().get("aria-label")
    assert all(path.stat().st_size < 300_000 for path in images.iterdir())
