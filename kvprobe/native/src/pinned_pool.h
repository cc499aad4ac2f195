/* A pool of pinned memory for the engine, and for whoever uses it (kvprobe/cuda/pinned.py). */
#ifndef KVP_PINNED_POOL_H
#define KVP_PINNED_POOL_H

#include "host_memory.h"
#include "kvp_cuda.h"

/* Addresses of the runtime's functions. */
typedef struct {
    cudaError_t (*host_alloc)(void **memory, size_t bytes, unsigned flags);
    cudaError_t (*free_host)(void *memory);
    cudaError_t (*host_register)(void *memory, size_t bytes, unsigned flags);
    cudaError_t (*host_unregister)(void *memory);
    cudaError_t (*device_synchronize)(void);
    cudaError_t (*set_device)(int device);
    cudaError_t (*get_last_error)(void);
} kvp_pinning_calls;

typedef struct {
    kvp_pinning_calls calls;
    uint64_t budget_bytes;   /* most that is kept */
    uint64_t populate_bytes; /* from this size on threads make the pages; smaller ones come from cudaHostAlloc */
    kvp_populating populating;
    uint32_t watch_ms; /* 0: pressure is looked for in calls alone */
    int32_t device;
    const char *root; /* of kvp_memory_left; NULL: "" */
} kvp_pinned_options;

typedef struct {
    kvp_kept_counts kept;
    uint64_t out_bytes, out;                                /* handed out now: as asked for; buffers */
    uint64_t made, made_bytes, made_ns;                     /* buffers that were pinned, and what that took */
    uint64_t populated, populated_bytes;                    /* of those, by threads */
    uint64_t populate_ns, register_ns, longest_register_ns; /* the longest call that held the context's lock */
} kvp_pinned_counts;

typedef struct kvp_pinned_pool kvp_pinned_pool;

KVP_EXPORT kvp_pinned_pool *kvp_pinned_open(const kvp_pinned_options *options); /* NULL: no memory */
/* `piece_bytes`: 0 for one registration, which any copy may cross; else the range is registered in such pieces, and a
 * copy over two of them fails. Returns 0 or the runtime's error. `buffer` is what it is given back by: after a reset of
 * the runtime addresses are handed out again. */
KVP_EXPORT int kvp_pinned_take(kvp_pinned_pool *pool, uint64_t bytes, uint64_t piece_bytes, void **memory,
                               void **buffer);
/* Waits for the device, as cudaFreeHost does, and keeps the buffer or frees it. */
KVP_EXPORT int kvp_pinned_give(kvp_pinned_pool *pool, void *buffer);
KVP_EXPORT void kvp_pinned_trim(kvp_pinned_pool *pool, uint64_t most_bytes);
KVP_EXPORT void kvp_pinned_read(kvp_pinned_pool *pool, kvp_pinned_counts *counts);
/* The runtime was torn down: what it had pinned it has forgotten. */
KVP_EXPORT void kvp_pinned_reset(kvp_pinned_pool *pool);
/* Frees what is kept. Buffers that are out stay usable, and are freed as they come back; the last one frees the pool.
 */
KVP_EXPORT void kvp_pinned_close(kvp_pinned_pool *pool);

#endif
