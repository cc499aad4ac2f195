/* Reads marks off the program's way: a thread of ours asks which are over, places them on the host's clock, and writes
 * what lies between them into the ring, with the intervals in which nothing was missed (coverage).
 *
 * The two clocks. No mark is reached before the call that records it, so the host's clock minus the device's is at
 * least the largest difference (beginning of the call, time of the mark) there is; a mark in an idle stream comes near
 * to it (MARK_PROBE). What a record takes its caller is added: then a mark in an idle stream lies at its call's return,
 * and so does the beginning of what is submitted to one. Nor was it reached when it was asked and not over (ASKED_NS
 * before that, as an answer may be late): where the device is never idle, that comes near to it. Nothing has to be
 * synchronised, nor a stream of our own to be made, which would take a channel. Either clock may step: what was largest
 * long ago, or before a pause, is not kept, or all that ends seems to end so much later.
 *
 * In simulated time (the host runtime's) there is no thread: the program's own waits read, so that a history stays the
 * same on every machine. */
#define _GNU_SOURCE
#include "marks.h"

#include "../src/kvp_signals.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

#define TICK_NS 500000u
#define SLOW_TICK_NS 5000000u
#define SECOND 1000000000ull
#define WHILE_NS 200000000u /* after it clocks may have drifted apart */
#define SOON_NS 50000000u   /* the same where PROBES were read: by 16 us within 25 ms, as was seen beside an H100 */
#define PROBES 4
#define ASKED_NS 20000u
#define DRY_NS 1500u /* a mark that was reached so soon found its stream idle */
#define RELATIVE_NS                                                                                                    \
    1500e6                   /* from here on a float of milliseconds is too coarse: another mark becomes the reference \
                              */
#define OF_A_SECOND_NS 2.5e6 /* what marks may cost of each */
#define LATER_NS 15e6        /* beside that, until MARK_LATER_NS is spent */
#define OF_AN_AGE_NS 12e6    /* between an age of the process and twice that: what a ring can hold of hours */
#define BLOCKED_NS 200000u
#define FIRST_NS 1e12   /* the first mark that is read, on the device's clock: another stream's may be older */
#define FILL_EVENTS 256 /* at a time: 2 us each, and marks want to be read */
#define READ_TICKS 4    /* each question takes locks that the program's submissions want */
#define READ_AT_ONCE 32
#define LOCK_TRIES 1000 /* some microseconds: whoever has it longer is in the driver */
#define RELAXED 2
#define HELPER_TRIES 10000 /* of 0.1 ms, that an exit waits for the helper to leave */

_Atomic int kvp_mark_synchronous;

static pthread_mutex_t reading = PTHREAD_MUTEX_INITIALIZER;
static _Atomic int running, stopping, owner;
static _Atomic int held;           /* captures that are about to begin */
static _Atomic uint64_t paused_ns; /* 0: marking goes on */
static _Atomic int why_paused;
static uint64_t born_ns, refilled_ns;
static _Atomic uint32_t resumed;
static double saved, later_ns = MARK_LATER_NS;
static uint64_t resumed_ns, whole_ns;           /* when this stretch began, and was known of all streams; 0: not yet */
static int64_t resumed_with_ns = MARK_FIRST_NS; /* what it might cost then */
static uint64_t stretch_ns = MARK_STRETCH_NS;   /* how long it is at least */
static uint64_t half_ns;                        /* when half of what it might cost was spent; 0: not yet */
static int64_t half_left_ns;                    /* what was left then */
static _Atomic int beside;                      /* 1: something went past marks while a stream was captured */
/* ---- the pool ------------------------------------------------------------------------------------------------ */

void kvp_mark_pool(struct mark_context *c, int more) {
    int failed = 0;
    for (; more && c->made < MARK_POOL && !failed; more--) {
        failed = kvp_mark_driver.cuEventCreate(&c->marks[c->made].event, 0);
        if (!failed) kvp_mark_give(c, &c->marks[c->made++]);
    }
    if (c->ready) {
        if (failed) c->made = MARK_POOL; /* those that there are must do */
        return;
    }
    if (!c->made) return;
    put(c->from_ns, c->written_ns = kvp_clock());
    c->probe_until_ns = c->from_ns + WHILE_NS;
    c->reference_ns = FIRST_NS;
    atomic_store(&c->ready, 1);
}

/* Makes some of what a pool lacks. Making an event takes the context's lock, and whoever waits for it holds up
 * everybody behind: not while a call of the program is blocked, unless it is for long. */
static void fill(struct mark_context *c) {
    static uint64_t since;
    void *handle = get(c->handle);
    uint64_t now = kvp_clock();
    if (c->making || c->made == MARK_POOL || handle == c) return;
    if (!kvp_ring_blocked(BLOCKED_NS, now))
        since = 0;
    else if (!since || now - since < SECOND) {
        if (!since) since = now;
        return;
    }
    if (!kvp_mark_driver.cuCtxSetCurrent(handle)) kvp_mark_pool(c, FILL_EVENTS);
}

/* ---- records ------------------------------------------------------------------------------------------------- */

static void write_span(const struct mark_stream *s, const struct mark_span *span) {
    static const uint8_t direction[] = {
        [MARK_H2D] = KVP_H2D, [MARK_D2H] = KVP_D2H, [MARK_COPY] = KVP_D2D, [MARK_FUNCTION] = 0};
    int kind = span->kind, counts = kind == MARK_KERNEL || kind >= MARK_GRAPH;
    uint64_t lag = span->end_ns - span->entry_ns; /* a mark is not reached before it is recorded */
    kvp_record r = {.call = KVP_CALL_span,
                    .start_ns = span->start_ns,
                    .dur_ns = span->end_ns - span->start_ns,
                    .stream = s->number,
                    .src = kind == MARK_GRAPH ? span->graph : span->at,
                    .dst = span->busy_ns,
                    .bytes = counts ? 0 : span->bytes,
                    .count = span->count,
                    .tid = span->entry_ns > span->end_ns ? 1
                           : lag < UINT32_MAX - 1        ? 1 + (uint32_t)lag
                                                         : UINT32_MAX,
                    .transfer = (uint32_t)kvp_mark_contexts[s->context].device,
                    .result = (uint16_t)kind,
                    .direction = kind < (int)sizeof direction ? direction[kind] : 0};
    if (span->end_ns > span->start_ns) kvp_ring_note(&r);
}

/* Parts of a run of several kinds: somewhere in it each was busy, for how long was not seen. */
static void write_parts(const struct mark_stream *s, const struct mark_span *run, const struct mark_parts *parts) {
    for (uint8_t kind = MARK_KERNEL; kind <= MARK_FUNCTION; kind++) {
        if (!parts->count[kind]) continue;
        struct mark_span part = *run;
        part.kind = kind;
        part.count = parts->count[kind];
        part.bytes = kind >= MARK_H2D && kind <= MARK_COPY ? parts->bytes[kind - MARK_H2D] : 0;
        part.busy_ns = 0;
        write_span(s, &part);
    }
}

static void write_coverage(const struct mark_context *c, uint64_t from, uint64_t to, int reason) {
    kvp_record r = {.call = KVP_CALL_coverage,
                    .start_ns = from,
                    .dur_ns = to - from,
                    .count = 1,
                    .transfer = (uint32_t)c->device,
                    .result = (uint16_t)reason};
    if (to > from) kvp_ring_note(&r);
}

/* ---- one mark that is over ----------------------------------------------------------------------------------- */

/* Its time on the device's clock; -1: it could not be asked. */
static double time_of(struct mark_context *c, struct mark *m) {
    float ms = 0;
    if (!c->reference) return FIRST_NS;
    if (kvp_mark_driver.cuEventElapsedTime(&ms, c->reference->event, m->event)) return -1;
    return c->reference_ns + (double)ms * 1e6;
}

/* From now on offset_ns holds; the best of the probes to come replaces it. */
static void begin_while(struct mark_context *c, uint64_t now) {
    c->probed_ns = 0;
    c->probes = 0;
    c->probe_until_ns = now + WHILE_NS;
}

static void place_clock(struct mark_context *c, const struct mark *m, double t) {
    double took = (double)(m->return_ns - m->entry_ns), difference = (double)m->entry_ns - t;
    if (!c->call_ns) c->call_ns = took < 1500 ? took : 1500;
    c->call_ns += (took < 2 * c->call_ns ? took - c->call_ns : c->call_ns) / 16;
    difference += c->call_ns;
    double asked = m->asked_ns ? (double)(m->asked_ns - ASKED_NS) - t : difference;
    if (asked > difference) difference = asked;
    int probes = m->flags & MARK_PROBE && took <= 2 * c->call_ns; /* its caller kept its CPU */
    if (probes && c->anew) {
        c->offset_ns = difference;
        c->anew = 0;
    }
    if (!c->reference || difference > c->offset_ns) c->offset_ns = difference;
    if (m->flags & MARK_PROBE && (!c->probed_ns || difference > c->probed_ns)) c->probed_ns = difference;
    c->probes += probes;
    uint64_t until = c->probe_until_ns - (c->probes >= PROBES ? WHILE_NS - SOON_NS : 0);
    if (m->return_ns > until) { /* what was best long ago is not kept */
        if (c->probed_ns) c->offset_ns = c->probed_ns;
        begin_while(c, m->return_ns);
    }
}

static void release_held(struct mark_stream *s, uint64_t item_ns, uint64_t item_bytes) {
    struct mark_span *held = &s->held;
    if (!held->count) return;
    if (held->dry && item_ns) {
        double each = (double)item_ns;
        if (held->bytes && item_bytes) each *= (double)held->bytes / held->count / (double)item_bytes;
        if (each * held->count < (double)held->busy_ns) held->busy_ns = (uint64_t)(each * held->count);
    }
    write_span(s, held);
    held->count = 0;
}

static void consume(struct mark_context *c, struct mark_stream *s, struct mark *m, double t) {
    place_clock(c, m, t);
    uint64_t at = (uint64_t)(t + c->offset_ns), before = s->mark_ns ? (uint64_t)(s->mark_ns + c->offset_ns) : 0;
    uint64_t first = m->first_ns ? m->first_ns : m->entry_ns; /* 0: the call has not returned yet */
    uint64_t over = 0;                                        /* when it was, where its end was not seen */
    struct mark_span span = {.start_ns = before > first ? before : first,
                             .end_ns = at,
                             .bytes = m->bytes,
                             .at = m->at,
                             .entry_ns = m->entry_ns,
                             .count = m->count,
                             .graph = m->graph,
                             .kind = m->flags & MARK_MIXED ? MARK_NONE : m->kind,
                             .dry = at < m->return_ns + DRY_NS};
    s->mark_ns = t;
    put(s->done, m->at);
    if (m->flags & MARK_PROBE) c->placed = 1;
    if (m->flags & (MARK_LOOSE | MARK_UNKNOWN) && !c->placed) at = kvp_clock();
    if (!(m->flags & MARK_ITEM)) release_held(s, 0, 0);
    if (m->flags & MARK_LOOSE) write_coverage(c, span.start_ns, at, REASON_LOOSE);
    if (m->flags & MARK_UNKNOWN && at > c->from_ns) put(c->from_ns, at);
    if (m->flags & (MARK_UNKNOWN | MARK_LOOSE)) return;
    if (!m->count) return;
    if (m->flags & MARK_UNSEEN && (span.dry || m->flags & MARK_IDLE)) { /* it ended somewhere before this mark */
        span.end_ns = m->last_ns > span.start_ns ? m->last_ns : span.start_ns;
        over = at;
        write_coverage(c, span.end_ns, at, REASON_UNSEEN);
    }
    if (span.start_ns >= span.end_ns) return;
    span.busy_ns = span.end_ns - span.start_ns;
    if (m->flags & MARK_MIXED) {
        write_span(s, &span);
        if (over) {
            span.entry_ns = over - (m->last_ns - m->given_ns);
            span.end_ns = over;
        }
        write_parts(s, &span, &m->parts);
        return;
    }
    if (m->flags & MARK_SAMPLE) {
        s->held = span;
        return;
    }
    if (m->flags & MARK_ITEM) release_held(s, span.busy_ns, m->bytes);
    write_span(s, &span);
}

/* ---- stretches ----------------------------------------------------------------------------------------------- */

/* Many short stretches tell more than a few long ones. The next one gets as long as what is saved up for it lasts, by
 * what this one cost: its length is not to depend on what it holds itself. What its first half was spent on may be
 * another part of the program: the first stretch begins with the process. */
static void choose_length(uint64_t now) {
    uint64_t half = get(half_ns), since = half ? half : get(resumed_ns) ? get(resumed_ns) : get(born_ns);
    double spent = (double)((half ? get(half_left_ns) : get(resumed_with_ns)) - atomic_load(&kvp_mark_left_ns));
    uint64_t most = MARK_STRETCH_NS, least = MARK_SHORTEST_NS;
    double next = (double)(now - since) * MARK_SAVED_NS / (spent > 1 ? spent : 1);
    put(stretch_ns, next < (double)least ? least : next < (double)most ? (uint64_t)next : most);
}

void kvp_mark_pause(enum mark_reason reason) {
    int on = 1;
    if (!atomic_compare_exchange_strong(&kvp_watch.marks, &on, 0)) return;
    uint64_t now = kvp_clock();
    if (reason == REASON_BUDGET) choose_length(now);
    atomic_store(&why_paused, reason);
    atomic_store(&paused_ns, now);
}

/* What may be recorded, by the time that has passed. */
static void refill(uint64_t now) {
    if (!refilled_ns) refilled_ns = now;
    double age = (double)(now - born_ns) / 1e9, rate = age > 1 ? OF_AN_AGE_NS / age : OF_A_SECOND_NS;
    if (rate > OF_A_SECOND_NS) rate = OF_A_SECOND_NS;
    int64_t have = atomic_load(&kvp_mark_left_ns);
    if (age > 1) saved += rate * (double)(now - refilled_ns) / 1e9;
    if (have < MARK_CREDIT_NS && later_ns > 0) {
        double more = LATER_NS * (double)(now - refilled_ns) / 1e9;
        saved += more;
        later_ns -= more;
    }
    refilled_ns = now;
    int64_t whole = (int64_t)saved;
    saved -= (double)whole;
    if (have + whole > MARK_CREDIT_NS)
        whole = have < MARK_CREDIT_NS ? MARK_CREDIT_NS - have : 0; /* the first one stays */
    if (whole) atomic_fetch_add(&kvp_mark_left_ns, whole);
}

/* From a process's first calls on, or for long enough, every submission was seen. */
int kvp_mark_follows(const struct mark_context *c) {
    return (!kvp_watch.attached && !resumed) || kvp_clock() - get(c->from_ns) > 50000000;
}

void kvp_mark_missed(void) { resumed++; }

static void resume(uint64_t now) {
    resumed++;
    put(resumed_ns, now);
    put(resumed_with_ns, atomic_load(&kvp_mark_left_ns));
    put(half_ns, 0);
    whole_ns = 0;
    for (int i = 0; i < MARK_STREAMS; i++) {
        struct mark_stream *s = &kvp_mark_streams[i];
        if (!atomic_load(&s->key) || !kvp_mark_try(s)) continue;
        if (!kvp_mark_is_gone(s)) put(s->flags, MARK_UNKNOWN);
        put(s->count, 0);
        put(s->kind, MARK_NONE);
        kvp_mark_release(s);
    }
    for (int i = 0; i < atomic_load(&kvp_mark_context_count); i++) {
        struct mark_context *c = &kvp_mark_contexts[i];
        if (c->ready) write_coverage(c, paused_ns, now, atomic_load(&why_paused));
        put(c->from_ns, c->written_ns = now);
        put(c->probe_at, 0);
        begin_while(c, now);
        c->anew = c->placed;
    }
    atomic_store(&paused_ns, 0);
    atomic_store(&kvp_watch.marks, 1);
}

/* Whether this stretch can stand for the time around it. What stood in the streams before it often ends where a step of
 * the program ends: a stretch that holds some of what that took is not always the same part of a step. */
static int is_long_enough(uint64_t now) {
    if (!whole_ns) return 0;
    uint64_t least = 5 * (whole_ns - (resumed_ns ? resumed_ns : whole_ns)) / 2;
    return now - whole_ns >= (least > get(stretch_ns) ? least : get(stretch_ns));
}

/* What marks cost ends a stretch. */
static void heed_budget(uint64_t now) {
    int64_t left = atomic_load(&kvp_mark_left_ns);
    if (!half_ns && left <= get(resumed_with_ns) / 2) {
        put(half_left_ns, left);
        put(half_ns, now);
    }
    if (!paused_ns && left <= 0 && is_long_enough(now)) kvp_mark_pause(REASON_BUDGET);
}

/* ---- the marks of a stream ------------------------------------------------------------------------------------ */

/* What reading a stream came to, and whether its lock is still held. */
enum outcome { READ, FAILED, LOCK_LOST };

/* Asks the driver for the oldest mark with the stream's lock let go: where the driver keeps a call of the program, in a
 * full queue, the question waits as long, and what the program submits meanwhile finds the lock free. Afterwards the
 * mark may be somebody else's. In simulated time the caller is the program itself. */
static enum outcome ask(struct mark_context *c, struct mark_stream *s, int *state, double *t) {
    struct mark *m = s->head;
    uint64_t entry_ns = m->entry_ns, now = kvp_clock();
    int lets_go = !kvp_mark_synchronous, tries = 0;
    if (lets_go) kvp_mark_release(s);
    *state = kvp_mark_driver.cuEventQuery(m->event);
    *t = *state ? -1 : time_of(c, m);
    while (lets_go && !kvp_mark_try(s)) {
        if (++tries == LOCK_TRIES) return LOCK_LOST;
        kvp_mark_relax();
    }
    if (s->head == m && m->entry_ns == entry_ns) {
        if (*state == MARK_NOT_READY) m->asked_ns = now;
        return READ;
    }
    kvp_mark_release(s);
    return LOCK_LOST;
}

/* Reads the stream's marks that are over and were made by `now`, in order; its lock is held. A program may go on making
 * them as fast as they are read: the next look is for those, and what they cost is looked at meanwhile. */
static enum outcome read_stream(struct mark_context *c, struct mark_stream *s, uint64_t now) {
    for (unsigned count = 1; s->head && s->head->entry_ns <= now; count++) {
        if (count % READ_AT_ONCE == 0) heed_budget(kvp_clock());
        struct mark *m = s->head;
        int state;
        double t;
        if (ask(c, s, &state, &t) == LOCK_LOST) return LOCK_LOST;
        if (state == MARK_NOT_READY) return READ;
        if (t < 0) return FAILED;
        s->head = m->next;
        if (!s->head) s->tail = NULL;
        s->standing--;
        consume(c, s, m, t);
        if (!c->reference || t - c->reference_ns > RELATIVE_NS) {
            if (c->reference) kvp_mark_give(c, c->reference);
            c->reference = m;
            c->reference_ns = t;
        } else
            kvp_mark_give(c, m);
    }
    return READ;
}

/* ---- a look at everything ------------------------------------------------------------------------------------ */

void kvp_mark_settle(struct mark_stream *s, uint32_t ended) {
    struct mark_context *c = &kvp_mark_contexts[s->context];
    uint64_t now = kvp_clock();
    if (kvp_mark_is_loose(s)) write_coverage(c, get(s->loose_ns), now, REASON_LOOSE);
    put(s->settled, ended);
    if (!(get(s->flags) & MARK_UNKNOWN)) return;
    put(s->flags, 0);
    put(s->count, 0);
    if (now > c->from_ns) put(c->from_ns, now);
}

/* Ends a run that nobody goes on with; or, in a stretch that has just begun, what stood in the stream before it. */
static void end_stale(struct mark_stream *s, uint64_t now) {
    uint32_t ended = atomic_load(&s->ended);
    int unknown = get(s->flags) & MARK_UNKNOWN || ended != get(s->settled), open = get(s->count) && !unknown;
    uint64_t last = get(s->last_ns);
    if ((!open && !(unknown && !paused_ns)) || s->per_thread) return;
    /* A mark in an idle stream may be reached late: behind copies that the same engine has to make for others. */
    if (unknown && !s->head && kvp_mark_idle(s)) {
        kvp_mark_settle(s, ended);
        return;
    }
    if (s->legacy && kvp_watch.blocking) return; /* a record would order the streams around it */
    if (open && (!get(s->first_ns) || (!paused_ns && (last > now || now - last < MARK_STALE_NS)))) return;
    if (open && s->tail && s->tail->flags & MARK_UNSEEN) return; /* the stream is busy: one of ours in it is enough */
    if (kvp_mark_outstanding(s) > get(kvp_mark_limit) / 4 && !kvp_mark_idle(s)) {
        put(s->busy_ns, now); /* it will be over between this look and another */
        return;
    }
    kvp_mark_place(s, open ? MARK_UNSEEN : 0);
}

/* Until when nothing is missing of a stream: up to its newest mark, and where it stood idle afterwards. */
static uint64_t through(const struct mark_context *c, const struct mark_stream *s, uint64_t now) {
    if (s->head ? s->head->flags & MARK_UNKNOWN : get(s->flags) & MARK_UNKNOWN && !s->per_thread) return 0;
    uint64_t marked = s->mark_ns ? (uint64_t)(s->mark_ns + c->offset_ns) : 0;
    uint64_t first = s->head ? s->head->first_ns : get(s->count) ? get(s->first_ns) : now;
    if (!s->head && kvp_mark_is_loose(s) && get(s->loose_ns) < first) first = get(s->loose_ns);
    return marked > first && (s->head || get(s->count)) ? marked : first;
}

static void look(int number, uint64_t now, int reads, int closing) {
    struct mark_context *c = &kvp_mark_contexts[number];
    uint64_t limit = paused_ns ? paused_ns : now, to = limit;
    void *was = NULL;
    if (!c->ready) return;
    kvp_mark_driver.cuCtxGetCurrent(&was);
    if (was != c->handle && kvp_mark_driver.cuCtxSetCurrent(c->handle)) return;
    for (int i = 0; i < MARK_STREAMS; i++) {
        struct mark_stream *s = &kvp_mark_streams[i];
        if (!atomic_load(&s->key) || s->context != number) continue;
        if (!kvp_mark_try(s)) {
            to = 0;
            continue;
        }
        enum outcome outcome = reads ? read_stream(c, s, now) : READ;
        if (outcome == LOCK_LOST) {
            to = 0;
            continue;
        }
        if (!kvp_watch.captures && !held && outcome == READ && !kvp_mark_is_gone(s)) end_stale(s, now);
        uint64_t known = through(c, s, limit);
        if (known < to) to = known;
        if (kvp_mark_is_gone(s) && !s->head) {
            release_held(s, 0, 0);
            kvp_mark_forget(s);
        }
        kvp_mark_release(s);
        if (outcome == FAILED) {
            kvp_mark_pause(REASON_ERROR);
            atomic_store(&stopping, 1);
            break;
        }
    }
    if (was != c->handle) kvp_mark_driver.cuCtxSetCurrent(was);
    if (c->written_ns < c->from_ns) c->written_ns = c->from_ns;
    if (to > c->from_ns && !paused_ns && !whole_ns) whole_ns = c->from_ns ? c->from_ns : now;
    int over = paused_ns && to >= paused_ns;
    if (to > c->written_ns &&
        (closing || over || to - c->written_ns > (now - born_ns < 10 * SECOND ? SECOND / 10 : SECOND))) {
        write_coverage(c, c->written_ns, to, REASON_NONE);
        c->written_ns = to;
    }
}

void kvp_mark_step(int closing) {
    if (!atomic_load(&kvp_mark_context_count) || pthread_mutex_trylock(&reading)) return;
    uint64_t now = kvp_clock();
    static unsigned ticks;
    int reads = ++ticks % READ_TICKS == 0 || closing || paused_ns || !whole_ns || kvp_mark_synchronous;
    for (int i = 0; i < atomic_load(&kvp_mark_context_count); i++) look(i, now, reads, closing);
    kvp_graphs_tell();
    kvp_device_looks_read();
    if (kvp_mark_synchronous && !closing) kvp_device_looks_prepare(&kvp_mark_contexts[0]);
    refill(now);
    heed_budget(now);
    if (paused_ns && !stopping && !closing && !kvp_watch.captures && !held && kvp_watch.on &&
        atomic_load(&why_paused) != REASON_ERROR && atomic_load(&kvp_mark_left_ns) >= MARK_SAVED_NS &&
        now - paused_ns > 2 * TICK_NS)
        resume(now);
    pthread_mutex_unlock(&reading);
}

/* ---- the thread ---------------------------------------------------------------------------------------------- */

static void *read_marks(void *unused) {
    (void)unused;
    int mode = RELAXED;
    prctl(PR_SET_NAME, "kvprobe-marks");
    kvp_thread.inside = IN_KVPROBE;
    kvp_mark_driver.cuThreadExchangeStreamCaptureMode(&mode);
    while (!atomic_load(&stopping)) {
        for (int i = 0; i < atomic_load(&kvp_mark_context_count); i++) {
            fill(&kvp_mark_contexts[i]);
        }
        if (!kvp_ring_blocked(BLOCKED_NS, kvp_clock())) kvp_device_looks_prepare(&kvp_mark_contexts[0]);
        kvp_mark_step(0);
        kvp_pauses_without_me();
        nanosleep(&(struct timespec){0, paused_ns ? SLOW_TICK_NS : TICK_NS}, NULL);
    }
    atomic_store(&running, 0);
    return NULL;
}

static void in_child(void) {
    kvp_graphs_in_child();
    if (!atomic_load(&owner)) return;
    kvp_watch.marks = 0;
    atomic_store(&stopping, 1);
}

static void at_end(void) { kvp_marks_stop(); }

void kvp_mark_reader_start(void) {
    static _Atomic int told;
    int no = 0;
    if (!born_ns) put(born_ns, kvp_clock());
    if (atomic_load(&kvp_mark_synchronous)) {
        atomic_store(&owner, (int)getpid());
        if (!atomic_exchange(&told, 1)) atexit(at_end);
        return;
    }
    if (!atomic_compare_exchange_strong(&running, &no, 1)) return;
    atomic_store(&stopping, 0);
    if (!atomic_exchange(&told, 1)) { /* after CUDA's own exit handlers were set up, so before they run */
        pthread_atfork(NULL, NULL, in_child);
        atexit(at_end);
    }
    atomic_store(&owner, (int)getpid());
    sigset_t were;
    pthread_t thread;
    pthread_attr_t attributes;
    kvp_block_signals(&were);
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    pthread_attr_setstacksize(&attributes, 256 << 10);
    if (pthread_create(&thread, &attributes, read_marks, NULL)) {
        atomic_store(&running, 0);
        kvp_watch.marks = 0;
    }
    pthread_attr_destroy(&attributes);
    pthread_sigmask(SIG_SETMASK, &were, NULL);
}

uint32_t kvp_mark_limit = MARK_BUSY_LIMIT;
int kvp_marks_asked;

void kvp_marks_start(void) {
    const char *asked = getenv("KVPROBE_MARKS");
    if (asked && *asked && says_no(asked)) return;
    kvp_marks_asked = asked && *asked && strcmp(asked, "auto");
    /* a larger scale gains marks nothing; behind a smaller one fewer submissions fill a queue */
    const char *scale = getenv("CUDA_SCALE_LAUNCH_QUEUES");
    double scaled = scale ? strtod(scale, NULL) : 1;
    put(kvp_mark_limit, scaled > 0 && scaled < 1 ? (uint32_t)(MARK_BUSY_LIMIT * scaled) : MARK_BUSY_LIMIT);
    atomic_store(&why_paused, REASON_NONE);
    atomic_store(&paused_ns, 0);
    kvp_watch.marks = 1;
}

void kvp_marks_await_reader(void) {
    for (int tries = 0; atomic_load(&owner) == (int)getpid() && tries < 1000; tries++) {
        if (!pthread_mutex_trylock(&reading)) {
            pthread_mutex_unlock(&reading);
            return;
        }
        nanosleep(&(struct timespec){0, 100000}, NULL);
    }
}

/* The helper may be recording just now: it is waited for, until it has seen that. */
void kvp_marks_hold(int captures) {
    if (atomic_load(&kvp_watch.marks) && !kvp_watch.captures) {
        kvp_mark_end_all(); /* a run's end is not seen later */
        atomic_store(&beside, 0);
    }
    atomic_fetch_add(&held, 1);
    atomic_fetch_add(&kvp_watch.captures, captures); /* whoever finds marks paused finds this, too */
    kvp_mark_pause(REASON_CAPTURE);
    kvp_marks_await_reader();
}

void kvp_marks_go_on(void) {
    atomic_fetch_sub(&held, 1);
    kvp_marks_nothing_holds();
}

/* In front of the end of the last capture: where all that was submitted meanwhile went into it, nothing was missed. */
void kvp_marks_capture_ends(void) {
    if (kvp_watch.captures != 1 || held || beside || stopping || !kvp_watch.on) return;
    if (!paused_ns || atomic_load(&why_paused) != REASON_CAPTURE) return;
    atomic_store(&paused_ns, 0);
    atomic_store(&kvp_watch.marks, 1);
}

void kvp_mark_beside(const kvp_record *r) {
    int capturing = 0;
    if (beside || !kvp_mark_submits(r)) return;
    if (kvp_stream_handle(r->stream) != (void *)1 && kvp_mark_driver.cuStreamIsCapturing &&
        !kvp_mark_driver.cuStreamIsCapturing(kvp_stream_handle(r->stream), &capturing) && capturing)
        return;
    atomic_store(&beside, 1);
}

/* The helper marks again when nothing holds it. Before the first mark there is none, and without one there never is. */
void kvp_marks_nothing_holds(void) {
    if (!paused_ns || held || kvp_watch.captures || !kvp_watch.on || atomic_load(&kvp_mark_context_count)) return;
    resumed++; /* what was submitted meanwhile may be outstanding */
    atomic_store(&paused_ns, 0);
    atomic_store(&kvp_watch.marks, 1);
}

/* For a process that counts the slots of a queue itself: 0: no mark is recorded until it says 1 as often. */
CUDA_EXPORT void kvprobe_marks(int on);
CUDA_EXPORT void kvprobe_marks(int on) { on ? kvp_marks_go_on() : kvp_marks_hold(0); }

static int outstanding(void) {
    int some = 0;
    for (int i = 0; i < MARK_STREAMS && !some; i++)
        some =
            atomic_load(&kvp_mark_streams[i].key) && (get(kvp_mark_streams[i].head) || get(kvp_mark_streams[i].count));
    return some;
}

/* The last look: whoever leaves has waited for its device most often. */
void kvp_marks_stop(void) {
    if (atomic_load(&owner) != (int)getpid()) {
        kvp_watch.marks = 0;
        return;
    }
    uint32_t inside = kvp_thread.inside;
    kvp_thread.inside = IN_KVPROBE;
    kvp_mark_pause(REASON_END);
    atomic_store(&stopping, 1);
    /* a helper that has lost its processor holds what is to be read: without it nothing at all would be told */
    for (int tries = 0; atomic_load(&running) && tries < HELPER_TRIES; tries++)
        nanosleep(&(struct timespec){0, 100000}, NULL);
    for (int tries = 0; tries < 20 && (tries < 2 || outstanding()); tries++) {
        kvp_mark_step(0);
        if (!kvp_mark_synchronous) nanosleep(&(struct timespec){0, 200000}, NULL);
    }
    kvp_mark_step(1);
    for (int i = 0, why = atomic_load(&why_paused); why != REASON_END && i < atomic_load(&kvp_mark_context_count); i++)
        write_coverage(&kvp_mark_contexts[i], paused_ns, kvp_clock(), why);
    atomic_store(&owner, 0);
    kvp_thread.inside = inside;
}

void kvp_marks_simulated(uint64_t (*now)(void)) {
    kvp_set_clock(now);
    atomic_store(&kvp_mark_synchronous, 1);
}
