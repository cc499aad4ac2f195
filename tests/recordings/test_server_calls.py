"""What adapters that only measure saw is in the recording, in the findings, on the page and in `kvprobe check`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvprobe.commands.check import command as check
from kvprobe.diagnosis import diagnose
from kvprobe.recordings import open_recording
from kvprobe.reporting.recorded import view
from tests.examining import examination

MS = 1_000_000


def call(t_ms: int, dur_ms: int, **more: object) -> dict[str, object]:
    return {
        "t_ns": t_ms * MS,
        "kind": "call",
        "adapter": "accelerate.hooks",
        "server": "accelerate",
        "call": "AlignDevicesHook.pre_forward",
        "direction": "load",
        "dur_ns": dur_ms * MS,
        "thread": 7,
        "cause": "2 of 2 copies from pageable memory, 2 blocking",
        "copies": 2,
        "bytes": 1000,
        "pageable_copies": 2,
        "blocking_copies": 2,
        **more,
    }


def state(adapter: str, word: str, **more: object) -> dict[str, object]:
    return {
        "t_ns": MS,
        "kind": "state",
        "adapter": adapter,
        "server": adapter.split(".")[0],
        "distribution": "x",
        "version": "1.0",
        "state": word,
        "reason": "",
        **more,
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run without a single CUDA call: no ring file."""
    options = {"report": "", "detail": "copies"}
    (tmp_path / "run.json").write_text(json.dumps({"command": ["python"], "options": options, "version": "0"}))
    checkin = {
        "pid": 7,
        "ppid": 1,
        "t_ns": MS,
        "argv": ["python"],
        "executable": "",
        "prefix": "",
        "python": "3.12",
        "preloaded": True,
        "ld_preload": "",
        "rank": {},
    }
    (tmp_path / f"checkin-7-{MS}.json").write_text(json.dumps(checkin))
    events = [
        state("accelerate.hooks", "waiting"),
        state("accelerate.hooks", "applied"),
        state("vllm.weight_uva", "waiting", reason="for --offload-backend uva"),
        state("vllm.simple.copies", "waiting"),
        call(100, 20),
        call(200, 30),
        call(198, 10, inside="AlignDevicesHook.pre_forward", bytes=0),
        call(300, 50, cause="", copies=0, bytes=0, pageable_copies=0, blocking_copies=0),
    ]
    (tmp_path / "events-7.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return tmp_path


def test_pageable_and_blocking_copies_are_a_finding(folder: Path) -> None:
    (finding,) = diagnose(open_recording(folder))
    assert finding.cause == "blocking_server_call" and finding.severity == "critical"
    assert finding.lost_ns == 50 * MS  # the inner call and the one that moved nothing are not counted
    assert finding.title == "2 calls of server functions that move data blocked their threads for 50.0 ms"
    assert finding.evidence[0].text.endswith("moved 2.00 kB: 4 of 4 copies from pageable memory, 4 blocking")


def test_the_page_lists_what_was_moved(folder: Path) -> None:
    shown = view(open_recording(folder), diagnose(open_recording(folder)))
    (section,) = [one for one in shown.sections if one is not None and one.id == "server_calls"]
    row = section.tables[0].rows[0]
    assert "accelerate AlignDevicesHook.pre_forward" in str(row[0]) and "to the GPU" in str(row[1])


def test_a_gate_can_ask_for_it(folder: Path) -> None:
    outcome = CliRunner().invoke(check, [str(folder), "--no", "blocking_server_call"])
    assert "FAIL  causes whose name contains “blocking_server_call”: blocking_server_call" in outcome.output


def test_adapters_that_wait_are_told_with_the_option_they_wait_for(folder: Path) -> None:
    notes = open_recording(folder).notes
    assert "adapter accelerate.hooks on x 1.0: applied (1 process)" in notes
    assert "adapter vllm.weight_uva on x 1.0: waiting for --offload-backend uva (1 process)" in notes
    assert any(note.startswith("adapter vllm.simple.copies on x 1.0: waiting: the server did not") for note in notes)


def test_time_in_recorded_cuda_calls_is_not_claimed_twice(folder: Path) -> None:
    import numpy as np

    from kvprobe.recordings.model import CallKind, Memory, Table

    recording = open_recording(folder)
    at = np.array([recording.server_calls["start_ns"][0]])
    recording.tables["calls"] = Table(
        "calls",
        {
            "start_ns": at,
            "end_ns": at + 15 * MS,
            "process": [0],
            "thread": [7],
            "kind": [CallKind.COPY],
            "memory": [Memory.PAGEABLE],
            "bytes": [1000],
            "count": [1],
            "direction": [1],
        },
    )
    lost = {finding.cause: finding.lost_ns for finding in diagnose(recording)}
    assert lost["blocking_server_call"] == 35 * MS and lost["pageable_memory"] <= 15 * MS


def test_transfers_through_the_submitter_tell_copies_before_and_after_merging(folder: Path) -> None:
    given = {"kind": "transfer", "server": "vllm", "direction": "load", "copies": 64, "bytes": 1 << 20, "submit_ns": 50}
    events = [
        {**given, "t_ns": 400 * MS, "submissions": 2, "descriptors": 4},
        {**given, "t_ns": 410 * MS, "submissions": 1, "descriptors": 8, "one_in": 10},
        {**given, "t_ns": 420 * MS, "submissions": 64},  # the server's own copies
        {**given, "t_ns": 430 * MS, "submissions": 1, "descriptors": "many"},
    ]
    with (folder / "events-7.jsonl").open("a") as file:
        file.write("".join(json.dumps(event) + "\n" for event in events))
    recording = open_recording(folder)
    found = recording.submitters
    told = {name: found[name].tolist() for name in ("transfers", "copies", "descriptors", "calls", "bytes", "dur_ns")}
    assert told == {
        "transfers": [11],
        "copies": [11 * 64],
        "descriptors": [84],
        "calls": [12],
        "bytes": [11 << 20],
        "dur_ns": [550],
    }
    assert recording.text(int(found["server"][0])) == "vllm"
    section = next(one for one in view(recording, examination(recording)).sections if one.id == "descriptors")
    assert "vllm" in section.tables[0].rows[0][0].text
