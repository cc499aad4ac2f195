"""Fresh programs, written without having read the diagnosis, to grade it. Importing this registers them.

What was said of each at the first try, in three formats, stands in reports/h100-fresh-programs.txt.
"""

from __future__ import annotations

import fresh_copies
import fresh_healthy
import fresh_host
import fresh_torch
from registry import PROGRAMS, Program

ROOMS = (fresh_copies, fresh_host, fresh_torch, fresh_healthy)
FRESH: dict[str, Program] = {name: one for name, one in PROGRAMS.items() if one.series == "fresh"}
