"""Decides which layers of a model live in CPU memory: finds its blocks, counts shared bytes once, spreads evenly."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvprobe.errors import UsageError

ALIGN = 256  # bytes: what CUDA's own allocator gives, so that kernels choose the same paths as without offload
# "auto": one block ahead hides what can be hidden and costs one slot; leaf modules are of uneven size, so two ahead.
AUTO_WINDOWS = {"blocks": (1, 0), "leaves": (2, 1, 0)}
SMALL = (16, 64, 512)  # leaf modules below this part of the largest stay on the GPU where they fit


@dataclass
class PlacedTensor:
    """A parameter or buffer: where its first byte lies in its extent.

    Attributes:
        tensor: the object that the model's modules hold.
        offset: bytes from the beginning of the extent.
        bytes: from its first to its last element, strides included.
    """

    tensor: Any
    offset: int
    bytes: int


@dataclass
class Extent:
    """A run of bytes of one storage that one or more tensors use; tensors that share bytes share the extent."""

    bytes: int
    tensors: list[PlacedTensor]

    @property
    def room(self) -> int:
        """Its bytes, rounded up to the alignment."""
        return -(-self.bytes // ALIGN) * ALIGN


@dataclass
class Unit:
    """What is brought in at once: a block of the model, or a leaf module.

    Attributes:
        name: of its first module.
        modules: whose forward needs it; more than one where modules share parameters.
        extents: its bytes, each once.
    """

    name: str
    modules: list[Any]
    extents: list[Extent]

    @property
    def bytes(self) -> int:
        """Bytes of one copy of it, alignment included."""
        return sum(extent.room for extent in self.extents)


@dataclass
class Plan:
    """Who lives where.

    Attributes:
        total_bytes: of all weights, each shared byte once.
        limit_bytes: of GPU memory for weights, slots included.
        units: in CPU memory, in the order of the model; empty: nothing is offloaded.
        resident: extents that stay on the GPU.
        slots: GPU buffers that the units pass through, window + 1.
        grain: "blocks" or "leaves".
        unplain: tensors that are not plain bytes (tensor subclasses, sparse ones); they stay on the GPU.
        staging_bytes: of GPU memory beside the slots.
    """

    total_bytes: int
    limit_bytes: int
    units: list[Unit] = field(default_factory=list)
    resident: list[Extent] = field(default_factory=list)
    slots: int = 0
    grain: str = "blocks"
    unplain: list[Any] = field(default_factory=list)
    staging_bytes: int = 0

    @property
    def slot_bytes(self) -> int:
        """Size of a slot: the largest offloaded unit."""
        return max((unit.bytes for unit in self.units), default=0)

    @property
    def device_bytes(self) -> int:
        """GPU memory that the weights take."""
        return sum(extent.room for extent in self.resident) + self.slots * self.slot_bytes + self.staging_bytes

    @property
    def offloaded_bytes(self) -> int:
        """CPU memory that the units take."""
        return sum(unit.bytes for unit in self.units)


def make_plan(model: Any, limit: Limit, window: str | int, staging: Callable[[int], int] = lambda largest: 0) -> Plan:
    """The plan for a model.

    Args:
        model: a `torch.nn.Module`.
        limit: how much GPU memory its weights may take.
        window: "auto", a number of layers, or a size as "64MiB".
        staging: GPU memory that is needed beside the slots where the largest unit has so many bytes.

    Raises:
        UsageError: a window that means nothing, or a limit below what the window needs; the text names the least.
    """
    windows = _windows(window)
    extents, unplain, owners = _extents(model)
    total = sum(extent.room for extent in extents)
    limit_bytes = limit.of(total)
    plan = Plan(total, limit_bytes, resident=extents, unplain=unplain)
    if total <= limit_bytes:
        return plan
    least: list[tuple[int, int]] = []
    levels = [(grain, units) for grain, units in _levels(model, extents, owners) if units]
    for ahead in (True, False):
        for choice, grain, units in [(choice, *level) for level in levels for choice in windows(level[0], ahead)]:
            inside = {id(extent) for unit in units for extent in unit.extents}
            rest = [extent for extent in extents if id(extent) not in inside]
            fixed = sum(extent.room for extent in rest)
            largest = max(unit.bytes for unit in units)
            fixed += staging(largest)
            slots = 1 + (choice if isinstance(choice, int) else choice[0] // largest)
            least.append((fixed + min(slots, len(units)) * largest, slots - 1))
            chosen = _choose(units, fixed, limit_bytes, slots)
            if chosen:
                kept = [unit for i, unit in enumerate(units) if i not in chosen]
                plan.units = [units[i] for i in sorted(chosen)]
                plan.resident = rest + [extent for unit in kept for extent in unit.extents]
                plan.slots, plan.grain = min(slots, len(chosen)), grain
                plan.staging_bytes = staging(plan.slot_bytes)
                return plan
    if not least:
        raise UsageError(f"{type(model).__name__} has no layers that could be offloaded")
    need, width = min(least)
    raise UsageError(
        f"{limit_bytes:,} bytes of GPU memory are too few: this model needs {need:,} bytes with a window "
        f"of {width}; raise gpu_fraction (to {need / total + 0.001:.3f}) or gpu_bytes"
    )


@dataclass(frozen=True)
class Limit:
    """GPU memory for weights, as a share of all their bytes or in bytes."""

    fraction: float | None = None
    bytes: int | None = None

    def __post_init__(self) -> None:
        """Refuses what cannot be a limit."""
        if (self.fraction is None) == (self.bytes is None):
            raise UsageError("say how much of the weights may be on the GPU: gpu_fraction or gpu_bytes, one of them")
        if self.fraction is not None and not 0 < self.fraction <= 1:
            raise UsageError(f"gpu_fraction is a share above 0 and up to 1, not {self.fraction}")
        if self.bytes is not None and self.bytes <= 0:
            raise UsageError(f"gpu_bytes must be above 0, not {self.bytes}")

    def of(self, total: int) -> int:
        """The limit in bytes."""
        return self.bytes if self.bytes is not None else int((self.fraction or 0) * total)


def spread(count: int, chosen: int) -> list[int]:
    """`chosen` of `count` positions at even distances, the first layers last: layer 0 has nothing to hide behind."""
    return [(2 * i + 1) * count // (2 * chosen) for i in range(chosen)]


def _choose(units: Sequence[Unit], fixed: int, limit: int, slots: int) -> set[int]:
    """The fewest units, evenly spread, whose absence keeps within the limit; empty: none do."""
    total = sum(unit.bytes for unit in units)
    for count in range(1, len(units) + 1):
        chosen = spread(len(units), count)
        away = sum(units[i].bytes for i in chosen)
        slot = max(units[i].bytes for i in chosen)
        if fixed + total - away + min(slots, count) * slot <= limit:
            return set(chosen)
    return set()


def _windows(window: str | int) -> Callable[[str, bool], list[Any]]:
    """Windows to try for a grain, in order: a number of layers, or (bytes,); first those that copy ahead."""
    if window == "auto":
        return lambda grain, ahead: [width for width in AUTO_WINDOWS[grain] if (width > 0) == ahead]
    text = str(window).strip()
    if not isinstance(window, bool) and text.isdecimal():
        return lambda grain, ahead: [int(text)] if ahead else []
    for suffix, unit in (("kib", 1 << 10), ("mib", 1 << 20), ("gib", 1 << 30)):
        number = text[: -len(suffix)].strip()
        if text.lower().endswith(suffix) and number.replace(".", "", 1).isdecimal():
            size = int(float(number) * unit)
            return lambda grain, ahead: [(size,)] if ahead else []
    raise UsageError(f"the window is auto, a number of layers or a size like 512MiB, not {window!r}")


def _extents(model: Any) -> tuple[list[Extent], list[Any], dict[int, set[int]]]:
    """All bytes of a model as extents, tensors that are not plain bytes, and the modules that hold each tensor."""
    import torch
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    owners: dict[int, set[int]] = defaultdict(set)
    tensors: dict[int, Any] = {}
    unplain = []
    for module in model.modules():
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is None:
                continue
            owners[id(tensor)].add(id(module))
            if id(tensor) not in tensors:
                tensors[id(tensor)] = tensor
    storages: dict[int, list[tuple[int, int, Any]]] = defaultdict(list)
    for tensor in tensors.values():
        if is_traceable_wrapper_subclass(tensor) or tensor.layout != torch.strided or tensor.is_quantized:
            unplain.append(tensor)
        elif tensor.is_inference():
            raise UsageError(
                "the model's weights were made under inference_mode, so changes to them cannot be seen: "
                "build the model outside of it"
            )
        elif tensor.numel():
            start = tensor.storage_offset() * tensor.element_size()
            span = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
            storages[tensor.untyped_storage()._cdata].append((start, start + span * tensor.element_size(), tensor))
    extents = []
    for parts in storages.values():
        parts.sort(key=lambda part: part[:2])
        groups: list[list[tuple[int, int, Any]]] = []
        end = -1
        for part in parts:
            if part[0] >= end:
                groups.append([])
            groups[-1].append(part)
            end = max(end, part[1])
        for group in groups:
            first, last = group[0][0], max(part[1] for part in group)
            extents.append(
                Extent(last - first, [PlacedTensor(t, begin - first, stop - begin) for begin, stop, t in group])
            )
    order = {key: i for i, key in enumerate(tensors)}
    extents.sort(key=lambda extent: min(order[id(held.tensor)] for held in extent.tensors))
    return extents, unplain, owners


def _levels(model: Any, extents: list[Extent], owners: dict[int, set[int]]) -> Iterable[tuple[str, list[Unit]]]:
    """Ways to cut a model, best first: its repeated blocks, the leaf modules of these, all its leaf modules."""
    blocks = _blocks(model)
    yield "blocks", _units(blocks, extents, owners)
    inner = [leaf for name, block in blocks for leaf in _leaves(block, name)]
    for parts in (inner, _leaves(model, "")):
        leaves = _units(parts, extents, owners)
        largest = max((unit.bytes for unit in leaves), default=0)
        for part in SMALL:
            yield "leaves", [unit for unit in leaves if unit.bytes * part >= largest]
        yield "leaves", leaves


def _blocks(model: Any) -> list[tuple[str, Any]]:
    """The blocks of the outermost containers that hold several modules of one class."""
    import torch

    found: list[tuple[str, Any]] = []

    def walk(name: str, module: Any) -> None:
        children = list(module.named_children())
        if isinstance(module, (torch.nn.ModuleList, torch.nn.Sequential)):
            kinds = [type(child) for _, child in children if any(True for _ in child.parameters())]
            if any(kinds.count(kind) > 1 for kind in set(kinds)):
                found.extend((f"{name}.{key}" if name else key, child) for key, child in children)
                return
        for key, child in children:
            walk(f"{name}.{key}" if name else key, child)

    walk("", model)
    return found


def _leaves(model: Any, prefix: str) -> list[tuple[str, Any]]:
    """The outermost modules below `model` that hold parameters: their forward may use any parameter below them."""
    import torch

    lists = (torch.nn.ParameterList, torch.nn.ParameterDict)
    found: list[tuple[str, Any]] = []

    def walk(name: str, module: Any) -> None:
        own = [one for one in (*module._parameters.values(), *module._buffers.values()) if one is not None]
        children = list(module.named_children())
        if module is not model or not children:
            whole = own or any(isinstance(child, lists) for _, child in children)
        else:
            whole = False  # its own parameters stay on the GPU
        if whole and not isinstance(module, lists):
            found.append((name, module))
            return
        for key, child in children:
            walk(f"{name}.{key}" if name else key, child)

    walk(prefix, model)
    return found


def _units(parts: list[tuple[str, Any]], extents: list[Extent], owners: dict[int, set[int]]) -> list[Unit]:
    """Units of modules; those that share an extent become one, and what others use too stays on the GPU."""
    part_of: dict[int, int] = {}
    unique: dict[int, tuple[str, Any]] = {}
    for name, module in parts:
        unique.setdefault(id(module), (name, module))
    listed = list(unique.values())
    for number, (_, module) in enumerate(listed):
        for inner in module.modules():
            part_of.setdefault(id(inner), number)
    leader = list(range(len(listed)))

    def find(number: int) -> int:
        while leader[number] != number:
            number = leader[number]
        return number

    mine: list[tuple[int, Extent]] = []
    for extent in extents:
        users = {part_of.get(owner) for held in extent.tensors for owner in owners[id(held.tensor)]}
        known = sorted(user for user in users if user is not None)
        if len(known) < len(users):
            continue
        for other in known[1:]:
            low, high = sorted((find(known[0]), find(other)))
            leader[high] = low
        mine.append((known[0], extent))
    units: dict[int, Unit] = {}
    for number, (name, module) in enumerate(listed):
        units.setdefault(find(number), Unit(name, [], [])).modules.append(module)
    for number, extent in mine:
        units[find(number)].extents.append(extent)
    return [unit for unit in units.values() if unit.extents]
