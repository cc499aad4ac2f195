"""SGLang HiCache: what a transfer copies: how many pieces and places of a queue, and of the direct back end by address.

The direct back end copies bytes as they are: `transfer_kv_direct` rows of a layer, in runs of slots that are neighbours
on both sides; the two for `page_first_direct` a page of a layer each. The kernel back end loads with a launch a layer,
which is cheap and takes one place each; its write-back has the GPU rearrange rows in a buffer of its own first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvprobe.errors import KvprobeError
from kvprobe.instrument.hooks import Call
from kvprobe.instrument.submissions import Copies

DIRECT = ("transfer_kv_direct", "transfer_kv_per_layer_direct_pf_lf", "transfer_kv_all_layer_direct_lf_pf")
_PARAMETERS = {
    name: dict.fromkeys((f"src_{kind}", f"dst_{kind}", "src_indices", "dst_indices", *layer, "page_size"))
    for name, kind, layer in zip(DIRECT, ("layers", "ptrs", "ptrs"), ((), ("layer_id",), ()), strict=True)
}
_HOST_POOLS = "sglang.srt.mem_cache.pool_host"
# Of these it was read that the direct back end copies by nothing but those three functions, from and to the pool
# itself. Pools that derive from them may do more: the type has to be one of these.
_PLAIN_POOLS = {
    (f"{_HOST_POOLS}.mha", "MHATokenToKVPoolHost"),
    (f"{_HOST_POOLS}.mha", "MHATokenToKOnlyPoolHost"),
    (f"{_HOST_POOLS}.mha", "AsymmetricMHATokenToKVPoolHost"),
    (f"{_HOST_POOLS}.mla", "MLATokenToKVPoolHost"),
    (f"{_HOST_POOLS}.dsa", "DSAIndexerPoolHost"),
}
_REGISTERED = "_sglang_cuda_host_registered_ranges"  # of a host buffer: (address, bytes) of each registration
_BATCHED_PAGE_BYTES = 128 * 1024  # smaller pages are copied one by one (staged_write_back.cuh)
_STAGING = ("staging_k_buffer", "staging_v_buffer", "staging_buffer", "k_scale_staging", "v_scale_staging")
_DESCRIPTORS_A_PLACE = 8  # of a batch: a queue of 1,021 places took 8,168 copies in batches of 8, more in larger ones

Indices = NDArray[np.int64]


# ---- how much ------------------------------------------------------------------------------------------------------


class Work(NamedTuple):
    """What one transfer asks of a launch queue, estimated from pool, layout and back end.

    Attributes:
        copies: pieces, or launches where a kernel copies.
        places: operations in the queue: copies, relayout kernels, batches by their length.
        unit: tokens that stay together where a transfer is cut (a page); 0 where it is not cut.
    """

    copies: int
    places: int
    unit: int


def work(transfer: Any, direction: str, backend: str) -> Work:
    """What a transfer becomes.

    The kernel back end loads with a launch a layer and writes back with one launch, or staged: chunk by chunk a
    relayout kernel and then a copy a page and buffer, or a batch where pages are large. The direct back end makes a
    copy a layer, run and buffer, or batches where the layout is page_first_direct.
    """
    pool, tokens = transfer.host_pool, len(transfer.host_indices)
    layers = int(getattr(pool, "layer_num", 1) or 1)
    page = int(getattr(pool, "page_size", 1) or 1) * int(getattr(pool, "dcp_size", 1) or 1)
    pages = -(-tokens // page)
    if not tokens:
        return Work(0, 0, 0)
    if backend == "direct":
        buffers = 2 if hasattr(pool, "v_buffer") else 1
        if getattr(pool, "layout", "") == "page_first_direct":
            copies = buffers * layers * pages
            return Work(copies, -(-copies // _DESCRIPTORS_A_PLACE), 0)
        left, right = transfer.host_indices, transfer.device_indices
        copies = buffers * layers * (1 + int(((left.diff() != 1) | (right.diff() != 1)).sum()))
        return Work(copies, copies, 0)
    if direction == "load":
        return Work(layers, layers, 0)
    if not getattr(pool, "can_use_write_back_jit", False):
        return Work(1, 1, 0)
    # Pools of which it is known that each page is copied for itself say how many tokens a staged chunk has.
    whole = hasattr(pool, "staging_token_capacity") and len(transfer.device_indices) == tokens
    unit = page if whole else 0
    staging = [buffer for name in _STAGING if (buffer := getattr(pool, name, None)) is not None]
    if not staging:
        return Work(2 * pages, 2 * pages, unit)
    places = 0
    for buffer in staging:
        chunk = int(getattr(pool, "staging_page_capacity", 0) or len(buffer))
        batched = buffer.nbytes // chunk >= _BATCHED_PAGE_BYTES
        places += -(-pages // chunk) + (-(-pages // _DESCRIPTORS_A_PLACE) if batched else pages)
    return Work(pages * len(staging), places, unit)


def size(transfers: Any) -> int:
    """Bytes, where the pools say how large a token is."""
    return sum(len(t.host_indices) * int(getattr(t.host_pool, "size_per_token", 0) or 0) for t in transfers)


# ---- what may be changed ---------------------------------------------------------------------------------------------


def one_fifo(transfers: Any, domains: Callable[[Any], Any]) -> str:
    """Why these transfers stay on SGLang's stream of their direction; empty where they need not.

    `domains` is SGLang's own `shared_host_layout_domains`.
    """
    if any(getattr(t.device_pool, "host_transfer_translate", None) is not None for t in transfers):
        return "a pool translates indices on its stream: these pools rely on one stream a direction"
    if domains(t.host_pool for t in transfers):
        return "pools share a host layout, which is held until SGLang's own event: they rely on one stream a direction"
    return ""


def no_plain_copy(transfers: Any) -> str:
    """Why the direct back end's copies of these transfers are not known by address; empty where they are."""
    for transfer in transfers:
        kind = type(transfer.host_pool)
        if (kind.__module__, kind.__name__) not in _PLAIN_POOLS:
            return f"a {kind.__name__} may do more than copy bytes"
        if any(indices.device.type != "cpu" for indices in (transfer.host_indices, transfer.device_indices)):
            return "indices are on the GPU: to read them here would wait for it"
    return ""


# ---- by address ------------------------------------------------------------------------------------------------------


class Move(NamedTuple):
    """What one of the direct back end's functions was called with.

    Attributes:
        name: of the function.
        sides: tensors that it copies from, and to.
        slots: index tensors of both sides.
        layer: of a host page, which the first of the sides' tensors is.
        page_size: slots of a page.
    """

    name: str
    sides: tuple[Sequence[Any], Sequence[Any]]
    slots: tuple[Any, Any]
    layer: int
    page_size: int


def move_of(call: Call) -> Move | None:
    """A taken call, if it is one of those functions that was called.

    Raises:
        KvprobeError: it was called in another way than in any version known.
    """
    name = call.func.__name__
    names = _PARAMETERS.get(name)
    if names is None:
        return None
    given = dict(zip(names, call.args, strict=False)) | call.kwargs if call.args else call.kwargs
    if given.keys() != names.keys():
        raise KvprobeError(f"{name} was called in another way than in any version known")
    sources, targets, of_sources, of_targets = (given[one] for one in tuple(names)[:4])
    return Move(name, (sources, targets), (of_sources, of_targets), given.get("layer_id", 0), given["page_size"])


class _Offsets(NamedTuple):
    """Bytes from the first slot of both sides, in every layer the same, sizes, and where the last slot ends.

    Attributes:
        ends: in slots; of pages in pages, on the side of the host.
    """

    sources: Indices
    targets: Indices
    sizes: Indices | int
    ends: tuple[int, int]


class Addresses:
    """Addresses of a burst's copies, worked out from what SGLang's functions were called with.

    Attributes:
        tensors: where those begin that are copied from or to.
    """

    def __init__(self) -> None:
        self.tensors: set[int] = set()
        # Layers share their index tensors: by id, and those are alive, as the calls hold them; and by bytes of a row,
        # and of a page on the host's side.
        self._offsets: dict[tuple[int, ...], _Offsets] = {}

    def copies(self, moves: Sequence[Move]) -> list[Copies]:
        """What these copy, in their order: offsets that layers share, and where each layer begins.

        Raises:
            KvprobeError: one copies something else than bytes between two plain tensors.
        """
        found: list[Copies] = []
        for move in moves:
            if move.slots[0].numel():
                found += self._rows(move) if move.name == "transfer_kv_direct" else self._pages(move)
        return found

    def _rows(self, move: Move) -> list[Copies]:
        """Runs of rows, the same ones in every pair of tensors."""
        (sources, targets), slots = move.sides, move.slots
        if len(sources) != len(targets):
            raise KvprobeError("layers do not come in pairs")
        found: list[Copies] = []
        bases: list[tuple[int, int]] = []
        known, ends = -1, (0, 0)
        for source, target in zip(sources, targets, strict=True):
            row = _row_bytes(source, target)
            if row != known:
                known, bases, of = row, [], self._of_rows(*slots, row)
                ends = of.ends
                found.append(Copies(of.targets, of.sources, of.sizes, bases=bases))
            if ends[0] > source.shape[0] or ends[1] > target.shape[0]:
                raise KvprobeError("a slot lies outside its pool")
            base = target.data_ptr(), source.data_ptr()
            bases.append(base)
            self.tensors.update(base)
        return found

    def _of_rows(self, src: Any, dst: Any, row: int) -> _Offsets:
        """Slots that are neighbours on both sides: as `transfer_kv_direct` cuts them."""
        key = id(src), id(dst), row
        known = self._offsets.get(key)
        if known is None:
            sources, targets = _indices(src, dst)
            begins = np.flatnonzero((np.diff(sources) != 1) | (np.diff(targets) != 1)) + 1
            begins = np.concatenate([[0], begins])
            ends = int(sources.max()) + 1, int(targets.max()) + 1
            sizes = np.diff(begins, append=len(sources)) * row
            one = int(sizes[0]) if (sizes == sizes[0]).all() else sizes
            known = self._offsets[key] = _Offsets(sources[begins] * row, targets[begins] * row, one, ends)
        return known

    def _pages(self, move: Move) -> list[Copies]:
        """A page of each layer, whose rows follow one another on both sides.

        The host has one tensor of pages, or one of keys and one of values; `layers` are all of the first, then all of
        the second.
        """
        store = move.name == "transfer_kv_all_layer_direct_lf_pf"
        (layers, pages), (of_layers, of_pages) = (side[:: 1 if store else -1] for side in (move.sides, move.slots))
        if len(of_layers) % move.page_size or len(layers) % len(pages):
            raise KvprobeError("pages or layers do not come whole")
        each = len(layers) // len(pages)
        row = int(layers[0].stride(0)) * int(layers[0].element_size())
        of_page, of_layer = (int(pages[0].stride(axis)) * int(pages[0].element_size()) for axis in (0, 1))
        offsets = self._of_pages(of_layers, of_pages, move.page_size, row, of_page)
        whole, deep = pages[0].shape[:2]
        if move.layer < 0 or move.layer + each > deep or offsets.ends[1] > whole:
            raise KvprobeError("a page lies outside its pool")
        bases = []
        for number, layer in enumerate(layers):
            page = pages[number // each]
            item = int(page.element_size())
            plain = page.is_contiguous() and layer.is_contiguous() and page.dtype == layer.dtype and page.dim() > 3
            shaped = page.stride(2) * item == row == layer.stride(0) * item and page.shape[2] == move.page_size
            if not plain or not shaped:
                raise KvprobeError("pages are laid out or typed in two ways: no plain copy")
            if offsets.ends[0] > layer.shape[0]:
                raise KvprobeError("a page lies outside its pool")
            at_page, at_layer = page.data_ptr(), layer.data_ptr()
            bases.append((at_page + (move.layer + number % each) * of_layer, at_layer))
            self.tensors.update((at_page, at_layer))
        if store:
            return [Copies(offsets.targets, offsets.sources, offsets.sizes, bases=bases)]
        turned = [(layer, page) for page, layer in bases]
        return [Copies(offsets.sources, offsets.targets, offsets.sizes, bases=turned)]

    def _of_pages(self, of_layers: Any, of_pages: Any, page_size: int, row: int, of_page: int) -> _Offsets:
        """From the layers' rows (sources) to the host's pages (targets)."""
        key = id(of_layers), id(of_pages), page_size, row, of_page
        known = self._offsets.get(key)
        if known is None:
            in_layers, in_pages = _indices(of_layers, of_pages)
            at_row, at_page = in_layers[::page_size], in_pages[::page_size] // page_size
            ends = int(at_row.max()) + page_size, int(at_page.max()) + 1
            known = self._offsets[key] = _Offsets(at_row * row, at_page * of_page, page_size * row, ends)
        return known


def _indices(src: Any, dst: Any) -> tuple[Indices, Indices]:
    sources, targets = (side.numpy().astype(np.int64, copy=False) for side in (src, dst))
    if len(sources) != len(targets):
        raise KvprobeError(f"{len(sources)} source slots for {len(targets)}")
    if min(sources.min(), targets.min()) < 0:
        raise KvprobeError("a slot lies outside its pool")
    return sources, targets


def _row_bytes(left: Any, right: Any) -> int:
    """Bytes of a row of both.

    Raises:
        KvprobeError: they are not of one kind, or their rows do not lie behind each other.
    """
    row: int = left.stride(0) * left.element_size()
    same = left.dtype is right.dtype and row == right.stride(0) * right.element_size()
    if not same or not left.is_contiguous() or not right.is_contiguous():
        raise KvprobeError("rows are laid out or typed in two ways: no plain copy")
    return row


def registrations(transfers: Any) -> list[int]:
    """Where registrations of the pools' host memory begin.

    Raises:
        KvprobeError: of a pool that is not known.
    """
    found: list[int] = []
    for pool in {id(t.host_pool): t.host_pool for t in transfers}.values():
        held = [
            one for value in vars(pool).values() for one in (value if isinstance(value, list | tuple) else (value,))
        ]
        ranges = [known for one in held if (known := getattr(one, _REGISTERED, None)) is not None]
        if not ranges:
            raise KvprobeError("where a pool's host memory was registered is not known")
        found += [address for known in ranges for address, _ in known]
    return found
