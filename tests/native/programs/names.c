/* Calls a CUDA function by every name that it finds of it: one line a way, 0 where there is none, else the call's
 * result. Built with -DFIXED it is linked to a fixed address and asks what its own address of the function is to
 * others. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>
#include <stdio.h>

typedef int copy_fn(void *, const void *, size_t, int, void *);
#ifdef FIXED
int cudaMemcpyAsync(void *, const void *, size_t, int, void *);
extern void *address_elsewhere(void);
#else
extern int cudaMemcpyAsync(void *, const void *, size_t, int, void *) __attribute__((weak));
extern int seccomp_load(void *) __attribute__((weak));
#endif

static void say(const char *way, void *function) {
    printf("%s %d\n", way, function ? ((copy_fn *)function)(NULL, NULL, 8, 1, NULL) : 0);
}

int main(void) {
    copy_fn *volatile linked = cudaMemcpyAsync;
    say("linked", (void *)linked);
    say("default", dlsym(RTLD_DEFAULT, "cudaMemcpyAsync"));
    printf("error %d\n", dlerror() != NULL);
    say("next", dlsym(RTLD_NEXT, "cudaMemcpyAsync"));
    say("program", dlsym(dlopen(NULL, RTLD_LAZY), "cudaMemcpyAsync"));
    say("version", dlvsym(RTLD_DEFAULT, "cudaMemcpyAsync", "RUNTIME_1"));
    say("none", dlvsym(RTLD_DEFAULT, "cudaMemcpyAsync", "RUNTIME_2"));
#ifdef FIXED
    printf("called %d\n", cudaMemcpyAsync(NULL, NULL, 8, 1, NULL));
    printf("same %d\n", (void *)linked == address_elsewhere());
    say("elsewhere", address_elsewhere());
#else
    printf("seccomp %d %d\n", seccomp_load != NULL, dlsym(RTLD_DEFAULT, "seccomp_load") != NULL);
#endif
    return 0;
}
