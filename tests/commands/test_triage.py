"""`kvprobe triage`: a line a recording, worst first, without numpy for PyTorch traces."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvprobe.commands.triage import _cells
from kvprobe.durations import time_text
from kvprobe.recordings.trace_library import native_library

CALL = (
    '{"ph":"X","cat":"cuda_runtime","name":"cudaMemcpyAsync","pid":1,"tid":1,"ts":%d,"dur":%d,'
    '"args":{"correlation":%d}}'
)
COPY = (
    '{"ph":"X","cat":"gpu_memcpy","name":"Memcpy HtoD (Pinned -> Device)","pid":0,"tid":7,"ts":%d,"dur":300,'
    '"args":{"correlation":%d,"stream":%d,"device":0}}'
)


def trace(path: Path, cap: int = 1 << 30, calls: int = 400, stream: int = 7) -> Path:
    """Copies of 300 us from 100 us on; the call behind `cap` of them waits for the oldest."""
    now, events = 0, []
    for i in range(calls):
        room = 100 + (i - cap + 1) * 300 + 3
        end = max(now + 2, room)
        events += [CALL % (now, end - now, i), COPY % (100 + i * 300, i, stream)]
        now = end + 1
    path.write_text('{"traceEvents":[' + ",\n".join(events) + "]}")
    return path


def test_worst_first_with_time_depth_stream_and_file(kvprobe, tmp_path: Path) -> None:
    trace(tmp_path / "a_healthy.json", calls=50)
    trace(tmp_path / "b_some.json", cap=200, stream=9)
    trace(tmp_path / "c_more.json", cap=100)
    code, out, err = kvprobe("triage", tmp_path)
    assert (code, err) == (0, "")
    lines = [line.split("  ") for line in out.splitlines()]
    head, *lines = [[cell.strip() for cell in line if cell.strip()] for line in lines]
    assert head == ["launch queue", "time lost", "full at", "stream", "recording"]
    assert [Path(line[-1]).name for line in lines] == ["c_more.json", "b_some.json", "a_healthy.json"]
    assert [line[0] for line in lines] == ["full", "full", "not full"]
    assert [line[2] for line in lines] == ["100", "200", "-"]
    assert [line[3] for line in lines] == ["stream 7", "stream 9", "-"]
    # 300 calls wait for a copy of 300 us each, 200 in the other
    lost = [float(line[1].removesuffix(" ms")) for line in lines[:2]]
    assert lost == pytest.approx([90, 60], rel=0.02)


def test_a_packed_run_folder_is_not_passed_over_in_silence(kvprobe, tmp_path: Path) -> None:
    trace(tmp_path / "a.json", calls=50)
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "b.kvprobe.tar.gz").write_bytes(gzip.compress(b"archive"))
    code, out, err = kvprobe("triage", tmp_path)
    assert code == 1
    assert "a.json" in out
    assert "b.kvprobe.tar.gz: kvprobe does not unpack this: unpack it with tar -xf" in err


def test_time_of_several_causes_is_divided_as_a_report_does(kvprobe, tmp_path: Path) -> None:
    data = Path(__file__).resolve().parents[1] / "gpu" / "data" / "accounts" / "nsys"
    path = data / "stores_of_a_prefill_hold_back_the_next_one.sqlite.gz"
    code, out, _ = kvprobe("triage", path)
    assert code == 0
    code, report, _ = kvprobe("report", "--json", path, "-o", tmp_path / "page.html")
    found = {one["cause"]: one["lost_ns"] for one in json.loads(report)["findings"]}
    causes = ("launch_queue_saturation", "fence_before_copies")
    assert code == 0 and out.splitlines()[1].split()[1:3] == time_text(sum(found[one] for one in causes)).split()
    assert out.splitlines()[2].strip() == "of which " + ", ".join(f"{one} {time_text(found[one])}" for one in causes)


def test_a_depth_that_is_not_known_is_no_number() -> None:
    queue = SimpleNamespace(verdict="found", ceiling=-1, title="stream 7")
    cells = _cells(SimpleNamespace(queues=[queue], verdict="found", lost_ns=5_000_000, causes=[], path=Path("t.json")))
    assert cells == ("full", "5.00 ms", "not seen", "stream 7", "t.json")
    queue.verdict = "undecided"  # of a channel that several streams filled together
    cells = _cells(SimpleNamespace(queues=[queue], verdict="found", lost_ns=5_000_000, causes=[], path=Path("t.json")))
    assert cells[2] == "channel"


def test_json_has_every_queue_and_the_reason(kvprobe, tmp_path: Path) -> None:
    path = trace(tmp_path / "t.json", cap=100)
    code, out, _ = kvprobe("triage", path, "--json")
    said = json.loads(out)
    assert code == 0 and said["errors"] == []
    (one,) = said["recordings"]
    assert (one["path"], one["verdict"], one["how"]) == (str(path), "found", "plateau")
    (queue,) = one["queues"]
    assert (queue["handle"], queue["ceiling"], queue["calls"]) == (7, 100, 400)
    assert queue["lost_ns"] == one["lost_ns"] > 0 and "when the stream moves on" in queue["reason"]


def test_other_formats_go_the_ordinary_way(kvprobe, shared_data: Path) -> None:
    code, out, _ = kvprobe("triage", shared_data / "nsys-ai", "--json")
    said = json.loads(out)["recordings"]
    assert code == 0 and len(said) == 3
    assert said[0]["verdict"] == "found" and said[0]["path"].endswith("h100_2gpu_1s.sqlite")
    assert {queue["ceiling"] for queue in said[0]["queues"] if queue["ceiling"] > 0} == {1141}


def test_what_cannot_be_read_is_a_line_each_and_exit_1(kvprobe, tmp_path: Path) -> None:
    good = trace(tmp_path / "good.json")
    bad = tmp_path / "bad.json"
    bad.write_text("{}")
    code, out, err = kvprobe("triage", tmp_path / "absent", good, bad)
    assert code == 1 and len(out.splitlines()) == 2 and "good.json" in out
    assert (
        len(err.splitlines()) == 2
        and "absent: no such file" in err
        and 'bad.json: JSON without a list "traceEvents"' in err
    )
    code, out, _ = kvprobe("triage", bad, "--json")
    assert code == 1 and len(json.loads(out)["errors"]) == 1


def test_no_input_is_wrong_usage(kvprobe) -> None:
    code, out, err = kvprobe("triage")
    assert (code, out) == (2, "") and "INPUT" in err


def test_a_trace_needs_no_numpy(tmp_path: Path) -> None:
    if native_library() is None:
        pytest.skip("the native library was not built")
    paths = [str(trace(tmp_path / f"{i}.json", calls=150)) for i in range(2)]
    code = f"import sys, kvprobe.cli as c\nassert c.main(['triage', *{paths}]) == 0\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.count("not full") == 2
    assert set(done.stdout.split()).isdisjoint({"numpy", "msgspec", "rich", "pyarrow"})
