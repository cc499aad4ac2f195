"""Steps and requests in a recording: by marks of a program, by its datagrams, and by NVTX ranges."""

from __future__ import annotations

import json
import os
import socket
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import kvprobe
from kvprobe.errors import UsageError
from kvprobe.instrument import event_log, step_log
from kvprobe.instrument.step_socket import LARGEST, MOST_PROCESSES, NAME, StepSocket
from kvprobe.recordings import open_recording
from kvprobe.recordings.merge import merge
from kvprobe.recordings.model import Phase, RangeStyle, Recording, RequestTime, Source, Table
from kvprobe.recordings.parquet import read as read_parquet
from kvprobe.recordings.parquet import write as write_parquet
from kvprobe.recordings.steps import with_steps_of_ranges
from kvprobe.recordings.vocabulary import Names
from kvprobe.runfolder.folder import RunFolder
from kvprobe.runfolder.step_lines import StepLines, limit_of


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A run folder that this process records into."""
    run = tmp_path / "run"
    run.mkdir(mode=0o700)
    RunFolder(run).write_run({"pid": os.getpid(), "command": ["server"]})
    monkeypatch.setenv("KVPROBE_RUN", str(run))
    monkeypatch.delenv("KVPROBE", raising=False)
    yield run
    event_log.flush()


def held(recording: Recording) -> list[tuple[int, str, dict[str, int]]]:
    """Number, phase, and tokens by request of each step."""
    steps, of = recording.steps, recording.step_requests
    out = []
    for number, phase, one, process in zip(
        *(steps[name].tolist() for name in ("step", "phase", "id", "process")), strict=True
    ):
        mine = np.flatnonzero((of["id"] == one) & (of["process"] == process))
        named = {recording.text(int(of["request"][i])): int(of["tokens"][i]) for i in mine}
        out.append((number, Phase(phase).name.lower(), named))
    return out


def test_a_program_marks_its_steps(folder):
    kvprobe.mark_request("a", "arrived", 1_000)
    with kvprobe.mark(step=1, requests=["a"], phase="prefill", begin_ns=time.monotonic_ns()):
        pass
    mixed = kvprobe.mark(step=2, requests=["a", "b"], phase="mixed", tokens=[1, 0], computed=[1, 512])
    mixed.end()
    mixed.end()  # once is enough
    with kvprobe.mark(requests=[7], phase="thinking"):
        pass
    kvprobe.mark_request("a", "ended")
    kvprobe.mark_request("a", "sneezed")
    event_log.flush()
    recording = open_recording(folder)
    assert held(recording) == [
        (1, "prefill", {"a": 1}),
        (2, "mixed", {"a": 1, "b": 0}),
        (-1, "unknown", {"7": 1}),
    ]
    assert recording.step_requests["computed"].tolist() == [-1, 1, 512, -1]
    times = recording.request_times
    assert [RequestTime(one).name for one in times["what"].tolist()] == ["ARRIVED", "ENDED"]
    assert recording.processes["pid"].tolist() == [os.getpid()]
    assert recording.steps["thread"].tolist() == [recording.steps["thread"][0]] * 3


def test_where_nothing_records_a_mark_is_one_object_and_writes_nothing(monkeypatch):
    monkeypatch.delenv("KVPROBE_RUN", raising=False)
    assert kvprobe.mark(step=1) is kvprobe.mark(step=2)
    with kvprobe.mark(step=1, requests=["a"]) as one:
        one.end(tokens=3)
    monkeypatch.setenv("KVPROBE_RUN", "/nowhere")
    monkeypatch.setenv("KVPROBE", "off")
    assert kvprobe.mark(step=1) is one


def test_a_run_folder_that_cannot_be_written_costs_the_program_nothing(monkeypatch):
    monkeypatch.setenv("KVPROBE_RUN", "/proc/nowhere")
    with kvprobe.mark(step=1, requests=["a"]):
        pass
    event_log.flush()
    assert step_log._lines is not None and step_log._lines.dead


def test_the_newest_steps_are_kept_and_each_file_names_its_requests(tmp_path):
    lines = StepLines(tmp_path, "steps-5", 20_000)
    for step in range(1, 1001):
        lines.step((step * 10, step * 10 + 9), step, "decode", ["first", f"of step {step}"], 1)
    assert {path.name for path in tmp_path.iterdir()} == {"steps-5.jsonl", "steps-5-before.jsonl"}
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 41_000
    steps = held(open_recording(_run_folder(tmp_path)))
    assert steps[-1] == (1000, "decode", {"first": 1, "of step 1000": 1})
    numbers = [number for number, _, _ in steps]
    assert numbers == list(range(numbers[0], 1001)) and len(numbers) > 100
    assert all(named == {"first": 1, f"of step {number}": 1} for number, _, named in steps)


def _run_folder(path: Path) -> Path:
    RunFolder(path).write_run({"pid": 5, "command": ["server"]})
    return path


def send(folder: Path, *datagrams: bytes) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as out:
        out.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        at = os.open(folder, os.O_RDONLY)
        for one in datagrams:
            out.sendto(one, f"/proc/self/fd/{at}/{NAME}")
        os.close(at)


def test_another_program_tells_its_steps_by_datagrams(tmp_path):
    deep = tmp_path / ("long" * 30)  # an address of a socket holds 107 bytes
    deep.mkdir(mode=0o700)
    now = time.monotonic_ns()
    with StepSocket(deep, limit_of(False, 0)) as told:
        assert stat.S_IMODE((deep / NAME).stat().st_mode) == 0o600
        step = {
            "step": 9,
            "begin_ns": now,
            "end_ns": now + 50,
            "phase": "decode",
            "requests": ["a", 5],
            "tokens": [1, 2],
        }
        send(
            deep,
            json.dumps(step).encode(),
            json.dumps({"request": "a", "arrived_ns": now, "ended_ns": now + 60}).encode(),
        )
    assert not told.said() and not (deep / NAME).exists()
    recording = open_recording(_run_folder(deep))
    assert held(recording) == [(9, "decode", {"a": 1, "5": 2})]
    assert recording.steps["start_ns"].tolist() == [now] and recording.steps["end_ns"].tolist() == [now + 50]
    assert recording.request_times["time_ns"].tolist() == [now, now + 60]
    assert recording.processes["pid"].tolist() == [os.getpid()]


@pytest.mark.parametrize(
    ("datagram", "why"),
    [
        (b"", "no such JSON"),
        (b"\xff\xfe", "no such JSON"),
        (b"[" * 60_000, "no such JSON"),
        (b'{"step": "seven"}', "no such JSON"),
        (b'{"step": 7, "requests": [{}]}', "no such JSON"),
        (b'{"step": 7, "requests": ["' + b"a" * 300 + b'"]}', "no such JSON"),
        (b'{"step": 99999999999999999999999}', "no such JSON"),
        (b'{"step": 7, "tokens": -1}', "no such JSON"),
        (b"{}", "neither a step nor a request"),
        (b'{"step": 7, "requests": [' + b"1," * LARGEST + b"1]}", "too large"),
    ],
)
def test_what_is_no_step_is_refused_and_said(tmp_path, datagram, why):
    with StepSocket(tmp_path, limit_of(False, 0)) as told:
        send(tmp_path, datagram, b'{"step": 1}')
    assert told.refused == {why: 1} and why in told.said()[0]
    assert [number for number, _, _ in held(open_recording(_run_folder(tmp_path)))] == [1]


def test_more_processes_than_any_server_has_are_refused(tmp_path):
    told = StepSocket(tmp_path, limit_of(False, 0))
    for pid in range(1, MOST_PROCESSES + 3):
        told._take(pid, b'{"step": 1}')
    assert told.refused == {f"of more than {MOST_PROCESSES} processes": 2}
    assert len(list(tmp_path.glob("told-*.jsonl"))) == MOST_PROCESSES


@pytest.mark.skipif(os.geteuid() != 0, reason="needs to become another user")
def test_what_another_user_sends_is_refused(tmp_path):
    with StepSocket(tmp_path, limit_of(False, 0)) as told:
        tmp_path.chmod(0o755)
        (tmp_path / NAME).chmod(0o777)  # as nobody would
        code = "import os, socket, sys; at = os.open(sys.argv[1], os.O_RDONLY); os.setuid(65534);" + (
            f"socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).sendto(b'{{}}', f'/proc/self/fd/{{at}}/{NAME}')"
        )
        subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)
    assert told.refused == {"of another user": 1}


@pytest.mark.parametrize(
    "line",
    [
        {"kind": "step", "requests": [0, 1, 2**70]},
        {"kind": "step", "requests": "all"},
        {"kind": "step", "tokens": [-1]},
        {"kind": "steps", "requests": [0], "each": [[1, 2]]},
        {"kind": "steps", "requests": [0], "each": [[1, 2**70, 3]]},
        {"kind": "request", "n": 0, "request": "a" * 1000},
        {"kind": "arrived", "n": "x"},
        "no object",
    ],
)
def test_a_line_that_is_none_is_left_out_and_said(tmp_path, line):
    lines = StepLines(tmp_path, "steps-5", 1 << 20)
    lines.step((10, 20), 1, "decode", ["a"], 1)
    with (tmp_path / "steps-5.jsonl").open("a") as file:
        file.write(json.dumps({"t_ns": 30, **line} if isinstance(line, dict) else line) + "\n")
    lines.step((30, 40), 2, "decode", ["a"], 1)
    recording = open_recording(_run_folder(tmp_path))
    assert [number for number, _, _ in held(recording)] == [1, 2]
    assert any("steps-5.jsonl, line 3" in note for note in recording.notes)


def test_lists_that_do_not_fit_their_requests_are_filled_up(tmp_path):
    lines = StepLines(tmp_path, "steps-5", 1 << 20)
    lines.step((10, 20), 1, "decode", ["a", "b"], [3], [1, 2, 3])
    (tmp_path / "steps-5.jsonl").open("a").write('{"t_ns":30,"kind":"step","requests":[0,99]}\n')
    recording = open_recording(_run_folder(tmp_path))
    assert held(recording) == [(1, "decode", {"a": 3, "b": 0}), (-1, "unknown", {"a": 1})]
    assert any("by a number that its file does not explain" in note for note in recording.notes)


def test_what_is_the_same_for_every_request_is_written_once(tmp_path):
    lines = StepLines(tmp_path, "steps-5", 1 << 20)
    for step in range(3):
        lines.step((10 * step, 10 * step + 9), step, "decode", ["a", "b"], [1, 1], [7, 7])
    lines.step((40, 49), 3, "mixed", ["a", "b"], [1, 2], [7, 8])
    lines.time("a", "ended", 49)
    lines.step((50, 59), 4, "decode", ["a", "b"], 1, 1)  # another request of that name
    written = [json.loads(line) for line in (tmp_path / "steps-5.jsonl").read_text().splitlines()]
    steps = [line for line in written if line["kind"] == "step"]
    assert [(one["tokens"], one["computed"], one["requests"]) for one in steps] == [
        *[(1, 7, [0, 1])] * 3,
        ([1, 2], [7, 8], [0, 1]),
        (1, 1, [2, 1]),
    ]
    recording = open_recording(_run_folder(tmp_path))
    assert held(recording)[0] == (0, "decode", {"a": 1, "b": 1})
    assert held(recording)[3] == (3, "mixed", {"a": 1, "b": 2})
    assert recording.step_requests["computed"].tolist() == [7, 7, 7, 7, 7, 7, 7, 8, 1, 1]
    assert not any("steps-5" in note for note in recording.notes)


def test_steps_alike_are_one_line_and_read_as_each_of_them(tmp_path):
    """Also where they are more than a line takes, and where a file has grown full between."""
    apart, together = tmp_path / "apart", tmp_path / "together"
    for folder in (apart, together):
        folder.mkdir()
    each = [(10 * step, 10 * step + 9, step) for step in range(1, 2500)]
    lines = StepLines(apart, "steps-5", 1 << 20)
    for begin, end, step in each:
        lines.step((begin, end), step, "decode", ["a", "b"], 1, [7, 8], ("vllm", 3))
    lines = StepLines(together, "steps-5", 40_000)
    for at in (0, 1200, 1201):
        lines.alike(each[at : {0: 1200, 1200: 1201}.get(at)], "decode", ["a", "b"], 1, [7, 8], ("vllm", 3))
    assert (together / "steps-5-before.jsonl").exists()
    one, other = (open_recording(_run_folder(folder)) for folder in (apart, together))
    assert held(one) == held(other) and len(held(one)) == 2499
    for table in ("steps", "step_requests"):
        for name, column in one.tables[table].columns.items():
            assert column.tolist() == other.tables[table][name].tolist(), (table, name)
    assert other.notes == one.notes


def test_steps_alike_are_all_told_once_while_they_are_written(folder):
    """By a server's thread that leaves them while kvprobe's own looks again and again."""
    alike = step_log.AlikeSteps("decode", ["a", "b"], 1, 1, "server")
    done = threading.Event()

    def serve():
        for step in range(20_000):
            alike.add(10 * step, 10 * step + 9, step)
        done.set()

    serving = threading.Thread(target=serve)
    serving.start()
    while not done.is_set():
        event_log.flush()
    serving.join()
    event_log.flush()
    recording = open_recording(folder)
    assert sorted(recording.steps["step"].tolist()) == list(range(20_000))


def with_ranges(*ranges: tuple[int, int, str]) -> Recording:
    names = Names()
    recording = Recording([Source("one", "nsys-sqlite")])
    recording.tables["ranges"] = Table(
        "ranges",
        {
            "start_ns": np.array([start for start, _, _ in ranges]),
            "end_ns": np.array([end for _, end, _ in ranges]),
            "process": np.zeros(len(ranges)),
            "thread": np.full(len(ranges), 7),
            "name": names.map([name for _, _, name in ranges]),
            "style": np.full(len(ranges), RangeStyle.PUSH_POP),
        },
    )
    recording.tables["processes"] = Table("processes", {"pid": np.array([1])})
    recording.names = names.list
    return recording


def test_ranges_of_a_declared_pattern_are_steps():
    recording = with_ranges(
        (0, 90, "req a"), (10, 20, "step 1 prefill: a"), (20, 30, "step 2 decode: a, b"), (20, 25, "x")
    )
    pattern = r"step (?P<step>\d+) (?P<phase>\w+): (?P<request>.*)|req (?P<own>\w+)"
    with_steps_of_ranges(recording, pattern)
    assert held(recording) == [(1, "prefill", {"a": 1}), (2, "decode", {"a": 1, "b": 1})]
    recording = with_ranges((0, 90, "req a"), (10, 20, "step 1 prefill: a"))
    with_steps_of_ranges(recording, r"req (?P<request>\w+)")
    assert recording.request_times["time_ns"].tolist() == [0, 90] and not recording.steps.rows


def test_the_ranges_of_marks_need_no_pattern():
    recording = with_steps_of_ranges(
        with_ranges((10, 20, "kvprobe step 3 decode [a,b]"), (20, 30, "kvprobe step -1 unknown []"))
    )
    assert held(recording) == [(3, "decode", {"a": 1, "b": 1}), (-1, "unknown", {})]


@pytest.mark.parametrize("pattern", ["(", r"step \d+", "(?P<phase>x)"])
def test_a_pattern_that_says_nothing_is_refused(pattern):
    with pytest.raises(UsageError, match="--steps"):
        with_steps_of_ranges(with_ranges((0, 1, "x")), pattern)


def test_a_pattern_that_fits_no_range_is_said():
    recording = with_steps_of_ranges(with_ranges((0, 1, "x")), r"step (?P<step>\d+)")
    assert any("none of 1 different ranges is of this pattern" in note for note in recording.notes)


def test_steps_survive_an_export_and_a_merge(tmp_path):
    one = with_steps_of_ranges(with_ranges((10, 20, "kvprobe step 3 decode [a,b]")))
    write_parquet(one, tmp_path / "out")
    assert held(read_parquet(tmp_path / "out")) == held(one)
    two = with_steps_of_ranges(with_ranges((15, 30, "kvprobe step 4 prefill [c]")))
    both = merge([one, two])
    assert held(both) == [(3, "decode", {"a": 1, "b": 1}), (4, "prefill", {"c": 1})]
    assert both.steps["process"].tolist() == [0, 1]


TELLS = """
import os, socket, time, kvprobe
with kvprobe.mark(step=1, requests=["a"], phase="prefill"):
    time.sleep(0.01)
out = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
os.chdir(os.environ["KVPROBE_RUN"])
while not os.path.exists("steps.sock"):
    time.sleep(0.01)
out.sendto(b'{"step": 2, "phase": "decode", "requests": ["a"]}', "steps.sock")
out.sendto(b'{"step": "two"}', "steps.sock")
"""


def test_both_ways_work_under_run(tmp_path):
    command = [sys.executable, "-m", "kvprobe", "run", "-o", str(tmp_path / "run"), "--", sys.executable, "-c", TELLS]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    recording = open_recording(tmp_path / "run")
    assert sorted(held(recording)) == [(1, "prefill", {"a": 1}), (2, "decode", {"a": 1})]
    assert any("1 no such JSON" in note for note in recording.notes)


def test_lines_that_wait_are_written_together_and_say_the_same(tmp_path):
    """Also across a file that has grown full, and what is left when it is closed."""
    written = []
    for name, held_bytes in (("at-once", 0), ("held", 2000)):
        lines = StepLines(tmp_path, f"steps-{name}", 9_000, held_bytes)
        for step in range(200):
            lines.step((10 * step, 10 * step + 9), step, "decode", ["a", f"of {step}"], [1, 2], 1, ("s", 7))
            lines.time(f"of {step}", "ended", 10 * step + 9)
            if step == 0:
                assert (tmp_path / f"steps-{name}.jsonl").exists() == (not held_bytes)
        lines.close()
        files = [tmp_path / f"steps-{name}{part}.jsonl" for part in ("-before", "")]
        written.append([json.loads(line) for path in files for line in path.read_text().splitlines()])
    steps = [[line["step"] for line in of if line["kind"] == "step"] for of in written]
    assert steps[0][-1] == steps[1][-1] == 199
    for of in steps:
        assert of == list(range(of[0], 200)) and len(of) > 20
    assert written[0][-2:] == written[1][-2:]
