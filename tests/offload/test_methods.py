"""The methods move the right bytes, say how many places they take, and give way to the next one with a reason."""

from __future__ import annotations

import ctypes as ct
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvprobe.cuda import Runtime, kernels
from kvprobe.cuda.copies import DIRECTIONS, METHOD_NAMES, PinnedList, columns, submit_copies
from kvprobe.cuda.memory import Buffer
from kvprobe.errors import CudaError, UsageError
from kvprobe.native.library import Copier, MethodTable, core
from kvprobe.offload import method_cache
from kvprobe.offload.methods import SIZES, Methods, choose, copier_for, default_table, method_table

POOL = 1 << 20
# of kvhost_stats: 2 * 96 uint32, then capacity (3), copies (2), bytes (5), launches, blocked (2), pending
STATS_PENDING = 96 + 3 + 2 + 5 + 1 + 2

QUIET, UNKNOWN, BESIDE = -1, 0, 1  # enum kvp_compute


class Place:
    """A runtime, its methods, a pool on each side."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.methods = copier_for(runtime, staging_bytes=1 << 20)
        self.stream = runtime.stream_create()
        self.device, self.host = Buffer(runtime, POOL, "device"), Buffer(runtime, POOL, "pinned")
        self.pinned = PinnedList(runtime, 1024)

    def sides(self, direction: str) -> tuple[Buffer, Buffer]:
        return (self.device, self.host) if direction == "h2d" else (self.host, self.device)

    def moved(self, method: str, direction: str, offsets: list[tuple[int, int, int]], ctas: int = 2) -> None:
        """Copies (dst offset, src offset, bytes) and compares every byte of the destination."""
        dst, src = self.sides(direction)
        random = np.random.default_rng(len(offsets))
        to, source = (np.frombuffer(one.view(), np.uint8) for one in (dst, src))
        to[:], source[:] = random.integers(0, 256, POOL, np.uint8), random.integers(0, 256, POOL, np.uint8)
        wanted = to.copy()
        for at, begin, size in offsets:
            wanted[at : at + size] = source[begin : begin + size]
        at, begin, size = (np.array(column, np.uint64) for column in zip(*offsets, strict=True))
        copies = columns(at + np.uint64(dst.address), begin + np.uint64(src.address), size)
        submit_copies(
            self.runtime, self.methods.native, method, direction, copies, self.stream, ctas=ctas, pinned=self.pinned
        )
        self.runtime.stream_synchronize(self.stream)
        assert np.array_equal(to, wanted)

    def close(self) -> None:
        self.runtime.stream_destroy(self.stream)
        for one in (self.device, self.host, self.pinned, *self.methods.owned):
            one.close()


@pytest.fixture
def place(host: Callable[..., Runtime]) -> Iterator[Place]:
    made = Place(host(latency_ns=-1.0, h2d_bytes_per_s=1e12, d2h_bytes_per_s=1e12))
    yield made
    made.close()


def scattered(sizes: list[int], gaps: list[int]) -> list[tuple[int, int, int]]:
    """Copies of these sizes at odd offsets, in another order on each side, none over another."""
    made, at, begin = [], 0, 0
    for number, size in enumerate(sizes):
        at += gaps[number % len(gaps)]
        begin += gaps[(number + 1) % len(gaps)]
        if max(at, begin) + size > POOL:
            break
        made.append((at, begin, size))
        at, begin = at + size, begin + size
    return made[::-1]


@pytest.mark.parametrize("direction", ["h2d", "d2h"])
@pytest.mark.parametrize("method", ["loop", "batch", "kernel"])
def test_bytes_are_right_for_any_size_and_alignment(place: Place, method: str, direction: str) -> None:
    @settings(max_examples=20, deadline=None)
    @given(st.lists(st.integers(1, 70_000), min_size=1, max_size=60), st.lists(st.integers(0, 33), min_size=1))
    def check(sizes: list[int], gaps: list[int]) -> None:
        place.moved(method, direction, scattered(sizes, gaps))

    check()


def test_paced_stores_have_the_same_bytes(place: Place) -> None:
    place.methods.native.store_bytes_per_s = 2_000_000_000
    sizes = [16384, 1000, 70_000, 40, 2048, 5] * 8
    place.moved("kernel", "d2h", scattered(sizes, [0, 3, 16]))
    place.moved("kernel", "d2h", scattered([16384] * 60, [0]), ctas=8)


@pytest.mark.parametrize("direction", ["h2d", "d2h"])
def test_staged_copies_need_a_contiguous_host_side(place: Place, direction: str) -> None:
    size, count = 5000, 20
    host = [number * size for number in range(count)]
    device = [number * size for number in reversed(range(count))]
    offsets = list(zip(device, host, [size] * count, strict=True))
    place.moved("staged", direction, [(b, a, n) if direction == "d2h" else (a, b, n) for a, b, n in offsets])
    with pytest.raises(UsageError, match="staged cannot take"):
        place.moved("staged", direction, [(a, b, n) if direction == "d2h" else (b, a, n) for a, b, n in offsets])


def test_one_long_copy_among_short_ones_is_cut_for_many_warps(place: Place) -> None:
    place.moved("kernel", "h2d", [(0, 1, 700_000), *[(700_016 + 100 * i, 800_000 + 100 * i, 100) for i in range(200)]])
    assert place.pinned.native.capacity == 1024


def plan(
    place: Place,
    method: str,
    sizes: list[int],
    *,
    room: int = 1 << 20,
    most: int = 1 << 40,
    listed: int = 1024,
    direction: str = "h2d",
) -> tuple[int, int]:
    """(copies taken, places) of scattered copies of these sizes."""
    copies, places = columns(1 << 20, np.arange(len(sizes)) * 100_000, np.array(sizes, np.uint64)), ct.c_uint32()
    taken = core().kvp_copy_plan(
        ct.byref(place.methods.native),
        METHOD_NAMES.index(method),
        copies.ctypes.data,
        len(copies),
        DIRECTIONS[direction],
        room,
        most,
        listed,
        ct.byref(places),
    )
    return taken, places.value


def test_a_plan_keeps_within_room_bytes_and_list(place: Place) -> None:
    many = [1000] * 500
    assert plan(place, "loop", many) == (500, 500)
    assert plan(place, "loop", many, room=7) == (7, 7)
    assert plan(place, "batch", many) == (500, 21)  # 500 * 0.041, rounded up
    assert plan(place, "batch", many, room=4)[1] <= 4
    assert plan(place, "kernel", many) == (500, 1)
    assert plan(place, "kernel", many, listed=64) == (64, 1)
    assert plan(place, "kernel", many, listed=0) == (0, 0)
    for method in ("loop", "batch", "kernel"):
        assert plan(place, method, many, most=10_500)[0] == 10
        assert plan(place, method, many, most=1)[0] == 1  # a first copy beyond it is taken alone
        assert plan(place, method, many, room=0) == (0, 0)
    assert plan(place, "staged", many) == (1, 2)  # not contiguous: the first alone
    assert plan(place, "staged", many, room=1) == (0, 0)


@pytest.mark.parametrize(("method", "count"), [("batch", 8), ("batch", 80), ("batch", 1000), ("kernel", 1000)])
def test_a_plan_and_the_runtime_agree_on_places(place: Place, method: str, count: int) -> None:
    """Held back by a kernel, the copies take as many places as planned (an event takes one more)."""
    runtime, (dst, src) = place.runtime, place.sides("h2d")
    planned = plan(place, method, [64] * count)
    assert planned[0] == count
    gate = runtime.library.kvhostGateCreate
    gate.restype = ct.c_void_p
    held = ct.c_void_p(gate())
    runtime.library.kvhostGateLaunch(held, ct.c_void_p(place.stream))
    before = operations(runtime)
    at = np.arange(count, dtype=np.uint64) * np.uint64(128)
    copies = columns(at + np.uint64(dst.address), at + np.uint64(src.address), 64)
    submit_copies(runtime, place.methods.native, method, "h2d", copies, place.stream, pinned=place.pinned)
    taken = operations(runtime) - before
    runtime.library.kvhostGateOpen(held)
    runtime.stream_synchronize(place.stream)
    runtime.library.kvhostGateDestroy(held)
    assert taken <= planned[1] <= taken + 1  # never more than planned


def operations(runtime: Runtime) -> int:
    """Operations submitted and not completed."""
    stats = (ct.c_uint64 * 200)()
    runtime.library.kvhostStats(stats)
    return int(stats[STATS_PENDING])


def test_a_launch_reads_its_list_when_it_runs(place: Place) -> None:
    """Who changes the list of a launch that has not run gets other copies: the submitter must not."""
    runtime, (dst, src) = place.runtime, place.sides("h2d")
    np.frombuffer(dst.view(), np.uint8)[:] = 0
    np.frombuffer(src.view(), np.uint8)[:] = 7
    copies = columns([dst.address], src.address, 4096)
    with runtime.gate() as gate:
        gate.launch(place.stream)
        submit_copies(runtime, place.methods.native, "kernel", "h2d", copies, place.stream, pinned=place.pinned)
        ct.memset(place.pinned.native.host, 0, 24)
        gate.open()
        runtime.stream_synchronize(place.stream)
    assert not np.frombuffer(dst.view(), np.uint8).any()


def test_an_address_that_no_gpu_reaches_ends_in_an_illegal_address(place: Place) -> None:
    pageable = bytearray(4096)
    address = ct.addressof((ct.c_char * 4096).from_buffer(pageable))
    copies = columns([place.device.address], address, 4096)
    submit_copies(place.runtime, place.methods.native, "kernel", "h2d", copies, place.stream, pinned=place.pinned)
    with pytest.raises(CudaError, match="IllegalAddress"):
        place.runtime.stream_synchronize(place.stream)
    place.runtime.library.kvhostReset(None)
    place.stream = place.runtime.stream_create()
    place.close = lambda: None  # type: ignore[method-assign]  # the reset took everything


# -- what does not exist ---------------------------------------------------------------------------------------------


def test_without_nvrtc_copies_go_by_batch_and_the_reason_is_said(
    host: Callable[..., Runtime], monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(*_: object, **__: object) -> kernels.CopyKernels:
        return kernels.CopyKernels(reason="NVRTC not found: no libnvrtc; install nvidia-cuda-nvrtc")

    monkeypatch.setattr("kvprobe.offload.methods.load_copy_kernels", missing)
    found = copier_for(host())
    assert found.names == ("loop", "batch")
    assert found.missing["kernel"].startswith("NVRTC not found")
    assert choose(method_table(found), "h2d", 16384, 1000) == ("batch", 0)
    with pytest.raises(UsageError, match="NVRTC not found"):
        method_table(found, "kernel")


def test_a_driver_that_refuses_batches_has_none(host: Callable[..., Runtime]) -> None:
    runtime = host()
    runtime.library.kvhostFailCall(b"cudaMemcpyBatchAsync", 1, 801)
    found = copier_for(runtime)
    assert "batch" not in found.names
    assert "cudaErrorNotSupported" in found.missing["batch"]
    assert choose(method_table(found), "d2h", 1 << 20, 100)[0] != "batch"


def test_a_module_that_does_not_load_leaves_dma(host: Callable[..., Runtime]) -> None:
    runtime = host()
    runtime.library.kvhostFailCall(b"cuModuleLoadData", 1, 2)
    found = copier_for(runtime)
    assert found.names == ("loop", "batch")
    assert "cuModuleLoadData returned 2" in found.missing["kernel"]


def test_a_launch_that_fails_submits_nothing(place: Place) -> None:
    place.runtime.library.kvhostFailCall(b"cuLaunchKernel", 1, 701)
    dst, src = place.sides("h2d")
    copies = columns([dst.address], src.address, 4096)
    with pytest.raises(CudaError) as raised:
        submit_copies(place.runtime, place.methods.native, "kernel", "h2d", copies, place.stream, pinned=place.pinned)
    assert raised.value.code == 701


# -- the chooser -------------------------------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_the_choice_is_never_five_per_cent_behind_the_best_row(data: st.DataObject) -> None:
    table = MethodTable(max_slowdown=data.draw(st.sampled_from([0.0, 0.03, 1.0])), near=1.03)
    for side in range(2):
        table.rows[side] = data.draw(st.integers(1, 8))
        for i in range(table.rows[side]):
            row = table.row[side][i]
            row.method = data.draw(st.integers(0, 2))
            row.ctas = data.draw(st.sampled_from([1, 2, 4, 8])) if row.method == 2 else 0
            row.slowdown = data.draw(st.floats(0, 0.125, width=32)) if row.ctas else 0
            start, rate = data.draw(st.floats(0, 50_000)), data.draw(st.floats(1, 60))
            row.fixed_ns[:] = [start] * len(SIZES)
            row.copy_ns[:] = [200 + size / rate for size in SIZES]
    direction, size = data.draw(st.sampled_from(["h2d", "d2h"])), data.draw(st.integers(1, 16 << 20))
    count, side = data.draw(st.integers(1, 20_000)), ("h2d", "d2h").index(direction)
    allowed = [
        table.row[side][i]
        for i in range(table.rows[side])
        if not table.row[side][i].ctas or table.row[side][i].slowdown <= table.max_slowdown
    ]
    if not allowed:
        assert choose(table, direction, size, count) == ("loop", 0)
        return
    took = {}
    for row in allowed:
        key = METHOD_NAMES[row.method], row.ctas
        took[key] = min(took.get(key, float("inf")), core().kvp_method_ns(ct.byref(row), size, count))
    assert took[choose(table, direction, size, count)] <= 1.05 * min(took.values())


def test_what_products_lose_counts_like_time_of_the_copies(place: Place) -> None:
    table = default_table(place.methods)
    other = ~(1 << METHOD_NAMES.index("staged")) & 0xFFFFFFFF

    def chosen(size: int, compute: int) -> str:
        row = core().kvp_choose_row(ct.byref(table), other, None, compute, 2, size, 4096)
        return METHOD_NAMES[table.row[1][row].method]

    assert [chosen(size, UNKNOWN) for size in (8192, 16384, 65536)] == ["kernel", "kernel", "batch"]
    assert [chosen(size, BESIDE) for size in (8192, 16384, 65536)] == ["kernel", "batch", "batch"]


def test_where_nothing_computes_nobody_pays(place: Place) -> None:
    table = default_table(place.methods)
    table.max_slowdown = 0.0
    row = core().kvp_choose_row(ct.byref(table), 1 << METHOD_NAMES.index("kernel"), None, QUIET, 2, 4096, 4096)
    assert table.row[1][row].ctas in (4, 8)
    row = core().kvp_choose_row(ct.byref(table), 1 << METHOD_NAMES.index("kernel"), None, BESIDE, 2, 4096, 4096)
    assert table.row[1][row].ctas == 1
    table.max_slowdown = -1.0
    assert core().kvp_choose_row(ct.byref(table), 1 << METHOD_NAMES.index("kernel"), None, QUIET, 2, 4096, 4096) == -1


def test_the_default_keeps_within_the_multiprocessors_that_are_allowed(place: Place) -> None:
    table = default_table(place.methods)
    for direction in ("h2d", "d2h"):
        for size in SIZES:
            method, ctas = choose(table, direction, size, 8192)
            assert ctas <= (4 if size >= 16384 else 8), (direction, size)
            assert (method == "kernel") == (ctas > 0)
            if size >= 1 << 20:
                assert method != "kernel"  # DMA alone reaches 95% of the link
        assert choose(method_table(place.methods, max_slowdown=-1.0), direction, 16384, 8192)[1] == 0


def test_what_was_measured_here_comes_before_the_default(place: Place) -> None:
    slow = default_table(place.methods)
    for i in range(slow.rows[0]):
        if slow.row[0][i].method == METHOD_NAMES.index("kernel"):
            slow.row[0][i].copy_ns[:] = [1e6] * len(SIZES)
    assert choose(method_table(place.methods), "h2d", 16384, 1000)[0] == "kernel"
    place.methods.measured = slow
    assert choose(method_table(place.methods), "h2d", 16384, 1000)[0] == "batch"
    assert choose(method_table(place.methods, measured=default_table(place.methods)), "h2d", 16384, 1000)[0] == "kernel"


def test_a_forced_method_is_the_only_one(place: Place) -> None:
    for name in ("loop", "batch", "kernel"):
        assert choose(method_table(place.methods, name), "h2d", 4096, 100)[0] == name
    with pytest.raises(UsageError, match="unknown method"):
        method_table(place.methods, "dma")
    assert isinstance(place.methods, Methods)


def test_measured_rows_are_chosen_by_the_figures_of_the_default_table() -> None:
    table = method_cache.table_of({"format": method_cache.FORMAT, "paced_store_bytes_per_s": 0, "rows": []})
    default = MethodTable()
    core().kvp_method_table_default(ct.byref(default), ct.byref(Copier()))
    assert (table.near, table.max_slowdown) == (default.near, default.max_slowdown)
    assert list(table.rows) == [0, 0] and table.near > 1
