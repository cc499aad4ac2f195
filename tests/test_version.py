"""The version is known where kvprobe is installed, and its absence stops nothing where it is not."""

import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from kvprobe.version import version

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def source_tree(tmp_path):
    """Runs kvprobe's command line in an interpreter that has its dependencies and has it on PYTHONPATH alone."""
    site = tmp_path / "site"
    site.mkdir()
    found = {
        entry.name: entry
        for folder in map(Path, reversed(sys.path))
        if folder.name.endswith("-packages")
        for entry in folder.iterdir()
    }
    for name, entry in found.items():
        if "kvprobe" not in name and entry.suffix != ".pth":
            (site / name).symlink_to(entry)
    env = {k: v for k, v in os.environ.items() if not k.startswith("KVPROBE")}
    env["PYTHONPATH"] = f"{site}:{ROOT}"
    return lambda *words: subprocess.run(
        [sys.executable, "-S", "-m", "kvprobe", *words], env=env, text=True, capture_output=True, check=False
    )


def test_the_installed_version_is_the_distributions():
    assert version() == metadata.version("kvprobe")


def test_a_source_tree_says_so(source_tree):
    assert source_tree("--version").stdout == "kvprobe 0+source\n"


def test_a_source_tree_runs_a_command(source_tree, tmp_path):
    done = source_tree("run", "--exec", "-o", str(tmp_path / "run"), "--", "sh", "-c", "exit 5")
    assert (done.returncode, done.stderr) == (5, "")
    assert json.loads((tmp_path / "run" / "run.json").read_text())["version"] == "0+source"
