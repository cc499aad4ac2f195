/* Copies until it is killed, and counts for itself: kills COUNTS THREADS CALLS.
 *
 * COUNTS is a file of 64-bit words that outlives the process: word 0 its pid, then from word 8 on, 8 words apart, for
 * each thread the calls that it began and those that returned. A thread ends after CALLS calls and another takes its
 * place (0: it stays). Every copy has 64 bytes. */
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

int cudaMemcpyAsync(void *, const void *, size_t, int, void *), cudaStreamCreateWithPriority(void **, unsigned, int);
int cudaMalloc(void **, size_t), cudaHostAlloc(void **, size_t, unsigned), cudaStreamDestroy(void *);
int cudaFree(void *), cudaFreeHost(void *);

static _Atomic uint64_t *words;
static long calls;

static void *copies(void *number) {
    _Atomic uint64_t *begun = words + 8 * (intptr_t)number, *returned = begun + 1;
    void *stream, *gpu, *cpu;
    if (cudaStreamCreateWithPriority(&stream, 1, 0) || cudaMalloc(&gpu, 64) || cudaHostAlloc(&cpu, 64, 0)) exit(3);
    for (long i = 0; !calls || i < calls; i++) {
        ++*begun;
        if (cudaMemcpyAsync(gpu, cpu, 64, 1, stream)) exit(4);
        ++*returned;
    }
    if (cudaStreamDestroy(stream) || cudaFree(gpu) || cudaFreeHost(cpu)) exit(5);
    return NULL;
}

static void *keeps(void *number) {
    for (;;) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, copies, number)) exit(6);
        pthread_join(thread, NULL);
    }
    return NULL;
}

int main(int argc, char **argv) {
    int fd = argc > 3 ? open(argv[1], O_RDWR) : -1, threads = argc > 3 ? atoi(argv[2]) : 0;
    if (fd < 0) return 2;
    words = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (words == MAP_FAILED) return 2;
    calls = atol(argv[3]);
    words[0] = (uint64_t)getpid();
    for (intptr_t t = 1; t <= threads; t++) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, keeps, (void *)t)) return 6;
    }
    for (;;) pause();
}
