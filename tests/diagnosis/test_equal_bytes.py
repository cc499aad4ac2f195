"""Copies of the same addresses are redundant where looks at their bytes say so, and only there."""

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "recordings"))

from copies import GPU, HOST, KiB, recording

from kvprobe.diagnosis import examine
from kvprobe.recordings.model import CallKind, Direction, Engine, Table

MiB = 1 << 20


def made(calls, bytes_of, every=1, blank=0):
    """A recording with a look at the host's side of each `every`th copy: `bytes_of(number)` stands for its bytes."""
    out = recording([*calls, *({"kind": CallKind.LAUNCH, "stream": 1} for _ in range(8))])
    table = out.calls
    rows = np.flatnonzero(table["bytes"] > 0)[::every]
    columns = {name: table[name][rows] for name in ("process", "thread", "stream", "direction", "src", "dst", "bytes")}
    columns["time_ns"] = table["start_ns"][rows]
    columns["hash"] = np.array([bytes_of(number) for number in range(0, len(rows) * every, every)], dtype=np.uint64)
    out.tables["contents"] = Table("contents", {**columns, "blank": np.full(len(rows), blank)})
    return out


def found(recording, cause):
    return {one.cause: one for one in examine(recording)}.get(cause)


def steps(size, blocks=8, many=100, place=lambda step, block: block, direction=Direction.H2D, stream=1):
    """At each step the same blocks of the host, to `place` on the device on stream 0, and a wait for `stream`."""
    calls = []
    for step in range(many):
        for block in range(blocks):
            ends = {"src": HOST + block * size, "dst": GPU + place(step, block) * size}
            if direction == Direction.D2H:
                ends = {"src": ends["dst"], "dst": ends["src"]}
            calls.append({**ends, "bytes": size, "kind": CallKind.COPY, "direction": direction})
        calls.append({"kind": CallKind.SYNC, "stream": stream, "dur_ns": 1_000_000})
    return calls


def batches(many=400):
    """A batch of the same 40 blocks, by the first address, and a wait for it, again and again."""
    call = {"src": HOST, "dst": GPU, "bytes": MiB, "count": 40, "kind": CallKind.BATCH, "direction": Direction.H2D}
    return [call, {"kind": CallKind.SYNC, "stream": 1, "dur_ns": 1_000_000}] * many


def test_a_batch_is_judged_by_the_bytes_of_its_copies():
    """In a recording without looks two batches with one first address are likely the same."""
    one = found(made(batches(), lambda number: 7), "redundant_loads")
    assert one.confidence == "likely" and one.evidence[0].value == 399 * MiB
    assert found(made(batches(), lambda number: number), "redundant_loads") is None


@pytest.mark.parametrize("size", [4 * KiB, MiB])
def test_buffers_that_the_program_rewrites_are_never_redundant(size):
    assert found(made(steps(size), lambda number: number), "redundant_loads") is None


@pytest.mark.parametrize("every", [1, 3])
def test_equal_bytes_at_one_place_are_redundant(every):
    one = found(made(steps(MiB), lambda number: number % 8, every), "redundant_loads")
    assert one.confidence == "likely"
    assert one.evidence[0].value == 99 * 8 * MiB
    assert any("sources whose bytes were compared" in said.text for said in one.evidence)


def test_equal_bytes_to_another_place_are_redundant_while_the_first_place_holds_them():
    own = steps(MiB, place=lambda step, block: step % 4 * 8 + block)
    assert found(made(own, lambda number: number % 8), "redundant_loads").evidence[0].value == 99 * 8 * MiB
    assert found(made(own, lambda number: number), "redundant_loads") is None


@pytest.mark.parametrize(("kernels", "redundant"), [(1, False), (0, True)])
def test_of_loads_between_kernels_of_their_stream_another_place_tells_nothing(kernels, redundant):
    """What a load brought is the memory of a tensor, which an allocator gives to the kernels behind it."""
    own = steps(MiB, place=lambda step, block: step % 4 * 8 + block)
    calls = [one for call in own for one in (call, *[{"kind": CallKind.LAUNCH}] * (kernels if "src" in call else 0))]
    assert (found(made(calls, lambda number: number % 8), "redundant_loads") is not None) == redundant


def test_blocks_whose_place_was_given_to_others_are_needed_again():
    """Twice as many blocks as places: each load throws out what the one before it brought there."""
    calls = steps(MiB, blocks=16, place=lambda step, block: block % 8)
    assert found(made(calls, lambda number: number % 16), "redundant_loads") is None


def test_equal_bytes_that_come_to_another_place_much_later_may_have_been_evicted():
    calls = [{**call, "gap_ns": 200_000_000} for call in steps(MiB, blocks=1, place=lambda step, block: step)]
    assert found(made(calls, lambda number: 1), "redundant_loads") is None


def test_without_looks_small_buffers_in_place_are_not_named_and_large_ones_are():
    assert found(recording([*steps(4 * KiB), *[{"kind": CallKind.LAUNCH}] * 8]), "redundant_loads") is None
    large = found(recording([*steps(MiB), *[{"kind": CallKind.LAUNCH}] * 8]), "redundant_loads")
    assert large.confidence == "likely"


def test_buffers_at_which_nobody_looked_while_others_were_looked_at_are_an_open_question():
    """Looks were taken at one rewritten buffer of another size alone."""
    out = made([*steps(MiB), *steps(2 * KiB, blocks=1)], lambda number: number)
    table = out.contents
    out.tables["contents"] = table.where(table["bytes"] == 2 * KiB)
    one = found(out, "redundant_loads")
    assert one.abstains and "nobody looked" in one.reason


def test_stores_of_bytes_that_the_host_has_are_wasted():
    stores = steps(MiB, direction=Direction.D2H, stream=0)
    one = found(made(stores, lambda number: number % 8), "wasted_stores")
    assert one.confidence == "likely" and "bytes that the host already had" in one.title
    assert found(made(stores, lambda number: number), "wasted_stores").abstains
    assert found(made(stores, lambda number: number % 8, blank=1), "wasted_stores").abstains


def test_a_store_that_may_not_be_over_proves_nothing_about_the_next_one():
    """The thread waits for another stream: the second look at a place may see what was there before both stores."""
    stores = steps(MiB, direction=Direction.D2H)
    equal = made(stores, lambda number: number % 8)
    assert found(equal, "wasted_stores").abstains
    calls = equal.calls
    copies = np.flatnonzero(calls["bytes"] > 0)
    marks = {"given_ns": calls["end_ns"][copies] + 100, "stream": np.zeros(len(copies), dtype=np.int32)}
    equal.tables["marks"] = Table("marks", {**marks, "done_ns": calls["end_ns"][copies] + 400_000})
    assert found(equal, "wasted_stores").confidence == "likely"


def test_bytes_that_change_are_not_equal_because_the_first_look_came_before_the_first_store_was_over():
    """Two steps are submitted before the first store is over: both see what was there; then each is another word."""
    out = made(
        steps(MiB, direction=Direction.D2H, stream=0),
        lambda number: number % 8 if number < 16 else number,
    )
    table = out.contents
    blank = np.arange(table.rows) >= 16
    out.tables["contents"] = Table(
        "contents", {**{name: table[name] for name in table.columns}, "blank": blank.astype(np.uint8)}
    )
    assert found(out, "wasted_stores").abstains


def test_where_timing_events_saw_the_copies_their_time_is_what_was_lost():
    out = made(steps(MiB), lambda number: number % 8)
    first, last = int(out.calls["start_ns"].min()), int(out.calls["end_ns"].max())
    start = np.arange(first, last, 1_000_000)[:90]
    columns = {"start_ns": start, "end_ns": start + 400_000, "engine": np.full(90, Engine.COPY)}
    out.tables["spans"] = Table(
        "spans", {**columns, "direction": np.full(90, Direction.H2D), "bytes": np.full(90, MiB)}
    )
    one = found(out, "redundant_loads")
    assert one.lost_on == "copy engine" and one.lost_ns == pytest.approx(90 * 400_000, rel=0.03)


def looked(out, has, every=1, **error):
    """`out`, with looks at the device right before each `every`th load: `has(number)`, whether it still had them."""
    calls = out.calls
    rows = np.flatnonzero(calls["bytes"] > 0)
    number = np.arange(len(rows))[::every]
    columns = {name: calls[name][rows[::every]] for name in ("process", "dst")} | {
        "time_ns": calls["start_ns"][rows[::every]]
    }
    columns |= {"looked": np.full(len(number), 1024), "same": np.array([has(one) for one in number.tolist()], np.uint8)}
    out.tables["destinations"] = Table("destinations", {**columns, **error})
    return out


def texts(finding):
    return " ".join(said.text for said in finding.evidence)


@pytest.mark.parametrize("every", [1, 7, 797])
def test_equal_bytes_that_the_device_still_had_are_redundant_and_the_finding_says_who_looked(every):
    one = found(looked(made(steps(MiB), lambda number: number % 8), lambda number: True, every), "redundant_loads")
    assert one.evidence[0].value == 99 * 8 * MiB
    assert "times they were still there" in texts(one) and "nobody looked at the GPU's" not in texts(one)


@pytest.mark.parametrize("every", [1, 7, 797])
def test_equal_bytes_that_a_kernel_had_written_over_are_needed(every):
    out = looked(made(steps(MiB), lambda number: number % 8), lambda number: number == 0, every)
    assert found(out, "redundant_loads") is None


def test_bytes_on_their_way_to_a_place_whose_bytes_change_in_between_are_needed():
    """The host runs ahead: each load is submitted before the one before it has ended, with a kernel between the two."""
    calls = [call for call in steps(MiB) if call["kind"] == CallKind.COPY]
    assert found(made(calls, lambda number: number % 8), "redundant_loads") is not None
    out = looked(made(calls, lambda number: number % 8), lambda number: False, 10)
    assert found(out, "redundant_loads") is None


def test_places_that_were_looked_at_often_are_told_apart():
    """A kernel writes over half of the blocks: the loads of the others are not needed."""
    one = found(
        looked(made(steps(MiB), lambda number: number % 8), lambda number: number % 8 < 4, 3), "redundant_loads"
    )
    assert one.evidence[0].value == 99 * 4 * MiB
    assert "396 more loads do not count" in texts(one)


def test_places_that_were_looked_at_a_few_times_follow_all_of_their_size():
    """A small part of each is rewritten: most looks miss it, and some places have none that hit it."""
    out = looked(made(steps(MiB), lambda number: number % 8), lambda number: number % 5 > 0, 11)
    assert found(out, "redundant_loads") is None


def test_a_load_to_another_place_is_judged_without_looks_at_the_device():
    own = steps(MiB, place=lambda step, block: step % 4 * 8 + block)
    out = looked(made(own, lambda number: number % 8), lambda number: False)
    one = found(out, "redundant_loads")
    assert one.evidence[0].value == 99 * 8 * MiB and "nobody looked at the GPU's own bytes for 792" in texts(one)


def test_where_no_look_at_the_device_was_possible_the_finding_says_so():
    one = found(made(steps(MiB), lambda number: number % 8), "redundant_loads")
    assert "nobody looked at the GPU's own bytes for 792 of them: a kernel may have" in texts(one)
    out = looked(made(steps(MiB), lambda number: number % 8), lambda number: True, 10**6, error=[13])
    table = out.destinations
    out.tables["destinations"] = Table(
        "destinations", {**{name: table[name] for name in table.columns}, "looked": np.zeros(1, np.int64)}
    )
    assert "failed with error 13" in texts(found(out, "redundant_loads"))


@pytest.mark.parametrize(
    ("places", "change"), [(1, "Remember what each place on the GPU holds"), (4, "Keep blocks that several requests")]
)
def test_what_is_still_in_its_place_is_to_be_remembered_and_what_went_elsewhere_is_to_be_shared(places, change):
    own = steps(MiB, place=lambda step, block: step % places * 8 + block)
    assert found(made(own, lambda number: number % 8), "redundant_loads").cure[0].text.startswith(change)
