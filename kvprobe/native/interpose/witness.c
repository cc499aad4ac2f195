/* The byte witness of `kvprobe verify`: a copy from the device leaves bytes in pinned host memory, and a later copy to
 * the device takes them from there. If they are not the same, something wrote there in between.
 *
 * WHAT IS COMPARED. The helper sums the pages that a store filled once an event of ours behind it has been reached.
 * A load's pages are summed in its own call, before it is submitted. Bytes that differ have CHANGED: no copy and no
 * read of a file that we see wrote there in between; whether the program may have is not known here. While a load is
 * under way the helper sums its pages again: bytes that differ while the event behind the load has not been reached
 * were OVERWRITTEN under it, which no program may do.
 *
 * WHAT IT PROMISES. The driver alone is called, never the runtime, so the program's last error stays. Events come from
 * a pool; the first few are made in the program's own call, the others by the helper. Where there is none, no memory,
 * a capture or no budget left, a copy is not looked at, and is counted so. What a store overwrites is forgotten in any
 * case, before its call: bytes are never compared with those of an earlier store.
 *
 * HAZARDS. What nobody sees: kernels that write host memory, other devices, threads that copy with the CPU, reads of
 * less than KVP_FILE_LEAST bytes. The helper comes up to TICK_NS after a store is over: what overwrites before that
 * is taken for what was stored. An event takes a slot of the program's queue. */
#define _GNU_SOURCE
#include "witness.h"

#include "../src/kvp_signals.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

#define JOBS 1024
#define FIRST_EVENTS 64 /* made by the first copy of a context */
#define CONTEXTS 8
#define TICK_NS 250000
#define FIRST_LEFT_NS 50000000 /* what the first looks may take */
#define MOST_LEFT_NS 20000000  /* what may be saved up later */
#define MOST_NS 100000         /* of one copy's looks: who takes longer has lost the CPU */
#define AGAIN_NS 1000000u      /* until a load that is under way is looked at again; then twice that, and so on */
#define AGAIN_MOST_NS 50000000u
#define SECOND 1000000000ull
#define HELPER_SHARE 0.5 /* of one CPU, above which fewer pages are looked at */
#define NOT_READY 600    /* CUDA_ERROR_NOT_READY */
#define NO_TIMING 2      /* CU_EVENT_DISABLE_TIMING */
#define RELAXED 2

#define DRIVER_CALLS(X)                                                                                                \
    X(cuCtxGetCurrent, (void **))                                                                                      \
    X(cuCtxSetCurrent, (void *))                                                                                       \
    X(cuStreamIsCapturing, (void *, int *))                                                                            \
    X(cuThreadExchangeStreamCaptureMode, (int *))                                                                      \
    X(cuEventCreate, (void **, unsigned))                                                                              \
    X(cuEventRecord, (void *, void *))                                                                                 \
    X(cuEventQuery, (void *))

static struct {
#define X(NAME, PARAMETERS) int(*NAME) PARAMETERS;
    DRIVER_CALLS(X)
#undef X
} driver;

enum { FREE, TAKEN, READY };

/* A copy that is under way. Those of one batch hang behind its first, whose event stands for all. */
struct job {
    _Atomic int state;
    int stores, level, count, again, seen; /* seen: looked at while it was under way */
    void *event[CONTEXTS], *recorded;
    struct job *next;
    uint64_t number, due_ns;
    kvp_record copy;
    struct witness_look looks[WITNESS_LOOKS];
};

static struct job jobs[JOBS];
static _Atomic unsigned turn;
static struct {
    void *_Atomic handle;
    _Atomic int made; /* events; those of the first jobs */
} contexts[CONTEXTS];
static _Atomic int context_count;
struct witness_counts kvp_witness_counts;
static _Atomic int64_t left_ns = FIRST_LEFT_NS;
static _Atomic uint64_t passes, waiting;
static _Atomic int state_, stopping, running, owner; /* state_: 0 not begun, 1 looks, -1 cannot */
static double share = 0.02;
static char folder_[3072];
static pthread_mutex_t looking = PTHREAD_MUTEX_INITIALIZER;
static __thread struct job *mine __attribute__((tls_model("initial-exec"))); /* loads of the call that goes on */

/* ---- jobs ------------------------------------------------------------------------------------------------------ */

static struct job *take(int context) {
    unsigned made = (unsigned)contexts[context].made;
    for (int tries = 0; made && tries < 64; tries++) {
        struct job *j = &jobs[atomic_fetch_add_explicit(&turn, 1, memory_order_relaxed) % made];
        int is = FREE;
        if (!atomic_compare_exchange_strong(&j->state, &is, TAKEN)) continue;
        j->next = NULL;
        j->recorded = j->event[context];
        j->count = j->again = j->seen = j->stores = 0;
        return j;
    }
    COUNT(crowded, 1);
    return NULL;
}

static void give_all(struct job *j) {
    while (j) {
        struct job *next = j->next;
        atomic_store(&j->state, FREE);
        j = next;
    }
}

static void make_events(int context, int most) {
    int made = contexts[context].made;
    for (; made < most; made++)
        if (driver.cuEventCreate(&jobs[made].event[context], NO_TIMING)) break;
    contexts[context].made = made;
}

/* Number of the current context, -1: nothing can be looked at in it. */
static int context_now(void) {
    void *handle = NULL;
    if (driver.cuCtxGetCurrent(&handle) || !handle) return -1;
    int count = context_count;
    for (int i = 0; i < count; i++)
        if (contexts[i].handle == handle) return i;
    static _Atomic int adding;
    int no = 0, is = -1;
    if (count == CONTEXTS || !atomic_compare_exchange_strong(&adding, &no, 1)) return -1;
    if (count == context_count) {
        contexts[count].handle = handle;
        make_events(count, FIRST_EVENTS);
        context_count = (is = count) + 1;
    }
    adding = 0;
    return is;
}

/* Records the event behind what has just been submitted, and leaves the jobs to the helper. */
static void publish(struct job *first, uint64_t stream) {
    if (!first) return;
    if (driver.cuEventRecord(first->recorded, kvp_stream_handle(stream))) {
        COUNT(elsewhere, 1); /* the stream is another context's */
        give_all(first);
        return;
    }
    for (struct job *j = first->next; j; j = j->next) j->recorded = NULL;
    atomic_store_explicit(&first->state, READY, memory_order_release);
}

/* ---- around a copy --------------------------------------------------------------------------------------------- */

static int is_plain(unsigned call) {
    return call != 2 && call != 8 && call != 30 && call != 31 && call != 41 && call != KVP_CALL_cudaMemcpy2D;
}

static struct kvp_pieces pieces_of(const kvp_record *r, const struct kvp_pieces *batch, uint64_t one[3]) {
    if (kvp_is_batch(r)) return *batch;
    one[0] = r->dst, one[1] = r->src, one[2] = r->bytes;
    return (struct kvp_pieces){(void *const *)&one[0], (void *const *)&one[1], (const size_t *)&one[2], 1,
                               r->call == KVP_CALL_cudaMemcpyWithAttributesAsync && batch->taken};
}

static void look_at_load(const kvp_record *r, uint64_t dst, uint64_t src, uint64_t bytes, int context) {
    uint64_t first = (src + WITNESS_PAGE - 1) / WITNESS_PAGE, last = (src + bytes) / WITNESS_PAGE;
    if (first >= last) {
        COUNT(small, 1);
        return;
    }
    int level = kvp_witness_level, early = 0;
    while ((last - first) >> level > WITNESS_LOOKS) level++;
    struct job *j = NULL;
    EACH_PAGE(p, first, last, level) {
        if (!j && !(j = take(context))) return;
        if (j->count == WITNESS_LOOKS) break;
        int found = kvp_page_look(&j->looks[j->count], p);
        if (found >= 0) j->count++;
        early += found == PAGE_EARLY;
    }
    if (!j || !j->count) {
        if (j)
            COUNT(unreadable, 1);
        else
            COUNT(unchosen, 1);
        give_all(j);
        return;
    }
    j->copy = *r;
    j->copy.dst = dst, j->copy.src = src, j->copy.bytes = bytes;
    j->level = early;
    j->next = mine;
    mine = j;
}

/* 1: looks may be taken, in the context that this is set to. */
static int may_look(int *context) {
    if (kvp_watch.captures) return 0; /* counted behind the call, which knows what it was */
    return (*context = context_now()) >= 0;
}

static void spend_since(uint64_t since) {
    uint64_t took = kvp_clock() - since;
    COUNT(spent_ns, took);
    atomic_fetch_sub(&left_ns, (int64_t)(took < MOST_NS ? took : MOST_NS));
}

static int is_begun(void);

void kvp_witness_before(const kvp_record *r, const struct kvp_pieces *batch) {
    uint64_t since = kvp_clock(), one[3];
    int direction = r->direction & 15, context, was = errno;
    mine = NULL;
    if (!is_begun()) return;
    struct kvp_pieces of = pieces_of(r, batch, one);
    if (!is_plain(r->call)) {
        if (direction != KVP_H2D && direction != KVP_D2D) kvp_pages_forget_all(); /* where it writes is not followed */
        return;
    }
    int loads = direction == KVP_H2D || direction == KVP_DIR_UNKNOWN;
    if (direction != KVP_H2D || kvp_is_batch(r))
        for (size_t i = 0; i < of.count; i++)
            if (of.sizes[i]) kvp_pages_written((uintptr_t)of.dsts[i], of.sizes[i], r->stream);
    if (loads && atomic_load(&left_ns) > 0 && kvp_known_memory(r->src) != KVP_MEM_PAGEABLE && may_look(&context))
        for (size_t i = 0; i < of.count; i++)
            look_at_load(r, (uintptr_t)of.dsts[i], (uintptr_t)of.srcs[i], of.sizes[i], context);
    spend_since(since);
    errno = was;
}

/* What the looks of a load say: compared with what was stored there. */
static void compare(const struct job *j) {
    int pages = 0, changed = 0;
    uint64_t number = 0;
    for (int i = 0; i < j->count; i++) {
        if (!j->looks[i].store) continue;
        number = j->looks[i].store;
        pages++;
        changed += j->looks[i].sum != j->looks[i].was;
    }
    if (!pages) {
        if (j->level)
            COUNT(early, 1);
        else
            COUNT(unstored, 1);
        return;
    }
    const struct witness_store *s = kvp_store_of(number);
    COUNT(compared, 1);
    COUNT(compared_pages, (uint64_t)pages);
    if (s) atomic_fetch_add(&kvp_witness_homes[s->home].compared, 1);
    if (!changed) return;
    COUNT(changed, 1);
    if (s) atomic_fetch_add(&kvp_witness_homes[s->home].changed, 1);
    kvp_witness_tells("changed", &j->copy, j->looks, j->count);
}

static void loaded(const kvp_record *r, const struct kvp_pieces *of) {
    COUNT(loads, of->count);
    if (r->direction >> 4 != KVP_MEM_PINNED) { /* the call itself may have read it */
        COUNT(pageable, of->count);
        give_all(mine);
        return;
    }
    if (!mine && atomic_load(&left_ns) <= 0) COUNT(budget, of->count);
    uint64_t now = kvp_clock();
    for (struct job *j = mine; j; j = j->next) {
        j->copy.tid = r->tid;
        j->due_ns = now;
        compare(j);
    }
    if (of->taken)
        give_all(mine);
    else
        publish(mine, r->stream);
}

static void stored(const kvp_record *r, const struct kvp_pieces *of) {
    int context, level = kvp_witness_level;
    COUNT(stores, of->count);
    if (r->direction >> 4 != KVP_MEM_PINNED) {
        COUNT(pageable, of->count);
        return;
    }
    if (atomic_load(&left_ns) <= 0) {
        COUNT(budget, of->count);
        return;
    }
    if (!may_look(&context)) {
        COUNT(elsewhere, of->count);
        return;
    }
    unsigned home = kvp_home_of((uintptr_t)of->dsts[0]);
    struct job *first = NULL;
    for (size_t i = 0; i < of->count; i++) {
        uint64_t dst = (uintptr_t)of->dsts[i], bytes = of->sizes[i];
        if ((dst + bytes) / WITNESS_PAGE <= (dst + WITNESS_PAGE - 1) / WITNESS_PAGE) {
            COUNT(small, 1);
            continue;
        }
        struct job *j = take(context);
        if (!j) break;
        j->number = kvp_pages_stored(r, dst, bytes, home, level);
        j->stores = 1, j->level = level;
        j->next = NULL;
        if (!j->number) {
            give_all(j);
            continue;
        }
        j->next = first;
        first = j;
    }
    publish(first, r->stream);
}

static int is_captured(uint64_t stream) {
    int capturing = 0;
    return driver.cuStreamIsCapturing(kvp_stream_handle(stream), &capturing) || capturing;
}

void kvp_witness_after(const kvp_record *r, const struct kvp_pieces *batch) {
    uint64_t since = kvp_clock(), one[3];
    int direction = r->direction & 15, was = errno;
    struct kvp_pieces of = pieces_of(r, batch, one);
    if (state_ != 1 || r->result || (direction != KVP_H2D && direction != KVP_D2H)) {
        give_all(mine);
        mine = NULL;
        return;
    }
    kvp_record copy = *r;
    copy.tid = (uint32_t)gettid();
    if (!is_plain(r->call)) {
        COUNT(shapes, 1);
    } else if (is_captured(r->stream)) {
        COUNT(captured, of.count);
        if (direction == KVP_D2H)
            for (size_t i = 0; i < of.count; i++)
                if (of.sizes[i]) kvp_pages_never((uintptr_t)of.dsts[i], of.sizes[i]);
        give_all(mine);
    } else if (direction == KVP_H2D)
        loaded(&copy, &of);
    else {
        give_all(mine);
        stored(&copy, &of);
    }
    mine = NULL;
    spend_since(since);
    errno = was;
}

void kvp_witness_frees(unsigned call) {
    if (call == KVP_CALL_cudaFreeHost || call == KVP_CALL_cudaHostUnregister || call == KVP_CALL_cuMemFreeHost ||
        call == KVP_CALL_cuMemHostUnregister)
        if (state_ == 1) kvp_pages_forget_all();
}

void kvp_witness_reads(const kvp_record *r) {
    if (state_ != 1 || !r->bytes) return;
    if (r->count > 1)
        kvp_pages_forget_all(); /* only the first piece is known */
    else
        kvp_pages_written(r->src, r->bytes, 0);
}

/* ---- the helper ------------------------------------------------------------------------------------------------ */

static int is_over(const struct job *j) { return driver.cuEventQuery(j->recorded); }

/* Sums a load's pages once more; how many are others than when it was submitted. */
static int differ(struct job *j) {
    int other = 0;
    for (int i = 0; i < j->count; i++) {
        if (!kvp_page_sum(j->looks[i].page, &j->looks[i].was)) j->looks[i].was = j->looks[i].sum;
        other += j->looks[i].was != j->looks[i].sum;
    }
    return other;
}

/* A load that is under way. `first` has the event: what is seen counts only if that has still not been reached. */
static void watch(const struct job *first, struct job *j, uint64_t now) {
    if (j->stores || now < j->due_ns) return;
    uint64_t wait = (uint64_t)AGAIN_NS << (j->again < 6 ? j->again++ : 6);
    j->due_ns = now + (wait < AGAIN_MOST_NS ? wait : AGAIN_MOST_NS);
    int other = differ(j);
    if (is_over(first) != NOT_READY) return;
    j->seen = 1;
    if (!other) return;
    COUNT(overwritten, 1);
    kvp_witness_tells("overwritten", &j->copy, j->looks, j->count);
    j->due_ns = UINT64_MAX;
}

static void is_done(struct job *j) {
    if (j->stores) {
        kvp_pages_arrived(j->number, j->level);
    } else if (j->seen)
        COUNT(watched, 1);
    else
        COUNT(past, 1);
}

static uint64_t own_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (uint64_t)t.tv_sec * SECOND + (uint64_t)t.tv_nsec;
}

/* Looks at everything that is under way, once. */
static void pass(void) {
    static uint64_t before_ns;
    uint64_t begin_ns = kvp_clock(), own = own_ns(), still = 0;
    pthread_mutex_lock(&looking);
    if (waiting && begin_ns - before_ns > kvp_witness_counts.lag_ns) kvp_witness_counts.lag_ns = begin_ns - before_ns;
    before_ns = begin_ns;
    for (int i = 0; i < JOBS && state_ == 1; i++) {
        struct job *first = &jobs[i];
        if (atomic_load_explicit(&first->state, memory_order_acquire) != READY) continue;
        int state = is_over(first);
        for (struct job *j = first; j; j = j->next) {
            if (state == NOT_READY)
                watch(first, j, kvp_clock()), still++;
            else if (!state)
                is_done(j);
        }
        if (state != NOT_READY) give_all(first);
    }
    pthread_mutex_unlock(&looking);
    waiting = still;
    atomic_fetch_add(&passes, 1);
    COUNT(helper_ns, own_ns() - own);
}

/* Gives the budget of the time that has passed, and looks at more pages or fewer. */
static void pace(uint64_t now) {
    static uint64_t gave_ns, paced_ns, helped_ns, skipped;
    if (!gave_ns) gave_ns = paced_ns = now;
    int64_t give = (int64_t)((double)(now - gave_ns) * share), have = left_ns;
    gave_ns = now;
    if (have < MOST_LEFT_NS) atomic_fetch_add(&left_ns, give < MOST_LEFT_NS - have ? give : MOST_LEFT_NS - have);
    if (now - paced_ns < SECOND / 20) return;
    uint64_t helped = kvp_witness_counts.helper_ns, missed = kvp_witness_counts.budget;
    double busy = (double)(helped - helped_ns) / (double)(now - paced_ns);
    if (missed != skipped || busy > HELPER_SHARE)
        kvp_pages_coarser();
    else if (left_ns > MOST_LEFT_NS / 2 && busy < HELPER_SHARE / 4)
        kvp_pages_finer();
    paced_ns = now;
    helped_ns = helped;
    skipped = missed;
}

static void make_more_events(void) {
    static int given_up[CONTEXTS]; /* those that there are must do */
    for (int i = 0; i < context_count; i++) {
        if (contexts[i].made == JOBS || given_up[i]) continue;
        if (kvp_ring_blocked(TICK_NS, kvp_clock())) return; /* making one takes a lock that the program waits for */
        if (!driver.cuCtxSetCurrent(contexts[i].handle)) make_events(i, JOBS);
        given_up[i] = contexts[i].made < JOBS;
    }
}

static void *look_on(void *unused) {
    (void)unused;
    int mode = RELAXED;
    uint64_t told_ns = 0;
    prctl(PR_SET_NAME, "kvprobe-verify");
    kvp_thread.inside = IN_KVPROBE;
    driver.cuThreadExchangeStreamCaptureMode(&mode);
    while (!atomic_load(&stopping)) {
        uint64_t now = kvp_clock();
        make_more_events();
        pass();
        pace(now);
        if (now - told_ns > SECOND) {
            kvp_witness_tell_counts(folder_, 0);
            told_ns = now;
        }
        nanosleep(&(struct timespec){0, TICK_NS}, NULL);
    }
    atomic_store(&running, 0);
    return NULL;
}

/* ---- beginning and end ----------------------------------------------------------------------------------------- */

static void in_child(void) {
    kvp_watch.witness = 0;
    state_ = -1;
    owner = 0;
}

static void at_end(void) { kvp_witness_stop(); }

static int find_driver(void) {
#define X(NAME, PARAMETERS)                                                                                            \
    driver.NAME = (int(*) PARAMETERS)(uintptr_t)kvp_driver_symbol(#NAME);                                              \
    if (!driver.NAME) return 0;
    DRIVER_CALLS(X)
#undef X
    int (*is_virtual)(void) =
        (int (*)(void))(uintptr_t)kvp_symbol_beside((void *)driver.cuEventRecord, "kvhostIsVirtual");
    return !is_virtual || !is_virtual(); /* no thread may run beside simulated ones */
}

static int start_helper(void) {
    sigset_t were;
    pthread_t thread;
    pthread_attr_t attributes;
    owner = (int)getpid();
    running = 1;
    kvp_block_signals(&were);
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    pthread_attr_setstacksize(&attributes, 256 << 10);
    int error = pthread_create(&thread, &attributes, look_on, NULL);
    if (error) running = 0;
    pthread_attr_destroy(&attributes);
    pthread_sigmask(SIG_SETMASK, &were, NULL);
    return !error;
}

/* The first copy begins it. 1: copies are looked at. */
static int is_begun(void) {
    if (likely(state_)) return state_ == 1;
    static _Atomic int beginning;
    int no = 0;
    if (!kvp_driver_symbol("cuInit")) return 0;
    if (!atomic_compare_exchange_strong(&beginning, &no, 1)) return 0;
    int can = find_driver() && kvp_pages_ready() && start_helper();
    if (can) {
        pthread_atfork(NULL, NULL, in_child);
        atexit(at_end); /* before CUDA's own exit handlers */
    }
    state_ = can ? 1 : -1;
    return can;
}

void kvp_witness_start(const char *folder) {
    const char *asked = getenv("KVPROBE_VERIFY");
    double percent = asked ? strtod(asked, NULL) : 0;
    if (!(percent > 0) || strlen(folder) >= sizeof folder_) return;
    strcpy(folder_, folder);
    kvp_witness_tells_into(folder_);
    share = percent < 100 ? percent / 100 : 1;
    kvp_watch.witness = 1;
}

/* Ends it; what is over by now is compared and told. */
void kvp_witness_stop(void) {
    kvp_watch.witness = 0;
    if (state_ != 1 || owner != (int)getpid()) return;
    uint32_t inside = kvp_thread.inside;
    kvp_thread.inside = IN_KVPROBE;
    stopping = 1;
    for (int tries = 0; running && tries < 20000; tries++) nanosleep(&(struct timespec){0, 100000}, NULL);
    if (!running) pass();
    for (int i = 0; i < JOBS; i++)
        for (struct job *j = jobs[i].state == READY ? &jobs[i] : NULL; j; j = j->next) COUNT(unfinished, 1);
    state_ = -1;
    kvp_witness_tell_counts(folder_, 1);
    kvp_thread.inside = inside;
}

/* From now on nothing is looked at: the events went with the context. */
void kvp_witness_context_ends(void) {
    if (state_ == 1) kvp_witness_stop();
}

void kvp_witness_leaves(void) {
    if (state_ == 1 && owner == (int)getpid()) kvp_witness_tell_counts(folder_, 1);
}

/* For a program that waits for the witness: passes so far, mismatches so far, copies that were under way in the last
 * pass. 0: nothing is looked at. */
CUDA_EXPORT int kvprobe_witness(uint64_t told[3]);
int kvprobe_witness(uint64_t told[3]) {
    told[0] = passes;
    told[1] = kvp_witness_counts.changed + kvp_witness_counts.overwritten;
    told[2] = waiting;
    return state_ == 1;
}
