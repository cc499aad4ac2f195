/* Forks while another thread holds the lock of the loader's list, asks dlsym all the time, loads and unloads PLUGIN, or
 * is in the middle of loading it. A child that waits for good is killed by its alarm.
 *
 *   forked_listing held|asks|loads CHILDREN PLUGIN
 *   forked_listing stuck CHILDREN PLUGIN PIPE
 *
 * Says "ready", waits for a line, and says how many children ended well. Each child looks functions up and copies once;
 * under asks it loads PLUGIN, which the parent has not loaded, and copies by it once. Under stuck PLUGIN is linked to
 * PIPE, by which the loader stands until the fork begins, and each child opens the runtime, which is loaded. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
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

enum { PATIENCE_S = 60 };
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

static void *loads_once(void *plugin) {
    dlopen(plugin, RTLD_NOW); /* in vain */
    return NULL;
}

static int loader_is_busy(void) {
    for (ElfW(Dyn) *d = _DYNAMIC; d->d_tag != DT_NULL; d++)
        if (d->d_tag == DT_DEBUG) return ((volatile struct r_debug *)d->d_un.d_ptr)->r_state != RT_CONSISTENT;
    return 0;
}

static const char *pipe_path;

static void lets_loader_go(void) { close(open(pipe_path, O_WRONLY)); }

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

static int does(const char *parent, const char *plugin) {
    if (!strcmp(parent, "asks")) return loads_plugin(plugin);
    return (strcmp(parent, "stuck") || dlopen("libkvprobe_hostrt.so", RTLD_NOW)) && looks_up();
}

int main(int argc, char **argv) {
    const char *parent = argc > 3 ? argv[1] : "";
    int well = 0, stuck = !strcmp(parent, "stuck"), anew = stuck || !strcmp(parent, "held");
    char line[16];
    void *memory;
    pthread_t thread;
    void *(*meanwhile)(void *) = stuck ? loads_once : anew ? holds : strcmp(parent, "asks") ? loads : asks;
    if (cudaMalloc(&memory, 64)) return 3; /* here: the runtime opens itself, which a child of one that loads cannot */
    puts("ready");
    fflush(stdout);
    if (argc != 4 + stuck || !fgets(line, sizeof line, stdin)) return 3;
    pipe_path = argv[4];
    if (stuck) pthread_atfork(lets_loader_go, NULL, NULL);
    if (!anew) pthread_create(&thread, NULL, meanwhile, argv[3]);
    for (int i = 0, status = 0; i < atoi(argv[2]) && !status; i++) {
        if (anew) pthread_create(&thread, NULL, meanwhile, argv[3]);
        while (anew && !(stuck ? loader_is_busy() : inside)) usleep(100);
        pid_t child = fork();
        if (!child) {
            alarm(PATIENCE_S);
            _exit(!does(parent, argv[3]));
        }
        inside = 0;
        waitpid(child, &status, 0);
        if (anew) pthread_join(thread, NULL);
        if (status) fprintf(stderr, "child %d: status %#x\n", i, status);
        well += !status;
    }
    over = 1;
    if (!anew) pthread_join(thread, NULL);
    printf("%d\n", well);
    return 0;
}
