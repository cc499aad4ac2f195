"""Builds the native libraries with the system's C compiler, for `pip install` and for `python -m kvprobe.native.build`.

Five libraries, none of which knows Python, so that one wheel serves every Python version:

* ``libkvprobe.so``            clock, ring, submission loop, calibration
* ``libkvprobe_hostrt.so``     the embedded host runtime: the CUDA runtime's symbols without a GPU
* ``libkvprobe_interpose.so``  the interposer that `kvprobe run` preloads
* ``libkvprobe_trace.so``      a fast scanner of PyTorch profiler traces; readers work without it
* ``libkvprobe_inject.so``    has the interposer loaded into a process that runs already
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

NATIVE = Path(__file__).resolve().parent
LIB = Path(os.environ.get("KVPROBE_NATIVE_LIB") or NATIVE / "lib")
CFLAGS = ["-std=gnu11", "-O3", "-g1", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-Werror", "-pthread"]
# -Bsymbolic-functions: a library of ours calls its own functions, whatever else the process has preloaded
LDFLAGS = ["-shared", "-Wl,-Bsymbolic-functions", "-Wl,-z,defs", "-Wl,-z,now", "-pthread", "-ldl", "-lm"]

# library -> folders of its sources, below this one, and single files it shares
LIBRARIES: dict[str, tuple[str, ...]] = {
    "libkvprobe.so": ("src/*.c",),
    "libkvprobe_hostrt.so": ("hostrt/*.c", "src/clock.c", "src/wire.c", "src/image.c"),
    "libkvprobe_interpose.so": (
        "interpose/*.c",
        *("src/clock.c", "src/ring.c", "src/secrets.c", "src/memory_left.c", "src/kept.c", "src/populate.c"),
    ),
    "libkvprobe_trace.so": ("trace/*.c",),
    "libkvprobe_inject.so": ("inject/*.c",),
}


class BuildError(Exception):
    """The native libraries could not be built; one line that says why."""


def compiler() -> list[str]:
    """The C compiler's command: $CC, else the first of cc, gcc, clang that exists.

    Raises:
        BuildError: there is none.
    """
    given = shlex.split(os.environ.get("CC", ""))
    for candidate in [given] if given else [["cc"], ["gcc"], ["clang"]]:
        if shutil.which(candidate[0]):
            return candidate
    wanted = given[0] if given else "cc, gcc or clang"
    raise BuildError(f"no C compiler: {wanted} not found; install one (Debian: apt-get install gcc) or set CC")


def platform_tag() -> str:
    """The platform that the compiler compiles for, as a wheel's tag has it: linux_aarch64 of a cross compiler.

    Raises:
        BuildError: there is no compiler.
    """
    said = subprocess.run([*compiler(), "-dumpmachine"], capture_output=True, text=True, check=False).stdout
    machine = said.partition("-")[0]
    if machine in ("x86_64", "aarch64"):
        return f"linux_{machine}"
    return sysconfig.get_platform().replace("-", "_").replace(".", "_")  # called otherwise by compiler and pip


def nvtx_include() -> Path | None:
    """Folder of the NVTX C headers of the package nvidia-nvtx, or None where it is not installed."""
    for entry in sys.path:
        for folder in sorted(Path(entry or ".").glob("nvidia/*/include")):
            if (folder / "nvtx3" / "nvToolsExt.h").is_file():
                return folder
    return None


def build(target: Path = LIB, extra_cflags: tuple[str, ...] = ()) -> list[Path]:
    """Compiles what is older than its sources and returns the paths of all libraries.

    Raises:
        BuildError: no compiler, or it refused a source.
    """
    compiler()
    target.mkdir(parents=True, exist_ok=True)
    headers = sorted(NATIVE.glob("*/*.h"))
    include = nvtx_include()
    nvtx = ["-DKVP_HAVE_NVTX=1", "-isystem", str(include), f"-ffile-prefix-map={include}=nvtx"] if include else []
    # the same bytes in every folder: debuggers find the sources from the tree's root
    paths = f"-ffile-prefix-map={NATIVE.parents[1]}=."
    stale, built = [], []
    for name, patterns in LIBRARIES.items():
        sources = sorted({path for pattern in patterns for path in NATIVE.glob(pattern)})
        output = target / name
        if not any(path.parent.name != "src" or name == "libkvprobe.so" for path in sources):
            continue
        newest = max(path.stat().st_mtime for path in [*sources, *headers, Path(__file__)])
        if not output.exists() or output.stat().st_mtime < newest:
            private = ["-DKVP_PRIVATE_CORE=1"] if name == "libkvprobe_interpose.so" else []
            command = [*compiler(), *CFLAGS, paths, *extra_cflags, *private, *nvtx, f"-I{NATIVE / 'src'}"]
            stale.append((command, sources, output))
        built.append(output)
    with ThreadPoolExecutor(os.cpu_count()) as cores:
        for _ in cores.map(_link, stale):  # raises what failed
            pass
    return built


def _link(library: tuple[list[str], list[Path], Path]) -> None:
    command, sources, output = library
    partial = output.with_name(f".{output.name}.{os.getpid()}")
    whole = [*command, "-o", str(partial), *map(str, sources), *LDFLAGS, *shlex.split(os.environ.get("LDFLAGS", ""))]
    done = subprocess.run(whole, cwd=NATIVE, capture_output=True, text=True, check=False)
    if done.returncode:
        partial.unlink(missing_ok=True)
        raise BuildError(f"{output.name} did not compile ({shlex.join(command[:1])}):\n{done.stderr.strip()}")
    partial.replace(output)


def main() -> int:
    """Entry of `python -m kvprobe.native.build`."""
    try:
        for path in build():
            print(path)
    except BuildError as error:
        print(f"kvprobe: {error}", file=sys.stderr)
        return 1
    return 0


try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:
    pass
else:

    class NativeBuildHook(BuildHookInterface):  # type: ignore[type-arg,misc,unused-ignore]
        """Hatchling's hook: compiles, then puts the libraries into the wheel and names its platform."""

        PLUGIN_NAME = "custom"

        def initialize(self, version: str, build_data: dict[str, Any]) -> None:
            """Runs before the wheel is put together."""
            if self.target_name != "wheel":
                return
            try:
                libraries, platform = build(), platform_tag()
            except BuildError as error:
                raise SystemExit(f"kvprobe: {error}") from None
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{platform}"
            # what Python runs at its start lies beside the package, not in it
            start = NATIVE.parent / "instrument"
            beside = build_data["force_include_editable" if version == "editable" else "force_include"]
            # a copy: hatchling would take the file out of the package, where `kvprobe run` carries it from
            carried = start / "carried" / "kvprobe_startup.py"
            beside[str(shutil.copy(carried, LIB / "kvprobe_startup.copy"))] = carried.name
            for name in ("zz_kvprobe.pth", "zz_kvprobe.start"):
                beside[str(start / name)] = name
            if version != "editable":
                for path in libraries:
                    build_data["force_include"][str(path)] = f"kvprobe/native/lib/{path.name}"


if __name__ == "__main__":
    raise SystemExit(main())
