"""Interleavings of the submitter's real threads, by number: the C part built with a scheduler at its yield points."""

from __future__ import annotations

import functools
import hashlib
import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kvprobe.native import build

PROGRAMS = build.NATIVE.parents[1] / "tests" / "native" / "programs"
SOURCES = ("explored_submitter.c", "explore.c")
FLAGS = ("-std=gnu11", "-O1", "-g1", "-pthread", "-w", "-DKVP_EXPLORE")
INCLUDES = (f"-I{build.NATIVE / 'src'}", f"-I{PROGRAMS}")
SANITIZED = (
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover=all",
    "-ftrivial-auto-var-init=pattern",
)  # memory that leaks is a violation, too


@functools.cache
def _flags() -> tuple[str, ...]:
    """Of the compiler and the linker; without the sanitizers where it has none."""
    program = ["-x", "c", "-", "-o", os.devnull]
    command = [*build.compiler(), *SANITIZED, *program]
    done = subprocess.run(command, input="int main(void) { return 0; }", capture_output=True, text=True, check=False)
    return FLAGS if done.returncode else (*FLAGS, *SANITIZED)


def explored() -> Path:
    """The program; a file that is as it was is not compiled again.

    Raises:
        CalledProcessError: the compiler refused it.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvprobe" / "explored"
    cache.mkdir(parents=True, exist_ok=True)
    sources = [*(PROGRAMS / name for name in SOURCES), *sorted((build.NATIVE / "src").glob("*.c"))]
    headers = sorted([*(build.NATIVE / "src").glob("*.h"), PROGRAMS / "explore.h"])
    common = b"".join(path.read_bytes() for path in headers) + repr((build.compiler(), _flags())).encode()

    def compiled(source: Path) -> Path:
        name = hashlib.sha256(common + source.read_bytes()).hexdigest()[:24]
        made = cache / f"{name}.o"
        if not made.exists():
            partial = cache / f"{name}.{os.getpid()}.o"
            subprocess.run([*build.compiler(), *_flags(), *INCLUDES, "-c", "-o", partial, source], check=True)
            partial.replace(made)
        return made

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compiled, sources))
    program = cache / f"explored-{hashlib.sha256(repr(objects).encode()).hexdigest()[:24]}"
    if not program.exists():
        partial = program.with_suffix(f".{os.getpid()}")
        subprocess.run([*build.compiler(), *_flags(), "-o", partial, *objects, "-ldl", "-lm"], check=True)
        partial.replace(program)
    return program


def explore(seed: int, count: int = 1) -> tuple[int, str]:
    """Plays the interleavings of so many seeds: the exit code, and what was said. 1: "seed N: what is wrong"."""
    done = subprocess.run([explored(), str(seed), str(count)], capture_output=True, text=True, check=False)
    said = (done.stdout + done.stderr).strip()
    return done.returncode, said or f"seed {seed} or a later one: ended with {done.returncode}"
