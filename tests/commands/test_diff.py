"""`kvprobe diff`: says what changed, and says nothing where nothing did."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from kvprobe.reporting.compare import shift


def test_a_recording_does_not_differ_from_itself(kvprobe, export: Path) -> None:
    code, out, _ = kvprobe("diff", export, export, "--json")
    assert code == 0
    said = json.loads(out)
    assert {one["what"] for one in said["findings"]} == {"same"}
    assert {one["median"]["ratio"] for one in said["calls"]} == {1.0}
    assert not {"slower", "faster"} & {one[figure]["verdict"] for one in said["calls"] for figure in ("median", "p99")}


def test_what_is_known_of_a_public_pair_is_said(kvprobe, shared_data: Path) -> None:
    pair = (shared_data / f"nsys-ai/mfu_2gpu_{side}.sqlite" for side in ("before", "after"))
    _, out, _ = kvprobe("diff", *pair, "--json")
    calls = {one["name"]: one for one in json.loads(out)["calls"]}
    copies = calls["cudaMemcpyAsync"]
    assert (copies["calls_before"], copies["calls_after"]) == (1018, 900)
    assert copies["median"]["verdict"] == calls["cudaLaunchKernel"]["median"]["verdict"] == "slower"
    assert 6_700 < copies["median"]["before"] < 6_900
    assert 11_000 < copies["median"]["after"] < 11_200


def test_a_finding_that_went_is_gone_and_one_that_came_is_new(kvprobe, export: Path, shared_data: Path) -> None:
    healthy = shared_data / "nsys-ai/mfu_2gpu_before.sqlite"
    for pair, word in (((export, healthy), "gone"), ((healthy, export), "new")):
        _, out, _ = kvprobe("diff", *pair, "--json")
        found = {one["cause"]: one["what"] for one in json.loads(out)["findings"]}
        assert found["launch_queue_saturation"] == word
    code, out, _ = kvprobe("diff", export, healthy)
    assert code == 0
    said = " ".join(out.split())
    assert said.startswith("Careful: the recordings are of different work: ")
    assert "mfu_2gpu_before.sqlite is better than small.sqlite: “3,002 loads are not ordered" in said
    assert "is gone (results at stake; cause " in said
    assert said.index("is better than") < said.index(
        "Findings: what each cost before -> after, as a share of the serving window"
    )


def test_usual_costs_that_rose_make_a_recording_worse(kvprobe, shared_data: Path) -> None:
    pair = (shared_data / f"nsys-ai/mfu_2gpu_{side}.sqlite" for side in ("before", "after"))
    _, out, _ = kvprobe("diff", *pair)
    said = " ".join(out.split())
    assert (
        "mfu_2gpu_after.sqlite is worse than mfu_2gpu_before.sqlite: “GPU 0 (the worst of 2) waited 50.3 ms for" in said
    )
    assert "a typical submission is 1.49" in said
    assert "which costs the threads 2.5% of their time." in said


def test_a_wait_below_the_limit_of_a_finding_is_printed_with_its_figure(kvprobe, shared_data: Path) -> None:
    pair = [shared_data / f"nsys-ai/mfu_2gpu_{side}.sqlite" for side in ("before", "after")]
    _, out, _ = kvprobe("diff", *pair)
    assert "waiting_for_host: 9.2% (27.6 ms lost, below the limit of a finding) -> 17%" in " ".join(out.split())
    changes = json.loads(kvprobe("diff", *pair[::-1], "--json")[1])["findings"]
    (waited,) = [one for one in changes if one["cause"] == "waiting_for_host"]
    assert (waited["what"], waited["below_limit"]) == ("less", "after")
    assert 0.09 < waited["share_after"] < 0.10


def walk(rng: np.random.Generator, rows: int, scale: float = 1.0) -> np.ndarray:
    """Durations whose level wanders, as those of a real server do: neighbours resemble each other."""
    level = np.repeat(np.exp(rng.normal(0, 0.1, rows // 50 + 1)), 50)[:rows]
    return (rng.lognormal(np.log(5000 * scale), 0.3, rows) * level).astype(np.int64)


@pytest.mark.parametrize("columns", ["60", "80"])
def test_names_of_causes_and_calls_stay_whole(kvprobe, shared_data: Path, monkeypatch, columns: str) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    folder = shared_data / "nsys-ai"
    _, out, _ = kvprobe("diff", folder / "h100_2gpu_1s.sqlite", folder / "mfu_2gpu_after.sqlite")
    assert "launch_queue_saturation: 0.5% (913 ms lost) -> nothing" in " ".join(out.split())
    assert {"cudaLaunchKernel", "cudaMemcpyAsync"} <= set(out.split())


def test_equal_distributions_are_rarely_called_different() -> None:
    rng = np.random.default_rng(0)
    wrong = sum(shift(walk(rng, 4000), walk(rng, 4000), 0.5, rng).verdict in ("slower", "faster") for _ in range(100))
    assert wrong <= 8


def test_a_change_of_a_fifth_is_found_and_lies_in_its_interval() -> None:
    rng = np.random.default_rng(1)
    found = [shift(walk(rng, 4000), walk(rng, 4000, 1.2), 0.5, rng) for _ in range(50)]
    assert sum(one.verdict == "slower" for one in found) >= 48
    assert sum(one.low <= 1.2 <= one.high for one in found) >= 43


def test_few_calls_are_not_compared(kvprobe, shared_data: Path) -> None:
    one = shared_data / "extrap/concurrent_profile16.sqlite"
    _, out, _ = kvprobe("diff", one, one, "--json")
    assert all(min(call["calls_before"], call["calls_after"]) >= 40 for call in json.loads(out)["calls"])


def test_before_and_after_are_one_page_each_under_its_name(kvprobe, export: Path, tmp_path: Path) -> None:
    page = tmp_path / "diff.html"
    code, out, _ = kvprobe("diff", export, export, "-o", page)
    assert code == 0
    assert out.rstrip().endswith(str(page))
    html = page.read_text()
    assert f"<h1>{export} is neither better nor worse than {export}: no finding changed by much" in html
    for words in (f"Before, {export}: Over time", f"After, {export}: Over time", "Time inside each call, on the host"):
        assert words in html
    assert html.count('id="before-rows"') == html.count('id="after-rows"') == 1
    assert kvprobe("diff", export, export, "-o", tmp_path / "no" / "diff.html")[0] == 2
