"""Advice fits what the recording holds: nothing is advised about loads where there are none."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvprobe.diagnosis import diagnose
from kvprobe.recordings import open_recording

ACCOUNTS = Path(__file__).parents[1] / "gpu" / "data" / "accounts" / "nsys"


@pytest.mark.parametrize(
    "name", ["stores_of_a_prefill_hold_back_the_next_one", "the_next_step_waits_for_the_store_of_this_one"]
)
def test_where_all_copies_are_stores_nothing_is_said_of_loads(name: str) -> None:
    found = diagnose(open_recording(ACCOUNTS / f"{name}.sqlite.gz"))
    fewer = [
        change.text
        for one in found
        if one.cause in ("link_bound", "waiting_for_copies")
        for change in one.cure
        if "fewer bytes" in change.text or "ecompute" in change.text
    ]
    assert fewer and all("store only the blocks that are loaded again" in text for text in fewer)


def test_a_recorder_that_tells_no_addresses_leaves_repeated_bytes_to_run() -> None:
    found = diagnose(open_recording(ACCOUNTS / "stores_of_a_prefill_hold_back_the_next_one.sqlite.gz"))
    (link,) = (one for one in found if one.cause == "link_bound")
    assert "kvprobe run" in link.cure[-1].text and "their destination had already" in link.cure[-1].text
