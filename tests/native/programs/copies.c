/* A program that knows nothing of kvprobe: copies in every way that programs reach CUDA, and counts for itself.
 *
 *   copies VIA CALLS THREADS PROCESSES [fork|exec|kill]
 *
 * VIA: link, loads (linked, all one direction, which the host runtime takes soonest), dlsym, driver (cuGetProcAddress),
 * entry (cudaGetDriverEntryPointByVersion), waits (the driver's copies that wait), trims (of a memory pool), batch,
 * sync, mixed. fork: each process forks in the middle of its calls, and both go on. kill: counts in the file $COUNTS,
 * until killed. Prints "name calls copies bytes" of what it did, all processes together. */
#define _GNU_SOURCE
#include "kvp_cuda.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

cudaError_t cudaMemcpyAsync(void *, const void *, size_t, int, cudaStream_t);
cudaError_t cudaMemcpy(void *, const void *, size_t, int);
cudaError_t cudaMemcpy2D(void *, size_t, const void *, size_t, size_t, size_t, int);
cudaError_t cudaMemcpyBatchAsync(void **, void **, size_t *, size_t, kvp_memcpy_attributes *, size_t *, size_t,
                                 cudaStream_t);
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *, unsigned, int);
cudaError_t cudaStreamSynchronize(cudaStream_t);
cudaError_t cudaMalloc(void **, size_t);
cudaError_t cudaHostAlloc(void **, size_t, unsigned);
cudaError_t cudaDeviceGetDefaultMemPool(void **, int);
cudaError_t cudaMemPoolTrimTo(void *, size_t);
cudaError_t cudaGetDriverEntryPointByVersion(const char *, void **, unsigned, unsigned long long, int *);
int cuGetProcAddress_v2(const char *, void **, int, uint64_t, int *);

enum { H2D, D2H, D2D, UNKNOWN, BATCH, SYNC, WAIT, HTOD, DTOH, DTOD, ANY, ROWS, TRIM, TRIM_BY_DRIVER, COUNTERS };
static const char *const names[] = {"H2D",  "D2H",  "D2D",  "unknown", "batch", "sync", "wait",
                                    "HtoD", "DtoH", "DtoD", "any",     "2D",    "trim", "cuTrim"};
static struct {
    volatile uint64_t calls, copies, bytes;
} *total; /* shared by all processes */

static const char *via;
static long calls;
static int forks, kills;

static void did(int what, uint64_t copies, uint64_t bytes) {
    __atomic_fetch_add(&total[what].bytes, bytes, __ATOMIC_SEQ_CST);
    __atomic_fetch_add(&total[what].copies, copies, __ATOMIC_SEQ_CST);
    __atomic_fetch_add(&total[what].calls, 1, __ATOMIC_SEQ_CST);
}

static void check(int error, const char *what) {
    if (!error) return;
    fprintf(stderr, "%s: %d\n", what, error);
    exit(3);
}

static void *fetch(const char *name) {
    void *f = NULL;
    if (!strcmp(via, "driver") || !strcmp(via, "waits") || !strcmp(via, "trims"))
        check(cuGetProcAddress_v2(name, &f, 13000, 0, NULL), name);
    if (!strcmp(via, "entry")) check(cudaGetDriverEntryPointByVersion(name, &f, 12080, 0, NULL), name);
    if (!f) exit(4);
    return f;
}

/* By the calls that return when the copy is over. */
static void work_waiting(long from, long to, char *device, char *host) {
    int (*htod)(uint64_t, const void *, size_t) = fetch("cuMemcpyHtoD");
    int (*dtoh)(void *, uint64_t, size_t) = fetch("cuMemcpyDtoH");
    int (*dtod)(uint64_t, uint64_t, size_t) = fetch("cuMemcpyDtoD"),
                                    (*any)(uint64_t, uint64_t, size_t) = fetch("cuMemcpy");
    for (long i = from; i < to; i++) {
        size_t bytes = 16 + (size_t)(i % 7);
        uint64_t there = (uintptr_t)device, here = (uintptr_t)host;
        switch (i % 5) {
        case 0:
            check(htod(there, host, bytes), "htod");
            did(HTOD, 1, bytes);
            break;
        case 1:
            check(dtoh(host, there, bytes), "dtoh");
            did(DTOH, 1, bytes);
            break;
        case 2:
            check(dtod(there + 1024, there, bytes), "dtod");
            did(DTOD, 1, bytes);
            break;
        case 3:
            check(any(there, here, bytes), "any");
            did(ANY, 1, bytes);
            break;
        default:
            check(cudaMemcpy2D(device, 64, host, 32, bytes, 3, cudaMemcpyHostToDevice), "2d");
            did(ROWS, 1, 3 * bytes);
        }
    }
}

/* What a memory pool keeps is given back, by the runtime and by the driver. */
static void trim(long from, long to) {
    int (*by_driver)(void *, size_t) = fetch("cuMemPoolTrimTo");
    void *pool;
    check(cudaDeviceGetDefaultMemPool(&pool, 0), "pool");
    for (long i = from; i < to; i++) {
        check(i % 3 ? cudaMemPoolTrimTo(pool, 0) : by_driver(pool, 0), "trim");
        did(i % 3 ? TRIM : TRIM_BY_DRIVER, 1, 0);
    }
}

static void work(long from, long to, char *device, char *host, cudaStream_t stream) {
    int (*copy)(void *, const void *, size_t, int, cudaStream_t) = cudaMemcpyAsync;
    if (!strcmp(via, "dlsym")) {
        void *lib = dlopen(getenv("RUNTIME"), RTLD_LAZY | RTLD_LOCAL);
        if (!lib || !(copy = (int (*)(void *, const void *, size_t, int, cudaStream_t))dlsym(lib, "cudaMemcpyAsync")))
            exit(5);
    }
    if (!strcmp(via, "waits")) return work_waiting(from, to, device, host);
    if (!strcmp(via, "trims")) return trim(from, to);
    int driver = !strcmp(via, "driver") || !strcmp(via, "entry"), mixed = !strcmp(via, "mixed");
    int (*htod)(uint64_t, const void *, size_t, cudaStream_t) = NULL;
    int (*dtoh)(void *, uint64_t, size_t, cudaStream_t) = NULL;
    int (*any)(uint64_t, uint64_t, size_t, cudaStream_t) = NULL;
    if (driver) htod = fetch("cuMemcpyHtoDAsync"), dtoh = fetch("cuMemcpyDtoHAsync"), any = fetch("cuMemcpyAsync");
    for (long i = from; i < to; i++) {
        size_t bytes = 16 + (size_t)(i % 7);
        if (!strcmp(via, "batch") || (mixed && i % 5 == 4)) {
            void *dsts[3] = {device, device + 100, device + 200}, *srcs[3] = {host, host + 100, host + 200};
            size_t sizes[3] = {bytes, bytes, 1}, index = 0;
            kvp_memcpy_attributes a = {.srcAccessOrder = 1, .srcLocHint = {2, 0}, .dstLocHint = {1, 0}};
            check(cudaMemcpyBatchAsync(dsts, srcs, sizes, 3, &a, &index, 1, stream), "batch");
            did(BATCH, 3, 2 * bytes + 1);
        } else if (!strcmp(via, "sync") || (mixed && i % 5 == 3)) {
            check(cudaMemcpy(device, host, bytes, cudaMemcpyHostToDevice), "sync");
            did(SYNC, 1, bytes);
        } else if (driver && i % 3 == 0) {
            check(htod((uintptr_t)device, host, bytes, stream), "htod");
            did(H2D, 1, bytes);
        } else if (driver && i % 3 == 1) {
            check(dtoh(host, (uintptr_t)device, bytes, stream), "dtoh");
            did(D2H, 1, bytes);
        } else if (driver) {
            check(any((uintptr_t)device, (uintptr_t)host, bytes, stream), "any");
            did(UNKNOWN, 1, bytes);
        } else {
            int which = strcmp(via, "loads") ? (int)(i % 3) : H2D;
            int kind = which == H2D   ? cudaMemcpyHostToDevice
                       : which == D2H ? cudaMemcpyDeviceToHost
                                      : cudaMemcpyDeviceToDevice;
            char *a = kind == cudaMemcpyHostToDevice ? device : kind == cudaMemcpyDeviceToHost ? host : device + 1024;
            check(copy(a, a == host ? device : a == device ? host : device, bytes, kind, stream), "copy");
            did(which, 1, bytes);
        }
    }
}

static pthread_barrier_t together; /* all threads copy before any ends: none takes over another's place in the file */

static void *thread(void *unused) {
    (void)unused;
    void *device, *host;
    cudaStream_t stream;
    check(cudaMalloc(&device, 4096), "malloc");
    check(cudaHostAlloc(&host, 4096, 0), "host");
    check(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, 0), "stream");
    pthread_barrier_wait(&together);
    if (kills) {
        printf("ready\n");
        fflush(stdout);
        for (long i = 0;; i++) work(i, i + 1, device, host, stream);
    }
    work(0, forks ? calls / 2 : calls, device, host, stream);
    if (forks) {
        pid_t child = fork();
        if (!child) { /* the runtime starts afresh in a child, as far as it lets one */
            check(cudaMalloc(&device, 4096), "malloc");
            check(cudaHostAlloc(&host, 4096, 0), "host");
            check(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, 0), "stream");
        }
        work(calls / 2, calls, device, host, stream);
        check(cudaStreamSynchronize(stream), "wait");
        did(WAIT, 1, 0);
        if (!child) _exit(0);
        int status;
        waitpid(child, &status, 0);
        if (status) exit(6);
        return NULL;
    }
    check(cudaStreamSynchronize(stream), "wait");
    did(WAIT, 1, 0);
    pthread_barrier_wait(&together);
    return NULL;
}

int main(int argc, char **argv) {
    via = argv[1];
    calls = atol(argv[2]);
    int threads = atoi(argv[3]), processes = atoi(argv[4]);
    forks = argc > 5 && !strcmp(argv[5], "fork");
    kills = argc > 5 && !strcmp(argv[5], "kill");
    int fd = getenv("COUNTS") ? open(getenv("COUNTS"), O_RDWR | O_CREAT, 0644) : -1;
    if (fd >= 0 && ftruncate(fd, 4096)) return 7;
    total = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | (fd < 0 ? MAP_ANONYMOUS : 0), fd, 0);
    if (argc > 5 && !strcmp(argv[5], "closeall"))
        for (int i = 3; i < 1024; i++) close(i);
    for (int p = 0; p < processes; p++) {
        if (processes > 1 && fork()) continue;
        pthread_t ids[512];
        pthread_barrier_init(&together, NULL, (unsigned)threads);
        for (int t = 1; t < threads; t++) pthread_create(&ids[t], NULL, thread, NULL);
        if (argc > 5 && !strcmp(argv[5], "closeall"))
            for (int i = 3; i < 1024; i++) close(i);
        thread(NULL);
        for (int t = 1; t < threads; t++) pthread_join(ids[t], NULL);
        if (processes > 1) return 0;
    }
    int status, bad = 0;
    while (wait(&status) > 0) bad |= status;
    for (int i = 0; i < COUNTERS; i++)
        if (total[i].calls)
            printf("%s %llu %llu %llu\n", names[i], (unsigned long long)total[i].calls,
                   (unsigned long long)total[i].copies, (unsigned long long)total[i].bytes);
    return bad ? 8 : 0;
}
