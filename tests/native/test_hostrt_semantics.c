/* What the host runtime promises about order, memory, events and errors. */
#include "test_hostrt.h"

#include <dirent.h>
#include <dlfcn.h>
#include <sys/mman.h>
#include <sys/wait.h>

enum { H2D = cudaMemcpyHostToDevice, D2H = cudaMemcpyDeviceToHost, D2D = cudaMemcpyDeviceToDevice };

static void set_byte(void *p) { *(char *)p = 'w'; }

static void work_then_copy(int argc, char **argv) {
    (void)argc, (void)argv;
    char *dev = device(64), *host = pinned(64);
    cudaStream_t compute = new_stream(), store = new_stream();
    cudaEvent_t written = new_event();
    kvhost_gate *gate = kvhostGateCreate(); /* so that the work is not over before the look at it */
    OK(cudaMemsetAsync(dev, 'm', 64, compute));
    OK(kvhostGateLaunch(gate, compute));
    OK(kvhostLaunchWork(compute, set_byte, dev, 2000000));
    OK(cudaEventRecord(written, compute));
    OK(cudaStreamWaitEvent(store, written, 0));
    OK(cudaMemcpyAsync(host, dev, 64, D2H, store));
    IS(cudaStreamQuery(store), cudaErrorNotReady);
    kvhostGateOpen(gate);
    OK(cudaStreamSynchronize(store));
    CHECK(host[0] == 'w' && host[1] == 'm' && host[63] == 'm');
}

static void events(int argc, char **argv) {
    (void)argc, (void)argv;
    cudaStream_t a = new_stream(), b = new_stream(), c = new_stream();
    cudaEvent_t never = new_event(), e = new_event(), from = new_event(), to = new_event(), untimed;
    OK(cudaEventCreateWithFlags(&untimed, cudaEventDisableTiming));
    float ms;
    /* never recorded: complete, and nothing waits for it */
    OK(cudaEventQuery(never));
    OK(cudaEventSynchronize(never));
    OK(cudaStreamWaitEvent(a, never, 0));
    OK(cudaStreamQuery(a));
    IS(cudaEventElapsedTime(&ms, never, never), cudaErrorInvalidResourceHandle);
    /* a wait means the record before it, whatever is recorded afterwards, and in whatever order those end */
    kvhost_gate *first = kvhostGateCreate(), *second = kvhostGateCreate();
    OK(kvhostGateLaunch(first, a));
    OK(cudaEventRecord(e, a));
    OK(cudaStreamWaitEvent(c, e, 0));
    OK(kvhostGateLaunch(second, b));
    OK(cudaEventRecord(e, b));
    IS(cudaEventQuery(e), cudaErrorNotReady);
    kvhostGateOpen(second);
    OK(cudaEventSynchronize(e));
    IS(cudaStreamQuery(c), cudaErrorNotReady);
    kvhostGateOpen(first);
    OK(cudaStreamSynchronize(c));
    /* an event may go while somebody waits for its record */
    kvhost_gate *third = kvhostGateCreate();
    OK(kvhostGateLaunch(third, a));
    OK(cudaEventRecord(e, a));
    OK(cudaStreamWaitEvent(c, e, 0));
    OK(cudaEventDestroy(e));
    IS(cudaEventQuery(e), cudaErrorInvalidResourceHandle);
    IS(cudaStreamQuery(c), cudaErrorNotReady);
    kvhostGateOpen(third);
    OK(cudaStreamSynchronize(c));
    /* timing */
    kvhost_gate *timed = kvhostGateCreate();
    OK(cudaEventRecord(from, a));
    OK(kvhostGateLaunch(timed, a));
    OK(kvhostLaunchDelay(a, 3000000));
    OK(cudaEventRecord(to, a));
    IS(cudaEventElapsedTime(&ms, from, to), cudaErrorNotReady);
    kvhostGateOpen(timed);
    OK(cudaEventSynchronize(to));
    OK(cudaEventElapsedTime(&ms, from, to));
    CHECK(ms >= 3.0f);
    OK(cudaEventRecord(untimed, a));
    OK(cudaEventSynchronize(untimed));
    IS(cudaEventElapsedTime(&ms, from, untimed), cudaErrorInvalidResourceHandle);
    /* a wait alone keeps a stream busy */
    kvhost_gate *fourth = kvhostGateCreate();
    OK(kvhostGateLaunch(fourth, a));
    OK(cudaEventRecord(from, a));
    OK(cudaStreamWaitEvent(b, from, 0));
    IS(cudaStreamQuery(b), cudaErrorNotReady);
    /* and a stream that is destroyed finishes its work */
    OK(cudaStreamDestroy(a));
    IS(cudaStreamQuery(a), cudaErrorInvalidResourceHandle);
    kvhostGateOpen(fourth);
    OK(cudaStreamSynchronize(b));
    OK(cudaEventQuery(from));
}

static void delays_of_streams_overlap(int argc, char **argv) {
    (void)argc, (void)argv;
    OK(kvhostTraceStart(100));
    cudaStream_t s[4];
    for (int i = 0; i < 4; i++) s[i] = new_stream();
    for (int i = 0; i < 4; i++) OK(kvhostLaunchDelay(s[i], 30000000));
    OK(kvhostLaunchDelay(s[0], 1000));
    OK(cudaDeviceSynchronize());
    kvhost_trace_record r[16];
    uint64_t n = kvhostTraceRead(r, 0, 16), last_start = 0, first_end = UINT64_MAX;
    CHECK(n == 10);
    for (int i = 4; i < 8; i++) {
        CHECK(r[i].exec_end_ns - r[i].exec_start_ns == 30000000);
        if (r[i].exec_start_ns > last_start) last_start = r[i].exec_start_ns;
        if (r[i].exec_end_ns < first_end) first_end = r[i].exec_end_ns;
    }
    CHECK(last_start < first_end);
    CHECK(r[8].exec_start_ns == r[4].exec_end_ns);
}

static void pageable(int argc, char **argv) {
    (void)argc, (void)argv;
    enum { SMALL = 4096, LARGE = 4 << 20 };
    char *host = malloc(LARGE), *dev = device(LARGE), *pin = pinned(SMALL);
    cudaStream_t s = new_stream();
    kvhost_gate *gate = kvhostGateCreate();
    OK(kvhostGateLaunch(gate, s));
    memset(host, 'a', SMALL);
    OK(cudaMemcpyAsync(dev, host, SMALL, H2D, s)); /* staged: returns, and the source may change */
    memset(host, 'b', SMALL);
    IS(cudaStreamQuery(s), cudaErrorNotReady);
    kvhostGateOpen(gate);
    OK(cudaMemcpyAsync(pin, dev, SMALL, D2H, s));
    OK(cudaStreamSynchronize(s));
    CHECK(pin[0] == 'a' && pin[SMALL - 1] == 'a');
    /* to pageable memory: complete on return */
    OK(kvhostLaunchDelay(s, 2000000));
    OK(kvhostTraceStart(10));
    OK(cudaMemcpyAsync(host, dev, SMALL, D2H, s));
    CHECK(host[0] == 'a' && host[SMALL - 1] == 'a');
    OK(cudaStreamQuery(s));
    kvhost_trace_record r;
    CHECK(kvhostTraceRead(&r, 0, 1) == 1);
    CHECK(r.memory == KVP_MEM_PAGEABLE && r.direction == KVP_D2H);
    if (kvhostIsVirtual()) /* else the delay may be over before a busy machine comes to the copy */
        CHECK(r.reason == KVHOST_PAGEABLE && r.blocked_ns == 2000000 - 2 * 1000 + 2000 + SMALL / 4);
    /* more than the staging memory holds: complete on return */
    memset(host, 'c', LARGE);
    OK(cudaMemcpyAsync(dev, host, LARGE, H2D, s));
    OK(cudaStreamQuery(s));
    CHECK(dev[LARGE - 1] == 'c');
    /* registered memory is pinned: the copy waits for its stream, its caller does not */
    void *page = mmap(NULL, SMALL, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    OK(cudaHostRegister(page, SMALL, 0));
    gate = kvhostGateCreate();
    OK(kvhostGateLaunch(gate, s));
    OK(cudaMemcpyAsync(page, dev, SMALL, D2H, s));
    CHECK(*(char *)page == 0);
    kvhostGateOpen(gate);
    OK(cudaStreamSynchronize(s));
    CHECK(*(char *)page == 'c');
    OK(cudaHostUnregister(page));
}

static void memory(int argc, char **argv) {
    (void)argc, (void)argv;
    kvhost_config config = {.memory_bytes = 1 << 20, .pinned_bytes = 1 << 20};
    OK(kvhostReset(&config));
    void *p;
    size_t free_bytes, total;
    char *dev = device(100000), *host = pinned(100000);
    OK(cudaMemGetInfo(&free_bytes, &total));
    CHECK(total == 1 << 20 && free_bytes == total - 100000);
    IS(cudaMalloc(&p, 1 << 20), cudaErrorMemoryAllocation);
    IS(cudaHostAlloc(&p, 1 << 20, 0), cudaErrorMemoryAllocation);
    struct {
        int type, device;
        void *d, *h;
        long reserved[8];
    } a;
    OK(cudaPointerGetAttributes(&a, dev + 10));
    CHECK(a.type == 2 && a.device == 0 && a.d == dev + 10);
    OK(cudaPointerGetAttributes(&a, host + 10));
    CHECK(a.type == 1 && a.h == host + 10);
    OK(cudaPointerGetAttributes(&a, &a));
    CHECK(a.type == 0);
    IS(cudaMemcpyAsync(dev, host, 100001, H2D, 0), cudaErrorInvalidValue); /* past the end */
    IS(cudaMemcpyAsync(dev + 1, host, 100000, H2D, 0), cudaErrorInvalidValue);
    IS(cudaMemcpyAsync(dev - 1, host, 1, H2D, 0), cudaErrorInvalidValue);
    IS(cudaMemcpyAsync(dev, host, 1, D2H, 0), cudaErrorInvalidValue); /* the wrong way round */
    IS(cudaMemcpyAsync(dev, host, 1, 7, 0), cudaErrorInvalidValue);
    IS(cudaMemcpyAsync(dev, NULL, 1, H2D, 0), cudaErrorInvalidValue);
    IS(cudaGetLastError(), cudaErrorInvalidValue);
    OK(cudaGetLastError());
    OK(cudaMemcpyAsync(dev, host, 0, H2D, 0));
    char *rows = device(64 * 16);
    for (int i = 0; i < 16 * 16; i++) host[i] = (char)i;
    OK(cudaMemcpy2DAsync(rows + 4, 64, host, 16, 16, 16, H2D, 0));
    OK(cudaStreamSynchronize(0));
    for (int y = 0; y < 16; y++) CHECK(!memcmp(rows + 4 + 64 * y, host + 16 * y, 16) && rows[64 * y + 20] == 0);
    IS(cudaMemcpy2DAsync(rows + 4, 64, host, 16, 16, 17, H2D, 0), cudaErrorInvalidValue);
    OK(cudaFree(rows));
    OK(cudaFree(dev));
    IS(cudaMemcpyAsync(dev, host, 1, H2D, 0), cudaErrorInvalidValue);
    IS(cudaMemcpyAsync(dev, host, 1, cudaMemcpyDefault, 0), cudaErrorInvalidValue);
    IS(cudaMemcpyAsync(host, dev, 1, cudaMemcpyDefault, 0), cudaErrorInvalidValue);
    IS(cudaFree(dev), cudaErrorInvalidValue);
    IS(cudaHostRegister(host + 8, 8, 0), 712);
    IS(cudaHostUnregister(host), 713);
    OK(cudaFreeHost(host));
    /* freed in stream order: refused at once, gone later, the address not reused before */
    cudaStream_t s = new_stream();
    kvhost_gate *gate = kvhostGateCreate();
    host = pinned(64);
    OK(cudaMallocAsync(&p, 600000, s));
    OK(kvhostGateLaunch(gate, s));
    OK(cudaMemcpyAsync(p, host, 64, H2D, s));
    OK(cudaFreeAsync(p, s));
    IS(cudaMemcpyAsync(p, host, 64, cudaMemcpyDefault, s), cudaErrorInvalidValue);
    IS(cudaFreeAsync(p, s), cudaErrorInvalidValue);
    CHECK(stats().device_bytes == 600000);
    kvhostGateOpen(gate);
    OK(cudaStreamSynchronize(s));
    CHECK(stats().device_bytes == 0);
    for (int i = 0; i < 300; i++) OK(cudaFree(device(900000))); /* the range goes round */
}

static void errors(int argc, char **argv) {
    (void)argc, (void)argv;
    char *dev = device(64), *host = pinned(64);
    cudaStream_t s = new_stream();
    cudaEvent_t e;
    OK(kvhostFailCopy(3, cudaErrorIllegalAddress));
    OK(cudaMemcpyAsync(dev, host, 64, H2D, s));
    OK(cudaMemcpyAsync(dev, host, 64, H2D, s));
    IS(cudaMemcpyAsync(dev, host, 64, H2D, s), cudaErrorIllegalAddress);
    OK(cudaMemcpyAsync(dev, host, 64, H2D, s));
    OK(cudaStreamSynchronize(s));
    CHECK(stats().copies_submitted == 3 && stats().copies_done == 3);
    OK(kvhostFailCall("cudaEventCreateWithFlags", 2, cudaErrorMemoryAllocation));
    OK(cudaEventCreateWithFlags(&e, 0));
    IS(cudaEventCreateWithFlags(&e, 0), cudaErrorMemoryAllocation);
    OK(cudaEventCreateWithFlags(&e, 0));
    IS(kvhostFailCall("cudaNothing", 1, 1), cudaErrorInvalidValue);
    IS(kvhostLaunchDelay((cudaStream_t)0xdead0, 1), cudaErrorInvalidResourceHandle);
    OK(cudaMemsetAsync(dev, 0, 64, s));
    OK(cudaStreamSynchronize(s));
    /* asynchronous: reported later, by everything, until the reset */
    kvhost_gate *gate = kvhostGateCreate();
    OK(kvhostGateLaunch(gate, s));
    memset(host, 'x', 64);
    OK(kvhostFailExecution(2, cudaErrorLaunchFailure));
    OK(cudaMemcpyAsync(dev, host, 32, H2D, s));
    OK(cudaMemcpyAsync(dev + 32, host, 32, H2D, s));
    OK(cudaEventRecord(e, s));
    IS(cudaEventQuery(e), cudaErrorNotReady);
    kvhostGateOpen(gate);
    IS(cudaStreamSynchronize(s), cudaErrorLaunchFailure);
    CHECK(dev[0] == 'x' && dev[32] == 0);
    IS(cudaEventQuery(e), cudaErrorLaunchFailure);
    IS(cudaMemcpyAsync(dev, host, 64, H2D, s), cudaErrorLaunchFailure);
    IS(cudaStreamCreateWithFlags(&s, 1), cudaErrorLaunchFailure);
    IS(cudaGetLastError(), cudaErrorLaunchFailure);
    IS(cudaGetLastError(), cudaErrorLaunchFailure);
    OK(kvhostReset(NULL));
    OK(cudaStreamCreateWithFlags(&s, 1));
}

static int threads(void) {
    int n = 0;
    DIR *d = opendir("/proc/self/task");
    for (struct dirent *e; (e = readdir(d));) n += e->d_name[0] != '.';
    closedir(d);
    return n;
}

static void reset(int argc, char **argv) {
    (void)argc, (void)argv;
    CHECK(threads() == 1);
    cudaStream_t s = new_stream();
    int running = threads();
    CHECK(running > 1);
    kvhost_config config = {.depth = 77, .copy_channels = 3, .h2d_bytes_per_s = 1e9, .latency_ns = -1}, now;
    OK(kvhostReset(NULL)); /* nothing created or submitted yet in this one: may be configured */
    OK(kvhostConfigure(&config));
    OK(kvhostGetConfig(&now));
    CHECK(now.depth == 77 && now.copy_channels == 3 && now.h2d_bytes_per_s == 1e9 && now.d2h_bytes_per_s == 4e9);
    IS(cudaStreamQuery(s), cudaErrorInvalidResourceHandle);
    s = new_stream();
    IS(kvhostConfigure(&config), cudaErrorNotSupported);
    for (int i = 0; i < 20; i++) {
        OK(kvhostLaunchDelay(s, 60000000000u)); /* a minute of work is not waited for */
        OK(kvhostReset(NULL));
        s = new_stream();
    }
    UNTIL(threads() == running); /* one that was joined may still be listed */
}

static void *block_for_ever(void *arg) {
    for (int i = 0; i < 1022; i++) kvhostLaunchDelay(arg, 0);
    return NULL;
}

static void fork_afresh(int argc, char **argv) {
    (void)argc, (void)argv;
    char *host = pinned(64), *dev = device(64);
    cudaStream_t s = new_stream();
    cudaEvent_t e = new_event();
    kvhost_gate *gate = kvhostGateCreate();
    OK(kvhostGateLaunch(gate, s));
    OK(cudaEventRecord(e, s));
    pthread_t t;
    pthread_create(&t, NULL, block_for_ever, s);
    UNTIL(waiting(KVHOST_COMPUTE));
    for (int i = 0; i < 20; i++) {
        pid_t child = fork();
        if (!child) {
            alarm(50);
            IS(cudaStreamQuery(s), cudaErrorInvalidResourceHandle);
            IS(cudaEventQuery(e), cudaErrorInvalidResourceHandle);
            IS(cudaMemcpyAsync(dev, host, 64, H2D, 0), cudaErrorInvalidValue);
            char *h = pinned(64), *d = device(64);
            cudaStream_t mine = new_stream();
            h[5] = 'f';
            OK(cudaMemcpyAsync(d, h, 64, H2D, mine));
            OK(cudaStreamSynchronize(mine));
            CHECK(d[5] == 'f');
            OK(kvhostReset(NULL));
            _exit(0);
        }
        int status;
        CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
    }
    kvhostGateOpen(gate);
    pthread_join(t, NULL);
    OK(cudaStreamSynchronize(s));
    OK(cudaEventQuery(e));
}

static _Atomic int flag;
static void wait_for_flag(void *arg) {
    (void)arg;
    while (!flag) usleep(200);
}
static void raise_flag(void *arg) { *(_Atomic int *)arg = 1; }

static void host_functions(int argc, char **argv) {
    (void)argc, (void)argv;
    static _Atomic int later;
    cudaStream_t a = new_stream(), b = new_stream();
    OK(cudaLaunchHostFunc(a, wait_for_flag, NULL));
    OK(cudaLaunchHostFunc(a, raise_flag, &later));
    IS(cudaStreamQuery(a), cudaErrorNotReady);
    OK(cudaLaunchHostFunc(b, raise_flag, &flag)); /* another stream's is not held up */
    OK(cudaStreamSynchronize(b));
    OK(cudaStreamSynchronize(a));
    CHECK(later == 1);
}

static void driver(int argc, char **argv) {
    bool old = argc > 0 && !strcmp(argv[0], "12");
    void *lib = RTLD_DEFAULT;
    int (*get)(const char *, void **, int, uint64_t, int *);
    get = (int (*)(const char *, void **, int, uint64_t, int *))dlsym(lib, "cuGetProcAddress_v2");
    void *v1, *v2, *none;
    int status;
    OK(get("cuMemcpyBatchAsync", &v1, 12080, 0, &status));
    OK(get("cuMemcpyBatchAsync", &v2, 13000, 0, &status));
    CHECK(status == 0 && v1 == dlsym(lib, "cuMemcpyBatchAsync") && v2 == dlsym(lib, "cuMemcpyBatchAsync_v2"));
    IS(get("cuMemcpyBatchAsync", &none, 12000, 0, &status), 500);
    CHECK(status == 2 && !none);
    IS(get("cuNothing", &none, 13000, 0, &status), 500);
    CHECK(status == 1);
    OK(get("cuMemcpyHtoDAsync", &none, 13000, 0, NULL));
    CHECK(none == dlsym(lib, "cuMemcpyHtoDAsync_v2"));
    int (*entry)(const char *, void **, unsigned, uint64_t, int *) =
        (int (*)(const char *, void **, unsigned, uint64_t, int *))dlsym(lib, "cudaGetDriverEntryPointByVersion");
    OK(entry("cuMemcpyBatchAsync", &none, 12090, 0, &status));
    CHECK(none == v1 && status == 0);
    OK(entry("cuNothing", &none, 12090, 0, &status));
    CHECK(none == NULL && status == 1);

    enum { N = 100 };
    char *host = pinned(N * 64), *dev = device(N * 64), *back = pinned(N * 64);
    void *dsts[N];
    const void *srcs[N];
    size_t sizes[N], zero = 0, fail = 7;
    kvp_memcpy_attributes attrs = {.srcAccessOrder = 1};
    cudaStream_t s = new_stream();
    for (int i = 0; i < N * 64; i++) host[i] = (char)(i * 7);
    for (int i = 0; i < N; i++) dsts[i] = dev + 64 * ((i * 37) % N), srcs[i] = host + 64 * i, sizes[i] = 64;
    int (*batch1)(void **, const void **, size_t *, size_t, void *, size_t *, size_t, size_t *, cudaStream_t);
    int (*batch2)(void **, const void **, size_t *, size_t, void *, size_t *, size_t, cudaStream_t);
    *(void **)&batch1 = v1;
    *(void **)&batch2 = v2;
    OK(batch1(dsts, srcs, sizes, N, &attrs, &zero, 1, &fail, s));
    for (int i = 0; i < N; i++) srcs[i] = dsts[i], dsts[i] = back + 64 * i;
    OK(batch2(dsts, srcs, sizes, N, &attrs, &zero, 1, s));
    OK(cudaStreamSynchronize(s));
    CHECK(!memcmp(host, back, N * 64));
    memset(back, 0, N * 64);
    if (old) {
        int (*runtime)(void **, const void **, size_t *, size_t, void *, size_t *, size_t, size_t *, cudaStream_t);
        *(void **)&runtime = dlsym(lib, "cudaMemcpyBatchAsync");
        OK(runtime(dsts, srcs, sizes, N, &attrs, &zero, 1, &fail, s));
        IS(runtime(dsts, srcs, sizes, N, &attrs, &zero, 1, &fail, NULL), cudaErrorInvalidValue);
        CHECK(fail == SIZE_MAX);
    } else {
        OK(cudaMemcpyBatchAsync((void *const *)dsts, srcs, sizes, N, &attrs, &zero, 1, s));
        IS(cudaMemcpyBatchAsync((void *const *)dsts, srcs, sizes, N, &attrs, &zero, 1, NULL), cudaErrorInvalidValue);
        IS(cudaMemcpyBatchAsync((void *const *)dsts, srcs, sizes, N, &attrs, &zero, 0, s), cudaErrorInvalidValue);
        sizes[N - 1] = 65; /* past the end of the allocation: all of it is refused */
        srcs[N - 1] = dev + N * 64 - 64;
        IS(cudaMemcpyBatchAsync((void *const *)dsts, srcs, sizes, N, &attrs, &zero, 1, s), cudaErrorInvalidValue);
    }
    OK(cudaStreamSynchronize(s));
    CHECK(!memcmp(host, back, N * 64));
}

/* One correlation a call, executions that follow their submission, and a batch's chunks all accounted for. */
static void trace(int argc, char **argv) {
    (void)argc, (void)argv;
    char *host = pinned(100 * 64), *dev = device(100 * 64);
    cudaStream_t s = new_stream();
    void *dsts[100];
    const void *srcs[100];
    size_t sizes[100], zero = 0;
    kvp_memcpy_attributes attrs = {.srcAccessOrder = 1};
    for (int i = 0; i < 100; i++) dsts[i] = dev + 64 * i, srcs[i] = host + 64 * i, sizes[i] = 64;
    OK(kvhostTraceStart(4));
    OK(cudaMemcpyAsync(dev, host, 64, H2D, s));
    uint64_t first = kvhostLastCorrelation();
    OK(cudaMemcpyBatchAsync((void *const *)dsts, srcs, sizes, 100, &attrs, &zero, 1, s));
    uint64_t second = kvhostLastCorrelation();
    OK(cudaStreamSynchronize(s));
    OK(cudaEventDestroy(new_event()));
    OK(kvhostTraceStop());
    OK(cudaMemcpyAsync(dev, host, 64, H2D, s));
    kvhost_trace_record r[5];
    CHECK(kvhostTraceRead(r, 0, 5) == 4 && kvhostTraceDropped() == 1);
    CHECK(first && second > first && r[0].correlation == first && r[1].correlation == second && !r[2].correlation);
    CHECK(r[0].call == KVP_CALL_cudaMemcpyAsync && r[1].call == KVP_CALL_cudaMemcpyBatchAsync && r[2].call == KVP_CALL_cudaStreamSynchronize && r[3].call == KVP_CALL_cudaEventCreate);
    CHECK(r[1].count == 100 && r[1].bytes == 6400 && r[1].chunks == 5 && r[1].executed == 5);
    CHECK(r[0].stream == (uint64_t)(uintptr_t)s && r[0].stream_number == 1 && r[0].tid == (uint32_t)getpid());
    for (int i = 0; i < 4; i++) CHECK(r[i].sequence == (uint64_t)i && r[i].end_ns >= r[i].start_ns);
    for (int i = 0; i < 2; i++) CHECK(r[i].exec_start_ns >= r[i].start_ns && r[i].exec_end_ns > r[i].exec_start_ns);
    CHECK(r[1].exec_start_ns >= r[0].exec_end_ns);
}

int cudaStreamBeginCapture(cudaStream_t, int), cudaStreamEndCapture(cudaStream_t, void **),
    cudaStreamIsCapturing(cudaStream_t, int *), cudaThreadExchangeStreamCaptureMode(int *);

static void *ask(void *event) { return (void *)(intptr_t)cudaEventQuery(event); }
static void *ask_relaxed(void *event) {
    int mode = 2;
    OK(cudaThreadExchangeStreamCaptureMode(&mode));
    CHECK(mode == 0);
    return ask(event);
}
static int from_thread(void *(*function)(void *), void *event) {
    pthread_t thread;
    void *result;
    pthread_create(&thread, NULL, function, event);
    pthread_join(thread, &result);
    return (int)(intptr_t)result;
}

static void capture(int argc, char **argv) {
    (void)argc, (void)argv;
    enum { GLOBAL, THREAD_LOCAL, RELAXED };
    char *dev = device(64), *host = pinned(64);
    cudaStream_t s = new_stream(), blocking;
    cudaEvent_t e = new_event(), inside = new_event();
    void *graph, *memory;
    int is;
    OK(cudaStreamCreateWithFlags(&blocking, 0));
    memset(dev, 'a', 64);
    memset(host, 'b', 64);
    OK(cudaEventRecord(e, blocking));
    OK(cudaStreamBeginCapture(s, GLOBAL));
    IS(cudaStreamBeginCapture(s, GLOBAL), 401);
    OK(cudaMemcpyAsync(dev, host, 64, H2D, s)); /* not executed */
    OK(cudaEventRecord(inside, s));
    OK(cudaStreamIsCapturing(NULL, &is));
    CHECK(!is && !from_thread(ask_relaxed, e) && from_thread(ask_relaxed, inside) == 907);
    OK(cudaStreamEndCapture(s, &graph));
    OK(cudaDeviceSynchronize());
    CHECK(graph && dev[0] == 'a');
    /* global: nobody may */
    OK(cudaStreamBeginCapture(s, GLOBAL));
    CHECK(from_thread(ask, e) == 900);
    OK(cudaStreamIsCapturing(s, &is));
    CHECK(is == 2);
    IS(cudaMemcpyAsync(dev, host, 64, H2D, s), 901);
    IS(cudaStreamEndCapture(s, &graph), 901);
    /* the thread's own: others may */
    OK(cudaStreamBeginCapture(s, THREAD_LOCAL));
    CHECK(!from_thread(ask, e));
    IS(cudaMalloc(&memory, 64), 900);
    IS(cudaStreamEndCapture(s, &graph), 901);
    OK(cudaStreamBeginCapture(s, RELAXED));
    OK(cudaMalloc(&memory, 64));
    IS(cudaStreamSynchronize(s), 900); /* what cannot be */
    IS(cudaStreamEndCapture(s, &graph), 901);
    OK(cudaStreamBeginCapture(s, RELAXED));
    IS(cudaStreamWaitEvent(s, e, 0), 905);
    IS(cudaStreamEndCapture(s, &graph), 901);
    /* the legacy default stream waits for a blocking one */
    OK(cudaStreamBeginCapture(blocking, RELAXED));
    IS(cudaStreamIsCapturing(NULL, &is), 906);
    IS(cudaMemcpyAsync(dev, host, 64, H2D, NULL), 906);
    IS(cudaStreamEndCapture(blocking, &graph), 901);
    OK(cudaStreamBeginCapture(s, GLOBAL));
    OK(cudaStreamDestroy(s));
    OK(cudaDeviceSynchronize());
}

static const test_case cases[] = {
    {"work_then_copy", work_then_copy},
    {"events", events},
    {"delays_of_streams_overlap", delays_of_streams_overlap},
    {"pageable", pageable},
    {"memory", memory},
    {"errors", errors},
    {"reset", reset},
    {"fork_afresh", fork_afresh},
    {"host_functions", host_functions},
    {"driver", driver},
    {"trace", trace},
    {"capture", capture},
    {0},
};

int main(int argc, char **argv) { return run_case(cases, argc, argv); }
