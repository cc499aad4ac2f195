/* The submitter's thread and its callers, interleaved at every lock, sleep and declared yield: explored_submitter FIRST
 * COUNT [trace] plays these seeds, and says which one broke what; with `trace`, what each came to. The device is a list
 * of operations a stream, of which some end at each question; what runs on it looks at the bytes, so that an order that
 * was lost is seen. */
#include "explore.h"
#include "kvp_submitter.h"
#include "submitter.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    CALLERS = 3,
    STREAMS = 2,
    BLOCK = 64,
    HALF = BLOCK / 2,
    EACH = 4,
    BLOCKS = CALLERS * EACH,
    REQUESTS = 10,
    OPS = 4096,
    EVENTS = 2048
};
#define MUST(what) ((what) ? (void)0 : explore_fail(#what))

/* ---- the device ------------------------------------------------------------------------------------------------- */

enum kind { COPY, RECORD, WAIT, FILL, LOOK };
struct op {
    enum kind kind;
    unsigned char *dst;
    const unsigned char *src;
    size_t bytes;
    int stream, value;
    uint64_t until; /* a wait: so many operations of `stream` have ended; a fill: not before that time */
};
struct stream {
    struct op op[OPS];
    uint64_t head, tail;
};
struct event {
    int stream, destroyed;
    uint64_t at; /* operations of the stream up to it */
};

static struct stream streams[2 * STREAMS + 2 + CALLERS];
static struct event events[EVENTS];
static int events_made;
static unsigned char gpu[BLOCKS * BLOCK], cpu[BLOCKS * BLOCK];

static void *handle_of(int stream) { return (void *)(intptr_t)(stream + 1); }
static int number_of(const void *handle) { return (int)(intptr_t)handle - 1; }

static struct op *add(int stream, struct op op) {
    struct stream *s = &streams[stream];
    MUST(s->tail - s->head < OPS);
    s->op[s->tail % OPS] = op;
    return &s->op[s->tail++ % OPS];
}

static int ends_one(int number) {
    struct stream *s = &streams[number];
    if (s->head == s->tail) return 0;
    const struct op *op = &s->op[s->head % OPS];
    if (op->kind == WAIT && streams[op->stream].head < op->until) return 0;
    if (op->kind == FILL && explore_now() < op->until) return 0;
    if (op->kind == COPY) memcpy(op->dst, op->src, op->bytes);
    if (op->kind == FILL) memset(op->dst, op->value, op->bytes);
    if (op->kind == LOOK)
        for (size_t i = 0; i < op->bytes; i++) MUST(op->dst[i] == (unsigned char)op->value);
    s->head++;
    return 1;
}

static void device_goes_on(uint32_t most) {
    uint32_t all = sizeof streams / sizeof *streams;
    for (uint32_t i = explore_below(most + 1); i; i--) ends_one((int)explore_below(all));
}

static kvp_submitter *submitter;

/* In some seeds one call fails, at a moment of its own; in some the device is lost then. */
enum { ALWAYS_RECORDS = 100 }; /* no event can be recorded */
enum call { NO_CALL, MEMORY, COPIES, RECORDS, WAITS, QUERIES, LOST, CALLS };
enum { FAILS_WITH = 719 };
static enum call failing;
static uint32_t fails_at;
static int has_failed;

static int last_error[16]; /* by thread: what cudaGetLastError would say */

static int fails(enum call call);
static int fails_now(enum call call) {
    int code = fails(call);
    if (code) last_error[explore_self()] = FAILS_WITH;
    return code;
}

static int fails(enum call call) {
    if ((int)failing == ALWAYS_RECORDS) return call == RECORDS;
    if (failing == LOST && has_failed && (call == QUERIES || call == COPIES)) return 1;
    if (failing != call && !(failing == LOST && call == COPIES)) return 0;
    if (has_failed || --fails_at) return 0;
    has_failed = 1;
    return 1;
}

/* A call of the runtime may take as long as a forward: no lock that callers need is held over one. */
static void call_of_the_runtime(void) { MUST(!submitter || !explore_holds(&submitter->lock)); }

static int event_create(void **event, unsigned flags) {
    call_of_the_runtime();
    (void)flags;
    MUST(events_made < EVENTS);
    events[events_made] = (struct event){.stream = -1};
    *event = &events[events_made++];
    return 0;
}
static int event_destroy(void *event) {
    call_of_the_runtime();
    struct event *e = event;
    MUST(e && !e->destroyed);
    e->destroyed = 1;
    return 0;
}
static int event_record(void *event, void *stream) {
    call_of_the_runtime();
    kvp_explore_yield();
    if (fails_now(RECORDS)) return FAILS_WITH;
    struct event *e = event;
    add(number_of(stream), (struct op){.kind = RECORD});
    MUST(!e->destroyed);
    *e = (struct event){.stream = number_of(stream), .at = streams[number_of(stream)].tail};
    return 0;
}
static int event_query(void *event) {
    call_of_the_runtime();
    kvp_explore_yield();
    device_goes_on(2);
    if (fails_now(QUERIES)) return FAILS_WITH;
    const struct event *e = event;
    return e->stream >= 0 && streams[e->stream].head < e->at ? cudaErrorNotReady : 0;
}
static int event_elapsed(float *ms, void *from, void *to) {
    (void)from, (void)to;
    *ms = 0;
    return 1; /* no times are known */
}
static int stream_wait_event(void *stream, void *event, unsigned flags) {
    call_of_the_runtime();
    for (int i = 0; i < 4; i++) kvp_explore_yield(), device_goes_on(2); /* whoever waits may be held up here for long */
    if (fails_now(WAITS)) return FAILS_WITH;
    const struct event *e = event;
    if (e->stream >= 0) add(number_of(stream), (struct op){.kind = WAIT, .stream = e->stream, .until = e->at});
    return (int)flags;
}
static int stream_query(void *stream) {
    call_of_the_runtime();
    const struct stream *s = &streams[number_of(stream)];
    if (has_failed && failing == LOST) return last_error[explore_self()] = FAILS_WITH;
    return s->head == s->tail ? 0 : cudaErrorNotReady;
}
static int copy(void *dst, const void *src, size_t bytes, int kind, cudaStream_t stream) {
    call_of_the_runtime();
    kvp_explore_yield();
    (void)kind;
    if (fails_now(COPIES)) return FAILS_WITH;
    add(number_of(stream), (struct op){.kind = COPY, .dst = dst, .src = src, .bytes = bytes});
    return 0;
}
static int get_last_error(void) {
    int code = last_error[explore_self()];
    last_error[explore_self()] = 0;
    return code;
}

/* ---- the callers ------------------------------------------------------------------------------------------------ */

static int failed_jobs;
static uint64_t ids, told[2 * CALLERS * REQUESTS + 16];
static pthread_mutex_t one_inline[2] = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_MUTEX_INITIALIZER};

/* Nobody can go on: then nobody may have been forgotten. */
static void idle(void) {
    device_goes_on(4);
    if (!submitter || !submitter->threaded) return;
    if (explore_sleeps_for_good(&submitter->work)) {
        MUST(!atomic_load(&submitter->incoming) /* handed over, and nobody looks */);
        MUST(!atomic_load(&submitter->hurrying) || submitter->broken /* in a hurry, and nobody looks */);
        MUST(!submitter->direction[0].flying && !submitter->direction[1].flying /* in flight, and nobody looks */);
    }
    if (submitter->wrong) explore_fail(submitter->wrong);
}

/* 0, or a refusal. */
static int hand_over(kvp_job_status *job, int direction) {
    int no = 0;
    pthread_mutex_t *lock = &one_inline[direction == KVP_H2D];
    kvp_explore_lock(lock);
    if (explore_below(3) == 0 && kvp_inline_free(submitter, direction)) {
        kvp_submit_options options = {.kind = direction == KVP_H2D ? 1 : 2,
                                      .direction = (uint8_t)direction,
                                      .detail = KVP_OFF,
                                      .blocked_ns = UINT64_MAX};
        kvp_submit_result result;
        uint64_t outstanding;
        int code, again = (int)explore_below(2);
        do code = kvp_job_inline(submitter, job, &options, 1 + explore_below(3), &result, &outstanding);
        while (code == KVP_MORE_IS_LEFT && again);
        MUST(code == KVP_MORE_IS_LEFT || code == KVP_ALL_SUBMITTED || has_failed);
        if (code == KVP_MORE_IS_LEFT) MUST(!(no = kvp_job_push(submitter, job)) || has_failed);
        if (code == KVP_BROKEN) no = code;
    } else {
        MUST(!(no = kvp_job_push(submitter, job)) || has_failed);
    }
    kvp_explore_unlock(lock);
    return no;
}

static void pause_for(uint64_t ns) {
    atomic_uint nothing = 0;
    kvp_explore_sleep(&nothing, 0, ns);
}

/* What the status of a job that has ended says of it. */
static void check_ended(const kvp_job_status *job) {
    MUST(job->requested_ns && job->requested_ns <= job->built_ns);
    MUST(job->built_ns <= job->submitted_ns || (!job->submitted_ns && job->state == KVP_FAILED));
    MUST(job->noticed_ns && job->built_ns <= job->noticed_ns);
    MUST((job->state == KVP_FAILED) == (job->fault != KVP_FAULT_NONE));
    MUST(job->submitted <= job->copies);
    MUST(job->submit_ns <= job->noticed_ns - job->built_ns);
    MUST(failing != WAITS || job->fault != KVP_FAULT_COPY);
    failed_jobs += job->state == KVP_FAILED;
    if (job->state != KVP_DONE) return;
    MUST(!job->error && job->submitted == job->copies && job->submitted_ns <= job->noticed_ns);
    MUST(job->stream && job->methods == 1u << KVP_LOOP && job->calls && job->longest_ns <= job->submit_ns);
    MUST(job->descriptors && job->tid == kvp_thread_id());
}

/* A stream goes on behind the job; where something failed it may be in vain. */
static void fence(kvp_job_status *job, void *stream) {
    int is;
    while ((is = kvp_job_fence(submitter, job, stream)) == KVP_SIGNALS) continue;
    MUST(!is || has_failed);
}

static void wait_for_end(kvp_job_status *job) {
    int is = 0;
    if (explore_below(4) == 0) is = kvp_job_wait(submitter, job, 500);
    while (is != KVP_HAS_ENDED && (is = kvp_job_wait(submitter, job, UINT64_MAX)) == KVP_LOOK_AT_SIGNALS) continue;
    MUST(is == 1 && (job->state == KVP_DONE || (job->state == KVP_FAILED && has_failed)));
    check_ended(job);
}

static kvp_job_status *request(const int64_t *gpu_ids, const int64_t *cpu_ids, uint32_t count, void *after, int store,
                               kvp_job_refused *refused) {
    kvp_request asked = {.submitter = submitter,
                         .refused = refused,
                         .after = after,
                         .id = __atomic_fetch_add(&ids, 1, __ATOMIC_RELAXED),
                         .copies = count,
                         .gpu_count = count,
                         .cpu_count = count,
                         .requested_ns = kvp_now_ns(),
                         .what = KVP_REQUEST_AFTER | (store ? KVP_REQUEST_STORE : 0)};
    refused->made = asked.id;
    return kvp_job_request(&asked, gpu_ids, cpu_ids);
}

/* Two jobs of the caller's blocks by their addresses: two blocks in pieces of unlike sizes, and two in halves from
 * bases of their own, which only a bound behind the first keeps from being merged. Returns 0, or a refusal. */
static int request_addresses(int64_t first, void *after, int store, kvp_job_status **made) {
    uint64_t to = (uintptr_t)((store ? cpu : gpu) + first * BLOCK),
             of = (uintptr_t)((store ? gpu : cpu) + first * BLOCK);
    uint64_t at[] = {24, 0, BLOCK, BLOCK + 8}, sizes[] = {BLOCK - 24, 24, 8, BLOCK - 8}, none[] = {0};
    kvp_offsets lists[] = {{.count = 4, .dst = at, .src = at, .sizes = sizes},
                           {.count = 1, .dst = none, .src = none, .size = HALF}};
    kvp_bases bases[5] = {{to, of, 0}};
    for (int i = 0; i < 4; i++) bases[1 + i] = (kvp_bases){to + (4 + i) * HALF, of + (4 + i) * HALF, 1};
    uint64_t ends[] = {1, 5}, bound[] = {0, (explore_below(2) ? to : of) + 5 * HALF, UINT64_MAX - 1};
    if (bound[1] == 0) return 0;
    uint32_t bounds = 3 * explore_below(2);
    kvp_addresses copies = {
        .offsets = lists, .bases = bases, .ends = ends, .bound = bound, .lists = 2, .jobs = 2, .bounds = bounds};
    uint64_t id = __atomic_fetch_add(&ids, 2, __ATOMIC_RELAXED);
    int direction = store ? KVP_D2H : KVP_H2D;
    int no = kvp_job_request_addresses(submitter, direction, id, &copies, after, 1, kvp_now_ns(), made);
    memset(at, 0xff, sizeof at), memset(sizes, 0xff, sizeof sizes), memset(bases, 0xff, sizeof bases);
    memset(bound, 0xff, sizeof bound), memset(ends, 0xff, sizeof ends), memset(lists, 0xff, sizeof lists);
    has_failed |= explore_had_no_memory();
    if (no) {
        MUST(has_failed && (failing != MEMORY || no == KVP_NO_MEMORY || no == cudaErrorMemoryAllocation));
        told[id] = told[id + 1] = 1; /* was never asked for */
        return no;
    }
    wait_for_end(made[1]);
    wait_for_end(made[0]);
    MUST(made[0]->id == id && made[1]->id == id + 1);
    MUST(made[0]->copies == 4 && made[1]->copies == 4);
    MUST(made[0]->bytes == 2 * BLOCK && made[1]->bytes == 2 * BLOCK);
    if (made[1]->state == KVP_DONE) MUST(made[1]->descriptors == 1 + (bounds != 0));
    if (made[0]->state == KVP_DONE) MUST(made[0]->descriptors == 3);
    return 0;
}

static void refused_huge_request(void) { /* more than is kept for others */
    enum { HUGE = 1100000 };
    int64_t *same = calloc(HUGE, sizeof *same);
    kvp_job_refused why;
    MUST(same && !request(same, same, HUGE, NULL, 0, &why) && why.why == KVP_TWICE);
    ids--;
    free(same);
}

static void *caller(void *number) {
    int64_t first = EACH * (int64_t)(intptr_t)number, blocks[EACH];
    int compute = 2 * STREAMS + 2 + (int)(intptr_t)number;
    void *stream = handle_of(compute);
    for (int r = 0; r < REQUESTS; r++) {
        int store = r % 2, value = 1 + (int)explore_below(200);
        unsigned char *from = (store ? gpu : cpu) + first * BLOCK, *to = (store ? cpu : gpu) + first * BLOCK;
        for (int i = 0; i < EACH; i++) blocks[i] = first + (i * 3) % EACH;
        add(compute, (struct op){.kind = FILL, .dst = from, .bytes = EACH * BLOCK, .value = value});
        if (explore_below(4) == 0) {
            kvp_job_status *parts[2];
            if (request_addresses(first, stream, store, parts)) continue;
            for (int i = 0; i < EACH * BLOCK; i++) MUST(has_failed || to[i] == (unsigned char)value);
            kvp_job_release(parts[0]);
            kvp_job_release(parts[1]);
            continue;
        }
        kvp_job_refused refused;
        kvp_job_status *job = request(blocks, blocks, EACH, stream, store, &refused);
        has_failed |= explore_had_no_memory();
        if (!job) {
            MUST(has_failed && (refused.why == (failing == MEMORY ? KVP_NO_MEMORY : FAILS_WITH) ||
                                refused.why == KVP_BROKEN || refused.why == cudaErrorMemoryAllocation));
            told[refused.made] = 1; /* nobody will be told of it */
            continue;
        }
        MUST(job->copies == EACH && job->bytes == EACH * BLOCK);
        if (explore_below(16) == 0) { /* not handed over after all; said again, nothing happens */
            told[job->id] = 1;
            kvp_job_unused(submitter, job);
            kvp_job_unused(submitter, job);
            kvp_job_release(job);
            continue;
        }
        if (hand_over(job, store ? KVP_D2H : KVP_H2D)) {
            told[job->id] = 1;
            kvp_job_unused(submitter, job);
            kvp_job_release(job);
            continue;
        }
        if (explore_below(8) == 0) pause_for(explore_below(2) ? 20000 : 40000000);
        if (explore_below(3)) {
            fence(job, stream);
            if (failing == NO_CALL)
                add(compute, (struct op){.kind = LOOK, .dst = to, .bytes = EACH * BLOCK, .value = value});
        }
        if (explore_below(3) == 0 || r == REQUESTS - 1 || failing != NO_CALL) {
            wait_for_end(job);
            for (int i = 0; i < EACH * BLOCK; i++) MUST(has_failed || to[i] == (unsigned char)value);
        } else { /* what follows is written behind it */
            fence(job, stream);
        }
        kvp_job_release(job);
    }
    return NULL;
}

/* Nothing is asked for where a block is not there, or a destination stands twice. */
static void refused_requests(void) {
    int64_t last = (int64_t)submitter->config.gpu.blocks - 1;
    int64_t good[] = {0, 1, 2, 3, 4, last}, twice[] = {5, 1, 2, 3, 4, 5}, out[] = {0, 1, last + 1, 3, 4, 5};
    int64_t below[] = {0, 1, 2, 3, 4, -1};
    uint64_t before = ids;
    kvp_job_refused why;
    for (int store = 0; store < 2; store++) {
        const int64_t *bad[][2] = {{out, good}, {good, out}, {below, good}, {good, below}};
        for (int i = 0; i < 4; i++) {
            MUST(!request(bad[i][0], bad[i][1], 6, NULL, store, &why));
            MUST(why.why == KVP_BAD_ID && why.bad == (i < 2 ? last + 1 : -1));
        }
        MUST(!request(store ? good : twice, store ? twice : good, 6, NULL, store, &why) && why.why == KVP_TWICE);
        for (int again = 0; again < 2; again++) { /* the same blocks as before, and a source twice, are no reason */
            kvp_job_status *job =
                request(store ? twice : good, store ? good : twice, 6, handle_of(2 * STREAMS + 2), store, &why);
            MUST(job && !why.why && why.bad == (intptr_t)job && why.made == job->id);
            kvp_job_unused(submitter, job);
            kvp_job_release(job);
        }
    }
    ids = before;
}

/* A load behind work that takes so long. */
static kvp_job_status *one_more(uint64_t ns) {
    int compute = 2 * STREAMS + 2;
    add(compute, (struct op){.kind = FILL, .dst = cpu, .bytes = BLOCK, .value = 1, .until = explore_now() + ns});
    int64_t block = 0;
    kvp_job_refused refused;
    kvp_request asked = {.submitter = submitter,
                         .refused = &refused,
                         .after = handle_of(compute),
                         .id = ids++,
                         .copies = 1,
                         .gpu_count = 1,
                         .cpu_count = 1,
                         .requested_ns = kvp_now_ns(),
                         .what = KVP_REQUEST_AFTER | KVP_REQUEST_PUSH};
    kvp_job_status *job = kvp_job_request(&asked, &block, &block);
    MUST(job || has_failed);
    if (!job) ids--;
    return job;
}

static void *listener(void *unused) {
    uint64_t some[3], n;
    int is;
    do {
        is = kvp_wait_ended(submitter);
        while ((n = kvp_take_ended(submitter, some, 3)))
            for (uint64_t i = 0; i < n; i++) told[some[i]]++;
    } while (is >= 0);
    return unused;
}

static int all_ended(void) {
    kvp_submitter_stats now;
    kvp_submitter_read(submitter, &now);
    return !now.pending;
}

/* All has ended: nothing is held any more, and all that was counted adds up. */
static void check_idle(kvp_submitter_stats *last, int abandoned) {
    kvp_submitter_read(submitter, last);
    if (last->wrong) explore_fail(last->wrong);
    MUST(!last->pending && (!last->broken || has_failed || abandoned));
    MUST(!last->broken == !last->fault);
    MUST(last->broken || failing != LOST || !has_failed /* a device that is gone is said to be */);
    MUST(last->events && last->events_free == last->events);
    MUST(last->fences && !last->fences_used);
    MUST(last->steps && last->steps < 1u << 30);
    MUST(!last->methods_off && !last->method_error && !last->stuck_job);
    for (int d = 0; d < 2; d++) {
        MUST(!last->pending_bytes[d] && !last->in_flight_bytes[d] && !last->in_flight_places[d]);
        MUST(!last->shared_places[d] && !last->listed[d] && last->rate[d] && !last->cta_bytes[d]);
        MUST(!last->launches[d][KVP_LOOP] == !last->bytes[d][KVP_LOOP]);
        MUST(!last->launches[d][KVP_LOOP] == !last->stream[d] || last->broken);
        MUST(!last->launches[d][KVP_KERNEL] && !last->launches[d][KVP_BATCH]);
    }
    const kvp_submitter *s = submitter;
    MUST(!s->pins && !s->direction[0].flying && !s->direction[1].flying);
    for (int i = 0; i < PINNED; i++) MUST(!s->pinned[i]);
    for (int i = 0; i < 16; i++) MUST(!last_error[i] /* left for the program to find */);
    MUST(failing != COPIES || !has_failed || failed_jobs /* a copy that failed, and nobody is told */);
    for (int i = 0; i < s->computes; i++) MUST(!s->compute[i].recorded && !s->compute[i].open);
}

/* Everything ended, and nothing is wrong. */
static void close_quiet(void) {
    kvp_submitter_close(submitter, 1);
    kvp_submitter_stats last;
    check_idle(&last, 0);
    explore_end();
    MUST(!kvp_submitter_destroy_events(submitter));
    kvp_submitter_free(submitter);
}

static kvp_submitter_config config_of(const uint64_t *gpu_base, const uint64_t *cpu_base, uint64_t blocks, void **loads,
                                      void **stores) {
    static kvp_method_table methods;
    kvp_submitter_config config = {.copier = {.cuda = {.memcpy_async = copy,
                                                       .event_record = event_record,
                                                       .event_query = event_query,
                                                       .event_elapsed = event_elapsed,
                                                       .stream_wait_event = stream_wait_event,
                                                       .get_last_error = get_last_error,
                                                       .runtime_version = 13000,
                                                       .stream_query = stream_query,
                                                       .event_synchronize = event_query,
                                                       .event_create = event_create,
                                                       .event_destroy = event_destroy}},
                                   .methods = &methods,
                                   .gpu = {.bases = gpu_base, .blocks = blocks, .factor = 1},
                                   .cpu = {.bases = cpu_base, .blocks = blocks, .factor = 1},
                                   .copy_bytes = BLOCK,
                                   .layers = 1,
                                   .depth = 16 + explore_below(3) * 16,
                                   .detail = KVP_OFF,
                                   .streams = STREAMS,
                                   .pooled = {loads, stores},
                                   .shared = {handle_of(2 * STREAMS), handle_of(2 * STREAMS + 1)},
                                   .stuck_ns = explore_below(4) ? 100000000 : 0,
                                   .ceiling = 12};
    kvp_method_table_default(&methods, &config.copier);
    return config;
}

static void play(uint64_t seed) {
    memset(streams, 0, sizeof streams);
    memset(told, 0, sizeof told);
    events_made = 0, ids = 0, submitter = NULL;
    explore_begin(seed, idle);
    failing = explore_below(3) ? NO_CALL : (enum call)explore_below(CALLS);
    fails_at = 1 + explore_below(failing == MEMORY ? 200 : 40), has_failed = failed_jobs = 0;
    memset(last_error, 0, sizeof last_error);
    explore_exact((int)explore_below(2));
    const uint64_t gpu_base = (uintptr_t)gpu, cpu_base = (uintptr_t)cpu;
    void *pooled[2][STREAMS] = {{handle_of(0), handle_of(1)}, {handle_of(2), handle_of(3)}};
    const uint64_t blocks = explore_below(2) ? BLOCKS : 4096; /* of which nobody names more */
    kvp_submitter_config config = config_of(&gpu_base, &cpu_base, blocks, pooled[0], pooled[1]);
    int why;
    if (explore_below(4) == 0) explore_no_memory(1 + explore_below(40));
    submitter = kvp_submitter_open(&config, &why);
    if (!submitter) { /* nothing is left of it */
        MUST(explore_had_no_memory() && (!why || why == cudaErrorMemoryAllocation));
        for (int i = 0; i < events_made; i++) MUST(events[i].destroyed);
        events_made = 0;
        explore_no_memory(0);
        submitter = kvp_submitter_open(&config, &why);
    }
    MUST(submitter && !why);
    explore_no_memory(0);
    pthread_t callers[CALLERS], listens;
    if (failing == NO_CALL) refused_requests();
    if (failing == NO_CALL && seed % 64 == 0) refused_huge_request();
    if (failing == MEMORY) explore_no_memory(fails_at);
    kvp_explore_create(&listens, listener, NULL);
    for (intptr_t t = 0; t < CALLERS; t++) kvp_explore_create(&callers[t], caller, (void *)t);
    if (explore_below(2))
        for (int t = 0; t < CALLERS; t++) kvp_explore_join(callers[t]);
    else
        for (int t = CALLERS; t--;) kvp_explore_join(callers[t]);
    explore_no_memory(0);
    has_failed |= explore_had_no_memory();
    enum { DRAIN, CLOSE, ABANDON } how = explore_below(3) ? DRAIN : 1 + explore_below(2);
    kvp_job_status *late = how == DRAIN && explore_below(3) ? NULL : one_more(400000000);
    uint64_t before = explore_now();
    bool listening = late || explore_below(2);
    if (!listening) {
        kvp_submitter_stop(submitter);
        kvp_explore_join(listens);
        uint64_t one;
        while (kvp_take_ended(submitter, &one, 1)) told[one]++;
        MUST(kvp_wait_ended(submitter) == -1 || !all_ended());
    }
    if (how == ABANDON)
        kvp_submitter_abandon(submitter);
    else
        kvp_submitter_close(submitter, how == DRAIN);
    if (late) MUST(has_failed || late->state == (how == DRAIN ? KVP_DONE : KVP_FAILED));
    if (late && late->state == KVP_FAILED && how != DRAIN && !has_failed) {
        MUST(late->fault == (how == CLOSE ? KVP_FAULT_CLOSED : KVP_FAULT_RESET));
        MUST(explore_now() < before + 100000000 /* nobody waits for compute that took longer */);
    }
    if (late) kvp_job_release(late);
    if (listening) kvp_explore_join(listens);
    uint64_t rest; /* of abandoned ones the listener may have left before they ended */
    while (kvp_take_ended(submitter, &rest, 1)) told[rest]++;
    kvp_job_refused refused;
    int64_t block = 0;
    MUST(!request(&block, &block, 1, handle_of(2 * STREAMS + 2), 0, &refused) && refused.why == KVP_BROKEN);
    ids--;
    kvp_submitter_stats last;
    memset(&last, 0xff, sizeof last);
    check_idle(&last, how == ABANDON);
    for (uint64_t i = 0; i < ids; i++) MUST(told[i] == 1);
    kvp_wrong(submitter, "the first");
    kvp_wrong(submitter, "the second");
    kvp_submitter_read(submitter, &last);
    MUST(last.wrong && !strcmp(last.wrong, "the first"));
    kvp_submitter_close(submitter, 1); /* again: nothing happens */
    explore_end();
    MUST(!kvp_submitter_destroy_events(submitter));
    for (int i = 0; i < events_made; i++) MUST(events[i].destroyed);
    kvp_submitter_hold(submitter);
    kvp_submitter_free(submitter);
    MUST(submitter->config.layers == 1 /* it is still there */);
    kvp_submitter_free(submitter);
}

/* More transfers that may not go together than a line has marks for, and all of them in a hurry. */
static void play_many_marks(uint64_t seed) {
    enum { MANY = MARKERS + 300 };
    static kvp_job_status *job[MANY];
    memset(streams, 0, sizeof streams);
    events_made = 0, ids = 0, submitter = NULL, has_failed = 1;
    explore_begin(seed, idle);
    failing = NO_CALL;
    const uint64_t gpu_base = (uintptr_t)gpu, cpu_base = (uintptr_t)cpu;
    void *pooled[2][STREAMS] = {{handle_of(0), handle_of(1)}, {handle_of(2), handle_of(3)}};
    kvp_submitter_config config = config_of(&gpu_base, &cpu_base, BLOCKS, pooled[0], pooled[1]);
    config.depth = 8 * MARKERS, config.stuck_ns = 0;
    int why;
    submitter = kvp_submitter_open(&config, &why);
    MUST(submitter && !why);
    failing = (enum call)ALWAYS_RECORDS;
    int64_t block = 0;
    for (int i = 0; i < MANY; i++) {
        kvp_job_refused refused;
        kvp_request asked = {.submitter = submitter,
                             .refused = &refused,
                             .id = ids++,
                             .copies = 1,
                             .gpu_count = 1,
                             .cpu_count = 1,
                             .requested_ns = kvp_now_ns(),
                             .what = KVP_REQUEST_PUSH};
        job[i] = kvp_job_request(&asked, &block, &block);
        MUST(job[i]);
    }
    fence(job[MANY - 1], handle_of(2 * STREAMS + 2));
    wait_for_end(job[MANY - 1]);
    for (int i = 0; i < MANY; i++) {
        MUST(job[i]->state == KVP_DONE);
        kvp_job_release(job[i]);
    }
    close_quiet();
}

/* A load of one block that nobody waits for on the device. */
static kvp_job_status *plain_load(void) {
    int64_t block = 0;
    kvp_job_refused refused;
    kvp_request asked = {.submitter = submitter,
                         .refused = &refused,
                         .id = ids++,
                         .copies = 1,
                         .gpu_count = 1,
                         .cpu_count = 1,
                         .requested_ns = kvp_now_ns(),
                         .what = KVP_REQUEST_PUSH};
    kvp_job_status *job = kvp_job_request(&asked, &block, &block);
    MUST(job);
    return job;
}

static void take_exactly(uint64_t first, uint64_t last) {
    uint64_t taken[64], n = kvp_take_ended(submitter, taken, sizeof taken / sizeof *taken);
    MUST(n == last - first + 1);
    for (uint64_t i = 0; i < n; i++) MUST(taken[i] == first + i);
}

/* Nobody takes the ids of what has ended, and there is no memory for more of them: the newest are kept, in order. */
static void play_without_listener(uint64_t seed) {
    enum { ROOM = 4 }; /* ENDED_FIRST while exploring */
    memset(streams, 0, sizeof streams);
    events_made = 0, ids = 0, submitter = NULL, has_failed = 0;
    explore_begin(seed, idle);
    failing = NO_CALL;
    const uint64_t gpu_base = (uintptr_t)gpu, cpu_base = (uintptr_t)cpu;
    void *pooled[2][STREAMS] = {{handle_of(0), handle_of(1)}, {handle_of(2), handle_of(3)}};
    kvp_submitter_config config = config_of(&gpu_base, &cpu_base, BLOCKS, pooled[0], pooled[1]);
    int why;
    submitter = kvp_submitter_open(&config, &why);
    MUST(submitter && !why);
    for (uint64_t i = 0; i < ROOM + 11; i++) {
        kvp_job_status *job = plain_load();
        bool full = i >= ROOM && i < ROOM + 3;
        if (full) explore_no_memory(1);
        wait_for_end(job);
        MUST(explore_had_no_memory() == full);
        explore_no_memory(0);
        kvp_job_release(job);
        if (i == ROOM + 2) take_exactly(3, i);
    }
    take_exactly(ROOM + 3, ROOM + 10);
    close_quiet();
}

static void open_quiet(uint64_t seed) {
    static uint64_t gpu_base, cpu_base;
    static void *pooled[2][STREAMS];
    memset(streams, 0, sizeof streams);
    memset(told, 0, sizeof told);
    events_made = 0, ids = 0, submitter = NULL, has_failed = failed_jobs = 0;
    explore_begin(seed, idle);
    failing = NO_CALL;
    gpu_base = (uintptr_t)gpu, cpu_base = (uintptr_t)cpu;
    for (int i = 0; i < 2 * STREAMS; i++) pooled[i / STREAMS][i % STREAMS] = handle_of(i);
    kvp_submitter_config config = config_of(&gpu_base, &cpu_base, BLOCKS, pooled[0], pooled[1]);
    config.stuck_ns = 0;
    int why;
    submitter = kvp_submitter_open(&config, &why);
    MUST(submitter && !why);
}

/* More requests behind one stream than record an event of their own: the others share one, which the thread records, or
 * whoever is in a hurry. */
static void play_shared_fences(uint64_t seed) {
    enum { MANY = 7 };
    kvp_job_status *job[MANY];
    open_quiet(seed);
    for (int i = 0; i < MANY; i++) {
        job[i] = one_more(3000000);
        if (explore_below(3) == 0) pause_for(300000);
    }
    for (int i = 0; i < MANY; i++)
        if (explore_below(2)) fence(job[i], handle_of(2 * STREAMS + 3));
    for (int i = 0; i < MANY; i++) {
        wait_for_end(job[i]);
        kvp_job_release(job[i]);
    }
    close_quiet();
}

/* Memory runs out at each allocation of a request of several jobs in turn: all of them are made, or none. */
static void play_no_memory(uint64_t seed) {
    open_quiet(seed);
    for (uint32_t at = 1;; at++) {
        kvp_job_status *made[2];
        has_failed = 0;
        failing = MEMORY;
        explore_no_memory(at);
        int no = request_addresses(0, handle_of(2 * STREAMS + 2), 0, made);
        bool had = explore_had_no_memory();
        explore_no_memory(0);
        if (!no) kvp_job_release(made[0]), kvp_job_release(made[1]);
        if (!had) break;
    }
    failing = NO_CALL;
    close_quiet();
}

/* ---- the reserve of a packed pool -------------------------------------------------------------------------------- */

enum { CELLS = 5, TAILS = 4, ROOM_BYTES = 100 };
static kvp_reserve *reserve;
static kvp_wire_note *notes;

static uint32_t tail_of(uint64_t cell) { return notes[cell].summed >> 1; }

static uint64_t tails_used(void) {
    uint64_t used = 0;
    for (int i = 0; i < CELLS; i++) {
        used += tail_of((uint64_t)i) != 0;
        for (int k = 0; k < i; k++) MUST(!tail_of((uint64_t)i) || tail_of((uint64_t)i) != tail_of((uint64_t)k));
    }
    return used;
}

/* As a launch of stores: what it was promised it has until its end, also where another one stores there. */
static void *stores_into_cells(void *unused) {
    for (int turn = 0; turn < 8; turn++) {
        uint32_t count = 1 + explore_below(2), tails[2];
        uint64_t first = explore_below(CELLS - count + 1);
        if (!kvp_reserve_claim(reserve, count)) {
            kvp_explore_yield();
            continue;
        }
        kvp_reserve_begin(reserve, first, count);
        for (uint32_t i = 0; i < count; i++) {
            tails[i] = tail_of(first + i);
            MUST(tails[i] >= 1 && tails[i] <= TAILS);
        }
        MUST(!kvp_reserve_discard(reserve, first, count) && tails_used() <= TAILS);
        for (int pause = (int)explore_below(3); pause; pause--) kvp_explore_yield();
        for (uint32_t i = 0; i < count; i++) {
            MUST(tail_of(first + i) == tails[i]);
            notes[first + i].bytes = ROOM_BYTES + explore_below(2);
        }
        kvp_reserve_end(reserve, first, count, explore_below(3) == 0);
        kvp_reserve_unclaim(reserve, count);
    }
    return unused;
}

static void play_reserve(uint64_t seed) {
    explore_begin(seed, idle);
    notes = calloc(CELLS, sizeof *notes);
    for (int i = 0; i < CELLS; i++) notes[i].summed = (uint32_t)i % 2;
    for (uint32_t at = 1; at <= 3; at++) {
        explore_no_memory(at);
        MUST(!kvp_reserve_open(notes, CELLS, TAILS, ROOM_BYTES) && explore_had_no_memory());
    }
    explore_no_memory(0);
    reserve = kvp_reserve_open(notes, CELLS, TAILS, ROOM_BYTES);
    MUST(reserve && kvp_reserve_left(reserve) == TAILS);
    pthread_t threads[2];
    for (int t = 0; t < 2; t++) kvp_explore_create(&threads[t], stores_into_cells, NULL);
    for (int t = 0; t < 2; t++) kvp_explore_join(threads[t]);
    MUST(kvp_reserve_left(reserve) == TAILS - tails_used());
    MUST(kvp_reserve_discard(reserve, 0, CELLS) == 1 && !tails_used());
    MUST(!kvp_reserve_claim(reserve, TAILS + 1) && kvp_reserve_claim(reserve, TAILS));
    MUST(!kvp_reserve_left(reserve) && !kvp_reserve_claim(reserve, 1));
    kvp_reserve_begin(reserve, 1, TAILS);
    for (int i = 1; i <= TAILS; i++) notes[i].bytes = ROOM_BYTES + (uint32_t)i % 2;
    kvp_reserve_end(reserve, 1, TAILS, 0);
    for (int i = 0; i < CELLS; i++) MUST(!tail_of((uint64_t)i) == !(i % 2) && (notes[i].summed & 1) == (uint32_t)i % 2);
    kvp_reserve_unclaim(reserve, TAILS);
    MUST(kvp_reserve_left(reserve) == TAILS / 2);
    MUST(kvp_reserve_discard(reserve, 0, 2) == 1 && kvp_reserve_left(reserve) == TAILS / 2 + 1);
    MUST(kvp_reserve_claim(reserve, 1) && kvp_reserve_left(reserve) == TAILS / 2);
    kvp_reserve_begin(reserve, 1, 1);
    MUST(!kvp_reserve_discard(reserve, 0, 2));
    kvp_reserve_end(reserve, 1, 1, 0);
    kvp_reserve_unclaim(reserve, 1);
    MUST(!notes[1].bytes && notes[2].bytes == ROOM_BYTES && notes[3].bytes && tail_of(3));
    kvp_reserve_close(reserve);
    free(notes);
    explore_end();
}

int main(int argc, char **argv) {
    uint64_t first = argc > 1 ? strtoull(argv[1], NULL, 10) : 0, count = argc > 2 ? strtoull(argv[2], NULL, 10) : 1;
    kvp_set_clock(explore_now);
    for (uint64_t seed = first; seed < first + count; seed++) {
        play(seed);
        if (seed % 64 == 0) play_many_marks(seed);
        if (seed % 16 == 0) play_without_listener(seed);
        if (seed % 4 == 0) play_shared_fences(seed);
        if (seed % 32 == 0) play_no_memory(seed);
        if (seed % 2 == 0) play_reserve(seed);
        if (argc > 3) printf("seed %llu: %llu\n", (unsigned long long)seed, (unsigned long long)explore_digest());
    }
    printf("%llu interleavings\n", (unsigned long long)count);
    return 0;
}
