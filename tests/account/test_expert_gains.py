"""What changes of an experts' offload are predicted to save is what they save: llama.cpp's calls, in virtual time."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from ctypes import addressof, c_char

import numpy as np
import pytest

from kvprobe.account import account_of
from kvprobe.account.expert_gains import FIXED, PREFETCH, SLOTS, ExpertGains, expert_gains
from kvprobe.recordings.experts import ExpertUploads, expert_uploads
from kvprobe.recordings.joined import Joined
from kvprobe.recordings.model import Memory, Recording
from tests.diagnosis.hostruntime import D2H, H2D, Runtime, recording_of
from tests.recordings.experts_made import STRIDE, Slots, as_run, routed, runs

LAYERS, EXPERTS, PICKED, STEPS = 4, 32, 4, 40
TENSOR = EXPERTS * STRIDE


@pytest.fixture(scope="module")
def runtime() -> Iterator[Runtime]:
    made = Runtime()
    yield made
    made.host.reset()


class LlamaCpp:
    """What llama.cpp asks of CUDA for a model whose experts lie in CPU memory (`-ncmoe`), and what it could do instead.

    Of each layer (`ggml_backend_sched_compute_splits` of its ggml-backend.cpp, and
    `ggml_backend_cuda_set_tensor_async`): kernels up to the router, the picked ids to the CPU, a wait for them, then of
    three tensors the runs of picked experts by cudaMemcpyAsync on the stream that computes, and the kernel that
    multiplies.
    """

    def __init__(
        self,
        runtime: Runtime,
        compute_ns: int = 30_000,
        slots: int = 0,
        fixed: tuple[int, ...] = (),
        *,
        mapped: bool = False,
        submit_ns: int = 1_000,
    ) -> None:
        runtime.reset(h2d_bytes_per_s=20_000_000_000, submit_ns=submit_ns)
        self.runtime, self.compute_ns = runtime, compute_ns
        self.stream, self.copying = runtime.stream(), runtime.stream()
        size = LAYERS * (3 * TENSOR + 4096)
        self.file = mmap.mmap(-1, size) if mapped else None  # as the model's file, without --no-mmap: pageable
        self.model = addressof(c_char.from_buffer(self.file)) if self.file else runtime.host_alloc(size)
        self.ids = runtime.host_alloc(4096)
        self.gpu = runtime.malloc(3 * (TENSOR + 4096) * 2)
        self.cache, self.fixed = Slots(slots) if slots else None, fixed
        self.events = [runtime.event() for _ in range(2)]

    def _bring(self, layer: int, part: int, picked: list[int], stream: int, half: int = 0) -> None:
        tensor = 3 * layer + part
        if tensor in self.fixed:
            return
        if self.cache is not None:
            picked = [one for one in picked if self.cache.use(tensor * EXPERTS + one) is not None]
        base = self.model + tensor * TENSOR + layer * 4096
        gpu = self.gpu + (3 * half + part) * (TENSOR + 4096)
        for first, last in runs(picked) if picked else ():
            size = (last - first + 1) * STRIDE + (512 if last < EXPERTS - 1 else 0)
            self.runtime.copy(gpu + first * STRIDE, base + first * STRIDE, size, H2D, stream)

    def step(self, picks: list[list[int]]) -> None:
        runtime = self.runtime
        for layer, picked in enumerate(picks):
            runtime.launch(self.stream, self.compute_ns)
            runtime.copy(self.ids, self.gpu, 128, D2H, self.stream)
            runtime.sync(self.stream)
            for part in range(3):
                self._bring(layer, part, picked, self.stream)
                runtime.launch(self.stream, self.compute_ns)
        runtime.sync(self.stream)

    def step_ahead(self, picks: list[list[int]]) -> None:
        """Each layer's experts come on a stream of their own while the layer before it computes."""
        runtime = self.runtime
        for layer, picked in enumerate(picks):
            for part in range(3):
                self._bring(layer, part, picked, self.copying, layer % 2)
            runtime.record(self.events[layer % 2], self.copying)
            runtime.launch(self.stream, self.compute_ns)
            runtime.copy(self.ids, self.gpu, 128, D2H, self.stream)
            runtime.wait(self.stream, self.events[layer % 2])
            for _ in range(3):
                runtime.launch(self.stream, self.compute_ns)
        runtime.sync(self.stream)

    def run(self, ahead: bool = False) -> tuple[Recording, int]:
        """What a profiler would have recorded, and how long it took, ns."""
        step = self.step_ahead if ahead else self.step

        def body() -> int:
            start = self.runtime.now_ns()
            for picks in routed(5, STEPS, LAYERS, EXPERTS, PICKED):
                step(picks)
            return self.runtime.now_ns() - start

        records, took = self.runtime.trace(body)
        return recording_of(self.runtime, records), took


def predicted(recording: Recording) -> tuple[ExpertUploads, ExpertGains]:
    (uploads,) = expert_uploads(recording)
    return uploads, expert_gains(recording, account_of(Joined(recording)), uploads)


def near(saved: int | None, measured: int) -> bool:
    return saved is not None and 0.75 * measured <= saved <= 1.25 * measured


def test_llama_cpps_calls_are_told_by_expert(runtime: Runtime) -> None:
    recording, _ = LlamaCpp(runtime).run()
    uploads, _ = predicted(recording)
    assert len(uploads.key) == STEPS * LAYERS * 3 * PICKED
    assert len(uploads.tensors) == LAYERS * 3 and not uploads.slots


@pytest.mark.parametrize("share", [0.25, 0.5, 1.0])
def test_more_experts_on_the_gpu_save_what_was_predicted(runtime: Runtime, share: float) -> None:
    recording, before = LlamaCpp(runtime).run()
    uploads, gains = predicted(recording)
    slots = round(share * len(np.unique(uploads.key)))
    change = next(one for one in gains.changes if one.what == SLOTS and abs(one.count - slots) <= 1)
    _, after = LlamaCpp(runtime, slots=change.count).run()
    assert near(change.saved_ns, before - after)


def test_so_they_do_where_the_model_is_mapped_and_its_copies_are_pageable(runtime: Runtime) -> None:
    recording, before = LlamaCpp(runtime, mapped=True).run()
    assert (recording.calls["memory"] == Memory.PAGEABLE).any()
    _, gains = predicted(recording)
    change = next(one for one in gains.changes if one.what == SLOTS)
    _, after = LlamaCpp(runtime, slots=change.count, mapped=True).run()
    assert near(change.saved_ns, before - after)


def test_whole_tensors_on_the_gpu_save_what_was_predicted(runtime: Runtime) -> None:
    recording, before = LlamaCpp(runtime).run()
    uploads, gains = predicted(recording)
    change = [one for one in gains.changes if one.what == FIXED][1]
    spent = np.bincount(uploads.tensor, uploads.bytes)
    sizes = np.array([one.experts for one in uploads.tensors])
    fixed = tuple(np.argsort(-spent / sizes, kind="stable")[: change.count].tolist())
    _, after = LlamaCpp(runtime, fixed=fixed).run()
    assert near(change.saved_ns, before - after)


@pytest.mark.parametrize("compute_ns", [10_000, 30_000, 60_000])
def test_prefetching_saves_what_was_predicted(runtime: Runtime, compute_ns: int) -> None:
    recording, before = LlamaCpp(runtime, compute_ns).run()
    _, gains = predicted(recording)
    (change,) = (one for one in gains.changes if one.what == PREFETCH)
    _, after = LlamaCpp(runtime, compute_ns).run(ahead=True)
    assert near(change.saved_ns, before - after)


SLOW = 12_000  # ns a submission: longer than a copy of one expert


def test_where_the_thread_is_slower_than_the_link_its_calls_are_what_is_saved(runtime: Runtime) -> None:
    recording, before = LlamaCpp(runtime, submit_ns=SLOW).run()
    _, gains = predicted(recording)
    slots, fixed = ([one for one in gains.changes if one.what == what][1] for what in (SLOTS, FIXED))
    _, after = LlamaCpp(runtime, slots=slots.count, submit_ns=SLOW).run()
    assert near(slots.saved_ns, before - after)
    _, after = LlamaCpp(runtime, fixed=tuple(range(fixed.count)), submit_ns=SLOW).run()
    assert near(fixed.saved_ns, before - after)
    (ahead,) = (one for one in gains.changes if one.what == PREFETCH)
    _, after = LlamaCpp(runtime, submit_ns=SLOW).run(ahead=True)
    assert ahead.saved_ns == pytest.approx(before - after, abs=0.02 * before)  # the thread was never idle for long


def holes(recording: Recording, seed: int, share: float) -> list[tuple[int, int]]:
    """Times that last for some steps each, in which no mark was made."""
    begin, end = int(recording.calls["start_ns"].min()), int(recording.calls["end_ns"].max())
    random, each = np.random.default_rng(seed), (end - begin) / 10
    lasts = share * each * random.uniform(0.8, 1.2, 10)
    first = begin + np.arange(10) * each + random.uniform(0, 1, 10) * (each - lasts)
    return [(int(at), int(at + ns)) for at, ns in zip(first, lasts, strict=True)]


@pytest.mark.parametrize("submit_ns", [1_000, SLOW])
@pytest.mark.parametrize(("seed", "share"), [(1, 0.3), (2, 0.3), (3, 0.6), (4, 0.6)])
def test_what_was_not_observed_costs_as_much_as_what_was(
    runtime: Runtime, seed: int, share: float, submit_ns: int
) -> None:
    recording, _ = LlamaCpp(runtime, submit_ns=submit_ns).run()
    _, whole = predicted(as_run(recording))
    _, partly = predicted(as_run(recording, holes(recording, seed, share)))
    assert [(one.what, one.count) for one in partly.changes] == [(one.what, one.count) for one in whole.changes]
    for one, other in zip(partly.changes, whole.changes, strict=True):
        assert one.saved_ns == pytest.approx(other.saved_ns, rel=0.1), one.what
    assert partly.exposed_ns == pytest.approx(whole.exposed_ns, rel=0.1)
    assert whole.observed > 0.999 and abs(1 - partly.observed - share) < 0.1


def test_from_next_to_nothing_nothing_is_extended(runtime: Runtime) -> None:
    recording, _ = LlamaCpp(runtime).run()
    begin, end = int(recording.calls["start_ns"].min()), int(recording.calls["end_ns"].max())
    _, gains = predicted(as_run(recording, [(begin + 150_000, end - 1_000)]))
    assert gains.exposed_ns is None and all(one.saved_ns is None for one in gains.changes)


def test_nothing_saves_more_than_what_was_not_computing(runtime: Runtime) -> None:
    recording, took = LlamaCpp(runtime, 10_000).run()
    (uploads,) = expert_uploads(recording)
    account = account_of(Joined(recording))
    gains = expert_gains(recording, account, uploads)
    (gpu,) = account.gpus
    assert gains.exposed_ns is not None and 0 < gains.exposed_ns <= gpu.not_computing_ns <= took
    kept = [one.saved_ns for one in gains.changes if one.what != PREFETCH]
    assert kept and all(one is not None and one <= gains.exposed_ns for one in kept)
    (ahead,) = (one.saved_ns for one in gains.changes if one.what == PREFETCH)  # what is not waited for is not asked
    assert ahead is not None and ahead <= gpu.not_computing_ns


def test_what_the_device_did_is_not_guessed(runtime: Runtime) -> None:
    recording, _ = LlamaCpp(runtime).run()
    unseen = Recording(
        recording.source,
        {name: recording.tables[name] for name in ("calls", "streams", "processes")},
        recording.names,
    )
    _, gains = predicted(unseen)
    assert gains.exposed_ns is None
    assert all(one.saved_ns is None and one.what != PREFETCH for one in gains.changes)
    assert any(one.kept for one in gains.changes)
    assert (recording.calls["memory"] == Memory.PINNED).any()
