/* Copies, and the methods that submit them.
 *
 * A copy is one contiguous piece. A method says how many places of a launch queue a run of copies takes, and submits
 * it to a stream. The submitter (submitter.c) decides which copies, on which stream and when; a method only submits.
 *
 *   loop    one cudaMemcpyAsync a copy: a place each
 *   batch   one cudaMemcpyBatchAsync for many copies: fewer places
 *   kernel  one launch of a copy kernel for many copies: one place; takes multiprocessors from the model
 *   staged  one DMA between the host side, where it is contiguous, and a staging buffer on the GPU, and one launch that
 *           scatters or gathers there: two or three places
 */
#ifndef KVP_COPY_H
#define KVP_COPY_H

#include "kvp.h"
#include "kvp_cuda.h"

/* 24 bytes; the copy kernels read it as it is. */
typedef struct {
    uint64_t dst, src, bytes;
} kvp_copy;

enum kvp_method { KVP_LOOP = 0, KVP_BATCH = 1, KVP_KERNEL = 2, KVP_STAGED = 3, KVP_METHODS = 4 };

/* Functions of the CUDA runtime and driver that methods and the submitter call, by address; NULL where there is none.
 */
typedef struct {
    void *memcpy_async;       /* cudaMemcpyAsync */
    void *memcpy_batch_async; /* cudaMemcpyBatchAsync */
    void *event_record;       /* cudaEventRecord */
    void *event_query;        /* cudaEventQuery */
    void *event_elapsed;      /* cudaEventElapsedTime */
    void *stream_wait_event;  /* cudaStreamWaitEvent */
    void *get_last_error;     /* cudaGetLastError */
    void *launch_kernel;      /* cuLaunchKernel */
    void *set_device;         /* cudaSetDevice */
    uint64_t runtime_version; /* 13000: decides the signature of cudaMemcpyBatchAsync */
    void *stream_query;       /* cudaStreamQuery */
    void *event_synchronize;  /* cudaEventSynchronize */
    void *event_create;       /* cudaEventCreateWithFlags */
    void *event_destroy;      /* cudaEventDestroy */
    void *capture_mode;       /* cudaThreadExchangeStreamCaptureMode */
} kvp_cuda_calls;

/* A copy kernel that was compiled and loaded: void kernel(const kvp_copy *list, uint32_t count, ...). */
typedef struct {
    void *function;        /* CUfunction; NULL: no kernel here */
    uint32_t threads;      /* of a CTA */
    uint32_t shared_bytes; /* dynamic shared memory of a CTA */
    uint32_t max_ctas;     /* never launch more */
    uint32_t kind;         /* 1 bulk asynchronous copies, 2 registers, 3 coded */
} kvp_copy_kernel;

/* Pinned memory that the GPU sees, from which a kernel reads its copies. It belongs to one launch until that launch has
 * completed; the submitter has a ring of it for each direction. */
typedef struct {
    kvp_copy *host;
    uint64_t device; /* the same memory as the GPU addresses it */
    uint32_t capacity;
    uint32_t used; /* entries that the newest launch reads */
} kvp_copy_list;

typedef struct {
    kvp_cuda_calls cuda;
    kvp_copy_kernel load_kernel, store_kernel; /* host to device, device to host */
    double batch_places;                       /* places of a queue that one copy of a batch takes (0.041 on an H200) */
    uint32_t batch_max;                        /* copies of one batch call; 0: 4,096 */
    uint64_t staging;                          /* device address of the staging buffer; 0: none */
    uint64_t staging_bytes;
    uint64_t store_bytes_per_s; /* bulk kernels store no faster, so that kernels beside them end soon; 0: as they can */
    kvp_copy_kernel coded_load_kernel,
        coded_store_kernel; /* of pools of cells (wire.h); no method of a row uses them */
} kvp_copier;

/* How many of the first `count` copies one kvp_copy_submit may take, given `room` places, at most `max_bytes` of
 * payload (a first copy beyond it is taken alone) and a list of `list_capacity` copies; `places` receives what they
 * take. 0: not even the first fits, or the method does not exist here. */
KVP_EXPORT uint32_t kvp_copy_plan(const kvp_copier *c, int method, const kvp_copy *copies, uint32_t count,
                                  int direction, uint32_t room, uint64_t max_bytes, uint32_t list_capacity,
                                  uint32_t *places);

/* Submits `count` copies (as planned) to a stream and returns CUDA's code. `calls` receives the number of submitting
 * calls made, `submitted` how many of the copies the runtime took: all of them on success. Never allocates, never
 * creates a stream or an event. `ctas` and `list` matter to kernel and staged alone. Loop is the submitter's own. */
KVP_EXPORT int kvp_copy_submit(const kvp_copier *c, int method, const kvp_copy *copies, uint32_t count, int direction,
                               uint32_t ctas, void *stream, kvp_copy_list *list, uint32_t *submitted, uint32_t *calls);

#endif
