"""SGLang HiCache (0.5.20 on): `L2TransferEngine` and `HiCacheController`.

Carried by the entry point `sglang.srt.plugins` into every rank. The plug-in's own HookRegistry cannot take a hook
back, so kvprobe patches the same functions with its own frame, which can.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

from kvprobe.instrument.adapter import Adapter, Target
from kvprobe.instrument.calls import Timed, TimedCalls, timed
from kvprobe.instrument.device import device_of
from kvprobe.instrument.hooks import Call, Patcher
from kvprobe.instrument.submissions import Rung
from kvprobe.instrument.transfers import CopyPath

from .sglang_offload import Offload, Storage

_ENGINE = "sglang.srt.mem_cache.l2_transfer"
_CONTROLLER = "sglang.srt.managers.cache_controller"
_BATCHED_PAGE_BYTES = 128 * 1024  # smaller pages are copied one by one (staged_write_back.cuh)
_STAGING = ("staging_k_buffer", "staging_v_buffer", "staging_buffer", "k_scale_staging", "v_scale_staging")
_DESCRIPTORS_A_PLACE = 8  # of a batch: a queue of 1,021 places took 8,168 copies in batches of 8, more in larger ones
_OWN_PLACES = 8  # events and waits of one part of a burst
_FULL = 0.9  # of a queue: what is outstanding is known only at the last poll, and SGLang's own streams share channels


_OWN = Rung("shared", "own")  # SGLang's own copies, whichever back end makes them


class Work(NamedTuple):
    """What one transfer asks of a launch queue, estimated from pool, layout and backend.

    Attributes:
        copies: pieces, or launches where a kernel copies.
        places: operations in the queue: copies, relayout kernels, batches by their length.
        unit: tokens that stay together where a transfer is cut (a page); 0 where it is not cut.
    """

    copies: int
    places: int
    unit: int


class Transfers(Adapter):
    """The copy engine: one shared stream a direction, submission on the scheduler's thread."""

    name, versions = "sglang.l2_transfer", ">=0.5.21,<0.6"
    summary = "Times every burst of L2TransferEngine: submit (on the scheduler's thread), queue wait, copy, poll delay."
    changes = (
        "when the launch queue is full, loads go to pooled streams and stores are split over as many as they need, "
        "each part after the fence and all before it; refused where pools translate indices or share host layouts."
    )
    rungs = {"load": (_OWN, Rung("pooled", "own")), "store": (_OWN, Rung("split", "own"))}
    targets = (
        Target(_ENGINE, "L2TransferEngine.__init__"),
        Target(_ENGINE, "L2TransferEngine.submit_device_to_host", ("transfers",)),
        Target(_ENGINE, "L2TransferEngine.submit_host_to_device", ("transfers", "transfer_layer_id_max")),
        Target(_ENGINE, "shared_host_layout_domains"),
    )

    def __init__(self) -> None:
        super().__init__()
        self.paths: dict[str, CopyPath] = {}
        self.module: Any = None
        self._pending: deque[tuple[CopyPath, int, Any, list[int]]] = deque()
        self._last: dict[tuple[int, str], tuple[Any, Any]] = {}  # by engine and stream attribute: engine, newest event
        self._told: set[tuple[str, int]] = set()
        self._job = 0

    def patch(self, patcher: Patcher, module: ModuleType) -> None:
        """Wrap both submissions, and the constructor to fill pools before traffic starts."""
        self.module = module
        engine = module.L2TransferEngine
        patcher.wrap(engine, "__init__", self.made)
        patcher.wrap(engine, "submit_device_to_host", self.hook("store", "device_to_host_stream"))
        patcher.wrap(engine, "submit_host_to_device", self.hook("load", "host_to_device_stream"))

    def made(self, call: Call, engine: Any, *args: Any, **kwargs: Any) -> Any:
        """Around the engine's constructor: the device is set, and the scheduler's thread can spare 50 ms now."""
        result = call()
        for direction in self.rungs:
            self.path(direction)
        return result

    def path(self, direction: str) -> CopyPath:
        """The path of a direction; made here if its engine was there before kvprobe."""
        if direction not in self.paths:
            device = device_of()
            if device is not None and self.fix == "auto":
                device.prepare()
            self.paths[direction] = CopyPath(self, direction, device, self.rungs[direction])
        return self.paths[direction]

    def hook(self, direction: str, attribute: str) -> Any:
        """Around one of the two submissions."""

        def around(call: Call, engine: Any, transfers: Any, *args: Any, **kwargs: Any) -> Any:
            self.poll()
            path = self.path(direction)
            self._job += 1
            live = path.begin(self._job)
            works = [self.work(t, direction, engine) for t in transfers]
            parts, streams = [transfers], [getattr(engine, attribute)]
            taken: list[int] = []
            try:
                if live.rung != _OWN and self.may_swap(path, transfers):
                    parts = self.parts(path, transfers, works)
                    streams = self.take(path, len(parts), taken)
                else:
                    live.rung = _OWN

                def again(part: Any) -> Any:
                    return call.part(engine, part, *args, **kwargs)

                completion = self.submit(call, engine, attribute, path, parts, streams, again)
            except BaseException:
                path.abandon()
                self.give(path, taken)
                raise
            took = time.monotonic_ns() - live.first_ns
            self._pending.append((path, live.job, completion, taken))
            live.stream = streams[-1].cuda_stream
            path.add(took, sum(w.copies for w in works), self.size(transfers), 0)
            live.extra["tokens"] = sum(len(t.host_indices) for t in transfers)
            live.extra["streams"] = len(parts)
            path.submitted(events=_events(completion))
            return completion

        return around

    def submit(
        self,
        call: Call,
        engine: Any,
        attribute: str,
        path: CopyPath,
        parts: list[Any],
        streams: list[Any],
        again: Callable[[Any], Any],
    ) -> Any:
        """One call of SGLang's own function a part, on the part's stream; the completion of them all.

        Parts run one after the other, as on one stream. They must: the staged write-back brings every chunk of 64
        pages into the same buffer on the GPU (`staging_k_buffer` and its like, which pools of a model may share) and
        nothing but the order of its stream keeps a chunk from overwriting one that is still being copied out.
        Each completion implies all earlier ones, of its burst and of the bursts before: SGLang keeps only the newest
        a direction (`set_hicache_transfer_done_event`) and counts acknowledgements in order.
        """
        own, key = getattr(engine, attribute), (id(engine), attribute)
        completion: Any = None
        number = 0
        try:
            for part, stream in zip(parts, streams, strict=True):
                if stream is not own and not number:
                    stream.wait_stream(own)  # the fence that the controller put there; later parts wait for this one
                if key in self._last:
                    stream.wait_event(self._last[key][1])
                if not number:
                    path.first(stream.cuda_stream)
                setattr(engine, attribute, stream)
                newest = call() if len(parts) == 1 else again(part)
                number += 1
                completion = newest if completion is None else newest._replace(start_event=completion.start_event)
                if self.fix == "auto":
                    self._last[key] = engine, completion.finish_event
        except Exception as error:
            setattr(engine, attribute, own)
            if completion is not None:
                self._salvage(call, error, completion, [t for part in parts[number:] for t in part], again)
            raise
        finally:
            setattr(engine, attribute, own)
        return completion

    @staticmethod
    def _salvage(call: Call, error: Exception, completion: Any, rest: list[Any], again: Callable[[Any], Any]) -> None:
        """After a failure between two parts: nothing stays in flight, and nothing is left out by a mistake of ours.

        SGLang frees the slots of a burst whose submission raised, as nothing of it runs any more; so its exception
        waits for the parts before. After an exception of kvprobe's, the rest goes SGLang's own way.
        """
        with contextlib.suppress(Exception):
            completion.finish_event.synchronize()
        if error is not call.error and rest:
            call.result = again(rest)._replace(start_event=completion.start_event)

    def poll(self) -> None:
        """Notice bursts that have ended; called at every submission, which is once a scheduler step."""
        for _ in range(len(self._pending)):
            path, job, completion, taken = self._pending.popleft()
            if completion.finish_event.query():
                path.done(job)
                self.give(path, taken)
            else:
                self._pending.append((path, job, completion, taken))

    def may_swap(self, path: CopyPath, transfers: Any) -> bool:
        """Not where a pool translates indices (unified allocators) or shares its host layout: they assume one FIFO."""
        if path.device is None or path.auto is None:
            return False
        unified = any(getattr(t.device_pool, "host_transfer_translate", None) is not None for t in transfers)
        if not unified and not self.module.shared_host_layout_domains(t.host_pool for t in transfers):
            return True
        path.auto.refuse(path.auto.rung, "these pools rely on one stream a direction: streams are not changed")
        return False

    def take(self, path: CopyPath, count: int, taken: list[int]) -> list[Any]:
        """Streams of kvprobe's pool, distinct as long as there are enough; into `taken` what is to be given back."""
        assert path.device is not None
        taken.extend(path.device.streams.take() for _ in range(count))
        return [path.device.torch_stream(self.module.torch, handle) for handle in taken]

    @staticmethod
    def give(path: CopyPath, taken: list[int]) -> None:
        """Streams back to the pool."""
        for handle in taken:
            path.device.streams.give(handle)  # type: ignore[union-attr]  # it is where they came from

    def parts(self, path: CopyPath, transfers: Any, works: list[Work]) -> list[Any]:
        """The transfers in their order, in as few parts as fit into a queue each; says what finds no room.

        As few, because a part that waits for a forward holds its channel against all other streams on it.
        """
        assert path.device is not None
        limits = path.device.limits
        wanted = sum(w.places for w in works)
        size = max(1, int(_FULL * limits.capacity / limits.channels) - _OWN_PLACES)
        cut = wanted > size and path.direction == "store"
        parts, largest = _cut(transfers, works, size) if cut else ([transfers], wanted)
        over = int(max(wanted + path.outstanding - _FULL * limits.capacity, largest - _FULL * limits.depth))
        if over > 0:
            self._tell(path, wanted, min(over, wanted), len(parts))
        return parts

    def _tell(self, path: CopyPath, wanted: int, over: int, parts: int) -> None:
        """Name what no stream can cure, once for bursts of about this size."""
        key = path.direction, wanted.bit_length()
        if key in self._told:
            return
        self._told.add(key)
        assert path.device is not None
        limits = path.device.limits
        if path.direction == "load":
            why = "a load is not split (a layer's event follows its copies): --hicache-io-backend kernel launches once"
        elif parts == 1:
            why = "this pool's transfers are not cut: a larger --page-size makes fewer copies"
        else:
            why = "raise CUDA_DEVICE_MAX_CONNECTIONS (32 at most), or --page-size so that a page has 128 KiB"
        told = f"{path.direction}: of a burst of {wanted} operations some {over} find no room in {limits.channels} "
        told += f"channels of {limits.depth}: the scheduler's thread waits for it; {why}"
        self.decide("note", told, direction=path.direction, operations=wanted, over=over, outstanding=path.outstanding)

    @staticmethod
    def work(transfer: Any, direction: str, engine: Any) -> Work:
        """What a transfer becomes.

        The kernel backend loads with a launch a layer and writes back with one launch, or staged: chunk by chunk a
        relayout kernel and then a copy a page and buffer, or a batch where pages are large. The direct backend makes a
        copy a layer, run and buffer, or batches where the layout is page_first_direct.
        """
        pool, tokens = transfer.host_pool, len(transfer.host_indices)
        layers = int(getattr(pool, "layer_num", 1) or 1)
        page = int(getattr(pool, "page_size", 1) or 1) * int(getattr(pool, "dcp_size", 1) or 1)
        pages = -(-tokens // page)
        # Pools of which it is known that each page is copied for itself say how many tokens a staged chunk has.
        whole = hasattr(pool, "staging_token_capacity") and len(transfer.device_indices) == tokens
        unit = page if direction == "store" and whole else 0
        if not tokens:
            return Work(0, 0, 0)
        if engine.io_backend == "direct":
            buffers = 2 if hasattr(pool, "v_buffer") else 1
            if getattr(pool, "layout", "") == "page_first_direct":
                copies = buffers * layers * pages
                return Work(copies, -(-copies // _DESCRIPTORS_A_PLACE), unit)
            copies = buffers * layers * _runs(transfer.host_indices, transfer.device_indices)
            return Work(copies, copies, unit)
        if direction == "load":
            return Work(layers, layers, 0)
        if not getattr(pool, "can_use_write_back_jit", False):
            return Work(1, 1, 0)
        staging = [buffer for name in _STAGING if (buffer := getattr(pool, name, None)) is not None]
        if not staging:
            return Work(2 * pages, 2 * pages, unit)
        places = 0
        for buffer in staging:
            chunk = int(getattr(pool, "staging_page_capacity", 0) or len(buffer))
            batched = buffer.nbytes // chunk >= _BATCHED_PAGE_BYTES
            places += -(-pages // chunk) + (-(-pages // _DESCRIPTORS_A_PLACE) if batched else pages)
        return Work(pages * len(staging), places, unit)

    @staticmethod
    def size(transfers: Any) -> int:
        """Bytes, where the pools say how large a token is."""
        return sum(len(t.host_indices) * int(getattr(t.host_pool, "size_per_token", 0) or 0) for t in transfers)

    def step_aside(self) -> None:
        """What follows on the engine's own streams comes after what is on pooled ones."""
        for (_, attribute), (engine, event) in self._last.items():
            getattr(engine, attribute).wait_event(event)
        self._last.clear()
        for path, _, _, taken in self._pending:
            self.give(path, taken)
        self._pending.clear()
        for path in self.paths.values():
            path.forget()


def _events(completion: Any) -> tuple[int, int] | None:
    """Handles of SGLang's own timing events: it records the first behind its wait for compute, which ours cannot be."""
    if not completion.timing_enabled:
        return None
    start, finish = (getattr(event, "cuda_event", None) for event in (completion.start_event, completion.finish_event))
    return (start, finish) if isinstance(start, int) and isinstance(finish, int) else None


def _runs(left: Any, right: Any) -> int:
    """Pieces of two index tensors in which both count up by one."""
    return 1 + int(((left.diff() != 1) | (right.diff() != 1)).sum())


def _cut(transfers: Any, works: list[Work], size: int) -> tuple[list[list[Any]], int]:
    """Transfers in parts of at most `size` places, cut between pages, and the places of the largest part."""
    parts: list[list[Any]] = [[]]
    used = [0.0]
    for transfer, work in zip(transfers, works, strict=True):
        tokens = len(transfer.host_indices)
        unit = work.unit or max(1, tokens)
        units = max(1, -(-tokens // unit))
        each = max(work.places / units, 1e-9)
        start = 0
        while start < units:
            fit = min(units - start, int((size - used[-1]) / each))
            if fit < 1 and parts[-1]:
                parts.append([])
                used.append(0.0)
                continue
            stop = start + max(1, fit)  # a page that is larger than a part is one
            piece = slice(start * unit, stop * unit)
            parts[-1].append(
                transfer
                if stop - start == units
                else transfer._replace(
                    host_indices=transfer.host_indices[piece], device_indices=transfer.device_indices[piece]
                )
            )
            used[-1] += (stop - start) * each
            start = stop
    return parts, int(max(used))


class Controller(TimedCalls):
    """What the scheduler's thread spends in HiCacheController."""

    name = "sglang.cache_controller"
    summary = "Times HiCacheController.start_loading, start_writing and move_indices on the scheduler's thread."
    timed = (
        timed(_CONTROLLER, "HiCacheController.start_loading", (), "load", "a layer's copies are enqueued one by one"),
        timed(_CONTROLLER, "HiCacheController.start_writing", (), "store", "fence first, then two copies a token"),
        timed(_CONTROLLER, "HiCacheController.move_indices", ("host_indices", "device_indices"), "both"),
    )

    def describe(self, entry: Timed, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> dict[str, Any]:
        """Why moving indices waits."""
        if not entry.target.path.endswith("move_indices"):
            return {}
        backend = getattr(args[0], "io_backend", "")
        cause = {"kernel": "indices are uploaded from pageable memory", "direct": "device indices are fetched: a sync"}
        return {"cause": cause.get(backend, ""), "direction": "both"}


ADAPTERS = (Transfers, Controller, Storage, Offload)
