"""Twenty-sixth programs: torch on two GPUs of one host, one plain trouble each or none, for 1.5 s.

Importing this registers them. Their author had read the other programs and the names of the causes, and nothing of
what the diagnosis says of any. The second paragraph of a program says why its truth is plain by construction. What a
program says of itself is the mean of both GPUs. On GPUs a program fails whose own account shows less than a quarter of
the window lost to its line, or, where it is healthy, more than a twentieth lost.
"""

from __future__ import annotations

import twentysixth_torch
from registry import PROGRAMS, Program

ROOMS = (twentysixth_torch,)
TWENTYSIXTH: dict[str, Program] = {name: one for name, one in PROGRAMS.items() if one.series == "twentysixth"}
