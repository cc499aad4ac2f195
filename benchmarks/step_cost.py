"""What telling a step costs vLLM's engine: its own scheduler serving on a CPU, with the adapter in and out in turn.

    python benchmarks/step_cost.py [--requests 64] [--tokens 128]     # in an environment with vLLM (make test-servers)

Every eight steps the adapter goes in or out. The hooks stand around two functions of the scheduler. Measured is the CPU
time of the engine's thread in these two, less that in vLLM's own code below the hooks, so that neither the model nor
other programs count; and the CPU time of kvprobe's own thread, which makes the lines. Printed: what a step costs more
with the adapter in (the difference of medians), and its share of a step as long as this engine's, and of one of 10 ms.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
import tempfile
import threading
import time
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "servers"))
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
TURN = 8  # steps


class Watch:
    """The thread's CPU time in two functions of a scheduler less that of vLLM's own code in them, step by step."""

    def __init__(self, scheduler, base):
        self.spent = 0
        for name in ("schedule", "update_from_output"):
            setattr(base, name, self.inside(getattr(base, name)))
            setattr(scheduler, name, self.around(scheduler, name))

    def inside(self, own):
        """The function of vLLM's own, whose time does not count."""

        @functools.wraps(own)
        def timed(*args, **kwargs):
            begin = time.thread_time_ns()
            try:
                return own(*args, **kwargs)
            finally:
                self.spent -= time.thread_time_ns() - begin

        return timed

    def around(self, scheduler, name):
        """The function as it is called: whatever stands around vLLM's own at that time."""

        def timed(*args, **kwargs):
            begin = time.thread_time_ns()
            try:
                return getattr(type(scheduler), name)(scheduler, *args, **kwargs)  # as it is patched now
            finally:
                self.spent += time.thread_time_ns() - begin

        return timed

    def taken(self):
        """Of the step that has ended."""
        spent, self.spent = self.spent, 0
        return spent


def writer_ns():
    """CPU time of kvprobe's own thread so far."""
    mine = [one for one in threading.enumerate() if one.name == "kvprobe-events"]
    return sum(time.clock_gettime_ns(time.pthread_getcpuclockid(one.ident)) for one in mine)


def served(arguments, folder):
    """Times of each step, by whether the adapter was in."""
    from vllm import LLM, SamplingParams
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm_engine import write_model

    from kvprobe import instrument
    from kvprobe.instrument import event_log

    settings = {"dtype": "float32", "max_model_len": 1024, "enforce_eager": True, "disable_log_stats": True}
    llm = LLM(model=str(write_model(folder)), skip_tokenizer_init=True, max_num_seqs=arguments.requests, **settings)
    sampling = SamplingParams(max_tokens=arguments.tokens, temperature=0.0, ignore_eos=True, detokenize=False)
    engine = llm.llm_engine
    for n in range(arguments.requests):
        engine.add_request(str(n), {"prompt_token_ids": [n + 3] * 16}, sampling)
    watch = Watch(engine.engine_core.engine_core.scheduler, Scheduler)
    hooks, wall, own = {True: [], False: []}, {True: [], False: []}, []
    number, within, began = 0, False, 0
    while engine.has_unfinished_requests():
        if number % TURN == 0:
            event_log.flush()
            if within:
                own.append((writer_ns() - began) / TURN)
                instrument.uninstall("vllm")
            else:
                instrument.install("vllm")
            within = not within
            began = writer_ns()
        begin = time.perf_counter_ns()
        engine.step()
        wall[within].append(time.perf_counter_ns() - begin)
        hooks[within].append(watch.taken())
        number += 1
    return hooks, wall, own


def main():
    """Prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["KVPROBE_RUN"] = folder
        hooks, wall, own = served(arguments, folder)
        os.environ.pop("KVPROBE_RUN")
        lines = [line for path in Path(folder).glob("steps-*") for line in path.read_text().splitlines()]
        told = sum(json.loads(line)["kind"] == "step" for line in lines)
    extra, step = median(hooks[True]) - median(hooks[False]), median(wall[False])
    print(f"{arguments.requests} requests, {len(hooks[True])} steps with and {len(hooks[False])} without; told: {told}")
    print(f"the adapter, on the engine's thread: {extra / 1e3:.1f} us a step")
    print(f"kvprobe's own thread: {median(own) / 1e3:.1f} us a step" if own else "kvprobe's own thread: no turn ended")
    for name, length in (("this engine's", step), ("a short", 10e6)):
        print(f"of {name} step of {length / 1e6:.1f} ms: {100 * extra / length:.3f}% on the engine's thread")


if __name__ == "__main__":
    main()
