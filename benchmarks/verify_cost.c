/* Stores and loads blocks as a server's pool does, and times it: verify_cost BLOCKS BYTES ROUNDS GAP_US
 *
 * A round stores all blocks, waits, loads all, waits, and sleeps for GAP_US. Prints medians: ns inside a store's call, a
 * load's call, and ns of a round without its sleep. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

extern int cudaMemcpyAsync(void *, const void *, size_t, int, void *), cudaMalloc(void **, size_t);
extern int cudaHostAlloc(void **, size_t, unsigned), cudaStreamSynchronize(void *);
extern int cudaStreamCreateWithFlags(void **, unsigned);

enum { TO_DEVICE = 1, FROM_DEVICE = 2, NON_BLOCKING = 1 };

static double now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e9 + (double)t.tv_nsec;
}

static int ascending(const void *a, const void *b) { return (*(double *)a > *(double *)b) - (*(double *)a < *(double *)b); }

static double median(double *values, size_t count) {
    qsort(values, count, sizeof *values, ascending);
    return values[count / 2];
}

int main(int argc, char **argv) {
    if (argc < 5) return 2;
    size_t blocks = strtoul(argv[1], NULL, 10), bytes = strtoul(argv[2], NULL, 10), rounds = strtoul(argv[3], NULL, 10);
    char *device, *host;
    void *stream;
    if (cudaMalloc((void **)&device, blocks * bytes) || cudaHostAlloc((void **)&host, blocks * bytes, 0) ||
        cudaStreamCreateWithFlags(&stream, NON_BLOCKING))
        return 1;
    memset(host, 1, blocks * bytes);
    double *stores = malloc(blocks * rounds * sizeof *stores), *loads = malloc(blocks * rounds * sizeof *loads);
    double *whole = malloc(rounds * sizeof *whole);
    for (size_t round = 0; round < rounds; round++) {
        double begin = now_ns();
        for (size_t i = 0; i < blocks; i++) {
            double t = now_ns();
            if (cudaMemcpyAsync(host + i * bytes, device + i * bytes, bytes, FROM_DEVICE, stream)) return 1;
            stores[round * blocks + i] = now_ns() - t;
        }
        if (cudaStreamSynchronize(stream)) return 1;
        for (size_t i = 0; i < blocks; i++) {
            double t = now_ns();
            if (cudaMemcpyAsync(device + i * bytes, host + i * bytes, bytes, TO_DEVICE, stream)) return 1;
            loads[round * blocks + i] = now_ns() - t;
        }
        if (cudaStreamSynchronize(stream)) return 1;
        whole[round] = now_ns() - begin;
        usleep((useconds_t)strtoul(argv[4], NULL, 10));
    }
    printf("%.0f %.0f %.0f\n", median(stores, blocks * rounds), median(loads, blocks * rounds), median(whole, rounds));
    return 0;
}
