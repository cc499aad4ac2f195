"""`kvprobe report`: one page, or one line and nothing written."""

from __future__ import annotations

import gzip
import html
import json
import shlex
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "corpus"))

from grade import unpack

DATA = Path(__file__).resolve().parents[1] / "gpu" / "data"


def test_a_recording_becomes_a_page_that_names_the_cause(kvprobe, export: Path, tmp_path: Path) -> None:
    code, out, _ = kvprobe("report", export, "-o", tmp_path / "page.html")
    assert code == 0
    assert str(tmp_path / "page.html") in out
    page = (tmp_path / "page.html").read_text()
    assert "queue was full" in page
    assert export.name in page


def test_a_page_of_another_recording_is_not_replaced_in_silence(
    kvprobe, export: Path, tmp_path: Path, monkeypatch
) -> None:
    other = tmp_path / "elsewhere" / export.name
    other.parent.mkdir()
    other.write_bytes(export.read_bytes())
    monkeypatch.chdir(tmp_path)
    silent = "replaced the report of"
    assert silent not in kvprobe("report", export)[2]
    assert silent not in kvprobe("report", export)[2], "the same recording again"
    assert f"kvprobe.html: {silent} {export.name}; name a page with -o" in kvprobe("report", other)[2], (
        "alike in name alone"
    )
    assert silent in kvprobe("report", export, "--json")[2]
    assert silent not in kvprobe("report", other, "-o", "kvprobe.html")[2], "whoever names the page means it"
    assert silent not in kvprobe("report", export, "-q")[2]


def test_json_says_where_the_page_is_and_what_was_found(kvprobe, export: Path, tmp_path: Path) -> None:
    code, out, _ = kvprobe("report", export, "-o", tmp_path / "page.html", "--json")
    assert code == 0
    said = json.loads(out)
    assert Path(said["report"]).stat().st_size == said["bytes"]
    found = {one["cause"]: one for one in said["findings"]}
    assert found["launch_queue_saturation"]["lost_ns"] > 0


def test_a_foreign_file_is_not_overwritten_without_force(kvprobe, export: Path, tmp_path: Path) -> None:
    target = tmp_path / "letter.html"
    target.write_text("dear grandmother")
    code, _, err = kvprobe("report", export, "-o", target)
    assert code == 2
    assert "not a report of kvprobe" in err
    assert target.read_text() == "dear grandmother"
    assert kvprobe("report", export, "-o", target, "-f", "-q")[0] == 0
    assert kvprobe("report", export, "-o", target, "-q")[0] == 0, "a report may be written over a report"


@pytest.mark.parametrize("where", ["missing/page.html", "."])
def test_a_path_that_cannot_be_written_fails_before_anything_is_read(kvprobe, tmp_path: Path, where: str) -> None:
    code, out, err = kvprobe("report", tmp_path / "no such recording", "-o", tmp_path / where)
    assert (code, out) == (2, "")
    assert "cannot write " in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "content", [b"", b"not a recording", b"SQLite format 3\0 and nothing else", b'{"traceEvents": [']
)
def test_what_is_no_recording_is_one_line_and_no_page(kvprobe, tmp_path: Path, content: bytes) -> None:
    bad = tmp_path / "bad.sqlite"
    bad.write_bytes(content)
    code, _, err = kvprobe("report", bad, "-o", tmp_path / "page.html")
    if code == 0:  # a trace cut after its opening is read as an empty one, and said to be
        assert "no submissions" in (tmp_path / "page.html").read_text()
        return
    assert code == 1
    assert err.count("\n") == 1
    assert "Traceback" not in err
    assert [one.name for one in tmp_path.iterdir()] == ["bad.sqlite"]


def test_the_recording_itself_is_never_changed(kvprobe, export: Path, tmp_path: Path) -> None:
    before = export.read_bytes()
    kvprobe("report", export, "-o", tmp_path / "page.html", "-q")
    assert export.read_bytes() == before
    assert [one.name for one in export.parent.iterdir()] == [export.name]


@pytest.mark.parametrize(
    ("path", "headline"),
    [
        ("nsys-ai/h100_2gpu_1s.sqlite", "The link is the limit"),
        ("hta/ns_resolution_rank0_v100.pt.trace.json.gz", None),
        ("param/resnet_kineto.json.gz", None),
        ("extrap/concurrent_profile16.sqlite", None),
    ],
)
def test_public_recordings_get_their_verdict(kvprobe, shared_data: Path, tmp_path: Path, path: str, headline) -> None:
    code, *_ = kvprobe("report", shared_data / path, "-o", tmp_path / "page.html", "-q")
    assert code == 0
    page = (tmp_path / "page.html").read_text()
    title = page[page.index("<h1>") : page.index("</h1>")]
    assert headline is None or headline in title
    assert "The launch queue was full" not in title


def test_several_inputs_are_named_judged_together_and_each_by_itself(kvprobe, export: Path, tmp_path: Path) -> None:
    other = tmp_path / "deeper" / "small.sqlite"
    other.parent.mkdir()
    other.write_bytes(export.read_bytes())
    assert kvprobe("report", export, other, "-o", tmp_path / "page.html", "-q")[0] == 0
    page = (tmp_path / "page.html").read_text()
    names = [f"{one.parent.name}/small.sqlite" for one in (export, other)]
    assert [page.index(f"<h2>{name}</h2>") for name in names] == sorted(
        page.index(f"<h2>{name}</h2>") for name in names
    )
    assert page.index("<h2>Findings</h2>") < page.index("<h2>Inputs</h2>") < page.index("<h2>Over time</h2>")
    assert page.index("<h2>Over time</h2>") < page.index(f"<h2>{names[0]}</h2>")
    for i, name in enumerate(names, 1):
        assert f'<a href="#input-{i}">{name}</a>' in page
        assert f"Findings in {name}" in page


def test_different_runs_are_not_laid_over_each_other(kvprobe, shared_data: Path, tmp_path: Path) -> None:
    paths = [shared_data / "nsys-ai" / f"mfu_2gpu_{name}.sqlite" for name in ("before", "after")]
    code, printed, error = kvprobe("report", *paths, "-o", tmp_path / "two.html")
    assert (code, printed) == (2, "")
    assert error.startswith("kvprobe: the inputs look like different runs: they were recorded one after another")
    assert error.rstrip().endswith("Give them to `kvprobe report` one by one")
    assert not (tmp_path / "two.html").exists()
    assert kvprobe("report", paths[0], "-o", tmp_path / "one.html")[0] == 0


def test_one_input_has_no_section_of_its_own(kvprobe, export: Path, tmp_path: Path) -> None:
    assert kvprobe("report", export, "-o", tmp_path / "page.html", "-q")[0] == 0
    assert "<h2>Inputs</h2>" not in (tmp_path / "page.html").read_text()


def test_the_terminal_says_how_to_record_what_cost_most_and_is_undecided(kvprobe, tmp_path: Path) -> None:
    """Nearly half of the window is not known, more than the first finding: no thread was seen to sleep."""
    recording = ACCOUNTS / "a_submitting_thread_that_shares_its_cpu.sqlite.gz"
    _, out, _ = kvprobe("report", recording, "-o", tmp_path / "page.html")
    undecided = next(line for line in out.splitlines() if line.startswith("Undecided: "))
    assert "gpu_starved (likely)" in out and "162 ms" in undecided
    assert "\nTo decide it: " in out and "osrt" in out
    _, out, _ = kvprobe("report", ACCOUNTS / "torch_pin_memory_for_each_request.sqlite.gz", "-o", tmp_path / "b.html")
    assert "Undecided" not in out


def test_an_undecided_wait_is_weighed_against_what_the_first_finding_cost_the_gpu(kvprobe, tmp_path: Path) -> None:
    """A GPU that waited 18.8 ms for a thread's 51.1 ms, and stood idle for another 33.0 ms before the first kernel."""
    recording = unpack(DATA / "queues" / "small_blocks_behind_a_forward-totals-0.kvprobe.tar.gz", tmp_path)
    _, out, _ = kvprobe("report", recording, "-o", tmp_path / "page.html", "--from", "226.2ms")
    assert "\nUndecided: The GPU ran nothing for 33.0 ms, in 1 pause of its thread" in out
    assert "\nTo decide it: record with `kvprobe run --nsys`" in out
    assert "\nalso, warning: " in out


@pytest.mark.parametrize(
    "packed",
    ["corpus/nsys/loads_on_one_stream.sqlite.gz", "queues/large_blocks-totals-0.kvprobe.tar.gz"],
)
def test_where_no_kernel_ran_a_saving_is_the_thread_s_alone(kvprobe, tmp_path: Path, packed: str) -> None:
    recording = unpack(DATA / packed, tmp_path)
    _, out, _ = kvprobe("report", recording, "-o", tmp_path / "page.html")
    assert "predicted to give the thread back" in out
    assert "nothing shows whether that saves wall time" in out
    assert "predicted to save" not in out
    page = (tmp_path / "page.html").read_text()
    assert "nothing shows whether the GPU waited" in page
    assert "the GPU did not wait" not in page and "The first change saves" not in page
    _, out, _ = kvprobe("report", recording, "-o", tmp_path / "page.html", "--json")
    (full,) = [one for one in json.loads(out)["findings"] if one["cause"] == "launch_queue_saturation"]
    assert full["severity"] == "critical" and full["predicted_saving_ns"] is None


def test_where_the_gpu_was_not_seen_a_saving_is_the_thread_s_alone(kvprobe, tmp_path: Path) -> None:
    recording = unpack(DATA / "others" / "shared_prefix_loaded_by_ten_requests.kvprobe.tar.gz", tmp_path)
    _, out, _ = kvprobe("report", recording, "-o", tmp_path / "page.html")
    freed = "predicted to give the thread back 49.1 ms; nothing shows whether that saves wall time"
    assert freed in out and "predicted to save" not in out
    page = (tmp_path / "page.html").read_text().replace("\u00a0", " ")
    assert f"dedup=True). P{freed[1:]}" in page  # behind a text in brackets, in a sentence of its own
    assert "The first change gives the thread back" in page and "The first change saves" not in page


def test_the_change_that_saves_most_is_shown_although_another_finding_comes_first(kvprobe, tmp_path: Path) -> None:
    recording = DATA / "fresh" / "nsys" / "torch_layers_moved_by_to_without_non_blocking.sqlite.gz"
    _, out, _ = kvprobe("report", recording, "-o", tmp_path / "page.html")
    first, _, also = out.partition("also, critical: ")
    assert "waiting_for_copies (the wait is measured, its cause is not)" in first and "saving not predicted" in first
    lines = also.splitlines()
    assert (
        lines[0].startswith("Loads between kernels ran alone")
        and "  first change    Do not let the thread wait" in lines[1]
    )
    assert lines[2].strip() == "predicted to save 41.9 ms"
    page = (tmp_path / "page.html").read_text()
    assert "<dt>How sure</dt><dd>The wait is measured" in page


def test_the_terminal_says_how_long_the_gpu_waited_where_that_is_another_figure(kvprobe, tmp_path: Path) -> None:
    recording = ACCOUNTS / "stores_of_a_prefill_hold_back_the_next_one.sqlite.gz"
    _, out, _ = kvprobe("report", recording, "-o", tmp_path / "page.html")
    assert "1,421 submissions blocked for 51.8 ms, which kept the GPU waiting for 21.2 ms\n" in out
    assert "also, critical: The link is the limit: only copies ran for 13.9 ms, at the link's full rate (link" in out


def test_the_page_counts_what_is_undecided_beside_the_other_findings(kvprobe, tmp_path: Path) -> None:
    recording = DATA / "fresh" / "nsys" / "loads_that_stand_behind_stores_of_one_stream.sqlite.gz"
    kvprobe("report", recording, "-o", tmp_path / "page.html")
    assert "; 1 more is undecided" in (tmp_path / "page.html").read_text()


def test_what_was_proven_is_not_called_unproven_in_an_undecided_recording(kvprobe, tmp_path: Path) -> None:
    """A trace that is cut off, in which the profiler's own delays are certain."""
    packed = Path(__file__).parents[1] / "gpu/data/corpus/kineto/a_short_recording.json.gz"
    text = gzip.decompress(packed.read_bytes())
    (tmp_path / "cut.json").write_bytes(text[: len(text) * 9 // 10])
    _, out, _ = kvprobe("report", tmp_path / "cut.json", "-o", tmp_path / "page.html")
    assert "\nUndecided: " in out
    assert "not proven" not in out
    assert "The profiler itself" in (tmp_path / "page.html").read_text()


ACCOUNTS = Path(__file__).parents[1] / "gpu/data/accounts/nsys"


def test_the_terminal_names_the_further_findings_that_the_page_counts(kvprobe, tmp_path: Path) -> None:
    recording = ACCOUNTS / "a_prefix_loaded_into_each_request_s_own_slots.sqlite.gz"
    _, out, _ = kvprobe("report", recording, "-o", tmp_path / "page.html")
    also = [line for line in out.splitlines() if line.startswith("also")]
    assert [line.partition(":")[0] for line in also] == ["also, for information"]
    head = (tmp_path / "page.html").read_text().partition(f"<dt>Other findings</dt><dd>{len(also)}<small>")[2]
    title = also[0].removeprefix("also, for information: ").partition(", but the GPU")[0].partition(" (")[0]
    assert html.unescape(head.partition("</small>")[0]).replace("\u00a0", " ").startswith(f"{title}; the GPU")


@pytest.mark.parametrize(
    ("name", "assumed"),
    [
        ("blocks_of_16_kib_restored_before_each_prefill", True),
        ("stores_of_a_prefill_hold_back_the_next_one", False),
    ],
)
def test_a_rate_that_is_assumed_stands_among_the_assumptions(kvprobe, tmp_path: Path, name: str, assumed) -> None:
    _, out, _ = kvprobe("report", ACCOUNTS / f"{name}.sqlite.gz", "-o", tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    section = page[page.index("What was not read, left out or assumed") :]
    assert ("<li>assumed: the link carries 55.0" in section.replace("&nbsp;", " ")) == assumed
    assert ("GB/s, assumed" in out) == assumed


def test_where_no_single_cause_explains_much_the_next_step_is_a_command_that_names_causes(
    kvprobe, shared_data: Path, tmp_path: Path
) -> None:
    """Python is the largest line, spread over all steps; of the tenth with most of it, causes can be named."""
    recording, page = shared_data / "nsys-ai" / "mfu_2gpu_before.sqlite", tmp_path / "page.html"
    code, out, _ = kvprobe("report", recording, "-o", page)
    assert code == 0 and "no single cause explains much of this" in out
    looks, narrows = (next(line for line in out.splitlines() if line.startswith(start)) for start in NEXT)
    assert "GPU 1" in looks and "in Python" in looks and "22.5 ms" in looks and "thread 145" in looks
    assert "Where to look next" in page.read_text()
    look = json.loads(kvprobe("report", recording, "-o", page, "--json")[1])["next"]
    assert look["text"] in looks and look["command"] in narrows
    words = shlex.split(look["command"])[1:-1]
    told = json.loads(kvprobe(*words, tmp_path / "part.html", "--json")[1])
    assert told["findings"][0]["severity"] == "critical" and told["next"] is None


NEXT = ("Look at next: ", "To narrow it down: ")
