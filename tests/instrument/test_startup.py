"""The start-up hook: checks in once, costs nothing when not asked for, lets adapters in at a server's import."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import kvprobe.instrument

CARRIED = Path(kvprobe.instrument.__file__).parent / "carried"
sys.path.insert(0, str(CARRIED))
import kvprobe_startup as startup  # noqa: E402

sys.path.remove(str(CARRIED))


def run(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("KVPROBE") and k != "LD_PRELOAD"}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env={**clean, **env}, capture_output=True, text=True, check=True)


def test_a_process_checks_in_exactly_once(tmp_path: Path) -> None:
    run("import kvprobe_startup; kvprobe_startup.start()", KVPROBE_RUN=str(tmp_path), RANK="3")
    (path,) = tmp_path.glob("checkin-*.json")
    checkin = json.loads(path.read_text())
    assert checkin["rank"] == {"RANK": "3"} and checkin["argv"][1] == "-c" and not checkin["preloaded"]


@pytest.mark.parametrize("env", [{}, {"KVPROBE_RUN": ""}])
def test_without_a_run_nothing_is_imported(env: dict[str, str]) -> None:
    done = run("import sys; print([m for m in sys.modules if 'kvprobe' in m and 'editable' not in m])", **env)
    assert done.stdout == "[]\n"


def test_the_kill_switch_holds(tmp_path: Path) -> None:
    run("pass", KVPROBE_RUN=str(tmp_path), KVPROBE="off")
    assert not list(tmp_path.iterdir())


def test_in_a_run_a_process_imports_no_package_of_kvprobe(tmp_path: Path) -> None:
    done = run(
        "import sys; print(sorted(m for m in sys.modules if 'kvprobe' in m and 'editable' not in m), "
        "'json' in sys.modules)",
        KVPROBE_RUN=str(tmp_path),
    )
    assert done.stdout == "['kvprobe_startup'] False\n"


def test_a_folder_that_is_gone_is_no_trouble(tmp_path: Path) -> None:
    done = run("print('fine')", KVPROBE_RUN=str(tmp_path / "absent"))
    assert (done.stdout, done.stderr) == ("fine\n", "")


def test_adapters_come_in_when_a_server_is_imported(tmp_path: Path) -> None:
    package = tmp_path / "packages" / "transformers"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("NAME = 'stand-in'\n")
    code = (
        "import sys\nbefore = 'kvprobe.instrument' in sys.modules\nimport transformers\n"
        "print(before, 'kvprobe.instrument' in sys.modules, transformers.NAME)\n"
    )
    done = run(code, KVPROBE_RUN=str(tmp_path), PYTHONPATH=str(package.parent))
    assert done.stdout == "False True stand-in\n"


@pytest.mark.parametrize(
    "value",
    [
        {"a": 'quo"te\\ and \n', "b": ["ü", "日本", "\U0001f600"], "c": True, "d": -5, "e": {}},
    ],
)
def test_its_json_is_json(value: object) -> None:
    assert json.loads(startup._json(value)) == value


def test_an_argument_that_is_not_utf8_is_json_as_well() -> None:
    assert json.loads(startup._json([os.fsdecode(b"a\xff")])) == ["a?"]
