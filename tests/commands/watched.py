"""Runs `kvprobe run` in tests and waits for its observer."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from kvprobe.native import build
from kvprobe.probe.processes import alive

KVPROBE = [sys.executable, "-m", "kvprobe"]
HOSTRT = build.LIB / "libkvprobe_hostrt.so"

# A Python program's copies of 64 bytes, without torch.
COPIES = f"""
import ctypes, os, sys
def open_runtime():
    runtime = ctypes.CDLL({str(HOSTRT)!r})
    device, host, stream = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    assert not runtime.cudaMalloc(ctypes.byref(device), ctypes.c_size_t(4096))
    assert not runtime.cudaHostAlloc(ctypes.byref(host), ctypes.c_size_t(4096), 0)
    assert not runtime.cudaStreamCreateWithPriority(ctypes.byref(stream), 1, 0)
    return runtime, device, host, stream
def copies(n):
    runtime, device, host, stream = open_runtime()
    for i in range(n):
        assert not runtime.cudaMemcpyAsync(device, host, ctypes.c_size_t(64), 1, stream)
"""


def clean_environment(**more: str) -> dict[str, str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith("KVPROBE") and k != "LD_PRELOAD"}
    return {**env, **more}


def observer_of(folder: Path) -> int:
    """The observer's pid, found by its command line."""
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            words = (entry / "cmdline").read_bytes().split(b"\0") if entry.name.isdigit() else []
            if b"kvprobe.instrument.observer" in words and str(folder).encode() in words:
                return int(entry.name)
    return 0


def wait_for_end(folder: Path) -> dict[str, Any]:
    """end.json, once the observer has done all it does."""
    end = time.monotonic() + 120
    while time.monotonic() < end:
        pid = observer_of(folder)
        if not pid or not alive(pid):
            with contextlib.suppress(OSError, ValueError):
                return dict(json.loads((folder / "end.json").read_text()))
        time.sleep(0.05)
    raise AssertionError(f"the observer did not end: {(folder / 'observer.log').read_text()}")


def run_watched(folder: Path, *command: object, options: tuple[str, ...] = (), **env: str) -> Any:
    """Runs a command to its end under `kvprobe run`, without waiting for the observer."""
    return subprocess.run(
        [*KVPROBE, "run", "--exec", "-o", str(folder), *options, "--", *map(str, command)],
        env=clean_environment(**env),
        capture_output=True,
        text=True,
        check=False,
    )
