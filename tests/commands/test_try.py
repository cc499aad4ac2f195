"""`kvprobe try`: what it tries, what it says of it, and what it leaves of the command's runs."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvprobe.cli import main
from kvprobe.commands.try_ import _from_outside, _line
from kvprobe.diagnosis import Change, Finding
from kvprobe.diagnosis.pageable_memory import STAGED
from kvprobe.native import build
from kvprobe.probe import processes
from kvprobe.recordings.model import Recording, Source
from kvprobe.reporting.trial import compared

from .watched import COPIES, KVPROBE, clean_environment

pytestmark = pytest.mark.timeout(300)

SCALE = Change("four times the depth", "environment", "CUDA_SCALE_LAUNCH_QUEUES", "4x")
POOLED = Change("pooled streams", "rung", "pooled", "auto")


@pytest.fixture(scope="module", autouse=True)
def libraries() -> None:
    build.build()


def program(tmp_path: Path, last: str) -> list[str]:
    """A program that copies, and prints a figure that a variable sets."""
    path = tmp_path / "program.py"
    path.write_text(COPIES + "copies(20)\nround = len(os.listdir(os.path.dirname(os.environ['KVPROBE_RUN'])))\n" + last)
    return ["--", sys.executable, str(path)]


def finding(*changes: Change, lost_ns: int = 1_000) -> Finding:
    return Finding(
        "fence_before_copies", "t", "warning", "certain", lost_ns, cure=tuple(c.of(lost_ns, lost_ns) for c in changes)
    )


def recording(*notes: str) -> Recording:
    return Recording([Source("run", "kvprobe")], notes=list(notes))


def with_share(change: Change, share: float) -> Change:
    return Change(change.text, change.kind, change.name, change.value, share=share)


def test_a_change_that_cures_two_findings_is_tried_once_for_the_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SCALE.name, raising=False)
    one, two = finding(with_share(SCALE, 0.5)), finding(with_share(SCALE, 0.25))
    other = finding(Change("x", "environment", "OTHER", "1", share=0.9), Change("move it", share=1.0))
    changes, left = _from_outside([one, two, other], recording(), [])
    assert [(c.name, c.thread_saving_ns) for c in changes] == [("OTHER", 900), (SCALE.name, 750)]
    assert not left


def test_fix_auto_is_tried_once_for_all_that_it_cures() -> None:
    found = [finding(with_share(POOLED, 0.5)), finding(with_share(STAGED, 0.25))]
    changes, left = _from_outside(found, recording("adapter vllm: applied (1 process)"), [])
    assert [(change.value, change.thread_saving_ns) for change in changes] == [("auto", 750)]
    assert not left


def test_what_cannot_be_tried_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SCALE.name, "4x")
    changes, left = _from_outside([finding(SCALE, POOLED)], recording(), [])
    assert not changes
    assert [line.split(",")[0] for line in left] == [
        "not tried: CUDA_SCALE_LAUNCH_QUEUES=4x is set already",
        "not tried: --fix auto",
        "nothing to try: no finding names a change that kvprobe can make without editing the program",
    ]
    changes, _ = _from_outside([finding(POOLED)], recording("adapter vllm: applied (1 process)"), [])
    assert [change.value for change in changes] == ["auto"]
    changes, left = _from_outside([finding(STAGED)], recording(), [])
    assert [change.name for change in changes] == ["staged"] and not left, "it needs no adapter"


def test_the_figure_of_the_command_is_compared_by_turns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    last = "print('rate', 10 * int(os.environ.get('FASTER', 1)) + round)"  # grows with every run, too
    arguments = ["try", "-o", str(out), "--rounds", "4", "--env", "FASTER=9", "--figure", "rate ([0-9]+)", "--json"]
    assert main([*arguments, *program(tmp_path, last)]) == 0
    said = json.loads(capsys.readouterr().out)
    (tried,) = said["tried"]
    assert tried["change"]["name"] == "FASTER"
    assert tried["change"]["predicted_saving_ns"] is None
    assert tried["figure"]["verdict"] == "more"
    assert tried["figure"]["p"] == pytest.approx(2 / 70)
    assert min(tried["figure"]["with"]) > max(tried["figure"]["without"])
    assert len(tried["wall_ns"]["without"]) == len(tried["blocked_ns"]["with"]) == 4
    assert json.loads((out / "try.json").read_text()) == said
    runs = sorted(path.stem for path in out.glob("*.code"))
    assert len(runs) == 9 and all((out / f"{name}.code").read_text() == "0\n" for name in runs)
    assert (out / "round-1-with-1.out").read_text().startswith("rate ")
    assert json.loads((out / "round-2-with-1" / "run.json").read_text())["command"][0] == sys.executable


def test_a_command_that_fails_ends_it_with_its_last_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["try", "-o", str(tmp_path / "out"), *program(tmp_path, "sys.exit('no model')")]) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert "ended with 1 (as it is): no model" in error and str(tmp_path / "out" / "recorded.err") in error


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--figure", "("],
        ["--figure", "rate", "--", "true"],
        ["--env", "X", "--", "true"],
        ["--rounds", "3", "--", "true"],
    ],
)
def test_wrong_usage(arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["try", *arguments]) == 2
    assert not any(tmp_path.iterdir())


def test_a_figure_that_is_no_number_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["try", "-o", str(tmp_path / "try"), "--env", "X=1", "--figure", "rate (.*)"]
    assert main([*words, *program(tmp_path, "print('rate nan')\n")]) == 1
    assert "no number matches it" in capsys.readouterr().err


def test_a_figure_changes_and_time_is_saved() -> None:
    rounds = compared([100.0, 101.0, 99.0, 100.0], [130.0, 131.0, 131.0, 130.0])
    said = _line("figure", rounds, "")
    assert "saves" not in said
    assert "changes by +30 (+30 to +32): higher" in said
    assert "saves -" in _line("wall time", rounds, "")


def test_sigterm_ends_the_command_as_well(tmp_path: Path) -> None:
    """Sent to kvprobe alone, as `timeout` and pipelines do."""
    pid = tmp_path / "pid"
    script = 'echo $$ > "$0.part"; mv "$0.part" "$0"; exec sleep 100'
    command = [*KVPROBE, "try", "-o", str(tmp_path / "try"), "--", "sh", "-c", script, str(pid)]
    process = subprocess.Popen(command, env=clean_environment(), stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not pid.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.terminate()
    assert process.wait() == 128 + signal.SIGTERM
    assert not processes.alive(int(pid.read_text()))
