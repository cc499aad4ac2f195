from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests import public_recordings

sys.path.insert(0, str(Path(__file__).parent))  # queue_model: under importlib mode tests see no siblings
FILES = {
    "v100": "hta/ns_resolution_rank0_v100.pt.trace.json.gz",
    "trace_diff": "hta/trace_diff_test_v100.json.gz",
    "h100": "nsys-ai/h100_2gpu_1s.sqlite",
    "mfu_before": "nsys-ai/mfu_2gpu_before.sqlite",
    "mfu_after": "nsys-ai/mfu_2gpu_after.sqlite",
    "extrap": "extrap/concurrent_profile16.sqlite",
    "owlv2": "tracelens/h100_owlv2.json.gz",
    "b200": "tracelens/b200_eager_trace.json.gz",
    "param": "param/resnet_kineto.json.gz",
    "resnet50": "kineto/resnet50_num_workers_0_worker0.1623143089861.pt.trace.json.gz",
}


class Shared:
    """The public recordings, read once each."""

    files = FILES

    def __init__(self) -> None:
        self.opened = {}

    def path(self, name: str) -> Path:
        return public_recordings.folder() / FILES[name]

    def open(self, name: str):
        from kvprobe.recordings import open_recording

        if name not in self.opened:
            self.opened[name] = open_recording([self.path(name)])
        return self.opened[name]


@pytest.fixture(scope="session")
def shared() -> Shared:
    return Shared()
