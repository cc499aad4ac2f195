"""kvprobe."""
