"""The native libraries on aarch64: compiled for it, loaded, copying and counting, on an emulated processor."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvprobe.native import build
from tests.native.test_interpose_counts import recorded, said

CC = shutil.which("aarch64-linux-gnu-gcc")
QEMU = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")
HERE = Path(__file__).parent
pytestmark = pytest.mark.skipif(
    not (CC and QEMU), reason="needs gcc-aarch64-linux-gnu, libc6-dev-arm64-cross and qemu-user-static"
)


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("aarch64")
    # warnings are errors on this processor, too; without optimization it takes a third of the time
    env = {**os.environ, "CC": str(CC), "LDFLAGS": "-O0", "KVPROBE_NATIVE_LIB": str(folder)}
    done = subprocess.run(
        [sys.executable, "-m", "kvprobe.native.build"], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return folder


def compiled(source: Path, libraries: Path, *flags: str) -> Path:
    program = libraries / source.stem
    includes = [f"-I{folder}" for folder in (build.NATIVE / "src", build.NATIVE / "hostrt", HERE)]
    command = [str(CC), "-std=gnu11", "-O1", "-Wall", "-Werror", "-pthread", *includes]
    subprocess.run([*command, "-o", str(program), str(source), *flags, "-ldl"], check=True)
    return program


def run(program: Path, *arguments: object, **environment: object) -> str:
    settings = [word for name, value in environment.items() for word in ("-E", f"{name}={value}")]
    command = [str(QEMU), "-L", "/usr/aarch64-linux-gnu", *settings, str(program), *map(str, arguments)]
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("KVPROBE", "KVHOST", "LD_"))}
    done = subprocess.run(command, env=clean, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_every_library_is_loaded_while_the_program_runs(libraries: Path) -> None:
    """As Python does it: no thread-local variable wants more than dlopen can give there."""
    load = compiled(HERE / "programs" / "load.c", libraries)
    assert len(build.LIBRARIES) == 5
    assert run(load, *(libraries / name for name in build.LIBRARIES)) == "cntvct 1\n"


def test_the_host_runtime_keeps_its_times(libraries: Path) -> None:
    program = compiled(
        HERE / "test_hostrt_virtual.c",
        libraries,
        *("-D_GNU_SOURCE", f"-L{libraries}", "-lkvprobe_hostrt", f"-Wl,-rpath,{libraries}"),
    )
    run(program, "times")


@pytest.mark.parametrize("via", ["link", "dlsym", "mixed"])
def test_the_interposer_counts_every_copy(libraries: Path, tmp_path: Path, via: str) -> None:
    program = compiled(
        HERE / "programs" / "copies.c", libraries, f"-L{libraries}", "-lkvprobe_hostrt", f"-Wl,-rpath,{libraries}"
    )
    env = {"RUNTIME": libraries / "libkvprobe_hostrt.so", "KVHOST_LATENCY_US": "0.001"}
    env |= {"LD_PRELOAD": libraries / "libkvprobe_interpose.so", "KVPROBE_RUN": tmp_path}
    counts = said(run(program, via, 500, 2, 1, **env))
    assert counts and recorded(tmp_path)[0] == counts
