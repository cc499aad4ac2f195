"""Is an offload worth its copies? Hits, stores that nobody read, prefill saved against time waited, as servers told it.

A judgement beside the verdict, not a cause: it names nothing that a change of the program would cure. What no server
told is None, and the conclusion is then "undecided" with what is missing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from kvprobe.durations import time_text
from kvprobe.recordings.assemble import LARGEST
from kvprobe.recordings.model import Direction, Recording

__all__ = ["Benefit", "of_events", "of_recording"]


@dataclass(frozen=True)
class Benefit:
    """What one offload of one server brought, all its processes together. None: not seen.

    Attributes:
        source: the server's name of the offload: a connector, a cache.
        prompt_tokens: of all requests that were admitted; `gpu_hit_tokens` of them lay on the GPU already,
            `hit_tokens` came from the offload.
        unread_blocks: evicted or overwritten before anybody loaded them; `held_unread_blocks` still may be loaded.
        waited_ns: sum over requests, from the decision to load until the blocks were there, and over steps that waited
            for loads of their own.
        prefill_ns_per_token: what the server took to compute a token of a prompt.
    """

    server: str
    source: str
    requests: int | None = None
    prompt_tokens: int | None = None
    gpu_hit_tokens: int | None = None
    hit_tokens: int | None = None
    stored_blocks: int | None = None
    stored_bytes: int | None = None
    loaded_blocks: int | None = None
    loaded_bytes: int | None = None
    unread_blocks: int | None = None
    unread_bytes: int | None = None
    held_unread_blocks: int | None = None
    waits: int | None = None
    waited_ns: int | None = None
    prefill_ns_per_token: float | None = None

    @property
    def hit_share(self) -> float | None:
        """Of the prompts' tokens that were not on the GPU, those that the offload had."""
        if self.prompt_tokens is None or self.hit_tokens is None:
            return None
        asked = self.prompt_tokens - (self.gpu_hit_tokens or 0)
        return self.hit_tokens / asked if asked > 0 else None

    @property
    def wasted_share(self) -> float | None:
        """Of the blocks that were stored, those that were gone before anybody loaded them."""
        if not self.stored_blocks or self.unread_blocks is None:
            return None
        return self.unread_blocks / self.stored_blocks

    @property
    def wasted_bytes(self) -> int | None:
        """As `wasted_share`, in bytes."""
        if self.unread_bytes is not None:
            return self.unread_bytes
        share = self.wasted_share
        return round(share * self.stored_bytes) if share is not None and self.stored_bytes is not None else None

    @property
    def saved_ns(self) -> float | None:
        """Prefill that the hits made unnecessary."""
        if self.hit_tokens is None or self.prefill_ns_per_token is None:
            return None
        return self.hit_tokens * self.prefill_ns_per_token

    @property
    def conclusion(self) -> str:
        """`helps`, `does not help` or `undecided`."""
        if self.hit_tokens == 0 and self.prompt_tokens:
            return "does not help"
        if self.saved_ns is None or self.waited_ns is None:
            return "undecided"
        return "helps" if self.saved_ns > self.waited_ns else "does not help"

    @property
    def sentence(self) -> str:
        """The conclusion with its figures; durations and shares as a person reads them."""
        name = f"{self.server}'s {self.source}"
        wasted = ""
        if self.wasted_share:
            wasted = f" {self.wasted_share:.0%} of what was stored was evicted before it was loaded."
        if self.hit_tokens == 0 and self.prompt_tokens:
            whole = f"none of {self.prompt_tokens:,} prompt tokens came from it"
            return f"Offload by {name} does not help: {whole}.{wasted}"
        if self.conclusion == "undecided":
            lacks = []
            if self.hit_tokens is None:
                lacks.append("which requests it served")
            elif self.prefill_ns_per_token is None:
                lacks.append("what prefill costs (no step with a prompt, or too few)")
            if self.waited_ns is None:
                lacks.append("how long loads were waited for")
            untold, known = " and ".join(lacks), self._share
            if known and self.prefill_ns_per_token is None and self.waits and self.waited_ns is not None:
                each = _s(self.waited_ns / (self.hit_tokens or 1))
                known += f", {each} waited for each: it pays where prefill takes longer"
            known = f" {known}." if known else ""
            return f"Whether offload by {name} helps is undecided: the server does not tell {untold}.{known}{wasted}"
        share = self._share
        figures = f"about {_s(self.saved_ns)} of prefill saved, {_s(self.waited_ns)} spent waiting for loads"
        return f"Offload by {name} {self.conclusion}: {share + ', ' if share else ''}{figures}.{wasted}"

    @property
    def _share(self) -> str:
        """The hit share in words; empty where nothing was hit, or seen."""
        whose = " that the GPU lacked" if self.gpu_hit_tokens is not None else ""
        return f"{self.hit_share:.0%} of the prompt tokens{whose} came from it" if self.hit_share else ""


def _s(ns: float | None) -> str:
    return time_text(ns or 0.0)


_SUMS = tuple(f.name for f in fields(Benefit) if f.name not in ("server", "source", "prefill_ns_per_token"))


def of_events(events: Iterable[Mapping[str, Any]]) -> list[Benefit]:
    """From the latest event of kind `offload` of each account, one for each server and source, all processes added."""
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for event in events:
        groups.setdefault((str(event.get("server")), str(event.get("source"))), []).append(event)
    return [_sum(server, source, group) for (server, source), group in groups.items()]


def _sum(server: str, source: str, group: list[Mapping[str, Any]]) -> Benefit:
    sums: dict[str, Any] = {}
    for name in _SUMS:
        seen = [one[name] for one in group if _known(one.get(name))]
        sums[name] = int(sum(seen)) if seen else None
    costs = [one["prefill_ns_per_token"] for one in group if _known(one.get("prefill_ns_per_token"))]
    return Benefit(server, source, prefill_ns_per_token=float(np.median(costs)) if costs else None, **sums)


def _known(value: object) -> bool:
    return isinstance(value, int | float) and 0 <= value <= LARGEST


def of_recording(recording: Recording) -> list[Benefit]:
    """What a recording tells of each offload; bytes that the scheduler does not know come from the transfers."""
    table = recording.offload
    events = [
        {
            **{name: table[name][row].item() for name in (*_SUMS, "prefill_ns_per_token")},
            "server": recording.text(int(table["server"][row])),
            "source": recording.text(int(table["source"][row])),
        }
        for row in range(table.rows)
    ]
    found = of_events(events)
    if len(found) != 1:
        return found
    only, moved = found[0], recording.transfers
    sizes = {
        name: int((moved["bytes"] * moved["one_in"])[moved["direction"] == way].sum())
        for name, way in (("stored_bytes", Direction.D2H), ("loaded_bytes", Direction.H2D))
        if getattr(only, name) is None and moved.rows
    }
    return [Benefit(**{**vars(only), **sizes})]
