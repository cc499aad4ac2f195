"""A profile that holds Python functions: who made a call, and in which function a thread was while the GPU was idle."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from kvprobe.diagnosis import Examination, examine
from kvprobe.diagnosis.finding import Finding
from kvprobe.diagnosis.in_functions import BY_FUNCTIONS, WITH_STACK
from kvprobe.diagnosis.look_next import look_next
from kvprobe.recordings import open_recording
from kvprobe.recordings.model import Recording, Table
from kvprobe.reporting import build_page
from kvprobe.reporting.headline import place, terminal_lines
from tests.diagnosis.test_look_next import US
from tests.diagnosis.test_look_next import recording as launches

RESIZE = "resize (transformers/models/owlv2/image_processing_owlv2.py:301)"
OWL, B200 = "tracelens/h100_owlv2.json.gz", "tracelens/b200_eager_trace.json.gz"


def examined(path: Path) -> tuple[Recording, Examination]:
    recording = open_recording([path])
    return recording, examine(recording)


@pytest.fixture(scope="module")
def owl(shared_data: Path) -> tuple[Recording, Examination]:
    return examined(shared_data / OWL)


@pytest.fixture(scope="module")
def owl_without(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Recording, Examination]:
    """The same profile, made without functions."""
    document = json.loads(gzip.decompress((shared_data / OWL).read_bytes()))
    document["traceEvents"] = [e for e in document["traceEvents"] if e.get("cat") != "python_function"]
    path = tmp_path_factory.mktemp("without") / "trace.json"
    path.write_text(json.dumps(document))
    return examined(path)


def of(found: Examination, cause: str) -> Finding:
    return next(one for one in found if one.cause == cause)


def test_the_function_of_a_gap_is_named_with_how_that_is_known(owl: tuple[Recording, Examination]) -> None:
    finding = of(owl[1], "gpu_starved")
    first, *_ = [one for one in finding.evidence if one.how == BY_FUNCTIONS]
    assert f"in thread 21587 was {RESIZE}, " in first.text
    assert "in <built-in function zoom_shift>" in first.text
    assert first.value == pytest.approx(425e6, rel=0.01), "of 495 ms"
    assert finding.where[0].function == finding.to_json()["where"][0]["function"] == RESIZE


def test_a_call_has_the_stack_of_the_functions_that_made_it(owl: tuple[Recording, Examination]) -> None:
    finding = of(owl[1], "pageable_memory")
    assert {(one.function, one.line) for one in finding.calls} == {
        ("_ensure_tensor_on_device", "transformers/pipelines/base.py:1173")
    }
    call = finding.calls[0]
    assert call.stack[0] == "<built-in method to of Tensor object>"
    assert "_ensure_tensor_on_device (transformers/pipelines/base.py:1173)" in call.stack
    assert not any("torch/profiler/" in frame for frame in call.stack)
    assert {change.at for change in finding.cure if change.kind == "call"} == {finding.calls[0].line}


def test_the_terminal_and_the_page_name_them(owl: tuple[Recording, Examination]) -> None:
    recording, found = owl
    starved, pageable = of(found, "gpu_starved"), of(found, "pageable_memory")
    function = starved.where[0].function
    assert f"  mostly in       {function}, in thread 21587" in terminal_lines(recording, starved)
    assert f"mostly in {function}" in place(starved)
    called = f"called in {pageable.calls[0].function} ({pageable.calls[0].line})"
    assert any(line.endswith(called) for line in terminal_lines(recording, pageable))
    page = build_page(recording, findings=found)
    assert BY_FUNCTIONS in page and function in page and "&lt;built-in function zoom_shift&gt;" in page


def test_without_functions_nothing_else_changes_and_the_report_asks_for_them(
    owl: tuple[Recording, Examination], owl_without: tuple[Recording, Examination]
) -> None:
    told, plain = owl[1], owl_without[1]
    assert [(one.cause, one.title, one.lost_ns, one.device_ns) for one in told] == [
        (one.cause, one.title, one.lost_ns, one.device_ns) for one in plain
    ]
    starved = of(plain, "gpu_starved")
    assert starved.where[0].function == "" and not any(one.how == BY_FUNCTIONS for one in starved.evidence)
    assert any(WITH_STACK in change.text for change in starved.cure)
    assert not any(WITH_STACK in change.text for change in of(told, "gpu_starved").cure)
    assert all(one.function == one.line == "" for one in of(plain, "pageable_memory").calls)


def test_of_a_server_the_function_around_most_of_the_time_is_named_and_the_longest_within(shared_data: Path) -> None:
    recording, found = examined(shared_data / B200)
    model = "forward (vllm/model_executor/models/gpt_oss.py:221)"
    for cause in ("python_or_gil_bound", "gpu_starved"):
        finding = of(found, cause)
        around, *within = [one for one in finding.evidence if one.how == BY_FUNCTIONS]
        assert around.text.endswith(f"was in {model}, or in functions that it called")
        assert 0.5 * finding.lost_ns < around.value < finding.lost_ns
        assert len(within) == 2 and all("the innermost function of the program" in one.text for one in within)
        assert finding.where[0].function == model
        assert f"  mostly in       {model}, in thread 6583" in terminal_lines(recording, finding)


def test_where_to_look_next_names_the_function() -> None:
    made = launches(late=range(62, 70))
    begins = made.calls["start_ns"][62:70] - 205 * US
    made.names += ["main (serve.py:1)", "prepare (serve.py:40)"]
    name = len(made.names) - 1
    last = int(made.calls["end_ns"][-1])
    made.tables["python_functions"] = Table(
        "python_functions",
        {
            "start_ns": np.append(0, begins),
            "end_ns": np.append(last, begins + 190 * US),
            "process": np.zeros(9),
            "thread": np.full(9, 7),
            "name": np.append(name - 1, np.full(8, name)),
        },
    )
    look = look_next(made, examine(made))
    assert look is not None
    assert ("in function prepare (serve.py:40)", 8 * 190 * US) in look.places
    assert "in function prepare (serve.py:40)" in look.text
