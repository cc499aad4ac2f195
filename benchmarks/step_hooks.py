"""What the hooks that tell steps add to a server's thread, by server: its adapter's own hooks around nothing.

    python benchmarks/step_hooks.py [--requests 64] [--steps 400]      # needs no server

The functions that the hooks stand around do nothing here but return what the server's would: objects of the same shape
for that many requests, made anew for each step where the server makes them anew. So what is measured is the hooks
alone, and no model, no scheduler. Every eight steps they go in or out; before each step the thread sleeps for a
millisecond, so that kvprobe's own thread has its turn, and then works for a while, as a server's own code would.
Printed, per step: the CPU time more with the hooks in, as the difference of medians and of tenth percentiles (where
other programs disturbed least), the former as a share of a step of 10 ms; and the CPU time of kvprobe's own thread,
which makes the lines. `benchmarks/step_cost.py` measures real servers.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import threading
import time
from pathlib import Path
from statistics import median, quantiles
from types import SimpleNamespace as Made

import msgspec

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
TURN = 8  # steps
STEP_NS = 10_000_000


class Output(msgspec.Struct, gc=False):
    """What vLLM makes for each request of a step, which its garbage collection passes over."""

    request_id: str
    new_token_ids: list
    finish_reason: object = None


class Vllm:
    """Two functions of its scheduler: a step is scheduled, and its outputs are made."""

    def __init__(self, requests):
        self.names = [f"cmpl-{n:032x}-0" for n in range(requests)]

    def schedule(self):
        """What the next step consists of."""
        return Made(
            total_num_scheduled_tokens=len(self.names),
            num_scheduled_tokens=dict.fromkeys(self.names, 1),
            scheduled_cached_reqs=Made(resumed_req_ids=set(), req_ids=[]),
        )

    def update(self, scheduled):
        """What came of it."""
        each = [Output(name, [1]) for name in self.names]
        return {0: Made(timestamp=time.monotonic(), outputs=each)}

    def hooked(self, patcher):
        """A step with the hooks in."""
        from kvprobe.patches.vllm_steps import Steps

        adapter = Steps()
        schedule = patcher.behind(type(self).schedule, adapter.scheduled, "schedule")
        update = patcher.behind(type(self).update, adapter.stepped, "update_from_output")
        return lambda: update(self, schedule(self))

    def plain(self):
        """A step without."""
        return self.update(self.schedule())


class Sglang:
    """The function that looks at a batch's result and gives each request its token."""

    def __init__(self, requests):
        stats = Made(last_decode_finish_time=0.0, last_prefill_finished_time=0.0, last_chunked_prefill_finish_time=0.0)
        self.metrics_reporter, self.pp_group = Made(is_stats_logging_rank=True), Made(is_first_rank=True)
        self.requests = [
            Made(rid=f"{n:032x}", output_ids=[], finished_reason=None, time_stats=stats) for n in range(requests)
        ]
        self.number = 0

    def batch(self):
        """The next batch, which decodes."""
        self.number += 1
        mode = Made(name="DECODE")
        return Made(forward_mode=mode, reqs=self.requests, launch_ts=time.monotonic(), forward_iter=self.number)

    def process(self, batch):
        """Every request gets a token."""
        for one in batch.reqs:
            one.output_ids.append(1)

    def hooked(self, patcher):
        """A step with the hooks in."""
        from kvprobe.patches.sglang_steps import Steps

        process = patcher.behind(type(self).process, Steps().stepped, "process_batch_result")
        return lambda: process(self, self.batch())

    def plain(self):
        """A step without."""
        return self.process(self.batch())


class Transformers:
    """The question at the top of `generate`'s loop whether a row is left to do."""

    def __init__(self, requests):
        self.rows = requests

    def asked(self):
        """Whether a row is left."""
        return True

    def hooked(self, patcher):
        """A step with the hooks in."""
        from kvprobe.patches.transformers_steps import Steps, _Generation

        adapter = Steps()
        adapter._mine.open = _Generation("generate-0", self.rows, 16, time.monotonic_ns())
        asked = patcher.behind(type(self).asked, adapter.asked, "_has_unfinished_sequences")
        return lambda: asked(self)

    def plain(self):
        """A step without."""
        return self.asked()


def busy():
    """Python's own work, some hundred microseconds of it."""
    return sorted(json.dumps({"n": n, "text": str(n)}) for n in range(100))


def writer_ns():
    """CPU time of kvprobe's own thread so far."""
    mine = [one for one in threading.enumerate() if one.name == "kvprobe-events"]
    return sum(time.clock_gettime_ns(time.pthread_getcpuclockid(one.ident)) for one in mine)


def measured(server, steps):
    """CPU ns of each step, by whether the hooks are in; and a step's CPU ns of kvprobe's own thread."""
    from kvprobe.instrument import event_log
    from kvprobe.instrument.hooks import CircuitBreaker, Patcher

    broken = []
    hooked = server.hooked(Patcher(CircuitBreaker(type(server).__name__, broken.append)))
    took, began = {True: [], False: []}, writer_ns()
    for number in range(2 * steps):
        within = bool(number // TURN % 2)
        step = hooked if within else server.plain
        time.sleep(0.001)
        busy()
        begin = time.thread_time_ns()
        step()
        took[within].append(time.thread_time_ns() - begin)
    begin = time.thread_time_ns()
    event_log.flush()
    own = writer_ns() - began + time.thread_time_ns() - begin
    if broken:
        raise SystemExit(f"the hooks stepped aside: {broken[0]}")
    return took, own / len(took[True])


def main():
    """Prints the figures."""
    from kvprobe.runfolder.step_lines import one_by_one

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--steps", type=int, default=400)
    arguments = parser.parse_args()
    for kind in (Vllm, Sglang, Transformers):
        with tempfile.TemporaryDirectory() as folder:
            os.environ["KVPROBE_RUN"] = folder
            took, own = measured(kind(arguments.requests), arguments.steps)
            lines = (json.loads(line) for path in Path(folder).glob("steps-*") for line in path.open())
            told = sum(one["kind"] == "step" for line in lines for one in one_by_one(line))
            os.environ.pop("KVPROBE_RUN")
        extra = median(took[True]) - median(took[False])
        least = quantiles(took[True], n=10)[0] - quantiles(took[False], n=10)[0]
        share = f"{100 * extra / STEP_NS:.3f}% of {STEP_NS / 1e6:.0f} ms"
        name, own_us = kind.__name__.lower(), own / 1e3
        print(f"{name}: {extra / 1e3:.1f} us a step ({share}), undisturbed {least / 1e3:.1f} us")
        print(f"  kvprobe's own thread: {own_us:.1f} us a step")
        print(f"  {arguments.requests} requests, {len(took[True])} steps with the hooks, {told} told")


if __name__ == "__main__":
    main()
