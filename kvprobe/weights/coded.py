"""Coded weights: units that are packed once, travel by the copy engine in fewer bytes, and are unpacked on the GPU.

A unit is cut into parts; each has an image (`native/src/wire.h`) in pinned memory beside the unit's own bytes. A load
copies the images into a ring of stages in GPU memory, one after another, at the link's rate; on a second stream a
kernel unpacks each into the unit's slot while the next one is on its way. What was changed since it was packed travels
as it is.
"""

from __future__ import annotations

import ctypes as ct
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from os import cpu_count
from typing import Any

import numpy as np

from kvprobe.cuda import Buffer, Runtime
from kvprobe.cuda.kernels import CopyKernels, load_copy_kernels
from kvprobe.errors import KvprobeError
from kvprobe.native.library import core
from kvprobe.offload.wire import REFUSALS, TYPES
from kvprobe.weights.memory import DeviceMemory, HostMemory

PART_BYTES = 32 << 20  # of a unit: 0.4 ms on a link of 55 GB/s, beside which submitting its image is cheap
STAGES = 4  # images that are on their way, wait, or are unpacked
FIRST = -1  # priority of the stream on which they are unpacked: before those of streams without one
LEAST_GAIN = 0.03  # share of a unit's bytes that packing must save
HIDDEN = 0.95  # share of a forward's computation that copies as they are may take and still be hidden by it


def staging_bytes(largest: int) -> int:
    """GPU memory for the stages of units of at most so many bytes."""
    return STAGES * min(PART_BYTES, largest)


@dataclass(frozen=True)
class Image:
    """A part of a unit, packed.

    Attributes:
        address: in pinned memory.
        bytes: that travel.
        start: where the part begins in the unit.
        raw_bytes: of the part.
    """

    address: int
    bytes: int
    start: int
    raw_bytes: int


@dataclass(frozen=True)
class Packed:
    """A unit's images, the memory in which they lie, and how often each of its tensors had been changed by then."""

    images: tuple[Image, ...]
    memory: Any
    versions: list[int]

    @property
    def bytes(self) -> int:
        """That travel."""
        return sum(image.bytes for image in self.images)


def pack(memories: Sequence[Any], versions: Sequence[list[int]], host: HostMemory) -> list[Packed | None]:
    """Packs units by several threads; None for those that do not shrink.

    Args:
        memories: the bytes of each, a uint8 CPU tensor.
        versions: of its tensors, now.
        host: where the images go.

    Raises:
        KvprobeError: the machine has no memory left.
    """
    with ThreadPoolExecutor(min(16, cpu_count() or 1)) as pool:
        found: list[Packed | None] = []
        still = sum(memory.numel() for memory in memories)
        for memory, seen in zip(memories, versions, strict=True):
            size = memory.numel()
            starts = range(0, size, PART_BYTES)
            parts = list(pool.map(lambda start, memory=memory: _image_of(memory, start), starts))
            total = sum(len(part) for part in parts)
            shrinks = total <= (1 - LEAST_GAIN) * size and all(len(part) <= min(PART_BYTES, size) for part in parts)
            found.append(_kept(parts, host.take(total, still * total // size), starts, size, seen) if shrinks else None)
            still -= size
    return found


def _image_of(memory: Any, start: int) -> np.ndarray[Any, Any]:
    size = min(PART_BYTES, memory.numel() - start)
    image = np.empty(size + 24 * (size // 16384 + 2), np.uint8)
    return image[: core().kvp_wire_pack(TYPES["bf16"], memory.data_ptr() + start, size, image.ctypes.data)]


def _kept(parts: list[Any], memory: Any, starts: Sequence[int], size: int, versions: list[int]) -> Packed:
    at, images = int(memory.data_ptr()), []
    for part, start in zip(parts, starts, strict=True):
        ct.memmove(at, part.ctypes.data, len(part))
        images.append(Image(at, len(part), start, min(PART_BYTES, size - start)))
        at += len(part)
    return Packed(tuple(images), memory, versions)


class Unpacker:
    """The stages, and the stream and kernel that unpack what lies in them.

    Attributes:
        stream: on which units are unpacked.
    """

    def __init__(self, runtime: Runtime, kernels: CopyKernels, device: DeviceMemory, largest: int) -> None:
        """For units of at most `largest` bytes; `kernels` as `kernels_of` found them."""
        self._runtime, self._device, self._kernel = runtime, device, kernels.unpack
        assert self._kernel is not None
        self._launch = ct.CFUNCTYPE(ct.c_int, ct.c_void_p, *[ct.c_uint] * 7, ct.c_void_p, ct.c_void_p, ct.c_void_p)(
            kernels.launch_kernel
        )
        with ExitStack() as made:
            self.memory: Any = device.take(staging_bytes(largest), f"{STAGES} stages of coded weights")
            made.callback(self._drop)
            self._flag = Buffer(runtime, 16, "pinned")
            made.callback(self._flag.close)
            self.stream = runtime.stream_create(FIRST)  # a model's kernels in the way would hold up the copies
            made.callback(runtime.stream_destroy, self.stream)
            self._stages = []
            for i in range(STAGES):
                full = runtime.event_create()
                made.callback(runtime.event_destroy, full)
                free = runtime.event_create()
                made.callback(runtime.event_destroy, free)
                at = int(self.memory.data_ptr()) + i * (self.memory.numel() // STAGES)
                self._stages.append(_Stage(at, full, free))
            self._made = made.pop_all()
        self._next = 0
        self._refused = np.frombuffer(self._flag.view(), np.uint32)
        self._refused[:] = 0
        self._work = np.zeros(4, np.uint64)  # kvp_wire_unpacking
        self._given = (ct.c_void_p * 1)(self._work.ctypes.data)

    def load(self, packed: Packed, slot: int, copy_stream: int, submit: Callable[[int, int, int], None]) -> None:
        """Brings a unit into the slot at an address; on `stream` what follows finds it there.

        Args:
            packed: the unit.
            slot: address; on `stream` it is free.
            copy_stream: on which the images travel.
            submit: submits a copy there: (destination, source, bytes).
        """
        runtime = self._runtime
        for image in packed.images:
            stage, self._next = self._stages[self._next], (self._next + 1) % STAGES
            if stage.used:
                runtime.stream_wait_event(copy_stream, stage.free)
            submit(stage.address, image.address, image.bytes)
            runtime.event_record(stage.full, copy_stream)
            runtime.stream_wait_event(self.stream, stage.full)
            self._unpack(stage.address, slot + image.start, image.raw_bytes)
            runtime.event_record(stage.free, self.stream)
            stage.used = True

    def _unpack(self, image: int, to: int, raw_bytes: int) -> None:
        kernel = self._kernel
        assert kernel is not None
        self._work[:] = image, to, raw_bytes, self._flag.address
        ctas = min(kernel.max_ctas, -(-raw_bytes // 16384))
        code = self._launch(
            kernel.function, ctas, 1, 1, kernel.threads, 1, 1, kernel.shared_bytes, self.stream, self._given, None
        )
        if code:
            raise self._runtime.error("cuLaunchKernel", code)

    def check(self) -> None:
        """What the device has unpacked so far is what was packed.

        Raises:
            KvprobeError: it is not.
        """
        refused = int(self._refused[0])
        if refused:
            self._refused[0] = 0
            raise KvprobeError(
                f"weights of the forward before this one came out wrong: {REFUSALS.get(refused, 'damaged')}; their "
                "memory was overwritten: find out by whom, or offload with wire='raw'"
            )

    def forget(self) -> None:
        """A capture begins, or replays were in between: what follows comes behind all that was submitted, as it is."""
        for stage in self._stages:
            stage.used = False

    def _drop(self) -> None:
        self._device.drop(self.memory)
        self.memory = None

    def close(self) -> None:
        """Frees everything; the device must be done with it."""
        self._refused = np.zeros(4, np.uint32)
        self._made.close()


@dataclass
class _Stage:
    """GPU memory for one image: the copy into it and the kernel that reads it have ended at these events."""

    address: int
    full: int
    free: int
    used: bool = False


def kernels_of(runtime: Runtime) -> CopyKernels:
    """The kernels, one of which unpacks images.

    Raises:
        KvprobeError: there is none here; the text says why.
    """
    kernels = load_copy_kernels(runtime)
    if kernels.unpack is None:
        why = kernels.reason or "it needs compute capability 9.0"
        raise KvprobeError(f"coded weights cannot be had: {why}; use wire='raw'")
    return kernels
