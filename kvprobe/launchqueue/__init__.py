"""The launch queue: how deep it is on this machine, how full it is, and when a slow submission is its fault."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from kvprobe.launchqueue.calibration import QueueLimits, calibrate
    from kvprobe.launchqueue.detector import Detector, Slowness, SubmissionRun

__all__ = ["Detector", "QueueLimits", "Slowness", "SubmissionRun", "calibrate"]

_HOME_OF = {"QueueLimits": "calibration", "calibrate": "calibration"}


def __getattr__(name: str) -> object:
    # The readers use the constants and the judge, and must not load the native library by that.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOME_OF.get(name, 'detector')}"), name)
