"""A module's pageable copies under auto: equal bytes, torch's kind of tensors, the faster way, in virtual time."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kvprobe.instrument as instrument
from kvprobe.cuda.hostruntime import host_runtime
from kvprobe.instrument import device as device_module
from kvprobe.instrument import installation
from kvprobe.instrument.staged import CHUNK_BYTES, Turns
from kvprobe.testing.played_torch import PlayedTorch

torch = pytest.importorskip("torch")
MIB = 1 << 20
FAST = 20_000_000_000  # bytes a second of the link


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """`played(pageable_bytes_per_s)`: torch's GPU, played, with a driver that copies pageable memory at this rate."""
    made: list[PlayedTorch] = []

    def make(pageable: float) -> PlayedTorch:
        runtime = host_runtime(
            virtual_clock=True, h2d_bytes_per_s=FAST, d2h_bytes_per_s=FAST, pageable_bytes_per_s=pageable
        )
        device_module._forget()
        made.append(PlayedTorch(runtime).install())
        return made[0]

    yield make
    installation.uninstall()
    for one in made:
        one.remove()
    device_module._forget()
    host_runtime(virtual_clock=False)


def watched(play: PlayedTorch) -> Any:
    """The adapter, by the virtual clock, with the played GPU's tensors among torch's plain ones."""
    adapter: Any = installation.adapter_of("torch.module")
    adapter.now_ns = play.runtime.now_ns
    adapter.plain += (play.Tensor,)
    return adapter


def model(layers: int = 4, mib: int = 24) -> Any:
    torch.manual_seed(1)
    return torch.nn.ModuleList(
        torch.nn.ParameterList([torch.nn.Parameter(torch.rand(mib * MIB // 4 + 5), requires_grad=False)])
        for _ in range(layers)
    )


def test_there_and_back_the_bytes_are_equal_and_memory_stays_pageable(played):
    play = played(2_000_000_000)
    made = model()
    before = [one.clone() for one in made.parameters()]
    with instrument.observe("torch", fix="auto") as seen:
        adapter = watched(play)
        for _ in range(4):
            made.to("cuda")
            assert all(one.device.type == "cuda" for one in made.parameters())
            made.to("cpu")
            for one, was in zip(made.parameters(), before, strict=True):
                assert one.device.type == "cpu" and not one.is_pinned() and torch.equal(one.data, was)
        assert {way: turns.decided for way, turns in adapter.turns.items()} == {True: "kept", False: "kept"}
        assert all(turns.ratio < 0.5 for turns in adapter.turns.values())
    assert [(one["what"], one["to"]) for one in seen.decisions] == [("keep", "staged")] * 2
    moved = [(one["phase"], one["direction"], one["bytes"]) for one in seen.calls]
    size = sum(one.numel() * 4 for one in before)
    assert moved[:2] == [("Module.to: cuda", "load", size), ("Module.to: cpu", "store", size)]


def test_where_it_does_not_pay_torchs_own_copy_comes_back(played):
    play = played(4 * FAST)
    made = model()
    before = [one.clone() for one in made.parameters()]
    with instrument.observe("torch", fix="auto") as seen:
        adapter = watched(play)
        for _ in range(3):
            made.cuda()
            made.cpu()
        assert {turns.decided for turns in adapter.turns.values()} == {"left"}
        assert not any(turns.staged for turns in adapter.turns.values())
    assert {(one["what"], one["to"]) for one in seen.decisions} == {("rollback", "torch's copy")}
    assert all(torch.equal(one.data, was) for one, was in zip(made.parameters(), before, strict=True))


def test_with_fix_off_nothing_is_staged(played):
    play = played(2_000_000_000)
    made = model(layers=2)
    with instrument.observe("torch") as seen:
        adapter = watched(play)
        made.to("cuda").to("cpu")
        assert adapter._copies is None
    assert len(seen.calls) == 2 and not seen.decisions


def test_a_failure_leaves_the_copy_to_torch_and_is_said_once(played, monkeypatch):
    play = played(2_000_000_000)
    made = model(layers=8)
    before = [one.clone() for one in made.parameters()]
    with instrument.observe("torch", fix="auto") as seen:
        watched(play)
        monkeypatch.setattr(
            "kvprobe.instrument.staged.StagedCopies._run", lambda *args: (_ for _ in ()).throw(RuntimeError("broken"))
        )
        made.to("cuda")
        made.to("cpu")
        assert seen.states["torch.module"] == "failed: Module._apply: RuntimeError: broken"
    assert [one["state"] for one in seen.of("state") if one["adapter"] == "torch.module"].count("failed") == 1
    assert all(torch.equal(one.data, was) for one, was in zip(made.parameters(), before, strict=True))


@pytest.mark.parametrize(
    "kind",
    ["small", "strided", "changes type", "not blocking"],
)
def test_what_is_not_a_plain_large_copy_is_torchs(played, kind):
    play = played(2_000_000_000)
    with instrument.observe("torch", fix="auto"):
        adapter = watched(play)
        made = torch.nn.Module()
        tensor = torch.rand(3 * MIB, 2)
        tensor = {"small": tensor[:1000].clone(), "strided": tensor.t()}.get(kind, tensor)
        made.register_buffer("held", tensor.pin_memory() if kind == "not blocking" else tensor)
        for _ in range(3):
            if kind == "changes type":
                made.to("cuda", torch.float16).to("cpu", torch.float32)
            else:
                made.to("cuda", non_blocking=kind == "not blocking").to("cpu", non_blocking=kind == "not blocking")
        assert adapter._copies is None


def test_chunks_of_any_number_are_whole(played):
    play = played(2_000_000_000)
    from kvprobe.instrument.staged import StagedCopies

    copies = StagedCopies(play.runtime)
    stream = play.runtime.stream_create()
    for size in (1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 2 * CHUNK_BYTES, 5 * CHUNK_BYTES + 4097):
        source = torch.randint(0, 256, (size,), dtype=torch.uint8, device="cpu")
        gpu, back = play.runtime.malloc(size), torch.zeros(size, dtype=torch.uint8)
        copies.copy(gpu, source.data_ptr(), size, True, stream)
        copies.copy(back.data_ptr(), gpu, size, False, stream)
        assert torch.equal(source, back)
        play.runtime.free(gpu)
    copies.close()


def test_both_ways_take_turns_and_the_slower_one_goes():
    turns = Turns()
    for _ in range(8):
        turns.took(turns.staged, 0.5 if turns.staged else 1.0)
    assert turns.decided == "kept"
    said = [turns.took(turns.staged, 2.0 if turns.staged else 1.0) for _ in range(8)]
    assert turns.decided == "left" and said.count("left") == 1 and not turns.staged


def test_only_a_move_to_the_cpu_lets_the_adapters_in(tmp_path):
    code = (
        "import kvprobe_startup; kvprobe_startup.start()\nimport sys, torch\nm = torch.nn.Linear(2, 2)\n"
        "m.to(torch.float64).to(torch.float32).to('meta', dtype=None)\n"
        "print('kvprobe.instrument' in sys.modules)\ntorch.nn.Linear(2, 2).to('cpu')\n"
        "print('kvprobe.instrument' in sys.modules)"
    )
    carried = str(Path(instrument.__file__).parent / "carried")
    env = {key: value for key, value in os.environ.items() if not key.startswith("KVPROBE")}
    env |= {"KVPROBE": "on", "PYTHONPATH": os.pathsep.join([carried, *sys.path])}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]
