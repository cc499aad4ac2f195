"""Makes the pages of the documentation from the code and the files beside it: `python docs/pages.py FOLDER`."""

from __future__ import annotations

import re
import sys
from importlib import import_module
from pathlib import Path

import click

import kvprobe
from kvprobe.cli import COMMANDS, cli
from kvprobe.diagnosis import CAUSES
from kvprobe.diagnosis.described import describe
from kvprobe.environment import VARIABLES
from kvprobe.instrument import registry
from kvprobe.recordings import FORMATS

ROOT = Path(__file__).resolve().parents[1]
PAGES = {
    "README.md": "index.md",
    "ARCHITECTURE.md": "architecture.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changelog.md",
    "patches/README.md": "servers.md",
}


def adapters() -> str:
    """Every adapter of every server."""
    out = ["", "## All adapters", "", "| adapter | versions | |", "|---|---|---|"]
    for server in registry.SERVERS:
        out += [f"| `{one.name}` | `{one.versions}` | {one.summary} |" for one in registry.adapter_classes(server)]
    return "\n".join(out)


def linked(text: str, folder: str) -> str:
    """Links between the files of the repository as links between pages; what is no page loses its link."""

    def one(match: re.Match[str]) -> str:
        words, target = match.groups()
        if target.startswith(("http", "#")):
            return match[0]
        path, _, anchor = target.partition("#")
        page = PAGES.get((Path(folder) / path).as_posix())
        return f"[{words}]({page}{'#' + anchor if anchor else ''})" if page else words

    return re.sub(r"\[([^\]]*)\]\(([^)\s]+)\)", one, text)


def commands() -> str:
    """Every command with its help, as the terminal shows it."""
    out = ["# Commands", "", "| command | |", "|---|---|"]
    out += [f"| [`kvprobe {name}`](#kvprobe-{name}) | {what} |" for name, what in COMMANDS.items()]
    top = click.Context(cli, info_name="kvprobe")
    for name in COMMANDS:
        found = cli.get_command(top, name)
        text = found.get_help(click.Context(found, parent=top, info_name=name, max_content_width=100))
        out += ["", f"## kvprobe {name}", "", "```text", text, "```"]
    return "\n".join(out)


def causes() -> str:
    """Every cause: mechanism, signature, time, saving."""
    out = [
        "# Causes",
        "",
        "What a report, `kvprobe triage` and `kvprobe check` name. `kvprobe causes NAME` says the same in a terminal.",
    ]
    for cause in sorted(CAUSES):
        found = describe(cause)
        out += ["", f"## {cause}", "", f"**{found.summary}**"]
        out += [f"\n*{heading}.* {text}" if heading else f"\n{text}" for heading, text in found.parts]
    return "\n".join(out)


def environment() -> str:
    """Every variable."""
    out = [
        "# Environment variables",
        "",
        "`kvprobe doctor` prints those that are set, `kvprobe doctor --json` each, with its source.",
        "",
        "| name | values | |",
    ]
    out += ["|---|---|---|"]
    out += [f"| `{one.name}` | {one.values} | {one.what} |" for one in VARIABLES if not one.set_by_run]
    out += ["", "`kvprobe run` sets these for the command itself:", "", "| name | values | |", "|---|---|---|"]
    out += [f"| `{one.name}` | {one.values} | {one.what} |" for one in VARIABLES if one.set_by_run]
    return "\n".join(out)


def recordings() -> str:
    """What can be read."""
    out = ["# Recordings", "", "Told apart by content, never by name.", "", "| format | how it is read |", "|---|---|"]
    for name, (module, what) in FORMATS.items():
        text = (import_module(f"kvprobe.recordings.{module}").__doc__ or "").strip().split("\n")[0]
        out.append(f"| `{name}`: {what} | {text} |")
    return "\n".join(out)


def api() -> str:
    """The public names, from their docstrings."""
    out = ["# Python API", "", "```{eval-rst}", ".. currentmodule:: kvprobe", ""]
    for name in kvprobe.__all__:
        found = getattr(kvprobe, name)
        if isinstance(found, type):
            out += [f".. autoclass:: {name}", "   :members:", ""]
        elif callable(found):
            out += [f".. autofunction:: {name}", ""]
    out.append("```")
    return "\n".join(out)


ORDER = [
    "commands",
    "causes",
    "recordings",
    "environment",
    "servers",
    "api",
    "architecture",
    "contributing",
    "security",
]


def main(folder: Path) -> None:
    """Writes every page."""
    folder.mkdir(parents=True, exist_ok=True)
    for source, page in PAGES.items():
        (folder / page).write_text(linked((ROOT / source).read_text(), str(Path(source).parent)))
    for make in (commands, causes, environment, recordings, api):
        (folder / f"{make.__name__}.md").write_text(make() + "\n")
    contents = ["", "```{toctree}", ":hidden:", "", *ORDER, "changelog", "```", ""]
    with (folder / "index.md").open("a") as file:
        file.write("\n".join(contents))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    with (Path(sys.argv[1]) / PAGES["patches/README.md"]).open("a") as servers:
        servers.write(adapters() + "\n")
