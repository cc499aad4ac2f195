"""Served programs: what real servers suffer from, written without having read the diagnosis; two to three seconds each.

Their author had read the other programs, the names of the causes, `grade.py` and part of `test_fresh_kept.py`: what the
diagnosis says of a few programs of the other sets. Each measures its loss by events of the device where it can, and
fails on a GPU where that loss is below a quarter of its window.
"""

from __future__ import annotations

import served_copies
import served_healthy
import served_host
import served_memory
import served_torch
from registry import PROGRAMS, Program

ROOMS = (served_copies, served_host, served_memory, served_torch, served_healthy)
SERVED: dict[str, Program] = {name: one for name, one in PROGRAMS.items() if one.series == "served"}
