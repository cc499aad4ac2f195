"""The labelled corpus: recordings made on an H100 are graded, and programs are recorded anew on the host runtime."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

from blind_shapes import BLIND
from eighteenth_shapes import EIGHTEENTH
from eighth_shapes import EIGHTH
from eleventh_shapes import ELEVENTH
from fifteenth_shapes import FIFTEENTH
from fourteenth_shapes import FOURTEENTH
from fresh_shapes import FRESH
from grade import FORMATS, grade, unpack
from later_shapes import LATER
from nineteenth_shapes import NINETEENTH
from ninth_shapes import NINTH
from programs import PROGRAMS
from registry import LINES, plain
from served_shapes import SERVED
from seventeenth_shapes import SEVENTEENTH
from seventh_shapes import SEVENTH
from sixteenth_shapes import SIXTEENTH
from sixth_shapes import SIXTH
from tenth_shapes import TENTH
from thirteenth_shapes import THIRTEENTH
from twelfth_shapes import TWELFTH
from twentieth_shapes import TWENTIETH
from twentyfifth_shapes import TWENTYFIFTH
from twentyfirst_shapes import TWENTYFIRST
from twentyfourth_shapes import TWENTYFOURTH
from twentysecond_shapes import TWENTYSECOND
from twentysixth_shapes import TWENTYSIXTH
from twentythird_shapes import TWENTYTHIRD
from unseen_shapes import UNSEEN

from kvprobe.diagnosis import CAUSES, examine
from kvprobe.native import build
from kvprobe.recordings import open_recording
from kvprobe.recordings.descriptors import copies_by_stream

DATA = Path(__file__).resolve().parents[1] / "gpu" / "data" / "corpus"
KEPT = [
    (form, path.name.removesuffix(suffix))
    for form, suffix in FORMATS.items()
    for path in sorted((DATA / form).glob(f"*{suffix}"))
]
# Programs that `kvprobe run` records anew here, on the host runtime.
RECORDED = (
    "a_result_read_back_in_every_step",
    "stores_that_nobody_loads",
    "the_same_blocks_loaded_for_every_request",
    "small_pageable_copies",
    "scattered_blocks_copied_one_by_one",
    "seven_of_eight_loads_bring_what_is_there",
    "three_thousand_copies_that_all_fail",
)
# Programs of other authors: how many there are, and how many of them are healthy.
SERIES = {
    "served": (SERVED, 24, 8),
    "sixth": (SIXTH, 24, 8),
    "seventh": (SEVENTH, 26, 9),
    "eighth": (EIGHTH, 24, 9),
    "ninth": (NINTH, 22, 8),
    "tenth": (TENTH, 24, 9),
    "eleventh": (ELEVENTH, 24, 9),
    "twelfth": (TWELFTH, 24, 9),
    "thirteenth": (THIRTEENTH, 24, 9),
    "fourteenth": (FOURTEENTH, 24, 9),
    "fifteenth": (FIFTEENTH, 26, 10),
    "sixteenth": (SIXTEENTH, 20, 8),
    "seventeenth": (SEVENTEENTH, 20, 7),
    "eighteenth": (EIGHTEENTH, 22, 8),
    "nineteenth": (NINETEENTH, 20, 7),
    "twentieth": (TWENTIETH, 20, 7),
    "twentyfirst": (TWENTYFIRST, 22, 7),
    "twentysecond": (TWENTYSECOND, 22, 7),
    "twentythird": (TWENTYTHIRD, 20, 6),
    "twentyfourth": (TWENTYFOURTH, 22, 8),
    "twentyfifth": (TWENTYFIFTH, 22, 7),
    "twentysixth": (TWENTYSIXTH, 22, 7),
}
ON_THE_HOST = {
    name: programs for name, (programs, *_) in SERIES.items() if not all(one.needs_gpu for one in programs.values())
}
# Causes whose programs run on a GPU alone, or by what they do to a machine that others use; each has tests elsewhere.
RECORDED_ELSEWHERE = {"cpu_starved", "failed_calls", "unmerged_neighbours"}


@pytest.mark.parametrize("form, program", KEPT)
def test_every_cause_that_the_format_can_show_is_named_and_none_is_made_up(form, program, tmp_path):
    path = DATA / form / f"{program}{FORMATS[form]}"
    said = json.loads((DATA / form / f"{program}.truth.json").read_text())["lost_ns"]
    one = grade(program, form, said, examine(open_recording(unpack(path, tmp_path))))
    assert not one.missed
    assert not one.false


def test_launches_that_the_device_partly_kept_up_with_are_named(tmp_path):
    """2,500 launches of 37 us each made at 9 us: the queue is full after 1,320, not after a thousand."""
    folder = unpack(DATA.parent / "run_launches_drained_meanwhile.kvprobe.tar.gz", tmp_path)
    (finding,) = (one for one in examine(open_recording(folder)) if not one.abstains)
    assert finding.cause == "launch_queue_saturation"
    assert 35_000_000 < finding.lost_ns < 42_000_000


def test_the_corpus_has_causes_alone_in_pairs_and_healthy_look_alikes():
    alone = {program.causes[0] for program in PROGRAMS.values() if len(program.causes) == 1}
    healthy = [program for program in PROGRAMS.values() if program.healthy]
    assert len(PROGRAMS) >= 40 and len(healthy) >= 15
    assert sum(len(program.causes) > 1 for program in PROGRAMS.values()) >= 7
    assert {cause for program in PROGRAMS.values() for cause in (*program.causes, *program.like)} <= set(CAUSES)
    paired = {cause for program in PROGRAMS.values() for cause in program.causes if len(program.causes) > 1}
    alike = {cause for program in healthy for cause in program.like}
    assert alone - paired <= alike | {"link_bound", "failed_calls"}


def test_every_cause_of_the_corpus_is_recorded():
    recorded = {name for _, name in KEPT} | set(RECORDED)
    shown = {cause for name in recorded & PROGRAMS.keys() for cause in PROGRAMS[name].causes}
    unseen = {
        f"{cause} ({program.name})"
        for program in PROGRAMS.values()
        for cause in {*program.causes} - shown - RECORDED_ELSEWHERE
    }
    assert not unseen, f"nothing runs a program of {', '.join(sorted(unseen))}: put its name into RECORDED"


def test_later_programs_know_their_line_and_say_why():
    assert len(LATER) >= 33 and sum(program.healthy for program in LATER.values()) >= 9
    assert {line for program in LATER.values() for line in (program.line, *program.or_lines)} <= set(LINES)
    # of reads and writes below CPU memory, tests/diagnosis/test_slow_tier.py has programs; of the other, the unseen
    elsewhere = {"waiting_for_host.tier", "waiting_for_copies.inside_gpu"}
    assert {program.line for program in LATER.values()} == set(LINES) - elsewhere
    assert all(program.why.endswith(".") for program in LATER.values())
    assert not [program.name for program in LATER.values() if program.healthy and not program.like]
    named = {cause for program in LATER.values() for cause in (*program.causes, *program.also, *program.like)}
    assert named <= set(CAUSES)


def test_fresh_programs_say_their_truth_and_are_a_set_of_their_own():
    assert len(FRESH) >= 22 and sum(program.healthy for program in FRESH.values()) >= 7
    assert not FRESH.keys() & LATER.keys()
    assert {line for program in FRESH.values() for line in (program.line, *program.or_lines)} <= set(LINES)
    assert all(program.why.endswith(".") and program.like + program.also for program in FRESH.values())
    named = {cause for program in FRESH.values() for cause in (*program.causes, *program.also, *program.like)}
    assert named <= set(CAUSES)
    assert not [program.name for program in FRESH.values() if program.blind and program.expected(program.blind[0])]


def test_blind_programs_say_their_truth_and_are_a_set_of_their_own():
    assert 20 <= len(BLIND) <= 24 and sum(program.healthy for program in BLIND.values()) >= 8
    assert not BLIND.keys() & (LATER.keys() | FRESH.keys())
    assert {line for program in BLIND.values() for line in (program.line, *program.or_lines)} <= set(LINES)
    assert all(program.why.endswith(".") and program.like for program in BLIND.values())
    named = {cause for program in BLIND.values() for cause in (*program.causes, *program.also, *program.like)}
    assert named <= set(CAUSES)
    assert not [program.name for program in BLIND.values() if program.blind and program.expected(program.blind[0])]


def test_unseen_programs_say_their_truth_and_are_a_set_of_their_own():
    assert len(UNSEEN) == 24 and sum(program.healthy for program in UNSEEN.values()) >= 6
    assert not UNSEEN.keys() & (LATER.keys() | FRESH.keys() | BLIND.keys())
    assert {line for program in UNSEEN.values() for line in (program.line, *program.or_lines)} <= set(LINES)
    assert all(program.why.endswith(".") and program.like for program in UNSEEN.values())
    named = {cause for program in UNSEEN.values() for cause in (*program.causes, *program.also, *program.like)}
    assert named <= set(CAUSES)
    assert not [program.name for program in UNSEEN.values() if program.blind and program.expected(program.blind[0])]


@pytest.mark.parametrize("programs, many, healthy", SERIES.values(), ids=SERIES)
def test_programs_of_a_series_say_their_truth_and_are_a_set_of_their_own(programs, many, healthy):
    assert len(programs) == many and sum(program.healthy for program in programs.values()) == healthy
    assert {line for program in programs.values() for line in (program.line, *program.or_lines)} <= set(LINES)
    assert all(program.why.endswith(".") and program.like for program in programs.values())
    named = {cause for program in programs.values() for cause in (*program.causes, *program.also, *program.like)}
    assert named <= set(CAUSES)
    assert not [name for name, one in programs.items() if {*one.like} & {*one.causes, *one.also}]
    if programs not in (SERVED, SIXTH):  # since then a program says why its truth is plain
        assert not [name for name, one in programs.items() if "\n\n" not in (one.body.__doc__ or "")]


@pytest.mark.parametrize("programs", ON_THE_HOST.values(), ids=ON_THE_HOST)
def test_programs_run_to_their_end_with_the_bytes_that_they_were_to_move(programs):
    """For a twentieth of their time, on the host runtime; programs check their bytes themselves."""
    build.build()
    names = [name for name, one in programs.items() if not one.needs_gpu]
    body = (
        "import json, sys; import accounts\n"
        "accounts.going.__defaults__ = accounts.turns.__defaults__ = (100_000_000,)\n"
        "import programs; from device import Device; d = Device()\n"
        "for name in sys.argv[1:]: programs.prepare(name, d); print(json.dumps(programs.run(name, d)))"
    )
    command = [sys.executable, "-c", body, *names]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parent)
    assert done.returncode == 0, done.stderr
    said = [json.loads(line) for line in done.stdout.splitlines()]
    assert [one["program"] for one in said] == names
    for one in said:
        assert one["account"].get(one["line"], 0) > 0, one
        assert {*one["lost_ns"]} == {*programs[one["program"]].causes}, one


def test_a_served_program_whose_trouble_is_not_plain_is_refused():
    python, pageable = "waiting_for_host.python", "waiting_for_host.pageable"
    plain({"computing": 0.7, python: 0.26}, python)
    plain({"computing": 0.7, python: 0.2, pageable: 0.06}, python, (pageable,))
    plain({"computing": 0.3, "nothing_to_do": 0.6}, "nothing_to_do")
    for account, line in (
        ({"computing": 0.7, python: 0.24}, python),
        ({"computing": 0.8, python: 0.3}, python),  # hidden behind kernels
        ({"computing": 0.7, pageable: 0.3}, python),
        ({"computing": 0.79, python: 0.1}, "computing"),
    ):
        with pytest.raises(RuntimeError, match="not plain"):
            plain(account, line)
    plain({"computing": 0.96}, "computing", calm_share=0.95)
    with pytest.raises(RuntimeError, match="not plain"):
        plain({"computing": 0.94}, "computing", calm_share=0.95)


@pytest.mark.parametrize(
    "program", ["a_scheduler_in_python_between_steps", "a_server_that_sleeps_because_nobody_asked"]
)
def test_a_later_program_s_own_account_shows_its_line(program):
    build.build()
    source = Path(__file__).with_name("programs.py")
    done = subprocess.run([sys.executable, source, program], capture_output=True, text=True, check=True)
    said = json.loads(done.stdout.splitlines()[-1])
    shares = said["account"]
    assert said["line"] == PROGRAMS[program].line and said["healthy"] == PROGRAMS[program].healthy
    assert max((line for line in shares if line not in ("window_ns", "computing")), key=shares.get) == said["line"]


def recorded(program, tmp_path):
    """The program under `kvprobe run` on the host runtime: its recording, and what it says that it lost."""
    build.build()
    tmp_path.mkdir(exist_ok=True)
    folder, source = tmp_path / "run", Path(__file__).with_name("programs.py")
    options = ["--no-stacks", "--report", tmp_path / "report.html", "-o", folder]
    command = [sys.executable, "-m", "kvprobe", "run", *options, "--", sys.executable, source, program]
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    end = time.monotonic() + 120
    while not (folder / "end.json").exists() and time.monotonic() < end:
        time.sleep(0.05)
    line = next(line for line in done.stdout.splitlines() if line.startswith("{"))
    return open_recording(folder), json.loads(line)["lost_ns"]


@pytest.mark.parametrize("program", RECORDED)
def test_a_program_is_recorded_by_kvprobe_run_on_the_host_runtime(program, tmp_path):
    recording, lost = recorded(program, tmp_path)
    one = grade(program, "run", lost, examine(recording))
    assert set(PROGRAMS[program].causes) <= set(one.named)
    assert not set(PROGRAMS[program].like) & set(one.named)


def test_neighbours_are_told_from_scattered_blocks_by_their_addresses(tmp_path):
    """What they cost depends on the machine, and is tested in tests/diagnosis; where they lie does not."""
    for program, least, most in (
        # twenty bursts; a thread that loses its CPU cuts one in two, or, before its wait, makes one of two
        ("neighbours_copied_one_by_one", 10, 1_600),
        ("scattered_blocks_copied_one_by_one", 16_000, 20_000),
    ):
        recording, _ = recorded(program, tmp_path / program)
        loads = max(copies_by_stream(recording), key=lambda one: one.calls)
        assert 16_000 <= loads.descriptors < 16_100
        assert least <= loads.runs <= most
