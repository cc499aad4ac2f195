/* What a blocked submitter holds: which calls of other threads wait with it, and which go through. */
#include "test_hostrt.h"

static struct {
    char *host, *device;
    cudaStream_t full, other;
    cudaEvent_t recorded;
    kvhost_gate *gate;
    void *spare_device, *spare_host;
    _Atomic int error;
    uint64_t opened_ns;
} t;

static pthread_t submitter;
static void *submit_one_too_many(void *arg) {
    (void)arg;
    for (int i = 0; i < 1022 && !t.error; i++)
        t.error = cudaMemcpyAsync(t.device, t.host, 64, cudaMemcpyHostToDevice, t.full);
    return NULL;
}

static void block(void) {
    t.host = pinned(4096), t.device = device(4096);
    t.spare_host = pinned(64), t.spare_device = device(64);
    t.full = new_stream(), t.other = new_stream();
    t.recorded = new_event();
    t.gate = kvhostGateCreate();
    OK(cudaEventRecord(t.recorded, t.full));
    OK(kvhostGateLaunch(t.gate, t.full));
    OK(kvhostTraceStart(5000));
    pthread_create(&submitter, NULL, submit_one_too_many, NULL);
    UNTIL(waiting(KVHOST_H2D));
}

/* Every call below returns while the submitter stays blocked: the gate opens after them, or the alarm rings. */
static void go_through(int argc, char **argv) {
    (void)argc, (void)argv;
    cudaEvent_t e = new_event();
    block();
    void *p;
    OK(kvhostLaunchDelay(t.other, 1000));
    OK(cudaMemcpyAsync(t.device, t.host, 64, cudaMemcpyHostToDevice, t.other));
    OK(cudaMemcpyAsync(t.host, t.device, 64, cudaMemcpyDeviceToHost, t.other));
    OK(cudaEventRecord(e, t.other));
    OK(cudaEventQuery(t.recorded));
    OK(cudaStreamWaitEvent(t.other, t.recorded, 0));
    OK(cudaStreamSynchronize(t.other));
    OK(cudaStreamQuery(t.other));
    OK(cudaEventSynchronize(e));
    OK(cudaMallocAsync(&p, 64, t.other));
    OK(cudaFreeAsync(p, t.other));
    OK(cudaStreamSynchronize(t.other));
    OK(cudaMemcpy(t.device, t.host, 64, cudaMemcpyDefault));
    CHECK(waiting(KVHOST_H2D) == 1);
    kvhostGateOpen(t.gate);
    pthread_join(submitter, NULL);
    OK(t.error);
}

static const char *calls[] = {
    "cudaEventCreateWithFlags", "cudaStreamCreateWithFlags", "cudaMalloc",       "cudaHostAlloc",
    "cudaHostRegister",         "cudaStreamQuery",           "cudaMemcpyAsync",  "cudaEventRecord",
    "cudaStreamWaitEvent",      "cudaStreamSynchronize",     "kvhostLaunchDelay"};
#define CONTEXT_CALLS 5
#define CALLS 11

static void *call_one(void *arg) {
    static char page[4096];
    void *p;
    cudaStream_t s;
    cudaEvent_t e;
    switch ((int)(intptr_t)arg) {
    case 0:
        return (void *)(intptr_t)cudaEventCreateWithFlags(&e, 0);
    case 1:
        return (void *)(intptr_t)cudaStreamCreateWithFlags(&s, 1);
    case 2:
        return (void *)(intptr_t)cudaMalloc(&p, 64);
    case 3:
        return (void *)(intptr_t)cudaHostAlloc(&p, 64, 0);
    case 4:
        return (void *)(intptr_t)cudaHostRegister(page, sizeof page, 0);
    case 5:
        cudaStreamQuery(t.full);
        return NULL;
    case 6:
        return (void *)(intptr_t)cudaMemcpyAsync(t.device, t.host, 64, cudaMemcpyHostToDevice, t.full);
    case 7:
        return (void *)(intptr_t)cudaEventRecord(t.recorded, t.full);
    case 8:
        return (void *)(intptr_t)cudaStreamWaitEvent(t.full, t.recorded, 0);
    case 9:
        return (void *)(intptr_t)cudaStreamSynchronize(t.full);
    default:
        return (void *)(intptr_t)kvhostLaunchDelay(t.full, 0);
    }
}

static bool asleep(uint32_t tid) {
    char path[64], line[256] = "";
    snprintf(path, sizeof path, "/proc/self/task/%u/stat", tid);
    FILE *file = fopen(path, "r");
    if (!file) return false;
    char *read = fgets(line, sizeof line, file);
    fclose(file);
    char *end = read ? strrchr(line, ')') : NULL;
    return end && end[2] == 'S';
}

/* Every call that entered since `from` sleeps, seen five times running: none is merely on its way. */
static void all_asleep(uint64_t from, uint64_t count) {
    kvhost_trace_record r[CALLS];
    UNTIL(kvhostTraceRead(NULL, 0, 0) == from + count);
    CHECK(kvhostTraceRead(r, from, count) == count);
    for (int times = 0; times < 5; times++) {
        usleep(2000);
        for (uint64_t i = 0; i < count; i++)
            if (!asleep(r[i].tid)) times = -1, i = count;
    }
}

/* They enter while the submitter is blocked and return after the gate has opened, for the reason that they give. */
static void wait_with_it(int argc, char **argv) {
    (void)argc, (void)argv;
    block();
    static kvhost_trace_record r[5000];
    uint64_t before = kvhostTraceRead(NULL, 0, 0);
    pthread_t threads[CALLS];
    /* a stream query is not traced: it is told by not having returned */
    for (intptr_t i = 0; i < CALLS; i++) pthread_create(&threads[i], NULL, call_one, (void *)i);
    all_asleep(before, CALLS - 1);
    CHECK(pthread_tryjoin_np(threads[5], NULL) != 0);
    t.opened_ns = kvp_now_ns();
    kvhostGateOpen(t.gate);
    for (int i = 0; i < CALLS; i++) {
        void *result;
        pthread_join(threads[i], &result);
        CHECK(result == NULL);
    }
    pthread_join(submitter, NULL);
    OK(t.error);
    uint64_t n = kvhostTraceRead(r, 0, 5000);
    int seen = 0;
    for (uint64_t i = before; i < n; i++)
        for (int k = 0; k < CALLS; k++)
            if (!strcmp(kvhostCallName(r[i].api), calls[k])) {
                seen++;
                CHECK(r[i].start_ns < t.opened_ns && r[i].end_ns >= t.opened_ns && r[i].blocked_ns > 0);
                if (k < CONTEXT_CALLS) CHECK(r[i].reason == KVHOST_CONTEXT_LOCK);
                /* one that got its stream lock may then have waited for work too: synchronize, a full queue */
                if (k > CONTEXT_CALLS && k != 9 && k != 6 && k != 7) CHECK(r[i].reason == KVHOST_STREAM_LOCK);
            }
    CHECK(seen == CALLS - 1);
}

/* Frees wait for all work by themselves, so they too return after the gate. */
static void *free_device(void *arg) { return (void *)(intptr_t)cudaFree(arg); }
static void *free_host(void *arg) { return (void *)(intptr_t)cudaFreeHost(arg); }
static void frees_wait(int argc, char **argv) {
    (void)argc, (void)argv;
    block();
    uint64_t before = kvhostTraceRead(NULL, 0, 0);
    pthread_t a, b;
    void *result;
    pthread_create(&a, NULL, free_device, t.spare_device);
    pthread_create(&b, NULL, free_host, t.spare_host);
    all_asleep(before, 2);
    CHECK(pthread_tryjoin_np(a, NULL) && pthread_tryjoin_np(b, NULL));
    kvhostGateOpen(t.gate);
    pthread_join(a, &result);
    CHECK(!result);
    pthread_join(b, &result);
    CHECK(!result);
    pthread_join(submitter, NULL);
}

/* A full queue that drains does not starve who creates an event: each gets its turn while the flood goes on. */
enum { FLOOD = 1 << 18 }; /* bytes of a copy: it takes far longer than its submission, on a slow machine too */
static _Atomic bool enough;
static void *flood(void *arg) {
    (void)arg;
    while (!enough && !t.error) t.error = cudaMemcpyAsync(t.device, t.host, FLOOD, cudaMemcpyHostToDevice, t.full);
    return NULL;
}
static void creation_gets_its_turn(int argc, char **argv) {
    (void)argc, (void)argv;
    t.host = pinned(FLOOD), t.device = device(FLOOD), t.full = new_stream();
    pthread_create(&submitter, NULL, flood, NULL);
    UNTIL(stats().blocked_calls > 10);
    for (int i = 0; i < 50; i++) OK(cudaEventDestroy(new_event()));
    enough = true;
    pthread_join(submitter, NULL);
    OK(t.error);
}

static void lost_device_wakes(int argc, char **argv) {
    (void)argc, (void)argv;
    block();
    pthread_t creator, sync;
    void *result;
    pthread_create(&creator, NULL, call_one, (void *)0);
    pthread_create(&sync, NULL, call_one, (void *)9);
    UNTIL(kvhostTraceRead(NULL, 0, 0) == 1022 + 2);
    OK(kvhostLoseDevice());
    pthread_join(submitter, NULL);
    CHECK(t.error == cudaErrorDevicesUnavailable);
    pthread_join(creator, NULL); /* may have got its event or the error, but it returns */
    pthread_join(sync, &result);
    CHECK((intptr_t)result == cudaErrorDevicesUnavailable);
    IS(cudaStreamQuery(t.other), cudaErrorDevicesUnavailable);
    IS(cudaEventQuery(t.recorded), cudaErrorDevicesUnavailable);
    IS(cudaPeekAtLastError(), cudaErrorDevicesUnavailable);
    IS(cudaStreamDestroy(t.other), cudaErrorDevicesUnavailable);
    UNTIL(stats().operations_pending == 0);
    OK(kvhostReset(NULL));
    OK(cudaGetLastError());
    cudaStream_t s = new_stream();
    char *h = pinned(64), *d = device(64);
    OK(cudaMemcpyAsync(d, h, 64, cudaMemcpyHostToDevice, s));
    OK(cudaStreamSynchronize(s));
}

static void reset_wakes(int argc, char **argv) {
    (void)argc, (void)argv;
    block();
    cudaStream_t old = t.other;
    OK(kvhostReset(NULL));
    pthread_join(submitter, NULL);
    CHECK(t.error == cudaErrorDevicesUnavailable);
    IS(cudaStreamQuery(old), cudaErrorInvalidResourceHandle);
    IS(cudaEventQuery(t.recorded), cudaErrorInvalidResourceHandle);
    kvhostGateDestroy(t.gate);
}

static const test_case cases[] = {
    {"go_through", go_through},
    {"wait_with_it", wait_with_it},
    {"frees_wait", frees_wait},
    {"creation_gets_its_turn", creation_gets_its_turn},
    {"lost_device_wakes", lost_device_wakes},
    {"reset_wakes", reset_wakes},
    {0},
};

int main(int argc, char **argv) { return run_case(cases, argc, argv); }
