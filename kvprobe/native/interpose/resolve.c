/* Finds the function behind a wrapped name, and puts wrappers where a program fetches functions by pointer. */
#define _GNU_SOURCE
#include "interpose.h"

#include <dlfcn.h>
#include <errno.h>
#include <link.h>
#include <stdio.h>
#include <string.h>

typedef void *dlsym_fn(void *, const char *);

extern const char __ehdr_start[] __attribute__((visibility("hidden")));
extern const char _end[] __attribute__((visibility("hidden")));

static int is_ours(const void *p) { return (const char *)p >= __ehdr_start && (const char *)p < _end; }

/* glibc's dlsym, or that of another preloaded tool behind us. dlvsym, because dlsym is ours. */
static dlsym_fn *_Atomic next_dlsym;

static NOT_SANITIZED __attribute__((noinline)) dlsym_fn *find_dlsym(void) {
    static const char *const versions[] = {"GLIBC_2.34", "GLIBC_2.17", "GLIBC_2.2.5"};
    void *found = NULL;
    for (unsigned i = 0; i < sizeof versions / sizeof *versions && !found; i++)
        found = dlvsym(RTLD_NEXT, "dlsym", versions[i]);
    next_dlsym = (dlsym_fn *)found;
    return next_dlsym;
}

static inline NOT_SANITIZED dlsym_fn *real_dlsym(void) {
    dlsym_fn *found = next_dlsym;
    return likely(found != NULL) ? found : find_dlsym();
}

void *kvp_next_symbol(const char *name) { return real_dlsym()(RTLD_NEXT, name); }

struct wrapped *kvp_find_wrapped(const char *name) {
    if (name[0] != 'c' || name[1] != 'u') return NULL;
    for (int i = 0; i < kvp_wrapped_count; i++)
        if (!strcmp(name, kvp_wrapped[i].name)) return &kvp_wrapped[i];
    return NULL;
}

/* A symbol as the object that holds `address` would find it in itself and what it depends on. */
void *kvp_symbol_beside(const void *address, const char *name) {
    Dl_info info;
    struct link_map *map = NULL;
    if (!dladdr1(address, &info, (void **)&map, RTLD_DL_LINKMAP) || !map) return NULL;
    /* the main program is called "": its dependencies are searched by RTLD_NEXT already */
    if (!map->l_name || !map->l_name[0]) return NULL;
    void *handle = dlopen(map->l_name, RTLD_LAZY | RTLD_NOLOAD);
    if (!handle) return NULL;
    void *found = real_dlsym()(handle, name);
    dlclose(handle);
    return is_ours(found) ? NULL : found;
}

/* The path of the how manyth loaded library whose name begins so. Only the path: whoever asks for the loader's lock
 * inside dl_iterate_phdr waits for a thread that holds it and wants to add its library to the list. */
struct search {
    const char *prefix;
    int skip;
    char path[4096];
};

static int path_of(struct dl_phdr_info *info, size_t size, void *data) {
    (void)size;
    struct search *s = data;
    const char *path = info->dlpi_name, *base = path ? strrchr(path, '/') : NULL;
    base = base ? base + 1 : path;
    if (!base || strncmp(base, s->prefix, strlen(s->prefix)) || strlen(path) >= sizeof s->path) return 0;
    if (s->skip-- > 0) return 0;
    strcpy(s->path, path);
    return 1;
}

static void *search_libraries(const char *prefix, const char *name) {
    for (int i = 0;; i++) {
        struct search s = {.prefix = prefix, .skip = i};
        if (!dl_iterate_phdr(path_of, &s)) return NULL;
        void *handle = dlopen(s.path, RTLD_LAZY | RTLD_NOLOAD);
        if (!handle) continue;
        void *found = real_dlsym()(handle, name);
        dlclose(handle);
        if (found && !is_ours(found)) return found;
    }
}

/* The last resort for a caller that depends on no runtime (code compiled at run time; a function that ends in a jump,
 * so that the return address is its own caller's): any loaded runtime. With two of them this may be the other one. */
static void *search_loaded(const char *name) {
    static const char *const prefixes[] = {"libcudart.so", "libcuda.so", "libkvprobe_hostrt.so"};
    void *found = NULL;
    for (unsigned i = 0; i < sizeof prefixes / sizeof *prefixes && !found; i++)
        found = search_libraries(prefixes[i], name);
    return found;
}

/* The embedded host runtime is its own driver. */
void *kvp_driver_symbol(const char *name) {
    void *found = search_libraries("libcuda.so", name);
    return found ? found : search_libraries("libkvprobe_hostrt.so", name);
}

uintptr_t kvp_own_base(void) { return (uintptr_t)__ehdr_start; }

void *kvp_symbol_of(void *handle, const char *name) {
    if (handle == RTLD_NEXT) return real_dlsym()(RTLD_NEXT, name);
    void *found = real_dlsym()(RTLD_DEFAULT, name);
    if (!found || is_ours(found)) found = real_dlsym()(handle, name);
    return is_ours(found) ? NULL : found;
}

static int in_a_runtime(const void *function) {
    Dl_info info;
    return dladdr(function, &info) && info.dli_fname && strstr(info.dli_fname, "libcudart.so");
}

static void *resolve(const char *name, void *caller) {
    void *next = real_dlsym()(RTLD_NEXT, name);
    void *own = kvp_symbol_beside(caller, name);
    if (!next || !own || next == own) return next ? next : own;
    /* They differ. Another tool's wrapper behind us has to be called; another runtime (two CUDA versions in one
     * process) must not be. */
    return in_a_runtime(next) ? own : next;
}

__attribute__((noinline)) any_fn *kvp_real(struct wrapped *w, void *caller) {
    unsigned start = (unsigned)(((uintptr_t)caller >> 2) ^ ((uintptr_t)caller >> 9)) % SITES;
    for (unsigned i = 0; i < SITES; i++) {
        unsigned at = (start + i) % SITES;
        if (w->sites[at].caller == caller && w->sites[at].real) return w->sites[at].real;
        if (!w->sites[at].caller) break;
    }
    int was = errno;
    void *found = resolve(w->name, caller);
    if (!found) found = search_loaded(w->name);
    errno = was;
    if (!found) return NULL;
    for (unsigned i = 0; i < SITES; i++) {
        unsigned at = (start + i) % SITES;
        void *none = NULL;
        if (atomic_compare_exchange_strong(&w->sites[at].caller, &none, caller) || none == caller) {
            w->sites[at].real = (any_fn *)found;
            break;
        }
    }
    return (any_fn *)found;
}

void *kvp_wrap_pointer(struct wrapped *w, void *found) {
    if (!kvp_watch.on || !found || is_ours(found)) return found;
    for (int i = 0; i < BOUND; i++) {
        any_fn *none = NULL;
        if (w->real[i] == (any_fn *)found || atomic_compare_exchange_strong(&w->real[i], &none, (any_fn *)found) ||
            none == (any_fn *)found)
            return (void *)w->bound[i];
    }
    return found;
}

static __attribute__((noinline)) void *dlsym_of_ours(void *handle, struct wrapped *w, void *caller) {
    void *found = real_dlsym()(handle, w->name);
    if (!is_ours(found)) return kvp_wrap_pointer(w, found);
    /* The search met our own definition. Say that it exists only where it would exist without us: programs ask so
     * whether a runtime is new enough. */
    void *behind = resolve(w->name, caller);
    if (behind) return kvp_wrap_pointer(w, behind);
    /* NULL, and the message that belongs to it. Not a jump: RTLD_NEXT has to mean behind us here. */
    found = real_dlsym()(RTLD_NEXT, w->name);
    __asm__ volatile("" : "+r"(found));
    return found;
}

/* Must end in a jump, not a call, wherever the name is not ours: glibc finds what RTLD_NEXT and RTLD_DEFAULT mean from
 * the return address. (A test holds it.) */
CUDA_EXPORT void *dlsym(void *restrict handle, const char *restrict name);
CUDA_EXPORT NOT_SANITIZED void *dlsym(void *restrict handle, const char *restrict name) {
    if (unlikely(kvp_watch.attached)) kvp_redirect_new();
    if (unlikely(name[0] == 'c' && name[1] == 'u' && handle != RTLD_NEXT)) {
        struct wrapped *w = kvp_find_wrapped(name);
        if (w) return dlsym_of_ours(handle, w, __builtin_return_address(0));
    }
    return real_dlsym()(handle, name);
}

/* In place of dlopen while we are attached. A name without a path is searched where the caller's library says: there it
 * must end in a jump, and what it loaded is met at the next dlsym. */
void *kvp_dlopen(const char *file, int mode) {
    if (!kvp_watch.attached || !file || !strchr(file, '/') || strchr(file, '$')) return dlopen(file, mode);
    void *handle = dlopen(file, mode);
    kvp_redirect_new();
    return handle;
}
