/* Threads that load the same block again and again, each from and to places and in a stream of its own, and check what
 * the device has then; a look at the device is due now and then. */
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

extern int cudaMemcpyAsync(void *, const void *, size_t, int, void *), cudaMalloc(void **, size_t);
extern int cudaHostAlloc(void **, size_t, unsigned), cudaStreamSynchronize(void *), cudaStreamDestroy(void *);
extern int cudaStreamCreateWithPriority(void **, unsigned, int);

enum { THREADS = 3, TIMES = 600, SIZE = 64 << 10, RENEWED = 250 };

static void check(int code) {
    if (code) exit(10);
}

static void *load(void *number) {
    void *device, *host, *back, *stream;
    check(cudaMalloc(&device, SIZE) || cudaHostAlloc(&host, SIZE, 0) || cudaHostAlloc(&back, SIZE, 0));
    check(cudaStreamCreateWithPriority(&stream, 1, 0));
    for (size_t i = 0; i < SIZE; i++) ((uint8_t *)host)[i] = (uint8_t)(i * 31 >> 3) + (uint8_t)(uintptr_t)number;
    for (int i = 1; i <= TIMES; i++) {
        check(cudaMemcpyAsync(device, host, SIZE, 1, stream));
        if (i % 50 == 0) check(cudaMemcpyAsync(back, device, SIZE, 2, stream));
        check(cudaStreamSynchronize(stream));
        if (i % 50 == 0 && memcmp(host, back, SIZE)) exit(11);
        if (i % RENEWED == 0) check(cudaStreamDestroy(stream) || cudaStreamCreateWithPriority(&stream, 1, 0));
        usleep(500);
    }
    return NULL;
}

int main(void) {
    pthread_t threads[THREADS];
    for (uintptr_t i = 0; i < THREADS; i++)
        if (pthread_create(&threads[i], NULL, load, (void *)i)) return 12;
    for (int i = 0; i < THREADS; i++) pthread_join(threads[i], NULL);
    return 0;
}
