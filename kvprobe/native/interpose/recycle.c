/* The cure of pinning again and again: what a program frees of pinned memory is kept, within a budget, and handed out
 * again for the next request of its size.
 *
 * Making pinned memory costs 0.3 to 0.4 s a GiB, freeing it 0.1, each with a lock held that every other thread of the
 * process waits for. A program that puts its model to sleep and wakes it pins, copies and frees every time.
 *
 * WHAT A PROGRAM MAY RELY ON, and does with this
 * - cudaFreeHost waits for the device: so does what keeps a buffer. Where that wait fails the program's own call is
 * made.
 * - The flags are those that were asked for; a buffer serves only the context and the flags that it was made with.
 * - What it holds is not said: a program's own old bytes, where a new buffer has zeros or those of an old one.
 * - Out of memory: what is kept is freed, and the call is made again, before the program hears of it.
 * - Freeing twice, or an address inside a buffer, is refused by the runtime, as it would be.
 * - While a stream is captured: untouched, so that what CUDA refuses meanwhile is refused.
 * - The end of a context or a reset: what is kept is freed before.
 * - A child of a fork has none of it, and keeps nothing. What the program held when it forked, the child may go on
 *   using, whatever the program frees: it is not kept.
 *
 * WHAT IS OTHERWISE: memory that was freed stays mapped and pinned while it is kept: a program that reads it after it
 * has freed it does not crash. cuPointerGetAttributes names a range that may be an eighth larger than was asked for.
 *
 * WHAT IS NOT DONE: keeping memory of a process that uses several GPUs, each of whose devices the runtime's call would
 * wait for; memory of the driver's own cuMemHostAlloc.
 *
 * Measured is what making a buffer took and what handing it out takes. Where twice the budget came and went and nothing
 * was asked for again, all is freed, and no more is kept. */
#define _GNU_SOURCE
#include "recycle.h"

#include "../src/host_memory.h"
#include "populated.h"
#include "prepare.h"
#include "staging.h"

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <unistd.h>

#define SMALLEST (1u << 20) /* what is smaller is soon made */
#define OF_MEMORY 4         /* kept is at most one part in so many */
#define IN_VAIN 2           /* budgets that came and went, until nothing more is kept */
#define WATCH_MS 100
#define FLAG_BITS 4 /* of a key; the context's id stands above */
#define PAGES 1     /* the key of those that are not registered yet: prepare.c */

enum { INVALID_VALUE = 1, OUT_OF_MEMORY = 2, RELAXED = 2, HOST = 1, ALL_FLAGS = 7 };
enum { MEMORY_TYPE = 2, RANGE_START = 11, RANGE_SIZE = 12 };

#define driver kvp_pinning_driver

typedef int free_fn(void *);

/* What a kept buffer's tag points to; one for each function that freed. */
struct freeing {
    free_fn *call;
    void *context; /* for a thread that has none */
};
#define FREEINGS 16

static const char *folder;
static kvp_kept kept;
static struct {
    pthread_mutex_t lock; /* of what follows */
    kvp_kept_buffer *out; /* the program's, of at least SMALLEST; tag: `forks` when it was handed out */
    uint32_t count, room;
    struct freeing freeings[FREEINGS];
    uint64_t made_bytes, made_ns; /* what pinning took */
    uint64_t taken_ns, kept_ns;   /* handing out; keeping, the wait for the device included */
    uint64_t come_bytes;          /* kept since one was handed out */
    int told, told_end, given_up, able, pid;
} state = {.lock = PTHREAD_MUTEX_INITIALIZER};

/* ---- start and end ---------------------------------------------------------------------------------------------- */

static atomic_uintptr_t forks;
static void before_fork(void) { atomic_fetch_add(&forks, 1); }
static void *forks_now(void) { return (void *)atomic_load(&forks); }

static void in_child(void) {
    kvp_watch.recycles = 0;
    kvp_prepare_in_child();
    kvp_kept_in_child(&kept);
    kvp_populated_in_child();
    pthread_mutex_init(&state.lock, NULL);
    state.count = 0;
}

/* On whatever thread: the watching one has no context, and any may be capturing. */
static void release(void *unused, const kvp_kept_buffer *buffer) {
    (void)unused;
    const struct freeing *how = buffer->tag;
    void *current = NULL;
    int mode = RELAXED, inside = (int)kvp_thread.inside;
    driver.cuCtxGetCurrent(&current);
    if (!current) driver.cuCtxSetCurrent(how->context);
    driver.cuThreadExchangeStreamCaptureMode(&mode);
    kvp_thread.inside = IN_RUNTIME; /* the driver's calls in it are not the program's */
    kvp_prepare_gone(buffer->memory);
    if (kvp_populated_free(buffer->memory) < 0) how->call(buffer->memory);
    kvp_thread.inside = (uint32_t)inside;
    driver.cuThreadExchangeStreamCaptureMode(&mode);
    if (!current) driver.cuCtxSetCurrent(NULL);
}

static uint64_t budget(void) {
    const char *bytes = getenv("KVPROBE_KEEP_BYTES");
    char *end;
    if (!bytes || !strcmp(bytes, "auto")) return kvp_memory_left("").total_bytes / OF_MEMORY;
    uint64_t budget = strtoull(bytes, &end, 10);
    return *bytes && *bytes != '-' && !*end ? budget : 0;
}

void kvp_recycle_start(const char *run_folder) {
    kept = (kvp_kept){.budget_bytes = budget(), .root = "", .release = release, .watch_ms = WATCH_MS};
    int does = (kept.budget_bytes ? KVP_KEEPS : 0) | (kvp_populated_start(run_folder) ? KVP_POPULATES : 0);
    kvp_kept_open(&kept);
    kvp_prepare_start(run_folder);
    folder = run_folder;
    if (does && !pthread_atfork(before_fork, NULL, in_child)) kvp_watch.recycles = does;
}

/* What was made here is freed as it was made, whatever else ends. */
static void end(int what) { atomic_fetch_and(&kvp_watch.recycles, ~what); }

void kvp_recycle_stop(void) {
    int pid = state.pid;
    end(KVP_KEEPS | KVP_POPULATES);
    folder = NULL; /* nothing is written, either */
    if (!pid || pid != (int)getpid()) return;
    kvp_prepare_stop();
    kvp_kept_stop(&kept);
    kvp_kept_trim(&kept, 0);
}

/* Before the driver's own exit handlers, which are older: that thread is not to meet them. */
static void before_exit(void) {
    if (state.pid != (int)getpid()) return;
    kvp_prepare_stop();
    kvp_kept_stop(&kept);
}

void kvp_recycle_close(void) {
    if (!folder || state.told_end || !state.pid || state.pid != (int)getpid()) return;
    end(KVP_KEEPS | KVP_POPULATES);
    kvp_prepare_close();
    kvp_populated_close();
    state.told_end = 1;
    const kvp_kept_counts *c = &kept.counts;
    if (!c->kept) return;
    double as_it_was =
        state.made_bytes ? (double)c->reused_bytes * (double)state.made_ns / (double)state.made_bytes : 0;
    kvp_decision(
        folder, "note", NULL, NULL, 0,
        "%llu pinned buffers were handed out again: %.3f GB in %.6f s instead of about %.3f s; kvprobe kept at most "
        "%.0f MiB of the %.0f MiB allowed, and freed %llu buffers for newer ones and %llu when memory was short",
        (unsigned long long)c->reused, (double)c->reused_bytes / 1e9, (double)state.taken_ns / 1e9, as_it_was / 1e9,
        (double)c->most_bytes / (1 << 20), (double)kept.budget_bytes / (1 << 20), (unsigned long long)c->given_up,
        (unsigned long long)c->pressed);
}

void kvp_recycle_context_ends(void) {
    if (!kvp_watch.recycles || state.pid != (int)getpid()) return;
    int was = errno;
    kvp_prepare_forget();
    kvp_kept_trim(&kept, 0);
    pthread_mutex_lock(&state.lock);
    for (uint32_t i = 0; i < state.count; i++) kvp_kept_returned(&kept, &state.out[i]);
    state.count = 0; /* what the program still holds is the runtime's to free from now on */
    pthread_mutex_unlock(&state.lock);
    errno = was;
}

void kvp_recycle_context_ended(void) {
    int was = errno;
    if (kvp_watch.recycles && state.pid == (int)getpid()) kvp_populated_context_ended();
    errno = was;
}

/* ---- what may be kept -------------------------------------------------------------------------------------------- */

static int find_driver(void) {
    if (state.able) return state.able > 0;
    state.able = -1;
#define FIND(NAME) *(void **)&driver.NAME = kvp_driver_symbol(#NAME)
    FIND(cuCtxGetCurrent), FIND(cuCtxSetCurrent), FIND(cuCtxGetId), FIND(cuCtxSynchronize);
    FIND(cuThreadExchangeStreamCaptureMode), FIND(cuPointerGetAttributes), FIND(cuDeviceGetCount);
    FIND(cuDevicePrimaryCtxGetState), FIND(cuMemHostUnregister), FIND(cuMemHostGetFlags), FIND(cuMemFreeHost);
#undef FIND
    *(void **)&driver.cuMemHostRegister = kvp_driver_symbol("cuMemHostRegister_v2");
    if (!driver.cuMemHostRegister || !driver.cuMemHostUnregister || !driver.cuMemHostGetFlags || !driver.cuMemFreeHost)
        end(KVP_POPULATES);
    if (driver.cuCtxGetCurrent && driver.cuCtxSetCurrent && driver.cuCtxGetId && driver.cuCtxSynchronize &&
        driver.cuThreadExchangeStreamCaptureMode && driver.cuPointerGetAttributes && driver.cuDeviceGetCount) {
        state.able = 1;
        state.pid = (int)getpid();
        atexit(before_exit);
    } else {
        end(KVP_KEEPS | KVP_POPULATES);
        kvp_decision(folder, "refuse", NULL, NULL, 0,
                     "this driver lacks functions of CUDA 12: freed pinned memory is not kept");
    }
    return state.able > 0;
}

/* What may be exchanged; 0: nothing may. The context goes to `context`. */
static uint64_t key_of(unsigned flags, void **context) {
    uint64_t id = 0;
    int devices = 0, used = 0;
    if (flags > ALL_FLAGS || atomic_load(&kvp_watch.captures)) return 0;
    if (driver.cuCtxGetCurrent(context) || !*context || driver.cuCtxGetId(*context, &id)) return 0;
    if (driver.cuDeviceGetCount(&devices)) return 0;
    for (int i = 0; devices > 1 && i < devices; i++) {
        unsigned unused;
        int active = 1;
        if (!driver.cuDevicePrimaryCtxGetState || driver.cuDevicePrimaryCtxGetState(i, &unused, &active)) return 0;
        used += active != 0;
    }
    return used > 1 ? 0 : (id << FLAG_BITS | 8 | flags);
}

/* Whether it is pinned memory that begins there: whatever else the program has done with it. */
static int is_whole(const void *memory, uint64_t bytes) {
    uint32_t type = 0;
    uint64_t start = 0, size = 0;
    int attributes[] = {MEMORY_TYPE, RANGE_START, RANGE_SIZE};
    void *data[] = {&type, &start, &size};
    return !driver.cuPointerGetAttributes(3, attributes, data, (uint64_t)(uintptr_t)memory) && type == HOST &&
           start == (uint64_t)(uintptr_t)memory && size >= bytes;
}

static void note_out(const kvp_kept_buffer *buffer) {
    pthread_mutex_lock(&state.lock);
    for (uint32_t i = 0; i < state.count; i++) /* freed where nobody looked */
        if (state.out[i].memory == buffer->memory) {
            kvp_kept_returned(&kept, &state.out[i]);
            state.out[i] = state.out[--state.count];
            break;
        }
    if (state.count == state.room) {
        uint32_t room = state.room ? 2 * state.room : 64;
        kvp_kept_buffer *more = realloc(state.out, room * sizeof *more);
        if (more) state.out = more, state.room = room;
    }
    if (state.count < state.room) {
        state.out[state.count] = *buffer;
        state.out[state.count++].tag = forks_now();
    }
    pthread_mutex_unlock(&state.lock);
}

static int take_out(const void *memory, kvp_kept_buffer *found) {
    int there = 0;
    pthread_mutex_lock(&state.lock);
    for (uint32_t i = 0; i < state.count && !there; i++)
        if (state.out[i].memory == memory) {
            *found = state.out[i];
            state.out[i] = state.out[--state.count];
            there = 1;
        }
    pthread_mutex_unlock(&state.lock);
    return there;
}

/* NULL: there are too many. */
static struct freeing *freeing_of(free_fn *call, void *context) {
    struct freeing *found = NULL;
    pthread_mutex_lock(&state.lock);
    for (int i = 0; i < FREEINGS && !found; i++) {
        struct freeing *one = &state.freeings[i];
        if (!one->call) *one = (struct freeing){call, context};
        if (one->call == call && one->context == context) found = one;
    }
    pthread_mutex_unlock(&state.lock);
    return found;
}

/* Pages that were made before they were asked for, registered now. */
static int take_pages(size_t bytes, unsigned flags, any_fn *alloc, kvp_kept_buffer *found) {
    while (kvp_watch.recycles & KVP_KEEPS && kvp_kept_take(&kept, bytes, PAGES, found)) {
        if (kvp_populated_register(found->memory, flags, alloc) > 0) return 1;
        kvp_prepare_gone(found->memory);
        kvp_populated_free(found->memory);
        kvp_kept_returned(&kept, found);
    }
    return 0;
}

/* One that is kept; while more are being made for a sleep it waits for them, no longer than the runtime would take. */
static int take(size_t bytes, uint64_t key, unsigned flags, any_fn *alloc, kvp_kept_buffer *found) {
    uint64_t turn = 0, until_ns = kvp_clock() + kvp_populated_as_it_is_ns(bytes);
    do {
        while (kvp_watch.recycles & KVP_KEEPS && kvp_kept_take(&kept, bytes, key, found)) {
            if (is_whole(found->memory, found->bytes)) return 1;
            kvp_kept_returned(&kept, found); /* freed by other ways */
        }
        if (!flags && take_pages(bytes, flags, alloc, found)) {
            found->key = key;
            return 1;
        }
    } while (!flags && kvp_watch.recycles & KVP_KEEPS && kvp_prepare_awaits(bytes, &turn, until_ns));
    return 0;
}

/* ---- the calls ----------------------------------------------------------------------------------------------------
 */

int kvp_recycle_take(void **pointer, size_t bytes, unsigned flags, any_fn *alloc) {
    int was = errno, made = 0;
    void *context;
    kvp_kept_buffer found;
    if (!pointer || bytes < SMALLEST || !find_driver()) return errno = was, 0;
    uint64_t since = kvp_clock(), key = key_of(flags, &context);
    if (key && take(bytes, key, flags, alloc, &found)) {
        made = 1;
        kvp_prepare_taken(found.memory);
        kvp_populated_handed_out(found.memory);
        note_out(&found);
        *pointer = found.memory;
        pthread_mutex_lock(&state.lock);
        state.taken_ns += kvp_clock() - since;
        state.come_bytes = 0;
        double gain = state.taken_ns && state.made_bytes
                          ? (double)state.made_ns / (double)state.made_bytes * (double)bytes / (double)state.taken_ns
                          : 0;
        int tell = !state.told++;
        pthread_mutex_unlock(&state.lock);
        if (tell)
            kvp_decision(folder, "keep", "as it is", "recycled", gain,
                         "freed pinned memory is kept and handed out again: %zu bytes in %.1f us", bytes,
                         (double)(kvp_clock() - since) / 1e3);
    } else if (key) {
        kvp_kept_press(&kept, bytes);
        made = kvp_populated_make(pointer, bytes, flags, alloc);
        if (made) kvp_recycle_made(pointer, bytes, flags, 0, kvp_populated_as_it_is_ns(bytes));
    }
    errno = was;
    return made;
}

int kvp_recycle_made(void *const *pointer, size_t bytes, unsigned flags, int result, uint64_t ns) {
    int was = errno, again = 0;
    void *context;
    if (bytes < SMALLEST || !find_driver()) return errno = was, 0;
    uint64_t key = key_of(flags, &context);
    if (result == OUT_OF_MEMORY && key && ns) {
        again = kept.counts.kept_bytes > 0;
        kvp_kept_trim(&kept, 0);
        again |= kvp_populated_free_samples();
    } else if (!result && key && *pointer) {
        kvp_kept_buffer made = {.memory = *pointer, .bytes = bytes, .key = key, .taken = bytes};
        note_out(&made);
        pthread_mutex_lock(&state.lock);
        state.made_bytes += ns ? bytes : 0;
        state.made_ns += ns;
        pthread_mutex_unlock(&state.lock);
    }
    errno = was;
    return again;
}

void kvp_recycle_clear(any_fn *host_alloc) {
    int (*last)(void) = (int (*)(void))kvp_symbol_beside((void *)host_alloc, "cudaGetLastError");
    if (last) last();
}

static void look_whether_it_pays(uint64_t bytes) {
    pthread_mutex_lock(&state.lock);
    state.come_bytes += bytes;
    int vain = state.come_bytes > IN_VAIN * kept.budget_bytes && !state.given_up;
    state.given_up |= vain;
    pthread_mutex_unlock(&state.lock);
    if (!vain) return;
    end(KVP_KEEPS);
    kvp_kept_trim(&kept, 0);
    kvp_decision(folder, "rollback", "recycled", "as it is", 0,
                 "%.3f GB of freed pinned memory were kept, but none was needed again", (double)state.come_bytes / 1e9);
}

/* Under `ulimit -v` what is kept would fail the program's next large allocation, of whatever kind. */
static int is_space_limited(void) {
    struct rlimit space;
    return getrlimit(RLIMIT_AS, &space) || space.rlim_cur != RLIM_INFINITY;
}

/* 1: it is kept. */
static int keep(void *pointer, any_fn *free_host) {
    int was = errno, keeps = 0;
    void *context;
    kvp_kept_buffer found;
    if (!pointer || !find_driver() || !take_out(pointer, &found)) return errno = was, 0;
    uint64_t since = kvp_clock();
    kvp_kept_returned(&kept, &found);
    found.taken = found.bytes;
    struct freeing *how = NULL;
    if (kvp_watch.recycles & KVP_KEEPS && found.tag == forks_now() && !is_space_limited() &&
        key_of((unsigned)found.key & ALL_FLAGS, &context) == found.key && is_whole(pointer, found.bytes) &&
        !driver.cuCtxSynchronize())
        how = freeing_of((free_fn *)free_host, context);
    if (how) {
        found.tag = how;
        keeps = kvp_kept_put(&kept, &found);
    }
    if (keeps) {
        kvp_kept_press(&kept, 0);
        pthread_mutex_lock(&state.lock);
        state.kept_ns += kvp_clock() - since;
        pthread_mutex_unlock(&state.lock);
    }
    look_whether_it_pays(keeps ? found.bytes : 0);
    errno = was;
    return keeps;
}

/* ---- before they are asked for (prepare.c) ------------------------------------------------------------------------
 */

static int no_free(void *unused) {
    (void)unused;
    return INVALID_VALUE; /* it goes as it was made: populated.c */
}

int kvp_recycle_prepares(void **context) {
    int both = KVP_KEEPS | KVP_POPULATES;
    return (kvp_watch.recycles & both) == both && find_driver() && !driver.cuCtxGetCurrent(context) && *context;
}

/* The runtime's function that the program has; NULL: it has asked for none yet. */
static any_fn *known_alloc(void) {
    static const char *const names[] = {"cudaHostAlloc", "cudaMallocHost"};
    for (int i = 0; i < 2; i++) {
        const struct wrapped *w = kvp_find_wrapped(names[i]);
        for (int k = 0; w && k < BOUND; k++)
            if (atomic_load(&w->real[k])) return atomic_load(&w->real[k]);
    }
    return NULL;
}

/* What was promised and made, among those that are kept. 0: it could not be, and has gone. */
static int put_prepared(kvp_kept_buffer *b, void *context) {
    b->taken = 0;
    b->tag = freeing_of(no_free, context);
    if (b->tag && kvp_kept_put_promised(&kept, b)) return 1;
    kvp_prepare_gone(b->memory);
    kvp_populated_free(b->memory);
    kvp_kept_returned(&kept, b);
    return 0;
}

/* The pages alone: it calls nothing of CUDA. */
int kvp_recycle_prepare(const struct preparing *what) {
    struct populating_ahead how = {what->threads, what->stop};
    kvp_kept_buffer b = {.bytes = what->bytes, .key = PAGES, .taken = 0};
    int both = KVP_KEEPS | KVP_POPULATES;
    if ((kvp_watch.recycles & both) != both) return -1;
    if (!kvp_kept_promise(&kept, b.bytes)) return 0;
    int made = kvp_populated_ahead(&b.memory, b.bytes, 0, &how);
    if (made <= 0) return kvp_kept_returned(&kept, &b), made;
    kvp_prepare_made(b.memory, b.bytes);
    return put_prepared(&b, what->context);
}

int kvp_recycle_register(void *memory, void *in) {
    kvp_kept_buffer b;
    int mode = RELAXED, made = 0;
    void *context;
    any_fn *alloc = known_alloc();
    if (!alloc || driver.cuCtxSetCurrent(in)) return 0;
    driver.cuThreadExchangeStreamCaptureMode(&mode);
    uint64_t key = key_of(0, &context);
    if (key && kvp_kept_take_this(&kept, memory, &b)) {
        b.taken = 0;
        made = kvp_populated_register(memory, 0, alloc);
        if (made > 0) {
            b.key = key;
            made = put_prepared(&b, context);
        } else {
            kvp_prepare_gone(memory);
            kvp_populated_free(memory);
            kvp_kept_returned(&kept, &b);
        }
    }
    if (made > 0) {
        pthread_mutex_lock(&state.lock);
        state.made_bytes += b.bytes;
        state.made_ns += kvp_populated_as_it_is_ns(b.bytes);
        pthread_mutex_unlock(&state.lock);
    }
    driver.cuThreadExchangeStreamCaptureMode(&mode);
    driver.cuCtxSetCurrent(NULL);
    return made;
}

void kvp_recycle_unprepare(void *memory) {
    kvp_kept_buffer found;
    if (!kvp_kept_take_this(&kept, memory, &found)) return kvp_prepare_gone(memory);
    release(NULL, &found);
    found.taken = 0;
    kvp_kept_returned(&kept, &found);
}

/* The program's call is made with what it would refuse, as it refuses what is freed. */
int kvp_recycle_free(void *pointer, any_fn *free_host) {
    free_fn *call = (free_fn *)free_host;
    if (!pointer || state.pid != (int)getpid()) return call(pointer);
    if (keep(pointer, free_host)) return 0;
    if (kvp_kept_holds(&kept, pointer)) return call((char *)pointer + 64);
    if (!kvp_populated_is(pointer)) return call(pointer);
    /* one that CUDA refuses while a stream is captured, or after an error, is the program's own */
    if (atomic_load(&kvp_watch.captures) || driver.cuCtxSynchronize()) {
        int refused = call((char *)pointer + 64);
        if (refused != INVALID_VALUE) return refused;
        kvp_recycle_clear(free_host);
    }
    return kvp_populated_free(pointer);
}

void *kvp_recycle_unregistered(void *pointer) {
    static char unregistered;
    return kvp_populated_is(pointer) ? &unregistered : pointer;
}
