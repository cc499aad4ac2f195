"""What is published: the same bytes in two folders, one version, and a workflow that may do no more than it must."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvprobe.native import build

ROOT = Path(__file__).resolve().parents[1]
VERSION = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.M)[1]


@pytest.mark.slow
def test_two_builds_in_two_folders_are_the_same(tmp_path) -> None:
    pytest.importorskip("hatchling")
    left_out = shutil.ignore_patterns("__pycache__", "lib", "*.so")
    env = {**os.environ, "SOURCE_DATE_EPOCH": "1700000000", "LDFLAGS": "-O0", "KVPROBE_NATIVE_LIB": ""}
    running = []
    for name in ("one", "another/folder"):
        source = tmp_path / name / "source"
        source.mkdir(parents=True)
        for part in ("kvprobe", "patches", "examples", "docs"):
            shutil.copytree(ROOT / part, source / part, ignore=left_out)
        for part in (".gitignore", "CHANGELOG.md", "LICENSE", "README.md", "SECURITY.md", "pyproject.toml"):
            shutil.copy(ROOT / part, source)
        command = [sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-t", "wheel", "-d", tmp_path / name]
        running.append(subprocess.Popen(command, cwd=source, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT))
    for one in running:
        said = one.communicate()[0]
        assert one.returncode == 0, said.decode()
    first, second = (
        {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in (tmp_path / name).glob("kvprobe-*")}
        for name in ("one", "another/folder")
    )
    assert first == second
    wheel = f"kvprobe-{VERSION}-py3-none-{build.platform_tag()}.whl"
    assert set(first) == {f"kvprobe-{VERSION}.tar.gz", wheel}


def test_a_cross_compilers_wheel_is_for_its_processor(monkeypatch, tmp_path) -> None:
    for said, tag in (("aarch64-linux-gnu", "linux_aarch64"), ("x86_64-redhat-linux", "linux_x86_64")):
        compiler = tmp_path / said
        compiler.write_text(f"#!/bin/sh\necho {said}\n")
        compiler.chmod(0o700)
        monkeypatch.setenv("CC", str(compiler))
        assert build.platform_tag() == tag


def test_the_changelog_begins_with_this_version() -> None:
    assert re.search(r"^## (\S+)$", (ROOT / "CHANGELOG.md").read_text(), re.M)[1] == VERSION


def test_no_other_file_names_the_version() -> None:
    """It would be forgotten; what is promised from a version on, and which changes it brought, is history."""
    history = {ROOT / "CHANGELOG.md", ROOT / "docs" / "stability.md"}
    written = re.compile(rf"(?<![\d.]){re.escape(VERSION)}(?![\d.]*\d)")
    found = []
    for folder in ("kvprobe", "docs", ".ci", ".github"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in (".py", ".md", ".c", ".h", ".html", ".js", ".yml", ".toml") and path not in history:
                found += [str(path)] if written.search(path.read_text()) else []
    found += [name for name in ("README.md", "action.yml", "Makefile") if written.search((ROOT / name).read_text())]
    assert not found


def test_the_workflow_has_pinned_actions_and_least_permissions() -> None:
    yaml = pytest.importorskip("yaml")
    text = (ROOT / ".github/workflows/release.yml").read_text()
    flow = yaml.safe_load(text)
    steps = [step for job in flow["jobs"].values() for step in job["steps"]]
    used = [step["uses"] for step in steps if "uses" in step]
    assert len(used) > 5 and all(re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", one) for one in used)
    assert all("${{" not in step.get("run", "") for step in steps)
    assert flow[True] == {"push": {"tags": ["v*"]}}  # YAML reads `on` so
    allowed = {name: job["permissions"] for name, job in flow["jobs"].items()}
    assert flow["permissions"] == {}
    assert allowed == {
        "build": {"contents": "read"},
        "aarch64": {},
        "publish": {"id-token": "write"},
        "page": {"contents": "write"},
    }
    assert flow["jobs"]["publish"]["environment"] and "password" not in text and "secrets." not in text
