"""What the kernel says of the CPU that a thread had, and of the CPU that it waited for.

`/proc/<pid>/task/<tid>/schedstat` counts the time on a CPU and the time in which the thread could have run and was not
let: others ran, or its control group had used up its quota. The quota's own count is the group's `cpu.stat`.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

__all__ = ["ThreadTime", "thread_time", "throttled_ns"]

_GROUPS, _PROCESSES = Path("/sys/fs/cgroup"), Path("/proc")


class ThreadTime(NamedTuple):
    """Sums since the thread began, ns."""

    ran_ns: int
    waited_ns: int


def thread_time(pid: int, tid: int) -> ThreadTime | None:
    """Time on a CPU and time waiting for one; None where the thread has gone or the kernel does not count."""
    try:
        with open(f"/proc/{pid}/task/{tid}/schedstat", "rb") as file:  # noqa: PTH123
            ran, waited, _ = file.read().split()
    except (OSError, ValueError):
        return None
    return ThreadTime(int(ran), int(waited))


def throttled_ns(pid: int) -> int | None:
    """How long a process's control group was without CPU because of its quota; None where that cannot be read.

    Of the innermost group that has a count, as this process sees the groups: version 2 (`throttled_usec`), else 1
    (`throttled_time`).
    """
    try:
        lines = (_PROCESSES / str(pid) / "cgroup").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        if controllers and "cpu" not in controllers.split(","):
            continue
        root = _GROUPS / controllers if controllers else _GROUPS
        # inside a container the group's path may be the host's, and the container's own group is mounted as the root
        for folder in (root / group.lstrip("/"), root):
            try:
                stat = dict(line.split(maxsplit=1) for line in (folder / "cpu.stat").read_text().splitlines())
            except (OSError, ValueError):
                continue
            if "throttled_usec" in stat:
                return int(stat["throttled_usec"]) * 1000
            if "throttled_time" in stat:
                return int(stat["throttled_time"])
    return None
