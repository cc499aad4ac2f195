"""A table can be read in a terminal of 80 columns and in a pipe: nothing of a cell is cut."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvprobe.commands._tables import print_table

COMMANDS = Path(__file__).resolve().parents[2] / "kvprobe/commands"
ROW = ("chatcmpl-6f2a", "117 ms, late", "waiting for the load of its own blocks 97.0 ms", "cudaStreamSynchronize 4 ms")
COLUMNS = ("Request", "First token", "Mostly", "Longest call")
OPENS_ITS_OWN = {"stats.py", "top.py", "doctor.py"}  # leaves columns out by itself; cuts a command's name; wraps all


def printed(width: int | None, spared: tuple[str, ...] = ()) -> list[str]:
    """Lines of a table on a terminal so wide, None: in a pipe."""
    out = io.StringIO()
    console = Console(file=out, width=width or 80, force_terminal=width is not None, no_color=True)
    grid = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in COLUMNS:
        grid.add_column(Text(name))
    grid.add_row(*(Text(cell) for cell in ROW))
    print_table(console, grid, wrapped=("Mostly", "Longest call"), spared=spared, rest="--json")
    return re.sub(r"\x1b\[[0-9;]*m", "", out.getvalue()).splitlines()


def test_in_a_pipe_a_row_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    lines = printed(None)
    assert len(lines) == 2
    assert [one in lines[1] for one in ROW] == [True] * len(ROW)


@pytest.mark.parametrize("width", [60, 80, 100])
def test_in_a_terminal_every_word_is_there_and_no_line_is_longer(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    lines = printed(width)
    assert max(map(len, lines)) <= width
    assert "\u2026" not in "".join(lines)
    for heading in COLUMNS:
        assert set(heading.split()) <= set(" ".join(lines).split())
    if width >= 80:
        assert set(" ".join(ROW).split()) <= set(" ".join(lines).split())


def test_a_column_that_does_not_fit_is_left_out_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    lines = printed(60, ("First token",))
    assert lines[-1] == "This terminal is too narrow for First token; --json prints all."
    assert set(" ".join((ROW[0], *ROW[2:])).split()) <= set(" ".join(lines[:-1]).split())


@pytest.mark.parametrize("path", sorted(COMMANDS.glob("*.py")), ids=lambda path: path.name)
def test_every_command_prints_its_tables_so(path: Path) -> None:
    text = path.read_text()
    if path.name not in {"_tables.py", *OPENS_ITS_OWN}:
        assert not re.search(r"\.print\((table|grid)\)", text)
