/* What a call needs of its thread, in a cache line, and a copy in another: a driver's work evicts lines between two
 * calls, and each that has to come back costs its call. Inside one library only; the clock's fast path is here so that
 * it needs no call. */
#ifndef KVP_THREAD_H
#define KVP_THREAD_H

#include "kvp.h"

#define KVP_HIDDEN __attribute__((visibility("hidden")))

/* The driver's work evicts code, too: what every call runs lies together, without what few calls run in between. */
#define KVP_HOT __attribute__((hot))
#define KVP_RARE __attribute__((cold, noinline))

/* dlopen aligns an initial-exec variable as the C library aligns a thread's control block, and refuses one that wants
 * more: 64 bytes on x86-64, 16 on aarch64. */
#if defined(__x86_64__)
#define KVP_THREAD_ALIGNED __attribute__((aligned(64)))
#else
#define KVP_THREAD_ALIGNED
#endif

struct kvp_range { /* of addresses, of one kind of memory (interposer: memory.c) */
    uint64_t start, size;
    uint8_t kind, node; /* enum kvp_memory; of NUMA, plus one: 0 where it was not asked or not told */
};

struct kvp_thread {
    uint64_t ticks, ns, scale; /* the clock's base pair; scale: ns per tick, 32.32 fixed point */
    void *section;             /* ring.c: this thread's section, and the epoch of the file it is in */
    void *marked;              /* interposer: the stream that it submitted to last, in marks.c */
    uint64_t launches;         /* interposer: kernel launches that this thread has made */
    uint32_t epoch;
    uint32_t ended; /* interposer: the newest timed call's end, in 1024 ns; 0: there was none */
    union {
        struct {
            uint16_t node;   /* interposer: NUMA node of the host side of this copy, plus one; 0: not known */
            uint16_t mark;   /* interposer: this call's return wants kvp_mark_after */
            uint32_t inside; /* interposer: the runtime's own calls to the driver belong to the call that made them */
        };
        uint64_t doing; /* all three. 0 between two calls, stored in one: it is asked in one */
    };
    /* The second line, of copies: interposer, memory.c */
    struct kvp_range src, dst; /* that the newest source and destination were found in */
    uint32_t generation;       /* of what is known of memory, here and there */
} KVP_THREAD_ALIGNED;

/* What it needs of its process, in another. */
struct kvp_process {
    uint64_t renew_ticks;    /* clock.c */
    struct kvp_alive *alive; /* ring.c: what the kernel makes 0 in a child */
    uint64_t slow_ns;        /* ring.c */
} __attribute__((aligned(64)));

extern KVP_HIDDEN __thread struct kvp_thread kvp_thread __attribute__((tls_model("initial-exec")));
extern KVP_HIDDEN struct kvp_process kvp_process;

KVP_HIDDEN KVP_RARE uint64_t kvp_renew_clock(void);

static inline uint64_t kvp_ticks(void) {
#if defined(__x86_64__)
    return __builtin_ia32_rdtsc(); /* __rdtsc: its header would be nine tenths of what each file compiles */
#elif defined(__aarch64__)
    uint64_t v;
    __asm__ volatile("mrs %0, cntvct_el0" : "=r"(v));
    return v;
#else
    return 0;
#endif
}

/* kvp_now_ns, inline. */
static inline uint64_t kvp_clock(void) {
    const struct kvp_thread *t = &kvp_thread;
    uint64_t passed = kvp_ticks() - t->ticks;
    if (__builtin_expect(passed >= kvp_process.renew_ticks, 0)) return kvp_renew_clock(); /* a thread's first, too */
    return t->ns + ((passed * t->scale) >> 32); /* passed < 2 ms of ticks: no overflow */
}

#endif
