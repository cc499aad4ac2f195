/* Cost of one 4 KiB cudaMemcpyAsync, as a program sees it: gpu_copies [cupti] -> median and 10th percentile in ns, JSON.
 *
 * 200 rounds of 500 copies, synchronised between rounds so that the queue never fills; ns a call is a round's mean. With
 * `cupti` (compiled with -DWITH_CUPTI) a CUPTI callback on that one function takes two clock readings and writes one
 * record a call, which is what kvprobe's interposer does. */
#include <cuda_runtime_api.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#ifdef WITH_CUPTI
#include <cupti.h>
#endif

#define ROUNDS 200
#define CALLS 500

static uint64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static void check(int error, const char *what) {
    if (error) fprintf(stderr, "%s: error %d\n", what, error), exit(1);
}

#ifdef WITH_CUPTI
static struct {
    uint64_t start, end, bytes, stream;
} records[4096];
static uint64_t head, entered;

static void CUPTIAPI callback(void *user, CUpti_CallbackDomain domain, CUpti_CallbackId id, const void *data) {
    (void)user, (void)domain, (void)id;
    const CUpti_CallbackData *d = data;
    if (d->callbackSite == CUPTI_API_ENTER) {
        entered = now();
        return;
    }
    const cudaMemcpyAsync_v3020_params *p = d->functionParams;
    records[head % 4096].start = entered;
    records[head % 4096].end = now();
    records[head % 4096].bytes = p->count;
    records[head % 4096].stream = (uintptr_t)p->stream;
    head++;
}
#endif

static int compare(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

int main(int argc, char **argv) {
    void *device, *host;
    cudaStream_t stream;
    check(cudaMalloc(&device, 1 << 20), "cudaMalloc");
    check(cudaHostAlloc(&host, 1 << 20, 0), "cudaHostAlloc");
    check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
    if (argc > 1 && !strcmp(argv[1], "cupti")) {
#ifdef WITH_CUPTI
        CUpti_SubscriberHandle subscriber;
        check(cuptiSubscribe(&subscriber, callback, NULL), "cuptiSubscribe");
        check(cuptiEnableCallback(1, subscriber, CUPTI_CB_DOMAIN_RUNTIME_API,
                                  CUPTI_RUNTIME_TRACE_CBID_cudaMemcpyAsync_v3020), "cuptiEnableCallback");
#else
        return 3;
#endif
    }
    static double ns[ROUNDS];
    for (int round = -5; round < ROUNDS; round++) {
        uint64_t start = now();
        for (int i = 0; i < CALLS; i++)
            cudaMemcpyAsync((char *)device + 4096 * (i % 256), (char *)host + 4096 * (i % 256), 4096,
                            cudaMemcpyHostToDevice, stream);
        uint64_t end = now();
        check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
        if (round >= 0) ns[round] = (double)(end - start) / CALLS;
    }
    qsort(ns, ROUNDS, sizeof *ns, compare);
    printf("{\"calls\": %d, \"median_ns\": %.1f, \"p10_ns\": %.1f", ROUNDS * CALLS, ns[ROUNDS / 2], ns[ROUNDS / 10]);
#ifdef WITH_CUPTI
    printf(", \"seen\": %llu", (unsigned long long)head);
#endif
    printf("}\n");
    return 0;
}
