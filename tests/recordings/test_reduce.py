from __future__ import annotations

import copy
import importlib.util
import json
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from queue_model import simulate

from kvprobe.errors import RecordingError, UsageError
from kvprobe.recordings import parquet
from kvprobe.recordings.model import Table
from kvprobe.recordings.reduce import (
    BUCKETS,
    Blocked,
    Queue,
    Rank,
    Stat,
    Summary,
    bucket,
    bucket_floor_ns,
    percentile_ns,
    reduce_inputs,
    reduce_one,
)

numbers = st.integers(0, 10**15)
words = st.sampled_from(["rank 0", "rank 1", "node:7"])
verdicts = st.sampled_from(["healthy", "cannot tell", "saturated"])
stats = st.builds(
    Stat,
    numbers,
    numbers,
    numbers,
    numbers,
    numbers,
    numbers,
    numbers,
    numbers,
    st.lists(numbers, min_size=BUCKETS, max_size=BUCKETS).map(tuple),
)
queues = st.builds(Queue, numbers, numbers, st.integers(-1, 5000), numbers, numbers, numbers, verdicts)
blocked = st.builds(
    Blocked,
    st.integers(0, 5),
    words,
    st.integers(0, 3),
    st.just(1),
    st.just("cudaMemcpyAsync"),
    st.integers(0, 2),
    st.just(1021),
    numbers,
)
summaries = st.builds(
    Summary,
    st.integers(0, 5),
    st.dictionaries(st.tuples(words, st.just("c"), st.just("k"), st.just("d"), words), stats, max_size=2),
    st.dictionaries(st.tuples(words, st.just("e"), st.just("d"), st.just("m")), stats, max_size=2),
    st.dictionaries(st.tuples(words, st.integers(0, 1), st.integers(7, 8)), queues, max_size=3),
    st.dictionaries(words, st.builds(Rank, numbers, numbers, numbers, verdicts), max_size=3),
    st.lists(blocked, max_size=5).map(lambda some: sorted(some, reverse=True)),
    st.integers(5, 8),
    st.dictionaries(st.sampled_from("ab"), st.integers(1, 3)),
    st.dictionaries(st.sampled_from("xy"), st.sampled_from("12")),
)


@settings(max_examples=60, deadline=None)
@given(summaries, summaries, summaries)
def test_merging_is_associative_and_commutative(a, b, c):
    assert a.merge(b) == b.merge(a)
    assert a.merge(b).merge(c) == a.merge(b.merge(c))
    assert a.merge(Summary(keep=10**9)) == a


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**62))
def test_buckets_are_those_of_the_ring_file(ns):
    index = int(bucket(np.array([ns]))[0])
    if ns < 4:
        expected = ns
    else:
        exponent = ns.bit_length() - 1
        expected = min((exponent - 1) * 4 + ((ns >> (exponent - 2)) & 3), BUCKETS - 1)
    assert index == expected
    assert bucket_floor_ns(index) <= ns and (index == BUCKETS - 1 or ns < bucket_floor_ns(index + 1))


def test_a_percentile_is_within_an_eighth_of_the_truth():
    duration = np.random.default_rng(3).lognormal(9, 1, 20_000).astype(np.int64)
    histogram = np.bincount(bucket(duration), minlength=BUCKETS)
    for share in (0.5, 0.9, 0.99):
        assert percentile_ns(histogram, share) == pytest.approx(np.percentile(duration, share * 100), rel=0.125)


def rank(number, **options):
    r, _ = simulate(seed=number, **options)
    r.processes.columns["rank"] = np.array([number], dtype=np.int32)
    return r


def test_parts_give_what_the_whole_gives():
    from kvprobe.recordings.merge import merge

    parts = [rank(0, calls=1500), rank(1, calls=1300), rank(2, calls=300)]
    whole = Summary.of(merge([copy.deepcopy(part) for part in parts]))
    total = Summary()
    for part in parts[::-1]:
        total = total.merge(Summary.of(part))
    assert total.calls == whole.calls and total.executions == whole.executions and total.queues == whole.queues
    assert [b.blocked_ns for b in total.top] == [b.blocked_ns for b in whole.top]
    assert total.verdict == "saturated" and total.ranks["rank 2"].verdict == "healthy"
    assert total.ranks["rank 0"].blocked_ns > 0


def test_totals_stand_where_detail_was_lost():
    r = rank(0, calls=100)
    r.tables["totals"] = Table(
        "totals",
        {
            "name": [1],
            "kind": [1],
            "calls": [10**6],
            "copies": [10**6],
            "bytes": [5],
            "dur_ns": [7],
            "max_ns": [3],
            "errors": [2],
        },
    )
    r.histograms = np.zeros((1, BUCKETS), dtype=np.int64)
    r.histograms[0, 9] = 10**6
    (stat,) = Summary.of(r).calls.values()
    assert (stat.count, stat.errors, stat.histogram[9]) == (10**6, 2, 10**6)


@pytest.fixture
def ranks(tmp_path):
    paths = []
    for number in range(3):
        parquet.write(rank(number, calls=1200), tmp_path / f"run{number}")
        paths.append(tmp_path / f"run{number}")
    return paths


def test_all_cores_give_what_one_gives(ranks):
    one = reduce_inputs(ranks, workers=1)
    assert one.inputs == 3 and set(one.ranks) == {"rank 0", "rank 1", "rank 2"}
    assert reduce_inputs(ranks, workers=2) == one


def test_an_unreadable_input_is_named_and_the_rest_counts(ranks, tmp_path):
    bad = tmp_path / "bad.json"
    bad.write_text("{")
    total = reduce_inputs([*ranks, bad], workers=1)
    assert total.inputs == 3 and "traceEvents" in total.failed[str(bad)]
    with pytest.raises(RecordingError):
        reduce_inputs([bad], workers=1)
    with pytest.raises(UsageError):
        reduce_inputs([])


def test_the_two_gpus_of_a_real_recording_are_two_ranks(shared):
    total = reduce_inputs([shared.path("h100"), shared.path("owlv2")], workers=1)
    assert total.inputs == 2 and total.verdict == "saturated"
    assert total.blocked_ns == pytest.approx(912e6, rel=0.01)
    assert len(total.top) == 100 and total.top[0].blocked_ns > 100e6
    assert sorted(queue.verdict for queue in total.queues.values()) == ["healthy", "saturated", "saturated"]


def test_urls_are_fetched_with_fsspec(ranks, tmp_path):
    pytest.importorskip("fsspec")
    assert reduce_one(f"file://{ranks[1]}") == reduce_one(str(ranks[1]))
    missing = reduce_one(f"file://{tmp_path}/absent.json")
    assert not missing.inputs and missing.failed


def test_ray_is_not_loaded_unless_asked_for():
    code = "import sys, kvprobe.recordings.reduce; print('ray' in sys.modules, 'fsspec' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="Ray is installed")
def test_without_ray_the_way_out_is_named(ranks):
    with pytest.raises(UsageError, match=r"pip install 'kvprobe\[ray\]'"):
        reduce_inputs(ranks, "local")


@pytest.mark.slow
def test_a_real_ray_cluster_gives_what_one_process_gives(ranks):
    pytest.importorskip("ray")
    assert reduce_inputs(ranks, "local") == reduce_inputs(ranks, workers=1)
    assert json.dumps(sorted(reduce_inputs(ranks, workers=1).ranks))
