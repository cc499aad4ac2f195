/* What attach_stress.py attaches to: a program that copies on four threads while others of it fork, spawn, and load and
 * unload libraries.
 *
 *   attach_stress COUNTS
 *
 * COUNTS is a file of 64-bit words, shared with whoever watches: 0 what to do (0 copy, 1 pause, 2 end), 1 threads that
 * pause, 2 copies, 3 bytes, 4 children, 5 children that did not end with 0, 6 libraries that could not be loaded. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <spawn.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

int cudaMemcpyAsync(void *, const void *, size_t, int, void *);
int cudaStreamSynchronize(void *);
int cudaMalloc(void **, size_t);
int cudaHostAlloc(void **, size_t, unsigned);
extern char **environ;

enum { TODO, PAUSED, COPIES, BYTES, CHILDREN, BAD_CHILDREN, BAD_LIBRARIES };
enum { COPYING = 4 };
static _Atomic uint64_t *words;

static void *copies(void *unused) {
    void *device, *host;
    if (cudaMalloc(&device, 65536) || cudaHostAlloc(&host, 65536, 0)) exit(3);
    while (words[TODO] != 2) {
        if (words[TODO] == 1) {
            words[PAUSED] += 1;
            while (words[TODO] == 1) usleep(500);
            words[PAUSED] -= 1;
        }
        for (int i = 0; i < 20; i++) {
            if (cudaMemcpyAsync(device, host, 4096, 1, NULL) || cudaStreamSynchronize(NULL)) exit(4);
            free(malloc(64 + (size_t)i * 100));
            words[COPIES] += 1;
            words[BYTES] += 4096;
        }
    }
    return unused;
}

static void ended(pid_t child) {
    int status = 0;
    if (child > 0 && waitpid(child, &status, 0) == child) words[CHILDREN] += 1;
    if (child <= 0 || status) words[BAD_CHILDREN] += 1;
}

static void *spawns(void *unused) {
    while (words[TODO] != 2) {
        pid_t child = -1;
        char *arguments[] = {"true", NULL};
        posix_spawn(&child, "/bin/true", NULL, NULL, arguments, environ);
        ended(child);
        usleep(5000);
    }
    return unused;
}

static void *forks(void *unused) {
    while (words[TODO] != 2) {
        pid_t child = fork();
        if (!child) {
            free(malloc(100));
            _exit(dlsym(RTLD_DEFAULT, "cudaMalloc") ? 0 : 9);
        }
        ended(child);
        usleep(1000);
    }
    return unused;
}

static void *loads(void *unused) {
    while (words[TODO] != 2) {
        void *first = dlopen("libresolv.so.2", RTLD_NOW), *second = dlopen("libgcc_s.so.1", RTLD_NOW);
        if (!first || !second) words[BAD_LIBRARIES] += 1;
        if (second) dlclose(second);
        if (first) dlclose(first);
        usleep(1000);
    }
    return unused;
}

int main(int argc, char **argv) {
    void *(*const work[])(void *) = {copies, copies, copies, copies, spawns, forks, loads};
    enum { THREADS = sizeof work / sizeof *work };
    pthread_t threads[THREADS];
    int fd = open(argv[1], O_RDWR);
    if (argc != 2 || fd < 0) return 7;
    words = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    for (int i = 0; i < THREADS; i++) pthread_create(&threads[i], NULL, work[i], NULL);
    for (int i = 0; i < THREADS; i++) pthread_join(threads[i], NULL);
    return 0;
}
