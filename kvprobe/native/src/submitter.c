/* The submitter's steps: take what was handed over, see what the device has reached, submit what has room. */
#include "submitter.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define FENCES_EACH 128        /* events of ours on one compute stream that callers record themselves */
#define SHARED_FENCE_NS 200000 /* those who come within this time share one */
#define LAUNCHES 3             /* submissions that make up the work submitted ahead */
#define BURST_NS 1200000
#define KERNEL_LAUNCHES 2 /* by kernels fewer and longer: each begins and ends with the link half idle */
#define KERNEL_BURST_NS 2400000
#define COMPUTE_NS UINT64_C(1000000000) /* after compute was last seen in front of a copy it is thought to go on */
#define HELD_UP_NS 1000000      /* a stream whose work starts so much later than it could is held up by others */
#define LEAVE_NS 20000000       /* not more often than that */
#define FIRST_LAUNCH (4u << 20) /* of the first one after a pause, bytes */
#define LEAST_LAUNCH 262144     /* bytes */
#define MOST_LAUNCH (64u << 20) /* bytes */
#define LEAST_PAUSE_NS 15000    /* between two looks at the device */
#define MOST_PAUSE_NS 250000
#define SHARED_PAUSE_NS 60000
#define RENEW_CLOCK_NS UINT64_C(10000000000)
#define CLOCK_TRIES 8
#define CLOCK_TRY_NS 200000
#define AGAIN_CLOCK_NS UINT64_C(50000000) /* after it could not be read */
#define GOOD_CLOCK_NS 50000               /* the host was not interrupted between asking and hearing */
#define BAD_QUERIES 3
#define FORGET 0.005f         /* of what is known of a method, each time another one is used */
#define RATE_BYTES (1u << 20) /* of a marker from which on its rate is believed */

/* ---- fences --------------------------------------------------------------------------------------------------- */

/* How many events of ours stand on a compute stream, and the fence that is still to be recorded; with the lock. */
static uint32_t *fences_on(kvp_submitter *s, void *stream, struct fence ***open) {
    int free = -1;
    for (int i = 0; i < s->computes; i++) {
        bool used = s->compute[i].recorded || s->compute[i].open;
        if (s->compute[i].stream == stream) {
            *open = &s->compute[i].open;
            return &s->compute[i].recorded;
        }
        if (!used && free < 0) free = i;
    }
    if (free < 0 && s->computes < COMPUTE_STREAMS) free = s->computes++;
    if (free < 0) { /* more compute streams than anybody has: their events are not counted */
        *open = NULL;
        s->uncounted = 0;
        return &s->uncounted;
    }
    s->compute[free].stream = stream;
    *open = &s->compute[free].open;
    return &s->compute[free].recorded;
}

static void fence_passed(kvp_submitter *s, struct fence *f) {
    struct fence **open;
    if (f->state == FENCE_RECORDED) {
        uint32_t *standing = fences_on(s, f->stream, &open);
        if (*standing) --*standing;
    }
    f->state = FENCE_PASSED;
}

void kvp_fence_drop(kvp_submitter *s, struct kvp_job *j) {
    struct fence *f = j->after;
    if (!f) return;
    j->after = NULL;
    pthread_mutex_lock(&s->lock);
    if (--f->users == 0) {
        struct fence **open;
        fences_on(s, f->stream, &open);
        if (open && *open == f) *open = NULL;
        fence_passed(s, f);
        kvp_fence_give(s, f);
    }
    pthread_mutex_unlock(&s->lock);
}

/* Records an open fence; whoever comes first does it. 0: it is recorded; NOT_READY: another thread is at it. */
int kvp_fence_record(kvp_submitter *s, struct fence *f) {
    struct fence **open;
    pthread_mutex_lock(&s->lock);
    int state = f->state, code = f->code;
    if (state == FENCE_OPEN) {
        f->state = FENCE_RECORDING;
        uint32_t *standing = fences_on(s, f->stream, &open);
        if (open && *open == f) *open = NULL;
        ++*standing;
        f->users++;
    }
    pthread_mutex_unlock(&s->lock);
    if (state != FENCE_OPEN) return state == FENCE_RECORDING ? NOT_READY : code;
    code = CALL(s, event_record, event_stream_fn)(f->event, f->stream);
    if (code) kvp_clear_error(s);
    pthread_mutex_lock(&s->lock);
    f->state = FENCE_RECORDED;
    f->code = code;
    if (--f->users == 0) {
        fence_passed(s, f);
        kvp_fence_give(s, f);
    }
    pthread_mutex_unlock(&s->lock);
    return code;
}

/* The job waits for what `stream` holds now. Records an event on it; where FENCES_EACH of ours stand there already,
 * those who come within SHARED_FENCE_NS share one that the thread records: a later one covers all that an earlier one
 * did. */
int kvp_job_after(kvp_submitter *s, struct kvp_job *j, void *stream) {
    struct fence **open, *f = NULL, *made = NULL;
    bool later;
    pthread_mutex_lock(&s->lock);
    for (;;) {
        uint32_t *standing = fences_on(s, stream, &open);
        later = open && *standing >= FENCES_EACH && !j->inlined;
        if (later && *open) { /* others wait for the same one, which is still to be recorded */
            f = *open;
            f->users++;
            if (made) kvp_fence_give(s, made);
            pthread_mutex_unlock(&s->lock);
            j->after = f;
            return 0;
        }
        f = made ? made : kvp_fence_take(s);
        if (f) {
            f->stream = stream;
            f->state = later ? FENCE_OPEN : FENCE_RECORDED; /* nobody sees it before this call has returned */
            f->code = 0;
            f->users = 1;
            if (later)
                f->opened_ns = kvp_now_ns(), *open = f;
            else
                ++*standing;
            break;
        }
        pthread_mutex_unlock(&s->lock);
        made = kvp_fence_make(s);
        if (!made) return cudaErrorMemoryAllocation;
        pthread_mutex_lock(&s->lock);
    }
    pthread_mutex_unlock(&s->lock);
    j->after = f;
    if (later) return 0;
    f->code = CALL(s, event_record, event_stream_fn)(f->event, stream);
    if (!f->code) return 0;
    int code = f->code;
    kvp_clear_error(s);
    kvp_fence_drop(s, j);
    return code;
}

/* Records the fences that callers left to the thread; returns when the next of them is due. */
static uint64_t record_fences(kvp_submitter *s, uint64_t now) {
    uint64_t next = UINT64_MAX;
    for (int i = 0; i < COMPUTE_STREAMS; i++) {
        if (i >= atomic_load(&s->computes)) break;
        pthread_mutex_lock(&s->lock);
        struct fence *f = s->compute[i].open;
        uint64_t due = f ? f->opened_ns + SHARED_FENCE_NS : UINT64_MAX;
        if (f && due <= now) f->users++;
        pthread_mutex_unlock(&s->lock);
        if (due <= now) {
            struct kvp_job borrowed = {.after = f};
            kvp_fence_record(s, f);
            kvp_fence_drop(s, &borrowed);
        } else if (due < next) {
            next = due;
        }
    }
    return next;
}

/* ---- the device's clock ---------------------------------------------------------------------------------------- */

/* Whether an event on the clock's stream is reached soon. The stream is idle, but may share its hardware channel with
 * one that is held back: nobody waits for that. */
static bool reached_soon(kvp_submitter *s, void *event, uint64_t until) {
    if (!s->threaded) return !CALL(s, event_synchronize, handle_fn)(event); /* virtual time goes on only so */
    int code;
    while ((code = CALL(s, event_query, handle_fn)(event)) == NOT_READY && kvp_now_ns() < until);
    if (code) kvp_clear_error(s);
    return !code;
}

/* Pairs the device's clock with the host's: right after an event on an idle stream is reached. Where it is not reached
 * the pair before stays. */
void kvp_renew_device_clock(kvp_submitter *s) {
    uint64_t best = UINT64_MAX;
    for (int tries = 0; tries < CLOCK_TRIES && best > GOOD_CLOCK_NS; tries++) {
        void *event = s->clock_event[1];
        uint64_t before = kvp_now_ns();
        if (!event) return;
        if (CALL(s, event_record, event_stream_fn)(event, s->config.clock_stream)) {
            kvp_clear_error(s);
            break;
        }
        if (!reached_soon(s, event, before + CLOCK_TRY_NS)) break;
        uint64_t took = kvp_now_ns() - before;
        if (took >= best && tries < CLOCK_TRIES - 1) continue;
        best = took;
        pthread_mutex_lock(&s->lock);
        s->clock_ns = before + took / 2;
        s->clock_event[1] = s->clock_event[0];
        s->clock_event[0] = event;
        atomic_fetch_add(&s->clock_pair, 1);
        pthread_mutex_unlock(&s->lock);
    }
    s->clock_at = kvp_now_ns() - (best == UINT64_MAX ? RENEW_CLOCK_NS - AGAIN_CLOCK_NS : 0);
}

/* Of any thread: a caller that retires its own jobs asks while the submitter's thread may pair the clocks anew. */
uint64_t kvp_device_ns(kvp_submitter *s, void *event) {
    for (;;) {
        float ms = 0;
        pthread_mutex_lock(&s->lock);
        uint64_t clock_ns = s->clock_ns;
        void *at = s->clock_event[0];
        uint32_t pair = atomic_load(&s->clock_pair);
        pthread_mutex_unlock(&s->lock);
        if (!event || !clock_ns) return 0;
        if (CALL(s, event_elapsed, elapsed_fn)(&ms, at, event)) {
            kvp_clear_error(s);
            return 0;
        }
        if (pair == atomic_load(&s->clock_pair)) return clock_ns + (uint64_t)(int64_t)((double)ms * 1e6);
    }
}

/* ---- the end of a job ------------------------------------------------------------------------------------------ */

static void record_transfer(kvp_submitter *s, struct kvp_job *j) {
    if (s->config.detail == KVP_OFF) return;
    const kvp_job_status *t = &j->status;
    uint64_t end = t->copy_end_ns ? t->copy_end_ns : t->noticed_ns, start = t->copy_start_ns ? t->copy_start_ns : end;
    if (end > t->noticed_ns) end = t->noticed_ns;
    if (end < j->status.built_ns) end = j->status.built_ns;
    if (start < j->status.built_ns) start = j->status.built_ns;
    if (start > end) start = end;
    uint64_t submit = t->submit_ns < end - j->status.built_ns ? t->submit_ns : end - j->status.built_ns;
    uint64_t wait = start - j->status.built_ns > submit ? start - j->status.built_ns - submit : 0;
    float parts[4] = {(float)(j->status.built_ns - j->status.requested_ns) / 1e3f, (float)submit / 1e3f,
                      (float)wait / 1e3f, (float)(end - j->status.built_ns - submit - wait) / 1e3f};
    kvp_record record = {.start_ns = j->status.requested_ns,
                         .dur_ns = t->noticed_ns > j->status.requested_ns ? t->noticed_ns - j->status.requested_ns : 0,
                         .stream = t->stream,
                         .bytes = t->bytes,
                         .tid = (uint32_t)t->tid,
                         .transfer = (uint32_t)t->id,
                         .count = (uint32_t)t->copies,
                         .result = t->fault != 0,
                         .call = KVP_CALL_transfer,
                         .direction = j->direction == STORE ? KVP_D2H : KVP_H2D};
    memcpy(&record.src, parts, 8);
    memcpy(&record.dst, parts + 2, 8);
    kvp_ring_write(&record, s->config.detail >= KVP_TRANSFERS);
}

void kvp_finish(kvp_submitter *s, struct kvp_job *j, int error, uint32_t fault) {
    kvp_job_status *t = &j->status;
    struct direction *dir = &s->direction[j->direction];
    kvp_fence_drop(s, j);
    t->noticed_ns = kvp_now_ns();
    if (fault && !t->fault) {
        t->error = error;
        t->fault = fault;
    }
    record_transfer(s, j);
    if (j->range) kvp_nvtx_range_end(j->range);
    kvp_job_spare(j);
    atomic_fetch_sub(&dir->pending_bytes, t->bytes);
    atomic_fetch_sub(j->inlined ? &dir->inlined_jobs : &dir->pushed, 1);
    pthread_mutex_lock(&s->lock);
    if (s->ended_count == s->ended_room) {
        uint64_t room = s->ended_room * 2, *grown = malloc(room * sizeof *grown);
        if (grown) {
            for (uint64_t i = 0; i < s->ended_count; i++) grown[i] = s->ended[(s->ended_first + i) % s->ended_room];
            free(s->ended);
            s->ended = grown;
            s->ended_first = 0;
            s->ended_room = room;
        } else { /* the oldest is not told of; its status says so all the same */
            s->ended_first = (s->ended_first + 1) % s->ended_room;
            s->ended_count--;
        }
    }
    s->ended[(s->ended_first + s->ended_count++) % s->ended_room] = t->id;
    __atomic_store_n(&t->state, t->fault ? KVP_FAILED : KVP_DONE, __ATOMIC_RELEASE);
    pthread_mutex_unlock(&s->lock);
    atomic_fetch_sub(&s->pending, 1);
    kvp_job_release(t);
    kvp_changed(s);
}

uint64_t kvp_take_ended(kvp_submitter *s, uint64_t *ids, uint64_t max) {
    pthread_mutex_lock(&s->lock);
    uint64_t n = s->ended_count < max ? s->ended_count : max;
    for (uint64_t i = 0; i < n; i++) ids[i] = s->ended[(s->ended_first + i) % s->ended_room];
    s->ended_first = (s->ended_first + n) % s->ended_room;
    s->ended_count -= n;
    pthread_mutex_unlock(&s->lock);
    return n;
}

/* ---- markers --------------------------------------------------------------------------------------------------- */

static bool line_empty(const struct line *l) { return l->head == l->tail; }

/* 1: reached, 0: not yet, below 0: the device does not answer. */
static int reached(kvp_submitter *s, const struct marker *m) {
    int code = m->event ? CALL(s, event_query, handle_fn)(m->event) : NOT_READY + 1;
    if (code == NOT_READY) return 0;
    if (!code) {
        s->bad_queries = 0;
        return 1;
    }
    /* One failing query says nothing about the copies: ask the stream itself, and ask again. */
    if (m->event) kvp_clear_error(s);
    int second = CALL(s, stream_query, handle_fn)(m->stream);
    if (second == NOT_READY) return 0;
    if (!second) {
        s->bad_queries = 0;
        return 1;
    }
    kvp_clear_error(s);
    if (++s->bad_queries < BAD_QUERIES) return 0;
    return -second;
}

/* When its copies began: at once on an idle stream, else when those before them ended. */
static uint64_t start_ns(kvp_submitter *s, const struct marker *m, const struct line *l) {
    uint64_t start = m->start ? kvp_device_ns(s, m->start) : m->idle ? m->submitted_ns : l->end_ns;
    return start > l->end_ns ? start : l->end_ns;
}

static void start_of(const struct marker *m, struct line *l, struct kvp_job *jobs, uint64_t start, uint64_t end) {
    for (struct kvp_job *j = jobs; j && j->sequence <= m->begun; j = j->next)
        if (!j->status.copy_start_ns) j->status.copy_start_ns = start;
    l->end_ns = end;
}

static struct kvp_job *ends_here(struct kvp_job **first, struct kvp_job **last, uint64_t sequence) {
    struct kvp_job *j = *first;
    if (!j || j->sequence > sequence || j->status.state != KVP_IN_FLIGHT) return NULL;
    *first = j->next;
    if (!*first) *last = NULL;
    return j;
}

/* Nobody asks these jobs for their event any more: it may be recorded anew. */
static void forget_event(kvp_submitter *s, struct kvp_job *first, uint64_t sequence) {
    pthread_mutex_lock(&s->lock);
    for (struct kvp_job *j = first; j && j->sequence <= sequence && j->status.state == KVP_IN_FLIGHT; j = j->next)
        j->end_event = NULL;
    pthread_mutex_unlock(&s->lock);
}

static void end_job(kvp_submitter *s, struct kvp_job *j, uint64_t end_ns) {
    j->status.copy_end_ns = end_ns;
    if (!end_ns) j->status.copy_start_ns = 0;
    kvp_finish(s, j, j->failed, j->failed ? j->status.fault : 0);
}

/* Work that starts long after it could stands behind somebody else's in the hardware's channel: streams share those. */
static void note_start(struct direction *dir, const struct marker *m, uint64_t start, uint64_t end, uint64_t now) {
    uint64_t could = m->idle ? m->submitted_ns : start,
             expected = (uint64_t)((double)m->bytes / (double)dir->rate * 1e9);
    uint64_t took = end > could ? end - could : 0;
    if (!could || took < 3 * expected + HELD_UP_NS || now < dir->left_ns + LEAVE_NS) return;
    dir->held_up[dir->at_stream]++;
    dir->leave = true;
    dir->left_ns = now;
}

/* What a method took against what its row says; what is not used is forgotten, so that it is tried again. */
static void note_method(kvp_submitter *s, struct direction *dir, const struct marker *m, uint64_t took) {
    if (!m->expected_ns || m->bytes < RATE_BYTES || m->idle) return; /* idle: submitting is part of what it took */
    float seen = (float)((double)took / (double)m->expected_ns);
    if (seen < 0.5f) seen = 0.5f;
    if (seen > 20) seen = 20;
    for (uint32_t i = 0; i < KVP_CHOOSE_ROWS; i++)
        dir->factors[i] += (i == (uint32_t)m->row) ? (seen - dir->factors[i]) * 0.5f : (1 - dir->factors[i]) * FORGET;
    (void)s;
}

static void retire(kvp_submitter *s, int d, uint64_t now) {
    struct direction *dir = &s->direction[d];
    while (!line_empty(&dir->line)) {
        struct marker *m = &dir->line.marker[dir->line.head % MARKERS];
        int is = reached(s, m);
        if (is < 0) {
            kvp_lose(s, -is, KVP_FAULT_DEVICE);
            return;
        }
        if (!is) return;
        uint64_t end = kvp_device_ns(s, m->event), start = start_ns(s, m, &dir->line);
        if (end && dir->rate) note_start(dir, m, start, end, now);
        if (end > start && start) note_method(s, dir, m, end - start);
        if (m->bytes >= RATE_BYTES && end > start && start) {
            uint64_t rate = (uint64_t)((double)m->bytes / (double)(end - start) * 1e9);
            dir->rate = dir->rate ? (dir->rate * 3 + rate) / 4 : rate;
        }
        start_of(m, &dir->line, dir->flying, start, end);
        if (dir->first && dir->first->begun && !dir->first->status.copy_start_ns)
            dir->first->status.copy_start_ns = start;
        if (m->list >= 0) s->lists[s->lists_free++] = m->list;
        atomic_fetch_sub(&dir->places, m->places);
        atomic_fetch_sub(&dir->bytes, m->bytes);
        dir->line.head++;
        dir->pause_ns = LEAST_PAUSE_NS;
        dir->progress_ns = now;
        forget_event(s, dir->flying, m->sequence);
        kvp_event_give(s, m->event);
        kvp_event_give(s, m->start);
        struct kvp_job *j;
        while ((j = ends_here(&dir->flying, &dir->flying_last, m->sequence))) end_job(s, j, end);
    }
}

void kvp_retire_shared(kvp_submitter *s, int d) {
    struct direction *dir = &s->direction[d];
    if (pthread_mutex_trylock(&dir->shared_lock)) return; /* whoever has it looks himself */
    int lost = 0;
    while (!line_empty(&dir->shared)) {
        struct marker *m = &dir->shared.marker[dir->shared.head % MARKERS];
        int is = reached(s, m);
        if (is < 0) lost = -is;
        if (is <= 0) break;
        uint64_t end = kvp_device_ns(s, m->event);
        start_of(m, &dir->shared, dir->inlined, start_ns(s, m, &dir->shared), end);
        atomic_fetch_sub(&dir->shared_places, m->places);
        dir->shared.head++;
        forget_event(s, dir->inlined, m->sequence);
        kvp_event_give(s, m->event);
        kvp_event_give(s, m->start);
        struct kvp_job *j; /* with the lock: whoever retires the next ones tells of them after these */
        while ((j = ends_here(&dir->inlined, &dir->inlined_last, m->sequence))) end_job(s, j, end);
    }
    pthread_mutex_unlock(&dir->shared_lock);
    if (lost) atomic_store(&s->broken, lost); /* the thread ends everything at its next step */
}

static void fail_all(kvp_submitter *s, struct kvp_job **first, struct kvp_job **last, int code, uint32_t fault) {
    while (*first) {
        struct kvp_job *j = *first;
        *first = j->next;
        kvp_finish(s, j, code, fault);
    }
    *last = NULL;
}

static void drop_line(kvp_submitter *s, struct line *l) {
    for (; !line_empty(l); l->head++) {
        struct marker *m = &l->marker[l->head % MARKERS];
        kvp_event_give(s, m->event);
        kvp_event_give(s, m->start);
        if (m->list >= 0) s->lists[s->lists_free++] = m->list;
    }
}

static void take_incoming(kvp_submitter *s);

void kvp_lose(kvp_submitter *s, int code, uint32_t fault) {
    atomic_store(&s->fault, fault);
    atomic_store(&s->broken, code ? code : -1);
    take_incoming(s);
    for (int d = 0; d < 2; d++) {
        struct direction *dir = &s->direction[d];
        drop_line(s, &dir->line);
        atomic_store(&dir->places, 0);
        atomic_store(&dir->bytes, 0);
        fail_all(s, &dir->flying, &dir->flying_last, code, fault);
        fail_all(s, &dir->first, &dir->last, code, fault);
        if (pthread_mutex_trylock(&dir->shared_lock)) continue; /* the caller inside sees `broken` and comes back */
        drop_line(s, &dir->shared);
        atomic_store(&dir->shared_places, 0);
        struct kvp_job *inlined = dir->inlined, *last = dir->inlined_last;
        if (last && last->busy) { /* its caller is inside: it ends at the step after that */
            struct kvp_job **at = &inlined;
            while (*at != last) at = &(*at)->next;
            *at = NULL;
            dir->inlined = last;
        } else {
            dir->inlined = dir->inlined_last = NULL;
        }
        pthread_mutex_unlock(&dir->shared_lock);
        fail_all(s, &inlined, &last, code, fault);
    }
}

/* ---- submitting ------------------------------------------------------------------------------------------------ */

static void take_incoming(kvp_submitter *s) {
    pthread_mutex_lock(&s->lock);
    struct kvp_job *j = s->incoming;
    s->incoming = s->incoming_last = NULL;
    pthread_mutex_unlock(&s->lock);
    while (j) {
        struct kvp_job *next = j->next;
        struct direction *dir = &s->direction[j->direction];
        j->next = NULL;
        j->sequence = ++dir->sequence;
        if (dir->last)
            dir->last->next = j;
        else
            dir->first = j;
        dir->last = j;
        j = next;
    }
}

static void pop(struct direction *dir) {
    dir->first = dir->first->next;
    if (!dir->first) dir->last = NULL;
}

static void fly(struct direction *dir, struct kvp_job *j) {
    j->next = NULL;
    if (dir->flying_last)
        dir->flying_last->next = j;
    else
        dir->flying = j;
    dir->flying_last = j;
}

/* All of it is submitted, or will ever be: it ends at the newest marker of its direction. */
static void submitted(kvp_submitter *s, struct direction *dir, struct kvp_job *j, void *end_event) {
    uint64_t sequence = j->sequence; /* once it has ended, its memory may be gone */
    kvp_fence_drop(s, j);
    j->status.submitted_ns = kvp_now_ns();
    pthread_mutex_lock(&s->lock);
    j->end_event = end_event;
    __atomic_store_n(&j->status.state, KVP_IN_FLIGHT, __ATOMIC_RELEASE);
    pthread_mutex_unlock(&s->lock);
    if (line_empty(&dir->line)) { /* nothing of it, nor of its predecessors, is outstanding */
        struct kvp_job *each;
        while ((each = ends_here(&dir->flying, &dir->flying_last, sequence))) end_job(s, each, 0);
    } else {
        struct marker *newest = &dir->line.marker[(dir->line.tail - 1) % MARKERS];
        if (newest->sequence < sequence) newest->sequence = sequence;
    }
    kvp_changed(s);
}

static void fail_head(kvp_submitter *s, struct direction *dir, int code, uint32_t fault) {
    struct kvp_job *j = dir->first;
    int d = j->direction;
    pop(dir);
    fly(dir, j);
    j->failed = code ? code : -1;
    j->status.error = code;
    j->status.fault = fault;
    struct marker *newest = line_empty(&dir->line) ? NULL : &dir->line.marker[(dir->line.tail - 1) % MARKERS];
    submitted(s, dir, j, newest ? newest->event : NULL);
    /* A call that failed for good, or a device that is gone? */
    void *stream = dir->stream ? dir->stream : s->config.pooled[d][0];
    int code_now = 0;
    for (int i = 0; i < BAD_QUERIES; i++) {
        code_now = CALL(s, stream_query, handle_fn)(stream);
        if (!code_now || code_now == NOT_READY) return;
        kvp_clear_error(s);
    }
    if (code_now) kvp_lose(s, code_now, KVP_FAULT_DEVICE);
}

/* Whether the head may start: what it waits for is over, or it must be submitted before (hurry). 1 yes, 0 not yet. */
static int gate(kvp_submitter *s, struct direction *dir, uint64_t now) {
    struct kvp_job *j = dir->first;
    struct fence *f = j->after;
    if (!f) return 1;
    int code = kvp_fence_record(s, f);
    if (code == NOT_READY) return 0;
    if (!code) code = CALL(s, event_query, handle_fn)(f->event);
    if (code == NOT_READY) {
        s->computing_ns = now;
        if (j->sequence <= dir->hurry) return 2;
        if (!dir->gate_since) dir->gate_since = now;
        return 0;
    }
    if (code) {
        kvp_clear_error(s);
        fail_head(s, dir, code, KVP_FAULT_WAIT);
        return -1;
    }
    dir->gate_since = 0;
    pthread_mutex_lock(&s->lock);
    fence_passed(s, f);
    pthread_mutex_unlock(&s->lock);
    kvp_fence_drop(s, j);
    return 1;
}

/* Bytes of one submission, so that `launches` of them are the work that lies ahead of the device. */
static uint64_t launch_bytes(const kvp_submitter *s, const struct direction *dir, int d, bool kernel, int *launches) {
    uint64_t rate = dir->rate, burst = s->config.burst_ns;
    if (!burst) burst = kernel ? KERNEL_BURST_NS : BURST_NS;
    *launches = kernel ? KERNEL_LAUNCHES : LAUNCHES;
    if (s->config.bytes_per_s[d] && s->config.bytes_per_s[d] < rate) rate = s->config.bytes_per_s[d];
    uint64_t bytes = (uint64_t)((double)rate * (double)burst * 1e-9) / (uint64_t)*launches;
    return bytes < LEAST_LAUNCH ? LEAST_LAUNCH : bytes > MOST_LAUNCH ? MOST_LAUNCH : bytes;
}

static bool by_kernel(int method) { return method == KVP_KERNEL || method == KVP_STAGED; }

/* The next pooled stream; the one that others held up least. */
static void take_stream(kvp_submitter *s, struct direction *dir, int d) {
    uint32_t n = s->config.streams, best = (dir->at_stream + 1) % n;
    for (uint32_t i = 1; i <= n; i++) {
        uint32_t at = (dir->at_stream + i) % n;
        if (dir->held_up[at] < dir->held_up[best]) best = at;
    }
    dir->at_stream = best;
    dir->stream = s->config.pooled[d][best];
    dir->leave = false;
}

static uint32_t room_for(const kvp_submitter *s, const struct direction *dir) {
    /* Loads and stores may share a channel: each takes at most half of its places, the shared streams' included. */
    uint32_t spare = s->config.depth / 4 < 32 ? s->config.depth / 4 : 32;
    uint64_t usable = (s->config.depth - spare) / 2,
             held = atomic_load(&dir->places) + atomic_load(&dir->shared_places);
    if (held + 2 < usable) return (uint32_t)(usable - held - 2); /* 2: the events around the copies */
    return held ? 0 : 1;
}

struct attempt {
    uint32_t count, places;
    uint64_t bytes, ns;
    int code;
};

/* One submission by one method; `taken` of the run's copies. */
static struct attempt try_method(kvp_submitter *s, struct direction *dir, int d, int method, uint32_t ctas, uint32_t n,
                                 uint32_t room, uint64_t most, int32_t list) {
    struct attempt a = {0};
    kvp_copy_list *where = list >= 0 ? (kvp_copy_list *)&s->config.list[list] : NULL;
    int direction = d == STORE ? KVP_D2H : KVP_H2D;
    uint32_t transfer = (uint32_t)dir->first->status.id;
    if (method == KVP_LOOP) {
        a.count = n < room ? n : room;
        uint64_t *dst = s->dst, *src = s->src, *sizes = s->sizes;
        for (uint32_t i = 0; i < a.count; i++)
            dst[i] = s->run[i].dst, src[i] = s->run[i].src, sizes[i] = s->run[i].bytes;
        kvp_submit_options o = {
            .copy = (kvp_memcpy_async_fn)s->config.copier.cuda.memcpy_async,
            .stream = dir->stream,
            .kind = d == STORE ? cudaMemcpyDeviceToHost : cudaMemcpyHostToDevice,
            .transfer = transfer,
            .direction = (uint8_t)(direction | (s->config.pageable ? KVP_MEM_PAGEABLE : KVP_MEM_PINNED) << 4),
            .detail = (uint8_t)s->config.detail,
            .blocked_ns = UINT64_MAX};
        if (s->config.ranges && s->config.detail >= KVP_COPIES)
            o.range_push = kvp_nvtx_push, o.range_pop = kvp_nvtx_pop;
        kvp_submit_result r;
        uint64_t begin = kvp_now_ns();
        a.code = kvp_submit(&o, a.count, dst, src, sizes, 0, &r);
        a.ns = kvp_now_ns() - begin;
        a.count = (uint32_t)r.submitted;
        a.places = a.count;
        if (r.max_ns > s->longest_ns) s->longest_ns = r.max_ns;
    } else {
        uint32_t calls = 0, taken = 0;
        a.count = kvp_copy_plan(&s->config.copier, method, s->run, n, direction, room, most,
                                where ? where->capacity : 0, &a.places);
        if (!a.count) return a;
        uint64_t bytes = 0, begin = kvp_now_ns();
        for (uint32_t i = 0; i < a.count; i++) bytes += s->run[i].bytes;
        a.code = kvp_copy_submit(&s->config.copier, method, s->run, a.count, direction, ctas, dir->stream, where,
                                 &taken, &calls);
        a.ns = kvp_now_ns() - begin;
        if (a.ns > s->longest_ns) s->longest_ns = a.ns;
        kvp_record record = {.start_ns = begin,
                             .dur_ns = a.ns,
                             .stream = (uint64_t)(uintptr_t)dir->stream,
                             .src = s->run[0].src,
                             .dst = s->run[0].dst,
                             .bytes = bytes,
                             .tid = kvp_thread_id(),
                             .transfer = transfer,
                             .count = a.count,
                             .result = (uint16_t)a.code,
                             .call = method == KVP_BATCH ? KVP_CALL_cudaMemcpyBatchAsync : KVP_CALL_cuLaunchKernel,
                             .direction = (uint8_t)(direction | KVP_MEM_PINNED << 4)};
        if (s->config.detail != KVP_OFF) kvp_ring_write(&record, s->config.detail >= KVP_COPIES);
        if (a.code) a.count = 0; /* submitted again by another method: the same bytes to the same place */
    }
    if (a.code) kvp_clear_error(s);
    return a;
}

static int lower_method(const kvp_submitter *s, int method) {
    static const int order[] = {KVP_KERNEL, KVP_STAGED, KVP_BATCH, KVP_LOOP};
    int at = 0;
    while (order[at] != method) at++;
    for (at++; at < 3; at++)
        if (!(s->methods_off & 1u << order[at])) return order[at];
    return KVP_LOOP;
}

/* Puts an event behind what was just submitted; where that fails the stream itself is asked. */
static void add_marker(kvp_submitter *s, struct direction *dir, const struct attempt *a, void *start, int32_t list,
                       uint64_t begun, uint64_t now, bool idle) {
    void *event = kvp_event_take(s);
    if (event && CALL(s, event_record, event_stream_fn)(event, dir->stream)) {
        kvp_clear_error(s);
        kvp_event_give(s, event);
        event = NULL;
    }
    uint64_t rate = dir->rate ? dir->rate : 1;
    dir->due_ns = (dir->due_ns > now ? dir->due_ns : now) + (uint64_t)((double)a->bytes / (double)rate * 1e9);
    uint32_t places = a->places + (event != NULL) + (start != NULL);
    dir->line.marker[dir->line.tail % MARKERS] = (struct marker){.event = event,
                                                                 .start = start,
                                                                 .stream = dir->stream,
                                                                 .bytes = a->bytes,
                                                                 .begun = begun,
                                                                 .submitted_ns = now,
                                                                 .idle = idle,
                                                                 .due_ns = dir->due_ns,
                                                                 .places = places,
                                                                 .list = list};
    dir->line.tail++;
    dir->pause_ns = LEAST_PAUSE_NS;
    atomic_fetch_add(&dir->places, places);
    atomic_fetch_add(&dir->bytes, a->bytes);
}

/* Whether what a job waits for is over. */
static bool passed(kvp_submitter *s, struct kvp_job *j) {
    struct fence *f = j->after;
    if (!f) return true;
    pthread_mutex_lock(&s->lock);
    int state = f->state, code = f->code;
    pthread_mutex_unlock(&s->lock);
    if (state == FENCE_RECORDED && !code) {
        code = CALL(s, event_query, handle_fn)(f->event);
        if (code && code != NOT_READY) kvp_clear_error(s); /* when it comes first it is asked again */
        if (code) return false;
        pthread_mutex_lock(&s->lock);
        fence_passed(s, f);
        pthread_mutex_unlock(&s->lock);
        state = FENCE_PASSED;
    }
    if (state != FENCE_PASSED) return false;
    kvp_fence_drop(s, j);
    return true;
}

/* Jobs whose copies may stand in one submission with the head's: ready, and writing other blocks. */
static uint32_t gather(kvp_submitter *s, struct direction *dir, uint64_t most, uint64_t largest, bool many) {
    uint64_t bytes = 0, asked = 0;
    uint32_t n = 0;
    for (struct kvp_job *j = dir->first; j; j = j->next) {
        if (j != dir->first) {
            if (!many || !passed(s, j)) break;
            if (kvp_job_conflicts(j, dir->stamp, dir->first->sequence)) break;
        }
        struct cursor at = j->at;
        n += kvp_job_copies(j, &at, s->run + n, RUN_MAX - n, most, largest, true, &bytes, &asked);
        if (n == RUN_MAX || bytes >= most || !kvp_job_all(j, &at)) break;
    }
    return n;
}

/* Books the first `count` copies of the run with the jobs they belong to. */
static uint64_t book(kvp_submitter *s, struct direction *dir, const struct attempt *a, uint64_t most, uint64_t largest,
                     int method) {
    uint64_t left = a->count, bytes = 0, begun = 0;
    while (left && dir->first) {
        struct kvp_job *j = dir->first;
        uint64_t asked = 0;
        j->begun = 1;
        __atomic_store_n(&j->status.state, KVP_SUBMITTING, __ATOMIC_RELAXED);
        begun = j->sequence;
        left -= kvp_job_copies(j, &j->at, s->run, (uint32_t)left, most, largest, true, &bytes, &asked);
        j->status.submitted += asked;
        j->status.stream = (uint64_t)(uintptr_t)dir->stream;
        j->status.calls += method == KVP_LOOP ? a->count : 1;
        j->status.submit_ns += a->ns;
        if (a->ns > j->status.longest_ns) j->status.longest_ns = a->ns;
        j->status.methods |= 1u << method;
        if (!kvp_job_all(j, &j->at)) break;
        pop(dir);
        fly(dir, j);
    }
    return begun;
}

/* Submits once from the head of a direction. 1: it did; 0: nothing may be submitted now. */
static int submit_once(kvp_submitter *s, int d, uint64_t now, bool others) {
    struct direction *dir = &s->direction[d];
    struct kvp_job *head = dir->first;
    if (!head) return 0;
    if (atomic_load(&dir->inlined_jobs) || atomic_load(&dir->shared_places)) return 0; /* those came before */
    int open = gate(s, dir, now);
    if (open < 0) return 1;
    if (!open) return 0;
    bool hurry = head->sequence <= dir->hurry;
    int launches;
    uint64_t launch = launch_bytes(s, dir, d, by_kernel(dir->method), &launches);
    uint64_t ahead = launch * (uint64_t)(others ? 1 : launches), in_flight = atomic_load(&dir->bytes);
    if (in_flight && in_flight + launch / 2 > ahead && !hurry) return 0;
    if (dir->leave && in_flight && !hurry) return 0;
    if (s->config.bytes_per_s[d] && dir->next_ns > now) return 0;
    uint32_t room = room_for(s, dir);
    if (!room || kvp_events_left(s) < 4 || (s->config.lists && !s->lists_free) ||
        dir->line.tail - dir->line.head >= MARKERS - 1)
        return 0;
    if (line_empty(&dir->line) && !head->begun) { /* nothing is outstanding: any stream keeps the order */
        take_stream(s, dir, d);
        dir->due_ns = now;
        dir->progress_ns = now;
    }
    bool many = !s->config.pageable && !head->dst;
    if (many && !head->begun) kvp_job_conflicts(head, dir->stamp, UINT64_MAX); /* what it writes is noted */
    if (open == 2) {                                                           /* the stream is kept: begun */
        int code = CALL(s, stream_wait_event, stream_event_fn)(dir->stream, head->after->event, 0);
        if (code) {
            kvp_clear_error(s);
            fail_head(s, dir, code, KVP_FAULT_WAIT);
            return 1;
        }
        kvp_fence_drop(s, head);
        head->begun = 1;
    }
    if (s->config.ranges && !head->range)
        head->range = kvp_nvtx_range_start(head->direction == STORE, (uint32_t)head->status.id,
                                           (uint64_t)(uintptr_t)dir->stream, head->status.bytes);
    uint64_t largest = launch_bytes(s, dir, d, false, &launches), run_bytes = 0;
    launch = launch_bytes(s, dir, d, true, &launches);
    if (line_empty(&dir->line)) dir->ramp = FIRST_LAUNCH; /* the device begins at once */
    if (launch > dir->ramp) launch = dir->ramp;
    dir->ramp = dir->ramp < MOST_LAUNCH ? 2 * dir->ramp : dir->ramp; /* put together while the one before is copied */
    if (largest > launch) largest = launch;
    uint64_t gathered = launch;
    uint32_t n = gather(s, dir, gathered, largest, many);
    for (uint32_t i = 0; i < n; i++) run_bytes += s->run[i].bytes;
    uint32_t ctas = 0;
    int method = KVP_LOOP, row = -1;
    if (!s->config.pageable && s->config.methods)
        row = kvp_choose_row(s->config.methods, ~(s->methods_off | 1u << KVP_STAGED), dir->factors,
                             s->computing_ns && now - s->computing_ns < COMPUTE_NS ? KVP_BESIDE : KVP_QUIET,
                             d == STORE ? KVP_D2H : KVP_H2D, run_bytes / n, n);
    const kvp_method_row *chosen = row < 0 ? NULL : &s->config.methods->row[d][row];
    if (chosen) method = (int)chosen->method, ctas = chosen->ctas;
    if (!by_kernel(method)) { /* shorter submissions: what others copy stands behind them */
        launch = largest;
        uint64_t bytes = 0;
        for (uint32_t i = 0; i < n; i++)
            if ((bytes += s->run[i].bytes) >= launch) n = i + 1;
    }
    bool idle = line_empty(&dir->line);
    void *start = open == 2 ? kvp_event_take(s) : NULL;
    if (start && CALL(s, event_record, event_stream_fn)(start, dir->stream)) {
        kvp_clear_error(s);
        kvp_event_give(s, start);
        start = NULL;
    }
    struct attempt a;
    int32_t list;
    for (;;) {
        bool listed = by_kernel(method);
        if (listed && !s->lists_free) {
            kvp_event_give(s, start);
            return 0;
        }
        list = listed ? s->lists[--s->lists_free] : -1;
        a = try_method(s, dir, d, method, ctas, n, room, launch, list);
        if (a.count) break;
        if (list >= 0) s->lists[s->lists_free++] = list;
        if (method == KVP_LOOP) break;
        if (a.code) { /* it failed, not just did not fit: it is not asked again */
            s->methods_off |= 1u << method;
            s->method_error = a.code;
        }
        method = lower_method(s, method);
    }
    if (method != (chosen ? (int)chosen->method : KVP_LOOP)) chosen = NULL; /* another one did it */
    if (!a.count) {
        kvp_event_give(s, start);
        if (!a.code) return 0;
        fail_head(s, dir, a.code, KVP_FAULT_COPY);
        return 1;
    }
    for (uint32_t i = 0; i < a.count; i++) a.bytes += s->run[i].bytes;
    s->launches[d][method] += method == KVP_LOOP ? a.count : 1;
    s->moved[d][method] += a.bytes;
    struct kvp_job *before = dir->flying_last;
    dir->method = method;
    uint64_t expected = chosen ? (uint64_t)kvp_method_ns(chosen, a.bytes / a.count, a.count) : 0;
    uint64_t begun = book(s, dir, &a, gathered, largest, method);
    add_marker(s, dir, &a, start, list, begun, now, idle);
    dir->line.marker[(dir->line.tail - 1) % MARKERS].expected_ns = expected;
    dir->line.marker[(dir->line.tail - 1) % MARKERS].row = row;
    if (s->config.bytes_per_s[d])
        dir->next_ns = (dir->next_ns > now ? dir->next_ns : now) +
                       (uint64_t)((double)a.bytes / (double)s->config.bytes_per_s[d] * 1e9);
    struct marker *newest = &dir->line.marker[(dir->line.tail - 1) % MARKERS];
    for (struct kvp_job *j = before ? before->next : dir->flying; j; j = j->next) {
        newest->sequence = j->sequence;
        submitted(s, dir, j, newest->event);
    }
    if (a.code && dir->first) fail_head(s, dir, a.code, KVP_FAULT_COPY);
    return 1;
}

/* Nothing waits in a direction, and little is in flight. */
bool kvp_hungry(kvp_submitter *s, int d) {
    struct direction *dir = &s->direction[d];
    int launches;
    uint64_t launch = launch_bytes(s, dir, d, by_kernel(dir->method), &launches);
    return !dir->first && atomic_load(&dir->bytes) < launch * (uint64_t)launches / 2;
}

/* When the thread should look again at a direction. */
static uint64_t next_look(kvp_submitter *s, int d, uint64_t now) {
    struct direction *dir = &s->direction[d];
    uint64_t at = UINT64_MAX;
    if (atomic_load(&dir->inlined_jobs) || atomic_load(&dir->shared_places)) at = now + SHARED_PAUSE_NS;
    if (!line_empty(&dir->line)) {
        uint64_t due = dir->line.marker[dir->line.head % MARKERS].due_ns;
        if (due > now + 2 * LEAST_PAUSE_NS) { /* the estimate may be too late: half of the way, then again */
            uint64_t half = now + (due - now) / 2;
            at = half < at ? half : at;
        } else {
            at = now + dir->pause_ns < at ? now + dir->pause_ns : at;
            dir->pause_ns = dir->pause_ns * 3 / 2 < MOST_PAUSE_NS ? dir->pause_ns * 3 / 2 : MOST_PAUSE_NS;
        }
    }
    if (dir->first) {
        if (dir->gate_since) {
            uint64_t waited = (now - dir->gate_since) / 16;
            uint64_t pause = waited < LEAST_PAUSE_NS ? LEAST_PAUSE_NS : waited > MOST_PAUSE_NS ? MOST_PAUSE_NS : waited;
            if (now + pause < at) at = now + pause;
        }
        if (s->config.bytes_per_s[d] && dir->next_ns > now && dir->next_ns < at) at = dir->next_ns;
        if (at == UINT64_MAX) at = now + MOST_PAUSE_NS; /* short of events or lists, which the other direction holds */
    }
    return at;
}

/* A transfer that does not move is named, and the submitter steps aside. */
static void watch(kvp_submitter *s, int d, uint64_t now) {
    struct direction *dir = &s->direction[d];
    struct kvp_job *j = dir->flying ? dir->flying : dir->first;
    if (!s->config.stuck_ns || !j || line_empty(&dir->line) || now < dir->progress_ns + s->config.stuck_ns) return;
    s->stuck_job = j->status.id;
    kvp_lose(s, 0, KVP_FAULT_STUCK);
}

uint64_t kvp_step(kvp_submitter *s, uint64_t now) {
    s->steps++;
    take_incoming(s);
    if (atomic_load(&s->broken)) {
        kvp_lose(s, atomic_load(&s->broken), atomic_load(&s->fault) ? atomic_load(&s->fault) : KVP_FAULT_DEVICE);
        return UINT64_MAX;
    }
    if (atomic_load(&s->closing) == 2) {
        for (int d = 0; d < 2; d++) fail_all(s, &s->direction[d].first, &s->direction[d].last, 0, KVP_FAULT_CLOSED);
    }
    if (atomic_exchange(&s->hurrying, 0)) {
        for (int d = 0; d < 2; d++)
            for (struct kvp_job *j = s->direction[d].first; j; j = j->next)
                if (atomic_load(&j->hurry)) s->direction[d].hurry = j->sequence;
    }
    bool idle = !s->direction[LOAD].flying && !s->direction[STORE].flying;
    if (idle && now - s->clock_at > RENEW_CLOCK_NS && atomic_load(&s->pending)) kvp_renew_device_clock(s);
    for (int d = 0; d < 2; d++) {
        kvp_retire_shared(s, d);
        retire(s, d, now);
        if (atomic_load(&s->broken)) return now;
    }
    if (s->limbo_count) {
        pthread_mutex_lock(&s->lock);
        if (!s->pins)
            while (s->limbo_count) s->events[s->events_free++] = s->limbo[--s->limbo_count];
        pthread_mutex_unlock(&s->lock);
    }
    kvp_events_grow(s, now);
    for (int d = 0; d < 2; d++) {
        struct direction *loads = &s->direction[LOAD];
        bool others = d == STORE && (loads->flying || loads->first);
        while (submit_once(s, d, now, others)) now = kvp_now_ns();
        if (atomic_load(&s->broken)) return now;
        watch(s, d, now);
    }
    uint64_t a = next_look(s, LOAD, now), b = next_look(s, STORE, now), c = record_fences(s, now);
    a = a < b ? a : b;
    return a < c ? a : c;
}

uint64_t kvp_step_actor(void *ctx, uint64_t now) {
    kvp_submitter *s = ctx;
    uint64_t next = kvp_step(s, now);
    if (!s->wrong && !atomic_load(&s->broken)) s->wrong = kvp_check(s, next);
    return next;
}
