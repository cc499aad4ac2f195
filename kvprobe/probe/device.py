"""Samples what the device itself counts (NVML): link, memory, clocks, utilisation, power, beside a server.

The thread that samples belongs to the observer, never to the server: a counter is read through the driver, and some
(the PCIe throughput) take 20 ms and more. `device.jsonl` holds one line a device and sample::

    {"t_ns": 81234567890, "device": 0, "pcie_gen": 5, "pcie_rx_bytes_per_s": 512000000, ..., "throttle": ["power cap"]}

`t_ns` is CLOCK_MONOTONIC, every number is a metric (`METRICS` has their units in the name), anything else is for
people. A file without a number says why: ``{"t_ns": ..., "why_not": "..."}``.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["METRICS", "DeviceSample", "LinkState", "Sampler", "devices", "link_state", "read_samples"]

METRICS = (
    "pcie_gen",
    "pcie_gen_max",
    "pcie_width",
    "pcie_width_max",
    "pcie_rx_bytes_per_s",
    "pcie_tx_bytes_per_s",
    "memory_used_bytes",
    "memory_total_bytes",
    "sm_clock_mhz",
    "memory_clock_mhz",
    "gpu_busy_percent",
    "memory_busy_percent",
    "power_w",
    "temperature_c",
    "throttle_reasons",
)
THROTTLE = {  # NVML's bits of the clocks' event reasons; idle and a clock that somebody set are no throttling
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "thermal (software)",
    0x40: "thermal (hardware)",
    0x80: "power brake",
}
IDLE_NOTE = "the generation drops while a GPU is idle: judge it by samples taken under load"

Line = dict[str, Any]


@dataclass(frozen=True)
class DeviceSample:
    """One value, as the model's table `samples` has it.

    Attributes:
        time_ns: CLOCK_MONOTONIC.
        device: NVML's index.
        metric: one of METRICS, or another name that a newer version wrote.
        value: the number.
    """

    time_ns: int
    device: int
    metric: str
    value: float


@dataclass(frozen=True)
class LinkState:
    """A device's PCIe link now and at its best; 0 where NVML does not tell.

    Attributes:
        device: NVML's index.
        gen: generation now.
        max_gen: the highest that this GPU reaches in this slot.
        width: lanes now.
        max_width: likewise at most.
        busy: whether something ran on the GPU or its link in the moment of the sample.
        degraded: fewer lanes than there could be, or a lower generation while busy.
        note: what to know about it, empty if nothing.
    """

    device: int
    gen: int
    max_gen: int
    width: int
    max_width: int
    busy: bool
    degraded: bool
    note: str = ""


def confidential_computing() -> bool | None:
    """Whether this machine's GPUs run in Confidential Computing mode; None where no driver tells."""
    if not Path("/dev/nvidiactl").exists():
        return None
    try:
        import pynvml

        pynvml.nvmlInit()
        try:
            return bool(pynvml.nvmlSystemGetConfComputeState().ccFeature)
        except pynvml.NVMLError as error:  # a driver or a GPU that has no such mode
            return False if error.value == pynvml.NVML_ERROR_NOT_SUPPORTED else None
        finally:
            pynvml.nvmlShutdown()
    except Exception:  # no library, no permission: not known
        return None


class _Nvml:
    """NVML, opened once; every figure that a device refuses is left out."""

    def __init__(self) -> None:
        import pynvml

        self._nvml = pynvml
        pynvml.nvmlInit()
        self.handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]

    def _ask(self, name: str, *arguments: Any) -> Any:
        try:
            return getattr(self._nvml, name)(*arguments)
        except (self._nvml.NVMLError, AttributeError):  # not on this device, or not in this driver
            return None

    def line(self, index: int) -> Line:
        """All figures of one device."""
        nvml, handle = self._nvml, self.handles[index]
        memory, busy = self._ask("nvmlDeviceGetMemoryInfo", handle), self._ask("nvmlDeviceGetUtilizationRates", handle)
        power = self._ask("nvmlDeviceGetPowerUsage", handle)
        reasons = self._ask("nvmlDeviceGetCurrentClocksEventReasons", handle)
        if reasons is None:  # the name before driver 535
            reasons = self._ask("nvmlDeviceGetCurrentClocksThrottleReasons", handle)
        figures = {
            "pcie_gen": self._ask("nvmlDeviceGetCurrPcieLinkGeneration", handle),
            "pcie_gen_max": self._ask("nvmlDeviceGetMaxPcieLinkGeneration", handle),
            "pcie_width": self._ask("nvmlDeviceGetCurrPcieLinkWidth", handle),
            "pcie_width_max": self._ask("nvmlDeviceGetMaxPcieLinkWidth", handle),
            "pcie_rx_bytes_per_s": self._throughput(handle, nvml.NVML_PCIE_UTIL_RX_BYTES),
            "pcie_tx_bytes_per_s": self._throughput(handle, nvml.NVML_PCIE_UTIL_TX_BYTES),
            "memory_used_bytes": memory and memory.used,
            "memory_total_bytes": memory and memory.total,
            "sm_clock_mhz": self._ask("nvmlDeviceGetClockInfo", handle, nvml.NVML_CLOCK_SM),
            "memory_clock_mhz": self._ask("nvmlDeviceGetClockInfo", handle, nvml.NVML_CLOCK_MEM),
            "gpu_busy_percent": busy and busy.gpu,
            "memory_busy_percent": busy and busy.memory,
            "power_w": None if power is None else power / 1000,
            "temperature_c": self._ask("nvmlDeviceGetTemperature", handle, nvml.NVML_TEMPERATURE_GPU),
            "throttle_reasons": reasons,
        }
        line: Line = {"t_ns": time.monotonic_ns(), "device": index}
        line.update((name, value) for name, value in figures.items() if value is not None)
        named = [text for bit, text in THROTTLE.items() if (reasons or 0) & bit]
        if named:
            line["throttle"] = named
        return line

    def _throughput(self, handle: Any, counter: int) -> int | None:
        kib = self._ask("nvmlDeviceGetPcieThroughput", handle, counter)  # KiB/s over the last 20 ms
        return None if kib is None else kib * 1024

    def describe(self, index: int) -> dict[str, str]:
        """Name, PCI address and driver of one device."""
        handle = self.handles[index]
        pci = self._ask("nvmlDeviceGetPciInfo", handle)
        found = {
            "name": self._ask("nvmlDeviceGetName", handle),
            "pci": pci and pci.busId,
            "driver": self._ask("nvmlSystemGetDriverVersion"),
        }
        return {name: value.decode() if isinstance(value, bytes) else value for name, value in found.items() if value}

    def close(self) -> None:
        with contextlib.suppress(self._nvml.NVMLError):
            self._nvml.nvmlShutdown()


def _open() -> tuple[_Nvml | None, str]:
    """NVML, or why there is none."""
    try:
        nvml = _Nvml()
    except ImportError:
        return None, "the module pynvml is missing: pip install nvidia-ml-py"
    except Exception as error:  # NVMLError, and whatever else a broken driver makes pynvml raise
        return None, f"NVML cannot be used: {error}; without the NVIDIA driver there are no device counters"
    if not nvml.handles:
        nvml.close()
        return None, "NVML sees no device: check CUDA_VISIBLE_DEVICES of the container, or its --gpus option"
    return nvml, ""


class Sampler:
    """Takes samples of all devices in a thread of its own until it is stopped; without NVML it does nothing.

    Attributes:
        reason: why there are no samples; empty when there are.
        taken: samples written so far (one a device and moment).
    """

    def __init__(self, sink: Callable[[Line], None], interval_s: float = 0.5) -> None:
        """`sink` takes each line; an OSError of it ends the sampling."""
        self.reason = ""
        self.taken = 0
        self._interval_s = interval_s
        self._sink = sink
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> Sampler:
        """Begins; the first sample is taken at once."""
        self._thread = threading.Thread(target=self._run, name="kvprobe-nvml", daemon=True)
        self._thread.start()
        return self

    def stop(self) -> None:
        """Ends the thread; the sample under way is written."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def __enter__(self) -> Sampler:
        return self.start()

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def _run(self) -> None:
        nvml, self.reason = _open()
        if nvml is None:
            self._put([{"t_ns": time.monotonic_ns(), "why_not": self.reason}])
            return
        try:
            while True:
                began = time.monotonic()
                if not self._put([nvml.line(index) for index in range(len(nvml.handles))]):
                    return
                self.taken += len(nvml.handles)
                if self._stop.wait(max(self._interval_s - (time.monotonic() - began), 0.01)):
                    return
        finally:
            nvml.close()

    def _put(self, lines: list[Line]) -> bool:
        try:
            for line in lines:
                self._sink(line)
        except OSError as error:  # a full disk ends the sampling, not the observer
            self.reason = f"{error.filename or 'device.jsonl'}: {error.strerror}"
            return False
        return True


def read_samples(path: str | os.PathLike[str]) -> Iterator[DeviceSample]:
    """The samples of a `device.jsonl`, in the order written; a last line that was cut off is left out.

    Raises:
        OSError: the file cannot be read.
    """
    with Path(path).open(errors="replace") as file:
        for text in file:
            try:
                line = json.loads(text)
            except ValueError:
                continue
            if not isinstance(line, dict) or not isinstance(line.get("device"), int):
                continue
            for metric, value in line.items():
                if metric not in ("t_ns", "device") and isinstance(value, (int, float)) and not isinstance(value, bool):
                    yield DeviceSample(int(line.get("t_ns", 0)), line["device"], metric, float(value))


def link_state(line: Line) -> LinkState:
    """Judges the link of one sample: a line of `devices()` or of `device.jsonl`."""
    gen, max_gen = int(line.get("pcie_gen", 0)), int(line.get("pcie_gen_max", 0))
    width, max_width = int(line.get("pcie_width", 0)), int(line.get("pcie_width_max", 0))
    moved = line.get("pcie_rx_bytes_per_s", 0) + line.get("pcie_tx_bytes_per_s", 0)
    busy = bool(line.get("gpu_busy_percent", 0) > 0 or moved > 100e6)
    narrow, slow = 0 < width < max_width, 0 < gen < max_gen
    notes = []
    if narrow:
        notes.append(f"{width} of {max_width} lanes: reseat the card, or check the slot and its bifurcation")
    if slow:
        notes.append(f"generation {gen} of {max_gen}" + (" under load" if busy else f"; {IDLE_NOTE}"))
    return LinkState(
        int(line.get("device", 0)), gen, max_gen, width, max_width, busy, narrow or (slow and busy), "; ".join(notes)
    )


def devices() -> tuple[list[Line], str]:
    """One sample of every device with its `name`, `pci` and `driver`; and why there is none."""
    nvml, reason = _open()
    if nvml is None:
        return [], reason
    try:
        return [{**nvml.line(index), **nvml.describe(index)} for index in range(len(nvml.handles))], ""
    finally:
        nvml.close()
