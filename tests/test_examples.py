"""The examples run as they are printed."""

from __future__ import annotations

import ast
import json
import os
import runpy
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import yaml

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
DOCS = EXAMPLES.parent / "docs"
SCRIPTS = Path(sys.executable).parent


def run(*words: object, cwd: Path, code: int | None = 0) -> str:
    path = f"{SCRIPTS}{os.pathsep}{os.environ['PATH']}"
    env = {**{name: text for name, text in os.environ.items() if not name.startswith("KVPROBE")}, "PATH": path}
    done = subprocess.run(list(map(str, words)), cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert code is None or done.returncode == code, (done.returncode, done.stdout, done.stderr)
    return done.stdout


@pytest.fixture(scope="module")
def gate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The CI gate over the engine's example; whether it passes is a matter of the machine, so it is not asked."""
    folder = tmp_path_factory.mktemp("gate")
    run("sh", EXAMPLES / "ci_gate.sh", sys.executable, EXAMPLES / "engine.py", cwd=folder, code=None)
    return folder


def test_engine(tmp_path):
    said = run(sys.executable, EXAMPLES / "engine.py", cwd=tmp_path)
    assert "store 1: done" in said
    assert "16 MiB under the" in said


def test_adapter(tmp_path):
    said = run(sys.executable, EXAMPLES / "adapter.py", cwd=tmp_path)
    assert "'bytes': 524288" in said
    assert "toyserver.cache: removed" in said


def test_ci_gate(gate):
    outcome = ET.parse(gate / "kvprobe-junit.xml")
    assert len(list(outcome.iter("testcase"))) == 3


def test_ci_gate_is_not_green_where_nothing_was_recorded(tmp_path):
    run("sh", EXAMPLES / "ci_gate.sh", sys.executable, "-c", "pass", cwd=tmp_path, code=1)


def test_read_recording(gate):
    said = run(sys.executable, EXAMPLES / "read_recording.py", "recording", cwd=gate)
    assert "cudaMemcpyAsync" in said


def test_each_example_is_short_and_says_what_it_shows():
    for path in (one for one in EXAMPLES.rglob("*.*") if one.suffix != ".pyc" and one.is_file()):
        text = path.read_text()
        assert len(text.splitlines()) < 40 or path.parent.name == "extending", path.name
        assert path.suffix != ".py" or ast.get_docstring(ast.parse(text)), path.name


def cells(path: Path) -> list[str]:
    """The code of a notebook, cell by cell."""
    return ["".join(one["source"]) for one in json.loads(path.read_text())["cells"] if one["cell_type"] == "code"]


def test_the_notebook_runs_from_top_to_bottom(tmp_path):
    program = tmp_path / "notebook.py"
    program.write_text("\n".join(cells(DOCS / "recording.ipynb")) + "\nprint(len(findings), of_name.num_rows)\n")
    said = run(sys.executable, program, cwd=DOCS)
    assert "critical: The launch queue was full" in said


def test_the_workflow_calls_kvprobe_as_it_is():
    steps = yaml.safe_load((EXAMPLES / "github-workflow.yml").read_text())["jobs"]["offload"]["steps"]
    lines = runpy.run_path(str(DOCS / "commandlines.py"))
    ran = [line for step in steps for line in lines["commands"](step.get("run", ""))]
    assert [line.split()[:2] for line in ran if line.startswith("kvprobe")] == [
        ["kvprobe", "run"],
        ["kvprobe", "check"],
    ]
    for line in ran:
        lines["parsed"](line)


def test_hot_path(tmp_path):
    pytest.importorskip("torch")
    command = (sys.executable, "-m", "pytest", "--kvprobe", "--kvprobe-device", "host", "-p", "no:cacheprovider")
    assert "1 passed" in run(*command, EXAMPLES / "test_hot_path.py", "--rootdir", tmp_path, cwd=tmp_path)
