"""`kvprobe bench`: every policy and copy method measured in the same rounds, figures that hold together."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from kvprobe.commands.bench import BLOCKS, FIGURES, POLICIES, summary


def test_ratios_are_taken_within_a_round() -> None:
    found = summary({"a": [10.0, 100.0, 20.0], "b": [5.0, 40.0, 30.0]}, "a")
    assert found["a"] == {"median": 20.0, "ratio": 1.0, "ratio_low": 1.0, "ratio_high": 1.0}
    assert found["b"] == {"median": 30.0, "ratio": 0.5, "ratio_low": 0.4, "ratio_high": 1.5}


def test_a_short_run_compares_all_policies_and_methods() -> None:
    command = [sys.executable, "-m", "kvprobe", "bench", "--device", "host", "--seconds", "2", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    outcome = json.loads(done.stdout)
    ran = outcome["policies"]
    assert ran["rounds"] >= 3
    assert set(ran["figures"]) == set(FIGURES)
    for figure in ran["figures"].values():
        assert set(figure) == set(POLICIES)
        assert figure["shared"].get("ratio", 1.0) == 1.0
    blocks = outcome["copy_methods"]["blocks"]
    assert [(row["direction"], row["block_bytes"]) for row in blocks] == [
        (kind, block) for kind in ("h2d", "d2h") for block in BLOCKS
    ]
    for row in blocks:
        for method in ("loop", "batch"):
            one = row["bytes_per_s"][method]
            assert one["median"] > 0
            assert one["ratio_low"] <= one["ratio"] <= one["ratio_high"]


@pytest.mark.parametrize(("arguments", "said"), [(["--seconds", "0"], "0"), (["--device", "tpu"], "tpu")])
def test_bad_input_is_one_line_and_exit_code_2(arguments: list[str], said: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kvprobe", "bench", *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_overhead_compares_every_level_with_the_unwatched() -> None:
    command = [sys.executable, "-m", "kvprobe", "bench", "overhead", "--device", "host", "--rounds", "3", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    figures = json.loads(done.stdout)["figures"]
    assert set(figures) == {"copy_ns", "transfer_ns", "step_ns"}
    for levels in figures.values():
        assert set(levels) == {"off", "totals", "copies", "launches"}
        for one in levels.values():
            assert one["median"] > 0 and one["ratio_low"] <= one["ratio"] <= one["ratio_high"]
