"""The sliding window: static GPU buffers that offloaded units pass through, one copy a unit, ordered by events alone.

A unit is copied into a slot on the copy stream; the compute stream waits for the copy's event; when the unit's
computation is submitted an event on the compute stream marks the slot as free, and the next copy into it waits for
that. With coded weights (`coded.py`) a unit passes through stages before its slot, and a second stream takes it from
there. The order in which units will be needed is the order of the last forward, so that layers skipped or called twice
are foreseen from the second time on; a unit that was not foreseen is copied when it is entered. What comes after the
last unit is the first one, for the next forward.
"""

from __future__ import annotations

import ctypes as ct
from collections.abc import Iterator, Sequence
from typing import Any

from kvprobe.cuda import MEMCPY_KIND, Runtime
from kvprobe.errors import KvprobeError
from kvprobe.native.library import DETAIL, SubmitOptions, SubmitResult, core
from kvprobe.probe.nvtx_ranges import ranges
from kvprobe.weights.coded import HIDDEN, Packed, Unpacker
from kvprobe.weights.memory import DeviceMemory, view_of
from kvprobe.weights.plan import PlacedTensor, Unit
from kvprobe.weights.timeline import RESIDENT, CopyTrace, Timeline, VisitTrace
from kvprobe.weights.watched import bind


class Compute:
    """The stream that the model computes on.

    On CUDA it is torch's current stream, asked for anew each time, and the host never waits. On the host runtime torch
    computes on the calling thread, which therefore waits for the event itself.
    """

    def __init__(self, runtime: Runtime, stream: int | None) -> None:
        """`stream`: a handle, or None for torch's current stream."""
        self._runtime = runtime
        self._host = runtime.provider == "host"
        self._own = runtime.stream_create() if self._host and stream is None else 0
        self._given = self._own or stream

    @property
    def stream(self) -> int:
        """Its handle now."""
        if self._given is not None:
            return self._given
        import torch

        return int(torch.cuda.current_stream().cuda_stream)

    def wait(self, event: int) -> None:
        """Later computation waits for an event."""
        self._runtime.stream_wait_event(self.stream, event)
        if self._host:
            self._runtime.event_synchronize(event)

    def capturing(self) -> bool:
        """Whether a CUDA graph is being captured on it."""
        return self._runtime.stream_capturing(self.stream)

    def close(self) -> None:
        """Destroys the stream if it is ours."""
        if self._own:
            self._runtime.stream_destroy(self._own)


class OffloadedUnit:
    """An offloaded unit in this process: its bytes in CPU memory, its tensors, and the slot that holds it, if any."""

    def __init__(self, number: int, unit: Unit, memory: Any) -> None:
        """`memory`: its bytes, a uint8 CPU tensor of `unit.bytes`."""
        self.number, self.unit, self.memory = number, unit, memory
        self.address = int(memory.data_ptr())
        self.placed_tensors: list[tuple[int, PlacedTensor]] = []  # with where its extent begins in the unit
        start = 0
        for extent in unit.extents:
            self.placed_tensors.extend((start, held) for held in extent.tensors)
            start += extent.room
        self.tensors = [held.tensor for _, held in self.placed_tensors]
        self.home = self.over(memory)
        self._statistics = _statistics(unit)
        self.packed: Packed | None = None
        self.slot: Slot | None = None
        self.depth = 0  # modules of it that are computing
        self.entered: list[int] = []  # versions of its tensors when its computation began
        self.visit: VisitTrace | None = None

    def over(self, memory: Any) -> list[Any]:
        """Its tensors over other memory of the same layout."""
        return [view_of(memory, start, held) for start, held in self.placed_tensors]

    def versions(self) -> list[int]:
        """How often each tensor was changed in place."""
        return [tensor._version for tensor in self.tensors]

    def changed(self) -> list[tuple[int, PlacedTensor]]:
        """The tensors that its computation changed in place, with where their extents begin."""
        now = self.versions()
        hidden = {id(tensor) for module, tensor in self._statistics if module.training}
        return [
            one
            for one, before, after in zip(self.placed_tensors, self.entered, now, strict=True)
            if before != after or id(one[1].tensor) in hidden
        ]

    def bind(self, views: Sequence[Any]) -> None:
        """Makes its tensors lie in other memory."""
        for tensor, view in zip(self.tensors, views, strict=True):
            bind(tensor, view)


def _statistics(unit: Unit) -> list[tuple[Any, Any]]:
    """Running statistics of normalisation layers: their kernels write them without torch counting it as a change."""
    from torch.nn.modules.batchnorm import _NormBase

    norms = [inner for module in unit.modules for inner in module.modules() if isinstance(inner, _NormBase)]
    return [(norm, buffer) for norm in norms for buffer in norm._buffers.values() if buffer is not None]


class Slot:
    """A static GPU buffer."""

    def __init__(self, runtime: Runtime, memory: Any) -> None:
        self.memory = memory
        self.address = int(memory.data_ptr())
        self.views: list[list[Any]] = []  # by unit: its tensors over this slot
        self.placed: OffloadedUnit | None = None
        self.versions: list[int] = []  # of the unit's tensors when the copy was submitted
        self.busy = False
        self.ready, self.free = runtime.event_create(), runtime.event_create()
        self.used = False  # `free` was recorded: copies into the slot wait for it
        self.unpacked = False  # `ready` was recorded on the unpacker's stream: copies into the slot wait for it, too
        self.copy: CopyTrace | None = None


class WeightWindow:
    """Moves units through slots.

    Attributes:
        copies, bytes: units copied to the GPU so far, and their bytes.
        wire_bytes: that travelled for them.
        coding: whether units travel coded now, where they are packed.
        misses: units that were not there when they were entered.
        written_back: units that a forward changed in place, stored to CPU memory again.
    """

    def __init__(
        self, runtime: Runtime, compute: Compute, units: Sequence[OffloadedUnit], detail: str = "transfers"
    ) -> None:
        """Makes the copy stream; `take_slots` makes the slots."""
        self.runtime, self.compute, self.units = runtime, compute, units
        self.stream = runtime.stream_create()
        self._joint = runtime.event_create()
        self.slots: list[Slot] = []
        self.memory: Any = None  # of all slots
        self.order = list(range(len(units)))
        self.seen: list[int] = []
        self._at = 0
        self._ranges = ranges()
        self._submit = core().kvp_submit
        self._options = SubmitOptions(
            copy=runtime.address("cudaMemcpyAsync"),
            stream=self.stream,
            kind=MEMCPY_KIND["h2d"],
            direction=1,
            detail=DETAIL[detail],
        )
        self._result = SubmitResult()
        self._where = (ct.c_uint64 * 3)()
        self.timeline = Timeline(runtime, 2 * len(units))
        self.copies = self.bytes = self.wire_bytes = self.misses = self.written_back = 0
        self.coding = self._choosing = False
        self._unpacker: Unpacker | None = None
        self.capturing = self._forked = self._inside = False
        self.captured = False  # a graph exists: its replays change the slots unseen
        self.copying = True

    @property
    def width(self) -> int:
        """Units copied ahead of the one that computes."""
        return len(self.slots) - 1

    def take_slots(self, count: int, memory: Any) -> None:
        """New slots over GPU memory of `count` times the largest unit."""
        size = memory.numel() // count
        self.memory = memory
        for i in range(count):
            slot = Slot(self.runtime, memory[i * size : (i + 1) * size])
            slot.views = [placed.over(slot.memory) for placed in self.units]
            self.slots.append(slot)
        self._fork()  # torch may still be using the memory it gave

    def use_slots(self, count: int, memory: DeviceMemory) -> None:
        """Another number of slots; the old ones, which must be idle, are let go first, so that both never coexist."""
        old = len(self.slots)
        size = self.memory.numel() // old
        self.close_slots()
        memory.drop(self.memory)
        self.memory = None
        try:
            self.take_slots(count, memory.take(count * size, f"{count} window slots"))
        except KvprobeError:
            self.take_slots(old, memory.take(old * size, f"{old} window slots"))
            raise

    def code(self, unpacker: Unpacker) -> None:
        """Units that are packed may travel coded from here on."""
        self._unpacker = unpacker

    def travel(self, wire: str) -> None:
        """How they travel: "raw", "coded", or "auto": coded in forwards that would wait for copies as they are."""
        self.coding, self._choosing = wire == "coded", wire == "auto"

    # -- a forward -----------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """A forward of the whole model begins."""
        cut_off, self._at, self.seen, self._inside = self._inside, 0, [], True
        if self._unpacker is not None:
            self._unpacker.check()
        for placed in self.units:
            if placed.depth:  # a forward before this one was cut off where no hook could see it
                self._free(placed)
        self.capturing = self.compute.capturing()
        if self.capturing and not self.copying:
            raise KvprobeError("a forward without copies computes with stale weights: nothing to capture in a graph")
        if self.capturing:  # it cannot wait for what began outside it, nor can its replays
            with self.runtime.beside_captures():
                self.settle()
        elif self.captured and cut_off:
            self._join()
        if self.capturing or self.captured:
            self._forget()
        if self.capturing:
            self.captured, self._forked = True, False
            return
        if self.captured:  # replays are on the compute stream: copies stay behind them
            self._fork()
        self.timeline.begin(self.compute.stream)
        if self._choosing:
            self.coding = self._would_wait()

    def _would_wait(self) -> bool:
        """Whether a forward like the last one that was measured would wait for units that are copied as they are."""
        measured = [one for one in self.timeline.forwards if one.window != RESIDENT]
        if not measured:
            return False
        last = measured[-1]
        raw_ns = self.timeline.raw_ns_per_byte * sum(visit.bytes for visit in last.visits)
        return raw_ns > HIDDEN * (last.total_ns - sum(visit.wait_ns for visit in last.visits))

    def end(self, complete: bool) -> None:
        """It is submitted, or failed."""
        self._inside = False
        if self.capturing:
            if self._forked:  # a capture must end with every stream joined
                self._join()
            self._forget()
            self.capturing = False
            return
        if complete:
            self.order = self.seen or self.order
            self.timeline.end(self.compute.stream, self.width if self.copying else RESIDENT)
        else:
            self.timeline.abandon()
        self._before_replays()

    def enter(self, placed: OffloadedUnit) -> None:
        """A unit is about to compute: its tensors lie in a slot from here on, and the stream waits for the copy."""
        if placed.depth:
            placed.depth += 1
            return
        if not self._inside and self.compute.capturing():
            raise KvprobeError(
                f"{placed.unit.name} alone cannot be captured in a CUDA graph, its weights stay "
                "outside it: capture the forward of the whole model"
            )
        self._advance(placed.number)
        stream = self.compute.stream
        visit = self.timeline.arrive(placed.number, stream)
        if not self.copying:
            placed.depth, placed.visit = 1, visit
            self.timeline.arrived(visit, stream, None)
            placed.bind(self.slots[placed.number % len(self.slots)].views[placed.number])
            return
        slot = placed.slot
        if slot is None:
            self.misses += 1
            slot = self._room(placed)
            if len(self.slots) == 1:  # window 0: nothing ahead, however far the host is ahead of the device
                self._fork()
            self._load(placed, slot)
        elif slot.versions != placed.versions():  # changed since it was copied
            self._fork()
            self._load(placed, slot)
        slot.busy = True
        placed.depth = 1
        copy, slot.copy = slot.copy, None
        placed.visit = visit
        note = self._ranges.start(f"weights: wait for {placed.unit.name}", placed.unit.bytes)
        self.compute.wait(slot.ready)
        self._ranges.end(note)
        self.timeline.arrived(visit, stream, copy)
        placed.bind(slot.views[placed.number])
        placed.entered = placed.versions()
        self._prefetch()

    def leave(self, placed: OffloadedUnit) -> None:
        """A unit's computation is submitted: its slot is free once the device has passed this point."""
        if placed.depth == 0:
            return  # its own entry failed
        if placed.depth > 1:
            placed.depth -= 1
            return
        stream = self.compute.stream
        self.timeline.leave(placed.visit, stream)
        try:
            if self.copying and (changed := placed.changed()):
                self._write_back(placed, changed, stream)
        finally:
            self._free(placed)
        self._prefetch()
        if not self._inside:
            self._before_replays()

    def settle(self) -> None:
        """Waits until no copy is under way.

        Raises:
            KvprobeError: weights came out wrong.
        """
        self.runtime.stream_synchronize(self.stream)
        if self._unpacker is not None:
            self.runtime.stream_synchronize(self._unpacker.stream)
            self._unpacker.check()

    def stop_copying(self) -> None:
        """Units compute with whatever the slots hold, from here on; everything must be idle.

        Every slot is filled with the largest unit's weights: arithmetic on real weights takes the time and the power
        of the real forward, on leftovers of freed memory it may not.
        """
        largest = max(self.units, key=lambda placed: placed.unit.bytes)
        self._forget()
        for slot in self.slots:
            self._load(largest, slot)
        self.settle()
        self._forget()
        self.copying = False

    def resume_copying(self) -> None:
        """Units have their own weights again."""
        self.copying = True

    def _free(self, placed: OffloadedUnit) -> None:
        placed.depth, placed.visit = 0, None
        slot = placed.slot
        placed.bind(placed.home)
        if slot is not None:
            slot.busy = False
            self.runtime.event_record(slot.free, self.compute.stream)
            slot.used = True

    # -- copies --------------------------------------------------------------------------------------------------

    def _advance(self, number: int) -> None:
        """Where in the foreseen order the forward is now: behind this unit."""
        self.seen.append(number)
        for step in range(len(self.order)):
            if self.order[(self._at + step) % len(self.order)] == number:
                self._at = (self._at + step) % len(self.order) + 1
                return

    def _ahead(self) -> Iterator[OffloadedUnit]:
        """Units in the order in which they will be needed; a graph must be whole in itself, so it does not wrap."""
        for number in self.order[self._at :]:
            yield self.units[number]
        if not self.captured:
            for number in self.order[: self._at]:
                yield self.units[number]

    def _prefetch(self) -> None:
        """Copies the units needed next into slots that nobody needs sooner."""
        if len(self.slots) < 2 or not self.copying:
            return
        room = sum(1 for slot in self.slots if not slot.busy)
        wanted: list[OffloadedUnit] = []
        for placed in self._ahead():
            if len(wanted) == room:
                break
            if not placed.depth and placed not in wanted:
                wanted.append(placed)
        for placed in wanted:
            if placed.slot is None:
                free = (slot for slot in self.slots if not slot.busy and slot.placed not in wanted)
                self._load(placed, next(free))

    def _room(self, placed: OffloadedUnit) -> Slot:
        """A slot for a unit that is needed now: the one whose unit is needed last."""
        free = [slot for slot in self.slots if not slot.busy]
        if not free:
            raise KvprobeError(
                f"{placed.unit.name} computes inside {len(self.slots)} other offloaded layers: use a "
                f"window of at least {len(self.slots)}"
            )
        rank = {one.number: i for i, one in reversed(list(enumerate(self._ahead())))}
        return max(free, key=lambda slot: rank.get(slot.placed.number, 1 << 30) if slot.placed else 1 << 31)

    def _load(self, placed: OffloadedUnit, slot: Slot) -> None:
        """Brings a whole unit into a slot, behind the computation that used the slot before."""
        if slot.placed is not None:
            slot.placed.slot = None
        slot.placed = None
        self.timeline.drop(slot.copy)
        slot.copy = None
        versions, unpacker, packed = placed.versions(), self._unpacker, None
        if unpacker is not None and self.coding and placed.packed and placed.packed.versions == versions:
            packed = placed.packed
        last = unpacker.stream if unpacker is not None and packed else self.stream  # on which the unit becomes whole
        if self.capturing:
            self._fork()
        elif slot.used:
            self.runtime.stream_wait_event(last, slot.free)
        if slot.unpacked and not packed:
            self.runtime.stream_wait_event(self.stream, slot.ready)
        trace = None if self.capturing else self.timeline.copy()
        if trace is not None:
            self.runtime.event_record(trace.start, self.stream)
        self._options.transfer = self.copies & 0xFFFFFFFF
        note = self._ranges.start(f"weights: load {placed.unit.name}", placed.unit.bytes)
        began, self._spent = core().kvp_now_ns(), 0
        try:
            if unpacker is not None and packed:
                unpacker.load(packed, slot.address, self.stream, self._copy)
            else:
                self._copy(slot.address, placed.address, placed.unit.bytes)
        except KvprobeError:
            self.timeline.drop(trace)
            raise
        finally:
            self._ranges.end(note)
        if trace is not None:
            self.runtime.event_record(trace.end, last)
            trace.submitted_ns, trace.submit_ns = began, self._spent
            trace.bytes, trace.src, trace.dst = placed.unit.bytes, placed.address, slot.address
            trace.wire_bytes = packed.bytes if packed else placed.unit.bytes
        self.runtime.event_record(slot.ready, last)
        slot.unpacked = packed is not None
        slot.placed, slot.versions, slot.copy, placed.slot = placed, versions, trace, slot
        self.copies += 1
        self.bytes += placed.unit.bytes

    def _copy(self, dst: int, src: int, size: int) -> None:
        """Submits a copy of `size` bytes."""
        self._where[:] = [dst, src, size]
        base = ct.addressof(self._where)
        code = self._submit(ct.byref(self._options), 1, base, base + 8, base + 16, 0, ct.byref(self._result))
        if code:
            raise self.runtime.error("cudaMemcpyAsync", code)
        self._spent += int(self._result.end_ns - self._result.start_ns)
        self.wire_bytes += size

    def _write_back(self, placed: OffloadedUnit, changed: list[tuple[int, PlacedTensor]], stream: int) -> None:
        """Stores tensors that the forward changed in place; the host waits, so that CPU memory is right from here."""
        if self.capturing:
            raise KvprobeError(
                f"{placed.unit.name} changes its own weights in its forward, which a CUDA graph cannot "
                "store: capture it in eval mode, or without offload"
            )
        slot = placed.slot
        if slot is None:
            return
        for start, held in changed:
            at = start + held.offset
            self.runtime.memcpy_async(placed.address + at, slot.address + at, held.bytes, "d2h", stream)
        self.runtime.stream_synchronize(stream)
        slot.versions = placed.versions()
        placed.packed = None  # of statistics that changed uncounted it would bring the old ones
        self.written_back += 1

    def _fork(self) -> None:
        """Copies from here on come behind the compute stream."""
        self.runtime.event_record(self._joint, self.compute.stream)
        self.runtime.stream_wait_event(self.stream, self._joint)
        self._forked = True

    def _join(self) -> None:
        """Computation from here on comes behind the copies."""
        stream = self.stream
        if self._unpacker is not None:
            stream = self._unpacker.stream
            self.runtime.event_record(self._joint, self.stream)
            self.runtime.stream_wait_event(stream, self._joint)
        self.runtime.event_record(self._joint, stream)
        self.compute.wait(self._joint)

    def _before_replays(self) -> None:
        """Replays, which are computation, too, come behind copies ahead of layers that were not called after all."""
        if self.captured and self.copying:
            self._join()

    def _forget(self) -> None:
        """What the slots hold is not known, or of no use."""
        if self._unpacker is not None:
            self._unpacker.forget()
        for slot in self.slots:
            if slot.placed is not None:
                slot.placed.slot = None
            self.timeline.drop(slot.copy)
            slot.placed, slot.copy, slot.used, slot.busy, slot.unpacked = None, None, False, False, False

    # -- the end -------------------------------------------------------------------------------------------------

    def close_slots(self) -> None:
        """Drops the slots; the device must be done with them."""
        self._forget()
        for slot in self.slots:
            self.runtime.event_destroy(slot.ready)
            self.runtime.event_destroy(slot.free)
            slot.views = []
        self.slots = []

    def close(self) -> None:
        """Destroys streams and events."""
        self.close_slots()
        if self._unpacker is not None:
            self._unpacker.close()
        self.memory = None
        self.timeline.close()
        self.runtime.event_destroy(self._joint)
        self.runtime.stream_destroy(self.stream)
        self.compute.close()
