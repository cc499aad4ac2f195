/* A program that copies for as long as it is told to, and counts for itself.
 *
 *   copying COUNTS THREADS [fork|exec|LIBRARY FOLDER TIMES]
 *
 * COUNTS is a file of 64-bit words, shared with whoever watches: 0 what to do (0 copy, 1 pause, 2 end), 1 threads that
 * pause, 2 copies, 3 bytes, 4 wrong bytes, 5 children's copies, 6 how often to load a plug-in ($PLUGIN) and copy by it.
 * Every copy is checked. fork: with each plug-in a child makes ten copies. exec: likewise in a new program. LIBRARY: a
 * thread attaches the interposer and detaches it TIMES times meanwhile, then ends the program. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

int cudaMemcpyAsync(void *, const void *, size_t, int, void *);
int cudaStreamCreateWithPriority(void **, unsigned, int);
int cudaStreamSynchronize(void *);
int cudaMalloc(void **, size_t);
int cudaHostAlloc(void **, size_t, unsigned);

typedef int copy_fn(void *, const void *, size_t, int, void *);
enum { TODO, PAUSED, COPIES, BYTES, WRONG, CHILDREN, PLUGINS };
static _Atomic uint64_t *words;
static char **arguments;

/* A child inherits the locks of AddressSanitizer's allocator as they were, held by threads that it does not have: there
 * the others stand still while one forks. */
#ifdef __SANITIZE_ADDRESS__
static pthread_rwlock_t standing = PTHREAD_RWLOCK_WRITER_NONRECURSIVE_INITIALIZER_NP;
static void moves(void) { pthread_rwlock_rdlock(&standing); }
static void moved(void) { pthread_rwlock_unlock(&standing); }
static pid_t fork_alone(void) {
    pthread_rwlock_wrlock(&standing);
    usleep(20000); /* what the runtime's threads give back behind a copy */
    pid_t child = fork();
    pthread_rwlock_unlock(&standing);
    return child;
}
#else
static void moves(void) {}
static void moved(void) {}
static pid_t fork_alone(void) { return fork(); }
#endif

static void check(int error) {
    if (error) exit(3);
}

static void some(copy_fn *copy, int n, int counter) {
    void *device, *stream;
    unsigned char *host;
    check(cudaMalloc(&device, 4096));
    check(cudaHostAlloc((void **)&host, 8192, 0));
    check(cudaStreamCreateWithPriority(&stream, 1, 0));
    for (int i = 0; i < n; i++) {
        size_t bytes = 16 + (size_t)i % 900;
        memset(host, i, bytes);
        check(copy(device, host, bytes, 1, stream));
        check(copy(host + 4096, device, bytes, 2, stream));
        check(cudaStreamSynchronize(stream));
        if (memcmp(host, host + 4096, bytes)) words[WRONG] += 1;
        words[BYTES] += 2 * bytes;
        words[counter] += 2;
    }
}

static void *work(void *how) {
    void *device, *stream;
    unsigned char *host;
    moves();
    check(cudaMalloc(&device, 4096));
    check(cudaHostAlloc((void **)&host, 8192, 0));
    check(cudaStreamCreateWithPriority(&stream, 1, 0));
    moved();
    for (unsigned i = 0;; i++) {
        if (words[TODO] == 1) {
            words[PAUSED] += 1;
            while (words[TODO] == 1) usleep(500);
            words[PAUSED] -= 1;
        }
        if (words[TODO] == 2) return NULL;
        if (how && words[PLUGINS]) {
            words[PLUGINS] -= 1;
            void *plugin = dlopen(getenv("PLUGIN"), RTLD_NOW | RTLD_LOCAL);
            copy_fn *by_plugin = plugin ? (copy_fn *)dlsym(plugin, "copy_by_plugin") : NULL;
            copy_fn *fetched = (copy_fn *)dlsym(RTLD_DEFAULT, "cudaMemcpyAsync");
            if (!by_plugin || !fetched) exit(4);
            some(by_plugin, 3, COPIES);
            some(fetched, 3, COPIES);
            if (strcmp(how, "none")) {
                pid_t child = fork_alone();
                if (!child && !strcmp(how, "exec")) {
                    execv("/proc/self/exe", (char *[]){arguments[0], arguments[1], "child", NULL});
                    _exit(9);
                }
                if (!child) {
                    some(cudaMemcpyAsync, 5, CHILDREN);
                    _exit(0);
                }
                int status;
                waitpid(child, &status, 0);
                if (status) exit(5);
            }
        }
        size_t bytes = 16 + i % 2000;
        moves();
        memset(host, (int)i, bytes);
        check(cudaMemcpyAsync(device, host, bytes, 1, stream));
        check(cudaMemcpyAsync(host + 4096, device, bytes, 2, stream));
        check(cudaStreamSynchronize(stream));
        moved();
        if (memcmp(host, host + 4096, bytes)) words[WRONG] += 1;
        words[BYTES] += 2 * bytes;
        words[COPIES] += 2;
    }
}

static void *in_and_out(void *unused) {
    (void)unused;
    void *library = dlopen(arguments[3], RTLD_NOW | RTLD_LOCAL);
    if (!library) exit(11);
    int (*attach)(const char *, const char *, const char *, uint64_t) = dlsym(library, "kvprobe_attach");
    int (*detach)(void) = dlsym(library, "kvprobe_detach");
    for (int i = 0; i < atoi(arguments[5]); i++) {
        int in = attach(arguments[3], arguments[4], "copies", 1u << 30);
        usleep(1000);
        int out = detach();
        /* a plug-in that another thread loads meanwhile comes out as well */
        if (in < 1 || out < in || (out > in && !words[PLUGINS])) fprintf(stderr, "turn %d: %d in, %d out\n", i, in, out), exit(12);
    }
    words[TODO] = 2;
    return NULL;
}

int main(int argc, char **argv) {
    arguments = argv;
    int fd = open(argv[1], O_RDWR | O_CREAT, 0644);
    if (fd < 0 || ftruncate(fd, 4096)) return 7;
    words = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (!strcmp(argv[2], "child")) {
        some(cudaMemcpyAsync, 5, CHILDREN);
        return 0;
    }
    int threads = atoi(argv[2]);
    pthread_t ids[64], attaching;
    char *how = argc == 4 ? argv[3] : "none";
    if (argc > 5) pthread_create(&attaching, NULL, in_and_out, NULL);
    for (int t = 1; t < threads; t++) pthread_create(&ids[t], NULL, work, NULL);
    work(how);
    for (int t = 1; t < threads; t++) pthread_join(ids[t], NULL);
    if (argc > 5) pthread_join(attaching, NULL);
    return 0;
}
