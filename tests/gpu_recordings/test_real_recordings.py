"""Recordings made on an H200 by `tests/gpu/record.py`, each with what the program measured itself.

They lie in tests/gpu/data (KVPROBE_GPU_RECORDINGS names another folder): `nsys_SCENARIO.sqlite.gz` and
`kineto_SCENARIO.json.gz` with `.truth.json` beside them, and `stats_SCENARIO_TABLE.csv` as `nsys stats` printed it.
"""

from __future__ import annotations

import csv
import gzip
import json
import os
import re
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from kvprobe.commands.stats import command as stats
from kvprobe.diagnosis import diagnose
from kvprobe.recordings import open_recording
from kvprobe.recordings.model import CallKind

DATA = Path(os.environ.get("KVPROBE_GPU_RECORDINGS", Path(__file__).parents[1] / "gpu" / "data"))
TOOLS = ("nsys", "kineto")
FORMS = {"nsys": ".sqlite.gz", "kineto": ".json.gz"}
NAMED = {
    "saturated": {"fence_before_copies", "launch_queue_saturation"},
    "healthy": set(),
    "pageable": {"pageable_memory"},
    "batch": {"descriptor_bound_batch"},
}
TABLES = ("cuda_api_sum", "cuda_gpu_mem_time_sum", "cuda_gpu_mem_size_sum", "nvtx_sum")


@pytest.fixture(scope="module")
def path_of(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recordings")

    def unpacked(tool, scenario):
        packed = DATA / f"{tool}_{scenario}{FORMS[tool]}"
        if not packed.exists():
            pytest.skip(f"{packed.name} is not here")
        if tool == "kineto":
            return packed
        plain = folder / packed.stem
        if not plain.exists():
            plain.write_bytes(gzip.decompress(packed.read_bytes()))
        return plain

    return unpacked


@pytest.fixture(scope="module")
def read(path_of):
    known = {}

    def of(tool, scenario):
        path = path_of(tool, scenario)
        if path not in known:
            recording = open_recording([path])
            # what is left of the account has a test of its own
            found = [one for one in diagnose(recording) if not one.cause.startswith("waiting_for")]
            known[path] = recording, {finding.cause: finding for finding in found}
        return known[path]

    return of


def truth(tool, scenario):
    return json.loads((DATA / f"{tool}_{scenario}.truth.json").read_text())


def durations(recording, kind):
    calls = recording.calls
    return (calls["end_ns"] - calls["start_ns"])[calls["kind"] == kind]


@pytest.mark.parametrize("scenario", NAMED)
@pytest.mark.parametrize("tool", TOOLS)
def test_each_cause_is_named_and_nothing_else(read, tool, scenario):
    _, findings = read(tool, scenario)
    assert set(findings) == NAMED[scenario]


@pytest.mark.parametrize("scenario", NAMED)
@pytest.mark.parametrize("tool", TOOLS)
def test_every_copy_of_the_program_was_read(read, tool, scenario):
    recording, _ = read(tool, scenario)
    said = truth(tool, scenario)
    kind = CallKind.BATCH if scenario == "batch" else CallKind.COPY
    calls = recording.calls
    assert len(durations(recording, kind)) == said["calls"]
    assert int(calls["bytes"][calls["kind"] == kind].sum()) == said["bytes"]


@pytest.mark.parametrize("tool", TOOLS)
def test_the_fence_lost_what_the_program_waited(read, tool):
    _, findings = read(tool, "saturated")
    assert findings["fence_before_copies"].lost_ns == pytest.approx(truth(tool, "saturated")["slow_ns"], rel=0.1)


@pytest.mark.parametrize("tool", TOOLS)
def test_fence_and_full_queue_together_are_what_copies_cost_beyond_a_queue_with_room(read, tool):
    recording, findings = read(tool, "saturated")
    took = durations(recording, CallKind.COPY)
    beyond = took[1021:].sum() - len(took[1021:]) * np.median(took[:1000])
    assert sum(finding.lost_ns for finding in findings.values()) == pytest.approx(beyond, rel=0.1)


@pytest.mark.parametrize("tool", TOOLS)
def test_pageable_copies_lost_what_the_program_measured(read, tool):
    _, findings = read(tool, "pageable")
    assert findings["pageable_memory"].lost_ns == pytest.approx(truth(tool, "pageable")["slow_ns"], rel=0.1)


@pytest.mark.parametrize("tool", TOOLS)
def test_batches_lost_their_calls_and_no_more_than_the_program_measured(read, tool):
    # The program's own figure also has the making of 500 descriptors in Python: an upper bound.
    recording, findings = read(tool, "batch")
    lost = findings["descriptor_bound_batch"].lost_ns
    assert lost == pytest.approx(durations(recording, CallKind.BATCH).sum(), rel=0.1)
    assert lost < truth(tool, "batch")["slow_ns"]


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("scenario", NAMED)
def test_stats_are_those_of_nsys_to_the_last_digit_and_name_by_name(path_of, scenario, table):
    path = path_of("nsys", scenario)
    printed = DATA / f"stats_{scenario}_{table}.csv"
    if not printed.exists():
        pytest.skip(f"{printed.name} is not here")
    theirs = [row for row in csv.reader(printed.read_text().splitlines()) if row]
    result = CliRunner().invoke(stats, [str(path), "--csv", "-r", table])
    assert result.exit_code == 0, result.output
    ours = list(csv.reader(result.output.splitlines()))
    plain = [[re.sub(r"_v\d+$", "", cell) for cell in row] for row in theirs]  # nsys names versions of functions
    # Without rows, nsys prints no heading either.
    assert (ours if len(ours) > 1 else []) == plain
