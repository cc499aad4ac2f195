"""`kvprobe top`, as a script, as a terminal and as Prometheus see it."""

from __future__ import annotations

import io
import json
import os
import pty
import select
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from kvprobe.commands import top
from kvprobe.commands.top import Offloads, as_object, render
from kvprobe.diagnosis.whole_triage import triage
from kvprobe.probe.live import CallTime, Live, ProcessView, StreamView
from kvprobe.recordings import open_recording
from kvprobe.runfolder import files

from .watched import COPIES, KVPROBE, clean_environment, run_watched, wait_for_end

WORK = """
import sys, time
from kvprobe.cuda import device_region, find_runtime, host_region
from kvprobe.offload import BlockPool, OffloadEngine
runtime = find_runtime("host")
gpu = BlockPool(runtime, [device_region(runtime, 64 * 65536)], 65536)
cpu = BlockPool(runtime, [host_region(runtime, 64 * 65536)], 65536)
engine = OffloadEngine(runtime, gpu, cpu, policy="shared", detail="copies")
engine.load(range(64), range(64)).wait()
print("ready", flush=True)
while True:
    engine.load(range(64), range(64)).wait()
    time.sleep(0.005)
"""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    environment = {**os.environ, "KVPROBE_RUN": str(tmp_path)}
    process = subprocess.Popen([sys.executable, "-c", WORK], stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout and process.stdout.readline() == "ready\n"
    yield process
    process.kill()
    process.wait()


def _top(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "kvprobe", "top", *arguments]


def test_once_json_is_one_object_with_the_running_process(server: subprocess.Popen[str], tmp_path: Path) -> None:
    stream = {"submissions_per_s": 0}
    while not stream["submissions_per_s"]:  # in one interval of a busy machine the server may not get a CPU
        done = subprocess.run(
            _top(str(tmp_path), "--once", "--json", "--interval", "0.3"), capture_output=True, text=True, check=True
        )
        (process,) = json.loads(done.stdout)["processes"]
        assert (process["pid"], process["producer"], process["state"]) == (server.pid, "engine", "running")
        (stream,) = process["streams"]
    assert stream["bytes_per_s"]["h2d"] == pytest.approx(stream["submissions_per_s"] * 65536)
    assert 0 < stream["p50_ns"] <= stream["p99_ns"]
    assert 0 <= stream["outstanding"] <= 64
    assert server.poll() is None


def test_once_prints_a_table(server: subprocess.Popen[str], tmp_path: Path) -> None:
    done = subprocess.run(
        _top(str(tmp_path), "--once", "--interval", "0.2"),
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "COLUMNS": "140"},
    )
    assert str(server.pid) in done.stdout
    assert "GB/s" in done.stdout


def test_a_pid_is_enough_and_sixty_columns_are(server: subprocess.Popen[str]) -> None:
    done = subprocess.run(
        _top(str(server.pid), "--once", "--interval", "0.2"),
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "COLUMNS": "60"},
    )
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 60 and "…" not in done.stdout
    assert str(server.pid) in lines[0] and "subm/s" in done.stdout and "blocked" in done.stdout


def test_a_pid_or_name_that_is_not_recorded_is_refused() -> None:
    for target, text in (
        (str(os.getpid()), "is not being recorded: `kvprobe attach"),
        ("no-such-program-%", "no recorded"),
    ):
        done = subprocess.run(_top(target, "--once"), capture_output=True, text=True, check=False)
        assert done.returncode == 2 and text in done.stderr and done.stderr.count("\n") == 1


def _stream(handle: int, rate: float, blocked: float, number: int = -1) -> StreamView:
    return StreamView(handle, rate, 1e3, 2e3, 1e3, blocked, None, {"h2d": 1e9}, False, number)


def _text(streams: list[StreamView], width: int = 60, command: str = "python server.py") -> str:
    view = ProcessView(1, command, "interposer", "", "running", 1.0, streams, None, 0)
    console = Console(width=width, file=io.StringIO())
    console.print(render([view], width=width))
    return console.file.getvalue()


@pytest.mark.parametrize("width", [60, 120])
def test_a_process_without_a_call_says_why_that_may_be(width: int) -> None:
    text = " ".join(_text([], width).split())
    assert "python server.py" in text and "no call was seen yet" in text and "kvprobe attach" in text
    assert "static" not in text  # a program linked to the static runtime is recorded, too


def test_where_the_time_of_the_thread_that_submits_most_went_comes_first() -> None:
    spent = {("SYNC", False): 620_000_000, ("COPY", False): 110_000_000, ("COPY", True): 40_000_000}
    first, second = CallTime(7, "scheduler", 900, spent), CallTime(8, "", 5, {("ALLOC", False): 500_000_000})
    stream = StreamView(1, 900.0, 1e3, 2e3, 1e3, 0.0, None, {}, False, 1)
    view = ProcessView(7, "server", "interposer", "x.kvp", "running", 1.0, [stream], None, 0, threads=[first, second])
    console = Console(file=io.StringIO(), width=200)
    console.print(render([view], width=200))
    assert console.file.getvalue().splitlines()[0] == (  # type: ignore[attr-defined]
        "thread 7 (scheduler), of 1.00 s: 62% waiting for the GPU, 23% asleep, or in other code, 11% submitting, "
        "4.0% copying pageable memory"
    )
    (process,) = as_object([view])["processes"]
    mine, other = process["account"]
    assert mine["window_ns"] == other["window_ns"] == 1_000_000_000
    assert (mine["waiting_for_device_ns"], mine["pageable_ns"], other["allocating_ns"]) == (
        620_000_000,
        40_000_000,
        500_000_000,
    )


def test_busy_streams_come_first_by_name() -> None:
    text = _text([_stream(1 << 40, 10, 0, 1), _stream(2 << 40, 5, 0.5, 2), _stream(3 << 40, 900, 0, 3)])
    assert text.index("stream 2") < text.index("stream 3") < text.index("stream 1")
    assert "0x" not in text


@pytest.mark.parametrize("width", [60, 130])
def test_streams_that_do_nothing_are_counted_once_there_are_many(width: int) -> None:
    text = _text([_stream(n, float(n == 7), 0, n) for n in range(32)], width)
    assert "stream 7 " in text and "stream 8 " not in text
    assert "31 more streams idle" in text
    assert "stream 2 " in _text([_stream(n, 0, 0, n) for n in range(3)], width)


def test_a_long_command_keeps_its_program_and_the_line_its_width() -> None:
    text = _text([_stream(0, 1, 0, 0)], command=f"/opt/{'deep/' * 20}python3 server.py --model {'x' * 80}")
    assert text.startswith("1 python3 server.py --model xxx")
    assert max(map(len, text.splitlines())) <= 60 and "..." in text


STREAMS = f"""
{COPIES}
import threading
runtime, device, host, first = open_runtime()
streams = [first, *(ctypes.c_void_p() for _ in range(4))]
for one in streams[1:]:
    assert not runtime.cudaStreamCreateWithPriority(ctypes.byref(one), 1, 0)
def use(*order):
    for one in order:
        assert not runtime.cudaMemcpyAsync(device, host, ctypes.c_size_t(64), 1, one)
use(streams[3], streams[1], None)
thread = threading.Thread(target=use, args=(streams[4], streams[3], streams[0]))
thread.start(); thread.join()
print([one.value for one in (streams[3], streams[1], streams[4], streams[0])])
"""


def test_top_report_and_triage_call_a_stream_by_one_name(tmp_path: Path) -> None:
    """In the order of first use, whatever their addresses are; CUDA's own numbers stay."""
    run = tmp_path / "run"
    done = run_watched(run, sys.executable, "-c", STREAMS)
    assert done.returncode == 0
    used = json.loads(done.stdout)
    expected = {0: "stream 0", **{handle: f"stream {place}" for place, handle in enumerate(used, 1)}}
    live = Live(run)
    for ring in run.glob("*.kvp"):
        live.begin(ring, 0)
    (view,) = live.look()
    assert {int(one["stream"], 16): one["name"] for one in as_object([view])["processes"][0]["streams"]} == expected
    recording = open_recording([run])
    titles = [recording.stream_title(row) for row in range(recording.streams.rows)]
    assert dict(zip(recording.streams["handle"].tolist(), titles, strict=True)) == expected
    assert {one.handle: one.title for one in triage(run).queues} == expected


@pytest.mark.parametrize("how", [["--once", "--json"], ["--once"], []])
def test_a_run_that_has_ended_is_refused_in_one_line_that_says_what_shows_it(tmp_path: Path, how: list[str]) -> None:
    run = tmp_path / "run"
    program = f"{COPIES}\ncopies(5)"
    assert run_watched(run, sys.executable, "-c", program).returncode == 0
    for _ in range(2):  # as soon as its process has gone, and when its observer has, too
        done = subprocess.run(_top(str(run), *how), capture_output=True, text=True, check=False, timeout=60)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith(f"kvprobe: {run} has ended") and done.stderr.count("\n") == 1
        assert f"`kvprobe report {run}`" in done.stderr and f"`kvprobe stats {run}`" in done.stderr
        wait_for_end(run)


def test_a_run_that_has_not_made_a_call_yet_is_not_called_ended(tmp_path: Path) -> None:
    run = tmp_path / "run"
    command = [*KVPROBE, "run", "--exec", "-o", str(run), "--", "sleep", "100"]
    process = subprocess.Popen(command, env=clean_environment())
    try:
        while not (run / "run.json").exists():
            time.sleep(0.05)
        done = subprocess.run(
            _top(str(run), "--once", "--json", "--interval", "0.05"), capture_output=True, text=True, check=False
        )
    finally:
        process.kill()
        process.wait()
    assert (done.returncode, done.stdout) == (1, "")
    assert "is being recorded: 1 process runs" in done.stderr
    wait_for_end(run)


def test_a_folder_that_is_no_run_is_wrong_usage(tmp_path: Path) -> None:
    done = subprocess.run(
        _top(str(tmp_path), "--once", "--interval", "0.05"), capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"kvprobe: nothing is recorded in {tmp_path}") and done.stderr.count("\n") == 1


def test_json_without_once_is_wrong_usage() -> None:
    done = subprocess.run(_top("--json"), capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "--json needs --once" in done.stderr


@pytest.mark.parametrize("kind", ["xterm", "dumb"])
def test_q_ends_the_live_view_with_exit_code_0(server: subprocess.Popen[str], tmp_path: Path, kind: str) -> None:
    pid, terminal = pty.fork()
    if not pid:
        os.execve(sys.executable, _top(str(tmp_path), "--interval", "0.1"), {**os.environ, "TERM": kind})
    shown, asked = b"", False
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        try:
            if select.select([terminal], [], [], 0.2)[0]:
                shown += os.read(terminal, 65536)
        except OSError:  # the other side has gone
            break
        if b"engine" in shown and not asked:
            os.write(terminal, b"q")
            asked = True
        if asked and not shown:
            break
    assert asked, shown[-500:]
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_ctrl_c_ends_it_with_exit_code_0_and_prometheus_is_served_until_then(
    server: subprocess.Popen[str], tmp_path: Path
) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = _top(str(tmp_path), "--interval", "0.2", "--prometheus", str(port))
    top = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    from prometheus_client.parser import text_string_to_metric_families

    deadline = time.monotonic() + 120
    while True:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
                text = answer.read().decode()
        except OSError:
            assert top.poll() is None and time.monotonic() < deadline
            time.sleep(0.1)
            continue
        families = {family.name: family for family in text_string_to_metric_families(text)}
        (submissions,) = families["kvprobe_submissions"].samples
        durations = families["kvprobe_submit_seconds"]
        counts = [one.value for one in durations.samples if one.name.endswith("_bucket")]
        if counts[-1] == submissions.value:  # else it was read in the middle of a call
            break
        assert time.monotonic() < deadline
    assert submissions.name == "kvprobe_submissions_total"
    assert {**submissions.labels, "stream": ""} == {
        "pid": str(server.pid),
        "stream": "",
        "call": "cudaMemcpyAsync",
        "direction": "h2d",
    }
    (moved,) = families["kvprobe_bytes"].samples
    assert moved.value == submissions.value * 65536
    assert families["kvprobe_blocked_seconds"].samples
    assert durations.type == "histogram"
    assert counts == sorted(counts)
    listening = Path("/proc/net/tcp").read_text()  # loopback alone
    assert f"0100007F:{port:04X}" in listening
    assert f"00000000:{port:04X}" not in listening
    top.send_signal(signal.SIGINT)
    _, errors = top.communicate(timeout=120)
    assert top.returncode == 0, errors


def test_a_port_that_is_taken_is_one_clear_line(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = subprocess.run(
            _top(str(tmp_path), "--once", "--prometheus", str(port)), capture_output=True, text=True, check=False
        )
    assert done.returncode == 1
    assert done.stderr.startswith(f"kvprobe: port {port} of 127.0.0.1 cannot be used")


def _offloads(folder: Path) -> tuple[Offloads, list[ProcessView]]:
    view = ProcessView(1, "server", "interposer", str(folder / "1.kvp"), "running", 1.0, [], None, 0)
    return Offloads(), [view]


def _told(requests: int) -> str:
    event = {"kind": "offload", "t_ns": requests, "server": "s", "source": "cache", "requests": requests}
    return json.dumps(event, separators=(",", ":")) + "\n"


def test_of_a_large_event_file_the_newest_part_is_read_and_then_what_is_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(top, "EVENTS_BYTES", 1000)
    read: list[int] = []
    real = files.read_new

    def read_new(path: Path, since: int, most: int) -> tuple[int, bytes]:
        begin, new = real(path, since, most)
        read.append(len(new))
        return begin, new

    monkeypatch.setattr(files, "read_new", read_new)
    events = tmp_path / "events-1.jsonl"
    events.write_text("".join(_told(n) for n in range(1, 10_000)))
    offloads, views = _offloads(tmp_path)
    assert [one.requests for one in offloads.look(views)] == [9_999]
    with events.open("a") as file:
        file.write(_told(10_000) + _told(10_001)[:20])
    assert [one.requests for one in offloads.look(views)] == [10_000]
    with events.open("a") as file:
        file.write(_told(10_001)[20:])
    assert [one.requests for one in offloads.look(views)] == [10_001]
    assert read == [1000, len(_told(10_000)) + 20, len(_told(10_001))]


def test_a_pipe_that_is_called_like_an_event_file_does_not_stop_the_view(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "events-1.jsonl")
    offloads, views = _offloads(tmp_path)
    assert offloads.look(views) == []


SILENT = "import sys; print('ready', flush=True); sys.stdin.read()"


def test_a_run_without_a_call_is_known(tmp_path: Path) -> None:
    folder = tmp_path / "kvprobe-silent"
    environment = clean_environment(TMPDIR=str(tmp_path))  # other tests record in the common one
    words = [*KVPROBE, "run", "--exec", "-o", str(folder), "--", sys.executable, "-c", SILENT]
    ends = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "env": environment}
    with subprocess.Popen(words, text=True, **ends) as process:
        assert process.stdout and process.stdin and process.stdout.readline() == "ready\n"
        for target in ([str(folder)], []):
            done = subprocess.run(
                _top(*target, "--once", "--interval", "0.1"),
                cwd=tmp_path,
                env=environment,
                capture_output=True,
                text=True,
                check=False,
            )
            assert (done.returncode, done.stdout) == (1, "")
            said = f"{folder.name} is being recorded: 1 process runs, and none has made a CUDA call"
            assert said in done.stderr and "no recorded process" not in done.stderr
        process.stdin.close()
        process.wait()
    wait_for_end(folder)


@pytest.mark.parametrize("options", [["--once", "--interval", "0.1"], ["--once", "--json", "--interval", "0.1"], []])
def test_with_nothing_to_show_it_ends_and_says_so(tmp_path: Path, options: list[str]) -> None:
    environment = clean_environment(TMPDIR=str(tmp_path))
    done = subprocess.run(_top(*options), cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("kvprobe: no recorded process found: start one with `kvprobe run")
