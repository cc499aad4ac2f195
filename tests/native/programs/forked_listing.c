/* Forks while another thread holds the lock of the loader's list, asks dlsym all the time, or loads and unloads PLUGIN.
 * A child that waits for good is killed by its alarm.
 *
 *   forked_listing held|asks|loads CHILDREN PLUGIN
 *
 * Says "ready", waits for a line, and says how many children ended well. Each child looks functions up and copies once;
 * under asks it loads PLUGIN, which the parent has not loaded, and copies by it once. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <link.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

typedef int copy_fn(void *, const void *, size_t, int, void *);
int cudaMalloc(void **, size_t);
int cudaHostAlloc(void **, size_t, unsigned);

enum { PATIENCE_S = 10 };
static atomic_int inside, over;

static int hold(struct dl_phdr_info *info, size_t size, void *unused) {
    (void)info, (void)size, (void)unused;
    inside = 1;
    while (inside) usleep(100);
    return 1;
}

static void *holds(void *unused) {
    dl_iterate_phdr(hold, NULL);
    return unused;
}

static void *asks(void *unused) {
    while (!over) dlsym(RTLD_DEFAULT, "getpid");
    return unused;
}

static void *loads(void *plugin) {
    for (void *loaded; !over && (loaded = dlopen(plugin, RTLD_NOW));) dlclose(loaded);
    return over ? plugin : NULL;
}

static int copies(copy_fn *copy) {
    void *device, *host;
    return copy && !cudaMalloc(&device, 64) && !cudaHostAlloc(&host, 64, 0) && !copy(device, host, 64, 1, NULL);
}

static int looks_up(void) {
    return dlsym(RTLD_DEFAULT, "cudaFree") && copies((copy_fn *)dlsym(RTLD_DEFAULT, "cudaMemcpyAsync"));
}

static int loads_plugin(const char *plugin) {
    void *loaded = dlopen(plugin, RTLD_NOW);
    return loaded && copies((copy_fn *)dlsym(loaded, "copy_by_plugin"));
}

int main(int argc, char **argv) {
    int well = 0, holding = argc == 4 && !strcmp(argv[1], "held"), asking = argc == 4 && !strcmp(argv[1], "asks");
    char line[16];
    void *memory;
    pthread_t thread;
    if (cudaMalloc(&memory, 64)) return 3; /* here: the runtime opens itself, which a child of one that loads cannot */
    puts("ready");
    fflush(stdout);
    if (argc != 4 || !fgets(line, sizeof line, stdin)) return 3;
    if (!holding) pthread_create(&thread, NULL, asking ? asks : loads, argv[3]);
    for (int i = 0, status = 0; i < atoi(argv[2]) && !status; i++) {
        if (holding) pthread_create(&thread, NULL, holds, NULL);
        while (holding && !inside) usleep(100);
        pid_t child = fork();
        if (!child) {
            alarm(PATIENCE_S);
            _exit(asking ? !loads_plugin(argv[3]) : !looks_up());
        }
        inside = 0;
        waitpid(child, &status, 0);
        if (holding) pthread_join(thread, NULL);
        if (status) fprintf(stderr, "child %d: status %#x\n", i, status);
        well += !status;
    }
    over = 1;
    if (!holding) pthread_join(thread, NULL);
    printf("%d\n", well);
    return 0;
}
