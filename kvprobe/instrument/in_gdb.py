"""Runs inside gdb: has a thread of a running process call a function of the interposer, at a safe moment.

Started by `kvprobe.instrument.attach` with the request as JSON in $KVPROBE_GDB: `pid`, `library`, `function`,
`arguments` (texts and numbers), `seconds`. Prints one line, "kvprobe: " and a JSON object: `result`, the function's own
return value, or `error`.

dlopen may be called by a thread that is neither inside the allocator nor inside the loader. A thread at the first
instruction of an allocator's function or of a system call's wrapper is such a one, unless the loader called it. Where
no thread comes by, nobody is inside the allocator either, and a thread that waits in a system call is taken.
"""

from __future__ import annotations

import json
import os
import tempfile
import threading
from typing import Any

import gdb

PASSED = (
    "malloc",
    "calloc",
    "realloc",
    "free",
    "poll",
    "epoll_wait",
    "read",
    "write",
    "sched_yield",
    "nanosleep",
    "clock_nanosleep",
    "pthread_cond_wait",
    "pthread_cond_timedwait",
    "sem_wait",
    "select",
    "syscall",
)
NOW_LOCAL_FOR_GOOD = 0x1002  # RTLD_NOW | RTLD_NODELETE


def execute(command: str) -> str:
    """One gdb command's output."""
    return str(gdb.execute(command, to_string=True))


def number(expression: str) -> int:
    """An expression's value."""
    return int(gdb.parse_and_eval(expression))


def describe_registers() -> str:
    """Has gdb leave vector registers wider than SSE alone; the path of a file that it needs until it is attached.

    gdb before 14 cannot write the state of a processor with AMX. At the moments that are chosen here the wider parts
    hold nothing that anybody needs: the ABI lets every function and system call lose them.
    """
    version = "".join(c if c.isdigit() or c == "." else " " for c in str(gdb.VERSION)).split()
    with open("/proc/cpuinfo") as cpuinfo:  # noqa: PTH123
        wide = any("amx_tile" in line for line in cpuinfo if line.startswith("flags"))
    if not wide or not version or int(version[0].split(".")[0]) >= 14:
        return ""
    words = ["rax", "rbx", "rcx", "rdx", "rsi", "rdi", "rbp", "rsp", *(f"r{n}" for n in range(8, 16))]
    lines = [f'<reg name="{name}" bitsize="64" type="int64"/>' for name in words]
    lines.append('<reg name="rip" bitsize="64" type="code_ptr"/>')
    lines += [
        f'<reg name="{name}" bitsize="32" type="int32"/>' for name in ["eflags", "cs", "ss", "ds", "es", "fs", "gs"]
    ]
    lines += [f'<reg name="st{n}" bitsize="80" type="i387_ext"/>' for n in range(8)]
    floats = ["fctrl", "fstat", "ftag", "fiseg", "fioff", "foseg", "fooff", "fop"]
    lines += [f'<reg name="{name}" bitsize="32" type="int" group="float"/>' for name in floats]
    sse = [f'<reg name="xmm{n}" bitsize="128" type="uint128"/>' for n in range(16)]
    sse.append('<reg name="mxcsr" bitsize="32" type="int" group="vector"/>')
    linux = ['<reg name="orig_rax" bitsize="64" type="int"/>']
    bases = [f'<reg name="{name}" bitsize="64" type="int"/>' for name in ("fs_base", "gs_base")]
    parts = {"core": lines, "sse": sse, "linux": linux, "segments": bases}
    features = "".join(
        f'<feature name="org.gnu.gdb.i386.{name}">{"".join(registers)}</feature>' for name, registers in parts.items()
    )
    with tempfile.NamedTemporaryFile("w", suffix=".xml", delete=False) as file:
        file.write('<?xml version="1.0"?><!DOCTYPE target SYSTEM "gdb-target.dtd"><target version="1.0">')
        file.write(f"<architecture>i386:x86-64</architecture><osabi>GNU/Linux</osabi>{features}</target>")
    execute(f"set tdesc filename {file.name}")
    return file.name


def loader_range(pid: int) -> tuple[int, int]:
    """Addresses of the dynamic loader's code."""
    found = []
    with open(f"/proc/{pid}/maps") as maps:  # noqa: PTH123
        for line in maps:
            if "x" in line.split()[1] and line.rstrip().rpartition("/")[2].startswith(("ld-linux", "ld-2", "ld.so")):
                found += [int(part, 16) for part in line.split()[0].split("-")]
    return (min(found), max(found)) if found else (0, 0)


def in_loader(loader: tuple[int, int]) -> bool:
    """Whether the loader is at work in the selected thread, or between two of its states."""
    machine = "x86-64" in execute("show architecture")
    caller = number("*(unsigned long *)$sp") if machine else number("(unsigned long)$lr")
    changing = number("*(int *)((char *)&_r_debug + 24)")
    return changing != 0 or loader[0] <= caller < loader[1] or loader[0] <= number("(unsigned long)$pc") < loader[1]


class Interruption:
    """Interrupts the process once it has run for so long; not when it runs to do what it is called for."""

    def __init__(self, seconds: float) -> None:
        """The time begins."""
        self.made = self.late = False
        self.timer = threading.Timer(seconds, lambda: gdb.post_event(self.make))
        self.timer.daemon = True
        self.timer.start()

    def make(self) -> None:
        """In gdb's own thread, while the process runs: an event that waits until then may come after `cancel`."""
        if not self.late:
            self.made = True
            gdb.execute("interrupt")

    def cancel(self) -> None:
        """Not any more."""
        self.late = True
        self.timer.cancel()


def waits_in_a_system_call() -> bool:
    """Whether the selected thread's last instruction entered the kernel."""
    if "x86-64" in execute("show architecture"):
        return number("*(unsigned short *)($pc - 2)") == 0x050F
    return number("*(unsigned int *)($pc - 4)") == 0xD4000001


def reach_safe_moment(pid: int, seconds: float) -> bool:
    """Stops the process with a thread selected that may call dlopen."""
    loader = loader_range(pid)
    points, addresses = [], set()
    for name in PASSED:
        try:
            points.append(gdb.Breakpoint(f"*(long)&{name}", internal=True))
            addresses.add(number(f"(unsigned long)&{name}"))
        except (gdb.error, RuntimeError):
            continue
    hit = False
    interruption = Interruption(seconds)
    try:
        for _ in range(200):
            execute("continue")
            if number("(unsigned long)$pc") in addresses and not in_loader(loader):
                hit = True
                break
            if interruption.made:
                break
    finally:
        interruption.cancel()
        for point in points:
            point.delete()
    if hit:
        return True
    for thread in gdb.selected_inferior().threads():
        thread.switch()
        if waits_in_a_system_call() and not in_loader(loader):
            return True
    return False


def call(request: dict[str, Any]) -> int:
    """The function's return value."""
    library = json.dumps(request["library"])
    handle = number(f"((void *(*)(const char *, int))dlopen)({library}, {NOW_LOCAL_FOR_GOOD})")
    if not handle:
        raise RuntimeError(gdb.parse_and_eval("((char *(*)(void))dlerror)()").string())
    address = number(f'((void *(*)(void *, const char *))dlsym)((void *){handle}, "{request["function"]}")')
    if not address:
        raise RuntimeError(f"{request['library']} has no {request['function']}")
    words = request["arguments"]
    types = ", ".join("const char *" if isinstance(word, str) else "unsigned long" for word in words) or "void"
    values = ", ".join(json.dumps(word) if isinstance(word, str) else f"{word}UL" for word in words)
    return number(f"((int (*)({types})){address})({values})")


def main() -> None:
    """Attaches, calls, detaches."""
    request = json.loads(os.environ["KVPROBE_GDB"])
    answer: dict[str, Any] = {}
    attached, described = False, ""
    try:
        for setting in (
            "pagination off",
            "confirm off",
            "auto-solib-add off",
            "unwindonsignal on",
            "width 0",
            "print thread-events off",
            "language c",
        ):
            execute(f"set {setting}")
        execute("handle all nostop noprint pass")
        described = describe_registers()
        execute(f"attach {request['pid']}")
        attached = True
        for library in ("libc", "libdl", "ld-linux"):
            execute(f"sharedlibrary {library}[-.]")
        if reach_safe_moment(request["pid"], request["seconds"]):
            answer["result"] = call(request)
        else:
            answer["error"] = "no thread was at a point where it may load a library; try again"
    except (gdb.error, RuntimeError, OSError, ValueError) as error:
        answer["error"] = " ".join(str(error).split())
    finally:
        if described:
            os.unlink(described)  # noqa: PTH108
        if attached:
            try:
                execute("detach")
            except gdb.error as error:
                answer.setdefault("error", str(error))
    print("kvprobe: " + json.dumps(answer), flush=True)


main()
