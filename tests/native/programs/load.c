/* Loads each library that is named as Python would, with dlopen, and says which clock the first one reads. */
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>

int main(int argc, char **argv) {
    void *first = NULL;
    for (int i = 1; i < argc; i++) {
        void *library = dlopen(argv[i], RTLD_NOW | RTLD_LOCAL);
        if (!library) return fprintf(stderr, "%s\n", dlerror()), 1;
        if (!first) first = library;
    }
    uint64_t (*now_ns)(void) = (uint64_t (*)(void))dlsym(first, "kvp_now_ns");
    const char *(*name)(void) = (const char *(*)(void))dlsym(first, "kvp_clock_name");
    uint64_t before = now_ns();
    return printf("%s %d\n", name(), now_ns() >= before) < 0;
}
