"""Marks say when a stream was busy and with what, to the microsecond of the simulated device's own clock."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kvprobe.probe.ring import SPAN, read_ring
from kvprobe.recordings.assemble import among
from kvprobe.recordings.intervals import Cover
from kvprobe.recordings.kvprobe_run import read
from kvprobe.recordings.model import CallKind, Direction, Engine, Recording
from kvprobe.recordings.occupancy import StreamOccupancy, occupancy
from kvprobe.recordings.run_marks import PAUSED

CORPUS = Path(__file__).resolve().parents[1] / "corpus"
STEP = f"""
import sys
sys.path.insert(0, {str(CORPUS)!r})
from device import Device
d = Device(streams=1, events=8)
"""
SHORTEST_NS = 1_500_000  # MARK_SHORTEST_NS of kvprobe/native/interpose/marks.h
NEAR_NS = 12_000  # the way to the device, and what a mark takes


def recorded(libraries: Path, folder: Path, body: str, before: str = "", **more: str) -> Recording:
    env = {**os.environ, "LD_PRELOAD": str(libraries / "libkvprobe_interpose.so"), "KVPROBE_RUN": str(folder)}
    env |= {
        "KVPROBE_HOSTRT": str(libraries / "libkvprobe_hostrt.so"),
        "KVHOST_CLOCK": "virtual",
        "KVPROBE_MARKS": "on",
        **more,
    }
    subprocess.run([sys.executable, "-c", before + STEP + body], env=env, check=True)
    return read(folder)


def busy(recording: Recording, engine: Engine, at_least: int = 0) -> list[int]:
    """Lengths of the spans of a kind, ns."""
    spans = recording.spans
    length = spans["end_ns"] - spans["start_ns"]
    return sorted(length[(spans["engine"] == engine) & (length >= at_least)].tolist())


def test_which_way_a_copy_goes_is_told_by_its_memory_where_it_is_not_said(libraries: Path, tmp_path: Path) -> None:
    """The same load and store, by cudaMemcpyDefault: neither stays inside the GPU."""
    body = """
for _ in range(3):
    d.copy(d.device, d.host, 4 << 20, 4, d.copies[0])
    d.sync(d.copies[0])
    d.copy(d.host, d.device, 8 << 20, 4, d.copies[0])
    d.sync(d.copies[0])
"""
    spans = recorded(libraries, tmp_path, body).spans
    copies = (spans["engine"] == Engine.COPY) & (spans["bytes"] >= 4 << 20)
    ways = set(zip(spans["bytes"][copies] >> 20, spans["direction"][copies], strict=True))
    assert ways == {(4, Direction.H2D), (8, Direction.D2H)}


def test_a_copy_that_is_refused_stands_in_no_stream(libraries: Path, tmp_path: Path) -> None:
    """Between kernels, alone and between copies that are taken; the first and the last kernel are seen as they are."""
    body = """
refused = lambda: d.lib.cudaMemcpyAsync(None, d.host, 4096, 1, d.compute)
for step in range(3):
    d.launch(2_000_000)
    assert all(refused() for _ in range(500))
    d.launch(1_000_000)
    d.copy(d.device, d.host, 1 << 20, 1, d.compute)
    assert refused() and refused()
    d.copy(d.device, d.host, 1 << 20, 1, d.compute)
    d.sync(d.compute)
"""
    recording = recorded(libraries, tmp_path, body)
    spans = recording.spans
    copies = (spans["engine"] == Engine.COPY) & (spans["bytes"] >= 1 << 20)
    assert (int(spans["count"][copies].sum()), int(spans["bytes"][copies].sum())) == (6, 6 << 20)
    assert int(spans["count"][spans["engine"] == Engine.COPY].sum()) < 30  # those before the first step
    assert sum(busy(recording, Engine.KERNEL, 500_000)) == pytest.approx(9_000_000, abs=6 * NEAR_NS)


def test_kernels_and_a_load_that_compute_waits_for(libraries: Path, tmp_path: Path) -> None:
    """A load of 4 MB at 4 GB/s behind which a kernel waits: 1.05 ms of copy, as long a wait, then the kernel's 3 ms."""
    body = """
d.launch(5_000_000)
d.sync(d.compute)
d.load(0, 4 << 20, d.copies[0])
d.order(d.compute, d.copies[0], 0)
d.launch(3_000_000)
d.sync(d.compute)
"""
    recording = recorded(libraries, tmp_path, body)
    assert busy(recording, Engine.KERNEL, 1_000_000) == pytest.approx([3_000_000, 5_000_000], abs=NEAR_NS)
    load_ns = (4 << 20) / 4e9 * 1e9
    assert busy(recording, Engine.COPY, 500_000) == pytest.approx([load_ns], abs=NEAR_NS)
    assert busy(recording, Engine.WAIT, 500_000) == pytest.approx([load_ns], abs=NEAR_NS)
    seen, spans = recording.coverage, recording.spans
    whole = Cover(seen["start_ns"], seen["end_ns"])
    long = np.flatnonzero(spans["end_ns"] - spans["start_ns"] > 500_000)
    length = spans["end_ns"][long] - spans["start_ns"][long]
    assert whole.within(spans["start_ns"][long], spans["end_ns"][long]).tolist() == length.tolist()
    assert spans["count"][long].tolist() == [1] * len(long)


def test_what_a_mark_waited_for_the_call_behind_it_would_have_waited_for(libraries: Path, tmp_path: Path) -> None:
    """Each submission keeps its thread for 50 us, that of a mark as well: behind one, a call takes 100."""
    body = """
for step in range(3):
    for _ in range(2):
        d.launch(1_000_000)
    for _ in range(2):
        d.copy(d.device, d.host, 1 << 20, 1, d.compute)
    d.sync(d.compute)
"""
    calls = recorded(libraries, tmp_path, body, KVHOST_SUBMIT_NS="50000", KVPROBE_DETAIL="launches").calls
    took = (calls["end_ns"] - calls["start_ns"])[among(calls["kind"], (CallKind.COPY, CallKind.LAUNCH))]
    assert 100_000 <= took.max() < 110_000


def test_each_gpu_has_a_default_stream_of_its_own_and_is_seen_beside_the_other(libraries: Path, tmp_path: Path) -> None:
    """A thread waits for one GPU while the default stream of the other, by the same handle, still has work."""
    body = """
for step in range(6):
    for gpu in (0, 1):
        d.check(d.lib.cudaSetDevice(gpu))
        d.copy(d.device, d.host, 4 << 20, 1, 0)
        d.launch((gpu + 1) * 1_000_000, 1)
    for gpu in (0, 1):
        d.check(d.lib.cudaSetDevice(gpu))
        d.synchronize()
"""
    recording = recorded(libraries, tmp_path, body, KVHOST_DEVICES="2")
    spans, coverage = recording.spans, recording.coverage
    took = spans["end_ns"] - spans["start_ns"]
    for gpu in (0, 1):
        kernels = took[(spans["device"] == gpu) & (spans["engine"] == Engine.KERNEL)][-6:]
        assert kernels == pytest.approx((gpu + 1) * 1_000_000, abs=NEAR_NS)
        assert [recording.text(one) for one in coverage["reason"][coverage["device"] == gpu]] == [""]
    streams = recording.streams
    assert (streams["device"][spans["stream"]] == spans["device"]).all()
    moved = (recording.calls["bytes"] == 4 << 20) & (recording.calls["kind"] == CallKind.COPY)
    assert streams["device"][recording.calls["stream"][moved]].tolist() == [0, 1] * 6


def test_copies_behind_a_host_function_begin_when_that_is_over(libraries: Path, tmp_path: Path) -> None:
    """What stands still while a function of the host runs is no copy."""
    body = """
import ctypes as ct, threading, time
d.launch(1_000)
d.sync(d.compute)
libc, semaphore, begun = ct.CDLL(None), ct.create_string_buffer(64), threading.Event()
libc.sem_init(semaphore, 0, 0)

@ct.CFUNCTYPE(None, ct.c_void_p)
def function(_):
    begun.set()
    libc.sem_wait(semaphore)

d.lib.cudaLaunchHostFunc.argtypes = [ct.c_void_p] * 3
for _ in range(5):  # the first may come before there are timing events: a thread makes them
    begun.clear()
    d.check(d.lib.cudaLaunchHostFunc(d.copies[0], ct.cast(function, ct.c_void_p), None))
    for i in range(50):
        d.load(i, 100_000, d.copies[0])
    assert begun.wait(60)  # on a busy machine it begins late
    time.sleep(0.02)
    libc.sem_post(semaphore)
    d.synchronize()
"""
    spans = recorded(libraries, tmp_path, body, KVHOST_CLOCK="real").spans
    stands = int(np.flatnonzero(spans["engine"] == Engine.FUNCTION)[-1])
    assert spans["end_ns"][stands] - spans["start_ns"][stands] >= 19_000_000
    behind = (spans["engine"] == Engine.COPY) & (spans["stream"] == spans["stream"][stands])
    behind &= spans["end_ns"] > spans["end_ns"][stands]
    assert int(spans["count"][behind].sum()) == 50
    assert (spans["start_ns"][behind] >= spans["end_ns"][stands]).all()


# As if the helper found no processor: many times no event can be made, and until then there is none.
LATE = """
import ctypes as ct, os, time
lib, libc, u64 = ct.CDLL(os.environ["KVPROBE_HOSTRT"]), ct.CDLL(None), ct.c_uint64
for n in range(1, 17):
    assert lib.kvhostFailCall(b"cuEventCreate", u64(n), 2) == 0
stream, host, device, semaphore = ct.c_void_p(), ct.c_void_p(), ct.c_void_p(), ct.create_string_buffer(64)
libc.sem_init(semaphore, 0, 0)
assert lib.cudaStreamCreateWithFlags(ct.byref(stream), 1) == 0
assert lib.cudaHostAlloc(ct.byref(host), u64(100_000), 0) == 0
assert lib.cudaMalloc(ct.byref(device), u64(100_000)) == 0
assert lib.cudaLaunchHostFunc(stream, ct.cast(libc.sem_wait, ct.c_void_p), ct.c_void_p(ct.addressof(semaphore))) == 0
for _ in range(50):
    assert lib.cudaMemcpyAsync(device, host, u64(100_000), 1, stream) == 0
assert lib.cudaLaunchHostFunc(stream, ct.cast(libc.usleep, ct.c_void_p), ct.c_void_p(5_000)) == 0  # us
while lib.kvhostFailed(b"cuEventCreate") < 16:
    time.sleep(0.001)
time.sleep(0.15)  # there are events now, and the first coverage could be written
opened = time.monotonic_ns()
libc.sem_post(semaphore)
%s
assert lib.cudaDeviceSynchronize() == 0
over = time.monotonic_ns()
for _ in range(50):
    time.sleep(0.005)
    assert lib.kvhostLaunchDelay(stream, u64(1_000_000)) == 0
    assert lib.cudaMemcpyAsync(device, host, u64(100_000), 1, stream) == 0
    assert lib.cudaStreamSynchronize(stream) == 0
open(%r, "w").write(f"{opened} {over}")
"""


@pytest.mark.parametrize("then", ["lib.cudaStreamSynchronize(stream)", "time.sleep(0.05)"], ids=["waits", "leaves"])
def test_what_is_submitted_before_there_are_events_is_not_called_idle(
    libraries: Path, tmp_path: Path, then: str
) -> None:
    """Work that no event follows: until it is over, what the device did is not known.

    Behind the copies a function of the host sleeps for 5 ms. However busy the machine is, the stream has work for so
    long at least since it was opened; a fifth is left to the mark's place on the host's clock.
    """
    recording = recorded(libraries, tmp_path, "", LATE % (then, str(tmp_path / "times")), KVHOST_CLOCK="real")
    opened, over = map(int, (tmp_path / "times").read_text().split())
    spans, seen = recording.spans, recording.coverage
    whole = Cover(seen["start_ns"][seen["reason"] == 0], seen["end_ns"][seen["reason"] == 0])
    first, last = np.array([opened]), np.array([opened + 4_000_000])
    worked = Cover(spans["start_ns"], spans["end_ns"]).within(first, last)[0]
    assert whole.within(first, last)[0] <= worked
    reasons = {recording.text(int(one)) for one in seen["reason"]}
    assert "work was submitted that no timing event followed" in reasons
    assert whole.within(np.array([over]), np.array([over + 10**10]))[0] > 0  # what comes later is known


def test_a_run_of_many_launches_is_a_few_marks(libraries: Path, tmp_path: Path) -> None:
    body = """
for _ in range(800):
    d.launch(50_000)
d.sync(d.compute)
"""
    recording = recorded(libraries, tmp_path, body)
    spans = recording.spans
    kernels = spans["engine"] == Engine.KERNEL
    assert int(spans["count"][kernels].sum()) >= 800
    (ring,) = (read_ring(path) for path in tmp_path.glob("*.kvp"))
    assert int((ring.marks()["call"] == SPAN).sum()) < 120
    computed = Cover(spans["start_ns"][kernels], spans["end_ns"][kernels]).total_ns
    assert computed == pytest.approx(40_000_000, rel=0.05)


def test_a_burst_of_copies_costs_a_record_for_twenty_copies_or_more(libraries: Path, tmp_path: Path) -> None:
    """A record costs its caller as much as half a copy: a few behind the gap, three samples of two, one at the end."""
    bursts = 20
    body = f"""
for _ in range({bursts}):
    for _ in range(256):
        d.load(0, 4096, d.copies[0])
    d.sync(d.copies[0])
"""
    recorded(libraries, tmp_path, body)
    (ring,) = (read_ring(path) for path in tmp_path.glob("*.kvp"))
    spans = int((ring.marks()["call"] == SPAN).sum())
    before = 25  # of the device's own first calls
    assert bursts < spans <= 12 * bursts + before


def test_what_a_memset_writes_is_no_byte_of_the_copy_beside_it(libraries: Path, tmp_path: Path) -> None:
    """Both are too short to be told apart: the link would seem to carry a thousand GB/s."""
    body = """
import ctypes as ct
d.launch(1_000_000)
for _ in range(4):
    d.lib.cudaMemsetAsync(ct.c_void_p(d.device), 0, ct.c_size_t(4 << 20), ct.c_void_p(d.compute))
    d.load(0, 8192, d.compute)
d.sync(d.compute)
"""
    spans = recorded(libraries, tmp_path, body).spans
    after = int(spans["end_ns"][spans["engine"] == Engine.KERNEL].max())
    copies = (spans["engine"] == Engine.COPY) & (spans["start_ns"] >= after)
    assert int(spans["count"][copies].sum()) > 4 and int(spans["bytes"][copies].sum()) == 4 * 8192


UNTOLD = "several kinds of work that could not be told apart"


def lasted(recording: Recording, reason: str) -> int:
    """How long coverage says so, ns."""
    seen = recording.coverage
    mine = np.array([recording.text(int(one)) == reason for one in seen["reason"]], dtype=bool)
    return int((seen["end_ns"] - seen["start_ns"])[mine].sum())


AHEAD = """
for step in range(60):
    %s
    d.record(step %% 2, d.compute)
    if step:
        d.sync_event(1 - step %% 2)
d.synchronize()
"""


def test_copies_and_kernels_submitted_far_ahead_are_told_by_what_each_takes(libraries: Path, tmp_path: Path) -> None:
    """Two steps of 320 copies and two kernels of 0.3 ms stand in one stream: a mark for each kind is too many there."""
    work = "[d.load(i, 8192, d.compute) for i in range(320)], d.launch(300_000), d.launch(300_000)"
    recording = recorded(libraries, tmp_path, AHEAD % work)
    assert sum(busy(recording, Engine.KERNEL)) == pytest.approx(60 * 600_000, rel=0.02)
    assert lasted(recording, UNTOLD) < 0.05 * lasted(recording, "")
    copies = recording.spans["engine"] == Engine.COPY
    assert recording.spans["bytes"][copies].sum() >= 60 * 320 * 8192


def test_copies_that_take_turns_are_one_run(libraries: Path, tmp_path: Path) -> None:
    """A block leaves and another one comes, 150 times a step: a mark for each would cost more than the copies."""
    work = """d.launch(600_000)
    for i in range(150):
        d.copy(d.host, d.device, 16384, 2, d.compute)
        d.copy(d.device, d.host, 16384, 1, d.compute)"""
    recording = recorded(libraries, tmp_path, AHEAD % work)
    (ring,) = (read_ring(path) for path in tmp_path.glob("*.kvp"))
    spans = ring.marks()[ring.marks()["call"] == SPAN]
    assert (spans["dst"] > 0).sum() < 60 * 300 / 20
    assert sum(busy(recording, Engine.KERNEL)) == pytest.approx(60 * 600_000, rel=0.02)
    assert lasted(recording, UNTOLD) < 0.05 * lasted(recording, "")
    moved = recording.spans
    for way in (Direction.H2D, Direction.D2H):
        mine = (moved["engine"] == Engine.COPY) & (moved["direction"] == way)
        assert moved["bytes"][mine].sum() == pytest.approx(60 * 150 * 16384, rel=0.01)


def test_large_copies_that_take_turns_have_a_mark_each(libraries: Path, tmp_path: Path) -> None:
    """What a mark costs is little beside them, and how long each takes tells the link's rate."""
    body = """
for i in range(100):
    d.copy(*((d.device, d.host, 1 << 20, 1) if i % 2 else (d.host, d.device, 1 << 20, 2)), d.compute)
d.sync(d.compute)
"""
    spans = recorded(libraries, tmp_path, body).spans
    large = (spans["engine"] == Engine.COPY) & (spans["bytes"] == 1 << 20)
    assert large.sum() == 100 and (spans["count"][large] == 1).all()


def test_copies_that_take_turns_one_by_one_are_told_by_those_that_were_alone(libraries: Path, tmp_path: Path) -> None:
    """The host submits a copy in 6 us, the device takes 4: in a run of both ways it is idle between them."""
    body = """
import ctypes as ct
now = d.lib.kvhostNow
now.restype = ct.c_uint64
for step in range(40):
    for i in range(300):
        d.copy(*((d.device, d.host, 8192, 1) if i % 2 else (d.host, d.device, 8192, 2)), d.compute)
        d.check(d.lib.kvhostAdvance(ct.c_uint64(now() + 5_000)))
    d.sync(d.compute)
"""
    recording = recorded(libraries, tmp_path, body)
    assert not lasted(recording, UNTOLD)
    assert sum(busy(recording, Engine.COPY)) == pytest.approx(40 * 300 * 4_000, rel=0.1)


def test_what_a_stream_did_is_told_when_it_is_destroyed(libraries: Path, tmp_path: Path) -> None:
    """A stream for each request, of 3 ms; each third is waited for, the others have work left when they go."""
    body = """
import ctypes as ct
d.lib.cudaStreamDestroy.argtypes = [ct.c_void_p]
d.launch(1_000)
d.sync(d.compute)
for request in range(12):
    stream = d.stream()
    for _ in range(3):
        d.launch(1_000_000, stream)
    if request % 3 == 0:
        d.sync(stream)
    d.check(d.lib.cudaStreamDestroy(stream))
d.synchronize()
"""
    recording = recorded(libraries, tmp_path, body)
    spans = recording.spans
    kernels = (spans["engine"] == Engine.KERNEL) & (spans["end_ns"] - spans["start_ns"] > 500_000)
    assert int(spans["count"][kernels].sum()) == 36
    ran = Cover(spans["start_ns"][kernels], spans["end_ns"][kernels])
    begin, end = int(spans["start_ns"][kernels].min()), int(spans["end_ns"][kernels].max())
    assert int(ran.within(begin, end)) == pytest.approx(5 * 3_000_000, rel=0.01)
    assert Cover(recording.coverage["start_ns"], recording.coverage["end_ns"]).within(begin, end) == end - begin


def test_without_marks_nothing_is_said_of_the_device(libraries: Path, tmp_path: Path) -> None:
    recording = recorded(libraries, tmp_path, "d.launch(1_000_000)\nd.sync(d.compute)\n", KVPROBE_MARKS="off")
    assert recording.calls.rows
    assert not recording.spans.rows
    assert not recording.coverage.rows


HELD = "import ctypes as ct, os\nfor on in (0, 1):\n    ct.CDLL(None).kvprobe_marks(on)\n"  # as a calibration does it
CAPTURED = """
import ctypes as ct, os
lib, stream, graph = ct.CDLL(os.environ["KVPROBE_HOSTRT"]), ct.c_void_p(), ct.c_void_p()
assert lib.cudaStreamCreate(ct.byref(stream)) == 0
assert lib.cudaStreamBeginCapture(stream, 0) == 0
assert lib.cudaStreamEndCapture(stream, ct.byref(graph)) == 0
"""


@pytest.mark.parametrize("before", [HELD, CAPTURED], ids=["calibration", "capture"])
def test_what_holds_marks_off_before_the_first_one_ends(libraries: Path, tmp_path: Path, before: str) -> None:
    body = "for _ in range(30):\n    d.launch(5_000_000)\n    d.sync(d.compute)\n"
    recording = recorded(libraries, tmp_path, body, before)
    computed = [ns for ns in busy(recording, Engine.KERNEL) if ns > 1_000_000]
    assert computed == pytest.approx([5_000_000] * 30, abs=NEAR_NS)


def test_the_programs_last_error_and_its_captures_are_left_alone(libraries: Path, tmp_path: Path) -> None:
    body = """
import ctypes as ct
d.launch(100_000)
d.sync(d.compute)
assert d.lib.cudaStreamBeginCapture(ct.c_void_p(d.compute), 0) == 0
for _ in range(50):
    d.launch(1_000)
graph = ct.c_void_p()
assert d.lib.cudaStreamEndCapture(ct.c_void_p(d.compute), ct.byref(graph)) == 0
assert d.lib.cudaGetLastError() == 0
assert d.lib.cudaMemcpyAsync(None, None, 5, 99, None) != 0
d.launch(100_000)
d.sync(d.compute)
d.lib.cudaStreamDestroy(ct.c_void_p(d.copies[0]))
assert d.lib.cudaGetLastError() != 0
"""
    recording = recorded(libraries, tmp_path, body)
    kernels = recording.spans["engine"] == Engine.KERNEL
    assert int(recording.spans["count"][kernels].sum()) < 50  # what was captured did not run


@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside"])
def test_a_capture_hides_nothing_where_all_that_is_submitted_goes_into_it(
    libraries: Path, tmp_path: Path, beside: bool
) -> None:
    """A graph captured anew for each batch: the GPU stands idle meanwhile, unless another stream is given something."""
    body = f"""
import ctypes as ct
graph, begin = ct.c_void_p(), d.lib.kvhostNow
begin.restype = ct.c_uint64
print(begin())
for batch in range(20):
    d.launch(700_000)
    if batch % 4:
        d.sync(d.compute)
    assert d.lib.cudaStreamBeginCapture(ct.c_void_p(d.copies[0]), 0) == 0
    for _ in range(40):
        d.launch(1_000, d.copies[0])
    d.check(d.lib.kvhostAdvance(ct.c_uint64(begin() + 1_000_000)))
    if {beside}:
        d.launch(50_000)
    assert d.lib.cudaStreamEndCapture(ct.c_void_p(d.copies[0]), ct.byref(graph)) == 0
d.synchronize()
print(begin())
"""
    recording = recorded(libraries, tmp_path, body)
    seen = recording.coverage
    reasons = {recording.text(int(one)) for one in seen["reason"]}
    assert ("a graph was being captured" in reasons) == beside
    computed = busy(recording, Engine.KERNEL, 600_000)
    if not beside:
        assert computed == pytest.approx([700_000] * 20, abs=NEAR_NS)


@pytest.mark.parametrize("call", ["cuEventRecord", "cuEventQuery", "cuEventElapsedTime"])
def test_marks_end_where_a_call_of_theirs_fails(libraries: Path, tmp_path: Path, call: str) -> None:
    body = f"""
d.launch(100_000)
d.sync(d.compute)
assert d.lib.kvhostFailCall(b"{call}", ct.c_uint64(2), 999) == 0
for i in range(60):
    d.launch(100_000)
    d.load(i, 100_000, d.copies[0])
    d.sync(d.compute)
d.synchronize()
assert d.lib.kvhostFailed(b"{call}") == 1
assert d.lib.cudaGetLastError() == 0
"""
    recording = recorded(libraries, tmp_path, "import ctypes as ct\n" + body)
    reasons = {recording.text(int(one)) for one in recording.coverage["reason"]}
    assert "a call for a mark failed" in reasons


def queues(recording: Recording) -> list[StreamOccupancy]:
    return occupancy(recording).streams


def test_marks_count_the_queue_slot_by_slot(libraries: Path, tmp_path: Path) -> None:
    """2,500 copies of 25 µs from a thread that submits one in 1 µs: behind 1,021 a call waits for a slot."""
    body = """
for i in range(2500):
    d.load(i, 100_000, d.copies[0])
d.synchronize()
"""
    recording = recorded(libraries, tmp_path, body)
    (full,) = (queue for queue in queues(recording) if queue.conclusion.full)
    assert "counted by timing events" in full.conclusion.because
    assert 1_015 <= full.depth[full.blocked].min() <= full.depth.max() <= 1_021
    assert full.blocked.sum() > 1_000


def test_events_take_slots_too(libraries: Path, tmp_path: Path) -> None:
    """K, V and an event a block: 680 copies outstanding fill a queue of 1,021 slots."""
    body = """
for i in range(1200):
    d.load(2 * i, 100_000, d.copies[0])
    d.load(2 * i + 1, 100_000, d.copies[0])
    d.record(i, d.copies[0])
d.synchronize()
"""
    recording = recorded(libraries, tmp_path, body)
    (full,) = (queue for queue in queues(recording) if queue.conclusion.full)
    assert "counted by timing events" in full.conclusion.because
    assert 675 <= full.depth[full.blocked].min() <= full.depth.max() <= 684  # copies: three slots for two of them


def test_a_queue_that_marks_counted_below_its_depth_was_not_full(libraries: Path, tmp_path: Path) -> None:
    """Slow calls, few outstanding: that they are slow is no question of slots."""
    body = """
for i in range(300):
    d.load(i, 100_000, d.copies[0])
    if i % 20 == 0:
        d.sync(d.copies[0])
d.synchronize()
"""
    recording = recorded(libraries, tmp_path, body)
    reasons = [queue.conclusion for queue in queues(recording)]
    assert {one.state for one in reasons} == {"not full"}
    most = r"no call began with more than (\d+) others outstanding, and a queue takes 900"
    found = [re.match(most, one.because) for one in reasons]
    assert any(one and int(one[1]) < 64 for one in found), reasons


LEFT = """
for i in range(%d):
    d.load(i, 100_000, d.copies[0])
d.launch(60_000_000)
d.sync(d.compute)
d.launch(60_000_000)
d.sync(d.compute)
%s
d.synchronize()
"""


@pytest.mark.parametrize("then", ["", "d.load(0, 100_000, d.copies[0])", "d.order(d.copies[0], d.compute, 0)"])
@pytest.mark.parametrize("copies", [5, 480], ids=["few", "many"])
def test_a_run_that_nobody_goes_on_with_ends_when_it_ends(
    libraries: Path, tmp_path: Path, copies: int, then: str
) -> None:
    """25 µs a copy, and nothing more in that stream for 120 ms: whatever comes then, it was not copying meanwhile."""
    recording = recorded(libraries, tmp_path, LEFT % (copies, then))
    spans, seen = recording.spans, recording.coverage
    mine = spans["engine"] == Engine.COPY
    ends = spans["start_ns"][mine].min() + 10_000_000
    in_time = spans["start_ns"][mine] < ends
    assert spans["end_ns"][mine][in_time].max() < ends
    length = spans["end_ns"] - spans["start_ns"]
    second = np.flatnonzero((spans["engine"] == Engine.KERNEL) & (length > 50_000_000))[-1:]
    whole = Cover(seen["start_ns"][seen["reason"] == 0], seen["end_ns"][seen["reason"] == 0])
    known = whole.within(spans["start_ns"][second], spans["end_ns"][second])
    assert known[0] == pytest.approx(60_000_000, rel=0.02)


TURNS = """
import ctypes as ct
now = d.lib.kvhostNow
now.restype = ct.c_uint64
others = [d.stream() for _ in range(6)]
for other in others + [d.stream() for _ in range(IDLE)]:
    d.launch(500, other)
for ends in (None, *others):
    if ends is not None:
        d.check(d.lib.kvhostAdvance(ct.c_uint64(now() + 700_000_000)))
        d.check(d.lib.cudaStreamDestroy(ct.c_void_p(ends)))
    for _ in range(180 if ends else 500):
        for _ in range(20):
            d.launch(500)
            d.copy(d.device, d.host, 256, 1, d.compute)
        d.sync(d.compute)
"""


def lengths(recording: Recording) -> np.ndarray:
    """How long each stretch between two pauses was, ns."""
    seen = recording.coverage
    paused = seen["stopped"] == PAUSED
    begins, ends = np.sort(seen["start_ns"][paused]), np.sort(seen["end_ns"][paused])
    return begins[1:] - ends[:-1]


def test_a_stretch_has_a_length_of_time_whatever_its_marks_cost(libraries: Path, tmp_path: Path) -> None:
    """Kernels and copies by turns, each with a mark: what those cost is spent long before a stretch is long enough.

    It is as long as what is saved up for it lasts, by what the one before cost; and no shorter than `SHORTEST_NS`. In
    simulated time nobody looks in a pause but where a stream ends: there a stretch begins.
    """
    length = lengths(recorded(libraries, tmp_path, TURNS.replace("IDLE", "0")))
    assert len(length) > 2 and length.min() >= SHORTEST_NS and np.median(length) < 5_000_000


def test_a_stretch_costs_no_marks_in_idle_streams(libraries: Path, tmp_path: Path) -> None:
    """They are known by a question: a GPU may reach a mark in one late, behind what other streams have for its engine.

    With a mark in each, 180 idle streams would cost what half of a stretch does, and make the next ones shorter.
    """
    (tmp_path / "0").mkdir(), (tmp_path / "180").mkdir()
    few, many = (lengths(recorded(libraries, tmp_path / n, TURNS.replace("IDLE", n))) for n in ("0", "180"))
    assert len(few) == len(many) and many.tolist() == pytest.approx(few.tolist(), rel=0.05)


def test_a_stretch_is_as_long_whatever_came_before_it_was_costly(libraries: Path, tmp_path: Path) -> None:
    """The first one begins with the process: a second in which nothing is submitted says nothing of what marks cost."""
    late = "d.launch(500)\nd.sync(d.compute)\nd.check(d.lib.kvhostAdvance(ct.c_uint64(now() + 1_000_000_000)))\n"
    length = []
    for name, first in (("at once", ""), ("late", late)):
        (tmp_path / name).mkdir()
        body = TURNS.replace("IDLE", "0").replace("others =", first + "others =", 1)
        length.append(lengths(recorded(libraries, tmp_path / name, body))[0])
    assert length[1] == pytest.approx(length[0], rel=0.1)


STEPPED = """
import ctypes as ct
now = d.lib.kvhostNow
now.restype = ct.c_uint64
def kernels(until):
    while now() < until:
        d.launch(20_000)
        d.sync(d.compute)
        d.check(d.lib.kvhostAdvance(ct.c_uint64(now() + 30_000)))
begin = now()
kernels(begin + 40_000_000)
"""


def kernels_of(recording: Recording) -> tuple[np.ndarray, np.ndarray]:
    """When each kernel of 20 us began, from the first of them on, and how long it seems to have run, ns."""
    spans = recording.spans
    mine = np.flatnonzero((spans["engine"] == Engine.KERNEL) & (spans["count"] == 1))
    start, took = spans["start_ns"][mine], (spans["end_ns"] - spans["start_ns"])[mine]
    return (start - start[took > 10_000].min())[took > 10_000], took[took > 10_000]


def test_a_device_clock_that_steps_is_placed_again_soon(libraries: Path, tmp_path: Path) -> None:
    """What was best before it stepped is not kept for long: kernels would seem to end 10 us later."""
    body = (
        STEPPED
        + """
d.lib.kvhostStepDeviceClock(ct.c_int64(10_000))
kernels(begin + 240_000_000)
"""
    )
    start, took = kernels_of(recorded(libraries, tmp_path, body))
    assert took[start < 35_000_000] == pytest.approx(20_000, abs=3_000)
    assert took[(start > 40_000_000) & (start < 60_000_000)].max() > 27_000  # it did step
    assert len(took[start > 150_000_000]) > 500
    assert took[start > 150_000_000] == pytest.approx(20_000, abs=3_000)


def test_the_clock_is_placed_anew_behind_a_pause(libraries: Path, tmp_path: Path) -> None:
    """The device's clock steps in a pause, and the stretch behind it is shorter than what was best is kept."""
    body = (
        STEPPED.replace("begin = now()", "other = d.stream()\nd.launch(500, other)\nbegin = now()")
        + """
for _ in range(500):
    for _ in range(20):
        d.launch(500)
        d.copy(d.device, d.host, 256, 1, d.compute)
    d.sync(d.compute)
d.check(d.lib.kvhostAdvance(ct.c_uint64(now() + 700_000_000)))
d.lib.kvhostStepDeviceClock(ct.c_int64(10_000))
d.check(d.lib.cudaStreamDestroy(ct.c_void_p(other)))
kernels(now() + 20_000_000)
"""
    )
    recording = recorded(libraries, tmp_path, body)
    assert (recording.coverage["stopped"] == PAUSED).sum() >= 1
    start, took = kernels_of(recording)
    behind = start > 700_000_000
    assert behind.sum() > 100
    assert took[behind][20:] == pytest.approx(20_000, abs=3_000)


def test_how_long_a_kernel_takes_is_known_where_the_next_call_comes_much_later(libraries: Path, tmp_path: Path) -> None:
    """An operator waits for its input, runs for 1 us, and the next comes 8 us later: in between nothing runs."""
    body = """
import ctypes as ct
now = d.lib.kvhostNow
now.restype = ct.c_uint64
other = d.copies[0]
d.record(0, other)
for operator in range(900):
    d.check(d.lib.cudaStreamWaitEvent(d.compute, d.events[0], 0))
    d.launch(1_000)
    d.check(d.lib.kvhostAdvance(ct.c_uint64(now() + 8_000)))
d.sync(d.compute)
"""
    spans = recorded(libraries, tmp_path, body).spans
    kernels = spans["engine"] == Engine.KERNEL
    assert int(spans["count"][kernels].sum()) >= 900
    assert int((spans["end_ns"] - spans["start_ns"])[kernels].sum()) < 900 * 3_000
    assert spans.rows < 2 * 900 + 20, "a mark for each wait and each kernel, as where it stands in front of the next"


def test_the_clocks_are_placed_where_the_device_is_never_idle(libraries: Path, tmp_path: Path) -> None:
    """Steps are launched two ahead, and what an idle stream is given waits for the engine: no mark is reached soon.

    A mark that was asked and not over was not reached until then.
    """
    body = """
import ctypes as ct
now = d.lib.kvhostNow
now.restype = ct.c_uint64
monitor = d.copies[0]
for step in range(200):
    for _ in range(5):
        d.launch(1_000_000)
    d.copy(d.host, d.device, 512, 2, d.compute)
    d.record(step % 4, d.compute)
    if step % 3 == 2:
        d.copy(d.host + 4096, d.device + 4096, 4096, 2, monitor)
    if step > 1:
        d.sync_event((step - 2) % 4)
    d.check(d.lib.kvhostAdvance(ct.c_uint64(now() + 10_000)))
d.synchronize()
"""
    recording = recorded(libraries, tmp_path, body, CUDA_DEVICE_MAX_CONNECTIONS="1")
    assert sum(busy(recording, Engine.KERNEL)) == pytest.approx(200 * 5_000_000, rel=0.02)
