"""What telling a step costs a real server: its own scheduler serving on a CPU, with the adapter in and out in turn.

    python benchmarks/step_cost.py vllm [--requests 64] [--tokens 128]     # in the environments of make test-servers
    python benchmarks/step_cost.py sglang [--requests 64] [--tokens 128]
    python benchmarks/step_cost.py lmcache [--requests 64] [--mode engine_driven]    # the separate lmcache server

Every 16 steps the adapters go in or out. Their hooks stand around a few functions of the scheduler. Measured is the
CPU time of the server's threads in these, less that in the server's own code below the hooks, so that neither the model
nor other programs count; and the CPU time of kvprobe's own thread, which makes the lines. LMCache computes nothing: a
step of it is the store, or the look-up and the load, of one request's blocks, as its client asks for them. Printed:
what a step costs more with the adapters in, as the difference of medians and of tenth percentiles (where other
programs disturbed least), and the former as a share of a step as long as this server's, and of one of 10 ms.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import os
import socket
import sys
import tempfile
import threading
import time
from collections import deque
from pathlib import Path
from statistics import median, quantiles

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "servers"))
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("OMP_NUM_THREADS", "1")  # a step of so small a model waits for its threads, and not for work
TURN = 16  # steps
PROMPT = 16  # tokens
FOLDER = "KVPROBE_BENCHMARK_FOLDER"  # what tells SGLang's scheduler, a process of its own, where to leave its figures


class Watch:
    """CPU time of threads in some functions of objects less that of the server's own code in them, by step."""

    def __init__(self, server, last=""):
        """A step ends with the function `last`, or where `stepped` is called."""
        self.server, self.last, self.spent = server, last, deque()
        self.hooks, self.wall, self.own = {True: [], False: []}, {True: [], False: []}, []
        self.within, self.number, self.began, self.ended = False, 0, 0, None

    def below(self, kind, names):
        """Leaves out what the server's own code of a class takes; before hooks come around it."""
        for name in names:
            setattr(kind, name, self.inside(getattr(kind, name)))

    def of(self, one, names):
        """Watches these functions of an object."""
        for name in names:
            setattr(one, name, self.around(one, name))

    def begin(self):
        """What came before counts for nothing."""
        self.spent.clear()
        self.ended = time.perf_counter_ns()

    def inside(self, own):
        """The function of the server's own, whose time does not count."""

        @functools.wraps(own)
        def timed(*args, **kwargs):
            begin = time.thread_time_ns()
            try:
                return own(*args, **kwargs)
            finally:
                self.spent.append(begin - time.thread_time_ns())

        return timed

    def around(self, one, name):
        """The function as it is called: whatever stands around the server's own at that time."""

        @functools.wraps(getattr(one, name))
        def timed(*args, **kwargs):
            begin = time.thread_time_ns()
            try:
                return getattr(type(one), name)(one, *args, **kwargs)  # as it is patched now
            finally:
                self.spent.append(time.thread_time_ns() - begin)
                if name == self.last:
                    self.stepped()

        return timed

    def stepped(self):
        """A step has ended: its figures; and behind every sixteenth the adapter goes in or out."""
        from kvprobe import instrument
        from kvprobe.instrument import event_log

        now = time.perf_counter_ns()
        self.hooks[self.within].append(sum(self.spent))
        if self.ended is not None:
            self.wall[self.within].append(now - self.ended)
        self.number += 1
        if self.number % TURN == 0:
            begin = time.thread_time_ns()
            event_log.flush()  # what kvprobe's own thread would have done
            flushed = time.thread_time_ns() - begin
            if self.within:
                self.own.append((writer_ns() - self.began + flushed) / TURN)
            (instrument.uninstall if self.within else instrument.install)(self.server)
            self.within = not self.within
            self.began = writer_ns()
        self.begin()


def writer_ns():
    """CPU time of kvprobe's own thread so far."""
    mine = [one for one in threading.enumerate() if one.name == "kvprobe-events"]
    return sum(time.clock_gettime_ns(time.pthread_getcpuclockid(one.ident)) for one in mine)


def vllm(arguments, folder):
    """Figures of vLLM's engine, in this process."""
    from vllm import LLM, SamplingParams
    from vllm_engine import write_model

    settings = {"dtype": "float32", "max_model_len": 1024, "enforce_eager": True, "disable_log_stats": True}
    llm = LLM(model=str(write_model(folder)), skip_tokenizer_init=True, max_num_seqs=arguments.requests, **settings)
    sampling = SamplingParams(max_tokens=arguments.tokens, temperature=0.0, ignore_eos=True, detokenize=False)
    engine = llm.llm_engine
    for n in range(arguments.requests):
        engine.add_request(str(n), {"prompt_token_ids": [n + 3] * PROMPT}, sampling)
    scheduler = engine.engine_core.engine_core.scheduler
    watch = Watch("vllm", "update_from_output")
    watch.below(type(scheduler), ("schedule", "update_from_output"))
    watch.of(scheduler, ("schedule", "update_from_output"))
    while engine.has_unfinished_requests():
        engine.step()
    return watch.hooks, watch.wall, watch.own


def sglang(arguments, folder):
    """Figures of SGLang's scheduler, which is a process of its own, on the platform that its tests have."""
    plugin = Path(folder) / "sglang_platform.dist-info"
    plugin.mkdir()
    (plugin / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang-platform\nVersion: 1\n")
    (plugin / "entry_points.txt").write_text("[sglang.srt.platforms]\nhostrt = sglang_platform:activate\n")
    sys.path.insert(0, str(folder))  # what it spawns has the same path
    os.environ |= {"SGLANG_PLATFORM": "hostrt", "KVPROBE_DEVICE": "host"}
    import sglang_platform

    sglang_platform.activate()
    from sglang.srt.entrypoints.engine import Engine
    from sglang_engine import ON_CPU, write_model

    class Watched(Engine):
        """The engine, with its scheduler watched."""

        run_scheduler_process_func = staticmethod(sglang_scheduler)

    os.environ[FOLDER] = str(folder)
    model = Path(folder) / "model"
    write_model(model)
    engine = Watched(
        model_path=str(model),
        **ON_CPU,
        max_total_tokens=arguments.requests * (PROMPT + arguments.tokens + 64),
        max_running_requests=arguments.requests,
        log_level="warning",
    )
    sampling = {"max_new_tokens": arguments.tokens, "temperature": 0.0, "ignore_eos": True}
    prompts = [[n + 3] * PROMPT for n in range(arguments.requests)]
    engine.generate(input_ids=prompts, sampling_params=sampling)
    engine.shutdown()
    (file,) = Path(folder).glob("figures-*.json")
    hooks, wall, own = json.loads(file.read_text())
    return *({True: one["with"], False: one["without"]} for one in (hooks, wall)), own


def sglang_scheduler(*args, **kwargs):
    """SGLang's own process of the scheduler, watched."""
    from sglang.srt.managers.scheduler import Scheduler, run_scheduler_process

    loop = Scheduler.run_event_loop

    def watched(scheduler):
        watch = Watch("sglang", "process_batch_result")
        watch.below(Scheduler, ("process_batch_result", "_add_request_to_queue"))
        watch.of(scheduler, ("process_batch_result", "_add_request_to_queue"))
        stepped = watch.stepped

        def told():
            stepped()
            if watch.number % TURN == 0:  # the process may be ended at any time
                named = [{"with": one[True], "without": one[False]} for one in (watch.hooks, watch.wall)]
                file = Path(os.environ[FOLDER]) / f"figures-{os.getpid()}"
                file.write_text(json.dumps([*named, watch.own]))
                file.replace(file.with_suffix(".json"))

        watch.stepped = told
        loop(scheduler)

    Scheduler.run_event_loop = watched
    run_scheduler_process(*args, **kwargs)


def lmcache(arguments, folder):
    """Figures of LMCache's server, whose threads are in this process, with its client."""
    os.environ |= {"LMCACHE_DISABLE_BANNER": "1", "LMCACHE_TRACK_USAGE": "false"}
    from lmcache.v1.multiprocess import server
    from lmcache_client import BLOCK, CHUNK, PROMPT, Client

    from kvprobe.patches import lmcache_server as adapters

    watch = Watch("lmcache")
    by_class = {}  # the functions around which hooks stand, by module and class
    for target in (*adapters.ServerOffload.targets, *(entry.target for entry in adapters.EngineDriven.timed)):
        kind, _, name = target.path.partition(".")
        by_class.setdefault((target.module, kind), set()).add(name)
    for (module, kind), names in by_class.items():
        watched_from_the_start(watch, getattr(importlib.import_module(module), kind), names)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    sys.argv = ["lmcache", "--host", "127.0.0.1", "--port", str(port), "--chunk-size", str(CHUNK)]
    sys.argv += ["--l1-size-gb", "0.5", "--no-l1-use-lazy", "--eviction-policy", "LRU", "--disable-observability"]
    sys.argv += ["--supported-transfer-mode", arguments.mode]
    given = server.parse_args()
    request_server, engine = server.run_cache_server(
        server.parse_args_to_mp_server_config(given),
        server.parse_args_to_config(given),
        server.parse_args_to_observability_config(given),
        return_engine=True,
        start_prometheus_http_server=False,
    )
    client = Client(port, arguments.mode)
    watch.begin()
    prompts = [[1000 * n + at for at in range(PROMPT)] for n in range(arguments.requests)]
    for n, tokens in enumerate(prompts):
        client.store(f"store-{n}", tokens, 1)
        watch.stepped()
    for n, tokens in enumerate(prompts):
        assert client.hits(f"load-{n}", tokens) == PROMPT
        client.load(f"load-{n}", tokens, PROMPT // BLOCK + 1)
        client.end(f"load-{n}")
        watch.stepped()
    client.close()
    request_server.close()
    engine.close()
    return watch.hooks, watch.wall, watch.own


def watched_from_the_start(watch, kind, names):
    """Watches functions of the one object of this class as soon as it is made, before others take them."""
    watch.below(kind, names)
    begin = kind.__init__

    @functools.wraps(begin)
    def made(self, *args, **kwargs):
        begin(self, *args, **kwargs)
        watch.of(self, names)

    kind.__init__ = made


def main():
    """Prints the figures."""
    from kvprobe.runfolder.step_lines import one_by_one

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("server", choices=("vllm", "sglang", "lmcache"))
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--mode", default="engine_driven", choices=("engine_driven", "lmcache_driven"))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["KVPROBE_RUN"] = folder
        serve = {"vllm": vllm, "sglang": sglang, "lmcache": lmcache}[arguments.server]
        hooks, wall, own = serve(arguments, folder)
        os.environ.pop("KVPROBE_RUN")
        lines = [json.loads(line) for path in Path(folder).glob("steps-*") for line in path.read_text().splitlines()]
        told = sum(one["kind"] == "step" for line in lines for one in one_by_one(line))
    extra, step = median(hooks[True]) - median(hooks[False]), median(wall[False])
    print(f"{arguments.requests} requests, {len(hooks[True])} steps with and {len(hooks[False])} without; told: {told}")
    least = quantiles(hooks[True], n=10)[0] - quantiles(hooks[False], n=10)[0]
    print(f"the adapters, on the server's threads: {extra / 1e3:.1f} us a step, undisturbed {least / 1e3:.1f} us")
    print(f"kvprobe's own thread: {median(own) / 1e3:.1f} us a step" if own else "kvprobe's own thread: no turn ended")
    for name, length in (("this server's", step), ("a short", 10e6)):
        both = f" and {100 * median(own) / step:.3f}% on kvprobe's" if own else ""
        print(f"of {name} step of {length / 1e6:.1f} ms: {100 * extra / length:.3f}% on the server's threads{both}")


if __name__ == "__main__":
    main()
