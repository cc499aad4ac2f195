"""Whether to load a block or to compute it: what either takes, as measured in one recording."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvprobe.diagnosis.offload_benefit import Benefit
from kvprobe.recordings.link_rate import link_rate
from kvprobe.recordings.model import Direction, Recording
from kvprobe.sizing.uses import Uses

__all__ = ["Rates", "rates_of"]

FEW_LOADS = 8


@dataclass(frozen=True)
class Rates:
    """What loading and computing take. None: not known, and `lacks` says why.

    Attributes:
        tokens: of a block.
        prefill_ns: to compute a token.
        wait_ns: that somebody waited for a block that was loaded.
        latency_ns: of a load, however short; `ns_per_byte` comes to it.
        how: where the figures come from, one sentence each.
        lacks: what is not known, one clause each.
    """

    tokens: float | None
    prefill_ns: float | None
    wait_ns: float | None
    latency_ns: float | None
    ns_per_byte: float | None
    how: tuple[str, ...]
    lacks: tuple[str, ...]

    @property
    def saved_ns(self) -> float | None:
        """By a block that is found, against computing it; below 0 where loading takes longer."""
        if self.prefill_ns is None or self.tokens is None or self.wait_ns is None:
            return None
        return self.tokens * self.prefill_ns - self.wait_ns

    def break_even_tokens(self, block_bytes: int) -> float | None:
        """The length from which on loading beats computing, in tokens; infinite: it never does. None: not known."""
        if None in (self.prefill_ns, self.tokens, self.latency_ns, self.ns_per_byte) or block_bytes <= 0:
            return None
        assert self.prefill_ns is not None and self.tokens and self.ns_per_byte is not None
        gain = self.prefill_ns - self.ns_per_byte * block_bytes / self.tokens
        return float(self.latency_ns or 0.0) / gain if gain > 0 else float("inf")


def rates_of(
    recording: Recording, uses: Uses, benefit: Benefit | None, prefill_ns: float | None, tokens: float | None
) -> Rates:
    """Measured rates; `prefill_ns` a token and `tokens` a block are what somebody gave instead, or None."""
    how: list[str] = []
    lacks: list[str] = []
    if tokens is None and benefit is not None and benefit.hit_tokens and benefit.loaded_blocks:
        tokens = benefit.hit_tokens / benefit.loaded_blocks
        how.append(f"a block holds {tokens:,.3g} tokens, by the server's counts of both")
    elif tokens is None:
        lacks.append("how many tokens a block holds is not told (--block-tokens gives it)")
    if prefill_ns is not None:
        how.append(f"{1e9 / prefill_ns:,.4g} tokens a second are computed, as given")
    elif benefit is not None and benefit.prefill_ns_per_token:
        prefill_ns = benefit.prefill_ns_per_token
        how.append(f"{1e9 / prefill_ns:,.4g} tokens a second are computed, by the server's own steps")
    else:
        lacks.append("how fast prompts are computed is not told (--prefill-rate gives it)")
    wait_ns = _wait(recording, uses, benefit, how)
    if wait_ns is None:
        lacks.append("how long loads take is not recorded")
    latency_ns, ns_per_byte, why = _load_time(recording)
    (lacks if latency_ns is None else how).append(why)
    return Rates(tokens, prefill_ns, wait_ns, latency_ns, ns_per_byte, tuple(how), tuple(lacks))


def _wait(recording: Recording, uses: Uses, benefit: Benefit | None, how: list[str]) -> float | None:
    """Of a block that was loaded."""
    if benefit is not None and benefit.waited_ns is not None and benefit.loaded_blocks:
        how.append("requests waited for loads as the server's scheduler saw it")
        return benefit.waited_ns / benefit.loaded_blocks
    moved = recording.transfers
    mine = (moved["direction"] == Direction.H2D) & (moved["end_ns"] > moved["start_ns"])
    if mine.any() and uses.loaded and uses.block_bytes > 0:
        ns = float(((moved["end_ns"] - moved["start_ns"]) * moved["one_in"])[mine].sum())
        size = float((moved["bytes"] * moved["one_in"])[mine].sum())
        if size > 0:
            how.append("the whole time that loads take is counted as waiting: what hides behind compute is not told")
            return ns / size * uses.block_bytes
    return None


def _load_time(recording: Recording) -> tuple[float | None, float | None, str]:
    """Latency of a load, ns for each byte more, and how that is known or why not."""
    moved = recording.transfers
    mine = (moved["direction"] == Direction.H2D) & (moved["bytes"] > 0) & (moved["end_ns"] > moved["start_ns"])
    size, took = moved["bytes"][mine].astype(np.float64), (moved["end_ns"] - moved["start_ns"])[mine].astype(np.float64)
    if len(size) < FEW_LOADS:
        return None, None, f"what a load takes cannot be told from {len(size)} of them"
    if size.max() >= 2 * size.min():
        each, latency = np.polyfit(size, took, 1)
        if each > 0:
            return (
                max(float(latency), 0.0),
                float(each),
                f"what a load takes, by {len(size):,} loads of different lengths",
            )
    rate, said = link_rate(recording, Direction.H2D)
    if rate <= 0:
        return None, None, "all loads are of one length, and the link's rate is not known"
    latency = float(np.median(took - size / rate * 1e9))
    return max(latency, 0.0), 1e9 / rate, f"what a load takes, by {len(size):,} loads and the link's rate ({said})"
