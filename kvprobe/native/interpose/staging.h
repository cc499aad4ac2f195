/* What the files of the cure of pageable copies share; see cures.c for what it is. */
#ifndef KVP_STAGING_H
#define KVP_STAGING_H

#include "interpose.h"

/* The driver's functions that staging calls, past every wrapper. They leave the runtime's last error alone. */
#define KVP_STAGING_CALLS(X)                                                                                           \
    X(cuPointerGetAttributes, (unsigned, int *, void **, uint64_t))                                                    \
    X(cuCtxGetCurrent, (void **))                                                                                      \
    X(cuCtxSetCurrent, (void *))                                                                                       \
    X(cuCtxGetId, (void *, uint64_t *))                                                                                \
    X(cuCtxGetDevice, (int *))                                                                                         \
    X(cuDeviceGetAttribute, (int *, int, int))                                                                         \
    X(cuStreamGetCtx, (void *, void **))                                                                               \
    X(cuStreamIsCapturing, (void *, int *))                                                                            \
    X(cuStreamQuery, (void *))                                                                                         \
    X(cuStreamSynchronize, (void *))                                                                                   \
    X(cuThreadExchangeStreamCaptureMode, (int *))                                                                      \
    X(cuMemHostRegister_v2, (void *, size_t, unsigned))                                                                \
    X(cuMemcpyHtoDAsync_v2, (uint64_t, const void *, size_t, void *))                                                  \
    X(cuMemcpyDtoHAsync_v2, (void *, uint64_t, size_t, void *))                                                        \
    X(cuEventCreate, (void **, unsigned))                                                                              \
    X(cuEventRecord, (void *, void *))                                                                                 \
    X(cuEventQuery, (void *))

struct staging_driver {
#define X(NAME, PARAMETERS) int(*NAME) PARAMETERS;
    KVP_STAGING_CALLS(X)
#undef X
};
extern struct staging_driver kvp_driver;

#define STAGING_SLOT_BYTES (1u << 20)
#define STAGING_SLOTS 64 /* at most */
#define STAGING_FEWEST 4
#define STAGING_MOST_WAIT_NS 100000000u /* for what the program's own call might not have waited for */
#define STAGING_NOT_READY 600           /* CUDA_ERROR_NOT_READY */

/* staged_copy.c: one copy, in chunks, by way of pinned slots. One at a time: the caller holds the right to copy. */
typedef struct {
    uint64_t context; /* its id, unique in the process's life; 0: none */
    void *events[STAGING_SLOTS];
    void *probe; /* says when what stands in a stream is over */
} staging_events;

/* Memory of `slots` slots that the caller has registered, and so many threads that help. */
int kvp_staging_open(uint8_t *memory, uint32_t slots, unsigned helpers);
/* 0, or the error of the call that failed; then the copy is to be made as if nothing had happened, and staging never
 * to be used again. STAGING_NOT_READY: the device took or gave nothing for too long; the copy is to be made, too. Does
 * not wait for what is in front of it in the stream. */
enum { STAGING_LARGE = 1, STAGING_FRESH = 2 }; /* all threads help; the pages of `host` are not there yet */
int kvp_staged_copy(const staging_events *events, int to_device, uint64_t device, uint8_t *host, size_t bytes,
                    void *stream, unsigned how);
/* Until the device is done with every slot, and no longer than `until_ns`: 0, or STAGING_NOT_READY. */
int kvp_staging_drain(uint64_t until_ns);
/* 0: helpers of the copy before are still about. */
int kvp_staging_is_free(void);
unsigned kvp_staging_threads(void);
/* Between two questions to the driver: each takes locks that other threads' submissions want. */
void kvp_staging_pause(void);

/* decisions.c: a line in the run folder, as adapters write them (kvprobe/instrument/event_log.py). `why` is made from
 * `format` and holds nothing of the program's. Gain 0: not known. */
void kvp_decision(const char *folder, const char *what, const char *from, const char *to, double gain,
                  const char *format, ...) __attribute__((format(printf, 6, 7)));

#endif
