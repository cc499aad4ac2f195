"""What is known of a cause, from its file's docstring: mechanism, signature, what its time is, what a cure saves."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from importlib import import_module

from kvprobe.diagnosis import CAUSES
from kvprobe.errors import UsageError
from kvprobe.output.recorded import CauseJson, CausePartJson

__all__ = ["Description", "describe"]

_HEADING = re.compile(r"(Mechanism|Signature|Needs|Time lost|Predicted saving|Source): +")


@dataclass(frozen=True)
class Description:
    """One cause, in words.

    Attributes:
        cause: its name, as in `check --no NAME` and in every report.
        summary: one sentence.
        parts: (heading, text) pairs in the order of the docstring: Mechanism, Signature, Needs, Time lost, Predicted
            saving, Source, as far as they are there. What has no heading stands under "". A line of a text that
            begins with "- " is an item of a list.
    """

    cause: str
    summary: str
    parts: tuple[tuple[str, str], ...]

    def to_json(self) -> CauseJson:
        """All fields."""
        parts: list[CausePartJson] = [{"heading": heading, "text": text} for heading, text in self.parts]
        return {"cause": self.cause, "summary": self.summary, "parts": parts}


def describe(cause: str) -> Description:
    """What is known of a cause; a UsageError where there is none of that name."""
    if cause not in CAUSES:
        near = [name for name in CAUSES if cause in name] or difflib.get_close_matches(cause, CAUSES, 1)
        meant = f"did you mean {near[0]}? " if near else ""
        raise UsageError(f"no cause is called {cause!r}; {meant}`kvprobe causes` lists them")
    summary, _, rest = (import_module(f"kvprobe.diagnosis.{cause}").__doc__ or "").partition("\n")
    parts: list[tuple[str, str]] = []
    for paragraph in filter(None, (one.strip() for one in rest.split("\n\n"))):
        # headings begin a paragraph or a sentence of one
        pieces = _HEADING.split(_unwrapped(paragraph))
        if pieces[0].strip():
            parts.append(("", pieces[0].strip()))
        parts += zip(pieces[1::2], (text.strip() for text in pieces[2::2]), strict=True)
    return Description(cause, summary.strip(), tuple(parts))


def _unwrapped(paragraph: str) -> str:
    """The paragraph on one line, but for the items of a list in it and what follows the last of them."""
    out: list[str] = []
    listed = False
    for line in paragraph.splitlines():
        item, goes_on = line.startswith((" - ", "- ")), line.startswith("  ")
        if not out or item or (listed and not goes_on):
            out.append(line.strip())
        else:
            out[-1] += f" {line.strip()}"
        listed = item or (listed and goes_on)
    return "\n".join(out)
