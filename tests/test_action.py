"""The GitHub Action is what its metadata syntax asks for, and its command line holds a recording to limits."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

yaml = pytest.importorskip("yaml")
ROOT = Path(__file__).resolve().parents[1]
ACTION = yaml.safe_load((ROOT / "action.yml").read_text())
DATA = ROOT / "tests" / "gpu" / "data"


def test_every_input_is_used_and_reaches_a_script_by_its_environment_alone():
    assert ACTION["runs"]["using"] == "composite"
    used = set()
    for step in ACTION["runs"]["steps"]:
        assert step["shell"] == "bash" and "${{" not in step["run"]  # an input is no part of a script
        used |= {re.fullmatch(r"\$\{\{ inputs\.(\w+) \}\}", value)[1] for value in step["env"].values()}
        assert all(f"${name}" in step["run"] for name in step["env"])
    assert used == set(ACTION["inputs"])


@pytest.mark.parametrize(
    ("name", "limits", "code"),
    [("kineto_pageable", "--no pageable", 1), ("kineto_saturated", "--no pageable --max-call 1h", 2),
     ("kineto_saturated", "--no failed_calls --max-submit-p50 1s --allow-undecided", 0),
     ("kineto_pageable", "--no pageable; touch escaped", 2)],
)  # fmt: skip
def test_its_command_line_ends_as_the_recording_deserves(name, limits, code, tmp_path):
    step = ACTION["runs"]["steps"][-1]
    (tmp_path / "kvprobe").write_text(f'#!/bin/sh\nexec {sys.executable} -m kvprobe "$@"\n')
    (tmp_path / "kvprobe").chmod(0o700)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "LIMITS": limits}
    env["RECORDING"] = str(DATA / f"{name}.json.gz")
    bash = ["bash", "--noprofile", "--norc", "-e", "-o", "pipefail", "-c", step["run"]]
    done = subprocess.run(bash, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    assert ("::error" in done.stdout) == (code == 1) and not (tmp_path / "escaped").exists()
