"""Recordings of `kvprobe run` on an H200 that name functions by stacks taken now and then: of two small servers."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "corpus"))

from grade import unpack

from kvprobe.diagnosis import Examination, examine
from kvprobe.recordings import open_recording
from kvprobe.recordings.model import Recording, Table
from kvprobe.reporting import build_page
from kvprobe.reporting.account import account_lines
from kvprobe.reporting.headline import place

FOLDER = Path(__file__).resolve().parents[1] / "gpu" / "data" / "sampled"
PREPARES, NEEDS = "prepare_batch (/srv/app/server.py:10)", "needs_the_cache (/srv/app/server.py:20)"


@pytest.fixture(scope="module")
def prepares(tmp_path_factory: pytest.TempPathFactory) -> tuple[Recording, Examination]:
    """A server that works in Python for 6 ms before each millisecond of kernels and copies."""
    return opened(tmp_path_factory, "a_server_that_prepares_each_batch_in_python")


@pytest.fixture(scope="module")
def needs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Recording, Examination]:
    """One that takes a lock before each step, which a thread has while it sleeps for 4 ms."""
    return opened(tmp_path_factory, "a_server_that_needs_a_lock_whose_owner_sleeps")


def opened(tmp_path_factory: pytest.TempPathFactory, name: str) -> tuple[Recording, Examination]:
    recording = open_recording(unpack(FOLDER / f"{name}.kvprobe.tar.gz", tmp_path_factory.mktemp("run")))
    return recording, examine(recording)


def test_a_finding_names_the_function_that_the_gpu_waited_for(prepares: tuple[Recording, Examination]) -> None:
    recording, found = prepares
    first = found[0]
    assert first.cause == "gpu_starved"
    assert place(first) == f"thread 769, process 769, mostly in {PREPARES}"
    (said,) = (one for one in first.evidence if "stacks" in one.text)
    assert said.text == f"in the idle time, 16 of 16 stacks show thread 769 in {PREPARES}"
    assert recording.stack_samples.rows == 20, "four were taken while it submitted or waited for the GPU"
    assert not any("see what the thread does" in change.text.lower() for change in first.cure)


def test_the_first_screen_and_the_account_name_it_too(prepares: tuple[Recording, Examination]) -> None:
    recording, found = prepares
    (line,) = (line for line in account_lines(found.account) if "in Python" in line)
    assert line.endswith(f", mostly in {PREPARES}")
    page = build_page(recording, findings=found)
    assert "process 769, mostly in prepare_batch (server.py:10)" in page.partition('class="facts"')[2][:4_000]


def test_an_account_names_where_a_thread_waited_of_which_nothing_shows_for_what(
    needs: tuple[Recording, Examination],
) -> None:
    _, found = needs
    (line,) = (line for line in account_lines(found.account) if "something outside CUDA" in line)
    assert line.endswith(f", mostly in {NEEDS}")
    (first, *_) = (one for one in found if one.cause == "waiting_for_host")
    said = [one.text for one in first.evidence if "stacks" in one.text]
    assert said == [f"in the pauses that are not known, 14 of 15 stacks show thread 880 in {NEEDS}"]


def test_without_stacks_nothing_is_named(prepares: tuple[Recording, Examination]) -> None:
    recording, _ = prepares
    kept = recording.tables["stack_samples"]
    recording.tables["stack_samples"] = Table("stack_samples", {})
    try:
        found = examine(recording)
    finally:
        recording.tables["stack_samples"] = kept
    assert found[0].where[0].function == "" and not found.account.gpus[0].functions
    assert any("see what the thread does" in change.text.lower() for change in found[0].cure)
