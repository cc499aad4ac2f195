"""`kvprobe bench`: every policy and copy method measured in the same rounds, figures that hold together."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from kvprobe.commands import _overhead, bench
from kvprobe.commands.bench import BLOCKS, FIGURES, POLICIES, summary
from tests.output.test_schema import valid


def test_ratios_are_taken_within_a_round() -> None:
    found = summary({"a": [10.0, 100.0, 20.0], "b": [5.0, 40.0, 30.0]}, "a")
    assert found["a"] == {"median": 20.0, "ratio": 1.0, "ratio_low": 1.0, "ratio_high": 1.0}
    assert found["b"] == {"median": 30.0, "ratio": 0.5, "ratio_low": 0.4, "ratio_high": 1.5}


@pytest.mark.slow
def test_a_short_run_compares_all_policies_and_methods() -> None:
    command = [sys.executable, "-m", "kvprobe", "bench", "--device", "host", "--seconds", "2", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    outcome = valid("bench", done.stdout)
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
    link = outcome["copy_methods"]["link_bytes_per_s"]
    for row in blocks:
        for method in ("loop", "batch"):
            one = row["bytes_per_s"][method]
            assert 0 < one["median"] <= link[row["direction"]]
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
    outcome = json.loads(done.stdout)
    assert outcome["provider"] == "host"
    figures = outcome["figures"]
    assert set(figures) == {"copy_ns", "transfer_ns", "step_ns"}
    for levels in figures.values():
        assert set(levels) == {"off", "totals", "copies", "launches"}
        for one in levels.values():
            assert one["median"] > 0 and one["ratio_low"] <= one["ratio"] <= one["ratio_high"]


@pytest.mark.parametrize("given", [["--device", "cuda"], ["--report", "x.html"], ["--json"]])
def test_an_option_in_front_of_overhead_is_not_passed_over(kvprobe, tmp_path, monkeypatch, given: list[str]) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = kvprobe("bench", *given, "overhead", "--rounds", "3", "--device", "host")
    assert (code, out, err) == (2, "", "kvprobe: options of `bench overhead` come after its name\n")


def test_overhead_says_on_which_runtime_it_was_measured(capsys) -> None:
    one = {"median": 1.0, "ratio": 1.0, "ratio_low": 1.0, "ratio_high": 1.0}
    figures = {name: dict.fromkeys(_overhead.LEVELS, one) for name in _overhead.WORK}
    for provider, words in (("host", "the embedded host runtime"), ("cuda", "the GPU")):
        bench._show_overhead({"provider": provider, "rounds": 3, "figures": figures})
        assert words in " ".join(capsys.readouterr().out.split())


def test_what_was_not_measured_is_a_dash_and_a_time_has_its_unit() -> None:
    said = [bench._amount("step_p50_ns", ns).replace("\u00a0", " ") for ns in (0, 1_500, 1.2e9)]
    assert said == ["-", "1.50 \u00b5s", "1.20 s"]
    assert bench._ratio({"median": 0, "ratio": 0, "ratio_low": 0, "ratio_high": 0}) == "-"
    small = {"median": 1, "ratio": 0.0413, "ratio_low": 0.0146, "ratio_high": 1.5}
    assert bench._ratio(small) == "0.041 (0.015 to 1.50)"


def test_copies_faster_than_one_large_copy_show_that_the_link_is_faster() -> None:
    row = {"direction": "h2d", "block_bytes": 1 << 20, "bytes_per_s": {"loop": {"median": 3.9e9}}}
    slow = {"link_bytes_per_s": {"h2d": 2.7e9}, "blocks": [row]}
    assert bench._raise_link(slow, "h2d") == "copies of 1,024 KiB, loop; one large copy: 2.7"
    assert slow["link_bytes_per_s"] == {"h2d": 3.9e9}
    right = {"link_bytes_per_s": {"h2d": 4e9}, "blocks": [row]}
    assert bench._raise_link(right, "h2d") == "one large copy"
    assert right["link_bytes_per_s"] == {"h2d": 4e9}
