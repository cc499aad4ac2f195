"""The page of a calibration: what each method of copying did on this machine, by size of a copy."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from kvprobe.reporting import charts
from kvprobe.reporting.headline import Fact, PageHead
from kvprobe.reporting.units import duration, link_share, percent, size_text
from kvprobe.reporting.views import Section, TableView, table

__all__ = ["sections", "title", "verdict", "way"]

WORDS = {"h2d": "loads (CPU to GPU)", "d2h": "stores (GPU to CPU)"}


def way(method: str, ctas: int) -> str:
    """A method as tables name it."""
    return f"{method}, {ctas} CTA{'s' if ctas != 1 else ''}" if ctas else method


def title(result: Mapping[str, Any]) -> str:
    """Of the page."""
    return f"Calibration of {result['gpu'] or 'this GPU'}"


def verdict(result: Mapping[str, Any]) -> PageHead:
    """What the chooser takes, in a sentence."""
    link, queue = result["link_bytes_per_s"], result["queue"]
    least = min(result["choices"], key=lambda one: one["of_link"] if one["copy_bytes"] >= 8192 else math.inf)
    headline = (
        f"From 8 KiB on the chosen methods reach at least {percent(min(least['of_link'], 1.0))} of the link "
        f"({way(least['method'], least['ctas'])} at {size_text(least['copy_bytes'])})."
    )
    missing = "; ".join(f"no {name}: {why}" for name, why in result["missing"].items() if name != "staged")
    return PageHead(
        "info",
        headline,
        missing,
        [
            Fact("Link, loads", f"{link['h2d'] / 1e9:.1f} GB/s", "one large copy"),
            Fact("Link, stores", f"{link['d2h'] / 1e9:.1f} GB/s", "one large copy"),
            Fact("Queue depth", f"{queue['depth']:,}", f"{queue['channels']} channels"),
            Fact("A submission", duration(queue["baseline_ns"]), "while the queue has free slots"),
        ],
    )


def sections(result: Mapping[str, Any]) -> list[Section]:
    """The curves and tables."""
    made = [_curves(result, kind) for kind in ("h2d", "d2h")]
    made.append(
        charts.section("choice", "What is chosen", "For transfers of many copies of one size.", (), [_choices(result)])
    )
    made.append(
        charts.section(
            "price",
            "What copying costs other work",
            "Time that work on another stream took while copies ran, against alone. Each end of a kernel waits until "
            "the link has carried what copy kernels have under way: short kernels lose most.",
            (),
            [_beside(result)],
        )
    )
    made.append(
        charts.section(
            "more",
            "Patterns, both directions, small copies",
            "",
            (),
            [_patterns(result), _both(result), _behind(result)],
        )
    )
    return [one for one in made if one.charts or one.tables]


def _curves(result: Mapping[str, Any], kind: str) -> Section:
    rows = [row for row in result["rows"] if row["direction"] == kind]
    link = result["link_bytes_per_s"][kind] / 1e9
    sizes = [one["copy_bytes"] for one in rows[0]["measured"]] if rows else []
    exponents = [math.log2(size / 1024) for size in sizes]
    series: dict[str, Any] = {
        way(row["method"], row["ctas"]): {
            "x": exponents,
            "y": [one["bytes_per_s"] / 1e9 for one in row["measured"]],
            "style": "line",
        }
        for row in rows
        if row["ctas"] not in (1, 16)
    }
    series["link"] = {"x": [0, 12], "y": [link, link], "style": "line"}
    chart = {
        "title": f"GB/s of {WORDS[kind]}, scattered copies",
        "x_label": "size of a copy: 2 to the power of x KiB",
        "y_label": "GB/s",
        "series": series,
    }
    columns = ["Method", *map(size_text, sizes), "Slows reading memory", "Slows products"]
    listed = table(
        f"GB/s of {WORDS[kind]} by size of a copy",
        columns,
        [
            [way(row["method"], row["ctas"])]
            + [(f"{one['bytes_per_s'] / 1e9:.1f}", one["bytes_per_s"]) for one in row["measured"]]
            + [(percent(row[price]), row[price]) for price in ("slowdown", "product")]
            for row in rows
        ],
    )
    submit = table(
        "Host time a copy in the submitting calls",
        ["Method", *map(size_text, sizes)],
        [
            [way(row["method"], row["ctas"])]
            + [
                (duration(row["submit_ns"][row["sizes"].index(size)]), row["submit_ns"][row["sizes"].index(size)])
                for size in sizes
            ]
            for row in rows
        ],
    )
    return charts.section(kind, WORDS[kind].capitalize(), "", [charts.plain(f"rate-{kind}", chart)], [listed, submit])


def _choices(result: Mapping[str, Any]) -> TableView:
    return table(
        "Chosen method",
        ["Direction", "Size of a copy", "Method", "GB/s", "Of the link"],
        [
            [
                one["direction"],
                (size_text(one["copy_bytes"]), one["copy_bytes"]),
                way(one["method"], one["ctas"]),
                (f"{one['bytes_per_s'] / 1e9:.1f}", one["bytes_per_s"]),
                (link_share(one["of_link"]), one["of_link"]),
            ]
            for one in result["choices"]
        ],
    )


def _beside(result: Mapping[str, Any]) -> TableView:
    names = {
        "read": "memory-bound kernel",
        "short": "short kernels, one after another",
        "matmul": "products of 4096 x 4096 matrices, bfloat16",
        "decode": "products of 64 rows and 4096 x 4096 weights",
        "sum": "sums of 64 Mi numbers, bfloat16",
    }

    def share(one: Mapping[str, Any], which: str) -> tuple[str, float]:
        longer = one[which] / one["alone_ns"] - 1
        return percent(longer), longer

    def each(one: Mapping[str, Any]) -> float:
        return max(float(one["beside_ns"] - one["alone_ns"]), 0.0) / int(one["kernels"])

    return table(
        "Time beside copies",
        ["Work", "Direction", "Copies by", "Alone", "Beside", "Longer by", "At most by", "A kernel longer by"],
        [
            [
                names[one["work"]],
                one["direction"],
                way(one["method"], one["ctas"]),
                (duration(one["alone_ns"]), one["alone_ns"]),
                (duration(one["beside_ns"]), one["beside_ns"]),
                share(one, "beside_ns"),
                share(one, "beside_most_ns"),
                (duration(each(one)), each(one)),
            ]
            for one in result["beside"]
        ],
    )


def _patterns(result: Mapping[str, Any]) -> TableView | None:
    if not result.get("patterns"):
        return None
    columns = ["Direction", "Method", "Size of a copy", "Contiguous", "Runs of 8", "Scattered"]
    return table(
        "GB/s by pattern",
        columns,
        [
            [one["direction"], way(one["method"], one["ctas"]), (size_text(one["copy_bytes"]), one["copy_bytes"])]
            + [
                (f"{one['bytes_per_s'][name] / 1e9:.1f}", one["bytes_per_s"][name])
                for name in ("contiguous", "runs", "scattered")
            ]
            for one in result["patterns"]
        ],
    )


def _both(result: Mapping[str, Any]) -> TableView | None:
    if not result.get("both"):
        return None
    return table(
        "Loads and stores at once, GB/s of both together",
        ["Method", "Size of a copy", "GB/s"],
        [
            [
                way(one["method"], one["ctas"]),
                (size_text(one["copy_bytes"]), one["copy_bytes"]),
                (f"{one['bytes_per_s'] / 1e9:.1f}", one["bytes_per_s"]),
            ]
            for one in result["both"]
        ],
    )


def _behind(result: Mapping[str, Any]) -> TableView | None:
    if not result.get("behind_burst"):
        return None
    columns = ["Direction", "Burst by", "Burst", "Takes", "4 KiB on another stream takes"]
    return table(
        "A small copy behind a burst",
        columns,
        [
            [
                one["direction"],
                way(one["method"], one["ctas"]),
                (size_text(one["burst_bytes"]), one["burst_bytes"]),
                (duration(one["burst_ns"]), one["burst_ns"]),
                (duration(one["small_copy_ns"]), one["small_copy_ns"]),
            ]
            for one in result["behind_burst"]
        ],
    )
