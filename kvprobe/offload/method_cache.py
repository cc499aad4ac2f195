"""What `kvprobe calibrate` measured, kept for later processes by GPU, driver, CUDA and link."""

from __future__ import annotations

import contextlib
import ctypes as ct
import hashlib
import json
from pathlib import Path
from typing import Any

from kvprobe.cuda import Runtime
from kvprobe.cuda.copies import METHOD_NAMES
from kvprobe.environment import caches
from kvprobe.errors import KvprobeError
from kvprobe.native.library import CHOOSE_SIZES, Copier, MethodTable, core
from kvprobe.runfolder import files

__all__ = ["FORMAT", "cached", "identity", "keep", "store", "table_of"]

FORMAT = "kvprobe-calibration 5"


def identity(runtime: Runtime) -> dict[str, Any]:
    """What decides the figures: GPU, driver, CUDA and link."""
    found = {
        "provider": runtime.provider,
        "cuda": runtime.version,
        "driver": str(runtime.driver_version()),
        "gpu": "host runtime" if runtime.provider == "host" else "",
        "pcie": "",
    }
    if runtime.provider == "host":
        return found
    with contextlib.suppress(Exception):  # without NVML the figures are kept under less
        import pynvml

        pynvml.nvmlInit()
        bus = ct.create_string_buffer(32)
        runtime.library.cudaDeviceGetPCIBusId(bus, 32, runtime.device())
        handle = pynvml.nvmlDeviceGetHandleByPciBusId(bus.value)
        name, driver = pynvml.nvmlDeviceGetName(handle), pynvml.nvmlSystemGetDriverVersion()
        found["gpu"] = name if isinstance(name, str) else name.decode()
        found["driver"] = driver if isinstance(driver, str) else driver.decode()
        found["pcie"] = (
            f"{pynvml.nvmlDeviceGetMaxPcieLinkGeneration(handle)} x{pynvml.nvmlDeviceGetMaxPcieLinkWidth(handle)}"
        )
    return found


def table_of(result: dict[str, Any]) -> MethodTable:
    """The chooser's table of a measurement.

    Raises:
        KvprobeError: it is none.
    """
    table = MethodTable()
    core().kvp_method_table_default(ct.byref(table), ct.byref(Copier()))  # its figures; the rows are the measured ones
    table.measured, table.rows[:] = 1, (0, 0)
    try:
        if result["format"] != FORMAT:
            raise ValueError(result["format"])
        table.paced_store = int(result["paced_store_bytes_per_s"])
        for row in result["rows"]:
            side = ("h2d", "d2h").index(row["direction"])
            into = table.row[side][table.rows[side]]
            into.method, into.ctas = METHOD_NAMES.index(row["method"]), row["ctas"]
            into.slowdown, into.product = row["slowdown"], row["product"]
            for name in ("fixed_ns", "copy_ns", "submit_ns"):
                if len(row[name]) != CHOOSE_SIZES:
                    raise ValueError(name)
                getattr(into, name)[:] = row[name]
            table.rows[side] += 1
    except (KeyError, IndexError, ValueError, TypeError) as error:
        raise KvprobeError(f"not a calibration of this version of kvprobe ({error}): run kvprobe calibrate") from None
    return table


def _path(runtime: Runtime) -> Path:
    key = hashlib.sha256(json.dumps([FORMAT, identity(runtime)]).encode()).hexdigest()[:16]
    return caches() / f"methods-{key}.json"


def keep(path: Path, result: dict[str, Any]) -> str:
    """Writes a measurement into the folder of caches, made where it is missing; returns why it cannot, or ""."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write(path, json.dumps(result).encode())
    except OSError as error:
        return f"{path.parent}: {error.strerror}"
    return ""


def store(runtime: Runtime, result: dict[str, Any]) -> str:
    """Keeps a measurement for later processes on this GPU, driver, CUDA and link; returns why it cannot, or ""."""
    return keep(_path(runtime), result)


def cached(runtime: Runtime) -> dict[str, Any] | None:
    """What `store` kept for this machine; None where there is nothing that can be used."""
    try:
        held: dict[str, Any] = json.loads(_path(runtime).read_text())
        table_of(held)
    except (OSError, ValueError, KvprobeError, RuntimeError):
        return None
    return held
