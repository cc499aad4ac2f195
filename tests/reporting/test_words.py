"""Words and numbers of the page: units, verdicts, and what of a cure can be copied."""

from __future__ import annotations

import numpy as np
import pytest

from kvprobe.diagnosis import Change, Evidence, Finding, Where
from kvprobe.recordings.model import CallKind, Recording, Source, Table
from kvprobe.reporting import build_page, series, streams
from kvprobe.reporting.charts import Axis, Points, timeline
from kvprobe.reporting.headline import cure_parts
from kvprobe.reporting.recorded import submissions, view
from kvprobe.reporting.units import (
    duration,
    link_share,
    moved_text,
    number_text,
    percent,
    rate,
    ratio,
    size_text,
    value_text,
)
from tests.examining import examination


@pytest.mark.parametrize(
    ("ns", "text"),
    [
        (0, "0 ns"),
        (4, "4.00 ns"),
        (999.4, "999 ns"),
        (999.6, "1.00 µs"),
        (1040, "1.04 µs"),
        (912_000_000, "912 ms"),
        (3_400_000_000, "3.40 s"),
        (200e9, "3 min 20 s"),
        (-1500, "-1.50 µs"),
        (None, "\u2013"),
        (float("nan"), "\u2013"),
    ],
)
def test_a_duration_has_three_digits_and_the_unit_a_person_would_take(ns, text: str) -> None:
    assert duration(ns).replace("\u00a0", " ") == text


def test_other_units() -> None:
    assert size_text(65536) == "64.0\u00a0KiB"
    assert moved_text(65536) == "65.5\u00a0kB"
    assert rate(55.6e9) == "55.6\u00a0GB/s"
    assert (percent(0.47), percent(0.0123), percent(1e-5), percent(0)) == ("47%", "1.2%", "<0.1%", "0.0%")
    assert ratio(180, 1.4) == "129\u00d7 lower"
    assert ratio(100, 101) == "unchanged"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (2_009_200_000, "2,009,200,000"),
        (1_230_456.5, "1,230,456"),
        (37.25, "37.2"),
        (0.5, "0.500"),
        (float("nan"), "\u2013"),
    ],
)
def test_a_number_without_a_unit_has_no_exponent(value, text: str) -> None:
    assert number_text(value) == text
    assert value_text("a fact", value) == text


def test_the_numbers_of_a_finding_and_of_a_chart_can_be_read() -> None:
    evidence = [Evidence("they moved 2.3 GB", 2_312_123_456, "bytes", "measured")]
    (finding,) = (
        view(EMPTY, examination(EMPTY, [Finding("one", "One", "warning", "certain", 5, tuple(evidence))])).findings
        or []
    )
    assert finding["evidence"] == [{"text": "they moved 2.3\u00a0GB", "how": "measured"}]
    values = np.array([0.25, 12_345_678.5])
    for unit, text in (("rate", "12.3\u00a0MB/s"), ("count", "12,345,678"), ("bytes", "12.3\u00a0MB")):
        chart = timeline(("x", "x", "x"), [Points("x", np.array([0, 9]), values)], (0, 10), Axis("x", unit=unit))
        assert chart.table.rows[-3][2].text == text
        assert chart.table.rows[0][2].text != "0"


def test_a_recording_of_nothing_is_not_said_to_be_healthy() -> None:
    page = build_page(EMPTY, findings=examination(EMPTY))
    assert "Nothing found" not in page
    assert "Not enough was recorded to tell: kvprobe examined 0 submissions in 0\u00a0ns." in page
    assert "1.00\u00a0ns" not in page


def test_how_to_record_is_set_as_code() -> None:
    page = build_page(EMPTY, findings=examination(EMPTY))
    top = page[page.index('id="verdict"') : page.index("</section>")]
    assert "<code>kvprobe run -- COMMAND</code>" in top
    assert "`" not in top


def codes(text: str) -> list[str]:
    return [part.text for part in cure_parts(text) if part.code]


def test_a_setting_can_be_copied_and_its_sentence_stays_whole() -> None:
    text = "CUDA_SCALE_LAUNCH_QUEUES=4x before CUDA starts: four times the depth (not on Jetson)"
    assert codes(text) == ["export CUDA_SCALE_LAUNCH_QUEUES=4x"]
    assert "".join(part.text for part in cure_parts(text) if not part.code) == text


def test_a_command_is_nothing_but_a_command() -> None:
    assert codes("kvprobe run -- vllm serve model") == ["kvprobe run -- vllm serve model"]
    assert codes("Set `CUDA_DEVICE_MAX_CONNECTIONS=32`, then restart") == ["export CUDA_DEVICE_MAX_CONNECTIONS=32"]


def test_a_command_behind_a_colon_stands_in_the_line_to_copy_alone() -> None:
    text = "This command judges it alone: `kvprobe report run --from 1ms -o part.html`."
    assert [(part.text, part.code) for part in cure_parts(text)] == [
        ("This command judges it alone:", False),
        ("kvprobe report run --from 1ms -o part.html", True),
    ]


def test_prose_is_left_alone() -> None:
    assert [part.text for part in cure_parts("Launch fewer, larger pieces of work")] == [
        "Launch fewer, larger pieces of work"
    ]


def finding(**changes: object) -> Finding:
    values = {
        "cause": "launch_queue_saturation",
        "title": "The queue of stream 7 was full",
        "severity": "warning",
        "confidence": "certain",
        "lost_ns": 5_000_000,
        "evidence": (Evidence("400 calls waited", 400, "calls"),),
        "cure": (Change("Use more streams"),),
        "where": (Where(pid=1, thread=7, stream_name="stream 7", lost_ns=5_000_000),),
    }
    return Finding(**{**values, **changes})


EMPTY = Recording([Source("trace.json", "kineto-json")])


def headline(*findings: Finding) -> str:
    page = build_page(EMPTY, findings=examination(EMPTY, findings))
    return page[page.index("<h1>") + 4 : page.index("</h1>")]


def test_the_gravest_finding_leads_and_the_costliest_of_equal_ones() -> None:
    costly = finding(title="Costly", lost_ns=9_000_000)
    grave = finding(title="Grave", severity="critical", lost_ns=1)
    assert headline(finding(), costly) == "Costly."
    assert headline(costly, grave) == "Grave."


def test_a_recording_without_submissions_is_not_called_healthy() -> None:
    assert headline() == "Undecided: the recording holds no CUDA call and no device activity."


def test_an_abstention_is_never_a_verdict() -> None:
    said = headline(
        finding(confidence="cannot tell", title="A queue may be full", reason="cannot tell, because of graphs")
    )
    assert said.startswith("Undecided")


def test_totals_stand_in_where_single_calls_were_lost() -> None:
    counts = np.zeros((1, 128), dtype=np.int64)
    counts[0, int(series.bucket(np.array([1000]))[0])] = 990_000
    counts[0, int(series.bucket(np.array([200_000]))[0])] = 10_000
    tables = {
        "calls": Table(
            "calls", {"start_ns": [0, 5000], "end_ns": [1000, 6000], "kind": [CallKind.COPY] * 2, "stream": [0, 0]}
        ),
        "totals": Table(
            "totals",
            {
                "stream": [0],
                "kind": [CallKind.COPY],
                "calls": [1_000_000],
                "dur_ns": [2_990_000_000],
                "max_ns": [3_000_000],
                "bytes": [65536],
            },
        ),
        "streams": Table("streams", {"handle": [7]}),
    }
    kept = Recording([Source("run.kvp", "kvprobe")], tables, histograms=counts)
    found = submissions(kept)
    assert (found.calls, found.host_ns, len(found.rows)) == (1_000_000, 2.99e9, 2)
    (row,) = streams.stream_table(kept, found, None)[0].rows
    texts = [cell.text.replace("\u00a0", " ") for cell in row]
    assert texts[2] == "1,000,000"
    assert "2.99 s" in texts
    assert "3.00 ms" in texts
    page = build_page(kept, findings=examination(kept))
    assert "Calls kept in detail" in page and "of 1,000,000; the others are in the totals alone" in page
    assert "1,000,000 submissions 2 were kept" in streams.stream_table(kept, found, None)[1]


def test_facts_of_the_machine_are_words_and_dates(small_recording: Recording) -> None:
    small_recording.machine |= {"unix_offset_ns": 1_700_000_000_000_000_000}
    small_recording.lost = {0: 5}
    page = build_page(small_recording, findings=examination(small_recording))
    assert "2023-11-14 22:13:20 UTC" in page
    assert "queue depth" in page and "queue_depth" not in page and "unix_offset" not in page
    assert "5 single calls of " in page and "row 0" not in page


def test_a_rate_a_little_above_the_links_is_all_of_it_and_one_well_above_is_no_share():
    assert [link_share(share) for share in (0.9, 1.0, 1.013, 1.05)] == ["90%", "100%", "100%", "100%"]
    assert link_share(1.2) == "above it"
