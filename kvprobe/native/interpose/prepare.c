/* The cure of a first sleep: pinned buffers that a model's sleep will ask for are made before it asks.
 *
 * What is kept (recycle.c) serves from the second sleep on. At the first all is to be made: pages, registration and
 * copy in turn, at less than half of the link's rate. But where an allocator's memory is to be backed up is known when
 * it is mapped: torch_memory_saver says so itself, of vLLM's allocator its adapter does. So for each range that such an
 * allocator maps, a thread makes a buffer of the size that will be asked for, and puts it among those that are kept,
 * within their budget: nothing is let go for it. A second thread registers the buffers.
 *
 * - Nothing is prepared for a program that has no such allocator; no thread is there.
 * - A range is prepared for once: when it is mapped the first time. Where it is unmapped and its buffer was not asked
 *   for, the buffer goes after a second; so it does under pressure, and with its context, and is not made again.
 * - The pages, in the order in which the ranges were mapped, are what takes longest: up to four threads make them in
 *   small pieces, without any lock of the driver's. The registration beside that, one call a buffer, is 20 to 60 ms a
 *   GiB, which other threads wait for: between two of them lies three times as much as one takes.
 * - When the sleep has begun there is no such care. The first thread makes what pages are missing, those that are asked
 *   for first, as fast as they can be made; the program waits for them, no longer than the runtime would take,
 * registers them, and copies while the next ones are made. Only then does the second thread register ahead of it.
 * - A child of a fork has neither; an exit waits for one piece, and one registration. */
#define _GNU_SOURCE
#include "prepare.h"

#include "../src/host_memory.h"
#include "../src/kvp_signals.h"
#include "staging.h"

#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <time.h>

#define SMALLEST (1u << 20) /* what is smaller is neither kept nor prepared */
#define FEWEST_THREADS 2
#define MOST_THREADS 4
#define OF_PROCESSORS 4      /* for so many of them one thread makes pages */
#define PACE 3               /* times as long as a registration took nothing is registered after it */
#define HURRY_NS 1000000000u /* so long after a buffer was asked for a sleep is under way */
#define UNUSED_NS 1000000000u
#define RETRY_MS 200
#define TURN_MS 1 /* between two registrations of a sleep: the program's calls are to get in */
#define IN_VAIN 2 /* so many times what was used is given up, and no more is prepared */
#define VAIN_BYTES ((uint64_t)4 << 30)

/* Addresses of GPU memory that are backed up when they lose it; those that were once are prepared for no more. */
typedef struct {
    uint64_t address, bytes, asks; /* asks: for so much pinned memory; 0: it is prepared for no more */
} range;

typedef struct {
    uint64_t bytes;
    uint32_t wanted, ready,
        taken;     /* ranges that will ask; buffers that are kept; those that were asked for, range mapped yet */
    uint32_t seen; /* of `wanted`, while ranges are gone through */
} size_class;

typedef struct {
    void *memory;
    uint64_t bytes;
    int registered;
} buffer;

static const char *folder;
static struct {
    pthread_mutex_t lock;                /* of what follows */
    pthread_mutex_t making, registering; /* held meanwhile; both while a buffer is let go, in this order */
    pthread_cond_t changed, made;        /* something is to be done; what was being done has ended */
    pthread_t maker, registrar;
    int running; /* both threads are there */
    void *context;
    range *ranges;
    size_class *sizes;
    buffer *buffers;
    uint32_t range_count, range_room, size_count, size_room, buffer_count, buffer_room;
    uint64_t asked_ns, idle_ns;     /* when a buffer was last asked for; since when some are too many */
    uint64_t asked_bytes, paced_ns; /* how large it was; until when nothing is registered */
    uint64_t turns;                 /* how often something was made, or could not be */
    void *in_registration;
    uint32_t threads;
    int failed; /* the pages that were tried last could not be had */
    uint64_t prepared_bytes, used_bytes, given_up_bytes, took_ns;
    uint32_t prepared, used, given_up;
    int told, told_end;
} state = {
    .lock = PTHREAD_MUTEX_INITIALIZER, .making = PTHREAD_MUTEX_INITIALIZER, .registering = PTHREAD_MUTEX_INITIALIZER};
static atomic_int stop;  /* what is being made is not to be finished */
static atomic_int ended; /* no more is prepared */

/* Of vLLM's allocator: whether what this thread maps from now on is copied to the CPU at a sleep. */
static __thread int adapter_says __attribute__((tls_model("initial-exec")));
CUDA_EXPORT void kvprobe_is_backed_up(int is);
void kvprobe_is_backed_up(int is) { adapter_says = is; }

#define GROWN(ALL, COUNT, ROOM)                                                                                        \
    ({                                                                                                                 \
        if ((COUNT) == (ROOM)) {                                                                                       \
            uint32_t more = (ROOM) ? 2 * (ROOM) : 64;                                                                  \
            void *grown = realloc(ALL, more * sizeof *(ALL));                                                          \
            if (grown) (ALL) = grown, (ROOM) = more;                                                                   \
        }                                                                                                              \
        (COUNT) < (ROOM);                                                                                              \
    })

/* ---- what is wanted ---------------------------------------------------------------------------------------------- */

static uint64_t power_of_two(uint64_t bytes) {
    uint64_t power = SMALLEST;
    while (power < bytes) power *= 2;
    return power;
}

/* How torch's own allocator of pinned memory asks; where it is told to do otherwise it is left alone. */
static uint64_t torch_asks(uint64_t bytes) {
    static const char *const names[] = {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"};
    for (int i = 0; i < 2; i++) {
        const char *value = getenv(names[i]);
        if (value && strstr(value, "pinned_")) return 0;
    }
    return power_of_two(bytes);
}

/* What the sleep of memory that `caller` maps will ask for; 0: nothing, or it is not known. */
static uint64_t asks(uint64_t bytes, const void *caller) {
    Dl_info info;
    if (bytes < SMALLEST || !dladdr(caller, &info) || !info.dli_fname) return 0;
    const char *name = strrchr(info.dli_fname, '/');
    name = name ? name + 1 : info.dli_fname;
    if (strstr(name, "torch_memory_saver")) {
        _Bool (*backs_up)(void) = (_Bool(*)(void))kvp_symbol_beside(caller, "tms_get_enable_cpu_backup");
        const char *(*where)(void) = (const char *(*)(void))kvp_symbol_beside(caller, "tms_get_cpu_backup_backend");
        return backs_up && backs_up() && (!where || !strcmp(where(), "pinned")) ? bytes : 0;
    }
    return strstr(name, "cumem_allocator") && adapter_says ? torch_asks(bytes) : 0;
}

/* Lock held. */
static range *range_at(uint64_t address) {
    for (uint32_t i = state.range_count; i--;)
        if (state.ranges[i].address == address) return &state.ranges[i];
    return NULL;
}

/* Lock held. NULL: there is none, and none is to be made. */
static size_class *class_of(uint64_t bytes, int make) {
    for (uint32_t i = 0; i < state.size_count; i++)
        if (state.sizes[i].bytes == bytes) return &state.sizes[i];
    if (!make || !GROWN(state.sizes, state.size_count, state.size_room)) return NULL;
    state.sizes[state.size_count] = (size_class){.bytes = bytes};
    return &state.sizes[state.size_count++];
}

/* Lock held. */
static void no_longer_wanted(range *r) {
    size_class *size = r->asks ? class_of(r->asks, 0) : NULL;
    r->asks = 0;
    if (!size) return;
    if (size->taken)
        size->taken--;
    else if (size->wanted)
        size->wanted--;
    pthread_cond_broadcast(&state.changed);
}

/* ---- the threads ------------------------------------------------------------------------------------------------- */

/* Lock held. Until something changes, or for so long; 0: for as long as it takes. */
static void rest(uint32_t ms) {
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    uint64_t ns = (uint64_t)until.tv_nsec + (uint64_t)ms * 1000000u;
    until.tv_sec += (time_t)(ns / 1000000000u);
    until.tv_nsec = (long)(ns % 1000000000u);
    if (ms)
        pthread_cond_timedwait(&state.changed, &state.lock, &until);
    else
        pthread_cond_wait(&state.changed, &state.lock);
}

/* Not forgotten since. */
static int still_there(const void *context) {
    pthread_mutex_lock(&state.lock);
    int is = context && context == state.context;
    pthread_mutex_unlock(&state.lock);
    return is;
}

/* Lock held. A buffer was asked for just now: a sleep is under way. */
static int is_hurry(void) { return state.asked_ns && kvp_clock() - state.asked_ns < HURRY_NS; }

/* Lock held. The size of the first range, in the order of mapping, that has no buffer yet; 0: all have one. */
static uint64_t missing(void) {
    const size_class *asked = state.asked_bytes && is_hurry() ? class_of(state.asked_bytes, 0) : NULL;
    if (asked && asked->wanted > asked->ready) return asked->bytes;
    for (uint32_t i = 0; i < state.size_count; i++) state.sizes[i].seen = 0;
    for (uint32_t i = 0; i < state.range_count; i++) {
        size_class *size = state.ranges[i].asks ? class_of(state.ranges[i].asks, 0) : NULL;
        if (size && ++size->seen > size->ready + size->taken && size->wanted > size->ready) return size->bytes;
    }
    return 0;
}

/* Lock held. The first that is not registered yet. */
static void *unregistered(void) {
    for (uint32_t i = 0; i < state.buffer_count; i++)
        if (!state.buffers[i].registered) return state.buffers[i].memory;
    return NULL;
}

/* Lock held; without it meanwhile: what is made is of a context that is there for so long. */
static int work(int (*made_of)(const void *what, void *context), const void *what, pthread_mutex_t *working,
                uint64_t *took_ns) {
    void *context = state.context;
    pthread_mutex_unlock(&state.lock);
    pthread_mutex_lock(working);
    uint64_t began = kvp_clock();
    int made = still_there(context) && !atomic_load(&stop) ? made_of(what, context) : 0;
    *took_ns = kvp_clock() - began;
    pthread_mutex_unlock(working);
    pthread_mutex_lock(&state.lock);
    if (made > 0) state.took_ns += *took_ns;
    state.turns++;
    return made;
}

static int pages_of(const void *what, void *context) {
    struct preparing preparing = *(const struct preparing *)what;
    preparing.context = context;
    return kvp_recycle_prepare(&preparing);
}

static int registration_of(const void *what, void *context) {
    return kvp_recycle_register(*(void *const *)what, context);
}

/* Lock held. */
static void no_more(void) {
    for (uint32_t i = 0; i < state.size_count; i++) state.sizes[i].wanted = 0;
    for (uint32_t i = 0; i < state.range_count; i++) state.ranges[i].asks = 0;
    atomic_store(&ended, 1);
}

/* Lock held; without it meanwhile. 1: there were pages to make. */
static int make_next(void) {
    uint64_t bytes = missing(), took_ns;
    if (!bytes) return 0;
    struct preparing what = {bytes, NULL, is_hurry() ? 0 : state.threads, &stop};
    int made = work(pages_of, &what, &state.making, &took_ns);
    state.failed = !made;
    pthread_cond_broadcast(&state.made);
    pthread_cond_broadcast(&state.changed);
    if (made < 0) no_more();
    if (!made && state.running > 0) rest(RETRY_MS);
    return 1;
}

/* Lock held; without it meanwhile. 1: there was something to register. */
static int register_next(void) {
    int hurry = is_hurry();
    uint64_t now = kvp_clock(), took_ns;
    void *memory = unregistered();
    if (!memory || (hurry && !state.failed && missing())) return 0;
    if (!hurry && now < state.paced_ns) {
        rest((uint32_t)((state.paced_ns - now) / 1000000) + 1);
        return 1;
    }
    state.in_registration = memory;
    int made = work(registration_of, &memory, &state.registering, &took_ns);
    state.paced_ns = kvp_clock() + (made > 0 ? PACE * took_ns : RETRY_MS * 1000000u);
    for (uint32_t i = 0; i < state.buffer_count; i++)
        if (state.buffers[i].memory == memory) state.buffers[i].registered |= made > 0;
    state.in_registration = NULL;
    pthread_cond_broadcast(&state.made);
    if (made < 0) {
        no_more();
        pthread_cond_broadcast(&state.changed); /* the maker lets go what was made */
    }
    if (state.running > 0 && hurry) rest(TURN_MS);
    return 1;
}

/* Lock held; without it meanwhile. 1: it was one. */
static int let_one_go(void) {
    void *memory = NULL;
    int over = 0;
    for (uint32_t i = 0; i < state.size_count && !memory; i++) {
        const size_class *size = &state.sizes[i];
        if (size->ready <= size->wanted) continue;
        over = 1;
        if (!state.idle_ns || kvp_clock() - state.idle_ns < UNUSED_NS) continue;
        for (uint32_t k = 0; k < state.buffer_count && !memory; k++)
            if (state.buffers[k].bytes == size->bytes) memory = state.buffers[k].memory;
    }
    if (!over) state.idle_ns = 0;
    if (over && !state.idle_ns) state.idle_ns = kvp_clock();
    if (!memory) return 0;
    pthread_mutex_unlock(&state.lock);
    pthread_mutex_lock(&state.making);
    pthread_mutex_lock(&state.registering);
    kvp_recycle_unprepare(memory);
    pthread_mutex_unlock(&state.registering);
    pthread_mutex_unlock(&state.making);
    pthread_mutex_lock(&state.lock);
    return 1;
}

static uint32_t few_threads(void) {
    uint32_t threads = kvp_processors() / OF_PROCESSORS;
    return threads < FEWEST_THREADS ? FEWEST_THREADS : threads > MOST_THREADS ? MOST_THREADS : threads;
}

static void *make(void *unused) {
    (void)unused;
    prctl(PR_SET_NAME, "kvprobe-prepare");
    kvp_thread.inside = IN_RUNTIME; /* what it calls is not the program's */
    uint32_t threads = few_threads();
    pthread_mutex_lock(&state.lock);
    state.threads = threads;
    while (state.running > 0) {
        if ((atomic_load(&ended) || !make_next()) && !let_one_go()) rest(state.idle_ns ? RETRY_MS : 0);
        if (!atomic_load(&ended) && state.given_up_bytes > VAIN_BYTES + IN_VAIN * state.used_bytes) {
            no_more();
            kvp_decision(folder, "rollback", "prepared", "as it is", 0,
                         "%.3f GB of pinned memory were prepared for a sleep, but the program did not use them",
                         (double)state.given_up_bytes / 1e9);
        }
    }
    pthread_mutex_unlock(&state.lock);
    return NULL;
}

static void *register_made(void *unused) {
    (void)unused;
    prctl(PR_SET_NAME, "kvprobe-register");
    kvp_thread.inside = IN_RUNTIME;
    pthread_mutex_lock(&state.lock);
    while (state.running > 0)
        if (atomic_load(&ended) || !register_next()) rest(0);
    pthread_mutex_unlock(&state.lock);
    return NULL;
}

/* Lock held. */
static void have_threads(void) {
    sigset_t were;
    if (atomic_load(&ended)) return;
    if (!state.running) {
        pthread_condattr_t attributes;
        pthread_condattr_init(&attributes);
        pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
        pthread_cond_init(&state.changed, &attributes);
        pthread_cond_init(&state.made, &attributes);
        pthread_condattr_destroy(&attributes);
        kvp_block_signals(&were);
        if (!pthread_create(&state.registrar, NULL, register_made, NULL)) {
            state.running = !pthread_create(&state.maker, NULL, make, NULL);
            if (!state.running) pthread_detach(state.registrar); /* it has ended already, or does at once */
        }
        pthread_sigmask(SIG_SETMASK, &were, NULL);
    }
    if (state.running) pthread_cond_broadcast(&state.changed);
}

/* ---- start and end ----------------------------------------------------------------------------------------------- */

void kvp_prepare_start(const char *run_folder) { folder = run_folder; }

void kvp_prepare_stop(void) {
    atomic_store(&stop, 1);
    pthread_mutex_lock(&state.lock);
    int was = state.running;
    state.running = 0;
    no_more();
    if (was) pthread_cond_broadcast(&state.changed), pthread_cond_broadcast(&state.made);
    pthread_mutex_unlock(&state.lock);
    if (was) pthread_join(state.maker, NULL), pthread_join(state.registrar, NULL);
}

void kvp_prepare_forget(void) {
    atomic_store(&stop, 1);
    pthread_mutex_lock(&state.making);
    pthread_mutex_lock(&state.registering);
    pthread_mutex_lock(&state.lock);
    state.range_count = state.size_count = 0;
    state.context = NULL;
    pthread_mutex_unlock(&state.lock);
    if (!atomic_load(&ended)) atomic_store(&stop, 0);
    pthread_mutex_unlock(&state.registering);
    pthread_mutex_unlock(&state.making);
}

void kvp_prepare_in_child(void) {
    pthread_mutex_init(&state.lock, NULL);
    pthread_mutex_init(&state.making, NULL);
    pthread_mutex_init(&state.registering, NULL);
    state.running = 0;
    state.range_count = state.size_count = state.buffer_count = state.prepared = 0;
    atomic_store(&ended, 1);
}

void kvp_prepare_close(void) {
    if (!state.prepared || state.told_end++) return;
    kvp_decision(folder, "note", NULL, NULL, 0,
                 "%u pinned buffers of %.3f GB were prepared for a sleep by %.3f s of work; the program used %u of "
                 "them (%.3f GB), and "
                 "%u (%.3f GB) were freed again",
                 state.prepared, (double)state.prepared_bytes / 1e9, (double)state.took_ns / 1e9, state.used,
                 (double)state.used_bytes / 1e9, state.given_up, (double)state.given_up_bytes / 1e9);
}

/* ---- what happens ------------------------------------------------------------------------------------------------ */

void kvp_prepare_mapped(uint64_t address, uint64_t bytes, const void *caller) {
    int was = errno;
    void *context = NULL;
    uint64_t wanted = atomic_load(&ended) ? 0 : asks(bytes, caller);
    if (!wanted || !kvp_recycle_prepares(&context)) {
        errno = was;
        return;
    }
    pthread_mutex_lock(&state.lock);
    size_class *size = range_at(address) ? NULL : class_of(wanted, 1);
    if (size && GROWN(state.ranges, state.range_count, state.range_room)) {
        state.ranges[state.range_count++] = (range){address, bytes, wanted};
        size->wanted++;
        state.context = context;
        have_threads();
    }
    pthread_mutex_unlock(&state.lock);
    errno = was;
}

void kvp_prepare_unmapped(uint64_t address) {
    pthread_mutex_lock(&state.lock);
    range *r = range_at(address);
    if (r) no_longer_wanted(r);
    pthread_mutex_unlock(&state.lock);
}

void kvp_prepare_unreserved(uint64_t address, uint64_t bytes) {
    pthread_mutex_lock(&state.lock);
    for (uint32_t i = state.range_count; i--;)
        if (state.ranges[i].address - address < bytes) {
            no_longer_wanted(&state.ranges[i]);
            state.ranges[i] = state.ranges[--state.range_count];
        }
    pthread_mutex_unlock(&state.lock);
}

void kvp_prepare_made(void *memory, uint64_t bytes) {
    pthread_mutex_lock(&state.lock);
    size_class *size = class_of(bytes, 1);
    if (size && GROWN(state.buffers, state.buffer_count, state.buffer_room)) {
        state.buffers[state.buffer_count++] = (buffer){memory, bytes, 0};
        size->ready++;
        state.prepared++;
        state.prepared_bytes += bytes;
    }
    pthread_mutex_unlock(&state.lock);
}

/* Lock held. Bytes of the buffer; 0: it was not prepared. */
static uint64_t take_out(const void *memory, size_class **size) {
    for (uint32_t i = 0; i < state.buffer_count; i++) {
        buffer one = state.buffers[i];
        if (one.memory != memory) continue;
        memmove(&state.buffers[i], &state.buffers[i + 1], (--state.buffer_count - i) * sizeof one); /* in order */
        *size = class_of(one.bytes, 0);
        if (*size && (*size)->ready) (*size)->ready--;
        return one.bytes;
    }
    return 0;
}

void kvp_prepare_taken(void *memory) {
    size_class *size = NULL;
    pthread_mutex_lock(&state.lock);
    uint64_t bytes = take_out(memory, &size);
    if (size && size->wanted) size->wanted--, size->taken++;
    if (bytes) {
        state.used++;
        state.used_bytes += bytes;
        state.asked_ns = kvp_clock();
        state.asked_bytes = 0; /* it has it: the next one is looked for in order */
        if (state.running > 0) pthread_cond_broadcast(&state.changed);
    }
    int tell = bytes && !state.told++;
    pthread_mutex_unlock(&state.lock);
    if (tell)
        kvp_decision(folder, "keep", "as it is", "prepared", 0,
                     "%llu bytes of pinned memory were ready before the sleep asked for them",
                     (unsigned long long)bytes);
}

void kvp_prepare_gone(void *memory) {
    size_class *size = NULL;
    pthread_mutex_lock(&state.lock);
    uint64_t bytes = take_out(memory, &size);
    if (size && size->wanted > size->ready) size->wanted--, size->taken++; /* it is not made again */
    if (bytes) {
        state.given_up++;
        state.given_up_bytes += bytes;
    }
    pthread_mutex_unlock(&state.lock);
}

int kvp_prepare_awaits(uint64_t bytes, uint64_t *turn, uint64_t until_ns) {
    int look = 0;
    pthread_mutex_lock(&state.lock);
    const size_class *size = state.running > 0 ? class_of(bytes, 0) : NULL;
    if (size && (size->wanted || size->ready)) {
        state.asked_ns = kvp_clock();
        state.asked_bytes = bytes;
        pthread_cond_broadcast(&state.changed);
        look = *turn != state.turns; /* since it looked */
        int comes = !atomic_load(&ended) && !state.failed && size->wanted > size->ready;
        for (uint32_t i = 0; i < state.buffer_count && !comes; i++)
            comes = state.buffers[i].bytes == bytes && state.buffers[i].memory == state.in_registration;
        struct timespec until = {(time_t)(until_ns / 1000000000u), (long)(until_ns % 1000000000u)};
        if (!look && comes) look = !pthread_cond_timedwait(&state.made, &state.lock, &until);
        *turn = state.turns;
    }
    pthread_mutex_unlock(&state.lock);
    return look;
}
