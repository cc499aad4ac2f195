"""What adapters write survives forks and kills, and reads back as it was written."""

import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from kvprobe.instrument import event_log


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("KVPROBE_RUN", str(tmp_path))
    monkeypatch.setattr(event_log, "_file", event_log._File())
    return tmp_path


def test_events_read_back_as_written(folder):
    event_log.emit("state", adapter="a", state="applied")
    event_log.emit("transfer", id=7, bytes=1 << 40, direction="load")
    event_log.flush()
    events = event_log.read_events(folder / f"events-{os.getpid()}.jsonl")
    assert [e["kind"] for e in events] == ["process", "state", "transfer"]
    assert events[0]["pid"] == os.getpid()
    assert (events[2]["id"], events[2]["bytes"]) == (7, 1 << 40)
    assert events[1]["t_ns"] <= events[2]["t_ns"] <= time.monotonic_ns()


def test_states_and_decisions_are_on_disk_at_once(folder):
    for kind in ("state", "decision"):
        event_log.emit(kind, what="x")
        assert event_log.read_events(folder / f"events-{os.getpid()}.jsonl")[-1]["kind"] == kind


def test_no_run_folder_no_file(tmp_path, monkeypatch):
    monkeypatch.delenv("KVPROBE_RUN", raising=False)
    monkeypatch.chdir(tmp_path)
    event_log.emit("transfer", id=1)
    event_log.flush()
    assert list(tmp_path.iterdir()) == []
    assert not event_log.wanted()


def test_a_folder_that_cannot_be_written_is_no_obstacle(monkeypatch, tmp_path, caplog):
    monkeypatch.setattr(event_log, "_file", event_log._File())
    monkeypatch.setenv("KVPROBE_RUN", str(tmp_path / "absent"))
    for i in range(3):
        event_log.emit("decision", i=i)
    assert sum("cannot write" in r.message for r in caplog.records) == 1


def test_a_line_that_was_cut_is_left_out(tmp_path):
    path = tmp_path / "events-1.jsonl"
    whole = {"t_ns": 1, "kind": "decision", "what": "switch"}
    path.write_bytes(json.dumps(whole).encode() + b"\n[1]\n\xff\n{}\n" + b'{"t_ns": 2, "kind": "tra')
    assert event_log.read_events(path) == [whole]


def test_a_listener_sees_events_only_while_subscribed():
    with event_log.subscribed() as events:
        event_log.emit("call", call="f")
    event_log.emit("call", call="g")
    assert [e["call"] for e in events] == ["f"]


def test_a_failing_listener_does_not_reach_the_caller():
    def broken(event):
        raise RuntimeError

    stop = event_log.listening(broken)
    try:
        event_log.emit("call", call="f")
    finally:
        stop()


def test_a_flush_waits_for_what_another_thread_is_making(folder):
    begun, go, found = threading.Event(), threading.Event(), []

    def slow():
        begun.set()
        assert go.wait(60)
        event_log.emit("transfer", id=1)

    def flush():
        event_log.flush()
        found.extend(event_log.read_events(folder / f"events-{os.getpid()}.jsonl"))

    event_log.later(slow)
    assert begun.wait(60)  # on the writer's own thread
    flushing = threading.Thread(target=flush)
    flushing.start()
    flushing.join(0.2)
    assert not found
    go.set()
    flushing.join(60)
    assert [event.get("id") for event in found] == [None, 1]


@pytest.mark.parametrize("held", ["event_log._file.lock", "step_log._lock"])
def test_a_signal_handler_may_flush_while_its_thread_writes(tmp_path, held):
    """A server that flushes as it ends must not wait for itself. The alarm ends a process that does."""
    program = f"""
import os, signal
from kvprobe.instrument import event_log, step_log
signal.signal(signal.SIGTERM, lambda *_: event_log.flush())
signal.alarm(60)
step_log.told((1, 2), 7, "decode", ["r"])
with {held}:
    os.kill(os.getpid(), signal.SIGTERM)
"""
    env = {**os.environ, "KVPROBE_RUN": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    (steps,) = tmp_path.glob("steps-*.jsonl")
    assert '"step":7' in steps.read_text()


def test_the_writer_is_woken_again_after_nothing_came_for_a_while(folder, monkeypatch):
    monkeypatch.setattr(event_log, "_FLUSH_SECONDS", 0.001)
    for number in range(3):
        done = threading.Event()
        event_log.later(done.set)
        assert done.wait(60), number
        while event_log._file.awake:
            time.sleep(0.001)


CHILD = """
import os, sys, time
from kvprobe.instrument import event_log
event_log.emit("transfer", id=0)
pid = os.fork()
event_log.emit("transfer", id=1 if pid else 2)
if pid == 0:
    event_log.flush(); os._exit(0)
os.waitpid(pid, 0)
print(pid, flush=True)
time.sleep(60)
"""


def test_each_side_of_a_fork_writes_its_own_file_and_a_kill_loses_little(tmp_path):
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "KVPROBE_RUN": str(tmp_path)},
    )
    forked = int(child.stdout.readline())
    path = tmp_path / f"events-{child.pid}.jsonl"
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and len(event_log.read_events(path) if path.exists() else []) < 3:
        time.sleep(0.02)  # the flusher's own period is 250 ms
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    parent = event_log.read_events(path)
    assert [e.get("id") for e in parent if e["kind"] == "transfer"] == [0, 1]
    forked_events = event_log.read_events(tmp_path / f"events-{forked}.jsonl")
    assert [e.get("id") for e in forked_events if e["kind"] == "transfer"] == [2]
    assert forked_events[0]["pid"] == forked


@pytest.mark.parametrize("detail", ["totals", "copies"])
def test_a_run_that_keeps_totals_has_a_file_that_does_not_grow(folder, monkeypatch, detail):
    monkeypatch.setenv("KVPROBE_DETAIL", detail)
    monkeypatch.setattr(event_log, "_TOTALS_BYTES", 4000)
    for number in range(10):
        for _ in range(100):
            event_log.emit("transfer", id=number, bytes=1, direction="load")
        event_log.flush()
    event_log.emit("decision", what="switch")
    events = event_log.read_events(folder / f"events-{os.getpid()}.jsonl")
    assert events[-1]["what"] == "switch", "decisions are written all the same"
    assert sum(event["kind"] == "transfer" for event in events) == (100 if detail == "totals" else 1000)
    assert sum("metrics continue" in event.get("why", "") for event in events) == (detail == "totals")
