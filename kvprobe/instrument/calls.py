"""Adapters that only measure: every call of a server's copying function becomes one event with its host time."""

from __future__ import annotations

import contextlib
import inspect
import threading
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from types import ModuleType
from typing import Any, ClassVar, TypeAlias

from kvprobe.instrument import event_log, metrics, nvtx_marks
from kvprobe.instrument.adapter import Adapter, Target
from kvprobe.instrument.hooks import Call, Patcher

__all__ = ["NOTHING", "Fields", "TimedCalls", "TimedFunction"]

NOTHING = object()  # what `before` and `after` return of a call that moves nothing: it is no event


@dataclass(frozen=True)
class TimedFunction:
    """A function to time.

    Attributes:
        target: which.
        direction: `load`, `store`, or `both`.
        cause: why the calling thread waits inside it, in words; empty where it does not as a rule.
    """

    target: Target
    direction: str
    cause: str = ""


def timed(module: str, path: str, parameters: tuple[str, ...] | None, direction: str, cause: str = "") -> TimedFunction:
    """Shorthand for a table of `TimedFunction`."""
    return TimedFunction(Target(module, path, parameters), direction, cause)


Fields: TypeAlias = dict[str, Any] | Callable[[], dict[str, Any]]
_NO_RANGE = contextlib.nullcontext()


class _Open:
    """A timed call that is running: whose, its name, what `before` remembered, and what timed calls inside moved."""

    __slots__ = ("adapter", "bytes", "call", "outer", "remembered")

    def __init__(self, adapter: TimedCalls, call: str, remembered: Any, outer: _Open | None) -> None:
        self.adapter, self.call, self.remembered, self.outer, self.bytes = adapter, call, remembered, outer, 0


_thread = (
    threading.local()
)  # `open`: the innermost timed call of any adapter, for one server's functions call another's


class TimedCalls(Adapter):
    """Subclasses list functions in `timed` and say in `describe` what a call moved.

    Attributes:
        apart: none of these calls is inside another one, or needs `before` or `after`: then they cost less.
    """

    timed: ClassVar[tuple[TimedFunction, ...]]
    apart: ClassVar[bool] = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """The targets are the functions to time, and what a subclass adds."""
        super().__init_subclass__(**kwargs)
        if "timed" in vars(cls):
            cls.targets = tuple(entry.target for entry in cls.timed) + tuple(vars(cls).get("targets", ()))

    def patch(self, patcher: Patcher, module: ModuleType) -> None:
        """Put a timer around every listed function of this module."""
        for entry in self.timed:
            if entry.target.module != module.__name__:
                continue
            owner: Any = module
            *path, name = entry.target.path.split(".")
            for part in path:
                owner = getattr(owner, part)
            raw = inspect.getattr_static(owner, name)
            stepwise = inspect.isgeneratorfunction(inspect.unwrap(getattr(raw, "__func__", raw)))
            if self.apart and not stepwise and not nvtx_marks.listening():
                patcher.watch(owner, name, self._behind(entry))
            else:
                patcher.wrap(owner, name, self._stepwise(entry) if stepwise else self._whole(entry))

    def describe(self, entry: TimedFunction, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Fields:
        """Fields for the event: `bytes`, `copies`, `cause`, and others. Called after the server's function.

        Or a function that finds them, on kvprobe's own thread as a rule. `args` and `kwargs` are as the caller gave
        them; of a method `args[0]` is the object.
        """
        return {}

    def before(self, entry: TimedFunction, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Something to remember from before the call, handed to `after`; or NOTHING."""

    def after(self, entry: TimedFunction, remembered: Any) -> Any:
        """Fields for the event out of what `before` returned; or NOTHING."""
        return {}

    def heard(self) -> bool:
        """Whether anybody would learn of an event."""
        return event_log.wanted() or nvtx_marks.listening() or metrics.exposed()

    def running(self) -> Any:
        """What `before` returned for the timed call of this adapter that this thread is in; None outside one."""
        mine: _Open | None = getattr(_thread, "open", None)
        while mine is not None and mine.adapter is not self:
            mine = mine.outer
        return mine.remembered if mine is not None else None

    def _whole(self, entry: TimedFunction) -> Callable[..., Any]:
        # a tool injects itself when the process starts
        marks = f"{self.server} {entry.target.path}" if nvtx_marks.listening() else ""

        def hook(call: Call, *args: Any, **kwargs: Any) -> Any:
            if not self.heard():
                return call()
            remembered = self.before(entry, args, kwargs)
            if remembered is NOTHING:
                return call()
            outer: _Open | None = getattr(_thread, "open", None)
            mine = _thread.open = _Open(self, entry.target.path, remembered, outer)
            with nvtx_marks.Range(marks) if marks else _NO_RANGE:
                start = time.monotonic_ns()
                try:
                    result = call()
                finally:
                    took = time.monotonic_ns() - start
                    _thread.open = outer
            after = self.after(entry, remembered)
            if after is NOTHING:
                return result
            fields = {**_made(self.describe(entry, args, kwargs, result)), **after}
            if mine.bytes and not fields.get("bytes"):
                fields["bytes"] = mine.bytes
            if outer is not None:  # the same bytes: the call around this one counts them
                outer.bytes += int(fields.pop("bytes", 0) or 0)
                fields["inside"] = outer.call
            self._emit(entry, took, fields)
            return result

        return hook

    def _behind(self, entry: TimedFunction) -> Callable[..., None]:
        def note(began_ns: int, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self.heard():
                self._emit(entry, time.monotonic_ns() - began_ns, self.describe(entry, args, kwargs, result))

        return note

    def _stepwise(self, entry: TimedFunction) -> Callable[..., Any]:
        """For a generator: the time inside its steps, not between them."""

        def hook(call: Call, *args: Any, **kwargs: Any) -> Any:
            inner = call()
            if not event_log.wanted():
                return inner
            return self._steps(entry, inner, args, kwargs)

        return hook

    def _steps(
        self, entry: TimedFunction, inner: Generator[Any, Any, Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Generator[Any, Any, Any]:
        took = steps = longest = 0
        sent: Any = None
        thrown: BaseException | None = None
        try:
            while True:
                start = time.monotonic_ns()
                try:
                    if thrown is not None:
                        error, thrown = thrown, None
                        value = inner.throw(error)
                    else:
                        value = inner.send(sent)
                except StopIteration as end:
                    return end.value
                finally:
                    step = time.monotonic_ns() - start
                    took, steps, longest = took + step, steps + 1, max(longest, step)
                try:
                    sent = yield value
                except GeneratorExit:
                    inner.close()
                    raise
                except BaseException as error:
                    thrown = error
        finally:
            fields: dict[str, Any] = {"steps": steps, "longest_step_ns": longest}
            try:
                fields.update(_made(self.describe(entry, args, kwargs, None)))
            except Exception as error:
                fields["note"] = f"not described: {error}"
            self._emit(entry, took, fields)

    def _emit(self, entry: TimedFunction, took_ns: int, fields: Fields) -> None:
        told = entry, took_ns, time.monotonic_ns(), threading.get_native_id(), fields
        if event_log.has_listeners():
            self._write(*told)
        else:
            event_log.later(self._write, *told)

    def _write(self, entry: TimedFunction, took_ns: int, ended_ns: int, thread: int, fields: Fields) -> None:
        """Metrics and the event; as a rule on the event file's thread."""
        event = {
            "t_ns": ended_ns,
            "adapter": self.name,
            "server": self.server,
            "call": entry.target.path,
            "direction": entry.direction,
            "dur_ns": took_ns,
            "thread": thread,
            "cause": entry.cause,
            **_made(fields),
        }
        event_log.emit("call", **event)
        pageable, blocking = event.get("pageable_copies", 0), event.get("blocking_copies", 0)
        metrics.call(self.server, event["direction"], took_ns, pageable, blocking)
        if event.get("bytes"):
            metrics.transfer(self.server, event["direction"], event["bytes"], took_ns, None, None)


def _made(fields: Fields) -> dict[str, Any]:
    return fields if isinstance(fields, dict) else fields()


def tensor_bytes(*tensors: Any) -> int:
    """Bytes of the tensors among the arguments; 0 for what is none."""
    total = 0
    for tensor in tensors:
        count = getattr(tensor, "numel", None)
        if count is not None:
            total += int(count()) * int(tensor.element_size())
    return total
