"""Plays torch's CUDA device on torch's CPU build, over the embedded host runtime.

What a program does with `device="cuda"` then happens: memory comes from the runtime's cudaMalloc and cudaHostAlloc,
copies between CPU and GPU are its cudaMemcpyAsync on torch's current stream, and wait where torch waits; streams and
events are its own. Only arithmetic is not the device's: torch's CPU kernels do it, at once, after every copy that is
outstanding has ended, so its results are those of a program whose order is right. Time is virtual.

Not played: backward passes, CUDA graphs, compiled code (torch.compile gives back what it was given), custom kernels,
random generators of the device, peer and multi-device copies.
"""

from __future__ import annotations

import ctypes as ct
import threading
import weakref
from collections.abc import Callable
from typing import Any

from kvprobe.cuda.hostruntime import HostRuntime
from kvprobe.errors import UsageError
from kvprobe.testing.played_cuda import cuda_names
from kvprobe.testing.played_tensor import data_property, tensor_class

__all__ = ["PlayedTorch"]

SEGMENT = 2 << 20  # small tensors are cut from segments of this size, as torch's allocator does
SMALLEST = 512
_FACTORIES = (
    "empty",
    "zeros",
    "ones",
    "full",
    "rand",
    "randn",
    "randint",
    "arange",
    "empty_strided",
    "tensor",
    "as_tensor",
)
_LIKE = ("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like")
# one operation of the device each: torch would take it apart, ask for the CUDA build's choice of a kernel, or give a
# tensor its shape afterwards
_WHOLE = (
    "scaled_dot_product_attention",
    "arange",
    "arange.start",
    "arange.start_step",
    "linspace",
    "logspace",
    "range",
    "range.step",
    "eye",
    "eye.m",
    "randperm",
)
# torch's CUDA kernels of these read a size back from the device
_SIZED_BY_DATA = ("nonzero", "masked_select", "unique_consecutive", "_unique2", "unique_dim")


class _Pool:
    """Blocks of one sort of memory, kept for the next tensor as torch's caching allocators keep them."""

    def __init__(self, allocate: Callable[[int], int], segment: int) -> None:
        self._allocate, self._segment = allocate, segment
        self._free: dict[int, list[int]] = {}
        self._lock = threading.RLock()
        self.live: set[int] = set()
        self.bytes = 0

    def take(self, size: int) -> ct.Array[ct.c_uint8]:
        """Memory of `size` bytes that comes back when nothing refers to it any more."""
        block = max(SMALLEST, 1 << (size - 1).bit_length())
        with self._lock:
            free = self._free.setdefault(block, [])
            if not free:
                whole = max(block, self._segment)
                base = self._allocate(whole)
                free += range(base, base + whole, block)
            address = free.pop()
            self.live.add(address)
            self.bytes += block
        memory = (ct.c_uint8 * size).from_address(address)
        finalizer: Any = weakref.finalize(memory, self._back, address, block)
        finalizer.atexit = False
        return memory

    def _back(self, address: int, block: int) -> None:
        with self._lock:
            self.live.discard(address)
            self.bytes -= block
            self._free[block].append(address)


class PlayedTorch:
    """torch with a GPU that the host runtime plays, from `install` until `remove`.

    Raises:
        UsageError: torch is a CUDA build, whose own CUDA functions would be called.
    """

    def __init__(self, runtime: HostRuntime) -> None:
        """Takes a host runtime whose clock is virtual."""
        import torch

        if torch.version.cuda or torch.version.hip:
            raise UsageError(
                f"torch {torch.__version__} is a GPU build, and the host runtime plays for CPU builds: install torch's "
                "CPU build, or run on a GPU with --kvprobe-device cuda"
            )
        self.torch, self.runtime = torch, runtime
        self.device = torch.device("cuda", 0)
        self.memory = _Pool(runtime.malloc, SEGMENT)
        self.pinned = _Pool(runtime.host_alloc, 0)
        self._local = threading.local()
        self._kept: list[Any] = []  # of copies that may still be outstanding
        self._undo: list[Callable[[], None]] = []
        self._kernels: Any = None
        self.Tensor = tensor_class(self)

    # ---- memory ------------------------------------------------------------------------------------------------

    def _tensor(self, pool: _Pool, like: Any) -> Any:
        """A CPU tensor of the same shape, strides and type in a pool's memory; its bytes are what they were."""
        torch = self.torch
        if not like.numel():
            return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)
        span = 1 + sum((size - 1) * stride for size, stride in zip(like.shape, like.stride(), strict=True))
        memory = pool.take(span * like.element_size())
        flat = torch.frombuffer(memory, dtype=torch.uint8).view(like.dtype)
        return flat.as_strided(like.shape, like.stride())

    def _on_device(self, inner: Any) -> Any:
        """A tensor of the device for what a CPU kernel made; what lies in the device's memory stays where it is."""
        if not isinstance(inner, self.Tensor):
            if inner.numel() and inner.untyped_storage().data_ptr() not in self.memory.live:
                made = self._tensor(self.memory, inner)
                made.copy_(inner)
                inner = made
            return self.Tensor(inner)
        return inner

    def is_pinned(self, tensor: Any) -> bool:
        """Whether a CPU tensor lies in the runtime's pinned memory."""
        return bool(tensor.numel()) and tensor.untyped_storage().data_ptr() in self.pinned.live

    def pin(self, tensor: Any) -> Any:
        """A pinned tensor like this one, with its bytes."""
        made = self._tensor(self.pinned, self.torch.empty_like(tensor, device="meta"))
        return made.copy_(tensor)

    # ---- streams -----------------------------------------------------------------------------------------------

    @property
    def stream(self) -> int:
        """Handle of this thread's current stream."""
        return int(getattr(self._local, "stream", 0))

    def _drain(self) -> None:
        """Lets every copy end: what a kernel reads was copied before it on its stream, or behind an event."""
        while pending := self.runtime.stats.operations_pending:
            self.runtime.advance(1_000_000_000)
            if self.runtime.stats.operations_pending == pending:
                break
        self._kept.clear()

    def _copy(self, dst: Any, src: Any, kind: str, wait: bool) -> None:
        size = dst.numel() * dst.element_size()
        if not size:
            return
        self._kept.append((dst, src))
        self.runtime.memcpy_async(dst.data_ptr(), src.data_ptr(), size, kind, self.stream)
        if wait:
            self.runtime.stream_synchronize(self.stream)

    # ---- operations --------------------------------------------------------------------------------------------

    def _inner(self, value: Any) -> Any:
        torch = self.torch
        if isinstance(value, self.Tensor):
            return value.inner
        if isinstance(value, (list, tuple)):
            return type(value)(map(self._inner, value))
        if isinstance(value, torch.device) and value.type == "cuda":
            return torch.device("cpu")
        return value

    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """One operation of torch on tensors of the device."""
        torch = self.torch
        aten = torch.ops.aten
        if func is torch.ops.prim.device.default:
            return self.device
        if func is aten.copy_.default:
            return self._copy_into(*args, **kwargs)
        if func is aten._to_copy.default:
            return self._to(*args, **kwargs)
        if func is aten.record_stream.default:
            return None
        if func is aten.is_pinned.default:
            return False
        self._drain()
        name = func._schema.name.removeprefix("aten::")
        if name in _SIZED_BY_DATA or (func is aten.index.Tensor and _masked(args[1])):
            self._read_back(8)
        given = {id(one.inner): one for one in _tensors((args, tuple(kwargs.values()))) if isinstance(one, self.Tensor)}
        out = func(*self._inner(args), **{key: self._inner(value) for key, value in kwargs.items()})
        if not isinstance(out, (torch.Tensor, list, tuple)) and out is not None:
            self._read_back(8)
            return out
        for one in given.values() if func._schema.is_mutable else ():
            _take_shape(one)
        return self._wrapped(out, given)

    def _wrapped(self, out: Any, given: dict[int, Any]) -> Any:
        if isinstance(out, self.torch.Tensor):
            return given.get(id(out)) if id(out) in given else self._on_device(out)
        if isinstance(out, (list, tuple)):
            return type(out)(self._wrapped(one, given) for one in out)
        return out

    def _read_back(self, size: int) -> None:
        """What `item` and its like do: a few bytes to pinned memory, and a wait."""
        if not hasattr(self, "_few"):
            self._few = self.pinned.take(64), self.memory.take(64)
        to, of = self._few
        self.runtime.memcpy_async(ct.addressof(to), ct.addressof(of), size, "d2h", self.stream)
        self.runtime.stream_synchronize(self.stream)

    def _copy_into(self, dst: Any, src: Any, non_blocking: bool = False) -> Any:
        torch, played = self.torch, self.Tensor
        if not isinstance(src, played) and src.device.type == "meta":
            raise NotImplementedError("a meta tensor has no bytes to copy")
        if isinstance(dst, played) and isinstance(src, played):
            self._drain()
            dst.inner.copy_(src.inner)
        elif isinstance(dst, played):
            inner = dst.inner
            # as torch does: the bytes as they are, conversion and strides afterwards on the device
            packed = src.expand(inner.shape).to(inner.dtype)
            packed = packed if packed.is_contiguous() else packed.contiguous()
            direct = inner.is_contiguous()
            staged = (
                inner
                if direct
                else self._tensor(self.memory, torch.empty(inner.shape, dtype=inner.dtype, device="meta"))
            )
            self._copy(staged, packed, "h2d", wait=not non_blocking)
            if not direct:
                self._drain()
                inner.copy_(staged)
        else:
            if not src.inner.is_contiguous() or src.dtype != dst.dtype or src.shape != dst.shape:
                self._drain()
                packed = self._on_device(src.inner.expand(dst.shape).to(dst.dtype).contiguous()).inner
            else:
                packed = src.inner
            if dst.is_contiguous():
                self._copy(dst, packed, "d2h", wait=not non_blocking)
            else:
                staged = torch.empty(dst.shape, dtype=dst.dtype)
                self._copy(staged, packed, "d2h", wait=True)
                dst.copy_(staged)
        return dst

    def _to(
        self,
        tensor: Any,
        *,
        dtype: Any = None,
        layout: Any = None,
        device: Any = None,
        pin_memory: Any = None,
        non_blocking: bool = False,
        memory_format: Any = None,
    ) -> Any:
        torch = self.torch
        if device is None or device.type == "cuda":
            self._drain()
            inner = tensor.inner.to(
                dtype or tensor.dtype, copy=True, memory_format=memory_format or torch.preserve_format
            )
            return self._on_device(inner)
        if device.type == "meta":
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype or tensor.dtype, device="meta")
        like = torch.empty_like(tensor.inner, dtype=dtype or tensor.dtype, device="meta")
        # torch, too, pins what a GPU tensor goes to without blocking
        out = self._tensor(self.pinned, like) if non_blocking or pin_memory else torch.empty_like(like, device="cpu")
        return self._copy_into(out, tensor, non_blocking)

    # ---- torch.cuda --------------------------------------------------------------------------------------------

    def install(self) -> PlayedTorch:
        """Puts the device into torch, for the whole process."""
        torch = self.torch
        _set_guard()
        self._kernels = torch.library.Library("_", "IMPL", "CUDA")
        self._kernels.fallback(lambda op, *args, **kwargs: self.run(op, args, kwargs), "CUDA")
        self._own = torch.library.Library("aten", "IMPL")
        for name in _WHOLE:
            self._own.impl(name, self._whole(name), "CUDA")
        cuda = cuda_names(self)
        for name, value in cuda.items():
            self._set(torch.cuda, name, value)
        self._set(torch, "Stream", cuda["Stream"])
        self._set(torch, "Event", cuda["Event"])
        accelerator = {
            name: cuda[name] for name in ("is_available", "device_count", "current_stream", "set_stream", "synchronize")
        }
        accelerator["current_accelerator"] = lambda check_available=False: torch.device("cuda")
        accelerator["current_device_index"] = lambda: 0
        for name, value in accelerator.items():
            self._set(torch.accelerator, name, value)
        for name in _FACTORIES + _LIKE:
            self._set(torch, name, self._factory(getattr(torch, name)))
        # a module's parameter becomes another object, as its class is another
        before = torch.__future__.get_overwrite_module_params_on_conversion()
        torch.__future__.set_overwrite_module_params_on_conversion(True)
        self._undo.append(lambda: torch.__future__.set_overwrite_module_params_on_conversion(before))
        to, play = torch.Tensor.to, self

        def indexed(value: Any) -> Any:
            if isinstance(value, (str, torch.device)) and str(value) == "cuda":
                return play.device
            if isinstance(value, int) and not isinstance(value, bool):
                return torch.device("cuda", value)
            return value

        def moved(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            if "device" in kwargs:
                kwargs["device"] = indexed(kwargs["device"])
            return to(tensor, *(indexed(args[0]), *args[1:]) if args else args, **kwargs)

        def to_cuda(tensor: Any, device: Any = None, non_blocking: bool = False, memory_format: Any = None) -> Any:
            return moved(tensor, play.device, non_blocking=non_blocking)

        def to_cpu(tensor: Any, memory_format: Any = None) -> Any:
            return to(tensor, "cpu")

        self._set(torch.Tensor, "data", data_property(self))
        self._set(torch, "compile", lambda model=None, **_: model if model is not None else lambda made: made)
        self._set(torch.Tensor, "to", moved)
        self._set(torch.Tensor, "cuda", to_cuda)
        self._set(torch.Tensor, "cpu", to_cpu)
        self._set(
            torch.Tensor,
            "pin_memory",
            lambda tensor, device=None: tensor if play.is_pinned(tensor) else play.pin(tensor),
        )
        self._set(
            torch.Tensor,
            "is_pinned",
            lambda tensor, device=None: not isinstance(tensor, play.Tensor) and play.is_pinned(tensor),
        )
        return self

    def _whole(self, name: str) -> Callable[..., Any]:
        operation, _, overload = name.partition(".")
        func = getattr(getattr(self.torch.ops.aten, operation), overload or "default")
        return lambda *args, **kwargs: self.run(func, args, kwargs)

    def remove(self) -> None:
        """Takes the device out of torch; its tensors must not be used any more."""
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()
        if self._kernels is not None:
            self._kernels._destroy()
            self._own._destroy()
            self._kernels = None

    def _set(self, owner: Any, name: str, value: Any) -> None:
        own = name in vars(owner)
        was = vars(owner).get(name)
        self._undo.append(lambda: setattr(owner, name, was) if own else delattr(owner, name))
        setattr(owner, name, value)

    def _factory(self, function: Any) -> Any:
        from_data = function.__name__ in ("tensor", "as_tensor")

        def make(*args: Any, **kwargs: Any) -> Any:
            device = kwargs.get("device")
            pinned = kwargs.pop("pin_memory", False)
            if from_data and device is not None and self.torch.device(device).type == "cuda":
                return function(*args, **{**kwargs, "device": "cpu"}).to(self.device)
            made = function(*args, **kwargs)
            return self.pin(made) if pinned else made

        make.__name__ = function.__name__
        return make


def _set_guard() -> None:
    """Gives torch a guard for CUDA devices, which its CPU build lacks: the meta device's, which does nothing."""
    cuda, meta = 1, 14  # c10::DeviceType
    try:
        registry = (ct.c_void_p * 20).in_dll(ct.CDLL("libc10.so"), "_ZN3c104impl26device_guard_impl_registryE")
    except (OSError, ValueError) as error:
        raise UsageError(f"this torch cannot be given a played GPU: {error}") from None
    registry[cuda] = registry[cuda] or registry[meta]


def _tensors(value: Any) -> list[Any]:
    if isinstance(value, (list, tuple)):
        return [one for part in value for one in _tensors(part)]
    return [value]


def _masked(indices: Any) -> bool:
    return any(one is not None and str(one.dtype) in ("torch.bool", "torch.uint8") for one in indices)


def _take_shape(tensor: Any) -> None:
    """After an operation in place that may have given the inner tensor another shape."""
    if tensor.shape != tensor.inner.shape or tensor.stride() != tensor.inner.stride():
        raise NotImplementedError("the played GPU cannot change a tensor's shape in place")
