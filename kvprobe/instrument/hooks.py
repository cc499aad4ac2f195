"""Wrappers that cannot hurt a server: they call the server's function as it is whenever they fail themselves.

A hook is called as `hook(call, *args, **kwargs)`, where `call()` runs the server's function with the arguments it was
given (or others, if the hook passes some). Whatever the hook does, the server's function runs exactly as often as it
would have without kvprobe, its result is returned and its exceptions pass: an exception of the hook's own makes the
whole adapter step aside for good, once, with one line in the log.
"""

from __future__ import annotations

import functools
import inspect
import logging
import sys
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

__all__ = ["Call", "CircuitBreaker", "Patcher"]

log = logging.getLogger("kvprobe")

_MISSING = object()


class Call:
    """The server's own function with the arguments of this call; callable once.

    `result` is there once it returned, `error` when it raised, `done` when it was called.
    """

    __slots__ = ("args", "done", "error", "func", "kwargs", "result")

    def __init__(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.func, self.args, self.kwargs = func, args, kwargs
        self.done = False
        self.error: BaseException | None = None

    def __call__(self) -> Any:
        """Run it with its own arguments; its exception passes through and is remembered as the server's."""
        if self.done:
            raise RuntimeError("a hook called the server's function twice")
        self.done = True
        try:
            self.result: Any = self.func(*self.args, **self.kwargs)
        except BaseException as error:
            self.error = error
            raise
        return self.result

    def using(self, *args: Any, **kwargs: Any) -> Any:
        """Run it with other arguments."""
        if self.done:
            raise RuntimeError("a hook called the server's function twice")
        return self.part(*args, **kwargs)

    def part(self, *args: Any, **kwargs: Any) -> Any:
        """Run the server's function as one of several calls that together take the place of the one asked for."""
        self.done = True
        try:
            self.result = self.func(*args, **kwargs)
        except BaseException as error:
            self.error = error
            raise
        return self.result

    def finish(self) -> Any:
        """What the server would have got without kvprobe."""
        if not self.done:
            return self()
        if self.error is not None:
            raise self.error
        return self.result


class CircuitBreaker:
    """One adapter's fuse: `active` until a hook of it fails."""

    def __init__(self, name: str, on_failure: Callable[[str], None]) -> None:
        self.name = name
        self.active = True
        self._on_failure = on_failure

    def trip(self, where: str, error: Exception) -> None:
        """Step aside for good, say so once, never raise."""
        if not self.active:
            return
        self.active = False
        reason = f"{where}: {type(error).__name__}: {error}"
        log.warning("kvprobe: %s is switched off: %s", self.name, reason, exc_info=log.isEnabledFor(logging.DEBUG))
        try:
            self._on_failure(reason)
        except Exception:
            log.debug("kvprobe: %s could not be switched off", self.name, exc_info=True)


def _place(owner: Any, name: str) -> tuple[str, str]:
    """Module and dotted path of an attribute of a module or of a class."""
    if isinstance(owner, ModuleType):
        return owner.__name__, name
    owner = owner if isinstance(owner, type) else type(owner)
    return owner.__module__, f"{owner.__qualname__}.{name}"


def _bindings(value: Any, name: str, home: str) -> list[tuple[ModuleType, str]]:
    """Where else a function of module `home` is bound: what `from home import name` left in other modules.

    Under its own name in any module, under any name in modules of the same package.
    """
    found = []
    package = home.partition(".")[0]
    for module in list(sys.modules.values()):
        if not isinstance(module, ModuleType) or module.__name__ == home:
            continue
        held = vars(module)
        if module.__name__.partition(".")[0] == package:
            found += [(module, key) for key, one in list(held.items()) if one is value]
        elif held.get(name) is value:
            found.append((module, name))
    return found


def _like(func: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """functools.wraps, also for callables that lack a name (partials, extension functions)."""
    assigned = [name for name in functools.WRAPPER_ASSIGNMENTS if hasattr(func, name)]
    updated = ("__dict__",) if hasattr(func, "__dict__") else ()
    return functools.wraps(func, assigned=assigned, updated=updated)


class Patcher:
    """Replaces attributes of a server's modules and classes, and puts every one of them back."""

    def __init__(self, breaker: CircuitBreaker, lists: Callable[[str], bool] = lambda path: True) -> None:
        """`lists(path)`: whether the adapter says that it touches this."""
        self.breaker = breaker
        self.lists = lists
        self._undo: list[tuple[str, Callable[[], None]]] = []
        self.patched: list[str] = []
        self._wrappers: list[Any] = []

    def wrap(self, owner: Any, name: str, hook: Callable[..., Any]) -> None:
        """Put `hook` around `owner.name` (a function, method, static or class method).

        A function of a module is replaced wherever other modules have imported it by name, too.

        Raises:
            AttributeError: there is no such attribute.
            ValueError: the adapter does not list it.
        """
        self._put(owner, name, lambda func, where: self.around(func, hook, where))

    def watch(self, owner: Any, name: str, note: Callable[..., None]) -> None:
        """Call `note(began_ns, result, args, kwargs)` behind every call of `owner.name` that returns; as `wrap` else.

        For what runs at every step: it costs less than a hook, and can change nothing.
        """
        self._put(owner, name, lambda func, where: self.behind(func, note, where))

    def _put(self, owner: Any, name: str, made: Callable[[Callable[..., Any], str], Callable[..., Any]]) -> None:
        raw = inspect.getattr_static(owner, name)
        kind = type(raw) if isinstance(raw, staticmethod | classmethod) else None
        func: Callable[..., Any] = raw.__func__ if kind is not None else raw
        if any(func is one for one in self._wrappers):
            return  # two modules of the server show the same class
        wrapper = made(func, _place(owner, name)[1])
        self._wrappers.append(wrapper)
        self.replace(owner, name, kind(wrapper) if kind is not None else wrapper)
        if isinstance(owner, ModuleType):
            for module, bound in _bindings(func, name, owner.__name__):
                setattr(module, bound, wrapper)
            # whoever imported the name after this: they have the wrapper, and the same look-up finds them
            self.on_undo(lambda: self._unbind(wrapper, func, name, owner.__name__), f"names bound to {name}")

    @staticmethod
    def _unbind(wrapper: Any, func: Any, name: str, home: str) -> None:
        for module, bound in _bindings(wrapper, name, home):
            setattr(module, bound, func)

    def around(self, func: Callable[..., Any], hook: Callable[..., Any], where: str) -> Callable[..., Any]:
        """A function that runs `hook` around `func` while the adapter is active; puts it nowhere."""
        breaker = self.breaker

        @_like(func)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if not breaker.active:
                return func(*args, **kwargs)
            call = Call(func, args, kwargs)
            try:
                return hook(call, *args, **kwargs)
            except Exception as error:
                if error is call.error:
                    raise
                breaker.trip(where, error)
                return call.finish()

        wrapper.__kvprobe__ = breaker.name  # type: ignore[attr-defined]
        return wrapper

    def behind(self, func: Callable[..., Any], note: Callable[..., None], where: str) -> Callable[..., Any]:
        """A function that calls `note` behind `func` while the adapter is active; puts it nowhere."""
        breaker, now_ns = self.breaker, time.monotonic_ns

        @_like(func)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            began_ns = now_ns()
            result = func(*args, **kwargs)
            if breaker.active:
                try:
                    note(began_ns, result, args, kwargs)
                except Exception as error:
                    breaker.trip(where, error)
            return result

        wrapper.__kvprobe__ = breaker.name  # type: ignore[attr-defined]
        return wrapper

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """Set `owner.name` to `value` until `undo`.

        Raises:
            ValueError: the adapter does not list it.
        """
        place, path = _place(owner, name)
        if not self.lists(path):
            raise ValueError(f"{place}:{path} is not among the targets of {self.breaker.name}")
        before = vars(owner).get(name, _MISSING) if hasattr(owner, "__dict__") else getattr(owner, name)
        setattr(owner, name, value)

        def put_back() -> None:
            # Somebody may have wrapped our wrapper since: then it stays, as a pass-through, below theirs.
            if vars(owner).get(name, _MISSING) is not value:
                return
            if before is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, before)

        self._undo.append((path, put_back))
        self.patched.append(f"{place}:{path}")

    def on_undo(self, action: Callable[[], None], what: str = "clean-up") -> None:
        """Run `action` when everything is put back (last registered first)."""
        self._undo.append((what, action))

    def undo(self) -> None:
        """Put everything back; a failing step is logged and does not keep the others from running."""
        self.breaker.active = False
        while self._undo:
            what, action = self._undo.pop()
            try:
                action()
            except Exception:
                log.debug("kvprobe: %s: %s could not be undone", self.breaker.name, what, exc_info=True)
        self.patched.clear()
        self._wrappers.clear()
