/* The submitter's thread, who sleeps and who is woken, and what a caller may ask. */
#define _GNU_SOURCE
#include "kvp_signals.h"
#include "submitter.h"

#include <errno.h>
#include <linux/futex.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define LOOK_AT_SIGNALS_NS 100000000 /* a waiter returns so often, so that Python sees a Ctrl-C */
#define NAP_NS 50000                 /* between two looks for jobs while they come */
#define NAPPING_NS 30000000          /* so long after the last one it takes naps: as long as a step of a model */
#define LINK_BYTES_PER_S 20000000000u
#define RELAXED_CAPTURE 2 /* cudaStreamCaptureModeRelaxed */

#ifdef KVP_EXPLORE
#define ENDED_FIRST 4 /* ids of ended jobs there is space for at first */
#define HANDING(s, more) atomic_fetch_add(&(s)->handing, (unsigned)(more))
#else
#define ENDED_FIRST 1024
#define HANDING(s, more) ((void)0)
#endif

/* While the word has that value, at most so long. 1: the time ran out, and nobody woke it; known while exploring. */
static int sleep_on(atomic_uint *word, uint32_t value, uint64_t ns) {
#ifdef KVP_EXPLORE
    return kvp_explore_sleep(word, value, ns);
#else
    struct timespec t = {(time_t)(ns / 1000000000u), (long)(ns % 1000000000u)};
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, ns == UINT64_MAX ? NULL : &t, NULL, 0);
    return 0;
#endif
}

static void wake_all(atomic_uint *word) {
#ifdef KVP_EXPLORE
    kvp_explore_wake(word);
#else
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, 0x7fffffff, NULL, NULL, 0);
#endif
}

static void wake_up(kvp_submitter *s) {
    if (!s->threaded) {
        s->config.actor_wake(s->actor);
        return;
    }
    atomic_fetch_add(&s->work, 1);
    if (atomic_load(&s->sleeping)) wake_all(&s->work);
}

/* A job came. A thread that naps is not woken, nor one that has enough to do till it looks again (`hungry`, NULL: not
 * asked): that would cost the caller more than all the rest of handing over (5 to 50 us). Of several callers one wakes
 * it. */
static void wake_sleeper(kvp_submitter *s, atomic_uint *hungry) {
    if (!s->threaded) {
        wake_up(s);
        return;
    }
    atomic_fetch_add(&s->work, 1); /* first: who goes to sleep looks at them in the other order */
    uint32_t asleep = ASLEEP;
    if (hungry && !atomic_load(hungry)) return;
    YIELD();
    if (atomic_compare_exchange_strong(&s->sleeping, &asleep, AWAKE)) wake_all(&s->work);
}

void kvp_changed(kvp_submitter *s) {
    YIELD();
    atomic_fetch_add(&s->changed, 1);
    YIELD();
    if (atomic_load(&s->waiters)) wake_all(&s->changed);
}

static void *thread_main(void *arg) {
    kvp_submitter *s = arg;
    prctl(PR_SET_NAME, "kvprobe-submit");
    prctl(PR_SET_TIMERSLACK, 1);
    if (s->config.copier.cuda.set_device && s->config.device >= 0) CALL(s, set_device, device_fn)(s->config.device);
    /* While any thread captures a graph in global mode, as torch does, a thread that asks for an event breaks it. */
    int mode = RELAXED_CAPTURE;
    if (s->config.copier.cuda.capture_mode) CALL(s, capture_mode, mode_fn)(&mode);
    kvp_renew_device_clock(s);
    while (atomic_load(&s->closing) != 3) {
        uint32_t seen = atomic_load(&s->work);
        uint64_t now = kvp_now_ns(), next = kvp_step(s, now);
        YIELD();
        for (int d = 0; d < 2; d++) atomic_store(&s->direction[d].hungry, kvp_hungry(s, d));
        now = kvp_now_ns();
        if (atomic_load(&s->pending)) s->busy_ns = now;
        if (now - s->busy_ns < NAPPING_NS && next > now + NAP_NS) next = now + NAP_NS;
        YIELD();
        atomic_store(&s->sleeping, next > now + NAP_NS ? ASLEEP : NAPPING);
        YIELD();
        if (atomic_load(&s->work) == seen && next > now) {
#ifdef KVP_EXPLORE
            kvp_must(s, atomic_load(&s->handing) || !atomic_load(&s->incoming) || atomic_load(&s->work) != seen,
                     "the thread goes to sleep, and transfers were handed over");
#endif
            sleep_on(&s->work, seen, next == UINT64_MAX ? UINT64_MAX : next - now);
        }
        atomic_store(&s->sleeping, AWAKE);
    }
    return NULL;
}

static void *copied(const void *from, size_t bytes) {
    void *to = malloc(bytes ? bytes : 1);
    if (!to) return NULL;
    if (bytes) memcpy(to, from, bytes);
    return to;
}

static void free_all(kvp_submitter *s) {
    for (int d = 0; d < 2; d++) {
        pthread_mutex_destroy(&s->direction[d].shared_lock);
        pthread_mutex_destroy(&s->named[d].lock);
        free(s->named[d].bits);
        free(s->direction[d].stamp);
        free(s->direction[d].held_up);
        free((void *)s->config.pooled[d]);
    }
    pthread_mutex_destroy(&s->lock);
    free((void *)s->config.gpu.bases);
    free((void *)s->config.cpu.bases);
    free((void *)s->config.gpu.bound);
    free((void *)s->config.cpu.bound);
    kvp_spares_free(s);
    kvp_events_free(s);
    free(s->ended);
    free(s);
}

kvp_submitter *kvp_submitter_open(const kvp_submitter_config *config, int *why) {
    *why = 0;
    kvp_submitter *s = calloc(1, sizeof *s);
    if (!s) return NULL;
    kvp_submitter_config *c = &s->config;
    *c = *config;
    s->forks = kvp_forks();
    atomic_store(&s->users, 1);
    pthread_mutexattr_t adaptive; /* it is held for some ten ns: whoever finds it taken had better not go to sleep */
    pthread_mutexattr_init(&adaptive);
    pthread_mutexattr_settype(&adaptive, PTHREAD_MUTEX_ADAPTIVE_NP);
    pthread_mutex_init(&s->lock, &adaptive);
    pthread_mutexattr_destroy(&adaptive);
    kvp_cells_open(s);
    if (!c->every) c->every = c->depth / 8 ? c->depth / 8 : 1;
    c->gpu.bases = copied(config->gpu.bases, c->layers * sizeof(uint64_t));
    c->cpu.bases = copied(config->cpu.bases, c->layers * sizeof(uint64_t));
    c->gpu.bound = copied(config->gpu.bound, c->gpu.bounds * sizeof(uint64_t));
    c->cpu.bound = copied(config->cpu.bound, c->cpu.bounds * sizeof(uint64_t));
    s->ended_room = ENDED_FIRST;
    s->ended = malloc(s->ended_room * sizeof *s->ended);
    bool whole = c->gpu.bases && c->cpu.bases && c->gpu.bound && c->cpu.bound && s->ended;
    for (int d = 0; d < 2; d++) {
        struct direction *dir = &s->direction[d];
        pthread_mutex_init(&dir->shared_lock, NULL);
        dir->rate = c->link_bytes_per_s[d] ? c->link_bytes_per_s[d] : LINK_BYTES_PER_S;
        dir->pause_ns = 15000;
        for (int i = 0; i < KVP_CHOOSE_ROWS; i++) dir->factors[i] = 1;
        dir->held_up = calloc(c->streams, sizeof *dir->held_up);
        c->pooled[d] = copied(config->pooled[d], c->streams * sizeof(void *));
        const kvp_side *to = d == STORE ? &c->cpu : &c->gpu;
        uint64_t stamps = c->copy_bytes ? to->blocks * to->factor : 0;
        if (stamps) dir->stamp = calloc(stamps, sizeof *dir->stamp);
        struct named *named = &s->named[d];
        pthread_mutex_init(&named->lock, NULL);
        named->words = c->copy_bytes ? (to->blocks + 63) / 64 : 0;
        named->bits = calloc(named->words + 1, sizeof *named->bits);
        for (uint64_t i = 0; named->bits && i < named->words; i += 512) /* no caller meets a page fault here */
            *(volatile uint64_t *)&named->bits[i] = 0;
        whole = whole && c->pooled[d] && dir->held_up && named->bits && (!stamps || dir->stamp);
    }
    if (whole) *why = kvp_events_open(s);
    if (!whole || *why) {
        free_all(s);
        return NULL;
    }
    if (c->actor_add) {
        kvp_renew_device_clock(s);
        s->actor = c->actor_add(kvp_step_actor, s);
        return s;
    }
    kvp_spares_open(s);
    /* The server's signals are the server's: none of them is handled on this thread. */
    sigset_t before;
    kvp_block_signals(&before);
    s->threaded = 1;
    int code = pthread_create(&s->thread, NULL, thread_main, s);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (code) {
        kvp_events_close(s);
        free_all(s);
        return NULL;
    }
    return s;
}

static bool forked(const kvp_submitter *s) { return s->forks != kvp_forks(); }

void kvp_submitter_close(kvp_submitter *s, int drain) {
    if (forked(s) || atomic_load(&s->closing) == 3) return;
    if (!drain) atomic_store(&s->closing, 2);
    wake_up(s);
    while (atomic_load(&s->pending)) {
        int is = kvp_job_wait(s, NULL, UINT64_MAX);
        if (is == 1 || is == -2) break; /* -2: nothing can ever end them */
        kvp_must(s, is == -1, "closing was given up");
    }
    kvp_must(s, !s->threaded || !atomic_load(&s->pending), "closed before all had ended");
    atomic_store(&s->closing, 3);
    wake_up(s);
    if (s->threaded)
        pthread_join(s->thread, NULL);
    else
        s->config.actor_remove(s->actor);
    kvp_submitter_stop(s);
}

void kvp_submitter_abandon(kvp_submitter *s) {
    if (forked(s) || atomic_load(&s->closing) == 3) return;
    atomic_store(&s->closing, 3);
    s->actor = -1; /* that number may be another simulation's actor */
    wake_up(s);
    if (s->threaded) pthread_join(s->thread, NULL);
    kvp_lose(s, 0, KVP_FAULT_RESET);
    kvp_submitter_stop(s);
}

void kvp_submitter_stop(kvp_submitter *s) {
    atomic_store(&s->stopped, 1);
    kvp_changed(s);
}

int kvp_submitter_destroy_events(kvp_submitter *s) { return forked(s) ? 0 : kvp_events_close(s); }

void kvp_submitter_hold(kvp_submitter *s) { atomic_fetch_add(&s->users, 1); }

void kvp_submitter_free(kvp_submitter *s) {
    if (!forked(s) && atomic_fetch_sub(&s->users, 1) == 1) free_all(s);
}

/* ---- handing over ----------------------------------------------------------------------------------------------- */

int kvp_refusal(kvp_submitter *s) {
    if (forked(s)) return KVP_FORKED;
    return atomic_load(&s->broken) || atomic_load(&s->closing) ? KVP_BROKEN : 0;
}

static void begin(kvp_submitter *s, struct kvp_job *j) {
    atomic_fetch_add(&s->direction[j->direction].pending_bytes, j->status.bytes);
    atomic_fetch_add(&s->pending, 1);
}

static int shared_is_free(void *direction) {
    struct direction *dir = direction;
    if (pthread_mutex_trylock(&dir->shared_lock)) return 0;
    pthread_mutex_unlock(&dir->shared_lock);
    return 1;
}

/* On a virtual clock the submitter runs on this thread: whoever waits for its lock lets it go on. */
static void lock_shared(kvp_submitter *s, struct direction *dir) {
    if (s->threaded)
        pthread_mutex_lock(&dir->shared_lock);
    else
        while (pthread_mutex_trylock(&dir->shared_lock)) s->config.run_until(shared_is_free, dir, UINT64_MAX);
}

/* Jobs of one direction that follow one another, the newest at the head of their chain: one wake for all. */
static void hand_over(kvp_submitter *s, struct kvp_job *oldest, struct kvp_job *newest) {
    HANDING(s, 1);
    YIELD();
    oldest->next = atomic_load(&s->incoming);
    while (!atomic_compare_exchange_weak(&s->incoming, &oldest->next, newest)) continue;
    YIELD();
    wake_sleeper(s, &s->direction[newest->direction].hungry);
    HANDING(s, -1);
}

int kvp_job_push(kvp_submitter *s, kvp_job_status *job) {
    struct kvp_job *j = (struct kvp_job *)job;
    struct direction *dir = &s->direction[j->direction];
    if (j->handed) return 0;
    int no = kvp_refusal(s);
    if (no && !j->inlined) return no;
    j->handed = true;
    if (!j->inlined) {
        begin(s, j);
        atomic_fetch_add(&dir->pushed, 1);
    } else { /* the rest of a job that began on the shared stream; what it submitted there comes first */
        lock_shared(s, dir);
        struct kvp_job **at = &dir->inlined, *before = NULL;
        while (*at && *at != j) before = *at, at = &(*at)->next;
        bool ended = !*at; /* the device was lost meanwhile */
        if (!ended) {
            *at = j->next; /* the newest, as a rule */
            if (!j->next) dir->inlined_last = before;
        }
        pthread_mutex_unlock(&dir->shared_lock);
        if (ended) return 0;
        j->inlined = 0;
        j->begun = 0;
        atomic_fetch_add(&dir->pushed, 1);
        atomic_fetch_sub(&dir->inlined_jobs, 1);
    }
    hand_over(s, j, j);
    return 0;
}

int kvp_jobs_push(kvp_submitter *s, kvp_job_status **jobs, uint32_t count) {
    int no = kvp_refusal(s);
    if (no) return no;
    for (uint32_t i = 0; i < count; i++) {
        struct kvp_job *j = (struct kvp_job *)jobs[i];
        j->handed = true;
        j->next = i ? (struct kvp_job *)jobs[i - 1] : NULL;
        begin(s, j);
    }
    struct kvp_job *oldest = (struct kvp_job *)jobs[0];
    atomic_fetch_add(&s->direction[oldest->direction].pushed, count);
    hand_over(s, oldest, (struct kvp_job *)jobs[count - 1]);
    return 0;
}

void kvp_job_unused(kvp_submitter *s, kvp_job_status *job) {
    struct kvp_job *j = (struct kvp_job *)job;
    if (j->handed) return;
    j->handed = true;
    kvp_fence_drop(s, j);
    kvp_cells_unclaim(s, j);
    kvp_job_release(job);
}

int kvp_inline_free(kvp_submitter *s, int direction) {
    return !of_cells(s) && !atomic_load(&s->direction[direction == KVP_D2H ? STORE : LOAD].pushed);
}

static int some_event(void *submitter) {
    kvp_submitter *s = submitter;
    return kvp_events_left(s) || atomic_load(&s->broken);
}

/* Waits until an event is free. The queue is what a server's own thread would wait for. */
static void *event_wait(kvp_submitter *s, int d) {
    for (;;) {
        void *event = kvp_event_take(s);
        if (event || atomic_load(&s->broken)) return event;
        uint32_t seen = atomic_load(&s->changed);
        kvp_retire_shared(s, d);
        if (kvp_events_left(s)) continue;
        if (s->threaded)
            sleep_on(&s->changed, seen, 50000);
        else if (s->config.run_until(some_event, s, UINT64_MAX))
            return NULL;
    }
}

enum { CHUNK = 1024, EVENTS = 64 };

/* A caller adds at most EVENTS + 1 marks in one go, and a few callers may do so at once. */
#define SHARED_MARKS (MARKERS - 4 * (EVENTS + 1))

struct place {
    kvp_submitter *s;
    int d;
};

/* `shared_lock` is held. */
static bool has_space(const struct direction *dir) { return dir->shared.tail - dir->shared.head <= SHARED_MARKS; }

static int some_space(void *place) {
    const struct place *at = place;
    struct direction *dir = &at->s->direction[at->d];
    if (atomic_load(&at->s->broken)) return 1;
    if (pthread_mutex_trylock(&dir->shared_lock)) return 0;
    int some = has_space(dir);
    pthread_mutex_unlock(&dir->shared_lock);
    return some;
}

/* Waits until the shared line has space for a caller's marks: one whose event could not be recorded holds no event, so
 * events do not bound them. False: the device was lost. */
static bool space_wait(kvp_submitter *s, int d) {
    struct place at = {s, d};
    struct direction *dir = &s->direction[d];
    for (;;) {
        uint32_t seen = atomic_load(&s->changed);
        lock_shared(s, dir);
        bool some = has_space(dir);
        pthread_mutex_unlock(&dir->shared_lock);
        if (atomic_load(&s->broken)) return false;
        if (some) return true;
        kvp_retire_shared(s, d);
        if (some_space(&at)) continue;
        if (s->threaded)
            sleep_on(&s->changed, seen, 50000);
        else if (s->config.run_until(some_space, &at, UINT64_MAX))
            return false;
    }
}

static void add_shared_marker(struct direction *dir, struct kvp_job *j, void *event, void *start, void *stream,
                              uint32_t places, bool all, uint64_t idle_ns) {
    struct marker *m = &dir->shared.marker[dir->shared.tail % MARKERS];
    *m = (struct marker){.event = event,
                         .start = start,
                         .stream = stream,
                         .begun = j->sequence,
                         .sequence = all ? j->sequence : j->sequence - 1,
                         .places = places,
                         .idle = idle_ns != 0,
                         .ready_ns = idle_ns};
    dir->shared.tail++;
}

/* The job is over on the shared stream: all of it is submitted, or the rest never will be. */
static void leave_shared(kvp_submitter *s, struct direction *dir, struct kvp_job *j, void *event) {
    j->status.submitted_ns = kvp_now_ns();
    pthread_mutex_lock(&s->lock);
    j->end_event = event;
    __atomic_store_n(&j->status.state, KVP_IN_FLIGHT, __ATOMIC_RELEASE);
    pthread_mutex_unlock(&s->lock);
    (void)dir;
    kvp_changed(s);
}

/* What the caller's own thread submits to the shared stream in one call. */
struct shared_run {
    void *stream, *start; /* `start`: the event in front, where an idle stream waits for compute first */
    uint64_t begin_ns;
    bool idle;            /* the device begins with the first copy */
    void *events[EVENTS]; /* one behind every so many copies */
    uint32_t taken;       /* of them */
};

/* The shared stream waits for what the job comes after. Returns the error of that, which fails the job. */
static int await_compute(kvp_submitter *s, struct kvp_job *j, void *stream) {
    int code;
    while ((code = kvp_fence_record(s, j->after)) == NOT_READY) sched_yield();
    if (!code) code = CALL(s, stream_wait_event, stream_event_fn)(stream, j->after->event, 0);
    kvp_fence_drop(s, j);
    if (code) {
        kvp_clear_error(s);
        j->failed = code;
        j->status.error = code;
        j->status.fault = KVP_FAULT_WAIT;
    }
    return code;
}

/* A job takes its place on the shared stream, behind those that are there. Returns the error of its wait. */
static int enter_shared(kvp_submitter *s, struct direction *dir, struct kvp_job *j, struct shared_run *run) {
    int d = j->direction, code = 0;
    kvp_must(s, !atomic_load(&dir->pushed), "a transfer goes to the shared stream before others are submitted");
    j->inlined = 1;
    begin(s, j);
    atomic_fetch_add(&dir->inlined_jobs, 1);
    j->status.stream = (uint64_t)(uintptr_t)run->stream;
    lock_shared(s, dir);
    j->sequence = ++dir->shared_sequence;
    j->next = NULL;
    j->busy = 1;
    if (dir->inlined_last)
        dir->inlined_last->next = j;
    else
        dir->inlined = j;
    dir->inlined_last = j;
    bool empty = dir->shared.head == dir->shared.tail, waits = j->after != NULL;
    pthread_mutex_unlock(&dir->shared_lock);
    if (waits) code = await_compute(s, j, run->stream);
    run->idle = empty && !waits;
    if (!code && empty && waits && (run->start = event_wait(s, d)) &&
        CALL(s, event_record, event_stream_fn)(run->start, run->stream)) {
        kvp_clear_error(s);
        kvp_event_give(s, run->start);
        run->start = NULL;
    }
    if (s->config.ranges)
        j->range = kvp_nvtx_range_start(d == STORE, (uint32_t)j->status.id, j->status.stream, j->status.bytes);
    return code;
}

/* A job that has begun goes on. False: it has ended meanwhile, as the device was lost. */
static bool go_on_shared(kvp_submitter *s, struct direction *dir, struct kvp_job *j) {
    lock_shared(s, dir);
    bool ended = j->status.state >= KVP_DONE;
    if (!ended) j->busy = 1;
    pthread_mutex_unlock(&dir->shared_lock);
    return !ended;
}

/* Submits up to `max` of the job's copies, with events between them. Returns the error of the first that failed. */
static int submit_run(kvp_submitter *s, struct kvp_job *j, const kvp_submit_options *options, uint64_t max,
                      struct shared_run *run, kvp_submit_result *r) {
    kvp_copy copies[CHUNK];
    uint64_t dst[CHUNK], src[CHUNK], sizes[CHUNK], bytes = 0, asked = 0;
    struct cursor at = j->at;
    uint32_t most = max < CHUNK ? (uint32_t)max : CHUNK, n = 0;
    if (most) n = kvp_job_copies(j, &at, copies, most, UINT64_MAX, UINT64_MAX, false, &bytes, &asked);
    for (uint32_t i = 0; i < n; i++) dst[i] = copies[i].dst, src[i] = copies[i].src, sizes[i] = copies[i].bytes;
    uint32_t wanted = n / s->config.every;
    while (run->taken < wanted && run->taken < EVENTS && kvp_events_left(s) > 8 &&
           (run->events[run->taken] = kvp_event_take(s)))
        run->taken++;
    kvp_submit_options o = *options;
    o.stream = run->stream;
    o.event_record = CALL(s, event_record, cudaError_t(*)(cudaEvent_t, cudaStream_t));
    o.copy = (kvp_memcpy_async_fn)s->config.copier.cuda.memcpy_async;
    o.events = run->events;
    o.every = s->config.every;
    o.events_max = run->taken;
    int code = n ? kvp_submit(&o, n, dst, src, sizes, 0, r) : 0;
    /* the cursor goes on by what was taken */
    bytes = asked = 0;
    if (r->submitted)
        kvp_job_copies(j, &j->at, copies, (uint32_t)r->submitted, UINT64_MAX, UINT64_MAX, false, &bytes, &asked);
    j->status.submitted += asked;
    j->status.descriptors += r->submitted;
    j->status.calls += r->submitted;
    j->status.submit_ns += r->end_ns - r->start_ns;
    j->status.blocked += r->blocked;
    if (r->max_ns > j->status.longest_ns) j->status.longest_ns = r->max_ns;
    return code;
}

/* Makes known by which events what was submitted will be over; `all`: the job submits nothing more here. */
static void mark_run(kvp_submitter *s, struct direction *dir, struct kvp_job *j, struct shared_run *run,
                     const kvp_submit_result *r, bool all) {
    uint32_t every = s->config.every;
    uint64_t rest = r->submitted - r->events * every;
    bool cover = rest || all || (run->start && !r->events); /* whatever is outstanding is covered */
    void *last = cover ? event_wait(s, j->direction) : NULL;
    if (last && CALL(s, event_record, event_stream_fn)(last, run->stream)) {
        kvp_clear_error(s);
        kvp_event_give(s, last);
        last = NULL;
    }
    uint32_t marked = r->events;
    if (!space_wait(s, j->direction)) { /* a lost device ends all jobs without their marks */
        kvp_event_give(s, last);
        kvp_event_give(s, run->start);
        last = run->start = NULL, marked = 0, cover = false;
    }
    lock_shared(s, dir);
    if (all) leave_shared(s, dir, j, last);
    for (uint32_t i = 0; i < run->taken; i++) {
        if (i < marked) {
            uint32_t places = every + 1 + (run->start != NULL);
            add_shared_marker(dir, j, run->events[i], run->start, run->stream, places, false,
                              run->idle ? run->begin_ns : 0);
            run->idle = false;
            atomic_fetch_add(&dir->shared_places, places);
            run->start = NULL;
        } else {
            kvp_event_give(s, run->events[i]);
        }
    }
    if (cover) {
        uint32_t places = (uint32_t)rest + (last != NULL) + (run->start != NULL);
        atomic_fetch_add(&dir->shared_places, places);
        add_shared_marker(dir, j, last, run->start, run->stream, places, all, run->idle ? run->begin_ns : 0);
    }
    j->busy = 0;
    pthread_mutex_unlock(&dir->shared_lock);
}

int kvp_job_inline(kvp_submitter *s, kvp_job_status *job, const kvp_submit_options *options, uint64_t max,
                   kvp_submit_result *r, uint64_t *outstanding) {
    struct kvp_job *j = (struct kvp_job *)job;
    int d = j->direction, code = 0;
    struct direction *dir = &s->direction[d];
    struct shared_run run;
    run.stream = s->config.shared[d], run.start = NULL;
    run.begin_ns = kvp_now_ns(), run.idle = false, run.taken = 0;
    memset(r, 0, sizeof *r);
    *outstanding = 0;
    if (!j->inlined) {
        int no = kvp_refusal(s);
        if (no) return no;
        code = enter_shared(s, dir, j, &run);
    } else if (!go_on_shared(s, dir, j)) {
        return KVP_ALL_SUBMITTED;
    }
    __atomic_store_n(&job->state, KVP_SUBMITTING, __ATOMIC_RELAXED);
    kvp_retire_shared(s, d);
    *outstanding = atomic_load(&dir->shared_places);
    if (*outstanding < s->config.ceiling && max > s->config.ceiling - *outstanding)
        max = s->config.ceiling - *outstanding;
    job->methods |= 1u << KVP_LOOP;
    if (!code) code = submit_run(s, j, options, max, &run, r);
    if (code && !j->failed) {
        kvp_clear_error(s);
        j->failed = code;
        job->error = code;
        job->fault = KVP_FAULT_COPY;
    }
    bool all = kvp_job_all(j, &j->at) || j->failed;
    mark_run(s, dir, j, &run, r, all);
    wake_sleeper(s, NULL);
    return code ? KVP_COPY_FAILED : all ? KVP_ALL_SUBMITTED : KVP_MORE_IS_LEFT;
}

/* ---- waiting ------------------------------------------------------------------------------------------------------
 */

struct awaited {
    kvp_submitter *s;
    kvp_job_status *job;
    int submitted; /* in flight is enough */
};

static int over(void *arg) {
    const struct awaited *a = arg;
    if (!a->job) return !atomic_load(&a->s->pending);
    uint32_t state = __atomic_load_n(&a->job->state, __ATOMIC_ACQUIRE);
    return state >= (a->submitted ? KVP_IN_FLIGHT : KVP_DONE);
}

static enum kvp_wait_end wait_for(struct awaited *a, uint64_t timeout_ns) {
    kvp_submitter *s = a->s;
    if (!s->threaded) {
        uint64_t now = kvp_now_ns(), until = timeout_ns < UINT64_MAX - now ? now + timeout_ns : UINT64_MAX;
        if (over(a) || s->config.run_until(over, a, until)) return over(a) ? KVP_HAS_ENDED : KVP_WOULD_NEVER_END;
        return over(a) ? KVP_HAS_ENDED : KVP_TIME_RAN_OUT;
    }
    uint64_t begin = kvp_now_ns();
    enum kvp_wait_end result = KVP_LOOK_AT_SIGNALS;
    int late = 0;
    atomic_fetch_add(&s->waiters, 1);
    kvp_must(s, (int)atomic_load(&s->waiters) > 0, "somebody waits who is not counted");
    for (;;) {
        uint32_t seen = atomic_load(&s->changed);
        YIELD();
        if (over(a)) {
            kvp_must(s, !late, "a waiter was not woken");
            result = KVP_HAS_ENDED;
            break;
        }
        uint64_t passed = kvp_now_ns() - begin;
        if (passed >= timeout_ns) {
            result = KVP_TIME_RAN_OUT;
            break;
        }
        if (passed >= LOOK_AT_SIGNALS_NS) break;
        uint64_t left = timeout_ns - passed;
        late = sleep_on(&s->changed, seen, left < LOOK_AT_SIGNALS_NS ? left : LOOK_AT_SIGNALS_NS);
    }
    atomic_fetch_sub(&s->waiters, 1);
    return result;
}

enum kvp_wait_end kvp_job_wait(kvp_submitter *s, kvp_job_status *job, uint64_t timeout_ns) {
    struct awaited a = {s, job, 0};
    return wait_for(&a, timeout_ns);
}

int kvp_job_fence(kvp_submitter *s, kvp_job_status *job, void *stream) {
    struct kvp_job *j = (struct kvp_job *)job;
    if (forked(s)) return KVP_FORKED;
    /* An event that is still to be recorded on a compute stream must stand there before anything waits for this job. */
    pthread_mutex_lock(&s->lock);
    struct fence *f = j->after;
    if (f && f->state != FENCE_OPEN) f = NULL;
    if (f) f->users++;
    pthread_mutex_unlock(&s->lock);
    YIELD();
    if (f) {
        kvp_fence_record(s, f);
        struct kvp_job borrowed = {.after = f};
        kvp_fence_drop(s, &borrowed);
    }
    for (;;) {
        pthread_mutex_lock(&s->lock);
        uint32_t state = __atomic_load_n(&job->state, __ATOMIC_ACQUIRE);
        void *event = j->end_event;
        bool ask = state == KVP_IN_FLIGHT && event;
        if (ask) s->pins++;
        if (ask) kvp_event_pin(s, event);
        pthread_mutex_unlock(&s->lock);
        if (state >= KVP_DONE) return 0;
        if (ask) {
            int code = CALL(s, stream_wait_event, stream_event_fn)(stream, event, 0);
            if (code) kvp_clear_error(s);
            pthread_mutex_lock(&s->lock);
            s->pins--;
            kvp_event_unpin(s, event);
            pthread_mutex_unlock(&s->lock);
            return code;
        }
        struct awaited a = {s, job, state != KVP_IN_FLIGHT};
        if (state != KVP_IN_FLIGHT) {
            atomic_store(&j->hurry, 1);
            YIELD();
            atomic_store(&s->hurrying, 1);
            wake_up(s);
        }
        enum kvp_wait_end is = wait_for(&a, UINT64_MAX);
        if (is == KVP_LOOK_AT_SIGNALS) return KVP_SIGNALS;
        if (is == KVP_WOULD_NEVER_END) return KVP_STUCK;
    }
}

int kvp_wait_ended(kvp_submitter *s) {
    int result = 0, late = 0;
    atomic_fetch_add(&s->waiters, 1);
    uint32_t seen = atomic_load(&s->changed);
    pthread_mutex_lock(&s->lock);
    bool some = s->ended_count > 0;
    pthread_mutex_unlock(&s->lock);
    if (!some && !atomic_load(&s->stopped) && atomic_load(&s->closing) != 3)
        late = sleep_on(&s->changed, seen, LOOK_AT_SIGNALS_NS);
    kvp_must(s, !late || !s->ended_count, "who listens was not woken");
    if (atomic_load(&s->stopped) || atomic_load(&s->closing) == 3) result = -1;
    if (some) result = 1;
    atomic_fetch_sub(&s->waiters, 1);
    return result;
}

void kvp_submitter_read(kvp_submitter *s, kvp_submitter_stats *out) {
    memset(out, 0, sizeof *out);
    for (int d = 0; d < 2; d++) {
        struct direction *dir = &s->direction[d];
        out->pending_bytes[d] = atomic_load(&dir->pending_bytes);
        out->in_flight_bytes[d] = atomic_load(&dir->bytes);
        out->in_flight_places[d] = atomic_load(&dir->places);
        out->shared_places[d] = atomic_load(&dir->shared_places);
        out->listed[d] = dir->listed;
        out->stream[d] = (uint64_t)(uintptr_t)atomic_load(&dir->stream);
        out->rate[d] = atomic_load(&dir->rate);
        out->cta_bytes[d] = atomic_load(&s->cta_bytes[d]);
        for (int m = 0; m < KVP_METHODS; m++) {
            out->launches[d][m] = atomic_load(&s->launches[d][m]);
            out->bytes[d][m] = atomic_load(&s->moved[d][m]);
        }
    }
    pthread_mutex_lock(&s->lock);
    out->pending = atomic_load(&s->pending);
    out->events_free = s->events_free + s->limbo_count;
    out->events = s->events_made;
    out->fences_used = s->fences_used;
    out->fences = s->fence_count;
    pthread_mutex_unlock(&s->lock);
    out->longest_call_ns = s->longest_ns;
    out->steps = s->steps;
    out->broken = atomic_load(&s->broken);
    out->fault = atomic_load(&s->fault);
    out->methods_off = s->methods_off;
    out->method_error = s->method_error;
    out->stuck_job = s->stuck_job;
    out->wrong = s->wrong;
    out->coding = s->coding;
    out->cell_share = s->cell_share;
    out->refused = s->refused;
}
