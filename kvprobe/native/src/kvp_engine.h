/* The engine's native side: the submission loop that issues a transfer's copies, and the calibration of the queue. */
#ifndef KVP_ENGINE_H
#define KVP_ENGINE_H

#include "kvp.h"
#include "kvp_cuda.h"

enum kvp_detail { KVP_OFF = 0, KVP_TOTALS = 1, KVP_TRANSFERS = 2, KVP_COPIES = 3 };

typedef struct {
    kvp_memcpy_async_fn copy;
    void *stream;
    int32_t kind;      /* cudaMemcpyKind */
    uint32_t transfer; /* id written into records */
    uint8_t direction; /* as in kvp_record */
    uint8_t detail;    /* enum kvp_detail */
    uint8_t pad[2];
    uint32_t stop_after;    /* return after this many blocked calls; 0 = never */
    uint64_t blocked_ns;    /* a call of at least this counts as blocked */
    uint64_t stop_after_ns; /* or after this much time in blocked calls; 0 = never */
    /* After every `every` copies one of `events` is recorded on the stream, so that the caller can tell how far the
     * stream has come; 0 = none. They are not counted as copies; one that takes 4 * blocked_ns counts as blocked. */
    cudaError_t (*event_record)(cudaEvent_t, cudaStream_t);
    void *const *events;
    uint32_t every;
    uint32_t events_max;
    /* NVTX push and pop around every copy at detail COPIES; NULL = no tool listens */
    void (*range_push)(uint64_t bytes, uint32_t direction, uint64_t stream, uint32_t transfer);
    void (*range_pop)(void);
} kvp_submit_options;

typedef struct {
    uint64_t submitted; /* copies issued, the failing one not counted */
    uint64_t bytes;
    uint64_t start_ns, end_ns;
    uint64_t fast, fast_ns;           /* calls below blocked_ns and their sum: the baseline's evidence */
    uint64_t blocked, blocked_sum_ns; /* calls at or above it, those that record `events` included */
    uint64_t first_blocked;           /* index of the first of them; UINT64_MAX = none */
    uint64_t first_blocked_ns;        /* when it was entered */
    uint64_t events;                  /* events recorded */
    uint64_t max_ns, max_index;
    uint64_t cpu_ns;                  /* CPU time of this thread inside the loop; filled only if a call blocked */
    uint64_t preempted, preempted_ns; /* blocked calls that lost the CPU and waited for nothing else; their sum */
    int32_t result;                   /* cudaError_t of the last call */
    int32_t pad;
} kvp_submit_result;

/* Issues n copies dst[i] <- src[i], size sizes[i] (or `size` each where sizes is NULL), and times every one (one clock
 * read a copy: the end of one call is the start of the next). Stops at the first error or when enough calls
 * blocked; result->submitted says how far it came. Any thread; blocks only where the CUDA call blocks. */
KVP_EXPORT int kvp_submit(const kvp_submit_options *options, size_t n, const uint64_t *dst, const uint64_t *src,
                          const uint64_t *sizes, uint64_t size, kvp_submit_result *result);

/* The same through one cudaMemcpyBatchAsync; fn_has_fail_index: the 12.x signature. */
KVP_EXPORT int kvp_submit_batch(const kvp_submit_options *options, void *batch_fn, int fn_has_fail_index, size_t n,
                                const uint64_t *dst, const uint64_t *src, const uint64_t *sizes, uint64_t size,
                                kvp_submit_result *result);

/* NVTX, domain "kvprobe": whether a tool listens, and a range around one copy with its bytes as payload. */
KVP_EXPORT int kvp_nvtx_listening(void);
KVP_EXPORT void kvp_nvtx_push(uint64_t bytes, uint32_t direction, uint64_t stream, uint32_t transfer);
KVP_EXPORT void kvp_nvtx_pop(void);
/* A range around one transfer; NULL where no tool listens. It may end on another thread. */
KVP_EXPORT void *kvp_nvtx_range_start(int store, uint32_t transfer, uint64_t stream, uint64_t bytes);
KVP_EXPORT void kvp_nvtx_range_end(void *range);

typedef struct {
    cudaError_t (*launch_host_func)(cudaStream_t, void (*)(void *), void *);
    cudaError_t (*event_record)(cudaEvent_t, cudaStream_t);
    cudaError_t (*stream_wait_event)(cudaStream_t, cudaEvent_t, unsigned);
    cudaError_t (*stream_synchronize)(cudaStream_t);
    kvp_memcpy_async_fn copy;
} kvp_calibrate_calls;

typedef struct {
    uint64_t accepted;  /* copies taken before one blocked; = limit if none did */
    uint64_t blocked;   /* 1 if one blocked */
    uint64_t median_ns; /* median of the calls that did not */
    uint64_t p99_ns;
    int32_t result;
    int32_t pad;
} kvp_calibration;

/* Holds the streams back by a gate (a host function in the first one, an event in the others), submits up to `limit`
 * small copies round-robin, and opens the gate as soon as a submission has made no progress for stall_ns. */
KVP_EXPORT int kvp_calibrate(const kvp_calibrate_calls *calls, size_t streams, void *const *stream, void *event,
                             void *dst, const void *src, size_t bytes, int kind, uint64_t limit, uint64_t stall_ns,
                             kvp_calibration *result);

/* The sizes of the structures that Python shares with this library, in the order of `SHARED` in library.py, at most
 * `room` of them; returns how many there are. */
KVP_EXPORT uint32_t kvp_layout(uint32_t *sizes, uint32_t room);

#endif
