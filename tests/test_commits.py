"""Messages of new commits are checked relative to a base, by CI and by a hook; what cannot be compared does no harm."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / ".ci" / "commits.py"
GOOD = "Say what\n\nAnd why.\n"
BAD = {
    "a" * 73 + "\n\nWhy.\n": "73 characters",
    "Say what\n": "no body",
    "Say what\n\nSigned-off-by: A <a@b>\n": "no body",
    "Say what\nand why\n": "no blank line",
}


def git(folder: Path, *words: str) -> str:
    names = {f"GIT_{who}_{what}": "a@b" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    env = {key: text for key, text in os.environ.items() if not key.startswith("GIT_")} | names
    config = ["-c", "init.defaultBranch=main", "-c", "commit.gpgsign=false", "-c", "core.hooksPath=/dev/null"]
    return subprocess.run(
        ["git", *config, *words], cwd=folder, env=env, capture_output=True, text=True, check=True
    ).stdout


def commit(folder: Path, message: str) -> None:
    git(folder, "commit", "-q", "--allow-empty", "--cleanup=verbatim", "-m", message)


def checked(folder: Path, *words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, SCRIPT, *map(str, words)], cwd=folder, capture_output=True, text=True, check=False
    )


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    folder = tmp_path / "repository"
    folder.mkdir()
    git(folder, "init", "-q")
    commit(folder, "an old one that nobody mends")
    git(folder, "tag", "base")
    return folder


def test_new_commits_are_checked_and_old_ones_are_not(repository):
    assert checked(repository, "base").returncode == 0
    commit(repository, GOOD)
    assert checked(repository, "base").returncode == 0
    git(repository, "checkout", "-q", "-b", "side", "base")
    commit(repository, GOOD)
    git(repository, "merge", "-q", "--no-ff", "-m", "Merge", "main")
    assert checked(repository, "base").returncode == 0


@pytest.mark.parametrize(("message", "why"), BAD.items())
def test_a_message_that_is_wrong_is_named(repository, message, why):
    commit(repository, message)
    commit(repository, GOOD)
    done = checked(repository, "base")
    assert done.returncode == 1
    assert why in done.stderr and len(done.stderr.splitlines()) == 1


def test_a_shallow_clone_does_not_fail(repository, tmp_path):
    commit(repository, "no body")
    git(tmp_path, "clone", "-q", "--depth", "1", f"file://{repository}", "shallow")
    shallow = tmp_path / "shallow"
    for words in (["base"], [git(repository, "rev-parse", "base").strip()]):
        done = checked(shallow, *words)
        assert done.returncode == 0 and "no message was checked" in done.stdout
    assert checked(shallow).returncode == 0  # origin/main is HEAD: nothing is new


def test_a_folder_without_history_does_not_fail(tmp_path):
    assert checked(tmp_path).returncode == 0


@pytest.mark.parametrize(("message", "code"), [(GOOD, 0), *((message, 1) for message in BAD), ("Merge x\n", 0)])
def test_the_hook_takes_the_message_without_its_comments(tmp_path, message, code):
    file = tmp_path / "COMMIT_EDITMSG"
    file.write_text(f"{message}# Please enter the commit message\n")
    assert checked(tmp_path, "--message", file).returncode == code


def test_the_hooks_are_those_of_the_lint_extra():
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    versions = dict(re.findall(r'"(ruff|clang-format|mypy)==([\d.]+)"', (ROOT / "pyproject.toml").read_text()))
    revisions = {repository["repo"].rpartition("/")[2]: repository.get("rev") for repository in hooks["repos"]}
    assert revisions["ruff-pre-commit"] == f"v{versions['ruff']}"
    assert revisions["mirrors-clang-format"] == f"v{versions['clang-format']}"
    assert hooks["default_install_hook_types"] == ["pre-commit", "commit-msg"]
    (local,) = (repository["hooks"] for repository in hooks["repos"] if repository["repo"] == "local")
    types = next(hook["files"] for hook in local if hook["id"] == "mypy")
    (checked_by_mypy,) = re.findall(r"^files = \[(.*)\]$", (ROOT / "pyproject.toml").read_text(), re.M)
    assert all(re.search(types, f"{folder}/one.py") for folder in re.findall(r'"(\w+)"', checked_by_mypy))
    (message,) = (hook for hook in local if hook["id"] == "commit-message")
    assert message["entry"].split()[1] == SCRIPT.relative_to(ROOT).as_posix() and message["stages"] == ["commit-msg"]
