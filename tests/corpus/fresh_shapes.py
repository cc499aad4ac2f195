"""Fresh programs, written without having read the diagnosis, to grade it. Importing this registers them.

Those that need no GPU have run on the embedded host runtime; none has been recorded on a GPU yet, so what they say of
their largest line is how they were written, not what was measured.
"""

from __future__ import annotations

import fresh_copies
import fresh_healthy
import fresh_host
import fresh_torch
from registry import PROGRAMS, Program

ROOMS = (fresh_copies, fresh_host, fresh_torch, fresh_healthy)
FRESH: dict[str, Program] = {name: one for name, one in PROGRAMS.items() if one.series == "fresh"}
