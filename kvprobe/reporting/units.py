"""Numbers as a person reads them: three significant digits, a unit, never more."""

from __future__ import annotations

import math

from kvprobe.durations import bytes_text, percent_text, three_digits, time_text

__all__ = [
    "ABOVE_LINK",
    "NONE",
    "TIMES_SIGN",
    "change_text",
    "count_text",
    "duration",
    "link_share",
    "moved_text",
    "number_text",
    "percent",
    "rate",
    "ratio",
    "size_text",
    "value_text",
]

NONE = "\u2013"  # a dash: not known, or not there
TIMES_SIGN = "\u00d7"
ABOVE_LINK = 1.05  # of the link's rate; less beyond it is what two measurements differ by

_SIZES = ((2.0**40, "TiB"), (2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"))


def _finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def duration(ns: float | None) -> str:
    """Nanoseconds as ns, µs, ms, s or minutes, the unit kept on the line of its number."""
    if ns is None or not _finite(ns):
        return NONE
    number, _, unit = time_text(ns).rpartition(" ")
    return time_text(ns) if " " in number else f"{number}\u00a0{unit}"


def moved_text(count: float | None) -> str:
    """Bytes that were moved, in decimal units, as rates are."""
    return bytes_text(count).replace(" ", "\u00a0") if count is not None and _finite(count) else NONE


def size_text(count: float | None) -> str:
    """The size of a memory, a block or a copy, in binary units, as programs set them."""
    if count is None or not _finite(count):
        return NONE
    for scale, unit in _SIZES:
        if abs(count) >= scale:
            return f"{three_digits(count / scale)}\u00a0{unit}"
    return f"{count:,.0f}\u00a0B"


def rate(bytes_per_s: float | None) -> str:
    """Bytes per second in decimal units, as links are sold and as `nvidia-smi` prints them."""
    if bytes_per_s is None or not _finite(bytes_per_s):
        return NONE
    for scale, unit in ((1e12, "TB/s"), (1e9, "GB/s"), (1e6, "MB/s"), (1e3, "kB/s")):
        if abs(bytes_per_s) >= scale:
            return f"{three_digits(bytes_per_s / scale)}\u00a0{unit}"
    return f"{bytes_per_s:.0f}\u00a0B/s"


def count_text(value: float | None) -> str:
    """A whole number with thousands separated."""
    return f"{value:,.0f}" if value is not None and _finite(value) else NONE


def percent(share: float | None) -> str:
    """A share of one as per cent."""
    return percent_text(share) if share is not None and _finite(share) else NONE


def link_share(share: float | None) -> str:
    """A rate as a share of the link's; one well above it is no share: the link carries more than was measured."""
    if share is None:
        return percent(share)
    return percent(min(share, 1.0)) if share <= ABOVE_LINK else "above it"


def ratio(before: float | None, after: float | None) -> str:
    """How many times lower (or higher) `after` is than `before`."""
    if before is None or after is None or not (_finite(before) and _finite(after)) or before <= 0 or after <= 0:
        return ""
    return "unchanged" if before / 1.05 < after < before * 1.05 else change_text(after / before)


def change_text(ratio: float) -> str:
    """A change as it is quoted everywhere: how many times lower or higher; `ratio` is after over before."""
    if three_digits(max(ratio, 1 / ratio)) == "1.00":
        return "unchanged"
    if ratio >= 1:
        return f"{three_digits(ratio)}{TIMES_SIGN} higher"
    return f"{three_digits(1 / ratio)}{TIMES_SIGN} lower"


def number_text(value: float | None) -> str:
    """A number without a unit, never with an exponent: whole where it is whole, else three significant digits."""
    if value is None or not _finite(value):
        return NONE
    return f"{value:,.0f}" if value == int(value) else three_digits(value)


def value_text(name: str, value: object) -> str:
    """A value of an evidence or machine table, its unit taken from the end of its name (`_ns`, `_bytes`, ...)."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (int, float)) or (hasattr(value, "item") and not hasattr(value, "__len__")):
        number = float(value)  # type: ignore[arg-type]
        if name.endswith("_ns"):
            return duration(number)
        if name.endswith(("bytes_per_s", "_rate")):
            return rate(number)
        if name.endswith("bytes"):
            return size_text(number)
        if name.endswith("_ms"):
            return duration(number * 1e6)
        if name.endswith(("share", "fraction")):
            return percent(number)
        if name in ("pid", "rank", "thread", "tid", "stream", "device") or name.endswith(("_id", "handle")):
            return f"{number:.0f}"
        return number_text(number)
    if isinstance(value, (list, tuple)):
        return ", ".join(value_text(name, item) for item in list(value)[:12]) + (" …" if len(value) > 12 else "")
    return str(value)
