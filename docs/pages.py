"""Makes the pages of the documentation from the code and the files beside it: `python docs/pages.py FOLDER`."""

from __future__ import annotations

import os
import re
import shutil
import sys
from importlib import import_module
from pathlib import Path

import click

import kvprobe
from kvprobe.cli import COMMANDS, GROUPS, cli
from kvprobe.diagnosis import CAUSES
from kvprobe.diagnosis.described import describe
from kvprobe.environment import VARIABLES
from kvprobe.instrument import registry
from kvprobe.output import DOCUMENTS, SCHEMA_VERSION, VERSION_KEY
from kvprobe.recordings import FORMATS

ROOT = Path(__file__).resolve().parents[1]
BESIDE = {
    "README.md": "index.md",
    "ARCHITECTURE.md": "architecture.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changelog.md",
    "patches/README.md": "servers.md",
}
WRITTEN = sorted(path.name for path in (ROOT / "docs").glob("*.md"))
PAGES = {**BESIDE, **{f"docs/{name}": name for name in WRITTEN}}  # file of the repository -> page
IMAGES = ROOT / "docs" / "images"
# The sidebar: caption -> pages.
SIDEBAR = {
    "Start": ("getting-started", "reading", "glossary", "recording-costs", "situations"),
    "Worked cases": (
        "cases",
        "case-full-queue",
        "case-loads-too-late",
        "case-pageable",
        "case-small-copies",
        "case-pinning",
    ),
    "Use": ("requests", "sizing", "experts", "tiers", "verify", "gates", "agents", "library", "completion", "servers"),
    "Reference": ("commands", "causes", "recordings", "json", "environment", "api"),
    "Project": ("figures", "wire", "stability", "architecture", "contributing", "releasing", "security", "changelog"),
}

# The causes that a worked case is about.
CASES = {
    "launch_queue_saturation": "case-full-queue",
    "waiting_for_copies": "case-loads-too-late",
    "pageable_memory": "case-pageable",
    "small_copies": "case-small-copies",
    "allocation_on_hot_path": "case-pinning",
}


def adapters() -> str:
    """Every adapter of every server."""
    out = ["", "## All adapters", "", "| adapter | versions | |", "|---|---|---|"]
    for server in registry.SERVERS:
        out += [f"| `{one.name}` | `{one.versions}` | {one.summary} |" for one in registry.adapter_classes(server)]
    return "\n".join(out)


def linked(text: str, folder: str) -> str:
    """Links between the files of the repository as links between pages; what is no page loses its link.

    A picture keeps its own; the name of a cause, as `kvprobe causes` takes it, leads to the cause's page.
    """

    def one(match: re.Match[str]) -> str:
        picture, words, target = match.groups()
        if target.startswith(("http", "#")):
            return match[0]
        path, _, anchor = target.partition("#")
        file = Path(os.path.normpath(Path(folder) / path)).as_posix()
        if picture:
            return f"![{words}](images/{Path(file).name})"
        page = PAGES.get(file)
        return f"[{words}]({page}{'#' + anchor if anchor else ''})" if page else words

    text = re.sub(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)", one, text)
    return re.sub(
        r"`kvprobe causes ([a-z_]+)`", lambda m: f"[{m[0]}](cause-{m[1]}.md)" if m[1] in CAUSES else m[0], text
    )


def toctree(*pages: str, caption: str = "") -> str:
    """Where pages stand in the sidebar."""
    return "\n".join(
        ["", "```{toctree}", ":hidden:", *([f":caption: {caption}"] if caption else []), "", *pages, "```", ""]
    )


def command(name: str) -> click.Command:
    """A command, with a context to ask it for its help."""
    found = cli.get_command(click.Context(cli, info_name="kvprobe"), name)
    assert found is not None
    return found


def commands() -> dict[str, str]:
    """A page for each command with its help, as the terminal shows it; for each group; and one that leads to them."""
    pages = {}
    out = ["# Commands", ""]
    for title, names in GROUPS.items():
        table = ["| command | |", "|---|---|"]
        table += [f"| [`kvprobe {name}`](command-{name}.md) | {COMMANDS[name]} |" for name in names]
        out += [f"## {title}", "", *table, ""]
        group = f"commands-{title.lower()}"
        pages[group] = "\n".join([f"# {title}", "", *table, toctree(*(f"command-{name}" for name in names))])
    pages["commands"] = "\n".join([*out, toctree(*(f"commands-{title.lower()}" for title in GROUPS))])
    top = click.Context(cli, info_name="kvprobe", **cli.context_settings)
    for name in COMMANDS:
        found = command(name)
        text = found.get_help(click.Context(found, parent=top, info_name=name, max_content_width=100))
        pages[f"command-{name}"] = "\n".join([f"# kvprobe {name}", "", COMMANDS[name], "", "```text", text, "```", ""])
    return pages


def causes() -> dict[str, str]:
    """A page for each cause: mechanism, signature, time, saving; and one that leads to them."""
    out = [
        "# Causes",
        "",
        "What a report, `kvprobe triage` and `kvprobe check` name. `kvprobe causes NAME` says the same in a terminal.",
        "",
        "| cause | |",
        "|---|---|",
    ]
    pages = {}
    for cause in sorted(CAUSES):
        found = describe(cause)
        out.append(f"| [{cause}](cause-{cause}.md) | {found.summary} |")
        parts = [f"*{heading}.* {text}" if heading else text for heading, text in found.parts]
        parts += [f"[A worked case]({CASES[cause]}.md)"] if cause in CASES else []
        pages[f"cause-{cause}"] = "\n\n".join([f"# {cause}", f"**{found.summary}**", *parts]) + "\n"
    pages["causes"] = "\n".join([*out, toctree(*(f"cause-{cause}" for cause in sorted(CAUSES)))])
    return pages


def manual() -> str:
    """The manual page: every command with its options."""
    context = click.Context(cli, info_name="kvprobe", **cli.context_settings)
    out = ["---", "orphan: true", "---", "", "# kvprobe", "", "## Synopsis", ""]
    out += ["**kvprobe** [*OPTIONS*] *COMMAND* [*ARGS*]...", "", "## Description", "", (cli.help or "").strip(), ""]
    for title, names in GROUPS.items():
        out += [f"## {title}", ""]
        for name in names:
            found = command(name)
            inner = click.Context(found, parent=context, info_name=name, max_content_width=100)
            usage = " ".join(found.collect_usage_pieces(inner))
            out += [f"### kvprobe {name}", "", f"**kvprobe {name}** {plain(usage)}", ""]
            text = (found.help or "").replace("\b", "")
            out += [plain(" ".join(part.split())) + "\n" for part in re.split(r"\n\s*\n", text)]
            for parameter in found.get_params(inner):
                record = parameter.get_help_record(inner)
                if record is not None and record[1]:
                    out += [plain(record[0]), f": {plain(' '.join(record[1].split()))}", ""]
    out += ["## Exit status", "", "0 for success, 1 for a failure, 2 for wrong usage, 130 when interrupted.", ""]
    out += ["## Environment", ""]
    for one in VARIABLES:
        out += [one.name, f": {plain(one.what)}", ""]
    return "\n".join(out)


def plain(text: str) -> str:
    """Text in which no sign means anything to Markdown, code aside."""
    parts = text.split("`")
    parts[::2] = [re.sub(r"([\\*_\[\]<>|$#~])", r"\\\1", part) for part in parts[::2]]
    return "`".join(parts)


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


def json() -> str:
    """What `--json` prints, and its schema."""
    out = [
        "# JSON",
        "",
        f"What `--json` prints begins with its version, `{VERSION_KEY}`, now {SCHEMA_VERSION}. Keys and words may be "
        "added with a minor version; a key that goes away or changes its type is a new major version. Times are "
        "integer ns, shares 0 to 1; null is not known. {download}`The JSON Schema <kvprobe.schema.json>` holds each "
        "type under `$defs`, and under `documents` which one each command prints.",
        "",
        "| command | type | |",
        "|---|---|---|",
    ]
    for name, one in DOCUMENTS.items():
        said = " ".join((one.kind.__doc__ or "").split())
        out.append(f"| [`kvprobe {name}`](command-{name.split()[0]}.md) | `{one.kind.__name__}` | {said} |")
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


def main(folder: Path) -> None:
    """Writes every page, and the pictures beside them."""
    folder.mkdir(parents=True, exist_ok=True)
    for source, page in PAGES.items():
        (folder / page).write_text(linked((ROOT / source).read_text(), str(Path(source).parent)))
    made = {**commands(), **causes(), "manual": manual()}
    made |= {make.__name__: make() for make in (environment, recordings, json, api)}
    for name, text in made.items():
        (folder / f"{name}.md").write_text(text + "\n")
    shutil.copytree(IMAGES, folder / "images", dirs_exist_ok=True)
    shutil.copy(ROOT / "docs" / "kvprobe.schema.json", folder)
    listed = {page for pages in SIDEBAR.values() for page in pages}
    sidebar = {**SIDEBAR, "Project": (*SIDEBAR["Project"], *(n[:-3] for n in WRITTEN if n[:-3] not in listed))}
    with (folder / "index.md").open("a") as file:
        file.write("".join(toctree(*pages, caption=caption) for caption, pages in sidebar.items()))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    with (Path(sys.argv[1]) / PAGES["patches/README.md"]).open("a") as servers:
        servers.write(adapters() + "\n")
