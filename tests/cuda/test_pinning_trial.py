"""What can be pinned is found by trying, within bounds, and is free again afterwards."""

from __future__ import annotations

import ctypes as ct
import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from kvprobe.cuda import pinning_trial
from kvprobe.cuda.hostruntime import host_runtime
from kvprobe.cuda.pinning_trial import try_locking, try_pinning

MIB = 1 << 20


@pytest.mark.parametrize("limit", [32, 100, 300])
def test_the_limit_is_found_to_the_smallest_piece_and_all_is_freed(limit: int) -> None:
    runtime = host_runtime(pinned_bytes=limit * MIB + 4096)
    found = try_pinning(runtime, most_bytes=900 * MIB, seconds=60)
    assert limit - 2 < found.bytes / MIB <= limit
    assert "cudaErrorMemoryAllocation" in found.refusal and not found.bound
    assert runtime.stats.pinned_bytes == 0


def test_what_is_not_refused_ends_at_its_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = host_runtime(pinned_bytes=1 << 40)
    monkeypatch.setattr(pinning_trial, "PIECE_BYTES", 4 * MIB)
    found = try_pinning(runtime, most_bytes=15 * MIB, seconds=60)
    assert (found.bytes, found.refusal, found.bound) == (12 * MIB, "", "most")
    assert try_pinning(runtime, seconds=-1).bound == "time"
    monkeypatch.setattr(pinning_trial, "LEFT_TO_OTHERS", 1)
    assert try_pinning(runtime).bound == "memory"
    assert runtime.stats.pinned_bytes == 0


LOCKS = "import json; from kvprobe.cuda.pinning_trial import try_locking as t; f = t(); print(json.dumps(vars(f)))"


def confine() -> None:
    """May lock 5 MiB, and has no right to more."""
    ct.CDLL(None).prctl(24, 14, 0, 0, 0)  # PR_CAPBSET_DROP, CAP_IPC_LOCK; who is not root lacks it anyway
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (5 * MIB, 5 * MIB))


def test_ulimit_l_is_met_by_mlock() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOCKS], capture_output=True, text=True, check=False, preexec_fn=confine
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert 4.5 * MIB < found["bytes"] <= 5 * MIB
    assert found["refusal"].startswith("mlock: ")


def test_locking_frees_what_it_locked() -> None:
    def locked() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmLck"))

    before = locked()
    try_locking(most_bytes=2 * MIB)
    assert locked() == before
