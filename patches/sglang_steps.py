"""SGLang: the steps of its scheduler and the requests in each, at the times that SGLang itself has. Measured only.

A step is told where its result is looked at, which under overlap is while the next one runs: it begins when SGLang says
that it launched it (`launch_ts`) and ends when SGLang stamps the last of its requests. Of several ranks that run the
same batch the one tells it that writes SGLang's log.
"""

from __future__ import annotations

import sys
import threading
import time
from operator import sub
from types import ModuleType
from typing import Any

from kvprobe.instrument import event_log, step_log
from kvprobe.instrument.adapter import Adapter, Target
from kvprobe.instrument.hooks import Call, Patcher

_SCHEDULER = "sglang.srt.managers.scheduler"
_PHASES = {"DECODE": "decode", "TARGET_VERIFY": "decode", "MIXED": "mixed", "EXTEND": "prefill"}
_PHASES["SPLIT_PREFILL"] = "prefill"
_PREBUILT = "PREBUILT"  # nothing is computed: requests come with their prefill's token from another server
_MOST_HELD = 100_000  # requests
_OVER = -1  # instead of the tokens of a request that has ended
# When SGLang first saw a request, in s of `time.perf_counter`, the clock of the ring files on Linux.
_ARRIVED = ("created_time", "scheduler_recv_time", "wait_queue_entry_time")


class Steps(Adapter):
    """Every batch that the scheduler has looked at: its number, its requests and their tokens, its phase."""

    name, versions = "sglang.steps", ">=0.5.20,<0.6"
    summary = "Tells the scheduler's steps: number, requests, tokens computed and emitted, phase; SGLang's own times."
    targets = (
        Target(_SCHEDULER, "Scheduler.process_batch_result", ("batch", "result")),
        Target(_SCHEDULER, "Scheduler._add_request_to_queue", ("req",)),
    )

    def __init__(self) -> None:
        super().__init__()
        self._tells: bool | None = None  # whether this rank does; None: not asked yet
        self._names: list[str] = []  # of the requests of the step before: mostly the same ones
        # Of the step before, if none of its requests has ended: these, where their tokens are, and how many they had.
        self._requests: list[Any] = []
        self._outputs: list[Any] = []
        self._tokens: list[int] = []
        self._alike: step_log.AlikeSteps | None = None  # what is told of the steps since in which each got one token
        # of kvprobe's own thread alone
        self._held: dict[str, int] = {}  # request -> the tokens it had before the steps of `_same`
        self._same: tuple[list[str], list[int]] = [], []  # requests, their tokens: mostly as in this step

    def patch(self, patcher: Patcher, module: ModuleType) -> None:
        """Wrap the scheduler."""
        patcher.watch(module.Scheduler, "process_batch_result", self.stepped)
        patcher.wrap(module.Scheduler, "_add_request_to_queue", self.added)

    def tells(self, scheduler: Any) -> bool:
        """Whether this rank tells."""
        if self._tells is None:
            stage = getattr(scheduler, "pp_group", None)
            self._tells = bool(scheduler.metrics_reporter.is_stats_logging_rank) and (
                stage is None or bool(stage.is_first_rank)
            )
        return self._tells

    def added(self, call: Call, scheduler: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
        """Around `_add_request_to_queue`: it has arrived; one that was put off comes again and has arrived before."""
        again = kwargs.get("is_retracted", args[0] if args else False)
        result = call()
        if not again and self.tells(scheduler):
            at_ns = _first_ns(req.time_stats)
            step_log.mark_request(req.rid, "arrived", at_ns, _trace(req.time_stats))
        return result

    def stepped(self, began_ns: int, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Behind `process_batch_result`, which waits for the step's end and gives its tokens to the requests."""
        batch = args[1] if len(args) > 1 else kwargs["batch"]
        mode, requests = batch.forward_mode.name, batch.reqs
        if mode == "IDLE" or not requests or not self.tells(args[0]) or not step_log.wanted_at(began_ns):
            return
        ended_ns = time.monotonic_ns()
        stamp_ns = _stamp_ns(requests[-1].time_stats)
        if began_ns <= stamp_ns <= ended_ns:
            ended_ns = stamp_ns
        launched_ns = began_ns if batch.launch_ts is None else int(batch.launch_ts * 1e9)
        over = [one.rid for one in requests if one.finished_reason is not None]
        if mode == "DECODE" and requests == self._requests and not over:
            tokens = [*map(len, self._outputs)]
            if [*map(sub, tokens, self._tokens)].count(1) == len(requests):
                if self._alike is None:
                    self._alike = step_log.AlikeSteps("decode", self._names, 1, 1, "sglang")
                self._alike.add(launched_ns, ended_ns, batch.forward_iter)
                self._tokens = tokens
                return
        names = [one.rid for one in requests]
        if names != self._names:
            self._names = names
        tokens = [len(one.output_ids) for one in requests]
        before = None if self._alike is None else self._tokens
        self._alike = None
        self._requests = [] if over else [*requests]
        self._outputs = [] if over else [one.output_ids for one in requests]
        self._tokens = tokens
        told = batch.forward_iter, mode, None if mode == "DECODE" else batch.extend_lens, threading.get_native_id()
        event_log.later(self._tell, (launched_ns, ended_ns), told, self._names, (before, tokens), over)

    # ---- on kvprobe's own thread --------------------------------------------------------------------------------

    def _tell(
        self,
        times_ns: tuple[int, int],
        told: tuple[int | None, str, list[int] | None, int],
        names: list[str],
        tokens: tuple[list[int] | None, list[int]],
        over: list[str],
    ) -> None:
        """`tokens`: those that the requests of the step before had, where that was one of `_alike`; and these have."""
        number, mode, computed, thread = told
        held, (same, before) = self._held, self._same
        before, now = before if tokens[0] is None else tokens[0], tokens[1]
        if names is same:
            emitted = [*map(sub, now, before)]
        else:
            if len(held) > _MOST_HELD:
                held.clear()
            held.update(zip(same, before, strict=False))
            emitted = [*map(_emitted, map(held.get, names), now)]
        if mode != _PREBUILT:
            each = 1 if computed is None else computed
            phase = _PHASES.get(mode, "unknown")
            step_log.write_step(times_ns, number, phase, names, emitted, each, ("sglang", thread))
        self._same = names, now
        if over:
            self._end(over, times_ns[1])

    def _end(self, over: list[str], at_ns: int) -> None:
        """Of those that this step ended, or an earlier one: they may be in one that was launched meanwhile."""
        held = self._held
        ended = [one for one in over if held.get(one) != _OVER]
        held.update(zip(*self._same, strict=True))
        held.update(dict.fromkeys(over, _OVER))
        self._same = [], []
        for one in ended:
            step_log.write_time(one, "ended", at_ns)


def _emitted(before: int | None, now: int) -> int:
    """Tokens of a step, by what was known after the step before: None nothing, as of a request's first step."""
    if before is None:
        return min(now, 1)
    return 0 if before == _OVER else now - before  # one ends while the next step is launched already, and is in it


def _trace(times: Any) -> str:
    """The traceparent of SGLang's own span of a request; "" without `--enable-trace`."""
    traced = getattr(times, "trace_ctx", None)
    propagate = sys.modules.get("opentelemetry.propagate")
    if propagate is None or not getattr(traced, "tracing_enable", False):  # SGLang's null object answers anything
        return ""
    carrier: dict[str, str] = {}
    propagate.inject(carrier, traced.root_span_context)  # type: ignore[union-attr]
    return carrier.get("traceparent", "")


def _first_ns(stats: Any) -> int:
    """The earliest time that is known of a request."""
    known = [at for at in (getattr(stats, name, 0.0) for name in _ARRIVED) if at]
    return int(min(known) * 1e9) if known else time.monotonic_ns()


def _stamp_ns(stats: Any) -> int:
    """The latest end of a step that SGLang noted of a request; 0 where it noted none."""
    decoded, prefilled = stats.last_decode_finish_time, stats.last_prefill_finished_time
    return int(max(decoded, prefilled, stats.last_chunked_prefill_finish_time) * 1e9)
