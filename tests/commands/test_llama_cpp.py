"""llama.cpp and Ollama, recorded by the interposer alone: whose copies are pageable, and which setting changes that."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from kvprobe.diagnosis import diagnose, llama_cpp
from kvprobe.recordings import open_recording
from kvprobe.reporting import build_page

from .watched import COPIES, run_watched

SIZE, LOADS = 4 << 20, 24
LOADING = f"""
{COPIES}
runtime, _, pinned, stream = open_runtime()
device = ctypes.c_void_p()
assert not runtime.cudaMalloc(ctypes.byref(device), ctypes.c_size_t({SIZE}))
weights = ctypes.create_string_buffer({SIZE})
for _ in range({LOADS}):
    assert not runtime.cudaMemcpyAsync(device, weights, ctypes.c_size_t({SIZE}), 1, stream)
for _ in range(64):
    assert not runtime.cudaMemcpyAsync(device, pinned, ctypes.c_size_t(4096), 1, stream)
    assert not runtime.cudaStreamSynchronize(stream)
"""


def recorded(folder: Path, name: str, *options: str):
    """A program of that name that loads pageable weights; it is Python under another name."""
    program = folder / name
    program.symlink_to(Path(sys.executable).resolve())
    done = run_watched(folder / "run", program, "-c", LOADING, *options, PYTHONPATH=os.pathsep.join(sys.path))
    assert done.returncode == 0, done.stderr
    return open_recording([folder / "run"])


@pytest.mark.parametrize(
    ("name", "options", "program", "settings"),
    [
        ("llama-server", ("-m", "model.gguf"), "llama.cpp", ["--no-mmap", "GGML_CUDA_NO_PINNED"]),
        ("llama-server", ("-m", "model.gguf", "--no-mmap"), "llama.cpp", ["GGML_CUDA_NO_PINNED"]),
        ("ollama", ("runner",), "Ollama", ["num_gpu"]),
    ],
)
def test_its_pageable_copies_are_counted_and_its_settings_named(
    tmp_path: Path, name: str, options: tuple[str, ...], program: str, settings: list[str]
) -> None:
    recording = recorded(tmp_path, name, *options)
    (found,) = llama_cpp.programs(recording)
    assert (found.name, found.no_mmap) == (program, "--no-mmap" in options)
    assert (found.copies, found.pageable, found.pageable_bytes) == (LOADS + 64, LOADS, LOADS * SIZE)
    assert 0 < found.pageable_ns < found.held_ns
    findings = diagnose(recording)
    (finding,) = [one for one in findings if one.cause == "pageable_memory"]
    named = [change for change in finding.cure if change.name in settings]
    assert [change.name for change in named] == settings
    if "--no-mmap" in settings:
        assert finding.cure[0].name == "--no-mmap" and finding.cure[0].predicted_saving_ns
    page = build_page(recording, findings=findings)
    assert "<h2>llama.cpp and Ollama</h2>" in page and f">{program}</td>" in page


def test_another_program_has_no_such_section_and_no_such_advice(tmp_path: Path) -> None:
    recording = recorded(tmp_path, "server")
    assert llama_cpp.programs(recording) == []
    findings = diagnose(recording)
    assert not {"--no-mmap", "num_gpu"} & {change.name for one in findings for change in one.cure}
    assert "llama.cpp" not in build_page(recording, findings=findings)
