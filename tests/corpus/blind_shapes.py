"""Blind programs, written without having read the diagnosis. Importing this registers them.

Their author had read the helpers of this folder, `grade.py` and `test_fresh_kept.py` among them: how a grade is made,
and which four of the fresh programs it keeps as once judged wrong.
"""

from __future__ import annotations

import blind_copies
import blind_healthy
import blind_host
import blind_torch
from registry import PROGRAMS, Program

ROOMS = (blind_copies, blind_host, blind_torch, blind_healthy)
BLIND: dict[str, Program] = {name: one for name, one in PROGRAMS.items() if one.series == "blind"}
