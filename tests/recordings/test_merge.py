"""Several recordings on one clock: what ran together keeps its distance, what ran apart begins together."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from queue_model import simulate

from kvprobe.recordings import open_apart, open_recording
from kvprobe.recordings.merge import (
    NO_CLOCK,
    ONE_BY_ONE,
    at_once,
    different_runs,
    merge,
    recorded,
    shifted,
)
from kvprobe.recordings.model import Recording, Table

YEAR_NS = 365 * 24 * 3600 * 10**9


def at(offset_ns: int | None, seed: int) -> Recording:
    recording, _ = simulate(seed=seed, calls=600)
    if offset_ns is not None:
        recording.machine["unix_offset_ns"] = offset_ns
    return recording


def spans(*offsets_ns: int | None) -> tuple[list[int], Recording]:
    """First call of each process in what these were merged to."""
    whole = merge([at(offset_ns, seed) for seed, offset_ns in enumerate(offsets_ns)])
    calls = whole.calls
    return [int(calls["start_ns"][calls["process"] == i].min()) for i in range(len(offsets_ns))], whole


def test_what_was_recorded_at_once_keeps_its_distance() -> None:
    first, last = recorded(at(None, 0))
    (one, two), whole = spans(0, (last - first) // 2)
    alone, _ = spans(0, 0)
    assert two - one == alone[1] - alone[0] + (last - first) // 2
    assert ONE_BY_ONE not in whole.notes


@pytest.mark.parametrize(("offset_ns", "note"), [(YEAR_NS, ONE_BY_ONE), (-YEAR_NS, ONE_BY_ONE), (None, NO_CLOCK)])
def test_what_was_not_begins_together_and_says_so(offset_ns: int | None, note: str) -> None:
    starts, whole = spans(0, offset_ns)
    assert note in whole.notes
    assert max(starts) - min(starts) < 10**9
    first, last = recorded(whole)
    assert last - first < 2 * max(end - start for start, end in (recorded(at(None, seed)) for seed in range(2)))


def test_a_recording_that_is_shifted_is_later_by_so_much() -> None:
    alone = at(None, 0)
    later = shifted(alone, 1_000)
    assert recorded(later) == tuple(time_ns + 1_000 for time_ns in recorded(alone))
    assert (later.calls["end_ns"] - later.calls["start_ns"] == alone.calls["end_ns"] - alone.calls["start_ns"]).all()


def test_clocks_are_aligned_by_the_first_ones() -> None:
    first, last = recorded(at(None, 0))
    apart = (last - first) // 2
    (one, two), _ = spans(7 * apart, 8 * apart)
    (other, another), _ = spans(0, apart)
    assert (one, two) == (other, another) and one == spans(None, None)[0][0]


def test_inputs_apart_are_what_each_is_alone_and_together_what_all_are(shared, tmp_path: Path) -> None:
    packed = Path(__file__).parents[1] / "gpu/data/nsys_batch.sqlite.gz"
    paths = [packed, tmp_path / "again.sqlite.gz"]
    shutil.copy(packed, paths[1])
    whole, parts = open_apart(paths)
    assert whole.calls.rows == open_recording(paths).calls.rows == sum(part.calls.rows for _, part in parts)
    assert [name for name, _ in parts] == [path.name for path in paths]
    assert [part.calls.rows for _, part in parts] == [open_recording([path]).calls.rows for path in paths]


def test_the_same_file_twice_is_told_apart(shared) -> None:
    _, parts = open_apart([shared.path("mfu_before")] * 2)
    assert len({name for name, _ in parts}) == 2


def test_of_three_that_were_not_recorded_at_once_all_begin_with_the_first() -> None:
    alone = at(None, 0)
    apart = [shifted(at(None, seed), by) for seed, by in ((0, 0), (1, 5_000), (2, 9_000))]
    merged = merge(apart)
    starts = [int(merged.calls["start_ns"][merged.calls["process"] == i].min()) for i in range(3)]
    assert starts == [recorded(alone)[0]] * 3
    assert [merged.text(name) for name in merged.calls["name"][:3].tolist()] == [
        alone.text(name) for name in alone.calls["name"][:3].tolist()
    ]
    unnamed = at(None, 1)
    unnamed.calls.columns["name"][:] = 0
    assert {merged.text(name) for name in merge([alone, unnamed]).calls["name"].tolist()} == {"", alone.names[1]}
    assert (merged.calls["count"] == 1).all() and merged.calls["bytes"].max() == alone.calls["bytes"].max()


def ranks(*offsets_ns: int | None, rank: bool = True, **gpus: str) -> list[Recording]:
    """A recording of each rank, or of none; `gpus`: the kinds of the first ones."""
    out = [at(offset_ns, seed) for seed, offset_ns in enumerate(offsets_ns)]
    for number, one in enumerate(out):
        rows = one.processes
        one.tables["processes"] = Table("processes", {**rows.columns, "rank": [number if rank else -1] * rows.rows})
    for one, gpu in zip(out, gpus.values(), strict=False):
        one.machine["gpu"] = gpu
    return out


def test_one_gpu_at_different_times_and_gpus_of_two_kinds_are_different_runs() -> None:
    assert "one after another, and not as ranks" in different_runs(ranks(0, YEAR_NS, rank=False))
    assert "their GPUs differ (H100, V100)" in different_runs(ranks(0, 0, first="H100", second="V100"))


def test_ranks_of_one_job_are_one_run_though_their_hosts_clocks_differ() -> None:
    assert different_runs(ranks(0, YEAR_NS, first="H100", second="H100")) == ""
    assert different_runs(ranks(0, 0, rank=False)) == ""
    assert different_runs(ranks(None, None, rank=False)) == "", "nothing says so"


def test_inputs_that_meet_at_one_moment_were_recorded_together() -> None:
    assert at_once([(5, 9), (0, 5)]) and at_once([(0, 9), (2, 3), (9, 9)]) and at_once([])
    assert not at_once([(0, 5), (6, 9)])


def test_facts_of_later_inputs_are_added_and_those_that_differ_are_named() -> None:
    one, two = at(None, 0), at(None, 1)
    one.machine, one.machine_how = {"gpu": "one", "cpu": "same"}, {"gpu": "seen", "cpu": "seen"}
    two.machine, two.machine_how = {"gpu": "two", "cpu": "same", "os": "new"}, {"gpu": "told", "os": "told"}
    whole = merge([one, two])
    assert whole.machine == {"gpu": "one", "cpu": "same", "os": "new"}
    assert whole.machine_how == {"gpu": "seen", "cpu": "seen", "os": "told"}
    assert [note for note in whole.notes if "differ" in note] == ["inputs differ in gpu: one and two"]
