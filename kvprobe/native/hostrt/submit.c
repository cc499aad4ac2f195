/* From a call to an operation: locks, slots, waiting. */
#include "rt.h"

#include <stdlib.h>

/* A slot that comes this soon is watched for, because waking a thread on an idle core takes as long (up to 30 us in a
 * virtual machine): a blocked call would last two copies, the next none. Later ones are slept for. */
#define SPIN_NS 25000

cudaError_t kvh_lock_stream(call *c, stream *s) {
    if (pthread_mutex_trylock(&s->lock)) {
        uint64_t since = kvp_now_ns();
        pthread_mutex_lock(&s->lock);
        kvh_blocked(c, KVHOST_STREAM_LOCK, since);
    }
    if (atomic_load_explicit(&s->alive, memory_order_acquire) == STREAM_ALIVE && atomic_load(&s->rt) == c->rt)
        return cudaSuccess;
    pthread_mutex_unlock(&s->lock); /* destroyed while we waited */
    return cudaErrorInvalidResourceHandle;
}

void kvh_unlock_stream(stream *s) { pthread_mutex_unlock(&s->lock); }

/* Parks the calling thread; runtime.lock is held before and after. */
static void park(call *c, parker *p, uint64_t spin_until_ns, enum kvhost_reason reason) {
    runtime *rt = c->rt;
    uint64_t since = kvp_now_ns();
    rt->inside++;
    kvh_unlock(rt);
    kvh_park(p, spin_until_ns);
    kvh_blocked(c, reason, since);
    kvh_lock(rt);
    rt->inside--;
    kvh_let_leave(rt);
}

/* ---- the context lock ------------------------------------------------------------------------------------------ */

void kvh_ctx_share(call *c) {
    runtime *rt = c->rt;
    if (rt->ctx_exclusive) {
        parker p = {0};
        kvh_push(&rt->ctx_want_shared, &p);
        park(c, &p, 0, KVHOST_CONTEXT_LOCK); /* who lets go counts us in */
    } else {
        rt->ctx_shared++;
    }
}

static void admit_exclusive(runtime *rt) {
    parker *p = rt->ctx_want_exclusive.head;
    if (!p) return;
    rt->ctx_want_exclusive.head = p->next;
    rt->ctx_exclusive = true;
    kvh_go(rt, p, PARK_GO);
}

void kvh_ctx_unshare(call *c) {
    if (--c->rt->ctx_shared == 0) admit_exclusive(c->rt);
}

void kvh_ctx_lock(call *c) {
    runtime *rt = c->rt;
    kvh_lock(rt);
    if (rt->ctx_exclusive || rt->ctx_shared) {
        parker p = {0};
        kvh_push(&rt->ctx_want_exclusive, &p);
        park(c, &p, 0, KVHOST_CONTEXT_LOCK);
    } else {
        rt->ctx_exclusive = true;
    }
    rt->used = true;
    kvh_unlock(rt);
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

static cudaError_t take_or_wait(call *c, channel *ch, uint64_t *now) {
    runtime *rt = c->rt;
    if (take(rt, ch)) return cudaSuccess;
    kvh_ctx_share(c);
    cudaError_t error = cudaSuccess;
    if (!take(rt, ch)) {
        int sticky = atomic_load_explicit(&rt->sticky, memory_order_relaxed);
        if (sticky) {
            error = sticky;
        } else {
            parker p = {0};
            kvh_push(&ch->waiters, &p);
            ch->waiting++;
            atomic_fetch_add(&rt->waiting[ch->class], 1);
            *now = kvp_now_ns();
            uint64_t finish = atomic_load_explicit(&rt->copy[ch->class].finish_ns, memory_order_relaxed);
            uint64_t spin = finish && finish < *now + SPIN_NS ? finish + SPIN_NS : 0;
            uint64_t before = c->blocked_ns;
            park(c, &p, spin, KVHOST_QUEUE_FULL);
            atomic_fetch_sub(&rt->waiting[ch->class], 1);
            ch->waiting--;
            rt->stats.blocked_calls++;
            rt->stats.blocked_ns += c->blocked_ns - before;
            if (atomic_load(&p.state) == PARK_ABORTED) error = atomic_load(&rt->sticky);
        }
    }
    kvh_ctx_unshare(c);
    *now = kvp_now_ns();
    return error;
}

/* ---- submission ------------------------------------------------------------------------------------------------ */

/* Puts a copy of `proto` behind the stream, whose lock is held. On an error nothing was submitted. */
cudaError_t kvh_submit(call *c, stream *s, const op *proto) {
    runtime *rt = c->rt;
    uint64_t now = kvp_now_ns(), ready = now + (rt->config.submit_ns > 0 ? (uint64_t)rt->config.submit_ns : 0);
    kvh_lock(rt);
    cudaError_t error = atomic_load_explicit(&rt->sticky, memory_order_relaxed);
    op *o = NULL;
    channel *ch = NULL;
    if (!error && proto->kind != OP_WAIT) {
        uint8_t class = proto->kind == OP_RECORD ? s->last_class : proto->class;
        ch = &rt->channels[class][s->number % rt->channels_of[class]];
        error = take_or_wait(c, ch, &now);
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
    if (ch)
        while (kvp_now_ns() < ready) continue;
    return cudaSuccess;
}

cudaError_t kvh_submit_one(call *c, cudaStream_t handle, const op *proto) {
    stream *s = kvh_stream(c->rt, handle);
    if (!s) return cudaErrorInvalidResourceHandle;
    cudaError_t error = kvh_lock_stream(c, s);
    if (error) return error;
    error = kvh_submit(c, s, proto);
    kvh_unlock_stream(s);
    return error;
}

/* ---- waiting for work ------------------------------------------------------------------------------------------ */

cudaError_t kvh_wait_stream(call *c, stream *s, uint64_t target, enum kvhost_reason reason) {
    runtime *rt = c->rt;
    kvh_lock(rt);
    if (s->completed < target && !atomic_load_explicit(&rt->sticky, memory_order_relaxed)) {
        parker p = {.target = target};
        kvh_push(&s->waiters, &p);
        park(c, &p, 0, reason);
    }
    kvh_unlock(rt);
    return atomic_load(&rt->sticky);
}

cudaError_t kvh_wait_event(call *c, event *e) {
    runtime *rt = c->rt;
    if (!e) return cudaErrorInvalidResourceHandle;
    kvh_lock(rt);
    marker *m = e->marker;
    if (m && !m->done && !atomic_load_explicit(&rt->sticky, memory_order_relaxed)) {
        parker p = {0};
        m->refs++;
        kvh_push(&m->waiters, &p);
        park(c, &p, 0, KVHOST_SYNC);
        kvh_unref(rt, m);
    }
    kvh_unlock(rt);
    return atomic_load(&rt->sticky);
}

cudaError_t kvh_wait_all(call *c) {
    runtime *rt = c->rt;
    kvh_lock(rt);
    size_t n = 0, i = 0;
    for (stream *s = rt->streams; s; s = s->next) n += s->head != NULL;
    struct {
        stream *s;
        uint64_t target;
    } *goals = n ? malloc(n * sizeof *goals) : NULL;
    if (n && !goals) {
        kvh_unlock(rt);
        return cudaErrorMemoryAllocation;
    }
    for (stream *s = rt->streams; s; s = s->next)
        if (s->head) goals[i].s = s, goals[i].target = s->submitted, i++;
    kvh_unlock(rt);
    cudaError_t error = atomic_load(&rt->sticky);
    while (i--) error = kvh_wait_stream(c, goals[i].s, goals[i].target, KVHOST_SYNC);
    free(goals);
    return error;
}
