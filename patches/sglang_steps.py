"""SGLang: the steps of its scheduler and the requests in each, at the times that SGLang itself has. Measured only.

A step is told where its result is looked at, which under overlap is while the next one runs: it begins when SGLang says
that it launched it (`launch_ts`) and ends when SGLang stamps the last of its requests. Of several ranks that run the
same batch the one tells it that writes SGLang's log.
"""

from __future__ import annotations

import threading
import time
from types import ModuleType
from typing import Any

from kvprobe.instrument import event_log, step_log
from kvprobe.instrument.adapter import Adapter, Target
from kvprobe.instrument.hooks import Call, Patcher

_SCHEDULER = "sglang.srt.managers.scheduler"
_PHASES = {"DECODE": "decode", "TARGET_VERIFY": "decode", "MIXED": "mixed", "EXTEND": "prefill"}
_PHASES["SPLIT_PREFILL"] = "prefill"
_NO_STEPS = ("IDLE", "PREBUILT")  # nothing is computed
_OVER = -1  # tokens of a request that had ended before
# When SGLang first saw a request, in s of `time.perf_counter`, the clock of the ring files on Linux.
_ARRIVED = ("created_time", "scheduler_recv_time", "wait_queue_entry_time")
_STAMPED = ("last_decode_finish_time", "last_prefill_finished_time", "last_chunked_prefill_finish_time")


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

    def patch(self, patcher: Patcher, module: ModuleType) -> None:
        """Wrap the scheduler."""
        patcher.wrap(module.Scheduler, "process_batch_result", self.stepped)
        patcher.wrap(module.Scheduler, "_add_request_to_queue", self.added)

    def tells(self, scheduler: Any) -> bool:
        """Whether this rank tells, and somebody hears of it."""
        if self._tells is None:
            stage = getattr(scheduler, "pp_group", None)
            self._tells = bool(scheduler.metrics_reporter.is_stats_logging_rank) and (
                stage is None or bool(stage.is_first_rank)
            )
        return self._tells and step_log.wanted()

    def added(self, call: Call, scheduler: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
        """Around `_add_request_to_queue`: it has arrived; one that was put off comes again and has arrived before."""
        again = kwargs.get("is_retracted", args[0] if args else False)
        result = call()
        if not again and self.tells(scheduler):
            at_ns = _first_ns(req.time_stats)
            step_log.mark_request(req.rid, "arrived", at_ns)
        return result

    def stepped(self, call: Call, scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Around `process_batch_result`, which waits for the step's end and gives its tokens to the requests."""
        mode = batch.forward_mode.name
        if mode in _NO_STEPS or not self.tells(scheduler):
            return call()
        requests, began_ns = batch.reqs[:], time.monotonic_ns()
        before = [len(one.output_ids) if one.finished_reason is None else _OVER for one in requests]
        result = call()
        after = [len(one.output_ids) for one in requests]
        ended_ns = time.monotonic_ns()
        over = [one.rid for one in requests if one.finished_reason is not None]
        if requests:
            stamp_ns = _stamp_ns(requests[-1].time_stats)
            ended_ns = stamp_ns if began_ns <= stamp_ns <= ended_ns else ended_ns
        launched_ns = began_ns if batch.launch_ts is None else int(batch.launch_ts * 1e9)
        counts = before, after, batch.extend_lens if mode != "DECODE" else None
        of = "sglang", threading.get_native_id()
        event_log.later(_tell, (launched_ns, ended_ns), (batch.forward_iter, mode), requests, counts, over, of)
        return result


def _first_ns(stats: Any) -> int:
    """The earliest time that is known of a request."""
    known = [at for at in (getattr(stats, name, 0.0) for name in _ARRIVED) if at]
    return int(min(known) * 1e9) if known else time.monotonic_ns()


def _stamp_ns(stats: Any) -> int:
    """The latest end of a step that SGLang noted of a request; 0 where it noted none."""
    return int(max(getattr(stats, name, 0.0) for name in _STAMPED) * 1e9)


# ---- on kvprobe's own thread ------------------------------------------------------------------------------------


def _tell(
    times_ns: tuple[int, int],
    told: tuple[int | None, str],
    requests: list[Any],
    counts: tuple[list[int], list[int], list[int] | None],
    over: list[str],
    of: tuple[str, int],
) -> None:
    before, after, computed = counts
    # one that ends while the next step is launched already is in that one, too, and gets nothing of it
    tokens = [0 if then == _OVER else now - then for then, now in zip(before, after, strict=True)]
    names = [one.rid for one in requests]
    number, mode = told
    each = [1] * len(names) if computed is None else computed
    step_log.write_step(times_ns, number, _PHASES.get(mode, "unknown"), names, tokens, each, of)
    gone = {name for name, then in zip(names, before, strict=True) if then == _OVER}
    for one in over:
        if one not in gone:
            step_log.write_time(one, "ended", times_ns[1])
