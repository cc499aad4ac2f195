"""A report gives one figure for one thing: times, savings and shares that a reader would compare agree."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
import pytest

from kvprobe.account import Line
from kvprobe.diagnosis import CAUSES, Examination, examine
from kvprobe.diagnosis.finding import Change, singular
from kvprobe.durations import time_text
from kvprobe.launchqueue.evidence import OtherSlowCalls
from kvprobe.launchqueue.judge import conclude
from kvprobe.recordings import open_recording
from kvprobe.recordings.model import CallKind, Engine, Recording, Source, Table
from kvprobe.reporting.headline import changes_parts
from kvprobe.reporting.recorded import view
from kvprobe.reporting.units import duration

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "corpus"))

from grade import unpack

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "tests" / "gpu" / "data"
PYTHON_NS, CALL_NS, KERNEL_NS, LAUNCHES = 9_000, 11_000, 2_000, 600


def opened(path: str, into: Path) -> Recording:
    return open_recording(unpack(DATA / path, into))


def launched_one_by_one() -> Recording:
    """Kernels that are shorter than their launch: between two launches their thread is in Python, for less time."""
    start = np.arange(LAUNCHES, dtype=np.int64) * (PYTHON_NS + CALL_NS)
    ran = start + CALL_NS + 1_000
    recording = Recording([Source("t", "trace")], names=["", "cudaLaunchKernel", "kernel", "python3"])
    columns = {"process": np.zeros(LAUNCHES), "correlation": np.arange(1, LAUNCHES + 1)}
    columns["stream"] = np.zeros(LAUNCHES)
    recording.tables["calls"] = Table(
        "calls",
        {
            **columns,
            "start_ns": start,
            "end_ns": start + CALL_NS,
            "kind": np.full(LAUNCHES, CallKind.LAUNCH),
            "thread": np.full(LAUNCHES, 7),
            "name": np.full(LAUNCHES, 1),
        },
    )
    recording.tables["executions"] = Table(
        "executions",
        {
            **columns,
            "start_ns": ran,
            "end_ns": ran + KERNEL_NS,
            "engine": np.full(LAUNCHES, Engine.KERNEL),
            "device": np.zeros(LAUNCHES),
            "name": np.full(LAUNCHES, 2),
        },
    )
    recording.tables["streams"] = Table("streams", {"process": [0], "handle": [7]})
    recording.tables["processes"] = Table("processes", {"pid": [1], "name": [3]})
    recording.has_executions = True
    return recording


@pytest.fixture(scope="module")
def launches() -> Examination:
    return examine(launched_one_by_one())


def test_idle_gaps_have_one_length_in_the_title_the_account_and_the_saving(launches) -> None:
    finding = next(one for one in launches if one.cause == "python_or_gil_bound")
    (gpu,) = launches.account.gpus
    assert finding.lost_ns == finding.device_ns == finding.predicted_saving_ns
    assert finding.lost_ns <= gpu.ns(Line.PYTHON, Line.SUBMITTING)
    assert time_text(finding.lost_ns) in finding.title


def test_time_outside_of_calls_is_what_the_account_says(launches) -> None:
    finding = next(one for one in launches if one.cause == "python_or_gil_bound")
    (gpu,) = launches.account.gpus
    assert finding.evidence[0].value == pytest.approx(gpu.ns(Line.PYTHON), rel=0.01)


def test_what_a_thread_did_inside_its_calls_is_not_called_python(launches) -> None:
    (gpu,), (thread,) = launches.account.gpus, launches.account.threads
    assert gpu.ns(Line.PYTHON) <= thread.ns(Line.PYTHON)
    assert gpu.ns(Line.SUBMITTING) == pytest.approx(CALL_NS * LAUNCHES, rel=0.2)


def test_no_sentence_counts_the_same_gaps_twice(launches) -> None:
    finding = next(one for one in launches if one.cause == "python_or_gil_bound")
    for one in finding.evidence:
        counts = re.findall(r"\d[\d,]*(?= (?:gaps|of them))", one.text)
        assert len(counts) == len(set(counts)) and "of them are short" not in one.text, one.text
        assert not re.search(r"(?<![\d,.])\d{4,}", one.text), one.text  # thousands are separated


BLOCKING = "fresh/nsys/torch_layers_moved_by_to_without_non_blocking.sqlite.gz"


@pytest.fixture(scope="module")
def moved(tmp_path_factory: pytest.TempPathFactory) -> Examination:
    return examine(opened(BLOCKING, tmp_path_factory.mktemp("moved")))


def test_what_the_gpu_computes_can_hide_copies_once(moved) -> None:
    (gpu,) = moved.account.gpus
    promised = [one.predicted_saving_ns or 0 for one in moved]
    assert 0.9 * gpu.ns(Line.COMPUTING) < sum(promised) <= gpu.ns(Line.COMPUTING)


def test_layers_that_are_moved_and_waited_for_are_said_to_be(moved) -> None:
    named = {one.cause: one for one in moved}
    for cause in ("waiting_for_copies", "weights_not_overlapped"):
        assert "non_blocking=True" in named[cause].cure[0].text
        assert any("the thread waited in cudaStreamSynchronize" in one.text for one in named[cause].evidence)
    assert "weights" in moved[0].cure[0].text and "vLLM, SGLang" not in moved[0].cure[0].text


def test_a_range_around_the_whole_program_names_none_of_its_copies(moved) -> None:
    (weights,) = (one for one in moved if one.cause == "weights_not_overlapped")
    assert not any("ranges around the copies" in one.text for one in weights.evidence)


def test_a_saving_is_promised_once() -> None:
    whole, same = Change("Order them", predicted_saving_ns=42_000_000), Change("Merge", predicted_saving_ns=42_000_000)
    less = Change("Wait less", predicted_saving_ns=40_000_000)
    said = [" ".join("".join(part.text for part in parts).split()) for parts in changes_parts([whole, same, less])]
    assert said == [
        "Order them (predicted to save 42.0 ms)",
        "Merge (an alternative to change 1, saves the same 42.0 ms)",
        "Wait less (predicted to save 40.0 ms)",
    ]


def test_one_of_many_copies_is_still_one_of_copies() -> None:
    assert singular("1 of 174 copies were late, 1 copies were not") == "1 of 174 copies was late, 1 copy was not"


def test_how_many_causes_were_looked_for_is_a_number(tmp_path) -> None:
    recording = opened("corpus/kineto/a_result_read_back_a_step_later.json.gz", tmp_path)
    found = examine(recording)
    lead = view(recording, found).lead
    blind = len(found.not_looked_for)
    assert blind and lead.endswith(f"looked for {len(CAUSES) - blind} of {len(CAUSES)} known causes.")


def test_no_queue_holds_more_than_it_is_said_to_take() -> None:
    def said(deepest: int) -> str:
        return conclude(OtherSlowCalls(0, 0, 1_000, "slow calls", "(counted)", deepest, 900)).because

    assert said(8).startswith("no call began with more than 8 others outstanding, and a queue takes 900")
    assert said(2_146).startswith("up to 2,146 were outstanding, but calls that were slow began with fewer")


@pytest.mark.parametrize(
    ("ns", "said"), [(3_049_000, "3.05 ms"), (999.6, "1.00 µs"), (28e6, "28.0 ms"), (125e9, "2 min 05 s"), (0, "0 ns")]
)
def test_a_time_is_written_in_one_way(ns, said) -> None:
    assert time_text(ns) == said and duration(ns).replace("\u00a0", " ") == said


FORMATS_A_TIME = re.compile(r"/ 1e[369]:[^}]*\} ?(µs|us|ms|s)\b")
OTHERWISE = {"offload/cells.py", "reporting/verified.py"}  # moments at which something was stored, with all digits


def test_nobody_else_writes_times() -> None:
    folder = ROOT / "kvprobe"
    found = {
        path.relative_to(folder).as_posix() for path in folder.rglob("*.py") if FORMATS_A_TIME.search(path.read_text())
    }
    assert found == OTHERWISE


def test_nobody_else_writes_bytes_that_were_moved() -> None:
    """A cause's text takes them from `kvprobe.durations`: 1.78 GB was 1,783.6 MB in another sentence."""
    for path in sorted((ROOT / "kvprobe" / "diagnosis").glob("*.py")):
        assert not re.search(r"1e[69][^}]*\} [kMG]B(?!/s)", path.read_text()), path.name


def test_a_saving_stands_in_no_second_brackets() -> None:
    plain, ends = (
        Change(text, predicted_saving_ns=42_000_000) for text in ("Merge copies", "Merge copies (dedup=True)")
    )
    said = [" ".join("".join(part.text for part in parts).split()) for parts in changes_parts([plain, ends])]
    assert said[0] == "Merge copies (predicted to save 42.0 ms)"
    assert ") (" not in said[1] and said[1].startswith("Merge copies (dedup=True). An alternative to change 1")
