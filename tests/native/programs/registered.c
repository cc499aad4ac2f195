/* A program that loads a library by its bare name, searched where the program was linked to look, and is called back by
 * the library: no function of it is looked up. Built with -DPLUGIN it is that library. */
#include <dlfcn.h>
#include <stddef.h>
#include <stdio.h>

#ifdef PLUGIN
int cudaMemcpyAsync(void *, const void *, size_t, int, void *);
extern int (*registered)(void);
static int copy(void) { return cudaMemcpyAsync(NULL, NULL, 8, 1, NULL); }
__attribute__((constructor)) static void start(void) { registered = copy; }
#else
int (*registered)(void);
int main(void) {
    for (int i = 0; i < 2; i++)
        if (!dlopen("libregistered.so", RTLD_NOW | RTLD_LOCAL)) return puts(dlerror()), 1;
    if (dlopen("libnone.so", RTLD_NOW) || !dlerror()) return 2;
    for (int i = 0; i < 3; i++) printf("%d\n", registered());
    return 0;
}
#endif
