"""`kvprobe reduce` over recordings of several ranks, and `kvprobe metrics` where it ends by itself."""

from __future__ import annotations

import json
import shutil
import sqlite3
from pathlib import Path

import kvprobe.monitoring as monitoring

ACCOUNTS = Path(__file__).parents[1] / "gpu" / "data" / "accounts"


def test_reduce_compares_ranks_and_writes_a_summary_that_merges(kvprobe, export: Path, tmp_path: Path) -> None:
    ranks = tmp_path / "ranks"
    for name in ("one", "two"):
        (ranks / name).mkdir(parents=True)
        shutil.copy(export, ranks / name / export.name)
    with sqlite3.connect(ranks / "two" / export.name) as base:  # two equal recordings are one
        base.execute("DELETE FROM CUPTI_ACTIVITY_KIND_RUNTIME WHERE rowid = 1")
    base.close()
    whole = tmp_path / "all.kvsum"
    code, out, err = kvprobe("reduce", ranks, "--workers", "1", "-o", whole)
    assert code == 0, err
    assert "of 2 recordings" in out and "It is not known which rank made the others wait" in out
    again = tmp_path / "again.kvsum"
    assert kvprobe("reduce", whole, "-o", again)[0] == 0
    assert again.read_bytes() == whole.read_bytes()
    said = json.loads(kvprobe("reduce", whole, "--json")[1])
    assert said["inputs"] == 2 and said["ranks"] and not said["failed"]


def test_a_summary_is_not_written_through_a_link(kvprobe, export: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    (tmp_path / ".out.kvsum.partial").symlink_to(tmp_path / "mine")
    assert kvprobe("reduce", export, "--workers", "1", "-o", tmp_path / "out.kvsum")[0] == 0
    assert (tmp_path / "mine").read_text() == "mine"
    assert not (tmp_path / "out.kvsum").is_symlink()


def test_reduce_names_what_it_cannot_read(kvprobe, export: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.json"
    bad.write_text("{")
    code, out, err = kvprobe("reduce", export, bad, "--workers", "1")
    assert code == 1 and "of 1 recording:" in out and "bad.json" in err
    code, _, err = kvprobe("reduce", export, "-o", tmp_path / "all.json")
    assert code == 2 and "ends in .kvsum" in err


def test_metrics_writes_its_rules_and_refuses_what_is_not_there(kvprobe, tmp_path: Path) -> None:
    assert kvprobe("metrics", "--rules", tmp_path / "rules")[0] == 0
    assert sorted(path.name for path in (tmp_path / "rules").iterdir()) == sorted(monitoring.FILES)
    code, out, _ = kvprobe("metrics", tmp_path, "--once")
    assert code == 0 and "kvprobe_watched_processes 0.0" in out
    assert kvprobe("metrics", "/no/such/folder", "--once")[0] == 2


def test_reduce_merges_the_accounts_and_says_what_report_says(kvprobe, tmp_path: Path) -> None:
    programs = ("experts_loaded_when_they_are_routed_to", "decode_by_graphs_alone")
    paths, said, states = [], {}, set()
    for name in programs:
        paths.append(ACCOUNTS / "kineto" / f"{name}.json.gz")
        report = json.loads(kvprobe("report", paths[-1], "-o", tmp_path / "page.html", "-f", "--json")[1])
        (gpu,) = report["account"]["gpus"]
        said[name] = gpu
        states.add(report["verdict"]["state"])
    merged = tmp_path / "all.kvsum"
    code, out, _ = kvprobe("reduce", *paths, "--workers", "1", "-o", merged)
    assert code == 0 and "waited for copies" in out
    found = json.loads(kvprobe("reduce", merged, "--json")[1])
    assert len(found["account"]) == 2 and {row["verdict"] for row in found["ranks"]} == states
    for row in found["account"]:
        gpu = said[row["rank"].split(":")[0]]
        assert row["window_ns"] == gpu["window_ns"] == sum(row["lines_ns"].values())
        assert row["lines_ns"]["computing"] == gpu["computing_ns"]
        for group in ("waiting_for_copies", "waiting_for_host", "not_known"):
            for line, ns in gpu[f"{group}_ns"].items():
                assert row["lines_ns"].get(f"{group}.{line}", 0) == ns
