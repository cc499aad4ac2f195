/* A thread makes its first copy while another is in the middle of loading a library, whose constructor looks at what is
 * loaded: loading PLUGIN. Built with -DPLUGIN it is that library. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <link.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifdef PLUGIN
extern atomic_int constructing, asked;

/* Whether the copying thread sleeps, as it does when it waits for the loader's lock. */
static int sleeps(int thread) {
    char path[64], line[256] = "";
    snprintf(path, sizeof path, "/proc/self/task/%d/stat", thread);
    FILE *file = fopen(path, "r");
    if (!file) return 0;
    if (!fgets(line, sizeof line, file)) line[0] = 0;
    fclose(file);
    char *state = strrchr(line, ')');
    return state && state[1] && state[2] == 'S';
}

static int count(struct dl_phdr_info *info, size_t size, void *n) {
    (void)info, (void)size;
    ++*(int *)n;
    return 0;
}

__attribute__((constructor)) static void start(void) {
    int libraries = 0;
    constructing = 1; /* with the loader's lock */
    while (!asked) usleep(200);
    for (int tries = 0; tries < 5000 && !sleeps(asked); tries++) usleep(200);
    dl_iterate_phdr(count, &libraries);
}
#else
atomic_int constructing, asked; /* the copying thread, once it is about to ask for the loader's lock */
static atomic_int ready;
static void *(*real_dlopen)(const char *, int); /* NULL before main: nobody may ask before */

int cudaMemcpyAsync(void *, const void *, size_t, int, void *), cudaStreamSynchronize(void *);
int cudaMalloc(void **, size_t), cudaHostAlloc(void **, size_t, unsigned);

void *dlopen(const char *file, int mode) { return real_dlopen(file, mode); }

static __attribute__((noinline)) int copy(void *to, const void *from, int kind) {
    int result = cudaMemcpyAsync(to, from, 64, kind, NULL);
    __asm__ volatile("");
    return result;
}

static void *copier(void *unused) {
    void *gpu, *cpu;
    if (cudaMalloc(&gpu, 64) || cudaHostAlloc(&cpu, 64, 0)) exit(3);
    copy(gpu, cpu, 99); /* refused: the way to the runtime is known from then on, the memory is not */
    ready = 1;
    while (!constructing) usleep(200);
    asked = (int)syscall(SYS_gettid);
    if (copy(gpu, cpu, 1) || cudaStreamSynchronize(NULL)) exit(4);
    return unused;
}

int main(int argc, char **argv) {
    alarm(120);
    real_dlopen = (void *(*)(const char *, int))dlsym(RTLD_NEXT, "dlopen");
    pthread_t thread;
    pthread_create(&thread, NULL, copier, NULL);
    while (!ready) usleep(200);
    if (argc < 2 || !dlopen(argv[1], RTLD_NOW)) return 5;
    pthread_join(thread, NULL);
    printf("asked %d\n", asked != 0);
    return 0;
}
#endif
