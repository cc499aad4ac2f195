/* What the device has reached: markers that are passed, jobs that have ended, and the end of all when it is lost. */
#include "submitter.h"

#include <stdlib.h>
#include <string.h>

#define HELD_UP_NS 1000000 /* a stream whose work starts so much later than it could is held up by others */
#define LEAVE_NS 20000000  /* not more often than that */
#define FORGET 0.005f      /* of what is known of a method, each time another one is used */
#define HINDERED 1.12f     /* times what they take alone: so much slower are large copies beside compute */
#define HINDERED_NS UINT64_C(1000000000) /* so long it is thought to go on */
#define RATE_BYTES (1u << 20)            /* of a marker from which on its rate is believed */

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
    kvp_must(s, start >= t->built_ns && start <= end && submit + wait <= end - t->built_ns,
             "the parts of a transfer are longer than all of it");
    kvp_must(s, !t->copy_end_ns || end == t->copy_end_ns || end == t->built_ns || t->copy_end_ns > t->noticed_ns,
             "a transfer is recorded with another end than the device's");
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
    if (!t->fault && of_cells(s) && j->direction == STORE) kvp_cells_stored(s, j);
    kvp_cells_unclaim(s, j);
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
    kvp_must(s, s->ended_count <= s->ended_room, "more ids of ended transfers than there is space for");
    __atomic_store_n(&t->state, t->fault ? KVP_FAILED : KVP_DONE, __ATOMIC_RELEASE);
    atomic_fetch_sub(&s->pending, 1); /* with the lock: who has seen the end and reads the counts, finds it counted */
    pthread_mutex_unlock(&s->lock);
    YIELD();
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

/* Whether the device has reached it; `lost`: CUDA's code where it does not answer any more, else 0. */
static bool reached(kvp_submitter *s, const struct marker *m, int *lost) {
    int code = m->event ? CALL(s, event_query, handle_fn)(m->event) : NOT_READY + 1;
    *lost = 0;
    if (code && code != NOT_READY) { /* it says nothing about the copies: ask the stream itself, and ask again */
        if (m->event) kvp_clear_error(s);
        code = CALL(s, stream_query, handle_fn)(m->stream);
        if (code && code != NOT_READY) {
            kvp_clear_error(s);
            if (++s->bad_queries >= BAD_QUERIES) *lost = code;
            return false;
        }
    }
    s->bad_queries = 0; /* it answered */
    return !code;
}

/* When its copies began: once they were there and those before them had ended. */
static uint64_t start_ns(kvp_submitter *s, const struct marker *m, const struct line *l) {
    uint64_t start = m->start ? kvp_device_ns(s, m->start) : m->ready_ns;
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

/* Where the clocks were compared anew between its beginning and its end, or the host told its beginning, what is wrong
 * with them must not make the end the earlier one. */
static void end_job(kvp_submitter *s, struct kvp_job *j, uint64_t end_ns) {
    j->status.copy_end_ns = end_ns;
    if (j->status.copy_start_ns > end_ns) j->status.copy_start_ns = end_ns; /* 0: neither is known */
    kvp_finish(s, j, j->failed, j->failed ? j->status.fault : 0);
}

void kvp_end_flying(kvp_submitter *s, struct direction *dir, uint64_t sequence, uint64_t end_ns) {
    struct kvp_job *j;
    while ((j = ends_here(&dir->flying, &dir->flying_last, sequence))) end_job(s, j, end_ns);
}

/* Work that starts long after it could stands behind somebody else's in the hardware's channel: streams share those. */
static void note_start(struct direction *dir, const struct marker *m, uint64_t start, uint64_t end, uint64_t now) {
    uint64_t could = m->idle ? m->ready_ns : start, expected = (uint64_t)((double)m->bytes / (double)dir->rate * 1e9);
    uint64_t took = end > could ? end - could : 0;
    if (!could || took < 3 * expected + HELD_UP_NS || now < dir->left_ns + LEAVE_NS) return;
    dir->held_up[dir->at_stream]++;
    dir->leave = true;
    dir->left_ns = now;
}

/* What a method took against what its row says, its own submission counted; what is not used is forgotten, so that it
 * is tried again. Rows that differ in their CTAs are one method: whoever else used the link meanwhile made all of them
 * slow, and a row of fewer CTAs must not stay the better one for having been asked later. Where the device had run dry
 * before the submission began, somebody else was late. */
static void note_method(kvp_submitter *s, int d, const struct marker *m, uint64_t end, uint64_t now) {
    struct direction *dir = &s->direction[d];
    if (!m->expected_ns || m->bytes < RATE_BYTES || m->idle || dir->line.end_ns < m->called_ns) return;
    uint64_t took = end - dir->line.end_ns;
    float seen = (float)((double)took / (double)m->expected_ns);
    if (seen < 0.5f) seen = 0.5f;
    if (seen > 20) seen = 20;
    const kvp_method_row *row = (of_cells(s) ? kvp_cells_methods(s) : s->config.methods)->row[d];
    for (uint32_t i = 0; i < KVP_CHOOSE_ROWS; i++)
        dir->factors[i] +=
            row[i].method == row[m->row].method ? (seen - dir->factors[i]) * 0.5f : (1 - dir->factors[i]) * FORGET;
    bool other = atomic_load(&s->direction[!d].bytes) != 0; /* the other direction may use what they need */
    if (m->unhindered && !other && m->row >= 0 && dir->factors[m->row] > HINDERED)
        s->hindered_until_ns = now + HINDERED_NS;
}

void kvp_retire(kvp_submitter *s, int d, uint64_t now) {
    kvp_must(s, d == LOAD || d == STORE, "a direction that is none");
    struct direction *dir = &s->direction[d];
    while (!line_empty(&dir->line)) {
        struct marker *m = &dir->line.marker[dir->line.head % MARKERS];
        int lost;
        if (!reached(s, m, &lost)) {
            if (lost) kvp_lose(s, lost, KVP_FAULT_DEVICE);
            return;
        }
        uint64_t end = kvp_device_ns(s, m->event), start = start_ns(s, m, &dir->line);
        if (end && start > end) start = end; /* this thread lost its CPU behind the call */
        if (end && dir->rate) note_start(dir, m, start, end, now);
        if (end > dir->line.end_ns) note_method(s, d, m, end, now);
        if (m->bytes >= RATE_BYTES && end > start && start) {
            uint64_t rate = (uint64_t)((double)m->bytes / (double)(end - start) * 1e9);
            dir->rate = dir->rate ? (dir->rate * 3 + rate) / 4 : rate;
        }
        if (m->cells) kvp_cells_retire(s, d, m, end);
        start_of(m, &dir->line, dir->flying, start, end);
        if (dir->first && dir->first->sequence <= m->begun && !dir->first->status.copy_start_ns)
            dir->first->status.copy_start_ns = start; /* not wholly submitted yet */
        dir->listed -= m->entries;
        atomic_fetch_sub(&dir->places, m->places);
        atomic_fetch_sub(&dir->bytes, m->bytes);
        dir->line.head++;
        struct marker *next = &dir->line.marker[dir->line.head % MARKERS];
        if (!line_empty(&dir->line)) next->due_ns = kvp_due_ns(dir, next->bytes, end ? end : now);
        dir->pause_ns = LEAST_PAUSE_NS;
        dir->progress_ns = now;
        forget_event(s, dir->flying, m->sequence);
        YIELD();
        kvp_event_give(s, m->event);
        kvp_event_give(s, m->start);
        kvp_end_flying(s, dir, m->sequence, end);
    }
}

void kvp_retire_shared(kvp_submitter *s, int d) {
    kvp_must(s, d == LOAD || d == STORE, "a direction that is none");
    struct direction *dir = &s->direction[d];
    if (pthread_mutex_trylock(&dir->shared_lock)) return; /* whoever has it looks himself */
    int lost = 0;
    while (!line_empty(&dir->shared)) {
        struct marker *m = &dir->shared.marker[dir->shared.head % MARKERS];
        if (!reached(s, m, &lost)) break;
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

void kvp_fail_all(kvp_submitter *s, struct kvp_job **first, struct kvp_job **last, int code, uint32_t fault) {
    while (*first) {
        struct kvp_job *j = *first;
        *first = j->next;
        kvp_finish(s, j, code, fault);
    }
    *last = NULL;
}

static void drop_line(kvp_submitter *s, struct line *l, struct kvp_job *jobs) {
    forget_event(s, jobs, UINT64_MAX);
    for (; !line_empty(l); l->head++) {
        struct marker *m = &l->marker[l->head % MARKERS];
        kvp_event_give(s, m->event);
        kvp_event_give(s, m->start);
    }
}

void kvp_lose(kvp_submitter *s, int code, uint32_t fault) {
    atomic_store(&s->fault, fault);
    atomic_store(&s->broken, code ? code : -1);
    kvp_take_incoming(s, UINT64_MAX); /* of a lost device nothing is asked */
    for (int d = 0; d < 2; d++) {
        struct direction *dir = &s->direction[d];
        for (uint32_t i = dir->line.head; d == STORE && i != dir->line.tail; i++)
            kvp_cells_drop(s, &dir->line.marker[i % MARKERS]);
        drop_line(s, &dir->line, dir->flying);
        dir->listed = 0;
        atomic_store(&dir->places, 0);
        atomic_store(&dir->bytes, 0);
        kvp_fail_all(s, &dir->flying, &dir->flying_last, code, fault);
        kvp_fail_all(s, &dir->first, &dir->last, code, fault);
        if (pthread_mutex_trylock(&dir->shared_lock)) continue; /* the caller inside sees `broken` and comes back */
        drop_line(s, &dir->shared, dir->inlined);
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
        kvp_fail_all(s, &inlined, &last, code, fault);
    }
}
