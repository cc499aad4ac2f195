/* Time that passes by itself: a thread for each copy engine, one for the compute engine, some for host functions. */
#include "../src/kvp_signals.h"
#include "rt.h"

#include <errno.h>
#include <linux/futex.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define MAX_WORKERS 64
/* A slot that comes this soon is watched for, because waking a thread on an idle core takes as long (up to 30 us in a
 * virtual machine): a blocked call would last two copies, the next none. Later ones are slept for. */
#define SPIN_NS 25000

typedef struct {
    runtime *rt;
    pthread_t thread;
    uint8_t class;
    bool idle;
    _Atomic uint32_t kick; /* futex */
    uint64_t oversleep_ns, watched_ns;
} copier;

struct threads {
    copier copiers[CLASSES]; /* [0] unused */
    pthread_t compute;
    uint64_t compute_sleeps_until; /* 0: awake */
    _Atomic uint32_t compute_kick;
    pthread_t workers[MAX_WORKERS];
    uint32_t worker_count, workers_idle;
    pthread_cond_t work;
};

static void thread_setup(const char *name) {
    prctl(PR_SET_NAME, name, 0, 0, 0);
    prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0);
}

/* The program's signals are for the program's threads. */
static void spawn(pthread_t *thread, void *(*fn)(void *), void *arg) {
    sigset_t old;
    kvp_block_signals(&old);
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

static inline void relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* ---- copy engines ----------------------------------------------------------------------------------------------- */

/* Waits for the operation's scheduled end. Where a blocked submitter watches, or did within the last millisecond, the
 * timer's usual lateness is spun away, so that a blocked call lasts one copy; where nobody does, a late wake-up costs
 * nothing: the schedule does not move. */
static void wait_until(copier *e, uint64_t finish_ns) {
    for (;;) {
        uint64_t now = kvp_now_ns();
        if (atomic_load_explicit(&e->rt->waiting[e->class], memory_order_relaxed)) e->watched_ns = now;
        if (now >= finish_ns || kvh_lost(e->rt)) return;
        uint32_t seen = atomic_load(&e->kick);
        uint64_t margin = now - e->watched_ns < 1000000 ? e->oversleep_ns : 3000;
        if (finish_ns - now <= margin) {
            relax();
            continue;
        }
        uint64_t until = finish_ns - margin;
        if (kvh_lost(e->rt)) return; /* after `seen`: a kick that came with the loss is not slept through */
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
    copier *e = arg;
    runtime *rt = e->rt;
    thread_setup(e->class == KVHOST_H2D ? "kvhost-h2d" : "kvhost-d2h");
    kvh_lock(rt);
    while (!rt->stop) {
        uint64_t service;
        op *o = kvh_copy_begin(rt, e->class, &service);
        if (!o) {
            e->idle = true;
            uint32_t seen = atomic_load(&e->kick);
            kvh_unlock(rt);
            futex_sleep(&e->kick, seen, 0);
            kvh_lock(rt);
            e->idle = false;
            continue;
        }
        bool moves = !o->fail && !kvh_lost(rt);
        kvh_unlock(rt);
        if (moves) {
            uint64_t began = kvp_now_ns();
            kvh_move(o, BOTH_HALVES);
            uint64_t real = kvp_now_ns() - began;
            if (real > service) service = real;
            wait_until(e, o->start_ns + service);
        }
        kvh_lock(rt);
        kvh_copy_end(rt, o, o->start_ns + service, moves);
    }
    kvh_unlock(rt);
    return NULL;
}

static void kick_copier(runtime *rt, copier *e) {
    e->idle = false;
    atomic_fetch_add(&e->kick, 1);
    kvh_wake_later(rt, &e->kick);
}

/* ---- compute engine ---------------------------------------------------------------------------------------------- */

static void *compute_thread(void *arg) {
    runtime *rt = arg;
    threads *t = rt->threads;
    thread_setup("kvhost-compute");
    kvh_lock(rt);
    while (!rt->stop) {
        const op *first = kvh_compute_first(rt);
        if (first && (first->finish_ns <= kvp_now_ns() || kvh_lost(rt))) {
            kvh_compute_end(rt);
            continue;
        }
        uint64_t until = first ? first->finish_ns : 0;
        uint32_t seen = atomic_load(&t->compute_kick);
        t->compute_sleeps_until = first ? until : UINT64_MAX;
        kvh_unlock(rt);
        futex_sleep(&t->compute_kick, seen, until);
        kvh_lock(rt);
        t->compute_sleeps_until = 0;
    }
    kvh_unlock(rt);
    return NULL;
}

static void kick_compute(runtime *rt) {
    rt->threads->compute_sleeps_until = 0;
    atomic_fetch_add(&rt->threads->compute_kick, 1);
    kvh_wake_later(rt, &rt->threads->compute_kick);
}

/* ---- host functions -----------------------------------------------------------------------------------------------
 */

static void *worker_thread(void *arg) {
    runtime *rt = arg;
    threads *t = rt->threads;
    thread_setup("kvhost-hostfn");
    kvh_lock(rt);
    while (!rt->stop || rt->host.head) {
        if (!rt->host.head) {
            t->workers_idle++;
            pthread_cond_wait(&t->work, &rt->lock);
            t->workers_idle--;
            continue;
        }
        kvh_host_end(rt);
        kvh_unlock(rt); /* sends the wake-ups, which waiting on the condition would not */
        kvh_lock(rt);
    }
    kvh_unlock(rt);
    return NULL;
}

/* A function that waits must not hold up one of another stream: there is always a thread that is free, up to 64. */
static void add_worker(runtime *rt) {
    threads *t = rt->threads;
    uint32_t queued = 0;
    for (op *o = rt->host.head; o; o = o->next_channel) queued++;
    if (t->workers_idle < queued && t->worker_count < MAX_WORKERS)
        spawn(&t->workers[t->worker_count++], worker_thread, rt);
    pthread_cond_broadcast(&t->work);
}

/* ---- the timekeeper -------------------------------------------------------------------------------------------------
 */

static void look(runtime *rt, enum engine engine) {
    threads *t = rt->threads;
    bool over = kvh_lost(rt) || rt->stop;
    if (engine == ENGINE_H2D || engine == ENGINE_D2H) {
        if (t->copiers[engine].idle || over) kick_copier(rt, &t->copiers[engine]);
    } else if (engine == ENGINE_COMPUTE) {
        const op *first = kvh_compute_first(rt);
        if (over || (first && first->finish_ns < t->compute_sleeps_until)) kick_compute(rt);
    } else {
        add_worker(rt);
    }
}

static cudaError_t wait_for(runtime *rt, parker *p) {
    uint64_t spin_until_ns = 0;
    if (p->slot) {
        uint64_t finish = atomic_load_explicit(&rt->copy[p->slot->class].finish_ns, memory_order_relaxed);
        if (finish && finish < kvp_now_ns() + SPIN_NS) spin_until_ns = finish + SPIN_NS;
    }
    while (spin_until_ns && kvp_now_ns() < spin_until_ns) {
        if (atomic_load_explicit(&p->state, memory_order_acquire) >= PARK_GO) return cudaSuccess;
        relax();
    }
    uint32_t expected = PARK_WAITING;
    if (!atomic_compare_exchange_strong(&p->state, &expected, PARK_ASLEEP)) return cudaSuccess;
    while (atomic_load_explicit(&p->state, memory_order_acquire) < PARK_GO)
        syscall(SYS_futex, &p->state, FUTEX_WAIT_PRIVATE, PARK_ASLEEP, NULL, NULL, 0);
    return cudaSuccess;
}

static void spend(runtime *rt, uint64_t until_ns) {
    (void)rt;
    while (kvp_now_ns() < until_ns) continue;
}

static void start(runtime *rt) {
    threads *t = calloc(1, sizeof *t);
    if (!t) abort();
    rt->threads = t;
    pthread_cond_init(&t->work, NULL);
    for (uint8_t k = KVHOST_H2D; k <= KVHOST_D2H; k++) {
        t->copiers[k] = (copier){.rt = rt, .class = k, .oversleep_ns = 20000};
        spawn(&t->copiers[k].thread, copy_thread, &t->copiers[k]);
    }
    spawn(&t->compute, compute_thread, rt);
}

static void stop(runtime *rt) {
    threads *t = rt->threads;
    kvh_lock(rt);
    rt->stop = true;
    kvh_look_all(rt);
    kvh_unlock(rt);
    pthread_join(t->copiers[KVHOST_H2D].thread, NULL);
    pthread_join(t->copiers[KVHOST_D2H].thread, NULL);
    pthread_join(t->compute, NULL);
    for (uint32_t i = 0; i < t->worker_count; i++) pthread_join(t->workers[i], NULL);
    pthread_cond_destroy(&t->work);
}

const timekeeper kvh_realtime = {start, stop, look, wait_for, spend};
