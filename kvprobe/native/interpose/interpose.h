/* What the interposer's files share. libkvprobe_interpose.so is preloaded by `kvprobe run`, or loaded into a
 * running process by `kvprobe attach`: it defines the CUDA calls that it watches, calls the function that the caller
 * would have reached without it, and writes one record a call.
 *
 * Rules it keeps: results, errno and argument registers pass through; no lock and no allocation on the way of a call;
 * no CUDA call that the program did not make, but for a question about a pointer (memory.c), asked after the fact;
 * anything it does not know goes through untouched. Under KVPROBE_FIX=auto, and only there, large pageable copies are
 * made another way where that pays: cures.c says with what care. */
#ifndef KVP_INTERPOSE_H
#define KVP_INTERPOSE_H

#include "thread.h"

#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <strings.h>

#define likely(x) __builtin_expect(!!(x), 1)
#define unlikely(x) __builtin_expect(!!(x), 0)

/* Of the calls that are wrapped; the core's own functions stay inside (kvp.h). */
#define CUDA_EXPORT __attribute__((visibility("default")))

#define SITES 32      /* call sites of one wrapped symbol that are remembered */
#define BOUND 3       /* functions fetched by pointer that one symbol can stand for, beside the linked one */
typedef int any_fn(); /* a CUDA function of unknown parameters */

/* A sanitizer's runtime that a program brings asks these for functions before it can be told of anything. */
#define NOT_SANITIZED __attribute__((no_sanitize("address", "thread", "undefined")))

/* One wrapped symbol. */
struct wrapped {
    const char *name;
    any_fn *exported;     /* what callers are linked to: goes to the function that their own library would give them */
    any_fn *bound[BOUND]; /* each calls exactly the function in `real` beside it */
    any_fn *_Atomic real[BOUND];
    struct {
        void *_Atomic caller;
        any_fn *_Atomic real;
    } sites[SITES]; /* return address -> function, so that two CUDA runtimes in one process stay apart */
};

extern struct wrapped kvp_wrapped[];
extern const int kvp_wrapped_count;

/* The value of a switch in the environment; kvprobe/environment.py describes the variables. */
static inline int says_no(const char *value) {
    return value && (!strcasecmp(value, "off") || !strcmp(value, "0") || !strcasecmp(value, "no") ||
                     !strcasecmp(value, "false"));
}

/* What a thread is in (kvp_thread.inside). A call of the driver inside one of the runtime is the runtime's own; any
 * other call inside a call is a signal handler's. */
enum inside { OUTSIDE, IN_KVPROBE, IN_RUNTIME, IN_DRIVER };

enum detail { DETAIL_TOTALS, DETAIL_COPIES, DETAIL_LAUNCHES };

/* What every call asks, in one cache line. Any thread may look while a debugger's attaches or detaches. */
struct watch {
    atomic_int on;          /* 1 while this process is to be recorded; what else a call needs is there before it */
    atomic_int detail;      /* enum detail */
    atomic_int nvtx;        /* a tool listens */
    atomic_int attached;    /* 1 while loaded libraries hold addresses of ours, 0 where we were preloaded */
    atomic_int no_driver;   /* there is none to ask about a pointer */
    atomic_int gate;        /* 1: a test forbids calls */
    atomic_int cures;       /* 1: pageable copies may go another way (cures.c) */
    atomic_int captures;    /* streams that are being captured */
    atomic_uint generation; /* of what is known of memory: freeing or registering some makes it another */
} __attribute__((aligned(64)));
extern struct watch kvp_watch;

/* wrap.c */
int kvp_batch_has_fail_index(void *real); /* of cudaMemcpyBatchAsync: CUDA 12.8's signature */

/* resolve.c: the function that `caller` would have called, NULL where there is none. */
any_fn *kvp_real(struct wrapped *w, void *caller);
struct wrapped *kvp_find_wrapped(const char *name);
/* A pointer that behaves as `found`, and is recorded; `found` itself where that cannot be. */
void *kvp_wrap_pointer(struct wrapped *w, void *found);
/* A symbol of a library that is loaded already, past any wrapper of ours. */
void *kvp_symbol_beside(const void *address, const char *name);
void *kvp_driver_symbol(const char *name);
/* The next definition behind this library. */
void *kvp_next_symbol(const char *name);

static inline any_fn *kvp_real_for(struct wrapped *w, void *caller) {
    unsigned at = (unsigned)(((uintptr_t)caller >> 2) ^ ((uintptr_t)caller >> 9)) % SITES;
    if (likely(w->sites[at].caller == caller && w->sites[at].real)) return w->sites[at].real;
    return kvp_real(w, caller);
}

/* As a library that `handle` stands for would be bound to it: the global scope first. RTLD_NEXT: behind us. */
void *kvp_symbol_of(void *handle, const char *name);
uintptr_t kvp_own_base(void);
void *kvp_dlopen(const char *file, int mode);

/* relocate.c: attaching to a running process. The number of words written that lead to recorded calls, or a negative
 * errno. */
int kvp_redirect_all(void);
int kvp_restore_all(void);
void kvp_redirect_new(void); /* in libraries that were loaded since */

/* Functions that are no CUDA calls and lead to us all the same while we are attached. children.c */
struct redirected {
    const char *name;
    any_fn *ours;
};
extern const struct redirected kvp_redirected[];
extern const int kvp_redirected_count;
int kvp_hand_on(const char *library, const char *folder, const char *detail, uint64_t max_bytes);

/* memory.c: `record->direction` completed with what is known of its addresses. `asked` is a direction, or
 * KVP_DIR_UNKNOWN to find out. */
void kvp_classify(kvp_record *record);
void kvp_fetch_ranges(void);  /* into the cache, for kvp_classify */
void kvp_forget_ranges(void); /* memory was freed or registered */
/* 1: an earlier copy of this thread showed that it is. No question is asked: 0 says nothing. */
int kvp_known_pinned(uint64_t address);

/* gate.c */
void kvp_gate(const kvp_record *record); /* of every call while kvp_watch.gate is set */

/* nvtx.c */
void kvp_nvtx_start(void);
void kvp_nvtx_range_push(const kvp_record *record);
void kvp_nvtx_range_pop(void);

#endif
