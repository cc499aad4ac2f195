"""What `--json` prints is what its published schema says, key for key, and no key goes away within a major version."""

from __future__ import annotations

import ast
import copy
import gzip
import json
import math
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest

from kvprobe import cli
from kvprobe.output import DOCUMENTS, SCHEMA_VERSION, TRIAGE, VERSION_KEY, schema, schema_of
from tests.packed import extract

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests" / "gpu" / "data"
MADE = runpy.run_path(str(ROOT / "docs" / "schema.py"))
breaks, major = MADE["breaks"], MADE["major"]


def closed(one: dict) -> dict:
    """A schema in which no key is allowed that it does not name."""
    one = copy.deepcopy(one)
    for kind in [one, *one["$defs"].values()]:
        if kind.get("type") == "object":
            kind["additionalProperties"] = False
    return one


def valid(command: str, text: str) -> dict:
    """What a command printed, held against its schema; every key has to stand in it."""
    found = json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    jsonschema.Draft202012Validator(closed(schema_of(command))).validate(found)
    assert next(iter(found)) == VERSION_KEY
    assert found[VERSION_KEY] == SCHEMA_VERSION
    return found


@pytest.fixture
def printed(capsys):
    """Runs a command with --json; what it printed, held against its schema."""

    def run(command: str, *arguments: object, codes: tuple[int, ...] = (0,)) -> dict:
        code = cli.main([*command.split(), *map(str, arguments), "--json"])
        said = capsys.readouterr()
        assert code in codes, said.err
        return valid(command, said.out)

    return run


def unpacked(name: str, folder: Path) -> Path:
    """A recording of tests/gpu/data, ready to be read."""
    source = DATA / name
    if name.endswith(".tar.gz"):
        extract(source, folder / source.stem)
        (inner,) = [path.parent for path in (folder / source.stem).rglob("run.json")] or [folder / source.stem]
        return inner
    if name.endswith(".sqlite.gz"):
        target = folder / source.stem
        with gzip.open(source) as file, target.open("wb") as out:
            shutil.copyfileobj(file, out)
        return target
    return source


RECORDINGS = (
    "kineto_saturated.json.gz",
    "kineto_pageable.json.gz",
    "kineto_healthy.json.gz",
    "nsys_saturated.sqlite.gz",
    "nsys_batch.sqlite.gz",
    "others/weights_fetched_a_layer_ahead.kvprobe.tar.gz",
    "others/experts_fetched_over_a_full_link.kvprobe.tar.gz",
)


@pytest.mark.parametrize("name", RECORDINGS)
def test_what_is_printed_of_a_recording_is_in_the_schema(name, printed, tmp_path):
    path = unpacked(name, tmp_path)
    report = printed("report", path, "-o", tmp_path / "page.html")
    stats = printed("stats", path)
    check = printed("check", path, "--max-submit-p99", "1us", "--max-blocked", "1%", codes=(0, 1))
    triage = printed("triage", path)
    assert report["findings"] == stats["findings"]
    assert report["verdict"] == stats["verdict"] == check["verdict"]
    assert report["account"] == stats["account"] == check["account"]
    assert triage["recordings"][0]["path"] == str(path)


def test_what_is_printed_of_several_recordings_is_in_the_schema(printed, tmp_path):
    before, after = DATA / "kineto_saturated.json.gz", DATA / "kineto_healthy.json.gz"
    assert printed("diff", before, after, codes=(0, 1))["before"] == str(before)
    assert len(printed("reduce", before, after, "--workers", "1", codes=(0, 1))["ranks"]) >= 1
    assert printed("weights", before)["processes"]
    assert printed("causes", "pageable_memory")["causes"][0] in printed("causes")["causes"]


@pytest.mark.parametrize("path", sorted((ROOT / "tests/recordings/corpus").iterdir()), ids=lambda path: path.name)
def test_what_is_printed_of_a_hostile_file_is_in_the_schema(path, capsys):
    for command in ("stats", "triage"):
        code = cli.main([command, str(path), "--json"])
        said = capsys.readouterr()
        if said.out:
            valid(command, said.out)
        else:
            assert code in (1, 2)
            assert said.err.count("\n") == 1


@pytest.mark.parametrize(
    ("command", "options"),
    [
        ("doctor", ("--device", "host")),
        ("calibrate", ("--device", "host", "--quick")),
        ("bench overhead", ("--device", "host", "--rounds", "3")),
        ("demo", ("--device", "host", "--seconds", "1", "--report", "page.html")),
        ("patches", ()),
    ],
)
def test_what_is_printed_of_this_machine_is_in_the_schema(command, options, tmp_path):
    """What `bench` prints, which takes longest, is held against its schema in tests/commands/test_bench.py."""
    done = subprocess.run(
        [sys.executable, "-m", "kvprobe", *command.split(), *options, "--json"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.stdout, done.stderr
    valid(command, done.stdout)


def test_every_command_with_json_has_a_document_and_no_other_writes_it():
    offered, prints = set(), set()
    for path in sorted((ROOT / "kvprobe" / "commands").glob("*.py")):
        source = path.read_text()
        name = path.stem.rstrip("_")
        offered |= {name} if '"--json"' in source else set()
        prints |= {name} if re.search(r"^\s+(?:[^#\n]*\b)?[A-Z]+\.print\(", source, re.M) else set()
        for node in ast.walk(ast.parse(source)):
            is_dump = isinstance(node, ast.Attribute) and node.attr in ("dump", "dumps")
            assert not is_dump, f"{path.name} turns something into JSON by itself"
    answered = {"mcp"}  # to an agent, not on stdout
    assert offered == prints == {name.split()[0] for name in DOCUMENTS} - answered


def test_the_published_schema_is_the_one_of_the_types():
    assert MADE["FILE"].read_text() == MADE["text"](), "run python docs/schema.py --write"
    jsonschema.Draft202012Validator.check_schema(schema())


def test_nothing_of_the_published_schema_is_broken_without_a_major_version():
    published = json.loads(MADE["FILE"].read_text())
    assert not breaks(published, schema()) or major(schema()) > major(published)


def test_what_breaks_a_reader_is_told_from_what_adds_to_it():
    old = schema()
    more = copy.deepcopy(old)
    more["$defs"]["ReportJson"]["properties"]["requests"] = {"type": "array"}
    more["documents"]["forecast"] = {"$ref": "#/$defs/ReportJson"}
    assert breaks(old, more) == []
    gone = copy.deepcopy(old)
    del gone["$defs"]["VerdictJson"]["properties"]["reason"]
    gone["$defs"]["GpuJson"]["properties"]["window_ns"]["type"] = "number"
    gone["$defs"]["FindingJson"]["required"].remove("cause")
    gone["$defs"]["VerdictJson"]["properties"]["state"]["enum"].remove("undecided")
    gone["$defs"]["StatsJson"]["properties"]["findings"]["items"] = {"type": "string"}
    del gone["documents"]["top"]
    assert breaks(old, gone) == [
        "FindingJson: cause may be absent",
        "GpuJson: window_ns: type was integer, now number",
        "StatsJson: findings: each: $ref was #/$defs/FindingJson, now None",
        "StatsJson: findings: each: type was None, now string",
        "VerdictJson: reason is gone",
        "VerdictJson: state: the word undecided is gone",
        "kvprobe top prints no JSON any more",
    ]


def test_what_is_no_finite_number_is_null():
    said = TRIAGE.text({"recordings": [], "errors": [math.nan, math.inf]})
    assert json.loads(said) == {VERSION_KEY: SCHEMA_VERSION, "recordings": [], "errors": [None, None]}
