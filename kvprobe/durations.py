"""How times, bytes and shares are written for people, everywhere: three significant digits and a unit."""

from __future__ import annotations

import math

__all__ = ["bytes_text", "percent_text", "three_digits", "time_text"]

_BYTES = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
_TIMES = ((1e9, "s"), (1e6, "ms"), (1e3, "µs"), (1.0, "ns"))


def three_digits(value: float) -> str:
    """Three significant digits without an exponent."""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    value = float(f"{value:.3g}")  # first, so that 0.9996 has the digits of 1
    if value == 0 or abs(value) < 0.001:
        return f"{value:.1g}"
    return f"{value:,.{max(0, 2 - math.floor(math.log10(abs(value))))}f}"


def time_text(ns: float) -> str:
    """Nanoseconds as ns, µs, ms, s or minutes: "3.05 ms"; a finite number."""
    if abs(ns) >= 120e9:
        minutes, seconds = divmod(round(abs(ns) / 1e9), 60)
        return f"{'-' if ns < 0 else ''}{minutes:,} min {seconds:02d} s"
    for scale, unit in _TIMES:
        # 999.6 ns would print as 1,000 ns: the next unit begins where rounding reaches it.
        if abs(ns) >= scale * 0.9995 or scale == 1.0:
            return f"{three_digits(ns / scale)} {unit}"
    raise AssertionError  # pragma: no cover


def bytes_text(count: float) -> str:
    """Bytes that were moved, in decimal units, as rates are: "1.78 GB"; a finite number."""
    for scale, unit in _BYTES:
        if abs(count) >= scale * 0.9995:
            return f"{three_digits(count / scale)} {unit}"
    return f"{count:,.0f} B"


def percent_text(share: float) -> str:
    """A share of one as per cent, the same wherever it is told: "56%", "8.4%", "<0.1%"."""
    value = share * 100
    return f"{value:.0f}%" if abs(value) >= 9.95 else f"{value:.1f}%" if abs(value) >= 0.05 or value == 0 else "<0.1%"
