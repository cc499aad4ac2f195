"""Copies that are in order although few waits order them are not called corruption; those that nothing orders are."""

from __future__ import annotations

import numpy as np
import pytest
from hostruntime import Runtime, recording_of
from scenarios import KiB, Stage

from kvprobe.diagnosis import examine
from kvprobe.recordings.model import CallKind, Recording, Table
from kvprobe.recordings.vocabulary import call_kind

STEPS, LAYERS = 20, 8


def wrong(recording: Recording) -> set[str]:
    """Causes that are named although nothing was slow: results at stake."""
    return {one.cause for one in examine(recording) if one.lost_on == "none"}


def played(runtime: Runtime, body) -> Recording:
    return recording_of(runtime, runtime.trace(body)[0])


def with_queries(recording: Recording, asked_ns: list[int]) -> Recording:
    """The recording with calls of cudaEventQuery, as CUPTI records them and the host runtime's trace does not."""
    calls, rows = recording.calls, len(asked_ns)
    recording.names.append("cudaEventQuery")
    added = {name: np.full(rows, column[0]) for name, column in calls.columns.items()}
    added |= {"start_ns": np.array(asked_ns), "end_ns": np.array(asked_ns) + 100}
    added |= {"name": np.full(rows, len(recording.names) - 1), "kind": np.full(rows, call_kind("cudaEventQuery"))}
    added |= {"stream": np.full(rows, -1), "correlation": np.full(rows, -1), "direction": np.zeros(rows)}
    columns = {name: np.concatenate((column, added[name])) for name, column in calls.columns.items()}
    order = np.argsort(columns["start_ns"], kind="stable")
    recording.tables["calls"] = Table("calls", {name: column[order] for name, column in columns.items()})
    return recording


@pytest.mark.parametrize("ordered", [True, False])
def test_one_wait_a_step_orders_the_loads_of_all_its_layers(runtime, ordered):
    """The next step's layers are loaded between the launches of this one."""
    stage = Stage(runtime, h2d=4e9)

    def body():
        for step in range(STEPS):
            if ordered:
                stage.after(stage.compute, stage.streams[0], step)
            for layer in range(LAYERS):
                stage.load(LAYERS * step + layer, 512 * KiB, stage.streams[0])
                runtime.launch(stage.compute, 400_000)
            runtime.sleep(3_000_000)

    assert wrong(played(runtime, body)) == (set() if ordered else {"load_not_ordered"})


@pytest.mark.parametrize("ordered", [True, False])
def test_one_wait_a_step_orders_the_stores_of_all_its_layers(runtime, ordered):
    """The layers of the step before are stored between the launches of this one."""
    stage = Stage(runtime, d2h=4e9)

    def body():
        for step in range(STEPS):
            if ordered:
                stage.after(stage.streams[0], stage.compute, step)
            for layer in range(LAYERS):
                runtime.launch(stage.compute, 400_000)
                stage.store(LAYERS * step + layer, 512 * KiB, stage.streams[0])
            runtime.sleep(3_000_000)

    assert wrong(played(runtime, body)) == (set() if ordered else {"store_not_ordered"})


@pytest.mark.parametrize("how", ["waits", "asks", "waits for the store before", "nothing"])
def test_stores_of_a_step_that_the_host_knows_to_be_over_may_run_under_the_next_one(runtime, how):
    """A wait for the store's own stream says nothing of the kernels."""
    stage = Stage(runtime, d2h=4e9)
    asked: list[int] = []

    def body():
        for step in range(STEPS):
            for _ in range(4):
                runtime.launch(stage.compute, 500_000)
            runtime.record(stage.events[step], stage.compute)
            if step:
                if how == "waits":
                    runtime.check(runtime.lib.cudaEventSynchronize(stage.events[step - 1]))
                elif how == "waits for the store before":
                    runtime.sync(stage.streams[0])
                runtime.sleep(100_000)
                asked.append(runtime.now_ns())
                runtime.sleep(100_000)
                for block in range(8):
                    stage.store(8 * step + block, 64 * KiB, stage.streams[0])
                runtime.sleep(1_900_000 if how != "waits" else 0)

    recording = played(runtime, body)
    waits = np.array([name == "cudaEventSynchronize" for name in recording.names])[recording.calls["name"]]
    recording.calls.columns["stream"] = np.where(waits, -1, recording.calls["stream"])  # it names an event
    if how == "asks":
        recording = with_queries(recording, asked)
    assert wrong(recording) == (set() if how in ("waits", "asks") else {"store_not_ordered"})


def test_loads_after_the_last_wait_of_a_long_recording_are_not_ordered_by_it(runtime):
    """One wait in the middle of four hundred steps orders none of those that came long before or after it."""
    stage = Stage(runtime, h2d=4e9)

    def body():
        for step in range(400):
            if step == 200:
                stage.after(stage.compute, stage.streams[0], 0)
            stage.load(step, 512 * KiB, stage.streams[0])
            runtime.launch(stage.compute, 400_000)
            runtime.sleep(300_000)

    assert wrong(played(runtime, body)) == {"load_not_ordered"}


@pytest.mark.parametrize("kind", ["all under a kernel", "one in three between steps", "never without a kernel"])
def test_stores_of_a_thread_that_launches_nothing_may_meet_a_kernel_by_chance(runtime, kind):
    """Where the GPU is idle for half of the time, stores that all begin under a kernel do so for a reason."""
    stage = Stage(runtime, d2h=4e9)

    def body():
        for step in range(STEPS):
            runtime.launch(stage.compute, 1_600_000 if kind == "never without a kernel" else 400_000)
            runtime.sleep(600_000 if kind == "one in three between steps" and step % 3 == 0 else 100_000)
            stage.store(step, 512 * KiB, stage.streams[0])
            runtime.sleep(900_000)

    recording = played(runtime, body)
    stores = recording.calls["kind"] == CallKind.COPY
    recording.calls.columns["thread"] = np.where(stores, 1, recording.calls["thread"])
    assert wrong(recording) == ({"store_not_ordered"} if kind == "all under a kernel" else set())
