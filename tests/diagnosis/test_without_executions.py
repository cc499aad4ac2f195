"""Programs as `kvprobe run` sees them, mostly without what the device executed: what is named, with its time lost."""

from __future__ import annotations

import ctypes as ct

import numpy as np
import pytest
from hostruntime import D2H, H2D, QUEUE_FULL, Runtime, recording_of

from kvprobe.account import Line
from kvprobe.diagnosis import examine
from kvprobe.diagnosis.verdict import of_full_queue, of_recording
from kvprobe.recordings.model import CallKind, Table

KiB, MiB = 1 << 10, 1 << 20
RATE = 4e9


class Program:
    """A host runtime in virtual time, with memory, streams and events, whose calls are recorded."""

    def __init__(self, runtime: Runtime, streams: int = 8, size: int = 64 * MiB, **config: object) -> None:
        runtime.reset(h2d_bytes_per_s=RATE, d2h_bytes_per_s=RATE, latency_ns=2000, **config)
        self.rt, self.size = runtime, size
        self.host, self.device = runtime.host_alloc(size), runtime.malloc(size)
        self.streams, self.compute = [runtime.stream() for _ in range(streams)], runtime.stream()
        self.event = runtime.event()

    def load(self, number: int, size: int, stream: int) -> None:
        at = number * 7919 * size % (self.size - size + 1) & ~255
        self.rt.copy(self.device + at, self.host + at, size, H2D, stream)

    def batch(self, number: int, copies: int, size: int, stream: int) -> None:
        places = [(number * copies + i) * 7919 * size % (self.size - size + 1) & ~255 for i in range(copies)]
        self.rt.batch([self.device + at for at in places], [self.host + at for at in places], size, H2D, stream)

    def a_burst_each(self) -> None:
        """To every stream, behind one fence."""
        self.rt.launch(self.compute, 20_000_000)
        self.rt.record(self.event, self.compute)
        for stream in self.streams:
            self.rt.wait(stream, self.event)
            for i in range(300):
                self.load(i, 32 * KiB, stream)

    def examined(self, body, executions=False, **machine):
        """Verdict, verdict on full queues, time lost by cause; and what calls waited for room in truth."""
        records, _ = self.rt.trace(body)
        recording = recording_of(self.rt, records)
        if not executions:
            recording.tables["executions"] = Table("executions")
            recording.has_executions = False
        recording.machine.update(machine)
        findings = examine(recording)
        waited = records["reason"] == QUEUE_FULL
        truth = int((records["end_ns"] - records["start_ns"])[waited].sum()) - 1_000 * int(waited.sum())
        lost = {one.cause: one.lost_ns for one in findings if not one.abstains}
        self.findings, self.account = {one.cause: one for one in findings}, findings.account
        return of_recording(recording, findings), of_full_queue(recording, findings), lost, truth


@pytest.mark.parametrize("scale, depth", [(0.25, 253), (4.0, 4_093)])
def test_a_queue_that_the_environment_scales_is_known_by_its_depth(runtime, scale, depth):
    """Without that, 253 and 4,093 are no depths that a queue is known to have, and half of the time went unnamed."""
    program = Program(runtime, depth=depth)

    def body():
        for burst in range(3):
            for i in range(2 * depth):
                program.load(2 * depth * burst + i, 64 * KiB, program.streams[0])
            program.rt.sleep(int(depth * 25_000))

    verdict, queues, lost, truth = program.examined(body, queue_scale=scale)
    assert verdict.state == queues.state == "found"
    assert lost["launch_queue_saturation"] == pytest.approx(truth, rel=0.1)


@pytest.mark.parametrize("facts", [{"channels": 1}, {}])
def test_streams_that_share_one_channel_are_known_by_their_copies_together(runtime, facts):
    """As with CUDA_DEVICE_MAX_CONNECTIONS=1; the calls are not taken for many that could have been one."""
    program = Program(runtime, copy_channels=1)

    verdict, queues, lost, truth = program.examined(program.a_burst_each, **facts)
    assert verdict.state == queues.state == "found"
    assert set(lost) == {"channels_exhausted"}
    assert lost["channels_exhausted"] == pytest.approx(truth, rel=0.1)


@pytest.mark.parametrize("facts", [{"queue_depth": 1_021}, {}])
@pytest.mark.parametrize("executions", [False, True])
def test_a_queue_full_of_batches_is_full_of_what_they_take(runtime, executions, facts):
    """A batch of 200 takes nine places: 113 fill a queue, and the calls then wait for room, not for descriptors."""
    program = Program(runtime)

    def body():
        for number in range(200):
            program.batch(number, 200, 16 * KiB, program.streams[0])

    verdict, queues, lost, truth = program.examined(body, executions, **facts)
    assert verdict.state == queues.state == "found"
    assert lost["launch_queue_saturation"] == pytest.approx(truth, rel=0.1)
    assert "descriptor_bound_batch" not in lost


def test_a_deep_queue_that_had_room_is_healthy(runtime):
    program = Program(runtime, depth=4_093)
    verdict, queues, lost, truth = program.examined(
        lambda: [program.load(i, 64 * KiB, program.streams[0]) for i in range(4_000)], queue_scale=4.0
    )
    assert (verdict.state, queues.state, lost, truth) == ("undecided", "healthy", {}, 0)


def test_a_scaled_queue_whose_depth_nobody_knows_is_not_called_healthy(runtime):
    """Calls of 16 us are too short to be looked at one by one; together they are nine tenths of the time."""
    program = Program(runtime, depth=120)
    verdict, queues, lost, _ = program.examined(
        lambda: [program.load(i, 64 * KiB, program.streams[0]) for i in range(1_200)]
    )
    assert (verdict.state, queues.state, lost) == ("undecided", "undecided", {})


@pytest.mark.parametrize("executions", [False, True])
def test_one_launch_that_waits_at_a_full_queue_is_named_by_what_it_stood_behind(runtime, executions):
    program = Program(runtime)

    def body():
        program.rt.launch(program.compute, 40_000_000)
        for _ in range(1_100):
            program.rt.launch(program.compute, 0)

    verdict, queues, lost, truth = program.examined(body, executions)
    assert queues.state == "found"
    assert verdict.state == ("healthy" if executions else "found")  # the device computes all the time
    (cause,) = lost
    assert cause in ("launch_queue_saturation", "fence_before_copies")
    assert lost[cause] == pytest.approx(truth, rel=0.1)
    assert not any("store" in change.text or "cop" in change.text for change in program.findings[cause].cure)


def test_one_call_that_took_most_of_the_time_is_not_passed_over(runtime):
    """A stream that is locked by nothing the recording shows: one call of 30 ms among two hundred."""
    program = Program(runtime)
    verdict, *_ = program.examined(
        lambda: [program.load(i, 4 * KiB, program.streams[0]) for i in range(200)],
    )
    assert verdict.state == "undecided"
    records, _ = program.rt.trace(lambda: [program.load(i, 4 * KiB, program.streams[0]) for i in range(200)])
    recording = recording_of(program.rt, records)
    calls = recording.calls.columns
    calls["end_ns"][100] += 30_000_000
    calls["start_ns"][101:] += 30_000_000
    calls["end_ns"][101:] += 30_000_000
    recording.tables["executions"] = Table("executions")
    recording.has_executions = False
    assert of_recording(recording, examine(recording)).state == "undecided"


def test_a_pageable_copy_that_went_past_the_queue_does_not_undo_what_depth_saves(runtime):
    program = Program(runtime)
    pageable = bytearray(b"1" * MiB)
    address = ct.addressof((ct.c_char * MiB).from_buffer(pageable))

    def body():
        for i in range(1_500):
            program.load(i, 64 * KiB, program.streams[0])
        for i in range(8):
            program.rt.copy(program.device + i * 64 * KiB, address + i * 64 * KiB, 64 * KiB, H2D, program.streams[0])

    *_, truth = program.examined(body)
    finding = program.findings["launch_queue_saturation"]
    assert finding.lost_ns == pytest.approx(truth, rel=0.1)
    assert finding.cure[0].thread_saving_ns > 0.9 * truth


def test_a_wait_for_a_stream_of_kernels_is_not_for_the_copies_among_them(runtime):
    """Four stores behind each kernel; the wait for the stream is for sixteen milliseconds of kernels."""
    program = Program(runtime)

    def body():
        for step in range(96):
            program.rt.launch(program.compute, 2_000_000)
            for i in range(4):
                at = (4 * step + i) * 128 * KiB
                program.rt.copy(program.host + at, program.device + at, 128 * KiB, D2H, program.compute)
            if step % 8 == 7:
                program.rt.sync(program.compute)

    verdict, _, lost, _ = program.examined(body)
    assert (verdict.state, lost) == ("undecided", {})


def test_the_first_copies_of_a_burst_are_no_small_copies_behind_one(runtime):
    """Eight streams are given a burst each behind one fence; what waits for its turn is a burst itself."""
    program = Program(runtime, copy_channels=1)

    *_, lost, _ = program.examined(program.a_burst_each, executions=True)
    assert "head_of_line_copies" not in lost


@pytest.mark.parametrize("streams, named", [(24, False), (1, True)])
def test_many_streams_with_a_burst_each_are_no_small_copies_behind_one(runtime, streams, named):
    """The last of 25 streams waits for 24 others together, of which each has as much to move as itself."""
    program = Program(runtime, streams=25)

    def body():
        for _ in range(4):
            for stream in program.streams[: streams if named else -1]:
                for i in range(2_400 // streams):
                    program.load(i, 16 * KiB, stream)
            for i in range(1 if named else 100):
                program.load(i, 16 * KiB, program.streams[-1])
            program.rt.launch(program.compute, 1_000_000)
            program.rt.sleep(30_000_000)

    *_, lost, _ = program.examined(body, executions=True, queue_depth=1_021)
    assert ("head_of_line_copies" in lost) == named


def test_copies_of_two_sizes_tell_the_rate_of_their_link(runtime):
    """A link of 4 GB/s, which no large copy shows, is not taken for one of 25: 8 KiB take 2 us each of its own time."""
    program = Program(runtime)

    def body():
        for burst in range(4):
            for i in range(400):
                program.load(400 * burst + i, (4 if i % 8 else 32) * KiB, program.streams[0])
            program.rt.sleep(20_000_000)

    *_, lost, _ = program.examined(body, executions=True)
    assert lost.get("small_copies") == pytest.approx(1_600 * 2_000, rel=0.1)


def test_a_healthy_verdict_beside_a_small_finding_does_not_deny_it(runtime):
    program = Program(runtime)

    def body():
        for i in range(1_300):
            program.load(i, 64 * KiB, program.streams[0])
        for i in range(200):
            program.load(i, 64 * KiB, program.streams[1])
            program.rt.sleep(20_000_000)

    verdict, queues, lost, _ = program.examined(body)
    assert (verdict.state, queues.state) == ("undecided", "found") and lost["launch_queue_saturation"]
    assert verdict.reason == "the recording does not show what the GPU did"


@pytest.mark.parametrize("facts", [{}, {"link_bytes_per_s": RATE}])
@pytest.mark.parametrize("blocks", ["the same", "others"])
def test_blocks_that_are_on_their_way_are_known_by_what_a_link_can_carry(runtime, blocks, facts):
    """Eight requests load 16 MiB each, at once: the first bytes take 37 us on the fastest link there is."""
    program = Program(runtime, size=128 * MiB)

    def body():
        for request in range(8):
            for i in range(16):
                source = i * MiB + (0 if blocks == "the same" else 8 * request * KiB)
                target = (16 * (request % 7) + i) * MiB
                program.rt.copy(program.device + target, program.host + source, MiB, H2D, program.streams[0])
        for _ in range(8):
            program.rt.launch(program.compute, 1_000)
        program.rt.sync(program.streams[0])

    _, _, lost, _ = program.examined(body, **facts)
    assert ("redundant_loads" in lost) == (blocks == "the same")
    if blocks == "the same":  # with a link of unknown speed, too, where no time can be said
        assert program.findings["redundant_loads"].cure[0].name == "dedup"
    if blocks == "the same" and facts:
        assert lost["redundant_loads"] == pytest.approx(7 * 16 * MiB / RATE * 1e9, rel=0.1)


def test_launches_that_were_only_counted_are_not_said_to_be_missing(runtime):
    """`kvprobe run` keeps the slow ones of a thousand launches."""
    program = Program(runtime)
    records, _ = program.rt.trace(lambda: [program.rt.launch(program.compute, 1_000) for _ in range(8)])
    recording = recording_of(program.rt, records)
    recording.tables["executions"] = Table("executions")
    recording.has_executions = False
    columns = {"process": [0], "stream": [0], "kind": [CallKind.LAUNCH], "calls": [1_000]}
    recording.tables["totals"] = Table("totals", columns)
    lacks, _ = of_recording(recording, examine(recording)).missing
    assert lacks.what.startswith("the recording has the details of only 8 of 1,000 submissions")
    assert "--detail launches" in lacks.how


@pytest.mark.parametrize("channels", [True, False])
def test_a_stream_that_finds_its_channel_full_of_another_ones_copies(runtime, channels):
    """One of two streams holds nearly all that their channel takes; the few copies of the other wait for a forward."""
    program = Program(runtime, copy_channels=1)

    def body():
        for _ in range(6):
            program.rt.launch(program.compute, 30_000_000)
            program.rt.record(program.event, program.compute)
            program.rt.wait(program.streams[0], program.event)
            for i in range(1_000):
                program.load(i, 16 * KiB, program.streams[0])
            for i in range(40):
                program.load(1_000 + i, 16 * KiB, program.streams[1])
            program.rt.sleep(30_000_000)

    records, _ = program.rt.trace(body)
    recording = recording_of(program.rt, records, channels)
    findings = examine(recording)
    waited = int((records["end_ns"] - records["start_ns"])[records["reason"] == QUEUE_FULL].sum())
    lost = {one.cause: one.lost_ns for one in findings if not one.abstains}
    assert of_full_queue(recording, findings).state == ("found" if channels else "undecided")
    assert ("channels_exhausted" in lost) == channels
    if channels:
        assert lost["channels_exhausted"] == pytest.approx(waited, rel=0.1)


def only_counted(recording):
    """The recording without its short launches, as `kvprobe run` keeps it: waits say how many came before them."""
    calls = dict(recording.tables["calls"].columns)
    launches = calls["kind"] == CallKind.LAUNCH
    calls["launches"] = np.where(calls["kind"] == CallKind.SYNC, np.cumsum(launches), -1)
    kept = ~launches & (calls["kind"] != CallKind.EVENT)
    recording.tables["calls"] = Table("calls", {name: column[kept] for name, column in calls.items()})


@pytest.mark.parametrize("ring", [True, False], ids=["a buffer of an earlier step", "this step's copy"])
def test_a_wait_for_an_event_is_for_copies_where_nothing_was_launched_since_the_last(runtime, ring):
    """Without the launches a ring of buffers on a busy link was critical, though it kept the device in work."""
    program = Program(runtime)
    rt, events = program.rt, [program.rt.event() for _ in range(4)]

    def body():
        for step in range(40):
            event = events[step % 4]
            if ring and step >= 4:
                rt.synchronize_event(event)  # its buffer is free again
            program.load(step, 8 * MiB, program.streams[0])
            rt.record(event, program.streams[0])
            if not ring:
                rt.synchronize_event(event)
            for _ in range(20):
                rt.launch(program.compute, 100_000)
        rt.launch(program.compute, 1_000)

    records, _ = rt.trace(body)
    recording = recording_of(rt, records)
    calls = recording.tables["calls"]
    waits = calls["name"] == recording.names.index("cudaEventSynchronize")
    calls["stream"][waits] = calls["stream"][calls["bytes"] == 8 * MiB][0]  # the interposer knows where it was recorded
    recording.tables["executions"] = Table("executions")
    recording.has_executions = False
    only_counted(recording)
    examined = examine(recording)
    findings = {one.cause: one for one in examined}
    assert findings["synchronisation"].abstains is ring
    assert of_recording(recording, examined).state == ("undecided" if ring else "found")


@pytest.mark.parametrize("executions", [True, False])
def test_what_a_thread_waits_for_a_slot_is_no_submitting_in_its_account(executions):
    program = Program(Runtime())

    def loads() -> None:
        for i in range(4_000):
            program.load(i, 64 * KiB, program.streams[0])

    _, _, lost, truth = program.examined(loads, executions)
    (thread,) = program.account.threads
    assert thread.ns(Line.FULL_QUEUE) == lost["launch_queue_saturation"] == pytest.approx(truth, rel=0.05)
    assert 3 * thread.ns(Line.SUBMITTING) < thread.ns(Line.FULL_QUEUE)
    assert sum(thread.ns(line) for line in Line) == thread.window_ns


@pytest.mark.parametrize("beside", [True, False], ids=["a prefill beside", "nothing beside"])
def test_results_read_back_are_no_loss_where_nothing_shows_what_the_gpu_had_to_do(runtime, beside):
    """Every server reads back what it sampled: a device that has a prefill to run loses nothing by that."""
    program = Program(runtime)
    rt = program.rt

    def body():
        for step in range(60):
            if beside and step % 4 == 0:
                rt.launch(program.streams[1], 10_000_000)
            rt.launch(program.compute, 1_000_000)
            rt.copy(program.host + step * 4 * KiB, program.device, 4 * KiB, D2H, program.compute)
            rt.sync(program.compute)
            rt.sleep(500_000)

    verdict, _, lost, _ = program.examined(body)
    assert lost["synchronisation"] > 50_000_000 and program.findings["synchronisation"].severity == "info"
    assert verdict.state == "undecided"
    verdict, _, lost, _ = program.examined(body, executions=True)
    assert verdict.state == ("healthy" if beside else "found")
