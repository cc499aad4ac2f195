"""Names from a recording never become markup, paths or terminal control sequences, whichever command shows them."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvprobe.probe.ring import FILE, SECTION
from kvprobe.reporting.summaries import REPORTS

MAKE_RUN = Path(__file__).parents[1] / "recordings" / "fuzz_run_folder.py"
HOSTILE = (
    "</script><img src=x onerror=alert(1)>",
    "\x1b]0;title\x07\x1b[31m\x9b2J\x85\u202e",
    "../../../kvprobe-escaped",
    "a\r\n::error file=/etc/passwd::%0A,b:c",
    '"} 1\n# EOF\nother{a="b',
    '",=1+1\n',
    "[bold red]]]>&lt;[/]",
    "\ud800\x00",
)
ALL = "".join(HOSTILE)


def steers(text: str) -> list[str]:
    """Characters that would steer a terminal, in what was printed."""
    return [char for char in text if char not in "\n\xa0" and not char.isprintable()]


@pytest.fixture
def evil(tmp_path: Path) -> Path:
    """A PyTorch trace with a full queue, pageable copies and ranges; every text in it is hostile."""
    events = []

    def add(category: str, name: str, start: float, dur: float, thread: int, **more: object) -> None:
        event = {"ph": "X", "cat": category, "name": name, "ts": start, "dur": dur, "pid": 1, "tid": thread}
        events.append({**event, "args": more})

    done = 0.0
    now = 100.0
    ends: list[float] = []
    for i in range(1500):
        waits = max(0.0, ends[i - 300] - now) if i >= 300 else 0.0
        add("cuda_runtime", "cudaMemcpyAsync", now, 1 + waits, 7, correlation=i)
        now += 2 + waits
        done = max(done, now) + 20
        ends.append(done)
        about = {"correlation": i, "device": 0, "stream": 7, "bytes": 4096}
        add("gpu_memcpy", f"Memcpy HtoD (Pageable -> Device) {ALL}", done - 20, 20, 7, **about)
    for i, text in enumerate((*HOSTILE, ALL)):
        add("cpu_op", text, 90 + i, now, 7)
        add("user_annotation", text, 95 + i, now, 7)
        add("cuda_runtime", f"cuda{text}", 91 + i, 0.5, 7, correlation=10_000 + i)
        add("kernel", text, done + i, 5, 7, correlation=10_000 + i, device=0, stream=7)
        events.append({"ph": "M", "name": ("process_name", "thread_name")[i % 2], "pid": 1, "tid": 7, "ts": 0,
                       "args": {"name": text}})  # fmt: skip
    beside = {"deviceProperties": [{"id": 0, "name": ALL}], "cupti_version": ALL, "distributedInfo": {"rank": ALL}}
    (path := tmp_path / "in" / "trace.json").parent.mkdir()
    path.write_text(json.dumps({**beside, "traceEvents": events}))
    return path


@pytest.fixture
def running(tmp_path: Path) -> Path:
    """A run folder of this very process, as `top` and `metrics` see it while it runs; every text in it is hostile."""
    (tmp_path / "in").mkdir(exist_ok=True)
    subprocess.run([sys.executable, MAKE_RUN, folder := tmp_path / "in" / "run"], check=True)
    (folder / "end.json").unlink()
    (folder / "processes.jsonl").unlink()
    (ring,) = folder.glob("*.kvp")
    data = bytearray(ring.read_bytes())
    header, pid = np.frombuffer(data, FILE, 1), int(np.frombuffer(data, FILE, 1)["pid"][0])
    for field, value in (("state", 1), ("pid", os.getpid()), ("pid_namespace", 0), ("start_ticks", 0)):
        header[field] = value
    text = ALL.encode("utf-8", "replace").replace(b"\0", b"?")
    header["command"], header["rank"] = text[:500], text[:16]
    np.frombuffer(data, SECTION, 1, 4096)["name"] = text[:31]
    ring.unlink()
    (folder / f"{os.getpid()}-1.kvp").write_bytes(data)
    for path in folder.glob(f"*-{pid}*"):
        path.rename(folder / path.name.replace(str(pid), str(os.getpid())))
    for path in (*folder.glob("*.json"), *folder.glob("*.jsonl")):
        lines = [json.loads(line) for line in path.read_text().splitlines()] if path.suffix == ".jsonl" else []
        values = [_hostile(value, pid) for value in lines or [json.loads(path.read_text())]]
        path.write_text("\n".join(map(json.dumps, values)) + "\n")
    return folder


def _hostile(value: object, pid: int) -> object:
    """The same, its texts followed by hostile ones."""
    kept = ("kind", "how", "direction", "schema", "call", "state")
    if isinstance(value, dict):
        return {key: one if key in kept else _hostile(one, pid) for key, one in value.items()}
    if isinstance(value, list):
        return [_hostile(one, pid) for one in value]
    return value + ALL.strip("\ud800\0") if isinstance(value, str) else os.getpid() if value == pid else value


@pytest.fixture
def files_stay(tmp_path: Path):
    """Nothing is written but where the command was told to."""
    before = {path for folder in (tmp_path.parent, tmp_path.parents[1]) for path in folder.iterdir()}
    yield
    after = {path for folder in (tmp_path.parent, tmp_path.parents[1]) for path in folder.iterdir()}
    assert not [path for path in after - before if "escaped" in path.name]
    assert {path.name for path in tmp_path.iterdir()} <= {"in", "out"}


COMMANDS = {
    "report": ("report", "IN", "-o", "OUT/page.html"),
    "report --json": ("report", "IN", "-o", "OUT/page.html", "--json"),
    "triage": ("triage", "IN"),
    "stats": ("stats", "IN"),
    "stats --csv": ("stats", "IN", "--csv"),
    "stats --json": ("stats", "IN", "--json"),
    "diff": ("diff", "IN", "IN", "-o", "OUT/diff.html"),
    "check": ("check", "IN", "--max-lost", "0.0001%", "--max-blocked", "0%", "--no", "pageable", "--no", "saturation"),
    "check github": ("check", "IN", "--max-lost", "0.0001%", "--max-blocked", "0%", "--format", "github"),
    "reduce": ("reduce", "IN", "-o", "OUT/x.kvsum"),
    "export perfetto": ("export", "IN", "--to", "perfetto", "-o", "OUT/x.json"),
    "export parquet": ("export", "IN", "--to", "parquet", "-o", "OUT/x"),
}


@pytest.mark.parametrize("which", ["evil", "running"])
@pytest.mark.parametrize("name", COMMANDS)
def test_no_command_lets_a_name_steer_the_terminal(
    kvprobe, request, tmp_path: Path, files_stay, which: str, name: str
) -> None:
    path = request.getfixturevalue(which)
    (tmp_path / "out").mkdir()
    words = [word.replace("IN", str(path)).replace("OUT", str(tmp_path / "out")) for word in COMMANDS[name]]
    code, out, err = kvprobe(*words)
    assert code in (0, 1) and "Traceback" not in err
    assert not steers(out) and not steers(err)


class Tags(HTMLParser):
    """Every element of a page, with the names of its attributes."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.handlers: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append(tag)
        self.handlers += [name for name, _ in attrs if name.startswith("on")]


@pytest.mark.parametrize("which", ["evil", "running"])
@pytest.mark.parametrize("words", [("report", "IN", "-o"), ("diff", "IN", "IN", "-o")])
def test_no_name_becomes_markup_of_a_page(kvprobe, request, tmp_path: Path, which: str, words) -> None:
    path = request.getfixturevalue(which)
    kvprobe(*[word.replace("IN", str(path)) for word in words], tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    tags = Tags(page)
    assert tags.found.count("script") == 4 and "img" not in tags.found and not tags.handlers
    assert "alert(1)" in page, "the names are shown"


def test_github_annotations_are_one_line_a_limit(kvprobe, evil: Path) -> None:
    words = ("--max-lost", "0.0001%", "--max-blocked", "0%", "--no", "pageable", "--no", "saturation")
    _, out, _ = kvprobe("check", evil, *words, "--format", "github")
    assert len(out.splitlines()) == 4 and all(re.match(r"::(error|notice) ", line) for line in out.splitlines())
    assert not re.search(r"^::error file=/etc/passwd", out, re.M)


@pytest.mark.parametrize("which", ["evil", "running"])
def test_junit_is_sound_xml(kvprobe, request, tmp_path: Path, which: str) -> None:
    path = request.getfixturevalue(which)
    words = ("--max-lost", "0.0001%", "--max-blocked", "0%", "--no", "pageable", "--no", "saturation")
    kvprobe("check", path, *words, "--junit", tmp_path / "x.xml")
    root = ElementTree.fromstring((tmp_path / "x.xml").read_text())
    kinds = {"testsuites", "testsuite", "testcase", "failure", "skipped", "system-out"}
    assert {one.tag for one in root.iter()} <= kinds and len(list(root.iter("testcase"))) == 4


def test_csv_has_as_many_rows_and_columns_as_the_table(kvprobe, evil: Path) -> None:
    for report in REPORTS:
        _, out, _ = kvprobe("stats", evil, "-r", report, "--csv", "--rows", "0")
        _, said, _ = kvprobe("stats", evil, "-r", report, "--json")
        table = json.loads(said)["tables"][report]
        head, *rows = csv.reader(io.StringIO(out))
        assert len(rows) == len(table["rows"]) and {len(row) for row in rows} <= {len(head)}


def test_the_live_view_shows_names_without_what_steers(kvprobe, running: Path, tmp_path: Path, files_stay) -> None:
    offload = {"t_ns": 1, "kind": "offload", "adapter": "a", "server": ALL, "source": ALL, "requests": 5}
    counts = {"prompt_tokens": 100, "hit_tokens": 50, "loaded_blocks": 4, "stored_blocks": 9, "unread_blocks": 2}
    (events,) = running.glob("events-*.jsonl")
    with events.open("a") as file:
        for line in ({**offload, **counts}, {**offload, "requests": "many"}):
            file.write(json.dumps(line, separators=(",", ":")) + "\n")
        file.write('["kind":"offload"]\n[{"kind":"offload"}]\n"kind":"offload"\n')
    code, out, err = kvprobe("top", "--once", "--interval", "0.05", running)
    assert (code, err) == (0, "") and "alert(1)" in out
    assert not steers(out)
    code, out, _ = kvprobe("top", "--once", "--interval", "0.05", "--json", running)
    assert code == 0 and json.loads(out)


def test_labels_of_metrics_are_escaped(kvprobe, running: Path) -> None:
    code, out, _ = kvprobe("metrics", "--once", running)
    assert code == 0
    families = list(text_string_to_metric_families(out))
    assert all(re.fullmatch(r"kvprobe_\w+|python_\w+|process_\w+", family.name) for family in families)
    values = [value for family in families for sample in family.samples for value in sample.labels.values()]
    assert values and all(re.fullmatch(r"\d+|0x[0-9a-f]+|\w+|[\d.e+-]+|\+Inf", value) for value in values)
