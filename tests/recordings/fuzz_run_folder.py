"""A small run folder with every file that there is: `python tests/recordings/fuzz_run_folder.py FOLDER`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path


def make_run(folder: Path) -> None:
    """A run folder with every file that there is."""
    import ctypes as ct

    from kvprobe.native.library import Record, RingOptions, core
    from kvprobe.runfolder import watched
    from kvprobe.runfolder.folder import RunFolder

    folder.mkdir()
    native, pid = core(), os.getpid()
    start = native.kvp_now_ns()
    small = RingOptions(ring_capacity=64, slow_capacity=16, slot_count=8, sections_max=2)
    code = native.kvp_ring_open(os.fsencode(folder / f"{pid}-1.kvp"), b"interposer", ct.byref(small))
    assert not code, os.strerror(-code)
    for i in range(60):
        record = Record(
            start_ns=native.kvp_now_ns(),
            dur_ns=1000 + 60_000 * (i % 7 == 0),
            stream=16,
            src=4096 + i,
            dst=9,
            bytes=64,
            count=1,
            call=(1, 17, 64)[i % 3],
            direction=1,
        )
        native.kvp_ring_write(ct.byref(record), 1)
    native.kvp_ring_close()
    native.kvp_ring_release()
    end = native.kvp_now_ns()
    run = RunFolder(folder)
    run.write_run(
        {
            "command": ["python", "x.py"],
            "cwd": "/",
            "version": "1",
            "host": "h",
            "kernel": "k",
            "cpus": 2,
            "python": "3.11",
            "pid": pid,
            "realtime_ns": 10**18,
            "monotonic_ns": start,
            "options": {"report": ""},
            "environment": {"CUDA_X": "1"},
        }
    )
    run.write_end({"t_ns": end, "status": 3, "warnings": ["a warning"]})
    run.append_ended({"pid": pid, "t_ns": end, "status": -9, "command": "python x.py"})
    run.append_stacks(
        pid,
        {
            "t_ns": start,
            "pid": pid,
            "thread": pid,
            "call": "cudaMemcpyAsync",
            "stream": 16,
            "blocked_ns": 5,
            "how": "py-spy",
            "error": "",
            "threads": [{"thread": pid, "name": "t", "gil": True, "frames": ["f (x.py:1)"]}],
        },
    )
    watched.write_queue(
        run.path,
        pid,
        {
            "start_ns": start,
            "end_ns": end,
            "depth": 1021,
            "channels": 4,
            "capacity": 4084,
            "baseline_ns": 900,
            "p99_ns": 2000,
            "how": "calibrated",
        },
    )
    checkin = {
        "pid": pid,
        "ppid": 1,
        "t_ns": start,
        "argv": ["python", "x.py"],
        "executable": "python",
        "prefix": "/",
        "python": "3.11.1",
        "preloaded": True,
        "ld_preload": "",
        "rank": {"RANK": "0"},
    }
    (folder / f"checkin-{pid}-1.json").write_text(json.dumps(checkin))
    transfer = {
        "adapter": "a",
        "server": "vllm",
        "id": 1,
        "direction": "load",
        "copies": 4,
        "bytes": 256,
        "stream": 1,
        "build_ns": 1,
        "submit_ns": 2,
        "queue_ns": 3,
        "copy_ns": 4,
        "poll_ns": 5,
        "thread": pid,
        "ok": True,
    }
    events = [
        {"kind": "process", "pid": pid},
        {"kind": "transfer", **transfer},
        {"kind": "transfer", **transfer, "one_in": 3, "begin_ns": start},
        {
            "kind": "decision",
            "adapter": "a",
            "what": "switch",
            "from": "x",
            "to": "y",
            "why": "z",
            "evidence": {"gain": 2.0},
        },
        {"kind": "call", "adapter": "a", "server": "s", "call": "f", "dur_ns": 5, "thread": pid, "cause": "c"},
        {"kind": "state", "adapter": "a", "distribution": "d", "version": "1", "state": "applied", "reason": ""},
    ]
    offload = {"requests": 9, "prompt_tokens": 900, "hit_tokens": 300, "stored_blocks": 7, "loaded_blocks": 4}
    events += [
        {"kind": "offload", "adapter": "a", "server": "s", "source": "c", **offload, "prefill_ns_per_token": 1.5},
        {
            "kind": "blocks",
            "server": "s",
            "source": "c",
            "threshold": 1 << 23,
            "counts": {"stored": 2, "loaded": 2},
            "blocks": 3,
            "block_bytes": 4096,
            "notes": [[start, 7, 2], [start, 9, 2], [end, 7, 1]],
        },
        {"kind": "call", **transfer, "call": "g", "dur_ns": 7, "pageable_copies": 2, "inside": "f"},
    ]
    (folder / f"inner-{pid}.json").write_text(json.dumps({"folder": "/tmp/inner"}))
    (folder / f"events-{pid}.jsonl").write_text("".join(json.dumps({"t_ns": end, **e}) + "\n" for e in events))
    (folder / "device.jsonl").write_text(json.dumps({"t_ns": end, "device": 0, "power_w": 70.5}) + "\n")


if __name__ == "__main__":
    make_run(Path(sys.argv[1]))
