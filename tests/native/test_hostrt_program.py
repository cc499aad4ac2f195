"""The host runtime seen by C programs that link it as they would link libcudart; one program a subject."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from kvprobe.native import build

HERE = Path(__file__).parent
SETTINGS = ("KVHOST_", "CUDA_")


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory):
    """Compiles test_hostrt_<subject>.c on first use; returns a function that runs one of its cases."""
    build.build()
    folder = tmp_path_factory.mktemp("hostrt")
    compiled: dict[str, Path] = {}

    def run(subject: str, *arguments: object, **environment: str) -> str:
        if subject not in compiled:
            compiled[subject] = folder / subject
            command = [*build.compiler(), "-std=gnu11", "-D_GNU_SOURCE", "-g", "-O1", "-Wall", "-Wextra", "-Werror"]
            command += [f"-I{build.NATIVE / 'hostrt'}", f"-I{build.NATIVE / 'src'}"]
            command += [str(HERE / f"test_hostrt_{subject}.c"), "-o", str(compiled[subject])]
            command += [f"-L{build.LIB}", "-lkvprobe_hostrt", f"-Wl,-rpath,{build.LIB}"]
            subprocess.run([*command, "-pthread", "-ldl"], check=True)
        clean = {name: value for name, value in os.environ.items() if not name.startswith(SETTINGS)}
        done = subprocess.run(
            [str(compiled[subject]), *map(str, arguments)],
            env=clean | environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, f"exit code {done.returncode}: {done.stderr}"
        return done.stdout

    return run


COPY, LAUNCH, RECORD, BATCH = range(4)


@pytest.mark.parametrize(
    ("environment", "streams", "expected"),
    [
        ({}, 1, 1021),
        ({"CUDA_SCALE_LAUNCH_QUEUES": "4x"}, 1, 4093),
        ({"CUDA_SCALE_LAUNCH_QUEUES": "0.25x"}, 1, 253),
        ({"CUDA_SCALE_LAUNCH_QUEUES": "7x"}, 1, 1021),
        ({"KVHOST_DEPTH": "64"}, 1, 64),
        ({"KVHOST_DEPTH": "1"}, 1, 1),
        ({}, 2, 2021),
        ({}, 4, 4021),
        ({}, 2000, 4021),
        ({"KVHOST_CHANNELS": "2"}, 6, 2021),
        ({"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, 64, 1021),
        ({"CUDA_DEVICE_MAX_CONNECTIONS": "8"}, 64, 8021),
        ({"CUDA_DEVICE_MAX_CONNECTIONS": "32"}, 64, 32021),
        ({"CUDA_DEVICE_MAX_COPY_CONNECTIONS": "1"}, 64, 1021),
        ({"CUDA_DEVICE_MAX_COPY_CONNECTIONS": "32"}, 64, 32021),
        ({"CUDA_DEVICE_MAX_CONNECTIONS": "33"}, 64, 4021),
    ],
)
def test_copies_before_one_blocks_are_as_measured(program, environment, streams, expected):
    program("queue", "capacity", COPY, streams, 0, expected, **environment)


def test_launches_and_records_take_slots_like_copies(program):
    program("queue", "capacity", LAUNCH, 1, 0, 1021)
    program("queue", "capacity", RECORD, 1, 0, 1020)  # and the copy that says which channel


@pytest.mark.parametrize(("batch", "calls"), [(8, 1021), (80, 255), (1000, 25)])
def test_batches_take_a_slot_for_20_to_25_copies(program, batch, calls):
    program("queue", "capacity", BATCH, 1, batch, calls)


@pytest.mark.parametrize(
    "case",
    [
        "behind_a_running_kernel",
        "fence_first",
        "false_dependency",
        "held_back_copies_keep_their_service_time",
    ],
)
def test_launch_queue(program, case):
    program("queue", case)


@pytest.mark.parametrize("case", ["false_dependency", "held_back_copies_keep_their_service_time"])
def test_launch_queue_on_the_virtual_clock(program, case):
    program("queue", case, KVHOST_CLOCK="virtual")


def test_each_completion_lets_exactly_one_blocked_call_return(program):
    program("queue", "one_slot_per_completion", KVHOST_DEPTH="64")


@pytest.mark.parametrize(
    "case",
    ["go_through", "wait_with_it", "frees_wait", "creation_gets_its_turn", "lost_device_wakes", "reset_wakes"],
)
def test_blocked_submitter_and_other_threads(program, case):
    program("locks", case)


@pytest.mark.parametrize(
    "case",
    [
        "work_then_copy",
        "events",
        "pageable",
        "capture",
        "memory",
        "errors",
        "reset",
        "fork_afresh",
        "host_functions",
        "driver",
        "trace",
    ],
)
def test_semantics(program, case):
    program("semantics", case)


@pytest.mark.parametrize(
    "case",
    ["work_then_copy", "events", "delays_of_streams_overlap", "pageable", "memory", "errors", "driver"],
)
def test_semantics_on_the_virtual_clock(program, case):
    program("semantics", case, KVHOST_CLOCK="virtual")


def test_batch_call_has_the_signature_of_cuda_12_where_that_is_asked_for(program):
    program("semantics", "driver", "12", KVHOST_RUNTIME_VERSION="12080")


@pytest.mark.parametrize(
    "case",
    ["times", "full_queue", "actors", "independent", "stuck", "reset", "functions", "same_seed_same_history"],
)
def test_virtual_clock(program, case):
    program("virtual", case)


def test_history_of_a_seed_is_the_same_in_another_process(program):
    first = program("virtual", "digest", 7, 3)
    assert program("virtual", "digest", 7, 3) == first
    assert program("virtual", "digest", 8, 3) != first
    assert first == "6c8980b4cfaf33e5\n"  # on any machine; a change of the model changes it
