"""Reads the relocated words of a running process: where its libraries keep the addresses of functions."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import numpy as np

SYMBOLIC = (1, 6, 7)  # R_X86_64_64, GLOB_DAT, JUMP_SLOT


def relocated(pid: int) -> dict[tuple[str, int], tuple[int, str]]:
    """Contents of every symbolic relocation's word, and its page's permissions, by (file, offset)."""
    maps = [line.split(None, 5) for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    regions = [([int(part, 16) for part in m[0].split("-")], m[1], m[5] if len(m) > 5 else "") for m in maps]
    starts = np.array([region[0][0] for region in regions], "<u8")
    found = {}
    memory = os.open(f"/proc/{pid}/mem", os.O_RDONLY)
    for path in sorted({name for _, _, name in regions if ".so" in name or "copying" in name}):
        if "libkvprobe" in path or not Path(path).is_file():
            continue
        data = np.memmap(path, "u1", "r")
        if bytes(data[:4]) != b"\x7fELF":
            continue
        base = min(start for (start, _), _, name in regions if name == path)
        (sections,) = struct.unpack("<Q", data[40:48])
        size, number = struct.unpack("<HH", data[58:62])
        for at in range(number):
            header = sections + at * size
            kind, _, _, offset, length = struct.unpack("<IQQQQ", data[header + 4 : header + 40])
            if kind != 4:  # SHT_RELA
                continue
            table = np.frombuffer(bytes(data[offset : offset + length]), "<u8").reshape(-1, 3)
            for target in table[np.isin(table[:, 1] & 0xFFFFFFFF, SYMBOLIC), 0].tolist():
                region = regions[int(np.searchsorted(starts, base + target, "right")) - 1]
                if base + target + 8 <= region[0][1]:
                    (word,) = struct.unpack("<Q", os.pread(memory, 8, base + target))
                    found[path, target] = (word, region[1])
    os.close(memory)
    return found
