"""Sixth programs: serving and training as other people write them, without having read the diagnosis; two to three
seconds each. Importing this registers them.

Their author had read the other programs and the names of the causes, and nothing of what the diagnosis says of any.
Each measures its loss where it can, and fails on a GPU where that loss is below a quarter of its window.
"""

from __future__ import annotations

import sixth_copies
import sixth_healthy
import sixth_host
from registry import PROGRAMS, Program

ROOMS = (sixth_copies, sixth_host, sixth_healthy)
SIXTH: dict[str, Program] = {name: one for name, one in PROGRAMS.items() if one.series == "sixth"}
