"""Where the bytes of weights live: pinned memory in few large pieces, GPU memory, and tensors over both."""

from __future__ import annotations

import ctypes as ct
from typing import Any

from kvprobe.cuda import Buffer, Runtime
from kvprobe.errors import CudaError, KvprobeError, UsageError
from kvprobe.native.library import core
from kvprobe.weights.plan import Extent, PlacedTensor

CHUNK_BYTES = 4 << 30  # one allocation: large enough to be few, small enough that old and new never lie side by side


def tensor_of(buffer: Buffer) -> Any:
    """A uint8 tensor over memory of the host; it keeps the buffer alive."""
    import torch

    raw = (ct.c_ubyte * buffer.region.bytes).from_address(buffer.address)
    raw._owner = buffer  # type: ignore[attr-defined]
    return torch.frombuffer(raw, dtype=torch.uint8)


def view_of(memory: Any, start: int, held: PlacedTensor) -> Any:
    """`held`'s shape and type over the bytes of `memory` (uint8) that begin at `start`."""
    import torch

    tensor = held.tensor
    size = tensor.element_size()
    first = memory.storage_offset() + start + held.offset
    if first % size:
        raise UsageError(f"tensors of different types share unaligned bytes ({tensor.dtype}): they cannot be moved")
    view = torch.empty(0, dtype=tensor.dtype, device=memory.device)
    return view.set_(memory.untyped_storage(), first // size, tensor.shape, tensor.stride())


def bytes_of(extent: Extent) -> Any:
    """The bytes of an extent as they lie now, a uint8 tensor of `extent.bytes`."""
    import torch

    held = extent.tensors[0]
    tensor = held.tensor.detach()
    start = tensor.storage_offset() * tensor.element_size() - held.offset
    view = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return view.set_(tensor.untyped_storage(), start, (extent.bytes,), (1,))


class DeviceMemory:
    """GPU memory for weights; on the host runtime its own, on CUDA torch's, so that torch's accounting sees it."""

    def __init__(self, runtime: Runtime) -> None:
        """On CUDA the calling thread's current device."""
        import torch

        self.runtime = runtime
        self.device = torch.device("cpu" if runtime.provider == "host" else "cuda")
        if self.device.type == "cuda":
            self.device = torch.device("cuda", torch.cuda.current_device())
        self.bytes = 0
        self._buffers: list[Buffer] = []

    def take(self, size: int, use: str) -> Any:
        """A uint8 tensor of `size` bytes.

        Raises:
            KvprobeError: the GPU lacks the memory.
        """
        import torch

        try:
            if self.device.type == "cpu":
                buffer = Buffer(self.runtime, size, "device")
                self._buffers.append(buffer)
                found = tensor_of(buffer)
            else:
                found = torch.empty(size, dtype=torch.uint8, device=self.device)
        except (CudaError, torch.cuda.OutOfMemoryError) as error:
            if isinstance(error, CudaError) and error.code != 2:  # cudaErrorMemoryAllocation
                raise
            raise KvprobeError(
                f"the GPU lacks {size / 2**20:,.0f} MiB of memory for {use}: lower gpu_fraction or "
                "gpu_bytes, or the window"
            ) from None
        self.bytes += size
        return found

    def drop(self, memory: Any) -> None:
        """Gives back what `take` gave; no other tensor over it may be in use."""
        self.bytes -= memory.numel()
        for buffer in [one for one in self._buffers if one.address == memory.data_ptr()]:
            self._buffers.remove(buffer)
            buffer.close()

    def close(self) -> None:
        """Frees what is the runtime's own; tensors over it must be gone. torch frees its own with the tensors."""
        for buffer in self._buffers:
            buffer.close()
        self._buffers.clear()
        self.bytes = 0


class HostMemory:
    """CPU memory for offloaded units, in chunks; pinned as long as the system allows it.

    Attributes:
        bytes: all of it.
        pageable_bytes: the part that could not be pinned.
        refusal: why not; empty where all is pinned.
        pin_ns: time the allocations took.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._chunk: Any = None
        self._used = 0
        self._buffers: list[Buffer] = []
        self.bytes = self.pageable_bytes = self.pin_ns = self.chunks = 0
        self.refusal = ""

    def take(self, size: int, still: int) -> Any:
        """Memory of `size` bytes, a uint8 tensor; `still` bytes, these included, are wanted in all.

        Raises:
            KvprobeError: the machine has no memory left.
        """
        if self._chunk is None or self._used + size > self._chunk.numel():
            self._new(max(size, min(CHUNK_BYTES, still)))
        found = self._chunk[self._used : self._used + size]
        self._used += size
        return found

    def _new(self, size: int) -> None:
        import torch

        began = core().kvp_now_ns()
        try:
            if self.refusal:
                raise MemoryError
            buffer = Buffer(self._runtime, size, "pinned")
            self._buffers.append(buffer)
            self._chunk = tensor_of(buffer)
        except (CudaError, MemoryError) as error:
            if isinstance(error, CudaError):
                if error.code != 2:  # cudaErrorMemoryAllocation
                    raise
                self.refusal = str(error)
            try:
                self._chunk = torch.empty(size, dtype=torch.uint8)
            except RuntimeError:
                raise KvprobeError(
                    f"the machine has no {size / 2**20:,.0f} MiB of memory for offloaded weights: raise gpu_fraction"
                ) from None
            self.pageable_bytes += size
        self._used = 0
        self.chunks += 1
        self.bytes += size
        self.pin_ns += core().kvp_now_ns() - began

    def close(self) -> None:
        """Frees pinned memory; tensors over it must be gone."""
        self._chunk = None
        for buffer in self._buffers:
            buffer.close()
        self._buffers.clear()
