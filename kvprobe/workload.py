"""A server in miniature: requests with shared prefixes whose KV blocks come from CPU memory, beside a model's steps.

It is what `kvprobe demo` and `kvprobe bench` run: real transfers through the real engine, a loop of compute launches
whose step time is the victim, every byte compared. On a GPU the steps are torch matrix products on a torch stream; on
the embedded host runtime they are timed operations.
"""

from __future__ import annotations

import contextlib
import ctypes as ct
import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from kvprobe.cuda import Runtime, device_region, host_region
from kvprobe.cuda.copies import copy_rate
from kvprobe.errors import KvprobeError
from kvprobe.launchqueue import QueueLimits
from kvprobe.native.library import core
from kvprobe.offload import BlockCache, BlockPool, LoadDedup, OffloadEngine
from kvprobe.recordings.assemble import sorted_table
from kvprobe.recordings.engine import PHASES, recording_of
from kvprobe.recordings.model import Direction, RangeStyle, Recording, Table
from kvprobe.recordings.vocabulary import Names

PREFIX, UNIQUE = 12, 6  # blocks of a request: shared with its group, its own
GROUPS, GROUP_SIZE = 2, 6  # prefixes, and how many requests arrive together with one
HOLD_STEPS = 2  # steps a loaded request runs before its GPU blocks are free
COMPARED = PREFIX + UNIQUE  # blocks of one comparison
SPARE = 2  # requests whose bytes are still being compared
STEP_NS = 5_000_000
MOST_SLOWER = 3  # times its length that a run may take for a given number of requests


@dataclass(frozen=True)
class Shape:
    """Sizes of a workload, chosen for the machine.

    Attributes:
        layers: layers of the cache.
        piece_bytes: one copy: a block of one layer.
        concurrency: requests that load at the same time.
        gpu_blocks: blocks of the GPU pool.
        cpu_blocks: blocks of the CPU pool.
        link_bytes_per_s: measured with one large copy.
    """

    layers: int
    piece_bytes: int
    concurrency: int
    gpu_blocks: int
    cpu_blocks: int
    link_bytes_per_s: float

    @property
    def block_bytes(self) -> int:
        """One block, all layers."""
        return self.layers * self.piece_bytes


def shape_for(runtime: Runtime, limits: QueueLimits, copy_ns: int = 100_000) -> Shape:
    """Chooses copies of up to `copy_ns` and enough requests at once to fill one launch queue half again.

    Raises:
        KvprobeError: the device has too little memory for that.
    """
    link = _link(runtime)
    layers = 32
    # two groups at least: the first requests of both fill the queue even where the others wait for their prefix
    leader = (PREFIX + UNIQUE) * layers
    concurrency = max(-(-limits.depth * 3 // 2 // leader), 2) * (GROUP_SIZE - 1)
    piece = 1 << max(int(link * copy_ns / 1e9).bit_length() - 1, 12)
    cpu_blocks = GROUPS * PREFIX + (concurrency + SPARE) * UNIQUE
    gpu_blocks = (concurrency + HOLD_STEPS * 2) * (PREFIX + UNIQUE) + GROUPS * PREFIX
    free, _ = runtime.mem_info()
    while (gpu_blocks + cpu_blocks // 8) * layers * piece > 0.7 * free and piece > 65536:
        piece //= 2
    if gpu_blocks * layers * piece > 0.9 * free:
        need = gpu_blocks * layers * piece
        raise KvprobeError(f"the device has {free >> 20} MiB free; this workload needs {need >> 20} MiB")
    return Shape(layers, piece, concurrency, gpu_blocks, cpu_blocks, link)


def _link(runtime: Runtime) -> float:
    """Bytes per second of one large copy to the device, best of three."""
    size = 32 << 20 if runtime.provider == "host" else 256 << 20
    device, host = device_region(runtime, size), host_region(runtime, size)
    return copy_rate(runtime, device.address, host.address, size, "h2d")


@dataclass
class _Request:
    id: int
    keys: list[int]
    state: str = "waiting"  # then "loading", "running"
    fresh: list[int] = field(default_factory=list)  # keys it loads itself
    blocks: list[int] = field(default_factory=list)  # GPU blocks it loads into
    source: list[int] = field(default_factory=list)  # CPU blocks it loads from
    shares: list[int] = field(default_factory=list)  # resident keys it holds
    until_step: int = 0
    finished: bool = False  # the model has run it
    verified: bool = False  # its bytes have been compared


@dataclass
class WorkloadFigures:
    """What a run of the workload measured.

    Attributes:
        steps: (start_ns, dur_ns) of each step.
        outstanding: (time_ns, operations) of the engine, once a step.
        bytes_loaded: by completed loads.
        bytes_verified: compared, both sides.
        requests: served.
        loads: (time_ns, ns, copies, bytes) of each load: time inside the call, on the model's thread.
        start_ns: of the run.
        end_ns: of the run.
    """

    steps: list[tuple[int, int]] = field(default_factory=list)
    outstanding: list[tuple[int, int]] = field(default_factory=list)
    bytes_loaded: int = 0
    bytes_verified: int = 0
    requests: int = 0
    loads: list[tuple[int, int, int, int]] = field(default_factory=list)
    start_ns: int = 0
    end_ns: int = 0


@contextlib.contextmanager
def _memory_told(runtime: Runtime) -> Iterator[None]:
    """Says in one line that torch found too little memory on the device: others may have taken it since it was asked.

    Raises:
        KvprobeError: that line.
    """
    try:
        yield
    except RuntimeError as error:
        if type(error).__name__ != "OutOfMemoryError":
            raise
        free = runtime.mem_info()[0] >> 20
        raise KvprobeError(f"this workload needs more memory of the device than the {free} MiB that are free") from None


class Machine:
    """The model and the memory of a workload: made once, used by one server after another."""

    def __init__(self, runtime: Runtime, shape: Shape) -> None:
        """Allocates both pools and fills the CPU side with a pattern that names block, layer and offset."""
        self.runtime, self.shape = runtime, shape
        with _memory_told(runtime):
            self.model = _CudaModel(runtime, shape) if runtime.provider == "cuda" else _HostModel(runtime, shape)
            self.gpu = BlockPool(runtime, self.model.layers(shape.gpu_blocks), shape.piece_bytes)
        self._cpu_layers = [host_region(runtime, shape.cpu_blocks * shape.piece_bytes) for _ in range(shape.layers)]
        self.cpu = BlockPool(runtime, self._cpu_layers, shape.piece_bytes)
        self.servers: weakref.WeakSet[WorkloadServer] = weakref.WeakSet()
        words = shape.piece_bytes // 8
        ramp = np.arange(words, dtype=np.uint64)
        for layer, region in enumerate(self._cpu_layers):
            view = np.frombuffer(region.owner.view(), dtype=np.uint64).reshape(shape.cpu_blocks, words)
            for block in range(shape.cpu_blocks):
                np.add(ramp, np.uint64(pattern(layer, block)), out=view[block])

    def verify(self, gpu_blocks: list[int], cpu_blocks: list[int]) -> None:
        """Compares blocks, byte for byte.

        Raises:
            KvprobeError: some differ.
        """
        self.model.verify(self.gpu, gpu_blocks, self.cpu, cpu_blocks)

    def close(self) -> None:
        """Frees the memory, once no server compares it any more; nothing may be in flight."""
        for server in list(self.servers):
            server.stop_verifying()
        self.runtime.synchronize()
        self.model.close()
        for region in self._cpu_layers:
            region.owner.close()


class WorkloadServer:
    """One engine under load. `run` plays steps; `close` waits for the verifier and gives streams and events back."""

    def __init__(
        self,
        machine: Machine,
        limits: QueueLimits,
        policy: str,
        dedup: str,
        *,
        concurrency: int | None = None,
        records: int = 1 << 18,
    ) -> None:
        """Starts with empty GPU blocks and everything in CPU memory; `concurrency`: default, the shape's."""
        self.runtime, self.shape = runtime, shape = machine.runtime, machine.shape
        self._machine, self._device = machine, machine.model
        self._concurrency = concurrency or shape.concurrency
        self.engine = OffloadEngine(
            runtime,
            machine.gpu,
            machine.cpu,
            policy=policy,
            limits=limits,
            detail="copies",
            records=records,
            link_bytes_per_s=shape.link_bytes_per_s,
            compute_stream=self._device.stream,
        )
        self._now = core().kvp_now_ns
        self.cache = BlockCache(shape.cpu_blocks)
        keys = list(range(shape.cpu_blocks))
        self.cache.begin_store(keys)
        self.cache.end(keys)
        # one change at a time: dedup makes other transfers, and a switch is judged by transfers like those before it
        self._dedup_mode = dedup
        first = "off" if policy == "auto" and dedup == "auto" else dedup
        self.dedup = LoadDedup(self._now, self._would_take, shape.block_bytes, first)
        self.measured = WorkloadFigures()
        self._free = list(range(shape.gpu_blocks))
        self._resident: dict[int, int] = {}  # shared key -> GPU block
        self._own = deque(range(GROUPS * PREFIX, shape.cpu_blocks, UNIQUE))  # first own key of a request to come
        self._users: dict[int, int] = {}  # resident key -> requests that hold it
        self._waiting: deque[_Request] = deque()
        self._loading: dict[int, _Request] = {}
        self._running: deque[_Request] = deque()
        self._ids = 0
        self._step = 0
        self._marks = [runtime.event_create(), runtime.event_create()]
        self._verify: queue.SimpleQueue[_Request | None] = queue.SimpleQueue()
        self._verified: deque[_Request] = deque()
        self._fault: Exception | None = None
        self._stop = False
        self._verifier = threading.Thread(target=self._verify_loop, name="kvprobe-verify", daemon=True)
        self._verifier.start()
        # in virtual time the loop compares: a run is then the same on every machine
        self._hand_to_verifier = self._compare if runtime.simulated else self._verify.put
        machine.servers.add(self)

    def _would_take(self, size: int) -> int:
        return int((size + self.engine.pending_bytes("load")) / self.shape.link_bytes_per_s * 1e9)

    # -- the loop ------------------------------------------------------------------------------------------------

    def run(self, seconds: float, tick: Callable[[float], None] | None = None, requests: int = 0) -> WorkloadFigures:
        """Plays steps: admit, launch, poll, wait for the step before.

        Args:
            seconds: for how long.
            tick: gets the share that is done, 0 to 1.
            requests: where given, until so many were served, be it earlier or later than `seconds`, within reason.
        """
        measured, now = self.measured, self._now
        begin = now()
        measured.start_ns = measured.start_ns or begin
        end = begin + int(seconds * 1e9 * (MOST_SLOWER if requests else 1))
        before = measured.requests
        while (start := now()) < end and not (requests and measured.requests - before >= requests):
            self._one_step()
            measured.steps.append((start, now() - start))
            measured.outstanding.append((now(), sum(self.engine.outstanding().values())))
            if tick:
                done = (measured.requests - before) / requests if requests else (now() - begin) / (end - begin)
                tick(min(done, 1.0))
            if self._fault:
                raise self._fault
        measured.end_ns = now()
        return measured

    def _one_step(self) -> None:
        self._step += 1
        if self.dedup.mode != self._dedup_mode and any(one.gain for one in self.engine.auto.decisions):
            self.dedup.mode = self._dedup_mode
        mark = self._marks[self._step % 2]
        self._admit()
        self._device.step()
        self.runtime.event_record(mark, self._device.stream)
        self._collect()
        if self._step > 1:  # as a server does: prepare one step while the one before runs
            self.runtime.event_synchronize(self._marks[(self._step - 1) % 2])

    def _admit(self) -> None:
        while len(self._waiting) + len(self._loading) < self._concurrency and self._own:
            self._arrive()
        for request in list(self._waiting):
            missing = [key for key in request.keys if key not in self._resident]
            count = self.dedup.lookup(request.id, missing, self.cache.__contains__)
            if count is None:
                continue
            if count > len(self._free):
                break
            self._waiting.remove(request)
            self._load(request, missing[:count])

    def _arrive(self) -> None:
        """A group of requests with one prefix."""
        group = (self._ids // GROUP_SIZE) % GROUPS
        prefix = list(range(group * PREFIX, (group + 1) * PREFIX))
        own = self._own.popleft()
        self._waiting.append(_Request(self._ids, prefix + list(range(own, own + UNIQUE))))
        self._ids += 1

    def _load(self, request: _Request, fresh: list[int]) -> None:
        request.shares = [key for key in request.keys if key not in fresh]
        for key in request.shares:
            self._users[key] += 1
        request.fresh, request.state = fresh, "loading"
        request.source = self.cache.begin_load(fresh)
        request.blocks = [self._free.pop() for _ in fresh]
        self._loading[request.id] = request
        if not fresh:
            request.verified = True
            self._loaded(request)
            return
        self.dedup.started(fresh)
        start = self._now()
        transfer = self.engine.load(request.source, request.blocks, tag=request)
        self.measured.loads.append((start, self._now() - start, transfer.copies, transfer.bytes))

    def _collect(self) -> None:
        for transfer in self.engine.poll():
            request = transfer.tag
            transfer.result()
            self.measured.bytes_loaded += transfer.bytes
            self.cache.end(request.fresh)
            self.dedup.ended(request.fresh)
            self._hand_to_verifier(request)
            self._loaded(request)
        while self._running and self._running[0].until_step <= self._step:
            request = self._running.popleft()
            request.finished = True
            self.measured.requests += 1
            self._release(request)
        while self._verified:
            request = self._verified.popleft()
            request.verified = True
            self._own.append(request.keys[PREFIX])  # its source blocks serve another request
            self._release(request)

    def _release(self, request: _Request) -> None:
        """A request that was both run and compared lets its blocks go."""
        if not (request.finished and request.verified):
            return
        for key in request.shares:
            self._users[key] -= 1
            if not self._users[key]:  # its last reader is gone: memory pressure takes it off the GPU
                self._free.append(self._resident.pop(key))
                del self._users[key]
        for key, block in zip(request.fresh, request.blocks, strict=True):
            if key not in request.shares:
                self._free.append(block)

    def _loaded(self, request: _Request) -> None:
        del self._loading[request.id]
        request.state, request.until_step = "running", self._step + HOLD_STEPS
        for key, block in zip(request.fresh, request.blocks, strict=True):
            if key < GROUPS * PREFIX and key not in self._resident:
                self._resident[key] = block
                self._users[key] = 1
                request.shares.append(key)
        self._running.append(request)

    # -- comparing bytes -----------------------------------------------------------------------------------------

    def _verify_loop(self) -> None:
        while (request := self._verify.get()) is not None and not self._stop and not self._fault:
            self._compare(request)

    def _compare(self, request: _Request) -> None:
        try:
            self._machine.verify(request.blocks, request.source)
        except Exception as error:
            self._fault = error
            return
        self.measured.bytes_verified += len(request.blocks) * self.shape.block_bytes
        self._verified.append(request)

    def close(self) -> None:
        """Drains, compares what is left, and gives back streams and events.

        Raises:
            KvprobeError: a byte differed, or a transfer failed.
        """
        try:
            left = -1
            while left != len(self._loading):  # after a failure some will never be heard of
                left = len(self._loading)
                self.engine.wait()
                self._collect()
            if self.measured.start_ns:
                self.measured.end_ns = self._now()  # what is moved while it drains counts, and so does the time
            self._verify.put(None)
            self._verifier.join()
            self.runtime.synchronize()
        finally:
            self.stop_verifying()
            self.engine.close()
            for mark in self._marks:
                self.runtime.event_destroy(mark)
        if self._fault:
            raise self._fault

    def stop_verifying(self) -> None:
        """Compares nothing more; returns when nobody reads the pools."""
        self._stop = True
        self._verify.put(None)
        self._verifier.join()


def pattern(layer: int, block: int) -> int:
    """First word of a block's content; the words after it count up."""
    return (layer << 56) | (block << 32)


def recorded(servers: Mapping[str, WorkloadServer], ring: Path, what: str, command: str = "") -> Recording:
    """What servers did, one after another, as a recording.

    Each is a range by its name; its steps and what was outstanding are samples, its loads calls of a server.

    Args:
        servers: phase -> server; closed ones, too.
        ring: the ring file that all of them wrote to.
        what: a name for the page's title and provenance.
        command: that made them work.
    """
    recording = recording_of(*(one.engine for one in servers.values()), ring=ring, what=what, command=command)
    names, thread = Names(recording.names), threading.get_native_id()
    all_of = {phase: one.measured for phase, one in servers.items()}
    steps = [(*step, names.add("step_time_ns")) for one in all_of.values() for step in one.steps]
    counts = [(*count, names.add("operations_outstanding")) for one in all_of.values() for count in one.outstanding]
    loads = np.array([load for one in all_of.values() for load in one.loads], dtype=np.int64).reshape(-1, 4)
    zeros = np.zeros(len(loads))
    samples = np.array(steps + counts, dtype=np.int64).reshape(-1, 3)
    recording.tables["ranges"] = Table(
        "ranges",
        {
            "start_ns": np.array([one.start_ns for one in all_of.values()]),
            "end_ns": np.array([one.end_ns for one in all_of.values()]),
            "process": np.zeros(len(all_of)),
            "thread": np.full(len(all_of), thread),
            "domain": np.full(len(all_of), names.add(PHASES)),
            "name": names.map(list(all_of)),
            "style": np.full(len(all_of), RangeStyle.START_END),
        },
    )
    recording.tables["samples"] = sorted_table(
        "samples",
        {
            "time_ns": samples[:, 0],
            "process": np.zeros(len(samples)),
            "device": np.zeros(len(samples)),
            "metric": samples[:, 2],
            "value": samples[:, 1],
        },
        by="time_ns",
    )
    recording.tables["server_calls"] = sorted_table(
        "server_calls",
        {
            "start_ns": loads[:, 0],
            "end_ns": loads[:, 0] + loads[:, 1],
            "process": zeros,
            "thread": zeros + thread,
            "server": zeros + names.add("kvprobe"),
            "name": zeros + names.add("load"),
            "direction": zeros + Direction.H2D,
            "bytes": loads[:, 3],
            "count": loads[:, 2],
        },
    )
    recording.names = names.list
    return recording


class _HostModel:
    """Steps as timed operations of the host runtime; device memory is ordinary memory there."""

    LAUNCHES = 10

    def __init__(self, runtime: Runtime, shape: Shape) -> None:
        self._runtime, self._shape = runtime, shape
        self.stream = runtime.stream_create()
        self._regions: list[Any] = []
        self._memcmp = ct.CDLL(None).memcmp
        self._memcmp.argtypes = [ct.c_void_p, ct.c_void_p, ct.c_size_t]

    def layers(self, blocks: int) -> list[Any]:
        size = blocks * self._shape.piece_bytes
        self._regions = [device_region(self._runtime, size) for _ in range(self._shape.layers)]
        return self._regions

    def step(self) -> None:
        for _ in range(self.LAUNCHES):
            self._runtime.launch_delay(self.stream, STEP_NS // self.LAUNCHES)

    def verify(self, gpu: BlockPool, gpu_blocks: list[int], cpu: BlockPool, cpu_blocks: list[int]) -> None:
        size = self._shape.piece_bytes
        left = gpu.addresses(np.array(gpu_blocks), size)
        right = cpu.addresses(np.array(cpu_blocks), size)
        for a, b in zip(left.tolist(), right.tolist(), strict=True):
            if self._memcmp(a, b, size):
                raise KvprobeError(f"a loaded block differs from its source ({a:#x} and {b:#x})")

    def close(self) -> None:
        self._runtime.stream_destroy(self.stream)
        for region in self._regions:
            region.owner.close()


class _CudaModel:
    """Steps as matrix products on a torch stream; blocks are compared on the device against the pattern."""

    def __init__(self, runtime: Runtime, shape: Shape) -> None:
        try:
            import torch
        except ImportError:
            raise KvprobeError("the demo's model loop on a GPU needs torch with CUDA; or use --device host") from None
        self._torch, self._shape = torch, shape
        self._stream = torch.cuda.Stream()
        self._side = torch.cuda.Stream()
        self.stream = self._stream.cuda_stream
        self._blocks: Any = None
        with torch.cuda.stream(self._stream):
            self._a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
            self._out = torch.empty_like(self._a)
            self._launches = self._calibrate()
        # For comparing: everything up front and of fixed size, few calls a request. An allocation or a crowd of small
        # launches from the comparing thread would itself hold up the submissions that this workload measures.
        words = shape.piece_bytes // 8
        table = [[pattern(layer, block) for block in range(shape.cpu_blocks)] for layer in range(shape.layers)]
        self._first = torch.tensor(table, device="cuda")
        self._ramp = torch.arange(words, device="cuda", dtype=torch.int64)
        self._found = torch.empty(shape.layers, COMPARED, words, device="cuda", dtype=torch.int64)
        self._wrong = torch.empty(self._found.shape, device="cuda", dtype=torch.bool)
        self._names = torch.empty(2, COMPARED, dtype=torch.int64).pin_memory()
        self._ids = torch.empty(2, COMPARED, dtype=torch.int64, device="cuda")
        self._differing = torch.empty((), dtype=torch.int64).pin_memory()
        self._compared = torch.cuda.Event(blocking=True)  # a spinning wait would slow the submitting thread's calls
        torch.cuda.synchronize()

    def _calibrate(self) -> int:
        """How many products make a step."""
        torch = self._torch
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        for repeat in range(2):  # the first round loads the library
            start.record()
            for _ in range(8 + 24 * repeat):
                torch.mm(self._a, self._a, out=self._out)
            end.record()
            end.synchronize()
        return max(int(STEP_NS / (start.elapsed_time(end) * 1e6 / 32)), 1)

    def layers(self, blocks: int) -> list[Any]:
        torch = self._torch
        words = self._shape.piece_bytes // 8
        self._blocks = torch.zeros(self._shape.layers, blocks, words, dtype=torch.int64, device="cuda")
        torch.cuda.synchronize()
        return list(self._blocks)

    def step(self) -> None:
        torch = self._torch
        with torch.cuda.stream(self._stream):
            for _ in range(self._launches):
                torch.mm(self._a, self._a, out=self._out)

    def verify(self, gpu: BlockPool, gpu_blocks: list[int], cpu: BlockPool, cpu_blocks: list[int]) -> None:
        torch = self._torch
        for at in range(0, len(gpu_blocks), COMPARED):
            where, source = gpu_blocks[at : at + COMPARED], cpu_blocks[at : at + COMPARED]
            short = COMPARED - len(where)  # filled up with the last block again
            self._names[0] = torch.tensor(where + where[-1:] * short)
            self._names[1] = torch.tensor(source + source[-1:] * short)
            with torch.cuda.stream(self._side):
                self._ids.copy_(self._names, non_blocking=True)
                torch.index_select(self._blocks, 1, self._ids[0], out=self._found)
                self._found.sub_(self._first.index_select(1, self._ids[1])[:, :, None])
                torch.ne(self._found, self._ramp, out=self._wrong)
                self._differing.copy_(self._wrong.sum(), non_blocking=True)
                self._compared.record()
            self._compared.synchronize()
            if int(self._differing):
                raise KvprobeError(f"{int(self._differing)} words of loaded blocks differ from their source")

    def close(self) -> None:
        self._torch.cuda.synchronize()
        self._blocks = self._found = self._wrong = None
