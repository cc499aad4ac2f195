/* The virtual clock: exact times, actors, the order of what happens at once, and what can never happen. */
#include "test_hostrt.h"

#define START 1000000000u /* ns at which a simulation starts */
#define SUBMIT 1000u
#define LATENCY 2000u

static void virtual(uint64_t seed, uint64_t depth, uint64_t channels) {
    kvhost_config config = {
        .virtual_clock = 1, .seed = seed, .depth = depth, .copy_channels = channels, .compute_channels = channels};
    OK(kvhostReset(&config));
    CHECK(kvhostIsVirtual() && kvhostNow() == START);
}

static cudaError_t h2d(char *dst, const char *src, size_t bytes, cudaStream_t s) {
    return cudaMemcpyAsync(dst, src, bytes, cudaMemcpyHostToDevice, s);
}

/* A submission costs submit_ns, a copy latency + bytes / bandwidth; a call that waits returns when it is done. */
static void times(int argc, char **argv) {
    (void)argc, (void)argv;
    virtual(1, 0, 0);
    char *host = pinned(1 << 20), *dev = device(1 << 20);
    cudaStream_t s = new_stream(), t = new_stream();
    cudaEvent_t a = new_event(), b = new_event();
    CHECK(kvhostNow() == START);
    OK(cudaEventRecord(a, s));
    CHECK(kvhostNow() == START + SUBMIT);
    memset(host, 7, 1 << 20);
    OK(h2d(dev, host, 400000, s)); /* 2 us + 100 us at 4 GB/s */
    OK(cudaEventRecord(b, s));
    CHECK(kvhostNow() == START + 3 * SUBMIT);
    IS(cudaEventQuery(b), cudaErrorNotReady);
    CHECK(kvhostNow() == START + 3 * SUBMIT + 100);
    OK(cudaEventSynchronize(b));
    CHECK(kvhostNow() == START + SUBMIT + LATENCY + 100000);
    CHECK(dev[399999] == 7);
    float ms;
    OK(cudaEventElapsedTime(&ms, a, b));
    CHECK(ms == (float)(SUBMIT + LATENCY + 100000) / 1e6f);
    /* delays of two streams overlap, those of one do not */
    uint64_t before = kvhostNow();
    OK(kvhostLaunchDelay(s, 50000));
    OK(kvhostLaunchDelay(t, 50000));
    OK(kvhostLaunchDelay(t, 50000));
    OK(cudaDeviceSynchronize());
    CHECK(kvhostNow() == before + SUBMIT + 100000);
    /* pageable: staged, or its caller waits for the engine */
    char *plain = malloc(4 << 20);
    before = kvhostNow();
    OK(h2d(dev, plain, 100000, s));
    CHECK(kvhostNow() == before + 10000 + SUBMIT);
    OK(cudaStreamSynchronize(s));
    before = kvhostNow();
    OK(cudaMemcpyAsync(plain, dev, 400000, cudaMemcpyDeviceToHost, s));
    CHECK(kvhostNow() == before + LATENCY + 100000);
    free(plain);
    OK(kvhostAdvance(before + 500000));
    CHECK(kvhostNow() == before + 500000);
}

/* Depth 64: copy 64 + n returns exactly when copy n is done. */
static void full_queue(int argc, char **argv) {
    (void)argc, (void)argv;
    enum { N = 500, DEPTH = 64, SERVICE = 2000 + 4096 };
    virtual(1, DEPTH, 0);
    char *host = pinned(16384), *dev = device(16384);
    cudaStream_t s = new_stream();
    OK(kvhostTraceStart(N + 10));
    for (int i = 0; i < N; i++) OK(h2d(dev, host, 16384, s));
    OK(cudaStreamSynchronize(s));
    static kvhost_trace_record r[N];
    CHECK(kvhostTraceRead(r, 0, N) == N);
    int blocked = 0;
    for (int i = 0; i < N; i++) {
        CHECK(r[i].exec_start_ns == START + (uint64_t)i * SERVICE && r[i].exec_end_ns == r[i].exec_start_ns + SERVICE);
        if (r[i].reason != KVHOST_QUEUE_FULL) continue;
        blocked++;
        CHECK(r[i].end_ns == r[i - DEPTH].exec_end_ns && r[i].queue_ns == r[i].end_ns - r[i].start_ns);
    }
    /* 64 places; while they were filled 1 us apart, a copy was done each 6.1 us */
    CHECK(blocked == N - 76);
    CHECK(stats().blocked_calls == (uint64_t)blocked);
}

/* A gated stream and three actors: one that blocks in the full queue, one that wants the context lock meanwhile, one
 * that opens the gate at 5 ms. */
static struct {
    char *host, *dev;
    cudaStream_t full;
    kvhost_gate *gate;
    int submitted;
    uint64_t blocked_ns, created_ns, queried_ns;
} g;

static uint64_t fill_queue(void *ctx, uint64_t now) {
    (void)ctx, (void)now;
    while (g.submitted < 1022) {
        OK(h2d(g.dev, g.host, 64, g.full));
        g.submitted++;
    }
    g.blocked_ns = kvhostNow();
    return UINT64_MAX;
}

static uint64_t create_event(void *ctx, uint64_t now) {
    (void)ctx;
    if (now < START + 3000000) return START + 3000000;
    OK(cudaEventDestroy(new_event()));
    g.created_ns = kvhostNow();
    return UINT64_MAX;
}

static uint64_t query_stream(void *ctx, uint64_t now) {
    (void)ctx;
    if (now < START + 4000000) return START + 4000000;
    IS(cudaStreamQuery(g.full), cudaErrorNotReady);
    g.queried_ns = kvhostNow();
    return UINT64_MAX;
}

static uint64_t open_gate(void *ctx, uint64_t now) {
    (void)ctx;
    if (now < START + 5000000) return START + 5000000;
    kvhostGateOpen(g.gate);
    return UINT64_MAX;
}

static int all_told(void *ctx) {
    (void)ctx;
    return g.blocked_ns && g.created_ns && g.queried_ns;
}

static void actors(int argc, char **argv) {
    (void)argc, (void)argv;
    virtual(1, 0, 0);
    g.host = pinned(64), g.dev = device(64), g.full = new_stream(), g.gate = kvhostGateCreate();
    OK(kvhostGateLaunch(g.gate, g.full));
    OK(kvhostTraceStart(4000));
    int ids[] = {kvhostActorAdd(fill_queue, NULL), kvhostActorAdd(create_event, NULL),
                 kvhostActorAdd(query_stream, NULL), kvhostActorAdd(open_gate, NULL)};
    OK(kvhostAdvance(START + 4999999));
    CHECK(g.submitted == 1021 && !g.created_ns && !g.queried_ns && waiting(KVHOST_H2D) == 1);
    CHECK(kvhostNow() == START + 4999999);
    OK(kvhostRunUntil(all_told, NULL));
    uint64_t done = START + 5000000 + LATENCY + 16; /* the first copy behind the gate */
    CHECK(g.blocked_ns == done && g.created_ns == done && g.queried_ns == done + 100);
    static kvhost_trace_record r[4000];
    uint64_t n = kvhostTraceRead(r, 0, 4000);
    int creations = 0;
    for (uint64_t i = 0; i < n; i++) {
        if (r[i].reason == KVHOST_QUEUE_FULL) CHECK(r[i].tid == 1 + (uint32_t)ids[0] && r[i].end_ns == done);
        if (strcmp(kvhostCallName(r[i].api), "cudaEventCreateWithFlags")) continue;
        creations++;
        CHECK(r[i].tid == 1 + (uint32_t)ids[1] && r[i].reason == KVHOST_CONTEXT_LOCK);
        CHECK(r[i].start_ns == START + 3000000 && r[i].end_ns == done);
    }
    CHECK(creations == 1);
    for (int i = 0; i < 4; i++) kvhostActorRemove(ids[i]);
    OK(cudaDeviceSynchronize());
    CHECK(stats().operations_pending == 0);
}

/* Two threads that are blocked at the same time return at different times, whichever was first. */
static uint64_t returned[2];
static cudaStream_t slow[2];
static uint64_t synchronise(void *ctx, uint64_t now) {
    (void)now;
    int i = (int)(intptr_t)ctx;
    OK(cudaStreamSynchronize(slow[i]));
    returned[i] = kvhostNow();
    return UINT64_MAX;
}

static void independent(int argc, char **argv) {
    (void)argc, (void)argv;
    for (int longer = 0; longer < 2; longer++) {
        virtual(1, 0, 0);
        for (int i = 0; i < 2; i++) {
            slow[i] = new_stream();
            returned[i] = 0;
            OK(kvhostLaunchDelay(slow[i], i == longer ? 9000000 : 4000000));
        }
        int other = kvhostActorAdd(synchronise, (void *)(intptr_t)1);
        synchronise((void *)(intptr_t)0, 0);
        OK(kvhostAdvance(START + 20000000));
        CHECK(returned[longer] == START + (uint64_t)longer * SUBMIT + 9000000);
        CHECK(returned[!longer] == START + (uint64_t)!longer * SUBMIT + 4000000);
        kvhostActorRemove(other);
    }
}

/* What can never be: the call returns and says why, and all goes on afterwards. */
static int never(void *ctx) {
    (void)ctx;
    return 0;
}
static uint64_t poll(void *ctx, uint64_t now) {
    ++*(int *)ctx;
    return now + 1000;
}
static uint64_t wait_for_gate(void *ctx, uint64_t now) {
    (void)now;
    *(int *)ctx = cudaStreamSynchronize(g.full);
    return UINT64_MAX;
}

static void stuck(int argc, char **argv) {
    (void)argc, (void)argv;
    virtual(1, 16, 0);
    CHECK(!*kvhostStuck());
    g.host = pinned(64), g.dev = device(64), g.full = new_stream(), g.gate = kvhostGateCreate();
    cudaStream_t other = new_stream();
    cudaEvent_t e = new_event();
    OK(kvhostGateLaunch(g.gate, g.full));
    OK(cudaEventRecord(e, g.full));
    OK(cudaStreamWaitEvent(other, e, 0));
    for (int i = 0; i < 15; i++) OK(h2d(g.dev, g.host, 64, g.full));
    IS(h2d(g.dev, g.host, 64, g.full) ? 702 : h2d(g.dev, g.host, 64, g.full), 702);
    CHECK(strstr(kvhostStuck(), "cudaMemcpyAsync on stream 1 waits for a place in channel 1 for H2D (16 are taken)"));
    CHECK(strstr(kvhostStuck(), "the first is a gate that is closed"));
    CHECK(strstr(kvhostStuck(), "the first is a wait for an event recorded on stream 1"));
    IS(cudaEventSynchronize(e), 702);
    IS(cudaStreamSynchronize(other), 702);
    IS(cudaFree(g.dev), 702);
    IS(kvhostRunUntil(never, NULL), 702);
    CHECK(stats().sticky == 0 && waiting(KVHOST_H2D) == 0);
    /* an actor that waits for ever is named, and taken out of its call when it is removed */
    int error = 0, polls = 0;
    int waits = kvhostActorAdd(wait_for_gate, &error);
    IS(kvhostRunUntil(never, NULL), 702);
    CHECK(strstr(kvhostStuck(), "actor 0: waits in a call"));
    kvhostActorRemove(waits);
    CHECK(error == 702);
    int polling = kvhostActorAdd(poll, &polls);
    IS(kvhostRunUntil(never, NULL), 702);
    CHECK(polls > 100000 && strstr(kvhostStuck(), "actors only poll"));
    kvhostActorRemove(polling);
    kvhostGateOpen(g.gate);
    OK(cudaDeviceSynchronize());
    OK(cudaStreamSynchronize(other));
    OK(cudaFree(g.dev));
}

/* A reset, or a lost device, wakes actors in their calls; they end their step with its error. */
static uint64_t count_and_wait(void *ctx, uint64_t now) {
    (void)now;
    int *errors = ctx;
    errors[0]++;
    errors[1] = cudaStreamSynchronize(g.full);
    return UINT64_MAX;
}

static void reset(int argc, char **argv) {
    (void)argc, (void)argv;
    for (int i = 0; i < 20; i++) {
        virtual(1, 0, 0);
        int errors[2] = {0};
        g.full = new_stream(), g.gate = kvhostGateCreate();
        OK(kvhostGateLaunch(g.gate, g.full));
        int id = kvhostActorAdd(count_and_wait, errors);
        OK(kvhostAdvance(kvhostNow() + 1000));
        CHECK(errors[0] == 1 && errors[1] == 0);
        if (i % 2) {
            OK(kvhostLoseDevice());
            kvhostActorWake(id);
            OK(kvhostAdvance(kvhostNow() + 1000));
            CHECK(errors[0] == 2);
        } else {
            OK(kvhostReset(NULL));
            CHECK(!kvhostIsVirtual() && kvhostActorAdd(poll, NULL) == -1);
            IS(kvhostAdvance(kvhostNow() + 1), cudaErrorNotSupported);
            IS(kvhostRunUntil(never, NULL), cudaErrorNotSupported);
        }
        CHECK(errors[1] == cudaErrorDevicesUnavailable);
        kvhostGateDestroy(g.gate);
    }
}

/* Host functions and work run in stream order, at their time, and may call what does not wait for their stream. */
static struct {
    cudaStream_t s;
    uint64_t work_ns, host_ns, slept_ns;
} f;
static void note_work(void *arg) { (void)arg, f.work_ns = kvhostNow(); }
static void note_host(void *arg) { (void)arg, f.host_ns = kvhostNow(); }
static void sleep_a_while(void *arg) {
    OK(kvhostAdvance(kvhostNow() + *(uint64_t *)arg));
    f.slept_ns = kvhostNow();
}
static void functions(int argc, char **argv) {
    (void)argc, (void)argv;
    virtual(1, 0, 0);
    f.s = new_stream();
    OK(kvhostLaunchWork(f.s, note_work, NULL, 70000));
    OK(cudaLaunchHostFunc(f.s, note_host, NULL));
    uint64_t a_while = 5000;
    OK(cudaLaunchHostFunc(f.s, sleep_a_while, &a_while));
    OK(cudaStreamSynchronize(f.s));
    CHECK(f.work_ns == START + 70000 && f.host_ns == f.work_ns && f.slept_ns == f.work_ns + 5000);
    CHECK(kvhostNow() == f.slept_ns);
}

/* A random program of three threads over eight streams, and the digest of its ground truth. */
static struct {
    cudaStream_t stream[8];
    cudaEvent_t event[8];
    char *host, *dev;
    uint64_t random;
    int left[3];
} p;

static uint64_t draw(uint64_t n) {
    p.random ^= p.random << 13, p.random ^= p.random >> 7, p.random ^= p.random << 17;
    return p.random % n;
}

static void do_something(void) {
    cudaStream_t s = p.stream[draw(8)];
    size_t bytes = 1 + draw(20000), from = draw(40000), to = draw(40000);
    switch (draw(12)) {
    case 0:
        OK(cudaEventRecord(p.event[draw(8)], s));
        break;
    case 1:
        OK(cudaStreamWaitEvent(s, p.event[draw(8)], 0));
        break;
    case 2:
        OK(kvhostLaunchDelay(s, draw(30000)));
        break;
    case 3:
        OK(cudaMemsetAsync(p.dev + to, (int)draw(256), bytes, s));
        break;
    case 4:
        OK(cudaStreamSynchronize(s));
        break;
    case 5:
        OK(cudaEventDestroy(new_event()));
        break;
    case 6:
    case 7:
        OK(cudaMemcpyAsync(p.host + to, p.dev + from, bytes, cudaMemcpyDeviceToHost, s));
        break;
    default:
        OK(h2d(p.dev + to, p.host + from, bytes, s));
    }
}

static uint64_t work_on(void *ctx, uint64_t now) {
    int *left = ctx;
    if (!*left) return UINT64_MAX;
    --*left;
    do_something();
    return now + draw(3000);
}

static int finished(void *ctx) {
    (void)ctx;
    return !p.left[0] && !p.left[1] && !p.left[2];
}

static uint64_t mix(uint64_t h, const void *data, size_t bytes) {
    for (size_t i = 0; i < bytes; i++) h = (h ^ ((const unsigned char *)data)[i]) * 0x100000001b3u;
    return h;
}

static uint64_t history(uint64_t seed, uint64_t program) {
    virtual(seed, 32, 2);
    p.random = program;
    p.host = pinned(65536), p.dev = device(65536);
    for (int i = 0; i < 65536; i++) p.host[i] = (char)i, p.dev[i] = (char)(i >> 3);
    for (int i = 0; i < 8; i++) p.stream[i] = new_stream(), p.event[i] = new_event();
    OK(kvhostTraceStart(4000));
    int ids[3];
    for (int i = 0; i < 3; i++) p.left[i] = 400, ids[i] = kvhostActorAdd(work_on, &p.left[i]);
    OK(kvhostRunUntil(finished, NULL));
    for (int i = 0; i < 3; i++) kvhostActorRemove(ids[i]);
    OK(cudaDeviceSynchronize());
    kvhost_stats s = stats();
    CHECK(s.operations_pending == 0);
    static kvhost_trace_record r[4000];
    uint64_t n = kvhostTraceRead(r, 0, 4000), h = 0xcbf29ce484222325u;
    CHECK(n > 1000);
    for (uint64_t i = 0; i < n; i++) {
        r[i].stream = 0; /* addresses are the machine's */
        r[i].src = r[i].src ? r[i].src - (uintptr_t)p.host : 0;
        r[i].dst = 0;
        if (r[i].direction != KVP_H2D) r[i].src = 0;
        h = mix(h, &r[i], sizeof r[i]);
    }
    h = mix(h, p.host, 65536);
    h = mix(h, p.dev, 65536);
    uint64_t now = kvhostNow(), events = kvhostEvents();
    return mix(mix(h, &now, 8), &events, 8);
}

/* digest SEED PROGRAM: prints it. */
static void digest(int argc, char **argv) {
    CHECK(argc == 2);
    printf("%016llx\n", (unsigned long long)history(strtoull(argv[0], NULL, 10), strtoull(argv[1], NULL, 10)));
}

static void same_seed_same_history(int argc, char **argv) {
    (void)argc, (void)argv;
    int differ = 0;
    for (uint64_t program = 1; program <= 5; program++) {
        uint64_t first = history(1, program);
        CHECK(history(1, program) == first);
        differ += history(2, program) != first;
    }
    CHECK(differ == 5); /* the seed decides what happens first */
}

/* speed N: N copies, waited for at the end; prints simulated operations a second of real time. */
static void speed(int argc, char **argv) {
    CHECK(argc == 1);
    int n = atoi(argv[0]);
    virtual(1, 0, 0);
    char *host = pinned(64), *dev = device(64);
    cudaStream_t s = new_stream();
    struct timespec a, b;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &a);
    for (int i = 0; i < n; i++) OK(h2d(dev, host, 64, s));
    OK(cudaStreamSynchronize(s));
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &b);
    printf("%.0f\n", n / ((double)(b.tv_sec - a.tv_sec) + (double)(b.tv_nsec - a.tv_nsec) / 1e9));
}

static const test_case cases[] = {
    {"times", times},
    {"full_queue", full_queue},
    {"actors", actors},
    {"independent", independent},
    {"stuck", stuck},
    {"reset", reset},
    {"functions", functions},
    {"digest", digest},
    {"same_seed_same_history", same_seed_same_history},
    {"speed", speed},
    {0},
};

int main(int argc, char **argv) {
    int code = run_case(cases, argc, argv);
    OK(kvhostReset(NULL)); /* a leak checker does not look into the pools of streams and events */
    return code;
}
