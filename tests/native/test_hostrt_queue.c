/* The launch queue: its depth, its channels, who waits for what. */
#include "test_hostrt.h"

enum { COPY, LAUNCH, RECORD, BATCH };

static struct {
    int what, streams, batch;
    bool one_by_one; /* fill a stream before the next one */
    long limit;
    cudaStream_t stream[2000];
    void *host, *device;
    cudaEvent_t event;
    kvhost_gate *gate;
    _Atomic long submitted;
    cudaError_t error;
} f;

static cudaError_t submit(cudaStream_t s) {
    static void *dsts[4096];
    static const void *srcs[4096];
    static size_t sizes[4096], zero;
    static kvp_memcpy_attributes attrs = {.srcAccessOrder = 1};
    switch (f.what) {
    case LAUNCH:
        return kvhostLaunchDelay(s, 0);
    case RECORD:
        return cudaEventRecord(f.event, s);
    case BATCH:
        for (int i = 0; i < f.batch; i++) dsts[i] = f.device, srcs[i] = f.host, sizes[i] = 64;
        return cudaMemcpyBatchAsync(dsts, srcs, sizes, f.batch, &attrs, &zero, 1, s);
    default:
        return cudaMemcpyAsync(f.device, f.host, 64, cudaMemcpyHostToDevice, s);
    }
}

static void *fill(void *arg) {
    (void)arg;
    for (int s = 0; f.submitted < f.limit; f.submitted++) {
        f.error = submit(f.stream[s]);
        if (f.error) return NULL;
        if (!f.one_by_one || waiting(0)) s = (s + 1) % f.streams;
    }
    return NULL;
}

/* Streams that all wait for one gate, and a thread that submits to them until it blocks. */
static pthread_t filler;
static void start(int what, int streams, int batch, long limit) {
    f.what = what, f.streams = streams, f.batch = batch, f.limit = limit;
    f.host = pinned(4096), f.device = device(4096);
    f.gate = kvhostGateCreate();
    f.event = new_event();
    cudaStream_t gated = new_stream();
    OK(kvhostGateLaunch(f.gate, gated));
    OK(cudaEventRecord(f.event, gated));
    for (int i = 0; i < streams; i++) {
        f.stream[i] = new_stream();
        OK(cudaStreamWaitEvent(f.stream[i], f.event, 0));
    }
    f.event = new_event();
    if (what == RECORD) /* so that records go to the copy channel */
        OK(cudaMemcpyAsync(f.device, f.host, 64, cudaMemcpyHostToDevice, f.stream[0]));
    pthread_create(&filler, NULL, fill, NULL);
}

static void finish(void) {
    kvhostGateOpen(f.gate);
    pthread_join(filler, NULL);
    OK(f.error);
    CHECK(f.submitted == f.limit);
    OK(cudaDeviceSynchronize());
    kvhost_stats s = stats();
    for (int k = 0; k < 3; k++)
        for (int i = 0; i < 32; i++) CHECK(s.outstanding[k][i] == 0);
    CHECK(s.operations_pending == 0);
}

/* capacity WHAT STREAMS BATCH EXPECTED: calls that return before one blocks. */
static void capacity(int argc, char **argv) {
    CHECK(argc == 4);
    long expected = atol(argv[3]);
    int what = atoi(argv[0]), class = what == LAUNCH ? KVHOST_COMPUTE : KVHOST_H2D;
    start(what, atoi(argv[1]), atoi(argv[2]), expected + 50);
    UNTIL(waiting(class) || f.submitted == f.limit);
    long blocked_at = f.submitted;
    finish();
    if (blocked_at != expected) {
        fprintf(stderr, "blocked after %ld calls, not %ld\n", blocked_at, expected);
        _exit(1);
    }
}

/* Launches behind a kernel that runs on their own stream, as the depth was measured. */
static void behind_a_running_kernel(int argc, char **argv) {
    (void)argc, (void)argv;
    f.what = LAUNCH, f.streams = 1, f.limit = 1100;
    f.gate = kvhostGateCreate();
    f.stream[0] = new_stream();
    OK(kvhostGateLaunch(f.gate, f.stream[0]));
    UNTIL(kvhostGateReached(f.gate));
    pthread_create(&filler, NULL, fill, NULL);
    UNTIL(waiting(KVHOST_COMPUTE));
    CHECK(f.submitted == 1021);
    finish();
}

/* Depth 64: sixty-four copies, each behind a gate of its own, then more. Every opened gate lets one call return. */
static void one_slot_per_completion(int argc, char **argv) {
    (void)argc, (void)argv;
    kvhost_gate *gates[100];
    f.what = COPY, f.streams = 1, f.limit = 164;
    f.host = pinned(4096), f.device = device(4096);
    f.stream[0] = new_stream();
    for (int i = 0; i < 64; i++) {
        gates[i] = kvhostGateCreate();
        if (i < 30) OK(kvhostGateLaunch(gates[i], f.stream[0]));
        OK(submit(f.stream[0]));
    }
    pthread_create(&filler, NULL, fill, NULL);
    UNTIL(waiting(KVHOST_H2D));
    CHECK(f.submitted == 0);
    for (int i = 0; i < 29; i++) {
        kvhostGateOpen(gates[i]);
        UNTIL(f.submitted == i + 1 && waiting(KVHOST_H2D));
        CHECK(stats().copies_done == (uint64_t)i + 1);
    }
    f.gate = gates[29];
    finish();
}

/* Fence first: what fits returns before the fence ends, one call lasts to its end, the rest comes after. */
static void fence_first(int argc, char **argv) {
    (void)argc, (void)argv;
    OK(kvhostTraceStart(10000));
    start(COPY, 1, 0, 1500);
    UNTIL(waiting(KVHOST_H2D));
    uint64_t opened_ns = kvp_now_ns();
    finish();
    static kvhost_trace_record r[10000];
    uint64_t n = kvhostTraceRead(r, 0, 10000);
    int before = 0, across = 0, after = 0;
    for (uint64_t i = 0; i < n; i++) {
        if (strcmp(kvhostCallName(r[i].api), "cudaMemcpyAsync")) continue;
        if (r[i].end_ns < opened_ns) {
            before++;
            CHECK(r[i].queue_ns == 0);
        } else if (r[i].start_ns < opened_ns) {
            across++;
            CHECK(r[i].reason == KVHOST_QUEUE_FULL && r[i].queue_ns <= r[i].blocked_ns &&
                  r[i].blocked_ns <= r[i].end_ns - r[i].start_ns);
        } else {
            after++;
        }
        CHECK(r[i].executed == 1 && r[i].exec_start_ns >= opened_ns && r[i].exec_end_ns > r[i].exec_start_ns);
    }
    CHECK(before == 1021 && across == 1 && after == 1500 - 1022);
}

/* Two channels: streams 1 and 3 share one. What stream 1 cannot start holds stream 3 back, and not stream 2. */
static void false_dependency(int argc, char **argv) {
    (void)argc, (void)argv;
    kvhost_config config = {.copy_channels = 2};
    OK(kvhostReset(&config));
    char *host = pinned(64), *dev = device(64);
    cudaStream_t one = new_stream(), two = new_stream(), three = new_stream();
    kvhost_gate *gate = kvhostGateCreate();
    OK(kvhostGateLaunch(gate, one));
    OK(cudaMemcpyAsync(dev, host, 64, cudaMemcpyHostToDevice, one));
    OK(cudaMemcpyAsync(dev, host, 64, cudaMemcpyHostToDevice, three));
    OK(cudaMemcpyAsync(dev, host, 64, cudaMemcpyHostToDevice, two));
    OK(cudaStreamSynchronize(two));
    IS(cudaStreamQuery(three), cudaErrorNotReady);
    OK(kvhostLaunchDelay(three, 0)); /* another class: not behind stream 1's copy, but behind its own */
    IS(cudaStreamQuery(three), cudaErrorNotReady);
    kvhostGateOpen(gate);
    OK(cudaStreamSynchronize(three));
    OK(cudaStreamSynchronize(one));
}

/* A held-back copy starts when its channel lets it, not when it was submitted. */
static void held_back_copies_keep_their_service_time(int argc, char **argv) {
    (void)argc, (void)argv;
    kvhost_config config = {.copy_channels = 1};
    OK(kvhostReset(&config));
    char *host = pinned(4096), *dev = device(4096);
    cudaStream_t one = new_stream(), two = new_stream();
    kvhost_gate *gate = kvhostGateCreate();
    OK(kvhostTraceStart(100));
    OK(kvhostGateLaunch(gate, one));
    OK(cudaMemcpyAsync(dev, host, 4096, cudaMemcpyHostToDevice, one));
    for (int i = 0; i < 20; i++) OK(cudaMemcpyAsync(dev, host, 4096, cudaMemcpyHostToDevice, two));
    uint64_t opened_ns = kvhostNow();
    kvhostGateOpen(gate);
    OK(cudaDeviceSynchronize());
    kvhost_trace_record r[30];
    CHECK(kvhostTraceRead(r, 0, 30) >= 22);
    for (int i = 1; i < 22; i++) CHECK(r[i].exec_start_ns >= opened_ns);
    for (int i = 2; i < 22; i++) CHECK(r[i].exec_start_ns >= r[i - 1].exec_end_ns);
}

static const test_case cases[] = {
    {"capacity", capacity},
    {"behind_a_running_kernel", behind_a_running_kernel},
    {"one_slot_per_completion", one_slot_per_completion},
    {"fence_first", fence_first},
    {"false_dependency", false_dependency},
    {"held_back_copies_keep_their_service_time", held_back_copies_keep_their_service_time},
    {0},
};

int main(int argc, char **argv) { return run_case(cases, argc, argv); }
