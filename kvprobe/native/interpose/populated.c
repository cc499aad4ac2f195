/* The cure of slow pinning: large pinned memory whose pages several threads make before it is registered.
 *
 * A driver that allocates pinned memory makes its pages on one thread, 2 to 3 GB a second, with the context's lock
 * held. Here the pages are made first (src/populate.c), without any lock of the driver's, and one call registers them:
 * 20 to 30 ms a GiB, which other threads wait for. It is one call because a copy over two registrations is refused.
 *
 * WHAT A PROGRAM MAY RELY ON, and does with this
 * - What CUDA answers about such memory, it answers as of its own: the first time that flags are asked for, a small
 *   sample is allocated by the program's own function, and all answers of the driver about it are compared with those
 *   about memory made here. Where one differs, and with write-combined memory, these flags are the runtime's.
 * - A forked child reads it, as it reads the runtime's: the memory is shared, and in no core dump.
 * - Whatever cannot be had (pages, registration) is asked of the runtime, and its result is the result.
 * - Pages are on the calling thread's NUMA node, unless the program has said where memory is to be.
 * - A limit of a cgroup counts these pages, and may not count those that a driver makes: so nothing is made here unless
 *   as much again is left below it, and the reserve; where KVPROBE_POPULATE_BYTES is a number, the reserve alone.
 * - What is registered is given back by whatever the program frees pinned memory with.
 *
 * WHAT IS OTHERWISE: the process's resident memory counts it, and its map names it /dev/zero. A context that is
 * destroyed takes the registration, and then this takes the memory.
 *
 * Huge pages alone pay: where the kernel gives none, and where a byte made here costs more than three quarters of what
 * one of the sample did, all further memory is the runtime's. */
#define _GNU_SOURCE
#include "populated.h"

#include "../src/host_memory.h"
#include "staging.h"

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#define FROM (16u << 20)        /* what is smaller is soon made */
#define SAMPLE_BYTES (2u << 20) /* freed where memory is short: that waits for the device */
#define CHUNK (16u << 20)       /* the kernel keeps others from mapping memory while one is made: 2 to 10 ms */
#define AHEAD_CHUNK (4u << 20)  /* nobody waits for it */
#define SHOWS_THREADS (64u << 20)
#define JUDGED 3 /* buffers, before it is asked whether it pays */
#define PAYS 0.75
#define SLOW "several threads do not allocate pinned memory faster"
#define KINDS 4 /* of flags: portable, mapped */

enum { WRITE_COMBINED = 4, FLAGS_OF_KIND = 3 };
enum { DEFAULT_POLICY = 0 };

struct pinning_driver kvp_pinning_driver;
#define driver kvp_pinning_driver

typedef struct {
    void *memory;
    uint64_t bytes, populate_ns;
    void *context;
    int ahead; /* a forked child does not have it */
    int registered;
} one;

enum known { NOT_YET, EQUAL, DIFFERENT };

static const char *folder;
static struct {
    pthread_mutex_t lock, comparing; /* of what follows; held while samples are made and compared */
    one *all;
    uint32_t count, room;
    enum known kinds[KINDS];
    void *samples[KINDS];
    unsigned as_flags[KINDS]; /* what they are registered with */
    double as_it_was;         /* ns a byte, of the samples */
    uint64_t from;            /* bytes */
    int forced;               /* the environment says from where on: it is not asked whether it pays */
    uint32_t threads[2], made[2];
    double took[2]; /* ns a byte, by so many threads */
    uint64_t bytes, populate_ns, register_ns, longest_ns;
    uint32_t buffers, refused;
    int told;
} state = {.lock = PTHREAD_MUTEX_INITIALIZER, .comparing = PTHREAD_MUTEX_INITIALIZER};

static void no_longer(const char *why, int error) {
    if (!(atomic_fetch_and(&kvp_watch.recycles, ~KVP_POPULATES) & KVP_POPULATES)) return; /* it has been said */
    if (error)
        kvp_decision(folder, "rollback", "populated", "as it is", 0, "%s (error %d)", why, error);
    else
        kvp_decision(folder, "rollback", "populated", "as it is", 0, "%s", why);
}

/* ---- start and end ---------------------------------------------------------------------------------------------- */

int kvp_populated_start(const char *run_folder) {
    const char *bytes = getenv("KVPROBE_POPULATE_BYTES");
    char *end;
    state.from = FROM;
    if (bytes && strcmp(bytes, "auto")) {
        state.from = strtoull(bytes, &end, 10);
        state.forced = 1;
        if (!*bytes || *bytes == '-' || *end || !state.from) return 0;
    }
    uint32_t cores = kvp_processors();
    state.threads[0] = cores < 4 ? cores : 4;
    state.threads[1] = cores / 2 > 8 ? 8 : cores / 2 > state.threads[0] ? cores / 2 : state.threads[0];
    folder = run_folder;
    return 1;
}

void kvp_populated_in_child(void) {
    pthread_mutex_init(&state.lock, NULL);
    pthread_mutex_init(&state.comparing, NULL);
    state.count = 0; /* what it inherits is its parent's */
}

void kvp_populated_close(void) {
    if (!state.buffers) return;
    kvp_decision(
        folder, "note", NULL, NULL, 0,
        "for %u pinned buffers of %.3f GB, up to %u threads made the pages in %.3f s, and registering them took "
        "%.3f s (the longest %.1f ms); the CUDA runtime alone would take about %.3f s; it allocated %u buffers itself",
        state.buffers, (double)state.bytes / 1e9, state.threads[state.threads[1] != state.threads[0]],
        (double)state.populate_ns / 1e9, (double)state.register_ns / 1e9, (double)state.longest_ns / 1e6,
        state.as_it_was * (double)state.bytes / 1e9, state.refused);
}

/* ---- the registry ----------------------------------------------------------------------------------------------- */

static int remember(const one *o) {
    pthread_mutex_lock(&state.lock);
    if (state.count == state.room) {
        uint32_t room = state.room ? 2 * state.room : 64;
        one *more = realloc(state.all, room * sizeof *more);
        if (more) state.all = more, state.room = room;
    }
    int fits = state.count < state.room;
    if (fits) state.all[state.count++] = *o;
    pthread_mutex_unlock(&state.lock);
    return fits;
}

static int find(const void *memory, one *found, int take) {
    int there = 0;
    pthread_mutex_lock(&state.lock);
    for (uint32_t i = state.count; i-- && !there;)
        if (state.all[i].memory == memory) {
            *found = state.all[i];
            if (take) state.all[i] = state.all[--state.count];
            there = 1;
        }
    pthread_mutex_unlock(&state.lock);
    return there;
}

int kvp_populated_is(const void *pointer) {
    one found;
    return find(pointer, &found, 0);
}

/* Taken out first: as soon as it is unmapped, its address may be another's. */
int kvp_populated_free(void *pointer) {
    one found;
    void *current = NULL;
    if (!find(pointer, &found, 1)) return -1;
    if (!found.registered) return kvp_unpopulate(found.memory, found.bytes), 0;
    driver.cuCtxGetCurrent(&current);
    if (!current) driver.cuCtxSetCurrent(found.context);
    int error = driver.cuMemHostUnregister(pointer);
    if (!current) driver.cuCtxSetCurrent(NULL);
    if (error)
        remember(&found); /* the device may still reach it */
    else
        kvp_unpopulate(found.memory, found.bytes);
    return error;
}

enum { CONTEXT = 1, MEMORY_TYPE, DEVICE_POINTER, HOST_POINTER, IS_MANAGED = 8, ORDINAL, START = 11, SIZE };
enum { ANSWERS = 8, HOST = 1 };

static int memory_type(const void *memory, uint32_t *type) {
    int attributes[] = {MEMORY_TYPE};
    void *data[] = {type};
    return driver.cuPointerGetAttributes(1, attributes, data, (uint64_t)(uintptr_t)memory);
}

void kvp_populated_context_ended(void) {
    pthread_mutex_lock(&state.lock);
    memset(state.kinds, 0, sizeof state.kinds); /* the samples were its own */
    memset(state.samples, 0, sizeof state.samples);
    pthread_mutex_unlock(&state.lock);
    for (uint32_t i = 0;;) {
        pthread_mutex_lock(&state.lock);
        one o = i < state.count ? state.all[i] : (one){0};
        pthread_mutex_unlock(&state.lock);
        uint32_t type = HOST;
        if (!o.memory) return;
        if (!o.registered || memory_type(o.memory, &type) || type == HOST)
            i++; /* no context's, or another's */
        else if (find(o.memory, &o, 1))
            kvp_unpopulate(o.memory, o.bytes);
    }
}

/* ---- as the runtime's own ---------------------------------------------------------------------------------------- */

/* Answers of the driver about memory at `at`; addresses count from there. */
static int answers_about(const void *at, uint64_t bytes, uint64_t answers[ANSWERS], unsigned *flags) {
    uint64_t place = (uint64_t)(uintptr_t)at;
    int attributes[ANSWERS] = {CONTEXT, MEMORY_TYPE, DEVICE_POINTER, HOST_POINTER, IS_MANAGED, ORDINAL, START, SIZE};
    void *data[ANSWERS];
    for (int i = 0; i < ANSWERS; i++) data[i] = &answers[i], answers[i] = 0;
    if (driver.cuPointerGetAttributes(ANSWERS, attributes, data, place)) return -1;
    if (driver.cuMemHostGetFlags(flags, (void *)(uintptr_t)at)) return -1;
    answers[2] -= place, answers[3] -= place, answers[6] -= place, answers[7] -= bytes;
    return 0;
}

/* Whether memory made here with these flags is told from the runtime's by nothing. */
static enum known compare(unsigned flags, const void *sample, unsigned *as_flags, uint32_t *differ) {
    kvp_populating how = {.threads = 1, .node = -1, .fork = KVP_FORK_SHARED, .pages = KVP_PAGES_SMALL};
    uint64_t theirs[ANSWERS], ours[ANSWERS];
    unsigned their_flags = 0, our_flags = 0;
    enum known known = DIFFERENT;
    if (answers_about(sample, SAMPLE_BYTES, theirs, &their_flags)) return DIFFERENT;
    void *memory = kvp_populate(SAMPLE_BYTES, &how);
    if (!memory) return NOT_YET;
    const unsigned tried[] = {their_flags & FLAGS_OF_KIND, flags & FLAGS_OF_KIND};
    for (int i = 0; i < 2 && known != EQUAL; i++) {
        if (driver.cuMemHostRegister(memory, SAMPLE_BYTES, tried[i])) continue;
        *differ =
            answers_about(memory, SAMPLE_BYTES, ours, &our_flags) ? 1u << 31 : (our_flags != their_flags) << ANSWERS;
        for (int k = 0; k < ANSWERS; k++) *differ |= (uint32_t)(ours[k] != theirs[k]) << k;
        if (!*differ) known = EQUAL, *as_flags = tried[i];
        if (driver.cuMemHostUnregister(memory)) return DIFFERENT; /* stays */
    }
    kvp_unpopulate(memory, SAMPLE_BYTES);
    return known;
}

/* The runtime's last error, which a sample that was refused has set: the program's call is made next. */
static void clear_error(any_fn *alloc) {
    int (*last)(void) = (int (*)(void))kvp_symbol_beside((void *)alloc, "cudaGetLastError");
    if (last) last();
}

static enum known known_of(unsigned flags) {
    pthread_mutex_lock(&state.lock);
    enum known known = state.kinds[flags];
    pthread_mutex_unlock(&state.lock);
    return known;
}

/* The sample that a comparison without an end has left, or a new one; NULL: the runtime has none. */
static void *sample_of(unsigned flags, any_fn *alloc) {
    typedef int alloc_fn(void **, size_t, unsigned);
    pthread_mutex_lock(&state.lock);
    void *sample = state.samples[flags];
    state.samples[flags] = NULL;
    pthread_mutex_unlock(&state.lock);
    if (sample) return sample;
    uint64_t since = kvp_clock();
    if (((alloc_fn *)alloc)(&sample, SAMPLE_BYTES, flags)) {
        clear_error(alloc);
        return NULL;
    }
    double each = (double)(kvp_clock() - since) / SAMPLE_BYTES;
    pthread_mutex_lock(&state.lock);
    if (state.as_it_was == 0 || each < state.as_it_was) state.as_it_was = each;
    pthread_mutex_unlock(&state.lock);
    return sample;
}

/* One thread at a time: of two samples one would be nobody's. */
static int is_equal(unsigned flags, any_fn *alloc) {
    unsigned as_flags = 0;
    uint32_t differ = 0;
    enum known known = known_of(flags);
    if (known != NOT_YET) return known == EQUAL;
    pthread_mutex_lock(&state.comparing);
    known = known_of(flags);
    void *sample = known == NOT_YET ? sample_of(flags, alloc) : NULL;
    if (sample) {
        known = compare(flags, sample, &as_flags, &differ);
        pthread_mutex_lock(&state.lock);
        state.kinds[flags] = known;
        state.samples[flags] = sample;
        state.as_flags[flags] = as_flags;
        pthread_mutex_unlock(&state.lock);
    }
    pthread_mutex_unlock(&state.comparing);
    if (sample && known == DIFFERENT)
        kvp_decision(folder, "refuse", NULL, NULL, 0,
                     "pinned memory with flags %u is left to the CUDA runtime: the driver can tell it from registered "
                     "memory (%x)",
                     flags, differ);
    return known == EQUAL;
}

uint64_t kvp_populated_as_it_is_ns(uint64_t bytes) {
    pthread_mutex_lock(&state.lock);
    double each = state.as_it_was;
    pthread_mutex_unlock(&state.lock);
    return (uint64_t)(each * (double)bytes);
}

static void *taken_sample(void) {
    void *found = NULL;
    pthread_mutex_lock(&state.lock);
    for (int i = 0; i < KINDS && !found; i++) {
        found = state.samples[i];
        state.samples[i] = NULL;
    }
    pthread_mutex_unlock(&state.lock);
    return found;
}

int kvp_populated_free_samples(void) {
    int some = 0;
    for (void *sample; (sample = taken_sample()); some = 1) driver.cuMemFreeHost(sample);
    return some;
}

/* ---- one buffer -------------------------------------------------------------------------------------------------- */

/* The calling thread's NUMA node; -1 where the program has said where its memory is to be. */
static int node_here(void) {
    unsigned cpu, node = 0;
    int policy = DEFAULT_POLICY;
    if (syscall(SYS_get_mempolicy, &policy, NULL, 0, NULL, 0) || policy != DEFAULT_POLICY) return -1;
    return syscall(SYS_getcpu, &cpu, &node, NULL) ? -1 : (int)node;
}

static int has_room(uint64_t bytes) {
    kvp_memory memory = kvp_memory_left("");
    uint64_t machine = (uint64_t)sysconf(_SC_PHYS_PAGES) * (uint64_t)sysconf(_SC_PAGESIZE);
    uint64_t reserve = kvp_memory_reserve(&memory);
    int limited = !state.forced && memory.total_bytes + memory.total_bytes / 16 < machine;
    return memory.left_bytes > reserve && memory.left_bytes - reserve >= bytes &&
           (!limited || memory.left_bytes - reserve - bytes >= bytes);
}

/* Lock held: which number of threads is to be tried. */
static int which_threads(void) {
    if (state.threads[0] == state.threads[1]) return 0;
    if (state.made[0] < 2 || state.made[1] < 2) return state.made[0] < state.made[1] ? 0 : 1;
    return state.took[1] < state.took[0];
}

/* Lock held. Whether it takes longer than as it is; the pages alone say it before anything is registered. */
static int is_slow(const one *o, uint64_t register_ns) {
    double in_all = (double)(state.populate_ns + state.register_ns) / (double)state.bytes;
    double each = (double)(o->populate_ns + register_ns) / (double)o->bytes;
    return !state.forced && state.as_it_was > 0 && state.buffers >= JUDGED && in_all > PAYS * state.as_it_was &&
           each > state.as_it_was;
}

static void note_pages(const one *o, int by) {
    double each = (double)o->populate_ns / (double)o->bytes;
    pthread_mutex_lock(&state.lock);
    if (by >= 0 && o->bytes >= SHOWS_THREADS)
        state.took[by] = state.made[by]++ ? 0.5 * state.took[by] + 0.5 * each : each;
    state.buffers++;
    state.bytes += o->bytes;
    state.populate_ns += o->populate_ns;
    int fails = is_slow(o, 0);
    pthread_mutex_unlock(&state.lock);
    if (fails) no_longer(SLOW, 0);
}

static void note_registered(const one *o, uint64_t ns) {
    pthread_mutex_lock(&state.lock);
    state.register_ns += ns;
    if (ns > state.longest_ns) state.longest_ns = ns;
    int fails = is_slow(o, ns), tell = !state.told++;
    double was = state.as_it_was * (double)o->bytes, is = (double)(o->populate_ns + ns);
    pthread_mutex_unlock(&state.lock);
    if (tell)
        kvp_decision(folder, "keep", "as it is", "populated", was / is,
                     "%llu bytes of pinned memory were allocated in %.3f ms instead of about %.3f ms",
                     (unsigned long long)o->bytes, is / 1e6, was / 1e6);
    if (fails) no_longer(SLOW, 0);
}

/* All of it is forked or none: at a border within a huge page that would be taken out of the page table again. */
static size_t whole(uint64_t bytes) { return (bytes + KVP_HUGE_PAGE - 1) & ~(uint64_t)(KVP_HUGE_PAGE - 1); }

/* Nothing is left where it says 0. */
static int make_pages(one *o, const struct populating_ahead *ahead) {
    pthread_mutex_lock(&state.lock);
    int by = ahead && ahead->threads ? -1 : which_threads();
    uint32_t threads = by < 0 ? ahead->threads : state.threads[by];
    uint64_t share = o->bytes / (2 * threads), most = ahead ? AHEAD_CHUNK : CHUNK;
    kvp_populating how = {.chunk_bytes = share < KVP_HUGE_PAGE ? KVP_HUGE_PAGE
                                         : share < most        ? share
                                                               : most,
                          .threads = threads,
                          .stop = ahead ? ahead->stop : NULL,
                          .node = node_here(),
                          .pages = state.forced ? KVP_PAGES_ANY : KVP_PAGES_HUGE,
                          .fork = KVP_FORK_SHARED};
    pthread_mutex_unlock(&state.lock);
    uint64_t began = kvp_clock();
    o->memory = kvp_populate(o->bytes, &how);
    if (!o->memory) {
        if (errno == EOPNOTSUPP) no_longer("this kernel gives no huge pages of shared memory", 0);
        return 0;
    }
    o->populate_ns = kvp_clock() - began;
    o->ahead = ahead && !madvise(o->memory, whole(o->bytes), MADV_DONTFORK);
    note_pages(o, by);
    return 1;
}

static int register_pages(one *o, unsigned flags) {
    pthread_mutex_lock(&state.lock);
    unsigned as_flags = state.as_flags[flags];
    pthread_mutex_unlock(&state.lock);
    uint64_t began = kvp_clock();
    if (driver.cuMemHostRegister(o->memory, o->bytes, as_flags)) return 0;
    o->registered = 1;
    note_registered(o, kvp_clock() - began);
    return 1;
}

static int make(one *o, unsigned flags) {
    if (!make_pages(o, NULL)) return 0;
    int made = register_pages(o, flags);
    if (made && remember(o)) return 1;
    if (!made || !driver.cuMemHostUnregister(o->memory)) kvp_unpopulate(o->memory, o->bytes);
    return 0;
}

static void refused(void) {
    pthread_mutex_lock(&state.lock);
    state.refused++;
    pthread_mutex_unlock(&state.lock);
}

int kvp_populated_make(void **pointer, size_t bytes, unsigned flags, any_fn *alloc) {
    one o = {.bytes = bytes};
    if (bytes < state.from || flags & WRITE_COMBINED || flags >= KINDS) return 0;
    if (!(kvp_watch.recycles & KVP_POPULATES) || driver.cuCtxGetCurrent(&o.context) || !is_equal(flags, alloc))
        return 0;
    if (!has_room(bytes) || !make(&o, flags)) return refused(), 0;
    atomic_fetch_or(&kvp_watch.recycles, KVP_POPULATED);
    *pointer = o.memory;
    return 1;
}

int kvp_populated_ahead(void **pointer, size_t bytes, unsigned flags, const struct populating_ahead *how) {
    one o = {.bytes = bytes};
    if (!(kvp_watch.recycles & KVP_POPULATES) || flags & WRITE_COMBINED || flags >= KINDS) return -1;
    if (known_of(flags) == DIFFERENT) return -1;
    if (!has_room(bytes) || !make_pages(&o, how)) return 0;
    if (!remember(&o)) return kvp_unpopulate(o.memory, o.bytes), 0;
    atomic_fetch_or(&kvp_watch.recycles, KVP_POPULATED);
    *pointer = o.memory;
    return 1;
}

int kvp_populated_register(void *pointer, unsigned flags, any_fn *alloc) {
    one o;
    void *context;
    if (!(kvp_watch.recycles & KVP_POPULATES) || flags & WRITE_COMBINED || flags >= KINDS) return -1;
    if (driver.cuCtxGetCurrent(&context)) return 0;
    if (!is_equal(flags, alloc)) return known_of(flags) == DIFFERENT ? -1 : 0;
    if (!find(pointer, &o, 0)) return 0;
    o.context = context;
    if (!register_pages(&o, flags)) return 0;
    pthread_mutex_lock(&state.lock);
    for (uint32_t i = state.count; i--;)
        if (state.all[i].memory == pointer) state.all[i] = o;
    pthread_mutex_unlock(&state.lock);
    return 1;
}

void kvp_populated_handed_out(void *pointer) {
    one found;
    pthread_mutex_lock(&state.lock);
    for (uint32_t i = state.count; i--;)
        if (state.all[i].memory == pointer) {
            found = state.all[i];
            state.all[i].ahead = 0;
            if (found.ahead) madvise(found.memory, whole(found.bytes), MADV_DOFORK);
            break;
        }
    pthread_mutex_unlock(&state.lock);
}
