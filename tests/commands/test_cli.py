"""Errors of the command line: one line that says what was wrong, exit 2 for usage and 1 for failure, no traceback."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvprobe import cli
from kvprobe.commands import causes
from kvprobe.diagnosis import CAUSES


def kvprobe(*arguments, **environment):
    return subprocess.run(
        [sys.executable, "-m", "kvprobe", *map(str, arguments)],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        timeout=120,
    )


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["nosuch"], 2, "no command is called 'nosuch'; `kvprobe --help` lists them"),
        (["repot"], 2, "did you mean report?"),
        (["attach", "no-such-server"], 2, "no process has no-such-server in its command line"),
        (["attach", "0"], 2, "0 is neither a process id nor a part of a command line"),
        (["attach", ""], 2, "is neither a process id nor a part of a command line"),
        (["top", "\u00b2"], 2, "no recorded process has \u00b2 in its command line"),
        (["detach", "\u00b2"], 2, "no process has \u00b2 in its command line"),
        (["detach", "/nowhere"], 2, "/nowhere is neither a pid nor a run folder"),
        (["weights", "/nowhere/model"], 2, "/nowhere/model: no such folder or file"),
        (["causes", "saturation"], 2, "did you mean launch_queue_saturation?"),
        (["patches", "--json", "--versions"], 2, "choose one of --json, --check-newest and --versions"),
        (["patches", "--check-newest", "--json"], 2, "choose one of --json, --check-newest and --versions"),
        (["patches", "--check-newest", "--versions"], 2, "choose one of --json, --check-newest and --versions"),
        (["demo", "--device", "tpu"], 2, "Invalid value for '--device'"),
        (["demo", "--seconds", "-3"], 2, "Invalid value for '--seconds'"),
        (["demo", "--seconds", "nan"], 2, "nan is not a number"),
        (["bench", "--seconds", "nan"], 2, "nan is not a number"),
        (["top", "--once", "--interval", "nan"], 2, "nan is not a number"),
        (["metrics", "--interval", "nan"], 2, "nan is not a number"),
        (["top", "", "--once"], 2, "is empty: name a pid"),
        (["run", "--max-size", "9" * 400, "--", "true"], 2, "not a size"),
        (["triage", ".", "--from", "soon"], 2, "--from soon: not a time"),
        (["triage", ".", "--to", "9" * 400 + "s"], 2, "not a time"),
        (["export", ".", "--to", "perfetto", "-o", "x", "--limit", "9" * 30], 2, "Invalid value for '--limit'"),
        (["demo", "--report", "/proc/nowhere/x.html"], 2, "/proc/nowhere"),
        (["demo", "--report", "/proc/x.html", "--device", "host"], 2, "/proc"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_2(arguments, code, text):
    done = kvprobe(*arguments)
    assert done.returncode == code, done.stderr
    assert text in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert done.stdout == ""


@pytest.mark.parametrize("columns", [80, 120])
def test_every_cause_is_explained_within_the_terminal_and_an_item_of_a_list_has_its_own_line(
    columns, monkeypatch, capsys
):
    monkeypatch.setenv("COLUMNS", str(columns))
    for cause in CAUSES:
        assert cli.main(["causes", cause]) == 0
        said = capsys.readouterr().out
        assert max(map(len, said.splitlines())) <= columns
        assert not re.search(r"(?:[;:]|and|of|or) +- |(?m:^- )", said), said
        if cause == "synchronisation":
            items = re.findall(r"(?m)^  - .*(?:\n    .*)*", said)
            assert [item.split()[2:4] for item in items] == [["call", "names"], ["stream", "of"], ["call", "waits"]]
            assert "\nTwo kinds of waits do not count." in said


def test_a_gpu_that_is_not_there_is_one_line_and_exit_1(tmp_path):
    if Path("/dev/nvidiactl").exists():
        pytest.skip("this machine has a GPU")
    done = kvprobe("demo", "--device", "cuda", "--report", tmp_path / "x.html")
    assert (done.returncode, done.stderr) == (1, "kvprobe: no NVIDIA GPU on this machine; use --device host\n")
    assert list(tmp_path.iterdir()) == []


def test_debug_shows_the_traceback():
    if Path("/dev/nvidiactl").exists():
        pytest.skip("this machine has a GPU")
    assert "Traceback" in kvprobe("--debug", "demo", "--device", "cuda").stderr


def test_without_a_compiler_the_native_build_says_so_in_one_line(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "kvprobe.native.build"],
        capture_output=True,
        text=True,
        env={**os.environ, "CC": "/nonexistent/cc", "KVPROBE_NATIVE_LIB": str(tmp_path)},
    )
    assert done.returncode == 1
    assert done.stderr.startswith("kvprobe: no C compiler: /nonexistent/cc not found")
    assert len(done.stderr.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_demo_saturates_notices_switches_and_proves_it(tmp_path):
    """On a virtual clock, so that the figures are the same on every machine."""
    report = tmp_path / "demo.html"
    done = kvprobe("demo", "--device", "host", "--seconds", "2", "--json", "--report", report, KVHOST_CLOCK="virtual")
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert (seen["queue_depth"], seen["channels"]) == (1021, 4)
    shared, auto = seen["shared"], seen["auto"]
    assert shared["submit_p99_ns"] >= 50 * seen["baseline_submit_ns"]
    assert 0 < auto["load_p99_ns"] < shared["load_p99_ns"]
    assert auto["step_p99_ns"] < shared["step_p99_ns"]
    assert seen["switches"] == 1
    assert seen["blocked_calls_before_switch"] < 64
    assert seen["bytes_verified"] >= shared["bytes"] + auto["bytes"]
    assert seen["redundant_bytes_avoided"] > 0
    assert seen["report"] == str(report)
    html = report.read_text()
    assert "http://" not in html.replace("http://www.w3.org/", "")
    assert "switched to pooled" in html


def test_a_terminal_that_knows_ascii_alone_gets_words_and_no_question_marks(tmp_path):
    said = "5 \u00b5s, 3\u00d7 less \u2192 \u201cx\u201d \u2603"
    program = f"from kvprobe.cli import main; main(['--version']); print({said!r})"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines()[1] == '5 us, 3x less -> "x" ?'


DEVICE = """
import sys
sys.path.insert(0, sys.argv[1])
from kvprobe.commands import _device
from kvprobe.cuda import runtime
from kvprobe.errors import KvprobeError
runtime.gpu_present = lambda: sys.argv[2] == "there"
try:
    print(_device.runtime_of("auto").provider)
except KvprobeError:
    print("no runtime")
"""


@pytest.mark.parametrize(
    ("gpu", "torch", "found"),
    [
        ("there", "raise OSError('libtorch_cuda.so: cannot open shared object file')", ("cuda", "no runtime")),
        ("absent", "raise RuntimeError('imported, which takes seconds')", ("host",)),
    ],
)
def test_a_torch_that_cannot_be_loaded_is_none_and_without_a_gpu_none_is_loaded(tmp_path, gpu, torch, found):
    (tmp_path / "torch.py").write_text(torch)
    command = [sys.executable, "-c", DEVICE, str(tmp_path), gpu]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.strip() in found, done.stderr


def test_ctrl_c_that_was_handled_in_the_middle_of_an_import_leaves_the_exit_code(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("""
import contextlib
from kvprobe import cli
def main():
    with contextlib.suppress(KeyboardInterrupt):
        exec("import os, signal\\nos.kill(os.getpid(), signal.SIGINT)\\nwhile True: pass")
    return 3
cli.main = main
cli.entry()
""")
    command, path = [sys.executable, "-m", "program"], f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert (done.returncode, done.stderr) == (3, "")


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_stream_that_was_closed_before_the_start_is_no_error(tmp_path: Path, closed: str) -> None:
    command = f'"$0" -m kvprobe "$@" {closed}'
    done = subprocess.run(["sh", "-c", command, sys.executable, "causes"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    done = subprocess.run(["sh", "-c", command, sys.executable, "nosuch"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize("in_place", [[], ["--exec"]])
def test_a_watched_command_runs_and_finds_closed_what_was_closed(
    tmp_path: Path, closed: str, in_place: list[str]
) -> None:
    look = "import os, sys\nfor fd in range(3):\n"
    look += "    try: print(fd, os.fstat(fd).st_ino, file=open(sys.argv[1], 'a'))\n"
    look += "    except OSError: pass\nos._exit(7)"
    watched = [sys.executable, "-S", "-c", look]
    before, seen = tmp_path / "before", tmp_path / "seen"
    with (tmp_path / "out").open("w") as out, (tmp_path / "err").open("w") as err:
        for words in (
            [*watched, before],
            [sys.executable, "-m", "kvprobe", "run", *in_place, "-o", tmp_path / "run", "--", *watched, seen],
        ):
            shell = ["sh", "-c", f'"$0" "$@" {closed}', *map(str, words)]
            done = subprocess.run(shell, stdin=subprocess.DEVNULL, stdout=out, stderr=err)
            assert done.returncode == 7, (tmp_path / "err").read_text()
    assert (seen.read_text() if seen.exists() else "") == (before.read_text() if before.exists() else "")


def test_ctrl_c_that_python_made_another_error_of_is_an_interrupt(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """As it does, up to 3.11, while a class is made: an interrupt in the middle of the import of a command."""

    def interrupted(**options: object) -> None:
        raise RuntimeError("Error calling __set_name__ on 'Field' instance") from KeyboardInterrupt()

    monkeypatch.setattr(causes.command, "callback", interrupted)
    assert cli.main(["causes"]) == 130
    assert capsys.readouterr().err == "kvprobe: interrupted\n"


@pytest.mark.parametrize("arguments", [["causes"], ["patches", "--json"], ["--version"], ["run", "--help"]])
def test_a_reader_that_has_gone_is_no_failure_of_a_check(arguments: list[str]) -> None:
    """It ends as a program that SIGPIPE kills does for a shell, quietly; 1 would be a limit that is broken."""
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as gone:
        done = subprocess.run([sys.executable, "-m", "kvprobe", *arguments], stdout=gone, stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (141, b"")


def test_the_list_of_causes_is_wrapped_beside_the_names_and_whole_in_a_pipe(kvprobe, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    lines = kvprobe("causes")[1].splitlines()
    assert max(map(len, lines)) <= 80
    assert any(line.startswith(24 * " ") for line in lines)
    monkeypatch.delenv("COLUMNS")
    assert not any(line.startswith(" ") for line in kvprobe("causes")[1].splitlines())
