"""Attaching to a torch program on a GPU: every copy from then on is counted, and detaching leaves no trace."""

import os
import runpy
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from kvprobe.probe.ring import read_ring

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch")
relocated = runpy.run_path(str(Path(__file__).parents[1] / "instrument" / "relocations.py"))["relocated"]
KVPROBE = [sys.executable, "-m", "kvprobe"]
TODO, PAUSED, COPIES, BYTES, WRONG = range(5)
PROGRAM = """
import sys, threading, time
import numpy as np, torch
words, lock = np.memmap(sys.argv[1], "<u8", "r+"), threading.Lock()
def work(seed):
    stream, size = torch.cuda.Stream(), 1 << 20
    host = torch.randint(0, 255, (size,), dtype=torch.uint8).pin_memory()
    back, device = torch.zeros(size, dtype=torch.uint8).pin_memory(), torch.empty_like(host, device="cuda")
    i = seed
    with torch.cuda.stream(stream):
        while words[0] != 2:
            if words[0] == 1:
                with lock: words[1] += 1
                while words[0] == 1: time.sleep(0.001)
                with lock: words[1] -= 1
            n = 4096 * (1 + i % 64)
            device[:n].copy_(host[:n], non_blocking=True)
            back[:n].copy_(device[:n], non_blocking=True)
            stream.synchronize()
            wrong = int(not torch.equal(back[:n], host[:n]))
            back.zero_()
            with lock:
                words[2] += 2; words[3] += 2 * n; words[4] += wrong
            i += 1
threads = [threading.Thread(target=work, args=(k,)) for k in range(3)]
for t in threads: t.start()
for t in threads: t.join()
"""


def test_every_copy_after_attaching_is_counted_and_detaching_leaves_no_trace(tmp_path):
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    counts, run = tmp_path / "counts", tmp_path / "run"
    counts.write_bytes(bytes(4096))
    words = np.memmap(counts, "<u8", "r+")
    env = {k: v for k, v in os.environ.items() if not k.startswith("KVPROBE") and k != "LD_PRELOAD"}
    program = subprocess.Popen([sys.executable, "-c", PROGRAM, counts], env=env)

    def wait_for(true):
        end = time.monotonic() + 90
        while not true():
            assert program.poll() is None and time.monotonic() < end
            time.sleep(0.01)

    def more(n):
        goal = int(words[COPIES]) + n
        wait_for(lambda: int(words[COPIES]) >= goal)

    def pause():
        words[TODO] = 1
        wait_for(lambda: int(words[PAUSED]) == 3)
        return int(words[COPIES]), int(words[BYTES])

    def go():
        words[TODO] = 0
        wait_for(lambda: int(words[PAUSED]) == 0)

    def recorded():
        (path,) = run.glob("*.kvp")
        slots = read_ring(path).slots()
        slots = slots[slots["call"] == 1]
        return int(slots["count"].sum()), int(slots["bytes"].sum())

    try:
        more(3000)
        pause()
        before = relocated(program.pid)
        go()
        began = time.monotonic()
        done = subprocess.run([*KVPROBE, "attach", str(program.pid), "-o", run], capture_output=True, text=True)
        attach_s = time.monotonic() - began
        assert done.returncode == 0, done.stderr
        own, first = pause(), recorded()
        go()
        more(10000)
        later, second = pause(), recorded()
        assert np.subtract(second, first).tolist() == np.subtract(later, own).tolist()
        go()
        done = subprocess.run([*KVPROBE, "detach", str(program.pid)], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        pause()
        after = relocated(program.pid)
        changed = [key for key in before if key in after and after[key] != before[key]]
        assert not changed, changed[:5]
        made = np.subtract(later, own)
        print(f"\n{made[0]:,} copies of {made[1]:,} bytes, all counted; {len(before):,} relocated words as before")
        print(f"attaching took {attach_s:.2f} s")
        words[TODO] = 2
        assert program.wait(60) == 0 and words[WRONG] == 0
    finally:
        program.kill()
        program.wait()
