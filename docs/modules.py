"""Draws the modules of kvprobe as the code has them: who imports whom.

python docs/modules.py            # prints the drawing
python docs/modules.py --write    # puts it into ARCHITECTURE.md
"""

from __future__ import annotations

import ast
import functools
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "ARCHITECTURE.md"
BEGIN, END = "<!-- modules: made by docs/modules.py -->\n", "<!-- end of modules -->\n"
# Lowest first; each imports only what stands before it. `judge` is the part of launchqueue without the native library.
ORDER = (
    "errors",
    "version",
    "environment",
    "durations",
    "output",
    "reuse",
    "native",
    "runfolder",
    "judge",
    "cuda",
    "probe",
    "launchqueue",
    "offload",
    "instrument",
    "patches",
    "recordings",
    "account",
    "requests",
    "diagnosis",
    "sizing",
    "reporting",
    "agents",
    "weights",
    "workload",
    "testing",
    "monitoring",
    "commands",
    "cli",
)
# Single files that every module may import: left out of the drawing.
SMALL = ("errors", "version", "environment", "durations")
JUDGE = (
    "launchqueue.constants",
    "launchqueue.levels",
    "launchqueue.evidence",
    "launchqueue.judge",
    "launchqueue.call_counts",
)
ENTRANCES = ("__init__", "__main__")  # re-export and start; nothing imports them


def room_of(module: str) -> str:
    """The room of a module, named without the leading `kvprobe.`."""
    return "judge" if module in JUDGE else module.split(".")[0]


def imported(path: Path) -> set[str]:
    """Modules of kvprobe that a file imports, anywhere in it, without the leading `kvprobe.`."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            inside = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= inside if node.module in ("kvprobe", "kvprobe.launchqueue") else {node.module}
    return {name.removeprefix("kvprobe.") for name in found if name.startswith("kvprobe.")}


@functools.cache
def arrows() -> dict[str, set[str]]:
    """For each room the other rooms that it imports."""
    found: dict[str, set[str]] = {room: set() for room in ORDER}
    for package, base in ((ROOT / "kvprobe", ROOT / "kvprobe"), (ROOT / "patches", ROOT)):
        for path in sorted(package.rglob("*.py")):
            module = ".".join(path.relative_to(base).with_suffix("").parts)
            room = room_of(module)
            if room not in ENTRANCES:
                found.setdefault(room, set()).update(room_of(name) for name in imported(path))
    return {room: targets - {room} for room, targets in found.items()}


def reduced(graph: dict[str, set[str]]) -> list[tuple[str, str]]:
    """Arrows that no other path of arrows implies, so that the drawing can be read."""

    def reach(room: str) -> set[str]:
        return {far for near in graph[room] for far in (near, *reach(near))}

    return [
        (room, target)
        for room in ORDER
        for target in sorted(graph[room], key=ORDER.index)
        if not any(target in reach(other) for other in graph[room] - {target})
    ]


def drawing() -> str:
    """The drawing, and below it all arrows in a table."""
    whole = arrows()
    graph = {room: whole[room] - set(SMALL) for room in ORDER if room not in SMALL}
    lines = ["```mermaid", "graph TD"]
    rooms = [room for room in ORDER if room in graph]
    lines += [f"    {room} --> {target}" for room, target in reversed(reduced({r: graph.get(r, set()) for r in ORDER}))]
    lines += ["```", "", "| module | imports |", "|---|---|"]
    lines += [f"| {r} | {', '.join(sorted(graph[r], key=ORDER.index)) or 'nothing'} |" for r in reversed(rooms)]
    return "\n".join(lines) + "\n"


def page_with(text: str) -> str:
    """ARCHITECTURE.md with this drawing in its place."""
    before, rest = PAGE.read_text().split(BEGIN)
    return before + BEGIN + text + END + rest.split(END)[1]


if __name__ == "__main__":
    if "--write" in sys.argv[1:]:
        PAGE.write_text(page_with(drawing()))
    else:
        print(drawing(), end="")
