/* From a call to an operation: locks, slots, waiting. */
#include "rt.h"

#include <stdlib.h>

/* Waits as `p` says; runtime.lock is held before and after. cudaErrorLaunchTimeout: the wait would never end. */
static cudaError_t park(call *c, parkers *list, parker *p, enum kvhost_reason reason) {
    runtime *rt = c->rt;
    uint64_t since = kvh_now(rt);
    p->api = c->api;
    p->reason = reason;
    kvh_push(list, p);
    rt->inside++;
    kvh_unlock(rt);
    cudaError_t error = rt->time->wait(rt, p);
    kvh_blocked(c, reason, since);
    kvh_lock(rt);
    if (error) kvh_remove(list, p);
    rt->inside--;
    kvh_let_leave(rt);
    return error;
}

/* ---- a stream's lock ------------------------------------------------------------------------------------------- */

static cudaError_t wait_for_lock(call *c, stream *s) {
    runtime *rt = c->rt;
    cudaError_t error = cudaSuccess;
    kvh_lock(rt);
    if (atomic_exchange(&s->lock, STREAM_WANTED) != STREAM_FREE) {
        parker p = {.of = s};
        error = park(c, &s->lock_waiters, &p, KVHOST_STREAM_LOCK); /* who lets go hands it over */
    }
    kvh_unlock(rt);
    return error;
}

cudaError_t kvh_lock_stream(call *c, stream *s) {
    uint32_t is_free = STREAM_FREE;
    if (!atomic_compare_exchange_strong(&s->lock, &is_free, STREAM_HELD)) {
        cudaError_t error = wait_for_lock(c, s);
        if (error) return error;
    }
    if (atomic_load_explicit(&s->alive, memory_order_acquire) == STREAM_ALIVE && atomic_load(&s->rt) == c->rt)
        return cudaSuccess;
    kvh_unlock_stream(c->rt, s); /* destroyed while we waited */
    return cudaErrorInvalidResourceHandle;
}

void kvh_unlock_stream_held(runtime *rt, stream *s) {
    parker *p = s->lock_waiters.head;
    if (p) {
        s->lock_waiters.head = p->next;
        kvh_go(rt, p, PARK_GO);
    } else {
        atomic_store(&s->lock, STREAM_FREE);
    }
}

void kvh_unlock_stream(runtime *rt, stream *s) {
    uint32_t held = STREAM_HELD;
    if (atomic_compare_exchange_strong(&s->lock, &held, STREAM_FREE)) return;
    kvh_lock(rt);
    kvh_unlock_stream_held(rt, s);
    kvh_unlock(rt);
}

/* ---- the context lock ------------------------------------------------------------------------------------------ */

static void admit_exclusive(runtime *rt) {
    parker *p = rt->ctx_want_exclusive.head;
    if (!p) return;
    rt->ctx_want_exclusive.head = p->next;
    rt->ctx_exclusive = true;
    kvh_go(rt, p, PARK_GO);
}

/* Both with runtime.lock held. */
static cudaError_t share_context(call *c) {
    runtime *rt = c->rt;
    if (!rt->ctx_exclusive) {
        rt->ctx_shared++;
        return cudaSuccess;
    }
    parker p = {0};
    return park(c, &rt->ctx_want_shared, &p, KVHOST_CONTEXT_LOCK); /* who lets go counts us in */
}

static void unshare_context(runtime *rt) {
    if (--rt->ctx_shared == 0) admit_exclusive(rt);
}

cudaError_t kvh_ctx_lock(call *c) {
    runtime *rt = c->rt;
    cudaError_t error = cudaSuccess;
    kvh_lock(rt);
    if (rt->ctx_exclusive || rt->ctx_shared) {
        parker p = {0};
        error = park(c, &rt->ctx_want_exclusive, &p, KVHOST_CONTEXT_LOCK);
    } else {
        rt->ctx_exclusive = true;
    }
    rt->used = true;
    kvh_unlock(rt);
    return error;
}

void kvh_ctx_unlock(call *c) {
    runtime *rt = c->rt;
    kvh_lock(rt);
    rt->ctx_exclusive = false;
    if (rt->ctx_want_shared.head) {
        for (parker *p = rt->ctx_want_shared.head; p; p = p->next) rt->ctx_shared++;
        kvh_go_all(rt, &rt->ctx_want_shared, PARK_GO);
    } else {
        admit_exclusive(rt);
    }
    kvh_unlock(rt);
}

/* ---- slots ---------------------------------------------------------------------------------------------------- */

static bool take(runtime *rt, channel *ch) {
    if (ch->waiters.head) return false; /* first come, first served */
    if (ch->outstanding >= rt->room) {
        if (rt->slack_used[ch->class] >= rt->slack) return false;
        rt->slack_used[ch->class]++;
    }
    ch->outstanding++;
    return true;
}

static _Thread_local uint64_t full_calls;

uint64_t kvhostQueueFull(void) { return full_calls; }

static cudaError_t take_or_wait(call *c, stream *s, channel *ch) {
    runtime *rt = c->rt;
    if (take(rt, ch)) return cudaSuccess;
    cudaError_t error = share_context(c);
    if (error) return error;
    if (!take(rt, ch)) {
        error = atomic_load_explicit(&rt->sticky, memory_order_relaxed);
        if (!error) {
            parker p = {.slot = ch, .of = s};
            ch->waiting++;
            atomic_fetch_add(&rt->waiting[ch->class], 1);
            uint64_t before = c->blocked_ns;
            error = park(c, &ch->waiters, &p, KVHOST_QUEUE_FULL);
            atomic_fetch_sub(&rt->waiting[ch->class], 1);
            ch->waiting--;
            rt->stats.blocked_calls++;
            full_calls++;
            rt->stats.blocked_ns += c->blocked_ns - before;
            if (atomic_load(&p.state) == PARK_ABORTED) error = atomic_load(&rt->sticky);
        }
    }
    unshare_context(rt);
    return error;
}

uint64_t kvhostSlots(cudaStream_t handle) {
    stream *s = (stream *)handle;
    runtime *rt = s ? atomic_load(&s->rt) : NULL;
    uint64_t slots = 0;
    if (!rt) return 0;
    kvh_lock(rt);
    for (const op *o = s->head; o; o = o->next) slots += o->holds_slot;
    kvh_unlock(rt);
    return slots;
}

/* ---- submission ------------------------------------------------------------------------------------------------ */

/* Puts a copy of `proto` behind the stream, whose lock is held. On an error nothing was submitted. */
cudaError_t kvh_submit(call *c, stream *s, const op *proto) {
    runtime *rt = c->rt;
    uint64_t now = kvh_now(rt), ready = now + (rt->config.submit_ns > 0 ? (uint64_t)rt->config.submit_ns : 0);
    kvh_lock(rt);
    cudaError_t error = atomic_load_explicit(&rt->sticky, memory_order_relaxed);
    op *o = NULL;
    channel *ch = NULL;
    if (!error && proto->kind != OP_WAIT) {
        uint8_t class = proto->kind == OP_RECORD ? s->last_class : proto->class;
        ch = &rt->channels[class][s->number % rt->channels_of[class]];
        uint64_t before = c->blocked_ns;
        error = take_or_wait(c, s, ch);
        if (c->blocked_ns != before) now = kvh_now(rt);
        if (!error) s->last_class = class;
    }
    if (!error && !(o = kvh_op(rt))) error = cudaErrorMemoryAllocation;
    if (error) {
        kvh_unlock(rt);
        return error;
    }
    *o = *proto;
    o->stream = s;
    o->channel = ch;
    o->submit_ns = o->ready_ns = now;
    o->holds_slot = ch != NULL;
    rt->used = true;
    if (ch) {
        o->class = ch->class;
        if (!c->correlation) c->correlation = ++rt->next_correlation;
        c->chunks++;
        if (c->tracing) {
            o->trace_index = c->trace_index;
            o->trace_epoch = c->trace_epoch;
            kvh_trace_submitted(c, s, ch);
        }
        if (ch->head)
            ch->tail->next_channel = o;
        else
            ch->head = o;
        ch->tail = o;
        if (proto->kind == OP_COPY)
            rt->stats.copies_submitted += proto->count;
        else if (proto->kind != OP_RECORD)
            rt->stats.launches++;
    }
    s->submitted++;
    rt->stats.operations_pending++;
    if (s->head) {
        s->tail->next = o;
        s->tail = o;
    } else {
        s->head = s->tail = o;
        kvh_settle_stream(rt, s);
        kvh_pump(rt);
    }
    kvh_unlock(rt);
    /* what a driver does on the host for every submission; a call that blocked has taken that long already */
    if (ch) rt->time->spend(rt, ready);
    return cudaSuccess;
}

cudaError_t kvh_submit_one(call *c, cudaStream_t handle, const op *proto) {
    stream *s = kvh_stream(c->rt, handle);
    cudaError_t error;
    if (!s) return cudaErrorInvalidResourceHandle;
    if (kvh_captured(c->rt, s, &error)) return error;
    error = kvh_lock_stream(c, s);
    if (error) return error;
    error = kvh_submit(c, s, proto);
    kvh_unlock_stream(c->rt, s);
    return error;
}

/* ---- waiting for work ------------------------------------------------------------------------------------------ */

cudaError_t kvh_wait_stream(call *c, stream *s, uint64_t target, enum kvhost_reason reason) {
    runtime *rt = c->rt;
    kvh_lock(rt);
    cudaError_t error = cudaSuccess;
    if (s->completed < target && !atomic_load_explicit(&rt->sticky, memory_order_relaxed)) {
        parker p = {.target = target, .of = s};
        error = park(c, &s->waiters, &p, reason);
    }
    kvh_unlock(rt);
    return error ? error : atomic_load(&rt->sticky);
}

cudaError_t kvh_wait_event(call *c, event *e) {
    runtime *rt = c->rt;
    if (!e) return cudaErrorInvalidResourceHandle;
    kvh_lock(rt);
    marker *m = e->marker;
    cudaError_t error = cudaSuccess;
    if (m && !m->done && !atomic_load_explicit(&rt->sticky, memory_order_relaxed)) {
        parker p = {0};
        m->refs++;
        error = park(c, &m->waiters, &p, KVHOST_SYNC);
        kvh_unref(rt, m);
    }
    kvh_unlock(rt);
    return error ? error : atomic_load(&rt->sticky);
}

cudaError_t kvh_wait_all(call *c) {
    runtime *rt = c->rt;
    kvh_lock(rt);
    size_t n = 0, i = 0;
    for (stream *s = rt->streams; s; s = s->next) n += s->head != NULL;
    struct {
        stream *s;
        uint64_t target;
    } *goals = malloc((n + 1) * sizeof *goals);
    if (!goals) {
        kvh_unlock(rt);
        return cudaErrorMemoryAllocation;
    }
    for (stream *s = rt->streams; s && i < n; s = s->next)
        if (s->head) goals[i].s = s, goals[i].target = s->submitted, i++;
    kvh_unlock(rt);
    cudaError_t error = atomic_load(&rt->sticky);
    while (i-- && !error) error = kvh_wait_stream(c, goals[i].s, goals[i].target, KVHOST_SYNC);
    free(goals);
    return error;
}
