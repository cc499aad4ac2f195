"""Starts programs that copy in each way that a file names, one after another; see test_launchers.py.

    launching.py LAUNCHERS [GO]

LAUNCHERS is a JSON list of [way, copies, words, environment]; with GO it begins once that file is there.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))


def copy(number: int) -> None:
    """In a process that multiprocessing has made."""
    import copying_leaf  # type: ignore[import-not-found]

    copying_leaf.copies(number)


def launch(way: str, number: int, words: list[str], environment: dict[str, str] | None) -> None:
    """Starts one and waits for it."""
    if way == "run":
        subprocess.run(words, env=environment, check=True, stdin=subprocess.DEVNULL, timeout=120)
    elif way in ("fork", "spawn", "forkserver"):
        process = multiprocessing.get_context(way).Process(target=copy, args=(number,))  # type: ignore[attr-defined]
        process.start()
        process.join()
    else:
        pid = os.fork() if way == "execve" else os.posix_spawn(words[0], words, environment or {})
        if not pid:
            os.execve(words[0], words, environment or {})
        os.waitpid(pid, 0)


def main() -> None:
    """Every way, whatever becomes of those before it."""
    print("ready", flush=True)
    while sys.argv[2:] and not Path(sys.argv[2]).exists():
        time.sleep(0.01)
    for launcher in json.loads(Path(sys.argv[1]).read_text()):
        try:
            launch(*launcher)
        except (OSError, subprocess.SubprocessError) as error:
            print(f"{launcher}: {error}", flush=True)


if __name__ == "__main__":
    main()
