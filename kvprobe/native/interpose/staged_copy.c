/* One pageable copy by way of pinned slots: several threads move its chunks between the program's memory and the slots,
 * the caller has the device move them between the slots and its own.
 *
 * Only the caller calls CUDA. It takes chunks, too, so that a copy ends even where no helper comes: in a child of a
 * raw clone(2), on a machine without a core to spare. A helper touches the program's memory only between the beginning
 * and the end of the caller's call.
 *
 * Of a store into memory whose pages are not there yet (STAGING_FRESH) helpers make the pages first, a little ahead of
 * the chunks, as huge ones where the kernel gives such, on the caller's NUMA node: one thread that meets them one by
 * one stores 1.4 GB/s on the host of an H100, whatever the link carries. */
#define _GNU_SOURCE
#include "staging.h"

#include "../src/kvp_signals.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23 /* Linux 5.14 */
#endif
#define SMALLEST_CHUNK (64u << 10)
#ifndef STAGING_HELPERS
#define STAGING_HELPERS 18
#endif
/* Those that help with a copy to or from pages that are there: to make pages takes more threads. */
#define OF_LARGE(all) (((all) * 2 + 2) / 3)
#define OF_SMALL(all) (((all) + 1) / 2)
#define PAGES_AT_A_TIME (2u << 20) /* a huge page, at its border */
#define PAGES_AHEAD (32u << 20)
#define NODE_WORDS 16 /* of a mask of NUMA nodes */
enum { DEFAULT_POLICY = 0, PREFERRED = 1 };

static uint8_t *slots_at;
static uint32_t slot_count;
static unsigned helper_count;
static void *pending[STAGING_SLOTS]; /* the event behind the slot's last copy; NULL: it is over. The caller's alone */

/* The copy that is being made. Set while `open` is 0 and no helper is inside. */
static struct {
    _Atomic uint32_t turn; /* counts copies; helpers sleep on it */
    _Atomic uint32_t open, inside;
    uint8_t *host;
    size_t bytes, chunk;
    uint32_t chunks;
    int to_device, fresh;
    _Atomic uint64_t pages; /* up to here they are there, or somebody makes them */
    int policy;             /* of the caller, for where pages lie */
    uint64_t nodes[NODE_WORDS];
    _Atomic uint32_t next, limit;          /* chunks below `limit` may be moved, those below `next` are taken */
    _Atomic uint32_t moved[STAGING_SLOTS]; /* 1 + the chunk that was moved from or to this slot last */
} job;

static inline uint8_t *slot(uint32_t chunk) { return slots_at + (size_t)(chunk % slot_count) * STAGING_SLOT_BYTES; }

static inline size_t size_of(uint32_t chunk) {
    size_t left = job.bytes - (size_t)chunk * job.chunk;
    return left < job.chunk ? left : job.chunk;
}

/* 1: a chunk was moved. 0: there is none to be had. */
static int move_one(void) {
    uint32_t n = atomic_load(&job.next);
    do
        if (n >= atomic_load(&job.limit)) return 0;
    while (!atomic_compare_exchange_weak(&job.next, &n, n + 1));
    uint8_t *theirs = job.host + (size_t)n * job.chunk;
    if (job.to_device)
        memcpy(slot(n), theirs, size_of(n));
    else
        memcpy(theirs, slot(n), size_of(n));
    atomic_store_explicit(&job.moved[n % slot_count], n + 1, memory_order_release);
    return 1;
}

/* 1: pages were made that the next chunks go to. 0: enough of them are there. */
static int make_pages(void) {
    uint64_t end = (uint64_t)(uintptr_t)job.host + job.bytes, at = atomic_load(&job.pages), from, to;
    do {
        uint64_t now = (uint64_t)(uintptr_t)job.host + (uint64_t)atomic_load(&job.next) * job.chunk;
        from = at > now ? at : now & ~(uint64_t)4095;
        if (from >= end || from > now + PAGES_AHEAD) return 0;
        to = (from | (PAGES_AT_A_TIME - 1)) + 1;
        if (to > end) to = (end + 4095) & ~(uint64_t)4095;
    } while (!atomic_compare_exchange_weak(&job.pages, &at, to));
    /* where that is refused, memcpy meets them one by one */
    if (madvise((void *)(uintptr_t)from, to - from, MADV_POPULATE_WRITE)) atomic_store(&job.pages, UINT64_MAX);
    return 1;
}

/* As the caller's thread has it; by default pages lie where the thread runs that makes them. */
static void take_over_policy(void) { syscall(SYS_set_mempolicy, job.policy, job.nodes, NODE_WORDS * 64 + 1); }

static void look_at_policy(void) {
    unsigned node = 0;
    job.policy = -1;
    memset(job.nodes, 0, sizeof job.nodes);
    if (syscall(SYS_get_mempolicy, &job.policy, job.nodes, NODE_WORDS * 64, NULL, 0)) job.policy = -1;
    if (job.policy != DEFAULT_POLICY || syscall(SYS_getcpu, NULL, &node, NULL) || node >= NODE_WORDS * 64) return;
    job.policy = PREFERRED;
    job.nodes[node / 64] |= (uint64_t)1 << node % 64;
}

static inline void pause_once(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#else
    __asm__ volatile("" ::: "memory");
#endif
}

static inline void relax(unsigned *spins) {
    if (++*spins % 128 == 0)
        sched_yield();
    else
        pause_once();
}

void kvp_staging_pause(void) {
    for (int i = 0; i < 32; i++) pause_once();
    sched_yield();
}

/* ---- helpers --------------------------------------------------------------------------------------------------- */

static void *help(void *unused) {
    (void)unused;
    prctl(PR_SET_NAME, "kvprobe-staging");
    for (;;) {
        uint32_t seen = atomic_load(&job.turn);
        unsigned spins = 0;
        atomic_fetch_add(&job.inside, 1);
        if (atomic_load(&job.open) && job.fresh && job.policy >= 0) take_over_policy();
        while (atomic_load(&job.open) && atomic_load(&job.next) < job.chunks)
            if (!(job.fresh && make_pages()) && !move_one()) relax(&spins);
        atomic_fetch_sub(&job.inside, 1);
        syscall(SYS_futex, &job.turn, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0);
    }
    return NULL;
}

int kvp_staging_open(uint8_t *memory, uint32_t slots, unsigned helpers) {
    slots_at = memory;
    slot_count = slots < STAGING_SLOTS ? slots : STAGING_SLOTS;
    if (helpers > STAGING_HELPERS) helpers = STAGING_HELPERS;
    sigset_t were;
    kvp_block_signals(&were);
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    pthread_attr_setstacksize(&attributes, 256 << 10);
    for (unsigned i = 0; i < helpers; i++) {
        pthread_t thread;
        helper_count += !pthread_create(&thread, &attributes, help, NULL);
    }
    pthread_attr_destroy(&attributes);
    pthread_sigmask(SIG_SETMASK, &were, NULL);
    return helper_count == helpers ? 0 : -1;
}

unsigned kvp_staging_threads(void) { return helper_count + 1; }

int kvp_staging_is_free(void) { return !atomic_load(&job.inside); }

static void begin(int to_device, uint8_t *host, size_t bytes, unsigned how) {
    int fresh = !to_device && how & STAGING_FRESH;
    unsigned helpers = fresh ? helper_count : how & STAGING_LARGE ? OF_LARGE(helper_count) : OF_SMALL(helper_count);
    size_t chunk = bytes / (2 * (helpers + 1)) + 1;
    chunk = (chunk + SMALLEST_CHUNK - 1) & ~(size_t)(SMALLEST_CHUNK - 1);
    job.chunk = chunk < STAGING_SLOT_BYTES ? chunk : STAGING_SLOT_BYTES;
    job.host = host;
    job.bytes = bytes;
    job.to_device = to_device;
    job.fresh = fresh;
    if (fresh) look_at_policy();
    atomic_store(&job.pages, 0);
    job.chunks = (uint32_t)((bytes + job.chunk - 1) / job.chunk);
    for (uint32_t i = 0; i < slot_count; i++) atomic_store(&job.moved[i], 0);
    atomic_store(&job.next, 0);
    atomic_store(&job.limit, 0);
    atomic_store(&job.open, 1);
    atomic_fetch_add(&job.turn, 1);
    unsigned wanted = job.chunks - 1 < helpers ? job.chunks - 1 : helpers;
    if (wanted) syscall(SYS_futex, &job.turn, FUTEX_WAKE_PRIVATE, wanted, NULL, NULL, 0);
}

/* The device is all that is waited for, and somebody may hold it up until this call has returned. 1: it goes on. */
static int wait_for_device(uint64_t *since) {
    uint64_t now = kvp_clock();
    if (!*since) *since = now;
    kvp_staging_pause();
    return now - *since < STAGING_MOST_WAIT_NS;
}

/* After an error: nothing of the program's memory is touched from here on. */
static void abandon(void) {
    unsigned spins = 0;
    atomic_store(&job.limit, 0);
    atomic_store(&job.open, 0);
    while (atomic_load(&job.inside)) relax(&spins);
}

/* ---- the caller ------------------------------------------------------------------------------------------------ */

/* 0: the device is done with the slot's last copy. */
static int slot_state(uint32_t chunk) {
    void **last = &pending[chunk % slot_count];
    int error = *last ? kvp_driver.cuEventQuery(*last) : 0;
    if (!error) *last = NULL;
    return error;
}

int kvp_staging_drain(uint64_t until_ns) {
    for (uint32_t i = 0; i < slot_count; i++) {
        int error;
        while ((error = slot_state(i)) == STAGING_NOT_READY)
            if (kvp_clock() < until_ns)
                kvp_staging_pause();
            else
                return error;
        pending[i] = NULL; /* an error: the next copy finds it, too */
    }
    return 0;
}

static int moved(uint32_t chunk) {
    return atomic_load_explicit(&job.moved[chunk % slot_count], memory_order_acquire) == chunk + 1;
}

static int submit(const staging_events *events, uint64_t device, uint32_t chunk, void *stream) {
    device += (uint64_t)chunk * job.chunk;
    int error = job.to_device ? kvp_driver.cuMemcpyHtoDAsync_v2(device, slot(chunk), size_of(chunk), stream)
                              : kvp_driver.cuMemcpyDtoHAsync_v2(slot(chunk), device, size_of(chunk), stream);
    if (!error) error = kvp_driver.cuEventRecord(events->events[chunk % slot_count], stream);
    pending[chunk % slot_count] = events->events[chunk % slot_count];
    return error;
}

/* Returns when the last chunk is in its slot and submitted: the program may change its memory. */
static int load(const staging_events *events, uint64_t device, void *stream) {
    uint32_t submitted = 0, limit = 0;
    uint64_t since = 0;
    unsigned spins = 0;
    while (submitted < job.chunks) {
        while (limit < job.chunks && limit < submitted + slot_count) {
            int error = slot_state(limit);
            if (error == STAGING_NOT_READY) break;
            if (error) return error;
            atomic_store(&job.limit, ++limit);
        }
        if (moved(submitted)) {
            int error = submit(events, device, submitted++, stream);
            if (error) return error;
            since = 0;
        } else if (submitted == limit) {
            if (!wait_for_device(&since)) return STAGING_NOT_READY;
        } else if (!move_one())
            relax(&spins);
    }
    return 0;
}

/* Returns when all bytes have arrived in the program's memory. */
static int store(const staging_events *events, uint64_t device, void *stream) {
    uint32_t submitted = 0, limit = 0, finished = 0;
    uint64_t since = 0;
    unsigned spins = 0;
    while (finished < job.chunks) {
        while (submitted < job.chunks && submitted < finished + slot_count) {
            int error = slot_state(submitted);
            if (error == STAGING_NOT_READY) break;
            if (!error) error = submit(events, device, submitted++, stream);
            if (error) return error;
        }
        while (limit < submitted) {
            int error = slot_state(limit);
            if (error == STAGING_NOT_READY) break;
            if (error) return error;
            atomic_store(&job.limit, ++limit);
            since = 0;
        }
        while (finished < limit && moved(finished)) finished++;
        if (finished == limit && finished < job.chunks) {
            if (!wait_for_device(&since)) return STAGING_NOT_READY;
        } else if (finished < job.chunks && !move_one())
            relax(&spins);
    }
    return 0;
}

int kvp_staged_copy(const staging_events *events, int to_device, uint64_t device, uint8_t *host, size_t bytes,
                    void *stream, unsigned how) {
    begin(to_device, host, bytes, how);
    int error = to_device ? load(events, device, stream) : store(events, device, stream);
    if (error)
        abandon();
    else
        atomic_store(&job.open, 0);
    return error;
}
