"""A process that writes to a ring file what it is told on stdin, one JSON list a line, and answers "done"."""

import ctypes as ct
import json
import sys

from kvprobe.native.library import Record, core

lib = core()
lib.kvp_ring_enter.argtypes = [ct.c_uint32, ct.c_uint64, ct.c_uint64]
assert lib.kvp_ring_open(sys.argv[1].encode(), b"test", None) == 0
for line in sys.stdin:
    what, *arguments = json.loads(line)
    if what == "write":
        count, fields = arguments
        record = Record(**{"start_ns": lib.kvp_now_ns(), "call": 1, "count": 1, "direction": 1, **fields})
        for _ in range(count):
            lib.kvp_ring_write(ct.byref(record), 1)
    elif what == "enter":
        lib.kvp_ring_enter(arguments[0], arguments[1], lib.kvp_now_ns())
    elif what == "close":
        lib.kvp_ring_close()
    print("done", flush=True)
