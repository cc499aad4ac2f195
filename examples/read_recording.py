"""Reading a recording in a script or a notebook: columns are numpy arrays, whichever tool made the file.

python examples/read_recording.py trace.nsys-rep      # or a PyTorch trace, or the folder of `kvprobe run`
"""

from __future__ import annotations

import sys

import numpy as np

import kvprobe
from kvprobe.recordings.model import SUBMITTING

recording = kvprobe.open_recording(sys.argv[1])
calls = recording.calls  # a table of columns; kvprobe/recordings/model.py lists them all
submits = calls.where(np.isin(calls["kind"], [int(kind) for kind in SUBMITTING]))
took_ns = submits["end_ns"] - submits["start_ns"]
for name in np.unique(submits["name"]).tolist():
    mine = took_ns[submits["name"] == name]
    p50, p99 = np.percentile(mine, [50, 99]) / 1e3
    print(f"{recording.text(name)}: {len(mine):,} calls, p50 {p50:.1f} us, p99 {p99:.1f} us")
for finding in kvprobe.diagnose(recording):
    print(f"{finding.severity}: {finding.title}")
    for change in finding.cure:
        print(f"    {change.text}")
