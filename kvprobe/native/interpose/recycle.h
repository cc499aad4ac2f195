/* The cure of pinning again and again: what wrap.c calls around cudaHostAlloc, cudaMallocHost and cudaFreeHost. */
#ifndef KVP_RECYCLE_H
#define KVP_RECYCLE_H

#include "interpose.h"

/* Under KVPROBE_FIX=auto, where KVPROBE_KEEP_BYTES allows it. `folder` stays valid. */
void kvp_recycle_start(const char *folder);
void kvp_recycle_stop(void);         /* from now on every call goes as it is; what is kept is freed */
void kvp_recycle_close(void);        /* and the run folder is told what was done */
void kvp_recycle_context_ends(void); /* what is kept is freed before its context goes */
void kvp_recycle_context_ended(void);

/* 1: `pointer` has a buffer that was kept or made here, the call would have returned 0. 0: the caller makes it, then
 * calls `made` with the result and what that took; 1 of that: what was kept has been freed, it is worth a second call.
 */
int kvp_recycle_take(void **pointer, size_t bytes, unsigned flags, any_fn *alloc);
int kvp_recycle_made(void *const *pointer, size_t bytes, unsigned flags, int result, uint64_t ns);
/* `free_host` is the program's call, which is made where the buffer is neither kept nor of our own making. */
int kvp_recycle_free(void *pointer, any_fn *free_host);
/* What the program asks to be unregistered: elsewhere where it is allocated memory to it, so that the call fails. */
void *kvp_recycle_unregistered(void *pointer);
void kvp_recycle_clear(any_fn *host_alloc); /* the error of a call that was made a second time */

#define KVP_RECYCLED_ALLOC(NATIVE, BYTES, FLAGS)                                                                       \
    ({                                                                                                                 \
        int made = 0;                                                                                                  \
        if (likely(!kvp_watch.recycles))                                                                               \
            made = (NATIVE);                                                                                           \
        else if (!kvp_recycle_take(pointer, BYTES, FLAGS, function)) {                                                 \
            uint64_t since = kvp_clock();                                                                              \
            made = (NATIVE);                                                                                           \
            if (kvp_recycle_made(pointer, BYTES, FLAGS, made, kvp_clock() - since)) {                                  \
                made = (NATIVE);                                                                                       \
                if (!made) kvp_recycle_clear(function);                                                                \
                kvp_recycle_made(pointer, BYTES, FLAGS, made, 0);                                                      \
            }                                                                                                          \
        }                                                                                                              \
        made;                                                                                                          \
    })

#define KVP_RECYCLED_FREE (likely(!kvp_watch.recycles) ? real(pointer) : kvp_recycle_free(pointer, function))
#define KVP_RECYCLED_UNREGISTER real(likely(!kvp_watch.recycles) ? pointer : kvp_recycle_unregistered(pointer))

#endif
