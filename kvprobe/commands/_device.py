"""What the commands that measure share: on which device, and for how long."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from kvprobe.cuda import Runtime

__all__ = ["Seconds", "device_option", "runtime_of"]

F = TypeVar("F", bound=Callable[..., Any])


class Seconds(click.FloatRange):
    """A number of seconds; "nan", which is below and above no limit, is none."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The number, within its limits."""
        seconds = float(super().convert(value, param, ctx))
        if math.isnan(seconds):
            self.fail(f"{value} is not a number.", param, ctx)
        return seconds


def device_option(command: F) -> F:
    """Adds --device: `device` of the command's function, as `kvprobe.cuda.find_runtime` takes it."""
    return click.option(
        "--device",
        type=click.Choice(["auto", "host", "cuda"]),
        default="auto",
        show_default=True,
        help="The GPU, the embedded host runtime, or whichever there is.",
    )(command)


def runtime_of(device: str) -> Runtime:
    """The runtime that --device asks for: where there is a GPU, the one that torch loads, if there is a torch."""
    from kvprobe.cuda import find_runtime
    from kvprobe.cuda.runtime import gpu_present

    if device != "host" and gpu_present():
        with contextlib.suppress(ImportError, OSError):  # a torch that cannot be loaded is none
            import torch  # noqa: F401
    return find_runtime(device)
