"""`kvprobe calibrate`: figures that hold together, kept for the machine, one page."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from kvprobe.errors import KvprobeError
from kvprobe.native.library import MethodTable
from kvprobe.offload import method_calibration
from kvprobe.offload.method_cache import table_of
from kvprobe.offload.methods import SIZES


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict, Path, Path]:
    """(figures, page, cache) of one whole run on the host runtime."""
    from click.testing import CliRunner

    from kvprobe.commands.calibrate import command

    folder = tmp_path_factory.mktemp("calibrate")
    page, cache = folder / "page.html", folder / "cache"
    done = CliRunner().invoke(
        command,
        ["--device", "host", "--json", "--report", str(page)],
        env={"XDG_CACHE_HOME": str(cache)},
        catch_exceptions=False,
    )
    assert done.exit_code == 0
    return json.loads(done.stdout), page, cache


@pytest.mark.slow
def test_every_method_is_measured_in_both_directions(measured: tuple[dict, Path, Path]) -> None:
    result = measured[0]
    ways = {(row["direction"], row["method"], row["ctas"]) for row in result["rows"]}
    assert {method for _, method, _ in ways} == {"loop", "batch", "kernel"}
    assert len(ways) == 2 * (2 + 5)
    for row in result["rows"]:
        assert [one["copy_bytes"] for one in row["measured"]] == list(SIZES)
        assert all(value > 0 for value in row["copy_ns"])
        assert all(value >= 0 for value in (*row["fixed_ns"], *row["submit_ns"]))
    assert {one["pattern"] for one in [{"pattern": name} for name in result["patterns"][0]["bytes_per_s"]]} == {
        "contiguous",
        "runs",
        "scattered",
    }
    assert result["both"]
    assert result["behind_burst"]
    assert {one["method"] for one in result["beside"]} == {"dma", "kernel"}
    assert {one["work"]: one["kernels"] for one in result["beside"]} == {"read": 1, "short": 50}
    asked = result["paced_store_bytes_per_s"]  # 0: this machine was too busy to hold it
    assert asked == 0 or asked == int(0.89 * result["link_bytes_per_s"]["d2h"])


def test_the_table_is_the_choosers(measured: tuple[dict, Path, Path]) -> None:
    table = table_of(measured[0])
    assert isinstance(table, MethodTable)
    assert list(table.rows) == [7, 7]
    assert table.measured == 1
    for broken in ({}, {"format": "another"}, {**measured[0], "rows": [{}]}):
        with pytest.raises(KvprobeError, match="kvprobe calibrate"):
            table_of(broken)


def test_the_page_draws_the_curves(measured: tuple[dict, Path, Path]) -> None:
    page = measured[1].read_text()
    for said in ("rate-h2d", "rate-d2h", "kernel, 2 CTAs", "What is chosen", "A small copy behind a burst"):
        assert said in page


def test_what_was_measured_is_shown_again(
    measured: tuple[dict, Path, Path], kvprobe: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(measured[2]))
    code, out, err = kvprobe("calibrate", "--device", "host", "--cached", "--json")
    assert (code, err) == (0, "")
    assert json.loads(out) == measured[0]
    code, out, _ = kvprobe("calibrate", "--device", "host", "--cached")
    assert code == 0
    assert "kernel x2" in out


def test_a_page_that_cannot_be_written_is_said_before_anything_is_measured(
    kvprobe: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    code, out, err = kvprobe("calibrate", "--device", "host", "--report", tmp_path / "none" / "page.html")
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert "none" in err


def test_a_measurement_that_cannot_be_kept_is_said_to_be_lost(
    kvprobe: Callable[..., tuple[int, str, str]],
    measured: tuple[dict, Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(method_calibration, "measure", lambda *_, **__: measured[0])
    for cache, kept in ((tmp_path / "file", False), (tmp_path / "cache", True)):
        monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
        code, out, err = kvprobe("calibrate", "--device", "host", "--json")
        assert (code, json.loads(out)) == (0, measured[0])
        assert (err == "") == kept and err.count("\n") == (not kept)
        assert kept or err.startswith(f"kvprobe: not kept for engines on this machine: {cache}")
