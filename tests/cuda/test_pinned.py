"""The pool of pinned memory: what it hands out again, what it holds, and when it lets go."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvprobe.cuda import Buffer, PinnedBuffer, PinnedPool, region_of
from kvprobe.cuda.hostruntime import HostRuntime, host_runtime
from kvprobe.errors import CudaError, UsageError
from kvprobe.native.library import core

MIB = 1 << 20
SLEEPS = 10_000


@pytest.fixture
def runtime() -> Iterator[HostRuntime]:
    runtime = host_runtime(virtual_clock=True, seed=1)
    yield runtime
    runtime.reset()


def machine(root: Path, left_mib: int, total_mib: int = 65536) -> Path:
    """The files of a machine with so much memory, as /proc has them."""
    (root / "proc" / "self").mkdir(parents=True, exist_ok=True)
    text = f"MemTotal: {total_mib << 10} kB\nMemFree: 1 kB\nMemAvailable: {left_mib << 10} kB\n"
    partial = root / "proc" / "partial"
    partial.write_text(text)
    partial.replace(root / "proc" / "meminfo")
    return root


def pool_of(runtime: HostRuntime, root: Path, budget_mib: int = 64) -> PinnedPool:
    class There(PinnedPool):
        _root = bytes(root)

    return There(runtime, budget_mib * MIB, populate_bytes=4 * MIB)


def test_memory_is_pinned_whoever_makes_its_pages(runtime: HostRuntime) -> None:
    with PinnedPool(runtime, 0, populate_bytes=4 * MIB) as pool:
        for size in (4096, 4 * MIB, 5 * MIB + 3):
            with pool.take(size) as buffer:
                assert runtime.memory_kind(buffer.address + size - 1) == "pinned"
                assert region_of(runtime, buffer).bytes == size
                buffer.view()[size - 1] = 7
                assert runtime.stats.pinned_bytes == size
        assert (pool.stats.pinnings, pool.stats.populated_pinnings) == (3, 2)
    assert runtime.stats.pinned_bytes == 0


def test_a_range_is_one_registration_unless_pieces_are_asked_for(runtime: HostRuntime) -> None:
    device = Buffer(runtime, 8 * MIB, "device")
    with PinnedPool(runtime, 0, populate_bytes=4 * MIB) as pool:
        for piece, registrations in ((0, 1), (2 * MIB, 4)):
            runtime.trace_start()
            buffer = pool.take(8 * MIB, piece)
            runtime.memcpy(device.address, buffer.address, 2 * MIB, "h2d")
            runtime.trace_stop()
            calls = [runtime.call_name(int(row["api"])) for row in runtime.trace()]
            assert calls.count("cudaHostRegister") == registrations
            buffer.close()
    device.close()


@pytest.mark.parametrize(("asked", "served"), [(16, True), (15, True), (13, False), (17, False)])
def test_what_came_back_serves_an_equal_or_little_smaller_request(
    runtime: HostRuntime, asked: int, served: bool
) -> None:
    with PinnedPool(runtime, 64 * MIB, populate_bytes=4 * MIB) as pool:
        first = pool.take(16 * MIB)
        first.view()[0] = 9
        first.close()
        with pool.take(asked * MIB) as second:
            assert pool.stats.reuses == served
            assert second.view()[0] == (9 if served else 0)
            assert pool.stats.excess_bytes == (16 - asked) * MIB * served
        with pool.take(16 * MIB, 2 * MIB):
            assert pool.stats.reuses == served  # pieces were asked for, and it is one


def test_coming_back_waits_for_the_device(runtime: HostRuntime) -> None:
    stream = runtime.stream_create()
    with PinnedPool(runtime, 64 * MIB) as pool:
        buffer = pool.take(MIB)
        began = runtime.now_ns()
        runtime.launch_delay(stream, 5_000_000)
        buffer.close()
        assert runtime.now_ns() - began >= 5_000_000
        assert pool.stats.kept_bytes == MIB


def test_ten_thousand_sleeps_stay_within_the_budget(runtime: HostRuntime) -> None:
    draw = random.Random(11)
    weights = [draw.randrange(1, 40) * 64 << 10 for _ in range(12)]
    budget = sum(weights) * 2 // 3
    with PinnedPool(runtime, budget, populate_bytes=MIB) as pool:
        for _ in range(SLEEPS // len(weights) + 1):
            held: list[PinnedBuffer] = []
            for size in weights:
                held.append(pool.take(size - draw.randrange(2) * (size // 16)))
                check(runtime, pool, budget)
            draw.shuffle(held)
            for buffer in held:
                buffer.close()
                check(runtime, pool, budget)
        stats = pool.stats
        assert stats.reuses > SLEEPS // 4
        assert stats.reuses + stats.pinnings >= SLEEPS
        assert stats.out_bytes == 0
    assert runtime.stats.pinned_bytes == 0


def check(runtime: HostRuntime, pool: PinnedPool, budget: int) -> None:
    stats = pool.stats
    assert stats.kept_bytes + stats.excess_bytes <= stats.most_bytes <= budget
    assert runtime.stats.pinned_bytes == stats.out_bytes + stats.kept_bytes + stats.excess_bytes


def test_what_is_kept_goes_when_memory_is_short(runtime: HostRuntime, tmp_path: Path) -> None:
    with pool_of(runtime, machine(tmp_path, 9000)) as pool:
        buffers = [pool.take(8 * MIB) for _ in range(3)]
        for buffer in buffers:
            buffer.close()
        assert pool.stats.kept_bytes == 24 * MIB
        machine(tmp_path, 4091)  # 4 GiB are to be left: 5 MiB too few, which the oldest has
        last = pool.take(MIB)
        assert (pool.stats.pressure_evictions, pool.stats.kept_bytes) == (1, 16 * MIB)
        machine(tmp_path, 100)
        last.close()
        assert pool.stats.kept_bytes == 0


def test_a_thread_lets_go_while_nobody_calls(tmp_path: Path) -> None:
    runtime = host_runtime(virtual_clock=2)
    with pool_of(runtime, machine(tmp_path, 9000)) as pool:
        pool.take(8 * MIB).close()
        machine(tmp_path, 100)
        until = time.monotonic() + 60
        while not pool.stats.pressure_evictions and time.monotonic() < until:
            time.sleep(0.01)
        assert pool.stats.pressure_evictions == 1
        assert runtime.stats.pinned_bytes == 0
    runtime.reset()


def left(root: Path) -> tuple[int, int]:
    memory = core().kvp_memory_left(bytes(root))
    return memory.total_bytes // MIB, memory.left_bytes // MIB


def group(root: Path, path: str, files: dict[str, str]) -> None:
    folder = root / "sys" / "fs" / "cgroup" / path
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text + "\n")


def test_the_tightest_cgroup_above_says_what_is_left(tmp_path: Path) -> None:
    machine(tmp_path, 50000)
    assert left(tmp_path) == (65536, 50000)
    (tmp_path / "proc" / "self" / "cgroup").write_text("0::/a/b\n")
    group(tmp_path, "a", {"memory.max": str(8192 * MIB), "memory.high": "max", "memory.current": str(6000 * MIB)})
    stat = f"anon 5\ninactive_file {1000 * MIB}\nactive_file {500 * MIB}"
    group(tmp_path, "a", {"memory.stat": stat})
    assert left(tmp_path) == (8192, 8192 - 4500)
    group(tmp_path, "a/b", {"memory.max": "max", "memory.high": str(4096 * MIB), "memory.current": str(4095 * MIB)})
    assert left(tmp_path) == (4096, 1)


def test_the_first_version_of_cgroups_is_read_too(tmp_path: Path) -> None:
    machine(tmp_path, 50000)
    (tmp_path / "proc" / "self" / "cgroup").write_text("12:cpuset:/\n4:cpu,memory:/job\n")
    files = {"memory.limit_in_bytes": str(1024 * MIB), "memory.usage_in_bytes": str(1000 * MIB)}
    group(tmp_path, "memory/job", {**files, "memory.stat": f"total_inactive_file {24 * MIB}"})
    assert left(tmp_path) == (1024, 48)


@pytest.mark.parametrize("number", [1, 3])
def test_where_registering_is_refused_the_runtime_pins_as_ever(runtime: HostRuntime, number: int) -> None:
    with PinnedPool(runtime, 0, populate_bytes=4 * MIB) as pool:
        runtime.fail_call("cudaHostRegister", number, 801)
        buffer = pool.take(8 * MIB, 2 * MIB)
        assert runtime.stats.pinned_bytes == 8 * MIB
        assert (pool.stats.pinnings, pool.stats.populated_pinnings) == (1, 0)
        buffer.close()
    assert runtime.stats.pinned_bytes == 0


def test_out_of_memory_is_the_runtimes_own_error(runtime: HostRuntime) -> None:
    runtime.reset(virtual_clock=True, pinned_bytes=20 * MIB)
    with PinnedPool(runtime, 16 * MIB, populate_bytes=4 * MIB) as pool:
        pool.take(12 * MIB).close()
        with pytest.raises(CudaError, match=r"cudaHostAlloc failed: cudaErrorMemoryAllocation \(2\)"):
            pool.take(24 * MIB)
        pool.take(16 * MIB).close()  # what was kept has made room
        assert pool.stats.evictions == 1
    assert runtime.stats.pinned_bytes == 0


def test_a_reset_of_the_runtime_leaves_nothing_to_hand_out(runtime: HostRuntime) -> None:
    with PinnedPool(runtime, 64 * MIB, populate_bytes=4 * MIB) as pool:
        kept, out = pool.take(8 * MIB), pool.take(8 * MIB)
        kept.close()
        runtime.reset(virtual_clock=True, seed=1)
        assert pool.stats.kept_bytes == 0
        out.close()
        assert pool.stats.kept_bytes == 0
        with pool.take(8 * MIB) as buffer:
            assert runtime.memory_kind(buffer.address) == "pinned"
            assert pool.stats.reuses == 0


def test_a_child_of_a_fork_has_no_pool_and_the_parent_keeps_its_own(runtime: HostRuntime) -> None:
    with PinnedPool(runtime, 64 * MIB, populate_bytes=4 * MIB) as pool:
        kept, out = pool.take(8 * MIB), pool.take(8 * MIB)
        kept.close()
        child = os.fork()
        if not child:
            code = 1
            try:
                out.close()
                pool.trim()
                with pytest.raises(CudaError):
                    pool.take(MIB)
                code = pool.stats.kept_bytes
                pool.close()
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert pool.stats.kept_bytes == 8 * MIB
        out.view()[0] = 1
        out.close()
        assert pool.stats.kept_bytes == 16 * MIB


def test_a_closed_pool_takes_back_what_is_out(runtime: HostRuntime) -> None:
    pool = PinnedPool(runtime, 64 * MIB, populate_bytes=4 * MIB)
    out = pool.take(8 * MIB)
    pool.close()
    out.view()[0] = 1
    with pytest.raises(UsageError, match="closed"):
        pool.take(1)
    out.close()
    assert runtime.stats.pinned_bytes == 0


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda runtime: PinnedPool(runtime, -1), "cannot be negative"),
        (lambda runtime: PinnedPool(runtime, 0).take(0), "cannot pin 0 bytes"),
        (lambda runtime: PinnedPool(runtime, 0).take(4096, 4096), "multiple of 2 MiB"),
    ],
)
def test_what_cannot_be_is_refused(runtime: HostRuntime, call: Callable[[HostRuntime], object], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        call(runtime)


LIMITED = """
import resource, sys
from kvprobe.cuda import PinnedPool, find_runtime
from kvprobe.errors import CudaError
runtime = find_runtime("host")
pool = PinnedPool(runtime, 64 << 20, populate_bytes=4 << 20)
pool.take(8 << 20).close()
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(getattr(resource, sys.argv[1]), (used + (40 << 20) if sys.argv[1] == "RLIMIT_AS" else 65536,) * 2)
try:
    pool.take(256 << 20)
    print("pinned")
except CudaError as error:
    print(error.code)
pool.take(8 << 20).close()
print(pool.stats.reuses)
"""


@pytest.mark.parametrize(("limit", "printed"), [("RLIMIT_AS", "2\n0\n"), ("RLIMIT_MEMLOCK", "pinned\n1\n")])
def test_limits_of_the_process_are_the_runtimes_own_errors(limit: str, printed: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, limit], capture_output=True, text=True, check=False, timeout=120
    )
    assert (done.stdout, done.returncode) == (printed, 0), done.stderr


def test_what_comes_back_after_a_reset_is_not_taken_for_who_has_its_address_now(runtime: HostRuntime) -> None:
    with PinnedPool(runtime, 0) as pool:
        old = [pool.take(MIB) for _ in range(4)]
        runtime.reset(virtual_clock=True, seed=1)
        new = [pool.take(MIB) for _ in range(4)]
        assert {one.address for one in old} & {one.address for one in new}
        for one in old:
            one.close()
        assert runtime.stats.pinned_bytes == 4 * MIB
        for one in new:
            assert runtime.memory_kind(one.address) == "pinned"
            one.close()
        assert runtime.stats.pinned_bytes == 0
