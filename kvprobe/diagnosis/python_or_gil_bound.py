"""The device idles between launches because the interpreter is slow to make the next one.

Mechanism: each launch costs Python and framework work; where kernels are shorter than that, the device idles after each
one. Or the thread waits for the interpreter's lock while another thread computes in Python (it gets it back after the
switch interval, 5 ms), or garbage is collected.

Signature: any of
 - many short gaps (each launch pays): at least 64 gaps below 200 us that take a tenth of the span or more;
 - long gaps that have the interpreter's switch interval for a floor: none shorter than 4.8 ms, some at it, a quarter
   below 8 ms: another thread holds the lock, and gives it up 5 ms after it was asked to;
 - long gaps that overlap intervals labelled garbage collection for most of their length;
 - stacks taken in the gaps that show the thread waiting for the lock or in Python code.
Gaps as in `gpu_starved`, which keeps those without such evidence.

Time lost: the host's part of these gaps. Predicted saving: the same for short gaps (a CUDA graph launches them as one);
for the lock and the collector, likewise, with the other work moved out of the process.
"""

from __future__ import annotations

import numpy as np

from kvprobe.diagnosis.finding import INFERRED, MEASURED, Change, Evidence, Finding
from kvprobe.diagnosis.frame import Array, Frame, ms, share
from kvprobe.diagnosis.gaps import Gaps, idle_gaps

CAUSE = "python_or_gil_bound"
SHORT_NS, LEAST_SHARE, MANY = 200_000, 0.10, 64
SWITCH_NS = 5_000_000  # sys.getswitchinterval()


def _by_lock(gaps: Gaps) -> Array:
    """Mask of the long gaps, where they have the switch interval for a floor."""
    long = gaps.host_ns >= 1_000_000
    if long.sum() < 5:
        return np.zeros(len(long), dtype=bool)
    shortest, lower = np.percentile(gaps.host_ns[long], (2, 25))
    floor = bool(SWITCH_NS * 0.96 <= shortest <= SWITCH_NS * 1.14 and lower <= SWITCH_NS * 1.6)
    mask: Array = long & floor
    return mask


def _by_stacks(frame: Frame, gaps: Gaps) -> Array:
    """Mask of gaps in which a sampled stack shows the launching thread without the lock."""
    stacks = frame.recording.stacks
    mask = np.zeros(len(gaps.start), dtype=bool)
    if not stacks.rows or not len(mask):
        return mask
    for lane in np.unique(frame.lane[gaps.call]):
        mine = np.flatnonzero(frame.lane[gaps.call] == lane)
        row = gaps.call[mine[0]]
        theirs = (stacks["process"] == frame.process[row]) & (stacks["thread"] == frame.thread[row])
        waiting = np.sort(stacks["time_ns"][theirs & (stacks["gil"] == 0)])
        mask[mine] = np.searchsorted(waiting, gaps.end[mine]) > np.searchsorted(waiting, gaps.start[mine])
    return mask & (gaps.host_ns >= 1_000_000)


def explained(frame: Frame, gaps: Gaps) -> Array:
    """Mask of gaps for which there is evidence of the interpreter."""
    mask: Array = (2 * gaps.gc_ns > gaps.host_ns) | _by_lock(gaps) | _by_stacks(frame, gaps)
    return mask


def find(frame: Frame) -> Finding | None:
    """Gaps that the interpreter makes."""
    gaps = idle_gaps(frame)
    if not len(gaps.start):
        return None
    span = frame.span_ns * max(len(np.unique(gaps.process)), 1)
    short = (gaps.host_ns > 0) & (gaps.host_ns < SHORT_NS)
    if short.sum() < MANY or int(gaps.host_ns[short].sum()) < LEAST_SHARE * span:
        short[:] = False
    collected, locked, sampled = 2 * gaps.gc_ns > gaps.host_ns, _by_lock(gaps), _by_stacks(frame, gaps)
    mine = short | collected | locked | sampled
    lost = int(gaps.host_ns[mine].sum())
    if not mine.any() or lost < (LEAST_SHARE if not collected.any() else 0.01) * span:
        return None
    ns = gaps.host_ns[mine]
    evidence = [
        Evidence(f"{int(mine.sum())} idle gaps of the device, {ms(lost)} or {share(lost, span)} of the recording, "
                 "while the launching thread was in no CUDA call", lost, "ns", MEASURED),
    ]  # fmt: skip
    cure: list[Change] = []
    of_all = 1 / max(lost, 1)
    if short.any():
        between = float(np.median(gaps.host_ns[short]))
        evidence.append(Evidence(f"{int(short.sum())} of them are short: the host takes {ms(between)} longer for each "
                                 "launch than the device for what was queued", between, "ns", MEASURED))  # fmt: skip
        cure += [
            Change("Launch many kernels at once: a CUDA graph, torch.compile(mode='reduce-overhead')",
                   share=int(gaps.host_ns[short].sum()) * of_all),
            Change("Larger batches, fused kernels"),
        ]  # fmt: skip
    if locked.any():
        typical = float(np.median(gaps.host_ns[locked]))
        evidence.append(Evidence(f"{int(locked.sum())} last {ms(typical)} (median), the interpreter's switch interval: "
                                 "another Python thread holds its lock", typical, "ns", INFERRED))  # fmt: skip
        cure += [
            Change("Move the other thread's Python work to a process of its own",
                   share=int(gaps.host_ns[locked].sum()) * of_all),
            Change("sys.setswitchinterval(0.0005) as a stopgap"),
        ]  # fmt: skip
    if sampled.any():
        evidence.append(Evidence(f"in {int(sampled.sum())} of them a stack was taken in which the thread waited for "
                                 "the interpreter's lock", int(sampled.sum()), "1", "py-spy"))  # fmt: skip
    if collected.any():
        total = int(gaps.gc_ns[collected].sum())
        evidence.append(Evidence(f"{ms(total)} of them were garbage collection", total, "ns",
                                 "labelled by the recorder"))  # fmt: skip
        cure += [Change("gc.freeze() after start-up, and gc.collect() between requests", share=total * of_all)]
    return frame.finding(
        CAUSE, "The device was idle for {lost} because Python was slow to launch, in {calls} gaps", "likely", lost,
        int(mine.sum()), lane="device", span_ns=span, places=frame.places(gaps.call[mine], ns),
        window=(int(gaps.start[mine].min()), int(gaps.end[mine].max())), evidence=evidence, cure=cure,
        chart={
            "title": "Idle gaps of the device", "x_label": "time in the recording (ms)", "y_label": "gap (us)",
            "series": {"gaps": {"x": (gaps.start[mine] - frame.window[0])[:2000] / 1e6, "y": ns[:2000] / 1e3,
                                "style": "points"}},
        },
    )  # fmt: skip
