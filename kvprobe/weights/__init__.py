"""Weights partly in CPU memory, brought in layer by layer ahead of their computation, and profiled."""

from kvprobe.weights.load import hollow, load
from kvprobe.weights.offload import WeightOffload, offload
from kvprobe.weights.plan import Plan
from kvprobe.weights.profile import LayerProfile, WeightProfile
from kvprobe.weights.recording import recording_of

__all__ = ["LayerProfile", "Plan", "WeightOffload", "WeightProfile", "hollow", "load", "offload", "recording_of"]
