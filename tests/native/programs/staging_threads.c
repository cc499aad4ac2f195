/* Staged copies by two threads in turn, with helpers, over the host runtime: staging_threads COPIES. Each copy's bytes
 * are changed when it has returned, and compared when they are back. Built with a sanitizer: no race, no error. */
#define _GNU_SOURCE
#include "../../../kvprobe/native/interpose/staging.h"
#include "test_hostrt.h"

#include <dlfcn.h>
#include <sched.h>

enum { SLOTS = 4, ROOM = 24 << 20, THREADS = 2 };

struct staging_driver kvp_driver;
static staging_events events;
static pthread_mutex_t right_to_copy = PTHREAD_MUTEX_INITIALIZER;
static int copies;

static void copy(int load, unsigned char *device, unsigned char *host, size_t bytes, cudaStream_t stream) {
    pthread_mutex_lock(&right_to_copy);
    static unsigned turn;
    unsigned how = turn++ % 4; /* pages that are there are made no worse */
    int error;
    do { /* given up where this machine's device got no processor for long: once more, over the same bytes */
        while (!kvp_staging_is_free()) sched_yield();
        error = kvp_staged_copy(&events, load, (uint64_t)(uintptr_t)device, host, bytes, stream, how);
    } while (error == STAGING_NOT_READY);
    if (error) abort();
    pthread_mutex_unlock(&right_to_copy);
}

static void *caller(void *which) {
    unsigned seed = (unsigned)(uintptr_t)which;
    cudaStream_t stream;
    void *device;
    unsigned char *host = malloc(ROOM);
    OK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    OK(cudaMalloc(&device, ROOM));
    for (int i = 0; i < copies; i++) {
        size_t bytes = 1 + (size_t)rand_r(&seed) % (i % 8 ? 1 << 20 : ROOM), step = 4093;
        unsigned char first = (unsigned char)rand_r(&seed);
        for (size_t at = 0; at < bytes; at += step) host[at] = (unsigned char)(first + at / step);
        copy(1, device, host, bytes, stream);
        memset(host, 0, bytes);
        copy(0, device, host, bytes, stream);
        for (size_t at = 0; at < bytes; at += step)
            if (host[at] != (unsigned char)(first + at / step)) abort();
    }
    free(host);
    return NULL;
}

int main(int argc, char **argv) {
    copies = argc > 1 ? atoi(argv[1]) : 10;
#define X(NAME, PARAMETERS) kvp_driver.NAME = (int(*) PARAMETERS)(uintptr_t)dlsym(RTLD_DEFAULT, #NAME);
    KVP_STAGING_CALLS(X)
#undef X
    void *slots;
    OK(cudaHostAlloc(&slots, SLOTS * STAGING_SLOT_BYTES, 0));
    for (int i = 0; i < SLOTS; i++) OK(kvp_driver.cuEventCreate(&events.events[i], 2));
    if (kvp_staging_open(slots, SLOTS, 3)) return 1;
    pthread_t threads[THREADS];
    for (uintptr_t i = 0; i < THREADS; i++) pthread_create(&threads[i], NULL, caller, (void *)(i + 1));
    for (int i = 0; i < THREADS; i++) pthread_join(threads[i], NULL);
    OK(kvhostReset(NULL));
    printf("%d copies\n", 2 * THREADS * copies);
    return 0;
}
