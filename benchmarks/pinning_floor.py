"""What pinned memory costs at the least: pages by so many threads, registration and copies, alone and beside others.

    python benchmarks/pinning_floor.py [--device cuda|host] [--mib 512] [--count 6]

Pages are made as kvprobe makes them (`kvp_populate`): shared ones, which a fork does not copy, and private ones. Each
line is one measurement of `count` buffers; where two things run at one time, the rate of each. `--device host` tries
the script: its registrations and copies mean nothing.
"""

from __future__ import annotations

import argparse
import ctypes as ct
import threading
import time
from collections.abc import Callable, Sequence

import kvprobe
from kvprobe.native import library

MIB = 1 << 20
TO_HOST = 2
SHARED, PRIVATE = 2, 1  # what a forked child gets of them
HUGE = 2
THREADS = (1, 2, 4, 6, 8, 12, 16)


class Populating(ct.Structure):
    """`kvp_populating` of kvprobe/native/src/host_memory.h."""

    _fields_ = (
        ("chunk_bytes", ct.c_uint64),
        ("threads", ct.c_uint32),
        ("node", ct.c_int32),
        ("pages", ct.c_uint32),
        ("fork", ct.c_uint32),
        ("stop", ct.c_void_p),
    )


class Floor:
    """Buffers of one size, and what is done with them; times in seconds."""

    def __init__(self, device: str, size: int, count: int) -> None:
        """With memory on the device to copy from."""
        self.core, self.runtime = library.core(), ct.CDLL(kvprobe.find_runtime(device).path)
        self.core.kvp_populate.restype = ct.c_void_p
        self.core.kvp_populate.argtypes = [ct.c_uint64, ct.POINTER(Populating)]
        self.core.kvp_unpopulate.argtypes = [ct.c_void_p, ct.c_uint64]
        self.size, self.count, self.device = size, count, ct.c_void_p()
        self._call("cudaMalloc", ct.byref(self.device), ct.c_size_t(size))

    def _call(self, name: str, *arguments: object) -> None:
        error = getattr(self.runtime, name)(*arguments)
        if error:
            raise SystemExit(f"{name} returned {error}")

    def pages(self, threads: int, fork: int = SHARED, chunk: int = 4 * MIB) -> list[int]:
        """New buffers whose pages are there."""
        how = Populating(chunk, threads, -1, HUGE, fork, None)
        made = [self.core.kvp_populate(self.size, ct.byref(how)) for _ in range(self.count)]
        if not all(made):
            raise SystemExit("this machine gives no huge pages, or too few")
        return made

    def drop(self, made: Sequence[int]) -> None:
        """Gives them back."""
        for at in made:
            self.core.kvp_unpopulate(at, self.size)

    def register(self, made: Sequence[int]) -> None:
        """One call a buffer."""
        for at in made:
            self._call("cudaHostRegister", ct.c_void_p(at), ct.c_size_t(self.size), 0)

    def unregister(self, made: Sequence[int]) -> None:
        """The opposite."""
        for at in made:
            self._call("cudaHostUnregister", ct.c_void_p(at))

    def copy(self, made: Sequence[int]) -> None:
        """From the device to each."""
        for at in made:
            self._call("cudaMemcpy", ct.c_void_p(at), self.device, ct.c_size_t(self.size), TO_HOST)

    def rate(self, took_s: float, buffers: int = 0) -> str:
        """Of so many buffers, all where it is 0."""
        return f"{self.size * (buffers or self.count) / took_s / 1e9:5.1f} GB/s"


def timed(what: Callable[[], object]) -> float:
    """How long it took, s."""
    began = time.perf_counter()
    what()
    return time.perf_counter() - began


def beside(what: Callable[[], object], other: Callable[[], object]) -> tuple[float, float]:
    """How long each took while both ran."""
    took = [0.0, 0.0]

    def run(number: int, one: Callable[[], object]) -> None:
        took[number] = timed(one)

    both = [threading.Thread(target=run, args=one) for one in enumerate((what, other))]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join()
    return took[0], took[1]


def pages_rate(floor: Floor, threads: int, fork: int, chunk: int) -> str:
    """Of pages alone."""
    made: list[int] = []
    took = timed(lambda: made.extend(floor.pages(threads, fork, chunk)))
    floor.drop(made)
    return floor.rate(took)


def show_beside_pages(floor: Floor, registered: Sequence[int], threads: int) -> None:
    """A copy, and a registration, while so many threads make pages."""
    made: list[int] = []
    one, two = beside(lambda: floor.copy([*registered, *registered]), lambda: made.extend(floor.pages(threads)))
    print(f"copy {floor.rate(one, 2 * floor.count)} beside pages by {threads} {floor.rate(two)}")
    one, two = beside(lambda: floor.register(made), lambda: floor.drop(floor.pages(threads)))
    print(f"registration {floor.rate(one)} beside pages by {threads} {floor.rate(two)} (dropped, too)")
    floor.unregister(made)
    floor.drop(made)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=("cuda", "host"))
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--count", type=int, default=6)
    asked = parser.parse_args()
    floor = Floor(asked.device, asked.mib * MIB, asked.count)
    for fork, name, chunk in ((SHARED, "shared", 4), (SHARED, "shared", 16), (PRIVATE, "private", 4)):
        said = "  ".join(f"{threads}: {pages_rate(floor, threads, fork, chunk * MIB)}" for threads in THREADS)
        print(f"pages {name:7} chunks of {chunk:2} MiB  {said}", flush=True)
    first, second = floor.pages(8), floor.pages(8)
    print("registration alone", floor.rate(timed(lambda: floor.register(first))))
    print("copy alone        ", *(floor.rate(timed(lambda: floor.copy(first))) for _ in range(2)))
    one, two = beside(lambda: floor.copy(first), lambda: floor.register(second))
    print(f"copy {floor.rate(one)} beside registration {floor.rate(two)}")
    floor.unregister(second)
    floor.drop(second)
    for threads in (4, 8):
        show_beside_pages(floor, first, threads)
    floor.unregister(first)
    floor.drop(first)


if __name__ == "__main__":
    main()
