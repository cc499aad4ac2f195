/* The scheduler: which operation may start, who gets a freed slot, what a completion sets free. */
#include "rt.h"

#include <linux/futex.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

static void futex_wake_one(_Atomic uint32_t *word) { syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0); }

/* Where the clock is virtual, a call owns all from its begin to its end. */
void kvh_lock(runtime *rt) {
    if (rt->simulation)
        kvh_simulation_lock(rt);
    else
        pthread_mutex_lock(&rt->lock);
}

void kvh_unlock(runtime *rt) {
    if (rt->simulation) {
        kvh_simulation_unlock(rt);
        return;
    }
    uint32_t n = rt->wake_count;
    _Atomic uint32_t *wakes[16];
    if (n) memcpy(wakes, rt->wakes, n * sizeof *wakes);
    rt->wake_count = 0;
    pthread_mutex_unlock(&rt->lock);
    /* A word may be gone by now (its thread went on by itself): waking an address that nobody waits on is harmless,
     * and whoever waits on a reused one looks again. */
    for (uint32_t i = 0; i < n; i++) futex_wake_one(wakes[i]);
}

void kvh_wake_later(runtime *rt, _Atomic uint32_t *word) {
    if (rt->wake_count < 16)
        rt->wakes[rt->wake_count++] = word;
    else
        futex_wake_one(word);
}

/* ---- parking ------------------------------------------------------------------------------------------------- */

void kvh_push(parkers *list, parker *p) {
    p->next = NULL;
    if (list->head)
        list->tail->next = p;
    else
        list->head = p;
    list->tail = p;
}

void kvh_go(runtime *rt, parker *p, uint32_t state) {
    if (atomic_exchange(&p->state, state) == PARK_ASLEEP) kvh_wake_later(rt, &p->state);
}

static parker *pop(parkers *list) {
    parker *p = list->head;
    if (p) list->head = p->next;
    return p;
}

/* Out of the list, if it is still in it: its thread waits no longer. */
void kvh_remove(parkers *list, parker *p) {
    parker *last = NULL;
    for (parker **link = &list->head; *link; last = *link, link = &(*link)->next)
        if (*link == p) {
            *link = p->next;
            if (list->tail == p) list->tail = last;
            return;
        }
}

void kvh_go_all(runtime *rt, parkers *list, uint32_t state) {
    for (parker *p; (p = pop(list));) kvh_go(rt, p, state);
}

/* ---- operations and markers ----------------------------------------------------------------------------------- */

/* Slabs are large and touched at once: a page fault in one submission of a thousand, not in one of fifty. */
bool kvh_more_ops(runtime *rt) {
    enum { SLAB = 1024 };
    op *slab = calloc(SLAB, sizeof *slab);
    for (int i = 0; slab && i < SLAB; i++) slab[i].next = rt->free_ops, rt->free_ops = &slab[i];
    return slab != NULL;
}

op *kvh_op(runtime *rt) {
    if (!rt->free_ops && !kvh_more_ops(rt)) return NULL;
    op *o = rt->free_ops;
    rt->free_ops = o->next;
    return o;
}

static void free_op(runtime *rt, op *o) {
    if (o->kind == OP_COPY && o->copy.batch && --o->copy.batch->refs == 0) {
        free(o->copy.batch->staging);
        free(o->copy.batch);
    }
    if (o->kind == OP_GATE) kvh_gate_unref(o->gate);
    o->next = rt->free_ops;
    rt->free_ops = o;
}

/* Like handles, they never go back to the system: an event that is recorded at the end of a process has one. */
static bool more_markers(runtime *rt) {
    enum { SLAB = 255 };
    static struct slab {
        struct slab *before; /* what finds leaks looks from here */
        marker markers[SLAB];
    } *newest;
    struct slab *slab = malloc(sizeof *slab);
    if (!slab) return false;
    slab->before = newest;
    newest = slab;
    for (int i = 0; i < SLAB; i++) slab->markers[i].next_free = rt->free_markers, rt->free_markers = &slab->markers[i];
    return true;
}

marker *kvh_marker(runtime *rt) {
    if (!rt->free_markers && !more_markers(rt)) return NULL;
    marker *m = rt->free_markers;
    rt->free_markers = m->next_free;
    memset(m, 0, sizeof *m);
    m->refs = 1;
    return m;
}

void kvh_unref(runtime *rt, marker *m) {
    if (!m || --m->refs) return;
    m->next_free = rt->free_markers;
    rt->free_markers = m;
}

/* ---- slots ---------------------------------------------------------------------------------------------------- */

/* Gives the operation's slot to who has waited longest for one like it. A slot out of the class's shared slack goes to
 * a waiter of the same channel first, then to one of any channel of the class. */
void kvh_release_slot(runtime *rt, op *o) {
    channel *ch = o->channel;
    if (!o->holds_slot) return;
    o->holds_slot = false;
    channel *to = ch;
    bool slack = ch->outstanding > rt->room;
    if (!ch->waiters.head && slack)
        for (uint32_t i = 0; i < rt->channels_of[ch->class]; i++)
            if (rt->channels[ch->class][i].waiters.head) {
                to = &rt->channels[ch->class][i];
                break;
            }
    parker *p = pop(&to->waiters);
    if (p) {
        if (to != ch) ch->outstanding--, to->outstanding++;
        kvh_go(rt, p, PARK_GO);
        return;
    }
    ch->outstanding--;
    if (slack) rt->slack_used[ch->class]--;
}

/* Lets kvhostReset go on when nothing is inside any more. */
void kvh_let_leave(runtime *rt) {
    if (!rt->leaving || rt->inside || rt->stats.operations_pending) return;
    kvh_go(rt, rt->leaving, PARK_GO);
    rt->leaving = NULL;
}

/* ---- progress ------------------------------------------------------------------------------------------------- */

static void mark_dirty(runtime *rt, channel *ch) {
    if (ch->dirty) return;
    ch->dirty = true;
    ch->next_dirty = rt->dirty;
    rt->dirty = ch;
}

/* Takes the stream's oldest operation out: it is over. */
static void pop_stream(runtime *rt, stream *s, op *o) {
    s->head = o->next;
    if (!s->head) s->tail = NULL;
    s->completed++;
    rt->stats.operations_pending--;
    parker **link = &s->waiters.head, *last = NULL;
    for (parker *p; (p = *link);) {
        if (p->target <= s->completed)
            *link = p->next, kvh_go(rt, p, PARK_GO);
        else
            last = p, link = &p->next;
    }
    s->waiters.tail = last;
    free_op(rt, o);
    kvh_let_leave(rt);
}

/* Looks at the stream's head: passes waits that are satisfied, and tells the head's channel that it could start. */
void kvh_settle_stream(runtime *rt, stream *s) {
    for (op *o; (o = s->head);) {
        if (o->kind != OP_WAIT) {
            if (o->ready_ns < s->ready_ns) o->ready_ns = s->ready_ns;
            if (!o->started && o->channel->head == o) mark_dirty(rt, o->channel);
            return;
        }
        marker *m = o->marker;
        if (!m->done) {
            if (!o->started) o->started = true, o->next_channel = m->waits, m->waits = o;
            return;
        }
        if (s->ready_ns < m->time_ns) s->ready_ns = m->time_ns;
        kvh_unref(rt, m);
        pop_stream(rt, s, o);
    }
    if (s->destroyed) kvh_stream_retire(rt, s);
}

void kvh_start_op(runtime *rt, op *o) {
    channel *ch = o->channel;
    o->started = true;
    ch->head = o->next_channel;
    o->next_channel = NULL;
    if (!ch->head)
        ch->tail = NULL;
    else if (ch->head == ch->head->stream->head)
        mark_dirty(rt, ch);
    o->start_ns = o->ready_ns > ch->started_ns ? o->ready_ns : ch->started_ns;
    ch->started_ns = o->start_ns;
}

void kvh_complete(runtime *rt, op *o, uint64_t finish_ns) {
    stream *s = o->stream;
    o->finish_ns = finish_ns;
    kvh_release_slot(rt, o);
    if (s->ready_ns < finish_ns) s->ready_ns = finish_ns;
    if (o->trace_index) kvh_trace_executed(o, atomic_load_explicit(&rt->sticky, memory_order_relaxed) != 0);
    if (o->kind == OP_RECORD) {
        marker *m = o->marker;
        m->done = true;
        m->time_ns = finish_ns;
        kvh_go_all(rt, &m->waiters, PARK_GO);
        op *w = m->waits;
        m->waits = NULL;
        pop_stream(rt, s, o);
        while (w) {
            op *next = w->next_channel;
            kvh_settle_stream(rt, w->stream);
            w = next;
        }
        kvh_unref(rt, m);
    } else {
        pop_stream(rt, s, o);
    }
    kvh_settle_stream(rt, s);
}

/* Starts what stands at the channel's head, as far as it goes. */
static void settle_channel(runtime *rt, channel *ch) {
    for (op *o; (o = ch->head) && o == o->stream->head;) {
        if (o->kind == OP_COPY) {
            if (!ch->ready) kvh_engine_ready(rt, ch);
            return;
        }
        kvh_start_op(rt, o);
        if (o->kind == OP_RECORD) {
            kvh_complete(rt, o, o->start_ns);
            continue;
        }
        /* what computes leaves its queue when it starts: behind it a full depth is free */
        kvh_release_slot(rt, o);
        if (o->kind == OP_HOSTFN)
            kvh_host_start(rt, o);
        else
            kvh_compute_start(rt, o);
    }
}

void kvh_pump(runtime *rt) {
    for (channel *ch; (ch = rt->dirty);) {
        rt->dirty = ch->next_dirty;
        ch->dirty = false;
        settle_channel(rt, ch);
    }
}

/* After this nothing waits and nothing moves: blocked calls return, engines run through what is left without doing it.
 */
void kvh_fail(runtime *rt, cudaError_t code) {
    if (atomic_load_explicit(&rt->sticky, memory_order_relaxed)) return;
    atomic_store(&rt->sticky, code);
    for (int k = 0; k < CLASSES; k++)
        for (int i = 0; i < MAX_CHANNELS; i++) kvh_go_all(rt, &rt->channels[k][i].waiters, PARK_ABORTED);
    for (stream *s = rt->streams; s; s = s->next) kvh_go_all(rt, &s->waiters, PARK_ABORTED);
    for (op *o = rt->gates_running, *next; o; o = next) {
        next = o->next_channel;
        kvh_complete(rt, o, kvh_now(rt));
    }
    rt->gates_running = NULL;
    kvh_pump(rt);
    kvh_look_all(rt);
}
