"""One recording reduced to a summary, with the account of each of its GPUs."""

from __future__ import annotations

from kvprobe.account import COPIES, HOST, GpuAccount, Line
from kvprobe.account.stretches import NOBODY
from kvprobe.diagnosis import Examination, examine
from kvprobe.diagnosis.verdict import of_recording
from kvprobe.recordings.model import Recording
from kvprobe.recordings.occupancy import occupancy
from kvprobe.recordings.reduce import rank_names
from kvprobe.recordings.reduce import summarize as summarize_sums
from kvprobe.recordings.summary import TOP, GpuTime, Summary

__all__ = ["summarize"]


def summarize(recording: Recording, name: str = "", keep: int = TOP) -> Summary:
    """As `recordings.reduce.summarize`, and where the time of each GPU went, as `report` says it."""
    queues = occupancy(recording)
    out = summarize_sums(recording, name, keep, queues)
    ranks = rank_names(recording, name)
    found = examine(recording, queues)
    state = of_recording(recording, found).state
    for gpu in found.account.gpus:
        rank = ranks[gpu.processes[0]] if gpu.processes and gpu.processes[0] < len(ranks) else "unknown"
        key = (rank, gpu.device)
        mine = state if state != "found" or _is_of(found, gpu) else "healthy"
        out.gpus[key] = out.gpus.get(key, GpuTime()).merge(GpuTime(_lines(gpu), mine))
    return out


def _is_of(found: Examination, gpu: GpuAccount) -> bool:
    """Whether what was found is this GPU's: it is the only one, or a finding explains some of its time."""
    if len(found.account.gpus) == 1 or not gpu.seen:
        return True
    explain = {found.account.causes[number] for number in set(gpu.stretches.cause.tolist()) if number != NOBODY}
    return any(one.cause in explain for one in found if not one.abstains and one.severity != "info")


def _lines(gpu: GpuAccount) -> dict[str, int]:
    lines = {"computing": gpu.ns(Line.COMPUTING), "nothing_to_do": gpu.ns(Line.NOTHING_TO_DO)}
    lines |= {f"waiting_for_copies.{line.key}": gpu.ns(line) for line in COPIES}
    lines |= {f"waiting_for_host.{line.key}": gpu.ns(line) for line in HOST}
    lines |= {f"not_known.{reason.key}": ns for reason, ns in gpu.unknown_ns().items()}
    return {line: ns for line, ns in sorted(lines.items()) if ns}
