/* Loads a plug-in and a runtime again and again, and calls by both: reloaded PLUGIN RUNTIME TIMES. Each time the
 * runtime's old place is taken by something else. reloaded keep RUNTIME...: loads them all, and calls each once.
 * Prints the calls made; exit code 1 where one gave another result than the first. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <link.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

typedef int copy_fn(void *, const void *, size_t, int, void *);
static int calls, wrong;

static void *load(const char *path) {
    void *handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!handle) exit(3);
    return handle;
}

static void by_name(void *runtime, int times) {
    copy_fn *copy = (copy_fn *)dlsym(runtime, "cudaMemcpyAsync");
    for (int i = 0; i < times; i++, calls++) wrong |= copy(NULL, NULL, 8, 1, NULL) != 7;
}

int main(int argc, char **argv) {
    if (!strcmp(argv[1], "keep")) {
        for (int i = 2; i < argc; i++) by_name(load(argv[i]), 1);
        printf("%d\n", calls);
        return wrong;
    }
    for (int i = 0; i < atoi(argv[3]); i++) {
        void *plugin = load(argv[1]), *runtime = load(argv[2]);
        struct link_map *map;
        dlinfo(runtime, RTLD_DI_LINKMAP, &map);
        void *base = (void *)map->l_addr;
        wrong |= ((int (*)(void))dlsym(plugin, "copy_once"))() != 7;
        calls++;
        by_name(runtime, 10);
        dlclose(plugin);
        dlclose(runtime);
        if (mmap(base, 4096, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0) != base) return 4;
    }
    printf("%d\n", calls);
    return wrong;
}
