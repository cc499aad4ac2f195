"""What is done a step earlier is hidden beside the GPU's work, and no more of it than the GPU works."""

import numpy as np
import pytest

from kvprobe.account.chain import hidden_beside_work
from kvprobe.recordings.intervals import Cover

US = 1_000


def hidden(*pieces: tuple[str, int]) -> int:
    """Microseconds; pieces one after the other: the GPU's "work", a "gap" that the host fills, one that it "waits"."""
    edges = np.cumsum([0, *(us for _, us in pieces)]) * US
    what = np.array([name for name, _ in pieces])
    work, gap = what == "work", np.isin(what, ["gap", "waits"])
    ns = np.where(what == "gap", np.diff(edges), 0)[gap]
    return hidden_beside_work(Cover(edges[:-1][work], edges[1:][work]), edges[:-1][gap], edges[1:][gap], ns) // US


@pytest.mark.parametrize(
    ("pieces", "us"),
    [
        ([("work", 500), ("gap", 1_200)] * 3, 1_500),  # longer than a step of the GPU: only that much fits
        ([("work", 1_200), ("gap", 500)] * 3, 1_500),  # all of it fits
        ([("gap", 1_200), ("work", 500)], 0),  # nothing ran before
        ([("work", 9_000), ("gap", 300), ("work", 100), ("gap", 800)], 400),  # a step ahead, and not two
        ([("work", 900), ("gap", 5), ("work", 10), ("gap", 800)], 805),  # a short gap lies inside a step
        ([("work", 9_000), ("gap", 200), ("work", 10), ("gap", 2_001)], 2_201),  # so does one that is short beside it
        ([("work", 900), ("gap", 600), ("waits", 100), ("gap", 600)], 900),  # one gap in pieces
        ([("work", 900), ("waits", 800)], 0),
        ([("gap", 800)], 0),
    ],
)
def test_no_more_is_hidden_than_the_gpu_works_in_the_step_before(pieces, us):
    assert hidden(*pieces) == us


def test_nothing_to_hide():
    none = np.zeros(0, dtype=np.int64)
    assert hidden_beside_work(Cover(none, none), none, none, none) == 0
