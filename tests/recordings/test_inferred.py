"""Full queues where the device was not recorded: named with evidence, and nothing else taken for one."""

from __future__ import annotations

import numpy as np
import pytest
from queue_model import simulate

from kvprobe.recordings.model import CallKind, Label, Recording, Source, Table
from kvprobe.recordings.occupancy import occupancy

DEPTH = 1021


def with_waits(recording, name, waits, stream=-1):
    """The recording with calls of this name, as (thread, start, end)."""
    calls = dict(recording.calls.columns)
    thread, start, end = np.array(waits, dtype=np.int64).reshape(-1, 3).T
    recording.names.append(name)
    more = {
        "start_ns": start,
        "end_ns": end,
        "thread": thread,
        "name": np.full(len(start), len(recording.names) - 1),
        "kind": np.full(len(start), CallKind.SYNC),
        "stream": np.full(len(start), stream),
        "process": np.zeros(len(start)),
    }
    rest = Table("calls", more)
    order = np.argsort(np.r_[calls["start_ns"], start], kind="stable")
    recording.tables["calls"] = Table("calls", {k: np.r_[v, rest[k]][order] for k, v in calls.items()})
    return recording


def submissions(recording):
    rows = np.flatnonzero(recording.calls["kind"] == CallKind.COPY)
    return recording.calls["start_ns"][rows], recording.calls["end_ns"][rows]


def events_meanwhile(recording):
    """Waits for events of another stream, by the submitting thread and by another one, all over the recording."""
    start, end = submissions(recording)
    at = np.arange(50, len(end) - 1, 97)
    waits = [(100 if i % 2 else 7, end[row], start[row + 1] if i % 2 else end[row] + 10) for i, row in enumerate(at)]
    return with_waits(recording, "cudaEventSynchronize", waits)


@pytest.mark.parametrize("chunk", [1, 6])
@pytest.mark.parametrize(("burst", "pause_ns"), [(0, 0), (200, 2_500_000), (1500, 12_000_000), (600, 60_000_000)])
def test_a_full_queue_is_named_through_pauses_and_waits_for_events(burst, pause_ns, chunk):
    r, lost = simulate(calls=9000, executions=False, burst=burst, pause_ns=pause_ns, chunk=chunk)
    events_meanwhile(r).machine["queue_depth"] = DEPTH
    occ = occupancy(r)
    if lost:
        assert occ.verdict == "full" and occ.how == "inferred" and "inferred" in occ.reason
        assert occ.blocked_ns.sum() == pytest.approx(lost, rel=0.1)
        assert occ.streams[0].ceiling == pytest.approx(DEPTH, rel=0.05) and occ.streams[0].plateau[0] > 0.89 * DEPTH
    else:
        assert occ.verdict == "not full" and not occ.blocked.any()


def test_a_wait_for_the_stream_empties_it_and_a_wait_for_an_event_does_not():
    r, _ = simulate(calls=6000, executions=False, burst=1500, pause_ns=25_000_000)
    _, end = submissions(r)
    after = np.arange(1499, 5999, 1500)
    waits = [(100, end[row], end[row] + 24_000_000) for row in after]
    found = {}
    for name, stream in (
        ("cudaStreamSynchronize", 0),
        ("cudaStreamSynchronize", -1),
        ("cudaEventSynchronize", 0),
        ("cudaDeviceSynchronize", -1),
    ):
        waited = with_waits(
            simulate(calls=6000, executions=False, burst=1500, pause_ns=25_000_000)[0], name, waits, stream
        )
        waited.machine["queue_depth"] = DEPTH
        (queue,) = occupancy(waited).streams
        found[name, stream] = queue.depth[after[:-1] + 1].tolist()
        assert queue.verdict == "full"
    assert found["cudaStreamSynchronize", 0] == found["cudaDeviceSynchronize", -1] == [0, 0]
    drained = found["cudaEventSynchronize", 0]
    assert drained == found["cudaStreamSynchronize", -1] and all(0 <= depth < 300 for depth in drained)


def test_a_recording_that_begins_with_a_full_queue_tells_by_what_follows():
    r, _ = simulate(calls=9000, executions=False, burst=3000, pause_ns=60_000_000)
    kept = np.arange(1500, 9000)  # the ring was overwritten: the first calls that are left are blocked
    r.tables["calls"] = r.calls.where(kept)
    r.lost[0], r.machine["queue_depth"] = 1500, DEPTH
    occ = occupancy(r)
    spent = r.calls["end_ns"] - r.calls["start_ns"]
    spent = spent[np.argmax(spent < 5000) :]  # before the first quick call, quick ones may be missing
    assert occ.verdict == "full" and occ.blocked_ns.sum() == pytest.approx(spent[spent > 5000].sum(), rel=0.1)


def test_without_a_calibrated_depth_the_bursts_must_agree_on_one_that_queues_have():
    def verdict(**how):
        r, _ = simulate(calls=9000, executions=False, **how)
        return occupancy(r).verdict

    assert verdict(burst=3000, pause_ns=60_000_000) == "full"  # 1,021
    assert verdict(burst=3000, pause_ns=200_000_000, cap=500) == "full"  # three times the same
    assert verdict(burst=3000, pause_ns=200_000_000, cap=64) == "cannot tell"  # no GPU's queue is so short
    assert verdict(cap=500) == "cannot tell"  # once is chance


def flood(calls, took, between_ns=300, seed=1):
    """A recording of one thread that submits without a pause; `took` in ns, one for each call."""
    end = np.cumsum(took + between_ns)
    r, _ = simulate(calls=calls, executions=False)
    r.tables["calls"] = Table("calls", {**r.calls.columns, "start_ns": end - took, "end_ns": end})
    return r


def test_small_blocks_that_flood_a_stream_are_a_full_queue():
    rng = np.random.default_rng(3)
    took = rng.integers(950, 1_150, 60_000)
    full = round(1_021 / (1 - 1_350 / 2_800))  # meanwhile a good half of them is copied
    took[full:] = rng.integers(2_300, 2_700, 60_000 - full)  # 4 KiB blocks: 2.4 times the baseline
    (queue,) = occupancy(flood(60_000, took)).streams
    assert queue.verdict == "full" and "without a pause" in queue.reason
    assert queue.blocked_ns.sum() == pytest.approx(60_000 * 1_450, rel=0.1)


def test_a_thread_that_waits_for_a_cpu_proves_no_full_queue_by_its_pace():
    rng = np.random.default_rng(3)
    took = rng.integers(950, 1_150, 60_000)
    took[2_000:] = rng.integers(2_300, 2_700, 58_000)
    recording = flood(60_000, took)
    start, end = int(recording.calls["start_ns"][0]), int(recording.calls["end_ns"][-1])
    assert occupancy(recording).verdict == "full"
    for share, verdict in ((0.05, "full"), (0.3, "cannot tell")):
        waits = {"start_ns": [start], "end_ns": [end], "waited_ns": [int(share * (end - start))]}
        thread = {"process": [0], "thread": recording.calls["thread"][:1]}
        recording.tables["cpu_waits"] = Table("cpu_waits", waits | thread)
        assert occupancy(recording).verdict == verdict


def test_what_a_thread_does_after_the_last_look_at_it_counts_as_what_was_seen_last():
    rng = np.random.default_rng(3)
    took = rng.integers(950, 1_150, 60_000)
    took[2_000:] = rng.integers(2_300, 2_700, 58_000)
    recording = flood(60_000, took)  # the last 160 ms of a program, of which the ring keeps no more
    start, thread = int(recording.calls["start_ns"][0]), int(recording.calls["thread"][0])

    def verdict(*notes):
        """Of notes: begin and end in ms before the first call, part of it waited, thread."""
        begin, end, share, whose = (np.array(column) for column in zip(*notes, strict=True))
        begin, end = start - begin * 1_000_000, start - end * 1_000_000
        waits = {"start_ns": begin, "end_ns": end, "waited_ns": (share * (end - begin)).astype(np.int64)}
        process = np.zeros(len(notes), dtype=np.int64)
        recording.tables["cpu_waits"] = Table("cpu_waits", waits | {"process": process, "thread": whose})
        return occupancy(recording).verdict

    assert verdict((30, 0, 0.7, thread)) == "cannot tell"
    assert verdict((30, 5, 0.7, thread)) == "cannot tell"
    assert verdict((600, 300, 0.7, thread)) == "full"  # it says nothing of what is later than the next look
    assert verdict((5_000, 0, 0.7, thread)) == "cannot tell"
    assert verdict((30, 0, 0.1, thread)) == "full"
    assert verdict((30, 0, 0.7, thread + 1)) == "full"
    assert verdict((60, 30, 0.7, thread), (30, 0, 0.01, thread)) == "full"  # the last look counts


def test_slow_calls_whose_threads_waited_for_a_cpu_leave_a_queue_healthy():
    took = np.full(20_000, 1_000)
    took[::500] = 4_000_000
    recording = flood(20_000, took)
    start, end = (recording.calls[name][::500] for name in ("start_ns", "end_ns"))

    def verdict(waited_ns, later_ns=0):
        waits = {"start_ns": start - 1_000_000 + later_ns, "end_ns": end + 1_000_000 + later_ns}
        same = {"process": np.zeros(40), "thread": recording.calls["thread"][:40]}
        recording.tables["cpu_waits"] = Table("cpu_waits", waits | same | {"waited_ns": np.full(40, waited_ns)})
        return occupancy(recording).verdict

    assert verdict(4_000_000) == "not full" and "had no CPU" in occupancy(recording).reason
    assert verdict(2_000_000) == verdict(4_000_000, later_ns=12_000_000) == "cannot tell"


def test_calls_that_are_as_slow_with_room_are_no_full_queue():
    rng = np.random.default_rng(4)
    took = np.where(rng.random(60_000) < 0.2, 9_000, 1_000) + rng.integers(0, 100, 60_000)
    assert occupancy(flood(60_000, took)).verdict != "full"  # a fifth is slow from the first call on
    assert occupancy(flood(60_000, rng.integers(950, 1_250, 60_000))).verdict == "not full"


def test_the_recorders_own_calls_are_not_judged():
    r, lost = simulate(calls=3000, executions=False)
    r.machine["queue_depth"] = DEPTH
    assert lost and occupancy(r).verdict == "full"
    start, end = submissions(r)
    r.tables["labels"] = Table(
        "labels", {"start_ns": [start[0]], "end_ns": [end[-1]], "process": [0], "label": [Label.INSTRUMENTATION]}
    )
    assert occupancy(r).verdict == "not full"


def with_transfers(recording, size=64):
    """The same without device activity, but with the transfers of an engine, of this many copies each."""
    calls, done = recording.calls, recording.executions
    first = np.arange(0, calls.rows, size)
    last = np.minimum(first + size, calls.rows) - 1
    recording.tables["calls"] = Table("calls", {**calls.columns, "transfer": 1 + np.arange(calls.rows) // size})
    recording.tables["transfers"] = Table(
        "transfers",
        {
            "start_ns": calls["start_ns"][first],
            "end_ns": done["end_ns"][last],
            "process": np.zeros(len(first), int),
            "thread": calls["thread"][first],
            "stream": np.zeros(len(first), int),
            "transfer": 1 + np.arange(len(first)),
            "copy_ns": done["end_ns"][last] - done["start_ns"][first],
            "poll_ns": np.zeros(len(first), int),
            "ok": np.ones(len(first), int),
        },
    )
    recording.tables["executions"], recording.has_executions = Table("executions"), False
    return recording


@pytest.mark.parametrize("depth", [DEPTH, None])
@pytest.mark.parametrize(("burst", "pause_ns"), [(0, 0), (1500, 12_000_000)])
def test_what_is_outstanding_is_counted_from_transfers_where_an_engine_tells_them(burst, pause_ns, depth):
    r, lost = simulate(calls=9000, burst=burst, pause_ns=pause_ns)
    if depth:
        r.machine["queue_depth"] = depth
    occ = occupancy(with_transfers(r))
    assert occ.verdict == "full" and "ends of transfers" in occ.reason
    assert occ.blocked_ns.sum() == pytest.approx(lost, rel=0.1)
    assert occ.streams[0].ceiling == pytest.approx(DEPTH, rel=0.05)


def test_an_engine_whose_queue_has_room_is_healthy():
    r, lost = simulate(calls=9000, burst=600, pause_ns=60_000_000)
    r.machine["queue_depth"] = DEPTH
    occ = occupancy(with_transfers(r))
    assert not lost and occ.verdict == "not full" and "ends of transfers" in occ.reason


def fenced(at, bursts=4, per=3000, waits=True, ns=90_000_000):
    """Bursts of copies of which one call each, its place given by `at(burst)`, waits for `ns`, or each its own."""
    place = np.tile(np.arange(per), bursts)
    duration = np.full(bursts * per, 1500, dtype=np.int64)
    for burst in range(bursts):
        duration[burst * per + at(burst)] = np.broadcast_to(ns, bursts)[burst]
    start = np.r_[0, np.cumsum(duration + np.where(place == per - 1, 30_000_000, 200))[:-1]]
    zero = np.zeros(len(start), int)
    tables = {
        "calls": Table(
            "calls",
            {
                "start_ns": start,
                "end_ns": start + duration,
                "process": zero,
                "thread": zero + 100,
                "name": zero + 1,
                "kind": zero + CallKind.COPY,
                "stream": zero,
                "count": zero + 1,
            },
        ),
        "streams": Table("streams", {"process": [0], "handle": [7]}),
        "processes": Table("processes", {"pid": [1]}),
    }
    r = Recording([Source("made", "test")], tables, ["", "cudaMemcpyAsync"])
    if waits:
        ends = (start + duration)[per - 1 :: per]
        with_waits(r, "cudaStreamSynchronize", [(100, end + 100, end + 25_000_000) for end in ends], stream=0)
    return r


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("depth", [DEPTH, None])
def test_one_wait_a_burst_behind_a_fence_is_a_full_queue(depth, waits):
    r = fenced(lambda burst: DEPTH - burst % 2, waits=waits)
    if depth:
        r.machine["queue_depth"] = depth
    occ = occupancy(r)
    assert occ.verdict == "full" and int(occ.blocked.sum()) == 4
    assert occ.blocked_ns.sum() == pytest.approx(4 * 90_000_000, rel=0.01)
    assert "number 1,021 to 1,022" in occ.reason and occ.streams[0].ceiling == DEPTH


def test_one_wait_is_enough_where_the_stream_was_known_to_be_empty():
    assert occupancy(fenced(lambda burst: DEPTH, bursts=1)).verdict == "full"


def test_a_stall_elsewhere_that_is_far_shorter_does_not_speak_against_it():
    """A rank that stores for the first time: one call takes 1.4 ms early, and one 93 ms where the queue is full."""
    places = [14, DEPTH]
    occ = occupancy(fenced(lambda burst: places[burst], bursts=2, ns=[1_400_000, 93_000_000]))
    assert occ.verdict == "full" and occ.blocked_ns.sum() == pytest.approx(93_000_000, rel=0.01)
    assert occupancy(fenced(lambda burst: places[burst], bursts=2, ns=[20_000_000, 93_000_000])).verdict != "full"


def one_wait(place, *, first_ns=1_100_000, meanwhile=None, other=CallKind.ALLOC):
    """100 quick copies, then a burst by a new thread: its first call is slow, and one at a place waits for 50 ms.

    The call behind it waits for 1 ms. `meanwhile`: a call of another thread, as (begin, end) from the wait's own.
    """
    duration = np.full(1_300, 1_500, dtype=np.int64)
    duration[[100, 100 + place, 101 + place]] = first_ns, 50_000_000, 1_000_000
    gap = np.full(1_300, 200)
    gap[99] = 5_000_000
    start = np.r_[0, np.cumsum(duration + gap)[:-1]]
    zero = np.zeros(1_300, int)
    columns = {
        "start_ns": start,
        "end_ns": start + duration,
        "process": zero,
        "thread": 100 + (np.arange(1_300) >= 100),
    }
    columns |= {"name": zero + 1, "kind": zero + CallKind.COPY, "stream": zero, "count": zero + 1}
    if meanwhile:
        begin, end = start[100 + place] + meanwhile[0], start[100 + place] + 50_000_000 + meanwhile[1]
        more = {"start_ns": begin, "end_ns": end, "process": 0, "thread": 7, "name": 2, "kind": other, "stream": -1}
        columns = {name: np.append(column, more.get(name, 0)) for name, column in columns.items()}
    tables = {
        "calls": Table("calls", {name: column[np.argsort(columns["start_ns"])] for name, column in columns.items()}),
        "streams": Table("streams", {"process": [0], "handle": [7]}),
        "processes": Table("processes", {"pid": [1]}),
    }
    return Recording([Source("made", "test")], tables, ["", "cudaMemcpyAsync", "cudaMalloc"])


@pytest.mark.parametrize("end", [-10_000, 990_000])
def test_one_wait_is_enough_where_another_thread_waited_for_the_lock_that_it_held(end):
    """It went on with the call that waited, or with the one that waited right behind it."""
    occ = occupancy(one_wait(DEPTH, meanwhile=(20_000_000, end)))
    assert occ.verdict == "full" and int(occ.blocked.sum()) == 2
    assert occ.blocked_ns.sum() == pytest.approx(51_000_000, rel=0.01)
    assert "number 1,022" in occ.reason


@pytest.mark.parametrize(
    "made",
    [
        {"place": DEPTH},  # nobody tells that it held the lock
        {"place": DEPTH, "meanwhile": (-1_000_000, 0)},  # began before: it may be what the copy waits for
        {"place": DEPTH, "meanwhile": (20_000_000, -5_000_000)},  # ended by itself
        {"place": DEPTH, "meanwhile": (20_000_000, 0), "other": CallKind.SYNC},  # wants no lock
        {"place": 600, "meanwhile": (20_000_000, 0)},  # where no queue is full
    ],
)
def test_one_wait_alone_is_not(made):
    occ = occupancy(one_wait(**made))
    assert occ.verdict != "full" and not occ.blocked.any()


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("depth", [DEPTH, None])
@pytest.mark.parametrize("bursts", [1, 4])
def test_one_wait_a_burst_somewhere_else_is_not(bursts, depth, waits):
    for seed in range(20):
        rng = np.random.default_rng(seed)
        places = [DEPTH, *rng.integers(0, 950, 2), *rng.integers(1100, 3000, 2)]
        r = fenced(lambda burst, places=places, seed=seed: places[(burst + 1 + seed % 4) % 5], bursts, waits=waits)
        if depth:
            r.machine["queue_depth"] = depth
        occ = occupancy(r)
        assert occ.verdict != "full" and not occ.blocked.any(), (seed, occ.reason)


# ---- slow calls of other causes --------------------------------------------------------------------------------------


def healthy(rng, slow, per=200, step_ns=20_000_000, calls=12_000):
    """Copies in steps that never fill a queue; `slow` adds ns to some of them, by their places in a step."""
    place = np.arange(calls) % per
    duration = 1000 * (1 + 0.2 * rng.random(calls)) + slow(place)
    gap = np.where(place == per - 1, step_ns - per * 1100, 100)
    start = np.r_[0, np.cumsum(duration + gap)[:-1]].astype(np.int64)
    zero = np.zeros(calls, int)
    tables = {
        "calls": Table(
            "calls",
            {
                "start_ns": start,
                "end_ns": start + duration.astype(np.int64),
                "process": zero,
                "thread": zero + 100,
                "name": zero + 1,
                "kind": zero + CallKind.COPY,
                "stream": zero,
                "count": zero + 1,
            },
        ),
        "streams": Table("streams", {"process": [0], "handle": [7]}),
        "processes": Table("processes", {"pid": [1]}),
    }
    return Recording([Source("made", "test")], tables, ["", "cudaMemcpyAsync"])


def anywhere(rng, share, ns):
    """Another thread holds the interpreter now and then."""
    return lambda place: np.where(rng.random(len(place)) < share, ns * rng.random(len(place)), 0)


def stretches(rng, ns):
    """Something else makes some hundreds of calls slow, at any time."""

    def slow(place):
        out = np.zeros(len(place))
        for _ in range(12):
            at = rng.integers(0, len(place))
            out[at : at + rng.integers(20, 900)] = ns
        return out * (1 + 0.3 * rng.random(len(place)))

    return slow


def from_a_time_on(rng, ns):
    """Every call becomes dearer at some time: a profiler was attached."""
    return lambda place: np.where(np.arange(len(place)) > rng.integers(900, len(place)), ns, 0)


def first_of_a_step(rng, ns):
    """Caches went cold in the pause."""
    return lambda place: np.where(place < rng.integers(1, 60), ns, 0)


def last_of_a_step(rng, ns):
    """The later pieces are larger."""
    return lambda place: np.where(place > rng.integers(60, 190), ns, 0)


SHAPES = {
    "rarely": lambda rng: anywhere(rng, 0.02, 5e6),
    "often": lambda rng: anywhere(rng, 0.5, 6e4),
    "stretches": lambda rng: stretches(rng, rng.choice([5e3, 6e4, 3e5])),
    "from a time on": lambda rng: from_a_time_on(rng, rng.choice([3e3, 2e4, 1e5])),
    "first of a step": lambda rng: first_of_a_step(rng, rng.choice([5e3, 6e4])),
    "last of a step": lambda rng: last_of_a_step(rng, rng.choice([5e3, 3e4])),
}


@pytest.mark.parametrize("lost", [0, 1000])
@pytest.mark.parametrize("depth", [DEPTH, None])
@pytest.mark.parametrize("shape", SHAPES)
def test_calls_that_are_slow_for_another_reason_are_not_taken_for_a_full_queue(shape, depth, lost):
    for seed in range(12):
        rng = np.random.default_rng(seed)
        r = healthy(rng, SHAPES[shape](rng), step_ns=int(rng.choice([2_000_000, 20_000_000])))
        if depth:
            r.machine["queue_depth"] = depth
        if lost:
            r.lost[0] = lost
        occ = occupancy(r)
        assert occ.verdict != "full" and not occ.blocked.any(), (seed, occ.reason)
