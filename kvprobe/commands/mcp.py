"""`kvprobe mcp`: recordings for agents, by the Model Context Protocol, read-only."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import click

from kvprobe.commands._paths import GivenPath

__all__ = ["command"]


@click.command(short_help="Let agents read recordings, by the Model Context Protocol.")
@click.argument("folders", nargs=-1, metavar="[FOLDER]...", type=GivenPath())
@click.option(
    "--convert",
    is_flag=True,
    help="Also open what must be unpacked (compressed SQLite exports) or converted (.nsys-rep, by starting nsys); "
    "this takes temporary files.",
)
def command(folders: tuple[Path, ...], convert: bool) -> None:
    """Answer an agent's questions about the recordings below FOLDER, by default the working folder.

    An agent starts this command, and speaks the Model Context Protocol with it on stdin and stdout. The command needs
    `pip install "kvprobe[mcp]"`. Its answers are what other commands print with --json, in pages of a bounded size.

    The command only reads. Nothing outside the folders is opened, wherever a path or a link leads. No file is written,
    no program is started and no connection is made: an audit hook of Python refuses all three to the whole process.
    """
    import tempfile

    from kvprobe.agents.guard import Guard
    from kvprobe.agents.roots import Roots
    from kvprobe.agents.server import serve
    from kvprobe.commands._tools import tools
    from kvprobe.recordings.nsys_rep import find_importer, find_nsys

    roots = Roots(folders or (Path.cwd(),), convert=convert)
    with tempfile.TemporaryDirectory(prefix="kvprobe-") if convert else nullcontext() as temporary:
        guard = Guard()
        if temporary is not None:
            tempfile.tempdir = temporary
            programs = frozenset(str(one) for one in (find_nsys(), find_importer()) if one is not None)
            guard = Guard(Path(temporary).resolve(), programs)
        serve(tools(roots), guard.install)
