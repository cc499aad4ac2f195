/* What executes: a copy engine per direction, the compute engine's timers, the threads that call host functions. */
#include "rt.h"

#include <errno.h>
#include <linux/futex.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static void thread_setup(const char *name) {
    prctl(PR_SET_NAME, name, 0, 0, 0);
    prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0);
}

/* The program's signals are for the program's threads. */
static void spawn(pthread_t *thread, void *(*fn)(void *), void *arg) {
    sigset_t all, old;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    int failed = pthread_create(thread, NULL, fn, arg);
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    if (failed) abort(); /* no threads: neither a GPU nor its stand-in could work */
}

/* Sleeps while *word is `value`, until `until_ns` (0: no limit). Returns whether the time ran out. */
static bool futex_sleep(_Atomic uint32_t *word, uint32_t value, uint64_t until_ns) {
    struct timespec until = {(time_t)(until_ns / 1000000000u), (long)(until_ns % 1000000000u)};
    long r = syscall(SYS_futex, word, FUTEX_WAIT_BITSET_PRIVATE, value, until_ns ? &until : NULL, NULL,
                     FUTEX_BITSET_MATCH_ANY);
    return r < 0 && errno == ETIMEDOUT;
}

static bool lost(runtime *rt) { return atomic_load_explicit(&rt->sticky, memory_order_acquire) != 0; }

/* ---- copy engines ----------------------------------------------------------------------------------------------- */

static void kick(runtime *rt, copy_engine *e) {
    e->idle = false;
    atomic_fetch_add(&e->kick, 1);
    kvh_wake_later(rt, &e->kick);
}

void kvh_engine_ready(runtime *rt, channel *ch) {
    copy_engine *e = &rt->copy[ch->class];
    ch->ready = true;
    ch->next_ready = NULL;
    if (e->ready_head)
        e->ready_tail->next_ready = ch;
    else
        e->ready_head = ch;
    e->ready_tail = ch;
    if (e->idle) kick(rt, e);
}

static void move_bytes(const op *o) {
    if (o->copy.height) {
        char *dst = o->copy.one.dst;
        const char *src = o->copy.one.src;
        for (size_t y = 0; y < o->copy.height; y++)
            memmove(dst + y * o->copy.dst_pitch, src + y * o->copy.src_pitch, o->copy.one.bytes);
        return;
    }
    const piece *p = o->copy.batch ? o->copy.pieces : &o->copy.one;
    for (uint32_t i = 0; i < o->count; i++) memmove(p[i].dst, p[i].src, p[i].bytes);
}

static uint64_t service_ns(const kvhost_config *config, const op *o) {
    double latency = config->latency_ns > 0 ? config->latency_ns : 0, rate = 0;
    if (o->direction == KVP_H2D) rate = config->h2d_bytes_per_s;
    if (o->direction == KVP_D2H) rate = config->d2h_bytes_per_s;
    double ns = latency + (double)(o->count - 1) * latency / 5;
    if (rate > 0) ns += (double)o->bytes * 1e9 / rate;
    return (uint64_t)ns;
}

/* Waits for the operation's scheduled end. Where a blocked submitter watches, or did within the last millisecond, the
 * timer's usual lateness is spun away, so that a blocked call lasts one copy; where nobody does, a late wake-up costs
 * nothing: the schedule does not move. */
static void wait_until(copy_engine *e, uint64_t finish_ns) {
    for (;;) {
        uint64_t now = kvp_now_ns();
        if (atomic_load_explicit(&e->rt->waiting[e->class], memory_order_relaxed)) e->watched_ns = now;
        if (now >= finish_ns || lost(e->rt)) return;
        uint32_t seen = atomic_load(&e->kick);
        uint64_t margin = now - e->watched_ns < 1000000 ? e->oversleep_ns : 3000;
        if (finish_ns - now <= margin) {
#if defined(__x86_64__)
            __builtin_ia32_pause();
#endif
            continue;
        }
        uint64_t until = finish_ns - margin;
        if (lost(e->rt)) return; /* after `seen`: a kick that came with the loss is not slept through */
        if (futex_sleep(&e->kick, seen, until)) {
            uint64_t over = kvp_now_ns();
            over = over > until ? over - until : 0;
            /* the high end of what was seen: up at once, down slowly, so that few calls are released late */
            if (over > 60000) over = 60000;
            if (over > e->oversleep_ns)
                e->oversleep_ns = over;
            else
                e->oversleep_ns -= (e->oversleep_ns - over) / 32;
            if (e->oversleep_ns < 3000) e->oversleep_ns = 3000;
        }
    }
}

static void *copy_thread(void *arg) {
    copy_engine *e = arg;
    runtime *rt = e->rt;
    thread_setup(e->class == KVHOST_H2D ? "kvhost-h2d" : "kvhost-d2h");
    kvh_lock(rt);
    while (!rt->stop) {
        channel *ch = e->ready_head;
        if (!ch) {
            e->idle = true;
            atomic_store_explicit(&e->finish_ns, 0, memory_order_relaxed);
            uint32_t seen = atomic_load(&e->kick);
            kvh_unlock(rt);
            futex_sleep(&e->kick, seen, 0);
            kvh_lock(rt);
            e->idle = false;
            continue;
        }
        e->ready_head = ch->next_ready;
        ch->ready = false;
        op *o = ch->head;
        kvh_start_op(rt, o);
        if (o->start_ns < e->free_ns) o->start_ns = ch->started_ns = e->free_ns;
        kvh_pump(rt);
        uint64_t service = service_ns(&rt->config, o);
        atomic_store_explicit(&e->finish_ns, o->start_ns + service, memory_order_relaxed);
        bool moves = !o->fail && !lost(rt);
        kvh_unlock(rt);
        if (moves) {
            uint64_t began = kvp_now_ns();
            move_bytes(o);
            uint64_t real = kvp_now_ns() - began;
            if (real > service) service = real;
            wait_until(e, o->start_ns + service);
        }
        kvh_lock(rt);
        if (o->fail) {
            kvh_fail(rt, o->fail);
        } else if (moves) {
            rt->stats.copies_done += o->count;
            rt->stats.bytes_done[o->direction] += o->bytes;
        }
        e->free_ns = o->start_ns + service;
        kvh_complete(rt, o, e->free_ns);
        kvh_pump(rt);
    }
    kvh_unlock(rt);
    return NULL;
}

/* ---- compute engine: a heap of ends ------------------------------------------------------------------------------ */

static void heap_push(compute_engine *e, op *o) {
    if (e->size == e->room) {
        uint32_t room = e->room ? 2 * e->room : 64;
        op **heap = realloc(e->heap, room * sizeof *heap);
        if (!heap) abort();
        e->heap = heap;
        e->room = room;
    }
    uint32_t i = e->size++;
    for (; i && e->heap[(i - 1) / 2]->finish_ns > o->finish_ns; i = (i - 1) / 2) e->heap[i] = e->heap[(i - 1) / 2];
    e->heap[i] = o;
}

static op *heap_pop(compute_engine *e) {
    op *top = e->heap[0], *last = e->heap[--e->size];
    uint32_t i = 0;
    for (uint32_t child; (child = 2 * i + 1) < e->size; i = child) {
        if (child + 1 < e->size && e->heap[child + 1]->finish_ns < e->heap[child]->finish_ns) child++;
        if (e->heap[child]->finish_ns >= last->finish_ns) break;
        e->heap[i] = e->heap[child];
    }
    e->heap[i] = last;
    return top;
}

static void kick_compute(runtime *rt) {
    rt->compute.sleeping_until = 0;
    atomic_fetch_add(&rt->compute.kick, 1);
    kvh_wake_later(rt, &rt->compute.kick);
}

void kvh_compute_start(runtime *rt, op *o) {
    if (o->kind == OP_GATE) {
        o->gate->reached++;
        if (!o->gate->open && !lost(rt)) {
            o->next_channel = rt->gates_running;
            rt->gates_running = o;
            return;
        }
    }
    uint64_t ns = o->kind == OP_DELAY || o->kind == OP_WORK ? o->work.ns : 0;
    o->finish_ns = o->start_ns + ns;
    heap_push(&rt->compute, o);
    if (o->finish_ns < rt->compute.sleeping_until) kick_compute(rt);
}

static void *compute_thread(void *arg) {
    runtime *rt = arg;
    compute_engine *e = &rt->compute;
    thread_setup("kvhost-compute");
    kvh_lock(rt);
    while (!rt->stop) {
        uint64_t now = kvp_now_ns();
        if (!e->size || (e->heap[0]->finish_ns > now && !lost(rt))) {
            uint64_t until = e->size ? e->heap[0]->finish_ns : 0;
            uint32_t seen = atomic_load(&e->kick);
            e->sleeping_until = e->size ? until : UINT64_MAX;
            kvh_unlock(rt);
            futex_sleep(&e->kick, seen, until);
            kvh_lock(rt);
            e->sleeping_until = 0;
            continue;
        }
        op *o = heap_pop(e);
        bool runs = !lost(rt);
        uint64_t finish = o->finish_ns;
        if (o->kind == OP_WORK || o->kind == OP_MEMSET || o->kind == OP_FREE) {
            kvh_unlock(rt);
            uint64_t began = kvp_now_ns();
            if (o->kind == OP_FREE)
                kvh_memory_release(rt, o->freed);
            else if (runs && o->kind == OP_WORK)
                o->work.fn(o->work.arg);
            else if (runs)
                memset(o->set.dst, o->set.value, o->set.bytes);
            finish += kvp_now_ns() - began;
            kvh_lock(rt);
        }
        kvh_complete(rt, o, finish);
        kvh_pump(rt);
    }
    kvh_unlock(rt);
    return NULL;
}

/* ---- gates ------------------------------------------------------------------------------------------------------- */

void kvh_gate_unref(kvhost_gate *gate) {
    if (--gate->refs == 0) free(gate);
}

kvhost_gate *kvhostGateCreate(void) {
    kvhost_gate *gate = calloc(1, sizeof *gate);
    if (gate) gate->refs = 1;
    return gate;
}

cudaError_t kvhostGateLaunch(kvhost_gate *gate, cudaStream_t stream) {
    KVH_ENTER(kvhostGateLaunch, stream);
    if (!gate) KVH_LEAVE(cudaErrorInvalidValue);
    op o = {.kind = OP_GATE, .class = KVHOST_COMPUTE, .gate = gate};
    kvh_lock(c->rt);
    gate->refs++;
    kvh_unlock(c->rt);
    cudaError_t error = kvh_submit_one(c, stream, &o);
    if (error) {
        kvh_lock(c->rt);
        kvh_gate_unref(gate);
        kvh_unlock(c->rt);
    }
    KVH_LEAVE(error);
}

static void open_gate(runtime *rt, kvhost_gate *gate) {
    gate->open = true;
    uint64_t now = kvp_now_ns();
    for (op **link = &rt->gates_running, *o; (o = *link);) {
        if (o->gate == gate) {
            *link = o->next_channel;
            kvh_complete(rt, o, now);
        } else {
            link = &o->next_channel;
        }
    }
    kvh_pump(rt);
}

void kvhostGateOpen(kvhost_gate *gate) {
    runtime *rt = kvh_runtime();
    kvh_lock(rt);
    open_gate(rt, gate);
    kvh_unlock(rt);
}

int kvhostGateReached(kvhost_gate *gate) {
    runtime *rt = kvh_runtime();
    kvh_lock(rt);
    int reached = (int)gate->reached;
    kvh_unlock(rt);
    return reached;
}

void kvhostGateDestroy(kvhost_gate *gate) {
    if (!gate) return;
    runtime *rt = kvh_runtime();
    kvh_lock(rt);
    open_gate(rt, gate);
    kvh_gate_unref(gate);
    kvh_unlock(rt);
}

/* ---- host functions -----------------------------------------------------------------------------------------------
 */

static void *worker_thread(void *arg) {
    runtime *rt = arg;
    host_workers *w = &rt->workers;
    thread_setup("kvhost-hostfn");
    kvh_lock(rt);
    while (!rt->stop || w->head) {
        op *o = w->head;
        if (!o) {
            w->idle++;
            pthread_cond_wait(&w->cond, &rt->lock);
            w->idle--;
            continue;
        }
        w->head = o->next_channel;
        uint64_t finish = o->start_ns;
        if (!lost(rt)) {
            rt->stats.host_functions++;
            kvh_unlock(rt);
            o->work.fn(o->work.arg);
            finish = kvp_now_ns();
            kvh_lock(rt);
        }
        kvh_complete(rt, o, finish);
        kvh_pump(rt);
        kvh_unlock(rt); /* sends the wake-ups, which waiting on the condition would not */
        kvh_lock(rt);
    }
    kvh_unlock(rt);
    return NULL;
}

/* A function that waits must not hold up one of another stream: there is always a thread that is free, up to 64. */
void kvh_worker_start(runtime *rt, op *o) {
    host_workers *w = &rt->workers;
    uint32_t queued = 1;
    o->next_channel = NULL;
    op **end = &w->head;
    for (; *end; end = &(*end)->next_channel) queued++;
    *end = o;
    if (w->idle < queued && w->count < MAX_WORKERS) spawn(&w->threads[w->count++], worker_thread, rt);
    pthread_cond_signal(&w->cond);
}

/* ---- all ----------------------------------------------------------------------------------------------------------
 */

void kvh_kick_all(runtime *rt) {
    kick(rt, &rt->copy[KVHOST_H2D]);
    kick(rt, &rt->copy[KVHOST_D2H]);
    kick_compute(rt);
    pthread_cond_broadcast(&rt->workers.cond);
}

void kvh_engines_start(runtime *rt) {
    pthread_cond_init(&rt->workers.cond, NULL);
    for (uint8_t k = KVHOST_H2D; k <= KVHOST_D2H; k++) {
        rt->copy[k].rt = rt;
        rt->copy[k].class = k;
        rt->copy[k].oversleep_ns = 20000;
        spawn(&rt->copy[k].thread, copy_thread, &rt->copy[k]);
    }
    spawn(&rt->compute.thread, compute_thread, rt);
}

/* After kvh_fail: lets the rest drain, then ends the threads. */
void kvh_engines_stop(runtime *rt) {
    kvh_lock(rt);
    rt->stop = true;
    kvh_kick_all(rt);
    kvh_unlock(rt);
    pthread_join(rt->copy[KVHOST_H2D].thread, NULL);
    pthread_join(rt->copy[KVHOST_D2H].thread, NULL);
    pthread_join(rt->compute.thread, NULL);
    for (uint32_t i = 0; i < rt->workers.count; i++) pthread_join(rt->workers.threads[i], NULL);
    free(rt->compute.heap);
    pthread_cond_destroy(&rt->workers.cond);
}
