"""What the words in a recording mean: names of calls, of copies and of profiler overheads, and interning of text.

Sources: CUDA runtime and driver API names; `ENUM_CUDA_MEMCPY_OPER`, `ENUM_CUDA_MEM_KIND` and
`ENUM_CUPTI_OVERHEAD_TYPE` of Nsight Systems exports; Kineto's operation names ("Memcpy HtoD (Pinned -> Device)").
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from kvprobe.probe.errors_of_cuda import error_name
from kvprobe.recordings.kinds import CallKind, Direction, Engine, Label, Memory, RangeStyle

TYPE_CHECKING = False  # nothing here loads numpy or typing, which take longer than a small trace
if TYPE_CHECKING:
    from kvprobe.recordings.model import Array

__all__ = [
    "KINETO_CALLS",
    "KINETO_CODES",
    "KINETO_EXECUTIONS",
    "KINETO_FUNCTIONS",
    "KINETO_LABELS",
    "KINETO_RANGES",
    "NSYS_DIRECTIONS",
    "NSYS_MEMORY",
    "Names",
    "as_text",
    "base_name",
    "call_direction",
    "call_kind",
    "error_name",
    "kineto_call",
    "kineto_copy",
    "kineto_function",
    "label_of",
    "stream_title",
]

_SUFFIX = re.compile(r"(?:_v\d+|_pt[sd][sz])+$")

# Nsight Systems' copyKind: arrays are device memory; 10 is peer to peer, 11 to 13 are migrations of managed memory.
NSYS_DIRECTIONS = (
    Direction.UNKNOWN,
    Direction.H2D,
    Direction.D2H,
    Direction.H2D,
    Direction.D2H,
    Direction.D2D,
    Direction.D2D,
    Direction.D2D,
    Direction.D2D,
    Direction.H2H,
    Direction.D2D,
    Direction.H2D,
    Direction.D2H,
    Direction.D2D,
)
NSYS_MEMORY = (
    Memory.PAGEABLE,
    Memory.PINNED,
    Memory.DEVICE,
    Memory.DEVICE,
    Memory.MANAGED,
    Memory.DEVICE,
    Memory.MANAGED,
    Memory.UNKNOWN,
)


def base_name(name: str) -> str:
    """The call without version and per-thread-stream suffixes: `cuMemcpyHtoDAsync_v2_ptsz` -> `cuMemcpyHtoDAsync`."""
    return _SUFFIX.sub("", name)


# First match wins. Host functions and stream memory operations wait in the queue like events do, and like events
# leave no execution, so they are EVENT: counted as submissions they would stay outstanding to the end.
_KINDS: Sequence[tuple[re.Pattern[str], CallKind]] = tuple(
    (re.compile(pattern), kind)
    for pattern, kind in (
        (r"cu(da)?Memcpy\w*BatchAsync$", CallKind.BATCH),
        (r"cu(da)?Memcpy\w*Async$", CallKind.COPY),
        (r"cu(da)?Memcpy(?!.*(Node|Param))", CallKind.COPY_SYNC),
        (r"cu(da)?Memset(?!.*(Node|Param))", CallKind.MEMSET),
        (r"cu(da)?(Graph|Device)Launch|cu(da)?GraphLaunch", CallKind.GRAPH),
        (
            r"cu(da)?LaunchHostFunc|cu(da)?EventRecord|cu(da)?Stream(WaitEvent|WaitValue|WriteValue|BatchMemOp|AddCallback)",
            CallKind.EVENT,
        ),
        (r"cu(da)?Launch", CallKind.LAUNCH),
        (r"cu(da)?(Stream|Event|Device|Ctx|Thread)Synchronize$", CallKind.SYNC),
        (r"cu(da)?(Stream|Event|Ctx)Create|cuDevicePrimaryCtxRetain", CallKind.CREATE),
        (
            r"cu(da)?Malloc|cu(da)?HostAlloc|cu(da)?HostRegister|cuMem(Alloc|Host(Alloc|Register)|Create$|Map$|AddressReserve)"
            r"|cuMem(SetAccess|(Ex|Im)port(To|From)ShareableHandle)|cu(da)?IpcOpenMemHandle|cu(da)?ImportExternalMemory",
            CallKind.ALLOC,
        ),
        (
            r"cu(da)?Free|cu(da)?HostUnregister|cuMem(Free|HostUnregister|Unmap|Release|AddressFree)"
            r"|cu(da)?IpcCloseMemHandle|cu(da)?DestroyExternalMemory|cu(da)?MemPoolTrimTo",
            CallKind.FREE,
        ),
    )
)


def stream_title(name: str, number: int) -> str:
    """How a stream is called everywhere: by its number (`probe.ring.stream_number`), and its name where it has one."""
    said = f"stream {number}"
    return said if not name or name == said else f"{said} ({name.removesuffix(' stream')})"


def call_kind(name: str) -> CallKind:
    """What a call of this (suffix-free) name does; OTHER where it neither submits, waits nor allocates."""
    if name.startswith("cu"):
        for pattern, kind in _KINDS:
            if pattern.match(name):
                return kind
    return CallKind.OTHER


def call_direction(name: str) -> Direction:
    """The direction that a driver call's name states (`cuMemcpyHtoDAsync`), else UNKNOWN."""
    for text, direction in (("HtoD", Direction.H2D), ("DtoH", Direction.D2H), ("DtoD", Direction.D2D)):
        if text in name:
            return direction
    return Direction.UNKNOWN


_LABELS: Sequence[tuple[str, Label]] = (
    ("command buffer full", Label.COMMAND_BUFFER_FULL),
    ("buffer flush", Label.BUFFER_FLUSH),
    ("lazy function", Label.LAZY_LOADING),
    ("module loading", Label.LAZY_LOADING),
    ("compiler", Label.JIT),
    ("jit", Label.JIT),
    ("resource", Label.RESOURCE),
    ("buffer request", Label.INSTRUMENTATION),
    ("instrumentation", Label.INSTRUMENTATION),
    ("garbage", Label.GC),
)


def label_of(text: str) -> Label:
    """The kind of a profiler overhead by its name, in any tool's spelling (`CUPTI: Buffer flush`, `Buffer Flush`)."""
    text = text.lower().replace("_", " ").replace("-", " ")
    return next((label for word, label in _LABELS if word in text), Label.OTHER)


_COPY = re.compile(r"Memcpy (\w)to(\w)(?: \((\w+) -> (\w+)\))?")
_MEMORY_WORDS = {
    "pageable": Memory.PAGEABLE,
    "pinned": Memory.PINNED,
    "device": Memory.DEVICE,
    "array": Memory.DEVICE,
    "managed": Memory.MANAGED,
}


def kineto_copy(name: str) -> tuple[Direction, Memory]:
    """Direction and host-side memory of a Kineto copy, visible only in its name ("Memcpy HtoD (Pinned -> Device)").

    A copy within the device (or between peers) has DEVICE memory on both sides.
    """
    match = _COPY.match(name)
    if match is None:
        return Direction.UNKNOWN, Memory.UNKNOWN
    source, target, source_memory, target_memory = match.groups()
    host = source == "H", target == "H"
    if all(host):
        direction = Direction.H2H
    elif host[0]:
        direction = Direction.H2D
    elif host[1]:
        direction = Direction.D2H
    else:
        direction = Direction.D2D
    word = source_memory if host[0] else target_memory
    return direction, _MEMORY_WORDS.get((word or "").lower(), Memory.UNKNOWN)


_FUNCTION = re.compile(r"(?s)(.+)\((\d+)\): (.+)")
_ADDRESS = re.compile(r" at 0x[0-9a-f]+(?=>$)")


def kineto_function(name: str) -> str:
    """A Python function as stacks have it: `FILE(40): load` -> `load (FILE:40)`.

    Of a built-in one, without the address of its object: each object would make a name of its own.
    """
    match = _FUNCTION.fullmatch(name)
    return f"{match[3]} ({match[1]}:{match[2]})" if match else _ADDRESS.sub("", name)


def as_text(text: str) -> str:
    """The text, with question marks for halves of surrogate pairs: JSON can write one, and no file can hold it."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


class _Index(dict[str, int]):
    """Text -> index; an unknown text is appended to the list."""

    LONGEST = 4096

    def __init__(self, names: list[str]) -> None:
        super().__init__((name, i) for i, name in enumerate(names))
        self.names = names

    def __missing__(self, name: str) -> int:
        if len(name) > self.LONGEST:
            return self[name[: self.LONGEST]]
        index = self[name] = len(self.names)
        self.names.append(as_text(name))
        return index


class Names:
    """Interns text: each distinct one gets the next index; index 0 is "".

    Text of hostile files is cut at 4 KiB; what a report shows is far shorter.

    Attributes:
        list: the texts.
        index: text -> index; asking for an unknown text adds it.
    """

    LONGEST = _Index.LONGEST

    def __init__(self, names: Sequence[str] = ("",)) -> None:
        self.list = list(names)
        self.index = _Index(self.list)

    def add(self, name: str) -> int:
        """The index of `name`."""
        return self.index[name]

    def map(self, names: Sequence[str]) -> Array:
        """The indexes of many names, (len(names),) int32."""
        import numpy as np

        index = self.index
        return np.fromiter((index[name] for name in names), dtype=np.int32, count=len(names))


# Kineto's categories of events, spelled as in 2021 and since.
KINETO_CALLS = {"cuda_runtime", "Runtime", "cuda_driver", "Driver"}
KINETO_EXECUTIONS = {
    "kernel": Engine.KERNEL,
    "Kernel": Engine.KERNEL,
    "gpu_memcpy": Engine.COPY,
    "Memcpy": Engine.COPY,
    "gpu_memset": Engine.MEMSET,
    "Memset": Engine.MEMSET,
}
KINETO_RANGES = {
    "cpu_op": RangeStyle.OPERATOR,
    "Operator": RangeStyle.OPERATOR,
    "user_annotation": RangeStyle.ANNOTATION,
}
KINETO_LABELS = {"overhead"}
KINETO_FUNCTIONS = {"python_function"}  # with_stack=True
# the scanners' code of each, less one
KINETO_CODES = (*sorted(KINETO_CALLS), *KINETO_EXECUTIONS, *KINETO_RANGES, *KINETO_LABELS, *KINETO_FUNCTIONS)
# Calls that a Kineto does not know by name: CUPTI callback id -> name.
# Runtime ids of CUDA 12.8 (482, 483) and 13.0 (509, 510), each with its per-thread-default-stream twin.
_CBIDS = {
    **dict.fromkeys((482, 483, 509, 510), "cudaMemcpyBatchAsync"),
    **dict.fromkeys((776, 777, 796, 797), "cuMemcpyBatchAsync"),
}


def kineto_call(cbid: int) -> str:
    """What stands for a call that a trace names INVALID."""
    return _CBIDS.get(cbid, f"INVALID (cbid {cbid})")
