"""The native libraries are found where they are built."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from kvprobe.native import build


def test_the_libraries_are_found_in_the_folder_that_they_were_built_in(tmp_path: Path) -> None:
    for library in build.build():
        (tmp_path / library.name).symlink_to(library)
    program = "from kvprobe.native import library; from kvprobe.recordings import trace_library\n"
    program += "print(library.path_of('libkvprobe.so'), trace_library._LIBRARY, sep='\\n'); library.core()"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "KVPROBE_NATIVE_LIB": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines() == [str(tmp_path / "libkvprobe.so"), str(tmp_path / "libkvprobe_trace.so")]


def test_a_library_of_other_sources_is_refused_with_what_to_do(tmp_path: Path) -> None:
    """It would read and write past the structures that Python gives it."""
    other = tmp_path / "other.c"
    other.write_text("unsigned kvp_layout(unsigned *sizes, unsigned room) { sizes[0] = room; return 19; }\n")
    subprocess.run(
        [*build.compiler(), "-shared", "-fPIC", "-o", str(tmp_path / "libkvprobe.so"), str(other)], check=True
    )
    for library in build.LIB.glob("*.so"):  # the others are as they should be
        if not (tmp_path / library.name).exists():
            (tmp_path / library.name).symlink_to(library)
    done = subprocess.run(
        [sys.executable, "-m", "kvprobe", "bench", "--device", "host", "--seconds", "2"],
        env={**os.environ, "KVPROBE_NATIVE_LIB": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "of other sources than this Python code: run `python -m kvprobe.native.build`" in done.stderr
    assert "Traceback" not in done.stderr
