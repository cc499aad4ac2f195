"""Which kvprobe this is, also where its source is used without having been installed (PYTHONPATH)."""

from __future__ import annotations

__all__ = ["version"]


def version() -> str:
    """The installed distribution's version, "0+source" for a source tree that no package manager knows."""
    from importlib import metadata

    try:
        # None where the files beside us are left over from an installation that was half removed
        return metadata.version("kvprobe") or "0+source"
    except metadata.PackageNotFoundError:
        return "0+source"
