"""vLLM's weight offloaders: what a layer's copy took, how long the compute stream stood for it, what UVA hides.

Measured, never changed. `PrefetchOffloader` copies a layer's parameters one by one on one stream; `UVAOffloader` lets
kernels read pinned memory over the link, so that no profile shows a copy.
"""

from __future__ import annotations

from collections import deque
from types import ModuleType
from typing import Any

from kvprobe.instrument import event_log
from kvprobe.instrument.calls import TimedCalls, TimedFunction, timed
from kvprobe.instrument.device import device_of
from kvprobe.instrument.hooks import Call, Patcher

_PREFETCH, _UVA = "vllm.model_executor.offloader.prefetch", "vllm.model_executor.offloader.uva"


class _Layer:
    """A layer's copy in flight: events where it could start, where it ended, and around the wait for it."""

    __slots__ = ("bytes", "copies", "end", "fork", "index", "waited", "waiting")

    def __init__(self, index: int, events: list[int]) -> None:
        self.index = index
        self.fork, self.end, self.waiting, self.waited = events
        self.bytes = self.copies = 0


class WeightPrefetch(TimedCalls):
    """`--offload-backend prefetch`."""

    name, versions = "vllm.weight_prefetch", ">=0.17,<0.34"
    option = "--offload-backend prefetch"
    summary = "Times the prefetch of weights per layer: copy, exposed wait of the compute stream, hidden share."
    timed = (
        timed(_PREFETCH, "_ModuleOffloader.start_onload_to_static", (), "load"),
        timed(_PREFETCH, "PrefetchOffloader._wait_for_layer", ("layer_idx",), "load"),
    )

    def __init__(self) -> None:
        super().__init__()
        self._waiting: dict[int, _Layer] = {}  # submitted, not yet waited for; by layer
        self._ended: deque[_Layer] = deque()
        self._torch: Any = None
        self._copied_ns = 0  # when the newest copy ended

    def patch(self, patcher: Patcher, module: ModuleType) -> None:
        """Events around the copies and the waits; vLLM's own are untouched."""
        self._torch = module.torch
        patcher.wrap(module._ModuleOffloader, "start_onload_to_static", self.onload)
        patcher.wrap(module.PrefetchOffloader, "_wait_for_layer", self.wait)

    def onload(self, call: Call, offloader: Any, *args: Any, **kwargs: Any) -> Any:
        """Around the copies of one layer."""
        device, stream = self._measured()
        events = device.timing.take_many(4) if device is not None and len(device.timing) >= 4 else []
        if device is None or not events:
            return call()
        layer = _Layer(int(offloader.layer_idx), events)
        held = [one._cpu_storage for one in offloader._param_offloaders.values()]
        layer.bytes = sum(int(t.numel()) * int(t.element_size()) for t in held if t is not None)
        layer.copies = len(held)
        device.runtime.event_record(layer.fork, stream)
        try:
            result = call()
        except BaseException:
            self._give(layer)
            raise
        device.runtime.event_record(layer.end, int(offloader.copy_stream.cuda_stream))
        unused = self._waiting.pop(layer.index, None)
        if unused is not None:
            self._give(unused)
        self._waiting[layer.index] = layer
        return result

    def wait(self, call: Call, offloader: Any, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """Around the compute stream's wait for a layer."""
        device, stream = self._measured()
        layer = self._waiting.pop(layer_idx, None) if device is not None else None
        if device is None or layer is None:
            return call()
        device.runtime.event_record(layer.waiting, stream)
        result = call()
        device.runtime.event_record(layer.waited, stream)
        self._ended.append(layer)
        self._tell(device)
        return result

    def _measured(self) -> tuple[Any, int]:
        """The device and the compute stream; no device during the capture of a graph, which would hold the events."""
        device = device_of() if event_log.wanted() else None
        if device is None or self._torch.cuda.is_current_stream_capturing():
            return None, 0
        return device, int(self._torch.cuda.current_stream().cuda_stream)

    def _tell(self, device: Any) -> None:
        """One event for each layer that the device has passed."""
        runtime = device.runtime
        while self._ended and runtime.event_query(self._ended[0].waited):
            layer = self._ended.popleft()
            started, ended = device.clock.host_ns(layer.fork), device.clock.host_ns(layer.end)
            wait_ns = runtime.event_elapsed_ms(layer.waiting, layer.waited) * 1e6
            if started is None or ended is None:
                self._give(layer)
                continue
            # one stream: it began when the copy before it had ended
            copy_ns = ended - min(max(started, self._copied_ns), ended)
            self._copied_ns = ended
            hidden = min(max(1 - wait_ns / copy_ns, 0.0), 1.0) if copy_ns > 0 else 1.0
            event_log.emit(
                "call",
                adapter=self.name,
                server=self.server,
                call="weights.layer",
                direction="load",
                layer=layer.index,
                bytes=layer.bytes,
                copies=layer.copies,
                dur_ns=int(copy_ns),
                wait_ns=int(wait_ns),
                hidden=round(hidden, 3),
                thread=0,
                cause="the compute stream waits for the layer's weights" if hidden < 0.5 else "",
            )
            self._give(layer)

    def _give(self, layer: _Layer) -> None:
        """Events back to the pool."""
        device = device_of()
        if device is None:
            return
        for event in (layer.fork, layer.end, layer.waiting, layer.waited):
            device.timing.give(event)

    def step_aside(self) -> None:
        """Events of layers in flight go back."""
        for layer in (*self._waiting.values(), *self._ended):
            self._give(layer)
        self._waiting.clear()
        self._ended.clear()


class WeightUva(TimedCalls):
    """`--offload-backend uva` and `--cpu-offload-gb`."""

    name, versions = "vllm.weight_uva", ">=0.17,<0.34"
    option = "--offload-backend uva or --cpu-offload-gb"
    summary = "Says how many bytes of weights stay in CPU memory, and whether kernels read them there."
    timed = (timed(_UVA, "UVAOffloader._maybe_offload_to_cpu", ("module",), "store"),)

    def before(self, entry: TimedFunction, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """How much was offloaded already."""
        return args[0], int(args[0].cpu_offload_bytes)

    def after(self, entry: TimedFunction, remembered: Any) -> dict[str, Any]:
        """What this module adds, and what it will cost."""
        offloader, had = remembered
        if offloader.uva_offloading:
            cause = "kernels read these weights over the link: slow kernels, and no copy in any profile"
        else:
            cause = "copied on the compute stream in every forward: nothing hides it"
        added = int(offloader.cpu_offload_bytes) - had
        return {"bytes": added, "cause": cause if added else ""}
