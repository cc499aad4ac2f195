"""The launch queue: how deep it is on this machine, how full it is, and when a slow submission is its fault."""

from kvprobe.launchqueue.calibration import QueueLimits, calibrate
from kvprobe.launchqueue.detector import Detector, Observation, Verdict

__all__ = ["Detector", "Observation", "QueueLimits", "Verdict", "calibrate"]
