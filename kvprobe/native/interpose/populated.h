/* The cure of slow pinning: large pinned memory whose pages several threads make, for recycle.c. */
#ifndef KVP_POPULATED_H
#define KVP_POPULATED_H

#include "interpose.h"

/* What it takes of the driver; memory of the program's is registered by none of the wrapped calls. */
struct pinning_driver {
    int (*cuCtxGetCurrent)(void **), (*cuCtxSetCurrent)(void *), (*cuCtxGetId)(void *, uint64_t *);
    int (*cuCtxSynchronize)(void), (*cuThreadExchangeStreamCaptureMode)(int *);
    int (*cuPointerGetAttributes)(unsigned, int *, void **, uint64_t);
    int (*cuDeviceGetCount)(int *);
    /* these may be NULL */
    int (*cuDevicePrimaryCtxGetState)(int, unsigned *, int *);
    int (*cuMemHostRegister)(void *, size_t, unsigned), (*cuMemHostUnregister)(void *);
    int (*cuMemHostGetFlags)(unsigned *, void *), (*cuMemFreeHost)(void *);
};
extern struct pinning_driver kvp_pinning_driver;

/* Under KVPROBE_FIX=auto, where KVPROBE_POPULATE_BYTES allows it. `folder` stays valid. 1: it does. */
int kvp_populated_start(const char *folder);
void kvp_populated_close(void); /* and the run folder is told what was done */
void kvp_populated_in_child(void);

/* In a context, and while no stream is captured. 1: `pointer` has it, the program's call would have returned 0.
 * `alloc` is that call: a small sample of it shows what its memory answers, and what it costs. */
int kvp_populated_make(void **pointer, size_t bytes, unsigned flags, any_fn *alloc);
/* Pages that nobody has asked for yet, of any size, by so many threads (0: as many as it finds best) in small pieces;
 * they are registered later. No forked child has them until they are `handed_out`. `stop` not 0: it is given up. Both
 * say -1: it never will be; 0: not now, and what was not registered is still to be freed. */
struct populating_ahead {
    uint32_t threads;
    const atomic_int *stop;
};
int kvp_populated_ahead(void **pointer, size_t bytes, unsigned flags, const struct populating_ahead *how);
int kvp_populated_register(void *pointer, unsigned flags, any_fn *alloc);
void kvp_populated_handed_out(void *pointer);
uint64_t kvp_populated_as_it_is_ns(uint64_t bytes); /* what the runtime takes for so much, by its samples */
int kvp_populated_free_samples(void);               /* 1: there were some */
int kvp_populated_is(const void *pointer);
/* -1: it is none of these. Else 0, or the driver's error: then it stays. Does not wait for the device. */
int kvp_populated_free(void *pointer);
/* Around the end of a context: memory whose registration went with it goes afterwards. */
void kvp_populated_context_ended(void);

#endif
