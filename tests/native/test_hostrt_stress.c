/* Everything at once from several threads, built with a sanitizer: no race, no leak, no error, and the bytes right. */
#include "test_hostrt.h"

enum { THREADS = 4, BLOCKS = 16, BLOCK = 4096, H2D = cudaMemcpyHostToDevice, D2H = cudaMemcpyDeviceToHost };

static int rounds;
static _Atomic bool done;
static cudaEvent_t shared_event;

static void nothing(void *arg) { (*(int *)arg)++; }

static void *work(void *arg) {
    unsigned seed = (unsigned)(uintptr_t)arg * 7919u + 1;
    unsigned char *host = pinned(BLOCKS * BLOCK), *back = pinned(BLOCKS * BLOCK), *dev = device(BLOCKS * BLOCK);
    unsigned char pageable[256];
    cudaStream_t load = new_stream(), store = new_stream();
    cudaEvent_t loaded = new_event(), stored = new_event();
    int called = 0, expected = 0;
    for (int r = 0; r < rounds; r++) {
        for (int i = 0; i < BLOCKS * BLOCK; i += 64) host[i] = (unsigned char)rand_r(&seed);
        OK(cudaStreamWaitEvent(load, stored, 0));
        if (rand_r(&seed) % 2) {
            void *dsts[BLOCKS];
            const void *srcs[BLOCKS];
            size_t sizes[BLOCKS], zero = 0;
            kvp_memcpy_attributes attrs = {.srcAccessOrder = 1};
            for (int i = 0; i < BLOCKS; i++) dsts[i] = dev + i * BLOCK, srcs[i] = host + i * BLOCK, sizes[i] = BLOCK;
            OK(cudaMemcpyBatchAsync((void *const *)dsts, srcs, sizes, BLOCKS, &attrs, &zero, 1, load));
        } else {
            for (int i = 0; i < BLOCKS; i++) OK(cudaMemcpyAsync(dev + i * BLOCK, host + i * BLOCK, BLOCK, H2D, load));
        }
        OK(cudaEventRecord(loaded, load));
        OK(cudaStreamWaitEvent(store, loaded, 0));
        for (int i = 0; i < BLOCKS; i++) OK(cudaMemcpyAsync(back + i * BLOCK, dev + i * BLOCK, BLOCK, D2H, store));
        OK(kvhostLaunchWork(store, nothing, &called, rand_r(&seed) % 20000));
        OK(cudaLaunchHostFunc(store, nothing, &called));
        expected += 2;
        OK(cudaEventRecord(stored, store));
        OK(cudaEventRecord(shared_event, store));
        OK(cudaStreamWaitEvent(load, shared_event, 0));
        switch (rand_r(&seed) % 6) {
        case 0:
            OK(cudaEventDestroy(loaded));
            loaded = new_event();
            break;
        case 1:
            OK(cudaStreamDestroy(load)); /* with work pending */
            load = new_stream();
            break;
        case 2:
            OK(cudaFree(device(100)));
            break;
        case 3:
            memset(pageable, r, sizeof pageable);
            OK(cudaEventSynchronize(stored));
            CHECK(!memcmp(host, back, BLOCKS * BLOCK)); /* before the next copy changes the device's bytes */
            OK(cudaMemcpyAsync(dev, pageable, sizeof pageable, H2D, store));
            OK(cudaMemcpyAsync(pageable, dev, sizeof pageable, D2H, store));
            CHECK(pageable[255] == (unsigned char)r);
            OK(cudaEventRecord(stored, store));
            continue;
        case 4: {
            kvhost_gate *gate = kvhostGateCreate();
            OK(kvhostGateLaunch(gate, load));
            kvhostGateDestroy(gate);
            break;
        }
        default:
            cudaStreamQuery(load);
            cudaEventQuery(shared_event);
        }
        OK(cudaEventSynchronize(stored));
        CHECK(!memcmp(host, back, BLOCKS * BLOCK));
        CHECK(called == expected);
    }
    OK(cudaStreamSynchronize(store));
    OK(cudaStreamSynchronize(load));
    OK(cudaStreamDestroy(load));
    OK(cudaStreamDestroy(store));
    OK(cudaEventDestroy(loaded));
    OK(cudaEventDestroy(stored));
    OK(cudaFree(dev));
    OK(cudaFreeHost(host));
    OK(cudaFreeHost(back));
    return NULL;
}

static void *observe(void *arg) {
    (void)arg;
    static kvhost_trace_record r[1000];
    while (!done) {
        OK(kvhostTraceStart(1000));
        usleep(2000);
        stats();
        kvhostTraceRead(r, 0, 1000);
        OK(kvhostTraceStop());
    }
    return NULL;
}

static char *lost_host, *lost_device;
static cudaStream_t lost_stream[THREADS];
static void *until_error(void *arg) {
    cudaError_t error;
    while (!(error = cudaMemcpyAsync(lost_device, lost_host, 64, H2D, lost_stream[(intptr_t)arg]))) {
        cudaEvent_t e;
        if (!cudaEventCreateWithFlags(&e, 0)) cudaEventDestroy(e);
    }
    return (void *)(intptr_t)error;
}

int main(int argc, char **argv) {
    rounds = argc > 1 ? atoi(argv[1]) : 100;
    alarm(250);
    for (int pass = 0; pass < 3; pass++) {
        kvhost_config config = {.depth = pass ? 16 : 1021, .copy_channels = pass == 2 ? 1 : 4, .latency_ns = 200};
        OK(kvhostReset(&config));
        done = false;
        shared_event = new_event();
        pthread_t t[THREADS], observer;
        pthread_create(&observer, NULL, observe, NULL);
        for (intptr_t i = 0; i < THREADS; i++) pthread_create(&t[i], NULL, work, (void *)(i + 1));
        for (int i = 0; i < THREADS; i++) pthread_join(t[i], NULL);
        done = true;
        pthread_join(observer, NULL);
        OK(cudaDeviceSynchronize());
        kvhost_stats s = stats();
        CHECK(s.operations_pending == 0 && s.streams == 0 && s.events == 1 && s.device_bytes == 0);
        CHECK(s.copies_done == s.copies_submitted);
    }
    /* the device is lost under threads that submit, block and create */
    for (int i = 0; i < 4; i++) {
        kvhost_config config = {.depth = 8, .latency_ns = 50000}; /* slower than any submission */
        OK(kvhostReset(&config));
        pthread_t t[THREADS];
        lost_host = pinned(64), lost_device = device(64);
        for (int k = 0; k < THREADS; k++) lost_stream[k] = new_stream();
        for (intptr_t k = 0; k < THREADS; k++) pthread_create(&t[k], NULL, until_error, (void *)k);
        UNTIL(stats().blocked_calls > 50);
        if (i % 2)
            OK(kvhostLoseDevice());
        else
            OK(kvhostFailExecution(1, cudaErrorLaunchFailure));
        for (int k = 0; k < THREADS; k++) {
            void *error;
            pthread_join(t[k], &error);
            CHECK((intptr_t)error == (i % 2 ? cudaErrorDevicesUnavailable : cudaErrorLaunchFailure));
        }
    }
    /* it is torn down while their calls are anywhere */
    for (int i = 0; i < 15 * rounds; i++) {
        kvhost_config config = {.latency_ns = 1000};
        OK(kvhostReset(&config));
        pthread_t t[THREADS];
        lost_host = pinned(64), lost_device = device(64);
        for (int k = 0; k < THREADS; k++) lost_stream[k] = new_stream();
        for (intptr_t k = 0; k < THREADS; k++) pthread_create(&t[k], NULL, until_error, (void *)k);
        usleep((useconds_t)(i * 37 % 500));
        OK(kvhostReset(&config));
        for (int k = 0; k < THREADS; k++) pthread_join(t[k], NULL);
    }
    OK(kvhostReset(NULL));
    puts("done");
    return 0;
}
