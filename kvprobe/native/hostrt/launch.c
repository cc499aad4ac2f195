/* Compute work: kernels that take a time, host functions. */
#include "rt.h"

#include <stdlib.h>

typedef struct {
    unsigned x, y, z;
} dim3;

/* struct cudaLaunchConfig_st */
typedef struct {
    dim3 grid, block;
    size_t shared_bytes;
    cudaStream_t stream;
    void *attrs;
    unsigned attr_count;
} launch_config;

void kvhost_delay_kernel(void) {}

static cudaError_t work(call *c, uint8_t kind, cudaStream_t stream, void (*fn)(void *), void *arg, uint64_t ns) {
    op o = {.kind = kind, .class = KVHOST_COMPUTE};
    o.work.ns = ns;
    o.work.fn = fn;
    o.work.arg = arg;
    return kvh_submit_one(c, stream, &o);
}

cudaError_t kvh_launch(call *c, const void *fn, void **args, cudaStream_t stream) {
    if (fn != (const void *)(uintptr_t)kvhost_delay_kernel) return cudaErrorInvalidDeviceFunction;
    if (!args || !args[0]) return cudaErrorInvalidValue;
    return work(c, OP_DELAY, stream, NULL, NULL, *(const uint64_t *)args[0]);
}

KVP_EXPORT cudaError_t cudaLaunchKernel(const void *fn, dim3 grid, dim3 block, void **args, size_t shared_bytes,
                                        cudaStream_t stream) {
    (void)grid, (void)block, (void)shared_bytes;
    KVH_ENTER(cudaLaunchKernel, stream);
    KVH_LEAVE(kvh_launch(c, fn, args, stream));
}
KVP_EXPORT cudaError_t cudaLaunchKernel_ptsz(const void *fn, dim3 grid, dim3 block, void **args, size_t shared_bytes,
                                             cudaStream_t stream) __attribute__((alias("cudaLaunchKernel")));

KVP_EXPORT cudaError_t cudaLaunchKernelExC(const launch_config *config, const void *fn, void **args) {
    KVH_ENTER(cudaLaunchKernelExC, config ? config->stream : NULL);
    KVH_LEAVE(config ? kvh_launch(c, fn, args, config->stream) : cudaErrorInvalidValue);
}
KVP_EXPORT cudaError_t cudaLaunchKernelExC_ptsz(const launch_config *config, const void *fn, void **args)
    __attribute__((alias("cudaLaunchKernelExC")));

KVP_EXPORT cudaError_t cudaLaunchHostFunc(cudaStream_t stream, void (*fn)(void *), void *arg) {
    KVH_ENTER(cudaLaunchHostFunc, stream);
    KVH_LEAVE(fn ? work(c, OP_HOSTFN, stream, fn, arg, 0) : cudaErrorInvalidValue);
}
KVP_EXPORT cudaError_t cudaLaunchHostFunc_ptsz(cudaStream_t stream, void (*fn)(void *), void *arg)
    __attribute__((alias("cudaLaunchHostFunc")));

typedef struct {
    void (*fn)(cudaStream_t, cudaError_t, void *);
    cudaStream_t stream;
    void *arg;
} callback;

static void call_back(void *given) {
    callback *back = given;
    back->fn(back->stream, cudaSuccess, back->arg);
    free(back);
}

KVP_EXPORT cudaError_t cudaStreamAddCallback(cudaStream_t stream, void (*fn)(cudaStream_t, cudaError_t, void *),
                                             void *arg, unsigned flags) {
    KVH_ENTER(cudaStreamAddCallback, stream);
    callback *back = fn && !flags ? malloc(sizeof *back) : NULL;
    cudaError_t error = fn && !flags ? cudaErrorMemoryAllocation : cudaErrorInvalidValue;
    if (back) {
        *back = (callback){fn, stream, arg};
        error = work(c, OP_HOSTFN, stream, call_back, back, 0);
        if (error) free(back);
    }
    KVH_LEAVE(error);
}
KVP_EXPORT cudaError_t cudaStreamAddCallback_ptsz(cudaStream_t stream, void (*fn)(cudaStream_t, cudaError_t, void *),
                                                  void *arg, unsigned flags)
    __attribute__((alias("cudaStreamAddCallback")));

cudaError_t kvhostLaunchDelay(cudaStream_t stream, uint64_t duration_ns) {
    KVH_ENTER(kvhostLaunchDelay, stream);
    KVH_LEAVE(work(c, OP_DELAY, stream, NULL, NULL, duration_ns));
}

cudaError_t kvhostLaunchWork(cudaStream_t stream, void (*fn)(void *), void *arg, uint64_t duration_ns) {
    KVH_ENTER(kvhostLaunchWork, stream);
    KVH_LEAVE(fn ? work(c, OP_WORK, stream, fn, arg, duration_ns) : cudaErrorInvalidValue);
}
