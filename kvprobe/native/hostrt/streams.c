/* Streams and events, and device-wide waiting. */
#include "rt.h"

#include <stdlib.h>
#include <sys/mman.h>

#define LOWEST 0
#define HIGHEST (-5) /* as on an H200 */

/* Handles come out of two reserved ranges and go back to free lists, never to the system: a stale or foreign handle is
 * recognised instead of followed. */
#define MAX_STREAMS 65536u
#define MAX_EVENTS 4194304u

typedef struct {
    _Atomic uintptr_t base;
    _Atomic size_t used;
    size_t size, count;
} range;

static pthread_mutex_t pool_lock = PTHREAD_MUTEX_INITIALIZER;
static range stream_range = {.size = sizeof(stream), .count = MAX_STREAMS};
static range event_range = {.size = sizeof(event), .count = MAX_EVENTS};
static stream *free_streams;
static event *free_events;

/* A fresh, zeroed element; pool_lock held. NULL: all are in use. */
static void *fresh(range *r) {
    if (!r->base) {
        void *p =
            mmap(NULL, r->size * r->count, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (p == MAP_FAILED) return NULL;
        r->base = (uintptr_t)p;
    }
    size_t i = atomic_load(&r->used);
    if (i == r->count) return NULL;
    atomic_store_explicit(&r->used, i + 1, memory_order_release);
    return (void *)(r->base + i * r->size);
}

static bool is_element(range *r, const void *handle) {
    uintptr_t offset = (uintptr_t)handle - atomic_load_explicit(&r->base, memory_order_relaxed);
    return offset < atomic_load_explicit(&r->used, memory_order_acquire) * r->size && offset % r->size == 0;
}

/* ---- handles
 * ---------------------------------------------------------------------------------------------------------- */

stream *kvh_stream_new(runtime *rt, int priority) {
    pthread_mutex_lock(&pool_lock);
    stream *s = free_streams;
    if (s)
        free_streams = s->next;
    else
        s = fresh(&stream_range);
    pthread_mutex_unlock(&pool_lock);
    if (!s) return NULL;
    kvh_lock(rt);
    s->head = s->tail = NULL;
    s->completed = s->submitted;
    s->ready_ns = 0;
    s->waiters = (parkers){0};
    s->priority = priority;
    s->last_class = KVHOST_COMPUTE;
    s->destroyed = false;
    s->blocking = s->is_default = false;
    s->device = (uint8_t)kvh_device;
    s->capture = 0;
    s->number = rt->next_stream++;
    s->prev = NULL;
    s->next = rt->streams;
    if (s->next) s->next->prev = s;
    rt->streams = s;
    atomic_store(&s->rt, rt);
    atomic_store_explicit(&s->alive, STREAM_ALIVE, memory_order_release);
    kvh_unlock(rt);
    return s;
}

/* Back to the pool; runtime.lock held, nothing pending. */
void kvh_stream_retire(runtime *rt, stream *s) {
    s->destroyed = false;
    if (s->prev)
        s->prev->next = s->next;
    else
        rt->streams = s->next;
    if (s->next) s->next->prev = s->prev;
    pthread_mutex_lock(&pool_lock);
    s->next = free_streams;
    free_streams = s;
    pthread_mutex_unlock(&pool_lock);
}

/* Newest record of the event goes, and the event to the pool; runtime.lock held. */
static void retire_event(runtime *rt, event *e) {
    atomic_store(&e->alive, 0);
    kvh_unref(rt, e->marker);
    e->marker = NULL;
    if (e->prev)
        e->prev->next = e->next;
    else
        rt->events = e->next;
    if (e->next) e->next->prev = e->prev;
    pthread_mutex_lock(&pool_lock);
    e->next = free_events;
    free_events = e;
    pthread_mutex_unlock(&pool_lock);
}

void kvh_release_handles(runtime *rt) {
    kvh_lock(rt);
    while (rt->events) retire_event(rt, rt->events);
    while (rt->streams) {
        atomic_store(&rt->streams->alive, 0);
        kvh_stream_retire(rt, rt->streams);
    }
    kvh_unlock(rt);
}

void kvh_handles_in_child(void) {
    pthread_mutex_init(&pool_lock, NULL);
    free_streams = NULL; /* a fork may have caught the lists half-way */
    free_events = NULL;
}

stream *kvh_stream(runtime *rt, cudaStream_t handle) {
    if ((uintptr_t)handle <= 2) return rt->zero[kvh_device]; /* NULL, cudaStreamLegacy, cudaStreamPerThread */
    if (!is_element(&stream_range, handle)) return NULL;
    stream *s = (stream *)handle;
    if (atomic_load_explicit(&s->alive, memory_order_acquire) != STREAM_ALIVE || atomic_load(&s->rt) != rt) return NULL;
    return s;
}

static event *find_event(runtime *rt, cudaEvent_t handle) {
    if (!is_element(&event_range, handle)) return NULL;
    event *e = (event *)handle;
    if (atomic_load_explicit(&e->alive, memory_order_acquire) != EVENT_ALIVE || atomic_load(&e->rt) != rt) return NULL;
    return e;
}

/* ---- streams
 * ---------------------------------------------------------------------------------------------------------- */

cudaError_t kvh_stream_create(call *c, cudaStream_t *out, unsigned flags, int priority) {
    if (!out || flags & ~(unsigned)cudaStreamNonBlocking) return cudaErrorInvalidValue;
    if (priority > LOWEST) priority = LOWEST;
    if (priority < HIGHEST) priority = HIGHEST;
    *out = NULL;
    cudaError_t error = kvh_ctx_lock(c);
    if (error) return error;
    stream *s = kvh_stream_new(c->rt, priority);
    if (s) {
        kvh_lock(c->rt);
        s->blocking = !(flags & cudaStreamNonBlocking);
        c->rt->stats.streams++;
        kvh_unlock(c->rt);
    }
    kvh_ctx_unlock(c);
    *out = (cudaStream_t)s;
    return s ? cudaSuccess : cudaErrorMemoryAllocation;
}

KVP_EXPORT cudaError_t cudaStreamCreate(cudaStream_t *out) {
    KVH_ENTER(cudaStreamCreate, 0);
    KVH_LEAVE(kvh_stream_create(c, out, 0, LOWEST));
}

KVP_EXPORT cudaError_t cudaStreamCreateWithFlags(cudaStream_t *out, unsigned flags) {
    KVH_ENTER(cudaStreamCreateWithFlags, 0);
    KVH_LEAVE(kvh_stream_create(c, out, flags, LOWEST));
}

KVP_EXPORT cudaError_t cudaStreamCreateWithPriority(cudaStream_t *out, unsigned flags, int priority) {
    KVH_ENTER(cudaStreamCreateWithPriority, 0);
    KVH_LEAVE(kvh_stream_create(c, out, flags, priority));
}

KVP_EXPORT cudaError_t cudaStreamGetPriority(cudaStream_t handle, int *priority) {
    KVH_ENTER(cudaStreamGetPriority, handle);
    stream *s = kvh_stream(c->rt, handle);
    if (!s) KVH_LEAVE(cudaErrorInvalidResourceHandle);
    if (!priority) KVH_LEAVE(cudaErrorInvalidValue);
    *priority = s->priority;
    KVH_LEAVE(cudaSuccess);
}

KVP_EXPORT cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    KVH_ENTER(cudaDeviceGetStreamPriorityRange, 0);
    if (least) *least = LOWEST;
    if (greatest) *greatest = HIGHEST;
    KVH_LEAVE(cudaSuccess);
}

/* The handle is invalid at once, what is pending still takes place. Works on a lost device too, so that pools can be
 * taken down; it then still returns the device's error. */
cudaError_t kvh_stream_destroy(enum kvh_api api, cudaStream_t handle) {
    call frame, *c = &frame;
    cudaError_t first = kvh_begin(c, api, (uint64_t)(uintptr_t)handle);
    if (first && first != atomic_load(&c->rt->sticky)) KVH_LEAVE(first);
    stream *s = kvh_stream(c->rt, handle);
    if (!s || s->is_default) KVH_LEAVE(first ? first : cudaErrorInvalidResourceHandle);
    cudaError_t error = kvh_lock_stream(c, s);
    if (error) KVH_LEAVE(first ? first : error);
    kvh_lock(c->rt);
    atomic_store(&s->alive, 0);
    kvh_capture_leave(c->rt, s);
    c->rt->stats.streams--;
    kvh_unlock_stream_held(c->rt, s); /* before it can be reused */
    if (s->head)
        s->destroyed = true;
    else
        kvh_stream_retire(c->rt, s);
    kvh_unlock(c->rt);
    KVH_LEAVE(first);
}

KVP_EXPORT cudaError_t cudaStreamDestroy(cudaStream_t handle) {
    return kvh_stream_destroy(API_cudaStreamDestroy, handle);
}

/* So that who asks again and again gets on; where time is real it passes by itself. */
static void spend_query(runtime *rt) {
    if (rt->simulation) rt->time->spend(rt, kvh_now(rt) + QUERY_NS);
}

cudaError_t kvh_stream_query(call *c, cudaStream_t handle) {
    stream *s = kvh_stream(c->rt, handle);
    if (!s) return cudaErrorInvalidResourceHandle;
    if (kvh_capture_conflicts(c->rt, s)) return cudaErrorStreamCaptureUnsupported;
    cudaError_t error = kvh_lock_stream(c, s);
    if (error) return error;
    kvh_lock(c->rt);
    bool done = s->completed == s->submitted;
    kvh_unlock(c->rt);
    kvh_unlock_stream(c->rt, s);
    spend_query(c->rt);
    error = atomic_load(&c->rt->sticky);
    return error ? error : done ? cudaSuccess : cudaErrorNotReady;
}

KVP_EXPORT cudaError_t cudaStreamQuery(cudaStream_t handle) {
    KVH_ENTER(cudaStreamQuery, handle);
    KVH_LEAVE(kvh_stream_query(c, handle));
}

cudaError_t kvh_stream_sync(call *c, cudaStream_t handle) {
    stream *s = kvh_stream(c->rt, handle);
    if (!s) return cudaErrorInvalidResourceHandle;
    if (kvh_capture_conflicts(c->rt, s)) return cudaErrorStreamCaptureUnsupported;
    cudaError_t error = kvh_lock_stream(c, s);
    if (error) return error;
    kvh_lock(c->rt);
    uint64_t target = s->submitted;
    kvh_unlock(c->rt);
    kvh_unlock_stream(c->rt, s);
    return kvh_wait_stream(c, s, target, KVHOST_SYNC);
}

KVP_EXPORT cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
    KVH_ENTER(cudaStreamSynchronize, handle);
    KVH_LEAVE(kvh_stream_sync(c, handle));
}

KVP_EXPORT cudaError_t cudaDeviceSynchronize(void) {
    KVH_ENTER(cudaDeviceSynchronize, 0);
    KVH_LEAVE(kvh_wait_all(c));
}

/* ---- events
 * ----------------------------------------------------------------------------------------------------------- */

cudaError_t kvh_event_create(call *c, cudaEvent_t *out, unsigned flags) {
    if (!out || flags > 7) return cudaErrorInvalidValue;
    runtime *rt = c->rt;
    *out = NULL;
    cudaError_t error = kvh_ctx_lock(c);
    if (error) return error;
    pthread_mutex_lock(&pool_lock);
    event *e = free_events;
    if (e)
        free_events = e->next;
    else
        e = fresh(&event_range);
    pthread_mutex_unlock(&pool_lock);
    if (e) {
        kvh_lock(rt);
        e->flags = flags;
        e->device = (uint8_t)kvh_device;
        e->captured = false;
        e->marker = NULL;
        e->prev = NULL;
        e->next = rt->events;
        if (e->next) e->next->prev = e;
        rt->events = e;
        rt->stats.events++;
        atomic_store(&e->rt, rt);
        atomic_store_explicit(&e->alive, EVENT_ALIVE, memory_order_release);
        kvh_unlock(rt);
    }
    kvh_ctx_unlock(c);
    *out = (cudaEvent_t)e;
    return e ? cudaSuccess : cudaErrorMemoryAllocation;
}

KVP_EXPORT cudaError_t cudaEventCreate(cudaEvent_t *out) {
    KVH_ENTER(cudaEventCreate, 0);
    KVH_LEAVE(kvh_event_create(c, out, 0));
}

KVP_EXPORT cudaError_t cudaEventCreateWithFlags(cudaEvent_t *out, unsigned flags) {
    KVH_ENTER(cudaEventCreateWithFlags, 0);
    KVH_LEAVE(kvh_event_create(c, out, flags));
}

/* As cudaStreamDestroy: works on a lost device. */
KVP_EXPORT cudaError_t cudaEventDestroy(cudaEvent_t handle) {
    call frame, *c = &frame;
    cudaError_t first = kvh_begin(c, API_cudaEventDestroy, 0);
    if (first && first != atomic_load(&c->rt->sticky)) KVH_LEAVE(first);
    kvh_lock(c->rt);
    event *e = find_event(c->rt, handle);
    if (e) {
        retire_event(c->rt, e);
        c->rt->stats.events--;
    }
    kvh_unlock(c->rt);
    KVH_LEAVE(first ? first : e ? cudaSuccess : cudaErrorInvalidResourceHandle);
}

cudaError_t kvh_event_record(call *c, cudaEvent_t handle, cudaStream_t stream_handle) {
    runtime *rt = c->rt;
    event *e = find_event(rt, handle);
    stream *s = kvh_stream(rt, stream_handle);
    cudaError_t error;
    if (!e || !s || e->device != s->device) return cudaErrorInvalidResourceHandle;
    bool captured = kvh_captured(rt, s, &error);
    e->captured = captured;
    if (captured) return error;
    error = kvh_lock_stream(c, s);
    if (error) return error;
    kvh_lock(rt);
    marker *m = kvh_marker(rt); /* one reference for the operation, one for the event */
    if (m) m->refs++;
    kvh_unlock(rt);
    if (m) {
        op o = {.kind = OP_RECORD, .marker = m};
        error = kvh_submit(c, s, &o);
        kvh_lock(rt);
        if (error) {
            kvh_unref(rt, m);
            kvh_unref(rt, m);
        } else if (find_event(rt, handle) == e) {
            kvh_unref(rt, e->marker);
            e->marker = m;
        } else { /* destroyed while we waited for a slot */
            kvh_unref(rt, m);
        }
        kvh_unlock(rt);
    } else {
        error = cudaErrorMemoryAllocation;
    }
    kvh_unlock_stream(c->rt, s);
    return error;
}

KVP_EXPORT cudaError_t cudaEventRecord(cudaEvent_t handle, cudaStream_t stream_handle) {
    KVH_ENTER(cudaEventRecord, stream_handle);
    KVH_LEAVE(kvh_event_record(c, handle, stream_handle));
}

KVP_EXPORT cudaError_t cudaStreamWaitEvent(cudaStream_t stream_handle, cudaEvent_t handle, unsigned flags) {
    KVH_ENTER(cudaStreamWaitEvent, stream_handle);
    runtime *rt = c->rt;
    event *e = find_event(rt, handle);
    stream *s = kvh_stream(rt, stream_handle);
    if (!e || !s) KVH_LEAVE(cudaErrorInvalidResourceHandle);
    if (flags > 1) KVH_LEAVE(cudaErrorInvalidValue);
    cudaError_t error;
    if (kvh_captured(rt, s, &error)) { /* what is outside cannot be waited for inside */
        if (!error && !e->captured && kvh_capture_conflicts(rt, s)) error = cudaErrorStreamCaptureIsolation;
        KVH_LEAVE(error);
    }
    if (e->captured) KVH_LEAVE(cudaErrorNotSupported); /* it would join the capture */
    error = kvh_lock_stream(c, s);
    if (error) KVH_LEAVE(error);
    kvh_lock(rt);
    marker *m = find_event(rt, handle) == e ? e->marker : NULL;
    if (m && m->done) m = NULL; /* nothing to wait for */
    if (m) m->refs++;
    kvh_unlock(rt);
    if (m) {
        op o = {.kind = OP_WAIT, .marker = m};
        error = kvh_submit(c, s, &o);
        if (error) {
            kvh_lock(rt);
            kvh_unref(rt, m);
            kvh_unlock(rt);
        }
    }
    kvh_unlock_stream(c->rt, s);
    KVH_LEAVE(error);
}

cudaError_t kvh_event_query(call *c, cudaEvent_t handle) {
    kvh_lock(c->rt);
    event *e = find_event(c->rt, handle);
    bool done = e && (!e->marker || e->marker->done), captured = e && e->captured;
    kvh_unlock(c->rt);
    spend_query(c->rt);
    cudaError_t error = atomic_load(&c->rt->sticky);
    if (captured) return cudaErrorCapturedEvent;
    return error ? error : !e ? cudaErrorInvalidResourceHandle : done ? cudaSuccess : cudaErrorNotReady;
}

KVP_EXPORT cudaError_t cudaEventQuery(cudaEvent_t handle) {
    KVH_ENTER(cudaEventQuery, 0);
    KVH_LEAVE(kvh_event_query(c, handle));
}

KVP_EXPORT cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
    KVH_ENTER(cudaEventSynchronize, 0);
    KVH_LEAVE(kvh_wait_event(c, find_event(c->rt, handle)));
}

static _Atomic uint64_t stepped_at;
static _Atomic int64_t step_ns;

void kvhostStepDeviceClock(int64_t ns) {
    atomic_store(&step_ns, ns);
    atomic_store(&stepped_at, kvhostNow());
}

/* What the device's own clock says at an instant of ours. */
static int64_t on_device(uint64_t time_ns) {
    uint64_t at = atomic_load(&stepped_at);
    return (int64_t)time_ns + (at && time_ns >= at ? atomic_load(&step_ns) : 0);
}

cudaError_t kvh_event_elapsed(call *c, float *ms, cudaEvent_t from, cudaEvent_t to) {
    if (!ms) return cudaErrorInvalidValue;
    cudaError_t error = cudaErrorInvalidResourceHandle;
    kvh_lock(c->rt);
    event *a = find_event(c->rt, from), *b = find_event(c->rt, to);
    if (a && b && a->marker && b->marker && !((a->flags | b->flags) & cudaEventDisableTiming)) {
        error = a->marker->done && b->marker->done ? cudaSuccess : cudaErrorNotReady;
        if (!error) *ms = (float)((double)(on_device(b->marker->time_ns) - on_device(a->marker->time_ns)) / 1e6);
    }
    kvh_unlock(c->rt);
    return error;
}

KVP_EXPORT cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t from, cudaEvent_t to) {
    KVH_ENTER(cudaEventElapsedTime, 0);
    KVH_LEAVE(kvh_event_elapsed(c, ms, from, to));
}
