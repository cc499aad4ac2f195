"""Damaged, foreign and hostile inputs: a RecordingError in one line or a recording, soon, and in little memory."""

from __future__ import annotations

import gzip
import hashlib
import json
import random
import re
import resource
import sqlite3
import time
import zlib

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from queue_model import simulate

from kvprobe.diagnosis import diagnose
from kvprobe.errors import KvprobeError
from kvprobe.recordings import kineto, open_recording, parquet
from kvprobe.recordings.occupancy import occupancy

SECONDS = 60  # of CPU, far above what any of these takes; what hangs without using it meets the limit of a test


def attempt(path):
    """Reads and judges; anything but a RecordingError of one line is a failure."""
    begin = time.process_time()
    try:
        r = open_recording([path])
        occupancy(r)
        read = True
    except KvprobeError as error:
        assert "\n" not in str(error) and len(str(error)) < 2000
        read = False
    assert time.process_time() - begin < SECONDS
    return read


def mutate(data, rng, times):
    data = bytearray(data)
    for _ in range(times):
        at = rng.randrange(len(data))
        what = rng.randrange(5)
        if what == 0:
            data[at] ^= 1 << rng.randrange(8)
        elif what == 1:
            data[at : at + 8] = rng.randbytes(8)
        elif what == 2:
            del data[at : at + rng.randrange(1, 200)]
        elif what == 3:
            data[at:at] = data[at : at + rng.randrange(1, 200)]
        else:
            data[at : at + 4] = b"\xff\xff\xff\x7f"
    return bytes(data)


@pytest.fixture(params=["native", "msgspec"])
def either(request, monkeypatch):
    if request.param == "msgspec":
        monkeypatch.setattr(kineto, "scanner", lambda categories: None)
    return request.param


@pytest.mark.parametrize("name", ["h100", "extrap"])
def test_damaged_sqlite_exports(shared, tmp_path, name):
    whole = shared.path(name).read_bytes()
    rng = random.Random(name)
    results = []
    for i in range(40):
        path = tmp_path / "x.sqlite"
        data = mutate(whole, rng, rng.choice((1, 10, 300)))
        if i % 4 == 0:
            data = data[: rng.randrange(len(data))]
        path.write_bytes(data)
        results.append(attempt(path))
    assert True in results, "some damage leaves something to read"


def test_sqlite_headers_that_lie(shared, tmp_path):
    whole = bytearray(shared.path("extrap").read_bytes())
    rng = random.Random(5)
    path = tmp_path / "x.sqlite"
    for i in range(100):  # the header and the schema's page
        data = bytearray(whole)
        data[rng.randrange(16, 100 if i % 2 else 4096)] = rng.randrange(256)
        path.write_bytes(data)
        attempt(path)


@pytest.mark.parametrize("name", ["v100", "b200", "resnet50"])
def test_damaged_traces(shared, tmp_path, either, name):
    whole = zlib.decompress(shared.path(name).read_bytes(), 31)
    whole = whole[:100_000] + whole[-100_000:]  # its ends, with a wound between them
    rng = random.Random(name)
    path = tmp_path / "x.json"
    results = []
    for i in range(12):
        data = mutate(whole, rng, rng.choice((1, 10, 300)))
        path.write_bytes(data[: rng.randrange(len(data))] if i % 4 == 0 else data)
        results.append(attempt(path))
    assert True in results


def test_damaged_gzip(shared, tmp_path):
    whole = shared.path("b200").read_bytes()
    rng = random.Random(1)
    path = tmp_path / "x.json.gz"
    for i in range(20):
        data = mutate(whole, rng, 3)
        path.write_bytes(data[: rng.randrange(len(data))] if i % 4 == 0 else data)
        attempt(path)


class Word(str):
    """What Kineto and Python write where a float is no number, and JSON has no word for it."""

    __slots__ = ()


def text_of(value):
    """JSON, and the words that it does not have."""
    if isinstance(value, Word):
        return str(value)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(k)}: {text_of(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(text_of, value)) + "]"
    return json.dumps(value)  # of a float that is no number: Infinity, -Infinity, NaN


WORDS = ("NaN", "Infinity", "-Infinity", "inf", "-inf", "nan", "-nan")
words = st.sampled_from(WORDS).map(Word)
traps = st.sampled_from(["[1, inf, NaN]", '": NaN, "', '\\": -inf}', ", Infinity]", "NaN"])  # text that looks like one
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=20) | words | traps,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
keys = st.sampled_from(["ph", "cat", "name", "ts", "dur", "pid", "tid", "args", "id"])
good = {"ph": "X", "cat": "cuda_runtime", "name": "cudaMemcpyAsync", "ts": 1.5, "dur": 2, "pid": 1, "tid": 2}
events = (
    st.dictionaries(keys, values, max_size=9)
    | st.dictionaries(keys, values, max_size=2).map(lambda d: {**good, **d})
    | (
        st.dictionaries(
            st.sampled_from(["correlation", "stream", "device", "bytes", "cbid", "name", "graph id"]), values
        ).map(lambda d: {**good, "args": d})
    )
    | values
)


@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(events, max_size=6), st.dictionaries(st.text(max_size=20), values, max_size=3), st.booleans())
def test_traces_of_anything(tmp_path, either, some, beside, first):
    document = {**beside, "traceEvents": some} if first else {"traceEvents": some, **beside}
    path = tmp_path / "x.json"
    path.write_text(text_of(document))
    attempt(path)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(events, max_size=5))
def test_both_scanners_count_the_same_events(tmp_path, some):
    path = tmp_path / "x.json"
    for event in (one for one in some if isinstance(one, dict)):
        for key in {"pid", "tid"} & set(event):  # of a text that has escapes the two make different numbers
            if isinstance(event[key], str) and not isinstance(event[key], Word):
                event[key] = re.sub("[^0-9A-Za-z ]", "", event[key])
    path.write_text(text_of({"traceEvents": [*some, good]}))
    found = []
    for native in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            if not native:
                patch.setattr(kineto, "scanner", lambda categories: None)
            r = open_recording([path])
        columns = [r.calls[name].tolist() for name in ("start_ns", "end_ns", "thread", "correlation", "bytes")]
        found.append((columns, [r.text(name) for name in r.calls["name"].tolist()], r.notes))
    assert found[0] == found[1]


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.binary(max_size=300),
    st.sampled_from(["x.json", "x.json.gz", "x.sqlite", "x.kvp", "x"]),
    st.sampled_from([b"", b"{", b"[", b"\x1f\x8b", b"SQLite format 3\0", b'{"traceEvents":[', b"PAR1"]),
)
def test_files_of_anything(tmp_path, data, name, start):
    path = tmp_path / name
    path.write_bytes(start + data)
    attempt(path)


def peak_of(call):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    call()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


def test_a_gzip_bomb_is_refused_in_bounded_memory(tmp_path, either):
    path = tmp_path / "x.json.gz"
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.write(b'{"traceEvents":[{"name":"')
        for _ in range(300):
            file.write(b"x" * (1 << 20))
    assert peak_of(lambda: attempt(path)) < 500
    with gzip.open(path, "wb", compresslevel=1) as file:
        for _ in range(300):
            file.write(b" " * (1 << 20))
    assert peak_of(lambda: attempt(path)) < 500


def test_deep_nesting_neither_crashes_nor_hangs(tmp_path, either):
    path = tmp_path / "x.json"
    deep = "[" * 200_000 + "]" * 200_000
    for text in (
        '{"traceEvents":[{"ph":"X","args":' + deep + "}]}",
        '{"a":' + deep + ',"traceEvents":[]}',
        '{"traceEvents":[' + deep,
        '{"traceEvents":[' + "{" * 100_000,
        '{"traceEvents":[{"name":"' + "\\" * 500_001,
    ):
        path.write_text(text)
        attempt(path)


def test_a_btree_that_points_at_itself_ends(shared, tmp_path):
    """Interior pages whose children are one page repeat it; only the size of the file tells that it cannot be true."""
    path = tmp_path / "x.sqlite"
    db = sqlite3.connect(path)
    db.execute("PRAGMA page_size=512")
    db.execute("CREATE TABLE StringIds (id INTEGER, value TEXT)")
    db.execute(
        "CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INTEGER, end INTEGER, globalTid INTEGER, "
        "correlationId INTEGER, nameId INTEGER)"
    )
    db.executemany("INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (1, 2, 3, 4, 5)", [()] * 20_000)
    db.commit()
    root = db.execute("SELECT rootpage FROM sqlite_master WHERE name LIKE 'CUPTI%'").fetchone()[0]
    db.close()
    data = bytearray(path.read_bytes())
    interior = [i for i in range(len(data) // 512) if data[i * 512] == 5 and i != 0]
    assert interior, "the table is deep enough"
    for page in interior:
        count = int.from_bytes(data[page * 512 + 3 : page * 512 + 5], "big")
        cells = [int.from_bytes(data[page * 512 + 12 + 2 * i : page * 512 + 14 + 2 * i], "big") for i in range(count)]
        first = data[page * 512 + cells[0] : page * 512 + cells[0] + 4]
        for cell in cells:
            data[page * 512 + cell : page * 512 + cell + 4] = first
    assert root
    path.write_bytes(data)
    attempt(path)


def test_damaged_parquet_exports(tmp_path):
    r, _ = simulate(calls=500)
    parquet.write(r, tmp_path / "good")
    rng = random.Random(3)
    for i in range(60):
        folder = tmp_path / f"bad{i}"
        folder.mkdir()
        hurt = rng.choice(sorted((tmp_path / "good").iterdir())).name
        for file in (tmp_path / "good").iterdir():
            data = file.read_bytes()
            (folder / file.name).write_bytes(mutate(data, rng, rng.choice((1, 5))) if file.name == hurt else data)
        attempt(folder)


def test_public_recordings_are_never_changed(shared):
    """Also written to by nobody who read them in this run."""
    for name in shared.files:
        before = hashlib.sha256(shared.path(name).read_bytes()).hexdigest()
        open_recording([shared.path(name)])
        assert hashlib.sha256(shared.path(name).read_bytes()).hexdigest() == before
        beside = sorted(p.name for p in shared.path(name).parent.iterdir() if p.suffix in ("-wal", "-journal", "-shm"))
        assert not beside


@pytest.mark.slow
def test_as_many_names_threads_and_streams_as_calls_take_no_pass_each(tmp_path):
    """Two passes over all calls for each name took 38 s of 100,000; of 200,000 four times that."""
    path = tmp_path / "x.json"
    call = '{"ph":"X","cat":"cuda_runtime","name":"cudaMemcpyAsync%d","pid":1,"tid":%d,"ts":%d,"dur":1,"args":{}}'
    path.write_text('{"traceEvents":[' + ",".join(call % (i, i, 3 * i) for i in range(200_000)) + "]}")
    begin = time.process_time()
    diagnose(open_recording([path]))
    assert time.process_time() - begin < SECONDS


def test_calls_of_streams_that_no_table_names_are_refused(tmp_path):
    import pyarrow.parquet as pq

    parquet.write(simulate(calls=50)[0], tmp_path / "x")
    streams = tmp_path / "x" / "streams.parquet"
    pq.write_table(pq.read_table(streams).slice(0, 0), streams)
    with pytest.raises(KvprobeError, match="outside streams"):
        open_recording([tmp_path / "x"])
