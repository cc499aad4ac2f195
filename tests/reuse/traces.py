"""Ten series of uses of blocks, as servers and agents make them: (uses,) int64, of a random generator and a scale.

At scale 1 each has some 200,000 different blocks and a million uses; both grow with it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

Blocks = npt.NDArray[np.int64]
Maker = Callable[[np.random.Generator, int], Blocks]
TRACES: dict[str, Maker] = {}


def trace(make: Maker) -> Maker:
    """Enters a series under its function's name."""
    TRACES[make.__name__] = make
    return make


def zipf(random: np.random.Generator, uses: int, blocks: int, exponent: float) -> Blocks:
    """Ranks of a bounded Zipf distribution."""
    weight = np.cumsum(np.arange(1, blocks + 1, dtype=np.float64) ** -exponent)
    return np.searchsorted(weight, random.random(uses) * weight[-1]).astype(np.int64)


def requests(first: Blocks, lengths: Blocks) -> Blocks:
    """One after another the blocks `first`, `first` + 1 ... of each request, so many as its length says."""
    ends = np.cumsum(lengths)
    inside = np.arange(int(ends[-1]), dtype=np.int64) - np.repeat(ends - lengths, lengths)
    return np.repeat(first, lengths) + inside


@trace
def zipf_popularity(random: np.random.Generator, scale: int = 1) -> Blocks:
    """Single blocks, some far more popular than others."""
    return zipf(random, 900_000 * scale, 250_000 * scale, 0.9)


@trace
def popular_documents(random: np.random.Generator, scale: int = 1) -> Blocks:
    """Documents of 16 to 200 blocks, asked about by popularity: all blocks of one, in order."""
    documents = 2_500 * scale
    lengths = random.integers(16, 200, documents)
    starts = np.cumsum(lengths) - lengths
    asked = zipf(random, 8_000 * scale, documents, 0.8)
    return requests(starts[asked], lengths[asked])


@trace
def one_scan(random: np.random.Generator, scale: int = 1) -> Blocks:
    """A popular set, and in the middle of it a long scan of blocks that nobody asks for again."""
    popular, middle = zipf(random, 600_000 * scale, 120_000 * scale, 0.7), 300_000 * scale
    return np.concatenate([popular[:middle], 10_000_000 + np.arange(250_000 * scale), popular[middle:]])


@trace
def a_loop(random: np.random.Generator, scale: int = 1) -> Blocks:
    """The same blocks over and over, in the same order: a pool a little too small finds nothing."""
    return np.tile(random.permutation(200_000 * scale), 4).astype(np.int64)


@trace
def loops_of_two_lengths(random: np.random.Generator, scale: int = 1) -> Blocks:
    """A short loop and a long one, in turns."""
    short, long = np.tile(np.arange(40_000 * scale), 10), 10_000_000 + np.tile(np.arange(160_000 * scale), 3)
    parts = [part for pair in zip(np.array_split(short, 60), np.array_split(long, 60), strict=True) for part in pair]
    return np.concatenate(parts).astype(np.int64)


@trace
def conversations(random: np.random.Generator, scale: int = 1) -> Blocks:
    """Turns of many conversations: each asks for all its blocks so far and adds some; system prompts are shared."""
    turns, alive = [], 400 * scale
    length = np.zeros(alive, dtype=np.int64)
    number = np.arange(alive, dtype=np.int64)
    new = alive
    prompt = random.integers(0, 8 * scale, alive)
    for _ in range(9_000 * scale):
        who = int(random.integers(alive))
        if random.random() < 0.08 or length[who] > 240:
            number[who], length[who], prompt[who], new = new, 0, random.integers(0, 8 * scale), new + 1
        length[who] += int(random.integers(4, 24))
        turns.append(-1000 * (prompt[who] + 1) + np.arange(24))
        turns.append(number[who] * 1000 + np.arange(length[who]))
    return np.concatenate(turns).astype(np.int64)


@trace
def forking_agents(random: np.random.Generator, scale: int = 1) -> Blocks:
    """Agents that fork: a child begins with its parent's blocks and adds its own; some branches are gone on with."""
    nodes: list[Blocks] = [np.arange(60, dtype=np.int64)]
    out, new = [], 1_000
    for _ in range(5_000 * scale):
        parent = nodes[int(len(nodes) - 1 - min(len(nodes) - 1, random.exponential(120 * scale)))]
        if len(parent) > 300:
            parent = parent[:60]
        for _ in range(int(random.integers(1, 4))):
            add = int(random.integers(8, 40))
            child = np.concatenate([parent, np.arange(new, new + add)])
            new += add
            nodes.append(child)
            out.append(child)
    return np.concatenate(out).astype(np.int64)


@trace
def shifting_popularity(random: np.random.Generator, scale: int = 1) -> Blocks:
    """What is popular moves on: each part of the series draws from another window of the blocks."""
    parts = [zipf(random, 30_000 * scale, 60_000 * scale, 0.6) + number * 8_000 * scale for number in range(30)]
    return np.concatenate(parts)


@trace
def bursts(random: np.random.Generator, scale: int = 1) -> Blocks:
    """Prompts that come many times at once and then hardly ever, beside others that come evenly."""
    out = []
    for number in range(1_500 * scale):
        length = int(random.integers(60, 180))
        prompt = 10_000_000 + number * 1_000 + np.arange(length)
        out += [prompt] * int(random.integers(1, 6))
        out.append(zipf(random, 150, 100_000 * scale, 0.5))
        if number > 200 * scale and random.random() < 0.2:
            old = int(random.integers(number - 200 * scale, number))
            out.append(10_000_000 + old * 1_000 + np.arange(60))
    return np.concatenate(out).astype(np.int64)


@trace
def two_tenants(random: np.random.Generator, scale: int = 1) -> Blocks:
    """One with few, popular blocks; the other works through a large set evenly. They share the pool."""
    small, large = (
        zipf(random, 450_000 * scale, 20_000 * scale, 1.0),
        10_000_000 + random.integers(0, 230_000 * scale, 450_000 * scale),
    )
    return np.where(random.random(len(small)) < 0.5, small, large).astype(np.int64)
