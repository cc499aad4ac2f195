"""Twenty-fourth programs: threads of servers, and what is hidden behind compute, for 1.5 s.

Importing this registers them. Their author had read the other programs and the names of the causes, and nothing of
what the diagnosis says of any. The second paragraph of a program says why its truth is plain by construction. On a
GPU a program fails whose own account shows less than a quarter of the window lost to its line, or, where it is
healthy, more than a twentieth lost.
"""

from __future__ import annotations

import twentyfourth_runtime
from registry import PROGRAMS, Program

ROOMS = (twentyfourth_runtime,)
TWENTYFOURTH: dict[str, Program] = {name: one for name, one in PROGRAMS.items() if one.series == "twentyfourth"}
