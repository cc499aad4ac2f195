/* What jobs wait for: events on compute streams, which callers record or leave to the submitter's thread. */
#include "submitter.h"

#ifdef KVP_EXPLORE
#define FENCES_EACH 2
#else
#define FENCES_EACH 128 /* events of ours on one compute stream that callers record themselves */
#endif
#define SHARED_FENCE_NS 200000 /* those who come within this time share one */

/* How many events of ours stand on a compute stream, and the fence that is still to be recorded; with the lock. */
static uint32_t *fences_on(kvp_submitter *s, void *stream, struct fence ***open) {
    int used = s->computes, free = used;
    for (int i = 0; i < used; i++) {
        if (s->compute[i].stream == stream) {
            *open = &s->compute[i].open;
            return &s->compute[i].recorded;
        }
        if (!s->compute[i].recorded && !s->compute[i].open) free = i;
    }
    if (free == COMPUTE_STREAMS) { /* more compute streams than anybody has: their events are not counted */
        *open = NULL;
        s->uncounted = 0;
        return &s->uncounted;
    }
    if (free == used) s->computes++;
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
    pthread_mutex_lock(&s->lock);
    j->after = NULL; /* with the lock: kvp_job_fence may be looking */
    if (--f->users == 0) {
        struct fence **open;
        fences_on(s, f->stream, &open);
        if (open && *open == f) *open = NULL;
        fence_passed(s, f);
        kvp_fence_give(s, f);
    }
    pthread_mutex_unlock(&s->lock);
}

/* What the job waits for is over. */
void kvp_fence_over(kvp_submitter *s, struct kvp_job *j) {
    pthread_mutex_lock(&s->lock);
    fence_passed(s, j->after);
    pthread_mutex_unlock(&s->lock);
    kvp_fence_drop(s, j);
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
        later = open && *standing >= FENCES_EACH;
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
uint64_t kvp_fences_record(kvp_submitter *s, uint64_t now) {
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

/* Whether what a job waits for is over; then it waits no more. */
bool kvp_fence_passed(kvp_submitter *s, struct kvp_job *j) {
    struct fence *f = j->after;
    if (!f) return true;
    pthread_mutex_lock(&s->lock);
    int state = f->state, code = f->code;
    pthread_mutex_unlock(&s->lock);
    if (state == FENCE_RECORDED && !code) {
        code = CALL(s, event_query, handle_fn)(f->event);
        if (code && code != NOT_READY) kvp_clear_error(s); /* when it comes first it is asked again */
        if (code) return false;
        kvp_fence_over(s, j);
        return true;
    }
    if (state != FENCE_PASSED) return false;
    kvp_fence_drop(s, j);
    return true;
}
