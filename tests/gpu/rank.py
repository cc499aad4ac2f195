"""One rank of two: torch on its own GPU; a store of 6,000 copies behind a busy kernel, then loads in small groups.

Prints a line of JSON: copies each way, and the host time in copies of more than 20 us.
"""

import json
import os
import time

import torch

BLOCK, COPIES = 64 * 1024, 6000


def main():
    rank = int(os.environ["RANK"])
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    gpu = torch.empty(256, BLOCK, dtype=torch.uint8, device="cuda")
    cpu = torch.empty(256, BLOCK, dtype=torch.uint8, pin_memory=True)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    slow = 0.0
    with torch.cuda.stream(stream):
        for i in range(COPIES):
            gpu[i % 256].copy_(cpu[i % 256], non_blocking=True)
            if i % 100 == 99:
                stream.synchronize()
        if rank == 1:  # only this rank does what is wrong
            torch.cuda._sleep(200_000_000)
        for i in range(COPIES):
            start = time.perf_counter()
            cpu[i % 256].copy_(gpu[i % 256], non_blocking=True)
            took = time.perf_counter() - start
            slow += took if took > 20e-6 else 0.0
            if rank == 0 and i % 100 == 99:
                stream.synchronize()
        stream.synchronize()
    print("RANK " + json.dumps({"rank": rank, "copies": 2 * COPIES, "slow_ns": int(slow * 1e9)}))


main()
