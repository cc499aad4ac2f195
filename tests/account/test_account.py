"""Every instant of a recording is in exactly one line, and the lines are what a plain union of intervals says."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvprobe.account import COPIES, HOST, Account, Line, Unknown, account_of
from kvprobe.diagnosis import Examination, examine
from kvprobe.diagnosis.verdict import of_recording
from kvprobe.recordings import open_recording
from kvprobe.recordings.joined import Joined
from kvprobe.recordings.model import CallKind, Direction, Engine, Recording, Source, Table
from tests.public_recordings import folder

DATA = Path(__file__).resolve().parents[1] / "gpu" / "data"
KEPT = sorted(
    path
    for form in ("kineto", "nsys")
    for base in ("corpus", "accounts", "fresh")
    for path in (DATA / base / form).glob("*.gz")
)


def opened(path: Path, into: Path) -> Recording:
    if path.name.endswith(".sqlite.gz"):
        plain = into / path.name.removesuffix(".gz")
        plain.write_bytes(gzip.decompress(path.read_bytes()))
        path = plain
    return open_recording([path])


def length(start: np.ndarray, end: np.ndarray, begin: int, stop: int) -> int:
    """Length of the union of intervals inside a window, by going through them one by one."""
    covered, reach = 0, begin
    for a, b in sorted(zip(start.tolist(), end.tolist(), strict=True)):
        a, b = max(a, reach), min(b, stop)
        if b > a:
            covered += b - a
            reach = b
    return covered


def plain_shares(recording: Recording, device: int, begin: int, stop: int) -> tuple[float, float, float]:
    """Shares of a window in which kernels ran, only copies ran, nothing ran."""
    table = recording.executions
    mine = table["device"] == device
    mine &= table["engine"] != Engine.OTHER  # graphs in one piece are of a line of their own
    kernels = mine & (table["engine"] != Engine.COPY)
    computing = length(table["start_ns"][kernels], table["end_ns"][kernels], begin, stop)
    busy = length(table["start_ns"][mine], table["end_ns"][mine], begin, stop)
    window = stop - begin
    return computing / window, (busy - computing) / window, (window - busy) / window


def agrees(recording: Recording, account: Account) -> None:
    for gpu in account.gpus:
        assert sum(gpu.ns(line) for line in Line) == gpu.window_ns == gpu.to_ns - gpu.from_ns
        said = gpu.to_json()
        parts = [said["computing_ns"], said["nothing_to_do_ns"], *said["waiting_for_copies_ns"].values()]
        parts += [*said["waiting_for_host_ns"].values(), *said["not_known_ns"].values()]
        assert sum(parts) == said["window_ns"]
        if len({one.device for one in account.gpus}) < len(account.gpus):
            continue  # ranks of several files, which all call their GPU the same
        plain = plain_shares(recording, gpu.device, gpu.from_ns, gpu.to_ns)
        idle = gpu.share(*HOST, Line.NOTHING_TO_DO, Line.NOT_KNOWN)
        mine = gpu.share(Line.COMPUTING), gpu.share(*COPIES), idle
        assert mine == pytest.approx(plain, abs=0.01)
    for thread in account.threads:
        assert sum(thread.ns(line) for line in Line) == thread.window_ns


@pytest.mark.parametrize("path", KEPT, ids=lambda path: f"{path.parent.name}-{path.name.split('.')[0]}")
def test_the_lines_of_a_recording_add_up_and_agree_with_a_union_of_intervals(path, tmp_path):
    recording = opened(path, tmp_path)
    agrees(recording, account_of(Joined(recording)))
    found = examine(recording)
    agrees(recording, found.account)  # causes move time between lines, and none away
    within_what_does_not_compute(found)


def within_what_does_not_compute(found: Examination) -> None:
    """All savings together are no more than what some GPU does not compute."""
    savings = [max((change.predicted_saving_ns or 0 for change in one.cure), default=0) for one in found]
    assert sum(savings) <= max((gpu.window_ns - gpu.ns(Line.COMPUTING) for gpu in found.account.gpus), default=0)


PUBLIC = sorted(path for path in folder().rglob("*") if path.name.endswith((".sqlite", ".json.gz")))


@pytest.mark.parametrize("path", PUBLIC, ids=lambda path: path.name)
def test_the_lines_of_a_public_recording_add_up_and_agree_with_a_union_of_intervals(path):
    recording = open_recording([path])
    agrees(recording, examine(recording).account)


def played(steps: list[tuple[int, int, int, bool]], slow_us: int = 0) -> Recording:
    """A program: of each step the host's preparation, a copy, a kernel (us each), and whether the kernel waits for it.

    One thread submits a copy and a kernel; the device runs each as soon as it can. Every tenth copy takes `slow_us`
    longer to submit.
    """
    calls: list[tuple[int, int, int, int]] = []
    ran: list[tuple[int, int, int, int]] = []
    now = copies = kernels = 0
    for number, (host, copy, kernel, ordered) in enumerate(steps):
        now += 1_000 * host
        for kind in (CallKind.COPY, CallKind.LAUNCH):
            took = 2_000 + 1_000 * slow_us * (kind == CallKind.COPY and number % 10 == 9)
            calls.append((now, now + took, kind, 2 * number + (kind == CallKind.LAUNCH)))
            now += took + 1_000
        begin = max(copies, calls[-2][1] + 2_000)
        copies = begin + 1_000 * copy
        ran.append((begin, copies, Engine.COPY, 2 * number))
        begin = max(kernels, calls[-1][1] + 2_000, copies if ordered else 0)
        kernels = begin + 1_000 * kernel
        ran.append((begin, kernels, Engine.KERNEL, 2 * number + 1))
    ran.sort()
    call = {
        name: np.array(column)
        for name, column in zip(("start", "end", "kind", "id"), zip(*calls, strict=True), strict=True)
    }
    run = {
        name: np.array(column)
        for name, column in zip(("start", "end", "engine", "id"), zip(*ran, strict=True), strict=True)
    }
    copying = run["engine"] == Engine.COPY
    recording = Recording([Source("random", "trace")], names=["", "cudaMemcpyAsync", "cudaLaunchKernel", "kernel"])
    launches = call["kind"] == CallKind.LAUNCH
    recording.tables["calls"] = Table(
        "calls",
        {
            "start_ns": call["start"],
            "end_ns": call["end"],
            "kind": call["kind"],
            "correlation": call["id"],
            "thread": np.full(len(calls), 7),
            "process": np.zeros(len(calls)),
            "name": np.where(launches, 2, 1),
            "stream": np.where(launches, 1, 0),
            "bytes": np.where(launches, 0, 50_000),
            "direction": np.where(launches, 0, Direction.H2D),
        },
    )
    recording.tables["executions"] = Table(
        "executions",
        {
            "start_ns": run["start"],
            "end_ns": run["end"],
            "engine": run["engine"],
            "correlation": run["id"],
            "process": np.zeros(len(ran)),
            "device": np.zeros(len(ran)),
            "name": np.full(len(ran), 3),
            "stream": np.where(copying, 0, 1),
            "bytes": np.where(copying, (run["end"] - run["start"]) * 55, 0),
            "direction": np.where(copying, Direction.H2D, 0),
        },
    )
    recording.tables["streams"] = Table("streams", {"process": [0, 0], "handle": [7, 8]})
    recording.tables["processes"] = Table("processes", {"pid": [1]})
    recording.has_executions = True
    return recording


def inside_the_gpu(recording: Recording) -> None:
    """Its copies move nothing over a link, so that nothing is said of their order and of what they load."""
    for table in (recording.calls, recording.executions):
        table["direction"][table["direction"] == Direction.H2D] = Direction.D2D


STEP = st.tuples(st.integers(0, 3_000), st.integers(1, 2_000), st.integers(1, 2_000), st.booleans())


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.lists(STEP, min_size=20, max_size=60))
def test_a_gpu_that_waits_is_never_healthy_and_no_saving_exceeds_its_waiting(steps):
    recording = played(steps)
    found = examine(recording)
    agrees(recording, found.account)
    (gpu,) = found.account.gpus
    _, alone, _ = plain_shares(recording, 0, gpu.from_ns, gpu.to_ns)
    pending = gpu.share(*HOST)
    if alone >= 0.1 or pending >= 0.1:
        assert of_recording(recording, found).state != "healthy"
    within_what_does_not_compute(found)


@pytest.mark.parametrize("name", ["nsys_saturated.sqlite.gz", "kineto_saturated.json.gz"])
def test_what_a_device_takes_from_one_operation_to_the_next_is_not_the_full_queue_s(name, tmp_path):
    """3,000 copies wait for a slot each; between two of them the device stands still for 1.3 us, as it always does."""
    found = examine(opened(DATA / name, tmp_path))
    (finding,) = [one for one in found if one.cause == "launch_queue_saturation"]
    (gpu,) = found.account.gpus
    assert finding.lost_ns > 9e6 and finding.device_ns < 100_000 > gpu.ns(Line.FULL_QUEUE)
    assert gpu.unknown_ns()[Unknown.BETWEEN_OPERATIONS] > 3.5e6


def test_slow_calls_that_nothing_explains_keep_no_gpu_from_being_healthy_that_computed_all_the_same():
    recording = played([(0, 20, 400, False)] * 200, slow_us=200)
    inside_the_gpu(recording)
    found = examine(recording)
    (question,) = [one for one in found if one.abstains]
    assert question.cause == "unexplained" and question.share > 0.03 and question.at_stake == "info"
    verdict = of_recording(recording, found)
    assert verdict.state == "healthy" and found.account.gpus[0].share(Line.COMPUTING) > 0.98


@pytest.mark.parametrize(("kernel_us", "state"), [(24, "undecided"), (25, "undecided"), (26, "healthy")])
def test_slow_calls_that_nothing_explains_weigh_what_the_gpu_waited_inside_them(kernel_us, state):
    """From 2% of the window on they leave it open. One copy in ten takes 200 us longer; kernels hide most of that."""
    recording = played([(0, 20, kernel_us, False)] * 200, slow_us=200)
    inside_the_gpu(recording)
    found = examine(recording)
    (question,) = [one for one in found if one.cause == "unexplained"]
    assert (question.cost_share >= 0.02) == (question.at_stake != "info") == (state == "undecided")
    assert of_recording(recording, found).state == state


def test_slow_calls_that_nothing_explains_leave_it_open_where_no_kernel_follows():
    recording = played([(0, 20, 1, False)] * 200, slow_us=200)
    inside_the_gpu(recording)
    recording.executions["engine"][2:] = Engine.COPY
    found = examine(recording)
    assert "unexplained" in {one.cause for one in found if one.abstains and one.at_stake != "info"}
    assert of_recording(recording, found).state == "undecided"


def test_what_is_copied_before_the_first_kernel_hides_nothing_of_what_comes_later():
    first = [(0, 9_000, 1, True)] * 20
    recording = played([*first, *[(0, 900, 400, True)] * 60])
    inside_the_gpu(recording)
    engine = recording.executions["engine"]
    engine[: len(first) * 2] = Engine.COPY
    found = examine(recording)
    gpu = found.account.gpus[0]
    assert gpu.computes[0] > gpu.from_ns + 150_000_000
    (named,) = [one for one in found if one.cause == "waiting_for_copies"]
    assert not named.abstains and named.lost_ns == pytest.approx(60 * 500_000, rel=0.1)


def test_a_pause_makes_no_waiting_quieter():
    recording = played([(0, 9_000, 4_000, True), (4_000_000, 9_000, 4_000, True), *[(0, 9_000, 4_000, True)] * 20])
    inside_the_gpu(recording)
    findings = examine(recording)
    (gpu,) = findings.account.gpus
    assert gpu.share(*COPIES) < 0.05 < 0.3 < gpu.waiting_share
    (found,) = [one for one in findings if one.cause == "waiting_for_copies"]
    assert found.severity == "critical" and found.title.rstrip(".").endswith(
        "of the time in which there was work to do"
    )
    assert of_recording(recording, findings).state == "found"


def test_a_program_that_computes_is_healthy_and_says_what_its_gpu_did():
    recording = played([(0, 20, 400, False)] * 60)
    inside_the_gpu(recording)
    found = examine(recording)
    verdict = of_recording(recording, found)
    assert verdict.state == "healthy" and "computed for 100%" in verdict.reason


def test_loads_that_nobody_fetched_ahead_are_named_with_their_share():
    recording = played([(0, 900, 400, True)] * 60)
    inside_the_gpu(recording)
    found = examine(recording)
    (first, *_) = [one for one in found if not one.abstains]
    assert first.cause == "waiting_for_copies" and first.severity == "critical"
    assert first.device_share == pytest.approx(500 / 900, abs=0.03)  # of each copy, what no kernel hides


def test_a_thread_that_prepares_between_steps_is_what_the_gpu_waited_for():
    recording = played([(900, 1, 500, False)] * 60)
    gpu = examine(recording).account.gpus[0]
    assert gpu.share(Line.ELSEWHERE) == pytest.approx(400 / 900, abs=0.03)


def test_the_account_of_a_process_whose_device_was_not_recorded_knows_nothing_and_is_undecided():
    recording = played([(0, 20, 400, False)] * 60)
    recording.tables["executions"], recording.has_executions = Table("executions"), False
    found = examine(recording)
    (gpu,) = found.account.gpus
    assert not gpu.seen and gpu.ns(Line.NOT_KNOWN) == gpu.window_ns
    assert of_recording(recording, found).state == "undecided"


def test_json_of_the_account_has_every_line(tmp_path):
    account = examine(played([(10, 20, 400, True)] * 40)).account
    said = json.loads(json.dumps(account.to_json()))
    (gpu,) = said["gpus"]
    assert set(gpu["waiting_for_copies_ns"]) == {"at_link_rate", "below_link_rate", "inside_gpu", "not_needed"}
    host = {"full_queue", "waiting_for_device", "allocating", "pageable", "submitting", "python", "no_cpu", "tier"}
    host.add("elsewhere")
    assert set(gpu["waiting_for_host_ns"]) == host
    assert {"gpu", "from_ns", "to_ns", "window_ns", "computing_ns", "nothing_to_do_ns", "not_known_ns"} <= set(gpu)
    assert said["threads"][0]["thread"] == 7
