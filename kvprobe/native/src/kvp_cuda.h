/* The part of the CUDA runtime's C interface that kvprobe calls, declared by kvprobe itself (no CUDA headers).
 * Values and signatures: CUDA Runtime API documentation, 13.0; where 12.x differs it is said. */
#ifndef KVP_CUDA_H
#define KVP_CUDA_H

#include <stddef.h>
#include <stdint.h>

typedef int cudaError_t;
typedef struct CUstream_st *cudaStream_t;
typedef struct CUevent_st *cudaEvent_t;

enum {
    cudaSuccess = 0,
    cudaErrorInvalidValue = 1,
    cudaErrorMemoryAllocation = 2,
    cudaErrorInitializationError = 3,
    cudaErrorInvalidResourceHandle = 400,
    cudaErrorNotReady = 600,
    cudaErrorIllegalAddress = 700,
    cudaErrorLaunchFailure = 719,
    cudaErrorNotSupported = 801,
    cudaErrorNoDevice = 100,
    cudaErrorInvalidDevice = 101,
    cudaErrorDevicesUnavailable = 46,
    cudaErrorUnknown = 999
};

enum {
    cudaMemcpyHostToHost = 0,
    cudaMemcpyHostToDevice = 1,
    cudaMemcpyDeviceToHost = 2,
    cudaMemcpyDeviceToDevice = 3,
    cudaMemcpyDefault = 4
};

enum { cudaStreamNonBlocking = 1, cudaEventDefault = 0, cudaEventBlockingSync = 1, cudaEventDisableTiming = 2 };

/* cudaMemcpyBatchAsync (12.8 on). In 12.x a `size_t *failIdx` stands before the stream; 13.0 dropped it. */
typedef struct {
    int type; /* enum cudaMemLocationType: 1 device, 2 host */
    int id;
} kvp_mem_location;

typedef struct {
    int srcAccessOrder; /* 1 stream, 2 during the call, 3 any */
    kvp_mem_location srcLocHint;
    kvp_mem_location dstLocHint;
    unsigned flags;
} kvp_memcpy_attributes;

typedef cudaError_t (*kvp_memcpy_async_fn)(void *dst, const void *src, size_t bytes, int kind, cudaStream_t stream);

#endif
