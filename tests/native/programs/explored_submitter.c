/* The submitter's thread and its callers, interleaved at every lock, sleep and declared yield: explored_submitter FIRST
 * COUNT [trace] plays these seeds, and says which one broke what; with `trace`, what each came to. The device is a list of operations a stream, of which some end
 * at each question; what runs on it looks at the bytes, so that an order that was lost is seen. */
#include "explore.h"
#include "kvp_submitter.h"
#include "submitter.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { CALLERS = 3, STREAMS = 2, BLOCK = 64, EACH = 4, BLOCKS = CALLERS * EACH, REQUESTS = 10, OPS = 4096, EVENTS = 2048 };
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
    int stream;
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

static int event_create(void **event, unsigned flags) {
    (void)flags;
    MUST(events_made < EVENTS);
    events[events_made] = (struct event){-1, 0};
    *event = &events[events_made++];
    return 0;
}
static int event_destroy(void *event) { return event ? 0 : 1; }
static int event_record(void *event, void *stream) {
    kvp_explore_yield();
    struct event *e = event;
    add(number_of(stream), (struct op){.kind = RECORD});
    *e = (struct event){number_of(stream), streams[number_of(stream)].tail};
    return 0;
}
static int event_query(void *event) {
    kvp_explore_yield();
    device_goes_on(2);
    const struct event *e = event;
    return e->stream >= 0 && streams[e->stream].head < e->at ? cudaErrorNotReady : 0;
}
static int event_elapsed(float *ms, void *from, void *to) {
    (void)from, (void)to;
    *ms = 0;
    return 1; /* no times are known */
}
static int stream_wait_event(void *stream, void *event, unsigned flags) {
    for (int i = 0; i < 4; i++) kvp_explore_yield(), device_goes_on(2); /* whoever waits may be held up here for long */
    const struct event *e = event;
    if (e->stream >= 0) add(number_of(stream), (struct op){.kind = WAIT, .stream = e->stream, .until = e->at});
    return (int)flags;
}
static int stream_query(void *stream) {
    const struct stream *s = &streams[number_of(stream)];
    return s->head == s->tail ? 0 : cudaErrorNotReady;
}
static int copy(void *dst, const void *src, size_t bytes, int kind, cudaStream_t stream) {
    kvp_explore_yield();
    (void)kind;
    add(number_of(stream), (struct op){.kind = COPY, .dst = dst, .src = src, .bytes = bytes});
    return 0;
}
static int no_error(void) { return 0; }

/* ---- the callers ------------------------------------------------------------------------------------------------ */

static kvp_submitter *submitter;
static uint64_t ids, told[CALLERS * REQUESTS + 2];
static pthread_mutex_t one_inline[2] = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_MUTEX_INITIALIZER};

/* Nobody can go on: then nobody may have been forgotten. */
static void idle(void) {
    device_goes_on(4);
    if (!submitter || !submitter->threaded) return;
    if (explore_sleeps_for_good(&submitter->work)) {
        MUST(!atomic_load(&submitter->incoming) /* handed over, and nobody looks */);
        MUST(!atomic_load(&submitter->hurrying) /* in a hurry, and nobody looks */);
        MUST(!submitter->direction[0].flying && !submitter->direction[1].flying /* in flight, and nobody looks */);
    }
    if (submitter->wrong) explore_fail(submitter->wrong);
}

static void hand_over(kvp_job_status *job, int direction) {
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
        while (!code && again);
        MUST(code == 0 || code == 1);
        if (!code) MUST(!kvp_job_push(submitter, job));
    } else {
        MUST(!kvp_job_push(submitter, job));
    }
    kvp_explore_unlock(lock);
}

static void pause_for(uint64_t ns) {
    atomic_uint nothing = 0;
    kvp_explore_sleep(&nothing, 0, ns);
}

static void wait_for_end(kvp_job_status *job) {
    int is = 0;
    if (explore_below(4) == 0) is = kvp_job_wait(submitter, job, 500);
    while (is != 1 && (is = kvp_job_wait(submitter, job, UINT64_MAX)) == -1) continue;
    MUST(is == 1 && job->state == KVP_DONE);
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
        uint64_t id = __atomic_fetch_add(&ids, 1, __ATOMIC_RELAXED);
        kvp_job_refused refused;
        kvp_request asked = {.submitter = submitter,
                             .refused = &refused,
                             .after = stream,
                             .id = id,
                             .copies = EACH,
                             .gpu_count = EACH,
                             .cpu_count = EACH,
                             .requested_ns = kvp_now_ns(),
                             .what = KVP_REQUEST_AFTER | (store ? KVP_REQUEST_STORE : 0)};
        kvp_job_status *job = kvp_job_request(&asked, blocks, blocks);
        MUST(job);
        hand_over(job, store ? KVP_D2H : KVP_H2D);
        if (explore_below(8) == 0) pause_for(explore_below(2) ? 20000 : 40000000);
        if (explore_below(3)) {
            int is;
            while ((is = kvp_job_fence(submitter, job, stream)) == -6) continue;
            MUST(!is);
            add(compute, (struct op){.kind = LOOK, .dst = to, .bytes = EACH * BLOCK, .value = value});
        }
        if (explore_below(3) == 0 || r == REQUESTS - 1) {
            wait_for_end(job);
            for (int i = 0; i < EACH * BLOCK; i++) MUST(to[i] == (unsigned char)value);
        } else { /* what follows is written behind it */
            int is;
            while ((is = kvp_job_fence(submitter, job, stream)) == -6) continue;
            MUST(!is);
        }
        kvp_job_release(job);
    }
    return NULL;
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
    MUST(job);
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

static void play(uint64_t seed) {
    memset(streams, 0, sizeof streams);
    memset(told, 0, sizeof told);
    events_made = 0, ids = 0, submitter = NULL;
    explore_begin(seed, idle);
    const uint64_t gpu_base = (uintptr_t)gpu, cpu_base = (uintptr_t)cpu;
    void *pooled[2][STREAMS] = {{handle_of(0), handle_of(1)}, {handle_of(2), handle_of(3)}};
    static kvp_method_table methods;
    kvp_submitter_config config = {.copier = {.cuda = {.memcpy_async = copy,
                                                       .event_record = event_record,
                                                       .event_query = event_query,
                                                       .event_elapsed = event_elapsed,
                                                       .stream_wait_event = stream_wait_event,
                                                       .get_last_error = no_error,
                                                       .runtime_version = 13000,
                                                       .stream_query = stream_query,
                                                       .event_synchronize = event_query,
                                                       .event_create = event_create,
                                                       .event_destroy = event_destroy}},
                                   .methods = &methods,
                                   .gpu = {.bases = &gpu_base, .blocks = BLOCKS, .factor = 1},
                                   .cpu = {.bases = &cpu_base, .blocks = BLOCKS, .factor = 1},
                                   .copy_bytes = BLOCK,
                                   .layers = 1,
                                   .depth = 16 + explore_below(3) * 16,
                                   .detail = KVP_OFF,
                                   .streams = STREAMS,
                                   .pooled = {pooled[0], pooled[1]},
                                   .shared = {handle_of(2 * STREAMS), handle_of(2 * STREAMS + 1)},
                                   .ceiling = 12};
    kvp_method_table_default(&methods, &config.copier);
    int why;
    submitter = kvp_submitter_open(&config, &why);
    MUST(submitter && !why);
    pthread_t callers[CALLERS], listens;
    kvp_explore_create(&listens, listener, NULL);
    for (intptr_t t = 0; t < CALLERS; t++) kvp_explore_create(&callers[t], caller, (void *)t);
    if (explore_below(2))
        for (int t = 0; t < CALLERS; t++) kvp_explore_join(callers[t]);
    else
        for (int t = CALLERS; t--;) kvp_explore_join(callers[t]);
    kvp_job_status *late = explore_below(4) ? NULL : one_more(400000000);
    kvp_submitter_close(submitter, 1);
    if (late) MUST(late->state == KVP_DONE);
    if (late) kvp_job_release(late);
    kvp_explore_join(listens);
    kvp_submitter_stats last;
    kvp_submitter_read(submitter, &last);
    if (last.wrong) explore_fail(last.wrong);
    MUST(!last.pending && !last.broken );
    for (uint64_t i = 0; i < ids; i++) MUST(told[i] == 1);
    explore_end();
    MUST(!kvp_submitter_destroy_events(submitter));
    kvp_submitter_free(submitter);
}

int main(int argc, char **argv) {
    uint64_t first = argc > 1 ? strtoull(argv[1], NULL, 10) : 0, count = argc > 2 ? strtoull(argv[2], NULL, 10) : 1;
    kvp_set_clock(explore_now);
    for (uint64_t seed = first; seed < first + count; seed++) {
        play(seed);
        if (argc > 3) printf("seed %llu: %llu\n", (unsigned long long)seed, (unsigned long long)explore_digest());
    }
    printf("%llu interleavings\n", (unsigned long long)count);
    return 0;
}
