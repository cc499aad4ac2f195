/* A program that keeps blocks in CPU memory and loads them again, for the byte witness.
 *
 *   verified HOW BLOCKS ROUNDS [BYTES]
 *
 * healthy: stores and loads, beside buffers that it rewrites as it likes, and a block that it reads from a file.
 * changed: overwrites every seventh block between its store and its load. crossing: the same by a copy of half a block
 * from another place. overwritten: overwrites every seventh block while its load waits in the stream. reused: a buffer
 * of results that it rewrites and sends back. contained: stores all blocks in one copy, overwrites every seventh and
 * loads them one by one. batch: as changed, by cudaMemcpyBatchAsync. freed: as changed, but the memory is freed and
 * asked for again. taken: rewrites a source that the call itself reads. Prints the address of each block that it has overwritten. */
#define _GNU_SOURCE
#include "kvp_cuda.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

cudaError_t cudaMemcpyAsync(void *, const void *, size_t, int, cudaStream_t);
cudaError_t cudaMemcpyBatchAsync(void **, void **, size_t *, size_t, kvp_memcpy_attributes *, size_t *, size_t,
                                 cudaStream_t);
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *, unsigned);
cudaError_t cudaStreamSynchronize(cudaStream_t);
cudaError_t cudaMalloc(void **, size_t);
cudaError_t cudaHostAlloc(void **, size_t, unsigned);
cudaError_t cudaFreeHost(void *);
cudaError_t cudaLaunchHostFunc(cudaStream_t, void (*)(void *), void *);

static void check(int error) {
    if (!error) return;
    fprintf(stderr, "error %d\n", error);
    exit(3);
}

static const char *how;
static size_t blocks, rounds, bytes = 32 << 10;
static char *device, *host, *staging, *results;
static cudaStream_t stream;
static int (*witness)(uint64_t[3]);

static int is(const char *name) { return !strcmp(how, name); }

/* Until the witness has seen everything that is over by now. */
static void settle(void) {
    uint64_t told[3], first;
    if (!witness || !witness(told)) return;
    first = told[0];
    do {
        sched_yield();
        witness(told);
    } while (told[0] < first + 2 || told[2]);
}

static void fill(char *at, size_t size, uint64_t seed) {
    for (size_t i = 0; i < size / 8; i++) ((uint64_t *)at)[i] = seed = seed * 6364136223846793005u + 1442695040888963407u;
}

static void copies(char *to, char *from, int kind) {
    enum { MOST = 256 };
    if (!is("batch")) {
        for (size_t i = 0; i < blocks; i++) check(cudaMemcpyAsync(to + i * bytes, from + i * bytes, bytes, kind, stream));
        return;
    }
    void *dsts[MOST], *srcs[MOST];
    size_t sizes[MOST], index = 0;
    for (size_t i = 0; i < blocks; i++) dsts[i] = to + i * bytes, srcs[i] = from + i * bytes, sizes[i] = bytes;
    int loads = kind == cudaMemcpyHostToDevice;
    kvp_memcpy_attributes a = {.srcAccessOrder = 1, .srcLocHint = {loads ? 2 : 1, 0}, .dstLocHint = {loads ? 1 : 2, 0}};
    check(cudaMemcpyBatchAsync(dsts, srcs, sizes, blocks, &a, &index, 1, stream));
}

static void store(void) {
    if (is("contained"))
        check(cudaMemcpyAsync(host, device, blocks * bytes, cudaMemcpyDeviceToHost, stream));
    else
        copies(host, device, cudaMemcpyDeviceToHost);
    check(cudaStreamSynchronize(stream));
    settle();
}

static void overwrite(size_t i, uint64_t seed) {
    fill(host + i * bytes, bytes, seed);
    printf("%llu\n", (unsigned long long)(uintptr_t)(host + i * bytes));
}

static atomic_int held;
static void hold(void *unused) {
    (void)unused;
    while (atomic_load(&held)) usleep(200);
}

static uint64_t found(void) {
    uint64_t told[3] = {0};
    if (witness) witness(told);
    return told[1];
}

static void overwritten_while_loaded(void) {
    static uint64_t seed = 99;
    for (size_t i = 0; i < blocks; i += 7) {
        uint64_t before = found();
        held = 1;
        check(cudaLaunchHostFunc(stream, hold, NULL));
        check(cudaMemcpyAsync(device + i * bytes, host + i * bytes, bytes, cudaMemcpyHostToDevice, stream));
        overwrite(i, ++seed);
        while (witness && found() == before) sched_yield();
        held = 0;
        check(cudaStreamSynchronize(stream));
    }
}

/* A source that the call itself reads may be rewritten at once. */
static void taken_by_the_call(void) {
    void *dsts[1] = {device}, *srcs[1] = {host};
    size_t sizes[1] = {bytes}, index = 0;
    kvp_memcpy_attributes a = {.srcAccessOrder = 2, .srcLocHint = {2, 0}, .dstLocHint = {1, 0}};
    uint64_t told[3] = {0}, first;
    held = 1;
    check(cudaLaunchHostFunc(stream, hold, NULL));
    check(cudaMemcpyBatchAsync(dsts, srcs, sizes, 1, &a, &index, 1, stream));
    overwrite(0, 4711);
    if (witness) witness(told);
    for (first = told[0]; witness && told[0] < first + 40; witness(told)) sched_yield();
    held = 0;
    check(cudaStreamSynchronize(stream));
}

static void healthy_round(size_t round, int file) {
    size_t small = 8192;
    for (size_t i = 0; i < 8; i++) { /* inputs of a step: never the target of a store */
        fill(staging + i * small, small, round * 8 + i);
        check(cudaMemcpyAsync(device + i * small, staging + i * small, small, cudaMemcpyHostToDevice, stream));
    }
    check(cudaStreamSynchronize(stream));
    size_t at = round % blocks; /* a block that comes from a lower tier */
    if (pread(file, host + at * bytes, bytes, 0) != (ssize_t)bytes) exit(4);
    copies(device, host, cudaMemcpyHostToDevice);
    check(cudaStreamSynchronize(stream));
}

int main(int argc, char **argv) {
    how = argv[1], blocks = strtoul(argv[2], NULL, 10), rounds = strtoul(argv[3], NULL, 10);
    if (argc > 4) bytes = strtoul(argv[4], NULL, 10);
    witness = (int (*)(uint64_t[3]))dlsym(RTLD_DEFAULT, "kvprobe_witness");
    check(cudaMalloc((void **)&device, blocks * bytes + (1 << 20)));
    check(cudaHostAlloc((void **)&host, blocks * bytes, 0));
    check(cudaHostAlloc((void **)&staging, 1 << 20, 0));
    check(cudaHostAlloc((void **)&results, 1 << 20, 0));
    check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    fill(host, blocks * bytes, 1);
    copies(device, host, cudaMemcpyHostToDevice);
    check(cudaStreamSynchronize(stream));
    settle();
    FILE *file = tmpfile();
    fill(staging, 1 << 20, 5);
    if (!file || fwrite(staging, 1, 1 << 20, file) != 1 << 20 || fflush(file)) return 5;
    for (size_t round = 0; round < rounds; round++) {
        store();
        if (is("freed")) {
            check(cudaFreeHost(host));
            check(cudaHostAlloc((void **)&host, blocks * bytes, 0));
        }
        if (is("healthy")) healthy_round(round, fileno(file));
        if (is("reused"))
            for (int i = 0; i < 8; i++) {
                check(cudaMemcpyAsync(results, device, 1 << 16, cudaMemcpyDeviceToHost, stream));
                check(cudaStreamSynchronize(stream));
                settle();
                fill(results, 1 << 16, round * 8 + (size_t)i);
                check(cudaMemcpyAsync(device, results, 1 << 16, cudaMemcpyHostToDevice, stream));
                check(cudaStreamSynchronize(stream));
            }
        if (is("overwritten")) overwritten_while_loaded();
        if (is("taken")) taken_by_the_call();
        if (is("changed") || is("contained") || is("batch") || is("freed"))
            for (size_t i = 0; i < blocks; i += 7) overwrite(i, round + i + 77);
        if (is("crossing"))
            for (size_t i = 0; i < blocks; i += 7)
                check(cudaMemcpyAsync(host + i * bytes, device, bytes / 2, cudaMemcpyDeviceToHost, stream));
        check(cudaStreamSynchronize(stream));
        if (!is("overwritten") && !is("taken")) copies(device, host, cudaMemcpyHostToDevice);
        check(cudaStreamSynchronize(stream));
        settle();
    }
    return 0;
}
