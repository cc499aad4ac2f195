/* Pinned memory made before a program asks for it: what wrap.c says of mapped memory, and recycle.c of its buffers. */
#ifndef KVP_PREPARE_H
#define KVP_PREPARE_H

#include "interpose.h"

/* GPU memory was mapped or unmapped, or addresses were given back; `caller` is the address that the call returns to. */
void kvp_prepare_mapped(uint64_t address, uint64_t bytes, const void *caller);
void kvp_prepare_unmapped(uint64_t address);
void kvp_prepare_unreserved(uint64_t address, uint64_t bytes);

void kvp_prepare_start(const char *folder); /* `folder` stays valid */
void kvp_prepare_stop(void);                /* the thread has ended, and nothing more is prepared */
void kvp_prepare_forget(void);              /* nothing is being made; what was wanted is wanted no longer */
void kvp_prepare_in_child(void);
void kvp_prepare_close(void); /* the run folder is told what was done */

/* Of a buffer that may have been prepared: it is about to be kept; the program has it; it is let go. */
void kvp_prepare_made(void *memory, uint64_t bytes);
void kvp_prepare_taken(void *memory);
void kvp_prepare_gone(void *memory);
/* The program asks for so much, and none is kept. 1: it is to look once more; 0: there will be none before `until_ns`.
 * `turn` is the caller's, 0 at first. */
int kvp_prepare_awaits(uint64_t bytes, uint64_t *turn, uint64_t until_ns);

/* recycle.c, on the thread that prepares: pages are kept; such a buffer is registered, and kept or gone. 1: it is.
 * 0: not now. -1: never. */
struct preparing {
    uint64_t bytes;
    void *context;
    uint32_t threads; /* 0: as many as it finds best */
    const atomic_int *stop;
};
int kvp_recycle_prepare(const struct preparing *what);
int kvp_recycle_register(void *memory, void *context);
void kvp_recycle_unprepare(void *memory); /* it is let go, if it is kept still */
int kvp_recycle_prepares(void **context); /* whether that may be for who calls, in its context */

#define KVP_MAPPED(NATIVE)                                                                                             \
    ({                                                                                                                 \
        int mapped = (NATIVE);                                                                                         \
        if (unlikely(kvp_watch.recycles) && !mapped) kvp_prepare_mapped(pointer, bytes, __builtin_return_address(0));  \
        mapped;                                                                                                        \
    })
#define KVP_UNMAPPED(NATIVE)                                                                                           \
    ({                                                                                                                 \
        int unmapped = (NATIVE);                                                                                       \
        if (unlikely(kvp_watch.recycles) && !unmapped) kvp_prepare_unmapped(pointer);                                  \
        unmapped;                                                                                                      \
    })

#endif
