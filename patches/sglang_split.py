"""SGLang HiCache, kernel back end: a write-back that is larger than its launch queue, in parts on several streams.

The staged write-back makes a copy a page and buffer behind a forward's fence: a burst of more than the queue takes
blocks the scheduler's thread until the forward ends, whichever stream it is on. That back end has the GPU rearrange
rows first, which no copy by address does as well, so the submitter is no cure here; a stream more for every queue full
is. Index tensors are cut between pages, and SGLang's own submission is called once a part.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvprobe.instrument.hooks import Call
from kvprobe.instrument.submissions import Rung
from kvprobe.instrument.transfers import CopyPath, WatchedTransfer

from .sglang_copies import Work

if TYPE_CHECKING:
    from kvprobe.instrument.handover import CopyAdapter

SPLIT = Rung("split", "own")

_OWN_PLACES = 8  # events and waits of one part of a burst
_FULL = 0.9  # of a queue: what is outstanding is known only at the last poll, and SGLang's own streams share channels


class Split:
    """Stores of an engine's, whole on SGLang's stream or in parts on kvprobe's, in the order they came."""

    def __init__(self, adapter: CopyAdapter) -> None:
        """`adapter` gives torch, and says what finds no slot."""
        self.adapter = adapter
        self._last: dict[int, tuple[Any, Any]] = {}  # by engine: engine, newest event
        self._told: set[int] = set()

    def submit(self, call: Call, engine: Any, path: CopyPath, transfers: Any, works: list[Work]) -> Any:
        """The completion of a burst.

        Parts run one after the other, as on one stream. They must: the staged write-back brings every chunk of 64
        pages into the same buffer on the GPU (`staging_k_buffer` and its like, which pools of a model may share) and
        nothing but the order of its stream keeps a chunk from overwriting one that is still being copied out.
        Each completion implies all earlier ones, of its burst and of the bursts before: SGLang keeps only the newest
        a direction (`set_hicache_transfer_done_event`) and counts acknowledgements in order.
        """
        parts, streams = [transfers], [engine.device_to_host_stream]
        try:
            if path.current is not None and path.current.rung == SPLIT:
                parts = self.parts(path, transfers, works)
                streams = self.take(path, path.current, len(parts))
            completion = self._run(call, engine, path, parts, streams)
        except BaseException:
            path.abandon()
            raise
        if path.current is not None:
            path.current.stream = streams[-1].cuda_stream
            path.current.extra["streams"] = len(parts)
        return completion

    def _run(self, call: Call, engine: Any, path: CopyPath, parts: list[Any], streams: list[Any]) -> Any:
        """One call of SGLang's own function a part, on the part's stream; the completion of them all."""
        own, completion, number = engine.device_to_host_stream, None, 0
        kwargs = {name: value for name, value in call.kwargs.items() if name != "transfers"}

        def again(part: Any) -> Any:
            return call.part(engine, part, *call.args[2:], **kwargs)

        try:
            for part, stream in zip(parts, streams, strict=True):
                if stream is not own and not number:
                    stream.wait_stream(own)  # the fence that the controller put there; later parts wait for this one
                if id(engine) in self._last:
                    stream.wait_event(self._last[id(engine)][1])
                if not number:
                    path.first(stream.cuda_stream)
                engine.device_to_host_stream = stream
                newest = call() if len(parts) == 1 else again(part)
                number += 1
                completion = newest if completion is None else newest._replace(start_event=completion.start_event)
                self._last[id(engine)] = engine, completion.finish_event
        except Exception as error:
            engine.device_to_host_stream = own
            if completion is not None:
                self._salvage(call, error, completion, [t for part in parts[number:] for t in part], again)
            raise
        finally:
            engine.device_to_host_stream = own
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

    def take(self, path: CopyPath, live: WatchedTransfer, count: int) -> list[Any]:
        """Streams of kvprobe's pool, distinct as long as there are enough, until the transfer ends."""
        assert path.device is not None
        live.taken.extend(path.device.streams.take() for _ in range(count))
        return [path.device.torch_stream(self.adapter.module.torch, handle) for handle in live.taken]

    def parts(self, path: CopyPath, transfers: Any, works: list[Work]) -> list[Any]:
        """The transfers in their order, in as few parts as fit into a queue each; says what finds no slot.

        As few, because a part that waits for a forward holds its channel against all other streams on it.
        """
        assert path.device is not None
        limits = path.device.limits
        wanted = sum(w.places for w in works)
        size = max(1, int(_FULL * limits.capacity / limits.channels) - _OWN_PLACES)
        parts, largest = cut(transfers, works, size) if wanted > size else ([transfers], wanted)
        over = int(max(wanted + path.outstanding - _FULL * limits.capacity, largest - _FULL * limits.depth))
        if over > 0:
            self._tell(path, wanted, min(over, wanted), len(parts))
        return parts

    def _tell(self, path: CopyPath, wanted: int, over: int, parts: int) -> None:
        """Name what no stream can cure, once for bursts of about this size."""
        if wanted.bit_length() in self._told:
            return
        self._told.add(wanted.bit_length())
        assert path.device is not None
        limits = path.device.limits
        if parts == 1:
            why = "this pool's transfers are not cut: a larger --page-size makes fewer copies"
        else:
            why = "raise CUDA_DEVICE_MAX_CONNECTIONS (32 at most), or --page-size so that a page has 128 KiB"
        told = f"store: of a burst of {wanted} operations some {over} find no free slot in {limits.channels} "
        told += f"channels of {limits.depth}: the scheduler's thread waits for it; {why}"
        outstanding = path.outstanding
        self.adapter.decide("note", told, direction="store", operations=wanted, over=over, outstanding=outstanding)

    def step_aside(self) -> None:
        """What follows on the engines' own streams comes after what is on others."""
        for engine, event in self._last.values():
            engine.device_to_host_stream.wait_event(event)
        self._last.clear()


def cut(transfers: Any, works: list[Work], size: int) -> tuple[list[list[Any]], int]:
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
