"""Memory as the engine sees it: a base address, a length and a kind, whatever object it came from."""

from __future__ import annotations

import contextlib
import ctypes as ct
from dataclasses import dataclass
from typing import Any

from kvprobe.cuda.pinned import PinnedBuffer, shared_pool
from kvprobe.cuda.runtime import Runtime
from kvprobe.errors import UsageError


@dataclass(frozen=True)
class Region:
    """A contiguous piece of memory.

    Attributes:
        address: of its first byte.
        bytes: its length.
        kind: "device", "pinned", "pageable" or "managed".
        owner: the object that keeps it alive, if any.
    """

    address: int
    bytes: int
    kind: str
    owner: Any = None

    def __post_init__(self) -> None:
        """Refuses what cannot be a piece of memory."""
        if self.address <= 0:
            raise UsageError(f"address {self.address:#x} is not a memory address")
        if self.bytes <= 0:
            raise UsageError(f"a region of {self.bytes} bytes is empty")


class Buffer:
    """Memory of a runtime, freed with the object; freeing device memory waits for the device."""

    def __init__(self, runtime: Runtime, size: int, kind: str) -> None:
        """Allocates `size` bytes of "device" or "pinned" memory."""
        if size <= 0:
            raise UsageError(f"cannot allocate {size} bytes")
        if kind not in ("device", "pinned"):
            raise UsageError(f"cannot allocate {kind!r} memory: use device or pinned")
        self._runtime, self._generation = runtime, runtime.generation
        self.bytes, self.kind = size, kind
        self._pinned: PinnedBuffer | None = None
        if kind == "pinned":
            self._pinned = shared_pool(runtime).take(size)
        self.address = self._pinned.address if self._pinned else runtime.malloc(size)

    @property
    def region(self) -> Region:
        """What the engine takes; keeps the buffer alive."""
        return Region(self.address, self.bytes, self.kind, self)

    def view(self) -> memoryview:
        """The bytes, for pinned memory (and for the host runtime's device memory, which is ordinary memory)."""
        return memoryview((ct.c_ubyte * self.bytes).from_address(self.address)).cast("B")

    def close(self) -> None:
        """Frees the memory; further use of the region is an error of the caller."""
        address, self.address = self.address, 0  # first: a free that fails must not be tried again later
        if self._pinned:
            self._pinned.close()
        elif address and self._generation == self._runtime.generation:
            self._runtime.free(address)

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # interpreter shutdown: the process takes the memory with it
            self.close()


def device_region(runtime: Runtime, size: int) -> Region:
    """New device memory."""
    return Buffer(runtime, size, "device").region


def host_region(runtime: Runtime, size: int) -> Region:
    """New pinned host memory."""
    return Buffer(runtime, size, "pinned").region


def region_of(runtime: Runtime, thing: Any) -> Region:
    """The memory of a Region, a buffer, a tensor, `__cuda_array_interface__`, DLPack, numpy, or (address, bytes).

    Raises:
        UsageError: not contiguous, empty, or nothing that has memory.
    """
    if isinstance(thing, Region):
        return thing
    if isinstance(thing, Buffer):
        return thing.region
    if isinstance(thing, PinnedBuffer):
        return Region(thing.address, thing.bytes, thing.kind, thing)
    if isinstance(thing, tuple) and len(thing) == 2 and all(isinstance(part, int) for part in thing):
        return Region(thing[0], thing[1], runtime.memory_kind(thing[0]))
    if hasattr(thing, "data_ptr") and hasattr(thing, "element_size"):  # torch, without importing it
        if not thing.is_contiguous():
            raise UsageError(f"tensor of shape {tuple(thing.shape)} is not contiguous; pass its storage")
        address, size = thing.data_ptr(), thing.numel() * thing.element_size()
        return Region(address, size, runtime.memory_kind(address), thing)
    interface = getattr(thing, "__cuda_array_interface__", None) or getattr(thing, "__array_interface__", None)
    if interface is not None:
        return _of_interface(runtime, thing, interface)
    if hasattr(thing, "__dlpack__"):
        return _of_dlpack(runtime, thing)
    raise UsageError(
        f"{type(thing).__name__} has no memory that kvprobe can use: pass a tensor, DLPack or (address, bytes)"
    )


def _of_interface(runtime: Runtime, thing: Any, interface: dict[str, Any]) -> Region:
    shape, item = interface["shape"], int(interface["typestr"][2:])
    expected: list[int] = []
    size = item
    for extent in reversed(shape):
        expected.insert(0, size)
        size *= extent
    strides = interface.get("strides")
    if strides is not None and tuple(strides) != tuple(expected):
        raise UsageError(f"array of shape {tuple(shape)} is not contiguous")
    address = interface["data"][0]
    return Region(address, size, runtime.memory_kind(address), thing)


class _DLTensor(ct.Structure):
    """`DLTensor` of DLPack 0.x and 1.x (the unversioned capsule)."""

    _fields_ = [
        ("data", ct.c_void_p),
        ("device_type", ct.c_int32),
        ("device_id", ct.c_int32),
        ("ndim", ct.c_int32),
        ("code", ct.c_uint8),
        ("bits", ct.c_uint8),
        ("lanes", ct.c_uint16),
        ("shape", ct.POINTER(ct.c_int64)),
        ("strides", ct.POINTER(ct.c_int64)),
        ("byte_offset", ct.c_uint64),
    ]


def _of_dlpack(runtime: Runtime, thing: Any) -> Region:
    capsule = thing.__dlpack__()
    get = ct.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = ct.c_void_p, [ct.py_object, ct.c_char_p]
    try:
        tensor = _DLTensor.from_address(get(capsule, b"dltensor"))
    except ValueError:
        raise UsageError(f"{type(thing).__name__} gives a DLPack capsule of an unknown form") from None
    size = tensor.bits * tensor.lanes // 8
    for axis in reversed(range(tensor.ndim)):
        if tensor.strides and tensor.shape[axis] > 1 and tensor.strides[axis] * tensor.bits * tensor.lanes // 8 != size:
            raise UsageError("DLPack tensor is not contiguous")
        size *= tensor.shape[axis]
    address = (tensor.data or 0) + tensor.byte_offset
    # the capsule is dropped unconsumed, which releases its reference; `thing` keeps the memory
    return Region(address, size, runtime.memory_kind(address), thing)
