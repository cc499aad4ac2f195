"""Names of the errors that CUDA calls return."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvprobe.probe.ring import RingSnapshot

__all__ = ["ERRORS", "error_name", "first_error"]

# Return codes of the runtime and the driver, which have the same numbers for what a watched call returns.
ERRORS = {
    1: "cudaErrorInvalidValue",
    2: "cudaErrorMemoryAllocation",
    3: "cudaErrorInitializationError",
    11: "cudaErrorInvalidValue",
    17: "cudaErrorInvalidDevicePointer",
    21: "cudaErrorInvalidMemcpyDirection",
    35: "cudaErrorInsufficientDriver",
    46: "cudaErrorDevicesUnavailable",
    98: "cudaErrorInvalidDeviceFunction",
    100: "cudaErrorNoDevice",
    101: "cudaErrorInvalidDevice",
    201: "cudaErrorDeviceUninitialized",
    209: "cudaErrorNoKernelImageForDevice",
    214: "cudaErrorECCUncorrectable",
    220: "cudaErrorNvlinkUncorrectable",
    302: "cudaErrorSharedObjectSymbolNotFound",
    304: "cudaErrorOperatingSystem",
    400: "cudaErrorInvalidResourceHandle",
    401: "cudaErrorIllegalState",
    500: "cudaErrorSymbolNotFound",
    700: "cudaErrorIllegalAddress",
    701: "cudaErrorLaunchOutOfResources",
    702: "cudaErrorLaunchTimeout",
    709: "cudaErrorContextIsDestroyed",
    710: "cudaErrorAssert",
    714: "cudaErrorHardwareStackError",
    715: "cudaErrorIllegalInstruction",
    716: "cudaErrorMisalignedAddress",
    717: "cudaErrorInvalidAddressSpace",
    718: "cudaErrorInvalidPc",
    719: "cudaErrorLaunchFailure",
    720: "cudaErrorCooperativeLaunchTooLarge",
    800: "cudaErrorNotPermitted",
    801: "cudaErrorNotSupported",
    900: "cudaErrorStreamCaptureUnsupported",
    901: "cudaErrorStreamCaptureInvalidated",
    906: "cudaErrorStreamCaptureImplicit",
    999: "cudaErrorUnknown",
}


def error_name(code: int) -> str:
    """Name and number of a return code."""
    return f"{ERRORS[code]} ({code})" if code in ERRORS else f"error {code}"


def first_error(snapshot: RingSnapshot) -> str:
    """Name of the call of a process that failed first, and its error; "" where none was kept."""
    from kvprobe.probe.ring import CALLS

    failed = [record for section in snapshot.sections for record in section.failed]
    if not failed:
        return ""
    first = min(failed, key=lambda record: int(record["start_ns"]))
    name = CALLS[int(first["call"])][1] if int(first["call"]) in CALLS else "a call"
    return f"{name}, {error_name(int(first['result']))}"
