"""A wait for stores: the GPU waits for it where the next kernel is launched afterwards, and not where it was before."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from kvprobe.account import COPIES
from kvprobe.diagnosis import Examination, examine
from kvprobe.recordings import open_recording

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "corpus"))

from grade import unpack

DATA = Path(__file__).resolve().parents[1] / "gpu" / "data"
LATE = ["accounts/{}/logits_read_by_synchronous_copies", "corpus/{}/a_wait_after_every_store"]
FORMS = [("nsys", ".sqlite.gz"), ("kineto", ".json.gz")]


def examined(path: str, into: Path) -> Examination:
    return examine(open_recording(unpack(DATA / path, into)))


@pytest.mark.parametrize("form, ending", FORMS)
@pytest.mark.parametrize("path", LATE)
def test_a_kernel_that_is_launched_after_a_wait_for_stores_waited_for_the_thread(path, form, ending, tmp_path):
    """One finding says so: the thread waits, only the stores run meanwhile, and the first change is not to wait."""
    found = examined(path.format(form) + ending, tmp_path)
    (wait,) = [one for one in found if one.cause == "synchronisation"]
    assert wait.severity == "critical" and "launched the next kernel only afterwards" in wait.title
    (gpu,) = found.account.gpus
    assert wait.device_ns > 0.97 * gpu.ns(*COPIES)
    assert wait.cure[0].text.startswith("Do not let the thread wait for stores")
    assert 0.97 * wait.device_ns < wait.cure[0].predicted_saving_ns <= gpu.not_computing_ns
    assert any("the GPU ran only stores: the next kernel was launched after the wait" in e.text for e in wait.evidence)
    assert "waiting_for_copies" not in {one.cause for one in found}


@pytest.mark.parametrize("form, ending", FORMS)
def test_a_thread_that_is_steps_ahead_holds_nothing_up_while_it_waits(form, ending, tmp_path):
    """Three steps are launched ahead; each step's kernel waits in its stream for the stores of the one before."""
    found = examined(f"accounts/{form}/the_next_step_waits_for_the_store_of_this_one{ending}", tmp_path)
    (wait,) = [one for one in found if one.cause == "synchronisation"]
    assert wait.severity == "info" and wait.device_ns == 0
    assert wait.title.endswith("with more work launched before")
    assert any("still had kernels to run" in one.text for one in wait.evidence)
    (stores,) = [one for one in found if one.cause == "waiting_for_copies"]
    assert any("the next kernel had already been launched" in one.text for one in stores.evidence)
    assert stores.cure[0].text.startswith("Let the next step begin before the stores of this step have ended")
    assert any("kernels can hide another" in one.text for one in stores.evidence)
