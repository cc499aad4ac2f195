"""Whether a copy stream shares a hardware channel with a compute stream: by priority, and by number of streams.

    python benchmarks/channel_sharing.py

A compute stream runs one long kernel with another behind it. On each of 16 new streams a tiny kernel is launched; one
that does not end before the long kernel does stands behind the compute stream's second kernel, in the same channel.
Needs torch with CUDA.
"""

from __future__ import annotations

import argparse
import time

import torch

GATE_S, STREAMS = 0.05, 16


def held_up(compute_priority: int, priority: int) -> int:
    """How many of the streams were held up."""
    compute = torch.cuda.Stream(priority=compute_priority)
    streams = [torch.cuda.Stream(priority=priority) for _ in range(STREAMS)]
    buffers = [torch.zeros(32, device="cuda") for _ in range(STREAMS)]
    events = [torch.cuda.Event() for _ in range(STREAMS)]
    for stream, buffer, event in zip(streams, buffers, events, strict=True):  # everything is loaded and made
        with torch.cuda.stream(stream):
            buffer.add_(1)
            event.record()
    torch.cuda.synchronize()
    with torch.cuda.stream(compute):
        torch.cuda._sleep(int(GATE_S * 1.9e9))
        torch.cuda._sleep(1000)
    for stream, buffer, event in zip(streams, buffers, events, strict=True):
        with torch.cuda.stream(stream):
            buffer.add_(1)
            event.record()
    time.sleep(GATE_S / 2)
    waiting = sum(not event.query() for event in events)
    torch.cuda.synchronize()
    return waiting


def main() -> None:
    """Prints the table."""
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args()
    for compute_priority in (0, -5):
        for priority in (0, -1, -5):
            seen = [held_up(compute_priority, priority) for _ in range(3)]
            print(f"compute at {compute_priority}, copies at {priority}: held up {seen} of {STREAMS}")


if __name__ == "__main__":
    main()
