"""Compiles, caches and loads the copy kernels: no compiler on the user's machine, only what the CUDA wheels bring.

NVRTC is found by cuda-pathfinder (torch's CUDA wheels bring it). The machine code is kept in a private folder of the
user's cache, by source, architecture and NVRTC version; what does not fit or does not load there is made again. On the
host runtime the same calls load an image that stands for the kernels.
"""

from __future__ import annotations

import ctypes as ct
import hashlib
import os
import stat
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kvprobe.cuda.copies import PinnedList, columns, submit_copies
from kvprobe.cuda.memory import Buffer
from kvprobe.cuda.runtime import Runtime
from kvprobe.environment import caches
from kvprobe.errors import KvprobeError
from kvprobe.native.library import Copier, CopyKernel, CudaCalls

__all__ = ["CopyKernels", "load_copy_kernels"]

NATIVE = Path(__file__).resolve().parent.parent / "native"
SOURCES = (NATIVE / "kernels" / "copy.cu",)
CODED_SOURCES = (  # one program, in this order
    NATIVE / "src" / "wire.h",
    NATIVE / "kernels" / "coded.cu",
    NATIVE / "kernels" / "image.cu",
)
HOST_IMAGE = b"KVPROBE HOST KERNELS\0"
OPTIONS = ("--std=c++17",)
CACHE_MAGIC = b"KVPCUBIN"

MAX_CTAS = 16
BULK_WARPS, REGISTER_WARPS = 8, 16
BULK_RING_BYTES = 16384  # of a warp, beside RING_HEADER of copy_methods.c
RING_HEADER_BYTES = 512
BULK, REGISTERS, CODED = 1, 2, 3  # kvp_copy_kernel.kind
CODED_LOAD_THREADS, CODED_STORE_THREADS = 640, 512  # of a CTA: its teams, as coded.cu has them
CODED_LOAD_BYTES, CODED_STORE_BYTES = 199680, 214016  # its shared memory: four kvp_load_team, four kvp_store_team

UNPACK_THREADS, UNPACK_BYTES, UNPACK_CTAS = 128, 48, 128  # kvp_unpack_team; the CTAs: about as many as multiprocessors

_MAJOR, _MINOR, _SHARED_OPTIN, _HOST_POINTERS = 75, 76, 97, 91  # enum cudaDeviceAttr
_MAX_DYNAMIC_SHARED = 8  # enum CUfunction_attribute


@dataclass(frozen=True)
class CopyKernels:
    """The loaded kernels, or the reason why there are none.

    Attributes:
        load: host to device; None where there is none.
        store: device to host.
        coded: what loads and stores the cells of native/src/wire.h; None where there are none.
        unpack: what unpacks its images in GPU memory; None where `coded` is.
        read: CUfunction of the memory-bound kernel, 0 where there is none.
        launch_kernel: address of cuLaunchKernel.
        how: "compiled", "cached" or "host"; "" where there are none.
        reason: why there are none; "" where there are.
    """

    load: CopyKernel | None = None
    store: CopyKernel | None = None
    coded: tuple[CopyKernel, CopyKernel] | None = None
    unpack: CopyKernel | None = None
    read: int = 0
    launch_kernel: int = 0
    how: str = ""
    reason: str = ""


class _Unavailable(KvprobeError):
    """What stands in the way of the kernels; never leaves this module."""


def load_copy_kernels(runtime: Runtime, *, bulk: bool | None = None) -> CopyKernels:
    """Loads the kernels on the calling thread's device and launches each once: call it up front.

    Loading takes the context lock: it waits while any submitter is blocked. Without the cache NVRTC
    compiles them first, which takes about half a second.

    Args:
        runtime: the CUDA runtime of this process.
        bulk: True or False takes the bulk or the register kernels; None the bulk ones where the GPU has them.

    Returns:
        The kernels; where they cannot be had, `reason` says why in one line and nothing is raised.
    """
    try:
        return _load(runtime, bulk)
    except (KvprobeError, OSError) as error:
        return CopyKernels(reason=str(error))


def _load(runtime: Runtime, bulk: bool | None) -> CopyKernels:
    driver = _driver(runtime)
    device = runtime.device()
    runtime.set_device(device)  # makes the context current on this thread
    if not _attribute(runtime, _HOST_POINTERS, device):  # a kernel would fault on it, and the context with it
        raise _Unavailable("the GPU has other addresses for registered memory than the CPU (Windows, WSL)")
    if runtime.provider == "host":
        capability, module, how = 90, _module(driver, HOST_IMAGE), "host"
    else:
        capability = 10 * _attribute(runtime, _MAJOR, device) + _attribute(runtime, _MINOR, device)
        module, how = _compiled(driver, capability, SOURCES)
    shared = BULK_WARPS * (BULK_RING_BYTES + RING_HEADER_BYTES)
    able = capability >= 90 and (runtime.provider == "host" or _attribute(runtime, _SHARED_OPTIN, device) >= shared)
    if bulk and not able:
        raise _Unavailable(f"compute capability {capability / 10:.1f} has no bulk asynchronous copies")
    if able and bulk is not False:
        names, facts = ("kvp_copy_load", "kvp_copy_store"), (32 * BULK_WARPS, shared, MAX_CTAS, BULK)
    else:
        names, facts = ("kvp_copy_registers", "kvp_copy_registers"), (32 * REGISTER_WARPS, 0, MAX_CTAS, REGISTERS)
    load, store = (CopyKernel(_function(driver, module, name, facts[1]), *facts) for name in names)
    kernels = CopyKernels(
        load,
        store,
        *_coded(driver, module if how == "host" else 0, capability),
        _function(driver, module, "kvp_read", 0),
        ct.cast(driver.cuLaunchKernel, ct.c_void_p).value or 0,
        how,
    )
    _warm_up(runtime, kernels)
    return kernels


# -- the driver ------------------------------------------------------------------------------------------------------


def _driver(runtime: Runtime) -> ct.CDLL:
    """The library with the driver's functions."""
    if runtime.provider == "host":
        return runtime.library
    try:
        return ct.CDLL("libcuda.so.1")
    except OSError as error:
        raise _Unavailable(f"CUDA driver not found: {error}") from None


def _attribute(runtime: Runtime, attribute: int, device: int) -> int:
    value = ct.c_int()
    code = runtime.library.cudaDeviceGetAttribute(ct.byref(value), attribute, device)
    if code:
        raise runtime.error("cudaDeviceGetAttribute", code)
    return value.value


def _module(driver: ct.CDLL, image: bytes) -> int:
    module = ct.c_void_p()
    code = driver.cuModuleLoadData(ct.byref(module), image)
    if code:
        raise _Unavailable(f"the driver does not load the copy kernels: cuModuleLoadData returned {code}")
    return module.value or 0


def _function(driver: ct.CDLL, module: int, name: str, shared_bytes: int) -> int:
    function = ct.c_void_p()
    code = driver.cuModuleGetFunction(ct.byref(function), ct.c_void_p(module), name.encode())
    if not code and shared_bytes:
        code = driver.cuFuncSetAttribute(function, _MAX_DYNAMIC_SHARED, shared_bytes)
    if code:
        raise _Unavailable(f"the driver does not give the kernel {name}: it returned {code}")
    return function.value or 0


def _coded(
    driver: ct.CDLL, module: int, capability: int
) -> tuple[tuple[CopyKernel, CopyKernel] | None, CopyKernel | None]:
    """The kernels that load and store cells, and the one that unpacks images, of `module` or compiled here."""
    if capability < 90:
        return None, None
    try:
        module = module or _compiled(driver, capability, CODED_SOURCES)[0]
        load = _function(driver, module, "kvp_coded_load", CODED_LOAD_BYTES)
        store = _function(driver, module, "kvp_coded_store", CODED_STORE_BYTES)
        unpack = _function(driver, module, "kvp_coded_unpack", 0)
    except _Unavailable:  # copies as they are do without
        return None, None
    return (
        CopyKernel(load, CODED_LOAD_THREADS, CODED_LOAD_BYTES, MAX_CTAS, CODED),
        CopyKernel(store, CODED_STORE_THREADS, CODED_STORE_BYTES, MAX_CTAS, CODED),
    ), CopyKernel(unpack, UNPACK_THREADS, UNPACK_BYTES, UNPACK_CTAS, CODED)


def _warm_up(runtime: Runtime, kernels: CopyKernels) -> None:
    """Launches each kernel once: the first launch of a function loads it, under the context lock."""
    copier = Copier(CudaCalls(launch_kernel=kernels.launch_kernel), kernels.load, kernels.store)
    device, host = Buffer(runtime, 4096, "device"), Buffer(runtime, 4096, "pinned")
    lists = [PinnedList(runtime, 1), PinnedList(runtime, 1)]
    stream = runtime.stream_create()
    try:
        for pinned, direction, (dst, src) in zip(lists, ("h2d", "d2h"), ((device, host), (host, device)), strict=True):
            copies = columns([dst.address], src.address, 4096)
            submit_copies(runtime, copier, "kernel", direction, copies, stream, pinned=pinned)
        for coded in (*(kernels.coded or ()), kernels.unpack) if runtime.provider != "host" else ():
            if coded is not None:
                _launch_empty(runtime, kernels.launch_kernel, coded, stream)
        runtime.stream_synchronize(stream)
    finally:
        runtime.stream_destroy(stream)
        for pinned in lists:
            pinned.close()
        device.close()
        host.close()


def _launch_empty(runtime: Runtime, launch_kernel: int, kernel: CopyKernel, stream: int) -> None:
    """Launches a coded kernel on no cells, or no image."""
    work = ct.create_string_buffer(40)  # kvp_wire_work, or the shorter kvp_wire_unpacking
    given = (ct.c_void_p * 1)(ct.addressof(work))
    launch = ct.CFUNCTYPE(ct.c_int, ct.c_void_p, *[ct.c_uint] * 7, ct.c_void_p, ct.c_void_p, ct.c_void_p)(launch_kernel)
    code = launch(kernel.function, 1, 1, 1, kernel.threads, 1, 1, kernel.shared_bytes, stream, given, None)
    if code:
        raise runtime.error("cuLaunchKernel", code)


# -- NVRTC -----------------------------------------------------------------------------------------------------------


def _compiled(driver: ct.CDLL, capability: int, sources: tuple[Path, ...]) -> tuple[int, str]:
    """Module of this machine code and "cached" or "compiled"."""
    nvrtc = _nvrtc()
    major, minor = ct.c_int(), ct.c_int()
    nvrtc.nvrtcVersion(ct.byref(major), ct.byref(minor))
    source = b"".join(path.read_bytes() for path in sources)
    architecture = f"sm_{capability}"
    key = hashlib.sha256(repr((source, architecture, major.value, minor.value, OPTIONS)).encode()).hexdigest()[:32]
    folder = _cache_folder()
    cached = _read_cache(folder / f"{key}.cubin") if folder else None
    if cached:
        with suppress(_Unavailable):
            return _module(driver, cached), "cached"
    cubin = _compile(nvrtc, source, architecture)
    module = _module(driver, cubin)
    if folder:
        _write_cache(folder / f"{key}.cubin", cubin)
    return module, "compiled"


def _nvrtc() -> ct.CDLL:
    from cuda.pathfinder import load_nvidia_dynamic_lib

    try:
        path = load_nvidia_dynamic_lib("nvrtc").abs_path
        return ct.CDLL(str(path))
    except Exception as error:  # cuda-pathfinder raises several kinds; each means the same here
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise _Unavailable(f"NVRTC not found: {first[:160]}; install nvidia-cuda-nvrtc") from None


def _compile(nvrtc: ct.CDLL, source: bytes, architecture: str) -> bytes:
    nvrtc.nvrtcGetErrorString.restype = ct.c_char_p
    program = ct.c_void_p()
    code = nvrtc.nvrtcCreateProgram(ct.byref(program), source, b"copy.cu", 0, None, None)
    if code:
        raise _Unavailable(f"NVRTC: {nvrtc.nvrtcGetErrorString(code).decode()}")
    try:
        options = [f"--gpu-architecture={architecture}", *OPTIONS]
        code = nvrtc.nvrtcCompileProgram(
            program, len(options), (ct.c_char_p * len(options))(*(option.encode() for option in options))
        )
        if code:
            raise _Unavailable(f"NVRTC does not compile the copy kernels for {architecture}: {_log(nvrtc, program)}")
        size = ct.c_size_t()
        nvrtc.nvrtcGetCUBINSize(program, ct.byref(size))
        cubin = ct.create_string_buffer(size.value)
        code = nvrtc.nvrtcGetCUBIN(program, cubin) if size.value else 1
        if code:
            raise _Unavailable(f"NVRTC gives no machine code for {architecture}")
        return cubin.raw
    finally:
        nvrtc.nvrtcDestroyProgram(ct.byref(program))


def _log(nvrtc: ct.CDLL, program: ct.c_void_p) -> str:
    size = ct.c_size_t()
    nvrtc.nvrtcGetProgramLogSize(program, ct.byref(size))
    text = ct.create_string_buffer(max(size.value, 1))
    nvrtc.nvrtcGetProgramLog(program, text)
    lines = text.value.decode(errors="replace").strip().splitlines()
    return lines[0][:200] if lines else "no reason given"


# -- cache -----------------------------------------------------------------------------------------------------------


def _cache_folder() -> Path | None:
    """The private folder of machine code, or None where none can be had: somebody else's code must not be loaded."""
    folder = caches() / "kernels"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
            return None
        if stat.S_IMODE(found.st_mode) & 0o077:
            folder.chmod(0o700)
    except (OSError, RuntimeError):
        return None
    return folder


def _read_cache(path: Path) -> bytes | None:
    """The machine code, or None where the file is absent, not ours alone, or not whole."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return None
    with os.fdopen(handle, "rb") as file:
        found = os.fstat(file.fileno())
        if found.st_uid != os.geteuid() or found.st_mode & 0o022 or not stat.S_ISREG(found.st_mode):
            return None
        held = file.read(64 << 20)
    start = len(CACHE_MAGIC) + 32
    digest, cubin = held[len(CACHE_MAGIC) : start], held[start:]
    if not held.startswith(CACHE_MAGIC) or hashlib.sha256(cubin).digest() != digest:
        return None
    return cubin


def _write_cache(path: Path, cubin: bytes) -> None:
    with suppress(OSError):
        handle, name = tempfile.mkstemp(prefix=".cubin.", dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(CACHE_MAGIC + hashlib.sha256(cubin).digest() + cubin)
            Path(name).replace(path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
