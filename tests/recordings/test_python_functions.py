"""The Python functions of a PyTorch profile: read, nested again by their times, and told apart from libraries."""

from __future__ import annotations

import gzip
import json
import random
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvprobe.recordings import open_recording
from kvprobe.recordings.intervals import Cover
from kvprobe.recordings.model import Recording, Table
from kvprobe.recordings.python_functions import FunctionSeen, is_own, longest_in, mostly_in, seen_in, stack_at
from kvprobe.recordings.vocabulary import kineto_function

EVERYTHING = Cover(np.array([0]), np.array([1 << 62]))


def made(*functions: tuple[str, int, int], thread: int = 7) -> Recording:
    """Functions by name, start and end, in any order."""
    functions = tuple(sorted(functions, key=lambda one: one[1]))
    names = ["", *dict.fromkeys(name for name, _, _ in functions)]
    columns = {
        "start_ns": [start for _, start, _ in functions],
        "end_ns": [end for _, _, end in functions],
        "process": [0] * len(functions),
        "thread": [thread] * len(functions),
        "name": [names.index(name) for name, _, _ in functions],
    }
    return Recording([], {"python_functions": Table("python_functions", columns)}, names)


NESTED = (
    ("main (serve.py:1)", 0, 1000),
    ("prepare (serve.py:9)", 100, 700),
    ("dumps (json/__init__.py:183)", 200, 600),
    ("<built-in function encode>", 250, 550),
    ("step (serve.py:30)", 700, 900),
)


@pytest.mark.parametrize(
    ("name", "frame"),
    [
        ("serve.py(40): load", "load (serve.py:40)"),
        ("/a (b)/serve.py(40): <module>", "<module> (/a (b)/serve.py:40)"),
        ("<built-in method size of Tensor object at 0x7fdc681d0910>", "<built-in method size of Tensor object>"),
        ("<built-in function sleep>", "<built-in function sleep>"),
        ("nn.Module: Linear_0", "nn.Module: Linear_0"),
    ],
)
def test_a_function_is_called_as_a_frame_of_a_stack_is(name: str, frame: str) -> None:
    assert kineto_function(name) == frame


@pytest.mark.parametrize(
    ("file", "own"),
    [
        ("serve.py", True),
        ("vllm/v1/worker/gpu_model_runner.py", True),
        ("/app/threading.py", True),
        ("threading.py", False),
        ("concurrent/futures/thread.py", False),
        ("torch/nn/modules/module.py", False),
        ("torchless/model.py", True),
        ("numpy/_core/fromnumeric.py", False),
        ("/usr/lib/python3.12/site-packages/x/y.py", False),
        ("<string>", False),
    ],
)
def test_modules_of_python_and_of_libraries_are_not_the_programs(file: str, own: bool) -> None:
    assert is_own(file) is own


def test_time_belongs_to_the_innermost_function_of_the_program() -> None:
    found = {one.name: one for one in longest_in(made(*NESTED), 0, 7, EVERYTHING)}
    assert {name: one.ns for name, one in found.items()} == {
        "prepare (serve.py:9)": 600,
        "main (serve.py:1)": 200,
        "step (serve.py:30)": 200,
    }
    prepare = found["prepare (serve.py:9)"]
    assert (prepare.own, prepare.inner, prepare.inner_ns) == (True, "", 0), "half of it is not most of it"
    found = {one.name: one for one in longest_in(made(*NESTED), 0, 7, Cover(np.array([210]), np.array([560])))}
    assert list(found) == ["prepare (serve.py:9)"]
    prepare = found["prepare (serve.py:9)"]
    assert (prepare.ns, prepare.inner, prepare.inner_ns) == (350, "<built-in function encode>", 300)


def test_only_the_time_that_was_asked_for_and_the_threads_own_functions_count() -> None:
    waits = Cover(np.array([50, 650]), np.array([110, 720]))
    found = longest_in(made(*NESTED), 0, 7, waits)
    assert [(one.name, one.ns) for one in found] == [
        ("prepare (serve.py:9)", 60),
        ("main (serve.py:1)", 50),
        ("step (serve.py:30)", 20),
    ]
    assert longest_in(made(*NESTED), 0, 8, waits) == []
    assert longest_in(Recording([]), 0, 7, waits) == []


def test_the_function_around_most_of_the_time_is_the_innermost_of_those() -> None:
    assert mostly_in(made(*NESTED), 0, 7, EVERYTHING) == ("", 0), "of all time, the functions are hardly any"
    assert mostly_in(made(*NESTED), 0, 7, Cover(np.array([0]), np.array([1000]))) == ("prepare (serve.py:9)", 600)
    assert mostly_in(made(*NESTED), 0, 7, Cover(np.array([600]), np.array([900]))) == ("step (serve.py:30)", 200)
    assert mostly_in(made(*NESTED), 0, 7, Cover(np.array([0]), np.array([300]))) == ("prepare (serve.py:9)", 200)
    assert mostly_in(made(*NESTED), 0, 7, Cover(np.array([0]), np.array([150]))) == ("main (serve.py:1)", 150)
    assert mostly_in(made(*NESTED), 0, 8, EVERYTHING) == mostly_in(Recording([]), 0, 7, EVERYTHING) == ("", 0)


def test_a_function_that_calls_itself_counts_once() -> None:
    again = made(("walk (a.py:1)", 0, 40), ("walk (a.py:1)", 5, 40), ("other (a.py:9)", 40, 100))
    assert mostly_in(again, 0, 7, Cover(np.array([0]), np.array([100]))) == ("other (a.py:9)", 60)
    assert mostly_in(again, 0, 7, Cover(np.array([0]), np.array([90]))) == ("other (a.py:9)", 50)
    assert mostly_in(again, 0, 7, Cover(np.array([0]), np.array([80]))) == ("", 0), "40 of 80 are not most"


def test_a_library_that_no_function_of_the_program_called_is_named_itself() -> None:
    (found, _) = longest_in(made(("_bootstrap (threading.py:1)", 0, 90), ("run (x/y.py:2)", 80, 85)), 0, 7, EVERYTHING)
    assert (found.name, found.own, found.ns) == ("_bootstrap (threading.py:1)", False, 85)


def test_a_stack_is_what_a_thread_was_in_without_the_profilers_own() -> None:
    assert stack_at(made(*NESTED), 0, 7, 300) == tuple(name for name, _, _ in NESTED[3::-1])
    assert stack_at(made(*NESTED), 0, 7, 700) == ("step (serve.py:30)", "main (serve.py:1)"), "what ends is over"
    assert stack_at(made(*NESTED), 0, 7, 1000) == stack_at(made(*NESTED), 0, 8, 300) == ()
    inside = ("start (torch/profiler/profiler.py:1128)", 10, 20), ("main (serve.py:1)", 0, 1000)
    assert stack_at(made(*inside), 0, 7, 15) == ("main (serve.py:1)",)
    assert stack_at(made(("inner (a.py:2)", 5, 9), ("outer (a.py:1)", 5, 10)), 0, 7, 5)[0] == "inner (a.py:2)"


@pytest.mark.parametrize("seed", range(20))
def test_intervals_that_cross_cost_at_most_themselves(seed: int) -> None:
    rng = random.Random(seed)
    some = []
    for number in range(60):
        start = rng.randrange(100)
        some.append((f"f{number % 9} (a.py:{number % 9})", start, start + rng.randrange(40)))
    covered = Cover(*(np.array(column) for column in zip(*[(start, end) for _, start, end in some], strict=True)))
    found = longest_in(made(*some), 0, 7, EVERYTHING, most=9)
    assert found and all(0 < one.ns <= sum(end - start for _, start, end in some) for one in found)
    assert sum(one.ns for one in found) >= covered.total_ns


def by_ids(path: Path) -> Counter[tuple[int, str]]:
    """Time of each function of the program by thread, by the ids that the trace gives each event and its caller."""
    document: Any = json.loads(gzip.decompress(path.read_bytes()), parse_float=str)

    def ns(us: object) -> int:
        whole, _, decimals = str(us).partition(".")
        return int(whole) * 1000 + int(decimals[:3].ljust(3, "0") or 0)

    events = {e["args"]["Python id"]: e for e in document["traceEvents"] if e.get("cat") == "python_function"}
    alone = {number: ns(e["dur"]) for number, e in events.items()}
    for e in events.values():
        if e["args"]["Python parent id"] in events:
            alone[e["args"]["Python parent id"]] -= ns(e["dur"])
    spent: Counter[tuple[int, str]] = Counter()
    for number, long in alone.items():
        at = number
        while at in events and not of_program(events[at]["name"]):
            at = events[at]["args"]["Python parent id"]
        name = kineto_function(events[at if at in events else number]["name"])
        spent[events[number]["tid"], name] += long
    return spent


def of_program(name: str) -> bool:
    file, _, rest = name.rpartition("(")
    return rest.partition("): ")[1] != "" and is_own(file)


@pytest.mark.parametrize("name", ["owlv2", "b200"])
def test_time_by_nesting_is_time_by_the_ids_of_the_trace(shared: Any, name: str) -> None:
    expected = by_ids(shared.path(name))
    recording = shared.open(name)
    for thread in {thread for thread, _ in expected}:
        found = longest_in(recording, 0, thread, EVERYTHING, most=10_000)
        theirs = {function: ns for (of, function), ns in expected.items() if of == thread and ns > 0}
        assert {one.name for one in found} >= {function for function, ns in theirs.items() if ns > 1000}
        off = sum(abs(one.ns - theirs.get(one.name, 0)) for one in found)
        assert off <= 0.001 * sum(theirs.values()), "events that begin or end at the same instant"


def test_functions_of_a_real_profile_are_read(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from torch.profiler import ProfilerActivity, profile

    def sleeps_here() -> None:  # a name that no thread beside this one has in its stack
        time.sleep(0.02)

    with profile(activities=[ProfilerActivity.CPU], with_stack=True) as profiler:
        sleeps_here()
        torch.zeros(3).add(1)
    path = tmp_path / "trace.json.gz"
    profiler.export_chrome_trace(str(path))
    recording = open_recording([path])
    assert not any("python_function" in note for note in recording.notes)
    table = recording.python_functions
    (row,) = (i for i, name in enumerate(table["name"].tolist()) if recording.text(name).startswith("sleeps_here ("))
    frame = recording.text(int(table["name"][row]))
    assert frame.endswith(f"{Path(__file__).name}:{sleeps_here.__code__.co_firstlineno})")
    thread = threading.get_native_id()
    assert int(table["thread"][row]) == thread
    start, end = (int(table[edge][row]) for edge in ("start_ns", "end_ns"))
    (found,) = longest_in(recording, 0, thread, Cover(np.array([start]), np.array([end])))
    assert (found.name, found.ns, found.inner) == (frame, end - start, "<built-in function sleep>")
    middle = stack_at(recording, 0, thread, (start + end) // 2)
    assert middle[:2] == ("<built-in function sleep>", frame)
    assert any(__name__.rpartition(".")[2] in outer for outer in middle[2:])


def sampled(*samples: tuple[int, str], thread: int = 7) -> Recording:
    """Stacks of a thread by when they were taken, ms; frames joined by a bar."""
    names = ["", *dict.fromkeys(stack.replace("|", "\n") for _, stack in samples)]
    columns = {
        "time_ns": [at * 1_000_000 for at, _ in samples],
        "process": [0] * len(samples),
        "thread": [thread] * len(samples),
        "stack": [names.index(stack.replace("|", "\n")) for _, stack in samples],
    }
    return Recording([], {"stack_samples": Table("stack_samples", columns)}, names)


HASH, SLEEP = "hash_blocks (/srv/plan.py:4{})|step (/srv/plan.py:90)", "step (/srv/plan.py:91)"


def test_of_samples_of_stacks_only_those_in_these_times_count() -> None:
    """A sample is of the millisecond before it: one at the end of a gap is the gap's, one at its beginning is not."""
    gaps = Cover(np.array([10, 30]) * 1_000_000, np.array([20, 40]) * 1_000_000)
    within = [(11, HASH.format(1)), (15, HASH.format(1)), (20, HASH.format(2)), (35, SLEEP)]
    outside = [(10, SLEEP), (21, SLEEP), (25, SLEEP), (30, SLEEP)]
    recording = sampled(*sorted(within + outside))
    seen = [FunctionSeen("hash_blocks (/srv/plan.py:41)", 3), FunctionSeen("step (/srv/plan.py:91)", 1)]
    assert seen_in(recording, 0, 7, gaps) == (seen, 4)
    assert seen_in(recording, 0, 8, gaps) == ([], 0)
    assert seen_in(recording, 1, 7, gaps) == ([], 0)
    assert seen_in(sampled(*within[:2]), 0, 7, gaps) == ([], 2)  # two may be chance


def test_the_time_of_libraries_belongs_to_the_program_s_function_that_called_them() -> None:
    tokenize = "encode (/usr/lib/python3.12/json/encoder.py:200)|tokenize (/srv/app.py:12)|main (/srv/app.py:80)"
    samples = [(5, tokenize), (6, tokenize), (7, tokenize), (8, "tokenize (/srv/app.py:13)|main (/srv/app.py:80)")]
    library = [(9, "get (/usr/lib/python3.12/queue.py:171)|run (/usr/lib/python3.12/threading.py:1000)")]
    (first, second), looks = seen_in(sampled(*samples, *library), 0, 7, EVERYTHING)
    assert first == FunctionSeen("tokenize (/srv/app.py:12)", 4, "encode", 3)
    assert second == FunctionSeen("get (/usr/lib/python3.12/queue.py:171)", 1)
    assert looks == 5
