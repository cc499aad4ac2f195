"""Unseen programs, written without having read the diagnosis or the account. Importing this registers them.

Their author had read the other programs, the names of the causes, `grade.py`, and `test_fresh_kept.py`: what the
diagnosis says of a few programs of the other sets.
"""

from __future__ import annotations

import unseen_copies
import unseen_healthy
import unseen_host
from registry import PROGRAMS, Program

ROOMS = (unseen_copies, unseen_host, unseen_healthy)
UNSEEN: dict[str, Program] = {name: one for name, one in PROGRAMS.items() if one.series == "unseen"}
