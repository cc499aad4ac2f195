/* Cures that need no adapter, under KVPROBE_FIX=auto: what wrap.c calls around a call that can be cured. */
#ifndef KVP_CURES_H
#define KVP_CURES_H

#include "interpose.h"

/* Looks at the environment. `folder` stays valid. */
void kvp_cures_start(const char *folder);
void kvp_cures_stop(void);   /* from now on every call goes as it is */
void kvp_cures_close(void);  /* and the run folder is told what was done */
void kvp_context_ends(void); /* the program is about to destroy a context: nothing of it is asked for afterwards */

/* One copy between host and device memory, on its way through kvp_copy_cured. */
typedef struct {
    void *account; /* NULL: this copy is not measured */
    const void *events;
    void *stream;
    int behind_work; /* 1: looked at is only whether its call waits */
    uint64_t start_ns;
    size_t bytes;
} kvp_watched;

/* 1: the copy has been made, and its call would have returned 0. 0: the caller makes it, and then calls
 * kvp_copy_made if `watched->account` is set. `kind` as in cudaMemcpyKind, `stream` as the driver names it; `to_end`:
 * the call returns when the device has it all. */
#define KVP_CURED_FROM (128u << 10) /* bytes: up to 64 KiB a copy neither waits for its stream nor for its thread */
int kvp_copy_cured(kvp_watched *watched, uint64_t dst, uint64_t src, size_t bytes, int kind, uint64_t stream,
                   int to_end);
void kvp_copy_made(kvp_watched *watched, int result);

#define KVP_CURED(NATIVE, DST, SRC, BYTES, ...)                                                                        \
    ({                                                                                                                 \
        size_t size = unlikely(kvp_watch.cures) ? (BYTES) : 0;                                                         \
        int made;                                                                                                      \
        if (unlikely(size >= KVP_CURED_FROM)) {                                                                        \
            kvp_watched watched = {0};                                                                                 \
            int cured = kvp_copy_cured(&watched, DST, SRC, size, __VA_ARGS__);                                         \
            made = cured ? 0 : (NATIVE);                                                                               \
            if (watched.account) kvp_copy_made(&watched, made);                                                        \
        } else                                                                                                         \
            made = (NATIVE);                                                                                           \
        made;                                                                                                          \
    })

#endif
