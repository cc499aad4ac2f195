"""`kvprobe verify`: the command is its own, the verdict names what was found, and "cannot tell" says why."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import jsonschema
import pytest

from kvprobe.native import build
from kvprobe.output import schema_of

from .watched import COPIES, KVPROBE, clean_environment

SOURCE = Path(__file__).parents[1] / "native" / "programs" / "verified.c"


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tests/native/programs/verified.c, over the host runtime."""
    build.build()
    out = tmp_path_factory.mktemp("verified") / "verified"
    runtime = [f"-I{build.NATIVE / 'src'}", f"-L{build.LIB}", "-lkvprobe_hostrt", f"-Wl,-rpath,{build.LIB}"]
    words = [*build.compiler(), "-std=gnu11", "-O2", "-pthread", "-o", str(out), str(SOURCE), *runtime]
    subprocess.run(words, check=True)
    return out


def verify(*words: object) -> subprocess.CompletedProcess[str]:
    command = [*KVPROBE, "verify", *map(str, words)]
    return subprocess.run(command, env=clean_environment(), capture_output=True, text=True, timeout=180, check=False)


def test_a_mismatch_names_block_times_and_calls_on_the_screen_in_the_report_and_the_folder(
    program: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    done = verify("-o", folder, "--budget", "100", "--", program, "changed", "14", "1")
    seeded = [int(word) for word in done.stdout.split()]
    assert done.returncode == 0 and len(seeded) == 2
    said = [line.removeprefix("kvprobe: ") for line in done.stderr.splitlines()]
    assert "Mismatch: 2 of 14 compared loads brought other bytes than were stored" in said
    for address in seeded:
        at = next(i for i, line in enumerate(said) if f"block at {address:#x}" in line)
        assert said[at + 1].strip().startswith("stored by cudaMemcpyAsync at ")
        assert said[at + 2].strip().startswith("loaded by cudaMemcpyAsync at ")
        assert "CPU memory changed between these times" in said[at + 3]
    page = (folder / "report.html").read_text()
    assert "Loaded bytes, compared with stored ones" in page and f"{seeded[0]:#x}" in page
    again = subprocess.run([*KVPROBE, "report", folder, "-o", tmp_path / "page.html"], capture_output=True, text=True)
    assert "Bytes: Mismatch: 2 of 14 compared loads brought other bytes than were stored" in again.stdout


def test_json_is_alone_on_stdout_and_the_exit_code_is_the_commands(program: Path, tmp_path: Path) -> None:
    script = f"{program} changed 14 1; exit 7"
    done = verify("-o", tmp_path / "run", "--budget", "100", "--json", "--", "sh", "-c", script)
    assert done.returncode == 7
    said = json.loads(done.stdout)
    jsonschema.Draft202012Validator(schema_of("verify")).validate(said)
    assert (said["exit_code"], said["verdict"], said["changed"], said["compared"]) == (7, "mismatch", 2, 14)
    seeded = [int(line) for line in done.stderr.splitlines() if line.isdigit()]
    assert [one["address"] for one in said["mismatches"]] == seeded
    for one in said["mismatches"]:
        assert one["store"]["time_ns"] < one["store"]["summed_ns"] < one["load"]["time_ns"] < one["found_ns"]


def test_where_nothing_was_compared_it_cannot_tell_and_says_why(program: Path, tmp_path: Path) -> None:
    loads = f"{COPIES}\ncopies(50)\n"
    done = verify("-o", tmp_path / "loads", "--", "python3", "-c", loads)
    assert "Cannot tell, because nothing was stored: all 50 copies were loads" in done.stderr
    done = verify("-o", tmp_path / "small", "--", program, "changed", "4", "1", "2048")
    assert "Cannot tell, because no load was compared: 12 copies held no whole page of 4 KiB" in done.stderr
    done = verify("-o", tmp_path / "none", "--", "sh", "-c", "exit 3")
    assert "Cannot tell, because no process made a copy while kvprobe watched" in done.stderr
    assert done.returncode == 3


def test_wrong_usage_is_one_line(tmp_path: Path) -> None:
    for words, text in (((), "no command was given"), (("--budget", "0", "--", "true"), "--budget")):
        done = verify(*words)
        assert done.returncode == 2 and text in done.stderr
