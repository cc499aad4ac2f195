"""The profile adds up, its simulation follows the window's rule, and the report shows it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from kvprobe.errors import UsageError  # noqa: E402
from kvprobe.weights import WeightProfile, offload, recording_of  # noqa: E402
from kvprobe.weights.profile import (  # noqa: E402
    Step,
    Typical,
    predict,
    rest_ns,
    simulate,
)


def steps(count: int, gap: float, copy: float, compute: float, tail: float = 0) -> Typical:
    return Typical(tuple(Step(i, gap, copy, compute) for i in range(count)), tail, 0)


@pytest.mark.parametrize("count", [3, 10, 40])
def test_copies_that_fit_behind_computation_vanish_and_others_are_the_bound(count):
    assert simulate(steps(count, 5, 4, 5), 0) == pytest.approx(count * 14)
    assert simulate(steps(count, 5, 4, 5), 1) == pytest.approx(count * 10)
    assert simulate(steps(count, 1, 10, 2), 1) == pytest.approx(count * 10)
    assert simulate(steps(count, 1, 10, 2), "all") == pytest.approx(count * 3)


def test_without_gaps_one_slot_more_hides_the_shorter_of_both():
    assert simulate(steps(12, 0, 7, 7), 0) == pytest.approx(12 * 14)
    assert simulate(steps(12, 0, 7, 7), 1) == pytest.approx(12 * 7)


def test_a_wider_window_evens_out_unequal_layers_and_never_costs_time():
    uneven = Typical(tuple(Step(i, 0, 12 if i % 4 == 0 else 4, 6) for i in range(16)), 0, 0)
    times = [simulate(uneven, window) for window in (0, 1, 2, 4, "all")]
    assert times == sorted(times, reverse=True) and times[2] < times[1] < times[0]
    assert times[-1] == 16 * 6


def test_a_window_that_holds_every_layer_copies_nothing():
    assert simulate(steps(4, 1, 100, 1), 3) == pytest.approx(simulate(steps(4, 1, 100, 1), "all"))


def test_a_layer_called_twice_is_copied_once():
    twice = Typical(tuple(Step(unit, 0, 10, 1) for unit in (0, 0, 1, 1, 2, 2)), 0, 0)
    assert simulate(twice, 1) == pytest.approx(30)


def test_no_window_beats_the_bound():
    import random

    source = random.Random(4)
    for _ in range(200):
        made = Typical(
            tuple(
                Step(i, source.random() * 9, source.random() * 9, source.random() * 9)
                for i in range(source.randint(6, 12))
            ),
            source.random() * 9,
            0,
        )
        times = [simulate(made, window, forwards=12) for window in (0, 1, 2, 4)]
        copies = sum(step.copy_ns for step in made.steps)
        assert all(a >= b - 1e-9 for a, b in pairwise(times))
        assert times[0] == pytest.approx(made.compute_ns + copies)
        assert min(times) >= max(copies, made.compute_ns) - 1e-6


# -- against what an H200 did ----------------------------------------------------------------------------------------

H200 = json.loads((Path(__file__).parent / "data" / "h200.json").read_text())["fractions"]
SHAPES = [(fraction, shape) for fraction, shapes in H200.items() for shape in shapes]


def seen_on_h200(fraction: str, shape: str) -> tuple[Typical, list[float]]:
    """Window 0 as it was measured, and the forward's measured times under windows 0, 1 and 2."""
    seen = H200[fraction][shape]
    steps = tuple(Step(*step) for step in seen["typical"]["steps"])
    return Typical(**seen["typical"] | {"steps": steps}), seen["measured_ns"]


@pytest.mark.parametrize(("fraction", "shape"), SHAPES)
def test_the_gain_of_windows_on_an_h200_is_predicted_from_window_0(fraction, shape):
    base, measured = seen_on_h200(fraction, shape)
    assert predict(base, 0) == pytest.approx(measured[0], rel=0.02)
    for window in (1, 2):
        foretold, gain = base.forward_ns - predict(base, window), measured[0] - measured[window]
        small = gain < 0.1 * measured[0]  # cannot be measured to a tenth of itself
        assert abs(foretold - gain) <= (0.01 * measured[0] if small else 0.1 * gain)


def test_without_the_sustained_clocks_the_gain_of_an_h200_is_overrated():
    from dataclasses import replace

    base, measured = seen_on_h200("0.1", "prefill, 16,384 tokens")
    foretold = measured[0] - predict(replace(base, resident_ns=0), 1)
    assert foretold > 1.15 * (measured[0] - measured[1])


def test_a_host_that_cannot_keep_up_is_seen_only_where_copies_hide_it_no_more():
    copying = Typical(steps(10, 0, 100, 4).steps, 0, 0, forward_ns=1040, resident_ns=400)
    assert predict(copying, 1) == pytest.approx(simulate(copying, 1), rel=0.02)
    computing = Typical(steps(10, 0, 5, 20).steps, 0, 0, forward_ns=250, resident_ns=400)
    assert predict(computing, 1) == pytest.approx(400, rel=0.02) and predict(computing, "all") == 400


def test_latencies_of_a_copy_count_once_where_copies_are_the_bound():
    late = Typical(steps(20, 0, 100, 1).steps, 0, 0, start_ns=7, ready_ns=3)
    assert simulate(late, 0) == pytest.approx(20 * 111)
    assert simulate(late, 1) == pytest.approx(20 * 107, rel=0.01)


def test_what_the_simulation_lacks_is_carried_as_an_overhead_of_every_step():
    exact = Typical(steps(10, 5, 10, 5).steps, 0, 0, forward_ns=201)
    assert rest_ns(exact) == 0
    lacking = Typical(steps(10, 5, 10, 5).steps, 0, 0, forward_ns=240)
    assert rest_ns(lacking) == pytest.approx(40) and predict(lacking, 0) == pytest.approx(240)
    assert predict(lacking, "all") == pytest.approx(140)


@pytest.fixture
def ran(model, ids, runtime) -> Any:
    """Forwards on a virtual clock: copies take their time, what torch computes on the host takes none."""
    runtime.reset(virtual_clock=True)
    with offload(model, gpu_fraction=0.5, window=1, device="host") as held, torch.no_grad():
        for window in (1, 0, 1):
            held.set_window(window)
            for _ in range(4):
                model(ids)
        yield held
    runtime.reset()


def test_the_parts_of_a_forward_add_up_to_it(ran):
    for forward in ran.forwards:
        at = forward.start_ns
        for visit in forward.visits:
            assert at <= visit.enter_ns + 2  # event times are floats of milliseconds
            at = visit.leave_ns
        assert at <= forward.end_ns + 2
    profile = ran.profile()
    assert profile.forward_ns == pytest.approx(profile.compute_ns + profile.wait_ns, rel=1e-3)
    assert profile.bytes == sum(layer.bytes for layer in profile.layers) == ran.plan.offloaded_bytes
    assert profile.bound_ns == max(profile.copy_ns, profile.compute_ns)
    assert set(profile.measured) == {"0", "1"} and set(profile.predicted) == {"0", "1", "2", "4", "all"}
    assert json.loads(json.dumps(profile.to_dict()))["window"] == 1


def test_copies_lie_before_the_computation_that_uses_them(ran):
    seen = 0
    for forward in ran.forwards:
        for visit in forward.visits:
            if visit.bytes:
                seen += 1
                assert visit.copy_ns > 0 and visit.submit_ns > 0
                assert visit.copy_start_ns + visit.copy_ns <= visit.enter_ns + visit.wait_ns + 5000
                if forward.window == 0:
                    assert visit.copy_start_ns >= visit.enter_ns - 5000
    assert seen > 40


def test_forwards_without_copies_are_measured_and_leave_the_model_right(model, ids):
    with torch.no_grad():
        right = model(ids)
        with offload(model, gpu_fraction=0.5, window=1, device="host") as held:
            with held.without_copies():
                model(ids)
                stale = model(ids)
            with pytest.raises(UsageError, match="no forward"):
                held.profile()
            assert not torch.equal(stale, right) and torch.equal(model(ids), right)
            for window in (0, 1):
                held.set_window(window)
                before = held._window.copies
                with held.without_copies():
                    model(ids)
                    assert held._window.copies == before + window + 1  # each slot is filled once
                    model(ids)
                    assert held._window.copies == before + window + 1
                for _ in range(3):
                    assert torch.equal(model(ids), right)
            profile = held.profile()
            assert profile.measured["all"] == profile.predicted["all"] > 0 and profile.window == 1
    with torch.no_grad():
        assert torch.equal(model(ids), right)


def test_forwards_of_another_kind_can_be_forgotten(ran, model):
    ran.reset_profile()
    with pytest.raises(UsageError, match="no forward"):
        ran.profile()
    with torch.no_grad():
        model(torch.arange(4)[None])
    assert ran.profile().forwards == 1


def test_the_recording_holds_every_copy_and_the_report_the_table(ran, tmp_path):
    from kvprobe.commands.weights import section, verdict
    from kvprobe.diagnosis import diagnose
    from kvprobe.recordings.model import Engine
    from kvprobe.reporting import write_report

    recording = recording_of(ran, "small", "kvprobe weights small")
    copies = recording.executions["engine"] == Engine.COPY
    moved = sum(visit.bytes for forward in ran.forwards for visit in forward.visits)
    assert recording.executions["bytes"][copies].sum() == recording.transfers["bytes"].sum() == moved
    assert recording.calls.rows == copies.sum()
    alone = recording_of(ran, "small", window=0).executions
    of_0 = sum(visit.bytes for forward in ran.forwards if forward.window == 0 for visit in forward.visits)
    assert alone["bytes"].sum() == of_0 < moved
    outcome = {"offloaded_layers": 3, "grain": "blocks", "offloaded_bytes": 1, "gpu_bytes": 1}
    path = write_report(
        recording,
        tmp_path / "w.html",
        findings=diagnose(recording),
        extra=[section(ran.profile(), outcome)],
        lead_verdict=verdict(ran.profile()),
    )
    text = path.read_text()
    assert "Most of the work is" in text and "Best window" in text
    assert "Healthy" not in text[: text.index("</h1>")]
    assert "exposed wait for weights" in text and "layers.0" in text and "Layers ahead" in text


def made(copy_ns: float, compute_ns: float, window: int, **measured: float) -> WeightProfile:
    times = {name.lstrip("w"): ns for name, ns in measured.items()}
    bound = max(copy_ns, compute_ns)
    return WeightProfile(
        5, window, times[str(window)], copy_ns, compute_ns, 1e6, 1, 0.5, 5e10, bound, times | {"all": compute_ns}, times
    )


def test_the_verdict_says_copying_or_computing_and_the_narrowest_window_that_is_as_fast_as_any():
    from kvprobe.commands.weights import verdict

    slow = verdict(made(150e6, 10e6, 0, w0=160e6, w1=151e6, w2=150.5e6))
    assert "copying weights" in slow.headline and "window of 1 saves 9.00 ms of 160 ms" in slow.headline
    assert slow.state == "warning"
    good = verdict(made(100e6, 300e6, 1, w0=400e6, w1=301e6, w2=300e6))
    assert "computing" in good.headline and "no window is faster than 1" in good.headline and good.state == "info"


def test_the_advice_is_of_one_column_of_its_table_and_names_no_window_that_does_not_fit():
    from kvprobe.commands.weights import verdict

    measured = {"0": 400e6, "1": 310e6, "all": 300e6}
    predicted = {"0": 390e6, "1": 330e6, "2": 300e6, "4": 250e6, "all": 240e6}
    slow = WeightProfile(5, 0, 405e6, 100e6, 300e6, 1e6, 1, 0.5, 5e10, 300e6, predicted, measured)
    said = verdict(slow)
    assert "a window of 1 saves 90.0 ms of 400 ms" in said.headline
    facts = {fact.label: fact for fact in said.facts}
    assert facts["Best window"].value == "1" and "measured: use --window 1" in facts["Best window"].note
    assert "A window of 2 is predicted to take 300 ms; it was not run" in said.detail
    assert "10.0 ms more than without any copy remain" in said.detail


def test_any_recording_gives_load_time_beside_computation(ran):
    from kvprobe.commands.weights import load_times
    from kvprobe.errors import RecordingError
    from kvprobe.recordings.model import Recording

    (found,) = load_times(recording_of(ran, "small"))
    visits = [visit for forward in ran.forwards for visit in forward.visits]
    assert found["bytes"] == sum(visit.bytes for visit in visits)
    assert found["copy_ns"] == pytest.approx(sum(visit.copy_ns for visit in visits), rel=0.05)
    computed = sum(forward.total_ns - sum(v.wait_ns for v in forward.visits) for forward in ran.forwards)
    assert found["compute_ns"] == pytest.approx(computed, rel=0.05)
    assert 0 < found["exposed_ns"] < found["copy_ns"] and found["bound_ns"] <= found["busy_ns"]
    with pytest.raises(RecordingError, match="no copy to the GPU"):
        load_times(Recording([]))


def test_nothing_to_profile_is_wrong_usage(model):
    with pytest.raises(UsageError, match="nothing is offloaded"):
        offload(model, gpu_fraction=1).profile()
    with offload(model, gpu_fraction=0.5, device="host") as held, pytest.raises(UsageError, match="no forward"):
        held.profile()


# -- the command ---------------------------------------------------------------------------------------------------


def kvprobe(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvprobe", "weights", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=240, env={**os.environ, "OMP_NUM_THREADS": "1", **environment}
    )


@pytest.mark.servers
def test_the_command_prints_the_table_and_writes_the_report(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=10,
        vocab_size=256,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    report = tmp_path / "r.html"
    done = kvprobe(
        str(tmp_path / "model"),
        "--gpu-fraction",
        "0.6",
        "--device",
        "host",
        "--report",
        str(report),
        "--tokens",
        "16",
        "--json",
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["gpu_bytes"] <= found["limit_bytes"] and found["profile"]["layers"]
    assert set(found["profile"]["measured"]) >= {"0", "1"} and report.stat().st_size > 50_000
    done = kvprobe(str(tmp_path / "model"), "--gpu-fraction", "0.6", "--device", "host", "--report", str(report))
    assert done.returncode == 0 and "weight load (copies)" in done.stdout and "exposed wait" in done.stdout
    done = kvprobe(str(tmp_path / "model"), "--gpu-fraction", "1", "--device", "host", "--report", str(report))
    assert done.returncode == 0 and "Nothing is offloaded" in done.stdout
    done = kvprobe(str(tmp_path / "model"), "--gpu-fraction", "0.0001", "--device", "host", "--report", str(report))
    assert done.returncode == 2 and "raise gpu_fraction" in done.stderr and done.stderr.count("\n") == 1


def test_the_command_says_what_is_missing(tmp_path):
    for arguments, word in (
        ((str(tmp_path),), "--gpu-fraction"),
        ((str(tmp_path), "--gpu-fraction", "0.5"), "config.json"),
        ((str(tmp_path), "--gpu-fraction", "3"), "gpu_fraction"),
    ):
        done = kvprobe(*arguments, "--report", str(tmp_path / "r.html"))
        assert done.returncode == 2 and word in done.stderr and done.stderr.count("\n") == 1
