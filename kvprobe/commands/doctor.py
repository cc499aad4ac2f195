"""`kvprobe doctor`: what this machine and this environment would do to offload, line by line, with what to do."""

from __future__ import annotations

import contextlib
import os
import platform
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from kvprobe.commands._device import device_option
from kvprobe.durations import time_text
from kvprobe.environment import VARIABLES, unknown
from kvprobe.errors import KvprobeError, plain
from kvprobe.output import DOCTOR

if TYPE_CHECKING:
    from kvprobe.cuda import Runtime
    from kvprobe.output.machine import CheckedJson

__all__ = ["command", "examine", "rate_check"]

GOOD, BAD, NOTE, UNKNOWN = "good", "bad", "note", "unknown"
COLOURS = {GOOD: "green", BAD: "red", NOTE: "cyan", UNKNOWN: "yellow"}
LIBRARIES = ("libkvprobe.so", "libkvprobe_interpose.so", "libkvprobe_hostrt.so")
PINNED = "pinned memory, tried"
SCALES = ("0.25x", "0.5x", "2x", "4x")  # other values of CUDA_SCALE_LAUNCH_QUEUES count as 1x


@dataclass(frozen=True)
class Check:
    """One thing that was looked at.

    Attributes:
        topic: what it belongs to.
        name: what it is.
        value: what was found, in words.
        verdict: "good", "bad", "note" (known, and neither of the two) or "unknown".
        todo: what to do; empty where there is nothing to do.
    """

    topic: str
    name: str
    value: str
    verdict: str
    todo: str = ""


@click.command(short_help="Check this machine and environment for what slows offload.")
@device_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(device: str, as_json: bool) -> None:
    """Check GPU, driver, link, memory limits, environment, launch queue, tools and installed servers.

    doctor measures the launch queue and the link in its own process and environment. So start doctor as you start the
    server: same variables, same container, same numactl. doctor pins memory for up to four seconds to see how much can
    be pinned. doctor pins at most three quarters of the free memory, and gives all of it back. --device cuda imports
    torch. The exit code is 1 if something is bad.
    """
    lines = list(examine(device))
    if as_json:
        checks = [cast("CheckedJson", asdict(line)) for line in lines]
        good, bad, note, unclear = (sum(line.verdict == verdict for line in lines) for verdict in COLOURS)
        DOCTOR.print({"checks": checks, "good": good, "bad": bad, "note": note, "unknown": unclear})
    else:
        _print(lines)
    if any(line.verdict == BAD for line in lines):
        raise click.exceptions.Exit(1)


def examine(device: str) -> Iterator[Check]:
    """All lines; what cannot be looked at is a line too."""
    gpus, reason = _devices()
    yield from _gpu(gpus, reason)
    yield from _torch(device)
    runtime, said = _runtime(device)
    yield said
    if runtime:
        yield from _guarded("launch queue", "calibration", lambda: _queue(runtime))
        yield from _guarded("link", "bandwidth", lambda: _bandwidth(runtime, gpus))
    yield from _environment()
    yield from _memory()
    yield from _guarded("memory", PINNED, lambda: _pinned(runtime))
    yield from _guarded("memory", "NUMA", lambda: _numa(gpus))
    yield from _guarded("tools", "tools", _tools)
    yield from _native()
    yield from _servers()


def _guarded(topic: str, name: str, look: Callable[[], Iterator[Check]]) -> Iterator[Check]:
    """A look that fails is a line, not the end."""
    try:
        yield from look()
    except (KvprobeError, OSError) as error:
        yield Check(
            topic,
            name,
            f"failed: {error}",
            BAD,
            "try again while the machine is less busy, or run `kvprobe --debug doctor`",
        )


# -- device ----------------------------------------------------------------------------------------------------------


def _devices() -> tuple[list[dict[str, Any]], str]:
    from kvprobe.probe.device import devices

    return devices()


def _gpu(gpus: list[dict[str, Any]], reason: str) -> Iterator[Check]:
    from kvprobe.cuda.runtime import gpu_present
    from kvprobe.probe.device import link_state

    if not gpus:
        if gpu_present():
            yield Check("device", "GPU", f"present, but {reason}", BAD, "repair the driver or its libraries")
        else:
            yield Check("device", "GPU", "none", NOTE, "kvprobe runs on its embedded host runtime: --device host")
        return
    yield Check("device", "driver", str(gpus[0].get("driver", "?")), GOOD)
    for gpu in gpus:
        link, name = link_state(gpu), f"GPU {gpu['device']}"
        total = gpu.get("memory_total_bytes", 0) / 1e9
        yield Check("device", name, f"{gpu.get('name', '?')}, {total:.0f} GB, {gpu.get('pci', '')}", GOOD)
        if link.max_gen and link.max_width:
            verdict = BAD if link.degraded else GOOD
            text = f"Gen{link.gen} x{link.width} of Gen{link.max_gen} x{link.max_width}"
            yield Check("link", f"{name} PCIe", text, verdict, link.note)
        if gpu.get("throttle"):
            yield Check(
                "device",
                f"{name} clocks",
                f"throttled by {', '.join(gpu['throttle'])}",
                BAD,
                "check power and cooling: nvidia-smi -q -d PERFORMANCE",
            )


def _torch(device: str) -> Iterator[Check]:
    try:
        found = metadata.distribution("torch")
    except metadata.PackageNotFoundError:
        yield Check(
            "device",
            "torch",
            "not installed here",
            NOTE,
            "run `python -m kvprobe doctor` in the server's own environment",
        )
        return
    built = ""
    with contextlib.suppress(OSError):  # read, not imported: that takes seconds and starts CUDA
        for text in Path(str(found.locate_file("torch/version.py"))).read_text(errors="replace").splitlines():
            if text.startswith("cuda"):
                built = text.rsplit("=", 1)[1].strip().strip("'\"")
    if built in ("", "None"):
        yield Check("device", "torch", f"{found.version}, built without CUDA", NOTE, "a GPU needs a CUDA build")
    else:
        yield Check("device", "torch", f"{found.version}, built for CUDA {built}", GOOD)
    if device == "cuda":
        try:
            import torch
        except Exception as error:  # whatever a broken one raises
            said = str(error) or type(error).__name__
            yield Check("device", "torch.cuda", f"torch cannot be imported: {said}", BAD, "install torch again")
            return
        if torch.cuda.is_available():
            yield Check("device", "torch.cuda", f"sees {torch.cuda.device_count()} device(s)", GOOD)
        else:
            yield Check("device", "torch.cuda", "sees no device", BAD, "driver too old for this build, or a CPU build")


def _runtime(device: str) -> tuple[Runtime | None, Check]:
    from kvprobe.cuda import find_runtime

    try:
        runtime = find_runtime(device)
        driver = runtime.driver_version()
    except KvprobeError as error:
        return None, Check("device", "CUDA runtime", str(error), BAD, "nothing can be measured without a runtime")
    version = f"{runtime.version // 1000}.{runtime.version % 1000 // 10}"
    if runtime.provider == "host":
        return runtime, Check(
            "device",
            "CUDA runtime",
            f"the embedded host runtime ({version})",
            NOTE,
            "the following is measured on the host runtime, not on a GPU",
        )
    value = f"{version} at {runtime.path}; the driver takes up to {driver // 1000}.{driver % 1000 // 10}"
    newer = runtime.version // 1000 > driver // 1000
    return runtime, Check(
        "device",
        "CUDA runtime",
        value,
        BAD if newer else GOOD,
        "the driver is older than this runtime: update it" if newer else "",
    )


def _queue(runtime: Runtime) -> Iterator[Check]:
    from kvprobe.launchqueue import calibrate
    from kvprobe.launchqueue.constants import COPY_DEPTHS

    limits = calibrate(runtime, cache=False)
    yield Check(
        "launch queue",
        "depth",
        f"{limits.depth:,} operations on a stream, then the caller waits",
        GOOD if limits.depth >= COPY_DEPTHS[0] else BAD,
        "" if limits.depth >= COPY_DEPTHS[0] else "CUDA_SCALE_LAUNCH_QUEUES makes the queue small: unset it",
    )
    todo = (
        ""
        if limits.channels >= 8
        else "for programs with several streams, set CUDA_DEVICE_MAX_CONNECTIONS=32 before CUDA starts: fewer streams "
        "share a channel"
    )
    yield Check(
        "launch queue",
        "channels",
        f"{limits.channels}, shared by all streams, measured: {limits.capacity:,} submissions to many streams fitted, "
        f"about {limits.channels} queues of {limits.depth:,}",
        BAD if limits.channels < 4 else NOTE if todo else GOOD,
        todo,
    )
    value = f"{time_text(limits.baseline_ns)} while the queue has free slots, p99 {time_text(limits.p99_ns)}"
    quick = limits.baseline_ns < 5_000
    yield Check(
        "launch queue",
        "submission",
        value,
        GOOD if quick else BAD,
        "" if quick else "check for an attached profiler, a busy CPU, or a virtual machine",
    )


def _bandwidth(runtime: Runtime, gpus: list[dict[str, Any]]) -> Iterator[Check]:
    from kvprobe.cuda.copies import copy_rate
    from kvprobe.cuda.memory import Buffer

    # CUDA counts the devices that it was given, NVML all of them: the pair is known where there is but one
    lanes = gpus[0] if runtime.provider == "cuda" and len(gpus) == 1 else {}
    size = 256 << 20 if runtime.provider == "cuda" else 16 << 20
    device, host = Buffer(runtime, size, "device"), Buffer(runtime, size, "pinned")
    try:
        for kind, (dst, src) in {"h2d": (device, host), "d2h": (host, device)}.items():
            yield rate_check(kind, copy_rate(runtime, dst.address, src.address, size, kind), size, lanes)
    finally:
        device.close()
        host.close()


def rate_check(kind: str, bytes_per_s: float, size: int, gpu: dict[str, Any]) -> Check:
    """What copies of `size` bytes reached, "h2d" or "d2h", beside what the link of this GPU carries."""
    from kvprobe.recordings.link_rate import FULL_LINK, pcie_link

    value = f"{bytes_per_s / 1e9:.1f} GB/s for {size >> 20} MiB, pinned"
    generation, lanes = int(gpu.get("pcie_gen_max", 0)), int(gpu.get("pcie_width_max", 0))
    if not (generation and lanes):
        unknown_link = "the link's speed is not known, so there is nothing to compare with"
        return Check("link", kind.upper(), value, UNKNOWN, unknown_link)
    link = pcie_link(generation, lanes)
    enough = bytes_per_s >= FULL_LINK * link.bytes_per_s
    todo = "" if enough else "check NUMA placement below, PCIe lanes above, and other users of the switch"
    return Check("link", kind.upper(), f"{value}; {link.text}", GOOD if enough else BAD, todo)


# -- environment and memory --------------------------------------------------------------------------------------------


def _environment() -> Iterator[Check]:
    for name in ("CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_DEVICE_MAX_COPY_CONNECTIONS"):
        value = os.environ.get(name)
        if value is None:
            yield Check("environment", name, "not set", NOTE, "the channels above are the default; 32 at most")
        elif not (value.isascii() and value.isdigit() and 1 <= int(value) <= 32):
            yield Check("environment", name, value, BAD, "not a number from 1 to 32: the driver ignores it")
        else:
            few = int(value) < 4
            todo = "with so few channels streams wait for each other; raise it unless something needs it" if few else ""
            yield Check("environment", name, value, BAD if few else GOOD, todo)
    yield _scale(os.environ.get("CUDA_SCALE_LAUNCH_QUEUES"))
    loading = os.environ.get("CUDA_MODULE_LOADING")
    if loading == "EAGER":
        yield Check("environment", "CUDA_MODULE_LOADING", loading, GOOD)
    else:
        yield Check(
            "environment",
            "CUDA_MODULE_LOADING",
            loading or "not set (lazy)",
            GOOD,
            "first launches load code and hold the context lock; EAGER loads it at the start",
        )
    preload = os.environ.get("LD_PRELOAD", "")
    ours = [part for part in preload.replace(":", " ").split() if "libkvprobe" in part]
    rest = [part for part in preload.replace(":", " ").split() if part not in ours]
    missing = [part for part in rest if "/" in part and not Path(part).exists()]
    if missing:
        yield Check("environment", "LD_PRELOAD", preload, BAD, f"{missing[0]} does not exist")
    elif ours:
        yield Check("environment", "LD_PRELOAD", preload, GOOD, "this process is being recorded")
    else:
        yield Check("environment", "LD_PRELOAD", preload or "not set", GOOD)
    for name in ("CUDA_INJECTION64_PATH", "NVTX_INJECTION64_PATH"):
        if os.environ.get(name):
            yield Check("environment", name, os.environ[name], GOOD, "set by a profiler, whose cost is in every figure")
    for variable in VARIABLES:
        text, problem = variable.text, variable.problem()
        value = f"{_shown(variable.default)} (default)" if text is None else f"{text} (environment)"
        yield Check("environment", variable.name, value, BAD if problem else GOOD, problem)
    for name in unknown():
        yield Check("environment", name, os.environ[name], BAD, "kvprobe has no such variable: a typing error?")


def _shown(value: Any) -> str:
    if value is None or value == "":
        return "not set"
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)


def _scale(value: str | None) -> Check:
    name = "CUDA_SCALE_LAUNCH_QUEUES"
    if value is None:
        return Check("environment", name, "not set (1x)", GOOD)
    if value not in SCALES:
        return Check("environment", name, value, BAD, f"counts as 1x: it must be one of {', '.join(SCALES)}")
    if value in ("2x", "4x"):
        jetson = platform.machine() == "aarch64" and Path("/etc/nv_tegra_release").exists()
        return Check(
            "environment",
            name,
            value,
            BAD if jetson else GOOD,
            "unset it: anything over 1x hung on Jetson Orin (llama.cpp issues 19219, 19230)"
            if jetson
            else "never on a Jetson: anything over 1x hung there (llama.cpp issues 19219, 19230)",
        )
    return Check("environment", name, value, BAD, "the queue is smaller than it could be: unset it")


def _memory() -> Iterator[Check]:
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if locked == resource.RLIM_INFINITY:
        yield Check("memory", "locked memory (ulimit -l)", "unlimited", GOOD)
    else:
        yield Check(
            "memory",
            "locked memory (ulimit -l)",
            f"{locked / (1 << 20):,.0f} MiB",
            NOTE,
            "cudaHostAlloc is not limited by it, RDMA and mlock are: ulimit -l unlimited",
        )
    limit, where = _cgroup_limit()
    available = _meminfo("MemAvailable")
    room = f"{available / 1e9:.1f} GB of host memory available" if available else "unknown"
    if limit is None:
        yield Check("memory", "cgroup limit", f"none; {room}", GOOD)
    else:
        yield Check(
            "memory",
            "cgroup limit",
            f"{limit / 1e9:.1f} GB ({where}); {room}",
            NOTE,
            "pinned pools count against it: keep the CPU cache well below it",
        )


def _pinned(runtime: Runtime | None) -> Iterator[Check]:
    from kvprobe.cuda.pinning_trial import try_locking, try_pinning

    gpu = runtime is not None and runtime.provider == "cuda"
    found = try_pinning(runtime) if runtime and gpu else try_locking()
    size = f"{found.bytes / 1e9:.1f} GB" if found.bytes >= 1e9 else f"{found.bytes / (1 << 20):,.1f} MiB"
    how = "pinned" if gpu else "locked by mlock"
    if found.refusal:
        todo = "this is all that pinned pools and caches together can have" if gpu else "ulimit -l unlimited"
        yield Check("memory", PINNED, f"{size} {how} at once, more was refused: {found.refusal}", NOTE, todo)
        return
    bound = {
        "memory": "more was not tried: a quarter of what is free stays free",
        "time": "more was not tried: the time was over",
        "most": "more was not tried",
    }[found.bound]
    todo = "" if gpu else "without a GPU, it is not known how much the driver would allow"
    yield Check("memory", PINNED, f"at least {size} {how} at once; {bound}", GOOD if gpu else UNKNOWN, todo)


def _cgroup_limit() -> tuple[int | None, str]:
    """The tightest memory limit above this process, and the file that says so."""
    found: tuple[int | None, str] = None, ""
    with contextlib.suppress(OSError):
        for text in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = text.split(":", 2)
            root, name = (
                ("/sys/fs/cgroup", "memory.max")
                if not controllers
                else ("/sys/fs/cgroup/memory", "memory.limit_in_bytes")
            )
            if controllers and "memory" not in controllers.split(","):
                continue
            folder = Path(root) / path.lstrip("/")
            for each in (folder, *folder.parents):
                if not each.is_relative_to(root):
                    break
                with contextlib.suppress(OSError, ValueError):
                    limit = int((each / name).read_text())
                    if limit < 1 << 60 and (found[0] is None or limit < found[0]):
                        found = limit, str(each / name)
    return found


def _meminfo(name: str) -> int:
    with contextlib.suppress(OSError, StopIteration, ValueError):
        text = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith(name + ":"))
        return int(text.split()[1]) * 1024
    return 0


def _numa(gpus: list[dict[str, Any]]) -> Iterator[Check]:
    nodes = sorted(int(path.name[4:]) for path in Path("/sys/devices/system/node").glob("node[0-9]*"))
    mine = os.sched_getaffinity(0)
    if len(nodes) < 2:
        yield Check("memory", "NUMA", f"{len(nodes) or 1} node, {len(mine)} CPUs for this process", GOOD)
        return
    for gpu in gpus:
        pci = str(gpu.get("pci", "")).lower()[-12:]
        node = int(Path(f"/sys/bus/pci/devices/{pci}/numa_node").read_text())
        if node < 0:
            yield Check("memory", f"GPU {gpu['device']} NUMA", "not known", UNKNOWN, "ask nvidia-smi topo -m")
            continue
        near = _cpus(Path(f"/sys/devices/system/node/node{node}/cpulist").read_text())
        share = len(mine & near) / len(mine)
        yield Check(
            "memory",
            f"GPU {gpu['device']} NUMA",
            f"node {node}; {share:.0%} of this process's CPUs are there",
            GOOD if share > 0.99 else BAD,
            "" if share > 0.99 else f"numactl --cpunodebind={node} --membind={node} COMMAND",
        )
    if not gpus:
        yield Check(
            "memory",
            "NUMA",
            f"{len(nodes)} nodes, {len(mine)} CPUs for this process",
            UNKNOWN,
            "bind the server and its pinned memory to the GPU's node",
        )


def _cpus(text: str) -> set[int]:
    """CPU numbers of a list such as 0-3,8."""
    found: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            found.update(range(int(first), int(last or first) + 1))
    return found


# -- tools -------------------------------------------------------------------------------------------------------------


def _tools() -> Iterator[Check]:
    from kvprobe.recordings.nsys_rep import find_importer, find_nsys

    nsys, importer = find_nsys(), find_importer()
    if nsys is None:
        yield Check("tools", "nsys", "not found", NOTE, "install Nsight Systems for `kvprobe run --nsys`")
    else:
        compute = "nsight-compute" in str(nsys)
        lacks = _missing_libraries(importer) if importer else []
        if lacks:
            package = "libdw1 (Debian, Ubuntu) or elfutils-libs" if "libdw.so.1" in lacks else "the package that has it"
            yield Check(
                "tools",
                "nsys",
                f"{nsys}: it can record, but its QdstrmImporter lacks {', '.join(lacks)}",
                BAD,
                f"install {package}; then .qdstrm files become .nsys-rep",
            )
        elif importer is None and compute:
            yield Check(
                "tools",
                "nsys",
                f"{nsys} (Nsight Compute's): no QdstrmImporter beside it",
                BAD,
                "it can record, but not make a report: install Nsight Systems",
            )
        else:
            yield Check("tools", "nsys", f"{nsys} (of Nsight Compute)" if compute else str(nsys), GOOD)
    yield _py_spy()


def _missing_libraries(program: Path) -> list[str]:
    """Shared libraries that the loader does not find for a program; its wrapper sets the folder beside it."""
    beside = f"{program.parent}:{os.environ.get('LD_LIBRARY_PATH', '')}"
    try:
        done = subprocess.run(
            ["ldd", str(program)],
            capture_output=True,
            text=True,
            check=False,
            timeout=20,
            env={**os.environ, "LD_LIBRARY_PATH": beside},
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [line.split()[0] for line in done.stdout.splitlines() if "not found" in line]


def _py_spy() -> Check:
    from kvprobe.probe.stacks import py_spy, usable

    if py_spy() is None:
        return Check("tools", "py-spy", "not installed", BAD, "pip install py-spy: it shows which Python line waits")
    scope = "not readable"
    with contextlib.suppress(OSError):
        scope = Path("/proc/sys/kernel/yama/ptrace_scope").read_text().strip()
    capable = _has_capability(19)  # CAP_SYS_PTRACE
    state = f"ptrace_scope {scope}, CAP_SYS_PTRACE {'yes' if capable else 'no'}"
    target = subprocess.Popen(
        [sys.executable, "-c", "print(flush=True); input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    try:
        assert target.stdout
        target.stdout.readline()  # it is past its start
        reason = usable(target.pid)
    finally:
        target.kill()
        target.communicate()
    if not reason:
        return Check("tools", "py-spy", f"can read other processes ({state})", GOOD)
    return Check(
        "tools",
        "py-spy",
        f"{reason} ({state})",
        BAD,
        "sysctl kernel.yama.ptrace_scope=0, or docker run --cap-add SYS_PTRACE; until then each process takes its "
        "own stacks",
    )


def _has_capability(number: int) -> bool:
    with contextlib.suppress(OSError, StopIteration, ValueError):
        text = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("CapEff:"))
        return bool(int(text.split()[1], 16) >> number & 1)
    return False


def _native() -> Iterator[Check]:
    from kvprobe.native.library import LIB, core

    missing = [name for name in LIBRARIES if not (LIB / name).exists()]
    try:
        clock = core().kvp_clock_name().decode()
    except KvprobeError as error:
        yield Check(
            "kvprobe", "native libraries", str(error), BAD, "install a C compiler, then python -m kvprobe.native.build"
        )
        return
    yield Check(
        "kvprobe",
        "native libraries",
        f"{', '.join(missing)} missing" if missing else "built",
        BAD if missing else GOOD,
        "python -m kvprobe.native.build" if missing else "",
    )
    yield Check(
        "kvprobe",
        "clock",
        clock,
        NOTE if clock == "clock_gettime" else GOOD,
        "the CPU's counter is not invariant here: reading the clock takes 23 ns instead of 10"
        if clock == "clock_gettime"
        else "",
    )


def _servers() -> Iterator[Check]:
    from kvprobe.instrument import registry
    from kvprobe.instrument.adapter import installed_version

    servers = {name: one for name, one in registry.SERVERS.items() if name not in registry.LIBRARIES}
    found = [installed_version(one.distributions) for one in servers.values()]
    for name, version in filter(None, found):
        yield Check("servers", name, version, GOOD, "`kvprobe patches` says which adapters apply")
    if not any(found):
        yield Check(
            "servers",
            "servers",
            "none of " + ", ".join(servers),
            NOTE,
            "run doctor in the server's own environment to see its version",
        )


def _print(lines: list[Check]) -> None:
    """Topic by topic: a verdict, what it is of, and below it what to do; a variable that nobody set is only counted."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console, topic = Console(), ""
    unset = {variable.name for variable in VARIABLES if variable.text is None}
    shown = [line for line in lines if line.name not in unset]
    for line in shown:
        if line.topic != topic:
            topic = line.topic
            console.print(Text(topic, "bold"))
        row = Table.grid()
        row.add_column(width=11)
        row.add_column(overflow="fold")
        row.add_row(Text(f"  {line.verdict}", COLOURS[line.verdict]), Text(plain(f"{line.name}: {line.value}")))
        if line.todo:
            row.add_row("", Text(plain(line.todo), "italic"))
        console.print(row)
    counts = ", ".join(f"{sum(line.verdict == word for line in shown)} {word}" for word in COLOURS)
    console.print(f"{counts}; {len(unset)} variables of kvprobe are not set (--json lists them)", highlight=False)
    bad = plain(", ".join(f"{line.name} ({line.topic})" for line in shown if line.verdict == BAD))
    console.print(f"Bad: {bad}." if bad else "Nothing is bad.", highlight=False, markup=False, style="bold")
