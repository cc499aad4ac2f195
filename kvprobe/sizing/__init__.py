"""How large the CPU pool should be, from one recording: what each size would find, move and save."""

from __future__ import annotations

from kvprobe.sizing.sizing import Point, Sizing, of_recording

__all__ = ["Point", "Sizing", "of_recording"]
