"""The model's steps of a recording, and which requests waited for each, from when to when: plain arrays."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvprobe.recordings.intervals import Cover, group_starts
from kvprobe.recordings.model import Array, Phase, Recording, RequestTime
from kvprobe.requests.usual import like_of

__all__ = ["ServedSteps", "served"]

_SPARSE = 4  # numbers up to so many times as many as there are of them are looked up in a table


@dataclass(frozen=True)
class ServedSteps:
    """Steps, ascending by their end, and their pairs of a step and a request in it, by request, then in time.

    Attributes:
        process, number, phase: of each step, as the server told them.
        from_ns: where the previous step ended that shares a request with it; where none does, its own start.
        to_ns: where it ended.
        requests, emitted: how many are in it, and tokens that it emitted.
        like, size: as `usual.like_of`.
        step, request: of each pair: its step, and the number of its request.
        tokens: that the step emitted for the request; `computed`: that it computed, -1 not known.
        since_ns: of each pair, the end of the request's step before; of its first, when it arrived.
        turn_ns, load_ns: of what lies between that and the step's work for it: all of it, and what of it is a load of
            the request's own blocks.
        name, of_process: of each request: its index in `Recording.names`, and its process.
        arrived_told: whether the server told when it arrived; else it counts from its first step.
    """

    process: Array
    number: Array
    phase: Array
    from_ns: Array
    to_ns: Array
    requests: Array
    emitted: Array
    like: Array
    size: Array
    step: Array
    request: Array
    tokens: Array
    computed: Array
    since_ns: Array
    turn_ns: Array
    load_ns: Array
    name: Array
    of_process: Array
    arrived_told: Array

    @property
    def took_ns(self) -> Array:
        """How long each step was waited for."""
        took: Array = self.to_ns - self.from_ns
        return took

    @property
    def first(self) -> Array:
        """The first pair of each request."""
        return group_starts(self.request)


def served(recording: Recording) -> ServedSteps:
    """All steps of the model that a recording tells; loads and stores of single requests are no steps."""
    table, of = recording.steps, recording.step_requests
    rows = np.flatnonzero((table["phase"] != Phase.LOAD) & (table["phase"] != Phase.STORE))
    rows = rows[np.argsort(table["end_ns"][rows], kind="stable")]
    start, end, process = (table[name][rows] for name in ("start_ns", "end_ns", "process"))
    pair, step, others = _joined(recording, rows)
    requests, request = _numbered(_key(of["process"][pair], of["request"][pair], recording))
    if len(step) and (step[1:] < step[:-1]).any():
        order = np.argsort(step, kind="stable")
        pair, step, request = pair[order], step[order], request[order]
    order = _stable(request)
    pair, step, request = pair[order], step[order], request[order]
    tokens, computed = of["tokens"][pair], of["computed"][pair]

    first = np.ones(len(pair), dtype=bool)
    first[1:] = request[1:] != request[:-1]
    since = np.zeros(len(pair), dtype=np.int64)
    since[1:] = end[step[:-1]]
    arrived, told = _arrived(recording, requests, start[step[first]])
    since[first] = np.minimum(arrived, end[step[first]])
    latest = np.full(len(rows), np.iinfo(np.int64).min)
    np.maximum.at(latest, step[~first], since[~first])
    begins = np.where(latest > np.iinfo(np.int64).min, latest, np.minimum(start, end))
    turn = np.maximum(begins[step] - since, 0)

    many = np.bincount(step, minlength=len(rows))
    known = np.ones(len(rows), dtype=bool)
    known[step[computed < 0]] = False
    amount = np.bincount(step, weights=np.maximum(computed, 0), minlength=len(rows))
    like, size = like_of(table["phase"][rows], many, np.where(known, amount, -1))
    return ServedSteps(
        process,
        table["step"][rows],
        table["phase"][rows],
        begins,
        end,
        many,
        np.bincount(step, weights=tokens, minlength=len(rows)).astype(np.int64),
        like,
        size,
        step,
        request,
        tokens,
        computed,
        since,
        turn,
        _own_loads(recording, requests, request, since, turn, others),
        (requests % max(len(recording.names), 1)).astype(np.int64),
        (requests // max(len(recording.names), 1)).astype(np.int64),
        told,
    )


def _key(process: Array, request: Array, recording: Recording) -> Array:
    """One number for a request of a process."""
    return np.asarray(process.astype(np.int64) * max(len(recording.names), 1) + request)


def _numbered(key: Array) -> tuple[Array, Array]:
    """As numpy's unique with its inverse, for keys from 0 on; where they lie close together nothing is sorted."""
    reach = int(key.max(initial=-1)) + 1
    if reach > _SPARSE * len(key):
        found, inverse = np.unique(key, return_inverse=True)
        return found, inverse
    there = np.zeros(reach, dtype=bool)
    there[key] = True
    return np.flatnonzero(there), (np.cumsum(there) - 1)[key]


def _stable(number: Array) -> Array:
    """A stable order by numbers from 0 on: 16 bits at a time, which numpy sorts by radix."""
    order = np.argsort((number & 0xFFFF).astype(np.uint16), kind="stable")
    for shift in range(16, int(number.max(initial=0)).bit_length(), 16):
        order = order[np.argsort(((number[order] >> shift) & 0xFFFF).astype(np.uint16), kind="stable")]
    return order


def _joined(recording: Recording, rows: Array, among: Array | None = None) -> tuple[Array, Array, Array]:
    """Rows of `step_requests`, or those `among` them, that are of steps in `rows`; of which each is; and the others."""
    table, of = recording.steps, recording.step_requests
    ids, processes = (of[name] if among is None else of[name][among] for name in ("id", "process"))
    most = int(max(table["id"].max(initial=0), ids.max(initial=0))) + 1
    own = table["process"][rows].astype(np.int64) * most + table["id"][rows]
    asked = processes.astype(np.int64) * most + ids
    reach = int(max(own.max(initial=-1), asked.max(initial=-1))) + 1
    if reach <= _SPARSE * len(asked):
        place = np.full(reach, -1, dtype=np.int64)
        place[own] = np.arange(len(own))
        step = place[asked]
    else:
        order = np.argsort(own, kind="stable")
        at = np.minimum(np.searchsorted(own[order], asked), max(len(own) - 1, 0))
        step = np.where(own[order][at] == asked, order[at], -1) if len(own) else np.full(len(asked), -1)
    known = step >= 0
    pair, others = np.flatnonzero(known), np.flatnonzero(~known)
    step = step[pair]
    return (pair, step, others) if among is None else (among[pair], step, among[others])


def _arrived(recording: Recording, requests: Array, began: Array) -> tuple[Array, Array]:
    """When each request arrived, and whether the server told it; else when its first step `began`."""
    times = recording.request_times
    mine = times["what"] == RequestTime.ARRIVED
    key, at = _key(times["process"][mine], times["request"][mine], recording), times["time_ns"][mine]
    order = np.argsort(key, kind="stable")
    key, at = key[order], at[order]
    out, told = began.astype(np.int64), np.zeros(len(requests), dtype=bool)
    if len(key):
        place = np.minimum(np.searchsorted(key, requests), len(key) - 1)
        told = key[place] == requests
        out[told] = at[place[told]]
    return out, told


def _own_loads(
    recording: Recording, requests: Array, request: Array, since: Array, turn: Array, others: Array
) -> Array:
    """How long in [since, since + turn) a load of the request's own blocks was under way, of each pair.

    `others`: rows of `step_requests` that are of no step of the model.
    """
    table, of = recording.steps, recording.step_requests
    rows = np.flatnonzero(table["phase"] == Phase.LOAD)
    out = np.zeros(len(since), dtype=np.int64)
    if not len(rows) or not len(requests):
        return out
    pair, load, _ = _joined(recording, rows, others)
    key = _key(of["process"][pair], of["request"][pair], recording)
    at = np.minimum(np.searchsorted(requests, key), len(requests) - 1)
    known = requests[at] == key
    begins, ends, who = table["start_ns"][rows][load[known]], table["end_ns"][rows][load[known]], at[known]
    # each request's lifetime gets a place of its own on one line: then one look-up serves all of them
    first = group_starts(request)
    last = np.append(first[1:], len(request)) - 1
    born, died = since[first], since[last] + turn[last]
    base = np.concatenate(([0], np.cumsum(died - born)[:-1])) - born
    cover = Cover(np.clip(begins, born[who], died[who]) + base[who], np.clip(ends, born[who], died[who]) + base[who])
    asked = np.flatnonzero(turn > 0)
    placed = since[asked] + base[request[asked]]
    out[asked] = cover.within(placed, placed + turn[asked])
    return out
