"""A process that is watched: it writes what a test tells it to its ring file."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


class Watched:
    """The process; each call returns when it has been written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("watched.py")), str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def write(self, calls: int, **fields: int) -> None:
        self._tell("write", calls, fields)

    def enter(self, call: int, stream: int) -> None:
        self._tell("enter", call, stream)

    def close(self) -> None:
        self._tell("close")

    def _tell(self, *what: Any) -> None:
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "done\n"

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watched]:
    process = Watched(tmp_path / "watched.kvp")
    process.write(0)  # its file exists now
    try:
        yield process
    finally:
        process.kill()
