"""Twenty-fifth programs: KV-cache servers with ways of their own for drafts, tables and transfers, for 1.5 s.

Importing this registers them. Their author had read the other programs and the names of the causes, and nothing of
what the diagnosis says of any. The second paragraph of a program says why its truth is plain by construction. On a
GPU a program fails whose own account shows less than a quarter of the window lost to its line, or, where it is
healthy, more than a twentieth lost.
"""

from __future__ import annotations

import twentyfifth_runtime
from registry import PROGRAMS, Program

ROOMS = (twentyfifth_runtime,)
TWENTYFIFTH: dict[str, Program] = {name: one for name, one in PROGRAMS.items() if one.series == "twentyfifth"}
