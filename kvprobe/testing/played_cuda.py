"""torch.cuda over the embedded host runtime: streams, events, and what a program asks a device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvprobe.testing.played_torch import PlayedTorch

__all__ = ["cuda_names"]


class _Device:
    """torch.cuda.device: there is one."""

    def __init__(self, device: Any) -> None:
        self.idx = 0

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


class _StreamContext:
    """torch.cuda.stream(...): None changes nothing."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        if self.stream is not None:
            self.stream.__enter__()

    def __exit__(self, *_: object) -> None:
        if self.stream is not None:
            self.stream.__exit__()


def _event_type(play: PlayedTorch) -> type[Any]:
    runtime = play.runtime

    class Event:
        """torch.cuda.Event."""

        def __init__(self, enable_timing: bool = False, **_: Any) -> None:
            self._timing, self.cuda_event = enable_timing, 0
            self.device = play.device

        def record(self, stream: Any = None) -> None:
            if not self.cuda_event:
                self.cuda_event = runtime.event_create(timing=self._timing)
            runtime.event_record(self.cuda_event, play.stream if stream is None else stream.cuda_stream)

        def wait(self, stream: Any = None) -> None:
            if self.cuda_event:
                runtime.stream_wait_event(play.stream if stream is None else stream.cuda_stream, self.cuda_event)

        def query(self) -> bool:
            return not self.cuda_event or runtime.event_query(self.cuda_event)

        def synchronize(self) -> None:
            if self.cuda_event:
                runtime.event_synchronize(self.cuda_event)

        def elapsed_time(self, end: Any) -> float:
            return runtime.event_elapsed_ms(self.cuda_event, end.cuda_event)

    return Event


def _stream_types(play: PlayedTorch, event_type: type[Any]) -> tuple[type[Any], type[Any]]:
    """torch.cuda.Stream and torch.cuda.ExternalStream."""
    runtime, local = play.runtime, play._local

    class Stream:
        """torch.cuda.Stream."""

        def __init__(self, device: Any = None, priority: int = 0, **given: Any) -> None:
            self.cuda_stream = given["stream_ptr"] if "stream_ptr" in given else runtime.stream_create()
            self.device, self.device_index, self.device_type = play.device, 0, 1
            self.stream_id = self.cuda_stream

        def wait_event(self, event: Any) -> None:
            event.wait(self)

        def wait_stream(self, other: Any) -> None:
            other.record_event().wait(self)

        def record_event(self, event: Any = None) -> Any:
            event = event or event_type()
            event.record(self)
            return event

        def synchronize(self) -> None:
            runtime.stream_synchronize(self.cuda_stream)

        def query(self) -> bool:
            return runtime.stream_query(self.cuda_stream)

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Stream) and other.cuda_stream == self.cuda_stream

        def __hash__(self) -> int:
            return hash(self.cuda_stream)

        def __enter__(self) -> Any:
            self._before = play.stream
            local.stream = self.cuda_stream
            return self

        def __exit__(self, *_: object) -> None:
            local.stream = self._before

    class ExternalStream(Stream):
        """torch.cuda.ExternalStream."""

        def __init__(self, stream_ptr: int, device: Any = None, **_: Any) -> None:
            super().__init__(stream_ptr=stream_ptr)

    return Stream, ExternalStream


def cuda_names(play: PlayedTorch) -> dict[str, Any]:
    """Names of torch.cuda, played."""
    runtime, local, torch = play.runtime, play._local, play.torch
    event_type = _event_type(play)
    stream_type, external_stream_type = _stream_types(play, event_type)

    def set_stream(stream: Any) -> None:
        local.stream = stream.cuda_stream

    def always(answer: Any) -> Any:  # a function for each name: torch's compiler wants them apart
        return lambda *_, **__: answer

    properties = SimpleNamespace(
        name="kvprobe's host runtime", major=9, minor=0, total_memory=8 << 30, multi_processor_count=1, warp_size=32
    )
    nothing = ["_lazy_init", "init", "set_device", "empty_cache", "ipc_collect", "manual_seed", "manual_seed_all"]
    nothing += ["reset_peak_memory_stats", "reset_max_memory_allocated"]
    return {
        **{name: always(None) for name in nothing},
        **{name: always(True) for name in ("is_available", "is_initialized")},
        **{name: always(0) for name in ("current_device", "memory_reserved", "max_memory_reserved")},
        "device_count": lambda: 1,
        "memory_allocated": lambda *_: play.memory.bytes,
        "max_memory_allocated": lambda *_: play.memory.bytes,
        "mem_get_info": lambda *_: runtime.mem_info(),
        "get_device_properties": lambda *_: properties,
        "get_device_capability": lambda *_: (9, 0),
        "get_device_name": lambda *_: properties.name,
        "is_current_stream_capturing": lambda: False,
        "synchronize": lambda *_: runtime.synchronize(),
        "get_rng_state": lambda *_: torch.get_rng_state(),
        "set_rng_state": lambda state, *_: torch.set_rng_state(state),
        "Stream": stream_type,
        "ExternalStream": external_stream_type,
        "Event": event_type,
        "device": _Device,
        "stream": _StreamContext,
        "StreamContext": _StreamContext,
        "set_stream": set_stream,
        "current_stream": lambda *_, **__: stream_type(stream_ptr=play.stream),
        "default_stream": lambda *_, **__: stream_type(stream_ptr=0),
    }
