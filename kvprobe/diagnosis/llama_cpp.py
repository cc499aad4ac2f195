"""llama.cpp and Ollama, which have no Python to watch: which copies are theirs, and what makes them pageable.

They are told by the program's name, because all that is seen of them are their CUDA calls. llama.cpp maps its model
file, and weights that stay on the CPU lie in that mapping, pageable, unless it is started with --no-mmap (llama.cpp
pull request 6206); its staging buffers are pinned unless GGML_CUDA_NO_PINNED is in the environment (pull request 1233).
Ollama's runner keeps such weights in pageable memory (ollama issue 16221).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath

import numpy as np

from kvprobe.diagnosis.finding import Change
from kvprobe.recordings.model import CallKind, Direction, Memory, Recording

__all__ = ["Program", "changes", "programs"]

LLAMA_CPP, OLLAMA = "llama.cpp", "Ollama"
COPYING = (CallKind.COPY, CallKind.BATCH, CallKind.COPY_SYNC)


@dataclass(frozen=True)
class Program:
    """One process of llama.cpp or Ollama, and its copies from the CPU to the GPU.

    Attributes:
        process: its row in the recording's processes.
        name: LLAMA_CPP or OLLAMA.
        copies: how many, `size_bytes` and `held_ns` (host time inside them) likewise.
        pageable: of them from pageable memory, `pageable_bytes` and `pageable_ns` likewise.
        no_mmap: its command line has --no-mmap.
    """

    process: int
    name: str
    copies: int
    size_bytes: int
    held_ns: int
    pageable: int
    pageable_bytes: int
    pageable_ns: int
    no_mmap: bool


def programs(recording: Recording) -> list[Program]:
    """Every such process, in the order of the recording; by exact totals where they were counted."""
    found = []
    for row in range(recording.processes.rows):
        command = recording.text(int(recording.processes["command"][row])).split()
        name = _name(command[0] if command else "")
        if name:
            copies, pageable = _loads(recording, row)
            found.append(Program(row, name, *copies, *pageable, no_mmap="--no-mmap" in command))
    return found


def _name(program: str) -> str:
    last = PurePath(program).name
    return LLAMA_CPP if last.startswith("llama-") else OLLAMA if last in ("ollama", "ollama-runner") else ""


def _loads(recording: Recording, process: int) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Number, bytes and host time of a process's copies to the GPU: all, and those from pageable memory."""
    counted = bool((recording.totals["process"] == process).any())
    table = recording.totals if counted else recording.calls
    mine = np.isin(table["kind"], np.array(COPYING, dtype=np.uint8))
    mine &= (table["process"] == process) & (table["direction"] == Direction.H2D)
    out = []
    for rows in (np.flatnonzero(mine), np.flatnonzero(mine & (table["memory"] == Memory.PAGEABLE))):
        spent = table["dur_ns"][rows] if counted else table["end_ns"][rows] - table["start_ns"][rows]
        number = int(table["calls"][rows].sum()) if counted else len(rows)
        out.append((number, int(table["bytes"][rows].sum()), int(spent.sum())))
    return out[0], out[1]


def changes(found: Sequence[Program], share: float | None) -> list[Change]:
    """What makes these programs' copies pinned without a change of their code.

    Args:
        found: those whose pageable copies held a thread.
        share: share of that finding's lost time that pinning these programs' memory saves.
    """
    out = []
    if any(one.name == LLAMA_CPP and not one.no_mmap for one in found):
        text = (
            "Start llama.cpp with `--no-mmap`: weights that stay on the CPU then lie in pinned memory, no longer in "
            "the mapped model file (llama.cpp pull request 6206); all of them have to fit into RAM"
        )
        out.append(Change(text, "setting", "--no-mmap", share=share))
    if any(one.name == LLAMA_CPP for one in found):
        text = (
            "Take GGML_CUDA_NO_PINNED out of llama.cpp's environment, if it is there: it makes staging buffers pageable"
        )
        out.append(Change(text, "setting", "GGML_CUDA_NO_PINNED"))
    if any(one.name == OLLAMA for one in found):
        text = (
            "Give Ollama more layers on the GPU (num_gpu), as many as fit: its runner keeps the others in pageable "
            "memory (ollama issue 16221); llama-server with `--no-mmap` pins them"
        )
        out.append(Change(text, "setting", "num_gpu"))
    return out
