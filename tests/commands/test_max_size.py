"""`--max-size` holds whatever the number of processes, and each of them is in the recording."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from kvprobe.native import build
from kvprobe.recordings import open_recording

from .watched import run_watched, wait_for_end

pytestmark = pytest.mark.timeout(300)

PROGRAM = """
#include <stddef.h>
int cudaMemcpyAsync(void *, const void *, size_t, int, void *);
int cudaMalloc(void **, size_t), cudaHostAlloc(void **, size_t, unsigned);
int main(void) {
    void *gpu, *cpu;
    if (cudaMalloc(&gpu, 64) || cudaHostAlloc(&cpu, 64, 0)) return 1;
    for (int i = 0; i < 3; i++)
        if (cudaMemcpyAsync(gpu, cpu, 64, 1, NULL)) return 1;
    return 0;
}
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    build.build()
    folder = tmp_path_factory.mktemp("short")
    (folder / "short.c").write_text(PROGRAM)
    runtime = [f"-L{build.LIB}", "-lkvprobe_hostrt", f"-Wl,-rpath,{build.LIB}"]
    command = [*build.compiler(), "-o", str(folder / "short"), str(folder / "short.c"), *runtime]
    subprocess.run(command, check=True)
    return folder / "short"


def copies(folder: Path) -> int:
    totals, recording = (r := open_recording(folder)).totals, r
    return sum(
        int(totals["calls"][row])
        for row in range(totals.rows)
        if recording.text(int(totals["name"][row])) == "cudaMemcpyAsync"
    )


def used_bytes(folder: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in folder.iterdir())


def run_many(folder: Path, program: Path, many: int, limit: str) -> None:
    script = f"for i in $(seq {many}); do {program} || exit 1; done"
    options = ("--no-stacks", "--report", "none", "--detail", "totals", "--max-size", limit)
    done = run_watched(folder, "bash", "-c", script, options=options)
    assert done.returncode == 0, done.stderr
    assert wait_for_end(folder)["status"] == 0


def test_short_processes_share_a_file_and_each_is_there(program: Path, tmp_path: Path) -> None:
    """400 files of 33 KiB are 13 MB: more than the limit, unless short processes share one."""
    run_many(tmp_path / "run", program, 400, "12M")
    assert used_bytes(tmp_path / "run") < 4 << 20
    recording = open_recording(tmp_path / "run")
    # where the observer had no CPU for long, some find no room, and are one row together
    without = [re.match(r"([\d,]+) process(es)? without a file", line) for line in recording.incomplete]
    together = [int(one[1].replace(",", "")) for one in without if one]
    assert copies(tmp_path / "run") == 1200
    assert recording.processes.rows - len(together) + sum(together) == 400
    assert (tmp_path / "run" / "ended.pack").exists()


def test_a_limit_that_has_room_for_hardly_any_file_is_kept_and_the_counts_are_exact(
    program: Path, tmp_path: Path
) -> None:
    run_many(tmp_path / "run", program, 60, "200k")
    assert used_bytes(tmp_path / "run") <= 200 << 10
    assert copies(tmp_path / "run") == 180
    assert any("--max-size" in line for line in open_recording(tmp_path / "run").incomplete)
