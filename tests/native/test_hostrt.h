/* What the C tests of the host runtime share: the CUDA functions that they call, checks, a submitting thread. */
#include "kvhost.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

cudaError_t cudaGetDeviceCount(int *), cudaMalloc(void **, size_t), cudaFree(void *),
    cudaHostAlloc(void **, size_t, unsigned), cudaFreeHost(void *), cudaHostRegister(void *, size_t, unsigned),
    cudaHostUnregister(void *), cudaMallocAsync(void **, size_t, cudaStream_t), cudaFreeAsync(void *, cudaStream_t),
    cudaMemcpy(void *, const void *, size_t, int), cudaMemcpyAsync(void *, const void *, size_t, int, cudaStream_t),
    cudaMemcpy2DAsync(void *, size_t, const void *, size_t, size_t, size_t, int, cudaStream_t),
    cudaMemsetAsync(void *, int, size_t, cudaStream_t), cudaStreamCreateWithFlags(cudaStream_t *, unsigned),
    cudaStreamDestroy(cudaStream_t), cudaStreamQuery(cudaStream_t), cudaStreamSynchronize(cudaStream_t),
    cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned), cudaEventCreateWithFlags(cudaEvent_t *, unsigned),
    cudaEventDestroy(cudaEvent_t), cudaEventRecord(cudaEvent_t, cudaStream_t), cudaEventQuery(cudaEvent_t),
    cudaEventSynchronize(cudaEvent_t), cudaEventElapsedTime(float *, cudaEvent_t, cudaEvent_t),
    cudaDeviceSynchronize(void), cudaLaunchHostFunc(cudaStream_t, void (*)(void *), void *), cudaGetLastError(void),
    cudaPeekAtLastError(void), cudaPointerGetAttributes(void *, const void *), cudaMemGetInfo(size_t *, size_t *);
cudaError_t cudaMemcpyBatchAsync(void *const *, const void *const *, const size_t *, size_t, kvp_memcpy_attributes *,
                                 size_t *, size_t, cudaStream_t);

#define CHECK(condition)                                                                                               \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition);                                    \
            _exit(1);                                                                                                  \
        }                                                                                                              \
    } while (0)
#define OK(call) IS(call, 0)
#define IS(call, code)                                                                                                 \
    do {                                                                                                               \
        int got = (call);                                                                                              \
        if (got != (code)) {                                                                                           \
            fprintf(stderr, "%s:%d: %s returned %d, not %d\n", __FILE__, __LINE__, #call, got, (code));                \
            _exit(1);                                                                                                  \
        }                                                                                                              \
    } while (0)

/* Waits for another thread's progress; the test's own alarm ends a wait that never does. */
#define UNTIL(condition)                                                                                               \
    while (!(condition)) usleep(200)

static inline kvhost_stats stats(void) {
    kvhost_stats s;
    OK(kvhostStats(&s));
    return s;
}

static inline unsigned waiting(int class) {
    kvhost_stats s = stats();
    unsigned n = 0;
    for (int i = 0; i < 32; i++) n += s.waiting[class][i];
    return n;
}

static inline cudaStream_t new_stream(void) {
    cudaStream_t s;
    OK(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
    return s;
}

static inline cudaEvent_t new_event(void) {
    cudaEvent_t e;
    OK(cudaEventCreateWithFlags(&e, 0));
    return e;
}

static inline void *device(size_t bytes) {
    void *p;
    OK(cudaMalloc(&p, bytes));
    return p;
}

static inline void *pinned(size_t bytes) {
    void *p;
    OK(cudaHostAlloc(&p, bytes, 0));
    return p;
}

typedef struct {
    const char *name;
    void (*run)(int, char **);
} test_case;

static inline int run_case(const test_case *cases, int argc, char **argv) {
    alarm(100); /* a call that should go through and does not would hang for ever */
    for (; cases->name; cases++)
        if (argc > 1 && !strcmp(cases->name, argv[1])) {
            cases->run(argc - 2, argv + 2);
            return 0;
        }
    fprintf(stderr, "no such case\n");
    return 2;
}
