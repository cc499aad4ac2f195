/* The submitter's events: a few are made when it opens; its thread makes more before they run out. */
#include "submitter.h"

#include <stdlib.h>

#define EVENTS_FIRST 48  /* timing events, for markers */
#define EVENTS_AHEAD 24  /* free ones below which more are made */
#define EVENTS_STEP 16   /* as many at a time */
#define FENCES_FIRST 192 /* more than stand on a stream before they are shared (FENCES_EACH), and shared ones */
#define FENCES_VIRTUAL 8
#define FENCES_AHEAD 32
#define FENCES_STEP 16
#define FENCES_MOST 1024            /* that the thread makes; a caller who finds none makes its own */
#define AGAIN_NS UINT64_C(10000000) /* after one could not be made */

static int make(kvp_submitter *s, unsigned flags, void **event) {
    *event = NULL;
    if (!s->config.copier.cuda.event_create) return cudaErrorNotSupported;
    int code = CALL(s, event_create, create_fn)(event, flags);
    if (code) kvp_clear_error(s);
    return code;
}

static int add_event(kvp_submitter *s) {
    void *event;
    int code = make(s, 0, &event);
    if (code) return code;
    pthread_mutex_lock(&s->lock);
    s->made[s->events_made++] = event;
    s->events[s->events_free++] = event;
    pthread_mutex_unlock(&s->lock);
    return 0;
}

static void give_fence(kvp_submitter *s, struct fence *f) {
    kvp_must(s, !f->users, "a fence was given back that somebody waits for");
    f->next = s->fences_free;
    s->fences_free = f;
    s->fences_used--;
}

/* A fence more, in use already or (`spare`) free, or NULL. A spare one is in use at no moment that others see. */
static struct fence *new_fence(kvp_submitter *s, int *code, bool spare) {
    struct fence *f = calloc(1, sizeof *f);
    if (!f) return NULL;
    *code = make(s, cudaEventDisableTiming, &f->event);
    if (*code) {
        free(f);
        return NULL;
    }
    pthread_mutex_lock(&s->lock);
    f->all = s->fences_all;
    s->fences_all = f;
    s->fence_count++;
    s->fences_used++;
    if (spare) give_fence(s, f);
    pthread_mutex_unlock(&s->lock);
    return f;
}

static int add_fence(kvp_submitter *s) {
    int code = cudaErrorMemoryAllocation;
    return new_fence(s, &code, true) ? 0 : code;
}

int kvp_events_open(kvp_submitter *s) {
    int code = 0;
    s->made = malloc(EVENTS_MOST * sizeof *s->made);
    s->events = malloc(EVENTS_MOST * sizeof *s->events);
    s->limbo = malloc(EVENTS_MOST * sizeof *s->limbo);
    if (!s->made || !s->events || !s->limbo) return cudaErrorMemoryAllocation;
    if (s->config.clock_stream) {
        code = make(s, 0, &s->clock_event[0]);
        if (!code) code = make(s, 0, &s->clock_event[1]);
    }
    for (int i = 0; i < EVENTS_FIRST && !code; i++) code = add_event(s);
    for (int i = 0; i < (s->config.actor_add ? FENCES_VIRTUAL : FENCES_FIRST) && !code; i++) code = add_fence(s);
    if (code) kvp_events_close(s);
    return code;
}

void kvp_events_grow(kvp_submitter *s, uint64_t now) {
    pthread_mutex_lock(&s->lock);
    uint32_t free = s->events_free + s->limbo_count, fences = s->fence_count - s->fences_used;
    bool events_short = free < EVENTS_AHEAD && s->events_made < EVENTS_MOST;
    bool fences_short = fences < FENCES_AHEAD && s->fence_count < FENCES_MOST;
    pthread_mutex_unlock(&s->lock);
    if ((!events_short && !fences_short) || now < s->make_again_ns) return;
    int code = 0;
    for (int i = 0; events_short && i < EVENTS_STEP && s->events_made < EVENTS_MOST && !code; i++) code = add_event(s);
    for (int i = 0; fences_short && i < FENCES_STEP && !code; i++) code = add_fence(s);
    if (code) s->make_again_ns = now + AGAIN_NS;
}

int kvp_events_close(kvp_submitter *s) {
    int first = 0;
    s->events_free = s->limbo_count = 0;
    for (int i = 0; i < 2; i++) {
        int code = s->clock_event[i] ? CALL(s, event_destroy, handle_fn)(s->clock_event[i]) : 0;
        if (code) kvp_clear_error(s);
        first = first ? first : code;
        s->clock_event[i] = NULL;
    }
    while (s->events_made) {
        int code = CALL(s, event_destroy, handle_fn)(s->made[--s->events_made]);
        if (code) kvp_clear_error(s);
        first = first ? first : code;
    }
    for (struct fence *f = s->fences_all; f; f = f->all) {
        int code = f->event ? CALL(s, event_destroy, handle_fn)(f->event) : 0;
        if (code) kvp_clear_error(s);
        first = first ? first : code;
        f->event = NULL;
    }
    return first;
}

void kvp_events_free(kvp_submitter *s) {
    for (struct fence *f = s->fences_all; f;) {
        struct fence *next = f->all;
        free(f);
        f = next;
    }
    free(s->made);
    free(s->events);
    free(s->limbo);
}

void *kvp_event_take(kvp_submitter *s) {
    pthread_mutex_lock(&s->lock);
    void *event = s->events_free ? s->events[--s->events_free] : NULL;
    pthread_mutex_unlock(&s->lock);
    return event;
}

/* An event that somebody is about to wait for (pins) must not be recorded anew before they have. */
void kvp_event_give(kvp_submitter *s, void *event) {
    if (!event) return;
    pthread_mutex_lock(&s->lock);
    if (s->pins)
        s->limbo[s->limbo_count++] = event;
    else
        kvp_event_free(s, event);
    pthread_mutex_unlock(&s->lock);
}

void kvp_event_free(kvp_submitter *s, void *event) {
    kvp_check_unused(s, event);
    s->events[s->events_free++] = event;
}

void kvp_event_pin(kvp_submitter *s, void *event) {
    int at = 0;
    while (at < PINNED && s->pinned[at]) at++;
    if (at < PINNED) s->pinned[at] = event;
    kvp_must(s, at < PINNED || s->pins > PINNED, "an event that somebody is about to wait for is not noted");
}

void kvp_event_unpin(kvp_submitter *s, void *event) {
    int at = 0;
    while (at < PINNED && s->pinned[at] != event) at++;
    if (at < PINNED) s->pinned[at] = NULL;
    kvp_must(s, s->pins || !s->pinned[0], "an event is noted that nobody waits for");
}

uint32_t kvp_events_left(kvp_submitter *s) {
    pthread_mutex_lock(&s->lock);
    uint32_t left = s->events_free;
    pthread_mutex_unlock(&s->lock);
    return left;
}

/* A free fence, or NULL; with the lock. */
struct fence *kvp_fence_take(kvp_submitter *s) {
    struct fence *f = s->fences_free;
    if (f) s->fences_free = f->next, s->fences_used++;
    return f;
}

/* A fence more, in use, or NULL; without the lock. */
struct fence *kvp_fence_make(kvp_submitter *s) {
    int code;
    return new_fence(s, &code, false);
}

/* With the lock. */
void kvp_fence_give(kvp_submitter *s, struct fence *f) { give_fence(s, f); }
