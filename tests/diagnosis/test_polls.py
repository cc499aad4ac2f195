"""A GPU that stands idle until a thread asks whether it is done: that thread polls, which is not called preparing."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from kvprobe.account import Line
from kvprobe.diagnosis import Examination, examine
from kvprobe.diagnosis.finding import Finding
from kvprobe.durations import time_text
from kvprobe.recordings import open_recording

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "corpus"))

from grade import unpack

DATA = Path(__file__).resolve().parents[1] / "gpu" / "data" / "accounts" / "nsys"


def starved(name: str, into: Path) -> tuple[Examination, Finding]:
    found = examine(open_recording(unpack(DATA / f"{name}.sqlite.gz", into)))
    return found, next(one for one in found if one.cause == "gpu_starved")


def test_a_thread_that_polls_and_sleeps_is_told_to_notice_sooner(tmp_path: Path) -> None:
    _, finding = starved("a_poller_that_sleeps_too_long", tmp_path)
    assert "while the host polled, or prepared the next step" in finding.title
    said = next(one for one in finding.evidence if "cudaEventQuery" in one.text)
    assert said.text.startswith("in 89 of these gaps, the thread called cudaEventQuery")
    assert finding.lost_ns * 0.9 < said.value < finding.lost_ns  # nearly all of it passed before the thread asked
    assert (
        finding.cure[0].text.startswith("If the thread sleeps before it polls") and finding.cure[0].predicted_saving_ns
    )


def test_the_figure_of_the_gaps_is_told_by_the_lines_of_the_account(tmp_path: Path) -> None:
    found, finding = starved("a_poller_that_sleeps_too_long", tmp_path)
    (gpu,) = found.account.gpus
    pattern = r"together (.+?) \((.+?) \"in Python\", (.+?) \"asleep, or in other code\"\)"
    told = re.search(pattern, finding.evidence[0].text)
    assert told is not None
    lines = (gpu.ns(Line.PYTHON), gpu.ns(Line.ELSEWHERE))
    assert told.groups() == tuple(time_text(one) for one in (finding.lost_ns, *lines))


@pytest.mark.parametrize("name", ["a_scheduler_in_python_between_steps", "torch_tokens_handled_in_python"])
def test_a_thread_that_does_not_poll_is_not_said_to(name: str, tmp_path: Path) -> None:
    _, finding = starved(name, tmp_path)
    assert "while the host prepared the next step" in finding.title
    assert not any("Query" in one.text for one in (*finding.evidence, *finding.cure))
