"""Live figures: what two looks at a running process's ring file say of the time between them."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from kvprobe.errors import UsageError
from kvprobe.probe.live import Live, find_rings, snapshots, totals


class Clock:
    """The looker's clock: it begins at the machine's and moves only when told."""

    def __init__(self) -> None:
        self.now_ns = time.monotonic_ns()

    def monotonic_ns(self) -> int:
        return self.now_ns

    def later(self, seconds: float) -> None:
        self.now_ns += int(seconds * 1e9)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr("kvprobe.probe.live.time", made)
    return made


def _fast_look(live: Live, watched: Any, clock: Clock) -> Any:
    watched.write(1000, dur_ns=1000, stream=7, bytes=4096)
    clock.later(1)
    return live.look()[0]


def test_a_look_gives_rates_and_percentiles_since_the_one_before(watched: Any, clock: Clock) -> None:
    watched.write(50, dur_ns=900_000, stream=7, bytes=1)  # before anybody looked
    live = Live(watched.path.parent)
    live.look()
    watched.write(990, dur_ns=1000, stream=7, bytes=4096)
    watched.write(10, dur_ns=400_000, stream=7, bytes=4096, direction=2)
    clock.later(2)
    view = live.look()[0]
    (stream,) = view.streams
    assert (view.pid, view.state, view.interval_s) == (watched.process.pid, "running", 2)
    assert stream.submissions_per_s == 500
    assert stream.p50_ns == pytest.approx(1000, rel=0.125)
    assert stream.p99_ns == pytest.approx(1000, rel=0.125)
    assert stream.bytes_per_s["h2d"] * view.interval_s == 990 * 4096
    assert stream.bytes_per_s["d2h"] * view.interval_s == 10 * 4096
    assert stream.outstanding is None


def test_submissions_that_became_slow_for_most_of_the_time_are_suspected(watched: Any, clock: Clock) -> None:
    live = Live(watched.path)
    live.look()
    assert not _fast_look(live, watched, clock).streams[0].suspected
    watched.write(10_000, dur_ns=2_000_000, stream=7, bytes=4096)
    clock.later(10)
    (stream,) = live.look()[0].streams
    assert stream.baseline_ns == pytest.approx(1000, rel=0.125)
    assert stream.blocked_share == pytest.approx(2, rel=0.125)
    assert stream.suspected


def test_slow_calls_that_cost_little_of_the_time_are_not_suspected(watched: Any, clock: Clock) -> None:
    live = Live(watched.path)
    live.look()
    _fast_look(live, watched, clock)
    watched.write(20, dur_ns=10_000, stream=7, bytes=4096)
    clock.later(0.1)
    (stream,) = live.look()[0].streams
    assert stream.p50_ns == pytest.approx(10_000, rel=0.125)
    assert not stream.suspected


def test_a_call_that_has_not_returned_is_seen_and_counts_as_blocked(watched: Any, clock: Clock) -> None:
    live = Live(watched.path)
    watched.write(100, dur_ns=1000, stream=7)
    live.look()
    watched.enter(1, 7)
    clock.now_ns = time.monotonic_ns()
    clock.later(1000)
    view = live.look()[0]
    assert view.longest is not None
    assert (view.longest.call, view.longest.stream) == ("cudaMemcpyAsync", 7)
    assert view.longest.age_ns >= 1_000_000_000_000
    assert view.streams[0].blocked_share > 0.5
    watched.write(1, dur_ns=60_000_000, stream=7)
    assert live.look()[0].longest is None


def test_outstanding_is_what_transfers_have_not_ended(watched: Any) -> None:
    live = Live(watched.path)
    watched.write(96, dur_ns=1000, stream=7)
    live.look()
    watched.write(1, dur_ns=10_000_000, stream=7, call=64, count=64)
    assert live.look()[0].streams[0].outstanding == 32


def test_an_ended_process_is_shown_once_and_a_killed_one_is_called_so(watched: Any) -> None:
    live = Live(watched.path)
    live.look()
    watched.write(10, dur_ns=1000, stream=7)
    watched.kill()
    assert live.look()[0].state == "killed"
    assert live.look() == []


def test_a_process_that_ended_before_is_not_shown(watched: Any) -> None:
    watched.write(10, dur_ns=1000, stream=7)
    watched.close()
    live = Live(watched.path)
    assert live.look() == []
    assert live.look() == []


def test_totals_are_those_of_the_process(watched: Any) -> None:
    watched.write(5, dur_ns=100, stream=7, bytes=10)
    watched.write(3, dur_ns=100, stream=8, bytes=10, result=2)
    (snapshot,) = snapshots([watched.path])
    sums = totals(snapshot)
    assert {key: (one.count, one.bytes, one.errors) for key, one in sums.items()} == {
        (7, 1, 1): (5, 50, 0),
        (8, 1, 1): (3, 30, 3),
    }


def test_rings_are_found_in_the_newest_run_folder_and_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for number, name in enumerate(("kvprobe-old", "kvprobe-new", "kvprobe-empty", "other")):
        (tmp_path / name).mkdir()
        if name != "kvprobe-empty":
            (tmp_path / name / "1-1.kvp").touch()
        os.utime(tmp_path / name, (1000 + number, 1000 + number))
    monkeypatch.setenv("KVPROBE_RUN", str(tmp_path / "other"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert find_rings() == [tmp_path / "other" / "1-1.kvp", tmp_path / "kvprobe-new" / "1-1.kvp"]
    assert Live().look() == []  # files that are no recordings yet
    with pytest.raises(UsageError, match="neither a run folder nor a ring file"):
        find_rings(tmp_path / "nothing")
