"""The reader of kvprobe's own recordings: exact totals, order of processes, their ends, several nodes."""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import struct
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvprobe.errors import RecordingError
from kvprobe.instrument import event_log
from kvprobe.native.library import Record, RingOptions, core
from kvprobe.probe.ring_layout import FILE
from kvprobe.recordings import kvprobe_run, open_recording, parquet
from kvprobe.recordings.model import CallKind, Direction, Label, Memory, Table
from kvprobe.recordings.run_processes import Process
from kvprobe.reporting.recorded import view
from kvprobe.runfolder.folder import RunFolder


def in_child(work: Callable[[], None]) -> int:
    """Runs it in a process of its own, which has one ring file at a time; returns its pid."""
    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    process.join()
    assert process.exitcode == 0 and process.pid is not None
    return process.pid


def write(path: Path, producer: str, records: list[dict[str, int]], close: bool = True) -> int:
    """Writes a ring file in a process of its own, with the native writer; returns its pid."""

    def work() -> None:
        lib = core()
        assert lib.kvp_ring_open(str(path).encode(), producer.encode(), None) == 0
        for fields in records:
            lib.kvp_ring_write(ctypes.byref(Record(**{"count": 1, **fields})), 1)
        if close:
            lib.kvp_ring_close()
        os._exit(0)

    return in_child(work)


def copy(start_ns: int, **more: int) -> dict[str, int]:
    return {"start_ns": start_ns, "dur_ns": 1000, "stream": 7, "bytes": 64, "call": 1, "direction": 0x21, **more}


def test_columns_say_what_was_written(tmp_path: Path) -> None:
    write(
        tmp_path / "a.kvp",
        "interposer",
        [
            copy(3000),
            copy(1000, stream=9, bytes=100, direction=0x12, result=2),
            {"start_ns": 2000, "dur_ns": 2**64 - 1, "stream": 7, "call": 12},  # counted, not timed
            {"start_ns": 5000, "dur_ns": 50000, "call": 19},
        ],
    )
    r = open_recording(tmp_path / "a.kvp")
    assert r.calls["start_ns"].tolist() == [1000, 3000, 5000]
    assert r.calls["direction"].tolist()[:2] == [Direction.D2H, Direction.H2D]
    assert r.calls["memory"].tolist()[:2] == [Memory.PAGEABLE, Memory.PINNED]
    assert r.calls["result"].tolist() == [2, 0, 0]
    assert [int(r.streams["handle"][i]) for i in r.calls["stream"][:2]] == [9, 7] and r.calls["stream"][2] == -1
    totals = {
        (r.text(int(n)), int(c), int(b))
        for n, c, b in zip(r.totals["name"], r.totals["calls"], r.totals["bytes"], strict=True)
    }
    assert totals == {
        ("cudaMemcpyAsync", 1, 64),
        ("cudaMemcpyAsync", 1, 100),
        ("cudaLaunchKernel", 1, 0),
        ("cudaDeviceSynchronize", 1, 0),
    }
    launches = r.totals["kind"] == CallKind.LAUNCH
    assert r.histograms[launches].sum() == 0 and r.histograms[~launches].sum() == 3
    assert r.totals["errors"].sum() == 1 and r.text(int(r.processes["state"][0])) == "closed"


def test_an_engines_file_beside_the_interposers_is_not_counted_twice(tmp_path: Path) -> None:
    split = [struct.unpack("<Q", struct.pack("<ff", *pair))[0] for pair in ((1.5, 2.0), (3.0, 4.0))]
    transfer = {
        "start_ns": 900,
        "dur_ns": 20_000,
        "call": 64,
        "direction": 1,
        "bytes": 640,
        "count": 10,
        "transfer": 5,
        "src": split[0],
        "dst": split[1],
    }

    def both() -> None:
        lib = core()
        for producer in ("interposer", "engine"):
            assert lib.kvp_ring_open(str(tmp_path / f"{producer}.kvp").encode(), producer.encode(), None) == 0
            for i in range(10):
                lib.kvp_ring_write(ctypes.byref(Record(count=1, **copy(1000 + i))), 1)
            if producer == "engine":
                lib.kvp_ring_write(ctypes.byref(Record(**transfer)), 1)
            lib.kvp_ring_close()
        os._exit(0)

    in_child(both)
    r = open_recording(tmp_path)
    assert r.processes.rows == 1 and r.totals["calls"].sum() == 10 and r.calls.rows == 10
    assert r.transfers.rows == 1 and r.transfers["count"][0] == 10
    row = [int(r.transfers[f"{part}_ns"][0]) for part in ("build", "submit", "wait", "copy", "poll")]
    assert row == [1500, 2000, 3000, 4000, 9500]


@pytest.mark.parametrize("late_ns", [30, 6_001, -6_001])  # one library's clock may run some us beside the other's
def test_copies_that_the_interposers_ring_lost_come_from_the_engines(tmp_path: Path, late_ns: int) -> None:
    def both() -> None:
        lib = core()
        for producer, capacity, late in (("interposer", 16, late_ns), ("engine", 128, 0)):
            options = RingOptions(ring_capacity=capacity)
            path = str(tmp_path / f"{producer}.kvp").encode()
            assert lib.kvp_ring_open(path, producer.encode(), ctypes.byref(options)) == 0
            for i in range(100):
                more = {"transfer": 1 + i // 10} if producer == "engine" else {}
                one = copy(10_000_000 + 2000 * i + late, src=4096 * (i % 7), **more)
                one["dur_ns"] -= min(max(late, 0), 500)
                lib.kvp_ring_write(ctypes.byref(Record(count=1, **one)), 1)
            if producer == "interposer":  # what the engine did not submit
                lib.kvp_ring_write(ctypes.byref(Record(count=1, **copy(20_000_000, src=5))), 1)
            lib.kvp_ring_close()
        os._exit(0)

    in_child(both)
    r = open_recording(tmp_path)
    assert r.totals["calls"].sum() == 101 and r.lost == {}
    found = dict(zip(r.calls["start_ns"].tolist(), r.calls["transfer"].tolist(), strict=True))
    assert sorted(found.values()) == [-1, *(1 + i // 10 for i in range(100))]
    assert all(found[10_000_000 + 2000 * i + late_ns] == 1 + i // 10 for i in range(85, 100))
    late = [10_000_000 + 2000 * i + (late_ns if i >= 85 else 0) for i in range(100)]  # each file's own times
    assert r.calls["start_ns"].tolist() == [*sorted(late), 20_000_000]


def test_a_thread_that_lost_its_core_between_the_two_records_made_one_copy(tmp_path: Path) -> None:
    def both() -> None:
        lib = core()
        for producer, late, more in (("interposer", 50_000, {}), ("engine", 0, {"transfer": 3})):
            assert lib.kvp_ring_open(str(tmp_path / f"{producer}.kvp").encode(), producer.encode(), None) == 0
            one = copy(10_000_000 + late, **more) | {"dur_ns": 60_000 - late}
            lib.kvp_ring_write(ctypes.byref(Record(count=1, **one)), 1)
            lib.kvp_ring_close()
        os._exit(0)

    in_child(both)
    r = open_recording(tmp_path)
    assert r.calls["start_ns"].tolist() == [10_050_000] and r.calls["transfer"].tolist() == [3]


def test_a_transfer_that_was_picked_from_sixteen_counts_for_sixteen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVPROBE_RUN", str(tmp_path))

    def work() -> None:
        lib = core()
        assert lib.kvp_ring_open(str(tmp_path / "a.kvp").encode(), b"interposer", None) == 0
        now = time.monotonic_ns()
        for i in range(6):
            picked = {"one_in": 16} if i >= 2 else {}
            event_log.emit(
                "transfer",
                t_ns=now + 1000 * i,
                begin_ns=now + 1000 * i - 700,
                id=i,
                direction="load",
                copies=10,
                bytes=640,
                build_ns=100,
                submit_ns=200,
                queue_ns=300,
                copy_ns=400,
                poll_ns=50,
                **picked,
            )
        event_log.flush()
        lib.kvp_ring_close()
        os._exit(0)

    in_child(work)
    r = open_recording(tmp_path)
    assert r.transfers["one_in"].tolist() == [1, 1, 16, 16, 16, 16]
    assert (r.transfers["end_ns"] - r.transfers["start_ns"]).tolist() == [700] * 6
    assert any("4 of about 64 transfers, one in 16" in note and "estimates" in note for note in r.notes)
    page = view(r, None)
    (split,) = (chart for section in page.sections for chart in section.charts if chart.id == "split")
    (row,) = split.spec["rows"]
    assert row["label"] == "loads (CPU to GPU), about 66"
    assert row["values"] == [66 * 100, 66 * 200, 66 * 300, 66 * 400, 66 * 50]
    assert "Estimated" in split.how and "one transfer in 16" in split.how
    parquet.write(r, tmp_path / "out")
    assert open_recording(tmp_path / "out").transfers["one_in"].tolist() == [1, 1, 16, 16, 16, 16]
    columns = {name: column for name, column in r.transfers.items() if name != "one_in"}
    assert Table("transfers", columns)["one_in"].tolist() == [1] * 6  # a recording of an earlier version


def test_processes_are_sorted_by_rank_and_their_ends_named(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps({"command": ["x"], "host": os.uname().nodename}))
    ends = []
    for rank, close in ((2, True), (0, False), (1, False)):
        pid = write(tmp_path / f"r{rank}.kvp", "interposer", [copy(1000)], close)
        ends.append({"pid": pid, "t_ns": 1, "status": {2: 0, 0: -9, 1: 3}[rank]})
        (tmp_path / f"checkin-{pid}-1.json").write_text(
            json.dumps({"pid": pid, "t_ns": 1, "argv": ["python", "-m", "app"], "rank": {"RANK": str(rank)}})
        )
    lines = [json.dumps(line) for line in ends]
    (tmp_path / "processes.jsonl").write_text("\n".join([*lines, '{"pid": 1, "cut']))  # the observer was killed
    r = open_recording(tmp_path)
    assert r.processes["rank"].tolist() == [0, 1, 2]
    assert [r.text(int(i)) for i in r.processes["state"]] == ["killed by SIGKILL", "exit code 3", "closed"]
    assert any("SIGKILL" in note for note in r.notes) and any("not over" in note for note in r.notes)


@pytest.mark.parametrize("name", ["RANK", "VLLM_DP_RANK", "LOCAL_RANK"])
def test_the_rank_is_known_without_the_start_up_hook(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for rank in (1, 0):
        monkeypatch.setenv(name, str(rank))
        write(tmp_path / f"r{rank}.kvp", "interposer", [copy(1000)], True)
    assert open_recording(tmp_path).processes["rank"].tolist() == [0, 1]


def test_the_launch_queue_that_a_process_calibrated_is_a_fact_of_the_machine(tmp_path: Path) -> None:
    def calibrated(pid: int, depth: int, ended_ns: int, how: str = "calibrated") -> None:
        said = {"start_ns": ended_ns - 100, "end_ns": ended_ns, "depth": depth, "channels": 4, "how": how}
        (tmp_path / f"queue-{pid}.json").write_text(json.dumps(said))

    one, other = (write(tmp_path / f"{name}.kvp", "interposer", [copy(1000)]) for name in "ab")
    later = time.monotonic_ns()
    calibrated(one, 1021, later)
    calibrated(other, 64, 5)  # before this program began: another one with the same pid
    r = open_recording(tmp_path)
    assert (r.machine["queue_depth"], r.machine["channels"]) == (1021, 4)
    assert f"counted in process {one}" in r.machine_how["queue_depth"]
    assert (r.labels["start_ns"].tolist(), r.labels["end_ns"].tolist()) == ([later - 100], [later])
    assert r.labels["label"].tolist() == [Label.INSTRUMENTATION]
    assert r.processes["pid"][r.labels["process"][0]] == one
    calibrated(other, 1021, later, "cached")
    r = open_recording(tmp_path)
    assert r.machine["queue_depth"] == 1021 and r.labels.rows == 1
    calibrated(other, 4093, later)
    r = open_recording(tmp_path)
    assert "queue_depth" not in r.machine and r.machine["channels"] == 4
    assert any("differ in queue_depth" in note and "4093" in note for note in r.notes)


def test_nodes_meet_in_unix_time(tmp_path: Path) -> None:
    for node, ahead in (("a", 0), ("b", 10**15)):
        folder = tmp_path / node
        folder.mkdir()
        (folder / "run.json").write_text(json.dumps({"command": ["x"], "host": node}))
        (folder / "end.json").write_text(json.dumps({"status": 0, "warnings": []}))
        write(folder / "p.kvp", "interposer", [copy(5 * 10**15 + ahead)])
        data = bytearray((folder / "p.kvp").read_bytes())
        monotonic, realtime = struct.unpack_from("<QQ", data, 80)
        struct.pack_into("<QQ", data, 80, 10**14 + ahead, 10**18)  # that machine was started earlier
        (folder / "p.kvp").write_bytes(data)
        assert monotonic and realtime
    r = open_recording([tmp_path / "a", tmp_path / "b"])
    assert r.calls["start_ns"].tolist() == [5 * 10**15] * 2
    assert [r.text(int(i)) for i in r.processes["node"]] == ["a", "b"]
    assert r.machine["unix_offset_ns"] == 10**18 - 10**14


def test_a_damaged_file_is_named_and_the_rest_is_read(tmp_path: Path) -> None:
    write(tmp_path / "good.kvp", "interposer", [copy(1000)] * 3)
    (tmp_path / "bad.kvp").write_bytes(b"\0" * 8192)
    r = open_recording(tmp_path)
    assert r.calls.rows == 3 and any("bad.kvp" in note for note in r.notes)
    with pytest.raises(RecordingError, match=r"bad\.kvp"):
        open_recording(tmp_path / "bad.kvp")


def test_every_truncation_of_a_file_is_read_or_refused(tmp_path: Path) -> None:
    write(tmp_path / "a.kvp", "interposer", [copy(1000 + i) for i in range(100)])
    data = (tmp_path / "a.kvp").read_bytes()
    chance = np.random.default_rng(5)
    for i in range(200):
        cut = bytearray(data[: int(chance.integers(0, 200_000))])
        for _ in range(i % 8):
            if cut:
                cut[int(chance.integers(0, min(len(cut), 5000)))] = int(chance.integers(0, 256))
        (tmp_path / "b.kvp").write_bytes(cut)
        try:
            recording = open_recording(tmp_path / "b.kvp")
        except RecordingError:
            continue
        assert recording.calls.rows <= 20480 * 256


@pytest.mark.parametrize(
    "environment, scale, channels",
    [
        ({"CUDA_SCALE_LAUNCH_QUEUES": "4x", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}, 4.0, 1),
        ({"CUDA_DEVICE_MAX_CONNECTIONS": "8", "CUDA_DEVICE_MAX_COPY_CONNECTIONS": "32"}, None, 32),
        ({"CUDA_SCALE_LAUNCH_QUEUES": "3x", "CUDA_DEVICE_MAX_CONNECTIONS": "64"}, None, None),  # as the driver: ignored
        ({}, None, None),
    ],
)
def test_what_the_environment_says_of_launch_queues_is_a_fact(tmp_path: Path, environment, scale, channels) -> None:
    (tmp_path / "run.json").write_text(json.dumps({"command": ["x"], "environment": environment}))
    write(tmp_path / "ring-1.kvp", "interposer", [copy(1_000)])
    machine = open_recording(tmp_path).machine
    assert (machine.get("queue_scale"), machine.get("channels")) == (scale, channels)


def test_calls_that_no_section_could_take_belong_to_their_process(tmp_path: Path) -> None:
    for number, name in enumerate("abc"):
        write(tmp_path / f"{name}.kvp", "interposer", [copy(1000 * (1 + number))])
    raw = bytearray((tmp_path / "c.kvp").read_bytes())
    header = np.frombuffer(raw, FILE, 1)[0]
    header["over_count"][1], header["over_bytes"][1], header["over_dur_ns"][1] = 3, 192, 5000
    (tmp_path / "c.kvp").write_bytes(raw)
    r = open_recording([tmp_path / f"{name}.kvp" for name in "abc"])
    third = int(r.calls["process"][r.calls["start_ns"] == 3000][0])
    (row,) = np.flatnonzero(r.totals["calls"] == 3)
    columns = ("process", "thread", "stream", "copies", "bytes", "dur_ns", "max_ns", "errors")
    assert [int(r.totals[column][row]) for column in columns] == [third, -1, -1, 3, 192, 5000, 0, 0]
    assert r.text(int(r.totals["name"][row])) == "cudaMemcpyAsync" and r.totals["kind"][row] == CallKind.COPY


@pytest.mark.parametrize(
    ("named", "command"),
    [("ray::Worker busy", "ray::Worker busy"), ("python a.py b", "python a.py"), ("", "python a.py")],
)
def test_a_process_that_named_itself_has_that_name(tmp_path: Path, named: str, command: str) -> None:
    process = Process(1, RunFolder(tmp_path), checkin={"argv": ["python", "a.py"]}, named=named)
    assert kvprobe_run._command(process) == command
