/* Actors of the virtual clock: simulated threads, each on a stack of its own. */
#include "simulation.h"

#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#define STACK_BYTES (256u << 10)

static void take_step(actor *a) {
    simulation *s = a->rt->simulation;
    uint64_t next = a->step(a->ctx, s->now_ns);
    if (next <= s->now_ns) next = s->now_ns + 1;
    a->wake_ns = a->woken ? s->now_ns : next;
    a->state = ACTOR_IDLE;
}

/* A context takes no pointers, only ints. */
static void on_own_stack(unsigned high, unsigned low) {
    actor *a = (actor *)(uintptr_t)(((uint64_t)high << 32) | low);
    for (;;) {
        take_step(a);
        swapcontext(&a->context, &a->loop);
    }
}

/* Its turn begins when it is told to go; then no other thread is in a call. */
static void take_turn(actor *a) {
    while (sem_wait(&a->go));
    atomic_store_explicit(&a->rt->simulation->owner, kvh_tid(), memory_order_relaxed);
}

static void *on_own_thread(void *arg) {
    actor *a = arg;
    for (;;) {
        take_turn(a);
        if (a->leaves) return NULL;
        take_step(a);
        sem_post(&a->back);
    }
}

static bool make_thread(actor *a) {
    sem_init(&a->go, 0, 0);
    sem_init(&a->back, 0, 0);
    a->on_own_thread = !pthread_create(&a->own, NULL, on_own_thread, a);
    return a->on_own_thread;
}

/* Until it has taken its step, or waits. */
static void give_turn(actor *a) {
    sem_post(&a->go);
    while (sem_wait(&a->back));
    atomic_store_explicit(&a->rt->simulation->owner, kvh_tid(), memory_order_relaxed);
}

static void end_thread(actor *a) {
    uint32_t me = kvh_tid();
    a->leaves = true;
    sem_post(&a->go);
    pthread_join(a->own, NULL);
    atomic_store_explicit(&a->rt->simulation->owner, me, memory_order_relaxed);
    sem_destroy(&a->go);
    sem_destroy(&a->back);
}

static bool make_stack(actor *a) {
    size_t guard = (size_t)sysconf(_SC_PAGESIZE);
    char *at =
        mmap(NULL, STACK_BYTES + guard, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED) return false;
    a->stack = at;
    mprotect(at, guard, PROT_NONE);
    getcontext(&a->context);
    a->context.uc_stack.ss_sp = at + guard;
    a->context.uc_stack.ss_size = STACK_BYTES;
    a->context.uc_link = NULL;
    uint64_t p = (uintptr_t)a;
    makecontext(&a->context, (void (*)(void))(uintptr_t)on_own_stack, 2, (unsigned)(p >> 32), (unsigned)p);
    return true;
}

static void drop(runtime *rt, actor *a) {
    simulation *s = rt->simulation;
    actor **link = &s->actors;
    while (*link != a) link = &(*link)->next;
    *link = a->next;
    if (s->actors_end == &a->next) s->actors_end = link;
    if (a->on_own_thread) end_thread(a);
    if (a->stack) munmap(a->stack, STACK_BYTES + (size_t)sysconf(_SC_PAGESIZE));
    free(a);
}

void kvh_resume(runtime *rt, actor *a) {
    simulation *s = rt->simulation;
    actor *before = s->current;
    if (a->state == ACTOR_IDLE) a->woken = false;
    a->state = ACTOR_RUNNING;
    s->current = a;
    if (a->on_own_thread) {
        give_turn(a);
    } else {
        thread_state mine = kvh_swap_thread(a->thread);
        if (a->on_callers_stack)
            take_step(a);
        else
            swapcontext(&a->loop, &a->context);
        a->thread = kvh_swap_thread(mine);
    }
    s->current = before;
    if (a->state == ACTOR_IDLE && a->removed) drop(rt, a);
}

void kvh_suspend(runtime *rt, waiting *w) {
    actor *a = rt->simulation->current;
    a->waiting = w;
    a->state = ACTOR_WAITING;
    if (a->on_own_thread) {
        sem_post(&a->back);
        take_turn(a);
    } else {
        swapcontext(&a->context, &a->loop);
    }
}

static actor *find(runtime *rt, int id) {
    actor *a = rt->simulation->actors;
    while (a && a->id != id) a = a->next;
    return a;
}

typedef struct {
    runtime *rt;
    int id;
} sought;

static int is_gone(void *ctx) {
    const sought *x = ctx;
    return find(x->rt, x->id) == NULL;
}

void kvh_remove_actor(runtime *rt, actor *a) {
    if (a->state == ACTOR_IDLE) {
        drop(rt, a);
        return;
    }
    a->removed = true; /* after its step */
    if (a->state == ACTOR_RUNNING) return;
    sought x = {rt, a->id};
    waiting w = {.condition = is_gone, .ctx = &x, .until_ns = NEVER};
    if (!kvh_simulate(rt, &w)) return;
    while ((a = find(rt, x.id)) && a->state == ACTOR_WAITING) { /* nothing can wake it: its call returns that */
        a->waiting->error = cudaErrorLaunchTimeout;
        kvh_resume(rt, a);
    }
}

/* ---- exports ----------------------------------------------------------------------------------------------------- */

enum place { OWN_STACK, CALLERS_STACK, OWN_THREAD };

static int add(kvhost_step step, void *ctx, enum place place) {
    runtime *rt = kvh_runtime();
    if (!rt->simulation || !step) return -1;
    actor *a = calloc(1, sizeof *a);
    if (!a) return -1;
    *a = (actor){.rt = rt, .step = step, .ctx = ctx, .on_callers_stack = place == CALLERS_STACK};
    if ((place == OWN_STACK && !make_stack(a)) || (place == OWN_THREAD && !make_thread(a))) {
        free(a);
        return -1;
    }
    bool owns = kvh_simulation_enter(rt);
    simulation *s = rt->simulation;
    a->id = s->next_actor++;
    a->wake_ns = s->now_ns;
    *s->actors_end = a;
    s->actors_end = &a->next;
    if (owns) kvh_simulation_leave(rt);
    return a->id;
}

int kvhostActorAdd(kvhost_step step, void *ctx) { return add(step, ctx, OWN_STACK); }

int kvhostActorAddInline(kvhost_step step, void *ctx) { return add(step, ctx, CALLERS_STACK); }

int kvhostActorAddThread(kvhost_step step, void *ctx) { return add(step, ctx, OWN_THREAD); }

void kvhostActorWake(int id) {
    runtime *rt = kvh_runtime();
    if (!rt->simulation) return;
    bool owns = kvh_simulation_enter(rt);
    actor *a = find(rt, id);
    if (a) a->woken = true;
    if (a && a->state == ACTOR_IDLE) a->wake_ns = rt->simulation->now_ns;
    if (owns) kvh_simulation_leave(rt);
}

void kvhostActorRemove(int id) {
    runtime *rt = kvh_runtime();
    if (!rt->simulation) return;
    bool owns = kvh_simulation_enter(rt);
    actor *a = find(rt, id);
    if (a && !a->removed) kvh_remove_actor(rt, a);
    if (owns) kvh_simulation_leave(rt);
}
