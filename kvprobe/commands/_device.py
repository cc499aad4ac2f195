"""The option of the commands that measure: on which device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

__all__ = ["device_option"]

F = TypeVar("F", bound=Callable[..., Any])


def device_option(command: F) -> F:
    """Adds --device: `device` of the command's function, as `kvprobe.cuda.find_runtime` takes it."""
    return click.option(
        "--device",
        type=click.Choice(["auto", "host", "cuda"]),
        default="auto",
        show_default=True,
        help="The GPU, the embedded host runtime, or whichever there is.",
    )(command)
