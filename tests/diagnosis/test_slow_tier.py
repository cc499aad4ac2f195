"""`slow_tier`: reads of a throttled file, in virtual time, are named where the GPU or the launching thread waits."""

from __future__ import annotations

import ctypes as ct
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hostruntime import Runtime, recording_of
from scenarios import BLOCK, RATE, Stage

from kvprobe.account import Line
from kvprobe.diagnosis import Examination, Finding, examine
from kvprobe.diagnosis.verdict import of_recording
from kvprobe.recordings.joined import Joined
from kvprobe.recordings.model import Recording, Table
from kvprobe.recordings.vocabulary import Names

STEPS, DECODE_NS, TOKENS = 40, 2_000_000, 64
PREFILL_NS = 40_000  # of a token: a block is computed in 2.6 ms
LOADER = 99
OTHERS = {"gpu_starved", "python_or_gil_bound", "redundant_loads", "waiting_for_host", "unexplained"}


class Tier:
    """A file on a disk that is so slow: each read really fills the memory, and the clock goes on by what it takes."""

    def __init__(self, runtime: Runtime, path: Any, bytes_per_s: float, kind: str = "file") -> None:
        self.runtime, self.rate, self.kind, self.path = runtime, bytes_per_s, kind, str(path)
        path.write_bytes(bytes(BLOCK))
        self.fd = os.open(path, os.O_RDONLY)
        self.operations: list[dict[str, int]] = []

    def read(self, address: int, thread: int = 0) -> None:
        began = self.runtime.now_ns()
        memory = (ct.c_char * BLOCK).from_address(address)
        assert os.preadv(self.fd, [memory], 0) == BLOCK
        self.runtime.sleep(round(BLOCK / self.rate * 1e9))
        self.noted(began, self.runtime.now_ns(), address, thread)

    def noted(self, began: int, ended: int, address: int, thread: int) -> None:
        row = {"start_ns": began, "end_ns": ended, "thread": thread, "address": address, "bytes": BLOCK}
        self.operations.append({**row, "place": 2, "count": 1})

    def into(self, recording: Recording) -> None:
        """The tables that a run makes of it; thread 0 is the one that launches."""
        names = Names(recording.names)
        own = int(recording.calls["thread"][0])
        columns = {key: np.array([one[key] for one in self.operations]) for key in self.operations[0]}
        columns["thread"][columns["thread"] == 0] = own
        columns["address"] = columns["address"].astype(np.uint64)
        recording.tables["tier_operations"] = Table("tier_operations", columns)
        recording.tables["tiers"] = Table(
            "tiers", {"place": [2], "kind": [names.add(self.kind)], "path": [names.add(self.path)], "process": [0]}
        )
        recording.names = names.list


@pytest.fixture
def tier(runtime: Runtime, tmp_path: Any) -> Callable[..., Tier]:
    return lambda rate=RATE, kind="file": Tier(runtime, tmp_path / f"{rate:.0f}.kv", rate, kind)


def told(recording: Recording, token_bytes: int, prefill_ns: float) -> None:
    """What an adapter of a server tells of its offload."""
    names = Names(recording.names)
    recording.tables["offload"] = Table(
        "offload",
        {
            "time_ns": [0],
            "process": [0],
            "server": [names.add("vllm")],
            "source": [names.add("disk")],
            "hit_tokens": [STEPS * TOKENS],
            "loaded_bytes": [STEPS * TOKENS * token_bytes],
            "loaded_blocks": [STEPS],
            "prefill_ns_per_token": [prefill_ns],
        },
    )
    recording.names = names.list


def loop(runtime: Runtime, step: Callable[[Stage, int], None]) -> tuple[Recording, int]:
    """A server's loop of steps, and how long it took."""
    stage = Stage(runtime, h2d=10 * RATE, d2h=10 * RATE)

    def body() -> int:
        begin = runtime.now_ns()
        runtime.launch(stage.compute, DECODE_NS)  # what comes before the first call is no serving
        runtime.sync(stage.compute)
        for i in range(STEPS):
            step(stage, i)
            runtime.launch(stage.compute, DECODE_NS)
            runtime.sync(stage.compute)
        return runtime.now_ns() - begin

    records, took = runtime.trace(body)
    return recording_of(runtime, records), took


def from_tier(runtime: Runtime, tier: Tier, thread: int = 0) -> tuple[Recording, int]:
    def step(stage: Stage, i: int) -> None:
        tier.read(stage.host + i % 8 * BLOCK, thread)
        stage.load(i % 8, BLOCK, stage.streams[0])
        stage.after(stage.compute, stage.streams[0], i)

    recording, took = loop(runtime, step)
    tier.into(recording)
    return recording, took


def named(found: Examination) -> Finding:
    (one,) = [one for one in found if one.cause == "slow_tier"]
    return one


def test_a_throttled_file_is_named_with_its_path_rate_and_share(runtime: Runtime, tier: Callable[..., Tier]) -> None:
    slow = tier(0.2 * RATE)
    recording, took = from_tier(runtime, slow)
    found = examine(recording)
    truth = STEPS * BLOCK / (0.2 * RATE) * 1e9
    one = named(found)
    assert found[0] is one and one.severity == "critical" and one.confidence == "certain"
    assert one.lost_ns == pytest.approx(truth, rel=0.001)
    assert f"from {slow.path}" in one.title
    assert "0.2 GB/s" in one.evidence[0].text and f"{STEPS} reads of 41.9 MB" in one.evidence[0].text
    gpu = found.account.main
    assert gpu is not None and gpu.share(Line.TIER) == pytest.approx(truth / took, abs=0.03)
    assert one.device_ns == pytest.approx(truth, rel=0.03)
    assert one.cure[0].predicted_saving_ns == pytest.approx(truth, rel=0.03)
    assert not {other.cause for other in found if not other.abstains} & OTHERS
    assert of_recording(recording, found).state == "found"


@pytest.mark.parametrize("written", [STEPS, STEPS // 4])
def test_writes_are_to_be_made_behind_the_step_and_flushed_less_often(
    runtime: Runtime, tier: Callable[..., Tier], written: int
) -> None:
    """Every second write is a flush; where more is read than written, reading ahead comes first."""
    recording, _ = from_tier(runtime, tier(0.2 * RATE))
    table, names = recording.tier_operations, Names(recording.names)
    rows = np.arange(STEPS)
    kinds = names.map(["write", "fsync"])
    columns = {name: table[name] for name in table.columns}
    columns |= {"writes": (rows < written).astype(np.uint8), "name": np.where(rows < written, kinds[rows % 2], 0)}
    recording.tables["tier_operations"] = Table("tier_operations", columns)
    recording.names = names.list
    one = named(examine(recording))
    texts = [change.text.split(":")[0] for change in one.cure]
    reading = {"Read ahead", "Keep more blocks in CPU memory, so that fewer are read"}
    assert {*texts} - reading == {"Write behind", "Flush once for several steps, and not after each"}
    assert {*texts} >= reading if written < STEPS else not {*texts} & reading
    assert texts[0] == ("Write behind" if written == STEPS else "Read ahead")
    share = max(written, STEPS - written) / STEPS
    assert one.cure[0].predicted_saving_ns == pytest.approx(share * one.lost_ns, rel=0.03)
    assert any(f"{written // 2} of them waited until a file was on its disk" in said.text for said in one.evidence)


def test_where_no_rate_is_told_it_is_said_that_recomputing_cannot_be_judged(
    runtime: Runtime, tier: Callable[..., Tier]
) -> None:
    recording, _ = from_tier(runtime, tier(0.2 * RATE))
    assert named(examine(recording)).reason == (
        "cannot tell whether recomputing would be faster, because no adapter of a server told how many bytes a token "
        "takes and how fast prompts are computed"
    )


def test_the_break_even_is_where_both_ways_take_equally_long(runtime: Runtime, tier: Callable[..., Tier]) -> None:
    """Found by playing both: the rate of the file at which a loop that reads is as slow as one that computes."""

    def computes(stage: Stage, _: int) -> None:
        runtime.launch(stage.compute, TOKENS * PREFILL_NS)

    _, computing = loop(runtime, computes)
    low, high = 0.01 * RATE, 10 * RATE
    while high > 1.01 * low:
        rate = (low * high) ** 0.5
        low, high = (rate, high) if from_tier(runtime, tier(rate))[1] > computing else (low, rate)
    for rate in (low / 2, high * 2):
        recording, took = from_tier(runtime, tier(rate))
        told(recording, BLOCK // TOKENS, PREFILL_NS)
        one = named(examine(recording))
        (said,) = [evidence for evidence in one.evidence if evidence.text.startswith("break-even")]
        assert said.value == pytest.approx(low / 1e9, rel=0.1)
        slower = took > computing
        assert ("slower than computing" in one.title) == slower == any("Compute these" in c.text for c in one.cure)
        if slower:
            (change,) = [c for c in one.cure if "Compute these" in c.text]
            assert change.predicted_saving_ns == pytest.approx(took - computing, rel=0.1)


def test_a_thread_that_reads_for_the_one_that_launches_is_told_by_the_memory(
    runtime: Runtime, tier: Callable[..., Tier]
) -> None:
    recording, _ = from_tier(runtime, tier(0.2 * RATE), thread=LOADER)
    found = examine(recording)
    one = named(found)
    assert one.device_ns == pytest.approx(STEPS * BLOCK / (0.2 * RATE) * 1e9, rel=0.03)
    assert any("filled memory that copies to a GPU then read" in evidence.text for evidence in one.evidence)
    assert not {other.cause for other in found if not other.abstains} & OTHERS


def test_reads_far_longer_than_a_pause_are_no_time_without_work(runtime: Runtime, tier: Callable[..., Tier]) -> None:
    for thread in (0, LOADER):
        recording, _ = from_tier(runtime, tier(0.01 * RATE), thread)  # 105 ms each
        found = examine(recording)
        gpu = found.account.main
        assert gpu is not None and gpu.share(Line.TIER) > 0.9 > gpu.share(Line.NOTHING_TO_DO)
        assert named(found).severity == "critical"


def test_a_socket_whose_bytes_no_copy_takes_is_no_tier(runtime: Runtime, tier: Callable[..., Tier]) -> None:
    requests = tier(0.2 * RATE, "socket")

    def step(stage: Stage, i: int) -> None:
        requests.read(stage.host + stage.size - BLOCK)
        stage.load(i % 8, BLOCK, stage.streams[0])
        stage.after(stage.compute, stage.streams[0], i)

    recording, _ = loop(runtime, step)
    requests.into(recording)
    assert not Joined(recording).tier_uses.tier.any()
    assert "slow_tier" not in {one.cause for one in examine(recording)}
    recording, _ = from_tier(runtime, tier(0.2 * RATE, "socket"))
    assert named(examine(recording)).severity == "critical"


def ahead(runtime: Runtime, tier: Tier, thread: int) -> Recording:
    """Each step reads for the next one while the GPU computes without a pause."""

    def step(stage: Stage, i: int) -> None:
        runtime.launch(stage.compute, 10_000_000)
        tier.read(stage.host + i % 8 * BLOCK, thread)
        if i:
            stage.load((i - 1) % 8, BLOCK, stage.streams[0])

    recording, _ = loop(runtime, step)
    tier.into(recording)
    return recording


def test_reading_ahead_on_another_thread_is_healthy(runtime: Runtime, tier: Callable[..., Tier]) -> None:
    recording = ahead(runtime, tier(0.2 * RATE), LOADER)
    found = examine(recording)
    assert not [one for one in found if not one.abstains]
    assert of_recording(recording, found).state == "healthy"


def test_a_tenth_of_the_launching_threads_time_in_reads_is_never_healthy(
    runtime: Runtime, tier: Callable[..., Tier]
) -> None:
    recording = ahead(runtime, tier(0.5 * RATE), 0)  # 2.1 of 12 ms, behind what the GPU computes
    found = examine(recording)
    assert named(found).severity == "warning"
    assert of_recording(recording, found).state == "found"


def test_a_recording_of_another_tool_is_not_looked_at(runtime: Runtime) -> None:
    recording, _ = loop(runtime, lambda stage, i: None)
    assert [one.cause for one in examine(recording).not_looked_for if "files" in one.because] == ["slow_tier"]
