"""The adapters are found in every layout, and each server is a line of the table, a file and a test."""

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import kvprobe
from kvprobe.instrument import registry

ROOT = Path(kvprobe.__file__).resolve().parents[1]
SHOW = "import kvprobe.patches.transformers as t; print(t.__file__, [a.name for a in t.ADAPTERS])"


def imported_from(place):
    env = {**os.environ, "PYTHONPATH": str(place)}
    command = [sys.executable, "-c", SHOW]
    return subprocess.run(command, env=env, cwd=place, capture_output=True, text=True, check=True).stdout


def test_a_checkout_has_them_at_the_top():
    assert imported_from(ROOT).startswith(str(ROOT / "patches" / "transformers.py"))


def test_a_wheel_has_them_in_the_package(tmp_path):
    """As pyproject.toml lays it out: `kvprobe/patches.py` is left out, `patches` becomes `kvprobe/patches`."""
    project = (ROOT / "pyproject.toml").read_text()
    assert 'exclude = ["kvprobe/patches.py"]' in project and '"patches" = "kvprobe/patches"' in project
    package = tmp_path / "kvprobe"
    package.mkdir()
    for entry in (ROOT / "kvprobe").iterdir():
        if entry.name != "patches.py":
            (package / entry.name).symlink_to(entry)
    (package / "patches").symlink_to(ROOT / "patches")
    assert imported_from(tmp_path).startswith(str(package / "patches" / "transformers.py"))


def test_no_link_stands_in_for_them():
    assert not any(path.is_symlink() for path in (ROOT / "kvprobe").iterdir())


@pytest.mark.parametrize("server", registry.SERVERS)
def test_a_server_is_a_line_and_a_file(server):
    line = registry.SERVERS[server]
    for kind in importlib.import_module(f"kvprobe.patches.{server}").ADAPTERS:
        assert kind.name.startswith(f"{server}."), (
            f'{kind.__name__}: its name is "{kind.name}": call it "{server}.SOMETHING"'
        )
        assert kind.distributions == line.distributions and kind.versions
        assert kind.summary.endswith("."), f"{kind.name}: give it a summary, one sentence with a full stop"
        assert kind.targets, f"{kind.name}: list what it touches in `timed` or `targets`"
        for target in kind.targets:
            assert target.parameters is None or target.parameters[:1] not in (("self",), ("cls",)), (
                f"{kind.name}: write the parameters of {target.path} without `{target.parameters[0]}`"
            )


def test_the_readme_tells_of_every_adapter():
    told = (ROOT / "patches" / "README.md").read_text()
    for server in registry.SERVERS:
        for kind in registry.adapter_classes(server):
            assert f"`{kind.name}`" in told, (
                f"patches/README.md does not tell of `{kind.name}`: say there what it changes and never touches, what "
                "it was tested with, and its hazards"
            )


def test_every_file_of_adapters_has_its_line():
    for path in sorted((ROOT / "patches").glob("*.py")):
        if re.search(r"^ADAPTERS\b", path.read_text(), re.MULTILINE):
            assert path.stem in registry.SERVERS, (
                f"patches/{path.name} comes into no process: add its line to "
                "kvprobe/instrument/carried/kvprobe_startup.py:SERVERS"
            )
