/* Marks: when the device was done with what stands in a stream, seen from inside the process and without CUPTI.
 *
 * A mark is a timing event of ours, recorded in the program's own stream where what it does changes: at a change of
 * kind (kernels, loads, stores, a wait for another stream), behind a wait, in front of a call that waits, and by a
 * thread of ours where nothing was submitted for a while (mark_reader.c). A run of a thousand copies costs one or two
 * records, and a few in its middle that tell whether the device keeps pace with the host (`MARK_SAMPLE`).
 *
 * Where runs are of one submission, the mark stands right behind each, at no more cost: in front of the next one it
 * would be reached when that comes, and not when the device was done.
 *
 * A run begins when the mark before it was reached, or when its first submission returned, whichever is later; it ends
 * at its own mark. So an idle stream needs no mark in front of a run.
 *
 * WHAT A PROGRAM MAY RELY ON
 * - Its runtime's last error is untouched: only the driver is called. Any error that is not expected ends all marks.
 * - No event is made on its way but MARK_FIRST_EVENTS by its first submission to a context, where no other thread is
 *   blocked: they come from a pool. A pool that is empty costs the mark and ends the stretch.
 * - Whatever is submitted where no mark can follow it (there is no event yet, somebody else marks this stream just now)
 *   is loose: until a mark behind it is reached the recording says that something was missed there.
 * - A full queue: behind more than MARK_BUSY_LIMIT submissions a mark waits until so many more have come, so that it
 *   takes at most one slot in so many; but between two kinds MARK_FEW marks of a stream may stand behind twice as many.
 *   Where kinds follow one another without one, how much there is of each is counted. The helper records where a
 *   quarter of that is outstanding, or where the stream says that it is idle: it never blocks.
 * - While any stream is being captured nothing is marked. What stands in a stream ends in front of that; where nothing
 *   is submitted beside the capture, nothing is missed (kvp_mark_beside).
 * - A stream that is destroyed: it is asked nothing afterwards, and nothing is recorded in it; marks that stand in it
 *   are events of ours, which outlive it, and are read (kvp_marks_stream_ends). A context that ends takes its events
 *   along (kvp_marks_context_ends). A forked child marks nothing where its parent did.
 * - The legacy default stream orders blocking streams around whatever is put into it: there the helper records nothing,
 *   and a mark is put right behind what the program submitted to it last, or right in front of what it submits next, so
 *   that nothing waits for the mark that would not wait for that.
 * - What they may cost is measured and bounded: MARK_FIRST_NS at first, MARK_LATER_NS, then OF_A_SECOND_NS a second
 *   (mark_reader.c). A mark counts with what it and all questions around it took the program's thread, and with
 *   MARK_DEVICE_NS for its stream. A program that they cost more is seen in stretches. Each has a length of time and no
 *   number of marks, so that a part of the program that takes many is seen as often as one that takes none: what was
 *   seen then tells of what was not (kvprobe/account/samples.py). */
#define _GNU_SOURCE
#include "marks.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

struct mark_driver kvp_mark_driver;
struct mark_stream kvp_mark_streams[MARK_STREAMS];
struct mark_context kvp_mark_contexts[MARK_CONTEXTS];
_Atomic int kvp_mark_context_count;
_Atomic int64_t kvp_mark_left_ns = MARK_FIRST_NS;
_Atomic int kvp_mark_pool_lock;
_Atomic uint64_t kvp_mark_empty;

static _Atomic int opened; /* 0: the driver was not looked for; 1: it is there; -1: marks cannot be had */
static _Atomic(struct mark_stream *) legacy; /* the legacy default stream that was submitted to last */
static _Atomic int per_threads;              /* 1: there was a stream of a thread's own */
/* where this thread's call submits loosely */
static __thread struct mark_stream *loose_in __attribute__((tls_model("initial-exec")));

enum role { NO_ROLE, SUBMITS, COPIES, SYNC_STREAM, SYNC_EVENT, SYNC_ALL, TAKES_LONG };
static const struct {
    uint8_t role, kind, waits; /* waits: a copy whose call returns when it is over */
} of_call[128] = {[1] = {COPIES, 0},
                  [2] = {COPIES, 0},
                  [3] = {COPIES, 0},
                  [4] = {COPIES, 0},
                  [5] = {COPIES, 0},
                  [6] = {COPIES, 0},
                  [7] = {COPIES, 0},
                  [8] = {COPIES, 0},
                  [9] = {COPIES, 0},
                  [10] = {COPIES, 0, 1},
                  [11] = {SUBMITS, MARK_MEMSET},
                  [12] = {SUBMITS, MARK_KERNEL},
                  [13] = {SUBMITS, MARK_KERNEL},
                  [14] = {SUBMITS, MARK_KERNEL},
                  [15] = {SUBMITS, MARK_KERNEL},
                  [16] = {SUBMITS, MARK_GRAPH},
                  [17] = {SYNC_STREAM, 0},
                  [18] = {SYNC_EVENT, 0},
                  [19] = {SYNC_ALL, 0},
                  [22] = {TAKES_LONG, 0},
                  [23] = {TAKES_LONG, 0},
                  [24] = {TAKES_LONG, 0},
                  [25] = {TAKES_LONG, 0},
                  [26] = {TAKES_LONG, 0},
                  [28] = {SUBMITS, MARK_WAIT},
                  [30] = {COPIES, 0},
                  [31] = {COPIES, 0},
                  [32] = {SYNC_STREAM, 0},
                  [33] = {SYNC_EVENT, 0},
                  [34] = {SYNC_ALL, 0},
                  [37] = {TAKES_LONG, 0},
                  [38] = {TAKES_LONG, 0},
                  [39] = {TAKES_LONG, 0},
                  [40] = {COPIES, 0},
                  [41] = {COPIES, 0},
                  [42] = {TAKES_LONG, 0},
                  [43] = {TAKES_LONG, 0},
                  [44] = {TAKES_LONG, 0},
                  [45] = {TAKES_LONG, 0},
                  [63] = {SUBMITS, MARK_FUNCTION},
                  [71] = {SUBMITS, MARK_FUNCTION},
                  [72] = {SUBMITS, MARK_FUNCTION},
                  [73] = {SUBMITS, MARK_FUNCTION},
                  [74] = {COPIES, 0, 1},
                  [75] = {COPIES, 0, 1},
                  [76] = {COPIES, 0, 1},
                  [77] = {COPIES, 0, 1},
                  [78] = {COPIES, 0, 1},
                  [79] = {TAKES_LONG, 0},
                  [80] = {TAKES_LONG, 0}};

/* ---- the pool ----------------------------------------------------------------------------------------------- */

static inline void lock_pool(void) {
    for (int no = 0; !atomic_compare_exchange_weak(&kvp_mark_pool_lock, &no, 1); no = 0) kvp_mark_relax();
}

static struct mark *take(struct mark_context *c) {
    lock_pool();
    struct mark *m = c->free;
    if (m) c->free = m->next;
    atomic_store(&kvp_mark_pool_lock, 0);
    return m;
}

void kvp_mark_give(struct mark_context *c, struct mark *m) {
    lock_pool();
    m->next = c->free;
    c->free = m;
    atomic_store(&kvp_mark_pool_lock, 0);
}

/* ---- what they cost ------------------------------------------------------------------------------------------ */

static void spend(uint64_t ns) {
    int64_t left = atomic_fetch_sub(&kvp_mark_left_ns, (int64_t)ns) - (int64_t)ns;
    if (unlikely(left <= -MARK_DEBT_NS)) kvp_mark_pause(REASON_BUDGET);
}

/* What looking at a stream has taken its thread since `since`. One that lost its CPU meanwhile lost it to others. */
static void spend_since(uint64_t since) {
    if (kvp_mark_synchronous) return;
    uint64_t took = kvp_clock() - since;
    spend(took < MARK_MOST_NS ? took : MARK_MOST_NS);
}

/* ---- one mark ----------------------------------------------------------------------------------------------- */

static void begin_interval(struct mark_stream *s) {
    put(s->submitted, get(s->submitted) + get(s->count));
    put(s->count, 0);
    put(s->bytes, 0);
    put(s->first_ns, 0);
    put(s->kind, MARK_NONE);
    put(s->flags, 0);
    s->graph = 0;
}

static int is_captured(const struct mark_stream *s) {
    int capturing = 0;
    return kvp_watch.captures || kvp_mark_driver.cuStreamIsCapturing(s->handle, &capturing) || capturing;
}

/* A default stream is asked, and given something, by a word that means the current context's: until it is left, that of
 * `s` is current. 1: another one was. */
static int enter_context(const struct mark_stream *s, void **was) {
    void *own = get(kvp_mark_contexts[s->context].handle);
    if (likely(kvp_watch.one_device) || !(s->legacy || s->per_thread)) return 0;
    if (kvp_mark_driver.cuCtxGetCurrent(was) || *was == own) return 0;
    return !kvp_mark_driver.cuCtxSetCurrent(own);
}

static int is_idle(const struct mark_stream *s) {
    if (is_captured(s)) return 0;
    int mode = 2; /* relaxed: a capture that nobody saw begin goes on */
    if (unlikely(kvp_watch.attached)) kvp_mark_driver.cuThreadExchangeStreamCaptureMode(&mode);
    int state = kvp_mark_driver.cuStreamQuery(s->handle);
    if (unlikely(kvp_watch.attached)) kvp_mark_driver.cuThreadExchangeStreamCaptureMode(&mode);
    return !state;
}

int kvp_mark_idle(const struct mark_stream *s) {
    void *was = NULL;
    int entered = enter_context(s, &was), idle = is_idle(s);
    if (entered) kvp_mark_driver.cuCtxSetCurrent(was);
    return idle;
}

static int place(struct mark_stream *s, int flags) {
    struct mark_context *c = &kvp_mark_contexts[s->context];
    if (unlikely(!atomic_load(&c->ready) || is_captured(s))) return 0;
    uint32_t ended = atomic_load(&s->ended); /* before the record: they stand in front of it */
    int loose = kvp_mark_is_loose(s);
    uint64_t busy_ns = get(s->busy_ns), last_ns = get(s->last_ns);
    if (busy_ns < last_ns) busy_ns = last_ns;
    if (flags & MARK_UNSEEN && kvp_clock() - busy_ns >= MARK_STALE_NS && is_idle(s)) flags |= MARK_IDLE;
    struct mark *m = take(c);
    if (unlikely(!m)) {
        atomic_fetch_add(&kvp_mark_empty, 1);
        kvp_mark_pause(REASON_POOL);
        return 0;
    }
    m->entry_ns = kvp_clock();
    int error = kvp_mark_driver.cuEventRecord(m->event, s->handle);
    if (unlikely(error)) {
        kvp_mark_give(c, m);
        kvp_mark_pause(REASON_ERROR);
        return 0;
    }
    m->return_ns = kvp_clock();
    m->first_ns = get(s->first_ns);
    m->last_ns = busy_ns;
    m->given_ns = last_ns;
    m->asked_ns = 0;
    m->bytes = get(s->bytes);
    m->count = get(s->count);
    m->graph = s->graph;
    m->kind = get(s->kind);
    m->flags = (uint8_t)(flags | (get(s->flags) & (MARK_UNKNOWN | MARK_MIXED)));
    if (m->flags & MARK_MIXED) m->parts = s->parts;
    m->next = NULL;
    if (unlikely(loose)) {
        uint64_t since = get(s->loose_ns);
        if (!m->first_ns || since < m->first_ns) m->first_ns = since;
        m->flags = (uint8_t)((m->flags & ~MARK_PROBE) | MARK_LOOSE); /* it may have stood there for long */
        put(s->settled, ended);
    }
    begin_interval(s);
    m->at = get(s->submitted) + 1;
    put(s->submitted, m->at);
    if (s->tail)
        s->tail->next = m;
    else
        s->head = m;
    s->tail = m;
    s->standing++;
    spend(kvp_mark_synchronous ? MARK_USUAL_NS : MARK_DEVICE_NS);
    return 1;
}

int kvp_mark_place(struct mark_stream *s, int flags) {
    void *was = NULL;
    int entered = enter_context(s, &was), placed = place(s, flags);
    if (entered) kvp_mark_driver.cuCtxSetCurrent(was);
    return placed;
}

static int take_stream(struct mark_stream *s) {
    for (int tries = 0; tries < 2000; tries++) {
        if (kvp_mark_try(s)) return 1;
        kvp_mark_relax();
    }
    return 0;
}

/* ---- streams ------------------------------------------------------------------------------------------------- */

static int open_driver(void) {
    int state = atomic_load(&opened);
    if (state) return state > 0;
    static _Atomic int opening;
    static uint32_t in_vain; /* each search goes through all libraries */
    int no = 0;
    uint32_t before = get(in_vain);
    put(in_vain, before + 1);
    if (before >= 16 && before % 1024) return 0;
    if (!kvp_driver_symbol("cuInit")) return 0;
    if (!atomic_compare_exchange_strong(&opening, &no, 1)) {
        kvp_mark_missed();
        return 0;
    }
    state = 1;
#define X(NAME, PARAMETERS)                                                                                            \
    kvp_mark_driver.NAME = (int(*) PARAMETERS)(uintptr_t)kvp_driver_symbol(#NAME);                                     \
    if (!kvp_mark_driver.NAME) state = -1;
    KVP_MARK_CALLS(X)
#undef X
    uint64_t (*now)(void) =
        (uint64_t (*)(void))(uintptr_t)kvp_symbol_beside((void *)kvp_mark_driver.cuEventRecord, "kvhostNow");
    int (*is_virtual)(void) =
        (int (*)(void))(uintptr_t)kvp_symbol_beside((void *)kvp_mark_driver.cuEventRecord, "kvhostIsVirtual");
    if (now && !kvp_marks_asked) state = -1;
    if (state > 0 && now && is_virtual && is_virtual()) kvp_marks_simulated(now);
    int devices = 0;
    if (state > 0 && (kvp_mark_driver.cuDeviceGetCount(&devices) || !devices)) state = -1;
    if (state < 0) kvp_watch.marks = 0;
    atomic_store(&opened, state);
    return state > 0;
}

/* Its number, or -1. */
static int context_of(void *handle) {
    int n = atomic_load(&kvp_mark_context_count), was = 0;
    for (int i = 0; i < n; i++)
        if (get(kvp_mark_contexts[i].handle) == handle) return i;
    static _Atomic int adding;
    void *current = NULL;
    if (n == MARK_CONTEXTS || !atomic_compare_exchange_strong(&adding, &was, 1)) {
        kvp_mark_missed();
        return -1;
    }
    struct mark_context *c = &kvp_mark_contexts[n];
    if (n == atomic_load(&kvp_mark_context_count) && !kvp_mark_driver.cuCtxGetCurrent(&current) && current == handle &&
        !kvp_mark_driver.cuCtxGetDevice(&c->device)) {
        put(c->handle, handle);
        put(c->free, NULL);
        c->reference = NULL;
        c->ready = c->made = 0;
        c->making = 1;
        atomic_store(&kvp_mark_context_count, n + 1); /* others submit loosely meanwhile */
        if (atomic_load(&kvp_mark_synchronous))
            kvp_mark_pool(c, MARK_POOL);
        else if (!kvp_watch.attached && !kvp_ring_blocked(MARK_STALE_NS, kvp_clock()))
            kvp_mark_pool(c, MARK_FIRST_EVENTS);
        c->making = 0;
        kvp_mark_reader_start();
    }
    atomic_store(&adding, 0);
    return get(kvp_mark_contexts[n].handle) == handle ? n : -1;
}

/* Default streams are one of a device, or of a thread and a device. */
static uint64_t key_of(uint64_t handle) {
    if (likely(handle >= KVP_FIRST_ADDRESS)) return handle;
    if (kvp_stream_handle(handle) == (void *)2) return handle | (uint64_t)(uint32_t)syscall(SYS_gettid) << 32;
    return handle | 1;
}

static __attribute__((noinline)) struct mark_stream *add_stream(uint64_t key, uint64_t handle) {
    void *context = NULL;
    if (!open_driver()) return NULL;
    if ((handle >= KVP_FIRST_ADDRESS ? kvp_mark_driver.cuStreamGetCtx((void *)(uintptr_t)handle, &context)
                                     : kvp_mark_driver.cuCtxGetCurrent(&context)) ||
        !context)
        return NULL;
    int at = context_of(context);
    if (at < 0) return NULL;
    for (uint32_t i = 0; i < 16; i++) {
        struct mark_stream *s = &kvp_mark_streams[(kvp_mark_place_of(key) + i) % MARK_STREAMS];
        uint64_t none = 0;
        if (atomic_load(&s->key) == key) return s;
        if (atomic_load(&s->key) || !kvp_mark_try(s)) continue;
        if (!atomic_load(&s->key)) {
            begin_interval(s);
            put(s->submitted, 0);
            put(s->done, 0);
            put(s->last_ns, 0);
            put(s->busy_ns, 0);
            s->head = s->tail = NULL;
            s->standing = 0;
            s->mark_ns = 0;
            s->held.count = 0;
            put(s->gappy, 0);
            put(s->after, 0);
            put(s->ordered, 0);
            put(s->next_sample, 8);
            s->ran = s->sampled = s->turns = s->lone = 0;
            s->handle = kvp_stream_handle(handle);
            if (s->handle == (void *)1) s->handle = NULL, handle--;
            s->number = handle;
            put(s->settled, atomic_load(&s->ended));
            s->per_thread = s->handle == (void *)2, s->legacy = !s->handle;
            if (s->per_thread) atomic_store(&per_threads, 1);
            s->context = (uint8_t)at;
            put(s->flags, kvp_mark_follows(&kvp_mark_contexts[at]) ? 0 : MARK_UNKNOWN);
            atomic_compare_exchange_strong(&s->key, &none, key);
        }
        kvp_mark_release(s);
        if (atomic_load(&s->key) == key) return s;
    }
    kvp_mark_pause(REASON_POOL);
    return NULL;
}

static inline struct mark_stream *find(uint64_t handle) {
    uint64_t key = key_of(handle);
    for (uint32_t i = 0, at = kvp_mark_place_of(key); i < 16; i++) {
        struct mark_stream *s = &kvp_mark_streams[(at + i) % MARK_STREAMS];
        if (likely(atomic_load_explicit(&s->key, memory_order_acquire) == key)) return s;
    }
    return NULL;
}

/* ---- around a call ------------------------------------------------------------------------------------------- */

/* Whether the newest mark has been reached: if not, the stream has had work all the time. */
static int has_caught_up(const struct mark_stream *s) {
    if (!s->tail) return 1;
    int mode = 2; /* relaxed: a capture that nobody saw begin goes on */
    if (unlikely(kvp_watch.attached)) kvp_mark_driver.cuThreadExchangeStreamCaptureMode(&mode);
    int state = kvp_mark_driver.cuEventQuery(s->tail->event);
    if (unlikely(kvp_watch.attached)) kvp_mark_driver.cuThreadExchangeStreamCaptureMode(&mode);
    if (unlikely(state && state != MARK_NOT_READY)) kvp_mark_pause(REASON_ERROR);
    return state != MARK_NOT_READY;
}

/* What the device wrote until then may be read by whoever reads `done` with acquire. */
static void is_over(struct mark_stream *s, uint64_t upto) { __atomic_store_n(&s->done, upto, __ATOMIC_RELEASE); }

/* Whether another slot of the queue may be taken. What is over is read from time to time only: so it is asked. */
static int has_room(struct mark_stream *s) {
    uint32_t limit = get(kvp_mark_limit);
    if (kvp_mark_outstanding(s) <= limit || get(s->count) >= limit) return 1;
    if (!has_caught_up(s)) return 0;
    is_over(s, get(s->submitted));
    return kvp_mark_outstanding(s) <= limit;
}

/* The same for a mark between two kinds, which tells how long either takes: a few stand in what is twice as deep. */
static int has_room_between(struct mark_stream *s) {
    if (s->standing < MARK_FEW && kvp_mark_outstanding(s) <= 2 * get(kvp_mark_limit)) return 1;
    return has_room(s);
}

/* For a mark behind what was submitted long ago: it says nothing of when that ended, if it is over. */
static int unseen(const struct mark_stream *s, uint64_t now) {
    uint64_t last = get(s->last_ns);
    return last && now > last + MARK_LONG_NS ? MARK_UNSEEN : 0;
}

/* ---- runs of several kinds ----------------------------------------------------------------------------------- */

static inline int is_copy(uint8_t kind) { return kind >= MARK_H2D && kind <= MARK_COPY; }

static void add_part(struct mark_stream *s, uint8_t kind, uint32_t count, uint64_t bytes) {
    s->parts.count[kind] += count;
    if (is_copy(kind)) s->parts.bytes[kind - MARK_H2D] += bytes;
    s->newest = kind;
}

/* From here on what stands in the stream is of several kinds. */
static void mix(struct mark_stream *s) {
    if (get(s->flags) & MARK_MIXED) return;
    s->parts = (struct mark_parts){0};
    add_part(s, get(s->kind), get(s->count), get(s->bytes));
    put(s->flags, get(s->flags) | MARK_MIXED);
}

/* Whether a copy of another kind takes its turn in a stream in which that happens again and again, as where a block
 * leaves and another one comes into its place: a mark for each would cost more than the copies do. */
static int takes_turns(struct mark_stream *s, uint8_t stands, uint8_t kind, uint64_t bytes) {
    int mixed = get(s->flags) & MARK_MIXED;
    if (bytes > MARK_TURNS_BYTES) s->turns = 0;
    if (!is_copy(kind) || !is_copy(stands)) {
        if (kind == MARK_KERNEL) s->turns /= 2; /* behind it they may go on */
        return 0;
    }
    if (!mixed) s->turns = get(s->count) > 2 ? 0 : s->turns + (s->turns < MARK_TURNS);
    return s->turns >= MARK_TURNS && get(s->count) < MARK_TURNS_RUN;
}

/* Behind what stands in the stream already, of the same kind as what comes or not. 1: time has passed. */
static int goes_on(struct mark_stream *s, const kvp_record *r, uint8_t kind, uint64_t gap, uint64_t now) {
    uint8_t stands = get(s->kind);
    if (kind == MARK_MEMSET) kind = stands; /* too short to be told apart */
    if (stands == MARK_MEMSET && kind != MARK_MEMSET) {
        put(s->kind, stands = kind);
        put(s->bytes, 0); /* what memsets write crosses no link */
    }
    if (kind != stands || (kind == MARK_GRAPH && (uint32_t)r->src != s->graph)) {
        int is_lone = get(s->count) == 1 && !(is_copy(stands) && is_copy(kind)); /* those may take turns */
        if (stands < MARK_WAIT) s->lone = is_lone ? s->lone + (s->lone < MARK_LONE) : 0;
        if (!takes_turns(s, stands, kind, r->bytes) && has_room_between(s) && kvp_mark_place(s, unseen(s, now))) {
            if (s->turns == MARK_TURNS) s->turns -= 3; /* the next ones get a mark each: how long is one of them? */
            return 1;
        }
        mix(s);
        return 0;
    }
    /* memsets one by one are the device's smallest work: whole runs of them are sampled, with the gaps in between */
    if (gap >= (kind == MARK_MEMSET ? 10 : 1) * MARK_GAP_NS && has_caught_up(s)) {
        put(s->gappy, 16);
        return has_room(s) && kvp_mark_place(s, MARK_UNSEEN);
    }
    if (get(s->count) < get(s->next_sample) || (get(s->flags) & MARK_MIXED && s->turns >= MARK_TURNS)) return 0;
    put(s->next_sample, s->sampled >= 2 ? 256 : 32u << 2 * s->sampled++); /* each costs two records */
    if (!has_room(s)) return 0;
    int placed = kvp_mark_place(s, MARK_SAMPLE);
    put(s->after, placed ? MARK_ITEM : 0);
    return placed;
}

/* Where a mark is the newest in the stream. 1: time has passed. */
static int begins(struct mark_stream *s, uint8_t kind, uint64_t gap, uint64_t now) {
    uint8_t gappy = get(s->gappy);
    if (kind == s->ran && kind < MARK_WAIT) s->lone = 0; /* its run is longer than was taken */
    if (kind != s->ran || gap >= MARK_GAP_NS)            /* behind a sample it goes on */
        put(s->next_sample, 8), s->sampled = 0;
    if (gap >= MARK_GAP_NS && gappy < 16 && kind != MARK_MEMSET && has_caught_up(s))
        put(s->gappy, 16);
    else if (gappy && (gap < MARK_GAP_NS || !has_caught_up(s)))
        put(s->gappy, gappy / 4); /* a burst behind one gap: a mark for each of its first three submissions, no more */
    struct mark_context *c = &kvp_mark_contexts[s->context];
    if (now - get(c->probe_at) <= MARK_PROBE_NS || !has_caught_up(s)) return 0;
    put(c->probe_at, now);
    return kvp_mark_place(s, MARK_PROBE);
}

/* A submission that no mark will follow. Whether one does is known when it has returned: kvp_mark_after. */
static void submit_loosely(struct mark_stream *s, uint64_t now) {
    if (!kvp_mark_is_loose(s)) put(s->loose_ns, now);
    atomic_fetch_add(&s->begun, 1);
    put(s->submitted, get(s->submitted) + 1);
    loose_in = s;
}

/* In front of a submission that changes what the stream does. 1: time has passed. */
static __attribute__((noinline)) int changes(struct mark_stream *s, const kvp_record *r, uint8_t kind, uint64_t now) {
    if (unlikely(!atomic_load(&kvp_mark_contexts[s->context].ready)) || !take_stream(s)) {
        submit_loosely(s, now);
        return 0;
    }
    uint64_t last = get(s->last_ns), gap = last && now > last ? now - last : 0;
    int placed;
    if (unlikely(get(s->flags) & MARK_UNKNOWN))
        placed = kvp_mark_place(s, 0);
    else
        placed = get(s->count) ? goes_on(s, r, kind, gap, now) : begins(s, kind, gap, now);
    put(s->last_ns, now);
    if (!get(s->count)) {
        put(s->kind, s->ran = kind);
        put(s->first_ns, 0);
    } else if (get(s->flags) & MARK_MIXED)
        add_part(s, kind == MARK_MEMSET ? s->newest : kind, 1, kind == MARK_MEMSET ? 0 : r->bytes);
    if (kind == MARK_GRAPH) s->graph = (uint32_t)r->src;
    put(s->count, get(s->count) + 1);
    if (kind != MARK_MEMSET || get(s->kind) == MARK_MEMSET) put(s->bytes, get(s->bytes) + r->bytes);
    if (kind >= MARK_WAIT || get(s->gappy) || s->lone == MARK_LONE) put(s->after, get(s->after) | 128);
    kvp_mark_release(s);
    return placed;
}

/* The end of what stands in a stream, in front of a call that may take long. */
static int end_run(struct mark_stream *s, int waits_for_all) {
    int placed = 0;
    int loose = s->per_thread && kvp_mark_is_loose(s); /* the helper cannot reach it */
    if (((get(s->count) && !(get(s->flags) & MARK_UNKNOWN)) || loose) && take_stream(s)) {
        if (((get(s->count) && get(s->first_ns)) || loose) && (waits_for_all || has_room(s)))
            placed = kvp_mark_place(s, unseen(s, kvp_clock()));
        kvp_mark_release(s);
    }
    return placed;
}

__attribute__((noinline)) int kvp_mark_end_all(void) {
    int placed = 0;
    for (int i = 0; i < MARK_STREAMS; i++) {
        struct mark_stream *s = &kvp_mark_streams[i];
        uint64_t key = atomic_load(&s->key);
        if (key && get(s->count) && (!s->per_thread || key >> 32 == (uint64_t)syscall(SYS_gettid)))
            placed |= end_run(s, 1);
    }
    return placed;
}

/* Where blocking streams are: what the legacy stream was given ends before another stream is given something, and what
 * it is given next begins when the others are done. 1: time has passed. */
static __attribute__((noinline)) int around_legacy(struct mark_stream *s) {
    struct mark_stream *other = atomic_load_explicit(&legacy, memory_order_relaxed);
    int placed = 0;
    if (!s->legacy) {
        if (!other || other->context != s->context) return 0;
        put(other->ordered, 1);
        return get(other->count) ? end_run(other, 0) : 0;
    }
    if (s != other) atomic_store_explicit(&legacy, s, memory_order_relaxed);
    if (!get(s->ordered) || get(s->count) || get(s->flags) & MARK_UNKNOWN || !take_stream(s)) return 0;
    put(s->ordered, 0);
    if (!get(s->count) && has_room(s)) placed = kvp_mark_place(s, 0);
    kvp_mark_release(s);
    return placed;
}

int kvp_mark_submits(const kvp_record *r) {
    int role = of_call[r->call & 127].role;
    return role == SUBMITS || role == COPIES;
}

struct mark_stream *kvp_mark_clear(uint64_t handle, uint64_t now) {
    struct mark_stream *s = find(handle);
    if (!s || !atomic_load(&kvp_mark_contexts[s->context].ready)) return NULL;
    if (unlikely(kvp_watch.blocking)) around_legacy(s);
    if (!kvp_mark_try(s)) return NULL;
    uint32_t count = get(s->count);
    int is_followed = !(get(s->flags) & MARK_UNKNOWN) && !kvp_mark_is_loose(s);
    int goes_on = get(s->first_ns) && now - get(s->last_ns) < MARK_STALE_NS; /* else nobody knows when it ended */
    if (is_followed && (!count || goes_on) && count < get(kvp_mark_limit) && has_room(s) && !is_captured(s) &&
        (!count || kvp_mark_place(s, 0)))
        return s;
    kvp_mark_release(s);
    return NULL;
}

uint64_t kvp_mark_behind(struct mark_stream *s) {
    put(s->submitted, get(s->submitted) + 1);
    return kvp_mark_place(s, 0) ? get(s->submitted) : 0;
}

void kvp_mark_spend(uint64_t since_ns) { spend_since(since_ns); }

static inline uint8_t kind_of(const kvp_record *r) {
    if (of_call[r->call].role != COPIES) return of_call[r->call].kind;
    return kvp_mark_kind_of((uint8_t)(r->direction ? r->direction : kvp_classify(r))); /* by its memory: not said */
}

/* What the stream for which this thread waits had been given when the wait began: other threads may give it more. */
static __thread uint64_t waits_upto __attribute__((tls_model("initial-exec")));

/* In front of a call that waits, or takes long by itself. 1: time has passed. */
static __attribute__((noinline)) int before_wait(const kvp_record *r, int role) {
    kvp_thread.mark = 1;
    waits_upto = 0;
    if (role == SYNC_ALL) return kvp_mark_end_all();
    if (role == TAKES_LONG) return kvp_thread.marked ? end_run(kvp_thread.marked, 0) : 0;
    struct mark_stream *s = role == SYNC_STREAM || r->stream ? find(r->stream) : NULL;
    if (!s) return 0;
    kvp_thread.marked = s;
    int placed = end_run(s, role == SYNC_STREAM);
    waits_upto = get(s->submitted);
    return placed;
}

int kvp_mark_before(const kvp_record *r) {
    int role = of_call[r->call & 127].role, placed = 0;
    if (!role) return 0;
    uint64_t now = r->start_ns ? r->start_ns : kvp_clock();
    if (role <= COPIES) {
        struct mark_stream *s = find(r->stream);
        if (unlikely(!s)) s = add_stream(key_of(r->stream), r->stream);
        if (!s) return 0;
        kvp_thread.marked = s;
        uint8_t kind = kind_of(r);
        placed = unlikely(kvp_watch.blocking) ? around_legacy(s) : 0;
        if (kind < MARK_GRAPH && kvp_mark_goes_on(s, kind, r->bytes, now)) return placed;
        kvp_thread.mark = 1;
        placed |= changes(s, r, kind, now);
    } else
        placed = before_wait(r, role);
    spend_since(now);
    return placed;
}

void kvp_mark_event(uint64_t handle) {
    struct mark_stream *s = find(handle);
    if (s) put(s->submitted, get(s->submitted) + 1);
}

/* A submission that was counted in front of its call, which failed: nothing of it stands in the stream. */
void kvp_mark_refused(const kvp_record *r) {
    struct mark_stream *s = kvp_mark_submits(r) && !loose_in ? find(r->stream) : NULL;
    if (!s || !take_stream(s)) return;
    uint32_t count = get(s->count);
    uint64_t bytes = get(s->bytes);
    if (count == 1) { /* as begin_interval, but no mark was given to the stream */
        put(s->bytes, 0);
        put(s->first_ns, 0);
        put(s->kind, MARK_NONE);
        put(s->flags, get(s->flags) & MARK_UNKNOWN);
    } else if (count) {
        put(s->bytes, bytes > r->bytes ? bytes - r->bytes : 0);
        uint8_t kind = get(s->flags) & MARK_MIXED ? kind_of(r) : MARK_NONE;
        if (kind && s->parts.count[kind]) {
            uint64_t *of_kind = is_copy(kind) ? &s->parts.bytes[kind - MARK_H2D] : NULL;
            s->parts.count[kind]--;
            if (of_kind) *of_kind -= *of_kind < r->bytes ? *of_kind : r->bytes;
        }
    }
    if (count) put(s->count, count - 1);
    kvp_mark_release(s);
}

/* What a submission leaves to do behind it. */
static __attribute__((noinline)) void place_after(struct mark_stream *s) {
    uint64_t since = kvp_clock();
    if (take_stream(s)) {
        if (get(s->count) && has_room(s)) kvp_mark_place(s, get(s->after) & 127);
        put(s->after, 0);
        kvp_mark_release(s);
    }
    spend_since(since);
}

/* Behind a wait that began when all that was loose in the stream had been submitted. */
static void waited(struct mark_stream *s, const kvp_record *r) {
    uint32_t ended = atomic_load(&s->ended);
    if (r->result || !kvp_mark_is_loose(s) || ended != atomic_load(&s->begun) || get(s->last_ns) > r->start_ns) return;
    if (!take_stream(s)) return;
    kvp_mark_settle(s, ended);
    kvp_mark_release(s);
}

static __attribute__((noinline)) void waited_for_threads(const kvp_record *r) {
    void *context = NULL;
    if (kvp_mark_driver.cuCtxGetCurrent(&context)) return;
    for (int i = 0; i < MARK_STREAMS; i++) {
        struct mark_stream *s = &kvp_mark_streams[i];
        if (atomic_load(&s->key) && s->per_thread && get(kvp_mark_contexts[s->context].handle) == context) waited(s, r);
    }
}

void kvp_mark_after(const kvp_record *r) {
    int role = of_call[r->call & 127].role;
    kvp_thread.mark = 0;
    if (!role || role == TAKES_LONG) return;
    uint64_t now = r->dur_ns == KVP_UNTIMED ? kvp_clock() : r->start_ns + r->dur_ns;
    if (unlikely(loose_in)) {
        put(loose_in->last_ns, now);
        atomic_fetch_add(&loose_in->ended, 1);
        loose_in = NULL;
        return;
    }
    if (role == SYNC_ALL || role == SYNC_EVENT) {
        if (role == SYNC_ALL && unlikely(atomic_load(&per_threads))) waited_for_threads(r);
        if (unlikely(kvp_mark_synchronous)) kvp_mark_step(0);
        return;
    }
    struct mark_stream *s = find(r->stream);
    if (!s) return;
    if (role == SYNC_STREAM) {
        if (!r->result && waits_upto > get(s->done) && waits_upto <= get(s->submitted)) is_over(s, waits_upto);
        if (unlikely(kvp_mark_is_loose(s))) waited(s, r);
        if (unlikely(kvp_mark_synchronous)) kvp_mark_step(0);
        return;
    }
    put(s->last_ns, now);
    if (unlikely(s->per_thread)) kvp_watch.blocking = 1;
    if (unlikely(!get(s->first_ns))) /* a call that blocked had its work begun before it returned */
        put(s->first_ns, r->dur_ns != KVP_UNTIMED && r->dur_ns > 20000 ? r->start_ns + 2000 : now);
    if (of_call[r->call & 127].waits) put(s->after, get(s->after) | 128);
    if (unlikely(get(s->after))) place_after(s);
}

/* ---- what ends ----------------------------------------------------------------------------------------------- */

/* Nothing is submitted to it any more. */
static void leave(struct mark_stream *s) {
    struct mark_stream *it = s;
    atomic_compare_exchange_strong(&legacy, &it, NULL);
    kvp_device_looks_lose(s);
    put(s->count, 0);
    put(s->flags, 0);
    put(s->settled, atomic_load(&s->ended));
    atomic_store(&s->key, MARK_GONE);
}

void kvp_mark_forget(struct mark_stream *s) {
    struct mark_context *c = &kvp_mark_contexts[s->context];
    leave(s);
    while (s->head) {
        struct mark *m = s->head;
        s->head = m->next;
        kvp_mark_give(c, m);
    }
    s->tail = NULL;
    s->standing = 0;
    atomic_store(&s->key, 0);
}

void kvp_marks_stream_ends(uint64_t handle) {
    struct mark_stream *s = handle >= KVP_FIRST_ADDRESS ? find(handle) : NULL;
    if (!s) return;
    end_run(s, 0);
    kvp_mark_step(0);
    while (!kvp_mark_try(s)) kvp_mark_relax();
    leave(s);
    kvp_mark_release(s);
}

void kvp_marks_context_ends(void) {
    if (!atomic_load(&kvp_mark_context_count)) return;
    kvp_mark_pause(REASON_END);
    kvp_mark_step(1);
    kvp_device_looks_end(); /* their memory goes with it */
    for (int i = 0; i < MARK_STREAMS; i++) {
        struct mark_stream *s = &kvp_mark_streams[i];
        while (!kvp_mark_try(s)) kvp_mark_relax();
        if (atomic_load(&s->key)) kvp_mark_forget(s);
        kvp_mark_release(s);
    }
    kvp_marks_await_reader(); /* it may be asking for one of their events */
    /* their events go with them; the places are not used again */
    for (int i = 0; i < atomic_load(&kvp_mark_context_count); i++) {
        kvp_mark_contexts[i].ready = 0;
        put(kvp_mark_contexts[i].handle, (void *)&kvp_mark_contexts[i]);
    }
}
