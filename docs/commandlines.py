"""Runs the command lines of the README and of docs/, and keeps the output that the pages show true.

python docs/commandlines.py            # says which pages show something else than what their commands print
python docs/commandlines.py --write    # puts what they print into the pages

A fenced block says by its first words what it is:

`console`          lines that begin with `$ ` are run, and what follows is what they print, exactly
`console 1-9,12`   the same; only these lines of the output are shown, `...` stands for others
`sh`               is run, and must not fail
`sh server`        needs a server or a GPU, or says something else on each machine: its options are checked against
                   the command line's own parser
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import click

from kvprobe.cli import COMMANDS, cli

ROOT = Path(__file__).resolve().parents[1]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
FENCE = re.compile(r"^```(console|sh)([^\n]*)\n(.*?)^```$", re.M | re.S)
LEFT_OUT = "..."


class Block(NamedTuple):
    """A fenced block of command lines: its language, the words behind it, its text, and where the text stands."""

    kind: str
    words: str
    text: str
    begin: int
    end: int


def blocks(page: str) -> Iterator[Block]:
    """The blocks of a page's text, in order."""
    for found in FENCE.finditer(page):
        yield Block(found[1], found[2].strip(), found[3], found.start(3), found.end(3))


def commands(text: str) -> list[str]:
    """The command lines of a block; a backslash at the end of a line goes on in the next, comments are none."""
    lines = re.sub(r"\\\n\s*", "", text).splitlines()
    return [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]


def prompted(text: str) -> list[str]:
    """The command lines of a `console` block as they stand there, each with the lines in which it goes on."""
    return re.findall(r"^\$ (?:[^\n]*\\\n)*[^\n]*\n", text, re.M)


def folder_for(page: Path) -> Path:
    """A folder in which a page's commands find the files of the repository, and may write."""
    for name in ("tests", "examples", "docs", "benchmarks"):
        (page / name).symlink_to(ROOT / name)
    return page


def printed(command: str, folder: Path) -> tuple[str, int]:
    """What a command line prints, both streams together, and its exit code."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("KVPROBE", "KVHOST"))}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {**kept, "PATH": path, "COLUMNS": "80", "LANG": "C.UTF-8", "LC_ALL": "C.UTF-8", "TERM": "dumb"}
    done = subprocess.run(
        ["sh", "-c", command], cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        stdin=subprocess.DEVNULL, check=False,
    )  # fmt: skip
    return "".join(f"{line.rstrip()}\n" for line in done.stdout.splitlines()), done.returncode


def selected(output: str, words: str) -> str:
    """The lines of an output that a block shows."""
    lines = output.splitlines()
    if not words:
        return output
    shown: list[str] = []
    last = 0
    for part in words.split(","):
        first, _, end = part.partition("-")
        begin, stop = int(first), (int(end) if end else len(lines) if "-" in part else int(first))
        shown += [LEFT_OUT] if begin > last + 1 else []
        shown += lines[begin - 1 : stop]
        last = stop
    shown += [LEFT_OUT] if last < len(lines) else []
    return "".join(f"{line}\n" for line in shown)


def made(page: str, folder: Path) -> str:
    """A page with what its `console` commands print in `folder`; runs its `sh` blocks in between.

    Raises:
        RuntimeError: a command of a `sh` block failed, or any with a traceback.
    """
    out, at = [], 0
    for block in blocks(page):
        if block.kind == "console":
            text = ""
            for lines in prompted(block.text):
                output, _ = printed(lines.removeprefix("$ "), folder)
                if "Traceback (most recent call last)" in output:  # never to be written into a page
                    raise RuntimeError(f"{lines.strip()} failed:\n{output}")
                text += lines + selected(output, block.words)
            out += [page[at : block.begin], text]
            at = block.end
        elif not block.words:
            for command in commands(block.text):
                output, code = printed(command, folder)
                if code:
                    raise RuntimeError(f"{command} ended with {code}:\n{output}")
    return "".join(out) + page[at:]


def parsed(command: str) -> None:
    """Checks the options of a `kvprobe` command line against its parser; other programs' lines are left alone.

    Raises:
        click.ClickException: the line is none that kvprobe takes.
    """
    words = shlex.split(command, comments=True)
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words = words[1:]
    if words[:1] == ["kvprobe"] and words[1:]:
        known(words[1:])


def known(words: list[str]) -> None:
    """Parses the words behind `kvprobe`; nothing runs.

    Raises:
        click.ClickException: the parser refuses them.
    """
    top = click.Context(cli, info_name="kvprobe")
    name, rest = words[0], words[1:]
    if name not in COMMANDS:
        raise click.UsageError(f"no command is called {name!r}")
    command = cli.get_command(top, name)
    assert command is not None
    command.make_context(name, list(rest), parent=top, resilient_parsing=False)


def main(write: bool) -> int:
    """Compares, or writes; 1 where a page is not true."""
    wrong = 0
    for path in PAGES:
        page = path.read_text()
        with tempfile.TemporaryDirectory() as folder:
            new = made(page, folder_for(Path(folder)))
        if new != page:
            print(f"{path.relative_to(ROOT)}: {'written' if write else 'its commands print something else'}")
            wrong += not write
            if write:
                path.write_text(new)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main("--write" in sys.argv[1:]))
