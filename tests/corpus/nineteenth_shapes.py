"""Nineteenth programs: torch as engineers write it, one plain trouble each or none, for 1.5 s; all need a GPU.

Importing this registers them. Their author had read the other programs and the names of the causes, and nothing of
what the diagnosis says of any. The second paragraph of a program says why its truth is plain by construction. On a
GPU a program fails whose own account shows less than a quarter of the window lost to its line, or, where it is
healthy, more than a twentieth lost.
"""

from __future__ import annotations

import nineteenth_copies
import nineteenth_healthy
import nineteenth_host
from registry import PROGRAMS, Program

ROOMS = (nineteenth_copies, nineteenth_host, nineteenth_healthy)
NINETEENTH: dict[str, Program] = {name: one for name, one in PROGRAMS.items() if one.series == "nineteenth"}
