"""vLLM: the steps of its engine and the requests in each, at the times that vLLM itself has. Measured only.

The engine's scheduler knows all of it. What came of a step is read where its outputs were just made: on kvprobe's own
thread, which makes the lines, another core would have to fetch each of them, and that takes longer than to read them
here. Where every request got one token as in the step before, as mostly, no more is told than when. A step ends at the
time that vLLM stamps its outputs with, of which it makes its own times to first tokens and between tokens.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping
from itertools import repeat
from types import ModuleType
from typing import Any

from kvprobe.instrument import event_log, step_log
from kvprobe.instrument.adapter import Adapter, Target
from kvprobe.instrument.hooks import Call, Patcher

_SCHEDULER = "vllm.v1.core.sched.scheduler"
_UNDER_WAY = 64  # steps that are scheduled and not answered; a pipeline has as many as stages
_MOST_STARTED = 100_000  # requests
_LONGEST_AGO_NS = 3600 * 10**9  # of an arrival: the clock of another host may be anything


class Steps(Adapter):
    """Every step of the scheduler: its number, its requests and their tokens, its phase."""

    name = "vllm.steps"
    summary = "Tells the engine's steps: number, requests, tokens computed and emitted, phase, at vLLM's own times."
    targets = (
        Target(_SCHEDULER, "Scheduler.schedule", ()),
        Target(_SCHEDULER, "Scheduler.update_from_output", ("scheduler_output", "model_runner_output")),
        Target(_SCHEDULER, "Scheduler.add_request", ("request",)),
        Target(_SCHEDULER, "Scheduler.finish_requests", ("request_ids", "finished_status")),
    )

    def __init__(self) -> None:
        super().__init__()
        self._number = 0
        self._began: dict[int, tuple[int, int]] = {}  # scheduler output -> the step's number, when it was begun
        # Tokens that the step before computed for each request, where each got one and none ended; and what is told of
        # the steps since that did the same.
        self._before: dict[str, int] | None = None
        self._alike: step_log.AlikeSteps | None = None
        self._started: set[str] = set()  # requests that have a token; of kvprobe's own thread alone

    def patch(self, patcher: Patcher, module: ModuleType) -> None:
        """Wrap the scheduler."""
        patcher.watch(module.Scheduler, "schedule", self.scheduled)
        patcher.watch(module.Scheduler, "update_from_output", self.stepped)
        patcher.wrap(module.Scheduler, "add_request", self.added)
        patcher.wrap(module.Scheduler, "finish_requests", self.finished)

    def added(self, call: Call, scheduler: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        """Around `add_request`: it arrived at the time that vLLM counts from."""
        result = call()
        if step_log.wanted():
            now_ns = time.monotonic_ns()
            ago_ns = time.time_ns() - int(request.arrival_time * 1e9)  # vLLM has it of the wall clock
            at_ns = now_ns - ago_ns if 0 <= ago_ns < _LONGEST_AGO_NS else now_ns
            step_log.mark_request(request.request_id, "arrived", at_ns, _trace(request))
        return result

    def scheduled(self, began_ns: int, output: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Behind `schedule`: a step has begun, if there is anything to compute."""
        if output.total_num_scheduled_tokens and step_log.wanted_at(began_ns):
            if len(self._began) >= _UNDER_WAY:
                self._began.clear()
            self._began[id(output)] = self._number, began_ns
            self._number += 1

    def stepped(self, _: int, outputs: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Behind `update_from_output`: a step has ended; several may be under way at a time."""
        step = args[1] if len(args) > 1 else kwargs["scheduler_output"]
        began = self._began.pop(id(step), None)
        if began is None:
            return
        computed, end_ns, stamps_s, made = step.num_scheduled_tokens, time.monotonic_ns(), [], []
        for of_client in outputs.values() if outputs else ():
            stamps_s.append(of_client.timestamp)
            made += of_client.outputs
        tokens = [len(one.new_token_ids) for one in made]
        ended = [one.request_id for one in made if one.finish_reason is not None]
        resumed = _resumed(step.scheduled_cached_reqs) or ()
        one_each = len(computed) == len(tokens) == tokens.count(1) and not ended and not resumed
        if one_each and computed == self._before:  # all have tokens: they decode
            if self._alike is None:
                self._alike = step_log.AlikeSteps("decode", computed, 1, tuple(computed.values()), "vllm")
            number, begin_ns = began
            self._alike.add(begin_ns, _ended_ns(begin_ns, end_ns, stamps_s), number)
            return
        self._before, self._alike = computed if one_each else None, None
        names = [one.request_id for one in made]
        times = *began, end_ns, stamps_s
        told = threading.get_native_id(), computed, resumed  # vLLM makes these anew for each step
        event_log.later(self._tell, times, told, names, tokens, ended)

    def finished(self, call: Call, scheduler: Any, request_ids: Any, *args: Any, **kwargs: Any) -> Any:
        """Around `finish_requests`: they are given up."""
        given = (request_ids,) if isinstance(request_ids, str) else request_ids
        result = call()
        self._before = self._alike = None  # a request of that name may come again
        if isinstance(given, list | tuple | set | frozenset) and step_log.wanted():
            event_log.later(self._give_up, tuple(given), time.monotonic_ns())
        return result

    # ---- on kvprobe's own thread --------------------------------------------------------------------------------

    def _give_up(self, requests: Iterable[str], at_ns: int) -> None:
        for one in requests:
            self._started.discard(one)
            step_log.write_time(one, "ended", at_ns)

    def _tell(
        self,
        times: tuple[int, int, int, list[float]],
        told: tuple[int, dict[str, int], Iterable[str]],
        emitted: list[str],
        tokens: list[int],
        ended: list[str],
    ) -> None:
        number, begin_ns, end_ns, stamps_s = times
        end_ns = _ended_ns(begin_ns, end_ns, stamps_s)
        thread, computed, resumed = told
        names, started = tuple(computed), self._started
        started.difference_update(resumed)
        prefills = 0 if started.issuperset(names) else len(computed.keys() - started)
        phase = "decode" if not prefills else "prefill" if prefills == len(names) else "mixed"
        if len(started) > _MOST_STARTED:
            started.clear()
        if prefills:
            started.update([one for one, new in zip(emitted, tokens, strict=True) if new])
        if tuple(emitted) != names:  # some got none
            tokens = [*map(dict(zip(emitted, tokens, strict=True)).get, names, repeat(0))]
        of = "vllm", thread
        step_log.write_step((begin_ns, end_ns), number, phase, names, tokens, tuple(computed.values()), of)
        self._give_up(ended, end_ns)


def _ended_ns(begin_ns: int, end_ns: int, stamps_s: list[float]) -> int:
    """When a step ended by vLLM's own stamps, where they can be."""
    for stamp_s in stamps_s:
        stamp_ns = int(stamp_s * 1e9)
        if begin_ns <= stamp_ns <= end_ns:
            end_ns = stamp_ns
    return end_ns


def _trace(request: Any) -> str:
    """The traceparent that came with a request, below which vLLM's own span of it will stand; "" where none did."""
    headers = getattr(request, "trace_headers", None)
    return str(headers.get("traceparent", "")) if isinstance(headers, Mapping) else ""


def _resumed(cached: Any) -> Iterable[str]:
    """Requests that were put off and are computed anew."""
    known = getattr(cached, "resumed_req_ids", None)
    if known is not None:
        return known  # type: ignore[no-any-return]
    flags = getattr(cached, "resumed_from_preemption", ())  # before 0.12
    return [one for one, resumed in zip(cached.req_ids, flags, strict=False) if resumed]
