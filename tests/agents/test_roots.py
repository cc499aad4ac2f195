"""An agent opens what lies below the folders that were named, by any path that leads there, and nothing else."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from kvprobe.agents.roots import CONVERTED, Roots
from kvprobe.errors import RecordingError, UsageError
from kvprobe.recordings import FORMATS

READERS = Path(__file__).parents[2] / "kvprobe" / "recordings"
TRACE = json.dumps({"traceEvents": []})


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    for name in ("in/a.json", "in/deep/b.json", "out/secret.json", "in-beside/c.json", "other/d.json"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(TRACE)
    (tmp_path / "in" / "to-secret.json").symlink_to(tmp_path / "out" / "secret.json")
    (tmp_path / "in" / "to-out").symlink_to(tmp_path / "out")
    (tmp_path / "in" / "to-a.json").symlink_to("a.json")
    (tmp_path / "in" / "loop").symlink_to("loop")
    (tmp_path / "link-to-in").symlink_to("in")
    return tmp_path


@pytest.mark.parametrize("given", ["a.json", "./deep/../a.json", "to-a.json", "{}/in/a.json", "{}/link-to-in/a.json"])
def test_every_path_to_a_file_below_is_that_file(folders, given):
    roots = Roots([folders / "in"], convert=False)
    assert roots.recording(given.format(folders))[0] == (folders / "in" / "a.json").resolve()


@pytest.mark.parametrize(
    "given",
    ["../out/secret.json", "{}/out/secret.json", "to-secret.json", "to-out/secret.json", "to-out", "..",
    "../in-beside/c.json",
     "deep/../../out/secret.json", "/etc/passwd", "/proc/self/environ", "/", "../nothing", "/nothing"],
)  # fmt: skip
def test_what_leads_out_is_refused_whether_it_exists_or_not(folders, given):
    with pytest.raises(UsageError, match=r"not below the folders that kvprobe mcp was started with$"):
        Roots([folders / "in"], convert=False).recording(given.format(folders))


@pytest.mark.parametrize(
    "given", ["nothing", "a.json/x", "loop", "a\0b", "x" * 5000, "~/a.json", "file:///etc/passwd", "-o"]
)
def test_what_does_not_exist_is_said_to(folders, given):
    with pytest.raises(RecordingError, match=r"no such file or folder$"):
        Roots([folders / "in"], convert=False).recording(given)


def test_a_folder_with_a_link_that_leads_out_is_refused_whole(folders):
    roots = Roots([folders / "in"], convert=False)
    (folders / "in" / "loop").unlink()
    with pytest.raises(UsageError, match="not below"):
        roots.recording(".")
    (folders / "in" / "run").mkdir()
    (folders / "in" / "run" / "1-1.kvp").symlink_to("/etc/passwd")
    with pytest.raises(UsageError, match="not below"):
        roots.recording("run")


def test_a_relative_path_begins_at_each_folder_in_turn(folders):
    roots = Roots([folders / "in", folders / "other"], convert=False)
    assert roots.recording("d.json")[0].name == "d.json"
    with pytest.raises(UsageError, match="no such folder"):
        Roots([folders / "in" / "a.json"], convert=False)


def test_a_file_that_changes_has_another_fingerprint(folders):
    roots = Roots([folders / "in"], convert=False)
    before = roots.recording("a.json")[1]
    assert roots.recording("a.json")[1] == before
    (folders / "in" / "a.json").write_text(TRACE + " ")
    assert roots.recording("a.json")[1] != before


def test_what_must_be_converted_is_refused_unless_it_was_allowed(folders):
    (folders / "in" / "x.nsys-rep").write_bytes(b"NSYS")
    with pytest.raises(UsageError, match="start kvprobe mcp with --convert"):
        Roots([folders / "in"], convert=False).recording("x.nsys-rep")
    assert Roots([folders / "in"], convert=True).recording("x.nsys-rep")[0].name == "x.nsys-rep"


def test_every_reader_that_writes_or_starts_something_is_known():
    acting = re.compile(r"\b(?:tempfile|subprocess|mkdtemp|os\.exec|os\.system|socket)\b")
    found = {form for form, (module, _) in FORMATS.items() if acting.search((READERS / f"{module}.py").read_text())}
    assert found == set(CONVERTED)
