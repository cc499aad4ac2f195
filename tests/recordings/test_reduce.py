from __future__ import annotations

import copy
import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import replace
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from queue_model import simulate

from kvprobe.errors import RecordingError, UsageError
from kvprobe.recordings import many, parquet
from kvprobe.recordings.buckets import BUCKETS, bucket, bucket_floor_ns
from kvprobe.recordings.many import reduce_inputs, reduce_one
from kvprobe.recordings.model import Table
from kvprobe.recordings.ranks import compare
from kvprobe.recordings.reduce import summarize
from kvprobe.recordings.summary import BlockedCall, Collectives, QueueSummary, Rank, Stat, Summary, percentile_ns

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
queues = st.builds(QueueSummary, numbers, numbers, st.integers(-1, 5000), numbers, numbers, numbers, verdicts)
blocked = st.builds(
    BlockedCall,
    st.integers(0, 5),
    words,
    st.integers(0, 3),
    st.just(1),
    st.just("cudaMemcpyAsync"),
    st.integers(0, 2),
    st.just(1021),
    numbers,
)
collectives = st.builds(Collectives, numbers, st.integers(0, 3), st.lists(numbers, max_size=9).map(tuple))
summaries = st.builds(
    Summary,
    st.integers(0, 5),
    st.dictionaries(st.tuples(words, st.just("c"), st.just("k"), st.just("d"), words), stats, max_size=2),
    st.dictionaries(st.tuples(words, st.just("e"), st.just("d"), st.just("m")), stats, max_size=2),
    st.dictionaries(st.tuples(words, st.integers(0, 1), st.integers(7, 8)), queues, max_size=3),
    st.dictionaries(
        words, st.builds(Rank, numbers, numbers, numbers, verdicts, st.integers(0, 2), collectives), max_size=3
    ),
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
    assert a.merge(b).merge(c).to_bytes() == c.merge(a.merge(b)).to_bytes() == b.merge(c).merge(a).to_bytes()
    assert Summary.from_bytes(a.to_bytes()) == a.identified()


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
    whole = summarize(merge([copy.deepcopy(part) for part in parts]))
    total = Summary()
    for part in parts[::-1]:
        total = total.merge(summarize(part))
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
    (stat,) = summarize(r).calls.values()
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
    code = "import sys, kvprobe.recordings.many; print('ray' in sys.modules, 'fsspec' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="Ray is installed")
def test_without_ray_the_way_out_is_named(ranks):
    with pytest.raises(UsageError, match=r"pip install 'kvprobe\[ray\]'"):
        reduce_inputs(ranks, "local")


@pytest.mark.servers  # Ray is one of the packages that `make test-servers` installs
@pytest.mark.slow
def test_a_real_ray_cluster_gives_what_one_process_gives(ranks):
    pytest.importorskip("ray")
    assert reduce_inputs(ranks, "local") == reduce_inputs(ranks, workers=1)
    assert json.dumps(sorted(reduce_inputs(ranks, workers=1).ranks))


# ---- ranks compared -------------------------------------------------------------------------------------------------


def with_collectives(number, sums, shift=0):
    return Summary(
        1, ranks={f"rank {number}": Rank(10**9, 0, 0, "healthy", 1, Collectives(len(sums) << shift, shift, sums))}
    )


def test_who_came_last_made_the_others_wait():
    total = Summary()
    for number, sums in enumerate([(5, 10, 10), (5, 1, 10), (5, 10, 4)]):
        total.absorb(with_collectives(number, sums))
    found = compare(total)
    assert (found.waiting.ranks, found.waiting.collectives, found.waiting.missing) == (3, 3, "")
    rows = {row.rank: (row.made_wait_ns, row.waited_ns) for row in found.rows}
    assert rows == {"rank 0": (0, 9 + 6), "rank 1": (9 + 9, 6), "rank 2": (6 + 6, 9)}


def test_ranks_with_other_collectives_are_left_out_and_one_alone_says_nothing():
    total = with_collectives(0, (5, 6)).absorb(with_collectives(1, (6, 5))).absorb(with_collectives(2, (1, 2, 3)))
    assert (compare(total).waiting.ranks, compare(total).waiting.left_out) == (2, 1)
    assert "no collective was recorded of two ranks" in compare(with_collectives(0, (5,))).waiting.missing


def test_collectives_are_told_by_their_kernels():
    r = rank(0, calls=1200)
    r.names = [*r.names, "ncclDevKernel_AllReduce_Sum_f32_RING_LL(...)"]
    r.tables["executions"].columns["name"] = np.where(np.arange(1200) % 2, 0, len(r.names) - 1).astype(np.int32)
    (found,) = summarize(r).ranks.values()
    table = r.executions
    assert found.collectives.count == 600 and len(found.collectives.sums) == 150  # four to a sum
    assert sum(found.collectives.sums) == int((table["end_ns"] - table["start_ns"])[::2].sum())


def test_a_summary_is_merged_like_a_recording(ranks, tmp_path):
    whole = reduce_inputs(ranks, workers=1)
    parts = []
    for number, folder in enumerate(ranks):
        parts.append(tmp_path / f"{number}.kvsum")
        parts[-1].write_bytes(reduce_inputs([folder], workers=1).to_bytes())
    assert reduce_inputs(parts[::-1], workers=1).to_bytes() == whole.to_bytes()
    assert reduce_inputs([parts[1], ranks[0], parts[2]], workers=1).to_bytes() == whole.to_bytes()
    parts[0].write_text("{}")
    assert "not a summary" in reduce_inputs(parts, workers=1).failed[str(parts[0])]


def test_a_killed_worker_loses_nothing(ranks, tmp_path, monkeypatch):
    """The first worker that meets the mark dies; so does each that meets the grave."""
    mark, grave = tmp_path / "kill-once", tmp_path / "run2" / "kill-always"
    startup = tmp_path / "site"
    startup.mkdir()
    (startup / "sitecustomize.py").write_text(
        "import os, sys\n"
        "def hook(event, args):\n"
        f"    if event == 'open' and str(args[0]).endswith('kvprobe.json') and os.getpid() != {os.getpid()}:\n"
        f"        if os.path.exists({str(mark)!r}) and 'run1' in str(args[0]):\n"
        f"            os.unlink({str(mark)!r})\n"
        "            os.kill(os.getpid(), 9)\n"
        "        if os.path.exists(os.path.join(os.path.dirname(str(args[0])), 'kill-always')):\n"
        "            os.kill(os.getpid(), 9)\n"
        "sys.addaudithook(hook)\n"
    )
    plain = reduce_inputs(ranks, workers=1)
    monkeypatch.setenv("PYTHONPATH", str(startup))
    mark.touch()
    assert reduce_inputs(ranks, workers=2).to_bytes() == plain.to_bytes()
    assert not mark.exists(), "nobody was killed"
    grave.touch()
    total = reduce_inputs(ranks, workers=2)
    assert list(total.failed) == [str(ranks[2])] and f"killed {many.TRIES} times" in total.failed[str(ranks[2])]
    assert set(total.ranks) == {"rank 0", "rank 1"}


@pytest.mark.parametrize(
    ("where", "value"),
    [
        ("inputs", "one"),
        ("keep", -1),
        ("failed", 7),
        ("notes", {"a": "b"}),
        ("top", [[1, 2]]),
        ("ranks", [["rank 0", [0, 0, 0, "unheard of", 1, [0, 0, []]]]]),
        ("ranks", [["rank 0", [0, 0, 0, "healthy", 1, [0, 1 << 40, []]]]]),
        ("calls", [["a", "b", "c", "d", "e", [0] * 8 + [[0] * 3]]]),
        ("queues", [["rank 0", 0, 0, [10**30, 0, 0, 0, 0, 0, "healthy"]]]),
    ],
)
def test_a_summary_of_other_contents_is_refused_in_one_line(tmp_path, where, value):
    path = tmp_path / "x.kvsum"
    path.write_text(json.dumps({**json.loads(Summary().to_bytes()), where: value}))
    (said,) = reduce_one(str(path)).failed.values()
    assert "not a summary that this kvprobe reads (damaged summary (" in said and "\n" not in said


# ---- each recording is counted once ----------------------------------------------------------------------------------


def reduced(folder: Path, name: str, calls: int) -> Path:
    """A summary's file."""
    path = folder / f"{name}.kvsum"
    path.write_bytes(summarize(simulate(calls=calls)[0], name).to_bytes())
    return path


def test_a_summary_its_copy_and_what_it_was_merged_into_are_counted_once(tmp_path: Path) -> None:
    one, two = reduced(tmp_path, "one", 50), reduced(tmp_path, "two", 60)
    copy, link, merged = tmp_path / "copy.kvsum", tmp_path / "link.kvsum", tmp_path / "merged.kvsum"
    copy.write_bytes(one.read_bytes())
    link.hardlink_to(one)
    both = reduce_inputs([one, two], workers=1)
    merged.write_bytes(both.to_bytes())
    assert both.inputs == 2 and len(both.parts) == 2
    for order in permutations([one, copy, link, merged, two]):
        assert reduce_inputs(order, workers=1).to_bytes() == both.to_bytes()
    assert reduce_inputs([one, copy], workers=1).to_bytes() == one.read_bytes()


def test_a_summary_of_an_earlier_kvprobe_has_an_identity_too(tmp_path: Path) -> None:
    old = json.loads(reduced(tmp_path, "one", 50).read_bytes())
    del old["parts"]
    for name in ("a", "b"):
        (tmp_path / f"{name}.kvsum").write_text(json.dumps(old))
    assert reduce_inputs([tmp_path / "a.kvsum", tmp_path / "b.kvsum"], workers=1).inputs == 1


def test_merged_summaries_that_share_a_recording_cannot_be_told_apart(tmp_path: Path) -> None:
    files = [reduced(tmp_path, name, 40 + i) for i, name in enumerate("abc")]
    for name, parts in (("ab", files[:2]), ("bc", files[1:])):
        (tmp_path / f"{name}.kvsum").write_bytes(reduce_inputs(parts, workers=1).to_bytes())
    total = reduce_inputs([tmp_path / "ab.kvsum", tmp_path / "bc.kvsum"], workers=1)
    assert total.inputs == 2 and len(total.failed) == 1
    assert "are in another input, too" in next(iter(total.failed.values()))


@pytest.mark.parametrize("table", ["calls", "executions", "queues", "ranks", "top"])
@pytest.mark.parametrize("number", [-1, 2**61, 2**62, 2**63, 2**200])
def test_figures_that_no_recorder_writes_are_refused_with_the_files_name(
    tmp_path: Path, table: str, number: int
) -> None:
    summary = summarize(simulate(calls=300, cap=8)[0], "n")
    summary.top = summary.top or [BlockedCall(1, "n", 1, 1, "c", 1, 1, 1)]
    content = json.loads(summary.to_bytes())
    assert content[table]
    row = content[table][0][-1] if table != "top" else content[table][0]
    row[0] = number
    path = tmp_path / "evil.kvsum"
    path.write_text(json.dumps(content))
    found = reduce_one(str(path))
    assert not found.inputs and str(path) in found.failed[str(path)] and "\n" not in found.failed[str(path)]


def test_sums_that_grow_beyond_what_a_file_takes_are_refused(tmp_path: Path) -> None:
    paths = []
    for i in range(3):
        summary = summarize(simulate(calls=50 + i)[0], "n")
        for stat in summary.calls.values():
            stat.bytes, stat.histogram = 2**59 + 2**58, (2**53,) * BUCKETS
        paths.append(tmp_path / f"{i}.kvsum")
        paths[-1].write_bytes(replace(summary, parts=frozenset()).to_bytes())
    total = reduce_inputs(paths, workers=1)
    assert total.inputs == 1 and len(total.failed) == 2
    compare(total)
    assert Summary.from_bytes(total.to_bytes()).inputs == 1
