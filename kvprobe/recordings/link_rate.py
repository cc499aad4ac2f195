"""What the link between CPU and GPU carries, as far as a recording tells it."""

from __future__ import annotations

import re
from typing import NamedTuple

import numpy as np

from kvprobe.recordings.assemble import among
from kvprobe.recordings.model import Array, CallKind, Direction, Engine, Memory, Recording

__all__ = [
    "FROM_COPIES",
    "FULL_LINK",
    "LARGE_BYTES",
    "LinkRate",
    "PcieLink",
    "link_of",
    "link_rate",
    "pcie_link",
    "rate_or_assumed",
]

LARGE_BYTES = 1 << 20  # a copy this large runs at nearly the link's rate
FULL_LINK = 0.8  # of the link's rate: copies that reach it are limited by their bytes alone
FROM_COPIES = "fastest large copies seen here"  # how a rate is known that is at least so high

_PCIE_5 = 55e9  # bytes per second of large copies over PCIe 5.0 x16 (H100, H200)

# NVIDIA's GPUs of older links, by their names; each has 16 lanes. One of another name may have the newest.
_GENERATION_3 = re.compile(r"\b(P100|V100S?|TITAN|T4|Quadro RTX|(GTX|RTX) (1[06]|20)\d\d)\b")
_GENERATION_4 = re.compile(r"\b(A100|A800|A30|A40|A10G?|A16|L4|L40S?|L20|RTX A\d{4}|RTX [34]0\d\d|RTX \d{4} Ada)\b")


class PcieLink(NamedTuple):
    """A link, and what it carries: `name` is "PCIe 5.0 x16", `bytes_per_s` is what large copies over it reach."""

    name: str
    bytes_per_s: float

    @property
    def text(self) -> str:
        """The same, for a sentence."""
        return f"{self.name} carries {self.bytes_per_s / 1e9:.3g} GB/s"


class LinkRate(NamedTuple):
    """What copies of one direction can reach.

    Attributes:
        bytes_per_s: 0 where there are no copies to compare with it.
        how: how it is known.
        assumed: the link that is assumed, as the recording does not tell the rate; else "".
    """

    bytes_per_s: float = 0.0
    how: str = ""
    assumed: str = ""


def pcie_link(generation: int, lanes: int) -> PcieLink:
    """What large copies reach over so many lanes; each generation carries twice as much as the one before it."""
    return PcieLink(f"PCIe {generation}.0 x{lanes}", _PCIE_5 * 2.0 ** (generation - 5) * lanes / 16)


def link_of(recording: Recording) -> PcieLink:
    """The link that this GPU is made for; PCIe 5.0 x16 where nothing tells it."""
    machine = recording.machine
    try:
        generation, lanes = int(machine["pcie_gen_max"]), int(machine["pcie_width_max"])
    except (KeyError, TypeError, ValueError):
        name = re.sub(r"[-_]", " ", str(machine.get("gpu", "")))
        generation, lanes = 3 if _GENERATION_3.search(name) else 4 if _GENERATION_4.search(name) else 5, 16
    return pcie_link(generation, lanes)


def rate_or_assumed(recording: Recording, direction: Direction) -> LinkRate:
    """As `link_rate`; where that does not know it, what the link carries that this GPU is made for."""
    rate, how = link_rate(recording, direction)
    if rate:
        return LinkRate(rate, how)
    link = link_of(recording)
    return LinkRate(link.bytes_per_s, f"assumed: {link.name}", link.name)


def link_rate(recording: Recording, direction: Direction) -> tuple[float, str]:
    """Bytes per second that one copy of this direction can reach, and how that is known; 0 where unknown.

    The machine's own figure where the recording has one; else the ninth decile of pinned copies of at least 1 MiB in
    this recording (a lower bound of the link), also of those between two marks. Where most bytes are copied row by row
    (`cudaMemcpy2D`) or by batches of smaller copies, they tell nothing of the link: short pieces take a copy engine
    longer than the link.
    """
    fact = recording.machine.get("link_bytes_per_s")
    if isinstance(fact, dict):
        fact = fact.get(direction.name.lower(), fact.get(direction.name))
    if fact:
        return float(fact), recording.machine_how.get("link_bytes_per_s", "stated for this machine")
    if _mostly(recording, direction, _in_pieces(recording)):
        return 0.0, "unknown"
    for table in (recording.executions, recording.spans):
        rows = np.flatnonzero((table["bytes"] >= LARGE_BYTES) & (table["engine"] == Engine.COPY))
        rows = rows[table["direction"][rows] == direction]
        size, took = table["bytes"][rows], table["end_ns"][rows] - table["start_ns"][rows]
        if table is recording.executions:
            large = (took > 0) & (table["memory"][rows] != Memory.PAGEABLE)
        else:
            large = (took > 0) & (size // np.maximum(table["count"][rows], 1) >= LARGE_BYTES)
            measured = large & (table["error_ns"][rows] == 0)  # else their length was computed
            large = measured if measured.any() else large
        if large.any() and (table is recording.executions or not _pageable(recording, direction)):
            return float(np.percentile(size[large] / took[large], 90) * 1e9), FROM_COPIES
    return 0.0, "unknown"


def _in_pieces(recording: Recording) -> Array:
    """Mask of the calls that copy one row of an array after the other, or a batch of copies that are not large."""
    calls = recording.calls
    rows = [number for number, name in enumerate(recording.names) if "memcpy2d" in name.lower().replace("_", "")]
    batches = (calls["kind"] == CallKind.BATCH) & (calls["bytes"] // np.maximum(calls["count"], 1) < LARGE_BYTES)
    return np.asarray(among(calls["name"], rows) | batches)


def _pageable(recording: Recording, direction: Direction) -> bool:
    """Whether most bytes are copied from or to pageable memory: a span does not say which copies are."""
    return _mostly(recording, direction, recording.calls["memory"] == Memory.PAGEABLE)


def _mostly(recording: Recording, direction: Direction, some: Array) -> bool:
    """Whether these calls move more than half of the bytes of large copies."""
    calls = recording.calls
    if not some.any():
        return False
    large = (calls["bytes"] >= LARGE_BYTES) & (calls["direction"] == direction)
    return bool(2 * calls["bytes"][large & some].sum() > calls["bytes"][large].sum())
