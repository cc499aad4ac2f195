"""Recordings for agents: what `kvprobe mcp` lets them open, how much an answer holds, what the process never does."""
