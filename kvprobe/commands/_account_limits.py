"""The options of `kvprobe check` that limit lines of the account, and what a recording makes of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from kvprobe.account import Account, GpuAccount

__all__ = ["AccountLimits", "GpuShare", "account_limits"]

F = TypeVar("F", bound=Callable[..., Any])

_HELP = {
    "max_waiting_for_copies": "Share of a GPU's window for which it may wait for copies while no kernel runs: 10%.",
    "max_waiting_for_host": "Share of a GPU's window for which it may wait for the host: 10%.",
    "max_not_known": "Share of a GPU's window for which the recording may leave open what the GPU did: 5%.",
    "min_computing": "Least share of a GPU's window for which it must compute: 80%.",
}


@dataclass(frozen=True)
class AccountLimits:
    """Limits as they were typed; None: not asked for."""

    max_waiting_for_copies: str | None = None
    max_waiting_for_host: str | None = None
    max_not_known: str | None = None
    min_computing: str | None = None

    def shares(self) -> dict[str, float]:
        """The limits that were asked for, by the option's name, as shares from 0 to 1.

        Raises:
            UsageError: one is no share.
        """
        from kvprobe.errors import UsageError

        out = {}
        for name in _HELP:
            text = getattr(self, name)
            if text is None:
                continue
            number = text.strip().removesuffix("%").strip()
            if not text.strip().endswith("%") or not number.replace(".", "", 1).isdigit() or float(number) > 100:
                raise UsageError(f"--{name.replace('_', '-')} {text}: not a share; write it like 10%")
            out[name.replace("_", "-")] = float(number) / 100
        return out


@dataclass(frozen=True)
class GpuShare:
    """What the GPU that is furthest from a limit has of it; `share` None: no GPU was seen.

    `passed_ns`: of lines that are not known, what the limit passes over: each device takes some microseconds to start.
    `unknown`: the share of time in which it may have waited, too, of limits on waiting; `lacks`: what would show it.
    """

    share: float | None
    gpu: str = ""
    ns: int = 0
    passed_ns: int = 0
    unknown: float = 0.0
    lacks: str = ""


def account_limits(command: F) -> F:
    """Adds the options, and hands them over as one `AccountLimits`, named `of_account`."""

    @wraps(command)
    def taken(*words: Any, **options: Any) -> Any:
        typed = {name: options.pop(name) for name in _HELP}
        return command(*words, of_account=AccountLimits(**typed), **options)

    made: Any = taken
    for name, text in reversed(_HELP.items()):
        made = click.option(f"--{name.replace('_', '-')}", metavar="SHARE", help=text)(made)
    return made  # type: ignore[no-any-return]


def worst_share(account: Account, option: str) -> GpuShare:
    """Of the GPUs that were seen, the share of the one that is worst by this limit."""
    from kvprobe.account import COPIES, HOST, Line
    from kvprobe.diagnosis.verdict import not_known_of
    from kvprobe.reporting.account import gpu_name

    lines = {
        "max-waiting-for-copies": COPIES,
        "max-waiting-for-host": HOST,
        "max-not-known": (Line.NOT_KNOWN,),
        "min-computing": (Line.COMPUTING,),
    }[option]
    seen = [gpu for gpu in account.gpus if gpu.seen]

    def share(gpu: GpuAccount) -> float:
        return sum(gpu.matters_ns().values()) / gpu.window_ns if option == "max-not-known" else gpu.share(*lines)

    if not seen:
        return GpuShare(1.0 if option == "max-not-known" and account.gpus else None)
    worst = min(seen, key=share) if option == "min-computing" else max(seen, key=share)
    ns = int(share(worst) * worst.window_ns)
    passed = worst.ns(Line.NOT_KNOWN) - sum(worst.matters_ns().values()) if option == "max-not-known" else 0
    lack = not_known_of(worst) if option.startswith("max-waiting") else None
    unknown = sum(worst.matters_ns().values()) / worst.window_ns if lack else 0.0
    return GpuShare(
        share(worst), gpu_name(account, worst), ns, passed, unknown, f"{lack.what}; {lack.how}" if lack else ""
    )
