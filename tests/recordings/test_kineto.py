from __future__ import annotations

import gzip
import json
import re

import numpy as np
import pytest

from kvprobe.errors import RecordingError
from kvprobe.recordings import kineto, kineto_scan, open_recording, trace_text
from kvprobe.recordings.model import SCHEMAS, CallKind, Direction, Engine, Label, Memory, RangeStyle


def count(recording, name):
    return int((recording.calls["name"] == recording.names.index(name)).sum()) if name in recording.names else 0


EXPECTED = {  # name: copies, launches, executions, ranges; counted with the json module, see test_every_event_is_read
    "v100": {"cudaMemcpyAsync": 1600, "cudaLaunchKernel": 4350, "cudaMemsetAsync": 380},
    "trace_diff": {"cudaMemcpyAsync": 4812, "cudaGraphLaunch": 12},
    "owlv2": {"cudaMemcpyAsync": 85, "cudaLaunchKernelExC": 745, "cuLaunchKernel": 725},
    "b200": {"cudaMemcpyAsync": 161, "cuLaunchKernelEx": 220},
    "param": {"cudaMemcpyAsync": 123, "cudaFree": 8},
    "resnet50": {"cudaMemcpyAsync": 12, "cudaLaunchKernel": 8772},
}


@pytest.fixture(params=["native", "msgspec"])
def either(request, monkeypatch):
    """The test runs with the native scanner and with the one that stands in for it."""
    if request.param == "msgspec":
        monkeypatch.setattr(kineto, "scanner", lambda categories: None)
    elif kineto_scan.scanner(()) is None:
        pytest.skip("the native library was not built")


@pytest.mark.parametrize("name", EXPECTED)
def test_both_scanners_read_the_same(shared, monkeypatch, name):
    native = shared.open(name)
    monkeypatch.setattr(kineto, "scanner", lambda categories: None)
    other = open_recording([shared.path(name)])
    for kind, table in native.tables.items():
        assert table.rows == other.tables[kind].rows
        for column, dtype in SCHEMAS[kind].items():
            a, b = table[column].tolist(), other.tables[kind][column].tolist()
            if dtype == "name":
                a, b = [native.text(i) for i in a], [other.text(i) for i in b]
            assert a == b, (kind, column)
    assert native.notes == other.notes and native.machine == other.machine


@pytest.mark.parametrize("name", EXPECTED)
def test_calls_are_counted_as_the_file_has_them(shared, name):
    r = shared.open(name)
    assert {call: count(r, call) for call in EXPECTED[name]} == EXPECTED[name]


@pytest.mark.parametrize("name", ["v100", "b200", "resnet50"])
def test_every_event_is_read_to_the_nanosecond(either, shared, name):
    text = gzip.decompress(shared.path(name).read_bytes()).decode()
    # Numbers kept as text: what the json module makes of 1712195495519689.047 is a quarter of a microsecond off.
    document = json.loads(text, parse_float=str)
    base = document.get("baseTimeNanoseconds", 0)

    def ns(value):
        whole, _, decimals = str(value).partition(".")
        return int(whole) * 1000 + int(decimals[:3].ljust(3, "0") or 0)

    r = shared.open(name)
    for table, categories in (
        (r.calls, {"cuda_runtime", "cuda_driver", "Runtime"}),
        (r.executions, {"kernel", "gpu_memcpy", "gpu_memset", "Kernel", "Memcpy", "Memset"}),
        (r.ranges, {"cpu_op", "user_annotation", "Operator"}),
    ):
        events = [e for e in document["traceEvents"] if e.get("ph") == "X" and e.get("cat") in categories]
        expected = sorted((ns(e["ts"]) + base, ns(e["ts"]) + base + ns(e["dur"])) for e in events)
        assert sorted(zip(table["start_ns"].tolist(), table["end_ns"].tolist(), strict=True)) == expected


def test_pinned_and_pageable_come_from_the_operations_name(shared):
    r = shared.open("owlv2")
    copies = r.executions["engine"] == Engine.COPY
    pairs = list(zip(r.executions["direction"][copies].tolist(), r.executions["memory"][copies].tolist(), strict=True))
    assert pairs.count((Direction.D2H, Memory.PAGEABLE)) == 55 and pairs.count((Direction.H2D, Memory.PAGEABLE)) == 25
    assert pairs.count((Direction.D2D, Memory.DEVICE)) == 5
    r = shared.open("trace_diff")
    calls = r.calls["kind"] == CallKind.COPY
    assert ((r.calls["direction"] == Direction.D2H) & (r.calls["memory"] == Memory.PAGEABLE) & calls).sum() == 60


def test_categories_of_2021_and_thread_ids_that_are_strings(shared):
    r = shared.open("resnet50")
    assert r.executions.rows == 9096 and r.streams["handle"].tolist() == [7]
    assert set(r.calls["thread"].tolist()) <= {25738} | set(r.ranges["thread"].tolist())
    assert r.processes["pid"].tolist() == [25738]


def test_overhead_events_become_labels(shared):
    r = shared.open("b200")
    assert (r.labels["label"] == Label.LAZY_LOADING).sum() == 8
    assert (r.labels["label"] == Label.INSTRUMENTATION).sum() == 1
    assert (shared.open("owlv2").labels["label"] == Label.BUFFER_FLUSH).sum() == 2


def test_executions_of_a_graph_launch_are_marked(shared):
    r = shared.open("trace_diff")
    assert (r.calls["kind"] == CallKind.GRAPH).sum() == 12
    _, sizes = np.unique(r.executions["graph"][r.executions["graph"] >= 0], return_counts=True)
    assert set(sizes.tolist()) == {339, 502}


def event(name="cudaMemcpyAsync", cat="cuda_runtime", ts=10.5, dur=2.25, tid=3, **args):
    return {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": tid, "ts": ts, "dur": dur, "args": args}


def write(path, events, before=None, after=None, indent=None):
    document = {**(before or {}), "traceEvents": events, **(after or {})}
    path.write_text(json.dumps(document, indent=indent))
    return path


def test_a_batch_call_without_a_name_is_known_by_its_callback_id(either, tmp_path):
    events = [event("INVALID", cbid=cbid, correlation=cbid) for cbid in (482, 483, 509, 510, 409)]
    events.append(event("INVALID", cat="cuda_driver", cbid=796, correlation=796))
    r = open_recording([write(tmp_path / "t.json", events)])
    assert count(r, "cudaMemcpyBatchAsync") == 4 and count(r, "cuMemcpyBatchAsync") == 1
    assert count(r, "INVALID (cbid 409)") == 1
    assert (r.calls["kind"] == CallKind.BATCH).sum() == 5


@pytest.mark.parametrize("indent", [None, 0, 2])
@pytest.mark.parametrize("chunk", [64, 333, 1 << 20])
def test_where_the_text_is_cut_makes_no_difference(either, tmp_path, monkeypatch, indent, chunk):
    monkeypatch.setattr(trace_text, "_CHUNK", chunk)
    nasty = 'quote " brace },{"ph":"X" ]} \\" bracket ] \u20ac'
    events = [event(nasty, cat="cpu_op", ts=float(i), note=[{"name": nasty}, {"ph": nasty}, []]) for i in range(40)]
    path = write(
        tmp_path / "t.json",
        events,
        {"a": [1, {"name": nasty}]},
        {"baseTimeNanoseconds": 10**18, "list": [{"name": 1}, {"name": 2}, {"name": nasty}]},
        indent,
    )
    r = open_recording([path])
    assert r.ranges.rows == 40 and {r.text(n) for n in r.ranges["name"]} == {nasty}
    assert r.ranges["start_ns"].tolist() == [10**18 + i * 1000 for i in range(40)]
    assert not [note for note in r.notes if "cut off" in note]


def test_a_list_without_a_document_around_it_is_read(either, tmp_path):
    path = tmp_path / "t.json"
    path.write_text(json.dumps([event(correlation=1), event(correlation=2)]))
    assert open_recording([path]).calls.rows == 2


@pytest.mark.parametrize("digits", ["1712195495519689.047", "1712195495519689.5", "1712195495519689", "12.3456", "1e3"])
def test_times_are_exact_whatever_their_writing(either, tmp_path, digits):
    text = json.dumps({"traceEvents": [event(ts="TS"), event(ts="1712195495519690.001")]})
    path = tmp_path / "t.json"
    path.write_text(text.replace('"TS"', digits).replace('"1712195495519690.001"', "1712195495519690.001"))
    expected = {
        "1712195495519689.047": 1712195495519689047,
        "1712195495519689.5": 1712195495519689500,
        "1712195495519689": 1712195495519689000,
        "12.3456": 12345,
        "1e3": 1000000,
    }[digits]
    assert abs(int(open_recording([path]).calls["start_ns"].min()) - expected) <= (1 if digits == "12.3456" else 0)


def test_a_truncated_file_gives_what_was_complete_and_says_so(either, tmp_path, shared):
    whole = shared.path("resnet50").read_bytes()
    path = tmp_path / "cut.json.gz"
    path.write_bytes(whole[: len(whole) // 2])
    r = open_recording([path])
    assert r.ranges.rows > 1000 and r.calls.rows < shared.open("resnet50").calls.rows
    assert any("cut off" in note for note in r.notes)


def test_single_damaged_events_cost_only_themselves(either, tmp_path):
    events = [event(correlation=1), event(correlation="x" * 5), {"no": "phase"}, event(correlation=2)]
    r = open_recording([write(tmp_path / "t.json", events)])
    assert r.calls["correlation"].tolist() == [1, 2]
    assert any(re.match("2 events", note) for note in r.notes)


@pytest.mark.parametrize("late", [True, False])
@pytest.mark.parametrize("word", ["NaN", "Infinity", "-Infinity", "inf", "-inf", "nan", "-nan"])
def test_a_float_that_is_no_number_costs_an_event_only_where_a_number_is_wanted(either, tmp_path, word, late):
    """Kineto gives a copy of no duration the bandwidth inf; Python's json module writes it anew as Infinity."""
    at = "1712195495000000.12" if late else "1.00"

    def event(number, beside="", name="cudaMemcpyAsync", ts="", dur="2.5"):
        return (
            f'{{"ph": "X", "cat": "cuda_runtime", "name": "{name}", "ts": {ts or at + str(number)}, "dur": {dur}, '
            f'"pid": 1, "tid": 2, "args": {{"correlation": {number}{beside}}}}}'
        )

    trap = rf"f<\"a\\\\\": {word}, [{word}]>"  # in a string it is text
    events = [
        event(1),
        event(2, f', "memory bandwidth (GB/s)": {word}, "shape": [1, {word},{word}]'),
        event(3, ts=word),
        event(4, dur=word),
        event(5, f', "bytes": {word}'),
        event(6, f', "beside": {word}', name=trap),
        event(7, f', "last": {word}'),
    ]
    path = tmp_path / "t.json"
    path.write_text(f'{{"displayTimeUnit": "ms", "traceEvents": [{",".join(events)}]}}')
    r = open_recording([path])
    assert r.calls["correlation"].tolist() == [1, 2, 6, 7]
    assert (r.calls["start_ns"] % 10).tolist() == [1, 2, 6, 7]
    assert r.text(int(r.calls["name"][2])) == json.loads(f'"{trap}"')
    assert r.notes == ["3 events of t.json are damaged and were not read"]


@pytest.mark.parametrize(
    "text", ["", "{", "[", "nonsense", "{}", '{"traceEvents": 3}', '{"traceEvents": [', "[1,2", "\0" * 100]
)
def test_foreign_files_are_refused_in_one_line(either, tmp_path, text):
    path = tmp_path / "t.json"
    path.write_text(text)
    with pytest.raises(RecordingError) as error:
        open_recording([path])
    assert "\n" not in str(error.value) and str(path) in str(error.value)


def test_one_file_per_rank_becomes_one_process_per_rank(tmp_path):
    for rank in range(3):
        write(
            tmp_path / f"rank{rank}.json",
            [
                event(ts=100.0 * rank, correlation=5),
                event(
                    "Memcpy HtoD (Pinned -> Device)",
                    "gpu_memcpy",
                    ts=100.0 * rank + 5,
                    correlation=5,
                    stream=7,
                    device=rank,
                    bytes=64,
                ),
            ],
            {"distributedInfo": {"rank": rank}},
        )
    r = open_recording([tmp_path])
    assert r.processes["rank"].tolist() == [0, 1, 2]
    assert r.calls["process"].tolist() == [0, 1, 2] and r.calls["stream"].tolist() == [0, 1, 2]
    assert r.streams["device"].tolist() == [0, 1, 2] and r.calls["bytes"].tolist() == [64] * 3


def test_operators_and_annotations_are_told_apart(shared):
    r = shared.open("v100")
    assert (r.ranges["style"] == RangeStyle.OPERATOR).sum() == 23910
    assert (r.ranges["style"] == RangeStyle.ANNOTATION).sum() == 70


@pytest.mark.parametrize(("stated", "rank"), [(0, 0), (2, 2), (None, 3), (-1, 3), (1 << 31, 3)])
def test_the_rank_that_a_trace_states_counts_before_the_one_in_its_name(tmp_path, stated, rank):
    path = write(tmp_path / "rank-3.json", [event(ts=1.0, correlation=5)], {"distributedInfo": {"rank": stated}})
    assert open_recording([path]).processes["rank"].tolist() == [rank]


def test_a_stream_has_the_channel_that_all_its_operations_name(tmp_path):
    named = [(7, 3), (7, 3), (9, 4), (9, 5), (11, None), (13, 0)]
    events = [event(ts=1.0, correlation=1)]
    for number, (stream, channel) in enumerate(named):
        more = {} if channel is None else {"channel": channel}
        copy = "Memcpy HtoD (Pinned -> Device)"
        events.append(event(copy, "gpu_memcpy", ts=10.0 * (1 + number), stream=stream, device=0, bytes=64, **more))
    r = open_recording([write(tmp_path / "t.json", events)])
    channels = dict(zip(r.streams["handle"].tolist(), r.streams["channel"].tolist(), strict=True))
    assert channels == {7: 3, 9: -1, 11: -1, 13: 0}


def test_a_copy_between_gpus_is_of_the_one_it_runs_in(either, tmp_path):
    """As the profiler writes it: without a device, with those that it is from, to and in."""
    copy = "Memcpy PtoP (Device -> Device)"
    events = [
        event(copy, "gpu_memcpy", ts=20.0, stream=47, bytes=1 << 20, fromDevice=1, inDevice=1, toDevice=0),
        event(copy, "gpu_memcpy", ts=30.0, stream=47, bytes=1 << 20, fromDevice=0, inDevice=0, toDevice=1),
        event(copy, "gpu_memcpy", ts=40.0, stream=7, device=1, bytes=1 << 20),
    ]
    r = open_recording([write(tmp_path / "t.json", [event(ts=1.0, correlation=1), *events])])
    assert r.executions["device"].tolist() == [1, 0, 1]
    assert set(r.executions["direction"]) == {Direction.D2D}
