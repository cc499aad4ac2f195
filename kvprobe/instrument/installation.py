"""Puts adapters into this process and takes them out: post-import hooks, the table of states, the public calls."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING, Any

from kvprobe.instrument import event_log, logs, metrics, registry, switches

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvprobe.instrument.adapter import Adapter

__all__ = ["Observation", "activate", "adapter_of", "install", "observe", "table", "uninstall"]

log = logging.getLogger("kvprobe")

_lock = threading.RLock()
_adapters: dict[str, Adapter] = {}
_servers: dict[str, str] = {}  # server -> fix, as installed now
_hooked: set[str] = set()  # modules that wait with a post-import hook of ours: wrapt cannot take one back


def _hook(name: str, action: Any) -> None:
    """Call `action(module)` once `name` is imported, at once if it is. Its exceptions never reach the import."""

    def guarded(module: ModuleType) -> None:
        _hooked.discard(name)
        try:
            action(module)
        except Exception:  # an exception here would make the server's own import fail
            log.warning("kvprobe: the hook on %s failed; %s runs unchanged", name, name, exc_info=True)

    if name in sys.modules:
        guarded(sys.modules[name])
    elif name not in _hooked:
        _hooked.add(name)
        import wrapt

        wrapt.register_post_import_hook(guarded, name)


def _server_imported(module: ModuleType) -> None:
    for name, server in registry.SERVERS.items():
        if server.package == module.__name__ and name in _servers:
            _prepare(name)


def adapter_of(name: str) -> Adapter | None:
    """The adapter of that name, if it is in this process."""
    return _adapters.get(name)


def _module_imported(module: ModuleType) -> None:
    with _lock:
        for adapter in list(_adapters.values()):
            if module.__name__ in adapter.modules:
                adapter.instrument(module)


def _prepare(server: str) -> None:
    """Make the server's adapters and wait for their modules. Imports kvprobe's module about it, not the server."""
    from kvprobe.instrument.adapter import installed_version

    with _lock:
        fix = _servers.get(server)
        if fix is None:
            return
        for kind in registry.adapter_classes(server):
            old = _adapters.get(kind.name)
            if old is not None and old.state.state in ("waiting", "applied"):
                continue
            adapter = kind()
            _adapters[kind.name] = adapter
            if adapter.prepare(installed_version(kind.distributions), fix):
                for name in adapter.modules:
                    _hook(name, _module_imported)


def install(servers: Iterable[str] | str | None = None, *, fix: str = "off") -> dict[str, str]:
    """Put adapters into this process, for servers that are imported already or will be.

    Args:
        servers: names of servers as `kvprobe patches` lists them; None: all.
        fix: `"off"` measures and changes nothing; `"auto"` also cures what it finds, verifies, and rolls back.

    Returns:
        adapter name -> state, for the servers that are imported by now. Empty under `KVPROBE=off`.

    Raises:
        UsageError: an unknown server or fix.
    """
    switches.check_fix(fix)
    names = registry.check_servers(servers)
    if switches.killed():
        return {}
    with _lock:
        for server in names:
            if _servers.get(server, fix) != fix:
                uninstall(server)
            _servers[server] = fix
            package = registry.SERVERS[server].package
            _hook(package, _server_imported)
            if package in sys.modules:
                _prepare(server)
        _hook("prometheus_client", metrics.expose)
        return {name: str(adapter.state) for name, adapter in _adapters.items() if adapter.server in names}


def uninstall(servers: Iterable[str] | str | None = None) -> None:
    """Take the adapters out again; every function of the server is its own afterwards."""
    names = registry.check_servers(servers)
    with _lock:
        for server in names:
            _servers.pop(server, None)
        for name, adapter in list(_adapters.items()):
            if adapter.server in names:
                adapter.uninstrument()
                del _adapters[name]
    event_log.flush()


@dataclass
class Observation:
    """What `observe` saw: the events of the event file, by kind."""

    events: list[dict[str, Any]] = field(default_factory=list)

    def of(self, kind: str) -> list[dict[str, Any]]:
        """Events of one kind: `transfer`, `call`, `decision`, `state`."""
        return [event for event in self.events if event["kind"] == kind]

    @property
    def transfers(self) -> list[dict[str, Any]]:
        """All transfers seen, oldest first."""
        return self.of("transfer")

    @property
    def calls(self) -> list[dict[str, Any]]:
        """All blocking or copying calls seen, oldest first."""
        return self.of("call")

    @property
    def decisions(self) -> list[dict[str, Any]]:
        """All decisions of auto mode, oldest first."""
        return self.of("decision")

    @property
    def states(self) -> dict[str, str]:
        """Each adapter's latest state."""
        return {e["adapter"]: f"{e['state']}: {e['reason']}" if e["reason"] else e["state"] for e in self.of("state")}


@contextlib.contextmanager
def observe(servers: Iterable[str] | str | None = None, *, fix: str = "off") -> Iterator[Observation]:
    """Install for the length of a block and collect what is seen; what was installed before stays afterwards.

    Raises:
        UsageError: an unknown server or fix.
    """
    seen = Observation()
    with _lock:
        before = dict(_servers)
    stop = event_log.listening(seen.events.append)
    try:
        install(servers, fix=fix)
        yield seen
    finally:
        uninstall([name for name in registry.check_servers(servers) if name not in before])
        for name, old in before.items():
            install(name, fix=old)
        stop()


def activate() -> None:
    """Install as the environment asks; called by the start-up hook in every process. Idempotent, never raises."""
    try:
        if switches.asked_for():
            logs.appear()
            install(fix=switches.fix_from_environment())
    except Exception:
        log.warning("kvprobe: could not be activated in this process; the server runs unchanged", exc_info=True)


def table(servers: Iterable[str] | str | None = None, *, fix: str | None = None) -> list[dict[str, Any]]:
    """One row an adapter: where it stands in this process, or what it would do; imports no server.

    Returns:
        rows with `adapter`, `server`, `distribution`, `version`, `versions`, `state`, `reason`, `summary`,
        `changes`, `option`, `fix`, `targets`.
    """
    from kvprobe.instrument.adapter import installed_version

    rows = []
    for server in registry.check_servers(servers):
        for kind in registry.adapter_classes(server):
            version = installed_version(kind.distributions)
            adapter = _adapters.get(kind.name)
            state = adapter.state if adapter is not None else kind.forecast(version)
            word = state.state
            if adapter is None and word == "waiting":
                word = "would apply"
            if switches.killed():
                word, reason = "skipped", "KVPROBE=off"
            else:
                reason = state.reason
            rows.append(
                {
                    "adapter": kind.name,
                    "server": server,
                    "distribution": version[0] if version else kind.distributions[0],
                    "version": version[1] if version else None,
                    "versions": kind.versions,
                    "state": word,
                    "reason": reason,
                    "summary": kind.summary,
                    "changes": kind.changes,
                    "option": kind.option,
                    "fix": adapter.fix if adapter is not None else (fix or switches.fix_from_environment()),
                    "targets": [
                        {"target": str(target), "state": state.targets.get(str(target), word)}
                        for target in kind.targets
                    ],
                }
            )
    return rows
