/* The device: there is one, and it says what it is; the names of errors. */
#include "rt.h"

KVP_EXPORT cudaError_t cudaGetDeviceCount(int *count) {
    KVH_ENTER(cudaGetDeviceCount, 0);
    if (!count) KVH_LEAVE(cudaErrorInvalidValue);
    *count = 1;
    KVH_LEAVE(cudaSuccess);
}

KVP_EXPORT cudaError_t cudaSetDevice(int device) {
    KVH_ENTER(cudaSetDevice, 0);
    KVH_LEAVE(device ? cudaErrorInvalidDevice : cudaSuccess);
}

KVP_EXPORT cudaError_t cudaGetDevice(int *device) {
    KVH_ENTER(cudaGetDevice, 0);
    if (!device) KVH_LEAVE(cudaErrorInvalidValue);
    *device = 0;
    KVH_LEAVE(cudaSuccess);
}

/* Numbers of enum cudaDeviceAttr. What has no meaning here is 0, compute capability among it. */
KVP_EXPORT cudaError_t cudaDeviceGetAttribute(int *value, int attribute, int device) {
    KVH_ENTER(cudaDeviceGetAttribute, 0);
    if (!value || attribute < 1 || attribute > 1000) KVH_LEAVE(cudaErrorInvalidValue);
    if (device) KVH_LEAVE(cudaErrorInvalidDevice);
    switch (attribute) {
    case 15: /* can overlap copies and kernels */
    case 16: /* multiprocessors */
    case 19: /* can map host memory */
    case 31: /* concurrent kernels */
    case 41: /* unified addressing */
    case 78: /* stream priorities */
        *value = 1;
        break;
    case 40: /* copy engines */
        *value = 2;
        break;
    default:
        *value = 0;
    }
    KVH_LEAVE(cudaSuccess);
}

KVP_EXPORT cudaError_t cudaRuntimeGetVersion(int *version) {
    if (!version) return cudaErrorInvalidValue;
    *version = (int)kvh_runtime()->config.runtime_version;
    return cudaSuccess;
}

KVP_EXPORT cudaError_t cudaDriverGetVersion(int *version) { return cudaRuntimeGetVersion(version); }

static const struct {
    cudaError_t code;
    const char *name, *text;
} errors[] = {
    {0, "cudaSuccess", "no error"},
    {1, "cudaErrorInvalidValue", "invalid argument"},
    {2, "cudaErrorMemoryAllocation", "out of memory"},
    {3, "cudaErrorInitializationError", "initialization error"},
    {12, "cudaErrorInvalidPitchValue", "invalid pitch argument"},
    {46, "cudaErrorDevicesUnavailable", "CUDA-capable device(s) is/are busy or unavailable"},
    {98, "cudaErrorInvalidDeviceFunction", "invalid device function"},
    {100, "cudaErrorNoDevice", "no CUDA-capable device is detected"},
    {101, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {400, "cudaErrorInvalidResourceHandle", "invalid resource handle"},
    {500, "cudaErrorSymbolNotFound", "named symbol not found"},
    {600, "cudaErrorNotReady", "device not ready"},
    {700, "cudaErrorIllegalAddress", "an illegal memory access was encountered"},
    {702, "cudaErrorLaunchTimeout", "the launch timed out and was terminated"},
    {712, "cudaErrorHostMemoryAlreadyRegistered", "part or all of the requested memory range is already mapped"},
    {713, "cudaErrorHostMemoryNotRegistered", "pointer does not correspond to a registered memory region"},
    {719, "cudaErrorLaunchFailure", "unspecified launch failure"},
    {801, "cudaErrorNotSupported", "operation not supported"},
    {999, "cudaErrorUnknown", "unknown error"},
};

KVP_EXPORT const char *cudaGetErrorName(cudaError_t error) {
    for (unsigned i = 0; i < sizeof errors / sizeof *errors; i++)
        if (errors[i].code == error) return errors[i].name;
    return "unrecognized error code";
}

KVP_EXPORT const char *cudaGetErrorString(cudaError_t error) {
    for (unsigned i = 0; i < sizeof errors / sizeof *errors; i++)
        if (errors[i].code == error) return errors[i].text;
    return "unrecognized error code";
}
