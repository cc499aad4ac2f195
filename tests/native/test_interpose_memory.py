"""What the interposer says of the memory of a copy is said of that memory, not of its neighbourhood."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from kvprobe.probe.ring import PAGEABLE, PINNED, read_ring

PROGRAM = """
import ctypes as ct, mmap, os, sys
runtime = ct.CDLL(sys.argv[1])
memory = mmap.mmap(-1, 8 << 20)
begin = ct.addressof(ct.c_char.from_buffer(memory)) + (2 << 20) - 1 & ~((2 << 20) - 1)
gpu, stream = ct.c_void_p(), ct.c_void_p()
assert runtime.cudaMalloc(ct.byref(gpu), ct.c_size_t(4 << 20)) == 0
assert runtime.cudaStreamCreateWithPriority(ct.byref(stream), 1, 0) == 0
for at in (65536, 1 << 20):
    assert runtime.cudaHostRegister(ct.c_void_p(begin + at), ct.c_size_t(65536), 0) == 0
for at in eval(sys.argv[2]):
    assert runtime.cudaMemcpyAsync(gpu, ct.c_void_p(begin + at), ct.c_size_t(1), 1, stream) == 0
assert runtime.cudaStreamSynchronize(stream) == 0  # before the memory goes
"""


def test_pinned_and_pageable_memory_side_by_side_keep_their_kinds(libraries: Path, tmp_path: Path) -> None:
    pinned = [65536, 65536 + 65535, 1 << 20, (1 << 20) + 4096]
    pageable = [0, 65535, 2 * 65536, (1 << 20) - 1, (1 << 20) + 65536, (2 << 20) - 1]
    order = [at for pair in zip(pageable[:4], pinned, strict=True) for at in pair] + pageable[4:]
    order += order[::-1] + order  # what was asked about is remembered
    env = {**os.environ, "LD_PRELOAD": str(libraries / "libkvprobe_interpose.so"), "KVPROBE_RUN": str(tmp_path)}
    runtime = str(libraries / "libkvprobe_hostrt.so")
    subprocess.run([sys.executable, "-c", PROGRAM, runtime, str(order)], env=env, check=True)
    (path,) = tmp_path.glob("*.kvp")
    kinds = [int(record["direction"]) >> 4 for record in read_ring(path).records() if record["call"] == 1]
    assert kinds == [PINNED if at in pinned else PAGEABLE for at in order]
