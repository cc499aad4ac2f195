"""Later programs of other shapes still: each knows its largest line of the account. Importing this registers them."""

from __future__ import annotations

import later_copies
import later_healthy
import later_host
import later_queues
import later_torch
from registry import PROGRAMS, Program

ROOMS = (later_copies, later_queues, later_host, later_torch, later_healthy)
LATER: dict[str, Program] = {name: one for name, one in PROGRAMS.items() if one.line and one.series == "corpus"}
