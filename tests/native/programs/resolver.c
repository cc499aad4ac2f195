/* What dlsym means must not change under the interposer: resolver RUNTIME. Prints one "name value" a line. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* a library function of our own: RTLD_NEXT from here must skip it, RTLD_DEFAULT must find it */
__attribute__((visibility("default"))) char *strerror(int n) {
    char *(*next)(int) = (char *(*)(int))dlsym(RTLD_NEXT, "strerror");
    return next == strerror ? "loop" : next(n);
}

int main(int argc, char **argv) {
    (void)argc;
    printf("next %d\n", !strcmp(strerror(ENOENT), "No such file or directory"));
    printf("default %d\n", dlsym(RTLD_DEFAULT, "strerror") == (void *)strerror);
    /* no CUDA in this process yet: none of its names exists */
    printf("before %d\n", dlsym(RTLD_DEFAULT, "cudaMemcpyAsync") != NULL);
    printf("error %d\n", dlerror() != NULL);
    void *lib = dlopen(argv[1], RTLD_LAZY | RTLD_LOCAL);
    printf("local %d\n", dlsym(lib, "cudaMemcpyAsync") != NULL);
    printf("hidden %d\n", dlsym(RTLD_DEFAULT, "cudaMemcpyAsync") != NULL);
    printf("absent %d\n", dlsym(lib, "cudaMemcpyWithAttributesAsync") != NULL);
    printf("other %d\n", dlsym(lib, "cudaMemGetInfo") != NULL);
    dlopen(argv[1], RTLD_LAZY | RTLD_GLOBAL);
    printf("global %d\n", dlsym(RTLD_DEFAULT, "cudaMemcpyAsync") != NULL);
    /* results and errno pass through */
    int (*copy)(void *, const void *, size_t, int, void *) = dlsym(lib, "cudaMemcpyAsync");
    errno = 77;
    printf("result %d\n", copy(NULL, NULL, 8, 99, NULL));
    printf("errno %d\n", errno);
    return 0;
}
