"""The interposer has none of CUDA's names: a program finds what it finds without it, and all of that is counted."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from kvprobe.probe.ring import read_ring
from kvprobe.recordings import open_recording

Compile = Callable[..., Path]


@pytest.fixture(scope="module")
def runtime(compile_c: Compile, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A runtime whose copies give 7, with one version of its symbols."""
    script = tmp_path_factory.mktemp("versions") / "script"
    script.write_text("RUNTIME_1 { *; };\n")
    return made(compile_c, 7, "libcudart.so.7", f"-Wl,--version-script={script}")


def made(compile_c: Compile, which: int, name: str, *flags: str) -> Path:
    shared = ("-shared", "-fPIC", f"-DWHICH={which}", f"-Wl,-soname,{name}")
    return compile_c("two_runtimes", *shared, *flags, output=name)


def linked_to(runtime: Path) -> tuple[str, ...]:
    return "-Wl,--no-as-needed", str(runtime), f"-Wl,-rpath,{runtime.parent}"


def alone_and_watched(libraries: Path, folder: Path, command: Sequence[Path | str]) -> tuple[str, str]:
    """What a program prints without the interposer and with it."""
    plain = {k: v for k, v in os.environ.items() if not k.startswith("KVPROBE") and k != "LD_PRELOAD"}
    watched = {"LD_PRELOAD": str(libraries / "libkvprobe_interpose.so"), "KVPROBE_RUN": str(folder)}
    said = []
    for env in (plain, plain | watched):
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, (done.returncode, done.stdout, done.stderr)
        said.append(done.stdout)
    return said[0], said[1]


def calls_in(folder: Path) -> int:
    return sum(read_ring(path).calls().get("cudaMemcpyAsync", (0, 0, 0))[0] for path in folder.glob("*.kvp"))


def test_why_a_library_was_not_loaded_is_said_as_without_us(
    compile_c: Compile, runtime: Path, libraries: Path, tmp_path: Path
) -> None:
    lacking = compile_c("lacks_a_name", "-shared", "-fPIC", output="lacking.so")
    program = """
import ctypes, sys
ctypes.CDLL(sys.argv[1])
for name in ("/no/such/library.so", "no-such-library.so", sys.argv[2]):
    try:
        ctypes.CDLL(name)
    except OSError as error:
        print(error)
"""
    alone, watched = alone_and_watched(libraries, tmp_path, [sys.executable, "-c", program, runtime, lacking])
    assert watched == alone
    assert alone.count("No such file") == 2
    assert "undefined symbol: not_there" in alone


def test_where_no_runtime_is_none_of_its_names_is_there(compile_c: Compile, libraries: Path, tmp_path: Path) -> None:
    alone, watched = alone_and_watched(libraries, tmp_path, [compile_c("names", "-ldl")])
    assert watched == alone
    assert {line.split()[0]: line.split()[1:] for line in alone.splitlines()} == {
        **{way: ["0"] for way in ("linked", "default", "next", "program", "version", "none")},
        "error": ["1"],
        "seccomp": ["0", "0"],
    }
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("binding", ["lazy", "now"])
def test_where_one_is_every_way_to_it_is_counted_once(
    compile_c: Compile, libraries: Path, runtime: Path, tmp_path: Path, binding: str
) -> None:
    program = compile_c("names", "-ldl", *linked_to(runtime), f"-Wl,-z,{binding}", output=f"names-{binding}")
    alone, watched = alone_and_watched(libraries, tmp_path, [program])
    assert watched == alone and alone.count(" 7") == 5 and "none 0" in alone and "error 0" in alone
    assert calls_in(tmp_path) == 5


def test_a_driver_that_is_not_there_is_not_looked_for_at_every_copy(
    compile_c: Compile, libraries: Path, runtime: Path, tmp_path: Path
) -> None:
    program = compile_c("listings", "-ldl", "-rdynamic", *linked_to(runtime))
    alone, watched = alone_and_watched(libraries, tmp_path, [program])
    assert alone == "0 0\n"
    before, meanwhile = map(int, watched.split())
    assert before and meanwhile < 200, watched
    assert calls_in(tmp_path) == 2001


@pytest.mark.parametrize("binding", ["lazy", "now"])
def test_a_program_at_a_fixed_address_gives_a_function_the_same_address_everywhere(
    compile_c: Compile, libraries: Path, runtime: Path, tmp_path: Path, binding: str
) -> None:
    shared = ("-shared", "-fPIC", "-DELSEWHERE", *linked_to(runtime))
    elsewhere = compile_c("two_versions", *shared, output="elsewhere.so")
    fixed = ("-DFIXED", "-fno-pic", "-no-pie", "-ldl", str(elsewhere), *linked_to(runtime), f"-Wl,-z,{binding}")
    program = compile_c("names", *fixed, output=f"fixed-{binding}")
    alone, watched = alone_and_watched(libraries, tmp_path, [program])
    assert watched == alone and "same 1" in alone and alone.count(" 7") == 7
    assert calls_in(tmp_path) == 7


def test_a_library_reaches_the_version_that_it_was_linked_to(
    compile_c: Compile, libraries: Path, tmp_path: Path
) -> None:
    """Two runtimes stand in one scope, and calls are bound when they are first made."""
    one, two = (made(compile_c, which, f"libcudart.so.{which}", "-Wl,--default-symver") for which in (21, 22))
    shared = ("-shared", "-fPIC", "-fno-optimize-sibling-calls", "-Wl,-z,lazy")
    user = compile_c("uses_runtime", *shared, *linked_to(two), output="user22.so")
    program = compile_c("two_versions", str(one), str(user), *linked_to(two), "-Wl,-z,lazy")
    alone, watched = alone_and_watched(libraries, tmp_path, [program])
    assert watched == alone == "21 22\n21 22\n"
    assert calls_in(tmp_path) == 4


def test_a_runtime_that_comes_back_at_another_address_is_reached_there_and_counted(
    compile_c: Compile, libraries: Path, runtime: Path, tmp_path: Path
) -> None:
    program = compile_c("reloaded", "-ldl")
    plugin = compile_c("uses_runtime", "-shared", "-fPIC", *linked_to(runtime), output="plugin7.so")
    alone, watched = alone_and_watched(libraries, tmp_path, [program, plugin, runtime, "60"])
    assert watched == alone == "660\n"
    assert calls_in(tmp_path) == 660
    assert not open_recording(tmp_path).incomplete


def test_a_library_that_is_found_by_the_callers_search_path_is_counted_from_its_first_call(
    compile_c: Compile, libraries: Path, runtime: Path, tmp_path: Path
) -> None:
    plugin = compile_c("registered", "-DPLUGIN", "-shared", "-fPIC", *linked_to(runtime), output="libregistered.so")
    program = compile_c("registered", "-rdynamic", "-ldl", f"-Wl,-rpath,{plugin.parent}", output="registering")
    alone, watched = alone_and_watched(libraries, tmp_path, [program])
    assert watched == alone == "7\n7\n7\n"
    assert calls_in(tmp_path) == 3


def test_runtimes_that_find_no_wrapper_any_more_are_said_to(
    compile_c: Compile, libraries: Path, runtime: Path, tmp_path: Path
) -> None:
    many = [tmp_path / f"libcudart.so.7.{i}" for i in range(40)]
    for path in many:
        shutil.copy(runtime, path)
    run = tmp_path / "run"
    run.mkdir()
    alone, watched = alone_and_watched(libraries, run, [compile_c("reloaded", "-ldl"), "keep", *map(str, many)])
    assert watched == alone == "40\n"
    assert 3 < calls_in(run) < 40
    (line,) = open_recording(run).incomplete
    assert "at least 16 functions were not led to the recorder" in line
