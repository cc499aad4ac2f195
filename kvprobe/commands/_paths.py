"""Paths that commands are given: an empty one is none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

__all__ = ["GivenPath"]


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
