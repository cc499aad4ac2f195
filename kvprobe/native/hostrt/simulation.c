/* Time as the model says: an event loop, run by whoever waits. */
#include "simulation.h"

#include <stdlib.h>

#define MAX_POLLS 1000000

/* ---- one at a time --------------------------------------------------------------------------------------------- */

bool kvh_simulation_enter(runtime *rt) {
    simulation *s = rt->simulation;
    uint32_t me = kvh_tid();
    if (atomic_load_explicit(&s->owner, memory_order_relaxed) == me) return false;
    pthread_mutex_lock(&s->lock);
    atomic_store_explicit(&s->owner, me, memory_order_relaxed);
    return true;
}

void kvh_simulation_leave(runtime *rt) {
    atomic_store_explicit(&rt->simulation->owner, 0, memory_order_relaxed);
    pthread_mutex_unlock(&rt->simulation->lock);
}

void kvh_simulation_lock(runtime *rt) {
    if (kvh_simulation_enter(rt)) rt->simulation->locked_briefly = true;
}

void kvh_simulation_unlock(runtime *rt) {
    if (!rt->simulation->locked_briefly) return;
    rt->simulation->locked_briefly = false;
    kvh_simulation_leave(rt);
}

bool kvh_simulation_busy(runtime *rt) { return rt->simulation->innermost || rt->simulation->current; }

uint64_t kvh_simulated_now(runtime *rt) { return rt->simulation->now_ns; }

uint32_t kvh_simulated_thread(runtime *rt) {
    const actor *a = rt->simulation->current;
    return a ? (uint32_t)a->id + 1 : 0;
}

/* ---- chance ------------------------------------------------------------------------------------------------------ */

/* splitmix64 */
uint64_t kvh_random(runtime *rt) {
    uint64_t z = rt->simulation->random += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

uint32_t kvh_choose(runtime *rt, uint32_t n) {
    return n < 2 || !rt->simulation ? 0 : (uint32_t)(((kvh_random(rt) >> 32) * n) >> 32);
}

/* ---- what is due next ----------------------------------------------------------------------------------------------
 */

enum event_kind { NOTHING, RETURN, COPY_BEGIN, COPY_END, COMPUTE_END, HOST_FUNCTION, ACTOR };

typedef struct {
    uint64_t at_ns;
    enum event_kind kind;
    uint32_t same; /* so many were due at that time */
    uint8_t class;
    actor *actor;
} event_due;

static void offer(runtime *rt, event_due *e, uint64_t at_ns, enum event_kind kind, uint8_t class, actor *a) {
    if (at_ns < rt->simulation->now_ns) at_ns = rt->simulation->now_ns;
    if (at_ns > e->at_ns || at_ns == NEVER) return;
    if (at_ns < e->at_ns) e->same = 0;
    e->at_ns = at_ns;
    if (kvh_choose(rt, ++e->same)) return;
    e->kind = kind;
    e->class = class;
    e->actor = a;
}

static uint64_t due_ns(simulation *s, const waiting *w) {
    if (w->p && atomic_load_explicit(&w->p->state, memory_order_relaxed) >= PARK_GO) return s->now_ns;
    if (w->condition) {
        s->peeking = true;
        int holds = w->condition(w->ctx);
        s->peeking = false;
        if (holds) return s->now_ns;
    }
    return w->until_ns;
}

static event_due next_event(runtime *rt, const waiting *caller) {
    simulation *s = rt->simulation;
    event_due e = {.at_ns = NEVER};
    bool lost = kvh_lost(rt);
    for (uint8_t k = KVHOST_H2D; k <= KVHOST_D2H; k++) {
        if (s->copying[k])
            offer(rt, &e, lost ? 0 : s->copy_end_ns[k], COPY_END, k, NULL);
        else if (rt->copy[k].ready_head)
            offer(rt, &e, 0, COPY_BEGIN, k, NULL);
    }
    const op *first = kvh_compute_first(rt);
    if (first) offer(rt, &e, lost ? 0 : first->finish_ns, COMPUTE_END, 0, NULL);
    if (rt->host.head) offer(rt, &e, 0, HOST_FUNCTION, 0, NULL);
    for (actor *a = s->actors; a; a = a->next) {
        if (a->state == ACTOR_IDLE)
            offer(rt, &e, a->wake_ns, ACTOR, 0, a);
        else if (a->state == ACTOR_WAITING)
            offer(rt, &e, due_ns(s, a->waiting), ACTOR, 0, a);
    }
    if (caller) {
        uint64_t due = due_ns(s, caller);
        if (!caller->last || due < e.at_ns) offer(rt, &e, due, RETURN, 0, NULL);
    }
    return e;
}

/* ---- what happens
 * ---------------------------------------------------------------------------------------------------- */

/* A copy's bytes may arrive at any time between its start and its end: at one of them, or half at each. */
static void begin_copy(runtime *rt, uint8_t class) {
    simulation *s = rt->simulation;
    uint64_t service;
    op *o = kvh_copy_begin(rt, class, &service);
    if (!o) return;
    enum half now = (enum half[]){0, FIRST_HALF, SECOND_HALF, BOTH_HALVES}[kvh_choose(rt, 4)];
    s->copy_moves[class] = !o->fail && !kvh_lost(rt);
    s->copying[class] = o;
    s->copy_end_ns[class] = o->start_ns + service;
    s->copy_then[class] = BOTH_HALVES & ~now;
    if (now && s->copy_moves[class]) kvh_move(o, now);
}

static void end_copy(runtime *rt, uint8_t class) {
    simulation *s = rt->simulation;
    op *o = s->copying[class];
    bool moves = s->copy_moves[class] && !kvh_lost(rt);
    s->copying[class] = NULL;
    if (moves && s->copy_then[class]) kvh_move(o, s->copy_then[class]);
    uint64_t end = s->copy_end_ns[class];
    kvh_copy_end(rt, o, end < s->now_ns ? end : s->now_ns, moves);
}

static void execute(runtime *rt, const event_due *e) {
    simulation *s = rt->simulation;
    s->events++;
    uint64_t what = s->now_ns << 12 ^ (uint64_t)e->kind << 8 ^ (e->actor ? (uint64_t)e->actor->id : e->class);
    s->digest = (s->digest ^ what) * 0x9e3779b97f4a7c15u;
    s->digest ^= s->digest >> 29;
    if (e->kind == ACTOR) {
        s->polls++;
        kvh_resume(rt, e->actor);
        return;
    }
    s->polls = 0;
    kvh_lock(rt);
    if (e->kind == COPY_BEGIN)
        begin_copy(rt, e->class);
    else if (e->kind == COPY_END)
        end_copy(rt, e->class);
    else if (e->kind == COMPUTE_END)
        kvh_compute_end(rt);
    else
        kvh_host_end(rt);
    kvh_unlock(rt);
}

static cudaError_t run_loop(runtime *rt, waiting *w) {
    simulation *s = rt->simulation;
    waiting *outer = s->innermost;
    s->innermost = w;
    s->polls = 0;
    cudaError_t error = cudaSuccess;
    for (;;) {
        event_due e = next_event(rt, w);
        if (e.kind == NOTHING || (s->polls > MAX_POLLS && w->until_ns == NEVER && e.kind == ACTOR)) {
            kvh_describe_stuck(rt);
            error = cudaErrorLaunchTimeout;
            break;
        }
        s->now_ns = e.at_ns;
        if (e.kind == RETURN) break;
        execute(rt, &e);
    }
    s->innermost = outer;
    return error;
}

cudaError_t kvh_simulate(runtime *rt, waiting *w) {
    simulation *s = rt->simulation;
    if (!s->current || s->current->on_callers_stack) return run_loop(rt, w);
    kvh_suspend(rt, w);
    return w->error;
}

/* ---- the timekeeper
 * -------------------------------------------------------------------------------------------------- */

static void look(runtime *rt, enum engine engine) { (void)rt, (void)engine; /* the loop looks at all of them */ }

static cudaError_t wait_for(runtime *rt, parker *p) {
    waiting w = {.p = p, .until_ns = NEVER};
    return kvh_simulate(rt, &w);
}

static void spend(runtime *rt, uint64_t until_ns) {
    simulation *s = rt->simulation;
    if (s->peeking || until_ns <= s->now_ns) return;
    bool suspends = s->current && !s->current->on_callers_stack;
    if (next_event(rt, suspends ? s->innermost : NULL).at_ns > until_ns) { /* nothing happens meanwhile */
        s->now_ns = until_ns;
        return;
    }
    waiting w = {.until_ns = until_ns};
    kvh_simulate(rt, &w);
}

static void start(runtime *rt) {
    simulation *s = calloc(1, sizeof *s);
    if (!s) abort();
    pthread_mutex_init(&s->lock, NULL);
    s->now_ns = START_NS;
    s->random = rt->config.seed;
    s->actors_end = &s->actors;
    rt->simulation = s;
}

static void stop(runtime *rt) {
    while (rt->simulation->actors) kvh_remove_actor(rt, rt->simulation->actors);
}

const timekeeper kvh_simulated = {start, stop, look, wait_for, spend};

/* ---- exports
 * ----------------------------------------------------------------------------------------------------------- */

uint64_t kvhostNow(void) { return kvh_now(kvh_runtime()); }

int kvhostIsVirtual(void) { return kvh_runtime()->simulation != NULL; }

static int run(waiting *w) {
    runtime *rt = kvh_runtime();
    if (!rt->simulation) return cudaErrorNotSupported;
    bool owns = kvh_simulation_enter(rt);
    cudaError_t error = kvh_simulate(rt, w);
    if (owns) kvh_simulation_leave(rt);
    return error;
}

int kvhostAdvance(uint64_t until_ns) {
    waiting w = {.until_ns = until_ns == NEVER ? NEVER - 1 : until_ns, .last = true};
    return run(&w);
}

int kvhostRunUntil(int (*condition)(void *ctx), void *ctx) { return kvhostRunUntilTime(condition, ctx, NEVER); }

int kvhostRunUntilTime(int (*condition)(void *ctx), void *ctx, uint64_t until_ns) {
    if (!condition) return cudaErrorInvalidValue;
    waiting w = {.condition = condition, .ctx = ctx, .until_ns = until_ns};
    return run(&w);
}

const char *kvhostStuck(void) {
    runtime *rt = kvh_runtime();
    return rt->simulation ? rt->simulation->stuck : "";
}

uint64_t kvhostEvents(void) {
    runtime *rt = kvh_runtime();
    return rt->simulation ? rt->simulation->events : 0;
}

uint64_t kvhostDigest(void) {
    runtime *rt = kvh_runtime();
    return rt->simulation ? rt->simulation->digest : 0;
}

/* ---- patterns in memory ------------------------------------------------------------------------------------------ */

void kvhostFillPieces(void *at, uint64_t piece_bytes, const uint64_t *words, uint64_t count) {
    uint64_t *to = at;
    for (uint64_t p = 0; p < count; p++)
        for (uint64_t i = 0; i < piece_bytes / 8; i++) *to++ = words[p];
}

int64_t kvhostComparePieces(const void *at, uint64_t piece_bytes, const uint64_t *words, uint64_t count) {
    const uint64_t *from = at;
    for (uint64_t p = 0; p < count; p++, from += piece_bytes / 8) {
        uint64_t differs = 0;
        for (uint64_t i = 0; words[p] && i < piece_bytes / 8; i++) differs |= from[i] ^ words[p];
        if (differs) return (int64_t)p;
    }
    return -1;
}
