#include "explore.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    MOST = 16,
    STEP_NS = 100,
    STEPS_MOST = 4000000,
    NAP_NS = 1000000,
    LOCKS_MOST = 64,
    AWAKE_MOST = 200000 /* yields of a thread that has not slept between */
}; /* a nap may end whoever goes on */
enum state { GONE, GOES, LOCKS, SLEEPS, JOINS };

struct thread {
    enum state state;
    pthread_t handle;
    pthread_cond_t turn;
    const void *on; /* a mutex or a word */
    uint64_t until;
    int ran_out, awake;
    void *(*begin)(void *);
    void *arg;
};

static struct thread threads[MOST];
static int count, current;
static uint64_t now_ns, dice, seed_now, steps, digest;
static uint32_t one_of; /* yields at which another goes on: some windows need a short turn, others a long one */
static void (*when_idle)(void);
static pthread_mutex_t token = PTHREAD_MUTEX_INITIALIZER;
static __thread int self = -1;

uint64_t explore_now(void) { return now_ns; }

uint64_t explore_digest(void) { return digest; }

uint32_t explore_below(uint32_t bound) { /* xorshift64* */
    dice ^= dice >> 12, dice ^= dice << 25, dice ^= dice >> 27;
    return (uint32_t)((dice * UINT64_C(2685821657736338717)) >> 33) % bound;
}

void explore_fail(const char *what) {
    printf("seed %llu: %s\n", (unsigned long long)seed_now, what);
    fflush(stdout);
    _Exit(1);
}

static int any(void) {
    int found = -1, seen = 0;
    for (int i = 0; i < count; i++)
        if (threads[i].state == GOES && !explore_below((uint32_t)++seen)) found = i;
    return found;
}

/* Time passes to the end of the next sleep, which is at most so far away. */
static int pass_time(uint64_t most_ns, int idle) {
    struct thread *next = NULL;
    for (int i = 0; i < count; i++) {
        struct thread *t = &threads[i];
        if (t->state == SLEEPS && t->until != UINT64_MAX && (!next || t->until < next->until)) next = t;
    }
    if (!next || (next->until > now_ns && next->until - now_ns > most_ns)) return 0;
    if (next->until > now_ns) now_ns = next->until;
    next->state = GOES;
    next->ran_out = idle;
    return 1;
}

/* Whoever goes on next; this thread, until it is its turn again, does not. With `token`. */
static void others(int gone) {
    int next = any(), me = self;
    if (++steps > STEPS_MOST) explore_fail("no end");
    while (next < 0) {
        when_idle();
        if (!pass_time(UINT64_MAX, 1)) explore_fail("nobody can go on");
        next = any();
    }
    current = next;
    digest = (digest ^ (uint64_t)next ^ now_ns) * UINT64_C(0x100000001b3);
    if (next == me) return;
    pthread_cond_signal(&threads[next].turn);
    while (!gone && current != me) pthread_cond_wait(&threads[me].turn, &token);
}

void kvp_explore_yield(void) {
    if (self < 0) return;
    now_ns += STEP_NS;
    if (++threads[self].awake > AWAKE_MOST) explore_fail("a thread goes round and round, and does not sleep");
    if (count > 1 && explore_below(16) == 0) pass_time(NAP_NS, 0);
    if (count > 1 && explore_below(one_of) == 0) others(0);
}

static void wait_as(enum state state, const void *on, uint64_t until) {
    struct thread *t = &threads[self];
    t->state = state, t->on = on, t->until = until, t->ran_out = t->awake = 0;
    others(0);
}

static void let_go(enum state state, const void *on) {
    for (int i = 0; i < count; i++)
        if (threads[i].state == state && threads[i].on == on) threads[i].state = GOES;
}

static uint32_t last_memory;
static int had_none;

void explore_no_memory(uint32_t number) { last_memory = number, had_none = 0; }

static int exact;
void explore_exact(int wanted) { exact = wanted; }
int kvp_explore_exact(void) { return exact; }
int explore_self(void) { return self < 0 ? 0 : self; }

int explore_had_no_memory(void) { return had_none; }

int kvp_explore_no_memory(void) {
    int none = last_memory && !--last_memory;
    had_none |= none;
    return none;
}

/* Who holds which: what a lock guards is nobody else's, also where no interleaving happens to show it. */
static struct held {
    const pthread_mutex_t *mutex;
    int by;
} held[LOCKS_MOST];

static void hold(const pthread_mutex_t *mutex) {
    for (int i = 0; i < LOCKS_MOST; i++)
        if (!held[i].mutex) {
            held[i] = (struct held){mutex, self};
            return;
        }
    explore_fail("too many locks");
}

static void let_hold_of(const pthread_mutex_t *mutex) {
    for (int i = 0; i < LOCKS_MOST; i++)
        if (held[i].mutex == mutex && held[i].by == self) {
            held[i].mutex = NULL;
            return;
        }
    explore_fail("a lock is given back by one who does not hold it");
}

int explore_holds(const pthread_mutex_t *mutex) {
    int found = 0;
    for (int i = 0; i < LOCKS_MOST; i++)
        found |= self >= 0 && held[i].mutex && held[i].by == self && (!mutex || held[i].mutex == mutex);
    return found;
}

int kvp_explore_lock(pthread_mutex_t *mutex) {
    if (self < 0) return pthread_mutex_lock(mutex);
    kvp_explore_yield();
    while (pthread_mutex_trylock(mutex)) wait_as(LOCKS, mutex, 0);
    hold(mutex);
    return 0;
}

int kvp_explore_trylock(pthread_mutex_t *mutex) {
    int code = pthread_mutex_trylock(mutex);
    if (self >= 0 && !code) hold(mutex);
    return code;
}

int kvp_explore_unlock(pthread_mutex_t *mutex) {
    if (self >= 0) let_hold_of(mutex);
    int code = pthread_mutex_unlock(mutex);
    if (self < 0) return code;
    let_go(LOCKS, mutex);
    kvp_explore_yield();
    return code;
}

int kvp_explore_sleep(atomic_uint *word, uint32_t value, uint64_t ns) {
    kvp_explore_yield();
    if (atomic_load(word) != value) return 0;
    wait_as(SLEEPS, word, ns < UINT64_MAX - now_ns ? now_ns + ns : UINT64_MAX);
    return threads[self].ran_out;
}

void kvp_explore_wake(atomic_uint *word) {
    let_go(SLEEPS, word);
    kvp_explore_yield();
}

int explore_sleeps_for_good(const atomic_uint *word) {
    for (int i = 0; i < count; i++)
        if (threads[i].state == SLEEPS && threads[i].on == word && threads[i].until == UINT64_MAX) return 1;
    return 0;
}

static void *run(void *number) {
    self = (int)(intptr_t)number;
    struct thread *t = &threads[self];
    pthread_mutex_lock(&token);
    while (current != self) pthread_cond_wait(&t->turn, &token);
    void *result = t->begin(t->arg);
    if (explore_holds(NULL)) explore_fail("a thread ends with a lock");
    t->state = GONE;
    let_go(JOINS, t);
    others(1);
    pthread_mutex_unlock(&token);
    return result;
}

int kvp_explore_create(pthread_t *thread, void *(*begin)(void *), void *arg) {
    if (count == MOST) explore_fail("too many threads");
    struct thread *t = &threads[count];
    *t = (struct thread){.state = GOES, .begin = begin, .arg = arg};
    pthread_cond_init(&t->turn, NULL);
    int code = pthread_create(&t->handle, NULL, run, (void *)(intptr_t)count);
    *thread = t->handle;
    if (!code) count++;
    kvp_explore_yield();
    return code;
}

int kvp_explore_join(pthread_t thread) {
    for (int i = 0; i < count; i++) {
        struct thread *t = &threads[i];
        if (i == self || !pthread_equal(t->handle, thread)) continue;
        while (t->state != GONE) wait_as(JOINS, t, 0);
        pthread_mutex_unlock(&token); /* it has nothing more to do than to give it back */
        pthread_join(thread, NULL);
        pthread_mutex_lock(&token);
    }
    return 0;
}

void explore_begin(uint64_t seed, void (*idle)(void)) {
    memset(threads, 0, sizeof threads);
    memset(held, 0, sizeof held);
    seed_now = seed, dice = seed * UINT64_C(0x9e3779b97f4a7c15) + 1;
    now_ns = 1000000000, steps = 0, digest = 0, when_idle = idle;
    one_of = 2u << explore_below(7);
    count = 1, current = self = 0;
    threads[0] = (struct thread){.state = GOES, .handle = pthread_self()};
    pthread_cond_init(&threads[0].turn, NULL);
    pthread_mutex_lock(&token);
}

void explore_end(void) {
    self = -1, count = 0;
    pthread_mutex_unlock(&token);
}
