/* The driver's entry points that programs reach past the runtime: directly, by dlsym, or by asking for their address.
 *
 * They share the implementation, never the exported runtime function: an interposed symbol would count a call twice.
 * CUresult and cudaError_t have the same numbers for everything returned here. */
#include "rt.h"

#include <dlfcn.h>
#include <string.h>

typedef unsigned long long device_pointer;

static void *pointer(device_pointer p) { return (void *)(uintptr_t)p; }

KVP_EXPORT int cuInit(unsigned flags) {
    KVH_ENTER(cuInit, 0);
    KVH_LEAVE(flags ? cudaErrorInvalidValue : cudaSuccess);
}

KVP_EXPORT int cuDriverGetVersion(int *version) {
    if (!version) return cudaErrorInvalidValue;
    *version = (int)kvh_runtime()->config.runtime_version;
    return cudaSuccess;
}

KVP_EXPORT int cuMemcpyAsync(device_pointer dst, device_pointer src, size_t bytes, cudaStream_t stream) {
    KVH_ENTER(cuMemcpyAsync, stream);
    KVH_LEAVE(kvh_copy(c, pointer(dst), pointer(src), bytes, cudaMemcpyDefault, stream, false));
}

KVP_EXPORT int cuMemcpyHtoDAsync_v2(device_pointer dst, const void *src, size_t bytes, cudaStream_t stream) {
    KVH_ENTER(cuMemcpyHtoDAsync_v2, stream);
    KVH_LEAVE(kvh_copy(c, pointer(dst), src, bytes, cudaMemcpyHostToDevice, stream, false));
}

KVP_EXPORT int cuMemcpyDtoHAsync_v2(void *dst, device_pointer src, size_t bytes, cudaStream_t stream) {
    KVH_ENTER(cuMemcpyDtoHAsync_v2, stream);
    KVH_LEAVE(kvh_copy(c, dst, pointer(src), bytes, cudaMemcpyDeviceToHost, stream, false));
}

KVP_EXPORT int cuMemcpyDtoDAsync_v2(device_pointer dst, device_pointer src, size_t bytes, cudaStream_t stream) {
    KVH_ENTER(cuMemcpyDtoDAsync_v2, stream);
    KVH_LEAVE(kvh_copy(c, pointer(dst), pointer(src), bytes, cudaMemcpyDeviceToDevice, stream, false));
}

/* CUDA_MEMCPY2D: of each side x, y, kind of memory, host's and device's address, array, pitch; then width and height.
 */
typedef struct {
    struct side_2d {
        size_t x, y;
        unsigned memory; /* 1: the host's address counts */
        void *host;
        device_pointer device;
        void *array;
        size_t pitch;
    } from, to;
    size_t width, height;
} memcpy_2d;

static char *corner_of(const struct side_2d *side) {
    return (char *)(side->memory == 1 ? side->host : pointer(side->device)) + side->y * side->pitch + side->x;
}

KVP_EXPORT int cuMemcpy2DAsync_v2(const memcpy_2d *p, cudaStream_t stream) {
    KVH_ENTER(cuMemcpy2DAsync_v2, stream);
    if (!p || p->from.array || p->to.array) KVH_LEAVE(cudaErrorInvalidValue);
    KVH_LEAVE(kvh_copy_2d(c, corner_of(&p->to), p->to.pitch, corner_of(&p->from), p->from.pitch, p->width, p->height,
                          cudaMemcpyDefault, stream, false));
}

KVP_EXPORT int cuMemcpyAsync_ptsz(device_pointer, device_pointer, size_t, cudaStream_t)
    __attribute__((alias("cuMemcpyAsync")));
KVP_EXPORT int cuMemcpyHtoDAsync_v2_ptsz(device_pointer, const void *, size_t, cudaStream_t)
    __attribute__((alias("cuMemcpyHtoDAsync_v2")));
KVP_EXPORT int cuMemcpyDtoHAsync_v2_ptsz(void *, device_pointer, size_t, cudaStream_t)
    __attribute__((alias("cuMemcpyDtoHAsync_v2")));
KVP_EXPORT int cuMemcpyDtoDAsync_v2_ptsz(device_pointer, device_pointer, size_t, cudaStream_t)
    __attribute__((alias("cuMemcpyDtoDAsync_v2")));

KVP_EXPORT int cuMemcpy(device_pointer dst, device_pointer src, size_t bytes) {
    KVH_ENTER(cuMemcpy, 0);
    KVH_LEAVE(kvh_copy(c, pointer(dst), pointer(src), bytes, cudaMemcpyDefault, NULL, true));
}

KVP_EXPORT int cuMemcpyHtoD_v2(device_pointer dst, const void *src, size_t bytes) {
    KVH_ENTER(cuMemcpyHtoD_v2, 0);
    KVH_LEAVE(kvh_copy(c, pointer(dst), src, bytes, cudaMemcpyHostToDevice, NULL, true));
}

KVP_EXPORT int cuMemcpyDtoH_v2(void *dst, device_pointer src, size_t bytes) {
    KVH_ENTER(cuMemcpyDtoH_v2, 0);
    KVH_LEAVE(kvh_copy(c, dst, pointer(src), bytes, cudaMemcpyDeviceToHost, NULL, true));
}

KVP_EXPORT int cuMemcpyDtoD_v2(device_pointer dst, device_pointer src, size_t bytes) {
    KVH_ENTER(cuMemcpyDtoD_v2, 0);
    KVH_LEAVE(kvh_copy(c, pointer(dst), pointer(src), bytes, cudaMemcpyDeviceToDevice, NULL, true));
}

/* 12.8 */
KVP_EXPORT int cuMemcpyBatchAsync(device_pointer *dsts, device_pointer *srcs, size_t *sizes, size_t count,
                                  kvp_memcpy_attributes *attrs, size_t *attr_indices, size_t attr_count,
                                  size_t *fail_index, cudaStream_t stream) {
    KVH_ENTER(cuMemcpyBatchAsync, stream);
    cudaError_t error = kvh_batch(c, (void *const *)dsts, (const void *const *)srcs, sizes, count, attrs, attr_indices,
                                  attr_count, stream);
    if (error && fail_index) *fail_index = SIZE_MAX;
    KVH_LEAVE(error);
}
KVP_EXPORT int cuMemcpyBatchAsync_ptsz(device_pointer *, device_pointer *, size_t *, size_t, kvp_memcpy_attributes *,
                                       size_t *, size_t, size_t *, cudaStream_t)
    __attribute__((alias("cuMemcpyBatchAsync")));

/* 13.0 */
KVP_EXPORT int cuMemcpyBatchAsync_v2(device_pointer *dsts, device_pointer *srcs, size_t *sizes, size_t count,
                                     kvp_memcpy_attributes *attrs, size_t *attr_indices, size_t attr_count,
                                     cudaStream_t stream) {
    KVH_ENTER(cuMemcpyBatchAsync_v2, stream);
    KVH_LEAVE(kvh_batch(c, (void *const *)dsts, (const void *const *)srcs, sizes, count, attrs, attr_indices,
                        attr_count, stream));
}
KVP_EXPORT int cuMemcpyBatchAsync_v2_ptsz(device_pointer *, device_pointer *, size_t *, size_t, kvp_memcpy_attributes *,
                                          size_t *, size_t, cudaStream_t)
    __attribute__((alias("cuMemcpyBatchAsync_v2")));

KVP_EXPORT int cuStreamSynchronize(cudaStream_t stream) {
    KVH_ENTER(cuStreamSynchronize, stream);
    KVH_LEAVE(kvh_stream_sync(c, stream));
}

KVP_EXPORT int cuCtxSynchronize(void) {
    KVH_ENTER(cuCtxSynchronize, 0);
    KVH_LEAVE(kvh_wait_all(c));
}

KVP_EXPORT int cuStreamCreate(cudaStream_t *stream, unsigned flags) {
    KVH_ENTER(cuStreamCreate, 0);
    KVH_LEAVE(kvh_stream_create(c, stream, flags, 0));
}

KVP_EXPORT int cuEventCreate(cudaEvent_t *event, unsigned flags) {
    KVH_ENTER(cuEventCreate, 0);
    KVH_LEAVE(kvh_event_create(c, event, flags));
}

KVP_EXPORT int cuStreamQuery(cudaStream_t stream) {
    KVH_ENTER(cuStreamQuery, stream);
    KVH_LEAVE(kvh_stream_query(c, stream));
}

KVP_EXPORT int cuEventRecord(cudaEvent_t event, cudaStream_t stream) {
    KVH_ENTER(cuEventRecord, stream);
    KVH_LEAVE(kvh_event_record(c, event, stream));
}

KVP_EXPORT int cuEventQuery(cudaEvent_t event) {
    KVH_ENTER(cuEventQuery, 0);
    KVH_LEAVE(kvh_event_query(c, event));
}

KVP_EXPORT int cuEventElapsedTime(float *ms, cudaEvent_t from, cudaEvent_t to) {
    KVH_ENTER(cuEventElapsedTime, 0);
    KVH_LEAVE(kvh_event_elapsed(c, ms, from, to));
}

KVP_EXPORT int cuStreamDestroy_v2(cudaStream_t stream) { return kvh_stream_destroy(API_cuStreamDestroy_v2, stream); }

KVP_EXPORT int cuDeviceGetCount(int *count) {
    *count = kvh_runtime()->devices;
    return cudaSuccess;
}

KVP_EXPORT int cuMemHostRegister_v2(void *p, size_t bytes, unsigned flags) {
    KVH_ENTER(cuMemHostRegister_v2, 0);
    KVH_LEAVE(kvh_host_register(c, p, bytes, flags));
}

/* A device has one context; the first one's is current in every thread, until it makes another one current. */
static char contexts[MAX_DEVICES];

KVP_EXPORT int cuCtxGetCurrent(void **context) {
    *context = &contexts[kvh_device];
    return cudaSuccess;
}

KVP_EXPORT int cuCtxSetCurrent(void *context) {
    char *which = context ? context : contexts;
    if (which < contexts || which >= contexts + kvh_runtime()->devices) return cudaErrorInvalidValue;
    kvh_device = (int)(which - contexts);
    return cudaSuccess;
}

KVP_EXPORT int cuCtxGetId(void *context, uint64_t *id) {
    int device = context ? (int)((char *)context - contexts) : kvh_device;
    *id = kvh_runtime()->context_id * MAX_DEVICES + (unsigned)device;
    return cudaSuccess;
}

KVP_EXPORT int cuCtxGetDevice(int *device) {
    *device = kvh_device;
    return cudaSuccess;
}

KVP_EXPORT int cuStreamGetCtx(cudaStream_t stream, void **context) {
    struct stream *s = kvh_stream(kvh_runtime(), stream);
    if (!s) return cudaErrorInvalidResourceHandle;
    *context = &contexts[s->device];
    return cudaSuccess;
}

/* The function handle is the kernel's address, as for cudaLaunchKernel, or one of cuModuleGetFunction. */
KVP_EXPORT int cuLaunchKernel(void *fn, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                              unsigned shared_bytes, cudaStream_t stream, void **params, void **extra) {
    (void)shared_bytes, (void)extra;
    KVH_ENTER(cuLaunchKernel, stream);
    if (!gx || !gy || !gz || !bx || !by || !bz) KVH_LEAVE(cudaErrorInvalidValue);
    if (kvh_is_copy_kernel(fn)) { /* CTAs and threads in a row: others would do the same once more, beside it */
        bool row = gy == 1 && gz == 1 && by == 1 && bz == 1;
        KVH_LEAVE(row ? kvh_launch_copy_kernel(c, fn, gx, params, stream) : cudaErrorInvalidValue);
    }
    KVH_LEAVE(kvh_launch(c, fn, params, stream));
}

/* ---- addresses
 * ------------------------------------------------------------------------------------------------------- */

KVP_EXPORT int cuMemPoolTrimTo(void *pool, size_t keep); /* memory.c */
KVP_EXPORT int cuGetProcAddress(const char *symbol, void **fn, int version, uint64_t flags);
KVP_EXPORT int cuGetProcAddress_v2(const char *symbol, void **fn, int version, uint64_t flags, int *status);

/* Which function a name means for a caller that was built for `since` or later; the newest fitting entry wins. */
static const struct {
    const char *name;
    int since;
    void *fn;
} entries[] = {
    {"cuInit", 2000, (void *)cuInit},
    {"cuDriverGetVersion", 2020, (void *)cuDriverGetVersion},
    {"cuGetProcAddress", 11030, (void *)cuGetProcAddress},
    {"cuGetProcAddress", 12000, (void *)cuGetProcAddress_v2},
    {"cuMemcpyAsync", 4000, (void *)cuMemcpyAsync},
    {"cuMemcpy", 4000, (void *)cuMemcpy},
    {"cuMemcpyHtoD", 3020, (void *)cuMemcpyHtoD_v2},
    {"cuMemcpyDtoH", 3020, (void *)cuMemcpyDtoH_v2},
    {"cuMemcpyDtoD", 3020, (void *)cuMemcpyDtoD_v2},
    {"cuMemcpyHtoDAsync", 3020, (void *)cuMemcpyHtoDAsync_v2},
    {"cuMemcpyDtoHAsync", 3020, (void *)cuMemcpyDtoHAsync_v2},
    {"cuMemcpyDtoDAsync", 3020, (void *)cuMemcpyDtoDAsync_v2},
    {"cuMemcpy2DAsync", 3020, (void *)cuMemcpy2DAsync_v2},
    {"cuMemcpyBatchAsync", 12080, (void *)cuMemcpyBatchAsync},
    {"cuMemcpyBatchAsync", 13000, (void *)cuMemcpyBatchAsync_v2},
    {"cuStreamSynchronize", 2000, (void *)cuStreamSynchronize},
    {"cuCtxSynchronize", 2000, (void *)cuCtxSynchronize},
    {"cuStreamCreate", 2000, (void *)cuStreamCreate},
    {"cuEventCreate", 2000, (void *)cuEventCreate},
    {"cuLaunchKernel", 4000, (void *)cuLaunchKernel},
    {"cuMemPoolTrimTo", 11020, (void *)cuMemPoolTrimTo},
};

/* status: 0 found, 1 no such symbol, 2 the caller's version is too old for it. */
static cudaError_t look_up(const char *symbol, void **fn, int version, int *status) {
    if (!symbol || !fn) return cudaErrorInvalidValue;
    int state = 1;
    *fn = NULL;
    for (unsigned i = 0; i < sizeof entries / sizeof *entries; i++) {
        if (strcmp(symbol, entries[i].name)) continue;
        if (version >= entries[i].since)
            *fn = entries[i].fn, state = 0;
        else if (state == 1)
            state = 2;
    }
    if (status) *status = state;
    return state ? 500 : cudaSuccess; /* CUDA_ERROR_NOT_FOUND */
}

int cuGetProcAddress(const char *symbol, void **fn, int version, uint64_t flags) {
    (void)flags;
    KVH_ENTER(cuGetProcAddress, 0);
    KVH_LEAVE(look_up(symbol, fn, version, NULL));
}

int cuGetProcAddress_v2(const char *symbol, void **fn, int version, uint64_t flags, int *status) {
    (void)flags;
    KVH_ENTER(cuGetProcAddress, 0);
    KVH_LEAVE(look_up(symbol, fn, version, status));
}

/* The runtime's forms report a missing symbol by their status alone. */
KVP_EXPORT cudaError_t cudaGetDriverEntryPointByVersion(const char *symbol, void **fn, unsigned version, uint64_t flags,
                                                        int *status) {
    (void)flags;
    KVH_ENTER(cudaGetDriverEntryPointByVersion, 0);
    int state = 1;
    cudaError_t error = look_up(symbol, fn, (int)version, &state);
    if (status) *status = state;
    KVH_LEAVE(error == 500 ? cudaSuccess : error);
}
KVP_EXPORT cudaError_t cudaGetDriverEntryPointByVersion_ptsz(const char *, void **, unsigned, uint64_t, int *)
    __attribute__((alias("cudaGetDriverEntryPointByVersion")));

KVP_EXPORT cudaError_t cudaGetDriverEntryPoint(const char *symbol, void **fn, uint64_t flags, int *status) {
    (void)flags;
    KVH_ENTER(cudaGetDriverEntryPoint, 0);
    int state = 1;
    cudaError_t error = look_up(symbol, fn, (int)c->rt->config.runtime_version, &state);
    if (status) *status = state;
    KVH_LEAVE(error == 500 ? cudaSuccess : error);
}
KVP_EXPORT cudaError_t cudaGetDriverEntryPoint_ptsz(const char *, void **, uint64_t, int *)
    __attribute__((alias("cudaGetDriverEntryPoint")));
