"""In which Python functions threads were while a GPU was idle: shared by causes.

A profile of functions tells it to the nanosecond. `kvprobe run` has taken a stack now and then instead, at an instant
that is known to half a millisecond: those that fall into the idle time tell it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from kvprobe.account import Line
from kvprobe.diagnosis.finding import Evidence, Where
from kvprobe.diagnosis.joined import JoinedRecording, ms
from kvprobe.recordings.assemble import among
from kvprobe.recordings.intervals import Cover, union
from kvprobe.recordings.model import Array
from kvprobe.recordings.python_functions import FunctionSeen, InFunction, longest_in, mostly_in, mostly_seen_in, seen_in

__all__ = ["BY_FUNCTIONS", "WITH_STACK", "in_functions", "outside_in_functions", "without_functions"]

BY_FUNCTIONS = "by the Python functions that the profile holds"
BY_STACKS = "by stacks that were taken now and then"
WITH_STACK = "record again with profile(..., with_stack=True), and the report names the Python functions"
LEAST_SHARE = 0.10  # of the time: a function with less is not named
LEAST_OF_STACKS = 0.25  # of the stacks
MOST_THREADS = 8
IDLE = "the idle time"


def without_functions(joined: JoinedRecording) -> bool:
    """Whether the PyTorch profiler made the recording and was not asked for functions."""
    source = joined.recording.source
    is_kineto = bool(source) and all(one.format == "kineto-json" for one in source)
    return is_kineto and not joined.recording.python_functions.rows


def in_functions(
    joined: JoinedRecording, places: Sequence[Where], caller: Array, start: Array, end: Array, what: str = IDLE
) -> tuple[tuple[Where, ...], list[Evidence]]:
    """The places of a finding with the function that each thread was in for most of its time, and what says so.

    Args:
        joined: the recording.
        places: of the finding.
        caller: whose each stretch of the lost time is, as `Joined.caller`, (stretches,).
        start: where each begins, ns; `end` where it ends.
        end: see there.
        what: of which time they are a part, in words.

    Returns:
        the places, and a figure for each function of the thread that was looked at longest.
    """
    recording = joined.recording
    if not (recording.python_functions.rows or recording.stack_samples.rows) or not len(caller):
        return tuple(places), []
    callers, place = np.unique(caller, return_inverse=True)
    long = np.bincount(place, weights=end - start)
    mostly: dict[tuple[int, int], str] = {}
    evidence: list[Evidence] = []
    looked_at = np.argsort(-long, kind="stable")[:MOST_THREADS].tolist()
    for number in looked_at:
        rows = np.flatnonzero(joined.caller == callers[number])
        if not len(rows):
            continue
        process, thread = int(joined.process[rows[0]]), int(joined.thread[rows[0]])
        times = Cover(start[place == number], end[place == number])
        if not recording.python_functions.rows:
            seen, looks = seen_in(recording, process, thread, times)
            mostly[joined.pid(process), thread] = mostly_seen_in(seen, looks)
            if number == looked_at[0]:
                evidence = [_seen(one, looks, thread, what) for one in seen if one.stacks >= LEAST_OF_STACKS * looks]
            continue
        found = longest_in(recording, process, thread, times)
        name, ns = mostly_in(recording, process, thread, times)
        mostly[joined.pid(process), thread] = name
        if number == looked_at[0]:
            evidence = [_said(one, thread, what) for one in found if one.ns >= LEAST_SHARE * times.total_ns]
            if ns and not any(one.name == name and 2 * one.ns > times.total_ns for one in found):
                text = f"for {ms(ns)} of {what}, thread {thread} was in {name}, or in functions that it called"
                evidence.insert(0, Evidence(text, ns, "ns", BY_FUNCTIONS))
    named = tuple(replace(one, function=mostly.get((one.pid, one.thread), "")) for one in places)
    return named, evidence


def _seen(one: FunctionSeen, looks: int, thread: int, what: str) -> Evidence:
    text = f"in {what}, {one.stacks} of {looks} stacks show thread {thread} in {one.name}"
    if one.inner:
        text += f", {one.inner_stacks} of them within {one.inner}"
    return Evidence(text, one.stacks, "1", BY_STACKS)


def _said(one: InFunction, thread: int, what: str) -> Evidence:
    whose = "function of the program" if one.own else "function"
    text = f"for {ms(one.ns)} of {what}, the innermost {whose} in thread {thread} was {one.name}"
    if one.inner:
        text += f", and for {ms(one.inner_ns)} of that, the thread was in {one.inner}"
    return Evidence(text, one.ns, "ns", BY_FUNCTIONS)


def outside_in_functions(
    joined: JoinedRecording, places: Sequence[Where], lines: Sequence[Line], start: Array, end: Array
) -> tuple[tuple[Where, ...], list[Evidence]]:
    """The same of the idle stretches of GPUs from `start` to `end` that the account has in these lines."""
    if not (joined.recording.python_functions.rows or joined.recording.stack_samples.rows):
        return tuple(places), []
    begins, ends = union(start, end)
    parts = []
    for gpu in joined.account.gpus:
        cut = gpu.stretches
        mine = cut.cut(begins, ends) & among(cut.line, lines) & (cut.caller >= 0)
        parts.append((cut.caller[mine], cut.start[mine], cut.end[mine]))
    if not parts:
        return tuple(places), []
    caller, start, end = (np.concatenate(column) for column in zip(*parts, strict=True))
    return in_functions(joined, places, caller, start, end)
