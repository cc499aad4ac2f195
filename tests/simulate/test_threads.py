"""Real threads of the submitter, interleaved by a scheduler: nothing is lost, and a number plays the same again."""

from __future__ import annotations

import subprocess

import pytest

from .threads import explore, explored


@pytest.mark.slow
def test_no_interleaving_breaks_a_promise() -> None:
    assert explore(0, 300) == (0, "300 interleavings")


def test_an_interleaving_is_played_again_by_its_number() -> None:
    def trace() -> str:
        command = [explored(), "11", "3", "trace"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    first = trace()
    assert first == trace() and len(first.splitlines()) == 4
