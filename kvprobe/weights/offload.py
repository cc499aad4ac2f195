"""`offload(model)`: keeps part of a model's weights in CPU memory and brings them in layer by layer."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from kvprobe.cuda import Runtime, find_runtime
from kvprobe.cuda.kernels import CopyKernels
from kvprobe.environment import RUN
from kvprobe.errors import CudaError, KvprobeError, UsageError
from kvprobe.native.library import core
from kvprobe.probe.recorder import Recorder
from kvprobe.weights.coded import Unpacker, kernels_of, pack, staging_bytes
from kvprobe.weights.memory import DeviceMemory, HostMemory, bytes_of, view_of
from kvprobe.weights.plan import Extent, Limit, Plan, make_plan
from kvprobe.weights.profile import WeightProfile, profile
from kvprobe.weights.sliding_window import Compute, OffloadedUnit, WeightWindow
from kvprobe.weights.timeline import RESIDENT, Forward
from kvprobe.weights.watched import bind, unwatch, watch

WIRES = ("raw", "coded", "auto")


def offload(
    model: Any,
    *,
    gpu_fraction: float | None = None,
    gpu_bytes: int | None = None,
    window: str | int = "auto",
    device: str = "auto",
    runtime: Runtime | None = None,
    compute_stream: int | None = None,
    wire: str = "raw",
) -> WeightOffload:
    """Keeps the weights of a model on the GPU up to a limit and the rest in pinned CPU memory.

    Layers in CPU memory are copied into a few static GPU buffers ahead of their computation. Results are those of the
    untouched model, bit for bit. Changes of parameters in place (an optimizer, `load_state_dict`, `param.data`) are
    kept. Gradients flow through offloaded layers; training the offloaded weights themselves works on the host runtime
    alone.

    Args:
        model: a `torch.nn.Module`, on the CPU or the GPU.
        gpu_fraction: share of the weights' bytes that may be on the GPU, window included; 1 switches offload off: the
            model is not touched at all.
        gpu_bytes: the same in bytes.
        window: layers copied ahead of the one that computes ("auto": 1, or 0 where memory is too small for it), or
            their size ("512MiB").
        device: "cuda", "host" (the embedded host runtime: no GPU), or "auto".
        runtime: instead of `device`.
        compute_stream: handle of the stream the model computes on; default: torch's current stream, forward by forward.
        wire: "raw"; "coded": layers of bf16 are packed once, into three quarters of their bytes, which take CPU memory
            beside the layers themselves, and are unpacked on the GPU; "auto": coded in those forwards that would wait
            for copies otherwise, raw where coding cannot be had.

    Raises:
        UsageError: no such limit or window, a limit below what the window needs, a model offloaded already.
        KvprobeError: no torch, or too little GPU or CPU memory, or wire="coded" cannot be had; the model is as it was.
    """
    torch = need_torch()
    limit = Limit(gpu_fraction, gpu_bytes)
    if not isinstance(model, torch.nn.Module):
        raise UsageError(f"offload takes a torch.nn.Module, not {type(model).__name__}")
    if getattr(model, "_kvprobe_offload", None) is not None:
        raise UsageError("this model is offloaded already: call remove() on its WeightOffload first")
    if gpu_fraction == 1:
        return WeightOffload(model, Plan(0, 0), None, None)
    with torch.inference_mode(False), torch.no_grad():
        runtime = runtime or find_runtime(device_of(device))
        coding = Coding.of(wire, runtime)
        plan = make_plan(model, limit, window, coding.staging)
        if not plan.units:
            return WeightOffload(model, plan, None, None)
        held = WeightOffload(model, plan, runtime, compute_stream, coding)
        held.pack()
        return held


def need_torch() -> Any:
    """torch, which is a peer: found, never installed.

    Raises:
        KvprobeError: it is not there.
    """
    try:
        import torch
    except ImportError:
        raise KvprobeError("weight offload needs torch in this environment: pip install torch") from None
    return torch


def device_of(device: str) -> str:
    """auto: the GPU where torch can use it."""
    import torch

    return ("cuda" if torch.cuda.is_available() else "host") if device == "auto" else device


class WeightOffload:
    """A model whose weights are partly in CPU memory; also a context manager that calls `remove`.

    Attributes:
        model: the model.
        plan: which layers are where.
        active: False where nothing is offloaded and nothing was touched, and after `remove`.
    """

    def __init__(
        self,
        model: Any,
        plan: Plan,
        runtime: Runtime | None,
        stream: int | None,
        coding: Coding | None = None,
        hollow: Collection[int] = (),
    ) -> None:
        """Moves the weights and puts hooks on the offloaded layers; ids in `hollow` are tensors without bytes yet."""
        self.model, self.plan = model, plan
        self._coding = coding or Coding()
        self.active = False
        self.notes: list[str] = [self._coding.why] if self._coding.why else []
        self.load_ns = 0
        self._window: WeightWindow | None = None
        if runtime is None:
            return
        began = core().kvp_now_ns()
        self.runtime = runtime
        self._device = DeviceMemory(runtime)
        self._host = HostMemory(runtime)
        self._undo: list[Callable[[], None]] = []
        self._moved: list[tuple[Extent, str]] = []  # with the device its bytes came from
        self._hooks: list[Any] = []
        self._depth, self._thread = 0, 0
        self._saving: dict[int, Any] = {}
        self._recorder = Recorder("transfers" if RUN.text else "off")
        try:
            self._place(hollow, stream)
        except BaseException:
            self._restore()
            raise
        self._hook()
        self.active = True
        self.load_ns = core().kvp_now_ns() - began
        model._kvprobe_offload = self

    # -- moving weights ------------------------------------------------------------------------------------------

    def _place(self, hollow: Collection[int], stream: int | None) -> None:
        plan = self.plan
        window = self._device.take(plan.slots * plan.slot_bytes, f"{plan.slots} window slots")
        here = [extent for extent in plan.resident if not self._at_home(extent)]
        size = sum(extent.room for extent in here)
        arena = self._device.take(size, "resident weights") if size else None
        start = 0
        for extent in here:
            self._move(extent, arena, start, hollow)
            start += extent.room
        units = []
        still = plan.offloaded_bytes
        for number, unit in enumerate(plan.units):
            memory = self._host.take(unit.bytes, still)
            still -= unit.bytes
            at = 0
            for extent in unit.extents:
                self._move(extent, memory, at, hollow)
                at += extent.room
            units.append(OffloadedUnit(number, unit, memory))
        for tensor in plan.unplain:
            self._move_whole(tensor)
        if self._host.pageable_bytes:
            self.notes.append(
                f"{self._host.pageable_bytes / 2**20:,.0f} MiB of CPU memory could not be pinned "
                f"({self._host.refusal}): copies from it are slower and block their caller"
            )
        for placed in units:
            for tensor in placed.tensors:
                kind = watch(tensor)
                self._undo.append(lambda tensor=tensor, kind=kind: unwatch(tensor, kind))  # type: ignore[misc]
        detail = "transfers" if self._recorder.path else "totals"
        self._window = WeightWindow(self.runtime, Compute(self.runtime, stream), units, detail)
        self._window.take_slots(plan.slots, window)

    def pack(self) -> None:
        """Makes images of the offloaded layers as they are now, where they are to travel coded.

        Raises:
            KvprobeError: the machine has no memory left for them; the model is as it was.
        """
        if not self.active or self._coding.kernels is None:
            return
        window = self._need()
        units = window.units
        try:
            found = pack([one.memory for one in units], [one.versions() for one in units], self._host)
            if any(found):
                largest, kernels = self.plan.slot_bytes, self._coding.kernels
                unpacker = Unpacker(self.runtime, kernels, self._device, largest)
                window.code(unpacker)
                window.travel(self._coding.wire)
        except BaseException:
            self.remove()
            raise
        for one, packed in zip(units, found, strict=True):
            one.packed = packed

    def _at_home(self, extent: Extent) -> bool:
        """On CUDA: it is on the right GPU already."""
        device = extent.tensors[0].tensor.device
        return bool(device.type == "cuda" and device == self._device.device)

    def _move(self, extent: Extent, memory: Any, start: int, hollow: Collection[int]) -> None:
        """Puts an extent's bytes into `memory` at `start` and binds its tensors there; the old bytes are let go."""
        came_from = str(extent.tensors[0].tensor.device)
        views = [view_of(memory, start, held) for held in extent.tensors]
        if not all(id(held.tensor) in hollow for held in extent.tensors):
            memory[start : start + extent.bytes].copy_(bytes_of(extent))
        for held, view in zip(extent.tensors, views, strict=True):
            bind(held.tensor, view)
        self._moved.append((extent, came_from))

    def _move_whole(self, tensor: Any) -> None:
        """A tensor that is not plain bytes: torch moves it."""
        if self._device.device.type == "cuda" and tensor.device.type != "cuda":
            came_from = tensor.device
            tensor.data = tensor.data.to(self._device.device)
            self.notes.append(
                f"a {type(tensor).__name__} of {tuple(tensor.shape)} stays on the GPU: it is not plain bytes"
            )
            self._undo.append(lambda: setattr(tensor, "data", tensor.data.to(came_from)))

    def _restore(self) -> None:
        """Everything back where it came from."""
        import torch

        for undo in reversed(self._undo):
            undo()
        self._undo.clear()
        with torch.inference_mode(False), torch.no_grad():
            for extent, came_from in self._moved:
                fresh = bytes_of(extent).to(came_from, copy=True)
                for held in extent.tensors:
                    bind(held.tensor, view_of(fresh, 0, held))
        self._moved.clear()
        if self._window is not None:
            for placed in self._window.units:
                placed.memory, placed.home = None, []
            self._window.close()
            self._window = None
        self._host.close()
        self._device.close()
        self._recorder.close()

    def remove(self) -> None:
        """Gives the untouched model back: no hook, the parameters' present values where they were before."""
        if not self.active:
            return
        self.active = False
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        del self.model._kvprobe_offload
        try:
            self._settle()
        except CudaError as error:  # a lost device: CPU memory still holds the offloaded weights
            self.notes.append(f"the device was lost: {error}")
        self._restore()

    def __enter__(self) -> WeightOffload:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()

    # -- hooks ---------------------------------------------------------------------------------------------------

    def _hook(self) -> None:
        import torch

        off = torch.compiler.disable
        model, window = self.model, self._need()
        self._hooks += [
            model.register_forward_pre_hook(off(self._begin), prepend=True),
            model.register_forward_hook(off(self._end), always_call=True),
        ]
        for placed in window.units:
            for module in placed.unit.modules:
                enter, leave = self._around(placed)
                self._hooks += [
                    module.register_forward_pre_hook(off(enter), prepend=module is not model),
                    module.register_forward_hook(off(leave), always_call=True, prepend=module is model),
                ]

    def _need(self) -> WeightWindow:
        if self._window is None:
            raise KvprobeError("this offload was removed: offload the model again")
        return self._window

    def _begin(self, module: Any, arguments: Any) -> None:
        """A forward of the model begins."""
        if self._depth and self._thread != threading.get_ident():
            raise KvprobeError(
                "two threads run this model at once: with offloaded weights only one thread at a time can"
            )
        self._depth += 1
        if self._depth == 1:
            self._thread = threading.get_ident()
            self._saving.clear()
            self._need().begin()

    def _end(self, module: Any, arguments: Any, result: Any) -> None:
        if self._depth == 0:
            return  # its own beginning failed
        self._depth -= 1
        if self._depth == 0:
            self._need().end(complete=result is not None)

    def _around(self, placed: OffloadedUnit) -> tuple[Callable[..., None], Callable[..., None]]:
        """The hooks of one unit."""
        import torch

        def enter(module: Any, arguments: Any) -> None:
            window = self._need()
            if torch.is_grad_enabled() and not placed.depth:
                self._save_for_backward(placed)
            window.enter(placed)

        def leave(module: Any, arguments: Any, result: Any) -> None:
            window = self._need()
            try:
                window.leave(placed)
            finally:
                if not placed.depth:
                    saving = self._saving.pop(placed.number, None)
                    if saving is not None:
                        saving.__exit__(None, None, None)

        return enter, leave

    def _save_for_backward(self, placed: OffloadedUnit) -> None:
        """Autograd keeps weights for the backward pass; a slot would have other bytes by then, CPU memory has them."""
        import torch

        window = self._need()
        training = self.runtime.provider == "cuda" and self.model.training
        if training and any(tensor.requires_grad for tensor in placed.tensors):
            raise KvprobeError(
                "offloaded weights cannot be trained on a GPU: freeze them (requires_grad_(False)), "
                "call eval(), or use torch.no_grad()"
            )

        def pack(tensor: Any) -> Any:
            slot = placed.slot
            if slot is None or tensor.layout != torch.strided or tensor.device != slot.memory.device:
                return tensor
            at = tensor.data_ptr() - slot.address
            if not 0 <= at < placed.unit.bytes:
                return tensor
            return _SavedTensor(placed, at, tensor.dtype, tensor.shape, tensor.stride(), sum(placed.versions()))

        def unpack(saved: Any) -> Any:
            return saved.tensor(window) if isinstance(saved, _SavedTensor) else saved

        hooks = torch.autograd.graph.saved_tensors_hooks(pack, unpack)
        hooks.__enter__()
        self._saving[placed.number] = hooks

    # -- what it tells -------------------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Waits until neither copies nor computation use the slots."""
        window = self._need()
        self.runtime.stream_synchronize(window.compute.stream)
        window.settle()

    def set_window(self, window: int) -> None:
        """Another window over the same offloaded layers, for comparison.

        Raises:
            UsageError: it needs more GPU memory than the limit; the old window stays.
        """
        import torch

        current, plan = self._need(), self.plan
        slots = min(window + 1, len(plan.units))
        if slots == plan.slots:
            return
        if slots < 1:
            raise UsageError(f"the window is at least 0, not {window}")
        need = plan.device_bytes + (slots - plan.slots) * plan.slot_bytes
        if need > plan.limit_bytes:
            raise UsageError(
                f"a window of {window} takes {need:,} bytes of GPU memory, {plan.limit_bytes:,} are allowed"
            )
        self._settle()
        current.timeline.drain()
        with torch.inference_mode(False):
            current.use_slots(slots, self._device)
        plan.slots = slots

    def set_wire(self, wire: str) -> None:
        """How the layers travel from the next forward on, for comparison.

        Raises:
            UsageError: no such wire, or they were offloaded with wire="raw" and have no images.
        """
        if self._coding.kernels is None or wire not in WIRES:
            raise UsageError(
                f"the wire cannot become {wire!r}: it is raw, coded or auto, of a model offloaded with coded or auto"
            )
        self._need().travel(wire)

    @contextmanager
    def without_copies(self) -> Iterator[None]:
        """Forwards in here copy nothing and compute with stale weights: right times, RESULTS OF NO USE.

        They show how long the computation takes that has to wait for nothing. A GPU that computes without pause may
        run at lower clocks than one that waits for copies in between, and the host may be what such a forward waits
        for: neither can be seen while copies hold it up. `profile` needs it to predict a window that hides the copies.
        Caches, running statistics of resident layers and random generators go on as in any forward.
        """
        if not self.active:
            yield
            return
        window = self._need()
        self._settle()
        window.timeline.drain()
        window.stop_copying()
        try:
            yield
        finally:
            self._settle()
            window.timeline.drain()
            window.resume_copying()

    @property
    def wire_share(self) -> float:
        """Bytes that a forward puts on the wire, as a share of its layers' bytes, while they travel coded; 1: raw."""
        if not self.active:
            return 1.0
        units = self._need().units
        travel = sum(one.packed.bytes if one.packed else one.unit.bytes for one in units)
        return travel / self.plan.offloaded_bytes

    @property
    def gpu_bytes(self) -> int:
        """GPU memory that the weights take now: resident ones and slots."""
        return self.plan.device_bytes if self.active else 0

    @property
    def pinned_bytes(self) -> int:
        """Pinned CPU memory in use."""
        return self._host.bytes - self._host.pageable_bytes if self.active else 0

    @property
    def pin_ns(self) -> int:
        """Time that allocating CPU memory took."""
        return self._host.pin_ns if self.active else 0

    @property
    def copy_stream(self) -> int:
        """Handle of the stream that copies run on; 0 where nothing is offloaded."""
        return self._window.stream if self._window is not None else 0

    @property
    def forwards(self) -> list[Forward]:
        """The forwards measured so far, oldest first; waits for those under way."""
        if not self.active:
            return []
        window = self._need()
        window.timeline.drain()
        return list(window.timeline.forwards)

    def reset_profile(self) -> None:
        """Forgets the forwards measured so far: what comes next is of another kind."""
        if self.active:
            timeline = self._need().timeline
            timeline.drain()
            timeline.forwards.clear()

    def profile(self) -> WeightProfile:
        """What the forwards so far consisted of, and what other windows would give; waits for those under way.

        Raises:
            UsageError: nothing is offloaded, or no forward has run.
        """
        if not self.active:
            raise UsageError("nothing is offloaded, so there is nothing to profile")
        forwards = self.forwards
        if all(one.window == RESIDENT for one in forwards):
            raise UsageError("no forward was measured yet: run the model first (outside of a CUDA graph)")
        units = self.plan.units
        return profile(
            forwards, [unit.name for unit in units], [unit.bytes for unit in units], self._need().timeline.unmeasured
        )


@dataclass(frozen=True)
class Coding:
    """How offloaded layers travel.

    Attributes:
        wire: "raw", "coded" or "auto".
        kernels: what unpacks them; None: they travel raw.
        why: they do although "auto" was asked for.
    """

    wire: str = "raw"
    kernels: CopyKernels | None = None
    why: str = ""

    @classmethod
    def of(cls, wire: str, runtime: Runtime) -> Coding:
        """What can be had here.

        Raises:
            UsageError: no such wire.
            KvprobeError: "coded" cannot be had.
        """
        if wire not in WIRES:
            raise UsageError(f"the wire is raw, coded or auto, not {wire!r}")
        if wire == "raw":
            return cls()
        try:
            return cls(wire, kernels_of(runtime))
        except KvprobeError as error:
            if wire == "coded":
                raise
            return cls(wire, None, str(error))

    def staging(self, largest: int) -> int:
        """GPU memory beside the slots, for layers of at most so many bytes."""
        return staging_bytes(largest) if self.kernels else 0


class _SavedTensor:
    """A tensor of an offloaded unit that autograd keeps: where its bytes are, not the bytes."""

    def __init__(self, placed: OffloadedUnit, at: int, dtype: Any, shape: Any, stride: Any, version: int) -> None:
        self.placed, self.at, self.dtype, self.shape, self.stride = placed, at, dtype, shape, stride
        self.version = version

    def tensor(self, window: WeightWindow) -> Any:
        """The bytes again, on the device that computes."""
        import torch

        memory = self.placed.memory
        if memory is None:
            raise KvprobeError("the offload was removed between forward and backward: run the forward again")
        if sum(self.placed.versions()) != self.version:
            raise KvprobeError(
                f"{self.placed.unit.name} was changed between forward and backward: its gradient would "
                "be wrong; run the forward again"
            )
        view = torch.empty(0, dtype=self.dtype)
        first = (memory.storage_offset() + self.at) // view.element_size()
        view.set_(memory.untyped_storage(), first, self.shape, self.stride)
        return view.to(window.slots[0].memory.device)
