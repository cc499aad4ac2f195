"""Every cause, played on the embedded host runtime: named, nothing else named, time lost within 10% of the truth."""

from pathlib import Path

import pytest
from scenarios import SCENARIOS, mistakes

from kvprobe.diagnosis import CAUSES, diagnose

# Causes that the host runtime cannot play and that have no file test_CAUSE.py here: they come from recorders and from
# CUDA's own initialisation, and are tested on public recordings (blocking_server_call: on events of adapters). Or they
# need what only `kvprobe run` records, or a GPU's locks: tests/corpus.
NOT_PLAYED = {
    "waiting_for_copies",  # what is left of the account
    "waiting_for_host",
    "profiler_overhead",
    "first_calls",
    "blocking_server_call",
    "pinning_stall",
    "wasted_stores",
    "remote_numa_memory",
    "confidential_computing",
}
TESTED_ALONE = {cause for cause in CAUSES if Path(__file__).with_name(f"test_{cause}.py").exists()}


@pytest.mark.parametrize("name", SCENARIOS)
def test_is_diagnosed_as_what_the_runtime_says_it_was(runtime, name):
    played = SCENARIOS[name](runtime)
    assert not mistakes(played, diagnose(played.recording))


def test_every_cause_is_played(runtime):
    played = set()
    for name, scenario in SCENARIOS.items():
        if not name.startswith("healthy"):
            played |= set(scenario(runtime).truth)
    assert played | TESTED_ALONE == set(CAUSES) - NOT_PLAYED
    assert not NOT_PLAYED & TESTED_ALONE


@pytest.mark.parametrize("name", [name for name in SCENARIOS if name.startswith("healthy")])
def test_a_healthy_recording_gets_nothing_found(runtime, name):
    assert not [one for one in diagnose(SCENARIOS[name](runtime).recording) if not one.abstains]


def test_the_recording_does_not_tell_the_truth_it_is_tested_against(runtime):
    played = SCENARIOS["loads_on_one_stream"](runtime)
    filled = {kind for kind, table in played.recording.tables.items() if table.rows}
    assert filled == {"calls", "executions", "streams", "processes"}
    assert not {"blocked_ns", "queue_ns", "reason"} & (set(played.recording.calls) | set(played.recording.executions))


def test_the_sum_of_host_findings_is_not_more_than_the_time_inside_calls(runtime):
    played = SCENARIOS["saturated_and_pageable"](runtime)
    calls = played.recording.calls
    claimed = sum(f.lost_ns for f in diagnose(played.recording) if f.lost_on == "host")
    assert 0 < claimed <= int((calls["end_ns"] - calls["start_ns"]).sum())


def test_without_executions_saturation_is_still_named_as_likely(runtime):
    from kvprobe.recordings.model import Table

    recording = SCENARIOS["loads_on_one_stream"](runtime).recording
    recording.tables["executions"] = Table("executions")
    recording.has_executions = False
    found = {f.cause: f for f in diagnose(recording)}
    assert found["launch_queue_saturation"].confidence == "likely"
