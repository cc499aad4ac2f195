"""A loop of copies as fast as C calls, for benchmarks that need more than Python can submit."""

from __future__ import annotations

import ctypes as ct
import functools
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from device import Device, p, z

SOURCE = """
#include <stddef.h>
typedef int copy_fn(void *dst, const void *src, size_t bytes, int kind, void *stream);
void loop(copy_fn *copy, char *device, const char *host, size_t bytes, size_t blocks, size_t count, void *stream) {
    for (size_t i = 0; i < count; i++) {
        size_t at = i * 7919 % blocks * bytes; /* scattered, as a server's blocks are */
        copy(device + at, host + at, bytes, 1, stream);
    }
}
"""


@functools.cache
def _compiled() -> Any:
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder) / "loop.c", Path(folder) / "loop.so"
        source.write_text(SOURCE)
        subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", library, source], check=True)
        loop = ct.CDLL(str(library)).loop
    loop.argtypes = [p, p, p, z, z, z, p]
    return loop


def loop_of(d: Device, size: int, blocks: int) -> Callable[[int, int], None]:
    """`loop(count, stream)`: so many loads of `size` bytes each over so many blocks, by what the process finds."""
    loop, copy = _compiled(), ct.cast(d.lib.cudaMemcpyAsync, p)
    return lambda count, stream: loop(copy, d.device, d.host, size, blocks, count, stream)
