from __future__ import annotations

import copy

import numpy as np
import pytest
from queue_model import simulate

from kvprobe.recordings.model import CallKind, Label, Table
from kvprobe.recordings.occupancy import _alignment, depth_series, group_ns, innermost_range, occupancy


def without_labels(recording):
    bare = copy.copy(recording)
    bare.tables = {**recording.tables, "labels": Table("labels")}
    return bare


def deepest(occ):
    return max(int(q.depth.max()) for q in occ.streams)


def test_v100_ceiling_and_loss_are_found_without_labels(shared):
    r = shared.open("v100")
    occ = occupancy(r)
    (queue,) = occ.streams
    assert occ.verdict == "full" and occ.how == "plateau"
    assert queue.ceiling == 1022 and queue.plateau[0] >= 1005
    executed = r.calls["stream"][queue.calls] >= 0  # 235 memsets leave no record
    assert (queue.depth[executed] == 1022).sum() == 1271
    assert queue.blocked_ns.sum() == pytest.approx(233e6, rel=0.1)
    duration = r.calls["end_ns"] - r.calls["start_ns"]
    assert (occ.blocked & (duration > 60_000)).sum() == 902
    by_call = {r.text(k): v / 1e6 for k, v in group_ns(occ.blocked_ns, r.calls["name"]).items()}
    assert by_call["cudaMemcpyAsync"] == pytest.approx(45.0, rel=0.1)
    assert by_call["cudaLaunchKernel"] == pytest.approx(181.9, rel=0.1)
    assert by_call["cudaMemsetAsync"] == pytest.approx(6.1, rel=0.1)
    assert len(group_ns(occ.blocked_ns, r.calls["thread"])) == 2  # two threads submit, both lose


@pytest.mark.parametrize("labels", [True, False])
def test_h100_loss_in_each_process_agrees_with_cuptis_labels(shared, labels):
    r = shared.open("h100") if labels else without_labels(shared.open("h100"))
    truth = shared.open("h100").labels
    occ = occupancy(r)
    assert occ.verdict == "full" and occ.how == ("labels" if labels else "plateau")
    for process in (0, 1):
        mine = truth["process"] == process
        label_ns = (truth["end_ns"] - truth["start_ns"])[mine].sum()
        assert occ.blocked_ns[r.calls["process"] == process].sum() == pytest.approx(label_ns, rel=0.1)
    assert {q.ceiling for q in occ.streams} == {1141}
    for queue in occ.streams:
        duration = (r.calls["end_ns"] - r.calls["start_ns"])[queue.calls]
        at = queue.depth[(duration > 60_000) & queue.blocked]
        assert at.min() >= 1135 and at.max() <= 1141
        assert queue.before == 1138 and queue.after == 1140
    assert not (occ.blocked & (r.calls["kind"] == CallKind.COPY)).any(), "copies are healthy at every depth"
    if labels:
        assert occ.labelled_ns == pytest.approx(912e6, rel=0.01)
        assert occ.inferred_ns == pytest.approx(occ.labelled_ns, rel=0.1)


@pytest.mark.parametrize(
    ("name", "depth"),
    [
        ("owlv2", 777),
        ("resnet50", 569),
        ("param", 315),
        ("mfu_before", 55),
        ("mfu_after", 24),
        ("b200", 2),
        ("extrap", 4),
    ],
)
def test_a_queue_that_is_only_deep_or_only_slow_is_not_saturated(shared, name, depth):
    occ = occupancy(shared.open(name))
    assert deepest(occ) == depth
    assert occ.verdict == "not full" and not occ.blocked.any() and occ.reason


def test_graphs_in_the_queue_make_its_count_soft(shared):
    occ = occupancy(shared.open("trace_diff"))
    assert occ.verdict == "cannot tell" and "graph" in occ.reason and "likely" in occ.reason
    assert deepest(occ) == 1013
    assert all(q.ceiling == -1 for q in occ.streams)


def test_memsets_without_a_record_are_not_outstanding_for_ever(shared):
    occ = occupancy(shared.open("v100"))
    assert occ.streams[0].after <= 2 and occ.streams[0].before == 0


def test_two_saturated_streams_are_two():
    r, lost = simulate(streams=2, calls=2500)
    occ = occupancy(r)
    assert [q.verdict for q in occ.streams] == ["full", "full"]
    assert [q.ceiling for q in occ.streams] == [1021, 1021]
    assert occ.blocked_ns.sum() == pytest.approx(lost, rel=0.05)


@pytest.mark.parametrize("cap", [253, 1021, 4093])
def test_the_ceiling_is_learned(cap):
    r, lost = simulate(calls=2 * cap, cap=cap)
    occ = occupancy(r)
    assert occ.streams[0].ceiling == cap and occ.blocked_ns.sum() == pytest.approx(lost, rel=0.05)


def test_small_copies_that_end_every_two_microseconds_still_show_a_full_queue():
    r, lost = simulate(calls=20_000, api_ns=1040, gpu_ns=2500, wake_ns=300)
    occ = occupancy(r)
    assert occ.verdict == "full" and occ.blocked_ns.sum() == pytest.approx(lost, rel=0.15)


def test_a_fence_that_holds_the_stream_is_one_long_block_then_many_short_ones():
    r, lost = simulate(calls=3000, gate_ns=30_000_000, gpu_ns=3500)
    occ = occupancy(r)
    assert occ.verdict == "full" and occ.blocked_ns.sum() == pytest.approx(lost, rel=0.1)
    assert occ.blocked_ns.max() > 25_000_000


def test_a_queue_below_its_ceiling_is_healthy_however_deep():
    r, lost = simulate(calls=900)
    assert lost == 0
    occ = occupancy(r)
    assert occ.verdict == "not full" and deepest(occ) > 800


def test_labels_without_an_id_are_matched_by_time():
    r, _ = simulate(calls=1200)
    calls = r.calls
    slow = np.flatnonzero(calls["end_ns"] - calls["start_ns"] > 10_000)[:7]
    r.tables["labels"] = Table(
        "labels",
        {
            "start_ns": calls["start_ns"][slow] + 500,
            "end_ns": calls["end_ns"][slow] - 500,
            "process": np.zeros(7, int),
            "thread": np.zeros(7, int),
            "label": np.full(7, Label.COMMAND_BUFFER_FULL),
        },
    )
    occ = occupancy(r)
    assert np.flatnonzero(occ.blocked).tolist() == slow.tolist() and occ.how == "labels"
    assert occ.labelled_ns == int((calls["end_ns"] - calls["start_ns"])[slow].sum()) - 7 * 1000


def test_of_two_threads_that_wait_at_once_both_are_blocked_though_only_one_has_the_label():
    r, _ = simulate(calls=2400)
    calls = r.calls
    slow = np.flatnonzero(calls["end_ns"] - calls["start_ns"] > 10_000)
    other = slow[50::7]  # another thread's, each inside the call that came before it
    calls.columns["thread"][other] = 77
    calls.columns["start_ns"][other] = calls["start_ns"][other - 1] + 100
    mine = np.setdiff1d(slow[:-1], other)
    label = {"start_ns": calls["start_ns"][mine] + 500, "end_ns": calls["end_ns"][mine] - 500}
    size = len(mine)
    r.tables["labels"] = Table(
        "labels",
        {**label, "process": np.zeros(size, int), "label": np.full(size, Label.COMMAND_BUFFER_FULL)},
    )
    occ = occupancy(r)
    assert occ.how == "labels" and occ.blocked[mine].all() and occ.blocked[other].all()
    assert not occ.blocked[slow[-1]], "what no labelled call runs beside has no label because nothing blocked it"
    r.tables["labels"].columns["correlation"] = calls["correlation"][mine]
    named = occupancy(r)
    assert named.blocked[mine].all() and not named.blocked[other].any()


def test_streams_that_share_a_channel_are_one_queue():
    r, _ = simulate(streams=2, calls=100)
    r.streams.columns["channel"] = np.array([3, 3], dtype=np.int32)
    r.streams.columns["device"] = np.array([0, 0], dtype=np.int32)
    one = occupancy(r, by_channel=True).streams
    assert len(one) == 1 and one[0].streams == [0, 1] and len(one[0].calls) == 200
    assert len(occupancy(r).streams) == 2


def test_without_device_activity_it_is_inferred_and_says_so():
    r, lost = simulate(calls=3000, executions=False)
    r.machine["queue_depth"] = 1021
    occ = occupancy(r)
    assert occ.how == "inferred" and occ.verdict == "full" and "inferred" in occ.reason
    # Work drains while the queue fills: the jump comes a little after the ceiling.
    assert occ.streams[0].ceiling == pytest.approx(1021, rel=0.1)
    assert occ.blocked_ns.sum() == pytest.approx(lost, rel=0.1)


def test_without_device_activity_fast_calls_are_healthy():
    r, _ = simulate(calls=900, executions=False)
    assert occupancy(r).verdict == "not full"


def test_the_series_of_depth_never_falls_below_zero_and_ends_where_counted(shared):
    r = shared.open("h100")
    for queue in occupancy(r).streams:
        times, depth = depth_series(r, queue)
        assert (np.diff(times) >= 0).all() and depth.min() >= 0 and depth.max() <= 1142
        assert depth[0] in (queue.before - 1, queue.before + 1)


def test_the_series_of_depth_meets_what_each_call_met_and_stays_at_the_ceiling(shared):
    r = shared.open("v100")  # has submissions without executions, which must not add up
    for queue in occupancy(r).streams:
        times, depth = depth_series(r, queue)
        assert depth.max() == queue.depth.max() + 1
        if queue.ceiling > 0:
            assert queue.ceiling == 1022 and depth.max() <= 1023
        starts = r.calls["start_ns"][queue.calls]
        before = np.searchsorted(times, starts) - 1  # the last step before each call that begins alone
        alone = (before >= 0) & ~np.isin(starts, queue.ends) & (np.diff(starts, prepend=-1) > 0)
        executed = np.maximum(queue.depth[alone], 0)
        assert (depth[before[alone]] >= executed).all()


def test_the_innermost_range_is_found_by_brute_force_too(shared):
    r = shared.open("h100")
    rows = np.flatnonzero(occupancy(r).blocked)
    found = innermost_range(r, rows)
    assert (found >= 0).any()
    ranges, calls = r.ranges, r.calls
    for row, got in zip(rows.tolist(), found.tolist(), strict=True):
        now = calls["start_ns"][row]
        around = np.flatnonzero(
            (ranges["process"] == calls["process"][row])
            & (ranges["thread"] == calls["thread"][row])
            & (ranges["start_ns"] <= now)
            & (ranges["end_ns"] > now)
        )
        best = around[np.argmax(ranges["start_ns"][around])] if len(around) else -1
        assert got == best or ranges["start_ns"][got] == ranges["start_ns"][best]


def test_an_empty_recording_is_healthy():
    r, _ = simulate(calls=0)
    occ = occupancy(r)
    assert occ.verdict == "not full" and occ.reason == "nothing was submitted to a stream"


def test_a_batch_that_fills_an_empty_queue_alone_waits_for_its_own_descriptors():
    def judged(kind):
        r, _ = simulate(calls=40, api_ns=10_000_000, gpu_ns=9_000_000)
        calls = r.calls
        calls.columns["kind"] = np.full(calls.rows, kind, dtype=np.uint8)
        r.tables["labels"] = Table(
            "labels",
            {
                "start_ns": calls["start_ns"] + 6_000_000,
                "end_ns": calls["end_ns"] - 1_000,
                "process": np.zeros(calls.rows, int),
                "label": np.full(calls.rows, Label.COMMAND_BUFFER_FULL),
            },
        )
        return occupancy(r)

    assert deepest(judged(CallKind.BATCH)) <= 1
    assert judged(CallKind.BATCH).verdict == "not full" and not judged(CallKind.BATCH).blocked.any()
    assert judged(CallKind.COPY).verdict == "full", "a label of any other call is believed"


@pytest.mark.parametrize("streams", [3, 70])  # few queues and many are told apart in two ways
def test_every_call_is_in_the_queue_of_its_stream_with_its_baseline(streams):
    r, _ = simulate(streams=streams, calls=30)
    occ = occupancy(r)
    assert sorted(q.stream for q in occ.streams) == list(range(streams))
    for queue in occ.streams:
        assert queue.calls.tolist() == np.flatnonzero(r.calls["stream"] == queue.stream).tolist()
        assert set(occ.baseline_ns[queue.calls].tolist()) == set(queue.baseline_ns.values()) and occ.baseline_ns[0] > 0


@pytest.mark.parametrize("seed", range(60))
def test_what_never_executed_goes_where_its_thread_last_submitted_else_where_it_next_does(seed):
    rng = np.random.default_rng(seed)
    r, _ = simulate(streams=3, calls=1 + seed % 4)
    order = np.argsort(r.calls["start_ns"], kind="stable")
    columns = {name: column[order] for name, column in r.calls.columns.items()}
    count = len(order)
    columns["thread"] = rng.integers(100, 103, count)
    known = columns["stream"].copy()
    known[rng.random(count) < 0.5] = -1
    columns["stream"] = known.astype(np.int32)
    r.tables["calls"] = Table("calls", columns)
    expected = known.copy()
    for walk in (range(count), range(count - 1, -1, -1)):
        last = {}
        for row in walk:
            thread = int(columns["thread"][row])
            expected[row] = last.get(thread, -1) if expected[row] < 0 else expected[row]
            if expected[row] >= 0:
                last[thread] = expected[row]
    found = np.full(count, -1)
    for queue in occupancy(r).streams:
        found[queue.calls] = queue.stream
    assert found.tolist() == expected.tolist()


@pytest.mark.parametrize("seed", range(6))
def test_the_series_of_depth_is_what_counting_gives(seed):
    rng = np.random.default_rng(seed)
    r, _ = simulate(streams=1, calls=40, gpu_ns=int(rng.integers(500, 4_000)), think_ns=int(rng.integers(0, 3_000)))
    kept = int(rng.integers(0, 20))  # the recording begins later: some are in flight then, and nobody submitted them
    r.tables["calls"] = r.calls.where(np.arange(kept, 40))
    (queue,) = occupancy(r).streams
    times, depth = depth_series(r, queue)
    starts, ends = r.calls["start_ns"], queue.ends
    assert times.tolist() == sorted([*starts.tolist(), *ends.tolist()])
    for at, level in zip(times.tolist(), depth.tolist(), strict=True):
        if (times == at).sum() == 1:
            assert level == queue.before + (starts <= at).sum() - (ends <= at).sum()
    assert queue.before == (ends < r.executions["end_ns"][kept]).sum() and depth[-1] == 0


def test_of_a_stream_of_which_nothing_ran_all_is_outstanding():
    r, _ = simulate(streams=2, calls=10)
    r.tables["executions"] = r.executions.where(np.flatnonzero(r.executions["stream"] == 0))
    one, other = sorted(occupancy(r).streams, key=lambda queue: queue.stream)
    assert (one.after, other.after) == (0, 10) and other.depth.tolist() == list(range(10))


def test_an_end_that_a_clock_puts_before_its_call_makes_no_depth_below_zero():
    r, _ = simulate(calls=3)
    r.executions.columns["end_ns"][:] = r.calls["start_ns"] - 100
    (queue,) = occupancy(r).streams
    assert depth_series(r, queue)[1].min() == 0


@pytest.mark.parametrize(("more_ns", "verdict"), [(650, "not full"), (750, "not full"), (751, "cannot tell")])
def test_calls_that_cost_a_little_more_at_the_top_are_no_full_queue(more_ns, verdict):
    """Calls of 1 us take 0.5 us more within bounds, and a full queue more than a quarter of one beyond them."""
    r, _ = simulate(calls=900, jitter=0, api_ns=1_000)
    depth = occupancy(r).streams[0].depth
    r.calls.columns["end_ns"][depth >= depth.max() - 20] += more_ns
    occ = occupancy(r)
    assert occ.verdict == verdict
    assert ("took no longer with up to" in occ.reason) == (verdict == "not full")


def test_a_return_so_near_an_end_is_aligned_and_instants_on_both_sides_are_tried():
    ends, long = np.array([100_000]), np.array([200_000])
    assert _alignment(ends, np.array([120_000]), long)[0] == 1.0
    assert _alignment(ends, np.array([120_001]), long)[0] == 0.0
    assert _alignment(ends, np.array([200_000]), long)[1] == 5 / 40  # every 10 µs, 200 µs to each side
    assert _alignment(ends, np.array([10_000]), long)[1] == 5 / 40


@pytest.mark.parametrize(("early_ns", "late_ns", "found"), [(1_000, 1_000, True), (1_001, 0, False), (0, 1_001, False)])
def test_a_label_may_stand_out_of_its_call_by_a_microsecond(early_ns, late_ns, found):
    r, _ = simulate(calls=40, api_ns=20_000, think_ns=50_000)
    begin, end = int(r.calls["start_ns"][7]), int(r.calls["end_ns"][7])
    label = {"start_ns": [begin - early_ns], "end_ns": [end + late_ns], "process": [0]}
    r.tables["labels"] = Table("labels", label | {"label": [Label.COMMAND_BUFFER_FULL]})
    assert occupancy(r).blocked.tolist() == [found and row == 7 for row in range(40)]
