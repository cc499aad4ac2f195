"""Packed folders, extracted; Python has a filter for what an archive may do since 3.10.12 and 3.11.4."""

from __future__ import annotations

import tarfile
from pathlib import Path

__all__ = ["extract"]


def extract(packed: Path, into: Path) -> None:
    """What an archive holds, into a folder."""
    with tarfile.open(packed) as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", None)  # type: ignore[assignment]
        archive.extractall(into)
