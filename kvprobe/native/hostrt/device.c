/* The device, and what it says it is: where there are several ($KVHOST_DEVICES), all are this one, each with a context
 * and a default stream of its own. The names of errors. */
#include "rt.h"

#include <stdlib.h>

__thread int kvh_device;

KVP_EXPORT cudaError_t cudaGetDeviceCount(int *count) {
    KVH_ENTER(cudaGetDeviceCount, 0);
    if (!count) KVH_LEAVE(cudaErrorInvalidValue);
    *count = c->rt->devices;
    KVH_LEAVE(cudaSuccess);
}

KVP_EXPORT cudaError_t cudaSetDevice(int device) {
    KVH_ENTER(cudaSetDevice, 0);
    if (device < 0 || device >= c->rt->devices) KVH_LEAVE(cudaErrorInvalidDevice);
    kvh_device = device;
    KVH_LEAVE(cudaSuccess);
}

KVP_EXPORT cudaError_t cudaGetDevice(int *device) {
    KVH_ENTER(cudaGetDevice, 0);
    if (!device) KVH_LEAVE(cudaErrorInvalidValue);
    *device = kvh_device;
    KVH_LEAVE(cudaSuccess);
}

/* Numbers of enum cudaDeviceAttr. What has no meaning here is 0, compute capability among it. */
/* One that $KVHOST_ATTRIBUTES gives, "NUMBER=VALUE,...". */
static bool is_given(int attribute, int *value) {
    const char *text = getenv("KVHOST_ATTRIBUTES");
    while (text && *text) {
        char *end;
        long number = strtol(text, &end, 10);
        if (*end != '=') return false;
        long given = strtol(end + 1, &end, 10);
        if (number == attribute) return *value = (int)given, true;
        text = *end ? end + 1 : end;
    }
    return false;
}

static cudaError_t get_attribute(int *value, int attribute, int device) {
    if (!value || attribute < 1 || attribute > 1000) return cudaErrorInvalidValue;
    if (device < 0 || device >= kvh_runtime()->devices) return cudaErrorInvalidDevice;
    if (is_given(attribute, value)) return cudaSuccess;
    switch (attribute) {
    case 15: /* can overlap copies and kernels */
    case 16: /* multiprocessors */
    case 19: /* can map host memory */
    case 31: /* concurrent kernels */
    case 41: /* unified addressing */
    case 78: /* stream priorities */
    case 91: /* registered memory has one address for both */
        *value = 1;
        break;
    case 40: /* copy engines */
        *value = 2;
        break;
    default:
        *value = 0;
    }
    return cudaSuccess;
}

KVP_EXPORT cudaError_t cudaDeviceGetAttribute(int *value, int attribute, int device) {
    KVH_ENTER(cudaDeviceGetAttribute, 0);
    KVH_LEAVE(get_attribute(value, attribute, device));
}

KVP_EXPORT int cuDeviceGetAttribute(int *value, int attribute, int device) {
    return get_attribute(value, attribute, device);
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
    {401, "cudaErrorIllegalState", "the operation cannot be performed in the present state"},
    {500, "cudaErrorSymbolNotFound", "named symbol not found"},
    {600, "cudaErrorNotReady", "device not ready"},
    {700, "cudaErrorIllegalAddress", "an illegal memory access was encountered"},
    {702, "cudaErrorLaunchTimeout", "the launch timed out and was terminated"},
    {712, "cudaErrorHostMemoryAlreadyRegistered", "part or all of the requested memory range is already mapped"},
    {713, "cudaErrorHostMemoryNotRegistered", "pointer does not correspond to a registered memory region"},
    {719, "cudaErrorLaunchFailure", "unspecified launch failure"},
    {801, "cudaErrorNotSupported", "operation not supported"},
    {900, "cudaErrorStreamCaptureUnsupported", "operation not permitted when stream is capturing"},
    {901, "cudaErrorStreamCaptureInvalidated", "operation failed due to a previous error during capture"},
    {905, "cudaErrorStreamCaptureIsolation", "dependency created on uncaptured work in another stream"},
    {906, "cudaErrorStreamCaptureImplicit",
     "operation would make the legacy stream depend on a capturing blocking stream"},
    {907, "cudaErrorCapturedEvent", "operation not permitted on an event last recorded in a capturing stream"},
    {908, "cudaErrorStreamCaptureWrongThread",
     "attempt to terminate a thread-local capture sequence from another thread"},
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
