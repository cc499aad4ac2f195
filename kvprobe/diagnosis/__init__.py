"""Names what is wrong in a recording: each cause with its evidence, its cost and its cure; one file a cause."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, overload

from kvprobe.diagnosis.finding import (
    Change,
    Evidence,
    EvidenceChart,
    Finding,
    NotLookedFor,
    Series,
    TracedCall,
    Where,
    executions_not_shown,
    ranked,
)
from kvprobe.launchqueue.constants import COSTLY_BATCH, SATURATION, SMALL_COPIES

if TYPE_CHECKING:
    from kvprobe.account import Account
    from kvprobe.diagnosis.cause import Cause
    from kvprobe.diagnosis.joined import JoinedRecording
    from kvprobe.recordings.model import Recording
    from kvprobe.recordings.occupancy import Occupancy
    from kvprobe.recordings.serving import ServingWindow

__all__ = [
    "CAUSES",
    "CPU_STARVED",
    "FULL_QUEUE",
    "PROFILER",
    "UNEXPLAINED",
    "WAITS_LEFT",
    "Change",
    "Evidence",
    "EvidenceChart",
    "Examination",
    "Finding",
    "NotLookedFor",
    "Series",
    "TracedCall",
    "Where",
    "diagnose",
    "examine",
    "examine_joined",
    "notes_of",
    "ranked",
]

PROFILER, SERVER_CALL, UNEXPLAINED = "profiler_overhead", "blocking_server_call", "unexplained"
CPU_STARVED = "cpu_starved"
WAITS_LEFT: tuple[str, ...] = ("waiting_for_copies", "waiting_for_host")  # what no other cause explains of a wait
_QUEUES = ("aliased_stream", "channels_exhausted", "fence_before_copies", SATURATION)
_OTHER_THREADS = "context_lock_stall"

# Every cause by the name of its file; its line here is all that registers it. The order is the ledger's: the
# best-evidenced cause claims first, and what one has claimed no other gets.
CAUSES: tuple[str, ...] = (
    # threads, inside calls
    PROFILER,
    "pageable_memory",
    "confidential_computing",
    SERVER_CALL,
    "synchronisation",
    *_QUEUES,
    "pinning_stall",
    "slow_tier",
    CPU_STARVED,
    _OTHER_THREADS,
    COSTLY_BATCH,
    "first_calls",
    "allocation_on_hot_path",
    "unmerged_neighbours",
    UNEXPLAINED,
    # copy engines and the device
    "redundant_loads",
    "wasted_stores",
    "link_degraded",
    SMALL_COPIES,
    "weights_not_overlapped",
    "link_bound",
    "head_of_line_copies",
    "python_or_gil_bound",
    "gpu_starved",
    "remote_numa_memory",
    "unexplained_traffic",
    # what is left of the account
    *WAITS_LEFT,
    # results at stake
    "failed_calls",
    "store_not_ordered",
    "load_not_ordered",
)


# Causes whose root is a full launch queue; the last one is what it does to other threads.
FULL_QUEUE: tuple[str, ...] = (*_QUEUES, _OTHER_THREADS)


@dataclass(frozen=True)
class Examination(Sequence[Finding]):
    """What a diagnosis found: a sequence of its findings, with what they were found in.

    Attributes:
        findings: as `ranked` orders them.
        not_looked_for: the causes that this recording cannot show, with the reason.
        account: where every instant of the window went, as far as causes have explained it.
        serving: the window.
    """

    findings: list[Finding]
    not_looked_for: list[NotLookedFor]
    account: Account
    serving: ServingWindow

    @overload
    def __getitem__(self, at: int) -> Finding: ...

    @overload
    def __getitem__(self, at: slice) -> list[Finding]: ...

    def __getitem__(self, at: int | slice) -> Finding | list[Finding]:
        return self.findings[at]

    def __len__(self) -> int:
        return len(self.findings)


def _not_shown(cause: Cause, joined: JoinedRecording) -> NotLookedFor | None:
    """Why this recording cannot show a cause, None where it can."""
    lacks = executions_not_shown(joined.recording) if cause.OF_EXECUTIONS else None
    return lacks or cause.not_shown(joined)


def examine(recording: Recording, occupancy: Occupancy | None = None) -> Examination:
    """All findings of a recording, and the causes that it cannot show with the reason.

    `occupancy` is what `recordings.occupancy.occupancy(recording)` returned, where the caller has it already.
    """
    from kvprobe.diagnosis.joined import JoinedRecording

    return examine_joined(JoinedRecording(recording, occupancy))


def examine_joined(joined: JoinedRecording, causes: Sequence[str] = CAUSES, *, accounted: bool = True) -> Examination:
    """As `examine`, of a recording whose calls and executions are joined already.

    Args:
        joined: the recording.
        causes: those to look for, in the ledger's order.
        accounted: whether the account is asked for; else it is empty where no finding needed it.
    """
    from kvprobe.account import Account
    from kvprobe.diagnosis.cause import load_cause

    if not len(joined.start) and not len(joined.x_start):
        causes = [cause for cause in causes if cause == SERVER_CALL and joined.recording.server_calls.rows]
    found: list[Finding] = []
    blind: list[NotLookedFor] = []
    files = {cause: load_cause(cause) for cause in causes}
    for cause, file in files.items():
        lacks = _not_shown(file, joined)
        if lacks is not None:
            blind.append(replace(lacks, cause=cause))
            continue
        if cause == UNEXPLAINED:
            asked = (one.open_question(joined) for one in files.values())
            found += [finding for finding in asked if finding is not None]
        finding = file.find(joined)
        if finding is not None:
            found.append(finding)
    account = joined.account if accounted or "account" in vars(joined) else Account([], [])
    return Examination(ranked(found), blind, account, joined.serving)


def diagnose(recording: Recording) -> Examination:
    """What is wrong in a recording: a sequence of findings, the worst first, with the account they were found in."""
    return examine(recording)


def examined(recording: Recording, window: ServingWindow) -> tuple[Examination, Occupancy]:
    """What is wrong in a recording within a window, and how full its queues were; both are kept with the recording.

    The window becomes the recording's, and what cannot be shown becomes a note of it.
    """
    from concurrent.futures import ThreadPoolExecutor

    from kvprobe.diagnosis.joined import JoinedRecording
    from kvprobe.diagnosis.queue_full import full
    from kvprobe.recordings.occupancy import occupancy

    def blocked() -> None:
        joined.occupancy = queues.result()
        full(joined)

    recording.window = window
    with ThreadPoolExecutor(1) as beside:  # the queues on a second core: numpy works without Python's lock
        queues = beside.submit(occupancy, recording)
        joined = JoinedRecording(recording)
        split = beside.submit(blocked)
        joined.account  # noqa: B018 -- made here; it needs nothing of the queues
        split.result()
    found = examine_joined(joined)
    recording.known_links = None  # as large as a third of the calls, and hardly ever asked for afterwards
    recording.notes += notes_of(found.not_looked_for)
    return found, joined.occupancy


def notes_of(not_looked_for: Sequence[NotLookedFor]) -> list[str]:
    """One line for each reason, with the causes that it keeps from being looked for."""
    causes: dict[tuple[str, str], list[str]] = {}
    for one in not_looked_for:
        causes.setdefault((one.because, one.shown_by), []).append(one.cause)
    return [
        f"not looked for: {', '.join(names)}, because {because}; shown by {shown_by}"
        for (because, shown_by), names in causes.items()
    ]
