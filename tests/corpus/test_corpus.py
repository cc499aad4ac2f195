"""The labelled corpus: recordings made on an H100 are graded, and programs are recorded anew on the host runtime."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

from grade import FORMATS, grade, unpack
from programs import PROGRAMS

from kvprobe.diagnosis import CAUSES, examine
from kvprobe.native import build
from kvprobe.recordings import open_recording

DATA = Path(__file__).resolve().parents[1] / "gpu" / "data" / "corpus"
KEPT = [(form, path.name.removesuffix(suffix)) for form, suffix in FORMATS.items()
        for path in sorted((DATA / form).glob(f"*{suffix}"))]  # fmt: skip
# A copy of the thread that registers was slow as well, and what waited for it is named by that.
KNOWN = {("nsys", "memory_registered_while_others_copy"): {"context_lock_stall"}}


@pytest.mark.parametrize("form, program", KEPT)
def test_every_cause_that_the_format_can_show_is_named_and_none_is_made_up(form, program, tmp_path):
    path = DATA / form / f"{program}{FORMATS[form]}"
    said = json.loads((DATA / form / f"{program}.truth.json").read_text())["lost_ns"]
    one = grade(program, form, said, examine(open_recording(unpack(path, tmp_path))))
    assert not one.missed
    assert one.false <= KNOWN.get((form, program), set())


def test_the_corpus_has_causes_alone_in_pairs_and_healthy_look_alikes():
    alone = {program.causes[0] for program in PROGRAMS.values() if len(program.causes) == 1}
    healthy = [program for program in PROGRAMS.values() if not program.causes]
    assert len(PROGRAMS) >= 40 and len(healthy) >= 15
    assert sum(len(program.causes) > 1 for program in PROGRAMS.values()) >= 7
    assert {cause for program in PROGRAMS.values() for cause in (*program.causes, *program.like)} <= set(CAUSES)
    paired = {cause for program in PROGRAMS.values() for cause in program.causes if len(program.causes) > 1}
    alike = {cause for program in healthy for cause in program.like}
    assert alone - paired <= alike | {"link_bound"}


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    "program",
    ["a_result_read_back_in_every_step", "stores_that_nobody_loads", "the_same_blocks_loaded_for_every_request",
     "small_pageable_copies"],
)  # fmt: skip
def test_a_program_is_recorded_by_kvprobe_run_on_the_host_runtime(program, tmp_path):
    build.build()
    folder, source = tmp_path / "run", Path(__file__).with_name("programs.py")
    report = tmp_path / "report.html"
    command = [sys.executable, "-m", "kvprobe", "run", "--no-stacks", "--report", report, "-o", folder,
               "--", sys.executable, source, program]  # fmt: skip
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    end = time.monotonic() + 60
    while not (folder / "end.json").exists() and time.monotonic() < end:
        time.sleep(0.05)
    line = next(line for line in done.stdout.splitlines() if line.startswith("{"))
    one = grade(program, "run", json.loads(line)["lost_ns"], examine(open_recording(folder)))
    assert set(PROGRAMS[program].causes) <= set(one.named)
