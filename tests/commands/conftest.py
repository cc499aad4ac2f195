"""Recordings for tests of the commands: an Nsight Systems export made here, and the public ones."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest

from kvprobe import cli


@pytest.fixture
def kvprobe(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """The command line: returns exit code, stdout, stderr."""

    def run(*arguments: object) -> tuple[int, str, str]:
        code = cli.main([str(one) for one in arguments])
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


@pytest.fixture(scope="session")
def export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A SQLite export of Nsight Systems with 12,000 copies into a queue that fills, and 38,000 launches."""
    path = Path(__file__).parents[2] / "benchmarks" / "report_scale.py"
    spec = importlib.util.spec_from_file_location("report_scale", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    made = tmp_path_factory.mktemp("export") / "small.sqlite"
    module.generate(made, 0.01)
    return made
