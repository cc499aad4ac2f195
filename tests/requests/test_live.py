"""Steps of a running server: late tokens, metrics with exemplars, an alert with the newest calls, `top`."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvprobe.commands.top import as_object, render
from kvprobe.probe.exposed import Collector
from kvprobe.probe.flight import FlightRecorder
from kvprobe.probe.live import Live
from kvprobe.recordings import open_recording
from kvprobe.requests.live import MOST_BYTES, Alerts, LiveRequests
from kvprobe.runfolder.step_lines import StepLines
from tests.commands.watched import COPIES, KVPROBE, clean_environment, wait_for_end

MS = 1_000_000
TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
# Steps whose times are told, so that nothing here depends on how fast the machine is; each makes a real call.
SERVER = (
    COPIES
    + f"""
import time, kvprobe
from kvprobe.instrument import event_log
runtime, device, host, stream = open_runtime()
at = time.monotonic_ns()
number = 0
kvprobe.mark_request("a", "arrived", at, trace={TRACE!r})
def steps(count, late):
    global at, number
    for _ in range(count):
        number += 1
        assert not runtime.cudaMemcpyAsync(device, host, ctypes.c_size_t(64), 1, stream)
        told = kvprobe.mark(number, ["a", "b"], "decode", computed=[1, 1], begin_ns=at)
        at += {90 * MS} if number in late else {5 * MS}
        told.end(end_ns=at)
    event_log.flush()
    print(number, flush=True)
for line in sys.stdin:
    count, *late = map(int, line.split())
    steps(count, set(late))
"""
)


class Server:
    """The program under `kvprobe run`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        words = [*KVPROBE, "run", "--report", "none", "--no-stacks", "-o", str(folder)]
        self.process = subprocess.Popen(
            [*words, "--", sys.executable, "-c", SERVER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=clean_environment(),
        )

    def steps(self, count: int, *late: int) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(f"{count} {' '.join(map(str, late))}\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline()

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.communicate(timeout=120)
            wait_for_end(self.folder)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    started = Server(tmp_path / "run")
    yield started
    started.end()


def exposition(requests: LiveRequests, folder: Path) -> str:
    """As OpenMetrics."""
    from prometheus_client import CollectorRegistry
    from prometheus_client.openmetrics.exposition import generate_latest

    registry = CollectorRegistry()
    registry.register(Collector(folder, requests))
    return generate_latest(registry).decode()


def test_late_tokens_alert_with_the_newest_calls_and_are_metrics_with_exemplars(server: Server, tmp_path: Path) -> None:
    requests, live = LiveRequests(), Live(server.folder)
    alerts, recorder = Alerts(requests, limit=5), FlightRecorder(tmp_path / "flights", pause_s=3600)
    server.steps(100)
    live.look()
    (first,) = requests.look([server.folder])
    assert first.steps == {"decode": 100} and first.tokens == 200 and first.late == 0
    assert [one.ns for one in first.first] == [5 * MS] * 2 and {one.ns for one in first.between} == {5 * MS}
    at = 1_000_000_000
    assert alerts.look(at) == []

    server.steps(100, 120, 130, 140)  # 3 of 100 steps, 6 of 200 tokens
    (now,) = requests.look([server.folder])
    assert now.late == 6 and now.worst is not None and (now.worst.ns, now.worst.step) == (90 * MS, 120)
    assert alerts.look(at + 10**10) == []
    server.steps(100, *range(205, 300, 9))
    requests.look([server.folder])
    (alert,) = alerts.look(at + 2 * 10**10)
    assert alert.tokens == 400 and alert.late == 28 and alert.folder == server.folder
    assert "28 of the 400 tokens" in alert.sentence and "7.0%, more than 5%" in alert.sentence
    assert "request a waited longest, 90.0 ms" in alert.sentence
    assert alerts.look(at + 3 * 10**10) == [], "once"

    kept = recorder.take([Path(view.path) for view in live.look()], alert.pid, alert.to_json())
    assert kept is not None and kept == recorder.newest
    assert json.loads((kept / "alert.json").read_text())["late"] == 28
    recording = open_recording([kept])
    assert recording.steps.rows == 300 and recording.calls.rows >= 300

    text = exposition(requests, server.folder)
    pid = str(alert.pid)
    assert f'kvprobe_late_tokens_total{{pid="{pid}",token="between"}} 28.0' in text
    assert f'kvprobe_time_between_tokens_seconds_count{{pid="{pid}"}} 598.0' in text
    (slow,) = [line for line in text.splitlines() if 'between_tokens_seconds_bucket{le="0.1"' in line]
    assert '# {request="b",step="295"} 0.09' in slow
    (fast,) = [line for line in text.splitlines() if 'first_token_seconds_bucket{le="0.005"' in line]
    assert 'request="b"' in fast  # the newest; the one before it had a trace
    assert text.endswith("# EOF\n")


def test_an_exemplar_names_the_servers_trace(tmp_path: Path) -> None:
    lines = StepLines(tmp_path, "steps-7", 1 << 20)
    lines.time("a", "arrived", 1_000, TRACE)
    lines.step((2_000, 5_000_000), 1, "prefill", ["a"], 1, [300])
    requests = LiveRequests()
    (now,) = requests.look([tmp_path])
    assert now.first[0].trace == TRACE
    assert 'request="a",step="1",trace_id="0af7651916cd43dd8448eb211c80319c"' in exposition(requests, tmp_path)


def test_a_file_that_was_full_goes_on_where_it_was(tmp_path: Path) -> None:
    """The lines that the full file took along are read, and no request begins anew."""
    lines, requests, seen, at = StepLines(tmp_path, "steps-7", 4_000), LiveRequests(), 0, 0
    for number in range(200):
        lines.step((at, at + 5 * MS), number, "decode", ["a", "b"], 1, [1, 1])
        at += 5 * MS
        if number % 7 == 0:
            seen += sum(one.tokens for one in requests.look([tmp_path]))
    seen += sum(one.tokens for one in requests.look([tmp_path]))
    assert (tmp_path / "steps-7-before.jsonl").exists() and seen == 400
    ((_, sums),) = requests.sums()
    assert sums["first"].count == 2 and sums["between"].count == 398 and sums["between"].late == 0


@pytest.mark.slow
def test_of_a_large_file_the_newest_is_read_and_nobody_is_taken_for_new(tmp_path: Path) -> None:
    lines, at = StepLines(tmp_path, "steps-7", 1 << 30), 0
    while (tmp_path / "steps-7.jsonl").stat().st_size < MOST_BYTES + 50_000 if at else True:
        lines.step((at, at + 5 * MS), 1, "decode", range(400), 1, [1] * 400)
        at += 5 * MS
    (now,) = LiveRequests().look([tmp_path])
    assert not [one for one in now.first if one.ns > 5 * MS] and now.late == 0 and now.tokens > 100_000


def test_hostile_lines_are_passed_over(tmp_path: Path) -> None:
    (tmp_path / "steps-7.jsonl").write_text(
        '{"kind":"step"}\n[]\n{"kind":"step","t_ns":"x","requests":[1]}\n{"kind":"arrived","t_ns":1,"n":null}\n'
        '{"t_ns":9,"kind":"step","requests":[{}]}\nnonsense\n{"kind":"step","t_ns":5,"requests":[1],"tokens":1}\n'
    )
    (now,) = LiveRequests().look([tmp_path])
    assert now.steps == {"unknown": 1}


def test_top_says_what_requests_waited_for(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    requests, live = LiveRequests(), Live(server.folder)
    server.steps(100)
    live.look()
    requests.look([server.folder])
    server.steps(50, 110)
    views = live.look()
    now = requests.look([server.folder])
    (told,) = as_object(views, None, now)["requests"]
    assert told["late_tokens"] == 2 and told["worst_step"] == 110 and told["steps"] == {"decode": 50}
    mean = (49 * 5 * MS + 90 * MS) / 50
    assert sum(told["lines_ns"].values()) == pytest.approx(mean, abs=len(told["lines_ns"]))
    Console(width=300).print(render(views, width=300, requests=now))
    said = capsys.readouterr().out
    assert "50 decode steps; between tokens p50 5.00 ms" in said
    assert "2.0% of 100 tokens late, longest: request a, 90.0 ms in step 110" in said


def test_the_command_alerts_and_keeps_a_flight(server: Server, tmp_path: Path) -> None:
    server.steps(100)
    flights = tmp_path / "flights"
    words = [*KVPROBE, "metrics", str(server.folder), "--port", "0", "--interval", "0.1", "--late-tokens", "5"]
    watching = subprocess.Popen(
        [*words, "--flight-recorder", str(flights)], stderr=subprocess.PIPE, text=True, env=clean_environment()
    )
    try:
        assert watching.stderr is not None
        assert "flight recorder on" in watching.stderr.readline()
        _until_it_speaks(server, watching)
        said = watching.stderr.readline()
    finally:
        watching.terminate()
        watching.wait()
    assert "came late" in said and "more than 5%; request a waited longest, 90.0 ms" in said
    (kept,) = flights.iterdir()
    assert f"the newest calls are kept in {kept}" in said
    assert json.loads((kept / "alert.json").read_text())["limit"] == 5
    done = subprocess.run([*KVPROBE, "requests", str(kept)], capture_output=True, text=True, check=False)
    assert "Time between tokens" in done.stdout, done.stderr


def _until_it_speaks(server: Server, watching: Any) -> None:
    """Tokens, a tenth of them late, until there is an alert: whenever it looks, it finds some."""
    import select

    number = 100
    while not select.select([watching.stderr], [], [], 0.05)[0] and watching.poll() is None:
        server.steps(100, *range(number + 1, number + 101, 10))
        number += 100
