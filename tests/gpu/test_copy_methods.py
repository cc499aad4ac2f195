"""Copy kernels on a GPU: the right bytes for any size and alignment, compiled once, kept in a private folder."""

import json
import os
import stat
import subprocess
import sys

import numpy as np
import pytest

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from kvprobe.cuda import find_runtime, kernels  # noqa: E402
from kvprobe.cuda.copies import PinnedList, columns, submit_copies  # noqa: E402
from kvprobe.cuda.memory import Buffer  # noqa: E402
from kvprobe.offload.method_calibration import measure  # noqa: E402
from kvprobe.offload.methods import copier_for  # noqa: E402

POOL = 32 << 20


@pytest.fixture(scope="module")
def runtime():
    return find_runtime("cuda")


def offsets(kind, random):
    """(dst, src, bytes) of copies that do not overlap, in random order."""
    made, at, begin = [], 0, 0
    while True:
        size = {
            "tiny": lambda: random.integers(1, 200),
            "mixed": lambda: random.integers(1, 40_000),
            "blocks": lambda: 8192,
            "long": lambda: random.integers(1, 3_000_000),
        }[kind]()
        if kind != "blocks":
            at, begin = at + random.integers(0, 40), begin + random.integers(0, 40)
            if random.random() < 0.3:
                at, begin = (at + 15) // 16 * 16, (begin + 15) // 16 * 16
        if max(at, begin) + size > POOL or len(made) == 8000:
            break
        made.append((at, begin, size))
        at, begin = at + size, begin + size
    return random.permutation(np.array(made, np.uint64))


@pytest.mark.parametrize("kind", ["tiny", "mixed", "blocks", "long"])
@pytest.mark.parametrize("direction", ["h2d", "d2h"])
@pytest.mark.parametrize(("method", "bulk"), [("kernel", True), ("kernel", False), ("batch", None), ("loop", None)])
def test_every_byte_arrives_and_none_beside_it_changes(runtime, method, bulk, direction, kind):
    if bulk and torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("no bulk asynchronous copies before compute capability 9.0")
    random = np.random.default_rng(len(kind))
    found = copier_for(runtime, bulk=bulk)
    assert method in found.names, found.missing
    device, host, back = (
        Buffer(runtime, POOL, "device"),
        Buffer(runtime, POOL, "pinned"),
        Buffer(runtime, POOL, "pinned"),
    )
    pinned, stream = PinnedList(runtime, 8192), runtime.stream_create()
    source, start = (random.integers(0, 256, POOL, np.uint8) for _ in range(2))
    at, begin, size = offsets(kind, random).T
    wanted = start.copy()
    for a, b, n in zip(at.astype(int), begin.astype(int), size.astype(int), strict=True):
        wanted[a : a + n] = source[b : b + n]
    seen = np.frombuffer(back.view(), np.uint8)
    for ctas, paced in ((1, 0), (3, 0), (8, 0), (1, 5e9), (2, 40e9)):
        found.native.store_bytes_per_s = int(paced)
        seen[:] = source if direction == "d2h" else start
        runtime.memcpy(device.address, back.address, POOL, "h2d")
        np.frombuffer(host.view(), np.uint8)[:] = source if direction == "h2d" else start
        dst, src = (device, host) if direction == "h2d" else (host, device)
        copies = columns(at + np.uint64(dst.address), begin + np.uint64(src.address), size)
        submit_copies(runtime, found.native, method, direction, copies, stream, ctas=ctas, pinned=pinned)
        runtime.stream_synchronize(stream)
        if direction == "h2d":
            runtime.memcpy(back.address, device.address, POOL, "d2h")
        else:
            seen[:] = np.frombuffer(host.view(), np.uint8)
        assert np.array_equal(seen, wanted)
    runtime.stream_destroy(stream)
    for one in (device, host, back, pinned):
        one.close()


def test_kernels_are_compiled_once_and_a_broken_cache_is_compiled_again(runtime, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert kernels.load_copy_kernels(runtime).how == "compiled"
    assert kernels.load_copy_kernels(runtime).how == "cached"
    folder = tmp_path / "kvprobe" / "kernels"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    files = sorted(folder.iterdir())
    assert len(files) == 2, "copies as they are, and coded ones"
    hows = []
    for file in files:
        held = file.read_bytes()
        for broken in (b"", held[:100], held[:-1] + b"!", b"\x7fELF" + held[4:]):
            file.write_bytes(broken)
            loaded = kernels.load_copy_kernels(runtime)
            hows.append(loaded.how)
            assert loaded.coded is not None and file.read_bytes() == held
    assert sorted(hows) == ["cached"] * 4 + ["compiled"] * 4  # of copies as they are


def test_without_nvrtc_there_is_a_reason(runtime, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def missing(name):
        raise RuntimeError(f"{name} is not here")

    monkeypatch.setattr("cuda.pathfinder.load_nvidia_dynamic_lib", missing)
    found = kernels.load_copy_kernels(runtime)
    assert found.load is None
    assert found.reason.startswith("NVRTC not found: nvrtc is not here")


def test_a_quick_calibration_fills_the_table(runtime):
    result = measure(runtime, copier_for(runtime), quick=True)
    assert {row["method"] for row in result["rows"]} == {"loop", "batch", "kernel"}
    assert all(value > 0 for row in result["rows"] for value in row["copy_ns"])
    assert {one["direction"] for one in result["choices"]} == {"h2d", "d2h"}


def test_what_was_measured_is_kept_for_this_machine(tmp_path):
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    command = [sys.executable, "-m", "kvprobe", "calibrate", "--device", "cuda", "--json"]
    first, second = (
        json.loads(subprocess.run([*command, *more], env=environment, capture_output=True, check=True).stdout)
        for more in (["--quick"], ["--cached"])
    )
    assert first == second
    assert first["gpu"]
