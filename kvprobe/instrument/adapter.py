"""The contract of an adapter: which server it serves, what it touches, and how it goes in and out of a process."""

from __future__ import annotations

import importlib.metadata
import inspect
import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, ClassVar

from kvprobe.instrument import event_log, nvtx_marks, registry
from kvprobe.instrument.hooks import CircuitBreaker, Patcher

__all__ = ["Adapter", "NotNeeded", "Skip", "State", "Target", "installed_version"]

log = logging.getLogger("kvprobe")

APPLIED, NOT_NEEDED, SKIPPED, FAILED = "applied", "not needed", "skipped", "failed"
WAITING, REMOVED = "waiting", "removed"


class Skip(Exception):
    """Raised by an adapter that must not be applied here; its text is the reason."""


class NotNeeded(Exception):
    """Raised by an adapter whose cure the server has already; its text says since when or what showed it."""


@dataclass(frozen=True)
class Target:
    """A function that an adapter touches.

    Attributes:
        module: where it lives.
        path: its dotted path inside the module; empty for the module itself.
        parameters: the names of its first parameters, `self` left out; further ones must have defaults. None: any.
        optional: its absence is no obstacle: an attribute of instances, or of some versions.
        otherwise: other signatures that it has in some versions.
    """

    module: str
    path: str
    parameters: tuple[str, ...] | None = None
    optional: bool = False
    otherwise: tuple[tuple[str, ...], ...] = ()

    def __str__(self) -> str:
        return f"{self.module}:{self.path}" if self.path else self.module

    def problem(self, module: ModuleType) -> str | None:
        """Why this target is not what the adapter was written for, or None."""
        found: Any = module
        for part in self.path.split(".") if self.path else ():
            found = getattr(found, part, None)
            if found is None:
                return None if self.optional else f"{self} does not exist"
        if self.parameters is None:
            return None
        try:
            parameters = list(inspect.signature(found).parameters.values())
        except (TypeError, ValueError):
            return f"{self} has no signature that can be read"
        return self.mismatch(parameters)

    def mismatch(self, found: list[inspect.Parameter]) -> str | None:
        """Why a function of these parameters is not what the adapter was written for, or None."""
        if self.parameters is None:
            return None
        found = found[1:] if found and found[0].name in ("self", "cls") else found
        names = tuple(parameter.name for parameter in found)
        expected = (self.parameters, *self.otherwise)
        if any(_fits(found, names, wanted) for wanted in expected):
            return None
        wanted = " or ".join(f"({', '.join(one)})" for one in expected)
        return f"{self} takes ({', '.join(names)}), expected {wanted}"


def _fits(found: list[inspect.Parameter], names: tuple[str, ...], wanted: tuple[str, ...]) -> bool:
    """The wanted names come first, and what follows may be left out by the caller."""
    rest = found[len(wanted) :]
    return names[: len(wanted)] == wanted and all(
        p.default is not p.empty or p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in rest
    )


@dataclass
class State:
    """Where an adapter stands in this process."""

    state: str
    reason: str = ""
    targets: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        if not self.reason:
            return self.state
        return f"{self.state}: {self.reason}"


def installed_version(distributions: Iterable[str]) -> tuple[str, str] | None:
    """The first installed distribution of these and its version, without importing it."""
    for name in distributions:
        try:
            return name, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        except Exception:  # broken metadata of a foreign package must not stop a server
            log.debug("kvprobe: metadata of %s cannot be read", name, exc_info=True)
    return None


class Adapter:
    """One thing kvprobe does to one server. Subclasses set the class attributes and implement `patch`.

    Attributes:
        name: unique, `server.thing`.
        server: `vllm`, `sglang`, ...: the first part of the name.
        distributions: names under which the server is distributed, as the table of servers has them.
        versions: specifier of the versions it was written for; the whole range in the table where it says none.
        upstream: specifier of newer versions that have it themselves, and the reason to print.
        targets: all it touches; checked before anything is touched.
        option: what the server must be started with to use what is touched here; empty where it always does.
        summary: what it does, one line.
        changes: what it changes under `fix="auto"`; empty when it only measures.
    """

    name: ClassVar[str]
    server: ClassVar[str]
    distributions: ClassVar[tuple[str, ...]]
    versions: ClassVar[str] = ""
    upstream: ClassVar[tuple[str, str] | None] = None
    targets: ClassVar[tuple[Target, ...]]
    option: ClassVar[str] = ""
    summary: ClassVar[str] = ""
    changes: ClassVar[str] = ""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """What the name and the table of servers say already."""
        super().__init_subclass__(**kwargs)
        if "name" in vars(cls):
            cls.server = cls.name.partition(".")[0]
            line = registry.server_of(cls.server)
            cls.distributions = line.distributions
            cls.versions = cls.versions or line.versions

    def __init__(self) -> None:
        self.state = State(WAITING)
        self.version: tuple[str, str] | None = None
        self.fix = "off"
        self._last_line = ""
        self._patcher: Patcher | None = None
        self._modules: dict[str, ModuleType] = {}

    # ---- what a subclass implements ---------------------------------------------------------------------------

    def patch(self, patcher: Patcher, module: ModuleType) -> None:
        """Patch one module of `targets`, after its signatures were checked.

        Raises:
            Skip: not here.
            NotNeeded: the server has it.
        """
        raise NotImplementedError

    def step_aside(self) -> None:
        """Bring the server's objects back to what the server's own code expects; called before patches are undone."""

    # ---- for all --------------------------------------------------------------------------------------------

    @property
    def modules(self) -> tuple[str, ...]:
        """Modules it touches, in the order of its targets."""
        return tuple(dict.fromkeys(target.module for target in self.targets))

    @property
    def applied(self) -> bool:
        """In place and working."""
        return self.state.state == APPLIED

    @classmethod
    def forecast(cls, version: tuple[str, str] | None) -> State:
        """What would happen with this version, without importing anything."""
        from packaging.specifiers import SpecifierSet
        from packaging.version import InvalidVersion, Version

        if version is None:
            return State(SKIPPED, f"{cls.distributions[0]} is not installed")
        try:
            parsed = Version(version[1])
        except InvalidVersion:
            return State(SKIPPED, f"version {version[1]!r} of {version[0]} cannot be read")
        if SpecifierSet(cls.versions).contains(parsed, prereleases=True):
            return State(WAITING)
        if cls.upstream and SpecifierSet(cls.upstream[0]).contains(parsed, prereleases=True):
            return State(NOT_NEEDED, f"already upstream: {cls.upstream[1]}")
        return State(SKIPPED, f"{version[0]} {version[1]} is outside {cls.versions}")

    def prepare(self, version: tuple[str, str] | None, fix: str) -> bool:
        """Decide by version alone; True when the adapter waits for its modules."""
        self.version, self.fix = version, fix
        state = self.forecast(version)
        if state.state == WAITING:
            state.reason = f"for {self.option}" if self.option else ""
        self._set(state)
        return self.state.state == WAITING

    def instrument(self, module: ModuleType) -> None:
        """Check and patch one imported module. Never raises; the outcome is in `state`."""
        if self.state.state not in (WAITING, APPLIED):
            return
        try:
            mine = [target for target in self.targets if target.module == module.__name__]
            for target in mine:
                problem = target.problem(module)
                if problem:
                    raise Skip(problem)
            if self._patcher is None:
                self._patcher = Patcher(CircuitBreaker(self.name, self._failed), self._lists)
            self.patch(self._patcher, module)
            self._modules[module.__name__] = module
            details = {**self.state.targets, **{str(target): APPLIED for target in mine}}
            self._set(State(APPLIED, "", details))
        except NotNeeded as reason:
            self._remove(State(NOT_NEEDED, f"already upstream: {reason}"))
        except Skip as reason:
            self._remove(State(SKIPPED, str(reason)))
        except Exception as error:
            log.debug("kvprobe: %s failed", self.name, exc_info=True)
            self._remove(State(FAILED, f"{type(error).__name__}: {error}"))

    def _lists(self, path: str) -> bool:
        """Whether an adapter may replace this: what `kvprobe patches -v` prints is all that it touches."""
        return any(t.path == path or t.path.startswith(f"{path}.") for t in self.targets)

    def uninstrument(self) -> None:
        """Put everything back."""
        if self.state.state in (APPLIED, WAITING):
            self._remove(State(REMOVED))

    def _failed(self, reason: str) -> None:
        """A hook of ours failed inside the server."""
        self._remove(State(FAILED, reason))

    def _remove(self, state: State) -> None:
        state.targets = state.targets or dict.fromkeys(self.state.targets, state.state)
        patcher, self._patcher = self._patcher, None
        if patcher is not None:
            try:
                self.step_aside()
            except Exception:
                log.debug("kvprobe: %s could not give back what it held", self.name, exc_info=True)
            patcher.undo()
        self._modules.clear()
        self._set(state)

    def _set(self, state: State) -> None:
        self.state = state
        distribution, version = self.version or (self.distributions[0], None)
        event_log.emit(
            "state",
            adapter=self.name,
            server=self.server,
            distribution=distribution,
            version=version,
            state=state.state,
            reason=state.reason,
            fix=self.fix,
            targets=[{"target": key, "state": value} for key, value in state.targets.items()],
        )
        if state.state == WAITING and not state.reason:
            return
        line = f"kvprobe: {self.name} {state}"
        if line != self._last_line:  # a server of several modules is patched in as many steps
            self._last_line = line
            log.log(logging.WARNING if state.state == FAILED else logging.INFO, line)

    # ---- for subclasses ---------------------------------------------------------------------------------------

    def decide(self, what: str, why: str, *, before: str = "", after: str = "", **evidence: Any) -> None:
        """Log a decision and write it to the event file."""
        # The engine comes with it: a process that decides nothing does not load it.
        from kvprobe.offload.rungs import decision_text

        change = decision_text(what, before, after) if after else what
        log.info("kvprobe: %s: %s: %s", self.name, change, why)
        event_log.emit(
            "decision",
            adapter=self.name,
            server=self.server,
            what=what,
            **{"from": before, "to": after},
            why=why,
            evidence=evidence,
        )
        nvtx_marks.mark(f"{self.name}: {change}")
