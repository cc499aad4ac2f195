"""One figure for one thing on the page: each says of what it is, and no two of them contradict each other."""

import re
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from kvprobe.commands.check import command as check
from kvprobe.commands.triage import command as triage
from kvprobe.diagnosis import diagnose
from kvprobe.recordings import open_recording
from kvprobe.reporting.compared import cost_text
from kvprobe.reporting.recorded import view
from kvprobe.reporting.units import NONE
from tests.packed import extract

DATA = Path(__file__).resolve().parents[1] / "gpu" / "data"
FULL = DATA / "accounts" / "nsys" / "stores_of_a_prefill_hold_back_the_next_one.sqlite.gz"
SMALL = DATA / "fresh" / "nsys" / "prefixes_restored_while_others_decode.sqlite.gz"
PEER = DATA / "fresh" / "nsys" / "layers_handed_to_a_peer_that_is_late.sqlite.gz"


@pytest.fixture(scope="module", params=[FULL, SMALL], ids=["full", "small"])
def page(request):
    recording = open_recording([request.param])
    findings = diagnose(recording)
    return recording, findings, view(recording, findings)


def facts(shown):
    return {
        one.label: (one.value.replace("\u00a0", " "), one.note.replace("\u00a0", " ")) for one in shown.verdict.facts
    }


def sections(shown):
    return {one.id: one for one in shown.sections}


def test_a_fact_says_nothing_twice(page):
    said = facts(page[2])
    name, note = said["Where"]
    assert name and name not in note
    assert said["How sure of the cause"][1] == ""


def test_other_findings_are_counted_by_what_they_cost_the_gpu(page):
    _, findings, shown = page
    note = facts(shown)["Other findings"][1]
    waited = sum(one.device_ns for one in findings[1:] if not one.abstains)
    assert (str(round(waited / 1e6, 1)) in note) if waited else ("did not wait" in note)
    assert "lost" not in note


def test_what_findings_cost_together_is_what_the_gpu_waited(page):
    _, findings, shown = page
    waited = float(re.search(r"wait for ([\d.]+)\u00a0ms", shown.lead)[1])
    assert waited == pytest.approx(sum(one.device_ns for one in findings if not one.abstains) / 1e6, rel=0.01)
    assert "host" not in shown.lead and "recorded" not in shown.lead


def test_nothing_is_busy_for_longer_than_the_recording(page):
    rows = next(chart for chart in sections(page[2])["overview"].charts if chart.id == "rows").table
    at = list(rows.columns).index("Share of the recording")
    shares = [row[at].value for row in rows.rows]
    assert any(row[0].text.startswith("steps and ranges") for row in rows.rows)
    assert 0.5 < max(shares) <= 1


def test_no_column_is_empty_and_none_repeats_another():
    recording = open_recording([SMALL])
    copies = sections(view(recording, diagnose(recording)))["descriptors"].tables[0]
    for at, name in enumerate(copies.columns):
        assert any(row[at].text != NONE for row in copies.rows), name
    assert "Copies" in copies.columns and "Calls" not in copies.columns


def test_a_chart_s_longest_call_is_the_one_in_the_sentence():
    findings = diagnose(open_recording([FULL]))
    queue = next(one for one in findings if one.cause == "launch_queue_saturation")
    series = queue.chart["series"]
    said = next(one.text for one in queue.evidence if "and up to" in one.text)
    assert f"and up to {np.max(series['blocked']['y']):.3g} µs" in said
    assert np.max(series["went through"]["y"]) < np.max(series["blocked, in another finding"]["y"])
    fence = next(one for one in findings if one.cause == "fence_before_copies").chart["series"]
    assert np.max(fence["went through"]["y"]) == np.max(series["went through"]["y"])  # no blocked call among them


def test_a_finding_shows_its_sentences_once(page):
    for one in page[2].findings:
        assert "figures" not in one
        assert one["places"] is None or one["places"].caption == "Time lost, by thread and stream"


def test_a_checksum_that_was_not_taken_has_no_column(tmp_path):
    from kvprobe.reporting import build_page

    recording = open_recording([SMALL])
    text = build_page(recording, findings=diagnose(recording))
    assert "not taken" not in text and "sha256 of" not in text


def test_a_limit_of_what_is_not_known_names_what_it_passes_over():
    said = CliRunner().invoke(check, [str(SMALL), "--max-not-known", "5%"]).output.replace("\u00a0", " ")
    line = re.search(r"([\d.]+ ms)  not known", said)[1]
    assert f"and {line} of short delays" in said


def test_a_full_queue_without_a_plateau_has_a_depth():
    assert re.search(r"^full +\S+ ms +1,021 +stream", CliRunner().invoke(triage, [str(PEER)]).output, re.MULTILINE)


def test_a_cost_of_nothing_is_no_share_of_a_time():
    assert cost_text(23_100_000, 0.0).replace("\u00a0", " ") == "nothing (23.1 ms lost beside the GPU's work)"
    assert cost_text(23_100_000, 0.07).replace("\u00a0", " ") == "7.0% (23.1 ms lost)"
    assert cost_text(0, 0.0) == "nothing"


def test_a_stream_that_is_left_out_and_a_device_seen_by_marks_are_spoken_of_as_they_are(tmp_path):
    extract(DATA / "corpus" / "run" / "thousands_of_small_stores.kvprobe.tar.gz", tmp_path)
    recording = open_recording([tmp_path / "thousands_of_small_stores"])
    said = str(view(recording, diagnose(recording)))
    assert "1 more stream is not drawn: it had at most 1 outstanding." in said
    assert "did not record each operation of the device" in said
