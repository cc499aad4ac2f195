"""Paths that commands are given: an empty one is none, and what is written never takes the place of what is read."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from kvprobe.errors import UsageError

__all__ = ["GivenPath", "refuse_input"]


class GivenPath(click.Path):
    """A path. An empty one, as of a variable that is not set, would be the current folder, which nobody named."""

    def __init__(self, *, dir_okay: bool = True) -> None:
        """`dir_okay` as for click."""
        super().__init__(dir_okay=dir_okay, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The path."""
        if value == "":
            self.fail("it is empty; name a file or a folder", param, ctx)
        return super().convert(value, param, ctx)


def refuse_input(output: Path, inputs: Sequence[Path]) -> None:
    """What is written would take the place of a recording that is read.

    Raises:
        UsageError: `output` is one of `inputs`.
    """
    for one in inputs:
        with contextlib.suppress(OSError):  # one of them does not exist
            if output.samefile(one):
                raise UsageError(f"{output} is a recording that is read; name another path for what is written")
