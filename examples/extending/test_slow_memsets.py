"""Slow memsets are named, quick ones and slow calls of another kind are not."""

from __future__ import annotations

import numpy as np
import pytest

from kvprobe.diagnosis import diagnose
from kvprobe.recordings.model import CallKind, Recording, Source, Table


def recording(kind: CallKind, slow_ns: int) -> Recording:
    """A hundred calls of one kind in a tenth of a second, each tenth of which takes `slow_ns`."""
    start_ns = np.arange(100) * 1_000_000
    took_ns = np.where(np.arange(100) % 10, 2_000, slow_ns)
    columns = {"start_ns": start_ns, "end_ns": start_ns + took_ns, "name": np.ones(100), "kind": np.full(100, kind)}
    made = Recording(source=[Source("made", "nsys-sqlite")], names=["", "cudaMemsetAsync"])
    made.tables["calls"] = Table("calls", {**columns, "process": np.zeros(100), "stream": np.zeros(100)})
    made.tables["processes"] = Table("processes", {"pid": [1]})
    made.tables["streams"] = Table("streams", {"handle": [7], "process": [0]})
    return made


def test_slow_memsets_are_named():
    found = [one for one in diagnose(recording(CallKind.MEMSET, 700_000)) if one.cause == "slow_memsets"]
    assert [one.lost_ns for one in found] == [10 * (700_000 - 2_000)]
    assert found[0].title.startswith("10 memsets blocked their caller for ")


@pytest.mark.parametrize(("kind", "slow_ns"), [(CallKind.MEMSET, 2_000), (CallKind.SYNC, 700_000)])
def test_others_are_not(kind, slow_ns):
    assert "slow_memsets" not in [one.cause for one in diagnose(recording(kind, slow_ns))]
