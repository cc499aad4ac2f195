"""What programs of the later shapes share: fresh bytes, pacing, and their own account of where their time went."""

from __future__ import annotations

import contextlib
import ctypes as ct
import itertools
import random
from collections import Counter, deque
from collections.abc import Iterator

from device import D2H, H2D, Device, now
from registry import KiB


class Spent:
    """Where a program's time went, by the program itself: the serving window, and ns by line of the account."""

    def __init__(self, d: Device) -> None:
        self.device = d
        self.restart()

    def restart(self) -> None:
        """Start-up ends here: what comes is served."""
        self.begin, self.end, self.kernel_ns = now(), 0, self.device.kernel_ns
        self.lines: Counter[str] = Counter()

    def stop(self) -> None:
        """The window ends here, where it does not end with the program."""
        self.end = now()

    def add(self, line: str, ns: float) -> None:
        self.lines[line] += int(ns)

    @contextlib.contextmanager
    def on(self, line: str) -> Iterator[None]:
        begin = now()
        yield
        self.lines[line] += now() - begin

    def account(self) -> dict[str, float]:
        """Length of the window, and the shares of it that the program knows; what it does not know is left out."""
        window = (self.end or now()) - self.begin
        kernels = self.device.kernel_ns - self.kernel_ns  # 0 where torch launches them
        lines = {**({"computing": kernels} if kernels else {}), **self.lines}
        return {"window_ns": window, **{line: round(ns / window, 4) for line, ns in lines.items()}}


class Stretches:
    """What passed on a stream of the device between two places in it, all such stretches together, by its events.

    Attributes:
        ns: of the stretches that were read; a stretch can be read when the device has passed its end.
    """

    def __init__(self, d: Device, stream: int | None = None) -> None:
        self.device, self.stream = d, d.compute if stream is None else stream
        self.ns, self.opened, self.pairs = 0, 0, deque[tuple[int, int]]()

    def begin(self) -> None:
        self.opened = self.device.mark(self.stream)

    def end(self) -> None:
        """Ends the stretch that was begun last, if there is one."""
        if self.opened:
            self.pairs.append((self.opened, self.device.mark(self.stream)))
        self.opened = 0

    def read(self, keep: int = 0) -> int:
        """Adds up all stretches but the last `keep`, over which the device may still be."""
        while len(self.pairs) > keep:
            self.ns += self.device.between(*self.pairs.popleft())
        return self.ns


LEAST_STEPS = 4  # what a step waits for is known at the next one, and on a busy machine one may take all the time


def going(ns: int = 2_100_000_000) -> Iterator[int]:
    """Numbers of steps until so much time has passed."""
    begin, step = now(), 0
    while step < LEAST_STEPS or now() - begin < ns:
        yield step
        step += 1


def turns(ns: int = 1_500_000_000) -> Iterator[int]:
    """As `going`, for a shorter program."""
    yield from going(ns)


class Pool:
    """The pinned pool cut into blocks whose bytes all differ, and slots on the device that take turns."""

    def __init__(self, d: Device, size: int) -> None:
        self.d, self.size, self.count = d, size, d.size // size

    def fetch(self, slot: int, block: int, stream: int) -> int:
        """Block number `block` (they come round) to a slot of the device."""
        d, size = self.d, self.size
        return d.copy(d.device + slot * size, d.host + block % self.count * size, size, H2D, stream)

    def places(self, blocks: list[int], slots: list[int]) -> list[tuple[int, int]]:
        return [
            (self.d.device + slot * self.size, self.d.host + block % self.count * self.size)
            for block, slot in zip(blocks, slots, strict=True)
        ]


_drawn = [b""]  # random bytes, as many as a pool has
_fills = itertools.count(1)


def fill(d: Device) -> None:
    """Gives every page of the pinned pool bytes of its own: equal bytes would be loads that nobody needs.

    Of each program others: what is drawn once lies elsewhere each time.
    """
    if len(_drawn[0]) < d.size:
        _drawn[0] = b"".join(random.randbytes(16 << 20) for _ in range(0, d.size, 16 << 20))
    first = 4_099 * next(_fills) % d.size
    ct.memmove(d.host, _drawn[0][first : d.size], d.size - first)
    ct.memmove(d.host + d.size - first, _drawn[0][:first], first)


def stamp(d: Device, at: int, size: int, number: int) -> None:
    """Rewrites `size` bytes at an offset of the pinned pool: the CPU made new ones."""
    ct.memmove(d.host + at, random.Random(number).randbytes(size), size)


def paced(d: Device, step: int, lag: int = 3) -> int:
    """Ends a step on the compute stream and waits for the one `lag` before it, as a server that runs ahead does."""
    d.record(128 + step % 64, d.compute)
    return d.sync_event(128 + (step - lag) % 64) if step >= lag else 0


def paced_and_read(d: Device, step: int, moves: Stretches, each: int = 1, lag: int = 1) -> None:
    """As `paced`; reads the stretches of the steps that are over, of which each step has `each`."""
    paced(d, step, lag)
    if step >= lag:
        moves.read(each * lag)


def think(us: float) -> list[int]:
    """Computes in Python for so long, as a scheduler that makes lists does."""
    end, tables = now() + int(us * 1_000), [0]
    while now() < end:
        tables = [block * 16 + 7 for block in range(64) if block % 3]
    return tables


def decoded(d: Device, step: int, idle: Stretches, kernels: int, each_ns: int) -> None:
    """One step of a decoder that waits for its token: ids go in, kernels run, the token comes back; `idle` begins."""
    idle.end()
    ids = step % 8 * 4 * KiB
    stamp(d, ids, 4 * KiB, step)
    d.copy(d.device, d.host + ids, 4 * KiB, H2D, d.compute)
    for _ in range(kernels):
        d.launch(each_ns)
    d.copy(d.host + d.size - 4 * KiB, d.device + d.size - 4 * KiB, 512, D2H, d.compute)
    idle.begin()
    d.sync(d.compute)
    idle.read()
