"""Pauses that may be waits for the lock or for requests: the finding says for how long nobody knows."""

import sys
from pathlib import Path

from kvprobe.account import OPEN
from kvprobe.diagnosis import examine
from kvprobe.recordings import open_recording

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "corpus"))

from grade import unpack

DATA = Path(__file__).resolve().parents[2] / "tests" / "gpu" / "data" / "accounts" / "nsys"


def test_what_the_account_does_not_know_the_finding_does_not_save(tmp_path) -> None:
    found = examine(open_recording(unpack(DATA / "tokenizer_threads_that_hold_the_lock.sqlite.gz", tmp_path)))
    lock = next(one for one in found if one.cause == "python_or_gil_bound")
    said = next(one for one in lock.evidence if "only their lengths tell of the lock" in one.text)
    unknown = found.account.gpus[0].unknown_ns()
    open_ns = sum(unknown.get(reason, 0) for reason in OPEN)
    assert 0.9 * open_ns <= said.value <= open_ns
    assert lock.device_ns is not None and lock.device_ns + said.value <= lock.lost_ns
