/* What executes, as a model: the next copy of each direction, the compute engine's ends, gates, host functions. Nothing
 * here waits: a timekeeper (realtime.c, simulation.c) drives it. */
#include "rt.h"

#include <stdlib.h>
#include <string.h>

/* ---- copy engines ----------------------------------------------------------------------------------------------- */

void kvh_engine_ready(runtime *rt, channel *ch) {
    copy_engine *e = &rt->copy[ch->class];
    ch->ready = true;
    ch->next_ready = NULL;
    ch->ready_ns = rt->simulation ? kvh_now(rt) : 0;
    if (e->ready_head)
        e->ready_tail->next_ready = ch;
    else
        e->ready_head = ch;
    e->ready_tail = ch;
    rt->time->look(rt, ch->class);
}

/* The channel whose turn it is: the one that became ready first. */
static channel *take_ready(runtime *rt, copy_engine *e) {
    channel *first = e->ready_head, *before = NULL, *ch = first;
    if (!first) return NULL;
    if (rt->simulation) {
        uint32_t same = 1;
        for (channel *c = first->next_ready; c && c->ready_ns == first->ready_ns; c = c->next_ready) same++;
        for (uint32_t skip = kvh_choose(rt, same); skip; skip--) before = ch, ch = ch->next_ready;
    }
    if (before)
        before->next_ready = ch->next_ready;
    else
        e->ready_head = ch->next_ready;
    if (e->ready_tail == ch) e->ready_tail = before;
    ch->ready = false;
    return ch;
}

static uint64_t service(const kvhost_config *config, const op *o) {
    double latency = config->latency_ns > 0 ? config->latency_ns : 0, rate = 0;
    if (o->direction == KVP_H2D) rate = config->h2d_bytes_per_s;
    if (o->direction == KVP_D2H) rate = config->d2h_bytes_per_s;
    double ns = latency + (double)(o->count - 1) * latency / 5;
    double pageable = config->pageable_bytes_per_s;
    if (o->pageable && pageable > 0 && pageable < rate) rate = pageable;
    if (rate > 0) ns += (double)o->bytes * 1e9 / rate;
    return (uint64_t)ns;
}

op *kvh_copy_begin(runtime *rt, uint8_t class, uint64_t *service_ns) {
    copy_engine *e = &rt->copy[class];
    channel *ch = take_ready(rt, e);
    if (!ch) {
        atomic_store_explicit(&e->finish_ns, 0, memory_order_relaxed);
        return NULL;
    }
    op *o = ch->head;
    kvh_start_op(rt, o);
    if (o->start_ns < e->free_ns) o->start_ns = ch->started_ns = e->free_ns;
    kvh_pump(rt);
    *service_ns = service(&rt->config, o);
    atomic_store_explicit(&e->finish_ns, o->start_ns + *service_ns, memory_order_relaxed);
    return o;
}

static void move_run(char *dst, const char *src, size_t bytes, enum half half) {
    if (half == FIRST_HALF) bytes /= 2;
    if (half == SECOND_HALF) dst += bytes / 2, src += bytes / 2, bytes -= bytes / 2;
    memmove(dst, src, bytes);
}

void kvh_move(const op *o, enum half half) {
    if (o->copy.height) {
        char *dst = o->copy.one.dst;
        const char *src = o->copy.one.src;
        for (size_t y = 0; y < o->copy.height; y++)
            move_run(dst + y * o->copy.dst_pitch, src + y * o->copy.src_pitch, o->copy.one.bytes, half);
        return;
    }
    const piece *p = o->copy.batch ? o->copy.pieces : &o->copy.one;
    for (uint32_t i = 0; i < o->count; i++) move_run(p[i].dst, p[i].src, p[i].bytes, half);
}

void kvh_copy_end(runtime *rt, op *o, uint64_t finish_ns, bool moved) {
    if (o->fail) {
        kvh_fail(rt, o->fail);
    } else if (moved) {
        rt->stats.copies_done += o->count;
        rt->stats.bytes_done[o->direction] += o->bytes;
    }
    rt->copy[o->class].free_ns = finish_ns;
    kvh_complete(rt, o, finish_ns);
    kvh_pump(rt);
}

/* ---- compute engine: a heap of ends ------------------------------------------------------------------------------ */

static bool earlier(const op *a, const op *b) {
    return a->finish_ns < b->finish_ns || (a->finish_ns == b->finish_ns && a->order < b->order);
}

static void heap_push(compute_engine *e, op *o) {
    if (e->size == e->room) {
        uint32_t room = e->room ? 2 * e->room : 64;
        op **heap = realloc(e->heap, room * sizeof *heap);
        if (!heap) abort();
        e->heap = heap;
        e->room = room;
    }
    uint32_t i = e->size++;
    for (; i && earlier(o, e->heap[(i - 1) / 2]); i = (i - 1) / 2) e->heap[i] = e->heap[(i - 1) / 2];
    e->heap[i] = o;
}

static op *heap_pop(compute_engine *e) {
    op *top = e->heap[0], *last = e->heap[--e->size];
    uint32_t i = 0;
    for (uint32_t child; (child = 2 * i + 1) < e->size; i = child) {
        if (child + 1 < e->size && earlier(e->heap[child + 1], e->heap[child])) child++;
        if (!earlier(e->heap[child], last)) break;
        e->heap[i] = e->heap[child];
    }
    e->heap[i] = last;
    return top;
}

void kvh_compute_start(runtime *rt, op *o) {
    if (o->kind == OP_GATE) {
        o->gate->reached++;
        if (!o->gate->open && !kvh_lost(rt)) {
            o->next_channel = rt->gates_running;
            rt->gates_running = o;
            return;
        }
    }
    if (o->kind == OP_WORK) kvh_weigh(rt, o);
    uint64_t ns = o->kind == OP_DELAY || o->kind == OP_WORK ? o->work.ns : 0;
    if (o->kind == OP_WORK && o->bytes) kvh_share_link(rt, o);
    o->finish_ns = o->start_ns + ns;
    o->order = rt->simulation ? kvh_random(rt) : rt->next_order++;
    heap_push(&rt->compute, o);
    rt->time->look(rt, ENGINE_COMPUTE);
}

const op *kvh_compute_first(runtime *rt) { return rt->compute.size ? rt->compute.heap[0] : NULL; }

void kvh_compute_end(runtime *rt) {
    op *o = heap_pop(&rt->compute);
    bool runs = !kvh_lost(rt);
    uint64_t finish = o->finish_ns;
    if (o->kind == OP_WORK || o->kind == OP_MEMSET || o->kind == OP_FREE) {
        kvh_unlock(rt);
        uint64_t began = kvh_now(rt);
        if (o->kind == OP_FREE)
            kvh_memory_release(rt, o->freed);
        else if (runs && o->kind == OP_WORK)
            o->work.fn(o->work.arg);
        else if (runs)
            memset(o->set.dst, o->set.value, o->set.bytes);
        finish += kvh_now(rt) - began;
        kvh_lock(rt);
    }
    kvh_complete(rt, o, finish);
    kvh_pump(rt);
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
    uint64_t now = kvh_now(rt);
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

void kvh_host_start(runtime *rt, op *o) {
    op **end = &rt->host.head;
    while (*end) end = &(*end)->next_channel;
    o->next_channel = NULL;
    *end = o;
    rt->time->look(rt, ENGINE_HOST);
}

void kvh_host_end(runtime *rt) {
    op *o = rt->host.head;
    uint64_t finish = o->start_ns;
    rt->host.head = o->next_channel;
    if (!kvh_lost(rt)) {
        rt->stats.host_functions++;
        kvh_unlock(rt);
        o->work.fn(o->work.arg);
        finish = kvh_now(rt);
        kvh_lock(rt);
    }
    kvh_complete(rt, o, finish);
    kvh_pump(rt);
}

void kvh_look_all(runtime *rt) {
    for (int engine = 0; engine < ENGINES; engine++) rt->time->look(rt, engine);
}
