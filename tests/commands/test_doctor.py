"""`kvprobe doctor`: what it finds in an environment that a test has made, and that it never imports torch unasked."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvprobe.commands import doctor


def _doctor(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    others = ("CUDA_", "KVHOST_", "KVPROBE", "NVTX_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(others)}
    return subprocess.run(
        [sys.executable, "-m", "kvprobe", "doctor", "--device", "host", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**kept, **environment},
    )


def _lines(*arguments: str, **environment: str) -> dict[str, dict[str, Any]]:
    done = _doctor("--json", *arguments, **environment)
    found = json.loads(done.stdout)
    assert done.returncode == (1 if found["bad"] else 0), done.stderr
    return {line["name"]: line for line in found["checks"]}


def test_the_queue_is_measured_in_this_environment() -> None:
    lines = _lines(CUDA_SCALE_LAUNCH_QUEUES="0.5x", CUDA_DEVICE_MAX_CONNECTIONS="2", CUDA_MODULE_LOADING="EAGER")
    assert lines["depth"]["value"].startswith("510 operations") or lines["depth"]["value"].startswith("509 operations")
    assert lines["depth"]["verdict"] == "bad"
    assert lines["channels"]["value"].startswith("2, shared by all streams")
    assert lines["CUDA_SCALE_LAUNCH_QUEUES"]["verdict"] == "bad"
    assert lines["CUDA_DEVICE_MAX_CONNECTIONS"]["verdict"] == "bad"
    assert lines["CUDA_MODULE_LOADING"]["verdict"] == "good"
    assert "GB/s" in lines["H2D"]["value"]


def test_values_that_the_driver_ignores_are_called_so() -> None:
    lines = _lines(CUDA_SCALE_LAUNCH_QUEUES="8x", CUDA_DEVICE_MAX_CONNECTIONS="64", LD_PRELOAD="/absent/lib.so")
    assert "counts as 1x" in lines["CUDA_SCALE_LAUNCH_QUEUES"]["todo"]
    assert "ignores it" in lines["CUDA_DEVICE_MAX_CONNECTIONS"]["todo"]
    assert lines["LD_PRELOAD"]["todo"] == "/absent/lib.so does not exist"
    assert lines["channels"]["value"].startswith("4, shared by all streams")


@pytest.mark.parametrize("value", ["\u00b2", "\u0663", "+8", "8 "])
def test_what_is_no_plain_number_of_connections_is_called_so(value: str) -> None:
    line = _lines(CUDA_DEVICE_MAX_CONNECTIONS=value)["CUDA_DEVICE_MAX_CONNECTIONS"]
    assert (line["verdict"], line["value"]) == ("bad", value)


def test_a_larger_queue_comes_with_the_jetson_warning() -> None:
    line = _lines(CUDA_SCALE_LAUNCH_QUEUES="4x")["CUDA_SCALE_LAUNCH_QUEUES"]
    assert "Jetson" in line["todo"]


def test_every_line_has_a_verdict_as_a_word_and_bad_ones_say_what_to_do() -> None:
    lines = _lines(CUDA_SCALE_LAUNCH_QUEUES="0.25x")
    assert {line["verdict"] for line in lines.values()} <= {"good", "bad", "note", "unknown"}
    assert all(line["todo"] for line in lines.values() if line["verdict"] == "bad")


@pytest.mark.parametrize("columns", ["60", "80", "160"])
def test_names_stay_whole_and_the_last_line_says_what_is_bad(columns: str) -> None:
    done = _doctor(COLUMNS=columns, CUDA_SCALE_LAUNCH_QUEUES="0.25x", KVPROBE_NVTX="off")
    assert done.returncode == 1
    for name in ("CUDA_DEVICE_MAX_COPY_CONNECTIONS", "CUDA_SCALE_LAUNCH_QUEUES", "KVPROBE_NVTX"):
        assert f"{name}: " in done.stdout
    assert "KVPROBE_METRICS" not in done.stdout, "a variable that nobody set says nothing"
    assert max(map(len, done.stdout.splitlines())) <= int(columns)
    last = done.stdout[done.stdout.rindex("Bad: ") :].split()
    assert "depth" in last and "CUDA_SCALE_LAUNCH_QUEUES" in last and last[-1] == "(environment)."


def test_every_variable_of_kvprobe_comes_with_its_value_and_source() -> None:
    from kvprobe.environment import VARIABLES

    lines = _lines(KVPROBE_FIX="auto", KVPROBE_DETAIL="everything", KVPROBE_FXI="auto")
    assert {variable.name for variable in VARIABLES} <= set(lines)
    assert (lines["KVPROBE_FIX"]["value"], lines["KVPROBE_FIX"]["verdict"]) == ("auto (environment)", "good")
    assert lines["KVPROBE_DETAIL"]["verdict"] == "bad" and "counts as not set" in lines["KVPROBE_DETAIL"]["todo"]
    assert lines["KVPROBE_FXI"]["verdict"] == "bad" and "typing error" in lines["KVPROBE_FXI"]["todo"]
    assert lines["KVPROBE_NVTX"]["value"].endswith("(default)")


def test_an_nsys_without_libdw_is_told_from_one_that_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("nsys", "QdstrmImporter", "ldd"):
        program = tmp_path / name
        text = '#!/bin/sh\necho "	libdw.so.1 => not found"\n' if name == "ldd" else "#!/bin/sh\n"
        program.write_text(text)
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    line = next(line for line in doctor._tools() if line.name == "nsys")
    assert (line.verdict, line.value) == (
        "bad",
        f"{tmp_path}/nsys: it can record, but its QdstrmImporter lacks libdw.so.1",
    )
    assert "libdw1" in line.todo
    (tmp_path / "ldd").write_text("#!/bin/sh\n")
    assert next(line for line in doctor._tools() if line.name == "nsys").verdict == "good"


def test_servers_and_torch_are_found_by_their_metadata_alone(tmp_path: Path) -> None:
    for name, version in (("vllm", "0.32.0"), ("torch", "9.9.0")):
        folder = tmp_path / f"{name}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise SystemExit('imported')")
        (tmp_path / name / "version.py").write_text("__version__ = '9.9.0'\ncuda: Optional[str] = '13.0'\n")
    lines = _lines(PYTHONPATH=str(tmp_path))
    assert lines["vllm"]["value"] == "0.32.0"
    assert lines["torch"]["value"] == "9.9.0, built for CUDA 13.0"


def test_without_a_gpu_cuda_is_a_line_and_no_error() -> None:
    from kvprobe.cuda.runtime import gpu_present

    if gpu_present():
        pytest.skip("there is a GPU")
    kept = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    done = subprocess.run(
        [sys.executable, "-m", "kvprobe", "doctor", "--json", "--device", "cuda"],
        capture_output=True,
        text=True,
        check=False,
        env=kept,
    )
    assert done.returncode == 1, done.stderr
    lines = {line["name"]: line for line in json.loads(done.stdout)["checks"]}
    assert lines["CUDA runtime"]["verdict"] == "bad"
    assert "depth" not in lines


def test_a_torch_that_cannot_be_imported_is_a_line_among_the_others(tmp_path: Path) -> None:
    folder = tmp_path / "torch-9.9.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 9.9.0\n")
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise OSError('libcudart.so.12: cannot open shared object file')")
    (tmp_path / "torch" / "version.py").write_bytes(b"# \xff\ncuda = '12.8'\n")
    lines = _lines("--device", "cuda", PYTHONPATH=f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    assert lines["torch"]["value"] == "9.9.0, built for CUDA 12.8"
    assert lines["torch.cuda"]["verdict"] == "bad"
    assert "libcudart.so.12" in lines["torch.cuda"]["value"]
    assert lines["native libraries"]["verdict"] == "good"


def test_a_process_that_cannot_be_started_is_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(doctor.subprocess, "Popen", refused)
    lines = list(doctor.examine("host"))
    assert any(line.topic == "tools" and "temporarily unavailable" in line.value for line in lines)
    assert lines[-1].topic == "servers"


def test_no_value_of_the_environment_steers_the_terminal() -> None:
    done = _doctor(KVPROBE_METRICS="/x\x1b[31m[bold]\n  good     forged: line", KVPROBE_NO_SUCH_VARIABLE="1")
    assert "\x1b" not in done.stdout
    assert "\n  good     forged" not in done.stdout
    assert "[bold]" in done.stdout
