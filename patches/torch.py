"""torch: `Module.to`, `cpu` and `cuda`, which move a model tensor by tensor.

torch 2.13: `Tensor.to("cpu")` makes pageable memory and copies into it, blocking; with `non_blocking=True` it pins the
result, in memory that its host allocator keeps. `to("cuda")` of pageable memory blocks either way. Pageable copies of
many MiB may go through pinned chunks instead (`kvprobe/instrument/staged.py`): the results are the same tensors, in the
same kind of memory, with the same bytes. Left alone: subclasses of tensors, tensors that are not contiguous or change
their type, gradients that are recorded, streams that are captured, and programs whose copies the interposer stages.
"""

from __future__ import annotations

import time
from pathlib import Path
from types import ModuleType
from typing import Any

from kvprobe.environment import FIX
from kvprobe.instrument.adapter import Target
from kvprobe.instrument.calls import NOTHING, TimedCalls, TimedFunction, timed
from kvprobe.instrument.device import device_of
from kvprobe.instrument.hooks import Call, Patcher
from kvprobe.instrument.staged import StagedCopies, Turns

_MODULE = "torch.nn.modules.module"
LEAST_BYTES = 8 << 20  # of a tensor
TOLD_BYTES = 1 << 20  # of a module: what is less is no event


class _Move:
    """One call that moves a module: where to, whether torch was told not to block, and what moved so far."""

    __slots__ = ("begun", "bytes", "changes", "copies", "device", "pageable", "told")

    def __init__(self, device: Any, changes: bool, told: str) -> None:
        self.device, self.changes, self.told = device, changes, told
        self.begun = False
        self.bytes = self.copies = self.pageable = 0


class ModuleMoves(TimedCalls):
    """`torch.nn.Module.to`, `cpu` and `cuda`."""

    name = "torch.module"
    summary = "Names moves of modules between CPU and GPU, with their bytes and what of them is pageable."
    changes = "pageable copies of 8 MiB and more go through pinned memory, with several threads, where that is faster"
    timed = (
        timed(_MODULE, "Module.to", (), "store"),
        timed(_MODULE, "Module.cpu", (), "store"),
        timed(_MODULE, "Module.cuda", (), "load"),
    )
    targets = (Target(_MODULE, "Module._apply", ("fn", "recurse")),)

    def __init__(self) -> None:
        super().__init__()
        self.now_ns = time.monotonic_ns
        self.plain: tuple[Any, ...] = ()
        self.turns = {True: Turns(), False: Turns()}  # to the GPU; to the CPU
        self._copies: StagedCopies | None = None
        self._torch: Any = None
        self._cures = False

    def patch(self, patcher: Patcher, module: ModuleType) -> None:
        """Also sees how a module's tensors are moved."""
        self._torch = torch = module.torch
        self.plain = (torch.Tensor, torch.nn.Parameter)
        self._cures = self.fix == "auto" and not _interposer_stages()
        super().patch(patcher, module)
        patcher.wrap(module.Module, "_apply", self.apply)

    def heard(self) -> bool:
        """Under auto it moves tensors whether anybody listens or not."""
        return self._cures or super().heard()

    def before(self, entry: TimedFunction, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Where to; nothing to tell where a call moves nothing, or another one around it does."""
        if self.running() is not None:
            return NOTHING
        torch, said = self._torch, entry.target.path
        if said.endswith("cpu"):
            return _Move(torch.device("cpu"), True, said)
        if said.endswith("cuda"):
            return _Move(torch.device("cuda"), True, said)
        try:
            device, dtype, non_blocking, memory_format = torch._C._nn._parse_to(*args[1:], **kwargs)
        except Exception:  # torch says what is wrong with it
            return NOTHING
        if device is None or device.type not in ("cpu", "cuda"):
            return NOTHING
        # without blocking torch makes the CPU's tensor a pinned one
        plain = dtype is None and memory_format is None and not (non_blocking and device.type == "cpu")
        return _Move(device, plain, f"{said}: {device.type}")

    def after(self, entry: TimedFunction, remembered: Any) -> Any:
        """What moved; a small module is no event."""
        if remembered.bytes < TOLD_BYTES:
            return NOTHING
        return {
            "phase": remembered.told,
            "direction": "load" if remembered.device.type == "cuda" else "store",
            "bytes": remembered.bytes,
            "copies": remembered.copies,
            "pageable_copies": remembered.pageable,
        }

    def apply(self, call: Call, module: Any, fn: Any, *args: Any, **kwargs: Any) -> Any:
        """Around `_apply`, which calls `fn` with each tensor: of the outermost one, with a look at each."""
        move = self.running()
        if move is None or move.begun:
            return call()
        move.begun = True
        return call.using(module, lambda tensor: self._each(move, fn, tensor), *args, **kwargs)

    def _each(self, move: _Move, fn: Any, tensor: Any) -> Any:
        if not self.applied or tensor.device.type == move.device.type:
            return fn(tensor)
        to_gpu = move.device.type == "cuda"
        size = int(tensor.numel()) * int(tensor.element_size())
        pageable = move.changes and not (to_gpu and tensor.is_pinned())
        move.bytes, move.copies, move.pageable = move.bytes + size, move.copies + 1, move.pageable + pageable
        if not (self._cures and pageable and size >= LEAST_BYTES and self._is_plain(tensor)):
            return fn(tensor)
        turns, start = self.turns[to_gpu], self.now_ns()
        staged = turns.staged
        result = self._staged(move, tensor, size, to_gpu) if staged else None
        if result is None:
            staged, start = False, self.now_ns()
            result = fn(tensor)
        said = turns.took(staged, max(self.now_ns() - start, 1) / size)
        if said:
            where, ways = ("to the GPU" if to_gpu else "to the CPU"), ("torch's copy", "staged")
            before, now = ways if said == "kept" else ways[::-1]
            why = f"{where}: a staged copy takes {turns.ratio:.2f} times as long as torch's own of pageable memory"
            what = "keep" if said == "kept" else "rollback"
            self.decide(what, why, before=before, after=now, gain=turns.ratio)
        return result

    def _is_plain(self, tensor: Any) -> bool:
        torch = self._torch
        return (
            type(tensor) in self.plain
            and tensor.layout is torch.strided
            and tensor.is_contiguous()
            and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
            and not (torch.is_grad_enabled() and tensor.requires_grad)
            and not torch.cuda.is_current_stream_capturing()
        )

    def _staged(self, move: _Move, tensor: Any, size: int, to_gpu: bool) -> Any:
        """The tensor on the other side; None where torch's own way is to do it."""
        torch = self._torch
        try:
            device = device_of()
            if device is None:
                return None
            gpu = move.device if to_gpu else tensor.device
            if gpu.index not in (None, torch.cuda.current_device()):
                return None
            if self._copies is None:
                self._copies = StagedCopies(device.runtime)
            result = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=move.device)
            stream = int(torch.cuda.current_stream().cuda_stream)
            self._copies.copy(result.data_ptr(), tensor.data_ptr(), size, to_gpu, stream)
            return result
        except Exception as error:
            if self._patcher is not None:
                self._patcher.breaker.trip("Module._apply", error)
            return None

    def step_aside(self) -> None:
        """Chunks and threads go."""
        copies, self._copies = self._copies, None
        if copies is not None:
            copies.close()


def _interposer_stages() -> bool:
    """Whether the interposer is in this process, and stages pageable copies already."""
    try:
        loaded = "libkvprobe_interpose.so" in Path("/proc/self/maps").read_text()
    except OSError:
        return False
    return loaded and FIX.value() == "auto"


ADAPTERS = (ModuleMoves,)
