"""SGLang HiCache (0.5.20 on): `L2TransferEngine` and `HiCacheController`.

Carried by the entry point `sglang.srt.plugins` into every rank. The plug-in's own HookRegistry cannot take a hook
back, so kvprobe patches the same functions with its own frame, which can.
"""

from __future__ import annotations

import sys
from collections import deque
from functools import partial
from types import ModuleType
from typing import Any

from kvprobe.instrument import installation
from kvprobe.instrument.adapter import Target
from kvprobe.instrument.calls import NOTHING, TimedCalls, TimedFunction, timed
from kvprobe.instrument.handover import CopyAdapter, TransferEvents, TransferPart
from kvprobe.instrument.hooks import Call, Patcher
from kvprobe.instrument.submissions import POOLED, Rung
from kvprobe.instrument.transfers import CopyPath

from .sglang_copies import (
    DIRECT,
    Addresses,
    Move,
    move_of,
    no_plain_copy,
    one_fifo,
    registrations,
    size,
    work,
)
from .sglang_offload import Offload, Storage
from .sglang_sleep import MemoryOccupation
from .sglang_split import SPLIT, Split
from .sglang_steps import Steps

_ENGINE = "sglang.srt.mem_cache.l2_transfer"
_CONTROLLER = "sglang.srt.managers.cache_controller"
_POOLS = ("sglang.srt.mem_cache.pool_host.mha", "sglang.srt.mem_cache.pool_host.mla")
_STREAMS = {"store": "device_to_host_stream", "load": "host_to_device_stream"}

OWN = Rung("shared", "own")  # SGLang's own copies, whichever back end makes them


class Transfers(CopyAdapter):
    """The copy engine: one shared stream a direction, submission on the scheduler's thread.

    SGLang's own submission runs as ever, fences and waits included. The direct back end's copy functions are taken
    meanwhile, a load's together with SGLang's word that a layer is there: one request, in it a job a layer, in order,
    each with an event.
    """

    name, versions = "sglang.l2_transfer", ">=0.5.21,<0.6"
    summary = "Times every burst of L2TransferEngine: submit (on the scheduler's thread), queue wait, copy, poll delay."
    changes = (
        "when submission is slow, or the copies are, those of the direct back end go to the submitter (order kept, a "
        "load's layer by layer), which merges neighbours and chooses the method; write-backs of the kernel back end "
        "are split over as many streams as they need when the launch queue is full, its loads stay as they are; "
        "refused where pools translate indices, share host layouts, or do more than copy bytes."
    )
    targets = (
        Target(_ENGINE, "L2TransferEngine.__init__"),
        Target(_ENGINE, "L2TransferEngine.submit_device_to_host", ("transfers",)),
        Target(_ENGINE, "L2TransferEngine.submit_host_to_device", ("transfers", "transfer_layer_id_max")),
        Target(_ENGINE, "shared_host_layout_domains"),
        Target(_CONTROLLER, "LayerLoadingEvent.complete", ("layer_index",), optional=True),
        *(Target(module, name, optional=True) for module in _POOLS for name in DIRECT),
    )

    def __init__(self) -> None:
        super().__init__()
        self.split = Split(self)
        self._pending: deque[tuple[CopyPath, int, Any]] = deque()
        self._transfers: Any = ()  # of the burst that is being submitted
        self._backend = ""
        self._layers: list[Any] = []  # its layers' events
        self._job = 0

    def patch(self, patcher: Patcher, module: ModuleType) -> None:
        """Wrap both submissions, the constructor to fill pools before traffic starts, and the direct copies."""
        if module.__name__ == _ENGINE:
            self.module = module
            engine = module.L2TransferEngine
            patcher.wrap(engine, "__init__", self.around_init)
            patcher.wrap(engine, "submit_device_to_host", partial(self.burst, "store"))
            patcher.wrap(engine, "submit_host_to_device", partial(self.burst, "load"))
        elif module.__name__ in _POOLS and self.fix == "auto":
            for name in DIRECT:
                if hasattr(module, name):
                    patcher.wrap(module, name, self.take)

    def around_init(self, call: Call, handler: Any, *args: Any, **kwargs: Any) -> Any:
        """Around the engine's constructor: the device is set, and the scheduler's thread can spare 50 ms now."""
        result = call()
        for direction in _STREAMS:
            self.path_of(handler, direction)
        if self.fix == "auto" and handler.io_backend == "kernel":
            why = (
                "the kernel back end's loads are a launch a layer, and its write-backs rearrange rows on the GPU first"
            )
            self.decide("note", f"{why}: its copies stay SGLang's own")
        return result

    def rungs_of(self, engine: Any, direction: str) -> tuple[Rung, ...]:
        """The kernel back end's loads are a launch a layer: cheap, few, and as fast as the link."""
        if engine.io_backend == "direct":
            return OWN, POOLED
        return (OWN, SPLIT) if engine.io_backend == "kernel" and direction == "store" else (OWN,)

    def burst(self, direction: str, call: Call, engine: Any, transfers: Any, *args: Any, **kwargs: Any) -> Any:
        """Around one of the two submissions."""
        self.poll()
        path = self.path_of(engine, direction)
        self._job += 1
        live = path.begin(self._job)
        self._transfers, self._backend, self._layers = transfers, engine.io_backend, []
        stream = getattr(engine, _STREAMS[direction]).cuda_stream
        self._stream = live.stream = stream
        if live.rung != OWN:
            self.look(path, call, transfers, kwargs.get("on_layer_done"))
        if SPLIT in self.rungs_of(engine, direction) and path.auto is not None:
            works = [work(t, direction, engine.io_backend) for t in transfers]
            completion = self.split.submit(call, engine, path, transfers, works)
            self.submitted(path, completion)
            return completion
        if not path.hands_over:
            path.fence(stream)
        path.first(stream)
        return self.submit(call, engine, path, self._job)

    def look(self, path: CopyPath, call: Call, transfers: Any, layer_done: Any) -> None:
        """Whether this burst may go another way than SGLang's; if so its layers' ends are taken with its copies."""
        assert path.auto is not None
        why = one_fifo(transfers, self.module.shared_host_layout_domains)
        if path.hands_over:
            why = why or no_plain_copy(transfers)
            if layer_done is not None and not why:
                events = layer_events(layer_done)
                why = "" if events is not None else "who is told that a layer is there is not known"
                self._layers = events or []
        if why:
            path.auto.refuse(path.auto.rung, f"{why}: SGLang's own copies stay")
            path.keep_with_server()
        elif self._layers:
            assert self._patcher is not None
            heard = self._patcher.around(layer_done, self.take, "on_layer_done")
            call.kwargs = {**call.kwargs, "on_layer_done": heard}

    # ---- what goes to the submitter ---------------------------------------------------------------------------

    def take(self, call: Call, *args: Any, **kwargs: Any) -> Any:
        """Around the direct back end's copy functions, and around what SGLang calls when a layer's were enqueued."""
        if self.path is None or not self.path.hands_over:
            return call()
        call.done = True
        self._taken.append(call)
        return None

    def jobs(self, engine: Any, path: CopyPath) -> list[TransferPart]:
        """A store is one job, a load one a layer: the copies up to SGLang's word that it is there."""
        groups: list[tuple[list[Call], list[Move]]] = [([], [])]
        for one in self._taken:
            groups[-1][0].append(one)
            move = move_of(one)
            if move is not None:
                groups[-1][1].append(move)
            else:
                groups.append(([], []))
        addresses, jobs = Addresses(), list[TransferPart]()
        for number, (calls, some) in enumerate(groups):
            slots = ((self._layers, calls[-1].args[0]),) if number < len(groups) - 1 else ()
            copies = addresses.copies(some)
            if copies:
                jobs.append(TransferPart(copies, calls, slots))
            elif jobs:  # a layer of which nothing is copied is there with the one before
                jobs[-1] = TransferPart(jobs[-1].copies, jobs[-1].calls + calls, jobs[-1].slots + slots)
            else:
                self.make(calls, getattr(engine, _STREAMS[path.direction]))
        if jobs:
            moves, tensors = [move for _, some in groups for move in some], frozenset(addresses.tensors)
            starts = partial(self.starts, path, moves, tensors)
            jobs[0].copies[0].bounds = self.bounds(engine, (path.direction, tensors), starts)
        return jobs

    def starts(self, path: CopyPath, moves: list[Move], tensors: frozenset[int]) -> list[int]:
        """Where memory begins over which nothing is merged, if the CPU's side of the burst is pinned."""
        for host in {host.data_ptr() for move in moves for host in move.sides[path.direction == "store"]}:
            self.need_pinned(path, host)
        return [*tensors, *registrations(self._transfers)]

    def transfer_events(self, engine: Any, job_id: Any, completion: Any) -> TransferEvents:
        """Of the completion that SGLang is about to get."""
        assert self.path is not None
        stream = getattr(engine, _STREAMS[self.path.direction])
        return TransferEvents(stream, completion.start_event, completion.finish_event)

    def replace_events(self, engine: Any, job_id: Any, completion: Any, start: Any, end: Any) -> Any:
        """Whoever is given the completion asks these."""
        return completion._replace(start_event=start, finish_event=end)

    # ---- the end of a burst -----------------------------------------------------------------------------------

    def submitted(self, path: CopyPath, result: Any) -> None:
        """A burst is on its way, and SGLang gets this completion of it."""
        live = path.current
        if live is None:
            return
        live.extra["tokens"] = sum(len(t.host_indices) for t in self._transfers)
        events = None
        if live.hand_over is None:
            backend = self._backend
            path.add(0, sum(work(t, path.direction, backend).copies for t in self._transfers), size(self._transfers), 0)
            events = timing_events(result)
        self._pending.append((path, live.job, result))
        path.submitted(events=events)

    def poll(self) -> None:
        """Notice bursts that have ended; called at every submission, which is once a scheduler step."""
        for _ in range(len(self._pending)):
            path, job, completion = self._pending.popleft()
            if completion.finish_event.query():
                path.done(job)
            else:
                self._pending.append((path, job, completion))

    def step_aside(self) -> None:
        """What follows on the engines' own streams comes after what is elsewhere."""
        self._pending.clear()
        self.split.step_aside()
        for engine, paths in list(self.handlers.items()):
            for path in paths.values():
                if path is not self.path:
                    path.fence(getattr(engine, _STREAMS[path.direction]).cuda_stream)
        super().step_aside()


def layer_events(layer_done: Any) -> list[Any] | None:
    """SGLang's events of a load's layers, where `layer_done` records them and does nothing else; else None."""
    kind = getattr(sys.modules.get(_CONTROLLER), "LayerLoadingEvent", None)
    owner = getattr(layer_done, "__self__", None)
    if kind is None or type(owner) is not kind or layer_done.__func__ is not kind.complete:
        return None
    events: list[Any] = owner.load_events
    return events


def timing_events(completion: Any) -> tuple[int, int] | None:
    """Handles of SGLang's own timing events: it records the first behind its wait for compute, which ours cannot be."""
    if not completion.timing_enabled:
        return None
    start, finish = (getattr(event, "cuda_event", None) for event in (completion.start_event, completion.finish_event))
    return (start, finish) if isinstance(start, int) and isinstance(finish, int) else None


class Controller(TimedCalls):
    """What the scheduler's thread spends in HiCacheController."""

    name = "sglang.cache_controller"
    summary = "Times HiCacheController.start_loading, start_writing and move_indices on the scheduler's thread."
    timed = (
        timed(_CONTROLLER, "HiCacheController.start_loading", (), "load", "a layer's copies are enqueued one by one"),
        timed(_CONTROLLER, "HiCacheController.start_writing", (), "store", "fence first, then two copies a token"),
        timed(_CONTROLLER, "HiCacheController.move_indices", ("host_indices", "device_indices"), "both"),
    )

    def before(self, entry: TimedFunction, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Both starts are called in every step, idle ones included: there the bursts that have ended are noticed."""
        name = entry.target.path.rpartition(".")[2]
        if name == "move_indices":
            return None
        transfers = installation.adapter_of(Transfers.name)
        if isinstance(transfers, Transfers):
            transfers.poll()
        return None if getattr(args[0], "write_queue" if name == "start_writing" else "load_queue") else NOTHING

    def describe(
        self, entry: TimedFunction, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> dict[str, Any]:
        """Why moving indices waits."""
        if not entry.target.path.endswith("move_indices"):
            return {}
        backend = getattr(args[0], "io_backend", "")
        cause = {"kernel": "indices are uploaded from pageable memory", "direct": "device indices are fetched: a sync"}
        return {"cause": cause.get(backend, ""), "direction": "both"}


ADAPTERS = (Transfers, Controller, Storage, Offload, MemoryOccupation, Steps)
