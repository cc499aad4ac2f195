"""What a method plans and what it calls, by the rules of kvp_copy.h: a device of the test's own keeps the calls."""

from __future__ import annotations

import ctypes as ct
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvprobe.cuda.copies import COPY, METHOD_NAMES
from kvprobe.native.library import Copier, CopyKernel, CopyList, core

LOAD, STORE = 1, 2  # enum kvp_direction
HEADER, UNIT = 512, 16384
WORD = ct.c_uint64
u32, pointer = ct.c_uint32, ct.c_void_p
Copies = list[tuple[int, int, int]]


class Work(ct.Structure):
    """The argument of a copy kernel."""

    _fields_ = [("list", WORD)] + [
        (name, u32) for name in ("total", "units", "unit", "chunk", "stage", "stages", "pace")
    ]


class Device:
    """Keeps what is called; `code` is what every call returns."""

    def __init__(self, **changed: Any) -> None:
        self.code, self.launches, self.copied, self.batches = 0, [], [], []
        launch = ct.CFUNCTYPE(ct.c_int, pointer, *[u32] * 6, u32, pointer, ct.POINTER(pointer), pointer)
        copy = ct.CFUNCTYPE(ct.c_int, WORD, WORD, ct.c_size_t, ct.c_int, pointer)
        batch = ct.CFUNCTYPE(
            ct.c_int, *[ct.POINTER(WORD)] * 3, ct.c_size_t, pointer, pointer, ct.c_size_t, *[pointer] * 2
        )
        self._kept = launch(self._launch), copy(self._copy), batch(self._batch)
        self.copier = Copier()
        for name, call in zip(("launch_kernel", "memcpy_async", "memcpy_batch_async"), self._kept, strict=True):
            setattr(self.copier.cuda, name, ct.cast(call, pointer).value)
        self.copier.cuda.runtime_version = 13000
        self.copier.load_kernel = CopyKernel(11, 256, 8 * 40_000, 16, 1)
        self.copier.store_kernel = CopyKernel(12, 128, 4 * 20_000, 4, 1)
        self.copier.staging, self.copier.staging_bytes = 1 << 40, 2 << 20
        for name, value in changed.items():
            setattr(self.copier, name, value)

    def _launch(self, function: int, *rest: Any) -> int:
        *grid, shared, stream, parameters, extra = rest
        self.launches.append(
            (function, grid, shared, stream, Work.from_buffer_copy(ct.string_at(parameters[0], 40)), extra)
        )
        return self.code

    def _copy(self, *args: Any) -> int:
        self.copied.append(args)
        return self.code

    def _batch(self, dst: Any, src: Any, size: Any, count: int, attributes: int, at: int, kinds: int, *_: Any) -> int:
        self.batches.append([(dst[i], src[i], size[i]) for i in range(count)])
        assert ct.c_int.from_address(attributes).value == 1 and kinds == 1 and WORD.from_address(at).value == 0
        return self.code

    def plan(self, method: str, copies: Copies, direction: int = LOAD, **limits: int) -> tuple[int, int]:
        given, places = np.array(copies, COPY), u32(99)
        limit = {"room": 1 << 20, "most": 1 << 40, "listed": 1024} | limits
        taken = core().kvp_copy_plan(
            ct.byref(self.copier),
            METHOD_NAMES.index(method),
            given.ctypes.data,
            len(given),
            direction,
            *limit.values(),
            ct.byref(places),
        )
        return taken, places.value

    def submit(self, method: str, copies: Copies, direction: int = LOAD, ctas: int = 2, capacity: int = 1024) -> Any:
        """Code, copies taken, calls, and the entries of the list."""
        given, entries = np.array(copies, COPY), np.zeros(max(capacity, len(copies)) + 8, COPY)
        entries["bytes"][capacity:] = 77  # nothing is written behind its end
        pinned, taken, calls = CopyList(entries.ctypes.data, 0xABC000, capacity, 0), u32(99), u32(99)
        code = core().kvp_copy_submit(
            ct.byref(self.copier),
            METHOD_NAMES.index(method),
            given.ctypes.data,
            len(given),
            direction,
            ctas,
            ct.c_void_p(0x5EED),
            ct.byref(pinned) if capacity else None,
            ct.byref(taken),
            ct.byref(calls),
        )
        assert (entries["bytes"][capacity:] == 77).all()
        return code, taken.value, calls.value, [tuple(map(int, one)) for one in entries[: pinned.used]]


def scattered(sizes: list[int]) -> Copies:
    """Nowhere adjacent."""
    return [(i << 32, (i << 32) + (1 << 50), size) for i, size in enumerate(sizes)]


def followed(sizes: list[int], direction: int) -> Copies:
    """Adjacent on the host's side."""
    ends = np.cumsum([0, *sizes]).tolist()
    host = [(1 << 50) + at for at in ends[:-1]]
    return [
        (i << 32, at, n) if direction == LOAD else (at, i << 32, n)
        for i, (at, n) in enumerate(zip(host, sizes, strict=True))
    ]


def within(sizes: list[int], most: int) -> int:
    """Leading ones whose sum is at most that; the first one always."""
    taken, total = 0, 0
    for size in sizes:
        total += size
        if taken and total > most:
            break
        taken += 1
    return taken


SIZES = st.lists(st.integers(0, 40), min_size=1, max_size=30)


@given(SIZES, st.integers(1, 40), st.integers(0, 400), st.integers(0, 35), st.sampled_from((0, 5, 9)))
@example([4, 4, 4], 3, 8, 3, 0)
@example([4, 4, 4], 2, 12, 2, 2)
def test_a_plan_is_as_many_as_fit(sizes, room, most, listed, batch_max):
    device, copies = Device(batch_max=batch_max, batch_places=0.25), scattered(sizes)
    limits = {"room": room, "most": most, "listed": listed}
    loop = within(sizes[:room], most)
    assert device.plan("loop", copies, **limits) == (loop, loop)
    batch = within(sizes[: min(batch_max or 4096, 4 * room)], most)
    assert device.plan("batch", copies, **limits) == (batch, -(-batch // 4))
    kernel = within(sizes[:listed], most) if listed else 0
    assert device.plan("kernel", copies, **limits) == (kernel, min(kernel, 1))
    for direction in (LOAD, STORE):
        along = followed(sizes, direction)
        assert device.plan("staged", along, direction, **limits) == ((kernel, 2) if kernel and room > 1 else (0, 0))
        if len(along) > 2:
            dst, src, size = along[1]
            along[1] = (dst + 1, src + 1, size)
        wanted = within(sizes[: min(listed, 1 if len(along) > 2 else 2)], most) if listed else 0
        assert device.plan("staged", along, direction, **limits) == ((wanted, 2) if wanted and room > 1 else (0, 0))
    assert all(device.plan(method, copies, room=0) == (0, 0) for method in METHOD_NAMES)


def test_a_plan_knows_what_does_not_exist_and_how_much_is_staged():
    device, copies = Device(), followed([700_000, 348_576, 1], LOAD)
    assert device.plan("staged", copies) == (2, 2)  # half of the staging memory, to the byte
    assert device.plan("staged", copies, room=2) == (2, 2) and device.plan("staged", copies, room=1) == (0, 0)
    assert device.plan("staged", [(0, 0, 1 << 20)]) == (1, 2)
    assert device.plan("staged", [(0, 0, (1 << 20) + 1)]) == (0, 0)
    assert device.plan("batch", scattered([1] * 5_000)) == (4_096, 168)
    assert Device(batch_max=9_999).plan("batch", scattered([1] * 5_000))[0] == 4_096
    assert Device(batch_places=0.0).plan("batch", scattered([1] * 100)) == (100, 5)
    assert Device(batch_places=0.5).plan("batch", scattered([1] * 100), room=4) == (8, 4)
    for name, methods in {
        "launch_kernel": ("kernel", "staged"),
        "memcpy_async": ("staged",),
        "memcpy_batch_async": ("batch",),
    }.items():
        without = Device()
        setattr(without.copier.cuda, name, None)
        for method in ("batch", "kernel", "staged"):
            assert (without.plan(method, copies)[0] == 0) == (method in methods)
    for without in (Device(staging=0), Device(load_kernel=CopyKernel())):
        assert without.plan("staged", copies) == (0, 0) and without.submit("staged", copies)[0]
    assert Device(load_kernel=CopyKernel()).plan("kernel", copies) == (0, 0)
    assert Device(load_kernel=CopyKernel()).plan("kernel", copies, STORE)[0] == 3
    assert Device(load_kernel=CopyKernel()).submit("kernel", copies)[0]


@given(st.lists(st.integers(0, 3), min_size=1, max_size=12), st.sampled_from((0, 3)))
def test_batches_hold_what_is_not_empty_and_no_more_than_their_limit(sizes, batch_max):
    device, copies = Device(batch_max=batch_max), scattered(sizes)
    assert device.submit("batch", copies)[:3] == (0, len(copies), len(device.batches))
    assert [one for batch in device.batches for one in batch] == [one for one in copies if one[2]]
    assert all(0 < len(batch) <= (batch_max or 4096) for batch in device.batches)


def test_a_batch_before_cuda_13_says_where_it_fails_and_has_the_same_attributes():
    """cudaMemcpyBatchAsync of CUDA 12.8 and 12.9: `failIdx` stands in front of the stream."""
    seen: list[Any] = []

    def batch(dst: Any, src: Any, size: Any, count: int, attributes: int, at: int, kinds: int, *rest: Any) -> int:
        fails, stream = rest
        kept = [(dst[i], src[i], size[i]) for i in range(count)]
        seen.append((kept, kinds, ct.c_int.from_address(attributes).value, WORD.from_address(at).value, stream))
        ct.c_size_t.from_address(fails).value = 0  # may be written
        return 0

    sizes, device, copies = ct.POINTER(WORD), Device(), scattered([5, 0, 7])
    made = ct.CFUNCTYPE(ct.c_int, *[sizes] * 3, ct.c_size_t, pointer, pointer, ct.c_size_t, *[pointer] * 2)(batch)
    device.copier.cuda.memcpy_batch_async = ct.cast(made, pointer).value
    device.copier.cuda.runtime_version = 12080
    assert device.submit("batch", copies)[:3] == (0, 3, 1)
    assert seen == [([copies[0], copies[2]], 1, 1, 0, 0x5EED)]


@pytest.mark.parametrize("method", ["batch", "kernel", "staged"])
def test_of_no_copies_nothing_is_called(method):
    device = Device()
    assert device.submit(method, [])[:3] == (0, 0, 0)
    assert not (device.launches or device.copied or device.batches)


def test_a_batch_that_is_refused_ends_it_and_counts_as_called():
    device = Device(batch_max=2)
    device.code = 1
    assert device.submit("batch", scattered([5, 5, 5]))[:3] == (1, 0, 1)
    assert len(device.batches) == 1


def checked_launch(device: Device, direction: int, ctas: int, wanted: Copies, entries: Copies) -> None:
    """A launch copies what it should, and each warp finds room for its stages."""
    function, grid, shared, stream, work, extra = device.launches[-1]
    kernel = device.copier.load_kernel if direction == LOAD else device.copier.store_kernel
    assert (function, shared, stream, extra) == (kernel.function, kernel.shared_bytes, 0x5EED, None)
    assert grid[1:] == [1, 1, kernel.threads, 1, 1] and 1 <= grid[0] <= min(max(ctas, 1), kernel.max_ctas)
    assert work.list == 0xABC000 and work.total == work.units * len(entries)
    at = iter(entries)
    for dst, src, size in wanted:  # in order, each whole or in pieces that follow one another
        done = 0
        while True:
            piece = next(at)
            assert piece[:2] == (dst + done, src + done) and (piece[2] or not size)
            done += piece[2]
            if done >= size:
                break
        assert done == size
    assert next(at, None) is None
    longest = max(one[2] for one in entries)
    assert (work.units - 1) * work.unit < longest <= work.units * work.unit
    if work.units > 1:  # the kernel cuts them: all have as many units
        assert {-(-one[2] // work.unit) for one in entries} == {work.units}
    warps = kernel.threads // 32
    assert grid[0] <= -(-work.total // warps)  # no CTA has nothing to do
    turns = max(4, -(-work.total // (32 * grid[0] * warps)))  # of each warp: nobody waits for a last long one
    assert work.chunk == -(-work.total // (turns * grid[0] * warps)) and 1 <= work.chunk <= 32
    ring = shared // warps - HEADER
    assert work.stage % 16 == 0 or work.stage == ring // 4
    assert 2 <= work.stages <= 16 and work.stage * work.stages <= ring and work.stage >= 1024
    assert work.stages == 16 or 2 * work.stages * work.stage > ring or work.stages * 2 > 16


@given(
    st.lists(st.sampled_from((0, 1, 100, 4096, 5000, 16384, 16385, 65536, 70_000, 1 << 20)), min_size=1, max_size=40),
    st.sampled_from((LOAD, STORE)),
    st.integers(0, 20),
    st.sampled_from((40, 64, 1024)),
)
@example([16384] * 40, LOAD, 16, 40)
@example([1 << 20, 1, 1, 1], LOAD, 2, 1024)
@example([1 << 20] * 40, LOAD, 1, 1024)
@example([65536, 0, 65537], STORE, 1, 40)
def test_a_launch_carries_every_byte_once(sizes, direction, ctas, capacity):
    device, copies = Device(), scattered(sizes)
    code, taken, calls, entries = device.submit("kernel", copies, direction, ctas, capacity)
    assert (code, taken, calls) == (0, len(copies), 1)
    if not any(sizes):
        assert not device.launches and entries == copies
        return
    checked_launch(device, direction, ctas, copies, entries)
    assert len(entries) <= capacity and not device.launches[-1][4].pace
    if len(entries) > len(copies):
        assert len({-(-size // UNIT) for size in sizes}) > 1 or len(set(sizes)) > 1


def test_a_launch_of_equal_copies_has_as_many_units_as_keep_the_warps_busy():
    for size, count, ctas, unit in (
        (65536, 64, 2, 16384),  # 256 units for 16 warps
        (65536, 16, 2, 16384),  # 64: four each
        (65536, 15, 2, 8192),
        (65536, 8, 2, 8192),
        (65536, 7, 2, 4096),
        (65536, 1, 16, 4096),
    ):
        device = Device()
        entries = device.submit("kernel", scattered([size] * count), LOAD, ctas)[3]
        work = device.launches[0][4]
        assert (work.unit, work.units, len(entries)) == (unit, size // unit, count)


def test_one_long_copy_among_short_ones_is_cut_as_far_as_the_list_has_room():
    device = Device()
    copies = scattered([1 << 20, *[100] * 30])
    for capacity, entries in ((1024, 46), (46, 46), (45, 38), (38, 38), (37, 34), (32, 32), (31, 31)):
        assert len(device.submit("kernel", copies, capacity=capacity)[3]) == entries


def test_stages_fill_the_shared_memory_of_a_warp():
    device = Device()
    for size, stage, stages in ((10, 1024, 16), (1030, 1040, 16), (2500, 2512, 8), (5000, 4096, 8), (16384, 4096, 8)):
        device.submit("kernel", scattered([size]))
        assert (device.launches[-1][4].stage, device.launches[-1][4].stages) == (stage, stages)
    device.copier.load_kernel.shared_bytes = 8 * HEADER
    device.submit("kernel", scattered([4096]))
    assert (device.launches[-1][4].stage, device.launches[-1][4].stages) == (0, 0)


def test_a_kernel_whose_limit_is_not_known_gets_one_cta():
    device = Device(load_kernel=CopyKernel(11, 256, 8 * 40_000, 0, 1))
    device.submit("kernel", scattered([65536] * 16), ctas=9)
    assert device.launches[0][1][0] == 1


@pytest.mark.parametrize(("size", "unit"), [((1 << 45) - 16384, 16384), (1 << 45, 32768), (1 << 46, 65536)])
def test_the_number_of_units_has_32_bits(size, unit):
    device = Device()
    device.submit("kernel", [(0, 1 << 50, size)])
    assert (device.launches[0][4].unit, device.launches[0][4].total) == (unit, size // unit)


def test_only_stores_are_paced_and_by_the_rate_that_is_asked_for():
    for direction, rate, pace in ((STORE, 2_000_000_000, 4_194_304), (STORE, 999_999_999, 0), (LOAD, 2_000_000_000, 0)):
        device = Device(store_bytes_per_s=rate)
        device.submit("kernel", scattered([65536] * 16), direction, 2)
        assert device.launches[0][4].pace == pace
    assert Device(store_bytes_per_s=1_000_000_000).submit("kernel", scattered([65536] * 16), STORE)[0] == 0


@pytest.mark.parametrize("direction", [LOAD, STORE])
def test_staged_copies_are_one_transfer_and_one_launch(direction):
    device, copies = Device(), followed([5000, 100, 0, 300], direction)
    code, taken, calls, entries = device.submit("staged", copies, direction)
    assert (code, taken, calls) == (0, 4, 2)
    at = (1 << 40) + (0 if direction == LOAD else 1 << 20)
    ends = [at, at + 5000, at + 5100, at + 5100]
    wanted = [
        (dst, by, size) if direction == LOAD else (by, src, size)
        for (dst, src, size), by in zip(copies, ends, strict=True)
    ]
    checked_launch(device, direction, 2, wanted, entries)
    (to, of, size, kind, stream) = device.copied[0]
    assert (to, of) == ((at, copies[0][1]) if direction == LOAD else (copies[0][0], at))
    assert (size, kind, stream) == (5400, direction, 0x5EED)
    device.code = 5
    assert device.submit("staged", copies, direction)[:3] == (5, 0, 1)
    assert len(device.launches) == (1 if direction == LOAD else 2)
    empty = Device()
    assert empty.submit("staged", followed([0, 0], direction), direction)[:2] == (0, 2) and not empty.copied


def test_what_no_list_or_no_staging_memory_holds_is_refused_before_anything_is_called():
    device = Device()
    for method in ("kernel", "staged"):
        assert device.submit(method, followed([1] * 9, LOAD), capacity=8)[:2] == (801, 0)
        assert device.submit(method, followed([1] * 8, LOAD), capacity=8)[:2] == (0, 8)
        assert device.submit(method, followed([1], LOAD), capacity=0)[:2] == (801, 0)
    assert device.submit("staged", followed([1 << 20, 1], LOAD))[:2] == (1, 0)
    assert device.submit("staged", followed([(1 << 20) - 1, 1], LOAD))[:2] == (0, 2)
    assert device.submit("staged", scattered([1, 1]))[:2] == (1, 0)
    assert device.submit("loop", scattered([1]))[0] == 1
    assert device.submit("kernel", [])[:3] == (0, 0, 0)
    device.code = 7
    assert device.submit("kernel", scattered([1]))[:3] == (7, 0, 1)
