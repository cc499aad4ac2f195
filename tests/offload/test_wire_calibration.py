"""What is measured of coded copies, and where "auto" takes them."""

from __future__ import annotations

import ctypes as ct
from collections.abc import Sequence
from typing import Any

import pytest

from kvprobe.cuda.hostruntime import host_runtime
from kvprobe.native.library import core
from kvprobe.offload import wire_calibration
from kvprobe.offload.methods import copier_for


def made(load: float, store: float) -> dict[str, Any]:
    """An H100's figures, and copies as they are of so many bytes a ns."""
    result = wire_calibration.default()
    for kind, rate in (("h2d", load), ("d2h", store)):
        result["raw"][kind] = [[8000.0, size / rate, "kernel", 2] for size in result["sizes"]]
    return result


@pytest.mark.parametrize(
    ("load", "store", "codes"),
    [
        pytest.param(52.0, 52.0, True, id="both gain"),
        pytest.param(60.0, 52.0, True, id="one gains, the other is as fast"),
        pytest.param(65.0, 52.0, False, id="one loses"),
        pytest.param(60.5, 61.5, False, id="neither gains 3%"),
    ],
)
def test_auto_codes_where_one_direction_gains_and_none_loses(load: float, store: float, codes: bool) -> None:
    why = wire_calibration.slower(made(load, store), 32768, 0.03)
    assert (why == "") == codes
    assert codes or why.startswith("coded loads of 32768 bytes are")


def test_without_a_measurement_auto_is_raw_and_says_so() -> None:
    assert "could not be measured" in wire_calibration.slower(None, 32768, 0.03)


def test_ctas_are_those_that_the_user_allows() -> None:
    for most, ctas in ((0.03, 4), (0.01, 3), (0.005, 2), (0.001, 1)):
        table = wire_calibration.table_of(wire_calibration.default(), "coded", most)
        row = core().kvp_choose_row(ct.byref(table), 1 << 2, None, 1, 2, 32768, 8192)
        assert table.row[1][row].ctas == ctas


@pytest.mark.parametrize(("kind", "alone", "beside"), [("h2d", 4, 2), ("d2h", 4, 3)])
def test_fewer_ctas_are_taken_where_they_are_as_fast_and_beside_compute_the_price_decides(
    kind: str, alone: int, beside: int
) -> None:
    """What an H100 measured of 64 KiB blocks, by CTAs."""
    rates, slowdown = {
        "h2d": ({1: 36.9, 2: 63.7, 3: 64.3, 4: 65.4, 8: 65.7}, {1: 0.0, 2: 0.0, 3: 0.044, 4: 0.095, 8: 0.24}),
        "d2h": ({1: 20.4, 2: 40.3, 3: 59.5, 4: 67.1, 8: 67.6}, {1: 0.0, 2: 0.0, 3: 0.002, 4: 0.047, 8: 0.28}),
    }[kind]
    result = wire_calibration.default()
    result["rows"] = [row for row in result["rows"] if row["ctas"] in rates]
    for row in result["rows"]:
        row["copy_ns"] = [max(size, 16384) / rates[row["ctas"]] for size in result["sizes"]]
        row["slowdown"] = slowdown[row["ctas"]]
    table, side = wire_calibration.table_of(result, "coded", 0.03), int(kind == "d2h")
    rows = [core().kvp_choose_row(ct.byref(table), 1 << 2, None, compute, 1 + side, 65536, 512) for compute in (-1, 1)]
    assert [table.row[side][row].ctas for row in rows] == [alone, beside]


def test_a_measurement_has_every_way_and_leaves_the_cells_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = (4096, 65536)
    for name, value in {"POOL": 2 << 20, "LAUNCH": 1 << 19, "TILE": 1 << 19, "MEASURED": sizes, "MANY": 128}.items():
        monkeypatch.setattr(wire_calibration, name, value)
    runtime = host_runtime()
    result = wire_calibration.measure(runtime, copier_for(runtime))
    ways = {(row["direction"], row["ctas"]) for row in result["rows"]}
    assert ways == {(kind, ctas) for kind in ("h2d", "d2h") for ctas in wire_calibration.CTAS}
    assert all(ns > 0 for row in result["rows"] for ns in row["copy_ns"])
    assert {kind: len(each) for kind, each in result["raw"].items()} == {"h2d": 2, "d2h": 2}
    for what, rows in {"coded": len(wire_calibration.CTAS), "raw": 1}.items():
        assert wire_calibration.table_of(result, what, 0.03).rows[1] == rows


def _ctas_alone(result: dict[str, Any], kind: str, sizes: Sequence[int]) -> list[int]:
    """What is chosen for 128 blocks of each size while nothing computes."""
    table, side = wire_calibration.table_of(result, "coded", 0.03), int(kind == "d2h")
    rows = [core().kvp_choose_row(ct.byref(table), 1 << 2, None, -1, 1 + side, size, 128) for size in sizes]
    return [table.row[side][row].ctas for row in rows]


@pytest.mark.parametrize("kind", ["h2d", "d2h"])
def test_who_else_used_the_link_meanwhile_does_not_decide_how_many_ctas_a_size_takes(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """One size is measured while half of the link is gone, and takes as many CTAs as its neighbours all the same."""
    busy, sizes = 32768, (8192, 16384, 32768, 65536)
    known = wire_calibration.default()
    rates = {
        row["ctas"]: dict(zip(known["sizes"], row["copy_ns"], strict=True))
        for row in known["rows"]
        if row["direction"] == kind
    }

    def in_turns(bench: Any, ways: dict[Any, Any], count: int) -> dict[Any, tuple[float, float]]:
        size = bench.size
        quiet = {ctas: rates[ctas][size] if ctas else size / 50 for ctas in ways}
        return {ctas: (8000.0, max(ns, size / 27) if size == busy else ns) for ctas, ns in quiet.items()}

    def price(bench: Any, result: dict[str, Any]) -> None:
        for row in result["rows"]:
            row["slowdown"] = wire_calibration.SLOWDOWN[row["ctas"]]

    lay = wire_calibration._Bench.lay

    def noted(bench: Any, size: int) -> int:
        bench.size = size
        return lay(bench, size)

    monkeypatch.setattr(wire_calibration, "_in_turns", in_turns)
    monkeypatch.setattr(wire_calibration, "_add_price", price)
    monkeypatch.setattr(wire_calibration._Bench, "lay", noted)
    for name, value in {"POOL": 2 << 20, "LAUNCH": 1 << 19, "TILE": 1 << 19, "MEASURED": sizes, "MANY": 128}.items():
        monkeypatch.setattr(wire_calibration, name, value)
    runtime = host_runtime()
    result = wire_calibration.measure(runtime, copier_for(runtime))
    taken, quiet = (_ctas_alone(one, kind, sizes[1:]) for one in (result, known))
    assert taken == quiet and len(set(quiet)) == 1, f"CTAs by size: {dict(zip(sizes[1:], taken, strict=True))}"
